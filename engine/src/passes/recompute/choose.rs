//! Chooses which forward values are recomputed.

use super::layers::Layers;
use super::{Late, wanted};
use crate::graph::{Graph, Kind, Node, Value};
use crate::ops::norm::RmsNorm;
use crate::ops::norm::add::AddRmsNorm;
use crate::ops::pointwise::Pointwise;
use crate::plan::view_roots;
use std::collections::{HashMap, HashSet};

/// An input so many times smaller than the result counts as free to read.
const LITTLE: usize = 32;

/// Everything inside these blocks of the model whose value does not leave its block.
pub fn inside_blocks(g: &Graph, layers: &Layers) -> HashSet<Value> {
    let mut leaves: HashSet<Value> = g.roots().collect();
    for n in g.nodes.iter().filter(|n| !n.backward) {
        leaves.extend(n.inputs.iter().filter(|v| g.nodes[v.node].block != n.block));
    }
    // A view that leaves the block keeps what it is a view of.
    for i in (0..g.nodes.len()).rev().filter(|&i| g.nodes[i].is_view()) {
        if leaves.contains(&Value { node: i, out: 0 }) {
            leaves.insert(g.nodes[i].inputs[0]);
        }
    }
    let inside = |n: &Node| matches!(n.kind, Kind::Op(_)) && !n.is_view() && !n.backward && layers.has(n.block);
    let of = |(node, n): (usize, &Node)| (0..if inside(n) { n.outputs.len() } else { 0 }).map(move |out| Value { node, out });
    g.nodes.iter().enumerate().flat_map(of).filter(|v| !leaves.contains(v)).collect()
}

/// Forward pointwise ops that a backward pointwise op can recompute, since it reads all of their inputs. The pass `fuse-pointwise` fuses the two.
pub fn siblings(g: &Graph) -> HashSet<Value> {
    let choice = Choice::new(g);
    let arithmetic = |v: &Value| g.nodes[v.node].op::<Pointwise>().is_some();
    let aside = |&v: &Value| choice.price(v).filter(|(cost, values)| cost.1 <= cost.0 && values.iter().all(arithmetic));
    choice.wanted.keys().filter(|v| choice.possible(**v)).filter_map(aside).flat_map(|(_, values)| values).collect()
}

/// Values that cost at most `price` bytes of memory traffic for each byte saved, the cheapest first, leaving about `spare` bytes of the dearest
/// ones kept; and the bytes (saved, moved). Blocks that are recomputed as a whole (`but`) are passed over.
pub fn by_price(g: &Graph, price: usize, spare: usize, but: &Layers) -> (HashSet<Value>, (usize, usize)) {
    let all = cheapest(g, price, usize::MAX, but);
    if spare == 0 { all } else { cheapest(g, price, all.1.0.saturating_sub(spare), but) }
}

/// The same, until `enough` bytes are saved.
fn cheapest(g: &Graph, price: usize, enough: usize, but: &Layers) -> (HashSet<Value>, (usize, usize)) {
    let mut choice = Choice::new(g);
    // Values outside of all blocks have many readers, and would stay alive once recomputed.
    let in_block = |v: Value| g.nodes[v.node].block != 0 && !but.has(g.nodes[v.node].block);
    let mut all: Vec<Value> = choice.wanted.keys().copied().filter(|&v| choice.possible(v) && in_block(v)).collect();
    all.sort();
    let ratio = |(saved, moved): (usize, usize)| moved as f64 / saved as f64;
    let mut ranked: Vec<(f64, Value)> = all.iter().filter_map(|&v| Some((ratio(choice.price(v)?.0), v))).collect();
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut total = (0, 0);
    for (_, v) in ranked {
        if total.0 >= enough {
            break;
        }
        // Its inputs may have been chosen for recomputation in the meantime, which raises its cost.
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
    /// Forward values that backward nodes read.
    wanted: HashMap<Value, Vec<usize>>,
    readers: Vec<Vec<usize>>,
    late: Late,
    again: HashSet<Value>,
    /// Values that a recomputation reads.
    needed: HashSet<Value>,
}

impl<'a> Choice<'a> {
    fn new(g: &'a Graph) -> Choice<'a> {
        let roots = view_roots(g);
        let results = g.roots().map(|v| roots[v.node].unwrap_or(v)).collect();
        let (readers, late) = (g.readers(), Late::new(g));
        Choice { g, roots, results, wanted: wanted(g), readers, late, again: HashSet::new(), needed: HashSet::new() }
    }

    /// Whether a value may be recomputed: it is memory-bound, and not kept until the end anyway.
    fn possible(&self, v: Value) -> bool {
        let n = &self.g.nodes[v.node];
        let Kind::Op(op) = &n.kind else { return false };
        let cheap = !op.is_view() && op.cost(&self.g.inputs(v.node)).memory_bound && !n.is_cast();
        // Only the norm's gradient can recompute the result of a fused add and norm.
        let own = n.op::<AddRmsNorm>().is_none() || (v.out == 0 && self.gradient(v).is_some());
        cheap && own && !n.backward && !self.results.contains(&v)
    }

    /// What recomputing a value reads, looking through views: nothing, if the norm's gradient recomputes it.
    fn sources(&self, v: Value) -> Vec<Value> {
        let inputs = if self.gradient(v).is_some() { &[] } else { &self.g.nodes[v.node].inputs[..] };
        inputs.iter().map(|&v| self.roots[v.node].unwrap_or(v)).collect()
    }

    /// A backward pointwise node that reads all inputs of this pointwise value.
    fn beside(&self, v: Value) -> Option<usize> {
        super::side::beside(self.g, &self.readers, &self.late, v).next()
    }

    /// The backward node of the norm that computes this value, which can recompute it.
    fn gradient(&self, v: Value) -> Option<usize> {
        super::side::gradient(self.g, &self.readers, v).next()
    }

    fn kept(&self, v: Value) -> bool {
        let there = self.g.nodes[v.node].is_source() || self.results.contains(&v);
        there || ((self.wanted.contains_key(&v) || self.needed.contains(&v)) && !self.again.contains(&v))
    }

    /// (bytes saved, bytes moved) for recomputing a value, together with those of its inputs that are not kept; and all values that are
    /// recomputed then. None if that saves nothing.
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
                // Pointwise ops that are recomputed from pointwise ops fuse with them.
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

/// Whether this is the result of an RMS norm, with or without a fused addition.
pub fn is_norm(g: &Graph, v: Value) -> bool {
    let n = &g.nodes[v.node];
    v.out == 0 && (n.op::<RmsNorm>().is_some() || n.op::<AddRmsNorm>().is_some_and(|op| op.sum))
}
