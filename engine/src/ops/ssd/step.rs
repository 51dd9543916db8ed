//! For decoding: the state that a prompt leaves behind, and one time step from a state, which is read and written once.

use super::chunked::{ChunkedScan, MOST_CHUNK};
use super::cpu::{Inputs, temporary};
use super::{Scan, Sizes, kernels, precision};
use crate::cpu::math::exp;
use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io, Launch};
use crate::meta::{DType, Layout, Meta};
use crate::op::{Cost, Grads, Narrow, Op, Port, no_gradient};
use crate::record::Var;
use rayon::prelude::*;

/// Inputs: the state f32 [batch, heads, p, n]; x [batch, heads, p], dt and decay f32 [batch, heads], B, C [batch, groups, n], d `[heads]`.
/// Outputs: y [batch, heads, p], and the next state in the place of the state.
#[derive(Debug)]
pub struct SsdStep;

impl Op for SsdStep {
    fn name(&self) -> &'static str {
        "ssd_step"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let [h, m, dt, decay, b, c, d] = x else { panic!("ssd_step of {x:?}") };
        let fits = h.rank() == 4 && h.dtype == DType::F32 && m.shape[..] == h.shape[..3] && b == c && b.rank() == 3 && b.dim(0) == h.dim(0);
        let small = *dt == Meta::f32(&h.shape[..2]) && decay == dt && *d == Meta::f32(&[h.shape[1]]) && b.dtype == m.dtype;
        assert!(fits && small && b.shape[0] == h.shape[0] && h.shape[1].is_multiple_of(b.shape[1]), "ssd_step of {x:?}");
        vec![m.clone(), h.clone()]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let [dt, decay, b, c, d] = [2, 3, 4, 5, 6].map(|i| x[i].f32());
        let (heads, p, groups, n) = (x[1].shape[1], x[1].shape[2], x[4].shape[1], x[4].shape[2]);
        let (values, [y, state]) = (x[1].f32(), y) else { unreachable!("infer gives two outputs") };
        state.f32().par_chunks_mut(n).zip(y.f32()).with_min_len(64).enumerate().for_each(|(i, (row, y))| {
            let head = i / p;
            let (h, group) = (head % heads, head / heads * groups + head % heads / (heads / groups));
            let (keep, new) = (exp(decay[head]), dt[head] * values[i]);
            let (b, c) = (&b[group * n..][..n], &c[group * n..][..n]);
            let mut sum = 0.0;
            for ((state, b), c) in row.iter_mut().zip(b).zip(c) {
                *state = *state * keep + new * b;
                sum += *state * c;
            }
            *y = sum + d[h] * values[i];
        });
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![(0, 1)]
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        match at {
            Port::In(0 | 2 | 3 | 6) | Port::Out(1) => Narrow::Keep,
            Port::In(_) => Narrow::Round,
            Port::Out(_) => Narrow::Follow(vec![1]),
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        let rows = io.x[1].elements();
        Launch::new(include_str!("step.cu"), "ssd_step")
            .define_type("T", io.x[1].dtype)
            .define("ROWS", rows)
            .define("HEADS", io.x[1].shape[1])
            .define("P", io.x[1].shape[2])
            .define("GROUPS", io.x[4].shape[1])
            .define("N", io.x[4].shape[2])
            .grid(rows.div_ceil(8), 1, 1)
            .all(io)
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(x[0].bytes() + x.iter().chain(&self.infer(x)).map(|m| m.bytes()).sum::<usize>())
    }
}

/// Records one step from `state`; the scan's tensors are without their time dimension. Returns y and the next state.
#[track_caller]
pub fn ssd_step<'g>(state: Var<'g>, scan: Scan<'g>) -> (Var<'g>, Var<'g>) {
    let inputs = [&[state][..], &scan.inputs()].concat();
    let y = state.recorder().op(SsdStep, &inputs);
    (y[0], y[1])
}

/// Inputs: those of the scan. Output: the state after its last position, f32 [batch, heads, p, n].
#[derive(Debug)]
pub struct SsdLast;

impl Op for SsdLast {
    fn name(&self) -> &'static str {
        "ssd_last"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let s = Sizes::of(x);
        vec![Meta::f32(&[s.batch, s.heads, s.p, s.n])]
    }

    /// For every head: y, which nobody reads, and what a chunk needs.
    fn workspace(&self, x: &[Meta]) -> usize {
        let s = Sizes::of(x);
        s.batch * s.heads * (s.time * s.p + temporary(s.time.min(MOST_CHUNK), 1, s.p))
    }

    fn cpu(&self, x: &[View], last: &mut [ViewMut], work: &mut [f32]) {
        let i = Inputs::new(x, false, x[0].shape[1].div_ceil(MOST_CHUNK));
        let Sizes { time, heads, p, n, .. } = i.s;
        let each = work.len() / (i.s.batch * heads);
        let all = last[0].f32().par_chunks_mut(p * n).zip(work.par_chunks_mut(each));
        all.enumerate().for_each(|(k, (state, own))| {
            let (y, temp) = own.split_at_mut(time * p);
            i.forward(k / heads, k % heads, y, &mut [], state, temp);
        });
    }

    fn layout(&self, input: usize) -> Layout {
        ChunkedScan::default().layout(input)
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        if at == Port::Out(0) { Narrow::Keep } else { precision(at) }
    }

    fn cuda(&self, io: &Io) -> Code {
        kernels::last(io)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::compute(Sizes::of(x).flops(0, 0, 1), x[0].bytes() + x[3].bytes() + self.infer(x)[0].bytes())
    }
}

/// Records the state after the last position of a scan: where `ssd_step` goes on.
#[track_caller]
pub fn ssd_last(scan: Scan) -> Var {
    scan.x.recorder().op1(SsdLast, &scan.inputs())
}
