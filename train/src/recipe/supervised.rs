//! The task of most recipes: a `Model` whose loss is differentiated, with accumulation, clipping, AdamW and evaluation.

use super::{Evaluation, Extent, Metric, Pending, Session, Task, TrainError, sums};
use crate::config::TrainConfig;
use crate::data::{Batch, Loader, Source, positions};
use crate::optim;
use crate::report::Confusion;
use engine::ops::concat::concat;
use engine::philox::rng_feed;
use engine::ranks::Part;
use engine::{DType, Data, Graph, Recorder, Var};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A model whose loss is differentiated: everything else about its training is the same for all. Feeds that it may use: `ids` and
/// `targets` i32 [batch, seq], `weight` f32 `[1]` (1 / targets that count in the whole step), `rng` i32 `[4]`; of rows with several sequences or padding
/// also `until` and `position` i32 [batch, seq] (see `data::Item` and `data::positions`).
pub trait Model {
    fn seq(&self) -> usize;
    /// Records the loss of one micro-batch, then what else is worth reporting; all `[1]`. Over a step's micro-batches each is summed.
    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Losses<'g>;
    /// The same for evaluation. A classifier also outputs `logits` [batch, classes].
    fn evaluate<'g>(&self, r: &'g Recorder, batch: usize) -> Losses<'g> {
        self.loss(r, batch)
    }
    /// See `Task::metrics`.
    fn metrics(&self) -> &'static [Metric] {
        &[Metric::LOSS]
    }
    /// See `Task::settle`.
    fn settle(&self, _free: Option<u64>) {}
    /// One more feed of a micro-batch, for items that `ids` alone cannot describe: its name and bytes. May renumber the ids.
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
    /// Whether its items have attention masks (`until`).
    fn has_places(&self) -> bool {
        false
    }
    /// The first tokens of a row, which are not learned.
    fn prompt(&self) -> usize {
        // As peers/bench.py has it: where rows have places, each is one sequence, and its first quarter a prompt.
        if self.has_places() { self.seq() / 4 } else { 0 }
    }
    /// Feeds of one number, f32 `[1]`, that follow from the step; None in an evaluation.
    fn scalars(&self, _step: Option<u64>) -> Vec<(&'static str, f32)> {
        vec![]
    }
    /// What `seq` counts.
    fn unit(&self) -> &'static str {
        "tok"
    }
    fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError>;
    /// See `Task::without_validation`.
    fn without_validation(&self) -> Result<Option<String>, TrainError> {
        Ok(None)
    }
    /// See `Task::has_test`.
    fn has_test(&self) -> bool {
        false
    }
    /// See `Task::validate_on_test`.
    fn validate_on_test(&mut self) -> bool {
        false
    }
    /// See `Task::makes_own_rows`: whether its sources say how many targets count in an item (`Source::counted`).
    fn makes_own_rows(&self) -> bool {
        false
    }
    /// See `Task::paths`.
    fn paths(&self) -> &'static [(&'static str, &'static str)] {
        &[("data.path", "data")]
    }
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
    fn identity(&self) -> Result<serde_json::Value, TrainError> {
        Ok(serde_json::Value::Null)
    }
    /// See `Task::kept`.
    fn kept(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        Ok(vec![])
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
    /// What is trained on, and the first item; its loader begins with the first step, when programs say which rows of a batch this rank reads.
    source: Option<(Arc<dyn Source>, u64)>,
    loader: Option<Loader>,
    validation: Option<Arc<dyn Source>>,
    names: Vec<&'static str>,
    /// What `bench_step` feeds, made once.
    bench: Vec<Batch>,
}

impl<M: Model> Supervised<M> {
    pub fn new(model: M, config: TrainConfig, seed: u64) -> Supervised<M> {
        Supervised { model, config, seed, source: None, loader: None, validation: None, names: vec![], bench: vec![] }
    }

    fn validation(&self) -> Result<Arc<dyn Source>, TrainError> {
        self.validation.as_ref().map_or_else(|| self.model.source(false), |v| Ok(v.clone()))
    }

    fn extent_of(&self, validation: &dyn Source) -> Extent {
        Extent::new(validation.len(), self.config.evaluation_batch(), self.config.eval_batches, validation.is_endless())
    }

    /// One program where a step is one micro-batch; else one that adds up gradients, and one that applies them.
    fn training_graphs(&self) -> Vec<(&'static str, Graph)> {
        let batch = self.config.batch;
        if self.config.accumulate == 1 {
            return vec![("train", self.step_graph(|r| self.model.loss(r, batch)))];
        }
        let r = Recorder::new();
        let losses = self.model.loss(&r, batch);
        let u = Recorder::new();
        let (own, sums) = sums::parameters(&u, &r.params(), self.config.optimizer);
        let losses: Vec<(&'static str, Var)> = losses.iter().map(|(n, _)| (*n, sums::taken(&u, &format!("sum/{n}"), &[1]))).collect();
        // This program differentiates nothing, so the bf16 pass would have no loss to go by: sums of gradients are f32.
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
        params.iter().zip(&grads).for_each(|((name, _), g)| sums::add(&r, &format!("grad/{name}"), *g));
        losses.iter().for_each(|(name, v)| sums::add(&r, &format!("sum/{name}"), *v));
        r.finish()
    }

    fn finish<'g>(&self, r: &'g Recorder, params: &[(String, Var<'g>)], grads: &[Var<'g>], losses: &[(&'static str, Var<'g>)]) {
        let step = optim::step(r, params, grads, losses[0].1, &self.config);
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
        let scalars = self.model.scalars((program != "eval").then_some(step));
        feeds.extend(scalars.iter().map(|(name, number)| (*name, Data::F32(std::slice::from_ref(number)))));
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
            let program = s.micro(step, m);
            self.micro(s, program, (step, m), (batch, weight), rate, &[])?;
        }
        if let Some((program, feeds)) = also {
            s.run(program, feeds)?;
        }
        s.run("update", &[("rate", Data::F32(&[rate as f32]))])
    }

