//! A tokenizer.json's tokens as llama.cpp has them: byte-level BPE with its merges ("gpt2" there), or BPE over characters that
//! falls back to bytes, as SentencePiece makes it for Llama 2 and Mistral, with a score for each token ("llama").

use super::file::{Header, Meta};
use super::pretokenizer::{self, parts};
use super::{GgufError, Table};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap, HashSet};

const FILE: &str = "tokenizer.json";
/// What SentencePiece writes for a space.
const SPACE: &str = "\u{2581}";

/// llama.cpp's types of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Normal = 1,
    Unknown = 2,
    /// Found in a text only where special tokens are looked for.
    Control = 3,
    /// Found in every text.
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

#[derive(Debug)]
pub struct Vocabulary {
    pub model: &'static str,
    pub pre: &'static str,
    pub tokens: Vec<String>,
    pub kinds: Vec<Kind>,
    pub merges: Option<Vec<String>>,
    pub scores: Option<Vec<f32>>,
    /// Whether a space is put before a text; only "llama" is asked.
    pub space_prefix: Option<bool>,
    /// By the names in tokenizer.json.
    pub ids: HashMap<String, u32>,
}

impl Vocabulary {
    /// Every byte is a token: byte-level BPE without merges.
    pub fn bytes(rows: usize) -> Result<Vocabulary, GgufError> {
        if rows < 256 {
            return Err(GgufError::bad("config.json", format!("'vocab_size' is {rows}, but there are 256 bytes")));
        }
        // Printable bytes stand for themselves, the others for the characters from U+0100 on.
        let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let mut others = 0x100..;
        let letter = |b: u8| if printable(b) { Some(b as char) } else { others.next().and_then(char::from_u32) };
        let ids = (0..=255).filter_map(letter).map(String::from).zip(0..).collect();
        let v = Vocabulary::new("gpt2", "gpt-2", ids, HashMap::new(), rows).map_err(|problem| GgufError::bad(FILE, problem))?;
        Ok(Vocabulary { merges: Some(vec![]), ..v })
    }

    pub fn parse(json: &Table, rows: usize, notes: &mut Vec<String>) -> Result<Vocabulary, GgufError> {
        parse(json, rows, notes).map_err(|problem| GgufError::bad(FILE, problem))
    }

    /// `rows` are the embedding's; ids without a token get one that no text contains.
    fn new(
        model: &'static str,
        pre: &'static str,
        ids: HashMap<String, u32>,
        kinds: HashMap<u32, Kind>,
        rows: usize,
    ) -> Result<Vocabulary, String> {
        let mut by_id: BTreeMap<u32, &str> = BTreeMap::new();
        for (token, id) in &ids {
            if let Some(other) = by_id.insert(*id, token) {
                return Err(format!("gives id {id} to two tokens, {token:?} and {other:?}"));
            }
        }
        if let Some((id, token)) = by_id.last_key_value().filter(|(id, _)| **id as usize >= rows) {
            return Err(format!("token {token:?} has id {id}, but config.json's vocab_size is {rows}"));
        }
        let mut tokens = vec![];
        let mut types = vec![];
        for id in 0..rows as u32 {
            let kind = kinds.get(&id).copied();
            match by_id.get(&id) {
                // Looked for in a text as it is, before spaces are replaced.
                Some(token) if kind == Some(Kind::UserDefined) => tokens.push(token.replace(SPACE, " ")),
                Some(token) => tokens.push(token.to_string()),
                None => tokens.push(format!("[PAD{id}]")),
            }
            types.push(kind.unwrap_or(if by_id.contains_key(&id) { Kind::Normal } else { Kind::Unused }));
        }
        let mut seen = HashSet::new();
        if let Some(twice) = tokens.iter().find(|t| t.is_empty() || !seen.insert(t.as_str())) {
            return Err(format!("token {twice:?} is empty or there twice, which llama.cpp does not load"));
        }
        Ok(Vocabulary { model, pre, tokens, kinds: types, merges: None, scores: None, space_prefix: None, ids })
    }

    pub fn describe(&self, header: &mut Header) {
        let mut put = |key: &str, value| header.put(format!("tokenizer.ggml.{key}"), value);
        put("model", Meta::text(self.model));
        put("pre", Meta::text(self.pre));
        put("tokens", Meta::Texts(self.tokens.clone()));
        put("token_type", Meta::I32s(self.kinds.iter().map(|kind| *kind as i32).collect()));
        if let Some(merges) = &self.merges {
            put("merges", Meta::Texts(merges.clone()));
        }
        if let Some(scores) = &self.scores {
            put("scores", Meta::F32s(scores.clone()));
        }
        if let Some(prefix) = self.space_prefix {
            put("add_space_prefix", Meta::Bool(prefix));
        }
    }
}

