//! What the ranks of a run exchange in a step, and how long that takes: for machines that one does not have.

use crate::recipe::Task;
use crate::report::{human_bytes, table};
use crate::run::node_seconds;
use anyhow::{Result, bail};
use clap::Args;
use engine::graph::{Kind, Node};
use engine::kernel::{Arch, Io, Step};
use engine::ops::collective::What;
use engine::passes::Target;
use engine::{Compiled, Ranks};
use serde_json::{Value, json};
use std::collections::BTreeMap;

#[derive(Args)]
pub struct RankArgs {
    /// Plans one of so many ranks, on as many GPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    ranks: usize,
    /// With --ranks: so many of them share the weights of one model
    #[arg(long, value_name = "T", default_value_t = 1)]
    tensor: usize,
    /// With --ranks: GB/s that a GPU sends to the others; a ring over NVLink 4 (H100, H200) gets about 360, one over 400 Gbit/s InfiniBand about 45
    #[arg(long, value_name = "GB/S", default_value_t = 360.0)]
    bandwidth: f64,
}

impl RankArgs {
    pub fn planned(&self) -> Result<Ranks> {
        let (ranks, tensor) = (self.ranks, self.tensor);
        if ranks == 0 || tensor == 0 || !ranks.is_multiple_of(tensor) {
            bail!("--ranks {ranks} --tensor {tensor}: the ranks must be a multiple of those that share a model's weights");
        }
        if !(self.bandwidth > 0.0 && self.bandwidth.is_finite()) {
            bail!("--bandwidth {}: a number of GB/s above 0 is needed", self.bandwidth);
        }
        Ok(Ranks::planned(ranks / tensor, tensor))
    }
}

/// What it takes to begin an exchange, in seconds.
const BEGIN: f64 = 1e-5;

/// One kind of exchange of a program.
#[derive(Default)]
struct Sort {
    count: usize,
    /// Bytes of the whole tensors.
    bytes: usize,
    seconds: f64,
}

/// What the ranks exchange in a step.
pub struct Exchanged {
    /// By program; what it is, among which ranks, and whether in the backward pass.
    sorts: BTreeMap<(&'static str, String, &'static str, bool), Sort>,
    /// A step's arithmetic; and of that, what is left to do after the first exchange of gradients.
    compute: f64,
    behind: f64,
    bandwidth: f64,
}

/// The exchange of a node, if it is one.
fn collective(node: &Node, arch: Arch) -> Option<engine::ops::collective::Collective> {
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

impl Exchanged {
    pub fn of(task: &dyn Task, compiled: &[(&'static str, Compiled)], target: Target, a: &RankArgs) -> Exchanged {
        let mut found = Exchanged { sorts: BTreeMap::new(), compute: 0.0, behind: 0.0, bandwidth: a.bandwidth };
        let arch = match target {
            Target::Cuda(arch) => arch,
            Target::Cpu => Arch { sm: 90, multiprocessors: 132 },
        };
        for (name, c) in compiled {
            let (runs, mut begun) = (task.runs(name) as f64, false);
            for (i, node) in c.graph.nodes.iter().enumerate() {
                let Some(own) = collective(node, arch) else {
                    let seconds = runs * node_seconds(c, i, target);
                    found.compute += seconds;
                    found.behind += if begun && node.backward { seconds } else { 0.0 };
                    continue;
                };
                begun |= node.backward && own.group.name == "data";
                let n = own.group.size as f64;
                // The larger side is the whole; a ring sends it once, and for sums twice.
                let bytes: usize = c.graph.inputs(i).iter().zip(&node.outputs).map(|(x, y)| x.bytes().max(y.bytes())).sum();
                let times = if own.what == What::AllReduce { 2.0 } else { 1.0 };
                let sort = found.sorts.entry((name, node.name().to_string(), own.group.name, node.backward)).or_default();
                sort.count += 1;
                sort.bytes += bytes;
                sort.seconds += runs * (BEGIN + times * (n - 1.0) / n * bytes as f64 / (a.bandwidth * 1e9));
            }
        }
        found
    }

    /// Seconds that all exchanges take, and of that what nothing hides: sums of gradients go on beside the rest of the backward pass.
    fn seconds(&self) -> (f64, f64) {
        let of = |hidden: bool| -> f64 {
            self.sorts.iter().filter(|((.., group, backward), _)| (*backward && *group == "data") == hidden).map(|(_, s)| s.seconds).sum()
        };
        (of(true) + of(false), of(false) + (of(true) - self.behind).max(0.0))
    }

    pub fn show(&self, ranks: &Ranks) -> Result<()> {
        if ranks.size() == 1 {
            return Ok(());
        }
        let (data, tensor) = (ranks.data.size, ranks.tensor.size);
        out!(
            "one of {} ranks: {data} with different examples, {tensor} that share the weights; every program, state and byte above is this rank's",
            data * tensor
        );
        let rows: Vec<Vec<String>> = self
            .sorts
            .iter()
            .map(|((program, what, group, backward), s)| {
                let pass = if *backward { "backward" } else { "forward, update" };
                let among = if *group == "data" { data } else { tensor };
                let time = format!("{:.3} ms", 1e3 * s.seconds);
                vec![
                    program.to_string(),
                    what.clone(),
                    format!("{among} ({group})"),
                    pass.into(),
                    s.count.to_string(),
                    human_bytes(s.bytes as u64),
                    time,
                ]
            })
            .collect();
        out!("{}", table(&["program", "exchange", "ranks", "where", "count", "bytes", "time"], &rows));
        let (all, exposed) = self.seconds();
        let (step, h) = (self.compute + exposed, |s: f64| format!("{:.2} ms", 1e3 * s));
        out!(
            "estimated at {} GB/s: arithmetic {}, exchanges {}, of which {} are not hidden behind the backward pass: a step of {}, {:.0}% of linear",
            self.bandwidth,
            h(self.compute),
            h(all),
            h(exposed),
            h(step),
            100.0 * self.compute / step.max(1e-12)
        );
        out!();
        Ok(())
    }
}

/// A program's description with its exchanges.
pub fn with(mut described: Value, e: &Exchanged, program: &str) -> Value {
    let own = e.sorts.iter().filter(|((name, ..), _)| *name == program);
    let list = own.map(|((_, what, group, backward), s)| {
        json!({ "exchange": what, "group": group, "backward": backward, "count": s.count, "bytes": s.bytes, "seconds": s.seconds })
    });
    described["exchanges"] = list.collect();
    described
}
