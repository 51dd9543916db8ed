//! lior: learning without back-propagation. Three programs over one Store; nothing asks for a gradient.

mod encoder;
mod golden;
mod model;
mod ops;
mod probe;

pub use model::{Lior, LiorConfig};

use crate::checkpoint::Loaded;
use crate::config::{Config, ConfigError, DataConfig, Keys, Section, TrainConfig};
use crate::data::{Loader, Source};
use crate::golden::Golden;
use crate::recipe::{
    Better, Computed, Evaluation, Extent, Metric, Pending, Picture, Reads, Recipe, Reference, Session, Supervised, Task, TrainError, Unit,
};
use crate::text::{self, Text};
use encoder::NextToken;
use engine::{Data, Device, Extension, Graph, Meta, Recorder, Switches};
use probe::Probe;
use std::sync::Arc;

pub struct LiorRecipe;

impl Recipe for LiorRecipe {
    fn name(&self) -> &'static str {
        "lior"
    }

    fn about(&self) -> &'static str {
        "a metric and a rotor that learn without back-propagation, over a frozen encoder"
    }

    fn metrics(&self) -> &'static [Metric] {
        METRICS
    }

    fn sections(&self) -> Vec<Keys> {
        // There is no gradient: no optimizer.
        let train = TrainConfig::keys("train").without(&["beta1", "beta2", "eps", "weight_decay", "clip"]);
        vec![LiorConfig::keys("model"), DataConfig::keys("data"), train]
    }

    fn extension(&self) -> Option<&'static Extension> {
        Some(&ops::EXTENSION)
    }

    fn presets(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("development", include_str!("../../../configs/lior-development.toml")),
            ("encoder", include_str!("../../../configs/lior-encoder.toml")),
            ("production", include_str!("../../../configs/lior-production.toml")),
            ("profiling", include_str!("../../../configs/lior-profiling.toml")),
        ]
    }

    fn sized(&self, config: &Config) -> Result<Config, TrainError> {
        text::sized(config)
    }

    fn task(&self, config: &Config) -> Result<Box<dyn Task>, TrainError> {
        let config = &self.sized(config)?;
        let c: LiorConfig = config.section("model")?;
        c.check()?;
        // The drag goes one way, so the field's step is largest at one of its ends.
        let k = c.k(0).abs().max(c.k(c.history).abs());
        if k > 0.25 {
            return Err(ConfigError::Invalid(format!(
                "model.dt x (1 - drag) / (2 model.mass) = {k}: above 0.25 the field grows without bound (lower model.dt; the drag is \
                 memory_alpha x memory_lambda x ln(1 + windows), up to model.history)"
            ))
            .into());
        }
        let train: TrainConfig = config.section("train")?;
        train.check()?;
        if c.pretrain {
            let text = Text::new(config.section("data")?, c.vocab, c.seq, config.seed());
            text.tokenizer()?;
            return Ok(Box::new(Supervised::new(NextToken { c, text }, train, config.seed())));
        }
        c.check_batch(train.batch, train.accumulate, train.steps)?;
        if train.patience > 0 && !c.probe {
            return Err(ConfigError::Invalid(
                "train.patience: no metric of an evaluation has a direction here (model.probe=true: found)".into(),
            )
            .into());
        }
        let text = Text::new(config.section("data")?, c.vocab, c.seq + c.after, config.seed());
        text.tokenizer()?;
        Ok(Box::new(LiorTask { c, train, text, loader: None, validation: None, encoder: None, bench: None, reports: "update" }))
    }

    fn reads(&self) -> &'static [Reads] {
        &[Reads::Text]
    }

    fn reference(&self) -> Option<&dyn Reference> {
        Some(self)
    }
}

impl Reference for LiorRecipe {
    fn file(&self) -> &'static [u8] {
        include_bytes!("../../../../reference/golden/lior.safetensors")
    }

    fn compute(&self, file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
        golden::windows(file, switches, device)
    }
}

/// What a window is fed: ids [batch, seq], after [batch, after], mask [batch, seq].
struct Window {
    ids: Vec<i32>,
    after: Vec<i32>,
    mask: Vec<u8>,
}

impl Window {
    /// From rows [batch, seq + after].
    fn new(rows: &[i32], c: &LiorConfig, ignore: &[u32]) -> Window {
        let part = |from: usize, to: usize| rows.chunks(c.seq + c.after).flat_map(|r| r[from..to].to_vec()).collect::<Vec<i32>>();
        let ids = part(0, c.seq);
        let mask = ids.iter().map(|&t| !ignore.contains(&(t as u32)) as u8).collect();
        Window { ids, after: part(c.seq, c.seq + c.after), mask }
    }

