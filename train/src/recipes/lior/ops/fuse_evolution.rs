//! All steps of a field in one launch.

use super::evolve::{Evolution, Evolve, evolution};
use engine::error::Error;
use engine::graph::{Graph, Init};
use engine::meta::DType;
use engine::passes::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use engine::record::Recorder;

pub struct FuseEvolution;

impl Switch for FuseEvolution {
    fn name(&self) -> &'static str {
        "fuse-evolution"
    }

    fn about(&self) -> &'static str {
        "Takes a field through all its steps at once, in place: its slices know nothing of each other, so each stays in cache or shared memory."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered // sums of sizes
    }

    fn example(&self, r: &Recorder) {
        let part = |name: &str| r.state(name, &[2, 3, 5, 7], DType::F32, Init::Normal { std: 1.0 });
        let (re, im, size) = evolution(part("re"), part("im"), r.full(&[1], 0.1), Some(r.feed("source", &[2], DType::F32)), 6);
        [("re", re), ("im", im), ("size", size)].into_iter().for_each(|(name, v)| r.output(name, v));
    }
}

impl Pass for FuseEvolution {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        g.rewrite(|w, _, node, inputs| {
            let Some(e) = node.op::<Evolution>() else { return Ok(None) };
            receipt.applied += 1;
            Ok(Some(w.recorder.op(Evolve { steps: e.steps }, inputs)))
        })
    }
}
