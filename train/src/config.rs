//! What a run is made from: the defaults of its recipe's sections, a preset over them, what a base brings (`recipe::begin`) over that, a file over that,
//! `--set` over that. An unknown key or a wrong type is known by comparing with the defaults.

mod aliases;
mod budget;
mod section;
mod train;

pub use aliases::flag as flag_meant;
pub use section::{Key, Keys, Range, Section, Setting, shown};
pub use toml::Value;
pub use train::{Optimizer, TrainConfig};

use crate::data::Paths;
use crate::section;
use engine::passes::{Mode, Preset, Switch, Target, all, did_you_mean, known};
use engine::program::imagined;
use engine::{DType, Ranks, Switches};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use toml::Table;

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("there is no {what} '{name}'{near}")]
    Unknown { what: &'static str, name: String, near: String },
    #[error("'{key}' wants {want}, not {got}")]
    Type { key: String, want: String, got: String },
    #[error("'{key}' stands in several sections ({sections}): write one of them in front of it")]
    Ambiguous { key: String, sections: String },
    #[error("--set wants key=value, not '{0}'")]
    Set(String),
    #[error("--pass wants NAME=off|auto|require, not '{0}'")]
    PassArgument(String),
    #[error("cannot read config {path}: {cause}")]
    Read { path: PathBuf, cause: std::io::Error },
    #[error("config {path}: {cause}")]
    Parse { path: PathBuf, cause: String },
    #[error("{0}")]
    Invalid(String),
    #[error(transparent)]
    Pass(#[from] engine::Error),
}

impl ConfigError {
    /// A key that a recipe does not have, of which `all` are the keys with their sections.
    pub fn no_key(recipe: &str, section: &str, key: &str, all: &[String], full: bool) -> ConfigError {
        let meant = did_you_mean(aliases::meant(section, key, all, full).as_deref());
        let name = if section.is_empty() { key.into() } else { format!("{section}.{key}") };
        ConfigError::Unknown { what: "key", name, near: format!("{meant} (`{} config {recipe}` lists them all)", crate::program()) }
    }

    /// Of what stands in this file.
    pub fn in_file(self, path: &Path) -> ConfigError {
        ConfigError::Parse { path: path.into(), cause: self.to_string() }
    }
}

/// Refuses a number outside of what it can mean, by its key, value and range.
pub fn within(key: &str, value: f64, range: RangeInclusive<f64>) -> Result<(), ConfigError> {
    // A bound that was rounded to f32 is slightly off.
    let at = |bound: &f64| (value - bound).abs() <= 1e-6 * bound.abs();
    match range.contains(&value) || at(range.start()) || at(range.end()) {
        true => Ok(()),
        false => Err(ConfigError::Invalid(format!("{key} = {value:?}: from {:?} to {:?}", range.start(), range.end()))),
    }
}

/// The base of RoPE's frequencies. Below 1 they grow with the dimension, beyond what an angle can be.
pub const ROPE_THETA: RangeInclusive<f64> = 1.0..=1e12;
/// What a norm adds to a mean square.
pub const NORM_EPS: RangeInclusive<f64> = 1e-30..=1.0;
/// Weights of losses, and rates: larger ones would overflow what they are multiplied with.
pub const WEIGHT: RangeInclusive<f64> = 0.0..=1e6;

section! {
    /// Where tokens come from.
    pub struct DataConfig {
        /// Folders that `kiln data prepare` made, or patterns of them: with weights (`PATH:0.9`) a mixture, else one set. Empty: generated text.
        pub path: Paths = Paths::default(), [path many];
        /// Tokens that are not trained on when they are the target.
        pub ignore_tokens: Vec<u32> = vec![];
    }
}

/// The key of the preset of passes, and its spelling in runs of earlier versions.
pub const OPTIMIZE: &str = "optimize";
const FORMER_OPTIMIZE: &str = "optimise";

/// Passes that decide in which types a run computes. A run notes what they are on the device that it begins on.
const PRECISION: [&str; 4] = ["bf16", "fp16", "tf32", "fp8"];

section! {
    /// Keys outside of every section.
    pub struct TopConfig {
        /// Decides initial values, the order of the data and every random draw.
        pub seed: i64 = 0;
        /// The weights that the run begins with, as `--init-from` names them: a checkpoint, a run's folder or a .safetensors file. Empty: drawn at
        /// random.
        pub init_from: String = String::new();
        /// The most memory that the run's plan may take, as `--memory-budget` names it: 8GiB, 8000MB or 8g. What was chosen to stay within it is in
        /// the run's other keys. Empty: as much as there is.
        pub memory_budget: String = String::new(), [free];
        /// Passes that `--memory-budget` changed, as they were before: `recompute`, or with a value `recompute=auto`. Another budget begins with them.
        pub before_budget: String = String::new(), [free];
        /// Which passes are on, by what they change in the numbers, as `--optimize` names it; those in `[passes]` are above it.
        pub optimize: String = Preset::Mixed.name().into(), in Preset::ALL.map(Preset::name);
    }
}

/// A fully resolved configuration.
#[derive(Clone, Debug)]
pub struct Config {
    table: Table,
    /// What its keys are; of a checkpoint that is only read, none.
    sections: Arc<[Keys]>,
    /// Keys that were set over a preset or a run's own settings: what someone asked for, and must not be passed over in silence.
    given: BTreeSet<String>,
    /// The settings before those: a preset's, or a run's own.
    before: Arc<Table>,
    /// Whether these are a run's own settings, in which everything is decided already, and not those of a recipe's preset.
    of_run: bool,
    /// Paths as they were typed, by their keys, for people: `absolute_paths` changed them.
    typed: BTreeMap<String, String>,
    /// Why passes have the values that they have, where kiln chose them on this device: notes of their receipts.
    reasons: BTreeMap<&'static str, String>,
    /// The ranks that train together, of which this is one.
    pub ranks: Ranks,
}

impl PartialEq for Config {
    fn eq(&self, other: &Config) -> bool {
        self.table == other.table
    }
}

impl Config {
    /// Every key with its default.
    pub fn new(recipe: &str, preset: &str, sections: Vec<Keys>) -> Config {
        crate::recipes::register(); // so that all passes can be switched
        let mut table = TopConfig::keys("").defaults();
        table.insert("recipe".into(), recipe.into());
        table.insert("preset".into(), preset.into());
        table.insert("passes".into(), Value::Table(Table::new()));
        table.extend(sections.iter().map(|keys| (keys.name.to_string(), Value::Table(keys.defaults()))));
        Config::of_table(table, sections.into(), false)
    }

    fn of_table(table: Table, sections: Arc<[Keys]>, of_run: bool) -> Config {
        let (before, given, typed, reasons) = (table.clone().into(), BTreeSet::new(), BTreeMap::new(), BTreeMap::new());
        Config { before, table, sections, given, of_run, typed, reasons, ranks: Ranks::default() }
    }

    /// From a preset's text, which holds what differs from the defaults. It is part of the program: what is wrong in it is an error of whoever wrote it.
    pub fn preset(recipe: &str, preset: &str, sections: Vec<Keys>, text: &str) -> Config {
        let mut config = Config::new(recipe, preset, sections);
        let wrong = |e: &dyn std::fmt::Display| -> ! { panic!("preset {recipe}-{preset}: {e}") };
        let table: Table = text.parse().unwrap_or_else(|e| wrong(&e));
        config.overlay(table).unwrap_or_else(|e| wrong(&e));
        config.begins_here();
        config
    }

    /// The settings of a run, as it wrote them; and the keys that it did not know yet, which have their defaults.
    pub fn of_run(sections: Vec<Keys>, mut table: Table) -> Result<(Config, Vec<String>), ConfigError> {
        as_now(&mut table);
        let text = |key: &str| table.get(key).and_then(Value::as_str).unwrap_or_default();
        let mut config = Config::new(text("recipe"), text("preset"), sections);
        let known: Vec<String> = flat(&table).into_iter().map(|(key, _)| key).collect();
        let filled = flat(&config.table).into_iter().filter(|(key, _)| !known.contains(key)).map(|(key, value)| format!("{key} = {value}"));
        let filled = filled.collect();
        config.overlay(table)?;
        config.begins_here();
        config.of_run = true;
        Ok((config, filled))
    }

    /// The settings in a checkpoint, as they are there.
    pub fn from_json(value: &serde_json::Value) -> Result<Config, ConfigError> {
        let mut table = json_table(value)?;
        as_now(&mut table);
        Ok(Config::of_table(table, Arc::default(), true))
    }

    /// Nobody has set anything yet.
    fn begins_here(&mut self) {
        self.given.clear();
        self.before = self.table.clone().into();
    }

    /// As `of_run`, from a checkpoint of the same recipe.
    pub fn of_checkpoint(&self, value: &serde_json::Value) -> Result<(Config, Vec<String>), ConfigError> {
        Config::of_run(self.sections.to_vec(), json_table(value)?)
    }

    /// Takes a size from the data where the config leaves it open.
    pub fn size<E: From<ConfigError>>(&mut self, key: &str, of_data: impl FnOnce(&Config) -> Result<usize, E>) -> Result<(), E> {
        let (section, name) = key.split_once('.').unwrap_or(("", key));
        if self.value(section, name).and_then(Value::as_integer) == Some(0) {
            let size = of_data(self)?;
            self.set_value(key, (size as i64).into())?;
        }
        Ok(())
    }

    /// Takes a value of `model` from the folder in `model.base`. Another one that someone asked for is an error; a preset's gives way.
    pub fn take_from_base(&mut self, key: &str, value: Value) -> Result<(), ConfigError> {
        let (base, name) = (self.base().unwrap_or_default().to_string(), format!("model.{key}"));
        let open = self.keys().any(|(section, k)| section == "model" && k.name == key && k.data);
        let Some(slot) = self.table.get_mut("model").and_then(|section| section.get_mut(key)) else { return Ok(()) };
        let left_open = open && slot.as_integer() == Some(0);
        if *slot != value && !left_open && self.given.contains(&name) {
            let (asked, has) = (shown(slot), shown(&value));
            let problem = format!("{name} = {asked}, but the model in model.base ({base}) has {has}: remove {name}, its folder says it");
            return Err(ConfigError::Invalid(problem));
        }
        *slot = value;
        Ok(())
    }

    /// The folder of the model that is fine-tuned, where there is one.
    pub fn base(&self) -> Option<&str> {
        self.value("model", "base")?.as_str().filter(|path| !path.is_empty())
    }

    /// Keys of `model` that the folder in `model.base` decides, where there is one.
    pub fn of_base(&self) -> Vec<&Key> {
        let is = |section: &str, key: &Key| section == "model" && key.base && self.base().is_some();
        self.keys().filter(|(section, key)| is(section, key)).map(|(_, key)| key).collect()
    }

    /// For people: recipe and preset, and the model that is fine-tuned.
    pub fn title(&self) -> String {
        let shown = |base: &str| self.typed.get("model.base").map_or(base, |typed| typed).to_string();
        let base = self.base().map_or(String::new(), |base| format!(" from {}", shown(base)));
        format!("{} {}{base}", self.text("recipe"), self.text("preset"))
    }

    /// A key that someone set, and to another value than its default and the preset's: a run's config.toml, which has every key, sets none by that.
    pub fn given(&self, section: &str, key: &str) -> Option<&Value> {
        let default = self.keys().find(|(s, k)| *s == section && k.name == key).map(|(_, k)| &k.default);
        let before = self.before.get(section).and_then(|s| s.get(key));
        let is_new = |value: &&Value| Some(*value) != default && Some(*value) != before;
        self.value(section, key).filter(|value| self.given.contains(&format!("{section}.{key}")) && is_new(value))
    }

    /// Whether someone set this key (`train.batch`) or pass (`passes.recompute`), over a preset or a run's own settings.
    pub fn is_given(&self, name: &str) -> bool {
        self.given.contains(name)
    }

    /// Sets a key that nobody has set, over the preset's value; false where someone has. Nobody has set it after that, either.
    pub fn set_default(&mut self, name: &str, value: Value) -> Result<bool, ConfigError> {
        if self.is_given(name) {
            return Ok(false);
        }
        self.set_value(name, value)?;
        self.given.remove(name);
        Ok(true)
    }

    /// Whether these are a run's own settings, and not those of one that begins.
    pub fn is_of_run(&self) -> bool {
        self.of_run
    }

    /// Whether there is such a key.
    pub fn has(&self, section: &str, key: &str) -> bool {
        self.keys().any(|(s, k)| s == section && k.name == key)
    }

    /// The bytes that the run's plan may take, where that is limited.
    pub fn memory_budget(&self) -> Result<Option<u64>, ConfigError> {
        let text = self.text("memory_budget");
        let wrong = |problem| ConfigError::Invalid(format!("memory_budget = {text:?}: {problem}"));
        (!text.is_empty()).then(|| crate::memory::size(text).map_err(wrong)).transpose()
    }

    /// Every key of every section.
    pub fn keys(&self) -> impl Iterator<Item = (&str, &Key)> {
        self.sections.iter().flat_map(|section| section.keys.iter().map(|key| (section.name, key)))
    }

    /// Whether a resumed run may change this key.
    pub fn is_free(&self, name: &str) -> bool {
        let of_section = self.keys().any(|(section, key)| key.free && name.split_once('.') == Some((section, key.name)));
        of_section || TopConfig::keys("").get(name).is_some_and(|key| key.free)
    }

    /// Lays a TOML file over this.
    pub fn overlay_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let table = read_file(path)?;
        self.overlay(table).map_err(|e| e.in_file(path))
    }

    fn overlay(&mut self, table: Table) -> Result<(), ConfigError> {
        for (key, value) in table {
            match key.as_str() {
                "recipe" | "preset" => {} // read before, to choose this preset
                FORMER_OPTIMIZE => self.lay(&[], OPTIMIZE.into(), value)?,
                "passes" => {
                    let Value::Table(passes) = value else {
                        return Err(ConfigError::Type { key, want: "a table".into(), got: kind(&value).into() });
                    };
                    for (name, v) in passes {
                        let Value::String(v) = v else {
                            return Err(ConfigError::Type { key: format!("passes.{name}"), want: "a string".into(), got: kind(&v).into() });
                        };
                        self.set_pass(&name, &v)?;
                    }
                }
                _ => self.lay(&[], key, value)?,
            }
        }
        Ok(())
    }

    fn lay(&mut self, path: &[String], key: String, value: Value) -> Result<(), ConfigError> {
        let full = [path, std::slice::from_ref(&key)].concat();
        let many = self.sections.iter().any(|s| path == [s.name] && s.get(&key).is_some_and(|key| key.many));
        let table = path.iter().fold(&mut self.table, |t, k| t.get_mut(k).and_then(Value::as_table_mut).expect("checked on the way"));
        let name = full.join(".");
        let Some(slot) = table.get_mut(&key) else {
            return Err(match value.is_table() && path.is_empty() {
                true => self.no_section(&key),
                false => self.unknown(&path.join("."), &key, true),
            });
        };
        if let Value::Table(inner) = &value
            && slot.is_table()
        {
            for (k, v) in inner {
                self.lay(&full, k.clone(), v.clone())?;
            }
            return Ok(());
        }
        *slot = match many {
            true => paths(&name, value)?,
            false => fitting(&name, slot, value)?,
        };
        self.given.insert(name.clone());
        if name == OPTIMIZE {
            let preset = Preset::named(slot.as_str().unwrap_or_default())?;
            self.keep_allowed(preset);
        }
        Ok(())
    }

    /// Removes passes of a recipe's preset that change more in the numbers than this preset of passes allows, and what a run that goes on noted about
    /// its precision. What was asked for by name stays.
    fn keep_allowed(&mut self, preset: Preset) {
        let numerics = |p: &dyn Switch| [Target::Cpu, imagined(90)].map(|target| p.numerics(target, DType::F32));
        let allowed = |name: &str| all().find(|p| p.name() == name).is_none_or(|p| numerics(p).into_iter().all(|n| preset.allows(n)));
        let (given, of_run) = (&self.given, self.of_run);
        let passes = self.table.get_mut("passes").and_then(Value::as_table_mut).expect("every config has it");
        passes.retain(|name, value| {
            let off = value.as_str().is_some_and(|v| v.starts_with("off"));
            given.contains(&format!("passes.{name}")) || !PRECISION.contains(&name) && (off || of_run || allowed(name))
        });
    }

    /// Notes what this run computes in on this device, so that it goes on with that on any other.
    pub fn settle_precision(&mut self, target: Target) -> Result<(), ConfigError> {
        let switches = self.switches()?;
        let passes = self.table.get_mut("passes").and_then(Value::as_table_mut).expect("every config has it");
        for p in all().filter(|p| PRECISION.contains(&p.name()) && switches.chosen(p.name()).is_none()) {
            passes.insert(p.name().into(), switches.mode(p, target).name().into());
        }
        Ok(())
    }

    /// `key` may leave out its section where that is clear.
    pub fn set(&mut self, assignment: &str) -> Result<(), ConfigError> {
        let (key, text) = assignment.split_once('=').ok_or_else(|| ConfigError::Set(assignment.into()))?;
        let (key, text) = (key.trim(), text.trim());
        let parsed: Option<Value> = format!("v = {text}").parse::<Table>().ok().filter(|t| t.len() == 1).and_then(|mut t| t.remove("v"));
        // No key is a date of TOML's: what looks like one is text.
        let parsed = parsed.filter(|value| !matches!(value, Value::Datetime(_)));
        let value = parsed.unwrap_or_else(|| Value::String(text.into()));
        self.set_value(key, value)
    }

    pub fn set_value(&mut self, key: &str, value: Value) -> Result<(), ConfigError> {
        if let Some((section, rest)) = key.split_once('.') {
            if section == "passes" {
                let text = value.as_str().map(str::to_owned).unwrap_or_else(|| value.to_string());
                return self.set_pass(rest, &text);
            }
            if !self.table.get(section).is_some_and(Value::is_table) {
                return Err(self.no_section(section));
            }
            return self.lay(&[section.to_string()], rest.to_string(), value);
        }
        if self.table.get(key).is_some_and(|v| !v.is_table()) && !["recipe", "preset"].contains(&key) {
            return self.lay(&[], key.into(), value);
        }
        let has = |s: &&str| self.table.get(*s).and_then(Value::as_table).is_some_and(|t| t.contains_key(key));
        let sections: Vec<&str> = self.section_names().filter(has).collect();
        match sections[..] {
            [one] => self.lay(&[one.to_string()], key.into(), value),
            [] => Err(self.unknown("", key, false)),
            _ => Err(ConfigError::Ambiguous { key: key.into(), sections: sections.join(", ") }),
        }
    }

    fn no_section(&self, name: &str) -> ConfigError {
        ConfigError::Unknown { what: "section", name: name.into(), near: known(name, self.section_names().chain(["passes"])) }
    }

    /// `full`: a suggestion has its section, as a file needs it.
    fn unknown(&self, section: &str, key: &str, full: bool) -> ConfigError {
        let all: Vec<String> = flat(&self.table).into_iter().map(|(name, _)| name).collect();
        ConfigError::no_key(self.text("recipe"), section, key, &all, full)
    }

    /// `NAME=off|auto|require[,setting=value]`
    pub fn set_pass_argument(&mut self, argument: &str) -> Result<(), ConfigError> {
        let (name, value) = argument.split_once('=').ok_or_else(|| ConfigError::PassArgument(argument.into()))?;
        self.set_pass(name.trim(), value.trim())
    }

    fn set_pass(&mut self, name: &str, value: &str) -> Result<(), ConfigError> {
        Switches::default().set(name, value)?;
        // A run keeps the names of today.
        let name = match Switches::formerly(name) {
            Some((now, note)) => {
                crate::warn!("note: {note}");
                now
            }
            None => Some(name),
        };
        let Some(name) = name else { return Ok(()) };
        let passes = self.table.get_mut("passes").and_then(Value::as_table_mut).expect("every config has it");
        passes.insert(name.into(), value.into());
        self.given.insert(format!("passes.{name}"));
        Ok(())
    }

    pub fn set_preset(&mut self, preset: Preset) {
        self.table.insert(OPTIMIZE.into(), preset.name().into());
        self.keep_allowed(preset);
    }

    pub fn switches(&self) -> Result<Switches, ConfigError> {
        let mut s = Switches::default().on_ranks(self.ranks.clone());
        // Checkpoints of earlier versions do not have it.
        if let Some(preset) = self.value("", OPTIMIZE) {
            s.preset = Preset::named(preset.as_str().unwrap_or_default())?;
        }
        for (name, v) in self.table.get("passes").and_then(Value::as_table).into_iter().flatten() {
            s.set(name, v.as_str().unwrap_or_default())?;
        }
        self.reasons.iter().for_each(|(name, why)| s.explain(name, why));
        Ok(s)
    }

    /// Why a pass has its value on this device.
    pub fn explain(&mut self, pass: &'static str, why: String) {
        self.reasons.insert(pass, why);
    }

    /// Every section but `passes`.
    fn section_names(&self) -> impl Iterator<Item = &str> {
        self.table.iter().filter(|(name, value)| value.is_table() && *name != "passes").map(|(name, _)| name.as_str())
    }

    pub fn section<T: Section>(&self, name: &'static str) -> Result<T, ConfigError> {
        match self.table.get(name).and_then(Value::as_table) {
            Some(table) => T::read(name, table),
            None => T::read(name, &Table::new()),
        }
    }

    /// The value of a key; `section` is empty for those outside of every section.
    pub fn value(&self, section: &str, key: &str) -> Option<&Value> {
        match section {
            "" => self.table.get(key),
            _ => self.table.get(section)?.get(key),
        }
    }

    pub fn text(&self, key: &str) -> &str {
        self.table.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    /// TOML's numbers have a sign: the upper half of seeds is kept as negative ones.
    pub fn set_seed(&mut self, seed: u64) {
        self.table.insert("seed".into(), Value::Integer(seed as i64));
    }

    /// A run finds its data, and the model that it begins with, from any folder. Their names are without `..`: other programs are told them, too.
    pub fn absolute_paths(&mut self) -> Result<(), ConfigError> {
        let paths: Vec<(String, &str)> = self.keys().filter(|(_, k)| k.path).map(|(section, k)| (section.to_string(), k.name)).collect();
        for (section, key) in paths {
            let typed = Paths::from_value(self.value(&section, key).unwrap_or(&Value::Boolean(false))).unwrap_or_default();
            if !typed.is_empty() {
                let full = typed.map(full_path)?;
                let name = format!("{section}.{key}");
                let is_given = self.is_given(&name);
                self.set_value(&name, full.to_value())?;
                if !is_given {
                    self.given.remove(&name);
                }
                self.typed.insert(name, typed.to_string());
            }
        }
        Ok(())
    }

    /// Where the data is, if it is not generated.
    pub fn data_path(&self) -> Option<Paths> {
        Paths::from_value(self.table.get("data")?.get("path")?).filter(|paths| !paths.is_empty())
    }

    pub fn set_init_from(&mut self, path: &Path) {
        self.table.insert("init_from".into(), path.display().to_string().into());
    }

    pub fn seed(&self) -> u64 {
        self.table.get("seed").and_then(Value::as_integer).unwrap_or(0) as u64
    }

    pub fn to_toml(&self) -> String {
        toml::to_string(&self.table).expect("a table of plain values")
    }

    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(&self.table).expect("a table of plain values")
    }

    /// Keys whose values differ, with both: what a resumed run may not change.
    pub fn differences(&self, other: &Config) -> Vec<(String, String, String)> {
        let mut found = vec![];
        let (a, b) = (flat(&self.table), flat(&other.table));
        for (key, value) in &a {
            let theirs = b.iter().find(|(k, _)| k == key).map_or("nothing".to_string(), |(_, v)| v.clone());
            if *value != theirs {
                found.push((key.clone(), value.clone(), theirs));
            }
        }
        found.extend(b.iter().filter(|(k, _)| !a.iter().any(|(x, _)| x == k)).map(|(k, v)| (k.clone(), "nothing".into(), v.clone())));
        found
    }
}

