//! Presets of switches by what they do to the numbers.

use super::mixed::Mixed;
use super::{Mode, Numerics, Switch, Switches, Target, known};
use crate::error::Error;
use crate::meta::DType;

/// Which switches are on where nothing else is said of them. Each preset allows more than the one before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Preset {
    /// No switch that can be off: f32 without TF32.
    None,
    /// Those whose results are bit for bit the results without them.
    Exact,
    /// Every switch's own default, in f32 without TF32: what code that compiles a graph itself begins with. No command line names it.
    #[default]
    Plain,
    /// Sums may be added in another order; f32, on a GPU with TF32.
    Reordered,
    /// What a run has where nothing is said: on a GPU bf16 with f32 parameters, on the CPU f32.
    Mixed,
    /// As Mixed, with FP8 and TF32 where the GPU has them.
    Fast,
}

/// What a preset that may round does with a switch that is off by default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// It stays off: it is not about speed.
    Leave,
    /// It is on.
    On,
    /// It would be on, but not here; the receipt says why.
    Off(String),
}

impl Preset {
    /// Those that have a name for users, the fewest switches first.
    pub const ALL: [Preset; 5] = [Preset::None, Preset::Exact, Preset::Reordered, Preset::Mixed, Preset::Fast];

    /// As written in configs and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Preset::None => "none",
            Preset::Exact => "exact",
            Preset::Plain => "plain",
            Preset::Reordered => "reordered",
            Preset::Mixed => "mixed",
            Preset::Fast => "fast",
        }
    }

    /// The preset of this name; an error that lists the known ones.
    pub fn named(name: &str) -> Result<Preset, Error> {
        let all = Preset::ALL.into_iter();
        let found = all.clone().find(|p| p.name() == name);
        found.ok_or_else(|| Error::NoPreset { name: name.into(), hint: known(name, all.map(Preset::name)) })
    }

    /// Whether a switch that changes numbers in this way is one that the preset allows.
    pub fn allows(self, numerics: Numerics) -> bool {
        match numerics {
            Numerics::Exact => true,
            Numerics::Reordered => self > Preset::Exact,
            Numerics::LowPrecision | Numerics::Changed => self >= Preset::Mixed,
        }
    }

    /// The mode of a switch of which nothing else is said, and a note where that needs a reason. `types`: what the run computes in.
    fn mode(self, switch: &dyn Switch, target: Target, types: &[DType]) -> (Mode, Option<String>) {
        let default = switch.default_mode();
        let off = if switch.required() { default } else { Mode::Off };
        match self {
            Preset::None => (off, None),
            Preset::Exact if types.iter().all(|&t| switch.numerics(target, t) == Numerics::Exact) => (default, None),
            Preset::Exact => (off, None),
            Preset::Reordered | Preset::Mixed | Preset::Fast if default == Mode::Off => {
                match switch.rounding(self, target, types[types.len() - 1]) {
                    Rounding::Leave => (Mode::Off, None),
                    Rounding::On => (Mode::Auto, None),
                    Rounding::Off(why) => (Mode::Off, Some(format!("left off by optimize={}: {why}", self.name()))),
                }
            }
            Preset::Plain | Preset::Reordered | Preset::Mixed | Preset::Fast => (default, None),
        }
    }
}

impl Switches {
    fn is_on(&self, name: &str) -> bool {
        self.chosen(name).is_some_and(|mode| mode != Mode::Off)
    }

    /// The types that a run computes in: f32, and the narrow type that was asked for or that the preset gives.
    fn types(&self, target: Target) -> Vec<DType> {
        let asked = |t: DType| self.is_on(Mixed(t).name());
        // Whoever asks for fp16, or for f32 with TF32, has chosen.
        let other = asked(DType::F16) || self.preset == Preset::Mixed && self.is_on("tf32");
        let given = self.preset >= Preset::Mixed && target != Target::Cpu && self.chosen(Mixed(DType::BF16).name()).is_none() && !other;
        let narrow = [DType::BF16, DType::F16].into_iter().filter(|&t| asked(t) || given && t == DType::BF16);
        std::iter::once(DType::F32).chain(narrow).collect()
    }

    /// The mode of a switch for this target, and a note where a preset leaves it off for a reason.
    pub fn mode_and_note(&self, switch: &dyn Switch, target: Target) -> (Mode, Option<String>) {
        match self.chosen(switch.name()) {
            Some(mode) => (mode, None),
            None => self.preset.mode(switch, target, &self.types(target)),
        }
    }

    /// The mode of a switch for this target: the one that was set, or else the preset's.
    pub fn mode(&self, switch: &dyn Switch, target: Target) -> Mode {
        self.mode_and_note(switch, target).0
    }
}
