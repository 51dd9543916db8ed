//! Divides a recorded graph among the ranks of a group. Passes decide which feeds and states are divided; the rest follows from what every op says about
//! itself ([`Op::axes`](crate::op::Op::axes)), node by node. Where a value is needed in another form than it has, a collective is placed.
//!
//! The graph means the same before and after: sums over a batch stay sums over the whole batch. Gradients are asked for afterwards, so that they are
//! divided as the values are.

use super::Receipt;
use super::terms::{Sums, accumulations};
use crate::error::Error;
use crate::graph::{Graph, Kind, Node, Role, Value};
use crate::meta::{DType, Meta};
use crate::op::{Axis, Op, Share};
use crate::ops::collective::{Broadcast, all_gather, all_reduce, all_to_all, part, reduce_scatter};
use crate::ops::full::Full;
use crate::ops::pointwise::Pointwise;
use crate::ranks::{Group, Part, Ranks};
use crate::record::{Recorder, Var};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// What a rank has of each output of each node.
pub type Shares = Vec<Vec<Share>>;

/// How the nodes of a graph are divided.
pub struct Division {
    /// What a rank has of every value.
    pub shares: Shares,
    /// How each node is computed.
    pub ways: Vec<Way>,
    /// Values that must be put together again, or divided along another dimension, for a node: (value, the node).
    pub gathered: Vec<(Value, usize)>,
    /// Whether that is meant to be (see [`Sources::by_tokens`]).
    pub by_tokens: bool,
    /// What is computed of weights alone, whose gradients are to stay terms: read as the weights are, so that the terms reach them.
    pub through: HashSet<usize>,
}

/// How a node is computed.
#[derive(Clone, Debug, PartialEq)]
pub enum Way {
    /// By every rank.
    Whole,
    /// Along an axis of its op, of this number.
    Axis(usize, Axis),
    /// Tensors apart, with these shares of its inputs (see [`Op::apart`]).
    Apart(Vec<Share>),
    /// In a way of its own (see [`Op::divided`]).
    Own,
    /// By every rank, each with its terms: a sum of sums.
    Terms,
}

impl Way {
    /// What it needs of input `k`, of which a rank has `have`.
    fn need(&self, k: usize, have: Share) -> Share {
        match self {
            Way::Whole => Share::Whole,
            Way::Axis(_, axis) => axis.x[k],
            Way::Apart(shares) => shares[k],
            Way::Own => have,
            Way::Terms => Share::Sum,
        }
    }
}

/// What a rank has of feeds and states, by their nodes; the others are whole.
#[derive(Clone, Default)]
pub struct Sources {
    pub shares: HashMap<usize, Share>,
    /// States that another program of the run has settled.
    pub settled: HashSet<usize>,
    /// Whether sums over the ranks are scattered by tokens where ops can go on with a part of the tokens, and weights are never put together for that.
    pub by_tokens: bool,
}

impl Sources {
    /// The states that earlier programs have settled.
    pub fn new(g: &Graph, ranks: &Ranks, group: &Group) -> Sources {
        let mut sources = Sources::default();
        for (i, node) in g.nodes.iter().enumerate() {
            let Kind::State(s) = &node.kind else { continue };
            if let Some(share) = ranks.settled.of(group, &s.name, &node.outputs[0]) {
                sources.settled.insert(i);
                sources.shares.extend((share != Share::Whole).then_some((i, share)));
            }
        }
        sources
    }

    /// Settles all states for the programs that come.
    pub fn settle(&self, g: &Graph, ranks: &Ranks, group: &Group) {
        for (i, node) in g.nodes.iter().enumerate() {
            if let Kind::State(s) = &node.kind {
                ranks.settled.settle(group, &s.name, &node.outputs[0], self.shares.get(&i).copied().unwrap_or(Share::Whole));
            }
        }
    }
}

impl Division {
    /// How many ops are divided.
    pub fn divided(&self, g: &Graph) -> usize {
        let is_op = |n: &Node| matches!(n.kind, Kind::Op(_)) && !n.is_view();
        g.nodes.iter().zip(&self.ways).filter(|(n, way)| is_op(n) && matches!(way, Way::Axis(..))).count()
    }

