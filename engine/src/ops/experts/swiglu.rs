//! The first half of an expert: gate and up projections in one grouped GEMM, with SwiGLU fused.

use super::grouped::{By, Experts, GroupedMatmul, Product, axes, gather, products, routed};
use super::kernels::Kernel;
use super::outer::GroupedOuter;
use crate::cpu::math::sigmoid;
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{At, Code, Io, Place};
use crate::meta::Meta;
use crate::op::{self, Axis, Cost, Grads, Lean, Narrow, Op, Port, Share, no_gradient};
use crate::ops::matmul::not_in_fp8;
use crate::ops::reduce::packs::Rows;
use crate::record::Var;
use rayon::prelude::*;
use std::sync::Arc;

/// Inputs: x [tokens, d], w [experts, 2 hidden, d] (gate, then up), `dispatch`'s order, position and offsets, weights f32 [tokens, top]. With
/// (gate, up) = x w^T for a row's token and expert: y [rows, hidden] = weight silu(gate) up, so that after the down projection a token's rows
/// need only be summed; and h [rows, 2 hidden] = (gate, up), which the gradient needs.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedSwiglu {
    /// Experts for each token.
    pub top: usize,
    /// Whether h is an output; `dead-code` drops it in programs without gradients.
    pub keep: bool,
    /// The experts whose matrices w has.
    pub experts: Experts,
    /// Set by the pass `grouped-gemm`.
    pub kernel: Kernel,
}

impl Op for GroupedSwiglu {
    fn name(&self) -> &'static str {
        "grouped_swiglu"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let shaped = x.len() == 6 && x[0].rank() == 2 && x[1].rank() == 3 && x[0].dtype == x[1].dtype && x[0].dtype.is_float();
        assert!(shaped, "{self:?} of {x:?}");
        let ([experts, both, d], rows) = ([x[1].dim(2), x[1].dim(1), x[1].dim(0)], x[2].elements());
        let tokens = rows / self.top;
        let fits = routed(&x[2..5], self.top, experts * self.experts.of) && x[0].shape == [tokens, d] && both.is_multiple_of(2);
        assert!(fits && x[5] == Meta::f32(&[tokens, self.top]), "{self:?} of {x:?}");
        let mut y = vec![x[0].with(&[rows, both / 2])];
        y.extend(self.keep.then(|| x[0].with(&[rows, both])));
        y
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        let rows = x[2].elements();
        rows * x[0].dim(0) + if self.keep { 0 } else { rows * x[1].dim(1) }
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], work: &mut [f32]) {
        let (d, both) = (x[1].dim(0), x[1].dim(1));
        let (order, offsets, weights) = (x[2].i32(), self.experts.offsets(x[4].i32()), x[5].f32());
        let (gathered, work) = work.split_at_mut(order.len() * d);
        let rows = gather(x[0].f32(), order, self.top, d, gathered);
        let (y, kept) = y.split_at_mut(1);
        let h = if self.keep { kept[0].f32() } else { work };
        products(rows, x[1].f32(), offsets, d, both, true, h);
        let (first, end) = (offsets[0] as usize, offsets[offsets.len() - 1] as usize);
        let own = &mut y[0].f32()[first * (both / 2)..end * (both / 2)];
        let rows = own.par_chunks_mut(both / 2).zip(h[first * both..].par_chunks(both)).zip(&order[first..end]);
        rows.with_min_len(16).for_each(|((out, h), &slot)| {
            simd(
                #[inline(always)]
                || {
                    let (gate, up) = h.split_at(both / 2);
                    for (i, out) in out.iter_mut().enumerate() {
                        *out = weights[slot as usize] * (gate[i] * sigmoid(gate[i]) * up[i]);
                    }
                },
            )
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        not_in_fp8(op::rounded_first(2, at), super::NO_FP8)
    }

    fn only(&self, read: &[bool]) -> Option<Lean> {
        // Only the gradient reads h.
        (self.keep && !read[1]).then(|| Lean::without_last(GroupedSwiglu { keep: false, ..self.clone() }, read.len()))
    }

    fn cuda(&self, io: &Io) -> Code {
        let p = Product {
            experts: io.x[1].dim(2),
            rows: io.x[2].elements(),
            k: io.x[1].dim(0),
            out: io.x[1].dim(1) / 2,
            top: self.top,
            from: By::Token,
            transposed: true,
            swiglu: true,
            kept: self.keep,
        };
        let mut args: Vec<Place> = [At::X(0), At::X(1), At::X(4), At::X(2), At::X(5)].map(Place::from).into();
        args[2] = self.experts.place(At::X(4), &io.x[4]);
        args.extend((0..io.y.len()).map(|i| Place::from(At::Y(i))));
        p.launch(self.kernel, io, &args).code()
    }

    fn axes(&self, _: &[Meta], _: usize) -> Vec<Axis> {
        axes(By::Token, By::Row, &[[Share::Dim(0), Share::Whole]], 1 + self.keep as usize)
    }

    fn part(&self, _: &[Meta], axis: usize, of: usize, index: usize) -> Option<Arc<dyn Op>> {
        (axis == 1).then(|| Arc::new(GroupedSwiglu { experts: Experts { index, of }, ..self.clone() }) as _)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0].map(|d| d.cast(x[0].dtype())) else { return no_gradient(6) };
        let (top, experts) = (self.top, self.experts);
        let mut of_rows = vec![y[1], d, x[2], x[5]];
        of_rows.extend(experts.are_some().then_some(x[4]));
        let both = d.recorder().op(GroupedSwigluGrad { top, experts }, &of_rows);
        let back = GroupedMatmul { top, from: By::Row, to: By::Token, transposed: false, experts, kernel: self.kernel };
        let by_x = d.recorder().op1(back, &[both[0], x[1], x[2], x[3], x[4]]);
        let by_w = GroupedOuter::record([(both[0], By::Row), (x[0], By::Token)], top, experts, x[2], x[4]);
        vec![Some(by_x), Some(by_w), None, None, None, Some(both[1])]
    }

    /// The gradient needs h.
    fn differentiable(&self) -> bool {
        self.keep
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let bytes = x.iter().chain(&self.infer(x)).map(|m| m.bytes()).sum();
        Cost::compute(2 * x[2].elements() * x[1].dim(0) * x[1].dim(1) / self.experts.of, bytes)
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        if self.experts.are_some() {
            return None; // plain ops would compute the rows that this one leaves unwritten
        }
        let r = x[0].recorder();
        let (top, experts) = (self.top, self.experts);
        let product = GroupedMatmul { top, from: By::Token, to: By::Row, transposed: true, experts, kernel: Kernel::Plain };
        let h = r.op1(product, &x[..5]);
        let (hidden, slots) = (h.dim(0) / 2, x[2].meta().elements());
        let weight = x[5].reshape(&[slots, 1]).gather_rows_once(x[2]);
        let y = (h.slice(1, 0, hidden).swiglu(h.slice(1, hidden, 2 * hidden)) * weight).cast(x[0].dtype());
        Some(if self.keep { vec![y, h] } else { vec![y] })
    }
}

