//! Programs that are profiled: launches that CUPTI's records find their nodes by, or events around every node.

use super::{CudaProgram, Ready};
use crate::cpu::Data;
use crate::cuda::{Cuda, cupti, failed, nvtx};
use crate::error::Error;
use crate::graph::Kind;
use crate::passes::Mode;
use crate::profile::Node;
use crate::store::Store;
use cudarc::driver::{result, sys};
use std::ops::{Deref, Range};

/// A node's time in a profile.
pub struct Timed {
    /// What it is.
    pub node: Node,
    /// Milliseconds on the GPU.
    pub ms: f32,
}

/// Of each node the milliseconds from the beginning of a run until its end; None is what follows the last.
type Ends = Vec<(Option<usize>, f32)>;

impl Deref for Timed {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.node
    }
}

/// While a step is launched.
pub struct Marked {
    traced: bool,
    _ranges: nvtx::Ranges,
}

impl Drop for Marked {
    fn drop(&mut self) {
        if self.traced {
            cupti::at(None);
        }
    }
}

impl CudaProgram {
    /// Says which step is launched, to whoever listens.
    pub(super) fn mark(&self, step: usize) -> Marked {
        if self.traced > 0 {
            cupti::at(Some((self.traced as u64) << 32 | step as u64));
        }
        let _ranges = match nvtx::is_attached().then(|| self.node_of(step)).flatten() {
            Some(at) => {
                let node = &self.graph.nodes[self.nodes[at].0];
                nvtx::ranges([if node.scope.is_empty() { "(top level)" } else { &node.scope }, node.name()])
            }
            None => nvtx::ranges([]),
        };
        Marked { traced: self.traced > 0, _ranges }
    }

    /// The place among `nodes` of the one that a step belongs to.
    fn node_of(&self, step: usize) -> Option<usize> {
        let at = self.nodes.partition_point(|(_, range)| range.end <= step);
        self.nodes.get(at).filter(|(_, range)| range.contains(&step)).map(|_| at)
    }

    /// The nodes that run, and of each step the node.
    pub fn described(&self, feeds: &[(&str, Data)]) -> Result<(Vec<Node>, Vec<Option<usize>>), Error> {
        let chosen = self.chosen(feeds)?;
        let nodes = self.nodes.iter().map(|(i, range)| self.describe(*i, range, &chosen)).collect();
        Ok((nodes, (0..self.steps.len()).map(|step| self.node_of(step)).collect()))
    }

    fn describe(&self, i: usize, range: &Range<usize>, chosen: &[bool]) -> Node {
        let node = &self.graph.nodes[i];
        let Kind::Op(op) = &node.kind else { unreachable!("only ops have steps") };
        let mut cost = op.cost(&self.graph.inputs(i));
        let runs = |s: &usize| self.when[*s].is_none_or(|c| chosen[c]);
        // If steps were skipped, count only those that ran.
        if range.clone().any(|s| self.when[s].is_some()) {
            cost.flops = range.clone().filter(runs).map(|s| if let Ready::Gemm { flops, .. } = &self.steps[s] { *flops } else { 0 }).sum();
        }
        let tensor_cores = range.clone().filter(runs).any(|s| match &self.steps[s] {
            Ready::Launch { tensor_cores, .. } | Ready::Gemm { tensor_cores, .. } => *tensor_cores,
            Ready::Copy { .. } | Ready::Exchange { .. } | Ready::Await(_) => false,
        });
        let blocks = range.clone().filter(runs).map(|s| match &self.steps[s] {
            Ready::Launch { grid, .. } => Some(grid.iter().map(|&n| u64::from(n)).product()),
            Ready::Copy { .. } | Ready::Await(_) => Some(0),
            Ready::Gemm { .. } | Ready::Exchange { .. } => None,
        });
        let blocks: Option<u64> = blocks.collect::<Option<Vec<u64>>>().and_then(|all| all.into_iter().max().filter(|most| *most > 0));
        Node {
            op: op.name(),
            scope: node.scope.to_string(),
            backward: node.backward,
            inputs: self.graph.inputs(i),
            outputs: node.outputs.clone(),
            cost,
            tensor_cores,
            multiprocessors: blocks.map(|n| (n as f64 / f64::from(self.cuda.arch().multiprocessors)).min(1.0)),
            aside: range.clone().any(|s| matches!(self.steps[s], Ready::Exchange { beside: Some(_), .. })),
        }
    }

