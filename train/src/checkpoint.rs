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

use crate::files::{self, stale, sync_folder};
use crate::input;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const FORMAT: u64 = 1;
const MANIFEST: &str = "checkpoint.json";

#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("cannot {action} {}: {cause}", .path.display())]
    Io { action: &'static str, path: PathBuf, cause: io::Error },
    #[error("{}: {reason}", .path.display())]
    Broken { path: PathBuf, reason: String },
    #[error("{}: format {found}, but this version reads format {FORMAT}", .path.display())]
    Format { path: PathBuf, found: Value },
    #[error("tensor {name:?}: {reason}")]
    Tensor { name: String, reason: String },
    #[error("{name:?} cannot be the name of a checkpoint's file: {reason}")]
    FileName { name: String, reason: &'static str },
}

/// What is saved. `dtype` is the safetensors name: F32, BF16, F16, I32, U8, ...
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    pub name: &'a str,
    pub dtype: &'a str,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
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

/// The content of one safetensors file.
#[derive(Debug)]
pub struct Loaded {
    bytes: Vec<u8>,
    data_start: usize,
    header: Metadata,
}

/// A safetensors file that may be larger than the memory: tensors are read one at a time, when they are asked for. A file that changes meanwhile is an
/// error then, where a memory map would end the process.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    data_start: u64,
    header: Metadata,
}

#[derive(Debug)]
pub(crate) struct Sum {
    bytes: u64,
    xxh3: String,
}

/// What `save` made, and what it could not remove.
#[derive(Debug)]
pub struct Saved {
    pub path: PathBuf,
    pub left: Vec<CheckpointError>,
}

