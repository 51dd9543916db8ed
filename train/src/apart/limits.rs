//! What a process that works for another one may take. The system keeps it, so nothing that a file holds gets around it.

use std::io::Read;

use engine::mutant;
use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit};
use rustix::time::{ClockId, clock_gettime};

/// Neither a memory image on disk nor a program that waits for one.
pub fn leave_nothing() {
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
}

pub struct Limits {
    /// Bytes of address space that there were before there was any file.
    before: u64,
    /// What is allowed now: the second of processor time that is the last one, and bytes of memory.
    until: u64,
    memory: u64,
}

impl Limits {
    pub fn new() -> Limits {
        let mut text = String::new();
        let _ = std::fs::File::open("/proc/self/statm").and_then(|mut file| file.read_to_string(&mut text));
        let pages: Option<u64> = text.split(' ').next().and_then(|pages| pages.parse().ok());
        let before = pages.map_or(super::STACK + (1 << 30), |pages| pages * rustix::param::page_size() as u64);
        Limits { before, until: 0, memory: 0 }
    }

    /// From here on, so many seconds of processor time and bytes of memory.
    pub fn allow(&mut self, seconds: u64, memory: u64) {
        let until = clock_gettime(ClockId::ProcessCPUTime).tv_sec as u64 + seconds;
        if until != self.until {
            limit(Resource::Cpu, mutant!("files-take-any-time", until, 1 << 40));
            self.until = until;
        }
        if memory != self.memory {
            limit(Resource::As, mutant!("files-take-any-memory", self.before + memory, 1 << 50));
            self.memory = memory;
        }
    }
}

/// Sets a limit, which cannot be above what others have set.
fn limit(what: Resource, most: u64) {
    let maximum = getrlimit(what).maximum;
    let current = Some(maximum.map_or(most, |maximum| most.min(maximum)));
    let _ = setrlimit(what, Rlimit { current, maximum });
}
