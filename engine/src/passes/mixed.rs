//! Mixed precision: activations and matmuls in bf16 or fp16, parameters and optimizer states in f32; for fp16 with a loss scale.

use super::{Mode, Numerics, Pass, Preset, Receipt, Rounding, Setting, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node, Role, Value};
use crate::meta::{DType, Meta};
use crate::op::{Narrow, Op, Port};
use crate::ops::adamw::global_norm;
use crate::ops::collective::{Broadcast, all_reduce};
use crate::record::{Recorder, Var};
use crate::store::Store;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Rounds to this type: BF16 or F16.
pub struct Mixed(pub DType);

/// The loss scale grows no further: smaller gradients than it makes visible count for nothing.
const MOST: f32 = 16_777_216.0;

/// How the names of the states of the loss scale begin.
pub const STATES: &str = "fp16.";

impl Switch for Mixed {
    fn name(&self) -> &'static str {
        if self.0 == DType::F16 { "fp16" } else { "bf16" }
    }

    fn about(&self) -> &'static str {
        match self.0 {
            DType::F16 => {
                "Computes matmuls, attention and activations in fp16: as bf16, with a dynamic loss scale: it doubles after `interval` micro-batches without an overflow, up to 2^24, and halves after one, whose step is skipped."
            }
            _ => {
                "Computes matmuls, attention and activations in bf16. Parameters and optimizer states stay f32; norms, softmax and loss accumulate in f32."
            }
        }
    }

    fn default_mode(&self) -> Mode {
        Mode::Off
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::LowPrecision
    }

    /// fp16 is never the faster of the two.
    fn rounding(&self, preset: Preset, target: Target, dtype: DType) -> Rounding {
        match (self.0, target, dtype) {
            (DType::BF16, Target::Cuda(_), DType::BF16) => Rounding::On,
            (DType::BF16, Target::Cuda(_), DType::F16) => Rounding::Off("the run computes in fp16".into()),
            (DType::BF16, Target::Cpu, _) if preset == Preset::Fast => {
                Rounding::Off("the CPU computes in f32, so bf16 gains nothing there".into())
            }
            _ => Rounding::Leave,
        }
    }

    fn settings(&self) -> &'static [Setting] {
        match self.0 {
            DType::F16 => &[
                Setting { name: "residual", default: "fp16", about: "as of bf16: fp16 or f32" },
                Setting {
                    name: "scale",
                    default: "65536",
                    about: "the loss scale of the first step of a run; one that is resumed has its own",
                },
                Setting {
                    name: "interval",
                    default: "2000",
                    about: "micro-batches without an overflow after which the loss scale doubles",
                },
            ],
            _ => &[Setting {
                name: "residual",
                default: "bf16",
                about: "type of the residual stream. bf16: rounded like other activations; f32: the embedding's rows, and every sum with them, stay f32",
            }],
        }
    }

    fn rounds_to(&self) -> DType {
        self.0
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[32, 32], Init::Normal { std: 0.2 });
        let frozen = r.frozen("frozen", &[32, 32], Init::Normal { std: 0.2 });
        let norm = r.param("norm", &[32], Init::Full(1.0));
        let x = r.feed("x", &[64, 32], DType::F32);
        let loss = (x.matmul(w).silu().rms_norm(norm, 1e-6) * x.linear(frozen)).mean();
        r.output("loss", loss);
        r.output("dw", r.grad(loss, &[w])[0]);
    }
}

impl Pass for Mixed {
    fn stage(&self) -> Stage {
        Stage::Typed
    }

