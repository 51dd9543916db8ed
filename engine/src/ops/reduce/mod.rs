//! Sums and maxima along axes, in an order that does not depend on the number of threads.

use crate::cpu::{View, ViewMut, math, simd};
use crate::graph::Kind;
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, Meta};
use crate::op::{Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share};
use crate::ops::full::Full;
use crate::ops::pointwise::{Bin, pointwise};
use crate::record::Var;
use rayon::prelude::*;
use std::sync::Arc;

pub mod packs;

/// How values are combined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// The largest.
    Max,
}

/// A reduction over one axis, which stays with size 1.
#[derive(Clone, Debug)]
pub struct Reduce {
    /// How values are combined.
    pub how: Reduction,
    /// Which dimension becomes 1.
    pub axis: usize,
    /// Whether the result is f32 whatever the input's type.
    pub wide: bool,
}

/// Elements along the axis for each partial result; partial results are then added in order.
const BLOCK: usize = 512;
/// Output elements of one task.
const COLUMNS: usize = 1024;

impl Reduce {
    fn split(&self, shape: &[usize]) -> (usize, usize, usize) {
        (shape[..self.axis].iter().product(), shape[self.axis], shape[self.axis + 1..].iter().product())
    }
}

impl Op for Reduce {
    fn name(&self) -> &'static str {
        "reduce"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let mut shape = x[0].shape.clone();
        assert!(self.axis < shape.len() && x[0].dtype.is_float(), "reduce axis {} of {:?}", self.axis, x[0]);
        shape[self.axis] = 1;
        vec![Meta::new(&shape, if self.wide { DType::F32 } else { x[0].dtype })]
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        let (outer, n, inner) = self.split(&x[0].shape);
        outer * n.div_ceil(BLOCK) * inner
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], partial: &mut [f32]) {
        let (_, n, inner) = self.split(x[0].shape);
        let (x, y) = (x[0].f32(), y[0].f32());
        let blocks = n.div_ceil(BLOCK);
        let how = self.how;
        // partial [outer, blocks, inner], cut into rows of at most COLUMNS
        let width = inner.min(COLUMNS);
        let cut = |i: usize| (i / inner.div_ceil(width), i % inner.div_ceil(width) * width);
        let rows: Vec<(usize, &mut [f32])> = partial.chunks_mut(inner).flat_map(|r| r.chunks_mut(width)).enumerate().collect();
        rows.into_par_iter().for_each(|(i, out)| {
            let (block, column) = cut(i);
            let (o, b) = (block / blocks, block % blocks);
            let first = (o * n + b * BLOCK) * inner + column;
            let count = BLOCK.min(n - b * BLOCK);
            simd(
                #[inline(always)]
                || {
                    if inner == 1 {
                        let row = &x[first..first + count];
                        out[0] = if how == Reduction::Sum { math::sum(row, |v| v) } else { math::max(row) };
                        return;
                    }
                    out.copy_from_slice(&x[first..first + out.len()]);
                    for r in 1..count {
                        let row = &x[first + r * inner..][..out.len()];
                        match how {
                            Reduction::Sum => out.iter_mut().zip(row).for_each(|(a, &b)| *a += b),
                            Reduction::Max => out.iter_mut().zip(row).for_each(|(a, &b)| *a = if b > *a || b.is_nan() { b } else { *a }),
                        }
                    }
                },
            )
        });
        for (out, part) in y.chunks_mut(inner).zip(partial.chunks(blocks * inner)) {
            out.copy_from_slice(&part[..inner]);
            let rest = crate::mutant!("reduce-leaves-out-the-last-block", inner..blocks * inner, inner..(blocks - 1).max(1) * inner);
            for p in part[rest].chunks(inner) {
                for (a, &b) in out.iter_mut().zip(p) {
                    *a = match how {
                        Reduction::Sum => *a + b,
                        Reduction::Max => math::max(&[*a, b]),
                    };
                }
            }
        }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        match at {
            Port::In(_) => Narrow::Keep,
            Port::Out(_) => crate::mutant!("sums-rounded-to-bf16", Narrow::Keep, Narrow::Follow(vec![0])),
        }
    }

    fn with_types(&self, outputs: &[DType]) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Reduce { wide: outputs[0] == DType::F32, ..self.clone() }))
    }

    fn cuda(&self, io: &Io) -> Code {
        let (outer, n, inner) = self.split(&io.x[0].shape);
        let dtype = io.x[0].dtype;
        let first = Part { how: self.how, outer, n, inner, parts: parts(outer, n, inner, dtype) };
        let (x, y) = ((At::X(0).into(), dtype), (At::Y(0).into(), io.y[0].dtype));
        if first.parts == 1 {
            return first.launch(x, y).code();
        }
        let partial = (At::Work.into(), DType::F32);
        let second = Part { n: first.parts, parts: 1, ..first };
        let steps = vec![Step::Launch(first.launch(x, partial)), Step::Launch(second.launch(partial, y))];
        Code { steps, workspace: 4 * outer * first.parts * inner }
    }

    /// Other dimensions than the one that is reduced; of sums that one, too.
    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        let axis = |d: usize| match d == self.axis {
            false => Some(Axis::new([Share::Dim(d)], [Share::Dim(d)])),
            true => (self.how == Reduction::Sum).then(|| Axis::new([Share::Dim(d)], [Share::Sum])),
        };
        (0..x[0].rank()).filter_map(axis).collect()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        match self.how {
            Reduction::Sum => vec![dy[0].map(|d| d.cast(x[0].dtype()).expand(&x[0].shape()))],
            // The gradient is divided evenly among all elements that equal the maximum.
            Reduction::Max => vec![dy[0].map(|d| {
                let highest = pointwise(&[x[0], y[0]], |e, r| e.bin(Bin::Eq, r[0], r[1]));
                highest * crate::mutant!("maximum-gradient-not-shared", d / highest.sum_axis(self.axis), d)
            })],
        }
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: x[0].elements() as u64, ..Cost::memory(x[0].bytes() + self.infer(x)[0].bytes()) }
    }
}