    /// Divides states whose new values are: what is carried from one batch to the next, moments of weights. Says whether there were new ones.
    pub fn follow(&self, g: &Graph, sources: &mut Sources) -> bool {
        let before = sources.shares.len();
        for (state, value) in &g.updates {
            let Kind::State(s) = &g.nodes[state.node].kind else { continue };
            let share = self.shares[value.node][value.out];
            if share.cut().is_some() && s.role == Role::Carried && !sources.settled.contains(&state.node) {
                sources.shares.entry(state.node).or_insert(share);
            }
        }
        sources.shares.len() > before
    }

    /// Whether everything that it exchanges can be exchanged.
    pub fn check(&self, g: &Graph) -> Result<(), Error> {
        let bytes = |v: &Value| !g.meta(*v).dtype.is_float() && g.meta(*v).dtype != DType::I32;
        self.gathered.iter().find(|(v, _)| bytes(v)).map_or(Ok(()), |(_, node)| Err(undivided(&g.nodes[*node])))
    }

    /// Counts in a receipt what is divided, and what is not.
    pub fn describe(&self, g: &Graph, what: &str, receipt: &mut Receipt) {
        let all = g.nodes.iter().filter(|n| matches!(n.kind, Kind::Op(_)) && !n.is_view()).count();
        receipt.applied += self.divided(g);
        receipt.notes.push(format!("{} of {all} ops on {what}", self.divided(g)));
        if self.by_tokens {
            let values: HashSet<Value> = self.gathered.iter().map(|g| g.0).collect();
            receipt.notes.push(format!("{} values gathered from their tokens", values.len()));
            return;
        }
        for (v, node) in &self.gathered {
            receipt.decline(
                format!("{} needs other parts of {:?} than a rank has: an all-gather or all-to-all", g.nodes[*node].name(), g.meta(*v)),
                &g.nodes[*node].scope,
            );
        }
    }
}

/// A value that an op reads: what a rank has of it, and whether it is a weight that is never put together.
#[derive(Clone, Copy)]
struct Held {
    share: Share,
    fixed: bool,
}

/// No division is worth so many bytes.
const NEVER: usize = 1 << 40;

/// What it costs, in bytes that a rank sends, to have `need` of a value that is held as `have`; None if that is not possible.
fn cost(held: Held, need: Share, meta: &Meta, by_tokens: bool) -> Option<usize> {
    let have = held.share;
    match (have, need) {
        _ if have == need => Some(0),
        (Share::Whole, Share::Dim(_) | Share::Sections(..)) => Some(0),
        // Integers of such rows are numbers of the rank's own, which mean nothing to other ops.
        (Share::Own, Share::Dim(0)) => meta.dtype.is_float().then_some(0),
        // Bytes are not exchanged: see `Division::check`.
        _ if !meta.dtype.is_float() && meta.dtype != DType::I32 => Some(NEVER),
        _ if held.fixed && have != Share::Whole => Some(NEVER),
        // A sum on all ranks is a sum that is scattered and gathered.
        (Share::Sum, Share::Whole) if by_tokens => Some(2 * meta.bytes()),
        (Share::Dim(_) | Share::Sum, Share::Whole) | (Share::Sum, Share::Dim(_)) => Some(meta.bytes()),
        (Share::Dim(_), Share::Dim(_)) => Some(meta.bytes() / 2),
        // Put together first, and cut again where a part of it is needed.
        (Share::Sections(..), Share::Whole | Share::Dim(_) | Share::Sections(..)) => Some(meta.bytes()),
        (Share::Dim(_) | Share::Sum, Share::Sections(..)) => Some(meta.bytes()),
        _ => None,
    }
}

/// Whether an axis cuts all of these into equal parts.
fn divides(shares: &[Share], metas: &[Meta], parts: usize) -> bool {
    shares.iter().zip(metas).all(|(share, m)| match share.cut() {
        Some((d, sections)) => m.shape[d].is_multiple_of(parts * sections) && m.shape[d] > 0,
        None => true,
    })
}

