//! A run's folder: its lock, its files, its checkpoints.

use super::best::Best;
use super::receipts_json;
use super::steps::Values;
use crate::checkpoint::{self, AVERAGED, Held, Keep, MODEL, Saved, Tensor, Written};
use crate::config::{Config, TrainConfig};
use crate::finite::first_broken;
use crate::optim::ema;
use crate::recipe::{Session, Task, TrainError, is_kept};
use crate::{files, input, launch};
use engine::ranks::{Part, Ranks};
use engine::{Device, Role};
use rustix::fs::OFlags;
use serde_json::json;
use std::fs;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path};
use std::time::Duration;

/// The last line of a run's config.toml: without it, the file was cut by a power cut or a full disk, and is not what somebody wrote.
pub const END: &str = "# end of the run's settings\n";

pub fn io(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> TrainError {
    let path = path.to_path_buf();
    move |cause| TrainError::Io { action, path: path.clone(), cause }
}

pub fn write_whole(path: &Path, text: &str) -> Result<(), TrainError> {
    write_bytes(path, text.as_bytes())
}

/// Writes a file of a run's folder, where somebody may have put a link since the run began: see `files::write_inside`.
pub fn write_own(out: &Path, name: &str, bytes: impl AsRef<[u8]>) -> Result<(), TrainError> {
    let write = engine::mutant!(
        "a-runs-files-are-written-through-links",
        files::write_inside(out, name, bytes.as_ref()),
        files::write(&out.join(name), bytes.as_ref())
    );
    write.map_err(io("cannot write", &out.join(name)))
}

/// Writes a file that is whole or not there.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    files::write(path, bytes).map_err(io("cannot write", path))
}

/// A run's folder as it was when the run began.
pub struct Place<'a> {
    path: &'a Path,
    /// Device and inode.
    is: (u64, u64),
}

impl Place<'_> {
    pub fn of(path: &Path) -> Result<Place<'_>, TrainError> {
        let m = fs::metadata(path).map_err(io("cannot read", path))?;
        Ok(Place { path, is: (m.dev(), m.ino()) })
    }

    /// A folder that was removed or moved is not made again: half a run would be in it.
    pub fn check(&self, step: u64) -> Result<(), TrainError> {
        match fs::metadata(self.path) {
            Ok(m) if (m.dev(), m.ino()) == self.is => stays(self.path, &self.path.join("checkpoints")),
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(io("cannot read the run's folder", self.path)(e)),
            _ => Err(TrainError::Gone { path: self.path.into(), step }),
        }
    }
}

/// More than any run has; a folder with more is searched no further.
const MOST_FILES: usize = 1_000_000;

/// Refuses a run's folder with links that lead out of it: a folder that came from somebody else would make training write where they lead.
fn holds_all_it_names(out: &Path) -> Result<(), TrainError> {
    let whole = out.canonicalize().map_err(io("cannot open", out))?;
    let (mut folders, mut seen) = (vec![whole.clone()], 0);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(io("cannot read", &folder))? {
            let entry = entry.map_err(io("cannot read", &folder))?;
            let (path, kind) = (entry.path(), entry.file_type().map_err(io("cannot read", &folder))?);
            seen += 1;
            if seen > MOST_FILES {
                return Err(TrainError::Other(format!("{} holds more than {MOST_FILES} files: it is no run's folder", out.display())));
            }
            if kind.is_dir() {
                folders.push(path);
            } else {
                stays(&whole, &path)?;
            }
        }
    }
    Ok(())
}

/// Refuses a link that leads out of a run's folder.
pub fn stays(run: &Path, path: &Path) -> Result<(), TrainError> {
    match engine::mutant!("a-run-folder-with-links-out-is-written-to", !path.is_symlink(), true)
        || run.canonicalize().is_ok_and(|whole| leads_inside(path, &whole))
    {
        true => Ok(()),
        false => Err(TrainError::Other(format!(
            "{} is a link that leads out of the run's folder, where training would write: put the file or folder itself there, remove the link, or name another --out",
            path.display()
        ))),
    }
}

/// Whether what a link names lies in this folder. Of a link to what is not there, as of `best` after its checkpoint was set aside, its text decides: what is
/// then written there would be created.
fn leads_inside(link: &Path, folder: &Path) -> bool {
    match link.canonicalize() {
        Ok(leads) => leads.starts_with(folder),
        Err(_) => fs::read_link(link).is_ok_and(|text| {
            let plain = text.components().all(|c| c != Component::ParentDir);
            // What there is of the way must not be a link that leads elsewhere.
            let way = link.parent().unwrap_or(folder).join(&text);
            plain && way.ancestors().skip(1).find_map(|a| a.canonicalize().ok()).is_some_and(|a| a.starts_with(folder))
        }),
    }
}

