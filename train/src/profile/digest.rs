//! The numbers of a profile, per step.

use super::Measured;
use super::roof::{Bound, Roof};
use engine::profile::{Clock, Node, Span, Track, What};
use serde::Serialize;
use std::collections::BTreeMap;

/// A node, or all nodes of an op or a layer: times, bytes and FLOPs of one step.
#[derive(Clone, Debug, Default, Serialize, PartialEq)]
pub struct Row {
    pub name: String,
    /// Nodes that run in a step.
    pub nodes: f64,
    pub ms: f64,
    /// Of the time in which the device is busy.
    pub share: f64,
    /// By the plan.
    pub flops: f64,
    pub bytes: f64,
    pub tflop_per_s: f64,
    pub gb_per_s: f64,
    /// Milliseconds that it takes at least by the roofline.
    pub roof_ms: Option<f64>,
    /// How many times as long it takes; None where latency bounds it, which the roofline does not know.
    pub times_roof: Option<f64>,
    /// What bounds most of its time.
    pub bound: Option<Bound>,
    /// The share of its time in nodes that use tensor cores.
    pub tensor_cores: f64,
    /// Its bytes beside what the memory moves in that time.
    pub of_bandwidth: Option<f64>,
    /// Of those nodes that use tensor cores, their FLOPs beside what the tensor cores compute in their time.
    pub of_tensor_cores: Option<f64>,
    /// Of the nodes where that is known, by time: the share of the multiprocessors that their launches have blocks for.
    pub multiprocessors: Option<f64>,
}

/// Time in which the device was idle between two things that it did.
#[derive(Clone, Debug, Default, Serialize, PartialEq)]
pub struct Gap {
    pub after: String,
    pub before: String,
    /// Of a step.
    pub count: f64,
    pub ms: f64,
}

/// A profile's numbers. Times are milliseconds of a step.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Digest {
    pub title: String,
    pub device: String,
    pub on_gpu: bool,
    /// What the times were measured with.
    pub clock: String,
    /// Why nodes were launched one by one, where they were.
    pub one_by_one: Option<String>,
    pub steps: u64,
    /// A step without a profile, before and after those that were profiled.
    pub plain_ms: [f64; 2],
    /// A step while it was profiled.
    pub step_ms: f64,
    /// How much longer than the mean of the plain steps, as a share.
    pub overhead: f64,
    /// The device was busy.
    pub busy_ms: f64,
    /// It was not.
    pub idle_ms: f64,
    /// Of the busy time, what belongs to a node of a program.
    pub attributed: f64,
    /// Of the busy time, in nodes that use tensor cores.
    pub tensor_cores: f64,
    /// Exchanges with other ranks that run beside other work; and of that time, what other work covers.
    pub exchange_ms: f64,
    pub hidden_ms: f64,
    /// Kernels and copies of a step.
    pub launches: f64,
    /// Records that were lost.
    pub dropped: usize,
    pub roof: Roof,
    pub flops: f64,
    pub bytes: f64,
    /// Milliseconds of a step by the roofline of its nodes.
    pub roof_ms: Option<f64>,
    pub ops: Vec<Row>,
    pub layers: Vec<Row>,
    pub nodes: Vec<Row>,
    /// What belongs to no node: copies, kernels that were not recognised.
    pub others: Vec<Row>,
    pub copies: Vec<Row>,
    pub gaps: Vec<Gap>,
}

/// The name of a node as a modeller knows it: `blocks.3.attn / flash_attention_grad`.
pub fn title(node: &Node) -> String {
    match node.scope.is_empty() {
        true => op(node),
        false => format!("{} / {}", node.scope, op(node)),
    }
}

/// The op, and whether it runs in the backward pass, where its name does not say so.
fn op(node: &Node) -> String {
    let says = node.op.ends_with("_grad") || node.op.ends_with("_backward");
    format!("{}{}", node.op, if node.backward && !says { " (backward)" } else { "" })
}

