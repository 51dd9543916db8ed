//! Divides the weights among the ranks that have different examples, and gathers each before it is used.
//!
//! Runs when all other passes have seen whole weights: which weights are cast, merged or recomputed does not depend on where they are kept.

use super::{Mode, Numerics, OnRanks, Pass, Receipt, Setting, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Kind, Node, Role, Value};
use crate::meta::DType;
use crate::ops::collective::{AllGather, Broadcast, Part, all_gather, part};
use crate::ops::concat::Concat;
use crate::ops::pointwise::Pointwise;
use crate::passes::pattern::Rewrite;
use crate::ranks::{self, Group};
use crate::record::{Recorder, Var};
use std::collections::{HashMap, HashSet};

pub struct ZeroWeights;

impl Switch for ZeroWeights {
    fn name(&self) -> &'static str {
        "zero-weights"
    }

    fn about(&self) -> &'static str {
        "Each rank keeps a part of every weight (with zero: ZeRO stage 3, as FSDP). A weight is gathered before the forward pass reads it, and again for the \
         backward pass, in the type in which it is read."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn on_ranks(&self) -> Option<OnRanks> {
        Some(OnRanks { ranks: [2, 1], with: &[("zero", "auto")] })
    }

    fn default_mode(&self) -> Mode {
        Mode::Off
    }

    fn settings(&self) -> &'static [Setting] {
        &[
            Setting {
                name: "least",
                default: "4096",
                about: "weights of fewer elements are kept whole: gathering them costs more than they take",
            },
            Setting {
                name: "ahead",
                default: "1",
                about: "how many layers before its use a weight is gathered, so that a GPU computes meanwhile; 0: just before",
            },
        ]
    }

    fn variants(&self) -> &'static [&'static str] {
        &["auto,least=1", "auto,least=1,ahead=0"]
    }

    fn example(&self, r: &Recorder) {
        super::zero::Zero.example(r);
    }
}

impl Pass for ZeroWeights {
    fn stage(&self) -> Stage {
        Stage::Scheduled
    }

    fn after(&self) -> &'static [&'static str] {
        &["recompute", "zero"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let (least, ahead) = (settings.number("least")?, settings.number_or_none("ahead")?);
        let group = settings.ranks.data.clone();
        if group.size == 1 {
            return Ok(());
        }
        super::layout::sources_first(g);
        let weights = weights(g, &group, least, receipt);
        if weights.is_empty() {
            return Ok(());
        }
        let (states, along) = followers(g, &weights, &group);
        let mut parts = g.parts.clone();
        for &i in weights.iter().chain(&states) {
            let Kind::State(s) = &g.nodes[i].kind else { unreachable!("weights and what follows them are states") };
            let shape = g.nodes[i].outputs[0].shape.clone();
            let own = ranks::Part { shape, axis: None, sections: 1, index: group.rank, of: group.size, by: group.name };
            parts.states.entry(s.name.clone()).or_default().push(own);
        }
        let bytes: usize = weights.iter().map(|&i| g.nodes[i].outputs[0].bytes()).sum();
        receipt.applied = weights.len();
        let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
        receipt.notes.push(format!("{:.1} MiB of {:.1} MiB of these weights on a rank", mib(bytes / group.size), mib(bytes)));
        let gathers = if ahead > 0 { group.aside() } else { group.clone() };
        record(g, [&group, &gathers], &weights.iter().chain(&states).copied().collect(), &along);
        g.parts = parts;
        super::sweep(g);
        early(g, &group, ahead);
        Ok(())
    }
}

/// The weights that are divided. Decided by role, size and type alone, so that all programs of a run agree.
fn weights(g: &Graph, group: &Group, least: usize, receipt: &mut Receipt) -> HashSet<usize> {
    let mut found = HashSet::new();
    for (i, node) in g.nodes.iter().enumerate() {
        let Kind::State(s) = &node.kind else { continue };
        let meta = &node.outputs[0];
        if !matches!(s.role, Role::Param | Role::Frozen) || !meta.dtype.is_float() || meta.elements() < least {
            continue;
        }
        match meta.elements().is_multiple_of(group.size) {
            true => drop(found.insert(i)),
            false => receipt.decline(format!("{meta:?} has no {} equal parts", group.size), &node.scope),
        }
    }
    found
}

