//! Where weights come from: a run's own checkpoint, which must be of the same config and data, or another run's.

use super::best;
use super::folder::has_saved;
use crate::checkpoint::{self, AVERAGED, Checkpoint, MODEL, Skipped};
use crate::config::{Config, OPTIMIZE, TrainConfig};
use crate::recipe::{Converted, Session, Task, TrainError};
use crate::{metrics, say, warn};
use engine::passes::{Mode, Numerics, Switch, Target, all};
use engine::{DType, Switches};
use std::path::Path;

/// The newest checkpoint of the run in `out`; none where it was stopped before it saved any.
pub fn newest(task: &dyn Task, out: &Path) -> Result<Option<Checkpoint>, TrainError> {
    let dir = &out.join("checkpoints");
    let (found, skipped) = resumable(dir)?;
    for bad in &skipped {
        say!("skipped {}: {}", bad.path.display(), bad.reason);
    }
    if found.is_none() && was_saved(task, out)? {
        return Err(TrainError::NoWayOn(format!(
            "the run in {} was saved, but there is no checkpoint in {}",
            out.display(),
            dir.display()
        )));
    }
    if found.is_none() {
        say!("no checkpoint in {} yet: starting over", dir.display());
    }
    Ok(found)
}

/// Whether a run has saved checkpoints, wherever they are now. Runs of earlier versions do not note it: theirs were saved where they got so far, or
/// drew what they draw at the end.
fn was_saved(task: &dyn Task, out: &Path) -> Result<bool, TrainError> {
    if let Some(saved) = has_saved(out)? {
        return Ok(saved);
    }
    let path = out.join("metrics.jsonl");
    let last = if path.exists() { metrics::read(&path)?.all.pop() } else { None };
    let step = last.and_then(|record| record.get("step")?.as_u64()).unwrap_or(0);
    Ok(step >= task.train_config().save_every || task.pictures().iter().any(|p| out.join(p.file).exists()))
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

/// A checkpoint's settings; keys that are newer than it have their defaults.
fn settings(config: &Config, found: &Checkpoint) -> Result<Config, TrainError> {
    let read = config.of_checkpoint(&found.meta["config"]);
    read.map(|(settings, _)| settings).map_err(|e| TrainError::Other(format!("checkpoint {}: {e}", found.path.display())))
}

/// The length of the schedule that a checkpoint's run began with.
pub fn schedule_steps(config: &Config, found: &Checkpoint) -> Result<u64, TrainError> {
    if let Some(steps) = found.meta["schedule_steps"].as_u64() {
        return Ok(steps);
    }
    // Earlier versions do not say it: more steps than the horizon stretched it.
    let c: TrainConfig = settings(config, found)?.section("train")?;
    Ok(engine::mutant!("schedule-of-earlier-versions", c.horizon.max(c.steps), c.steps))
}

/// A checkpoint must be of this config and this data; says what has changed all the same.
pub fn same_run(task: &dyn Task, config: &Config, found: &Checkpoint, target: Target) -> Result<(), TrainError> {
    let theirs = settings(config, found)?;
    let changed = theirs.differences(config);
    let identity = &found.meta["identity"];
    let moved = |k: &str| task.paths().iter().any(|(key, what)| *key == k && identity[what].is_string());
    // Runs of earlier versions note a preset's sizes beside a base that has its own.
    let of_base = |k: &str| config.of_base().iter().any(|key| k == format!("model.{}", key.name));
    let switches = |k: &str| k.starts_with("passes.") || k == OPTIMIZE;
    let free = |k: &str| config.is_free(k) || switches(k) || moved(k) || of_base(k);
    if let Some((key, was, is)) = changed.iter().find(|(k, ..)| !free(k)) {
        return Err(TrainError::Other(format!(
            "checkpoint {} is of another config: {key} was {was}, now it is {is} (start a new run from its weights with --init-from)",
            found.path.display()
        )));
    }
    let both = [theirs.switches()?, config.switches()?];
    for (key, was, is) in changed.iter().filter(|(k, ..)| switches(k)) {
        say!("{key} was {was}, now it is {is}: {}", consequence((key, was, is), &both, target));
    }
    same_tokenizer(found, task)?;
    same_base(found, task)?;
    same_data(found, task, config)?;
    for (key, was, is) in changed.iter().filter(|(k, ..)| moved(k)) {
        say!("{key} was {was}, now it is {is}: the same by its checksum");
    }
    Ok(())
}

/// What another value of a pass, or another preset, does to the numbers of a run that goes on. `both`: its switches before, and now.
fn consequence((key, was, is): (&str, &str, &str), both: &[Switches; 2], target: Target) -> String {
    // The value's settings, without the quotes of TOML: those that are the first scale, and the others.
    let parts = |value: &str| -> (Vec<String>, Vec<String>) {
        value.trim_matches('"').split(',').map(|part| part.trim().to_string()).partition(|part| part.starts_with("scale="))
    };
    let ((old, rest), (new, other)) = (parts(was), parts(is));
    let on = both.iter().all(|s| s.chosen("fp16").is_some_and(|mode| mode != Mode::Off));
    if key == "passes.fp16" && on && old != new {
        let kept = "the loss scale goes on from the checkpoint's (scale=.. is that of a run's first step)";
        return if rest == other { format!("{kept}, so nothing changes") } else { format!("{kept}; {}", of_numbers(key, both, target)) };
    }
    of_numbers(key, both, target).into()
}

fn of_numbers(key: &str, both: &[Switches; 2], target: Target) -> &'static str {
    let mode = |p: &dyn Switch| both.each_ref().map(|s| s.mode(p, target));
    let changed = |p: &dyn Switch| key.strip_prefix("passes.").map_or_else(|| mode(p)[0] != mode(p)[1], |name| name == p.name());
    let narrow = all().filter(|p| ["bf16", "fp16"].contains(&p.name()) && mode(*p) != [Mode::Off; 2]).map(|p| p.rounds_to());
    let types: Vec<DType> = std::iter::once(DType::F32).chain(narrow).collect();
    let numerics: Vec<Numerics> = all().filter(|p| changed(*p)).flat_map(|p| types.iter().map(move |&t| p.numerics(target, t))).collect();
    let any = |n: Numerics| numerics.contains(&n);
    match () {
        _ if any(Numerics::Changed) => "numbers are those of another model from here on",
        _ if any(Numerics::LowPrecision) => {
            "rounding to a narrower type begins, ends or changes here, so numbers differ beyond the last bits"
        }
        _ if any(Numerics::Reordered) => "numbers may differ in the last bits from here on",
        _ => "numbers stay the same, bit for bit",
    }
}

