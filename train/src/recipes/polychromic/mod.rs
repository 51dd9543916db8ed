//! polychromic: adapters on a frozen decoder, trained to answer well and in different ways: supervised by replies, and by the policy gradient towards
//! sets of replies that differ.

mod chat;
mod data;
mod export;
mod golden;
mod model;
mod policy;
mod pretrain;
mod writer;

pub use chat::{Chat, Talk};
pub use data::{Lessons, RepliesConfig};
pub use export::export;
pub use model::{Base, Decoder, Places, Replies, Rows};
pub use policy::{Policy, Polychromic, Survey, Writing};
pub use writer::{Writer, Written};

use crate::checkpoint::Checkpoint;
use crate::config::{Config, ConfigError, TrainConfig, WEIGHT, within};
use crate::data::{Source, Split};
use crate::golden::Golden;
use crate::models::{Adapter, Folder, Lora, Shape, Target};
use crate::recipe::{Computed, Feeds, Model, Recipe, Session, Task, TrainError};
use crate::say;
use engine::{Device, Recorder, Switches, Var};
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolychromicConfig {
    /// A model's folder; empty: a model in the shape that follows.
    pub base: String,
    /// Steps in which that model learns generated questions first; 0: it stays as it was drawn at random.
    pub pretrain: u64,
    /// Of the base's matrices: 16 (or what the base has), or 4 (NF4).
    pub bits: u32,
    pub vocab: usize,
    pub dim: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub hidden: usize,
    pub tied: bool,
    pub qk_norm: bool,
    pub rope_theta: f64,
    pub norm_eps: f64,
    /// Tokens of a row.
    pub seq: usize,
    pub rank: usize,
    pub alpha: f64,
    pub dropout: f64,
    pub targets: Vec<Target>,
}

impl PolychromicConfig {
    /// The shape that the config names.
    pub fn shape(&self) -> Shape {
        Shape {
            vocab: self.vocab,
            dim: self.dim,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            hidden: self.hidden,
            tied: self.tied,
            qk_norm: self.qk_norm,
            rope_theta: self.rope_theta,
            rope_scaling: crate::models::RopeScaling::None,
            norm_eps: self.norm_eps,
            context: self.seq,
        }
    }

    pub fn lora(&self) -> Lora {
        let mut targets = self.targets.clone();
        targets.sort(); // their order means nothing
        Lora { rank: self.rank, alpha: self.alpha, dropout: self.dropout, targets }
    }

    pub fn check(&self) -> Result<(), ConfigError> {
        let bad = |m: String| ConfigError::Invalid(format!("model.{m}"));
        self.shape().check().map_err(bad)?;
        self.lora().check().map_err(bad)?;
        const MOST: u64 = 1_000_000_000;
        if self.pretrain > MOST {
            return Err(bad(format!("pretrain = {}: from 0 to {MOST} steps", self.pretrain)));
        }
        match self.bits {
            16 => {}
            4 if self.base.is_empty() && self.pretrain == 0 => {
                return Err(bad("bits = 4: a base that is drawn at random is not kept in four bits; name model.base".into()));
            }
            4 => {}
            bits => return Err(bad(format!("bits = {bits}: 16, or 4"))),
        }
        match self.seq {
            1..=0x10_0000 => Ok(()),
            seq => Err(bad(format!("seq = {seq}: from 1 to {}", 1 << 20))),
        }
    }
}

/// How replies are sampled, and what their diversity counts.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Objective {
    /// Of the policy gradient's loss beside the supervised one.
    pub weight: f64,
    /// Steps from one set of replies to the next.
    pub every: u64,
    pub prompts: usize,
    /// To each prompt.
    pub replies: usize,
    pub new_tokens: usize,
    /// Of a row with a prompt at its end; 0: as many as the longest prompt has.
    pub prompt_tokens: usize,
    pub temperature: f64,
    pub top_p: f64,
    pub baseline_decay: f64,
    /// A folder of sentence-transformers' that embeds replies; empty: the base's own mean hidden state.
    pub encoder: String,
    /// Prompts that evaluation has replies written to; 0: it writes none.
    pub eval_prompts: u64,
    /// Where those are written, a line of JSON a set, with the distance of each pair; empty: nowhere.
    pub eval_file: String,
}

