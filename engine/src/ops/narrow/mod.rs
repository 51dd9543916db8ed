//! Products of a large matrix with narrow ones, as adapters have them: nothing but reading it, which is done once for both.

mod gpu;

pub use gpu::{Wide, by_column};

use crate::cpu::gemm::{Into, Mat, gemm};
use crate::cpu::{View, ViewMut};
use crate::kernel::{At, Code, Gemm, Io, Matrix, Step};
use crate::meta::{DType, Layout, Meta};
use crate::op::{Case, Cost, Fill, Grads, In, Op, no_gradient};
use crate::ops::matmul::Matmul;
use crate::record::Var;

/// Inputs: d [m, n], p [m, r], q [n, r]. Outputs: d q [m, r], and d^T p [n, r] in f32.
#[derive(Debug)]
pub struct NarrowProducts;

impl Op for NarrowProducts {
    fn name(&self) -> &'static str {
        "narrow_products"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let (d, p, q) = (&x[0], &x[1], &x[2]);
        let alike = x.iter().all(|m| m.rank() == 2 && m.dtype == d.dtype && m.dtype.is_float());
        assert!(alike && p.shape[0] == d.shape[0] && q.shape[0] == d.shape[1] && p.shape[1] == q.shape[1], "narrow_products of {x:?}");
        vec![p.clone(), Meta::f32(&q.shape)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (m, n, r) = (x[0].dim(1), x[0].dim(0), x[1].dim(0));
        let [d, p, q] = [0, 1, 2].map(|i| Mat { data: x[i].f32(), offset: 0, row: x[i].strides[0], column: x[i].strides[1] });
        gemm(y[0].f32(), r, Into::Replace, m, n, r, d, q, 1.0, true);
        gemm(y[1].f32(), r, Into::Replace, n, m, r, d.t(), p, 1.0, true);
    }

    /// Two products, where rows do not start on 16 bytes.
    fn cuda(&self, io: &Io) -> Code {
        gpu::both(io).unwrap_or_else(|_| {
            let (m, n, r) = (io.x[0].dim(1), io.x[0].dim(0), io.x[1].dim(0));
            let [d, p, q] = [0, 1, 2].map(|i| {
                let (row, column) = (io.strides[i][0], io.strides[i][1]);
                Matrix { place: At::X(i).into(), dtype: io.x[i].dtype, row, column, batch: 0 }
            });
            let by_row = Gemm::new(m, r, n, d, q, Matrix::rows(At::Y(0), io.y[0].dtype, r));
            let by_column = Gemm::new(n, r, m, d.t(), p, Matrix::rows(At::Y(1), io.y[1].dtype, r));
            Code { steps: vec![Step::Gemm(by_row), Step::Gemm(by_column)], workspace: 0 }
        })
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let y: usize = self.infer(x).iter().map(|m| m.bytes()).sum();
        Cost::compute(4 * x[0].elements() * x[1].dim(0), x.iter().map(|m| m.bytes()).sum::<usize>() + y)
    }

    fn layout(&self, _: usize) -> Layout {
        Layout::Matrix
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let by_column = x[0].recorder().op1(Matmul { dtype: Some(DType::F32), ..Matmul::default() }, &[x[0].t(), x[1]]);
        Some(vec![x[0].matmul(x[2]), by_column])
    }
}

fn both<'g>(x: &[Var<'g>]) -> Vec<Var<'g>> {
    x[0].recorder().op(NarrowProducts, x)
}

const F: Fill = Fill::Frozen;

pub const CASES: &[Case] = &[
    Case::new("plain", &[In(&[70, 40], F), In(&[70, 8], F), In(&[40, 8], F)], both),
    Case::new("several blocks", &[In(&[333, 520], F), In(&[333, 16], F), In(&[520, 16], F)], both),
    Case::new("many blocks", &[In(&[9000, 264], F), In(&[9000, 16], F), In(&[264, 16], F)], both),
    Case::new("one row", &[In(&[1, 1032], F), In(&[1, 32], F), In(&[1032, 32], F)], both),
    Case::new("one block", &[In(&[63, 248], F), In(&[63, 24], F), In(&[248, 24], F)], both),
    Case::new("odd", &[In(&[17, 13], F), In(&[17, 3], F), In(&[13, 3], F)], both),
    Case::new("slices", &[In(&[130, 272], F), In(&[130, 48], F), In(&[264, 40], F)], |x| {
        both(&[x[0].slice(1, 8, 272), x[1].slice(1, 16, 40), x[2].slice(1, 8, 32)])
    }),
    Case::new("turned", &[In(&[130, 264], F), In(&[130, 32], F), In(&[32, 264], F)], |x| both(&[x[0], x[1], x[2].t()])),
    Case::new("an adapter's gradients", &[In(&[8192, 3072], F), In(&[8192, 16], F), In(&[3072, 16], F)], both).bench(),
    Case::new("a smaller adapter's gradients", &[In(&[8192, 1024], F), In(&[8192, 16], F), In(&[1024, 16], F)], both).bench(),
];
