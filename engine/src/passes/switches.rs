//! Switches for passes and executor settings: their names, modes and settings, and the receipt of what each did.

use super::{FORMERLY, Preset, Rounding};
use crate::error::Error;
use crate::kernel::Arch;
use crate::meta::DType;
use crate::ranks::Ranks;
use crate::record::Recorder;
use std::collections::BTreeMap;

/// What a program is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The CPU executor.
    Cpu,
    /// A GPU of this architecture.
    Cuda(Arch),
}

/// Whether a switch is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Not applied.
    Off,
    /// Applied wherever it can be.
    Auto,
    /// As Auto, but it is an error if a place is declined.
    Require,
}

impl Mode {
    /// As written in configs and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Off => "off",
            Mode::Auto => "auto",
            Mode::Require => "require",
        }
    }
}

/// How switching something on may change results. Decides the tolerance of its test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numerics {
    /// Bit for bit the same.
    Exact,
    /// The same sums in another order, or fewer roundings.
    Reordered,
    /// Rounded to a narrower type.
    LowPrecision,
    /// Another function: a pruned model's.
    Changed,
}

/// A setting of a pass beside its mode, written as `auto,name=value`.
pub struct Setting {
    /// The word before `=`.
    pub name: &'static str,
    /// The value where none is given.
    pub default: &'static str,
    /// What its values do, for `kiln passes`.
    pub about: &'static str,
}

/// On which ranks the example of a pass is tested that divides work among ranks.
pub struct OnRanks {
    /// How many have different examples, and how many share the weights.
    pub ranks: [usize; 2],
    /// Other switches that it needs there.
    pub with: &'static [(&'static str, &'static str)],
}

/// Something that can be switched: a pass, or a setting of the executor.
pub trait Switch: Sync {
    /// The name in configs, on the command line and in receipts.
    fn name(&self) -> &'static str;
    /// What it does, in one or two sentences, for `kiln passes`.
    fn about(&self) -> &'static str;
    /// How results may differ from those without it, on this target and for values of this type.
    fn numerics(&self, target: Target, dtype: DType) -> Numerics;
    /// Records a small graph on which it applies, for its test, which fills the states and feeds.
    fn example(&self, r: &Recorder);

    /// The mode where none is set.
    fn default_mode(&self) -> Mode {
        Mode::Auto
    }

    /// Where it is off by default: what a preset that may round does with it, on this target and beside computing in this type.
    fn rounding(&self, _: Preset, _: Target, _: DType) -> Rounding {
        Rounding::Leave
    }

    /// The type that it rounds to, if its numerics are LowPrecision. Decides the tolerance of its test.
    fn rounds_to(&self) -> DType {
        DType::BF16
    }

    /// Settings beside the mode.
    fn settings(&self) -> &'static [Setting] {
        &[]
    }

    /// Values of the switch under which it applies to its example; each is tested.
    fn variants(&self) -> &'static [&'static str] {
        &["auto"]
    }

    /// Whether it applies on a GPU only.
    fn needs_gpu(&self) -> bool {
        false
    }

    /// For a pass that divides work among ranks.
    fn on_ranks(&self) -> Option<OnRanks> {
        None
    }

    /// Whether no program runs without it, so that it cannot be switched off.
    fn required(&self) -> bool {
        false
    }
}

/// What a pass is run with: the target, and the values of its settings.
pub struct Settings<'a> {
    /// What the program is compiled for.
    pub target: Target,
    /// The ranks that run the program together.
    pub ranks: &'a Ranks,
    switch: &'static dyn Switch,
    values: &'a BTreeMap<String, String>,
}

