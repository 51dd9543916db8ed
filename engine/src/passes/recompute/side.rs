//! Forward values that a backward kernel recomputes beside its own results, because it reads their inputs anyway.

use super::choose::is_norm;
use super::{Late, wanted};
use crate::graph::{Graph, Kind, Value};
use crate::ops::norm::add::AddRmsNormGrad;
use crate::ops::norm::{RmsNorm, RmsNormGrad};
use crate::ops::pointwise::Pointwise;
use crate::plan::view_roots;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Nodes that are moved may keep at most 1 / SHARE of the saved bytes alive for longer.
const SHARE: usize = 4;

/// Backward pointwise nodes of v's shape that read all inputs of the pointwise op that computes `v`.
pub fn beside<'a>(g: &'a Graph, readers: &'a [Vec<usize>], late: &'a Late, v: Value) -> impl Iterator<Item = usize> + 'a {
    let n = &g.nodes[v.node];
    let arithmetic = n.op::<Pointwise>().is_some() && !n.is_cast();
    // Search only the readers of the input with the fewest readers.
    let least = n.inputs.iter().map(|v| &readers[v.node]).min_by_key(|r| r.len()).filter(|_| arithmetic);
    let reads_all = move |&m: &usize| {
        let other = &g.nodes[m];
        other.backward
            && late.reads(m, v)
            && other.op::<Pointwise>().is_some()
            && other.outputs[0].shape == n.outputs[0].shape
            && n.inputs.iter().all(|w| other.inputs.contains(w))
    };
    least.into_iter().flatten().copied().filter(reads_all)
}

/// Backward nodes of the norm that computes `v`: they read the norm's input, and can recompute `v`.
pub fn gradient<'a>(g: &'a Graph, readers: &'a [Vec<usize>], v: Value) -> impl Iterator<Item = usize> + 'a {
    let rstd = Value { node: v.node, out: 1 };
    let normed = if g.nodes[v.node].op::<RmsNorm>().is_some() { g.nodes[v.node].inputs[0] } else { Value { node: v.node, out: 2 } };
    let of_it = move |&m: &usize| {
        let n = &g.nodes[m];
        let weight = |at: usize| n.inputs.get(at) == g.nodes[v.node].inputs.last();
        match (n.op::<RmsNormGrad>(), n.op::<AddRmsNormGrad>()) {
            (Some(op), _) => !op.y && n.inputs[..2] == [normed, rstd] && (weight(3) || n.inputs.len() == 3 + op.add as usize),
            (_, Some(op)) => op.sum && !op.y && n.inputs[0] == normed && n.inputs[2] == rstd && weight(4),
            _ => false,
        }
    };
    let all = if is_norm(g, v) { &readers[v.node][..] } else { &[] };
    all.iter().copied().filter(of_it)
}

/// Moves the readers of recomputed values after the nodes that can recompute them, and lets backward nodes of norms output the norm's result:
/// value -> that output.
pub fn arrange(g: &mut Graph, again: &mut HashSet<Value>) -> HashMap<Value, Value> {
    let mut order = Order::new(g, again);
    let mut given: HashMap<Value, Value> = HashMap::new();
    let mut left: Vec<Value> = again.iter().copied().collect();
    left.sort();
    while let Some(v) = left.pop() {
        let norm = is_norm(g, v);
        // Fused pointwise ops run at the earliest position where the backward node could.
        let begin = |m: usize| g.nodes[m].inputs.iter().map(|v| v.node).max_by_key(|&n| order.place[n]).unwrap_or(m);
        let by = match norm {
            true => gradient(g, &order.readers, v).min_by_key(|&m| order.place[m]),
            false => beside(g, &order.readers, &order.late, v).min_by_key(|&m| order.place[m]).map(begin),
        };
        match by.filter(|&m| order.put_behind(g, m, &order.users(again, v), g.meta(v).bytes() / SHARE)) {
            Some(m) if norm => drop(given.insert(v, give(g, m, v))),
            Some(_) => {}
            // The result of a fused add and norm cannot be recomputed otherwise: it is kept.
            None if norm && g.nodes[v.node].op::<RmsNorm>().is_none() => drop(again.remove(&v)),
            None => {}
        }
    }
    g.reorder(&order.nodes);
    let at = |v: Value| Value { node: order.place[v.node], ..v };
    *again = again.iter().map(|&v| at(v)).collect();
    given.into_iter().map(|(v, by)| (at(v), at(by))).collect()
}