/// The part of a scope that is a layer: `blocks.3` of `blocks.3.attn`, `head` of `head.norm`.
fn layer(node: &Node) -> String {
    let parts: Vec<&str> = node.scope.split('.').collect();
    let number = parts.iter().position(|p| p.bytes().all(|b| b.is_ascii_digit()) && !p.is_empty());
    match &parts[..=number.unwrap_or(0)] {
        [""] => "outside of layers".into(),
        parts => parts.join("."),
    }
}

impl Digest {
    pub fn new(title: &str, device: &str, m: &Measured, roof: Roof) -> Digest {
        let p = &m.profile;
        let steps = m.steps as f64;
        let compute: Vec<&Span> = p.spans.iter().filter(|s| s.track == Track::Compute).collect();
        let busy: u64 = compute.iter().map(|s| s.end - s.start).sum();
        let busy_ms = ms(busy) / steps;
        let (known, mut roof) = (known(m), roof);
        if p.clock == Clock::Host {
            let nodes =
                known.iter().map(|(&(program, at), &(runs, _, time))| (&p.programs[program].nodes[at], 1e-3 * ms(time) / runs as f64));
            nodes.for_each(|(node, seconds)| roof.raise(node, seconds));
        }
        let sums = Sums { m, roof: &roof, busy_ms, known };
        let nodes = sums.rows(|program, node| match p.programs.len() {
            0 | 1 => self::title(node),
            _ => format!("{program}: {}", self::title(node)),
        });
        let (ops, layers) = (sums.rows(|_, node| op(node)), sums.rows(|_, node| layer(node)));
        let total = |f: fn(&Row) -> f64| ops.iter().map(f).sum::<f64>();
        let of_busy = |ms: f64| if busy_ms > 0.0 { ms / busy_ms } else { 0.0 };
        let (clock, one_by_one) = match &p.clock {
            Clock::Cupti(what) => (format!("CUPTI's records ({what})"), None),
            Clock::Events(why) => ("CUDA events around each node".into(), Some(why.clone())),
            Clock::Host => ("the clock, after each node".into(), None),
        };
        let beside: Vec<&Span> = p.spans.iter().filter(|s| s.track == Track::Exchange).collect();
        let (step_ms, plain) = (ms(m.window) / steps, (m.plain_ms[0] + m.plain_ms[1]) / 2.0);
        Digest {
            title: title.into(),
            device: device.into(),
            on_gpu: p.clock != Clock::Host,
            clock,
            one_by_one,
            steps: m.steps,
            plain_ms: m.plain_ms,
            step_ms,
            overhead: step_ms / engine::mutant!("overhead-of-one-plain-step", plain, m.plain_ms[0]) - 1.0,
            busy_ms,
            idle_ms: (step_ms - busy_ms).max(0.0),
            attributed: of_busy(total(|r| r.ms)),
            tensor_cores: of_busy(total(|r| r.ms * r.tensor_cores)),
            exchange_ms: ms(beside.iter().map(|s| s.end - s.start).sum()) / steps,
            hidden_ms: ms(together(&beside, &compute)) / steps,
            launches: compute.len() as f64 / steps,
            dropped: p.dropped,
            flops: total(|r| r.flops),
            bytes: total(|r| r.bytes),
            roof_ms: ops.iter().map(|r| r.roof_ms).sum(),
            others: sums.others(Track::Compute),
            copies: sums.others(Track::Copy),
            gaps: gaps(m, &compute),
            ops,
            layers,
            nodes,
            roof,
        }
    }

    /// The mean of the steps that were not profiled.
    pub fn plain(&self) -> f64 {
        (self.plain_ms[0] + self.plain_ms[1]) / 2.0
    }
}

/// Nanoseconds in which both have a span; those of one kind do not overlap, and are in order.
fn together(some: &[&Span], others: &[&Span]) -> u64 {
    let mut first = 0;
    let mut sum = 0;
    for span in some {
        first += others[first..].iter().take_while(|o| o.end <= span.start).count();
        let beside = others[first..].iter().take_while(|o| o.start < span.end);
        sum += beside.map(|o| o.end.min(span.end).saturating_sub(o.start.max(span.start))).sum::<u64>();
    }
    sum
}

fn ms(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e6
}

