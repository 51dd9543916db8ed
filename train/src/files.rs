//! Files and folders that are there whole or not at all, whatever ends the process or the machine: written beside under the name
//! `.NAME.tmp-PID`, fsynced, renamed, and the folder fsynced. What a killed process leaves under such a name is removed by the next that writes there:
//! a folder at once, because its lock went with the process, anything else when nobody has written to it for an hour.

#[cfg(test)]
pub mod noted;

use crate::input;
use crate::inside::Inside;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Writes a small file; where `path` is a link, what it leads to.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_with(path, |file| file.write_all(bytes))
}

/// Writes a small file of a folder that others may have filled: a link of this name is followed as long as it stays in the folder. What is put in its place
/// while this writes is replaced, and never followed.
pub fn write_inside(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let (within, name) = Inside::open(folder, Path::new(""))?.to_write(name)?;
    let at = within.as_ref().map_or(folder.to_path_buf(), |open| PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd())));
    put(&at.join(name), |file| file.write_all(bytes))
}

/// Writes a file of any size; where `path` is a link, what it leads to.
pub fn write_with<E: From<io::Error>>(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> Result<(), E>) -> Result<(), E> {
    put(&replaceable(path)?, fill)
}

/// Writes a file that takes the place of whatever has its name.
fn put<E: From<io::Error>>(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> Result<(), E>) -> Result<(), E> {
    let beside = beside(path)?;
    let written = File::create_new(&beside).map_err(E::from).and_then(|file| {
        let mut file = BufWriter::new(file);
        fill(&mut file)?;
        file.flush()?;
        Ok(engine::mutant!("a-file-is-not-synced", sync(file.get_ref(), &beside), Ok(()))?)
    });
    if let Err(e) = written.and_then(|()| Ok(rename(&beside, path)?)) {
        // Best effort: the error that matters is the first.
        let _ = fs::remove_file(&beside);
        return Err(e);
    }
    Ok(engine::mutant!("the-name-of-a-file-is-not-synced", sync_folder(folder_of(path)), Ok(()))?)
}

/// What a name leads to, where that is a regular file or nothing: a pipe would wait for a reader, and renaming would replace a device.
fn replaceable(path: &Path) -> io::Result<PathBuf> {
    match fs::metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        found => input::regular(&found?)?,
    }
    followed(path)
}

/// Whether `write` can write there, so that whoever computes for long knows before. Returns `place`.
pub fn writable(path: &Path) -> io::Result<PathBuf> {
    let beside = beside(&replaceable(path)?)?;
    drop(File::create_new(&beside)?);
    fs::remove_file(&beside)?;
    place(path)
}

/// One name of all that lead to the same file; nothing need be there.
pub fn place(path: &Path) -> io::Result<PathBuf> {
    let path = followed(path)?;
    Ok(folder_of(&path).canonicalize()?.join(path.file_name().unwrap_or_default()))
}

/// Where a chain of links ends; nothing need be there.
fn followed(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_path_buf();
    // As many as Linux follows.
    for _ in 0..40 {
        match path.read_link() {
            Ok(to) => path = folder_of(&path).join(to),
            // Not a link, or nothing.
            Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::NotFound) => return Ok(path),
            Err(e) => return Err(e),
        }
    }
    Err(rustix::io::Errno::LOOP.into())
}

/// Makes `path` a link that leads to `target`, or leads it there anew.
pub fn link(target: &Path, path: &Path) -> io::Result<()> {
    let beside = beside(path)?;
    std::os::unix::fs::symlink(target, &beside)?;
    rename(&beside, path)?;
    engine::mutant!("a-link-is-not-synced", sync_folder(folder_of(path)), Ok(()))
}

/// A file that is not there yet, in a folder that nobody reads yet; it is on the disk when this returns.
pub fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(bytes)?;
    engine::mutant!("a-new-file-is-not-synced", sync(&file, path), Ok(()))
}

/// Waits until what was written to a file is on the disk.
pub fn sync(file: &File, path: &Path) -> io::Result<()> {
    #[cfg(test)]
    noted::synced(path);
    #[cfg(not(test))]
    let _ = path;
    file.sync_all()
}

/// Gives a file or a folder another name.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    #[cfg(test)]
    noted::renamed(from, to);
    fs::rename(from, to)
}

/// Makes the names in a folder durable; a file's own fsync does not.
pub fn sync_folder(dir: &Path) -> io::Result<()> {
    match sync(&File::open(dir)?, dir) {
        // Some file systems cannot, and do not need it.
        Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        other => other,
    }
}

