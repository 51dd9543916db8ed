//! A run's metrics.jsonl, read on as it grows.

use crate::input;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
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
    /// `per_second` of the last records.
    speeds: VecDeque<f64>,
    /// Lines that are no records.
    unread: usize,
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

/// Records that a run's speed is of.
const RECENT: usize = 9;
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
        let record = serde_json::from_str::<Map<String, Value>>(line).ok();
        let Some((step, record)) = record.and_then(|r| Some((r.get("step")?.as_u64()?, r))) else {
            self.unread += usize::from(!line.trim().is_empty());
            return;
        };
        self.step = step;
        if let Some(speed) = record.get("per_second").and_then(Value::as_f64) {
            self.speeds.push_back(speed);
            self.speeds.drain(..self.speeds.len().saturating_sub(RECENT));
        }
        let validated = |(key, value): (&String, &Value)| Some((key.strip_prefix("val_")?.to_string(), value.as_f64()?));
        let found: Vec<(String, f64)> = record.iter().filter_map(validated).collect();
        match found.is_empty() {
            true => drop(self.validations.remove(&step)),
            false => drop(self.validations.insert(step, found)),
        }
        let new: Vec<String> = record.keys().filter(|k| *k != "step" && !self.keys.contains(*k)).cloned().collect();
        self.keys.extend(new);
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The step of the last record.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The median of what the last records say: one of them may have waited for an evaluation or a disk.
    pub fn speed(&self) -> Option<f64> {
        let mut speeds: Vec<f64> = self.speeds.iter().copied().collect();
        speeds.sort_by(f64::total_cmp);
        speeds.get(speeds.len() / 2).copied()
    }

    /// How many lines are no records.
    pub fn unread(&self) -> usize {
        self.unread
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
