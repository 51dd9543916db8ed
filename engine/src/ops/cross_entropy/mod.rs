//! Cross-entropy of logits with target classes, row by row. Rows with target -1 have no loss and no gradient (`ignore_index`).

use crate::cpu::math::{exp, max, sum};
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{Code, Io, Launch};
use crate::meta::{DType, Meta};
use crate::op::{Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use crate::record::Var;
use rayon::prelude::*;

/// Inputs: logits [rows, classes], targets i32 `[rows]`. Outputs: loss `[rows]`, ln(sum(exp(logits))) `[rows]`, both f32.
#[derive(Debug)]
pub struct CrossEntropy;

/// Loss of one row, and its log-sum-exp.
#[inline(always)]
pub(super) fn row_loss(x: &[f32], target: i32) -> (f32, f32) {
    let m = max(x);
    let lse = m + sum(x, |v| exp(v - m)).ln();
    let loss = if target < 0 { 0.0 } else { lse - x[target as usize] };
    (crate::mutant!("cross-entropy-counts-ignored-targets", loss, lse - x[target.max(0) as usize]), lse)
}

/// Overwrites the logits x by the gradient of weight * loss with respect to them.
#[inline(always)]
pub(super) fn row_gradient(x: &mut [f32], target: i32, lse: f32, weight: f32) {
    if target < 0 {
        x.fill(0.0);
        return;
    }
    x.iter_mut().for_each(|v| *v = exp(*v - lse) * weight);
    // Where ranks have some of the classes each, the target may be none of these.
    if let Some(v) = x.get_mut(target as usize) {
        *v -= weight;
    }
}

/// A kernel over rows of logits: a warp for each short row, a block for each long one. `row.cuh` is put before `source`.
pub(super) fn row_launch(source: &str, entry: &'static str, dtype: DType, rows: usize, classes: usize) -> Launch {
    let by_warp = classes <= 1024;
    let (block, rows_per_block) = match classes {
        _ if by_warp => (256, 8),
        ..=8192 => (128, 1),
        _ => (512, 1),
    };
    Launch::new(&format!("{}{source}", include_str!("row.cuh")), entry)
        .define_type("T", dtype)
        .define("ROWS", rows)
        .define("CLASSES", classes)
        .define("BY_WARP", by_warp as u8)
        .define("BLOCK", block)
        .grid(rows.div_ceil(rows_per_block), 1, 1)
        .block(block)
}

impl Op for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(x[0].rank() == 2 && x[1] == Meta::new(&[x[0].dim(1)], DType::I32), "cross_entropy of {x:?}");
        vec![Meta::f32(&[x[0].dim(1)]), Meta::f32(&[x[0].dim(1)])]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let classes = x[0].dim(0);
        let (data, targets) = (x[0].f32(), x[1].i32());
        let (loss, lse) = y.split_at_mut(1);
        let rows = loss[0].f32().par_iter_mut().zip(lse[0].f32()).enumerate().with_min_len(4);
        rows.for_each(|(r, (loss, lse))| {
            (*loss, *lse) = simd(
                #[inline(always)]
                || row_loss(&data[r * classes..][..classes], targets[r]),
            );
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        if at == Port::In(0) { Narrow::Sensitive("the loss head is not rounded to FP8") } else { Narrow::Keep }
    }

    fn cuda(&self, io: &Io) -> Code {
        let (x, source) = (&io.x[0], include_str!("cross_entropy.cu"));
        row_launch(source, "cross_entropy", x.dtype, x.dim(1), x.dim(0)).all(io).code()
    }

    fn axes(&self, _: &[Meta], _: usize) -> Vec<Axis> {
        vec![Axis::first(&[true, true], 2)]
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![dy[0].map(|d| d.recorder().op1(CrossEntropyGrad, &[x[0], x[1], y[1], d])), None]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 4 * x[0].elements() as u64, ..Cost::memory(x[0].bytes()) }
    }
}

/// Inputs: logits (overwritten by their gradient), targets, lse, dy `[rows]`. A target that is none of the classes, but not negative either, takes nothing away.
#[derive(Debug)]
pub struct CrossEntropyGrad;

impl Op for CrossEntropyGrad {
    fn name(&self) -> &'static str {
        "cross_entropy_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        vec![x[0].clone()]
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let classes = x[0].dim(0);
        let (targets, lse, dy) = (x[1].i32(), x[2].f32(), x[3].f32());
        y[0].f32().par_chunks_mut(classes).with_min_len(4).enumerate().for_each(|(r, row)| {
            simd(
                #[inline(always)]
                || row_gradient(row, targets[r], lse[r], dy[r]),
            )
        });
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        let (x, source) = (&io.x[0], include_str!("cross_entropy_grad.cu"));
        row_launch(source, "cross_entropy_grad", x.dtype, x.dim(1), x.dim(0))
            .define_type("L", io.x[2].dtype)
            .define_type("D", io.x[3].dtype)
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
        Cost { flops: 4 * x[0].elements() as u64, ..Cost::memory(2 * x[0].bytes()) }
    }
}

impl<'g> Var<'g> {
    /// The loss of each row of these logits: `[rows]`; 0 if the target is -1.
    #[track_caller]
    pub fn cross_entropy(self, targets: Var<'g>) -> Var<'g> {
        self.recorder().op(CrossEntropy, &[self, targets])[0]
    }
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("some ignored", &[In(&[13, 7], Fill::Normal), In(&[13], Fill::Target(7))], |x| vec![x[0].cross_entropy(x[1])]),
    Case::new("vocabulary", &[In(&[1024, 50304], Fill::Normal), In(&[1024], Fill::Target(50304))], |x| vec![x[0].cross_entropy(x[1])])
        .bench(),
];