/// Inputs: h [rows, 2 hidden], dy [rows, hidden], order, weights, and for some of the experts `dispatch`'s offsets. Outputs: gradients with respect to h, and to the
/// weights, f32 [tokens, top], which are 0 for rows of other experts.
#[derive(Debug)]
pub struct GroupedSwigluGrad {
    /// Experts for each token.
    pub top: usize,
    /// The experts whose rows there are.
    pub experts: Experts,
}

impl Op for GroupedSwigluGrad {
    fn name(&self) -> &'static str {
        "grouped_swiglu_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let rows = x[2].elements();
        let fits = x[0].shape == [rows, 2 * x[1].dim(0)] && x[1].shape == [rows, x[1].dim(0)] && x[0].dtype == x[1].dtype;
        let given = x.len() == 4 + self.experts.are_some() as usize;
        assert!(fits && given && x[3] == Meta::f32(&[rows / self.top, self.top]), "{self:?} of {x:?}");
        vec![x[0].clone(), x[3].clone()]
    }

    /// The weights' gradient by row, before it is reordered by slot.
    fn workspace(&self, x: &[Meta]) -> usize {
        x[2].elements()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], by_row: &mut [f32]) {
        let hidden = x[1].dim(0);
        let (h, dy, order, weights) = (x[0].f32(), x[1].f32(), x[2].i32(), x[3].f32());
        let [dh, dw] = y else { unreachable!("infer gives two outputs") };
        let own = x.get(4).map_or(0..order.len(), |all| {
            let offsets = self.experts.offsets(all.i32());
            offsets[0] as usize..offsets[offsets.len() - 1] as usize
        });
        let rows = dh.f32().par_chunks_mut(2 * hidden).zip(by_row.par_iter_mut()).zip(order).enumerate();
        rows.with_min_len(16).for_each(|(row, ((dh, dw), &slot))| {
            if !own.contains(&row) {
                *dw = 0.0;
                return;
            }
            simd(
                #[inline(always)]
                || {
                    let ((gate, up), dy) = (h[row * 2 * hidden..][..2 * hidden].split_at(hidden), &dy[row * hidden..][..hidden]);
                    let (dgate, dup) = dh.split_at_mut(hidden);
                    let mut sum = 0.0;
                    for i in 0..hidden {
                        let s = sigmoid(gate[i]);
                        let (silu, d) = (gate[i] * s, weights[slot as usize] * dy[i]);
                        sum += dy[i] * silu * up[i];
                        dgate[i] = d * up[i] * (s + silu * (1.0 - s));
                        dup[i] = d * silu;
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
        let (hidden, dtype) = (io.x[1].dim(0), io.x[0].dtype);
        let rows = Rows::new(hidden, &[dtype]);
        // Without offsets, the order stands in for them and is not read.
        let offsets = if self.experts.are_some() { self.experts.place(At::X(4), &io.x[4]) } else { At::X(2).into() };
        let mut args: Vec<Place> = (0..4).map(|i| Place::from(At::X(i))).collect();
        args.extend([offsets, At::Y(0).into(), At::Y(1).into()]);
        rows.launch(include_str!("swiglu_grad.cu"), "grouped_swiglu_grad", hidden)
            .define_type("T", dtype)
            .define("N", io.x[2].elements())
            .define("SOME", self.experts.are_some() as u8)
            .define("EXPERTS", io.x.get(4).map_or(0, |offsets| self.experts.count(offsets)))
            .grid(io.x[2].elements().div_ceil(rows.groups), 1, 1)
            .args(&args)
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let bytes = x.iter().map(|m| m.bytes()).sum::<usize>() + x[0].bytes() + x[3].bytes();
        Cost { flops: 16 * x[1].elements() as u64, ..Cost::memory(bytes) }
    }
}
