//! Fuses additions into the norms that read them: x + y, then RMS norm; and the layer norms around a residual connection.

use super::pattern::Uses;
use super::{Numerics, Pass, Receipt, Setting, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Value};
use crate::meta::DType;
use crate::ops::matmul::Matmul;
use crate::ops::norm::add::{AddRmsNorm, is_row};
use crate::ops::norm::residual::ResidualNorm;
use crate::ops::norm::{LayerNorm, RmsNorm};
use crate::ops::pointwise::{Bin, Pointwise};
use crate::record::Recorder;
use std::sync::Arc;

pub struct FuseNorm;

impl Switch for FuseNorm {
    fn name(&self) -> &'static str {
        "fuse-norm"
    }

    fn about(&self) -> &'static str {
        "Fuses an addition into the RMS norm that reads it: the sum is stored only if something else reads it. Fuses layer_norm(layer_norm(x + layer_norm(branch))) into one kernel."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn settings(&self) -> &'static [Setting] {
        &[Setting {
            name: "blocks",
            default: "apart",
            about: "apart: an addition before a block is not fused into the block's first norm, so that recompute with what=blocks keeps one tensor, the sum; joined: it is fused",
        }]
    }

    fn variants(&self) -> &'static [&'static str] {
        &["auto", "auto,blocks=joined"]
    }

    fn example(&self, r: &Recorder) {
        let norm = |name: &str| r.param(name, &[24], Init::Normal { std: 1.0 });
        let row = r.param("row", &[2, 24], Init::Normal { std: 1.0 });
        let w = r.param("w", &[24, 24], Init::Normal { std: 0.3 });
        let x = r.feed("x", &[70, 24], DType::F32);
        let h = x + x.matmul(w);
        let y = (h.rms_norm(norm("a"), 1e-6) + row.slice(0, 1, 2)).rms_norm(norm("b"), 1e-6);
        let s = (x.matmul(w) + y.matmul(w).layer_norm(1e-5)).layer_norm(1e-5);
        let plain = (h + s).rms_norm_plain(1e-6);
        let entering = y.matmul(w) + h;
        let inside = r.block("inside", || entering.rms_norm(norm("c"), 1e-6).matmul(w) + entering);
        let loss = (y * h).mean() + (s * s.layer_norm(1e-5)).sum() + (plain * inside).sum();
        r.output("loss", loss);
        let grads = r.grad(loss, &[row, w, norm("a"), norm("b"), norm("c")]);
        grads.into_iter().enumerate().for_each(|(i, g)| r.output(&format!("g{i}"), g));
    }
}

impl Pass for FuseNorm {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn after(&self) -> &'static [&'static str] {
        &["linear-attention"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let apart = settings.one_of("blocks", &["apart", "joined"])? == "apart";
        let mut uses = Uses::new(g);
        for i in 0..g.nodes.len() {
            let Some((p, terms)) = added(g, i) else { continue };
            match sum_is_read(g, &uses, p, i, terms, apart) {
                Ok(sum) => {
                    join(g, &mut uses, i, terms, sum);
                    receipt.applied += 1;
                }
                Err(reason) => receipt.decline(reason, &g.nodes[i].scope),
            }
        }
        for i in 0..g.nodes.len() {
            let Some(m) = residual(g, i) else { continue };
            match m.refused(g, &uses, i) {
                None => {
                    m.join(g, &mut uses, i);
                    receipt.applied += 1;
                }
                Some(reason) => receipt.decline(reason, &g.nodes[i].scope),
            }
        }
        if receipt.applied > 0 {
            super::dead_code::sweep(g);
        }
        Ok(())
    }
}

/// If node `i` is an RMS norm of an addition: the addition's node and its two terms.
fn added(g: &Graph, i: usize) -> Option<(usize, [Value; 2])> {
    g.nodes[i].op::<RmsNorm>()?;
    let p = g.nodes[i].inputs[0].node;
    let terms = g.binary(p, Bin::Add)?;
    Some((p, terms))
}