/// How often each node ran, its kernels, and their nanoseconds.
type Known = BTreeMap<(usize, usize), (usize, usize, u64)>;

fn known(m: &Measured) -> Known {
    let mut known: Known = BTreeMap::new();
    // A node may have several kernels: it ran as often as its program.
    let mut last = None;
    for span in m.profile.spans.iter().filter(|s| s.track == Track::Compute) {
        if let What::Node(program, node) = span.what {
            let entry = known.entry((program, node)).or_default();
            entry.0 += usize::from(last != Some((program, node)));
            entry.1 += 1;
            entry.2 += span.end - span.start;
            last = Some((program, node));
        } else {
            last = None;
        }
    }
    known
}

/// What some nodes did beside what the device could have done in their time.
#[derive(Default)]
struct Peaks {
    /// FLOPs of nodes with tensor cores, and of these cores in the same milliseconds.
    flops: f64,
    possible: f64,
    /// Milliseconds of nodes whose launches are known, and the same times their share of the multiprocessors.
    launched: f64,
    covered: f64,
}

impl Peaks {
    fn add(&mut self, node: &Node, roof: &Roof, flops: f64, ms: f64) {
        if let Some(peak) = roof.flops(node).filter(|_| node.tensor_cores) {
            self.flops += flops;
            self.possible += 1e-3 * ms * peak;
        }
        if let Some(share) = node.multiprocessors {
            self.launched += ms;
            self.covered += share * ms;
        }
    }

    fn of_tensor_cores(&self) -> Option<f64> {
        (self.possible > 0.0).then(|| self.flops / self.possible)
    }

    fn multiprocessors(&self) -> Option<f64> {
        (self.launched > 0.0).then(|| self.covered / self.launched)
    }
}

/// Whether latency bounds a kernel, by its seconds and those of the roofline: it has less than a microsecond's work, and is over before the device
/// is full, or waits more than it works (steps one after the other, a single block).
fn is_small(seconds: f64, roof: f64) -> bool {
    roof < 1e-6 && (seconds < 5e-6 || seconds > 10.0 * roof)
}

struct Sums<'a> {
    m: &'a Measured,
    roof: &'a Roof,
    busy_ms: f64,
    known: Known,
}

