//! Chores of the project: `cargo xtask test`, `docs`, `kernels`, `emulate`, `mutants`, `pages`, `size`, `torture`.

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
            With --fast no kernels, no doc tests, and of the tests those that took longest the last time are left out
  docs      writes the generated pages again: docs/config.md, docs/passes.md, the receipts in README.md, the tables in docs/scaling.md
  kernels   compiles the kernels of every op for every architecture with NVRTC, without a GPU
  mutants   plants errors one at a time and says which test finds each; all, or those whose names hold one of the words that follow.
            A build of its own and some minutes; what is planted in kernels is found by the emulator. Not part of `test`
  emulate [OP ..]
            runs the kernels of every case of these ops, or of all, on the CPU and compares with the CPU's numbers (`test` runs the small ones)
  pages [FILE.html ..]
            looks at the pages of `kiln watch` and `kiln report`, and at these files, in headless Chromium: numbers, keyboard, widths, colours,
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

fn run(command: &mut Command) -> Result<(), String> {
    println!("{command:?}");
    match command.current_dir(root()).status() {
        Ok(s) if s.success() => Ok(()),
        Ok(s) => Err(format!("{command:?}: {s}")),
        Err(e) => Err(format!("{command:?}: {e}")),
    }
}

fn cargo(args: &[&str]) -> Result<(), String> {
    run(Command::new(env!("CARGO")).args(args))
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
    let last = timed::Times::last();
    if last.is_empty() {
        println!("no test was timed here yet: all of them run this once, and the next fast run knows which are slow");
    }
    let slow = last.slow();
    let names: Vec<String> = slow.iter().map(|(name, _)| name.to_string()).collect();
    print!("{}", timed::run(&names)?.table());
    println!("\nNOT RUN (cargo xtask test does): doc tests, kernels, and {} slow tests:", slow.len());
    slow.iter().for_each(|(name, s)| println!("{s:>8.1} s  {name}"));
    Ok(())
}

fn test() -> Result<(), String> {
    lints()?;
    cargo(&["build", "--workspace", "--examples"])?;
    let times = timed::run(&[])?;
    cargo(&["test", "--workspace", "--doc"])?;
    check_kernels()?;
    check_mpi()?;
    print!("{}", times.table());
    Ok(())
}

fn check_kernels() -> Result<(), String> {
    // Kernels are run with a C++ compiler, as tests of the engine, and compiled with NVRTC, which comes as a Python wheel. A machine with Rust
    // alone tests everything else, and is told so; CI must have both.
    let ci = std::env::var_os("CI").is_some();
    if !has("g++", &["--version"]) {
        let missing = "GPU kernels were not emulated, because there is no g++ (`cargo xtask emulate`)";
        if ci {
            return Err(missing.into());
        }
        println!("\nNOT CHECKED: {missing}");
    }
    if !has("python3", &["-m", "pip", "--version"]) && !ci {
        println!(
            "\nNOT CHECKED: GPU kernels were not compiled, because there is no python3 with pip to fetch NVRTC (`cargo xtask kernels`)"
        );
        return Ok(());
    }
    kernels()
}

/// Ranks as processes are tested with MPICH's Python wheel; the tests fetch it, and pass where that fails.
fn check_mpi() -> Result<(), String> {
    let missing = "ranks as processes were not run, because pip could not fetch the wheel mpich";
    match (mpich::mpich(), std::env::var_os("CI")) {
        (Some(_), _) => Ok(()),
        (None, Some(_)) => Err(missing.into()),
        (None, None) => {
            println!("\nNOT CHECKED: {missing}");
            Ok(())
        }
    }
}

/// The tests that compare generated pages with what kiln prints write them instead.
fn docs() -> Result<(), String> {
    let mut test = Command::new(env!("CARGO"));
    test.args(["test", "--package", "kiln", "--test", "suite", "--"]);
    test.args([
        "docs::generated_pages_are_current",
        "docs::the_receipts_in_the_readme_are_current",
        "docs::the_tables_of_scaling_are_current",
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
    let folder = root().join("target/cuda-wheels");
    let libraries = folder.join("nvidia/cu13/lib");
    if !libraries.join("libnvrtc.so.13").exists() {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&folder).args(WHEELS);
        run(&mut pip).map_err(|e| format!("{e}\nkernels need Python with pip once, to fetch NVRTC: {}", WHEELS.join(" ")))?;
    }
    cargo(&["build", "--package", "kiln"])?;
    let check = |cache: &Path| {
        let mut c = Command::new("target/debug/kiln");
        c.args(["check", "kernels"]).env("LD_LIBRARY_PATH", &libraries).env("XDG_CACHE_HOME", cache);
        c
    };
    // Killed in the middle of compiling, it leaves nothing that a later run would take for a kernel.
    let killed = root().join("target/cuda-cache-killed");
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
    run(&mut check(&root().join("target/cuda-cache")))
}
