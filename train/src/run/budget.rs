//! `--memory-budget`: settings with which the plan of a run fits, at the least added time. Every candidate is compiled and planned as it would run, so
//! what is chosen fits by its plan; which of those that fit is fastest is an estimate.

use super::load::{Programs, compile_for, planned};
use super::within;
use crate::config::{Config, TrainConfig};
use crate::recipe::{Recipe, Task, TrainError};
use crate::report::human_bytes;
use crate::warn;
use engine::graph::Kind;
use engine::passes::{Mode, Switches, Target, all};
use engine::{Compiled, DType};
use std::time::{Duration, Instant};

/// What a run is fitted into.
pub struct Limits<'a> {
    pub target: Target,
    /// Bytes that the device has free, where that is known.
    pub free: Option<u64>,
    /// Passes that change numbers more than by rounding, and may be switched on all the same.
    pub allowed: &'a [String],
    /// Whether the batch may be split: not where a run goes on.
    pub split: bool,
}

/// Settings that fit.
pub struct Fitted {
    pub config: Config,
    /// What was changed, as arguments of the command line.
    pub changes: Vec<String>,
    pub budget: u64,
    /// The planned peak, without the changes and with them.
    pub peaks: [u64; 2],
    /// The estimated time of a step, without the changes and with them.
    pub seconds: [f64; 2],
}

impl Fitted {
    pub fn line(&self) -> String {
        let ([before, after], budget) = (self.peaks.map(human_bytes), human_bytes(self.budget));
        if self.changes.is_empty() {
            return format!("memory budget {budget}: it fits as it is ({after})");
        }
        let more = 100.0 * (self.seconds[1] / self.seconds[0] - 1.0);
        let time = if more < 0.0 { "less" } else { "more" };
        format!(
            "memory budget {budget}: {} ({after} instead of {before}, about {:.0}% {time} time, estimated)",
            self.changes.join(" "),
            more.abs()
        )
    }
}

/// Levels of `recompute what=memory-bound` between keeping everything that it would recompute and nothing.
const LEVELS: u64 = 16;
/// A search that takes longer than this says so.
const PATIENCE: Duration = Duration::from_secs(2);

/// Settings with which the run's plan is within its memory budget. None where no budget was asked for: a run that goes on has its settings already.
pub fn fit(recipe: &dyn Recipe, config: &Config, limits: &Limits) -> Result<Option<Fitted>, TrainError> {
    let Some(budget) = config.memory_budget()?.filter(|_| config.is_given("memory_budget")) else { return Ok(None) };
    let mut search = Search { recipe, limits, budget, trials: 0, began: Instant::now(), told: false, smallest: None };
    let plain = search.whole(config, vec![])?;
    let (before, mut base, mut found) = ((plain.peak, plain.seconds), plain.clone(), Some(plain).filter(|p| p.peak <= budget));
    for pass in limits.allowed {
        if found.is_none() && !config.is_given(&format!("passes.{pass}")) {
            let mut with = base.config.clone();
            with.set_pass_argument(&format!("{pass}=auto"))?;
            base = search.whole(&with, [&base.changes[..], &[format!("--pass {pass}=auto")]].concat())?;
            found = Some(base.clone()).filter(|b| b.peak <= budget);
        }
    }
    if found.is_none() {
        found = search.cheapest(&base)?;
    }
    let Some(found) = found else { return Err(search.refusal()?) };
    let (peaks, seconds) = ([before.0, found.peak], [before.1, found.seconds]);
    Ok(Some(Fitted { config: found.config, changes: found.changes, budget, peaks, seconds }))
}

/// Settings, and what a run would take with them.
#[derive(Clone)]
struct Trial {
    config: Config,
    changes: Vec<String>,
    peak: u64,
    state: u64,
    seconds: f64,
}

/// A batch in so many parts, recorded.
struct Split {
    config: Config,
    changes: Vec<String>,
    task: Box<dyn Task>,
    /// Blocks of the programs that are differentiated.
    blocks: usize,
}

struct Search<'a> {
    recipe: &'a dyn Recipe,
    limits: &'a Limits<'a>,
    budget: u64,
    trials: usize,
    began: Instant,
    told: bool,
    /// The smallest plan so far.
    smallest: Option<Trial>,
}

