//! What a recipe is to the rest: presets, programs, data, and what it can show.
//!
//! | file | is |
//! |---|---|
//! | `mod.rs` | the traits `Recipe` and `Task` |
//! | `begin.rs` | what a run that begins is given beyond its preset: by the model that it fine-tunes, by its epochs |
//! | `supervised.rs` | the trait `Model`, and the task that trains one |
//! | `sums.rs` | what a step of several micro-batches adds up |
//! | `capabilities.rs` | what a trained model can be asked to do: write text, classify pictures, solve puzzles, be exported |
//! | `session.rs` | programs and the state that they share |
//! | `phase.rs` | programs that are run one after the other before any weight changes |
//! | `convert.rs` | states that a checkpoint keeps in another form: f32, bf16, 8 bits |
//! | `evaluation.rs` | what an evaluation found |
//! | `metric.rs` | what its numbers mean |
//! | `errors.rs` | what can go wrong |

mod begin;
mod capabilities;
mod convert;
mod errors;
mod evaluation;
mod metric;
pub mod phase;
mod session;
pub mod sums;
mod supervised;

pub use begin::{Set, Tuning, begin};
pub use capabilities::{
    Attempt, Classifier, Classifies, Exporting, Exports, Generator, Parts, Reads, Reference, Replier, Solver, Solves, Survey, Surveys,
    TextModel, Writes,
};
pub use convert::Converted;
pub use errors::{Bad, TrainError};
pub use evaluation::{Counted, Evaluation, Extent, LeftOut};
pub use metric::{Better, Group, Metric, Of, Unit};
pub use session::{Pending, Session, Step, is_kept};
pub use supervised::{Also, Feeds, Losses, Model, Supervised, largest};

use crate::config::{Config, ConfigError, Keys, TrainConfig};
use engine::passes::known;
use engine::{Device, Extension, Graph};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// What the command line trains: a line of `recipes::RECIPES`, or a recipe of one's own that is handed to `kiln::main`.
pub trait Recipe: Sync {
    fn name(&self) -> &'static str;
    fn about(&self) -> &'static str;
    /// The sections of its config, made by `section!`: every key with its type, default, range and meaning.
    fn sections(&self) -> Vec<Keys>;
    /// (name, TOML), the default first. A preset holds what differs from the defaults; its first line is a comment that says what it is.
    fn presets(&self) -> &'static [(&'static str, &'static str)];
    /// Makes what a run begins with, where that is not there yet; `stop` is set when it is to end at once.
    fn make_ready(&self, _config: &Config, _device: &Device, _stop: &AtomicBool) -> Result<(), TrainError> {
        Ok(())
    }
    /// The config with the sizes that the data knows (vocabulary, classes), where it leaves them open.
    fn sized(&self, config: &Config) -> Result<Config, TrainError> {
        Ok(config.clone())
    }
    /// How the model in `model.base` is fine-tuned where nothing else is said; the config's sizes are known.
    fn tuning(&self, _config: &Config) -> Result<Option<Tuning>, TrainError> {
        Ok(None)
    }
    /// Checks the configuration and makes what trains.
    fn task(&self, config: &Config) -> Result<Box<dyn Task>, TrainError>;
    /// Settings that need much less memory, where a config has not made them yet, the least change first: `model.train=lora`.
    fn economies(&self, _config: &Config) -> Vec<Vec<String>> {
        vec![]
    }
    /// What the numbers mean that its tasks report and evaluate; `Task::metrics` has those of one configuration, the same or fewer.
    fn metrics(&self) -> &'static [Metric] {
        &[Metric::LOSS]
    }
    /// Ops and passes of its own.
    fn extension(&self) -> Option<&'static Extension> {
        None
    }
    /// What `--data` may name.
    fn reads(&self) -> &'static [Reads] {
        &[]
    }
    // What its models can be asked to do: see `capabilities.rs`.
    fn writes(&self) -> Option<&dyn Writes> {
        None
    }
    fn surveys(&self) -> Option<&dyn Surveys> {
        None
    }
    fn classifies(&self) -> Option<&dyn Classifies> {
        None
    }
    fn solves(&self) -> Option<&dyn Solves> {
        None
    }
    fn exports(&self) -> Option<&dyn Exports> {
        None
    }
    fn reference(&self) -> Option<&dyn Reference> {
        None
    }
}

pub type Computed = BTreeMap<String, Vec<f32>>;

/// The picture of every run that has a loss.
pub const LOSS_CURVE: &str = "loss.svg";

