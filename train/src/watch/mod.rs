//! What the folders of runs say, for `kiln runs`, `kiln watch` and `kiln report`. Nothing here writes to a run.
//!
//! | file | is |
//! |---|---|
//! | `mod.rs` | which runs a folder holds, how each is doing |
//! | `figures.rs` | a run's metrics.jsonl, read on as it grows |
//! | `details.rs` | settings, receipts, samples, pictures, what its metrics mean |
//! | `page.rs` | the page, live or as one file |
//! | `server.rs` | the page as it is served |

mod details;
mod figures;
mod page;
mod server;

pub use details::{details, picture};
pub use figures::{Curve, Figures};
pub use page::{live, report};
pub use server::{serve, token};

use crate::Recipes;
use crate::inside::Inside;
use crate::recipe::{self, Better, Metric};
use crate::report::{human_count, human_time};
use crate::run::{self, NOTE};
use figures::METRICS;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A run's folder, and what it is called among the others.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    pub name: String,
    pub path: PathBuf,
    /// The folder that was named; `path` lies in it, or is it.
    pub root: PathBuf,
}

impl Found {
    /// Everything of a run is read through this: others may have put links in it, and put one in its own place since it was found.
    pub fn folder(&self) -> io::Result<Inside> {
        Inside::open(&self.root, self.path.strip_prefix(&self.root).unwrap_or(Path::new("")))
    }
}

/// Folders of runs may be sorted into folders, so deep.
const DEEPEST: usize = 3;
const CONFIG: &str = "config.toml";
const LOCK: &str = ".lock";

/// Runs that a page shows.
pub const MOST_RUNS: usize = 1000;
/// Folders that are looked into for runs; of a tree with more, the rest is not looked at.
const MOST_FOLDERS: usize = 100_000;

/// The runs in a folder, or the one that it is, by name.
pub fn find(root: &Path) -> io::Result<Vec<Found>> {
    let own = || root.canonicalize().ok().and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned())).unwrap_or_else(|| ".".into());
    let folder = Inside::open(root, Path::new(""))?;
    if is_run(&folder) {
        return Ok(vec![Found { name: own(), path: root.into(), root: root.into() }]);
    }
    let (mut found, mut seen) = (vec![], HashSet::new());
    search(root, &folder, Path::new(""), 1, &mut found, &mut seen)?;
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// `seen`: folders by device and inode, because links may lead to the same one again. Links that are not to be trusted are passed over.
fn search(
    root: &Path,
    folder: &Inside,
    below: &Path,
    depth: usize,
    found: &mut Vec<Found>,
    seen: &mut HashSet<(u64, u64)>,
) -> io::Result<()> {
    if !seen.insert(folder.is()?) || seen.len() > MOST_FOLDERS {
        return Ok(());
    }
    let mut names = folder.names()?;
    names.retain(|name| !name.as_encoded_bytes().starts_with(b"."));
    // Folders before links to them.
    names.sort_by_key(|name| folder.is_link(name));
    for name in names {
        if seen.len() > MOST_FOLDERS {
            break;
        }
        let Ok(inner) = folder.enter(OsStr::new(&name)) else { continue };
        let below = below.join(name);
        match is_run(&inner) {
            true => {
                let new = inner.is().is_ok_and(|is| seen.insert(is));
                let name = below.to_string_lossy().into_owned();
                found.extend(new.then(|| Found { name, path: root.join(below), root: root.into() }));
            }
            // Below the first level, a folder that cannot be read holds no run for us.
            false if depth < DEEPEST => drop(search(root, &inner, &below, depth + 1, found, seen)),
            false => {}
        }
    }
    Ok(())
}

/// Settings alone may be a preset of one's own.
fn is_run(folder: &Inside) -> bool {
    folder.has(CONFIG) && [NOTE, METRICS, LOCK].iter().any(|name| folder.has(name))
}

/// How a run is doing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// A process is training in its folder.
    Running,
    /// By a signal, saved, before its last step.
    Stopped,
    /// With all its steps, or early because nothing got better.
    Finished,
    /// By an error, or killed.
    Failed,
}

impl Status {
    pub fn name(self) -> &'static str {
        match self {
            Status::Running => "running",
            Status::Stopped => "stopped",
            Status::Finished => "finished",
            Status::Failed => "failed",
        }
    }
}

