//! A program with a recipe of its own has the whole command line.

use crate::without::without;
use std::path::PathBuf;
use std::process::Command;

/// cargo builds examples beside the tests: target/PROFILE/deps/this, target/PROFILE/examples/own_recipe
fn example() -> PathBuf {
    beside("own_recipe")
}

fn beside(name: &str) -> PathBuf {
    let deps = std::env::current_exe().unwrap();
    deps.parent().unwrap().parent().unwrap().join("examples").join(name)
}

#[test]
fn an_op_of_ones_own_is_checked_and_trained_with() {
    let source = include_str!("../../examples/own_op.rs");
    assert!(source.lines().count() < 80, "{} lines", source.lines().count());
    let run = Command::new(beside("own_op")).output().unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{text}{}", String::from_utf8_lossy(&run.stderr));
    let missing = engine::cuda::emulator::missing().inspect(|why| without("g++", why));
    let kernel = if missing.is_none() { "kernel: right" } else { "kernel: " };
    for part in ["shift: odd (gradient): right", kernel, "w = 2.000"] {
        assert!(text.contains(part), "no '{part}' in\n{text}");
    }
    assert!(!text.contains("off by"), "{text}");
}

/// Its status, and what it wrote.
fn run(args: &str, folder: &std::path::Path) -> (Option<i32>, String) {
    let args = args.replace("RUN", folder.to_str().unwrap());
    let mut command = Command::new(example());
    command.args(args.split_whitespace()).env("CUDA_VISIBLE_DEVICES", "");
    let run = command.output().unwrap_or_else(|e| panic!("{}: {e}", example().display()));
    (run.status.code(), String::from_utf8_lossy(&[run.stdout, run.stderr].concat()).into_owned())
}

#[track_caller]
fn well(args: &str, folder: &std::path::Path, parts: &[&str]) -> String {
    let (code, text) = run(args, folder);
    assert_eq!(code, Some(0), "{args}\n{text}");
    parts.iter().for_each(|part| assert!(text.contains(part), "{args}: no '{part}' in\n{text}"));
    text
}

#[test]
fn it_trains_resumes_and_is_evaluated() {
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().join("mine");
    well("train --out RUN --threads 1", &folder, &["mine demo on cpu", "steps 0 to 150", "a sample of what the model writes", "| the"]);
    let text = well("train --out RUN --threads 1 --resume --steps 160", &folder, &["resumed from", "steps 150 to 160"]);
    let loss: f64 = text.split("validation loss ").nth(1).and_then(|t| t.split_whitespace().next()).unwrap().parse().unwrap();
    assert!(loss < 0.8, "a model that learnt nothing has 5.5: {loss}");
    assert!(folder.join("checkpoints/step-00000160/model.safetensors").exists());
    well("eval RUN", &folder, &["(step 160): loss", "lower is better"]);
    let (code, text) = run("generate RUN", &folder);
    assert!(code == Some(1) && text.contains("mine does not write text (no recipe here does)"), "{text}");
    let lines = include_str!("../../examples/own_recipe.rs").lines().count();
    assert!(lines < 90, "the example has {lines} lines");
}

#[test]
fn it_has_the_other_commands() {
    let out = tempfile::tempdir().unwrap();
    let help = well("--help", out.path(), &["own_recipe train mine --preset demo", "Usage: own_recipe"]);
    let others = kiln::recipes::RECIPES.iter().map(|r| r.name()).chain(["predict", "solve", "export"]);
    others.for_each(|other| assert!(!help.contains(other), "{other} in\n{help}"));
    well("train --help", out.path(), &["own_recipe train mine"]);
    well("recipes", out.path(), &["mine: causal", "--preset demo (default): Half a minute"]);
    well("config mine dim", out.path(), &["model.dim = 64", "from 1 to 4096", "Width of the residual stream."]);
    well("plan", out.path(), &["mine demo", "train", "peak"]);
    well("plan mine --set dim=32 --json", out.path(), &["\"program\": \"train\""]);
    well("bench mine --repeat 2 --warmup 1 --threads 1", out.path(), &["mine demo on cpu", "ms a step", "tok/s"]);
    well(
        "bench --repeat 1 --rounds 3 --steps-for-error 1 --threads 1 --ledger",
        out.path(),
        &["each pass switched alone", "fuse-pointwise"],
    );
    let (code, text) = run("train hydra", out.path());
    assert!(code == Some(1) && text.contains("there is no recipe 'hydra'") && text.contains("mine"), "{text}");
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../reference/golden/hydra.safetensors");
    let (code, text) = run(&format!("check golden {golden}"), out.path());
    assert!(code == Some(1) && text.contains("there is no recipe 'hydra'"), "{text}");
}
