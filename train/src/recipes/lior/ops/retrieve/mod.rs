//! Queries among candidates, under a diagonal metric in a rotated frame: what a query finds near it moves it half of the way there, and
//! the length of where it ends up is averaged over steps.
//!
//! For every step and row: the candidates are the row's own [time, n] that count, which are their own values, and the slots of a memory
//! [slots, n] that are filled, with values [slots, n]. With R the rotation,
//!
//! ```text
//! weight = softmax over candidates of -sharpness scale |R candidate - R query|
//! place = R (query + sum of weight value) / 2
//! ```
//!
//! where |v| = sqrt(sum of metric v^2 + eps). R is made of layers of plane rotations: plane j of layer l turns axes a = (2 j + l) mod n and
//! (a + 1) mod n by an angle of its own; the planes of a layer share no axis.
//!
//! What model code records is the meaning; the pass `fuse-retrieval` replaces it by an op that goes over the candidates once, and over the
//! memory only as far as it is filled.

use engine::cpu::math::{exp, max};
use engine::cpu::{View, ViewMut};
use engine::kernel::{At, Code, Io, Launch, Step};
use engine::meta::{DType, Layout, Meta, block_stride};
use engine::op::{Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use engine::ops::concat::concat;
use engine::ops::pointwise::{Bin, Un, pointwise};
use engine::record::Var;
use rayon::prelude::*;

/// Inputs, in this order: query [steps, rows, n], own [steps, rows, time, n], counts u8 [rows, time] (each row has at least one that does),
/// memory [slots, n], values [slots, n], filled i32 [1] (slots ever written), angles [layers * (n / 2)], metric [n], scale [steps].
///
/// Outputs, each a mean over steps: scale |place| [rows], |place| [rows], place [rows, n], d (scale |place|) / d metric [rows, n].
#[derive(Clone, Copy, Debug)]
pub struct Retrieval {
    pub sharpness: f32,
    pub eps: f32,
}

/// One pass over the candidates that count; sharp enough that the others weigh nothing (`leaves_out`).
#[derive(Clone, Copy, Debug)]
pub struct Retrieve {
    pub sharpness: f32,
    pub eps: f32,
}

/// Planes whose cosines and sines a GPU's kernel has room for.
pub const PLANES: usize = 4096;

/// What is added to the cost of a candidate that does not count.
const FAR: f32 = 1e4;

/// Whether `FAR` makes a weight 0 in f32: a retrieval that is less sharp mixes a little of everything, of what does not count, too.
pub fn leaves_out(sharpness: f32) -> bool {
    sharpness * FAR >= 128.0
}

struct Sizes {
    steps: usize,
    rows: usize,
    time: usize,
    n: usize,
    slots: usize,
    layers: usize,
}

impl Sizes {
    fn new(shape: impl Fn(usize) -> Vec<usize>) -> Sizes {
        let (own, memory, angles) = (shape(1), shape(3), shape(6));
        let n = own[3];
        Sizes { steps: own[0], rows: own[1], time: own[2], n, slots: memory[0], layers: angles[0] / (n / 2) }
    }

    /// Numbers that a step and row gives: scale |place|, |place|, place, slope.
    fn given(&self) -> usize {
        2 + 2 * self.n
    }
}

fn infer(x: &[Meta]) -> Vec<Meta> {
    assert_eq!(x.len(), 9, "retrieval wants nine inputs, not {x:?}");
    let (steps, rows, n) = (x[0].shape[0], x[0].shape[1], x[0].dim(0));
    let fits = x[0].rank() == 3
        && n >= 2
        && x[1].rank() == 4
        && x[1].shape[..2] == [steps, rows]
        && x[1].dim(0) == n
        && (&x[2].shape[..], x[2].dtype) == (&[rows, x[1].shape[2]], DType::U8)
        && x[3].rank() == 2
        && x[3].dim(0) == n
        && x[4].shape == x[3].shape
        && (&x[5].shape[..], x[5].dtype) == (&[1], DType::I32)
        && x[6].rank() == 1
        && x[6].shape[0].is_multiple_of(n / 2)
        && x[7].shape == [n]
        && x[8].shape == [steps];
    assert!(fits, "retrieval of {x:?}");
    vec![Meta::f32(&[rows]), Meta::f32(&[rows]), Meta::f32(&[rows, n]), Meta::f32(&[rows, n])]
}

fn cost(x: &[Meta]) -> Cost {
    let s = Sizes::new(|i| x[i].shape.clone());
    let candidate = 6 * s.layers * (s.n / 2) + 6 * s.n + 10;
    let flops = s.steps * s.rows * (s.time + s.slots) * candidate;
    Cost::compute(flops, x.iter().map(|m| m.bytes()).sum())
}

impl Op for Retrieval {
    fn name(&self) -> &'static str {
        "retrieval"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        infer(x)
    }

    fn cpu(&self, _: &[View], _: &mut [ViewMut], _: &mut [f32]) {
        unreachable!("a pass or the unfused form stands in for it")
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, _: &Io) -> Code {
        unreachable!("a pass or the unfused form stands in for it")
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        unreachable!("replaced before gradients are written out")
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        cost(x)
    }

    fn is_composite(&self) -> bool {
        true
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let s = Sizes::new(|i| x[i].shape());
        let r = x[0].recorder();
        let (query, own, angles, metric) = (x[0], x[1], x[6], x[7]);
        let scale = x[8].reshape(&[s.steps, 1]);
        let length = |v: Var<'g>| {
            let rank = v.meta().rank();
            let squares = (v.square() * metric).sum_axis(rank - 1);
            (squares.reshape(&v.shape()[..rank - 1]) + self.eps).sqrt()
        };
        // [steps, rows, time + slots, n]
        let all = |own: Var<'g>, memory: Var<'g>| concat(&[own, memory.expand(&[s.steps, s.rows, s.slots, s.n])], 2);
        let candidates = rotated(all(own, x[3]), angles);
        let away = length(candidates - rotated(query, angles).reshape(&[s.steps, s.rows, 1, s.n])) * scale.reshape(&[s.steps, 1, 1]);
        let slot = r.constant(&[1, s.slots], (0..s.slots).map(|i| i as f32).collect());
        let empty = -slot.less(x[5].cast(DType::F32)) + 1.0;
        let masked = -x[2].cast(DType::F32) + 1.0;
        let penalty = concat(&[masked, empty.expand(&[s.rows, s.slots])], 1) * FAR;
        let weight = ((away + penalty) * -self.sharpness).softmax();
        let found = (all(own, x[4]) * weight.reshape(&[s.steps, s.rows, s.time + s.slots, 1])).sum_axis(2);
        let place = rotated((query + found.reshape(&[s.steps, s.rows, s.n])) * 0.5, angles);
        let size = length(place);
        let slope = place.square() * scale.reshape(&[s.steps, 1, 1]) / (size.reshape(&[s.steps, s.rows, 1]) * 2.0);
        let mean = |v: Var<'g>| v.mean_axis(0).reshape(&v.shape()[1..]);
        Some(vec![mean(size * scale), mean(size), mean(place), mean(slope)])
    }
}

