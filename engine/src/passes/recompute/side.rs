//! What a backward node makes on the side, because it reads all that is needed for it.

use super::choose::is_norm;
use super::{forward, wanted};
use crate::graph::{Graph, Kind, Value};
use crate::ops::norm::add::AddRmsNormGrad;
use crate::ops::norm::{RmsNorm, RmsNormGrad};
use crate::ops::pointwise::Pointwise;
use crate::plan::view_roots;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Nodes that wait for another keep at most this share of what is saved alive for longer.
const SHARE: usize = 4;

/// A backward node of arithmetic that reads all that the forward arithmetic of `v` does, and has its shape.
pub fn beside(g: &Graph, readers: &[Vec<usize>], forward: usize, v: Value) -> Option<usize> {
    let n = &g.nodes[v.node];
    if n.op::<Pointwise>().is_none() || n.is_cast() || n.inputs.is_empty() {
        return None;
    }
    let reads_all = |&&m: &&usize| {
        let other = &g.nodes[m];
        other.backward
            && m > forward
            && other.op::<Pointwise>().is_some()
            && other.outputs[0].shape == n.outputs[0].shape
            && n.inputs.iter().all(|w| other.inputs.contains(w))
    };
    readers[n.inputs[0].node].iter().find(reads_all).copied()
}

/// The gradient of the norm whose result `v` is: it reads what was normed, and can give the result again.
pub fn gradient(g: &Graph, readers: &[Vec<usize>], v: Value) -> Option<usize> {
    if !is_norm(g, v) {
        return None;
    }
    let rstd = Value { node: v.node, out: 1 };
    let normed = if g.nodes[v.node].op::<RmsNorm>().is_some() { g.nodes[v.node].inputs[0] } else { Value { node: v.node, out: 2 } };
    let of_it = |&&m: &&usize| {
        let n = &g.nodes[m];
        let weight = |at: usize| n.inputs.get(at) == g.nodes[v.node].inputs.last();
        match (n.op::<RmsNormGrad>(), n.op::<AddRmsNormGrad>()) {
            (Some(op), _) => !op.y && n.inputs[..2] == [normed, rstd] && (weight(3) || n.inputs.len() == 3 + op.add as usize),
            (_, Some(op)) => op.sum && !op.y && n.inputs[0] == normed && n.inputs[2] == rstd && weight(4),
            _ => false,
        }
    };
    readers[v.node].iter().find(of_it).copied()
}

/// Moves what reads these values again behind the nodes that can make them on the side, and lets gradients of norms give what they normed:
/// value -> the gradient's output.
pub fn arrange(g: &mut Graph, again: &mut HashSet<Value>) -> HashMap<Value, Value> {
    let mut given: HashMap<Value, Value> = HashMap::new();
    let mut left: Vec<Value> = again.iter().copied().collect();
    left.sort();
    while let Some(v) = left.pop() {
        let (readers, forward) = (g.readers(), forward(g));
        let norm = is_norm(g, v);
        // Arithmetic is joined where the other could begin.
        let begin = |m: usize| g.nodes[m].inputs.iter().map(|v| v.node).max().unwrap_or(m);
        let by = if norm { gradient(g, &readers, v) } else { beside(g, &readers, forward, v).map(begin) };
        let moved = by.and_then(|m| behind(g, m, &users(g, again, v), g.meta(v).bytes() / SHARE));
        match moved {
            Some(Moved { order, node }) => {
                let place = places(&order);
                let at = |v: Value| Value { node: place[v.node], ..v };
                g.reorder(&order);
                *again = again.iter().map(|&v| at(v)).collect();
                left.iter_mut().for_each(|v| *v = at(*v));
                given = given.into_iter().map(|(v, by)| (at(v), at(by))).collect();
                if norm {
                    given.insert(at(v), give(g, node, at(v)));
                }
            }
            // A norm that adds first cannot be made again from what is kept.
            None if norm && g.nodes[v.node].op::<RmsNorm>().is_none() => {
                again.remove(&v);
            }
            None => {}
        }
    }
    given
}

/// Backward nodes that read `v`, or what is made again from it.
fn users(g: &Graph, again: &HashSet<Value>, v: Value) -> Vec<usize> {
    let (wanted, roots) = (wanted(g), view_roots(g));
    let (mut left, mut users) = (vec![v], vec![]);
    while let Some(v) = left.pop() {
        users.extend(wanted.get(&v).into_iter().flatten());
        let reads = |w: &&Value| g.nodes[w.node].inputs.iter().any(|x| roots[x.node].unwrap_or(*x) == v);
        left.extend(again.iter().filter(reads));
    }
    users
}

struct Moved {
    order: Vec<usize>,
    /// Where the node is now.
    node: usize,
}

/// The order in which `users`, and what depends on them, run right behind node `m`. None where it depends on them, or where they would keep
/// more than `most` bytes alive until then.
fn behind(g: &Graph, m: usize, users: &[usize], most: usize) -> Option<Moved> {
    let mut late = vec![false; g.nodes.len()];
    users.iter().filter(|&&u| u < m).for_each(|&u| late[u] = true);
    for i in 0..=m {
        late[i] = late[i] || g.nodes[i].inputs.iter().any(|v| late[v.node]);
    }
    if late[m] {
        return None;
    }
    let (roots, mut last) = (view_roots(g), HashMap::new());
    for (i, node) in g.nodes.iter().enumerate().filter(|(i, n)| !late[*i] && !n.is_view()) {
        node.inputs.iter().for_each(|v| {
            last.insert(roots[v.node].unwrap_or(*v), i);
        });
    }
    let held =
        |i: usize| g.nodes[i].inputs.iter().map(|v| roots[v.node].unwrap_or(*v)).filter(|v| g.nodes[v.node].backward && !late[v.node]);
    let held: HashSet<Value> = (0..m).filter(|&i| late[i]).flat_map(held).filter(|v| last.get(v).is_none_or(|&l| l < m)).collect();
    if held.iter().map(|v| g.meta(*v).bytes()).sum::<usize>() > most {
        return None;
    }
    let mut order: Vec<usize> = (0..g.nodes.len()).collect();
    order.sort_by_key(|&i| if late[i] { (m, 1, i) } else { (i, 0, i) });
    let node = order.iter().position(|&i| i == m).expect("every node is there");
    Some(Moved { order, node })
}

fn places(order: &[usize]) -> Vec<usize> {
    let mut place = vec![0; order.len()];
    order.iter().enumerate().for_each(|(new, &old)| place[old] = new);
    place
}

/// Makes the gradient `m` of a norm give the norm's result `v`, too.
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
