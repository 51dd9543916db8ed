//! What a recipe is to the rest: presets, programs, data, and what it can show.

use crate::checkpoint::{Checkpoint, CheckpointError, Loaded};
use crate::config::{Config, ConfigError, TrainConfig};
use crate::data::puzzles::{self, PuzzleSet};
use crate::data::{Batch, DataError, Loader, Source, Tokenizer, positions};
use crate::golden::Golden;
use crate::optim;
use crate::report::Confusion;
use engine::ops::concat::concat;
use engine::passes::known;
use engine::philox::rng_feed;
use engine::{DType, Data, Device, Graph, Init, Program, Reading, Recorder, Role, Store, Switches, Var};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
    #[error("{0}")]
    Other(String),
}

/// A line of RECIPES.
pub trait Recipe: Sync {
    fn name(&self) -> &'static str;
    fn about(&self) -> &'static str;
    /// (name, TOML), the default first.
    fn presets(&self) -> &'static [(&'static str, &'static str)];
    /// Makes what a run begins with, where that is not there yet; `stop` is set when it is to end at once.
    fn make_ready(&self, _config: &Config, _device: &Device, _stop: &AtomicBool) -> Result<(), TrainError> {
        Ok(())
    }
    /// Checks the configuration and makes what trains.
    fn task(&self, config: &Config) -> Result<Box<dyn Task>, TrainError>;
    /// For recipes whose models tell pictures apart: one as a checkpoint's config and identity describe it, without its data.
    fn classifier(&self, _config: &Config, _identity: &serde_json::Value) -> Result<Option<Box<dyn Classifier>>, TrainError> {
        Ok(None)
    }
    /// For recipes whose models continue text: one as a checkpoint's config describes it, with the tokenizer that the checkpoint holds; without a
    /// checkpoint, with the data's.
    fn generator(&self, _config: &Config, _found: Option<&Checkpoint>) -> Result<Option<Box<dyn Generator>>, TrainError> {
        Ok(None)
    }
    /// For recipes whose models solve puzzles.
    fn solver(&self, _config: &Config) -> Result<Option<Box<dyn Solver>>, TrainError> {
        Ok(None)
    }
    /// Everything that a golden file holds, computed here, by the file's own names.
    fn golden(&self, file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError>;
}

pub type Computed = BTreeMap<String, Vec<f32>>;

/// Programs and the state that they share.
pub struct Session {
    pub device: Device,
    pub store: Store,
    pub switches: Switches,
    pub programs: BTreeMap<String, Program>,
    /// Where there is one, runs are timed node by node into it.
    pub profile: Option<Vec<engine::cuda::Timed>>,
    /// Set when work is to end early.
    pub stop: Arc<AtomicBool>,
}

impl Session {
    pub fn new(device: &Device, switches: &Switches, seed: u64) -> Session {
        Session {
            device: device.clone(),
            store: Store::new(seed),
            switches: switches.clone(),
            programs: BTreeMap::new(),
            profile: None,
            stop: Arc::default(),
        }
    }

    /// For loops that are long and leave nothing half done.
    pub fn go_on(&self) -> Result<(), TrainError> {
        match self.stop.load(Ordering::Relaxed) {
            true => Err(TrainError::Stopped),
            false => Ok(()),
        }
    }

    pub fn load(&mut self, name: &str, graph: Graph) -> Result<(), TrainError> {
        let program = Program::load(graph, &self.switches, &self.device, &mut self.store)?;
        self.programs.insert(name.into(), program);
        Ok(())
    }

    pub fn load_compiled(&mut self, name: &str, compiled: engine::Compiled) -> Result<(), TrainError> {
        self.programs.insert(name.into(), Program::from_compiled(compiled, &self.device, &mut self.store)?);
        Ok(())
    }

    pub fn run(&mut self, name: &str, feeds: &[(&str, Data)]) -> Result<(), TrainError> {
        let program = self.programs.get_mut(name).ok_or_else(|| TrainError::Other(format!("program '{name}' is not loaded")))?;
        if let Some(profile) = &mut self.profile {
            profile.extend(program.profile(&mut self.store, feeds)?);
            return Ok(());
        }
        Ok(program.run(&mut self.store, feeds)?)
    }

