//! Divides optimizer states among the ranks that have different examples.

use super::{Numerics, OnRanks, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node, Role, Value};
use crate::meta::{DType, Meta};
use crate::op::Share;
use crate::ops::adamw::{AdamW, GlobalNorm, global_norm};
use crate::ops::collective::{AllReduce, Part, ReduceScatter, all_gather, part};
use crate::passes::Mode;
use crate::ranks::{self, Group};
use crate::record::{Recorder, Var};
use std::collections::HashMap;

pub struct Zero;

impl Switch for Zero {
    fn name(&self) -> &'static str {
        "zero"
    }

    fn about(&self) -> &'static str {
        "Each rank keeps the optimizer's moments of a part of every weight, and updates that part (ZeRO). Gradients are reduce-scattered, new weights \
         gathered."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn on_ranks(&self) -> Option<OnRanks> {
        Some(OnRanks { ranks: [2, 1], with: &[] })
    }

    fn default_mode(&self) -> Mode {
        Mode::Off
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[4, 6], Init::Normal { std: 1.0 });
        let x = r.feed("x", &[8, 4], DType::F32);
        let one = |value: f32| r.full(&[1], value);
        let loss = x.matmul(w).square().mean();
        let g = r.grad(loss, &[w])[0];
        let [m, v] = ["m", "v"].map(|name| r.state(name, &[4, 6], DType::F32, Init::Full(0.0)));
        let op = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: vec![0.1] };
        let new = r.op(op, &[one(0.1), one(2.0) / global_norm(&[g]), one(1.0), one(1.0), w, g, m, v]);
        [w, m, v].into_iter().zip(new).for_each(|(state, new)| r.update(state, new));
        r.output("loss", loss);
    }
}

/// The elements of a tensor in a row, of which every rank has an equal part.
fn divides(m: &Meta, group: &Group) -> bool {
    m.elements().is_multiple_of(group.size)
}

fn flat<'g>(v: Var<'g>, group: &Group) -> Var<'g> {
    part(v.reshape(&[v.meta().elements()]), 0, group)
}

impl Pass for Zero {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn after(&self) -> &'static [&'static str] {
        &["data-parallel", "tensor-parallel"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let group = settings.ranks.data.clone();
        if group.size == 1 {
            return Ok(());
        }
        let moments = moments(g, &group, receipt);
        let mut gradients: Vec<Value> = vec![];
        for node in &g.nodes {
            for (inputs, _) in node.op::<AdamW>().map(crate::op::Op::apart).unwrap_or_default() {
                gradients.extend(moments.contains_key(&node.inputs[inputs[2]].node).then_some(node.inputs[inputs[1]]));
            }
        }
        receipt.applied = gradients.len();
        let mut parts = g.parts.clone();
        for (state, meta) in g.states().filter(|(s, _)| moments.values().any(|name| *name == s.name)) {
            let part =
                ranks::Part { shape: meta.shape.clone(), axis: None, sections: 1, index: group.rank, of: group.size, by: group.name };
            parts.states.entry(state.name.clone()).or_default().push(part);
        }
        g.rewrite(|w, i, node, inputs| {
            let r = w.recorder;
            Ok::<_, Error>(match &node.kind {
                Kind::State(s) if moments.contains_key(&i) => {
                    Some(vec![r.retyped(s, node.outputs[0].with(&[node.outputs[0].elements() / group.size]))])
                }
                Kind::Op(op) if op.is::<AdamW>().is_some() => {
                    let mut own = inputs.to_vec();
                    let groups: Vec<_> = op.apart().into_iter().filter(|(x, _)| moments.contains_key(&node.inputs[x[2]].node)).collect();
                    for (x, _) in &groups {
                        x[..2].iter().for_each(|&k| own[k] = flat(inputs[k], &group));
                    }
                    let mut y = r.op_arc(op.clone(), &own);
                    for (x, out) in &groups {
                        y[out[0]] = all_gather(y[out[0]], 0, &group).reshape(&inputs[x[0]].shape());
                    }
                    Some(y)
                }
                Kind::Op(op) if op.is::<GlobalNorm>().is_some() => {
                    let is_part: Vec<bool> = node.inputs.iter().map(|v| gradients.contains(v)).collect();
                    let shares: Vec<Share> = is_part.iter().map(|p| if *p { Share::Dim(0) } else { Share::Whole }).collect();
                    let own: Vec<Var> = inputs.iter().zip(&is_part).map(|(v, p)| if *p { flat(*v, &group) } else { *v }).collect();
                    if is_part.contains(&true) { op.divided(&own, &shares, &group) } else { None }
                }
                _ => None,
            })
        })?;
        g.parts = parts;
        Ok(())
    }
}

