//! The only training loop: steps, evaluation, metrics, checkpoints, and how it stops.

use crate::checkpoint::{self, Checkpoint, Saved, Skipped, Tensor};
use crate::config::{Config, TrainConfig};
use crate::epochs::Epochs;
use crate::files;
use crate::memory;
use crate::metrics::{self, Metrics};
use crate::optim::schedule::rate;
use crate::recipe::{Evaluation, Pending, Picture, Session, Step, Task, TrainError, is_kept};
use crate::report::{self, Confusion, Panel, Series, human_bytes, human_count, human_time, table};
use crate::speed::Speed;
use crate::{say, warn};
use engine::passes::Receipt;
use engine::{Compiled, Device, PASSES, Role, Switches};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use std::collections::HashSet;
use std::fs;
use std::io::IsTerminal;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// So many steps in a row with a loss or gradient that is not finite stop the run.
const MOST_SKIPPED: u64 = 10;

/// Keys that a resumed run may change: none of them touches a number before the step at which it is changed.
const FREE: &[&str] = &["train.steps", "train.log_every", "train.eval_every", "train.eval_batches", "train.save_every", "train.keep"];

/// Paths that a resumed run may change where what lies there is the same: the key, and what a checkpoint's identity has of it.
const MOVED: &[(&str, &str)] = &[("data.path", "data"), ("model.base", "base"), ("objective.encoder", "encoder")];

#[derive(Default)]
pub struct Options {
    pub out: PathBuf,
    pub start: Start,
    /// Shows every pass, also those with nothing to do.
    pub verbose: bool,
    /// Set by a signal: finish the step, save, stop.
    pub stop: Arc<AtomicBool>,
    /// Set by who calls, cleared before anything is written: until then the process may be ended at any moment, and nothing is lost.
    pub preparing: Arc<AtomicBool>,
}

/// Where a run begins.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Start {
    /// At the first step, in a folder without a run.
    #[default]
    New,
    /// At the run's newest whole checkpoint; at the first step where it has saved none yet.
    Newest,
    /// At this checkpoint. Later ones are set aside.
    From(PathBuf),
    /// At the first step. All checkpoints are set aside.
    Over,
}

/// How a run ended.
pub struct Finished {
    pub step: u64,
    pub interrupted: bool,
}

/// A task with its programs loaded.
pub fn load(task: &dyn Task, config: &Config, device: &Device) -> Result<Session, TrainError> {
    load_with(task, &config.switches()?, config.seed(), device)
}

pub fn load_with(task: &dyn Task, switches: &Switches, seed: u64, device: &Device) -> Result<Session, TrainError> {
    let compiled = compile(task, switches, device)?;
    fits(task, &compiled, switches, device)?;
    let mut s = Session::new(device, switches, seed);
    for (name, c) in compiled {
        s.load_compiled(name, c)?;
    }
    engine::passes::all_applied(s.programs.values().map(|p| &p.receipts[..]))?;
    task.prepare(&mut s)?;
    Ok(s)
}

