//! Optimizer states in fewer bits: AdamW's moments and Muon's momentum, quantized in blocks (`ops::adamw8`).

use super::pattern::{Reads, Rewrite};
use super::{Mode, Numerics, Pass, Receipt, Setting, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node, Role, State, Value};
use crate::meta::{DType, Meta};
use crate::op::Op;
use crate::ops::adamw::{AdamW, Momentum, momentum};
use crate::ops::adamw8::{AdamW8, BLOCK, Map, Momentum8, absmax_of};
use crate::ranks::Part;
use crate::record::{Recorder, Var};
use std::collections::HashMap;

pub struct Adam8bit;

impl Switch for Adam8bit {
    fn name(&self) -> &'static str {
        "adam8bit"
    }

    fn about(&self) -> &'static str {
        "Keeps optimizer states in 8 bits: both moments of AdamW and Muon's momentum, in blocks of 256 with dynamic maps and an f32 maximum each. \
         A quarter of their memory; weights, gradients and arithmetic stay f32."
    }

    fn default_mode(&self) -> Mode {
        Mode::Off
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::LowPrecision
    }

    fn settings(&self) -> &'static [Setting] {
        &[
            Setting { name: "least", default: "4096", about: "states of fewer elements (norms, biases) stay f32" },
            Setting { name: "moments", default: "8bit", about: "AdamW's moments: 8bit or f32" },
            Setting { name: "momentum", default: "8bit", about: "Muon's momentum: 8bit, bf16 or f32" },
        ]
    }

    fn variants(&self) -> &'static [&'static str] {
        &["auto", "auto,momentum=bf16", "auto,moments=f32", "auto,momentum=f32,least=1"]
    }

    fn example(&self, r: &Recorder) {
        let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.2 });
        let params = [param("table", &[64, 96]), param("bias", &[96]), param("matrix", &[70, 64])];
        let (x, targets) = (r.feed("x", &[32, 70], DType::F32), r.feed("targets", &[32], DType::I32));
        let loss = (x.matmul(params[2]).silu().matmul(params[0]) + params[1]).cross_entropy(targets).mean();
        let grads = r.grad(loss, &params);
        let state = |name: &str, shape: &[usize]| r.state(name, shape, DType::F32, Init::Full(0.0));
        let (count, one) = (state("count", &[1]), r.full(&[1], 1.0));
        let (next, mut inputs) = (count + 1.0, vec![r.full(&[1], 0.01), one]);
        inputs.extend([next, one]);
        let mut states = vec![];
        for (name, i) in [("table", 0), ("bias", 1)] {
            let moments = ["m", "v"].map(|which| state(&format!("{which}/{name}"), &params[i].shape()));
            inputs.extend([params[i], grads[i], moments[0], moments[1]]);
            states.extend([params[i], moments[0], moments[1]]);
        }
        let y = r.op(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: vec![0.1, 0.0] }, &inputs);
        states.into_iter().zip(&y).for_each(|(state, y)| r.update(state, *y));
        let kept = state("momentum", &[70, 64]);
        let [u, moved] = momentum(0.9, one, one, grads[2], kept);
        let after = params[2] - u;
        [(kept, moved), (params[2], after), (count, next)].into_iter().for_each(|(state, y)| r.update(state, y));
        [("loss", loss), ("table", y[0]), ("bias", y[3]), ("matrix", after)].into_iter().for_each(|(name, v)| r.output(name, v));
    }
}

/// How a state is kept.
#[derive(Clone, Copy)]
enum Form {
    Bytes(Map),
    Bf16,
}

/// What is to become of states, by their nodes.
struct Plan<'g> {
    g: &'g Graph,
    reads: Reads,
    /// The state that a value is the next one of.
    nexts: HashMap<Value, Value>,
    forms: HashMap<usize, Form>,
    least: usize,
    /// Tensors below that, whose states stay in f32.
    small: usize,
    /// Bytes of the states that change, before and after.
    bytes: [usize; 2],
}

