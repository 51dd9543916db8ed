//! Everything before the first step. What can be wrong is found here, before anything is written.

use super::best::{self, Best};
use super::resume::{go_on, newest, same_run, schedule_steps};
use super::steps::{Values, evaluates_at};
use super::{Options, Start, init_from, load_within_budget, peak, receipts_table};
use crate::checkpoint::{self, Checkpoint};
use crate::config::{Config, ConfigError};
use crate::epochs::Epochs;
use crate::metrics;
use crate::optim::ema;
use crate::recipe::{Session, Task, TrainError};
use crate::report::human_count;
use crate::{say, warn};
use engine::passes::{Mode, Preset, Receipt, Target, all};
use engine::{Device, Role, Switches};
use serde_json::{Value, json};
use std::path::Path;

/// A task whose programs are loaded and whose state is that of the checkpoint, if there is one.
pub struct Ready {
    pub session: Session,
    /// The checkpoint's step.
    pub from: Option<u64>,
    /// Steps of the learning-rate schedule: those that the run began with.
    pub schedule_steps: u64,
    pub epochs: Option<Epochs>,
    /// What the evaluations have found so far.
    pub best: Best,
    /// Whether the checkpoint lacks the evaluation of its step, which a signal stopped.
    pub owes: bool,
    /// What its step is recorded with, and the last reports, as the checkpoint notes them; why a run that ends with it is no success.
    pub values: Values,
    pub figures: Value,
    pub problem: Option<String>,
    /// What was typed to start the run, and each time that it went on.
    pub commands: Vec<String>,
    /// Recipe and preset.
    pub name: String,
}

impl Ready {
    pub fn new(task: &dyn Task, config: &Config, device: &Device, options: &Options) -> Result<Ready, TrainError> {
        let name = format!("{} {}", config.text("recipe"), config.text("preset"));
        let c = task.train_config();
        let mut epochs = task.epoch().map(|items| {
            Epochs::new(
                items,
                engine::mutant!("epochs-counted-in-micro-batches", (c.batch * c.accumulate) as u64, c.batch as u64),
                c.log_every,
            )
        });
        let without_validation = task.without_validation()?;
        if let (Some(reason), true) = (&without_validation, c.patience > 0) {
            let problem =
                format!("train.patience = {}: nothing tells whether the run gets better, as there is no validation: {reason}", c.patience);
            return Err(ConfigError::Invalid(problem).into());
        }
        if c.eval_every == 0 && epochs.is_none() && without_validation.is_none() {
            return Err(TrainError::Other(format!(
                "train.eval_every = 0 is once an epoch, but {name} counts no epochs: name a number of steps"
            )));
        }
        best::check(task)?;
        let found = match &options.start {
            Start::New | Start::Over => None,
            Start::Newest => newest(task, options.home())?,
            Start::From(path) => Some(checkpoint::open(path).map_err(|e| TrainError::NoWayOn(e.to_string()))?),
        };
        let mut session = loaded(task, config, device, found.as_ref())?;
        // Of several ranks none leaves an evaluation that the others go on with: they agree on a stop after it.
        if config.ranks.size() == 1 {
            session.stop = options.stop.clone();
        }
        if c.ema > 0.0 && session.store.get(ema::MASS).is_none() {
            return Err(TrainError::Other(format!("train.ema = {}: {name} has no optimizer whose weights could be averaged", c.ema)));
        }
        if let Some(found) = &found {
            go_on(&mut session, found, options.convert_states)?;
            say!("resumed from {} (step {})", found.path.display(), found.step);
        }
        let (done, weights) = (found.as_ref().map_or(0, |f| f.step), config.text("init_from"));
        if engine::mutant!("init-from-again-on-resume", done == 0, true) && !weights.is_empty() {
            init_from(&mut session, task, Path::new(weights))?;
        }
        let noted = |key: &str| found.as_ref().map_or(Value::Null, |found| found.meta[key].clone());
        // Checkpoints of earlier versions note no values.
        let values: Option<Values> = noted("values").as_array().map(|all| all.iter().map(value_of).collect());
        let figures =
            engine::mutant!("figures-are-forgotten", Some(noted("figures")), None).filter(Value::is_object).unwrap_or_else(|| json!({}));
        let owes = engine::mutant!("evaluation-is-lost", values.is_some(), false)
            && without_validation.is_none()
            && evaluates_at(c, epochs.as_ref(), done)
            && figures["validation"]["step"] != json!(done);
        if done > 0 {
            // The record of a step that lacks its evaluation is written again.
            let again = engine::mutant!("an-epoch-counts-a-step-twice", u64::from(owes), 0);
            recall(&options.home().join("metrics.jsonl"), done - again, epochs.as_mut())?;
        }
        let schedule_steps = found.as_ref().map_or(Ok(c.schedule_steps()), |found| schedule_steps(config, found))?;
        let best = found.as_ref().map_or_else(Best::default, |found| Best::of_checkpoint(found, c));
        let before = found.iter().flat_map(|f| f.meta["commands"].as_array().into_iter().flatten());
        let commands = before.filter_map(|c| c.as_str().map(String::from)).chain(Some(options.command.clone())).collect();
        let (problem, values) = (noted("problem").as_str().map(String::from), values.unwrap_or_default());
        let from = found.map(|f| f.step);
        let ready = Ready { session, from, schedule_steps, epochs, best, owes, values, figures, problem, commands, name };
        say_what_runs(&config.title(), &ready.session, options.verbose);
        if let Some(reason) = without_validation {
            say!("no validation: {reason}; so nothing is evaluated, and no checkpoint is the best");
        }
        Ok(ready)
    }

