//! Checks of all ops and passes, from their test cases and examples: used by the tests and by `kiln check`.

mod judge;
mod planted;
mod timing;

pub use judge::{Allowed, relative, tolerance};
pub use planted::{CASES as PLANTED, check_planted};
pub use timing::{Timing, case_fingerprint, time_case, time_unfused};

use crate::cpu::{Cpu, Data};
use crate::graph::{Graph, Kind};
use crate::kernel::Arch;
use crate::meta::{DType, Meta};
use crate::op::{Case, Fill};
use crate::passes::{Mode, Numerics, OnRanks, Switch, Switches, Target, all, sweep};
use crate::philox::{fill_normal, hash_name, philox};
use crate::program::{Compiled, Device, Program};
use crate::ranks::threads;
use crate::record::{Recorder, Var};
use crate::store::Store;
use std::sync::PoisonError;

/// Numbers for one feed.
#[derive(Clone)]
pub enum Numbers {
    /// Floats.
    F32(Vec<f32>),
    /// Integers.
    I32(Vec<i32>),
    /// Bytes.
    U8(Vec<u8>),
}

impl Numbers {
    /// Borrowed, as a program takes it.
    pub fn data(&self) -> Data<'_> {
        match self {
            Numbers::F32(v) => Data::F32(v),
            Numbers::I32(v) => Data::I32(v),
            Numbers::U8(v) => Data::U8(v),
        }
    }

    fn len(&self) -> usize {
        match self {
            Numbers::F32(v) => v.len(),
            Numbers::I32(v) => v.len(),
            Numbers::U8(v) => v.len(),
        }
    }

    fn dtype(&self) -> DType {
        match self {
            Numbers::F32(_) => DType::F32,
            Numbers::I32(_) => DType::I32,
            Numbers::U8(_) => DType::U8,
        }
    }
}

/// The result of one check.
pub struct Outcome {
    /// What was checked.
    pub name: String,
    /// How it came out.
    pub verdict: Verdict,
}

/// How a check came out.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// With the largest error as a fraction of the tolerance, if one was measured.
    Passed(f64),
    /// What was wrong.
    Failed(String),
    /// Why it cannot be checked on this device.
    NotChecked(String),
}

impl Outcome {
    fn new(name: String, found: Result<f64, String>) -> Outcome {
        Outcome { name, verdict: found.map_or_else(Verdict::Failed, Verdict::Passed) }
    }

    /// What was wrong, if it failed.
    pub fn problem(&self) -> Option<&str> {
        match &self.verdict {
            Verdict::Failed(problem) => Some(problem),
            _ => None,
        }
    }
}

fn words(seed: u64, count: usize) -> impl Iterator<Item = u32> {
    (0..count).map(move |i| philox([i as u32, 0, seed as u32, (seed >> 32) as u32], [17, 4])[0])
}

fn normals(seed: u64, count: usize) -> Vec<f32> {
    let mut v = vec![0.0; count];
    fill_normal(seed, 99, &mut v);
    v
}

/// 0..count in random order.
fn shuffled(seed: u64, count: usize) -> Vec<usize> {
    let keys: Vec<u32> = words(seed, count).collect();
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|&i| keys[i]);
    order
}

/// The numbers of a case's input; the same name always gives the same numbers.
pub fn fill(kind: Fill, seed: u64, count: usize) -> Numbers {
    let normal = || normals(seed, count);
    match kind {
        Fill::Normal | Fill::Frozen => Numbers::F32(normal()),
        Fill::AwayFromZero => Numbers::F32(normal().iter().map(|v| v + 0.3f32.copysign(*v)).collect()),
        Fill::Positive => Numbers::F32(normal().iter().map(|v| 0.5 + 1.5 / (1.0 + (-v).exp())).collect()),
        Fill::Distinct | Fill::Spread => Numbers::F32(shuffled(seed, count).iter().map(|&i| i as f32).collect()),
        Fill::Index(n) => Numbers::I32(words(seed, count).map(|w| (w as usize % n) as i32).collect()),
        Fill::Rows(n) => Numbers::I32(shuffled(seed, n)[..count].iter().map(|&i| i as i32).collect()),
        Fill::Target(n) => Numbers::I32(words(seed, count).map(|w| if w % 8 == 0 { -1 } else { (w as usize / 8 % n) as i32 }).collect()),
        Fill::FewTargets(n) => {
            Numbers::I32(words(seed, count).map(|w| if w % 8 > 0 || n == 0 { -1 } else { (w as usize / 8 % n) as i32 }).collect())
        }
        Fill::Rng => Numbers::I32(vec![3, 1, 4, 1]),
        Fill::Mask => Numbers::U8(words(seed, count).map(|w| (w & 1) as u8).collect()),
        Fill::Byte => Numbers::U8(words(seed, count).map(|w| w as u8).collect()),
    }
}