/// States that are kept beside the weights, such as their averages over steps, and the pointwise ops that make their next values: they are divided, too.
fn followers(g: &Graph, weights: &HashSet<usize>, group: &Group) -> (Vec<usize>, HashSet<usize>) {
    let readers = g.readers();
    let next: HashMap<usize, Value> = g.updates.iter().map(|(s, v)| (s.node, *v)).collect();
    let of_weights: HashSet<usize> = weights.iter().flat_map(|w| next.get(w).map(|v| v.node)).chain(weights.iter().copied()).collect();
    let roots: HashMap<usize, usize> = g.roots().fold(HashMap::new(), |mut all, v| {
        *all.entry(v.node).or_default() += 1;
        all
    });
    let (mut states, mut along) = (vec![], HashSet::new());
    for (i, node) in g.nodes.iter().enumerate() {
        let Kind::State(s) = &node.kind else { continue };
        let divided = g.parts.states.get(&s.name).is_some_and(|parts| parts.iter().any(|p| p.by == group.name));
        let Some(next) = next.get(&i).filter(|_| s.role == Role::Carried && !divided) else { continue };
        let shape = &node.outputs[0].shape;
        let fits = |v: &Value| g.meta(*v).shape == *shape || g.meta(*v).elements() == 1;
        let (mut open, mut seen, mut beside) = (readers[i].clone(), HashSet::new(), false);
        let mut apart = node.outputs[0].elements() > 1;
        while let Some(reader) = open.pop().filter(|_| apart) {
            if !seen.insert(reader) {
                continue;
            }
            let n = &g.nodes[reader];
            apart = n.op::<Pointwise>().is_some_and(|p| !p.expr.draws())
                && n.outputs.len() == 1
                && n.outputs[0].shape == *shape
                && n.inputs.iter().all(fits)
                && roots.get(&reader).copied().unwrap_or(0) == (next.node == reader) as usize;
            beside |= n.inputs.iter().any(|v| of_weights.contains(&v.node) && g.meta(*v).shape == *shape);
            open.extend(&readers[reader]);
        }
        if apart && beside && seen.contains(&next.node) {
            states.push(i);
            along.extend(seen);
        }
    }
    (states, along)
}

/// Of a step: what a weight is gathered for. Each gathers it anew.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    Forward,
    Backward,
    Update,
}

