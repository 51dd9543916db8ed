//! `cargo xtask torture`: attacks the built kiln in temporary folders, for as long as it is told to, and counts what it finds. A run that
//! is killed, starved of disk, cut off from power or given damaged files must lose nothing that was saved, and must say what is wrong.

mod calls;
mod crafted;
mod damage;
mod disk;
mod fuzz;
mod jobs;
mod kills;
mod links;
mod material;
mod power;
mod process;
mod seal;
mod shim;
#[cfg(test)]
mod tests;

use fastrand::Rng;
use process::Call;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// In the order in which they run.
const PARTS: &[(&str, Make, &str)] = &[
    ("kills", kills::make, "trainings, data prepare and export, killed at random moments and started again"),
    ("calls", calls::make, "the same, killed at a call to the file system, or with one that fails (no space, I/O error, ...)"),
    ("power", power::make, "the same, after a power cut: of what was not synced, anything may be missing"),
    ("damage", damage::make, "files of runs, data sets, models and pictures with bytes flipped, cut, zeroed, added"),
    ("fuzz", fuzz::make, "random command lines and settings"),
    ("links", links::make, "links out of runs, models and data sets, some of them another user's"),
    ("templates", crafted::templates, "chat templates without an end, or of any depth and size"),
    ("archives", crafted::archives, "rows of gigabytes in small files"),
    ("indexes", crafted::indexes, "lists of weights that name files that are not there, many or elsewhere"),
    ("ranks", crafted::ranks, "checkpoints of several ranks whose parts lie nowhere"),
];

/// Folders of attacks that found something, kept at most.
const KEPT: usize = 20;

/// None where this machine has not what it needs.
type Make = fn(&Place) -> Result<Option<Box<dyn Part + '_>>, String>;

