//! Composite ops that no pass took over are written out in plain ones.

use crate::graph::{Graph, Kind};

pub fn apply(g: &mut Graph) {
    let done: Result<(), std::convert::Infallible> = g.rewrite(|_, _, node, inputs| {
        Ok(match &node.kind {
            Kind::Op(op) if op.is_composite() => op.unfused(inputs),
            _ => None,
        })
    });
    done.unwrap_or_else(|never| match never {});
}
