//! The folders in which a run keeps its checkpoints: listed, replaced, tidied up, removed.

use super::*;
use crate::files::stale;

/// A folder, or whatever stands in the place of one.
pub(super) fn remove(path: &Path) -> Result<(), CheckpointError> {
    files::remove(path).map_err(io_error("remove", path))
}

/// In the order in which `newest` prefers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Named,
    Old(u32),
    Tmp(u32),
}

pub(super) struct Folder {
    pub(super) path: PathBuf,
    pub(super) step: u64,
    pub(super) kind: Kind,
}

pub(super) fn parse_folder(name: &str) -> Option<(u64, Kind)> {
    let (step, kind) = match name.strip_prefix('.') {
        None => (name, Kind::Named),
        Some(hidden) => {
            let (step, rest) = hidden.split_once('.')?;
            let kind = match rest.split_once('-')? {
                ("old", pid) => Kind::Old(pid.parse().ok()?),
                ("tmp", pid) => Kind::Tmp(pid.parse().ok()?),
                _ => return None,
            };
            (step, kind)
        }
    };
    Some((step.strip_prefix("step-")?.parse().ok()?, kind))
}

pub(super) fn folders(dir: &Path) -> Result<Vec<Folder>, CheckpointError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(io_error("list", dir))? {
        let path = entry.map_err(io_error("list", dir))?.path();
        let name = path.file_name().and_then(|n| n.to_str());
        if let Some((step, kind)) = name.and_then(parse_folder) {
            found.push(Folder { path, step, kind });
        }
    }
    Ok(found)
}

pub(super) fn tmp_path(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!(".step-{step:08}.tmp-{}", std::process::id()))
}

/// Takes away what killed saves left, before more is written: the disk may be full because of it. Returns what cannot be removed.
pub(super) fn tidy(dir: &Path) -> Result<Vec<CheckpointError>, CheckpointError> {
    let mut left = vec![];
    for Folder { path, step, kind } in folders(dir)? {
        let named = dir.join(format!("step-{step:08}"));
        match kind {
            // Killed between the two renames: the old one is the only one.
            Kind::Old(pid) if stale(pid) && !named.exists() => {
                fs::rename(&path, &named).map_err(io_error("restore", &path))?;
            }
            Kind::Old(pid) | Kind::Tmp(pid) if stale(pid) => left.extend(remove(&path).err()),
            _ => {}
        }
    }
    Ok(left)
}

pub(super) fn move_in(tmp: &Path, path: &Path, old: &Path) -> Result<(), CheckpointError> {
    let replaces = path.exists();
    if replaces {
        files::rename(path, old).map_err(io_error("set aside", path))?;
    }
    files::rename(tmp, path).map_err(|cause| {
        if replaces {
            // If this fails too, `newest` still finds the old one where it is.
            let _ = fs::rename(old, path);
        }
        io_error("rename a folder to", path)(cause)
    })
}

/// Returns what cannot be removed.
pub(super) fn prune(dir: &Path, saved: u64, keep: Keep) -> Result<Vec<CheckpointError>, CheckpointError> {
    let mut left = vec![];
    let mut older = folders(dir)?;
    older.retain(|f| f.kind == Kind::Named && f.step < saved && Some(f.step) != keep.best && read_manifest(&f.path).is_ok());
    older.sort_by_key(|f| std::cmp::Reverse(f.step));
    for Folder { path, step, .. } in older.into_iter().skip(keep.newest - 1) {
        // Renamed first, so that a kill half-way leaves nothing that looks like a checkpoint.
        let tmp = tmp_path(dir, step);
        match files::rename(&path, &tmp) {
            Ok(()) => left.extend(remove(&tmp).err()),
            Err(e) => left.push(io_error("remove", &path)(e)),
        }
    }
    Ok(left)
}
