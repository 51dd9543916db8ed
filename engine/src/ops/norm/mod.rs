//! RMS norm (with or without a weight) and layer norm (without: a weight is a pointwise op after it), over the last dimension. Both keep one
//! number per row, rstd, for the backward pass. `add` fuses the residual addition before an RMS norm.

pub mod add;
pub mod affine;
pub mod columns;
pub(crate) mod gpu;
pub mod residual;

use crate::cpu::math::{dot, sum};
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{Code, Io};
use crate::meta::{DType, Meta};
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Lean, Narrow, Op, Port, Share, no_gradient};
use crate::record::Var;
use gpu::Inputs;
use rayon::prelude::*;

/// Rows of one task, and of one partial sum of a weight's gradient: a constant, so that the order of additions is always the same.
const ROWS: usize = 64;

/// y = x / sqrt(mean(x^2) + eps), times the weight if there is one. Outputs: y, and 1 / sqrt(..) `[rows]`.
#[derive(Debug)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f32,
}

/// y = (x - mean) / sqrt(variance + eps). Outputs: y, and 1 / sqrt(..) `[rows]`.
#[derive(Debug)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f32,
}

fn norm_metas(x: &[Meta], what: &str) -> Vec<Meta> {
    assert!(x[0].rank() >= 1 && x.get(1).is_none_or(|w| w.shape == [x[0].dim(0)]), "{what} of {x:?}");
    vec![x[0].clone(), Meta::f32(&[x[0].rows()])]
}

fn norm_axes(x: &[Meta]) -> Vec<Axis> {
    let axis = |d: usize| Axis::new([Share::Dim(d), Share::Whole][..x.len()].to_vec(), [Share::Dim(d), Share::Own]);
    (0..x[0].rank() - 1).map(axis).collect()
}

/// Calls `f(row, its slice, its statistic)` for all rows, in parallel.
fn each_row(width: usize, y: &mut [f32], statistic: &mut [f32], f: impl Fn(usize, &mut [f32], &mut f32) + Sync) {
    y.par_chunks_mut(ROWS * width).zip(statistic.par_chunks_mut(ROWS)).enumerate().for_each(|(task, (y, s))| {
        simd(
            #[inline(always)]
            || {
                for (r, (y, s)) in y.chunks_mut(width).zip(s).enumerate() {
                    f(task * ROWS + r, y, s);
                }
            },
        )
    });
}

fn two_outputs<'a>(y: &'a mut [ViewMut]) -> (&'a mut [f32], &'a mut [f32]) {
    let (a, b) = y.split_at_mut(1);
    (a[0].f32(), b[0].f32())
}

impl Op for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        norm_metas(x, "rms_norm")
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let d = x[0].dim(0);
        let data = x[0].f32();
        let weight = x.get(1).map(|w| w.f32());
        let (y, rstd) = two_outputs(y);
        each_row(
            d,
            y,
            rstd,
            #[inline(always)]
            |row, y, rstd| {
                let x = &data[row * d..][..d];
                let mean = sum(x, |v| v * v) / d as f32;
                let r = 1.0 / crate::mutant!("rms-norm-eps-outside-the-root", (mean + self.eps).sqrt(), mean.sqrt() + self.eps);
                *rstd = r;
                match weight {
                    Some(w) => y.iter_mut().zip(x).zip(w).for_each(|((y, &x), &w)| *y = x * r * w),
                    None => y.iter_mut().zip(x).for_each(|(y, &x)| *y = x * r),
                }
            },
        );
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded_first(1, at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let weight = (io.x.len() > 1).then_some(1);
        gpu::forward(io, Inputs { weight, ..Inputs::default() }, self.eps, false)
    }

    /// All dimensions but the one that is normalised. The statistic is for the gradient alone.
    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        norm_axes(x)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return no_gradient(x.len()) };
        let inputs = [&[x[0], y[1], d], &x[1..]].concat();
        d.recorder().op(RmsNormGrad { dw: x.len() > 1, ..RmsNormGrad::default() }, &inputs).into_iter().map(Some).collect()
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 4 * x[0].elements() as u64, ..Cost::memory(2 * x[0].bytes()) }
    }
}

