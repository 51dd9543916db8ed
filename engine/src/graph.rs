//! The graph: a recorded program as plain data, its nodes in execution order.

use crate::meta::Meta;
use crate::op::Op;
use crate::ops::pointwise::Pointwise;
use crate::ranks::Parts;
use std::sync::Arc;

/// Output `out` of node `node`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value {
    /// Index into [`Graph::nodes`].
    pub node: usize,
    /// Which of the node's outputs.
    pub out: usize,
}

/// What a node is.
#[derive(Clone, Debug)]
pub enum Kind {
    /// An input, by name, given at every run.
    Feed(String),
    /// A tensor that keeps its value between runs, in the [`Store`](crate::Store).
    State(State),
    /// Constant numbers, such as RoPE tables.
    Const(Arc<Vec<f32>>),
    /// Gradients of its first input, a loss, with respect to its other inputs. The pass `autodiff` replaces it by ops.
    Grad,
    /// An operation on its inputs.
    Op(Arc<dyn Op>),
}

/// A tensor that keeps its value between runs.
#[derive(Clone, Debug)]
pub struct State {
    /// Its name in the store and in checkpoints.
    pub name: String,
    /// Its value before the first run.
    pub init: Init,
    /// What it is to the model.
    pub role: Role,
}

/// What a state is to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A parameter: trained by an optimizer, and saved in the model's file.
    Param,
    /// A weight that is loaded and never trained: no gradient and no optimizer state, not part of checkpoints, and a pass may store it in
    /// another type.
    Frozen,
    /// Everything else that is kept between runs: optimizer states, KV caches, counters.
    Carried,
}

/// How a state is initialized. Random numbers depend on the store's seed and the state's name only.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// This number everywhere.
    Full(f32),
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f32,
    },
    /// Normal with mean 0, truncated at two standard deviations.
    Truncated {
        /// Standard deviation before truncation.
        std: f32,
    },
    /// Uniform between `-bound` and `bound`.
    Uniform {
        /// The largest absolute value.
        bound: f32,
    },
    /// The logarithm of a number that is uniform between these.
    LogOfUniform {
        /// The least.
        low: f32,
        /// The largest.
        high: f32,
    },
    /// What softplus turns into a number between these, whose logarithm is uniform: biases of step sizes.
    StepSize {
        /// The least.
        low: f32,
        /// The largest.
        high: f32,
    },
}

/// One op or source of a graph.
#[derive(Clone, Debug)]
pub struct Node {
    /// What it is.
    pub kind: Kind,
    /// The values that it reads.
    pub inputs: Vec<Value>,
    /// Shape and type of each output.
    pub outputs: Vec<Meta>,
    /// Where in the model it was recorded, such as `blocks.3.attn`.
    pub scope: Arc<str>,
    /// Whether it belongs to the backward pass.
    pub backward: bool,
    /// The block of the model that it belongs to (see [`Recorder::block`](crate::Recorder::block)), numbered from 1; 0 outside of all blocks.
    pub block: u32,
    /// Whether it keeps the types that it was recorded with (see [`Recorder::typed`](crate::Recorder::typed)).
    pub typed: bool,
    /// Whether a mixed-precision pass may round it although no loss depends on it (see [`Recorder::narrow`](crate::Recorder::narrow)).
    pub narrow: bool,
}

impl Node {
    /// Its op, if that is a `T`.
    pub fn op<T: Op>(&self) -> Option<&T> {
        match &self.kind {
            Kind::Op(op) => (**op).is::<T>(),
            _ => None,
        }
    }

    /// Its op's name, or `feed`, `state`, `const`, `grad`.
    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::Feed(_) => "feed",
            Kind::State(_) => "state",
            Kind::Const(_) => "const",
            Kind::Grad => "grad",
            Kind::Op(op) => op.name(),
        }
    }

    /// Whether its output is its input's memory with other strides.
    pub fn is_view(&self) -> bool {
        matches!(&self.kind, Kind::Op(op) if op.is_view())
    }

    /// Whether it only changes its input's type.
    pub fn is_cast(&self) -> bool {
        self.op::<Pointwise>().is_some_and(|p| p.is_cast())
    }

    /// Whether it is a feed, state or constant, available before the first op runs.
    pub fn is_source(&self) -> bool {
        matches!(self.kind, Kind::Feed(_) | Kind::State(_) | Kind::Const(_))
    }
}

/// A program: nodes in execution order (every node after its inputs), outputs, and updates of states.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// In execution order.
    pub nodes: Vec<Node>,
    /// Values that can be read after a run, by name.
    pub outputs: Vec<(String, Value)>,
    /// (state, its new value at the end of a run).
    pub updates: Vec<(Value, Value)>,
    /// Feeds and states, by name, of which this rank has a part only.
    pub parts: Parts,
}

impl Graph {
    /// Shape and type of a value.
    pub fn meta(&self, v: Value) -> &Meta {
        &self.nodes[v.node].outputs[v.out]
    }

    /// Shapes and types of a node's inputs.
    pub fn inputs(&self, node: usize) -> Vec<Meta> {
        self.nodes[node].inputs.iter().map(|&v| self.meta(v).clone()).collect()
    }

    /// The values that a run is for: outputs, then new values of states.
    pub fn roots(&self) -> impl Iterator<Item = Value> + '_ {
        self.outputs.iter().map(|o| o.1).chain(self.updates.iter().map(|u| u.1))
    }

    /// The root number `k`, counted as in [`Graph::roots`].
    pub fn root(&self, k: usize) -> Value {
        self.outputs.get(k).map_or_else(|| self.updates[k - self.outputs.len()].1, |o| o.1)
    }

    /// How many blocks of the model it has (see [`Recorder::block`](crate::Recorder::block)).
    pub fn blocks(&self) -> usize {
        self.nodes.iter().map(|n| n.block).max().unwrap_or(0) as usize
    }

    /// All states, with their shapes and types.
    pub fn states(&self) -> impl Iterator<Item = (&State, &Meta)> {
        self.nodes.iter().filter_map(|n| match &n.kind {
            Kind::State(s) => Some((s, &n.outputs[0])),
            _ => None,
        })
    }

    /// Names, shapes and types of all feeds.
    pub fn feeds(&self) -> impl Iterator<Item = (&str, &Meta)> {
        self.nodes.iter().filter_map(|n| match &n.kind {
            Kind::Feed(name) => Some((name.as_str(), &n.outputs[0])),
            _ => None,
        })
    }

    /// For every node, the nodes that read it, each once.
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

    /// For every node, whether one of its outputs is a root.
    pub fn root_nodes(&self) -> Vec<bool> {
        let mut is_root = vec![false; self.nodes.len()];
        self.roots().for_each(|v| is_root[v.node] = true);
        is_root
    }

    /// For every node, whether it is one of `from` or depends on one of them.
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

    /// For every node, whether it is one of `to` or one of them depends on it.
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

    /// Reorders the nodes: node `order[k]` moves to position k.
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
