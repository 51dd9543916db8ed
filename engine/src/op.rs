//! The trait that every op implements, and the test cases that check and time it.

use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io};
use crate::meta::{DType, Layout, Meta};
use crate::record::Var;
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

/// One gradient for each input; None for inputs without one (integers, frozen tables).
pub type Grads<'g> = Vec<Option<Var<'g>>>;

/// An operation: shapes, CPU code, gradient, cost and GPU kernels. Checks, memory plans and benchmarks are derived from it.
///
/// The CPU code gets f32, i32 and u8 only: the executor converts bf16, f16 and FP8 to f32 before the call, and rounds once after it.
pub trait Op: Any + Debug + Send + Sync {
    /// The name in profiles and error messages.
    fn name(&self) -> &'static str;

    /// Shapes and types of the outputs. Panics, naming the shapes, if the inputs do not fit: a mistake in model code.
    fn infer(&self, x: &[Meta]) -> Vec<Meta>;

    /// Computes the outputs on the CPU. `workspace` has as many elements as `Op::workspace` asks for.
    fn cpu(&self, x: &[View], y: &mut [ViewMut], workspace: &mut [f32]);

    /// Vector-Jacobian product: gradients with respect to the inputs, given those with respect to the outputs. An op without one returns
    /// [`no_gradient`].
    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g>;

    /// False for ops with float outputs but no vjp: the backward ops, since second derivatives are not supported. Differentiating through one
    /// is an error.
    fn differentiable(&self) -> bool {
        true
    }

    /// FLOPs and bytes for inputs of these shapes.
    fn cost(&self, x: &[Meta]) -> Cost;

    /// Kernels and GEMMs that compute the same on a GPU, for every float type that the inputs may have.
    fn cuda(&self, io: &Io) -> Code;

    /// Whether a mixed-precision pass (bf16) may round an input or output. `x`: the inputs as the pass would give them, rounded or kept. Required,
    /// since sums of many terms and tables of positions must not be rounded unnoticed.
    fn precision(&self, at: Port, x: &[Meta]) -> Narrow;

    /// The same op with outputs of these types, if it can produce them.
    fn with_types(&self, _outputs: &[DType]) -> Option<Arc<dyn Op>> {
        None
    }

    /// A cheaper op without the outputs that nothing reads, if there is one. `read`: for each output, whether it is read.
    fn only(&self, _read: &[bool]) -> Option<Lean> {
        None
    }

    /// Which strides the op accepts for an input.
    fn layout(&self, _input: usize) -> Layout {
        Layout::Contiguous
    }

    /// (input, output) pairs that share one buffer: the output's buffer initially holds the input's values, and the op overwrites them (the
    /// input's own view is empty). If the input is read later, the plan copies it first.
    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![]
    }

    /// f32 elements of scratch memory that the CPU code needs.
    fn workspace(&self, _x: &[Meta]) -> usize {
        0
    }

    /// For a view, whose output is the input's memory with other strides: `(offset, strides)` in elements, or None if the input's strides do
    /// not allow it (then the input is copied first).
    fn alias(&self, _x: &Meta, _strides: &[usize]) -> Option<(usize, Vec<usize>)> {
        None
    }

    /// Whether the op only changes shape and strides, and runs nothing.
    fn is_view(&self) -> bool {
        false
    }

    /// Output `out` plus `into`, if the op can accumulate for less than a separate addition costs. Used to sum gradients of one value.
    fn accumulate<'g>(&self, _x: &[Var<'g>], _out: usize, _into: Var<'g>) -> Option<Var<'g>> {
        None
    }

    /// Whether it never runs itself: a pass replaces it by a fused op, or `decompose` by its unfused form.
    fn is_composite(&self) -> bool {
        false
    }

    /// What a fused or composite op computes, in plain ops. Tests compare the two, and `decompose` records this.
    fn unfused<'g>(&self, _x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        None
    }
}

impl dyn Op {
    /// This op as a `T`, if it is one.
    pub fn is<T: Op>(&self) -> Option<&T> {
        (self as &dyn Any).downcast_ref::<T>()
    }
}

/// An input or an output of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// Input number.
    In(usize),
    /// Output number.
    Out(usize),
}

/// What a mixed-precision pass may do with an input or output of an op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Narrow {
    /// Round it to the narrow type.
    Round,
    /// Leave it alone: an input keeps its type, an output is f32.
    Keep,
    /// Give it the type of these inputs. If they differ, the pass decides.
    Follow(Vec<usize>),
}

/// [`Op::precision`] of most ops: inputs may be rounded, outputs have the first input's type.
pub fn rounded(at: Port) -> Narrow {
    match at {
        Port::In(_) => Narrow::Round,
        Port::Out(_) => Narrow::Follow(vec![0]),
    }
}

