//! The memory plan of a graph: where every value lies, for how long, and how much memory that takes, known before anything runs.

mod arena;
mod place;
mod verify;

pub use verify::Said;

use crate::error::Error;
use crate::graph::{Graph, Value};
use crate::meta::MOST_BYTES;
use crate::op::Cost;
use crate::ops::collective::aside;
use std::collections::{BTreeMap, HashMap};

/// Buffers start at multiples of so many bytes: aligned for cache lines and for a GPU's vector loads.
const ALIGN: usize = 256;

/// A piece of memory. Several values may use it one after the other, in place.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// Where it lies.
    pub home: Home,
    /// Its size.
    pub bytes: usize,
    /// Position of the node that writes it first; 0 for sources.
    pub first: usize,
    /// Position of the node that reads it last.
    pub last: usize,
}

/// Which allocation a buffer is in.
#[derive(Clone, Debug, PartialEq)]
pub enum Home {
    /// The memory of the source node with this index: a feed, a state or a constant.
    Source(usize),
    /// The arena, at this byte offset.
    Arena(usize),
}

/// Where a value lies.
#[derive(Clone, Debug)]
pub struct Spot {
    /// Index into [`Plan::buffers`].
    pub buffer: usize,
    /// Of its first element in the buffer, in elements.
    pub offset: usize,
    /// In elements, one for each dimension.
    pub strides: Vec<usize>,
}

/// A copy of an input into an output's buffer, before a node runs: the op overwrites it there (`Op::reuse`), and the input is still needed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Copy {
    /// The node that the copy is for.
    pub node: usize,
    /// Which of its inputs is copied.
    pub input: usize,
    /// Into the buffer of which of its outputs.
    pub out: usize,
    /// Offset in that output, in elements.
    pub at: usize,
}

/// Bytes that a program needs, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory {
    /// States: parameters, optimizer states, KV caches, counters.
    pub state: usize,
    /// Constants recorded in the graph, such as RoPE tables.
    pub constants: usize,
    /// Buffers for the inputs of a run.
    pub feeds: usize,
    /// The arena's part for values that nodes compute.
    pub activations: usize,
    /// What scratch memory of ops adds to the arena; most of it fits into gaps between activations.
    pub workspace: usize,
    /// States in pinned host memory, which `state` does not count.
    pub host: usize,
}

impl Memory {
    /// All of them together.
    pub fn peak(&self) -> usize {
        self.state + self.constants + crate::mutant!("peak-without-feeds", self.feeds, 0) + self.activations + self.workspace
    }
}

/// Where everything lies and what the whole graph costs.
#[derive(Clone, Debug)]
pub struct Plan {
    /// For every node, where each of its outputs lies.
    pub spots: Vec<Vec<Spot>>,
    /// All buffers, scratch memory included.
    pub buffers: Vec<Buffer>,
    /// Copies that are made before a node runs.
    pub copies: Vec<Copy>,
    /// (state's node, value): updates that are copied into their state after the last node.
    pub stores: Vec<(usize, Value)>,
    /// For every node, the buffer of its scratch memory.
    scratch: Vec<Option<usize>>,
    /// Totals by purpose.
    pub memory: Memory,
    /// Sum over all nodes.
    pub cost: Cost,
}

/// A function that says how many f32 elements of scratch memory every node needs on the target device, given where values lie.
pub type WorkspaceOf<'a> = &'a dyn Fn(&Graph, &[Vec<Spot>]) -> Vec<usize>;

impl Plan {
    /// Bytes of the arena: activations and scratch memory.
    pub fn arena(&self) -> usize {
        self.memory.activations + self.memory.workspace
    }

    /// Byte offset of a node's scratch memory in the arena.
    pub fn scratch(&self, node: usize) -> usize {
        match self.scratch[node].map(|b| &self.buffers[b].home) {
            Some(Home::Arena(offset)) => *offset,
            _ => 0,
        }
    }

    /// Bytes of a node's scratch memory.
    pub fn scratch_bytes(&self, node: usize) -> usize {
        self.scratch.get(node).copied().flatten().map_or(0, |b| self.buffers[b].bytes)
    }

