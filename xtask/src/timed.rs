//! Runs the tests and notes how long each takes. `test --fast` leaves out those that took longest the last time.

use crate::log::Tests;
use crate::mpich::target_dir;
use crate::mpich::without::VARIABLE;
use crate::{Tool, root};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

/// How long a fast run's tests may take together, in seconds of one thread each: half a minute on two cores.
const BUDGET: f64 = 60.0;
/// Lines of the table.
const SHOWN: usize = 15;
/// Test binaries print times only with an unstable option, which stable ones accept from a process with this variable.
const RUNNER: &str = "target.'cfg(all())'.runner=['env', 'RUSTC_BOOTSTRAP=1']";

/// Seconds of each test, by name.
#[derive(Default)]
pub struct Times(BTreeMap<String, f64>);

impl Times {
    fn path() -> PathBuf {
        target_dir().join("test-times.txt")
    }

    /// Those of the last runs; none where there was none.
    pub fn last() -> Times {
        let text = std::fs::read_to_string(Times::path()).unwrap_or_default();
        Times(text.lines().filter_map(|l| l.split_once(' ')).filter_map(|(s, name)| Some((name.to_string(), s.parse().ok()?))).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn extend(&mut self, one: Option<(String, f64)>) {
        self.0.extend(one);
    }

    fn save(&self) -> Result<(), String> {
        let lines: String = self.slowest().iter().map(|(name, s)| format!("{s:.3} {name}\n")).collect();
        std::fs::write(Times::path(), lines).map_err(|e| format!("{}: {e}", Times::path().display()))
    }

    fn slowest(&self) -> Vec<(&str, f64)> {
        let mut all: Vec<(&str, f64)> = self.0.iter().map(|(name, s)| (name.as_str(), *s)).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all
    }

    /// The slowest, until the rest fits the budget.
    pub fn slow(&self) -> Vec<(&str, f64)> {
        let mut rest: f64 = self.0.values().sum();
        let is_slow = |(_, s): &(&str, f64)| {
            let over = rest > BUDGET;
            rest -= s;
            over
        };
        self.slowest().into_iter().take_while(is_slow).collect()
    }

    pub fn table(&self) -> String {
        let rows: String = self.slowest().iter().take(SHOWN).map(|(name, s)| format!("{s:>8.1} s  {name}\n")).collect();
        format!(
            "\nthe slowest of {} tests ({:.0} s in all, on as many threads as there are cores):\n{rows}",
            self.0.len(),
            self.0.values().sum::<f64>()
        )
    }
}

/// `test data::a_name ... ok <1.234s>`
pub fn timed(line: &str) -> Option<(String, f64)> {
    let (name, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let seconds = result.strip_suffix("s>")?.rsplit_once('<')?.1.parse().ok()?;
    Some((name.trim_end_matches(" - should panic").to_string(), seconds))
}

/// All tests but these, doc tests apart; they do without the tools that are missing.
pub fn command(skipped: &[String], lacks: &[Tool]) -> Command {
    let mut cargo = crate::cargo_command();
    cargo.args(["test", "--workspace", "--lib", "--bins", "--tests", "--no-fail-fast", "--config", RUNNER]);
    cargo.args(["--", "-Z", "unstable-options", "--report-time"]);
    let given = std::env::var(VARIABLE).ok().filter(|given| !given.is_empty());
    let names: Vec<String> = given.into_iter().chain(lacks.iter().map(|l| l.0.to_string())).collect();
    cargo.env(VARIABLE, names.join(","));
    if !skipped.is_empty() {
        cargo.arg("--exact").args(skipped.iter().flat_map(|name| ["--skip", name.as_str()]));
    }
    cargo
}

/// Runs all tests but these; what each took is kept for the next fast run, also if some failed.
pub fn run(skipped: &[String], lacks: &[Tool], tests: &mut Tests) -> Result<(), String> {
    let done = tests.run(command(skipped, lacks).current_dir(root()));
    if tests.times.is_empty() {
        return done.and(Err("no test said how long it took: libtest's --report-time is not what it was".into()));
    }
    let mut all = Times::last();
    all.0.retain(|name, _| skipped.contains(name));
    all.0.extend(tests.times.0.iter().map(|(name, s)| (name.clone(), *s)));
    all.save().and(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_what_libtest_prints() {
        assert_eq!(timed("test data::a_name ... ok <1.234s>"), Some(("data::a_name".into(), 1.234)));
        assert_eq!(timed("test panics - should panic ... ok <0.000s>"), Some(("panics".into(), 0.0)));
        assert_eq!(timed("test data::a_name ... FAILED <2.5s>"), Some(("data::a_name".into(), 2.5)));
        assert_eq!(timed("test data::a_name ... ok"), None);
        assert_eq!(timed("running 3 tests"), None);
    }

    #[test]
    fn the_slowest_are_left_out_until_the_rest_fits() {
        let of = |share: f64| share * BUDGET;
        let times = Times([("a", of(0.8)), ("b", of(0.7)), ("c", of(0.6)), ("d", 1.0)].map(|(n, s)| (n.to_string(), s)).into());
        assert_eq!(times.slow(), [("a", of(0.8)), ("b", of(0.7))]);
        assert!(Times([("a".to_string(), BUDGET)].into()).slow().is_empty());
    }
}
