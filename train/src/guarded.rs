//! Libraries that panic at some files. What they say then is nothing for users, and it may quote the file: it is dropped, and the caller says what it was at.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};

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