impl Settings<'_> {
    /// What [`Switches::with_own`] gave.
    pub(super) fn own(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }

    /// The value of a setting, or its default. Panics if the switch has no such setting.
    pub fn text(&self, name: &str) -> &str {
        let known = self.switch.settings().iter().find(|s| s.name == name).expect("a pass reads its own settings");
        self.values.get(name).map_or(known.default, |v| v)
    }

    /// The value of a setting as a number of at least 1.
    pub fn number(&self, name: &str) -> Result<usize, Error> {
        self.from(name, 1)
    }

    /// The value of a setting as a number of at least 0.
    pub fn number_or_none(&self, name: &str) -> Result<usize, Error> {
        self.from(name, 0)
    }

    /// Refuses values of these settings that would change nothing, because another setting does not have the value that they are `meant_for`.
    pub fn unused(&self, names: &[&str], meant_for: &str) -> Result<(), Error> {
        let given = |s: &&Setting| names.contains(&s.name) && self.text(s.name) != s.default;
        let Some(s) = self.switch.settings().iter().find(given) else { return Ok(()) };
        let problem = format!("{}={} is for {meant_for}, and changes nothing here", s.name, self.text(s.name));
        Err(Error::PassSetting { pass: self.switch.name().into(), problem })
    }

    fn from(&self, name: &str, least: usize) -> Result<usize, Error> {
        let text = self.text(name);
        let problem = || format!("{name}={text} is not a whole number of at least {least}");
        let number = text.parse().ok().filter(|&n| n >= least);
        number.ok_or_else(|| Error::PassSetting { pass: self.switch.name().into(), problem: problem() })
    }

    /// The value of a setting that must be one of these words.
    pub fn one_of(&self, name: &str, words: &[&'static str]) -> Result<&'static str, Error> {
        let text = self.text(name);
        let problem = || format!("{name}={text} is not one of {}", words.join(", "));
        words.iter().copied().find(|w| *w == text).ok_or_else(|| Error::PassSetting { pass: self.switch.name().into(), problem: problem() })
    }
}

/// What a pass or an executor setting did. Printed at start-up and stored with the run.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    /// The switch's name.
    pub pass: &'static str,
    /// The mode it had.
    pub mode: Mode,
    /// At how many places it applied.
    pub applied: usize,
    /// (reason, scope of the model) of every place that it did not apply to.
    pub declined: Vec<(String, String)>,
    /// Remarks for the summary that concern no single place.
    pub notes: Vec<String>,
    /// If a run begins without it.
    pub warm_up: Option<WarmUp>,
    /// Floating-point operations that it adds to a run of the program, by computing something twice.
    pub added_flops: u64,
}

/// How a program's first runs differ from the others.
#[derive(Clone, Debug, PartialEq)]
pub struct WarmUp {
    /// The pass that begins later.
    pub pass: &'static str,
    /// The state, f32 `[1]`, that counts the program's runs.
    pub counter: String,
    /// How many runs.
    pub runs: u64,
    /// The switch's value in these runs.
    pub value: String,
}

impl Receipt {
    /// Places that it applied to or declined.
    pub fn sites(&self) -> usize {
        self.applied + self.declined.len()
    }

    /// Notes a place (a scope of the model) that it did not apply to, and why.
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

/// Modes and settings of all switches; those not set have the mode that the preset gives them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Switches {
    /// Decides the mode of a switch that is not set.
    pub preset: Preset,
    /// The ranks that run the program together.
    pub ranks: Ranks,
    chosen: BTreeMap<String, (Mode, BTreeMap<String, String>)>,
    /// By switch: why it has the value that it has, for its receipt.
    reasons: BTreeMap<String, String>,
}

impl Switches {
    /// Those of a preset, with nothing set above it.
    pub fn of(preset: Preset) -> Switches {
        Switches { preset, ..Switches::default() }
    }

