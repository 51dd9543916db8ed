//! NF4: weights in four bits, as in QLoRA. A code stands for one of 16 quantiles of a normal distribution, times the absolute maximum of its
//! block of 64 weights. With double quantization: those scales, minus their mean, are 8-bit codes themselves, in blocks of 256. 4.13 bits per
//! weight; bitwise what the package bitsandbytes produces, except where a scale lies exactly between two codes.

use crate::cpu::gemm::{Into, Mat, gemm};
use crate::cpu::{View, ViewMut};
use crate::graph::{Init, Role};
use crate::kernel::{At, Code, Gemm, Io, Launch, Matrix, Step};
use crate::meta::{DType, Meta};
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port};
use crate::ops::adamw8::Map;
use crate::ops::matmul::not_in_fp8;
use crate::record::{Recorder, Var};
use rayon::prelude::*;
use std::sync::LazyLock;

/// Weights that share a scale, and scales that share a scale of theirs.
const BLOCK: usize = 64;
/// The most rows that are multiplied by weights in their four bits.
const FEW: usize = 32;
const SCALES: usize = 256;

/// The number that each 4-bit code stands for.
#[allow(clippy::excessive_precision)]
const LEVELS: [f32; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];

/// The number that each 8-bit code of a scale stands for: the signed dynamic map, in ascending order.
static BYTES: LazyLock<[f32; 256]> = LazyLock::new(|| {
    let mut all = *Map::Signed.numbers();
    all.sort_by(f32::total_cmp);
    all
});

/// The nearest of sorted numbers.
fn nearest(of: &[f32], v: f32) -> usize {
    let above = of.partition_point(|&x| x < v).min(of.len() - 1);
    match above {
        0 => 0,
        i if v - of[i - 1] <= of[i] - v => i - 1,
        i => i,
    }
}

/// A quantized matrix.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Nf4 {
    /// Two codes to a byte, the first in the upper half.
    pub codes: Vec<u8>,
    /// Scales of the blocks, quantized themselves.
    pub scales: Vec<u8>,
    /// The scale of each block of scales.
    pub largest: Vec<f32>,
    /// The mean of the scales, subtracted before they are quantized.
    pub mean: f32,
}

impl Nf4 {
    /// Quantizes a matrix, row after row.
    pub fn new(weights: &[f32]) -> Nf4 {
        let scales: Vec<f32> = weights.par_chunks(BLOCK).map(|b| b.iter().fold(0.0f32, |m, v| m.max(v.abs()))).collect();
        let mean = (scales.iter().map(|&s| s as f64).sum::<f64>() / scales.len().max(1) as f64) as f32;
        let moved: Vec<f32> = scales.iter().map(|s| s - mean).collect();
        let largest: Vec<f32> = moved.chunks(SCALES).map(|b| b.iter().fold(0.0f32, |m, v| m.max(v.abs()))).collect();
        let byte = |(i, v): (usize, &f32)| {
            let most = largest[i / SCALES];
            nearest(&*BYTES, if most > 0.0 { v / most } else { 0.0 }) as u8
        };
        let bytes = moved.iter().enumerate().map(byte).collect();
        let code = |i: usize| match weights.get(i) {
            Some(&w) if crate::mutant!("nf4-zeros-become-small", scales[i / BLOCK] > 0.0, true) => {
                nearest(&LEVELS, w / scales[i / BLOCK]) as u8
            }
            _ => 7,
        };
        let codes = (0..weights.len().div_ceil(2)).into_par_iter().map(|i| code(2 * i) << 4 | code(2 * i + 1)).collect();
        Nf4 { codes, scales: bytes, largest, mean }
    }

    /// Bytes of each part, for a matrix of so many weights.
    pub fn sizes(weights: usize) -> [usize; 3] {
        let blocks = weights.div_ceil(BLOCK);
        [weights.div_ceil(2), blocks, blocks.div_ceil(SCALES)]
    }
}