/// A graph loaded with only the required passes, unless `switches` says otherwise.
struct Loaded {
    program: Program,
    store: Store,
}

impl Loaded {
    fn new(graph: Graph, switches: &Switches, device: &Device) -> Result<Loaded, String> {
        let mut store = Store::new(5);
        let program = Program::load(graph, switches, device, &mut store).map_err(|e| e.to_string())?;
        Ok(Loaded { program, store })
    }

    /// With guard zones after every buffer, on a GPU.
    fn guarded(graph: Graph, device: &Device) -> Result<(Loaded, Guards), String> {
        let text = |e: crate::Error| e.to_string();
        let mut c = Compiled::new(graph, &Switches::default(), device.target()).map_err(text)?;
        let gaps = if device.target() == Target::Cpu { vec![] } else { c.plan.spread(GAP) };
        let mut store = Store::new(5);
        let program = Program::from_compiled(c, device, &mut store).map_err(text)?;
        if let Device::Cuda(cuda, arena) = device {
            cuda.fill(&arena.lock().unwrap_or_else(PoisonError::into_inner), SENTINEL).map_err(text)?;
        }
        Ok((Loaded { program, store }, Guards { device: device.clone(), gaps }))
    }

    fn run(&mut self, feeds: &[(String, Numbers)], outputs: &[String]) -> Result<Vec<Vec<f32>>, String> {
        let feeds: Vec<(&str, Data)> = feeds.iter().map(|(n, d)| (n.as_str(), d.data())).collect();
        self.program.run(&mut self.store, &feeds).map_err(|e| e.to_string())?;
        outputs.iter().map(|o| self.program.read(o, &self.store).map_err(|e| e.to_string())).collect()
    }
}

const GAP: usize = 256;
const SENTINEL: u8 = 0xa5;

/// Guard zones between buffers, which no kernel may write.
struct Guards {
    device: Device,
    gaps: Vec<std::ops::Range<usize>>,
}

impl Guards {
    fn check(&self) -> Result<(), String> {
        let Device::Cuda(cuda, arena) = &self.device else { return Ok(()) };
        let arena = arena.lock().unwrap_or_else(PoisonError::into_inner);
        let end = self.gaps.iter().map(|g| g.end).max().unwrap_or(0);
        let bytes = cuda.download(&arena, 0, end).map_err(|e| e.to_string())?;
        match self.gaps.iter().find(|g| bytes[(*g).clone()].iter().any(|&b| b != SENTINEL)) {
            Some(g) => Err(format!("something was written past the end of a buffer, at byte {} of the arena", g.start)),
            None => Ok(()),
        }
    }
}

/// A case recorded in the middle of a graph: pointwise ops before it, and a random gradient with respect to its outputs.
pub(crate) struct Recorded {
    pub(crate) graph: Graph,
    pub(crate) feeds: Vec<(String, Numbers)>,
    outputs: Vec<String>,
    /// (index of the feed, name of the output that is the gradient with respect to it).
    gradients: Vec<(usize, String)>,
    /// (name of an output, the gradient with respect to it).
    cotangents: Vec<(String, Vec<f32>)>,
}

/// What the inputs go through before the case, so that a vjp that ignores `dy`, or the chain rule, is noticed.
fn before(leaf: Var) -> Var {
    leaf * 0.75 + 0.125
}

fn record(case: &Case, dtype: DType, unfused: bool) -> Recorded {
    record_with(case, (dtype, dtype), unfused, true)
}

