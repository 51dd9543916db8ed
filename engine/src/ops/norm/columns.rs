//! The first columns of a layer norm, in f32, for readers that need no others.

use crate::cpu::{View, ViewMut, math, simd};
use crate::kernel::{Code, Io};
use crate::meta::Meta;
use crate::op::{self, Cost, Grads, Narrow, Op, Port, no_gradient};
use crate::ops::reduce::packs::Rows;
use crate::record::Var;
use rayon::prelude::*;

/// x [.., d] -> [.., columns].
#[derive(Debug)]
pub struct LayerNormColumns {
    /// Added to the variance.
    pub eps: f32,
    /// How many columns.
    pub columns: usize,
}

impl Op for LayerNormColumns {
    fn name(&self) -> &'static str {
        "layer_norm_columns"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let (rank, d) = (x[0].rank(), x[0].shape.last().copied().unwrap_or(0));
        assert!((1..=d).contains(&self.columns) && x[0].dtype.is_float(), "the first {} columns of {:?}", self.columns, x[0]);
        vec![Meta::f32(&[&x[0].shape[..rank - 1], &[self.columns]].concat())]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let d = x[0].dim(0);
        let data = x[0].f32();
        y[0].f32().par_chunks_mut(super::ROWS * self.columns).enumerate().for_each(|(task, y)| {
            simd(
                #[inline(always)]
                || {
                    for (r, y) in y.chunks_mut(self.columns).enumerate() {
                        let x = &data[(task * super::ROWS + r) * d..][..d];
                        let mean = math::sum(x, |v| v) / d as f32;
                        let rstd = 1.0 / (math::sum(x, |v| (v - mean) * (v - mean)) / d as f32 + self.eps).sqrt();
                        y.iter_mut().zip(x).for_each(|(y, &x)| *y = (x - mean) * rstd);
                    }
                },
            )
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let (d, n, dtype) = (io.x[0].dim(0), io.x[0].rows(), io.x[0].dtype);
        let rows = Rows::new(d, &[dtype]);
        rows.launch(include_str!("columns.cu"), "norm_columns", d)
            .define_type("T", dtype)
            .define("ROWS", n)
            .define("COLUMNS", self.columns)
            .define_f32("EPS", self.eps)
            .grid(n.div_ceil(rows.groups), 1, 1)
            .all(io)
            .code()
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(1)
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 5 * x[0].elements() as u64, ..Cost::memory(x[0].bytes() + self.infer(x)[0].bytes()) }
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let rank = x[0].meta().rank();
        Some(vec![x[0].layer_norm(self.eps).slice(rank - 1, 0, self.columns).cast(crate::DType::F32)])
    }
}

impl<'g> Var<'g> {
    /// The first columns of `layer_norm`, in f32. It has no gradient.
    #[track_caller]
    pub fn layer_norm_columns(self, eps: f32, columns: usize) -> Var<'g> {
        self.recorder().op1(LayerNormColumns { eps, columns }, &[self])
    }
}