/// Records the graph with parts of these states. `gathers`: the ranks as weights are gathered from them. `along`: ops that are computed on parts.
fn record(g: &mut Graph, [group, gathers]: [&Group; 2], states: &HashSet<usize>, along: &HashSet<usize>) {
    let forward = g.nodes.iter().position(|n| n.backward).unwrap_or(g.nodes.len());
    let forward = g.nodes.iter().rposition(|n| !n.backward && n.block != 0).map_or(forward, |last| forward.max(last + 1));
    // What is made of weights alone, at no cost worth keeping it for.
    let mut made_of = vec![false; g.nodes.len()];
    for (i, node) in g.nodes.iter().enumerate() {
        let cheap = node.is_view() || node.is_cast() || node.op::<Concat>().is_some();
        let own = |v: &Value| states.contains(&v.node) || made_of[v.node];
        made_of[i] = states.contains(&i) || cheap && !along.contains(&i) && node.inputs.iter().all(own);
    }
    let roots: HashSet<Value> = g.roots().collect();
    let divided: HashMap<Value, Value> = g.updates.iter().filter(|(s, _)| states.contains(&s.node)).map(|(s, v)| (*v, *s)).collect();
    let (old_outputs, old_updates) = (g.outputs.clone(), g.updates.clone());
    let (mut whole, mut own): (HashMap<Value, Value>, HashMap<Value, Value>) = Default::default();
    let mut copies = Copies { group, gathers, states, made_of: &made_of, made: HashMap::new(), own: HashMap::new() };
    let done: Result<(), std::convert::Infallible> = g.rewrite(|w, i, node, inputs| {
        let phase = match (i < forward, node.backward) {
            (true, _) => Phase::Forward,
            (false, true) => Phase::Backward,
            _ => Phase::Update,
        };
        let new: Vec<Var> = match &node.kind {
            Kind::State(s) if states.contains(&i) => {
                let of = &node.outputs[0];
                let state = w.recorder.retyped(s, of.with(&[of.elements() / group.size]));
                copies.own.insert(Value { node: i, out: 0 }, state.value());
                vec![state]
            }
            // Its readers ask for a copy of their own.
            _ if made_of[i] => {
                if let Some(&v) = roots.iter().find(|v| v.node == i) {
                    whole.insert(v, copies.of(w, v, Phase::Update).value());
                }
                vec![inputs[0]; node.outputs.len()]
            }
            Kind::Op(op) if along.contains(&i) => {
                let x: Vec<Var> = node.inputs.iter().map(|&v| copies.part_of(w, v)).collect();
                let y = w.recorder.op_arc(op.clone(), &x);
                copies.own.insert(Value { node: i, out: 0 }, y[0].value());
                y
            }
            _ => {
                let x: Vec<Var> = node.inputs.iter().map(|&v| copies.of(w, v, phase)).collect();
                w.recorder.set_place(node);
                w.keep(node, &x)
            }
        };
        w.put(i, &new);
        for v in (0..node.outputs.len()).map(|out| Value { node: i, out }).filter(|v| divided.contains_key(v)) {
            own.insert(v, copies.part_of(w, v).value());
        }
        Ok(Some(new))
    });
    done.unwrap_or_else(|never| match never {});
    for (new, (_, old)) in g.outputs.iter_mut().zip(old_outputs) {
        new.1 = whole.get(&old).copied().unwrap_or(new.1);
    }
    for (new, (state, old)) in g.updates.iter_mut().zip(old_updates) {
        let form = if states.contains(&state.node) { &own } else { &whole };
        new.1 = form.get(&old).copied().unwrap_or(new.1);
    }
}

/// The forms in which values are read that are made of weights.
struct Copies<'a> {
    group: &'a Group,
    gathers: &'a Group,
    states: &'a HashSet<usize>,
    made_of: &'a [bool],
    /// Whole values, one for each phase.
    made: HashMap<(Value, Phase), Value>,
    /// A rank's parts, of the elements in a row.
    own: HashMap<Value, Value>,
}

impl Copies<'_> {
    /// The whole of a value of the old graph, in a phase.
    fn of<'g>(&mut self, w: &Rewrite<'g>, v: Value, phase: Phase) -> Var<'g> {
        if !self.made_of[v.node] {
            return w.at(v);
        }
        if let Some(&known) = self.made.get(&(v, phase)) {
            return w.recorder.var(known);
        }
        let node = &w.old.nodes[v.node];
        let gathered = |own: Var<'g>, shape: &[usize]| all_gather(own, 0, self.gathers).reshape(shape);
        let from = node.inputs.first().map(|&of| in_a_row(w.old, of));
        let made = match &node.kind {
            Kind::State(_) => gathered(w.recorder.var(self.own[&v]), &node.outputs[0].shape),
            // A rank's own part: what the optimizer reads.
            Kind::Op(_) if node.op::<Part>().is_some_and(|p| *p.group.name == *self.group.name && p.axis == 0) && self.is_state(from) => {
                w.recorder.var(self.own[&from.expect("a part has an input")]).reshape(&node.outputs[0].shape)
            }
            // Rounded first: fewer bytes are gathered.
            Kind::Op(op) if node.is_cast() && self.is_state(from) => {
                let own = w.recorder.var(self.own[&from.expect("a cast has an input")]);
                gathered(w.recorder.op_arc(op.clone(), &[own])[0], &node.outputs[0].shape)
            }
            _ => {
                let x: Vec<Var> = node.inputs.iter().map(|&v| self.of(w, v, phase)).collect();
                w.keep(node, &x)[v.out]
            }
        };
        self.made.insert((v, phase), made.value());
        made
    }

    /// Whether this is one of the states, as it is kept: no view has changed the order of its elements.
    fn is_state(&self, v: Option<Value>) -> bool {
        v.is_some_and(|v| self.states.contains(&v.node))
    }

    /// A rank's part of a value of the old graph; of a single number, the number.
    fn part_of<'g>(&mut self, w: &Rewrite<'g>, v: Value) -> Var<'g> {
        let meta = w.old.meta(v);
        if meta.elements() == 1 {
            return self.of(w, v, Phase::Update);
        }
        let from = w.old.unshaped(v);
        if let Some(&known) = self.own.get(&from) {
            return w.recorder.var(known);
        }
        // What was gathered is its parts.
        let node = &w.old.nodes[from.node];
        let flat = node.inputs.first().filter(|x| w.old.meta(**x).rank() == 1).copied();
        let own = match (node.op::<AllGather>().filter(|a| *a.group.name == *self.group.name), flat) {
            (Some(_), Some(x)) => w.at(x),
            _ => part(self.of(w, v, Phase::Update).reshape(&[meta.elements()]), 0, self.group),
        };
        self.own.insert(from, own.value());
        own
    }
}