/// What lies in the places that the config names must be what a checkpoint was trained with.
fn same_data(found: &Checkpoint, task: &dyn Task, config: &Config) -> Result<(), TrainError> {
    let (identity, own) = (&found.meta["identity"], task.identity()?);
    // The base and the data have messages of their own.
    let others = task.paths().iter().filter(|(_, what)| !["base", "data"].contains(what));
    if let Some((key, _)) = others.into_iter().find(|(_, what)| identity[what] != own[what]) {
        return Err(TrainError::Other(format!(
            "{key} is not what checkpoint {} was trained with: it has changed (start a new run from its weights with --init-from)",
            found.path.display()
        )));
    }
    for (what, key) in [("data", "data"), ("validation data", "validation")] {
        // Checkpoints of earlier versions do not say what they were validated with.
        let is_noted = key == "data" || engine::mutant!("other-validation-data", identity[key].is_string(), false);
        if identity[key] != own[key] && is_noted {
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
    Ok(())
}

/// A checkpoint's tokenizer must be the data's.
pub fn same_tokenizer(found: &Checkpoint, task: &dyn Task) -> Result<(), TrainError> {
    let (theirs, ours) = (&found.meta["identity"]["tokenizer"], &task.identity()?["tokenizer"]);
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
    let (theirs, ours) = (&found.meta["identity"]["base"], &task.identity()?["base"]);
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
    let (theirs, ours) = (&found.meta["identity"]["classes"], &task.identity()?["classes"]);
    if engine::mutant!("other-classes-are-evaluated", theirs != ours, false) {
        return Err(TrainError::Other(format!(
            "checkpoint {} tells the classes {theirs} apart, but the data has {ours}",
            found.path.display()
        )));
    }
    Ok(())
}

/// `convert`: states that the checkpoint keeps in another form become the run's.
pub fn restore(s: &mut Session, found: &Checkpoint, convert: bool) -> Result<Converted, TrainError> {
    let what = found.path.display().to_string();
    s.load_params(&found.finite(MODEL)?, &what)?;
    let averages = if found.has(AVERAGED) { Some(found.finite(AVERAGED)?) } else { None };
    let state = found.file("state.safetensors")?.moments_are_numbers(&found.path.join("state.safetensors"))?;
    engine::mutant!("resume-without-state", s.load_state(&state, averages.as_ref(), &what, convert), Ok(Converted::default()))
}

/// The same for a run that goes on: the error names the ways to go on without this checkpoint.
pub fn go_on(s: &mut Session, found: &Checkpoint, convert: bool) -> Result<(), TrainError> {
    let converted = restore(s, found, convert).map_err(|e| match e {
        TrainError::Checkpoint(e) => TrainError::NoWayOn(e.to_string()),
        e => e,
    })?;
    converted.lines().for_each(|line| say!("{line}"));
    if convert && converted.forms.is_empty() {
        say!("--convert-states: every state has the form that this run keeps it in");
    }
    Ok(())
}

/// A checkpoint by its own folder, or the newest of a run; `RUN/best` is the run's best.
pub fn find_checkpoint(path: &Path) -> Result<Checkpoint, TrainError> {
    if let Some(run) = best::run_of(path).filter(|_| path.symlink_metadata().is_ok_and(|m| m.is_symlink())) {
        return best::find(run);
    }
    if path.join("checkpoint.json").exists() {
        return Ok(checkpoint::open(path)?);
    }
    let inner = path.join("checkpoints");
    let dir = if inner.is_dir() { inner } else { path.to_path_buf() };
    if !dir.is_dir() {
        return Err(TrainError::Other(format!("there is no checkpoint or run folder {}{}", path.display(), crate::input::fetched(path))));
    }
    let (found, skipped) = checkpoint::newest(&dir)?;
    for bad in skipped.iter().filter(|_| found.is_some()) {
        warn!("skipped {}: {}", bad.path.display(), bad.reason);
    }
    found.ok_or_else(|| {
        let why: Vec<String> = skipped.iter().map(|s| format!("; skipped {}: {}", s.path.display(), s.reason)).collect();
        TrainError::Other(format!(
            "{} holds no whole checkpoint{} (name a run's folder, or one of its checkpoints)",
            path.display(),
            why.concat()
        ))
    })
}

/// Another run's weights, from a checkpoint, a run's folder, a safetensors file or what the recipe itself can read; the optimizer begins anew.
pub fn init_from(s: &mut Session, task: &dyn Task, from: &Path) -> Result<(), TrainError> {
    let what = from.display().to_string();
    if task.init_from(s, from)? {
        say!("weights from {what}");
        return Ok(());
    }
    let (file, averaged) = match from.extension().is_some_and(|e| e == "safetensors") {
        true => (checkpoint::load_safetensors(from)?.finite(from)?, false),
        false => find_checkpoint(from).and_then(|found| Ok((found.weights(false)?, found.has(AVERAGED))))?,
    };
    s.load_params(&file, &what)?;
    let how = format!(", averaged over steps (name its {MODEL} for those of the last step)");
    say!("weights from {what}{}", if averaged { how } else { String::new() });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::{Cpu, Device};

    /// Found whole, and then no longer to be read: the error names the ways out as those before it do.
    #[test]
    fn the_last_read_of_a_checkpoint_names_the_ways_out() {
        let dir = tempfile::tempdir().unwrap();
        let files = [("model.safetensors", vec![]), ("state.safetensors", vec![])];
        let saved = checkpoint::save(dir.path(), 1, &files, &[], &serde_json::json!({}), 0.into()).unwrap();
        let found = checkpoint::open(&saved.path).unwrap();
        let mut s = Session::new(&Device::cpu(Cpu::new(1)), &Switches::default(), 0);
        go_on(&mut s, &found, false).unwrap();
        std::fs::write(saved.path.join("state.safetensors"), "").unwrap();
        let said = go_on(&mut s, &found, false).unwrap_err().to_string();
        assert!(["state.safetensors", "--resume-from", "--start-over"].iter().all(|part| said.contains(part)), "{said}");
    }
}
