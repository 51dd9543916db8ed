//! One time step of the scan, for decoding: the state is read and written once.

use super::Scan;
use crate::cpu::math::exp;
use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io, Launch};
use crate::meta::{DType, Meta};
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
