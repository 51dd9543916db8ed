//! Activation checkpointing: recomputes forward values in the backward pass instead of keeping them.

mod choose;
mod layers;
mod side;

use super::pattern::Rewrite;
use super::{Numerics, Pass, Receipt, Setting, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node, Value};
use crate::meta::DType;
use crate::plan::view_roots;
use crate::record::{Recorder, Var};
use layers::Layers;
use std::collections::{HashMap, HashSet};

pub struct Recompute;

impl Switch for Recompute {
    fn name(&self) -> &'static str {
        "recompute"
    }

    fn about(&self) -> &'static str {
        "Activation checkpointing: recomputes forward values in the backward pass instead of keeping them. Less memory for more arithmetic, bitwise the same results."
    }

    fn settings(&self) -> &'static [Setting] {
        &[
            Setting {
                name: "what",
                default: "siblings",
                about: "what is recomputed. siblings: pointwise ops whose inputs one backward kernel reads anyway; memory-bound: ops that read and write at most `price` bytes for each byte of memory saved; blocks: everything but the inputs and outputs of the model's blocks",
            },
            Setting {
                name: "price",
                default: "4",
                about: "with what=memory-bound: the most bytes that may be read and written for each byte saved. A norm or pointwise op that its backward kernel recomputes costs 1, a norm in a kernel of its own 2, a pointwise op of two inputs 3",
            },
            Setting {
                name: "spare",
                default: "0",
                about: "with what=memory-bound: MiB of activations that are kept anyway, those that cost the most to recompute",
            },
            Setting {
                name: "layers",
                default: "all",
                about: "with what=blocks: which blocks, numbered from 0 in the order of the model: all, 3, 0-11 or 0-5,12-17. Early ones save the most: their activations are kept for the longest time",
            },
            Setting {
                name: "rest",
                default: "siblings",
                about: "with what=blocks: what is recomputed in the blocks that `layers` leaves out, siblings or memory-bound",
            },
        ]
    }

    fn variants(&self) -> &'static [&'static str] {
        &[
            "auto",
            "auto,what=blocks",
            "auto,what=memory-bound",
            "auto,what=blocks,layers=0-1",
            "auto,what=blocks,layers=0,2,rest=memory-bound",
        ]
    }

    fn numerics(&self, _: Target, dtype: DType) -> Numerics {
        // A recomputed add and RMS norm reads the rounded sum, the original one did not.
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
        let mut again = chosen(g, settings, receipt)?;
        let given = side::arrange(g, &mut again);
        let (late, roots) = (Late::new(g), view_roots(g));
        let mut copies = Copies { again: &again, given: &given, made: HashMap::new(), flops: 0, ops: 0 };
        let mut total = 0;
        g.rewrite(|w, i, node, inputs| {
            if let Kind::Op(op) = &node.kind {
                total += op.cost(&w.old.inputs(i)).flops;
            }
            if !node.backward || node.is_view() {
                return Ok::<_, Error>(None);
            }
            let is_late = |v: Value| late.reads(i, roots[v.node].unwrap_or(v));
            let again: Vec<Var> = node.inputs.iter().map(|&v| if is_late(v) { copies.of(w, v) } else { w.at(v) }).collect();
            w.recorder.set_place(node);
            Ok((again.iter().zip(inputs).any(|(a, b)| a.value() != b.value())).then(|| w.keep(node, &again)))
        })?;
        receipt.applied = given.len() + copies.ops;
        let flops = copies.flops;
        receipt.added_flops = flops;
        if total > 0 && receipt.applied > 0 {
            receipt.notes.push(format!("{} ops recomputed, {:.0}% more arithmetic", receipt.applied, 100.0 * flops as f64 / total as f64));
        }
        if receipt.applied == 0 && g.nodes.iter().any(|n| n.backward) {
            receipt.decline("the backward pass reads nothing that this setting would recompute", "");
        }
        super::dead_code::sweep(g);
        Ok(())
    }
}

