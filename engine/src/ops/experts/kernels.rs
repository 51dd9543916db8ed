//! How grouped products run on a GPU: which kernel, and how it is cut and launched.

use crate::kernel::{Arch, Launch};
use crate::meta::DType;
use crate::ops::attention::wgmma::{self, Left};

/// The kernels that make grouped products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kernel {
    /// Any types and sizes; sums in f32.
    #[default]
    Plain,
    /// bf16 or f16 on tensor cores, by instructions that a warp waits for.
    Mma,
    /// The same, by instructions of four warps that read shared memory themselves while these go on.
    Wgmma,
}

/// The fastest kernel for rows of this type and these lengths, or why it is the plain one.
pub fn kernel_for(dtype: DType, lengths: &[usize], arch: Arch) -> Result<Kernel, String> {
    if !matches!(dtype, DType::BF16 | DType::F16) {
        return Err(format!("{dtype}: tensor cores multiply bf16 and f16"));
    }
    if arch.sm < 80 {
        return Err("no bf16 tensor cores before compute capability 8.0".into());
    }
    match lengths.iter().find(|n| !n.is_multiple_of(8)) {
        Some(n) => Err(format!("a row of {n} elements is no multiple of 16 bytes")),
        None => Ok(if arch.sm == 90 { Kernel::Wgmma } else { Kernel::Mma }),
    }
}

/// A block's part of a product, on tensor cores.
pub(super) struct Tile {
    wgmma: bool,
    dtype: DType,
    /// It has 128 rows.
    columns: usize,
    stages: usize,
    /// Whether the left and the right side lie in memory with what is summed over as their rows.
    transposed: [bool; 2],
}

pub(super) const TILE_ROWS: usize = 128;

impl Tile {
    /// None where the plain kernel was chosen, or an input begins where it cannot be read 16 bytes at a time.
    pub(super) fn new(kernel: Kernel, arch: Arch, dtype: DType, offsets: &[usize], columns: usize, transposed: [bool; 2]) -> Option<Tile> {
        if kernel == Kernel::Plain || offsets.iter().any(|o| !o.is_multiple_of(8)) {
            return None;
        }
        let tile = Tile { wgmma: kernel == Kernel::Wgmma, dtype, columns, stages: 0, transposed };
        Some(Tile { stages: ((arch.shared_limit() - tile.slack()) / tile.stage()).min(4), ..tile })
    }

    fn stage(&self) -> usize {
        (TILE_ROWS + self.columns) * 128
    }

    /// wgmma wants the stages to begin on a multiple of 1024 bytes.
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