/// Inputs: x, rstd, dy, the weight if there is one, and with `add` a tensor to add to dx. Outputs: dx, with `dw` the weight's gradient, and with `y`
/// the norm's result, recomputed.
#[derive(Clone, Debug, Default)]
pub struct RmsNormGrad {
    /// Whether another gradient of x is added to dx (the pass `gemm-epilogue`).
    pub add: bool,
    /// Whether the weight's gradient is an output.
    pub dw: bool,
    /// Whether the norm's result is recomputed as an output (the pass `recompute`).
    pub y: bool,
}

impl RmsNormGrad {
    fn weight(&self, inputs: usize) -> bool {
        inputs > 3 + self.add as usize
    }
}

impl Op for RmsNormGrad {
    fn name(&self) -> &'static str {
        "rms_norm_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(!self.dw || self.weight(x.len()), "rms_norm_grad of {x:?}: a weight's gradient without a weight");
        [&x[..1], if self.dw { &x[3..4] } else { &[] }, if self.y { &x[..1] } else { &[] }].concat()
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        if self.dw { x[0].rows().div_ceil(ROWS) * x[0].dim(0) } else { 0 }
    }

    fn cpu(&self, x: &[View], out: &mut [ViewMut], partial: &mut [f32]) {
        let d = x[0].dim(0);
        let (data, rstd, dy) = (x[0].f32(), x[1].f32(), x[2].f32());
        let weight = self.weight(x.len()).then(|| x[3].f32());
        let more = self.add.then(|| x[x.len() - 1].f32());
        // If there is nothing to sum, the tasks get empty slices.
        let mut pieces: Vec<&mut [f32]> = if self.dw { partial.chunks_mut(d).collect() } else { vec![] };
        pieces.resize_with(rstd.len().div_ceil(ROWS), || &mut []);
        out[0].f32().par_chunks_mut(ROWS * d).zip(pieces).enumerate().for_each(|(task, (dx, dw))| {
            simd(
                #[inline(always)]
                || {
                    dw.fill(0.0);
                    for (r, dx) in dx.chunks_mut(d).enumerate() {
                        let row = task * ROWS + r;
                        let (x, dy, s) = (&data[row * d..][..d], &dy[row * d..][..d], rstd[row]);
                        rms_row(x, s, dy, weight, dx, dw);
                        if let Some(more) = more {
                            dx.iter_mut().zip(&more[row * d..][..d]).for_each(|(o, &m)| *o += m);
                        }
                    }
                },
            )
        });
        if self.dw {
            add_pieces(partial, out[1].f32());
        }
        if self.y {
            norm_again(data, rstd, weight, out[out.len() - 1].f32());
        }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn only(&self, read: &[bool]) -> Option<Lean> {
        // The gradient of a frozen weight.
        (self.dw && read.len() == 2 && !read[1]).then(|| Lean::without_last(RmsNormGrad { dw: false, ..self.clone() }, read.len()))
    }

    fn cuda(&self, io: &Io) -> Code {
        let weight = self.weight(io.x.len()).then_some(3);
        let more = self.add.then(|| io.x.len() - 1);
        gpu::backward(io, Inputs { rstd: 1, dy: 2, weight, more, y: self.y, ..Inputs::default() }, false)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 8 * x[0].elements() as u64, ..Cost::memory((3 + self.add as usize + self.y as usize) * x[0].bytes()) }
    }
}

/// dx of one row; and adds its part of the weight's gradient, unless that slice is empty.
#[inline(always)]
pub(crate) fn rms_row(x: &[f32], rstd: f32, dy: &[f32], weight: Option<&[f32]>, dx: &mut [f32], dw: &mut [f32]) {
    match weight {
        Some(w) => {
            dx.iter_mut().zip(dy).zip(w).for_each(|((o, &g), &w)| *o = g * w);
            dw.iter_mut().zip(x).zip(dy).for_each(|((o, &x), &g)| *o += g * (x * rstd));
        }
        None => dx.copy_from_slice(dy),
    }
    let mean = dot(dx, x) * rstd * rstd / x.len() as f32;
    dx.iter_mut().zip(x).for_each(|(o, &x)| *o = (*o - x * mean) * rstd);
}