impl Sums<'_> {
    /// One row for each name, the longest first.
    fn rows(&self, name: impl Fn(&str, &Node) -> String) -> Vec<Row> {
        let steps = self.m.steps as f64;
        let mut rows: BTreeMap<String, (Row, [f64; 3], Peaks)> = BTreeMap::new();
        for (&(program, at), &(runs, kernels, time)) in &self.known {
            let p = &self.m.profile.programs[program];
            let (node, runs, kernels, time) = (&p.nodes[at], runs as f64 / steps, kernels as f64 / steps, ms(time) / steps);
            let name = name(&p.name, node);
            let new = || (Row { name: name.clone(), roof_ms: Some(0.0), ..Row::default() }, [0.0; 3], Peaks::default());
            let (row, bounds, peaks) = rows.entry(name.clone()).or_insert_with(new);
            peaks.add(node, self.roof, runs * node.cost.flops as f64, time);
            row.nodes += runs;
            row.ms += time;
            row.flops += runs * node.cost.flops as f64;
            row.bytes += engine::mutant!("bytes-of-one-run", runs, 1.0) * node.cost.bytes as f64;
            row.tensor_cores += if node.tensor_cores { engine::mutant!("tensor-cores-not-by-time", time, 1.0) } else { 0.0 };
            match self.roof.seconds(node) {
                Some((seconds, bound)) => {
                    row.roof_ms = row.roof_ms.map(|ms| ms + 1e3 * runs * seconds);
                    let small = is_small(1e-3 * time / kernels, runs * seconds / kernels);
                    bounds[if small { Bound::Latency } else { bound } as usize] += time;
                }
                None => row.roof_ms = None,
            }
        }
        let most = |times: [f64; 3]| {
            [Bound::Compute, Bound::Memory, Bound::Latency].into_iter().max_by(|a, b| times[*a as usize].total_cmp(&times[*b as usize]))
        };
        let finished = rows.into_values().map(|(row, bounds, peaks)| {
            let bound = most(bounds).filter(|bound| bounds[*bound as usize] > 0.0);
            let row = self.finished(row);
            let times_roof = row.times_roof.filter(|_| bound != Some(Bound::Latency));
            Row { bound, times_roof, of_tensor_cores: peaks.of_tensor_cores(), multiprocessors: peaks.multiprocessors(), ..row }
        });
        sorted(finished.collect())
    }

    /// Rates and shares.
    fn finished(&self, row: Row) -> Row {
        let rate = |n: f64, unit: f64| if row.ms > 0.0 { n / (row.ms * 1e-3) / unit } else { 0.0 };
        Row {
            share: if self.busy_ms > 0.0 { row.ms / self.busy_ms } else { 0.0 },
            tflop_per_s: rate(row.flops, 1e12),
            gb_per_s: rate(row.bytes, 1e9),
            of_bandwidth: self.roof.memory.filter(|_| row.ms > 0.0 && row.bytes > 0.0).map(|peak| rate(row.bytes, peak)),
            times_roof: row.roof_ms.filter(|roof| *roof > 0.0).map(|roof| row.ms / roof),
            tensor_cores: if row.ms > 0.0 { row.tensor_cores / row.ms } else { 0.0 },
            ..row
        }
    }

    /// What belongs to no node, by its own name.
    fn others(&self, track: Track) -> Vec<Row> {
        let steps = self.m.steps as f64;
        let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
        for span in self.m.profile.spans.iter().filter(|s| s.track == track && !matches!(s.what, What::Node(..))) {
            let row = rows.entry(&span.name).or_insert_with(|| Row { name: span.name.clone(), ..Row::default() });
            row.nodes += 1.0 / steps;
            row.ms += ms(span.end - span.start) / steps;
            row.bytes += if let What::Copy(bytes) = span.what { bytes as f64 / steps } else { 0.0 };
        }
        sorted(rows.into_values().map(|row| self.finished(row)).collect())
    }
}

fn sorted(mut rows: Vec<Row>) -> Vec<Row> {
    rows.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    rows
}

