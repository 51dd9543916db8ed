//! What the folders of runs say, for `kiln runs`, `kiln watch` and `kiln report`. Nothing here writes to a run.
//!
//! | file | is |
//! |---|---|
//! | `mod.rs` | which runs a folder holds, how each is doing |
//! | `figures.rs` | a run's metrics.jsonl, read on as it grows |
//! | `details.rs` | settings, receipts, samples, pictures, what its metrics mean |
//! | `page.rs` | the page, live or as one file |
//! | `server.rs` | the page on 127.0.0.1 |

mod details;
mod figures;
mod page;
mod server;

pub use details::{details, picture};
pub use figures::Figures;
pub use page::{live, report};
pub use server::serve;

use crate::Recipes;
use crate::recipe::{self, Better, Metric};
use crate::report::{human_count, human_time};
use crate::run::{self, NOTE};
use crate::{config, input};
use serde::Serialize;
use serde_json::Value;
use std::collections::HashSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A run's folder, and what it is called among the others.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    pub name: String,
    pub path: PathBuf,
}

/// Folders of runs may be sorted into folders, so deep.
const DEEPEST: usize = 3;

/// The runs in a folder, or the one that it is, by name.
pub fn find(root: &Path) -> io::Result<Vec<Found>> {
    let own = || root.canonicalize().ok().and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned())).unwrap_or_else(|| ".".into());
    if is_run(root) {
        return Ok(vec![Found { name: own(), path: root.into() }]);
    }
    let (mut found, mut seen) = (vec![], HashSet::new());
    search(root, "", 1, &mut found, &mut seen)?;
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// `seen`: folders by device and inode, because links may lead to the same one again.
fn search(folder: &Path, prefix: &str, depth: usize, found: &mut Vec<Found>, seen: &mut HashSet<(u64, u64)>) -> io::Result<()> {
    let is = folder.metadata()?;
    if !seen.insert((is.dev(), is.ino())) {
        return Ok(());
    }
    let mut paths = std::fs::read_dir(folder)?.map(|e| Ok(e?.path())).collect::<io::Result<Vec<PathBuf>>>()?;
    // Folders before links to them.
    paths.sort_by_key(|p| (p.is_symlink(), p.clone()));
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') || !path.is_dir() {
            continue;
        }
        let name = format!("{prefix}{name}");
        match is_run(&path) {
            true => {
                let new = path.metadata().is_ok_and(|m| seen.insert((m.dev(), m.ino())));
                found.extend(new.then_some(Found { name, path }));
            }
            // Below the first level, a folder that cannot be read holds no run for us.
            false if depth < DEEPEST => drop(search(&path, &format!("{name}/"), depth + 1, found, seen)),
            false => {}
        }
    }
    Ok(())
}

/// Settings alone may be a preset of one's own.
fn is_run(path: &Path) -> bool {
    path.join("config.toml").is_file() && [NOTE, "metrics.jsonl", ".lock"].iter().any(|name| path.join(name).exists())
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

/// What the folder says now; `figures` are read on.
pub fn summary(found: &Found, figures: &mut Figures, recipes: Recipes) -> Summary {
    let metrics = found.path.join("metrics.jsonl");
    let read = figures.read_on(&metrics);
    let (note, unread_note) = noted(&found.path.join(NOTE));
    let table = config::read_file(&found.path.join("config.toml"));
    let text = |key: &str| table.as_ref().ok().and_then(|t| Some(t.get(key)?.as_str()?.to_string())).unwrap_or_default();
    let train = |key: &str| table.as_ref().ok().and_then(|t| t.get("train")?.get(key).cloned());
    let steps = train("steps").and_then(|v| v.as_integer()).and_then(|v| u64::try_from(v).ok());
    let (status, ended) = status(&found.path, &note, figures.step(), steps);
    let unread = read.err().filter(|e| e.kind() != io::ErrorKind::NotFound).map(|e| format!("metrics.jsonl: {e}"));
    let damaged = match figures.unread() {
        0 => None,
        1 => Some("metrics.jsonl: 1 line cannot be read".to_string()),
        lines => Some(format!("metrics.jsonl: {lines} lines cannot be read")),
    };
    let problems: Vec<String> =
        [table.as_ref().err().map(|e| e.to_string()), unread, damaged, unread_note, ended].into_iter().flatten().collect();
    let recipe = text("recipe");
    let wanted = train("best_metric").and_then(|v| v.as_str().map(String::from)).unwrap_or_default();
    let text_of = |key: &str| note[key].as_str().map(String::from);
    let file = metrics.metadata().ok();
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
        written: file.as_ref().and_then(|m| seconds(m.modified().ok()?)),
        device: text_of("device"),
        bytes: figures.bytes(),
        file: file.map_or(String::new(), |m| format!("{}-{}", m.dev(), m.ino())),
        floor: Some(note["floor"].clone()).filter(|f| !f.is_null()),
    }
}

/// What run.json says, and why it says nothing where it is there.
fn noted(path: &Path) -> (Value, Option<String>) {
    match input::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => (Value::Null, None),
        Err(e) => (Value::Null, Some(format!("{NOTE}: {e}"))),
        Ok(text) => {
            serde_json::from_slice(&text).map_or_else(|e| (Value::Null, Some(format!("{NOTE} cannot be read: {e}"))), |note| (note, None))
        }
    }
}

/// What a recipe says of its metrics; of one that is not here, nothing but the loss is known.
fn declared(recipes: Recipes, name: &str) -> &'static [Metric] {
    recipe::find_in(recipes, name).map_or(&[Metric::LOSS], |r| r.metrics())
}

/// From the folder's lock and run.json; runs of earlier versions have only their steps. And why it failed.
fn status(path: &Path, note: &Value, step: u64, steps: Option<u64>) -> (Status, Option<String>) {
    let error = || note["error"].as_str().map(String::from);
    match note["status"].as_str() {
        _ if run::is_running(path) => (Status::Running, None),
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
