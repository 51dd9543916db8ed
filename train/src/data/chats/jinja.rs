//! A chat template as minijinja runs it: what it writes for a conversation, and what it lets be found out about it. It has limits of steps and of text; those
//! of time, memory and depth are its process's (`apart`).

use std::borrow::Cow;
use std::io::{self, Write};
use std::sync::OnceLock;

use chrono::NaiveDateTime;
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::python::{self, REFUSED};
use super::{ChatError, Conversation, Learn, Message, Rendered, Way};
use engine::mutant;

/// Around what a `{% generation %}` block wrote: no text has these (they are no characters).
const OPEN: char = '\u{fdd0}';
const CLOSE: char = '\u{fdd1}';

/// The names under which templates are kept: the usual one, and one for conversations with tools.
pub(super) const DEFAULT: &str = "default";
pub(super) const TOOL_USE: &str = "tool_use";

/// Instructions of a rendering: at least so many. Published templates take 30 to 300 for a message, and some look at every earlier one again.
const STEPS: u64 = 1_000_000;
const STEPS_A_MESSAGE: u64 = 20_000;
/// Tools are gone through field by field.
const STEPS_A_BYTE: u64 = 10;

/// Bytes that a rendering may write, and how many more for each byte of its conversation.
const TEXT: usize = 1 << 20;
const TEXT_A_BYTE: usize = 16;

/// All that a template is made of.
#[derive(Clone)]
pub(super) struct Written {
    /// Where it was found, for people.
    pub from: String,
    pub source: String,
    pub tool_use: Option<String>,
    /// Special tokens as templates call them: ("bos_token", "<s>").
    pub tokens: Vec<(String, String)>,
    /// The added tokens of the tokenizer.
    pub added: Vec<String>,
    /// What templates are told.
    pub now: NaiveDateTime,
}

/// What a template is asked for.
#[derive(Clone, Copy)]
pub(super) enum Ask {
    /// The text; with a place for the next turn?
    Text(bool),
    /// What a model is given to write the next turn; may it think?
    Prompt(bool),
    Examples(Learn),
}

/// What follows an assistant's text: all of it, and how many bytes up to the token that ends the turn.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct End {
    pub all: String,
    pub learned: usize,
}

pub(super) struct Jinja {
    pub from: String,
    env: Environment<'static>,
    tool_use: bool,
    tokens: Vec<(String, Value)>,
    /// Whether it says itself what an assistant writes, with `{% generation %}`.
    pub marked: bool,
    /// Whether it writes a header before an assistant's text, and not when it is asked for a turn.
    pub hides_header: bool,
    /// Whether a list of parts may be in the place of a message's text.
    parts: bool,
    /// What follows an assistant's text, where it could be found out.
    pub end: Option<End>,
    /// Which limit it went over: it is not asked again.
    over: OnceLock<String>,
}

impl Jinja {
    pub fn new(written: &Written) -> Result<Jinja, ChatError> {
        let from = written.from.clone();
        let mut env = python::environment(written.now);
        env.set_fuel(Some(STEPS));
        env.add_filter("__generation__", generation);
        let mut marked = false;
        for (name, source) in [(DEFAULT, Some(&written.source)), (TOOL_USE, written.tool_use.as_ref())] {
            let Some(source) = source else { continue };
            let (source, found) = prepared(&source.replace("\r\n", "\n").replace('\r', "\n"));
            marked |= found;
            let bad =
                |e: Error| ChatError::Template { from: from.clone(), reason: format!("not a template that can be read: {}", why(&e)) };
            env.add_template_owned(name, source).map_err(bad)?;
        }
        let tokens = written.tokens.iter().map(|(name, text)| (name.clone(), Value::from(text.as_str()))).collect();
        let tool_use = written.tool_use.is_some();
        let mut made = Jinja { from, env, tool_use, tokens, marked, hides_header: false, parts: false, end: None, over: OnceLock::new() };
        made.parts = made.about(0, 1).takes_parts();
        made.hides_header = made.about(0, 1).finds_hidden_header();
        made.end = made.about(0, 1).find_end(&written.added);
        match made.over() {
            Some(reason) => Err(ChatError::Template { from: made.from.clone(), reason: reason.into() }),
            None => Ok(made),
        }
    }

