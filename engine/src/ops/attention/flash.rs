//! Flash attention on the CPU: tiles of queries and keys, with an online softmax.

use super::{Attention, check, kernels, score_flops};
use crate::cpu::gemm::{Into, Mat, gemm};
use crate::cpu::math::{dot, exp, max, sum};
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{Code, Io};
use crate::meta::{Layout, Meta, block_stride};
use crate::op::{self, Cost, Grads, Narrow, Op, Port, no_gradient};
use crate::record::Var;
use rayon::prelude::*;

/// Queries and keys of a tile: its scores (16 KiB) stay in the L1 cache.
const BLOCK: usize = 64;

/// Inputs: q, k, v, and perhaps `until` (see the module `attention`). Outputs: y, and the log-sum-exp of each row of scores [batch, heads, time].
#[derive(Debug)]
pub struct FlashAttention {
    /// Whether a position attends only to itself and earlier ones.
    pub causal: bool,
    /// Factor of the scores.
    pub scale: f32,
}

#[derive(Clone, Copy)]
struct Sizes<'a> {
    time: usize,
    keys: usize,
    heads: usize,
    kv: usize,
    d: usize,
    causal: bool,
    /// Distance between consecutive time steps [heads, d] of q, k and v, in elements.
    rows: [usize; 3],
    /// [batch, keys]: the last query that sees each key, if keys are masked.
    until: Option<&'a [i32]>,
}

impl<'x> Sizes<'x> {
    fn new(x: &'x [View], until: Option<&'x View>, causal: bool) -> Sizes<'x> {
        let (q, k) = (&x[0], &x[1]);
        let rows = [0, 1, 2].map(|i| block_stride(x[i].shape, x[i].strides, 2).expect("blocks evenly apart"));
        let until = until.map(|u| u.i32());
        Sizes { time: q.shape[1], keys: k.shape[1], heads: q.shape[2], kv: k.shape[2], d: q.shape[3], causal, rows, until }
    }

    fn group(&self) -> usize {
        self.heads / self.kv
    }

    /// How many keys query `t` may see by causality.
    fn seen(&self, t: usize) -> usize {
        if self.causal { crate::mutant!("attention-hides-a-query-from-itself", t + 1, t) + self.keys - self.time } else { self.keys }
    }

    /// `until` of the keys k0..k0 + count.
    fn limits(&self, b: usize, k0: usize, count: usize) -> Option<&'x [i32]> {
        self.until.map(|u| &u[b * self.keys + k0..][..count])
    }

    /// Head h of batch b of a tensor [batch, length, heads, d] from time t on, as a matrix [length, d].
    fn head<'a>(&self, x: &'a [f32], b: usize, length: usize, row: usize, h: usize, t: usize) -> Mat<'a> {
        Mat { data: x, offset: (b * length + t) * row + h * self.d, row, column: 1 }
    }

    fn query<'a>(&self, x: &'a [f32], b: usize, h: usize, t: usize) -> Mat<'a> {
        self.head(x, b, self.time, self.rows[0], h, t)
    }

    /// The same of dy, which is contiguous.
    fn gradient<'a>(&self, x: &'a [f32], b: usize, h: usize, t: usize) -> Mat<'a> {
        self.head(x, b, self.time, self.heads * self.d, h, t)
    }

    fn key<'a>(&self, x: &'a [f32], b: usize, h: usize, t: usize) -> Mat<'a> {
        self.head(x, b, self.keys, self.rows[1], h, t)
    }

    fn value<'a>(&self, x: &'a [f32], b: usize, h: usize, t: usize) -> Mat<'a> {
        self.head(x, b, self.keys, self.rows[2], h, t)
    }
}