    pub fn read(&self, program: &str, output: &str) -> Result<Vec<f32>, TrainError> {
        Ok(self.programs[program].read(output, &self.store)?)
    }

    pub fn scalar(&self, program: &str, output: &str) -> Result<f64, TrainError> {
        Ok(self.read(program, output)?[0] as f64)
    }

    /// Takes every parameter from a file; names and shapes must agree exactly.
    pub fn load_params(&mut self, file: &Loaded, what: &str) -> Result<(), TrainError> {
        let has = |name: &str| self.store.get(name).is_some_and(|t| t.role == Role::Param);
        if let Some(extra) = file.names().iter().find(|n| !has(n)) {
            return Err(TrainError::Other(format!(
                "{what} holds '{extra}', which this model does not have: it is of another model or config"
            )));
        }
        self.load_used_params(file, what)
    }

    /// Takes every parameter that the loaded programs read. Of a checkpoint whose own config they are recorded from: it may hold more, which
    /// training alone reads.
    pub fn load_used_params(&mut self, file: &Loaded, what: &str) -> Result<(), TrainError> {
        let params: Vec<(String, engine::Meta)> =
            self.store.iter().filter(|(_, t)| t.role == Role::Param).map(|(n, t)| (n.to_string(), t.meta.clone())).collect();
        for (name, meta) in params {
            self.take(file, &name, &meta, what)?;
        }
        Ok(())
    }

    /// Takes every other state that outlives a run.
    pub fn load_state(&mut self, file: &Loaded, what: &str) -> Result<(), TrainError> {
        let kept: Vec<(String, engine::Meta)> = self
            .store
            .iter()
            .filter(|(n, t)| t.role == Role::Carried && is_kept(n))
            .map(|(n, t)| (n.to_string(), t.meta.clone()))
            .collect();
        for (name, meta) in kept {
            self.take(file, &name, &meta, what)?;
        }
        Ok(())
    }

    fn take(&mut self, file: &Loaded, name: &str, meta: &engine::Meta, what: &str) -> Result<(), TrainError> {
        let (dtype, shape, bytes) =
            file.get(name).ok_or_else(|| TrainError::Other(format!("{what} has no '{name}': it is of another model or config")))?;
        if dtype != meta.dtype.name() || shape != meta.shape {
            return Err(TrainError::Other(format!("{what}: '{name}' is {dtype} {shape:?}, but this model has {meta:?}: another config")));
        }
        Ok(self.store.set(name, meta, bytes)?)
    }

    /// Numbers that are trained, or that are loaded and stay as they are.
    pub fn parameters(&self, role: Role) -> usize {
        self.store.iter().filter(|(_, t)| t.role == role).map(|(_, t)| t.meta.elements()).sum()
    }
}

/// Scratch states (caches, gradients between micro-batches) mean nothing after a step.
pub fn is_kept(name: &str) -> bool {
    !name.starts_with("scratch/")
}

/// A step's report on its way.
pub struct Pending {
    names: Vec<String>,
    numbers: Reading,
    /// Of another program.
    beside: Option<(&'static [&'static str], Reading)>,
}

impl Pending {
    /// `numbers` has a value for each name; the last is how many steps in a row were skipped.
    pub fn new(names: impl IntoIterator<Item = impl Into<String>>, numbers: Reading) -> Pending {
        Pending { names: names.into_iter().map(Into::into).collect(), numbers, beside: None }
    }

    /// And these numbers, which come from elsewhere.
    pub fn beside(self, names: &'static [&'static str], numbers: Reading) -> Pending {
        Pending { beside: Some((names, numbers)), ..self }
    }

    /// Whether `finish` would not wait.
    pub fn is_there(&self) -> bool {
        self.numbers.is_there() && self.beside.as_ref().is_none_or(|(_, numbers)| numbers.is_there())
    }

    pub fn finish(self) -> Result<Step, TrainError> {
        let numbers = self.numbers.finish()?;
        let skipped_in_row = numbers[self.names.len()] as u64;
        let mut values: Vec<_> = self.names.into_iter().zip(numbers.into_iter().map(f64::from)).collect();
        if let Some((names, numbers)) = self.beside {
            values.extend(names.iter().map(|n| n.to_string()).zip(numbers.finish()?.into_iter().map(f64::from)));
        }
        Ok(Step { values, skipped_in_row })
    }
}