    fn feeds(&self) -> [(&'static str, Data<'_>); 3] {
        [("ids", Data::I32(&self.ids)), ("after", Data::I32(&self.after)), ("mask", Data::U8(&self.mask))]
    }
}

/// A step, all of it without waiting for any of it. Every window is nudged from where all began, and only then something is learned. `rate`: and its share
/// of the highest; where there is none, the windows are not nudged. The answer is the program that reports.
fn run<'a>(s: &mut Session, rate: Option<[f64; 2]>, windows: impl Iterator<Item = &'a Window> + Clone) -> Result<&'static str, TrainError> {
    windows.clone().try_for_each(|window| s.run("free", &window.feeds()))?;
    let Some([rate, share]) = rate.map(|r| r.map(|v| [v as f32])) else {
        s.run("passed", &[])?;
        return Ok("passed");
    };
    windows.clone().try_for_each(|window| s.run("nudged", &window.feeds()))?;
    s.run("update", &[("rate", Data::F32(&rate)), ("share", Data::F32(&share))])?;
    Ok("update")
}

/// A program of windows of so many sequences.
fn program(c: &LiorConfig, [batch, accumulate]: [usize; 2], record: fn(&Lior)) -> Graph {
    let r = Recorder::new();
    record(&Lior { c, r: &r, batch, accumulate });
    r.finish()
}

/// The programs of a step of so many windows.
fn programs(c: &LiorConfig, batch: usize, accumulate: usize) -> Vec<(&'static str, Graph)> {
    let one = |name: &'static str, record: fn(&Lior)| (name, program(c, [batch, accumulate], record));
    let mut all = vec![one("free", |l| l.free()), one("nudged", |l| l.nudged()), one("update", |l| l.update())];
    if c.nudge_every > 1 {
        all.push(one("passed", |l| l.passed()));
    }
    all
}

/// What `update` and `passed` report.
fn reported(c: &LiorConfig) -> Vec<String> {
    let numbered = |name: &'static str, count: usize| (0..count).map(move |i| format!("{name}.{i}"));
    let first = ["lior", "curvature", "speed", "delta"].map(String::from);
    first.into_iter().chain(numbered("metric", c.n)).chain(numbered("rotor", c.planes())).collect()
}

/// Those of `model.pretrain` first.
const METRICS: &[Metric] = &[
    Metric::TEXT[0],
    Metric::TEXT[1],
    Metric::new(
        "lior",
        Unit::None,
        Better::Neither,
        "length of the path that a window's query takes by itself (free phase), in the metric that is learned and weighted by the field's curvature; no value of \
         it is good or bad, since a larger metric alone makes it longer: it should settle",
    ),
    Metric::new("curvature", Unit::None, Better::Neither, "mean size of the field; the encoder's output is multiplied by it"),
    Metric::new("speed", Unit::None, Better::Neither, "mean length of one step on that path"),
    Metric::new(
        "delta",
        Unit::None,
        Better::Lower,
        "how much longer the path is when the query is pulled towards the text that follows (nudged phase): the metric is moved down the slope of just this \
         number, below zero means that the geometry makes the way to what follows the shorter one; to be compared where the metric's mean is held (model.gauge)",
    ),
    Metric::new("metric", Unit::None, Better::Neither, "what a step along a coordinate costs, one number a coordinate: this is learned"),
    Metric::new(
        "rotor",
        Unit::None,
        Better::Neither,
        "angle in radians by which a plane of coordinates is turned, one number a plane: this is learned",
    ),
    Metric::new(
        "found",
        Unit::Share,
        Better::Higher,
        "held-out windows that are followed by the same token as the window of the memory that is nearest in the learned metric and rotor; what was learned is \
         worth what this is above found_initial",
    ),
    Metric::new(
        "found_initial",
        Unit::Share,
        Better::Neither,
        "the same in the geometry that every run begins with: all coordinates count alike, and nothing is turned",
    ),
    Metric::new("found_chance", Unit::Share, Better::Neither, "the same of any window of the memory, the mean over all of them"),
];

/// What the probe finds: see `Probe::found`.
const FOUND: [&str; 3] = ["found", "found_initial", "found_chance"];

struct LiorTask {
    c: LiorConfig,
    train: TrainConfig,
    text: Text,
    loader: Option<Loader>,
    validation: Option<Arc<dyn Source>>,
    /// What is frozen from the first step on, where it is another run's.
    encoder: Option<Loaded>,
    /// What `bench_step` feeds, made once.
    bench: Option<Window>,
    /// The program that reports the last step.
    reports: &'static str,
}

