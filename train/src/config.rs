//! What a run is made from: a preset, a file over it, `--set` over that. Every key stands in the presets, so an unknown key or
//! a wrong type is known by comparing with them.

use engine::Switches;
use engine::passes::known;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

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

/// Refuses a number outside of what it can mean, by its key, value and range.
pub fn within(key: &str, value: f64, range: RangeInclusive<f64>) -> Result<(), ConfigError> {
    // A bound that was read as f32 is a little beside itself.
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
/// A loss beside others, or a rate: larger ones overflow what they are multiplied with.
pub const WEIGHT: RangeInclusive<f64> = 0.0..=1e6;

/// Steps are counted exactly up to here in f64, in which rates and metrics are.
const MOST_STEPS: u64 = 1 << 53;

/// Sizes that f32 has, which everything is computed in; far beyond what any setting means.
const SIZES: RangeInclusive<f64> = 1e-38..=1e30;

/// Every number of a section, by its key.
fn numbers<'a>(key: String, value: &'a Value, out: &mut Vec<(String, &'a Value)>) {
    match value {
        Value::Table(t) => t.iter().for_each(|(k, v)| numbers(format!("{key}.{k}"), v, out)),
        Value::Array(all) => all.iter().for_each(|v| numbers(key.clone(), v, out)),
        _ => out.push((key, value)),
    }
}

/// Optimizer, schedule and cadence: the same for every recipe.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    pub steps: u64,
    /// Steps that the schedule spans; more steps than this stretch it.
    pub horizon: u64,
    /// Sequences of one micro-batch.
    pub batch: usize,
    /// Micro-batches of one step.
    pub accumulate: usize,
    pub learning_rate: f64,
    pub schedule: String,
    pub warmup: u64,
    /// wsd: the share of the horizon over which the rate falls at the end.
    pub decay_share: f64,
    /// The rate at the end, as a share of the highest.
    pub final_rate: f64,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    pub clip: f32,
    pub log_every: u64,
    /// Steps; 0: once an epoch, in recipes that count epochs.
    pub eval_every: u64,
    /// 0: all of the validation data.
    pub eval_batches: u64,
    pub save_every: u64,
    pub keep: usize,
}

/// For models of one's own; kiln's presets name every key.
impl Default for TrainConfig {
    fn default() -> TrainConfig {
        TrainConfig {
            steps: 1000,
            horizon: 0,
            batch: 16,
            accumulate: 1,
            learning_rate: 1e-3,
            schedule: "cosine".into(),
            warmup: 0,
            decay_share: 0.2,
            final_rate: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            clip: 1.0,
            log_every: 10,
            eval_every: 100,
            eval_batches: 8,
            save_every: 100,
            keep: 3,
        }
    }
}

impl TrainConfig {
    pub fn check(&self) -> Result<(), ConfigError> {
        let bad = |m: String| Err(ConfigError::Invalid(m));
        // Draws tell 2^15 micro-batches apart.
        for (name, v, most) in [("batch", self.batch, 1 << 20), ("accumulate", self.accumulate, 1 << 15)] {
            if !(1..=most).contains(&v) {
                return bad(format!("train.{name} = {v}: from 1 to {most}"));
            }
        }
        if !["cosine", "wsd", "constant"].contains(&self.schedule.as_str()) {
            return bad(format!("train.schedule is '{}': cosine, wsd (warm-up, stable, decay) or constant", self.schedule));
        }
        let shares = [("decay_share", self.decay_share), ("final_rate", self.final_rate)];
        if let Some((name, v)) = shares.iter().find(|(_, v)| !(0.0..=1.0).contains(v)) {
            return bad(format!("train.{name} = {v} is not between 0 and 1"));
        }
        for (name, v) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&v) {
                return bad(format!("train.{name} = {v} is not in [0, 1)"));
            }
        }
        within("train.learning_rate", self.learning_rate, 1e-38..=1e6)?;
        within("train.eps", self.eps as f64, 1e-38..=1.0)?;
        within("train.clip", self.clip as f64, 1e-38..=1e30)?;
        within("train.weight_decay", self.weight_decay as f64, 0.0..=1e3)?;
        let steps = [
            ("steps", self.steps, 0),
            ("horizon", self.horizon, 0),
            ("warmup", self.warmup, 0),
            ("log_every", self.log_every, 1),
            ("eval_every", self.eval_every, 0),
            ("eval_batches", self.eval_batches, 0),
            ("save_every", self.save_every, 1),
        ];
        if let Some((name, v, least)) = steps.iter().find(|(_, v, least)| !(*least..=MOST_STEPS).contains(v)) {
            return bad(format!("train.{name} = {v}: from {least} to {MOST_STEPS}"));
        }
        Ok(())
    }
}

/// Where tokens come from.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// A folder that `kiln data prepare` made; empty: generated text.
    pub path: String,
    /// Tokens that are not trained on when they are the target.
    pub ignore_tokens: Vec<u32>,
}

/// A fully resolved configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    table: Table,
}

const SECTIONS: [&str; 4] = ["model", "data", "objective", "train"];

