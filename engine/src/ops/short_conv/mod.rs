//! The short convolution before a state-space scan: causal and depth-wise, with a bias and SiLU,
//! y`[t]` = silu(bias + sum over taps j of w[.., j] x[t - (width - 1) + j]), with zeros before the start. In reverse, time runs from the last position to
//! the first. With positions i32 [batch, time], where several sequences lie in a row or padding before one, a tap that reaches `shift` steps back counts
//! only if the position is at least `shift`. One pass over memory; the backward pass computes what SiLU was applied to again.

mod gpu;

use crate::cpu::math::sigmoid;
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{Code, Io};
use crate::meta::{DType, Layout, Meta, block_stride};
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share, no_gradient};
use crate::record::Var;
use rayon::prelude::*;

/// Inputs: x [batch, time, channels], weight f32 [channels, width], bias f32 `[channels]`, perhaps positions (see the module). Output: y, of x's shape.
#[derive(Clone, Copy, Debug)]
pub struct ShortConv {
    /// Whether time runs backwards.
    pub reverse: bool,
}

struct Sizes<'a> {
    batch: usize,
    time: usize,
    channels: usize,
    width: usize,
    /// Distance between time steps of x.
    step: usize,
    reverse: bool,
    positions: Option<&'a [i32]>,
}

impl<'v> Sizes<'v> {
    fn new(x: &'v [View], positions: Option<&'v View>, reverse: bool) -> Sizes<'v> {
        let step = block_stride(x[0].shape, x[0].strides, 2).expect("blocks evenly apart");
        let [batch, time, channels] = [0, 1, 2].map(|i| x[0].shape[i]);
        Sizes { batch, time, channels, width: x[1].shape[1], step, reverse, positions: positions.map(|p| p.i32()) }
    }

    /// The position that lies `shift` steps before t in the order of the scan (after it, if `ahead`).
    fn other(&self, t: usize, shift: usize, ahead: bool) -> Option<usize> {
        if self.reverse != ahead { Some(t + shift).filter(|&t| t < self.time) } else { t.checked_sub(shift) }
    }

    /// Whether t sees what lies `shift` steps before it.
    fn reaches(&self, b: usize, t: usize, shift: usize) -> bool {
        self.positions.is_none_or(|p| shift as i64 <= p[b * self.time + t] as i64)
    }

    /// (tap, position) of what position t of batch element b sees: rows of x.
    fn seen(&self, b: usize, t: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let taps = (0..self.width).filter(move |j| self.reaches(b, t, self.width - 1 - j));
        taps.filter_map(move |j| Some((j, self.other(t, self.width - 1 - j, false)?)))
    }

    /// out = bias + what position t sees.
    #[inline(always)]
    fn convolve(&self, out: &mut [f32], x: &[f32], b: usize, t: usize, taps: &[f32], bias: &[f32]) {
        out.copy_from_slice(bias);
        for (j, from) in self.seen(b, t) {
            let row = &x[(b * self.time + from) * self.step..][..self.channels];
            add_product(out, row, &taps[j * self.channels..][..self.channels]);
        }
    }

    /// weight [channels, width] as [width, channels].
    fn by_tap(&self, taps: &mut [f32], weight: &[f32]) {
        for (i, v) in taps.iter_mut().enumerate() {
            *v = weight[i % self.channels * self.width + i / self.channels];
        }
    }
}

/// out += a * b.
#[inline(always)]
fn add_product(out: &mut [f32], a: &[f32], b: &[f32]) {
    out.iter_mut().zip(a).zip(b).for_each(|((o, a), b)| *o += a * b);
}