/// R v for v [.., n].
fn rotated<'g>(v: Var<'g>, angles: Var<'g>) -> Var<'g> {
    let (shape, rank) = (v.shape(), v.meta().rank());
    let (n, lead) = (shape[rank - 1], &shape[..rank - 1]);
    let planes = n / 2;
    let mut v = v;
    for l in 0..angles.dim(0) / planes {
        // The axes from l on, around and around: each plane has two neighbours, and with an odd n the last is left alone.
        let from = l % n;
        let around = |v: Var<'g>, from: usize| match from {
            0 => v,
            _ => concat(&[v.slice(rank - 1, from, n), v.slice(rank - 1, 0, from)], rank - 1),
        };
        let turned = around(v, from);
        let pairs = turned.slice(rank - 1, 0, 2 * planes).reshape(&[lead, &[planes, 2]].concat());
        let (a, b) = (pairs.slice(rank, 0, 1), pairs.slice(rank, 1, 2));
        let angle = angles.slice(0, l * planes, (l + 1) * planes).reshape(&[planes, 1]);
        let (cos, sin) = (pointwise(&[angle], |e, x| e.un(Un::Cos, x[0])), pointwise(&[angle], |e, x| e.un(Un::Sin, x[0])));
        let pairs = concat(&[a * cos - b * sin, a * sin + b * cos], rank).reshape(&[lead, &[2 * planes]].concat());
        let whole = if n % 2 == 0 { pairs } else { concat(&[pairs, turned.slice(rank - 1, n - 1, n)], rank - 1) };
        v = around(whole, (n - from) % n);
    }
    v
}

/// The cosine and sine of every plane.
pub fn turns(angles: &[f32]) -> Vec<(f32, f32)> {
    angles.iter().map(|a| (a.cos(), a.sin())).collect()
}

/// Turns v where it lies.
pub fn rotate(v: &mut [f32], turns: &[(f32, f32)]) {
    let n = v.len();
    for (l, layer) in turns.chunks(n / 2).enumerate() {
        for (j, &(cos, sin)) in layer.iter().enumerate() {
            let a = (2 * j + l) % n;
            let b = (a + 1) % n;
            (v[a], v[b]) = (cos * v[a] - sin * v[b], sin * v[a] + cos * v[b]);
        }
    }
}

