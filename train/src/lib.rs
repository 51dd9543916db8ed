//! kiln's recipes, data and training loop. The engine records and runs; this decides what.

mod apart;
pub mod checkpoint;
mod cli;
pub mod config;
pub mod data;
pub mod epochs;
pub mod files;
mod finite;
pub mod golden;
pub mod gpu;
mod guarded;
pub mod input;
pub mod inside;
pub mod launch;
pub mod memory;
pub mod metrics;
pub mod models;
pub mod nn;
mod nvml;
pub mod optim;
pub mod page;
pub mod profile;
pub mod recipe;
pub mod recipes;
pub mod report;
pub mod run;
pub mod sample;
pub mod source_target;
pub mod text;
pub mod timing;
pub mod variety;
pub mod watch;

pub use cli::{Recipes, main};

/// What this program is called, for commands that it names.
pub(crate) fn program() -> String {
    let path = std::env::args_os().next().map(std::path::PathBuf::from);
    path.as_deref().and_then(|p| p.file_name()).map_or("kiln".into(), |name| name.to_string_lossy().into_owned())
}