/// Saves `files` of tensors and `plain` ones as `dir/step-NNNNNNNN`, replacing one of the same step. Then of the older whole checkpoints all but
/// the last `keep - 1` are removed; 0 keeps all. Those of later steps, and broken ones, are left alone.
pub fn save(
    dir: &Path,
    step: u64,
    files: &[(&str, Vec<Tensor>)],
    plain: &[(&str, Vec<u8>)],
    meta: &Value,
    keep: usize,
) -> Result<Saved, CheckpointError> {
    let pid = std::process::id();
    let path = dir.join(format!("step-{step:08}"));
    let old = dir.join(format!(".step-{step:08}.old-{pid}"));
    let tmp = tmp_path(dir, step);

    match fs::create_dir(dir) {
        Ok(()) => sync_folder(files::folder_of(dir)).map_err(io_error("sync", files::folder_of(dir)))?,
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(io_error("create", dir)(e)),
    }
    let mut left = tidy(dir)?;
    if let Err(e) = write_folder(&tmp, step, files, plain, meta).and_then(|()| move_in(&tmp, &path, &old)) {
        // Best effort: the error that matters is the first, and the next save tidies.
        let _ = fs::remove_dir_all(&tmp);
        return Err(e);
    }
    sync_folder(dir).map_err(io_error("sync", dir))?;
    // The new one is safe: what is in the way of tidiness is no reason to stop.
    left.extend(remove(&old).err());
    if keep > 0 {
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

/// Reads a safetensors file that need not be part of a checkpoint.
pub fn load_safetensors(path: &Path) -> Result<Loaded, CheckpointError> {
    Loaded::parse(path, input::read(path).map_err(io_error("read", path))?)
}

impl Checkpoint {
    /// Whether one of the files is called so.
    pub fn has(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }

    /// Reads one of the files, for example `model.safetensors`.
    pub fn file(&self, name: &str) -> Result<Loaded, CheckpointError> {
        Loaded::parse(&self.path.join(name), self.bytes(name)?)
    }

    /// The same as it lies there.
    pub fn bytes(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let path = self.path.join(name);
        let Some((sum, file)) = self.files.get(name) else {
            let have: Vec<_> = self.files.keys().map(String::as_str).collect();
            let reason = format!("not part of the checkpoint, which has {}", have.join(", "));
            return Err(CheckpointError::Broken { path, reason });
        };
        let mut bytes = Vec::with_capacity(sum.bytes as usize);
        let read = (&*file).rewind().and_then(|()| (&*file).read_to_end(&mut bytes));
        read.map_err(io_error("read", &path))?;
        // Once more, because it may have changed since it was opened.
        sum.check(&path, &Sum::new(bytes.len() as u64, xxh3_64(&bytes)))?;
        Ok(bytes)
    }
}

impl Loaded {
    /// The tensors' names, in the order of the file.
    pub fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// The header's own notes.
    pub fn metadata(&self) -> HashMap<String, String> {
        self.header.metadata().clone().unwrap_or_default()
    }

    /// dtype, shape and bytes.
    pub fn get(&self, name: &str) -> Option<(String, Vec<usize>, &[u8])> {
        let info = self.header.info(name)?;
        let (start, end) = info.data_offsets;
        let bytes = &self.bytes[self.data_start + start..self.data_start + end];
        Some((info.dtype.to_string(), info.shape.clone(), bytes))
    }

    pub(crate) fn parse(path: &Path, bytes: Vec<u8>) -> Result<Self, CheckpointError> {
        // read_metadata also checks that the offsets are contiguous and end where the file does.
        let (header_len, header) = SafeTensors::read_metadata(&bytes).map_err(|e| {
            let reason = format!("not a whole safetensors file: {e}");
            broken(path, reason)
        })?;
        let data_start = 8 + header_len;
        Ok(Self { bytes, data_start, header })
    }
}

/// As the format has it.
const LONGEST_HEADER: u64 = 100_000_000;

impl TensorFile {
    /// Reads the header.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = input::open(path).map_err(io_error("open", path))?;
        let bytes = file.metadata().map_err(io_error("read", path))?.len();
        let bad = |problem: &dyn std::fmt::Display| broken(path, format!("not a whole safetensors file: {problem}"));
        let mut length = [0; 8];
        if bytes < 8 {
            return Err(bad(&"it is too short"));
        }
        file.read_exact_at(&mut length, 0).map_err(io_error("read", path))?;
        let length = u64::from_le_bytes(length);
        if length > LONGEST_HEADER.min(bytes - 8) {
            return Err(bad(&"its header is longer than it can be"));
        }
        let mut text = vec![0; length as usize];
        file.read_exact_at(&mut text, 8).map_err(io_error("read", path))?;
        // This also checks that the tensors follow one another.
        let header: Metadata = serde_json::from_slice(&text).map_err(|e| bad(&e))?;
        let end = header.tensors().values().map(|t| t.data_offsets.1).max().unwrap_or(0) as u64;
        if (8 + length).checked_add(end) != Some(bytes) {
            return Err(bad(&format!("it has {bytes} bytes, and its header tells of {}", (8 + length).saturating_add(end))));
        }
        Ok(Self { path: path.into(), file, data_start: 8 + length, header })
    }

    /// The tensors' names, in the order of the file.
    pub fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// dtype and shape.
    pub fn info(&self, name: &str) -> Option<(String, Vec<usize>)> {
        let info = self.header.info(name)?;
        Some((info.dtype.to_string(), info.shape.clone()))
    }

    /// A tensor's bytes.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let (start, end) = self.header.info(name).ok_or_else(|| broken(&self.path, format!("has no '{name}'")))?.data_offsets;
        let mut bytes = vec![0; end - start];
        self.file.read_exact_at(&mut bytes, self.data_start + start as u64).map_err(io_error("read", &self.path))?;
        Ok(bytes)
    }
}

impl Sum {
    fn new(bytes: u64, hash: u64) -> Self {
        let xxh3 = format!("{hash:016x}");
        Self { bytes, xxh3 }
    }

