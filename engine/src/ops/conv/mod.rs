//! Causal grouped convolution over time: y`[t]` = sum over taps j of w[.., j] x[t - (width - 1) + j], with zeros before the start.
//!
//! On the CPU, tap j is a GEMM of x, shifted by width - 1 - j, with that tap's matrix.

mod gpu;
mod tensor;

use crate::cpu::gemm::{Into, Mat, gemm};
use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io};
use crate::meta::Meta;
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use crate::record::Var;
use rayon::prelude::*;

/// Inputs: x [batch, time, channels], weight [outputs, channels / groups, width]. Output [batch, time, outputs].
#[derive(Debug)]
pub struct CausalConv {
    /// Channels are split into so many groups, each with its own filters.
    pub groups: usize,
}

/// Sizes that the convolution and its gradients share.
struct Sizes {
    batch: usize,
    time: usize,
    channels: usize,
    outputs: usize,
    width: usize,
    /// Channels and outputs of a group.
    cg: usize,
    og: usize,
}

impl Sizes {
    fn new(x: &[usize], w: &[usize], groups: usize) -> Sizes {
        Sizes { batch: x[0], time: x[1], channels: x[2], outputs: w[0], width: w[2], cg: x[2] / groups, og: w[0] / groups }
    }

    /// The matrix [og, cg] of group g, tap j.
    fn tap<'a>(&self, w: &'a [f32], g: usize, j: usize) -> Mat<'a> {
        Mat { data: w, offset: g * self.og * self.cg * self.width + j, row: self.cg * self.width, column: self.width }
    }

    /// (tap, shift) of the taps that reach into the sequence.
    fn taps(&self) -> impl Iterator<Item = (usize, usize)> {
        let (width, time) = (self.width, self.time);
        (0..width).map(move |j| (j, width - 1 - j)).filter(move |(_, shift)| *shift < time)
    }

    fn flops(&self) -> usize {
        2 * self.batch * self.time * self.outputs * self.cg * self.width
    }
}

impl Op for CausalConv {
    fn name(&self) -> &'static str {
        "causal_conv"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let (m, w) = (&x[0], &x[1]);
        let fits = m.rank() == 3 && w.rank() == 3 && m.dim(0) % self.groups == 0 && w.shape[0] % self.groups == 0;
        assert!(fits && w.shape[1] * self.groups == m.dim(0), "causal_conv of {x:?} in {} groups", self.groups);
        vec![m.with(&[m.shape[0], m.shape[1], w.shape[0]])]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let s = Sizes::new(x[0].shape, x[1].shape, self.groups);
        let (data, w) = (x[0].f32(), x[1].f32());
        y[0].f32().par_chunks_mut(s.time * s.outputs).enumerate().for_each(|(b, y)| {
            let x = Mat::rows(&data[b * s.time * s.channels..][..s.time * s.channels], s.channels);
            y.fill(0.0);
            for g in 0..self.groups {
                for (j, shift) in s.taps() {
                    let out = &mut y[shift * s.outputs + g * s.og..];
                    gemm(out, s.outputs, Into::Add, s.time - shift, s.cg, s.og, x.at(g * s.cg), s.tap(w, g, j).t(), 1.0, false);
                }
            }
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        gpu::conv(io, self.groups, false)
    }

    fn axes(&self, _: &[Meta], _: usize) -> Vec<Axis> {
        vec![Axis::first(&[true, false], 1)]
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return vec![None, None] };
        let dx = d.recorder().op1(CausalConvGradInput { groups: self.groups }, &[d, x[1]]);
        let dw = d.recorder().op1(CausalConvGradWeight { groups: self.groups, width: x[1].dim(0) }, &[x[0], d]);
        vec![Some(dx), Some(dw)]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let s = Sizes::new(&x[0].shape, &x[1].shape, self.groups);
        Cost::compute(s.flops(), x[0].bytes() + x[1].bytes() + self.infer(x)[0].bytes())
    }
}

/// Inputs: dy [batch, time, outputs], weight. Output: dx.
#[derive(Debug)]
pub struct CausalConvGradInput {
    /// As in the forward op.
    pub groups: usize,
}

