//! The tokenizer's keys: its vocabulary, which ids begin, end and fill a sequence, and what is added to a text.

use super::file::{Header, Meta};
use super::folder::BYTE_END;
use super::vocabulary::Vocabulary;
use super::{GgufError, Model, Table};
use crate::data::special;
use serde_json::Value;
use std::collections::BTreeMap;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Text to token ids.
pub enum Tokenizer<'a> {
    /// A tokenizer.json.
    Json(&'a Table),
    /// Every byte is a token.
    Bytes,
}

/// Tokens that llama.cpp ends a reply at wherever a vocabulary has them.
const KNOWN_ENDS: [&str; 11] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<eos>",
];

pub fn describe(model: &Model, rows: usize, header: &mut Header, notes: &mut Vec<String>) -> Result<(), GgufError> {
    let v = match model.tokenizer {
        Tokenizer::Json(json) => Vocabulary::parse(json, rows, notes)?,
        Tokenizer::Bytes => Vocabulary::bytes(rows)?,
    };
    v.describe(header);
    let named = Named::new(model, &v, notes)?;
    let (first, last) = match model.tokenizer {
        Tokenizer::Json(json) => named.before_and_behind(json)?,
        Tokenizer::Bytes => (None, None),
    };
    let bos = same("bos", first, named.bos, &v)?;
    let eos = same("eos", last, named.ends.first().copied(), &v)?;
    // Without one llama.cpp takes id 11 (or 2), and stops at it.
    let Some(eos) = eos else {
        return Err(GgufError::bad(
            TOKENIZER_CONFIG,
            "names no added token as 'eos_token', and neither do generation_config.json and config.json; GGUF needs one",
        ));
    };
    let mut put = |key: &str, value| header.put(format!("tokenizer.ggml.{key}"), value);
    for (key, id) in [("bos", bos), ("eos", Some(eos)), ("unknown", named.unknown()?), ("padding", named.pad)] {
        if let Some(id) = id {
            put(&format!("{key}_token_id"), Meta::U32(id));
        }
    }
    // GGUF has room for two further tokens at which a reply ends.
    let further = |id: &u32| *id != eos && !KNOWN_ENDS.contains(&v.tokens[*id as usize].as_str());
    let ends: Vec<u32> = named.ends.iter().copied().filter(further).collect();
    for (key, id) in ["eot", "eom"].iter().zip(&ends) {
        put(&format!("{key}_token_id"), Meta::U32(*id));
    }
    if let Some(id) = ends.get(2) {
        notes.push(format!(
            "the model's files name {} tokens that end a reply, more than GGUF has room for: {id} is left out",
            ends.len() + 1
        ));
    }
    put("add_bos_token", Meta::Bool(first.is_some()));
    put("add_eos_token", Meta::Bool(last.is_some()));
    if let Some(template) = model.chat_template {
        header.put(engine::mutant!("gguf-without-chat-template", "tokenizer.chat_template", "tokenizer.template"), Meta::text(template));
    }
    Ok(())
}

/// What is added to a text must be the token that is named, if one is.
fn same(role: &str, added: Option<u32>, named: Option<u32>, v: &Vocabulary) -> Result<Option<u32>, GgufError> {
    match (added, named) {
        (Some(added), Some(named)) if added != named => {
            let [added, named] = [added, named].map(|id| &v.tokens[id as usize]);
            Err(GgufError::bad(
                TOKENIZER,
                format!("its post_processor adds {added:?}, but the {role} token is {named:?}: GGUF can add only that"),
            ))
        }
        _ => Ok(added.or(named)),
    }
}

/// The tokens that the files name for a role, by the rule that kiln itself reads them by.
struct Named<'a> {
    model: &'a Model<'a>,
    vocabulary: &'a Vocabulary,
    bos: Option<u32>,
    ends: Vec<u32>,
    pad: Option<u32>,
}

