//! Emulates kernels on the CPU: CUDA source compiled as C++, blocks one after another, threads as fibers that switch at barriers. For tests and
//! `kiln check emulate`, so that a wrong kernel is found without a GPU. It covers compute capability 8.0, with mma.sync; features of later ones
//! (wgmma, mbarriers) are not emulated.

mod compile;
mod program;
mod run;
#[cfg(test)]
pub(crate) mod tests;
mod text;

pub use run::{check, missing};

use super::program::{codes, feed};
