//! Text to token ids and back.

use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::DataError;

/// The fingerprint of the byte tokenizer: "byte" in ASCII.
const BYTE_FINGERPRINT: u64 = 0x6279_7465;
const EOS_NAMES: [&str; 4] = ["</s>", "<|endoftext|>", "<eos>", "<|im_end|>"];

pub enum Tokenizer {
    /// Token = byte; 0 ends a document.
    Byte,
    /// A Hugging Face tokenizer.json.
    Json { inner: Box<tokenizers::Tokenizer>, path: PathBuf, fingerprint: u64, vocab: usize },
}

impl Tokenizer {
    /// "byte", or the path of a tokenizer.json.
    pub fn from_spec(spec: &str) -> Result<Self, DataError> {
        if spec == "byte" {
            return Ok(Tokenizer::Byte);
        }
        let path = Path::new(spec);
        let fail = |e: std::io::Error| DataError::Tokenizer { path: path.to_owned(), reason: e.to_string() };
        Tokenizer::from_json(path, &std::fs::read(path).map_err(fail)?)
    }

    /// From the text of a tokenizer.json; `path` is what it is called.
    pub fn from_json(path: &Path, json: &[u8]) -> Result<Self, DataError> {
        let fail = |reason: String| DataError::Tokenizer { path: path.to_owned(), reason };
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|e| fail(format!("not a readable tokenizer.json: {e}")))?;
        // A limit on the length, kept in some files, would cut documents in silence.
        inner.with_truncation(None).map_err(|e| fail(e.to_string()))?;
        inner.with_padding(None);
        // Ids may have gaps, so the count of words is not the size of the embedding.
        let Some(last) = inner.get_vocab(true).into_values().max() else {
            return Err(fail("its vocabulary is empty".into()));
        };
        Ok(Tokenizer::Json { inner: Box::new(inner), path: path.to_owned(), fingerprint: xxh3_64(json), vocab: last as usize + 1 })
    }

    pub fn name(&self) -> String {
        match self {
            Tokenizer::Byte => "byte".into(),
            Tokenizer::Json { path, .. } => path.display().to_string(),
        }
    }

    /// One more than the largest id.
    pub fn vocab(&self) -> usize {
        match self {
            Tokenizer::Byte => 256,
            Tokenizer::Json { vocab, .. } => *vocab,
        }
    }

    pub fn fingerprint(&self) -> u64 {
        match self {
            Tokenizer::Byte => BYTE_FINGERPRINT,
            Tokenizer::Json { fingerprint, .. } => *fingerprint,
        }
    }

    /// The token that ends a document.
    pub fn eos(&self) -> Option<u32> {
        match self {
            Tokenizer::Byte => Some(0),
            Tokenizer::Json { inner, .. } => EOS_NAMES.iter().find_map(|name| inner.token_to_id(name)),
        }
    }

    /// The token of this name.
    pub fn token(&self, name: &str) -> Option<u32> {
        match self {
            Tokenizer::Byte => None,
            Tokenizer::Json { inner, .. } => inner.token_to_id(name),
        }
    }

    /// No token is added at the beginning or the end. Special tokens that the text names are those tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self {
            Tokenizer::Byte => Ok(text.bytes().map(u32::from).collect()),
            Tokenizer::Json { inner, path, .. } => match inner.encode_fast(text, false) {
                Ok(encoding) => Ok(encoding.get_ids().to_vec()),
                Err(error) => {
                    Err(DataError::Tokenizer { path: path.clone(), reason: format!("cannot encode {} bytes of text: {error}", text.len()) })
                }
            },
        }
    }

    /// What is no whole character becomes U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        match self {
            Tokenizer::Byte => {
                let bytes: Vec<u8> = ids.iter().map(|&id| u8::try_from(id).unwrap_or(0xff)).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Tokenizer::Json { inner, .. } => inner.decode(ids, false).unwrap_or_else(|_| "\u{fffd}".into()),
        }
    }

    pub fn stream(&self) -> Stream<'_> {
        Stream { tokenizer: self, ids: Vec::new(), shown: 0 }
    }
}

