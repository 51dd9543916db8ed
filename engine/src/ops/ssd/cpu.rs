//! The chunked scan on the CPU: heads in parallel, chunk after chunk, in f32.

use super::chunked::MOST_CHUNK;
use super::{Sizes, Ssd};
use crate::cpu::gemm::{Into, Mat, gemm};
use crate::cpu::math::{dot, exp};
use crate::cpu::{View, simd};
use crate::meta::block_stride;
use std::ops::Range;

/// One number for each position of a chunk.
type Row = [f32; MOST_CHUNK];

/// The inputs of a scan, and how it runs.
pub struct Inputs<'a> {
    pub s: Sizes,
    pub reverse: bool,
    pub chunks: usize,
    /// Positions of each chunk but the last.
    length: usize,
    x: &'a [f32],
    dt: &'a [f32],
    decay: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
    d: &'a [f32],
    /// Distance between time steps of x, B and C.
    steps: [usize; 3],
}

/// What a chunk's products need of its step sizes.
struct Decays {
    /// The sum of decays from the chunk's start to each position, itself included.
    sums: Row,
    dt: Row,
    /// Over the whole chunk.
    total: f32,
}

impl<'v> Inputs<'v> {
    pub fn new(x: &'v [View], reverse: bool, chunks: usize) -> Inputs<'v> {
        let steps = [0, 3, 4].map(|i| block_stride(x[i].shape, x[i].strides, 2).expect("blocks evenly apart"));
        let [x0, dt, decay, b, c, d] = [0, 1, 2, 3, 4, 5].map(|i| x[i].f32());
        let s = Sizes::new(x[0].shape, x[3].shape);
        Inputs { s, reverse, chunks, length: s.time.div_ceil(chunks), x: x0, dt, decay, b, c, d, steps }
    }

    /// The positions of chunk k, which is number k in the order of the scan.
    fn rows(&self, k: usize) -> Range<usize> {
        let (from, to) = (k * self.length, ((k + 1) * self.length).min(self.s.time));
        if self.reverse { self.s.time - to..self.s.time - from } else { from..to }
    }

    /// Offsets within a chunk of `count` positions, in the order of the scan.
    fn order(&self, count: usize) -> impl DoubleEndedIterator<Item = usize> + use<> {
        let reverse = self.reverse;
        (0..count).map(move |i| if reverse { count - 1 - i } else { i })
    }

    fn decays(&self, b: usize, h: usize, rows: &Range<usize>) -> Decays {
        let mut out = Decays { sums: [0.0; MOST_CHUNK], dt: [0.0; MOST_CHUNK], total: 0.0 };
        for i in self.order(rows.len()) {
            let at = (b * self.s.time + rows.start + i) * self.s.heads + h;
            out.dt[i] = self.dt[at];
            out.total += self.decay[at];
            out.sums[i] = out.total;
        }
        out
    }

    fn values(&self, b: usize, h: usize, t: usize) -> Mat<'v> {
        Mat { data: self.x, offset: (b * self.s.time + t) * self.steps[0] + h * self.s.p, row: self.steps[0], column: 1 }
    }

