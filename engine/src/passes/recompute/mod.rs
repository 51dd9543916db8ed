//! Computes forward values again when the backward pass needs them, instead of keeping them.

mod choose;
mod side;

use super::pattern::Rewrite;
use super::{Numerics, Pass, Receipt, Setting, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Value};
use crate::meta::DType;
use crate::plan::view_roots;
use crate::record::{Recorder, Var};
use std::collections::{HashMap, HashSet};

pub struct Recompute;

impl Switch for Recompute {
    fn name(&self) -> &'static str {
        "recompute"
    }

    fn about(&self) -> &'static str {
        "Computes forward values again where the backward pass needs them: less memory for more arithmetic, the same bits."
    }

    fn settings(&self) -> &'static [Setting] {
        &[
            Setting {
                name: "what",
                default: "siblings",
                about: "siblings: arithmetic whose inputs the backward pass reads together anyway; memory-bound: what moves at most `price` bytes for each that need not be kept; blocks: all but what enters and leaves a block of the model",
            },
            Setting {
                name: "price",
                default: "4",
                about: "of memory-bound: norms and arithmetic on the side of their gradients cost 1, a norm alone 2, what has two inputs 3",
            },
            Setting {
                name: "spare",
                default: "0",
                about: "of memory-bound: so many MiB are kept all the same, of what is dearest to make again",
            },
        ]
    }

    fn variants(&self) -> &'static [&'static str] {
        &["auto", "auto,what=blocks", "auto,what=memory-bound"]
    }

    fn numerics(&self, _: Target, dtype: DType) -> Numerics {
        // A norm that adds first sees the sum rounded when it is made again.
        if dtype == DType::F32 { Numerics::Exact } else { Numerics::Reordered }
    }

    fn example(&self, r: &Recorder) {
        let mut h = r.feed("x", &[5, 8], DType::F32);
        let mut params = vec![];
        for i in 0..3 {
            h = r.block(&format!("blocks.{i}"), || {
                let w = r.param(&format!("w{i}"), &[8, 8], Init::Normal { std: 0.3 });
                params.push(w);
                h + h.silu().matmul(w).swiglu(h.matmul(w)).matmul(w)
            });
        }
        let loss = h.square().mean();
        r.output("loss", loss);
        for (i, g) in r.grad(loss, &params).into_iter().enumerate() {
            r.output(&format!("dw{i}"), g);
        }
    }
}

impl Pass for Recompute {
    fn stage(&self) -> Stage {
        Stage::Scheduled
    }

    fn after(&self) -> &'static [&'static str] {
        &["hoist"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let (price, spare) = (settings.number("price")?, settings.number_or_none("spare")?.saturating_mul(1 << 20));
        let mut again = match settings.one_of("what", &["siblings", "memory-bound", "blocks"])? {
            "siblings" => choose::siblings(g),
            "memory-bound" => {
                let (again, (saved, moved)) = choose::by_price(g, price, spare);
                receipt.notes.push(format!("{} MiB less kept for {} MiB more moved", saved >> 20, moved >> 20));
                again
            }
            _ => choose::inside_blocks(g),
        };
        let given = side::arrange(g, &mut again);
        let forward = forward(g);
        let mut copies = Copies { again: &again, given: &given, made: HashMap::new(), flops: 0, ops: 0 };
        let mut total = 0;
        g.rewrite(|w, i, node, inputs| {
            if let Kind::Op(op) = &node.kind {
                total += op.cost(&w.old.inputs(i)).flops;
            }
            if !node.backward || i <= forward || node.is_view() {
                return Ok::<_, Error>(None);
            }
            let again: Vec<Var> = node.inputs.iter().map(|&v| copies.of(w, v)).collect();
            w.recorder.set_place(node);
            Ok((again.iter().zip(inputs).any(|(a, b)| a.value() != b.value())).then(|| w.keep(node, &again)))
        })?;
        receipt.applied = given.len() + copies.ops;
        let flops = copies.flops;
        if total > 0 && receipt.applied > 0 {
            receipt.notes.push(format!("{} ops again, {:.0}% more arithmetic", receipt.applied, 100.0 * flops as f64 / total as f64));
        }
        if receipt.applied == 0 && g.nodes.iter().any(|n| n.backward) {
            receipt.decline("the backward pass needs nothing that this setting would compute again", "");
        }
        super::dead_code::sweep(g);
        Ok(())
    }
}

/// Where the forward pass ends. Gradients that `hoist` computes during it read what is there.
fn forward(g: &Graph) -> usize {
    g.nodes.iter().rposition(|n| !n.backward && n.block != 0).unwrap_or(0)
}

/// Values of the forward pass that backward nodes read, each with those nodes; views are seen through.
fn wanted(g: &Graph) -> HashMap<Value, Vec<usize>> {
    let (roots, forward) = (view_roots(g), forward(g));
    let mut wanted: HashMap<Value, Vec<usize>> = HashMap::new();
    for (i, node) in g.nodes.iter().enumerate().filter(|(i, n)| n.backward && *i > forward && !n.is_view()) {
        for &v in &node.inputs {
            let v = roots[v.node].unwrap_or(v);
            let made = &g.nodes[v.node];
            if !made.is_source() && (!made.backward || v.node <= forward) {
                wanted.entry(v).or_default().push(i);
            }
        }
    }
    wanted
}

/// Forward values as the backward pass reads them: made anew from what was kept, once for each node.
struct Copies<'a> {
    again: &'a HashSet<Value>,
    /// Made by a backward node beside its own results.
    given: &'a HashMap<Value, Value>,
    made: HashMap<usize, Vec<Value>>,
    flops: u64,
    /// Nodes that are no views, made anew.
    ops: usize,
}

impl Copies<'_> {
    /// What the old graph's value is in the new one.
    fn of<'g>(&mut self, w: &Rewrite<'g>, v: Value) -> Var<'g> {
        let n = &w.old.nodes[v.node];
        if let Some(&by) = self.given.get(&v) {
            return w.at(by);
        }
        if let Some(made) = self.made.get(&v.node).filter(|_| n.is_view() || self.again.contains(&v)) {
            return w.recorder.var(made[v.out]);
        }
        if !n.is_view() && !self.again.contains(&v) {
            return w.at(v);
        }
        let inputs: Vec<Var> = n.inputs.iter().map(|&v| self.of(w, v)).collect();
        // A view of what was kept.
        if n.is_view() && inputs.iter().zip(&n.inputs).all(|(new, &old)| new.value() == w.at(old).value()) {
            return w.at(v);
        }
        if let Kind::Op(op) = &n.kind {
            self.flops += op.cost(&w.old.inputs(v.node)).flops;
        }
        self.ops += !n.is_view() as usize;
        w.recorder.set_backward(&n.scope);
        let made = w.keep(n, &inputs);
        self.made.insert(v.node, made.iter().map(|v| v.value()).collect());
        made[v.out]
    }
}