/// What one step reports.
pub struct Step {
    /// The first is what the step is about: the loss, where there is one.
    pub values: Vec<(String, f64)>,
    pub skipped_in_row: u64,
}

/// What the validation data show.
pub struct Evaluation {
    /// Means over what counts; the first is the loss.
    pub values: Vec<(&'static str, f64)>,
    /// For classifiers.
    pub confusion: Option<Confusion>,
    /// Where items are left out.
    pub counted: Option<Counted>,
}

/// How much of the validation data an evaluation reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Extent {
    /// Batches that are read.
    pub batches: u64,
    /// All that there are; none where the data has no end, because it is made as it is read.
    pub of: Option<u64>,
}

impl Extent {
    /// `limit` as `train.eval_batches` has it: 0 is all.
    pub fn new(items: u64, batch: usize, limit: u64, endless: bool) -> Extent {
        let all = items.div_ceil(batch as u64);
        Extent { batches: if limit == 0 { all } else { limit.min(all) }, of: (!endless).then_some(all) }
    }

    /// `8 of 26 batches`, `all 26 batches`, `8 batches of data without an end`
    pub fn line(&self) -> String {
        let batches = |n: u64| if n == 1 { "1 batch".to_string() } else { format!("{n} batches") };
        match self.of {
            Some(all) if self.batches == all => format!("all of the validation split, {}", batches(all)),
            Some(all) => format!("{} of {}", self.batches, batches(all)),
            None => format!("{} of generated data, which has no end", batches(self.batches)),
        }
    }
}

/// How many items were evaluated, and how many were not.
pub struct Counted {
    /// What they are: "puzzles".
    pub what: &'static str,
    pub evaluated: usize,
    pub left_out: Vec<LeftOut>,
}

pub struct LeftOut {
    pub key: &'static str,
    pub why: &'static str,
    pub count: usize,
}

impl Counted {
    /// `7 puzzles evaluated, 33 left out: 20 of the training side, 13 beyond data.test_puzzles`
    pub fn line(&self) -> String {
        let reasons: Vec<String> = self.left_out.iter().filter(|l| l.count > 0).map(|l| format!("{} {}", l.count, l.why)).collect();
        let left_out = match self.left_out.iter().map(|l| l.count).sum::<usize>() {
            0 => "none left out".into(),
            n => format!("{n} left out: {}", reasons.join(", ")),
        };
        format!("{} {} evaluated, {left_out}", self.evaluated, self.what)
    }

    pub fn to_json(&self) -> serde_json::Value {
        let left_out = self.left_out.iter().map(|l| (l.key.to_string(), l.count.into())).collect();
        serde_json::json!({ "what": self.what, "evaluated": self.evaluated, "left_out": serde_json::Value::Object(left_out) })
    }
}

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
    /// Told before `graphs` how many bytes the device has free, where that is known: what is kept there may depend on it.
    fn settle(&self, _free: Option<u64>) {}
    /// Fills states that programs read and nobody trains: a data set that is kept on the device.
    fn prepare(&self, _: &mut Session) -> Result<(), TrainError> {
        Ok(())
    }
    /// Takes weights to begin with from a place that only the recipe can read; false where this is none.
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
    /// How much `evaluate` reads, where that is counted in batches.
    fn extent(&self) -> Result<Option<Extent>, TrainError> {
        Ok(None)
    }
    /// Has `evaluate` read at most so many batches, or all of them (0), instead of `train.eval_batches`.
    fn limit_evaluation(&mut self, _batches: u64) {}
    /// Items of an epoch, for tasks that are counted in epochs.
    fn epoch(&self) -> Option<u64> {
        None
    }
    /// What a step works through: ("tok", how many).
    fn work(&self) -> (&'static str, f64);
    /// What a step is called.
    fn step_name(&self) -> &'static str {
        "step"
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
        vec![Picture { what: "loss curve", file: "loss.svg", panels: vec![("loss", lines.into())] }]
    }
    /// Something to look at when training ends.
    fn show(&mut self, _: &mut Session) -> Result<Option<String>, TrainError> {
        Ok(None)
    }
    /// What a checkpoint notes beside the config, and a later one must agree with.
    fn identity(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
    /// Files that a checkpoint holds beside its numbers, so that its model can be used where its data is not.
    fn kept(&self) -> Vec<(&'static str, Vec<u8>)> {
        vec![]
    }
}

