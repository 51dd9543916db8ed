//! Grouped GEMM on a GPU: which kernel runs, its tiles and its launch.

use crate::kernel::{Arch, Launch};
use crate::meta::DType;
use crate::ops::attention::wgmma::{self, Left};

/// The kernels for grouped GEMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kernel {
    /// Any types and sizes, accumulating in f32.
    #[default]
    Plain,
    /// bf16 or f16 on tensor cores, with `mma` instructions.
    Mma,
    /// The same with asynchronous `wgmma` instructions of four warps, which read shared memory directly.
    Wgmma,
}

/// The fastest kernel for rows of this type and these lengths, or why it must be the plain one.
pub fn kernel_for(dtype: DType, lengths: &[usize], arch: Arch) -> Result<Kernel, String> {
    if !matches!(dtype, DType::BF16 | DType::F16) {
        return Err(format!("{dtype}: the tensor-core kernels take bf16 and f16"));
    }
    if arch.sm < 80 {
        return Err("no bf16 tensor cores before compute capability 8.0".into());
    }
    match lengths.iter().find(|n| !n.is_multiple_of(8)) {
        Some(n) => Err(format!("a row of {n} elements is not a multiple of 16 bytes")),
        None => Ok(if arch.sm == 90 { Kernel::Wgmma } else { Kernel::Mma }),
    }
}

/// A block's tile of a GEMM on tensor cores.
pub(super) struct Tile {
    wgmma: bool,
    dtype: DType,
    /// Columns of the tile, which has 128 rows.
    columns: usize,
    stages: usize,
    /// For both operands, whether K is their row dimension in memory.
    transposed: [bool; 2],
}

pub(super) const TILE_ROWS: usize = 128;

impl Tile {
    /// None if the plain kernel was chosen, or if an input is not aligned to 16 bytes. An older GPU has an older kernel than the chosen one.
    pub(super) fn new(kernel: Kernel, arch: Arch, dtype: DType, offsets: &[usize], columns: usize, transposed: [bool; 2]) -> Option<Tile> {
        if kernel == Kernel::Plain || arch.sm < 80 || offsets.iter().any(|o| !o.is_multiple_of(8)) {
            return None;
        }
        let tile = Tile { wgmma: kernel == Kernel::Wgmma && arch.sm == 90, dtype, columns, stages: 0, transposed };
        Some(Tile { stages: ((arch.shared_limit() - tile.slack()) / tile.stage()).min(4), ..tile })
    }

    fn stage(&self) -> usize {
        (TILE_ROWS + self.columns) * 128
    }

    /// wgmma needs stages that are aligned to 1024 bytes.
    fn slack(&self) -> usize {
        if self.wgmma { 1024 } else { 0 }
    }

    pub(super) fn launch(&self, source: &str, entry: &'static str) -> Launch {
        let [a, b] = self.transposed;
        let instructions = match self.wgmma {
            true => {
                [wgmma::TEXT, &wgmma::product("wgmma", self.columns, self.dtype, if a { Left::Transposed } else { Left::Rows }, b)].concat()
            }
            false => include_str!("../attention/mma.cuh").into(),
        };
        let source = [&instructions, include_str!("tile.cuh"), source].concat();
        Launch::new(&source, entry)
            .define_type("T", self.dtype)
            .define("TN", self.columns)
            .define("STAGES", self.stages)
            .define("WGMMA", self.wgmma as u8)
            .define("A_TRANSPOSED", self.transposed[0] as u8)
            .define("B_TRANSPOSED", self.transposed[1] as u8)
            .block(if self.wgmma { 384 } else { 256 })
            .shared(self.stages * self.stage() + self.slack())
    }
}
