//! Moves gradients of auxiliary losses into the forward pass, to where their inputs are computed.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Value};
use crate::meta::DType;
use crate::plan::view_roots;
use crate::record::Recorder;

pub struct Hoist;

/// A hoisted result that the backward pass reads later may take at most 1 / SHARE of the bytes that it was computed from.
const SHARE: usize = 4;

impl Switch for Hoist {
    fn name(&self) -> &'static str {
        "hoist"
    }

    fn about(&self) -> &'static str {
        "Computes gradients of auxiliary losses (routers, extra heads) during the forward pass, so that their activations need not be kept until the backward pass."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered // gradients of one value are summed in the order of their nodes
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[8, 8], Init::Normal { std: 0.4 });
        let router = r.param("router", &[8, 1], Init::Normal { std: 0.4 });
        let mut h = r.feed("x", &[300, 8], DType::F32);
        let mut loss = r.zeros(&[1]);
        for _ in 0..3 {
            h = h + h.silu().matmul(w);
            loss = loss + h.stop_gradient().matmul(router).bce_with_logits(r.full(&[1, 1], 1.0)).mean();
        }
        let loss = loss + h.square().mean();
        r.output("loss", loss);
        for (name, g) in ["dw", "drouter"].iter().zip(r.grad(loss, &[w, router])) {
            r.output(name, g);
        }
    }
}

impl Pass for Hoist {
    fn stage(&self) -> Stage {
        Stage::Scheduled
    }

    fn after(&self) -> &'static [&'static str] {
        &["autodiff", "dead-code"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        super::layout::sources_first(g);
        let Some(first) = g.nodes.iter().position(|n| n.backward) else { return Ok(()) };
        let last = first - 1; // where the forward pass ends
        // The position after which each backward node could run.
        let mut ready: Vec<usize> = (0..g.nodes.len()).collect();
        for (i, node) in g.nodes.iter().enumerate().filter(|(_, n)| n.backward) {
            ready[i] = node.inputs.iter().map(|v| ready[v.node]).max().unwrap_or(0);
        }
        let mut early: Vec<bool> = (0..g.nodes.len()).map(|i| g.nodes[i].backward && ready[i] < last).collect();
        let roots = view_roots(g);
        let readers = g.readers();
        let is_root = g.root_nodes();
        // From the end: a result that later nodes read must be small beside what it was computed from.
        for i in (0..g.nodes.len()).rev().filter(|&i| g.nodes[i].backward) {
            if !early[i] || g.nodes[i].is_view() && readers[i].iter().any(|&r| early[r]) {
                continue;
            }
            let waits = is_root[i] || readers[i].iter().any(|&r| !early[r]);
            let made: usize = g.nodes[i].outputs.iter().map(|m| m.bytes()).sum();
            let from = |v: &Value| g.meta(roots[v.node].unwrap_or(*v)).bytes();
            let read: usize = g.nodes[i].inputs.iter().filter(|v| !g.nodes[roots[v.node].unwrap_or(**v).node].is_source()).map(from).sum();
            let is_small = crate::mutant!("hoist-keeps-what-is-large", made * SHARE <= read, true);
            early[i] = !waits || (!g.nodes[i].is_view() && is_small);
        }
        // A hoisted node's inputs must be hoisted too, or belong to the forward pass.
        for i in 0..g.nodes.len() {
            let ready = g.nodes[i].inputs.iter().all(|v| !g.nodes[v.node].backward || early[v.node]);
            early[i] = early[i] && crate::mutant!("hoist-before-its-inputs", ready, true);
        }
        receipt.applied = (0..g.nodes.len()).filter(|&i| early[i] && !g.nodes[i].is_view()).count();
        let mut order: Vec<usize> = (0..g.nodes.len()).collect();
        order.sort_by_key(|&i| if early[i] { (ready[i], 1, i) } else { (i, 0, i) });
        g.reorder(&order);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::Switches;
    use crate::program::Compiled;

    /// A head of 64 x 64 beside the model, of so many rows: how many nodes are moved, and whether its weight gradient is made before the model's last layer.
    fn head(rows: usize) -> (usize, bool) {
        let r = Recorder::new();
        let [w, head] = ["w", "head"].map(|name| r.param(name, &[64, 64], Init::Normal { std: 0.2 }));
        let x = r.feed("x", &[rows, 64], DType::F32);
        let h = x + x.silu().matmul(w);
        let beside = h.stop_gradient().matmul(head).square().mean();
        let loss = (h + h.silu().matmul(w)).square().mean() + beside;
        r.output("loss", loss);
        for (name, g) in ["dw", "dhead"].iter().zip(r.grad(loss, &[w, head])) {
            r.output(name, g);
        }
        let c = Compiled::new(r.finish(), &Switches::default(), Target::Cpu).unwrap();
        let (g, receipt) = (&c.graph, c.receipts.iter().find(|r| r.pass == "hoist").unwrap());
        let node_of = |name: &str| g.outputs.iter().find(|o| o.0 == name).unwrap().1.node;
        let end = g.nodes.iter().rposition(|n| !n.backward && n.name() == "matmul").unwrap();
        assert!(node_of("dw") > end, "the model's own gradients come after its last layer");
        (receipt.applied, node_of("dhead") < end)
    }

    /// A gradient that waits for the optimizer must not take more than what it replaces.
    #[test]
    fn a_gradient_moves_into_the_forward_pass_where_it_is_small() {
        let (moved, is_early) = head(4);
        assert!(moved == 0 && !is_early, "4 rows: {moved} nodes moved");
        let (moved, is_early) = head(512);
        assert!(moved >= 2 && is_early, "512 rows: {moved} nodes moved");
    }

    /// The gradient of the head is small enough to move, and the one that it is made of is not: the layers below need that later.
    #[test]
    fn a_gradient_does_not_move_before_what_it_is_made_of() {
        let r = Recorder::new();
        let [w, head] = ["w", "head"].map(|name| r.param(name, &[64, 64], Init::Normal { std: 0.2 }));
        let h = r.feed("x", &[512, 64], DType::F32).matmul(w).silu();
        let beside = h.matmul(head).square().mean();
        let loss = (h + h.silu().matmul(w).silu()).square().mean() + beside;
        r.output("loss", loss);
        for (name, g) in ["dw", "dhead"].iter().zip(r.grad(loss, &[w, head])) {
            r.output(name, g);
        }
        // By itself: a pass behind it may bring nodes into an order again.
        let off = |s: Switches, pass: &str| s.with(pass, "off").unwrap();
        let switches = ["hoist", "fuse-pointwise", "recompute"].into_iter().fold(Switches::default(), off);
        let mut g = Compiled::new(r.finish(), &switches, Target::Cpu).unwrap().graph;
        let receipt = Switches::default().apply(&Hoist, Target::Cpu, |settings, receipt| Hoist.apply(&mut g, settings, receipt)).unwrap();
        for (i, node) in g.nodes.iter().enumerate() {
            assert!(node.inputs.iter().all(|v| v.node < i), "node {i} ({}) reads {:?}", node.name(), node.inputs);
        }
        assert!(receipt.applied > 0, "nothing moved");
    }
}
