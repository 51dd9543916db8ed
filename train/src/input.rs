//! Files that users name. A pipe, a socket or a device in the place of one would hang or never end: only regular files are opened.

use crate::memory;
use crate::report::human_bytes;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::cell::Cell;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{BufRead, Error, ErrorKind, Read, Result};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::rc::Rc;

/// A regular file, to read.
pub fn open(path: &Path) -> Result<File> {
    // Opening a device may already do something, so it is looked at first; and the name may lead elsewhere by then, so opening must not wait.
    regular(&std::fs::metadata(path)?)?;
    let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    regular(&file.metadata()?)?;
    Ok(file)
}

/// The longest config, index, manifest, template or other text that is read as a whole.
pub const TEXT: u64 = 64 << 20;

/// The longest line, or element of a JSON array, that is read as a row.
pub const ROW: u64 = 16 << 20;

/// The whole of a file that memory has room for.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    read_up_to(path, u64::MAX)
}

/// The whole of a file that has at most so many bytes, and that memory has room for.
pub fn read_up_to(path: &Path, most: u64) -> Result<Vec<u8>> {
    let file = open(path)?;
    let too_long = |bytes: u64| {
        Error::new(ErrorKind::FileTooLarge, format!("it has {}, and at most {} are read", human_bytes(bytes), human_bytes(most)))
    };
    let length = file.metadata()?.len();
    if length > most {
        return Err(too_long(length));
    }
    let mut bytes = room(length)?;
    // It may grow meanwhile.
    match file.take(most.saturating_add(1)).read_to_end(&mut bytes)? as u64 {
        found if found > most => Err(too_long(found)),
        _ => Ok(bytes),
    }
}

/// An empty vector with room for so many bytes: a file may say that it has more than any memory.
pub fn room(bytes: u64) -> Result<Vec<u8>> {
    let none = || Error::new(ErrorKind::OutOfMemory, format!("it has {}, and memory has no room for them", human_bytes(bytes)));
    if bytes > TEXT && memory::host().is_some_and(|free| bytes > free) {
        return Err(none());
    }
    let mut room = Vec::new();
    room.try_reserve_exact(usize::try_from(bytes).map_err(|_| none())?).map_err(|_| none())?;
    Ok(room)
}

pub fn read_to_string(path: &Path) -> Result<String> {
    String::from_utf8(read_up_to(path, TEXT)?).map_err(|_| Error::new(ErrorKind::InvalidData, "it is not UTF-8 text"))
}

/// Reads a line with its end into an empty buffer, and returns how many bytes it has; 0 at the end. A compressed file of a few MB may hold a line of GBs.
pub fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> Result<usize> {
    let read = reader.by_ref().take(ROW + 1).read_until(b'\n', line)?;
    if read as u64 > ROW { Err(long_row()) } else { Ok(read) }
}

/// A reader of rows in one text: no row is longer than [`ROW`].
pub struct Rows<R> {
    pub reader: R,
    /// Bytes that the row may still have. Whoever reads the rows resets it to [`ROW`] at each one.
    pub left: Rc<Cell<u64>>,
}

impl<R: Read> Read for Rows<R> {
    fn read(&mut self, to: &mut [u8]) -> Result<usize> {
        let read = self.reader.read(to)?;
        self.left.set(self.left.get().checked_sub(read as u64).ok_or_else(long_row)?);
        Ok(read)
    }
}

fn long_row() -> Error {
    Error::new(ErrorKind::FileTooLarge, format!("it has more than {} (split it into several)", human_bytes(ROW)))
}

/// The length of a regular file.
pub fn length(path: &Path) -> Result<u64> {
    let metadata = std::fs::metadata(path)?;
    regular(&metadata)?;
    Ok(metadata.len())
}

/// Refuses what is no regular file, by what it is.
pub fn regular(metadata: &Metadata) -> Result<()> {
    let kind = match metadata.file_type() {
        t if t.is_file() => return Ok(()),
        t if t.is_dir() => return Err(Errno::ISDIR.into()),
        t if t.is_fifo() => "a pipe",
        t if t.is_socket() => "a socket",
        _ => "a device",
    };
    Err(Error::new(ErrorKind::InvalidInput, format!("it is {kind}, not a file")))
}

/// Folders in which people keep what is their own: no names of the hub begin with them.
const OWN: [&str; 8] = ["adapters", "bases", "checkpoints", "data", "models", "out", "outputs", "runs"];

/// Models of the hub that are called without an owner.
const ALONE: [&str; 5] = ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2"];

