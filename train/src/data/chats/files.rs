//! Files of rows, read one row at a time: JSON lines, a JSON array, gzip of either, parquet, and folders of those.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;
use minijinja::Value;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};

use super::{ChatError, Conversation, Layout, parquet};
use crate::input;
use crate::report::human_bytes;

/// A row and where it stands.
pub struct Row<'a> {
    pub path: &'a Path,
    /// "line" or "row".
    pub unit: &'static str,
    /// Counted from 1.
    pub number: u64,
    pub value: Value,
}

impl Row<'_> {
    pub fn error(&self, problem: impl Into<String>) -> ChatError {
        ChatError::Row { path: self.path.to_owned(), unit: self.unit, number: self.number, problem: problem.into() }
    }
}

/// What is done with a row; `Break` ends the reading.
pub type Visit<'a> = dyn FnMut(Row) -> Result<ControlFlow<()>, ChatError> + 'a;

/// Suffixes of files that are read in a folder.
const SUFFIXES: [&str; 7] = [".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".parquet"];
/// What programs put beside the rows.
const BESIDE: [&str; 4] = ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];

/// Whether this is called as a file of rows is, or a folder that holds one.
pub fn holds_rows(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    if path.is_dir() { list(&[path]).is_ok() } else { path.is_file() && SUFFIXES.iter().any(|suffix| name.ends_with(suffix)) }
}

/// More files than anybody has of one set.
const MOST: usize = 1 << 16;

/// The files behind some paths, in their order, those of a folder by name. One that is named twice is read once.
pub fn list(paths: &[impl AsRef<Path>]) -> Result<Vec<PathBuf>, ChatError> {
    let (mut all, mut seen) = (vec![], HashSet::new());
    for path in paths.iter().map(AsRef::as_ref) {
        let files = files_of(path)?;
        all.extend(files.into_iter().filter(|file| seen.insert(file.canonicalize().unwrap_or_else(|_| file.clone()))));
        if all.len() > MOST {
            return Err(ChatError::file(path, format!("with it there are {} files, and at most {MOST} are read (join some)", all.len())));
        }
    }
    Ok(all)
}

fn files_of(path: &Path) -> Result<Vec<PathBuf>, ChatError> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let (mut files, mut others) = (vec![], vec![]);
    for entry in std::fs::read_dir(path).map_err(ChatError::io("list", path))? {
        let file = entry.map_err(ChatError::io("list", path))?.path();
        let name = file.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let rows = SUFFIXES.iter().any(|suffix| name.ends_with(suffix)) && !BESIDE.contains(&name.as_str()) && !name.starts_with('.');
        if file.is_file() && rows { files.push(file) } else { others.push(name) }
    }
    files.sort();
    if files.is_empty() {
        others.sort();
        others.truncate(8);
        return Err(ChatError::file(
            path,
            format!("holds no .jsonl file (nor {}), only {others:?} (name the file or its folder)", SUFFIXES[1..].join(", ")),
        ));
    }
    Ok(files)
}

/// Every conversation of files and folders, in order. Without a layout the first row says which one; it is given back.
pub fn each_conversation(
    paths: &[impl AsRef<Path>],
    layout: Option<Layout>,
    visit: &mut dyn FnMut(&Row, Conversation) -> Result<(), ChatError>,
) -> Result<Layout, ChatError> {
    let files = list(paths)?;
    let layout = layout.map_or_else(|| layout_of(&files), Ok)?;
    for file in &files {
        each_row(file, Some(&(&layout).into()), &mut |row| {
            let conversation = layout.conversation(&row.value).map_err(|problem| row.error(format!("{problem} (expected {layout})")))?;
            visit(&row, conversation)?;
            Ok(ControlFlow::Continue(()))
        })?;
    }
    Ok(layout)
}

/// The layout of some files, as their first row has it.
pub fn layout_of(files: &[PathBuf]) -> Result<Layout, ChatError> {
    first_row(files, &mut |row| Layout::find(&row.value).map_err(|problem| row.error(problem)))
}

/// What is asked of the first row of some files.
pub fn first_row<T>(files: &[PathBuf], ask: &mut dyn FnMut(&Row) -> Result<T, ChatError>) -> Result<T, ChatError> {
    let mut found = None;
    for file in files {
        each_row(file, None, &mut |row| {
            found = Some(ask(&row)?);
            Ok(ControlFlow::Break(()))
        })?;
        if let Some(found) = found {
            return Ok(found);
        }
    }
    let path = files.first().map_or(Path::new(""), PathBuf::as_path);
    Err(ChatError::file(path, "holds no rows"))
}

