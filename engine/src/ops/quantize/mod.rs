//! Rounding matrices to FP8 for GEMMs: as they are, transposed, or both, and their largest absolute values, in the kernel that computes them or in one
//! pass over each.

mod scales;
mod text;

pub use scales::Scales;

use super::pointwise::{self, Expr, print};
use crate::cpu::{DataMut, View, ViewMut, fp8};
use crate::kernel::{Code, Io, Launch};
use crate::meta::{DType, Meta};
use crate::op::{Case, Cost, Fill, Grads, In, Lean, Narrow, Op, Port, no_gradient};
use crate::ops::matmul::{Matmul, Sums};
use crate::record::Var;
use rayon::prelude::*;
use std::sync::Arc;

/// Blocks of the kernel; each writes the largest absolute value that it saw.
pub const PARTS: usize = 1024;

/// Rows and columns that a block rounds at a time.
const TILE: [usize; 2] = [128, 128];

/// A tensor to round: output number k of the expression is the k-th of these.
#[derive(Clone, Debug, PartialEq)]
pub struct Rounded {
    /// E4M3 or E5M2.
    pub dtype: DType,
    /// Whether it is needed as it is.
    pub rows: bool,
    /// Whether it is needed transposed.
    pub columns: bool,
    /// Whether it is also needed as it was, and in which type.
    pub kept: Option<DType>,
}

/// Inputs: those of a pointwise expression, all [m, n]; then a scale for each of its results, f32 `[1]`. Outputs, for each result: it divided by its scale,
/// [m, n], if `rows`; the transpose of that, [n, m], if `columns`; the result itself, if `kept`; and f32 [1, PARTS], whose largest number is its largest
/// absolute value.
///
/// What exceeds the type's range becomes its largest number, but infinity becomes NaN, so that a step that overflowed is still noticed.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantize {
    /// What is rounded: one result or several.
    pub expr: Expr,
    /// How each is rounded.
    pub results: Vec<Rounded>,
}

impl Quantize {
    /// Rounds a matrix as it is.
    pub fn new(dtype: DType, rows: bool, columns: bool) -> Quantize {
        Quantize { expr: Expr::of(1, |_, x| x[0]), results: vec![Rounded { dtype, rows, columns, kept: None }] }
    }

    /// Inputs of the expression.
    fn inputs(&self, x: usize) -> usize {
        x - self.results.len()
    }
}