impl Config {
    /// From a preset's text.
    pub fn preset(recipe: &str, preset: &str, text: &str) -> Config {
        let mut table: Table = text.parse().unwrap_or_else(|e| panic!("preset {recipe}-{preset}: {e}"));
        table.insert("recipe".into(), recipe.into());
        table.insert("preset".into(), preset.into());
        table.entry("seed").or_insert(Value::Integer(0));
        // Weights that the run began with: a run that starts over begins with them again.
        table.entry("init_from").or_insert(Value::String(String::new()));
        table.entry("passes").or_insert(Value::Table(Table::new()));
        Config { table }
    }

    pub fn from_json(value: &serde_json::Value) -> Result<Config, ConfigError> {
        let table = Table::try_from(value).map_err(|e| ConfigError::Invalid(format!("a checkpoint's config: {e}")))?;
        Ok(Config { table })
    }

    /// Lays a TOML file over this.
    pub fn overlay_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let table = read_file(path)?;
        self.overlay(table).map_err(|e| ConfigError::Parse { path: path.into(), cause: e.to_string() })
    }

    /// A run's own config file over the preset that it names: every key must be there.
    pub fn overlay_run(&mut self, path: &Path) -> Result<(), ConfigError> {
        let table = read_file(path)?;
        let keys = |t: &Table| {
            let mut all = vec![];
            flatten("", &Value::Table(t.clone()), &mut all);
            all.into_iter().map(|(k, _)| k).filter(|k| !k.starts_with("passes.")).collect::<Vec<_>>()
        };
        let have = keys(&table);
        self.overlay_file(path)?;
        match keys(&self.table).into_iter().find(|k| !have.contains(k)) {
            Some(key) => Err(ConfigError::Parse { path: path.into(), cause: format!("has lost its key '{key}'") }),
            None => Ok(()),
        }
    }

    fn overlay(&mut self, table: Table) -> Result<(), ConfigError> {
        for (key, value) in table {
            match key.as_str() {
                "recipe" | "preset" => {} // read before, to choose this preset
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
        let table = path.iter().fold(&mut self.table, |t, k| t.get_mut(k).and_then(Value::as_table_mut).expect("checked on the way"));
        let name = full.join(".");
        let names: Vec<String> = table.keys().cloned().collect();
        let Some(slot) = table.get_mut(&key) else {
            return Err(ConfigError::Unknown { what: "key", name, near: known(&key, names.iter().map(|s| s.as_str())) });
        };
        if let Value::Table(inner) = &value
            && slot.is_table()
        {
            for (k, v) in inner {
                self.lay(&full, k.clone(), v.clone())?;
            }
            return Ok(());
        }
        *slot = fitting(&name, slot, value)?;
        Ok(())
    }

    /// `key` may leave out its section where that is clear.
    pub fn set(&mut self, assignment: &str) -> Result<(), ConfigError> {
        let (key, text) = assignment.split_once('=').ok_or_else(|| ConfigError::Set(assignment.into()))?;
        let (key, text) = (key.trim(), text.trim());
        let parsed: Option<Value> = format!("v = {text}").parse::<Table>().ok().filter(|t| t.len() == 1).and_then(|mut t| t.remove("v"));
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
                let near = known(section, SECTIONS.into_iter().chain(["passes"]));
                return Err(ConfigError::Unknown { what: "section", name: section.into(), near });
            }
            return self.lay(&[section.to_string()], rest.to_string(), value);
        }
        if self.table.get(key).is_some_and(|v| !v.is_table()) && !["recipe", "preset"].contains(&key) {
            return self.lay(&[], key.into(), value);
        }
        let has = |s: &&str| self.table.get(*s).and_then(Value::as_table).is_some_and(|t| t.contains_key(key));
        let sections: Vec<&str> = SECTIONS.into_iter().filter(has).collect();
        match sections[..] {
            [one] => self.lay(&[one.to_string()], key.into(), value),
            [] => {
                let all = SECTIONS.into_iter().filter_map(|s| self.table.get(s)?.as_table()).flat_map(|t| t.keys()).map(|s| s.as_str());
                Err(ConfigError::Unknown { what: "key", name: key.into(), near: known(key, all) })
            }
            _ => Err(ConfigError::Ambiguous { key: key.into(), sections: sections.join(", ") }),
        }
    }

    /// `NAME=off|auto|require[,setting=value]`
    pub fn set_pass_argument(&mut self, argument: &str) -> Result<(), ConfigError> {
        let (name, value) = argument.split_once('=').ok_or_else(|| ConfigError::PassArgument(argument.into()))?;
        self.set_pass(name.trim(), value.trim())
    }

    fn set_pass(&mut self, name: &str, value: &str) -> Result<(), ConfigError> {
        Switches::default().set(name, value)?;
        let passes = self.table.get_mut("passes").and_then(Value::as_table_mut).expect("every config has it");
        passes.insert(name.into(), value.into());
        Ok(())
    }

    pub fn switches(&self) -> Result<Switches, ConfigError> {
        let mut s = Switches::default();
        for (name, v) in self.table.get("passes").and_then(Value::as_table).into_iter().flatten() {
            s.set(name, v.as_str().unwrap_or_default())?;
        }
        Ok(s)
    }

    pub fn section<T: DeserializeOwned>(&self, name: &str) -> Result<T, ConfigError> {
        let value = self.table.get(name).cloned().unwrap_or(Value::Table(Table::new()));
        let mut all = vec![];
        numbers(name.into(), &value, &mut all);
        let unfit = |v: &Value| v.as_float().is_some_and(|v| v != 0.0 && !SIZES.contains(&v.abs()));
        if let Some((key, v)) = all.iter().find(|(_, v)| unfit(v)) {
            let (least, most) = (SIZES.start(), SIZES.end());
            return Err(ConfigError::Invalid(format!("{key} = {v}: 0, or from {least:?} to {most:?} in size (numbers are f32)")));
        }
        serde_path_to_error::deserialize(value).map_err(|e| {
            let key = e.path().to_string();
            ConfigError::Invalid(format!("{name}{} {}", if key == "." { ":".into() } else { format!(".{key}:") }, e.inner().message()))
        })
    }

    pub fn text(&self, key: &str) -> &str {
        self.table.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    /// TOML's numbers have a sign: the upper half of seeds is kept as negative ones.
    pub fn set_seed(&mut self, seed: u64) {
        self.table.insert("seed".into(), Value::Integer(seed as i64));
    }

    /// A run finds its data, and the model that it begins with, from any folder.
    pub fn absolute_paths(&mut self) -> Result<(), ConfigError> {
        for (section, key) in [("data", "path"), ("model", "base"), ("objective", "encoder")] {
            let path = self.table.get(section).and_then(|d| d.get(key)).and_then(Value::as_str).unwrap_or_default();
            if !path.is_empty() {
                let full = std::path::absolute(path).map_err(|cause| ConfigError::Read { path: path.into(), cause })?;
                self.set_value(&format!("{section}.{key}"), full.display().to_string().into())?;
            }
        }
        Ok(())
    }

    /// Where the data is, if it is not generated.
    pub fn data_path(&self) -> Option<&str> {
        self.table.get("data")?.get("path")?.as_str().filter(|path| !path.is_empty())
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
        let flat = |c: &Config| {
            let mut all = vec![];
            flatten("", &Value::Table(c.table.clone()), &mut all);
            all
        };
        let (a, b) = (flat(self), flat(other));
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

/// `value` in the type that the preset has there; whole numbers may stand for any number.
fn fitting(name: &str, slot: &Value, value: Value) -> Result<Value, ConfigError> {
    let wrong = |got: &Value| ConfigError::Type { key: name.into(), want: kind(slot).into(), got: format!("{} ({got})", kind(got)) };
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
mod tests {
    use super::*;

    fn base() -> Config {
        Config::preset("r", "p", "[model]\ndim = 64\ncapacity = [1.0, 0.5]\n[data]\npath = ''\n[train]\nlearning_rate = 1e-3\nsteps = 5\n")
    }

    #[test]
    fn keys_and_types_are_compared_with_the_preset() {
        let error = |s: &str| base().set(s).unwrap_err().to_string();
        assert_eq!(error("model.dmi=3"), "there is no key 'model.dmi'; did you mean 'dim'? (known: dim, capacity)");
        assert_eq!(
            error("learning_rat=3"),
            "there is no key 'learning_rat'; did you mean 'learning_rate'? (known: learning_rate, capacity, dim, path, steps)"
        );
        assert_eq!(error("dim=large"), "'model.dim' wants a whole number, not a string (\"large\")");
        assert_eq!(error("dim=-1"), "'model.dim' wants a whole number that is not negative, not -1");
        assert_eq!(
            error("modle.dim=3"),
            "there is no section 'modle'; did you mean 'model'? (known: model, data, train, passes, objective)"
        );
        assert_eq!(error("zzzzzzzzzzzz.dim=3"), "there is no section 'zzzzzzzzzzzz' (known: model, data, objective, train, passes)");
        assert_eq!(error("dim"), "--set wants key=value, not 'dim'");
        assert!(error("capacity=[1.0, \"a\"]").contains("'model.capacity' wants a number"));
        assert!(error("passes.fuse-pointwise=on").contains("not off, auto or require"));
    }

    #[test]
    fn values_are_set() {
        let mut c = base();
        for s in ["dim=128", "learning_rate=1", "capacity=[1, 0.25, 0.125]", "path=a folder", "passes.recompute=auto,what=blocks"] {
            c.set(s).unwrap();
        }
        let d: Vec<String> = base().differences(&c).into_iter().map(|d| format!("{}: {} -> {}", d.0, d.1, d.2)).collect();
        assert_eq!(d.len(), 5, "{d:?}");
        assert!(c.to_toml().contains("dim = 128") && c.to_toml().contains("learning_rate = 1.0"));
        let mut again = base();
        again.overlay(c.to_toml().parse().unwrap()).unwrap();
        assert_eq!(again, c);
        assert_eq!(Config::from_json(&c.to_json()).unwrap(), c);
    }
}