/// Columns of a parquet file that are read, so that others need not be.
pub struct Columns<'a> {
    pub required: Vec<&'a str>,
    pub all: Vec<&'a str>,
    /// What they are, for people.
    pub what: String,
}

impl<'a> From<&'a Layout> for Columns<'a> {
    fn from(layout: &'a Layout) -> Columns<'a> {
        Columns { required: layout.required(), all: layout.fields(), what: layout.to_string() }
    }
}

/// What a file holds, by how it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    Empty,
    Parquet,
    Gzip,
    /// What is not read, in words.
    Other(&'static str),
    /// Text, as far as its beginning tells.
    Text,
}

impl Content {
    pub fn of(path: &Path) -> Result<Content, ChatError> {
        let file = input::open(path).map_err(ChatError::io("open", path))?;
        let mut begins = vec![];
        file.take(24).read_to_end(&mut begins).map_err(ChatError::io("read", path))?;
        Ok(match &begins[..] {
            [] => Content::Empty,
            [b'P', b'A', b'R', b'1', ..] => Content::Parquet,
            [0x1f, 0x8b, ..] => Content::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Content::Other("compressed with zstd"),
            [b'B', b'Z', b'h', ..] => Content::Other("compressed with bzip2"),
            [0xfd, b'7', b'z', b'X', b'Z', ..] => Content::Other("compressed with xz"),
            [b'P', b'K', 3, 4, ..] => Content::Other("a zip archive"),
            [b'A', b'R', b'R', b'O', b'W', ..] | [0xff, 0xff, 0xff, 0xff, ..] => Content::Other("an Arrow file"),
            text if text.starts_with(b"version https://git-lfs") => {
                Content::Other("a pointer of Git LFS, not the file itself (git lfs pull)")
            }
            _ => Content::Text,
        })
    }

    /// The error for what is not read.
    pub fn refused(path: &Path, what: &str) -> ChatError {
        ChatError::file(path, format!("it is {what} (unpack it, or convert it to JSON lines or parquet)"))
    }
}

/// Every row of one file. What it is follows from how it begins, not from its name. Of a parquet file other columns than these are not read.
pub fn each_row(path: &Path, columns: Option<&Columns>, visit: &mut Visit) -> Result<(), ChatError> {
    let open = || Ok(BufReader::with_capacity(1 << 16, input::open(path).map_err(ChatError::io("open", path))?));
    match Content::of(path)? {
        Content::Empty => Err(ChatError::file(path, "it is empty")),
        Content::Parquet => parquet::each_row(path, columns, visit),
        Content::Gzip => each_json(path, BufReader::with_capacity(1 << 16, MultiGzDecoder::new(open()?)), visit),
        Content::Other(what) => Err(Content::refused(path, what)),
        Content::Text => {
            is_json(path, open()?)?;
            each_json(path, open()?, visit)
        }
    }
}

/// Refuses what has the name of another kind of file and is not even JSON.
fn is_json(path: &Path, reader: impl BufRead) -> Result<(), ChatError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let Some(kind) = [(".parquet", "a parquet file"), (".gz", "a gzip file")].iter().find(|(end, _)| name.ends_with(end)) else {
        return Ok(());
    };
    let first = reader.bytes().map_while(Result::ok).find(|byte| !byte.is_ascii_whitespace() && !b"\xef\xbb\xbf".contains(byte));
    let what = match first {
        Some(b'{' | b'[') => return Ok(()),
        Some(b'<') => "it begins like a web page",
        Some(byte) if byte.is_ascii_graphic() => "it is some other text",
        _ => "it begins like no file that is read here",
    };
    Err(ChatError::file(path, format!("it is not {}, although it is called so: {what} (download it again)", kind.1)))
}

/// JSON lines, or an array.
fn each_json(path: &Path, mut reader: impl BufRead, visit: &mut Visit) -> Result<(), ChatError> {
    let (mut number, mut blank) = (1, 0);
    // A mark of UTF-8 and white space may stand before the first row.
    loop {
        let buffer = reader.fill_buf().map_err(|e| unreadable(path, e))?;
        let skip = match buffer {
            [] => return Err(ChatError::file(path, "it is empty")),
            [0xef, 0xbb, 0xbf, ..] => 3,
            [byte, ..] if byte.is_ascii_whitespace() => 1,
            [b'[', ..] => return each_element(path, reader, visit),
            _ => return each_line(path, number, reader, visit),
        };
        number += u64::from(buffer[0] == b'\n');
        blank += skip as u64;
        if is_endless(blank) {
            return Err(ChatError::file(path, format!("it begins with more than {} of white space", human_bytes(input::ROW))));
        }
        reader.consume(skip);
    }
}

