//! Files that are not what they were: every command on them ends with a message, or with what it would have said without the damage.

use super::jobs::{copy, names};
use super::material::{COMMANDS, Material};
use super::seal::reseal;
use super::{Finding, Kind, Part, Place, shim};
use fastrand::Rng;
use std::fs;
use std::path::{Path, PathBuf};

/// KiB of address space: nothing here needs a tenth of it.
const MEMORY: u64 = 6 << 20;

struct Damage<'a> {
    place: &'a Place,
    material: Material,
    /// Makes calls to the file system fail.
    library: Option<PathBuf>,
}

/// ENOENT, EIO, ENOMEM, EACCES, EMFILE.
const ERRORS: [u32; 5] = [2, 5, 12, 13, 24];

pub fn make(place: &Place) -> Result<Option<Box<dyn Part + '_>>, String> {
    let material = Material::new(place)?;
    for (command, _) in COMMANDS {
        place.must(&material.filled(command))?;
        material.restore()?;
    }
    Ok(Some(Box::new(Damage { place, material, library: shim::build(place)? })))
}

impl Part for Damage<'_> {
    fn attack(&mut self, _: u64, random: &mut Rng, folder: &Path) -> Result<String, Finding> {
        let wrong = |e: String| Finding::new(Kind::Wrong, e);
        self.material.restore().map_err(wrong)?;
        let (command, reads) = random.choice(COMMANDS).expect("not empty");
        if let Some(library) = self.library.as_ref().filter(|_| random.u32(0..6) == 0) {
            return self.failing(command, library, random);
        }
        let files: Vec<PathBuf> = reads.iter().flat_map(|r| below(&self.material.folder.join(r))).collect();
        let path = random.choice(&files).expect("every command reads something");
        let before = fs::read(path).map_err(|e| wrong(format!("{}: {e}", path.display())))?;
        let mut how = damage(path, &before, random).map_err(|e| wrong(format!("{}: {e}", path.display())))?.to_string();
        let sealed = random.bool() && reseal(path);
        if sealed {
            how += ", and sealed again";
        }
        let ran = self.place.call(self.material.filled(command).split(' ')).limited(MEMORY).run();
        let inside = path.strip_prefix(&self.material.folder).unwrap_or(path).display();
        let judged = ran.good_or_said().and_then(|good| if good && !sealed { self.same(command, path) } else { Ok(()) });
        judged.map_err(|f| {
            let _ = copy(&self.material.folder, folder);
            Finding::new(f.kind, format!("{inside}, {how}: {}", f.text))
        })?;
        Ok(how)
    }
}

impl Damage<'_> {
    /// Nothing is damaged, but one call fails.
    fn failing(&self, command: &str, library: &Path, random: &mut Rng) -> Result<String, Finding> {
        let (number, error) = (random.u32(1..60).to_string(), ERRORS[random.usize(..ERRORS.len())].to_string());
        let call = shim::under(self.place.call(self.material.filled(command).split(' ')), library, &self.material.folder);
        let ran = call.env("TORTURE_AT", &number).env("TORTURE_DO", "fail").env("TORTURE_ERRNO", &error).run();
        let judged = ran.good_or_said().and_then(|good| if good { self.same(command, Path::new("metrics.jsonl")) } else { Ok(()) });
        judged.map_err(|f| Finding::new(f.kind, format!("call {number} fails with error {error}: {}", f.text)))?;
        Ok("a failing call".into())
    }

    /// What a checksum guards is found out, or does no harm: a run that went on all the same has the bits of one that was not damaged.
    fn same(&self, command: &str, path: &Path) -> Result<(), Finding> {
        let guarded = ["checkpoints/", ".tokens", "metrics.jsonl", "receipts.json", "events.out"];
        let Some(run) = ["hydra", "vision", "hrm", "adapted"].into_iter().find(|r| command.contains(&format!("--out {{}}/{r} --resume")))
        else {
            return Ok(());
        };
        if !guarded.iter().any(|g| path.display().to_string().contains(g)) {
            return Ok(());
        }
        let last = "checkpoints/step-00000006/model.safetensors";
        let ours = fs::read(self.material.folder.join(run).join(last)).ok();
        match ours.is_some() && ours == self.reference(run)? {
            true => Ok(()),
            false => Err(Finding::new(Kind::Loss, format!("it went on, and {run}/{last} has other bits"))),
        }
    }

    /// The same file of a run that goes on undamaged; made once.
    fn reference(&self, run: &str) -> Result<Option<Vec<u8>>, Finding> {
        let kept = self.place.path(&format!("undamaged-{run}"));
        if !kept.exists() {
            let wrong = |e: String| Finding::new(Kind::Wrong, e);
            let (aside, now) = (self.place.path("aside"), &self.material.folder);
            fs::rename(now, &aside).map_err(|e| wrong(e.to_string()))?;
            self.material.restore().map_err(wrong)?;
            self.place.must(&self.material.filled(&format!("train --out {{}}/{run} --resume --steps 6 --threads 1"))).map_err(wrong)?;
            let model = now.join(run).join("checkpoints/step-00000006/model.safetensors");
            fs::copy(model, &kept).map_err(|e| wrong(e.to_string()))?;
            super::jobs::remove(now).map_err(wrong)?;
            fs::rename(&aside, now).map_err(|e| wrong(e.to_string()))?;
        }
        Ok(fs::read(kept).ok())
    }
}

