//! A run under way: it steps, logs, evaluates and saves.

use super::best::{self, Best};
use super::folder::{Notes, Place, io, lock, note_saved, save};
use super::show::{draw, epoch_line, indent, progress};
use super::start::Ready;
use super::{END, Finished, Options, Start, draw_confusion, evaluation_line, peak, ranks_json, receipts_json, write_whole};
use crate::config::{Config, TrainConfig};
use crate::data::Loader;
use crate::epochs::Epochs;
use crate::memory::Measured;
use crate::metrics::Metrics;
use crate::nvml;
use crate::optim::schedule::rate;
use crate::profile::Roof;
use crate::recipe::{Evaluation, Metric, Pending, Session, Step, Task, TrainError};
use crate::report::{human_bytes, human_count, human_time};
use crate::timing::{Clock, Timeline, Window};
use crate::{checkpoint, files, say, warn};
use engine::Device;
use indicatif::ProgressBar;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

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
    /// What the last step's evaluation found, where it had one.
    evaluated: Option<Evaluation>,
    best: Best,
    /// Whether the last step's evaluation was better than all before it.
    improved: bool,
    /// The last records of training and validation, for who reads a checkpoint.
    figures: serde_json::Value,
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
        let Ready { session: mut s, from, schedule_steps, epochs, best, commands, name } = ready;
        let c = TrainConfig { horizon: schedule_steps, ..task.train_config().clone() };
        task.begin(start)?;
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
        files::sweep(out, None, Duration::ZERO);
        let checkpoints = options.home().join("checkpoints");
        if checkpoints.is_symlink() && !checkpoints.exists() {
            return Err(TrainError::Other(format!("{} is a link to a folder that is not there", checkpoints.display())));
        }
        if options.start != Start::New && config.ranks.rank() == 0 {
            for aside in checkpoint::set_aside(&checkpoints, from)? {
                say!("set aside: {} (this run no longer goes on from it; remove it when you do not need it)", aside.display());
            }
        }
        write_whole(&out.join("config.toml"), &format!("{}{END}", config.to_toml()))?;
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
        let figures = serde_json::json!({});
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
            evaluated,
            best,
            improved,
            figures,
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
        self.clock.launched(self.done, timeline, Loader::waited() - waited)?;
        for w in self.s.programs.values_mut().filter_map(|p| p.warmed_up()) {
            timeline.changed();
            let runs = if w.runs == 1 { "1 micro-batch".into() } else { format!("{} micro-batches", w.runs) };
            self.bar.suspend(|| say!("step {}: {} is active from here on, after {runs} without it", step + 1, w.pass));
        }
        if std::mem::take(&mut self.s.fell_back) {
            write_receipts(&self.options.out, &self.s)?;
        }
        self.interrupted = self.is_told_to_stop()?;
        let evaluates = self.due(self.c.eval_every) || self.c.eval_every == 0 && self.epochs.as_ref().is_some_and(|e| e.ends(self.done));
        let reports = self.reports(evaluates)?;
        self.evaluated = if evaluates { self.evaluate()? } else { None };
        self.improved = match &self.evaluated {
            Some(e) => self.best.judge(self.done, e, self.task.metrics(), &self.c.best_metric)?,
            None => false,
        };
        let (skipped, seen) = self.log(reports)?;
        self.show_evaluation()?;
        // In fp16 the loss scale falls first, as far as it can.
        if skipped >= MOST_SKIPPED && engine::passes::loss_scale(&self.s.store)?.is_none_or(|(scale, _)| scale <= 1.0) {
            self.metrics.flush()?;
            return Err(TrainError::NotFinite(skipped, seen));
        }
        // A step that was skipped leaves nothing new to keep, and must not push a good checkpoint out.
        if (self.due(self.c.save_every) && skipped == 0) || self.done == self.c.steps || self.ends() || self.improved && self.c.keep_best {
            self.save()?;
            self.clock.pause();
        }
        if evaluates {
            self.clock.pause();
        }
        Ok(())
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
        at.is_multiple_of(self.c.log_every) || at == self.c.steps || at == self.done && evaluated || report.skipped_in_row > 0
    }

    /// Figures of a part of the set would be others: nothing where a signal stopped it. The step itself is whole.
    fn evaluate(&mut self) -> Result<Option<Evaluation>, TrainError> {
        match self.s.span("evaluation", |s| s.averaged(|s| self.task.evaluate(s))) {
            Err(TrainError::Stopped) => {
                self.interrupted = true;
                Ok(None)
            }
            found => found.map(Some),
        }
    }

    /// Writes records of these reports; of the last, how many steps in a row were skipped, and which step it is of.
    fn log(&mut self, reports: Vec<Reported>) -> Result<(u64, u64), TrainError> {
        let mut last = (0, self.done);
        if !reports.is_empty() {
            self.place.check(self.done)?;
        }
        for Reported { at, report, window } in reports {
            last = (report.skipped_in_row, at);
            if self.is_recorded(at, &report, self.evaluated.is_some()) {
                self.record(at, &report, &window)?;
            }
        }
        Ok(last)
    }

    fn record(&mut self, at: u64, report: &Step, window: &Window) -> Result<(), TrainError> {
        let mut values = report.values.clone();
        if let Some(e) = &mut self.epochs {
            e.add(at, values.clone());
            values.push(("epoch".into(), e.after(at)));
        }
        values.push(("learning_rate".into(), rate(&self.c, at - 1)));
        values.extend(self.speed(window));
        values.extend(Measured::of(&self.s.device).metrics());
        let evaluated = self.evaluated.as_ref().filter(|_| at == self.done);
        for (name, value) in evaluated.into_iter().flat_map(|e| &e.values) {
            values.extend(self.epochs.as_ref().and_then(|e| e.mean(name)).map(|mean| (format!("epoch_{name}"), mean)));
            values.push((format!("val_{name}"), *value));
        }
        self.metrics.record(at, &values.iter().map(|(n, v)| (n.as_str(), *v)).collect::<Vec<_>>())?;
        self.figures["training"] = noted(at, report.values.iter().map(|(n, v)| (n.as_str(), *v)));
        if let Some(e) = &self.evaluated {
            self.figures["validation"] = noted(at, e.values.iter().copied());
        }
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
        Ok(())
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

    /// Model FLOPs utilisation: the share of the device's dense bf16 peak that the model's own arithmetic is.
    fn mfu(&self, w: &Window) -> Option<f64> {
        self.most.map(|most| w.flops / w.time.as_secs_f64().max(1e-9) / most)
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
            self.bar
                .suspend(|| say!("(each validation reads {}; train.eval_batches = {} is the most)", extent.line(), self.c.eval_batches));
        }
        Ok(())
    }

    fn save(&mut self) -> Result<(), TrainError> {
        let _range = engine::cuda::nvtx::range("saving");
        self.metrics.flush()?;
        self.place.check(self.done)?;
        let notes = Notes { step: self.done, best: &self.best, figures: &self.figures, commands: &self.commands };
        for problem in save(&self.s, self.task, self.config, &self.c, &self.checkpoints, &notes)?.left {
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

    /// Draws and says what has become of it.
    pub fn finish(mut self, started: Instant) -> Result<Finished, TrainError> {
        self.bar.finish_and_clear();
        let (out, done) = (&self.options.out, self.done);
        let drawn = draw(self.task, out, &self.name, self.task.floor())?;
        if self.interrupted && (done < self.c.steps || self.evaluated.is_none()) {
            let (program, ranks) = (crate::program(), &self.config.ranks);
            // Under another launcher the same command of the launcher goes on.
            let flags = match (ranks.size(), ranks.tensor.size) {
                _ if !crate::launch::is_started_by_ranks() => String::new(),
                (n, 1) => format!(" --ranks {n}"),
                (n, t) => format!(" --ranks {n} --tensor {t}"),
            };
            match done < self.c.steps {
                true => say!("stopped after step {done}, saved; go on with: {program} train --out {} --resume{flags}", out.display()),
                false => say!("stopped in the last validation, saved; its figures come from: {program} eval {}", out.display()),
            }
            return Ok(Finished { step: done, interrupted: true });
        }
        match self.s.averaged(|s| self.task.show(s)) {
            Ok(Some(text)) => {
                say!("\na sample of what the model writes:\n{}\n", indent(&text));
                super::note_sample(out, done, &text)?;
            }
            Ok(None) => {}
            // The other ranks would wait for this one.
            Err(e) if self.config.ranks.size() > 1 => return Err(e),
            Err(e) => say!("no sample: {e}"),
        }
        if let Some(Evaluation { values, confusion, .. }) = &self.evaluated {
            say!("validation {}", evaluation_line(values, self.task.metrics(), self.task.floor()));
            if let Some(confusion) = confusion {
                let path = out.join("confusion.png");
                match draw_confusion(confusion, &self.name, done, &path)? {
                    true => say!("confusion matrix {}", path.display()),
                    false => say!("no confusion matrix: too many classes to draw"),
                }
            }
        }
        for p in drawn {
            say!("{} {}", p.what, out.join(p.file).display());
        }
        if done < self.c.steps {
            let (best, since) = (self.best.line(self.task.metrics()), self.best.since);
            say!("stopped early after step {done}, saved: {since} evaluations in a row were not better than {best} (train.patience)");
        }
        say!("checkpoint {}", self.checkpoints.join(format!("step-{done:08}")).display());
        if self.c.keep_best && self.best.at.as_ref().is_some_and(|at| at.0 < done) {
            say!("best checkpoint {} ({})", out.join("best").display(), self.best.line(self.task.metrics()));
        }
        if let Some((scale, overflowed)) = engine::passes::loss_scale(&self.s.store)? {
            let what = if overflowed == 1.0 {
                "micro-batch overflowed, and its step was"
            } else {
                "micro-batches overflowed, and their steps were"
            };
            say!("fp16: the loss scale is {scale}; {overflowed} {what} skipped");
        }
        self.clock.up_to(done)?;
        if let Some(line) = self.clock.slow_line() {
            say!("{line}");
        }
        say!("planned peak {}, measured {}", human_bytes(peak(&self.s).total() as u64), Measured::of(&self.s.device).line());
        say!("done in {}", human_time(started.elapsed()));
        Ok(Finished { step: done, interrupted: false })
    }
}

/// What every pass did in each program; of several ranks, also what connects them (`ranks`, which is no program).
fn write_receipts(out: &Path, s: &Session) -> Result<(), TrainError> {
    let mut all = receipts_json(s);
    if let Some(ranks) = ranks_json(&s.switches.ranks) {
        all["ranks"] = ranks;
    }
    write_whole(&out.join("receipts.json"), &serde_json::to_string_pretty(&all).expect("plain values"))
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
