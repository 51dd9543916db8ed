//! Matmul: a [.., m, k] times b [.., k, n]. Transposes are views; leading dimensions broadcast.

mod terms;
mod thin;

use crate::cpu::gemm::{Into, Mat, gemm};
use crate::cpu::math::tanh;
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{Act, At, Code, Gemm, Io, Matrix, Scaled, Step};
use crate::meta::{DType, Layout, Meta, broadcast, broadcast_strides, contiguous};
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share};
use crate::ops::narrow::{self, Wide};
use crate::ops::pointwise::{Bin, run::binary};
use crate::ops::view::Permute;
use crate::record::Var;
use rayon::prelude::*;

/// Inputs: a, b, then c if `add`, then a bias `[n]` if `bias`. y = act(a b + c + bias), rounded once.
/// Of FP8 operands (`scaled`): a, b, then what each is multiplied by, f32 `[1]`, then c and the bias.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Matmul {
    /// Type of the result; the inputs' if None.
    pub dtype: Option<DType>,
    /// Whether the result is added to a third input, and where.
    pub add: Option<Add>,
    /// Whether a bias, the last input, is added to every row.
    pub bias: bool,
    /// The activation function that is applied last.
    pub act: Option<Act>,
    /// For FP8 operands, which have a scale each, and for these only.
    pub scaled: Option<Sums>,
}

/// How the tensor cores add up products of FP8 numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sums {
    /// With some 14 bits, which is faster.
    Fast,
    /// Every few products in f32.
    F32,
}

impl Matmul {
    /// The number of the input that a b is added to, if `add`.
    pub fn addend(&self) -> usize {
        if self.scaled.is_some() { 4 } else { 2 }
    }
}

/// Where c, which a b is added to, lies; the pass `in-place` decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Add {
    /// c is read from its own buffer, and the result gets another.
    Apart,
    /// The result overwrites c.
    InPlace,
}

/// `Op::precision` of an op that multiplies by weights in 16 bits, but not in FP8, and why.
pub fn not_in_fp8(rule: Narrow, why: &'static str) -> Narrow {
    if rule == Narrow::Round { Narrow::Sixteen(why) } else { rule }
}

