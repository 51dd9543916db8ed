//! What runs instead of a program for its first runs, where a pass asks for a warm-up.

use crate::error::Error;
use crate::passes::WarmUp;
use crate::store::Store;

/// What runs instead of a program until a pass that needs a warm-up is ready.
pub struct Before<P> {
    /// The program without the pass.
    pub loaded: P,
    /// For how long, and what counts the runs.
    pub warm_up: WarmUp,
    /// Runs of the program so far; None before the first.
    done: Option<u64>,
    /// Whether the caller knows that it is over.
    told: bool,
}

impl<P> Before<P> {
    /// Before the first run.
    pub fn new(loaded: P, warm_up: WarmUp) -> Before<P> {
        Before { loaded, warm_up, done: None, told: false }
    }

    /// Counts a run. How many there were before the first, such as before a resume, is read from the counter that both programs keep.
    pub fn go_on(&mut self, store: &Store) -> Result<(), Error> {
        let done = match self.done {
            Some(done) => done,
            None => {
                let counter = store.get(&self.warm_up.counter).ok_or_else(|| Error::NoState(self.warm_up.counter.clone()))?;
                let done = counter.f32()?[0] as u64;
                self.told = done > self.warm_up.runs; // it was over before
                done
            }
        };
        self.done = Some(done + 1);
        Ok(())
    }

    /// Whether it runs now instead of the program.
    pub fn is_running(&self) -> bool {
        self.done.is_some_and(|done| done <= self.warm_up.runs)
    }

    /// The warm-up, if it has ended; once.
    pub fn ended(&mut self) -> Option<WarmUp> {
        let now = self.done.is_some_and(|done| done > self.warm_up.runs) && !self.told;
        self.told |= now;
        now.then(|| self.warm_up.clone())
    }
}
