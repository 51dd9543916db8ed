//! FP8 GEMMs: the matmuls of linear layers, forward and backward, with operands rounded to eight bits.

mod record;

use super::{Mode, Numerics, Pass, Preset, Receipt, Rounding, Setting, Settings, Stage, Switch, Switches, Target, WarmUp};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Role, Value};
use crate::kernel::Arch;
use crate::meta::{DType, Meta};
use crate::op::{Narrow, Port};
use crate::ops::collective::Broadcast;
use crate::ops::concat::Concat;
use crate::ops::matmul::Matmul;
use crate::philox::hash_name;
use crate::record::Recorder;
use record::{Gemms, KEPT, Weights, in_common, rewrite};
use std::collections::{HashMap, HashSet};

pub struct Fp8;

/// How the names of its states begin.
pub const STATES: &str = "fp8.";

/// Which of several runs with the same weights a program is for, and the first of them.
const RUN: &str = "run";
const FIRST: &str = "first";

/// Tokens below which a GEMM is bound by reading its weights.
const LEAST_ROWS: usize = 256;

impl Switch for Fp8 {
    fn name(&self) -> &'static str {
        "fp8"
    }

    fn about(&self) -> &'static str {
        "Linear layers in FP8 while training: activations and weights in e4m3, gradients in e5m2, each tensor with one scale; sums in f32, master weights as they were. Head, embedding, norms, routers and attention stay as they are."
    }

    fn default_mode(&self) -> Mode {
        Mode::Off
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::LowPrecision
    }

    fn rounding(&self, preset: Preset, target: Target, dtype: DType) -> Rounding {
        match target {
            _ if preset != Preset::Fast => Rounding::Leave,
            Target::Cpu => Rounding::Off("the CPU computes in f32, so FP8 gains nothing there".into()),
            Target::Cuda(_) if dtype == DType::F16 => Rounding::Off("the run computes in fp16, and FP8 goes with bf16".into()),
            Target::Cuda(arch) => too_old(arch).map_or(Rounding::On, Rounding::Off),
        }
    }

    fn settings(&self) -> &'static [Setting] {
        &[
            Setting {
                name: "scaling",
                default: "delayed",
                about: "what a tensor's scale follows from. delayed: the largest absolute values of its last `history` steps; current: its own, for one more read of every tensor",
            },
            Setting { name: "history", default: "16", about: "with scaling=delayed: steps that a scale looks back on" },
            Setting {
                name: "warmup",
                default: "8",
                about: "with scaling=delayed: steps at the start of a run that are computed without FP8, while the ranges of all tensors are observed",
            },
            Setting {
                name: "sums",
                default: "mixed",
                about: "how tensor cores add. fast: some 14 bits; f32: every few products in f32; mixed: fast in the forward pass, f32 in the backward pass",
            },
            Setting {
                name: "least",
                default: "256",
                about: "the least N K / (N + K) of a weight [N, K] for which FP8 pays for rounding the operands: 512 x 512, or 341 x 1024",
            },
            Setting {
                name: "frozen",
                default: "bf16",
                about: "GEMMs of frozen weights, below adapters. bf16: not in FP8, which was no faster there, and adapters learned more slowly; fp8: like those of other weights",
            },
            Setting {
                name: "weights",
                default: "step",
                about: "when weights are rounded, where a step has several micro-batches. step: once, and kept for the others, in one or two bytes a weight; each: in every micro-batch",
            },
            Setting {
                name: "gemms",
                default: "fp8",
                about: "fp8; bf16: nothing is computed in FP8, only ranges are observed, as during the warm-up",
            },
        ]
    }

    fn rounds_to(&self) -> DType {
        DType::E4M3
    }

    fn variants(&self) -> &'static [&'static str] {
        &["auto,least=8,scaling=current"]
    }

    fn example(&self, r: &Recorder) {
        let (a, b) = (r.param("a", &[32, 16], Init::Normal { std: 0.3 }), r.param("b", &[16, 32], Init::Normal { std: 0.3 }));
        let x = r.feed("x", &[256, 16], DType::F32);
        let loss = (x + x.linear(a).silu().linear(b)).square().mean();
        r.output("loss", loss);
        for (name, g) in ["da", "db"].iter().zip(r.grad(loss, &[a, b])) {
            r.output(name, g);
        }
    }
}

impl Pass for Fp8 {
    fn stage(&self) -> Stage {
        Stage::Differentiated
    }