type Programs = Vec<(&'static str, Compiled)>;

fn compile(task: &dyn Task, switches: &Switches, device: &Device) -> Result<Programs, TrainError> {
    task.settle(memory::available(device));
    task.graphs().into_iter().map(|(name, graph)| Ok((name, Compiled::new(graph, switches, device.target())?))).collect()
}

/// Bytes of state, and of everything else.
fn needs(programs: &Programs, device: &Device) -> (u64, u64) {
    let most = |f: fn(&engine::plan::Memory) -> usize| programs.iter().map(|(_, c)| f(&c.plan.memory)).max().unwrap_or(0) as u64;
    (most(|m| m.state), most(|m| m.activations + m.workspace) + device.own_memory() as u64)
}

/// Refuses what the machine has no memory for, before taking any; and names switches with which it would fit.
fn fits(task: &dyn Task, programs: &Programs, switches: &Switches, device: &Device) -> Result<(), TrainError> {
    let (state, arena) = needs(programs, device);
    let Some(free) = memory::available(device) else { return Ok(()) };
    if state.saturating_add(arena) <= free {
        return Ok(());
    }
    let gpu = matches!(device, Device::Cuda(..));
    let sets: [&[(&str, &str)]; 5] = [
        &[("bf16", "auto")],
        &[("recompute", "auto,what=memory-bound")],
        &[("recompute", "auto,what=blocks")],
        &[("bf16", "auto"), ("recompute", "auto,what=memory-bound")],
        &[("bf16", "auto"), ("recompute", "auto,what=blocks")],
    ];
    let mut ways = vec![];
    for set in sets.into_iter().filter(|set| gpu || set.iter().all(|s| s.0 != "bf16")) {
        let mut with = switches.clone();
        set.iter().try_for_each(|(pass, value)| with.set(pass, value))?;
        let (state, arena) = needs(&compile(task, &with, device)?, device);
        if state.saturating_add(arena) <= free {
            let flags: Vec<String> = set.iter().map(|(pass, value)| format!("--pass {pass}={value}")).collect();
            ways.push(format!("{} (needs {})", flags.join(" "), human_bytes(state + arena)));
        }
    }
    let fit = match ways.is_empty() {
        true => "no switch makes it fit".to_string(),
        false => format!("it fits with {}", ways.join(", or ")),
    };
    Err(TrainError::Memory {
        needs: human_bytes(state.saturating_add(arena)),
        state: human_bytes(state),
        arena: human_bytes(arena),
        free: human_bytes(free),
        fit,
    })
}

/// What every pass did, over all programs: the start-up table. Those that found nothing to do are counted below it, or shown too (`all`).
pub fn receipts_table(receipts: &[(&str, &[Receipt])], all: bool) -> String {
    let (mut rows, mut off, mut idle) = (vec![], 0, 0);
    for pass in PASSES {
        let own: Vec<&Receipt> = receipts.iter().flat_map(|(_, r)| r.iter()).filter(|r| r.pass == pass.name()).collect();
        let applied: usize = own.iter().map(|r| r.applied).sum();
        let declined: usize = own.iter().map(|r| r.declined.len()).sum();
        let mode = own.first().map_or("off", |r| r.mode.name());
        let mut notes: Vec<String> = own.iter().map(|r| r.summary()).filter(|s| !s.is_empty()).collect();
        notes.dedup();
        let is_off = mode == "off";
        if applied + declined == 0 && !all {
            *(if is_off { &mut off } else { &mut idle }) += 1;
            continue;
        }
        let count = |n: usize| if is_off { "-".to_string() } else { n.to_string() };
        rows.push(vec![
            pass.name().into(),
            mode.into(),
            count(applied + declined),
            count(applied),
            count(declined),
            notes.first().cloned().unwrap_or_default(),
        ]);
    }
    let mut text = table(&["pass", "mode", "sites", "applied", "declined", "notes"], &rows);
    if !all && off + idle > 0 {
        text += &format!("{} more passes: {idle} have no site here, {off} are off (-v shows them)\n", off + idle);
    }
    text
}

pub fn receipts_json(s: &Session) -> serde_json::Value {
    let one = |r: &Receipt| json!({ "pass": r.pass, "mode": r.mode.name(), "sites": r.sites(), "applied": r.applied, "declined": r.declined, "notes": r.notes });
    let all = s.programs.iter().map(|(name, p)| (name.clone(), p.receipts.iter().map(one).collect::<Vec<_>>()));
    serde_json::Value::Object(all.map(|(n, r)| (n, json!(r))).collect())
}

/// Bytes that a session's programs take at most: state once, the largest arena, everything else of each.
pub fn peak(s: &Session) -> Peak {
    let most = |f: fn(&engine::plan::Memory) -> usize| s.programs.values().map(|p| f(&p.memory)).max().unwrap_or(0);
    let largest = s.programs.values().map(|p| p.memory).max_by_key(|m| m.activations + m.workspace).unwrap_or_default();
    let constants: usize = s.programs.values().map(|p| p.memory.constants).sum();
    let workspace = largest.workspace + s.device.own_memory();
    Peak { state: s.store.bytes(), activations: largest.activations, workspace, tables: constants + most(|m| m.feeds) }
}

pub struct Peak {
    pub state: usize,
    pub activations: usize,
    pub workspace: usize,
    pub tables: usize,
}

impl Peak {
    pub fn total(&self) -> usize {
        self.state + self.activations + self.workspace + self.tables
    }

    pub fn line(&self) -> String {
        let h = |b: usize| human_bytes(b as u64);
        let (total, state, activations, workspace) = (h(self.total()), h(self.state), h(self.activations), h(self.workspace));
        format!(
            "peak {total}: state {state}, activations {activations}, workspace {workspace}, tables and feeds {} (planned)",
            h(self.tables)
        )
    }
}

fn io(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> TrainError {
    let path = path.to_path_buf();
    move |cause| TrainError::Io { action, path: path.clone(), cause }
}

pub fn write_whole(path: &Path, text: &str) -> Result<(), TrainError> {
    write_bytes(path, text.as_bytes())
}

/// Writes a file that is whole or not there.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    files::write(path, bytes).map_err(io("cannot write", path))
}

/// Trains a task to the end of its steps, or until it is told to stop.
pub fn train(task: &mut dyn Task, config: &Config, device: &Device, options: &Options) -> Result<Finished, TrainError> {
    let name = format!("{} {}", config.text("recipe"), config.text("preset"));
    let c = task.train_config().clone();
    let mut epochs = task.epoch().map(|items| Epochs::new(items, (c.batch * c.accumulate) as u64, c.log_every));
    if c.eval_every == 0 && epochs.is_none() {
        return Err(TrainError::Other(format!(
            "train.eval_every = 0 is once an epoch, but {name} counts no epochs: name a number of steps"
        )));
    }
    let out = &options.out;
    let checkpoints = out.join("checkpoints");
    let started = Instant::now();

    // Everything that can be wrong is found before anything is written.
    let found = match &options.start {
        Start::New | Start::Over => None,
        Start::Newest => newest(&checkpoints)?,
        Start::From(path) => Some(checkpoint::open(path)?),
    };
    if let (Device::Cuda(cuda, _), Some(found)) = (device, &found) {
        let kept: Vec<String> =
            found.meta["choices"].as_array().into_iter().flatten().filter_map(|c| c.as_str().map(str::to_string)).collect();
        if !kept.is_empty() && !cuda.prefer(&kept) {
            say!("the run chose its products on another card or library: numbers may differ in the last bits from here on");
        }
    }
    if let Some(found) = &found {
        same_run(task, config, found)?;
    }
    let mut s = load(task, config, device)?;
    if let (Device::Cuda(cuda, _), Some(_)) = (device, &found)
        && cuda.choices_refused() > 0
    {
        say!(
            "{} of the run's choices of products are none of the library's: numbers may differ in the last bits from here on",
            cuda.choices_refused()
        );
    }
    s.stop = options.stop.clone();
    if let Some(found) = &found {
        restore(&mut s, found)?;
        say!("resumed from {} (step {})", found.path.display(), found.step);
    }
    let start = found.as_ref().map_or(0, |f| f.step);
    let from = config.text("init_from");
    if start == 0 && !from.is_empty() {
        init_from(&mut s, task, Path::new(from))?;
    }
    if start > 0 && out.join("metrics.jsonl").exists() {
        let records = metrics::read(&out.join("metrics.jsonl"))?;
        if let Some(damaged) = records.damage() {
            warn!("{damaged}");
        }
        if let Some(e) = &mut epochs {
            e.recall(&records.all, start);
        }
    }
    let frozen = match s.parameters(Role::Frozen) {
        0 => String::new(),
        n => format!(", {} more that are frozen", human_count(n as f64)),
    };
    say!("{name} on {}: {} parameters{frozen}", device.describe(), human_count(s.parameters(Role::Param) as f64));
    let named: Vec<(&str, &[Receipt])> = s.programs.iter().map(|(n, p)| (n.as_str(), &p.receipts[..])).collect();
    say!("{}{}", receipts_table(&named, options.verbose), peak(&s).line());
    if start >= c.steps {
        say!("the run has {start} steps already: nothing to do (raise --steps)");
        return Ok(Finished { step: start, interrupted: false });
    }
    task.begin(start)?;
    options.preparing.store(false, Ordering::SeqCst);
    let horizon = c.horizon.max(c.steps);
    say!("steps {start} to {} of a {} schedule over {horizon}; run folder {}", c.steps, c.schedule, out.display());

    files::create_folder(out).map_err(io("cannot create the run's folder", out))?;
    let _lock = lock(out)?;
    let place = Place::of(out)?;
    files::sweep(out, None, Duration::ZERO);
    if options.start != Start::New {
        for aside in checkpoint::set_aside(&checkpoints, found.as_ref().map(|f| f.step))? {
            say!("set aside: {} (this run no longer goes on from it; remove it when you do not need it)", aside.display());
        }
    }
    write_whole(&out.join("config.toml"), &format!("{}{END}", config.to_toml()))?;
    write_whole(&out.join("receipts.json"), &serde_json::to_string_pretty(&receipts_json(&s)).expect("plain values"))?;
    let mut metrics = Metrics::open(out)?;

    let bar = progress(c.steps, start);
    let (unit, work) = task.work();
    let floor = task.floor();
    let mut evaluated: Option<Evaluation> = None;
    let mut speed = Speed::new(start, Instant::now());
    let (mut warned, mut extent_said) = (HashSet::new(), false);
    let mut interrupted = false;
    let mut done = start;
    // A report that is only written down is waited for when the next step has been started.
    let mut open: Option<Awaited> = None;
    for step in start..c.steps {
        task.step(
            &mut s,
            engine::mutant!("resume-draws-from-the-start", step, step - start),
            rate(&c, engine::mutant!("rate-of-the-next-step", step, step + 1)),
        )?;
        let now = step + 1;
        done = now;
        let end = now == c.steps;
        let due = |every: u64| now.is_multiple_of(every) || end;
        let evaluates = due(c.eval_every) || c.eval_every == 0 && epochs.as_ref().is_some_and(|e| e.ends(now));
        interrupted = options.stop.load(Ordering::Relaxed);
        // Steps alone are timed: what a record says is the speed of the steps since the record before.
        let mut reports = vec![];
        let mut take = |awaited: Awaited| -> Result<(), TrainError> {
            let (at, report) = awaited.finish(&mut speed)?;
            let recorded = at.is_multiple_of(c.log_every) || at == c.steps || at == now && evaluates || report.skipped_in_row > 0;
            let per_second = if recorded { work * speed.take() } else { 0.0 };
            reports.push((at, report, per_second));
            Ok(())
        };
        if let Some(awaited) = open.take() {
            take(awaited)?;
        }
        bar.set_position(now);
        let stops = evaluates || due(c.save_every) || interrupted;
        if stops || due(c.log_every) {
            let awaited = Awaited { at: now, report: task.report(&s)?, asked: Instant::now() };
            match stops || awaited.report.is_there() {
                true => take(awaited)?,
                false => open = Some(awaited),
            }
        }
        evaluated = match evaluates.then(|| task.evaluate(&mut s)) {
            // Figures of a part of the set would be others; the step itself is whole.
            Some(Err(TrainError::Stopped)) => {
                interrupted = true;
                None
            }
            other => other.transpose()?,
        };
        let (mut skipped, mut seen) = (0, now);
        if !reports.is_empty() {
            place.check(now)?;
        }
        for (at, report, per_second) in reports {
            let own = evaluated.as_ref().filter(|_| at == now);
            (skipped, seen) = (report.skipped_in_row, at);
            if !(at.is_multiple_of(c.log_every) || at == c.steps || own.is_some() || skipped > 0) {
                continue;
            }
            let mut values: Vec<(String, f64)> = report.values.iter().map(|(n, v)| (n.to_string(), *v)).collect();
            if let Some(e) = &mut epochs {
                e.add(at, values.clone());
                values.push(("epoch".into(), e.after(at)));
            }
            values.extend([("learning_rate".into(), rate(&c, at - 1)), ("per_second".into(), per_second)]);
            for (name, value) in own.into_iter().flat_map(|e| &e.values) {
                values.extend(epochs.as_ref().and_then(|e| e.mean(name)).map(|mean| (format!("epoch_{name}"), mean)));
                values.push((format!("val_{name}"), *value));
            }
            metrics.record(at, &values.iter().map(|(n, v)| (n.as_str(), *v)).collect::<Vec<_>>())?;
            let (name, value) = &report.values[0];
            let line = format!("{name} {value:.4}  {} {unit}/s", human_count(per_second));
            let shown = at.is_multiple_of((c.steps / 20).max(c.log_every)) || at == c.steps;
            if bar.is_hidden() && shown {
                say!("step {at}/{}  {line}", c.steps);
            }
            bar.set_message(line);
        }
        if let Some(Evaluation { values, .. }) = &evaluated {
            let found = evaluation_line(values, floor);
            bar.suspend(|| match &epochs {
                Some(e) => say!("epoch {} (step {now}): training {}; validation {found}", e.shown(now), epoch_line(e, values)),
                None => say!("step {now}: {found}"),
            });
            if !std::mem::replace(&mut extent_said, true)
                && let Some(extent) = task.extent()?
            {
                bar.suspend(|| say!("(each validation reads {}: train.eval_batches = {})", extent.line(), c.eval_batches));
            }
        }
        if skipped >= MOST_SKIPPED {
            metrics.flush()?;
            return Err(TrainError::NotFinite(skipped, seen));
        }
        // A step that was skipped leaves nothing new to keep, and must not push a good checkpoint out.
        if (due(c.save_every) && skipped == 0) || end || interrupted {
            metrics.flush()?;
            place.check(now)?;
            for problem in save(&s, task, config, &checkpoints, now, c.keep)?.left {
                // The same at every save: said once.
                if warned.insert(problem.to_string()) {
                    bar.suspend(|| warn!("warning: {problem} (the run goes on; remove it by hand)"));
                }
            }
        }
        if interrupted {
            break;
        }
        speed.go_on(now, Instant::now());
    }
    bar.finish_and_clear();
    let drawn = draw(task, out, &name, floor)?;
    if interrupted && (done < c.steps || evaluated.is_none()) {
        match done < c.steps {
            true => say!("stopped after step {done}, saved; go on with: kiln train --out {} --resume", out.display()),
            false => say!("stopped in the last validation, saved; its figures come from: kiln eval {}", out.display()),
        }
        return Ok(Finished { step: done, interrupted });
    }
    match task.show(&mut s) {
        Ok(Some(text)) => say!("\na sample of what the model writes:\n{}\n", indent(&text)),
        Ok(None) => {}
        Err(e) => say!("no sample: {e}"),
    }
    if let Some(Evaluation { values, confusion, .. }) = evaluated {
        say!("validation {}", evaluation_line(&values, floor));
        if let Some(confusion) = confusion {
            let path = out.join("confusion.png");
            match draw_confusion(&confusion, &name, done, &path)? {
                true => say!("confusion matrix {}", path.display()),
                false => say!("no confusion matrix: too many classes to draw"),
            }
        }
    }
    for p in drawn {
        say!("{} {}", p.what, out.join(p.file).display());
    }
    say!("checkpoint {}", checkpoints.join(format!("step-{done:08}")).display());
    say!("done in {}", human_time(started.elapsed()));
    Ok(Finished { step: done, interrupted: false })
}

/// The last line of a run's config.toml: without it, the file was cut by a power cut or a full disk, and is not what somebody wrote.
pub const END: &str = "# end of the run's settings\n";

/// A step's report on its way, and when it was asked for.
struct Awaited {
    at: u64,
    report: Pending,
    asked: Instant,
}

impl Awaited {
    fn finish(self, speed: &mut Speed) -> Result<(u64, Step), TrainError> {
        // What is there without waiting was there before the steps that were started since.
        let there = self.report.is_there().then_some(self.asked);
        let report = self.report.finish()?;
        speed.reached(self.at, there.unwrap_or_else(Instant::now));
        Ok((self.at, report))
    }
}

/// A run's folder as it was when the run began.
struct Place<'a> {
    path: &'a Path,
    /// Device and inode.
    is: (u64, u64),
}