impl Search<'_> {
    /// These settings, with the batch as it is.
    fn whole(&mut self, config: &Config, changes: Vec<String>) -> Result<Trial, TrainError> {
        let task = self.recipe.task(config)?;
        self.trial(&Split { config: config.clone(), changes, task, blocks: 0 }, None)
    }

    /// Plans with `recompute` set to this.
    fn trial(&mut self, split: &Split, recompute: Option<&str>) -> Result<Trial, TrainError> {
        self.trials += 1;
        if !self.told && self.began.elapsed() > PATIENCE {
            warn!("looking for settings within {} ...", human_bytes(self.budget));
            self.told = true;
        }
        let (mut config, mut changes) = (split.config.clone(), split.changes.clone());
        if let Some(value) = recompute {
            config.set_pass_argument(&format!("recompute={value}"))?;
            changes.push(format!("--pass recompute={value}"));
        }
        let programs = compile_for(&*split.task, &config.switches()?, self.limits.target, within(self.limits.free, Some(self.budget)))?;
        engine::passes::all_applied(programs.iter().map(|(_, c)| &c.receipts[..]))?;
        let peak = planned(&programs, self.limits.target);
        let seconds = seconds(&*split.task, &programs, self.limits.target);
        let trial = Trial { config, changes, peak: peak.total() as u64, state: peak.state as u64, seconds };
        if self.smallest.as_ref().is_none_or(|s| trial.peak < s.peak) {
            self.smallest = Some(trial.clone());
        }
        Ok(trial)
    }

    fn fits(&self, trial: &Trial) -> bool {
        trial.peak <= self.budget
    }

    /// Over all ways to split the batch, the fastest settings that fit.
    fn cheapest(&mut self, base: &Trial) -> Result<Option<Trial>, TrainError> {
        let mut best: Option<Trial> = None;
        for parts in self.parts(&base.config)? {
            let Some(split) = self.split(base, parts)? else { continue };
            let plain = if parts == 1 { base.clone() } else { self.trial(&split, None)? };
            // With more parts a step only takes longer, and no state shrinks.
            if best.as_ref().is_some_and(|b| plain.seconds >= b.seconds) || plain.state > self.budget {
                break;
            }
            let whole = self.fits(&plain);
            let found = if whole { Some(plain) } else { self.recomputed(&split, &plain)? };
            best = best.into_iter().chain(found).min_by(|a, b| a.seconds.total_cmp(&b.seconds));
            if whole {
                break;
            }
        }
        Ok(best)
    }

    /// In how many parts the batch may be computed.
    fn parts(&self, config: &Config) -> Result<Vec<usize>, TrainError> {
        let has = |name: &str| config.keys().any(|(section, key)| section == "train" && key.name == name);
        let kept = !self.limits.split || config.is_given("train.accumulate") || !["batch", "accumulate"].into_iter().all(has);
        let batch = if kept { 1 } else { config.section::<TrainConfig>("train")?.batch };
        Ok((1..=batch).filter(|parts| batch.is_multiple_of(*parts)).collect())
    }

    /// None where the recipe has no such batch.
    fn split(&self, base: &Trial, parts: usize) -> Result<Option<Split>, TrainError> {
        let (mut config, mut changes) = (base.config.clone(), base.changes.clone());
        let c: TrainConfig = config.section("train")?;
        let mut sets = vec![format!("train.batch={}", c.batch / parts), format!("train.accumulate={}", c.accumulate * parts)];
        // An evaluation reads as many examples as before.
        sets.extend((c.eval_batches > 0).then(|| format!("train.eval_batches={}", c.eval_batches.saturating_mul(parts as u64))));
        for set in sets.iter().filter(|_| parts > 1) {
            config.set(set)?;
            changes.push(format!("--set {set}"));
        }
        let task = match self.recipe.task(&config) {
            Ok(task) => task,
            Err(_) if parts > 1 => return Ok(None),
            Err(e) => return Err(e),
        };
        task.settle(within(self.limits.free, Some(self.budget)));
        let differentiated = |g: &engine::Graph| g.nodes.iter().any(|n| matches!(n.kind, Kind::Grad));
        let blocks = task.graphs().iter().filter(|(_, g)| differentiated(g)).map(|(_, g)| g.blocks()).min().unwrap_or(0);
        Ok(Some(Split { config, changes, task, blocks }))
    }

    /// The least recomputation that fits: of what is bound by memory, the cheapest first; then of the first n blocks too.
    fn recomputed(&mut self, split: &Split, plain: &Trial) -> Result<Option<Trial>, TrainError> {
        if split.config.is_given("passes.recompute") {
            return Ok(None);
        }
        let bound = self.trial(split, Some("auto,what=memory-bound"))?;
        if self.fits(&bound) {
            let saved = plain.peak.saturating_sub(bound.peak) >> 20;
            let with = |kept: u64| format!("auto,what=memory-bound,spare={}", saved * kept / LEVELS);
            // From recomputing the most to the least.
            return self.last_that_fits(split, bound, (1..LEVELS).map(with).collect()).map(Some);
        }
        let all = self.trial(split, Some("auto,what=blocks"))?;
        if !self.fits(&all) {
            return Ok(None);
        }
        let first = |n: usize| if n == 1 { "0".to_string() } else { format!("0-{}", n - 1) };
        let with = |n: usize| format!("auto,what=blocks,layers={},rest=memory-bound", first(n));
        self.last_that_fits(split, all, (1..split.blocks).rev().map(with).collect()).map(Some)
    }

    /// Of these values of `recompute`, each of which needs more memory than the one before, the last that fits; `found` is what fits before them.
    fn last_that_fits(&mut self, split: &Split, mut found: Trial, values: Vec<String>) -> Result<Trial, TrainError> {
        let (mut low, mut high) = (0, values.len());
        while low < high {
            let middle = (low + high) / 2;
            let trial = self.trial(split, Some(&values[middle]))?;
            if self.fits(&trial) {
                (low, found) = (middle + 1, trial);
            } else {
                high = middle;
            }
        }
        Ok(found)
    }

    /// By how much it misses, what the smallest plan is, and what would help beyond.
    fn refusal(&mut self) -> Result<TrainError, TrainError> {
        let smallest = self.smallest.clone().ok_or_else(|| TrainError::Other("nothing was planned".into()))?;
        let settings = if smallest.changes.is_empty() { "as it is".into() } else { format!("with {}", smallest.changes.join(" ")) };
        let mut help = vec![];
        let switches = smallest.config.switches()?;
        for pass in ["adam8bit", "bf16"].into_iter().filter(|pass| is_off(&switches, pass) && !smallest.config.is_given(&format!("passes.{pass}"))) {
            let mut with = smallest.config.clone();
            with.set_pass_argument(&format!("{pass}=auto"))?;
            let needs = self.whole(&with, vec![])?.peak;
            let fits = if needs <= self.budget { ", which fits" } else { "" };
            help.extend((needs < smallest.peak).then(|| format!("--allow {pass} (rounds more; {}{fits})", human_bytes(needs))));
        }
        let economies = self.recipe.economies(&smallest.config);
        help.extend(economies.iter().map(|sets| sets.iter().map(|set| format!("--set {set}")).collect::<Vec<_>>().join(" ")));
        help.push("a smaller train.batch, model.seq or model".into());
        Ok(TrainError::Budget {
            budget: human_bytes(self.budget),
            missing: human_bytes(smallest.peak.saturating_sub(self.budget)),
            smallest: human_bytes(smallest.peak),
            settings,
            help: help.join(", "),
        })
    }
}

