//! RMS norm and RoPE of queries and keys, fused.

use super::{Pairs, Rope, rotate};
use crate::cpu::math::{dot, sum};
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, Meta};
use crate::op::{self, Cost, Grads, Lean, Narrow, Op, Port, no_gradient};
use crate::ops::norm::{RmsNorm, add_pieces, gpu, rms_row};
use crate::ops::reduce::packs::{Rows, pack};
use crate::record::Var;
use rayon::prelude::*;

/// Rows of one task, and of one partial sum of the weight's gradient.
const ROWS: usize = 64;
/// The largest head dimension: a block sums its rows in shared memory.
pub const LONGEST: usize = 1024;

/// y = rope(rms_norm(x) * weight). Inputs: x [batch, time, heads, d], cosines and sines as in `Rope`, and perhaps a weight, `[d]` or `[1]`. Outputs: y,
/// and rstd `[rows]`.
#[derive(Debug)]
pub struct NormRope {
    /// Added to the mean square.
    pub eps: f32,
    /// Which elements are rotated together.
    pub pairs: Pairs,
}

impl Op for NormRope {
    fn name(&self) -> &'static str {
        "norm_rope"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let d = x[0].dim(0);
        let fits = d <= LONGEST && x.get(3).is_none_or(|w| w.shape == [d] || w.shape == [1]);
        assert!(fits, "norm_rope of {x:?}");
        let y = Rope { pairs: self.pairs, inverse: false }.infer(&x[..3]);
        vec![y[0].clone(), Meta::f32(&[x[0].rows()])]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (heads, d) = (x[0].dim(1), x[0].dim(0));
        let (data, cos, sin) = (x[0].f32(), x[1].f32(), x[2].f32());
        let weight = x.get(3).map(|w| w.f32());
        let [y, rstd] = y else { unreachable!("infer gives two outputs") };
        y.f32().par_chunks_mut(ROWS * d).zip(rstd.f32().par_chunks_mut(ROWS)).enumerate().for_each(|(task, (y, rstd))| {
            simd(
                #[inline(always)]
                || {
                    for (r, (y, rstd)) in y.chunks_mut(d).zip(rstd).enumerate() {
                        let row = task * ROWS + r;
                        let x = &data[row * d..][..d];
                        let s = 1.0 / (sum(x, |v| v * v) / d as f32 + self.eps).sqrt();
                        *rstd = s;
                        match weight {
                            Some(&[w]) => y.iter_mut().zip(x).for_each(|(y, &x)| *y = x * s * w),
                            Some(w) => y.iter_mut().zip(x).zip(w).for_each(|((y, &x), &w)| *y = x * s * w),
                            None => y.iter_mut().zip(x).for_each(|(y, &x)| *y = x * s),
                        }
                        rotate(self.pairs, 1.0, y, row / heads, cos, sin);
                    }
                },
            )
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded_first(1, at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let shape = Shape::new(io, self.pairs, &[io.x[0].dtype], io.x.get(3));
        let args = [At::X(0), At::X(1), At::X(2), weight_at(io, 3), At::Y(0), At::Y(1)].map(Place::from);
        // One pack per thread fits into 64 registers, so that four blocks fit on a multiprocessor.
        let resident = if shape.rows.packs == 1 { 4 } else { 1 };
        let launch = shape.launch(include_str!("norm.cu"), "norm_rope").define_f32("EPS", self.eps).define("RESIDENT", resident);
        launch.grid(shape.blocks, 1, 1).args(&args).code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return no_gradient(x.len()) };
        let inputs = [&x[..3], &[y[1], d], &x[3..]].concat();
        let all = d.recorder().op(NormRopeGrad { pairs: self.pairs, dw: x.len() > 3 }, &inputs);
        let tables = [None, None]; // no gradients
        all[..1].iter().map(|&g| Some(g)).chain(tables).chain(all[1..].iter().map(|&g| Some(g))).collect()
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 7 * x[0].elements() as u64, ..Cost::memory(2 * x[0].bytes() + x[1].bytes() + x[2].bytes()) }
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let per_element = x.get(3).is_some_and(|w| w.shape() != [1]);
        let inputs = if per_element { vec![x[0], x[3]] } else { vec![x[0]] };
        let normed = x[0].recorder().op(RmsNorm { eps: self.eps }, &inputs);
        let scaled = match x.get(3) {
            Some(&w) if !per_element => (normed[0] * w).cast(x[0].dtype()),
            _ => normed[0],
        };
        Some(vec![scaled.rope(self.pairs, (x[1], x[2])), normed[1]])
    }
}

/// Inputs: x, cosines, sines, rstd, dy, and the weight if there is one. Outputs: dx, and perhaps the weight's gradient.
#[derive(Clone, Debug)]
pub struct NormRopeGrad {
    /// As in the forward op.
    pub pairs: Pairs,
    /// Whether the weight's gradient is an output.
    pub dw: bool,
}