impl Op for Retrieve {
    fn name(&self) -> &'static str {
        "retrieve"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        infer(x)
    }

    fn layout(&self, input: usize) -> Layout {
        match input {
            1 => Layout::Blocks(3), // rows of something wider
            3 | 4 => Layout::Blocks(1),
            _ => Layout::Contiguous,
        }
    }

    /// The memory, rotated; and what every step and row gives.
    fn workspace(&self, x: &[Meta]) -> usize {
        let s = Sizes::new(|i| x[i].shape.clone());
        s.slots * s.n + s.steps * s.rows * s.given()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], workspace: &mut [f32]) {
        let s = Sizes::new(|i| x[i].shape.to_vec());
        let n = s.n;
        let (query, own, counts, metric, scale) = (x[0].f32(), x[1].f32(), x[2].u8(), x[7].f32(), x[8].f32());
        let stride = |i: usize, axis: usize| block_stride(x[i].shape, x[i].strides, axis).expect("blocks evenly apart");
        let (own_step, memory_step, value_step) = (stride(1, 3), stride(3, 1), stride(4, 1));
        let (memory, values) = (x[3].f32(), x[4].f32());
        let filled = (x[5].i32()[0].max(0) as usize).min(s.slots);
        let turns = turns(x[6].f32());
        let (rotated, given) = workspace.split_at_mut(s.slots * n);
        for (i, to) in rotated.chunks_mut(n).take(filled).enumerate() {
            to.copy_from_slice(&memory[i * memory_step..][..n]);
            rotate(to, &turns);
        }
        let rotated = &*rotated;
        let squares = |it: &mut dyn Iterator<Item = f32>| it.zip(metric).map(|(v, &g)| g * v * v).sum::<f32>();
        given.par_chunks_mut(s.given()).enumerate().for_each(|(i, out)| {
            let (step, row) = (i / s.rows, i % s.rows);
            let q = &query[i * n..][..n];
            let mut at = q.to_vec();
            rotate(&mut at, &turns);
            let score = |c: &[f32]| {
                let away = (squares(&mut c.iter().zip(&at).map(|(a, b)| a - b)) + self.eps).sqrt();
                -self.sharpness * (scale[step] * away)
            };
            let mut scores = vec![];
            let mut found = vec![];
            let mut c = vec![0.0; n];
            for t in (0..s.time).filter(|t| counts[row * s.time + t] != 0) {
                let value = &own[(i * s.time + t) * own_step..][..n];
                c.copy_from_slice(value);
                rotate(&mut c, &turns);
                scores.push(score(&c));
                found.push(value);
            }
            for m in 0..filled {
                scores.push(score(&rotated[m * n..][..n]));
                found.push(&values[m * value_step..][..n]);
            }
            let top = max(&scores);
            scores.iter_mut().for_each(|v| *v = exp(*v - top));
            let total: f32 = scores.iter().sum();
            let mut place = vec![0.0; n];
            for (w, value) in scores.iter().zip(found) {
                place.iter_mut().zip(value).for_each(|(p, v)| *p += w * v);
            }
            place.iter_mut().zip(q).for_each(|(p, q)| *p = 0.5 * (q + *p / total));
            rotate(&mut place, &turns);
            let size = (squares(&mut place.iter().copied()) + self.eps).sqrt();
            (out[0], out[1]) = (scale[step] * size, size);
            out[2..2 + n].copy_from_slice(&place);
            out[2 + n..].iter_mut().zip(&place).for_each(|(o, p)| *o = scale[step] * p * p / (2.0 * size));
        });
        // Steps are added in order.
        let mean = |row: usize, number: usize| {
            let all = given.chunks(s.given()).skip(row).step_by(s.rows);
            all.map(|g| g[number]).sum::<f32>() / s.steps as f32
        };
        let [energy, size, place, slope] = y else { unreachable!("four outputs") };
        for row in 0..s.rows {
            (energy.f32()[row], size.f32()[row]) = (mean(row, 0), mean(row, 1));
            for j in 0..n {
                (place.f32()[row * n + j], slope.f32()[row * n + j]) = (mean(row, 2 + j), mean(row, 2 + n + j));
            }
        }
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        let s = Sizes::new(|i| io.x[i].shape.clone());
        let stride = |i: usize, axis: usize| block_stride(&io.x[i].shape, &io.strides[i], axis).expect("blocks evenly apart");
        let planes = s.layers * (s.n / 2);
        assert!(planes <= PLANES, "retrieval has no kernel for {planes} planes; it takes up to {PLANES}");
        // As many threads as there is work for, and never so few that a multiprocessor is idle.
        let threads = (s.time + s.slots).div_ceil(8).next_multiple_of(32).clamp(64, 256);
        let names = ["QUERY", "OWN", "MEMORY", "VALUE", "ANGLE", "METRIC", "SCALE"];
        let mut launch = Launch::new(include_str!("retrieve.cu"), "retrieve");
        for (name, i) in names.into_iter().zip([0, 1, 3, 4, 6, 7, 8]) {
            launch = launch.define_type(name, io.x[i].dtype);
        }
        let launch = launch
            .define("STEPS", s.steps)
            .define("ROWS", s.rows)
            .define("TIME", s.time)
            .define("N", s.n)
            .define("SLOTS", s.slots)
            .define("LAYERS", s.layers)
            .define("OWN_STEP", stride(1, 3))
            .define("MEMORY_STEP", stride(3, 1))
            .define("VALUE_STEP", stride(4, 1))
            .define("THREADS", threads)
            // Axes are constants where the rotation is short enough to be written out.
            .define("UNROLL", if planes <= 64 { planes } else { 1 })
            .define_f32("SHARPNESS", self.sharpness)
            .define_f32("EPS", self.eps);
        let inputs: Vec<_> = (0..9).map(|i| At::X(i).into()).chain([At::Work.into()]).collect();
        let retrieve = launch.clone().grid(s.steps * s.rows, 1, 1).block(threads).args(&inputs);
        let outputs = [At::Work, At::Y(0), At::Y(1), At::Y(2), At::Y(3)].map(Into::into);
        let numbers = s.rows * s.given();
        let mean = Launch { entry: "mean_of_steps", ..launch }.grid(numbers.div_ceil(128), 1, 1).block(128).args(&outputs);
        Code { steps: vec![Step::Launch(retrieve), Step::Launch(mean)], workspace: 4 * s.steps * numbers }
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        cost(x)
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        Retrieval { sharpness: self.sharpness, eps: self.eps }.unfused(x)
    }
}

