//! Reverse-mode differentiation: replaces every Grad node by the ops that compute those gradients.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node, Value};
use crate::meta::DType;
use crate::ops::collective::Broadcast;
use crate::ops::concat::{Pad, concat};
use crate::ops::full::Full;
use crate::record::{Recorder, Var};
use std::collections::HashMap;

pub struct Autodiff;

impl Switch for Autodiff {
    fn name(&self) -> &'static str {
        "autodiff"
    }

    fn about(&self) -> &'static str {
        "Writes out the gradients that a step asks for. Runs after the fusions, since fused ops have gradients of their own."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }

    fn required(&self) -> bool {
        true
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[3, 4], Init::Normal { std: 1.0 });
        let x = r.feed("x", &[5, 3], DType::F32);
        let loss = x.matmul(w).silu().mean();
        r.output("loss", loss);
        r.output("dw", r.grad(loss, &[w])[0]);
    }
}

impl Pass for Autodiff {
    fn stage(&self) -> Stage {
        Stage::Differentiated
    }

    fn after(&self) -> &'static [&'static str] {
        &["bf16", "decompose", "merged-qkv"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        g.rewrite(|w, _, node, inputs| {
            if !matches!(node.kind, Kind::Grad) {
                return Ok(None);
            }
            receipt.applied += 1;
            gradients(w.recorder, inputs[0], &inputs[1..]).map(Some)
        })
    }
}

fn gradients<'g>(recorder: &'g Recorder, loss: Var<'g>, by: &[Var<'g>]) -> Result<Vec<Var<'g>>, Error> {
    let end = loss.value().node + 1;
    let (depends, needed) = recorder.with_graph(|g| {
        let depends = g.depends_on(by.iter().map(|v| v.value()));
        (depends, g.needed_by(std::iter::once(loss.value())))
    });
    // Gradients with respect to each value, one from each of its readers, not yet summed.
    let mut adjoint: HashMap<Value, Vec<Var<'g>>> = HashMap::new();
    adjoint.insert(loss.value(), vec![recorder.full(&loss.shape(), 1.0)]);
    for i in (0..end).rev().filter(|&i| depends[i] && needed[i]) {
        let node = recorder.with_graph(|g| g.nodes[i].clone());
        let Kind::Op(op) = &node.kind else { continue };
        let outputs = node.outputs.len();
        let flows: Vec<Vec<Var>> = (0..outputs).map(|out| adjoint.get(&Value { node: i, out }).cloned().unwrap_or_default()).collect();
        // What a gradient is asked for may be computed itself, of nothing that one is asked for.
        if flows.iter().all(|f| f.is_empty()) || !node.inputs.iter().any(|v| depends[v.node]) {
            continue;
        }
        if !op.differentiable() {
            let scope = if node.scope.is_empty() { "the top level".into() } else { node.scope.to_string() };
            return Err(Error::NotDifferentiable { op: op.name().into(), scope });
        }
        recorder.set_backward(&node.scope);
        let x: Vec<Var> = node.inputs.iter().map(|&v| recorder.var(v)).collect();
        let y: Vec<Var> = (0..outputs).map(|out| recorder.var(Value { node: i, out })).collect();
        // Gradients of a bf16 copy of a parameter are not summed in bf16: each is cast back to the parameter's type and summed there.
        // What all ranks read is summed before the ranks' sums are.
        let apart = op.is::<Broadcast>().is_none() && recorder.with_graph(|g| is_parameter(g, Value { node: i, out: 0 }));
        let rounds: Vec<Vec<Option<Var>>> = if crate::mutant!("gradients-of-a-weight-added-in-bf16", apart, false) {
            side_by_side(&flows[0]).into_iter().map(|f| vec![Some(f)]).collect()
        } else {
            vec![flows.iter().map(|f| total(f)).collect()]
        };
        for dy in rounds {
            let grads = op.vjp(&x, &y, &dy);
            assert_eq!(grads.len(), x.len(), "{}: vjp must return one gradient, or None, for each input", op.name());
            for (&v, g) in node.inputs.iter().zip(grads) {
                let Some(g) = g.filter(|_| depends[v.node]) else { continue };
                assert_eq!(g.shape(), recorder.var(v).shape(), "{}: the gradient's shape must be its input's", op.name());
                adjoint.entry(v).or_default().push(g);
            }
        }
    }
    by.iter()
        .map(|v| {
            let name = recorder.with_graph(|g| {
                let mut node = &g.nodes[v.value().node];
                while node.op::<Broadcast>().is_some() {
                    node = &g.nodes[node.inputs[0].node];
                }
                match &node.kind {
                    Kind::State(s) => s.name.clone(),
                    _ => format!("{v:?}"),
                }
            });
            adjoint.get(&v.value()).and_then(|flows| total(flows)).ok_or(Error::Unreached(name))
        })
        .collect()
}

