//! hrm_lm: a language model that thinks between reading and writing. An encoder reads a source; two coupled modules think about it in cycles; a decoder writes the
//! reply and sees what was thought through a gate.

mod arithmetic;
mod generate;
mod golden;
mod learned;
mod model;

pub use model::HrmLmConfig;

use crate::checkpoint::Checkpoint;
use crate::config::{Config, Keys, Section, TrainConfig};
use crate::data::{Source as Items, Split};
use crate::golden::Golden;
use crate::recipe::{
    Better, Computed, Losses, Metric, Model, Reads, Recipe, Reference, Replier, Session, Supervised, Task, TextModel, TrainError, Unit,
    Writes,
};
use crate::sample::{Sampling, reply};
use crate::say;
use crate::source_target::{SourceTarget, SourceTargetConfig};
use engine::ops::pointwise::{Bin, pointwise};
use engine::{DType, Device, Recorder, Switches, Var};
use generate::HrmLmReplier;
use learned::Learned;
use model::{Fed, HrmLm, Source, spread};
use std::sync::Arc;

pub struct HrmLmRecipe;

impl Recipe for HrmLmRecipe {
    fn name(&self) -> &'static str {
        "hrm_lm"
    }

    fn about(&self) -> &'static str {
        "a language model: an encoder, two recurrent modules that think, and a decoder that sees their thought through a gate"
    }

    fn metrics(&self) -> &'static [Metric] {
        METRICS
    }

    fn sections(&self) -> Vec<Keys> {
        vec![HrmLmConfig::keys("model"), SourceTargetConfig::keys("data"), TrainConfig::keys("train")]
    }

    fn presets(&self) -> &'static [(&'static str, &'static str)] {
        &[("tiny", include_str!("../../../configs/hrm_lm-tiny.toml")), ("base", include_str!("../../../configs/hrm_lm-base.toml"))]
    }

    fn sized(&self, config: &Config) -> Result<Config, TrainError> {
        learned::sized(config)
    }

    fn task(&self, config: &Config) -> Result<Box<dyn Task>, TrainError> {
        let config = &self.sized(config)?;
        let c: HrmLmConfig = config.section("model")?;
        c.only_for_its_encoder(config)?;
        c.check()?;
        let train: TrainConfig = config.section("train")?;
        train.check()?;
        c.check_batch(train.batch)?;
        let learned = Learned::new(config, &c)?;
        let model = HrmLmModel { accumulate: train.accumulate, c, learned };
        Ok(Box::new(Supervised::new(model, train, config.seed())))
    }

    fn reads(&self) -> &'static [Reads] {
        &[Reads::Text, Reads::Replies]
    }

    fn writes(&self) -> Option<&dyn Writes> {
        Some(self)
    }

    fn reference(&self) -> Option<&dyn Reference> {
        Some(self)
    }
}

impl Writes for HrmLmRecipe {
    fn text_model(&self, config: &Config, found: Option<&Checkpoint>) -> Result<TextModel, TrainError> {
        let config = &self.sized(config)?;
        let c: HrmLmConfig = config.section("model")?;
        c.check()?;
        let learned = Learned::to_write(config, &c, found)?;
        Ok(TextModel::Answers(Box::new(HrmLmReplier::new(HrmLmModel { accumulate: 1, c, learned }))))
    }
}

impl Reference for HrmLmRecipe {
    fn file(&self) -> &'static [u8] {
        include_bytes!("../../../../reference/golden/hrm_lm.safetensors")
    }

    fn compute(&self, file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
        golden::compute(file, switches, device)
    }
}

