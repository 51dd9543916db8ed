//! Profiles: when every node of a program ran. On a GPU CUPTI says so, for replayed CUDA graphs as well; where it cannot be used, steps are launched one
//! by one with events around each node. On the CPU a clock is read after each node. A program that is not profiled does none of this.

use crate::cpu::Data;
use crate::cuda::cupti::{Cupti, Recorded, Way, Work};
use crate::cuda::{Folders, Timed};
use crate::error::Error;
use crate::meta::Meta;
use crate::op::Cost;
use crate::program::{Device, Loaded, Program};
use crate::store::Store;
use std::time::Instant;

/// What times were measured with.
#[derive(Clone, Debug, PartialEq)]
pub enum Clock {
    /// CUPTI's activity records: the library and its version.
    Cupti(String),
    /// CUDA events around the launches of each node, and why not CUPTI.
    Events(String),
    /// The host's clock, after each node on the CPU.
    Host,
}

/// A node of a program, as a profile shows it.
#[derive(Clone, Debug)]
pub struct Node {
    /// The op's name.
    pub op: &'static str,
    /// Where in the model it was recorded.
    pub scope: String,
    /// Whether it belongs to the backward pass.
    pub backward: bool,
    /// Shapes and types of its inputs.
    pub inputs: Vec<Meta>,
    /// Shapes and types of its outputs.
    pub outputs: Vec<Meta>,
    /// What it has to compute and move.
    pub cost: Cost,
    /// Whether its kernels use tensor cores.
    pub tensor_cores: bool,
    /// Of the GPU's multiprocessors, the share that its largest launch has blocks for; None where a library decides that.
    pub multiprocessors: Option<f64>,
    /// Whether it exchanges values with other ranks beside other work.
    pub aside: bool,
}

/// Where something ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// On the host: what it does for the device.
    Host,
    /// Copies between host and device.
    Copy,
    /// Kernels, or nodes on the CPU.
    Compute,
    /// What is exchanged with other ranks beside these.
    Exchange,
}

/// What ran.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// A node: its program, and its place among the program's nodes.
    Node(usize, usize),
    /// A copy of so many bytes, or filling so many.
    Copy(u64),
    /// Anything else, by the span's name.
    Other,
}

/// A span of time, in nanoseconds since the profile began.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// When it began to have the device for itself: kernels are launched while the one before still runs, and wait.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// When it was launched.
    pub launched: u64,
    /// Where it ran.
    pub track: Track,
    /// What ran.
    pub what: What,
    /// The kernel's name, or what the host did.
    pub name: String,
}

/// A program that was profiled.
#[derive(Clone, Debug)]
pub struct Profiled {
    /// Its name.
    pub name: String,
    /// Its nodes that run, in order; no views or sources.
    pub nodes: Vec<Node>,
    /// Of each launch, or on the CPU of each of the graph's nodes, the place among `nodes`.
    steps: Vec<Option<usize>>,
}

/// A profile: programs, and what ran when.
#[derive(Clone, Debug)]
pub struct Profile {
    /// What times were measured with.
    pub clock: Clock,
    /// The programs that ran.
    pub programs: Vec<Profiled>,
    /// What ran, by track, in order. On the compute track no two overlap.
    pub spans: Vec<Span>,
    /// Records that CUPTI had no room for.
    pub dropped: usize,
}

/// A profile in the making.
pub struct Profiler {
    clock: Clock,
    began: Instant,
    /// CUPTI, and its time at the beginning.
    cupti: Option<(Cupti, u64)>,
    programs: Vec<Profiled>,
    spans: Vec<Span>,
}

impl Profiler {
    /// Begins a profile. `cupti`: whether it is to be used on a GPU.
    pub fn start(device: &Device, folders: &Folders, cupti: bool) -> Result<Profiler, Error> {
        device.synchronize()?;
        let (clock, cupti) = match device {
            Device::Cpu(..) => (Clock::Host, None),
            Device::Cuda(..) if !cupti => (Clock::Events("it was not asked for".into()), None),
            Device::Cuda(..) => match Cupti::start(folders) {
                Ok(cupti) => (Clock::Cupti(cupti.what.clone()), Some(cupti)),
                Err(why) => (Clock::Events(why), None),
            },
        };
        let cupti = cupti.map(|cupti| {
            let now = cupti.now();
            (cupti, now)
        });
        Ok(Profiler { clock, began: Instant::now(), cupti, programs: vec![], spans: vec![] })
    }