/// Whether anything but the norm `i` reads the sum `p`, which must then still be written; or why the two cannot be fused.
fn sum_is_read(g: &Graph, uses: &Uses, p: usize, i: usize, terms: [Value; 2], apart: bool) -> Result<bool, &'static str> {
    let (sum, weightless) = (&g.nodes[p].outputs[0], g.nodes[i].inputs.len() == 1);
    let full = terms.map(|v| g.meta(v) == sum);
    let row = terms.map(|v| is_row(&g.meta(v).shape, sum.dim(0)));
    let read = uses.only_reader(p).is_none();
    if full == [true; 2] {
        // A pointwise term fuses with the addition, and would otherwise have to be written; except a sum that a GEMM's epilogue computes.
        let product = |v: Value| g.nodes[g.unshaped(v).node].op::<Matmul>().is_some();
        let summed = |v: Value| g.binary(v.node, Bin::Add).is_some_and(|terms| terms.into_iter().any(product));
        let readers = || uses.readers(p, 0..g.nodes.len());
        let fuses = |v: Value| g.nodes[v.node].op::<Pointwise>().is_some() && uses.all_by(v.node, p) && !summed(v);
        if crate::mutant!("fuse-norm-of-a-sum-read-before", readers().any(|n| n < i), false) {
            Err("the sum is read before its norm runs")
        } else if readers().any(|n| matches!(g.nodes[n].kind, Kind::Grad)) {
            Err("a gradient with respect to the sum is asked for")
        } else if apart && g.nodes[p].block != g.nodes[i].block {
            Err("recomputation keeps this sum, the input of a block (fuse-norm=auto,blocks=joined would fuse it)")
        } else if terms.into_iter().any(fuses) {
            Err("a term is a pointwise op, which fuses with the addition instead")
        } else if weightless && terms.into_iter().any(|v| g.nodes[v.node].op::<Matmul>().is_some()) {
            Err("a term is a matmul, whose epilogue adds the other")
        } else {
            // A norm without a weight needs the sum for its gradient; `dead-code` drops it in programs without gradients.
            Ok(read || weightless)
        }
    } else if weightless {
        Err("a term is broadcast or of another type")
    } else if (full[0] && row[1]) || (full[1] && row[0]) {
        if read { Err("the sum with a broadcast row is read elsewhere") } else { Ok(false) }
    } else {
        Err("a term is broadcast (and no single row) or of another type")
    }
}

/// Lets the norm add; other readers of the sum read the norm's output of it.
fn join(g: &mut Graph, uses: &mut Uses, i: usize, [a, b]: [Value; 2], sum: bool) {
    let old = g.nodes[i].inputs[0];
    let meta = g.meta(old).clone();
    let (a, b) = if g.meta(a).shape == meta.shape { (a, b) } else { (b, a) };
    let node = &mut g.nodes[i];
    let eps = node.op::<RmsNorm>().expect("a norm").eps;
    let inputs = [&[a, b], &node.inputs[1..]].concat();
    node.kind = Kind::Op(Arc::new(AddRmsNorm { eps, sum, room: 0 }));
    node.outputs.extend(sum.then_some(meta));
    uses.set_inputs(g, i, inputs);
    if sum {
        uses.redirect(g, old.node, |v| if v == old { Value { node: i, out: 2 } } else { v });
    }
}

/// norm(s), s = norm(x + norm(o)): the nodes of s, of the sum and of the branch's norm.
struct Residual {
    second: usize,
    sum: usize,
    branch: usize,
    x: Value,
    eps: f32,
}

fn residual(g: &Graph, i: usize) -> Option<Residual> {
    let norm = |v: Value| g.nodes[v.node].op::<LayerNorm>().filter(|_| v.out == 0).map(|n| (v.node, n.eps));
    let (_, eps) = norm(Value { node: i, out: 0 })?;
    let (second, e2) = norm(g.nodes[i].inputs[0])?;
    let sum = g.nodes[second].inputs[0].node;
    let [a, b] = g.binary(sum, Bin::Add)?;
    // If both terms are norms, the later one is the branch.
    let (x, (branch, e1)) = match (norm(a), norm(b)) {
        (Some(n), Some(m)) if n.0 > m.0 => (b, n),
        (_, Some(m)) => (a, m),
        (Some(n), None) => (b, n),
        (None, None) => return None,
    };
    crate::mutant!("fuse-norm-of-other-eps", e1 == eps && e2 == eps, true).then_some(Residual { second, sum, branch, x, eps })
}

impl Residual {
    fn refused(&self, g: &Graph, uses: &Uses, i: usize) -> Option<&'static str> {
        let alone = |node: usize, by: usize| uses.only_reader(node) == Some(by);
        if !alone(self.branch, self.sum) || !alone(self.sum, self.second) {
            Some("the branch's norm or the sum is read elsewhere too")
        } else if g.nodes[self.second].block != g.nodes[i].block {
            Some("the next norm is in another block")
        } else if g.meta(self.x) != &g.nodes[self.sum].outputs[0] || g.nodes[self.branch].outputs[0] != g.nodes[self.sum].outputs[0] {
            Some("a term is broadcast or of another type than the sum")
        } else {
            None
        }
    }

    fn join(&self, g: &mut Graph, uses: &mut Uses, i: usize) {
        let o = g.nodes[self.branch].inputs[0];
        let op = ResidualNorm { eps: self.eps };
        let metas = crate::op::Op::infer(&op, &[g.meta(self.x).clone(), g.meta(o).clone()]);
        let second = self.second;
        let node = &mut g.nodes[second];
        (node.outputs, node.kind) = (metas, Kind::Op(Arc::new(op)));
        uses.set_inputs(g, second, vec![self.x, o]);
        uses.redirect(g, second, |v| if v.out == 0 { Value { out: 1, ..v } } else { v });
        uses.redirect(g, i, |v| if v.out == 0 { Value { node: second, out: 2 } } else { v });
    }
}
