//! `run.json`: what is known of a run beside its settings and numbers, and how it ended. Written when it begins and when it ends; `kiln runs` and
//! `kiln watch` read it.

use super::folder::{Place, io, write_own};
use super::{Finished, Options, ranks_json};
use crate::config::Config;
use crate::inside::Inside;
use crate::recipe::{Task, TrainError};
use engine::Device;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

pub const FILE: &str = "run.json";
/// What the model wrote when a run ended, a line of JSON each: step and text.
pub const SAMPLES: &str = "samples.jsonl";

/// More is not kept of them.
const MOST: u64 = 1 << 30;

/// A run that has begun. Where it is dropped without its end, as by a kill, the file says "running" and nobody holds the folder's lock.
pub struct Note {
    known: Value,
}

impl Note {
    pub fn of(task: &dyn Task, config: &Config, device: &Device, options: &Options) -> Note {
        let mut known = json!({
            "status": "running",
            "started": seconds(),
            "command": options.command,
            "device": device.describe(),
            "work": task.work().0,
            "step_name": task.step_name(),
            "floor": task.floor().map(|(name, value)| json!({ "name": name, "value": value })),
            "version": env!("CARGO_PKG_VERSION"),
        });
        if let Some(ranks) = ranks_json(&config.ranks) {
            known["ranks"] = ranks;
        }
        Note { known }
    }

    pub fn begin(&self, out: &Path) -> Result<(), TrainError> {
        self.write(out)
    }

    /// Notes how it ended. The run itself is saved: where this cannot be written, a warning is enough.
    pub fn end(mut self, place: &Place, out: &Path, ended: &Result<Finished, TrainError>) {
        let (status, error) = match ended {
            Ok(f) if f.interrupted => ("stopped", Value::Null),
            Ok(_) => ("finished", Value::Null),
            Err(e) => ("failed", json!(e.to_string())),
        };
        self.known["status"] = status.into();
        self.known["error"] = error;
        self.known["ended"] = seconds().into();
        // A folder that was moved or removed is not written to.
        if place.check(0).is_ok()
            && let Err(e) = self.write(out)
        {
            crate::warn!("{e} (it says how the run ended; nothing else is lost)");
        }
    }

    fn write(&self, out: &Path) -> Result<(), TrainError> {
        write_own(out, FILE, format!("{}\n", serde_json::to_string_pretty(&self.known).expect("plain values")))
    }
}

/// Since 1970.
fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs())
}

/// Whether a run came to its end. Where nothing is noted, as by earlier versions, nobody knows better.
pub fn is_finished(run: &Path) -> Result<bool, TrainError> {
    let path = run.join(FILE);
    match crate::input::read_to_string(&path) {
        Ok(text) => Ok(serde_json::from_str::<Value>(&text).is_ok_and(|note| note["status"] == "finished")),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(e) => Err(io("cannot read", &path)(e)),
    }
}

/// Keeps what the model wrote at a step, for the page of the run.
pub fn note_sample(out: &Path, step: u64, text: &str) -> Result<(), TrainError> {
    let path = out.join(SAMPLES);
    // Not from where a link leads: it would be written into the run's folder.
    let before = match Inside::open(out, Path::new("")).and_then(|run| run.read(SAMPLES, MOST)) {
        Ok(text) => String::from_utf8_lossy(&text).into_owned(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(io("cannot read", &path)(e)),
    };
    // One of the same step was of a run that did not come to its end.
    let is_other = |line: &&str| !serde_json::from_str::<Value>(line).is_ok_and(|sample| sample["step"] == step);
    let others: String = before.split_inclusive('\n').filter(is_other).collect();
    write_own(out, SAMPLES, format!("{others}{}\n", json!({ "step": step, "text": text })))
}
