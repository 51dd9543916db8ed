//! Points in a device's work, for timing it without waiting for it.

use super::transfer::Event;
use super::{Cuda, failed};
use crate::error::Error;
use std::time::{Duration, Instant};

/// A point in a device's work. A GPU reaches it when everything that was launched before it is done, by the GPU's own clock; the CPU has reached it at once.
pub struct Moment(At);

enum At {
    Host(Instant),
    Gpu(Cuda, Event),
}

impl Moment {
    /// After everything that was launched so far.
    pub fn now(gpu: Option<&Cuda>) -> Result<Moment, Error> {
        let Some(cuda) = gpu else { return Ok(Moment(At::Host(Instant::now()))) };
        cuda.current();
        let event = Event::timed()?;
        event.record(cuda.0.stream)?;
        Ok(Moment(At::Gpu(cuda.clone(), event)))
    }

    /// Whether it was reached.
    pub fn is_past(&self) -> bool {
        match &self.0 {
            At::Host(_) => true,
            At::Gpu(cuda, event) => {
                cuda.current();
                event.has_passed()
            }
        }
    }

    /// The time from an earlier moment of the same device to this one; waits until both are past.
    pub fn since(&self, earlier: &Moment) -> Result<Duration, Error> {
        match (&self.0, &earlier.0) {
            (At::Host(to), At::Host(from)) => Ok(to.saturating_duration_since(*from)),
            (At::Gpu(cuda, to), At::Gpu(_, from)) => {
                cuda.current();
                to.wait()?;
                from.wait()?;
                Ok(Duration::from_secs_f64(f64::from(to.milliseconds_since(from).map_err(failed("timing"))?.max(0.0)) / 1e3))
            }
            _ => Err(Error::Cuda("timing: the moments are of two devices".into())),
        }
    }
}