    /// Nanoseconds since it began.
    pub fn now(&self) -> u64 {
        self.at(Instant::now())
    }

    fn at(&self, time: Instant) -> u64 {
        time.duration_since(self.began).as_nanos() as u64
    }

    /// Notes what the host did from `start` until now.
    pub fn host(&mut self, name: &str, start: u64) {
        let end = self.now();
        self.spans.push(Span { start, end, launched: start, track: Track::Host, what: What::Other, name: name.into() });
    }

    fn program(&mut self, name: &str) -> usize {
        let known = self.programs.iter().position(|p| p.name == name);
        known.unwrap_or_else(|| {
            self.programs.push(Profiled { name: name.into(), nodes: vec![], steps: vec![] });
            self.programs.len() - 1
        })
    }

    /// Nodes that followed each other, each with its end; None is what belongs to no node.
    fn follow(&mut self, program: usize, mut start: u64, ends: impl IntoIterator<Item = (Option<usize>, u64)>) {
        for (node, end) in ends {
            let (what, name) = match node {
                Some(node) => (What::Node(program, node), self.programs[program].nodes[node].op),
                None => (What::Other, STORES),
            };
            if end > start || node.is_some() {
                self.spans.push(Span { start, end, launched: start, track: Track::Compute, what, name: name.into() });
            }
            start = end;
        }
    }

    /// Ends it: waits for the device, and collects what CUPTI has recorded.
    pub fn finish(mut self, device: &Device) -> Result<Profile, Error> {
        device.synchronize()?;
        let mut dropped = 0;
        if let Some((cupti, began)) = self.cupti.take() {
            let recorded = cupti.stop().map_err(Error::Cuda)?;
            dropped = recorded.dropped;
            self.spans.extend(spans(&self.programs, recorded, began));
        }
        self.spans.sort_by_key(|s| (s.track, s.start, s.end));
        apart(&mut self.spans);
        Ok(Profile { clock: self.clock, programs: self.programs, spans: self.spans, dropped })
    }
}

/// What copies results into states at the end of a run.
const STORES: &str = "results into states";

/// CUPTI's records as spans.
fn spans(programs: &[Profiled], recorded: Recorded, began: u64) -> impl Iterator<Item = Span> {
    recorded.records.into_iter().map(move |(r, step)| {
        let node = step.and_then(|step| {
            let program = (step >> 32).checked_sub(1)? as usize;
            let node = (*programs.get(program)?.steps.get(step as u32 as usize)?)?;
            Some(What::Node(program, node))
        });
        let of_program = step.is_some();
        let (track, bytes, name) = match r.work {
            Work::Kernel(name) => (Track::Compute, None, name),
            Work::Set(bytes) => (Track::Compute, Some(bytes), "memset".into()),
            Work::Copy(Way::ToDevice, bytes) => (Track::Copy, Some(bytes), "feeds to the GPU".into()),
            Work::Copy(Way::ToHost, bytes) => (Track::Copy, Some(bytes), "results to the host".into()),
            Work::Copy(Way::Within, bytes) => {
                (Track::Compute, Some(bytes), if of_program { STORES } else { "feeds into their place" }.into())
            }
        };
        let is_aside = |what: &What| matches!(what, What::Node(p, n) if programs[*p].nodes.get(*n).is_some_and(|n| n.aside));
        let track = if node.as_ref().is_some_and(is_aside) && track == Track::Compute { Track::Exchange } else { track };
        let what = node.or(bytes.map(What::Copy)).unwrap_or(What::Other);
        let [start, end] = [r.start, r.end].map(|t| t.saturating_sub(began));
        Span { start, end, launched: start, track, what, name }
    })
}

/// Gives the time in which two spans of the compute track overlap to the first: the second was launched early, and waits.
fn apart(spans: &mut [Span]) {
    let mut last = 0;
    for span in spans.iter_mut().filter(|s| s.track == Track::Compute) {
        span.start = span.start.max(last);
        span.end = span.end.max(span.start);
        last = span.end;
    }
}

