//! Which value lives where, for how long, and how much memory that takes: known before anything runs.

mod arena;

use crate::graph::{Graph, Kind, Value};
use crate::meta::{contiguous, is_contiguous};
use crate::op::{Cost, Op};
use crate::ops::concat::Join;
use crate::ops::view::Reshape;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Offsets are multiples of this, so that every buffer starts on a cache line (and on what vector loads of a GPU want).
const ALIGN: usize = 256;

/// Memory that several values may share, one after the other.
#[derive(Clone, Debug)]
pub struct Buffer {
    pub home: Home,
    pub bytes: usize,
    /// Positions of the first write and the last read.
    pub first: usize,
    pub last: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Home {
    /// Of the source node with this index: a feed, a state or a constant.
    Source(usize),
    /// Byte offset in the arena.
    Arena(usize),
}

/// Where a value is.
#[derive(Clone, Debug)]
pub struct Spot {
    pub buffer: usize,
    /// In elements.
    pub offset: usize,
    pub strides: Vec<usize>,
}

/// An input that an op needs in its output's buffer, and that could not be put there in the first place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Copy {
    pub node: usize,
    pub input: usize,
    pub out: usize,
    /// Elements of the output before it.
    pub at: usize,
}

/// Bytes, before anything runs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory {
    /// Parameters, moments, carries, caches.
    pub state: usize,
    /// Tables fixed in the graph.
    pub constants: usize,
    pub feeds: usize,
    pub activations: usize,
    /// What the scratch memory of ops adds to that, where it does not fit beside what is alive.
    pub workspace: usize,
}

impl Memory {
    pub fn peak(&self) -> usize {
        self.state + self.constants + self.feeds + self.activations + self.workspace
    }
}

#[derive(Clone, Debug)]
pub struct Plan {
    /// For every node, of every output.
    pub spots: Vec<Vec<Spot>>,
    pub buffers: Vec<Buffer>,
    /// Made before a node runs.
    pub copies: Vec<Copy>,
    /// (state node, value): copied after the last node.
    pub stores: Vec<(usize, Value)>,
    /// For every node, the buffer that is its scratch memory while it runs.
    scratch: Vec<Option<usize>>,
    pub memory: Memory,
    pub cost: Cost,
}

/// f32 elements of workspace for every node, on the device that will run it, given where every value lies.
pub type WorkspaceOf<'a> = &'a dyn Fn(&Graph, &[Vec<Spot>]) -> Vec<usize>;

impl Plan {
    /// Bytes of the arena: activations, and scratch memory between and behind them.
    pub fn arena(&self) -> usize {
        self.memory.activations + self.memory.workspace
    }

    /// Where in the arena a node's scratch memory is.
    pub fn scratch(&self, node: usize) -> usize {
        match self.scratch[node].map(|b| &self.buffers[b].home) {
            Some(Home::Arena(offset)) => *offset,
            _ => 0,
        }
    }

    /// Gives every buffer memory of its own, with `gap` bytes behind it that nobody may write: for checks. Returns where the gaps are.
    pub fn spread(&mut self, gap: usize) -> Vec<std::ops::Range<usize>> {
        let (mut at, mut gaps) = (0, vec![]);
        for b in &mut self.buffers {
            if let Home::Arena(offset) = &mut b.home {
                *offset = at;
                let end = at + b.bytes;
                at = (end + gap).next_multiple_of(ALIGN);
                gaps.push(end..at);
            }
        }
        (self.memory.activations, self.memory.workspace) = (at, 0);
        gaps
    }

