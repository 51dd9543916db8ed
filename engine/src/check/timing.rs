//! Timing of the cases of ops.

use super::{Loaded, Numbers, fill, frozen, normals, unfuse};
use crate::cpu::Data;
use crate::graph::Graph;
use crate::meta::DType;
use crate::op::Case;
use crate::passes::{PASSES, Switches, Target};
use crate::program::{Compiled, Device};
use crate::record::Recorder;

/// The time of a case, forward or backward, and the least work that it needs.
pub struct Timing {
    /// Whether it is the backward pass.
    pub backward: bool,
    /// Milliseconds of one run.
    pub ms: f64,
    /// Floating-point operations of one run.
    pub flops: u64,
    /// Bytes read and written at least.
    pub bytes: u64,
}

/// What a case runs on this target when it is timed (see [`Compiled::fingerprint`]).
pub fn case_fingerprint(case: &Case, dtype: DType, target: Target) -> Result<u64, String> {
    let graph = recorded(case, dtype, target != Target::Cpu, false).0;
    Ok(Compiled::new(graph, &Switches::default(), target).map_err(|e| e.to_string())?.fingerprint())
}

/// A case's graph, on a GPU with its gradients, and what is fed to it, without numbers if only the graph is needed.
fn recorded(case: &Case, dtype: DType, gpu: bool, numbers: bool) -> (Graph, Vec<(String, Numbers)>) {
    let count = |n: usize| if numbers { n } else { 0 };
    let r = Recorder::new();
    let mut feeds = vec![];
    let (mut leaves, mut inputs) = (vec![], vec![]);
    for (i, input) in case.inputs.iter().enumerate() {
        let numbers = fill(input.1, i as u64, count(input.0.iter().product()));
        let leaf = r.feed(&format!("x{i}"), input.0, numbers.dtype());
        let float = numbers.dtype().is_float();
        inputs.push(if float { r.scope("inputs", || leaf.cast(dtype)) } else { leaf });
        if float && !frozen(case).contains(&i) {
            leaves.push(inputs[i]);
        }
        feeds.push((format!("x{i}"), numbers));
    }
    let outputs = r.scope("case", || (case.build)(&inputs));
    let mut terms = vec![];
    for (k, &y) in outputs.iter().enumerate() {
        r.output(&format!("y{k}"), y);
        if gpu && y.dtype().is_float() && !leaves.is_empty() {
            let c = r.feed(&format!("c{k}"), &y.shape(), DType::F32);
            feeds.push((format!("c{k}"), Numbers::F32(normals(k as u64, count(y.meta().elements())))));
            terms.push((y.cast(DType::F32) * c).sum());
        }
    }
    if let Some(loss) = terms.into_iter().reduce(|a, b| a + b) {
        for (i, g) in r.grad(loss, &leaves).into_iter().enumerate() {
            r.output(&format!("g{i}"), g);
        }
    }
    (r.finish(), feeds)
}

/// The median of `repeat` runs of a case: forward, and on a GPU, which times every node, also backward.
pub fn time_case(case: &Case, dtype: DType, device: &Device, repeat: usize) -> Result<Vec<Timing>, String> {
    let (graph, feeds) = recorded(case, dtype, device.target() != Target::Cpu, true);
    let mut timed =
        Timed { gpu: device.target() != Target::Cpu, loaded: Loaded::new(graph, &Switches::default(), device)?, feeds, rounds: vec![] };
    timed.run()?;
    timed.rounds.clear();
    (0..repeat).try_for_each(|_| timed.run())?;
    Ok(timed.medians())
}

/// The same for the op (first) and for the plain ops that define it, each a kernel of its own, in turn. None where the case has nothing that is fused.
pub fn time_unfused(case: &Case, dtype: DType, device: &Device, repeat: usize) -> Result<Option<[Vec<Timing>; 2]>, String> {
    let (graph, feeds) = recorded(case, dtype, device.target() != Target::Cpu, true);
    let mut plain = graph.clone();
    unfuse(&mut plain);
    if plain.nodes.len() == graph.nodes.len() {
        return Ok(None);
    }
    let load = |graph, switches| {
        Ok::<_, String>(Timed {
            gpu: device.target() != Target::Cpu,
            loaded: Loaded::new(graph, switches, device)?,
            feeds: feeds.clone(),
            rounds: vec![],
        })
    };
    let mut both = [load(graph, &Switches::default())?, load(plain, &alone())?];
    for round in 0..=repeat {
        both.iter_mut().try_for_each(Timed::run)?;
        if round == 0 {
            both.iter_mut().for_each(|timed| timed.rounds.clear());
        }
    }
    Ok(Some(both.map(Timed::medians)))
}

/// Every op as a kernel of its own.
fn alone() -> Switches {
    let off = PASSES.iter().filter(|pass| !pass.required() && pass.name() != "dead-code");
    off.fold(Switches::default(), |switches, pass| switches.with(pass.name(), "off").expect("a pass that can be switched off"))
}

/// A loaded case, and the times of each of its runs.
struct Timed {
    gpu: bool,
    loaded: Loaded,
    feeds: Vec<(String, Numbers)>,
    rounds: Vec<Vec<Timing>>,
}

impl Timed {
    fn run(&mut self) -> Result<(), String> {
        let p = &mut self.loaded;
        if !self.gpu {
            let start = std::time::Instant::now();
            p.run(&self.feeds, &[])?;
            let ms = start.elapsed().as_secs_f64() * 1e3;
            self.rounds.push(vec![Timing { backward: false, ms, flops: p.program.flops, bytes: p.program.bytes }]);
            return Ok(());
        }
        let given: Vec<(&str, Data)> = self.feeds.iter().map(|(n, d)| (n.as_str(), d.data())).collect();
        let nodes = p.program.profile(&mut p.store, &given).map_err(|e| e.to_string())?;
        let one = |backward| {
            let nodes = nodes.iter().filter(|n| n.backward == backward && n.scope == "case");
            nodes.fold(Timing { backward, ms: 0.0, flops: 0, bytes: 0 }, |t, n| Timing {
                backward,
                ms: t.ms + n.ms as f64,
                flops: t.flops + n.cost.flops,
                bytes: t.bytes + n.cost.bytes,
            })
        };
        self.rounds.push([false, true].map(one).into_iter().filter(|t| t.ms > 0.0).collect());
        Ok(())
    }

    fn medians(self) -> Vec<Timing> {
        let of = |backward| self.rounds.iter().flatten().filter(move |t| t.backward == backward);
        let one = |backward| of(backward).next().map(|t| Timing { ms: median(of(backward).map(|t| t.ms).collect()), ..*t });
        [false, true].into_iter().filter_map(one).collect()
    }
}

/// The median; 0 if there are no numbers.
fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}
