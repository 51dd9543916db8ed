//! polychromic: adapters on a frozen decoder, trained to answer well and in different ways: supervised by replies, and by the policy gradient towards
//! sets of replies that differ.

mod golden;
mod policy;
mod replies;

pub use policy::{Policy, Polychromic};
pub use replies::Replies;

use crate::checkpoint::Checkpoint;
use crate::config::{Config, ConfigError, Keys, NORM_EPS, ROPE_THETA, Section, TrainConfig, WEIGHT};
use crate::data::replies::Quiz;
use crate::golden::Golden;
use crate::models::decoder::{Adapted, Chat, DecoderModel, Lessons, Pretraining, RepliesConfig, Writer, Writing, export, tuning};
use crate::models::{Family, Folder, Lora, Shape, Target};
use crate::recipe::{
    Computed, Exporting, Exports, Metric, Reads, Recipe, Reference, Survey, Surveys, Task, TextModel, TrainError, Tuning, Writes,
};
use crate::section;
use engine::ops::sample::Nucleus;
use engine::{Device, Switches};
use std::path::Path;
use std::sync::atomic::AtomicBool;

section! {
    /// The base and the adapters on it. The keys from `vocab` to `norm_eps` are the shape of a base that is trained or drawn here; a folder in `base` brings
    /// its own.
    pub struct PolychromicConfig {
        /// A model's folder in Hugging Face's layout (Qwen3, Llama). Empty: a base in the shape that follows.
        pub base: String = String::new(), [path];
        /// Where `base` is empty: steps in which the base is first trained on generated questions. 0: it keeps its random initial weights.
        pub pretrain: u64 = 600, in 0..=1_000_000_000;
        /// Bits of the base's matrices: 16 (or what the base has), or 4 (NF4).
        pub bits: u32 = 16, in [16, 4];
        /// Tokens of the vocabulary. From the data: those of the base; without one, those of the data's tokenizer, rounded up to a multiple of 64.
        pub vocab: usize = 0, in 1..=1 << 22, [data base];
        /// Width of the residual stream.
        pub dim: usize = 128, in 1..=1 << 20, [base];
        /// Layers of the decoder.
        pub layers: usize = 4, in 1..=1024, [base];
        /// Attention heads.
        pub heads: usize = 4, in 1..=1 << 12, [base];
        /// Heads of keys and values, each shared by heads / kv_heads queries (GQA).
        pub kv_heads: usize = 2, in 1..=1 << 12, [base];
        /// Size of a head.
        pub head_dim: usize = 32, in 1..=1 << 10, [base];
        /// Width of the SwiGLU MLP.
        pub hidden: usize = 384, in 1..=1 << 20, [base];
        /// Whether the output head shares the embedding's weights.
        pub tied: bool = true, [base];
        /// Whether queries and keys have an RMS norm, as in Qwen3.
        pub qk_norm: bool = true, [base];
        /// Base of RoPE's frequencies.
        pub rope_theta: f64 = 10000.0, in ROPE_THETA, [base];
        /// What RMS norms add to the mean square.
        pub norm_eps: f64 = 1e-6, in NORM_EPS, [base];
        /// Tokens of a row.
        pub seq: usize = 128, in 1..=1 << 20;
        /// Rank of the adapters (LoRA).
        pub rank: usize = 16, in 1..=4096;
        /// Adapters are scaled by alpha / rank.
        pub alpha: f64 = 16.0, in -1e6..=1e6;
        /// Dropout of the adapters' input while training.
        pub dropout: f64 = 0.0, in 0.0..1.0;
        /// The matrices of every layer that get an adapter.
        pub targets: Vec<Target> = Target::ALL.to_vec();
    }
}

impl PolychromicConfig {
    /// The shape that the config names.
    pub fn shape(&self) -> Shape {
        Shape {
            family: Family::with_qk_norm(self.qk_norm),
            vocab: self.vocab,
            dim: self.dim,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            hidden: self.hidden,
            tied: self.tied,
            window: None,
            rope_theta: self.rope_theta,
            rope_scaling: crate::models::RopeScaling::None,
            norm_eps: self.norm_eps,
            context: self.seq,
            scan: None,
        }
    }

    pub fn lora(&self) -> Lora {
        let mut targets = self.targets.clone();
        targets.sort(); // their order means nothing
        Lora { rank: self.rank, alpha: self.alpha, dropout: self.dropout, targets }
    }

