//! The convolution and its two gradients on a GPU: on tensor cores (`tensor.rs`) where types and sizes allow; otherwise small groups have kernels of
//! their own. For the rest, im2col: the inputs of all taps are laid out as columns ([rows, groups, width, channels of a group], `unfold.cu`), and one
//! GEMM does all taps at once.

use super::tensor;
use crate::kernel::{At, Code, Gemm, Io, Launch, Matrix, Place, Step};
use crate::meta::DType;

/// Bytes of shared memory that every GPU has without opting in for more.
const SHARED: usize = 48 << 10;
/// Bytes of columns at once, unless one sequence needs more: about the size of an H200's L2 cache.
const COLUMNS: usize = 48 << 20;
/// The most taps of the kernels without columns.
pub(super) const TAPS: usize = 8;

/// One convolution: y[t, p] = sum over taps k and channels q of w[k, q, p] x[t + k - before, q], p and q inside a group.
pub(super) struct Sizes {
    pub batch: usize,
    pub time: usize,
    pub groups: usize,
    pub width: usize,
    /// Channels of a group: those that are summed over, and those of the output.
    pub qg: usize,
    pub pg: usize,
    /// Whether this is the gradient with respect to the input: outputs and inputs swapped, taps reversed.
    pub backward: bool,
}

impl Sizes {
    pub fn before(&self) -> usize {
        if self.backward { 0 } else { self.width - 1 }
    }
}

/// CausalConv, and CausalConvGradInput where `backward`.
pub(super) fn conv(io: &Io, groups: usize, backward: bool) -> Code {
    let x = &io.x[0].shape;
    let (qg, pg) = (x[2] / groups, io.y[0].dim(0) / groups);
    let s = Sizes { batch: x[0], time: x[1], groups, width: io.x[1].dim(0), qg, pg, backward };
    tensor::conv(&s, io).or_else(|| direct(&s, io)).map(Launch::code).unwrap_or_else(|| product(&s, io))
}

/// A block works on a tile of time steps of one group, whose weights are in shared memory. None if they do not fit.
fn direct(s: &Sizes, io: &Io) -> Option<Launch> {
    let pad = s.pg.next_multiple_of(4);
    let across = pad / 4; // threads next to each other, 4 outputs each
    if s.groups == 1 || s.width > TAPS || across > 128 {
        return None;
    }
    let slots = (128 / across).min(s.time.div_ceil(4)); // 4 time steps each
    let tile = 4 * slots;
    // A channel is a row of `span` time steps; a span of 2 modulo 4 avoids bank conflicts.
    let span = (tile + s.width) / 4 * 4 + 2;
    let shared = 4 * (s.width * s.qg * pad + s.qg * span);
    let tiles = s.time.div_ceil(tile);
    let block = (slots * across).next_multiple_of(32);
    let launch = Launch::new(include_str!("direct.cu"), "conv_direct")
        .define_type("T", io.y[0].dtype)
        .define_type("W", io.x[1].dtype)
        .define("TIME", s.time)
        .define("GROUPS", s.groups)
        .define("WIDTH", s.width)
        .define("QG", s.qg)
        .define("PG", s.pg)
        .define("PAD", pad)
        .define("TILE", tile)
        .define("TILES", tiles)
        .define("SPAN", span)
        .define("BEFORE", s.before())
        .define("BACKWARD", s.backward as u8)
        .define("BLOCK", block)
        .block(block)
        .shared(shared)
        .all(io);
    (shared <= SHARED).then(|| launch.grid(s.batch * tiles * s.groups, 1, 1))
}

fn product(s: &Sizes, io: &Io) -> Code {
    let dtype = io.y[0].dtype;
    let k = s.width * s.qg;
    let weights = s.groups * s.pg * k;
    let repack = Launch::new(include_str!("repack.cu"), "conv_repack")
        .define_type("W", io.x[1].dtype)
        .define_type("T", dtype)
        .define("GROUPS", s.groups)
        .define("WIDTH", s.width)
        .define("QG", s.qg)
        .define("PG", s.pg)
        .define("BACKWARD", s.backward as u8)
        .grid(weights.div_ceil(256), 1, 1)
        .args(&[At::X(1).into(), At::Work.into()]);
    let mut code = Code { steps: vec![Step::Launch(repack)], workspace: 0 };
    let start = (weights * dtype.size()).next_multiple_of(256);
    let b = Matrix { batch: s.pg * k, ..Matrix::rows(At::Work, dtype, k).t() };
    each_columns(s, io, dtype, start, &mut code, |a, first_row, rows| {
        let c = Matrix { batch: s.pg, ..Matrix::rows(At::Y(0), dtype, s.groups * s.pg) }.at(first_row * s.groups * s.pg);
        Gemm { batch: s.groups, ..Gemm::new(rows, s.pg, k, a, b, c) }
    });
    code
}

