//! A job's calls to the file system: the process is killed at one of them, or one of them fails.

use super::disk::Disk;
use super::jobs::{Job, jobs};
use super::process::Call;
use super::{Finding, Kind, Part, Place, shim};
use fastrand::Rng;
use std::path::{Path, PathBuf};

/// What happens at a call, to which kinds of calls (letters of shim.c), and what the process may make of it.
struct Trouble {
    name: &'static str,
    to: &'static str,
    what: What,
}

enum What {
    Kill,
    /// Half of a write, then a kill.
    Tear,
    /// Less is written or read than was asked for, or a signal came in between: no reason to fail.
    Short,
    Interrupted,
    Error(i32),
    /// That call, and every later one of these kinds.
    From(i32, &'static str),
}

const EINTR: i32 = 4;
const EIO: i32 = 5;
const EACCES: i32 = 13;
const EMFILE: i32 = 24;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;

const TROUBLES: &[Trouble] = &[
    Trouble { name: "killed", to: "cwtmnlud", what: What::Kill },
    Trouble { name: "killed in a write", to: "w", what: What::Tear },
    Trouble { name: "a short write or read", to: "wr", what: What::Short },
    Trouble { name: "an interrupted call", to: "ocwrs", what: What::Interrupted },
    Trouble { name: "an I/O error", to: "focrwtsmnlud", what: What::Error(EIO) },
    Trouble { name: "no space once", to: "cwmnl", what: What::Error(ENOSPC) },
    Trouble { name: "no space from then on", to: "cwm", what: What::From(ENOSPC, "cwmnl") },
    Trouble { name: "no permission", to: "focmnlud", what: What::Error(EACCES) },
    Trouble { name: "no permission from then on", to: "cmnud", what: What::From(EACCES, "cmnlud") },
    Trouble { name: "too many open files", to: "foc", what: What::Error(EMFILE) },
    Trouble { name: "a disk that can be read only", to: "cwtsmnlud", what: What::From(EROFS, "cwtsmnlud") },
];

struct Attack {
    job: usize,
    trouble: usize,
    call: u64,
}

struct Calls<'a> {
    place: &'a Place,
    library: PathBuf,
    jobs: Vec<Job>,
    /// In an order drawn from the seed, so that a short time sees a bit of everything.
    attacks: Vec<Attack>,
}

pub fn make(place: &Place) -> Result<Option<Box<dyn Part + '_>>, String> {
    let Some(library) = shim::build(place)? else { return Ok(None) };
    let jobs = jobs(place, false)?;
    let mut attacks = vec![];
    for (i, job) in jobs.iter().enumerate() {
        for record in logged(place, job, &library)?.1 {
            let fits = TROUBLES.iter().enumerate().filter(|(_, t)| t.to.contains(record.kind));
            attacks.extend(fits.map(|(trouble, _)| Attack { job: i, trouble, call: record.number }));
        }
    }
    place.random("order", 0).shuffle(&mut attacks);
    Ok(Some(Box::new(Calls { place, library, jobs, attacks })))
}

/// A job that nobody disturbs: what lay in its folder before, and every call that was made.
pub fn logged(place: &Place, job: &Job, library: &Path) -> Result<(Disk, Vec<shim::Record>), String> {
    let (folder, log) = (place.path("logged"), place.path("log"));
    super::jobs::remove(&folder)?;
    let _ = std::fs::remove_file(&log);
    job.begin(&folder)?;
    let disk = Disk::new(&folder)?;
    let ran = shim::under(job.call(place, &folder), library, &folder).env("TORTURE_LOG", &log).run();
    ran.good().map_err(|f| f.text)?;
    job.ended(&folder).map_err(|f| f.text)?;
    Ok((disk, shim::read(&log)?))
}

impl Trouble {
    fn under(&self, call: Call, number: u64) -> Call {
        let call = call.env("TORTURE_AT", number.to_string());
        let fail = |call: Call, error: i32| call.env("TORTURE_DO", "fail").env("TORTURE_ERRNO", error.to_string());
        match self.what {
            What::Kill => call.env("TORTURE_DO", "kill"),
            What::Tear => call.env("TORTURE_DO", "tear"),
            What::Short => call.env("TORTURE_DO", "short"),
            What::Interrupted => fail(call, EINTR),
            What::Error(error) => fail(call, error),
            What::From(error, kinds) => fail(call, error).env("TORTURE_KINDS", kinds),
        }
    }
}

impl Part for Calls<'_> {
    fn attack(&mut self, case: u64, _: &mut Rng, folder: &Path) -> Result<String, Finding> {
        let attack = &self.attacks[case as usize];
        let (job, trouble) = (&self.jobs[attack.job], &TROUBLES[attack.trouble]);
        let about = |f: Finding| Finding::new(f.kind, format!("{}, {} at call {}: {}", job.name, trouble.name, attack.call, f.text));
        self.one(job, trouble, attack.call, folder).map_err(about)?;
        Ok(trouble.name.into())
    }

    fn all(&self) -> Option<u64> {
        Some(self.attacks.len() as u64)
    }
}

impl Calls<'_> {
    fn one(&self, job: &Job, trouble: &Trouble, number: u64, folder: &Path) -> Result<(), Finding> {
        job.begin(folder).map_err(|e| Finding::new(Kind::Wrong, e))?;
        let before = job.left(folder)?;
        let ran = trouble.under(shim::under(job.call(self.place, folder), &self.library, folder), number).run();
        let killed = matches!(trouble.what, What::Kill | What::Tear);
        if killed && ran.signal == Some(9) {
            let left = job.left(folder)?;
            job.loses(&before, &left, &ran)?;
            job.opens(self.place, folder, &left)?;
            return job.goes_on(self.place, folder, &left);
        }
        // Errors may change how many calls there are, so that a kill may come too late.
        let good = match trouble.what {
            What::Kill | What::Tear | What::Short | What::Interrupted => ran.good().map(|()| true)?,
            _ => ran.good_or_said()?,
        };
        let left = job.left(folder)?;
        if good {
            job.keeps(&ran, &before)?;
            return job.ended(folder);
        }
        job.loses(&before, &left, &ran)?;
        job.goes_on(self.place, folder, &left)
    }
}