/// How a model is fetched whose name on the hub (`Qwen/Qwen3-0.6B`), or its address there, was given instead of a folder.
pub fn fetched(path: &Path) -> String {
    let parts = typed(path);
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let fetch = |model: &str, to: &str| {
        format!("; a model of Hugging Face's hub is fetched with: hf download {model} --local-dir {to} (then name the folder {to})")
    };
    match (on_hub(&parts), &parts[..]) {
        (Some(model), [.., name]) => fetch(&model, name),
        // The pages call folders so.
        (None, ["models", name]) if plain(name) && !Path::new("models").exists() => {
            fetch(&format!("OWNER/{name}"), &format!("models/{name}"))
        }
        (None, [name]) if ALONE.contains(name) => fetch(name, name),
        _ => String::new(),
    }
}

/// The same of a data set.
pub fn fetched_data(path: &Path) -> String {
    let parts = typed(path);
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let is_file = path.extension().is_some_and(|e| ["jsonl", "ndjson", "json", "gz", "parquet", "txt", "csv"].iter().any(|own| e == *own));
    let data = if let [scheme, place, "datasets", rest @ ..] = &parts[..] { [&[*scheme, *place], rest].concat() } else { parts };
    match (on_hub(&data), &data[..]) {
        (Some(set), [.., name]) if !is_file => format!(
            "; a data set of Hugging Face's hub is fetched with: hf download --repo-type dataset {set} --local-dir {name} (then name the folder {name})"
        ),
        _ => String::new(),
    }
}

/// The parts of a path as it was typed, where nothing is there.
fn typed(path: &Path) -> Vec<String> {
    // A run's paths are absolute ones by now.
    let here = std::env::current_dir().unwrap_or_default();
    let path = path.strip_prefix(&here).unwrap_or(path);
    let parts = path.to_str().filter(|_| !path.exists()).map(|p| p.split('/').map(str::to_owned).collect());
    parts.unwrap_or_default()
}

/// `owner/name`, where the parts are such a name or its address.
fn on_hub(parts: &[&str]) -> Option<String> {
    match parts {
        ["http:" | "https:", .., "huggingface.co" | "hf.co", owner, name] if plain(owner) && plain(name) => Some(format!("{owner}/{name}")),
        [owner, name] if plain(owner) && plain(name) && !OWN.contains(owner) && !Path::new(owner).exists() => {
            Some(format!("{owner}/{name}"))
        }
        _ => None,
    }
}

fn plain(part: &str) -> bool {
    part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A named pipe without a writer: opened as a file is, it would wait for ever.
    pub fn pipe(path: &Path) {
        let made = std::process::Command::new("mkfifo").arg(path).status().unwrap();
        assert!(made.success(), "mkfifo");
    }

    #[test]
    fn pipes_sockets_devices_and_folders_are_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        pipe(&at("pipe"));
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        std::os::unix::fs::symlink(at("pipe"), at("link")).unwrap();
        let paths = [(at("pipe"), "a pipe"), (at("link"), "a pipe"), (at("socket"), "a socket"), ("/dev/zero".into(), "a device")];
        for (path, what) in paths {
            for error in [open(&path).err(), read(&path).err(), length(&path).err()] {
                assert_eq!(error.unwrap().to_string(), format!("it is {what}, not a file"));
            }
        }
        assert_eq!(read(dir.path()).unwrap_err().kind(), ErrorKind::IsADirectory);
        std::fs::write(at("file"), "text").unwrap();
        assert_eq!((read_to_string(&at("file")).unwrap().as_str(), length(&at("file")).unwrap()), ("text", 4));
        std::fs::write(at("file"), b"\xff").unwrap();
        assert!(read_to_string(&at("file")).unwrap_err().to_string().contains("UTF-8"));
    }
    /// A file may say that it has terabytes, and hold none of them.
    #[test]
    fn what_memory_has_no_room_for_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sparse");
        File::create(&path).unwrap().set_len(8 << 40).unwrap();
        let error = read(&path).unwrap_err();
        assert!(error.kind() == ErrorKind::OutOfMemory && error.to_string().contains("8.00 TiB"), "{error}");
        let error = read_to_string(&path).unwrap_err();
        assert!(error.kind() == ErrorKind::FileTooLarge && error.to_string().contains("at most 64.0 MiB"), "{error}");
        assert_eq!(room(u64::MAX).unwrap_err().kind(), ErrorKind::OutOfMemory);
        File::create(&path).unwrap().set_len(9).unwrap();
        assert_eq!((read_up_to(&path, 9).unwrap().len(), read_up_to(&path, 8).is_err()), (9, true));
    }

    #[test]
    fn a_line_has_a_limit() {
        let row = "x".repeat(ROW as usize);
        let lines = [&row[1..], "\n", &row, "\n"].concat();
        let (mut reader, mut line) = (lines.as_bytes(), vec![]);
        assert_eq!(read_line(&mut reader, &mut line).unwrap() as u64, ROW);
        line.clear();
        assert_eq!(read_line(&mut reader, &mut line).unwrap_err().kind(), ErrorKind::FileTooLarge);
    }
}