/// Whether there is so much white space that no row will come: a compressed file of a few MB may hold GBs of it.
fn is_endless(blank: u64) -> bool {
    engine::mutant!("white-space-without-end", blank > input::ROW, false)
}

fn each_line(path: &Path, first: u64, mut reader: impl BufRead, visit: &mut Visit) -> Result<(), ChatError> {
    let (mut buffer, mut blank) = (vec![], 0);
    for number in first.. {
        buffer.clear();
        let mut row = Row { path, unit: "line", number, value: Value::UNDEFINED };
        let read = input::read_line(&mut reader, &mut buffer).map_err(|e| match e.kind() {
            ErrorKind::FileTooLarge => row.error(e.to_string()),
            _ => unreadable(path, e),
        });
        let read = read? as u64;
        if read == 0 {
            break;
        }
        let text = std::str::from_utf8(&buffer)
            .map_err(|e| row.error(format!("invalid UTF-8 at its byte {} (convert the file to UTF-8)", e.valid_up_to())))?;
        if text.trim().is_empty() {
            blank += read;
            if is_endless(blank) {
                return Err(row.error(format!("it ends more than {} of empty lines", human_bytes(input::ROW))));
            }
            continue;
        }
        blank = 0;
        row.value = serde_json::from_str(text.trim_end()).map_err(|e| {
            let message = e.to_string();
            let reason = message.split(" at line ").next().unwrap_or_default();
            let hint = if e.is_eof() { "; an object is one line" } else { "" };
            row.error(format!("not a JSON object: {reason} at its column {} (correct or remove the line{hint})", e.column()))
        })?;
        if visit(row)?.is_break() {
            break;
        }
    }
    Ok(())
}

/// The elements of a JSON array, without ever holding more than one.
fn each_element(path: &Path, reader: impl BufRead, visit: &mut Visit) -> Result<(), ChatError> {
    let left = Rc::new(Cell::new(input::ROW));
    let mut elements = Elements { path, visit, number: 0, failed: None, ended: false, left: left.clone() };
    let mut json = serde_json::Deserializer::from_reader(input::Rows { reader, left });
    let parsed = json.deserialize_seq(&mut elements).and_then(|()| json.end());
    match (elements.failed, parsed) {
        (Some(error), _) => Err(error),
        (None, Err(_)) if elements.ended => Ok(()),
        (None, Ok(())) => Ok(()),
        (None, Err(e)) if e.is_io() => match io::Error::from(e) {
            long if long.kind() == ErrorKind::FileTooLarge => {
                Err(ChatError::Row { path: path.to_owned(), unit: "row", number: elements.number + 1, problem: long.to_string() })
            }
            other => Err(unreadable(path, other)),
        },
        (None, Err(e)) => {
            let problem = format!("not JSON: {e} (the array may be cut short: download it again, or correct it)");
            Err(ChatError::Row { path: path.to_owned(), unit: "row", number: elements.number + 1, problem })
        }
    }
}

struct Elements<'a, 'v> {
    path: &'a Path,
    visit: &'a mut Visit<'v>,
    number: u64,
    failed: Option<ChatError>,
    ended: bool,
    left: Rc<Cell<u64>>,
}

impl<'de> Visitor<'de> for &mut Elements<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an array of rows")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        while let Some(value) = elements.next_element::<Value>()? {
            self.number += 1;
            self.left.set(input::ROW);
            match (self.visit)(Row { path: self.path, unit: "row", number: self.number, value }) {
                Ok(ControlFlow::Continue(())) => {}
                Ok(ControlFlow::Break(())) => self.ended = true,
                Err(error) => self.failed = Some(error),
            }
            if self.ended || self.failed.is_some() {
                return Err(A::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}

/// A read that failed: with gzip, mostly because a file is cut short or damaged.
fn unreadable(path: &Path, error: std::io::Error) -> ChatError {
    match error.kind() {
        ErrorKind::UnexpectedEof => ChatError::file(path, "it is cut short: the compressed data ends in the middle (download it again)"),
        ErrorKind::InvalidInput | ErrorKind::InvalidData => ChatError::file(path, format!("it is damaged: {error} (download it again)")),
        _ => ChatError::Io { doing: "read", path: path.to_owned(), error },
    }
}