    /// Runs as ever, while CUPTI records. What was captured before is captured again, so that each node of the CUDA graph is known. `number`: the
    /// program's, from 1.
    pub fn run_traced(&mut self, store: &mut Store, feeds: &[(&str, Data)], number: u32) -> Result<(), Error> {
        if std::mem::replace(&mut self.traced, number) != number {
            self.forget();
        }
        self.run(store, feeds)
    }

    /// Runs once, node by node, with events around each. When it began by `now`, and of each node the milliseconds until its end.
    pub fn run_timed(&mut self, store: &mut Store, feeds: &[(&str, Data)], now: impl Fn() -> u64) -> Result<(u64, Ends), Error> {
        self.cuda.current();
        self.send(feeds)?;
        let (bases, chosen) = (self.bases(store)?, self.chosen(feeds)?);
        self.cuda.synchronize()?;
        let began = now();
        let stream = self.cuda.0.stream;
        let last = self.nodes.last().map_or(0, |n| n.1.end);
        let ranges = self.nodes.iter().enumerate().map(|(at, n)| (Some(at), n.1.clone()));
        let mut marks = vec![(None, Timer::record(stream)?)];
        // An exchange beside other work would count as the time of whatever waits for it.
        self.serial = true;
        for (at, range) in ranges.chain([(None, last..self.steps.len())]) {
            let launched = self.launch(range, &bases, &chosen);
            self.serial = launched.is_ok();
            launched?;
            marks.push((at, Timer::record(stream)?));
        }
        self.serial = false;
        self.cuda.synchronize()?;
        let ends = marks[1..].iter().map(|(at, mark)| Ok((*at, mark.since(&marks[0].1)?))).collect::<Result<_, Error>>()?;
        Ok((began, ends))
    }

    /// Runs twice, node by node, and times the second run.
    pub fn profile(&mut self, store: &mut Store, feeds: &[(&str, Data)]) -> Result<Vec<Timed>, Error> {
        let capture = std::mem::replace(&mut self.options.capture, Mode::Off);
        let run = self.run(store, feeds);
        self.options.capture = capture;
        run?;
        let (_, ends) = self.run_timed(store, feeds, || 0)?;
        let (nodes, mut start) = (self.described(feeds)?.0, 0.0);
        let own = nodes.into_iter().zip(ends).map(|(node, (_, end))| Timed { node, ms: end - std::mem::replace(&mut start, end) });
        Ok(own.collect())
    }
}

impl Cuda {
    /// Tells a profiler outside of the process to begin or to end its recording.
    pub fn window(&self, begins: bool) -> Result<(), Error> {
        self.current();
        // SAFETY: the context is current.
        let told = unsafe { if begins { sys::cuProfilerStart() } else { sys::cuProfilerStop() } };
        told.result().map_err(failed("telling the profiler"))
    }
}

/// A CUDA event that notes the time.
struct Timer(sys::CUevent);

impl Timer {
    fn record(stream: sys::CUstream) -> Result<Timer, Error> {
        let event = result::event::create(sys::CUevent_flags_enum::CU_EVENT_DEFAULT).map(Timer).map_err(failed("timing"))?;
        // SAFETY: both are alive.
        unsafe { result::event::record(event.0, stream) }.map_err(failed("timing"))?;
        Ok(event)
    }

    /// Milliseconds since another. Both must have passed.
    fn since(&self, other: &Timer) -> Result<f32, Error> {
        // SAFETY: both were recorded.
        unsafe { result::event::elapsed(other.0, self.0) }.map_err(failed("timing"))
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: made by `record`, destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
