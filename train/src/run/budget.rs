//! Settings with which the plan of a run fits into memory, at the least added time: into `--memory-budget`, by all that saves memory; into what the device
//! has free, by recomputation alone. Every candidate is compiled and planned as it would run, so what is chosen fits by its plan; which of those that fit
//! is fastest is an estimate.

use super::load::{Programs, compile_for, planned, runs};
use super::within;
use crate::config::{Config, TrainConfig};
use crate::recipe::phase::MERGES;
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
    /// Those of [`SAVING`] that may be switched on, though they round more.
    pub allowed: &'a [String],
    /// Whether the batch may be split: not where a run goes on.
    pub split: bool,
}

/// Passes that save memory and change numbers beyond the last bits: `--memory-budget` switches them on only where they are allowed.
pub const SAVING: &[&str] = &["adam8bit", "bf16"];

/// Settings that fit.
pub struct Fitted {
    pub config: Config,
    /// What was changed, as arguments of the command line.
    pub changes: Vec<String>,
    pub budget: u64,
    /// Whether someone asked for this budget; otherwise it is the device's memory.
    pub asked: bool,
    /// The planned peak and what CUDA takes beside the plan, without the changes and with them.
    pub peaks: [u64; 2],
    /// The estimated time of a step, without the changes and with them.
    pub seconds: [f64; 2],
}

impl Fitted {
    pub fn line(&self) -> String {
        let ([before, after], budget) = (self.peaks.map(human_bytes), human_bytes(self.budget));
        let what = if self.asked { "memory budget" } else { "memory that may be taken:" };
        if self.changes.is_empty() {
            return format!("{what} {budget}: it fits as it is ({after})");
        }
        let more = 100.0 * (self.seconds[1] / self.seconds[0] - 1.0);
        let time = if more < 0.0 { "less" } else { "more" };
        format!(
            "{what} {budget}: {} ({after} instead of {before}, about {:.0}% {time} time, estimated)",
            self.changes.join(" "),
            more.abs()
        )
    }
}

const RECOMPUTE: &str = "recompute";
/// Levels of `recompute what=memory-bound` between keeping everything that it would recompute and nothing.
const LEVELS: u64 = 16;
/// A search that takes longer than this says so.
const PATIENCE: Duration = Duration::from_secs(2);

/// Of free memory, what a plan may take: the allocator's gaps and other processes need some, too.
const SHARE: f64 = 0.95;

/// The least recomputation with which a task fits into what the device has free, unless somebody, a preset or a memory budget has said what is recomputed.
/// None where it is not to be chosen, or where it is not enough. A run that goes on keeps what was chosen for it as long as that fits, to compute the same bits.
pub fn fit_device(task: &dyn Task, config: &Config, limits: &Limits) -> Result<Option<Fitted>, TrainError> {
    let Some(free) = limits.free.filter(|_| config.text("memory_budget").is_empty()) else { return Ok(None) };
    let budget = (SHARE * free as f64) as u64;
    let mut base = config.clone();
    base.undo_budget(true);
    if base.pass(RECOMPUTE).is_some() || is_off(&config.switches()?, RECOMPUTE, limits.target) {
        return Ok(None);
    }
    let whole = |config: &Config| Split { parts: 1, config: config.clone(), sets: vec![], task: Held::Lent(task) };
    let mut search = Search::new(None, config, limits, budget);
    let mut now = search.trial(&whole(config), &[])?;
    if search.fits(&now) {
        let chosen = config.pass(RECOMPUTE).map_or("no more, because it fits", |_| "chosen when the run began, and fits");
        now.config.explain(RECOMPUTE, format!("{chosen} ({} planned)", human_bytes(now.peak)));
        let (peaks, seconds) = ([now.peak; 2], [now.seconds; 2]);
        return Ok(Some(Fitted { config: now.config, changes: vec![], budget, asked: false, peaks, seconds }));
    }
    let whole = whole(&base);
    let plain = search.trial(&whole, &[])?;
    let Some(mut found) = search.recomputed(&whole, &plain)? else { return Ok(None) };
    found.config.note_budget(&base);
    let [with, without, all] = [found.peak, plain.peak, budget].map(human_bytes);
    found.config.explain(RECOMPUTE, format!("as little as fits into {all}: {with} planned instead of {without}"));
    let (peaks, seconds) = ([plain.peak, found.peak], [plain.seconds, found.seconds]);
    Ok(Some(Fitted { config: found.config, changes: found.changes, budget, asked: false, peaks, seconds }))
}