impl Op for Matmul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let (a, b) = (&x[0], &x[1]);
        assert_eq!(x.len(), self.addend() + self.add.is_some() as usize + self.bias as usize, "inputs of {self:?}");
        let types = match self.scaled {
            None => a.dtype == b.dtype && a.dtype.is_float(),
            Some(_) => a.dtype.is_fp8() && b.dtype.is_fp8() && self.dtype.is_some() && x[2..4] == [Meta::f32(&[1]), Meta::f32(&[1])],
        };
        let fits = a.rank() >= 2 && b.rank() >= 2 && a.dim(0) == b.dim(1) && types;
        let lead = fits.then(|| broadcast(&[&a.shape[..a.rank() - 2], &b.shape[..b.rank() - 2]])).flatten();
        let lead = lead.unwrap_or_else(|| panic!("matmul of {a:?} and {b:?}"));
        let y = Meta::new(&[&lead[..], &[a.dim(1), b.dim(0)]].concat(), self.dtype.unwrap_or(a.dtype));
        assert!(self.add.is_none() || x[self.addend()] == y, "matmul of {a:?} and {b:?} added to {:?}", x[self.addend()]);
        assert!(!self.bias || x[x.len() - 1] == Meta::new(&[b.dim(0)], y.dtype), "matmul of {a:?} and {b:?}: a bias {:?}", x[x.len() - 1]);
        vec![y]
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        if self.add == Some(Add::InPlace) { vec![(self.addend(), 0)] } else { vec![] }
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (a, b) = (&x[0], &x[1]);
        let (m, k, n) = (a.dim(1), a.dim(0), b.dim(0));
        let lead = y[0].shape[..y[0].shape.len() - 2].to_vec();
        let matrix = |v: &View, batch: usize| {
            let r = v.shape.len();
            let strides = broadcast_strides(&v.shape[..r - 2], &v.strides[..r - 2], &lead);
            let (mut offset, mut left) = (0, batch);
            for (d, &size) in lead.iter().enumerate().rev() {
                offset += left % size * strides[d];
                left /= size;
            }
            (offset, v.strides[r - 2], v.strides[r - 1])
        };
        let scale = self.scaled.map_or(1.0, |_| x[2].f32()[0] * x[3].f32()[0]);
        let into = if self.add.is_some() { Into::Add } else { Into::Replace };
        let product = |batch: usize, out: &mut [f32], parallel: bool| {
            let ((ao, ar, ac), (bo, br, bc)) = (matrix(a, batch), matrix(b, batch));
            let a = Mat { data: a.f32(), offset: ao, row: ar, column: ac };
            let b = Mat { data: b.f32(), offset: bo, row: br, column: bc };
            gemm(out, n, into, m, k, n, a, b, scale, parallel)
        };
        let batches: usize = lead.iter().product();
        let out = y[0].f32();
        if self.add == Some(Add::Apart) {
            out.par_chunks_mut(4096).zip(x[self.addend()].f32().par_chunks(4096)).for_each(|(y, c)| y.copy_from_slice(c));
        }
        if batches < rayon::current_num_threads() {
            out.chunks_mut(m * n).enumerate().for_each(|(i, o)| product(i, o, true));
        } else {
            out.par_chunks_mut(m * n).enumerate().for_each(|(i, o)| product(i, o, false));
        }
        if self.bias || self.act.is_some() {
            let bias = if crate::mutant!("matmul-forgets-its-bias", self.bias, false) { x[x.len() - 1].f32() } else { &[] };
            out.par_chunks_mut(n * (TASK / n).max(1)).for_each(|rows| epilogue(rows, n, bias, self.act));
        }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        match at {
            _ if self.scaled.is_some() => Narrow::Keep,
            Port::In(0 | 1) => Narrow::Eight,
            _ => op::rounded(at),
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        let own = || thin::code(io).or_else(|| over_rows(io)).or_else(|| terms::code(io));
        if let Some(code) = own().filter(|_| self.add.is_none() && !self.bias && self.act.is_none() && self.scaled.is_none()) {
            return code;
        }
        let (a, b, y) = (&io.x[0], &io.x[1], &io.y[0]);
        let (m, k, n) = (a.dim(1), a.dim(0), b.dim(0));
        let lead = &y.shape[..y.rank() - 2];
        let leads = |i: usize| {
            let r = io.x[i].rank();
            broadcast_strides(&io.x[i].shape[..r - 2], &io.strides[i][..r - 2], lead)
        };
        let strides = [leads(0), leads(1), contiguous(&y.shape)[..lead.len()].to_vec()];
        // From the right, as many leading dimensions as have uniform strides in all three matrices become one batch; the rest is a loop.
        let mut first = lead.len();
        let mut batch = 1;
        while first > 0 {
            let d = first - 1;
            let even = batch == 1 || strides.iter().all(|s| s[d] == s[d + 1] * lead[d + 1] || lead[d] == 1);
            if !even {
                break;
            }
            batch *= lead[d];
            first = d;
        }
        let step = |s: &Vec<usize>| (0..lead.len()).rev().find(|&d| d >= first && lead[d] != 1).map_or(0, |d| s[d]);
        let matrix =
            |at: At, i: usize, row: usize, column: usize, dtype| Matrix { place: at.into(), dtype, row, column, batch: step(&strides[i]) };
        let side = |i: usize| {
            let r = io.x[i].rank();
            matrix(At::X(i), i, io.strides[i][r - 2], io.strides[i][r - 1], io.x[i].dtype)
        };
        let outer: usize = lead[..first].iter().product();
        let steps = (0..outer).map(|o| {
            let offset = |s: &Vec<usize>| {
                let (mut left, mut sum) = (o, 0);
                for d in (0..first).rev() {
                    sum += left % lead[d] * s[d];
                    left /= lead[d];
                }
                sum
            };
            let [oa, ob, oc] = [&strides[0], &strides[1], &strides[2]].map(offset);
            let out = |at: At| matrix(at, 2, n, 1, y.dtype).at(oc);
            let plus = (self.add == Some(Add::Apart)).then(|| out(At::X(self.addend())));
            let bias = self.bias.then(|| At::X(io.x.len() - 1).into());
            let beta = if self.add.is_some() { 1.0 } else { 0.0 };
            let plain = Gemm::new(m, n, k, side(0).at(oa), side(1).at(ob), out(At::Y(0)));
            let scaled = self.scaled.map(|sums| Scaled { by: [At::X(2), At::X(3)].map(|at| at.into()), fast: sums == Sums::Fast });
            Step::Gemm(Gemm { batch, beta, plus, bias, act: self.act, scaled, ..plain })
        });
        Code { steps: steps.collect(), workspace: 0 }
    }

    /// Leading dimensions, rows of a, columns of b, and the sum, of a plain product.
    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        if self.add.is_some() || self.bias || self.act.is_some() || self.scaled.is_some() {
            return vec![];
        }
        let (a, b, y) = (&x[0], &x[1], self.infer(x).remove(0));
        let lead = |m: &Meta, d: usize| {
            let own = (d + m.rank()).checked_sub(y.rank()).filter(|&own| m.shape[own] == y.shape[d]);
            own.map_or(Share::Whole, Share::Dim)
        };
        let last = |m: &Meta, back: usize| Share::Dim(m.rank() - 1 - back);
        let mut axes: Vec<Axis> = (0..y.rank() - 2).map(|d| Axis::new([lead(a, d), lead(b, d)], [Share::Dim(d)])).collect();
        axes.push(Axis::new([last(a, 1), Share::Whole], [last(&y, 1)]));
        axes.push(Axis::new([Share::Whole, last(b, 0)], [last(&y, 0)]));
        axes.push(Axis::new([last(a, 0), last(b, 1)], [Share::Sum]));
        axes
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return vec![None; x.len()] };
        let narrow = d.cast(x[0].dtype());
        // An outer product (k = 1) is a broadcast multiplication, which fuses with its readers.
        let product = |a: Var<'g>, b: Var<'g>| if a.dim(0) == 1 { a * b } else { a.matmul(b) };
        let by_a = product(narrow, x[1].t()).sum_to(&x[0].shape());
        // The gradient of a weight that is read transposed is computed in the weight's own layout.
        let transposed = x[1].recorder().with_graph(|g| g.nodes[x[1].value().node].op::<Permute>().is_some());
        let by_b = if transposed { product(narrow.t(), x[0]).t() } else { product(x[0].t(), narrow) };
        let mut grads = vec![Some(by_a), Some(by_b.sum_to(&x[1].shape()))];
        grads.extend(self.add.map(|_| Some(d)));
        grads
    }

    /// Epilogues and FP8 come after autodiff.
    fn differentiable(&self) -> bool {
        !self.bias && self.act.is_none() && self.scaled.is_none()
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let y = &self.infer(x)[0];
        Cost::compute(2 * y.elements() * x[0].dim(0), x.iter().map(|m| m.bytes()).sum::<usize>() + y.bytes())
    }

    fn layout(&self, input: usize) -> Layout {
        if input < 2 { Layout::Matrix } else { Layout::Contiguous }
    }
}

