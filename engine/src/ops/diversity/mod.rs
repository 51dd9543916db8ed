//! Cosine distance, 1 - cosine, between the vectors of a set: for each pair, and its mean over pairs. A zero vector has cosine 0 with all others.

use crate::cpu::math::{dot, sum};
use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io, Launch};
use crate::meta::{DType, Meta};
use crate::op::{Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use crate::ops::reduce::packs::{LANES, PACKS, Rows, pack};
use crate::record::Var;
use rayon::prelude::*;

/// Shorter vectors are divided by this instead of their length.
const SHORTEST: f32 = 1e-12;

fn check(x: &Meta) {
    assert!(x.rank() == 3 && x.shape[1] >= 2 && x.dtype.is_float(), "distances within sets of {x:?}: [sets, two or more, width]");
}

/// A set's vectors, normalized to length 1: [n, width].
fn units(set: &[f32], width: usize) -> Vec<f32> {
    set.chunks(width)
        .flat_map(|e| {
            let length = sum(e, |v| v * v).sqrt().max(SHORTEST);
            e.iter().map(move |v| v / length)
        })
        .collect()
}

/// A kernel over vectors, `groups` of them per block at once.
fn launch(io: &Io, source: &str, entry: &'static str, groups: usize) -> Launch {
    let (dtype, d) = (io.x[0].dtype, io.x[0].dim(0));
    let vec = pack(&[dtype], &[d, io.offsets[0]]);
    let lanes = lanes(d);
    Launch::new(&[PACKS, LANES, include_str!("vectors.cuh"), source].concat(), entry)
        .define_type("T", dtype)
        .define("SETS", io.x[0].shape[0])
        .define("N", io.x[0].shape[1])
        .define("D", d)
        .define("VEC", vec)
        .define("LANES", lanes)
        .define("GROUPS", groups)
        .define("PER", (d / vec).div_ceil(lanes))
        .block(lanes * groups)
        .all(io)
}

/// Threads per vector: a warp, or a block if each thread of a warp would have more than 32 elements.
fn lanes(d: usize) -> usize {
    if d <= 1024 { 32 } else { Rows::new(d, &[DType::F32]).lanes }
}

/// e [sets, n, width] -> the mean over pairs of 1 - cosine, f32 `[sets]`.
#[derive(Debug)]
pub struct Diversity;

impl Op for Diversity {
    fn name(&self) -> &'static str {
        "diversity"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check(&x[0]);
        vec![Meta::f32(&x[0].shape[..1])]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (n, width) = (x[0].dim(1), x[0].dim(0));
        y[0].f32().par_iter_mut().zip(x[0].f32().par_chunks(n * width)).for_each(|(y, set)| {
            let units = units(set, width);
            let mut all = vec![0.0f64; width];
            for u in units.chunks(width) {
                all.iter_mut().zip(u).for_each(|(a, &v)| *a += v as f64);
            }
            // |sum of u|^2 = sum of |u|^2 + 2 (sum of u_i u_j over pairs).
            let own: f64 = units.iter().map(|&v| v as f64 * v as f64).sum();
            let pairs = all.iter().map(|a| a * a).sum::<f64>() - own;
            *y = (1.0 - pairs / (n * (n - 1)) as f64) as f32;
        });
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        /// Warps that fill any GPU.
        const WARPS: usize = 8192;
        let (sets, n, d) = (io.x[0].shape[0], io.x[0].shape[1], io.x[0].shape[2]);
        let groups = if lanes(d) > 32 { 1 } else { (WARPS / sets).clamp(1, n.div_ceil(2).min(8)) };
        // Vectors per thread at once.
        let unroll = (64 / d.div_ceil(lanes(d)).next_multiple_of(4)).clamp(1, 4);
        launch(io, include_str!("diversity.cu"), "diversity", groups)
            .define("UNROLL", unroll)
            .grid(sets, 1, 1)
            .shared(if groups > 1 { 4 * groups * d } else { 0 })
            .code()
    }

    /// With u = e / |e| and s = the sum of a set's u: the gradient with respect to u is -2 (s - u) / (n (n - 1)); with respect to e, its component
    /// orthogonal to u, divided by |e|.
    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return no_gradient(1) };
        let (sets, n) = (x[0].shape()[0], x[0].shape()[1]);
        let (unit, length) = unit(x[0]);
        let by_unit = (unit.sum_axis(1) - unit) * (d.reshape(&[sets, 1, 1]) * (-2.0 / (n * (n - 1)) as f32));
        let across = by_unit - unit * (unit * by_unit).sum_axis(2);
        vec![Some((across / length).cast(x[0].dtype()))]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 4 * x[0].elements() as u64, ..Cost::memory(x[0].bytes()) }
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let (sets, n) = (x[0].shape()[0], x[0].shape()[1]);
        let (unit, _) = unit(x[0]);
        let own = unit.square().sum_axis(2).sum_axis(1);
        let all = unit.sum_axis(1).square().sum_axis(2);
        Some(vec![((all - own) * (-1.0 / (n * (n - 1)) as f32) + 1.0).reshape(&[sets])])
    }
}

/// Vectors normalized to length 1, in f32, and their lengths.
fn unit(e: Var) -> (Var, Var) {
    let e = e.cast(DType::F32);
    let length = e.square().sum_axis(2).sqrt().max(e.recorder().full(&[1, 1, 1], SHORTEST));
    (e / length, length)
}

/// e [sets, n, width] -> 1 - cosine of each pair i < j, (0, 1), (0, 2), .. (n - 2, n - 1): f32 [sets, n (n - 1) / 2].
#[derive(Debug)]
pub struct PairDistances;