    fn check(&self, path: &Path, has: &Sum) -> Result<(), CheckpointError> {
        if has.bytes != self.bytes {
            let reason = format!("has {} bytes, expected {}", has.bytes, self.bytes);
            return Err(broken(path, reason));
        }
        if engine::mutant!("checksum-not-compared", has.xxh3 != self.xxh3, false) {
            let reason = format!("checksum is {}, expected {}", has.xxh3, self.xxh3);
            return Err(broken(path, reason));
        }
        Ok(())
    }
}

/// A folder, or whatever stands in the place of one.
fn remove(path: &Path) -> Result<(), CheckpointError> {
    files::remove(path).map_err(io_error("remove", path))
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_path_buf();
    move |cause| CheckpointError::Io { action, path, cause }
}

fn broken(path: &Path, reason: impl Into<String>) -> CheckpointError {
    CheckpointError::Broken { path: path.to_path_buf(), reason: reason.into() }
}

// ---- the folders of a run

/// In the order in which `newest` prefers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Named,
    Old(u32),
    Tmp(u32),
}

struct Folder {
    path: PathBuf,
    step: u64,
    kind: Kind,
}

fn parse_folder(name: &str) -> Option<(u64, Kind)> {
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

fn folders(dir: &Path) -> Result<Vec<Folder>, CheckpointError> {
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

fn tmp_path(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!(".step-{step:08}.tmp-{}", std::process::id()))
}

/// Takes away what killed saves left, before more is written: the disk may be full because of it. Returns what cannot be removed.
fn tidy(dir: &Path) -> Result<Vec<CheckpointError>, CheckpointError> {
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

fn move_in(tmp: &Path, path: &Path, old: &Path) -> Result<(), CheckpointError> {
    let replaces = path.exists();
    if replaces {
        fs::rename(path, old).map_err(io_error("set aside", path))?;
    }
    fs::rename(tmp, path).map_err(|cause| {
        if replaces {
            // If this fails too, `newest` still finds the old one where it is.
            let _ = fs::rename(old, path);
        }
        io_error("rename a folder to", path)(cause)
    })
}

/// Returns what cannot be removed.
fn prune(dir: &Path, saved: u64, keep: usize) -> Result<Vec<CheckpointError>, CheckpointError> {
    let mut left = vec![];
    let mut older = folders(dir)?;
    older.retain(|f| f.kind == Kind::Named && f.step < saved && read_manifest(&f.path).is_ok());
    older.sort_by_key(|f| std::cmp::Reverse(f.step));
    for Folder { path, step, .. } in older.into_iter().skip(keep - 1) {
        // Renamed first, so that a kill half-way leaves nothing that looks like a checkpoint.
        let tmp = tmp_path(dir, step);
        match fs::rename(&path, &tmp) {
            Ok(()) => left.extend(remove(&tmp).err()),
            Err(e) => left.push(io_error("remove", &path)(e)),
        }
    }
    Ok(left)
}

// ---- writing

fn write_folder(
    folder: &Path,
    step: u64,
    files: &[(&str, Vec<Tensor>)],
    plain: &[(&str, Vec<u8>)],
    meta: &Value,
) -> Result<(), CheckpointError> {
    fs::create_dir(folder).map_err(io_error("create", folder))?;
    let mut sums = Map::new();
    let mut add = |name: &str, write: &dyn Fn(&Path) -> Result<Sum, CheckpointError>| {
        check_file_name(name)?;
        if sums.contains_key(name) {
            return Err(file_name_error(name, "it is there twice"));
        }
        let sum = write(&folder.join(name))?;
        sums.insert(name.to_string(), json!({"bytes": sum.bytes, "xxh3": sum.xxh3}));
        Ok(())
    };
    for (name, tensors) in files {
        add(name, &|path| write_safetensors(path, tensors, None))?;
    }
    for (name, bytes) in plain {
        add(name, &|path| write_synced(path, |file| file.write_all(bytes)))?;
    }
    let manifest = json!({"format": FORMAT, "step": step, "files": sums, "meta": meta});
    let text = format!("{manifest:#}");
    let unsealed = text.strip_suffix("\n}").unwrap_or(&text);
    let path = folder.join(MANIFEST);
    files::write_new(&path, seal(unsealed).as_bytes()).map_err(io_error("write", &path))?;
    sync_folder(folder).map_err(io_error("sync", folder))
}

/// A name read from a manifest must not lead out of the folder either.
fn check_file_name(name: &str) -> Result<(), CheckpointError> {
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
        return Err(file_name_error(name, "not a plain file name"));
    }
    if name == MANIFEST {
        return Err(file_name_error(name, "taken"));
    }
    Ok(())
}

fn file_name_error(name: &str, reason: &'static str) -> CheckpointError {
    let name = name.to_string();
    CheckpointError::FileName { name, reason }
}

/// `notes` stand in the header, for programs that look for some.
pub(crate) fn write_safetensors(path: &Path, tensors: &[Tensor], notes: Option<HashMap<String, String>>) -> Result<Sum, CheckpointError> {
    let (header, sorted) = layout(tensors, notes)?;
    write_synced(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        sorted.iter().try_for_each(|t| file.write_all(t.bytes))
    })
}

