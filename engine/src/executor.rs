//! Settings of the GPU executor: how a program runs, not what it computes. Switched like passes, each with a receipt.

use crate::cuda::{Cuda, Options, fallback};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node, State};
use crate::kernel::{Arch, Io, Step};
use crate::meta::DType;
use crate::ops::adamw::{AdamW, Momentum};
use crate::ops::adamw8::{AdamW8, Momentum8};
use crate::ops::attention::attention;
use crate::passes::{Mode, Numerics, Preset, Receipt, Rounding, Switch, Switches, Target};
use crate::record::Recorder;
use std::collections::HashSet;

/// A setting of the executor: an entry of [`EXECUTOR`].
pub struct Setting {
    name: &'static str,
    about: &'static str,
    default: Mode,
    numerics: fn(DType) -> Numerics,
    example: fn(&Recorder),
    /// Counts in the receipt where it applies, or declines with a reason: in the compiled graph, beside the one that was recorded.
    sites: fn([&Graph; 2], Arch, &mut Receipt),
    /// Turns it on, with the mode that it has.
    set: fn(&mut Options, Mode),
}

/// All settings of the executor, in the order of their receipts.
pub const EXECUTOR: &[Setting] = &[
    Setting {
        name: "tf32",
        about: "Rounds the inputs of f32 matmuls to TF32 (10 bits of mantissa), for tensor cores; accumulation stays f32. Nothing to do on the CPU.",
        default: Mode::Off,
        numerics: |_| Numerics::LowPrecision,
        example: |r| matmuls(r, DType::F32),
        sites: |[_, g], arch, receipt| receipt.applied = gemms(g, arch, |d| d == DType::F32),
        set: |o, _| o.tf32 = true,
    },
    Setting {
        name: "autotune",
        about: "Times the algorithms that cuBLASLt proposes for every new bf16, f16 or TF32 GEMM and remembers the fastest, on disk and with the run. Nothing to do on the CPU.",
        default: Mode::Auto,
        // The same sums in another order, rounded to a narrow type.
        numerics: |dtype| if dtype == DType::F32 { Numerics::Exact } else { Numerics::LowPrecision },
        example: |r| matmuls(r, DType::BF16),
        sites: |[_, g], arch, receipt| receipt.applied = gemms(g, arch, |d| d != DType::F32),
        set: |o, _| o.tune = true,
    },
    Setting {
        name: "overlap-launches",
        about: "Launches each kernel while the one before it is still running (programmatic dependent launch): it waits on the GPU. Needs compute capability 9.0. Nothing to do on the CPU.",
        default: Mode::Auto,
        numerics: |_| Numerics::Exact,
        example: update,
        sites: |_, arch, receipt| match arch.sm {
            90.. => receipt.applied = 1,
            sm => receipt.decline(format!("compute capability {}.{} has no programmatic dependent launch", sm / 10, sm % 10), ""),
        },
        set: |o, _| o.overlap = true,
    },
    Setting {
        name: fallback::CAPTURE,
        about: "Captures a program and replays it as one CUDA graph (one for every combination of steps, where some can be skipped), instead of launching its kernels one by one. A program that cannot be captured is declined at its first run. Nothing to do on the CPU.",
        default: Mode::Auto,
        numerics: |_| Numerics::Exact,
        example: update,
        sites: |_, _, receipt| receipt.applied = 1,
        set: |o, mode| o.capture = mode,
    },
    Setting {
        name: fallback::NATIVE,
        about: "Kernels for this GPU's generation: wgmma on compute capability 9.0, tensor cores since 8.0. One that does not compile is declined, and the op's older kernel runs instead; off: the kernels for any GPU. Nothing to do on the CPU.",
        default: Mode::Auto,
        // The same sums in another order, rounded to a narrow type.
        numerics: |dtype| if dtype == DType::F32 { Numerics::Reordered } else { Numerics::LowPrecision },
        example: heads,
        sites: |[_, g], arch, receipt| receipt.applied = natives(g, arch),
        set: |o, mode| o.native = mode,
    },
    Setting {
        name: "offload",
        about: "Keeps the optimizer's moments in pinned host memory: its kernels read and write them across the bus, which takes as long as the bus does. For models that fit in no other way. Nothing to do on the CPU.",
        default: Mode::Off,
        numerics: |_| Numerics::Exact,
        example: moments,
        sites: |graphs, _, receipt| offload(graphs, receipt),
        set: |o, _| o.offload = true,
    },
];

