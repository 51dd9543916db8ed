//! Links in folders that others made: what lies outside of a run, a model or a data set is neither shown nor copied because a link in it leads there.

use super::damage::below;
use super::jobs::{copy, create, names, remove};
use super::material::{COMMANDS, Material};
use super::{Finding, Kind, Part, Place};
use fastrand::Rng;
use std::fs;
use std::os::unix::fs::{lchown, symlink};
use std::path::{Path, PathBuf};

/// KiB of address space.
const MEMORY: u64 = 6 << 20;

/// In the file that links lead to, and in kiln's environment.
const SECRET: &str = "7f3e-nobody-else-may-read-this";

/// Commands whose output others see, or take: it must not hold what a link shows.
const SHOWN: &[&str] = &[
    "runs {}",
    "runs {} --json",
    "report {}/hydra --out {}/new.html",
    "report {} --out {}/new.html",
    "export {}/adapted --out {}/new",
    "export {}/adapted --merge --out {}/new",
    "export {}/hydra --best --out {}/new",
];

/// Folders of the material in which something becomes a link.
const FOLDERS: &[&str] = &["hydra", "vision", "hrm", "adapted", "model", "adapter", "data"];

/// Those of them that are runs.
const RUNS: &[&str] = &["hydra", "vision", "hrm", "adapted"];

/// Another user, who made the link, where this one may say so.
const OTHER: u32 = 65534;

struct Links<'a> {
    place: &'a Place,
    material: Material,
    /// Outside of everything that kiln is told to read.
    outside: PathBuf,
}

pub fn make(place: &Place) -> Result<Option<Box<dyn Part + '_>>, String> {
    Ok(Some(Box::new(Links { place, material: Material::new(place)?, outside: place.path("outside") })))
}

impl Part for Links<'_> {
    fn attack(&mut self, _: u64, random: &mut Rng, folder: &Path) -> Result<String, Finding> {
        let wrong = |e: String| Finding::new(Kind::Wrong, e);
        self.material.restore().map_err(wrong)?;
        let (how, own) = self.link(random).map_err(wrong)?;
        let shown = random.bool();
        let command =
            if shown { random.choice(SHOWN).expect("not empty") } else { random.choice(COMMANDS).map(|c| c.0).expect("not empty") };
        let call = self.place.call(self.material.filled(command).split(' ')).env("TORTURE_SECRET", SECRET);
        let ran = call.limited(MEMORY).run();
        let judged = ran.good_or_said().and_then(|good| {
            // One's own link to a folder may stand where runs are: docs/watch.md.
            if shown && !own && ran.out.contains(SECRET) {
                return Err(ran.finding(Kind::Loss, "it shows what a link leads to"));
            }
            if let Some(path) = holds(&self.material.folder).filter(|_| !own) {
                return Err(ran.finding(Kind::Loss, &format!("{} holds what a link leads to", path.display())));
            }
            match self.secrets().map_err(wrong)? == fs::read_dir(&self.outside).into_iter().flatten().count() {
                true => Ok(good),
                false => Err(ran.finding(Kind::Loss, "what a link leads to was written to")),
            }
        });
        if judged.is_err() {
            let _ = copy(&self.material.folder, folder);
        }
        judged.map_err(|f| Finding::new(f.kind, format!("{how}: {}", f.text)))?;
        Ok(if shown { "shown" } else { "read" }.into())
    }
}

impl Links<'_> {
    /// Puts a link in the place of a file or a folder, or beside one; and whether it is one's own, to a folder, and in no run: what a folder of runs may hold.
    fn link(&self, random: &mut Rng) -> Result<(String, bool), String> {
        remove(&self.outside)?;
        let inside = self.material.folder.join(random.choice(FOLDERS).expect("not empty"));
        let files = below(&inside);
        let mut at = random.choice(&files).expect("every folder has files").clone();
        if random.u32(0..6) == 0 {
            at = at.with_file_name(["notes.txt", "README.md", "samples.jsonl", "best", "report.html", "LICENSE"][random.usize(0..6)]);
        } else if random.u32(0..5) == 0 {
            at = at.parent().filter(|p| p.starts_with(&inside)).unwrap_or(&at).to_path_buf();
        }
        self.secrets()?;
        let to = match random.u32(0..6) {
            0 => PathBuf::from("/proc/self/environ"),
            1 => {
                PathBuf::from("../../../../../../../../../../..").join(self.outside.strip_prefix("/").unwrap_or(&self.outside)).join("key")
            }
            2 => self.outside.clone(),
            3 => self.outside.join("missing"),
            _ => self.outside.join("key"),
        };
        if at.is_dir() && !at.is_symlink() {
            remove(&at)?;
        } else {
            let _ = fs::remove_file(&at);
        }
        symlink(&to, &at).map_err(|e| format!("{}: {e}", at.display()))?;
        let other = random.bool() && lchown(&at, Some(OTHER), Some(OTHER)).is_ok();
        let whose = if other { "another user's link" } else { "a link" };
        let how = format!("{}, {whose} to {}", at.strip_prefix(&self.material.folder).unwrap_or(&at).display(), to.display());
        let in_run = at != inside && RUNS.iter().any(|run| at.starts_with(self.material.folder.join(run)));
        Ok((how, !other && !in_run && to == self.outside))
    }

    /// Writes what links lead to; how many files it is. What is there already must be as it was written.
    fn secrets(&self) -> Result<usize, String> {
        create(&self.outside)?;
        let texts = [
            ("key", format!("password = \"{SECRET}\"\n")),
            ("metrics.jsonl", format!("{{\"step\":1,\"loss\":0.5,\"note\":\"{SECRET}\"}}\n")),
            ("config.toml", format!("recipe = \"{SECRET}\"\n")),
            ("samples.jsonl", format!("{{\"step\":1,\"prompt\":\"a\",\"text\":\"{SECRET}\"}}\n")),
        ];
        for (name, text) in &texts {
            let path = self.outside.join(name);
            match fs::read_to_string(&path) {
                Ok(there) if there == *text => {}
                Ok(_) => return Ok(usize::MAX),
                Err(_) => fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?,
            }
        }
        Ok(texts.len())
    }
}

/// A file below a folder, not behind a link, that holds the secret.
fn holds(folder: &Path) -> Option<PathBuf> {
    names(folder).into_iter().map(|n| folder.join(n)).find_map(|path| match fs::symlink_metadata(&path) {
        Ok(m) if m.is_dir() => holds(&path),
        Ok(m) if m.is_file() => {
            let bytes = fs::read(&path).unwrap_or_default();
            bytes.windows(SECRET.len()).any(|w| w == SECRET.as_bytes()).then_some(path)
        }
        _ => None,
    })
}
