//! Gives every value of a graph a buffer, an offset in it and strides. Offsets of the buffers themselves are assigned later, in `arena`.

use super::{ALIGN, Buffer, Copy, Home, Memory, Plan, Spot, aside, last_reads, view_roots};
use crate::graph::{Graph, Kind, Value};
use crate::meta::{contiguous, is_contiguous};
use crate::op::{Cost, Op};
use crate::ops::concat::Join;
use crate::ops::view::Reshape;
use std::collections::{HashMap, HashSet};

/// A plan with spots, buffers, copies and stores, but without offsets in the arena and without scratch memory.
pub fn place(g: &Graph) -> Plan {
    let mut placer = Placer::new(g);
    for i in 0..g.nodes.len() {
        let spots = match &g.nodes[i].kind {
            Kind::Op(op) if op.is_view() => vec![placer.view(i, &**op)],
            Kind::Op(op) => placer.op(i, &**op),
            _ => vec![placer.source(i)],
        };
        placer.plan.spots.push(spots);
        if let Kind::Op(op) = &g.nodes[i].kind {
            let (cost, total) = (op.cost(&g.inputs(i)), &mut placer.plan.cost);
            total.flops = total.flops.saturating_add(cost.flops);
            total.bytes = total.bytes.saturating_add(cost.bytes);
        }
    }
    let mut plan = placer.plan;
    for &(state, value) in &g.updates {
        if plan.spots[value.node][value.out].buffer != plan.spots[state.node][0].buffer {
            plan.stores.push((state.node, value));
        }
    }
    plan
}

/// A plan that is being made, and what is known about the graph.
struct Placer<'a> {
    g: &'a Graph,
    roots: Vec<Option<Value>>,
    last_read: HashMap<Value, usize>,
    /// Value -> the state whose buffer it may use (see `destinations`).
    destined: HashMap<Value, usize>,
    /// Value -> its place in a Join's buffer (see `joined`).
    joined: HashMap<Value, (usize, usize)>,
    /// A Join's node -> its buffer.
    joints: HashMap<usize, usize>,
    updates: HashSet<(Value, Value)>,
    /// Values that take a state's memory (see `aside::lent`).
    lent: HashSet<Value>,
    plan: Plan,
}

