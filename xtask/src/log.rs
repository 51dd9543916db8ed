//! What `cargo xtask test` says: a screen here, and every line in a file.

use crate::mpich::target_dir;
use crate::timed::{Times, timed};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Lines of a failed test that are shown at the end, and characters of each.
const REASON: usize = 8;
const WIDTH: usize = 200;
/// After so many tests a line says that they passed.
const BETWEEN: usize = 50;

static FILE: OnceLock<File> = OnceLock::new();

pub fn path() -> PathBuf {
    target_dir().join("test-log.txt")
}

/// From here on everything that a command prints is also kept in the file.
pub fn keep() -> Result<(), String> {
    let file = File::create(path()).map_err(|e| format!("{}: {e}", path().display()))?;
    let _ = FILE.set(file);
    Ok(())
}

pub fn is_kept() -> bool {
    FILE.get().is_some()
}

/// Runs a command and hands out what it prints, errors too, line by line.
pub fn stream(command: &mut Command, mut line: impl FnMut(&str)) -> Result<(), String> {
    let failed = |what: &Command, e: &dyn std::fmt::Display| format!("{what:?}: {e}");
    let (reader, writer) = std::io::pipe().map_err(|e| failed(command, &e))?;
    let errors = writer.try_clone().map_err(|e| failed(command, &e))?;
    let child = command.stdout(writer).stderr(errors).spawn();
    // The command has the pipe's other end, which must be closed for the pipe to end.
    command.stdout(Stdio::inherit()).stderr(Stdio::inherit());
    let mut child = child.map_err(|e| failed(command, &e))?;
    let (mut reader, mut bytes) = (BufReader::new(reader), vec![]);
    while reader.read_until(b'\n', &mut bytes).map_err(|e| failed(command, &e))? > 0 {
        let text = String::from_utf8_lossy(&bytes);
        if let Some(mut file) = FILE.get() {
            file.write_all(text.as_bytes()).map_err(|e| failed(command, &e))?;
        }
        line(text.trim_end());
        bytes.clear();
    }
    match child.wait() {
        Ok(s) if s.success() => Ok(()),
        Ok(s) => Err(failed(command, &s)),
        Err(e) => Err(failed(command, &e)),
    }
}

/// What is wrong, from the lines that cargo and kiln print: the first errors, each with its place.
#[derive(Default)]
pub struct Errors {
    lines: Vec<String>,
    /// Whether the line before was one of them, whose place may follow.
    place: bool,
}

impl Errors {
    pub fn line(&mut self, line: &str) {
        // That something failed is known.
        let sums_up = ["error: could not compile", "error: aborting", "error: test failed", "error: doctest failed", "error: build failed"];
        let targets = line.starts_with("error: ") && (line.ends_with("target failed:") || line.ends_with("targets failed:"));
        let begins = ["error: ", "error[", "Diff in "].iter().any(|begin| line.starts_with(begin));
        let is_one = begins && !targets && !sums_up.iter().any(|begin| line.starts_with(begin));
        let is_place = self.place && line.trim_start().starts_with("--> ");
        self.place = is_one;
        if (is_one || is_place) && self.lines.len() < REASON && !self.lines.iter().any(|known| known == line) {
            self.lines.push(line.into());
        }
    }

    pub fn text(&self) -> String {
        self.lines.iter().map(cut).collect()
    }
}

/// A line of the screen's end.
fn cut(line: &String) -> String {
    match line.char_indices().nth(WIDTH) {
        Some((at, _)) => format!("    {} ..\n", &line[..at]),
        None => format!("    {line}\n"),
    }
}

/// What tests said, from the lines that libtest and cargo print.
#[derive(Default)]
pub struct Tests {
    pub passed: usize,
    pub failed: usize,
    pub times: Times,
    /// Why each test failed, or a whole binary ended.
    reasons: BTreeMap<String, Vec<String>>,
    /// The test whose output is being printed.
    section: Option<String>,
    /// Whether the message of its panic is being printed.
    panics: bool,
    /// What kept tests from being run.
    errors: Errors,
}

