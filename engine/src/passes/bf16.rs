//! Activations and products in bf16, parameters and their moments in f32.

use super::{Mode, Numerics, Pass, Receipt, Setting, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node, Role, Value};
use crate::meta::{DType, Meta};
use crate::ops::adamw::{AdamW, GlobalNorm};
use crate::ops::cache::{CacheWrite, DecodeAttention};
use crate::ops::cross_entropy::CrossEntropy;
use crate::ops::diversity::{Diversity, PairDistances};
use crate::ops::experts::{GroupedSwiglu, Route};
use crate::ops::linear_attention::LinearAttention;
use crate::ops::linear_ce::ChunkedLinearCrossEntropy;
use crate::ops::nf4::Nf4Product;
use crate::ops::norm::add::AddRmsNorm;
use crate::ops::norm::{LayerNorm, RmsNorm};
use crate::ops::pointwise::Pointwise;
use crate::ops::reduce::Reduce;
use crate::ops::rope::Rope;
use crate::ops::rope::norm::NormRope;
use crate::ops::rows::scaled::ScatterScaled;
use crate::ops::rows::{GatherRows, ScatterRows};
use crate::ops::sample::{Sample, TopP};
use crate::record::{Recorder, Var};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

pub struct Bf16;

impl Switch for Bf16 {
    fn name(&self) -> &'static str {
        "bf16"
    }

    fn about(&self) -> &'static str {
        "Computes in bf16: products, attention, activations. Parameters and moments stay f32, sums (norms, softmax, loss) are made in f32."
    }

    fn default_mode(&self) -> Mode {
        Mode::Off
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::LowPrecision
    }

    fn settings(&self) -> &'static [Setting] {
        &[Setting {
            name: "residual",
            default: "bf16",
            about: "bf16: a sum of activations is rounded like any other; f32: what begins as rows of a parameter, and what is added to it, stays f32",
        }]
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

impl Pass for Bf16 {
    fn stage(&self) -> Stage {
        Stage::Typed
    }

    fn after(&self) -> &'static [&'static str] {
        &["decompose"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let wide = settings.one_of("residual", &["bf16", "f32"])? == "f32";
        // Where gradients are asked for, what leads to their loss; elsewhere everything. Never what is to keep its types.
        let losses: Vec<Value> = g.nodes.iter().filter(|n| matches!(n.kind, Kind::Grad)).map(|n| n.inputs[0]).collect();
        let mut inside = if losses.is_empty() { vec![true; g.nodes.len()] } else { g.needed_by(losses.into_iter()) };
        let open = |typed: bool| crate::mutant!("bf16-narrows-what-is-typed", !typed, true);
        inside.iter_mut().zip(&g.nodes).for_each(|(inside, node)| *inside &= open(node.typed));
        let old_updates = g.updates.clone();
        let mut updates: HashMap<usize, Vec<(Value, Value)>> = HashMap::new(); // by the node that makes the state's next value
        old_updates.iter().for_each(|u| updates.entry(u.1.node).or_default().push(*u));
        let caches = caches(g, &inside);
        let types: Vec<Vec<DType>> = (0..g.nodes.len()).map(|i| g.inputs(i).iter().map(|m| m.dtype).collect()).collect();
        let mut casts: HashMap<Value, Value> = HashMap::new();
        let mut widened: HashMap<Value, Value> = HashMap::new();
        let mut restored: HashMap<Value, Value> = HashMap::new();
        let mut frozen = 0;
        g.rewrite(|recorder, i, node, inputs| {
            let new = match &node.kind {
                // Nothing is ever added to them: they are kept as they are read. By their shape alone, so that all programs agree.
                Kind::State(s) if s.role == Role::Frozen && node.outputs[0].rank() > 1 => {
                    frozen += 1;
                    Some(vec![recorder.retyped(s, Meta::new(&node.outputs[0].shape, DType::BF16))])
                }
                Kind::State(s) if caches.contains(&i) => Some(vec![recorder.retyped(s, Meta::new(&node.outputs[0].shape, DType::BF16))]),
                Kind::Op(op) if inside[i] && !op.is_view() => rewritten(recorder, node, inputs, wide, &mut casts, receipt),
                // A view takes the type of what it views; what does not lead to the loss works on the types that it was recorded with.
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
                    Some(recorder.grad(loss, &inputs[1..]))
                }
                _ => None,
            };
            // A state keeps its type, unless it is a cache.
            for &(state, old) in updates.get(&i).into_iter().flatten() {
                let dtype = if caches.contains(&state.node) { DType::BF16 } else { node.outputs[old.out].dtype };
                if let Some(vars) = new.as_ref().filter(|vars| vars[old.out].dtype() != dtype) {
                    restored.insert(old, vars[old.out].cast(dtype).value());
                }
            }
            Ok::<_, Error>(new)
        })?;
        if frozen > 0 {
            receipt.notes.push(format!("{frozen} frozen weights kept in bf16"));
        }
        for (update, (_, old)) in g.updates.iter_mut().zip(old_updates) {
            if let Some(&v) = restored.get(&old) {
                update.1 = v;
            }
        }
        Ok(())
    }
}