/// The files at or below a path.
pub fn below(path: &Path) -> Vec<PathBuf> {
    if !path.is_dir() {
        return vec![path.into()];
    }
    names(path).iter().flat_map(|n| below(&path.join(n))).collect()
}

/// What nobody means where a number stands.
const NUMBERS: &str = "0 -1 1 2 3 7 255 65536 2147483648 4294967296 9223372036854775807 18446744073709551615 99999999999999999999 1e308 -1e308 1e-320 0.5 nan null \"\" [] true";

pub fn odd_number(random: &mut Rng) -> &'static str {
    let all: Vec<&str> = NUMBERS.split(' ').collect();
    all[random.usize(..all.len())]
}

/// Damages a file in some way, and says in which.
fn damage(path: &Path, bytes: &[u8], random: &mut Rng) -> std::io::Result<&'static str> {
    let mut new = bytes.to_vec();
    let n = new.len();
    let some = |random: &mut Rng| if n == 0 { 0 } else { random.usize(..n) };
    let how = match random.u32(0..14) {
        0 | 1 => {
            for _ in 0..random.usize(1..=8).min(n) {
                let at = some(random);
                new[at] ^= 1 << random.u32(0..8);
            }
            "bits flipped"
        }
        2 => {
            new.truncate(some(random));
            "cut"
        }
        3 => {
            new.clear();
            "emptied"
        }
        4 => {
            let at = some(random);
            let end = (at + random.usize(1..=4096)).min(n);
            new[at..end].fill(0);
            "zeroed"
        }
        5 => {
            new.extend((0..random.usize(1..=5000)).map(|_| random.u8(..)));
            "extended"
        }
        6 => {
            let at = some(random);
            let more: Vec<u8> = (0..random.usize(1..=64)).map(|_| random.u8(..)).collect();
            new.splice(at..at, more);
            "bytes inserted"
        }
        7 => {
            let (at, length) = (some(random), random.usize(1..=64));
            new.drain(at..(at + length).min(n));
            "bytes taken out"
        }
        8 => {
            fs::remove_file(path)?;
            if random.bool() {
                fs::create_dir(path)?;
            }
            return Ok("gone");
        }
        9 | 10 => {
            number(&mut new, random);
            "another number"
        }
        11 => {
            digits(&mut new, random);
            "other digits"
        }
        12 => {
            line(&mut new, random);
            "lines mixed up"
        }
        _ => {
            let deep =
                *random.choice(&[b"[".as_slice(), b"{\"a\":", b"(", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"\xff\xfe"]).expect("some");
            new = deep.repeat(random.usize(1..100_000));
            "nonsense"
        }
    };
    fs::write(path, new)?;
    Ok(how)
}

/// Where numbers stand in a text; of a file of bytes, in its first part, which may be a header.
fn numbers(bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
    let mut all = vec![];
    let mut at = 0;
    let limit = bytes.len().min(100_000);
    while at < limit {
        let end = (at..limit).find(|i| !bytes[*i].is_ascii_digit()).unwrap_or(limit);
        if end > at {
            all.push(at..end);
        }
        at = end + 1;
    }
    all
}

fn number(bytes: &mut Vec<u8>, random: &mut Rng) {
    if let Some(place) = random.choice(&numbers(bytes)) {
        bytes.splice(place.clone(), odd_number(random).bytes());
    }
}

/// As many as before: what tells the length of a header stays true.
fn digits(bytes: &mut [u8], random: &mut Rng) {
    if let Some(place) = random.choice(&numbers(bytes)) {
        bytes[place.clone()].iter_mut().for_each(|b| *b = random.digit(10) as u8);
    }
}

fn line(bytes: &mut Vec<u8>, random: &mut Rng) {
    let mut lines: Vec<Vec<u8>> = bytes.split_inclusive(|b| *b == b'\n').map(<[u8]>::to_vec).collect();
    if lines.is_empty() {
        return;
    }
    let (a, b) = (random.usize(..lines.len()), random.usize(..lines.len()));
    match random.u32(0..3) {
        0 => lines.swap(a, b),
        1 => lines.insert(a, lines[b].clone()),
        _ => drop(lines.remove(a)),
    }
    *bytes = lines.concat();
}
