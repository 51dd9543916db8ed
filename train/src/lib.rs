//! kiln's recipes, data and training loop. The engine records and runs; this decides what.

pub mod checkpoint;
pub mod config;
pub mod data;
pub mod epochs;
pub mod files;
pub mod golden;
pub mod gpu;
pub mod input;
pub mod memory;
pub mod metrics;
pub mod models;
pub mod nn;
pub mod optim;
pub mod recipe;
pub mod recipes;
pub mod report;
pub mod run;
pub mod sample;
pub mod speed;
pub mod text;
pub mod variety;
