//! A model's own chat template, as transformers' apply_chat_template runs it.

use std::path::Path;

use chrono::{Local, NaiveDateTime};
use minijinja::{Environment, Error, State, Value};
use serde_json::{Map, Value as Json};

use super::python::{self, REFUSED};
use super::{ChatError, Conversation, Message};
use crate::input;

/// Around what a `{% generation %}` block wrote: no text has these (they are no characters).
const OPEN: char = '\u{fdd0}';
const CLOSE: char = '\u{fdd1}';

/// Special tokens that templates know by name.
const TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The names under which templates are kept: the usual one, and one for conversations with tools.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

pub struct ChatTemplate {
    /// Where it was found, for people.
    pub from: String,
    env: Environment<'static>,
    tool_use: bool,
    /// What it is told besides the conversation: special tokens, and settings of its own.
    variables: Vec<(String, Value)>,
    /// Whether it says itself what an assistant writes, with `{% generation %}`.
    pub(super) marked: bool,
    /// Whether it writes a header before an assistant's text, and not when it is asked for a turn.
    pub(super) hides_header: bool,
    /// Whether a list of parts may be in the place of a message's text.
    parts: bool,
    /// What follows an assistant's text, where it could be found out.
    pub(super) end: Option<End>,
    /// Whether it asks for the date.
    pub dated: bool,
    /// Whether it knows `enable_thinking`: its model may think before it replies.
    pub thinks: bool,
}

/// What follows an assistant's text: all of it, and how many bytes up to the token that ends the turn.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct End {
    pub all: String,
    pub learned: usize,
}

impl ChatTemplate {
    /// The template of a model's folder: chat_template.jinja, or `chat_template` of tokenizer_config.json. `added` are the added tokens of its
    /// tokenizer. `now` is the time that templates are told; by default the clock's.
    pub fn of_folder(folder: &Path, added: &[String], now: Option<NaiveDateTime>) -> Result<ChatTemplate, ChatError> {
        let path = folder.join("tokenizer_config.json");
        let config = read_config(&path)?;
        let tokens = tokens(folder, &config)?;
        let file = folder.join("chat_template.jinja");
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
        let mut env = python::environment(now.unwrap_or_else(|| Local::now().naive_local()));
        env.add_filter("__generation__", generation);
        let mut marked = false;
        for (name, source) in [(DEFAULT, Some(source)), (TOOL_USE, tool_use)] {
            let Some(source) = source else { continue };
            let (source, found) = prepared(&source.replace("\r\n", "\n").replace('\r', "\n"));
            marked |= found;
            let bad = |e: Error| ChatError::Template { from: from.into(), reason: format!("not a template that can be read: {}", why(&e)) };
            env.add_template_owned(name, source).map_err(bad)?;
        }
        let variables = tokens.into_iter().map(|(name, text)| (name, Value::from(text))).collect();
        let names = |word: &str| [Some(source), tool_use].into_iter().flatten().any(|text| text.contains(word));
        let mut template = ChatTemplate {
            from: from.into(),
            env,
            tool_use: tool_use.is_some(),
            variables,
            marked,
            hides_header: false,
            parts: false,
            end: None,
            dated: names("strftime_now"),
            thinks: names("enable_thinking"),
        };
        template.parts = template.takes_parts();
        template.hides_header = template.finds_hidden_header();
        template.end = template.find_end(added);
        Ok(template)
    }

    /// With a setting of the template's own, such as enable_thinking = false.
    pub fn with(mut self, name: &str, value: Value) -> ChatTemplate {
        self.variables.push((name.into(), value));
        self
    }

    /// The same text as apply_chat_template(conversation, tools, add_generation_prompt, tokenize=False).
    pub fn render(&self, conversation: &Conversation, generation_prompt: bool) -> Result<String, ChatError> {
        self.run(&conversation.messages, conversation.tools.as_ref(), generation_prompt, false)
    }

    /// What a model is given to write the next turn. A model that may think before it replies is told that it need not (`enable_thinking`), unless
    /// it is to `think`.
    pub fn prompt(&self, conversation: &Conversation, think: bool) -> Result<String, ChatError> {
        let settings = [("enable_thinking", Value::from(false))];
        let own: Vec<Value> = self.values(&conversation.messages);
        self.run_with(&own, conversation.tools.as_ref(), true, false, if think { &[] } else { &settings })
    }