fn parse(json: &Table, rows: usize, notes: &mut Vec<String>) -> Result<Vocabulary, String> {
    let model = json.get("model").and_then(Value::as_object).ok_or("has no table 'model'")?;
    match model.get("type").and_then(Value::as_str) {
        Some("BPE") => {}
        // Old files do not say so.
        None if model.contains_key("merges") => {}
        other => return Err(format!("its model is {}; only BPE is known", other.unwrap_or("of no type"))),
    }
    for key in ["dropout", "continuing_subword_prefix", "end_of_word_suffix"] {
        if let Some(value) = model.get(key).filter(|v| !v.is_null() && **v != "" && **v != 0.0) {
            return Err(format!("its model has {key} {value}, which llama.cpp does not know"));
        }
    }
    let flag = |key: &str| model.get(key).and_then(Value::as_bool).unwrap_or(false);
    let (mut ids, mut kinds) = (vocabulary(model)?, HashMap::new());
    add_tokens(json, &mut ids, &mut kinds, notes)?;
    let merges = merges(model, &ids)?;
    match (flag("byte_fallback"), flag("ignore_merges")) {
        (false, ignore_merges) => {
            let pre = byte_level_pre(json, ignore_merges, &merges, notes)?;
            let v = Vocabulary::new("gpt2", pre, ids, kinds, rows)?;
            Ok(Vocabulary { merges: Some(merges.into_iter().map(|(a, b)| format!("{a} {b}")).collect()), ..v })
        }
        (true, false) => {
            if let Some(id) = model.get("unk_token").and_then(Value::as_str).and_then(|unk| ids.get(unk)) {
                kinds.insert(*id, Kind::Unknown);
            }
            for token in (0..=255).map(|byte| format!("<0x{byte:02X}>")) {
                let id = ids.get(&token).ok_or(format!("has no token {token}: byte_fallback needs all 256 bytes"))?;
                kinds.insert(*id, Kind::Byte);
            }
            let space_prefix = Some(sentencepiece_prefix(json, &ids, notes)?);
            let v = Vocabulary::new("llama", "default", ids, kinds, rows)?;
            Ok(Vocabulary { scores: Some(scores(&v, &merges, notes)), space_prefix, ..v })
        }
        (true, true) => Err("its model has ignore_merges and byte_fallback, which llama.cpp does not know together".into()),
    }
}

/// How text is split before the merges, by llama.cpp's name.
fn byte_level_pre(json: &Table, ignore_merges: bool, merges: &[(String, String)], notes: &mut Vec<String>) -> Result<&'static str, String> {
    for part in parts(json.get("normalizer"), "normalizers") {
        if part["type"] != "NFC" {
            return Err(format!("its normalizer has the step {part}; only NFC is known in a byte-level tokenizer"));
        }
        notes.push("tokenizer.json normalizes text to Unicode's NFC, which llama.cpp leaves to the user".into());
    }
    if let Some((a, b)) = merges.iter().find(|(a, b)| a.contains(' ') || b.contains(' ')) {
        return Err(format!("its model merges {a:?} and {b:?}, which holds a space: that is no byte-level tokenizer"));
    }
    let pre = pretokenizer::name(json, ignore_merges)?;
    if pre == "tekken" {
        notes.push(
            "llama.cpp splits text for this tokenizer by a simpler regex: words with combining marks, or with capitals other than A to Z \
             inside them, may be split otherwise"
                .into(),
        );
    }
    Ok(pre)
}

fn vocabulary(model: &Table) -> Result<HashMap<String, u32>, String> {
    let table = model.get("vocab").and_then(Value::as_object).ok_or("its model has no table 'vocab'")?;
    let id = |(token, id): (&String, &Value)| match id.as_u64().and_then(|id| u32::try_from(id).ok()) {
        Some(id) => Ok((token.clone(), id)),
        None => Err(format!("token {token:?} has id {id}, not a whole number")),
    };
    table.iter().map(id).collect()
}

/// Tokens that are found in a text before it is split.
fn add_tokens(json: &Table, ids: &mut HashMap<String, u32>, kinds: &mut HashMap<u32, Kind>, notes: &mut Vec<String>) -> Result<(), String> {
    let mut strips = vec![];
    for token in json.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        let id = token["id"].as_u64().and_then(|id| u32::try_from(id).ok());
        let (Some(content), Some(id)) = (token["content"].as_str(), id) else {
            return Err(format!("'added_tokens' holds {token}, which has no content or no id"));
        };
        if let Some(other) = ids.insert(content.into(), id).filter(|other| *other != id) {
            return Err(format!("token {content:?} has id {other} in the vocabulary and {id} in 'added_tokens'"));
        }
        // As llama.cpp's converter has it: some files do not call special what is.
        let looks_special = content == "<pad>" || content == "<mask>" || content.starts_with("<|") && content.ends_with("|>");
        kinds.insert(id, if token["special"] == true || looks_special { Kind::Control } else { Kind::UserDefined });
        if ["lstrip", "rstrip", "single_word"].iter().any(|key| token[key] == true) {
            strips.push(content);
        }
    }
    if let Some(first) = strips.first() {
        let count = strips.len();
        notes.push(format!(
            "{count} added tokens strip the spaces around them or stand for whole words only ({first:?}), which GGUF cannot say"
        ));
    }
    Ok(())
}

