//! RMS norm of a sum, fused. The sum itself is written only if something else reads it.

use super::gpu::{self, Inputs};
use super::{ROWS, RmsNorm, RmsNormGrad, add_pieces, each_row, norm_again, norm_metas, rms_row};
use crate::cpu::math::sum;
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{Code, Io};
use crate::meta::Meta;
use crate::op::{self, Cost, Grads, Lean, Narrow, Op, Port, no_gradient};
use crate::record::Var;
use rayon::prelude::*;

/// y = rms_norm(a + b) * weight. Inputs: a [.., d]; b, of the same shape or one row; perhaps a weight `[d]`.
/// Outputs: y, rstd `[rows]`, and with `sum` (b of a's shape) a + b. Without a weight, the gradient needs `sum`.
#[derive(Clone, Debug)]
pub struct AddRmsNorm {
    /// Added to the mean square.
    pub eps: f32,
    /// Whether the sum is an output too.
    pub sum: bool,
    /// Extra columns of y that are left unwritten: the pass `lora-forward` puts LoRA activations there.
    pub room: usize,
}

/// Whether `shape` is one row of `d`, which broadcasts over all others.
pub fn is_row(shape: &[usize], d: usize) -> bool {
    shape.last() == Some(&d) && shape.iter().product::<usize>() == d
}

/// a + b row by row, where b has rows of its own or one for all.
struct Terms<'a> {
    a: &'a [f32],
    b: &'a [f32],
    d: usize,
}

impl Terms<'_> {
    #[inline(always)]
    fn write(&self, row: usize, to: &mut [f32]) {
        let d = self.d;
        let b = if self.b.len() == d { self.b } else { &self.b[row * d..][..d] };
        to.iter_mut().zip(&self.a[row * d..][..d]).zip(b).for_each(|((o, &a), &b)| *o = a + b);
    }
}

impl Op for AddRmsNorm {
    fn name(&self) -> &'static str {
        "add_rms_norm"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let fits = x[1].shape == x[0].shape || (!self.sum && is_row(&x[1].shape, x[0].dim(0)));
        assert!(matches!(x.len(), 2 | 3) && fits && self.room.is_multiple_of(8), "add_rms_norm of {x:?}, {self:?}");
        let mut y = norm_metas(&[&x[..1], &x[2..]].concat(), "add_rms_norm");
        *y[0].shape.last_mut().expect("rows") += self.room;
        if self.sum {
            y.push(x[0].clone());
        }
        y
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let d = x[0].dim(0);
        let terms = Terms { a: x[0].f32(), b: x[1].f32(), d };
        let weight = x.get(2).map(|w| w.f32());
        let [y, rstd, kept @ ..] = y else { unreachable!("infer gives two outputs or three") };
        if let [kept] = kept {
            kept.f32().par_chunks_mut(d).enumerate().for_each(|(row, s)| terms.write(row, s));
        }
        each_row(
            d + self.room,
            y.f32(),
            rstd.f32(),
            #[inline(always)]
            |row, y, rstd| {
                let y = &mut y[..d];
                terms.write(row, y);
                let r = 1.0 / (sum(y, |v| v * v) / d as f32 + self.eps).sqrt();
                *rstd = r;
                match weight {
                    Some(w) => y.iter_mut().zip(w).for_each(|(y, &w)| *y = *y * r * w),
                    None => y.iter_mut().for_each(|y| *y *= r),
                }
            },
        );
    }

    fn precision(&self, at: Port, x: &[Meta]) -> Narrow {
        // A broadcast row keeps its type.
        match at {
            Port::In(1) if x[1].shape != x[0].shape => Narrow::Keep,
            _ => op::rounded_first(2, at),
        }
    }

    fn only(&self, read: &[bool]) -> Option<Lean> {
        // Nothing but the norm reads the sum.
        (self.sum && !read[2]).then(|| Lean::without_last(AddRmsNorm { sum: false, ..self.clone() }, read.len()))
    }

    fn cuda(&self, io: &Io) -> Code {
        gpu::forward(io, Inputs { term: Some(1), weight: (io.x.len() > 2).then_some(2), ..Inputs::default() }, self.eps, false)
    }

    fn differentiable(&self) -> bool {
        self.room == 0
    }

    /// If the sum was written, the gradient reads it instead of the two terms.
    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let ds = dy.get(2).copied().flatten();
        if x.len() == 2 {
            let through = |d: Var<'g>| {
                assert!(self.sum, "without a weight, add_rms_norm needs `sum` for its gradient");
                d.recorder().op1(RmsNormGrad { add: ds.is_some(), ..RmsNormGrad::default() }, &[&[y[2], y[1], d], ds.as_slice()].concat())
            };
            let ds = dy[0].map(through).or(ds);
            return vec![ds, ds.map(|d| d.cast(x[1].dtype()))];
        }
        let (ds, rest) = match (dy[0], ds) {
            (None, ds) => (ds, [None, None]),
            (Some(d), ds) => {
                let r = d.recorder();
                let all = match (self.sum, ds) {
                    (false, _) => r.op(AddRmsNormGrad { sum: false, dw: true, y: false }, &[x[0], x[1], y[1], d, x[2]]),
                    (true, None) => r.op(RmsNormGrad { dw: true, ..RmsNormGrad::default() }, &[y[2], y[1], d, x[2]]),
                    (true, Some(ds)) => r.op(AddRmsNormGrad { sum: true, dw: true, y: false }, &[y[2], ds, y[1], d, x[2]]),
                };
                (Some(all[0]), [Some(all[1]), all.get(2).copied()])
            }
        };
        let of_b = match x[1].shape() == x[0].shape() {
            true => ds.map(|d| d.cast(x[1].dtype())),
            false => rest[1],
        };
        vec![ds, of_b, rest[0]]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let outputs = if self.sum { 2 } else { 1 };
        Cost { flops: 5 * x[0].elements() as u64, ..Cost::memory((1 + outputs) * x[0].bytes() + x[1].bytes()) }
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let s = x[0] + x[1];
        let mut y = s.recorder().op(RmsNorm { eps: self.eps }, &[&[s], &x[2..]].concat());
        y[0] = y[0].pad(y[0].shape().len() - 1, 0, self.room);
        y.extend(self.sum.then_some(s));
        Some(y)
    }
}