impl Op for FlashAttention {
    fn name(&self) -> &'static str {
        "flash_attention"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check(x, self.causal);
        vec![x[0].clone(), Meta::f32(&[x[0].shape[0], x[0].shape[2], x[0].shape[1]])]
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        x[0].elements() // y as [batch, heads, time, d], before it is permuted
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], by_head: &mut [f32]) {
        let s = Sizes::new(x, x.get(3), self.causal);
        let (q, k, v) = (x[0].f32(), x[1].f32(), x[2].f32());
        let (y, lse) = y.split_at_mut(1);
        let tasks = by_head.par_chunks_mut(s.time * s.d).zip(lse[0].f32().par_chunks_mut(s.time));
        tasks.enumerate().for_each(|(i, (out, lse))| {
            let (b, h) = (i / s.heads, i % s.heads);
            for ((block, out), lse) in out.chunks_mut(BLOCK * s.d).enumerate().zip(lse.chunks_mut(BLOCK)) {
                forward_block(&s, self.scale, (q, k, v), b, h, block * BLOCK, out, lse);
            }
        });
        y[0].f32().par_chunks_mut(s.d).with_min_len(64).enumerate().for_each(|(i, out)| {
            let (h, t, b) = (i % s.heads, i / s.heads % s.time, i / s.heads / s.time);
            out.copy_from_slice(&by_head[((b * s.heads + h) * s.time + t) * s.d..][..s.d]);
        });
    }

    /// q, k and v may be column slices of one merged projection.
    fn layout(&self, input: usize) -> Layout {
        if input < 3 { Layout::Blocks(2) } else { Layout::Contiguous }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        kernels::forward(io, self.causal, self.scale)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return no_gradient(x.len()) };
        let inputs = [&x[..3], &[y[0], y[1], d], &x[3..]].concat();
        let grads = d.recorder().op(FlashAttentionGrad { causal: self.causal, scale: self.scale, joint: false }, &inputs);
        grads.into_iter().map(Some).chain(no_gradient(x.len() - 3)).collect()
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::compute(2 * score_flops(x, self.causal), 2 * x[0].bytes() + x[1].bytes() + x[2].bytes())
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        Attention { causal: self.causal, scale: self.scale }.unfused(x)
    }
}

/// Queries t0.. of one head: out [n, d] and lse [n].
#[allow(clippy::too_many_arguments)]
fn forward_block(
    s: &Sizes,
    scale: f32,
    (q, k, v): (&[f32], &[f32], &[f32]),
    b: usize,
    h: usize,
    t0: usize,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let n = lse.len();
    let mut scores = [0.0f32; BLOCK * BLOCK];
    let (mut top, mut total) = ([f32::NEG_INFINITY; BLOCK], [0.0f32; BLOCK]);
    out.fill(0.0);
    let last = s.seen(t0 + n - 1);
    for k0 in (0..last).step_by(BLOCK) {
        let m = BLOCK.min(last - k0);
        let limits = crate::mutant!("attention-sees-other-documents", s.limits(b, k0, m), None);
        if none_from(limits, t0) {
            continue;
        }
        let kv = h / s.group();
        gemm(&mut scores, BLOCK, Into::Replace, n, s.d, m, s.query(q, b, h, t0), s.key(k, b, kv, k0).t(), scale, false);
        simd(
            #[inline(always)]
            || {
                for r in 0..n {
                    let row = &mut scores[r * BLOCK..][..m];
                    let seen = s.seen(t0 + r).saturating_sub(k0).min(m);
                    let (live, rest) = row.split_at_mut(seen);
                    rest.fill(0.0);
                    if let Some(limits) = limits {
                        hide(live, limits, t0 + r, f32::NEG_INFINITY);
                    }
                    let high = max(&[top[r], max(live)]);
                    if high == f32::NEG_INFINITY {
                        live.fill(0.0); // no key seen yet
                        continue;
                    }
                    let shrink = exp(top[r] - high);
                    top[r] = high;
                    live.iter_mut().for_each(|x| *x = exp(*x - high));
                    total[r] = total[r] * shrink + sum(live, |x| x);
                    out[r * s.d..][..s.d].iter_mut().for_each(|x| *x *= shrink);
                }
            },
        );
        let weights = Mat { data: &scores, offset: 0, row: BLOCK, column: 1 };
        gemm(out, s.d, Into::Add, n, m, s.d, weights, s.value(v, b, kv, k0), 1.0, false);
    }
    for r in 0..n {
        let inverse = if total[r] > 0.0 { 1.0 / total[r] } else { 0.0 };
        out[r * s.d..][..s.d].iter_mut().for_each(|x| *x *= inverse);
        lse[r] = top[r] + total[r].ln();
    }
}

