//! A task's programs, compiled and loaded, where the machine has the memory for them.

use crate::config::Config;
use crate::memory;
use crate::recipe::{Session, Task, TrainError};
use crate::report::human_bytes;
use engine::{Compiled, Device, Switches};

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
