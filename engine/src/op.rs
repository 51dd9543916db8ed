//! What an operation is, and what the tests know about it.

use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io};
use crate::meta::{DType, Layout, Meta};
use crate::record::Var;
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

/// One gradient for each input; None where there is none to give.
pub type Grads<'g> = Vec<Option<Var<'g>>>;

/// The meaning of an operation. Everything else (checks, plans, benchmarks, the ledger) is made from this.
///
/// The CPU code sees f32, i32 and u8 only: the executor widens bf16 and f16 before the call and rounds once after it.
pub trait Op: Any + Debug + Send + Sync {
    fn name(&self) -> &'static str;

    /// Shapes and types of the outputs. Panics, with the shapes, where the inputs do not fit: a mistake in model code.
    fn infer(&self, x: &[Meta]) -> Vec<Meta>;

    fn cpu(&self, x: &[View], y: &mut [ViewMut], workspace: &mut [f32]);

    /// Gradients of the inputs from those of the outputs. Required: an op that has none says so with `no_gradient`.
    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g>;

    /// False for what has no vjp though its outputs are floats: gradients of ops, whose own are not written. Asking for a gradient
    /// through it is an error.
    fn differentiable(&self) -> bool {
        true
    }

    fn cost(&self, x: &[Meta]) -> Cost;

    /// Kernels and matrix products that compute the same on a GPU, in every float type the inputs may have.
    fn cuda(&self, io: &Io) -> Code;

    /// What a pass that computes in a narrow type (bf16) may do with an input or an output; `x`: the inputs as they are then, each rounded
    /// or kept. Required: an op that adds up many terms in its output, or reads a table of positions, loses digits if nobody asks it.
    fn precision(&self, at: Port, x: &[Meta]) -> Narrow;

    /// The same op with outputs of these types, where it can choose them.
    fn with_types(&self, _outputs: &[DType]) -> Option<Arc<dyn Op>> {
        None
    }

    /// The op without outputs that nobody reads, where it can do less without them. `read`: for each output, whether it is wanted.
    fn only(&self, _read: &[bool]) -> Option<Lean> {
        None
    }

    fn layout(&self, _input: usize) -> Layout {
        Layout::Contiguous
    }

    /// (input, output) pairs that share one buffer: such an output starts out holding its input's values, and the op
    /// reads them there (the input's own view is empty). Where the input is needed later, the plan copies it first.
    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![]
    }

    /// f32 elements of scratch memory that the CPU code wants.
    fn workspace(&self, _x: &[Meta]) -> usize {
        0
    }

    /// A view: the output is the input's memory, seen through other strides. `(offset, strides)` in elements, or None
    /// where these input strides do not allow it (then the input is copied first).
    fn alias(&self, _x: &Meta, _strides: &[usize]) -> Option<(usize, Vec<usize>)> {
        None
    }

    fn is_view(&self) -> bool {
        false
    }

    /// The output plus `into`, where the op can add to what is there for less than an addition costs. Gradients that meet
    /// are added this way.
    fn accumulate<'g>(&self, _x: &[Var<'g>], _out: usize, _into: Var<'g>) -> Option<Var<'g>> {
        None
    }

    /// Never runs as it is: a pass replaces it, or its unfused form does.
    fn is_composite(&self) -> bool {
        false
    }

    /// A fused op's meaning in plain ops. The tests compare the two, and a pass that is off records this instead.
    fn unfused<'g>(&self, _x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        None
    }
}

impl dyn Op {
    pub fn is<T: Op>(&self) -> Option<&T> {
        (self as &dyn Any).downcast_ref::<T>()
    }
}

/// An input or an output of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    In(usize),
    Out(usize),
}

/// What a pass in a narrow type may do with a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Narrow {
    /// Round it to the narrow type.
    Round,
    /// Nothing: an input stays in the type that it has, an output stays (or becomes) f32.
    Keep,
    /// It has the type of these inputs. Where they differ, the pass decides.
    Follow(Vec<usize>),
}

/// The answer of most ops to `Op::precision`: inputs may be rounded, outputs follow the first (or are f32 where `infer` makes them so).
pub fn rounded(at: Port) -> Narrow {
    match at {
        Port::In(_) => Narrow::Round,
        Port::Out(_) => Narrow::Follow(vec![0]),
    }
}

