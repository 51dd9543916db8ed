//! LoRA backward: two matmuls of one large matrix with low-rank ones. They are bound by reading the large matrix, which is done once for both.

mod gpu;

pub use gpu::{Wide, by_column};

use crate::cpu::gemm::{Into, Mat, gemm};
use crate::cpu::{View, ViewMut};
use crate::kernel::{At, Code, Gemm, Io, Matrix, Step};
use crate::meta::{DType, Layout, Meta};
use crate::op::{self, Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use crate::ops::concat::concat;
use crate::ops::matmul::Matmul;
use crate::record::Var;

/// Inputs: d [m, n], p [m, r], q [n, r], for one or more adapters with the same m and r. Outputs: d q of all, concatenated [m, adapters * r]; and for
/// each d^T p [n, r] in f32.
#[derive(Debug)]
pub struct NarrowProducts;

impl Op for NarrowProducts {
    fn name(&self) -> &'static str {
        "narrow_products"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let (m, r, count) = (x[0].dim(1), x[1].dim(0), x.len() / 3);
        let alike = x.len() == 3 * count && x.iter().all(|m| m.rank() == 2 && m.dtype == x[0].dtype && m.dtype.is_float());
        let fit = |x: &[Meta]| x[0].dim(1) == m && x[1].shape == [m, r] && x[2].shape == [x[0].dim(0), r];
        assert!(alike && x.chunks(3).all(fit), "narrow_products of {x:?}");
        let by_column = x.chunks(3).map(|x| Meta::f32(&x[2].shape));
        std::iter::once(x[0].with(&[m, count * r])).chain(by_column).collect()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (r, all) = (x[1].dim(0), y[0].dim(0));
        for (i, x) in x.chunks(3).enumerate() {
            let (m, n) = (x[0].dim(1), x[0].dim(0));
            let [d, p, q] = [0, 1, 2].map(|i| Mat { data: x[i].f32(), offset: 0, row: x[i].strides[0], column: x[i].strides[1] });
            gemm(&mut y[0].f32()[i * r..], all, Into::Replace, m, n, r, d, q, 1.0, true);
            gemm(y[1 + i].f32(), r, Into::Replace, n, m, r, d.t(), p, 1.0, true);
        }
    }

    /// Two GEMMs for each, if rows are not aligned to 16 bytes.
    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        gpu::both(io).unwrap_or_else(|_| {
            let (r, all, dtype) = (io.x[1].dim(0), io.y[0].dim(0), io.y[0].dtype);
            let products = |i: usize| {
                let (m, n) = (io.x[3 * i].dim(1), io.x[3 * i].dim(0));
                let [d, p, q] = [0, 1, 2].map(|k| {
                    let (row, column) = (io.strides[3 * i + k][0], io.strides[3 * i + k][1]);
                    Matrix { place: At::X(3 * i + k).into(), dtype: io.x[3 * i + k].dtype, row, column, batch: 0 }
                });
                let by_row = Matrix { place: At::Y(0).plus(i * r * dtype.size()), dtype, row: all, column: 1, batch: 0 };
                let by_column = Matrix::rows(At::Y(1 + i), DType::F32, r);
                [Gemm::new(m, r, n, d, q, by_row), Gemm::new(n, r, m, d.t(), p, by_column)]
            };
            Code { steps: (0..io.x.len() / 3).flat_map(products).map(Step::Gemm).collect(), workspace: 0 }
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
        let terms: usize = x.iter().step_by(3).map(|d| d.elements()).sum();
        Cost::compute(4 * terms * x[1].dim(0), x.iter().map(|m| m.bytes()).sum::<usize>() + y)
    }

    fn layout(&self, _: usize) -> Layout {
        Layout::Matrix
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let by_row: Vec<_> = x.chunks(3).map(|x| x[0].matmul(x[2])).collect();
        let by_column =
            x.chunks(3).map(|x| x[0].recorder().op1(Matmul { dtype: Some(DType::F32), ..Matmul::default() }, &[x[0].t(), x[1]]));
        Some(std::iter::once(concat(&by_row, 1)).chain(by_column).collect())
    }
}

fn both<'g>(x: &[Var<'g>]) -> Vec<Var<'g>> {
    x[0].recorder().op(NarrowProducts, x)
}

const F: Fill = Fill::Frozen;

/// Cases that check and time the ops of this module.
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
    Case::new("transposed", &[In(&[130, 264], F), In(&[130, 32], F), In(&[32, 264], F)], |x| both(&[x[0], x[1], x[2].t()])),
    Case::new("several", &[In(&[201, 520], F), In(&[201, 16], F), In(&[520, 16], F), In(&[201, 48], F), In(&[48, 16], F)], |x| {
        both(&[x[0], x[1], x[2], x[3], x[3].slice(1, 16, 32), x[4]])
    }),
    Case::new(
        "several, many blocks",
        &[In(&[5000, 264], F), In(&[5000, 24], F), In(&[264, 24], F), In(&[5000, 1032], F), In(&[1032, 24], F), In(&[24, 264], F)],
        |x| both(&[x[0], x[1], x[2], x[3], x[1], x[4], x[0], x[1], x[5].t()]),
    ),
    Case::new("several, odd", &[In(&[17, 13], F), In(&[17, 3], F), In(&[13, 3], F), In(&[17, 5], F), In(&[5, 3], F)], |x| {
        both(&[x[0], x[1], x[2], x[3], x[1], x[4]])
    }),
    Case::new(
        "qkv's gradients",
        &[
            In(&[8192, 2048], F),
            In(&[8192, 48], F),
            In(&[2048, 16], F),
            In(&[8192, 1024], F),
            In(&[1024, 16], F),
            In(&[8192, 1024], F),
            In(&[1024, 16], F),
        ],
        |x| {
            let p = |i: usize| x[1].slice(1, 16 * i, 16 * i + 16);
            both(&[x[0], p(0), x[2], x[3], p(1), x[4], x[5], p(2), x[6]])
        },
    )
    .bench(),
    Case::new(
        "gate and up's gradients",
        &[In(&[8192, 3072], F), In(&[8192, 32], F), In(&[3072, 16], F), In(&[8192, 3072], F), In(&[3072, 16], F)],
        |x| {
            let p = |i: usize| x[1].slice(1, 16 * i, 16 * i + 16);
            both(&[x[0], p(0), x[2], x[3], p(1), x[4]])
        },
    )
    .bench(),
    Case::new("an adapter's gradients", &[In(&[8192, 3072], F), In(&[8192, 16], F), In(&[3072, 16], F)], both).bench(),
    Case::new("a smaller adapter's gradients", &[In(&[8192, 1024], F), In(&[8192, 16], F), In(&[1024, 16], F)], both).bench(),
];