impl Plan<'_> {
    /// The states that a node reads (its inputs) and gives their next values (its outputs) are kept in these forms, all or none.
    fn choose(&mut self, node: usize, of: &[(usize, usize, Form)], site: &str, receipt: &mut Receipt) {
        let g = self.g;
        let states: Vec<Value> = of.iter().map(|&(k, ..)| g.nodes[node].inputs[k]).collect();
        let elements = g.meta(states[0]).elements();
        if elements < self.least {
            // No reason to fail where the pass is required.
            self.small += 1;
            return;
        }
        if states.iter().any(|v| parts_of(g, *v).iter().any(|p| p.axis.is_some()) || parts_of(g, *v).len() > 1) {
            return receipt
                .decline("this rank has some of its columns or rows, whose blocks of 256 another number of ranks could not read", site);
        }
        if states
            .iter()
            .any(|v| !parts_of(g, *v).is_empty() && crate::mutant!("adam8bit-of-parts-of-blocks", !elements.is_multiple_of(BLOCK), false))
        {
            return receipt.decline(format!("this rank has {elements} elements of it: no whole blocks of {BLOCK}"), site);
        }
        if !of.iter().all(|&(k, out, _)| self.is_own(g.nodes[node].inputs[k], Value { node, out })) {
            return receipt.decline("its state begins with other numbers than 0, or is read elsewhere", site);
        }
        receipt.applied += 1;
        for (state, &(.., form)) in states.iter().zip(of) {
            let meta = g.meta(*state);
            self.forms.insert(state.node, form);
            self.bytes[0] += meta.bytes();
            self.bytes[1] += match form {
                Form::Bytes(_) => elements + absmax_of(meta).bytes(),
                Form::Bf16 => 2 * elements,
            };
        }
    }

    /// Whether a value is an f32 state of zeros at first, read once, whose next value is `next` and is read by nothing.
    fn is_own(&self, v: Value, next: Value) -> bool {
        let fresh = matches!(&self.g.nodes[v.node].kind, Kind::State(s) if s.role == Role::Carried && crate::mutant!("adam8bit-of-states-that-begin-elsewhere", s.init == Init::Full(0.0), true));
        let once = self.reads.once(v) && self.reads.once(next) && self.nexts.get(&next) == Some(&v);
        fresh && once && self.g.meta(v).dtype == DType::F32
    }
}

/// How a state is divided among ranks.
fn parts_of(g: &Graph, v: Value) -> &[Part] {
    state_of(g, v).and_then(|s| g.parts.states.get(&s.name)).map_or(&[], |parts| parts)
}

/// The name of the state that a value is; where it is computed, the place of its node.
fn name_of(g: &Graph, v: Value) -> &str {
    state_of(g, v).map_or(&g.nodes[v.node].scope, |s| &s.name)
}

fn state_of(g: &Graph, v: Value) -> Option<&State> {
    match &g.nodes[v.node].kind {
        Kind::State(s) => Some(s),
        _ => None,
    }
}

impl Pass for Adam8bit {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn after(&self) -> &'static [&'static str] {
        &["zero"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let moments = settings.one_of("moments", &["8bit", "f32"])? == "8bit";
        let kept = match settings.one_of("momentum", &["8bit", "bf16", "f32"])? {
            "8bit" => Some(Form::Bytes(Map::Signed)),
            "bf16" => Some(Form::Bf16),
            _ => None,
        };
        let nexts = g.updates.iter().map(|&(state, next)| (next, state)).collect();
        let mut plan =
            Plan { g, reads: g.reads(), nexts, forms: HashMap::new(), least: settings.number("least")?, small: 0, bytes: [0; 2] };
        for (i, node) in g.nodes.iter().enumerate() {
            if let Some(op) = node.op::<AdamW>().filter(|_| moments) {
                for k in 0..op.decay.len() {
                    let both = [(6 + 4 * k, 3 * k + 1, Form::Bytes(Map::Signed)), (7 + 4 * k, 3 * k + 2, Form::Bytes(Map::Unsigned))];
                    plan.choose(i, &both, name_of(g, node.inputs[4 + 4 * k]), receipt);
                }
            }
            if let (Some(_), Some(form)) = (node.op::<Momentum>(), kept) {
                plan.choose(i, &[(3, 1, form)], name_of(g, node.inputs[3]), receipt);
            }
        }
        let (forms, [before, after]) = (plan.forms, plan.bytes.map(|b| b as f64 / (1 << 20) as f64));
        if receipt.applied > 0 {
            receipt.notes.push(format!("states of {} tensors take {after:.2} MiB instead of {before:.2}", receipt.applied));
        }
        if plan.small > 0 {
            receipt.notes.push(format!("states of {} tensors stay in f32: fewer than {} elements (least)", plan.small, plan.least));
        }
        let mut more = vec![];
        let quantized: Vec<(String, Map)> = forms
            .iter()
            .filter_map(|(&i, form)| match (&g.nodes[i].kind, form) {
                (Kind::State(s), Form::Bytes(map)) => Some((s.name.clone(), *map)),
                _ => None,
            })
            .collect();
        g.rewrite(|w, i, node, inputs| {
            let new = match &node.kind {
                Kind::State(s) => forms.get(&i).map(|form| vec![recorded(w.recorder, s, &node.outputs[0], *form)]),
                Kind::Op(_) => match (node.op::<AdamW>(), node.op::<Momentum>().zip(node.inputs.get(3).and_then(|m| forms.get(&m.node)))) {
                    (Some(op), _) => Some(moved(w, op, node, inputs, &forms, &mut more)),
                    (_, Some((op, form))) => Some(pushed(w, op, node, inputs, *form, &mut more)),
                    _ => None,
                },
                _ => None,
            };
            Ok::<_, Error>(new)
        })?;
        g.updates.extend(more);
        // Bytes are divided as the numbers were, and so are their maxima.
        for (name, map) in quantized {
            let Some(parts) = g.parts.states.remove(&name) else { continue };
            let [bytes, most] = map.names(&name);
            let maxima = |p: &Part| Part { shape: absmax_of(&Meta::f32(&p.shape)).shape, ..p.clone() };
            g.parts.states.insert(most, parts.iter().map(maxima).collect());
            g.parts.states.insert(bytes, parts);
        }
        Ok(())
    }
}

