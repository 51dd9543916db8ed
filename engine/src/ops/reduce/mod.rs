//! Sums and maxima along axes, in an order that does not depend on the number of threads.

use crate::cpu::{View, ViewMut, math, simd};
use crate::graph::Kind;
use crate::meta::Meta;
use crate::op::{Case, Cost, Fill, Grads, In, Op, no_gradient};
use crate::ops::full::Full;
use crate::record::Var;
use rayon::prelude::*;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reduction {
    Sum,
    Max,
}

/// Over one axis, which becomes 1.
#[derive(Debug)]
pub struct Reduce {
    pub how: Reduction,
    pub axis: usize,
}

/// Elements along the axis that one partial result covers: partial results are then added in order.
const BLOCK: usize = 512;
/// Output elements of one task.
const COLUMNS: usize = 1024;

impl Reduce {
    fn split(&self, shape: &[usize]) -> (usize, usize, usize) {
        (shape[..self.axis].iter().product(), shape[self.axis], shape[self.axis + 1..].iter().product())
    }
}

impl Op for Reduce {
    fn name(&self) -> &'static str {
        "reduce"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let mut shape = x[0].shape.clone();
        assert!(self.axis < shape.len(), "reduce axis {} of {:?}", self.axis, x[0]);
        shape[self.axis] = 1;
        vec![x[0].with(&shape)]
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        let (outer, n, inner) = self.split(&x[0].shape);
        outer * n.div_ceil(BLOCK) * inner
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], partial: &mut [f32]) {
        let (_, n, inner) = self.split(x[0].shape);
        let (x, y) = (x[0].f32(), y[0].f32());
        let blocks = n.div_ceil(BLOCK);
        let how = self.how;
        // partial [outer, blocks, inner], cut into rows of at most COLUMNS
        let width = inner.min(COLUMNS);
        let cut = |i: usize| (i / inner.div_ceil(width), i % inner.div_ceil(width) * width);
        let rows: Vec<(usize, &mut [f32])> = partial.chunks_mut(inner).flat_map(|r| r.chunks_mut(width)).enumerate().collect();
        rows.into_par_iter().for_each(|(i, out)| {
            let (block, column) = cut(i);
            let (o, b) = (block / blocks, block % blocks);
            let first = (o * n + b * BLOCK) * inner + column;
            let count = BLOCK.min(n - b * BLOCK);
            simd(
                #[inline(always)]
                || {
                    if inner == 1 {
                        let row = &x[first..first + count];
                        out[0] = if how == Reduction::Sum { math::sum(row, |v| v) } else { math::max(row) };
                        return;
                    }
                    out.copy_from_slice(&x[first..first + out.len()]);
                    for r in 1..count {
                        let row = &x[first + r * inner..][..out.len()];
                        match how {
                            Reduction::Sum => out.iter_mut().zip(row).for_each(|(a, &b)| *a += b),
                            Reduction::Max => out.iter_mut().zip(row).for_each(|(a, &b)| *a = if b > *a || b.is_nan() { b } else { *a }),
                        }
                    }
                },
            )
        });
        for (out, part) in y.chunks_mut(inner).zip(partial.chunks(blocks * inner)) {
            out.copy_from_slice(&part[..inner]);
            for p in part[inner..].chunks(inner) {
                for (a, &b) in out.iter_mut().zip(p) {
                    *a = match how {
                        Reduction::Sum => *a + b,
                        Reduction::Max => math::max(&[*a, b]),
                    };
                }
            }
        }
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        match self.how {
            Reduction::Sum => vec![dy[0].map(|d| d.expand(&x[0].shape()))],
            Reduction::Max => no_gradient(1), // used to shift a softmax, where the shift has none
        }
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: x[0].elements() as u64, ..Cost::memory(x[0].bytes() + self.infer(x)[0].bytes()) }
    }
}

impl<'g> Var<'g> {
    /// The axis stays, with one element.
    #[track_caller]
    pub fn sum_axis(self, axis: usize) -> Var<'g> {
        let n = self.shape()[axis];
        if n == 1 {
            return self;
        }
        let constant = self.recorder().with_graph(|g| match &g.nodes[self.value().node].kind {
            Kind::Op(op) => op.is::<Full>().map(|f| f.value),
            _ => None,
        });
        let op = Reduce { how: Reduction::Sum, axis };
        match constant {
            Some(c) => self.recorder().full(&op.infer(&[self.meta()])[0].shape, c * n as f32),
            None => self.recorder().op1(op, &[self]),
        }
    }

    #[track_caller]
    pub fn max_axis(self, axis: usize) -> Var<'g> {
        self.recorder().op1(Reduce { how: Reduction::Max, axis }, &[self])
    }

    /// Sum of everything: [1].
    pub fn sum(self) -> Var<'g> {
        self.reshape(&[self.meta().elements()]).sum_axis(0)
    }

    pub fn mean(self) -> Var<'g> {
        self.sum() * (1.0 / self.meta().elements() as f32)
    }

    #[track_caller]
    pub fn mean_axis(self, axis: usize) -> Var<'g> {
        self.sum_axis(axis) * (1.0 / self.shape()[axis] as f32)
    }

    /// The opposite of a broadcast: sums over what was repeated.
    #[track_caller]
    pub fn sum_to(self, shape: &[usize]) -> Var<'g> {
        let full = self.shape();
        if full == shape {
            return self;
        }
        let pad = full.len() - shape.len();
        let repeated = |d: usize| full[d] != 1 && (d < pad || shape[d - pad] == 1);
        // Neighbouring repeated dimensions are summed as one.
        let mut v = self;
        let mut d = full.len();
        while d > 0 {
            let end = d;
            while d > 0 && repeated(d - 1) {
                d -= 1;
            }
            if d == end {
                d -= 1;
                continue;
            }
            let now = v.shape();
            let merged = [&now[..d], &[now[d..end].iter().product()], &now[end..]].concat();
            let ones = [&now[..d], &vec![1; end - d], &now[end..]].concat();
            v = v.reshape(&merged).sum_axis(d).reshape(&ones);
        }
        v.reshape(shape)
    }
}

pub const CASES: &[Case] = &[
    Case::new("rows", &[In(&[7, 1031], Fill::Normal)], |x| vec![x[0].sum_axis(1)]),
    Case::new("columns", &[In(&[1031, 7], Fill::Normal)], |x| vec![x[0].sum_axis(0)]),
    Case::new("middle", &[In(&[3, 5, 4], Fill::Normal)], |x| vec![x[0].mean_axis(1)]),
    Case::new("maximum", &[In(&[3, 5, 4], Fill::Normal), In(&[3, 5, 4], Fill::Frozen)], |x| vec![x[1].max_axis(1) * x[0]]),
    Case::new("sum_to", &[In(&[2, 3, 4, 5], Fill::Normal)], |x| vec![x[0].sum_to(&[3, 1, 1]), x[0].sum_to(&[1, 3, 4, 1]), x[0].sum()]),
    Case::new("wide columns", &[In(&[3, 2500], Fill::Normal)], |x| vec![x[0].sum_axis(0)]),
    Case::new("bias gradient", &[In(&[65536, 768], Fill::Normal)], |x| vec![x[0].sum_axis(0)]).bench(),
];