impl Op for Quantize {
    fn name(&self) -> &'static str {
        "quantize"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let (inputs, scales) = x.split_at(self.inputs(x.len()));
        let fits = inputs[0].rank() == 2 && inputs.iter().all(|m| m.dtype.is_float() && m.shape == inputs[0].shape);
        let types = scales.iter().all(|m| *m == Meta::f32(&[1])) && self.results.iter().all(|r| r.dtype.is_fp8());
        assert!(fits && types && self.expr.outs.len() == self.results.len(), "{self:?} of {x:?}");
        let [m, n] = [x[0].dim(1), x[0].dim(0)];
        assert!(m.is_multiple_of(16) && n.is_multiple_of(16), "{x:?}: FP8 operands have sizes that are multiples of 16");
        let one = |r: &Rounded| {
            let made = [
                r.rows.then(|| Meta::new(&[m, n], r.dtype)),
                r.columns.then(|| Meta::new(&[n, m], r.dtype)),
                r.kept.map(|dtype| Meta::new(&[m, n], dtype)),
                Some(Meta::f32(&[1, PARTS])),
            ];
            made.into_iter().flatten().collect::<Vec<_>>()
        };
        self.results.iter().flat_map(one).collect()
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        self.results.len() * x[0].elements()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], workspace: &mut [f32]) {
        let (inputs, scales) = x.split_at(self.inputs(x.len()));
        let (m, n) = (x[0].dim(1), x[0].dim(0));
        let mut values: Vec<ViewMut> = workspace.chunks_mut(m * n).map(|v| ViewMut { shape: x[0].shape, data: DataMut::F32(v) }).collect();
        pointwise::run::run(&self.expr, &[], inputs, &mut values);
        let mut y = y.iter_mut();
        for ((r, v), scale) in self.results.iter().zip(workspace.chunks(m * n)).zip(scales) {
            let (by, most) = (1.0 / scale.f32()[0], fp8::largest(r.dtype));
            let rounded = |v: f32| if v.is_finite() { (v * by).clamp(-most, most) } else { f32::NAN };
            let mut next = || y.next().expect("an output for each");
            if r.rows {
                next()
                    .f32()
                    .par_chunks_mut(n)
                    .zip(v.par_chunks(n))
                    .for_each(|(y, v)| y.iter_mut().zip(v).for_each(|(y, &v)| *y = rounded(v)));
            }
            if r.columns {
                let column = |(j, y): (usize, &mut [f32])| y.iter_mut().enumerate().for_each(|(i, y)| *y = rounded(v[i * n + j]));
                next().f32().par_chunks_mut(m).enumerate().for_each(column);
            }
            if r.kept.is_some() {
                next().f32().copy_from_slice(v);
            }
            let parts = next().f32();
            parts.fill(0.0);
            // A NaN wins.
            let larger = |a: f32, b: f32| if b > a || b.is_nan() { b } else { a };
            parts[0] = v.par_chunks(1 << 14).map(|c| c.iter().fold(0.0f32, |a, v| larger(a, v.abs()))).reduce(|| 0.0, larger);
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        let (m, n) = (io.x[0].dim(1), io.x[0].dim(0));
        let source = [&print::packs(8), include_str!("quantize.cu"), &text::kernel(self, io)].concat();
        Launch::new(&source, "quantize")
            .define("M", m)
            .define("N", n)
            .define("TILES", m.div_ceil(TILE[0]) * n.div_ceil(TILE[1]))
            .grid(PARTS, 1, 1)
            .block(512)
            .all(io)
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false // recorded after autodiff
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn only(&self, read: &[bool]) -> Option<Lean> {
        let (mut op, mut outputs, mut at) = (self.clone(), vec![], 0);
        for r in &mut op.results {
            let mut next = |is: bool| {
                at += is as usize;
                let read = is && read[at - 1];
                outputs.extend(read.then(|| at - 1));
                read
            };
            (r.rows, r.columns) = (next(r.rows), next(r.columns));
            r.kept = r.kept.filter(|_| next(true));
            outputs.push(at); // the parts stay
            at += 1;
        }
        (op != *self).then(|| Lean { op: Arc::new(op), inputs: None, outputs })
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let written = |r: &Rounded| r.rows as usize + r.columns as usize + r.kept.map_or(0, |d| d.size());
        let bytes = self.results.iter().map(written).sum::<usize>() * x[0].elements();
        let flops = (self.expr.flops() * x[0].elements()) as u64;
        Cost { flops, ..Cost::memory(x[..self.inputs(x.len())].iter().map(|m| m.bytes()).sum::<usize>() + bytes) }
    }
}

/// What a matrix is divided by so that its largest absolute value is just within the type's range: a power of two, so that scaling rounds nothing.
pub fn scale_of(largest: f32, dtype: DType) -> f32 {
    // The ranges end at 1.75 times a power of two.
    let (top, bits) = (if dtype == DType::E5M2 { 15 } else { 8 }, largest.to_bits());
    let exponent = (bits >> 23) as i32 - 127 - top + ((bits & 0x7f_ffff) > 0x60_0000) as i32;
    2f32.powi(exponent.max(-126))
}

fn both<'g>(x: Var<'g>, dtype: DType, scale: f32) -> Vec<Var<'g>> {
    let scale = x.recorder().full(&[1], scale);
    let mut y = x.recorder().op(Quantize::new(dtype, true, true), &[x, scale]);
    let largest = y.pop().expect("the last output").max_axis(1);
    vec![y[0].cast(DType::F32), y[1].cast(DType::F32), largest]
}

/// x W^T of FP8 operands.
fn linear<'g>(x: Var<'g>, w: Var<'g>, dtypes: [DType; 2], sums: Sums) -> Var<'g> {
    let r = x.recorder();
    let quantized = |v: Var<'g>, dtype: DType, scale: f32| {
        let scale = r.full(&[1], scale);
        (r.op(Quantize::new(dtype, true, false), &[v, scale])[0], scale)
    };
    let ((a, sa), (b, sb)) = (quantized(x, dtypes[0], 0.0625), quantized(w, dtypes[1], 0.03125));
    r.op1(Matmul { dtype: Some(x.dtype()), scaled: Some(sums), ..Matmul::default() }, &[a, b.t(), sa, sb])
}

/// The history and scales of two tensors after a run, of which these are the parts of the largest values.
fn next_scales<'g>(history: Var<'g>, parts: Var<'g>, runs: f32) -> Vec<Var<'g>> {
    let r = history.recorder();
    let op = Scales { types: vec![DType::E4M3, DType::E5M2] };
    // Computed, so that the op may write over it.
    let [history, parts] = [history, parts].map(|v| v.cast(DType::F32).square());
    r.op(op, &[history * 1.0, r.full(&[2, 4], 0.5) * 1.0, r.full(&[1], runs), parts])
}