/// y = x rstd, times the weight if there is one: bitwise what the norm computed.
fn norm_again(x: &[f32], rstd: &[f32], weight: Option<&[f32]>, y: &mut [f32]) {
    let d = x.len() / rstd.len();
    y.par_chunks_mut(d).zip(x.par_chunks(d)).zip(rstd).with_min_len(ROWS).for_each(|((y, x), &r)| match weight {
        Some(w) => y.iter_mut().zip(x).zip(w).for_each(|((y, &x), &w)| *y = x * r * w),
        None => y.iter_mut().zip(x).for_each(|(y, &x)| *y = x * r),
    });
}

/// Adds rows of partial sums, in order.
pub(crate) fn add_pieces(pieces: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for piece in pieces.chunks(out.len()) {
        out.iter_mut().zip(piece).for_each(|(o, &p)| *o += p);
    }
}

impl Op for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        norm_metas(x, "layer_norm")
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let d = x[0].dim(0);
        let data = x[0].f32();
        let (y, rstd) = two_outputs(y);
        each_row(
            d,
            y,
            rstd,
            #[inline(always)]
            |row, y, rstd| {
                let x = &data[row * d..][..d];
                let mean = sum(x, |v| v) / d as f32;
                let r = 1.0 / (sum(x, |v| (v - mean) * (v - mean)) / d as f32 + self.eps).sqrt();
                *rstd = r;
                y.iter_mut().zip(x).for_each(|(y, &x)| *y = (x - mean) * r);
            },
        );
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded_first(1, at)
    }

    fn cuda(&self, io: &Io) -> Code {
        gpu::forward(io, Inputs::default(), self.eps, true)
    }

    /// All dimensions but the one that is normalised. The statistic is for the gradient alone.
    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        norm_axes(x)
    }

    fn vjp<'g>(&self, _: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![dy[0].map(|d| d.recorder().op1(LayerNormGrad, &[y[0], y[1], d]))]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 6 * x[0].elements() as u64, ..Cost::memory(2 * x[0].bytes()) }
    }
}

/// dx = rstd (dy - mean(dy) - y mean(dy y)). Inputs: y, rstd, dy.
#[derive(Debug)]
pub struct LayerNormGrad;

