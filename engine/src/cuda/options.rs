//! How a program runs on a GPU.

use crate::kernel::Arch;
use crate::passes::Mode;

/// How a program runs (see the module `executor`).
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Replay a captured CUDA graph instead of launching kernels one by one. Auto: launched one by one where it cannot be captured.
    pub capture: Mode,
    /// Kernels of the GPU's own generation, not those for any GPU. Auto: an older kernel for one that does not compile.
    pub native: Mode,
    /// f32 GEMMs in TF32.
    pub tf32: bool,
    /// Autotune the algorithm of every new GEMM.
    pub tune: bool,
    /// Programmatic dependent launch: launch a kernel while the one before it is still running.
    pub overlap: bool,
    /// Keep optimizer states in pinned host memory.
    pub offload: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { capture: Mode::Off, native: Mode::Off, tf32: false, tune: false, overlap: false, offload: false }
    }
}

impl Options {
    /// The GPU whose kernels run on this one.
    pub fn arch(&self, gpu: Arch) -> Arch {
        if self.native == Mode::Off { gpu.older().last().unwrap_or(gpu) } else { gpu }
    }
}