/// Continues text token by token.
pub trait Generator {
    fn tokenizer(&self) -> Result<Arc<Tokenizer>, TrainError>;
    /// Loads what it needs for at most `capacity` tokens.
    fn begin(&mut self, s: &mut Session, capacity: usize) -> Result<(), TrainError>;
    /// Takes in tokens; logits after the last.
    fn feed(&mut self, s: &mut Session, tokens: &[u32]) -> Result<Vec<f32>, TrainError>;
}

/// Tells which class a picture is of.
pub trait Classifier {
    fn classes(&self) -> &[String];
    /// Pixels of a picture's side.
    fn size(&self) -> usize;
    /// Loads what it needs for `batch` pictures at a time.
    fn begin(&mut self, s: &mut Session, batch: usize) -> Result<(), TrainError>;
    /// Pictures [n, 3, size, size] -> logits [n, classes].
    fn logits(&mut self, s: &mut Session, pictures: &[u8]) -> Result<Vec<f32>, TrainError>;
}

/// Solves puzzles, one segment of thinking after another.
pub trait Solver {
    fn task(&self) -> puzzles::Task;
    /// The first puzzles of those that the model never learned from.
    fn unseen(&self, count: usize) -> Result<PuzzleSet, TrainError>;
    /// Loads what it needs for `batch` puzzles at a time.
    fn begin(&mut self, s: &mut Session, batch: usize) -> Result<(), TrainError>;
    /// Of each of these puzzles [n, cells] the answer after every segment, until the model halts (see `Attempt::halts`); or until the limit.
    fn solve(&mut self, s: &mut Session, puzzles: &[u8], to_limit: bool) -> Result<Vec<Vec<Attempt>>, TrainError>;
}

/// A model's answer after a segment.
#[derive(Clone)]
pub struct Attempt {
    pub answer: Vec<u8>,
    /// Above 0 the model thinks that it is right.
    pub halt: f32,
}

impl Attempt {
    /// Whether the model is sure of the same answer for the second time in a row. Once is too early: what tells it learns from puzzles that
    /// the model comes to know by heart, and takes its first answer to others for as good.
    pub fn halts(&self, before: Option<&Attempt>) -> bool {
        self.halt > 0.0 && before.is_some_and(|b| b.halt > 0.0 && b.answer == self.answer)
    }
}

/// A model whose loss is differentiated: everything else about its training is the same for all. Feeds that it may use: `ids` and
/// `targets` i32 [batch, seq], `weight` f32 [1] (1 / targets that count in the whole step), `rng` i32 [4]; of rows with several sequences or padding
/// also `until` and `position` i32 [batch, seq] (see `data::Item` and `data::positions`).
pub trait Model {
    fn seq(&self) -> usize;
    /// Records the loss of one micro-batch, then what else is worth reporting; all [1]. Over a step's micro-batches each is summed.
    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Losses<'g>;
    /// The same for evaluation. A classifier also outputs `logits` [batch, classes].
    fn evaluate<'g>(&self, r: &'g Recorder, batch: usize) -> Losses<'g> {
        self.loss(r, batch)
    }
    /// See `Task::settle`.
    fn settle(&self, _free: Option<u64>) {}
    /// A micro-batch's feed beside those that all have, where items are more than `ids` can say: its name and bytes. May number the
    /// ids anew.
    fn more(&self, _train: bool, _ids: &mut [i32]) -> Option<(&'static str, Vec<u8>)> {
        None
    }
    /// See `Task::prepare`.
    fn prepare(&self, _: &mut Session) -> Result<(), TrainError> {
        Ok(())
    }
    /// See `Task::init_from`.
    fn init_from(&self, _: &mut Session, _from: &Path) -> Result<bool, TrainError> {
        Ok(false)
    }
    /// Whether its items say `until`.
    fn has_places(&self) -> bool {
        false
    }
    /// What `seq` counts.
    fn unit(&self) -> &'static str {
        "tok"
    }
    fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError>;
    /// See `Task::epoch`.
    fn epoch(&self) -> Option<u64> {
        None
    }
    /// For classifiers: what a class is called.
    fn classes(&self) -> &[String] {
        &[]
    }
    /// Classes of the random targets of `bench`.
    fn vocab(&self) -> usize;
    fn floor(&self) -> Option<(&'static str, f64)> {
        None
    }
    fn show(&self, _: &mut Session) -> Result<Option<String>, TrainError> {
        Ok(None)
    }
    fn identity(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
    /// See `Task::kept`.
    fn kept(&self) -> Vec<(&'static str, Vec<u8>)> {
        vec![]
    }
}

