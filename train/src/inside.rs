//! Folders that others may have filled, such as a run that came in an archive or that lies where everybody writes: what is opened in one lies in it. A link
//! in it is followed as long as it stays inside; one that leads out could show a key of whoever looks, or their environment.
//!
//! A name is walked part by part from the folder's descriptor, and no system call here follows a link but the one in `linked`. So a link that is put in
//! place while this looks leads nowhere either, and nothing outside is touched, not even to see whether it is there. Two names of one file (hard links)
//! cannot be told apart from two files.

use crate::report::human_bytes;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, openat, readlinkat, statat};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

/// An open folder.
pub struct Inside {
    folder: OwnedFd,
    /// What it may be called in an absolute link.
    names: Vec<PathBuf>,
}

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
const FILE: OFlags = OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);
/// As many as Linux follows.
const LINKS: usize = 40;

impl Inside {
    /// The folder `below` the folder `root`. Links on the way to `root` are the user's own words; below it, see `enter`.
    pub fn open(root: &Path, below: &Path) -> Result<Inside> {
        let path = root.join(below);
        let mut names: Vec<PathBuf> = [path.canonicalize().ok(), std::path::absolute(&path).ok()].into_iter().flatten().collect();
        names.dedup();
        let mut at = Inside { folder: openat(CWD, root, FOLDER, Mode::empty())?, names };
        for part in below.components() {
            at.folder = at.entered(part.as_os_str())?;
        }
        Ok(at)
    }

    /// A folder in this one. A link to one counts if it is the user's own or root's, or if it leads to what its maker owns: anybody else's would show a
    /// folder that its owner put nowhere near.
    pub fn enter(&self, name: &OsStr) -> Result<Inside> {
        Ok(Inside { folder: self.entered(name)?, names: self.names.iter().map(|own| own.join(name)).collect() })
    }

    fn entered(&self, name: &OsStr) -> Result<OwnedFd> {
        match openat(&self.folder, name, FOLDER | OFlags::NOFOLLOW, Mode::empty()) {
            Err(Errno::LOOP | Errno::NOTDIR) => self.linked(name),
            opened => Ok(opened?),
        }
    }

    fn linked(&self, name: &OsStr) -> Result<OwnedFd> {
        let link = self.look(name)?;
        if kind(&link) != FileType::Symlink {
            return Err(Errno::NOTDIR.into());
        }
        let there = openat(&self.folder, name, FOLDER, Mode::empty())?;
        let trusted = [geteuid().as_raw(), 0, fstat(&there)?.st_uid];
        match trusted.contains(&link.st_uid) {
            true => Ok(there),
            false => Err(Error::new(ErrorKind::PermissionDenied, "it is another user's link to a folder that is not theirs")),
        }
    }

