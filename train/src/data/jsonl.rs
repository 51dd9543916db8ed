//! Files of JSON, one object a line.

use std::io::{BufReader, ErrorKind};
use std::path::Path;

use serde_json::{Map, Value};

use super::DataError;
use crate::input;

/// A line that is not empty.
pub struct Line<'a> {
    pub path: &'a Path,
    /// Counted from 1.
    pub number: u64,
    pub bytes: u64,
    text: &'a str,
}

impl Line<'_> {
    pub fn object(&self) -> Result<Map<String, Value>, String> {
        serde_json::from_str(self.text).map_err(|error| {
            let error = error.to_string();
            let reason = error.split(" at line ").next().unwrap_or_default();
            format!("not a JSON object: {reason} (correct or remove the line)")
        })
    }

    pub fn error(&self, problem: String) -> DataError {
        DataError::Line { path: self.path.to_owned(), line: self.number, problem }
    }
}

pub fn each_line(path: &Path, visit: &mut dyn FnMut(&Line) -> Result<(), DataError>) -> Result<(), DataError> {
    let mut reader = BufReader::new(input::open(path).map_err(DataError::io("open", path))?);
    let (mut buffer, mut offset) = (Vec::new(), 0);
    for number in 1.. {
        buffer.clear();
        let bytes = input::read_line(&mut reader, &mut buffer).map_err(|e| unread(path, number, e))? as u64;
        if bytes == 0 {
            break;
        }
        let text = utf8(path, offset, &buffer)?;
        // Some programs put a mark of UTF-8 before the first line.
        let text = if number == 1 { text.strip_prefix('\u{feff}').unwrap_or(text) } else { text };
        offset += bytes;
        if !text.trim().is_empty() {
            visit(&Line { path, number, bytes, text })?;
        }
    }
    Ok(())
}

/// A line that is too long is named; anything else is the file's.
fn unread(path: &Path, line: u64, error: std::io::Error) -> DataError {
    match error.kind() {
        ErrorKind::FileTooLarge => DataError::Line { path: path.to_owned(), line, problem: error.to_string() },
        _ => DataError::io("read", path)(error),
    }
}

/// A field that is a string.
pub fn text(object: &Map<String, Value>, field: &str) -> Result<String, String> {
    match object.get(field) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => {
            let other: String = other.to_string().chars().take(40).collect();
            Err(format!("the field {field:?} is not a string but {other} (name another field)"))
        }
        None => {
            let names: Vec<&String> = object.keys().collect();
            Err(format!("no field {field:?}, only {names:?} (name another field)"))
        }
    }
}

pub fn utf8<'a>(path: &Path, offset: u64, bytes: &'a [u8]) -> Result<&'a str, DataError> {
    std::str::from_utf8(bytes).map_err(|error| DataError::Utf8 { path: path.to_owned(), offset: offset + error.valid_up_to() as u64 })
}