/// Feeds that every supervised graph may read.
pub struct Feeds<'g> {
    pub ids: Var<'g>,
    pub targets: Var<'g>,
    pub weight: Var<'g>,
    pub rng: Var<'g>,
}

impl<'g> Feeds<'g> {
    pub fn new(r: &'g Recorder, batch: usize, seq: usize) -> Feeds<'g> {
        Feeds {
            ids: r.feed("ids", &[batch, seq], DType::I32),
            targets: r.feed("targets", &[batch, seq], DType::I32),
            weight: r.feed("weight", &[1], DType::F32),
            rng: r.feed("rng", &[4], DType::I32),
        }
    }
}

/// What is recorded of a step, by name: the first is the loss.
pub type Losses<'g> = Vec<(&'static str, Var<'g>)>;

/// All parameters, and the gradients of a loss by them.
fn differentiated<'g>(r: &'g Recorder, loss: Var<'g>) -> (Vec<(String, Var<'g>)>, Vec<Var<'g>>) {
    let params = r.params();
    let by: Vec<Var> = params.iter().map(|p| p.1).collect();
    let grads = r.grad(loss, &by);
    (params, grads)
}

/// Trains a `Model`: accumulation, clipping, AdamW, evaluation.
pub struct Supervised<M: Model> {
    pub model: M,
    config: TrainConfig,
    seed: u64,
    loader: Option<Loader>,
    validation: Option<Arc<dyn Source>>,
    names: Vec<&'static str>,
    /// What `bench_step` feeds, made once.
    bench: Vec<Batch>,
}

impl<M: Model> Supervised<M> {
    pub fn new(model: M, config: TrainConfig, seed: u64) -> Supervised<M> {
        Supervised { model, config, seed, loader: None, validation: None, names: vec![], bench: vec![] }
    }

    fn validation(&self) -> Result<Arc<dyn Source>, TrainError> {
        self.validation.as_ref().map_or_else(|| self.model.source(false), |v| Ok(v.clone()))
    }

    fn extent_of(&self, validation: &dyn Source) -> Extent {
        Extent::new(validation.len(), self.config.batch, self.config.eval_batches, validation.is_endless())
    }