impl<'a> Named<'a> {
    fn new(model: &'a Model<'a>, vocabulary: &'a Vocabulary, notes: &mut Vec<String>) -> Result<Named<'a>, GgufError> {
        let added = match model.tokenizer {
            Tokenizer::Json(json) => added_tokens(json),
            Tokenizer::Bytes => BTreeMap::from([(BYTE_END, "\0".into())]),
        };
        let tables = [model.generation_config, model.tokenizer_config, Some(model.config)];
        let mut passed_over = vec![];
        let mut all = |role: &'static str| -> Result<Vec<u32>, GgufError> {
            let tokens =
                special::by_files(&added, tables, role, &mut passed_over).map_err(|(file, problem)| GgufError::bad(file, problem))?;
            Ok(tokens.into_iter().map(|token| token.id).collect())
        };
        let (bos, mut ends, pad) = (all("bos")?.first().copied(), all("eos")?, all("pad")?.first().copied());
        notes.extend(passed_over.into_iter().map(|(_, why)| format!("not taken: {why}")));
        let rows = vocabulary.tokens.len();
        match model.end.filter(|_| ends.is_empty()) {
            Some(end) if end as usize >= rows => {
                return Err(GgufError::bad(TOKENIZER, format!("the token that ends a document is {end}; ids go up to {}", rows - 1)));
            }
            end => ends.extend(end),
        }
        Ok(Named { model, vocabulary, bos, ends, pad })
    }

    /// The token for what is in no vocabulary, which may be an ordinary one.
    fn unknown(&self) -> Result<Option<u32>, GgufError> {
        let token = self.model.tokenizer_config.and_then(|t| t.get("unk_token")).filter(|v| !v.is_null());
        let Some(token) = token else { return Ok(None) };
        let id = token.get("content").unwrap_or(token).as_str().and_then(|name| self.vocabulary.ids.get(name));
        let missing = || GgufError::bad(TOKENIZER_CONFIG, format!("its unk_token is {token}, which {TOKENIZER} has not"));
        id.map(|id| Some(*id)).ok_or_else(missing)
    }

    /// The tokens that are put before and behind a text. tokenizer.json says so, or where it is silent tokenizer_config.json.
    fn before_and_behind(&self, json: &Table) -> Result<(Option<u32>, Option<u32>), GgufError> {
        let bad = |problem| GgufError::bad(TOKENIZER, problem);
        let processors = super::pretokenizer::parts(json.get("post_processor"), "processors");
        let mut added = (None, None);
        for p in &processors {
            match p["type"].as_str() {
                Some("ByteLevel") => {}
                Some("TemplateProcessing") => added = self.template(p).map_err(bad)?,
                _ => return Err(bad(format!("its post_processor has the step {p}; ByteLevel and TemplateProcessing are known"))),
            }
        }
        if !processors.is_empty() {
            return Ok(added);
        }
        let asked = |role: &str| self.model.tokenizer_config.and_then(|t| t.get(&format!("add_{role}_token"))) == Some(&Value::Bool(true));
        Ok((self.bos.filter(|_| asked("bos")), self.ends.first().copied().filter(|_| asked("eos"))))
    }

    /// At most one token before a text and one behind it.
    fn template(&self, processor: &Value) -> Result<(Option<u32>, Option<u32>), String> {
        let single = processor["single"].as_array().map(Vec::as_slice).unwrap_or_default();
        let refuse =
            || format!("its post_processor makes {} of a text; GGUF has room for one token before it and one behind", processor["single"]);
        let special = |piece: &Value| {
            let name = piece["SpecialToken"]["id"].as_str().ok_or_else(refuse)?;
            self.vocabulary.ids.get(name).copied().ok_or(format!("its post_processor adds {name:?}, which is no token"))
        };
        let is_text = |piece: &Value| piece["Sequence"]["id"] == "A";
        Ok(match single {
            [text] if is_text(text) => (None, None),
            [first, text] if is_text(text) => (Some(special(first)?), None),
            [text, last] if is_text(text) => (None, Some(special(last)?)),
            [first, text, last] if is_text(text) => (Some(special(first)?), Some(special(last)?)),
            _ => return Err(refuse()),
        })
    }
}

fn added_tokens(json: &Table) -> BTreeMap<u32, String> {
    let token = |t: &Value| Some((u32::try_from(t["id"].as_u64()?).ok()?, t["content"].as_str()?.to_string()));
    json.get("added_tokens").and_then(Value::as_array).into_iter().flatten().filter_map(token).collect()
}
