//! Replaces every Grad node by the operations that compute it, in reverse.

use super::{Numerics, Pass, Receipt, Settings, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Value};
use crate::meta::DType;
use crate::record::{Recorder, Var};
use std::collections::HashMap;

pub struct Autodiff;

impl Pass for Autodiff {
    fn name(&self) -> &'static str {
        "autodiff"
    }

    fn about(&self) -> &'static str {
        "Writes out the gradients that a step asks for. Runs after the fusions, which bring their own gradient."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }

    fn always_on(&self) -> bool {
        true
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        g.rewrite(|recorder, _, node, inputs| {
            if !matches!(node.kind, Kind::Grad) {
                return Ok(None);
            }
            receipt.applied += 1;
            gradients(recorder, inputs[0], &inputs[1..]).map(Some)
        })
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[3, 4], Init::Normal { std: 1.0 });
        let x = r.feed("x", &[5, 3], DType::F32);
        let loss = x.matmul(w).silu().mean();
        r.output("loss", loss);
        r.output("dw", r.grad(loss, &[w])[0]);
    }
}

fn gradients<'g>(recorder: &'g Recorder, loss: Var<'g>, by: &[Var<'g>]) -> Result<Vec<Var<'g>>, Error> {
    let end = loss.value().node + 1;
    let (depends, needed) = recorder.with_graph(|g| {
        let depends = g.depends_on(by.iter().map(|v| v.value()));
        (depends, g.needed_by(std::iter::once(loss.value())))
    });
    let mut adjoint: HashMap<Value, Var<'g>> = HashMap::new();
    adjoint.insert(loss.value(), recorder.full(&loss.shape(), 1.0));
    for i in (0..end).rev().filter(|&i| depends[i] && needed[i]) {
        let (kind, inputs, outputs, scope) = recorder.with_graph(|g| {
            let n = &g.nodes[i];
            (n.kind.clone(), n.inputs.clone(), n.outputs.len(), n.scope.clone())
        });
        let Kind::Op(op) = kind else { continue };
        let dy: Vec<Option<Var>> = (0..outputs).map(|out| adjoint.get(&Value { node: i, out }).copied()).collect();
        if dy.iter().all(|d| d.is_none()) {
            continue;
        }
        if !op.differentiable() {
            let scope = if scope.is_empty() { "the top level".into() } else { scope.to_string() };
            return Err(Error::NotDifferentiable { op: op.name().into(), scope });
        }
        recorder.set_backward(&scope);
        let x: Vec<Var> = inputs.iter().map(|&v| recorder.var(v)).collect();
        let y: Vec<Var> = (0..outputs).map(|out| recorder.var(Value { node: i, out })).collect();
        let grads = op.vjp(&x, &y, &dy);
        assert_eq!(grads.len(), x.len(), "{}: one gradient, or None, for each input", op.name());
        for (&v, g) in inputs.iter().zip(grads) {
            let Some(g) = g.filter(|_| depends[v.node]) else { continue };
            assert_eq!(g.shape(), recorder.var(v).shape(), "{}: a gradient has its input's shape", op.name());
            let sum = match adjoint.get(&v) {
                Some(&a) => add(a, g),
                None => g,
            };
            adjoint.insert(v, sum);
        }
    }
    by.iter()
        .map(|v| {
            let name = recorder.with_graph(|g| match &g.nodes[v.value().node].kind {
                Kind::State(s) => s.name.clone(),
                _ => format!("{v:?}"),
            });
            adjoint.get(&v.value()).copied().ok_or(Error::Unreached(name))
        })
        .collect()
}

/// a + b, by the op that made one of them if it can add to the other.
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