/// Blocks that a reduction is split into, enough for any GPU: a constant, so that the order of additions is the same on all.
const BLOCKS: usize = 1024;
const THREADS: usize = 256;
/// Width of a block in packs of columns.
const WIDE: usize = 32;
/// Packs of a row, or rows of a column, per thread before more threads pay.
const EACH: usize = 8;

/// In how many parts [outer, n, inner] is reduced; several are combined by a second launch.
fn parts(outer: usize, n: usize, inner: usize, dtype: DType) -> usize {
    let (blocks, worth) = match inner {
        1 => (outer, THREADS * EACH * 16 / dtype.size()),
        _ => {
            let width = inner / packs::pack(&[dtype], &[inner]);
            (outer * width.div_ceil(WIDE), THREADS * EACH / width.next_power_of_two().min(WIDE))
        }
    };
    (BLOCKS / blocks).clamp(1, n.div_ceil(worth))
}

/// [outer, n, inner] to [outer, parts, inner].
#[derive(Clone, Copy, Debug)]
struct Part {
    how: Reduction,
    outer: usize,
    n: usize,
    inner: usize,
    parts: usize,
}

impl Part {
    fn launch(&self, (x, from): (Place, DType), (y, to): (Place, DType)) -> Launch {
        let launch = Launch::new(&[packs::PACKS, packs::LANES, include_str!("reduce.cu")].concat(), "reduce")
            .define_type("T", from)
            .define_type("OUT", to)
            .define("MAX", (self.how == Reduction::Max) as u8)
            .define("OUTER", self.outer)
            .define("N", self.n)
            .define("INNER", self.inner)
            .define("PARTS", self.parts)
            .define("THREADS", THREADS)
            .block(THREADS)
            .args(&[x, y]);
        if self.inner == 1 { self.rows(launch, from) } else { self.columns(launch, from) }
    }

    fn rows(&self, launch: Launch, from: DType) -> Launch {
        // A single row may end inside a pack; with several rows, each must start with one.
        let vec = if self.outer == 1 { packs::pack(&[from], &[]) } else { packs::pack(&[from], &[self.n]) };
        let chunk = self.n.div_ceil(self.parts).next_multiple_of(vec);
        let packs = chunk / vec;
        let lanes = if packs <= 32 * 2 * EACH { packs.next_power_of_two().min(32) } else { THREADS };
        launch.define("VEC", vec).define("CHUNK", chunk).define("LANES", lanes).define("GROUPS", THREADS / lanes).grid(
            (self.outer * self.parts).div_ceil(THREADS / lanes),
            1,
            1,
        )
    }

    fn columns(&self, launch: Launch, from: DType) -> Launch {
        let vec = packs::pack(&[from], &[self.inner]);
        let chunk = self.n.div_ceil(self.parts);
        let width = self.inner / vec;
        let mut tx = width.next_power_of_two().min(WIDE);
        // Narrower (8 packs are still a cache line) if there would be too few blocks.
        while tx > 8 && self.outer * self.parts * width.div_ceil(tx) < BLOCKS / 8 {
            tx /= 2;
        }
        let ty = (chunk.div_ceil(EACH).next_power_of_two()).min(THREADS / tx);
        let (tz, tiles) = (THREADS / tx / ty, width.div_ceil(tx));
        launch
            .define("VEC", vec)
            .define("CHUNK", chunk)
            .define("TX", tx)
            .define("TY", ty)
            .define("TZ", tz)
            .define("TILES", tiles)
            .define("LANES", 32)
            .grid(self.outer.div_ceil(tz) * self.parts * tiles, 1, 1)
    }
}

