//! Fuses QK-norm and RoPE of one token into its attention over the KV cache.

use crate::error::Error;
use crate::graph::{Graph, Value};
use crate::ops::cache::{DecodeAttention, Rotation};
use crate::ops::rope::Rope;
use crate::ops::rope::norm::NormRope;
use crate::passes::Receipt;
use crate::passes::pattern::Uses;
use crate::record::Var;

pub fn apply(g: &mut Graph, receipt: &mut Receipt) -> Result<(), Error> {
    let uses = Uses::new(g);
    let mut applied = 0;
    g.rewrite(|w, i, node, inputs| {
        Ok::<_, Error>(match site(w.old, &uses, i) {
            Some(Ok((op, x))) => {
                applied += 1;
                let x: Vec<Var> = x.iter().map(|&v| w.at(v)).collect();
                Some(w.recorder.op(op, &[&x[..2], &inputs[2..], &x[2..]].concat()))
            }
            Some(Err(reason)) => {
                receipt.decline(reason, &node.scope);
                None
            }
            None => None,
        })
    })?;
    if applied > 0 {
        crate::passes::sweep(g);
    }
    receipt.applied += applied;
    Ok(())
}

/// The attention op with RoPE, and its inputs: q and k before RoPE, then tables and norm weights. Or why it is not fused.
fn site(g: &Graph, uses: &Uses, i: usize) -> Option<Result<(DecodeAttention, Vec<Value>), &'static str>> {
    let op = g.nodes[i].op::<DecodeAttention>().filter(|op| op.rotation.is_none())?;
    let made = [0, 1].map(|n| g.nodes[i].inputs[n]);
    let nodes = made.map(|v| &g.nodes[v.node]);
    let rotation = |n: usize| match (nodes[n].op::<NormRope>(), nodes[n].op::<Rope>()) {
        (Some(norm), _) => Some(Rotation { pairs: norm.pairs, norm: Some(norm.eps) }),
        (_, Some(rope)) => (!rope.inverse).then_some(Rotation { pairs: rope.pairs, norm: None }),
        _ => None,
    };
    let (rotation, of_key) = (rotation(0)?, rotation(1)?);
    let alone = |v: Value| uses.only_reader(v.node).is_some();
    let weights = nodes.map(|n| n.inputs.get(3));
    let [of_q, of_k] = weights.map(|w| w.map(|w| g.meta(*w)));
    Some(if g.meta(made[0]).shape[1] != 1 {
        Err("several tokens at once")
    } else if rotation != of_key || nodes[0].inputs[1..3] != nodes[1].inputs[1..3] {
        Err("queries and keys have different RoPE or norms")
    } else if !made.into_iter().all(alone) {
        Err("the rotated heads are read elsewhere")
    } else if rotation.norm.is_some() && (of_q != of_k || of_q.is_none_or(|m| m.shape != [g.meta(made[0]).dim(0)])) {
        Err("the norm has no weight of the head's size")
    } else {
        let heads = nodes.map(|n| n.inputs[0]).into_iter();
        let more = nodes[0].inputs[1..3].iter().chain(weights.into_iter().flatten()).copied();
        Ok((DecodeAttention { rotation: Some(rotation), ..op.clone() }, heads.chain(more).collect()))
    })
}
