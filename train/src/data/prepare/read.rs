//! Text files, a part at a time; lines of JSON; rows of parquet and gzip; generated sentences.

use std::fs::File;
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};

use super::super::chats::{self, Columns, Content};
use super::super::{DataError, Grammar, Split, hash, jsonl};
use super::sink::Sink;
use crate::input;

/// From so many text files on, each is learned from or validated with as a whole; of fewer, the last part of each validates.
const FILES: usize = 10;

/// Bytes that are read at once.
const PART: u64 = 1 << 20;

fn progress(length: u64, template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(length).with_style(style)
}

pub fn read_files(paths: &[PathBuf], field: &str, sink: &mut Sink) -> Result<(), DataError> {
    let mut total = 0;
    for path in paths {
        total += input::length(path).map_err(DataError::io("read", path))?;
    }
    let bar = progress(total, "{bar:40} {bytes}/{total_bytes} {bytes_per_sec} eta {eta}");
    for path in paths {
        if is_rows(path)? {
            read_rows(path, field, sink)?;
            bar.inc(input::length(path).map_err(DataError::io("read", path))?);
            continue;
        }
        if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("jsonl")) {
            read_jsonl(path, field, sink, &bar)?;
            continue;
        }
        let file = input::open(path).map_err(DataError::io("read", path))?;
        let length = file.metadata().map_err(DataError::io("read", path))?.len();
        let text = Text { path, file: &file, bar: &bar };
        if paths.len() < FILES {
            let cut = tail(&file, length, sink.val_share()).map_err(DataError::io("read", path))?;
            text.read(0..cut, Some(Split::Train), sink)?;
            text.read(cut..length, Some(Split::Val), sink)?;
        } else {
            text.read(0..length, None, sink)?;
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// Whether a file is parquet, or gzip of JSON lines; other files that are no text are refused.
fn is_rows(path: &Path) -> Result<bool, DataError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let ends = |suffixes: &[&str]| suffixes.iter().any(|end| name.ends_with(end));
    match Content::of(path)? {
        Content::Parquet => Ok(true),
        Content::Gzip if ends(&[".jsonl.gz", ".ndjson.gz", ".json.gz"]) => Ok(true),
        Content::Gzip => Err(Content::refused(path, "compressed with gzip, and its name does not end in .jsonl.gz").into()),
        Content::Other(what) => Err(Content::refused(path, what).into()),
        // What has their name and is none of them is refused by name.
        Content::Text | Content::Empty => Ok(ends(&[".parquet", ".gz"])),
    }
}

/// Rows whose `field` is a document.
fn read_rows(path: &Path, field: &str, sink: &mut Sink) -> Result<(), DataError> {
    let columns = Columns { required: vec![field], all: vec![field], what: format!("texts in {field:?}: --field names another column") };
    let mut failed = None;
    chats::each_row(path, Some(&columns), &mut |row| {
        let value = row.value.get_attr(field).unwrap_or_default();
        let Some(text) = value.as_str() else {
            let has = if value.is_undefined() { "not there".into() } else { format!("{value:.40}") };
            return Err(row.error(format!("the field {field:?} is {has}, not a text (name another field with --field)")));
        };
        Ok(match sink.document(text) {
            Ok(()) => ControlFlow::Continue(()),
            Err(e) => {
                failed = Some(e);
                ControlFlow::Break(())
            }
        })
    })?;
    failed.map_or(Ok(()), Err)
}

struct Text<'a> {
    path: &'a Path,
    file: &'a File,
    bar: &'a ProgressBar,
}

impl Text<'_> {
    /// These bytes as one document; without a split in the one that its number says.
    fn read(&self, range: std::ops::Range<u64>, split: Option<Split>, sink: &mut Sink) -> Result<(), DataError> {
        let split = split.unwrap_or_else(|| sink.split_of_next());
        sink.begin(split);
        // A character may lie across the end of a part: its first bytes wait for the rest.
        let (mut at, mut bytes) = (range.start, vec![]);
        while at < range.end {
            let (waiting, part) = (bytes.len(), PART.min(range.end - at));
            bytes.resize(waiting + part as usize, 0);
            self.file.read_exact_at(&mut bytes[waiting..], at).map_err(DataError::io("read", self.path))?;
            let start = at - waiting as u64;
            at += part;
            let whole = match std::str::from_utf8(&bytes) {
                Err(e) if e.error_len().is_none() && at < range.end => e.valid_up_to(),
                _ => bytes.len(),
            };
            sink.text(jsonl::utf8(self.path, start, &bytes[..whole])?)?;
            bytes.drain(..whole);
            self.bar.inc(part);
        }
        sink.end()
    }
}

