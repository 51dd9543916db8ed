//! Drops what no output and no state needs.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node};
use crate::meta::DType;
use crate::op::Op;
use crate::ops::experts::GroupedSwiglu;
use crate::ops::norm::RmsNormGrad;
use crate::ops::norm::add::{AddRmsNorm, AddRmsNormGrad};
use crate::ops::pointwise::Pointwise;
use crate::ops::rope::norm::NormRopeGrad;
use crate::record::Recorder;
use std::sync::Arc;

pub struct DeadCode;

impl Switch for DeadCode {
    fn name(&self) -> &'static str {
        "dead-code"
    }

    fn about(&self) -> &'static str {
        "Drops operations, and outputs of fused arithmetic, experts and norms, that nothing needs: gradients of what is not trained, above all."
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
            receipt.notes.push(format!("{outputs} outputs of arithmetic, experts and norms"));
        }
        Ok(())
    }
}

/// Removes nodes that no root depends on. Feeds stay: a program wants what it was recorded with.
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

/// The gradient of a norm, without that of its weight; None where it has none, or more behind it.
fn without_weight(node: &Node) -> Option<Arc<dyn Op>> {
    if node.outputs.len() != 2 {
        return None;
    }
    let norm = node.op::<RmsNormGrad>().map(|op| Arc::new(RmsNormGrad { dw: false, ..op.clone() }) as Arc<dyn Op>);
    let sum = || node.op::<AddRmsNormGrad>().map(|op| Arc::new(AddRmsNormGrad { dw: false, ..op.clone() }) as Arc<dyn Op>);
    let turned = || node.op::<NormRopeGrad>().map(|op| Arc::new(NormRopeGrad { dw: false, ..op.clone() }) as Arc<dyn Op>);
    norm.or_else(sum).or_else(turned)
}

/// Drops outputs of pointwise nodes, of gradients of norms, and what experts and norms keep for a gradient, that nobody reads; returns how many.
fn drop_outputs(g: &mut Graph) -> usize {
    // From the end, so that an output read only by a dropped one goes too.
    let mut dropped = 0;
    let mut read: Vec<Vec<bool>> = g.nodes.iter().map(|n| vec![false; n.outputs.len()]).collect();
    for v in g.roots() {
        read[v.node][v.out] = true;
    }
    // New numbers of the outputs that stay.
    let mut renumber: Vec<Vec<usize>> = g.nodes.iter().map(|n| (0..n.outputs.len()).collect()).collect();
    for i in (0..g.nodes.len()).rev() {
        let alive = read[i].iter().any(|&r| r);
        if !alive && !g.nodes[i].is_source() {
            continue;
        }
        if let Some(op) = g.nodes[i].op::<GroupedSwiglu>().filter(|op| op.keep && !read[i][1]) {
            let op = GroupedSwiglu { keep: false, ..op.clone() };
            g.nodes[i].outputs.pop();
            g.nodes[i].kind = Kind::Op(Arc::new(op));
            dropped += 1;
        }
        // Gradients of weights that are not trained.
        if let Some(op) = without_weight(&g.nodes[i]).filter(|_| !read[i][1]) {
            g.nodes[i].outputs.pop();
            g.nodes[i].kind = Kind::Op(op);
            dropped += 1;
        }
        if let Some(op) = g.nodes[i].op::<AddRmsNorm>().filter(|op| op.sum && !read[i][2]) {
            let op = AddRmsNorm { sum: false, ..op.clone() };
            g.nodes[i].outputs.pop();
            g.nodes[i].kind = Kind::Op(Arc::new(op));
            dropped += 1;
        }
        if let Some(p) = g.nodes[i].op::<Pointwise>().filter(|_| read[i].iter().any(|&r| !r)) {
            let stay: Vec<usize> = (0..read[i].len()).filter(|&o| read[i][o]).collect();
            dropped += read[i].len() - stay.len();
            let mut expr = p.expr.clone();
            expr.outs = stay.iter().map(|&o| p.expr.outs[o]).collect();
            let (expr, inputs) = expr.pruned();
            let op = Pointwise::new(expr, stay.iter().map(|&o| p.dtypes[o]).collect());
            let inputs: Vec<_> = inputs.iter().map(|&k| g.nodes[i].inputs[k]).collect();
            let metas: Vec<_> = inputs.iter().map(|&v| g.meta(v).clone()).collect();
            let node = &mut g.nodes[i];
            // With fewer inputs the shape may be smaller; then the node stays as it is.
            if op.infer(&metas)[0].shape == node.outputs[0].shape {
                node.inputs = inputs;
                node.outputs = stay.iter().map(|&o| node.outputs[o].clone()).collect();
                node.kind = Kind::Op(Arc::new(op));
                for (new, &old) in stay.iter().enumerate() {
                    renumber[i][old] = new;
                }
            } else {
                dropped -= read[i].len() - stay.len();
            }
        }
        for v in g.nodes[i].inputs.clone() {
            read[v.node][v.out] = true;
        }
    }
    for i in 0..g.nodes.len() {
        let inputs: Vec<_> = g.nodes[i].inputs.iter().map(|v| crate::graph::Value { node: v.node, out: renumber[v.node][v.out] }).collect();
        g.nodes[i].inputs = inputs;
    }
    g.outputs.iter_mut().for_each(|o| o.1.out = renumber[o.1.node][o.1.out]);
    g.updates.iter_mut().for_each(|u| u.1.out = renumber[u.1.node][u.1.out]);
    dropped
}
