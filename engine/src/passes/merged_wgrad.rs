//! A sum of products is one product of what is put end to end.

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
        "Makes one product of a sum of products over rows (the gradient of a weight that is used again and again): the rows are written end to end in the first place."
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
            Ok(Some(vec![w.recorder.op1(first.op::<Matmul>().expect("a product").clone(), &x)]))
        })?;
        super::dead_code::sweep(g);
        Ok(())
    }
}

/// For the last product of a sum, all of them in order.
fn chains(g: &Graph, receipt: &mut Receipt) -> HashMap<usize, Vec<usize>> {
    let reads = g.reads();
    let product = |i: usize| g.nodes[i].op::<Matmul>().filter(|m| !m.bias && m.act.is_none() && g.nodes[i].outputs[0].rank() == 2);
    // What this product adds to, if that is a product which nobody else reads.
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
        // Products over rows: both sides are [rows, ..], the first read transposed.
        let by_rows = |&m: &usize| {
            let left = &g.nodes[g.nodes[m].inputs[0].node];
            left.op::<Permute>().is_some() && !g.nodes[left.inputs[0].node].is_view() && !g.nodes[g.nodes[m].inputs[1].node].is_view()
        };
        if chain.iter().all(by_rows) {
            chains.insert(i, chain);
        } else {
            receipt.decline("the sides of a product do not lie row by row", &g.nodes[i].scope);
        }
    }
    chains
}