/// A folder, and those that it lies in, as far as they are not there yet; their names are on the disk when this returns.
pub fn create_folder(dir: &Path) -> io::Result<()> {
    let new: Vec<&Path> = dir.ancestors().filter(|a| !a.as_os_str().is_empty()).take_while(|a| !a.exists()).collect();
    fs::create_dir_all(dir)?;
    // Best effort: a folder may be written to and not be read.
    new.into_iter().for_each(|made| engine::mutant!("a-new-folder-is-not-synced", drop(sync_folder(folder_of(made))), ()));
    Ok(())
}

/// The folder that holds `path`: "." for a bare name.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The temporary name of `path`, free to be used.
fn beside(path: &Path) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "it has no name of its own"))?;
    let name = name.to_string_lossy();
    sweep(folder_of(path), Some(&name), LEFT);
    let beside = path.with_file_name(format!(".{name}.tmp-{}", std::process::id()));
    // A process of the same number may have been killed here.
    remove(&beside)?;
    Ok(beside)
}

/// A file, a folder, or nothing.
pub fn remove(path: &Path) -> io::Result<()> {
    #[cfg(test)]
    if path.symlink_metadata().is_ok() {
        noted::removed(path);
    }
    let removed = match path.symlink_metadata() {
        Ok(m) if m.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    removed.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
}

/// What nobody has written to for so long was left behind. Folders may be shared with other machines, whose processes are not seen here.
pub const LEFT: Duration = Duration::from_secs(3600);

/// Whether the process that named something after itself is gone, or is this one.
pub fn stale(pid: u32) -> bool {
    pid == std::process::id() || !Path::new(&format!("/proc/{pid}")).exists()
}

/// The process that made a temporary name, and what for: `.NAME.tmp-PID`, or `.NAME.tmp-PID-NUMBER`. A name of another form is nothing that kiln made.
fn made_by(name: &str) -> Option<(&str, u32)> {
    let (of, made) = name.strip_prefix('.')?.rsplit_once(".tmp-")?;
    let (pid, number) = made.split_once('-').unwrap_or((made, "0"));
    let is_number = |text: &str| text == "0" || (!text.is_empty() && !text.starts_with('0') && text.bytes().all(|b| b.is_ascii_digit()));
    engine::mutant!("whatever-is-called-temporary-is-removed", is_number(pid) && is_number(number), true).then_some(())?;
    Some((of, pid.parse().ok().filter(|pid| (1..=MOST_PROCESSES).contains(pid))?))
}

/// No process of Linux has a larger number; a date such as 20251101 is larger.
const MOST_PROCESSES: u32 = 1 << 22;

/// What kiln writes into a run's folder.
const OF_RUNS: [&str; 7] = ["html", "json", "jsonl", "png", "safetensors", "svg", "toml"];

/// Removes what killed processes left of files in a run's folder, whose lock this process has. Best effort.
pub fn sweep_run(dir: &Path) {
    let is_ours = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let of = name.to_str().and_then(made_by).filter(|(_, pid)| stale(*pid));
        let is_of_runs = of.is_some_and(|(of, _)| Path::new(of).extension().is_some_and(|e| OF_RUNS.iter().any(|own| e == *own)));
        is_of_runs && entry.file_type().is_ok_and(|kind| kind.is_file())
    };
    fs::read_dir(dir).into_iter().flatten().flatten().filter(is_ours).for_each(|entry| drop(remove(&entry.path())));
}

/// Removes what killed processes left in a folder (of one name, or of any) and have not written to for `idle`. Best effort.
pub fn sweep(dir: &Path, of: Option<&str>, idle: Duration) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let left = name.to_str().and_then(made_by).is_some_and(|(what, pid)| of.is_none_or(|of| of == what) && stale(pid));
        if left && (is_idle(&entry.path(), idle) || is_let_go(&entry.path())) {
            let _ = remove(&entry.path());
        }
    }
}

/// Of a folder, what lies in it counts too.
fn is_idle(path: &Path, idle: Duration) -> bool {
    let own = path.symlink_metadata().and_then(|m| m.modified()).ok();
    let inside = fs::read_dir(path).into_iter().flatten().flatten().filter_map(|e| e.metadata().ok()?.modified().ok());
    let last = own.into_iter().chain(inside).max();
    last.is_some_and(|last| SystemTime::now().duration_since(last).is_ok_and(|age| age >= idle))
}

/// Held by the process that writes a folder, and let go when it ends, however that may be.
const LOCK: &str = ".lock";

