//! A run under way: it steps, logs, evaluates and saves.

mod finish;

use super::best::{self, Best};
use super::folder::{Notes, Place, io, lock, note_saved, save};
use super::show::{epoch_line, progress};
use super::skips::Skips;
use super::start::Ready;
use super::{END, Options, Start, evaluation_line, ranks_json, receipts_json, write_own};
use crate::config::{Config, TrainConfig};
use crate::data::Loader;
use crate::epochs::Epochs;
use crate::memory::Measured;
use crate::metrics::Metrics;
use crate::nvml;
use crate::optim::schedule::rate;
use crate::profile::Roof;
use crate::recipe::{Bad, Evaluation, Metric, Pending, Session, Step, Task, TrainError};
use crate::report::human_count;
use crate::timing::{Clock, Timeline, Window};
use crate::{checkpoint, files, say, warn};
use engine::Device;
use indicatif::ProgressBar;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// So many steps in a row with a loss or gradient that is not finite stop the run.
const MOST_SKIPPED: u64 = 10;

pub struct Run<'a> {
    task: &'a mut dyn Task,
    config: &'a Config,
    options: &'a Options,
    c: TrainConfig,
    /// Recipe and preset.
    name: String,
    s: Session,
    /// Steps before this process: one of the planted errors takes them.
    #[cfg_attr(not(feature = "mutants"), expect(dead_code))]
    start: u64,
    /// Steps in all.
    pub done: u64,
    /// Whether a signal told it to stop.
    pub interrupted: bool,
    epochs: Option<Epochs>,
    /// Whether there is anything to evaluate on.
    validates: bool,
    /// What the last step's evaluation found, where it had one.
    evaluated: Option<Evaluation>,
    best: Best,
    /// Whether the last step's evaluation was better than all before it.
    improved: bool,
    /// The last reports of training and validation, for who reads a checkpoint.
    figures: serde_json::Value,
    /// What the last report is recorded with, but for an evaluation.
    values: Values,
    /// Whether the checkpoint that it goes on from lacks the evaluation of its step.
    owes: bool,
    skips: Skips,
    commands: Vec<String>,
    extent_said: bool,
    metrics: Metrics,
    clock: Clock,
    /// FLOP/s that the device does at most in bf16 without sparsity, where that is known.
    most: Option<f64>,
    nvml: Option<nvml::Watch>,
    /// A report that is only written down is waited for when the next step has been started.
    open: Option<Awaited>,
    bar: ProgressBar,
    place: Place<'a>,
    _lock: fs::File,
    checkpoints: PathBuf,
    /// Problems of saving that were said.
    warned: HashSet<String>,
    /// Whether the run's folder notes that there is a checkpoint.
    saved: bool,
}