/// As [`rounded`], but only for the first `n` inputs; the others (norm weights, tables, counters) are kept.
pub fn rounded_first(n: usize, at: Port) -> Narrow {
    match at {
        Port::In(k) if k >= n => Narrow::Keep,
        _ => rounded(at),
    }
}

/// A cheaper op with fewer outputs: see [`Op::only`].
pub struct Lean {
    /// The cheaper op.
    pub op: Arc<dyn Op>,
    /// The inputs that it still reads, by their numbers in the old op; None: all.
    pub inputs: Option<Vec<usize>>,
    /// The outputs that it still has, by their numbers in the old op.
    pub outputs: Vec<usize>,
}

impl Lean {
    /// An op with all inputs, and all but the last of `outputs` outputs.
    pub fn without_last(op: impl Op, outputs: usize) -> Lean {
        Lean { op: Arc::new(op), inputs: None, outputs: (0..outputs - 1).collect() }
    }
}

/// For [`Op::vjp`]: no input has a gradient, because the outputs are integers or second derivatives are not supported.
pub fn no_gradient<'g>(inputs: usize) -> Grads<'g> {
    vec![None; inputs]
}

/// What an op must do at least: its arithmetic, and reading every input and writing every output once.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Whether memory bandwidth limits it everywhere, so that `recompute` may run it again cheaply.
    pub memory_bound: bool,
}

impl Cost {
    /// A memory-bound op.
    pub fn memory(bytes: usize) -> Cost {
        Cost { flops: 0, bytes: bytes as u64, memory_bound: true }
    }

    /// An op with enough arithmetic that it is not worth recomputing.
    pub fn compute(flops: usize, bytes: usize) -> Cost {
        Cost { flops: flops as u64, bytes: bytes as u64, memory_bound: false }
    }
}

/// How an input of a test case is filled.
#[derive(Clone, Copy, Debug)]
pub enum Fill {
    /// Normal, unit variance.
    Normal,
    /// Normal, but at least 0.2 away from 0: for ops that are not differentiable there.
    AwayFromZero,
    /// Between 0.5 and 2: for logarithms, roots and quotients.
    Positive,
    /// Distinct values in random order, far enough apart that finite differences do not change their order. Not differentiated.
    Distinct,
    /// As `Distinct`, but differentiated.
    Spread,
    /// Normal; the op must give it no gradient, which the check verifies.
    Frozen,
    /// i32 in 0..n.
    Index(usize),
    /// Distinct i32 in 0..n.
    Rows(usize),
    /// As `Index`, but one in eight is -1, as for rows without a target.
    Target(usize),
    /// As `Index`, but seven in eight are -1; all, if n is 0.
    FewTargets(usize),
    /// i32: seed, seed, step, micro-batch, for ops that draw random numbers.
    Rng,
    /// u8: 0 or 1.
    Mask,
    /// u8: 0 to 255.
    Byte,
}

/// Shape and filling of one input of a test case. Floats are f32.
pub struct In(pub &'static [usize], pub Fill);

/// A test case of an op: inputs, and what is recorded with them. It serves for the gradient check, the repeatability check, the comparison
/// of fused with unfused ops, and the benchmark.
pub struct Case {
    /// Its name in reports.
    pub name: &'static str,
    /// The inputs of `build`.
    pub inputs: &'static [In],
    /// Records the op on these inputs and returns what is compared.
    pub build: for<'g> fn(&[Var<'g>]) -> Vec<Var<'g>>,
    /// Whether this is a shape of a real model, timed by `kiln bench ops` and too large for the gradient check.
    pub bench: bool,
    /// By how many roundings of a narrow type a result may differ, if more than usual, and why.
    pub roundings: Option<(f64, &'static str)>,
    /// The least relative error that counts on a GPU, also in f32, and why.
    pub inexact: Option<(f64, &'static str)>,
}

impl Case {
    /// A small case for the checks.
    pub const fn new(name: &'static str, inputs: &'static [In], build: for<'g> fn(&[Var<'g>]) -> Vec<Var<'g>>) -> Case {
        Case { name, inputs, build, bench: false, roundings: None, inexact: None }
    }

    /// The same as a benchmark case.
    pub const fn bench(mut self) -> Case {
        self.bench = true;
        self
    }

    /// Allows this relative error on a GPU, also in f32, given a reason: its instructions do not compute in f32 throughout.
    pub const fn inexact(mut self, error: f64, why: &'static str) -> Case {
        self.inexact = Some((error, why));
        self
    }

    /// Allows a larger error in narrow types, given a reason: an intermediate value is rounded, or large terms cancel.
    pub const fn rounds(mut self, times: f64, why: &'static str) -> Case {
        self.roundings = Some((times, why));
        self
    }
}

/// A row of the table [`OPS`](crate::OPS).
pub struct Entry {
    /// The folder's name in `ops`.
    pub name: &'static str,
    /// What it computes, for `kiln check` and the documentation.
    pub about: &'static str,
    /// Its test cases.
    pub cases: &'static [Case],
}
