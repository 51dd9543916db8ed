//! Matrix products: x [.., m, k] times w [.., k, n]. Transposes are views; leading dimensions broadcast.

use crate::cpu::gemm::{Into, Mat, gemm};
use crate::cpu::{View, ViewMut};
use crate::kernel::{At, Code, Gemm, Io, Matrix, Step};
use crate::meta::{Layout, Meta, broadcast, broadcast_strides, contiguous};
use crate::op::{Case, Cost, Fill, Grads, In, Op};
use crate::record::Var;
use rayon::prelude::*;

#[derive(Debug)]
pub struct Matmul;

impl Op for Matmul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let (a, b) = (&x[0], &x[1]);
        let fits = a.rank() >= 2 && b.rank() >= 2 && a.dim(0) == b.dim(1) && a.dtype == b.dtype && a.dtype.is_float();
        let lead = fits.then(|| broadcast(&[&a.shape[..a.rank() - 2], &b.shape[..b.rank() - 2]])).flatten();
        let lead = lead.unwrap_or_else(|| panic!("matmul of {a:?} and {b:?}"));
        vec![a.with(&[&lead[..], &[a.dim(1), b.dim(0)]].concat())]
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
        let product = |batch: usize, out: &mut [f32], parallel: bool| {
            let ((ao, ar, ac), (bo, br, bc)) = (matrix(a, batch), matrix(b, batch));
            let a = Mat { data: a.f32(), offset: ao, row: ar, column: ac };
            let b = Mat { data: b.f32(), offset: bo, row: br, column: bc };
            gemm(out, n, Into::Replace, m, k, n, a, b, 1.0, parallel)
        };
        let batches: usize = lead.iter().product();
        let out = y[0].f32();
        if batches < rayon::current_num_threads() {
            out.chunks_mut(m * n).enumerate().for_each(|(i, o)| product(i, o, true));
        } else {
            out.par_chunks_mut(m * n).enumerate().for_each(|(i, o)| product(i, o, false));
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        let (a, b, y) = (&io.x[0], &io.x[1], &io.y[0]);
        let (m, k, n) = (a.dim(1), a.dim(0), b.dim(0));
        let lead = &y.shape[..y.rank() - 2];
        let leads = |i: usize| {
            let r = io.x[i].rank();
            broadcast_strides(&io.x[i].shape[..r - 2], &io.strides[i][..r - 2], lead)
        };
        let strides = [leads(0), leads(1), contiguous(&y.shape)[..lead.len()].to_vec()];
        // From the right, as many dimensions as all three step through evenly become one batch; the rest is a loop.
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
            let (a, b, c) = (side(0).at(oa), side(1).at(ob), matrix(At::Y(0), 2, n, 1, y.dtype).at(oc));
            Step::Gemm(Gemm { m, n, k, batch, a, b, c, alpha: 1.0, beta: 0.0 })
        });
        Code { steps: steps.collect(), workspace: 0 }
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return vec![None, None] };
        vec![Some(d.matmul(x[1].t()).sum_to(&x[0].shape())), Some(x[0].t().matmul(d).sum_to(&x[1].shape()))]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let y = &self.infer(x)[0];
        Cost::compute(2 * y.elements() * x[0].dim(0), x[0].bytes() + x[1].bytes() + y.bytes())
    }

    fn layout(&self, _: usize) -> Layout {
        Layout::Matrix
    }
}

impl<'g> Var<'g> {
    /// [.., m, k] x [.., k, n]. Where `other` is one matrix, all rows of `self` are multiplied at once.
    #[track_caller]
    pub fn matmul(self, other: Var<'g>) -> Var<'g> {
        let (a, b) = (self.meta(), other.meta());
        if b.rank() == 2 && a.rank() > 2 {
            let flat = self.reshape(&[a.rows(), a.dim(0)]);
            let y = self.recorder().op1(Matmul, &[flat, other]);
            return y.reshape(&[&a.shape[..a.rank() - 1], &[b.dim(0)]].concat());
        }
        self.recorder().op1(Matmul, &[self, other])
    }

    /// x W^T: W is [out, in], as PyTorch keeps it.
    #[track_caller]
    pub fn linear(self, weight: Var<'g>) -> Var<'g> {
        self.matmul(weight.t())
    }
}

pub const CASES: &[Case] = &[
    Case::new("plain", &[In(&[7, 5], Fill::Normal), In(&[5, 9], Fill::Normal)], |x| vec![x[0].matmul(x[1])]),
    Case::new("both transposed", &[In(&[5, 7], Fill::Normal), In(&[9, 5], Fill::Normal)], |x| vec![x[0].t().matmul(x[1].t())]),
    Case::new("rows x matrix", &[In(&[2, 3, 5], Fill::Normal), In(&[4, 5], Fill::Normal)], |x| vec![x[0].linear(x[1])]),
    Case::new("batch broadcast", &[In(&[2, 3, 4, 5], Fill::Normal), In(&[3, 5, 2], Fill::Normal)], |x| vec![x[0].matmul(x[1])]),
    Case::new("groups of heads", &[In(&[2, 2, 3, 4, 5], Fill::Normal), In(&[2, 2, 1, 5, 4], Fill::Normal)], |x| vec![x[0].matmul(x[1])]),
    Case::new("vector", &[In(&[3, 31], Fill::Normal), In(&[31, 1], Fill::Normal)], |x| vec![x[0].matmul(x[1])]),
    Case::new("mlp up", &[In(&[8192, 768], Fill::Normal), In(&[3072, 768], Fill::Normal)], |x| vec![x[0].linear(x[1])]).bench(),
];