impl<'a> Run<'a> {
    /// Takes the run's folder, and writes what is known before the first step.
    pub fn begin(task: &'a mut dyn Task, config: &'a Config, options: &'a Options, ready: Ready) -> Result<Run<'a>, TrainError> {
        let start = ready.done();
        let Ready { session: mut s, from, schedule_steps, epochs, best, commands, name, owes, values, figures, .. } = ready;
        let c = TrainConfig { horizon: schedule_steps, ..task.train_config().clone() };
        task.begin(start)?;
        let validates = task.without_validation()?.is_none();
        options.preparing.store(false, Ordering::SeqCst);
        let out: &Path = &options.out;
        say!("steps {start} to {} of a {} schedule over {schedule_steps}; run folder {}", c.steps, c.schedule, out.display());
        if c.steps > schedule_steps {
            let (from, rate) = (schedule_steps.max(start), rate(&c, schedule_steps.max(start)));
            say!(
                "the schedule ends at step {schedule_steps}: from step {from} on the learning rate is {rate:.3e} (train.horizon is its length)"
            );
        }

        if c.ema > 0.0 {
            say!("validation and samples use weights averaged over steps (train.ema = {})", c.ema);
        }

        files::create_folder(out).map_err(io("cannot create the run's folder", out))?;
        let _lock = lock(out)?;
        let place = Place::of(out)?;
        files::sweep_run(out);
        let checkpoints = options.home().join("checkpoints");
        if checkpoints.is_symlink() && !checkpoints.exists() {
            return Err(TrainError::Other(format!("{} is a link to a folder that is not there", checkpoints.display())));
        }
        if options.start != Start::New && config.ranks.rank() == 0 {
            for aside in checkpoint::set_aside(&checkpoints, from)? {
                say!("set aside: {} (this run no longer goes on from it; remove it when you do not need it)", aside.display());
            }
        }
        write_own(out, "config.toml", format!("{}{END}", config.to_toml()))?;
        write_receipts(out, &s)?;
        note_saved(out, from.is_some())?;
        let kept = if c.keep_best { best.clone() } else { Best::default() };
        if !best::mark(out, &kept)? {
            warn!("{} is no link to a checkpoint: it stays as it is (--best finds the run's best one)", out.join("best").display());
        }
        let metrics = Metrics::open(out)?;
        let (bar, clock, nvml) = (progress(c.steps, start), Clock::new(&s.device), nvml::Watch::start(&s.device));
        s.timeline = Some(Timeline::default());
        let most = peak_flops(&s.device);
        let (evaluated, open, warned, saved) = (None, None, HashSet::new(), from.is_some());
        let (done, interrupted, extent_said, improved) = (start, false, false, false);
        let skips = Skips::new(engine::mutant!(
            "skips-before-a-resume-count-again",
            s.store.get("adam.skipped").map_or(Ok(0.0), |t| t.f32().map(|n| n[0]))? as u64,
            0
        ));
        Ok(Run {
            task,
            config,
            options,
            c,
            name,
            s,
            start,
            done,
            interrupted,
            epochs,
            validates,
            evaluated,
            best,
            improved,
            figures,
            values,
            owes,
            skips,
            commands,
            extent_said,
            metrics,
            clock,
            most,
            nvml,
            open,
            bar,
            place,
            _lock,
            checkpoints,
            warned,
            saved,
        })
    }

    /// One step, and everything that is due after it.
    pub fn step(&mut self) -> Result<(), TrainError> {
        let step = self.done;
        self.clock.begin(self.s.timeline.get_or_insert_default())?;
        let waited = Loader::waited();
        self.task.step(
            &mut self.s,
            engine::mutant!("resume-draws-from-the-start", step, step - self.start),
            rate(&self.c, engine::mutant!("rate-of-the-next-step", step, step + 1)),
        )?;
        self.done = step + 1;
        let timeline = self.s.timeline.get_or_insert_default();
        self.clock.launched(self.done, timeline, Loader::waited() - engine::mutant!("waits-of-all-steps", waited, Duration::ZERO))?;
        for w in self.s.programs.values_mut().filter_map(|p| p.warmed_up()) {
            timeline.changed();
            let runs = if w.runs == 1 { "1 micro-batch".into() } else { format!("{} micro-batches", w.runs) };
            self.bar.suspend(|| say!("step {}: {} is active from here on, after {runs} without it", step + 1, w.pass));
        }
        if std::mem::take(&mut self.s.fell_back) {
            write_receipts(&self.options.out, &self.s)?;
        }
        self.interrupted = self.is_told_to_stop()?;
        let evaluates = self.validates && evaluates_at(&self.c, self.epochs.as_ref(), self.done);
        let reports = self.reports(evaluates)?;
        self.evaluated = None;
        engine::mutant!("every-step-after-the-best-is-saved", self.improved = false, ());
        if evaluates {
            self.evaluate()?;
        }
        let last = self.log(reports)?;
        self.show_evaluation()?;
        if let Some(row) = self.skips.up_to(last).filter(|row| row.skipped >= MOST_SKIPPED)
            && !self.scale_falls()?
        {
            self.metrics.flush()?;
            return Err(row.error());
        }
        let is_skipped = self.skips.up_to(self.done).is_some();
        // A step that was skipped leaves nothing new to keep.
        if (self.due(self.c.save_every) && !is_skipped) || self.done == self.c.steps || self.ends() || self.improved && self.c.keep_best {
            self.save()?;
            engine::mutant!("saving-counts-as-a-step", self.clock.pause(), ());
        }
        if evaluates {
            self.clock.pause();
        }
        Ok(())
    }

    /// Where a signal came in the way of the evaluation of the step that it goes on from: that evaluation, as if nothing had been.
    pub fn make_up(&mut self) -> Result<(), TrainError> {
        if !std::mem::take(&mut self.owes) {
            return Ok(());
        }
        self.evaluate()?;
        if self.evaluated.is_some() {
            self.record(self.done, self.values.clone())?;
            self.show_evaluation()?;
        }
        // The checkpoint of this step notes what is best, and that nothing is missing.
        engine::mutant!("made-up-for-and-not-saved", self.save()?, ());
        self.clock.pause();
        Ok(())
    }

    /// In fp16, gradients that overflow are no mistake as long as the loss scale can fall.
    fn scale_falls(&self) -> Result<bool, TrainError> {
        Ok(engine::passes::loss_scale(&self.s.store)?.is_some_and(|(scale, _)| scale > 1.0))
    }

    /// Why the run would be no success if this step were its last.
    fn problem(&self) -> Result<Option<TrainError>, TrainError> {
        if let Some(row) = self.skips.up_to(self.done)
            && !(row.loss_is_finite && self.scale_falls()?)
            && engine::mutant!("nan-at-the-end-is-a-success", true, false)
        {
            return Ok(Some(row.error()));
        }
        let Some(e) = &self.evaluated else { return Ok(None) };
        let decides = Best::by(e, self.task.metrics(), &self.c.best_metric).map(|(name, value, _)| (name, value));
        let bad = e
            .values
            .first()
            .copied()
            .into_iter()
            .chain(decides)
            .find(|v| engine::mutant!("nan-of-validation-is-a-success", !v.1.is_finite(), false));
        Ok(bad.map(|(name, value)| TrainError::BadValidation(Bad { step: self.done, name: format!("val_{name}"), value })))
    }

    /// All ranks stop after the same step: they agree where they wait for each other anyway.
    fn is_told_to_stop(&self) -> Result<bool, TrainError> {
        let (own, ranks) = (self.options.stop.load(Ordering::Relaxed), &self.config.ranks);
        if ranks.size() == 1 {
            return Ok(own);
        }
        match self.due(self.c.log_every) || self.due(self.c.eval_every.max(1)) || self.due(self.c.save_every) {
            true => Ok(ranks.gather(&[own as u8])?.iter().any(|told| *told == [1])),
            false => Ok(false),
        }
    }

    /// Whether it ends before its last step: by a signal, or because nothing gets better.
    pub fn ends(&self) -> bool {
        self.interrupted || self.best.is_over(&self.c)
    }

    /// After every so many steps, and after the last.
    fn due(&self, every: u64) -> bool {
        self.done.is_multiple_of(every) || self.done == self.c.steps
    }

    /// The reports that are there by now, or must be waited for.
    fn reports(&mut self, evaluates: bool) -> Result<Vec<Reported>, TrainError> {
        let mut reports = vec![];
        if let Some(awaited) = self.open.take() {
            reports.push(self.wait_for(awaited, evaluates)?);
        }
        self.bar.set_position(self.done);
        let stops = evaluates || self.due(self.c.save_every) || self.interrupted;
        if stops || self.due(self.c.log_every) {
            let awaited = Awaited { at: self.done, report: self.task.report(&self.s)? };
            match stops || awaited.report.is_there() {
                true => reports.push(self.wait_for(awaited, evaluates)?),
                false => self.open = Some(awaited),
            }
        }
        Ok(reports)
    }

    fn wait_for(&mut self, awaited: Awaited, evaluates: bool) -> Result<Reported, TrainError> {
        let (at, report) = (awaited.at, awaited.report.finish()?);
        let window = if self.is_recorded(at, &report, evaluates) { self.clock.up_to(at)? } else { Window::default() };
        Ok(Reported { at, report, window })
    }

    fn is_recorded(&self, at: u64, report: &Step, evaluated: bool) -> bool {
        at.is_multiple_of(self.c.log_every)
            || at == self.c.steps
            || at == self.done && evaluated
            || engine::mutant!("skipped-steps-are-not-recorded", report.skipped_in_row > 0, false)
    }

    /// Figures of a part of the set would be others: nothing where a signal stopped it. The step itself is whole.
    fn evaluate(&mut self) -> Result<(), TrainError> {
        self.evaluated = match self.s.span("evaluation", |s| s.averaged(|s| self.task.evaluate(s))) {
            Err(TrainError::Stopped) => {
                self.interrupted = true;
                None
            }
            found => Some(found?),
        };
        self.improved = match &self.evaluated {
            Some(e) => self.best.judge(self.done, e, self.task.metrics(), &self.c.best_metric)?,
            None => false,
        };
        Ok(())
    }

    /// Writes records of these reports, and shows which steps were skipped; the step of the last report.
    fn log(&mut self, reports: Vec<Reported>) -> Result<u64, TrainError> {
        let mut last = 0;
        if !reports.is_empty() {
            self.place.check(self.done)?;
        }
        for Reported { at, report, window } in reports {
            last = at;
            if let Some(line) = self.skips.take(at, &report) {
                let scale = engine::passes::loss_scale(&self.s.store)?;
                let scale = scale.map_or(String::new(), |(scale, _)| format!("; the loss scale is {scale} now"));
                self.bar.suspend(|| say!("{line}{scale}"));
            }
            self.figures["training"] = noted(at, report.values.iter().map(|(n, v)| (n.as_str(), *v)));
            self.values = self.valued(at, &report, &window);
            if self.is_recorded(at, &report, self.evaluated.is_some()) {
                self.record(at, self.values.clone())?;
                self.show_step(at, &report, &window);
            }
        }
        Ok(last)
    }

    /// What is recorded of a report.
    fn valued(&self, at: u64, report: &Step, window: &Window) -> Values {
        let mut values = report.values.clone();
        values.extend(self.epochs.as_ref().map(|e| ("epoch".into(), e.after(at))));
        values.push(("learning_rate".into(), rate(&self.c, at - 1)));
        values.extend(self.speed(window));
        values.extend(Measured::of(&self.s.device).metrics());
        values
    }

    /// Records these values of a step, and the evaluation where it is of this step.
    fn record(&mut self, at: u64, mut values: Values) -> Result<(), TrainError> {
        if let Some(e) = &mut self.epochs {
            e.add(at, values.clone());
        }
        let this = engine::mutant!("validation-of-an-earlier-step", at == self.done, true);
        if let Some(e) = self.evaluated.as_ref().filter(|_| this) {
            for (name, value) in &e.values {
                values.extend(self.epochs.as_ref().and_then(|e| e.mean(name)).map(|mean| (format!("epoch_{name}"), mean)));
                values.push((format!("val_{name}"), *value));
            }
            self.figures["validation"] = noted(at, e.values.iter().copied());
        }
        Ok(self.metrics.record(at, &values.iter().map(|(n, v)| (n.as_str(), *v)).collect::<Vec<_>>())?)
    }

    /// The line of a step, on the screen or in the bar.
    fn show_step(&self, at: u64, report: &Step, window: &Window) {
        let (name, value) = &report.values[0];
        let value = Metric::shown(self.task.metrics(), name, *value);
        let (unit, each) = self.task.work();
        let mfu = self.mfu(window).map_or(String::new(), |mfu| format!("  {:.1}% MFU", 100.0 * mfu));
        let line = format!("{name} {value}  {} {unit}/s{mfu}", human_count(each * window.steps_per_second()));
        let steps = self.c.steps;
        if self.bar.is_hidden() && (at.is_multiple_of((steps / 20).max(self.c.log_every)) || at == steps) {
            say!("step {at}/{steps}  {line}");
        }
        self.bar.set_message(line);
    }

    /// How fast the steps since the last record were, and what they waited for.
    fn speed(&self, w: &Window) -> Vec<(String, f64)> {
        let mut values = vec![
            ("per_second".to_string(), self.task.work().1 * w.steps_per_second()),
            ("step_ms".into(), w.ms(w.time)),
            ("data_wait_ms".into(), w.ms(w.waited)),
            ("slow_steps".into(), self.clock.slow() as f64),
        ];
        let mut phases = BTreeMap::<&str, Duration>::new();
        for (program, time) in &w.phases {
            *phases.entry(self.task.phase(program)).or_default() += *time;
        }
        if phases.len() > 1 {
            values.extend(phases.iter().map(|(phase, time)| (format!("phase_ms.{phase}"), w.ms(*time))));
        }
        values.extend(self.mfu(w).map(|mfu| ("mfu".into(), mfu)));
        values.extend(self.nvml.iter().flat_map(nvml::Watch::metrics));
        values
    }

    fn mfu(&self, w: &Window) -> Option<f64> {
        self.most.map(|most| w.mfu(most))
    }

    fn show_evaluation(&mut self) -> Result<(), TrainError> {
        let Some(Evaluation { values, .. }) = &self.evaluated else { return Ok(()) };
        let (now, metrics) = (self.done, self.task.metrics());
        let found = evaluation_line(values, metrics, self.task.floor());
        self.bar.suspend(|| match &self.epochs {
            Some(e) => say!("epoch {} (step {now}): training {}; validation {found}", e.shown(now), epoch_line(e, values, metrics)),
            None => say!("step {now}: {found}"),
        });
        if !std::mem::replace(&mut self.extent_said, true)
            && let Some(extent) = self.task.extent()?
        {
            let most = match self.c.eval_batches {
                0 => String::new(),
                n => format!("; train.eval_batches = {n} is the most"),
            };
            self.bar.suspend(|| say!("(each validation reads {}{most})", extent.line()));
        }
        Ok(())
    }

    fn save(&mut self) -> Result<(), TrainError> {
        let _range = engine::cuda::nvtx::range("saving");
        engine::mutant!("a-checkpoint-without-its-records", self.metrics.flush()?, ());
        self.place.check(self.done)?;
        let problem = self.problem()?.map(|e| e.to_string());
        let (best, figures, values, commands) = (&self.best, &self.figures, &self.values, &self.commands[..]);
        let notes = Notes { step: self.done, best, figures, values, problem: problem.as_deref(), commands };
        // After a skipped step the weights are those of a step before: no reason to give up another checkpoint.
        let is_skipped = engine::mutant!("skipped-steps-push-checkpoints-out", self.skips.up_to(self.done).is_some(), false);
        let c = TrainConfig { keep: if is_skipped { 0 } else { self.c.keep }, ..self.c.clone() };
        for problem in save(&self.s, self.task, self.config, &c, &self.checkpoints, &notes)?.left {
            // The same at every save: said once.
            if self.warned.insert(problem.to_string()) {
                self.bar.suspend(|| warn!("warning: {problem} (the run goes on; remove it by hand)"));
            }
        }
        if !std::mem::replace(&mut self.saved, true) {
            note_saved(&self.options.out, true)?;
        }
        if self.improved && self.c.keep_best && self.config.ranks.rank() == 0 {
            best::mark(&self.options.out, &self.best)?;
        }
        Ok(())
    }
}

/// What every pass did in each program; of several ranks, also what connects them (`ranks`, which is no program).
fn write_receipts(out: &Path, s: &Session) -> Result<(), TrainError> {
    let mut all = receipts_json(s);
    if let Some(ranks) = ranks_json(&s.switches.ranks) {
        all["ranks"] = ranks;
    }
    write_own(out, "receipts.json", serde_json::to_string_pretty(&all).expect("plain values"))
}

/// Names and values, in the order of a record.
pub type Values = Vec<(String, f64)>;

/// Whether a run evaluates after this step, if it has anything to evaluate on.
pub fn evaluates_at(c: &TrainConfig, epochs: Option<&Epochs>, step: u64) -> bool {
    step.is_multiple_of(c.eval_every) || step == c.steps || c.eval_every == 0 && epochs.is_some_and(|e| e.ends(step))
}

/// Values of a step, for a checkpoint.
fn noted<'a>(step: u64, values: impl Iterator<Item = (&'a str, f64)>) -> serde_json::Value {
    let all = values.map(|(name, value)| (name.to_string(), value.into()));
    serde_json::Value::Object(all.chain([("step".to_string(), step.into())]).collect())
}

/// A step's report on its way.
struct Awaited {
    at: u64,
    report: Pending,
}

/// What MFU is measured against; said once.
fn peak_flops(device: &Device) -> Option<f64> {
    let name = device.gpu()?.name();
    let roof = Roof::of_card(name).and_then(|roof| Some((roof.half?, roof.from)));
    match &roof {
        Some((most, from)) => say!("MFU is against {:.0} TFLOP/s of bf16 ({from})", most / 1e12),
        None => say!("MFU unknown: the peak of {name} is not in kiln's table"),
    }
    roof.map(|r| r.0)
}

/// A report that came, and the time of the steps since the last record.
struct Reported {
    at: u64,
    report: Step,
    window: Window,
}