impl LiorTask {
    fn validation(&self) -> Result<Arc<dyn Source>, TrainError> {
        self.validation.as_ref().map_or_else(|| self.text.source(false), |v| Ok(v.clone()))
    }

    fn extent_of(&self, validation: &dyn Source) -> Extent {
        Extent::new(validation.len(), self.train.evaluation_batch(), self.train.eval_batches, validation.is_endless())
    }

    /// The rate of a step, and its share of the highest; none where nothing is learned: of so many steps in a row the last is nudged.
    fn rates(&self, step: u64, rate: f64) -> Option<[f64; 2]> {
        (step + 1).is_multiple_of(self.c.nudge_every).then_some([rate, rate / self.train.learning_rate])
    }

    fn window(&self, rows: &[i32], place: u64) -> Result<Window, TrainError> {
        let w = Window::new(rows, &self.c, &self.text.data.ignore_tokens);
        match w.mask.chunks(self.c.seq).position(|row| row.iter().all(|&m| m == 0)) {
            Some(row) => Err(TrainError::Other(format!(
                "the window at place {} of the data's order holds nothing but data.ignore_tokens: it has no place of its own",
                place + row as u64
            ))),
            None => Ok(w),
        }
    }
}

impl Task for LiorTask {
    fn train_config(&self) -> &TrainConfig {
        &self.train
    }

    fn graphs(&self) -> Vec<(&'static str, Graph)> {
        let (batch, evaluated) = (self.train.batch, self.train.evaluation_batch());
        let mut all = programs(&self.c, batch, self.train.accumulate);
        // Of a step's batches the free phase can be evaluated as it is; but where queries lie is left to each rank for its own rows.
        if evaluated != batch || self.c.probe {
            all.push(("eval", program(&self.c, [evaluated, 1], |l| l.evaluation())));
        }
        all
    }

    fn runs(&self, program: &str) -> f64 {
        let (windows, nudged) = (self.train.accumulate as f64, 1.0 / self.c.nudge_every as f64);
        match program {
            "free" => windows,
            "nudged" => windows * nudged,
            "update" => nudged,
            "passed" => 1.0 - nudged,
            _ => 0.0,
        }
    }

    fn begin(&mut self, done: u64) -> Result<(), TrainError> {
        // A run that goes on has it in its checkpoints.
        if done == 0 && !self.c.encoder.is_empty() {
            self.encoder = Some(encoder::trained(self, &self.c)?);
        }
        let source = self.text.source(true)?;
        let order = source.order(self.text.seed);
        let (batch, parts) = (self.train.batch, self.train.accumulate);
        self.loader = Some(Loader::new(source, order, batch, done * (batch * parts) as u64, 2 * parts)?);
        self.validation = if self.without_validation()?.is_none() { Some(self.text.source(false)?) } else { None };
        Ok(())
    }

    fn step(&mut self, s: &mut Session, step: u64, rate: f64) -> Result<(), TrainError> {
        if let Some(trained) = self.encoder.take() {
            let own = |name: &String| encoder::is_encoders(name) && s.store.get(name).is_some();
            for name in trained.names().into_iter().filter(own).collect::<Vec<_>>() {
                let (_, shape, bytes) = trained.get(&name).expect("one of its names");
                s.store.set(&name, &Meta::f32(&shape), bytes)?;
            }
        }
        let loader = self.loader.as_mut().expect("begin comes first");
        let batches = (0..self.train.accumulate).map(|_| loader.next()).collect::<Result<Vec<_>, _>>()?;
        let windows = batches.iter().map(|b| self.window(&b.ids, b.first_item)).collect::<Result<Vec<_>, _>>()?;
        self.reports = run(s, self.rates(step, rate), windows.iter())?;
        Ok(())
    }

    fn report(&self, s: &Session) -> Result<Pending, TrainError> {
        Ok(Pending::new(reported(&self.c), s.programs[self.reports].start_read("report", &s.store)?))
    }

