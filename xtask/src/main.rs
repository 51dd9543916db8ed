//! Chores of the project: `cargo xtask test`, `cargo xtask kernels`, `cargo xtask torture`.

mod torture;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

const HELP: &str = "cargo xtask COMMAND

  test      formatting, lints, every test, the examples, every kernel
  kernels   compiles every kernel for every architecture with NVRTC, without a GPU
  torture   kills kiln, starves it, cuts its power, damages its files, and counts what it does not survive
";

/// Newer PTX does not load on a 13.0 driver.
const WHEELS: &[&str] = &["nvidia-cuda-nvrtc==13.0.*"];

fn main() -> ExitCode {
    let done = match std::env::args().nth(1).as_deref() {
        Some("test") => test(),
        Some("kernels") => kernels(),
        Some("torture") => {
            let args: Vec<String> = std::env::args().skip(2).collect();
            cargo(&["build", "--package", "train"]).and_then(|()| torture::torture(&root(), &args))
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

fn test() -> Result<(), String> {
    cargo(&["fmt", "--all", "--check"])?;
    cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])?;
    cargo(&["test", "--workspace"])?;
    // NVRTC comes as a Python wheel. A machine with Rust alone tests everything else, and is told so; CI must have it.
    let python = Command::new("python3").args(["-m", "pip", "--version"]).output().is_ok_and(|o| o.status.success());
    if !python && std::env::var_os("CI").is_none() {
        println!(
            "\nNOT CHECKED: GPU kernels were not compiled, because there is no python3 with pip to fetch NVRTC (`cargo xtask kernels`)"
        );
        return Ok(());
    }
    kernels()
}

/// Installs the pinned wheels under target/ and lets kiln compile everything.
fn kernels() -> Result<(), String> {
    let folder = root().join("target/cuda-wheels");
    let libraries = folder.join("nvidia/cu13/lib");
    if !libraries.join("libnvrtc.so.13").exists() {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&folder).args(WHEELS);
        run(&mut pip).map_err(|e| format!("{e}\nkernels need Python with pip once, to fetch NVRTC: {}", WHEELS.join(" ")))?;
    }
    cargo(&["build", "--package", "train"])?;
    let check = |cache: &Path| {
        let mut c = Command::new("target/debug/kiln");
        c.args(["check", "kernels"]).env("LD_LIBRARY_PATH", &libraries).env("XDG_CACHE_HOME", cache);
        c
    };
    // Killed in the middle of compiling, it leaves nothing that a later run would take for a kernel.
    let killed = root().join("target/cuda-cache-killed");
    let _ = std::fs::remove_dir_all(&killed);
    let mut child = check(&killed)
        .args(["--sm", "90"])
        .current_dir(root())
        .stdout(Stdio::null())
        .spawn()
        .map_err(|e| format!("kiln does not start: {e}"))?;
    std::thread::sleep(Duration::from_secs(4));
    child.kill().and_then(|()| child.wait()).map_err(|e| format!("kiln cannot be killed: {e}"))?;
    if !std::fs::read_dir(killed.join("kiln")).is_ok_and(|mut d| d.next().is_some()) {
        return Err("nothing was compiled before the kill: the check of an interrupted cache has checked nothing".into());
    }
    run(check(&killed).args(["--sm", "90"]))?;
    let _ = std::fs::remove_dir_all(&killed);
    run(&mut check(&root().join("target/cuda-cache")))
}
