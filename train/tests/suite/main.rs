//! One binary for all tests of this crate but those that replace the allocator: linking is what takes long.

mod absurd;
mod cli;
mod common;
mod config;
mod data;
mod encoder;
mod faults;
mod figures;
mod golden;
mod hrm;
mod images;
mod lifecycle;
mod lior;
mod memory;
mod models;
mod names;
mod numbers;
mod own_recipe;
mod planning;
mod policy;
mod polychromic;
mod puzzles;
mod replies;
mod speed;
mod steps;
mod vision;