    /// `Task::step`, and another program in it.
    pub fn step_with(&mut self, s: &mut Session, step: u64, rate: f64, also: Option<Also>) -> Result<(), TrainError> {
        if let Some((source, first)) = self.source.take() {
            let order = source.order(self.seed);
            let rows = (self.config.batch, self.own_rows(s));
            self.loader = Some(Loader::of_rows(source, order, rows, first, 2 * self.config.accumulate)?);
        }
        let loader = self.loader.as_mut().expect("begin comes first");
        let batches = s.span("data", |_| (0..self.config.accumulate).map(|_| loader.next()).collect::<Result<Vec<_>, _>>())?;
        self.run_step(s, step, rate, &batches, also)
    }

    /// The rows of a batch that programs of this rank read: its part where all that read a batch divide it among the same ranks, else all.
    fn own_rows(&self, s: &Session) -> Range<usize> {
        let batch = self.config.batch;
        let mut part: Option<&Part> = None;
        let scalars = self.model.scalars(None);
        for (name, own) in s.programs.iter().filter(|(name, _)| *name != "eval").flat_map(|(_, p)| &p.feeds) {
            match (name.as_str(), &own[..]) {
                ("weight" | "rng" | "rate", _) => {}
                (name, _) if scalars.iter().any(|(scalar, _)| *scalar == name) => {}
                ("ids" | "targets" | "until" | "position", [own]) if own.axis == Some(0) && part.is_none_or(|p| p == own) => {
                    part = Some(own)
                }
                // A feed that the model makes of all ids, or a batch that is read as a whole.
                _ => return 0..batch,
            }
        }
        part.map_or(0..batch, |p| p.index * (batch / p.of)..(p.index + 1) * (batch / p.of))
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
            // Where rows have places, each is one sequence.
            let until = if self.model.has_places() { vec![seq as i32 - 1; n] } else { vec![] };
            let prompt = self.model.prompt();
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

/// A program, and what it is fed in addition to what every program is.
pub type Also<'a> = (&'a str, &'a [(&'a str, Data<'a>)]);

impl<M: Model> Task for Supervised<M> {
    fn train_config(&self) -> &TrainConfig {
        &self.config
    }

    fn graphs(&self) -> Vec<(&'static str, Graph)> {
        let mut all = self.training_graphs();
        let r = Recorder::new();
        for (name, v) in self.model.evaluate(&r, self.config.evaluation_batch()) {
            r.output(name, v);
        }
        all.push(("eval", r.finish()));
        all
    }

    fn runs(&self, program: &str) -> f64 {
        match program {
            "micro" => self.config.accumulate as f64,
            "eval" => 0.0,
            _ => 1.0,
        }
    }

    fn again(&self, program: &str) -> Option<&'static str> {
        (program == "micro").then_some("again")
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
        let items = self.config.batch as u64 * self.config.accumulate as u64;
        let first = engine::mutant!("resume-skips-an-item", done * items, done * items + done.min(1));
        (self.source, self.loader) = (Some((source, first)), None);
        self.validation = if self.without_validation()?.is_none() { Some(self.model.source(false)?) } else { None };
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
        let (items, batch) = (source.len(), self.config.evaluation_batch() as u64);
        let Extent { batches, .. } = self.extent_of(&*source);
        let mut loader = Loader::new(source, None, self.config.evaluation_batch(), 0, 2)?;
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
            if engine::mutant!("masked-batches-are-evaluated", counted == 0, false) {
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
        let mut values: Vec<(&'static str, f64)> = names.into_iter().zip(sums.into_iter().map(|v| v / total)).collect();
        values.extend(Metric::derived(self.model.metrics(), &values));
        Ok(Evaluation { values, confusion, counted: None })
    }

    fn evaluates_with(&self) -> Option<&'static str> {
        Some("eval")
    }

    fn metrics(&self) -> &'static [Metric] {
        self.model.metrics()
    }

    fn extent(&self) -> Result<Option<Extent>, TrainError> {
        match self.without_validation()? {
            Some(_) => Ok(None),
            None => Ok(Some(self.extent_of(&*self.validation()?))),
        }
    }

    fn without_validation(&self) -> Result<Option<String>, TrainError> {
        self.model.without_validation()
    }

    fn has_test(&self) -> bool {
        self.model.has_test()
    }

    fn validate_on_test(&mut self) -> bool {
        self.model.validate_on_test()
    }

    fn limit_evaluation(&mut self, batches: u64) {
        self.config.eval_batches = batches;
    }

    fn epoch(&self) -> Option<u64> {
        self.model.epoch()
    }

    fn makes_own_rows(&self) -> bool {
        self.model.makes_own_rows()
    }

    fn work(&self) -> (&'static str, f64) {
        let examples = self.config.batch * engine::mutant!("work-of-one-micro-batch", self.config.accumulate, 1);
        (self.model.unit(), (examples * self.model.seq()) as f64)
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

    fn identity(&self) -> Result<serde_json::Value, TrainError> {
        self.model.identity()
    }

    fn paths(&self) -> &'static [(&'static str, &'static str)] {
        self.model.paths()
    }

    fn kept(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        self.model.kept()
    }
}

/// The place of the largest number; of equal ones the first, as in `top_k`.
pub fn largest(numbers: &[f32]) -> usize {
    (1..numbers.len()).fold(0, |best, i| if numbers[i] > numbers[best] { i } else { best })
}
