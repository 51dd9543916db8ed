//! What `--data` and data.path name: files, folders and patterns, read together as one set, or mixed by weight.

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::{DataError, Dataset, Mixture, Shares, Source, Split, glob, joined};
use crate::config::{Setting, Value};

/// The value of a key that names one path or several, as it was written: each may be a pattern, and end in a weight.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Paths(Vec<String>);

/// More entries than anybody writes.
const MOST_ENTRIES: usize = 1024;

impl Setting for Paths {
    fn kind() -> String {
        "path or list of paths".into()
    }

    /// One path is a text, as it is where a key takes no more.
    fn to_value(&self) -> Value {
        match &self.0[..] {
            [] => Value::String(String::new()),
            [one] => Value::String(one.clone()),
            all => Value::Array(all.iter().cloned().map(Value::String).collect()),
        }
    }

    fn from_value(value: &Value) -> Option<Paths> {
        match value {
            Value::String(none) if none.is_empty() => Some(Paths::default()),
            Value::String(one) => Some(Paths(vec![one.clone()])),
            Value::Array(all) => {
                let texts = all.iter().map(|v| v.as_str().filter(|text| !text.is_empty()).map(str::to_owned));
                texts.collect::<Option<Vec<String>>>().map(Paths)
            }
            _ => None,
        }
    }
}

impl From<&str> for Paths {
    fn from(path: &str) -> Paths {
        Paths(Some(path).filter(|path| !path.is_empty()).map(String::from).into_iter().collect())
    }
}

impl From<Vec<String>> for Paths {
    fn from(paths: Vec<String>) -> Paths {
        Paths(paths)
    }
}

/// As they were written, for people.
impl fmt::Display for Paths {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&listed(&self.0))
    }
}

/// `a, b, c and 4 more`
pub fn listed(names: &[impl fmt::Display]) -> String {
    let shown: Vec<String> = names.iter().take(3).map(|name| name.to_string()).collect();
    let more = names.len() - shown.len();
    shown.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
}

/// What some paths lead to.
#[derive(Debug, Clone)]
pub struct Chosen {
    /// The parts of a mixture; one part where nothing is weighted.
    pub parts: Vec<Part>,
}

/// Files and folders that are one set.
#[derive(Debug, Clone)]
pub struct Part {
    /// As it was written, without its weight.
    pub name: String,
    /// Its share of all items, which add up to 1.
    pub share: f64,
    pub paths: Vec<PathBuf>,
}

impl Paths {
    /// Each as it was written, changed.
    pub fn map<E>(&self, change: impl Fn(&str) -> Result<String, E>) -> Result<Paths, E> {
        self.0.iter().map(|path| change(path)).collect::<Result<_, E>>().map(Paths)
    }

