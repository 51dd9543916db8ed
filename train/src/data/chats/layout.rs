//! Rows of data sets as conversations.

use std::fmt;

use minijinja::Value;
use minijinja::value::ValueKind;

use super::{Conversation, Message, shown};

/// Which fields a row has, and what they mean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// A list of turns: `messages` with `role` and `content`, or ShareGPT's `conversations` with `from` and `value`.
    Turns { list: String, role: String, content: String },
    /// `instruction`, `input` and `output`; perhaps `system` and `history`.
    Alpaca,
    /// Two fields of text.
    Pair { prompt: String, reply: String },
}

/// Fields that hold a list of turns, by the names that data sets have for them.
const LISTS: [&str; 4] = ["messages", "conversations", "conversation", "dialogue"];
/// What the turns' own fields are called.
const TURNS: [(&str, &str); 2] = [("role", "content"), ("from", "value")];
/// Fields that are a prompt and its reply.
const PAIRS: [(&str, &str); 8] = [
    ("prompt", "reply"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "response"),
    ("instruction", "completion"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
];
/// Roles as ShareGPT and others call them.
const ROLES: [(&str, &str); 11] = [
    ("human", "user"),
    ("User", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("model", "assistant"),
    ("bot", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("Assistant", "assistant"),
    ("observation", "tool"),
    ("function_response", "tool"),
];
/// Roles that are called what they are.
const KNOWN: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "function", "ipython"];

/// The most turns of a conversation: each is rendered behind all that come before it.
const MOST_TURNS: usize = 4096;

impl Layout {
    pub fn turns(list: &str, role: &str, content: &str) -> Layout {
        Layout::Turns { list: list.into(), role: role.into(), content: content.into() }
    }

    pub fn pair(prompt: &str, reply: &str) -> Layout {
        Layout::Pair { prompt: prompt.into(), reply: reply.into() }
    }

    /// "messages", "sharegpt", "alpaca", or two fields as "prompt,reply".
    pub fn named(name: &str) -> Option<Layout> {
        match name {
            "messages" => Some(Layout::turns("messages", "role", "content")),
            "sharegpt" => Some(Layout::turns("conversations", "from", "value")),
            "alpaca" => Some(Layout::Alpaca),
            _ => name.split_once(',').map(|(prompt, reply)| Layout::pair(prompt.trim(), reply.trim())),
        }
    }

    /// What a first row looks like.
    pub fn find(row: &Value) -> Result<Layout, String> {
        let names = fields(row);
        let has = |name: &str| names.iter().any(|n| n == name);
        if let Some(list) = LISTS.into_iter().find(|name| has(name)) {
            let turns = turns_of(row, list)?;
            let first = turns.first().ok_or_else(|| format!("the field {list:?} is an empty list: its layout cannot be found out"))?;
            let keys = fields(first);
            let own = TURNS.iter().find(|(role, _)| keys.iter().any(|key| key == role));
            return match own {
                Some((role, content)) => Ok(Layout::turns(list, role, content)),
                None => Err(format!(
                    "the turns in {list:?} have the fields {keys:?}, neither \"role\" and \"content\" nor \"from\" and \"value\""
                )),
            };
        }
        if has("instruction") && has("output") {
            return Ok(Layout::Alpaca);
        }
        if let Some((prompt, reply)) = PAIRS.iter().find(|(prompt, reply)| has(prompt) && has(reply)) {
            return Ok(Layout::pair(prompt, reply));
        }
        let way_out = "name the fields of the prompt and the reply (data.prompt, data.reply)";
        Err(match PAIRS.iter().find(|(prompt, _)| has(prompt)) {
            _ if has("text") => format!("it has the fields {names:?}: plain text, and no conversation (use `kiln data prepare`)"),
            Some((_, reply)) => format!("no field {reply:?}, only {names:?}: {way_out}"),
            None => format!("its fields {names:?} are of no known layout (messages, sharegpt, alpaca): {way_out}"),
        })
    }

    /// All fields that are read, where a row has them.
    pub fn fields(&self) -> Vec<&str> {
        match self {
            Layout::Turns { list, .. } => vec![list, "system", "tools"],
            Layout::Alpaca => vec!["instruction", "input", "output", "system", "history"],
            Layout::Pair { prompt, reply } => vec![prompt, reply],
        }
    }

    /// Fields that every row has.
    pub fn required(&self) -> Vec<&str> {
        match self {
            Layout::Turns { list, .. } => vec![list],
            Layout::Alpaca => vec!["instruction", "output"],
            Layout::Pair { prompt, reply } => vec![prompt, reply],
        }
    }

    /// A row as a conversation, or what does not fit.
    pub fn conversation(&self, row: &Value) -> Result<Conversation, String> {
        if row.kind() != ValueKind::Map {
            return Err(format!("it is {}, not a JSON object", shown(row)));
        }
        let mut messages = vec![];
        let mut tools = None;
        match self {
            Layout::Turns { list, role, content } => {
                for (i, turn) in turns_of(row, list)?.iter().enumerate() {
                    messages.push(message(turn, role, content).map_err(|p| format!("turn {} of {list:?}: {p}", i + 1))?);
                }
                if messages.is_empty() {
                    return Err(format!("the field {list:?} is an empty list (remove the row)"));
                }
                tools = tools_of(row)?;
                if messages[0].role != "system" {
                    messages.splice(0..0, optional(row, "system")?.map(|text| Message::new("system", &text)));
                }
            }
            Layout::Alpaca => {
                messages.extend(optional(row, "system")?.map(|text| Message::new("system", &text)));
                for pair in get(row, "history").filter(|v| !v.is_none()).map_or(Ok(vec![]), |v| items(&v, "history"))? {
                    let two = items(&pair, "history")?;
                    let [Some(asked), Some(replied)] = [0, 1].map(|i| two.get(i).and_then(|v| v.as_str())) else {
                        return Err(format!("the field \"history\" holds {}, not a prompt and a reply", shown(&pair)));
                    };
                    messages.extend([Message::new("user", asked), Message::new("assistant", replied)]);
                }
                let asked = [Some(text(row, "instruction")?), optional(row, "input")?];
                let asked: Vec<String> = asked.into_iter().flatten().filter(|part| !part.is_empty()).collect();
                messages.extend([Message::new("user", &asked.join("\n")), Message::new("assistant", &reply_of(row, "output")?)]);
            }
            Layout::Pair { prompt, reply } => {
                messages.extend([Message::new("user", &text(row, prompt)?), Message::new("assistant", &reply_of(row, reply)?)]);
            }
        }
        match messages.len() {
            turns if turns > engine::mutant!("conversations-of-any-length", MOST_TURNS, usize::MAX) => {
                Err(format!("it has {turns} turns, and at most {MOST_TURNS} are read (split it)"))
            }
            _ => Ok(Conversation { messages, tools }),
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Layout::Turns { list, role, content } => write!(f, "turns in {list:?} with {role:?} and {content:?}"),
            Layout::Alpaca => write!(f, "Alpaca's \"instruction\", \"input\" and \"output\""),
            Layout::Pair { prompt, reply } => write!(f, "prompts in {prompt:?} and replies in {reply:?}"),
        }
    }
}

fn fields(row: &Value) -> Vec<String> {
    match row.kind() {
        ValueKind::Map => row.try_iter().map(|keys| keys.map(|key| key.to_string()).collect()).unwrap_or_default(),
        _ => vec![],
    }
}

fn get(row: &Value, name: &str) -> Option<Value> {
    row.get_attr(name).ok().filter(|value| !value.is_undefined())
}

fn need(row: &Value, name: &str) -> Result<Value, String> {
    get(row, name).ok_or_else(|| format!("no field {name:?}, only {:?}", fields(row)))
}

fn text(row: &Value, name: &str) -> Result<String, String> {
    let value = need(row, name)?;
    value.as_str().map(str::to_owned).ok_or_else(|| format!("the field {name:?} is not a string but {}", shown(&value)))
}

/// A text to learn.
fn reply_of(row: &Value, name: &str) -> Result<String, String> {
    let reply = text(row, name)?;
    match reply.trim().is_empty() {
        true => Err(format!("the field {name:?} is empty: there is nothing to learn (remove the line)")),
        false => Ok(reply),
    }
}

/// A text that may be missing, null or empty.
fn optional(row: &Value, name: &str) -> Result<Option<String>, String> {
    match get(row, name).filter(|value| !value.is_none()) {
        Some(_) => text(row, name).map(|text| Some(text).filter(|text| !text.is_empty())),
        None => Ok(None),
    }
}

fn items(value: &Value, name: &str) -> Result<Vec<Value>, String> {
    match value.kind() {
        ValueKind::Seq => value.try_iter().map(Iterator::collect).map_err(|e| e.to_string()),
        _ => Err(format!("the field {name:?} is not a list but {}", shown(value))),
    }
}

/// The turns of a row; some data sets keep them as JSON in a string.
fn turns_of(row: &Value, list: &str) -> Result<Vec<Value>, String> {
    let value = need(row, list)?;
    match value.as_str().map(serde_json::from_str::<Value>) {
        Some(Ok(parsed)) => items(&parsed, list),
        _ => items(&value, list),
    }
}

/// Schemas of tools: a list, or that list as JSON in a string.
fn tools_of(row: &Value) -> Result<Option<Value>, String> {
    let Some(value) = get(row, "tools").filter(|v| !v.is_none() && v.as_str() != Some("")) else { return Ok(None) };
    let value = match value.as_str() {
        Some(text) => serde_json::from_str(text).map_err(|e| format!("the field \"tools\" is a string, and no JSON: {e}"))?,
        None => value,
    };
    let none = value.is_none() || items(&value, "tools")?.is_empty();
    Ok((!none).then_some(value))
}

fn message(turn: &Value, role: &str, content: &str) -> Result<Message, String> {
    if turn.kind() != ValueKind::Map {
        return Err(format!("it is {}, and no object with {role:?} and {content:?}", shown(turn)));
    }
    let called = text(turn, role)?;
    let own = ROLES.iter().find(|(name, _)| *name == called).map(|(_, role)| *role);
    let Some(own) = own.or_else(|| KNOWN.into_iter().find(|name| *name == called)) else {
        let known: Vec<&str> = KNOWN.into_iter().chain(ROLES.map(|(name, _)| name)).collect();
        return Err(format!("its {role:?} is {called:?}, which is none of {}", known.join(", ")));
    };
    let said = get(turn, content).unwrap_or(Value::UNDEFINED);
    let more: Vec<(String, Value)> = fields(turn)
        .into_iter()
        .filter(|name| name != role && name != content)
        .filter_map(|name| get(turn, &name).filter(|value| !value.is_none()).map(|value| (name, value)))
        .collect();
    let message = Message { role: own.into(), content: said, more };
    match message.content.kind() {
        ValueKind::String => {}
        ValueKind::Seq => check_parts(&message.content, content)?,
        ValueKind::None | ValueKind::Undefined => {
            let elsewhere =
                ["tool_calls", "function_call", "reasoning_content", "thinking"].iter().any(|name| message.field(name).is_some());
            if !(message.is_assistant() && elsewhere) {
                return Err(match get(turn, content) {
                    None => format!("it has no {content:?}, only {:?}", fields(turn)),
                    Some(_) => format!("its {content:?} is null"),
                });
            }
        }
        _ => return Err(format!("its {content:?} is neither a string nor a list of parts but {}", shown(&message.content))),
    }
    Ok(message)
}

/// Parts of a message that are text. Images and sound cannot be learned.
fn check_parts(parts: &Value, content: &str) -> Result<(), String> {
    let all = items(parts, content)?;
    match all.iter().find(|part| get(part, "text").and_then(|text| text.as_str().map(drop)).is_none()) {
        Some(part) => Err(format!("a part of its {content:?} is no text: {}", shown(part))),
        None => Ok(()),
    }
}
