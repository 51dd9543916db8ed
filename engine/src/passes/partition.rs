//! Divides a recorded graph among the ranks of a group. Passes decide which feeds and states are divided; the rest follows from what every op says about
//! itself ([`Op::axes`](crate::op::Op::axes)), node by node. Where a value is needed in another form than it has, a collective is placed.
//!
//! The graph means the same before and after: sums over a batch stay sums over the whole batch. Gradients are asked for afterwards, so that they are
//! divided as the values are.

use crate::error::Error;
use crate::graph::{Graph, Kind, Node, Value};
use crate::meta::Meta;
use crate::op::{Axis, Op, Share};
use crate::ops::collective::{Broadcast, all_gather, all_reduce, all_to_all, part, reduce_scatter};
use crate::ops::full::Full;
use crate::ranks::{Group, Part};
use crate::record::{Recorder, Var};
use std::collections::HashMap;
use std::sync::Arc;

/// What a rank has of each output of each node.
pub type Shares = Vec<Vec<Share>>;

/// How the nodes of a graph are divided.
pub struct Division {
    /// What a rank has of every value.
    pub shares: Shares,
    /// Of each node, the number of the axis of its op along which it is divided; None: every rank computes all of it.
    pub axes: Vec<Option<usize>>,
    /// Values that must be put together again for a node that cannot be divided: (value, the node).
    pub gathered: Vec<(Value, usize)>,
}

/// What it costs, in bytes that a rank sends, to have `need` of a value that is held as `have`; None if that is not possible.
fn cost(have: Share, need: Share, meta: &Meta) -> Option<usize> {
    match (have, need) {
        _ if have == need => Some(0),
        (Share::Whole, Share::Dim(_)) => Some(0),
        (Share::Own, Share::Dim(0)) => Some(0),
        (Share::Dim(_) | Share::Sum, Share::Whole) | (Share::Sum, Share::Dim(_)) => Some(meta.bytes()),
        (Share::Dim(_), Share::Dim(_)) => Some(meta.bytes() / 2),
        _ => None,
    }
}

/// Whether an axis cuts all of these into equal parts.
fn divides(shares: &[Share], metas: &[Meta], parts: usize) -> bool {
    shares.iter().zip(metas).all(|(share, m)| match share {
        Share::Dim(d) => m.shape[*d].is_multiple_of(parts) && m.shape[*d] > 0,
        _ => true,
    })
}

/// The cheapest axis of an op whose inputs are held like this, and what it costs.
fn best(op: &dyn Op, have: &[Share], x: &[Meta], y: &[Meta], parts: usize) -> Option<(usize, Axis, usize)> {
    let mut found: Option<(usize, Axis, usize)> = None;
    for (number, axis) in op.axes(x, parts).into_iter().enumerate() {
        let meets = axis.x.iter().zip(have).any(|(need, have)| {
            *need != Share::Whole && *have != Share::Whole && need == have || matches!((have, need), (Share::Own, Share::Dim(0)))
        });
        // Rows in a rank's own order go with others of that order only.
        let own = have.contains(&Share::Own);
        let mixes = own
            && axis
                .x
                .iter()
                .zip(have)
                .zip(x)
                .any(|((need, have), m)| matches!(need, Share::Dim(d) if *have == Share::Whole && m.shape[*d] > 1));
        if !meets || mixes || !divides(&axis.x, x, parts) || !divides(&axis.y, y, parts) {
            continue;
        }
        let Some(bytes) = axis.x.iter().zip(have).zip(x).map(|((need, have), m)| cost(*have, *need, m)).sum::<Option<usize>>() else {
            continue;
        };
        let sums: usize = axis.y.iter().zip(y).filter(|(share, _)| **share == Share::Sum).map(|(_, m)| m.bytes()).sum();
        if found.as_ref().is_none_or(|f| bytes + sums < f.2) {
            found = Some((number, axis, bytes + sums));
        }
    }
    found
}