/// One process at a time writes to a run's folder; the lock goes with the process. A link in its place leads to a file that is not ours.
pub fn lock(out: &Path) -> Result<fs::File, TrainError> {
    holds_all_it_names(out)?;
    let path = out.join(".lock");
    if let Some(m) = path.symlink_metadata().ok().filter(|m| !m.is_symlink()) {
        input::regular(&m).map_err(io("cannot open", &path))?;
    }
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(false).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32);
    let file = options.open(&path).map_err(io("cannot open", &path))?;
    // Whoever looks whether a run is under way (`is_held`) holds the lock for an instant.
    let mut tried = file.try_lock();
    for _ in 0..20 {
        if !matches!(tried, Err(fs::TryLockError::WouldBlock)) {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
        tried = file.try_lock();
    }
    match tried {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(TrainError::Other(format!("another process is training in {}", out.display()))),
        Err(fs::TryLockError::Error(cause)) => Err(io("cannot lock", &path)(cause)),
    }
}

/// Whether a process is training in a run's folder now, by its lock.
pub fn is_held(lock: &fs::File) -> bool {
    matches!(lock.try_lock_shared(), Err(fs::TryLockError::WouldBlock))
}

/// Whether anything was saved since the run began. Without this note, checkpoints that are gone (moved, or on a disk that is not mounted) would look
/// like a run that was killed before its first save.
const SAVED: &str = ".saved";

pub fn note_saved(out: &Path, saved: bool) -> Result<(), TrainError> {
    write_own(out, SAVED, if saved { "yes\n" } else { "no\n" })
}

/// What the note says; runs of earlier versions have none.
pub fn has_saved(out: &Path) -> Result<Option<bool>, TrainError> {
    let path = out.join(SAVED);
    match input::read(&path) {
        Ok(text) => Ok(Some(text == b"yes\n")),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io("cannot read", &path)(e)),
    }
}

/// What a checkpoint notes of the run up to it.
pub struct Notes<'a> {
    pub step: u64,
    pub best: &'a Best,
    /// The last reports of training and of validation: their steps and values.
    pub figures: &'a serde_json::Value,
    /// What this step is recorded with, but for its evaluation.
    pub values: &'a Values,
    /// Why a run that ends with this step is no success.
    pub problem: Option<&'a str>,
    pub commands: &'a [String],
}

/// Saves a checkpoint: every rank the parts that it has, and the first all the rest.
pub fn save(s: &Session, task: &dyn Task, config: &Config, c: &TrainConfig, dir: &Path, notes: &Notes) -> Result<Saved, TrainError> {
    let (step, ranks) = (notes.step, &config.ranks);
    let kept = s.store.iter().filter(|(name, t)| is_kept(name) && t.role != Role::Frozen);
    let numbers = kept.map(|(name, t)| Ok((name, t, t.bytes()?))).collect::<Result<Vec<_>, TrainError>>()?;
    let own = numbers.iter().filter(|(name, t, _)| t.role == Role::Param || name.starts_with(ema::PREFIX));
    let broken = own.into_iter().find_map(|(name, t, bytes)| Some((*name, first_broken(bytes, t.meta.dtype.name())?.1)));
    all_finite(ranks, step, engine::mutant!("weights-of-nan-are-saved", broken, None))?;
    type Own<'a> = (&'a engine::store::Tensor, Tensor<'a>);
    let tensors = |role: Role| -> Vec<Own> {
        let own = numbers.iter().filter(|(name, t, _)| t.role == role && !name.starts_with(ema::PREFIX));
        own.map(|(name, t, bytes)| (*t, Tensor { name, dtype: t.meta.dtype.name(), shape: &t.meta.shape, bytes })).collect()
    };
    // Parameters that no optimizer moves have no average: they are what they were.
    let average = |t: Tensor<'_>| numbers.iter().find(|(name, ..)| name.strip_prefix(ema::PREFIX) == Some(t.name)).map(|n| &n.2[..]);
    let averaged =
        || tensors(Role::Param).into_iter().map(|(held, t)| (held, Tensor { bytes: average(t).unwrap_or(t.bytes), ..t })).collect();
    let mass = s.store.get(ema::MASS).map_or(Ok(vec![0.0]), |mass| mass.f32())?;
    let mut all: Vec<(&str, Vec<Own>)> = vec![(MODEL, tensors(Role::Param)), ("state.safetensors", tensors(Role::Carried))];
    all.extend(
        engine::mutant!("averages-of-nothing-are-saved", mass[0] > 0.0, s.store.get(ema::MASS).is_some()).then(|| (AVERAGED, averaged())),
    );
    let parts = parts_of_all(ranks, &all, dir, step)?;
    if ranks.rank() > 0 {
        return told(ranks, Ok(Saved { path: dir.join(format!("step-{step:08}")), left: vec![] }));
    }
    let mut files: Vec<(&str, Vec<Tensor>)> = vec![];
    for (name, held) in all {
        files.push((name, held.into_iter().filter(|h| h.0.parts.is_empty()).map(|h| h.1).collect()));
    }
    let meta = json!({
        "recipe": config.text("recipe"),
        "config": config.to_json(),
        "step": step,
        "schedule_steps": c.schedule_steps(),
        "data_position": step * (c.batch * c.accumulate) as u64,
        "identity": task.identity()?,
        "device": s.device.describe(),
        "ranks": { "data": ranks.data.size, "tensor": ranks.tensor.size, "over": launch::connection() },
        "receipts": receipts_json(s),
        "choices": choices(&s.device),
        "best": notes.best.note(c),
        "figures": notes.figures,
        "values": notes.values,
        "problem": notes.problem,
        "commands": notes.commands,
        "version": env!("CARGO_PKG_VERSION"),
    });
    let best = notes.best.at.as_ref().map(|at| at.0).filter(|_| c.keep_best);
    let saved = checkpoint::save_with_parts(dir, step, &files, &task.kept()?, &parts, &meta, Keep { newest: c.keep, best });
    told(ranks, saved.map_err(TrainError::from))
}