impl Device {
    /// Marks the beginning or the end of what a profiler outside of the process is to record; nothing on the CPU.
    pub fn window(&self, begins: bool) -> Result<(), Error> {
        match self {
            Device::Cpu(..) => Ok(()),
            Device::Cuda(cuda, _) => cuda.window(begins),
        }
    }
}

impl Program {
    /// Runs once as `run` does, into a profile.
    pub fn trace(&mut self, name: &str, store: &mut Store, feeds: &[(&str, Data)], profiler: &mut Profiler) -> Result<(), Error> {
        let began = profiler.now();
        self.go_on(store)?;
        let number = match self.is_warming_up() {
            true => profiler.program(&format!("{name}, warming up")),
            false => profiler.program(name),
        };
        let known = !profiler.programs[number].nodes.is_empty();
        match self.now_mut() {
            Loaded::Cpu(p) => {
                let mut ends = vec![];
                let start = profiler.now();
                p.run_with(store, feeds, |node| ends.push((node, Instant::now())))?;
                if !known {
                    (profiler.programs[number].nodes, profiler.programs[number].steps) = p.described();
                }
                let places = &profiler.programs[number].steps;
                let ends: Vec<(Option<usize>, u64)> =
                    ends.into_iter().map(|(node, end)| (node.and_then(|n| places[n]), profiler.at(end))).collect();
                // Views and sources take no time of their own.
                let (last, run) = (ends.len().saturating_sub(1), ends.iter().enumerate());
                let run: Vec<_> = run.filter(|(i, e)| e.0.is_some() || *i == last).map(|(_, e)| *e).collect();
                profiler.follow(number, start, run);
            }
            Loaded::Cuda(p) if profiler.cupti.is_some() => {
                p.run_traced(store, feeds, number as u32 + 1)?;
                if !known {
                    (profiler.programs[number].nodes, profiler.programs[number].steps) = p.described(feeds)?;
                }
                self.note();
            }
            Loaded::Cuda(p) => {
                let (start, ends) = p.run_timed(store, feeds, || profiler.now())?;
                if !known {
                    (profiler.programs[number].nodes, profiler.programs[number].steps) = p.described(feeds)?;
                }
                let ends = ends.into_iter().map(|(node, ms)| (node, start + (ms as f64 * 1e6) as u64));
                profiler.follow(number, start, ends);
            }
        }
        profiler.host(&format!("run {name}"), began);
        Ok(())
    }

