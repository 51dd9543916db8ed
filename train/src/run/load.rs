//! A task's programs, compiled and loaded, where the machine has the memory for them.

use crate::config::{Config, TrainConfig};
use crate::memory;
pub use crate::recipe::phase::Programs;
use crate::recipe::{Recipe, Session, Task, TrainError, phase};
use crate::report::human_bytes;
use engine::passes::{Target, keeps_weights, repeated};
use engine::plan::Memory;
use engine::program::own_memory;
use engine::{Compiled, Device, Ranks, Switches};
use std::collections::BTreeMap;

/// A task with its programs loaded.
pub fn load(task: &dyn Task, config: &Config, device: &Device) -> Result<Session, TrainError> {
    load_with(task, &config.switches()?, config.seed(), device)
}

/// The same for a run, whose plan must be within its memory budget, where it has one.
pub fn load_within_budget(task: &dyn Task, config: &Config, device: &Device) -> Result<Session, TrainError> {
    let (switches, free, budget) = (config.switches()?, memory::available_to_all(device, &config.ranks)?, config.memory_budget()?);
    let compiled = compile_for(task, &switches, device.target(), within(free, budget))?;
    let planned = planned(&compiled, device.target());
    if budget.is_some_and(|budget| planned.total() as u64 > budget) {
        return Err(TrainError::OverBudget {
            needs: human_bytes(planned.total() as u64),
            budget: config.text("memory_budget").into(),
            plan: planned.line(),
        });
    }
    load_compiled(task, compiled, &switches, config.seed(), device)
}

/// A task that is evaluated and not trained: without the programs of training, where it says which one it evaluates with.
pub fn load_to_evaluate(task: &dyn Task, config: &Config, device: &Device) -> Result<Session, TrainError> {
    let switches = config.switches()?;
    let mut compiled = compile(task, &switches, device)?;
    if let Some(program) = task.evaluates_with() {
        compiled.retain(|(name, _)| *name == program);
    }
    load_compiled(task, compiled, &switches, config.seed(), device)
}

/// What may be taken of free memory.
pub fn within(free: Option<u64>, budget: Option<u64>) -> Option<u64> {
    free.into_iter().chain(budget).min()
}

pub fn load_with(task: &dyn Task, switches: &Switches, seed: u64, device: &Device) -> Result<Session, TrainError> {
    load_compiled(task, compile(task, switches, device)?, switches, seed, device)
}

/// The same for programs that were compiled before.
pub fn load_compiled(task: &dyn Task, compiled: Programs, switches: &Switches, seed: u64, device: &Device) -> Result<Session, TrainError> {
    fits(task, &compiled, switches, device)?;
    let mut s = Session::new(device, switches, seed);
    as_first(&switches.ranks, device, || {
        compiled.into_iter().try_for_each(|(name, c)| s.load_compiled(name, c).map(drop))?;
        Ok(())
    })?;
    engine::passes::all_applied(s.programs.values().map(|p| &p.receipts[..]))?;
    task.prepare(&mut s)?;
    Ok(s)
}

/// Of several ranks on GPUs, the first loads first. What it has chosen by timing, the others take: all compute the same bits.
fn as_first(ranks: &Ranks, device: &Device, load: impl FnOnce() -> Result<(), TrainError>) -> Result<(), TrainError> {
    let Some(cuda) = device.gpu().filter(|_| ranks.size() > 1) else { return load() };
    if ranks.rank() > 0 {
        let told = ranks.gather(&[])?;
        let chosen: Vec<String> = String::from_utf8_lossy(&told[0]).lines().map(str::to_owned).collect();
        cuda.prefer(&chosen);
        return load();
    }
    load()?;
    ranks.gather(cuda.choices().join("\n").as_bytes()).map(drop)?;
    Ok(())
}

fn compile(task: &dyn Task, switches: &Switches, device: &Device) -> Result<Programs, TrainError> {
    compile_for(task, switches, device.target(), memory::available(device))
}

/// A task's programs for a target with so much free memory.
pub fn compile_for(task: &dyn Task, switches: &Switches, target: Target, free: Option<u64>) -> Result<Programs, TrainError> {
    task.settle(free);
    let mut all = vec![];
    let (later, others): (Vec<_>, Vec<_>) = task.graphs().into_iter().partition(|(name, _)| task.follows(name).is_some());
    for (name, graph) in others {
        let behind: Vec<_> = later.iter().filter(|(l, _)| task.follows(l) == Some(name)).cloned().collect();
        if !behind.is_empty() {
            all.extend(phase::compile([vec![(name, graph)], behind].concat(), switches, target)?);
            continue;
        }
        let (Some(again), Some([first, others])) = (task.again(name), repeated(switches, target)) else {
            all.push((name, Compiled::new(graph, switches, target)?));
            continue;
        };
        all.push((name, Compiled::new(graph.clone(), &first, target)?));
        if keeps_weights(&all[all.len() - 1].1.graph) {
            all.push((again, Compiled::new(graph, &others, target)?));
        }
    }
    Ok(all)
}

