//! A run's metrics.jsonl, read on as it grows.

use crate::input;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What was read so far. Of a step that a resumed run repeats, the last record counts.
#[derive(Debug, Default)]
pub struct Figures {
    /// Device and inode.
    file: (u64, u64),
    bytes: u64,
    step: u64,
    last: Map<String, Value>,
    /// Keys of any record.
    keys: BTreeSet<String>,
    /// What evaluations found, by step.
    validations: BTreeMap<u64, Vec<(String, f64)>>,
}

/// A part of the file, in whole lines.
pub struct Part {
    pub text: String,
    /// Where the next part begins.
    pub next: u64,
}

/// At most so much is read at once.
const MOST: u64 = 4 << 20;

/// Whole lines from a byte on. Power cuts leave what is no UTF-8: such bytes are replaced, and make their line one that nobody can read.
pub fn part(path: &Path, from: u64) -> io::Result<Part> {
    let mut file = input::open(path)?;
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = vec![];
    file.take(MOST).read_to_end(&mut bytes)?;
    let end = match bytes.iter().rposition(|b| *b == b'\n') {
        Some(at) => at + 1,
        // A line longer than that is none of ours.
        None if bytes.len() as u64 == MOST => bytes.len(),
        None => 0,
    };
    Ok(Part { text: String::from_utf8_lossy(&bytes[..end]).into_owned(), next: from + end as u64 })
}

impl Figures {
    /// Takes in what is new; a file that is another, or shorter than before, is read from its beginning.
    pub fn read_on(&mut self, path: &Path) -> io::Result<()> {
        let m = path.metadata()?;
        let file = (m.dev(), m.ino());
        if file != self.file || m.len() < self.bytes {
            *self = Figures { file, ..Figures::default() };
        }
        loop {
            let part = part(path, self.bytes)?;
            part.text.lines().for_each(|line| self.take(line));
            if part.next == self.bytes {
                return Ok(());
            }
            self.bytes = part.next;
        }
    }

    fn take(&mut self, line: &str) {
        let Ok(record) = serde_json::from_str::<Map<String, Value>>(line) else { return };
        let Some(step) = record.get("step").and_then(Value::as_u64) else { return };
        self.step = step;
        let validated = |(key, value): (&String, &Value)| Some((key.strip_prefix("val_")?.to_string(), value.as_f64()?));
        let found: Vec<(String, f64)> = record.iter().filter_map(validated).collect();
        match found.is_empty() {
            true => drop(self.validations.remove(&step)),
            false => drop(self.validations.insert(step, found)),
        }
        let new: Vec<String> = record.keys().filter(|k| *k != "step" && !self.keys.contains(*k)).cloned().collect();
        self.keys.extend(new);
        self.last = record;
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The step of the last record.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// A number of the last record.
    pub fn last(&self, key: &str) -> Option<f64> {
        self.last.get(key)?.as_f64()
    }

    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.keys.iter().map(String::as_str)
    }

    /// What evaluations found of a metric, by step.
    pub fn validations(&self, name: &str) -> Vec<(u64, f64)> {
        let of = |values: &Vec<(String, f64)>| values.iter().find(|v| v.0 == name).map(|v| v.1);
        self.validations.iter().filter_map(|(step, values)| Some((*step, of(values)?))).collect()
    }
}