/// The ways in which an op can be divided, with their numbers, where inputs may be divided in sections. What every part computes alike, whichever it is, can be
/// computed of the same part of every section: columns of a matmul, arithmetic, heads.
fn axes(op: &dyn Op, have: &[Share], x: &[Meta], parts: usize) -> Vec<(usize, Axis)> {
    let mut all: Vec<(usize, Axis)> = op.axes(x, parts).into_iter().enumerate().collect();
    let mut counts: Vec<usize> = have.iter().filter_map(|h| h.cut()).map(|cut| cut.1).filter(|&n| n > 1).collect();
    counts.sort();
    counts.dedup();
    for n in counts {
        let finer = op.axes(x, parts * n);
        let part = |number, index| op.part(x, number, parts * n, index).map(|op| format!("{op:?}"));
        let alike = |axis: &Axis| finer.iter().position(|a| a == axis).is_some_and(|number| part(number, 0) == part(number, 1));
        let plain = |s: &Share| matches!(s, Share::Whole | Share::Dim(_) | Share::Sum);
        let each = |shares: &[Share]| shares.iter().map(|s| s.of_each(n)).collect::<Vec<_>>();
        let sections = all.iter().filter(|(_, a)| a.x.iter().chain(&a.y).all(plain) && alike(a));
        let sections: Vec<_> = sections.map(|(number, a)| (*number, Axis::new(each(&a.x), each(&a.y)))).collect();
        all.extend(sections);
    }
    all
}

