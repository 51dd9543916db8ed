//! Test cases of ops: what the gradient check, the comparison of CPU and GPU, and the benchmark run.

use crate::record::Var;

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