    fn value(&self, b: usize, h: usize, t: usize) -> &'v [f32] {
        &self.x[(b * self.s.time + t) * self.steps[0] + h * self.s.p..][..self.s.p]
    }

    fn enters(&self, b: usize, h: usize, t: usize) -> Mat<'v> {
        let at = (b * self.s.time + t) * self.steps[1] + h / self.s.shared_by() * self.s.n;
        Mat { data: self.b, offset: at, row: self.steps[1], column: 1 }
    }

    fn reads(&self, b: usize, h: usize, t: usize) -> Mat<'v> {
        let at = (b * self.s.time + t) * self.steps[2] + h / self.s.shared_by() * self.s.n;
        Mat { data: self.c, offset: at, row: self.steps[2], column: 1 }
    }

    /// exp(sum_i - sum_j) where i sees j, else 0; times `by(j)`.
    fn decayed(&self, scores: &mut [f32], count: usize, sums: &Row, by: impl Fn(usize) -> f32 + Copy) {
        let sees = Ssd { reverse: self.reverse };
        simd(
            #[inline(always)]
            || {
                for i in 0..count {
                    for (j, w) in scores[i * self.length..][..count].iter_mut().enumerate() {
                        let seen = crate::mutant!("ssd-sees-the-future", sees.sees(i, j), true);
                        *w *= if seen { exp(sums[i] - sums[j]) * by(j) } else { 0.0 };
                    }
                }
            },
        )
    }

    /// One head: y [time, p], and the state before every chunk [chunks, p, n] where it is kept. `temp` has `temporary` elements.
    pub fn forward(&self, b: usize, h: usize, y: &mut [f32], kept: &mut [f32], state: &mut [f32], temp: &mut [f32]) {
        let (Sizes { p, n, .. }, row) = (self.s, self.length);
        let (scores, temp) = temp.split_at_mut(row * row);
        state.fill(0.0);
        for k in 0..self.chunks {
            let rows = self.rows(k);
            let (count, t0) = (rows.len(), rows.start);
            let decays = self.decays(b, h, &rows);
            let out = &mut y[t0 * p..][..count * p];
            if !kept.is_empty() {
                kept[k * p * n..][..p * n].copy_from_slice(state);
            }
            gemm(out, p, Into::Replace, count, n, p, self.reads(b, h, t0), Mat::rows(state, n).t(), 1.0, false);
            for (i, out) in out.chunks_mut(p).enumerate() {
                let keep = exp(decays.sums[i]);
                let x = self.value(b, h, t0 + i);
                out.iter_mut().zip(x).for_each(|(y, x)| *y = *y * keep + self.d[h] * x);
            }
            gemm(scores, row, Into::Replace, count, n, count, self.reads(b, h, t0), self.enters(b, h, t0).t(), 1.0, false);
            self.decayed(scores, count, &decays.sums, |j| decays.dt[j]);
            gemm(out, p, Into::Add, count, count, p, Mat::rows(scores, row), self.values(b, h, t0), 1.0, false);
            let left = self.scaled(temp, count, |i| (self.value(b, h, t0 + i), decays.dt[i] * exp(decays.total - decays.sums[i])));
            advance(state, exp(decays.total), (p, count, n), left, self.enters(b, h, t0));
        }
    }

    /// Rows times a number each: [count, p].
    fn scaled<'t>(&self, temp: &'t mut [f32], count: usize, row: impl Fn(usize) -> (&'v [f32], f32)) -> Mat<'t> {
        let p = self.s.p;
        for (i, out) in temp[..count * p].chunks_mut(p).enumerate() {
            let (x, by) = row(i);
            out.iter_mut().zip(x).for_each(|(o, x)| *o = x * by);
        }
        Mat::rows(&temp[..count * p], p)
    }

    /// One head's gradients. dB and dC, [time, n], are added to.
    pub fn backward(&self, b: usize, h: usize, states: &[f32], dy: &'v [f32], out: &mut Head, work: &mut Shared) {
        let Sizes { time, heads, p, n, .. } = self.s;
        let (row, square) = (heads * p, self.length);
        let (scores, temp) = work.temp.split_at_mut(square * square);
        let (weights, temp) = temp.split_at_mut(square * square);
        let incoming = |t: usize| &dy[(b * time + t) * row + h * p..][..p];
        work.ahead.fill(0.0);
        for k in (0..self.chunks).rev() {
            let rows = self.rows(k);
            let (count, t0) = (rows.len(), rows.start);
            let Decays { sums, dt, total } = self.decays(b, h, &rows);
            let dys = Mat { data: dy, offset: (b * time + t0) * row + h * p, row, column: 1 };
            let start = &states[k * p * n..][..p * n];
            let after = |i: usize| exp(total - sums[i]);
            let (x, enters, reads) = (self.values(b, h, t0), self.enters(b, h, t0), self.reads(b, h, t0));
            // A decay is a factor of all that passes it: `past` is what a position has from earlier ones, less what later ones have from it; `left` is what it
            // adds to the state after the chunk. Large terms cancel in sums of `past`, so both sides come from the same products.
            let (mut past, mut left) = ([0.0f32; MOST_CHUNK], [0.0f32; MOST_CHUNK]);
            let through = exp(total) * dot(work.ahead, start);

            // dC. First only its part from the state, whose product with C is that of dy and this part of y.
            let dc = &mut temp[..count * n];
            gemm(dc, n, Into::Replace, count, p, n, dys, Mat::rows(start, n), 1.0, false);
            for (i, dc) in dc.chunks_mut(n).enumerate() {
                dc.iter_mut().for_each(|v| *v *= exp(sums[i]));
                past[i] = dot(dc, &self.c[reads.offset + i * reads.row..][..n]);
            }
            gemm(weights, square, Into::Replace, count, p, count, dys, x.t(), 1.0, false);
            self.decayed(weights, count, &sums, |j| dt[j]);
            gemm(dc, n, Into::Add, count, count, n, Mat::rows(weights, square), enters, 1.0, false);
            for (i, dc) in dc.chunks(n).enumerate() {
                work.dc[(t0 + i) * n..][..n].iter_mut().zip(dc).for_each(|(sum, v)| *sum += v);
            }

            // dB.
            let db = &mut work.db[t0 * n..][..count * n];
            gemm(db, n, Into::Add, count, count, n, Mat::rows(weights, square).t(), reads, 1.0, false);
            let values = self.scaled(temp, count, |i| (self.value(b, h, t0 + i), dt[i] * after(i)));
            gemm(db, n, Into::Add, count, p, n, values, Mat::rows(work.ahead, n), 1.0, false);

            // dx without its dt, whose product with x is the gradient with respect to dt as a factor.
            let dx = &mut out.dx[t0 * p..][..count * p];
            gemm(dx, p, Into::Replace, count, n, p, enters, Mat::rows(work.ahead, n).t(), 1.0, false);
            for (i, dx) in dx.chunks_mut(p).enumerate() {
                dx.iter_mut().for_each(|v| *v *= after(i));
                left[i] = dt[i] * dot(dx, self.value(b, h, t0 + i));
            }
            gemm(scores, square, Into::Replace, count, n, count, reads, enters.t(), 1.0, false);
            for i in 0..count {
                weights[i * square + i] = 0.0; // passes no decay
                let (scores, weights) = (&scores[i * square..][..count], &weights[i * square..][..count]);
                past[i] += dot(scores, weights);
                past.iter_mut().zip(scores).zip(weights).for_each(|((sum, s), w)| *sum -= s * w);
            }
            self.decayed(scores, count, &sums, |_| 1.0);
            gemm(dx, p, Into::Add, count, count, p, Mat::rows(scores, square).t(), dys, 1.0, false);
            let mut skip = 0.0;
            for (i, dx) in dx.chunks_mut(p).enumerate() {
                let (x, dy) = (self.value(b, h, t0 + i), incoming(t0 + i));
                out.ddt[t0 + i] = dot(dx, x);
                skip += dot(dy, x);
                dx.iter_mut().zip(dy).for_each(|(v, dy)| *v = *v * dt[i] + self.d[h] * dy);
            }

            let (mut earlier, mut later) = (0.0, through);
            for i in self.order(count) {
                out.decay[t0 + i] = earlier;
                earlier += crate::mutant!("ssd-gradient-ends-with-the-chunk", left[i], 0.0);
            }
            for i in self.order(count).rev() {
                later += past[i];
                out.decay[t0 + i] += later;
            }
            out.dd[k] = skip;
            let left = self.scaled(temp, count, |i| (incoming(t0 + i), exp(sums[i])));
            advance(work.ahead, exp(total), (p, count, n), left, reads);
        }
    }
}

/// Elements of temporary memory for a head whose chunks have this length: matrices of two positions, and rows of this width.
pub fn temporary(length: usize, matrices: usize, width: usize) -> usize {
    length * (matrices * length + width)
}

/// state [p, n] = keep * state + left^T right, where left is [count, p] and right [count, n].
fn advance(state: &mut [f32], keep: f32, (p, count, n): (usize, usize, usize), left: Mat, right: Mat) {
    state.iter_mut().for_each(|v| *v *= keep);
    gemm(state, n, Into::Add, p, count, n, left.t(), right, 1.0, false);
}

/// Gradients of one head: dx [time, p], ddt and that of the decay `[time]`, and what each chunk adds to dd.
pub struct Head<'a> {
    pub dx: &'a mut [f32],
    pub ddt: &'a mut [f32],
    pub decay: &'a mut [f32],
    pub dd: &'a mut [f32],
}

/// What the heads of a group share: dB and dC [time, n], the gradient with respect to the state [p, n], and temporary memory.
pub struct Shared<'a> {
    pub db: &'a mut [f32],
    pub dc: &'a mut [f32],
    pub ahead: &'a mut [f32],
    pub temp: &'a mut [f32],
}