/// The best of a run's evaluations.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BestOf {
    pub metric: String,
    pub value: f64,
    pub step: u64,
    /// As people read it.
    pub shown: String,
}

/// A run in a line: what `kiln runs --json` prints and the page shows.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub name: String,
    pub path: PathBuf,
    pub status: Status,
    /// Why it failed, or what of its folder cannot be read.
    pub problem: Option<String>,
    pub recipe: String,
    pub preset: String,
    /// Steps that are recorded, and steps in all.
    pub step: u64,
    pub steps: Option<u64>,
    pub best: Option<BestOf>,
    /// The median of the last records, of what `work` names.
    pub per_second: Option<f64>,
    pub work: String,
    /// In seconds since 1970: when it began, or was resumed; when its metrics were written to last.
    pub started: Option<u64>,
    pub written: Option<u64>,
    pub device: Option<String>,
    /// Bytes of metrics.jsonl, and which file that is: whoever reads on needs both.
    pub bytes: u64,
    pub file: String,
    /// The loss that no model can go below, if it is known.
    pub floor: Option<Value>,
}

impl Summary {
    /// `7.99K tok/s`
    pub fn speed(&self) -> String {
        self.per_second.map_or("-".into(), |v| format!("{} {}/s", human_count(v), self.work))
    }

    /// `60 of 200`
    pub fn progress(&self) -> String {
        self.steps.map_or(self.step.to_string(), |steps| format!("{} of {steps}", self.step))
    }

    /// How long ago something was recorded: `12.0s ago`.
    pub fn age(&self, now: u64) -> String {
        match self.written.map(|at| now.saturating_sub(at)) {
            None => "-".into(),
            Some(0) => "just now".into(),
            Some(seconds) => format!("{} ago", human_time(Duration::from_secs(seconds))),
        }
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    seconds(SystemTime::now()).unwrap_or(0)
}

fn seconds(time: SystemTime) -> Option<u64> {
    time.duration_since(UNIX_EPOCH).ok().map(|t| t.as_secs())
}

/// Letters of a word that a file of a run says, and of a sentence.
const WORD: usize = 200;
const SENTENCE: usize = 2000;

/// What the folder says now; `figures` are read on. A file that is damaged is said to be, and says nothing else.
pub fn summary(found: &Found, figures: &mut Figures, recipes: Recipes) -> Summary {
    let run = found.folder();
    let (mut problems, mut metrics, mut note, mut table) = (vec![], None, Value::Null, toml::Table::new());
    match &run {
        Err(e) => problems.push(e.to_string()),
        Ok(run) => {
            table = settings_of(run).unwrap_or_else(|e| {
                problems.push(e);
                toml::Table::new()
            });
            match there(figures.read_on(run)) {
                Ok(file) => metrics = file.and_then(|file| file.metadata().ok()),
                Err(e) => problems.push(problem(METRICS, &e)),
            }
            problems.extend(match figures.unread() {
                0 => None,
                1 => Some(format!("{METRICS}: 1 line cannot be read")),
                lines => Some(format!("{METRICS}: {lines} lines cannot be read")),
            });
            if metrics.as_ref().is_some_and(|m| figures.is_cut(m.len())) {
                problems.push(format!("{METRICS} is longer than what is read of it"));
            }
            problems.extend(figures.unlooked());
            note = noted(run).unwrap_or_else(|e| {
                problems.push(e);
                Value::Null
            });
        }
    }
    let text = |key: &str| table.get(key).and_then(|v| Some(cut(v.as_str()?, WORD))).unwrap_or_default();
    let train = |key: &str| table.get("train")?.get(key).cloned();
    let steps = train("steps").and_then(|v| v.as_integer()).and_then(|v| u64::try_from(v).ok());
    let (status, ended) = status(run.as_ref().ok(), &note, figures.step(), steps);
    problems.extend(ended.map(|why| cut(&why, SENTENCE)));
    let recipe = text("recipe");
    let wanted = train("best_metric").and_then(|v| v.as_str().map(String::from)).unwrap_or_default();
    let text_of = |key: &str| note[key].as_str().map(|text| cut(text, WORD));
    let floor = || Some(json!({ "name": cut(note["floor"]["name"].as_str()?, WORD), "value": note["floor"]["value"].as_f64()? }));
    Summary {
        name: found.name.clone(),
        path: found.path.clone(),
        status,
        problem: (!problems.is_empty()).then(|| problems.join("; ")),
        best: best(figures, declared(recipes, &recipe), &wanted),
        preset: text("preset"),
        recipe,
        step: figures.step(),
        steps,
        per_second: figures.speed(),
        work: text_of("work").unwrap_or_else(|| "items".into()),
        started: note["started"].as_u64(),
        written: metrics.as_ref().and_then(|m| seconds(m.modified().ok()?)),
        device: text_of("device"),
        bytes: figures.bytes(),
        file: metrics.map_or(String::new(), |m| format!("{}-{}", m.dev(), m.ino())),
        floor: floor(),
    }
}

/// A file that is not there is none; that is no problem.
fn there<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

fn problem(name: &str, e: &io::Error) -> String {
    format!("{name}: {e}")
}

/// Texts are shown up to so many letters.
fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{} ..", &text[..at]),
        None => text.into(),
    }
}

