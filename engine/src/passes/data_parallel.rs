//! Divides every batch among the ranks.

use super::partition::{Division, Sources, Way, divide, rewrite};
use super::terms::{Accumulation, accumulations};
use super::{Numerics, OnRanks, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node, Value};
use crate::meta::DType;
use crate::op::Share;
use crate::ranks::Ranks;
use crate::record::Recorder;
use std::collections::HashSet;

pub struct DataParallel;

impl Switch for DataParallel {
    fn name(&self) -> &'static str {
        "data-parallel"
    }

    fn about(&self) -> &'static str {
        "Divides every batch among the ranks. Sums over the batch, of losses and gradients, are all-reduced, so that a step is the same as on one rank. Gradients that are added up over micro-batches are all-reduced once a step."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn on_ranks(&self) -> Option<OnRanks> {
        Some(OnRanks { ranks: [2, 1], with: &[] })
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[3, 4], Init::Normal { std: 1.0 });
        let x = r.feed("x", &[8, 3], DType::F32);
        let loss = x.matmul(w).silu().mean();
        r.output("loss", loss);
        r.output("dw", r.grad(loss, &[w])[0]);
    }
}

impl Pass for DataParallel {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let group = &settings.ranks.data;
        if group.is_alone() {
            return Ok(());
        }
        let Some(Placed { division, terms, exchanged }) = placed(g, settings.ranks)? else {
            receipt.decline(format!("no feed has a first dimension that {} ranks can divide: each computes all of it", group.size), "");
            return Ok(());
        };
        division.check(g)?;
        if division.divided(g) > 0 {
            division.describe(g, "a part of the batch", receipt);
        }
        for scope in exchanged {
            let why = "its gradient is exchanged for every micro-batch: an op that reads it, or what is computed of it, is not divided";
            receipt.decline(why, &scope);
        }
        if terms > 0 {
            receipt.notes.push(format!("{terms} gradients are added up on each rank, and exchanged once a step"));
        }
        let sums = read(g, &division);
        if sums > 0 {
            receipt.applied += sums;
            receipt.notes.push(format!("{sums} sums of the micro-batches' gradients are exchanged"));
        }
        rewrite(g, &division, group);
        Ok(())
    }
}

/// How the batch is divided.
struct Placed {
    division: Division,
    /// Gradients that are added to what a rank has of earlier micro-batches.
    terms: usize,
    /// Where the weights are whose gradients are added up over the ranks before that.
    exchanged: Vec<String>,
}

/// How many sums of gradients, of which each rank has a term, a program reads for something else than to add to them.
fn read(g: &Graph, d: &Division) -> usize {
    let is_term = |v: &Value| g.nodes[v.node].is_source() && d.shares[v.node][0] == Share::Sum;
    let readers = g.nodes.iter().zip(&d.ways).filter(|(_, way)| **way != Way::Terms);
    readers.flat_map(|(n, _)| &n.inputs).filter(|v| is_term(v)).collect::<HashSet<_>>().len()
}

/// The feeds that have a row for every example, the states that follow them, and what comes of that; None if there is nothing to divide.
fn placed(g: &Graph, ranks: &Ranks) -> Result<Option<Placed>, Error> {
    let (group, parts) = (&ranks.data, ranks.data.size);
    let rows = |n: &Node| n.outputs[0].shape.first().copied().unwrap_or(1);
    let divides = |n: &Node| matches!(n.kind, Kind::Feed(_)) && rows(n) > 1 && rows(n).is_multiple_of(parts);
    let mut sources = Sources::new(g, ranks, group);
    sources.shares.extend(g.nodes.iter().enumerate().filter(|(_, n)| divides(n)).map(|(i, _)| (i, Share::Dim(0))));
    let added = accumulations(g);
    sources.shares.extend(added.iter().filter(|a| !sources.settled.contains(&a.state)).map(|a| (a.state, Share::Sum)));
    loop {
        let division = divide(g, &sources, parts)?;
        let mut changed = false;
        // A feed that is needed as a whole, such as a seed or a table of positions, is not divided.
        for (v, _) in &division.gathered {
            if matches!(g.nodes[v.node].kind, Kind::Feed(_)) {
                changed |= sources.shares.remove(&v.node).is_some();
            }
        }
        // What is carried from one batch to the next is divided, too.
        changed |= division.follow(g, &mut sources);
        // A gradient that all ranks have is added to what all have.
        let is_term = |a: &Accumulation| division.shares[a.gradient.node][a.gradient.out] == Share::Sum;
        for a in added.iter().filter(|a| !is_term(a) && !sources.settled.contains(&a.state)).collect::<Vec<_>>() {
            changed |= sources.shares.remove(&a.state).is_some();
        }
        if !changed {
            sources.settle(g, ranks, group);
            let weight = |a: &Accumulation| g.nodes[a.gradient.node].inputs[1 + a.gradient.out].node;
            // Another program may have made a sum of terms of the state: then each rank adds a share of what all have.
            let is_whole = |a: &&Accumulation| !is_term(a) && sources.shares.get(&a.state) != Some(&Share::Sum);
            let exchanged = added.iter().filter(is_whole).map(|a| g.nodes[weight(a)].scope.to_string()).collect();
            let terms = added.iter().filter(|a| is_term(a)).count();
            return Ok((!sources.shares.is_empty()).then_some(Placed { division, terms, exchanged }));
        }
    }
}
