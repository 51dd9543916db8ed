//! A checkpoint is a folder of safetensors files and one `checkpoint.json`, which holds every file's length and xxh3
//! and is sealed by a checksum of its own text. It appears under its name whole or not at all:
//!
//! | folder | is |
//! |---|---|
//! | `step-00000100` | a whole checkpoint: it was renamed here after everything in it had been fsynced |
//! | `.step-00000100.old-PID` | a whole one, set aside while its replacement is renamed in |
//! | `.step-00000100.tmp-PID` | being written, or being removed; never read |
//!
//! | `aside-step-00000100` | a whole or broken one that a run which went back no longer continues; kept, never read by itself |
//!
//! A process killed at any point leaves the previous checkpoint or the new one, and `newest` finds it.

mod folders;
mod manifest;
mod ranks;
mod tensors;

pub(crate) use manifest::Sum;
pub use ranks::{Held, Written, write_parts};
pub(crate) use tensors::write_safetensors;
pub use tensors::{Loaded, Tensor, TensorFile, load_safetensors};

use crate::files::{self, sync_folder};
use crate::input;
use folders::{Folder, Kind, folders, move_in, prune, remove, tidy, tmp_path};
use manifest::{FORMAT, MANIFEST, read_manifest, sum_of_file, write_folder};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("cannot {action} {}: {cause}", .path.display())]
    Io { action: &'static str, path: PathBuf, cause: io::Error },
    #[error("{}: {reason}", .path.display())]
    Broken { path: PathBuf, reason: String },
    #[error("{}: format {found}, but this version reads format {FORMAT}", .path.display())]
    Format { path: PathBuf, found: Value },
    #[error("{}: '{name}' holds {value} (number {at}), and a model whose weights are not finite computes nothing but NaN: take another copy of it, or an earlier checkpoint", .path.display())]
    NotFinite { path: PathBuf, name: String, at: usize, value: f64 },
    #[error("tensor {name:?}: {reason}")]
    Tensor { name: String, reason: String },
    #[error("{name:?} cannot be the name of a checkpoint's file: {reason}")]
    FileName { name: String, reason: &'static str },
}

/// A checkpoint whose every file was found whole. They stay open, so that a run which removes it meanwhile takes nothing away.
#[derive(Debug)]
pub struct Checkpoint {
    pub path: PathBuf,
    pub step: u64,
    pub meta: Value,
    files: BTreeMap<String, (Sum, File)>,
}

/// A candidate that `newest` passed over.
#[derive(Debug)]
pub struct Skipped {
    pub path: PathBuf,
    pub reason: String,
}

/// The weights of the last step, and those averaged over steps (train.ema), where there are any.
pub const MODEL: &str = "model.safetensors";
pub const AVERAGED: &str = "averaged.safetensors";

/// Which older checkpoints stay when one is saved.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keep {
    /// So many of the newest, the new one among them; 0 keeps all.
    pub newest: usize,
    /// And that of this step.
    pub best: Option<u64>,
}

impl From<usize> for Keep {
    fn from(newest: usize) -> Keep {
        Keep { newest, best: None }
    }
}

/// What `save` made, and what it could not remove.
#[derive(Debug)]
pub struct Saved {
    pub path: PathBuf,
    pub left: Vec<CheckpointError>,
}

/// Saves `files` of tensors and `plain` ones as `dir/step-NNNNNNNN`, replacing one of the same step. Then the older whole checkpoints that `keep`
/// does not name are removed. Those of later steps, and broken ones, are left alone.
pub fn save(
    dir: &Path,
    step: u64,
    files: &[(&str, Vec<Tensor>)],
    plain: &[(&str, Vec<u8>)],
    meta: &Value,
    keep: Keep,
) -> Result<Saved, CheckpointError> {
    save_with_parts(dir, step, files, plain, &[], meta, keep)
}

/// The same with what ranks have written of their parts, which is moved there.
pub fn save_with_parts(
    dir: &Path,
    step: u64,
    files: &[(&str, Vec<Tensor>)],
    plain: &[(&str, Vec<u8>)],
    parts: &[Written],
    meta: &Value,
    keep: Keep,
) -> Result<Saved, CheckpointError> {
    let pid = std::process::id();
    let path = dir.join(format!("step-{step:08}"));
    let old = dir.join(format!(".step-{step:08}.old-{pid}"));
    let tmp = tmp_path(dir, step);

    match fs::create_dir(dir) {
        Ok(()) => engine::mutant!("the-name-of-checkpoints-is-not-synced", sync_folder(files::folder_of(dir)), Ok(()))
            .map_err(io_error("sync", files::folder_of(dir)))?,
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(io_error("create", dir)(e)),
    }
    let mut left = tidy(dir)?;
    if let Err(e) = write_folder(&tmp, step, files, plain, parts, meta).and_then(|()| move_in(&tmp, &path, &old)) {
        // Best effort: the error that matters is the first, and the next save tidies.
        let _ = fs::remove_dir_all(&tmp);
        return Err(e);
    }
    engine::mutant!("the-name-of-a-checkpoint-is-not-synced", sync_folder(dir), Ok(())).map_err(io_error("sync", dir))?;
    if engine::mutant!("parts-of-killed-saves-stay", !parts.is_empty(), false) {
        left.extend(ranks::forget_parts(dir));
    }
    // The new one is safe: what is in the way of tidiness is no reason to stop.
    left.extend(remove(&old).err());
    if keep.newest > 0 {
        left.extend(prune(dir, step, keep)?);
    }
    Ok(Saved { path, left })
}

