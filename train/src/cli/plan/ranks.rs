//! What the ranks of a run exchange in a step, and how long that takes: for machines that one does not have.

use super::timeline::{Event, Sizes, Sort, Wires, events, run};
use crate::recipe::Task;
use crate::report::{human_bytes, human_count, table};
use crate::run::runs;
use anyhow::{Result, bail};
use clap::{ArgGroup, Args};
use engine::passes::Target;
use engine::{Compiled, Ranks};
use serde_json::{Value, json};
use std::collections::BTreeMap;

#[derive(Args)]
#[command(group(ArgGroup::new("several").args(["ranks", "scaling"])))]
pub struct RankArgs {
    /// Plans one of so many ranks, on as many GPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    ranks: usize,
    /// With --ranks or --scaling: so many of them share the weights of one model
    #[arg(long, value_name = "T", default_value_t = 1, requires = "several")]
    tensor: usize,
    /// With --ranks or --scaling: GB/s that a GPU sends to others of its machine; a ring over NVLink 4 (H100, H200) gets about 360
    #[arg(long, value_name = "GB/S", default_value_t = 360.0, requires = "several")]
    bandwidth: f64,
    /// With --ranks or --scaling: GPUs of a machine
    #[arg(long, value_name = "G", default_value_t = 8, requires = "several")]
    node: usize,
    /// With --ranks or --scaling: GB/s that a GPU sends to other machines; 400 Gbit/s InfiniBand gets about 45
    #[arg(long, value_name = "GB/S", default_value_t = 45.0, requires = "several")]
    network: f64,
    /// With --ranks or --scaling: how long a step of one rank took, as measured; estimates of arithmetic are scaled to it
    #[arg(long, value_name = "MS", requires = "several")]
    step_ms: Option<f64>,
    /// With --scaling: microseconds that the loader takes for an example, on a thread beside the step; every rank makes its own, or those of all ranks where examples differ in how many targets count
    #[arg(long, value_name = "US", default_value_t = 0.0, requires = "scaling")]
    example_us: f64,
    /// Prints a table of step times against numbers of GPUs, such as 1,8,64,1024; each GPU has `train.batch` examples a step
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', conflicts_with_all = ["ranks", "json", "html", "nodes", "dump"])]
    pub scaling: Option<Vec<usize>>,
}

impl RankArgs {
    pub fn planned(&self) -> Result<Ranks> {
        let sizes = self.sizes("--ranks", self.ranks)?;
        let positive = |x: f64| x > 0.0 && x.is_finite();
        for (name, value) in [("--bandwidth", self.bandwidth), ("--network", self.network)] {
            if !positive(value) {
                bail!("{name} {value}: a number of GB/s above 0 is needed");
            }
        }
        if let Some(ms) = self.step_ms.filter(|ms| !positive(*ms)) {
            bail!("--step-ms {ms}: milliseconds above 0 are needed");
        }
        if self.example_us < 0.0 || !self.example_us.is_finite() {
            bail!("--example-us {}: microseconds from 0 are needed", self.example_us);
        }
        if self.node == 0 {
            bail!("--node 0: a machine has one GPU at least");
        }
        Ok(Ranks::planned(sizes.data, sizes.tensor))
    }

    /// So many ranks, by what they share.
    pub fn sizes(&self, flag: &str, ranks: usize) -> Result<Sizes> {
        let tensor = if self.scaling.is_some() && flag == "--ranks" { 1 } else { self.tensor };
        if ranks == 0 {
            bail!("{flag} 0: there is at least one rank");
        }
        if tensor == 0 || !ranks.is_multiple_of(tensor) {
            bail!("{flag} {ranks} --tensor {tensor}: the ranks must be a multiple of those that share a model's weights");
        }
        Ok(Sizes { data: ranks / tensor, tensor })
    }

    fn wires(&self) -> Wires {
        Wires { node: self.node, inside: self.bandwidth, between: self.network }
    }
}