/// Where the last `share` of a text begins: after an empty line if there is one nearby, else a line, else a character.
fn tail(file: &File, length: u64, share: f64) -> std::io::Result<u64> {
    if share <= 0.0 {
        return Ok(length);
    }
    let at = |share: f64| -> std::io::Result<u64> {
        let mut at = (length as f64 * (1.0 - share).max(0.0)) as u64;
        let mut byte = [0];
        // A character has at most four bytes; what is none is found when it is read.
        for _ in 0..4 {
            if at == 0 || at >= length {
                break;
            }
            file.read_exact_at(&mut byte, at)?;
            if byte[0] & 0xc0 != 0x80 {
                break;
            }
            at -= 1;
        }
        Ok(at)
    };
    let (earliest, cut) = (at(2.0 * share)?, at(share)?);
    Ok(match last(file, earliest..cut, b"\n\n")? {
        Some(at) => at,
        None => last(file, earliest..cut, b"\n")?.unwrap_or(cut),
    })
}

/// The place after the last mark in a range, searched from its end.
fn last(file: &File, range: std::ops::Range<u64>, mark: &[u8]) -> std::io::Result<Option<u64>> {
    let (mut end, mut bytes) = (range.end, vec![]);
    while end >= range.start + mark.len() as u64 {
        let start = end.saturating_sub(PART).max(range.start);
        bytes.resize((end - start) as usize, 0);
        file.read_exact_at(&mut bytes, start)?;
        if let Some(i) = bytes.windows(mark.len()).rposition(|window| window == mark) {
            return Ok(Some(start + (i + mark.len()) as u64));
        }
        if start == range.start {
            break;
        }
        // A mark may lie across.
        end = start + mark.len() as u64 - 1;
    }
    Ok(None)
}

fn read_jsonl(path: &Path, field: &str, sink: &mut Sink, bar: &ProgressBar) -> Result<(), DataError> {
    jsonl::each_line(path, &mut |line| {
        bar.inc(line.bytes);
        let document = line.object().and_then(|object| jsonl::text(&object, field));
        sink.document(&document.map_err(|problem| line.error(problem))?)
    })
}

pub fn generate(seed: u64, sentences: u64, sink: &mut Sink) -> Result<(), DataError> {
    let grammar = Grammar::new();
    let seed = hash(&[seed, 0x7072_6570]);
    let bar = progress(sentences, "{bar:40} {pos}/{len} sentences, eta {eta}");
    let mut text = Vec::new();
    for i in 0..sentences {
        text.clear();
        grammar.sentence(seed, i, &mut text);
        sink.document(&String::from_utf8_lossy(&text))?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_at_a_character_where_there_is_no_line() {
        let dir = tempfile::tempdir().unwrap();
        let tail = |text: &str, share: f64| {
            let path = dir.path().join("text");
            std::fs::write(&path, text).unwrap();
            super::tail(&File::open(path).unwrap(), text.len() as u64, share).unwrap()
        };
        assert_eq!(tail(&"ä".repeat(100), 0.255), 148);
        assert_eq!(tail(&"ä".repeat(100), 0.0), 200);
        assert_eq!(tail("ab\ncdefgh", 0.5), 3);
        assert_eq!(tail("", 0.5), 0);
        // An empty line wins over a line that is nearer; marks are found across the parts in which a file is read.
        assert_eq!(tail("aa\n\nbb\nccccccc", 0.5), 4);
        let long = format!("{}\n\n{}", "a".repeat(PART as usize), "b".repeat(2 * PART as usize + 1));
        assert_eq!(tail(&long, 0.5), PART + 2);
        let long = format!("{}\n\n{}", "a".repeat(2 * PART as usize), "b".repeat(3 * PART as usize));
        assert_eq!(tail(&long, 0.5), 2 * PART + 2);
    }
}
