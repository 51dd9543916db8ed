//! A model's own chat template, as transformers' apply_chat_template runs it. It comes with the model, so it may be anything, also a loop without an end:
//! it is rendered in a process of its own (`apart`).

use std::path::Path;

use chrono::{Local, NaiveDateTime};
use serde_json::{Map, Value as Json};

use super::apart::Apart;
use super::jinja::{Ask, DEFAULT, End, Jinja, TOOL_USE, Written};
use super::{ChatError, Conversation, Learn, Rendered};
use crate::input;
use engine::mutant;

/// Special tokens that templates know by name.
const TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Bytes of a template's source. Published ones have up to 20 KiB.
const SOURCE: usize = 128 << 10;

/// A file of a model's folder that is its chat template.
pub const TEMPLATE: &str = "chat_template.jinja";

pub struct ChatTemplate {
    /// Where it was found, for people.
    pub from: String,
    place: Place,
    /// What follows an assistant's text, where it could be found out.
    end: Option<End>,
    /// Whether it asks for the date.
    pub dated: bool,
    /// Whether it knows `enable_thinking`: its model may think before it replies.
    pub thinks: bool,
}

/// Where it is rendered.
enum Place {
    Apart(Apart),
    /// In this process, where its program is another than kiln's and cannot be started to render: a test's, or of one who uses the library.
    Here(Box<Jinja>),
}

impl ChatTemplate {
    /// The template of a model's folder: chat_template.jinja, or `chat_template` of tokenizer_config.json. `added` are the added tokens of its
    /// tokenizer. `now` is the time that templates are told; by default the clock's.
    pub fn of_folder(folder: &Path, added: &[String], now: Option<NaiveDateTime>) -> Result<ChatTemplate, ChatError> {
        let path = folder.join("tokenizer_config.json");
        let config = read_config(&path)?;
        let tokens = tokens(folder, &config)?;
        let file = folder.join(TEMPLATE);
        let (sources, from) = match file.exists() {
            true => (own_files(folder, &file)?, file),
            false => (of_config(folder, &path, &config)?, path.clone()),
        };
        let source = |name: &str| sources.iter().find(|(n, _)| n == name).map(|(_, text)| text.as_str());
        let Some(default) = source(DEFAULT) else {
            let names: Vec<&String> = sources.iter().map(|(name, _)| name).collect();
            return Err(ChatError::Config { path, reason: format!("of its chat templates {names:?}, none is called \"default\"") });
        };
        ChatTemplate::new(default, source(TOOL_USE), &from.display().to_string(), tokens, added, now)
    }

    /// A text of Jinja that is called `from`, with the special tokens of a model's folder.
    pub fn of_text(
        source: &str,
        from: &str,
        folder: Option<&Path>,
        added: &[String],
        now: Option<NaiveDateTime>,
    ) -> Result<ChatTemplate, ChatError> {
        let tokens = folder.map_or(Ok(vec![]), |folder| tokens(folder, &read_config(&folder.join("tokenizer_config.json"))?))?;
        ChatTemplate::new(source, None, from, tokens, added, now)
    }

    /// `tokens` are special tokens as templates call them: ("bos_token", "<s>").
    pub fn new(
        source: &str,
        tool_use: Option<&str>,
        from: &str,
        tokens: Vec<(String, String)>,
        added: &[String],
        now: Option<NaiveDateTime>,
    ) -> Result<ChatTemplate, ChatError> {
        let sources = || [Some(source), tool_use].into_iter().flatten();
        if let Some(long) = sources().find(|text| text.len() > mutant!("templates-have-any-length", SOURCE, usize::MAX)) {
            return Err(too_long(from, long.len() as u64));
        }
        let written = Written {
            from: from.into(),
            source: source.into(),
            tool_use: tool_use.map(str::to_owned),
            tokens,
            added: added.to_vec(),
            now: now.unwrap_or_else(|| Local::now().naive_local()),
        };
        let (place, end) = if crate::apart::possible() {
            let (apart, end) = Apart::new(&written)?;
            (Place::Apart(apart), end)
        } else {
            let jinja = Jinja::new(&written)?;
            let end = jinja.end.clone();
            (Place::Here(Box::new(jinja)), end)
        };
        let names = |word: &str| sources().any(|text| text.contains(word));
        Ok(ChatTemplate { from: from.into(), place, end, dated: names("strftime_now"), thinks: names("enable_thinking") })
    }

    /// The same text as apply_chat_template(conversation, tools, add_generation_prompt, tokenize=False).
    pub fn render(&self, conversation: &Conversation, generation_prompt: bool) -> Result<String, ChatError> {
        self.text(conversation, Ask::Text(generation_prompt))
    }

