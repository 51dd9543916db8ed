//! Everything that can go wrong between a config and a trained model.

use crate::checkpoint::CheckpointError;
use crate::config::ConfigError;
use crate::data::DataError;
use crate::report::human_bytes;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Engine(#[from] engine::Error),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Model(#[from] crate::models::ModelError),
    #[error(transparent)]
    Metrics(#[from] crate::metrics::MetricsError),
    #[error(transparent)]
    Report(#[from] crate::report::ReportError),
    #[error("{action} {path}: {cause}")]
    Io { action: &'static str, path: PathBuf, cause: std::io::Error },
    #[error("the targets of step {0} are all masked: nothing counts in it (data.ignore_tokens?)")]
    AllMasked(u64),
    #[error("stopped")]
    Stopped,
    #[error("{0}; put that right, or go on from a checkpoint that you name with --resume-from PATH, or begin again with --start-over")]
    NoWayOn(String),
    #[error("the run's folder {} is gone: it was removed or moved while the run trained, which stops at step {step}", .path.display())]
    Gone { path: PathBuf, step: u64 },
    #[error(
        "{0} steps in a row had a loss or gradient that is not finite, the last at step {1}: lower train.learning_rate, or look at the data"
    )]
    NotFinite(u64, u64),
    #[error(
        "needs {needs} of memory (state {state}, activations and workspace {arena}), and {free} are free: {fit}; or lower train.batch (and raise train.accumulate), model.seq or the model's sizes"
    )]
    Memory { needs: String, state: String, arena: String, free: String, fit: String },
    #[error(
        "the run does not fit into a memory budget of {}: the smallest plan takes {}, which is {} more, {settings}. What would help: {help}",
        human_bytes(*budget), human_bytes(*smallest), human_bytes(smallest.saturating_sub(*budget))
    )]
    Budget { budget: u64, smallest: u64, settings: String, help: String },
    #[error(
        "the plan takes {needs}, more than memory_budget = {budget:?} ({plan}): give --memory-budget again, so that settings are chosen that fit"
    )]
    OverBudget { needs: String, budget: String, plan: String },
    #[error("{0}")]
    Other(String),
}
