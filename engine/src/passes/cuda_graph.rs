//! The whole program as one captured CUDA graph, its launches overlapping.

use super::{Numerics, Pass, Receipt, Settings, Target};
use crate::error::Error;
use crate::graph::{Graph, Init};
use crate::meta::DType;
use crate::record::Recorder;

pub struct OverlapLaunches;

impl Pass for OverlapLaunches {
    fn name(&self) -> &'static str {
        "overlap-launches"
    }

    fn about(&self) -> &'static str {
        "Launches a kernel while the one before it ends: it waits on the GPU itself (from compute capability 9.0). Nothing to do on the CPU."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }

    fn apply(&self, _: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        match settings.target {
            Target::Cpu => receipt.notes.push("the program runs on the CPU".into()),
            Target::Cuda(arch) if arch.sm < 90 => {
                receipt.decline(format!("compute capability {}.{} cannot", arch.sm / 10, arch.sm % 10), "")
            }
            Target::Cuda(_) => receipt.applied = 1,
        }
        Ok(())
    }

    fn example(&self, r: &Recorder) {
        CudaGraph.example(r);
    }

    fn needs_gpu(&self) -> bool {
        true
    }
}

pub struct CudaGraph;

impl Pass for CudaGraph {
    fn name(&self) -> &'static str {
        "cuda-graph"
    }

    fn about(&self) -> &'static str {
        "Captures a program and replays it as one CUDA graph (a graph for every choice of steps, where some may be left out), instead of launching its kernels one by one. Nothing to do on the CPU."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }

    fn apply(&self, _: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        match settings.target {
            Target::Cpu => receipt.notes.push("the program runs on the CPU".into()),
            Target::Cuda(_) => receipt.applied = 1,
        }
        Ok(())
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[4, 4], Init::Normal { std: 1.0 });
        let x = r.feed("x", &[5, 4], DType::F32);
        let y = x.matmul(w).silu();
        r.update(w, w * 0.5);
        r.output("y", y);
    }

    fn needs_gpu(&self) -> bool {
        true
    }
}
