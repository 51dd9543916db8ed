//! Windows of tokens as recipes read them: a prepared data set, or generated text.

use crate::checkpoint::Checkpoint;
use crate::config::{ConfigError, DataConfig};
use crate::data::{Dataset, Generated, ShardSet, Source, Split, TokenWindows, Tokenizer};
use crate::recipe::TrainError;
use std::cell::OnceCell;
use std::path::Path;
use std::sync::Arc;

#[derive(Clone)]
pub struct Text {
    pub data: DataConfig,
    /// Of the model: the tokenizer's must fit in.
    vocab: usize,
    /// Tokens of a window.
    seq: usize,
    pub seed: u64,
    tokenizer: OnceCell<Arc<Tokenizer>>,
    identity: OnceCell<serde_json::Value>,
}

/// Windows of generated text to validate with.
const VALIDATION: u64 = 4096;

/// A checkpoint's copy of its tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";

impl Text {
    pub fn new(data: DataConfig, vocab: usize, seq: usize, seed: u64) -> Text {
        Text { data, vocab, seq, seed, tokenizer: OnceCell::new(), identity: OnceCell::new() }
    }

    /// The data set's tokenizer; its vocabulary must fit the model's.
    pub fn tokenizer(&self) -> Result<Arc<Tokenizer>, TrainError> {
        if let Some(tokenizer) = self.tokenizer.get() {
            return Ok(tokenizer.clone());
        }
        let tokenizer = match self.data.path.as_str() {
            "" => Tokenizer::Byte,
            path => Dataset::open(Path::new(path))?.load_tokenizer(Path::new(path))?,
        };
        self.fitting(tokenizer)
    }

    fn fitting(&self, tokenizer: Tokenizer) -> Result<Arc<Tokenizer>, TrainError> {
        if tokenizer.vocab() > self.vocab {
            return Err(ConfigError::Invalid(format!(
                "tokenizer {} has {} tokens, but model.vocab = {}: set model.vocab to at least that",
                tokenizer.name(),
                tokenizer.vocab(),
                self.vocab
            ))
            .into());
        }
        Ok(self.tokenizer.get_or_init(|| Arc::new(tokenizer)).clone())
    }

    /// The tokenizer that a checkpoint holds, so that the data is not asked for it; those of earlier versions hold none.
    pub fn take_tokenizer(&self, found: &Checkpoint) -> Result<Arc<Tokenizer>, TrainError> {
        let identity = &found.meta["identity"];
        let theirs = identity["tokenizer"].as_str();
        let is = |tokenizer: &Tokenizer| theirs.is_none_or(|theirs| theirs == format!("{:016x}", tokenizer.fingerprint()));
        let tokenizer = match found.has(TOKENIZER) {
            true => {
                let mut own = Tokenizer::from_json(&found.path.join(TOKENIZER), &found.bytes(TOKENIZER)?)?;
                if let Ok(end) = serde_json::from_value(identity["end"].clone()) {
                    own.set_end(&end);
                }
                self.fitting(own)?
            }
            false if is(&Tokenizer::Byte) => self.fitting(Tokenizer::Byte)?,
            false => self.tokenizer()?,
        };
        match is(&tokenizer) {
            true => Ok(tokenizer),
            false => Err(TrainError::Other(format!(
                "checkpoint {} was trained with another tokenizer than {}",
                found.path.display(),
                tokenizer.name()
            ))),
        }
    }

    pub fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError> {
        let split = if train { Split::Train } else { Split::Val };
        self.tokenizer()?;
        let ignore = self.data.ignore_tokens.clone();
        let source: Arc<dyn Source> = match self.data.path.as_str() {
            "" => {
                let windows = if train { Generated::ENDLESS } else { VALIDATION };
                Arc::new(Generated::new(self.seed, split, self.seq, windows, ignore)?)
            }
            path => Arc::new(TokenWindows::new(ShardSet::open(Path::new(path), split)?, self.seq, ignore)?),
        };
        // What is noted is what is read here, whatever becomes of the folder.
        self.identity();
        Ok(source)
    }

    /// What a checkpoint notes of its tokenizer and data.
    pub fn identity(&self) -> serde_json::Value {
        let noted = || {
            let tokenizer = self.tokenizer().ok();
            let data = match self.data.path.as_str() {
                "" => None,
                path => Dataset::open(Path::new(path)).and_then(|d| d.checksum(Path::new(path))).ok().map(|c| format!("{c:016x}")),
            };
            let fingerprint = tokenizer.as_ref().map(|t| format!("{:016x}", t.fingerprint()));
            serde_json::json!({ "tokenizer": fingerprint, "data": data, "end": tokenizer.map(|t| t.end()) })
        };
        self.identity.get_or_init(noted).clone()
    }

    /// What a checkpoint holds so that its model can be used where its data is not.
    pub fn kept(&self) -> Vec<(&'static str, Vec<u8>)> {
        let tokenizer = self.tokenizer().ok();
        tokenizer.and_then(|t| t.json().map(<[u8]>::to_vec)).map(|json| (TOKENIZER, json)).into_iter().collect()
    }
}
