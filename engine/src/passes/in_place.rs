//! In-place execution: pointwise ops and accumulating GEMMs overwrite an input that nothing reads afterwards.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Value};
use crate::meta::DType;
use crate::ops::concat::Join;
use crate::ops::matmul::{Add, Matmul};
use crate::ops::matmul_pointwise::MatmulPointwise;
use crate::ops::pointwise::Pointwise;
use crate::plan::{last_reads, view_roots};
use crate::record::Recorder;
use std::collections::HashSet;
use std::sync::Arc;

pub struct InPlace;

impl Switch for InPlace {
    fn name(&self) -> &'static str {
        "in-place"
    }

    fn about(&self) -> &'static str {
        "Lets pointwise ops and accumulating GEMMs overwrite an input that nothing reads afterwards: less memory, and warm cache lines."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[4, 4], Init::Normal { std: 1.0 });
        let x = r.feed("x", &[5, 4], DType::F32);
        r.output("y", x.matmul(w).silu().matmul(w));
    }
}

impl Pass for InPlace {
    fn stage(&self) -> Stage {
        Stage::Lowered
    }

    fn after(&self) -> &'static [&'static str] {
        &["recompute", "fuse-pointwise", "gemm-pointwise"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let roots = view_roots(g);
        let last = last_reads(g, &roots);
        // Inputs of a Join are parts of its buffer, which is still needed.
        let joined: HashSet<Value> = g.nodes.iter().filter(|n| n.op::<Join>().is_some()).flat_map(|n| n.inputs.clone()).collect();
        let updates: HashSet<(Value, Value)> = g.updates.iter().copied().collect();
        for i in 0..g.nodes.len() {
            if let Some(m) = g.nodes[i].op::<Matmul>().filter(|m| m.add.is_some()) {
                // A GEMM accumulates in place if it is the last reader of that sum and reads it as no other input.
                let v = g.nodes[i].inputs[2];
                let root = roots[v.node].unwrap_or(v);
                let alone = g.nodes[i].inputs.iter().filter(|w| roots[w.node].unwrap_or(**w) == root).count() == 1;
                if alone && last[&root] == i && !g.nodes[root.node].is_source() && g.meta(root).bytes() == g.meta(v).bytes() {
                    let op = Matmul { add: Some(Add::InPlace), ..m.clone() };
                    g.nodes[i].kind = Kind::Op(Arc::new(op));
                    receipt.applied += 1;
                } else {
                    receipt.decline("the accumulated value is read again later", &g.nodes[i].scope);
                }
            }
            let (arithmetic, product) = (g.nodes[i].op::<Pointwise>().cloned(), g.nodes[i].op::<MatmulPointwise>().cloned());
            if arithmetic.is_none() && product.is_none() {
                continue;
            }
            let mut pairs = vec![];
            for (out, meta) in g.nodes[i].outputs.iter().enumerate() {
                let free = |&(k, &v): &(usize, &Value)| {
                    // Never the GEMM's own operands, which many tiles read; the pointwise inputs may come through a reshape.
                    if product.is_some() && k < 2 {
                        return false;
                    }
                    let whole = if product.is_some() { g.unshaped(v) } else { v };
                    let node = &g.nodes[whole.node];
                    // A state may be overwritten by its own update.
                    let owned = !node.is_source() || updates.contains(&(whole, Value { node: i, out }));
                    let alone = g.nodes[i].inputs.iter().filter(|w| roots[w.node].unwrap_or(**w) == whole).count() == 1;
                    let unused = pairs.iter().all(|&(used, _)| used != k);
                    g.meta(v) == meta
                        && meta.dtype.is_float()
                        && !node.is_view()
                        && owned
                        && last[&whole] == i
                        && alone
                        && unused
                        && !joined.contains(&whole)
                };
                if let Some((k, _)) = g.nodes[i].inputs.iter().enumerate().find(free) {
                    pairs.push((k, out));
                }
            }
            if pairs.is_empty() {
                receipt.decline("no input of the output's shape and type is read for the last time here", &g.nodes[i].scope);
                continue;
            }
            receipt.applied += 1;
            g.nodes[i].kind = Kind::Op(match (arithmetic, product) {
                (Some(p), _) => Arc::new(Pointwise { in_place: pairs, ..p }),
                (_, Some(p)) => Arc::new(MatmulPointwise { in_place: pairs, ..p }),
                _ => unreachable!("one of the two"),
            });
        }
        Ok(())
    }
}