/// The padded header, and the tensors in the order in which their bytes follow it.
fn layout<'t, 'a>(
    tensors: &'t [Tensor<'a>],
    notes: Option<HashMap<String, String>>,
) -> Result<(String, Vec<&'t Tensor<'a>>), CheckpointError> {
    let mut sorted = Vec::with_capacity(tensors.len());
    let mut names = HashSet::new();
    for tensor in tensors {
        let refuse = |reason: String| CheckpointError::Tensor { name: tensor.name.to_string(), reason };
        let dtype: Dtype =
            serde_json::from_value(tensor.dtype.into()).map_err(|_| refuse(format!("dtype {:?} is unknown", tensor.dtype)))?;
        let elements = tensor.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        let bits = elements.and_then(|n| n.checked_mul(dtype.bitsize()));
        if bits != tensor.bytes.len().checked_mul(8) {
            let (shape, len) = (tensor.shape, tensor.bytes.len());
            return Err(refuse(format!("{len} bytes for {dtype} {shape:?}")));
        }
        if tensor.name == "__metadata__" || !names.insert(tensor.name) {
            return Err(refuse("the name is taken".into()));
        }
        sorted.push((dtype, tensor));
    }
    // Widest first keeps every tensor aligned to its element.
    sorted.sort_by_key(|(dtype, t)| (std::cmp::Reverse(dtype.bitsize()), t.name));

    let mut end = 0;
    let infos = sorted.iter().map(|(dtype, t)| {
        let start = end;
        end += t.bytes.len();
        let info = TensorInfo { dtype: *dtype, shape: t.shape.to_vec(), data_offsets: (start, end) };
        (t.name.to_string(), info)
    });
    let header =
        Metadata::new(notes, infos.collect()).map_err(|e| e.to_string()).and_then(|m| serde_json::to_string(&m).map_err(|e| e.to_string()));
    let mut header = header.map_err(|reason| CheckpointError::Tensor { name: "(header)".into(), reason })?;
    let padded = header.len().next_multiple_of(8);
    header.push_str(&" ".repeat(padded - header.len()));
    Ok((header, sorted.into_iter().map(|(_, t)| t).collect()))
}

/// Hashes what it writes, a chunk at a time while the chunk is in cache: tensors are never copied.
struct Hashed {
    file: File,
    hash: Xxh3,
    bytes: u64,
}