    fn after(&self) -> &'static [&'static str] {
        &["bf16", "merged-qkv", "autodiff", "dead-code"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let delayed = settings.one_of("scaling", &["delayed", "current"])? == "delayed";
        let (history, runs) = (settings.number("history")?, settings.number_or_none("warmup")?);
        if !delayed {
            settings.unused(&["history", "warmup"], "scaling=delayed")?;
        }
        let sums = settings.one_of("sums", &["mixed", "fast", "f32"])?;
        let active = settings.one_of("gemms", &["fp8", "bf16"])? == "fp8";
        let least = settings.number_or_none("least")?;
        let frozen = settings.one_of("frozen", &["bf16", "fp8"])? == "fp8";
        let once = settings.one_of("weights", &["step", "each"])? == "step";
        let weights = match settings.own(RUN).filter(|_| once && active) {
            Some(FIRST) => Weights::Keep,
            Some(_) => Weights::Kept,
            None => Weights::Round,
        };
        if !active && !delayed {
            let problem = "gemms=bf16 only observes, which scaling=current has no use for".into();
            return Err(Error::PassSetting { pass: self.name().into(), problem });
        }
        if settings.ranks.size() > 1 && !delayed {
            receipt.decline("scaling=current on several ranks would exchange the largest value of every tensor before it is rounded: use scaling=delayed", "");
            return Ok(());
        }
        if !g.nodes.iter().any(|n| n.backward) {
            return Ok(()); // evaluation and generation are not worth the error
        }
        if let Target::Cuda(arch) = settings.target
            && let Some(why) = too_old(arch)
        {
            let problem = format!("{why}; --pass bf16=auto is the narrowest type here");
            return Err(Error::PassSetting { pass: self.name().into(), problem });
        }
        let sites = Sites::find(g, least, frozen, receipt);
        if sites.matmuls.is_empty() {
            return Ok(());
        }
        receipt.applied = sites.matmuls.len();
        if sites.matmuls.keys().all(|&i| g.nodes[i].outputs[0].dtype == DType::F32) {
            receipt.notes.push("everything else is in f32: --pass bf16=auto goes with it".into());
        }
        let name = sites.name(g);
        if delayed && runs > 0 && active && weights != Weights::Kept {
            let rest = ["scaling", "history", "sums", "least", "frozen"].map(|s| format!(",{s}={}", settings.text(s))).concat();
            receipt.warm_up = Some(WarmUp {
                pass: self.name(),
                counter: format!("{STATES}steps/{name}"),
                runs: runs as u64,
                value: format!("auto,gemms=bf16{rest}"),
            });
            receipt.notes.push(format!("after {runs} micro-batch{} without it", if runs == 1 { "" } else { "es" }));
        }
        let bytes = rewrite(g, &sites, &Gemms { active, sums, delayed: delayed.then_some(history), weights, name: &name })?;
        if bytes > 0 {
            receipt.notes.push(format!("weights are rounded once a step and kept, in {:.1} MiB", bytes as f64 / (1 << 20) as f64));
        }
        in_common(g, settings.ranks)
    }
}

/// Whether a program keeps weights that it rounds.
pub fn keeps_weights(g: &Graph) -> bool {
    g.states().any(|(state, _)| state.name.starts_with(KEPT))
}

/// Switches of a program that runs several times before its weights change: of the first run, and of the others. None where the pass is off.
pub fn repeated(switches: &Switches, target: Target) -> Option<[Switches; 2]> {
    Some([switches.with_own(&Fp8, target, RUN, FIRST)?, switches.with_own(&Fp8, target, RUN, "later")?])
}

/// Why this GPU has no FP8 GEMMs.
fn too_old(arch: Arch) -> Option<String> {
    let Arch { sm, .. } = arch;
    (sm < 89).then(|| format!("needs a GPU of compute capability 8.9 or later (this one has {}.{})", sm / 10, sm % 10))
}

/// A matrix that is rounded to FP8.
struct Tensor {
    /// What is rounded: a weight before it was cast to bf16, or another operand as it is.
    from: Value,
    dtype: DType,
    /// Whether it is needed as it is, and transposed.
    rows: bool,
    columns: bool,
    /// Whether it is a weight, which changes only between steps.
    weight: bool,
}

/// Matmuls that are computed in FP8, and their operands.
#[derive(Default)]
struct Sites {
    tensors: Vec<Tensor>,
    known: HashMap<(Value, Vec<usize>), usize>,
    /// By node: for both operands, which tensor, and whether it is read transposed to how it is stored.
    matmuls: HashMap<usize, [(usize, bool); 2]>,
}