    /// Steps that are done.
    pub fn done(&self) -> u64 {
        self.from.unwrap_or(0)
    }
}

/// A name and its value, as a checkpoint notes them: what was not finite is null.
fn value_of(noted: &Value) -> (String, f64) {
    (noted[0].as_str().unwrap_or_default().into(), noted[1].as_f64().unwrap_or(f64::NAN))
}

/// The programs, with what the checkpoint's run chose by timing.
fn loaded(task: &dyn Task, config: &Config, device: &Device, found: Option<&Checkpoint>) -> Result<Session, TrainError> {
    let Some(found) = found else { return load_within_budget(task, config, device) };
    if let Device::Cuda(cuda, _) = device {
        let kept: Vec<String> =
            found.meta["choices"].as_array().into_iter().flatten().filter_map(|c| c.as_str().map(str::to_string)).collect();
        if !kept.is_empty() && !cuda.prefer(&kept) {
            say!("the run chose its products on another card or library: numbers may differ in the last bits from here on");
        }
    }
    same_run(task, config, found, device.target())?;
    let session = load_within_budget(task, config, device)?;
    if let Device::Cuda(cuda, _) = device
        && cuda.choices_refused() > 0
    {
        say!(
            "{} of the run's choices of products are none of the library's: numbers may differ in the last bits from here on",
            cuda.choices_refused()
        );
    }
    Ok(session)
}

/// Means of the epoch that the run was stopped in go on from its metrics.
fn recall(path: &Path, done: u64, epochs: Option<&mut Epochs>) -> Result<(), TrainError> {
    if !path.exists() {
        return Ok(());
    }
    let records = metrics::read(path)?;
    if let Some(damaged) = records.damage() {
        warn!("{damaged}");
    }
    if let Some(e) = epochs {
        e.recall(&records.all, done);
    }
    Ok(())
}