fn widen(codes: &[u8], scales: &[u8], largest: &[f32], mean: f32, to: &mut [f32]) {
    to.par_chunks_mut(BLOCK).enumerate().for_each(|(b, to)| {
        let scale = BYTES[scales[b] as usize] * largest[b / SCALES] + mean;
        for (i, w) in to.iter_mut().enumerate() {
            let two = codes[b * (BLOCK / 2) + i / 2];
            let code = (if i % 2 == 0 { two >> 4 } else { two & 15 }) as usize;
            *w = LEVELS[crate::mutant!("nf4-codes-shifted", code, (code + 1) % 16)] * scale;
        }
    });
}

/// x W^T, or x W, with a quantized W [n, k]. Inputs: x [rows, k] or [rows, n]; codes and scales u8; largest f32; mean f32 `[1]`. For the few rows of
/// decoding, W is dequantized in registers. For many rows it is dequantized into the workspace right before a GEMM that takes many times as long.
#[derive(Clone, Debug, PartialEq)]
pub struct Nf4Product {
    /// Rows of the weight: output features.
    pub n: usize,
    /// Columns of the weight: input features.
    pub k: usize,
    /// x W^T, the forward pass, if true; x W, the gradient with respect to the input, if false.
    pub transposed: bool,
}

impl Nf4Product {
    /// Columns of x and of y.
    fn columns(&self) -> (usize, usize) {
        if self.transposed { (self.k, self.n) } else { (self.n, self.k) }
    }

    /// The kernel for few rows, which reads W in its four bits.
    fn few(&self, io: &Io) -> Option<Code> {
        let (rows, dtype) = (io.x[0].dim(1), io.x[0].dtype);
        let tensor_cores = matches!(dtype, DType::BF16 | DType::F16) && io.arch.sm >= 80;
        let aligned = self.k.is_multiple_of(BLOCK) && io.offsets[0].is_multiple_of(8) && io.offsets[1].is_multiple_of(16);
        if !(self.transposed && rows <= FEW && tensor_cores && aligned) {
            return None;
        }
        let warps = self.k.div_ceil(128).min(8);
        let launch = Launch::new(&[include_str!("../attention/mma.cuh"), include_str!("few.cu")].concat(), "nf4_few")
            .define("ROWS", rows)
            .define("N", self.n)
            .define("K", self.k)
            .define("WARPS", warps)
            .define("AHEAD", self.k.div_ceil(128 * warps).min(4))
            .define("EARLY", io.settled[1..].iter().all(|&s| s) as u8)
            .grid(self.n.div_ceil(16), 1, 1)
            .block(32 * warps);
        Some(tables(launch, io).all(io).code())
    }

    fn many(&self, io: &Io) -> Code {
        let (rows, dtype, weights) = (io.x[0].dim(1), io.x[0].dtype, self.n * self.k);
        let (from, to) = self.columns();
        let widen = tables(Launch::new(include_str!("nf4.cu"), "nf4_widen"), io)
            .define("COUNT", weights)
            .grid(weights.div_ceil(8 * 256), 1, 1)
            .args(&[At::X(1).into(), At::X(2).into(), At::X(3).into(), At::X(4).into(), At::Work.into()]);
        let w = Matrix::rows(At::Work, dtype, self.k);
        let w = if self.transposed { w.t() } else { w };
        let product = Gemm::new(rows, to, from, Matrix::rows(At::X(0), dtype, from), w, Matrix::rows(At::Y(0), dtype, to));
        Code { steps: vec![Step::Launch(widen), Step::Gemm(product)], workspace: weights * dtype.size() }
    }
}

/// Dequantizes one weight.
fn tables(launch: Launch, io: &Io) -> Launch {
    let list = |of: &[f32]| of.iter().map(|v| format!("{v:e}f")).collect::<Vec<_>>().join(", ");
    launch
        .define_type("T", io.x[0].dtype)
        .define_type("TL", io.x[3].dtype)
        .define_type("TM", io.x[4].dtype)
        .define("BLOCK", BLOCK)
        .define("SCALES", SCALES)
        .define("LEVELS", list(&LEVELS))
        .define("BYTES", list(&*BYTES))
}

