//! Matmuls of a few rows, x [rows, k] W [n, k]^T, as in decoding one token of each sequence: bound by reading the weights. The norm before and the
//! pointwise ops after them are fused, because a kernel launch costs as much as reading a megabyte.

mod gpu;

use crate::cpu::gemm::{Into, Mat, gemm};
use crate::cpu::math::{sigmoid, sum};
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{Code, Io};
use crate::meta::{DType, Layout, Meta, block_stride};
use crate::op::{self, Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use crate::ops::matmul::Matmul;
use crate::record::Var;

/// The most rows.
pub const MOST: usize = 32;

/// Inputs: x [rows, k]; with `norm` the norm's weight `[k]`; the weights [n, k]; with `add` a tensor to add. Outputs: x W^T [rows, n] for each weight;
/// or, for two weights with `swiglu`, silu(x W0^T) * (x W1^T).
#[derive(Clone, Debug, PartialEq)]
pub struct FewRows {
    /// An RMS norm of x with this epsilon comes first.
    pub norm: Option<f32>,
    /// Whether the two weights are gate and up of a SwiGLU, whose result is the output.
    pub swiglu: bool,
    /// Whether the last input is added to the output, of which there is one then.
    pub add: bool,
    /// Type of the outputs; x's if None.
    pub dtype: Option<DType>,
}

impl FewRows {
    /// The indices of the inputs after x.
    fn weights(&self, inputs: usize) -> std::ops::Range<usize> {
        1 + self.norm.is_some() as usize..inputs - self.add as usize
    }
}

impl Op for FewRows {
    fn name(&self) -> &'static str {
        "few_rows"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let weights = &x[self.weights(x.len())];
        let (rows, k, dtype) = (x[0].dim(1), x[0].dim(0), self.dtype.unwrap_or(x[0].dtype));
        let fits = x[0].rank() == 2 && x[0].dtype.is_float() && rows <= MOST && !weights.is_empty();
        let normed = self.norm.is_none() || x[1].shape == [k];
        let products = weights.iter().all(|w| w.rank() == 2 && w.dim(0) == k && w.dtype == x[0].dtype);
        let paired = !self.swiglu || (weights.len() == 2 && weights[0] == weights[1]);
        assert!(fits && normed && products && paired, "{self:?} of {x:?}");
        let outputs = if self.swiglu { &weights[..1] } else { weights };
        let y: Vec<Meta> = outputs.iter().map(|w| Meta::new(&[rows, w.dim(1)], dtype)).collect();
        assert!(!self.add || (y.len() == 1 && x[x.len() - 1].shape == y[0].shape), "{self:?} of {x:?}");
        y
    }

    /// The normed x; gate and up.
    fn workspace(&self, x: &[Meta]) -> usize {
        let both = if self.swiglu { 2 * x[0].dim(1) * x[self.weights(x.len()).start].dim(1) } else { 0 };
        x[0].elements() + both
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], work: &mut [f32]) {
        let (rows, k) = (x[0].dim(1), x[0].dim(0));
        let apart = block_stride(x[0].shape, x[0].strides, 1).expect("rows evenly apart");
        let (a, both) = work.split_at_mut(rows * k);
        for (r, a) in a.chunks_mut(k).enumerate() {
            a.copy_from_slice(&x[0].f32()[r * apart..][..k]);
            if let Some(eps) = self.norm {
                let scale = 1.0 / (sum(a, |v| v * v) / k as f32 + eps).sqrt();
                a.iter_mut().zip(x[1].f32()).for_each(|(a, w)| *a = *a * scale * w);
            }
        }
        let product = |w: &View, out: &mut [f32], into: Into| {
            let n = w.dim(1);
            gemm(out, n, into, rows, k, n, Mat::rows(a, k), Mat::rows(w.f32(), k).t(), 1.0, true)
        };
        let weights = &x[self.weights(x.len())];
        let into = if self.add { Into::Add } else { Into::Replace };
        if self.add {
            y[0].f32().copy_from_slice(x[x.len() - 1].f32());
        }
        if !self.swiglu {
            return weights.iter().zip(y).for_each(|(w, y)| product(w, y.f32(), into));
        }
        let (gate, up) = both.split_at_mut(both.len() / 2);
        product(&weights[0], gate, Into::Replace);
        product(&weights[1], up, Into::Replace);
        simd(
            #[inline(always)]
            || {
                for ((y, &gate), &up) in y[0].f32().iter_mut().zip(&*gate).zip(&*up) {
                    let v = gate * sigmoid(gate) * up;
                    *y = if self.add { *y + v } else { v };
                }
            },
        );
    }

    fn layout(&self, input: usize) -> Layout {
        if input == 0 { Layout::Blocks(1) } else { Layout::Contiguous }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        gpu::code(self, io)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    /// Recorded only in programs without gradients.
    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let weights = x[self.weights(x.len())].iter().map(|w| w.elements()).sum::<usize>();
        let bytes = x.iter().chain(&self.infer(x)).map(|m| m.bytes()).sum();
        Cost::compute(2 * x[0].dim(1) * weights, bytes)
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let a = self.norm.map_or(x[0], |eps| x[0].rms_norm(x[1], eps));
        let product = |w: &Var<'g>| a.recorder().op1(Matmul { dtype: self.dtype, ..Matmul::default() }, &[a, w.t()]);
        let mut y: Vec<Var> = x[self.weights(x.len())].iter().map(product).collect();
        if self.swiglu {
            y = vec![y[0].swiglu(y[1])];
        }
        if self.add {
            y = vec![(y[0] + x[x.len() - 1]).cast(y[0].dtype())];
        }
        Some(y)
    }
}

