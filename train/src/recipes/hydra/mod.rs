//! hydra: a language model with compressed convolutional attention and recursive routed MLPs.

mod generate;
mod model;

pub use model::{Cache, Hydra, HydraConfig};

use crate::checkpoint::Checkpoint;
use crate::config::{Config, DataConfig, Keys, Section, TrainConfig};
use crate::data::Source;
use crate::golden::{Golden, Steps, differentiated};
use crate::recipe::{
    Better, Computed, Feeds, Metric, Model, Reads, Recipe, Reference, Session, Supervised, Task, TextModel, TrainError, Unit, Writes,
};
use crate::sample::{Sampling, continue_tokens};
use crate::text::{self, Text};
use engine::{Data, Device, Recorder, Switches, Var};
use generate::HydraGenerator;
use std::sync::Arc;

pub struct HydraRecipe;

impl Recipe for HydraRecipe {
    fn name(&self) -> &'static str {
        "hydra"
    }

    fn about(&self) -> &'static str {
        "a language model: compressed convolutional attention, recursive routed MLPs"
    }

    fn metrics(&self) -> &'static [Metric] {
        METRICS
    }

    fn sections(&self) -> Vec<Keys> {
        vec![HydraConfig::keys("model"), DataConfig::keys("data"), TrainConfig::keys("train").without(&["epochs"])]
    }

    fn presets(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("tiny", include_str!("../../../configs/hydra-tiny.toml")),
            ("small", include_str!("../../../configs/hydra-small.toml")),
            ("100m", include_str!("../../../configs/hydra-100m.toml")),
        ]
    }

    fn sized(&self, config: &Config) -> Result<Config, TrainError> {
        text::sized(config)
    }

    fn task(&self, config: &Config) -> Result<Box<dyn Task>, TrainError> {
        let config = &self.sized(config)?;
        let model: HydraConfig = config.section("model")?;
        model.check()?;
        let data: DataConfig = config.section("data")?;
        let train: TrainConfig = config.section("train")?;
        train.check()?;
        model.check_batch(train.batch)?;
        let text = Text::new(data, model.vocab, model.seq, config.seed());
        text.tokenizer()?;
        let model = HydraModel { accumulate: train.accumulate, c: model, text };
        Ok(Box::new(Supervised::new(model, train, config.seed())))
    }

    fn reads(&self) -> &'static [Reads] {
        &[Reads::Text]
    }

    fn writes(&self) -> Option<&dyn Writes> {
        Some(self)
    }

    fn reference(&self) -> Option<&dyn Reference> {
        Some(self)
    }
}

impl Writes for HydraRecipe {
    fn text_model(&self, config: &Config, found: Option<&Checkpoint>) -> Result<TextModel, TrainError> {
        let config = &self.sized(config)?;
        let c: HydraConfig = config.section("model")?;
        c.check()?;
        let text = Text::new(config.section("data")?, c.vocab, c.seq, config.seed());
        found.map(|found| text.take_tokenizer(found)).transpose()?;
        Ok(TextModel::Continues(Box::new(HydraGenerator::new(HydraModel { c, text, accumulate: 1 }))))
    }
}

impl Reference for HydraRecipe {
    fn file(&self) -> &'static [u8] {
        include_bytes!("../../../../reference/golden/hydra.safetensors")
    }

    fn compute(&self, file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
        golden(file, switches, device)
    }
}

const METRICS: &[Metric] = &[
    Metric::new(
        "loss",
        Unit::Nats,
        Better::Lower,
        "cross-entropy of the next token, in training with the routers' loss; in evaluation the routers do not look ahead",
    ),
    Metric::new("ce", Unit::Nats, Better::Lower, "cross-entropy of the next token, without the routers' loss"),
    Metric::perplexity("loss"),
    Metric::new("router", Unit::None, Better::Lower, "how badly the routers foresee which tokens are chosen"),
    Metric::new("top_k_loss", Unit::Nats, Better::Lower, "the loss with routers that rank a whole row, as in training"),
];

struct HydraModel {
    c: HydraConfig,
    text: Text,
    accumulate: usize,
}