impl Objective {
    fn check(&self) -> Result<(), ConfigError> {
        let bad = |m: String| Err(ConfigError::Invalid(format!("objective.{m}")));
        let counts = [("every", self.every), ("prompts", self.prompts as u64), ("new_tokens", self.new_tokens as u64)];
        if let Some((name, n)) = counts.iter().find(|(_, n)| !(1..=1 << 16).contains(n)) {
            return bad(format!("{name} = {n}: from 1 to {}", 1 << 16));
        }
        if self.prompt_tokens > 1 << 16 {
            return bad(format!("prompt_tokens = {}: 0, or up to {}", self.prompt_tokens, 1 << 16));
        }
        if self.eval_prompts > 1 << 32 {
            return bad(format!("eval_prompts = {}: from 0 to {}", self.eval_prompts, 1u64 << 32));
        }
        within("objective.weight", self.weight, WEIGHT)?;
        within("objective.temperature", self.temperature, 1e-6..=1e6)?;
        within("objective.top_p", self.top_p, 1e-30..=1.0)?;
        within("objective.baseline_decay", self.baseline_decay, 0.0..=1.0)?;
        match self {
            o if !(2..=1 << 12).contains(&o.replies) => bad(format!("replies = {}: from 2 to {}, or nothing differs", o.replies, 1 << 12)),
            _ => Ok(()),
        }
    }

    /// Whether anything is ever written.
    fn writes(&self) -> bool {
        self.weight > 0.0 || self.eval_prompts > 0
    }
}

/// A base and the adapters on it, as a config names them.
pub struct Adapted {
    pub shape: Shape,
    pub lora: Lora,
    /// Where the base is read from; none where it is drawn at random, or not trained yet.
    pub folder: Option<Arc<Folder>>,
    pub base: Base,
}

/// What a base that is not trained yet has for a fingerprint.
const AWAITED: &str = "not trained yet (kiln train polychromic does it first)";

impl Adapted {
    pub fn new(c: &PolychromicConfig) -> Result<Adapted, TrainError> {
        c.check()?;
        let folder = match c.base.as_str() {
            "" if c.pretrain > 0 => Some(pretrain::path(c)).filter(|path| path.exists()).map(|path| Folder::open(&path)).transpose()?,
            "" => None,
            path => Some(Folder::open(Path::new(path))?),
        };
        let folder = folder.map(Arc::new);
        let shape = folder.as_ref().map_or_else(|| c.shape(), |f| f.shape.clone());
        if c.seq > shape.context {
            return Err(ConfigError::Invalid(format!("model.seq = {}: the base has {} positions", c.seq, shape.context)).into());
        }
        let base = match (c.bits, &folder) {
            (4, _) => Base::Quantised,
            (_, Some(_)) => Base::Loaded,
            (_, None) => Base::Drawn,
        };
        Ok(Adapted { shape, lora: c.lora(), folder, base })
    }

    /// Fills the base's states.
    fn load(&self, s: &mut Session) -> Result<(), TrainError> {
        Ok(self.base.load(self.folder.as_deref(), &mut s.store)?)
    }

    pub fn decoder<'a, 'g>(&'a self, r: &'g Recorder, rng: Option<Var<'g>>) -> Decoder<'a, 'g> {
        Decoder { shape: &self.shape, lora: Some(&self.lora), base: self.base, r, rng }
    }

    /// Whether a checkpoint's adapters were trained on this base.
    fn is_base_of(&self, found: &Checkpoint) -> Result<(), TrainError> {
        let (theirs, path) = (&found.meta["identity"]["base"], found.path.display());
        match &self.folder {
            Some(folder) if *theirs != format!("{:016x}", folder.fingerprint()?) => {
                Err(TrainError::Other(format!("{} is not the base that {path} was trained on: it has changed", folder.path.display())))
            }
            None if !theirs.is_null() => Err(TrainError::Other(format!("the base of {path} is not in the cache any more"))),
            _ => Ok(()),
        }
    }

