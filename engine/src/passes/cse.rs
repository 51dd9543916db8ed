//! What is computed twice from the same values is computed once.

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
        "Computes once what was recorded twice: the same operation on the same values, and constants with the same numbers."
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
        // A value that a gradient is asked for is itself: what flows through its equals is not its own.
        let asked: HashSet<usize> =
            g.nodes.iter().filter(|n| matches!(n.kind, Kind::Grad)).flat_map(|n| n.inputs[1..].iter().map(|v| v.node)).collect();
        let mut seen: HashMap<(String, Vec<Value>), Vec<Value>> = HashMap::new();
        g.rewrite(|w, i, node, inputs| {
            if crate::mutant!("cse-merges-what-is-differentiated", asked.contains(&i), false) {
                return Ok(None);
            }
            // An op prints everything that it is; draws of random numbers differ by their site. What keeps its types is no equal of what may not.
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