    /// What a name stands for; of a link, the link itself.
    fn look(&self, name: &OsStr) -> Result<Stat> {
        Ok(statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Whether there is a file of this name, or something in its place that `file` has words for. Where a link leads is not asked.
    pub fn has(&self, name: &str) -> bool {
        self.look(name.as_ref()).is_ok_and(|s| kind(&s) != FileType::Directory)
    }

    /// Whether a name stands for a file, and no link; its length.
    pub fn length(&self, name: &OsStr) -> Option<u64> {
        let found = self.look(name).ok().filter(|s| kind(s) == FileType::RegularFile)?;
        u64::try_from(found.st_size).ok()
    }

    pub fn is_link(&self, name: &OsStr) -> bool {
        self.look(name).is_ok_and(|s| kind(&s) == FileType::Symlink)
    }

    /// Device and inode.
    pub fn is(&self) -> Result<(u64, u64)> {
        let is = fstat(&self.folder)?;
        // Their types differ from system to system.
        #[allow(clippy::unnecessary_cast)]
        Ok((is.st_dev as u64, is.st_ino as u64))
    }

    /// What lies in it, sorted.
    pub fn names(&self) -> Result<Vec<OsString>> {
        let mut names = vec![];
        for entry in Dir::read_from(&self.folder)? {
            names.push(OsString::from_vec(entry?.file_name().to_bytes().to_vec()));
        }
        names.retain(|name| name != "." && name != "..");
        names.sort();
        Ok(names)
    }

    /// A regular file that lies in the folder, to read.
    pub fn file(&self, name: &str) -> Result<File> {
        let found = self.place(name)?;
        let file = match found.kind {
            Some(FileType::RegularFile) => File::from(openat(found.folder(self), &found.name, FILE, Mode::empty())?),
            Some(other) => return Err(no_file(other)),
            None => return Err(Errno::NOENT.into()),
        };
        // What has the name by now may be something else.
        crate::input::regular(&file.metadata()?)?;
        Ok(file)
    }

    /// Where a file of this name lies, or would lie, that is written in the place of what has the name now: a folder below this one, or None for this one
    /// itself, and the name there. As with `file`, links are followed as long as they stay inside; whoever writes there follows none.
    pub fn to_write(&self, name: &str) -> Result<(Option<OwnedFd>, OsString)> {
        let found = self.place(name)?;
        match found.kind {
            None | Some(FileType::RegularFile) => Ok((found.within, found.name)),
            Some(other) => Err(no_file(other)),
        }
    }

    /// What a name leads to.
    fn place(&self, name: &str) -> Result<Place> {
        let (mut folders, mut rest, mut links) = (Vec::<OwnedFd>::new(), parts(Path::new(name)), 0);
        while let Some(part) = rest.pop() {
            if part == ".." {
                folders.pop().ok_or_else(leads_out)?;
                continue;
            }
            let at = folders.last().unwrap_or(&self.folder);
            let found = match statat(at, &part, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) if rest.is_empty() => None,
                found => Some(kind(&found?)),
            };
            match found {
                Some(FileType::Symlink) => {
                    links += 1;
                    if links > LINKS {
                        return Err(Errno::LOOP.into());
                    }
                    let to = readlinkat(at, &part, vec![])?;
                    let mut to = Path::new(OsStr::from_bytes(to.to_bytes()));
                    if to.is_absolute() {
                        to = self.names.iter().find_map(|own| to.strip_prefix(own).ok()).ok_or_else(leads_out)?;
                        folders.clear();
                    }
                    rest.extend(parts(to));
                }
                Some(FileType::Directory) if !rest.is_empty() => {
                    let next = openat(at, &part, FOLDER | OFlags::NOFOLLOW, Mode::empty())?;
                    folders.push(next);
                }
                _ if !rest.is_empty() => return Err(Errno::NOTDIR.into()),
                kind => return Ok(Place { within: folders.pop(), name: part, kind }),
            }
        }
        Err(Errno::ISDIR.into())
    }

    /// A whole file; one that is longer than `most` is none of kiln's.
    pub fn read(&self, name: &str, most: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![];
        self.file(name)?.take(most + 1).read_to_end(&mut bytes)?;
        match bytes.len() as u64 > most {
            true => Err(Error::new(ErrorKind::FileTooLarge, format!("it has more than {}", human_bytes(most)))),
            false => Ok(bytes),
        }
    }
}

/// The end of a name: a folder below the first one, or None for that itself, the name there, and what has it; nothing need be there.
struct Place {
    within: Option<OwnedFd>,
    name: OsString,
    kind: Option<FileType>,
}

impl Place {
    fn folder<'a>(&'a self, whole: &'a Inside) -> &'a OwnedFd {
        self.within.as_ref().unwrap_or(&whole.folder)
    }
}

fn no_file(kind: FileType) -> Error {
    match kind {
        FileType::Directory => Errno::ISDIR.into(),
        other => Error::new(ErrorKind::InvalidInput, format!("it is {}, not a file", called(other))),
    }
}

fn leads_out() -> Error {
    Error::new(ErrorKind::PermissionDenied, "it is a link that leads out of the folder, and is not followed")
}

fn kind(found: &Stat) -> FileType {
    FileType::from_raw_mode(found.st_mode)
}

fn called(kind: FileType) -> &'static str {
    match kind {
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        _ => "a device",
    }
}

