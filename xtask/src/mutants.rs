//! `cargo xtask mutants`: errors that are planted in the source (`mutant!("name", right, wrong)`), switched on one at a time, and the test that must fail
//! for each. One that no test finds is a test that is missing.

mod rare;
mod table;
mod trust;

use crate::root;
use By::{Engine, EngineLib, Kiln, Train, TrainLib};
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Who finds a mutant: tests of one binary, by their whole names, or a command of kiln. Seconds, so that all of them are minutes.
#[derive(Clone, Copy, PartialEq)]
enum By {
    EngineLib(&'static [&'static str]),
    Engine(&'static [&'static str]),
    TrainLib(&'static [&'static str]),
    Train(&'static [&'static str]),
    Kiln(&'static str),
}

/// Name, what is wrong, who finds it.
type Mutant = (&'static str, &'static str, By);

fn all() -> impl Iterator<Item = &'static Mutant> {
    table::MUTANTS.iter().chain(rare::MUTANTS).chain(trust::MUTANTS)
}

/// What is planted in the text of kernels must still be there; no mutant is needed to see that.
const IN_KERNELS: By = EngineLib(&["mutants::planted::tests::kernels_hold_what_is_replaced_in_them_once"]);

/// A run that takes longer hangs.
const LONGEST: Duration = Duration::from_secs(300);

/// Processes at a time: a test has threads of its own.
const AT_ONCE: usize = 2;

pub fn run(words: &[String]) -> Result<(), String> {
    let chosen: Vec<&Mutant> = all().filter(|m| words.is_empty() || words.iter().any(|w| m.0.contains(w.as_str()))).collect();
    if chosen.is_empty() {
        return Err(format!("no mutant's name holds {}", words.join(" or ")));
    }
    let built = Built::new()?;
    // Without a mutant everything must pass, or the failure of a test would say nothing.
    let mut finders = vec![IN_KERNELS];
    for m in &chosen {
        if !finders.contains(&m.2) {
            finders.push(m.2);
        }
    }
    let failed = in_parallel(&finders, |by| match built.run(by, None) {
        Ok(Ended::Passed) => None,
        Ok(Ended::Failed(test)) => Some(format!("{test} fails without a mutant")),
        Err(e) => Some(e),
    });
    if let Some(problem) = failed.into_iter().flatten().next() {
        return Err(problem);
    }
    println!("{} sets of tests pass without a mutant", finders.len());

    let line = |m: &Mutant, verdict: &str| println!("{:<42} {:<58} {verdict}", m.0, m.1);
    let ended = in_parallel(&chosen, |m| {
        let ended = built.run(&m.2, Some(m.0));
        match &ended {
            Ok(Ended::Failed(test)) => line(m, test),
            Ok(Ended::Passed) => line(m, "SURVIVED"),
            Err(_) => line(m, "no verdict"),
        }
        ended
    });
    let mut survived = vec![];
    for (m, ended) in chosen.iter().zip(ended) {
        if let Ended::Passed = ended? {
            survived.push(m.0);
        }
    }
    println!("{} found, {} survived", chosen.len() - survived.len(), survived.len());
    match survived.is_empty() {
        true => Ok(()),
        false => Err(format!("no test finds {}: write one", survived.join(", "))),
    }
}

/// How a run ended.
#[derive(Debug)]
enum Ended {
    Passed,
    /// By what: the first test or check that failed.
    Failed(String),
}

/// The binaries, with everything planted in them and nothing switched on.
struct Built {
    engine: [PathBuf; 2],
    train: [PathBuf; 2],
    kiln: PathBuf,
    target: PathBuf,
}

impl Built {
    /// In a folder of its own, so that no other build meets a planted error.
    fn new() -> Result<Built, String> {
        let target = crate::mpich::target_dir().join("mutants");
        let mut cargo = crate::cargo_command();
        cargo.args([
            "test",
            "--no-run",
            "--package",
            "kiln-engine",
            "--package",
            "kiln",
            "--features",
            "mutants",
            "--lib",
            "--test",
            "suite",
        ]);
        cargo.args(["--message-format", "json-render-diagnostics", "--target-dir"]).arg(&target).current_dir(root());
        println!("{cargo:?}");
        let built = cargo.stderr(Stdio::inherit()).output().map_err(|e| format!("cargo does not start: {e}"))?;
        if !built.status.success() {
            return Err("the tests were not built".into());
        }
        // A line of JSON for each, of which these parts are enough.
        let said = String::from_utf8_lossy(&built.stdout);
        let executable = |package: &str, kind: &str| {
            let (package, kind) = (format!("/{package}/Cargo.toml\""), format!("\"kind\":[\"{kind}\"]"));
            let own = said.lines().filter(|l| l.contains(&package) && l.contains(&kind));
            let path = own.filter_map(|l| l.split_once("\"executable\":\"")?.1.split('"').next()).next();
            path.map(PathBuf::from).ok_or_else(|| format!("cargo says nothing of an executable of {kind} of {package}"))
        };
        Ok(Built {
            engine: [executable("engine", "lib")?, executable("engine", "test")?],
            train: [executable("train", "lib")?, executable("train", "test")?],
            kiln: target.join("debug/kiln"),
            target,
        })
    }