/// A path from the root, without `..`.
fn full_path(path: &str) -> Result<String, ConfigError> {
    let full = std::path::absolute(path).map_err(|cause| ConfigError::Read { path: path.into(), cause })?;
    let parts: Vec<Component> = full.components().collect();
    let Some(last) = parts.iter().rposition(|part| *part == Component::ParentDir) else { return Ok(full.display().to_string()) };
    // Links behind it keep their names. What is not there is refused by whoever reads it.
    let above = parts[..=last].iter().collect::<PathBuf>().canonicalize();
    let full = above.map_or(full.clone(), |above| parts[last + 1..].iter().fold(above, |path, part| path.join(part)));
    Ok(full.display().to_string())
}

/// A TOML file, and the recipe and preset that it names.
pub fn read_file(path: &Path) -> Result<Table, ConfigError> {
    let text = crate::input::read_to_string(path).map_err(|cause| ConfigError::Read { path: path.into(), cause })?;
    text.parse().map_err(|e: toml::de::Error| ConfigError::Parse { path: path.into(), cause: e.to_string() })
}

/// `recipe` and `preset` of such a file, where it has them.
pub fn named_in(table: &Table, path: &Path) -> Result<[Option<String>; 2], ConfigError> {
    let text = |key: &str| match table.get(key) {
        Some(Value::String(s)) => Ok(Some(s.clone())),
        None => Ok(None),
        Some(other) => {
            Err(ConfigError::Parse { path: path.into(), cause: format!("'{key}' wants a string, not {} ({other})", kind(other)) })
        }
    };
    Ok([text("recipe")?, text("preset")?])
}