/// Whether a folder has a lock that nobody holds.
fn is_let_go(path: &Path) -> bool {
    input::open(&path.join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok())
}

/// A folder of files, written beside.
pub struct Staged {
    path: PathBuf,
    dir: PathBuf,
    done: bool,
    _lock: File,
}

impl Staged {
    pub fn new(path: &Path) -> io::Result<Staged> {
        let dir = beside(path)?;
        create_folder(&dir)?;
        let lock = File::create(dir.join(LOCK))?;
        // Not every file system has locks: then time has to tell.
        let _ = lock.try_lock();
        Ok(Staged { path: path.to_path_buf(), dir, done: false, _lock: lock })
    }

    /// Where to write.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The folder gets its name; one that is there already, and not empty, is an error.
    pub fn finish(self) -> io::Result<()> {
        self.move_in(rename)
    }

    /// The folder takes the place of one that may be there.
    pub fn replace(self) -> io::Result<()> {
        let dir = self.dir.clone();
        self.move_in(|dir, path| {
            if !path.exists() {
                return rename(dir, path);
            }
            use rustix::fs::{CWD, RenameFlags, renameat_with};
            // At no moment is there none; what was there is then in `dir`. Not every file system can exchange names.
            #[cfg(test)]
            noted::renamed(dir, path);
            if renameat_with(CWD, dir, CWD, path, RenameFlags::EXCHANGE).is_err() {
                let old = dir.with_extension(format!("old-{}", std::process::id()));
                fs::rename(path, &old)?;
                fs::rename(dir, path).inspect_err(|_| drop(fs::rename(&old, path)))?;
                fs::rename(&old, dir)?;
            }
            Ok(())
        })?;
        // What was replaced, now that its successor is safe. Left under its temporary name where it cannot be removed.
        let _ = remove(&dir);
        Ok(())
    }

    fn move_in(mut self, rename: impl FnOnce(&Path, &Path) -> io::Result<()>) -> io::Result<()> {
        fs::remove_file(self.dir.join(LOCK))?;
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            engine::mutant!("files-of-a-folder-are-not-synced", sync(&File::open(&path)?, &path), Ok(()))?;
        }
        engine::mutant!("names-in-a-folder-are-not-synced", sync_folder(&self.dir), Ok(()))?;
        rename(&self.dir, &self.path)?;
        self.done = true;
        engine::mutant!("the-name-of-a-folder-is-not-synced", sync_folder(folder_of(&self.path)), Ok(()))
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.done {
            // Best effort: the error that matters is on its way.
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_and_nothing_is_left_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        // What a killed process of the same number left.
        fs::write(dir.path().join(format!(".file.tmp-{}", std::process::id())), "half").unwrap();
        for text in ["one", "two"] {
            write(&path, text.as_bytes()).unwrap();
            assert_eq!((fs::read_to_string(&path).unwrap().as_str(), names(dir.path())), (text, vec!["file".to_string()]));
        }
        assert!(write(&path.join("below"), b"").is_err() && write(Path::new("/"), b"").is_err());
        assert!(write_new(&path, b"").is_err(), "it is there already");
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
    }

