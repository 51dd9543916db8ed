//! Chores of the project: `cargo xtask test`, `docs`, `kernels`, `emulate`, `mutants`, `pages`, `size`, `torture`.

mod log;
#[allow(dead_code)] // tests alone run what it finds
#[path = "../../engine/tests/mpich.rs"]
mod mpich;
mod mutants;
mod pages;
mod size;
mod timed;
mod torture;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

const HELP: &str = "cargo xtask COMMAND

  test      formatting, lints, every test, the examples, every kernel; at the end the slowest tests.
            The whole output is in test-log.txt of the target folder; the screen has what failed and why.
            With --fast no kernels, no doc tests, and of the tests those that took longest the last time are left out
  docs      writes the generated pages again: docs/config.md, docs/passes.md, the receipts and the table
            against PyTorch in README.md, the tables in docs/scaling.md, docs/img/ledger.svg
  kernels   compiles the kernels of every op for every architecture with NVRTC, without a GPU
  mutants   plants errors one at a time and says which test finds each; all, or those whose names hold one of the words that follow.
            A build of its own and some minutes; what is planted in kernels is found by the emulator. Not part of `test`
  emulate [OP ..]
            runs the kernels of every case of these ops, or of all, on the CPU and compares with the CPU's numbers (`test` runs the small ones)
  pages [FILE.html ..]
            looks at the pages of `kiln watch` and `kiln report`, and at these files, in headless Chromium: numbers, keyboard, widths, colors,
            accessibility; screenshots in target/pages/shots. Needs chromium, node and npm. Not part of `test`
  size      lines of code by part; the core must stay small
  torture   kills kiln, starves it, cuts its power, damages its files, and counts what it does not survive
";

/// Newer PTX does not load on a 13.0 driver.
const WHEELS: &[&str] = &["nvidia-cuda-nvrtc==13.0.*"];

fn main() -> ExitCode {
    let done = match std::env::args().nth(1).as_deref() {
        Some("test") => match std::env::args().nth(2).as_deref() {
            None => test(),
            Some("--fast") => fast(),
            Some(other) => Err(format!("test has no option '{other}' (known: --fast)")),
        },
        Some("docs") => docs(),
        Some("kernels") => kernels(),
        Some("mutants") => mutants::run(&std::env::args().skip(2).collect::<Vec<_>>()),
        Some("emulate") => emulate(&std::env::args().skip(2).collect::<Vec<_>>()),
        Some("pages") => pages::pages(&std::env::args().skip(2).collect::<Vec<_>>()),
        Some("size") => size::run(),
        Some("torture") => {
            let args: Vec<String> = std::env::args().skip(2).collect();
            cargo(&["build", "--package", "kiln"]).and_then(|()| torture::torture(&root(), &args))
        }
        Some("--help" | "-h" | "help") | None => {
            print!("{HELP}{}", torture::help());
            Ok(())
        }
        Some(other) => Err(format!("there is no '{other}'\n\n{HELP}{}", torture::help())),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").into()
}

/// The program that cargo builds beside this one.
fn kiln() -> PathBuf {
    std::env::current_exe().expect("a program knows its own path").with_file_name("kiln")
}

fn run(command: &mut Command) -> Result<(), String> {
    println!("{command:?}");
    if log::is_kept() {
        let mut errors = log::Errors::default();
        let done = log::stream(command.current_dir(root()), |line| {
            errors.line(line);
            println!("{line}");
        });
        return done.map_err(|e| format!("{e}\n{}", errors.text()));
    }
    match command.current_dir(root()).status() {
        Ok(s) if s.success() => Ok(()),
        Ok(s) => Err(format!("{command:?}: {s}")),
        Err(e) => Err(format!("{command:?}: {e}")),
    }
}

/// Cargo, with the target folder of the cargo that runs this: a relative one means another in another working directory.
fn cargo_command() -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    if std::env::var_os("CARGO_TARGET_DIR").is_some_and(|dir| Path::new(&dir).is_relative()) {
        cargo.env("CARGO_TARGET_DIR", mpich::target_dir());
    }
    cargo
}

fn cargo(args: &[&str]) -> Result<(), String> {
    run(cargo_command().args(args))
}

/// The tests of the documentation, of all crates.
fn examples() -> Command {
    let mut cargo = cargo_command();
    cargo.args(["test", "--workspace", "--doc", "--no-fail-fast"]);
    cargo
}

fn lints() -> Result<(), String> {
    cargo(&["fmt", "--all", "--check"])?;
    cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])
}

