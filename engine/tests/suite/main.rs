//! One binary for all tests of this crate but those that replace the allocator: linking is what takes long.

mod adam8bit;
mod adapters;
mod graphs;
mod ops;
mod passes;