impl Op for PairDistances {
    fn name(&self) -> &'static str {
        "pair_distances"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check(&x[0]);
        vec![Meta::f32(&[x[0].shape[0], x[0].shape[1] * (x[0].shape[1] - 1) / 2])]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (n, width) = (x[0].dim(1), x[0].dim(0));
        y[0].f32().par_chunks_mut(n * (n - 1) / 2).zip(x[0].f32().par_chunks(n * width)).for_each(|(y, set)| {
            let units = units(set, width);
            let of = |i: usize| &units[i * width..][..width];
            let pairs = (0..n).flat_map(|i| (i + 1..n).map(move |j| (i, j)));
            y.iter_mut().zip(pairs).for_each(|(y, (i, j))| *y = 1.0 - dot(of(i), of(j)));
        });
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        let (sets, n, d) = (io.x[0].shape[0], io.x[0].shape[1], io.x[0].shape[2]);
        let groups = if lanes(d) > 32 { 1 } else { 4 };
        launch(io, include_str!("pairs.cu"), "pair_distances", groups).grid((sets * (n - 1)).div_ceil(groups), 1, 1).code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let pairs = self.infer(x)[0].elements();
        Cost { flops: (4 * pairs * x[0].dim(0)) as u64, ..Cost::memory(x[0].bytes() + 4 * pairs) }
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let (sets, n) = (x[0].shape()[0], x[0].shape()[1]);
        let (unit, _) = unit(x[0]);
        let square = unit.matmul(unit.t()).reshape(&[sets, n * n]).t();
        let index: Vec<f32> = (0..n).flat_map(|i| (i + 1..n).map(move |j| (i * n + j) as f32)).collect();
        let pairs = x[0].recorder().constant(&[index.len()], index).cast(DType::I32);
        Some(vec![-square.gather_rows(pairs).t() + 1.0])
    }
}

impl<'g> Var<'g> {
    /// Of vectors [sets, n, width]: the mean over pairs of 1 - cosine, f32 `[sets]`.
    #[track_caller]
    pub fn diversity(self) -> Var<'g> {
        self.recorder().op1(Diversity, &[self])
    }

    /// The same for each pair: f32 [sets, n (n - 1) / 2].
    #[track_caller]
    pub fn pair_distances(self) -> Var<'g> {
        self.recorder().op1(PairDistances, &[self])
    }
}

fn mean<'g>(x: &[Var<'g>]) -> Vec<Var<'g>> {
    vec![x[0].diversity()]
}

fn pairs<'g>(x: &[Var<'g>]) -> Vec<Var<'g>> {
    vec![x[0].pair_distances()]
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("a set of two", &[In(&[3, 2, 5], Fill::Normal)], mean),
    Case::new("sets", &[In(&[7, 10, 48], Fill::Normal)], mean),
    Case::new("one set of many", &[In(&[1, 67, 129], Fill::Normal)], mean),
    Case::new("wide", &[In(&[2, 3, 1100], Fill::Normal)], mean),
    Case::new("a part of something", &[In(&[4, 3, 40], Fill::Normal)], |x| vec![x[0].slice(0, 1, 3).diversity()]),
    Case::new("pairs", &[In(&[3, 5, 70], Fill::Frozen)], pairs),
    Case::new("one pair", &[In(&[2, 2, 3], Fill::Frozen)], pairs),
    Case::new("pairs, wide", &[In(&[2, 3, 1100], Fill::Frozen)], pairs),
    Case::new("peers", &[In(&[4096, 10, 384], Fill::Frozen)], mean).bench(),
    Case::new("pairs of peers", &[In(&[4096, 10, 384], Fill::Frozen)], pairs).bench(),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Data, DataMut};
    use crate::philox::fill_normal;

    #[test]
    fn the_mean_is_that_of_the_pairs() {
        for (n, wiggle) in [(2, 1.0), (10, 1.0), (10, 1e-2), (100, 1e-3)] {
            let mut e = vec![0.0; n * 384];
            fill_normal(1, n as u64, &mut e);
            e.iter_mut().for_each(|v| *v = 1.0 + wiggle * *v);
            let (mut mean, mut each) = ([0.0], vec![0.0; n * (n - 1) / 2]);
            let (shape, pairs) = ([1, n, 384], [1, each.len()]);
            let view = View { shape: &shape, strides: &[n * 384, 384, 1], data: Data::F32(&e) };
            Diversity.cpu(&[view], &mut [ViewMut { shape: &[1], data: DataMut::F32(&mut mean) }], &mut []);
            PairDistances.cpu(&[view], &mut [ViewMut { shape: &pairs, data: DataMut::F32(&mut each) }], &mut []);
            let expected = each.iter().map(|&v| v as f64).sum::<f64>() / each.len() as f64;
            assert!((mean[0] as f64 - expected).abs() < 2e-7, "{} for {expected}", mean[0]);
        }
    }

    #[test]
    fn zeros_are_across_to_all() {
        let e = [0.0, 0.0, 3.0, 0.0, 5.0, 0.0];
        let view = View { shape: &[1, 3, 2], strides: &[6, 2, 1], data: Data::F32(&e) };
        let (mut mean, mut each) = ([0.0], [0.0; 3]);
        Diversity.cpu(&[view], &mut [ViewMut { shape: &[1], data: DataMut::F32(&mut mean) }], &mut []);
        PairDistances.cpu(&[view], &mut [ViewMut { shape: &[1, 3], data: DataMut::F32(&mut each) }], &mut []);
        assert_eq!(each, [1.0, 1.0, 0.0]);
        assert!((mean[0] - 2.0 / 3.0).abs() < 1e-7);
    }
}