    /// The free phase alone, on windows that are not learned from.
    fn evaluate(&mut self, s: &mut Session) -> Result<Evaluation, TrainError> {
        let source = self.validation()?;
        let (items, batch) = (source.len(), self.train.evaluation_batch() as u64);
        let Extent { batches, .. } = self.extent_of(&*source);
        let mut loader = Loader::new(source, None, batch as usize, 0, 2)?;
        let own_program = s.programs.contains_key("eval");
        // The last of a step's windows, whose numbers the next step replaces.
        let last = self.train.accumulate - 1;
        let left = |name: &str| format!("scratch/free.{name}") + &if last == 0 { String::new() } else { format!(".{last}") };
        let probe = if self.c.probe { Probe::new(s, &self.c)? } else { None };
        let mut sums = [("lior", 0.0), ("speed", 0.0)];
        let mut found = FOUND.map(|name| (name, 0.0));
        for i in 0..batches {
            s.go_on()?;
            let b = loader.next()?;
            let window = self.window(&b.ids, b.first_item)?;
            s.run(if own_program { "eval" } else { "free" }, &window.feeds())?;
            // Each item once: those that fill up the last batch do not count.
            let own = (items - i * batch).min(batch) as usize;
            let rows = |name: &str| match own_program {
                true => s.read("eval", name),
                false => Ok(s.store.get(&left(name)).expect("the free phase leaves it").f32()?),
            };
            for (name, sum) in &mut sums {
                *sum += rows(name)?[..own].iter().map(|&v| v as f64).sum::<f64>();
            }
            if let Some(probe) = &probe {
                let follows = window.after.iter().step_by(self.c.after).take(own).copied();
                found.iter_mut().zip(probe.found(&rows("coordinate")?, follows)).for_each(|((_, sum), v)| *sum += v);
            }
        }
        let count = engine::mutant!("lior-evaluates-what-fills-up", items.min(batches * batch), batches * batch) as f64;
        let found = found.into_iter().filter(|_| probe.is_some());
        Ok(Evaluation {
            values: sums.into_iter().chain(found).map(|(name, sum)| (name, sum / count)).collect(),
            confusion: None,
            counted: None,
        })
    }

    fn metrics(&self) -> &'static [Metric] {
        &METRICS[Metric::TEXT.len()..]
    }

    fn extent(&self) -> Result<Option<Extent>, TrainError> {
        match self.without_validation()? {
            Some(_) => Ok(None),
            None => Ok(Some(self.extent_of(&*self.validation()?))),
        }
    }

    fn without_validation(&self) -> Result<Option<String>, TrainError> {
        self.text.without_validation()
    }

    fn limit_evaluation(&mut self, batches: u64) {
        self.train.eval_batches = batches;
    }

    fn epoch(&self) -> Option<u64> {
        self.text.epoch()
    }

    fn work(&self) -> (&'static str, f64) {
        ("windows", self.train.accumulate as f64)
    }

    fn step_name(&self) -> &'static str {
        "window"
    }

    fn period(&self) -> usize {
        self.c.nudge_every as usize
    }

    fn bench_step(&mut self, s: &mut Session, step: u64) -> Result<(), TrainError> {
        let rows = self.train.batch * (self.c.seq + self.c.after);
        let rates = self.rates(step, self.train.learning_rate);
        let draw = |i: usize| (engine::philox::philox([i as u32, 0, 0, 0], [1, 2])[0] as usize % self.c.vocab) as i32;
        let window = self.bench.get_or_insert_with(|| Window::new(&(0..rows).map(draw).collect::<Vec<_>>(), &self.c, &[]));
        let windows = std::iter::repeat_n(&*window, self.train.accumulate);
        self.reports = run(s, rates, windows)?;
        Ok(())
    }

    fn pictures(&self) -> Vec<Picture> {
        let lines = |name: &str, count: usize| (0..count).map(|i| (format!("{name} {i}"), format!("{name}.{i}"))).collect();
        let named = |keys: &[(&str, &str)]| keys.iter().map(|(label, key)| (label.to_string(), key.to_string())).collect();
        vec![
            Picture {
                what: "what is learned, from what, and what it is worth",
                file: "lior.svg",
                panels: vec![
                    ("metric", lines("metric", self.c.n)),
                    ("delta", named(&[("delta", "delta")])),
                    ("found", named(&[("learned", "val_found"), ("initial", "val_found_initial"), ("chance", "val_found_chance")])),
                ],
            },
            Picture {
                what: "LIoR and rotor",
                file: "geometry.svg",
                panels: vec![
                    ("lior", named(&[("free phase", "lior"), ("validation", "val_lior")])),
                    ("rotor (radians)", lines("rotor", self.c.planes())),
                ],
            },
        ]
    }

    fn identity(&self) -> Result<serde_json::Value, TrainError> {
        self.text.identity()
    }

    fn kept(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        self.text.kept()
    }
}