    /// Each as it was written.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Nothing is named: data is then generated.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Expands patterns and splits off weights. What is neither a pattern nor there is left to whoever reads it.
    pub fn find(&self) -> Result<Chosen, DataError> {
        let wrong = |entry: &str, need: String| DataError::Setting { what: "data.path", value: entry.into(), need };
        if self.0.len() > MOST_ENTRIES {
            return Err(wrong(
                &self.to_string(),
                format!("{} are named, and at most {MOST_ENTRIES} can be (name folders or a pattern)", self.0.len()),
            ));
        }
        let entries: Vec<(&str, Option<f64>)> = self.0.iter().map(|entry| split(entry)).collect();
        if let Some((entry, (_, weight))) = self.0.iter().zip(&entries).find(|(_, e)| e.1.is_some_and(|w| !(w.is_finite() && w > 0.0))) {
            let need =
                format!("its weight is {}: weights are finite and above 0 (leave out what is not to be read)", weight.unwrap_or_default());
            return Err(wrong(entry, need));
        }
        let weighted = entries.iter().filter(|e| e.1.is_some()).count();
        if let Some((entry, _)) = entries.iter().find(|e| weighted > 0 && e.1.is_none()) {
            let need = format!("it has no weight, and {weighted} of {} have one: give all a weight (PATH:0.5), or none", entries.len());
            return Err(wrong(entry, need));
        }
        let expand = |entry: &str| glob::expand(entry).map_err(|need| wrong(entry, need));
        if weighted < 2 {
            let mut paths = vec![];
            for (entry, _) in &entries {
                paths.extend(expand(entry)?);
            }
            let name = match &entries[..] {
                [(one, _)] => one.to_string(),
                _ => listed(&entries.iter().map(|e| e.0).collect::<Vec<_>>()),
            };
            return Ok(Chosen { parts: vec![Part { name, share: 1.0, paths: once(paths) }] });
        }
        let weights: Vec<f64> = entries.iter().filter_map(|e| e.1).collect();
        // Before anything is read. Large weights could add up to infinity.
        Shares::new(&weights, 0).map_err(|need| wrong(&self.to_string(), need))?;
        let largest = weights.iter().fold(0.0, |a: f64, b| a.max(*b));
        let all: f64 = weights.iter().map(|w| w / largest).sum();
        let parts = entries
            .iter()
            .zip(&weights)
            .map(|((entry, _), weight)| Ok(Part { name: entry.to_string(), share: weight / largest / all, paths: once(expand(entry)?) }));
        Ok(Chosen { parts: parts.collect::<Result<_, DataError>>()? })
    }

    /// Whether these are folders that `kiln data prepare` made, as far as they can be looked at.
    pub fn are_prepared(&self) -> bool {
        !self.is_empty() && self.find().is_ok_and(|chosen| chosen.prepared().unwrap_or(false))
    }
}

/// A path, and the weight behind its last colon. A path that is there as it was written has none.
fn split(entry: &str) -> (&str, Option<f64>) {
    if Path::new(entry).exists() {
        return (entry, None);
    }
    let parted = entry.rsplit_once(':').filter(|(path, _)| !path.is_empty());
    parted.and_then(|(path, weight)| Some((path, Some(weight.parse().ok()?)))).unwrap_or((entry, None))
}

/// Each path once, where it is first named.
fn once(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut seen = HashSet::new();
    paths.into_iter().filter(|path| seen.insert(path.canonicalize().unwrap_or_else(|_| path.clone()))).collect()
}

impl Part {
    /// The same as all that was chosen.
    pub fn alone(&self) -> Chosen {
        Chosen { parts: vec![Part { share: 1.0, ..self.clone() }] }
    }

    /// The only path, or the part's name, for messages.
    pub fn path(&self) -> PathBuf {
        match &self.paths[..] {
            [one] => one.clone(),
            _ => self.name.clone().into(),
        }
    }

    /// Whether these are folders that `kiln data prepare` made: all of them, or none.
    pub fn prepared(&self) -> Result<bool, DataError> {
        let is = |path: &&PathBuf| path.join(Dataset::FILE).exists();
        let Some(first) = self.paths.iter().find(is) else { return Ok(false) };
        match self.paths.iter().find(|path| !is(path)) {
            None => Ok(true),
            Some(other) => Err(differ(first, other)),
        }
    }
}

fn differ(prepared: &Path, other: &Path) -> DataError {
    let reason = format!(
        "is no folder that kiln data prepare made, and {} is one: they are not read together (name either, or prepare both)",
        prepared.display()
    );
    DataError::Examples { path: other.to_owned(), reason }
}

impl Chosen {
    /// Whether parts are mixed by weight.
    pub fn is_mixture(&self) -> bool {
        self.parts.len() > 1
    }