/// Follows the shares of the sources through the graph.
pub fn divide(g: &Graph, sources: &HashMap<usize, Share>, parts: usize) -> Result<Division, Error> {
    let mut d = Division { shares: vec![], axes: vec![], gathered: vec![] };
    for (i, node) in g.nodes.iter().enumerate() {
        let have: Vec<Share> = node.inputs.iter().map(|v| d.shares[v.node][v.out]).collect();
        let (axis, shares) = match &node.kind {
            Kind::Feed(_) | Kind::State(_) | Kind::Const(_) => (None, vec![sources.get(&i).copied().unwrap_or(Share::Whole)]),
            Kind::Grad => (None, have[1..].to_vec()),
            Kind::Op(op) => {
                let x = g.inputs(i);
                let whole = have.iter().zip(&x).map(|(have, m)| cost(*have, Share::Whole, m)).sum::<Option<usize>>();
                match (best(&**op, &have, &x, &node.outputs, parts), whole) {
                    (Some((number, axis, bytes)), whole) if whole.is_none_or(|w| bytes <= w) => {
                        let own = axis.x.iter().zip(&have).any(|(need, have)| matches!((have, need), (Share::Own, Share::Dim(0))));
                        let share = |s: &Share| if own && *s == Share::Dim(0) { Share::Own } else { *s };
                        (Some(number), axis.y.iter().map(share).collect())
                    }
                    (_, Some(_)) => (None, vec![Share::Whole; node.outputs.len()]),
                    _ => return Err(undivided(node)),
                }
            }
        };
        let needed = |k: usize| match (&node.kind, axis) {
            (Kind::Op(op), Some(a)) => op.axes(&g.inputs(i), parts)[a].x[k],
            (Kind::Grad, _) if k > 0 => have[k],
            _ => Share::Whole,
        };
        for (k, v) in node.inputs.iter().enumerate() {
            if matches!(have[k], Share::Dim(_)) && needed(k) == Share::Whole {
                d.gathered.push((*v, i));
            }
        }
        d.shares.push(shares);
        d.axes.push(axis);
    }
    Ok(d)
}

fn undivided(node: &Node) -> Error {
    let scope = if node.scope.is_empty() { "the top level" } else { &*node.scope };
    Error::Ranks(format!("'{}' (in {scope}) cannot be divided among ranks, and neither can its inputs be put together", node.name()))
}

/// Records the graph of one rank.
pub fn rewrite(g: &mut Graph, d: &Division, group: &Group) {
    let recorder = Recorder::new();
    let by = g.nodes.iter().filter(|n| matches!(n.kind, Kind::Grad)).flat_map(|n| n.inputs[1..].iter().copied());
    let mut w = Writer { g, d, group, recorder: &recorder, differs: g.depends_on(by), made: vec![], forms: HashMap::new() };
    let mut parts = g.parts.clone();
    for (i, node) in g.nodes.iter().enumerate() {
        recorder.set_place(node);
        let made = w.node(i, node);
        if let (true, Share::Dim(axis)) = (node.is_source(), d.shares[i][0]) {
            let part = Part { shape: node.outputs[0].shape.clone(), axis: Some(axis), index: group.rank, of: group.size };
            match &node.kind {
                Kind::Feed(name) => parts.feeds.entry(name.clone()).or_default().push(part),
                Kind::State(s) => parts.states.entry(s.name.clone()).or_default().push(part),
                _ => {}
            }
        }
        w.made.push(made);
    }
    for (name, v) in &g.outputs {
        recorder.set_place(&g.nodes[v.node]);
        recorder.output(name, w.get(*v, Share::Whole, false));
    }
    for (state, v) in &g.updates {
        recorder.set_place(&g.nodes[v.node]);
        let new = w.get(*v, d.shares[state.node][0], false);
        recorder.update(w.made[state.node][0], new);
    }
    drop(w);
    *g = recorder.finish();
    g.parts = parts;
}

struct Writer<'a, 'g> {
    g: &'a Graph,
    d: &'a Division,
    group: &'a Group,
    recorder: &'g Recorder,
    /// Of each node, whether a gradient is asked for that passes through it.
    differs: Vec<bool>,
    made: Vec<Vec<Var<'g>>>,
    /// Values in other forms than the one they have: what a rank has of it, and whether each reads it for its own part of the work.
    forms: HashMap<(Value, Share, bool), Var<'g>>,
}