/// Settings with which the run's plan is within its memory budget. None where no budget was asked for: a run that goes on has its settings already.
pub fn fit(recipe: &dyn Recipe, config: &Config, limits: &Limits) -> Result<Option<Fitted>, TrainError> {
    let Some(budget) = config.memory_budget()?.filter(|_| config.is_given("memory_budget")) else { return Ok(None) };
    let mut search = Search::new(Some(recipe), config, limits, budget);
    let whole = search.split(1)?;
    let plain = search.trial(&whole, &[])?;
    let before = (plain.peak, plain.seconds);
    let mut found = Some(plain).filter(|p| search.fits(p));
    if found.is_none() {
        let sets = search.sets(&whole, before.0)?;
        found = search.least_rounding(&whole, &sets)?;
        if found.is_none() {
            found = search.fastest(&sets, None)?;
        }
        // The last resort: exact, but as slow as the bus. It is taken, too, where all else costs more than the bus alone.
        if limits.target != Target::Cpu && !config.is_given("passes.offload") {
            let least = search.trial(&whole, &["offload=auto".into()])?.seconds;
            if found.as_ref().is_none_or(|f| f.seconds > least) {
                let moved = search.fastest(&sets, Some("offload=auto"))?;
                found = found.into_iter().chain(moved).min_by(|a, b| a.seconds.total_cmp(&b.seconds));
            }
        }
    }
    let Some(mut found) = found else { return Err(search.refusal()?) };
    found.config.note_budget(config);
    let (peaks, seconds) = ([before.0, found.peak], [before.1, found.seconds]);
    Ok(Some(Fitted { config: found.config, changes: found.changes, budget, asked: true, peaks, seconds }))
}

/// Settings, and what a run would take with them.
#[derive(Clone)]
struct Trial {
    config: Config,
    /// What was changed, as arguments of the command line.
    changes: Vec<String>,
    /// In how many parts the batch is computed, and which passes are set.
    parts: usize,
    passes: Vec<String>,
    peak: u64,
    seconds: f64,
}

/// The run with its batch in so many parts.
struct Split<'a> {
    parts: usize,
    config: Config,
    /// Keys that this sets.
    sets: Vec<String>,
    task: Held<'a>,
}

/// A task of one's own, or of whoever asks: making one may mean to read all of its data.
enum Held<'a> {
    Own(Box<dyn Task>),
    Lent(&'a dyn Task),
}

impl Split<'_> {
    fn task(&self) -> &dyn Task {
        match &self.task {
            Held::Own(task) => &**task,
            Held::Lent(task) => *task,
        }
    }
}

struct Search<'a> {
    /// None where nothing but passes is changed.
    recipe: Option<&'a dyn Recipe>,
    base: &'a Config,
    limits: &'a Limits<'a>,
    budget: u64,
    /// Passes that every trial has at the moment: allowed ones, and offload.
    passes: Vec<String>,
    began: Instant,
    told: bool,
    /// The smallest plan so far.
    smallest: Option<Trial>,
}

