//! Kills, and signals that ask to stop, at random moments.

use super::jobs::{Job, Left, jobs};
use super::{Finding, Kind, Part, Place};
use fastrand::Rng;
use std::path::Path;
use std::time::Duration;

/// Kills of one job, at most; then it is left to end.
const MOST: u32 = 8;

struct Kills<'a> {
    place: &'a Place,
    jobs: Vec<Job>,
}

pub fn make(place: &Place) -> Result<Option<Box<dyn Part + '_>>, String> {
    Ok(Some(Box::new(Kills { place, jobs: jobs(place, true)? })))
}

impl Part for Kills<'_> {
    fn attack(&mut self, case: u64, random: &mut Rng, folder: &Path) -> Result<String, Finding> {
        let job = &self.jobs[case as usize % self.jobs.len()];
        job.begin(folder).map_err(|e| Finding::new(Kind::Wrong, e))?;
        let mut left = job.left(folder)?;
        for kill in 0..random.u32(1..=MOST) {
            let call = if kill == 0 { job.call(self.place, folder) } else { job.again(self.place, folder) };
            let signal = ["KILL", "KILL", "TERM", "INT"][random.usize(0..4)];
            let ran = call.signalled(signal, Duration::from_secs_f64(job.took.as_secs_f64() * random.f64() * 1.1)).run();
            ran.stopped()?;
            let now = job.left(folder)?;
            job.loses(&left, &now, &ran)?;
            left = now;
            if ran.code == Some(0) || left == Left::Whole {
                break;
            }
            if random.bool() {
                job.opens(self.place, folder, &left)?;
            }
        }
        job.goes_on(self.place, folder, &left)?;
        Ok(job.name.into())
    }
}