/// The values that are recomputed by these settings.
fn chosen(g: &Graph, settings: &Settings, receipt: &mut Receipt) -> Result<HashSet<Value>, Error> {
    let (price, spare) = (settings.number("price")?, settings.number_or_none("spare")?.saturating_mul(1 << 20));
    let what = settings.one_of("what", &["siblings", "memory-bound", "blocks"])?;
    let rest = settings.one_of("rest", &["siblings", "memory-bound"])?;
    let wrong = |problem: String| Error::PassSetting { pass: "recompute".into(), problem };
    let named = settings.text("layers");
    let layers = Layers::parse(named).ok_or_else(|| wrong(format!("layers={named} is not all, or blocks such as 3, 0-11 or 0-5,12-17")))?;
    let some = what == "blocks" && matches!(layers, Layers::Of(_));
    if what != "blocks" {
        settings.unused(&["layers"], "what=blocks")?;
    }
    if !some {
        settings.unused(&["rest"], "what=blocks with layers=..")?;
    }
    if what != "memory-bound" && !(some && rest == "memory-bound") {
        settings.unused(&["price", "spare"], "what=memory-bound (or rest=memory-bound)")?;
    }
    // Programs without a gradient may have other blocks, or none.
    if let Some(problem) = layers.problem(g).filter(|_| g.nodes.iter().any(|n| n.backward)) {
        return Err(wrong(problem));
    }
    let mut by_price = |but: &Layers| {
        let (again, (saved, moved)) = choose::by_price(g, price, spare, but);
        if (saved | moved) >> 20 > 0 {
            receipt.notes.push(format!("{} MiB less memory for {} MiB more memory traffic", saved >> 20, moved >> 20));
        }
        again
    };
    Ok(match (what, rest) {
        ("siblings", _) => choose::siblings(g),
        ("memory-bound", _) => by_price(&Layers::NONE),
        (_, rest) => {
            let mut again = choose::inside_blocks(g, &layers);
            if let Layers::Of(_) = layers {
                let others = if rest == "siblings" { choose::siblings(g) } else { by_price(&layers) };
                again.extend(others.into_iter().filter(|v| !layers.has(g.nodes[v.node].block)));
            }
            again
        }
    })
}

/// Which backward nodes read a forward value so late that it is worth recomputing. Gradients that `hoist` moved into the forward pass, to where their inputs are, read
/// the original values. But where a step adds up two losses, a whole backward pass stands before the other loss's forward pass.
struct Late {
    /// The last node of the last forward pass.
    forward: usize,
    /// Node -> the first node of another block after it.
    left: Vec<usize>,
}

impl Late {
    fn new(g: &Graph) -> Late {
        let in_block = |n: &Node| !n.backward && n.block != 0;
        let forward = g.nodes.iter().rposition(in_block).unwrap_or(0);
        let mut left = vec![usize::MAX; g.nodes.len()];
        // The next node that belongs to a block, and the next after it of another block.
        let mut next = (0, usize::MAX, usize::MAX);
        for (i, n) in g.nodes.iter().enumerate().rev().filter(|(_, n)| in_block(n)) {
            if n.block != next.0 {
                next = (n.block, i, next.1);
            }
            next.1 = i;
            left[i] = next.2;
        }
        Late { forward, left }
    }

    fn reads(&self, reader: usize, v: Value) -> bool {
        reader > self.forward || self.left[v.node] < reader
    }
}

/// Forward values that backward nodes read late, looking through views, each with those nodes.
fn wanted(g: &Graph) -> HashMap<Value, Vec<usize>> {
    let (roots, late) = (view_roots(g), Late::new(g));
    let mut wanted: HashMap<Value, Vec<usize>> = HashMap::new();
    for (i, node) in g.nodes.iter().enumerate().filter(|(_, n)| n.backward && !n.is_view()) {
        for &v in &node.inputs {
            let v = roots[v.node].unwrap_or(v);
            let made = &g.nodes[v.node];
            // A gradient that was hoisted is there when the last forward pass ends, like a forward value.
            let is_forward = !made.backward || (v.node <= late.forward && i > late.forward);
            if !made.is_source() && is_forward && late.reads(i, v) {
                wanted.entry(v).or_default().push(i);
            }
        }
    }
    wanted
}

/// Recomputes forward values for the backward pass from what was kept, each node once.
struct Copies<'a> {
    /// Values that are recomputed.
    again: &'a HashSet<Value>,
    /// Values that a backward node computes beside its own outputs.
    given: &'a HashMap<Value, Value>,
    made: HashMap<usize, Vec<Value>>,
    flops: u64,
    /// Recomputed nodes, views not counted.
    ops: usize,
}

impl Copies<'_> {
    /// What a backward node reads in place of the old graph's value.
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
        // A view of a value that was kept.
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