fn is_off(switches: &Switches, pass: &str) -> bool {
    all().find(|p| p.name() == pass).is_some_and(|p| switches.mode(p) == Mode::Off)
}

/// What a device does in a second, roughly: bytes moved, operations on f32, on 16 bits and on 8; and what it takes to begin an op.
struct Rates {
    bytes: f64,
    flops: [f64; 3],
    begin: f64,
}

/// Of an H200; on other cards the parts of a step have about the same proportions.
const GPU: Rates = Rates { bytes: 3.5e12, flops: [5e13, 6e14, 1.1e15], begin: 2e-6 };
const CPU: Rates = Rates { bytes: 2e10, flops: [1e11, 1e11, 1e11], begin: 2e-6 };

/// The estimated time of a step: of every op, what its bytes or its arithmetic take.
fn seconds(task: &dyn Task, programs: &Programs, target: Target) -> f64 {
    let rates = if target == Target::Cpu { CPU } else { GPU };
    programs.iter().map(|(name, c)| task.runs(name) as f64 * of_program(c, &rates)).sum()
}

fn of_program(c: &Compiled, rates: &Rates) -> f64 {
    let of_node = |i: usize| {
        let node = &c.graph.nodes[i];
        let Kind::Op(op) = &node.kind else { return 0.0 };
        if op.is_view() {
            return 0.0;
        }
        let inputs = c.graph.inputs(i);
        let cost = op.cost(&inputs);
        let flops = match inputs.iter().map(|m| m.dtype).find(|t| !matches!(t, DType::I32 | DType::U8)) {
            Some(DType::F32) | None => rates.flops[0],
            Some(DType::BF16 | DType::F16) => rates.flops[1],
            Some(_) => rates.flops[2],
        };
        rates.begin + (cost.bytes as f64 / rates.bytes).max(cost.flops as f64 / flops)
    };
    (0..c.graph.nodes.len()).map(of_node).sum()
}
