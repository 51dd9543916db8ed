//! Removes nodes, and outputs of nodes, that no output of the graph and no state update depends on.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node, Value};
use crate::meta::DType;
use crate::record::Recorder;

pub struct DeadCode;

impl Switch for DeadCode {
    fn name(&self) -> &'static str {
        "dead-code"
    }

    fn about(&self) -> &'static str {
        "Removes ops whose results nothing reads, and outputs that nothing reads of ops that can skip them: mostly gradients of frozen weights."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[4, 4], Init::Normal { std: 1.0 });
        let x = r.feed("x", &[5, 4], DType::F32);
        r.output("y", x.matmul(w).silu());
        (x * 3.0).exp();
    }
}

impl Pass for DeadCode {
    fn stage(&self) -> Stage {
        Stage::Differentiated
    }

    fn after(&self) -> &'static [&'static str] {
        &["autodiff"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let before = g.nodes.len();
        let outputs = drop_outputs(g);
        sweep(g);
        receipt.applied = before - g.nodes.len() + outputs;
        if outputs > 0 {
            receipt.notes.push(format!("{outputs} unread outputs"));
        }
        Ok(())
    }
}

/// Removes nodes that no root depends on. Feeds stay, so that a program takes the feeds that it was recorded with.
pub fn sweep(g: &mut Graph) {
    let needed = g.needed_by(g.roots().chain(g.updates.iter().map(|u| u.0)).collect::<Vec<_>>().into_iter());
    let keep: Vec<bool> = g.nodes.iter().zip(needed).map(|(n, needed)| needed || matches!(n.kind, Kind::Feed(_))).collect();
    let mut index = vec![usize::MAX; g.nodes.len()];
    let mut nodes: Vec<Node> = vec![];
    for (i, mut node) in std::mem::take(&mut g.nodes).into_iter().enumerate().filter(|(i, _)| keep[*i]) {
        index[i] = nodes.len();
        node.inputs.iter_mut().for_each(|v| v.node = index[v.node]);
        nodes.push(node);
    }
    g.nodes = nodes;
    g.outputs.iter_mut().for_each(|o| o.1.node = index[o.1.node]);
    for (s, v) in &mut g.updates {
        s.node = index[s.node];
        v.node = index[v.node];
    }
}

/// Drops unread outputs of ops that can skip them (`Op::only`); returns how many.
fn drop_outputs(g: &mut Graph) -> usize {
    let mut dropped = 0;
    let mut read: Vec<Vec<bool>> = g.nodes.iter().map(|n| vec![false; n.outputs.len()]).collect();
    for v in g.roots() {
        read[v.node][v.out] = true;
    }
    // New numbers of the outputs that stay.
    let mut renumber: Vec<Vec<usize>> = g.nodes.iter().map(|n| (0..n.outputs.len()).collect()).collect();
    // From the end, so that what only dropped outputs needed is dropped too.
    for i in (0..g.nodes.len()).rev() {
        let alive = read[i].iter().any(|&r| r);
        if !alive && !g.nodes[i].is_source() {
            continue;
        }
        if let Kind::Op(op) = &g.nodes[i].kind
            && let Some(lean) = op.only(&read[i])
        {
            let own = &g.nodes[i].inputs;
            let inputs = lean.inputs.map_or_else(|| own.clone(), |stay| stay.iter().map(|&k| own[k]).collect());
            let metas: Vec<_> = inputs.iter().map(|&v| g.meta(v).clone()).collect();
            let node = &mut g.nodes[i];
            // With fewer inputs, pointwise ops may broadcast to a smaller shape; then the node stays as it is.
            if lean.op.infer(&metas)[0].shape == node.outputs[0].shape {
                dropped += node.outputs.len() - lean.outputs.len();
                node.outputs = lean.outputs.iter().map(|&o| node.outputs[o].clone()).collect();
                (node.inputs, node.kind) = (inputs, Kind::Op(lean.op));
                lean.outputs.iter().enumerate().for_each(|(new, &old)| renumber[i][old] = new);
            }
        }
        for v in g.nodes[i].inputs.clone() {
            read[v.node][v.out] = true;
        }
    }
    let moved = |v: &mut Value| v.out = renumber[v.node][v.out];
    g.nodes.iter_mut().for_each(|n| n.inputs.iter_mut().for_each(moved));
    g.outputs.iter_mut().for_each(|o| moved(&mut o.1));
    g.updates.iter_mut().for_each(|u| moved(&mut u.1));
    dropped
}
