//! States that hold a term of a sum on each rank: gradients that are added up over the micro-batches of a step. The program that reads their sum for something else
//! than to add to it, such as the optimizer, exchanges it: once a step, not once a micro-batch.
//!
//! Such states are never in a checkpoint ([`SCRATCH`]), so that no other number of ranks has to take them over.

use super::partition::{Division, Way, made_as_part};
use crate::graph::{Graph, Init, Kind, Role, Value};
use crate::op::Share;
use crate::ops::pointwise::Bin;
use std::collections::HashSet;

/// How the names of states begin that mean nothing after a step, such as sums of gradients over its micro-batches. They are in no checkpoint.
pub const SCRATCH: &str = "scratch/";

/// A gradient that is added to what earlier programs of the step have left in a state.
pub struct Accumulation {
    /// The state's node.
    pub state: usize,
    /// The node that adds the two.
    pub sum: usize,
    /// What is added: an output of a Grad node, which nothing else reads.
    pub gradient: Value,
}

/// All of a graph. What a state begins with is on every rank, and a term is not: it must begin with zeros.
pub fn accumulations(g: &Graph) -> Vec<Accumulation> {
    let reads = g.reads();
    let begins_empty = |v: Value| matches!(&g.nodes[v.node].kind, Kind::State(s) if s.role == Role::Carried && s.init == Init::Full(0.0) && s.name.starts_with(SCRATCH));
    let is_gradient = |v: Value| matches!(g.nodes[v.node].kind, Kind::Grad);
    let mut found = vec![];
    for sum in 0..g.nodes.len() {
        let Some([a, b]) = g.binary(sum, Bin::Add) else { continue };
        let (state, gradient) = if is_gradient(a) { (b, a) } else { (a, b) };
        if begins_empty(state) && is_gradient(gradient) && g.meta(state) == g.meta(gradient) && reads.once(state) && reads.once(gradient) {
            found.push(Accumulation { state: state.node, sum, gradient });
        }
    }
    found
}

/// Gradients of a Grad node that are sums of terms, one of each rank: every op that the loss depends on, and that reads the value, computes a part of the work.
pub struct Sums {
    /// Of each gradient, whether it is one.
    pub are: Vec<bool>,
    /// Nodes that every rank computes of such values alone (a concatenation of weights), and that are read for parts of the work.
    pub through: HashSet<usize>,
}

impl Sums {
    /// Those of node `grad`.
    pub fn new(g: &Graph, d: &Division, grad: usize, parts: usize) -> Sums {
        let inputs = &g.nodes[grad].inputs;
        let (needed, asked) = (g.needed_by(std::iter::once(inputs[0])), inputs[1..].iter().copied().collect());
        let reads = Reads { g, d, parts, needed, asked, readers: g.readers() };
        let (mut are, mut through) = (vec![], HashSet::new());
        for &v in &inputs[1..] {
            let mut own = HashSet::new();
            are.push(reads.are_apart(v, &mut own));
            through.extend(own.into_iter().filter(|_| are.last() == Some(&true)));
        }
        Sums { are, through }
    }
}

/// Who reads what a gradient is asked for.
struct Reads<'a> {
    g: &'a Graph,
    d: &'a Division,
    /// How many ranks there are.
    parts: usize,
    /// Nodes that the loss depends on.
    needed: Vec<bool>,
    asked: HashSet<Value>,
    readers: Vec<Vec<usize>>,
}

impl Reads<'_> {
    /// Whether a value is read, and by all for a part of the work; `through`: ops in between.
    fn are_apart(&self, v: Value, through: &mut HashSet<usize>) -> bool {
        let mut read = false;
        for &reader in self.readers[v.node].iter().filter(|r| self.needed[**r]) {
            let node = &self.g.nodes[reader];
            for k in (0..node.inputs.len()).filter(|&k| node.inputs[k] == v) {
                let shown = Value { node: reader, out: 0 };
                let apart = match &self.d.ways[reader] {
                    Way::Axis(_, axis) => match axis.x[k] {
                        Share::Whole => true,
                        // A view of which a part is read, such as a row that every example has, is made for that part of the whole.
                        Share::Dim(d) if !self.asked.contains(&v) => {
                            made_as_part(self.g, v, d, self.parts).is_some_and(|(_, a)| a.x.iter().all(|x| *x == Share::Whole))
                        }
                        _ => false,
                    },
                    Way::Whole => {
                        let whole = node.inputs.iter().all(|v| self.d.shares[v.node][v.out] == Share::Whole);
                        let alone = whole && node.outputs.len() == 1 && !self.asked.contains(&shown);
                        alone && (through.contains(&reader) || through.insert(reader) && self.are_apart(shown, through))
                    }
                    _ => false,
                };
                if !apart {
                    return false;
                }
                read = true;
            }
        }
        read
    }
}
