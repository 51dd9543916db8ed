//! A run's metrics.jsonl, read on as it grows. Whatever is in it, what is kept of it has a bound: names of metrics by their number and length, curves by
//! their points.

use crate::inside::Inside;
use crate::recipe::Metric;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;

pub const METRICS: &str = "metrics.jsonl";

/// What was read so far. Of a step that a resumed run repeats, the last record counts.
#[derive(Debug)]
pub struct Figures {
    /// So many bytes are read at once at most.
    at_once: u64,
    /// Of the file, at most so much.
    most: u64,
    /// Parts of a line that does not end.
    endless: u64,
    /// Device and inode.
    file: (u64, u64),
    bytes: u64,
    step: u64,
    /// `per_second` of the last records.
    speeds: VecDeque<f64>,
    /// Lines that are no records.
    unread: usize,
    keys: Keys,
    /// What evaluations found, by step: which of `keys.validated`, and the value.
    validations: BTreeMap<u64, Vec<(u16, f64)>>,
    /// Whether there were more evaluations than are kept.
    more: bool,
}

/// Names of metrics, as they came.
#[derive(Debug, Default)]
struct Keys {
    known: BTreeSet<String>,
    in_order: Vec<String>,
    /// Those of evaluations, without their `val_`.
    validated: Vec<String>,
}

/// Names that are kept; the file may have more, and longer ones.
const MOST_KEYS: usize = 10_000;
const LONGEST_KEY: usize = 200;
/// Metrics of a run that a page shows beside those that its recipe declares.
const SHOWN: usize = 200;
/// Evaluations that are kept, for the best of them.
const EVALUATIONS: usize = 100_000;
/// Metrics that evaluations may find.
const VALIDATED: usize = 64;
/// Records that a run's speed is of.
const RECENT: usize = 9;
/// A part has at most so much, and a longer line is none of ours.
const PART: u64 = 4 << 20;
/// More is not read of a file: no run records so much, and one of zeros could be endless.
const MOST: u64 = 4 << 30;
/// Parts of lines that do not end, after which nothing more is read: what is there are no records.
const ENDLESS: u64 = 4;
/// What a served page waits for at most, before it shows what was read so far.
const A_WHILE: u64 = 64 << 20;

/// Pairs of step and value by name, by step.
pub type Points = BTreeMap<String, BTreeMap<u64, Value>>;

impl Default for Figures {
    fn default() -> Figures {
        let (speeds, keys, validations) = Default::default();
        Figures {
            at_once: MOST,
            most: MOST,
            endless: 0,
            file: (0, 0),
            bytes: 0,
            step: 0,
            speeds,
            unread: 0,
            keys,
            validations,
            more: false,
        }
    }
}

/// Whole lines of the bytes from `from` to `to`, as far as they are one part; and where the next part begins. Power cuts leave what is no UTF-8: such
/// bytes are replaced, and make their line one that nobody can read.
fn part(file: &mut File, from: u64, to: u64) -> io::Result<(String, u64)> {
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = vec![];
    file.take(PART.min(to.saturating_sub(from))).read_to_end(&mut bytes)?;
    let end = match bytes.iter().rposition(|b| *b == b'\n') {
        Some(at) => at + 1,
        None if bytes.len() as u64 == PART => bytes.len(),
        None => 0,
    };
    Ok((String::from_utf8_lossy(&bytes[..end]).into_owned(), from + end as u64))
}

/// A line's step and values.
fn record(line: &str) -> Option<(u64, Map<String, Value>)> {
    let record: Map<String, Value> = serde_json::from_str(line).ok()?;
    Some((record.get("step")?.as_u64()?, record))
}

impl Figures {
    /// For a page that asks again: a long file is read over several questions.
    pub fn little_by_little() -> Figures {
        Figures { at_once: A_WHILE, ..Figures::default() }
    }

    /// Takes in what is new; a file that is another, or shorter than before, is read from its beginning. Returns the file.
    pub fn read_on(&mut self, run: &Inside) -> io::Result<File> {
        let mut file = run.file(METRICS)?;
        let m = file.metadata()?;
        let is = (m.dev(), m.ino());
        if is != self.file || m.len() < self.bytes {
            *self = Figures { file: is, at_once: self.at_once, ..Figures::default() };
        }
        let to = self.bytes.saturating_add(self.at_once);
        loop {
            let (text, next) = part(&mut file, self.bytes, to.min(self.most))?;
            text.lines().for_each(|line| self.take(line));
            if next == self.bytes {
                return Ok(file);
            }
            let is_endless = next - self.bytes == PART && !text.ends_with('\n');
            self.bytes = next;
            self.endless += u64::from(is_endless);
            if self.endless == engine::mutant!("lines-without-end-are-read", ENDLESS, u64::MAX) {
                self.most = next;
            }
        }
    }

