//! `kiln prune`, and training with the pass sparse-2:4.

use crate::common::*;
use std::fs;
use tempfile::tempdir;

#[test]
fn a_run_with_sparse_weights_writes_what_its_pruned_folder_writes() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    for (family, more) in [("llama", ""), ("gpt2", "--set model.kv_heads=2")] {
        let (run, folder, sparse) = (at(&format!("{family}-run")), at(&format!("{family}-folder")), at(&format!("{family}-sparse")));
        let train = format!(
            "train decoder --preset tiny --device cpu --threads 1 --set model.family={family} --set model.layers=1 --set model.dim=64 --set model.hidden=128 --set model.heads=2 --set model.kv_heads=2 {more} --set batch=2 --set eval_batches=1 --steps 3 --pass sparse-2:4=auto --out {run}"
        );
        let said = kiln(train.split_whitespace()).ok().out;
        assert!(said.contains("sparse-2:4"), "{said}");
        kiln(["export", &run, "--out", &folder]).ok();
        // The run keeps dense weights, and the exported folder has them.
        kiln(["prune", &folder, "--check"]).fails(&["groups of four have more than two weights", "kiln prune"]);
        let said = kiln(["prune", &folder, "--out", &sparse]).ok().out;
        assert!(said.contains("matrices pruned") && said.contains("% of their squared norm kept"), "{said}");
        kiln(["prune", &sparse, "--check"]).ok();
        kiln(["prune", &folder, "--out", &sparse]).fails(&["is there already"]);
        let write = |model: &str| {
            kiln(["generate", model, "--prompt", "the ", "--max-tokens", "12", "--temperature", "0", "--device", "cpu", "--raw"]).ok().out
        };
        assert_eq!(write(&run), write(&sparse), "{family}: the run computes with what the pruned folder holds");
    }
}

#[test]
fn what_cannot_be_pruned_is_refused() {
    let dir = tempdir().unwrap();
    let (empty, out) = (text(&dir.path().join("empty")), text(&dir.path().join("out")));
    fs::create_dir(&empty).unwrap();
    kiln(["prune", &empty, "--out", &out]).fails(&["no config.json", "kiln export"]);
    kiln(["prune", &text(&dir.path().join("nothing")), "--out", &out]).fails(&["there is no such folder"]);
    kiln(["prune", &empty]).fails(&["--out"]);
    assert!(!dir.path().join("out").exists());
}
