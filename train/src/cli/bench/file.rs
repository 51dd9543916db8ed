//! What `kiln bench --json` writes, and what is read of it again: by `--baseline`, for pages and for pictures.

use super::side::{Differences, Numbers};
use super::stats::{Interval, Verdict};
use crate::report::{human_bytes, human_time};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// Of the file. A file of another format is refused.
pub const FORMAT: u32 = 2;

/// A recipe's step as it was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    pub format: u32,
    pub recipe: String,
    pub preset: String,
    pub config: Value,
    pub device: String,
    pub versions: Versions,
    pub date: String,
    pub command: String,
    /// What a step is called, its unit of work, and how much of it a step has.
    pub step: String,
    pub unit: String,
    pub work: f64,
    /// The median, with its interval where there are enough times.
    pub ms: f64,
    pub interval: Option<Interval>,
    pub per_s: f64,
    /// Milliseconds of a step, the mean of each period; in a ledger, of every block of the baseline.
    pub times: Vec<f64>,
    /// Steps that each of these is the mean of.
    pub repeat: usize,
    /// Steps after which what a step does repeats.
    #[serde(default = "one")]
    pub period: usize,
    pub peak_bytes: u64,
    pub setup_s: f64,
    pub memory_budget: Option<u64>,
    pub chosen: Option<Vec<String>>,
    pub estimated_more_time: Option<f64>,
    /// What the step computes from the states of the seed; where it was asked for.
    pub numbers: Option<Numbers>,
    pub receipts: Value,
    /// One line a pass, where there is a ledger.
    pub ledger: Vec<Line>,
    pub turns: Option<Turns>,
    /// What peers/compare.py found of the same step.
    pub peers: Option<Value>,
    /// Measured memory: `measured_bytes`, `resident_bytes` and more.
    #[serde(flatten)]
    pub memory: serde_json::Map<String, Value>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Versions {
    pub kiln: String,
    /// That the program was built from, if that is known.
    pub commit: Option<String>,
    /// Of the driver and CUDA's libraries.
    pub cuda: Option<String>,
}

/// How a ledger's times were taken.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Turns {
    /// The fewest rounds that a line has.
    pub rounds: usize,
    /// Steps of a block.
    pub steps: usize,
    /// How many groups of variants were held in memory, one after the other.
    pub groups: usize,
    /// How often the baseline was loaded.
    pub copies: usize,
    pub seconds: f64,
    /// How far a gain may be off because every variant is loaded once, as a logarithm, by how the copies differ: it is in all intervals. Files from before
    /// it was measured have none.
    #[serde(default)]
    pub loads: f64,
}

fn one() -> usize {
    1
}

/// What became of a pass in a ledger.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Found {
    /// Timed with it and without it.
    Measured,
    /// It has no site here.
    Nothing,
    /// It is off.
    Off,
    /// The step does not run when it is switched.
    Failed,
}

/// A pass in a ledger. What depends on the pass is said with it (`ms`, `peak`) and without it (`ms_off`, `peak_off`).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Line {
    pub pass: String,
    pub found: Found,
    /// It is off, and was switched on for this line; else it is on, and was switched off.
    pub switched_on: bool,
    pub sites: usize,
    /// Why the step does not run.
    pub reason: Option<String>,
    /// Of a step's speed by the pass: 0.05 is 5%.
    pub gain: Option<Interval>,
    pub verdict: Option<Verdict>,
    pub ms: Option<f64>,
    pub ms_off: Option<f64>,
    /// Planned bytes.
    pub peak: Option<u64>,
    pub peak_off: Option<u64>,
    /// Bytes that kiln allocated on the device.
    pub allocated: Option<u64>,
    pub allocated_off: Option<u64>,
    pub differ: Option<Differences>,
    pub numbers: Option<Numbers>,
    /// Milliseconds of the switched step, by round, how many times the baseline's around it that is, and how many steps were timed.
    pub times: Vec<f64>,
    pub ratios: Vec<f64>,
    #[serde(default)]
    pub steps: Vec<usize>,
}

impl Line {
    pub fn new(pass: &str, found: Found, switched_on: bool) -> Line {
        Line {
            pass: pass.into(),
            found,
            switched_on,
            sites: 0,
            reason: None,
            gain: None,
            verdict: None,
            ms: None,
            ms_off: None,
            peak: None,
            peak_off: None,
            allocated: None,
            allocated_off: None,
            differ: None,
            numbers: None,
            times: vec![],
            ratios: vec![],
            steps: vec![],
        }
    }

    /// `bf16, switched on`
    pub fn name(&self) -> String {
        if self.switched_on { format!("{}, switched on", self.pass) } else { self.pass.clone() }
    }

    /// Bytes that the step needs more with the pass than without it, planned or measured: of one that saves memory less than 0.
    pub fn more(on: Option<u64>, off: Option<u64>) -> Option<i64> {
        Some(on? as i64 - off? as i64)
    }