/// What a step does, program by program: how often each runs, and its nodes.
pub struct Exchanged {
    programs: Vec<(f64, Vec<Event>)>,
    /// Estimated seconds of a rank that has a model for itself, and the same examples.
    alone: f64,
    /// What estimated arithmetic is multiplied by.
    speed: f64,
    wires: Wires,
    /// Seconds in which the loader makes an example, and whether a rank makes only its own.
    example: (f64, bool),
}

/// Of one sort: how many a run of the program has, bytes of the whole tensors, how often a step runs it; seconds of a step, and of these the ones in which nothing is
/// computed.
#[derive(Default)]
struct Total {
    count: usize,
    bytes: usize,
    runs: f64,
    seconds: f64,
    exposed: f64,
}

/// Seconds of a step.
struct Step {
    compute: f64,
    exchange: f64,
    exposed: f64,
    /// If as many ranks divided the work of one, and exchanged nothing.
    linear: f64,
    /// Of the loader, which makes the next batch meanwhile.
    loader: f64,
}

impl Step {
    fn seconds(&self) -> f64 {
        (self.compute + self.exposed).max(self.loader)
    }

    /// Of what as many GPUs would do that divide everything and exchange nothing, in percent.
    fn of_linear(&self) -> f64 {
        100.0 * self.linear / self.seconds().max(1e-12)
    }
}