impl Sites {
    fn find(g: &Graph, least: usize, frozen: bool, receipt: &mut Receipt) -> Sites {
        let mut sites = Sites::default();
        let mut weights: HashSet<Value> = HashSet::new();
        let mut inputs: HashSet<(Value, Vec<usize>)> = HashSet::new();
        let readers = g.readers();
        for (i, node) in g.nodes.iter().enumerate().filter(|(_, n)| !n.backward && !n.typed && !n.narrow) {
            match operand(g, i) {
                Some(Narrow::Sixteen(reason)) => {
                    receipt.decline(reason, &node.scope);
                    continue;
                }
                Some(_) => {}
                None => continue,
            }
            // These are left alone in every model, which is no reason to fail where the pass is required.
            if let Some(reason) = sensitive(g, &readers, Value { node: i, out: 0 }) {
                if !receipt.notes.iter().any(|n| n == reason) {
                    receipt.notes.push(reason.into());
                }
                continue;
            }
            let Some([a, b]) = g.plain_matmul(i) else { continue };
            let (x, w) = match (is_weight(g, a), is_weight(g, b)) {
                (false, true) => (a, b),
                (true, false) => (b, a),
                _ => {
                    if [a, b].into_iter().any(|v| is_made_of_weights(g, v, 0)) {
                        receipt.decline("its weight is computed at every step, as sparse-2:4 does", &node.scope);
                    }
                    continue;
                }
            };
            if !frozen && is_weight_of(g, w, &[Role::Frozen]) {
                receipt.decline("the weight is frozen (frozen=fp8 rounds it all the same)", &node.scope);
                continue;
            }
            match too_small(g, [a, b], g.meta(w), least) {
                Some(reason) => receipt.decline(reason, &node.scope),
                None => {
                    weights.insert(stored(g, w).0);
                    inputs.insert(key(g, x));
                    sites.add(g, i, [a, b], Some(w), |_| DType::E4M3);
                }
            }
        }
        for (i, node) in g.nodes.iter().enumerate().filter(|(_, n)| n.backward && !n.typed) {
            let plain = node.op::<Matmul>().is_some_and(|m| Matmul { dtype: None, ..m.clone() } == Matmul::default());
            let (true, &[a, b]) = (plain && node.outputs[0].rank() == 2, &node.inputs[..]) else { continue };
            let (weight, input) = (|v: Value| weights.contains(&stored(g, v).0), |v: Value| inputs.contains(&key(g, v)));
            let gradient = match ([a, b].map(weight), [a, b].map(input)) {
                ([false, true], _) | ([false, false], [false, true]) => a,
                ([true, false], _) | ([false, false], [true, false]) => b,
                _ => continue,
            };
            let of_weight = [a, b].map(weight) == [false, false];
            let wide = if of_weight { &node.outputs[0] } else { g.meta(if gradient == a { b } else { a }) };
            if too_small(g, [a, b], wide, least).is_some() {
                continue; // a LoRA matrix: its forward matmul was declined
            }
            let other = if gradient == a { b } else { a };
            sites.add(g, i, [a, b], (!of_weight).then_some(other), |v| if v == gradient { DType::E5M2 } else { DType::E4M3 });
        }
        sites
    }

    fn add(&mut self, g: &Graph, i: usize, operands: [Value; 2], weight: Option<Value>, dtype: impl Fn(Value) -> DType) {
        let mut sides = [(0, false); 2];
        for (k, v) in operands.into_iter().enumerate() {
            let transposed = stored(g, v).1;
            let at = *self.known.entry(key(g, v)).or_insert_with(|| {
                let from = if weight == Some(v) { stem(g, v) } else { stored(g, v).0 };
                self.tensors.push(Tensor {
                    from,
                    dtype: dtype(v),
                    rows: false,
                    columns: false,
                    weight: weight == Some(v) && is_weight(g, from),
                });
                self.tensors.len() - 1
            });
            // The left operand is read by rows, the right one by columns: tensor cores want both along the sum.
            let turned = transposed == (k == 0);
            self.tensors[at].columns |= turned;
            self.tensors[at].rows |= !turned;
            sides[k] = (at, turned);
        }
        self.matmuls.insert(i, sides);
    }