impl Op for ShortConv {
    fn name(&self) -> &'static str {
        "short_conv"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let (m, w, bias) = (&x[0], &x[1], &x[2]);
        let fits = m.rank() == 3 && *w == Meta::f32(&[m.dim(0), w.dim(0)]) && *bias == Meta::f32(&[m.dim(0)]);
        let placed = x.get(3).is_none_or(|p| !self.reverse && *p == Meta::new(&m.shape[..2], DType::I32));
        assert!(fits && placed && w.dim(0) > 0, "short_conv of {x:?}");
        vec![m.clone()]
    }

    /// Sequences, or channels.
    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        let placed = |share: Share| (x.len() > 3).then_some(share);
        let sequences = [Share::Dim(0), Share::Whole, Share::Whole].into_iter().chain(placed(Share::Dim(0)));
        let channels = [Share::Dim(2), Share::Dim(0), Share::Dim(0)].into_iter().chain(placed(Share::Whole));
        vec![Axis::new(sequences.collect::<Vec<_>>(), [Share::Dim(0)]), Axis::new(channels.collect::<Vec<_>>(), [Share::Dim(2)])]
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        x[1].elements()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], taps: &mut [f32]) {
        let s = Sizes::new(x, x.get(3), self.reverse);
        s.by_tap(taps, x[1].f32());
        let (data, bias, taps) = (x[0].f32(), x[2].f32(), &*taps);
        y[0].f32().par_chunks_mut(s.channels).with_min_len(16).enumerate().for_each(|(i, y)| {
            simd(
                #[inline(always)]
                || {
                    s.convolve(y, data, i / s.time, i % s.time, taps, bias);
                    y.iter_mut().for_each(|v| *v *= sigmoid(*v));
                },
            )
        });
    }

    /// x may be a column slice of a wider projection.
    fn layout(&self, input: usize) -> Layout {
        if input == 0 { Layout::Blocks(2) } else { Layout::Contiguous }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        match at {
            Port::In(1 | 2) => Narrow::F32,
            _ => op::rounded_first(1, at), // positions are no floats
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        gpu::forward(io, self.reverse)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return no_gradient(x.len()) };
        let grads = d.recorder().op(ShortConvGrad(*self), &[&x[..3], &[d], &x[3..]].concat());
        grads.into_iter().map(Some).chain(no_gradient(x.len() - 3)).collect()
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(2 * x[0].bytes() + x[1].bytes() + x[2].bytes())
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let (channels, width, time) = (x[0].dim(0), x[1].dim(0), x[0].dim(1));
        let (before, after) = if self.reverse { (0, width - 1) } else { (width - 1, 0) };
        let padded = x[0].pad(1, before, after);
        let (bias, r) = (x[2].cast(x[0].dtype()), x[0].recorder());
        let sum = (0..width).fold(bias, |sum, j| {
            let from = if self.reverse { width - 1 - j } else { j };
            let product = padded.slice(1, from, from + time) * x[1].slice(1, j, j + 1).reshape(&[channels]).cast(x[0].dtype());
            let Some(position) = x.get(3) else { return sum + product };
            let shape = [&position.shape()[..], &[1]].concat();
            let seen = r.full(&[1], (width - 1 - j) as f32 - 0.5).less(position.cast(DType::F32)).reshape(&shape);
            sum + product * seen.cast(x[0].dtype())
        });
        Some(vec![sum.silu()])
    }
}

/// Inputs: x, weight, bias, dy, perhaps positions. Outputs: dx, and in f32 the gradients of weight and bias.
#[derive(Clone, Copy, Debug)]
pub struct ShortConvGrad(
    /// The convolution.
    pub ShortConv,
);