/// The parts of a path, the last one first.
fn parts(path: &Path) -> Vec<OsString> {
    let named = path.components().filter(|c| matches!(c, Component::Normal(_) | Component::ParentDir));
    named.rev().map(|c| c.as_os_str().to_os_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// Each link on its own, with what becomes of it.
    #[test]
    fn a_link_is_followed_only_where_it_stays_inside() {
        let dir = tempfile::tempdir().unwrap();
        let (run, other) = (dir.path().join("runs/a"), dir.path().join("runs/b"));
        for folder in [run.join("deep/er"), other.clone()] {
            fs::create_dir_all(folder).unwrap();
        }
        for file in [run.join("own"), run.join("deep/own"), other.join("own"), dir.path().join("key")] {
            fs::write(&file, file.to_str().unwrap()).unwrap();
        }
        let link = |to: &str, name: &str| symlink(to, run.join(name)).unwrap();
        let at = |path: &Path| path.to_str().unwrap().to_string();
        let stays = [
            ("own", "beside", "own"),
            ("deep/own", "deep-1", "deep/own"),
            ("deep/er/../own", "deep-2", "deep/own"),
            (&at(&run.join("deep/own")), "absolute", "deep/own"),
            ("absolute", "twice", "deep/own"),
            ("./deep/./own", "dots", "deep/own"),
        ];
        link("deep", "folder");
        link("..", "deep/er/up");
        let inside = || Inside::open(&dir.path().join("runs"), Path::new("a")).unwrap();
        for (to, name, leads) in stays {
            link(to, name);
            let text = String::from_utf8(inside().read(name, 1 << 10).unwrap()).unwrap();
            assert_eq!(text, at(&run.join(leads)), "{name}");
        }
        for name in ["deep/own", "folder/own", "deep/er/up/own", "folder/er/up/er/up/own"] {
            assert_eq!(inside().read(name, 1 << 10).unwrap(), at(&run.join("deep/own")).into_bytes(), "{name}");
        }
        let out = [
            at(&dir.path().join("key")),
            at(&other.join("own")),
            "../b/own".into(),
            "../../key".into(),
            "deep/../../b/own".into(),
            // Out and back in: the way there is not the run's either.
            "../a/own".into(),
            format!("{}/../../key", at(&run)),
            "/proc/self/environ".into(),
            "/".into(),
            "..".into(),
        ];
        for (i, to) in out.iter().enumerate() {
            let name = format!("out-{i}");
            link(to, &name);
            link(&name, &format!("{name}-again"));
            for name in [name.clone(), format!("{name}-again")] {
                let error = inside().file(&name).unwrap_err();
                assert!(error.to_string().contains("leads out"), "{to}: {error}");
            }
        }
        // As a folder on the way.
        link(&at(&other), "elsewhere");
        assert!(inside().file("elsewhere/own").unwrap_err().to_string().contains("leads out"));
        assert!(inside().file("../b/own").is_err());
        // What is not there outside reads the same as what is.
        link("/no/such/file", "dangling");
        assert!(inside().file("dangling").unwrap_err().to_string().contains("leads out"));
        link("round", "round");
        assert!(inside().file("round").is_err());
        assert_eq!(inside().file("nothing").unwrap_err().kind(), ErrorKind::NotFound);
    }

    /// What is put in a file's place between a look and the opening is not followed either.
    #[test]
    fn a_link_that_comes_and_goes_is_never_followed() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        fs::create_dir_all(run.join("deep")).unwrap();
        fs::create_dir(dir.path().join("other")).unwrap();
        for (path, text) in [("run/file", "own"), ("run/deep/file", "own"), ("key", "key"), ("other/file", "key")] {
            fs::write(dir.path().join(path), text).unwrap();
        }
        symlink("../key", run.join("link")).unwrap();
        symlink("../other", run.join("folder")).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        let exchange = |a: &str, b: &str| {
            rustix::fs::renameat_with(CWD, run.join(a), CWD, run.join(b), rustix::fs::RenameFlags::EXCHANGE).unwrap();
        };
        let inside = Inside::open(&run, Path::new("")).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    exchange("file", "link");
                    exchange("deep", "folder");
                }
            });
            let (mut own, mut refused, mut tries) = (0, 0, 0);
            // Until both were seen: where the other thread waits for a core, the same one is there thousands of times.
            let begun = std::time::Instant::now();
            while tries < 4000 || (own == 0 || refused == 0) && begun.elapsed().as_secs() < 120 {
                match inside.read(["file", "deep/file"][tries % 2], 10) {
                    Ok(text) => own += usize::from(text == b"own"),
                    Err(_) => refused += 1,
                }
                tries += 1;
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(own + refused, tries, "a link was followed");
            assert!(own > 0 && refused > 0, "{own} were read and {refused} refused");
        });
    }

    #[test]
    fn pipes_devices_folders_and_long_files_are_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let inside = Inside::open(dir.path(), Path::new("")).unwrap();
        crate::input::tests::pipe(&dir.path().join("pipe"));
        symlink("pipe", dir.path().join("link")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
        fs::create_dir(dir.path().join("folder")).unwrap();
        for (name, what) in [("pipe", "a pipe"), ("link", "a pipe"), ("socket", "a socket"), ("folder", "directory")] {
            let said = inside.read(name, 9).unwrap_err().to_string();
            assert!(said.contains(what), "{name}: {said}");
        }
        fs::write(dir.path().join("file"), "0123456789").unwrap();
        assert!(inside.read("file", 9).unwrap_err().to_string().contains("more than 9 B"));
        assert_eq!(inside.read("file", 10).unwrap(), b"0123456789");
        assert!(inside.has("pipe") && inside.has("file") && !inside.has("folder") && !inside.has("none"));
    }

    /// A folder that is a link of the user's own, and one that was put in its place since it was listed.
    #[test]
    fn a_linked_folder_is_whose_link_it_is() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("elsewhere/run")).unwrap();
        fs::create_dir(dir.path().join("runs")).unwrap();
        fs::write(dir.path().join("elsewhere/run/own"), "text").unwrap();
        symlink(dir.path().join("elsewhere"), dir.path().join("runs/mine")).unwrap();
        let run = Inside::open(&dir.path().join("runs"), Path::new("mine/run")).unwrap();
        assert_eq!(run.read("own", 10).unwrap(), b"text");
        assert!(Inside::open(&dir.path().join("runs"), Path::new("mine/run/own")).is_err());
        // Only root can make another user's link: of one that leads to root's folder, and of one that leads to its maker's.
        if geteuid().is_root() {
            let nobody = |path: &Path| std::os::unix::fs::lchown(path, Some(65534), Some(65534)).unwrap();
            symlink(dir.path().join("elsewhere"), dir.path().join("runs/theirs")).unwrap();
            nobody(&dir.path().join("runs/theirs"));
            let open = || Inside::open(&dir.path().join("runs"), Path::new("theirs/run"));
            assert!(open().err().unwrap().to_string().contains("another user's link"));
            nobody(&dir.path().join("elsewhere"));
            assert_eq!(open().unwrap().read("own", 10).unwrap(), b"text");
        }
    }
}