/// Whether no query from t0 on sees any of these keys.
fn none_from(limits: Option<&[i32]>, t0: usize) -> bool {
    limits.is_some_and(|l| l.iter().all(|&until| until < t0 as i32))
}

/// Writes `number` where a key is masked for query t.
#[inline(always)]
fn hide(row: &mut [f32], limits: &[i32], t: usize, number: f32) {
    row.iter_mut().zip(limits).for_each(|(x, &until)| *x = if until < t as i32 { number } else { *x });
}

/// Inputs: q, k, v, y, lse, dy, and perhaps `until`. Outputs: dq, dk, dv.
#[derive(Clone, Debug)]
pub struct FlashAttentionGrad {
    /// As in the forward op.
    pub causal: bool,
    /// As in the forward op.
    pub scale: f32,
    /// Whether the three are one tensor [batch, time, heads + 2 kv, d], each time step's dq before its dk and dv.
    pub joint: bool,
}

impl Op for FlashAttentionGrad {
    fn name(&self) -> &'static str {
        "flash_attention_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        if !self.joint {
            return x[..3].to_vec();
        }
        let (q, k) = (&x[0], &x[1]);
        assert!(q.shape[1] == k.shape[1] && q.dtype == k.dtype && k == &x[2], "dq, dk and dv of {q:?} and {k:?} as one tensor");
        vec![Meta::new(&[q.shape[0], q.shape[1], q.shape[2] + 2 * k.shape[2], q.shape[3]], q.dtype)]
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        x[..3].iter().map(|m| m.elements()).sum() // the gradients as [batch, heads, time, d]
    }

    fn cpu(&self, x: &[View], out: &mut [ViewMut], work: &mut [f32]) {
        let s = Sizes::new(x, x.get(6), self.causal);
        let (q, k, v) = (x[0].f32(), x[1].f32(), x[2].f32());
        let (y, lse, dy) = (x[3].f32(), x[4].f32(), x[5].f32());
        let elements = |i: usize| x[i].shape.iter().product();
        let (dq, rest) = work.split_at_mut(elements(0));
        let (dk, dv) = rest.split_at_mut(elements(1));
        // A task owns one key head and the query heads that read it, so that no two tasks accumulate into the same place.
        let (per_q, per_k) = (s.group() * s.time * s.d, s.keys * s.d);
        let tasks = dq.par_chunks_mut(per_q).zip(dk.par_chunks_mut(per_k)).zip(dv.par_chunks_mut(per_k));
        tasks.enumerate().for_each(|(i, ((dq, dk), dv))| {
            let (b, kv) = (i / s.kv, i % s.kv);
            dq.fill(0.0);
            dk.fill(0.0);
            dv.fill(0.0);
            for (g, dq) in dq.chunks_mut(s.time * s.d).enumerate() {
                let h = kv * s.group() + g;
                for t0 in (0..s.time).step_by(BLOCK) {
                    let n = BLOCK.min(s.time - t0);
                    let lse = &lse[(b * s.heads + h) * s.time + t0..][..n];
                    backward_block(&s, self.scale, (q, k, v, y, dy), lse, b, h, t0, &mut dq[t0 * s.d..][..n * s.d], dk, dv);
                }
            }
        });
        if self.joint {
            let all = s.heads + 2 * s.kv;
            out[0].f32().par_chunks_mut(s.d).with_min_len(64).enumerate().for_each(|(i, out)| {
                let (h, t, b) = (i % all, i / all % s.time, i / all / s.time);
                let (from, heads, h) = match h.checked_sub(s.heads) {
                    None => (&*dq, s.heads, h),
                    Some(kv) if kv < s.kv => (&*dk, s.kv, kv),
                    Some(kv) => (&*dv, s.kv, kv - s.kv),
                };
                out.copy_from_slice(&from[((b * heads + h) * s.time + t) * s.d..][..s.d]);
            });
            return;
        }
        // [batch, heads, length, d] -> [batch, length, heads, d]
        for ((out, by_head), (length, heads)) in
            out.iter_mut().zip([&*dq, &*dk, &*dv]).zip([(s.time, s.heads), (s.keys, s.kv), (s.keys, s.kv)])
        {
            out.f32().par_chunks_mut(s.d).with_min_len(64).enumerate().for_each(|(i, out)| {
                let (h, t, b) = (i % heads, i / heads % length, i / heads / length);
                out.copy_from_slice(&by_head[((b * heads + h) * length + t) * s.d..][..s.d]);
            });
        }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    /// q, k and v may be column slices of one merged projection.
    fn layout(&self, input: usize) -> Layout {
        if input < 3 { Layout::Blocks(2) } else { Layout::Contiguous }
    }

    fn cuda(&self, io: &Io) -> Code {
        kernels::backward(io, self.causal, self.scale)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::compute(5 * score_flops(x, self.causal), 4 * x[0].bytes() + 2 * (x[1].bytes() + x[2].bytes()))
    }
}