/// The case in a type, with inputs that are rounded to another type first. Without numbers if only the graph is needed.
fn record_with(case: &Case, (dtype, rounded): (DType, DType), unfused: bool, numbers: bool) -> Recorded {
    let count = |n: usize| if numbers { n } else { 0 };
    let r = Recorder::new();
    let seed = hash_name(case.name);
    let mut out = Recorded { graph: Graph::default(), feeds: vec![], outputs: vec![], gradients: vec![], cotangents: vec![] };
    let (mut leaves, mut inputs) = (vec![], vec![]);
    for (i, input) in case.inputs.iter().enumerate() {
        let numbers = fill(input.1, seed.wrapping_add(i as u64), count(input.0.iter().product()));
        let leaf = r.feed(&format!("x{i}"), input.0, numbers.dtype());
        inputs.push(if numbers.dtype().is_float() { before(leaf).cast(rounded).cast(dtype) } else { leaf });
        out.feeds.push((format!("x{i}"), numbers));
        leaves.push(leaf);
    }
    let outputs = (case.build)(&inputs);
    let mut loss: Option<Var> = None;
    for (k, &y) in outputs.iter().enumerate().filter(|(_, y)| y.dtype().is_float()) {
        let c = normals(seed ^ (k as u64 + 1) << 40, count(y.meta().elements()));
        let cotangent = r.feed(&format!("c{k}"), &y.shape(), DType::F32);
        let term = (y.cast(DType::F32) * cotangent).sum();
        loss = Some(loss.map_or(term, |l| l + term));
        r.output(&format!("y{k}"), y);
        out.outputs.push(format!("y{k}"));
        out.feeds.push((format!("c{k}"), Numbers::F32(c.clone())));
        out.cotangents.push((format!("y{k}"), c));
    }
    let loss = loss.expect("a case has an output that is no integer");
    for (i, &leaf) in leaves.iter().enumerate().filter(|(_, l)| l.dtype().is_float()) {
        // One Grad node for each input: the check drops those of inputs without a gradient.
        r.output(&format!("g{i}"), r.grad(loss, &[leaf])[0]);
        out.gradients.push((i, format!("g{i}")));
    }
    out.graph = r.finish();
    if unfused {
        unfuse(&mut out.graph);
    }
    out
}

/// Fused and composite ops as the plain ops that define them.
fn unfuse(graph: &mut Graph) {
    let done: Result<(), std::convert::Infallible> = graph.rewrite(|_, _, node, inputs| {
        Ok(match &node.kind {
            Kind::Op(op) => op.unfused(inputs).map(|mut y| {
                y.resize(node.outputs.len(), y[0]);
                y
            }),
            _ => None,
        })
    });
    done.unwrap_or_else(|never| match never {});
}

fn bitwise(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits())
}

fn longest(case: &Case) -> usize {
    case.inputs.iter().flat_map(|i| i.0.iter().copied()).max().unwrap_or(1)
}

fn device() -> Device {
    Device::cpu(Cpu::all_cores())
}

/// All checks of one case. On a GPU: results and gradients in every type, against the CPU's and against a second run.
pub fn check_case(op: &str, case: &Case, target: &Device) -> Vec<Outcome> {
    let name = |what: &str| format!("{op}: {} ({what})", case.name);
    if let Device::Cuda(..) = target {
        let one = |dtype: DType| Outcome::new(name(&format!("{dtype} against the CPU")), against_cpu(case, dtype, target));
        return [DType::F32, DType::BF16, DType::F16].map(one).into();
    }
    let r = record(case, DType::F32, false);
    let mut all = vec![Outcome::new(name("gradient"), gradient(case, &r)), Outcome::new(name("repeats"), repeats(&r))];
    let ops = |unfused| record_with(case, (DType::F32, DType::F32), unfused, false).graph.nodes.len();
    if ops(true) != ops(false) {
        all.push(Outcome::new(name("unfused"), against_unfused(case, &r.feeds)));
    }
    for dtype in [DType::BF16, DType::F16] {
        all.push(Outcome::new(name(&dtype.to_string()), narrow(case, dtype, &r.feeds)));
    }
    all
}

/// Feeds of more numbers than this are checked along two directions, others along four.
const LARGE: usize = 1 << 22;

