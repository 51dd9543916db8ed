//! One binary for all tests of this crate but those that replace the allocator: linking is what takes long.

mod adam8bit;
mod adapters;
mod decode;
mod fp16;
mod fp8;
mod graphs;
mod hostile;
mod merged;
mod micro_batches;
mod ops;
mod passes;
mod presets;
mod ranks;
mod sparse;
