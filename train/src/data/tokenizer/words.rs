//! The library that reads a tokenizer.json, kept from harm: what such a file says of sizes is looked at before it is read (`outline.rs`), and where the library
//! panics at a file or a text, that is an error.

use std::ops::Deref;
use std::path::Path;
use std::time::Duration;

use tokenizers::{AddedToken, Encoding, NormalizedString, Normalizer, Tokenizer};

use super::outline;
use crate::data::DataError;
use crate::guarded::{guarded, in_time};
use crate::report::human_bytes;
use engine::mutant;

/// Bytes that the normalizer may make of one text: each takes some 150 bytes of memory.
const MADE: usize = 16 << 20;
/// Where it could make more, it is tried on so much of the text at a time.
const TRIED: usize = 4 << 10;

/// Texts of fewer bytes are encoded without looking at the clock, where no regular expression is tried on them.
const SHORT: usize = 4 << 10;
/// Reading a tokenizer.json, and encoding a text, may take so long, and longer for each MiB: a hundred times what is usual on a slow machine.
const READS: Duration = Duration::from_secs(60);
const ENCODES: Duration = Duration::from_secs(10);
const A_MIB: Duration = Duration::from_secs(20);

/// A tokenizer whose calls cannot panic. What is asked of the library itself are its parts.
#[derive(Clone)]
pub(crate) struct Words {
    inner: Tokenizer,
    /// Its file, for people.
    pub called: String,
    has_patterns: bool,
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
        let late = || format!("a tokenizer.json of {} bytes is not read after {} s", text.len(), READS.as_secs());
        let read = in_time(READS, late, || {
            guarded(|| {
                let mut inner = Tokenizer::from_bytes(text)?;
                inner.with_truncation(None)?.with_padding(None);
                Ok::<_, tokenizers::Error>(inner)
            })
        });
        let inner = read.ok_or("not a readable tokenizer.json: its parts contradict one another")?;
        let words = Words {
            inner: inner.map_err(|e| format!("not a readable tokenizer.json: {e}"))?,
            called: "a tokenizer.json".into(),
            has_patterns: holds(text, b"\"Regex\""),
            growth,
        };
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
        if self.growth * text.len() as f64 > MADE as f64 && mutant!("normalizers-make-any-length", self.is_made_long(text), false) {
            return refused(&format!("its normalizer makes more than {} of them", human_bytes(MADE as u64)));
        }
        let allowed = ENCODES + A_MIB * (text.len() >> 20) as u32;
        let late = || {
            format!(
                "{}: encoding {} bytes of text has not ended after {} s: its time grows faster than the text (it may have a regular expression \
                 that looks for something up to the end of a text)",
                self.called,
                text.len(),
                allowed.as_secs()
            )
        };
        let is_quick = text.len() < SHORT && !self.has_patterns;
        let encoded = if is_quick { guarded(encode) } else { in_time(allowed, late, || guarded(encode)) };
        match encoded {
            Some(Ok(encoding)) => Ok(encoding),
            Some(Err(e)) => refused(&e.to_string()),
            None => refused("its parts contradict one another, or the text"),
        }
    }

    /// Whether the normalizer makes more of a text than there is room for; part by part, since what it makes of the whole may be too much already.
    fn is_made_long(&self, text: &str) -> bool {
        let Some(normalizer) = self.inner.get_normalizer() else { return false };
        let (mut made, mut rest) = (0, text);
        while !rest.is_empty() && made <= MADE {
            let at = (0..=rest.len().min(TRIED)).rev().find(|&at| at > 0 && rest.is_char_boundary(at)).unwrap_or(rest.len());
            let mut part = NormalizedString::from(&rest[..at]);
            // One that fails here fails there, too, and says why.
            if guarded(|| normalizer.normalize(&mut part)).is_none_or(|done| done.is_err()) {
                return false;
            }
            made += part.get().len();
            rest = &rest[at..];
        }
        made > MADE
    }

    pub fn decode(&self, ids: &[u32]) -> Option<String> {
        let decode = || guarded(|| self.inner.decode(ids, false).ok()).flatten();
        let late = || format!("{}: decoding {} tokens has not ended after {} s", self.called, ids.len(), ENCODES.as_secs());
        if self.has_patterns { in_time(ENCODES, late, decode) } else { decode() }
    }
}

fn holds(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|found| found == part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// 256 bytes of each `l` are read, and not of 5 MiB of them; a text without any stays as long as it is.
    #[test]
    fn a_normalizer_that_grows_text_is_given_no_long_one() {
        let replace = json!({ "type": "Replace", "pattern": { "String": "l" }, "content": "l".repeat(16) });
        let tokenizer = json!({
            "version": "1.0", "added_tokens": [], "normalizer": { "type": "Sequence", "normalizers": [replace, replace] },
            "model": { "type": "WordLevel", "vocab": { "a": 0 }, "unk_token": "a" }
        });
        let words = Words::read(tokenizer.to_string().as_bytes()).unwrap();
        assert_eq!(words.encode_fast("a", false).unwrap().get_ids(), [0]);
        let said = words.encode_fast(&"l".repeat(1 << 20), false).unwrap_err();
        assert!(said.contains("its normalizer makes more than 16.0 MiB of them"), "{said}");
        assert!(
            !words.is_made_long(&"a".repeat(1 << 20))
                && words.is_made_long(&"l".repeat(1 << 17))
                && !words.is_made_long(&"é".repeat(1 << 15))
        );
    }
}