/// kiln's own files of settings and notes are a few thousand bytes.
const SMALL: u64 = 1 << 20;

/// A run's settings. What is wrong with them leaves the machine, so it is said by place and not in the file's words: who can write to a run may have put
/// any file in its place.
fn settings_of(run: &Inside) -> Result<toml::Table, String> {
    let text = run.read(CONFIG, SMALL).map_err(|e| problem(CONFIG, &e))?;
    let text = String::from_utf8(text).map_err(|_| format!("{CONFIG}: it is not UTF-8 text"))?;
    text.parse().map_err(|e: toml::de::Error| {
        let before = text.get(..e.span().map_or(0, |at| at.start)).unwrap_or_default();
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        format!("{CONFIG} cannot be read: line {}, column {column} is no TOML", before.matches('\n').count() + 1)
    })
}

/// JSON, or where it is none.
fn json_of(name: &str, text: &[u8]) -> Result<Value, String> {
    serde_json::from_slice(text).map_err(|e| format!("{name} cannot be read: line {}, column {} is no JSON", e.line(), e.column()))
}

/// What run.json says; nothing where it is not there.
fn noted(run: &Inside) -> Result<Value, String> {
    let text = there(run.read(NOTE, SMALL)).map_err(|e| problem(NOTE, &e))?;
    text.map_or(Ok(Value::Null), |text| json_of(NOTE, &text))
}

/// What a recipe says of its metrics; of one that is not here, nothing but the loss is known.
fn declared(recipes: Recipes, name: &str) -> &'static [Metric] {
    recipe::find_in(recipes, name).map_or(&[Metric::LOSS], |r| r.metrics())
}

/// From the folder's lock and run.json; runs of earlier versions have only their steps. And why it failed.
fn status(run: Option<&Inside>, note: &Value, step: u64, steps: Option<u64>) -> (Status, Option<String>) {
    let error = || note["error"].as_str().map(String::from);
    match note["status"].as_str() {
        _ if run.and_then(|run| run.file(LOCK).ok()).is_some_and(|lock| run::is_held(&lock)) => (Status::Running, None),
        Some("finished") => (Status::Finished, None),
        Some("stopped") => (Status::Stopped, None),
        Some("failed") => (Status::Failed, error()),
        Some("running") => (Status::Failed, Some("it was killed, or its machine went down: no process trains in its folder".into())),
        _ if steps.is_some_and(|steps| step >= steps) => (Status::Finished, None),
        _ => (Status::Stopped, None),
    }
}

/// The evaluation that `train.best_metric` would choose: by the metric that is named, or the recipe's first one with a direction.
fn best(figures: &Figures, metrics: &[Metric], wanted: &str) -> Option<BestOf> {
    let directed = metrics.iter().filter(|m| m.better != Better::Neither && (wanted.is_empty() || wanted == m.name));
    directed.into_iter().find_map(|m| {
        let all = figures.validations(m.name);
        // Of equal ones the first, as training keeps it.
        let better = |a: &(u64, f64), b: &(u64, f64)| if m.better == Better::Higher { b.1 > a.1 } else { b.1 < a.1 };
        let (step, value) = all.into_iter().reduce(|a, b| if better(&a, &b) { b } else { a })?;
        Some(BestOf { metric: m.name.into(), value, step, shown: Metric::shown(metrics, m.name, value) })
    })
}

#[cfg(test)]
mod tests;