    /// The same of some messages.
    pub(super) fn part(&self, conversation: &Conversation, messages: &[Message], generation_prompt: bool) -> Result<String, ChatError> {
        self.run(messages, conversation.tools.as_ref(), generation_prompt, false)
    }

    /// The text and what `{% generation %}` blocks wrote in it; None where marks changed what the template does.
    pub(super) fn marks(&self, conversation: &Conversation, messages: &[Message]) -> Result<Option<Marks>, ChatError> {
        let marked = self.run(messages, conversation.tools.as_ref(), false, true)?;
        let (mut text, mut ranges, mut open) = (String::with_capacity(marked.len()), vec![], vec![]);
        for c in marked.chars() {
            match c {
                OPEN => open.push(text.len()),
                CLOSE => match open.pop() {
                    // Blocks inside of blocks are part of the outer one.
                    Some(begin) if open.is_empty() => ranges.push(begin..text.len()),
                    Some(_) => {}
                    None => return Ok(None),
                },
                c => text.push(c),
            }
        }
        let plain = self.part(conversation, messages, false)?;
        Ok((open.is_empty() && text == plain).then_some((text, ranges)))
    }

    fn run(&self, messages: &[Message], tools: Option<&Value>, generation_prompt: bool, marks: bool) -> Result<String, ChatError> {
        self.run_with(&self.values(messages), tools, generation_prompt, marks, &[])
    }

    fn values(&self, messages: &[Message]) -> Vec<Value> {
        messages.iter().map(|m| if self.parts { m.value() } else { joined(m).value() }).collect()
    }

    fn run_with(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        generation_prompt: bool,
        marks: bool,
        settings: &[(&str, Value)],
    ) -> Result<String, ChatError> {
        let name = if tools.is_some() && self.tool_use { TOOL_USE } else { DEFAULT };
        let fail = |e: Error| ChatError::Template { from: self.from.clone(), reason: why(&e) };
        let mut context: Vec<(&str, Value)> = vec![
            ("messages", Value::from_iter(messages.iter().cloned())),
            ("tools", tools.cloned().unwrap_or(Value::from(()))),
            ("documents", Value::from(())),
            ("add_generation_prompt", generation_prompt.into()),
            ("__marks__", marks.into()),
        ];
        context.extend(settings.iter().cloned());
        context.extend(self.variables.iter().map(|(name, text)| (name.as_str(), text.clone())));
        let template = self.env.get_template(name).map_err(fail)?;
        template.render(Value::from_pairs(context)).map_err(fail)
    }

    /// Templates that know texts only would print a list of parts as Python does.
    fn takes_parts(&self) -> bool {
        let part = Value::from_pairs([("type", Value::from("text")), ("text", Value::from("PROBE"))]);
        let message = Message { role: "user".into(), content: Value::from_iter([part]), more: vec![] };
        let text = self.run_with(&[message.value()], None, true, false, &[]);
        text.is_ok_and(|text| text.contains("PROBE") && !text.contains("'PROBE'") && !text.contains("\"PROBE\""))
    }

    fn finds_hidden_header(&self) -> bool {
        let question = Message::new("user", "Q");
        let asked = |prompt: bool| self.run(std::slice::from_ref(&question), None, prompt, false).ok();
        let (Some(prompt), Some(plain)) = (asked(true), asked(false)) else { return false };
        let text = self.run(&[question, Message::new("assistant", "first 1")], None, false, false).unwrap_or_default();
        let gap = text.strip_prefix(&prompt).and_then(|rest| rest.split_once("first 1")).map_or("", |(gap, _)| gap);
        prompt == plain && !gap.trim().is_empty()
    }

    /// What follows an assistant's text, by two that differ.
    fn find_end(&self, added: &[String]) -> Option<End> {
        let behind = |reply: &str| {
            let text = self.run(&[Message::new("user", "Q"), Message::new("assistant", reply)], None, false, false).ok()?;
            text.rsplit_once(reply).map(|(_, behind)| behind.to_string())
        };
        let all = behind("first 1").filter(|all| behind("second 2").as_ref() == Some(all))?;
        let at = |token: &String| all.find(token.as_str()).map(|at| (at, std::cmp::Reverse(token.len())));
        let first = added.iter().filter(|token| !token.is_empty()).filter_map(at).min();
        // Without such a token all of it ends the turn, less white space behind other text.
        let visible = Some(all.trim_end().len()).filter(|n| *n > 0).unwrap_or(all.len());
        let learned = first.map_or(visible, |(at, length)| at + length.0);
        Some(End { all, learned })
    }

