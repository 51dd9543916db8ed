//! Chores of the project: `cargo xtask test`.

use std::process::{Command, ExitCode};

const HELP: &str = "cargo xtask COMMAND

  test    formatting, lints, every test, the examples
";

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("test") => test(),
        Some("--help" | "-h" | "help") | None => {
            print!("{HELP}");
            ExitCode::SUCCESS
        }
        Some(other) => {
            eprintln!("error: there is no '{other}'\n\n{HELP}");
            ExitCode::FAILURE
        }
    }
}

fn test() -> ExitCode {
    let steps: &[&[&str]] =
        &[&["fmt", "--all", "--check"], &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"], &["test", "--workspace"]];
    for step in steps {
        println!("cargo {}", step.join(" "));
        let ok = Command::new(env!("CARGO"))
            .args(*step)
            .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
            .status()
            .is_ok_and(|s| s.success());
        if !ok {
            eprintln!("error: `cargo {}` failed", step.join(" "));
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
