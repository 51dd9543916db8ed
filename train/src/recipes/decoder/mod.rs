//! decoder: a plain decoder (GPT-2, Llama, Qwen, Mistral, Mamba-2), pretrained from nothing or fine-tuned from a folder, every weight or adapters.

mod golden;

use crate::checkpoint::Checkpoint;
use crate::config::{Config, ConfigError, Keys, NORM_EPS, ROPE_THETA, Section, TrainConfig, shown};
use crate::data::Tokenizer;
use crate::golden::Golden;
use crate::models::decoder::{Adapted, Chat, DecoderModel, Lessons, RepliesConfig, Writer, Writing, export, tuning};
use crate::models::{Family, Folder, Lora, Mixer, RopeScaling, ScanShape, Shape, Target};
use crate::recipe::{
    Computed, Exporting, Exports, Metric, Reads, Recipe, Reference, Supervised, Survey, Surveys, Task, TextModel, TrainError, Tuning,
    Writes,
};
use crate::{choices, section};
use engine::ops::sample::Nucleus;
use engine::{Device, Switches};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// What of the model is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trained {
    All,
    Lora,
}

choices!(Trained { All: "all", Lora: "lora" });

section! {
    /// The decoder. The keys from `family` to `norm_eps` are the shape of a model that is drawn at random; a folder in `base` brings its own.
    pub struct DecoderConfig {
        /// A model's folder in Hugging Face's layout (config.json, safetensors, tokenizer.json). Empty: a model drawn at random.
        pub base: String = String::new(), [path];
        /// Whether every weight is trained, or low-rank adapters on frozen weights.
        pub train: Trained = Trained::All;
        /// With lora: bits of the frozen matrices, 16 (or what the base has) or 4 (NF4).
        pub bits: u32 = 16, in [16, 4];
        /// The family: gpt2, llama, qwen2, qwen3, mistral or mamba2.
        pub family: String = "llama".into(), [base];
        /// Tokens of the vocabulary.
        pub vocab: usize = 0, in 1..=1 << 22, [data base];
        /// Width of the residual stream.
        pub dim: usize = 128, in 1..=1 << 20, [base];
        /// Layers of the decoder.
        pub layers: usize = 4, in 1..=1024, [base];
        /// Attention heads.
        pub heads: usize = 4, in 1..=1 << 12, [base];
        /// Mamba-2: width of the state's B and C.
        pub state: usize = 64, in 1..=1 << 12, [base];
        /// Mamba-2: groups of heads that share B and C.
        pub groups: usize = 1, in 1..=1 << 12, [base];
        /// Mamba-2: taps of the convolution.
        pub conv: usize = 4, in 2..=1 << 8, [base];
        /// Heads of keys and values, each shared by heads / kv_heads queries (GQA).
        pub kv_heads: usize = 4, in 1..=1 << 12, [base];
        /// Elements of a head.
        pub head_dim: usize = 32, in 1..=1 << 10, [base];
        /// Width of the MLP.
        pub hidden: usize = 384, in 1..=1 << 20, [base];
        /// Whether the head is the embedding.
        pub tied: bool = true, [base];
        /// Tokens that a token sees, itself among them (sliding window). 0: all before it.
        pub window: usize = 0, in 0..=1 << 24, [base];
        /// Base of RoPE's frequencies.
        pub rope_theta: f64 = 10000.0, in ROPE_THETA, [base];
        /// What norms add to the mean square.
        pub norm_eps: f64 = 1e-6, in NORM_EPS, [base];
        /// Tokens of a row.
        pub seq: usize = 128, in 1..=1 << 20;
        /// Rank of the adapters (LoRA).
        pub rank: usize = 16, in 1..=4096;
        /// Adapters are scaled by alpha / rank.
        pub alpha: f64 = 16.0, in -1e6..=1e6;
        /// Dropout of the adapters' input while training.
        pub dropout: f64 = 0.0, in 0.0..1.0;
        /// The matrices of every layer that have an adapter.
        pub targets: Vec<Target> = Target::ALL.to_vec();
    }
}

impl DecoderConfig {
    /// The shape that the config names.
    fn shape(&self) -> Result<Shape, ConfigError> {
        let bad = |m: String| ConfigError::Invalid(format!("model.{m}"));
        let family =
            Family::find(&self.family).ok_or_else(|| bad(format!("family = \"{}\": {} are known", self.family, Family::names())))?;
        if self.window > 0 && !family.windowed {
            return Err(bad(format!("window = {}: {} has none", self.window, family.name)));
        }
        let scans = family.mixer == Mixer::Mamba2;
        let shape = Shape {
            family,
            vocab: self.vocab,
            dim: self.dim,
            layers: self.layers,
            heads: self.heads,
            // As a folder of state-space layers is read: they have neither.
            kv_heads: if scans { self.heads } else { self.kv_heads },
            head_dim: self.head_dim,
            hidden: if scans { self.heads.saturating_mul(self.head_dim) } else { self.hidden },
            tied: self.tied,
            window: Some(self.window).filter(|w| *w > 0),
            rope_theta: self.rope_theta,
            rope_scaling: RopeScaling::None,
            norm_eps: self.norm_eps,
            // A state has no positions that could run out.
            context: if scans { family.context } else { self.seq },
            scan: scans.then_some(ScanShape { state: self.state, groups: self.groups, taps: self.conv }),
        };
        shape.check().map_err(bad)?;
        Ok(shape)
    }