/// The least K, and the fewest elements of the large matrix, for which a GEMM that is bound by reading that matrix uses a kernel of its own.
const TERMS: usize = 2048;
const LARGE: usize = 1 << 21;

/// x^T p, or its transpose, where p has few columns and x many rows: the gradient of a LoRA matrix.
fn over_rows(io: &Io) -> Option<Code> {
    let (m, k, n) = (io.x[0].dim(1), io.x[0].dim(0), io.x[1].dim(0));
    let strides = |i: usize| (io.strides[i][io.x[i].rank() - 2], io.strides[i][io.x[i].rank() - 1]);
    let ((a, a_column), (b, b_column)) = (strides(0), strides(1));
    // The large matrix as [k, columns], the other one as [k, r].
    let transposed = m < n;
    let (large, row, one, p, r) = match transposed {
        true => (1, b, b_column, (0, a_column, a), m),
        false => (0, a_column, a, (1, b, b_column), n),
    };
    let d = Wide { input: large, m: k, n: m.max(n), row, offset: io.offsets[large] };
    if io.y[0].elements() != m * n || one != 1 || k < TERMS || d.m * d.n < LARGE {
        return None;
    }
    narrow::by_column(io, d, p, r, transposed).ok()
}

/// Elements that a task of the CPU finishes at once, in whole rows: they are still in its L1 cache for the activation.
const TASK: usize = 4096;