    fn run(&self, by: &By, mutant: Option<&str>) -> Result<Ended, String> {
        static RUNS: AtomicUsize = AtomicUsize::new(0);
        let (binary, package) = match by {
            EngineLib(_) => (&self.engine[0], "engine"),
            Engine(_) => (&self.engine[1], "engine"),
            TrainLib(_) => (&self.train[0], "train"),
            Train(_) => (&self.train[1], "train"),
            Kiln(_) => (&self.kiln, ""),
        };
        let folder = self.target.join(format!("runs/{}", RUNS.fetch_add(1, Ordering::Relaxed)));
        let problem = |what: &str, e: std::io::Error| format!("{what} {}: {e}", folder.display());
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).map_err(|e| problem("cannot create", e))?;
        let said = File::create(folder.join("said")).map_err(|e| problem("cannot write in", e))?;
        let mut command = Command::new(binary);
        match by {
            EngineLib(tests) | Engine(tests) | TrainLib(tests) | Train(tests) => command.args(*tests).arg("--exact"),
            Kiln(args) => command.args(args.split(' ')),
        };
        // What it caches is its own: a base that was trained with an error in it must not outlive the run.
        command
            .current_dir(root().join(package))
            .env("XDG_CACHE_HOME", folder.join("cache"))
            .env("RUST_BACKTRACE", "0")
            .env_remove("KILN_MUTANT");
        command.envs(mutant.map(|name| ("KILN_MUTANT", name))).stdin(Stdio::null());
        command.stderr(said.try_clone().map_err(|e| problem("cannot write in", e))?).stdout(said);
        let mut child = command.spawn().map_err(|e| format!("{} does not start: {e}", binary.display()))?;
        let started = Instant::now();
        let status = loop {
            match child.try_wait().map_err(|e| problem("cannot wait in", e))? {
                Some(status) => break status,
                None if started.elapsed() > LONGEST => {
                    let _ = child.kill().and_then(|()| child.wait());
                    return Err(format!("{}: {command:?} hangs", mutant.unwrap_or("no mutant")));
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let said = String::from_utf8_lossy(&fs::read(folder.join("said")).map_err(|e| problem("cannot read in", e))?).into_owned();
        let _ = fs::remove_dir_all(&folder);
        let asked = match by {
            EngineLib(tests) | Engine(tests) | TrainLib(tests) | Train(tests) => Some(tests.len()),
            Kiln(_) => None,
        };
        judge(asked, status.success(), &said)
            .ok_or_else(|| format!("{}: {command:?} ended with {status} and said\n{said}", mutant.unwrap_or("no mutant")))
    }
}

/// What a run says about a mutant. None where it says nothing: a filter that matches no test, a command that could not be carried out.
fn judge(asked: Option<usize>, passed: bool, said: &str) -> Option<Ended> {
    let ran = said.lines().find_map(|l| l.strip_prefix("running ")?.split(' ').next()?.parse::<usize>().ok());
    if asked != ran {
        return None;
    }
    // "test a::b ... FAILED", "FAIL  norm: rms (gradient)   input 0: ..", "lior development   gemm-epilogue   +15.7% (..), SLOWER"
    let test = |l: &str| l.strip_prefix("test ")?.strip_suffix(" ... FAILED").map(String::from);
    let check = |l: &str| l.strip_prefix("FAIL  ").and_then(|l| l.split("  ").next()).map(String::from);
    let slower = |l: &str| l.strip_suffix(", SLOWER").map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "));
    let failed: Vec<String> = said.lines().filter_map(|l| test(l).or_else(|| check(l)).or_else(|| slower(l))).collect();
    // Of several tests each must find it.
    let all = asked.is_none_or(|asked| failed.len() == asked);
    match failed.into_iter().next() {
        None if passed => Some(Ended::Passed),
        Some(by) if !passed && all => Some(Ended::Failed(by)),
        _ => None,
    }
}

/// `f` of each, a few at a time, in order.
fn in_parallel<T: Sync, R: Send>(all: &[T], f: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(vec![]));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((i, item)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, all.get(i)?))) {
                    let result = f(item);
                    done.lock().expect("no thread panics").push((i, result));
                }
            });
        }
    });
    let mut done = done.into_inner().expect("no thread panics");
    done.sort_by_key(|d| d.0);
    done.into_iter().map(|d| d.1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Names in the source: the first argument of each `mutant!`, and those of what is planted in kernels.
    fn planted(folder: &Path, names: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                planted(&path, names);
                continue;
            }
            if path.extension().is_none_or(|e| e != "rs") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let before = if path.ends_with("engine/src/mutants.rs") { "name: " } else { "mutant!(" };
            names.extend(
                text.split(before).skip(1).filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next().map(String::from)),
            );
        }
    }

    #[test]
    fn every_mutant_of_the_table_is_in_the_source_once_and_no_other_is() {
        let mut names = vec![];
        ["engine/src", "train/src"].iter().for_each(|folder| planted(&root().join(folder), &mut names));
        let table: Vec<&str> = all().map(|m| m.0).collect();
        for name in names.iter().map(String::as_str).chain(table.iter().copied()) {
            let times = (names.iter().filter(|n| *n == name).count(), table.iter().filter(|n| **n == name).count());
            assert_eq!(times, (1, 1), "{name}: how often it is in the source, and in the table");
        }
    }

    /// The text of the file that holds a module: the deepest that is there.
    fn file_of(folder: &Path, modules: &[&str]) -> Option<String> {
        (1..=modules.len()).rev().find_map(|n| {
            let path = folder.join(modules[..n].join("/"));
            [path.with_extension("rs"), path.join("mod.rs")].iter().find_map(|file| fs::read_to_string(file).ok())
        })
    }

    #[test]
    fn every_test_that_the_table_names_is_there() {
        let mut seen = 0;
        for (mutant, _, by) in all().copied().chain([("none", "", IN_KERNELS)]) {
            let (folder, tests) = match by {
                EngineLib(tests) => ("engine/src", tests),
                Engine(tests) => ("engine/tests/suite", tests),
                TrainLib(tests) => ("train/src", tests),
                Train(tests) => ("train/tests/suite", tests),
                Kiln(_) => continue,
            };
            for test in tests {
                let modules: Vec<&str> = test.split("::").collect();
                let (name, modules) = modules.split_last().unwrap();
                let is_there = file_of(&root().join(folder), modules).is_some_and(|text| text.contains(&format!("fn {name}(")));
                assert!(is_there, "{mutant}: no test {test} in {folder}");
                seen += 1;
            }
        }
        assert!(seen > 50, "{seen} names of tests");
    }

    #[test]
    fn a_run_that_says_nothing_is_no_verdict() {
        let judged = |asked, passed, said: &str| judge(asked, passed, said).map(|e| format!("{e:?}"));
        let failed = "running 2 tests\ntest a::b ... FAILED\ntest a::c ... FAILED\n";
        assert_eq!(judged(Some(2), false, failed).as_deref(), Some("Failed(\"a::b\")"));
        assert_eq!(judged(Some(2), false, &failed.replace("b ... FAILED", "b ... ok")), None, "only one of two finds it");
        assert_eq!(judged(Some(1), true, "running 1 test\ntest a ... ok\n").as_deref(), Some("Passed"));
        assert_eq!(judged(Some(1), true, "running 0 tests\n"), None, "the filter matches nothing");
        assert_eq!(judged(Some(1), false, "running 1 test\n"), None, "it crashed, or the test is not there");
        assert_eq!(
            judged(None, false, "ok    a: b\nFAIL  norm: rms (gradient)     input 0\n").as_deref(),
            Some("Failed(\"norm: rms (gradient)\")")
        );
        assert_eq!(judged(None, false, "a b   +15.7% (+1% to +20%), SLOWER\n").as_deref(), Some("Failed(\"a b +15.7% (+1% to +20%)\")"));
        assert_eq!(judged(None, false, "error: no op is called 'nrom'\n"), None);
        assert_eq!(judged(None, true, "3 passed, 0 failed\n").as_deref(), Some("Passed"));
    }
}