    fn after(&self) -> &'static [&'static str] {
        if self.0 == DType::F16 { &["decompose", "bf16"] } else { &["decompose"] }
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let (narrow, wide) = (self.0, settings.one_of("residual", &[self.name(), "f32"])? == "f32");
        if narrow == DType::F16 && settings.ranks.tensor.size > 1 {
            receipt.decline("ranks that share the weights would each scale the loss by what overflows in their own part", "");
            return Ok(());
        }
        if g.nodes.iter().flat_map(|n| &n.outputs).any(|m| m.dtype == DType::BF16) && narrow == DType::F16 {
            return Err(Error::PassSetting { pass: self.name().into(), problem: "bf16 is on already: choose one of the two".into() });
        }
        let scale = match narrow {
            DType::F16 => Some((first_scale(settings.number("scale")?)?, settings.number("interval")? as f32)),
            _ => None,
        };
        let mut scaled = Scaled::default();
        // With gradients: only the nodes that the loss depends on; without: all nodes. Never nodes recorded under `Recorder::typed`.
        let losses: Vec<Value> = g.nodes.iter().filter(|n| matches!(n.kind, Kind::Grad)).map(|n| n.inputs[0]).collect();
        let mut inside = if losses.is_empty() { vec![true; g.nodes.len()] } else { g.needed_by(losses.into_iter()) };
        let open = |typed: bool| crate::mutant!("bf16-narrows-what-is-typed", !typed, true);
        inside.iter_mut().zip(&g.nodes).for_each(|(inside, node)| *inside = (*inside || node.narrow) && open(node.typed));
        let old_updates = g.updates.clone();
        let mut updates: HashMap<usize, Vec<(Value, Value)>> = HashMap::new(); // by the node that makes the state's next value
        old_updates.iter().for_each(|u| updates.entry(u.1.node).or_default().push(*u));
        let caches = caches(g, &inside);
        let types: Vec<Vec<DType>> = (0..g.nodes.len()).map(|i| g.inputs(i).iter().map(|m| m.dtype).collect()).collect();
        let mut casts: HashMap<Value, Value> = HashMap::new();
        let mut widened: HashMap<Value, Value> = HashMap::new();
        let mut restored: HashMap<Value, Value> = HashMap::new();
        let mut frozen = 0;
        g.rewrite(|w, i, node, inputs| {
            let recorder = w.recorder;
            let new = match &node.kind {
                // Frozen weights are never updated, so they are stored rounded. Decided by shape alone, so that all programs of a run agree.
                Kind::State(s) if s.role == Role::Frozen && node.outputs[0].rank() > 1 => {
                    frozen += 1;
                    Some(vec![recorder.retyped(s, Meta::new(&node.outputs[0].shape, narrow))])
                }
                Kind::State(s) if caches.contains(&i) => Some(vec![recorder.retyped(s, Meta::new(&node.outputs[0].shape, narrow))]),
                Kind::Op(op) if inside[i] && !op.is_view() => Some(rewritten(op, inputs, recorder, (narrow, wide), &mut casts, receipt)),
                // A view has its input's type; nodes that the loss does not depend on compute in the types they were recorded with.
                Kind::Op(op) if op.is_view() => Some(recorder.op_arc(op.clone(), inputs)),
                Kind::Op(op) => {
                    let mut back = |(v, &d): (&Var<'_>, &DType)| match d.is_float() && v.dtype() != d {
                        true => *widened.entry(v.value()).or_insert_with(|| v.cast(d).value()),
                        false => v.value(),
                    };
                    let x: Vec<Value> = inputs.iter().zip(&types[i]).map(&mut back).collect();
                    Some(recorder.op_arc(op.clone(), &x.into_iter().map(|v| recorder.var(v)).collect::<Vec<_>>()))
                }
                Kind::Grad => {
                    // The loss itself is f32.
                    let loss = inputs[0].cast(DType::F32);
                    Some(match scale {
                        Some(scale) => scaled.gradients(recorder, loss, &inputs[1..], scale),
                        None => recorder.grad(loss, &inputs[1..]),
                    })
                }
                _ => None,
            };
            // An update is cast back to its state's type, which changes only for a KV cache.
            for &(state, old) in updates.get(&i).into_iter().flatten() {
                let dtype = if caches.contains(&state.node) { narrow } else { node.outputs[old.out].dtype };
                if let Some(vars) = new.as_ref().filter(|vars| vars[old.out].dtype() != dtype) {
                    restored.insert(old, vars[old.out].cast(dtype).value());
                }
            }
            Ok::<_, Error>(new)
        })?;
        if frozen > 0 {
            receipt.notes.push(format!("{frozen} frozen weights kept in {}", self.name()));
        }
        for (update, (_, old)) in g.updates.iter_mut().zip(old_updates) {
            if let Some(&v) = restored.get(&old) {
                update.1 = v;
            }
        }
        scaled.finish(g);
        Ok(())
    }
}

/// Whether this may be rounded to 16 bits.
fn may_round(rule: &Narrow) -> bool {
    matches!(rule, Narrow::Round | Narrow::Eight | Narrow::Sixteen(_))
}