    /// One program where a step is one micro-batch; else one that adds up gradients, and one that applies them.
    fn training_graphs(&self) -> Vec<(&'static str, Graph)> {
        let batch = self.config.batch;
        if self.config.accumulate == 1 {
            return vec![("train", self.step_graph(|r| self.model.loss(r, batch)))];
        }
        let r = Recorder::new();
        let losses = self.model.loss(&r, batch);
        let params = r.params();
        let u = Recorder::new();
        let zeroed = |name: String, shape: &[usize]| {
            let state = u.state(&name, shape, DType::F32, Init::Full(0.0));
            u.update(state, u.zeros(shape));
            state
        };
        let metas: Vec<(String, Vec<usize>)> = params.iter().map(|(n, v)| (n.clone(), v.shape())).collect();
        let own: Vec<(String, Var)> = metas.iter().map(|(n, s)| (n.clone(), u.param(n, s, Init::Full(0.0)))).collect();
        let sums: Vec<Var> = metas.iter().map(|(n, s)| zeroed(format!("scratch/grad/{n}"), s)).collect();
        let losses: Vec<(&'static str, Var)> = losses.iter().map(|(n, _)| (*n, zeroed(format!("scratch/sum/{n}"), &[1]))).collect();
        // No loss is differentiated here that bf16 could go by: what is summed up is f32.
        u.typed(|| self.finish(&u, &own, &sums, &losses));
        vec![("micro", self.micro_graph(|r| self.model.loss(r, batch))), ("update", u.finish())]
    }

    /// A whole step: losses, of which the first is differentiated, and the update.
    pub fn step_graph(&self, losses: impl for<'g> FnOnce(&'g Recorder) -> Losses<'g>) -> Graph {
        let r = Recorder::new();
        let losses = losses(&r);
        let (params, grads) = differentiated(&r, losses[0].1);
        self.finish(&r, &params, &grads, &losses);
        r.finish()
    }

    /// A part of a step: gradients of the first of these losses, and all of them, are added to what `update` takes.
    pub fn micro_graph(&self, losses: impl for<'g> FnOnce(&'g Recorder) -> Losses<'g>) -> Graph {
        let r = Recorder::new();
        let losses = losses(&r);
        let (params, grads) = differentiated(&r, losses[0].1);
        let add = |name: String, v: Var| {
            let state = r.state(&name, &v.shape(), DType::F32, Init::Full(0.0));
            r.update(state, state + v);
        };
        params.iter().zip(&grads).for_each(|((name, _), g)| add(format!("scratch/grad/{name}"), *g));
        losses.iter().for_each(|(name, v)| add(format!("scratch/sum/{name}"), *v));
        r.finish()
    }

    fn finish<'g>(&self, r: &'g Recorder, params: &[(String, Var<'g>)], grads: &[Var<'g>], losses: &[(&'static str, Var<'g>)]) {
        let step = optim::adamw(r, params, grads, losses[0].1, &self.config);
        let own = [step.norm, step.clipped, step.skipped, step.skipped_in_row];
        let all: Vec<Var> = losses.iter().map(|l| l.1).chain(own).map(|v| v.cast(DType::F32).reshape(&[1])).collect();
        r.output("report", concat(&all, 0));
    }

    fn micro(
        &self,
        s: &mut Session,
        program: &str,
        (step, micro): (u64, usize),
        (batch, weight): (&Batch, f32),
        rate: f64,
        beside: &[(&str, Data)],
    ) -> Result<(), TrainError> {
        let rng = rng_feed(self.seed, step, engine::mutant!("micro-batches-draw-the-same", micro as u32, 0));
        let (mut ids, weight, rate) = (batch.ids.clone(), [weight], [rate as f32]);
        let position = positions(&batch.until, self.model.seq());
        let more = self.model.more(program != "eval", &mut ids);
        let mut feeds = vec![
            ("ids", Data::I32(&ids)),
            ("targets", Data::I32(&batch.targets)),
            ("weight", Data::F32(&weight)),
            ("rng", Data::I32(&rng)),
            ("rate", Data::F32(&rate)),
        ];
        if self.model.has_places() {
            feeds.extend([("until", Data::I32(&batch.until)), ("position", Data::I32(&position))]);
        }
        feeds.extend(more.iter().map(|(name, bytes)| (*name, Data::U8(bytes))));
        feeds.extend_from_slice(beside);
        s.run(program, &feeds)
    }

    /// With `also` a step is more than its micro-batches: that program, made by `step_graph` where there is one micro-batch and by `micro_graph` where
    /// there are more, with these feeds.
    fn run_step(&self, s: &mut Session, step: u64, rate: f64, batches: &[Batch], also: Option<Also>) -> Result<(), TrainError> {
        let counted: usize =
            engine::mutant!("accumulation-divides-by-one-micro-batch", batches, &batches[..1]).iter().map(|b| b.counted).sum();
        if counted == 0 {
            return Err(TrainError::AllMasked(step));
        }
        let weight = 1.0 / counted as f32;
        if let [batch] = batches {
            let (program, feeds) = also.unwrap_or(("train", &[]));
            return self.micro(s, program, (step, 0), (batch, weight), rate, feeds);
        }
        for (m, batch) in batches.iter().enumerate() {
            self.micro(s, "micro", (step, m), (batch, weight), rate, &[])?;
        }
        if let Some((program, feeds)) = also {
            s.run(program, feeds)?;
        }
        s.run("update", &[("rate", Data::F32(&[rate as f32]))])
    }

    /// `Task::step`, and another program in it.
    pub fn step_with(&mut self, s: &mut Session, step: u64, rate: f64, also: Option<Also>) -> Result<(), TrainError> {
        let loader = self.loader.as_mut().expect("begin comes first");
        let batches = (0..self.config.accumulate).map(|_| loader.next()).collect::<Result<Vec<_>, _>>()?;
        self.run_step(s, step, rate, &batches, also)
    }

    /// `Task::report` of a step whose program, where that is one, was this.
    pub fn report_of(&self, s: &Session, program: &str) -> Result<Pending, TrainError> {
        let program = if self.config.accumulate == 1 { program } else { "update" };
        let names = self.names.iter().copied().chain(["grad_norm", "clipped_norm", "skipped"]);
        Ok(Pending::new(names, s.programs[program].start_read("report", &s.store)?))
    }

    /// `Task::bench_step`, and another program in it.
    pub fn bench_step_with(&mut self, s: &mut Session, step: u64, also: Option<Also>) -> Result<(), TrainError> {
        let (seq, n) = (self.model.seq(), self.config.batch * self.model.seq());
        if self.bench.is_empty() {
            let draw = |salt: u32, i: usize| engine::philox::philox([i as u32, 0, salt, 0], [1, 2])[0] as usize % self.model.vocab();
            let one = |salt: u32| (0..n).map(|i| draw(salt, i) as i32).collect();
            // Where rows have places, each is one sequence, and its first quarter a prompt that is not learned, as peers/bench.py has it.
            let until = if self.model.has_places() { vec![seq as i32 - 1; n] } else { vec![] };
            let prompt = if self.model.has_places() { seq / 4 } else { 0 };
            let batch = |m: u32| {
                let mut targets: Vec<i32> = one(2 * m + 1);
                targets.chunks_mut(seq).for_each(|row| row[..prompt].fill(-1));
                Batch { ids: one(2 * m), counted: n / seq * (seq - prompt), targets, until: until.clone(), first_item: 0 }
            };
            self.bench = (0..self.config.accumulate as u32).map(batch).collect();
            let r = Recorder::new();
            self.names = self.model.loss(&r, 1).iter().map(|l| l.0).collect();
        }
        self.run_step(s, step, 1e-4, &self.bench, also)
    }
}