    /// What it gains, in words.
    pub fn gains(&self) -> String {
        match (self.found, &self.gain, self.verdict) {
            (Found::Nothing, ..) => "does nothing here".into(),
            (Found::Off, ..) => format!("off (--also {})", self.pass),
            (Found::Failed, ..) => "does not run".into(),
            (Found::Measured, Some(g), Some(Verdict::WithinNoise)) => format!("within noise ({})", range(g)),
            (Found::Measured, Some(g), _) => format!("{:+.1}% ({})", 100.0 * g.median, range(g)),
            (Found::Measured, None, _) => "-".into(),
        }
    }
}

/// `-1.44 MiB`
pub fn signed(bytes: i64) -> String {
    let sign = match bytes {
        0 => "",
        b if b > 0 => "+",
        _ => "-",
    };
    format!("{sign}{}", human_bytes(bytes.unsigned_abs()))
}

/// Of a ledger the lines that say something, and what there is to say of the others.
pub fn worth_a_line(ledger: &[Line]) -> (Vec<&Line>, Vec<String>) {
    let (shown, silent): (Vec<&Line>, Vec<&Line>) = ledger.iter().partition(|l| matches!(l.found, Found::Measured | Found::Failed));
    let rest = |found, one: &str, many: &str| {
        let names: Vec<String> = silent.iter().filter(|l| l.found == found).map(|l| l.name()).collect();
        let does = if names.len() == 1 { one } else { many };
        (!names.is_empty()).then(|| format!("{}{} {does}: {}", names.len(), if shown.is_empty() { "" } else { " more" }, names.join(", ")))
    };
    let nothing = rest(Found::Nothing, "does nothing here", "do nothing here");
    let off = rest(Found::Off, "is off (--also NAME times it)", "are off (--also NAME times one)");
    (shown, nothing.into_iter().chain(off).collect())
}

/// `-0.1 to +0.3`, in percent.
pub fn range(i: &Interval) -> String {
    format!("{:+.1} to {:+.1}", 100.0 * i.low, 100.0 * i.high)
}

/// A relative difference: `0`, `1.2e-7`, and what is none.
pub fn error(e: Option<f64>) -> String {
    match e {
        Some(0.0) => "0".into(),
        Some(e) => format!("{e:.1e}"),
        None => "not finite".into(),
    }
}

impl Measured {
    /// Reads a file back. One of another format, or of something else, is refused.
    pub fn read(path: &Path) -> Result<Measured> {
        let text = crate::input::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let shown = path.display();
        let value: Value = serde_json::from_str(&text).with_context(|| format!("{shown} is not JSON"))?;
        match value.get("format").and_then(Value::as_u64) {
            Some(format) if format == FORMAT as u64 => {}
            Some(format) => {
                bail!("{shown} has format {format}, and this kiln reads {FORMAT}: measure it again with this kiln (--json FILE)")
            }
            None if value.get("ms").is_some() => {
                bail!("{shown} was written by a kiln from before its files had a format: measure it again with this kiln (--json FILE)")
            }
            None => bail!("{shown} is not what `kiln bench RECIPE --json FILE` writes"),
        }
        let m: Measured =
            serde_json::from_value(value).with_context(|| format!("{shown} is not what `kiln bench RECIPE --json FILE` writes"))?;
        let intervals = m.ledger.iter().map(|l| (l.pass.as_str(), l.gain)).chain([("interval", m.interval)]);
        if let Some((what, Some(i))) = intervals.into_iter().find(|(_, i)| i.is_some_and(|i| !i.is_sound())) {
            bail!("{shown} is damaged: {what} has a median of {} between {} and {}", i.median, i.low, i.high);
        }
        Ok(m)
    }

    /// `RECIPE PRESET on cpu, 2 threads`
    pub fn title(&self) -> String {
        format!("{} {} on {}", self.recipe, self.preset, self.device)
    }

    /// Where steps differ, that they are timed together.
    pub fn whole_periods(&self) -> String {
        if self.period == 1 { String::new() } else { format!(" (whole periods of {} steps, which differ)", self.period) }
    }

    /// How the ledger's times were taken, in words.
    pub fn conditions(&self) -> Vec<String> {
        let Some(t) = &self.turns else { return vec![] };
        let held = match t.groups {
            1 => "all variants held in memory at once".to_string(),
            n => format!("variants held in memory in {n} groups, one after the other, because they do not fit at once"),
        };
        let steps = if t.steps == 1 { "1 step".to_string() } else { format!("{} steps", t.steps) };
        let whole = self.whole_periods();
        let took = human_time(std::time::Duration::from_secs_f64(t.seconds));
        vec![
            format!(
                "{} rounds in {took}, each: {steps}{whole} of {} copies of the baseline and as long of every variant, in changing order; {held}",
                t.rounds, t.copies
            ),
            format!(
                "copies of the baseline differ so much that a gain may be off by {:.1}% because a variant is loaded once; 99% intervals include that, and a gain whose interval has zero in it is within noise",
                100.0 * t.loads.exp_m1()
            ),
        ]
    }
}