impl Op for CausalConvGradInput {
    fn name(&self) -> &'static str {
        "causal_conv_grad_input"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        vec![x[0].with(&[x[0].shape[0], x[0].shape[1], x[1].shape[1] * self.groups])]
    }

    fn cpu(&self, x: &[View], dx: &mut [ViewMut], _: &mut [f32]) {
        let s = Sizes::new(dx[0].shape, x[1].shape, self.groups);
        let (dy, w) = (x[0].f32(), x[1].f32());
        dx[0].f32().par_chunks_mut(s.time * s.channels).enumerate().for_each(|(b, dx)| {
            let dy = Mat::rows(&dy[b * s.time * s.outputs..][..s.time * s.outputs], s.outputs);
            dx.fill(0.0);
            for g in 0..self.groups {
                for (j, shift) in s.taps() {
                    let from = dy.at(shift * s.outputs + g * s.og);
                    gemm(&mut dx[g * s.cg..], s.channels, Into::Add, s.time - shift, s.og, s.cg, from, s.tap(w, g, j), 1.0, false);
                }
            }
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        gpu::conv(io, self.groups, true)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let y = &self.infer(x)[0];
        let s = Sizes::new(&y.shape, &x[1].shape, self.groups);
        Cost::compute(s.flops(), x[0].bytes() + x[1].bytes() + y.bytes())
    }
}

/// Inputs: x, dy. Output: the weight's gradient.
#[derive(Debug)]
pub struct CausalConvGradWeight {
    /// As in the forward op.
    pub groups: usize,
    /// Taps of the filters.
    pub width: usize,
}

impl Op for CausalConvGradWeight {
    fn name(&self) -> &'static str {
        "causal_conv_grad_weight"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        vec![Meta::f32(&[x[1].dim(0), x[0].dim(0) / self.groups, self.width])] // a sum over all time steps, in f32 whatever the inputs' type
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        self.infer(x)[0].elements()
    }

    fn cpu(&self, x: &[View], dw: &mut [ViewMut], by_tap: &mut [f32]) {
        let s = Sizes::new(x[0].shape, dw[0].shape, self.groups);
        let (data, dy) = (x[0].f32(), x[1].f32());
        // by_tap [groups, width, og, cg]
        by_tap.par_chunks_mut(s.og * s.cg).enumerate().for_each(|(i, out)| {
            let (g, shift) = (i / s.width, s.width - 1 - i % s.width);
            out.fill(0.0);
            for b in (0..s.batch).filter(|_| shift < s.time) {
                let x = Mat::rows(&data[b * s.time * s.channels..][..s.time * s.channels], s.channels).at(g * s.cg);
                let dy = Mat::rows(&dy[b * s.time * s.outputs..][..s.time * s.outputs], s.outputs).at(shift * s.outputs + g * s.og);
                gemm(out, s.cg, Into::Add, s.og, s.time - shift, s.cg, dy.t(), x, 1.0, false);
            }
        });
        let piece = s.og * s.cg;
        dw[0].f32().par_chunks_mut(s.width).with_min_len(256).enumerate().for_each(|(i, out)| {
            let (g, k) = (i / piece, i % piece);
            for (j, o) in out.iter_mut().enumerate() {
                *o = by_tap[(g * s.width + j) * piece + k];
            }
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        gpu::weight_gradient(io, self.groups, self.width)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let y = &self.infer(x)[0];
        let s = Sizes::new(&x[0].shape, &y.shape, self.groups);
        Cost::compute(s.flops(), x[0].bytes() + x[1].bytes() + y.bytes())
    }
}

impl<'g> Var<'g> {
    /// Causal grouped convolution over time: position t sees t and the positions before it.
    #[track_caller]
    pub fn causal_conv(self, weight: Var<'g>, groups: usize) -> Var<'g> {
        self.recorder().op1(CausalConv { groups }, &[self, weight])
    }
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("one group", &[In(&[2, 5, 4], Fill::Normal), In(&[6, 4, 3], Fill::Normal)], |x| vec![x[0].causal_conv(x[1], 1)]),
    Case::new("groups", &[In(&[3, 7, 6], Fill::Normal), In(&[6, 2, 3], Fill::Normal)], |x| vec![x[0].causal_conv(x[1], 3)]),
    Case::new("wider than the sequence", &[In(&[1, 2, 2], Fill::Normal), In(&[2, 1, 4], Fill::Normal)], |x| {
        vec![x[0].causal_conv(x[1], 2)]
    }),
    // In bf16 and f16 these use tensor cores: groups of a multiple of 16, and more time steps than a tile, but not a multiple of it.
    Case::new("groups of 16", &[In(&[2, 37, 48], Fill::Normal), In(&[48, 16, 3], Fill::Normal)], |x| vec![x[0].causal_conv(x[1], 3)]),
    Case::new("one group of 16 to 48", &[In(&[1, 161, 16], Fill::Normal), In(&[48, 16, 4], Fill::Normal)], |x| {
        vec![x[0].causal_conv(x[1], 1)]
    }),
    Case::new("one time step", &[In(&[3, 1, 32], Fill::Normal), In(&[16, 32, 2], Fill::Normal)], |x| vec![x[0].causal_conv(x[1], 1)]),
    Case::new("q_conv2", &[In(&[64, 1024, 192], Fill::Normal), In(&[192, 192, 3], Fill::Normal)], |x| vec![x[0].causal_conv(x[1], 1)])
        .bench(),
    Case::new("q_conv1", &[In(&[64, 1024, 192], Fill::Normal), In(&[192, 16, 3], Fill::Normal)], |x| vec![x[0].causal_conv(x[1], 12)])
        .bench(),
];