impl Exchanged {
    pub fn of(task: &dyn Task, compiled: &[(&'static str, Compiled)], target: Target, a: &RankArgs) -> Exchanged {
        let programs = runs(task, compiled).into_iter().zip(compiled).map(|(runs, (name, c))| (runs, events(name, c, target))).collect();
        Exchanged { programs, alone: 0.0, speed: 1.0, wires: a.wires(), example: (1e-6 * a.example_us, task.makes_own_rows()) }
    }

    /// Estimated seconds of arithmetic.
    fn compute(&self) -> f64 {
        self.programs.iter().map(|(runs, events)| runs * events.iter().map(|e| e.seconds).sum::<f64>()).sum()
    }

    /// Beside a rank that has a model for itself; the arithmetic is scaled as that one's is by its measured time.
    pub fn beside(mut self, alone: &Exchanged, a: &RankArgs) -> Exchanged {
        self.alone = alone.compute();
        self.speed = a.step_ms.map_or(1.0, |ms| ms / 1e3 / self.alone.max(1e-12));
        self
    }

    /// A step on so many ranks, and what each sort of exchange has of it.
    fn step(&self, sizes: Sizes) -> (Step, BTreeMap<Sort, Total>) {
        let linear = self.alone * self.speed / sizes.tensor as f64;
        let mut step = Step { compute: 0.0, exchange: 0.0, exposed: 0.0, linear, loader: 0.0 };
        let mut sorts: BTreeMap<Sort, Total> = BTreeMap::new();
        for (runs, events) in &self.programs {
            let taken = run(events, &self.wires, sizes, self.speed);
            step.compute += runs * taken.compute;
            step.exchange += runs * taken.exchange;
            step.exposed += runs * taken.exposed();
            for e in events.iter().filter_map(|e| e.exchange.as_ref()) {
                let total = sorts.entry(e.sort.clone()).or_default();
                total.count += 1;
                total.bytes += e.bytes;
                total.runs = *runs;
                total.seconds += runs * self.wires.seconds(e.what, e.sort.group, e.bytes, sizes);
            }
            for (sort, seconds) in taken.waited {
                sorts.entry(sort).or_default().exposed += runs * seconds;
            }
        }
        // One GPU is the one that was measured, whatever its part of a divided step would take.
        if sizes.data * sizes.tensor == 1 {
            step.compute = linear;
        }
        (step, sorts)
    }

    pub fn show(&self, ranks: &Ranks) -> Result<()> {
        if ranks.size() == 1 {
            return Ok(());
        }
        let sizes = Sizes { data: ranks.data.size, tensor: ranks.tensor.size };
        let (data, tensor) = (sizes.data, sizes.tensor);
        out!(
            "one of {} ranks: {data} with different examples, {tensor} that share the weights; every program, state and byte above is this rank's",
            data * tensor
        );
        let (step, sorts) = self.step(sizes);
        let rows: Vec<Vec<String>> = sorts
            .iter()
            .map(|(s, t)| {
                let among = format!("{} ({})", sizes.of(s.group), s.group);
                let (count, bytes) = (t.count.to_string(), human_bytes(t.bytes as u64));
                // What only evaluations run is no part of a step.
                let ms = |s: f64| if t.runs == 0.0 { "-".into() } else { format!("{:.3} ms", 1e3 * s) };
                let often = human_count(t.runs);
                vec![
                    s.program.into(),
                    s.what.clone(),
                    among,
                    s.place.into(),
                    count,
                    bytes,
                    often,
                    ms(t.seconds),
                    s.runs.into(),
                    ms(t.exposed),
                ]
            })
            .collect();
        out!(
            "{}",
            table(&["program", "exchange", "ranks", "where", "count", "bytes", "runs a step", "time a step", "how", "waited for"], &rows)
        );
        let h = |s: f64| format!("{:.2} ms", 1e3 * s);
        out!(
            "estimated at {} GB/s in a machine and {} GB/s a GPU between machines of {}: arithmetic {}, exchanges {}, of which {} are not hidden behind arithmetic: a step of {}, {:.0}% of linear",
            self.wires.inside,
            self.wires.between,
            self.wires.node,
            h(step.compute),
            h(step.exchange),
            h(step.exposed),
            h(step.seconds()),
            step.of_linear()
        );
        out!();
        Ok(())
    }

    /// A line for each number of ranks. `work`: what a rank that has a model for itself works through in a step, and its unit; `examples`: in how many examples.
    pub fn scale(&self, all: &[Sizes], (unit, work): (&str, f64), examples: usize) -> Result<()> {
        let rows: Vec<Vec<String>> = all
            .iter()
            .map(|&sizes| {
                let (mut step, sorts) = self.step(sizes);
                let (example, own) = self.example;
                step.loader = example * (examples * if own { 1 } else { sizes.data }) as f64;
                let by = |group: &str| sorts.iter().filter(|(s, _)| s.group == group).fold(0.0, |sum, (_, t)| sum + t.seconds);
                let ms = |s: f64| format!("{:.1}", 1e3 * s);
                let rate = work * sizes.data as f64 / step.seconds();
                let gpus = sizes.data * sizes.tensor;
                vec![
                    gpus.to_string(),
                    gpus.div_ceil(self.wires.node).to_string(),
                    ms(step.compute),
                    ms(by("data")),
                    ms(by("tensor")),
                    ms(step.exposed),
                    ms(step.loader),
                    ms(step.seconds()),
                    human_count(rate),
                    format!("{:.1}%", step.of_linear()),
                ]
            })
            .collect();
        let rate = format!("{unit}/s");
        let head = ["GPUs", "machines", "arithmetic ms", "data ms", "tensor ms", "waits ms", "loader ms", "step ms", &rate, "of linear"];
        out!("{}", table(&head, &rows));
        Ok(())
    }
}

/// A program's description with its exchanges.
pub fn with(mut described: Value, e: &Exchanged, ranks: &Ranks, program: &str) -> Value {
    let (_, sorts) = e.step(Sizes { data: ranks.data.size, tensor: ranks.tensor.size });
    let own = sorts.into_iter().filter(|(s, _)| s.program == program);
    let list = own.map(|(s, t)| {
        json!({
            "exchange": s.what, "group": s.group, "place": s.place, "runs": s.runs, "count": t.count, "bytes": t.bytes,
            "seconds": t.seconds, "waited": t.exposed
        })
    });
    described["exchanges"] = list.collect();
    described
}