/// Weights that are not finite are not kept. Each rank looks at what it has, and what one of them finds is an error of all.
fn all_finite(ranks: &Ranks, step: u64, own: Option<(&str, f64)>) -> Result<(), TrainError> {
    let own = own.map(|(name, value)| format!("{value} {name}")).unwrap_or_default();
    let all = if ranks.size() > 1 { ranks.gather(own.as_bytes())? } else { vec![own.into_bytes()] };
    let found = all.iter().map(|told| String::from_utf8_lossy(told)).find(|told| !told.is_empty());
    match found.as_ref().and_then(|told| told.split_once(' ')) {
        Some((value, name)) => Err(TrainError::BadWeight { name: name.into(), value: value.parse().unwrap_or(f64::NAN), step }),
        None => Ok(()),
    }
}

/// The files that all ranks have written of their parts. A part that several ranks have is written by the first of them.
fn parts_of_all(
    ranks: &Ranks,
    all: &[(&str, Vec<(&engine::store::Tensor, Tensor)>)],
    dir: &Path,
    step: u64,
) -> Result<Vec<Written>, TrainError> {
    if ranks.is_alone() {
        return Ok(vec![]);
    }
    let first = |parts: &[Part]| [&ranks.data, &ranks.tensor].iter().all(|g| g.rank == 0 || parts.iter().any(|p| p.by == g.name));
    let held =
        all.iter().flat_map(|(file, tensors)| tensors.iter().map(move |(t, tensor)| Held { file, tensor: *tensor, parts: &t.parts }));
    let held: Vec<Held> = held.filter(|h| !h.parts.is_empty() && first(h.parts)).collect();
    let own = match held.is_empty() {
        true => json!(null),
        false => checkpoint::write_parts(dir, step, ranks.rank(), &held).map_or_else(|e| json!({ "problem": e.to_string() }), |w| w.told()),
    };
    let mut written = vec![];
    for (rank, told) in ranks.gather(own.to_string().as_bytes())?.iter().enumerate() {
        let told: serde_json::Value = serde_json::from_slice(told).unwrap_or_default();
        if let Some(problem) = told["problem"].as_str() {
            return Err(TrainError::Other(format!("rank {rank}: {problem}")));
        }
        written.extend(Written::of(&told));
    }
    Ok(written)
}

/// Tells the other ranks whether the first has saved the checkpoint.
fn told(ranks: &Ranks, own: Result<Saved, TrainError>) -> Result<Saved, TrainError> {
    let problem = own.as_ref().err().map(|e| e.to_string()).unwrap_or_default();
    let all = if ranks.size() > 1 { ranks.gather(problem.as_bytes())? } else { vec![] };
    match all.iter().position(|p| !p.is_empty()) {
        Some(rank) if own.is_ok() => Err(TrainError::Other(format!("rank {rank}: {}", String::from_utf8_lossy(&all[rank])))),
        _ => own,
    }
}

/// What was chosen by timing: a resumed run takes the same again.
fn choices(device: &Device) -> Vec<String> {
    match device {
        Device::Cpu(..) => vec![],
        Device::Cuda(cuda, _) => cuda.choices(),
    }
}
