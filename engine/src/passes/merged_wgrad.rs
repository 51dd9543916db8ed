//! Merges the weight gradients of a layer that is applied several times: x1^T d1 + x2^T d2 = [x1; x2]^T [d1; d2].

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Value};
use crate::meta::DType;
use crate::ops::concat::Join;
use crate::ops::matmul::Matmul;
use crate::ops::view::Permute;
use crate::record::Recorder;
use std::collections::{HashMap, HashSet};

pub struct MergedWgrad;

impl Switch for MergedWgrad {
    fn name(&self) -> &'static str {
        "merged-wgrad"
    }

    fn about(&self) -> &'static str {
        "Merges the weight-gradient GEMMs of a layer that is applied several times into one: activations and gradients are written into one buffer, row after row, in the first place."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[16, 16], Init::Normal { std: 0.3 });
        let mut h = r.feed("x", &[64, 16], DType::F32);
        for _ in 0..3 {
            h = h.silu().linear(w).silu();
        }
        let loss = h.square().mean();
        r.output("loss", loss);
        r.output("dw", r.grad(loss, &[w])[0]);
    }
}

impl Pass for MergedWgrad {
    fn stage(&self) -> Stage {
        Stage::Lowered
    }

    fn after(&self) -> &'static [&'static str] {
        &["gemm-epilogue"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let chains = chains(g, receipt);
        receipt.applied = chains.values().map(|c| c.len()).sum();
        let mut joins: HashMap<Vec<Value>, Value> = HashMap::new();
        g.rewrite(|w, i, _, _| {
            let Some(chain) = chains.get(&i) else { return Ok::<_, Error>(None) };
            let old = w.old;
            let mut join = |parts: Vec<Value>| {
                let made = *joins.entry(parts.clone()).or_insert_with(|| {
                    let parts: Vec<_> = parts.iter().map(|&v| w.at(v)).collect();
                    w.recorder.op1(Join, &parts).value()
                });
                w.recorder.var(made)
            };
            let left = join(chain.iter().map(|&m| old.nodes[old.nodes[m].inputs[0].node].inputs[0]).collect());
            let right = join(chain.iter().map(|&m| old.nodes[m].inputs[1]).collect());
            let first = &old.nodes[chain[0]];
            let mut x = vec![left.t(), right];
            x.extend(first.inputs.get(2).map(|&v| w.at(v)));
            Ok(Some(vec![w.recorder.op1(first.op::<Matmul>().expect("a matmul").clone(), &x)]))
        })?;
        super::dead_code::sweep(g);
        Ok(())
    }
}

/// The last matmul of an accumulating chain -> all matmuls of the chain, in order.
fn chains(g: &Graph, receipt: &mut Receipt) -> HashMap<usize, Vec<usize>> {
    let reads = g.reads();
    let product = |i: usize| {
        g.nodes[i].op::<Matmul>().filter(|m| !m.bias && m.act.is_none() && m.scaled.is_none() && g.nodes[i].outputs[0].rank() == 2)
    };
    // The matmul whose result this one accumulates into, if it has no other reader.
    let before = |i: usize| {
        let v = *product(i).and_then(|_| g.nodes[i].inputs.get(2))?;
        (reads.once(v) && product(v.node).is_some()).then_some(v.node)
    };
    let inner: HashSet<usize> = (0..g.nodes.len()).filter_map(before).collect();
    let mut chains = HashMap::new();
    for i in (0..g.nodes.len()).filter(|&i| before(i).is_some() && !inner.contains(&i)) {
        let mut chain = vec![i];
        while let Some(next) = before(chain[chain.len() - 1]) {
            chain.push(next);
        }
        chain.reverse();
        // x^T d, with x and d both stored as [rows, ..].
        let by_rows = |&m: &usize| {
            let left = &g.nodes[g.nodes[m].inputs[0].node];
            left.op::<Permute>().is_some() && !g.nodes[left.inputs[0].node].is_view() && !g.nodes[g.nodes[m].inputs[1].node].is_view()
        };
        if chain.iter().all(by_rows) {
            chains.insert(i, chain);
        } else {
            receipt.decline("an operand of one of the matmuls is a view", &g.nodes[i].scope);
        }
    }
    chains
}