    /// `value` is `off`, `auto` or `require`, then `,setting=value` any number of times; a value may be a list of numbers. A pass's former name works too; [`Switches::formerly`]
    /// has a note about it.
    pub fn set(&mut self, pass: &str, value: &str) -> Result<(), Error> {
        let pass = match FORMERLY.iter().find(|f| f.0 == pass) {
            Some((_, Some(now))) => now,
            Some((_, None)) if ["off", "auto", "require"].iter().any(|mode| value.split(',').next() == Some(mode)) => return Ok(()),
            _ => pass,
        };
        let found =
            super::all().find(|p| p.name() == pass).ok_or_else(|| Error::NoPass { name: pass.into(), hint: did_you_mean(meant(pass)) })?;
        let wrong = |problem: String| Error::PassSetting { pass: pass.into(), problem };
        let mut parts = value.split(',').map(str::trim);
        let mode = match parts.next() {
            Some("off") if found.required() => return Err(wrong("cannot be switched off: no program runs without it".into())),
            Some("off") => Mode::Off,
            Some("auto") => Mode::Auto,
            Some("require") => Mode::Require,
            other => return Err(wrong(format!("'{}' is not off, auto or require", other.unwrap_or_default()))),
        };
        let mut values: BTreeMap<String, String> = BTreeMap::new();
        let mut last = None;
        for part in parts {
            // Numbers after a comma belong to the list before it: layers=0-5,12-17.
            let more = last.as_ref().filter(|_| part.starts_with(|c: char| c.is_ascii_digit()) && !part.contains('='));
            if let Some(value) = more.and_then(|name: &String| values.get_mut(name)) {
                *value = format!("{value},{part}");
                continue;
            }
            let (name, v) = part.split_once('=').ok_or_else(|| wrong(format!("'{part}' is not setting=value")))?;
            last = Some(name.to_string());
            if !found.settings().iter().any(|s| s.name == name) {
                return Err(wrong(format!("has no setting '{name}'{}", known(name, found.settings().iter().map(|s| s.name)))));
            }
            values.insert(name.to_string(), v.to_string());
        }
        self.chosen.insert(pass.into(), (mode, values));
        Ok(())
    }

    /// For a former name: the pass's name now (None: the pass was removed), and a sentence that says so.
    pub fn formerly(pass: &str) -> Option<(Option<&'static str>, String)> {
        FORMERLY.iter().find(|f| f.0 == pass).map(|&(old, now)| match now {
            Some(now) => (Some(now), format!("the pass '{old}' is called '{now}' now")),
            None => (None, format!("the pass '{old}' was removed because it gained too little; setting it changes nothing")),
        })
    }

    /// As [`Switches::set`], for chaining.
    pub fn with(mut self, pass: &str, value: &str) -> Result<Switches, Error> {
        self.set(pass, value)?;
        Ok(self)
    }

    /// The same for a program that these ranks run together.
    pub fn on_ranks(mut self, ranks: Ranks) -> Switches {
        self.ranks = ranks;
        self
    }

    /// The same with a value that a pass gives itself for some programs, and that nobody can set; None where the switch is off.
    pub(super) fn with_own(&self, switch: &dyn Switch, target: Target, name: &str, value: &str) -> Option<Switches> {
        let mode = self.mode_and_note(switch, target).0;
        let mut with = self.clone();
        let entry = with.chosen.entry(switch.name().into()).or_insert((mode, BTreeMap::new()));
        entry.1.insert(name.into(), value.into());
        (mode != Mode::Off).then_some(with)
    }

    /// Why a switch has its value, where that was not typed: a note of its receipt.
    pub fn explain(&mut self, switch: &str, why: &str) {
        self.reasons.insert(switch.into(), why.into());
    }

    /// The mode set for a switch.
    pub fn chosen(&self, switch: &str) -> Option<Mode> {
        self.chosen.get(switch).map(|c| c.0)
    }