impl Model for HydraModel {
    fn seq(&self) -> usize {
        self.c.seq
    }

    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let f = Feeds::new(r, batch, self.c.seq);
        let h = Hydra { c: &self.c, r };
        let (hidden, router) = h.hidden(f.ids);
        let ce = h.loss(hidden, f.targets, f.weight);
        // The router's loss is a mean over tokens: of a step's micro-batches each counts for its share.
        let router = router * (1.0 / self.accumulate as f32);
        vec![("loss", ce + router * self.c.router_weight as f32), ("ce", ce), ("router", router)]
    }

    fn evaluate<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let f = Feeds::new(r, batch, self.c.seq);
        let h = Hydra { c: &self.c, r };
        let honest = h.loss(h.causal_hidden(f.ids), f.targets, f.weight);
        let look_ahead = h.loss(h.hidden(f.ids).0, f.targets, f.weight);
        vec![("loss", honest), ("top_k_loss", look_ahead)]
    }

    fn metrics(&self) -> &'static [Metric] {
        METRICS
    }

    fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError> {
        self.text.source(train)
    }

    fn without_validation(&self) -> Result<Option<String>, TrainError> {
        self.text.without_validation()
    }

    fn makes_own_rows(&self) -> bool {
        self.text.counts_all()
    }

    fn vocab(&self) -> usize {
        self.c.vocab
    }

    fn floor(&self) -> Option<(&'static str, f64)> {
        let floor = self.source(true).ok()?.entropy_floor()?;
        Some(("entropy of the data", floor))
    }

    fn identity(&self) -> Result<serde_json::Value, TrainError> {
        self.text.identity()
    }

    fn show(&self, s: &mut Session) -> Result<Option<String>, TrainError> {
        let mut g = HydraGenerator::new(HydraModel { c: self.c.clone(), text: self.text.clone(), accumulate: self.accumulate });
        // The first tokens of the validation data, where there are any, continued.
        let begin = self.source(self.without_validation()?.is_some())?.item(0)?.ids;
        let prompt: Vec<u32> = begin.iter().take(8).map(|&t| t as u32).collect();
        let mut text = self.text.tokenizer()?.decode(&prompt);
        let sampling = Sampling { temperature: 0.8, top_p: 0.95, seed: self.text.seed, max_tokens: 240, stop: vec![], stop_text: vec![] };
        continue_tokens(&mut g, s, &prompt, &sampling, &mut |piece| text.push_str(piece))?;
        Ok(Some(text))
    }

    fn kept(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        self.text.kept()
    }
}

fn golden(file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
    let bad = |m: &str| TrainError::Other(format!("this golden file {m}"));
    let c = HydraConfig::from_json("model", &file.config).map_err(|e| bad(&format!("has a config that hydra does not know: {e}")))?;
    c.check()?;
    let shape = file.shape("input/ids").filter(|s| s.len() == 2).ok_or_else(|| bad("has no input/ids [batch, seq]"))?;
    let (batch, seq) = (shape[0], shape[1]);
    let (ids, targets) = (file.i32("input/ids"), file.i32("input/targets"));
    let (Some(ids), Some(targets)) = (ids, targets) else { return Err(bad("has no whole numbers as input/ids and input/targets")) };
    let inside = |v: &i32, low: i32| *v >= low && (*v as i64) < c.vocab as i64;
    if ids.len() != targets.len() || !ids.iter().all(|v| inside(v, 0)) || !targets.iter().all(|v| inside(v, -1)) {
        return Err(bad("has ids or targets that do not fit its config"));
    }
    let c = HydraConfig { seq, ..c };
    let counted = targets.iter().filter(|t| **t >= 0).count();
    if counted == 0 {
        return Err(TrainError::AllMasked(0));
    }
    let data = DataConfig::default();
    let model = HydraModel { c: c.clone(), text: Text::new(data, c.vocab, seq, 0), accumulate: 1 };
    let weight = [1.0 / counted as f32];
    let feeds = [("ids", Data::I32(&ids)), ("targets", Data::I32(&targets)), ("weight", Data::F32(&weight)), ("rng", Data::I32(&[0; 4]))];
    fn outputs<'g>(c: &HydraConfig, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let (h, f) = (Hydra { c, r }, Feeds::new(r, batch, c.seq));
        vec![("hidden", h.hidden(f.ids).0), ("causal_loss", h.loss(h.causal_hidden(f.ids), f.targets, f.weight))]
    }
    let steps = Steps {
        losses: &|r| model.loss(r, batch),
        outputs: &|r| outputs(&c, r, batch),
        feeds: &feeds,
        frozen: &[],
        called: &str::to_string,
    };
    differentiated(file, switches, device, &steps)
}