/// The order in which nodes will run. The graph itself is reordered once, at the end, so that indices into it stay valid; a move costs as
/// much as there are nodes between the two positions.
struct Order {
    /// Position -> node, and node -> position.
    nodes: Vec<usize>,
    place: Vec<usize>,
    readers: Vec<Vec<usize>>,
    late: Late,
    roots: Vec<Option<Value>>,
    wanted: HashMap<Value, Vec<usize>>,
    /// Value -> recomputed values that read it.
    makes: HashMap<Value, Vec<Value>>,
    /// Value -> the nodes that read it, looking through views.
    read_by: HashMap<Value, Vec<usize>>,
}

impl Order {
    fn new(g: &Graph, again: &HashSet<Value>) -> Order {
        let roots = view_roots(g);
        let root = |v: &Value| roots[v.node].unwrap_or(*v);
        let mut makes: HashMap<Value, Vec<Value>> = HashMap::new();
        for &w in again {
            g.nodes[w.node].inputs.iter().for_each(|v| makes.entry(root(v)).or_default().push(w));
        }
        let mut read_by: HashMap<Value, Vec<usize>> = HashMap::new();
        for (i, node) in g.nodes.iter().enumerate().filter(|(_, n)| !n.is_view()) {
            node.inputs.iter().for_each(|v| read_by.entry(root(v)).or_default().push(i));
        }
        let all: Vec<usize> = (0..g.nodes.len()).collect();
        Order { nodes: all.clone(), place: all, readers: g.readers(), late: Late::new(g), wanted: wanted(g), roots, makes, read_by }
    }

    /// Backward nodes that read `v`, or a value that is recomputed from it.
    fn users(&self, again: &HashSet<Value>, v: Value) -> Vec<usize> {
        let (mut left, mut seen, mut users) = (vec![v], HashSet::from([v]), vec![]);
        while let Some(v) = left.pop() {
            users.extend(self.wanted.get(&v).into_iter().flatten());
            let made = self.makes.get(&v).into_iter().flatten();
            left.extend(made.filter(|w| again.contains(w) && seen.insert(**w)));
        }
        users
    }

    /// Moves `users`, and what depends on them, to right after node `m`. False if `m` depends on them, or if more than `most` bytes would stay
    /// alive for longer.
    fn put_behind(&mut self, g: &Graph, m: usize, users: &[usize], most: usize) -> bool {
        let end = self.place[m];
        let mut late: HashSet<usize> = users.iter().copied().filter(|&u| self.place[u] < end).collect();
        let Some(start) = late.iter().map(|&u| self.place[u]).min() else { return true };
        for &i in &self.nodes[start..=end] {
            if g.nodes[i].inputs.iter().any(|v| late.contains(&v.node)) {
                late.insert(i);
            }
        }
        if late.contains(&m) {
            return false;
        }
        let read = |i: &usize| g.nodes[*i].inputs.iter().map(|v| self.roots[v.node].unwrap_or(*v));
        let later = |v: &Value| self.read_by.get(v).into_iter().flatten().any(|&r| self.place[r] >= end);
        let held = late.iter().flat_map(read).filter(|v| g.nodes[v.node].backward && !late.contains(&v.node) && !later(v));
        let held: HashSet<Value> = held.collect();
        if held.iter().map(|v| g.meta(*v).bytes()).sum::<usize>() > most {
            return false;
        }
        let (moved, stay): (Vec<usize>, Vec<usize>) = self.nodes[start..=end].iter().partition(|i| late.contains(i));
        for (k, i) in stay.into_iter().chain(moved).enumerate() {
            self.nodes[start + k] = i;
            self.place[i] = start + k;
        }
        true
    }
}

/// Lets the backward node `m` of a norm output the norm's result `v`, too.
fn give(g: &mut Graph, m: usize, v: Value) -> Value {
    let meta = g.meta(v).clone();
    let node = &mut g.nodes[m];
    let kind = match (node.op::<RmsNormGrad>(), node.op::<AddRmsNormGrad>()) {
        (Some(op), _) => Kind::Op(Arc::new(RmsNormGrad { y: true, ..op.clone() })),
        (_, Some(op)) => Kind::Op(Arc::new(AddRmsNormGrad { y: true, ..op.clone() })),
        _ => unreachable!("the gradient of a norm"),
    };
    node.kind = kind;
    node.outputs.push(meta);
    Value { node: m, out: g.nodes[m].outputs.len() - 1 }
}
