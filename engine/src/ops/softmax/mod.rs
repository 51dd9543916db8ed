//! Softmax over the last dimension, with or without a causal mask over the last two.

use crate::cpu::math::{dot, exp, max, sum};
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{Code, Io};
use crate::meta::Meta;
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share, no_gradient};
use crate::ops::reduce::packs::Rows;
use crate::record::Var;
use rayon::prelude::*;

/// Rows of one task.
const ROWS: usize = 16;

/// Softmax along the last dimension.
#[derive(Debug)]
pub struct Softmax {
    /// A causal mask: row i of [.., rows, columns] has columns up to i + columns - rows; the others become 0.
    pub causal: bool,
}

impl Softmax {
    fn seen(&self, shape: &[usize], row: usize) -> usize {
        let (rows, columns) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        if self.causal { row % rows + columns - rows + 1 } else { columns }
    }
}

impl Op for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(x[0].rank() >= 2 && (!self.causal || x[0].dim(0) >= x[0].dim(1)), "softmax of {:?}", x[0]);
        vec![x[0].clone()]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let columns = x[0].dim(0);
        let data = x[0].f32();
        y[0].f32().par_chunks_mut(ROWS * columns).enumerate().for_each(|(task, out)| {
            simd(
                #[inline(always)]
                || {
                    for (r, out) in out.chunks_mut(columns).enumerate() {
                        let row = task * ROWS + r;
                        let seen = self.seen(x[0].shape, row);
                        softmax_row(&data[row * columns..][..seen], &mut out[..seen]);
                        out[seen..].fill(0.0);
                    }
                },
            )
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let (d, dtype) = (io.x[0].dim(0), io.x[0].dtype);
        let rows = Rows::new(d, &[dtype]);
        rows.launch(include_str!("softmax.cu"), "softmax", d)
            .define_type("T", dtype)
            .define("ROWS", io.x[0].rows())
            .define("CAUSAL", self.causal as u8)
            .define("SQUARE", io.x[0].dim(1))
            .grid(io.x[0].rows().div_ceil(rows.groups), 1, 1)
            .all(io)
            .code()
    }

    /// Rows, unless what a row sees depends on its place.
    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        let rows = x[0].rank() - 1 - self.causal as usize;
        (0..rows).map(|d| Axis::new([Share::Dim(d)], [Share::Dim(d)])).collect()
    }

    fn vjp<'g>(&self, _: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![dy[0].map(|d| d.recorder().op1(SoftmaxGrad, &[y[0], d]))]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 8 * x[0].elements() as u64, ..Cost::memory(2 * x[0].bytes()) }
    }
}

#[inline(always)]
fn softmax_row(x: &[f32], y: &mut [f32]) {
    let m = max(x);
    y.iter_mut().zip(x).for_each(|(o, &v)| *o = exp(v - m));
    let scale = 1.0 / sum(y, |v| v);
    y.iter_mut().for_each(|o| *o *= scale);
}

/// dx = y (dy - sum of y dy). Inputs: y, dy.
#[derive(Debug)]
pub struct SoftmaxGrad;

impl Op for SoftmaxGrad {
    fn name(&self) -> &'static str {
        "softmax_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        vec![x[0].clone()]
    }

    fn cpu(&self, x: &[View], dx: &mut [ViewMut], _: &mut [f32]) {
        let columns = x[0].dim(0);
        let (y, dy) = (x[0].f32(), x[1].f32());
        dx[0].f32().par_chunks_mut(ROWS * columns).enumerate().for_each(|(task, out)| {
            simd(
                #[inline(always)]
                || {
                    for (r, out) in out.chunks_mut(columns).enumerate() {
                        let at = (task * ROWS + r) * columns;
                        let (y, dy) = (&y[at..at + columns], &dy[at..at + columns]);
                        let s = crate::mutant!("softmax-gradient-without-its-sum", dot(y, dy), 0.0);
                        for i in 0..columns {
                            out[i] = y[i] * (dy[i] - s);
                        }
                    }
                },
            )
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let (d, types) = (io.x[0].dim(0), [io.x[0].dtype, io.x[1].dtype]);
        let rows = Rows::new(d, &types);
        rows.launch(include_str!("grad.cu"), "softmax_grad", d)
            .define_type("T", types[0])
            .define_type("G", types[1])
            .define("ROWS", io.x[0].rows())
            .grid(io.x[0].rows().div_ceil(rows.groups), 1, 1)
            .all(io)
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 4 * x[0].elements() as u64, ..Cost::memory(3 * x[0].bytes()) }
    }
}

impl<'g> Var<'g> {
    /// Softmax along the last dimension.
    #[track_caller]
    pub fn softmax(self) -> Var<'g> {
        self.recorder().op1(Softmax { causal: false }, &[self])
    }

    /// Softmax with a causal mask over the last two dimensions, aligned at the last row and column.
    #[track_caller]
    pub fn causal_softmax(self) -> Var<'g> {
        self.recorder().op1(Softmax { causal: true }, &[self])
    }
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("rows", &[In(&[5, 37], Fill::Normal)], |x| vec![x[0].softmax()]),
    Case::new("causal", &[In(&[2, 5, 7], Fill::Normal)], |x| vec![x[0].causal_softmax()]),
    Case::new("scores", &[In(&[96, 1024, 1024], Fill::Normal)], |x| vec![x[0].causal_softmax()]).bench(),
];
