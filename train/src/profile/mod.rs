//! Where a step's time goes: what `kiln profile` measures and writes.
//!
//! | file | is |
//! |---|---|
//! | `mod.rs` | the steps that are measured |
//! | `digest.rs` | the numbers: by node, op and layer, gaps, distance to the roofline |
//! | `roof.rs` | what the device can do at most |
//! | `trace.rs` | the trace for Perfetto and Chrome |
//! | `show.rs` | the digest for the terminal, as Markdown and as a page |
//! | `nsight.rs` | a window of steps under Nsight |

mod digest;
pub mod nsight;
mod roof;
mod show;
mod trace;

pub use digest::{Digest, Gap, Row};
pub use roof::Roof;
pub use show::{markdown, page, short};
pub use trace::trace;

use crate::recipe::{Session, TrainError};
use engine::profile::{Profile, Profiler, Span};
use std::time::Instant;

/// What is measured, and how.
pub struct Plan {
    /// Steps that are profiled, and as many before and after them that are only timed.
    pub steps: u64,
    /// Steps before all of these.
    pub warmup: u64,
    /// Whether CUPTI may be used on a GPU.
    pub cupti: bool,
}

/// What was measured.
pub struct Measured {
    pub profile: Profile,
    pub steps: u64,
    /// Milliseconds of a step that is not profiled: the mean of those before, and of those after.
    pub plain_ms: [f64; 2],
    /// Nanoseconds of all profiled steps, until the device had finished.
    pub window: u64,
}

/// Runs steps: some to warm up, some that are timed as a whole, some that are profiled, and some that are timed again.
pub fn measure(
    s: &mut Session,
    plan: &Plan,
    mut step: impl FnMut(&mut Session, u64) -> Result<(), TrainError>,
) -> Result<Measured, TrainError> {
    let device = s.device.clone();
    let mut done = 0;
    let mut run = |s: &mut Session, steps: u64| -> Result<f64, TrainError> {
        let start = Instant::now();
        for _ in 0..steps {
            s.span("step", |s| step(s, done))?;
            done += 1;
        }
        s.span("wait for the device", |s| s.device.synchronize())?;
        Ok(start.elapsed().as_secs_f64() * 1e3 / steps.max(1) as f64)
    };
    // Steps that a pass runs without itself at first are none of its steps.
    run(s, plan.warmup + s.programs.values().map(|p| p.warm_up()).max().unwrap_or(0))?;
    let before = run(s, plan.steps)?;
    s.profiler = Some(Profiler::start(&device, &crate::gpu::folders(), plan.cupti)?);
    if device.target() != engine::passes::Target::Cpu {
        run(s, 1)?; // CUDA graphs are captured again
    }
    let now = |s: &Session| s.profiler.as_ref().map_or(0, Profiler::now);
    let start = now(s);
    run(s, plan.steps)?;
    let window = now(s) - start;
    let mut profile = s.profiler.take().expect("begun above").finish(&device)?;
    since(&mut profile, start);
    let after = run(s, plan.steps)?;
    Ok(Measured { profile, steps: plan.steps, plain_ms: [before, after], window })
}

/// Leaves out what began before, and counts from there.
fn since(profile: &mut Profile, start: u64) {
    profile.spans.retain(|s| s.launched >= start);
    for Span { start: a, end, launched, .. } in &mut profile.spans {
        [a, end, launched].into_iter().for_each(|t| *t -= start);
    }
}
