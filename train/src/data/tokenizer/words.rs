//! The library that reads a tokenizer.json, kept from harm: what such a file says of sizes is looked at before it is read (`outline.rs`), and where the library
//! panics at a file or a text, that is an error.

use std::ops::Deref;
use std::path::Path;

use tokenizers::{AddedToken, Encoding, Tokenizer};

use super::outline;
use crate::data::DataError;
use crate::guarded::guarded;
use engine::mutant;

/// Bytes that the normalizer may make of one text, where it makes much more of a text than it is.
const MADE: f64 = (1u64 << 30) as f64;
const MUCH: f64 = 64.0;

/// A tokenizer whose calls cannot panic. What is asked of the library itself are its parts.
#[derive(Clone)]
pub(crate) struct Words {
    inner: Tokenizer,
    /// How many bytes a normalizer may make of one.
    growth: f64,
}

impl Deref for Words {
    type Target = Tokenizer;

    fn deref(&self) -> &Tokenizer {
        &self.inner
    }
}

impl Words {
    /// The bytes of a tokenizer.json.
    pub fn file(path: &Path) -> Result<Vec<u8>, String> {
        super::files::bytes(path).map_err(|e| match e {
            DataError::Tokenizer { reason, .. } => reason,
            other => other.to_string(),
        })
    }

    /// From the text of a tokenizer.json, without a limit on the length of texts: one that is kept in some files would cut documents in silence.
    pub fn read(text: &[u8]) -> Result<Words, String> {
        let growth = outline::check(text)?;
        let read = guarded(|| {
            let mut inner = Tokenizer::from_bytes(text)?;
            inner.with_truncation(None)?.with_padding(None);
            Ok::<_, tokenizers::Error>(inner)
        });
        let inner = read.ok_or("not a readable tokenizer.json: its parts contradict one another")?;
        let words = Words { inner: inner.map_err(|e| format!("not a readable tokenizer.json: {e}"))?, growth };
        // What its parts do to any text at all.
        for text in ["", "a"] {
            words.encode_fast(text, true).map_err(|e| format!("not a usable tokenizer.json: {e}"))?;
        }
        Ok(words)
    }

    /// Adds tokens, all at once: the library makes its tables anew each time.
    pub fn add(&mut self, tokens: &[AddedToken]) -> Result<(), String> {
        outline::added(tokens.iter().map(|token| (token.content.len(), token.normalized)), self.growth)?;
        match guarded(|| self.inner.add_tokens(tokens.iter().cloned())) {
            Some(Ok(_)) => Ok(()),
            Some(Err(e)) => Err(e.to_string()),
            None => Err("they do not fit its tokenizer.json".into()),
        }
    }

    pub fn encode_fast(&self, text: &str, special: bool) -> Result<Encoding, String> {
        self.made(text, || self.inner.encode_fast(text, special))
    }

    /// The same with the places of tokens in the text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Encoding, String> {
        self.made(text, || self.inner.encode(text, special))
    }

    fn made(&self, text: &str, encode: impl FnOnce() -> tokenizers::Result<Encoding>) -> Result<Encoding, String> {
        let refused = |why: &str| Err(format!("cannot encode {} bytes of text: {why}", text.len()));
        if self.growth > MUCH && self.growth * text.len() as f64 > mutant!("normalizers-make-any-length", MADE, f64::MAX) {
            return refused(&format!("its normalizer may make {:.0} bytes of each", self.growth));
        }
        match guarded(encode) {
            Some(Ok(encoding)) => Ok(encoding),
            Some(Err(e)) => refused(&e.to_string()),
            None => refused("its parts contradict one another, or the text"),
        }
    }

    pub fn decode(&self, ids: &[u32]) -> Option<String> {
        guarded(|| self.inner.decode(ids, false).ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// 256 bytes of one are read; of 5 MiB of text that would be more than a gigabyte.
    #[test]
    fn a_normalizer_that_grows_text_is_given_no_long_one() {
        let replace = json!({ "type": "Replace", "pattern": { "String": "l" }, "content": "l".repeat(16) });
        let tokenizer = json!({
            "version": "1.0", "added_tokens": [], "normalizer": { "type": "Sequence", "normalizers": [replace, replace] },
            "model": { "type": "WordLevel", "vocab": { "a": 0 }, "unk_token": "a" }
        });
        let words = Words::read(tokenizer.to_string().as_bytes()).unwrap();
        assert_eq!(words.encode_fast("a", false).unwrap().get_ids(), [0]);
        let said = words.encode_fast(&"a".repeat(5 << 20), false).unwrap_err();
        assert!(said.contains("its normalizer may make 256 bytes of each"), "{said}");
    }
}
