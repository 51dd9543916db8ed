//! The convolution and its gradients on tensor cores, without im2col: bf16 or f16, groups of a multiple of 16.

use super::gpu::{Sizes, TAPS, sum_slices};
use crate::kernel::{Arch, At, Code, Io, Launch, Step};
use crate::meta::DType;

/// Blocks of the weight's gradient: the multiprocessors of an H200, and as many on every GPU, so that sums have the same bits.
const BLOCKS: usize = 132;

/// Whether both inputs can be read 16 bytes at a time into tiles of 16 by 16. A width of 1 in one group is a plain GEMM instead.
fn applies(s: &Sizes, io: &Io) -> bool {
    let dtype = io.x[0].dtype;
    let types = matches!(dtype, DType::BF16 | DType::F16) && io.x[1].dtype == dtype && io.arch.sm >= 80;
    let sizes = s.qg.is_multiple_of(16) && s.pg.is_multiple_of(16) && s.width <= TAPS && s.groups * s.width > 1;
    types && sizes && io.offsets.iter().all(|o| o.is_multiple_of(8))
}

/// The largest of `of` that divides n.
fn divisor(n: usize, of: impl IntoIterator<Item = usize>) -> usize {
    of.into_iter().filter(|d| n.is_multiple_of(*d)).max().unwrap_or(1)
}

/// The tile of a block of `conv`.
struct Tile {
    /// Groups, and outputs of each.
    groups: usize,
    outputs: usize,
    time: usize,
}

impl Tile {
    /// Bytes of shared memory with `buffers` tiles of rows.
    fn shared(&self, s: &Sizes, buffers: usize) -> usize {
        let (rows, columns) = if s.backward { (self.groups * s.qg, self.outputs) } else { (self.groups * self.outputs, s.qg) };
        2 * (s.width * rows * (columns + 8) + buffers * (self.time + s.width - 1) * (self.groups * s.qg + 8))
    }

    fn area(&self) -> usize {
        self.time * self.groups * self.outputs
    }

    /// Slices of the outputs, and tiles of time.
    fn pieces(&self, s: &Sizes) -> (usize, usize) {
        (s.groups * s.pg / (self.groups * self.outputs), s.batch * s.time.div_ceil(self.time))
    }

    /// The tiles that fit, the largest first; none if shared memory holds so little of a group that im2col with cuBLASLt is faster.
    fn all(s: &Sizes, limit: usize) -> Vec<Tile> {
        let together = (192 / s.qg.max(s.pg)).max(1);
        let whole = (1..=together).rev().filter(|n| s.groups.is_multiple_of(*n)).map(|groups| (groups, s.pg));
        let part = (2..=4).filter(|n| s.pg.is_multiple_of(16 * n)).map(|n| (1, s.pg / n));
        let tiles = whole.chain(part).flat_map(|(groups, outputs)| [128, 64, 32].map(|time| Tile { groups, outputs, time }));
        let fits = |t: &Tile| (t.time == 32 || t.time < s.time + 32) && t.area() <= 64 * 192 && t.shared(s, 2) <= limit;
        let mut tiles: Vec<Tile> = tiles.filter(fits).collect();
        tiles.sort_by_key(|t| std::cmp::Reverse(t.area()));
        let small = tiles.first().is_none_or(|t| t.outputs < s.pg && t.area() < 64 * 64);
        if small { vec![] } else { tiles }
    }
}

