//! Tools for passes: rewriting a graph, and questions about it (who reads a value, what it is a view of, is it a sum).

use crate::graph::{Graph, Kind, Node, Role, Value};
use crate::meta::DType;
use crate::ops::matmul::Matmul;
use crate::ops::pointwise::{Bin, Expr, Ins, Pointwise};
use crate::ops::view::{Permute, Reshape};
use crate::record::{Recorder, Var};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// A rewrite in progress: the old graph, and the new one as far as it is recorded.
pub struct Rewrite<'g> {
    /// Records the new graph.
    pub recorder: &'g Recorder,
    /// The graph as it was.
    pub old: &'g Graph,
    /// Old node -> its outputs in the new graph; empty if it is not recorded yet.
    values: RefCell<Vec<Vec<Value>>>,
}

impl<'g> Rewrite<'g> {
    /// The value that stands for `v` of the old graph. If it is not recorded yet, it is recorded now, with everything it depends on.
    pub fn at(&self, v: Value) -> Var<'g> {
        let known = self.values.borrow()[v.node].get(v.out).copied();
        if let Some(known) = known {
            return self.recorder.var(known);
        }
        let node = &self.old.nodes[v.node];
        let inputs: Vec<Var> = node.inputs.iter().map(|&w| self.at(w)).collect();
        let made = self.keep(node, &inputs);
        self.put(v.node, &made);
        made[v.out]
    }

    /// Records the node unchanged, with these inputs.
    pub fn keep(&self, node: &Node, inputs: &[Var<'g>]) -> Vec<Var<'g>> {
        let made = self.recorder.keep(node, inputs.iter().map(|v| v.value()).collect());
        made.into_iter().map(|v| self.recorder.var(v)).collect()
    }

    /// From now on these values stand for the outputs of the old graph's `node`, which is not recorded itself.
    pub fn put(&self, node: usize, results: &[Var<'g>]) {
        self.values.borrow_mut()[node] = results.iter().map(|v| v.value()).collect();
    }

    /// Undoes `put` and `at` for a node: it is recorded (again) when the rewrite reaches it.
    pub fn forget(&self, node: usize) {
        self.values.borrow_mut()[node].clear();
    }
}

impl Graph {
    /// Rewrites the graph node by node. `f` gets the old node's index, the node, and its inputs in the new graph; it returns the values
    /// that stand for the node's outputs, or None to keep the node. Nodes that [`Rewrite::put`] or [`Rewrite::at`] dealt with already are
    /// skipped.
    pub fn rewrite<E>(
        &mut self,
        f: impl for<'g> FnMut(&Rewrite<'g>, usize, &Node, &[Var<'g>]) -> Result<Option<Vec<Var<'g>>>, E>,
    ) -> Result<(), E> {
        *self = std::mem::take(self).rewritten(f)?;
        Ok(())
    }

    fn rewritten<E>(
        &self,
        mut f: impl for<'g> FnMut(&Rewrite<'g>, usize, &Node, &[Var<'g>]) -> Result<Option<Vec<Var<'g>>>, E>,
    ) -> Result<Graph, E> {
        let recorder = Recorder::new();
        let w = Rewrite { recorder: &recorder, old: self, values: RefCell::new(vec![vec![]; self.nodes.len()]) };
        for (i, node) in self.nodes.iter().enumerate() {
            if !w.values.borrow()[i].is_empty() {
                continue;
            }
            recorder.set_place(node);
            let inputs: Vec<Var> = node.inputs.iter().map(|&v| w.at(v)).collect();
            let new = f(&w, i, node, &inputs)?.unwrap_or_else(|| w.keep(node, &inputs));
            w.put(i, &new);
        }
        let values = w.values.into_inner();
        let mut new = recorder.finish();
        let at = |v: &Value| values[v.node][v.out];
        new.outputs = self.outputs.iter().map(|(n, v)| (n.clone(), at(v))).collect();
        new.updates = self.updates.iter().map(|(s, v)| (at(s), at(v))).collect();
        new.parts = self.parts.clone();
        Ok(new)
    }

    /// How often each value is read, by nodes and as a root of the graph.
    pub fn reads(&self) -> Reads {
        let mut reads: Vec<Vec<usize>> = self.nodes.iter().map(|n| vec![0; n.outputs.len()]).collect();
        self.nodes.iter().flat_map(|n| n.inputs.iter().copied()).chain(self.roots()).for_each(|v| reads[v.node][v.out] += 1);
        Reads(reads)
    }

    /// The value that `v` is a reshape of, or `v` itself.
    pub fn unshaped(&self, v: Value) -> Value {
        match self.nodes[v.node].op::<Reshape>() {
            Some(_) => self.unshaped(self.nodes[v.node].inputs[0]),
            None => v,
        }
    }

    /// The matrix that `v` is the transpose of, if it is one.
    pub fn transpose_of(&self, v: Value) -> Option<Value> {
        let node = &self.nodes[v.node];
        node.op::<Permute>().filter(|p| p.0 == [1, 0]).map(|_| node.inputs[0])
    }

    /// The role of the state that `v` is, looking through views and casts. None if `v` is computed.
    pub fn state_role(&self, v: Value) -> Option<Role> {
        self.state_through(v, |node| node.is_view() || node.is_cast())
    }

    /// The same, looking through those nodes with one input for which `see` is true.
    pub fn state_through(&self, v: Value, see: impl Fn(&Node) -> bool) -> Option<Role> {
        let (mut node, through) = (&self.nodes[v.node], |n: &Node| n.inputs.len() == 1 && see(n));
        while through(node) {
            node = &self.nodes[node.inputs[0].node];
        }
        match &node.kind {
            Kind::State(s) => Some(s.role),
            _ => None,
        }
    }

    /// The operands of a plain matmul: two matrices, without an epilogue.
    pub fn plain_matmul(&self, node: usize) -> Option<[Value; 2]> {
        let n = &self.nodes[node];
        n.op::<Matmul>().filter(|m| **m == Matmul::default() && n.outputs[0].rank() == 2)?;
        n.inputs[..].try_into().ok()
    }

    /// The two inputs of a pointwise node that is just this binary operation on floats.
    pub fn binary(&self, node: usize, op: Bin) -> Option<[Value; 2]> {
        let e = &self.nodes[node].op::<Pointwise>()?.expr;
        let (&[Ins::In(_), Ins::In(_), Ins::Bin(found, x, y)], &[2]) = (&e.ins[..], &e.outs[..]) else { return None };
        let input = |r: usize| match e.ins[r] {
            Ins::In(k) => self.nodes[node].inputs[k],
            _ => unreachable!("the first two are inputs"),
        };
        let both = [input(x), input(y)];
        (found == op && x != y && both.iter().all(|&v| self.meta(v).dtype.is_float())).then_some(both)
    }
}

/// Whether a pointwise op is x0 + x1.
pub fn is_sum(p: &Pointwise) -> bool {
    p.expr == Expr::of(2, |e, x| e.add(x[0], x[1])) || p.expr == Expr::of(2, |e, x| e.add(x[1], x[0]))
}

/// Whether this is the pointwise op that `f` records when it is given `inputs` values.
pub fn is_arithmetic(p: &Pointwise, inputs: usize, f: impl for<'g> Fn(&[Var<'g>]) -> Var<'g>) -> bool {
    let r = Recorder::new();
    let x: Vec<Var> = (0..inputs).map(|i| r.feed(&format!("x{i}"), &[1], DType::F32)).collect();
    let y = f(&x).value();
    r.with_graph(|g| g.nodes[y.node].op::<Pointwise>().is_some_and(|q| q.expr == p.expr))
}

/// How often each value is read (see [`Graph::reads`]).
pub struct Reads(Vec<Vec<usize>>);

impl Reads {
    /// Whether it is read exactly once.
    pub fn once(&self, v: Value) -> bool {
        self.0[v.node][v.out] == 1
    }
}

/// The readers of each node, kept up to date while a pass changes nodes in place. A pass that searched the whole graph at every node would
/// take time quadratic in the model's depth.
pub struct Uses {
    /// For every node, (reader, which of the reader's inputs), in execution order.
    reads: Vec<BTreeSet<(usize, usize)>>,
    /// For every node, the indices of those [`Graph::roots`] that are its outputs.
    roots: Vec<Vec<usize>>,
}

impl Uses {
    /// Collects all reads of the graph as it is now.
    pub fn new(g: &Graph) -> Uses {
        let mut uses = Uses { reads: vec![BTreeSet::new(); g.nodes.len()], roots: vec![vec![]; g.nodes.len()] };
        for (i, node) in g.nodes.iter().enumerate() {
            for (k, v) in node.inputs.iter().enumerate() {
                uses.reads[v.node].insert((i, k));
            }
        }
        g.roots().enumerate().for_each(|(k, v)| uses.roots[v.node].push(k));
        uses
    }

    /// Whether one of the node's outputs is a root: an output of the graph or a state's update.
    pub fn is_root(&self, node: usize) -> bool {
        !self.roots[node].is_empty()
    }

    /// How often outputs of a node are read, by nodes and as roots.
    pub fn count(&self, node: usize) -> usize {
        self.reads[node].len() + self.roots[node].len()
    }

    /// The readers of a node within a range of positions; one that reads it twice comes twice.
    pub fn readers(&self, node: usize, among: std::ops::Range<usize>) -> impl Iterator<Item = usize> + '_ {
        self.reads[node].range((among.start, 0)..(among.end, 0)).map(|r| r.0)
    }

    /// Whether `reader` is the only node that reads `node`.
    pub fn all_by(&self, node: usize, reader: usize) -> bool {
        let ends = (self.reads[node].first(), self.reads[node].last());
        matches!(ends, (Some(first), Some(last)) if first.0 == reader && last.0 == reader)
    }

    /// The only reader of a node, if there is just one and none of the node's outputs is a root.
    pub fn only_reader(&self, node: usize) -> Option<usize> {
        let first = self.reads[node].first()?.0;
        (self.all_by(node, first) && !self.is_root(node)).then_some(first)
    }

    /// Outputs of a node that are roots or are read by nodes other than `reader`.
    pub fn read_apart_from(&self, g: &Graph, node: usize, reader: usize) -> Vec<usize> {
        let mut read = vec![false; g.nodes[node].outputs.len()];
        for &(i, k) in self.reads[node].iter().filter(|r| r.0 != reader) {
            read[g.nodes[i].inputs[k].out] = true;
        }
        self.roots[node].iter().for_each(|&k| read[g.root(k).out] = true);
        (0..read.len()).filter(|&out| read[out]).collect()
    }

    /// Replaces the inputs of node `i`.
    pub fn set_inputs(&mut self, g: &mut Graph, i: usize, inputs: Vec<Value>) {
        for (k, v) in g.nodes[i].inputs.iter().enumerate() {
            self.reads[v.node].remove(&(i, k));
        }
        for (k, v) in inputs.iter().enumerate() {
            self.reads[v.node].insert((i, k));
        }
        g.nodes[i].inputs = inputs;
    }

    /// Every reader of an output `v` of `node` reads `to(v)` instead.
    pub fn redirect(&mut self, g: &mut Graph, node: usize, to: impl Fn(Value) -> Value) {
        for (i, k) in std::mem::take(&mut self.reads[node]) {
            let v = &mut g.nodes[i].inputs[k];
            *v = to(*v);
            self.reads[v.node].insert((i, k));
        }
        for k in std::mem::take(&mut self.roots[node]) {
            let v = to(g.root(k));
            match k.checked_sub(g.outputs.len()) {
                None => g.outputs[k].1 = v,
                Some(update) => g.updates[update].1 = v,
            }
            self.roots[v.node].push(k);
        }
    }
}