fn say_what_runs(name: &str, s: &Session, verbose: bool) {
    let frozen = match s.parameters(Role::Frozen) {
        0 => String::new(),
        n => format!(", {} more that are frozen", human_count(n as f64)),
    };
    let preset = match s.switches.preset {
        Preset::Mixed | Preset::Plain => String::new(),
        other => format!("; passes by --optimize {}", other.name()),
    };
    say!("{name} on {}: {} parameters{frozen}{preset}", s.device.describe(), human_count(s.parameters(Role::Param) as f64));
    say!("{}", precision(&s.switches, s.device.target()));
    let named: Vec<(&str, &[Receipt])> = s.programs.iter().map(|(n, p)| (n.as_str(), &p.receipts[..])).collect();
    say!("{}{}", receipts_table(&named, verbose), peak(s).line());
}

/// What the run computes in, and how to change that.
fn precision(switches: &Switches, target: Target) -> String {
    let on = |name: &str| all().any(|p| p.name() == name && switches.mode(p, target) != Mode::Off);
    let gpu = target != Target::Cpu;
    let narrow = match () {
        _ if on("bf16") => "bf16",
        _ if on("fp16") => "fp16",
        _ if on("tf32") && gpu => return "precision: f32, matmuls in TF32 (--optimize exact: without TF32; --optimize mixed: bf16)".into(),
        _ if gpu => return "precision: f32 without TF32 (--optimize mixed: bf16; --optimize reordered: TF32)".into(),
        _ => return "precision: f32 (--pass bf16=auto rounds as a GPU would)".into(),
    };
    let fp8 = if on("fp8") { " and FP8" } else { "" };
    let more = if on("fp8") || !gpu { "" } else { "; --optimize fast: FP8 too" };
    let states = if on("adam8bit") { "parameters f32, optimizer states in 8 bits" } else { "parameters and optimizer states f32" };
    format!("precision: {narrow}{fp8}, {states} (--optimize exact: f32{more})")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::preset;
    use crate::recipes::RECIPES;
    use engine::kernel::Arch;

    /// Whatever a preset says: bf16 on a GPU if nothing is said, f32 without TF32 where exact numbers are asked for, and what is asked for by name.
    #[test]
    fn every_preset_has_the_precision_that_is_asked_for() {
        let gpu = Target::Cuda(Arch { sm: 90, multiprocessors: 132 });
        let mut seen = 0;
        for recipe in RECIPES {
            for (name, _) in recipe.presets() {
                let typed = preset(*recipe, Some(name)).unwrap();
                let said = |set: &[&str]| {
                    let mut config = typed.clone();
                    set.iter().for_each(|s| config.set(s).unwrap());
                    let switches = config.switches().unwrap();
                    [gpu, Target::Cpu].map(|target| precision(&switches, target))
                };
                let [on_gpu, on_cpu] = said(&[]);
                assert!(
                    on_gpu.starts_with("precision: bf16") && on_cpu.starts_with("precision: f32 ("),
                    "{} {name}: {on_gpu} {on_cpu}",
                    recipe.name()
                );
                for optimize in ["none", "exact"] {
                    let [exact, _] = said(&[&format!("optimize={optimize}")]);
                    assert!(exact.starts_with("precision: f32 without TF32"), "{} {name} {optimize}: {exact}", recipe.name());
                }
                assert!(said(&["optimize=reordered"])[0].starts_with("precision: f32, matmuls in TF32"), "{} {name}", recipe.name());
                assert!(said(&["optimize=fast"])[0].starts_with("precision: bf16 and FP8"), "{} {name}", recipe.name());
                assert!(said(&["optimize=exact", "passes.bf16=auto"])[0].starts_with("precision: bf16"), "{} {name}", recipe.name());
                for (states, shown) in
                    [("auto", "parameters f32, optimizer states in 8 bits ("), ("off", "parameters and optimizer states f32 (")]
                {
                    assert!(said(&[&format!("passes.adam8bit={states}")])[0].contains(shown), "{} {name}", recipe.name());
                }
                seen += 1;
            }
        }
        assert!(seen >= 20, "{seen}");
    }
}