    /// The base that is trained first, where none is named.
    fn pretraining(&self) -> Option<Pretraining> {
        (self.base.is_empty() && self.pretrain > 0).then(|| Pretraining { shape: self.shape(), seq: self.seq, steps: self.pretrain })
    }

    /// The base and its adapters.
    pub fn adapted(&self) -> Result<Adapted, TrainError> {
        self.check()?;
        let folder = match (self.base.as_str(), self.pretraining()) {
            ("", Some(own)) => own.found()?.map(|path| Folder::open(&path)).transpose()?,
            ("", None) => None,
            (path, _) => Some(Folder::open(Path::new(path))?),
        };
        Adapted::new(folder, self.shape(), Some(self.lora()), self.bits == 4, self.seq)
    }

    pub fn check(&self) -> Result<(), ConfigError> {
        self.in_range("model")?;
        let bad = |m: String| ConfigError::Invalid(format!("model.{m}"));
        self.shape().check().map_err(bad)?;
        self.lora().check().map_err(bad)?;
        match self.bits {
            4 if self.base.is_empty() && self.pretrain == 0 => {
                Err(bad("bits = 4: a base that is drawn at random is not kept in four bits; name model.base".into()))
            }
            _ => Ok(()),
        }
    }
}

section! {
    /// The policy gradient towards replies that differ: how they are sampled, and what their diversity counts.
    pub struct Objective {
        /// Weight of the policy gradient's loss, added to the supervised one. 0: supervised alone.
        pub weight: f64 = 0.3, in WEIGHT;
        /// Steps from one set of replies to the next.
        pub every: u64 = 5, in 1..=1 << 16;
        /// Prompts that are replied to at once.
        pub prompts: usize = 4, in 1..=1 << 16;
        /// Replies to each prompt; diversity is the mean distance of their pairs.
        pub replies: usize = 3, in 2..=1 << 12;
        /// Longest reply, in tokens.
        pub new_tokens: usize = 100, in 1..=1 << 16;
        /// Tokens of a row with a prompt at its end. 0: as many as the longest prompt has.
        pub prompt_tokens: usize = 0, in 0..=1 << 16;
        /// Sampling temperature.
        pub temperature: f64 = 0.9, in 1e-6..=1e6;
        /// Nucleus sampling: the probability that the most likely tokens have together.
        pub top_p: f64 = 0.9, in 1e-30..=1.0;
        /// Decay of the moving baseline that rewards are compared with.
        pub baseline_decay: f64 = 0.9, in 0.0..=1.0;
        /// A folder of sentence-transformers' (MiniLM) that embeds replies. Empty: the base's own mean hidden state.
        pub encoder: String = String::new(), [path];
        /// Prompts to which evaluation writes replies. 0: it writes none.
        pub eval_prompts: u64 = 0, in 0..=1 << 32;
        /// Where those replies are written, a line of JSON a set, with the distance of each pair. Empty: nowhere.
        pub eval_file: String = String::new();
    }
}

impl Objective {
    fn check(&self) -> Result<(), ConfigError> {
        self.in_range("objective")
    }

    /// Writes replies of full length, without a stop token, to prompts of `prompt_tokens`.
    fn writer(&self) -> Writer {
        Writer {
            prompts: self.prompts,
            replies: self.replies,
            time: self.prompt_tokens,
            new_tokens: self.new_tokens,
            nucleus: Nucleus { temperature: self.temperature as f32, top_p: self.top_p as f32 },
            stop: None,
        }
    }

    /// Whether replies are ever written.
    fn writes(&self) -> bool {
        self.weight > 0.0 || self.eval_prompts > 0
    }
}

/// What a base that is not trained yet has for a fingerprint.
const AWAITED: &str = "not trained yet (kiln train polychromic does it first)";

pub struct PolychromicRecipe;