/// The idle time between two spans, by what stands before and after it; from the beginning of the window to its end.
fn gaps(m: &Measured, compute: &[&Span]) -> Vec<Gap> {
    let name = |span: &Span| match span.what {
        What::Node(program, node) => title(&m.profile.programs[program].nodes[node]),
        _ => span.name.clone(),
    };
    let ends = std::iter::once((0, "the beginning".to_string())).chain(compute.iter().map(|s| (s.end, name(s))));
    let starts = compute.iter().map(|s| (s.start, name(s))).chain([(m.window, "the end".into())]);
    let mut gaps: BTreeMap<(String, String), (usize, u64)> = BTreeMap::new();
    for ((end, after), (start, before)) in ends.zip(starts).filter(|(end, start)| start.0 > end.0) {
        let gap = gaps.entry((after, before)).or_default();
        *gap = (gap.0 + 1, gap.1 + start - end);
    }
    let steps = m.steps as f64;
    let one = |((after, before), (count, time)): ((String, String), (usize, u64))| Gap {
        after,
        before,
        count: count as f64 / steps,
        ms: ms(time) / steps,
    };
    let mut gaps: Vec<Gap> = gaps.into_iter().map(one).collect();
    gaps.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(op: &'static str, scope: &str, backward: bool) -> Node {
        let cost = engine::op::Cost { flops: 0, bytes: 0, memory_bound: true };
        Node {
            op,
            scope: scope.into(),
            backward,
            inputs: vec![],
            outputs: vec![],
            cost,
            tensor_cores: false,
            multiprocessors: None,
            aside: false,
        }
    }

    #[test]
    fn nodes_have_the_names_of_the_model() {
        assert_eq!(title(&node("flash_attention_grad", "blocks.3.attn", true)), "blocks.3.attn / flash_attention_grad");
        assert_eq!(title(&node("matmul", "blocks.3.attn", true)), "blocks.3.attn / matmul (backward)");
        assert_eq!(title(&node("matmul", "", false)), "matmul");
        let layers =
            ["blocks.3.attn", "blocks.3", "head.norm", "head", "", "encoder.layer.11.mlp"].map(|s| layer(&node("matmul", s, false)));
        assert_eq!(layers, ["blocks.3", "blocks.3", "head", "head", "outside of layers", "encoder.layer.11"]);
    }

    /// Two steps of a small and a large node, with times as a GPU's: 2 us and 1 ms each, 1 us idle after each.
    fn measured() -> Measured {
        use engine::profile::Profiler;
        use engine::{Cpu, DType, Data, Device, Init, Program, Recorder, Store, Switches};
        let r = Recorder::new();
        let x = r.feed("x", &[8, 8], DType::F32);
        let large = r.scope("blocks.0", || r.param("w", &[2048, 2048], Init::Full(1.0)).exp());
        r.output("small", r.scope("head", || x.softmax()));
        r.output("large", large);
        let (device, mut store) = (Device::cpu(Cpu::new(1)), Store::new(0));
        let mut program = Program::load(r.finish(), &Switches::default(), &device, &mut store).unwrap();
        let mut profiler = Profiler::start(&device, &crate::gpu::folders(), false).unwrap();
        for _ in 0..2 {
            program.trace("train", &mut store, &[("x", Data::F32(&[0.0; 64]))], &mut profiler).unwrap();
        }
        let mut profile = profiler.finish(&device).unwrap();
        profile.clock = Clock::Cupti("a test".into());
        profile.spans.retain(|s| matches!(s.what, What::Node(..)));
        let mut now = 0;
        for span in &mut profile.spans {
            let What::Node(program, node) = span.what else { unreachable!() };
            let time = if profile.programs[program].nodes[node].scope == "head" { 2_000 } else { 1_000_000 };
            (span.start, span.end) = (now, now + time);
            now += time + 1_000;
        }
        Measured { profile, steps: 2, plain_ms: [1.0, 1.0], window: now }
    }

    #[test]
    fn rows_add_up_and_what_is_small_is_bound_by_latency() {
        let m = measured();
        let d = Digest::new("a test", "a card", &m, Roof::of_card("NVIDIA H200").unwrap());
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert_eq!(d.nodes.len(), 2, "{:?}", d.nodes);
        let [large, small] = [&d.nodes[0], &d.nodes[1]];
        assert!(near(large.ms, 1.0) && near(small.ms, 0.002) && near(d.busy_ms, 1.002) && near(d.attributed, 1.0), "{d:#?}");
        assert!(near(d.step_ms, 1.004) && near(d.idle_ms, 0.002) && near(d.overhead, 0.004), "{d:#?}");
        assert_eq!((large.nodes, small.nodes, d.launches), (1.0, 1.0, 2.0));
        // 2048 x 2048 numbers read and written, at 4.8 TB/s.
        assert!(large.name.starts_with("blocks.0 / ") && near(large.bytes, 33_554_432.0), "{large:?}");
        assert!(near(large.times_roof.unwrap(), 1e-3 / (33_554_432.0 / 4.8e12)) && large.bound == Some(Bound::Memory), "{large:?}");
        assert_eq!((small.times_roof, small.bound), (None, Some(Bound::Latency)));
        assert!(small.roof_ms.unwrap() > 0.0);
        let gaps: f64 = d.gaps.iter().map(|g| g.ms).sum();
        assert!(near(gaps, d.idle_ms), "{:?}", d.gaps);
    }

    /// A program that runs twice in a step moves twice as many bytes.
    #[test]
    fn what_runs_twice_in_a_step_counts_twice() {
        let m = Measured { steps: 1, ..measured() };
        let d = Digest::new("a test", "a card", &m, Roof::of_card("NVIDIA H200").unwrap());
        let large = &d.nodes[0];
        assert_eq!((large.nodes, large.bytes, d.launches), (2.0, 2.0 * 33_554_432.0, 4.0));
        assert!((large.ms - 2.0).abs() < 1e-9 && (large.gb_per_s - 33_554_432.0 / 1e-3 / 1e9).abs() < 1e-6, "{large:?}");
    }

    /// Shares are of time: a node that uses tensor cores and takes a thousandth of the step is a thousandth.
    #[test]
    fn tensor_cores_are_used_for_as_long_as_their_nodes_run() {
        let mut m = measured();
        for node in &mut m.profile.programs[0].nodes {
            node.tensor_cores = node.scope == "head";
        }
        m.plain_ms = [0.9, 1.1];
        let d = Digest::new("a test", "a card", &m, Roof::of_card("NVIDIA H200").unwrap());
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        let of = |row: &Row| row.tensor_cores;
        assert!(near(of(&d.nodes[0]), 0.0) && near(of(&d.nodes[1]), 1.0) && near(d.tensor_cores, 0.002 / 1.002), "{d:#?}");
        assert!(near(d.plain(), 1.0) && near(d.overhead, 0.004), "of the mean of both plain steps: {}", d.overhead);
    }

    #[test]
    fn rates_stand_beside_the_peaks_of_the_card() {
        let mut m = measured();
        for node in &mut m.profile.programs[0].nodes {
            let large = node.scope == "blocks.0";
            node.tensor_cores = large;
            // In a millisecond an H200 moves 4.8 GB and does 494.7 GFLOP in TF32.
            node.cost = engine::op::Cost { flops: 98_940_000_000, bytes: 1_200_000_000, memory_bound: false };
            node.multiprocessors = (!large).then_some(0.5);
        }
        let d = Digest::new("a test", "a card", &m, Roof::of_card("NVIDIA H200").unwrap());
        let near = |a: Option<f64>, b: f64| a.is_some_and(|a| (a - b).abs() < 1e-6);
        let (large, small) = (&d.nodes[0], &d.nodes[1]);
        assert!(near(large.of_bandwidth, 0.25) && near(large.of_tensor_cores, 0.2), "{large:?}");
        assert_eq!((large.multiprocessors, small.of_tensor_cores), (None, None));
        assert!(near(small.multiprocessors, 0.5), "{small:?}");
    }

    /// What a CPU can do is measured: a node that was faster was measured, too, and the step takes no less than its roofline.
    #[test]
    fn nothing_is_faster_than_a_measured_roof() {
        let mut m = measured();
        m.profile.clock = Clock::Host;
        let slow = Roof { f32: Some(1e6), memory: Some(1e6), from: "a test".into(), ..Roof::default() };
        let d = Digest::new("a test", "a CPU", &m, slow);
        let large = &d.nodes[0];
        assert!((large.times_roof.unwrap() - 1.0).abs() < 1e-9 && d.roof_ms.unwrap() <= d.busy_ms, "{d:#?}");
        assert!((d.roof.memory.unwrap() / (33_554_432.0 / 1e-3) - 1.0).abs() < 1e-9, "{:?}", d.roof);
        assert_eq!((d.nodes[1].times_roof, d.nodes[1].bound), (None, Some(Bound::Latency)), "a few microseconds say nothing");
    }

    #[test]
    fn exchanges_beside_other_work_are_covered_by_it() {
        let span =
            |start: u64, end: u64| Span { start, end, launched: start, track: Track::Compute, what: What::Other, name: String::new() };
        let (work, beside) = ([span(0, 10), span(10, 20), span(30, 40)], [span(5, 12), span(18, 35), span(50, 60)]);
        assert_eq!(together(&beside.iter().collect::<Vec<_>>(), &work.iter().collect::<Vec<_>>()), 7 + 2 + 5);
        assert_eq!(together(&[], &[]), 0);
    }

    #[test]
    fn latency_bounds_what_has_no_work_to_speak_of() {
        assert!(is_small(2e-6, 1e-8) && is_small(4.9e-6, 0.9e-6), "a few microseconds");
        assert!(is_small(27e-6, 0.3e-6), "steps that wait for each other");
        assert!(!is_small(6e-6, 0.9e-6), "a slow kernel");
        assert!(!is_small(4e-6, 2e-6), "work that fills the device");
    }
}