    /// Takes an adapter in PEFT's layout; it must be what the config makes.
    fn take(&self, s: &mut Session, path: &Path) -> Result<(), TrainError> {
        let adapter = Adapter::open(path, &self.shape)?;
        let (theirs, ours) = (&adapter.lora, &self.lora);
        let names = |l: &Lora| format!("[{}]", l.targets.iter().map(|t| format!("\"{}\"", t.name())).collect::<Vec<_>>().join(", "));
        let pairs = [
            ("rank", theirs.rank.to_string(), ours.rank.to_string()),
            ("alpha", theirs.alpha.to_string(), ours.alpha.to_string()),
            ("targets", names(theirs), names(ours)),
        ];
        if let Some((key, theirs, ours)) = pairs.iter().find(|(_, theirs, ours)| theirs != ours) {
            return Err(TrainError::Other(format!(
                "the adapter {} has {key} = {theirs}, but model.{key} = {ours} (train with --set 'model.{key}={theirs}')",
                path.display()
            )));
        }
        Ok(adapter.load(&mut s.store)?)
    }
}

pub struct PolychromicRecipe;

impl Recipe for PolychromicRecipe {
    fn name(&self) -> &'static str {
        "polychromic"
    }

    fn about(&self) -> &'static str {
        "low-rank adapters on a frozen decoder (Qwen3, Llama)"
    }

    fn presets(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("tiny", include_str!("../../../configs/polychromic-tiny.toml")),
            ("qwen3-0.6b", include_str!("../../../configs/polychromic-qwen3-0.6b.toml")),
        ]
    }

    fn task(&self, config: &Config) -> Result<Box<dyn Task>, TrainError> {
        let c: PolychromicConfig = config.section("model")?;
        let model = Adapted::new(&c)?;
        let train: TrainConfig = config.section("train")?;
        train.check()?;
        let lessons = Lessons::new(config.section("data")?, &model, c.seq, config.seed())?;
        let mut identity = lessons.identity();
        match &model.folder {
            Some(folder) => identity["base"] = format!("{:016x}", folder.fingerprint()?).into(),
            None if c.pretrain > 0 => identity["base"] = AWAITED.into(),
            None => {}
        }
        let objective: Objective = config.section("objective")?;
        objective.check()?;
        let model = PolychromicModel { model, lessons, seq: c.seq, identity };
        Ok(Box::new(Polychromic::new(model, objective, train, config.seed())?))
    }

    fn make_ready(&self, config: &Config, device: &Device, stop: &AtomicBool) -> Result<(), TrainError> {
        let c: PolychromicConfig = config.section("model")?;
        c.check()?;
        match c.base.is_empty() && c.pretrain > 0 {
            true => pretrain::make(&c, device, stop),
            false => Ok(()),
        }
    }

    fn golden(&self, file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
        golden::steps(file, switches, device)
    }
}

pub struct PolychromicModel {
    model: Adapted,
    lessons: Lessons,
    seq: usize,
    identity: serde_json::Value,
}

impl PolychromicModel {
    fn record<'g>(&self, r: &'g Recorder, batch: usize, trains: bool) -> Vec<(&'static str, Var<'g>)> {
        let f = Feeds::new(r, batch, self.seq);
        let d = self.model.decoder(r, trains.then_some(f.rng));
        let places = self.has_places().then(|| Places::fed(r, batch, self.seq));
        vec![("loss", d.loss(d.hidden(f.ids, places), f.targets, f.weight))]
    }
}

impl Model for PolychromicModel {
    fn seq(&self) -> usize {
        self.seq
    }

    fn has_places(&self) -> bool {
        self.lessons.has_places()
    }

    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        self.record(r, batch, true)
    }

    fn evaluate<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        self.record(r, batch, false)
    }

    fn prepare(&self, s: &mut Session) -> Result<(), TrainError> {
        self.model.load(s)
    }

    fn init_from(&self, s: &mut Session, from: &Path) -> Result<bool, TrainError> {
        let is_adapter = from.join("adapter_config.json").exists();
        if is_adapter {
            self.model.take(s, from)?;
        }
        Ok(is_adapter)
    }

    fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError> {
        if train {
            say!("{}", self.lessons.describe()?);
        }
        self.lessons.source(if train { Split::Train } else { Split::Val })
    }

    fn epoch(&self) -> Option<u64> {
        self.lessons.epoch()
    }

    fn vocab(&self) -> usize {
        self.model.shape.vocab
    }

    fn floor(&self) -> Option<(&'static str, f64)> {
        Some(("entropy of the data", self.lessons.floor()?))
    }

    fn identity(&self) -> serde_json::Value {
        self.identity.clone()
    }

    fn kept(&self) -> Vec<(&'static str, Vec<u8>)> {
        self.lessons.kept()
    }
}
