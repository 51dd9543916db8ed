//! The example of a model of one's own trains, saves, loads and writes.

use std::process::Command;

#[test]
fn the_example_runs() {
    // cargo builds examples beside the tests: target/PROFILE/deps/this, target/PROFILE/examples/own_recipe
    let deps = std::env::current_exe().unwrap();
    let example = deps.parent().unwrap().parent().unwrap().join("examples/own_recipe");
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().join("mine");
    let run = Command::new(&example).arg(&folder).output().unwrap_or_else(|e| panic!("{}: {e}", example.display()));
    let text = String::from_utf8_lossy(&run.stdout).to_string();
    assert!(run.status.success(), "{text}{}", String::from_utf8_lossy(&run.stderr));
    let loss: f64 = text.split("validation loss ").nth(1).and_then(|t| t.split_whitespace().next()).unwrap().parse().unwrap();
    assert!(loss < 0.8, "a model that learnt nothing has 5.5: {loss}");
    assert!(folder.join("checkpoints/step-00000150/model.safetensors").exists());
    let sample = text.split("done in").nth(1).unwrap_or_default();
    assert!(sample.contains("\nthe") && sample.len() > 100, "no sample in:\n{text}");
    let lines = include_str!("../../examples/own_recipe.rs").lines().count();
    assert!(lines < 80, "the example has {lines} lines");
}