/// A way of attacking.
trait Part {
    /// Attack number `case`: what was attacked, or what was found. `folder` is empty, and is kept where something was.
    fn attack(&mut self, case: u64, random: &mut Rng, folder: &Path) -> Result<String, Finding>;
    /// How many different ones there are, where they can be counted.
    fn all(&self) -> Option<u64> {
        None
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// Something that had been saved is gone, or other bits came out.
    Loss,
    Panic,
    /// A signal that nobody sent: an abort, a segmentation fault.
    Abort,
    Hang,
    /// It ended in another way than it should.
    Wrong,
}

#[derive(Debug)]
struct Finding {
    kind: Kind,
    text: String,
}

impl Finding {
    fn new(kind: Kind, text: impl fmt::Display) -> Finding {
        Finding { kind, text: text.to_string() }
    }
}

/// Where attacks take place.
struct Place {
    /// The workspace.
    root: PathBuf,
    kiln: PathBuf,
    dir: TempDir,
    seed: u64,
}

impl Place {
    fn new(root: &Path, seed: u64) -> Result<Place, String> {
        let dir = tempfile::Builder::new().prefix("kiln-torture-").tempdir().map_err(|e| format!("no temporary folder: {e}"))?;
        Ok(Place { root: root.into(), kiln: dir.path().join("kiln"), dir, seed })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn call<S: Into<String>>(&self, args: impl IntoIterator<Item = S>) -> Call {
        Call::new(&self.kiln, self.dir.path(), args)
    }

    /// What must work for there to be anything to attack; arguments are split at spaces.
    fn must(&self, args: &str) -> Result<process::Ran, String> {
        let ran = self.call(args.split(' ').filter(|a| !a.is_empty())).run();
        match ran.code {
            Some(0) => Ok(ran),
            _ => Err(format!("before anything was attacked: {}", ran.described())),
        }
    }

    /// The numbers that attack `case` of a part draws: the same whatever ran before it.
    fn random(&self, part: &str, case: u64) -> Rng {
        let name = part.bytes().fold(0u64, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
        Rng::with_seed(Rng::with_seed(self.seed ^ name.rotate_left(32)).u64(..) ^ case.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

/// What is asked for.
struct Asked {
    minutes: f64,
    seed: u64,
    only: Vec<String>,
    case: Option<u64>,
}

impl Asked {
    fn new(args: &[String]) -> Result<Asked, String> {
        let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut asked = Asked { minutes: 5.0, seed: clock, only: vec![], case: None };
        let mut rest = args.iter();
        while let Some(flag) = rest.next() {
            let value = rest.next().ok_or_else(|| format!("{flag} needs a value"))?;
            let bad = |what: &str| format!("{flag} {value}: {what}");
            match flag.as_str() {
                "--minutes" => {
                    asked.minutes = value.parse().ok().filter(|m| *m > 0.0 && *m < 1e5).ok_or_else(|| bad("a number above 0"))?
                }
                "--seed" => asked.seed = value.parse().map_err(|_| bad("a whole number"))?,
                "--case" => asked.case = Some(value.parse().map_err(|_| bad("a whole number"))?),
                "--only" => asked.only = value.split(',').map(str::to_owned).collect(),
                _ => return Err(format!("there is no {flag}: --minutes, --seed, --only, --case")),
            }
        }
        let names: Vec<&str> = PARTS.iter().map(|p| p.0).collect();
        if let Some(unknown) = asked.only.iter().find(|o| !names.contains(&o.as_str())) {
            return Err(format!("--only {unknown}: any of {}", names.join(",")));
        }
        if asked.case.is_some() && asked.only.len() != 1 {
            return Err("--case is a number of one part: name that with --only".into());
        }
        Ok(asked)
    }

    fn parts(&self) -> impl Iterator<Item = &'static (&'static str, Make, &'static str)> {
        PARTS.iter().filter(|p| self.only.is_empty() || self.only.iter().any(|o| o == p.0))
    }
}

pub fn help() -> String {
    let parts: Vec<String> = PARTS.iter().map(|(name, _, about)| format!("              {name:<10}{about}\n")).collect();
    format!("            --minutes 5 --seed N --only PART,.. (--case N repeats one attack); the parts share the time:\n{}", parts.concat())
}

/// `root` is the workspace, whose kiln has been built.
pub fn torture(root: &Path, args: &[String]) -> Result<(), String> {
    let asked = Asked::new(args)?;
    let place = Place::new(root, asked.seed)?;
    // A copy: what is built meanwhile is not what is attacked.
    let built = crate::kiln();
    std::fs::copy(&built, &place.kiln).map_err(|e| format!("{}: {e}", built.display()))?;
    println!("seed {}, in {}", asked.seed, place.dir.path().display());
    let kept = crate::mpich::target_dir().join("torture");
    let _ = std::fs::remove_dir_all(&kept);
    let share = Duration::from_secs_f64(60.0 * asked.minutes / asked.parts().count() as f64);
    let mut found = 0;
    for (name, make, _) in asked.parts() {
        let started = Instant::now();
        let Some(mut part) = make(&place)? else { continue };
        let mut tally = Tally::default();
        for case in asked.case.unwrap_or(0).. {
            if part.all().is_some_and(|all| case >= all) || case > 0 && asked.case.is_none() && started.elapsed() >= share {
                break;
            }
            let folder = place.path("attack");
            jobs::create(&folder)?;
            match part.attack(case, &mut place.random(name, case), &folder) {
                Ok(what) => tally.add(what, None),
                Err(finding) => {
                    println!("\n{name} {case}: {:?}: {}", finding.kind, finding.text);
                    println!("again with: cargo xtask torture --only {name} --seed {} --case {case}", asked.seed);
                    if found < KEPT && jobs::copy(&folder, &kept.join(format!("{name}-{case}"))).is_ok() {
                        println!("what it left: {}\n", kept.join(format!("{name}-{case}")).display());
                    }
                    tally.add(String::new(), Some(finding.kind));
                    found += 1;
                }
            }
            jobs::remove(&folder)?;
            if asked.case.is_some() {
                break;
            }
        }
        println!("{}", tally.line(name, part.all(), started.elapsed()));
    }
    match found {
        0 => Ok(()),
        n => Err(format!("torture found {n} (seed {})", asked.seed)),
    }
}

/// What became of a part's attacks.
#[derive(Default)]
struct Tally {
    attacks: u64,
    by_what: BTreeMap<String, u64>,
    by_kind: BTreeMap<Kind, u64>,
}

impl Tally {
    fn add(&mut self, what: String, found: Option<Kind>) {
        self.attacks += 1;
        match found {
            Some(kind) => *self.by_kind.entry(kind).or_default() += 1,
            None => *self.by_what.entry(what).or_default() += 1,
        }
    }

    fn line(&self, name: &str, all: Option<u64>, took: Duration) -> String {
        let kinds = [Kind::Loss, Kind::Panic, Kind::Abort, Kind::Hang, Kind::Wrong];
        let found: Vec<String> = kinds.iter().map(|k| format!("{} {:?}", self.by_kind.get(k).unwrap_or(&0), k).to_lowercase()).collect();
        let what: Vec<String> = self.by_what.iter().map(|(what, n)| format!("{n} {what}")).collect();
        let of = all.map_or(String::new(), |all| format!(" of {all}"));
        let seconds = took.as_secs();
        format!("{name}: {}{of} attacks in {seconds} s: {}\n  survived: {}", self.attacks, found.join(", "), what.join(", "))
    }
}
