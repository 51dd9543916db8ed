//! Fuses chains of pointwise ops into one kernel, so that intermediate values never reach memory.

use super::pattern::Uses;
use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Value};
use crate::meta::DType;
use crate::ops::pointwise::{Expr, Pointwise};
use crate::ops::reduce::{Reduce, Reduction};
use crate::record::{Recorder, Var};
use std::sync::Arc;

pub struct FusePointwise;

/// Larger fused expressions gain nothing: their intermediate values no longer fit into the CPU's cache or the GPU's registers.
const MOST_INPUTS: usize = 12;
const MOST_INSTRUCTIONS: usize = 64;
/// A sum over an axis of at most this length becomes pointwise additions of its slices.
const FEW: usize = 8;
/// A broadcast producer of at most so many instructions is recomputed for every element rather than read.
const LITTLE: usize = 4;

impl Switch for FusePointwise {
    fn name(&self) -> &'static str {
        "fuse-pointwise"
    }

    fn about(&self) -> &'static str {
        "Fuses chains of pointwise ops into one kernel: intermediate values stay in registers or cache, and are written only if something else reads them."
    }

    fn numerics(&self, target: Target, dtype: DType) -> Numerics {
        // In bf16, intermediate values are no longer rounded; on a GPU the compiler contracts a * b + c into one FMA.
        if dtype == DType::F32 && target == Target::Cpu { Numerics::Exact } else { Numerics::Reordered }
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[4, 4], Init::Normal { std: 1.0 });
        let x = r.feed("x", &[5, 4], DType::F32);
        let rng = r.feed("rng", &[4], DType::I32);
        let h = x.matmul(w);
        let s = (h.sigmoid() * h + 1.0).dropout(0.2, rng);
        let loss = (s * s.exp()).sum();
        r.output("loss", loss);
        r.output("dw", r.grad(loss, &[w])[0]);
    }
}

impl Pass for FusePointwise {
    fn stage(&self) -> Stage {
        Stage::Lowered
    }

    fn after(&self) -> &'static [&'static str] {
        &["gemm-epilogue", "lora-backward"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        few_terms(g);
        // Node by node: node i absorbs the producers of which it is the first reader. Outputs of theirs that others read become outputs of
        // node i.
        let mut uses = Uses::new(g);
        for i in 0..g.nodes.len() {
            let mut refused = vec![];
            while let Some((p, reason)) = candidate(g, &uses, i, &refused) {
                match reason {
                    None => {
                        join(g, &mut uses, p, i);
                        receipt.applied += 1;
                    }
                    Some(reason) => {
                        receipt.decline(reason, &g.nodes[i].scope);
                        refused.push(p);
                    }
                }
            }
        }
        super::dead_code::sweep(g);
        let (mut gone, mut uses) = (vec![false; g.nodes.len()], Uses::new(g));
        for q in 0..g.nodes.len() {
            if let Some(p) = sibling(g, q, &gone) {
                join_sibling(g, &mut uses, p, q);
                gone[q] = true;
                receipt.applied += 1;
            }
        }
        super::dead_code::sweep(g);
        Ok(())
    }
}

/// Sums over a short axis become pointwise additions of slices, in the same order, so that they fuse too.
fn few_terms(g: &mut Graph) {
    let done: Result<(), std::convert::Infallible> = g.rewrite(|_, _, node, inputs| {
        let Some(r) = node.op::<Reduce>().filter(|r| r.how == Reduction::Sum) else { return Ok(None) };
        let shape = inputs[0].shape();
        let inner: usize = shape[r.axis + 1..].iter().product();
        if !(2..=FEW).contains(&shape[r.axis]) || inner < 8 {
            return Ok(None);
        }
        let terms: Vec<Var> = (0..shape[r.axis]).map(|k| inputs[0].slice(r.axis, k, k + 1)).collect();
        let expr = Expr::of(terms.len(), |e, x| x[1..].iter().fold(x[0], |sum, &t| e.add(sum, t)));
        let op = Pointwise::new(expr, vec![node.outputs[0].dtype]);
        Ok(Some(vec![inputs[0].recorder().op1(op, &terms)]))
    });
    done.unwrap_or_else(|never| match never {});
}

/// A pointwise producer that node `i` is the first to read, and the reason if the two cannot be fused.
fn candidate(g: &Graph, uses: &Uses, i: usize, refused: &[usize]) -> Option<(usize, Option<&'static str>)> {
    let consumer = g.nodes[i].op::<Pointwise>()?;
    for (k, v) in g.nodes[i].inputs.iter().enumerate() {
        let p = v.node;
        let Some(producer) = g.nodes[p].op::<Pointwise>() else { continue };
        // A cast to an integer type truncates, which a fused expression (in f32) would not; the rng counters are read as they are.
        let rounds = g.nodes[i].inputs.iter().any(|w| w.node == p && !g.meta(*w).dtype.is_float());
        if crate::mutant!("fuse-pointwise-through-integers", rounds, false) || consumer.expr.uses_rng(k) {
            continue;
        }
        if refused.contains(&p) {
            continue;
        }
        // A broadcast producer would be recomputed for every element: only if that is cheap and nothing else reads it.
        let little = || producer.expr.flops() <= LITTLE && !producer.expr.draws() && uses.count(p) == 1;
        if g.nodes[p].outputs[0].shape != g.nodes[i].outputs[0].shape && !little() {
            continue;
        }
        // A forward op is absorbed into a backward node only if nothing else reads its result.
        let crosses = g.nodes[p].backward != g.nodes[i].backward;
        let elsewhere = uses.is_root(p) || uses.readers(p, i + 1..g.nodes.len()).next().is_some();
        if uses.readers(p, 0..i).next().is_some() || (crosses && elsewhere) {
            continue;
        }
        let inputs = g.nodes[p].inputs.len() + g.nodes[i].inputs.len() - 1;
        let ins = producer.expr.ins.len() + consumer.expr.ins.len();
        let reason = if inputs > MOST_INPUTS {
            Some("too many inputs for one expression")
        } else if ins > MOST_INSTRUCTIONS {
            Some("too many instructions for one expression")
        } else {
            None
        };
        return Some((p, reason));
    }
    None
}