/// One launch. None if the kernel does not apply.
pub(super) fn conv(s: &Sizes, io: &Io) -> Option<Launch> {
    if !applies(s, io) {
        return None;
    }
    let processors = io.arch.multiprocessors as usize;
    // The largest tile of which there are enough to keep the GPU busy.
    let tiles = Tile::all(s, io.arch.shared_limit());
    let pieces = |t: &Tile| t.pieces(s).0 * t.pieces(s).1;
    let busy = tiles.iter().find(|t| 4 * pieces(t) >= 3 * processors);
    let tile = busy.or_else(|| tiles.iter().max_by_key(|t| pieces(t)))?;

    let (slices, count) = tile.pieces(s);
    let resident = (io.arch.shared_limit() / (tile.shared(s, 2) + 1024)).clamp(1, pieces(tile).div_ceil(processors));
    // Outputs per warp: more of them mean fewer reads, but each quarter of a multiprocessor should have one warp, better two.
    let units = |across: usize| tile.area() / (32 * across);
    let fits = [16, 32, 48, 64].into_iter().filter(|n| tile.outputs.is_multiple_of(*n));
    let across = fits.max_by_key(|&n| (units(n) * resident).min(if n < 32 { 4 } else { 8 }))?;
    // Warps without a unit help to load: 8 weights of all taps at a time.
    let warps = units(across).max(tile.groups * tile.outputs * s.qg / 8 / 256).clamp(4, 8);
    // Registers are enough for 16 warps with many sums, or 32 with few.
    let together = resident.min(if across > 32 { 16 } else { 32 } / warps);
    let rounds = count.div_ceil((together * processors / slices).max(1));
    let step = count.div_ceil(rounds);
    let buffers = rounds.min(2);
    let launch = Launch::new(&source(include_str!("tensor.cu")), "conv_tensor")
        .define_type("T", io.x[0].dtype)
        .define("BATCH", s.batch)
        .define("TIME", s.time)
        .define("GROUPS", s.groups)
        .define("WIDTH", s.width)
        .define("QG", s.qg)
        .define("PG", s.pg)
        .define("BEFORE", s.before())
        .define("BACKWARD", s.backward as u8)
        .define("GB", tile.groups)
        .define("PS", tile.outputs)
        .define("NW", across)
        .define("TILE", tile.time)
        .define("TILES", s.time.div_ceil(tile.time))
        .define("SLICES", slices)
        .define("STEP", step)
        .define("BUFFERS", buffers)
        .define("BLOCK", 32 * warps)
        .grid(slices * step, 1, 1)
        .block(32 * warps)
        .shared(tile.shared(s, buffers))
        .all(io);
    Some(launch)
}

/// Two launches: sums over parts of the time steps, and the sum of the parts.
pub(super) fn weight(s: &Sizes, io: &Io) -> Option<Code> {
    if !applies(s, io) {
        return None;
    }
    let (cg, og) = (s.qg, s.pg);
    // A warp's sums, 8 a thread for each 16 x 16 of a tap, stay within 96 registers.
    let high = divisor(og / 16, 1..=(12 / s.width).clamp(1, 3));
    let across = divisor(cg / 16, 1..=4);
    let down = divisor(og / 16 / high, 1..=8 / across);
    let (outputs, channels) = (16 * high * down, 16 * across);
    let whole = outputs == og && channels == cg;
    let groups = if whole { divisor(s.groups, 1..=12 / (across * down)) } else { 1 };
    let units = groups * across * down;
    let stage = |time: usize| 2 * (time * (groups * outputs + 8) + (time + s.width - 1) * (groups * channels + 8));
    let time = [64, 32].into_iter().find(|&time| 2 * stage(time) <= Arch::LEAST_SHARED)?;
    let stages = (io.arch.shared_limit() / stage(time)).min(256 / time);
    let split = (8 / units).clamp(1, time / 16); // 1, 2 or 4

    let tiles = s.time.div_ceil(time);
    let places = s.groups / groups * (og / outputs) * (cg / channels);
    if s.groups == 1 && places > BLOCKS / 4 {
        return None; // so large that cuBLAS is faster
    }
    let slices = (BLOCKS / places).min(s.batch * tiles / 4).max(1);
    let block = 32 * units * split;
    let sums = 4 * 32 * units * (split - 1) * 8 * s.width * high;
    let parts = Launch::new(&source(include_str!("tensor_weight.cu")), "conv_tensor_weight")
        .define_type("T", io.x[0].dtype)
        .define("BATCH", s.batch)
        .define("TIME", s.time)
        .define("GROUPS", s.groups)
        .define("WIDTH", s.width)
        .define("CG", cg)
        .define("OG", og)
        .define("GB", groups)
        .define("OT", outputs)
        .define("CT", channels)
        .define("MO", high)
        .define("TILE", time)
        .define("TILES", tiles)
        .define("PLACES", places)
        .define("SLICES", slices)
        .define("SPLIT", split)
        .define("STAGES", stages)
        .define("BLOCK", block)
        .grid(places * slices, 1, 1)
        .block(block)
        .shared((stages * stage(time)).max(sums))
        .args(&[At::X(0).into(), At::X(1).into(), At::Work.into()]);
    let sum = sum_slices(io, slices);
    Some(Code { steps: vec![Step::Launch(parts), Step::Launch(sum)], workspace: slices * io.y[0].elements() * 4 })
}

fn source(kernel: &str) -> String {
    [include_str!("../attention/mma.cuh"), kernel].concat()
}
