//! What queries find, in one pass over the candidates.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init};
use crate::meta::DType;
use crate::ops::retrieve::{Retrieval, Retrieve, leaves_out, retrieval};
use crate::record::Recorder;

pub struct FuseRetrieval;

impl Switch for FuseRetrieval {
    fn name(&self) -> &'static str {
        "fuse-retrieval"
    }

    fn about(&self) -> &'static str {
        "Rotates, measures, weighs and mixes the candidates of a query in one pass, over a memory only as far as it is filled; lengths are averaged where they are found."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn example(&self, r: &Recorder) {
        let state = |name: &str, shape: &[usize]| r.state(name, shape, DType::F32, Init::Normal { std: 1.0 });
        let x = [
            r.feed("query", &[3, 2, 5], DType::F32),
            r.feed("own", &[3, 2, 11, 5], DType::F32),
            r.feed("counts", &[2, 11], DType::U8),
            state("memory", &[9, 5]),
            state("values", &[9, 12]).slice(1, 0, 5),
            r.feed("filled", &[1], DType::I32).count(2),
            state("angles", &[6]),
            state("metric", &[5]).abs() + 0.1,
            state("scale", &[3]).abs() + 0.1,
        ];
        retrieval(&x, 2.0, 1e-6).into_iter().enumerate().for_each(|(i, v)| r.output(&format!("y{i}"), v));
    }
}

impl Pass for FuseRetrieval {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        g.rewrite(|recorder, _, node, inputs| {
            let Some(&Retrieval { sharpness, eps }) = node.op::<Retrieval>() else { return Ok(None) };
            if !leaves_out(sharpness) {
                receipt.decline(format!("a sharpness of {sharpness} gives weight to what does not count"), &node.scope);
                return Ok(None);
            }
            receipt.applied += 1;
            Ok(Some(recorder.op(Retrieve { sharpness, eps }, inputs)))
        })
    }
}