/// For the cases: x, the norm's weight, weights and the added tensor, as `op` needs them.
fn products<'g>(x: &[Var<'g>], op: FewRows) -> Vec<Var<'g>> {
    x[0].recorder().op(op, x)
}

const PLAIN: FewRows = FewRows { norm: None, swiglu: false, add: false, dtype: None };
const NORMED: FewRows = FewRows { norm: Some(1e-6), ..PLAIN };
const ADDED: FewRows = FewRows { add: true, ..PLAIN };
const GATED: FewRows = FewRows { norm: Some(1e-6), swiglu: true, ..PLAIN };
const WIDE: FewRows = FewRows { norm: Some(1e-6), dtype: Some(DType::F32), ..PLAIN };

macro_rules! frozen {
    ($($shape:expr),*) => { &[$(In(&$shape, Fill::Frozen)),*] };
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("one row", frozen!([1, 64], [8, 64]), |x| products(x, PLAIN)),
    Case::new("three weights, normed", frozen!([12, 128], [128], [40, 128], [16, 128], [16, 128]), |x| products(x, NORMED)),
    Case::new("rows that no tile ends with", frozen!([5, 96], [21, 96], [3, 96]), |x| products(x, PLAIN)),
    Case::new("odd sizes", frozen!([7, 37], [37], [11, 37], [5, 37]), |x| products(x, NORMED)),
    Case::new("odd sizes, gated", frozen!([3, 23], [23], [9, 23], [9, 23]), |x| products(x, GATED)),
    Case::new("gated", frozen!([12, 256], [256], [72, 256], [72, 256]), |x| products(x, GATED)),
    Case::new("gated and added", frozen!([9, 72], [24, 72], [24, 72], [9, 24]), |x| products(x, FewRows { swiglu: true, ..ADDED })),
    Case::new("added", frozen!([12, 1088], [24, 1088], [12, 24]), |x| products(x, ADDED)),
    Case::new("added, of long rows", frozen!([9, 1608], [21, 1608], [9, 21]), |x| products(x, ADDED)),
    Case::new("several tiles to a block", frozen!([12, 192], [192], [2100, 192], [40, 192]), |x| products(x, NORMED)),
    Case::new("17 rows, long and normed", frozen!([17, 4168], [4168], [20, 4168]), |x| products(x, NORMED)),
    Case::new("32 rows, added", frozen!([32, 520], [40, 520], [32, 40]), |x| products(x, ADDED)),
    Case::new("many columns", frozen!([4, 64], [64], [9001, 64]), |x| products(x, WIDE)),
    Case::new("many columns, gated", frozen!([12, 1040], [1040], [6000, 1040], [6000, 1040]), |x| products(x, GATED)),
    Case::new("many columns, added", frozen!([17, 520], [13_001, 520], [17, 13_001]), |x| products(x, ADDED)),
    Case::new("many columns of long rows", frozen!([20, 3080], [7001, 3080]), |x| products(x, PLAIN)),
    Case::new("columns of a wider x", frozen!([6, 200], [33, 64]), |x| products(&[x[0].slice(1, 8, 72), x[1]], PLAIN)),
    Case::new("columns of a wider x, odd", frozen!([6, 200], [33, 64]), |x| products(&[x[0].slice(1, 3, 67), x[1]], PLAIN)),
    Case::new("Qwen3, q k v", frozen!([12, 1024], [1024], [2048, 1024], [1024, 1024], [1024, 1024]), |x| products(x, NORMED)).bench(),
    Case::new("Qwen3, o", frozen!([12, 2048], [1024, 2048], [12, 1024]), |x| products(x, ADDED)).bench(),
    Case::new("Qwen3, gate and up", frozen!([12, 1024], [1024], [3072, 1024], [3072, 1024]), |x| products(x, GATED)).bench(),
    Case::new("Qwen3, down", frozen!([12, 3072], [1024, 3072], [12, 1024]), |x| products(x, ADDED)).bench(),
    Case::new("Qwen3, head", frozen!([12, 1024], [1024], [151936, 1024]), |x| products(x, NORMED)).bench(),
];
