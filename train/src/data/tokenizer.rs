//! Text to token ids and back.

mod bytes;
mod files;
mod outline;
mod sentencepiece;
mod words;

use std::ops::Range;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::pieces::{PIECE, Places};
use super::special::{complete, named};
use super::{DataError, Noted, Special, Token};
use crate::files::folder_of;
pub(crate) use words::Words;

/// As many ids as a model may have.
const MOST_IDS: usize = 1 << 22;

/// Texts of more bytes are encoded in pieces, where that changes no token.
const LONG: usize = 4 * PIECE;
/// A piece of more bytes takes too much memory.
const MOST_AT_ONCE: usize = 4 << 20;

/// The fingerprint of the byte tokenizer: "byte" in ASCII.
const BYTE_FINGERPRINT: u64 = 0x6279_7465;

pub enum Tokenizer {
    /// Token = byte; 0 ends a document.
    Byte,
    Json(Json),
}

/// A Hugging Face tokenizer.json.
pub struct Json {
    pub(super) inner: Box<Words>,
    path: PathBuf,
    text: Vec<u8>,
    vocab: usize,
    special: Box<Special>,
    /// What a data set puts behind and before documents.
    end: Noted,
    begin: Noted,
}

impl Json {
    /// From the text of such a file; `path` is what it is called, `folder` where it lies; `ask`: whether files there
    /// say which tokens are special.
    fn new(path: &Path, mut text: Vec<u8>, folder: Option<&Path>, ask: bool) -> Result<Self, DataError> {
        let fail = |reason: String| DataError::Tokenizer { path: path.to_owned(), reason };
        let mut inner = Words::read(&text).map_err(fail)?;
        inner.called = path.display().to_string();
        // Tokens that tokenizer_config.json alone lists are part of it, wherever it is copied to.
        let mut whole = inner.clone();
        match folder.map_or(Ok(0), |folder| complete(&mut whole, folder)) {
            Ok(0) => {}
            Ok(_) => {
                text = whole.to_string(true).map_err(|e| fail(e.to_string()))?.into_bytes();
                // It is one with its parts as any other.
                outline::check(&text).map_err(fail)?;
                inner = whole;
            }
            Err(e) if ask => return Err(e),
            Err(_) => {}
        }
        // Ids may have gaps, so the count of words is not the size of the embedding.
        let Some(last) = inner.get_vocab(true).into_values().max() else {
            return Err(fail("its vocabulary is empty".into()));
        };
        if last as usize >= MOST_IDS {
            return Err(fail(format!("it has a token with the id {last}; ids below {MOST_IDS} are read")));
        }
        let special = Special::find(&inner, folder.filter(|_| ask))?;
        let (end, begin) = (special.noted_end(), noted(special.begin.as_ref()));
        Ok(Json { inner: Box::new(inner), path: path.to_owned(), text, vocab: last as usize + 1, special: Box::new(special), end, begin })
    }

    /// As the byte tokenizer, where it is that one written out.
    fn known(self) -> Tokenizer {
        if bytes::is(&self.text) { Tokenizer::Byte } else { Tokenizer::Json(self) }
    }
}

/// A token, and the bytes of a text that it is made from.
pub type Placed = (u32, (usize, usize));

fn noted(begin: Option<&Token>) -> Noted {
    let nothing = || Noted { id: None, from: "the tokenizer puts nothing before texts".into() };
    begin.map_or_else(nothing, Token::noted)
}

impl Tokenizer {
    /// "byte", the path of a tokenizer.json, or a folder that holds one, or vocab.json and merges.txt, or SentencePiece's tokenizer.model.
    pub fn from_spec(spec: &str) -> Result<Self, DataError> {
        Tokenizer::opened(spec, true)
    }

    /// The same without asking the files beside it which tokens end, begin and pad.
    pub fn from_spec_alone(spec: &str) -> Result<Self, DataError> {
        Tokenizer::opened(spec, false)
    }

    fn opened(spec: &str, ask: bool) -> Result<Self, DataError> {
        let path = match spec {
            "byte" => return Ok(Tokenizer::Byte),
            path if Path::new(path).is_dir() => {
                let (path, text) = files::read(Path::new(path))?;
                return Ok(Json::new(&path, text, Some(folder_of(&path)), ask)?.known());
            }
            path => PathBuf::from(path),
        };
        Ok(Json::new(&path, files::bytes(&path)?, Some(folder_of(&path)), ask)?.known())
    }

    /// The byte tokenizer as the text of a tokenizer.json, which is read as the byte tokenizer again.
    pub fn byte_json() -> Vec<u8> {
        format!("{:#}\n", bytes::json()).into_bytes()
    }