impl<'g> Writer<'_, 'g> {
    fn node(&mut self, i: usize, node: &Node) -> Vec<Var<'g>> {
        let share = self.d.shares[i][0];
        let meta = |axis: usize| {
            let mut shape = node.outputs[0].shape.clone();
            shape[axis] /= self.group.size;
            node.outputs[0].with(&shape)
        };
        let op = match (&node.kind, self.d.axes[i]) {
            (Kind::Feed(name), _) if let Share::Dim(axis) = share => {
                let m = meta(axis);
                return vec![self.recorder.feed(name, &m.shape, m.dtype)];
            }
            (Kind::State(s), _) if let Share::Dim(axis) = share => return vec![self.recorder.retyped(s, meta(axis))],
            (Kind::Grad, _) => {
                let loss = self.get(node.inputs[0], Share::Whole, false);
                let by: Vec<Var> = node.inputs[1..].iter().map(|v| self.made[v.node][v.out]).collect();
                return self.recorder.grad(loss, &by);
            }
            (Kind::Op(op), Some(axis)) => (op, axis),
            _ => {
                let inputs: Vec<Value> = node.inputs.iter().map(|&v| self.get(v, Share::Whole, false).value()).collect();
                return self.recorder.keep(node, inputs).into_iter().map(|v| self.recorder.var(v)).collect();
            }
        };
        self.divided(op.0, op.1, self.g.inputs(i), &node.inputs)
    }

    /// This rank's part of an op.
    fn divided(&mut self, op: &Arc<dyn Op>, number: usize, x: Vec<Meta>, inputs: &[Value]) -> Vec<Var<'g>> {
        let (size, rank) = (self.group.size, self.group.rank);
        let axis = op.axes(&x, size).swap_remove(number);
        let inputs: Vec<Var> = inputs.iter().zip(&axis.x).map(|(&v, need)| self.get(v, *need, true)).collect();
        let op = op.part(&x, number, size, rank).unwrap_or_else(|| op.clone());
        self.recorder.op_arc(op, &inputs)
    }

    /// A value in the form that is needed. `apart`: it is read for a part of the work, so that its gradient is a sum over the ranks.
    fn get(&mut self, v: Value, need: Share, apart: bool) -> Var<'g> {
        let (have, made) = (self.d.shares[v.node][v.out], self.made[v.node][v.out]);
        let need = if (have, need) == (Share::Own, Share::Dim(0)) { Share::Own } else { need };
        let apart = apart && need == Share::Whole && self.differs[v.node] && self.g.meta(v).dtype.is_float();
        if have == need && !apart {
            return made;
        }
        if let Some(&known) = self.forms.get(&(v, need, apart)) {
            return known;
        }
        let form = match (have, need) {
            _ if apart => match &self.g.nodes[v.node] {
                // A view of a weight is taken of what is broadcast, so that the weight's gradients are added up once.
                Node { kind: Kind::Op(op), inputs, .. } if op.is_view() && have == Share::Whole => {
                    let seen = self.get(inputs[0], Share::Whole, true);
                    self.recorder.op_arc(op.clone(), &[seen])[v.out]
                }
                _ => {
                    let whole = self.get(v, Share::Whole, false);
                    self.recorder.op1(Broadcast { group: self.group.clone() }, &[whole])
                }
            },
            (Share::Whole, Share::Dim(axis)) => self.again(v, axis).unwrap_or_else(|| part(made, axis, self.group)),
            (Share::Dim(axis), Share::Whole) => all_gather(made, axis, self.group),
            (Share::Dim(from), Share::Dim(to)) => all_to_all(made, from, to, self.group),
            (Share::Sum, Share::Whole) => all_reduce(made, self.group),
            (Share::Sum, Share::Dim(axis)) => reduce_scatter(made, axis, self.group),
            _ => unreachable!("`divide` asks for no such form: {have:?} as {need:?}"),
        };
        self.forms.insert((v, need, apart), form);
        form
    }

    /// A part of a value that all ranks have because it is made of nothing but numbers and shapes: rather made as a part.
    fn again(&mut self, v: Value, axis: usize) -> Option<Var<'g>> {
        let node = &self.g.nodes[v.node];
        let Kind::Op(op) = &node.kind else { return None };
        let (x, size) = (self.g.inputs(v.node), self.group.size);
        let fits = |a: &Axis| a.y[v.out] == Share::Dim(axis) && divides(&a.x, &x, size);
        let number = op.axes(&x, size).iter().position(fits)?;
        (op.is_view() || op.is::<Full>().is_some()).then(|| self.divided(op, number, x, &node.inputs)[v.out])
    }
}
