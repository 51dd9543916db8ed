//! The router: softmax, top-k and renormalization.

use crate::cpu::math::{exp, max, sum};
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{Code, Io, Launch};
use crate::meta::{DType, Meta};
use crate::op::{Axis, Cost, Grads, Narrow, Op, Port, no_gradient};
use crate::ops::reduce::packs::LANES;
use crate::record::Var;
use rayon::prelude::*;

/// Rows of one task.
const ROWS: usize = 64;

/// Input: logits [tokens, experts]. Outputs: their softmax, f32 [tokens, experts]; the k largest probabilities, largest first, f32 [tokens, k]; and
/// their experts, i32 [tokens, k]. Of equal logits, the first counts as the larger.
#[derive(Debug)]
pub struct Route {
    /// Experts for each token.
    pub k: usize,
    /// Whether the k probabilities are divided by their sum.
    pub normalized: bool,
}

impl Op for Route {
    fn name(&self) -> &'static str {
        "route"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let fits = x[0].rank() == 2 && x[0].dtype.is_float() && (1..=x[0].dim(0)).contains(&self.k) && x[0].dim(0) <= 1024;
        assert!(fits, "route to {} of {:?} (1024 experts at most)", self.k, x[0]);
        let chosen = [x[0].dim(1), self.k];
        vec![Meta::f32(&x[0].shape), Meta::f32(&chosen), Meta::new(&chosen, DType::I32)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (experts, k, logits) = (x[0].dim(0), self.k, x[0].f32());
        let [p, weights, chosen] = y else { unreachable!("infer gives three outputs") };
        let tasks = p.f32().par_chunks_mut(ROWS * experts).zip(weights.f32().par_chunks_mut(ROWS * k));
        tasks.zip(chosen.i32().par_chunks_mut(ROWS * k)).zip(logits.par_chunks(ROWS * experts)).for_each(|(((p, weights), chosen), x)| {
            simd(
                #[inline(always)]
                || {
                    let rows = p.chunks_mut(experts).zip(weights.chunks_mut(k)).zip(chosen.chunks_mut(k)).zip(x.chunks(experts));
                    for (((p, weights), chosen), x) in rows {
                        let top = max(x);
                        p.iter_mut().zip(x).for_each(|(p, &v)| *p = exp(v - top));
                        let scale = 1.0 / sum(p, |v| v);
                        p.iter_mut().for_each(|p| *p *= scale);
                        for j in 0..k {
                            let left = (0..experts as i32).filter(|e| !chosen[..j].contains(e));
                            let larger = |a: i32, b: i32| {
                                let (x, y) = (x[a as usize], x[b as usize]);
                                if crate::mutant!("expert-of-a-tie-is-the-later", y > x, y >= x) { b } else { a }
                            };
                            chosen[j] = left.reduce(larger).expect("there are k experts at least");
                            weights[j] = p[chosen[j] as usize];
                        }
                        let scale = if self.normalized { 1.0 / sum(weights, |v| v) } else { 1.0 };
                        weights.iter_mut().for_each(|w| *w *= scale);
                    }
                },
            )
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        if at == Port::In(0) { Narrow::Sensitive("routers are not rounded to FP8") } else { Narrow::Keep }
    }

    fn cuda(&self, io: &Io) -> Code {
        launch(include_str!("route.cu"), "route", io.x[0].dim(1), io.x[0].dim(0), self.k)
            .define_type("T", io.x[0].dtype)
            .define("NORMALIZED", self.normalized as u8)
            .all(io)
            .code()
    }

    fn axes(&self, _: &[Meta], _: usize) -> Vec<Axis> {
        vec![Axis::first(&[true], 3)]
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let op = RouteGrad { by_probabilities: dy[0].is_some(), by_weights: dy[1].is_some(), normalized: self.normalized };
        let inputs: Vec<Var> = y.iter().copied().chain(dy[..2].iter().flatten().map(|d| d.cast(DType::F32))).collect();
        vec![(inputs.len() > 3).then(|| x[0].recorder().op1(op, &inputs).cast(x[0].dtype()))]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        // Not marked memory-bound: the result is small, so `recompute` should keep it.
        let bytes = x[0].bytes() + self.infer(x).iter().map(|m| m.bytes()).sum::<usize>();
        Cost { flops: 8 * x[0].elements() as u64, memory_bound: false, ..Cost::memory(bytes) }
    }
}

/// Inputs: the three outputs, then the gradients with respect to the first two, as far as they exist. Output: the gradient with respect to the
/// logits, f32.
#[derive(Debug)]
pub struct RouteGrad {
    /// Whether there is a gradient with respect to the probabilities.
    pub by_probabilities: bool,
    /// Whether there is a gradient with respect to the weights.
    pub by_weights: bool,
    /// As of `Route`.
    pub normalized: bool,
}

impl Op for RouteGrad {
    fn name(&self) -> &'static str {
        "route_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert_eq!(x.len(), 3 + self.by_probabilities as usize + self.by_weights as usize, "inputs of {self:?}");
        vec![x[0].clone()]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (experts, k) = (x[0].dim(0), x[1].dim(0));
        let (p, weights, chosen) = (x[0].f32(), x[1].f32(), x[2].i32());
        let by_probabilities = self.by_probabilities.then(|| x[3].f32());
        let by_weights = self.by_weights.then(|| x[x.len() - 1].f32());
        y[0].f32().par_chunks_mut(experts).with_min_len(ROWS).enumerate().for_each(|(row, out)| {
            let p = &p[row * experts..][..experts];
            match by_probabilities {
                Some(d) => out.copy_from_slice(&d[row * experts..][..experts]),
                None => out.fill(0.0),
            }
            if let Some(d) = by_weights {
                // w_j = p_j / s: d p_j = (d w_j - sum of w d w) / s. Not normalized: w_j = p_j.
                let (d, weights, chosen) = (&d[row * k..][..k], &weights[row * k..][..k], &chosen[row * k..][..k]);
                let (mean, total) = match self.normalized {
                    true => (d.iter().zip(weights).map(|(d, w)| d * w).sum(), chosen.iter().map(|&e| p[e as usize]).sum()),
                    false => (0.0f32, 1.0f32),
                };
                d.iter().zip(chosen).for_each(|(d, &e)| out[e as usize] += (d - mean) / total);
            }
            let along: f32 = out.iter().zip(p).map(|(d, p)| d * p).sum();
            out.iter_mut().zip(p).for_each(|(d, p)| *d = p * (*d - along));
        });
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        launch(include_str!("route_grad.cu"), "route_grad", io.x[0].dim(1), io.x[0].dim(0), io.x[1].dim(0))
            .define("BY_P", self.by_probabilities as u8)
            .define("BY_W", self.by_weights as u8)
            .define("NORMALIZED", self.normalized as u8)
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
        Cost { flops: 6 * x[0].elements() as u64, ..Cost::memory(x.iter().map(|m| m.bytes()).sum::<usize>() + x[0].bytes()) }
    }
}

/// A few threads for each token, which keep its row in registers.
fn launch(source: &str, entry: &'static str, tokens: usize, experts: usize, k: usize) -> Launch {
    const THREADS: usize = 256;
    let lanes = experts.next_power_of_two().min(32);
    Launch::new(&[LANES, source].concat(), entry)
        .define("ROWS", tokens)
        .define("EXPERTS", experts)
        .define("K", k)
        .define("LANES", lanes)
        .define("EACH", experts.div_ceil(lanes))
        .grid(tokens.div_ceil(THREADS / lanes), 1, 1)
        .block(THREADS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Data, DataMut};

    fn chosen(logits: &[f32], k: usize) -> Vec<i32> {
        let (shape, experts) = ([1, logits.len()], logits.len());
        let view = View { shape: &shape, strides: &[experts, 1], data: Data::F32(logits) };
        let (mut p, mut weights, mut chosen) = (vec![0.0; experts], vec![0.0; k], vec![0; k]);
        let mut y = [
            ViewMut { shape: &shape, data: DataMut::F32(&mut p) },
            ViewMut { shape: &[1, k], data: DataMut::F32(&mut weights) },
            ViewMut { shape: &[1, k], data: DataMut::I32(&mut chosen) },
        ];
        Route { k, normalized: true }.cpu(&[view], &mut y, &mut []);
        chosen
    }

    /// As reference/hrm.py sorts them: stably, from the largest down.
    #[test]
    fn of_equal_experts_the_earlier_are_chosen_first() {
        assert_eq!(chosen(&[1.0; 4], 2), [0, 1]);
        assert_eq!(chosen(&[0.0, 2.0, 1.0, 2.0, 2.0], 4), [1, 3, 4, 2]);
        assert_eq!(chosen(&[-0.0, 0.0], 1), [0]);
        assert_eq!(chosen(&[3.0; 70], 3), [0, 1, 2]);
    }
}
