//! Switches: what they are called, how they are set, and the receipt that each leaves.

use super::FORMERLY;
use crate::error::Error;
use crate::kernel::Arch;
use crate::meta::DType;
use crate::record::Recorder;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Cpu,
    Cuda(Arch),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Off,
    Auto,
    /// As Auto, but a site that is declined is an error.
    Require,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Mode::Off => "off",
            Mode::Auto => "auto",
            Mode::Require => "require",
        }
    }
}

/// What switching a pass may change in the numbers. Decides how its test compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numerics {
    /// Bit for bit the same.
    Exact,
    /// The same sums in another order, or a rounding less.
    Reordered,
    /// Rounded to a narrower type.
    LowPrecision,
}

/// A setting of a pass beside its mode: name, default, what it does.
pub struct Setting {
    pub name: &'static str,
    pub default: &'static str,
    pub about: &'static str,
}

/// Something that can be switched: a pass, or a setting of the executor.
pub trait Switch: Sync {
    fn name(&self) -> &'static str;
    fn about(&self) -> &'static str;
    fn numerics(&self, target: Target, dtype: DType) -> Numerics;
    /// A step on which it has something to do. Its states and feeds are filled by the harness.
    fn example(&self, r: &Recorder);

    fn default_mode(&self) -> Mode {
        Mode::Auto
    }

    fn settings(&self) -> &'static [Setting] {
        &[]
    }

    /// Switched on like this, it has something to do in its example.
    fn variants(&self) -> &'static [&'static str] {
        &["auto"]
    }

    /// Does something on a GPU only.
    fn needs_gpu(&self) -> bool {
        false
    }

    /// No program runs without it: it cannot be switched off.
    fn required(&self) -> bool {
        false
    }
}

/// The values of a pass's settings.
pub struct Settings<'a> {
    pub target: Target,
    switch: &'static dyn Switch,
    values: &'a BTreeMap<String, String>,
}

impl Settings<'_> {
    pub fn text(&self, name: &str) -> &str {
        let known = self.switch.settings().iter().find(|s| s.name == name).expect("a pass reads its own settings");
        self.values.get(name).map_or(known.default, |v| v)
    }

    pub fn number(&self, name: &str) -> Result<usize, Error> {
        self.from(name, 1)
    }

    /// A number that may be zero.
    pub fn number_or_none(&self, name: &str) -> Result<usize, Error> {
        self.from(name, 0)
    }

    fn from(&self, name: &str, least: usize) -> Result<usize, Error> {
        let text = self.text(name);
        let problem = || format!("{name}={text} is not a number from {least} on");
        let number = text.parse().ok().filter(|&n| n >= least);
        number.ok_or_else(|| Error::PassSetting { pass: self.switch.name().into(), problem: problem() })
    }

    /// Which of these words a setting is.
    pub fn one_of(&self, name: &str, words: &[&'static str]) -> Result<&'static str, Error> {
        let text = self.text(name);
        let problem = || format!("{name}={text} is none of {}", words.join(", "));
        words.iter().copied().find(|w| *w == text).ok_or_else(|| Error::PassSetting { pass: self.switch.name().into(), problem: problem() })
    }
}

/// What a pass did. Printed at start-up, kept with the run.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    pub pass: &'static str,
    pub mode: Mode,
    pub applied: usize,
    /// (reason, where).
    pub declined: Vec<(String, String)>,
    pub notes: Vec<String>,
}

impl Receipt {
    pub fn sites(&self) -> usize {
        self.applied + self.declined.len()
    }

    pub fn decline(&mut self, reason: impl Into<String>, site: &str) {
        self.declined.push((reason.into(), if site.is_empty() { "the top level".into() } else { site.into() }));
    }

    /// One line: `12 of 36; 24: K = 48 is not a multiple of 16 (blocks.0.router, ...)`.
    pub fn summary(&self) -> String {
        let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (reason, site) in &self.declined {
            reasons.entry(reason).or_default().push(site);
        }
        let mut parts: Vec<String> = self.notes.clone();
        for (reason, mut sites) in reasons {
            let count = sites.len();
            sites.dedup();
            let more = if sites.len() > 2 { ", ..." } else { "" };
            parts.push(format!("{count}: {reason} ({}{more})", sites[..sites.len().min(2)].join(", ")));
        }
        parts.join("; ")
    }
}

