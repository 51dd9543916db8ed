//! Files that a command is asked to write, checked before it computes anything.

use crate::{files, input};
use anyhow::{Context, Result, bail};
use std::io::Read;
use std::path::Path;

/// Flags with the files that they name.
pub type Named<'a> = &'a [(&'a str, Option<&'a Path>)];

/// Refuses what could not be written at the end, and a file that is named twice, one of which would be lost. Nor may a file be written over that the
/// command reads (`read`).
pub fn checked(written: Named, read: Named) -> Result<()> {
    let (written, read) = (given(written), given(read));
    for (i, (flag, path)) in written.iter().enumerate() {
        let place = files::writable(path).with_context(|| format!("cannot write {flag} {}", path.display()))?;
        if let Some((other, _)) = written[..i].iter().chain(&read).find(|other| files::place(other.1).is_ok_and(|p| p == place)) {
            bail!("{flag} {}: {other} names the same file, which would be written over; name another", path.display());
        }
    }
    Ok(())
}

fn given<'a>(all: Named<'a>) -> Vec<(&'a str, &'a Path)> {
    all.iter().filter_map(|(flag, path)| Some((*flag, path.filter(|p| *p != Path::new("/dev/stdout"))?))).collect()
}

/// The same for one page. What is there already and is no page, a run's metrics say, is not written over.
pub fn page(flag: &str, path: Option<&Path>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    if !path.extension().is_some_and(|e| e.eq_ignore_ascii_case("html") || e.eq_ignore_ascii_case("htm")) {
        bail!("{flag} {}: a page's name ends in .html", path.display());
    }
    checked(&[(flag, Some(path))], &[])?;
    const BEGINS: &[u8] = b"<!doctype html";
    let is_page = |mut file: std::fs::File| {
        let mut start = [0; BEGINS.len()];
        file.read_exact(&mut start).is_ok() && start.eq_ignore_ascii_case(BEGINS)
    };
    if path.exists() && !input::open(path).is_ok_and(is_page) {
        bail!("{flag} {}: there is a file already that is no page; name another, or remove it", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_be_lost_is_not_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let (a, b) = (at("a.json"), at("b.json"));
        let refused = |written: Named, read: Named| format!("{:#}", checked(written, read).unwrap_err());
        checked(&[("--json", Some(&a)), ("--html", Some(&b)), ("--x", None)], &[("--baseline", Some(&at("c.json")))]).unwrap();
        assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none(), "nothing is left by looking");
        let around = dir.path().join("../").join(dir.path().file_name().unwrap()).join("a.json");
        assert!(refused(&[("--json", Some(&a)), ("--html", Some(&around))], &[]).contains("--json names the same file"));
        std::fs::write(&a, "{}").unwrap();
        std::os::unix::fs::symlink(&a, &b).unwrap();
        assert!(refused(&[("--json", Some(&b))], &[("--baseline", Some(&a))]).contains("--baseline names the same file"));
        assert!(refused(&[("--json", Some(&at("no/x.json")))], &[]).contains("No such file"));
        assert!(refused(&[("--json", Some(&a.join("below.json")))], &[]).contains("Not a directory"));
        assert!(refused(&[("--json", Some(dir.path()))], &[]).contains("Is a directory"));
        checked(&[("--json", Some(Path::new("/dev/stdout")))], &[]).unwrap();
        // Pages.
        let page = |name: &str| page("--out", Some(&at(name))).map_err(|e| format!("{e:#}"));
        assert!(page("a.json").unwrap_err().contains("ends in .html"));
        page("new.html").unwrap();
        std::fs::write(at("notes.html"), "mine").unwrap();
        assert!(page("notes.html").unwrap_err().contains("no page"));
        std::fs::write(at("old.html"), "<!doctype html>\n<html>").unwrap();
        page("old.html").unwrap();
        assert_eq!(std::fs::read_to_string(at("old.html")).unwrap(), "<!doctype html>\n<html>");
    }
}