impl Place<'_> {
    fn of(path: &Path) -> Result<Place<'_>, TrainError> {
        let m = fs::metadata(path).map_err(io("cannot read", path))?;
        Ok(Place { path, is: (m.dev(), m.ino()) })
    }

    /// A folder that was removed or moved is not made again: half a run would be in it.
    fn check(&self, step: u64) -> Result<(), TrainError> {
        match fs::metadata(self.path) {
            Ok(m) if (m.dev(), m.ino()) == self.is => Ok(()),
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(io("cannot read the run's folder", self.path)(e)),
            _ => Err(TrainError::Gone { path: self.path.into(), step }),
        }
    }
}

/// One process at a time writes to a run's folder; the lock goes with the process. A link in its place leads to a file that is not ours.
fn lock(out: &Path) -> Result<fs::File, TrainError> {
    let path = out.join(".lock");
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(false).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    let file = options.open(&path).map_err(io("cannot open", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(TrainError::Other(format!("another process is training in {}", out.display()))),
        Err(fs::TryLockError::Error(cause)) => Err(io("cannot lock", &path)(cause)),
    }
}

fn indent(text: &str) -> String {
    let plain = |c: char| if c.is_control() { '\u{b7}' } else { c };
    text.lines().map(|l| format!("  | {}", l.chars().map(plain).collect::<String>())).collect::<Vec<_>>().join("\n")
}

/// A confusion matrix as a picture; false where there are too many classes.
pub fn draw_confusion(confusion: &Confusion, name: &str, step: u64, path: &Path) -> Result<bool, TrainError> {
    let (right, total) = (confusion.right(), confusion.total());
    let title = format!("{name}, step {step}: {right} of {total} right ({:.2}%)", 100.0 * right as f64 / total as f64);
    let png = confusion.draw(&title, path)?;
    png.map_or(Ok(false), |png| write_bytes(path, &png).map(|()| true))
}

/// Means over an epoch's steps of what is evaluated too.
fn epoch_line(epochs: &Epochs, values: &[(&'static str, f64)]) -> String {
    let means: Vec<_> = values.iter().filter_map(|(name, _)| Some((*name, epochs.mean(name)?))).collect();
    evaluation_line(&means, None)
}

/// Of what is evaluated, that which is shown in percent.
const SHARES: [&str; 5] = ["accuracy", "exact", "exact_halted", "cell", "halting_accuracy"];

/// `loss 1.2345, accuracy 87.65% (entropy of the data 1.1000)`
pub fn evaluation_line(values: &[(&'static str, f64)], floor: Option<(&'static str, f64)>) -> String {
    let one = |(n, v): &(&str, f64)| if SHARES.contains(n) { format!("{n} {:.2}%", 100.0 * v) } else { format!("{n} {v:.4}") };
    let all: Vec<String> = values.iter().map(one).collect();
    let floor = floor.map_or(String::new(), |(n, v)| format!(" ({n}: {v:.4})"));
    format!("{}{floor}", all.join(", "))
}

fn progress(steps: u64, done: u64) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    if !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left").expect("a template that parses");
    bar.set_style(style);
    bar.set_position(done);
    bar.reset_eta();
    bar
}

fn save(s: &Session, task: &dyn Task, config: &Config, dir: &Path, step: u64, keep: usize) -> Result<Saved, TrainError> {
    let kept = s.store.iter().filter(|(name, t)| is_kept(name) && t.role != Role::Frozen);
    let numbers = kept.map(|(name, t)| Ok((name, t, t.bytes()?))).collect::<Result<Vec<_>, TrainError>>()?;
    let tensors = |role: Role| -> Vec<Tensor> {
        let own = numbers.iter().filter(|(_, t, _)| t.role == role);
        own.map(|(name, t, bytes)| Tensor { name, dtype: t.meta.dtype.name(), shape: &t.meta.shape, bytes }).collect()
    };
    let c = task.train_config();
    let meta = json!({
        "recipe": config.text("recipe"),
        "config": config.to_json(),
        "step": step,
        "data_position": step * (c.batch * c.accumulate) as u64,
        "identity": task.identity(),
        "device": s.device.describe(),
        "receipts": receipts_json(s),
        "choices": choices(&s.device),
    });
    Ok(checkpoint::save(
        dir,
        step,
        &[("model.safetensors", tensors(Role::Param)), ("state.safetensors", tensors(Role::Carried))],
        &task.kept(),
        &meta,
        keep,
    )?)
}

/// What was chosen by timing: a resumed run takes the same again.
fn choices(device: &Device) -> Vec<String> {
    match device {
        Device::Cpu(..) => vec![],
        Device::Cuda(cuda, _) => cuda.choices(),
    }
}

fn newest(dir: &Path) -> Result<Option<Checkpoint>, TrainError> {
    let (found, skipped) = resumable(dir)?;
    for bad in &skipped {
        say!("skipped {}: {}", bad.path.display(), bad.reason);
    }
    if found.is_none() {
        say!("no checkpoint in {} yet: starting over", dir.display());
    }
    Ok(found)
}

/// What a run goes on from, and the newer ones that are broken. None where nothing was saved yet: checkpoints of which none can be used are an error,
/// and so is one that cannot be read, since it may be whole.
pub fn resumable(dir: &Path) -> Result<(Option<Checkpoint>, Vec<Skipped>), TrainError> {
    let (found, skipped) = checkpoint::newest(dir).map_err(|e| TrainError::NoWayOn(e.to_string()))?;
    if found.is_none() && !skipped.is_empty() {
        let why: Vec<String> = skipped.iter().map(|s| format!("{}: {}", s.path.display(), s.reason)).collect();
        return Err(TrainError::NoWayOn(format!("no checkpoint in {} is whole ({})", dir.display(), why.join("; "))));
    }
    Ok((found, skipped))
}

/// A checkpoint must be of this config and this data; says what has changed all the same.
fn same_run(task: &dyn Task, config: &Config, found: &Checkpoint) -> Result<(), TrainError> {
    let theirs = Config::from_json(&found.meta["config"])?;
    let changed = theirs.differences(config);
    let identity = &found.meta["identity"];
    let moved = |k: &str| MOVED.iter().any(|(key, what)| *key == k && identity[what].is_string());
    let free = |k: &str| FREE.contains(&k) || k.starts_with("passes.") || moved(k);
    if let Some((key, was, is)) = changed.iter().find(|(k, ..)| !free(k)) {
        return Err(TrainError::Other(format!(
            "checkpoint {} is of another config: {key} was {was}, now it is {is} (start a new run from its weights with --init-from)",
            found.path.display()
        )));
    }
    for (key, was, is) in changed.iter().filter(|(k, ..)| k.starts_with("passes.")) {
        say!("{key} was {was}, now it is {is}: numbers may differ in the last bits from here on");
    }
    if let Some((_, was, is)) = changed.iter().find(|(k, ..)| k == "train.steps") {
        let spans = |c: &Config| c.section::<TrainConfig>("train").map(|t| t.horizon.max(t.steps));
        let (before, now) = (spans(&theirs)?, spans(config)?);
        if before != now {
            say!(
                "train.steps was {was}, now it is {is}: the schedule spans {now} steps instead of {before}, so the rate differs from here on"
            );
        }
    }
    same_tokenizer(found, task)?;
    same_base(found, task)?;
    if found.meta["identity"]["encoder"] != task.identity()["encoder"] {
        return Err(TrainError::Other(format!(
            "objective.encoder is not the encoder that checkpoint {} was trained with: it has changed (start a new run from its weights with --init-from)",
            found.path.display()
        )));
    }
    let own = task.identity();
    for (what, key) in [("data", "data"), ("validation data", "validation")] {
        // Checkpoints of earlier versions do not say what they were validated with.
        if identity[key] != own[key] && (key == "data" || identity[key].is_string()) {
            let place = config.data_path().map_or(String::new(), |path| format!(" in {path}"));
            return Err(TrainError::Other(format!(
                "the {what}{place} is not that of checkpoint {}: its checksum is {}, and was {} (name the same data with --data, or start a new run \
                 from its weights with --init-from)",
                found.path.display(),
                own[key],
                identity[key]
            )));
        }
    }
    for (key, was, is) in changed.iter().filter(|(k, ..)| moved(k)) {
        say!("{key} was {was}, now it is {is}: the same by its checksum");
    }
    Ok(())
}

/// A checkpoint's tokenizer must be the data's.
pub fn same_tokenizer(found: &Checkpoint, task: &dyn Task) -> Result<(), TrainError> {
    let (theirs, ours) = (&found.meta["identity"]["tokenizer"], &task.identity()["tokenizer"]);
    if theirs != ours {
        return Err(TrainError::Other(format!(
            "checkpoint {} was trained with another tokenizer: its fingerprint is {theirs}, the data's {ours} (prepare the data with the same one)",
            found.path.display()
        )));
    }
    Ok(())
}

/// The frozen weights that a checkpoint was trained on must be the same.
pub fn same_base(found: &Checkpoint, task: &dyn Task) -> Result<(), TrainError> {
    let (theirs, ours) = (&found.meta["identity"]["base"], &task.identity()["base"]);
    let is_fingerprint = |v: &serde_json::Value| v.as_str().is_some_and(|v| u64::from_str_radix(v, 16).is_ok());
    if is_fingerprint(theirs) && !is_fingerprint(ours) {
        let ours = ours.as_str().unwrap_or("model.base is empty, and model.pretrain is 0");
        return Err(TrainError::Other(format!("the base that checkpoint {} was trained on is not at hand: {ours}", found.path.display())));
    }
    if theirs != ours {
        return Err(TrainError::Other(format!(
            "checkpoint {} was trained on another base: its fingerprint is {theirs}, the one of model.base is {ours}",
            found.path.display()
        )));
    }
    Ok(())
}

/// A checkpoint's classes must be the data's.
pub fn same_classes(found: &Checkpoint, task: &dyn Task) -> Result<(), TrainError> {
    let (theirs, ours) = (&found.meta["identity"]["classes"], &task.identity()["classes"]);
    if theirs != ours {
        return Err(TrainError::Other(format!(
            "checkpoint {} tells the classes {theirs} apart, but the data has {ours}",
            found.path.display()
        )));
    }
    Ok(())
}

pub fn restore(s: &mut Session, found: &Checkpoint) -> Result<(), TrainError> {
    let what = found.path.display().to_string();
    s.load_params(&found.file("model.safetensors")?, &what)?;
    engine::mutant!("resume-without-state", s.load_state(&found.file("state.safetensors")?, &what), Ok(()))
}

/// A checkpoint by its own folder, or the newest of a run.
pub fn find_checkpoint(path: &Path) -> Result<Checkpoint, TrainError> {
    if path.join("checkpoint.json").exists() {
        return Ok(checkpoint::open(path)?);
    }
    let inner = path.join("checkpoints");
    let dir = if inner.is_dir() { inner } else { path.to_path_buf() };
    if !dir.is_dir() {
        return Err(TrainError::Other(format!("there is no checkpoint or run folder {}", path.display())));
    }
    let (found, skipped) = checkpoint::newest(&dir)?;
    for bad in skipped.iter().filter(|_| found.is_some()) {
        warn!("skipped {}: {}", bad.path.display(), bad.reason);
    }
    found.ok_or_else(|| {
        let why: Vec<String> = skipped.iter().map(|s| format!("; skipped {}: {}", s.path.display(), s.reason)).collect();
        TrainError::Other(format!("{} holds no whole checkpoint{}", path.display(), why.concat()))
    })
}

/// Another run's weights, from a checkpoint, a run's folder, a safetensors file or what the recipe itself can read; the optimizer begins anew.
pub fn init_from(s: &mut Session, task: &dyn Task, from: &Path) -> Result<(), TrainError> {
    let what = from.display().to_string();
    if task.init_from(s, from)? {
        say!("weights from {what}");
        return Ok(());
    }
    let file = match from.extension().is_some_and(|e| e == "safetensors") {
        true => checkpoint::load_safetensors(from)?,
        false => find_checkpoint(from)?.file("model.safetensors")?,
    };
    s.load_params(&file, &what)?;
    say!("weights from {what}");
    Ok(())
}

/// The task's pictures, as far as there is anything to draw.
fn draw(task: &dyn Task, out: &Path, title: &str, floor: Option<(&'static str, f64)>) -> Result<Vec<Picture>, TrainError> {
    let records = metrics::read(&out.join("metrics.jsonl"))?.all;
    let points =
        |key: &str| -> Vec<(f64, f64)> { records.iter().filter_map(|r| Some((r.get("step")?.as_f64()?, r.get(key)?.as_f64()?))).collect() };
    let mut drawn = vec![];
    for picture in task.pictures() {
        let lines = |lines: &[(String, String)]| -> Vec<(String, Vec<(f64, f64)>)> {
            lines.iter().map(|(label, key)| (label.clone(), points(key))).filter(|l| !l.1.is_empty()).collect()
        };
        let panels: Vec<_> = picture.panels.iter().map(|(what, own)| (*what, lines(own))).filter(|p| !p.1.is_empty()).collect();
        if panels.is_empty() {
            continue;
        }
        let series: Vec<(&str, Vec<Series>)> =
            panels.iter().map(|(what, own)| (*what, own.iter().map(|(label, points)| Series { label, points }).collect())).collect();
        let panels: Vec<Panel> = series.iter().map(|(what, series)| Panel { what, series, floor }).collect();
        report::curves(&out.join(picture.file), title, &panels)?;
        drawn.push(picture);
    }
    Ok(drawn)
}
