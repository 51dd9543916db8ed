//! What can go wrong with chats. Each message names the thing, the value, and the way out.

use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    #[error("cannot {doing} {path}: {error}{} (check the path and its permissions)", crate::input::fetched_data(path))]
    Io { doing: &'static str, path: PathBuf, error: std::io::Error },
    /// A file that is broken, or no file of conversations at all.
    #[error("{path}: {reason}")]
    File { path: PathBuf, reason: String },
    /// `unit` is "line" or "row", counted from 1.
    #[error("{path}, {unit} {number}: {problem}")]
    Row { path: PathBuf, unit: &'static str, number: u64, problem: String },
    #[error(transparent)]
    Special(Box<super::super::DataError>),
    /// tokenizer_config.json and its like.
    #[error("{path}: {reason} (correct the file)")]
    Config { path: PathBuf, reason: String },
    #[error(
        "{folder} has no chat template: neither chat_template.jinja nor \"chat_template\" in tokenizer_config.json (it may be a model that was never \
         taught to chat: say in data.template how chats are put to it, as 'Q: {{prompt}}\\nA: {{reply}}{{eos}}', in Jinja, or as the path of a .jinja file)"
    )]
    NoTemplate { folder: PathBuf },
    #[error("the chat template of {from}: {reason}")]
    Template { from: String, reason: String },
}

impl ChatError {
    /// For `map_err`: which path, and what was being done to it.
    pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> ChatError {
        let path = path.to_owned();
        move |error| ChatError::Io { doing, path, error }
    }

    pub(super) fn file(path: &Path, reason: impl Into<String>) -> ChatError {
        ChatError::File { path: path.to_owned(), reason: reason.into() }
    }
}