    /// Every path of every part.
    pub fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.parts.iter().flat_map(|part| &part.paths)
    }

    /// Whether these are folders that `kiln data prepare` made: all of them, or none.
    pub fn prepared(&self) -> Result<bool, DataError> {
        let kinds: Vec<bool> = self.parts.iter().map(Part::prepared).collect::<Result<_, _>>()?;
        let first = |is: bool| self.parts.iter().zip(&kinds).find(|(_, own)| **own == is).and_then(|(part, _)| part.paths.first());
        match (first(true), first(false)) {
            (Some(prepared), Some(other)) => Err(differ(prepared, other)),
            (prepared, _) => Ok(prepared.is_some()),
        }
    }

    /// The parts' own sources as one: to learn from by weight, to validate with one behind the other.
    pub fn source(&self, split: Split, seed: u64, parts: Vec<Arc<dyn Source>>) -> Result<Arc<dyn Source>, DataError> {
        match split == Split::Train && self.is_mixture() {
            true => Ok(Arc::new(Mixture::new(self.shares(seed)?, parts, seed))),
            false => Ok(joined(parts)),
        }
    }

    /// Which part each item of the mixture is of.
    pub fn shares(&self, seed: u64) -> Result<Shares, DataError> {
        let weights: Vec<f64> = self.parts.iter().map(|part| part.share).collect();
        Shares::new(&weights, seed).map_err(|need| DataError::Setting { what: "data.path", value: self.to_string(), need })
    }

    /// A number that changes with what the parts hold, as theirs do, and with their weights.
    pub fn fingerprint(&self, parts: &[u64]) -> Result<u64, DataError> {
        let weights = if self.is_mixture() { self.shares(0)?.weights() } else { vec![] };
        Ok(fingerprint(&[parts, &weights].concat()))
    }
}

/// One number of several; of one, itself.
pub(super) fn fingerprint(parts: &[u64]) -> u64 {
    if let [one] = parts {
        return *one;
    }
    let mut hash = Xxh3::new();
    parts.iter().for_each(|part| hash.update(&part.to_le_bytes()));
    hash.digest()
}

/// `90% wiki, 10% math`, or the name of the only part.
impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match &self.parts[..] {
            [one] => f.write_str(&one.name),
            all => f.write_str(&all.iter().map(|part| format!("{} {}", percent(part.share), part.name)).collect::<Vec<_>>().join(", ")),
        }
    }
}

