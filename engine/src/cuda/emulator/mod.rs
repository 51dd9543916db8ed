//! Kernels on the CPU: their CUDA text compiled as C++, blocks one after another, threads as fibers that change at barriers. For tests and
//! `kiln check emulate`, so that a wrong kernel is found where there is no GPU. Kernels are those of compute capability 8.0, with mma.sync;
//! what only later ones have (wgmma, barriers in shared memory) is not emulated.

mod compile;
mod program;
mod run;
#[cfg(test)]
mod tests;
mod text;

pub use run::{check, missing};

use super::program::{codes, feed};