impl Op for LayerNormGrad {
    fn name(&self) -> &'static str {
        "layer_norm_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        vec![x[0].clone()]
    }

    fn cpu(&self, x: &[View], dx: &mut [ViewMut], _: &mut [f32]) {
        let d = x[0].dim(0);
        let (y, rstd, dy) = (x[0].f32(), x[1].f32(), x[2].f32());
        dx[0].f32().par_chunks_mut(ROWS * d).enumerate().for_each(|(task, dx)| {
            simd(
                #[inline(always)]
                || {
                    for (r, dx) in dx.chunks_mut(d).enumerate() {
                        let row = task * ROWS + r;
                        let (y, dy) = (&y[row * d..][..d], &dy[row * d..][..d]);
                        let mean = crate::mutant!("layer-norm-gradient-without-mean", sum(dy, |v| v) / d as f32, 0.0);
                        let along = dot(dy, y) / d as f32;
                        for i in 0..d {
                            dx[i] = rstd[row] * (dy[i] - mean - y[i] * along);
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
        gpu::backward(io, Inputs { rstd: 1, dy: 2, ..Inputs::default() }, true)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 8 * x[0].elements() as u64, ..Cost::memory(3 * x[0].bytes()) }
    }
}

impl<'g> Var<'g> {
    /// x / sqrt(mean(x^2) + eps) * weight
    #[track_caller]
    pub fn rms_norm(self, weight: Var<'g>, eps: f32) -> Var<'g> {
        let weight = if weight.dtype() == self.dtype() { weight } else { weight.cast(self.dtype()) };
        self.recorder().op(RmsNorm { eps }, &[self, weight])[0]
    }

    /// x / sqrt(mean(x^2) + eps)
    #[track_caller]
    pub fn rms_norm_plain(self, eps: f32) -> Var<'g> {
        self.recorder().op(RmsNorm { eps }, &[self])[0]
    }

    /// Layer norm with weight and bias `[d]`.
    #[track_caller]
    pub fn layer_norm_affine(self, weight: Var<'g>, bias: Var<'g>, eps: f32) -> Var<'g> {
        self.recorder().op(affine::AffineLayerNorm { eps }, &[self, weight, bias])[0]
    }

    /// (x - mean) / sqrt(variance + eps)
    #[track_caller]
    pub fn layer_norm(self, eps: f32) -> Var<'g> {
        self.recorder().op(LayerNorm { eps }, &[self])[0]
    }
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("rms", &[In(&[2, 67, 33], Fill::Normal), In(&[33], Fill::Normal)], |x| vec![x[0].rms_norm(x[1], 1e-6)]),
    Case::new("rms small heads", &[In(&[3, 7, 16], Fill::Normal)], |x| vec![x[0].rms_norm_plain(1e-6)]),
    Case::new("rms long rows", &[In(&[5, 1100], Fill::Normal), In(&[1100], Fill::Normal)], |x| vec![x[0].rms_norm(x[1], 1e-6)]),
    Case::new("layer", &[In(&[67, 21], Fill::Normal)], |x| vec![x[0].layer_norm(1e-5)]),
    Case::new("layer, affine", &[In(&[3, 67, 33], Fill::Normal), In(&[33], Fill::Normal), In(&[33], Fill::Normal)], |x| {
        vec![x[0].layer_norm_affine(x[1], x[2], 1e-5)]
    }),
    Case::new("layer, affine, packed rows", &[In(&[67, 64], Fill::Normal), In(&[64], Fill::Normal), In(&[64], Fill::Normal)], |x| {
        vec![x[0].layer_norm_affine(x[1], x[2], 1e-5)]
    }),
    Case::new("layer, affine, long rows", &[In(&[5, 1100], Fill::Normal), In(&[1100], Fill::Normal), In(&[1100], Fill::Normal)], |x| {
        vec![x[0].layer_norm_affine(x[1], x[2], 1e-5)]
    }),
    Case::new(
        "layer, affine, another gradient added",
        &[
            In(&[67, 64], Fill::Frozen),
            In(&[67], Fill::Frozen),
            In(&[67, 64], Fill::Frozen),
            In(&[64], Fill::Frozen),
            In(&[67, 64], Fill::Frozen),
        ],
        |x| {
            let statistics = x[1].cast(DType::F32);
            let inputs = [x[0], statistics, statistics, x[2], x[3], x[4]];
            x[0].recorder().op(affine::AffineLayerNormGrad { add: true }, &inputs)
        },
    ),
    Case::new("layer, affine, gpt2", &[In(&[65536, 768], Fill::Normal), In(&[768], Fill::Normal), In(&[768], Fill::Normal)], |x| {
        vec![x[0].layer_norm_affine(x[1], x[2], 1e-5)]
    })
    .bench(),
    Case::new("layer, some columns", &[In(&[3, 67, 40], Fill::Frozen)], |x| vec![x[0].layer_norm_columns(1e-5, 7)]),
    Case::new("layer, all columns of long rows", &[In(&[5, 1101], Fill::Frozen)], |x| vec![x[0].layer_norm_columns(1e-5, 1101)]),
    Case::new("a row added", &[In(&[2, 67, 33], Fill::Normal), In(&[33], Fill::Normal), In(&[33], Fill::Normal)], |x| {
        vec![add::norm_sum(x, false)[0]]
    }),
    Case::new("a row added to long rows", &[In(&[7, 1100], Fill::Normal), In(&[1, 1100], Fill::Normal), In(&[1100], Fill::Normal)], |x| {
        vec![add::norm_sum(x, false)[0]]
    }),
    Case::new("rows added", &[In(&[70, 24], Fill::Normal), In(&[70, 24], Fill::Normal), In(&[24], Fill::Normal)], |x| {
        vec![add::norm_sum(x, false)[0]]
    }),
    Case::new(
        "rows added, room beside them",
        &[In(&[2, 35, 24], Fill::Frozen), In(&[2, 35, 24], Fill::Frozen), In(&[24], Fill::Frozen)],
        |x| {
            let y = x[0].recorder().op(add::AddRmsNorm { eps: 1e-6, sum: true, room: 8 }, x);
            vec![y[0].slice(2, 0, 24), y[1], y[2]]
        },
    ),
    Case::new("rms of a sum, no weight", &[In(&[5, 24], Fill::Normal), In(&[5, 24], Fill::Normal)], |x| {
        let y = add::norm_sum(x, true);
        vec![y[0], y[2]]
    }),
    Case::new("rows added and kept", &[In(&[3, 23, 40], Fill::Normal), In(&[3, 23, 40], Fill::Normal), In(&[40], Fill::Normal)], |x| {
        let y = add::norm_sum(x, true);
        vec![y[0], y[2]]
    }),
    Case::new(
        "gradient and what was normed",
        &[
            In(&[70, 24], Fill::Frozen),
            In(&[70], Fill::Frozen),
            In(&[70, 24], Fill::Frozen),
            In(&[24], Fill::Frozen),
            In(&[70, 24], Fill::Frozen),
        ],
        |x| {
            let inputs = [x[0], x[1].cast(DType::F32), x[2], x[3], x[4]];
            x[0].recorder().op(RmsNormGrad { add: true, dw: false, y: true }, &inputs)
        },
    ),
    Case::new(
        "gradient of a sum, and what was normed",
        &[
            In(&[9, 1100], Fill::Frozen),
            In(&[9, 1100], Fill::Frozen),
            In(&[9], Fill::Frozen),
            In(&[9, 1100], Fill::Frozen),
            In(&[1100], Fill::Frozen),
        ],
        |x| {
            let inputs = [x[0], x[1], x[2].cast(DType::F32), x[3], x[4]];
            x[0].recorder().op(add::AddRmsNormGrad { sum: true, dw: true, y: true }, &inputs)
        },
    ),
    Case::new("where layers meet", &[In(&[3, 23, 40], Fill::Normal), In(&[3, 23, 40], Fill::Normal)], |x| {
        let y = x[0].recorder().op(residual::ResidualNorm { eps: 1e-5 }, x);
        vec![y[1], y[2]]
    }),
    Case::new("where the last layer ends, odd", &[In(&[67, 21], Fill::Normal), In(&[67, 21], Fill::Normal)], |x| {
        vec![x[0].recorder().op(residual::ResidualNorm { eps: 1e-5 }, x)[2]]
    }),
    Case::new("where long layers meet", &[In(&[5, 1100], Fill::Normal), In(&[5, 1100], Fill::Normal)], |x| {
        vec![x[0].recorder().op(residual::ResidualNorm { eps: 1e-5 }, x)[1]]
    }),
    Case::new("where layers meet, stream", &[In(&[8320, 192], Fill::Normal), In(&[8320, 192], Fill::Normal)], |x| {
        let y = x[0].recorder().op(residual::ResidualNorm { eps: 1e-5 }, x);
        vec![y[1], y[2]]
    })
    .bench(),
    Case::new("rms stream", &[In(&[65536, 768], Fill::Normal), In(&[768], Fill::Normal)], |x| vec![x[0].rms_norm(x[1], 1e-6)]).bench(),
    Case::new("layer stream, 8 columns", &[In(&[65536, 512], Fill::Frozen)], |x| vec![x[0].layer_norm_columns(1e-5, 8)]).bench(),
    Case::new("layer stream", &[In(&[65536, 768], Fill::Normal)], |x| vec![x[0].layer_norm(1e-5)]).bench(),
    Case::new("a row added, stream", &[In(&[16384, 768], Fill::Normal), In(&[1, 768], Fill::Normal), In(&[768], Fill::Normal)], |x| {
        vec![add::norm_sum(x, false)[0]]
    })
    .bench(),
    Case::new("rows added, stream", &[In(&[8192, 1024], Fill::Normal), In(&[8192, 1024], Fill::Normal), In(&[1024], Fill::Normal)], |x| {
        let y = add::norm_sum(x, true);
        vec![y[0], y[2]]
    })
    .bench(),
];