/// How often a step runs each of these programs.
pub fn runs(task: &dyn Task, programs: &[(&str, Compiled)]) -> Vec<f64> {
    let has = |name: &str| programs.iter().any(|p| p.0 == name);
    let of = |name: &str| match task.again(name) {
        Some(again) if has(again) => 1.0,
        _ => match programs.iter().find(|p| task.again(p.0) == Some(name)) {
            Some(first) => task.runs(first.0) - 1.0,
            None => task.runs(name),
        },
    };
    programs.iter().map(|p| of(p.0)).collect()
}

/// Bytes of state, and of everything else; on the CPU also of the batches that wait to be fed.
fn needs(task: &dyn Task, programs: &Programs, device: &Device) -> (u64, u64) {
    let peak = planned(programs, device.target());
    let feeds = programs.iter().map(|(_, c)| c.memory().feeds).max().unwrap_or(0);
    let waiting =
        if is_gpu(device) { 0 } else { 2 * engine::mutant!("memory-without-micro-batches", task.train_config().accumulate, 1) * feeds };
    (peak.state as u64, (peak.activations + peak.workspace + peak.tables + waiting) as u64)
}

type Passes = &'static [(&'static str, &'static str)];

fn is_gpu(device: &Device) -> bool {
    matches!(device, Device::Cuda(..))
}

/// Passes that take memory away, the least change first.
fn lighter(device: &Device) -> impl Iterator<Item = Passes> {
    let sets: [Passes; 6] = [
        &[(phase::MERGES, "off")],
        &[("bf16", "auto")],
        &[("recompute", "auto,what=memory-bound")],
        &[("recompute", "auto,what=blocks")],
        &[("bf16", "auto"), ("recompute", "auto,what=memory-bound")],
        &[("bf16", "auto"), ("recompute", "auto,what=blocks")],
    ];
    let gpu = is_gpu(device);
    sets.into_iter().filter(move |set| gpu || set.iter().all(|s| s.0 != "bf16"))
}

fn switched(switches: &Switches, passes: Passes) -> Result<Switches, TrainError> {
    let mut with = switches.clone();
    passes.iter().try_for_each(|(pass, value)| with.set(pass, value))?;
    Ok(with)
}

/// Refuses what the machine has no memory for, before taking any; and names switches with which it would fit.
fn fits(task: &dyn Task, programs: &Programs, switches: &Switches, device: &Device) -> Result<(), TrainError> {
    let (state, arena) = needs(task, programs, device);
    let Some(free) = memory::available(device) else { return Ok(()) };
    if state.saturating_add(arena) <= free {
        return Ok(());
    }
    let mut ways = vec![];
    for set in lighter(device) {
        let (state, arena) = needs(task, &compile(task, &switched(switches, set)?, device)?, device);
        if state.saturating_add(arena) <= free {
            let flags: Vec<String> = set.iter().map(|(pass, value)| format!("--pass {pass}={value}")).collect();
            ways.push(format!("{} (needs {})", flags.join(" "), human_bytes(state + arena)));
        }
    }
    Err(TrainError::Memory {
        needs: human_bytes(state.saturating_add(arena)),
        parts: format!("state {}, activations, workspace and feeds {}", human_bytes(state), human_bytes(arena)),
        free,
        passes: ways,
        settings: vec![],
    })
}

/// Settings with which a run that has no memory would fit, the least change first: for the config as it is, and for each of the recipe's economies, the
/// largest batch, with as many micro-batches as make up for it, and the passes that it needs. `free` is what the refusal said: measured again, it may be more.
pub fn settings_that_fit(recipe: &dyn Recipe, config: &Config, device: &Device, free: u64) -> Result<Vec<String>, TrainError> {
    let c: TrainConfig = config.section("train")?;
    let economies = std::iter::once(vec![]).chain(recipe.economies(config));
    let found = economies.map(|economy| {
        for parts in (1..=c.batch).filter(|parts| c.batch.is_multiple_of(*parts)) {
            let mut sets: Vec<String> = economy.clone();
            if parts > 1 {
                sets.push(format!("train.batch={}", c.batch / parts));
                sets.push(format!(
                    "train.accumulate={}",
                    engine::mutant!("fitting-settings-forget-accumulate", c.accumulate * parts, parts)
                ));
            }
            let mut with = config.clone();
            sets.iter().try_for_each(|set| with.set(set))?;
            // Of a batch that does not divide, or of data and model that do not go together, there is nothing to say.
            let Ok(task) = recipe.task(&with) else { continue };
            for passes in std::iter::once(&[][..]).chain(lighter(device)) {
                let switches = switched(&with.switches()?, passes)?;
                let (state, arena) = needs(&*task, &compile(&*task, &switches, device)?, device);
                if state.saturating_add(arena) <= free {
                    let sets = sets.iter().map(|set| format!("--set {set}")).chain(passes.iter().map(|(p, v)| format!("--pass {p}={v}")));
                    return Ok(Some(format!("{} (needs {})", sets.collect::<Vec<_>>().join(" "), human_bytes(state + arena))));
                }
                // A smaller batch has the same state.
                if state > free && passes.is_empty() && !is_gpu(device) {
                    return Ok(None);
                }
            }
        }
        Ok(None)
    });
    Ok(found.collect::<Result<Vec<_>, TrainError>>()?.into_iter().flatten().collect())
}

