//! Common-subexpression elimination: the same op on the same inputs is computed once.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Value};
use crate::meta::DType;
use crate::record::Recorder;
use std::collections::{HashMap, HashSet};

pub struct Cse;

impl Switch for Cse {
    fn name(&self) -> &'static str {
        "cse"
    }

    fn about(&self) -> &'static str {
        "Common-subexpression elimination: the same op on the same inputs is computed once, and equal constants are stored once."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[4, 4], Init::Normal { std: 1.0 });
        let x = r.feed("x", &[5, 4], DType::F32);
        let table = || r.constant(&[4], vec![1.0, 2.0, 3.0, 4.0]);
        let loss = (x.matmul(w).silu() * table() + x.matmul(w).silu() * table()).mean();
        r.output("loss", loss);
        r.output("dw", r.grad(loss, &[w])[0]);
    }
}

impl Pass for Cse {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn after(&self) -> &'static [&'static str] {
        &["flash-attention", "linear-attention", "linear-cross-entropy"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        // A value that gradients are taken with respect to must not be merged with an equal one: the gradient would be of both.
        let asked: HashSet<usize> =
            g.nodes.iter().filter(|n| matches!(n.kind, Kind::Grad)).flat_map(|n| n.inputs[1..].iter().map(|v| v.node)).collect();
        let mut seen: HashMap<(String, Vec<Value>), Vec<Value>> = HashMap::new();
        g.rewrite(|w, i, node, inputs| {
            if crate::mutant!("cse-merges-what-is-differentiated", asked.contains(&i), false) {
                return Ok(None);
            }
            // An op's Debug text has all of its fields (random draws differ by their `site`). `typed` nodes are not merged with others.
            let what = match &node.kind {
                Kind::Op(op) => format!("{op:?} {} {}", node.typed, node.narrow),
                Kind::Const(numbers) => {
                    let bytes = bytemuck::cast_slice(numbers);
                    format!("const {:?} {:032x}", node.outputs[0], xxhash_rust::xxh3::xxh3_128(bytes))
                }
                _ => return Ok(None),
            };
            let key = (what, inputs.iter().map(|v| v.value()).collect());
            if let Some(made) = seen.get(&key) {
                receipt.applied += !node.is_view() as usize;
                return Ok(Some(made.iter().map(|&v| w.recorder.var(v)).collect()));
            }
            let made = w.keep(node, inputs);
            seen.insert(key, made.iter().map(|v| v.value()).collect());
            Ok(Some(made))
        })
    }
}