impl Op for ShortConvGrad {
    fn name(&self) -> &'static str {
        "short_conv_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        vec![x[0].clone(), x[1].clone(), x[2].clone()]
    }

    /// The taps, the gradient before SiLU, and for every sequence the gradients of taps and bias.
    fn workspace(&self, x: &[Meta]) -> usize {
        x[1].elements() + x[0].elements() + x[0].shape[0] * (x[1].elements() + x[2].elements())
    }

    fn cpu(&self, x: &[View], out: &mut [ViewMut], work: &mut [f32]) {
        let s = Sizes::new(x, x.get(4), self.0.reverse);
        let (time, channels, width) = (s.time, s.channels, s.width);
        let (data, bias, dy) = (x[0].f32(), x[2].f32(), x[3].f32());
        let (taps, work) = work.split_at_mut(channels * width);
        let (before, parts) = work.split_at_mut(s.batch * time * channels);
        s.by_tap(taps, x[1].f32());
        let taps = &*taps;
        before.par_chunks_mut(channels).zip(dy.par_chunks(channels)).with_min_len(16).enumerate().for_each(|(i, (g, dy))| {
            simd(
                #[inline(always)]
                || {
                    s.convolve(g, data, i / time, i % time, taps, bias);
                    for (g, dy) in g.iter_mut().zip(dy) {
                        let gate = sigmoid(*g);
                        *g = dy * gate * (1.0 + *g * (1.0 - gate));
                    }
                },
            )
        });
        let before = &*before;
        let [dx, dw, db] = out else { unreachable!("infer gives three outputs") };
        dx.f32().par_chunks_mut(channels).with_min_len(16).enumerate().for_each(|(i, dx)| {
            let (b, t) = (i / time, i % time);
            dx.fill(0.0);
            for j in 0..width {
                let shift = width - 1 - j;
                let Some(from) = s.other(t, shift, true).filter(|&from| s.reaches(b, from, shift)) else { continue };
                add_product(dx, &before[(b * time + from) * channels..][..channels], &taps[j * channels..][..channels]);
            }
        });
        parts.par_chunks_mut((width + 1) * channels).enumerate().for_each(|(b, part)| {
            part.fill(0.0);
            for t in 0..time {
                let g = &before[(b * time + t) * channels..][..channels];
                for (j, from) in s.seen(b, t) {
                    add_product(&mut part[j * channels..][..channels], g, &data[(b * time + from) * s.step..][..channels]);
                }
                part[width * channels..].iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
            }
        });
        let sum = |at: usize| (0..s.batch).map(|b| parts[b * (width + 1) * channels + at]).sum::<f32>();
        dw.f32().iter_mut().enumerate().for_each(|(i, v)| *v = sum(i % width * channels + i / width));
        db.f32().iter_mut().enumerate().for_each(|(i, v)| *v = sum(width * channels + i));
    }

    fn layout(&self, input: usize) -> Layout {
        self.0.layout(input)
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        match at {
            Port::In(1 | 2) | Port::Out(1 | 2) => Narrow::F32,
            _ => op::rounded(at),
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        gpu::backward(io, self.0.reverse)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(3 * x[0].bytes() + 2 * (x[1].bytes() + x[2].bytes()))
    }
}

impl<'g> Var<'g> {
    /// The causal depth-wise convolution with bias and SiLU; `reverse`: from the last position to the first. `positions`: see the module `short_conv`.
    #[track_caller]
    pub fn short_conv(self, weight: Var<'g>, bias: Var<'g>, reverse: bool, positions: Option<Var<'g>>) -> Var<'g> {
        let wide = |v: Var<'g>| if v.dtype() == DType::F32 { v } else { v.cast(DType::F32) };
        let inputs: Vec<Var> = [self, wide(weight), wide(bias)].into_iter().chain(positions).collect();
        self.recorder().op1(ShortConv { reverse }, &inputs)
    }
}

macro_rules! inputs {
    ($batch:literal, $time:literal, $channels:literal, $width:literal) => {
        &[In(&[$batch, $time, $channels], Fill::Normal), In(&[$channels, $width], Fill::Normal), In(&[$channels], Fill::Normal)]
    };
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("odd channels", inputs!(2, 9, 5, 4), |x| vec![x[0].short_conv(x[1], x[2], false, None)]),
    Case::new("reverse", inputs!(3, 37, 24, 3), |x| vec![x[0].short_conv(x[1], x[2], true, None)]),
    Case::new("slice of wider rows", inputs!(2, 11, 16, 2), |x| {
        let wide = crate::ops::concat::concat(&[x[0], x[0] * 0.5], 2);
        vec![wide.slice(2, 8, 24).short_conv(x[1], x[2], false, None)]
    }),
    Case::new("wider than the sequence", inputs!(1, 2, 4, 4), |x| vec![x[0].short_conv(x[1], x[2], false, None)]),
    Case::new(
        "several sequences in a row",
        &[In(&[2, 40, 4], Fill::Normal), In(&[4, 4], Fill::Normal), In(&[4], Fill::Normal), In(&[2, 40], Fill::Index(6))],
        |x| vec![x[0].short_conv(x[1], x[2], false, Some(x[3]))],
    ),
    Case::new("several slices of time", inputs!(1, 150, 8, 4), |x| vec![x[0].short_conv(x[1], x[2], false, None)]),
    Case::new("130m", inputs!(64, 1024, 1792, 4), |x| vec![x[0].short_conv(x[1], x[2], false, None)]).bench(),
    Case::new("hrm", inputs!(384, 81, 1152, 4), |x| vec![x[0].short_conv(x[1], x[2], true, None)]).bench(),
];
