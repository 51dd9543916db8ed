//! 2:4 sparsity while training: linear layers compute with weights of which two of every four are 0; the optimizer keeps the dense ones.

use super::{Mode, Numerics, Pass, Receipt, Setting, Settings, Stage, Switch, Switches, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Role, State, Value};
use crate::meta::DType;
use crate::ops::collective::Broadcast;
use crate::ops::matmul::Matmul;
use crate::ops::sparse::Sparse24;
use crate::record::{Recorder, Var};
use std::collections::{BTreeMap, HashMap};

pub struct Sparse;

impl Switch for Sparse {
    fn name(&self) -> &'static str {
        "sparse-2:4"
    }

    fn about(&self) -> &'static str {
        "2:4 sparsity: the linear layers of the model's blocks compute with weights of which the two smallest of every four are 0. The optimizer keeps dense weights, and gradients reach all of them (straight-through). The GEMMs stay dense: pruned anew at every step, a weight is compressed in more time than a sparse GEMM gains."
    }

    fn default_mode(&self) -> Mode {
        Mode::Off
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Changed
    }

    fn settings(&self) -> &'static [Setting] {
        &[Setting { name: "least", default: "64", about: "weights with fewer rows or columns (routers, adapters) stay dense" }]
    }

    fn variants(&self) -> &'static [&'static str] {
        &["auto,least=8"]
    }

    fn example(&self, r: &Recorder) {
        let x = r.feed("x", &[6, 8], DType::F32);
        let h = r.block("block", || x.linear(r.param("w", &[16, 8], Init::Normal { std: 0.3 })));
        r.output("y", h);
    }
}

impl Pass for Sparse {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn after(&self) -> &'static [&'static str] {
        &["cse"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let weights = pruned_weights(g, settings.number("least")?, receipt);
        receipt.applied = weights.len();
        if receipt.applied > 0 {
            receipt.notes.push("GEMMs stay dense: it makes no step faster".into());
        }
        let mut pruned: HashMap<Value, Value> = HashMap::new();
        let old = g.clone();
        g.rewrite(|w, i, node, inputs| {
            let Some([_, b]) = old.plain_matmul(i).filter(|_| node.block != 0 && !node.typed && !node.narrow) else {
                return Ok::<_, Error>(None);
            };
            let stored = old.transpose_of(b).unwrap_or(b);
            let Some(&by_rows) = weights.get(&stored) else { return Ok(None) };
            let masked = *pruned.entry(stored).or_insert_with(|| straight_through(w.at(stored), by_rows).value());
            let masked = w.recorder.var(masked);
            Ok(Some(w.recorder.op(node.op::<Matmul>().expect("a matmul").clone(), &[inputs[0], if by_rows { masked.t() } else { masked }])))
        })?;
        Ok(())
    }
}

/// Weights that are pruned, and whether sums go along their rows as they lie in memory.
fn pruned_weights(g: &Graph, least: usize, receipt: &mut Receipt) -> HashMap<Value, bool> {
    let mut weights = HashMap::new();
    for (i, node) in g.nodes.iter().enumerate().filter(|(_, n)| n.block != 0 && !n.typed && !n.narrow) {
        let Some([_, b]) = g.plain_matmul(i) else { continue };
        let (stored, by_rows) = g.transpose_of(b).map_or((b, false), |of| (of, true));
        let Some(state) = weight(g, stored) else { continue };
        let (rows, columns) = (g.meta(stored).dim(1), g.meta(stored).dim(0));
        // Of a weight that ranks divide, the whole decides, so that any number of them prunes the same.
        let whole = g.parts.states.get(&state.name).and_then(|parts| parts.first()).map_or(&g.meta(stored).shape, |part| &part.shape);
        if !if by_rows { columns } else { rows }.is_multiple_of(4) {
            receipt.decline(format!("{rows} x {columns}: sums are no multiple of 4 long"), &node.scope);
        } else if whole.iter().any(|&n| n < least) {
            receipt.decline(format!("{rows} x {columns} is smaller than {least} (least)"), &node.scope);
        } else {
            weights.insert(stored, by_rows);
        }
    }
    weights
}

/// The parameter that this is, perhaps read by each of several ranks for its own part of the work.
fn weight(g: &Graph, mut v: Value) -> Option<&State> {
    while g.nodes[v.node].op::<Broadcast>().is_some() {
        v = g.nodes[v.node].inputs[0];
    }
    match &g.nodes[v.node].kind {
        Kind::State(state) if state.role == Role::Param => Some(state),
        _ => None,
    }
}

/// Names of the weights that a recorded program computes with pruned, and whether sums go along their rows; none where the pass is off.
pub fn pruned(g: &Graph, switches: &Switches, target: Target) -> Result<BTreeMap<String, bool>, Error> {
    let mut found = BTreeMap::new();
    switches.apply(&Sparse, target, |settings, receipt| {
        for (v, by_rows) in pruned_weights(g, settings.number("least")?, receipt) {
            if let Some(state) = weight(g, v) {
                found.insert(state.name.clone(), by_rows);
            }
        }
        Ok(())
    })?;
    Ok(found)
}

/// The pruned weight; its gradient is the whole weight's. Exact: where a number stays, 0 is added to it, elsewhere itself is taken away.
fn straight_through<'g>(weight: Var<'g>, by_rows: bool) -> Var<'g> {
    let prune = |v: Var<'g>| v.recorder().op1(Sparse24, &[v]);
    let pruned = if by_rows { prune(weight) } else { prune(weight.t()).t() };
    weight + (pruned - weight).stop_gradient()
}