const TENSOR_CORES: &str = "tensor cores add up a few FP8 products with some 14 bits before these sums are added in f32";

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("e4m3, both ways", &[In(&[48, 80], Fill::Frozen)], |x| both(x[0], DType::E4M3, 0.0078125)),
    Case::new("e5m2, of several tiles", &[In(&[272, 144], Fill::Frozen)], |x| {
        both(x[0] * (1.0 / 64.0), DType::E5M2, 1.0 / (1 << 20) as f32)
    }),
    Case::new("beyond the range", &[In(&[16, 16], Fill::Frozen)], |x| both(x[0] * 1024.0, DType::E4M3, 1.0)),
    Case::new("two results of one expression", &[In(&[48, 160], Fill::Frozen), In(&[48, 160], Fill::Frozen)], |x| {
        let r = x[0].recorder();
        let mut expr = Expr::default();
        let (a, b) = (expr.input(0), expr.input(1));
        let product = expr.mul(a, b);
        expr.outs = vec![expr.add(a, b), product];
        let rounded = |dtype, rows, kept| Rounded { dtype, rows, columns: true, kept };
        let op = Quantize { expr, results: vec![rounded(DType::E5M2, true, None), rounded(DType::E4M3, false, Some(x[0].dtype()))] };
        let y = r.op(op, &[x[0], x[1], r.full(&[1], 1.0 / 4096.0), r.full(&[1], 1.0 / 32.0)]);
        vec![y[0].cast(DType::F32), y[1].cast(DType::F32), y[2].max_axis(1), y[3].cast(DType::F32), y[4], y[5].max_axis(1)]
    }),
    Case::new("a matmul", &[In(&[32, 48], Fill::Frozen), In(&[64, 48], Fill::Frozen)], |x| {
        vec![linear(x[0], x[1], [DType::E4M3; 2], Sums::F32)]
    })
    .inexact(3e-4, TENSOR_CORES),
    Case::new("of a gradient", &[In(&[32, 48], Fill::Frozen), In(&[64, 48], Fill::Frozen)], |x| {
        vec![linear(x[0], x[1], [DType::E5M2, DType::E4M3], Sums::F32)]
    })
    .inexact(3e-4, TENSOR_CORES),
    Case::new("scales after seven runs", &[In(&[2, 5], Fill::Frozen), In(&[2, PARTS], Fill::Frozen)], |x| next_scales(x[0], x[1], 7.0)),
    Case::new("scales, the new value the largest", &[In(&[2, 300], Fill::Frozen), In(&[2, PARTS], Fill::Frozen)], |x| {
        next_scales(x[0], x[1] * 1e4, 299.0)
    }),
    Case::new("scales, an old value the largest", &[In(&[2, 5], Fill::Frozen), In(&[2, PARTS], Fill::Frozen)], |x| {
        next_scales(x[0] * 100.0, x[1], 7.0)
    }),
    Case::new("scales, the largest value the oldest", &[In(&[2, 5], Fill::Frozen), In(&[2, PARTS], Fill::Frozen)], |x| {
        let last_is_large = x[0].recorder().constant(&[1, 5], vec![0.0, 0.0, 0.0, 0.0, 1e3]);
        next_scales(x[0] + last_is_large, x[1], 9.0)
    }),
    Case::new("scales of zeros", &[In(&[2, 5], Fill::Frozen), In(&[2, PARTS], Fill::Frozen)], |x| next_scales(x[0] * 0.0, x[1] * 0.0, 3.0)),
    Case::new("scales of what is not finite", &[In(&[2, 5], Fill::Frozen), In(&[2, PARTS], Fill::Frozen)], |x| {
        next_scales(x[0], x[1] * 3e38 * 3e38, 3.0)
    }),
    Case::new("activations, rounded both ways", &[In(&[16384, 1536], Fill::Frozen)], |x| {
        let scale = x[0].recorder().full(&[1], 0.0078125);
        vec![x[0].recorder().op(Quantize::new(DType::E4M3, true, true), &[x[0], scale])[2]]
    })
    .bench(),
    Case::new("a layer of 1.5B", &[In(&[16384, 1536], Fill::Frozen), In(&[8960, 1536], Fill::Frozen)], |x| {
        vec![linear(x[0], x[1], [DType::E4M3; 2], Sums::Fast)]
    })
    .bench(),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_is_the_smallest_power_of_two_that_keeps_the_largest_value_in_range() {
        for dtype in [DType::E4M3, DType::E5M2] {
            let most = fp8::largest(dtype);
            for largest in [most, most.next_up(), most.next_down(), 1.0, 1.75, 1.75f32.next_up(), 3e-7, 2.5e30, 1e-30] {
                let scale = scale_of(largest, dtype);
                assert_eq!(scale.to_bits() & 0x7f_ffff, 0, "{scale} is a power of two");
                assert!(largest / scale <= most && largest / scale * 2.0 > most, "{dtype}: {largest} by {scale}");
            }
            assert!(scale_of(f32::MIN_POSITIVE / 8.0, dtype) > 0.0);
        }
    }
}
