//! The tokenizer's keys: its vocabulary, which ids begin, end and fill a sequence, and what is added to a text.

use super::file::{Header, Meta};
use super::vocabulary::Vocabulary;
use super::{GgufError, Model, Table};
use serde_json::Value;

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
    let named = Named { model, vocabulary: &v };
    let (first, last) = match model.tokenizer {
        Tokenizer::Json(json) => named.added(json)?,
        Tokenizer::Bytes => (None, None),
    };
    let bos = same("bos", first, named.id("bos")?, &v)?;
    let eos = same("eos", last, named.id("eos")?, &v)?;
    // Without one llama.cpp takes id 11 (or 2), and stops at it.
    let Some(eos) = eos else {
        return Err(GgufError::bad(
            TOKENIZER_CONFIG,
            "names no 'eos_token', and neither do generation_config.json and config.json; GGUF needs one",
        ));
    };
    let mut put = |key: &str, value| header.put(format!("tokenizer.ggml.{key}"), value);
    for (key, id) in [("bos", bos), ("eos", Some(eos)), ("unknown", named.id("unk")?), ("padding", named.id("pad")?)] {
        if let Some(id) = id {
            put(&format!("{key}_token_id"), Meta::U32(id));
        }
    }
    // GGUF has room for two further tokens at which a reply ends.
    let ends: Vec<u32> =
        named.ends()?.into_iter().filter(|id| *id != eos && !KNOWN_ENDS.contains(&v.tokens[*id as usize].as_str())).collect();
    for (key, id) in ["eot", "eom"].iter().zip(&ends) {
        put(&format!("{key}_token_id"), Meta::U32(*id));
    }
    if let Some(id) = ends.get(2) {
        notes.push(format!(
            "generation_config.json names {} tokens that end a reply, more than GGUF has room for: {id} is left out",
            ends.len() + 1
        ));
    }
    put("add_bos_token", Meta::Bool(first.is_some()));
    put("add_eos_token", Meta::Bool(last.is_some()));
    if let Some(template) = model.chat_template {
        header.put("tokenizer.chat_template", Meta::text(template));
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

struct Named<'a> {
    model: &'a Model<'a>,
    vocabulary: &'a Vocabulary,
}

impl Named<'_> {
    /// The id for a role: bos, eos, unk or pad.
    fn id(&self, role: &str) -> Result<Option<u32>, GgufError> {
        let token = self.model.tokenizer_config.and_then(|t| t.get(&format!("{role}_token"))).filter(|v| !v.is_null());
        if let Some(token) = token {
            let name = token.get("content").unwrap_or(token).as_str();
            let id = name.and_then(|name| self.vocabulary.ids.get(name));
            return id
                .map(|id| Some(*id))
                .ok_or_else(|| GgufError::bad(TOKENIZER_CONFIG, format!("its {role}_token is {token}, which {TOKENIZER} has not")));
        }
        let key = format!("{role}_token_id");
        for (file, table) in self.tables() {
            // Some files write -1 for none.
            let value = table.and_then(|t| t.get(&key)).filter(|v| !v.is_null() && **v != -1);
            let first = value.and_then(|v| v.as_array().map_or(Some(v), |all| all.first()));
            if let Some(value) = first {
                return self.checked(file, &key, value).map(Some);
            }
        }
        match self.model.end.filter(|_| role == "eos") {
            Some(end) => self.checked(TOKENIZER, "the token that ends a document", &end.into()).map(Some),
            None => Ok(None),
        }
    }

    fn tables(&self) -> [(&'static str, Option<&Table>); 2] {
        [("generation_config.json", self.model.generation_config), ("config.json", Some(self.model.config))]
    }

    /// All ids at which a reply ends.
    fn ends(&self) -> Result<Vec<u32>, GgufError> {
        let (file, table) = self.tables()[0];
        let listed = table.and_then(|t| t.get("eos_token_id")).and_then(Value::as_array);
        listed.into_iter().flatten().map(|value| self.checked(file, "eos_token_id", value)).collect()
    }

    fn checked(&self, file: &'static str, key: &str, value: &Value) -> Result<u32, GgufError> {
        let rows = self.vocabulary.tokens.len();
        let id = value.as_u64().filter(|id| (*id as usize) < rows);
        id.map(|id| id as u32).ok_or_else(|| GgufError::bad(file, format!("'{key}' is {value}; ids go up to {}", rows - 1)))
    }

    /// The tokens that are put before and behind a text. tokenizer.json says so, or where it is silent tokenizer_config.json.
    fn added(&self, json: &Table) -> Result<(Option<u32>, Option<u32>), GgufError> {
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
        let id = |role: &str| if asked(role) { self.id(role) } else { Ok(None) };
        Ok((id("bos")?, id("eos")?))
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
