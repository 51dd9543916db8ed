//! Inserts copies: of inputs whose strides an op cannot read, and of values that would be overwritten before they are stored.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Kind, Value};
use crate::meta::{DType, Layout, contiguous};
use crate::ops::pointwise::{Expr, Pointwise};
use crate::plan::view_roots;
use crate::record::{Recorder, Var};
use std::collections::{HashMap, HashSet};

/// A contiguous copy, as a pointwise identity.
fn copy<'g>(v: Var<'g>) -> Var<'g> {
    let op = Pointwise::new(Expr::of(1, |_, x| x[0]), vec![v.dtype()]);
    v.recorder().op1(op, &[v])
}

/// Moves feeds, states and constants before all ops: a state may have been recorded after the value that updates it.
pub fn sources_first(g: &mut Graph) {
    let order: Vec<usize> =
        (0..g.nodes.len()).filter(|&i| g.nodes[i].is_source()).chain((0..g.nodes.len()).filter(|&i| !g.nodes[i].is_source())).collect();
    g.reorder(&order);
}

/// See the module.
pub struct LayoutPass;

impl Switch for LayoutPass {
    fn name(&self) -> &'static str {
        "layout"
    }

    fn about(&self) -> &'static str {
        "Inserts contiguous copies: of inputs whose strides an op cannot read, and of values that would be overwritten before they are stored."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }

    fn required(&self) -> bool {
        true
    }

    fn example(&self, r: &Recorder) {
        let x = r.feed("x", &[5, 4], DType::F32);
        r.output("y", x.permute(&[1, 0]).reshape(&[2, 10]).softmax());
    }
}

impl Pass for LayoutPass {
    fn stage(&self) -> Stage {
        Stage::Lowered
    }

    fn after(&self) -> &'static [&'static str] {
        &["in-place", "grouped-gemm"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let before = g.nodes.len();
        copies(g);
        receipt.applied = g.nodes.len() - before;
        Ok(())
    }
}

/// Inserts all copies.
fn copies(g: &mut Graph) {
    sources_first(g);
    // A state's update must not be a view of another state, which may be updated first; nor may an output be a view of a state that is
    // updated.
    let roots = view_roots(g);
    let root = |v: Value| roots[v.node].unwrap_or(v);
    let updated: HashSet<Value> = g.updates.iter().map(|u| u.0).collect();
    let unsafe_update = |v: Value| g.nodes[root(v).node].is_source() || g.nodes[v.node].is_view();
    let mut targets: HashSet<Value> = g.updates.iter().map(|u| u.1).filter(|&v| unsafe_update(v)).collect();
    targets.extend(g.outputs.iter().map(|o| o.1).filter(|&v| updated.contains(&root(v))));
    let before: (Vec<Value>, Vec<Value>) = (g.updates.iter().map(|u| u.1).collect(), g.outputs.iter().map(|o| o.1).collect());
    let mut copied: HashMap<Value, Value> = HashMap::new();
    // Strides of every value of the new graph.
    let mut strides: HashMap<Value, Vec<usize>> = HashMap::new();
    let mut plain: HashMap<Value, Value> = HashMap::new();
    let done: Result<(), std::convert::Infallible> = g.rewrite(|w, i, node, inputs| {
        let recorder = w.recorder;
        let mut ready = inputs.to_vec();
        if let Kind::Op(op) = &node.kind {
            let reuse: HashSet<usize> = op.reuse().into_iter().map(|p| p.0).collect();
            for (k, v) in ready.iter_mut().enumerate() {
                let shape = v.shape();
                let lies = &strides[&v.value()];
                let reused = reuse.contains(&k);
                let fits = match op.is_view() {
                    true => op.alias(&v.meta(), lies).is_some(),
                    false => op.layout(k).accepts(&shape, lies) && (!reused || Layout::Contiguous.accepts(&shape, lies)),
                };
                if !fits {
                    let made = plain.get(&v.value()).map(|&c| recorder.var(c));
                    let c = made.unwrap_or_else(|| copy(*v));
                    plain.insert(v.value(), c.value());
                    strides.insert(c.value(), contiguous(&shape));
                    *v = c;
                }
            }
        }
        let outputs = recorder.keep(node, ready.iter().map(|v| v.value()).collect());
        for (out, &new) in outputs.iter().enumerate() {
            let shape = &node.outputs[out].shape;
            let of_view = match &node.kind {
                Kind::Op(op) if op.is_view() => op.alias(&ready[0].meta(), &strides[&ready[0].value()]),
                _ => None,
            };
            // Of a view that cannot be, the plan is refused (`Plan::new`).
            let lies = of_view.map(|(_, strides)| strides).filter(|s| s.len() == shape.len()).unwrap_or_else(|| contiguous(shape));
            strides.insert(new, lies);
            let old = Value { node: i, out };
            if targets.contains(&old) {
                let c = copy(recorder.var(new));
                strides.insert(c.value(), contiguous(&node.outputs[out].shape));
                copied.insert(old, c.value());
            }
        }
        Ok(Some(outputs.iter().map(|&v| recorder.var(v)).collect()))
    });
    done.unwrap_or_else(|never| match never {});
    // `rewrite` pointed the roots at the values themselves; where a copy was made, they take the copy.
    for (new, old) in g.updates.iter_mut().map(|u| &mut u.1).zip(before.0).chain(g.outputs.iter_mut().map(|o| &mut o.1).zip(before.1)) {
        if let Some(&c) = copied.get(&old).filter(|_| targets.contains(&old)) {
            *new = c;
        }
    }
}
