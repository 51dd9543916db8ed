//! All weights are rounded in a few launches, before the step, instead of one by one.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node, Value};
use crate::meta::DType;
use crate::ops::cast_all::CastAll;
use crate::ops::concat::{Concat, concat};
use crate::record::Recorder;
use std::collections::{BTreeMap, BTreeSet};

pub struct GroupCasts;

impl Switch for GroupCasts {
    fn name(&self) -> &'static str {
        "group-casts"
    }

    fn about(&self) -> &'static str {
        "Rounds all parameters to a narrower type at once, at the start of a program: a few launches instead of one for each, and those that are read one behind another are written so."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }

    fn example(&self, r: &Recorder) {
        let param = |name: &str| r.param(name, &[8, 8], Init::Normal { std: 0.4 });
        let (a, b) = (param("a"), param("b"));
        let x = r.feed("x", &[5, 8], DType::F32).cast(DType::BF16);
        let y = x.matmul(a.cast(DType::BF16)).silu().matmul(b.cast(DType::BF16));
        let both = concat(&["c", "d"].map(|name| param(name).cast(DType::BF16)), 0);
        r.output("y", y.linear(both));
    }
}

impl Pass for GroupCasts {
    fn stage(&self) -> Stage {
        Stage::Lowered
    }

    fn after(&self) -> &'static [&'static str] {
        &["recompute", "narrow-products"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        super::layout::sources_first(g);
        let items = items(g);
        let mut groups: BTreeMap<&str, (DType, Vec<&Item>)> = BTreeMap::new();
        for item in &items {
            let to = g.nodes[item.casts[0]].outputs[0].dtype;
            groups.entry(to.name()).or_insert((to, vec![])).1.push(item);
        }
        groups.retain(|_, group| group.1.iter().map(|item| item.casts.len()).sum::<usize>() > 1);
        let joined: usize = groups.values().flat_map(|g| &g.1).filter(|item| item.casts.len() > 1).count();
        if joined > 0 {
            receipt.notes.push(format!("{joined} concatenations made with them"));
        }
        // The first cast of a group -> the group.
        let first: BTreeMap<usize, _> =
            groups.values().map(|group| (group.1.iter().flat_map(|item| &item.casts).copied().min().expect("a cast"), group)).collect();
        let mut made: BTreeMap<usize, Value> = BTreeMap::new(); // a node -> what stands for it
        let old = std::mem::take(g);
        let mut values: Vec<Vec<Value>> = vec![];
        *g = old.rewritten(|recorder, i, node, inputs| {
            if let Some((dtype, group)) = first.get(&i) {
                let casts = group.iter().flat_map(|item| &item.casts);
                let from: Vec<_> = casts.map(|&m| recorder.var(values[old.nodes[m].inputs[0].node][0])).collect();
                receipt.applied += from.len();
                let op = CastAll { dtype: *dtype, parts: group.iter().map(|item| item.casts.len()).collect() };
                made.extend(group.iter().map(|item| item.result).zip(recorder.op(op, &from).iter().map(|v| v.value())));
            }
            let new = match made.get(&i) {
                Some(&v) => vec![v],
                None => recorder.keep(node, inputs.iter().map(|v| v.value()).collect()),
            };
            values.push(new.clone());
            Ok::<_, Error>(Some(new.into_iter().map(|v| recorder.var(v)).collect()))
        })?;
        super::dead_code::sweep(g);
        Ok(())
    }
}

/// Casts of states, one or several that are put one behind another; and the node that reads the result.
struct Item {
    casts: Vec<usize>,
    result: usize,
}

fn items(g: &Graph) -> Vec<Item> {
    let readers = g.readers();
    let is_root = g.root_nodes();
    let is_cast = |i: usize| {
        let node = &g.nodes[i];
        let state = || matches!(g.nodes[node.inputs[0].node].kind, Kind::State(_)) && g.meta(node.inputs[0]).dtype.is_float();
        node.is_cast() && node.outputs[0].dtype.is_float() && state()
    };
    // Whoever joins casts that nobody else reads takes them; a kernel writes four elements at a time.
    let joins = |node: &Node| {
        let casts: Vec<usize> = node.inputs.iter().map(|v| v.node).collect();
        let alone = |&i: &usize| is_cast(i) && readers[i].len() == 1 && !is_root[i] && g.nodes[i].outputs[0].elements().is_multiple_of(4);
        (node.op::<Concat>().is_some_and(|c| c.axis == 0) && casts.iter().all(alone)).then_some(casts)
    };
    let mut items: Vec<Item> = g.nodes.iter().enumerate().filter_map(|(result, node)| Some(Item { casts: joins(node)?, result })).collect();
    let taken: BTreeSet<usize> = items.iter().flat_map(|item| item.casts.iter().copied()).collect();
    items.extend((0..g.nodes.len()).filter(|&i| is_cast(i) && !taken.contains(&i)).map(|i| Item { casts: vec![i], result: i }));
    items
}
