//! Attention without softmax, scale or mask, with keys equal to queries and values shared by all heads: q = rope(xs), s = q q^T,
//! y = layer_norm(s v). Model code records these ops; the pass `linear-attention` fuses them.
//!
//! xs [batch, time, heads, n]; cosines and sines [time, n / 2], for pairs of neighbours; v [batch, time, d]; y [heads, batch, time, d],
//! heads outermost, as the next matmul reads them. s is kept for the backward pass, its rows padded with zeros to a multiple of 8.
//! s is symmetric, so with dr the gradient before the norm, dq = (dr v^T + v dr^T) q.

mod kernels;
mod plain;

use super::norm::LayerNorm;
use super::norm::residual::{grad_row, norm_row};
use super::rope::{Pairs, rotate};
use crate::cpu::gemm::{Into, Mat, gemm};
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{Code, Io};
use crate::meta::{DType, Meta};
use crate::op::{self, Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use crate::record::Var;
use rayon::prelude::*;

/// Inputs: xs, cosines, sines, v. Outputs: y; 1 / sqrt(..) of its rows [heads * batch * time], if there is a norm; s.
#[derive(Debug)]
pub struct LinearAttention {
    /// Epsilon of the layer norm, if there is one.
    pub eps: Option<f32>,
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    time: usize,
    heads: usize,
    n: usize,
    d: usize,
}

impl Sizes {
    fn new(xs: &[usize], v: &[usize]) -> Sizes {
        Sizes { batch: xs[0], time: xs[1], heads: xs[2], n: xs[3], d: v[2] }
    }

    fn of(x: &[Meta]) -> Sizes {
        Sizes::new(&x[0].shape, &x[3].shape)
    }

    /// Elements of a row of s.
    fn square(&self) -> usize {
        self.time.next_multiple_of(8)
    }

    /// FLOPs of a matmul of all heads' [time, time] scores with [time, width].
    fn flops(&self, width: usize) -> usize {
        2 * self.batch * self.heads * self.time * self.time * width
    }

    /// Head `h` of batch element `b` of s.
    fn scores<'a>(&self, s: &'a [f32], b: usize, h: usize) -> Mat<'a> {
        Mat::rows(s, self.square()).at((b * self.heads + h) * self.time * self.square())
    }

    /// The matrix of v.
    fn values<'a>(&self, v: &'a [f32], b: usize) -> Mat<'a> {
        Mat::rows(v, self.d).at(b * self.time * self.d)
    }

    /// q = rope(xs): [batch, heads, time, n].
    fn queries(&self, xs: &[f32], cos: &[f32], sin: &[f32], q: &mut [f32]) {
        q.par_chunks_mut(self.time * self.n).enumerate().for_each(|(i, q)| {
            let (b, h) = (i / self.heads, i % self.heads);
            simd(
                #[inline(always)]
                || {
                    for (t, row) in q.chunks_mut(self.n).enumerate() {
                        row.copy_from_slice(&xs[((b * self.time + t) * self.heads + h) * self.n..][..self.n]);
                        rotate(Pairs::Adjacent, 1.0, row, t, cos, sin);
                    }
                },
            )
        });
    }
}

