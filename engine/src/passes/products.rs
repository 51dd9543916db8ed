//! How products are made on a GPU: in TF32, and by the fastest of a few algorithms.

use super::{Mode, Numerics, Pass, Receipt, Settings, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind};
use crate::kernel::{Io, Step};
use crate::meta::DType;
use crate::record::Recorder;

pub struct Tf32;

impl Pass for Tf32 {
    fn name(&self) -> &'static str {
        "tf32"
    }

    fn about(&self) -> &'static str {
        "Rounds the inputs of f32 products to TF32 (10 bits of mantissa), for tensor cores; sums stay f32. Nothing to do on the CPU."
    }

    fn default_mode(&self) -> Mode {
        Mode::Off
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::LowPrecision
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        count(g, settings.target, receipt, |d| d == DType::F32);
        Ok(())
    }

    fn example(&self, r: &Recorder) {
        example(r);
    }

    fn needs_gpu(&self) -> bool {
        true
    }
}

pub struct TuneProducts;

impl Pass for TuneProducts {
    fn name(&self) -> &'static str {
        "tune-products"
    }

    fn about(&self) -> &'static str {
        "Times the algorithms that cuBLASLt proposes for every new product and keeps the fastest, on disk and with the run. Nothing to do on the CPU."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        count(g, settings.target, receipt, |_| true);
        Ok(())
    }

    fn example(&self, r: &Recorder) {
        example(r);
    }

    fn needs_gpu(&self) -> bool {
        true
    }
}

/// Sites are ops that make products of a type that counts.
fn count(g: &Graph, target: Target, receipt: &mut Receipt, counts: impl Fn(DType) -> bool) {
    let Target::Cuda(arch) = target else {
        receipt.notes.push("the program runs on the CPU".into());
        return;
    };
    for (i, node) in g.nodes.iter().enumerate() {
        let Kind::Op(op) = &node.kind else { continue };
        let inputs = g.inputs(i);
        if op.is_view() || op.cost(&inputs).memory_bound {
            continue;
        }
        let code = op.cuda(&Io::plain(&inputs, &node.outputs, arch));
        receipt.applied += code.steps.iter().filter_map(Step::product).any(|p| counts(p.a.dtype)) as usize;
    }
}

fn example(r: &Recorder) {
    let w = r.param("w", &[64, 64], Init::Normal { std: 1.0 });
    let x = r.feed("x", &[96, 64], DType::F32);
    r.output("y", x.matmul(w).silu().matmul(w));
}