/// Bytes that a session's programs take at most: state once, the largest arena, everything else of each.
pub fn peak(s: &Session) -> Peak {
    let memory: Vec<Memory> = s.programs.values().map(|p| p.memory).collect();
    Peak::new(s.store.bytes(), &memory, s.device.own_memory())
}

/// The same before they are loaded.
pub fn planned(programs: &Programs, target: Target) -> Peak {
    let memory: Vec<Memory> = programs.iter().map(|(_, c)| c.memory()).collect();
    let states: BTreeMap<&str, usize> =
        programs.iter().flat_map(|(_, c)| c.graph.states()).map(|(state, meta)| (state.name.as_str(), meta.bytes())).collect();
    Peak::new(states.values().sum(), &memory, own_memory(target))
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    pub state: usize,
    pub activations: usize,
    pub workspace: usize,
    pub tables: usize,
    /// States in pinned host memory.
    pub host: usize,
}

impl Peak {
    /// `own`: what the device needs for itself.
    fn new(state: usize, programs: &[Memory], own: usize) -> Peak {
        let largest = programs.iter().max_by_key(|m| m.activations + m.workspace).copied().unwrap_or_default();
        let constants = programs.iter().map(|m| m.constants);
        let constants: usize = engine::mutant!("tables-of-one-program-alone", constants.sum(), constants.max().unwrap_or(0));
        let feeds = programs.iter().map(|m| m.feeds);
        let feeds: usize = engine::mutant!("feeds-of-all-programs", feeds.max().unwrap_or(0), feeds.sum());
        let host = programs.iter().map(|m| m.host).max().unwrap_or(0);
        let state = state.saturating_sub(host);
        Peak { state, activations: largest.activations, workspace: largest.workspace + own, tables: constants + feeds, host }
    }

    pub fn total(&self) -> usize {
        self.state + self.activations + self.workspace + self.tables
    }

    pub fn line(&self) -> String {
        let h = |b: usize| human_bytes(b as u64);
        let (total, state, activations, workspace) = (h(self.total()), h(self.state), h(self.activations), h(self.workspace));
        format!(
            "peak {total}: state {state}, activations {activations}, workspace {workspace}, tables and feeds {} (planned){}",
            h(self.tables),
            if self.host > 0 { format!("; {} of states in host memory", h(self.host)) } else { String::new() }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::Cpu;

    #[test]
    fn programs_take_turns_with_everything_but_constants() {
        let one = Memory { constants: 1, feeds: 30, activations: 100, workspace: 7, ..Memory::default() };
        let two = Memory { constants: 2, feeds: 40, activations: 80, workspace: 50, ..Memory::default() };
        let peak = Peak::new(1000, &[one, two], 5);
        assert_eq!(peak, Peak { state: 1000, activations: 80, workspace: 55, tables: 3 + 40, host: 0 });
        assert_eq!(peak.total(), 1000 + 80 + 55 + 43);
        // What lies in host memory is not on the device.
        let peak = Peak::new(1000, &[Memory { host: 300, ..one }, two], 0);
        assert_eq!((peak.state, peak.host), (700, 300));
    }

    #[test]
    fn on_the_cpu_two_batches_wait_for_each_micro_batch() {
        let device = Device::cpu(Cpu::new(1));
        let needs_of = |accumulate: u64| {
            let recipe = crate::recipe::find("hydra").unwrap();
            let mut c = crate::recipe::preset(recipe, None).unwrap();
            let own = format!("accumulate={accumulate}");
            ["dim=32", "blocks=2", "hidden=32", "seq=32", "batch=2", "heads=2", "kv_heads=1", &own].iter().for_each(|s| c.set(s).unwrap());
            let task = recipe.task(&c).unwrap();
            let programs = compile_for(&*task, &c.switches().unwrap(), device.target(), None).unwrap();
            (needs(&*task, &programs, &device).1 as usize, planned(&programs, device.target()))
        };
        let (all, peak) = needs_of(3);
        let waiting = all - (peak.activations + peak.workspace + peak.tables);
        // Of two rows of 32: ids and targets in four bytes each, and what a micro-batch is told beside them.
        let rows = 2 * 32 * 8;
        assert!((6 * rows..=6 * rows + 6 * 64).contains(&waiting), "{waiting}, of {rows} a micro-batch");
    }
}