impl<'a> Search<'a> {
    fn new(recipe: Option<&'a dyn Recipe>, base: &'a Config, limits: &'a Limits<'a>, budget: u64) -> Search<'a> {
        Search { recipe, base, limits, budget, passes: vec![], began: Instant::now(), told: false, smallest: None }
    }

    /// Plans with these passes, `recompute=auto,what=blocks`, beside those that are allowed.
    fn trial(&mut self, split: &Split, passes: &[String]) -> Result<Trial, TrainError> {
        if !self.told && self.began.elapsed() > PATIENCE {
            warn!("looking for settings within {} ...", human_bytes(self.budget));
            self.told = true;
        }
        let (mut config, passes) = (split.config.clone(), [&self.passes[..], passes].concat());
        passes.iter().try_for_each(|pass| config.set_pass_argument(pass))?;
        let target = self.limits.target;
        let programs = compile_for(split.task(), &config.switches()?, target, within(self.limits.free, Some(self.budget)))?;
        engine::passes::all_applied(programs.iter().map(|(_, c)| &c.receipts[..]))?;
        let sets = split.sets.iter().map(|set| format!("--set {set}"));
        let changes = sets.chain(passes.iter().map(|pass| format!("--pass {pass}"))).collect();
        let beside = if target == Target::Cpu { 0 } else { BESIDE };
        let (peak, seconds) = (planned(&programs, target).total() as u64 + beside, seconds(split.task(), &programs, target));
        let trial = Trial { config, changes, parts: split.parts, passes, peak, seconds };
        if self.smallest.as_ref().is_none_or(|s| trial.peak < s.peak) {
            self.smallest = Some(trial.clone());
        }
        Ok(trial)
    }

    fn fits(&self, trial: &Trial) -> bool {
        trial.peak <= self.budget
    }

    /// Sets of allowed passes to try, the fewest passes first. A pass that saves nothing while activations are at their largest saves nothing at all;
    /// one that does may still cost memory once they are recomputed (bf16 keeps a copy of the weights), so every set is tried.
    fn sets(&mut self, whole: &Split, peak: u64) -> Result<Vec<Vec<String>>, TrainError> {
        let switches = self.base.switches()?;
        let mut sets = vec![vec![]];
        // A merged copy of the weights is made for speed alone.
        let merges = format!("{MERGES}=off");
        let task = whole.task();
        let has_phases =
            task.graphs().iter().any(|(name, _)| task.follows(name).is_some()) && !self.base.is_given(&format!("passes.{MERGES}"));
        if has_phases && self.trial(whole, std::slice::from_ref(&merges))?.peak < peak {
            sets.push(vec![merges]);
        }
        for pass in SAVING.iter().filter(|pass| self.limits.allowed.iter().any(|a| a == *pass)) {
            let value = format!("{pass}=auto");
            if self.is_open(&switches, pass) && self.trial(whole, std::slice::from_ref(&value))?.peak < peak {
                let with = |set: &Vec<String>| [&set[..], std::slice::from_ref(&value)].concat();
                sets.extend(sets.iter().map(with).collect::<Vec<_>>());
            }
        }
        sets.sort_by_key(Vec::len);
        Ok(sets)
    }

    /// Whether a pass is off, was not asked to be, and can be switched on beside the others.
    fn is_open(&self, switches: &Switches, pass: &str) -> bool {
        let off = |pass: &str| is_off(switches, pass, self.limits.target);
        off(pass) && !self.base.is_given(&format!("passes.{pass}")) && (pass != "bf16" || off("fp16"))
    }

    /// The first of these sets with which the whole batch fits, nothing else changed.
    fn least_rounding(&mut self, whole: &Split, sets: &[Vec<String>]) -> Result<Option<Trial>, TrainError> {
        for set in sets.iter().filter(|set| !set.is_empty()) {
            let trial = self.trial(whole, set)?;
            if self.fits(&trial) {
                return Ok(Some(trial));
            }
        }
        Ok(None)
    }

    /// Over all sets of passes, each with `more`, the fastest settings that fit; of equally fast ones those with fewer passes.
    fn fastest(&mut self, sets: &[Vec<String>], more: Option<&str>) -> Result<Option<Trial>, TrainError> {
        let mut best: Option<Trial> = None;
        for set in sets {
            self.passes = set.iter().cloned().chain(more.map(Into::into)).collect();
            let found = self.cheapest()?;
            best = best.into_iter().chain(found).min_by(|a, b| a.seconds.total_cmp(&b.seconds));
        }
        self.passes.clear();
        Ok(best)
    }

    /// Over all ways to split the batch, the fastest settings that fit.
    fn cheapest(&mut self) -> Result<Option<Trial>, TrainError> {
        let mut best: Option<Trial> = None;
        for parts in self.parts()? {
            // A recipe may have no such batch.
            let Ok(split) = self.split(parts) else { continue };
            let plain = self.trial(&split, &[])?;
            // With more parts a step only takes longer.
            if best.as_ref().is_some_and(|b| plain.seconds >= b.seconds) {
                break;
            }
            let fits = self.fits(&plain);
            let found = if fits { Some(plain) } else { self.recomputed(&split, &plain)? };
            best = best.into_iter().chain(found).min_by(|a, b| a.seconds.total_cmp(&b.seconds));
            if fits {
                break;
            }
        }
        Ok(best)
    }

    /// In how many parts the batch may be computed.
    fn parts(&self) -> Result<Vec<usize>, TrainError> {
        let has = |name: &str| self.base.keys().any(|(section, key)| section == "train" && key.name == name);
        let kept = !self.limits.split || self.base.is_given("train.accumulate") || !["batch", "accumulate"].into_iter().all(has);
        let batch = if kept { 1 } else { self.base.section::<TrainConfig>("train")?.batch };
        Ok((1..=batch).filter(|parts| batch.is_multiple_of(*parts)).collect())
    }

    fn split(&self, parts: usize) -> Result<Split<'a>, TrainError> {
        let (mut config, mut sets) = (self.base.clone(), vec![]);
        if parts > 1 {
            let c: TrainConfig = config.section("train")?;
            sets = vec![format!("train.batch={}", c.batch / parts), format!("train.accumulate={}", c.accumulate * parts)];
            // An evaluation reads as many examples as before.
            sets.extend(
                (c.eval_batches > 0 && c.eval_batch == 0)
                    .then(|| format!("train.eval_batches={}", c.eval_batches.saturating_mul(parts as u64))),
            );
        }
        sets.iter().try_for_each(|set| config.set(set))?;
        let Some(recipe) = self.recipe else { return Err(TrainError::Other("the batch is not to be split".into())) };
        let task = Held::Own(recipe.task(&config)?);
        Ok(Split { parts, config, sets, task })
    }

    /// The least recomputation that fits: of what is bound by memory, the cheapest first; then of the first n blocks too.
    fn recomputed(&mut self, split: &Split, plain: &Trial) -> Result<Option<Trial>, TrainError> {
        if split.config.is_given("passes.recompute") {
            return Ok(None);
        }
        let recompute = |value: String| vec![format!("recompute=auto,what={value}")];
        let bound = self.trial(split, &recompute("memory-bound".into()))?;
        if self.fits(&bound) {
            let saved = plain.peak.saturating_sub(bound.peak) >> 20;
            let with = |kept: u64| recompute(format!("memory-bound,spare={}", saved * kept / LEVELS));
            return self.last_that_fits(split, bound, (1..LEVELS).map(with).collect()).map(Some);
        }
        let all = self.trial(split, &recompute("blocks".into()))?;
        if !self.fits(&all) {
            return Ok(None);
        }
        let first = |n: usize| if n == 1 { "0".to_string() } else { format!("0-{}", n - 1) };
        let with = |n: usize| recompute(format!("blocks,layers={},rest=memory-bound", first(n)));
        self.last_that_fits(split, all, (1..blocks(split.task())).rev().map(with).collect()).map(Some)
    }

    /// Of these passes, which need more memory from one to the next, the last that fit; `found` is what fits before them.
    fn last_that_fits(&mut self, split: &Split, mut found: Trial, values: Vec<Vec<String>>) -> Result<Trial, TrainError> {
        let (mut low, mut high) = (0, values.len());
        while low < high {
            let middle = (low + high) / 2;
            let trial = self.trial(split, &values[middle])?;
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
        let (switches, split) = (smallest.config.switches()?, self.split(smallest.parts)?);
        // Those that are allowed were tried.
        let open = |pass: &&str| self.is_open(&switches, pass) && !self.limits.allowed.iter().any(|a| a == pass);
        let mut help = vec![];
        for pass in SAVING.iter().copied().filter(open).collect::<Vec<_>>() {
            let needs = self.trial(&split, &[&smallest.passes[..], &[format!("{pass}=auto")]].concat())?.peak;
            let fits = if needs <= self.budget { ", which fits" } else { "" };
            help.extend((needs < smallest.peak).then(|| format!("--allow {pass} (rounds more; {}{fits})", human_bytes(needs))));
        }
        let economies = self.recipe.map_or(vec![], |r| r.economies(&smallest.config));
        help.extend(economies.iter().map(|sets| sets.iter().map(|set| format!("--set {set}")).collect::<Vec<_>>().join(" ")));
        // A batch of one cannot be smaller, and not every model has sequences.
        let batch = smallest.config.section::<TrainConfig>("train")?.batch;
        let seq = smallest.config.value("model", "seq").is_some();
        help.push(match (batch > 1, seq) {
            (true, true) => "a smaller train.batch, model.seq or model".into(),
            (true, false) => "a smaller train.batch or model".into(),
            (false, true) => "a smaller model.seq or model".into(),
            (false, false) => "a smaller model".into(),
        });
        let settings = if smallest.changes.is_empty() { "as it is".into() } else { format!("with {}", smallest.changes.join(" ")) };
        Ok(TrainError::Budget { budget: self.budget, smallest: smallest.peak, settings, help: help.join(", ") })
    }
}