/// As `rounded`, but of the inputs only the first `n`; the others (weights of norms, tables, counters) are kept.
pub fn rounded_first(n: usize, at: Port) -> Narrow {
    match at {
        Port::In(k) if k >= n => Narrow::Keep,
        _ => rounded(at),
    }
}

/// An op that does less: see `Op::only`.
pub struct Lean {
    pub op: Arc<dyn Op>,
    /// Inputs that it still reads, by their old numbers; None: all.
    pub inputs: Option<Vec<usize>>,
    /// Outputs that it still has, by their old numbers.
    pub outputs: Vec<usize>,
}

impl Lean {
    /// The op has all of its inputs, and all outputs but the last of so many.
    pub fn without_last(op: impl Op, outputs: usize) -> Lean {
        Lean { op: Arc::new(op), inputs: None, outputs: (0..outputs - 1).collect() }
    }
}

/// For `vjp`: these inputs have no gradient, because the outputs are integers or the op is its own last step.
pub fn no_gradient<'g>(inputs: usize) -> Grads<'g> {
    vec![None; inputs]
}

/// What an op must do at least: arithmetic, and bytes moved when every input is read and every output written once.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    pub flops: u64,
    pub bytes: u64,
    /// Bound by memory traffic wherever it runs: cheap to do again, so `recompute` may.
    pub memory_bound: bool,
}

impl Cost {
    pub fn memory(bytes: usize) -> Cost {
        Cost { flops: 0, bytes: bytes as u64, memory_bound: true }
    }

    pub fn compute(flops: usize, bytes: usize) -> Cost {
        Cost { flops: flops as u64, bytes: bytes as u64, memory_bound: false }
    }
}

/// Numbers for one input of a case.
#[derive(Clone, Copy, Debug)]
pub enum Fill {
    /// Normal, unit variance.
    Normal,
    /// Normal, but no closer to 0 than 0.2: for ops with a kink there.
    AwayFromZero,
    /// In [0.5, 2]: for logarithms, roots and quotients.
    Positive,
    /// Distinct values in random order, far enough apart that a small step changes no order. Has no gradient.
    Distinct,
    /// As `Distinct`, with a gradient.
    Spread,
    /// Normal; the case gives it no gradient, and the check makes sure of that.
    Frozen,
    /// i32 in 0..n.
    Index(usize),
    /// i32 in 0..n, none twice.
    Rows(usize),
    /// As `Index`, one in eight being -1.
    Target(usize),
    /// As `Index`, seven in eight being -1, or all where n is 0.
    FewTargets(usize),
    /// i32: seed, seed, step, micro-batch, for ops that draw random numbers.
    Rng,
    /// u8: 0 or 1.
    Mask,
    /// u8: 0 to 255.
    Byte,
}

pub struct In(pub &'static [usize], pub Fill);

/// Inputs and what is recorded on them. From this alone come the gradient check, the repeatability check, fused against
/// unfused, and the benchmark.
pub struct Case {
    pub name: &'static str,
    pub inputs: &'static [In],
    pub build: for<'g> fn(&[Var<'g>]) -> Vec<Var<'g>>,
    /// A recipe's own shape, timed by `kiln bench ops`; too large for the gradient check.
    pub bench: bool,
    /// Roundings of a narrow type that a result may be off by, where that is more than usual, and why.
    pub roundings: Option<(f64, &'static str)>,
}

impl Case {
    pub const fn new(name: &'static str, inputs: &'static [In], build: for<'g> fn(&[Var<'g>]) -> Vec<Var<'g>>) -> Case {
        Case { name, inputs, build, bench: false, roundings: None }
    }

    pub const fn bench(mut self) -> Case {
        self.bench = true;
        self
    }

    /// Allows more roundings of a narrow type than usual, for a reason: something between is rounded, or large terms cancel.
    pub const fn rounds(mut self, times: f64, why: &'static str) -> Case {
        self.roundings = Some((times, why));
        self
    }
}

/// A line of the table OPS.
pub struct Entry {
    pub name: &'static str,
    pub about: &'static str,
    pub cases: &'static [Case],
}
