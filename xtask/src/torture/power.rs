//! Power cuts: a job's calls are written down once; then the disk is imagined as it may be after any of them, and the job goes on from that.

use super::calls::logged;
use super::disk::{Disk, Keep};
use super::jobs::{Job, Left, jobs};
use super::shim::{self, Record};
use super::{Finding, Kind, Part, Place};
use fastrand::Rng;
use std::path::Path;

struct Power<'a> {
    place: &'a Place,
    jobs: Vec<(Job, Disk, Vec<Record>)>,
}

pub fn make(place: &Place) -> Result<Option<Box<dyn Part + '_>>, String> {
    let Some(library) = shim::build(place)? else { return Ok(None) };
    let jobs = jobs(place, false)?.into_iter().map(|job| {
        let (disk, records) = logged(place, &job, &library)?;
        Ok((job, disk, records))
    });
    Ok(Some(Box::new(Power { place, jobs: jobs.collect::<Result<_, String>>()? })))
}

impl Part for Power<'_> {
    fn attack(&mut self, case: u64, random: &mut Rng, folder: &Path) -> Result<String, Finding> {
        let (job, disk, records) = &self.jobs[case as usize % self.jobs.len()];
        let (calls, keep) =
            (random.usize(0..=records.len()), *random.choice(&[Keep::Nothing, Keep::Ordered, Keep::Anything]).expect("three"));
        let wrong = |e: String| Finding::new(Kind::Wrong, e);
        let mut disk = disk.clone();
        for r in &records[..calls] {
            disk.happened(r).ok_or_else(|| {
                wrong(format!("call {} ({}) is of a file that nobody made: {} {}", r.number, r.kind, r.path.display(), r.other.display()))
            })?;
        }
        disk.cut(keep, random, folder).map_err(wrong)?;
        let after = records[..calls].last().map_or(0, |r| r.number);
        let about = |f: Finding| Finding::new(f.kind, format!("{}, cut off after call {after}, {keep:?} is kept: {}", job.name, f.text));
        self.goes_on(job, &records[..calls], folder).map_err(about)?;
        Ok(job.name.into())
    }
}

impl Power<'_> {
    fn goes_on(&self, job: &Job, before: &[Record], folder: &Path) -> Result<(), Finding> {
        let left = match job.left(folder)? {
            Left::Checkpoint(_) => Left::Checkpoint(saved(before).max(job.newest_before())),
            other => other,
        };
        job.goes_on(self.place, folder, &left)
    }
}

/// The newest step whose save had ended: its folder was synced after it had got its name, or the process went on to change something else, which it must not do
/// before.
pub fn saved(calls: &[Record]) -> Option<u64> {
    let named = |r: &Record| r.other.file_name()?.to_str()?.strip_prefix("step-")?.parse::<u64>().ok();
    let synced = |r: &Record, folder: Option<&Path>| r.kind == 's' && Some(&*r.path) == folder;
    let went_on = |after: usize, folder: Option<&Path>| calls[after..].iter().any(|r| synced(r, folder) || shim::CHANGES.contains(r.kind));
    let ended = calls.iter().enumerate().filter(|(i, r)| r.kind == 'n' && went_on(i + 1, r.other.parent()));
    ended.filter_map(|(_, r)| named(r)).max()
}
