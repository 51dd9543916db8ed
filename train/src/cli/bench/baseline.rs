//! `--baseline FILE`: the step against what a former `--json` says of it.

use super::file::{Found, Measured};
use super::side::{Numbers, relative};
use super::stats::{Interval, LEAST};
use crate::report::human_bytes;
use anyhow::{Result, bail};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// What is too much.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bounds {
    /// 0.05: a step may take 5% longer.
    pub slower: Option<f64>,
    /// Relative difference of the loss after the same steps from the same seed.
    pub above: Option<f64>,
}

/// For clap: `5%`.
pub fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').and_then(|n| n.trim().parse::<f64>().ok()).filter(|n| (0.0..=1000.0).contains(n));
    number.map(|n| n / 100.0).ok_or_else(|| format!("'{text}' is not a percentage from 0% to 1000%, such as 5%"))
}

/// For clap: `1e-4`.
pub fn error(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|n| (0.0..=1.0).contains(n));
    number.ok_or_else(|| format!("'{text}' is not a relative difference from 0 to 1, such as 1e-4"))
}

/// What a comparison found: lines to read, and what is beyond a bound.
#[derive(Debug, Default)]
pub struct Compared {
    pub said: Vec<String>,
    /// What a bound cannot see.
    pub warned: Vec<String>,
    pub failed: Vec<String>,
}

/// Refuses a file of another step or machine, before anything is measured. Returns what is worth a warning.
pub fn comparable(now: &Measured, then: &Measured, bounds: Bounds, path: &Path) -> Result<Vec<String>> {
    let shown = path.display();
    // Files of earlier versions have it in the plural.
    let device = if then.device == "cpu, 1 threads" { "cpu, 1 thread" } else { &then.device };
    for (what, here, there) in
        [("recipe", &*now.recipe, &*then.recipe), ("preset", &now.preset, &then.preset), ("device", &now.device, device)]
    {
        if here != there {
            bail!("{shown} is of another {what}: '{there}' there, '{here}' here; measure a baseline of this one (--json FILE)");
        }
    }
    let (ours, theirs) = (flat(&now.config), flat(&then.config));
    let differ =
        |(key, value): (&String, &String)| theirs.get(key).filter(|v| *v != value).map(|v| format!("{key} = {value} here, {v} there"));
    let different: Vec<String> = ours.iter().filter_map(differ).collect();
    if !different.is_empty() {
        bail!("{shown} is of another config: {}; measure a baseline of this one (--json FILE)", different.join("; "));
    }
    let one_sided = |a: &BTreeMap<String, String>, b: &BTreeMap<String, String>| -> Vec<String> {
        a.iter().filter(|(key, _)| !b.contains_key(*key)).map(|(key, value)| format!("{key} = {value}")).collect()
    };
    let (here, there) = (one_sided(&ours, &theirs), one_sided(&theirs, &ours));
    let passes = |keys: &[String]| keys.iter().find(|k| k.starts_with("passes.")).cloned();
    if let Some(pass) = passes(&here).or(passes(&there)) {
        bail!("{shown} is of another config: {pass} on one side only; measure a baseline of this one (--json FILE)");
    }
    if bounds.above.is_some() && then.numbers.is_none() {
        bail!("{shown} has no loss, which --fail-above compares: measure it again with this kiln (--json FILE)");
    }
    let mut warnings = vec![];
    if !here.is_empty() || !there.is_empty() {
        let keys = here.into_iter().chain(there).collect::<Vec<_>>().join(", ");
        warnings.push(format!(
            "warning: {shown} and this config do not have the same keys ({keys}): one was written by another version of kiln"
        ));
    }
    if now.versions.cuda != then.versions.cuda {
        let said = |v: &Option<String>| v.clone().unwrap_or("none".into());
        warnings.push(format!(
            "warning: {shown} was measured with other libraries: {}; here {}",
            said(&then.versions.cuda),
            said(&now.versions.cuda)
        ));
    }
    if then.interval.is_none() {
        bail!(
            "{shown} has {} timed steps, which say nothing about their noise: measure it again with --repeat {LEAST} or more",
            then.times.len()
        );
    }
    Ok(warnings)
}

/// Paths of all values that are no tables, as text.
fn flat(value: &Value) -> BTreeMap<String, String> {
    fn add(path: &str, value: &Value, to: &mut BTreeMap<String, String>) {
        match value {
            Value::Object(fields) => {
                for (key, value) in fields {
                    add(&if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, value, to);
                }
            }
            value => drop(to.insert(path.into(), value.to_string())),
        }
    }
    let mut all = BTreeMap::new();
    add("", value, &mut all);
    all
}