/// What a value is, looking through views that leave its elements in their order.
fn in_a_row(g: &Graph, v: Value) -> Value {
    match g.nodes[v.node].op::<Broadcast>() {
        Some(_) => in_a_row(g, g.nodes[v.node].inputs[0]),
        None if g.unshaped(v) != v => in_a_row(g, g.unshaped(v)),
        None => v,
    }
}

/// Moves gathers to the beginning of the layer that is so many layers before the first one that reads them.
fn early(g: &mut Graph, group: &Group, ahead: usize) {
    let of_group = |n: &Node| n.op::<AllGather>().is_some_and(|a| *a.group.name == *group.name);
    let mut free = vec![false; g.nodes.len()];
    for (i, node) in g.nodes.iter().enumerate() {
        let moves = node.is_view() || node.is_cast() || of_group(node);
        free[i] = moves && node.inputs.iter().all(|v| free[v.node] || matches!(g.nodes[v.node].kind, Kind::State(_)));
    }
    // Where the layers of all nodes begin, forward and backward.
    let mut starts = vec![];
    let mut layer_of = vec![0; g.nodes.len()];
    let mut last = None;
    for (i, node) in g.nodes.iter().enumerate() {
        if !free[i] && !node.is_source() && !node.is_view() {
            let now = Some((layer(&node.scope), node.backward));
            if now != last {
                starts.push(i);
                last = now;
            }
        }
        layer_of[i] = starts.len().saturating_sub(1);
    }
    let readers = g.readers();
    let mut place: Vec<(usize, bool)> = (0..g.nodes.len()).map(|i| (i, true)).collect();
    for i in (0..g.nodes.len()).rev().filter(|&i| free[i]) {
        let at = |&reader: &usize| match free[reader] {
            true => place[reader].0,
            false if ahead == 0 => reader,
            false => starts.get(layer_of[reader].saturating_sub(ahead)).copied().unwrap_or(reader).min(reader),
        };
        if let Some(first) = readers[i].iter().map(at).min() {
            place[i] = (first, false);
        }
    }
    let mut order: Vec<usize> = (0..g.nodes.len()).collect();
    order.sort_by_key(|&i| (!g.nodes[i].is_source(), place[i], i));
    g.reorder(&order);
}

/// The layer that a scope belongs to: `blocks.3` of `blocks.3.attn`.
fn layer(scope: &str) -> &str {
    let mut end = 0;
    for name in scope.split('.') {
        end += name.len() + (end > 0) as usize;
        if name.parse::<usize>().is_ok() {
            return &scope[..end];
        }
    }
    scope.split('.').next().unwrap_or(scope)
}