/// Inputs: a, b, rstd, dy, weight; or, with `sum`, a + b and its gradient from other readers instead of a and b.
/// Outputs: gradients with respect to a + b, with `dw` the weight, and b if it is one row; with `y` also the norm's result, recomputed.
#[derive(Clone, Debug)]
pub struct AddRmsNormGrad {
    /// Whether the first two inputs are the sum and its gradient from other readers.
    pub sum: bool,
    /// Whether the weight's gradient is an output. Always, if b is one row.
    pub dw: bool,
    /// Whether the norm's result is recomputed as an output (the pass `recompute`); needs `sum`.
    pub y: bool,
}

impl AddRmsNormGrad {
    fn row(&self, x: &[Meta]) -> bool {
        x[1].shape != x[0].shape
    }
}

impl Op for AddRmsNormGrad {
    fn name(&self) -> &'static str {
        "add_rms_norm_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let row = if self.row(x) { &x[1..2] } else { &[] };
        assert!(self.dw || row.is_empty(), "add_rms_norm_grad of {x:?}: a row's gradient without the weight's");
        assert!(self.sum || !self.y, "add_rms_norm_grad of {x:?}: the norm of a sum that is not there");
        [&x[..1], if self.dw { &x[4..] } else { &[] }, row, if self.y { &x[..1] } else { &[] }].concat()
    }

    /// For each task: partial sums of the gradients of the weight and of b, and one row.
    fn workspace(&self, x: &[Meta]) -> usize {
        3 * x[0].rows().div_ceil(ROWS) * x[0].dim(0)
    }

    fn cpu(&self, x: &[View], out: &mut [ViewMut], workspace: &mut [f32]) {
        let d = x[0].dim(0);
        let terms = Terms { a: x[0].f32(), b: x[1].f32(), d };
        let (rstd, dy, weight) = (x[2].f32(), x[3].f32(), x[4].f32());
        let (sums, scratch) = workspace.split_at_mut(workspace.len() / 3 * 2);
        let (dw, db) = sums.split_at_mut(sums.len() / 2);
        let pieces = dw.par_chunks_mut(d).zip(db.par_chunks_mut(d)).zip(scratch.par_chunks_mut(d));
        out[0].f32().par_chunks_mut(ROWS * d).zip(pieces).enumerate().for_each(|(task, (dx, ((dw, db), s)))| {
            simd(
                #[inline(always)]
                || {
                    dw.fill(0.0);
                    db.fill(0.0);
                    for (r, dx) in dx.chunks_mut(d).enumerate() {
                        let row = task * ROWS + r;
                        match self.sum {
                            true => s.copy_from_slice(&terms.a[row * d..][..d]),
                            false => terms.write(row, s),
                        }
                        rms_row(s, rstd[row], &dy[row * d..][..d], Some(weight), dx, dw);
                        match self.sum {
                            true => dx.iter_mut().zip(&terms.b[row * d..]).for_each(|(o, &more)| *o += more),
                            false => db.iter_mut().zip(&*dx).for_each(|(o, &g)| *o += g),
                        }
                    }
                },
            )
        });
        if self.dw {
            add_pieces(dw, out[1].f32());
        }
        if x[1].shape != x[0].shape {
            add_pieces(db, out[2].f32());
        }
        if self.y {
            norm_again(terms.a, rstd, Some(weight), out[out.len() - 1].f32());
        }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn only(&self, read: &[bool]) -> Option<Lean> {
        // The gradient of a frozen weight.
        (self.dw && read.len() == 2 && !read[1]).then(|| Lean::without_last(AddRmsNormGrad { dw: false, ..self.clone() }, read.len()))
    }

    fn cuda(&self, io: &Io) -> Code {
        let (term, more) = if self.sum { (None, Some(1)) } else { (Some(1), None) };
        gpu::backward(io, Inputs { term, more, rstd: 2, dy: 3, weight: Some(4), y: self.y }, false)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 10 * x[0].elements() as u64, ..Cost::memory((3 + self.y as usize) * x[0].bytes() + x[1].bytes()) }
    }
}

/// For the cases: inputs a, b and a weight.
pub(super) fn norm_sum<'g>(x: &[Var<'g>], sum: bool) -> Vec<Var<'g>> {
    x[0].recorder().op(AddRmsNorm { eps: 1e-6, sum, room: 0 }, x)
}
