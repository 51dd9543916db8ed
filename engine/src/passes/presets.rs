//! Presets of switches by what they do to the numbers.

use super::mixed::Mixed;
use super::{Mode, Numerics, Switch, Switches, Target, known};
use crate::error::Error;
use crate::meta::DType;

/// Which switches are on where nothing else is said of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preset {
    /// No switch that can be off.
    None,
    /// Those whose results are bit for bit the results without them.
    Exact,
    /// Every switch's own default: sums may be added in another order.
    #[default]
    Reordered,
    /// Those that round to narrower types for speed, too.
    Fast,
}

/// What the preset `fast` does with a switch that is off by default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fast {
    /// It stays off: it is not about speed.
    Leave,
    /// It is on.
    On,
    /// It would be on, but not here; the receipt says why.
    Off(String),
}

impl Preset {
    /// All of them, the fewest switches first.
    pub const ALL: [Preset; 4] = [Preset::None, Preset::Exact, Preset::Reordered, Preset::Fast];

    /// As written in configs and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Preset::None => "none",
            Preset::Exact => "exact",
            Preset::Reordered => "reordered",
            Preset::Fast => "fast",
        }
    }

    /// The preset of this name; an error that lists the known ones.
    pub fn named(name: &str) -> Result<Preset, Error> {
        let all = Preset::ALL.into_iter();
        let found = all.clone().find(|p| p.name() == name);
        found.ok_or_else(|| Error::NoPreset { name: name.into(), hint: known(name, all.map(Preset::name)) })
    }

    /// The mode of a switch of which nothing else is said, and a note where that needs a reason. `types`: what the run computes in.
    fn mode(self, switch: &dyn Switch, target: Target, types: &[DType]) -> (Mode, Option<String>) {
        let default = switch.default_mode();
        let off = if switch.required() { default } else { Mode::Off };
        match self {
            Preset::None => (off, None),
            Preset::Exact if types.iter().all(|&t| switch.numerics(target, t) == Numerics::Exact) => (default, None),
            Preset::Exact => (off, None),
            Preset::Fast if default == Mode::Off => match switch.fast(target, types[types.len() - 1]) {
                Fast::Leave => (Mode::Off, None),
                Fast::On => (Mode::Auto, None),
                Fast::Off(why) => (Mode::Off, Some(format!("left off by optimise=fast: {why}"))),
            },
            Preset::Reordered | Preset::Fast => (default, None),
        }
    }
}

impl Switches {
    /// The types that a run computes in: f32, and the narrow type that was asked for.
    fn types(&self) -> Vec<DType> {
        let narrow = [DType::BF16, DType::F16].into_iter().filter(|&t| self.chosen(Mixed(t).name()).is_some_and(|m| m != Mode::Off));
        std::iter::once(DType::F32).chain(narrow).collect()
    }

    /// The mode of a switch for this target, and a note where a preset leaves it off for a reason.
    pub fn mode_and_note(&self, switch: &dyn Switch, target: Target) -> (Mode, Option<String>) {
        match self.chosen(switch.name()) {
            Some(mode) => (mode, None),
            None => self.preset.mode(switch, target, &self.types()),
        }
    }

    /// The mode of a switch for this target: the one that was set, or else the preset's.
    pub fn mode(&self, switch: &dyn Switch, target: Target) -> Mode {
        self.mode_and_note(switch, target).0
    }
}