/// Gradients against fourth-order finite differences along random directions, of outputs in f32 summed in f64.
fn gradient(case: &Case, r: &Recorded) -> Result<f64, String> {
    // Inputs declared to have no gradient must have none; all others must have one.
    for i in frozen(case) {
        let mut one = r.graph.clone();
        one.outputs.retain(|o| o.0 == format!("g{i}"));
        sweep(&mut one);
        if Loaded::new(one, &Switches::default(), &device()).is_ok() {
            return Err(format!("input {i} has a gradient, but should have none"));
        }
    }
    let gradients: Vec<(usize, String)> = r.gradients.iter().filter(|g| !frozen(case).contains(&g.0)).cloned().collect();
    let mut graph = r.graph.clone();
    graph.outputs.retain(|o| o.0.starts_with('y') || gradients.iter().any(|g| g.1 == o.0));
    sweep(&mut graph);
    let mut p = Loaded::new(graph, &Switches::default(), &device())?;
    let names: Vec<String> = gradients.iter().map(|g| g.1.clone()).collect();
    let analytic = p.run(&r.feeds, &names)?;
    let mut loss_at = |feeds: &[(String, Numbers)]| -> Result<f64, String> {
        let ys = p.run(feeds, &r.outputs)?;
        Ok(ys.iter().zip(&r.cotangents).map(|(y, (_, c))| y.iter().zip(c).map(|(&a, &b)| a as f64 * b as f64).sum::<f64>()).sum())
    };
    let allowed = (DType::F32.rounding() as f64).sqrt();
    let step = 1.0 / 32.0;
    let is_large = r.feeds.iter().map(|f| f.1.len()).sum::<usize>() > LARGE;
    let mut worst: f64 = 0.0;
    for ((feed, _), grad) in gradients.iter().zip(&analytic) {
        let Numbers::F32(x) = &r.feeds[*feed].1 else { unreachable!("only floats have gradients") };
        let size = grad.iter().map(|&g| (g as f64).powi(2)).sum::<f64>().sqrt().max(1e-2);
        for trial in if is_large { 2..4u64 } else { 0..4 } {
            let mut u = normals(hash_name(case.name) ^ (trial + 7) << 20, x.len());
            if trial == 3 {
                // One coordinate alone: an error that vanishes in a sum shows here.
                let at = hash_name(case.name) as usize % x.len();
                u.iter_mut().enumerate().for_each(|(i, v)| *v = if i == at { 1.0 } else { 0.0 });
            }
            let expected: f64 = grad.iter().zip(&u).map(|(&g, &v)| g as f64 * v as f64).sum();
            let mut feeds = r.feeds.clone();
            let mut at = |k: f64| {
                feeds[*feed].1 = Numbers::F32(x.iter().zip(&u).map(|(&a, &d)| a + (k * step) as f32 * d).collect());
                loss_at(&feeds)
            };
            let measured = (8.0 * (at(1.0)? - at(-1.0)?) - (at(2.0)? - at(-2.0)?)) / (12.0 * step);
            let error = (expected - measured).abs() / size / allowed;
            worst = worst.max(error);
            if error.is_nan() || error > 1.0 {
                return Err(format!("input {feed}: the vjp says {expected:.6}, differences say {measured:.6} (gradient norm {size:.4})"));
            }
        }
    }
    Ok(worst)
}

fn frozen(case: &Case) -> Vec<usize> {
    (0..case.inputs.len()).filter(|&i| matches!(case.inputs[i].1, Fill::Distinct | Fill::Frozen)).collect()
}

fn repeats(r: &Recorded) -> Result<f64, String> {
    let mut graph = r.graph.clone();
    graph.outputs.retain(|o| o.0.starts_with('y'));
    sweep(&mut graph);
    let mut p = Loaded::new(graph, &Switches::default(), &device())?;
    let (a, b) = (p.run(&r.feeds, &r.outputs)?, p.run(&r.feeds, &r.outputs)?);
    match a.iter().zip(&b).all(|(x, y)| bitwise(x, y)) {
        true => Ok(0.0),
        false => Err("two runs differ".into()),
    }
}

/// What a case is fed, in any types.
type Feeds = [(String, Numbers)];

/// Names and values of a case's results on the CPU, in a type, with inputs that are rounded to another type.
fn values(case: &Case, types: (DType, DType), unfused: bool, feeds: &Feeds) -> Result<(Vec<String>, Vec<Vec<f32>>), String> {
    let mut r = record_with(case, types, unfused, false);
    r.graph.outputs.retain(|o| o.0.starts_with('y'));
    sweep(&mut r.graph);
    let numbers = Loaded::new(r.graph, &rounding(types), &device())?.run(feeds, &r.outputs)?;
    Ok((r.outputs, numbers))
}

/// Keeps a rounding from being fused away: inside one fused expression, a cast to bf16 and back would not round.
fn rounding((dtype, rounded): (DType, DType)) -> Switches {
    let value = if dtype == rounded { "auto" } else { "off" };
    Switches::default().with("fuse-pointwise", value).expect("a pass of this name")
}

fn against_unfused(case: &Case, feeds: &Feeds) -> Result<f64, String> {
    let f32 = (DType::F32, DType::F32);
    let ((names, fused), (_, unfused)) = (values(case, f32, false, feeds)?, values(case, f32, true, feeds)?);
    Allowed::new(DType::F32, longest(case)).judge_all(&names, &fused, &unfused)
}