impl Tests {
    /// Takes a line; whether it belongs on the screen.
    pub fn line(&mut self, line: &str) -> bool {
        if let Some(name) = line.strip_prefix("---- ").and_then(|l| l.strip_suffix(" stdout ----")) {
            self.reasons.entry(name.into()).or_default();
            (self.section, self.panics) = (Some(name.into()), false);
            return false;
        }
        if line == "failures:" {
            self.section = None;
        }
        if let Some(name) = &self.section {
            let reason = self.reasons.entry(name.clone()).or_default();
            // A test that panics, that returns an error, that was to panic, and one of the documentation that does not compile.
            let panics = line.contains("' panicked at ") || line.contains(") panicked at ");
            let others = ["Error: ", "note: test did not panic", "error: ", "error["].iter().any(|begin| line.starts_with(begin));
            let begins = reason.is_empty() && (panics || others);
            self.panics = begins || self.panics && !line.starts_with("note: ") && reason.len() < REASON;
            if self.panics {
                reason.push(line.into());
            }
            return false;
        }
        if line.contains("process didn't exit successfully") && line.contains("signal") {
            self.reasons.entry("a test binary".into()).or_default().push(line.trim().into());
        }
        self.errors.line(line);
        let before = self.passed;
        self.times.extend(timed(line));
        if let Some(result) = line.strip_prefix("test ").and_then(|l| l.rsplit_once(" ... ")) {
            self.passed += usize::from(result.1.starts_with("ok"));
            self.failed += usize::from(result.1.starts_with("FAILED"));
            if self.passed > before && self.passed.is_multiple_of(BETWEEN) {
                println!("{} tests passed", self.passed);
            }
        }
        let kinds = ["Compiling ", "Finished ", "Running ", "Doc-tests ", "error:", "error[", "warning:", "test result:", "NOT CHECKED"];
        kinds.iter().any(|kind| line.trim_start().starts_with(kind)) || line.starts_with("test ") && line.contains(" ... FAILED")
    }

    /// Runs tests, and shows of what they print what matters.
    pub fn run(&mut self, command: &mut Command) -> Result<(), String> {
        println!("{command:?}");
        self.errors = Errors::default();
        let done = stream(command, |line| {
            if self.line(line) {
                println!("{line}");
            }
        });
        done.map_err(|e| format!("{e}\n{}", self.errors.text()))
    }

    /// The failed tests, each with its reason.
    pub fn failures(&self) -> String {
        let reason = |lines: &[String]| lines.iter().map(cut).collect::<String>();
        self.reasons.iter().map(|(name, lines)| format!("{name}\n{}", reason(lines))).collect()
    }

