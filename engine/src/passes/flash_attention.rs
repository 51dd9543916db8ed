//! Replaces attention by flash attention, which never stores the [time, time] scores.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init};
use crate::meta::DType;
use crate::ops::attention::{Attention, FlashAttention, LONGEST_HEAD, attention};
use crate::record::Recorder;

pub struct FlashAttentionPass;

impl Switch for FlashAttentionPass {
    fn name(&self) -> &'static str {
        "flash-attention"
    }

    fn about(&self) -> &'static str {
        "Computes attention in tiles with an online softmax: the [time, time] scores are never stored, neither forward nor backward."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[8, 3 * 8], Init::Normal { std: 0.3 });
        let x = r.feed("x", &[2, 70, 8], DType::F32);
        let qkv = x.matmul(w).reshape(&[2, 70, 3, 2, 4]);
        let part = |i: usize| qkv.slice(2, i, i + 1).reshape(&[2, 70, 2, 4]);
        let loss = attention(part(0), part(1), part(2), true, 0.5).square().mean();
        r.output("loss", loss);
        r.output("dw", r.grad(loss, &[w])[0]);
    }
}

impl Pass for FlashAttentionPass {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        g.rewrite(|w, _, node, inputs| {
            let Some(a) = node.op::<Attention>() else { return Ok(None) };
            let head = inputs[0].dim(0);
            if settings.target != Target::Cpu && head > LONGEST_HEAD {
                receipt.decline(format!("head dimension {head}: the GPU kernels take up to {LONGEST_HEAD}"), &node.scope);
                return Ok(None);
            }
            receipt.applied += 1;
            let y = w.recorder.op(FlashAttention { causal: a.causal, scale: a.scale }, inputs);
            Ok(Some(vec![y[0]]))
        })
    }
}
