//! What queries find, in one pass over the candidates.

use super::retrieve::{Retrieval, Retrieve, leaves_out, retrieval};
use super::ring::count;
use engine::error::Error;
use engine::graph::{Graph, Init};
use engine::meta::DType;
use engine::passes::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use engine::record::Recorder;

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
            count(r.feed("filled", &[1], DType::I32), 2),
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
        g.rewrite(|w, _, node, inputs| {
            let Some(&Retrieval { sharpness, eps }) = node.op::<Retrieval>() else { return Ok(None) };
            if !leaves_out(sharpness) {
                receipt.decline(format!("a sharpness of {sharpness} gives weight to what does not count"), &node.scope);
                return Ok(None);
            }
            receipt.applied += 1;
            Ok(Some(w.recorder.op(Retrieve { sharpness, eps }, inputs)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::{Compiled, Switches};

    /// Candidates that do not count are left out only where their weight would be nothing.
    #[test]
    fn a_blunt_retrieval_is_written_out() {
        crate::recipes::register();
        let fused = |sharpness: f32| {
            let r = Recorder::new();
            let feed = |name: &str, shape: &[usize]| r.feed(name, shape, DType::F32);
            let (own, counts) = (feed("own", &[3, 2, 11, 4]), r.feed("counts", &[2, 11], DType::U8));
            let (memory, values, filled) = (feed("memory", &[9, 4]), feed("values", &[9, 4]), r.feed("filled", &[1], DType::I32));
            let (angles, metric, scale) = (feed("angles", &[4]), feed("metric", &[4]), feed("scale", &[3]));
            let x = [feed("query", &[3, 2, 4]), own, counts, memory, values, filled, angles, metric, scale];
            r.output("y", retrieval(&x, sharpness, 1e-6)[0]);
            let c = Compiled::new(r.finish(), &Switches::default(), Target::Cpu).unwrap();
            let receipt = c.receipts.iter().find(|r| r.pass == "fuse-retrieval").unwrap();
            (receipt.applied, receipt.declined.iter().map(|d| d.0.clone()).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(fused(5.0), (1, String::new()));
        for blunt in [-1.0, 0.0, 1e-3] {
            assert_eq!(fused(blunt), (0, format!("a sharpness of {blunt} gives weight to what does not count")));
        }
    }
}
