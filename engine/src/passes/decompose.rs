//! Replaces composite ops that no pass fused by the plain ops that define them.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Kind};
use crate::meta::DType;
use crate::ops::attention::attention;
use crate::record::Recorder;

pub struct Decompose;

impl Switch for Decompose {
    fn name(&self) -> &'static str {
        "decompose"
    }

    fn about(&self) -> &'static str {
        "Replaces composite ops that no pass fused (attention, linear cross-entropy, momentum) by matmuls, softmax and pointwise ops."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }

    fn required(&self) -> bool {
        true
    }

    fn example(&self, r: &Recorder) {
        let heads = |name: &str| r.feed(name, &[2, 7, 2, 4], DType::F32);
        r.output("y", attention(heads("q"), heads("k"), heads("v"), true, 0.5));
    }
}

impl Pass for Decompose {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn after(&self) -> &'static [&'static str] {
        &["flash-attention", "linear-attention", "linear-cross-entropy", "adam8bit", "cse"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        g.rewrite(|_, _, node, inputs| {
            Ok(match &node.kind {
                Kind::Op(op) if op.is_composite() => {
                    receipt.applied += 1;
                    op.unfused(inputs)
                }
                _ => None,
            })
        })
    }
}