/// A state in its new form: of one that is quantized, the bytes.
fn recorded<'g>(r: &'g Recorder, state: &State, meta: &Meta, form: Form) -> Var<'g> {
    match form {
        Form::Bytes(map) => r.state_as(&map.names(&state.name)[0], Meta::new(&meta.shape, DType::U8), Init::Full(0.0), Role::Carried),
        Form::Bf16 => r.retyped(state, Meta::new(&meta.shape, DType::BF16)),
    }
}

/// The maxima that belong to the bytes of a state of the old graph.
fn absmax<'g>(w: &Rewrite<'g>, state: Value, map: Map) -> Var<'g> {
    let name = &map.names(name_of(w.old, state))[1];
    w.recorder.state_as(name, absmax_of(w.old.meta(state)), Init::Full(0.0), Role::Carried)
}

/// AdamW, split into the parameters whose moments are bytes and the others. `more`: updates of the maxima.
fn moved<'g>(
    w: &Rewrite<'g>,
    op: &AdamW,
    node: &Node,
    inputs: &[Var<'g>],
    forms: &HashMap<usize, Form>,
    more: &mut Vec<(Value, Value)>,
) -> Vec<Var<'g>> {
    let like = |decay: Vec<f32>| AdamW { beta1: op.beta1, beta2: op.beta2, eps: op.eps, decay };
    let eight: Vec<bool> = node.inputs[4..].chunks(4).map(|p| forms.contains_key(&p[2].node)).collect();
    let record = |bytes: bool| {
        let (mut x, mut decay) = (inputs[..4].to_vec(), vec![]);
        for (k, own) in inputs[4..].chunks(4).enumerate().filter(|(k, _)| eight[*k] == bytes) {
            let most = |at: usize, map: Map| absmax(w, node.inputs[4 + 4 * k + at], map);
            match bytes {
                true => x.extend([own[0], own[1], own[2], most(2, Map::Signed), own[3], most(3, Map::Unsigned)]),
                false => x.extend(own),
            }
            decay.push(op.decay[k]);
        }
        match bytes {
            _ if decay.is_empty() => (x, vec![]),
            true => (x.clone(), w.recorder.op(AdamW8(like(decay)), &x)),
            false => (x.clone(), w.recorder.op(like(decay), &x)),
        }
    };
    let ((x, narrow), (_, wide)) = (record(true), record(false));
    for (own, y) in x[4..].chunks(6).zip(narrow.chunks(5)) {
        more.extend([(own[3].value(), y[2].value()), (own[5].value(), y[4].value())]);
    }
    let (mut narrow, mut wide) = (narrow.chunks(5), wide.chunks(3));
    let mut next = |bytes: bool| match bytes {
        true => narrow.next().map(|y| [y[0], y[1], y[3]]),
        false => wide.next().map(|y| [y[0], y[1], y[2]]),
    };
    eight.into_iter().flat_map(|bytes| next(bytes).expect("each parameter is in one of the two")).collect()
}

/// Momentum with its state in this form.
fn pushed<'g>(w: &Rewrite<'g>, op: &Momentum, node: &Node, inputs: &[Var<'g>], form: Form, more: &mut Vec<(Value, Value)>) -> Vec<Var<'g>> {
    let &[scale, go, g, m] = inputs else { unreachable!("momentum has four inputs") };
    match form {
        Form::Bytes(map) => {
            let most = absmax(w, node.inputs[3], map);
            let y = w.recorder.op(Momentum8 { beta: op.beta }, &[scale, go, g, m, most]);
            more.push((most.value(), y[2].value()));
            vec![y[0], y[1]]
        }
        Form::Bf16 => {
            let y = op.unfused(&[scale, go, g, m.cast(DType::F32)]).expect("a composite op has an unfused form");
            vec![y[0], y[1].cast(DType::BF16)]
        }
    }
}
