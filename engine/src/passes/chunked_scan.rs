//! Replaces the state-space scan by its chunked form, which is linear in time.

use super::{Numerics, Pass, Receipt, Setting, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init};
use crate::meta::{DType, Meta};
use crate::ops::ssd::{ChunkedScan, LEAST_CHUNK, MOST_CHUNK, Scan, Ssd, ssd};
use crate::record::Recorder;

pub struct ChunkedScanPass;

impl Switch for ChunkedScanPass {
    fn name(&self) -> &'static str {
        "chunked-scan"
    }

    fn about(&self) -> &'static str {
        "Computes the scans of Mamba-2 in chunks, with a state that passes from chunk to chunk: time and memory are linear in the sequence's length, where the plain form stores [time, time] scores."
    }

    fn settings(&self) -> &'static [Setting] {
        &[Setting { name: "chunk", default: "128", about: "the longest chunk: a multiple of 16 up to 128" }]
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn example(&self, r: &Recorder) {
        let (heads, p, n) = (4, 4, 8);
        let w = r.param("w", &[8, heads * p + 4 * n + heads], Init::Normal { std: 0.3 });
        let [a, d] = ["a", "d"].map(|name| r.param(name, &[heads], Init::Normal { std: 1.0 }));
        let u = r.feed("u", &[2, 150, 8], DType::F32).matmul(w);
        let part = |from: usize, groups: usize, width: usize| u.slice(2, from, from + groups * width).reshape(&[2, 150, groups, width]);
        let (x, b, c) = (part(0, heads, p), part(heads * p, 2, n), part(heads * p + 2 * n, 2, n));
        let dt = part(heads * p + 4 * n, heads, 1).reshape(&[2, 150, heads]).sigmoid();
        let scan = Scan { x, dt, decay: -(dt * a.exp()), b, c, d };
        let loss = (ssd(scan, false) + ssd(scan, true)).square().mean();
        r.output("loss", loss);
        for (name, grad) in ["dw", "da", "dd"].into_iter().zip(r.grad(loss, &[w, a, d])) {
            r.output(name, grad);
        }
    }
}

impl Pass for ChunkedScanPass {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let chunk = settings.number("chunk")?;
        if !chunk.is_multiple_of(LEAST_CHUNK) || chunk > MOST_CHUNK {
            let problem = format!("chunk={chunk} is not a multiple of {LEAST_CHUNK} up to {MOST_CHUNK}");
            return Err(Error::PassSetting { pass: self.name().into(), problem });
        }
        let shared = match settings.target {
            Target::Cpu => usize::MAX,
            Target::Cuda(arch) => arch.shared_limit(),
        };
        g.rewrite(|w, _, node, inputs| {
            let Some(op) = node.op::<Ssd>() else { return Ok(None) };
            let scan = ChunkedScan { reverse: op.reverse, chunk, shared, keep: true };
            let metas: Vec<Meta> = inputs.iter().map(|v| v.meta()).collect();
            if !scan.fits(&metas) {
                let (p, n) = (inputs[0].dim(0), inputs[3].dim(0));
                receipt.decline(format!("states of {p} x {n}: the GPU kernels hold two in the shared memory of a block"), &node.scope);
                return Ok(None);
            }
            receipt.applied += 1;
            Ok(Some(vec![w.recorder.op(scan, inputs)[0]]))
        })
    }
}
