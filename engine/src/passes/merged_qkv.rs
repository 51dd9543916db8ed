//! Merges matmuls with the same input (q, k and v projections) into one matmul with concatenated weights.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Role, Value};
use crate::meta::DType;
use crate::ops::concat::concat;
use crate::record::{Recorder, Var};
use std::collections::HashMap;

pub struct MergedQkv;

/// A matmul with at least so many columns is as fast alone, without slicing its result and concatenating its gradient.
const WIDE: usize = 1024;

impl Switch for MergedQkv {
    fn name(&self) -> &'static str {
        "merged-qkv"
    }

    fn about(&self) -> &'static str {
        "Merges matmuls with the same input (q, k and v projections) into one with concatenated weights: the input is read once, forward and backward."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn example(&self, r: &Recorder) {
        let param = |name: &str, n: usize| r.param(name, &[n, 8], Init::Normal { std: 0.5 });
        let (a, b, c) = (param("a", 6), param("b", 3), param("c", 5));
        let x = r.feed("x", &[7, 8], DType::F32);
        let h = x.silu();
        let loss = (h.linear(a).square().sum() + h.linear(b).silu().sum() + h.linear(c).sum()) * 0.1;
        r.output("loss", loss);
        for (name, g) in ["da", "db", "dc"].iter().zip(r.grad(loss, &[a, b, c])) {
            r.output(name, g);
        }
    }
}

impl Pass for MergedQkv {
    fn stage(&self) -> Stage {
        Stage::Differentiated
    }

    fn after(&self) -> &'static [&'static str] {
        &["bf16"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let mut groups: HashMap<(Value, u32, bool), Vec<usize>> = HashMap::new();
        for (i, node) in g.nodes.iter().enumerate() {
            // Only weights (states): all of them are available when the first matmul of a group runs.
            if let Some([x, weight]) = g.plain_matmul(i)
                && let Some(role) = g.state_role(weight)
            {
                // Trained weights are not merged with frozen ones, which need no gradient.
                let frozen = crate::mutant!("merged-qkv-trained-with-frozen", role == Role::Frozen, false);
                groups.entry((x, node.block, frozen)).or_default().push(i);
            }
        }
        let mut first_of: HashMap<usize, Vec<usize>> = HashMap::new();
        for (_, group) in groups.into_iter().filter(|(_, g)| g.len() > 1) {
            let (narrow, wide): (Vec<usize>, Vec<usize>) = group.iter().partition(|&&i| g.nodes[i].outputs[0].dim(0) < WIDE);
            for i in wide {
                receipt.decline(format!("{} columns are enough for a GEMM of its own", g.nodes[i].outputs[0].dim(0)), &g.nodes[i].scope);
            }
            if narrow.len() > 1 {
                receipt.applied += narrow.len();
                first_of.insert(narrow[0], narrow);
            }
        }
        receipt.declined.sort();
        g.rewrite(|w, i, _, inputs| {
            let Some(group) = first_of.get(&i) else { return Ok::<_, Error>(None) };
            let weights: Vec<Var> = group.iter().map(|&member| w.at(w.old.nodes[member].inputs[1])).collect();
            let merged = inputs[0].matmul(columns(&weights));
            let mut end = 0;
            let parts: Vec<Var> = weights
                .iter()
                .map(|weight| {
                    end += weight.dim(0);
                    merged.slice(1, end - weight.dim(0), end)
                })
                .collect();
            group.iter().zip(&parts).for_each(|(&member, &part)| w.put(member, &[part]));
            Ok(Some(vec![parts[0]]))
        })?;
        Ok(())
    }
}

/// [k, n1], [k, n2], .. -> [k, n1 + n2 + ..]. Transposes are concatenated in their stored layout, [n, k].
fn columns<'g>(weights: &[Var<'g>]) -> Var<'g> {
    transposed(weights).map_or_else(|| concat(weights, 1), |rows| concat(&rows, 0).t())
}

/// The matrices that these are transposes of; None if one of them is no transpose.
pub(super) fn transposed<'g>(weights: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
    let of = |w: &Var<'g>| w.recorder().with_graph(|g| g.transpose_of(w.value())).map(|v| w.recorder().var(v));
    weights.iter().map(of).collect()
}