/// States of keys and values, which are activations that outlive a run.
fn caches(g: &Graph, inside: &[bool]) -> HashSet<usize> {
    let of = |(i, node): (usize, &Node)| match inside[i] {
        true if node.op::<CacheWrite>().is_some() => node.inputs[..2].to_vec(),
        true if node.op::<DecodeAttention>().is_some() => node.inputs[3..5].to_vec(),
        _ => vec![],
    };
    let wide = |v: &Value| matches!(g.nodes[v.node].kind, Kind::State(_)) && g.meta(*v).dtype == DType::F32;
    g.nodes.iter().enumerate().flat_map(of).filter(wide).map(|v| v.node).collect()
}

/// The value in another type, made once.
fn cast<'g>(v: Var<'g>, dtype: DType, casts: &mut HashMap<Value, Value>) -> Var<'g> {
    if !v.dtype().is_float() || v.dtype() == dtype {
        return v;
    }
    if let Some(&made) = casts.get(&v.value()) {
        return v.recorder().var(made);
    }
    // A view of a parameter is a view of its cast: that is made once, whatever is seen of it.
    let view = v.recorder().with_graph(|g| {
        let node = &g.nodes[v.value().node];
        match &node.kind {
            Kind::Op(op) if op.is_view() && of_state(g, v.value()) => Some((op.clone(), node.inputs[0])),
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

fn of_state(g: &Graph, v: Value) -> bool {
    let node = &g.nodes[v.node];
    matches!(node.kind, Kind::State(_)) || (node.is_view() && of_state(g, node.inputs[0]))
}

fn rewritten<'g>(
    recorder: &'g Recorder,
    node: &Node,
    inputs: &[Var<'g>],
    wide: bool,
    casts: &mut HashMap<Value, Value>,
    receipt: &mut Receipt,
) -> Option<Vec<Var<'g>>> {
    let Kind::Op(op) = &node.kind else { return None };
    let mut x = inputs.to_vec();
    let mut half = |v: Var<'g>| cast(v, DType::BF16, casts);
    if node.op::<AdamW>().is_some()
        || node.op::<GlobalNorm>().is_some()
        || node.op::<CrossEntropy>().is_some()
        || node.op::<Route>().is_some()
        || node.op::<Sample>().is_some()
        || node.op::<TopP>().is_some()
        || node.op::<Diversity>().is_some()
        || node.op::<PairDistances>().is_some()
    {
        // The optimizer is f32 by nature; cross-entropy, routing, sampling and distances give f32 of whatever they read.
    } else if let Some(p) = node.op::<Pointwise>() {
        // Arithmetic on an activation stays one, also where it is repeated; its other inputs may be of any type.
        let elements = x.iter().map(|v| v.meta().elements()).max().unwrap_or(1);
        let full = |d: DType| x.iter().any(|v| v.dtype() == d && v.meta().elements() == elements);
        let active = full(DType::BF16) && !(wide && full(DType::F32));
        let dtypes = p.dtypes.iter().map(|&d| if active && d == DType::F32 { DType::BF16 } else { d }).collect();
        receipt.applied += active as usize;
        return Some(recorder.op_arc(Arc::new(Pointwise { dtypes, ..p.clone() }), &x));
    } else if let Some(r) = node.op::<Reduce>() {
        return Some(recorder.op_arc(Arc::new(Reduce { wide: crate::mutant!("sums-rounded-to-bf16", true, r.wide), ..r.clone() }), &x));
    } else if node.op::<GatherRows>().is_some() {
        // Rows of a parameter are cast after they are gathered, so that its gradient is added up in f32.
        let table = crate::mutant!("embedding-gradient-summed-in-bf16", x[0], half(x[0]));
        let y = recorder.op_arc(op.clone(), &[table, x[1]])[0];
        receipt.applied += 1;
        let of_model = recorder.with_graph(|g| of_state(g, x[0].value()));
        return Some(vec![match y.dtype() {
            DType::F32 if y.dim(0) > 1 && !wide => y.cast(DType::BF16),
            DType::BF16 if of_model && wide => y.cast(DType::F32),
            _ => y,
        }]);
    } else if node.op::<ScatterRows>().is_some() || node.op::<ScatterScaled>().is_some() {
        let dtype = x[0].dtype(); // what is added to decides
        x[2..].iter_mut().for_each(|v| *v = v.cast(dtype));
    } else if node.op::<RmsNorm>().is_some()
        || node.op::<LayerNorm>().is_some()
        || node.op::<Rope>().is_some()
        || node.op::<NormRope>().is_some()
        || node.op::<Nf4Product>().is_some()
    {
        x[0] = half(x[0]); // weights and tables stay as they are
        receipt.applied += 1;
    } else if node.op::<AddRmsNorm>().is_some() {
        x[0] = half(x[0]);
        if x[1].shape() == x[0].shape() {
            x[1] = half(x[1]); // a row stays as it is
        }
        receipt.applied += 1;
    } else if node.op::<LinearAttention>().is_some() {
        (x[0], x[3]) = (half(x[0]), half(x[3])); // tables stay as they are
        receipt.applied += 1;
    } else if node.op::<ChunkedLinearCrossEntropy>().is_some() || node.op::<GroupedSwiglu>().is_some() {
        (x[0], x[1]) = (half(x[0]), half(x[1]));
        receipt.applied += 1;
    } else {
        x = x.into_iter().map(half).collect();
        receipt.applied += 1;
    }
    Some(recorder.op_arc(op.clone(), &x))
}
