//! A step of a rank on two streams: one computes, the other exchanges values with the ranks that have other examples.

use crate::run::node_seconds;
use engine::Compiled;
use engine::graph::{Kind, Node};
use engine::kernel::{Arch, Io, Step};
use engine::ops::collective::aside::is_aside;
use engine::ops::collective::{Collective, What};
use engine::passes::Target;
use engine::plan::view_roots;

/// Seconds to begin an exchange, and of each step of a ring from one GPU to the next, in a machine and between two. Assumed: NCCL's own cost model has 0.6 to 3.4 us
/// over NVLink and 2.7 to 14 over a network, by protocol.
const BEGIN: f64 = 1e-5;
const STEP_INSIDE: f64 = 1e-6;
const STEP_BETWEEN: f64 = 5e-6;

/// How fast GPUs reach each other, in GB/s.
#[derive(Clone, Copy)]
pub struct Wires {
    /// GPUs of one machine.
    pub node: usize,
    /// What a GPU sends to others of its machine.
    pub inside: f64,
    /// What a GPU sends to other machines.
    pub between: f64,
}

/// How many ranks there are.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub data: usize,
    pub tensor: usize,
}

impl Sizes {
    pub fn of(self, group: &str) -> usize {
        if group == "data" { self.data } else { self.tensor }
    }
}

impl Wires {
    /// Seconds of an exchange by rings, as NCCL's cost model has it: every rank is a step, so the latency grows with their number, and of the steps one for each
    /// further machine goes over the network. `bytes`: of the whole. Ranks that share weights are next to each other; a ring that leaves a machine does so on the
    /// network cards of all its GPUs that belong to the group.
    pub fn seconds(&self, what: What, group: &str, bytes: usize, sizes: Sizes) -> f64 {
        let n = sizes.of(group);
        if n == 1 {
            return 0.0;
        }
        let beside = if group == "data" { (self.node / sizes.tensor).max(1) } else { self.node };
        let machines = n.div_ceil(beside);
        let rate = if machines > 1 { self.inside.min(self.between * beside.min(n) as f64) } else { self.inside };
        let times = if what == What::AllReduce { 2.0 } else { 1.0 };
        let latency = (n - machines) as f64 * STEP_INSIDE + (machines - 1) as f64 * STEP_BETWEEN;
        BEGIN + times * (latency + (n - 1) as f64 / n as f64 * bytes as f64 / (rate * 1e9))
    }
}

/// One kind of exchange: what it is, among which ranks, and where in the step.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sort {
    pub program: &'static str,
    pub what: String,
    pub group: &'static str,
    pub place: &'static str,
    pub runs: &'static str,
}

pub struct Exchange {
    pub what: What,
    pub sort: Sort,
    /// Of the whole tensors.
    pub bytes: usize,
}

/// How an exchange runs.
pub const BESIDE: &str = "beside arithmetic";
pub const IN_TURN: &str = "in its turn";

/// A node that takes time, and the exchanges whose results it reads.
pub struct Event {
    pub seconds: f64,
    pub exchange: Option<Exchange>,
    waits: Vec<usize>,
}

/// The exchange of a node, if it is one.
fn collective(node: &Node, arch: Arch) -> Option<Collective> {
    let Kind::Op(op) = &node.kind else { return None };
    if !["all_reduce", "all_gather", "reduce_scatter", "all_to_all"].contains(&op.name()) {
        return None;
    }
    let metas = &node.outputs;
    match op.cuda(&Io::plain(metas, metas, arch)).steps.pop()? {
        Step::Collective(c) => Some(c),
        _ => None,
    }
}

/// The nodes of a program in their order.
pub fn events(program: &'static str, c: &Compiled, target: Target) -> Vec<Event> {
    let arch = match target {
        Target::Cuda(arch) => arch,
        Target::Cpu => Arch { sm: 90, multiprocessors: 132 },
    };
    let roots = view_roots(&c.graph);
    let backward = c.graph.nodes.iter().position(|n| n.backward).unwrap_or(c.graph.nodes.len());
    let last = c.graph.nodes.iter().rposition(|n| n.backward).unwrap_or(backward);
    let event = |(i, node): (usize, &Node)| {
        let waits = node.inputs.iter().map(|v| roots[v.node].unwrap_or(*v).node).collect();
        let Some(own) = collective(node, arch) else {
            return Event { seconds: node_seconds(c, i, target), exchange: None, waits };
        };
        let place = match i {
            _ if node.backward => "backward",
            _ if i > last => "update",
            _ => "forward",
        };
        let runs = if is_aside(node) { BESIDE } else { IN_TURN };
        let sort = Sort { program, what: node.name().to_string(), group: own.group.name, place, runs };
        // The larger side is the whole.
        let bytes = c.graph.inputs(i).iter().zip(&node.outputs).map(|(x, y)| x.bytes().max(y.bytes())).sum();
        Event { seconds: 0.0, exchange: Some(Exchange { what: own.what, sort, bytes }), waits }
    };
    c.graph.nodes.iter().enumerate().map(event).collect()
}