impl Op for Nf4Product {
    fn name(&self) -> &'static str {
        "nf4_product"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let (from, to) = self.columns();
        let [codes, scales, largest] = Nf4::sizes(self.n * self.k);
        let rows = x[0].rank() == 2 && x[0].dim(0) == from && x[0].dtype.is_float();
        let bytes = x[1..3].iter().zip([codes, scales]).all(|(x, n)| *x == Meta::new(&[n], DType::U8));
        let numbers = x[3..].iter().zip([largest, 1]).all(|(x, n)| x.shape == [n] && x.dtype.is_float());
        assert!(rows && bytes && numbers, "{self:?} of {x:?}");
        vec![Meta::new(&[x[0].dim(1), to], x[0].dtype)]
    }

    fn workspace(&self, _: &[Meta]) -> usize {
        self.n * self.k
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], w: &mut [f32]) {
        let (rows, (from, to)) = (x[0].dim(1), self.columns());
        widen(x[1].u8(), x[2].u8(), x[3].f32(), x[4].f32()[0], w);
        let w = Mat::rows(w, self.k);
        let w = if self.transposed { w.t() } else { w };
        gemm(y[0].f32(), to, Into::Replace, rows, from, to, Mat::rows(x[0].f32(), from), w, 1.0, true);
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        not_in_fp8(
            op::rounded_first(1, at),
            "a weight in NF4 is unpacked to 16 bits by the kernel that multiplies by it, which has no FP8 form",
        )
    }

    fn cuda(&self, io: &Io) -> Code {
        self.few(io).unwrap_or_else(|| self.many(io))
    }

    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        let rows: Vec<bool> = (0..x.len()).map(|i| i == 0).collect();
        vec![Axis::first(&rows, 1)]
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let back = |dy: Var<'g>| {
            let inputs = [&[dy], &x[1..]].concat();
            dy.recorder().op1(Nf4Product { transposed: !self.transposed, ..self.clone() }, &inputs)
        };
        vec![dy[0].map(back), None, None, None, None]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let bytes: usize = x.iter().map(|m| m.bytes()).sum();
        Cost::compute(2 * x[0].dim(1) * self.n * self.k, bytes + self.infer(x)[0].bytes())
    }
}

/// The states that hold a quantized matrix.
#[derive(Clone, Copy)]
pub struct Nf4Weight<'g> {
    n: usize,
    k: usize,
    parts: [Var<'g>; 4],
}

/// Suffixes of those states' names.
pub const PARTS: [&str; 4] = ["codes", "scales", "largest", "mean"];

impl Recorder {
    /// A frozen matrix [n, k] that is stored in NF4.
    pub fn nf4(&self, name: &str, n: usize, k: usize) -> Nf4Weight<'_> {
        let [codes, scales, largest] = Nf4::sizes(n * k);
        let metas = [(codes, DType::U8), (scales, DType::U8), (largest, DType::F32), (1, DType::F32)];
        let mut parts = PARTS
            .iter()
            .zip(metas)
            .map(|(part, (n, dtype))| self.state_as(&format!("{name}.{part}"), Meta::new(&[n], dtype), Init::Full(0.0), Role::Frozen));
        Nf4Weight { n, k, parts: std::array::from_fn(|_| parts.next().expect("four parts")) }
    }
}

impl<'g> Var<'g> {
    /// self [.., k] times the transpose of w [n, k]: [.., n].
    #[track_caller]
    pub fn nf4_linear(self, w: Nf4Weight<'g>) -> Var<'g> {
        let shape = self.shape();
        let rows: usize = shape[..shape.len() - 1].iter().product();
        let op = Nf4Product { n: w.n, k: w.k, transposed: true };
        let y = self.recorder().op1(op, &[&[self.reshape(&[rows, w.k])], &w.parts[..]].concat());
        y.reshape(&[&shape[..shape.len() - 1], &[w.n]].concat())
    }
}

fn product<'g>(x: &[Var<'g>], n: usize, k: usize, transposed: bool) -> Vec<Var<'g>> {
    x[0].recorder().op(Nf4Product { n, k, transposed }, x)
}