/// The cheapest axis of an op whose inputs are held like this, and what it costs.
fn best(op: &dyn Op, held: &[Held], x: &[Meta], y: &[Meta], (parts, by_tokens): (usize, bool)) -> Option<(usize, Axis, usize)> {
    let mut found: Option<(usize, Axis, usize)> = None;
    let have: Vec<Share> = held.iter().map(|h| h.share).collect();
    let have = &have[..];
    for (number, axis) in axes(op, have, x, parts) {
        // The last dimension is that of features, not of tokens.
        let scatters =
            |have: Share, need: Share, m: &Meta| matches!((have, need), (Share::Sum, Share::Dim(d)) if by_tokens && d + 1 < m.rank());
        let meets = axis.x.iter().zip(have).zip(x).any(|((need, have), m)| {
            *need != Share::Whole && *have != Share::Whole && need == have
                || matches!((have, need), (Share::Own, Share::Dim(0)))
                || scatters(*have, *need, m)
        });
        // Rows in a rank's own order go with others of that order only, and stay the first dimension.
        let own = axis.x.iter().zip(have).any(|(need, have)| (have, need) == (&Share::Own, &Share::Dim(0)));
        let ordered = |(need, have): (&Share, &Share)| matches!(need, Share::Dim(_)) && *have != Share::Own;
        let draws = own && op.is::<Pointwise>().is_some_and(|p| p.expr.draws());
        let mixes = crate::mutant!("dropout-of-rows-in-a-ranks-own-order", draws, false)
            || own && (axis.x.iter().zip(have).any(ordered) || axis.y.iter().any(|s| matches!(s, Share::Dim(1..))));
        if !meets || mixes || !divides(&axis.x, x, parts) || !divides(&axis.y, y, parts) {
            continue;
        }
        let Some(bytes) = axis.x.iter().zip(held).zip(x).map(|((need, held), m)| cost(*held, *need, m, by_tokens)).sum::<Option<usize>>()
        else {
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
pub fn divide(g: &Graph, sources: &Sources, parts: usize) -> Result<Division, Error> {
    try_divide(g, sources, parts).map_err(|node| undivided(&g.nodes[node]))
}

/// As [`divide`]; where that is not possible, the node that is in the way.
pub fn try_divide(g: &Graph, sources: &Sources, parts: usize) -> Result<Division, usize> {
    let mut d = Division { shares: vec![], ways: vec![], gathered: vec![], by_tokens: sources.by_tokens, through: HashSet::new() };
    // Sums of gradients that stay terms: by the gradient, and by the node that adds it to what a state has.
    let mut added = if sources.shares.values().any(|s| *s == Share::Sum) { accumulations(g) } else { vec![] };
    added.retain(|a| sources.shares.get(&a.state) == Some(&Share::Sum));
    let terms: HashSet<Value> = added.iter().map(|a| a.gradient).collect();
    let sums: HashSet<usize> = added.iter().map(|a| a.sum).collect();
    // Weights and views of them.
    let mut weights = vec![false; g.nodes.len()];
    for (i, node) in g.nodes.iter().enumerate() {
        let have: Vec<Share> = node.inputs.iter().map(|v| d.shares[v.node][v.out]).collect();
        let (way, shares) = match &node.kind {
            Kind::Feed(_) | Kind::State(_) | Kind::Const(_) => (Way::Whole, vec![sources.shares.get(&i).copied().unwrap_or(Share::Whole)]),
            // Of a term of a sum the gradient is that of the sum: the same on all ranks.
            Kind::Grad => {
                let sums = (!terms.is_empty()).then(|| Sums::new(g, &d, i, parts));
                let share = |out: usize| match have[1 + out] {
                    Share::Whole if sums.as_ref().is_some_and(|s| s.are[out]) && terms.contains(&Value { node: i, out }) => Share::Sum,
                    Share::Sum => Share::Whole,
                    other => other,
                };
                let shares = (0..node.outputs.len()).map(share).collect();
                d.through.extend(sums.into_iter().flat_map(|s| s.through));
                (Way::Own, shares)
            }
            Kind::Op(_) if sums.contains(&i) => (Way::Terms, vec![Share::Sum]),
            Kind::Op(_) if have.iter().all(|h| *h == Share::Whole) => (Way::Whole, vec![Share::Whole; node.outputs.len()]),
            Kind::Op(op) => {
                let fixed = |v: &Value| sources.by_tokens && weights[v.node];
                let held: Vec<Held> = node.inputs.iter().zip(&have).map(|(v, &share)| Held { share, fixed: fixed(v) }).collect();
                way(&**op, &held, &g.inputs(i), &node.outputs, (parts, sources.by_tokens)).ok_or(i)?
            }
        };
        weights[i] = match &node.kind {
            Kind::State(s) => matches!(s.role, Role::Param | Role::Frozen),
            _ => node.is_view() && weights[node.inputs[0].node],
        };
        for (k, v) in node.inputs.iter().enumerate() {
            let need = way.need(k, have[k]);
            if have[k].cut().is_some() && have[k] != need && (need.cut().is_some() || need == Share::Whole) {
                d.gathered.push((*v, i));
            }
        }
        d.shares.push(shares);
        d.ways.push(way);
    }
    // What is read after a run, and what a state becomes, is put together.
    let left = g.roots().find(|v| d.shares[v.node][v.out] == Share::Own);
    left.map_or(Ok(d), |v| Err(v.node))
}

/// How an op is computed whose inputs are held like this, and what a rank then has of its outputs.
fn way(op: &dyn Op, held: &[Held], x: &[Meta], y: &[Meta], (parts, by_tokens): (usize, bool)) -> Option<(Way, Vec<Share>)> {
    let have: Vec<Share> = held.iter().map(|h| h.share).collect();
    let have = &have[..];
    let apart = op.apart();
    if !apart.is_empty() {
        let (mut need, mut out) = (vec![Share::Whole; x.len()], vec![Share::Whole; y.len()]);
        for (inputs, outputs) in apart {
            let divided = inputs.iter().map(|&k| have[k]).find(|h| h.cut().is_some()).unwrap_or(Share::Whole);
            inputs.iter().for_each(|&k| need[k] = divided);
            outputs.iter().for_each(|&k| out[k] = divided);
        }
        return Some((Way::Apart(need), out));
    }
    if op.is_divided(x, have, parts) {
        return Some((Way::Own, vec![Share::Whole; y.len()]));
    }
    let whole = held.iter().zip(x).map(|(held, m)| cost(*held, Share::Whole, m, by_tokens)).sum::<Option<usize>>();
    match best(op, held, x, y, (parts, by_tokens)) {
        Some((number, axis, bytes)) if whole.is_none_or(|w| bytes <= w) => {
            let own = axis.x.iter().zip(have).any(|(need, have)| matches!((have, need), (Share::Own, Share::Dim(0))));
            let share = |s: &Share| if own && *s == Share::Dim(0) { Share::Own } else { *s };
            let shares = axis.y.iter().map(share).collect();
            Some((Way::Axis(number, axis), shares))
        }
        _ => whole.map(|_| (Way::Whole, vec![Share::Whole; y.len()])),
    }
}

fn undivided(node: &Node) -> Error {
    let scope = if node.scope.is_empty() { "the top level" } else { &*node.scope };
    Error::Ranks(format!(
        "'{}' (in {scope}) reads or leaves rows in an order that each rank has for itself (those of a mixture's experts), or bytes that ranks do not exchange: use one \
         data-parallel rank, or record it otherwise",
        node.name()
    ))
}

/// Records the graph of one rank.
pub fn rewrite(g: &mut Graph, d: &Division, group: &Group) {
    let recorder = Recorder::new();
    let by = g.nodes.iter().filter(|n| matches!(n.kind, Kind::Grad)).flat_map(|n| n.inputs[1..].iter().copied());
    let asked: HashSet<Value> = by.collect();
    let differs = g.depends_on(asked.iter().copied());
    let mut w = Writer { g, d, group, recorder: &recorder, differs, asked, made: vec![], forms: HashMap::new() };
    let mut parts = g.parts.clone();
    for (i, node) in g.nodes.iter().enumerate() {
        recorder.set_place(node);
        let made = w.node(i, node);
        if let (true, Some((axis, sections))) = (node.is_source(), d.shares[i][0].cut()) {
            let (shape, index, of, by) = (node.outputs[0].shape.clone(), group.rank, group.size, group.name);
            let part = Part { shape, axis: Some(axis), sections, index, of, by };
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
    /// Values that a gradient is asked for.
    asked: HashSet<Value>,
    made: Vec<Vec<Var<'g>>>,
    /// Values in other forms than the one they have: what a rank has of it, and whether each reads it for its own part of the work.
    forms: HashMap<(Value, Share, bool), Var<'g>>,
}

impl<'g> Writer<'_, 'g> {
    fn node(&mut self, i: usize, node: &Node) -> Vec<Var<'g>> {
        let cut = self.d.shares[i][0].cut();
        let meta = |axis: usize| {
            let mut shape = node.outputs[0].shape.clone();
            shape[axis] /= self.group.size;
            node.outputs[0].with(&shape)
        };
        match (&node.kind, &self.d.ways[i]) {
            (Kind::Feed(name), _) if let Some((axis, _)) = cut => {
                let m = meta(axis);
                vec![self.recorder.feed(name, &m.shape, m.dtype)]
            }
            (Kind::State(s), _) if let Some((axis, _)) = cut => vec![self.recorder.retyped(s, meta(axis))],
            (Kind::Grad, _) => {
                let loss = self.get(node.inputs[0], Share::Whole, false);
                // By what each rank reads for its part of the work, the gradient is the rank's term; by the weight itself, the sum of all.
                let term = |out: usize| self.d.shares[i][out] == Share::Sum;
                let by = node.inputs[1..].iter().enumerate();
                let by: Vec<Var> =
                    by.map(|(out, &v)| if term(out) { self.get(v, Share::Whole, true) } else { self.made[v.node][v.out] }).collect();
                self.recorder.grad(loss, &by)
            }
            (Kind::Op(op), Way::Axis(number, axis)) => self.divided(op, *number, axis, self.g.inputs(i), &node.inputs),
            (Kind::Op(op), Way::Own) => {
                let have: Vec<Share> = node.inputs.iter().map(|v| self.d.shares[v.node][v.out]).collect();
                let inputs: Vec<Var> = node.inputs.iter().map(|v| self.made[v.node][v.out]).collect();
                op.divided(&inputs, &have, self.group).expect("`divide` asked whether it has a way of its own")
            }
            (Kind::Op(op), Way::Terms) => {
                let inputs: Vec<Var> = node.inputs.iter().map(|&v| self.get(v, Share::Sum, false)).collect();
                self.recorder.op_arc(op.clone(), &inputs)
            }
            (Kind::Op(op), Way::Apart(need)) => {
                let inputs: Vec<Var> = node.inputs.iter().zip(need).map(|(&v, need)| self.get(v, *need, false)).collect();
                self.recorder.op_arc(op.clone(), &inputs)
            }
            _ => {
                let inputs: Vec<Value> = node.inputs.iter().map(|&v| self.get(v, Share::Whole, false).value()).collect();
                self.recorder.keep(node, inputs).into_iter().map(|v| self.recorder.var(v)).collect()
            }
        }
    }

    /// This rank's part of an op.
    fn divided(&mut self, op: &Arc<dyn Op>, number: usize, axis: &Axis, x: Vec<Meta>, inputs: &[Value]) -> Vec<Var<'g>> {
        let (size, rank) = (self.group.size, self.group.rank);
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
                Node { kind: Kind::Op(op), inputs, .. } if op.is_view() && have == Share::Whole && !self.asked.contains(&v) => {
                    let seen = self.get(inputs[0], Share::Whole, true);
                    self.recorder.op_arc(op.clone(), &[seen])[v.out]
                }
                Node { kind: Kind::Op(op), inputs, .. } if self.d.through.contains(&v.node) => {
                    let x: Vec<Var> = inputs.iter().map(|&v| self.get(v, Share::Whole, true)).collect();
                    self.recorder.op_arc(op.clone(), &x)[v.out]
                }
                _ => {
                    let whole = self.get(v, Share::Whole, false);
                    self.recorder.op1(Broadcast { group: self.group.clone() }, &[whole])
                }
            },
            // Of what all ranks have, each takes an equal share. All of it on one of them would need other programs: what the others need not compute, they would not exchange.
            (_, Share::Sum) => {
                let whole = self.get(v, Share::Whole, false);
                let is_zero = self.g.nodes[v.node].op::<Full>().is_some_and(|f| f.value == 0.0);
                if is_zero { whole } else { whole * (1.0 / self.group.size as f32) }
            }
            (Share::Whole, Share::Dim(axis)) => self.again(v, axis).unwrap_or_else(|| part(made, axis, self.group)),
            (Share::Dim(axis), Share::Whole) => all_gather(made, axis, self.group),
            (Share::Dim(from), Share::Dim(to)) => all_to_all(made, from, to, self.group),
            (Share::Sum, Share::Whole) => all_reduce(made, self.group),
            (Share::Sum, Share::Dim(axis)) => reduce_scatter(made, axis, self.group),
            (Share::Whole, Share::Sections(axis, n)) => by_section(made, axis, n, |v, inner| part(v, inner, self.group)),
            (Share::Sections(axis, n), Share::Whole) => by_section(made, axis, n, |v, inner| all_gather(v, inner, self.group)),
            (Share::Sections(..), Share::Dim(axis)) => part(self.get(v, Share::Whole, false), axis, self.group),
            (_, Share::Sections(axis, n)) => by_section(self.get(v, Share::Whole, false), axis, n, |v, inner| part(v, inner, self.group)),
            _ => unreachable!("`divide` asks for no such form: {have:?} as {need:?}"),
        };
        self.forms.insert((v, need, apart), form);
        form
    }

    /// A part of a value that all ranks have because it is made of nothing but numbers and shapes: rather made as a part.
    fn again(&mut self, v: Value, axis: usize) -> Option<Var<'g>> {
        let node = &self.g.nodes[v.node];
        let Kind::Op(op) = &node.kind else { return None };
        let (number, axis) = made_as_part(self.g, v, axis, self.group.size).filter(|_| !self.asked.contains(&v))?;
        Some(self.divided(op, number, &axis, self.g.inputs(v.node), &node.inputs)[v.out])
    }
}