    pub fn new(g: &Graph, workspace: WorkspaceOf) -> Plan {
        let end = g.nodes.len();
        let roots = view_roots(g);
        let last_read = last_reads(g, &roots);
        let destined = destinations(g, &roots, &last_read);
        let joined = joined(g, &last_read, &destined);
        let updates: HashSet<(Value, Value)> = g.updates.iter().copied().collect();
        let mut joints: HashMap<usize, usize> = HashMap::new(); // a Join's node -> its buffer
        let mut plan = Plan {
            spots: vec![],
            buffers: vec![],
            copies: vec![],
            stores: vec![],
            scratch: vec![],
            memory: Memory::default(),
            cost: Cost::default(),
        };
        for (i, node) in g.nodes.iter().enumerate() {
            let spots = match &node.kind {
                Kind::Op(op) if op.is_view() => {
                    let input = &plan.spots[node.inputs[0].node][node.inputs[0].out];
                    let alias = op.alias(g.meta(node.inputs[0]), &input.strides);
                    let (offset, strides) = alias.expect("the layout step copied what cannot be viewed");
                    vec![Spot { buffer: input.buffer, offset: input.offset + offset, strides }]
                }
                Kind::Op(op) => {
                    let reuse = reused(&**op);
                    // How often the op reads each value, views of it included.
                    let mut reads: HashMap<Value, usize> = HashMap::new();
                    if !reuse.is_empty() {
                        node.inputs.iter().for_each(|v| *reads.entry(roots[v.node].unwrap_or(*v)).or_default() += 1);
                    }
                    let mut spot = |plan: &mut Plan, out: usize| {
                        let value = Value { node: i, out };
                        let pair = reuse.get(&out).copied();
                        let shared = pair.and_then(|input| {
                            let v = node.inputs[input];
                            let from = plan.spots[v.node][v.out].clone();
                            let root = roots[v.node].unwrap_or(v);
                            // All that the value has of its buffer, read here for the last time and by this input only.
                            let whole =
                                from.offset == plan.spots[root.node][root.out].offset && g.meta(root).bytes() == g.meta(value).bytes();
                            let whole = whole && is_contiguous(&g.meta(v).shape, &from.strides);
                            let free = match plan.buffers[from.buffer].home {
                                Home::Arena(_) => true,
                                Home::Source(s) => destined.get(&value) == Some(&s),
                            };
                            // A part of something joined is overwritten only by what takes its place there.
                            let part = |v: Value| joined.contains_key(&v) || g.nodes[v.node].op::<Join>().is_some();
                            let meant = match joined.get(&value) {
                                Some(place) => joined.get(&root) == Some(place),
                                None => crate::mutant!("plan-overwrites-what-is-joined", !part(root), true),
                            };
                            let last = crate::mutant!("plan-overwrites-what-is-read-later", last_read[&root] == i, true);
                            (whole && reads[&root] == 1 && free && meant && last).then_some((from.buffer, from.offset))
                        });
                        if let (None, Some(input)) = (shared, pair) {
                            plan.copies.push(Copy { node: i, input, out, at: 0 });
                        }
                        // A state's next value is written straight into the state once nobody reads the old one any more.
                        let direct = || {
                            let s = *destined.get(&value)?;
                            let old = Value { node: s, out: 0 };
                            let is_update = updates.contains(&(old, value));
                            // A state that is recorded later has no place yet.
                            let spot = &plan.spots.get(s)?[0];
                            (is_update && last_read.get(&old).is_none_or(|&r| r < i)).then_some((spot.buffer, 0))
                        };
                        let (buffer, offset) = shared.or_else(direct).unwrap_or_else(|| {
                            // In the buffer of what it will be joined to, or in one of its own.
                            let (join, at) = joined.get(&value).copied().unwrap_or((i, 0));
                            if let Some(&buffer) = joints.get(&join) {
                                return (buffer, at);
                            }
                            let bytes = if join == i { g.meta(value).bytes() } else { g.nodes[join].outputs[0].bytes() };
                            plan.buffers.push(Buffer { home: Home::Arena(0), bytes, first: i, last: i });
                            if join != i {
                                joints.insert(join, plan.buffers.len() - 1);
                            }
                            (plan.buffers.len() - 1, at)
                        });
                        let read = last_read.get(&value).copied().unwrap_or(i);
                        let last = crate::mutant!("plan-frees-a-node-early", read, read.saturating_sub(1).max(i));
                        plan.buffers[buffer].last = plan.buffers[buffer].last.max(last);
                        Spot { buffer, offset, strides: contiguous(&g.meta(value).shape) }
                    };
                    let spots = (0..node.outputs.len()).map(|out| spot(&mut plan, out)).collect();
                    if node.op::<Join>().is_some() {
                        let mut at = 0;
                        for (input, &v) in node.inputs.iter().enumerate() {
                            if joined.get(&(roots[v.node].unwrap_or(v))).is_none_or(|place| place.0 != i) {
                                plan.copies.push(Copy { node: i, input, out: 0, at });
                            }
                            at += g.meta(v).elements();
                        }
                    }
                    spots
                }
                _ => {
                    let meta = &node.outputs[0];
                    plan.buffers.push(Buffer { home: Home::Source(i), bytes: meta.bytes(), first: 0, last: end });
                    let sum = match node.kind {
                        Kind::State(_) => &mut plan.memory.state,
                        Kind::Const(_) => &mut plan.memory.constants,
                        _ => &mut plan.memory.feeds,
                    };
                    *sum += meta.bytes();
                    vec![Spot { buffer: plan.buffers.len() - 1, offset: 0, strides: contiguous(&meta.shape) }]
                }
            };
            plan.spots.push(spots);
            if let Kind::Op(op) = &node.kind {
                let c = op.cost(&g.inputs(i));
                plan.cost.flops = plan.cost.flops.saturating_add(c.flops);
                plan.cost.bytes = plan.cost.bytes.saturating_add(c.bytes);
            }
        }
        for &(state, value) in &g.updates {
            if plan.spots[value.node][value.out].buffer != plan.spots[state.node][0].buffer {
                plan.stores.push((state.node, value));
            }
        }
        plan.memory.activations = arena::assign(&mut plan.buffers);
        for (i, elements) in workspace(g, &plan.spots).into_iter().enumerate() {
            let bytes = 4 * elements;
            plan.scratch.push((bytes > 0).then_some(plan.buffers.len()));
            plan.buffers.extend((bytes > 0).then_some(Buffer { home: Home::Arena(0), bytes, first: i, last: i }));
        }
        plan.memory.workspace = arena::assign(&mut plan.buffers).saturating_sub(plan.memory.activations);
        plan
    }

