//! Exchanges gradients while the backward pass goes on.

use super::{Numerics, OnRanks, Pass, Receipt, Setting, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node};
use crate::meta::DType;
use crate::ops::collective::{AllReduce, ReduceScatter};
use crate::plan::view_roots;
use crate::ranks::Group;
use crate::record::Recorder;
use std::collections::{HashMap, HashSet};

pub struct OverlapGradients;

impl Switch for OverlapGradients {
    fn name(&self) -> &'static str {
        "overlap-gradients"
    }

    fn about(&self) -> &'static str {
        "Adds up gradients over the ranks in buckets, each as soon as its last gradient is computed. A GPU does that on a stream of its own, with a communicator of its own, while the backward pass goes on. Nothing to do with one rank."
    }

    /// How NCCL cuts what it adds up depends on how much is added up at once, and with it the order of the terms of three ranks or more.
    fn numerics(&self, target: Target, _: DType) -> Numerics {
        if target == Target::Cpu { Numerics::Exact } else { Numerics::Reordered }
    }

    fn settings(&self) -> &'static [Setting] {
        &[
            Setting { name: "bucket", default: "25", about: "MiB of gradients that are exchanged at once; 0: each alone" },
            Setting { name: "stream", default: "own", about: "own: beside other work; same: in turn with it" },
        ]
    }

    fn variants(&self) -> &'static [&'static str] {
        &["auto", "auto,bucket=0", "auto,stream=same"]
    }

    fn on_ranks(&self) -> Option<OnRanks> {
        Some(OnRanks { ranks: [2, 1], with: &[] })
    }

    fn example(&self, r: &Recorder) {
        let x = r.feed("x", &[8, 4], DType::F32);
        let weights: Vec<_> = (0..4).map(|i| r.param(&format!("w{i}"), &[4, 4], Init::Normal { std: 1.0 })).collect();
        let loss = weights.iter().fold(x, |x, &w| x.matmul(w).silu()).mean();
        let grads = r.grad(loss, &weights);
        r.output("loss", loss);
        grads.iter().enumerate().for_each(|(i, &g)| r.output(&format!("dw{i}"), g * 2.0));
    }
}

/// Which exchange a gradient takes part in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    AllReduce,
    ReduceScatter,
}

/// An exchange of one value, where a node is that.
fn exchange(node: &Node) -> Option<(Way, &Group)> {
    let sum = node.op::<AllReduce>().filter(|a| a.tensors == 1).map(|a| (Way::AllReduce, &a.group));
    sum.or_else(|| node.op::<ReduceScatter>().filter(|_| node.inputs.len() == 1).map(|s| (Way::ReduceScatter, &s.group)))
}

/// A gradient that is exchanged.
#[derive(Clone, Copy)]
struct Gradient {
    node: usize,
    way: Way,
    bytes: usize,
    /// The node that computes it, and the first that needs the result.
    ready: usize,
    until: usize,
}

/// Gradients that are exchanged at once, as soon as the last of them is computed.
struct Bucket {
    way: Way,
    nodes: Vec<usize>,
    bytes: usize,
    ready: usize,
    until: usize,
}

impl Pass for OverlapGradients {
    fn stage(&self) -> Stage {
        Stage::Lowered
    }

    fn after(&self) -> &'static [&'static str] {
        &["reduce-scatter", "recompute", "merged-wgrad", "fuse-pointwise"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let group = &settings.ranks.data;
        let own = settings.one_of("stream", &["own", "same"])? == "own";
        let most = settings.number_or_none("bucket")?.saturating_mul(1 << 20);
        if group.is_alone() {
            return Ok(());
        }
        let buckets = buckets(g, &gradients(g, group), most, own, receipt);
        if buckets.is_empty() {
            return Ok(());
        }
        receipt.applied = buckets.iter().map(|b| b.nodes.len()).sum();
        let bytes: usize = buckets.iter().map(|b| b.bytes).sum();
        receipt.notes.push(format!("{} exchanges, {:.1} MiB", buckets.len(), bytes as f64 / (1 << 20) as f64));
        let buckets = gather(g, buckets);
        let first: HashMap<usize, &Bucket> = buckets.iter().map(|b| (b.nodes[0], b)).collect();
        g.rewrite(|w, i, node, _| {
            let (Some(bucket), Some((_, group))) = (first.get(&i), exchange(node)) else { return Ok::<_, Error>(None) };
            let group = if own { group.aside() } else { group.clone() };
            let x: Vec<_> = bucket.nodes.iter().map(|&n| w.at(w.old.nodes[n].inputs[0])).collect();
            let y = match bucket.way {
                Way::AllReduce => w.recorder.op(AllReduce { group, tensors: x.len() }, &x),
                Way::ReduceScatter => w.recorder.op(ReduceScatter { group }, &x),
            };
            bucket.nodes.iter().zip(&y).skip(1).for_each(|(&n, y)| w.put(n, &[*y]));
            Ok(Some(vec![y[0]]))
        })
    }
}