    /// What a model is given to write the next turn. A model that may think before it replies is told that it need not (`enable_thinking`), unless
    /// it is to `think`.
    pub fn prompt(&self, conversation: &Conversation, think: bool) -> Result<String, ChatError> {
        self.text(conversation, Ask::Prompt(think))
    }

    /// One example, or one for each turn that is learned where the template needs that (`Way::Split`). None where there is nothing to learn.
    pub fn examples(&self, conversation: &Conversation, learn: Learn) -> Result<Vec<Rendered>, ChatError> {
        self.answer(conversation, Ask::Examples(learn))
    }

    /// What a turn of the assistant ends with, which is learned. None where the template puts nothing behind its text: then no end is learned.
    pub fn end_of_turn(&self) -> Option<&str> {
        self.end.as_ref().map(|end| &end.all[..end.learned]).filter(|end| !end.is_empty())
    }

    fn text(&self, conversation: &Conversation, ask: Ask) -> Result<String, ChatError> {
        Ok(self.answer(conversation, ask)?.pop().map(|one| one.text).unwrap_or_default())
    }

    fn answer(&self, conversation: &Conversation, ask: Ask) -> Result<Vec<Rendered>, ChatError> {
        match &self.place {
            Place::Apart(apart) => apart.answer(conversation, ask),
            Place::Here(jinja) => jinja.answer(conversation, super::apart::size(conversation), ask),
        }
    }
}

fn too_long(from: &str, bytes: u64) -> ChatError {
    let reason = format!("its source has {} KiB, and {} KiB is the most that is read", bytes >> 10, SOURCE >> 10);
    ChatError::Template { from: from.into(), reason }
}

fn read_config(path: &Path) -> Result<Map<String, Json>, ChatError> {
    let read = super::super::special::read_object(path).map_err(|e| ChatError::Special(Box::new(e)));
    Ok(read?.unwrap_or_default())
}

/// Special tokens by the names that templates have for them: ("bos_token", "<s>").
fn tokens(folder: &Path, config: &Map<String, Json>) -> Result<Vec<(String, String)>, ChatError> {
    let older = read_config(&folder.join("special_tokens_map.json"))?;
    let mut tokens = vec![];
    for name in TOKENS {
        let text = match config.get(name).or_else(|| older.get(name)) {
            None | Some(Json::Null) => continue,
            Some(Json::String(text)) => text.clone(),
            // As an object, with how the token is matched.
            Some(value) => match value.get("content").and_then(Json::as_str) {
                Some(text) => text.into(),
                None => {
                    let reason = format!("its {name} is {value}, neither a string nor an object with \"content\"");
                    return Err(ChatError::Config { path: folder.join("tokenizer_config.json"), reason });
                }
            },
        };
        tokens.push((name.to_string(), text));
    }
    Ok(tokens)
}

type Sources = Vec<(String, String)>;

/// Templates in files of their own.
fn own_files(folder: &Path, file: &Path) -> Result<Sources, ChatError> {
    let read = |path: &Path| {
        let length = input::length(path).map_err(ChatError::io("read", path))?;
        if length > SOURCE as u64 {
            return Err(too_long(&path.display().to_string(), length));
        }
        input::read_to_string(path).map_err(ChatError::io("read", path))
    };
    let mut sources = vec![(DEFAULT.into(), read(file)?)];
    let other = folder.join("additional_chat_templates/tool_use.jinja");
    if other.exists() {
        sources.push((TOOL_USE.into(), read(&other)?));
    }
    Ok(sources)
}

/// Templates in tokenizer_config.json: one, or a list with names.
fn of_config(folder: &Path, path: &Path, config: &Map<String, Json>) -> Result<Sources, ChatError> {
    let bad = |reason: &str| Err(ChatError::Config { path: path.to_owned(), reason: reason.into() });
    match config.get("chat_template") {
        None | Some(Json::Null) => Err(ChatError::NoTemplate { folder: folder.to_owned() }),
        Some(Json::String(text)) => Ok(vec![(DEFAULT.into(), text.clone())]),
        Some(Json::Array(list)) => {
            let mut sources = vec![];
            for one in list {
                match (one.get("name").and_then(Json::as_str), one.get("template").and_then(Json::as_str)) {
                    (Some(name), Some(text)) => sources.push((name.into(), text.into())),
                    _ => return bad("an entry of its chat_template has no \"name\" or no \"template\""),
                }
            }
            Ok(sources)
        }
        Some(_) => bad("its chat_template is neither a string nor a list"),
    }
}
