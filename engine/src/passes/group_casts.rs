//! All weights are rounded in a few launches, before the step, instead of one by one.

use super::{Numerics, Pass, Receipt, Settings, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Value};
use crate::meta::DType;
use crate::ops::cast_all::CastAll;
use crate::record::Recorder;
use std::collections::BTreeMap;

pub struct GroupCasts;

impl Pass for GroupCasts {
    fn name(&self) -> &'static str {
        "group-casts"
    }

    fn about(&self) -> &'static str {
        "Rounds all parameters to a narrower type at once, at the start of a program: a few launches instead of one for each."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        super::layout::sources_first(g);
        let mut groups: BTreeMap<&str, (DType, Vec<usize>)> = BTreeMap::new();
        for (i, node) in g.nodes.iter().enumerate().filter(|(_, n)| n.is_cast()) {
            let from = g.meta(node.inputs[0]);
            let states = matches!(g.nodes[node.inputs[0].node].kind, Kind::State(_));
            if states && from.dtype.is_float() && node.outputs[0].dtype.is_float() {
                let to = node.outputs[0].dtype;
                groups.entry(to.name()).or_insert((to, vec![])).1.push(i);
            }
        }
        groups.retain(|_, group| group.1.len() > 1);
        let mut made: BTreeMap<usize, Value> = BTreeMap::new();
        let old = g.clone();
        let mut states: Vec<Vec<Value>> = vec![];
        g.rewrite(|recorder, i, node, inputs| {
            let group = groups.values().find(|group| group.1.contains(&i));
            let new = match group {
                Some((dtype, group)) => {
                    if group[0] == i {
                        receipt.applied += group.len();
                        let from: Vec<_> = group.iter().map(|&m| recorder.var(states[old.nodes[m].inputs[0].node][0])).collect();
                        let all = recorder.op(CastAll { dtype: *dtype }, &from);
                        made.extend(group.iter().copied().zip(all.iter().map(|v| v.value())));
                    }
                    vec![made[&i]]
                }
                None => recorder.keep(node, inputs.iter().map(|v| v.value()).collect()),
            };
            states.push(new.clone());
            Ok(Some(new.into_iter().map(|v| recorder.var(v)).collect()))
        })
    }

    fn example(&self, r: &Recorder) {
        let param = |name: &str| r.param(name, &[8, 8], Init::Normal { std: 0.4 });
        let (a, b) = (param("a"), param("b"));
        let x = r.feed("x", &[5, 8], DType::F32).cast(DType::BF16);
        r.output("y", x.matmul(a.cast(DType::BF16)).silu().matmul(b.cast(DType::BF16)));
    }
}