/// The moments that are divided: states that AdamW alone reads and updates, by their nodes.
fn moments(g: &Graph, group: &Group, receipt: &mut Receipt) -> HashMap<usize, String> {
    let readers = g.readers();
    let mut found = HashMap::new();
    for (i, node) in g.nodes.iter().enumerate() {
        let Some(adam) = node.op::<AdamW>() else {
            if let Some(m) = node.op::<crate::ops::adamw::Momentum>() {
                receipt.decline(format!("{m:?}: Muon turns whole matrices, so that every rank needs the whole momentum"), &node.scope);
            }
            continue;
        };
        for (x, _) in crate::op::Op::apart(adam) {
            let [p, m, v] = [x[0], x[2], x[3]].map(|k| node.inputs[k]);
            let name = |v: Value| match &g.nodes[v.node].kind {
                Kind::State(s)
                    if s.role == Role::Carried && crate::mutant!("zero-divides-what-is-read-elsewhere", readers[v.node] == [i], true) =>
                {
                    Some(s.name.clone())
                }
                _ => None,
            };
            let scope = &g.nodes[p.node].scope;
            match (name(m), name(v)) {
                (Some(m_name), Some(v_name)) if divides(g.meta(p), group) => {
                    found.extend([(m.node, m_name), (v.node, v_name)]);
                }
                (Some(_), Some(_)) => receipt.decline(format!("{:?} has no {} equal parts", g.meta(p), group.size), scope),
                _ => receipt.decline("its moments are read elsewhere, too", scope),
            }
        }
    }
    found
}

/// A part of a sum over the ranks, which nothing else reads, need not be the whole sum first.
pub struct Scatter;

impl Switch for Scatter {
    fn name(&self) -> &'static str {
        "reduce-scatter"
    }

    fn about(&self) -> &'static str {
        "Where each rank reads only its part of an all-reduced gradient, the gradient is reduce-scattered: half the bytes."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn on_ranks(&self) -> Option<OnRanks> {
        Some(OnRanks { ranks: [2, 1], with: &[("zero", "auto")] })
    }

    fn example(&self, r: &Recorder) {
        Zero.example(r);
    }
}

/// Whether a part is a piece of the elements in a row.
fn in_a_row(p: &Part, node: &Node) -> bool {
    node.outputs[0].shape[..p.axis].iter().all(|&n| n == 1)
}

impl Pass for Scatter {
    fn stage(&self) -> Stage {
        Stage::Differentiated
    }

    fn after(&self) -> &'static [&'static str] {
        &["autodiff", "dead-code"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let (readers, roots) = (g.readers(), g.root_nodes());
        // Through views that change nothing but the shape, to parts of the elements in a row.
        let only_parts = |sum: usize| {
            let mut open = vec![sum];
            let mut seen = 0;
            while let Some(i) = open.pop() {
                if crate::mutant!("scatters-sums-that-are-put-out", roots[i], false) {
                    return false;
                }
                for &reader in &readers[i] {
                    let node = &g.nodes[reader];
                    match (node.op::<Part>(), node.op::<crate::ops::view::Reshape>()) {
                        (Some(p), _)
                            if crate::mutant!("scatters-parts-of-other-axes", in_a_row(p, node), true)
                                && p.group == g.nodes[sum].op::<AllReduce>().expect("a sum").group =>
                        {
                            seen += 1
                        }
                        (_, Some(_)) => open.push(reader),
                        _ => return false,
                    }
                }
            }
            seen > 0
        };
        let sums: Vec<bool> =
            (0..g.nodes.len()).map(|i| g.nodes[i].op::<AllReduce>().is_some_and(|a| a.tensors == 1) && only_parts(i)).collect();
        let mut scattered: HashMap<Value, Value> = HashMap::new();
        let source = |g: &Graph, mut v: Value| {
            while g.nodes[v.node].op::<crate::ops::view::Reshape>().is_some() {
                v = g.nodes[v.node].inputs[0];
            }
            v
        };
        g.rewrite(|w, i, node, inputs| {
            if let Some(sum) = node.op::<AllReduce>().filter(|_| sums[i]) {
                // Where the sum was: the term is not kept until its part is read.
                receipt.applied += 1;
                let flat = inputs[0].reshape(&[inputs[0].meta().elements()]);
                let own = w.recorder.op1(ReduceScatter { group: sum.group.clone() }, &[flat]);
                scattered.insert(Value { node: i, out: 0 }, own.value());
                return Ok::<_, Error>(Some(inputs.to_vec()));
            }
            let own = node.op::<Part>().and_then(|_| scattered.get(&source(w.old, node.inputs[0])));
            Ok(own.map(|&own| vec![w.recorder.var(own).reshape(&node.outputs[0].shape)]))
        })?;
        super::sweep(g);
        Ok(())
    }
}
