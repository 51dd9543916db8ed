//! Copies what an op cannot read where it lies, and what would otherwise be overwritten before it is stored.

use crate::graph::{Graph, Kind, Value};
use crate::meta::{Layout, contiguous};
use crate::ops::pointwise::Pointwise;
use crate::plan::view_roots;
use crate::record::Var;
use std::collections::HashMap;

/// A pointwise op that does nothing: its output lies without gaps.
fn copy<'g>(v: Var<'g>) -> Var<'g> {
    let op = Pointwise { expr: Pointwise::new(1, |_, x| x[0]), dtypes: vec![v.dtype()], in_place: vec![] };
    v.recorder().op1(op, &[v])
}

pub fn apply(g: &mut Graph) {
    // A state's next value must not be another state's memory, which may be overwritten first.
    let roots = view_roots(g);
    let root = |v: Value| roots[v.node].unwrap_or(v);
    let sources: Vec<bool> = g.updates.iter().map(|u| g.nodes[root(u.1).node].is_source() || g.nodes[u.1.node].is_view()).collect();
    let targets: Vec<Value> = g.updates.iter().zip(&sources).filter(|(_, s)| **s).map(|(u, _)| u.1).collect();
    let mut copied: HashMap<Value, Value> = HashMap::new();
    // Strides of every value of the new graph.
    let mut strides: HashMap<Value, Vec<usize>> = HashMap::new();
    let mut plain: HashMap<Value, Value> = HashMap::new();
    let done: Result<(), std::convert::Infallible> = g.rewrite(|recorder, i, node, inputs| {
        let mut ready = inputs.to_vec();
        if let Kind::Op(op) = &node.kind {
            for (k, v) in ready.iter_mut().enumerate() {
                let shape = v.shape();
                let lies = &strides[&v.value()];
                let reused = op.reuse().iter().any(|p| p.0 == k);
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
            let lies = match &node.kind {
                Kind::Op(op) if op.is_view() => op.alias(&ready[0].meta(), &strides[&ready[0].value()]).expect("just made to fit").1,
                _ => contiguous(&node.outputs[out].shape),
            };
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
    // `rewrite` pointed the updates at the values themselves; those that need it take the copy.
    for (update, old) in g.updates.iter_mut().zip(targets_of(&sources, targets)) {
        if let Some(c) = old.and_then(|o| copied.get(&o)) {
            update.1 = *c;
        }
    }
}

fn targets_of(sources: &[bool], targets: Vec<Value>) -> Vec<Option<Value>> {
    let mut t = targets.into_iter();
    sources.iter().map(|&s| if s { t.next() } else { None }).collect()
}
