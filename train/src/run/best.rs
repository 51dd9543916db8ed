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
        let since = engine::mutant!("waiting-begins-anew", note["since"].as_u64(), None).unwrap_or(0);
        let (Some(step), Some(metric), Some(value)) = (note["step"].as_u64(), note["metric"].as_str(), note["value"].as_f64()) else {
            // So far nothing that was found was a number.
            return Best { at: None, since };
        };
        // Earlier versions evaluated with the batch that they trained with.
        let batch = note["eval_batch"].as_u64().unwrap_or(c.batch as u64);
        let there = found.path.with_file_name(format!("step-{step:08}")).exists();
        let why = match () {
            _ if !c.best_metric.is_empty() && engine::mutant!("best-of-another-metric", c.best_metric != metric, false) => {
                format!("train.best_metric was {metric}")
            }
            _ if note["eval_batches"] != json!(c.eval_batches) => {
                format!("train.eval_batches was {}", note["eval_batches"])
            }
            _ if batch != c.evaluation_batch() as u64 && engine::mutant!("best-of-another-batch-of-all", c.eval_batches > 0, true) => {
                format!("an evaluation's batch was {batch}")
            }
            _ if c.keep_best && !there => "its checkpoint is not there any more".into(),
            _ => {
                return Best { at: Some((step, metric.into(), value)), since };
            }
        };
        say!("the best evaluation so far, of step {step}, does not count any more: {why}");
        Best::default()
    }

    /// What a checkpoint notes.
    pub fn note(&self, c: &TrainConfig) -> Value {
        match &self.at {
            Some((step, metric, value)) => {
                let (batches, batch) = (c.eval_batches, c.evaluation_batch());
                json!({ "step": step, "metric": metric, "value": value, "since": self.since, "eval_batches": batches, "eval_batch": batch })
            }
            None if engine::mutant!("waiting-for-a-first-number-is-not-noted", self.since > 0, false) => json!({ "since": self.since }),
            None => Value::Null,
        }
    }

    /// Takes in an evaluation; whether it is better than all before it.
    pub fn judge(&mut self, step: u64, e: &Evaluation, metrics: &[Metric], wanted: &str) -> Result<bool, TrainError> {
        let Some((name, value, better)) = Best::by(e, metrics, wanted) else {
            let found: Vec<&str> = e.values.iter().map(|v| v.0).filter(|n| directed(metrics, n).is_some()).collect();
            return match wanted {
                "" => Ok(false),
                _ => {
                    Err(ConfigError::Invalid(format!("train.best_metric = \"{wanted}\": an evaluation here finds {}", found.join(", ")))
                        .into())
                }
            };
        };
        // A resumed run may no longer name a metric, and then another one decides.
        if engine::mutant!("values-of-two-metrics-are-compared", self.at.as_ref().is_some_and(|best| best.1 != name), false) {
            say!("the best evaluation so far does not count any more: it was by another metric, and {name} decides now");
            *self = Best::default();
        }
        // What is not finite cannot be noted in a checkpoint either.
        let counts = engine::mutant!("nan-is-the-best", engine::mutant!("infinity-is-the-best", value.is_finite(), !value.is_nan()), true);
        let improved = match (&self.at, better) {
            _ if !counts => false,
            (None, _) => true,
            (Some((.., best)), Better::Higher) => engine::mutant!("a-tie-of-shares-is-better", value > *best, value >= *best),
            (Some((.., best)), _) => engine::mutant!("a-tie-is-better", value < *best, value <= *best),
        };
        match improved {
            true => *self = Best { at: Some((step, name.into(), value)), since: 0 },
            false => self.since += 1,
        }
        Ok(improved)
    }

    /// What of an evaluation decides: its name, its value and which way is better.
    pub fn by(e: &Evaluation, metrics: &[Metric], wanted: &str) -> Option<(&'static str, f64, Better)> {
        let candidates = e.values.iter().filter(|(name, _)| wanted.is_empty() || wanted == *name);
        candidates.into_iter().find_map(|(name, value)| Some((*name, *value, directed(metrics, name)?)))
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

/// Which way a metric is to go, if it has a direction.
fn directed(metrics: &[Metric], name: &str) -> Option<Better> {
    Metric::find(metrics, name).map(|m| m.better).filter(|b| *b != Better::Neither)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Unit;

    const METRICS: &[Metric] = &[
        Metric::new("seen", Unit::None, Better::Neither, "has no direction"),
        Metric::LOSS,
        Metric::new("right", Unit::Share, Better::Higher, "share"),
    ];

    /// Whether each of these values, one after the other, is better than all before it; and which step is the best at the end.
    fn judged(wanted: &str, values: &[f64]) -> (Vec<bool>, Best) {
        let mut best = Best::default();
        let found = |&value: &f64| vec![("seen", 0.0), ("loss", value), ("right", value)];
        let each = values.iter().enumerate().map(|(i, value)| {
            let e = Evaluation { values: found(value), confusion: None, counted: None };
            best.judge(i as u64 + 1, &e, METRICS, wanted).unwrap()
        });
        (each.collect(), best)
    }

    /// A run that is resumed with `train.best_metric` taken back: a share of 0.1 is no loss that is hard to beat.
    #[test]
    fn another_metric_than_the_best_ones_begins_anew() {
        let mut best = Best { at: Some((1, "right".into(), 0.1)), since: 3 };
        let mut better = |step: u64, loss: f64| {
            let e = Evaluation { values: vec![("loss", loss), ("right", 0.5)], confusion: None, counted: None };
            best.judge(step, &e, METRICS, "").unwrap()
        };
        assert!(better(2, 3.0) && better(3, 2.8) && !better(4, 2.9));
        assert_eq!((best.at, best.since), (Some((3, "loss".into(), 2.8)), 1));
    }

    #[test]
    fn nan_is_never_the_best() {
        for wanted in ["", "loss", "right"] {
            let (improved, best) = judged(wanted, &[f64::NAN, 0.5, f64::NAN]);
            assert_eq!(improved, [false, true, false], "{wanted}");
            assert_eq!((best.at.map(|at| (at.0, at.2)), best.since), (Some((2, 0.5)), 1), "{wanted}");
            for infinity in [f64::INFINITY, f64::NEG_INFINITY] {
                let (improved, best) = judged(wanted, &[infinity, 0.5, infinity]);
                assert_eq!((improved, best.since), (vec![false, true, false], 1), "{wanted} {infinity}: nothing would ever beat it");
            }
        }
        let (improved, best) = judged("", &[f64::NAN, f64::NAN]);
        assert_eq!((improved, best.at, best.since), (vec![false, false], None, 2), "it is waited for something better all the same");
    }

    #[test]
    fn what_is_as_good_as_the_best_is_no_better() {
        for (wanted, values, steps) in [
            ("loss", [2.0, 2.0, 1.0, 1.0, 1.5], [true, false, true, false, false]),
            ("right", [0.1, 0.1, 0.2, 0.2, 0.1], [true, false, true, false, false]),
        ] {
            let (improved, best) = judged(wanted, &values);
            assert_eq!(improved, steps, "{wanted}");
            assert_eq!((best.at.unwrap().0, best.since), (3, 2), "{wanted}");
            assert!(Best { at: None, since: 2 }.is_over(&TrainConfig { patience: 2, ..TrainConfig::default() }));
        }
    }
}
