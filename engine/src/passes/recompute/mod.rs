//! Computes forward values again when the backward pass needs them, instead of keeping them.

use super::{Numerics, Pass, Receipt, Setting, Settings, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Value};
use crate::meta::DType;
use crate::ops::pointwise::Pointwise;
use crate::record::{Recorder, Var};
use std::collections::HashMap;

pub struct Recompute;

impl Pass for Recompute {
    fn name(&self) -> &'static str {
        "recompute"
    }

    fn about(&self) -> &'static str {
        "Computes forward values again where the backward pass needs them: less memory for more arithmetic, the same bits."
    }

    fn settings(&self) -> &'static [Setting] {
        &[Setting {
            name: "what",
            default: "siblings",
            about: "siblings: arithmetic whose inputs the backward pass reads together anyway; memory-bound: all ops that move more bytes than they calculate; blocks: all but what enters and leaves a block of the model",
        }]
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let old = g.clone();
        // Gradients that `hoist` computes during the forward pass read what is there.
        let forward = old.nodes.iter().rposition(|n| !n.backward && n.block != 0).unwrap_or(0);
        let again = match settings.text("what") {
            "siblings" => siblings(&old),
            "memory-bound" => recomputable(&old, true),
            "blocks" => recomputable(&old, false),
            other => {
                return Err(Error::PassSetting {
                    pass: "recompute".into(),
                    problem: format!("what={other} is none of siblings, memory-bound and blocks"),
                });
            }
        };
        let mut copies: HashMap<usize, Vec<Value>> = HashMap::new();
        let mut values: Vec<Vec<Value>> = vec![];
        let (mut flops, mut total) = (0, 0);
        g.rewrite(|recorder, i, node, inputs| {
            let mut ready: Vec<Var> = inputs.to_vec();
            if let Kind::Op(op) = &node.kind {
                total += op.cost(&old.inputs(i)).flops;
            }
            if node.backward && i > forward {
                for (v, new) in node.inputs.iter().zip(&mut ready) {
                    if again[v.node] {
                        *new = recorder.var(copy(&old, recorder, v.node, &again, &values, &mut copies, &mut flops)[v.out]);
                    }
                }
                recorder.set_place(node);
            }
            let made = recorder.keep(node, ready.iter().map(|v| v.value()).collect());
            values.push(made.clone());
            Ok::<_, Error>(Some(made.into_iter().map(|v| recorder.var(v)).collect()))
        })?;
        receipt.applied = copies.keys().filter(|&&n| !old.nodes[n].is_view()).count();
        if total > 0 && receipt.applied > 0 {
            receipt.notes.push(format!("{} ops again, {:.0}% more arithmetic", receipt.applied, 100.0 * flops as f64 / total as f64));
        }
        if receipt.applied == 0 && old.nodes.iter().any(|n| n.backward) {
            receipt.decline("the backward pass needs nothing that this setting would compute again", "");
        }
        Ok(())
    }

    fn example(&self, r: &Recorder) {
        let mut h = r.feed("x", &[5, 8], DType::F32);
        let mut params = vec![];
        for i in 0..3 {
            h = r.block(&format!("blocks.{i}"), || {
                let w = r.param(&format!("w{i}"), &[8, 8], Init::Normal { std: 0.3 });
                params.push(w);
                h + h.silu().matmul(w).swiglu(h.matmul(w)).matmul(w)
            });
        }
        let loss = h.square().mean();
        r.output("loss", loss);
        for (i, g) in r.grad(loss, &params).into_iter().enumerate() {
            r.output(&format!("dw{i}"), g);
        }
    }
}

/// Forward ops inside a block whose values do not leave it.
fn recomputable(g: &Graph, cheap_only: bool) -> Vec<bool> {
    let mut leaves = vec![false; g.nodes.len()];
    for n in g.nodes.iter().filter(|n| !n.backward) {
        for v in &n.inputs {
            leaves[v.node] |= g.nodes[v.node].block != n.block;
        }
    }
    for v in g.roots() {
        leaves[v.node] = true;
    }
    let inside = |i: usize| {
        let n = &g.nodes[i];
        let Kind::Op(op) = &n.kind else { return false };
        let cheap = op.is_view() || op.cost(&g.inputs(i)).memory_bound;
        !n.backward && !leaves[i] && n.block != 0 && (cheap || !cheap_only)
    };
    (0..g.nodes.len()).map(inside).collect()
}

/// Forward arithmetic that a backward node could do on the side: one that reads all of its inputs, and may run before anything in
/// the backward pass wants the result. The pass `fuse-pointwise` then joins the two.
fn siblings(g: &Graph) -> Vec<bool> {
    let readers = g.readers();
    let roots: Vec<usize> = g.roots().map(|v| v.node).collect();
    let forward = g.nodes.iter().rposition(|n| !n.backward && n.block != 0).unwrap_or(0);
    let again = |i: usize| {
        let n = &g.nodes[i];
        let Some(first) = readers[i].iter().copied().filter(|&r| g.nodes[r].backward && r > forward).min() else { return false };
        if n.backward || n.op::<Pointwise>().is_none() || n.is_cast() || roots.contains(&i) || n.inputs.is_empty() {
            return false;
        }
        let side = |&r: &usize| {
            let m = &g.nodes[r];
            m.backward
                && m.op::<Pointwise>().is_some()
                && m.outputs[0].shape == n.outputs[0].shape
                && n.inputs.iter().all(|v| m.inputs.contains(v))
                && m.inputs.iter().all(|v| v.node < first && v.node != i)
        };
        readers[n.inputs[0].node].iter().any(side)
    };
    (0..g.nodes.len()).map(again).collect()
}

/// The node's values computed anew, from what was kept; once for each node.
fn copy(
    old: &Graph,
    recorder: &Recorder,
    node: usize,
    again: &[bool],
    values: &[Vec<Value>],
    copies: &mut HashMap<usize, Vec<Value>>,
    flops: &mut u64,
) -> Vec<Value> {
    if let Some(made) = copies.get(&node) {
        return made.clone();
    }
    let n = &old.nodes[node];
    let inputs = n.inputs.iter().map(|v| match again[v.node] {
        true => copy(old, recorder, v.node, again, values, copies, flops)[v.out],
        false => values[v.node][v.out],
    });
    let inputs: Vec<Value> = inputs.collect();
    if let Kind::Op(op) = &n.kind {
        *flops += op.cost(&old.inputs(node)).flops;
    }
    recorder.set_backward(&n.scope);
    let made = recorder.keep(n, inputs);
    copies.insert(node, made.clone());
    made
}