/// For the inner loop: what is quick, and a word on what was not run.
fn fast() -> Result<(), String> {
    lints()?;
    // A test runs an example that cargo builds only where nothing narrows down what it builds.
    cargo(&["build", "--workspace", "--examples"])?;
    let lacks = lacking();
    let last = timed::Times::last();
    if last.is_empty() {
        println!("no test was timed here yet: all of them run this once, and the next fast run knows which are slow");
    }
    let slow = last.slow();
    let names: Vec<String> = slow.iter().map(|(name, _)| name.to_string()).collect();
    let mut tests = log::Tests::default();
    let done = timed::run(&names, &lacks, &mut tests);
    println!("\nNOT RUN (cargo xtask test does): doc tests, kernels, and {} slow tests:", slow.len());
    slow.iter().for_each(|(name, s)| println!("{s:>8.1} s  {name}"));
    summary(&tests, [("tests", done), ("tools", not_checked(&lacks))])
}

fn test() -> Result<(), String> {
    log::keep()?;
    let mut tests = log::Tests::default();
    let lacks = lacking();
    let lints = lints();
    let suites = cargo(&["build", "--workspace", "--examples"]).and_then(|()| timed::run(&[], &lacks, &mut tests));
    let docs = tests.run(examples().current_dir(root()));
    let steps = [("lints", lints), ("tests", suites), ("doc tests", docs), ("kernels", check_kernels()), ("tools", not_checked(&lacks))];
    summary(&tests, steps)
}

/// The end of the screen: the slowest tests, what failed and why, and how many passed. Every step has run.
fn summary<const N: usize>(tests: &log::Tests, steps: [(&str, Result<(), String>); N]) -> Result<(), String> {
    print!("{}", tests.times.table());
    let failed: Vec<String> = steps.into_iter().filter_map(|(name, done)| Some(format!("{name}: {}", done.err()?))).collect();
    let log = if log::is_kept() { format!("\neverything that was printed: {}", log::path().display()) } else { String::new() };
    match failed.is_empty() {
        true => {
            println!("{log}\n{}", tests.count());
            Ok(())
        }
        false => {
            let failed: Vec<&str> = failed.iter().map(|step| step.trim_end()).collect();
            Err(format!("{}\n\n{}{log}\n{}", failed.join("\nerror: "), tests.failures(), tests.count()))
        }
    }
}

/// What some tests need beside Rust: its name for `KILN_WITHOUT`, whether it is there, what is not checked where it is not.
type Tool = (&'static str, fn() -> bool, &'static str);

const TOOLS: [Tool; 4] = [
    ("g++", || has("g++", &["--version"]), "GPU kernels were not emulated, because there is no g++ (`cargo xtask emulate`)"),
    ("mpich", || mpich::found().is_ok(), "ranks as processes were not run, because pip could not fetch the wheel mpich"),
    ("cc", || has("cc", &["--version"]), "calls to the file system were not watched, because there is no cc"),
    ("python", || has("python3", &["-c", "import tomllib"]), "the guard of speeds was not run, because there is no Python 3.11 or later"),
];

/// The tools that are missing; the tests are told to do without them.
fn lacking() -> Vec<Tool> {
    let lacks: Vec<Tool> = TOOLS.into_iter().filter(|(_, is_there, _)| !is_there()).collect();
    // The end of the output says it again, and is where CI fails.
    let _ = not_checked(&lacks);
    lacks
}

/// Says what was not checked. CI must have every tool.
fn not_checked(lacks: &[Tool]) -> Result<(), String> {
    lacks.iter().for_each(|(_, _, missing)| println!("\nNOT CHECKED: {missing}"));
    match std::env::var_os("CI").is_some() && !lacks.is_empty() {
        true => Err(lacks.iter().map(|l| l.2).collect::<Vec<_>>().join("; ")),
        false => Ok(()),
    }
}

fn check_kernels() -> Result<(), String> {
    // Kernels are compiled with NVRTC, which comes as a Python wheel. A machine with Rust alone tests everything else, and is told so; CI must have it.
    if !has("python3", &["-m", "pip", "--version"]) && std::env::var_os("CI").is_none() {
        println!(
            "\nNOT CHECKED: GPU kernels were not compiled, because there is no python3 with pip to fetch NVRTC (`cargo xtask kernels`)"
        );
        return Ok(());
    }
    kernels()
}

/// The tests that compare generated pages with what kiln prints write them instead.
fn docs() -> Result<(), String> {
    let mut test = cargo_command();
    test.args(["test", "--package", "kiln", "--test", "suite", "--"]);
    test.args([
        "docs::generated_pages_are_current",
        "docs::the_receipts_in_the_readme_are_current",
        "docs::the_tables_of_scaling_are_current",
        "figures::the_table_against_pytorch_is_that_of_the_results",
        "ledger::the_picture_of_the_docs_is_that_of_the_ledgers",
        "--test-threads=1", // two of them write one page
    ]);
    run(test.env("KILN_WRITE_DOCS", "1"))
}

