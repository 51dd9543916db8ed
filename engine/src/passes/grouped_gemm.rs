//! Chooses tensor-core kernels for the grouped GEMMs of a mixture of experts.

use super::{Numerics, Pass, Receipt, Setting, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind};
use crate::meta::DType;
use crate::op::Op;
use crate::ops::experts::{GroupedMatmul, GroupedOuter, GroupedSwiglu, Kernel, kernel_for, mixture};
use crate::record::Recorder;
use std::sync::Arc;

pub struct GroupedGemm;

impl Switch for GroupedGemm {
    fn name(&self) -> &'static str {
        "grouped-gemm"
    }

    fn about(&self) -> &'static str {
        "Grouped GEMM for mixtures of experts: tensor cores, and persistent blocks that share the tiles evenly whatever the experts' loads. Nothing to do on the CPU."
    }

    /// The kernels take bf16 and f16 only, and round intermediate values to that type.
    fn numerics(&self, _: Target, dtype: DType) -> Numerics {
        if dtype == DType::F32 { Numerics::Exact } else { Numerics::LowPrecision }
    }

    fn settings(&self) -> &'static [Setting] {
        &[Setting {
            name: "with",
            default: "wgmma",
            about: "tensor-core instructions. wgmma: those of compute capability 9.0, and mma on other GPUs; mma: those of 8.0 and later",
        }]
    }

    fn example(&self, r: &Recorder) {
        let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.2 }).cast(DType::BF16);
        let (gate_up, down) = (param("gate_up", &[4, 48, 16]), param("down", &[4, 16, 24]));
        let x = r.feed("x", &[40, 16], DType::F32).cast(DType::BF16);
        let (y, _) = mixture(x, Some(param("router", &[4, 16])), gate_up, down, 2);
        r.output("y", y.cast(DType::F32));
    }

    fn needs_gpu(&self) -> bool {
        true
    }
}

impl Pass for GroupedGemm {
    fn stage(&self) -> Stage {
        Stage::Lowered
    }

    fn after(&self) -> &'static [&'static str] {
        &["fuse-pointwise"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let most = if settings.one_of("with", &["wgmma", "mma"])? == "wgmma" { Kernel::Wgmma } else { Kernel::Mma };
        let Target::Cuda(arch) = settings.target else {
            receipt.notes.push("the program runs on the CPU".into());
            return Ok(());
        };
        for i in 0..g.nodes.len() {
            let inputs = g.inputs(i);
            let choose = |lengths: &[usize]| kernel_for(inputs[0].dtype, lengths, arch).map(|k| if k == Kernel::Wgmma { most } else { k });
            let node = &g.nodes[i];
            let new: Result<Arc<dyn Op>, String> = if let Some(op) = node.op::<GroupedMatmul>() {
                choose(&inputs[1].shape[1..]).map(|kernel| Arc::new(GroupedMatmul { kernel, ..op.clone() }) as _)
            } else if let Some(op) = node.op::<GroupedSwiglu>() {
                choose(&[inputs[1].dim(0), inputs[1].dim(1) / 2]).map(|kernel| Arc::new(GroupedSwiglu { kernel, ..op.clone() }) as _)
            } else if let Some(op) = node.op::<GroupedOuter>() {
                choose(&[inputs[0].dim(0), inputs[1].dim(0)]).map(|kernel| Arc::new(GroupedOuter { kernel, ..op.clone() }) as _)
            } else {
                continue;
            };
            match new {
                Ok(op) => {
                    g.nodes[i].kind = Kind::Op(op);
                    receipt.applied += 1;
                }
                Err(reason) => receipt.decline(reason, &node.scope.clone()),
            }
        }
        Ok(())
    }
}
