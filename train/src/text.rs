//! Windows of tokens as recipes read them: a prepared data set, or generated text.

use crate::config::{ConfigError, DataConfig};
use crate::data::{Dataset, Generated, ShardSet, Source, Split, TokenWindows, Tokenizer};
use crate::recipe::TrainError;
use std::path::Path;
use std::sync::Arc;

#[derive(Clone)]
pub struct Text {
    pub data: DataConfig,
    /// Of the model: the tokenizer's must fit in.
    pub vocab: usize,
    /// Tokens of a window.
    pub seq: usize,
    pub seed: u64,
}

/// Windows of generated text to validate with.
const VALIDATION: u64 = 4096;

impl Text {
    /// The data set's tokenizer; its vocabulary must fit the model's.
    pub fn tokenizer(&self) -> Result<Tokenizer, TrainError> {
        let tokenizer = match self.data.path.as_str() {
            "" => Tokenizer::Byte,
            path => Dataset::open(Path::new(path))?.load_tokenizer(Path::new(path))?,
        };
        if tokenizer.vocab() > self.vocab {
            return Err(ConfigError::Invalid(format!(
                "tokenizer {} has {} tokens, but model.vocab = {}: set model.vocab to at least that",
                tokenizer.name(),
                tokenizer.vocab(),
                self.vocab
            ))
            .into());
        }
        Ok(tokenizer)
    }

    pub fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError> {
        let split = if train { Split::Train } else { Split::Val };
        self.tokenizer()?;
        let ignore = self.data.ignore_tokens.clone();
        Ok(match self.data.path.as_str() {
            "" => {
                let windows = if train { Generated::ENDLESS } else { VALIDATION };
                Arc::new(Generated::new(self.seed, split, self.seq, windows, ignore)?)
            }
            path => Arc::new(TokenWindows::new(ShardSet::open(Path::new(path), split)?, self.seq, ignore)?),
        })
    }

    /// What a checkpoint notes of its tokenizer and data.
    pub fn identity(&self) -> serde_json::Value {
        let tokenizer = self.tokenizer().ok().map(|t| format!("{:016x}", t.fingerprint()));
        let data = match self.data.path.as_str() {
            "" => None,
            path => Dataset::open(Path::new(path)).and_then(|d| d.checksum(Path::new(path))).ok().map(|c| format!("{c:016x}")),
        };
        serde_json::json!({ "tokenizer": tokenizer, "data": data })
    }
}