/// A run's settings from before GPUs computed in bf16 by default: such a run goes on in f32 unless it says otherwise.
fn as_now(table: &mut Table) {
    if table.contains_key(OPTIMIZE) {
        return;
    }
    let preset = table.remove(FORMER_OPTIMIZE).unwrap_or_else(|| Preset::Reordered.name().into());
    let fast = preset.as_str() == Some(Preset::Fast.name());
    table.insert(OPTIMIZE.into(), preset);
    if let (false, Some(passes)) = (fast, table.entry("passes").or_insert_with(|| Table::new().into()).as_table_mut()) {
        for name in PRECISION {
            passes.entry(name).or_insert_with(|| Mode::Off.name().into());
        }
    }
}

fn json_table(value: &serde_json::Value) -> Result<Table, ConfigError> {
    Table::try_from(value).map_err(|e| ConfigError::Invalid(format!("a checkpoint's config: {e}")))
}

/// Every key with its section, and its value as text; of the passes those that are named.
fn flat(table: &Table) -> Vec<(String, String)> {
    let mut all = vec![];
    flatten("", &Value::Table(table.clone()), &mut all);
    all
}

fn flatten(prefix: &str, value: &Value, out: &mut Vec<(String, String)>) {
    match value {
        Value::Table(t) => {
            t.iter().for_each(|(k, v)| flatten(&if prefix.is_empty() { k.clone() } else { format!("{prefix}.{k}") }, v, out))
        }
        v => out.push((prefix.into(), v.to_string())),
    }
}

