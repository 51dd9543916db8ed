//! How kernels process rows: in packs of up to 16 bytes, by a few threads, a warp or a block.

use crate::kernel::Launch;
use crate::meta::DType;

/// CUDA source: packed loads and stores.
pub const PACKS: &str = include_str!("packs.cuh");
/// CUDA source: reductions among the lanes that share a row.
pub const LANES: &str = include_str!("lanes.cuh");
/// CUDA source: a thread's elements of a row.
pub const ROW: &str = include_str!("row.cuh");

/// The most elements (a power of two) that fit into 16 bytes in each of `types` and divide all `lengths`.
pub fn pack(types: &[DType], lengths: &[usize]) -> usize {
    let size = types.iter().map(|t| t.size()).max().unwrap_or(1);
    let mut vec = 16 / size;
    while lengths.iter().any(|n| !n.is_multiple_of(vec)) {
        vec /= 2;
    }
    vec
}

/// How the threads of a block share rows of `d` elements.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Elements that a thread loads at once.
    pub vec: usize,
    /// Threads of one row: a power of two up to 32, or the block.
    pub lanes: usize,
    /// Rows of one block.
    pub groups: usize,
    /// Packs of one thread.
    pub packs: usize,
    /// Whether a row stays in registers between being read and being written.
    pub keep: bool,
}

impl Rows {
    /// For rows of `d` elements, loaded from tensors of these types.
    pub fn new(d: usize, types: &[DType]) -> Rows {
        let vec = pack(types, &[d]);
        let all = d / vec;
        // A warp processes rows of up to 32 elements per thread; longer rows get a block of up to 512 threads.
        let lanes = match all * vec <= 32 * 32 {
            true => all.next_power_of_two().min(32),
            false => (d.div_ceil(16)).next_multiple_of(32).clamp(64, 512),
        };
        let packs = all.div_ceil(lanes);
        Rows { vec, lanes, groups: if lanes > 32 { 1 } else { 256 / lanes }, packs, keep: packs * vec <= 32 }
    }

    /// Threads of a block.
    pub fn threads(&self) -> usize {
        self.lanes * self.groups
    }

    /// A kernel with all three sources put before it, and its block size set; the grid is not set.
    pub fn launch(&self, source: &str, entry: &'static str, d: usize) -> Launch {
        Launch::new(&[PACKS, LANES, ROW, source].concat(), entry)
            .define("D", d)
            .define("VEC", self.vec)
            .define("LANES", self.lanes)
            .define("GROUPS", self.groups)
            .define("PACKS", self.packs)
            .define("KEEP", self.keep as u8)
            .define("UNROLL", if self.keep { self.packs } else { 4 })
            .block(self.threads())
    }
}