/// Blocks of the model, in every program that is differentiated.
fn blocks(task: &dyn Task) -> usize {
    let differentiated = |g: &engine::Graph| g.nodes.iter().any(|n| matches!(n.kind, Kind::Grad));
    task.graphs().iter().filter(|(_, g)| differentiated(g)).map(|(_, g)| g.blocks()).min().unwrap_or(0)
}

fn is_off(switches: &Switches, pass: &str, target: Target) -> bool {
    all().find(|p| p.name() == pass).is_some_and(|p| switches.mode(p, target) == Mode::Off)
}

/// What CUDA takes beside the plan, for loaded kernels and captured graphs: 10 to 20 MiB were measured, and allocations are of whole pages of 2 MiB.
const BESIDE: u64 = 64 << 20;

/// What a device does in a second, roughly: bytes moved, operations on f32, on 16 bits and on 8; and what it takes to begin an op.
struct Rates {
    bytes: f64,
    flops: [f64; 3],
    begin: f64,
    /// Outputs of a GEMM that are computed at the same time: a tile on each multiprocessor.
    at_once: usize,
}

impl Rates {
    /// How much longer a GEMM with so many outputs takes because its last round of tiles leaves multiprocessors idle.
    fn rounds(&self, outputs: usize) -> f64 {
        let rounds = outputs as f64 / self.at_once as f64;
        if rounds < 1.0 { 1.0 } else { rounds.ceil() / rounds }
    }
}