/// Opens a checkpoint and checks the length and the checksum of everything in it.
pub fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let checkpoint = read_manifest(path)?;
    for (name, (sum, file)) in &checkpoint.files {
        let path = path.join(name);
        sum.check(&path, &sum_of_file(&path, file)?)?;
    }
    Ok(checkpoint)
}

/// A run that trains meanwhile may remove what was just listed; so often is the folder listed again.
const LOOKS: usize = 100;

/// The newest whole checkpoint in `dir`, and the newer ones that were passed over because they are broken. One that cannot be read is an
/// error: it may be whole. A missing `dir` holds none.
pub fn newest(dir: &Path) -> Result<(Option<Checkpoint>, Vec<Skipped>), CheckpointError> {
    for i in 0..LOOKS {
        match look(dir)? {
            // A listing is no snapshot: it may have passed where the new one appears before the old one went.
            Some((None, skipped)) if skipped.is_empty() && i < 3 && dir.exists() => {}
            Some(found) => return Ok(found),
            None => {}
        }
    }
    Err(broken(dir, "its checkpoints are removed faster than they can be read"))
}

/// None where a checkpoint went away while it was looked at.
#[allow(clippy::type_complexity)]
fn look(dir: &Path) -> Result<Option<(Option<Checkpoint>, Vec<Skipped>)>, CheckpointError> {
    let mut skipped = Vec::new();
    let mut folders = match folders(dir) {
        Err(CheckpointError::Io { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => {
            return Ok(Some((None, skipped)));
        }
        found => found?,
    };
    folders.retain(|f| !matches!(f.kind, Kind::Tmp(_)));
    folders.sort_by_key(|f| (std::cmp::Reverse(f.step), f.kind));
    for Folder { path, step, .. } in folders {
        let reason = match open(&path) {
            Ok(found) if found.step == step => return Ok(Some((Some(found), skipped))),
            Ok(found) => format!("its {MANIFEST} says step {}", found.step),
            Err(_) if path.symlink_metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound) => return Ok(None),
            Err(e @ CheckpointError::Io { .. }) => return Err(e),
            Err(e) => e.to_string(),
        };
        skipped.push(Skipped { path, reason });
    }
    Ok(Some((None, skipped)))
}

/// Renames the checkpoints after `step`, broken ones too, so that a run which goes on from there neither meets nor overwrites them; returns
/// their new names.
pub fn set_aside(dir: &Path, after: Option<u64>) -> Result<Vec<PathBuf>, CheckpointError> {
    let mut moved = vec![];
    let mut later = match folders(dir) {
        Err(CheckpointError::Io { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => return Ok(moved),
        found => found?,
    };
    later.retain(|f| !matches!(f.kind, Kind::Tmp(_)) && after.is_none_or(|step| f.step > step));
    later.sort_by_key(|f| (f.step, f.kind));
    for Folder { path, step, .. } in later {
        let name = format!("aside-step-{step:08}");
        let numbered = (2..).map(|i| dir.join(format!("{name}-{i}")));
        let to = std::iter::once(dir.join(&name)).chain(numbered).find(|to| to.symlink_metadata().is_err()).expect("numbers do not end");
        fs::rename(&path, &to).map_err(io_error("set aside", &path))?;
        moved.push(to);
    }
    Ok(moved)
}

impl Checkpoint {
    /// Whether one of the files is called so.
    pub fn has(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }

    /// Reads one of the files, for example `model.safetensors`.
    pub fn file(&self, name: &str) -> Result<Loaded, CheckpointError> {
        self.joined(name, Loaded::parse(&self.path.join(name), self.bytes(name)?)?)
    }

    /// The model's weights: averaged over steps where it has those, or, if they are to be `raw`, of its last step.
    pub fn weights(&self, raw: bool) -> Result<Loaded, CheckpointError> {
        self.finite(if self.has(AVERAGED) && !raw { AVERAGED } else { MODEL })
    }

    /// One of the files, whose weights must be finite.
    pub fn finite(&self, name: &str) -> Result<Loaded, CheckpointError> {
        self.file(name)?.finite(&self.path.join(name))
    }

    /// The same as it lies there.
    pub fn bytes(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let path = self.path.join(name);
        let Some((sum, file)) = self.files.get(name) else {
            let have: Vec<_> = self.files.keys().map(String::as_str).collect();
            let reason = format!("not part of the checkpoint, which has {}", have.join(", "));
            return Err(CheckpointError::Broken { path, reason });
        };
        let mut bytes = crate::input::room(sum.bytes).map_err(io_error("read", &path))?;
        let read = (&*file).rewind().and_then(|()| (&*file).read_to_end(&mut bytes));
        read.map_err(io_error("read", &path))?;
        // Once more, because it may have changed since it was opened.
        sum.check(&path, &Sum::new(bytes.len() as u64, xxh3_64(&bytes)))?;
        Ok(bytes)
    }
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_path_buf();
    move |cause| CheckpointError::Io { action, path, cause }
}

fn broken(path: &Path, reason: impl Into<String>) -> CheckpointError {
    CheckpointError::Broken { path: path.to_path_buf(), reason: reason.into() }
}

#[cfg(test)]
mod tests;
