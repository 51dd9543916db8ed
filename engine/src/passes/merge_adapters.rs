//! Adds low-rank adapters to the weights that they are on, where a program is run many times before the adapters change: while replies are written.
//!
//! x W^T + s (x A^T) B^T becomes x M^T with M = W + s B A. Of the programs of a writing phase, the first (it reads the prompts) makes M and leaves it in a state,
//! and the others read that. As every phase begins with the first program, M is never older than the phase. Programs with gradients keep their adapters apart.

use super::pattern::{Reads, is_sum};
use super::zero_weights::ZeroWeights;
use super::{Mode, Numerics, Pass, Receipt, Setting, Settings, Stage, Switch, Switches, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Role, Value};
use crate::meta::{DType, Meta};
use crate::ops::matmul::Matmul;
use crate::ops::nf4::Nf4Product;
use crate::ops::pointwise::{Bin, Ins, Pointwise};
use crate::record::{Recorder, Var};
use std::collections::{HashMap, HashSet};

pub struct MergeAdapters;

/// How the names of states with merged weights begin. They are in no checkpoint.
pub const MERGED: &str = "scratch/merged/";

/// Which program of a writing phase this is, as [`phase`] says it.
const PHASE: &str = "phase";
const FIRST: &str = "first";
const LATER: &str = "later";
/// Beside it: each rank keeps a part of every weight.
const DIVIDED: &str = "divided";

impl Switch for MergeAdapters {
    fn name(&self) -> &'static str {
        "merge-adapters"
    }

    fn about(&self) -> &'static str {
        "Adds low-rank adapters to the weights they are on, x W^T + s (x A^T) B^T = x (W + s B A)^T, once before replies are written, into a copy in the type that is computed in. A token then costs what it costs without adapters. Training and its log-probabilities keep adapters apart."
    }

    fn numerics(&self, _: Target, dtype: DType) -> Numerics {
        if dtype == DType::F32 { Numerics::Reordered } else { Numerics::LowPrecision }
    }

    fn settings(&self) -> &'static [Setting] {
        &[Setting {
            name: "when",
            default: "auto",
            about: "when weights are merged. auto: before replies are written, on a GPU; phase: on the CPU too, where it takes as long as reading some 16 tokens and gains little; run: in every run of any program without gradients",
        }]
    }

    fn variants(&self) -> &'static [&'static str] {
        &["auto,when=run"]
    }

    fn example(&self, r: &Recorder) {
        let x = r.feed("x", &[2, 5, 16], DType::F32);
        let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.3 });
        let frozen = |name: &str, shape: &[usize]| r.frozen(name, shape, Init::Normal { std: 0.3 });
        let adapted = |x: Var<'_>, name: &str, n: usize| {
            let at = |part: &str| format!("{name}.{part}");
            let (a, b) = (param(&at("a"), &[4, x.dim(0)]), param(&at("b"), &[n, 4]));
            let y = x.linear(frozen(&at("weight"), &[n, x.dim(0)])) + frozen(&at("bias"), &[n]);
            (y + (x.linear(a) * 0.5).linear(b)).value()
        };
        let h = r.var(adapted(x, "up", 24)).silu();
        r.output("y", r.var(adapted(h, "down", 16)));
    }
}

impl Pass for MergeAdapters {
    fn stage(&self) -> Stage {
        Stage::Typed
    }

    fn after(&self) -> &'static [&'static str] {
        &["bf16", "fp16"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let when = settings.one_of("when", &["auto", "phase", "run"])?;
        let marked = settings.own(PHASE);
        if g.nodes.iter().any(|n| matches!(n.kind, Kind::Grad)) || marked.is_none() && when != "run" {
            return Ok(());
        }
        let (found, refused) = sites(g);
        if found.is_empty() && refused.is_empty() {
            return Ok(());
        }
        if when == "auto" && settings.target == Target::Cpu {
            receipt.notes.push("on the CPU merging costs more than it gains (when=phase merges all the same)".into());
            return Ok(());
        }
        refused.into_iter().for_each(|(sum, reason)| receipt.decline(reason, &g.nodes[sum].scope));
        let shared = settings.ranks.tensor.size > 1 || settings.own(DIVIDED).is_some();
        if shared {
            let why = "ranks share the weights, and a merged copy would be whole on each";
            found.iter().for_each(|site| receipt.decline(why, &g.nodes[site.sum].scope));
            return Ok(());
        }
        let later = marked == Some(LATER);
        let bytes = rewrite(g, &found, marked)?;
        receipt.applied = found.len();
        let mib = bytes as f64 / (1 << 20) as f64;
        receipt.notes.extend(match (found.len(), marked) {
            (0, _) => None,
            (n, _) if later => Some(format!("{n} merged weights read")),
            (n, Some(_)) => Some(format!("{n} adapters merged once for each writing phase, into {mib:.1} MiB")),
            (n, None) => Some(format!("{n} adapters merged in every run")),
        });
        Ok(())
    }
}

