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
        "{} had a loss or gradient that is not finite, the last at step {last}; the first bad value: {first}; such steps change nothing, so the \
         weights are those of step {}: lower train.learning_rate, or look at the data", in_a_row(*skipped), last.saturating_sub(*skipped)
    )]
    NotFinite { skipped: u64, last: u64, first: Bad },
    #[error("the validation is not finite: {0}; the run is saved and its training goes on with more --steps, but it is no success")]
    BadValidation(Bad),
    #[error(
        "weight '{name}' holds {value} after step {step}, and a model whose weights are not finite computes nothing but NaN, so nothing is saved: \
         go on from the last checkpoint with a lower train.learning_rate"
    )]
    BadWeight { name: String, value: f64, step: u64 },
    #[error(
        "needs {needs} of memory ({parts}), and {} are free: {}",
        human_bytes(*free), what_fits(passes, settings)
    )]
    Memory { needs: String, parts: String, free: u64, passes: Vec<String>, settings: Vec<String> },
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

/// A metric that is not finite, and where it was seen first.
#[derive(Clone, Debug, PartialEq)]
pub struct Bad {
    pub step: u64,
    pub name: String,
    pub value: f64,
}

impl std::fmt::Display for Bad {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} is {} at step {}", self.name, self.value, self.step)
    }
}

fn in_a_row(steps: u64) -> String {
    if steps == 1 { "the last step".into() } else { format!("{steps} steps in a row") }
}

/// What someone can do whose run has no memory: passes with which it fits, else settings with which it does.
fn what_fits(passes: &[String], settings: &[String]) -> String {
    let lower = "lower train.batch (and raise train.accumulate), model.seq or the model's sizes";
    match (passes, settings) {
        ([], []) => format!("no pass makes it fit; {lower}"),
        ([], settings) => format!("no pass makes it fit. What fits: {}", settings.join(", or ")),
        (passes, _) => format!("it fits with {}; or {lower}", passes.join(", or ")),
    }
}