fn merges(model: &Table, ids: &HashMap<String, u32>) -> Result<Vec<(String, String)>, String> {
    let list = model.get("merges").and_then(Value::as_array).ok_or("its model has no list 'merges'")?;
    let pair = |merge: &Value| -> Option<(String, String)> {
        match merge {
            Value::String(text) => text.split_once(' ').map(|(a, b)| (a.into(), b.into())),
            Value::Array(two) if two.len() == 2 => Some((two[0].as_str()?.into(), two[1].as_str()?.into())),
            _ => None,
        }
    };
    let known = |(a, b): &(String, String)| !a.is_empty() && !b.is_empty() && ids.contains_key(&format!("{a}{b}"));
    list.iter().map(|m| pair(m).filter(known).ok_or(format!("its merge {m} is no pair whose whole is in the vocabulary"))).collect()
}

/// Whether a text gets a space before it. Texts must become SentencePiece's characters, whole or cut at spaces.
fn sentencepiece_prefix(json: &Table, ids: &HashMap<String, u32>, notes: &mut Vec<String>) -> Result<bool, String> {
    let (mut prefix, mut replaces) = (false, false);
    for part in parts(json.get("normalizer"), "normalizers") {
        match part["type"].as_str() {
            Some("Prepend") if part["prepend"] == SPACE => prefix = true,
            Some("Replace") if part["pattern"]["String"] == " " && part["content"] == SPACE => replaces = true,
            _ => {
                return Err(format!(
                    "its normalizer has the step {part}; only Prepend and Replace of a space are known with byte_fallback"
                ));
            }
        }
    }
    for part in parts(json.get("pre_tokenizer"), "pretokenizers") {
        if part["type"] != "Metaspace" || part["replacement"] != SPACE || replaces {
            return Err(format!("its pre_tokenizer has the step {part}; only Metaspace is known with byte_fallback"));
        }
        replaces = true;
        let inner = |token: &&String| token.chars().skip(1).any(|c| SPACE.starts_with(c));
        if part.get("split").and_then(Value::as_bool).unwrap_or(true)
            && let Some(token) = ids.keys().find(inner)
        {
            return Err(format!("its pre_tokenizer cuts text before each space, but token {token:?} holds one: llama.cpp does not cut"));
        }
        let scheme = part.get("prepend_scheme").and_then(Value::as_str);
        prefix = match scheme {
            Some("never") => false,
            Some("first" | "always") => true,
            Some(other) => return Err(format!("its pre_tokenizer has prepend_scheme \"{other}\"; always, first and never are known")),
            None => part.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(true),
        };
        if prefix {
            notes.push("tokenizer.json puts no second space before a text that begins with one; llama.cpp does".into());
        }
        if scheme == Some("first") {
            notes.push("tokenizer.json puts a space before the beginning of a text only; llama.cpp also after each special token".into());
        }
    }
    if replaces { Ok(prefix) } else { Err(format!("has byte_fallback, but does not replace spaces by {SPACE:?}")) }
}

/// llama.cpp merges the pair whose whole has the highest score, whatever the pair is; tokenizer.json the pair that comes first
/// in its list. Both agree where the list has every pair and those of one token lie together, as SentencePiece's do.
fn scores(v: &Vocabulary, merges: &[(String, String)], notes: &mut Vec<String>) -> Vec<f32> {
    let mut rank: HashMap<String, usize> = HashMap::new();
    let mut scattered = HashSet::new();
    let mut before = String::new();
    for (i, (a, b)) in merges.iter().enumerate() {
        let whole = format!("{a}{b}");
        // Llama 2 has one score for all runs of spaces; checked up to 79 of them, the order of those merges does not matter.
        if rank.contains_key(&whole) && whole != before && !whole.chars().all(|c| SPACE.starts_with(c)) {
            scattered.insert(whole.clone());
        }
        rank.entry(whole.clone()).or_insert(i);
        before = whole;
    }
    let listed: HashSet<(&str, &str)> = merges.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
    let is_normal = |text: &str| v.ids.get(text).is_some_and(|id| v.kinds[*id as usize] == Kind::Normal);
    let has_unlisted = |token: &&String| {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        is_normal(token) && cuts.into_iter().any(|(a, b)| is_normal(a) && is_normal(b) && !listed.contains(&(a, b)))
    };
    let unlisted = v.tokens.iter().filter(has_unlisted).count();
    if unlisted + scattered.len() > 0 {
        notes.push(format!(
            "llama.cpp may split some words otherwise than tokenizer.json: it merges any two pieces whose whole is a token, and \
             {unlisted} tokens have pairs that 'merges' does not list, {} have theirs at several places",
            scattered.len()
        ));
    }
    let score = |(token, kind): (&String, &Kind)| match kind {
        Kind::Normal => -(rank.get(token).copied().unwrap_or(merges.len()) as f32),
        _ => 0.0,
    };
    v.tokens.iter().zip(&v.kinds).map(score).collect()
}