    /// For tests: gives every buffer memory of its own, with a guard zone of `gap` bytes after it. Returns the guard zones.
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

    /// Plans a graph that all passes have rewritten; `workspace` says what scratch memory its nodes need. An error: an op says of a view or of its scratch
    /// memory what cannot be.
    pub fn new(g: &Graph, workspace: WorkspaceOf) -> Result<Plan, Error> {
        let mut plan = place::place(g);
        // Before anybody computes with them.
        plan.values_fit(g).map_err(Error::Plan)?;
        plan.memory.activations = arena::assign(&mut plan.buffers);
        for (i, elements) in workspace(g, &plan.spots).into_iter().enumerate() {
            let bytes = elements.checked_mul(4).filter(|b| *b <= MOST_BYTES).ok_or_else(|| verify::too_much(g, i, elements))?;
            plan.scratch.push((bytes > 0).then_some(plan.buffers.len()));
            plan.buffers.extend((bytes > 0).then_some(Buffer { home: Home::Arena(0), bytes, first: i, last: i }));
        }
        plan.memory.workspace = arena::assign(&mut plan.buffers).saturating_sub(plan.memory.activations);
        Ok(plan)
    }

    /// The peak memory of each part of the model: values computed by ops that were recorded there, and their scratch memory. A part is a
    /// scope up to its first number: `blocks.3`, `loss`.
    pub fn by_part(&self, g: &Graph, workspace: WorkspaceOf) -> BTreeMap<String, usize> {
        // (position, change in bytes) for every part.
        let mut events: BTreeMap<String, Vec<(usize, isize)>> = BTreeMap::new();
        let workspace = workspace(g, &self.spots);
        for (i, node) in g.nodes.iter().enumerate().filter(|(_, n)| !n.is_source() && !n.is_view()) {
            let list = events.entry(part(&node.scope)).or_default();
            let scratch = 4 * workspace[i].min(MOST_BYTES) as isize;
            list.extend([(i, scratch), (i + 1, -scratch)]);
            for spot in &self.spots[i] {
                let b = &self.buffers[spot.buffer];
                if b.first == i && matches!(b.home, Home::Arena(_)) {
                    list.extend([
                        (i, b.bytes as isize),
                        (crate::mutant!("parts-of-a-plan-end-early", b.last + 1, b.last), -(b.bytes as isize)),
                    ]);
                }
            }
        }
        let named = |name: String| if name.is_empty() { "(top level)".into() } else { name };
        events.into_iter().map(|(name, changes)| (named(name), peak(changes))).collect()
    }
}

/// A scope up to its first number: `blocks.3` for `blocks.3.attn`, `loss` for `loss.head`.
fn part(scope: &str) -> String {
    let mut words = scope.split('.');
    let first = words.next().unwrap_or_default();
    match words.next().filter(|w| w.parse::<usize>().is_ok()) {
        Some(number) => format!("{first}.{number}"),
        None => first.to_string(),
    }
}

/// The largest running sum of (position, change in bytes).
fn peak(mut changes: Vec<(usize, isize)>) -> usize {
    changes.sort();
    let (mut now, mut most) = (0, 0);
    for (_, change) in changes {
        now += change;
        most = most.max(now);
    }
    most as usize
}

/// For every node, if it is a view: the value whose memory it shows.
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

/// For every value that is no view, the position of its last reader, readers of its views included; the graph's end for a root.
pub fn last_reads(g: &Graph, roots: &[Option<Value>]) -> HashMap<Value, usize> {
    let root = |v: Value| roots[v.node].unwrap_or(v);
    let mut last = HashMap::new();
    for (i, node) in g.nodes.iter().enumerate().filter(|(_, n)| !n.is_view()) {
        for &v in &node.inputs {
            last.insert(root(v), i);
        }
    }
    last.extend(g.roots().map(|v| (root(v), g.nodes.len())));
    aside::hold(g, roots, &mut last);
    last
}