impl Op for LinearAttention {
    fn name(&self) -> &'static str {
        "linear_attention"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let [xs, cos, sin, v] = x else { panic!("linear_attention of {x:?}") };
        let fits = xs.rank() == 4 && v.rank() == 3 && xs.shape[..2] == v.shape[..2] && xs.dtype == v.dtype && xs.dtype.is_float();
        assert!(fits && cos == sin && xs.dim(0) % 2 == 0 && cos.shape == [xs.shape[1], xs.dim(0) / 2], "linear_attention of {x:?}");
        let s = Sizes::of(x);
        let mut y = vec![xs.with(&[s.heads, s.batch, s.time, s.d])];
        y.extend(self.eps.map(|_| Meta::f32(&[s.heads * s.batch * s.time])));
        y.push(xs.with(&[s.batch, s.heads, s.time, s.square()]));
        y
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        x[0].elements() // q
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], q: &mut [f32]) {
        let s = Sizes::new(x[0].shape, x[3].shape);
        let (Sizes { time, n, d, .. }, v) = (s, x[3].f32());
        let [y, rstd @ .., scores] = y else { unreachable!("infer gives two outputs or three") };
        s.queries(x[0].f32(), x[1].f32(), x[2].f32(), q);
        scores.f32().par_chunks_mut(time * s.square()).zip(q.par_chunks(time * n)).for_each(|(scores, q)| {
            scores.fill(0.0);
            gemm(scores, s.square(), Into::Replace, time, n, time, Mat::rows(q, n), Mat::rows(q, n).t(), 1.0, false);
        });
        let scores = &*scores.f32();
        y.f32().par_chunks_mut(time * d).enumerate().for_each(|(i, r)| {
            let (h, b) = (i / s.batch, i % s.batch);
            gemm(r, d, Into::Replace, time, time, d, s.scores(scores, b, h), s.values(v, b), 1.0, false);
        });
        if let (Some(eps), [rstd]) = (self.eps, rstd) {
            let rows = y.f32().par_chunks_mut(d).zip(rstd.f32());
            rows.with_min_len(64).for_each(|(y, rstd)| {
                simd(
                    #[inline(always)]
                    || *rstd = norm_row(y, eps),
                )
            });
        }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        match at {
            Port::In(1 | 2) => Narrow::Keep,
            _ => op::rounded(at),
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        kernels::forward(io, self.eps).unwrap_or_else(|| plain::forward(io, self.eps))
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return no_gradient(x.len()) };
        let norm = self.eps.is_some();
        let inputs = [x, if norm { &y[..2] } else { &[] }, &[y[y.len() - 1], d]].concat();
        let grads = d.recorder().op(LinearAttentionGrad { norm, add: false, relu: false }, &inputs);
        vec![Some(grads[0]), None, None, Some(grads[1])] // RoPE tables have no gradient
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let s = Sizes::of(x);
        let bytes: usize = x.iter().chain(&self.infer(x)).map(|m| m.bytes()).sum();
        Cost::compute(s.flops(s.n) + s.flops(s.d), bytes)
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let s = Sizes::of(&x.iter().map(|v| v.meta()).collect::<Vec<_>>());
        let q = x[0].rope(Pairs::Adjacent, (x[1], x[2])).permute(&[0, 2, 1, 3]);
        let r = q.matmul(q.t()).matmul(x[3].reshape(&[s.batch, 1, s.time, s.d])).permute(&[1, 0, 2, 3]);
        Some(match self.eps {
            Some(eps) => r.recorder().op(LayerNorm { eps }, &[r]),
            None => vec![r],
        })
    }
}

/// Inputs: xs, cosines, sines, v; with `norm` y and rstd; s, dy; with `add` a tensor to add to dxs. Outputs: dxs, dv.
#[derive(Clone, Copy, Debug)]
pub struct LinearAttentionGrad {
    /// Whether the forward op ended with a layer norm.
    pub norm: bool,
    /// Whether a last input is added to the gradient of the heads.
    pub add: bool,
    /// Whether ReLU's gradient is applied too: dxs is 0 where xs, ReLU's output, is not positive.
    pub relu: bool,
}

impl LinearAttentionGrad {
    /// The indices of s, dy and the added tensor among the inputs.
    fn places(&self) -> (usize, usize, usize) {
        let s = if self.norm { 6 } else { 4 };
        (s, s + 1, s + 2)
    }
}