/// Whether this is a state, looking through views and casts from f32 to a narrower type.
fn is_parameter(g: &Graph, v: Value) -> bool {
    let narrows = |n: &Node| n.is_cast() && g.meta(n.inputs[0]).dtype == DType::F32 && n.outputs[0].dtype.is_float();
    g.state_through(v, |n| n.is_view() || narrows(n)).is_some()
}

/// The sum of all gradients with respect to one value.
fn total<'g>(flows: &[Var<'g>]) -> Option<Var<'g>> {
    side_by_side(flows).into_iter().reduce(add)
}

/// Gradients of slices that do not overlap become one concatenation (instead of a sum of zero-padded tensors); the others stay as they are.
fn side_by_side<'g>(flows: &[Var<'g>]) -> Vec<Var<'g>> {
    let Some(recorder) = flows.first().map(|f| f.recorder()) else { return vec![] };
    let mut parts: Vec<(usize, usize, usize, Var)> = vec![]; // axis, start, end, gradient of that slice
    let mut whole: Vec<Var> = vec![];
    for &flow in flows {
        let part = recorder.with_graph(|g| {
            let node = &g.nodes[flow.value().node];
            node.op::<Pad>().map(|p| (p.axis, p.before, p.before + g.meta(node.inputs[0]).shape[p.axis], node.inputs[0]))
        });
        let beside = |p: &(usize, usize, usize, Var)| part.is_some_and(|(axis, first, end, _)| p.0 == axis && (end <= p.1 || p.2 <= first));
        match part {
            Some((axis, first, end, v)) if parts.iter().all(beside) => parts.push((axis, first, end, recorder.var(v))),
            _ => whole.push(flow),
        }
    }
    parts.sort_by_key(|p| p.1);
    if let [(axis, first, end, part)] = parts[..] {
        whole.push(part.pad(axis, first, flows[0].shape()[axis] - end));
    } else if let Some(&(axis, ..)) = parts.first() {
        let shape = flows[0].shape();
        let gap = |from: usize, to: usize| {
            let mut shape = shape.clone();
            shape[axis] = to - from;
            recorder.op1(Full { shape, value: 0.0, dtype: flows[0].dtype() }, &[])
        };
        let (mut all, mut at) = (vec![], 0);
        for (_, first, end, part) in parts {
            if at < first {
                all.push(gap(at, first));
            }
            all.push(part);
            at = end;
        }
        if at < shape[axis] {
            all.push(gap(at, shape[axis]));
        }
        whole.push(concat(&all, axis));
    }
    whole
}

/// a + b; if the op that made one of them can accumulate into the other (`Op::accumulate`), it does.
fn add<'g>(a: Var<'g>, b: Var<'g>) -> Var<'g> {
    for (one, into) in [(b, a), (a, b)] {
        let v = one.value();
        let (kind, inputs) = one.recorder().with_graph(|g| (g.nodes[v.node].kind.clone(), g.nodes[v.node].inputs.clone()));
        let Kind::Op(op) = kind else { continue };
        let x: Vec<Var> = inputs.iter().map(|&v| one.recorder().var(v)).collect();
        if let Some(sum) = op.accumulate(&x, v.out, into) {
            return sum;
        }
    }
    a + b
}
