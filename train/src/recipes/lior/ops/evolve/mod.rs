//! A complex field under i dT/dt = laplacian T, many steps at once, and how large it is at the start of each. The real part moves
//! first, so that the field's size stays bounded; the Laplacian has five points, and zeros lie outside.
//!
//! ```text
//! re += k laplacian(im) + source;  im -= k laplacian(re)
//! ```
//!
//! re, im [first, .., height, width]; k [1]; source [first], if there is one. Results: re, im, and the mean of |re + i im| [steps].
//! What model code records is the meaning; the pass `fuse-evolution` replaces it by an op that keeps a slice [height, width] where it is
//! for all steps, because slices know nothing of each other.

use engine::cpu::{View, ViewMut, math, simd};
use engine::kernel::{At, Code, Io, Launch, Step};
use engine::meta::Meta;
use engine::op::{Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use engine::ops::concat::concat;
use engine::record::Var;
use rayon::prelude::*;

/// As it is recorded.
#[derive(Clone, Copy, Debug)]
pub struct Evolution {
    pub steps: usize,
}

/// All steps in one launch.
#[derive(Clone, Copy, Debug)]
pub struct Evolve {
    pub steps: usize,
}

fn infer(steps: usize, x: &[Meta]) -> Vec<Meta> {
    let same = x.len() >= 3 && x[0].rank() >= 3 && x[0].shape == x[1].shape && x[..2].iter().all(|m| m.dtype.is_float());
    let fits = same && x[2].elements() == 1 && x.get(3).is_none_or(|s| s.shape == [x[0].shape[0]]);
    assert!(fits && steps > 0, "evolve {x:?} by {steps} steps");
    vec![Meta::f32(&x[0].shape), Meta::f32(&x[0].shape), Meta::f32(&[steps])]
}

fn cost(steps: usize, x: &[Meta]) -> Cost {
    // Two Laplacians and a root for each element and step; the field itself is read and written once.
    Cost::compute(20 * steps * x[0].elements(), 2 * (x[0].bytes() + 4 * x[0].elements()))
}

impl Op for Evolution {
    fn name(&self) -> &'static str {
        "evolution"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        infer(self.steps, x)
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
        cost(self.steps, x)
    }

    fn is_composite(&self) -> bool {
        true
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let (mut re, mut im) = (x[0], x[1]);
        let rank = re.meta().rank();
        let ones = |first: usize| [&[first][..], &vec![1; rank - 1]].concat();
        let (k, source) = (x[2].reshape(&ones(1)), x.get(3).map(|s| s.reshape(&ones(s.dim(0)))));
        let mut sizes = vec![];
        for _ in 0..self.steps {
            sizes.push((re.square() + im.square()).sqrt().mean());
            re = re + laplacian(im) * k;
            re = source.map_or(re, |s| re + s);
            im = im - laplacian(re) * k;
        }
        Some(vec![re, im, concat(&sizes, 0)])
    }
}

fn laplacian(x: Var) -> Var {
    let rank = x.meta().rank();
    let sides = |axis: usize| {
        let (p, n) = (x.pad(axis, 1, 1), x.shape()[axis]);
        (p.slice(axis, 0, n), p.slice(axis, 2, n + 2))
    };
    let ((up, down), (left, right)) = (sides(rank - 2), sides(rank - 1));
    up + down + left + right - x * 4.0
}