    /// What a turn of the assistant ends with, which is learned. None where the template puts nothing behind its text: then no end is learned.
    pub fn end_of_turn(&self) -> Option<&str> {
        self.end.as_ref().map(|end| &end.all[..end.learned]).filter(|end| !end.is_empty())
    }
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
    let read = |path: &Path| input::read_to_string(path).map_err(ChatError::io("read", path));
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

pub(super) type Marks = (String, Vec<std::ops::Range<usize>>);

/// Bytes of the longest common beginning, whole characters.
pub(super) fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices().zip(b.chars()).find(|((_, a), b)| a != b).map_or(a.len().min(b.len()), |((at, _), _)| at)
}

pub(super) fn common_suffix(a: &str, b: &str) -> usize {
    let same = a.chars().rev().zip(b.chars().rev()).take_while(|(a, b)| a == b);
    same.map(|(c, _)| c.len_utf8()).sum()
}

/// Parts that are all text become one text.
pub(super) fn joined(message: &Message) -> Message {
    let parts = match message.content.kind() {
        minijinja::value::ValueKind::Seq => message.content.try_iter().map(Vec::from_iter).unwrap_or_default(),
        _ => return message.clone(),
    };
    let texts = parts.iter().map(|part| part.get_attr("text").ok().and_then(|text| text.as_str().map(str::to_owned)));
    match texts.collect::<Option<Vec<String>>>() {
        Some(texts) => Message { content: texts.concat().into(), ..message.clone() },
        None => message.clone(),
    }
}

/// A template as minijinja reads it, and whether it has `{% generation %}` blocks. Those become filters of what they write, with a scope of their
/// own as transformers has it. A line's end behind `{% raw %}` is doubled: Jinja2 keeps it, and minijinja takes it for the tag's.
fn prepared(source: &str) -> (String, bool) {
    let (mut out, mut rest, mut found) = (String::with_capacity(source.len()), source, false);
    while let Some(at) = rest.find("{").filter(|at| at + 1 < rest.len()) {
        let close = match rest.as_bytes()[at + 1] {
            b'#' => "#}",
            b'{' => "}}",
            b'%' => "%}",
            _ => "",
        };
        let Some(length) = rest[at + 1..].find(close).map(|n| 1 + n + close.len()).filter(|_| !close.is_empty()) else {
            out.push_str(&rest[..=at]);
            rest = &rest[at + 1..];
            continue;
        };
        let (tag, after) = rest[at..].split_at(length);
        out.push_str(&rest[..at]);
        rest = after;
        let inner = if close == "%}" { &tag[2..length - 2] } else { "" };
        let word = inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        match word {
            "generation" | "endgeneration" => {
                found = true;
                let tags = if word == "generation" { "filter __generation__ %}{% with" } else { "endwith %}{% endfilter" };
                out.push_str(&["{%", &inner.replacen(word, &format!(" {tags} "), 1), "%}"].concat());
            }
            "raw" => {
                out.push_str(tag);
                out.push_str(if !inner.ends_with('-') && rest.starts_with('\n') { "\n" } else { "" });
                let text = rest.find("endraw").map_or(rest, |end| rest[..end].rfind("{%").map_or("", |tag| &rest[..tag]));
                out.push_str(text);
                rest = &rest[text.len()..];
            }
            _ => out.push_str(tag),
        }
    }
    out.push_str(rest);
    (out, found)
}

fn generation(state: &mut State, text: &str) -> String {
    match state.lookup("__marks__").is_some_and(|marks| marks.is_true()) {
        true => format!("{OPEN}{text}{CLOSE}"),
        false => text.into(),
    }
}

/// What went wrong, in a sentence.
fn why(error: &Error) -> String {
    let mut last: &dyn std::error::Error = error;
    while let Some(source) = last.source() {
        last = source;
    }
    let innermost = last.downcast_ref::<Error>().unwrap_or(error);
    let detail = innermost.detail().map_or_else(|| innermost.kind().to_string(), str::to_owned);
    match (detail.strip_prefix(REFUSED), innermost.line()) {
        (Some(message), _) => format!("it refuses the conversation: {message}"),
        (None, Some(line)) => format!("{detail} (line {line} of the template)"),
        (None, None) => detail,
    }
}