    #[test]
    fn links_are_followed_and_what_is_no_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("far")).unwrap();
        // A chain of links, whose end need not be there.
        std::os::unix::fs::symlink("far/link", at("link")).unwrap();
        std::os::unix::fs::symlink("file", at("far/link")).unwrap();
        for text in ["one", "two"] {
            write(&at("link"), text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(at("far/file")).unwrap(), text);
            assert_eq!((names(dir.path()), names(&at("far"))), (vec!["far".into(), "link".into()], vec!["file".into(), "link".into()]));
        }
        std::os::unix::fs::symlink(at("loop"), at("loop")).unwrap();
        assert!(write(&at("loop"), b"").is_err());
        input::tests::pipe(&at("pipe"));
        for (path, what) in [(at("pipe"), "it is a pipe"), ("/dev/null".into(), "it is a device"), (at("far"), "directory")] {
            let said = write(&path, b"").unwrap_err().to_string();
            assert!(said.contains(what), "{said}");
        }
    }

    /// A file of a run's folder: a link that stays inside is followed, one that leads out is an error or replaced, and what it leads to stays as it is.
    #[test]
    fn nothing_is_written_where_a_link_leads_out() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let run = at("run");
        fs::create_dir_all(run.join("kept")).unwrap();
        fs::create_dir(at("away")).unwrap();
        fs::write(at("mine"), "precious").unwrap();
        let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, run.join(name)).unwrap();
        let write = |name: &str| write_inside(&run, name, b"new").map_err(|e| e.to_string());
        write("plain").unwrap();
        link(Path::new("kept/file"), "inside");
        link(&run.join("kept/other"), "absolute");
        for (name, leads) in
            [("plain", "plain"), ("inside", "kept/file"), ("absolute", "kept/other"), ("plain", "plain"), ("inside", "kept/file")]
        {
            write(name).unwrap();
            assert_eq!(fs::read_to_string(run.join(leads)).unwrap(), "new", "{name}");
        }
        assert!(run.join("inside").is_symlink() && run.join("absolute").is_symlink());
        link(&at("away"), "folder");
        for (i, to) in
            [at("mine"), "../mine".into(), at("nothing"), "folder/new".into(), "inside/../../mine".into(), "kept/../../mine".into()]
                .iter()
                .enumerate()
        {
            let name = format!("out-{i}");
            link(to, &name);
            let said = write(&name).unwrap_err();
            assert!(said.contains("leads out") || said.contains("Not a directory"), "{}: {said}", to.display());
        }
        assert_eq!(fs::read_to_string(at("mine")).unwrap(), "precious");
        assert!(!at("nothing").exists() && names(&at("away")).is_empty());
        // No temporary file is left, neither here nor there.
        assert_eq!(names(dir.path()), ["away", "mine", "run"]);
        assert_eq!(names(&run.join("kept")), ["file", "other"]);
        for name in ["kept", "."] {
            assert!(write(name).is_err(), "{name}");
        }
        input::tests::pipe(&run.join("pipe"));
        assert!(write("pipe").unwrap_err().contains("it is a pipe, not a file"));
    }

    /// A link that comes between the look and the write is replaced.
    #[test]
    fn a_link_that_comes_while_a_file_is_written_leads_nothing_away() {
        let dir = tempfile::tempdir().unwrap();
        let (run, mine) = (dir.path().join("run"), dir.path().join("mine"));
        fs::create_dir(&run).unwrap();
        fs::write(&mine, "precious").unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = std::os::unix::fs::symlink(&mine, run.join("link"));
                    let _ = fs::rename(run.join("link"), run.join("file"));
                    // A link that is there before the look is refused: now and then there must be none.
                    let _ = fs::remove_file(run.join("file"));
                }
            });
            // Until it was written: where the other thread waits for a core, the link may be there for long.
            let (begun, mut tries, mut written) = (std::time::Instant::now(), 0, 0);
            while tries < 300 || written == 0 && begun.elapsed().as_secs() < 120 {
                written += usize::from(write_inside(&run, "file", b"new").is_ok());
                tries += 1;
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(written > 0, "nothing was written");
        });
        assert_eq!(fs::read_to_string(&mine).unwrap(), "precious");
    }

    /// What a user's own file is called is no reason to remove it.
    #[test]
    fn only_what_kiln_itself_names_so_is_taken_away() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let before = SystemTime::now() - 2 * LEFT;
        let own = [
            "m.tmp-2023",
            ".m.tmp-2023-backup.tar",
            ".m.tmp-",
            ".m.tmp-2023x",
            "m.tmp-1234567",
            ".m.tmp-2023-",
            ".m.tmp-20251101",
            ".m.tmp-007",
        ];
        let ours = [".m.tmp-4194304", ".m.tmp-4194304-3"];
        for name in own.iter().chain(&ours) {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("thesis.tex"), "years of work").unwrap();
            File::open(at(name).join("thesis.tex")).unwrap().set_modified(before).unwrap();
            File::open(at(name)).unwrap().set_modified(before).unwrap();
        }
        write(&at("m"), b"").unwrap();
        sweep(dir.path(), None, Duration::ZERO);
        // In a run's folder only files of the kinds that kiln writes there.
        let run = dir.path().join("run");
        fs::create_dir(&run).unwrap();
        [".draft.tmp-4194304", ".config.toml.tmp-4194304", ".notes.txt.tmp-4194304"]
            .iter()
            .for_each(|name| fs::write(run.join(name), "").unwrap());
        fs::create_dir(run.join(".loss.svg.tmp-4194304")).unwrap();
        sweep_run(&run);
        assert_eq!(names(&run), [".draft.tmp-4194304", ".loss.svg.tmp-4194304", ".notes.txt.tmp-4194304"]);
        fs::remove_dir_all(&run).unwrap();
        let mut left: Vec<String> = own.iter().chain(&["m"]).map(|name| name.to_string()).collect();
        left.sort();
        assert_eq!(names(dir.path()), left);
    }

    #[test]
    fn what_a_killed_process_left_is_taken_away() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let dead = MOST_PROCESSES; // no process has this number
        let before = SystemTime::now() - 2 * LEFT;
        for name in [format!(".m.tmp-{dead}"), format!(".other.tmp-{dead}"), ".m.tmp-1".into(), ".m.tmp-x".into()] {
            fs::create_dir(at(&name)).unwrap();
            File::open(at(&name)).unwrap().set_modified(before).unwrap();
        }
        fs::create_dir(at(&format!(".m.tmp-{}", dead - 1))).unwrap(); // perhaps another machine's
        let busy = at(&format!(".m.tmp-{}", dead - 2)); // old itself, but with a file that is being written
        fs::create_dir(&busy).unwrap();
        fs::write(busy.join("file"), "").unwrap();
        File::open(&busy).unwrap().set_modified(before).unwrap();
        // Just killed: its lock is there, and nobody holds it. Still written to by a process that is not seen here: its lock is held.
        let [killed, held] = [dead - 3, dead - 4].map(|pid| at(&format!(".m.tmp-{pid}")));
        let locks = [&killed, &held].map(|dir| {
            fs::create_dir(dir).unwrap();
            File::create(dir.join(LOCK)).unwrap()
        });
        locks[1].try_lock().unwrap();
        let staged = Staged::new(&at("m")).unwrap();
        write_new(&staged.dir().join("file"), b"whole").unwrap();
        staged.finish().unwrap();
        let left = [
            ".m.tmp-1".to_string(),
            format!(".m.tmp-{}", dead - 4),
            format!(".m.tmp-{}", dead - 2),
            format!(".m.tmp-{}", dead - 1),
            ".m.tmp-x".into(),
        ];
        assert_eq!(names(dir.path()), [&left[..], &[format!(".other.tmp-{dead}"), "m".into()]].concat());
        sweep(dir.path(), None, Duration::ZERO);
        assert_eq!(names(dir.path()), [".m.tmp-1", ".m.tmp-x", "m"]);
    }

    #[test]
    fn a_folder_appears_or_is_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let staged = |text: &[u8]| {
            let staged = Staged::new(&path).unwrap();
            write_new(&staged.dir().join("file"), text).unwrap();
            staged
        };
        let text = || fs::read_to_string(path.join("file")).unwrap();
        drop(staged(b"given up"));
        assert!(names(dir.path()).is_empty());
        staged(b"one").finish().unwrap();
        assert_eq!(text(), "one");
        assert!(staged(b"two").finish().is_err(), "it is there already");
        assert_eq!((text().as_str(), names(dir.path())), ("one", vec!["m".to_string()]));
        staged(b"three").replace().unwrap();
        assert_eq!((text().as_str(), names(dir.path())), ("three", vec!["m".to_string()]));
    }

    /// What `lasts` makes of the calls, by the names that appeared.
    fn appeared(dir: &Path, f: impl FnOnce()) -> Vec<String> {
        let named = noted::lasts(&noted::during(f).1);
        named.iter().map(|path| path.strip_prefix(dir).unwrap().display().to_string()).collect()
    }

    #[test]
    fn what_appears_is_on_the_disk_before_anything_else_goes() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for _ in 0..2 {
            assert_eq!(appeared(dir.path(), || write(&at("file"), b"text").unwrap()), ["file"]);
            assert_eq!(appeared(dir.path(), || link(Path::new("file"), &at("link")).unwrap()), ["link"]);
            let staged = || {
                let staged = Staged::new(&at("folder")).unwrap();
                ["a", "b"].iter().for_each(|name| fs::write(staged.dir().join(name), name).unwrap());
                staged.replace().unwrap();
            };
            assert_eq!(appeared(dir.path(), staged), ["folder"]);
            assert_eq!(names(dir.path()), ["file", "folder", "link"]);
        }
        let staged = || {
            let staged = Staged::new(&at("another")).unwrap();
            fs::write(staged.dir().join("a"), "").unwrap();
            staged.finish().unwrap();
        };
        assert_eq!(appeared(dir.path(), staged), ["another"]);
        let (_, calls) = noted::during(|| write_new(&at("new"), b"text").unwrap());
        assert_eq!(calls, [noted::Call::Synced(at("new"))]);
        let (_, calls) = noted::during(|| create_folder(&at("deep/er")).unwrap());
        assert_eq!(calls, [noted::Call::Synced(at("deep")), noted::Call::Synced(dir.path().into())]);
    }
}