/// Results in a narrow type against those in f32 with the same inputs.
fn narrow(case: &Case, dtype: DType, feeds: &Feeds) -> Result<f64, String> {
    let ((names, ours), (_, wide)) = (values(case, (dtype, dtype), false, feeds)?, values(case, (DType::F32, dtype), false, feeds)?);
    allowed(case, dtype, 1.0).judge_all(&names, &ours, &wide)
}

/// The tolerance of a case: the usual one, or the one that it asks for.
fn allowed(case: &Case, dtype: DType, times: f64) -> Allowed {
    let usual = Allowed::new(dtype, longest(case));
    Allowed { roundings: (times * usual.roundings).max(case.roundings.map_or(0.0, |r| r.0)), ..usual }
}

/// A case with its outputs and gradients, leaving out inputs without a gradient; without numbers if only the graph is needed.
pub(crate) fn checked(case: &Case, dtype: DType, numbers: bool) -> Recorded {
    let mut r = record_with(case, (dtype, dtype), false, numbers);
    r.graph.outputs.retain(|o| !frozen(case).iter().any(|i| o.0 == format!("g{i}")));
    sweep(&mut r.graph);
    r
}

/// Outputs and gradients on a device, several times.
pub(crate) fn outputs_on(case: &Case, dtype: DType, on: &Device, times: usize) -> Result<Vec<Vec<Vec<f32>>>, String> {
    let r = checked(case, dtype, true);
    let names: Vec<String> = r.graph.outputs.iter().map(|o| o.0.clone()).collect();
    let (mut p, guards) = Loaded::guarded(r.graph, on)?;
    let all = (0..times).map(|_| p.run(&r.feeds, &names)).collect();
    guards.check()?;
    all
}

/// Outputs and gradients, twice on the device and once on the CPU.
fn against_cpu(case: &Case, dtype: DType, target: &Device) -> Result<f64, String> {
    agree(case, dtype, &outputs_on(case, dtype, target, 2)?, &outputs_on(case, dtype, &device(), 1)?[0])
}

/// Two runs must agree bit for bit, and with the CPU within the tolerance.
pub(crate) fn agree(case: &Case, dtype: DType, twice: &[Vec<Vec<f32>>], cpu: &[Vec<f32>]) -> Result<f64, String> {
    if !twice[0].iter().zip(&twice[1]).all(|(a, b)| bitwise(a, b)) {
        return Err("two runs differ".into());
    }
    // A gradient goes through the case twice and is rounded each time. In f32, CPU and GPU add in different orders.
    let mut most = allowed(case, dtype, 2.0);
    most.length *= 4;
    most.least = case.inexact.map_or(0.0, |i| i.0);
    let names: Vec<String> = checked(case, dtype, false).graph.outputs.iter().map(|o| o.0.clone()).collect();
    most.judge_all(&names, &twice[0], cpu)
}

/// Compares a pass's own example with the pass off and on.
pub fn check_pass(pass: &dyn Switch, target: &Device) -> Outcome {
    let verdict = on_off(pass, target).unwrap_or_else(Verdict::Failed);
    Outcome { name: format!("{}: off against on", pass.name()), verdict }
}