impl Op for Evolve {
    fn name(&self) -> &'static str {
        "evolve"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        infer(self.steps, x)
    }

    /// The sum of each slice's sizes at each step.
    fn workspace(&self, x: &[Meta]) -> usize {
        self.steps * x[0].elements() / (x[0].dim(0) * x[0].dim(1))
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], sums: &mut [f32]) {
        let (height, width) = (x[0].dim(1), x[0].dim(0));
        let (area, elements) = (height * width, x[0].shape.iter().product::<usize>());
        let k = x[2].f32()[0];
        let source = x.get(3).map(|s| s.f32());
        let inner = elements / area / x[0].shape[0]; // slices of one element of the first axis
        let [re, im, sizes] = y else { unreachable!("three outputs") };
        re.f32().copy_from_slice(x[0].f32());
        im.f32().copy_from_slice(x[1].f32());
        let slices = re.f32().par_chunks_mut(area).zip(im.f32().par_chunks_mut(area)).zip(sums.par_chunks_mut(self.steps));
        slices.enumerate().for_each(|(slice, ((re, im), sums))| {
            let push = source.map_or(0.0, |s| s[slice / inner]);
            let mut size = vec![0.0; area];
            simd(
                #[inline(always)]
                || {
                    for sum in sums {
                        size.iter_mut().zip(&*re).zip(&*im).for_each(|((s, &a), &b)| *s = (a * a + b * b).sqrt());
                        *sum = math::sum(&size, |v| v);
                        leap(re, im, width, |a, l| a + k * l + push);
                        leap(im, re, width, |a, l| a - k * l);
                    }
                },
            );
        });
        for (step, size) in sizes.f32().iter_mut().enumerate() {
            *size = sums.iter().skip(step).step_by(self.steps).sum::<f32>() / elements as f32;
        }
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        let (height, width) = (io.x[0].dim(1), io.x[0].dim(0));
        let (area, elements) = (height * width, io.x[0].elements());
        let slices = elements / area;
        let threads = area.next_multiple_of(32).min(1024);
        // Shared memory that every GPU since compute capability 8.0 gives to one block; a larger slice stays in memory.
        let bytes = 8 * area;
        let shared = bytes <= 99 * 1024;
        let sourced = io.x.len() > 3;
        let parts = slices * (threads / 32);
        let text = include_str!("evolve.cu");
        let steps = Launch::new(text, "evolve")
            .define_type("RE", io.x[0].dtype)
            .define_type("IM", io.x[1].dtype)
            .define_type("K", io.x[2].dtype)
            .define_type("SOURCE", io.x[if sourced { 3 } else { 2 }].dtype)
            .define("SOURCED", sourced as u8)
            .define("HEIGHT", height)
            .define("WIDTH", width)
            .define("STEPS", self.steps)
            .define("SLICES", slices)
            .define("INNER", slices / io.x[0].shape[0])
            .define("THREADS", threads)
            .define("SHARED", shared as u8)
            .define("PARTS", parts)
            .define("ELEMENTS", elements);
        let source = At::X(if sourced { 3 } else { 2 });
        let args = [At::X(0), At::X(1), At::X(2), source, At::Y(0), At::Y(1), At::Work].map(Into::into);
        let evolve = steps.clone().grid(slices, 1, 1).block(threads).shared(if shared { bytes } else { 0 }).args(&args);
        let mean = Launch { entry: "mean_size", ..steps }.grid(self.steps, 1, 1).block(256).args(&[At::Work.into(), At::Y(2).into()]);
        Code { steps: vec![Step::Launch(evolve), Step::Launch(mean)], workspace: 4 * self.steps * parts }
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        cost(self.steps, x)
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        Evolution { steps: self.steps }.unfused(x)
    }
}

/// a = f(a, laplacian of b), over a slice whose rows are `width` long.
#[inline(always)]
fn leap(a: &mut [f32], b: &[f32], width: usize, f: impl Fn(f32, f32) -> f32) {
    let zeros = vec![0.0; width];
    let rows = b.len() / width;
    for (y, a) in a.chunks_mut(width).enumerate() {
        let row = |y: usize| if y < rows { &b[y * width..][..width] } else { &zeros[..] };
        let (up, own, down) = (row(y.wrapping_sub(1)), row(y), row(y + 1));
        for x in 0..width {
            let left = if x > 0 { own[x - 1] } else { 0.0 };
            let right = if x + 1 < width { own[x + 1] } else { 0.0 };
            a[x] = f(a[x], up[x] + down[x] + left + right - 4.0 * own[x]);
        }
    }
}

/// See the module's head: (re, im, sizes).
#[track_caller]
pub fn evolution<'g>(re: Var<'g>, im: Var<'g>, k: Var<'g>, source: Option<Var<'g>>, steps: usize) -> (Var<'g>, Var<'g>, Var<'g>) {
    let x: Vec<Var> = [re, im, k].into_iter().chain(source).collect();
    let y = re.recorder().op(Evolution { steps }, &x);
    (y[0], y[1], y[2])
}

/// The step is kept small enough that a field of any numbers stays bounded.
fn fused<'g>(x: &[Var<'g>]) -> Vec<Var<'g>> {
    let inputs = [&[x[0], x[1], x[2] * 0.05], &x[3..]].concat();
    x[0].recorder().op(Evolve { steps: 5 }, &inputs)
}

macro_rules! field {
    ($($shape:literal),*; $($more:expr),*) => {
        &[In(&[$($shape),*], Fill::Frozen), In(&[$($shape),*], Fill::Frozen), In(&[1], Fill::Frozen) $(, $more)*]
    };
}

pub const CASES: &[Case] = &[
    Case::new("sourced", field!(2, 3, 6, 6; In(&[2], Fill::Frozen)), fused),
    Case::new("free, not square", field!(3, 2, 5, 9;), fused),
    Case::new("one axis before, odd", field!(5, 7, 3; In(&[5], Fill::Frozen)), fused),
    Case::new("one row", field!(2, 2, 1, 40;), fused),
    Case::new("one column", field!(3, 37, 1; In(&[3], Fill::Frozen)), fused),
    Case::new("more elements than threads", field!(2, 1, 41, 43; In(&[2], Fill::Frozen)), fused),
    Case::new("more than shared memory holds", field!(1, 2, 101, 131; In(&[1], Fill::Frozen)), fused),
    Case::new("64 steps of 16 x 16", field!(8, 8, 16, 16; In(&[8], Fill::Frozen)), |x| {
        x[0].recorder().op(Evolve { steps: 64 }, &[x[0], x[1], x[2] * 0.05, x[3]])
    })
    .bench(),
];
