//! Which values of the forward pass are made again.

use super::{forward, wanted};
use crate::graph::{Graph, Kind, Value};
use crate::ops::norm::RmsNorm;
use crate::ops::norm::add::AddRmsNorm;
use crate::ops::pointwise::Pointwise;
use crate::plan::view_roots;
use std::collections::{HashMap, HashSet};

/// What is so many times smaller than the result counts for nothing.
const LITTLE: usize = 32;

/// Everything inside a block of the model whose value does not leave it.
pub fn inside_blocks(g: &Graph) -> HashSet<Value> {
    let mut leaves = vec![false; g.nodes.len()];
    for n in g.nodes.iter().filter(|n| !n.backward) {
        for v in &n.inputs {
            leaves[v.node] |= g.nodes[v.node].block != n.block;
        }
    }
    for v in g.roots() {
        leaves[v.node] = true;
    }
    // What a view that leaves shows.
    for i in (0..g.nodes.len()).rev().filter(|&i| g.nodes[i].is_view()) {
        leaves[g.nodes[i].inputs[0].node] |= leaves[i];
    }
    let inside = |i: &usize| {
        let n = &g.nodes[*i];
        matches!(n.kind, Kind::Op(_)) && !n.is_view() && !n.backward && !leaves[*i] && n.block != 0
    };
    (0..g.nodes.len()).filter(inside).flat_map(|node| (0..g.nodes[node].outputs.len()).map(move |out| Value { node, out })).collect()
}

/// Forward arithmetic that a backward node can do on the side: one that reads all of its inputs. The pass `fuse-pointwise` joins the two.
pub fn siblings(g: &Graph) -> HashSet<Value> {
    let choice = Choice::new(g);
    let arithmetic = |v: &Value| g.nodes[v.node].op::<Pointwise>().is_some();
    let aside = |&v: &Value| choice.price(v).filter(|(cost, values)| cost.1 <= cost.0 && values.iter().all(arithmetic));
    choice.wanted.keys().filter(|v| choice.possible(**v)).filter_map(aside).flat_map(|(_, values)| values).collect()
}

/// What moves at most `price` bytes for each byte that need not be kept, the cheapest first, until at most `spare` bytes are left that could
/// be chosen, too; and how many of both.
pub fn by_price(g: &Graph, price: usize, spare: usize) -> (HashSet<Value>, (usize, usize)) {
    let all = cheapest(g, price, usize::MAX);
    if spare == 0 { all } else { cheapest(g, price, all.1.0.saturating_sub(spare)) }
}

/// The same, until `enough` bytes need not be kept.
fn cheapest(g: &Graph, price: usize, enough: usize) -> (HashSet<Value>, (usize, usize)) {
    let mut choice = Choice::new(g);
    // What belongs to no block is read by many, and would live on once made again.
    let mut all: Vec<Value> = choice.wanted.keys().copied().filter(|&v| choice.possible(v) && g.nodes[v.node].block != 0).collect();
    all.sort();
    let ratio = |(saved, moved): (usize, usize)| moved as f64 / saved as f64;
    let mut ranked: Vec<(f64, Value)> = all.iter().filter_map(|&v| Some((ratio(choice.price(v)?.0), v))).collect();
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut total = (0, 0);
    for (_, v) in ranked {
        if total.0 >= enough {
            break;
        }
        // Others may have been chosen meanwhile, from which this would be made.
        if let Some((cost, values)) = choice.price(v)
            && ratio(cost) <= price as f64
        {
            choice.take(&values);
            total = (total.0 + cost.0, total.1 + cost.1);
        }
    }
    (choice.again, total)
}

struct Choice<'a> {
    g: &'a Graph,
    roots: Vec<Option<Value>>,
    results: HashSet<Value>,
    /// By backward nodes.
    wanted: HashMap<Value, Vec<usize>>,
    readers: Vec<Vec<usize>>,
    forward: usize,
    again: HashSet<Value>,
    /// Read when something is made again.
    needed: HashSet<Value>,
}