/// What the backward pass computes and the ranks add up, in the order in which it is computed.
fn gradients(g: &Graph, group: &Group) -> Vec<Gradient> {
    let roots = view_roots(g);
    let mut first = vec![g.nodes.len(); g.nodes.len()];
    for (i, node) in g.nodes.iter().enumerate().rev().filter(|(_, n)| !n.is_view()) {
        node.inputs.iter().for_each(|v| first[roots[v.node].unwrap_or(*v).node] = i);
    }
    let mut found = vec![];
    for (i, node) in g.nodes.iter().enumerate() {
        let Some((way, by)) = exchange(node) else { continue };
        let v = node.inputs[0];
        let ready = roots[v.node].unwrap_or(v).node;
        // What the backward pass computes, or has left in a state for each micro-batch.
        let is_gradient = g.nodes[ready].backward || matches!(g.nodes[ready].kind, Kind::State(_));
        if by.name == group.name && is_gradient {
            found.push(Gradient { node: i, way, bytes: g.meta(v).bytes(), ready, until: first[i] });
        }
    }
    found.sort_by_key(|f| (f.ready, f.node));
    found
}

/// Fills one bucket of each kind after the other.
fn buckets(g: &Graph, gradients: &[Gradient], most: usize, own: bool, receipt: &mut Receipt) -> Vec<Bucket> {
    // Of each position, how many nodes before it compute something.
    let computes = |n: &Node| !n.is_view() && !n.is_source() && exchange(n).is_none();
    let mut before = vec![0];
    g.nodes.iter().for_each(|n| before.push(before[before.len() - 1] + computes(n) as usize));
    let (mut full, mut open): (Vec<Bucket>, Vec<Bucket>) = (vec![], vec![]);
    for &Gradient { node, way, bytes, ready, until } in gradients {
        match open.iter_mut().find(|b| b.way == way) {
            Some(b) if b.bytes + bytes <= most && ready < b.until => {
                b.nodes.push(node);
                (b.bytes, b.ready, b.until) = (b.bytes + bytes, ready, b.until.min(until));
            }
            _ => {
                full.extend(open.extract_if(.., |b| b.way == way));
                open.push(Bucket { way, nodes: vec![node], bytes, ready, until });
            }
        }
    }
    full.append(&mut open);
    full.retain(|b| {
        let beside = own && before[b.until] > before[b.ready + 1];
        if b.nodes.len() == 1 && !beside {
            receipt.decline("its sum is needed at once, and there is no other to put beside it", &g.nodes[b.nodes[0]].scope);
        }
        b.nodes.len() > 1 || beside
    });
    full
}

/// Moves the nodes of every bucket behind the node that computes the last gradient of it. Gives the buckets with their new places.
fn gather(g: &mut Graph, mut buckets: Vec<Bucket>) -> Vec<Bucket> {
    let exchanged: HashSet<usize> = buckets.iter().flat_map(|b| b.nodes.iter().copied()).collect();
    let mut behind: HashMap<usize, Vec<usize>> = HashMap::new();
    buckets.iter().for_each(|b| behind.entry(b.ready).or_default().extend(&b.nodes));
    let mut order = Order { g, done: vec![false; g.nodes.len()], nodes: vec![] };
    for (i, node) in g.nodes.iter().enumerate() {
        // Views follow what they show, when somebody reads them.
        if !node.is_view() && !exchanged.contains(&i) {
            order.add(i);
            behind.get(&i).into_iter().flatten().for_each(|&n| order.add(n));
        }
    }
    (0..g.nodes.len()).for_each(|i| order.add(i));
    let order = order.nodes;
    let mut place = vec![0; order.len()];
    order.iter().enumerate().for_each(|(new, &old)| place[old] = new);
    g.reorder(&order);
    buckets.iter_mut().for_each(|b| b.nodes.iter_mut().for_each(|n| *n = place[*n]));
    buckets
}

/// An order of nodes in the making.
struct Order<'a> {
    g: &'a Graph,
    done: Vec<bool>,
    nodes: Vec<usize>,
}