/// Modes and settings of all passes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Switches {
    chosen: BTreeMap<String, (Mode, BTreeMap<String, String>)>,
}

impl Switches {
    /// `value` is `off`, `auto` or `require`, then `,setting=value` any number of times. A name that a pass had before works, too:
    /// `formerly` has what to say about it.
    pub fn set(&mut self, pass: &str, value: &str) -> Result<(), Error> {
        let pass = match FORMERLY.iter().find(|f| f.0 == pass) {
            Some((_, Some(now))) => now,
            Some((_, None)) => return Ok(()),
            None => pass,
        };
        let found = super::all()
            .find(|p| p.name() == pass)
            .ok_or_else(|| Error::NoPass { name: pass.into(), hint: known(pass, super::all().map(|p| p.name())) })?;
        let wrong = |problem: String| Error::PassSetting { pass: pass.into(), problem };
        let mut parts = value.split(',').map(str::trim);
        let mode = match parts.next() {
            Some("off") if found.required() => return Err(wrong("cannot be switched off: no program runs without it".into())),
            Some("off") => Mode::Off,
            Some("auto") => Mode::Auto,
            Some("require") => Mode::Require,
            other => return Err(wrong(format!("'{}' is not off, auto or require", other.unwrap_or_default()))),
        };
        let mut values = BTreeMap::new();
        for part in parts {
            let (name, v) = part.split_once('=').ok_or_else(|| wrong(format!("'{part}' is not setting=value")))?;
            if !found.settings().iter().any(|s| s.name == name) {
                return Err(wrong(format!("has no setting '{name}'{}", known(name, found.settings().iter().map(|s| s.name)))));
            }
            values.insert(name.to_string(), v.to_string());
        }
        self.chosen.insert(pass.into(), (mode, values));
        Ok(())
    }

    /// What a pass that was renamed is called now (None: it was taken out), and a sentence that says so.
    pub fn formerly(pass: &str) -> Option<(Option<&'static str>, String)> {
        FORMERLY.iter().find(|f| f.0 == pass).map(|&(old, now)| match now {
            Some(now) => (Some(now), format!("the pass '{old}' is called '{now}' now")),
            None => (None, format!("the pass '{old}' was taken out, because it gained too little; setting it changes nothing")),
        })
    }

    pub fn with(mut self, pass: &str, value: &str) -> Result<Switches, Error> {
        self.set(pass, value)?;
        Ok(self)
    }

    pub fn mode(&self, switch: &dyn Switch) -> Mode {
        self.chosen.get(switch.name()).map_or(switch.default_mode(), |c| c.0)
    }

    /// Lets a switch do what it does, unless it is off; returns its receipt. One that is required and declined somewhere is an error.
    pub(crate) fn apply(
        &self,
        switch: &'static dyn Switch,
        target: Target,
        f: impl FnOnce(&Settings, &mut Receipt) -> Result<(), Error>,
    ) -> Result<Receipt, Error> {
        let mode = self.mode(switch);
        let mut receipt = Receipt { pass: switch.name(), mode, applied: 0, declined: vec![], notes: vec![] };
        if mode != Mode::Off {
            let none = BTreeMap::new();
            let values = self.chosen.get(switch.name()).map_or(&none, |c| &c.1);
            f(&Settings { target, switch, values }, &mut receipt)?;
        }
        if let (Mode::Require, Some((reason, site))) = (mode, receipt.declined.first()) {
            return Err(Error::Declined { pass: switch.name().into(), site: site.clone(), reason: reason.clone() });
        }
        Ok(receipt)
    }
}

/// What may stand in the place of a name that is not known: `; did you mean 'x'? (known: x, y, z)`, the nearest first.
pub fn known<'a>(name: &str, all: impl IntoIterator<Item = &'a str>) -> String {
    let mut all: Vec<&str> = all.into_iter().collect();
    all.sort_by_key(|k| strsim::levenshtein(k, name));
    let near = all
        .first()
        .filter(|k| strsim::levenshtein(k, name) <= 2.max(name.len() / 2))
        .map_or(String::new(), |k| format!("; did you mean '{k}'?"));
    format!("{near} (known: {})", if all.is_empty() { "none".into() } else { all.join(", ") })
}
