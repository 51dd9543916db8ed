//! Delayed scaling: the next step's scales from the largest absolute values of the last few steps.

use super::{PARTS, scale_of};
use crate::cpu::{View, ViewMut};
use crate::kernel::{At, Code, Io, Launch, Place};
use crate::meta::{DType, Meta};
use crate::op::{Cost, Grads, Narrow, Op, Port, no_gradient};
use crate::record::Var;

/// Inputs, for each of s tensors: the history [s, h] of largest absolute values, the scales [s, 4] (the first number of each row; the others keep
/// rows 16 bytes apart), the number of runs so far `[1]`, and the parts of the largest absolute value in this run [s, PARTS]. Outputs, in place: the
/// history with this run's in the place of the oldest, and the scales that follow from it. A run whose largest value is not finite leaves both alone.
#[derive(Debug)]
pub struct Scales {
    /// The FP8 type of each tensor.
    pub types: Vec<DType>,
}

impl Op for Scales {
    fn name(&self) -> &'static str {
        "fp8_scales"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let s = self.types.len();
        let fits = x[0].rank() == 2 && x[0].shape[0] == s && x[1..] == [Meta::f32(&[s, 4]), Meta::f32(&[1]), Meta::f32(&[s, PARTS])];
        assert!(fits, "scales of {s} tensors from {x:?}");
        x[..2].to_vec()
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![(0, 0), (1, 1)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (count, parts) = (x[2].f32()[0] as usize, x[3].f32());
        let [history, scales] = y else { unreachable!("two outputs") };
        let h = history.shape[1];
        let tensors = history.f32().chunks_mut(h).zip(scales.f32().chunks_mut(4)).zip(parts.chunks(PARTS)).zip(&self.types);
        for (((history, scale), parts), &dtype) in tensors {
            let now = parts.iter().fold(0.0f32, |a, &b| if b > a || b.is_nan() { b } else { a });
            if !now.is_finite() {
                continue;
            }
            history[count % h] = now;
            let most = crate::mutant!("fp8-history-ignored", history.iter().fold(0.0f32, |a, &b| a.max(b)), now);
            if crate::mutant!("fp8-scale-of-zeros", most > 0.0, true) {
                scale[0] = scale_of(most, dtype);
            }
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        let wide: Vec<&str> = self.types.iter().map(|d| if *d == DType::E5M2 { "1" } else { "0" }).collect();
        Launch::new(include_str!("scales.cu"), "fp8_scales")
            .define("HISTORY", io.x[0].shape[1])
            .define("PARTS", PARTS)
            .define("WIDE", wide.join(", "))
            .grid(self.types.len(), 1, 1)
            .args(&[At::Y(0), At::Y(1), At::X(2), At::X(3)].map(Place::from))
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(x.iter().map(|m| m.bytes()).sum())
    }
}
