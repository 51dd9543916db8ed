//! One section of a config: its keys, each declared once with its type, default, range and meaning. Reading, checking, the settings that a run
//! writes down, `kiln config` and docs/config.md are all made from that declaration.

use super::ConfigError;
use engine::passes::known;
use std::fmt;
use std::ops::RangeInclusive;
use toml::{Table, Value};

/// Declares a section.
///
/// ```
/// kiln::section! {
///     /// The shape of the model.
///     pub struct MyConfig {
///         /// Width of the residual stream.
///         pub dim: usize = 64, in 1..=4096;
///         /// Chance that an element is dropped while training.
///         pub dropout: f64 = 0.0, in 0.0..1.0;
///     }
/// }
/// use kiln::config::Section;
/// assert_eq!(MyConfig::keys("model").keys[0].about, "Width of the residual stream.");
/// assert!(MyConfig { dim: 0, ..MyConfig::default() }.in_range("model").is_err());
/// ```
///
/// A key without a doc comment does not compile:
///
/// ```compile_fail
/// kiln::section! {
///     /// The shape of the model.
///     pub struct MyConfig {
///         pub dim: usize = 64, in 1..=4096;
///     }
/// }
/// ```
///
/// After the range may follow, in brackets: `data` (0 is taken from the data), `free` (a resumed run may change it), `path` (made absolute, so that a
/// run finds it from any folder), `many` (of a path: there may be several), `base` (of section `model`: the folder in `model.base` decides it).
#[macro_export]
macro_rules! section {
    (
        $(#[doc = $about:literal])+
        $(#[derive($($derive:ident),+)])?
        $vis:vis struct $name:ident {
            $(
                $(#[doc = $doc:literal])+
                $key_vis:vis $key:ident: $type:ty = $default:expr $(, in $range:expr)? $(, [$($flag:ident)+])?;
            )+
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug $($(, $derive)+)?)]
        $vis struct $name {
            $($(#[doc = $doc])+ $key_vis $key: $type,)+
        }

        impl Default for $name {
            fn default() -> $name {
                $name { $($key: $default,)+ }
            }
        }

        impl $crate::config::Section for $name {
            fn keys(name: &'static str) -> $crate::config::Keys {
                let defaults = $name::default();
                let keys = vec![$({
                    #[allow(unused_mut)]
                    let mut key = $crate::config::Key::new::<$type>(stringify!($key), concat!($($doc),+), &defaults.$key);
                    $(key.range = $crate::config::Range::from($range);)?
                    $($(key.$flag = true;)+)?
                    key
                }),+];
                $crate::config::Keys { name, about: concat!($($about),+).trim(), keys }
            }

            fn values(&self) -> Vec<$crate::config::Value> {
                vec![$($crate::config::Setting::to_value(&self.$key)),+]
            }

            fn from_values(values: &[$crate::config::Value]) -> Option<$name> {
                let mut values = values.iter();
                Some($name { $($key: $crate::config::Setting::from_value(values.next()?)?,)+ })
            }
        }
    };
}

/// Lets an enum be a setting: each variant with the word that stands for it in a config.
#[macro_export]
macro_rules! choices {
    ($name:ident { $($variant:ident: $word:literal),+ $(,)? }) => {
        impl $crate::config::Setting for $name {
            fn kind() -> String {
                [$($word),+].join(" or ")
            }

            fn to_value(&self) -> $crate::config::Value {
                match self { $($name::$variant => $word),+ }.into()
            }

            fn from_value(value: &$crate::config::Value) -> Option<$name> {
                match value.as_str()? { $($word => Some($name::$variant),)+ _ => None }
            }
        }
    };
}

/// What `section!` makes of a struct.
pub trait Section: Default {
    /// The section's keys, under this name.
    fn keys(name: &'static str) -> Keys;
    /// A value for each key, in their order.
    fn values(&self) -> Vec<Value>;
    /// None where a value is not of its key's type.
    fn from_values(values: &[Value]) -> Option<Self>;

    /// Refuses a value outside of its range, by its key.
    fn in_range(&self, name: &'static str) -> Result<(), ConfigError> {
        let keys = Self::keys(name);
        keys.keys.iter().zip(self.values()).try_for_each(|(key, value)| key.check(name, &value, false))
    }

    /// From a section of a config. What is not there has its default; a size that the data knows may still be 0.
    fn read(name: &'static str, table: &Table) -> Result<Self, ConfigError> {
        let keys = Self::keys(name);
        if let Some(key) = table.keys().find(|key| keys.get(key).is_none()) {
            let near = known(key, keys.keys.iter().map(|k| k.name));
            return Err(ConfigError::Unknown { what: "key", name: format!("{name}.{key}"), near });
        }
        let mut values = vec![];
        for key in &keys.keys {
            let value = table.get(key.name).cloned().unwrap_or_else(|| key.default.clone());
            key.check(name, &value, true)?;
            values.push(value);
        }
        Self::from_values(&values).ok_or_else(|| ConfigError::Invalid(format!("{name} holds values of other types than its keys")))
    }

    /// From JSON, as golden files have it. Every key must be there.
    fn from_json(name: &'static str, json: &serde_json::Value) -> Result<Self, ConfigError> {
        let table = Table::try_from(json).map_err(|e| ConfigError::Invalid(format!("{name}: {e}")))?;
        match Self::keys(name).keys.iter().find(|key| !table.contains_key(key.name)) {
            Some(key) => Err(ConfigError::Invalid(format!("{name} has no '{}'", key.name))),
            None => Self::read(name, &table),
        }
    }
}

/// A type that a key can have.
pub trait Setting: Sized {
    /// In words.
    fn kind() -> String;
    fn to_value(&self) -> Value;
    fn from_value(value: &Value) -> Option<Self>;
}

macro_rules! whole {
    ($($type:ty),+) => {$(
        impl Setting for $type {
            fn kind() -> String {
                "whole number".into()
            }

            fn to_value(&self) -> Value {
                // TOML's numbers have a sign: what is beyond them is in no range.
                Value::Integer(i64::try_from(*self).unwrap_or(i64::MAX))
            }

            fn from_value(value: &Value) -> Option<$type> {
                value.as_integer()?.try_into().ok()
            }
        }
    )+};
}

whole!(i64, u32, u64, usize);

impl Setting for f64 {
    fn kind() -> String {
        "number".into()
    }

    fn to_value(&self) -> Value {
        Value::Float(*self)
    }

    fn from_value(value: &Value) -> Option<f64> {
        value.as_float().or(value.as_integer().map(|i| i as f64))
    }
}

impl Setting for f32 {
    fn kind() -> String {
        f64::kind()
    }

    /// The shortest number that is read as this one: 0.9, not 0.8999999761581421.
    fn to_value(&self) -> Value {
        Value::Float(self.to_string().parse().unwrap_or(*self as f64))
    }

    fn from_value(value: &Value) -> Option<f32> {
        f64::from_value(value).map(|v| v as f32)
    }
}

impl Setting for bool {
    fn kind() -> String {
        "true or false".into()
    }

    fn to_value(&self) -> Value {
        Value::Boolean(*self)
    }

    fn from_value(value: &Value) -> Option<bool> {
        value.as_bool()
    }
}

impl Setting for String {
    fn kind() -> String {
        "text".into()
    }

    fn to_value(&self) -> Value {
        Value::String(self.clone())
    }

    fn from_value(value: &Value) -> Option<String> {
        value.as_str().map(str::to_owned)
    }
}

/// `whole numbers`; choices are as they are.
fn plural(kind: String) -> String {
    if kind.ends_with("number") { kind + "s" } else { kind }
}

impl<T: Setting> Setting for Vec<T> {
    fn kind() -> String {
        format!("list of {}", plural(T::kind()))
    }

    fn to_value(&self) -> Value {
        Value::Array(self.iter().map(T::to_value).collect())
    }

    fn from_value(value: &Value) -> Option<Vec<T>> {
        value.as_array()?.iter().map(T::from_value).collect()
    }
}

impl<T: Setting, const N: usize> Setting for [T; N] {
    fn kind() -> String {
        format!("list of {N} {}", plural(T::kind()))
    }

    fn to_value(&self) -> Value {
        Value::Array(self.iter().map(T::to_value).collect())
    }

    fn from_value(value: &Value) -> Option<[T; N]> {
        Vec::from_value(value)?.try_into().ok()
    }
}

/// What a key's value may be; of a list, each of its elements.
#[derive(Clone, Debug)]
pub enum Range {
    Any,
    Whole(RangeInclusive<u64>),
    Number(RangeInclusive<f64>),
    /// Without its end.
    Below(std::ops::Range<f64>),
    OneOf(Vec<String>),
}

impl From<RangeInclusive<u64>> for Range {
    fn from(range: RangeInclusive<u64>) -> Range {
        Range::Whole(range)
    }
}

impl From<RangeInclusive<f64>> for Range {
    fn from(range: RangeInclusive<f64>) -> Range {
        Range::Number(range)
    }
}

impl From<std::ops::Range<f64>> for Range {
    fn from(range: std::ops::Range<f64>) -> Range {
        Range::Below(range)
    }
}

impl<T: ToString, const N: usize> From<[T; N]> for Range {
    fn from(words: [T; N]) -> Range {
        Range::OneOf(words.iter().map(T::to_string).collect())
    }
}

impl Range {
    fn contains(&self, value: &Value) -> bool {
        if let Value::Array(all) = value {
            return all.iter().all(|v| self.contains(v));
        }
        let number = f64::from_value(value);
        match self {
            Range::Any => true,
            Range::Whole(range) => value.as_integer().is_some_and(|v| u64::try_from(v).is_ok_and(|v| range.contains(&v))),
            Range::Number(range) => number.is_some_and(|v| range.contains(&v)),
            Range::Below(range) => number.is_some_and(|v| range.contains(&v)),
            Range::OneOf(words) => words.contains(&value.as_str().map_or_else(|| value.to_string(), str::to_owned)),
        }
    }
}

/// `from 1 to 1024`; empty where there is nothing to say.
impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Range::Any => Ok(()),
            Range::Whole(range) if range.end().is_power_of_two() && *range.end() > 1 << 31 => {
                write!(f, "from {} to 2^{}", range.start(), range.end().ilog2())
            }
            Range::Whole(range) => write!(f, "from {} to {}", range.start(), range.end()),
            Range::Number(range) => write!(f, "from {} to {}", short(*range.start()), short(*range.end())),
            Range::Below(range) => write!(f, "from {}, below {}", short(range.start), short(range.end)),
            Range::OneOf(words) => write!(f, "{}", words.join(" or ")),
        }
    }
}

/// 0.1, 1e12
fn short(number: f64) -> String {
    match number.abs() {
        size if size >= 1e6 || size > 0.0 && size < 1e-3 => format!("{number:e}"),
        _ => format!("{number:?}"),
    }
}

/// A value as one would write it: 1e-8, where TOML has all the zeros.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Float(number) if number.is_finite() => short(*number),
        Value::Array(all) => format!("[{}]", all.iter().map(shown).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

/// Everything there is to know about a key.
#[derive(Clone, Debug)]
pub struct Key {
    pub name: &'static str,
    /// What it means.
    pub about: &'static str,
    /// Its type, in words.
    pub kind: String,
    pub default: Value,
    pub range: Range,
    /// 0: taken from the data.
    pub data: bool,
    /// A resumed run may change it: it touches no number before the step at which it is changed.
    pub free: bool,
    /// A path, which is made absolute.
    pub path: bool,
    /// Of a path: there may be several.
    pub many: bool,
    /// Part of a model's shape, which the folder in `model.base` decides where there is one.
    pub base: bool,
    fits: fn(&Value) -> bool,
}

/// Sizes that f32 has, which everything is computed in; far beyond what any setting means.
const SIZES: RangeInclusive<f64> = 1e-38..=1e30;

impl Key {
    #[doc(hidden)]
    pub fn new<T: Setting>(name: &'static str, about: &'static str, default: &T) -> Key {
        let fits = |value: &Value| T::from_value(value).is_some();
        let (kind, default) = (T::kind(), default.to_value());
        Key {
            name,
            about: about.trim(),
            kind,
            default,
            range: Range::Any,
            data: false,
            free: false,
            path: false,
            many: false,
            base: false,
            fits,
        }
    }

    /// `may_ask`: 0 is in order where the data is still to be asked.
    pub fn check(&self, section: &str, value: &Value, may_ask: bool) -> Result<(), ConfigError> {
        let unfit = |v: &Value| v.as_float().is_some_and(|v| v != 0.0 && !SIZES.contains(&v.abs()));
        if unfit(value) || value.as_array().is_some_and(|all| all.iter().any(unfit)) {
            let (least, most) = (SIZES.start(), SIZES.end());
            let need = format!("0, or from {least:?} to {most:?} in size (numbers are f32)");
            return Err(ConfigError::Invalid(format!("{section}.{} = {}: {need}", self.name, shown(value))));
        }
        let asks = may_ask && self.data && value.as_integer() == Some(0);
        let need = match &self.range {
            _ if asks => return Ok(()),
            range if !range.contains(value) => range.to_string(),
            _ if !(self.fits)(value) => self.kind.clone(),
            _ => return Ok(()),
        };
        Err(ConfigError::Invalid(format!("{section}.{} = {}: {need}", self.name, shown(value))))
    }

    /// `whole number, from 1 to 1024`
    pub fn type_and_range(&self) -> String {
        let range = self.range.to_string();
        if range.is_empty() { self.kind.clone() } else { format!("{}, {range}", self.kind) }
    }

    /// The default as a config has it, or where it comes from.
    pub fn default_text(&self) -> String {
        match self.default {
            Value::Integer(0) if self.data => "from the data".into(),
            ref other => shown(other),
        }
    }
}

/// The keys of a section.
#[derive(Clone, Debug)]
pub struct Keys {
    pub name: &'static str,
    /// What the section is about.
    pub about: &'static str,
    pub keys: Vec<Key>,
}

impl Keys {
    pub fn get(&self, name: &str) -> Option<&Key> {
        self.keys.iter().find(|key| key.name == name)
    }

    /// Leaves out keys that have no meaning for a recipe.
    pub fn without(mut self, names: &[&str]) -> Keys {
        self.keys.retain(|key| !names.contains(&key.name));
        self
    }

    pub fn defaults(&self) -> Table {
        self.keys.iter().map(|key| (key.name.to_string(), key.default.clone())).collect()
    }
}
