//! The optimizer's step over all parameters at once, and the norm of all gradients.

use crate::cpu::math::sum;
use crate::cpu::{View, ViewMut, simd};
use crate::meta::Meta;
use crate::op::{Case, Cost, Fill, Grads, In, Op, no_gradient};
use crate::record::Var;
use rayon::prelude::*;

/// Elements of one task, and of one partial sum.
const PIECE: usize = 1 << 14;

/// Inputs: any number of tensors. Output: sqrt of the sum of all squares, f32 [1].
#[derive(Debug)]
pub struct GlobalNorm;

impl Op for GlobalNorm {
    fn name(&self) -> &'static str {
        "global_norm"
    }

    fn infer(&self, _: &[Meta]) -> Vec<Meta> {
        vec![Meta::f32(&[1])]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let mut total = 0.0f64;
        for v in x {
            let pieces = v.f32().par_chunks(PIECE).map(|p| {
                simd(
                    #[inline(always)]
                    || sum(p, |a| a * a) as f64,
                )
            });
            total += pieces.collect::<Vec<f64>>().into_iter().sum::<f64>();
        }
        y[0].f32()[0] = total.sqrt() as f32;
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        x.iter().map(|&v| dy[0].map(|d| v * (d / y[0]))).collect()
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(x.iter().map(|m| m.bytes()).sum())
    }
}

/// Adam with decoupled weight decay. Inputs: rate [1], gradient scale [1], step count after this one [1], go ahead (0 or 1) [1],
/// then for every parameter: itself, its gradient, first and second moment. Outputs: for every parameter itself and its
/// moments, in the inputs' own buffers. Where `go ahead` is 0 nothing changes.
#[derive(Debug)]
pub struct AdamW {
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    /// Of each parameter.
    pub decay: Vec<f32>,
}

impl Op for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert_eq!(x.len(), 4 + 4 * self.decay.len(), "adamw wants four tensors for each parameter");
        x[4..].chunks(4).flat_map(|p| [p[0].clone(), p[2].clone(), p[3].clone()]).collect()
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        (0..self.decay.len()).flat_map(|i| [(4 + 4 * i, 3 * i), (6 + 4 * i, 3 * i + 1), (7 + 4 * i, 3 * i + 2)]).collect()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let [rate, scale, count, go] = [0, 1, 2, 3].map(|i| x[i].f32()[0]);
        if go == 0.0 {
            return;
        }
        let correct = |beta: f32| (1.0 - (beta as f64).powf(count as f64)) as f32;
        let (first, second) = (correct(self.beta1), correct(self.beta2).sqrt());
        for (i, out) in y.chunks_mut(3).enumerate() {
            let [p, m, v] = out else { unreachable!("three outputs for each parameter") };
            let keep = 1.0 - rate * self.decay[i];
            let g = x[4 + 4 * i + 1].f32();
            let tasks = p.f32().par_chunks_mut(PIECE).zip(g.par_chunks(PIECE));
            tasks.zip(m.f32().par_chunks_mut(PIECE)).zip(v.f32().par_chunks_mut(PIECE)).for_each(|(((p, g), m), v)| {
                simd(
                    #[inline(always)]
                    || {
                        for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
                            let g = g * scale;
                            *m += (g - *m) * (1.0 - self.beta1);
                            *v = *v * self.beta2 + g * g * (1.0 - self.beta2);
                            *p = *p * keep - rate / first * *m / (v.sqrt() / second + self.eps);
                        }
                    },
                )
            });
        }
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len()) // the last step of training
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let all: usize = x[4..].iter().map(|m| m.bytes()).sum();
        Cost::memory(all + all / 4 * 3)
    }
}

/// The norm of all of these together.
pub fn global_norm<'g>(x: &[Var<'g>]) -> Var<'g> {
    x[0].recorder().op1(GlobalNorm, x)
}

pub const CASES: &[Case] = &[
    Case::new("norm", &[In(&[7, 5], Fill::Normal), In(&[3], Fill::Normal)], |x| vec![global_norm(x)]),
    Case::new("a step", &[In(&[3], Fill::Frozen), In(&[3], Fill::Frozen)], |x| {
        let r = x[0].recorder();
        let one = |v: f32| r.full(&[1], v);
        let moments = [r.zeros(&[3]), r.zeros(&[3])];
        let op = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: vec![0.1] };
        r.op(op, &[one(1e-2), one(1.0), one(1.0), one(1.0), x[0], x[1], moments[0], moments[1]])
    }),
];