/// Smaller states stay on the GPU.
const LEAST_OFFLOADED: usize = 1 << 20;

/// Which of an optimizer's states go to host memory, and why others do not. Muon's momentum is one op only as it was recorded.
fn offload([recorded, g]: [&Graph; 2], receipt: &mut Receipt) {
    let go = offloaded(g);
    receipt.applied = go.len();
    let known: HashSet<&str> = [recorded, g].into_iter().flat_map(|g| moments_of(g).into_iter().map(|i| state_name(g, i))).collect();
    let stays = |s: &State| known.contains(s.name.as_str()) && !go.iter().any(|(name, _)| *name == s.name);
    let (small, others): (Vec<_>, Vec<_>) = g.states().filter(|(s, _)| stays(s)).partition(|(_, meta)| meta.bytes() < LEAST_OFFLOADED);
    for (s, _) in others {
        receipt.decline("other kernels than AdamW's read it (of Muon's momentum: adam8bit makes it smaller)", &s.name);
    }
    if receipt.applied > 0 {
        receipt.notes.push(format!("{} MiB of states in host memory", go.iter().map(|s| s.1).sum::<usize>() >> 20));
    }
    // Beside large ones they are no loss: norms and biases. Where nothing else is, they are why the setting does nothing.
    match small.len() {
        0 => {}
        n if receipt.applied > 0 => receipt.notes.push(format!("{n} of less than 1 MiB stay on the GPU")),
        _ => small.iter().for_each(|(s, _)| receipt.decline("less than 1 MiB: stays on the GPU", &s.name)),
    }
}