/// Inputs of x [rows, k] times a matrix [n, k].
macro_rules! four {
    ($rows:literal, $n:literal, $k:literal) => {{
        const BLOCKS: usize = ($n * $k as usize).div_ceil(BLOCK);
        &[
            In(&[$rows, $k], Fill::Normal),
            In(&[($n * $k as usize).div_ceil(2)], Fill::Byte),
            In(&[BLOCKS], Fill::Byte),
            In(&[BLOCKS.div_ceil(SCALES)], Fill::Frozen),
            In(&[1], Fill::Frozen),
        ]
    }};
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("x W^T", four!(5, 10, 24), |x| product(x, 10, 24, true)),
    Case::new(
        "x W, odd",
        &[In(&[3, 7], Fill::Normal), In(&[32], Fill::Byte), In(&[1], Fill::Byte), In(&[1], Fill::Frozen), In(&[1], Fill::Frozen)],
        |x| product(x, 7, 9, false),
    ),
    Case::new("more than one block of scales", four!(2, 104, 160), |x| product(x, 104, 160, true)),
    Case::new("few rows", four!(12, 40, 192), |x| product(x, 40, 192, true)),
    Case::new("32 rows of one block", four!(32, 21, 64), |x| product(x, 21, 64, true)),
    Case::new("17 long rows", four!(17, 50, 5184), |x| product(x, 50, 5184, true)),
    Case::new("a row", four!(1, 300, 1152), |x| product(x, 300, 1152, true)),
    Case::new("Qwen3's gate, a token", four!(12, 3072, 1024), |x| product(x, 3072, 1024, true)).bench(),
    Case::new("Qwen3's down, a token", four!(12, 1024, 3072), |x| product(x, 1024, 3072, true)).bench(),
    Case::new("Qwen3's gate", four!(8192, 3072, 1024), |x| product(x, 3072, 1024, true)).bench(),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::fill_normal;

    fn wide(q: &Nf4, n: usize) -> Vec<f32> {
        let mut w = vec![0.0; n];
        widen(&q.codes, &q.scales, &q.largest, q.mean, &mut w);
        w
    }

    #[test]
    fn a_normal_matrix_is_near_itself_and_goes_through_unchanged() {
        for n in [1, 64, 129, 64 * 256 + 5, 1 << 17] {
            let mut w = vec![0.0; n];
            fill_normal(1, n as u64, &mut w);
            let q = Nf4::new(&w);
            assert_eq!([q.codes.len(), q.scales.len(), q.largest.len()], Nf4::sizes(n));
            let back = wide(&q, n);
            let error = w.iter().zip(&back).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / w.iter().map(|a| a * a).sum::<f32>();
            assert!(error.sqrt() < 0.11, "{n}: {error}");
            assert_eq!(Nf4::new(&back).codes, q.codes, "{n}: quantizing the dequantized weights changes nothing");
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        let q = Nf4::new(&[0.0; 200]);
        assert_eq!(wide(&q, 200), [0.0; 200]);
        // A block of them among others: its scale is a rounded one, which may be a small number.
        let mut w = vec![0.0; 5 * BLOCK];
        fill_normal(1, 2, &mut w);
        w[2 * BLOCK..3 * BLOCK].fill(0.0);
        let back = wide(&Nf4::new(&w), w.len());
        assert_eq!(back[2 * BLOCK..3 * BLOCK], [0.0; BLOCK]);
        let others = back[..2 * BLOCK].iter().chain(&back[3 * BLOCK..]);
        assert!(others.filter(|v| **v != 0.0).count() > 3 * BLOCK);
    }

    /// Numbers that bitsandbytes 0.50.2 makes of the same weights.
    #[test]
    fn bits_are_those_of_bitsandbytes() {
        let weights: Vec<f32> = (0..200).map(|i| ((i * 37 % 101) as f32 - 50.0) / (20.0 + (i / 64) as f32)).collect();
        let q = Nf4::new(&weights);
        assert_eq!(
            (q.codes.iter().fold(0u32, |h, &c| h.wrapping_mul(31).wrapping_add(c as u32)), &q.scales[..]),
            (EXPECTED.0, &EXPECTED.1[..])
        );
        assert!((q.mean - EXPECTED.2).abs() < 1e-6 && (q.largest[0] - EXPECTED.3).abs() < 1e-6, "{} {:?}", q.mean, q.largest);
    }

    const EXPECTED: (u32, [u8; 4], f32, f32) = (167_335_436, [228, 206, 171, 0], 2.2558112, 0.38624597);
}
