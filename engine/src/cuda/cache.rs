//! Cache files: read only if they belong to this user, so that code that others could have written is never run, and replaced atomically.

use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// None if the file does not exist, belongs to another user, is world-writable, or is a symbolic link.
pub fn read(path: &Path) -> Option<Vec<u8>> {
    let no_links = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
    let mut file = std::fs::OpenOptions::new().read(true).custom_flags(no_links).open(path).ok()?;
    let m = file.metadata().ok()?;
    let own = m.is_file() && m.uid() == rustix::process::geteuid().as_raw() && m.mode() & 0o002 == 0;
    let mut bytes = vec![];
    (own && file.read_to_end(&mut bytes).is_ok()).then_some(bytes)
}

/// Writes a temporary file and renames it: readers see a whole file or none, and concurrent writers do not interfere. Entries have checksums, so there is
/// no fsync. Failing to write a cache is no error.
pub fn replace(path: &Path, bytes: &[u8]) {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let Some(folder) = path.parent() else { return };
    let beside = path.with_extension(format!("tmp-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    let write = || {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?.write_all(bytes)?;
        std::fs::rename(&beside, path)
    };
    if write().is_err() {
        let _ = std::fs::remove_file(&beside);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    #[test]
    fn only_files_of_this_user_are_read() {
        let folder = std::env::temp_dir().join(format!("kiln-cache-test-{}", std::process::id()));
        let (file, link) = (folder.join("file"), folder.join("link"));
        replace(&file, b"mine");
        assert_eq!(read(&file).as_deref(), Some(&b"mine"[..]));
        let mode = |p: &Path| std::fs::metadata(p).unwrap().mode() & 0o777;
        assert_eq!((mode(&folder), mode(&file)), (0o700, 0o600));
        symlink(&file, &link).unwrap();
        assert_eq!(read(&link), None, "a link");
        assert_eq!(read(&folder), None, "a folder");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(read(&file), None, "everybody may write it");
        // Only root can give a file away.
        if rustix::process::geteuid().is_root() {
            replace(&file, b"theirs");
            chown(&file, Some(65534), None).unwrap();
            assert_eq!(read(&file), None, "another user's");
        }
        replace(&file, b"new");
        assert_eq!(read(&file).as_deref(), Some(&b"new"[..]));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
