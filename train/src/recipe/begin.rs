//! What a run that begins is given beyond its preset: sizes that its data knows, what the model that it fine-tunes brings, and the steps of its epochs.

use super::{Recipe, TrainError};
use crate::config::{Config, ConfigError, TrainConfig, Value, shown};

/// How a base is fine-tuned unless someone says otherwise: a layer above the preset, whose values are meant for a model drawn at random.
pub struct Tuning {
    /// What is trained, for people: `all weights`.
    pub of: &'static str,
    pub sets: Vec<Set>,
    /// Share of the schedule in which the learning rate rises.
    pub warmup: f64,
    /// Items of an epoch with these settings, where they were counted.
    pub items: Option<u64>,
    /// The learning rate beyond which someone is warned.
    pub highest_rate: f64,
}

/// A key of a config (`model.seq`), its value, and why it is that, where this is not plain.
pub struct Set {
    pub key: &'static str,
    pub value: Value,
    pub why: String,
}

impl Set {
    pub fn new(key: &'static str, value: impl Into<Value>, why: impl Into<String>) -> Set {
        Set { key, value: value.into(), why: why.into() }
    }

    fn shown(&self) -> String {
        let why = if self.why.is_empty() { String::new() } else { format!(" ({})", self.why) };
        format!("{} = {}{why}", self.key, shown(&self.value))
    }
}

/// The config that a run of this recipe begins with, and a line on what its base has brought. A run that goes on has its own, and only what is new in it is
/// worked out.
pub fn begin(recipe: &dyn Recipe, config: &Config) -> Result<(Config, Option<String>), TrainError> {
    let mut config = recipe.sized(config)?;
    let tuning = if config.is_of_run() { None } else { recipe.tuning(&config)? };
    let mut said = vec![];
    for set in tuning.iter().flat_map(|t| &t.sets) {
        lay(&mut config, set, &mut said)?;
    }
    if !config.is_of_run() || config.is_given("train.epochs") {
        steps_of_epochs(recipe, &mut config, tuning.as_ref().and_then(|t| t.items), &mut said)?;
    }
    let Some(tuning) = tuning else { return Ok((config, None)) };
    let c: TrainConfig = config.section("train")?;
    let warmup = (c.schedule_steps() as f64 * tuning.warmup).ceil() as i64;
    lay(&mut config, &Set::new("train.warmup", warmup, format!("{:.0}% of the schedule", 100.0 * tuning.warmup)), &mut said)?;
    if c.learning_rate > tuning.highest_rate {
        crate::warn!(
            "train.learning_rate = {} is high for {} of a model that is trained already: above {} it soon forgets what it knows (1e-5 is usual)",
            shown(&c.learning_rate.into()),
            tuning.of,
            shown(&tuning.highest_rate.into())
        );
    }
    let line = format!("fine-tuning {}, with the defaults that a base brings: {}", tuning.of, said.join(", "));
    Ok((config, (!said.is_empty()).then_some(line)))
}

/// Sets a key unless someone has; says so where it was something else.
fn lay(config: &mut Config, set: &Set, said: &mut Vec<String>) -> Result<(), ConfigError> {
    let before = set.key.split_once('.').and_then(|(section, key)| config.value(section, key)).cloned();
    if config.set_default(set.key, set.value.clone())? && before.as_ref() != Some(&set.value) {
        said.push(set.shown());
    }
    Ok(())
}

/// As many steps as `train.epochs` takes, where the config counts by epochs.
fn steps_of_epochs(recipe: &dyn Recipe, config: &mut Config, items: Option<u64>, said: &mut Vec<String>) -> Result<(), TrainError> {
    let c: TrainConfig = config.section("train")?;
    if c.epochs == 0.0 || !config.has("train", "epochs") {
        return Ok(());
    }
    let Some(items) = items.map_or_else(|| Ok::<_, TrainError>(recipe.task(config)?.epoch()), |n| Ok(Some(n)))? else {
        let problem = format!("train.epochs = {}: {} has no epochs on this data (name --steps)", c.epochs, recipe.name());
        return Err(ConfigError::Invalid(problem).into());
    };
    let steps =
        (c.epochs * items as f64 / (c.batch * engine::mutant!("epochs-of-one-micro-batch", c.accumulate, 1)) as f64).ceil().max(1.0) as i64;
    config.set_value("train.steps", steps.into())?;
    said.push(format!("train.steps = {steps} ({} {} of {items} rows)", c.epochs, if c.epochs == 1.0 { "epoch" } else { "epochs" }));
    Ok(())
}
