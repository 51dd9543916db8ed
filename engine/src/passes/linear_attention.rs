//! Fuses softmax-free attention, from RoPE to the layer norm after it.

use super::pattern::Uses;
use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Value};
use crate::meta::DType;
use crate::ops::linear_attention::LinearAttention;
use crate::ops::matmul::Matmul;
use crate::ops::norm::LayerNorm;
use crate::ops::rope::{Pairs, Rope};
use crate::ops::view::Permute;
use crate::record::Recorder;
use std::collections::HashSet;

pub struct LinearAttentionPass;

impl Switch for LinearAttentionPass {
    fn name(&self) -> &'static str {
        "linear-attention"
    }

    fn about(&self) -> &'static str {
        "Fuses attention without softmax: RoPE, q q^T, the matmul with values that all heads share, and the layer norm after it. Heads are read once, forward and backward."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[8, 3 * 8], Init::Normal { std: 0.5 });
        let x = r.feed("x", &[2, 17, 8], DType::F32);
        let xs = x.matmul(w).relu().reshape(&[2, 17, 3, 8]);
        let q = xs.rope(Pairs::Adjacent, r.rope_tables(17, 8, 100.0)).permute(&[0, 2, 1, 3]);
        let attended = q.matmul(q.t()).matmul(x.reshape(&[2, 1, 17, 8]));
        let y = attended.permute(&HEADS).layer_norm(1e-3);
        let loss = (y.permute(&[1, 2, 0, 3]) * xs).square().mean();
        r.output("loss", loss);
        r.output("dw", r.grad(loss, &[w])[0]);
    }
}

impl Pass for LinearAttentionPass {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let uses = Uses::new(g);
        let mut moved: HashSet<Value> = HashSet::new(); // results with their heads moved inside
        g.rewrite(|w, i, node, inputs| {
            let site = match (site(w.old, &uses, i), node.op::<Permute>()) {
                (Some(Ok(site)), _) => site,
                (Some(Err(reason)), _) => {
                    receipt.decline(reason, &node.scope);
                    return Ok(None);
                }
                // Which may undo the one below.
                (_, Some(p)) if moved.contains(&inputs[0].value()) => return Ok(Some(vec![inputs[0].permute(&p.0)])),
                _ => return Ok(None),
            };
            receipt.applied += 1;
            let r = &node.outputs[0].shape;
            let v = w.at(site.v).reshape(&[r[0], r[2], r[3]]);
            let eps = site.norm.as_ref().map(|n| n.eps);
            let y = w.recorder.op(LinearAttention { eps }, &[w.at(site.xs), w.at(site.cos), w.at(site.sin), v]);
            let heads_inside = y[0].permute(&HEADS);
            moved.insert(heads_inside.value());
            if let Some(n) = site.norm {
                w.put(n.node, &[if n.heads_outside { y[0] } else { heads_inside }, y[1]]);
            }
            Ok::<_, Error>(Some(vec![heads_inside]))
        })?;
        if receipt.applied > 0 {
            super::dead_code::sweep(g);
        }
        Ok(())
    }
}

/// The permutation between [batch, heads, ..] and [heads, batch, ..].
const HEADS: [usize; 4] = [1, 0, 2, 3];

struct Site {
    xs: Value,
    cos: Value,
    sin: Value,
    v: Value,
    norm: Option<Norm>,
}

struct Norm {
    node: usize,
    eps: f32,
    /// Its input is [heads, batch, ..].
    heads_outside: bool,
}

/// Node `i` as the matmul of scores and values; or why it is not fused.
fn site(g: &Graph, uses: &Uses, i: usize) -> Option<Result<Site, &'static str>> {
    let product = |node: usize| g.nodes[node].op::<Matmul>().filter(|&m| *m == Matmul::default()).map(|_| &g.nodes[node].inputs);
    let permuted =
        |v: Value, order: [usize; 4]| g.nodes[v.node].op::<Permute>().filter(|p| p.0 == order).map(|_| g.nodes[v.node].inputs[0]);
    let &[s, v] = &product(i)?[..] else { return None };
    let &[q, transposed] = &product(s.node)?[..] else { return None };
    let rotated = permuted(q, [0, 2, 1, 3]).filter(|_| permuted(transposed, [0, 1, 3, 2]) == Some(q))?;
    let rope = g.nodes[rotated.node].op::<Rope>().filter(|r| !r.inverse)?;
    let &[xs, cos, sin] = &g.nodes[rotated.node].inputs[..] else { return None };
    // Whether only these nodes read a value.
    let only = |v: Value, by: &[usize]| !uses.is_root(v.node) && uses.readers(v.node, 0..g.nodes.len()).all(|r| by.contains(&r));
    let reason = if crate::mutant!("linear-attention-of-other-pairs", rope.pairs != Pairs::Adjacent, false) {
        "RoPE rotates pairs of elements that are not adjacent"
    } else if g.meta(cos).rank() != 2 || g.meta(cos).rows() != g.meta(xs).shape[1] {
        "each sequence has a RoPE table of its own"
    } else if g.meta(v).rank() != 4 || g.meta(v).shape[1] != 1 {
        "each head has values of its own"
    } else if g.meta(v).shape[0] != g.meta(xs).shape[0] {
        "all sequences share the same values"
    } else if g.meta(xs).dtype != g.meta(v).dtype {
        "heads and values have different types"
    } else if !only(rotated, &[q.node]) || !only(q, &[transposed.node, s.node]) || !only(transposed, &[s.node]) || !only(s, &[i]) {
        "the rotated heads or their scores are read elsewhere"
    } else {
        return Some(Ok(Site { xs, cos, sin, v, norm: norm(g, uses, i) }));
    };
    Some(Err(reason))
}

/// The layer norm of node `i`, with or without a permutation in between, if it is the only reader.
fn norm(g: &Graph, uses: &Uses, i: usize) -> Option<Norm> {
    let next = uses.only_reader(i)?;
    let heads_outside = g.nodes[next].op::<Permute>().is_some_and(|p| p.0 == HEADS);
    let node = if heads_outside { uses.only_reader(next)? } else { next };
    g.nodes[node].op::<LayerNorm>().map(|n| Norm { node, eps: n.eps, heads_outside })
}
