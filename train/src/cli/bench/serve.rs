//! `kiln bench --serve`: what is timed stays loaded, and is timed whenever a line on stdin asks for it, so that programs can take turns on one card.
//! Every answer is a line of JSON.

use super::{join, stats};
use crate::memory::Measured;
use anyhow::{Result, bail};
use engine::Device;
use serde_json::{Value, json};
use std::io::BufRead;
use std::process::ExitCode;
use std::time::Duration;

/// No turn is longer.
const MOST: f64 = 3600.0;

/// What is served: how much work a step is, and what it is counted in.
pub struct Served<'a> {
    pub device: &'a Device,
    pub work: f64,
    pub unit: &'a str,
    /// What is said once, as soon as it is loaded.
    pub ready: Value,
}

impl Served<'_> {
    /// Answers every `time SECONDS` with the median over so long; `times` gives milliseconds of steps. Ends with the input.
    pub fn serve(self, mut times: impl FnMut(Duration) -> Result<Vec<f64>>) -> Result<ExitCode> {
        out!("{}", self.ready);
        for line in std::io::stdin().lock().lines() {
            let found = times(asked(&line?)?)?;
            let mut answer = self.answer(&found);
            join(&mut answer, Measured::of(self.device).json());
            out!("{answer}");
        }
        Ok(ExitCode::SUCCESS)
    }

    fn answer(&self, times: &[f64]) -> Value {
        let ms = stats::median(times);
        json!({ "ms": ms, "per_s": self.work / ms * 1e3, "unit": self.unit, "times": times.len() })
    }
}

/// `time 5`: five seconds.
fn asked(line: &str) -> Result<Duration> {
    match line.strip_prefix("time ").and_then(|seconds| seconds.trim().parse::<f64>().ok()).filter(|s| (0.0..=MOST).contains(s)) {
        Some(seconds) => Ok(Duration::from_secs_f64(seconds)),
        None => bail!("--serve: '{}' is not `time SECONDS`, of at most {MOST} seconds", line.trim()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_asks_for_seconds() {
        assert_eq!(asked("time 0.5").unwrap(), Duration::from_millis(500));
        for bad in ["", "time", "time x", "time -1", "time 1e9", "time NaN", "attention"] {
            assert!(asked(bad).unwrap_err().to_string().contains("`time SECONDS`"), "{bad}");
        }
    }
}
