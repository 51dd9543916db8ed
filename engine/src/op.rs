//! The trait that every op implements, and the test cases that check and time it.

pub use crate::case::{Case, Entry, Fill, In};
pub use crate::ranks::{Axis, Share};

use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io};
use crate::meta::{DType, Layout, Meta};
use crate::ranks::Group;
use crate::record::Var;
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

/// One gradient for each input; None for inputs without one (integers, frozen tables).
pub type Grads<'g> = Vec<Option<Var<'g>>>;

/// An operation: shapes, CPU code, gradient, cost and GPU kernels. Checks, memory plans and benchmarks are derived from it.
///
/// The CPU code gets f32, i32 and u8 only: the executor converts bf16, f16 and FP8 to f32 before the call, and rounds once after it.
///
/// An op need not be right for a program to be safe. What it says of memory ([`Op::alias`], [`Op::reuse`], [`Op::is_view`], [`Op::workspace`], the shapes of
/// [`Op::infer`]) is checked when a program is loaded ([`Plan::verify`](crate::plan::Plan::verify)), and an op that contradicts itself is refused with an
/// error: every view must lie inside its input's buffer, outputs may overlap only what `reuse` names, and scratch memory is what was planned. The GPU's kernels
/// are not checked: [`Op::cuda`] vouches for them, as for any code that is given pointers.
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

    /// Kernels and GEMMs that compute the same on a GPU, for every float type that the inputs may have. Nothing checks that they stay inside of what they are
    /// given.
    fn cuda(&self, io: &Io) -> Code;

    /// Whether a mixed-precision pass (bf16, fp16, fp8) may round an input or output. `x`: the inputs as the pass would give them, rounded or kept. Required,
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

    /// f32 elements of scratch memory that the CPU code needs: the same number whenever it is asked.
    fn workspace(&self, _x: &[Meta]) -> usize {
        0
    }

    /// For a view, whose output is the input's memory with other strides: `(offset, strides)` in elements, or None if the input's strides do
    /// not allow it (then the input is copied first). What it says must lie in the input's buffer.
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

    /// Ways in which `parts` ranks can divide the work. None: every rank does all of it.
    fn axes(&self, _x: &[Meta], _parts: usize) -> Vec<Axis> {
        vec![]
    }

    /// The op for part `index` of `parts` along the axis of this number, if it differs from that for the whole.
    fn part(&self, _x: &[Meta], _axis: usize, _parts: usize, _index: usize) -> Option<Arc<dyn Op>> {
        None
    }

    /// For an op that works on many tensors apart: (inputs, outputs) that have the same shape and are computed element by element.
    fn apart(&self) -> Vec<(Vec<usize>, Vec<usize>)> {
        vec![]
    }

    /// Whether it has a way of its own to be computed from inputs of which a rank has these shares.
    fn is_divided(&self, _x: &[Meta], _have: &[Share], _parts: usize) -> bool {
        false
    }

    /// Records it in that way. Its outputs are the same on all ranks.
    fn divided<'g>(&self, _x: &[Var<'g>], _have: &[Share], _group: &Group) -> Option<Vec<Var<'g>>> {
        None
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
    /// Round it to 16 bits.
    Round,
    /// An operand of a GEMM: round it to 16 bits, or to 8.
    Eight,
    /// An operand of a GEMM that is not computed in FP8, and why: round it to 16 bits.
    Sixteen(&'static str),
    /// Leave it alone: an input keeps its type, an output is f32.
    Keep,
    /// Leave it alone, and do not round the operands of the GEMM that makes it to 8 bits; and why.
    Sensitive(&'static str),
    /// It is f32: what was rounded before, such as a frozen weight that is stored rounded, is cast back.
    F32,
    /// Give it the type of these inputs. If they differ, the pass decides.
    Follow(Vec<usize>),
}

/// [`Op::precision`] of most ops: inputs may be rounded, outputs have the first input's type.
pub fn rounded(at: Port) -> Narrow {
    if let Port::In(_) = at { Narrow::Round } else { Narrow::Follow(vec![0]) }
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
