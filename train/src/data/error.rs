//! What can go wrong with data. Each message names the thing, the value, and the way out.

use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("cannot {doing} {path}: {error} (check the path, its permissions and the free space)")]
    Io { doing: &'static str, path: PathBuf, error: std::io::Error },
    #[error("tokenizer {path}: {reason} (use \"byte\", or the path of a Hugging Face tokenizer.json)")]
    Tokenizer { path: PathBuf, reason: String },
    #[error("tokenizer {path}: {reason} (make a tokenizer.json of it: {command})")]
    Unconverted { path: PathBuf, reason: String, command: String },
    #[error("{path} has no tokenizer.json, vocab.json and merges.txt, or tokenizer.model: {need}")]
    NoTokenizer { path: PathBuf, need: String },
    #[error("{path}: {reason} (correct the file, or name the tokens that end and begin documents with --eos and --bos)")]
    Special { path: PathBuf, reason: String },
    #[error("{path} is no token shard: it begins with {found:?} (make shards with `kiln data prepare`)")]
    Magic { path: PathBuf, found: String },
    #[error("{path} has shard version {found}, this program reads version {known} (prepare the data again)")]
    Version { path: PathBuf, found: u32, known: u32 },
    #[error("{path}: corrupted header: {problem} (copy the file again, or prepare the data again)")]
    Header { path: PathBuf, problem: String },
    #[error("{path} has the wrong length: expected {expected} bytes, has {found} (copy the file again, or prepare the data again)")]
    Length { path: PathBuf, expected: u64, found: u64 },
    #[error(
        "{path}: corrupted tokens: checksum {found:016x}, the header says {expected:016x} (copy the file again, or prepare the data again)"
    )]
    Checksum { path: PathBuf, expected: u64, found: u64 },
    #[error("{path}: token {token} at position {at} is outside the vocabulary of {vocab} (prepare the data with the model's tokenizer)")]
    Vocabulary { path: PathBuf, token: u32, at: u64, vocab: usize },
    #[error("there is no data set {path} (make one with `kiln data prepare`; if it moved, say with --data where it is now)")]
    NoData { path: PathBuf },
    #[error("{path} was replaced while it was in use (start again)")]
    Replaced { path: PathBuf },
    #[error("{path} is a file, and no folder that `kiln data prepare` made: {command}, then --data {out}")]
    NotPrepared { path: PathBuf, command: String, out: String },
    #[error("{path} was prepared with {what} than {first}: they are not read together (prepare one of them again)")]
    Together { path: PathBuf, what: &'static str, first: PathBuf },
    #[error("{path} leads out of the data set's folder, to {to} (copy the file there, or prepare the data again)")]
    Outside { path: PathBuf, to: PathBuf },
    #[error("{path}: malformed: {reason} (prepare the data again)")]
    Dataset { path: PathBuf, reason: String },
    #[error("{path} is listed in dataset.json but missing (copy it there, or prepare the data again)")]
    MissingShard { path: PathBuf },
    #[error("{path} is not listed in dataset.json (remove it, or prepare the data again)")]
    ExtraShard { path: PathBuf },
    #[error("{path}: {what} is {found}, dataset.json says {expected} (the files belong to different data sets; prepare the data again)")]
    Disagree { path: PathBuf, what: &'static str, found: u64, expected: u64 },
    #[error("{path}: invalid UTF-8 at byte {offset} (convert the file to UTF-8, for example with iconv)")]
    Utf8 { path: PathBuf, offset: u64 },
    #[error("{path}, line {line}: {problem}")]
    Line { path: PathBuf, line: u64, problem: String },
    #[error("cannot write the data set to {path}: {reason}")]
    OutDir { path: PathBuf, reason: String },
    #[error("{what} = {value}: {need}")]
    Setting { what: &'static str, value: String, need: String },
    #[error("{what} has {tokens} tokens, a window needs {needed} (use a shorter sequence or more text)")]
    TooFew { what: String, tokens: u64, needed: u64 },
    #[error("item {item} does not exist: the source has items 0 to {len} exclusive (wrap the index, or use an Order of that length)")]
    OutOfRange { item: u64, len: u64 },
    #[error("the data source panicked at item {item}: {message} (a bug in the source; the item number reproduces it)")]
    Panicked { item: u64, message: String },
    #[error("{path}: {reason}")]
    Images { path: PathBuf, reason: String },
    #[error("{path}: {reason}")]
    Examples { path: PathBuf, reason: String },
    #[error(transparent)]
    Chats(#[from] super::chats::ChatError),
    #[error("{path}: {bytes} bytes are no whole number of records of {record}: it is cut short, or of another format (download it again)")]
    Records { path: PathBuf, bytes: usize, record: usize },
    #[error("{path}: record {record} has the label {label}, which must be below {values} (download it again)")]
    Label { path: PathBuf, record: usize, label: u8, values: u8 },
    #[error("{path}: not a readable picture: {reason} (replace or remove it)")]
    Picture { path: PathBuf, reason: String },
    #[error("stopped: nothing was written")]
    Interrupted,
    #[error("the loader stopped after an earlier error (make a new Loader from the item where it stopped)")]
    Stopped,
}

impl DataError {
    /// A text file in the place of a data set, and how to make one of it.
    pub fn not_prepared(path: &Path, tokenizer: &str) -> DataError {
        let out = format!("data/{}", path.file_stem().unwrap_or_default().to_string_lossy());
        let command = format!("kiln data prepare {}{tokenizer} --out {out}", path.display());
        DataError::NotPrepared { path: path.to_owned(), command, out }
    }

    /// For `map_err`: which path, and what was being done to it.
    pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> DataError {
        let path = path.to_owned();
        move |error| DataError::Io { doing, path, error }
    }
}
