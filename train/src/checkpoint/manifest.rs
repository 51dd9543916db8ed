//! What one checkpoint's folder holds: its files, their checksums, and the manifest that lists and seals them.

use super::*;
use serde_json::{Map, json};
use std::io::{BufWriter, Write};
use xxhash_rust::xxh3::Xxh3;

pub(super) const FORMAT: u64 = 1;

pub(super) const MANIFEST: &str = "checkpoint.json";

#[derive(Debug)]
pub(crate) struct Sum {
    pub(super) bytes: u64,
    pub(super) xxh3: String,
}

impl Sum {
    pub(super) fn new(bytes: u64, hash: u64) -> Self {
        let xxh3 = format!("{hash:016x}");
        Self { bytes, xxh3 }
    }

    pub(super) fn check(&self, path: &Path, has: &Sum) -> Result<(), CheckpointError> {
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

pub(super) fn write_folder(
    folder: &Path,
    step: u64,
    files: &[(&str, Vec<Tensor>)],
    plain: &[(&str, Vec<u8>)],
    parts: &[Written],
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
    for Written { name, path, sum } in parts {
        add(name, &|to| {
            files::rename(path, to).map_err(io_error("move", path))?;
            Ok(Sum { bytes: sum.bytes, xxh3: sum.xxh3.clone() })
        })?;
    }
    let manifest = json!({"format": FORMAT, "step": step, "files": sums, "meta": meta});
    let text = format!("{manifest:#}");
    let unsealed = text.strip_suffix("\n}").unwrap_or(&text);
    let path = folder.join(MANIFEST);
    files::write_new(&path, seal(unsealed).as_bytes()).map_err(io_error("write", &path))?;
    engine::mutant!("names-in-a-checkpoint-are-not-synced", sync_folder(folder), Ok(())).map_err(io_error("sync", folder))
}

/// A name read from a manifest must not lead out of the folder either.
pub(super) fn check_file_name(name: &str) -> Result<(), CheckpointError> {
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
        return Err(file_name_error(name, "not a plain file name"));
    }
    if name == MANIFEST {
        return Err(file_name_error(name, "taken"));
    }
    Ok(())
}

pub(super) fn file_name_error(name: &str, reason: &'static str) -> CheckpointError {
    let name = name.to_string();
    CheckpointError::FileName { name, reason }
}

/// Hashes what it writes, a chunk at a time while the chunk is in cache: tensors are never copied.
pub(super) struct Hashed {
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

pub(super) fn write_synced(path: &Path, fill: impl FnOnce(&mut BufWriter<Hashed>) -> io::Result<()>) -> Result<Sum, CheckpointError> {
    let file = File::create_new(path).map_err(io_error("create", path))?;
    let mut writer = BufWriter::new(Hashed { file, hash: Xxh3::new(), bytes: 0 });
    let done = fill(&mut writer).and_then(|()| writer.flush());
    let hashed = writer.get_ref();
    let done = done.and_then(|()| engine::mutant!("tensors-are-not-synced", files::sync(&hashed.file, path), Ok(())));
    done.map_err(io_error("write", path))?;
    Ok(Sum::new(hashed.bytes, hashed.hash.digest()))
}

pub(super) fn sum_of_file(path: &Path, mut file: &File) -> Result<Sum, CheckpointError> {
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
pub(super) fn seal(unsealed: &str) -> String {
    let hash = xxh3_64(unsealed.as_bytes());
    format!("{unsealed},\n  \"checksum\": \"{hash:016x}\"\n}}\n")
}

pub(super) fn is_sealed(text: &str) -> bool {
    text.rfind(",\n  \"checksum\"").is_some_and(|end| seal(&text[..end]) == text)
}

/// Everything except the content of the files.
pub(super) fn read_manifest(folder: &Path) -> Result<Checkpoint, CheckpointError> {
    let path = folder.join(MANIFEST);
    let text = input::read_up_to(&path, input::TEXT).map_err(missing_or(&path))?;
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
pub(super) fn missing_or(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_path_buf();
    move |cause| match cause.kind() {
        io::ErrorKind::NotFound => broken(&path, "missing"),
        io::ErrorKind::NotADirectory => broken(&path, "missing: what should be its folder is a file"),
        _ => io_error("read", &path)(cause),
    }
}