fn kind(v: &Value) -> &'static str {
    match v {
        Value::String(_) => "a string",
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a number",
        Value::Boolean(_) => "true or false",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::Table(_) => "a table",
    }
}

/// A path or several, one of which is a text.
fn paths(name: &str, value: Value) -> Result<Value, ConfigError> {
    let wrong = || ConfigError::Type {
        key: name.into(),
        want: "a path or a list of paths".into(),
        got: format!("{} ({})", kind(&value), shown(&value)),
    };
    Ok(Paths::from_value(&value).ok_or_else(wrong)?.to_value())
}

/// `value` in the type that the preset has there; whole numbers may stand for any number.
fn fitting(name: &str, slot: &Value, value: Value) -> Result<Value, ConfigError> {
    let wrong =
        |got: &Value| ConfigError::Type { key: name.into(), want: kind(slot).into(), got: format!("{} ({})", kind(got), shown(got)) };
    match (slot, value) {
        (Value::Float(_), Value::Integer(i)) => Ok(Value::Float(i as f64)),
        (Value::Integer(_), Value::Integer(i)) if i < 0 && name != "seed" => {
            Err(ConfigError::Type { key: name.into(), want: "a whole number that is not negative".into(), got: i.to_string() })
        }
        (Value::Array(old), Value::Array(new)) => {
            let like = old.first();
            let each = new.into_iter().map(|v| match like {
                Some(slot) => fitting(name, slot, v),
                // The lists that presets leave empty are lists of tokens.
                None => fitting(name, &Value::Integer(0), v),
            });
            Ok(Value::Array(each.collect::<Result<_, _>>()?))
        }
        (slot, value) if slot.same_type(&value) => Ok(value),
        (_, value) => Err(wrong(&value)),
    }
}

#[cfg(test)]
mod tests;