impl<'a> Choice<'a> {
    fn new(g: &'a Graph) -> Choice<'a> {
        let roots = view_roots(g);
        let results = g.roots().map(|v| roots[v.node].unwrap_or(v)).collect();
        let (readers, forward) = (g.readers(), forward(g));
        Choice { g, roots, results, wanted: wanted(g), readers, forward, again: HashSet::new(), needed: HashSet::new() }
    }

    /// Whether a value may be made again: cheaply, and without being there at the end anyway.
    fn possible(&self, v: Value) -> bool {
        let n = &self.g.nodes[v.node];
        let Kind::Op(op) = &n.kind else { return false };
        let cheap = !op.is_view() && op.cost(&self.g.inputs(v.node)).memory_bound && !n.is_cast();
        // The sum that a norm has added is made again by no other.
        let own = n.op::<AddRmsNorm>().is_none() || (v.out == 0 && self.gradient(v).is_some());
        cheap && own && !n.backward && !self.results.contains(&v)
    }

    /// What a value is made from again, seen through views: for a norm, what its gradient has read already.
    fn sources(&self, v: Value) -> Vec<Value> {
        let inputs = if self.gradient(v).is_some() { &[] } else { &self.g.nodes[v.node].inputs[..] };
        inputs.iter().map(|&v| self.roots[v.node].unwrap_or(v)).collect()
    }

    /// A backward node of arithmetic that reads all that this arithmetic does.
    fn beside(&self, v: Value) -> Option<usize> {
        super::side::beside(self.g, &self.readers, self.forward, v).next()
    }

    /// The gradient of the norm whose result this is, which can give it too.
    fn gradient(&self, v: Value) -> Option<usize> {
        super::side::gradient(self.g, &self.readers, v).next()
    }

    fn kept(&self, v: Value) -> bool {
        let there = self.g.nodes[v.node].is_source() || self.results.contains(&v);
        there || ((self.wanted.contains_key(&v) || self.needed.contains(&v)) && !self.again.contains(&v))
    }

    /// (Bytes that need not be kept, bytes moved) for making a value again, and with it what it is made from and nobody keeps. None where
    /// that saves nothing.
    fn price(&self, v: Value) -> Option<((usize, usize), Vec<Value>)> {
        let (mut values, mut left, mut moved, mut more) = (vec![], vec![v], 0, HashSet::new());
        while let Some(w) = left.pop() {
            values.push(w);
            let bytes = self.g.meta(w).bytes();
            let arithmetic = self.g.nodes[w.node].op::<Pointwise>().is_some();
            let aside = self.beside(w).is_some();
            for input in self.sources(w) {
                let chosen = values.contains(&input) || left.contains(&input) || self.again.contains(&input);
                let through = !chosen && !self.kept(input) && self.possible(input);
                if through {
                    left.push(input);
                } else if !chosen && !self.kept(input) {
                    more.insert(input);
                }
                // Arithmetic that is made from arithmetic fuses with it.
                let fused = arithmetic && through && self.g.nodes[input.node].op::<Pointwise>().is_some();
                let read = self.g.meta(input).bytes();
                let little = read * LITTLE <= bytes;
                moved += if aside || fused || little { 0 } else { read };
            }
            let fused = arithmetic && w != v;
            moved += if fused { 0 } else { bytes };
        }
        let bytes = |v: &Value| self.g.meta(*v).bytes();
        let freed: usize = values.iter().filter(|w| self.kept(**w)).map(bytes).sum();
        let saved = freed.checked_sub(more.iter().map(bytes).sum())?;
        (saved > 0).then_some(((saved, moved), values))
    }

    fn take(&mut self, values: &[Value]) {
        for &v in values {
            self.needed.extend(self.sources(v));
            self.again.insert(v);
        }
    }
}

/// A norm's op, with or without a sum in front of it.
pub fn is_norm(g: &Graph, v: Value) -> bool {
    let n = &g.nodes[v.node];
    v.out == 0 && (n.op::<RmsNorm>().is_some() || n.op::<AddRmsNorm>().is_some_and(|op| op.sum))
}
