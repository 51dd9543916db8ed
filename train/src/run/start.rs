//! Everything before the first step. What can be wrong is found here, before anything is written.

use super::best::{self, Best};
use super::resume::{go_on, newest, same_run, schedule_steps};
use super::{Options, Start, init_from, load_within_budget, peak, receipts_table};
use crate::checkpoint::{self, Checkpoint};
use crate::config::Config;
use crate::epochs::Epochs;
use crate::metrics;
use crate::optim::ema;
use crate::recipe::{Session, Task, TrainError};
use crate::report::human_count;
use crate::{say, warn};
use engine::passes::{Preset, Receipt};
use engine::{Device, Role};
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
    /// What was typed to start the run, and each time that it went on.
    pub commands: Vec<String>,
    /// Recipe and preset.
    pub name: String,
}

impl Ready {
    pub fn new(task: &dyn Task, config: &Config, device: &Device, options: &Options) -> Result<Ready, TrainError> {
        let name = format!("{} {}", config.text("recipe"), config.text("preset"));
        let c = task.train_config();
        let mut epochs = task.epoch().map(|items| Epochs::new(items, (c.batch * c.accumulate) as u64, c.log_every));
        if c.eval_every == 0 && epochs.is_none() {
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
        if done == 0 && !weights.is_empty() {
            init_from(&mut session, task, Path::new(weights))?;
        }
        if done > 0 {
            recall(&options.home().join("metrics.jsonl"), done, epochs.as_mut())?;
        }
        let schedule_steps = found.as_ref().map_or(Ok(c.schedule_steps()), |found| schedule_steps(config, found))?;
        let best = found.as_ref().map_or_else(Best::default, |found| Best::of_checkpoint(found, c));
        let before = found.iter().flat_map(|f| f.meta["commands"].as_array().into_iter().flatten());
        let commands = before.filter_map(|c| c.as_str().map(String::from)).chain(Some(options.command.clone())).collect();
        let ready = Ready { session, from: found.map(|f| f.step), schedule_steps, epochs, best, commands, name };
        say_what_runs(&config.title(), &ready.session, options.verbose);
        Ok(ready)
    }

    /// Steps that are done.
    pub fn done(&self) -> u64 {
        self.from.unwrap_or(0)
    }
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
        Preset::Reordered => String::new(),
        other => format!("; passes by --optimise {}", other.name()),
    };
    say!("{name} on {}: {} parameters{frozen}{preset}", s.device.describe(), human_count(s.parameters(Role::Param) as f64));
    let named: Vec<(&str, &[Receipt])> = s.programs.iter().map(|(n, p)| (n.as_str(), &p.receipts[..])).collect();
    say!("{}{}", receipts_table(&named, verbose), peak(s).line());
}