/// KV caches: carried f32 states that an op updates in place and that it allows to be rounded.
fn caches(g: &Graph, inside: &[bool]) -> HashSet<usize> {
    let of = |(i, node): (usize, &Node)| {
        let Kind::Op(op) = &node.kind else { return vec![] };
        let x = g.inputs(i);
        let state =
            |v: &Value| matches!(&g.nodes[v.node].kind, Kind::State(s) if s.role == Role::Carried) && g.meta(*v).dtype == DType::F32;
        let written = op.reuse().into_iter().map(|pair| pair.0).filter(|&k| inside[i] && may_round(&op.precision(Port::In(k), &x)));
        written.map(|k| node.inputs[k]).filter(state).map(|v| v.node).collect()
    };
    g.nodes.iter().enumerate().flat_map(of).collect()
}

/// The value cast to another type; the same cast is recorded only once.
fn cast<'g>(v: Var<'g>, dtype: DType, casts: &mut HashMap<Value, Value>) -> Var<'g> {
    if !v.dtype().is_float() || v.dtype() == dtype {
        return v;
    }
    if let Some(&made) = casts.get(&v.value()) {
        return v.recorder().var(made);
    }
    // A cast of a view of a parameter is a view of the parameter's cast, so that the parameter is cast only once.
    let view = v.recorder().with_graph(|g| {
        let node = &g.nodes[v.value().node];
        match &node.kind {
            // But what ranks read for their own part of the work is cast after that, so that they add up its gradient in f32.
            Kind::Op(op) if op.is_view() && op.is::<Broadcast>().is_none() && is_state(g, v.value()) => Some((op.clone(), node.inputs[0])),
            _ => None,
        }
    });
    let made = match view {
        Some((op, of)) => {
            let of = cast(v.recorder().var(of), dtype, casts);
            v.recorder().op_arc(op, &[of])[0]
        }
        None => v.cast(dtype),
    };
    casts.insert(v.value(), made.value());
    made
}

/// Whether this is a state, or a view of one.
fn is_state(g: &Graph, v: Value) -> bool {
    g.state_through(v, |n| n.is_view()).is_some()
}

/// Records the op with its inputs and outputs rounded or kept as `Op::precision` says.
fn rewritten<'g>(
    op: &Arc<dyn Op>,
    inputs: &[Var<'g>],
    recorder: &'g Recorder,
    (narrow, wide): (DType, bool),
    casts: &mut HashMap<Value, Value>,
    receipt: &mut Receipt,
) -> Vec<Var<'g>> {
    let mut x = inputs.to_vec();
    let metas = |x: &[Var]| -> Vec<Meta> { x.iter().map(|v| v.meta()).collect() };
    let (mut rounds, recorded) = (false, metas(&x));
    for k in 0..x.len() {
        match op.precision(Port::In(k), &recorded) {
            rule if may_round(&rule) => {
                x[k] = cast(x[k], narrow, casts);
                rounds = true;
            }
            Narrow::F32 if x[k].dtype() == narrow => x[k] = x[k].cast(DType::F32),
            Narrow::Follow(of) if x[k].dtype().is_float() => x[k] = x[k].cast(x[of[0]].dtype()),
            _ => {}
        }
    }
    let metas = metas(&x);
    let made: Vec<DType> = op.infer(&metas).iter().map(|m| m.dtype).collect();
    let rules: Vec<Narrow> = (0..made.len()).map(|out| op.precision(Port::Out(out), &metas)).collect();
    // Where the inputs that an output follows differ in type: the narrow one, unless the residual stream is f32.
    let follows = |of: &[usize], now: DType| {
        let any = |d: DType| of.iter().any(|&k| metas.get(k).is_some_and(|m| m.dtype == d));
        if any(narrow) && !(wide && any(DType::F32)) { narrow } else { now }
    };
    let wanted: Vec<DType> = made
        .iter()
        .zip(&rules)
        .map(|(&now, rule)| match rule {
            Narrow::Keep | Narrow::Sensitive(_) | Narrow::F32 if now.is_float() => DType::F32,
            Narrow::Follow(of) if now == DType::F32 => follows(of, now),
            _ => now,
        })
        .collect();
    let own = if wanted == made { None } else { op.with_types(&wanted) };
    let y = recorder.op_arc(own.unwrap_or_else(|| op.clone()), &x);
    rounds |= y.iter().zip(&made).any(|(y, &before)| y.dtype() != before && y.dtype() == narrow);
    let of_model = x.first().is_some_and(|v| recorder.with_graph(|g| is_state(g, v.value())));
    let result = y.into_iter().zip(rules).map(|(y, rule)| match (rule, y.dtype()) {
        (Narrow::Round, DType::F32) if !wide => {
            rounds = true;
            y.cast(narrow)
        }
        // An embedding's rows, read from a rounded weight, start the f32 residual stream.
        (Narrow::Round, dtype) if dtype == narrow && crate::mutant!("residual-f32-begins-narrow", of_model && wide, false) => {
            y.cast(DType::F32)
        }
        _ => y,
    });
    let result = result.collect();
    receipt.applied += rounds as usize;
    result
}