/// A share in three figures: 90%, 0.25%
pub fn percent(share: f64) -> String {
    let whole = 100.0 * share;
    let digits = if whole >= 99.95 || whole <= 0.0 { 0 } else { (2.0 - whole.log10().floor()).clamp(0.0, 9.0) as usize };
    let text = format!("{whole:.digits$}");
    let short = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{short}%")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(all: &[String]) -> Paths {
        Paths(all.to_vec())
    }

    #[test]
    fn one_path_is_a_text_and_several_are_a_list() {
        let of = |value: Value| Paths::from_value(&value);
        assert_eq!(of("".into()), Some(Paths::default()));
        assert_eq!(of("a".into()), Some(Paths::from("a")));
        assert_eq!(of(Value::Array(vec!["a".into()])).unwrap().to_value(), "a".into());
        let two = Value::Array(vec!["a".into(), "b".into()]);
        assert_eq!(of(two.clone()).unwrap().to_value(), two);
        assert_eq!(of(Value::Array(vec![])).unwrap().to_value(), "".into());
        for wrong in [Value::Integer(1), Value::Array(vec!["a".into(), 1.into()]), Value::Array(vec!["a".into(), "".into()])] {
            assert_eq!(of(wrong), None);
        }
        assert_eq!(listed(&["a", "b", "c", "d", "e"]), "a, b, c and 2 more");
    }

    /// Three files: "a", "b.jsonl" and "c:0.5", whose name looks like a path with a weight.
    #[test]
    fn a_number_behind_the_last_colon_is_a_weight_unless_a_file_is_called_so() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        ["a", "b.jsonl", "c:0.5"].iter().for_each(|name| std::fs::write(at(name), "").unwrap());
        let parts = |names: &[&str]| {
            let chosen = paths(&names.iter().map(|name| at(name)).collect::<Vec<_>>()).find()?;
            let one = |part: &Part| {
                ((part.share * 1e6).round() / 1e6, part.paths.iter().map(|p| p.file_name().unwrap().to_str().unwrap().into()).collect())
            };
            Ok::<Vec<(f64, Vec<String>)>, DataError>(chosen.parts.iter().map(one).collect())
        };
        let own = |share: f64, names: &[&str]| (share, names.iter().map(|name| name.to_string()).collect::<Vec<_>>());
        assert_eq!(parts(&["a:9", "b.jsonl:1.0"]).unwrap(), [own(0.9, &["a"]), own(0.1, &["b.jsonl"])]);
        assert_eq!(parts(&["a", "b.jsonl", "c:0.5"]).unwrap(), [own(1.0, &["a", "b.jsonl", "c:0.5"])], "it is there as it was written");
        assert_eq!(parts(&["c:0.5:3", "a:1e0"]).unwrap(), [own(0.75, &["c:0.5"]), own(0.25, &["a"])], "the last colon");
        assert_eq!(parts(&["a:x"]).unwrap(), [own(1.0, &["a:x"])], "no number: whoever reads it says that it is not there");
        assert_eq!(parts(&["a:0.2"]).unwrap(), [own(1.0, &["a"])], "a mixture of one is that one");
        assert_eq!(parts(&["*:1", "c*:1"]).unwrap(), [own(0.5, &["a", "b.jsonl", "c:0.5"]), own(0.5, &["c:0.5"])]);
        assert_eq!(parts(&["a", "*", "b.jsonl"]).unwrap(), [own(1.0, &["a", "b.jsonl", "c:0.5"])], "each once");
        for (names, need) in [
            (&["a:1", "b.jsonl"][..], "/b.jsonl: it has no weight, and 1 of 2 have one: give all a weight"),
            (&["a:0", "b.jsonl:1"], "/a:0: its weight is 0: weights are finite and above 0"),
            (&["a:-1", "b.jsonl:1"], "its weight is -1"),
            (&["a:inf", "b.jsonl:1"], "its weight is inf"),
            (&["a:nan"], "its weight is NaN"),
            (&["a:1e-30", "b.jsonl:1"], "less than a 2^32th"),
            (&["*.csv:0.5", "a:1"], "/*.csv: nothing matches this pattern"),
        ] {
            let error = parts(names).unwrap_err().to_string();
            assert!(error.starts_with("data.path = ") && error.contains(need), "{error}");
        }
        let many = vec!["a".to_string(); MOST_ENTRIES + 1];
        assert!(paths(&many).find().unwrap_err().to_string().contains("1025 are named"));
        let large = [at("a:1e308"), at("b.jsonl:1e308")];
        assert_eq!(paths(&large).find().unwrap().parts[0].share, 0.5);
    }

    #[test]
    fn shares_are_shown_in_three_figures() {
        let shown = [0.9, 0.1, 0.025, 1.0 / 3.0, 0.0012345, 1.0, 0.99999].map(percent);
        assert_eq!(shown, ["90%", "10%", "2.5%", "33.3%", "0.123%", "100%", "100%"]);
    }

    /// A resumed run is told other data, and other weights, by it.
    #[test]
    fn a_mixtures_fingerprint_is_of_its_parts_and_its_weights() {
        let of = |weights: &[&str], parts: &[u64]| {
            let all: Vec<String> = weights.iter().map(|w| format!("none{w}")).collect();
            paths(&all).find().unwrap().fingerprint(parts).unwrap()
        };
        assert_eq!(of(&[""], &[7]), 7);
        let usual = of(&[":3", ":1"], &[7, 8]);
        assert_eq!(usual, of(&[":0.75", ":0.25"], &[7, 8]));
        assert!([of(&[":3", ":1"], &[7, 9]), of(&[":3", ":1"], &[8, 7]), of(&[":3", ":2"], &[7, 8])].iter().all(|other| *other != usual));
    }
}