    /// The most memory that each part of the model holds at any one time: values that ops recorded there have made, and the
    /// workspace of an op while it runs. A part is a scope up to its first number: `blocks.3`, `loss`.
    pub fn by_part(&self, g: &Graph, workspace: WorkspaceOf) -> BTreeMap<String, usize> {
        let part = |scope: &str| -> String {
            let mut words = scope.split('.');
            let first = words.next().unwrap_or_default();
            match words.next().filter(|w| w.parse::<usize>().is_ok()) {
                Some(number) => format!("{first}.{number}"),
                None => first.to_string(),
            }
        };
        // (position, change in bytes) for every part.
        let mut events: BTreeMap<String, Vec<(usize, isize)>> = BTreeMap::new();
        let workspace = workspace(g, &self.spots);
        for (i, node) in g.nodes.iter().enumerate().filter(|(_, n)| !n.is_source() && !n.is_view()) {
            let list = events.entry(part(&node.scope)).or_default();
            let scratch = 4 * workspace[i] as isize;
            list.extend([(i, scratch), (i + 1, -scratch)]);
            for spot in &self.spots[i] {
                let b = &self.buffers[spot.buffer];
                if b.first == i && matches!(b.home, Home::Arena(_)) {
                    list.extend([(i, b.bytes as isize), (b.last + 1, -(b.bytes as isize))]);
                }
            }
        }
        let most = |mut list: Vec<(usize, isize)>| {
            list.sort();
            list.iter()
                .scan(0, |now, (_, change)| {
                    Some({
                        *now += change;
                        *now
                    })
                })
                .max()
                .unwrap_or(0) as usize
        };
        events.into_iter().map(|(name, list)| (if name.is_empty() { "(top level)".into() } else { name }, most(list))).collect()
    }

