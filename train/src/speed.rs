//! How fast steps go: the time of whole steps alone, without evaluation and saving.

use std::time::{Duration, Instant};

/// Adds up steps and their time from one record to the next.
pub struct Speed {
    /// As many steps are known to be done, and since when.
    done: u64,
    since: Instant,
    /// Not recorded yet.
    steps: u64,
    spent: Duration,
}

impl Speed {
    pub fn new(done: u64, now: Instant) -> Speed {
        Speed { done, since: now, steps: 0, spent: Duration::ZERO }
    }

    /// The report of step `at` was there at this moment. On a GPU later steps may have been started by then.
    pub fn reached(&mut self, at: u64, when: Instant) {
        self.steps += at - self.done;
        self.spent += when.saturating_duration_since(self.since);
        (self.done, self.since) = (at, when);
    }

    /// Steps a second since the last record.
    pub fn take(&mut self) -> f64 {
        let (steps, spent) = (std::mem::take(&mut self.steps), std::mem::take(&mut self.spent));
        steps as f64 / spent.as_secs_f64().max(1e-9)
    }

    /// After `step` other things may have been done; the next step begins now. Where it is not known to be done, it still runs, and the clock with it.
    pub fn go_on(&mut self, step: u64, now: Instant) {
        if self.done == step {
            self.since = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of 10 ms, and what is said of them.
    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn what_is_between_steps_is_not_timed() {
        let begin = Instant::now();
        let mut s = Speed::new(5, begin);
        s.reached(7, begin + ms(20));
        assert_eq!(s.take(), 100.0);
        s.go_on(7, begin + ms(500)); // an evaluation
        s.reached(8, begin + ms(510)); // a save after step 8, which is not recorded
        s.go_on(8, begin + ms(900));
        s.reached(10, begin + ms(920));
        assert_eq!(s.take(), 100.0);
    }

    #[test]
    fn a_step_that_still_runs_keeps_the_clock_running() {
        let begin = Instant::now();
        let mut s = Speed::new(0, begin);
        // Steps are started 1 ms apart, and done 10 ms apart.
        s.go_on(1, begin + ms(1));
        s.go_on(2, begin + ms(2));
        s.reached(2, begin + ms(20));
        assert_eq!(s.take(), 100.0);
        s.go_on(3, begin + ms(21));
        s.reached(4, begin + ms(40));
        assert_eq!(s.take(), 100.0);
    }
}