/// Switches of the programs of a writing phase: of the one that is run first, and of the others, which follow it before any weight changes. None where the
/// pass is off.
pub fn phase(switches: &Switches, target: Target) -> Option<[Switches; 2]> {
    let divided = switches.ranks.data.size > 1 && switches.mode(&ZeroWeights, target) != Mode::Off;
    let marked = |which: &str| {
        let with = switches.with_own(&MergeAdapters, target, PHASE, which)?;
        if divided { with.with_own(&MergeAdapters, target, DIVIDED, "") } else { Some(with) }
    };
    Some([marked(FIRST)?, marked(LATER)?])
}

/// Whether each merged weight that `later` reads is one that `first` makes.
pub fn follows(first: &Graph, later: &Graph) -> bool {
    let made: HashMap<&str, &Meta> =
        first.updates.iter().filter_map(|(state, _)| Some((merged_name(first, *state)?, first.meta(*state)))).collect();
    later.states().filter(|(s, _)| s.name.starts_with(MERGED)).all(|(s, meta)| made.get(s.name.as_str()) == Some(&meta))
}

fn merged_name(g: &Graph, state: Value) -> Option<&str> {
    match &g.nodes[state.node].kind {
        Kind::State(s) => Some(s.name.as_str()).filter(|name| name.starts_with(MERGED)),
        _ => None,
    }
}

/// A sum of what a frozen matrix makes of x, and of what its adapter makes of x.
struct Site {
    sum: usize,
    /// The sum's input to which the adapter is added.
    y: Value,
    /// x W^T
    wide: usize,
    /// W [n, k], B [n, r] and A [r, k].
    weight: Value,
    b: Value,
    a: Value,
    scale: f32,
    /// The name of W's state.
    name: String,
}

/// s (x A^T) B^T
struct Adapter {
    x: Value,
    a: Value,
    b: Value,
    scale: f32,
}

/// Sums that can be merged; and those that look like it and cannot, with the reason.
fn sites(g: &Graph) -> (Vec<Site>, Vec<(usize, String)>) {
    let (reads, updated): (_, HashSet<usize>) = (g.reads(), g.updates.iter().map(|u| u.0.node).collect());
    let (mut found, mut refused): (Vec<Site>, _) = (vec![], vec![]);
    let mut known: HashMap<String, [Value; 2]> = HashMap::new(); // of a weight: its adapter
    for (sum, node) in g.nodes.iter().enumerate() {
        let (Some(p), &[x, y]) = (node.op::<Pointwise>(), &node.inputs[..]) else { continue };
        if !is_sum(p) || [x, y].iter().any(|v| *g.meta(*v) != node.outputs[0]) {
            continue;
        }
        match [(x, y), (y, x)].into_iter().find_map(|(y, added)| site(g, &reads, sum, y, added)) {
            Some(Ok(site)) => {
                let states = [site.weight, site.a, site.b].map(|v| state_of(g, v));
                let own = *known.entry(site.name.clone()).or_insert([site.a, site.b]);
                if states.iter().flatten().any(|i| updated.contains(i)) {
                    refused.push((sum, "this program updates the weight or its adapter".into()));
                } else if own != [site.a, site.b] {
                    refused.push((sum, "the weight has another adapter elsewhere".into()));
                } else {
                    found.push(site);
                }
            }
            Some(Err(reason)) => refused.push((sum, reason)),
            None => {}
        }
    }
    (found, refused)
}

/// The sum of `y` and `added` as a site, or why it is none; None if it does not look like one.
fn site(g: &Graph, reads: &Reads, sum: usize, y: Value, added: Value) -> Option<Result<Site, String>> {
    let Adapter { x, a, b, scale } = adapter(g, added)?;
    let wide = wide(g, y)?;
    let refused = |why: &str| Some(Err(why.to_string()));
    let own = g.unshaped(g.nodes[wide].inputs[0]);
    if own != x {
        // What the adapter reads is what the matrix reads, with elements dropped.
        let node = &g.nodes[x.node];
        let dropped = node.op::<Pointwise>().is_some_and(|p| p.expr.draws()) && node.inputs.iter().any(|&v| g.unshaped(v) == own);
        return if crate::mutant!("merged-adapters-under-dropout", dropped, false) {
            refused("the adapter's input has dropout")
        } else {
            None
        };
    }
    if g.nodes[wide].op::<Nf4Product>().is_some() {
        return refused("the weight has four bits (NF4), and would take 16 once it is merged");
    }
    let Some((weight, name)) = g.plain_matmul(wide).and_then(|m| g.transpose_of(m[1])).and_then(|v| Some((v, frozen(g, v)?))) else {
        return refused("the weight is not frozen, or not stored as [out, in]");
    };
    let (w, a_shape, b_shape) = (&g.meta(weight).shape, &g.meta(a).shape, &g.meta(b).shape);
    if *a_shape != [b_shape[1], w[1]] || b_shape[0] != w[0] {
        return None;
    }
    let mut v = y;
    loop {
        if !reads.once(v) {
            return refused("what the matrix makes is also read without its adapter");
        }
        match v.node == wide {
            true => break,
            false => v = g.nodes[v.node].inputs.iter().copied().find(|&v| leads_to(g, v, wide))?,
        }
    }
    Some(Ok(Site { sum, y, wide, weight, b, a, scale, name }))
}