/// p = exp(scale q k^T - lse); dv += p^T dy; ds = p (dy v^T - row sum of dy y); dq += scale ds k; dk += scale ds^T q.
#[allow(clippy::too_many_arguments, clippy::type_complexity)]
fn backward_block(
    s: &Sizes,
    scale: f32,
    (q, k, v, y, dy): (&[f32], &[f32], &[f32], &[f32], &[f32]),
    lse: &[f32],
    b: usize,
    h: usize,
    t0: usize,
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) {
    let n = lse.len();
    let kv = h / s.group();
    let (mut p, mut ds) = ([0.0f32; BLOCK * BLOCK], [0.0f32; BLOCK * BLOCK]);
    let mut along = [0.0f32; BLOCK];
    for (r, a) in along[..n].iter_mut().enumerate() {
        let at = ((b * s.time + t0 + r) * s.heads + h) * s.d;
        *a = dot(&y[at..at + s.d], &dy[at..at + s.d]);
    }
    let last = s.seen(t0 + n - 1);
    for k0 in (0..last).step_by(BLOCK) {
        let m = BLOCK.min(last - k0);
        let limits = s.limits(b, k0, m);
        if none_from(limits, t0) {
            continue;
        }
        gemm(&mut p, BLOCK, Into::Replace, n, s.d, m, s.query(q, b, h, t0), s.key(k, b, kv, k0).t(), scale, false);
        gemm(&mut ds, BLOCK, Into::Replace, n, s.d, m, s.gradient(dy, b, h, t0), s.value(v, b, kv, k0).t(), 1.0, false);
        simd(
            #[inline(always)]
            || {
                for r in 0..n {
                    let seen = s.seen(t0 + r).saturating_sub(k0).min(m);
                    let (p, ds) = (&mut p[r * BLOCK..][..m], &mut ds[r * BLOCK..][..m]);
                    for i in 0..seen {
                        p[i] = exp(p[i] - lse[r]);
                        ds[i] = p[i] * (ds[i] - along[r]);
                    }
                    if let Some(limits) = limits {
                        hide(p, limits, t0 + r, 0.0);
                        hide(ds, limits, t0 + r, 0.0);
                    }
                    p[seen..].fill(0.0);
                    ds[seen..].fill(0.0);
                }
            },
        );
        let square = |data| Mat { data, offset: 0, row: BLOCK, column: 1 };
        gemm(&mut dv[k0 * s.d..], s.d, Into::Add, m, n, s.d, square(&p).t(), s.gradient(dy, b, h, t0), 1.0, false);
        gemm(dq, s.d, Into::Add, n, m, s.d, square(&ds), s.key(k, b, kv, k0), scale, false);
        let by_key = crate::mutant!("attention-gradient-without-scale", scale, 1.0);
        gemm(&mut dk[k0 * s.d..], s.d, Into::Add, m, n, s.d, square(&ds).t(), s.query(q, b, h, t0), by_key, false);
    }
}