impl Op for NormRopeGrad {
    fn name(&self) -> &'static str {
        "norm_rope_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(!self.dw || x.len() > 5, "norm_rope_grad of {x:?}: a weight's gradient without a weight");
        [&x[..1], if self.dw { &x[5..] } else { &[] }].concat()
    }

    /// For each task: a partial sum of the weight's gradient, and a row of dy rotated back.
    fn workspace(&self, x: &[Meta]) -> usize {
        x[0].rows().div_ceil(ROWS) * (x[0].dim(0) + x.get(5).map_or(1, |w| w.elements()))
    }

    fn cpu(&self, x: &[View], out: &mut [ViewMut], workspace: &mut [f32]) {
        let (heads, d) = (x[0].dim(1), x[0].dim(0));
        let (data, cos, sin, rstd, dy) = (x[0].f32(), x[1].f32(), x[2].f32(), x[3].f32(), x[4].f32());
        let weight = x.get(5).map(|w| w.f32());
        let piece = weight.map_or(1, |w| w.len());
        let (sums, rotated) = workspace.split_at_mut(rstd.len().div_ceil(ROWS) * piece);
        let tasks = sums.par_chunks_mut(piece).zip(rotated.par_chunks_mut(d));
        out[0].f32().par_chunks_mut(ROWS * d).zip(tasks).enumerate().for_each(|(task, (dx, (dw, g)))| {
            simd(
                #[inline(always)]
                || {
                    dw.fill(0.0);
                    for (r, dx) in dx.chunks_mut(d).enumerate() {
                        let row = task * ROWS + r;
                        let (x, s) = (&data[row * d..][..d], rstd[row]);
                        g.copy_from_slice(&dy[row * d..][..d]);
                        rotate(self.pairs, -1.0, g, row / heads, cos, sin);
                        match weight {
                            Some(&[w]) => {
                                dw[0] += dot(g, x) * s;
                                g.iter_mut().for_each(|g| *g *= w);
                                rms_row(x, s, g, None, dx, dw);
                            }
                            _ => rms_row(x, s, g, weight, dx, dw),
                        }
                    }
                },
            )
        });
        if self.dw {
            add_pieces(sums, out[1].f32());
        }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn only(&self, read: &[bool]) -> Option<Lean> {
        // The gradient of a frozen weight.
        (self.dw && !read[1]).then(|| Lean::without_last(NormRopeGrad { dw: false, ..self.clone() }, read.len()))
    }

    fn cuda(&self, io: &Io) -> Code {
        let shape = Shape::new(io, self.pairs, &[io.x[0].dtype, io.x[4].dtype], io.x.get(5));
        let args = [At::X(0), At::X(1), At::X(2), At::X(3), At::X(4), weight_at(io, 5), At::Y(0), At::Work].map(Place::from);
        // Blocks per multiprocessor: fewer if sums for each element take registers.
        let resident = if self.dw && io.y[1].elements() > 1 { 2 } else { 3 };
        let source = [gpu::PARTIAL, include_str!("norm_grad.cu")].concat();
        let launch = shape
            .launch(&source, "norm_rope_grad")
            .define_type("G", io.x[4].dtype)
            .define("WARPS", shape.rows.threads() / 32)
            .define("SUM", self.dw as u8)
            .define("RESIDENT", resident)
            .args(&args);
        if !self.dw {
            return launch.grid(shape.blocks, 1, 1).code();
        }
        let blocks = shape.blocks.min(MULTIPROCESSORS * resident);
        let steps = vec![Step::Launch(launch.grid(blocks, 1, 1)), Step::Launch(gpu::finish(io, 1, blocks))];
        Code { steps, workspace: 4 * blocks * io.y[1].elements() }
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 11 * x[0].elements() as u64, ..Cost::memory(3 * x[0].bytes() + x[1].bytes() + x[2].bytes()) }
    }
}

/// Blocks that sum a weight's gradient: the multiprocessors of an H200, and as many on every GPU, so that the order of additions is the same.
const MULTIPROCESSORS: usize = 132;

/// How threads share heads, and the macros that both kernels need.
struct Shape<'a> {
    io: &'a Io,
    rows: Rows,
    items: usize,
    blocks: usize,
    pairs: Pairs,
    weight: Option<&'a Meta>,
}

/// The weight's address, or that of input 0 if there is none, which the kernel does not read.
fn weight_at(io: &Io, input: usize) -> At {
    At::X(if io.x.len() > input { input } else { 0 })
}

impl<'a> Shape<'a> {
    fn new(io: &'a Io, pairs: Pairs, types: &[DType], weight: Option<&'a Meta>) -> Shape<'a> {
        let (d, n, heads) = (io.x[0].dim(0), io.x[0].rows(), io.x[0].dim(1));
        // A thread has both elements of its pairs.
        let vec = pack(types, &[d / 2]);
        let lanes = (d / 2 / vec).next_power_of_two().min(32);
        let rows = Rows { vec, lanes, groups: 256 / lanes, packs: (d / 2 / vec).div_ceil(lanes), keep: true };
        // Two heads per thread keep more loads in flight and share angles and weights, if there are enough rows for all threads.
        let items = if rows.packs == 1 && heads.is_multiple_of(2) && n >= 4 * MULTIPROCESSORS * rows.groups { 2 } else { 1 };
        Shape { io, rows, items, blocks: (n / items).div_ceil(rows.groups), pairs, weight }
    }

    fn launch(&self, source: &str, entry: &'static str) -> Launch {
        let (x, d) = (&self.io.x[0], self.io.x[0].dim(0));
        let kind = self.weight.map_or(0, |w| if w.elements() == d { 2 } else { 1 });
        self.rows
            .launch(&[include_str!("pairs.cuh"), source].concat(), entry, d)
            .define_type("T", x.dtype)
            .define_type("C", self.io.x[1].dtype)
            .define_type("W", self.weight.map_or(x.dtype, |w| w.dtype))
            // 32-bit divisions are much cheaper.
            .define("AT", if x.rows() < 1 << 31 { "u32" } else { "u64" })
            .define("ROWS", x.rows())
            .define("HEADS", x.dim(1))
            .define("TABLE", self.io.x[1].rows())
            .define("ITEMS", self.items)
            .define("WEIGHT", kind)
            .define("ADJACENT", (self.pairs == Pairs::Adjacent) as u8)
    }
}
