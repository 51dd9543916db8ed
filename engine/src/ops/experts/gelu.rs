//! GELU between the two matrices of an expert, and the weight of the row's slot.

use super::grouped::Experts;
use crate::cpu::math::{erf, exp};
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{At, Code, Io, Place};
use crate::meta::{DType, Meta};
use crate::op::{self, Axis, Cost, Grads, Narrow, Op, Port, Share, no_gradient};
use crate::ops::reduce::packs::Rows;
use crate::record::Var;
use rayon::prelude::*;
use std::f32::consts::{FRAC_1_SQRT_2, PI};
use std::sync::Arc;

/// Inputs: h [rows, hidden], `dispatch`'s order and offsets, weights f32 [tokens, top]. Output [rows, hidden]: weight gelu(h), with the error function; rows of
/// other ranks' experts, and of none, are left unwritten.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertGelu {
    /// Experts for each token.
    pub top: usize,
    /// The experts whose rows there are.
    pub experts: Experts,
}

fn check(h: &Meta, [order, offsets, weights]: [&Meta; 3], top: usize) {
    let rows = order.elements();
    let typed = h.dtype.is_float() && order.dtype == DType::I32 && offsets.dtype == DType::I32;
    let fits = h.rank() == 2 && h.dim(1) == rows && rows.is_multiple_of(top) && *weights == Meta::f32(&[rows / top, top]);
    assert!(typed && fits, "GELU of experts, of {h:?}, {order:?}, {offsets:?} and {weights:?}");
}

/// The rows of these experts.
fn own(experts: Experts, offsets: &[i32]) -> std::ops::Range<usize> {
    let offsets = experts.offsets(offsets);
    offsets[0] as usize..offsets[offsets.len() - 1] as usize
}

impl Op for ExpertGelu {
    fn name(&self) -> &'static str {
        "expert_gelu"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check(&x[0], [&x[1], &x[2], &x[3]], self.top);
        vec![x[0].clone()]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (hidden, h, order, weights) = (x[0].dim(0), x[0].f32(), x[1].i32(), x[3].f32());
        let own = own(self.experts, x[2].i32());
        let rows = y[0].f32()[own.start * hidden..own.end * hidden].par_chunks_mut(hidden).zip(&order[own.clone()]);
        rows.zip(h[own.start * hidden..].par_chunks(hidden)).with_min_len(16).for_each(|((out, &slot), h)| {
            simd(
                #[inline(always)]
                || out.iter_mut().zip(h).for_each(|(out, &h)| *out = weights[slot as usize] * (0.5 * h * (1.0 + erf(h * FRAC_1_SQRT_2)))),
            )
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded_first(1, at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let args = [At::X(0).into(), At::X(1).into(), self.experts.place(At::X(2), &io.x[2]), At::X(3).into(), At::Y(0).into()];
        launch(self.experts, io, include_str!("gelu.cu"), "expert_gelu", 2, &args)
    }

    /// Tokens, with rows of each rank's own; and experts.
    fn axes(&self, _: &[Meta], _: usize) -> Vec<Axis> {
        let tokens = Axis::new([Share::Own, Share::Own, Share::Sum, Share::Dim(0)], [Share::Own]);
        vec![tokens, Axis::new([Share::Own, Share::Whole, Share::Whole, Share::Whole], [Share::Own])]
    }

    fn part(&self, _: &[Meta], axis: usize, of: usize, index: usize) -> Option<Arc<dyn Op>> {
        (axis == 1).then(|| Arc::new(ExpertGelu { experts: Experts { index, of }, ..self.clone() }) as _)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0].map(|d| d.cast(x[0].dtype())) else { return no_gradient(4) };
        let both = d.recorder().op(ExpertGeluGrad { top: self.top, experts: self.experts }, &[x[0], d, x[1], x[2], x[3]]);
        vec![Some(both[0]), None, None, Some(both[1])]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 20 * x[0].elements() as u64, ..Cost::memory(2 * x[0].bytes() + x[1].bytes() + x[3].bytes()) }
    }
}

/// Inputs: h [rows, hidden], dy of the same shape, order, offsets, weights. Outputs: gradients with respect to h, and to the weights, f32 [tokens, top], which are 0
/// for rows of other ranks' experts and of none.
#[derive(Debug)]
pub struct ExpertGeluGrad {
    /// Experts for each token.
    pub top: usize,
    /// The experts whose rows there are.
    pub experts: Experts,
}

impl Op for ExpertGeluGrad {
    fn name(&self) -> &'static str {
        "expert_gelu_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check(&x[0], [&x[2], &x[3], &x[4]], self.top);
        assert_eq!(x[0], x[1], "the gradient of GELU's result has its shape and type");
        vec![x[0].clone(), x[4].clone()]
    }

    /// The weights' gradient by row, before it is reordered by slot.
    fn workspace(&self, x: &[Meta]) -> usize {
        x[2].elements()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], by_row: &mut [f32]) {
        let (hidden, h, dy) = (x[0].dim(0), x[0].f32(), x[1].f32());
        let (order, weights, own) = (x[2].i32(), x[4].f32(), own(self.experts, x[3].i32()));
        let [dh, dw] = y else { unreachable!("infer gives two outputs") };
        let rows = dh.f32().par_chunks_mut(hidden).zip(by_row.par_iter_mut()).zip(order).enumerate();
        rows.with_min_len(16).for_each(|(row, ((dh, dw), &slot))| {
            if !own.contains(&row) {
                *dw = 0.0;
                return;
            }
            simd(
                #[inline(always)]
                || {
                    let (h, dy, mut sum) = (&h[row * hidden..][..hidden], &dy[row * hidden..][..hidden], 0.0);
                    for i in 0..hidden {
                        let half = 0.5 * (1.0 + erf(h[i] * FRAC_1_SQRT_2));
                        let bell = exp(-0.5 * h[i] * h[i]) * (1.0 / (2.0 * PI).sqrt());
                        sum += dy[i] * h[i] * half;
                        dh[i] = weights[slot as usize] * dy[i] * (half + h[i] * bell);
                    }
                    *dw = sum;
                },
            )
        });
        let dw = dw.f32();
        order.iter().zip(by_row).for_each(|(&slot, &mut d)| dw[slot as usize] = d);
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let offsets = self.experts.place(At::X(3), &io.x[3]);
        let args = [At::X(0).into(), At::X(1).into(), At::X(2).into(), offsets, At::X(4).into(), At::Y(0).into(), At::Y(1).into()];
        launch(self.experts, io, include_str!("gelu_grad.cu"), "expert_gelu_grad", 3, &args)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 30 * x[0].elements() as u64, ..Cost::memory(3 * x[0].bytes() + x[2].bytes() + 2 * x[4].bytes()) }
    }
}

/// A few threads, a warp or a block for each row. Input `offsets` is `dispatch`'s.
fn launch(experts: Experts, io: &Io, source: &str, entry: &'static str, offsets: usize, args: &[Place]) -> Code {
    let (hidden, dtype) = (io.x[0].dim(0), io.x[0].dtype);
    let (rows, n) = (Rows::new(hidden, &[dtype]), io.x[0].rows());
    rows.launch(source, entry, hidden)
        .define_type("T", dtype)
        .define("N", n)
        .define("EXPERTS", experts.count(&io.x[offsets]))
        .grid(n.div_ceil(rows.groups), 1, 1)
        .args(args)
        .code()
}