const METRICS: &[Metric] = &[
    Metric::new(
        "loss",
        Unit::Nats,
        Better::Lower,
        "in training what is differentiated: cross_entropy, and supervision, balance and halting by their weights; in evaluation cross_entropy alone",
    ),
    Metric::new(
        "cross_entropy",
        Unit::Nats,
        Better::Lower,
        "cross-entropy of the next token, with the thought of the last cycle through the gate",
    ),
    Metric::perplexity("cross_entropy"),
    Metric::new(
        "closed_cross_entropy",
        Unit::Nats,
        Better::Neither,
        "the same with the gate closed: beside cross_entropy it says what the thought is worth",
    ),
    Metric {
        name: "closed_perplexity",
        better: Better::Neither,
        exp_of: Some("closed_cross_entropy"),
        about: "exp of closed_cross_entropy",
        ..Metric::perplexity("closed_cross_entropy")
    },
    Metric::new("right", Unit::Share, Better::Higher, "of the generated sums, those whose answer is right to the last digit"),
    Metric::new(
        "closed_right",
        Unit::Share,
        Better::Neither,
        "the same with the gate closed, so that nothing of the sum reaches the decoder",
    ),
    Metric::new(
        "supervision",
        Unit::Nats,
        Better::Lower,
        "mean cross-entropy with the thoughts of the cycles before the last, through no gate",
    ),
    Metric::new("gate_mean", Unit::Share, Better::Neither, "how far the gate is open, from 0 to 1: the mean over rows"),
    Metric::new("gate_min", Unit::Share, Better::Neither, "the gate of the row where it is least open"),
    Metric::new("gate_max", Unit::Share, Better::Neither, "the gate of the row where it is most open"),
    Metric::new(
        "halt_sum",
        Unit::None,
        Better::Neither,
        "the halting probabilities of all cycles, added up: the number of cycles that are asked for",
    ),
    Metric::new("balance", Unit::None, Better::Lower, "how unevenly the experts are used, over all layers: top_k for each layer when even"),
    Metric::new("dropped", Unit::Share, Better::Lower, "of the tokens' choices of experts, over all layers, those that found no place"),
];

struct HrmLmModel {
    c: HrmLmConfig,
    learned: Learned,
    accumulate: usize,
}

impl HrmLmModel {
    /// Source and target lie in one row of ids.
    fn fed<'g>(&self, r: &'g Recorder, batch: usize) -> Fed<'g> {
        let HrmLmConfig { source, seq, .. } = self.c;
        let [ids, targets] = ["ids", "targets"].map(|name| r.feed(name, &[batch, source + seq], DType::I32));
        let [weight, gate_scale] = ["weight", GATE].map(|name| r.feed(name, &[1], DType::F32));
        let read = ids.slice(1, 0, source);
        Fed {
            source: if self.learned.is_padded() { Source::padded(read) } else { Source { ids: read, real: None } },
            tokens: ids.slice(1, source, source + seq),
            targets: targets.slice(1, source, source + seq),
            weight,
            gate_scale,
        }
    }
}

/// The feed of the gate's scale.
const GATE: &str = "gate_scale";

/// Of logits [.., time, vocab], the share of those rows with targets that count whose targets are all the most likely tokens: f32 `[1]`.
fn right<'g>(logits: Var<'g>, targets: Var<'g>) -> Var<'g> {
    let (r, shape) = (logits.recorder(), targets.shape());
    let answer = logits.reshape(&[logits.meta().rows(), logits.dim(0)]).top_k(1).reshape(&shape);
    let number = targets.cast(DType::F32);
    let counts = r.full(&[1, 1], -0.5).less(number);
    let wrong = pointwise(&[counts, answer.cast(DType::F32), number], |e, x| {
        let (hit, zero) = (e.bin(Bin::Eq, x[1], x[2]), e.c(0.0));
        e.select(hit, zero, x[0])
    });
    let half = r.full(&[1, 1], 0.5);
    let (asked, failed) = (half.less(counts.sum_axis(1)), half.less(wrong.sum_axis(1)));
    (asked.sum() - failed.sum()) / asked.sum()
}

impl Model for HrmLmModel {
    fn seq(&self) -> usize {
        self.c.source + self.c.seq
    }

    fn prompt(&self) -> usize {
        self.c.source
    }