/// How many nodes back a node may be moved: further, and its results would take up memory for too long before they are read.
const NEAR: usize = 24;

/// A pointwise node shortly before `q` that shares an input with it, and at whose position `q` could run.
fn sibling(g: &Graph, q: usize, gone: &[bool]) -> Option<usize> {
    let node = &g.nodes[q];
    let own = node.op::<Pointwise>()?;
    let latest = node.inputs.iter().map(|v| v.node).max()?;
    let near = |p: usize| {
        let other = &g.nodes[p];
        let Some(op) = other.op::<Pointwise>() else { return false };
        let whole = |v: &Value| g.meta(*v).shape == node.outputs[0].shape;
        let inputs = node.inputs.iter().filter(|v| !other.inputs.contains(v)).count() + other.inputs.len();
        other.backward == node.backward
            && other.outputs[0].shape == node.outputs[0].shape
            && node.inputs.iter().any(|v| whole(v) && other.inputs.contains(v))
            && inputs <= MOST_INPUTS
            && op.expr.ins.len() + own.expr.ins.len() <= MOST_INSTRUCTIONS
    };
    (latest + 1..q).rev().take(NEAR).find(|&p| !gone[p] && near(p))
}

/// Fuses node `q` into its sibling `p`: one kernel computes both.
fn join_sibling(g: &mut Graph, uses: &mut Uses, p: usize, q: usize) {
    let (a, b) = (g.nodes[p].op::<Pointwise>().expect("a sibling").clone(), g.nodes[q].op::<Pointwise>().expect("a sibling").clone());
    let mut inputs = g.nodes[p].inputs.clone();
    let from: Vec<usize> = g.nodes[q]
        .inputs
        .iter()
        .map(|&v| {
            inputs.iter().position(|&w| w == v).unwrap_or_else(|| {
                inputs.push(v);
                inputs.len() - 1
            })
        })
        .collect();
    let mut expr = a.expr.clone();
    let map = expr.append(&b.expr, |e, k| e.input(from[k]), |k| from[k]);
    expr.outs.extend(b.expr.outs.iter().map(|&o| map[o]));
    let first = g.nodes[p].outputs.len();
    let metas = g.nodes[q].outputs.clone();
    let node = &mut g.nodes[p];
    node.outputs.extend(metas);
    node.kind = Kind::Op(Arc::new(Pointwise::new(expr, [a.dtypes, b.dtypes].concat())));
    uses.set_inputs(g, p, inputs);
    uses.redirect(g, q, |v| Value { node: p, out: first + v.out });
}

/// Fuses producer `p` into node `i`.
fn join(g: &mut Graph, uses: &mut Uses, p: usize, i: usize) {
    let keep = uses.read_apart_from(g, p, i);
    let (a, b) = (g.nodes[p].op::<Pointwise>().expect("a candidate").clone(), g.nodes[i].op::<Pointwise>().expect("a candidate").clone());
    let mut inputs: Vec<Value> = vec![];
    let mut number = |v: Value| {
        inputs.iter().position(|&w| w == v).unwrap_or_else(|| {
            inputs.push(v);
            inputs.len() - 1
        })
    };
    let mut expr = Expr::default();
    let from_a: Vec<usize> = g.nodes[p].inputs.iter().map(|&v| number(v)).collect();
    let map_a = expr.append(&a.expr, |e, k| e.input(from_a[k]), |k| from_a[k]);
    let from_b: Vec<Result<usize, usize>> =
        g.nodes[i].inputs.iter().map(|&v| if v.node == p { Err(map_a[a.expr.outs[v.out]]) } else { Ok(number(v)) }).collect();
    let map_b = expr.append(
        &b.expr,
        |e, k| match from_b[k] {
            Ok(n) => e.input(n),
            Err(reg) => reg,
        },
        |k| from_b[k].expect("rng counters are not computed by pointwise ops"),
    );
    expr.outs = b.expr.outs.iter().map(|&o| map_b[o]).chain(keep.iter().map(|&o| map_a[a.expr.outs[o]])).collect();
    let dtypes = b.dtypes.iter().copied().chain(keep.iter().map(|&o| a.dtypes[o])).collect();
    let first = g.nodes[i].outputs.len();
    let metas: Vec<_> = keep.iter().map(|&o| g.nodes[p].outputs[o].clone()).collect();
    let node = &mut g.nodes[i];
    node.outputs.extend(metas);
    node.kind = Kind::Op(Arc::new(Pointwise::new(expr, dtypes)));
    uses.set_inputs(g, i, inputs);
    let at = |out: usize| keep.iter().position(|&o| o == out).expect("kept because it is read");
    uses.redirect(g, p, |v| Value { node: i, out: first + at(v.out) });
}