    /// Runs once with a timer around every node; on a GPU only.
    pub fn profile(&mut self, store: &mut Store, feeds: &[(&str, Data)]) -> Result<Vec<Timed>, Error> {
        match self.now_mut() {
            Loaded::Cpu(_) => Err(Error::Cuda("profiling needs a GPU".into())),
            Loaded::Cuda(p) => p.profile(store, feeds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::cupti::Record;
    use crate::graph::Init;
    use crate::passes::Switches;
    use crate::record::Recorder;
    use crate::{Cpu, DType};

    fn span(track: Track, start: u64, end: u64) -> Span {
        Span { start, end, launched: start, track, what: What::Other, name: String::new() }
    }

    /// Kernels that were launched early wait for the one before: their times add up to what the device was busy.
    #[test]
    fn time_that_two_kernels_share_is_the_first_ones() {
        use Track::{Compute, Copy};
        let mut spans = vec![span(Copy, 0, 50), span(Compute, 10, 20), span(Compute, 15, 30), span(Compute, 16, 18), span(Compute, 40, 45)];
        apart(&mut spans);
        let times: Vec<(u64, u64, u64)> = spans.iter().map(|s| (s.launched, s.start, s.end)).collect();
        assert_eq!(times, [(0, 0, 50), (10, 10, 20), (15, 20, 30), (16, 30, 30), (40, 40, 45)]);
        let busy: u64 = spans[1..].iter().map(|s| s.end - s.start).sum();
        assert_eq!(busy, 25);
    }

    #[test]
    fn records_find_their_nodes() {
        let programs = [Profiled { name: "train".into(), nodes: vec![], steps: vec![Some(0), Some(0), Some(1), None] }];
        let record = |start: u64, work| Record { start: 1_000 + start, end: 1_010 + start, stream: 1, node: 1, call: 2, work };
        let kernel = |start, name: &str| record(start, Work::Kernel(name.into()));
        let step = |i: u64| Some(1 << 32 | i);
        let records = vec![
            (kernel(0, "a"), step(1)),
            (kernel(20, "b"), step(2)),
            (kernel(40, "c"), None),
            (record(50, Work::Copy(Way::Within, 64)), step(3)),
            (record(60, Work::Copy(Way::ToDevice, 8)), None),
            (record(70, Work::Copy(Way::Within, 8)), None),
        ];
        let found: Vec<Span> = spans(&programs, Recorded { records, dropped: 0 }, 1_000).collect();
        let is = |i: usize| (found[i].start, found[i].track, found[i].what.clone(), found[i].name.as_str());
        assert_eq!(is(0), (0, Track::Compute, What::Node(0, 0), "a"));
        assert_eq!(is(1), (20, Track::Compute, What::Node(0, 1), "b"));
        assert_eq!(is(2), (40, Track::Compute, What::Other, "c"));
        assert_eq!(is(3), (50, Track::Compute, What::Copy(64), STORES));
        assert_eq!(is(4), (60, Track::Copy, What::Copy(8), "feeds to the GPU"));
        assert_eq!(is(5), (70, Track::Compute, What::Copy(8), "feeds into their place"));
    }

    /// The clock's nodes are those of the graph, in order, without gaps, and their times add up to that of the run. A profile changes no number.
    #[test]
    fn nodes_on_the_cpu_add_up_to_the_run() {
        const RUNS: usize = 20;
        let graph = || {
            let r = Recorder::new();
            let w = r.param("w", &[256, 256], Init::Normal { std: 0.1 });
            let x = r.feed("x", &[256, 256], DType::F32);
            let y = r.scope("blocks.0", || x.matmul(w).silu().matmul(w));
            r.update(w, w * 0.5);
            r.output("y", y);
            r.finish()
        };
        let device = Device::cpu(Cpu::new(1));
        let x: Vec<f32> = (0..256 * 256).map(|i| (i % 7) as f32 - 3.0).collect();
        let mut both = vec![];
        for traced in [false, true] {
            let mut store = Store::new(1);
            let mut program = Program::load(graph(), &Switches::default(), &device, &mut store).unwrap();
            let mut profiler = Profiler::start(&device, &Folders::default(), true).unwrap();
            for _ in 0..RUNS {
                match traced {
                    true => program.trace("train", &mut store, &[("x", Data::F32(&x))], &mut profiler).unwrap(),
                    false => program.run(&mut store, &[("x", Data::F32(&x))]).unwrap(),
                }
            }
            both.push(program.read("y", &store).unwrap());
            let profile = profiler.finish(&device).unwrap();
            assert_eq!((profile.clock, profile.dropped), (Clock::Host, 0));
            if !traced {
                assert!(profile.spans.is_empty());
                continue;
            }
            let nodes = &profile.programs[0].nodes;
            assert!(
                nodes.iter().filter(|n| n.op == "matmul" && n.scope == "blocks.0" && n.cost.flops == 2 << 24).count() == 2,
                "{nodes:?}"
            );
            let (host, compute): (Vec<&Span>, Vec<&Span>) = profile.spans.iter().partition(|s| s.track == Track::Host);
            assert_eq!(compute.iter().filter(|s| matches!(s.what, What::Node(0, _))).count(), RUNS * nodes.len());
            let runs: Vec<&&Span> = host.iter().filter(|s| s.end > s.start).collect();
            let mut shares = vec![];
            for run in &runs {
                let inside = compute.iter().filter(|s| run.start <= s.start && s.end <= run.end);
                shares.push(inside.map(|s| s.end - s.start).sum::<u64>() as f64 / (run.end - run.start) as f64);
            }
            assert!(shares.iter().all(|&s| s <= 1.0), "{shares:?}");
            // A busy machine may stop this thread between two nodes, in some runs of many but not in all.
            assert!(shares.iter().any(|&s| s > 0.8), "{shares:?}");
        }
        assert_eq!(both[0], both[1]);
    }
}