impl Recipe for PolychromicRecipe {
    fn name(&self) -> &'static str {
        "polychromic"
    }

    fn about(&self) -> &'static str {
        "low-rank adapters on a frozen decoder (Qwen3, Llama)"
    }

    fn metrics(&self) -> &'static [Metric] {
        policy::METRICS
    }

    fn sections(&self) -> Vec<Keys> {
        let (model, data) = (PolychromicConfig::keys("model"), RepliesConfig::keys("data"));
        vec![model, data, Objective::keys("objective"), TrainConfig::keys("train")]
    }

    fn presets(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("tiny", include_str!("../../../configs/polychromic-tiny.toml")),
            ("qwen3-0.6b", include_str!("../../../configs/polychromic-qwen3-0.6b.toml")),
        ]
    }

    fn sized(&self, config: &Config) -> Result<Config, TrainError> {
        let mut config = config.clone();
        Folder::settle(&mut config)?;
        config.size("model.vocab", |c| {
            // A base that is trained first learns the generated questions.
            let trained = c.section::<PolychromicConfig>("model")?.pretrain > 0;
            let asked = if trained { Quiz::get().tokenizer()?.vocab() } else { 0 };
            Ok::<_, TrainError>(c.section::<RepliesConfig>("data")?.tokenizer()?.vocab().max(asked).next_multiple_of(64))
        })?;
        Ok(config)
    }

    fn tuning(&self, config: &Config) -> Result<Option<Tuning>, TrainError> {
        tuning(config, true)
    }

    fn task(&self, config: &Config) -> Result<Box<dyn Task>, TrainError> {
        let config = &self.sized(config)?;
        let c: PolychromicConfig = config.section("model")?;
        let model = c.adapted()?;
        let train: TrainConfig = config.section("train")?;
        train.check()?;
        let lessons = Lessons::new(config.section("data")?, &model, c.seq, config.seed())?;
        let mut identity = lessons.identity()?;
        if model.folder.is_none() && c.pretrain > 0 {
            identity["base"] = AWAITED.into();
        }
        let objective: Objective = config.section("objective")?;
        objective.check()?;
        let model = DecoderModel { model, lessons, seq: c.seq, identity };
        Ok(Box::new(Polychromic::new(model, objective, train, config.seed())?))
    }

    fn make_ready(&self, config: &Config, device: &Device, stop: &AtomicBool) -> Result<(), TrainError> {
        let config = &self.sized(config)?;
        let c: PolychromicConfig = config.section("model")?;
        c.check()?;
        if c.base.is_empty() && c.pretrain == 0 {
            crate::warn!(
                "note: the base's weights are drawn at random, and adapters on them learn little (--base FOLDER, or model.pretrain steps)"
            );
        }
        let Some(own) = c.pretraining() else { return Ok(()) };
        // A base takes minutes to train: data that cannot be read is found before.
        config.section::<RepliesConfig>("data")?.check()?;
        own.make(device, stop)
    }

    fn economies(&self, config: &Config) -> Vec<Vec<String>> {
        let c = config.section::<PolychromicConfig>("model").ok().filter(|c| c.bits == 16 && !c.base.is_empty());
        c.map(|_| vec!["model.bits=4".to_string()]).into_iter().collect()
    }

    fn reads(&self) -> &'static [Reads] {
        &[Reads::Replies, Reads::Text]
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

impl Writes for PolychromicRecipe {
    fn text_model(&self, config: &Config, found: Option<&Checkpoint>) -> Result<TextModel, TrainError> {
        let config = &self.sized(config)?;
        let c: PolychromicConfig = config.section("model")?;
        Ok(TextModel::Replies(Box::new(Chat::of_run(found, c.adapted()?, config.section("data")?, c.seq)?)))
    }
}

impl Surveys for PolychromicRecipe {
    fn ask(&self, config: &mut Config, survey: &Survey) -> Result<(), ConfigError> {
        config.set_value("objective.eval_prompts", (survey.prompts as i64).into())?;
        if let Some(n) = survey.replies {
            config.set_value("objective.replies", (n as i64).into())?;
        }
        survey.file.map_or(Ok(()), |path| config.set_value("objective.eval_file", path.display().to_string().into()))
    }

    /// In the numbers of the config's objective, to prompts of 64 tokens where that names none.
    fn writings(&self, config: &Config) -> Result<Vec<Writing>, TrainError> {
        let config = &self.sized(config)?;
        let (c, o): (PolychromicConfig, Objective) = (config.section("model")?, config.section("objective")?);
        o.check()?;
        let writer = Writer { time: if o.prompt_tokens == 0 { 64 } else { o.prompt_tokens }, ..o.writer() };
        [false, true].into_iter().map(|adapters| Ok(Writing::new(writer.clone(), c.adapted()?, adapters, config.seed()))).collect()
    }
}

impl Exports for PolychromicRecipe {
    fn export(&self, config: &Config, how: &Exporting) -> Result<(), TrainError> {
        let config = &self.sized(config)?;
        export(&config.section::<PolychromicConfig>("model")?.adapted()?, config, how)
    }
}

impl Reference for PolychromicRecipe {
    fn file(&self) -> &'static [u8] {
        include_bytes!("../../../../reference/golden/polychromic.safetensors")
    }

    fn compute(&self, file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
        golden::steps(file, switches, device)
    }
}
