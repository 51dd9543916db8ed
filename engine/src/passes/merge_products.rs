//! Several narrow products of the same rows become one.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Role, Value};
use crate::meta::DType;
use crate::ops::concat::concat;
use crate::ops::matmul::Matmul;
use crate::ops::view::Permute;
use crate::record::{Recorder, Var};
use std::collections::HashMap;

pub struct MergeProducts;

/// Columns from which a product is as fast alone; its result would have to be cut up and its gradient put together again.
const WIDE: usize = 1024;

impl Switch for MergeProducts {
    fn name(&self) -> &'static str {
        "merge-products"
    }

    fn about(&self) -> &'static str {
        "Multiplies the same rows by several narrow matrices at once (q, k, v): the rows are read once, in both directions."
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

impl Pass for MergeProducts {
    fn stage(&self) -> Stage {
        Stage::Differentiated
    }

    fn after(&self) -> &'static [&'static str] {
        &["bf16"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let mut groups: HashMap<(Value, u32, bool), Vec<usize>> = HashMap::new();
        for (i, node) in g.nodes.iter().enumerate() {
            let plain = node.op::<Matmul>().is_some_and(|m| *m == Matmul::default());
            // Weights that are there before anything runs, so that the first product of a group can wait for nothing.
            if plain
                && node.inputs.len() == 2
                && node.outputs[0].rank() == 2
                && let Some(role) = source(g, node.inputs[1])
            {
                // What is trained stays apart from what is not, which has no gradient.
                let frozen = crate::mutant!("merge-products-trained-with-frozen", role == Role::Frozen, false);
                groups.entry((node.inputs[0], node.block, frozen)).or_default().push(i);
            }
        }
        let mut first_of: HashMap<usize, Vec<usize>> = HashMap::new();
        for (_, group) in groups.into_iter().filter(|(_, g)| g.len() > 1) {
            let (narrow, wide): (Vec<usize>, Vec<usize>) = group.iter().partition(|&&i| g.nodes[i].outputs[0].dim(0) < WIDE);
            for i in wide {
                receipt.decline(format!("{} columns are wide enough alone", g.nodes[i].outputs[0].dim(0)), &g.nodes[i].scope);
            }
            if narrow.len() > 1 {
                receipt.applied += narrow.len();
                first_of.insert(narrow[0], narrow);
            }
        }
        receipt.declined.sort();
        // Where everything that a member needs is copied to: in front of the group's first product.
        let old = std::mem::take(g);
        let mut parts: HashMap<usize, Value> = HashMap::new();
        let mut values: Vec<Vec<Value>> = vec![];
        *g = old.rewritten(|recorder, i, node, inputs| {
            let new = if let Some(group) = first_of.get(&i) {
                let mut weights = vec![];
                for &member in group {
                    weights.push(recorder.var(early(&old, recorder, &mut values, old.nodes[member].inputs[1])));
                }
                let merged = inputs[0].matmul(side_by_side(&weights));
                let mut at = 0;
                for (&member, w) in group.iter().zip(&weights) {
                    parts.insert(member, merged.slice(1, at, at + w.dim(0)).value());
                    at += w.dim(0);
                }
                vec![parts[&i]]
            } else if let Some(&part) = parts.get(&i) {
                vec![part]
            } else if let Some(made) = values.get(i).filter(|v| !v.is_empty()) {
                made.clone() // brought forward by a group
            } else {
                recorder.keep(node, inputs.iter().map(|v| v.value()).collect())
            };
            if values.len() <= i {
                values.resize(i + 1, vec![]);
            }
            values[i] = new.clone();
            Ok::<_, Error>(Some(new.into_iter().map(|v| recorder.var(v)).collect()))
        })?;
        Ok(())
    }
}

/// Of a state, seen through views and casts only.
pub(super) fn source(g: &Graph, v: Value) -> Option<Role> {
    let node = &g.nodes[v.node];
    match &node.kind {
        Kind::State(s) => Some(s.role),
        Kind::Op(_) if node.inputs.len() == 1 && (node.is_view() || node.is_cast()) => source(g, node.inputs[0]),
        _ => None,
    }
}

/// The value in the new graph, recorded now if its turn has not come yet.
pub(super) fn early(old: &Graph, recorder: &Recorder, values: &mut Vec<Vec<Value>>, v: Value) -> Value {
    if let Some(made) = values.get(v.node).filter(|m| !m.is_empty()) {
        return made[v.out];
    }
    let node = &old.nodes[v.node];
    let inputs: Vec<Value> = node.inputs.iter().map(|&w| early(old, recorder, values, w)).collect();
    let made = recorder.keep(node, inputs);
    if values.len() <= v.node {
        values.resize(v.node + 1, vec![]);
    }
    values[v.node] = made.clone();
    made[v.out]
}

/// [k, n1], [k, n2], .. -> [k, n1 + n2 + ..]. Transposed matrices are joined as they lie.
fn side_by_side<'g>(weights: &[Var<'g>]) -> Var<'g> {
    turned(weights).map_or_else(|| concat(weights, 1), |bases| concat(&bases, 0).t())
}

/// What all of these are transposes of.
pub(super) fn turned<'g>(weights: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
    let base = |w: &Var<'g>| w.recorder().with_graph(|g| transposed(g, w.value())).map(|v| w.recorder().var(v));
    weights.iter().map(base).collect()
}

/// What this matrix is a transpose of.
pub(super) fn transposed(g: &Graph, v: Value) -> Option<Value> {
    let node = &g.nodes[v.node];
    node.op::<Permute>().filter(|p| p.0 == [1, 0]).map(|_| node.inputs[0])
}
