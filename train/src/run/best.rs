//! The best checkpoint of a run by a validation metric, and how many evaluations ago it was.
//!
//! Every checkpoint notes what was best when it was saved (`meta.best`), so that a resumed run goes on from there, whichever checkpoint it goes on from. The
//! link `best` in the run's folder is for people: commands read the note.

use super::folder::io;
use crate::checkpoint::{self, Checkpoint};
use crate::config::{ConfigError, TrainConfig};
use crate::recipe::{Better, Evaluation, Metric, Task, TrainError};
use crate::{files, say};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// What the evaluations of a run have found so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Best {
    /// By the evaluation of this step, the metric had this value.
    pub at: Option<(u64, String, f64)>,
    /// Evaluations since then.
    pub since: u64,
}

impl Best {
    /// As a checkpoint notes it. What cannot be compared with what follows is forgotten, with a word.
    pub fn of_checkpoint(found: &Checkpoint, c: &TrainConfig) -> Best {
        let note = &found.meta["best"];
        let (Some(step), Some(metric), Some(value)) = (note["step"].as_u64(), note["metric"].as_str(), note["value"].as_f64()) else {
            return Best::default();
        };
        let there = found.path.with_file_name(format!("step-{step:08}")).exists();
        let why = match () {
            _ if !c.best_metric.is_empty() && c.best_metric != metric => format!("train.best_metric was {metric}"),
            _ if note["eval_batches"] != json!(c.eval_batches) => format!("train.eval_batches was {}", note["eval_batches"]),
            _ if c.keep_best && !there => "its checkpoint is not there any more".into(),
            _ => return Best { at: Some((step, metric.into(), value)), since: note["since"].as_u64().unwrap_or(0) },
        };
        say!("the best evaluation so far, of step {step}, does not count any more: {why}");
        Best::default()
    }

    /// What a checkpoint notes.
    pub fn note(&self, c: &TrainConfig) -> Value {
        match &self.at {
            Some((step, metric, value)) => {
                json!({ "step": step, "metric": metric, "value": value, "since": self.since, "eval_batches": c.eval_batches })
            }
            None => Value::Null,
        }
    }

    /// Takes in an evaluation; whether it is better than all before it.
    pub fn judge(&mut self, step: u64, e: &Evaluation, metrics: &[Metric], wanted: &str) -> Result<bool, TrainError> {
        let directed = |name: &str| Metric::find(metrics, name).map(|m| m.better).filter(|b| *b != Better::Neither);
        let chosen = e.values.iter().find_map(|(name, value)| match wanted.is_empty() || wanted == *name {
            true => Some((*name, *value, directed(name)?)),
            false => None,
        });
        let Some((name, value, better)) = chosen else {
            let found: Vec<&str> = e.values.iter().map(|v| v.0).filter(|n| directed(n).is_some()).collect();
            return match wanted {
                "" => Ok(false),
                _ => {
                    Err(ConfigError::Invalid(format!("train.best_metric = \"{wanted}\": an evaluation here finds {}", found.join(", ")))
                        .into())
                }
            };
        };
        let improved = match (&self.at, better) {
            (None, _) => !value.is_nan(),
            (Some((.., best)), Better::Higher) => value > *best,
            (Some((.., best)), _) => value < *best,
        };
        match improved {
            true => *self = Best { at: Some((step, name.into(), value)), since: 0 },
            false => self.since += 1,
        }
        Ok(improved)
    }

    /// Whether the run has waited long enough for something better.
    pub fn is_over(&self, c: &TrainConfig) -> bool {
        c.patience > 0 && self.since >= c.patience
    }

    /// `loss 1.2345 of step 300`
    pub fn line(&self, metrics: &[Metric]) -> String {
        match &self.at {
            Some((step, name, value)) => format!("{name} {} of step {step}", Metric::shown(metrics, name, *value)),
            None => "none".into(),
        }
    }
}

/// A metric that is named must be one that has a direction.
pub fn check(task: &dyn Task) -> Result<(), ConfigError> {
    let wanted = &task.train_config().best_metric;
    let directed: Vec<&str> = task.metrics().iter().filter(|m| m.better != Better::Neither).map(|m| m.name).collect();
    match wanted.is_empty() || directed.contains(&wanted.as_str()) {
        true if task.train_config().patience > 0 && directed.is_empty() => {
            Err(ConfigError::Invalid("train.patience: no metric of this recipe is better when it is higher or lower".into()))
        }
        true => Ok(()),
        false => Err(ConfigError::Invalid(format!("train.best_metric = \"{wanted}\": one of {}", directed.join(", ")))),
    }
}

/// The name of the link in a run's folder.
const LINK: &str = "best";

/// Leads the link to the best checkpoint, or takes it away; false where something else stands in its place, which is left alone.
pub fn mark(out: &Path, best: &Best) -> Result<bool, TrainError> {
    let path = out.join(LINK);
    if path.symlink_metadata().is_ok_and(|m| !m.is_symlink()) {
        return Ok(false);
    }
    let target = best.at.as_ref().map(|(step, ..)| PathBuf::from(format!("checkpoints/step-{step:08}")));
    match (target, path.read_link().ok()) {
        (Some(target), now) if now.as_ref() != Some(&target) => files::link(&target, &path).map_err(io("cannot link", &path))?,
        (None, Some(_)) => files::remove(&path).map_err(io("cannot remove", &path))?,
        _ => {}
    }
    Ok(true)
}

/// The best checkpoint of a run; `run/best` names it too.
pub fn find(run: &Path) -> Result<Checkpoint, TrainError> {
    let newest = super::find_checkpoint(run)?;
    let Some(step) = newest.meta["best"]["step"].as_u64() else {
        return Err(TrainError::Other(format!(
            "{} notes no best checkpoint: the run had no evaluation whose metric has a direction yet",
            newest.path.display()
        )));
    };
    let path = newest.path.with_file_name(format!("step-{step:08}"));
    match path.exists() {
        true => Ok(checkpoint::open(&path)?),
        false => Err(TrainError::Other(format!(
            "the best checkpoint of {}, of step {step}, is not there: it was removed, or not kept (train.keep_best)",
            run.display()
        ))),
    }
}

/// The run of a path `run/best`.
pub fn run_of(path: &Path) -> Option<&Path> {
    path.parent().filter(|run| path.file_name().is_some_and(|n| n == LINK) && run.join("checkpoints").is_dir())
}