/// Lays out input 0 as columns of `dtype` in the workspace from byte `start`, as many sequences at a time as fit, and adds the GEMM that `f` makes of
/// each: from the matrix of columns, its first row and its number of rows.
fn each_columns(s: &Sizes, io: &Io, dtype: DType, start: usize, code: &mut Code, product: impl Fn(Matrix, usize, usize) -> Gemm) {
    let from = io.x[0].dtype;
    let row = s.groups * s.width * s.qg;
    let columns = |place: Place| Matrix { batch: s.width * s.qg, ..Matrix::rows(place, dtype, row) };
    if s.width == 1 && from == dtype {
        code.workspace = start;
        code.steps.push(Step::Gemm(product(columns(At::X(0).into()), 0, s.batch * s.time)));
        return;
    }
    let sequence = s.time * row * dtype.size();
    let together = (COLUMNS / sequence).clamp(1, s.batch);
    code.workspace = start + together * sequence;
    let wide = 16 / from.size().max(dtype.size());
    let wide = if s.qg.is_multiple_of(wide) { wide } else { 1 };
    for first in (0..s.batch).step_by(together) {
        let rows = together.min(s.batch - first) * s.time;
        let packs = rows * row / wide;
        let unfold = Launch::new(include_str!("unfold.cu"), "conv_unfold")
            .define_type("T", from)
            .define_type("U", dtype)
            .define("WIDE", wide)
            .define("PACKS", packs)
            .define("TIME", s.time)
            .define("GROUPS", s.groups)
            .define("WIDTH", s.width)
            .define("QG", s.qg)
            .define("BEFORE", s.before())
            .grid(packs.div_ceil(256), 1, 1)
            .args(&[At::X(0).plus(first * s.time * s.groups * s.qg * from.size()), At::Work.plus(start)]);
        code.steps.push(Step::Launch(unfold));
        code.steps.push(Step::Gemm(product(columns(At::Work.plus(start)), first * s.time, rows)));
    }
}

/// CausalConvGradWeight: inputs x and dy.
pub(super) fn weight_gradient(io: &Io, groups: usize, width: usize) -> Code {
    let x = &io.x[0].shape;
    let (cg, og) = (x[2] / groups, io.x[1].dim(0) / groups);
    let s = Sizes { batch: x[0], time: x[1], groups, width, qg: cg, pg: og, backward: false };
    tensor::weight(&s, io).or_else(|| direct_weight(&s, io)).unwrap_or_else(|| product_weight(&s, io))
}

/// Blocks sum over slices of the time steps; a second launch adds the slices in order. None if a group is too large.
fn direct_weight(s: &Sizes, io: &Io) -> Option<Code> {
    let pad = s.pg.next_multiple_of(4);
    let units = pad / 4 * s.qg; // threads that share one time step
    if s.groups == 1 || s.width > TAPS || units > 1024 {
        return None;
    }
    let fit = |tile: usize| {
        let tile = tile.min(s.time.next_multiple_of(8));
        let split = (256 / units).clamp(1, tile / 8);
        let shared = 4 * (tile * pad + (tile + s.width - 1) * s.qg).max(split * 4 * s.width * units);
        (shared <= SHARED).then_some((tile, split, shared))
    };
    let (tile, split, shared) = [128, 64, 32].into_iter().find_map(fit)?;
    let tiles = s.time.div_ceil(tile);
    let slices = (4 * io.arch.multiprocessors as usize).div_ceil(s.groups).clamp(1, s.batch * tiles);
    let block = (units * split).next_multiple_of(32);
    let n = io.y[0].elements();
    let parts = Launch::new(include_str!("direct_weight.cu"), "conv_direct_weight")
        .define_type("T", io.x[0].dtype)
        .define_type("D", io.x[1].dtype)
        .define("BATCH", s.batch)
        .define("TIME", s.time)
        .define("GROUPS", s.groups)
        .define("WIDTH", s.width)
        .define("CG", s.qg)
        .define("OG", s.pg)
        .define("OPAD", pad)
        .define("TILE", tile)
        .define("TILES", tiles)
        .define("SPLIT", split)
        .define("SLICES", slices)
        .define("BLOCK", block)
        .grid(slices * s.groups, 1, 1)
        .block(block)
        .shared(shared)
        .args(&[At::X(0).into(), At::X(1).into(), At::Work.into()]);
    let sum = sum_slices(io, slices);
    Some(Code { steps: vec![Step::Launch(parts), Step::Launch(sum)], workspace: slices * n * 4 })
}

/// The output, from `slices` f32 sums of its size in the workspace.
pub(super) fn sum_slices(io: &Io, slices: usize) -> Launch {
    let n = io.y[0].elements();
    let wide = if n.is_multiple_of(4) && n > 1 << 16 { 4 } else { 1 }; // fewer blocks, where there are enough
    Launch::new(include_str!("sum_slices.cu"), "conv_sum_slices")
        .define_type("T", io.y[0].dtype)
        .define("N", n)
        .define("WIDE", wide)
        .define("SLICES", slices)
        .grid((n / wide).div_ceil(32), 1, 1)
        .args(&[At::Work.into(), At::Y(0).into()])
}

fn product_weight(s: &Sizes, io: &Io) -> Code {
    let dtype = io.x[1].dtype;
    let (n, outputs, k) = (io.y[0].elements(), s.groups * s.pg, s.width * s.qg);
    let mut code = Code::default();
    // by tap [outputs, width, channels of a group]
    let c = Matrix { batch: s.pg * k, ..Matrix::rows(At::Work, DType::F32, k) };
    each_columns(s, io, dtype, (n * 4).next_multiple_of(256), &mut code, |b, first_row, rows| {
        let dy = Matrix { batch: s.pg, ..Matrix::rows(At::X(1), dtype, outputs).t() }.at(first_row * outputs);
        let beta = if first_row == 0 { 0.0 } else { 1.0 };
        Gemm { batch: s.groups, beta, ..Gemm::new(s.pg, k, rows, dy, b, c) }
    });
    let by_tap = Launch::new(include_str!("by_tap.cu"), "conv_by_tap")
        .define_type("T", io.y[0].dtype)
        .define("OUTPUTS", outputs)
        .define("CG", s.qg)
        .define("WIDTH", s.width)
        .grid(n.div_ceil(256), 1, 1)
        .args(&[At::Work.into(), At::Y(0).into()]);
    code.steps.push(Step::Launch(by_tap));
    code
}
