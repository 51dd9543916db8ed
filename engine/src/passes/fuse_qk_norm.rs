//! Fuses QK-norm and RoPE: queries and keys are normed and rotated in one kernel.

use super::pattern::Uses;
use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Value};
use crate::meta::DType;
use crate::ops::norm::RmsNorm;
use crate::ops::pointwise::Bin;
use crate::ops::rope::norm::{LONGEST, NormRope};
use crate::ops::rope::{Pairs, Rope};
use crate::record::Recorder;

pub struct FuseQkNorm;

impl Switch for FuseQkNorm {
    fn name(&self) -> &'static str {
        "fuse-qk-norm"
    }

    fn about(&self) -> &'static str {
        "Fuses the RMS norm of queries or keys, a learned scale after it, and RoPE: heads are read and written once."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn example(&self, r: &Recorder) {
        let temperature = r.param("temperature", &[1], Init::Full(1.5));
        let norm = r.param("norm", &[8], Init::Normal { std: 1.0 });
        let x = r.feed("x", &[2, 17, 3, 8], DType::F32);
        let w = r.param("w", &[8, 8], Init::Normal { std: 0.3 });
        let tables = r.rope_tables(17, 8, 100.0);
        let h = x.matmul(w);
        let plain = h.rms_norm_plain(1e-6).rope(Pairs::Halves, tables);
        let scaled = (x.rms_norm_plain(1e-6) * temperature).rope(Pairs::Halves, tables);
        let weighted = h.rms_norm(norm, 1e-6).rope(Pairs::Adjacent, tables);
        let loss = (plain * scaled * weighted).mean();
        r.output("loss", loss);
        let grads = r.grad(loss, &[temperature, norm, w]);
        grads.into_iter().enumerate().for_each(|(i, g)| r.output(&format!("g{i}"), g));
    }
}

impl Pass for FuseQkNorm {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn after(&self) -> &'static [&'static str] {
        &["fuse-norm"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let uses = Uses::new(g);
        g.rewrite(|w, i, node, inputs| {
            let found = match site(w.old, &uses, i) {
                Some(Ok(found)) => found,
                Some(Err(reason)) => {
                    receipt.decline(reason, &node.scope);
                    return Ok(None);
                }
                None => return Ok(None),
            };
            receipt.applied += 1;
            let mut all = vec![w.at(found.x), inputs[1], inputs[2]];
            all.extend(found.weight.map(|v| w.at(v)));
            Ok::<_, Error>(Some(vec![w.recorder.op(NormRope { eps: found.eps, pairs: found.pairs }, &all)[0]]))
        })?;
        if receipt.applied > 0 {
            super::dead_code::sweep(g);
        }
        Ok(())
    }
}

struct Site {
    x: Value,
    weight: Option<Value>,
    eps: f32,
    pairs: Pairs,
}

/// RoPE of an RMS norm, perhaps times one number; or why the two are not fused.
fn site(g: &Graph, uses: &Uses, i: usize) -> Option<Result<Site, &'static str>> {
    let rope = g.nodes[i].op::<Rope>().filter(|r| !r.inverse)?;
    let v = g.nodes[i].inputs[0];
    let norm = |v: Value| g.nodes[v.node].op::<RmsNorm>().filter(|_| v.out == 0);
    let alone = |v: Value| uses.only_reader(v.node).is_some();
    let (normed, number) = match (norm(v), g.binary(v.node, Bin::Mul)) {
        (Some(_), _) => (v, None),
        (_, Some([a, b])) if norm(a).is_some() && g.meta(b).shape == [1] => (a, Some(b)),
        (_, Some([a, b])) if norm(b).is_some() && g.meta(a).shape == [1] => (b, Some(a)),
        _ => return None,
    };
    let eps = norm(normed)?.eps;
    let inputs = &g.nodes[normed.node].inputs;
    let reason = if !alone(normed) || !alone(v) {
        "the normed heads are read elsewhere"
    } else if crate::mutant!("fuse-qk-norm-drops-a-weight", number.is_some() && inputs.len() > 1, false) {
        "the norm has a weight and is also multiplied by a number"
    } else if g.meta(normed).dim(0) > LONGEST {
        "the head dimension is too large for the kernel"
    } else if g.meta(normed).dtype != g.meta(v).dtype {
        "the multiplication changes the type"
    } else {
        return Some(Ok(Site { x: inputs[0], weight: number.or(inputs.get(1).copied()), eps, pairs: rope.pairs }));
    };
    Some(Err(reason))
}
