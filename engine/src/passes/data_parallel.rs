//! Divides every batch among the ranks.

use super::partition::{Division, Sources, divide, rewrite};
use super::{Numerics, OnRanks, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node};
use crate::meta::DType;
use crate::op::Share;
use crate::ranks::Ranks;
use crate::record::Recorder;

pub struct DataParallel;

impl Switch for DataParallel {
    fn name(&self) -> &'static str {
        "data-parallel"
    }

    fn about(&self) -> &'static str {
        "Divides every batch among the ranks. Sums over the batch, of losses and gradients, are all-reduced, so that a step is the same as on one rank."
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
        let Some(division) = placed(g, settings.ranks)? else {
            receipt.decline(format!("no feed has a first dimension that {} ranks can divide: each computes all of it", group.size), "");
            return Ok(());
        };
        division.check(g)?;
        division.describe(g, "a part of the batch", receipt);
        if adds_up_gradients(g) {
            receipt.notes.push("gradients are exchanged for every micro-batch".into());
        }
        rewrite(g, &division, group);
        Ok(())
    }
}

/// Whether gradients are added to a state: the program is one micro-batch of several. Each sum over the ranks is made before that, because a state holds no terms of
/// a sum.
fn adds_up_gradients(g: &Graph) -> bool {
    g.updates.iter().any(|(state, new)| {
        // An optimizer's op reads more than these two.
        let inputs = &g.nodes[new.node].inputs;
        inputs.len() == 2 && inputs.contains(state) && inputs.iter().any(|v| matches!(g.nodes[v.node].kind, Kind::Grad))
    })
}

/// The feeds that have a row for every example, the states that follow them, and what comes of that; None if there is nothing to divide.
fn placed(g: &Graph, ranks: &Ranks) -> Result<Option<Division>, Error> {
    let (group, parts) = (&ranks.data, ranks.data.size);
    let rows = |n: &Node| n.outputs[0].shape.first().copied().unwrap_or(1);
    let divides = |n: &Node| matches!(n.kind, Kind::Feed(_)) && rows(n) > 1 && rows(n).is_multiple_of(parts);
    let mut sources = Sources::new(g, ranks, group);
    sources.shares.extend(g.nodes.iter().enumerate().filter(|(_, n)| divides(n)).map(|(i, _)| (i, Share::Dim(0))));
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
        if !changed {
            sources.settle(g, ranks, group);
            return Ok((!sources.shares.is_empty()).then_some(division));
        }
    }
}