    /// Buffers whose lifetimes cross must not overlap.
    pub fn verify(&self) -> Result<(), String> {
        let arena: Vec<(usize, &Buffer)> =
            self.buffers.iter().filter_map(|b| if let Home::Arena(o) = b.home { Some((o, b)) } else { None }).collect();
        for (i, (o, a)) in arena.iter().enumerate() {
            for (p, b) in &arena[..i] {
                let together = a.first <= b.last && b.first <= a.last;
                if together && o < &(p + b.bytes) && p < &(o + a.bytes) {
                    return Err(format!("{a:?} overlaps {b:?}"));
                }
            }
        }
        Ok(())
    }
}

/// For a view, the value whose memory it is.
pub fn view_roots(g: &Graph) -> Vec<Option<Value>> {
    let mut roots: Vec<Option<Value>> = vec![None; g.nodes.len()];
    for (i, node) in g.nodes.iter().enumerate() {
        if node.is_view() {
            let v = node.inputs[0];
            roots[i] = Some(roots[v.node].unwrap_or(v));
        }
    }
    roots
}

/// For every value that is no view, the last position that reads it, views of it included; the end, for a root.
pub fn last_reads(g: &Graph, roots: &[Option<Value>]) -> HashMap<Value, usize> {
    let root = |v: Value| roots[v.node].unwrap_or(v);
    let mut last = HashMap::new();
    for (i, node) in g.nodes.iter().enumerate().filter(|(_, n)| !n.is_view()) {
        for &v in &node.inputs {
            last.insert(root(v), i);
        }
    }
    for v in g.roots() {
        last.insert(root(v), g.nodes.len());
    }
    last
}

/// For the outputs that start out in an input's buffer, which input that is.
fn reused(op: &dyn Op) -> HashMap<usize, usize> {
    op.reuse().into_iter().rev().map(|(input, out)| (out, input)).collect()
}

/// Values that may live in a state's buffer: its next value, and what leads to it through ops that work in their input's
/// buffer, as long as nobody else reads that any later. value -> the state's node.
fn destinations(g: &Graph, roots: &[Option<Value>], last_read: &HashMap<Value, usize>) -> HashMap<Value, usize> {
    let mut destined = HashMap::new();
    let mut reuse: HashMap<usize, HashMap<usize, usize>> = HashMap::new(); // by node: an optimizer's has all parameters
    for &(state, value) in &g.updates {
        let mut v = value;
        while let Kind::Op(op) = &g.nodes[v.node].kind {
            if destined.insert(v, state.node).is_some() {
                break;
            }
            let Some(&input) = reuse.entry(v.node).or_insert_with(|| reused(&**op)).get(&v.out) else { break };
            let from = g.nodes[v.node].inputs[input];
            // Read for the last time where the next of the chain is made: nothing overwrites what is still wanted.
            if roots[from.node].is_some() || last_read.get(&from) != Some(&v.node) {
                break;
            }
            v = from;
        }
    }
    destined
}

/// Values that can lie where a Join wants them, with what they are made from in place: value -> (the Join's node, elements before it).
fn joined(g: &Graph, last_read: &HashMap<Value, usize>, destined: &HashMap<Value, usize>) -> HashMap<Value, (usize, usize)> {
    // Reshapes change nothing about where a value lies; other views do.
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
            if !(place.1 * meta.dtype.size()).is_multiple_of(ALIGN)
                || !free(v, &places)
                || node.inputs.iter().filter(|w| **w == input).count() > 1
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