/// Nodes of the states that an optimizer keeps for itself: moments and momentum, with their maxima where they are quantized.
fn moments_of(g: &Graph) -> Vec<usize> {
    let own = |n: &Node| match () {
        _ if n.op::<AdamW>().is_some() => n.inputs[4..].chunks(4).flat_map(|p| p[2..].to_vec()).collect(),
        _ if n.op::<AdamW8>().is_some() => n.inputs[4..].chunks(6).flat_map(|p| p[2..].to_vec()).collect(),
        _ if n.op::<Momentum>().is_some() || n.op::<Momentum8>().is_some() => n.inputs[3..].to_vec(),
        _ => vec![],
    };
    let mut found: Vec<usize> = g.nodes.iter().flat_map(own).map(|v| v.node).filter(|&i| !state_name(g, i).is_empty()).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// The name of the state that a node is; empty if it is none.
fn state_name(g: &Graph, node: usize) -> &str {
    match &g.nodes[node].kind {
        Kind::State(s) => &s.name,
        _ => "",
    }
}

/// States of an optimizer that only its own kernels read, with their bytes.
pub fn offloaded(g: &Graph) -> Vec<(&str, usize)> {
    let readers = g.readers();
    let of_optimizer = |n: &Node| n.op::<AdamW>().is_some() || n.op::<AdamW8>().is_some() || n.op::<Momentum8>().is_some();
    let own = |i: usize| readers[i].iter().all(|&r| of_optimizer(&g.nodes[r]));
    let large = |i: &usize| g.nodes[*i].outputs[0].bytes() >= LEAST_OFFLOADED && own(*i);
    moments_of(g).into_iter().filter(large).map(|i| (state_name(g, i), g.nodes[i].outputs[0].bytes())).collect()
}

impl Switch for Setting {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn numerics(&self, _: Target, dtype: DType) -> Numerics {
        (self.numerics)(dtype)
    }

    fn default_mode(&self) -> Mode {
        self.default
    }

    fn needs_gpu(&self) -> bool {
        true
    }

    /// Those that round do it for speed; what is exact and off by default is off for another reason. Beside bf16, what is left in f32 is left
    /// there because it is sensitive: only `fast` rounds that too.
    fn rounding(&self, preset: Preset, target: Target, dtype: DType) -> Rounding {
        let rounds = (self.numerics)(dtype) == Numerics::LowPrecision;
        if target != Target::Cpu && rounds && preset != Preset::Mixed { Rounding::On } else { Rounding::Leave }
    }

    fn example(&self, r: &Recorder) {
        (self.example)(r);
    }
}

impl Options {
    /// The options that the switches ask for, and a receipt of each setting. `graphs`: as it was recorded, and as it is compiled.
    pub fn new(graphs: [&Graph; 2], switches: &Switches, target: Target) -> Result<(Options, Vec<Receipt>), Error> {
        let (mut options, mut receipts) = (Options::default(), vec![]);
        for setting in EXECUTOR {
            let receipt = switches.apply(setting, target, |_, receipt| {
                match target {
                    Target::Cpu => receipt.notes.push("the program runs on the CPU".into()),
                    Target::Cuda(arch) => (setting.sites)(graphs, arch, receipt),
                }
                if receipt.applied > 0 {
                    (setting.set)(&mut options, receipt.mode);
                }
                Ok(())
            })?;
            receipts.push(receipt);
        }
        Ok((options, receipts))
    }
}

/// How many ops launch a GEMM with inputs of a type for which `counts` is true.
fn gemms(g: &Graph, arch: Arch, counts: impl Fn(DType) -> bool) -> usize {
    let launches = |i: usize| {
        let Kind::Op(op) = &g.nodes[i].kind else { return false };
        let inputs = g.inputs(i);
        if op.is_view() || op.cost(&inputs).memory_bound {
            return false;
        }
        let code = op.cuda(&Io::plain(&inputs, &g.nodes[i].outputs, arch));
        code.steps.iter().filter_map(Step::product).any(|p| counts(p.a.dtype))
    };
    (0..g.nodes.len()).filter(|&i| launches(i)).count()
}

/// How many ops have another kernel on this GPU than on older ones.
fn natives(g: &Graph, arch: Arch) -> usize {
    let differs = |i: usize| {
        let Kind::Op(op) = &g.nodes[i].kind else { return false };
        if op.is_view() {
            return false;
        }
        let code = |arch| op.cuda(&Io::plain(&g.inputs(i), &g.nodes[i].outputs, arch));
        let own = code(arch);
        arch.older().any(|older| code(older).launches().ne(own.launches()))
    };
    (0..g.nodes.len()).filter(|&i| differs(i)).count()
}

/// Attention that is long enough for the kernels of compute capability 9.0.
fn heads(r: &Recorder) {
    let w = r.param("w", &[64, 3 * 64], Init::Normal { std: 0.2 }).cast(DType::BF16);
    let qkv = r.feed("x", &[1, 128, 64], DType::F32).cast(DType::BF16).matmul(w);
    let part = |i: usize| qkv.slice(2, 64 * i, 64 * (i + 1)).reshape(&[1, 128, 1, 64]);
    r.output("y", attention(part(0), part(1), part(2), true, 0.125).cast(DType::F32));
}

fn matmuls(r: &Recorder, dtype: DType) {
    let w = r.param("w", &[64, 64], Init::Normal { std: 1.0 }).cast(dtype);
    let x = r.feed("x", &[96, 64], DType::F32).cast(dtype);
    r.output("y", x.matmul(w).silu().matmul(w).cast(DType::F32));
}

/// A step of AdamW with moments large enough to be offloaded.
fn moments(r: &Recorder) {
    let shape = [512, 1024];
    let (w, x) = (r.param("w", &shape, Init::Normal { std: 1.0 }), r.feed("x", &shape, DType::F32));
    let [m, v] = ["m", "v"].map(|name| r.state(name, &shape, DType::F32, Init::Full(0.0)));
    let numbers = [1e-2, 1.0, 1.0, 1.0].map(|n| r.full(&[1], n));
    let after = r.op(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: vec![0.1] }, &[&numbers[..], &[w, x, m, v]].concat());
    for (state, next) in [w, m, v].into_iter().zip(&after) {
        r.update(state, *next);
    }
    r.output("after", after[0]);
}

fn update(r: &Recorder) {
    let w = r.param("w", &[4, 4], Init::Normal { std: 1.0 });
    let x = r.feed("x", &[5, 4], DType::F32);
    let y = x.matmul(w).silu();
    r.update(w, w * 0.5);
    r.output("y", y);
}

/// Bytes that a device uses besides programs and states: cuBLASLt's workspace.
pub fn own_memory(target: Target) -> usize {
    match target {
        Target::Cpu => 0,
        Target::Cuda(_) => Cuda::OWN_MEMORY,
    }
}

/// A GPU that this machine need not have: for plans, and for compiling every kernel without one.
pub fn imagined(sm: u32) -> Target {
    Target::Cuda(Arch { sm, multiprocessors: 132 })
}