    pub fn count(&self) -> String {
        format!("{} passed, {} failed", self.passed, self.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "running 3 tests
step 1: loss 2.0000
test data::one ... ok <0.100s>
test data::two ... FAILED <0.200s>
test data::three - should panic ... ok <0.000s>

failures:

---- data::two stdout ----
step 1: loss 2.0000
test line of its own ... ok

thread 'data::two' (77) panicked at train/tests/suite/data.rs:4:5:
assertion `left == right` failed
  left: 1
 right: 2
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace


failures:
    data::two

test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.30s
error: test failed, to rerun pass `-p kiln --test suite`
  process didn't exit successfully: `suite` (signal: 6, SIGABRT: process abort signal)
";

    #[test]
    fn a_screen_of_what_failed_and_why() {
        let mut t = Tests::default();
        let shown: Vec<&str> = OUTPUT.lines().filter(|l| t.line(l)).collect();
        assert_eq!(t.count(), "2 passed, 1 failed");
        let failures = t.failures();
        assert!(failures.starts_with("a test binary\n    process didn't exit"), "{failures}");
        assert!(failures.ends_with("data.rs:4:5:\n    assertion `left == right` failed\n      left: 1\n     right: 2\n"), "{failures}");
        assert_eq!(shown.len(), 3, "{shown:?}");
        assert!(!t.line("error of a step: 0.1"), "a test's own output");
        t.line("---- long stdout ----");
        t.line(&format!("Error: {}", "x".repeat(5000)));
        assert!(t.failures().lines().all(|l| l.len() < 220), "a screen has so many columns");
        assert!(shown[0].contains("data::two ... FAILED"));
    }

    /// Of a command that is no test: the end of the screen has its errors, which stand far above.
    #[test]
    fn a_step_that_failed_says_why() {
        let mut errors = Errors::default();
        let printed = "   Compiling a v0.1.0\nwarning: unused\n  --> src/a.rs:1:1\nerror: the loop variable `i` is used to index `said`\n   --> src/b.rs:110:22\n    |\n110 | for i in 0..9 {\n  --> no place\nerror[E0308]: mismatched types\n --> src/c.rs:2:3\nDiff in src/d.rs:7:\nerror: the loop variable `i` is used to index `said`\nerror: could not compile `a` (lib) due to 2 previous errors\nerror: 2 targets failed:\nerror: test failed, to rerun pass `-p a`";
        printed.lines().for_each(|line| errors.line(line));
        let expected = "    error: the loop variable `i` is used to index `said`\n       --> src/b.rs:110:22\n    error[E0308]: mismatched types\n     --> src/c.rs:2:3\n    Diff in src/d.rs:7:\n";
        assert_eq!(errors.text(), expected);
        (0..99).for_each(|i| errors.line(&format!("error: {i}{}", "x".repeat(999))));
        assert!(errors.text().lines().count() == REASON && errors.text().lines().all(|line| line.len() < 220), "a screen");
    }

    #[test]
    fn every_way_to_fail_has_a_reason() {
        for (line, more) in [
            ("thread 'a' panicked at src/a.rs:1:1:", "why"),
            ("Error: Custom { kind: Other, error: \"why\" }", ""),
            ("note: test did not panic as expected at src/a.rs:1:1", ""),
            ("error[E0308]: mismatched types", " --> src/a.rs:1:1"),
        ] {
            let mut t = Tests::default();
            for line in ["---- a stdout ----", "", line, more, "note: run with", "", "failures:"] {
                t.line(line);
            }
            assert!(t.failures().contains(line) && t.failures().contains(more) && !t.failures().contains("run with"), "{}", t.failures());
        }
    }

    /// Tests of the documentation, too: the first crate's fail, one by not compiling, and the second's are run.
    #[test]
    fn failed_examples_stop_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("Cargo.toml", "[workspace]\nmembers = ['a', 'b']\nresolver = '3'\n");
        for (name, example) in [("a", "let x: u8 = \"no number\";"), ("b", "assert!(true)")] {
            write(&format!("{name}/Cargo.toml"), &format!("[package]\nname = '{name}'\nedition = '2024'\n"));
            write(&format!("{name}/src/lib.rs"), &format!("//! ```\n//! {example}\n//! ```\n"));
        }
        let mut t = Tests::default();
        let mut cargo = crate::examples();
        cargo.current_dir(dir.path()).env("CARGO_TARGET_DIR", dir.path().join("out")).env("CARGO_NET_OFFLINE", "true");
        assert!(t.run(&mut cargo).is_err());
        assert_eq!(t.count(), "1 passed, 1 failed", "{}", t.failures());
        assert!(t.failures().contains("error[E0308]: mismatched types"), "{}", t.failures());
    }

    /// Two crates, the first with a test that fails and one that ends its process: the second's test runs, and all three are told.
    #[test]
    fn a_failed_suite_stops_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("Cargo.toml", "[workspace]\nmembers = ['a', 'b']\nresolver = '3'\n");
        for (name, test) in [("a", "panic!(\"because of {}\", 40 + 2)"), ("b", "assert!(true)")] {
            write(&format!("{name}/Cargo.toml"), &format!("[package]\nname = '{name}'\nedition = '2024'\n"));
            write(&format!("{name}/src/lib.rs"), &format!("#[test] fn of_{name}() {{ {test} }}"));
        }
        write("a/tests/ends.rs", "#[test] fn ends() { std::process::abort() }");
        let mut t = Tests::default();
        let mut cargo = crate::timed::command(&[], &[]);
        cargo.current_dir(dir.path()).env("CARGO_TARGET_DIR", dir.path().join("out")).env("CARGO_NET_OFFLINE", "true");
        let failed = t.run(&mut cargo).unwrap_err();
        assert!(failed.contains("exit status"), "{failed}");
        assert_eq!(t.count(), "1 passed, 1 failed", "{}", t.failures());
        let failures = t.failures();
        assert!(failures.contains("of_a\n") && failures.contains("because of 42") && failures.contains("SIGABRT"), "{failures}");
        assert_eq!(t.times.len(), 2);
    }
}