/// See `Retrieval`.
#[track_caller]
pub fn retrieval<'g>(x: &[Var<'g>], sharpness: f32, eps: f32) -> Vec<Var<'g>> {
    x[0].recorder().op(Retrieval { sharpness, eps }, x)
}

/// A metric is positive, and so is a scale.
fn fused<'g>(x: &[Var<'g>]) -> Vec<Var<'g>> {
    let mut x = x.to_vec();
    (x[7], x[8]) = (x[7].abs() + 0.25, x[8].abs() * 0.3 + 0.1);
    x[0].recorder().op(Retrieve { sharpness: 2.0, eps: 1e-6 }, &x)
}

macro_rules! lookup {
    ($steps:literal, $rows:literal, $time:literal, $n:literal, $slots:literal, $filled:literal, $angles:literal) => {
        &[
            In(&[$steps, $rows, $n], Fill::Frozen),
            In(&[$steps, $rows, $time, $n], Fill::Frozen),
            In(&[$rows, $time], Fill::Mask),
            In(&[$slots, $n], Fill::Frozen),
            In(&[$slots, $n], Fill::Frozen),
            In(&[1], Fill::Index($filled)),
            In(&[$angles], Fill::Frozen),
            In(&[$n], Fill::Frozen),
            In(&[$steps], Fill::Frozen),
        ]
    };
}

pub const CASES: &[Case] = &[
    Case::new("two layers", lookup!(3, 2, 12, 8, 16, 17, 8), fused),
    Case::new("odd n, three layers", lookup!(4, 3, 11, 5, 9, 9, 6), fused),
    Case::new("n of 2, one layer", lookup!(2, 5, 7, 2, 3, 40, 1), fused),
    Case::new("an empty memory", lookup!(2, 2, 40, 3, 5, 1, 2), fused),
    Case::new("more layers than axes", lookup!(1, 1, 33, 3, 70, 200, 5), fused),
    Case::new("n of 21, many candidates", lookup!(2, 2, 300, 21, 700, 900, 20), fused),
    Case::new("parts of something wider", lookup!(2, 3, 10, 12, 14, 30, 6), |x| {
        let mut x = x.to_vec();
        (x[0], x[1], x[3], x[4]) = (x[0].slice(2, 3, 7), x[1].slice(3, 3, 7), x[3].slice(1, 3, 7), x[4].slice(1, 3, 7));
        x[7] = x[7].slice(0, 0, 4);
        fused(&x)
    }),
    Case::new("64 steps, 2048 slots", lookup!(64, 8, 128, 8, 2048, 1, 8), |x| {
        let mut x = x.to_vec();
        x[5] = pointwise(&[x[5].cast(DType::F32), x[5].recorder().full(&[1], 4096.0)], |e, r| e.bin(Bin::Max, r[0], r[1])).cast(DType::I32);
        fused(&x)
    })
    .bench(),
];