/// How long a program takes.
#[derive(Default)]
pub struct Taken {
    pub compute: f64,
    pub exchange: f64,
    /// The time that nothing is computed because of an exchange, by the sort that was waited for.
    pub waited: Vec<(Sort, f64)>,
}

impl Taken {
    pub fn exposed(&self) -> f64 {
        self.waited.iter().map(|w| w.1).sum()
    }
}

/// Runs the events in their order. Some exchanges run beside the arithmetic until something reads their results; for the others it waits. `speed`: what the estimated
/// arithmetic is multiplied by.
pub fn run(events: &[Event], wires: &Wires, sizes: Sizes, speed: f64) -> Taken {
    let mut taken = Taken::default();
    let (mut now, mut busy) = (0.0f64, 0.0f64);
    let mut done = vec![0.0f64; events.len()];
    let mut last: Option<&Sort> = None;
    for (i, event) in events.iter().enumerate() {
        let late = event.waits.iter().filter(|w| events[**w].exchange.is_some()).max_by(|a, b| done[**a].total_cmp(&done[**b]));
        let ready = late.map_or(0.0, |&w| done[w]);
        let waits = |taken: &mut Taken, now: &mut f64| {
            if let (true, Some(&w)) = (ready > *now, late) {
                let sort = events[w].exchange.as_ref().expect("only exchanges are waited for").sort.clone();
                taken.waited.push((sort, ready - *now));
                *now = ready;
            }
        };
        match &event.exchange {
            None => {
                // What takes no time waits for nothing: a view, or a source.
                if event.seconds > 0.0 {
                    waits(&mut taken, &mut now);
                }
                now += event.seconds * speed;
                taken.compute += event.seconds * speed;
            }
            Some(e) => {
                let seconds = wires.seconds(e.what, e.sort.group, e.bytes, sizes);
                taken.exchange += seconds;
                if e.sort.runs == BESIDE {
                    busy = busy.max(now).max(ready) + seconds;
                    done[i] = busy;
                    last = Some(&e.sort);
                } else {
                    waits(&mut taken, &mut now);
                    now += seconds;
                    done[i] = now;
                    taken.waited.push((e.sort.clone(), seconds));
                }
            }
        }
    }
    if let (true, Some(sort)) = (busy > now, last) {
        taken.waited.push((sort.clone(), busy - now));
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: a ring of n ranks on m machines takes n - m steps inside and m - 1 between, twice for an all-reduce.
    #[test]
    fn a_ring_takes_longer_with_every_rank() {
        let wires = Wires { node: 8, inside: 360.0, between: 45.0 };
        let us = |what, group, bytes, data, tensor| 1e6 * wires.seconds(what, group, bytes, Sizes { data, tensor });
        let near = |x: f64, y: f64| assert!((x - y).abs() < 1e-6 * y.max(1.0), "{x} is not {y}");
        near(us(What::AllReduce, "data", 0, 1, 1), 0.0);
        near(us(What::AllReduce, "data", 0, 8, 1), 10.0 + 2.0 * 7.0);
        near(us(What::AllGather, "data", 0, 8, 1), 10.0 + 7.0);
        near(us(What::AllReduce, "data", 0, 1024, 1), 10.0 + 2.0 * (896.0 + 5.0 * 127.0));
        // Four of a machine's eight GPUs are in the group: 512 ranks on 128 machines.
        near(us(What::AllReduce, "data", 0, 512, 2), 10.0 + 2.0 * (384.0 + 5.0 * 127.0));
        near(us(What::AllReduce, "tensor", 0, 512, 2), 10.0 + 2.0);
        // 360 MB at 360 GB/s, 7/8 of it twice.
        near(us(What::AllReduce, "data", 360_000_000, 8, 1), 10.0 + 2.0 * (7.0 + 875.0));
        // One network card of 6 GB/s a GPU: 48 GB/s a machine.
        let slow = Wires { between: 6.0, ..wires };
        let seconds = slow.seconds(What::AllGather, "data", 480_000_000, Sizes { data: 16, tensor: 1 });
        near(1e6 * seconds, 10.0 + 14.0 + 5.0 + 1e4 * 15.0 / 16.0);
    }
}
