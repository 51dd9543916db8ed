//! Divides weights among ranks that work on the same examples.

use super::partition::{Division, Sources, Way, divide, rewrite, try_divide};
use super::{Numerics, OnRanks, Pass, Receipt, Setting, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Role, Value};
use crate::meta::{DType, Meta};
use crate::op::Share;
use crate::ops::view::Slice;
use crate::ranks::Ranks;
use crate::record::Recorder;
use std::collections::{BTreeSet, HashMap};

pub struct TensorParallel;

impl Switch for TensorParallel {
    fn name(&self) -> &'static str {
        "tensor-parallel"
    }

    fn about(&self) -> &'static str {
        "Divides weights among ranks that have the same examples: columns of the first matmul of an attention or MLP layer, rows of the last, whose results \
         are all-reduced. Gradients and optimizer states are divided as the weights are."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn settings(&self) -> &'static [Setting] {
        &[Setting {
            name: "sequence",
            default: "whole",
            about: "what a rank has between attention and MLP layers. whole: all tokens; divided: a part of them, on which norms, residual sums and dropout are computed \
                    (sequence parallelism): less memory, and a reduce-scatter and an all-gather where there was an all-reduce",
        }]
    }

    fn variants(&self) -> &'static [&'static str] {
        &["auto", "auto,sequence=divided"]
    }

    fn on_ranks(&self) -> Option<OnRanks> {
        Some(OnRanks { ranks: [1, 2], with: &[] })
    }

    fn example(&self, r: &Recorder) {
        let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.5 });
        let x = r.feed("x", &[6, 4], DType::F32);
        let params = [param("gate_up", &[4, 16]), param("down", &[8, 4])];
        let both = x.matmul(params[0]);
        let loss = (x + (both.slice(1, 0, 8).silu() * both.slice(1, 8, 16)).matmul(params[1])).square().mean();
        r.output("loss", loss);
        r.grad(loss, &params).into_iter().zip(["gate_up", "down"]).for_each(|(g, name)| r.output(name, g));
    }
}

impl Pass for TensorParallel {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let by_tokens = settings.one_of("sequence", &["whole", "divided"])? == "divided";
        let group = &settings.ranks.tensor;
        if group.size == 1 {
            return Ok(());
        }
        let Placed { division, weights, undivided } = placed(g, settings.ranks, by_tokens, receipt)?;
        for (reader, scope) in undivided {
            let why = reader.map_or("the op that reads it needs all of it".into(), |op| format!("{op} needs all of what it computes"));
            receipt.decline(format!("a weight stays whole: {why}"), &scope);
        }
        if weights > 0 {
            division.check(g)?;
            division.describe(g, "a part of the weights", receipt);
            receipt.notes.push(format!("{weights} weights divided"));
            rewrite(g, &division, group);
        }
        Ok(())
    }
}

struct Placed {
    division: Division,
    weights: usize,
    /// Of weights that stay whole, the op, if it is another than reads the weight, for which a division would have to be put together again, and where they are.
    undivided: Vec<(Option<String>, String)>,
}

/// What a division is judged by, the first first: values of the model that are put together again, floating-point operations of a rank, its bytes of weights.
type Price = (usize, u64, usize);

fn price(g: &Graph, d: &Division, of_model: &[bool], parts: usize) -> Price {
    let gathered = d.gathered.iter().filter(|(_, node)| of_model[*node]).count();
    let (mut flops, mut bytes) = (0, 0);
    for (i, node) in g.nodes.iter().enumerate() {
        match &node.kind {
            Kind::Op(op) if of_model[i] => {
                let all = op.cost(&g.inputs(i)).flops;
                flops += if matches!(d.ways[i], Way::Axis(..) | Way::Own) { all / parts as u64 } else { all };
            }
            Kind::State(s) if s.role == Role::Param => {
                bytes += node.outputs[0].bytes() / if d.shares[i][0] == Share::Whole { 1 } else { parts };
            }
            _ => {}
        }
    }
    (gathered, flops, bytes)
}

/// Into how many equal sections slices of the graph cut a dimension of this size.
type Sections = HashMap<usize, BTreeSet<usize>>;

fn sections(g: &Graph) -> Sections {
    let mut found = Sections::new();
    for node in &g.nodes {
        let Some(slice) = node.op::<Slice>() else { continue };
        let from = g.meta(node.inputs[0]);
        found.entry(from.shape[slice.axis]).or_default().extend(slice.sections(from));
    }
    found
}

/// The dimensions along which a weight can be divided, as a whole or in sections.
fn axes(weight: &Meta, sections: &Sections, parts: usize) -> Vec<Share> {
    let mut all = vec![];
    for (d, &n) in weight.shape.iter().enumerate().filter(|(_, n)| **n > 1) {
        let counts = std::iter::once(1).chain(sections.get(&n).into_iter().flatten().copied());
        all.extend(counts.filter(|count| n.is_multiple_of(count * parts)).map(|count| Share::Dim(d).of_each(count)));
    }
    all
}