impl<'a> Placer<'a> {
    fn new(g: &'a Graph) -> Placer<'a> {
        let roots = view_roots(g);
        let (last_read, lent) = aside::lent(g, &roots, last_reads(g, &roots));
        let destined = destinations(g, &roots, &last_read);
        let joined = joined(g, &last_read, &destined);
        let (memory, cost, updates) = (Memory::default(), Cost::default(), g.updates.iter().copied().collect());
        let plan = Plan { spots: vec![], buffers: vec![], copies: vec![], stores: vec![], scratch: vec![], memory, cost };
        Placer { g, roots, last_read, destined, joined, joints: HashMap::new(), updates, lent, plan }
    }

    /// The value that `v` is a view of, or `v` itself.
    fn root(&self, v: Value) -> Value {
        self.roots[v.node].unwrap_or(v)
    }

    /// A view lies in its input's buffer.
    fn view(&self, i: usize, op: &dyn Op) -> Spot {
        let v = self.g.nodes[i].inputs[0];
        let input = &self.plan.spots[v.node][v.out];
        // The pass `layout` has copied what cannot be viewed. Of an op that says now that it cannot, or what cannot be, the plan is refused (`values_fit`).
        let (offset, strides) = op.alias(self.g.meta(v), &input.strides).unwrap_or((usize::MAX, vec![]));
        Spot { buffer: input.buffer, offset: input.offset.saturating_add(offset), strides }
    }

    /// A feed, state or constant has memory of its own, outside of the arena.
    fn source(&mut self, i: usize) -> Spot {
        let (node, end) = (&self.g.nodes[i], self.g.nodes.len());
        let meta = &node.outputs[0];
        self.plan.buffers.push(Buffer { home: Home::Source(i), bytes: meta.bytes(), first: 0, last: end });
        let sum = match node.kind {
            Kind::State(_) => &mut self.plan.memory.state,
            Kind::Const(_) => &mut self.plan.memory.constants,
            _ => &mut self.plan.memory.feeds,
        };
        *sum += meta.bytes();
        Spot { buffer: self.plan.buffers.len() - 1, offset: 0, strides: contiguous(&meta.shape) }
    }

    fn op(&mut self, i: usize, op: &dyn Op) -> Vec<Spot> {
        let g = self.g;
        let reuse = reused(op);
        // How often the op reads each value, views of it included.
        let mut reads: HashMap<Value, usize> = HashMap::new();
        if !reuse.is_empty() {
            g.nodes[i].inputs.iter().for_each(|v| *reads.entry(self.root(*v)).or_default() += 1);
        }
        let spots =
            (0..g.nodes[i].outputs.len()).map(|out| self.output(Value { node: i, out }, reuse.get(&out).copied(), &reads)).collect();
        if g.nodes[i].op::<Join>().is_some() {
            self.copy_into_join(i);
        }
        spots
    }

    /// Places an output of an op: in the buffer of the input that it reuses, in the state that it updates, in the Join that it becomes a
    /// part of, or in a buffer of its own.
    fn output(&mut self, value: Value, reused: Option<usize>, reads: &HashMap<Value, usize>) -> Spot {
        let i = value.node;
        let shared = reused.and_then(|input| self.shared(value, input, reads));
        if let (None, Some(input)) = (shared, reused) {
            self.plan.copies.push(Copy { node: i, input, out: value.out, at: 0 });
        }
        let place = shared.or_else(|| self.in_state(value));
        let (buffer, offset) = place.unwrap_or_else(|| self.in_arena(value));
        let read = self.last_read.get(&value).copied().unwrap_or(i);
        let last = crate::mutant!("plan-frees-a-node-early", read, read.saturating_sub(1).max(i));
        let b = &mut self.plan.buffers[buffer];
        b.last = b.last.max(last);
        Spot { buffer, offset, strides: contiguous(&self.g.meta(value).shape) }
    }

    /// (buffer, offset) of the input that an op overwrites with this output, if nothing needs the input afterwards.
    fn shared(&self, value: Value, input: usize, reads: &HashMap<Value, usize>) -> Option<(usize, usize)> {
        let (g, plan, i) = (self.g, &self.plan, value.node);
        let v = g.nodes[i].inputs[input];
        let from = &plan.spots[v.node][v.out];
        let root = self.root(v);
        // The input is the whole of its root's memory, and this node reads it last and only once.
        let whole = from.offset == plan.spots[root.node][root.out].offset && g.meta(root).bytes() == g.meta(value).bytes();
        let whole = whole && is_contiguous(&g.meta(v).shape, &from.strides);
        let free = match plan.buffers[from.buffer].home {
            Home::Arena(_) => true,
            Home::Source(s) => self.destined.get(&value) == Some(&s),
        };
        // A part of a Join's buffer is overwritten only by the value that takes its place there.
        let part = |v: Value| self.joined.contains_key(&v) || g.nodes[v.node].op::<Join>().is_some();
        let meant = match self.joined.get(&value) {
            Some(place) => self.joined.get(&root) == Some(place),
            None => crate::mutant!("plan-overwrites-what-is-joined", !part(root), true),
        };
        let last = crate::mutant!("plan-overwrites-what-is-read-later", self.last_read[&root] == i, true);
        (whole
            && crate::mutant!("plan-overwrites-what-is-read-twice", reads[&root] == 1, true)
            && (free && meant && last || self.lent.contains(&value)))
        .then_some((from.buffer, from.offset))
    }

    /// The buffer of the state that this value updates, if nothing reads the old value any more.
    fn in_state(&self, value: Value) -> Option<(usize, usize)> {
        let s = *self.destined.get(&value)?;
        let old = Value { node: s, out: 0 };
        // A state that was recorded later has no place yet.
        let spot = &self.plan.spots.get(s)?[0];
        let unread = self.last_read.get(&old).is_none_or(|&r| r < value.node);
        (self.updates.contains(&(old, value)) && unread).then_some((spot.buffer, 0))
    }

    /// The buffer of the Join that the value becomes a part of, or one of its own.
    fn in_arena(&mut self, value: Value) -> (usize, usize) {
        let i = value.node;
        let (join, at) = self.joined.get(&value).copied().unwrap_or((i, 0));
        if let Some(&buffer) = self.joints.get(&join) {
            return (buffer, at);
        }
        let bytes = if join == i { self.g.meta(value).bytes() } else { self.g.nodes[join].outputs[0].bytes() };
        self.plan.buffers.push(Buffer { home: Home::Arena(0), bytes, first: i, last: i });
        let buffer = self.plan.buffers.len() - 1;
        if join != i {
            self.joints.insert(join, buffer);
        }
        (buffer, at)
    }

    /// Copies for the inputs of a Join that were not computed in its buffer.
    fn copy_into_join(&mut self, i: usize) {
        let mut at = 0;
        for (input, &v) in self.g.nodes[i].inputs.iter().enumerate() {
            if self.joined.get(&self.root(v)).is_none_or(|place| place.0 != i) {
                self.plan.copies.push(Copy { node: i, input, out: 0, at });
            }
            at += self.g.meta(v).elements();
        }
    }
}

/// Output -> the input whose buffer it overwrites (see `Op::reuse`).
fn reused(op: &dyn Op) -> HashMap<usize, usize> {
    op.reuse().into_iter().rev().map(|(input, out)| (out, input)).collect()
}

/// Values that may use a state's buffer: its update, and the values that become it through ops that overwrite their input, as long as nothing
/// else reads those later. value -> the state's node.
fn destinations(g: &Graph, roots: &[Option<Value>], last_read: &HashMap<Value, usize>) -> HashMap<Value, usize> {
    let mut destined = HashMap::new();
    let mut reuse: HashMap<usize, HashMap<usize, usize>> = HashMap::new(); // by node: an optimizer's one node updates all parameters
    for &(state, value) in &g.updates {
        let mut v = value;
        while let Kind::Op(op) = &g.nodes[v.node].kind {
            if destined.insert(v, state.node).is_some() {
                break;
            }
            let Some(&input) = reuse.entry(v.node).or_insert_with(|| reused(&**op)).get(&v.out) else { break };
            let from = g.nodes[v.node].inputs[input];
            // The next op of the chain must be its last reader, so that nothing is overwritten that is still read.
            if roots[from.node].is_some() || last_read.get(&from) != Some(&v.node) {
                break;
            }
            v = from;
        }
    }
    destined
}

/// Values that can be computed in a Join's buffer, and those that they overwrite in place: value -> (the Join's node, elements before it).
fn joined(g: &Graph, last_read: &HashMap<Value, usize>, destined: &HashMap<Value, usize>) -> HashMap<Value, (usize, usize)> {
    // The value that `v` is a reshape of; None if it is another kind of view, or a source.
    fn plain(g: &Graph, v: Value) -> Option<Value> {
        let node = &g.nodes[v.node];
        match node.is_view() {
            true => node.op::<Reshape>().and_then(|_| plain(g, node.inputs[0])),
            false => (!node.is_source()).then_some(v),
        }
    }
    let mut places: HashMap<Value, (usize, usize)> = HashMap::new();
    for (join, node) in g.nodes.iter().enumerate().filter(|(_, n)| n.op::<Join>().is_some()) {
        let mut at = 0;
        for &input in &node.inputs {
            let (place, meta) = ((join, at), g.meta(input));
            at += meta.elements();
            let Some(mut v) = plain(g, input) else { continue };
            let free = |v: Value, places: &HashMap<Value, (usize, usize)>| !places.contains_key(&v) && !destined.contains_key(&v);
            let is_aligned = (place.1 * meta.dtype.size()).is_multiple_of(ALIGN);
            if !crate::mutant!("plan-joins-what-is-not-aligned", is_aligned, true)
                || !free(v, &places)
                || crate::mutant!("plan-joins-one-value-twice", node.inputs.iter().filter(|w| **w == input).count() > 1, false)
            {
                continue;
            }
            places.insert(v, place);
            while let Kind::Op(op) = &g.nodes[v.node].kind {
                let Some(&(k, _)) = op.reuse().iter().find(|p| p.1 == v.out) else { break };
                let Some(from) = plain(g, g.nodes[v.node].inputs[k]) else { break };
                let once = g.nodes[v.node].inputs.iter().filter(|w| plain(g, **w) == Some(from)).count() == 1;
                if last_read.get(&from) != Some(&v.node) || !once || !free(from, &places) || g.meta(from).bytes() != meta.bytes() {
                    break;
                }
                places.insert(from, place);
                v = from;
            }
        }
    }
    places
}