    fn lora(&self) -> Option<Lora> {
        let mut targets = self.targets.clone();
        targets.sort(); // their order means nothing
        (self.train == Trained::Lora).then_some(Lora { rank: self.rank, alpha: self.alpha, dropout: self.dropout, targets })
    }

    fn model(&self) -> Result<Adapted, TrainError> {
        let bad = |m: String| ConfigError::Invalid(format!("model.{m}"));
        self.in_range("model")?;
        self.lora().map_or(Ok(()), |l| l.check().map_err(bad))?;
        if self.bits == 4 && (self.train == Trained::All || self.base.is_empty()) {
            return Err(bad("bits = 4: only a base that is frozen is kept in four bits (model.base, model.train=lora)".into()).into());
        }
        let folder = if self.base.is_empty() { None } else { Some(Folder::open(Path::new(&self.base))?) };
        let shape = folder.as_ref().map_or_else(|| self.shape(), |f| Ok(f.shape.clone()))?;
        if let (Some(why), true) = (shape.family.without_adapters(), self.train == Trained::Lora) {
            let name = shape.family.name;
            let why = format!("train = \"lora\": {name} {why}, on which adapters are not known here");
            return Err(bad(why + " (train every weight: model.train=all)").into());
        }
        Adapted::new(folder, shape, self.lora(), self.bits == 4, self.seq)
    }
}

/// Refuses settings of adapters that someone asked for where there are none.
fn only_for_adapters(config: &Config, trained: Trained) -> Result<(), ConfigError> {
    let asked = ["rank", "alpha", "dropout", "targets"].iter().find_map(|key| Some((key, config.given("model", key)?)));
    match asked.filter(|_| trained == Trained::All) {
        Some((key, value)) => Err(ConfigError::Invalid(format!(
            "model.{key} = {}: it is for adapters, and every weight is trained (add model.train=lora, or remove model.{key})",
            shown(value)
        ))),
        None => Ok(()),
    }
}

/// Refuses settings of attention and the MLP that someone asked for in a family that has neither.
fn only_for_attention(config: &Config, c: &DecoderConfig) -> Result<(), ConfigError> {
    let without = Family::find(&c.family).filter(|f| f.mixer == Mixer::Mamba2 && c.base.is_empty());
    let asked = ["kv_heads", "hidden", "rope_theta"].iter().find_map(|key| Some((key, config.given("model", key)?)));
    match without.zip(asked) {
        Some((family, (key, value))) => Err(ConfigError::Invalid(format!(
            "model.{key} = {}: {} has none, since state-space layers stand in the place of attention and MLP (remove model.{key})",
            shown(value),
            family.name
        ))),
        None => Ok(()),
    }
}

/// Refuses settings of state-space layers that someone asked for in a family that has none.
fn only_for_scans(config: &Config, c: &DecoderConfig) -> Result<(), ConfigError> {
    let without = Family::find(&c.family).filter(|f| f.mixer != Mixer::Mamba2);
    let asked = ["state", "groups", "conv"].iter().find_map(|key| Some((key, config.given("model", key)?)));
    match without.zip(asked) {
        Some((family, (key, value))) => Err(ConfigError::Invalid(format!(
            "model.{key} = {}: it is for state-space layers, and {} has none (add model.family=mamba2, or remove model.{key})",
            shown(value),
            family.name
        ))),
        None => Ok(()),
    }
}

pub struct DecoderRecipe;