/// The division by these sources. Where a node is in the way, because what it reads goes only with another weight that is divided alike (the second matrices of
/// experts), that one is divided, too.
fn with_partner(g: &Graph, sources: &mut Sources, sections: &Sections, parts: usize) -> Option<Division> {
    let stuck = match try_divide(g, sources, parts) {
        Ok(division) => return Some(division),
        Err(node) => node,
    };
    let weight = |v: &Value| matches!(&g.nodes[v.node].kind, Kind::State(s) if matches!(s.role, Role::Param | Role::Frozen));
    let free: Vec<usize> = g.nodes[stuck].inputs.iter().filter(|v| weight(v)).map(|v| v.node).collect();
    for i in free.into_iter().filter(|i| !sources.settled.contains(i) && !sources.shares.contains_key(i)).collect::<Vec<_>>() {
        for axis in axes(&g.nodes[i].outputs[0], sections, parts) {
            sources.shares.insert(i, axis);
            if let Ok(division) = try_divide(g, sources, parts) {
                return Some(division);
            }
        }
        sources.shares.remove(&i);
    }
    None
}

/// Takes one weight after the other, and divides it along the dimension that is best for the whole graph, if one is better than none.
fn placed(g: &Graph, ranks: &Ranks, by_tokens: bool, receipt: &mut Receipt) -> Result<Placed, Error> {
    let (group, parts) = (&ranks.tensor, ranks.tensor.size);
    let losses = g.nodes.iter().filter(|n| matches!(n.kind, Kind::Grad)).map(|n| n.inputs[0]);
    let of_model = match g.nodes.iter().any(|n| matches!(n.kind, Kind::Grad)) {
        true => g.needed_by(losses),
        false => g.needed_by(g.outputs.iter().map(|o| o.1)),
    };
    let sections = sections(g);
    let mut sources = Sources::new(g, ranks, group);
    let mut division = divide(g, &sources, parts)?;
    let mut now = price(g, &division, &of_model, parts);
    let mut undivided = vec![];
    for (i, node) in g.nodes.iter().enumerate().filter(|(i, _)| of_model[*i]) {
        let Kind::State(state) = &node.kind else { continue };
        if !matches!(state.role, Role::Param | Role::Frozen) || sources.settled.contains(&i) {
            continue;
        }
        let shape = &node.outputs[0].shape;
        let mut found: Option<(Price, Sources, Division)> = None;
        // Of the divisions that are not worth it, what is in the way of the best.
        let mut reader: Option<(Price, String)> = None;
        for axis in axes(&node.outputs[0], &sections, parts) {
            let mut tried = sources.clone();
            tried.shares.insert(i, axis);
            if let Some(d) = with_partner(g, &mut tried, &sections, parts) {
                let price = price(g, &d, &of_model, parts);
                // Along some dimension the weight itself would be gathered, which says nothing about what is in the way of the others.
                let is_weight = |v: Value| g.state_through(v, |n| n.is_view()).is_some();
                let new = d.gathered.iter().find(|r| of_model[r.1] && !is_weight(r.0) && !division.gathered.contains(r));
                if let Some(r) = new.filter(|_| reader.as_ref().is_none_or(|r| price <= r.0)) {
                    reader = Some((price, g.nodes[r.1].name().to_string()));
                }
                if price < found.as_ref().map_or(now, |f| f.0) {
                    found = Some((price, tried, d));
                }
            }
        }
        match found {
            Some(better) => (now, sources, division) = better,
            None if sources.shares.contains_key(&i) => {}
            None if shape.len() > 1 => undivided.push((reader.map(|r| r.1), node.scope.to_string())),
            None => {}
        }
    }
    let weights = sources.shares.len();
    if by_tokens && weights > 0 {
        let before = division.divided(g);
        sources.by_tokens = true;
        match try_divide(g, &sources, parts) {
            Ok(d) if d.divided(g) > before => {
                receipt.notes.push(format!("{} ops on a part of the tokens", d.divided(g) - before));
                division = d;
            }
            Ok(_) => {
                sources.by_tokens = false;
                receipt.decline(format!("sequence=divided: no value between the layers has rows that {parts} ranks can divide"), "");
            }
            Err(node) => {
                sources.by_tokens = false;
                let node = &g.nodes[node];
                receipt.decline(format!("sequence=divided: {} cannot be computed from a part of the tokens", node.name()), &node.scope);
            }
        }
    }
    while division.follow(g, &mut sources) {
        division = divide(g, &sources, parts)?;
    }
    sources.settle(g, ranks, group);
    Ok(Placed { division, weights, undivided })
}