    /// `bytes` is about the size of the conversation.
    pub fn answer(&self, conversation: &Conversation, bytes: usize, ask: Ask) -> Result<Vec<Rendered>, ChatError> {
        let about = self.about(bytes, conversation.messages.len());
        let plain = |text: String| vec![Rendered { text, learned: vec![], way: Way::Whole }];
        self.within(match ask {
            Ask::Text(prompt) => about.render(conversation, prompt).map(plain),
            Ask::Prompt(think) => about.prompt(conversation, think).map(plain),
            Ask::Examples(learn) => about.examples(conversation, learn),
        })
    }

    /// Which limit it went over, if it did.
    pub fn over(&self) -> Option<&str> {
        self.over.get().map(String::as_str)
    }

    /// What came out, unless a limit was in its way: then something may be missing in it.
    fn within<T>(&self, result: Result<T, ChatError>) -> Result<T, ChatError> {
        match self.over() {
            Some(reason) => Err(ChatError::Template { from: self.from.clone(), reason: reason.into() }),
            None => result,
        }
    }

    fn about(&self, bytes: usize, messages: usize) -> About<'_> {
        let steps = mutant!(
            "templates-take-any-number-of-steps",
            STEPS.max(STEPS_A_MESSAGE * messages as u64 + STEPS_A_BYTE * bytes as u64),
            u64::MAX / 4
        );
        let mut env = Cow::Borrowed(&self.env);
        // Most conversations are short, and a copy takes longer than they.
        if steps > STEPS {
            env.to_mut().set_fuel(Some(steps));
        }
        let text = mutant!("templates-write-any-text", TEXT + TEXT_A_BYTE * bytes, usize::MAX);
        About { jinja: self, env, steps, text }
    }
}

/// A template on its way through one conversation, and what it may take for that.
pub(super) struct About<'a> {
    pub jinja: &'a Jinja,
    env: Cow<'a, Environment<'static>>,
    steps: u64,
    text: usize,
}

impl About<'_> {
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
        messages.iter().map(|m| if self.jinja.parts { m.value() } else { joined(m).value() }).collect()
    }

    fn run_with(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        generation_prompt: bool,
        marks: bool,
        settings: &[(&str, Value)],
    ) -> Result<String, ChatError> {
        let jinja = self.jinja;
        let name = if tools.is_some() && jinja.tool_use { TOOL_USE } else { DEFAULT };
        let fail = |e: Error| ChatError::Template { from: jinja.from.clone(), reason: why(&e) };
        if let Some(reason) = jinja.over() {
            return Err(ChatError::Template { from: jinja.from.clone(), reason: reason.into() });
        }
        let mut context: Vec<(&str, Value)> = vec![
            ("messages", Value::from_iter(messages.iter().cloned())),
            ("tools", tools.cloned().unwrap_or(Value::from(()))),
            ("documents", Value::from(())),
            ("add_generation_prompt", generation_prompt.into()),
            ("__marks__", marks.into()),
        ];
        context.extend(settings.iter().cloned());
        context.extend(jinja.tokens.iter().map(|(name, text)| (name.as_str(), text.clone())));
        let mut out = Bounded { text: vec![], most: self.text, over: false };
        let written =
            self.env.get_template(name).and_then(|template| template.render_captured_to(Value::from_pairs(context), &mut out).map(drop));
        if out.over {
            let reason = format!("it writes more than {} KiB of text for a conversation that is much shorter", self.text >> 10);
            jinja.over.get_or_init(|| reason);
        }
        written.map_err(|e| {
            if spent(&e) {
                let reason = format!("it takes more than {} steps for a conversation (has it a loop without an end?)", self.steps);
                jinja.over.get_or_init(|| reason);
            }
            fail(e)
        })?;
        String::from_utf8(out.text).map_err(|_| ChatError::Template { from: jinja.from.clone(), reason: "it writes no text".into() })
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

/// Text up to a length.
struct Bounded {
    text: Vec<u8>,
    most: usize,
    over: bool,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > self.most {
            self.over = true;
            return Err(io::Error::other("too much text"));
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether steps were what was missing.
fn spent(error: &Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(e) = next {
        if e.downcast_ref::<Error>().is_some_and(|e| e.kind() == ErrorKind::OutOfFuel) {
            return true;
        }
        next = e.source();
    }
    false
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