impl Recipe for DecoderRecipe {
    fn name(&self) -> &'static str {
        "decoder"
    }

    fn about(&self) -> &'static str {
        "a plain decoder (GPT-2, Llama, Qwen, Mistral, Mamba-2), from nothing or from a folder, every weight or adapters"
    }

    fn metrics(&self) -> &'static [Metric] {
        Metric::TEXT
    }

    fn sections(&self) -> Vec<Keys> {
        vec![DecoderConfig::keys("model"), RepliesConfig::keys("data"), TrainConfig::keys("train")]
    }

    fn presets(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("tiny", include_str!("../../../configs/decoder-tiny.toml")),
            ("gpt2-124m", include_str!("../../../configs/decoder-gpt2-124m.toml")),
            ("qwen2.5-0.5b", include_str!("../../../configs/decoder-qwen2.5-0.5b.toml")),
            ("qwen2.5-1.5b", include_str!("../../../configs/decoder-qwen2.5-1.5b.toml")),
            ("qwen2.5-7b", include_str!("../../../configs/decoder-qwen2.5-7b.toml")),
            ("qwen3-0.6b", include_str!("../../../configs/decoder-qwen3-0.6b.toml")),
        ]
    }

    fn sized(&self, config: &Config) -> Result<Config, TrainError> {
        let mut config = config.clone();
        Folder::settle(&mut config)?;
        config.size("model.vocab", |c| {
            let data: RepliesConfig = c.section("data")?;
            Ok::<_, TrainError>(if data.path.is_empty() { Tokenizer::Byte.vocab() } else { data.tokenizer()?.vocab() })
        })?;
        Ok(config)
    }

    fn tuning(&self, config: &Config) -> Result<Option<Tuning>, TrainError> {
        tuning(config, config.section::<DecoderConfig>("model")?.train == Trained::Lora)
    }

    fn make_ready(&self, config: &Config, _: &Device, _: &AtomicBool) -> Result<(), TrainError> {
        let c: DecoderConfig = config.section("model")?;
        let joint = Family::find(&c.family).is_some_and(|f| f.without_adapters().is_some());
        Lessons::check_data(&config.section("data")?, &c.base)?;
        match c.train == Trained::Lora && c.base.is_empty() && !joint {
            true => Err(ConfigError::Invalid(
                "model.train = \"lora\": without model.base there is nothing that adapters could adapt, since the weights below them are random (name a model's folder with --base, or train every weight: model.train=all)".into(),
            )
            .into()),
            false => Ok(()),
        }
    }

    fn task(&self, config: &Config) -> Result<Box<dyn Task>, TrainError> {
        let config = &self.sized(config)?;
        let c: DecoderConfig = config.section("model")?;
        only_for_adapters(config, c.train)?;
        only_for_attention(config, &c)?;
        only_for_scans(config, &c)?;
        let model = c.model()?;
        let train: TrainConfig = config.section("train")?;
        train.check()?;
        let lessons = Lessons::of_text(config.section("data")?, &model, c.seq, config.seed())?;
        let identity = lessons.identity()?;
        let model = DecoderModel { model, lessons, seq: c.seq, identity };
        Ok(Box::new(Supervised::new(model, train, config.seed())))
    }

    fn economies(&self, config: &Config) -> Vec<Vec<String>> {
        let Ok(c) = config.section::<DecoderConfig>("model") else { return vec![] };
        let (lora, nf4) = ("model.train=lora".to_string(), "model.bits=4".to_string());
        // Adapters are for a model that is trained already.
        if c.base.is_empty() {
            return vec![];
        }
        let mut all = vec![];
        all.extend((c.train == Trained::All).then(|| vec![lora.clone()]));
        all.extend((c.bits == 16).then(|| vec![lora, nf4]));
        all
    }

    fn reads(&self) -> &'static [Reads] {
        &[Reads::Text, Reads::Replies]
    }

    fn writes(&self) -> Option<&dyn Writes> {
        Some(self)
    }

    fn surveys(&self) -> Option<&dyn Surveys> {
        Some(self)
    }

    fn exports(&self) -> Option<&dyn Exports> {
        Some(self)
    }

    fn reference(&self) -> Option<&dyn Reference> {
        Some(self)
    }
}

impl Writes for DecoderRecipe {
    fn text_model(&self, config: &Config, found: Option<&Checkpoint>) -> Result<TextModel, TrainError> {
        let c: DecoderConfig = self.sized(config)?.section("model")?;
        Ok(TextModel::Replies(Box::new(Chat::of_run(found, c.model()?, config.section("data")?, c.seq)?)))
    }
}

impl Surveys for DecoderRecipe {
    fn ask(&self, _: &mut Config, _: &Survey) -> Result<(), ConfigError> {
        Err(ConfigError::Invalid("replies are not surveyed here (no --prompts): `kiln eval` gives the loss".into()))
    }

    /// 32 replies of 64 tokens to prompts of 64.
    fn writings(&self, config: &Config) -> Result<Vec<Writing>, TrainError> {
        let c: DecoderConfig = self.sized(config)?.section("model")?;
        let nucleus = Nucleus { temperature: 0.9, top_p: 0.9 };
        let writer = Writer { prompts: 32, replies: 1, time: 64, new_tokens: 64, nucleus, stop: None };
        Ok(vec![Writing::new(writer, c.model()?, true, config.seed())])
    }
}

impl Exports for DecoderRecipe {
    fn export(&self, config: &Config, how: &Exporting) -> Result<(), TrainError> {
        export(&self.sized(config)?.section::<DecoderConfig>("model")?.model()?, config, how)
    }
}

impl Reference for DecoderRecipe {
    fn file_name(&self, _: &'static str) -> &'static str {
        "decoder-qwen2"
    }

    fn file(&self) -> &'static [u8] {
        include_bytes!("../../../../reference/golden/decoder-qwen2.safetensors")
    }

    fn compute(&self, file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
        golden::steps(file, switches, device)
    }
}