impl Order<'_> {
    /// A node, with the views that it needs before it.
    fn add(&mut self, i: usize) {
        if !std::mem::replace(&mut self.done[i], true) {
            self.g.nodes[i].inputs.iter().for_each(|v| self.add(v.node));
            self.nodes.push(i);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Value;
    use crate::ops::collective::aside::{is_aside, joins};
    use crate::passes::Switches;
    use crate::plan::{Home, last_reads};
    use crate::program::Compiled;
    use crate::ranks::Ranks;

    /// Six layers and an optimizer that reads all gradients at the end; `zero` with moments of which each rank has a part.
    fn compiled(passes: &[(&str, &str)]) -> Compiled {
        let r = Recorder::new();
        let x = r.feed("x", &[8, 32], DType::F32);
        let weights: Vec<_> = (0..6).map(|i| r.param(&format!("w{i}"), &[32, 32], Init::Normal { std: 1.0 })).collect();
        let loss = weights.iter().fold(x, |x, &w| x.matmul(w).silu()).square().mean();
        let grads = r.grad(loss, &weights);
        let one = r.full(&[1], 1.0);
        let mut inputs = vec![one, one / crate::ops::adamw::global_norm(&grads), one, one];
        let mut states = vec![];
        for (i, (w, g)) in weights.iter().zip(&grads).enumerate() {
            let [m, v] = ["m", "v"].map(|which| r.state(&format!("{which}{i}"), &[32, 32], DType::F32, Init::Full(0.0)));
            inputs.extend([*w, *g, m, v]);
            states.extend([*w, m, v]);
        }
        let op = crate::ops::adamw::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: vec![0.1; 6] };
        states.into_iter().zip(r.op(op, &inputs)).for_each(|(state, new)| r.update(state, new));
        r.output("loss", loss);
        let mut switches = Switches::default().on_ranks(Ranks::planned(2, 1));
        passes.iter().for_each(|(pass, value)| switches.set(pass, value).unwrap());
        Compiled::new(r.finish(), &switches, Target::Cpu).unwrap()
    }

    fn aside(g: &Graph) -> Vec<usize> {
        (0..g.nodes.len()).filter(|&i| is_aside(&g.nodes[i])).collect()
    }

    #[test]
    fn gradients_are_exchanged_in_buckets_before_the_backward_pass_ends() {
        let c = compiled(&[]);
        let g = &c.graph;
        // All of 24 KiB fit one bucket, whose place is that of the last gradient: the end.
        let [all] = aside(g)[..] else { panic!("{:?}", aside(g)) };
        assert_eq!(g.nodes[all].inputs.len(), 6);
        let c = compiled(&[("overlap-gradients", "auto,bucket=0")]);
        let g = &c.graph;
        let each = aside(g);
        assert_eq!(each.len(), 6, "{}", c.receipts.iter().find(|r| r.pass == "overlap-gradients").unwrap().summary());
        let ends = joins(g, &view_roots(g));
        let end = ends[&each[0]];
        let products = |range: std::ops::Range<usize>| range.filter(|&i| g.nodes[i].name().contains("matmul")).count();
        assert!(products(each[0]..each[1]) >= 1 && products(each[4]..end) >= 1, "{each:?} {end}");
        assert!(each.iter().all(|i| ends[i] == end && g.nodes[end].name() == "global_norm"));
        assert!(aside(&compiled(&[("overlap-gradients", "off")]).graph).is_empty());
        // As many MiB as have no number of bytes, which would wrap around to 0.
        assert_eq!(aside(&compiled(&[("overlap-gradients", "auto,bucket=17592186044416")]).graph).len(), 1);
        assert!(aside(&compiled(&[("overlap-gradients", "auto,stream=same")]).graph).is_empty());
    }

    /// Until somebody waits for an exchange, nothing else may lie in the memory that it reads or writes, nor overwrite it.
    #[test]
    fn what_is_being_exchanged_keeps_its_memory() {
        for zero in ["off", "require"] {
            let c = compiled(&[("overlap-gradients", "auto,bucket=0"), ("zero", zero)]);
            let (g, plan) = (&c.graph, &c.plan);
            let (roots, each) = (view_roots(g), aside(g));
            assert_eq!(each.iter().filter(|&&i| g.nodes[i].name() == "reduce_scatter").count(), if zero == "off" { 0 } else { each.len() });
            assert!(each.len() >= 5);
            plan.verify(g).unwrap();
            let last = last_reads(g, &roots);
            for (i, end) in joins(g, &roots) {
                let outputs = (0..g.nodes[i].outputs.len()).map(|out| Value { node: i, out });
                for v in g.nodes[i].inputs.iter().copied().chain(outputs) {
                    let buffer = &plan.buffers[plan.spots[v.node][v.out].buffer];
                    // An input that was copied before, or that is overwritten, is the output's buffer.
                    let copied = plan.copies.iter().any(|c| c.node == i && g.nodes[i].inputs[c.input] == v);
                    assert!(copied || matches!(buffer.home, Home::Arena(_)) && buffer.last >= end, "{v:?} until {end}: {buffer:?}");
                }
                if zero == "require" {
                    assert!(g.nodes[i].inputs.iter().all(|v| last[&roots[v.node].unwrap_or(*v)] >= end));
                }
            }
        }
    }
}
