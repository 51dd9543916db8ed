//! What a model chooses while it computes: the tokens and experts that its routers rank highest, the tokens that find no place in an expert, and the classes that it guesses. Rounding
//! sends a token that is all but tied another way, and everything after it differs; so a run that rounds is handed the choices of one
//! that does not, and is compared on everything that follows from them. How many guesses are right then says nothing about it.

use crate::nn::{offset, row_starts};
use engine::graph::{Graph, Node, Value};
use engine::ops::experts::{Capacity, Route};
use engine::ops::top_k::TopK;
use engine::{DType, Recorder, Var};
use std::collections::HashMap;
use std::convert::Infallible;

/// What each choice was, by the name that `note` and `feed` give it.
pub type Choices = Vec<(String, Vec<i32>)>;

/// In running order.
fn choices(g: &Graph) -> Vec<(String, Value)> {
    let chosen = |(node, n): (usize, &Node)| match (n.op::<TopK>(), n.op::<Route>()) {
        (Some(_), _) => Some(Value { node, out: 0 }),
        (_, Some(_)) => Some(Value { node, out: 2 }),
        _ => n.op::<Capacity>().map(|_| Value { node, out: 0 }),
    };
    g.nodes.iter().enumerate().filter_map(chosen).enumerate().map(|(k, v)| (format!("choice/{k}"), v)).collect()
}

/// Lets a run answer with its choices, too; their names.
pub fn note(g: &mut Graph) -> Vec<String> {
    let all = choices(g);
    g.outputs.extend(all.iter().cloned());
    all.into_iter().map(|c| c.0).collect()
}

/// Takes the choices from feeds of those names.
pub fn feed(g: &mut Graph) {
    let names: HashMap<usize, String> = choices(g).into_iter().map(|(name, v)| (v.node, name)).collect();
    let done: Result<(), Infallible> = g.rewrite(|w, i, node, inputs| {
        let r = w.recorder;
        let Some(name) = names.get(&i) else { return Ok(None) };
        let given = |out: usize| r.feed(name, &node.outputs[out].shape, DType::I32);
        Ok(Some(match (node.op::<Route>(), node.op::<Capacity>()) {
            (Some(route), _) => routed(r, inputs[0], route, given(2)),
            (_, Some(&Capacity { experts, places, part })) => vec![given(0), r.op(Capacity { experts, places, part }, inputs)[1]],
            _ => vec![given(0)],
        }))
    });
    done.unwrap_or_else(|never| match never {});
}

/// As `Route`, to the experts that are given.
fn routed<'g>(r: &'g Recorder, logits: Var<'g>, &Route { k, normalized }: &Route, chosen: Var<'g>) -> Vec<Var<'g>> {
    let (tokens, experts) = (logits.dim(1), logits.dim(0));
    let probabilities = r.op(Route { k, normalized }, &[logits])[0];
    let weights = r.typed(|| {
        let at = offset(chosen, row_starts(r, tokens, experts)).reshape(&[tokens * k]);
        let own = probabilities.reshape(&[tokens * experts, 1]).gather_rows(at).reshape(&[tokens, k]);
        if normalized { own / own.sum_axis(1) } else { own }
    });
    vec![probabilities, weights, chosen]
}