    /// Calls `f` unless the switch is off, and returns the receipt. A declined place is an error where the mode is `require`.
    pub(crate) fn apply(
        &self,
        switch: &'static dyn Switch,
        target: Target,
        f: impl FnOnce(&Settings, &mut Receipt) -> Result<(), Error>,
    ) -> Result<Receipt, Error> {
        let (mode, note) = self.mode_and_note(switch, target);
        let notes = note.into_iter().chain(self.reasons.get(switch.name()).cloned()).collect();
        let mut receipt = Receipt { pass: switch.name(), mode, applied: 0, declined: vec![], notes, warm_up: None, added_flops: 0 };
        if mode != Mode::Off {
            let none = BTreeMap::new();
            let values = self.chosen.get(switch.name()).map_or(&none, |c| &c.1);
            f(&Settings { target, ranks: &self.ranks, switch, values }, &mut receipt)?;
        }
        if let (Mode::Require, Some((reason, site))) = (mode, receipt.declined.first()) {
            return Err(Error::Declined { pass: switch.name().into(), site: site.clone(), reason: reason.clone() });
        }
        Ok(receipt)
    }
}

/// What other programs call what a pass does.
const ELSEWHERE: &[(&str, &str)] = &[
    ("amp", "bf16"),
    ("autocast", "bf16"),
    ("mixed-precision", "bf16"),
    ("half", "fp16"),
    ("gradient-checkpointing", "recompute"),
    ("activation-checkpointing", "recompute"),
    ("checkpointing", "recompute"),
    ("remat", "recompute"),
    ("sdpa", "flash-attention"),
    ("cut-cross-entropy", "linear-cross-entropy"),
    ("fused-cross-entropy", "linear-cross-entropy"),
    ("liger", "linear-cross-entropy"),
    ("compile", "fuse-pointwise"),
    ("inductor", "fuse-pointwise"),
    ("fsdp", "zero-weights"),
    ("zero3", "zero-weights"),
    ("deepspeed", "zero"),
    ("zero1", "zero"),
    ("ddp", "data-parallel"),
    ("8bit-adam", "adam8bit"),
    ("bitsandbytes", "adam8bit"),
    ("paged-adam", "offload"),
    ("cpu-offload", "offload"),
];

/// The pass that was probably meant.
pub fn meant(name: &str) -> Option<&'static str> {
    let plain = name.to_lowercase().replace('_', "-");
    let elsewhere = ELSEWHERE.iter().find(|e| e.0 == plain).map(|e| e.1);
    elsewhere.or_else(|| nearest(name, super::all().map(|p| p.name())))
}

/// The name that was probably meant: the same but for case and dashes, a typing error or two, the beginning of a name, or a part of one.
pub fn nearest<'a>(name: &str, all: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |text: &str| text.to_lowercase().replace(['-', '_'], "");
    let (all, typed) = (all.into_iter().map(|k| (k, plain(k))).collect::<Vec<_>>(), plain(name));
    let slips = |k: &str| strsim::damerau_levenshtein(k, &typed);
    let close = all.iter().filter(|(_, k)| slips(k) <= (typed.len() / 3).max(1)).min_by_key(|(_, k)| slips(k));
    // A word of one or two letters is a part of nearly everything.
    let long = |text: &str| text.len() > 2;
    let begins = || all.iter().find(|(_, k)| long(&typed) && k.starts_with(&typed));
    let inside = || all.iter().find(|(_, k)| long(&typed) && k.contains(&typed));
    let around = || all.iter().filter(|(_, k)| long(k) && typed.contains(k.as_str())).max_by_key(|(_, k)| k.len());
    close.or_else(begins).or_else(inside).or_else(around).map(|found| found.0)
}

/// `; did you mean 'x'?`, or nothing.
pub fn did_you_mean(found: Option<&str>) -> String {
    found.map_or(String::new(), |k| format!("; did you mean '{k}'?"))
}

/// The end of an error message about an unknown name of a short list: `; did you mean 'x'? (known: x, y, z)`.
pub fn known<'a>(name: &str, all: impl IntoIterator<Item = &'a str>) -> String {
    let all: Vec<&str> = all.into_iter().collect();
    let list = if all.is_empty() { "none".into() } else { all.join(", ") };
    format!("{} (known: {list})", did_you_mean(nearest(name, all.iter().copied())))
}
