//! The recorded step: plain data, in an order in which it can run.

use crate::meta::Meta;
use crate::op::Op;
use crate::ops::pointwise::Pointwise;
use std::sync::Arc;

/// Output `out` of node `node`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value {
    pub node: usize,
    pub out: usize,
}

#[derive(Clone, Debug)]
pub enum Kind {
    /// Handed in at every run.
    Feed(String),
    /// Outlives the run, in the Store.
    State(State),
    /// Numbers fixed when the graph was recorded: tables.
    Const(Arc<Vec<f32>>),
    /// Inputs: a loss, then the values to differentiate it by. The pass `autodiff` replaces it.
    Grad,
    Op(Arc<dyn Op>),
}

#[derive(Clone, Debug)]
pub struct State {
    pub name: String,
    pub init: Init,
    pub role: Role,
}

/// What a State is to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// What an optimizer trains and what a model's file holds.
    Param,
    /// A weight that is loaded and never trained: it has no gradient and no moments, checkpoints leave it out, and a pass may keep it in
    /// another type.
    Frozen,
    /// Everything else that outlives a run.
    Carried,
}

/// How a State begins, drawn from (seed, name).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Full(f32),
    Normal {
        std: f32,
    },
    /// Normal, cut at two standard deviations.
    Truncated {
        std: f32,
    },
    Uniform {
        bound: f32,
    },
}

#[derive(Clone, Debug)]
pub struct Node {
    pub kind: Kind,
    pub inputs: Vec<Value>,
    pub outputs: Vec<Meta>,
    /// Where in the model it was recorded: `blocks.3.attn`.
    pub scope: Arc<str>,
    /// Recorded by a gradient.
    pub backward: bool,
    /// The repeated unit of the model that it belongs to; 0 outside of all. What crosses from one to the next is kept by `recompute`.
    pub block: u32,
    /// Keeps the types that it was recorded with (see `Recorder::typed`).
    pub typed: bool,
    /// May be computed in a narrow type though no loss depends on it (see `Recorder::narrow`).
    pub narrow: bool,
}

impl Node {
    pub fn op<T: Op>(&self) -> Option<&T> {
        match &self.kind {
            Kind::Op(op) => (**op).is::<T>(),
            _ => None,
        }
    }

    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::Feed(_) => "feed",
            Kind::State(_) => "state",
            Kind::Const(_) => "const",
            Kind::Grad => "grad",
            Kind::Op(op) => op.name(),
        }
    }

    pub fn is_view(&self) -> bool {
        matches!(&self.kind, Kind::Op(op) if op.is_view())
    }

    pub fn is_cast(&self) -> bool {
        self.op::<Pointwise>().is_some_and(|p| p.is_cast())
    }

    /// Feeds, states and constants: there before the first op runs.
    pub fn is_source(&self) -> bool {
        matches!(self.kind, Kind::Feed(_) | Kind::State(_) | Kind::Const(_))
    }
}

/// Nodes stand in running order: every input comes before its reader.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub nodes: Vec<Node>,
    /// What a run answers with.
    pub outputs: Vec<(String, Value)>,
    /// States that take a new value at the end of a run: (the state, its value).
    pub updates: Vec<(Value, Value)>,
}

impl Graph {
    pub fn meta(&self, v: Value) -> &Meta {
        &self.nodes[v.node].outputs[v.out]
    }

    pub fn inputs(&self, node: usize) -> Vec<Meta> {
        self.nodes[node].inputs.iter().map(|&v| self.meta(v).clone()).collect()
    }

    /// Values that must be there when the run ends.
    pub fn roots(&self) -> impl Iterator<Item = Value> + '_ {
        self.outputs.iter().map(|o| o.1).chain(self.updates.iter().map(|u| u.1))
    }

    /// The root with this number.
    pub fn root(&self, k: usize) -> Value {
        self.outputs.get(k).map_or_else(|| self.updates[k - self.outputs.len()].1, |o| o.1)
    }

    pub fn states(&self) -> impl Iterator<Item = (&State, &Meta)> {
        self.nodes.iter().filter_map(|n| match &n.kind {
            Kind::State(s) => Some((s, &n.outputs[0])),
            _ => None,
        })
    }

    pub fn feeds(&self) -> impl Iterator<Item = (&str, &Meta)> {
        self.nodes.iter().filter_map(|n| match &n.kind {
            Kind::Feed(name) => Some((name.as_str(), &n.outputs[0])),
            _ => None,
        })
    }

    /// For every node, which nodes read it.
    pub fn readers(&self) -> Vec<Vec<usize>> {
        let mut readers = vec![vec![]; self.nodes.len()];
        for (i, node) in self.nodes.iter().enumerate() {
            for v in &node.inputs {
                if readers[v.node].last() != Some(&i) {
                    readers[v.node].push(i);
                }
            }
        }
        readers
    }

    /// For every node, whether one of its results must be there when the run ends.
    pub fn root_nodes(&self) -> Vec<bool> {
        let mut is_root = vec![false; self.nodes.len()];
        self.roots().for_each(|v| is_root[v.node] = true);
        is_root
    }

    /// For every node, whether it depends on one of `from`.
    pub fn depends_on(&self, from: impl Iterator<Item = Value>) -> Vec<bool> {
        let mut hit = vec![false; self.nodes.len()];
        for v in from {
            hit[v.node] = true;
        }
        for i in 0..self.nodes.len() {
            hit[i] = hit[i] || self.nodes[i].inputs.iter().any(|v| hit[v.node]);
        }
        hit
    }

    /// For every node, whether one of `to` depends on it.
    pub fn needed_by(&self, to: impl Iterator<Item = Value>) -> Vec<bool> {
        let mut hit = vec![false; self.nodes.len()];
        for v in to {
            hit[v.node] = true;
        }
        for i in (0..self.nodes.len()).rev() {
            if hit[i] {
                for v in &self.nodes[i].inputs {
                    hit[v.node] = true;
                }
            }
        }
        hit
    }

    /// Puts node `order[k]` at position k.
    pub fn reorder(&mut self, order: &[usize]) {
        let mut place = vec![0; order.len()];
        for (new, &old) in order.iter().enumerate() {
            place[old] = new;
        }
        let mut nodes: Vec<Option<Node>> = std::mem::take(&mut self.nodes).into_iter().map(Some).collect();
        self.nodes = order.iter().map(|&i| nodes[i].take().expect("each node once")).collect();
        let moved = |v: &mut Value| v.node = place[v.node];
        self.nodes.iter_mut().for_each(|n| n.inputs.iter_mut().for_each(moved));
        self.outputs.iter_mut().for_each(|o| moved(&mut o.1));
        for (s, v) in &mut self.updates {
            moved(s);
            moved(v);
        }
    }
}
