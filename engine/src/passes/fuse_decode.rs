//! Attention of one token over a cache norms and turns its query and key itself.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Uses, Value};
use crate::meta::DType;
use crate::ops::cache::{DecodeAttention, Turn, decode_attention};
use crate::ops::rope::norm::NormRope;
use crate::ops::rope::{Pairs, Rope};
use crate::record::Recorder;

pub struct FuseDecode;

impl Switch for FuseDecode {
    fn name(&self) -> &'static str {
        "fuse-decode"
    }

    fn about(&self) -> &'static str {
        "Norms and turns the query and the key of one token where they are used: attention over a cache is one launch instead of three."
    }

    fn numerics(&self, _: Target, dtype: DType) -> Numerics {
        if dtype == DType::F32 { Numerics::Reordered } else { Numerics::LowPrecision }
    }

    fn example(&self, r: &Recorder) {
        let heads = |name: &str, n: usize| r.feed(name, &[3, 1, n, 8], DType::F32);
        let norm = |name: &str| r.frozen(name, &[8], Init::Normal { std: 1.0 });
        let past = r.state("past", &[1], DType::I32, Init::Full(4.0));
        let tables = r.rope_tables(1, 8, 100.0);
        for (name, normed) in [("normed", true), ("plain", false)] {
            let cache = |part: &str| r.state(&format!("{name}.{part}"), &[3, 9, 2, 8], DType::F32, Init::Normal { std: 1.0 });
            let (mut q, mut k, v) = (heads("q", 4) * 0.5, heads("k", 2) * 0.5, heads("v", 2));
            if normed {
                (q, k) = (q.rms_norm(norm("q_norm"), 1e-6), k.rms_norm(norm("k_norm"), 1e-6));
            }
            let (q, k) = (q.rope(Pairs::Halves, tables), k.rope(Pairs::Halves, tables));
            let caches = (cache("keys"), cache("values"));
            let (y, new) = decode_attention(q, k, v, caches, past, None, 0.35);
            r.update(caches.0, new.0);
            r.update(caches.1, new.1);
            r.output(name, y);
        }
    }
}

impl Pass for FuseDecode {
    fn stage(&self) -> Stage {
        Stage::Differentiated
    }

    fn after(&self) -> &'static [&'static str] {
        &["few-rows", "fuse-qk-norm"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let old = std::mem::take(g);
        let uses = Uses::new(&old);
        let mut values: Vec<Vec<Value>> = vec![];
        *g = old.rewritten(|recorder, i, node, inputs| {
            let keep = || recorder.keep(node, inputs.iter().map(|v| v.value()).collect());
            let new = match site(&old, &uses, i) {
                Some(Ok((op, turned))) => {
                    receipt.applied += 1;
                    let at = |&v: &Value| recorder.var(values[v.node][v.out]);
                    let (heads, more): (Vec<_>, Vec<_>) = (turned[..2].iter().map(at).collect(), turned[2..].iter().map(at).collect());
                    recorder.op(op, &[&heads, &inputs[2..], &more].concat()).iter().map(|v| v.value()).collect()
                }
                Some(Err(reason)) => {
                    receipt.decline(reason, &node.scope);
                    keep()
                }
                None => keep(),
            };
            values.push(new.clone());
            Ok::<_, Error>(Some(new.into_iter().map(|v| recorder.var(v)).collect()))
        })?;
        if receipt.applied > 0 {
            super::dead_code::sweep(g);
        }
        Ok(())
    }
}

/// The op that turns, and its inputs: heads before they are turned, then tables and weights. Or why it does not.
fn site(g: &Graph, uses: &Uses, i: usize) -> Option<Result<(DecodeAttention, Vec<Value>), &'static str>> {
    let op = g.nodes[i].op::<DecodeAttention>().filter(|op| op.turn.is_none())?;
    let made = [0, 1].map(|n| g.nodes[i].inputs[n]);
    let nodes = made.map(|v| &g.nodes[v.node]);
    let turn = |n: usize| match (nodes[n].op::<NormRope>(), nodes[n].op::<Rope>()) {
        (Some(norm), _) => Some(Turn { pairs: norm.pairs, norm: Some(norm.eps) }),
        (_, Some(rope)) => (!rope.inverse).then_some(Turn { pairs: rope.pairs, norm: None }),
        _ => None,
    };
    let (turn, of_key) = (turn(0)?, turn(1)?);
    let alone = |v: Value| uses.only_reader(v.node).is_some();
    let weights = nodes.map(|n| n.inputs.get(3));
    let [of_q, of_k] = weights.map(|w| w.map(|w| g.meta(*w)));
    Some(if g.meta(made[0]).shape[1] != 1 {
        Err("several tokens at once")
    } else if turn != of_key || nodes[0].inputs[1..3] != nodes[1].inputs[1..3] {
        Err("queries and keys are not turned alike")
    } else if !made.into_iter().all(alone) {
        Err("the turned heads are read elsewhere")
    } else if turn.norm.is_some() && (of_q != of_k || of_q.is_none_or(|m| m.shape != [g.meta(made[0]).dim(0)])) {
        Err("a norm without a weight for each element")
    } else {
        let heads = nodes.map(|n| n.inputs[0]).into_iter();
        let more = nodes[0].inputs[1..3].iter().chain(weights.into_iter().flatten()).copied();
        Ok((DecodeAttention { turn: Some(turn), ..op.clone() }, heads.chain(more).collect()))
    })
}
