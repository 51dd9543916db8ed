//! What ends a run early. The step is finished and saved, and the exit status is 128 + the signal's number, as a shell has it for a process that a
//! signal ended: `kiln train && kiln export` and Slurm see that the run is not whole.

use crate::guarded::{self, leave};
use anyhow::Result;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// Those that come together are one: some programs signal a process and then its group.
const ONE: Duration = Duration::from_secs(1);

/// The first signal, once there was one.
#[derive(Clone, Default)]
pub struct Signal(Arc<AtomicI32>);

impl Signal {
    /// The first signal sets `stop`, and ends the process where there is nothing to save yet (`preparing`); another one ends it at once.
    pub fn catch(stop: &Arc<AtomicBool>, preparing: &Arc<AtomicBool>) -> Result<Signal> {
        let mut signals = Signals::new(caught())?;
        let (signal, stop, preparing) = (Signal::default(), stop.clone(), preparing.clone());
        let kept = signal.clone();
        std::thread::spawn(move || {
            let mut first: Option<Instant> = None;
            for number in signals.forever() {
                let _ = signal.0.compare_exchange(0, number, Ordering::SeqCst, Ordering::SeqCst);
                stop.store(true, Ordering::SeqCst);
                guarded::asked_to_end(128 + number);
                if preparing.load(Ordering::SeqCst) {
                    signal.end_before_the_first_step();
                }
                if first.get_or_insert_with(Instant::now).elapsed() > ONE {
                    leave(128 + number);
                }
            }
        });
        Ok(kept)
    }

    pub fn status(&self) -> i32 {
        128 + self.0.load(Ordering::SeqCst)
    }

    pub fn code(&self) -> ExitCode {
        ExitCode::from(self.status() as u8)
    }

    pub fn end_before_the_first_step(&self) -> ! {
        // Below the bar of what is being made, where there is one.
        let bar = if std::io::stderr().is_terminal() { "\n" } else { "" };
        crate::warn!("{bar}stopped before the first step: nothing is lost");
        leave(self.status());
    }
}

/// The signals that end a run.
pub fn caught() -> Vec<i32> {
    [SIGINT, SIGTERM, SIGHUP, SIGUSR1].into_iter().filter(|&s| s != SIGHUP || !is_ignored(s)).collect()
}

/// Whether this process was started with a signal ignored, as nohup does with SIGHUP: that is to stay.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).and_then(|m| u64::from_str_radix(m.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