/// Decodes token by token and gives out whole characters only.
pub struct Stream<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens of the last text given out, then those that are still held back. A token's text may depend on the one
    /// before it (a leading space), so the earlier ones stay as context.
    ids: Vec<u32>,
    shown: usize,
}

impl Stream<'_> {
    /// Invalid bytes are not held back for longer than this many tokens.
    const PATIENCE: usize = 16;

    pub fn push(&mut self, token: u32) -> Option<String> {
        self.ids.push(token);
        self.take(false)
    }

    /// The rest, with U+FFFD for what stayed incomplete.
    pub fn finish(mut self) -> Option<String> {
        self.take(true)
    }

    fn take(&mut self, all: bool) -> Option<String> {
        let context = self.tokenizer.decode(&self.ids[..self.shown]);
        let text = self.tokenizer.decode(&self.ids);
        let held = self.ids.len() - self.shown;
        if text.ends_with('\u{fffd}') && !all && held < Self::PATIENCE {
            return None;
        }
        let new = text.get(context.len()..).unwrap_or_default().to_owned();
        self.ids.drain(..self.shown);
        self.shown = self.ids.len();
        (!new.is_empty()).then_some(new)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A byte-level BPE without merges, with an end-of-text token, and a truncation that must not apply.
    pub fn write_json(path: &Path) {
        let mut letters: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
        letters.sort();
        let mut vocab = serde_json::Map::new();
        for (id, letter) in letters.iter().enumerate() {
            vocab.insert(letter.to_string(), id.into());
        }
        vocab.insert("<|endoftext|>".into(), 300.into());
        let level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let json = serde_json::json!({
            "version": "1.0",
            "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
            "added_tokens": [{"id": 300, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true}],
            "pre_tokenizer": level, "decoder": level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []}
        });
        std::fs::write(path, json.to_string()).unwrap();
    }

    #[test]
    fn both_kinds_round_trip_and_stream_whole_characters() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        write_json(&path);
        let json = Tokenizer::from_spec(path.to_str().unwrap()).unwrap();
        assert_eq!(json.eos(), Some(300));
        assert_eq!(json.vocab(), 301, "the id of the added token counts, not the number of tokens");
        assert_eq!(json.fingerprint(), xxh3_64(&std::fs::read(&path).unwrap()));

        let text = "hello é 🦀 end, it's 12";
        for tokenizer in [Tokenizer::Byte, json] {
            let ids = tokenizer.encode(text).unwrap();
            assert_eq!(ids.len(), text.len());
            assert_eq!(tokenizer.decode(&ids), text);
            let mut stream = tokenizer.stream();
            let pieces: Vec<String> = ids.iter().filter_map(|&id| stream.push(id)).collect();
            assert_eq!(pieces.len(), text.chars().count());
            assert_eq!(pieces.concat(), text);
            assert_eq!(stream.finish(), None);

            let crab = tokenizer.encode("🦀").unwrap();
            let mut stream = tokenizer.stream();
            assert_eq!(stream.push(crab[0]), None);
            assert_eq!(stream.push(crab[1]), None);
            assert!(stream.finish().unwrap().starts_with('\u{fffd}'));
        }
        assert_eq!(Tokenizer::Byte.decode(&[104, 999, 105]), "h\u{fffd}i");
    }

    #[test]
    fn invalid_bytes_are_not_held_back_for_ever() {
        let tokenizer = Tokenizer::Byte;
        let mut stream = tokenizer.stream();
        assert!((0..Stream::PATIENCE).filter_map(|_| stream.push(0xff)).count() > 0);
    }

    #[test]
    fn bad_files_are_named() {
        let error = Tokenizer::from_spec("/nowhere/tokenizer.json").err().unwrap().to_string();
        assert!(error.contains("/nowhere/tokenizer.json") && error.contains("byte"), "{error}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bad.json");
        for bad in ["{", "{\"version\": \"1.0\"}", "\u{1}"] {
            std::fs::write(&path, bad).unwrap();
            let error = Tokenizer::from_spec(path.to_str().unwrap()).err().unwrap().to_string();
            assert!(error.contains("bad.json") && error.contains("not a readable"), "{error}");
        }
    }
}