/// Compares what was measured now with a file that is comparable.
pub fn compared(now: &Measured, then: &Measured, bounds: Bounds) -> Compared {
    let mut c = Compared::default();
    let from = then.versions.commit.as_ref().map_or(String::new(), |commit| format!(", commit {}", &commit[..commit.len().min(12)]));
    c.said.push(format!("against the baseline of {} (kiln {}{from}):", then.date, then.versions.kiln));
    if let (Some(a), Some(b)) = (now.interval, then.interval) {
        c.time(&now.step, &a, &b, bounds.slower);
    }
    if now.peak_bytes != then.peak_bytes {
        c.said.push(format!("planned peak {}, {} there", human_bytes(now.peak_bytes), human_bytes(then.peak_bytes)));
    }
    c.numbers("the step", now.numbers.as_ref(), then.numbers.as_ref(), bounds.above);
    // What only one of two ledgers was asked for (--only, --also) is in no comparison.
    for (line, before) in now.ledger.iter().filter_map(|l| Some((l, then.ledger.iter().find(|b| b.pass == l.pass)?))) {
        match [line.found, before.found] {
            [Found::Measured, Found::Measured] if line.switched_on == before.switched_on => {}
            [a, b] if a == b || a == Found::Off || b == Found::Off => continue,
            _ => {
                c.cannot(format!("{}: {} here, {} there", line.pass, line.gains(), before.gains()), bounds.above);
                continue;
            }
        }
        let which = format!("the step with {} {}", line.pass, if line.switched_on { "on" } else { "off" });
        c.numbers(&which, line.numbers.as_ref(), before.numbers.as_ref(), bounds.above);
        if let (Some(a), Some(b)) = (line.gain, before.gain)
            && (a.low > b.high || b.low > a.high)
        {
            c.said.push(format!(
                "{} gains {:+.1}%, {:+.1}% there: their intervals do not overlap",
                line.pass,
                100.0 * a.median,
                100.0 * b.median
            ));
        }
    }
    c
}

impl Compared {
    /// What keeps numbers from being compared fails where they have a bound.
    fn cannot(&mut self, why: String, above: Option<f64>) {
        match above {
            Some(_) => self.failed.push(format!("not comparable: {why} (--fail-above)")),
            None => self.said.push(why),
        }
    }

    /// A step is slower beyond the noise where the intervals of the medians do not overlap. Where noise hides whether the bound is kept, it is not kept.
    fn time(&mut self, step: &str, now: &Interval, then: &Interval, bound: Option<f64>) {
        let more = now.median / then.median - 1.0;
        let ms = |i: &Interval| format!("{:.2} ms ({:.2} to {:.2})", i.median, i.low, i.high);
        let noise = if now.low <= then.high && then.low <= now.high { ", within noise" } else { "" };
        let said = format!("a {step} takes {}, {} there: {:+.1}%{noise}", ms(now), ms(then), 100.0 * more);
        // Of each interval the longer side, as a share of its median.
        let reach = [now, then].map(|i| (i.high / i.median).max(i.median / i.low) - 1.0).into_iter().fold(0.0, f64::max);
        if let Some(bound) = bound {
            let percent = 100.0 * bound;
            let unsure = format!(
                "cannot tell {percent}% here, because the intervals reach {:.1}%: raise --repeat, here or of the baseline",
                100.0 * reach
            );
            match (more > bound, noise.is_empty()) {
                (true, true) => self.failed.push(format!("slower: {said}, more than {percent}% (--fail-slower)")),
                (true, false) => self.failed.push(format!("slower: {said}; {unsure} (--fail-slower)")),
                (false, _) if reach > bound => self.warned.push(unsure),
                (false, _) => {}
            }
        }
        self.said.push(said);
    }

    fn numbers(&mut self, which: &str, now: Option<&Numbers>, then: Option<&Numbers>, bound: Option<f64>) {
        let (now, then) = match (now, then) {
            (Some(now), Some(then)) if now.metric == then.metric => (now, then),
            (Some(now), Some(then)) => return self.cannot(format!("{which} reports {} here, {} there", now.metric, then.metric), bound),
            (None, None) => return,
            _ => return self.cannot(format!("{which} has a loss on one side only"), bound),
        };
        for (steps, a, b) in [(1, now.first, then.first), (now.steps, now.last, then.last)] {
            let by = a.zip(b).and_then(|(a, b)| relative((a - b).abs(), b.abs()));
            // Where both are no numbers, nothing has moved.
            let by = if a.is_none() && b.is_none() { Some(0.0) } else { by };
            let shown = |v: Option<f64>| v.map_or("not finite".into(), |v| format!("{v:.7}"));
            let steps = if steps == 1 { "1 step".to_string() } else { format!("{steps} steps") };
            let said = format!("{which}: {} after {steps} {}, {} there: {} apart", now.metric, shown(a), shown(b), super::file::error(by));
            if let Some(bound) = bound.filter(|bound| by.is_none_or(|by| by > *bound)) {
                self.failed.push(format!("moved: {said}, more than {bound:e} (--fail-above)"));
            }
            if by != Some(0.0) {
                self.said.push(said);
            }
        }
    }
}