/// y `[columns]` = the sum over x [rows, columns] f32.
pub fn sum_rows(rows: usize, columns: usize, x: Place, y: (Place, DType)) -> Launch {
    Part { how: Reduction::Sum, outer: 1, n: rows, inner: columns, parts: 1 }.launch((x, DType::F32), y)
}

impl<'g> Var<'g> {
    /// The sum along an axis, which stays with size 1.
    #[track_caller]
    pub fn sum_axis(self, axis: usize) -> Var<'g> {
        self.summed(axis, false)
    }

    /// The same; with `wide` in f32, whatever is summed.
    #[track_caller]
    fn summed(self, axis: usize, wide: bool) -> Var<'g> {
        let n = self.shape()[axis];
        if n == 1 {
            return self;
        }
        let constant = self.recorder().with_graph(|g| match &g.nodes[self.value().node].kind {
            Kind::Op(op) => op.is::<Full>().map(|f| f.value),
            _ => None,
        });
        let op = Reduce { how: Reduction::Sum, axis, wide };
        match constant {
            Some(c) => self.recorder().full(&op.infer(&[self.meta()])[0].shape, c * n as f32),
            None => self.recorder().op1(op, &[self]),
        }
    }

    /// The maximum along an axis, which stays with size 1.
    #[track_caller]
    pub fn max_axis(self, axis: usize) -> Var<'g> {
        self.recorder().op1(Reduce { how: Reduction::Max, axis, wide: false }, &[self])
    }

    /// The sum of all elements: `[1]`.
    pub fn sum(self) -> Var<'g> {
        self.reshape(&[self.meta().elements()]).sum_axis(0)
    }

    /// The mean of all elements, of shape `[1]`.
    pub fn mean(self) -> Var<'g> {
        self.sum() * (1.0 / self.meta().elements() as f32)
    }

    /// The mean along an axis, which stays with size 1.
    #[track_caller]
    pub fn mean_axis(self, axis: usize) -> Var<'g> {
        self.sum_axis(axis) * (1.0 / self.shape()[axis] as f32)
    }

    /// The gradient of a broadcast: sums over the dimensions that were broadcast from this shape.
    #[track_caller]
    pub fn sum_to(self, shape: &[usize]) -> Var<'g> {
        self.sum_to_type(shape, self.dtype())
    }

    /// The same, summed into this type: that of the value, or f32.
    #[track_caller]
    pub(crate) fn sum_to_type(self, shape: &[usize], dtype: DType) -> Var<'g> {
        let wide = dtype == DType::F32;
        let full = self.shape();
        if full == shape {
            return self;
        }
        let pad = full.len() - shape.len();
        let repeated = |d: usize| full[d] != 1 && (d < pad || shape[d - pad] == 1);
        // Adjacent broadcast dimensions are summed as one.
        let mut v = self;
        let mut d = full.len();
        while d > 0 {
            let end = d;
            while d > 0 && repeated(d - 1) {
                d -= 1;
            }
            if d == end {
                d -= 1;
                continue;
            }
            let now = v.shape();
            let merged = [&now[..d], &[now[d..end].iter().product()], &now[end..]].concat();
            let ones = [&now[..d], &vec![1; end - d], &now[end..]].concat();
            v = v.reshape(&merged).summed(d, wide).reshape(&ones);
        }
        v.reshape(shape)
    }
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("rows", &[In(&[7, 1031], Fill::Normal)], |x| vec![x[0].sum_axis(1)]),
    Case::new("columns", &[In(&[1031, 7], Fill::Normal)], |x| vec![x[0].sum_axis(0)]),
    Case::new("middle", &[In(&[3, 5, 4], Fill::Normal)], |x| vec![x[0].mean_axis(1)]),
    Case::new("maximum", &[In(&[3, 5, 4], Fill::Normal), In(&[3, 5, 4], Fill::Spread)], |x| vec![x[1].max_axis(1) * x[0]]),
    Case::new("sum_to", &[In(&[2, 3, 4, 5], Fill::Normal)], |x| vec![x[0].sum_to(&[3, 1, 1]), x[0].sum_to(&[1, 3, 4, 1]), x[0].sum()]),
    Case::new("wide columns", &[In(&[3, 2500], Fill::Normal)], |x| vec![x[0].sum_axis(0)]),
    Case::new("f32 from whatever", &[In(&[70, 9], Fill::Normal)], |x| {
        let sum = |axis: usize| x[0].recorder().op1(Reduce { how: Reduction::Sum, axis, wide: true }, x);
        vec![sum(0), sum(1)]
    }),
    Case::new("bias gradient", &[In(&[65536, 768], Fill::Normal)], |x| vec![x[0].sum_axis(0)]).bench(),
];