/// Adds the bias to rows of `n` numbers and applies the activation, with the roundings of the pointwise ops that these stand for.
fn epilogue(rows: &mut [f32], n: usize, bias: &[f32], act: Option<Act>) {
    simd(
        #[inline(always)]
        || {
            if !bias.is_empty() {
                rows.chunks_mut(n).for_each(|row| row.iter_mut().zip(bias).for_each(|(v, b)| *v += b));
            }
            match act {
                Some(Act::Relu) => rows.iter_mut().for_each(|v| *v = binary(Bin::Max, *v, 0.0)),
                Some(Act::Gelu) => crate::mutant!(
                    "slow-gelu-epilogue",
                    rows.iter_mut().for_each(|v| *v = gelu(*v, tanh)),
                    rows.iter_mut().for_each(|v| *v = gelu(*v, f32::tanh))
                ),
                None => {}
            }
        },
    )
}

/// What `Var::gelu` records. The library's tanh would be a call for each number.
#[inline(always)]
fn gelu(x: f32, tanh: impl Fn(f32) -> f32) -> f32 {
    let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044715 * (x * x * x));
    0.5 * x * (1.0 + tanh(inner))
}

impl<'g> Var<'g> {
    /// [.., m, k] times [.., k, n]. If `other` is a single matrix, all rows of `self` become one GEMM.
    #[track_caller]
    pub fn matmul(self, other: Var<'g>) -> Var<'g> {
        let (a, b) = (self.meta(), other.meta());
        if b.rank() == 2 && a.rank() > 2 {
            let flat = self.reshape(&[a.rows(), a.dim(0)]);
            let y = self.recorder().op1(Matmul::default(), &[flat, other]);
            return y.reshape(&[&a.shape[..a.rank() - 1], &[b.dim(0)]].concat());
        }
        self.recorder().op1(Matmul::default(), &[self, other])
    }

    /// x W^T with W [out, in], as `torch.nn.functional.linear`.
    #[track_caller]
    pub fn linear(self, weight: Var<'g>) -> Var<'g> {
        self.matmul(weight.t())
    }
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("plain", &[In(&[7, 5], Fill::Normal), In(&[5, 9], Fill::Normal)], |x| vec![x[0].matmul(x[1])]),
    Case::new("both transposed", &[In(&[5, 7], Fill::Normal), In(&[9, 5], Fill::Normal)], |x| vec![x[0].t().matmul(x[1].t())]),
    Case::new("rows x matrix", &[In(&[2, 3, 5], Fill::Normal), In(&[4, 5], Fill::Normal)], |x| vec![x[0].linear(x[1])]),
    Case::new("batch broadcast", &[In(&[2, 3, 4, 5], Fill::Normal), In(&[3, 5, 2], Fill::Normal)], |x| vec![x[0].matmul(x[1])]),
    Case::new("groups of heads", &[In(&[2, 2, 3, 4, 5], Fill::Normal), In(&[2, 2, 1, 5, 4], Fill::Normal)], |x| vec![x[0].matmul(x[1])]),
    Case::new("vector", &[In(&[3, 31], Fill::Normal), In(&[31, 1], Fill::Normal)], |x| vec![x[0].matmul(x[1])]),
    Case::new("added to another", &[In(&[7, 5], Fill::Normal), In(&[5, 9], Fill::Normal), In(&[7, 9], Fill::Normal)], |x| {
        vec![x[0].recorder().op1(Matmul { add: Some(Add::Apart), ..Matmul::default() }, x)]
    }),
    Case::new("added in place", &[In(&[2, 7, 5], Fill::Normal), In(&[5, 9], Fill::Normal), In(&[2, 7, 9], Fill::Normal)], |x| {
        vec![x[0].recorder().op1(Matmul { add: Some(Add::InPlace), ..Matmul::default() }, x)]
    }),
    Case::new("f32 from whatever", &[In(&[7, 40], Fill::Normal), In(&[40, 9], Fill::Normal)], |x| {
        vec![x[0].recorder().op1(Matmul { dtype: Some(DType::F32), ..Matmul::default() }, x)]
    }),
    Case::new("bias and gelu", &[In(&[7, 16], Fill::Frozen), In(&[16, 24], Fill::Frozen), In(&[24], Fill::Frozen)], |x| {
        vec![x[0].recorder().op1(Matmul { bias: true, act: Some(Act::Gelu), ..Matmul::default() }, x)]
    }),
    Case::new("relu of a sum", &[In(&[8, 16], Fill::Frozen), In(&[16, 24], Fill::Frozen), In(&[8, 24], Fill::Frozen)], |x| {
        vec![x[0].recorder().op1(Matmul { add: Some(Add::Apart), act: Some(Act::Relu), ..Matmul::default() }, x)]
    }),
    Case::new("one column", &[In(&[515, 64], Fill::Normal), In(&[64, 1], Fill::Normal)], |x| vec![x[0].matmul(x[1])]),
    Case::new("two columns", &[In(&[513, 96], Fill::Normal), In(&[2, 96], Fill::Normal)], |x| vec![x[0].linear(x[1])]),
    Case::new("three columns, odd", &[In(&[530, 77], Fill::Normal), In(&[77, 3], Fill::Normal)], |x| vec![x[0].matmul(x[1])]),
    Case::new("eight columns of a wider", &[In(&[2, 300, 100], Fill::Normal), In(&[72, 9], Fill::Normal)], |x| {
        vec![x[0].reshape(&[600, 100]).slice(1, 4, 76).matmul(x[1].slice(1, 1, 9))]
    }),
    Case::new("few rows", &[In(&[6, 70], Fill::Normal), In(&[521, 70], Fill::Normal)], |x| vec![x[0].matmul(x[1].t())]),
    Case::new("x^T p of few columns", &[In(&[2100, 1000], Fill::Normal), In(&[2100, 24], Fill::Normal)], |x| {
        let f32 = Matmul { dtype: Some(DType::F32), ..Matmul::default() };
        vec![x[0].recorder().op1(f32.clone(), &[x[0].t(), x[1]]), x[0].recorder().op1(f32, &[x[1].slice(1, 8, 24).t(), x[0]])]
    }),
    Case::new("f32 of two columns", &[In(&[513, 96], Fill::Normal), In(&[2, 96], Fill::Normal)], |x| {
        vec![x[0].recorder().op1(Matmul { dtype: Some(DType::F32), ..Matmul::default() }, &[x[0], x[1].t()])]
    }),
    Case::new("outer", &[In(&[7, 1], Fill::Normal), In(&[1, 5], Fill::Normal)], |x| vec![x[0].matmul(x[1])]),
    Case::new("router", &[In(&[65536, 768], Fill::Normal), In(&[2, 768], Fill::Normal)], |x| vec![x[0].linear(x[1])]).bench(),
    Case::new("router gradient", &[In(&[65536, 768], Fill::Normal), In(&[65536, 2], Fill::Normal)], |x| vec![x[1].t().matmul(x[0])])
        .bench(),
    Case::new("an adapter's gradient", &[In(&[8192, 1024], Fill::Frozen), In(&[8192, 48], Fill::Frozen)], |x| {
        vec![x[0].recorder().op1(Matmul { dtype: Some(DType::F32), ..Matmul::default() }, &[x[1].t(), x[0]]).stop_gradient()]
    })
    .bench(),
    Case::new("few terms", &[In(&[2050, 16], Fill::Normal), In(&[16, 1032], Fill::Normal)], |x| vec![x[0].matmul(x[1])]),
    Case::new("small k, transposed", &[In(&[2051, 24], Fill::Normal), In(&[1048, 20], Fill::Normal)], |x| {
        vec![x[0].slice(1, 4, 24).linear(x[1])]
    }),
    Case::new("few terms of many rows", &[In(&[40_003, 64], Fill::Normal), In(&[520, 64], Fill::Normal)], |x| vec![x[0].linear(x[1])]),
    Case::new("what an adapter adds", &[In(&[8192, 48], Fill::Frozen), In(&[3072, 16], Fill::Frozen)], |x| {
        vec![x[0].slice(1, 16, 32).linear(x[1])]
    })
    .bench(),
    Case::new("what a smaller adapter adds", &[In(&[8192, 16], Fill::Frozen), In(&[16, 1024], Fill::Frozen)], |x| vec![x[0].matmul(x[1])])
        .bench(),
    Case::new("mlp up", &[In(&[8192, 768], Fill::Normal), In(&[3072, 768], Fill::Normal)], |x| vec![x[0].linear(x[1])]).bench(),
];
