//! Exchanges that a GPU makes beside other work (see the pass `overlap-gradients`): until when their memory is theirs.

use super::{AllGather, AllReduce, ReduceScatter};
use crate::graph::{Graph, Kind, Node, Value};
use std::collections::{HashMap, HashSet};

/// Whether a node exchanges values while a GPU goes on with other work.
pub fn is_aside(node: &Node) -> bool {
    let sums = node.op::<AllReduce>().is_some_and(|o| o.group.aside) || node.op::<ReduceScatter>().is_some_and(|o| o.group.aside);
    sums || node.op::<AllGather>().is_some_and(|o| o.group.aside)
}

/// For every such node, the first that needs a result, and so waits for the exchange; the graph's end if none does. A reduce-scatter is waited for when the second one after
/// it begins, at the latest, so that no more than three whole gradients (or buckets of them) are held. `roots`: see [`view_roots`](crate::plan::view_roots).
pub fn joins(g: &Graph, roots: &[Option<Value>]) -> HashMap<usize, usize> {
    let mut first: HashMap<usize, usize> = (0..g.nodes.len()).filter(|&i| is_aside(&g.nodes[i])).map(|i| (i, g.nodes.len())).collect();
    for (i, node) in g.nodes.iter().enumerate().rev().filter(|(_, n)| !n.is_view()) {
        for v in &node.inputs {
            first.entry(roots[v.node].unwrap_or(*v).node).and_modify(|at| *at = i);
        }
    }
    let scatters = |i: &usize| g.nodes[*i].op::<ReduceScatter>().is_some_and(|o| o.group.aside);
    let scattered: Vec<usize> = (0..g.nodes.len()).filter(scatters).collect();
    for three in scattered.windows(3) {
        first.entry(three[0]).and_modify(|at| *at = three[2].min(*at));
    }
    first
}

/// What is exchanged beside other work is read until somebody waits for the exchange: moves its last reader (`last`) there. What is overwritten in place lives on
/// as the node's output.
pub fn hold(g: &Graph, roots: &[Option<Value>], last: &mut HashMap<Value, usize>) {
    for (i, end) in joins(g, roots) {
        let Kind::Op(op) = &g.nodes[i].kind else { unreachable!("an exchange is an op") };
        let reused = op.reuse();
        for (_, &v) in g.nodes[i].inputs.iter().enumerate().filter(|(k, _)| reused.iter().all(|r| r.0 != *k)) {
            let until = last.entry(roots[v.node].unwrap_or(v)).or_insert(end);
            *until = end.max(*until);
        }
    }
}

/// Sums over the ranks that are made in the memory of a state: one that has a next value, and whose old value nothing else reads later. Until the sum is read for the last time,
/// the next value may not be written there: the state's last reader is then the sum's. What is read after the run has memory of its own.
pub fn lent(g: &Graph, roots: &[Option<Value>], mut last: HashMap<Value, usize>) -> (HashMap<Value, usize>, HashSet<Value>) {
    let replaced: HashSet<Value> = g.updates.iter().map(|u| u.0).collect();
    let mut lent = HashSet::new();
    for (i, node) in g.nodes.iter().enumerate().filter(|(_, n)| n.op::<AllReduce>().is_some()) {
        for (out, &v) in node.inputs.iter().enumerate() {
            let (state, sum) = (roots[v.node].unwrap_or(v), Value { node: i, out });
            let until = last.get(&sum).copied().unwrap_or(i);
            let is_read_in_time = crate::mutant!("a-sum-that-is-put-out-is-emptied", until < g.nodes.len(), true);
            if replaced.contains(&state) && last.get(&state) == Some(&i) && is_read_in_time {
                last.insert(state, until);
                lent.insert(sum);
            }
        }
    }
    (last, lent)
}
