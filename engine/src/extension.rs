//! Ops and passes from other crates: once registered, they are checked, timed, compiled and switched like the engine's own.

use crate::error::Error;
use crate::op::Entry;
use crate::ops::OPS;
use crate::passes::{PASSES, Pass, Stage, all};
use std::sync::{PoisonError, RwLock};

/// The ops and passes that a crate adds.
pub struct Extension {
    /// Its ops, with the test cases that check and time them.
    pub ops: &'static [Entry],
    /// Its passes. Each runs before the engine's passes of the same stage, but after those it names in [`Pass::after`].
    pub passes: &'static [&'static dyn Pass],
}

static REGISTERED: RwLock<Vec<&'static Extension>> = RwLock::new(vec![]);

/// Adds ops and passes to the engine's own, for the whole process. Call it before the first program is compiled or the first switch is
/// set. Registering the same extension again changes nothing; another op or pass of a known name is an error.
pub fn register(extension: &'static Extension) -> Result<(), Error> {
    let names = |e: &Extension| -> Vec<&'static str> { e.ops.iter().map(|o| o.name).chain(e.passes.iter().map(|p| p.name())).collect() };
    let own = names(extension);
    let stages: Vec<(&str, Stage)> = passes().iter().chain(extension.passes).map(|p| (p.name(), p.stage())).collect();
    let mut known: Vec<&str> = OPS.iter().map(|o| o.name).chain(all().map(|p| p.name())).collect();
    let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
    if registered.iter().any(|e| std::ptr::eq(*e, extension)) {
        return Ok(());
    }
    known.extend(registered.iter().flat_map(|e| e.ops).map(|o| o.name));
    if let Some(twice) = own.iter().enumerate().find(|(i, name)| known.contains(name) || own[..*i].contains(name)) {
        return Err(Error::Twice(twice.1.to_string()));
    }
    for (pass, after) in extension.passes.iter().flat_map(|p| p.after().iter().map(move |after| (p, after))) {
        let behind =
            |hint: &str| Error::NoPass { name: after.to_string(), hint: format!(", {hint}: '{}' is to run behind it", pass.name()) };
        match stages.iter().find(|s| s.0 == *after) {
            None => return Err(behind("and there must be")),
            Some((_, stage)) if *stage > pass.stage() => return Err(behind("that runs in the same stage or earlier")),
            Some(_) => {}
        }
    }
    registered.push(extension);
    Ok(())
}

/// All ops: the engine's, then registered ones.
pub fn ops() -> Vec<&'static Entry> {
    let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
    OPS.iter().chain(registered.iter().flat_map(|e| e.ops)).collect()
}

/// All passes in execution order, registered ones included.
pub fn passes() -> Vec<&'static dyn Pass> {
    let mut passes = PASSES.to_vec();
    for &pass in REGISTERED.read().unwrap_or_else(PoisonError::into_inner).iter().flat_map(|e| e.passes) {
        let first = passes.iter().position(|p| p.stage() >= pass.stage()).unwrap_or(passes.len());
        let behind = pass.after().iter().filter_map(|name| passes.iter().position(|p| p.name() == *name)).max();
        passes.insert(first.max(behind.map_or(0, |at| at + 1)), pass);
    }
    passes
}
