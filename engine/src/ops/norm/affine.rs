//! Layer norm with weight and bias: one pass over the rows, in both directions.

use super::gpu::{BLOCKS, PARTIAL, finish};
use super::{ROWS, add_pieces};
use crate::cpu::math::sum;
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{At, Code, Io, Step};
use crate::meta::Meta;
use crate::op::{self, Axis, Cost, Grads, Narrow, Op, Port, Share, no_gradient};
use crate::ops::reduce::packs::Rows;
use crate::record::Var;
use rayon::prelude::*;

/// y = (x - mean) / sqrt(variance + eps) w + b. Inputs: x, w and b `[d]`. Outputs: y, 1 / sqrt(..) and the mean of each row.
#[derive(Debug)]
pub struct AffineLayerNorm {
    /// Added to the variance.
    pub eps: f32,
}

impl Op for AffineLayerNorm {
    fn name(&self) -> &'static str {
        "affine_layer_norm"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let fits = x.len() == 3 && x[1] == x[2] && x[1].shape == [x[0].dim(0)];
        assert!(fits, "affine_layer_norm of {x:?}");
        vec![x[0].clone(), Meta::f32(&[x[0].rows()]), Meta::f32(&[x[0].rows()])]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let d = x[0].dim(0);
        let (data, w, b) = (x[0].f32(), x[1].f32(), x[2].f32());
        let [y, rstd, means] = y else { unreachable!("infer gives three outputs") };
        let statistics = rstd.f32().par_iter_mut().zip(means.f32());
        y.f32().par_chunks_mut(d).zip(statistics).zip(data.par_chunks(d)).with_min_len(ROWS).for_each(|((y, (rstd, mean)), x)| {
            simd(
                #[inline(always)]
                || {
                    *mean = sum(x, |v| v) / d as f32;
                    let m = *mean;
                    *rstd = 1.0 / (sum(x, |v| (v - m) * (v - m)) / d as f32 + self.eps).sqrt();
                    y.iter_mut().zip(x).zip(w.iter().zip(b)).for_each(|((y, &x), (&w, &b))| *y = (x - m) * *rstd * w + b);
                },
            )
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded_first(1, at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let (d, n) = (io.x[0].dim(0), io.x[0].rows());
        let rows = Rows::new(d, &[io.x[0].dtype]);
        rows.launch(include_str!("affine.cu"), "affine_norm", d)
            .define_type("T", io.x[0].dtype)
            .define_type("W", io.x[1].dtype)
            .define("ROWS", n)
            .define_f32("EPS", self.eps)
            .grid(n.div_ceil(rows.groups), 1, 1)
            .all(io)
            .code()
    }

    /// All dimensions but the one that is normalised. The statistics are for the gradient alone.
    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        let axis = |d: usize| Axis::new([Share::Dim(d), Share::Whole, Share::Whole], [Share::Dim(d), Share::Own, Share::Own]);
        (0..x[0].rank() - 1).map(axis).collect()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return no_gradient(x.len()) };
        d.recorder().op(AffineLayerNormGrad { add: false }, &[x[0], y[1], y[2], d, x[1]]).into_iter().map(Some).collect()
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 8 * x[0].elements() as u64, ..Cost::memory(2 * x[0].bytes()) }
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        Some(vec![x[0].layer_norm(self.eps) * x[1] + x[2]])
    }
}

/// Inputs: x, 1 / sqrt(..) and the mean of each row, dy, the weight, and with `add` a tensor to add to dx. Outputs: the gradients of x, of the
/// weight and of the bias.
#[derive(Debug)]
pub struct AffineLayerNormGrad {
    /// Whether another gradient of x is added to dx (the pass `gemm-epilogue`).
    pub add: bool,
}

impl Op for AffineLayerNormGrad {
    fn name(&self) -> &'static str {
        "affine_layer_norm_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        vec![x[0].clone(), x[4].clone(), x[4].clone()]
    }

    /// For each task: the sums of the weight's gradient and of the bias's; then a row.
    fn workspace(&self, x: &[Meta]) -> usize {
        3 * x[0].rows().div_ceil(ROWS) * x[0].dim(0)
    }

    fn cpu(&self, x: &[View], out: &mut [ViewMut], workspace: &mut [f32]) {
        let d = x[0].dim(0);
        let (data, rstd, means, dy, w) = (x[0].f32(), x[1].f32(), x[2].f32(), x[3].f32(), x[4].f32());
        let more_rows = if self.add { x[5].f32() } else { &[] };
        let (sums, scratch) = workspace.split_at_mut(workspace.len() / 3 * 2);
        let (dw, db) = sums.split_at_mut(sums.len() / 2);
        let pieces = dw.par_chunks_mut(d).zip(db.par_chunks_mut(d)).zip(scratch.par_chunks_mut(d));
        out[0].f32().par_chunks_mut(ROWS * d).zip(pieces).enumerate().for_each(|(task, (dx, ((dw, db), normed)))| {
            simd(
                #[inline(always)]
                || {
                    dw.fill(0.0);
                    db.fill(0.0);
                    for (r, dx) in dx.chunks_mut(d).enumerate() {
                        let row = task * ROWS + r;
                        let (x, dy, s, m) = (&data[row * d..][..d], &dy[row * d..][..d], rstd[row], means[row]);
                        normed.iter_mut().zip(x).for_each(|(v, &x)| *v = (x - m) * s);
                        dx.iter_mut().zip(dy).zip(w).for_each(|((g, &dy), &w)| *g = dy * w);
                        dw.iter_mut().zip(dy).zip(&*normed).for_each(|((o, &dy), &v)| *o += dy * v);
                        db.iter_mut().zip(dy).for_each(|(o, &dy)| *o += dy);
                        super::residual::grad_row(dx, normed, s);
                        let more = if self.add { &more_rows[row * d..][..d] } else { &[] };
                        dx.iter_mut().zip(more).for_each(|(g, &more)| *g += more);
                    }
                },
            )
        });
        add_pieces(dw, out[1].f32());
        add_pieces(db, out[2].f32());
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        match at {
            Port::In(1 | 2 | 4) => Narrow::Keep,
            _ => op::rounded(at),
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        let (d, n) = (io.x[0].dim(0), io.x[0].rows());
        let more = if self.add { 5 } else { 0 }; // read only with `add`
        let rows = Rows::new(d, &[io.x[0].dtype, io.x[3].dtype, io.x[more].dtype]);
        let blocks = n.div_ceil(rows.groups).min(BLOCKS);
        let launch = rows
            .launch(&[PARTIAL, include_str!("affine_grad.cu")].concat(), "affine_norm_grad", d)
            .define_type("T", io.x[0].dtype)
            .define_type("G", io.x[3].dtype)
            .define_type("W", io.x[4].dtype)
            .define_type("M", io.x[more].dtype)
            .define("ADD", self.add as u8)
            .define("ROWS", n)
            .define("WARPS", rows.threads() / 32)
            .define("RESIDENT", (512 / rows.threads()).max(1))
            .grid(blocks, 1, 1)
            .args(&[At::X(0), At::X(1), At::X(2), At::X(3), At::X(4), At::X(more), At::Y(0), At::Work].map(Into::into));
        Code { steps: vec![Step::Launch(launch), Step::Launch(finish(io, 2, blocks))], workspace: 4 * blocks * 2 * d }
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 12 * x[0].elements() as u64, ..Cost::memory((3 + self.add as usize) * x[0].bytes()) }
    }
}
