//! Files that users name. A pipe, a socket or a device in the place of one would hang or never end: only regular files are opened.

use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// A regular file, to read.
pub fn open(path: &Path) -> Result<File> {
    // Opening a device may already do something, so it is looked at first; and the name may lead elsewhere by then, so opening must not wait.
    regular(&std::fs::metadata(path)?)?;
    let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    regular(&file.metadata()?)?;
    Ok(file)
}

pub fn read(path: &Path) -> Result<Vec<u8>> {
    let mut file = open(path)?;
    let mut bytes = Vec::with_capacity(file.metadata()?.len() as usize);
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

pub fn read_to_string(path: &Path) -> Result<String> {
    String::from_utf8(read(path)?).map_err(|_| Error::new(ErrorKind::InvalidData, "it is not UTF-8 text"))
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
}