fn on_off(pass: &dyn Switch, target: &Device) -> Result<Verdict, String> {
    let example = || {
        let r = Recorder::new();
        pass.example(&r);
        r.finish()
    };
    let graph = example();
    let feeds = feeds_of(&graph);
    // With targets, with few targets, and with targets again: steps that are skipped in one run must run again in the next.
    let mut rounds = vec![feeds.clone()];
    if let Some((at, (_, meta))) = graph.feeds().enumerate().find(|(_, f)| f.0 == "targets") {
        let mut few = feeds.clone();
        few[at].1 = fill(Fill::FewTargets(50), 1, meta.elements());
        rounds.extend([few, feeds]);
    }
    let outputs: Vec<String> = graph.outputs.iter().map(|o| o.0.clone()).collect();
    let run = |value: &str| -> Result<(Vec<Vec<f32>>, usize), String> {
        let switches = Switches::default().with(pass.name(), value).map_err(|e| e.to_string())?;
        let one = |switches: &Switches, target: &Device| {
            let mut p = Loaded::new(example(), switches, target)?;
            let applied = p.program.receipts.iter().find(|r| r.pass == pass.name()).map_or(0, |r| r.applied);
            let found = rounds.iter().map(|feeds| p.run(feeds, &outputs)).collect::<Result<Vec<_>, _>>()?;
            Ok((found.concat(), applied))
        };
        let Some(OnRanks { ranks: [data, tensor], with }) = pass.on_ranks() else { return one(&switches, target) };
        let switches = with.iter().try_fold(switches, |s, (pass, value)| s.with(pass, value)).map_err(|e| e.to_string())?;
        // Ranks as threads, on the CPU whatever the target is.
        let found = threads::each(data, tensor, |ranks| one(&switches.clone().on_ranks(ranks), &Device::cpu(crate::Cpu::new(1))));
        let found = found.into_iter().collect::<Result<Vec<_>, String>>()?;
        match found.iter().all(|f| f.0.iter().zip(&found[0].0).all(|(a, b)| bitwise(a, b))) {
            true => Ok(found.into_iter().next().expect("one rank at least")),
            false => Err(format!("{value}: the ranks differ")),
        }
    };
    if pass.required() {
        // Without other passes, which could leave it nothing to do.
        let alone = all().filter(|s| !s.required()).try_fold(Switches::default(), |switches, s| switches.with(s.name(), "off"));
        let p = Loaded::new(example(), &alone.map_err(|e| e.to_string())?, target)?;
        let applied = p.program.receipts.iter().find(|r| r.pass == pass.name()).map_or(0, |r| r.applied);
        return match (run("auto")?, applied) {
            (_, 0) => Err("applied nowhere in its own example".into()),
            _ => Ok(Verdict::Passed(0.0)),
        };
    }
    let (off, _) = run(Mode::Off.name())?;
    let narrow = graph.nodes.iter().flat_map(|n| &n.outputs).map(|m| m.dtype).find(|d| matches!(d, DType::BF16 | DType::F16));
    let numerics = pass.numerics(target.target(), narrow.unwrap_or(DType::F32));
    let names: Vec<String> = rounds.iter().flat_map(|_| outputs.clone()).collect();
    let (mut worst, mut checked): (f64, usize) = (0.0, 0);
    for value in pass.variants() {
        let (on, applied) = run(value)?;
        if applied == 0 && pass.needs_gpu() && target.target() == Target::Cpu {
            continue; // the receipt says that it does not apply
        }
        checked += 1;
        if applied == 0 {
            return Err(format!("{value}: applied nowhere in its own example"));
        }
        match numerics {
            Numerics::Exact if !off.iter().zip(&on).all(|(a, b)| bitwise(a, b)) => {
                return Err(format!("{value}: declared exact, but bits differ"));
            }
            Numerics::Exact => {}
            Numerics::Changed if off.iter().zip(&on).all(|(a, b)| bitwise(a, b)) => return Err(format!("{value}: nothing changed")),
            Numerics::Changed => {}
            Numerics::Reordered | Numerics::LowPrecision => {
                let dtype = if numerics == Numerics::LowPrecision { pass.rounds_to() } else { DType::F32 };
                let length = graph.nodes.iter().flat_map(|n| n.outputs.iter().flat_map(|m| m.shape.iter().copied())).max().unwrap_or(1);
                worst = worst.max(Allowed::new(dtype, length).judge_all(&names, &on, &off)?);
            }
        }
    }
    Ok(if checked > 0 { Verdict::Passed(worst) } else { Verdict::NotChecked("needs a GPU: on the CPU it has nothing to do".into()) })
}

/// Numbers for all feeds of a graph.
pub fn feeds_of(g: &Graph) -> Vec<(String, Numbers)> {
    g.feeds().map(|(name, meta)| (name.to_string(), feed_numbers(name, meta))).collect()
}

fn feed_numbers(name: &str, meta: &Meta) -> Numbers {
    let kind = match (name, meta.dtype) {
        ("rng", _) => Fill::Rng,
        (_, DType::I32) => Fill::Target(50),
        (_, DType::U8) => Fill::Mask,
        _ => Fill::Normal,
    };
    fill(kind, hash_name(name), meta.elements())
}

/// The source of every kernel that a case needs on an architecture, forward and backward, or may fall back to: for compiling without a GPU.
pub fn kernel_texts(case: &Case, dtype: DType, arch: Arch) -> Result<Vec<String>, String> {
    let c = Compiled::new(checked(case, dtype, false).graph, &Switches::default(), Target::Cuda(arch)).map_err(|e| e.to_string())?;
    let all = std::iter::once(arch).chain(arch.older());
    let steps = all.flat_map(|arch| crate::cuda::codes(&c.graph, &c.plan.spots, arch)).flat_map(|code| code.steps);
    Ok(steps.filter_map(|s| Some(s.kernel()?.text())).collect())
}