/// A program, and what it is fed beside what every program is.
pub type Also<'a> = (&'a str, &'a [(&'a str, Data<'a>)]);

impl<M: Model> Task for Supervised<M> {
    fn train_config(&self) -> &TrainConfig {
        &self.config
    }

    fn graphs(&self) -> Vec<(&'static str, Graph)> {
        let mut all = self.training_graphs();
        let r = Recorder::new();
        for (name, v) in self.model.evaluate(&r, self.config.batch) {
            r.output(name, v);
        }
        all.push(("eval", r.finish()));
        all
    }

    fn settle(&self, free: Option<u64>) {
        self.model.settle(free)
    }

    fn prepare(&self, s: &mut Session) -> Result<(), TrainError> {
        self.model.prepare(s)
    }

    fn init_from(&self, s: &mut Session, from: &Path) -> Result<bool, TrainError> {
        self.model.init_from(s, from)
    }

    fn begin(&mut self, done: u64) -> Result<(), TrainError> {
        let source = self.model.source(true)?;
        let order = crate::data::Order { seed: self.seed, len: source.len() };
        let items = self.config.batch as u64 * self.config.accumulate as u64;
        let first = engine::mutant!("resume-skips-an-item", done * items, done * items + done.min(1));
        self.loader = Some(Loader::new(source, Some(order), self.config.batch, first, 2 * self.config.accumulate)?);
        self.validation = Some(self.model.source(false)?);
        let r = Recorder::new();
        self.names = self.model.loss(&r, 1).iter().map(|l| l.0).collect();
        Ok(())
    }

