//! Programs of a phase: one that is run first, and others that are run, often many times, before any weight changes. What depends on weights alone is made
//! once, by the first: weights with their adapters merged.

use super::TrainError;
use engine::passes::{MERGED, Target, follows, phase};
use engine::{Compiled, Graph, Switches};

/// The pass that makes something once a phase.
pub const MERGES: &str = "merge-adapters";

pub type Programs = Vec<(&'static str, Compiled)>;

/// The programs of a phase, the first of which is run first.
pub fn compile(graphs: Vec<(&'static str, Graph)>, switches: &Switches, target: Target) -> Result<Programs, TrainError> {
    let Some([first, later]) = phase(switches, target) else { return each(graphs, |_| switches, target) };
    let compiled = each(graphs.clone(), |i| if i == 0 { &first } else { &later }, target)?;
    let agree = compiled.iter().skip(1).all(|(_, c)| follows(&compiled[0].1.graph, &c.graph));
    if agree { Ok(compiled) } else { apart(graphs, switches, target, "the programs of a phase do not have the same adapters") }
}

/// The same with nothing made once for all, and why.
pub fn apart(graphs: Vec<(&'static str, Graph)>, switches: &Switches, target: Target, why: &str) -> Result<Programs, TrainError> {
    let mut switches = switches.clone().with(MERGES, "off")?;
    switches.explain(MERGES, why);
    each(graphs, |_| &switches, target)
}

fn each<'a>(graphs: Vec<(&'static str, Graph)>, switches: impl Fn(usize) -> &'a Switches, target: Target) -> Result<Programs, TrainError> {
    graphs.into_iter().enumerate().map(|(i, (name, graph))| Ok((name, Compiled::new(graph, switches(i), target)?))).collect()
}

/// Bytes of merged weights that a program makes.
pub fn merged(c: &Compiled) -> usize {
    c.graph.states().filter(|(s, _)| s.name.starts_with(MERGED)).map(|(_, meta)| meta.bytes()).sum()
}