/// A picture of a run's metrics, in its folder.
pub struct Picture {
    pub what: &'static str,
    pub file: &'static str,
    /// One below the other: what the numbers are, and of each line its label and the key of its numbers. Those without any are left out.
    pub panels: Vec<(&'static str, Vec<(String, String)>)>,
}

/// A configured recipe, as the training loop sees it.
pub trait Task {
    fn train_config(&self) -> &TrainConfig;
    /// The programs of training and evaluation.
    fn graphs(&self) -> Vec<(&'static str, Graph)>;
    /// How often a step runs a program, on average, for estimates of its time.
    fn runs(&self, _program: &str) -> f64 {
        1.0
    }
    /// For a program that a step may run several times with the same weights: what its later runs are called, where a pass makes a program of its own of them.
    fn again(&self, _program: &str) -> Option<&'static str> {
        None
    }
    /// For a program that is run again and again before any weight changes: the one that is run first each time.
    fn follows(&self, _program: &str) -> Option<&'static str> {
        None
    }
    /// Told before `graphs` how many bytes may be taken, where that is known: what is kept on the device may depend on it.
    fn settle(&self, _free: Option<u64>) {}
    /// Fills states that are read but not trained, such as a data set that is kept on the device.
    fn prepare(&self, _: &mut Session) -> Result<(), TrainError> {
        Ok(())
    }
    /// Loads initial weights from a format that only the recipe can read; false where `from` is not of that format.
    fn init_from(&self, _: &mut Session, _from: &Path) -> Result<bool, TrainError> {
        Ok(false)
    }
    /// Called once, before the first step, with the number of steps already done.
    fn begin(&mut self, done: u64) -> Result<(), TrainError>;
    /// Starts a step; on a GPU it may still run when this returns.
    fn step(&mut self, s: &mut Session, step: u64, rate: f64) -> Result<(), TrainError>;
    /// Asks for what the last step reports; `Pending::finish` waits for it, and the next step may be started first.
    fn report(&self, s: &Session) -> Result<Pending, TrainError>;
    fn evaluate(&mut self, s: &mut Session) -> Result<Evaluation, TrainError>;
    /// The only program that `evaluate` runs, where it is one: nothing else must then be loaded for it.
    fn evaluates_with(&self) -> Option<&'static str> {
        None
    }
    /// What the numbers that it reports and evaluates mean.
    fn metrics(&self) -> &'static [Metric] {
        &[Metric::LOSS]
    }
    /// How much `evaluate` reads, where that is counted in batches.
    fn extent(&self) -> Result<Option<Extent>, TrainError> {
        Ok(None)
    }
    /// Why there is nothing to validate with, where that is so: then nothing is evaluated.
    fn without_validation(&self) -> Result<Option<String>, TrainError> {
        Ok(None)
    }
    /// Whether its data has a test split, which training never reads.
    fn has_test(&self) -> bool {
        false
    }
    /// Has `evaluate` read the test split instead of the validation split, before any program is loaded; false where there is none.
    fn validate_on_test(&mut self) -> bool {
        false
    }
    /// Has `evaluate` read at most so many batches, or all of them (0), instead of `train.eval_batches`.
    fn limit_evaluation(&mut self, _batches: u64) {}
    /// Items of an epoch, for tasks that are counted in epochs.
    fn epoch(&self) -> Option<u64> {
        None
    }
    /// Whether each of several ranks makes only the examples that it trains on, and not those of all.
    fn makes_own_rows(&self) -> bool {
        false
    }
    /// The unit of work of a step and how many there are: ("tok", 2048).
    fn work(&self) -> (&'static str, f64);
    /// What the part of a step that a program computes is called, in the figures of a run.
    fn phase<'a>(&self, program: &'a str) -> &'a str {
        program
    }
    /// What a step is called.
    fn step_name(&self) -> &'static str {
        "step"
    }
    /// Steps after which what a step does repeats, where not every step does the same: only whole periods are timed.
    fn period(&self) -> usize {
        1
    }
    /// A step's feeds filled with made-up numbers, for `kiln bench`.
    fn bench_step(&mut self, s: &mut Session, step: u64) -> Result<(), TrainError>;
    /// The loss that no model can go below, if it is known, and its name.
    fn floor(&self) -> Option<(&'static str, f64)> {
        None
    }
    /// What is drawn of the run's metrics when it ends.
    fn pictures(&self) -> Vec<Picture> {
        let lines = [("training", "loss"), ("validation", "val_loss")].map(|(label, key)| (label.to_string(), key.to_string()));
        vec![Picture { what: "loss curve", file: LOSS_CURVE, panels: vec![("loss", lines.into())] }]
    }
    /// Something to look at when training ends.
    fn show(&mut self, _: &mut Session) -> Result<Option<String>, TrainError> {
        Ok(None)
    }
    /// What a checkpoint notes in addition to the config, and a resumed run must agree with.
    fn identity(&self) -> Result<serde_json::Value, TrainError> {
        Ok(serde_json::Value::Null)
    }
    /// Paths of the config that a resumed run may find elsewhere, where what lies there is the same: the key, and what `identity` calls its
    /// fingerprint.
    fn paths(&self) -> &'static [(&'static str, &'static str)] {
        &[("data.path", "data")]
    }
    /// Files that a checkpoint holds in addition to its tensors, so that its model can be used where its data is not.
    fn kept(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        Ok(vec![])
    }
}

/// The built-in recipe of this name, or an error that names the nearest.
pub fn find(name: &str) -> Result<&'static dyn Recipe, ConfigError> {
    find_in(crate::recipes::RECIPES, name)
}

/// The same among these recipes.
pub fn find_in<'a>(recipes: &[&'a dyn Recipe], name: &str) -> Result<&'a dyn Recipe, ConfigError> {
    recipes.iter().find(|r| r.name() == name).copied().ok_or_else(|| ConfigError::Unknown {
        what: "recipe",
        name: name.into(),
        near: known(name, recipes.iter().map(|r| r.name())),
    })
}

/// A preset of a recipe, resolved.
pub fn preset(recipe: &dyn Recipe, name: Option<&str>) -> Result<Config, ConfigError> {
    let presets = recipe.presets();
    let name = name.unwrap_or(presets[0].0);
    let (_, text) = presets.iter().find(|p| p.0 == name).ok_or_else(|| ConfigError::Unknown {
        what: "preset",
        name: name.into(),
        near: known(name, presets.iter().map(|p| p.0)),
    })?;
    Ok(Config::preset(recipe.name(), name, recipe.sections(), text))
}