    fn step(&mut self, s: &mut Session, step: u64, rate: f64) -> Result<(), TrainError> {
        self.step_with(s, step, rate, None)
    }

    fn report(&self, s: &Session) -> Result<Pending, TrainError> {
        self.report_of(s, "train")
    }

    fn evaluate(&mut self, s: &mut Session) -> Result<Evaluation, TrainError> {
        let source = self.validation()?;
        let (items, batch) = (source.len(), self.config.batch as u64);
        let Extent { batches, .. } = self.extent_of(&*source);
        let mut loader = Loader::new(source, None, self.config.batch, 0, 2)?;
        let r = Recorder::new();
        let names: Vec<&'static str> = self.model.evaluate(&r, 1).iter().map(|l| l.0).collect();
        let (mut sums, mut total) = (vec![0.0; names.len()], 0.0);
        let mut confusion = Some(self.model.classes()).filter(|c| !c.is_empty()).map(Confusion::new);
        for i in 0..batches {
            s.go_on()?;
            let mut b = loader.next()?;
            // Each item once: those that fill up the last batch do not count.
            let own = engine::mutant!("evaluation-counts-what-fills-up", (items - i * batch).min(batch), batch) as usize;
            b.targets[own * self.model.seq()..].fill(-1);
            let counted = b.targets.iter().filter(|t| **t >= 0).count();
            if counted == 0 {
                continue;
            }
            let share = counted as f64;
            self.micro(s, "eval", (i, 0), (&b, 1.0 / counted as f32), 0.0, &[])?;
            for (sum, name) in sums.iter_mut().zip(&names) {
                *sum += s.scalar("eval", name)? * share;
            }
            total += share;
            if let Some(confusion) = &mut confusion {
                let logits = s.read("eval", "logits")?;
                let rows = logits.chunks(self.model.classes().len()).zip(&b.targets);
                rows.filter(|(_, target)| **target >= 0).for_each(|(row, target)| confusion.add(*target as usize, largest(row)));
            }
        }
        if total == 0.0 {
            return Err(TrainError::Other("the validation targets are all masked (data.ignore_tokens?)".into()));
        }
        Ok(Evaluation { values: names.into_iter().zip(sums.into_iter().map(|v| v / total)).collect(), confusion, counted: None })
    }

    fn extent(&self) -> Result<Option<Extent>, TrainError> {
        Ok(Some(self.extent_of(&*self.validation()?)))
    }

    fn limit_evaluation(&mut self, batches: u64) {
        self.config.eval_batches = batches;
    }

    fn epoch(&self) -> Option<u64> {
        self.model.epoch()
    }

    fn work(&self) -> (&'static str, f64) {
        (self.model.unit(), (self.config.batch * self.config.accumulate * self.model.seq()) as f64)
    }

    fn bench_step(&mut self, s: &mut Session, step: u64) -> Result<(), TrainError> {
        self.bench_step_with(s, step, None)
    }

    fn floor(&self) -> Option<(&'static str, f64)> {
        self.model.floor()
    }

    fn show(&mut self, s: &mut Session) -> Result<Option<String>, TrainError> {
        self.model.show(s)
    }

    fn identity(&self) -> serde_json::Value {
        self.model.identity()
    }

    fn kept(&self) -> Vec<(&'static str, Vec<u8>)> {
        self.model.kept()
    }
}

/// The place of the largest number; of equal ones the first, as in `top_k`.
pub fn largest(numbers: &[f32]) -> usize {
    (1..numbers.len()).fold(0, |best, i| if numbers[i] > numbers[best] { i } else { best })
}

/// The recipe of this name, or an error that names the nearest.
pub fn find(name: &str) -> Result<&'static dyn Recipe, ConfigError> {
    let recipes = crate::recipes::RECIPES;
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
    Ok(Config::preset(recipe.name(), name, text))
}