/// `kiln check emulate`, with the cases that the tests leave out because they take long.
fn emulate(ops: &[String]) -> Result<(), String> {
    let emulate = ["run", "--package", "kiln", "--", "check", "emulate"];
    match ops {
        [] => cargo(&[&emulate[..], &["--every"]].concat()),
        ops => ops.iter().try_for_each(|op| cargo(&[&emulate[..], &[op.as_str()]].concat())),
    }
}

/// Whether a program is there.
fn has(program: &str, args: &[&str]) -> bool {
    Command::new(program).args(args).output().is_ok_and(|o| o.status.success())
}

/// What is compiled, killed and compiled again.
const A_FEW: [&str; 3] = ["norm", "--sm", "90"];

/// Installs the pinned wheels under target/ and lets kiln compile everything.
fn kernels() -> Result<(), String> {
    let target = mpich::target_dir();
    let folder = target.join("cuda-wheels");
    let libraries = folder.join("nvidia/cu13/lib");
    if !libraries.join("libnvrtc.so.13").exists() {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&folder).args(WHEELS);
        run(&mut pip).map_err(|e| format!("{e}\nkernels need Python with pip once, to fetch NVRTC: {}", WHEELS.join(" ")))?;
    }
    cargo(&["build", "--package", "kiln"])?;
    let check = |cache: &Path| {
        let mut c = Command::new(kiln());
        c.args(["check", "kernels"]).env("LD_LIBRARY_PATH", &libraries).env("XDG_CACHE_HOME", cache);
        c
    };
    // Killed in the middle of compiling, it leaves nothing that a later run would take for a kernel.
    let killed = target.join("cuda-cache-killed");
    let _ = std::fs::remove_dir_all(&killed);
    let mut child =
        check(&killed).args(A_FEW).current_dir(root()).stdout(Stdio::null()).spawn().map_err(|e| format!("kiln does not start: {e}"))?;
    let compiled = || std::fs::read_dir(killed.join("kiln")).is_ok_and(|mut d| d.next().is_some());
    while !compiled() && child.try_wait().is_ok_and(|ended| ended.is_none()) {
        std::thread::sleep(Duration::from_millis(10));
    }
    if child.try_wait().map_err(|e| format!("kiln cannot be waited for: {e}"))?.is_some() {
        return Err("kiln ended before it was killed: the check of an interrupted cache has checked nothing".into());
    }
    child.kill().and_then(|()| child.wait()).map_err(|e| format!("kiln cannot be killed: {e}"))?;
    run(check(&killed).args(A_FEW))?;
    let _ = std::fs::remove_dir_all(&killed);
    run(&mut check(&target.join("cuda-cache")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wherever CARGO_TARGET_DIR or build.target-dir puts it: kiln, logs and kernels are looked for beside this program.
    #[test]
    fn the_target_folder_is_where_cargo_built_this_program() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("CACHEDIR.TAG"), "").unwrap();
        assert_eq!(mpich::target_of(&dir.path().join("debug/deps/xtask-0")), dir.path());
        if let Some(set) = std::env::var_os("CARGO_TARGET_DIR").filter(|set| Path::new(set).is_absolute()) {
            assert_eq!(mpich::target_dir(), Path::new(&set).canonicalize().unwrap());
        }
    }

    /// A test that lacks what it needs passes only where that is allowed, and never under CI.
    #[test]
    fn tests_do_without_a_tool_only_where_it_is_named() {
        use mpich::without::{VARIABLE, allowed};
        assert!(allowed("g++", "g++", false) && allowed("cc", "g++, cc,mpich", false));
        for (tool, named, is_ci) in [("g++", "", false), ("g++", "cc", false), ("c", "cc", false), ("g++", "g++", true), ("", "cc", false)]
        {
            assert!(!allowed(tool, named, is_ci), "{tool} of '{named}'");
        }
        let named = |lacks: &[Tool]| {
            let command = timed::command(&[], lacks);
            let value = command.get_envs().find(|(name, _)| *name == VARIABLE);
            value.map(|(_, value)| value.unwrap().to_string_lossy().into_owned())
        };
        let given = std::env::var(VARIABLE).unwrap_or_default();
        assert_eq!(named(&[]), Some(given.clone()));
        assert_eq!(named(&[TOOLS[0], TOOLS[2]]), Some(format!("{given},g++,cc").trim_matches(',').into()));
    }

    #[test]
    fn every_step_that_failed_is_named() {
        let tests = log::Tests::default();
        assert_eq!(summary(&tests, [("lints", Ok(())), ("kernels", Ok(()))]), Ok(()));
        let two = summary(&tests, [("lints", Err("one".into())), ("tests", Ok(())), ("kernels", Err("two".into()))]).unwrap_err();
        assert!(two.starts_with("lints: one\nerror: kernels: two\n") && two.ends_with("\n0 passed, 0 failed"), "{two}");
    }
}