    fn scalars(&self, step: Option<u64>) -> Vec<(&'static str, f32)> {
        // Evaluated is what the run works towards.
        vec![(
            GATE,
            step.map_or(engine::mutant!("gate-of-an-evaluation-fully-open", self.c.gate_scale as f32, 1.0), |step| self.c.gate_at(step)),
        )]
    }

    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Losses<'g> {
        let m = HrmLm { c: &self.c, r, all_placed: false };
        let j = m.judge(&self.fed(r, batch), self.accumulate);
        let share = 1.0 / self.accumulate as f32;
        let [mean, least, most] = spread(j.gate).map(|v| v * share);
        let some = [
            Some(("loss", j.loss)),
            Some(("cross_entropy", j.cross_entropy)),
            j.supervision.map(|v| ("supervision", v)),
            Some(("gate_mean", mean)),
            Some(("gate_min", least)),
            Some(("gate_max", most)),
            j.halt_sum.map(|v| ("halt_sum", v)),
            j.balance.map(|v| ("balance", v)),
            j.dropped.map(|v| ("dropped", v)),
        ];
        some.into_iter().flatten().collect()
    }

    fn evaluate<'g>(&self, r: &'g Recorder, batch: usize) -> Losses<'g> {
        let m = HrmLm { c: &self.c, r, all_placed: true };
        let f = self.fed(r, batch);
        let thought = m.think(f.source);
        let last = thought.thoughts[self.c.cycles - 1];
        let gate = m.gate(&thought, f.gate_scale);
        let closed = m.gate(&thought, r.typed(|| f.gate_scale * 0.0));
        let hidden = m.decode(f.tokens, &[m.memory(last, Some(gate)), m.memory(last, Some(closed))]);
        let [open, closed] = [0, 1].map(|i| hidden.slice(1, i, i + 1));
        let ce = m.cross_entropy(open, f.targets, f.weight);
        let mut all = vec![("loss", ce), ("cross_entropy", ce), ("closed_cross_entropy", m.cross_entropy(closed, f.targets, f.weight))];
        if self.learned.has_answers() {
            all.extend([("right", open), ("closed_right", closed)].map(|(name, h)| (name, right(m.logits(h), f.targets))));
        }
        let [mean, least, most] = spread(gate);
        all.extend([("gate_mean", mean), ("gate_min", least), ("gate_max", most)]);
        all.extend(r.typed(|| thought.halt_sum().map(|sum| ("halt_sum", sum.mean()))));
        all
    }

    fn metrics(&self) -> &'static [Metric] {
        METRICS
    }

    fn source(&self, train: bool) -> Result<Arc<dyn Items>, TrainError> {
        if let Some(found) = self.learned.describe()?.filter(|_| train) {
            say!("{found}");
        }
        self.learned.source(if train { Split::Train } else { Split::Val })
    }

    fn without_validation(&self) -> Result<Option<String>, TrainError> {
        self.learned.without_validation()
    }

    fn makes_own_rows(&self) -> bool {
        self.learned.makes_own_rows()
    }

    fn epoch(&self) -> Option<u64> {
        self.learned.epoch()
    }

    fn paths(&self) -> &'static [(&'static str, &'static str)] {
        SourceTarget::PATHS
    }

    fn vocab(&self) -> usize {
        self.c.vocab
    }

    /// Some prompts of the validation data, and what the model replies; beside the replies with the gate closed.
    fn show(&self, s: &mut Session) -> Result<Option<String>, TrainError> {
        let prompts = self.learned.samples(4)?;
        if prompts.is_empty() {
            return Ok(None);
        }
        let learned = self.learned.clone();
        let mut replier = HrmLmReplier::new(HrmLmModel { c: self.c.clone(), learned, accumulate: 1 });
        let stop = replier.stop()?.into_iter().collect();
        let sampling = Sampling { temperature: 0.0, top_p: 1.0, seed: 0, max_tokens: self.c.seq.min(64), stop, stop_text: vec![] };
        let tokens: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.tokens.clone()).collect();
        replier.begin(s, tokens.len(), sampling.max_tokens)?;
        let mut replies = vec![];
        for open in [1.0, 0.0] {
            replier.open = open;
            replies.push(reply(&mut replier, s, &tokens, (0, &sampling), &mut |_, _| {})?);
        }
        let lines = prompts.iter().zip(&replies[0]).zip(&replies[1]);
        let lines: Vec<String> =
            lines.map(|((prompt, open), closed)| format!("{} {open}   (gate closed: {closed})", prompt.text)).collect();
        Ok(Some(lines.join("\n")))
    }

    fn identity(&self) -> Result<serde_json::Value, TrainError> {
        self.learned.identity()
    }

    fn kept(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        Ok(self.learned.kept())
    }
}
