//! What a run learns: generated sums, or what `data.path` names.

use super::arithmetic::{LONGEST, Sums, sum};
use super::model::HrmLmConfig;
use crate::checkpoint::Checkpoint;
use crate::config::{Config, ConfigError, Section};
use crate::data::chats::Message;
use crate::data::replies::Prompt;
use crate::data::seq2seq::Frame;
use crate::data::{Source, Split, Tokenizer};
use crate::recipe::TrainError;
use crate::source_target::{Asked, SourceTarget, SourceTargetConfig};
use serde_json::{Value, json};
use std::sync::Arc;

/// The config with the vocabulary of the data's tokenizer, where it names none.
pub fn sized(config: &Config) -> Result<Config, TrainError> {
    let mut config = config.clone();
    config.size("model.vocab", |c| Ok::<_, TrainError>(c.section::<SourceTargetConfig>("data")?.tokenizer()?.vocab()))?;
    Ok(config)
}

#[derive(Clone)]
pub struct Learned {
    kind: Kind,
    frame: Frame,
    seed: u64,
}

#[derive(Clone)]
enum Kind {
    /// Bytes.
    Sums,
    Data(Arc<SourceTarget>),
    /// Of a model that only writes: how it is asked.
    Asked(Arc<Asked>),
    /// None was named for a vocabulary that is not the sums': such a model can be planned and timed, which takes made-up tokens.
    Missing,
}

impl Learned {
    pub fn new(config: &Config, c: &HrmLmConfig) -> Result<Learned, TrainError> {
        let data: SourceTargetConfig = config.section("data")?;
        data.in_range("data")?;
        if data.path.is_empty() {
            return Learned::generated(config, c);
        }
        let data = SourceTarget::new(data, c.vocab, (c.source, c.seq), config.seed())?;
        Ok(Learned::of(Kind::Data(Arc::new(data)), config, c))
    }

    fn of(kind: Kind, config: &Config, c: &HrmLmConfig) -> Learned {
        Learned { kind, frame: Frame { source: c.source, seq: c.seq, begin: None, ignore: vec![] }, seed: config.seed() }
    }

    fn generated(config: &Config, c: &HrmLmConfig) -> Result<Learned, TrainError> {
        if c.vocab != Tokenizer::Byte.vocab() {
            return Ok(Learned::of(Kind::Missing, config, c));
        }
        if c.source < LONGEST[0] || c.seq < LONGEST[1] {
            return Err(ConfigError::Invalid(format!(
                "model.source = {}, model.seq = {}: generated sums have up to {} tokens, and their answers {}",
                c.source, c.seq, LONGEST[0], LONGEST[1]
            ))
            .into());
        }
        Ok(Learned::of(Kind::Sums, config, c))
    }

    /// The same for a model that only writes, also where its data is not.
    pub fn to_write(config: &Config, c: &HrmLmConfig, found: Option<&Checkpoint>) -> Result<Learned, TrainError> {
        let data: SourceTargetConfig = config.section("data")?;
        match found.filter(|_| !data.path.is_empty()) {
            Some(found) => {
                let asked = Asked::of_run(&data, found, c.vocab, c.source)?;
                Ok(Learned::of(Kind::Asked(Arc::new(asked)), config, c))
            }
            None => Learned::new(config, c),
        }
    }

    /// How the model is asked; None for sums, whose text is their tokens.
    fn asked(&self) -> Option<&Asked> {
        match &self.kind {
            Kind::Sums | Kind::Missing => None,
            Kind::Data(data) => Some(data.asked()),
            Kind::Asked(asked) => Some(asked),
        }
    }

    fn missing() -> TrainError {
        TrainError::Other(
            "no data was given: name conversations, pairs of prompts and replies, or the folder that kiln data prepare made of a text, with --data (or leave \
             model.vocab at 0, and generated sums are learned)"
                .into(),
        )
    }

    fn data(&self) -> Result<Option<&SourceTarget>, TrainError> {
        match &self.kind {
            Kind::Data(data) => Ok(Some(data)),
            Kind::Sums => Ok(None),
            Kind::Asked(_) | Kind::Missing => Err(Learned::missing()),
        }
    }

    pub fn tokenizer(&self) -> Arc<Tokenizer> {
        self.asked().map_or(Arc::new(Tokenizer::Byte), |asked| asked.tokenizer.clone())
    }

    /// Whether sources have padding.
    pub fn is_padded(&self) -> bool {
        match &self.kind {
            Kind::Data(data) => data.is_padded(),
            Kind::Sums | Kind::Asked(_) => true,
            Kind::Missing => false,
        }
    }

    /// Whether a reply is right or wrong.
    pub fn has_answers(&self) -> bool {
        matches!(self.kind, Kind::Sums)
    }

    pub fn source(&self, split: Split) -> Result<Arc<dyn Source>, TrainError> {
        match self.data()? {
            Some(data) => data.source(split),
            None => Ok(Arc::new(Sums::new(self.seed, split, self.frame.clone()))),
        }
    }

    pub fn without_validation(&self) -> Result<Option<String>, TrainError> {
        Ok(self.data()?.and_then(|data| data.without_validation()))
    }

    pub fn makes_own_rows(&self) -> bool {
        matches!(&self.kind, Kind::Data(data) if data.makes_own_rows())
    }

    pub fn epoch(&self) -> Option<u64> {
        if let Kind::Data(data) = &self.kind { data.epoch() } else { None }
    }

    /// For people: what was found.
    pub fn describe(&self) -> Result<Option<String>, TrainError> {
        if let Kind::Data(data) = &self.kind { data.describe().map(Some) } else { Ok(None) }
    }

    /// The source's tokens of a prompt, or of a conversation's turns.
    pub fn prompt(&self, turns: &[Message]) -> Result<Vec<u32>, TrainError> {
        if let Some(asked) = self.asked() {
            return asked.turns(turns, false);
        }
        let [prompt] = turns else {
            return Err(TrainError::Other("this model learned sums: a prompt is one, and not a conversation".into()));
        };
        Ok(self.tokenizer().encode(&prompt.text().map_err(TrainError::Other)?)?)
    }

    /// The token that the decoder reads first; none: the source's last.
    pub fn begin(&self) -> Option<u32> {
        self.asked().and_then(|asked| asked.begin)
    }

    /// The token that a reply ends with.
    pub fn stop(&self) -> Result<Option<u32>, TrainError> {
        self.asked().map_or(Ok(Tokenizer::Byte.eos()), Asked::stop)
    }

    /// What a sample of the model shows replies to: at most so many prompts.
    pub fn samples(&self, count: usize) -> Result<Vec<Prompt>, TrainError> {
        if let Some(data) = self.data()? {
            return Ok(data.beginning()?.into_iter().collect());
        }
        let sums = Sums::new(self.seed, Split::Val, self.frame.clone());
        let prompt = |text: String| Ok(Prompt { tokens: self.tokenizer().encode(&text)?, text });
        (0..count as u64).map(|i| prompt(sum(sums.pair(i)).0)).collect()
    }

    /// What a checkpoint notes.
    pub fn identity(&self) -> Result<Value, TrainError> {
        match &self.kind {
            Kind::Data(data) => Ok(data.identity()),
            _ => Ok(json!({ "tokenizer": format!("{:016x}", self.tokenizer().fingerprint()), "data": null })),
        }
    }

    pub fn kept(&self) -> Vec<(&'static str, Vec<u8>)> {
        if let Kind::Data(data) = &self.kind { data.kept() } else { vec![] }
    }
}