    /// Under which name scales are kept: programs that round the same tensors of a model share them.
    fn name(&self, g: &Graph) -> String {
        let one = |t: &Tensor| format!("{} {} {};", g.nodes[t.from.node].scope, t.dtype, g.meta(t.from).dim(0));
        let all: String = self.tensors.iter().map(one).collect();
        format!("{:08x}", hash_name(&all) as u32)
    }
}

/// How far the operands of a GEMM may be rounded; None of other ops.
fn operand(g: &Graph, i: usize) -> Option<Narrow> {
    let Kind::Op(op) = &g.nodes[i].kind else { return None };
    let x = g.inputs(i);
    (0..x.len()).map(|k| op.precision(Port::In(k), &x)).find(|n| matches!(n, Narrow::Eight | Narrow::Sixteen(_)))
}

/// A trained or frozen weight, or several side by side.
fn is_weight(g: &Graph, v: Value) -> bool {
    is_weight_of(g, v, &[Role::Param, Role::Frozen])
}

/// The same of states with one of these roles.
fn is_weight_of(g: &Graph, v: Value, roles: &[Role]) -> bool {
    let of = stored(g, v).0;
    let weight = |v: Value| g.state_role(v).is_some_and(|role| roles.contains(&role));
    weight(of) || g.nodes[of.node].op::<Concat>().is_some() && g.nodes[of.node].inputs.iter().all(|&v| weight(v))
}

/// Whether `v` is computed from weights alone.
fn is_made_of_weights(g: &Graph, v: Value, depth: usize) -> bool {
    let node = &g.nodes[v.node];
    match &node.kind {
        Kind::State(s) => s.role == Role::Param,
        Kind::Op(op) if depth < 8 && op.is::<Matmul>().is_none() => {
            !node.inputs.is_empty() && node.inputs.iter().all(|&v| is_made_of_weights(g, v, depth + 1))
        }
        _ => false,
    }
}

/// Why an op that reads this value, perhaps cast or through a view, wants no error of FP8 in it.
fn sensitive(g: &Graph, readers: &[Vec<usize>], v: Value) -> Option<&'static str> {
    readers[v.node].iter().find_map(|&r| {
        let node = &g.nodes[r];
        let Kind::Op(op) = &node.kind else { return None };
        if node.is_view() || node.is_cast() {
            return sensitive(g, readers, Value { node: r, out: 0 });
        }
        let (x, at) = (g.inputs(r), node.inputs.iter().position(|&input| input == v)?);
        match op.precision(Port::In(at), &x) {
            Narrow::Sensitive(why) => Some(why),
            _ => None,
        }
    })
}

/// The matrix that is stored, and whether `v` is its transpose.
fn stored(g: &Graph, v: Value) -> (Value, bool) {
    g.transpose_of(v).map_or((v, false), |of| (of, true))
}

/// Operands with the same key are the same matrix.
fn key(g: &Graph, v: Value) -> (Value, Vec<usize>) {
    let of = stored(g, v).0;
    (g.unshaped(of), g.meta(of).shape.clone())
}

/// A weight before it was cast.
fn stem(g: &Graph, v: Value) -> Value {
    let mut of = stored(g, v).0;
    while g.nodes[of.node].op::<Broadcast>().is_some() {
        of = g.nodes[of.node].inputs[0];
    }
    let node = &g.nodes[of.node];
    if node.is_cast() && g.meta(node.inputs[0]).dtype.is_float() { node.inputs[0] } else { of }
}

/// Why FP8 does not pay for this matmul, or is impossible. `weight`: the matrix that is a weight, or a weight's gradient.
fn too_small(g: &Graph, [a, b]: [Value; 2], weight: &Meta, least: usize) -> Option<String> {
    let (m, k, n) = (g.meta(a).dim(1), g.meta(a).dim(0), g.meta(b).dim(0));
    let (rows, columns) = (weight.dim(1), weight.dim(0));
    let tokens = m * k * n / (rows * columns);
    if [m, k, n].iter().any(|d| !d.is_multiple_of(16)) {
        return Some(format!("{m} x {k} x {n}: FP8 GEMMs need multiples of 16"));
    }
    if tokens < LEAST_ROWS {
        return Some(format!("{tokens} rows: fewer than {LEAST_ROWS} are bound by reading the weights"));
    }
    let small = rows * columns < least.saturating_mul(rows + columns);
    small.then(|| format!("a weight of {rows} x {columns} is too small to pay for rounding the operands (least={least})"))
}