impl Write for Hashed {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let n = self.file.write(&buf[..buf.len().min(1 << 20)])?;
        self.hash.update(&buf[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn write_synced(path: &Path, fill: impl FnOnce(&mut BufWriter<Hashed>) -> io::Result<()>) -> Result<Sum, CheckpointError> {
    let file = File::create_new(path).map_err(io_error("create", path))?;
    let mut writer = BufWriter::new(Hashed { file, hash: Xxh3::new(), bytes: 0 });
    let done = fill(&mut writer).and_then(|()| writer.flush());
    let hashed = writer.get_ref();
    let done = done.and_then(|()| hashed.file.sync_all());
    done.map_err(io_error("write", path))?;
    Ok(Sum::new(hashed.bytes, hashed.hash.digest()))
}

// ---- reading

fn sum_of_file(path: &Path, mut file: &File) -> Result<Sum, CheckpointError> {
    let mut chunk = vec![0; 1 << 20];
    let (mut hash, mut bytes) = (Xxh3::new(), 0);
    loop {
        let n = match file.read(&mut chunk) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            read => read.map_err(io_error("read", path))?,
        };
        if n == 0 {
            return Ok(Sum::new(bytes, hash.digest()));
        }
        hash.update(&chunk[..n]);
        bytes += n as u64;
    }
}

/// The JSON without its last brace, plus the checksum of exactly that text. Hashing the text and not the parsed value
/// makes the seal independent of how numbers are printed.
fn seal(unsealed: &str) -> String {
    let hash = xxh3_64(unsealed.as_bytes());
    format!("{unsealed},\n  \"checksum\": \"{hash:016x}\"\n}}\n")
}

fn is_sealed(text: &str) -> bool {
    text.rfind(",\n  \"checksum\"").is_some_and(|end| seal(&text[..end]) == text)
}

/// Everything except the content of the files.
fn read_manifest(folder: &Path) -> Result<Checkpoint, CheckpointError> {
    let path = folder.join(MANIFEST);
    let text = input::read(&path).map_err(missing_or(&path))?;
    let text = String::from_utf8(text).map_err(|e| broken(&path, format!("no text: {e}")))?;
    let mut manifest: Map<String, Value> = serde_json::from_str(&text).map_err(|e| broken(&path, format!("not whole JSON: {e}")))?;
    let format = manifest.remove("format").unwrap_or_default();
    if format != FORMAT {
        let found = format;
        return Err(CheckpointError::Format { path, found });
    }
    if !is_sealed(&text) {
        return Err(broken(&path, "its checksum does not fit its text"));
    }
    let without = |field| broken(&path, format!("has no valid {field:?}"));
    let step = manifest.get("step").and_then(Value::as_u64);
    let listed = manifest.get("files").and_then(Value::as_object);
    let mut files = BTreeMap::new();
    for (name, entry) in listed.ok_or_else(|| without("files"))? {
        check_file_name(name)?;
        let bytes = entry["bytes"].as_u64().ok_or_else(|| without("bytes"))?;
        let xxh3 = entry["xxh3"].as_str().ok_or_else(|| without("xxh3"))?;
        let file = folder.join(name);
        let opened = input::open(&file).map_err(missing_or(&file))?;
        let has = opened.metadata().map_err(io_error("read", &file))?.len();
        if has != bytes {
            let reason = format!("has {has} bytes, expected {bytes}");
            return Err(broken(&file, reason));
        }
        let xxh3 = xxh3.to_string();
        files.insert(name.clone(), (Sum { bytes, xxh3 }, opened));
    }
    Ok(Checkpoint {
        path: folder.to_path_buf(),
        step: step.ok_or_else(|| without("step"))?,
        meta: manifest.remove("meta").unwrap_or_default(),
        files,
    })
}

/// What is not there is known to be broken; what cannot be read may be whole.
fn missing_or(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_path_buf();
    move |cause| match cause.kind() {
        io::ErrorKind::NotFound => broken(&path, "missing"),
        io::ErrorKind::NotADirectory => broken(&path, "missing: what should be its folder is a file"),
        _ => io_error("read", &path)(cause),
    }
}

#[cfg(test)]
mod tests;