impl Op for LinearAttentionGrad {
    fn name(&self) -> &'static str {
        "linear_attention_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let (_, dy, more) = self.places();
        assert!(x.len() == dy + 1 + self.add as usize && (!self.add || x[more].shape == x[0].shape), "{self:?} of {x:?}");
        vec![x[0].clone(), x[3].clone()]
    }

    /// q, dr, and the gradients of the scores.
    fn workspace(&self, x: &[Meta]) -> usize {
        let (s, dy, _) = self.places();
        x[0].elements() + x[dy].elements() + x[s].rows() * Sizes::of(x).time
    }

    fn cpu(&self, x: &[View], out: &mut [ViewMut], work: &mut [f32]) {
        let s = Sizes::new(x[0].shape, x[3].shape);
        let Sizes { batch, time, heads, n, d } = s;
        let (at_s, at_dy, at_more) = self.places();
        let (xs, cos, sin, v, scores) = (x[0].f32(), x[1].f32(), x[2].f32(), x[3].f32(), x[at_s].f32());
        let more = self.add.then(|| x[at_more].f32());
        let (q, work) = work.split_at_mut(xs.len());
        let (dr, squares) = work.split_at_mut(x[at_dy].f32().len());
        s.queries(xs, cos, sin, q);
        dr.copy_from_slice(x[at_dy].f32());
        if self.norm {
            let (y, rstd) = (x[4].f32(), x[5].f32());
            dr.par_chunks_mut(d).zip(y.par_chunks(d)).zip(rstd).with_min_len(64).for_each(|((g, y), &rstd)| {
                simd(
                    #[inline(always)]
                    || grad_row(g, y, rstd),
                )
            });
        }
        let (dr, q) = (&*dr, &*q);
        let dr = |b: usize, h: usize| Mat::rows(dr, d).at((h * batch + b) * time * d);
        let [dxs, dv] = out else { unreachable!("infer gives two outputs") };
        dv.f32().par_chunks_mut(time * d).enumerate().for_each(|(b, dv)| {
            for h in 0..heads {
                let into = if h == 0 { Into::Replace } else { Into::Add };
                gemm(dv, d, into, time, time, d, s.scores(scores, b, h), dr(b, h), 1.0, false);
            }
        });
        squares.par_chunks_mut(time * time).enumerate().for_each(|(i, square)| {
            let (b, h) = (i / heads, i % heads);
            gemm(square, time, Into::Replace, time, d, time, dr(b, h), s.values(v, b).t(), 1.0, false);
            gemm(square, time, Into::Add, time, d, time, s.values(v, b), dr(b, h).t(), 1.0, false);
        });
        dxs.f32().par_chunks_mut(time * heads * n).enumerate().for_each(|(b, dxs)| {
            for h in 0..heads {
                let (square, q) = (&squares[(b * heads + h) * time * time..][..time * time], &q[(b * heads + h) * time * n..][..time * n]);
                gemm(&mut dxs[h * n..], heads * n, Into::Replace, time, time, n, Mat::rows(square, time), Mat::rows(q, n), 1.0, false);
            }
            simd(
                #[inline(always)]
                || {
                    for (i, row) in dxs.chunks_mut(n).enumerate() {
                        rotate(Pairs::Adjacent, -1.0, row, i / heads, cos, sin);
                        let at = (b * time * heads + i) * n;
                        if let Some(more) = more {
                            row.iter_mut().zip(&more[at..]).for_each(|(g, &m)| *g += m);
                        }
                        if self.relu {
                            row.iter_mut().zip(&xs[at..]).for_each(|(g, &x)| *g = if x > 0.0 { *g } else { 0.0 });
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
        kernels::backward(io, self).unwrap_or_else(|| plain::backward(io, self))
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let s = Sizes::of(x);
        let bytes: usize = x.iter().chain(&self.infer(x)).map(|m| m.bytes()).sum();
        Cost::compute(s.flops(s.n) + 3 * s.flops(s.d), bytes)
    }
}

/// For the cases: inputs xs and v.
fn attend<'g>(x: &[Var<'g>], eps: Option<f32>) -> Vec<Var<'g>> {
    let (cos, sin) = x[0].recorder().rope_tables(x[0].shape()[1], x[0].dim(0), 100.0);
    x[0].recorder().op(LinearAttention { eps }, &[x[0], cos, sin, x[1]])[..1].to_vec()
}

macro_rules! sizes {
    ($b:literal, $t:literal, $h:literal, $n:literal, $d:literal) => {
        &[In(&[$b, $t, $h, $n], Fill::Normal), In(&[$b, $t, $d], Fill::Normal)]
    };
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("odd", sizes!(2, 5, 3, 6, 7), |x| attend(x, Some(1.0))),
    Case::new("odd, no norm", sizes!(1, 9, 2, 4, 3), |x| attend(x, None)),
    Case::new("tiles", sizes!(2, 17, 3, 48, 32), |x| attend(x, Some(1e-3))),
    Case::new("tiles, no norm", sizes!(3, 33, 1, 24, 16), |x| attend(x, None)),
    Case::new("one tile more", sizes!(1, 65, 2, 80, 48), |x| attend(x, Some(1e-3))),
    Case::new("tiles in pairs", sizes!(1, 20, 6, 136, 64), |x| attend(x, Some(1e-3))),
    Case::new("one row", sizes!(2, 1, 4, 16, 16), |x| attend(x, None)),
    Case::new("longer than tiles go", sizes!(1, 90, 2, 16, 16), |x| attend(x, Some(1e-3))),
    Case::new("vision_bdh", sizes!(128, 65, 6, 1024, 192), |x| attend(x, Some(1e-5))).bench(),
];
