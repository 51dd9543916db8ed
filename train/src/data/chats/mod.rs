//! Conversations as they are in the world: files of many layouts, a model's own chat template, and which tokens are learned.
//!
//! | file | is |
//! |---|---|
//! | `files.rs` | JSONL, JSON arrays, gzip of both, parquet, folders of those: rows, one at a time |
//! | `parquet.rs` | rows of a parquet file |
//! | `layout.rs` | a row becomes a conversation |
//! | `template.rs` | a model's chat template, and where it is found |
//! | `apart/` | a process that renders it: neither time, memory nor a stack that it uses up are this one's |
//! | `jinja.rs` | what it writes |
//! | `python.rs` | what templates expect of Python |
//! | `learned.rs` | a conversation as text, and which parts of it are learned |
//! | `encode.rs` | the text as tokens with a mask |

mod apart;
mod encode;
mod error;
mod files;
mod jinja;
mod layout;
mod learned;
mod parquet;
mod python;
mod template;

pub(crate) use apart::serve as serve_templates;
pub use encode::{Encoded, encode};
pub use error::ChatError;
pub use files::{Columns, Content, Row, each_conversation, each_row, first_row, holds_rows, layout_of, list};
pub use layout::Layout;
pub use learned::{Learn, Rendered, Way};
pub(crate) use parquet::{Head, each_picture, serve as serve_rows};
pub use template::{ChatTemplate, TEMPLATE};

use minijinja::Value;

/// Turns between a user and a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    pub messages: Vec<Message>,
    /// Schemas of functions that the model may call, as the row has them.
    pub tools: Option<Value>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// "system", "user", "assistant", "tool", or another that the template knows.
    pub role: String,
    /// A string; or a list of parts, or none beside tool calls; undefined where the row has no such field.
    pub content: Value,
    /// Other fields: tool_calls, name, reasoning_content.
    pub more: Vec<(String, Value)>,
}

impl Message {
    pub fn new(role: &str, content: &str) -> Message {
        Message { role: role.into(), content: content.into(), more: vec![] }
    }

    /// What it says, where that is text alone.
    pub fn text(&self) -> Result<String, String> {
        let whole = jinja::joined(self);
        whole
            .content
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| format!("the turn of the {:?} is no text but {}", self.role, shown(&self.content)))
    }

    pub fn is_assistant(&self) -> bool {
        self.role == "assistant"
    }

    fn field(&self, name: &str) -> Option<&Value> {
        self.more.iter().find(|(key, value)| key == name && !value.is_none()).map(|(_, value)| value)
    }

    /// As a template sees it. Reasoning goes by several names, and templates read one of two.
    fn value(&self) -> Value {
        let reasoning = ["reasoning_content", "thinking", "reasoning"].iter().find_map(|name| self.field(name));
        let given = |name: &str| self.more.iter().any(|(key, _)| key == name);
        let mut all: Vec<(&str, Value)> = vec![];
        all.extend(reasoning.filter(|_| !given("thinking")).map(|r| ("thinking", r.clone())));
        all.push(("role", self.role.as_str().into()));
        all.extend((!self.content.is_undefined()).then(|| ("content", self.content.clone())));
        all.extend(
            self.more.iter().filter(|(key, _)| reasoning.is_none() || key != "reasoning_content").map(|(k, v)| (k.as_str(), v.clone())),
        );
        all.extend(reasoning.map(|r| ("reasoning_content", r.clone())));
        Value::from_pairs(all)
    }
}

/// A value in a message: short, as JSON.
fn shown(value: &Value) -> String {
    let text = python::json(value, &python::Style::default()).unwrap_or_else(|_| value.to_string());
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod row_tests;
#[cfg(test)]
mod tests;