    /// The tokenizer of a model's folder. None: no file there is of one, and the model's tokens may be bytes.
    pub fn of_folder(folder: &Path) -> Result<Option<Self>, DataError> {
        files::trace(folder).map(|_| Tokenizer::from_spec(&folder.display().to_string())).transpose()
    }

    /// A token that someone named: by its name, its id, or "none".
    pub fn chosen(&self, what: &'static str, name: &str) -> Result<Noted, DataError> {
        let vocab = self.vocab();
        // A number is an id, also where some word is written like it.
        let id = match name {
            "none" => return Ok(Noted { id: None, from: what.into() }),
            _ if !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit()) => name.parse().ok().filter(|id| (*id as usize) < vocab),
            _ => self.token(name),
        };
        let need = || format!("{} has no such token; its ids go up to {} (a vocabulary of {vocab})", self.name(), vocab - 1);
        id.map(|id| Noted { id: Some(id), from: what.into() }).ok_or_else(|| DataError::Setting { what, value: name.into(), need: need() })
    }

    /// From the text of a tokenizer.json; `path` is what it is called.
    pub fn from_json(path: &Path, json: &[u8]) -> Result<Self, DataError> {
        Ok(Json::new(path, json.to_vec(), None, false)?.known())
    }

    /// The text of the tokenizer.json, where it is one.
    pub fn json(&self) -> Option<&[u8]> {
        match self {
            Tokenizer::Byte => None,
            Tokenizer::Json(json) => Some(&json.text),
        }
    }

    pub fn name(&self) -> String {
        match self {
            Tokenizer::Byte => "byte".into(),
            Tokenizer::Json(json) => json.path.display().to_string(),
        }
    }

    /// One more than the largest id.
    pub fn vocab(&self) -> usize {
        match self {
            Tokenizer::Byte => 256,
            Tokenizer::Json(json) => json.vocab,
        }
    }

    pub fn fingerprint(&self) -> u64 {
        match self {
            Tokenizer::Byte => BYTE_FINGERPRINT,
            Tokenizer::Json(json) => xxh3_64(&json.text),
        }
    }

    /// The token that ends a document.
    pub fn eos(&self) -> Option<u32> {
        self.end().id
    }

    /// The same, and who says so.
    pub fn end(&self) -> Noted {
        match self {
            Tokenizer::Byte => Noted { id: Some(0), from: "the byte tokenizer".into() },
            Tokenizer::Json(json) => json.end.clone(),
        }
    }

    /// The token before a document.
    pub fn begin(&self) -> Noted {
        match self {
            Tokenizer::Byte => noted(None),
            Tokenizer::Json(json) => json.begin.clone(),
        }
    }

    /// What a data set was prepared with; the byte tokenizer keeps its own.
    pub fn set_end(&mut self, end: &Noted) {
        if let Tokenizer::Json(json) = self {
            json.end = end.clone();
        }
    }

    pub fn set_begin(&mut self, begin: &Noted) {
        if let Tokenizer::Json(json) = self {
            json.begin = begin.clone();
        }
    }

    /// For people: which token ends a document, and who says so.
    pub fn describe_end(&self, end: &Noted) -> String {
        match end.id {
            Some(id) => format!("end of document: {}, {}", named(&self.decode(&[id]), id), end.from),
            None => format!("end of document: none ({})", end.from),
        }
    }

    /// For people: that a token which was named is an ordinary one, and what follows.
    pub fn warn_of_ordinary(&self, token: &Noted) -> Option<String> {
        let is_added = |id: u32| match self {
            Tokenizer::Byte => id == 0,
            Tokenizer::Json(json) => json.inner.get_added_tokens_decoder().contains_key(&id),
        };
        let id = token.id.filter(|id| !is_added(*id))?;
        let (text, by) = (self.decode(&[id]), &token.from);
        Some(format!(
            "warning: token {id} {text:?} ({by}) is no added token but an ordinary piece of text: it also occurs inside documents"
        ))
    }

    /// For people: which token begins a document, and who says so.
    pub fn describe_begin(&self, begin: &Noted) -> String {
        match begin.id {
            Some(id) => format!("before a document: {}, {}", named(&self.decode(&[id]), id), begin.from),
            None => format!("before a document: nothing ({})", begin.from),
        }
    }

    /// For people: which token the model pads with, and who says so.
    pub fn describe_pad(&self, pad: Option<&Noted>) -> String {
        match pad.and_then(|pad| Some((pad.id?, &pad.from))) {
            Some((id, from)) => format!("padding: {}, {from}", named(&self.decode(&[id]), id)),
            None => "padding: none".into(),
        }
    }

    /// Special tokens by the files beside it.
    pub fn special(&self) -> Option<&Special> {
        match self {
            Tokenizer::Byte => None,
            Tokenizer::Json(json) => Some(&json.special),
        }
    }

    /// The names of all added tokens, ordinary ones of the vocabulary not among them.
    pub fn added(&self) -> Vec<String> {
        match self {
            Tokenizer::Byte => vec![],
            Tokenizer::Json(json) => json.inner.get_added_tokens_decoder().into_values().map(|token| token.content).collect(),
        }
    }

    /// The token of this name.
    pub fn token(&self, name: &str) -> Option<u32> {
        match self {
            Tokenizer::Byte => None,
            Tokenizer::Json(json) => json.inner.token_to_id(name),
        }
    }

    /// No token is added at the beginning or the end. Special tokens that the text names are those tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self {
            Tokenizer::Byte => Ok(text.bytes().map(u32::from).collect()),
            Tokenizer::Json(json) => {
                let fail = |reason: String| DataError::Tokenizer { path: json.path.clone(), reason };
                let mut ids = vec![];
                for part in self.parts(text).map_err(fail)? {
                    ids.extend(json.inner.encode_fast(&text[part], false).map_err(fail)?.get_ids());
                }
                Ok(ids)
            }
        }
    }

    /// The same behind the token that begins a document, where there is one.
    pub fn encode_beginning(&self, text: &str) -> Result<Vec<u32>, DataError> {
        Ok(self.begin().id.into_iter().chain(self.encode(text)?).collect())
    }

    /// Tokens with the bytes of the text that each is made from. Of a long text, whether a space belongs to the token behind it may differ where it was cut.
    pub fn encode_places(&self, text: &str) -> Result<Vec<Placed>, DataError> {
        match self {
            Tokenizer::Byte => Ok(text.bytes().enumerate().map(|(i, byte)| (byte.into(), (i, i + 1))).collect()),
            Tokenizer::Json(json) => {
                let fail = |reason: String| DataError::Tokenizer { path: json.path.clone(), reason };
                let mut placed = vec![];
                for part in self.parts(text).map_err(fail)? {
                    let encoding = json.inner.encode(&text[part.clone()], false).map_err(fail)?;
                    let places = encoding.get_offsets().iter().map(|(from, to)| (part.start + from, part.start + to));
                    placed.extend(encoding.get_ids().iter().copied().zip(places));
                }
                Ok(placed)
            }
        }
    }

    /// What of a text is encoded at once, one part after another; a text that is not long is one. The tokens are those of the whole.
    fn parts(&self, text: &str) -> Result<Vec<Range<usize>>, String> {
        let (mut parts, mut from) = (vec![], 0);
        if text.len() > LONG {
            let places = Places::new(self);
            while let Some(cut) = places.first(&text[from..], PIECE).filter(|cut| places.doubt().is_none() && !cut.forced) {
                parts.push(from..from + cut.end);
                from += cut.begin;
            }
        }
        match text.len() - from {
            more if more > MOST_AT_ONCE => Err(format!(
                "cannot encode {} bytes of text: in the last {more} is no place where it could be cut without changing a token (split it into several)",
                text.len()
            )),
            _ => {
                parts.push(from..text.len());
                Ok(parts)
            }
        }
    }

    /// What is no whole character becomes U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        match self {
            Tokenizer::Byte => {
                let bytes: Vec<u8> = ids.iter().map(|&id| u8::try_from(id).unwrap_or(0xff)).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Tokenizer::Json(json) => json.inner.decode(ids).unwrap_or_else(|| "\u{fffd}".into()),
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

    /// The vocabulary of a byte-level BPE: a letter for each byte, and these ordinary entries from 256 on.
    pub fn letters(more: &[&str]) -> serde_json::Map<String, serde_json::Value> {
        let mut letters: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
        letters.sort();
        let all = letters.iter().map(char::to_string).chain(more.iter().map(|name| name.to_string()));
        all.enumerate().map(|(id, entry)| (entry, id.into())).collect()
    }

    /// A byte-level BPE without merges, and these added special tokens behind its vocabulary.
    pub fn byte_level(vocab: serde_json::Map<String, serde_json::Value>, special: &[&str]) -> serde_json::Value {
        let added = special.iter().zip(vocab.len()..).map(|(name, id)| {
            serde_json::json!({"id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        });
        let level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        serde_json::json!({"version": "1.0", "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": level, "decoder": level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []}})
    }

    /// With an end-of-text token that has the id 300, and a truncation that must not apply.
    pub fn write_json(path: &Path) {
        let mut vocab = letters(&[]);
        vocab.insert("<|endoftext|>".into(), 300.into());
        let mut json = byte_level(vocab, &["<|endoftext|>"]);
        json["added_tokens"][0]["id"] = 300.into();
        json["truncation"] = serde_json::json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
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