/// Of an H200; on other cards the parts of a step have about the same proportions.
const GPU: Rates = Rates { bytes: 3.5e12, flops: [5e13, 7.5e14, 1.3e15], begin: 2e-6, at_once: 132 * 128 * 256 };
const CPU: Rates = Rates { bytes: 2e10, flops: [1e11, 1e11, 1e11], begin: 2e-6, at_once: 1 };

/// How much longer micro-batches take than their ops are estimated to: two of 8 x 1024 tokens took 7.7% longer than one of 16 (1.5B, H200), and 3% were estimated.
const SPLIT: f64 = 1.04;

/// The estimated time of a step: of every op, what its bytes or its arithmetic take.
fn seconds(task: &dyn Task, programs: &Programs, target: Target) -> f64 {
    let is_split = |name: &str| task.again(name).is_some() || programs.iter().any(|p| task.again(p.0) == Some(name));
    let one = |(runs, (name, c)): (f64, &(&str, Compiled))| if is_split(name) { SPLIT } else { 1.0 } * runs * of_program(c, target);
    runs(task, programs).into_iter().zip(programs).map(one).sum()
}

fn of_program(c: &Compiled, target: Target) -> f64 {
    // What lies in host memory crosses the bus, both ways at once.
    let bus = c.plan.memory.host as f64 / BUS;
    (0..c.graph.nodes.len()).map(|i| node_seconds(c, i, target)).sum::<f64>() + bus
}

/// The estimated time of a node, without what ranks exchange.
pub fn node_seconds(c: &Compiled, i: usize, target: Target) -> f64 {
    let (rates, node) = (if target == Target::Cpu { CPU } else { GPU }, &c.graph.nodes[i]);
    let Kind::Op(op) = &node.kind else { return 0.0 };
    if op.is_view() {
        return 0.0;
    }
    let inputs = c.graph.inputs(i);
    let cost = op.cost(&inputs);
    let written: usize = node.outputs.iter().map(|m| m.shape.iter().product::<usize>()).sum();
    let flops = match inputs.iter().map(|m| m.dtype).find(|t| !matches!(t, DType::I32 | DType::U8)) {
        Some(DType::F32) | None => rates.flops[0],
        Some(DType::BF16 | DType::F16) => rates.flops[1],
        Some(_) => rates.flops[2],
    };
    rates.begin + (cost.bytes as f64 / rates.bytes).max(cost.flops as f64 / flops * rates.rounds(written))
}

/// Bytes that a bus moves in a second: PCI Express 5 with 16 lanes.
const BUS: f64 = 4.5e10;
