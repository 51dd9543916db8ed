//! Which libraries may be loaded: their code runs as this user, so nobody else may have made them, or be able to replace them.

use rustix::process::{getegid, geteuid};
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// As many links as Linux follows in a path.
const LINKS: usize = 40;

/// Whether nobody but root, this user and `owners` could have put a file or a folder where `path` leads, or could replace it: each folder on the way, each
/// link and the file itself belong to them, and nobody else may write there.
pub fn trusted(path: &Path, owners: &[u32]) -> Result<(), String> {
    if !path.is_absolute() {
        return Err(format!(
            "{} is not used: it is a relative path, which means something else in every working directory",
            path.display()
        ));
    }
    let mut ahead: Vec<OsString> = parts(path);
    let (mut at, mut links) = (PathBuf::from("/"), 0);
    allowed(&at, &look(&at)?, owners)?;
    while let Some(part) = ahead.pop() {
        if part == ".." {
            at.pop();
            continue;
        }
        let next = at.join(part);
        let found = look(&next)?;
        allowed(&next, &found, owners)?;
        if !found.is_symlink() {
            at = next;
            continue;
        }
        links += 1;
        if links > LINKS {
            return Err(format!("{} is not used: too many links", path.display()));
        }
        let target = fs::read_link(&next).map_err(|e| format!("{}: {e}", next.display()))?;
        if target.is_absolute() {
            at = PathBuf::from("/");
        }
        ahead.extend(parts(&target));
    }
    Ok(())
}

fn look(path: &Path) -> Result<Metadata, String> {
    fs::symlink_metadata(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// The parts of a path, the first one last.
fn parts(path: &Path) -> Vec<OsString> {
    let part = |c: Component| matches!(c, Component::Normal(_) | Component::ParentDir).then(|| c.as_os_str().to_os_string());
    path.components().rev().filter_map(part).collect()
}

fn allowed(path: &Path, found: &Metadata, owners: &[u32]) -> Result<(), String> {
    let me = geteuid().as_raw();
    // Whoever owns `/` is root: in a user namespace without root, that is another number.
    let root = fs::metadata("/").map_or(0, |m| m.uid());
    let is_trusted = |owner: u32| [0, root, me].contains(&owner) || owners.contains(&owner);
    let refused = |why: String| Err(format!("{} is not used: {why}", path.display()));
    if !is_trusted(found.uid()) {
        return refused(format!(
            "it belongs to user {}, not to root or to user {me} who runs this (KILN_TRUSTED_UIDS={} trusts that user, too)",
            found.uid(),
            found.uid()
        ));
    }
    // In a folder with the sticky bit, such as /tmp, nobody removes or renames what is another's.
    if found.is_symlink() || (found.is_dir() && found.mode() & 0o1000 != 0) {
        return Ok(());
    }
    // A group of this user alone has the user's number, by convention.
    let own_group = found.gid() == 0 || (found.gid() == getegid().as_raw() && found.gid() == me);
    match found.mode() & 0o022 {
        mode if mode & 0o002 != 0 => refused("everybody may write to it (chmod o-w)".into()),
        mode if mode & 0o020 != 0 && !own_group => refused(format!("group {} may write to it (chmod g-w)", found.gid())),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn what_others_could_have_written_is_not_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/lib");
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("libx.so");
        fs::write(&file, "x").unwrap();
        mode(&file, 0o644);
        assert_eq!(trusted(&file, &[]), Ok(()));
        let refused = |path: &Path, words: &str| {
            let said = trusted(path, &[]).unwrap_err();
            assert!(said.contains(words), "{said}");
        };
        refused(Path::new("a/lib/libx.so"), "relative");
        refused(&folder.join("none.so"), "No such file");
        // The file, its folder, a folder above.
        for path in [&file, &folder, &dir.path().join("a")] {
            let usual = if path.is_dir() { 0o755 } else { 0o644 };
            mode(path, usual | 0o002);
            refused(&file, "everybody may write to it");
            refused(&file, &format!("{} is not used", path.display()));
            mode(path, usual);
            assert_eq!(trusted(&file, &[]), Ok(()));
        }
        // As in /tmp, where the file itself is still looked at.
        mode(&folder, 0o1777);
        assert_eq!(trusted(&file, &[]), Ok(()));
        mode(&folder, 0o755);
        // Where a link leads counts, and whether it could be another.
        let open = dir.path().join("open");
        fs::create_dir(&open).unwrap();
        symlink(&file, open.join("libx.so")).unwrap();
        symlink("../a/lib", open.join("lib")).unwrap();
        assert_eq!(trusted(&open.join("libx.so"), &[]), Ok(()));
        assert_eq!(trusted(&open.join("lib/libx.so"), &[]), Ok(()));
        mode(&open, 0o777);
        refused(&open.join("libx.so"), "everybody may write to it");
        refused(&open.join("lib/libx.so"), "everybody may write to it");
        mode(&open, 0o755);
        symlink("round", dir.path().join("round")).unwrap();
        refused(&dir.path().join("round"), "too many links");
        // Only root can give a file away.
        if geteuid().is_root() {
            for path in [&file, &folder] {
                chown(path, Some(65534), None).unwrap();
                refused(&file, "belongs to user 65534, not to root or to user 0");
                assert_eq!(trusted(&file, &[65534]), Ok(()));
                chown(path, Some(0), None).unwrap();
            }
            chown(&folder, None, Some(65534)).unwrap();
            mode(&folder, 0o775);
            refused(&file, "group 65534 may write to it");
        }
    }
}