    fn take(&mut self, line: &str) {
        let Some((step, record)) = record(line) else {
            self.unread += usize::from(!line.trim().is_empty());
            return;
        };
        self.step = step;
        if let Some(speed) = record.get("per_second").and_then(Value::as_f64) {
            self.speeds.push_back(speed);
            self.speeds.drain(..self.speeds.len().saturating_sub(RECENT));
        }
        let keys = &mut self.keys;
        let has_room = self.validations.len() < engine::mutant!("evaluations-without-end", EVALUATIONS, usize::MAX)
            || self.validations.contains_key(&step);
        let validated = |(key, value): (&String, &Value)| Some((keys.validated(key.strip_prefix("val_")?)?, value.as_f64()?));
        let found: Vec<(u16, f64)> = record.iter().filter_map(validated).collect();
        match found.is_empty() {
            true => engine::mutant!("evaluations-that-were-undone-are-shown", drop(self.validations.remove(&step)), ()),
            false if has_room => drop(self.validations.insert(step, found)),
            false => self.more = true,
        }
        record.keys().filter(|key| *key != "step").for_each(|key| self.keys.take(key));
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the file goes on behind what is ever read.
    pub fn is_cut(&self, length: u64) -> bool {
        length > self.most
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

    /// What is said of evaluations that are not looked at.
    pub fn unlooked(&self) -> Option<String> {
        self.more.then(|| format!("{METRICS} has more than {EVALUATIONS} evaluations: the best of those is shown"))
    }

    /// How many lines are no records.
    pub fn unread(&self) -> usize {
        self.unread
    }

    /// The names that a page shows: all that are declared as they are, and of others (parts of a metric, and what nobody declared) those that came first.
    pub fn shown(&self, metrics: &[Metric]) -> BTreeSet<&str> {
        let is_declared = |key: &str| {
            let name = ["val_", "epoch_"].iter().find_map(|part| key.strip_prefix(part)).unwrap_or(key);
            Metric::of_key(metrics, key).is_some_and(|(metric, ..)| [key, name].contains(&metric.name))
        };
        let (declared, others): (Vec<&str>, Vec<&str>) = self.keys.in_order.iter().map(String::as_str).partition(|key| is_declared(key));
        declared.into_iter().chain(others.into_iter().take(SHOWN)).collect()
    }

    /// What is said of the names that a page does not show.
    pub fn not_shown(&self, metrics: &[Metric]) -> Option<String> {
        let more = self.keys.in_order.len() - self.shown(metrics).len();
        let at_least = if self.keys.in_order.len() == MOST_KEYS { "or more " } else { "" };
        (more > 0)
            .then(|| format!("{more} {at_least}metrics are not shown: of those that its recipe does not declare, the first {SHOWN} are"))
    }

    /// What evaluations found of a metric, by step.
    pub fn validations(&self, name: &str) -> Vec<(u64, f64)> {
        let Some(which) = self.keys.validated.iter().position(|own| own == name) else { return vec![] };
        let of = |values: &Vec<(u16, f64)>| values.iter().find(|v| usize::from(v.0) == which).map(|v| v.1);
        self.validations.iter().filter_map(|(step, values)| Some((*step, of(values)?))).collect()
    }

    /// The numbers of a part from a byte on, of what was read, by the names in `shown`; and where the next part begins. Numbers leave the file, and names:
    /// no line does.
    pub fn points(&self, file: &mut File, from: u64, shown: &BTreeSet<&str>) -> io::Result<(Points, u64)> {
        let (text, next) = part(file, from, self.bytes)?;
        let mut points = Points::new();
        for (step, record) in text.lines().filter_map(record) {
            for (key, value) in record.into_iter().filter(|(key, value)| value.is_number() && shown.contains(key.as_str())) {
                points.entry(key).or_default().insert(step, value);
            }
        }
        Ok((points, next))
    }
}

impl Keys {
    fn take(&mut self, key: &str) {
        if self.in_order.len() < MOST_KEYS && key.len() <= LONGEST_KEY && !self.known.contains(key) {
            self.known.insert(key.into());
            self.in_order.push(key.into());
        }
    }

    /// Which of the metrics of evaluations this is.
    fn validated(&mut self, name: &str) -> Option<u16> {
        let at = self.validated.iter().position(|own| own == name).or_else(|| {
            (self.validated.len() < VALIDATED && name.len() <= LONGEST_KEY).then(|| {
                self.validated.push(name.into());
                self.validated.len() - 1
            })
        });
        at.and_then(|at| u16::try_from(at).ok())
    }
}

/// A curve with a bound: of very many points every n-th is kept, and the last.
#[derive(Debug, Default)]
pub struct Curve {
    points: BTreeMap<u64, Value>,
    /// Every how many is kept, and how many there were.
    thinned: u32,
    seen: u64,
    last: Option<(u64, Value)>,
}

impl Curve {
    /// Of a step that is repeated, the last value counts.
    pub fn put(&mut self, step: u64, value: Value, most: usize) {
        if self.last.as_ref().is_none_or(|last| last.0 <= step) {
            self.last = Some((step, value.clone()));
        }
        if let Some(had) = self.points.get_mut(&step) {
            *had = value;
            return;
        }
        if self.seen.is_multiple_of(1 << self.thinned) {
            self.points.insert(step, value);
        }
        self.seen += 1;
        if self.points.len() > 2 * most {
            let mut keep = false;
            self.points.retain(|_, _| {
                keep = !keep;
                keep
            });
            self.thinned += 1;
        }
    }

    /// At most `most` points, and the last.
    pub fn points(mut self, most: usize) -> Vec<(u64, Value)> {
        self.points.extend(self.last);
        let (every, last) = (self.points.len().div_ceil(most), self.points.len().saturating_sub(1));
        self.points.into_iter().enumerate().filter(|(i, _)| i % every == 0 || *i == last).map(|p| p.1).collect()
    }
}
