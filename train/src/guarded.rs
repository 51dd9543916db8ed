//! Libraries that panic at some files. What they say then is nothing for users, and it may quote the file: it is dropped, and the caller says what it was at.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// What it returns; None where it panics.
pub fn guarded<T>(work: impl FnOnce() -> T) -> Option<T> {
    let before = GUARDED.replace(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(before);
    done.ok()
}

/// From here on, a panic that is guarded prints nothing, and any other is shown as lines of files are.
pub fn hide_panics() {
    std::panic::set_hook(Box::new(|panic| {
        if !GUARDED.get() {
            show(panic);
        }
    }));
}

fn show(panic: &PanicHookInfo) {
    let thread = std::thread::current();
    crate::warn!("\nthread '{}' {panic}", thread.name().unwrap_or("<unnamed>"));
    let trace = std::backtrace::Backtrace::capture();
    match trace.status() {
        std::backtrace::BacktraceStatus::Captured => crate::warn!("{trace}"),
        _ => crate::warn!("note: RUST_BACKTRACE=1 shows where it came from"),
    }
}

/// Work that nobody can interrupt, and until when it may go on.
struct Going {
    until: Instant,
    since: Instant,
    late: String,
}

static GOING: Mutex<BTreeMap<u64, Going>> = Mutex::new(BTreeMap::new());
/// The exit status that a signal asked for; 0 before there was one.
static ASKED: AtomicI32 = AtomicI32::new(0);

/// Between two looks at the clock.
const LOOK: Duration = Duration::from_millis(200);
/// How long such work goes on after a signal.
const AFTER_A_SIGNAL: Duration = Duration::from_secs(3);

/// What the work returns. Where it is not done in time the process ends with an error, since a library cannot be told to stop; and soon after a signal.
pub fn in_time<T>(allowed: Duration, late: impl FnOnce() -> String, work: impl FnOnce() -> T) -> T {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    static WATCHES: Once = Once::new();
    // Without a thread nobody looks at the clock.
    WATCHES.call_once(|| drop(std::thread::Builder::new().name("clock".into()).stack_size(64 << 10).spawn(watch)));
    let (number, now) = (NUMBER.fetch_add(1, Ordering::Relaxed), Instant::now());
    going().insert(number, Going { until: now + allowed, since: now, late: late() });
    let done = work();
    going().remove(&number);
    done
}

fn going() -> MutexGuard<'static, BTreeMap<u64, Going>> {
    GOING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn watch() {
    loop {
        std::thread::sleep(LOOK);
        let now = Instant::now();
        let status = ASKED.load(Ordering::SeqCst);
        for one in going().values() {
            if status != 0 && now > one.since + AFTER_A_SIGNAL {
                leave(status);
            }
            if engine::mutant!("uninterruptible-work-has-any-time", now > one.until, false) {
                crate::warn!("error: {}", one.late);
                leave(1);
            }
        }
    }
}

/// A signal has asked the process to end with this status.
pub fn asked_to_end(status: i32) {
    ASKED.store(status, Ordering::SeqCst);
}

/// Ends the process at once.
pub fn leave(status: i32) -> ! {
    crate::gpu::remove_own_cache();
    std::process::exit(status);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_none_and_nothing_else_is() {
        assert_eq!(guarded(|| 3), Some(3));
        assert_eq!(guarded(|| guarded(|| -> u8 { panic!("inner") })), Some(None));
        assert_eq!(guarded(|| -> u8 { panic!("outer") }), None);
        assert!(!GUARDED.get());
    }
}