/// The setting `scale`: a power of two, so that scaling rounds nothing.
fn first_scale(scale: usize) -> Result<f32, Error> {
    if !scale.is_power_of_two() || scale as f32 > MOST {
        let problem = format!("scale={scale}: a power of two up to {MOST}");
        return Err(Error::PassSetting { pass: Mixed(DType::F16).name().into(), problem });
    }
    Ok(scale as f32)
}

/// The loss scale of a store, and how many micro-batches overflowed; None without fp16.
pub fn loss_scale(store: &Store) -> Result<Option<(f32, f32)>, Error> {
    let number = |name: &str| store.get(&format!("{STATES}{name}")).map(|t| Ok::<_, Error>(t.f32()?[0])).transpose();
    Ok(number("scale")?.zip(number("skipped")?))
}

/// Gradients of a scaled loss, divided by the scale again; and the scale of the next run.
#[derive(Default)]
struct Scaled {
    /// (state, its next value).
    updates: Vec<(Value, Value)>,
}

impl Scaled {
    /// `first`, `interval`: the scale of the first run, and after how many runs without an overflow it doubles.
    fn gradients<'g>(&mut self, r: &'g Recorder, loss: Var<'g>, by: &[Var<'g>], (first, interval): (f32, f32)) -> Vec<Var<'g>> {
        let state = |name: &str, v: f32| r.state(&format!("{STATES}{name}"), &[1], DType::F32, Init::Full(v));
        let (scale, runs, skipped) = (state("scale", first), state("runs", 0.0), state("skipped", 0.0));
        // Powers of two, so that scaling rounds nothing.
        let gradients: Vec<Var> = r.grad(loss * scale.reshape(&vec![1; loss.shape().len()]), by);
        let inverse = r.full(&[1], 1.0) / scale;
        let gradients: Vec<Var> = gradients.into_iter().map(|d| d * inverse.cast(d.dtype())).collect();
        if self.updates.is_empty() {
            let mut finite = global_norm(&gradients).is_finite();
            // Of gradients that stay terms each rank has its own: all ranks scale by what overflows in any of them.
            let group = |v: &Var| r.with_graph(|g| g.nodes[v.value().node].op::<Broadcast>().map(|b| b.group.clone()));
            if let Some(group) = crate::mutant!("overflow-of-one-rank-alone", by.iter().find_map(group), None) {
                finite = all_reduce(-finite + 1.0, &group).less(r.full(&[1], 0.5));
            }
            let grows = finite * (-(runs + 1.0).less(r.full(&[1], interval)) + 1.0);
            let (larger, smaller) = (scale * (grows + 1.0), scale * 0.5);
            let larger = crate::mutant!("fp16-scale-without-an-upper-bound", larger.min(r.full(&[1], MOST)), larger);
            let smaller = crate::mutant!("fp16-scale-falls-below-1", smaller.max(r.full(&[1], 1.0)), smaller);
            let next = larger * finite + smaller * (-finite + 1.0);
            let counted = (runs + 1.0) * finite * (-grows + 1.0);
            let updates = [(scale, next), (runs, counted), (skipped, skipped + (-finite + 1.0))];
            self.updates = updates.map(|(state, next)| (state.value(), next.value())).into();
        }
        gradients
    }

    fn finish(self, g: &mut Graph) {
        g.updates.extend(self.updates);
    }
}
