//! Windows of tokens as recipes read them: prepared data sets, or generated text.

use crate::checkpoint::Checkpoint;
use crate::config::{Config, ConfigError, DataConfig};
use crate::data::{Generated, Noted, Prepared, Source, Split, TokenWindows, Tokenizer};
use crate::recipe::TrainError;
use std::cell::OnceCell;
use std::sync::Arc;

#[derive(Clone)]
pub struct Text {
    pub data: DataConfig,
    /// The model's vocabulary; the tokenizer's may be smaller.
    vocab: usize,
    /// Tokens of a window.
    seq: usize,
    pub seed: u64,
    tokenizer: OnceCell<Arc<Tokenizer>>,
    identity: OnceCell<serde_json::Value>,
}

/// The folders that hold the text; none where it is generated.
fn prepared(data: &DataConfig) -> Result<Option<Prepared>, TrainError> {
    Ok((!data.path.is_empty()).then(|| Prepared::open(&data.path)).transpose()?)
}

fn tokenizer_of(data: &DataConfig) -> Result<Tokenizer, TrainError> {
    Ok(match prepared(data)? {
        None => Tokenizer::Byte,
        Some(prepared) => prepared.tokenizer()?,
    })
}

/// The config of a recipe that reads `Text`, with the vocabulary of its tokenizer where it names none.
pub fn sized(config: &Config) -> Result<Config, TrainError> {
    let mut config = config.clone();
    config.size("model.vocab", |c| Ok::<_, TrainError>(tokenizer_of(&c.section("data")?)?.vocab()))?;
    Ok(config)
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
        self.fitting(tokenizer_of(&self.data)?)
    }

    fn fitting(&self, tokenizer: Tokenizer) -> Result<Arc<Tokenizer>, TrainError> {
        if tokenizer.vocab() > self.vocab {
            return Err(ConfigError::Invalid(format!(
                "tokenizer {} has {} tokens, but model.vocab = {}: use the tokenizer that the model was trained with; for a new model, set model.vocab to at least that, or to 0 to take it \
                 from the data",
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
                    engine::mutant!("end-of-a-checkpoints-documents-forgotten", own.set_end(&end), ());
                }
                let nothing = || Noted { id: None, from: "the checkpoint".into() };
                own.set_begin(&serde_json::from_value(identity["begin"].clone()).unwrap_or_else(|_| nothing()));
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

    /// Whether all targets of every window count.
    pub fn counts_all(&self) -> bool {
        self.data.ignore_tokens.is_empty()
    }

    pub fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError> {
        let split = if train { Split::Train } else { Split::Val };
        self.tokenizer()?;
        let ignore = self.data.ignore_tokens.clone();
        let source: Arc<dyn Source> = match prepared(&self.data)? {
            None => {
                let windows = if train { Generated::ENDLESS } else { VALIDATION };
                Arc::new(Generated::new(self.seed, split, self.seq, windows, ignore)?)
            }
            Some(prepared) => prepared.source(split, self.seed, &|set| Ok(Arc::new(TokenWindows::new(set, self.seq, ignore.clone())?)))?,
        };
        // What is noted is what is read here, whatever becomes of the folder.
        self.identity()?;
        Ok(source)
    }

    /// See `Task::without_validation`.
    pub fn without_validation(&self) -> Result<Option<String>, TrainError> {
        Ok(prepared(&self.data)?.and_then(|prepared| prepared.without_validation()))
    }

    /// Windows of an epoch, where there are epochs.
    pub fn epoch(&self) -> Option<u64> {
        prepared(&self.data).ok()?.filter(|prepared| !prepared.is_mixture())?;
        self.source(true).ok().map(|windows| windows.len())
    }

    /// For people: what was found.
    pub fn describe(&self) -> Result<String, TrainError> {
        Ok(prepared(&self.data)?.map_or("generated text".into(), |prepared| prepared.describe() + ": plain text"))
    }

    /// What a checkpoint notes of its tokenizer and data.
    pub fn identity(&self) -> Result<serde_json::Value, TrainError> {
        if let Some(identity) = self.identity.get() {
            return Ok(identity.clone());
        }
        let tokenizer = self.tokenizer()?;
        let data = prepared(&self.data)?.map(|prepared| Ok::<_, TrainError>(format!("{:016x}", prepared.checksum()?))).transpose()?;
        let fingerprint = format!("{:016x}", tokenizer.fingerprint());
        let mut noted = serde_json::json!({ "tokenizer": fingerprint, "data": data, "end": tokenizer.end() });
        if tokenizer.begin().id.is_some() {
            noted["begin"] = serde_json::json!(tokenizer.begin());
        }
        Ok(self.identity.get_or_init(|| noted).clone())
    }

    /// What a checkpoint holds so that its model can be used where its data is not.
    pub fn kept(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        let tokenizer = self.tokenizer()?;
        Ok(tokenizer.json().map(|json| (TOKENIZER, json.to_vec())).into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Dataset, Input, PrepareOptions, prepare};
    use std::path::Path;

    /// A model that is used where its data is not ends and begins what it writes as its data did.
    #[test]
    fn a_checkpoint_knows_how_its_documents_begin_and_end() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let vocab = serde_json::json!({ "[unk]": 0, "a": 1, "<end>": 2, "<begin>": 3, "<|endoftext|>": 4 });
        let added = [(2, "<end>"), (3, "<begin>"), (4, "<|endoftext|>")].map(|(id, name)| {
            serde_json::json!({ "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true })
        });
        let json = serde_json::json!({ "version": "1.0", "added_tokens": added, "pre_tokenizer": { "type": "WhitespaceSplit" },
            "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "[unk]" } });
        std::fs::write(at("tokenizer.json"), json.to_string()).unwrap();
        std::fs::write(at("a.jsonl"), "{\"text\": \"a a\"}\n".repeat(20)).unwrap();
        for (eos, bos, end, begin) in [("<end>", "<begin>", Some(2), Some(3)), ("none", "none", None, None)] {
            let (data, run) = (at(&format!("data-{eos}")), at(&format!("run-{eos}")));
            let input = Input::Files { paths: vec![at("a.jsonl")], field: "text".into() };
            let spec = at("tokenizer.json").display().to_string();
            let options = PrepareOptions { eos: Some(eos.into()), bos: Some(bos.into()), ..PrepareOptions::new(input, &spec, &data) };
            prepare(&options).unwrap();
            let text = |path: &Path| Text::new(DataConfig { path: path.to_str().unwrap().into(), ignore_tokens: vec![] }, 5, 8, 0);
            let own = text(&data);
            let meta = serde_json::json!({ "identity": own.identity().unwrap() });
            let saved = crate::checkpoint::save(&run, 1, &[], &own.kept().unwrap(), &meta, 0.into()).unwrap();
            std::fs::remove_dir_all(&data).unwrap();
            let found = crate::checkpoint::open(&saved.path).unwrap();
            let tokenizer = text(&data).take_tokenizer(&found).unwrap();
            assert_eq!((tokenizer.eos(), tokenizer.end().id, tokenizer.begin().id), (end, end, begin), "{eos}");
        }
    }

    /// What cannot be read is neither other data nor none: a checkpoint that noted so could never be resumed.
    #[test]
    fn what_cannot_be_read_is_an_error_and_not_noted_as_null() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let input = Input::Generated { sentences: 200, seed: 0 };
        prepare(&PrepareOptions { val_share: 0.2, ..PrepareOptions::new(input, "byte", &path) }).unwrap();
        let text = || Text::new(DataConfig { path: path.to_str().unwrap().into(), ignore_tokens: vec![] }, 257, 8, 0);
        assert!(text().identity().unwrap()["data"].is_string());
        let shard = path.join("val-00000.tokens");
        std::fs::remove_file(&shard).unwrap();
        std::fs::create_dir(&shard).unwrap();
        // Training reads the other shards.
        for error in [text().identity().err(), text().source(true).err()] {
            let said = error.unwrap().to_string();
            assert!(said.contains("val-00000.tokens") && said.contains("directory"), "{said}");
        }
        std::fs::remove_file(path.join(Dataset::FILE)).unwrap();
        let said = text().kept().unwrap_err().to_string();
        assert!(said.contains(Dataset::FILE), "{said}");
    }
}