/// The product that `y` is, looking through reshapes and a bias.
fn wide(g: &Graph, y: Value) -> Option<usize> {
    let node = &g.nodes[g.unshaped(y).node];
    if node.op::<Matmul>().is_some() || node.op::<Nf4Product>().is_some_and(|p| p.transposed) {
        return Some(g.unshaped(y).node);
    }
    let (Some(p), &[a, b]) = (node.op::<Pointwise>(), &node.inputs[..]) else { return None };
    let is_bias = |v: Value| g.state_role(v).is_some() && g.meta(v).elements() == g.meta(y).dim(0);
    match (is_sum(p), is_bias(a), is_bias(b)) {
        (true, false, true) => wide(g, a),
        (true, true, false) => wide(g, b),
        _ => None,
    }
}

/// Whether `wide` finds this product from `v`.
fn leads_to(g: &Graph, v: Value, product: usize) -> bool {
    wide(g, v) == Some(product)
}

fn adapter(g: &Graph, v: Value) -> Option<Adapter> {
    let product = |v: Value| {
        let [left, right] = g.plain_matmul(g.unshaped(v).node)?;
        let weight = g.transpose_of(right).filter(|&w| state_of(g, w).is_some())?;
        Some((g.unshaped(left), weight))
    };
    let (narrow, b) = product(v)?;
    let (narrow, scale) = scaled(g, narrow);
    let (x, a) = product(narrow)?;
    Some(Adapter { x, a, b, scale })
}

/// `v` as another value times a constant.
fn scaled(g: &Graph, v: Value) -> (Value, f32) {
    let node = &g.nodes[v.node];
    let Some(p) = node.op::<Pointwise>().filter(|_| node.inputs.len() == 1) else { return (v, 1.0) };
    match (&p.expr.ins[..], &p.expr.outs[..]) {
        (&[Ins::In(0), Ins::Const(c), Ins::Bin(Bin::Mul, 0, 1)], [2]) => (g.unshaped(node.inputs[0]), c),
        _ => (v, 1.0),
    }
}

/// The node of the state that `v` is, looking through casts.
fn state_of(g: &Graph, v: Value) -> Option<usize> {
    let node = &g.nodes[v.node];
    match node.kind {
        Kind::State(_) => Some(v.node),
        _ if node.is_cast() => state_of(g, node.inputs[0]),
        _ => None,
    }
}

/// The name of the frozen state that `v` is.
fn frozen(g: &Graph, v: Value) -> Option<String> {
    match &g.nodes[state_of(g, v)?].kind {
        Kind::State(s) if s.role == Role::Frozen => Some(s.name.clone()),
        _ => None,
    }
}

/// Products read merged weights; returns how many bytes of them the program makes.
fn rewrite(g: &mut Graph, sites: &[Site], phase: Option<&str>) -> Result<usize, Error> {
    let by_wide: HashMap<usize, &Site> = sites.iter().map(|s| (s.wide, s)).collect();
    let by_sum: HashMap<usize, &Site> = sites.iter().map(|s| (s.sum, s)).collect();
    let mut merged: HashMap<&str, Value> = HashMap::new();
    let mut updates: Vec<(Value, Value)> = vec![];
    g.rewrite(|w, i, _, inputs| {
        if let Some(site) = by_sum.get(&i) {
            return Ok::<_, Error>(Some(vec![w.at(site.y)]));
        }
        let (Some(site), r) = (by_wide.get(&i), w.recorder) else { return Ok(None) };
        let meta = w.old.meta(site.weight);
        let made = *merged.entry(&site.name).or_insert_with(|| {
            let state = || r.state(&format!("{MERGED}{}", site.name), &meta.shape, meta.dtype, Init::Full(0.0));
            if phase == Some(LATER) {
                return state().value();
            }
            let [weight, b, a] = [site.weight, site.b, site.a].map(|v| w.at(v));
            let product = r.op1(Matmul { dtype: Some(DType::F32), ..Matmul::default() }, &[b, a]);
            let scale = crate::mutant!("merged-adapters-without-their-scale", site.scale, 1.0);
            let made = (weight.cast(DType::F32) + product * scale).cast(meta.dtype);
            if phase == Some(FIRST) {
                updates.push((state().value(), made.value()));
            }
            made.value()
        });
        Ok(Some(vec![inputs[0].matmul(r.var(made).t())]))
    })?;
    let bytes = updates.iter().map(|(state, _)| g.meta(*state).bytes()).sum();
    g.updates.extend(updates);
    super::sweep(g);
    Ok(bytes)
}
