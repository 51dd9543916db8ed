//! Computes the output projection and its cross-entropy in chunks of rows, so that the full logits are never stored.

use super::{Numerics, Pass, Receipt, Setting, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Value};
use crate::meta::DType;
use crate::ops::linear_ce::{ChunkedLinearCrossEntropy, LinearCrossEntropy};
use crate::record::Recorder;

pub struct LinearCe;

impl Switch for LinearCe {
    fn name(&self) -> &'static str {
        "linear-cross-entropy"
    }

    fn about(&self) -> &'static str {
        "Computes the output projection, cross-entropy and their gradients one chunk of rows at a time: the full logits are never stored, and chunks without any target are skipped."
    }

    fn settings(&self) -> &'static [Setting] {
        &[
            Setting { name: "chunk", default: "auto", about: "rows of logits in memory at once; auto: 192 on the CPU, 4096 on a GPU" },
            Setting {
                name: "rows",
                default: "trained",
                about: "trained: rows without a target are skipped (on a GPU, whole chunks of them); all: every row is computed",
            },
        ]
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[300, 8], Init::Normal { std: 1.0 });
        let v = r.param("v", &[8, 8], Init::Normal { std: 1.0 });
        let rows = 9000; // three chunks on a GPU
        let (x, targets) = (r.feed("x", &[rows, 8], DType::F32), r.feed("targets", &[rows], DType::I32));
        let loss = x.matmul(v).linear_cross_entropy(w, targets, r.full(&[1], 1.0 / rows as f32));
        r.output("loss", loss);
        let grads = r.grad(loss, &[w, v]);
        r.output("dw", grads[0]);
        r.output("dv", grads[1]);
    }
}

impl Pass for LinearCe {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        // Measured, see LOG.md. Smaller chunks read and write the weight's gradient more often.
        let chunk = match (settings.text("chunk"), settings.target) {
            ("auto", Target::Cpu) => 192,
            ("auto", Target::Cuda(_)) => 4096,
            _ => settings.number("chunk")?,
        };
        let skip = settings.one_of("rows", &["trained", "all"])? == "trained";
        // Gradients are computed together with the loss only if a Grad node asks for them.
        let asked: Vec<(Value, Vec<bool>)> = g
            .nodes
            .iter()
            .filter(|n| matches!(n.kind, Kind::Grad))
            .map(|n| (n.inputs[0], g.depends_on(n.inputs[1..].iter().copied())))
            .collect();
        let reached: Vec<Vec<bool>> = asked.iter().map(|(loss, _)| g.needed_by(std::iter::once(*loss))).collect();
        g.rewrite(|w, i, node, inputs| {
            if node.op::<LinearCrossEntropy>().is_none() {
                return Ok(None);
            }
            receipt.applied += 1;
            let wanted = |input: usize| asked.iter().zip(&reached).any(|((_, depends), hit)| hit[i] && depends[node.inputs[input].node]);
            let op = ChunkedLinearCrossEntropy { chunk, grad_h: wanted(0), grad_w: wanted(1), skip };
            Ok(Some(vec![w.recorder.op(op, inputs)[0]]))
        })
    }
}