/// The axis of the op that makes a value along which a part of the value is made, where that costs no more than to cut it from the whole.
pub fn made_as_part(g: &Graph, v: Value, axis: usize, parts: usize) -> Option<(usize, Axis)> {
    let Kind::Op(op) = &g.nodes[v.node].kind else { return None };
    let x = g.inputs(v.node);
    let sectioned = |a: &Axis| a.x.iter().any(|s| matches!(s, Share::Sections(..)));
    let fits = |a: &Axis| a.y[v.out] == Share::Dim(axis) && divides(&a.x, &x, parts) && !sectioned(a);
    let is_free = op.is_view() || op.is::<Full>().is_some();
    op.axes(&x, parts).into_iter().enumerate().find(|(_, a)| is_free && fits(a))
}

/// Does something to the second of the two dimensions, sections and their elements, that a dimension of so many sections is.
fn by_section<'g>(v: Var<'g>, axis: usize, sections: usize, f: impl FnOnce(Var<'g>, usize) -> Var<'g>) -> Var<'g> {
    let mut shape = v.shape();
    shape.splice(axis..axis + 1, [sections, shape[axis] / sections]);
    let done = f(v.reshape(&shape), axis + 1);
    let mut joined = done.shape();
    joined.splice(axis..axis + 2, [joined[axis] * joined[axis + 1]]);
    done.reshape(&joined)
}
