//! `kiln prune`, and training with the pass sparse-2:4.

use crate::common::*;
use std::fs;
use std::path::Path;
use tempfile::tempdir;

const SMALL: &str = "train decoder --preset tiny --device cpu --threads 1 --set batch=2 --set eval_batches=1";

fn train(family: &str, out: &str, more: &str) -> Ran {
    let sizes = "--set model.layers=1 --set model.dim=64 --set model.hidden=128 --set model.heads=2 --set model.kv_heads=2";
    kiln(format!("{SMALL} --set model.family={family} {sizes} --out {out} {more}").split_whitespace())
}

fn last_loss(run: &str) -> f64 {
    records(Path::new(run), "eval").last().unwrap()["val_loss"].as_f64().unwrap()
}

/// What a run computes with is what is exported: the loss of the folder, computed without the pass, is the run's to the last bits, and that of its dense
/// weights is another.
#[test]
fn a_run_with_sparse_weights_exports_what_it_computes_with() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    for family in ["llama", "gpt2"] {
        let [run, folder, dense, again] = ["run", "folder", "dense", "again"].map(|name| at(&format!("{family}-{name}")));
        let said = train(family, &run, "--steps 3 --set learning_rate=0.01 --pass sparse-2:4=auto").ok().out;
        assert!(said.contains("sparse-2:4"), "{said}");
        let said = kiln(["export", &run, "--out", &folder]).ok();
        assert!(said.err.contains("matrices of linear layers are taken with 2:4 sparsity"), "{}", said.err);
        let card = fs::read_to_string(Path::new(&folder).join("README.md")).unwrap();
        assert!(card.contains("| 2:4 sparsity |"), "{card}");
        kiln(["prune", &folder, "--check"]).ok();
        // One step that moves nothing, so that the loss is that of the weights it begins with.
        let still = "--steps 1 --set learning_rate=1e-38 --set weight_decay=0";
        kiln(format!("{SMALL} {still} --set model.base={folder} --out {again}").split_whitespace()).ok();
        train(family, &dense, &format!("{still} --init-from {run}")).ok();
        let [own, exported, dense] = [&run, &again, &dense].map(|run| last_loss(run));
        assert!((own - exported).abs() < 1e-5 * own, "{family}: the run has {own}, what it exports {exported}");
        assert!((own - dense).abs() > 1e-3 * own, "{family}: without the mask it is {dense}, and {own} with it");
    }
}

/// Of every four inputs of an output the two of the largest magnitude are what they were, and two are 0. A matrix of Llama's has a row for each output, one
/// of GPT-2's a column.
fn two_of_four_inputs_stay(dense: &Path, sparse: &Path, family: &str) {
    let [dense, sparse] = [dense, sparse].map(|folder| kiln::checkpoint::load_safetensors(&folder.join("model.safetensors")).unwrap());
    let numbers = |bytes: &[u8]| bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<f32>>();
    let mut matrices = 0;
    for name in dense.names() {
        let ((_, shape, was), (_, _, is)) = (dense.get(&name).unwrap(), sparse.get(&name).unwrap());
        let (was, is) = (numbers(was), numbers(is));
        let [rows, columns] = shape[..] else {
            assert_eq!(was, is, "{name}");
            continue;
        };
        if !name.contains(if family == "gpt2" { "h.0." } else { "layers.0." }) {
            continue;
        }
        matrices += 1;
        let (outputs, inputs) = if family == "gpt2" { (columns, rows) } else { (rows, columns) };
        let at = |output: usize, input: usize| if family == "gpt2" { input * columns + output } else { output * columns + input };
        for (output, group) in (0..outputs).flat_map(|o| (0..inputs / 4).map(move |g| (o, g))) {
            let four: Vec<(f32, f32)> = (0..4).map(|i| at(output, 4 * group + i)).map(|i| (was[i], is[i])).collect();
            let mut sizes: Vec<f32> = four.iter().map(|(was, _)| was.abs()).collect();
            sizes.sort_by(f32::total_cmp);
            let right = |(was, is): &(f32, f32)| *is == if was.abs() >= sizes[2] { *was } else { 0.0 };
            assert!(four.iter().all(right), "{family}: {name}, output {output}: {four:?}");
        }
    }
    assert!(matrices >= 4, "{family}: {matrices} matrices");
}

#[test]
fn a_dense_folder_is_pruned_once_and_checked() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    for family in ["llama", "gpt2"] {
        let [run, folder, sparse] = ["run", "folder", "sparse"].map(|name| at(&format!("{family}-{name}")));
        train(family, &run, "--steps 1").ok();
        let said = kiln(["export", &run, "--out", &folder]).ok();
        assert!(!said.err.contains("2:4"), "{}", said.err);
        kiln(["prune", &folder, "--check"]).fails(&["groups of four have more than two weights", "kiln prune"]);
        let said = kiln(["prune", &folder, "--out", &sparse]).ok().out;
        assert!(said.contains("matrices pruned") && said.contains("% of their squared norm kept"), "{said}");
        kiln(["prune", &sparse, "--check"]).ok();
        two_of_four_inputs_stay(Path::new(&folder), Path::new(&sparse), family);
        kiln(["prune", &folder, "--out", &sparse]).fails(&["is there already"]);
    }
}

#[test]
fn a_weight_that_is_not_finite_is_refused_by_name() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    train("llama", &at("run"), "--steps 1").ok();
    kiln(["export", &at("run"), "--out", &at("folder")]).ok();
    let (path, name) = (dir.path().join("folder/model.safetensors"), "model.layers.0.mlp.up_proj.weight");
    for broken in [f32::NAN, f32::NEG_INFINITY] {
        damage(&path, |bytes| {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
            let begin = 8 + length + header[name]["data_offsets"][0].as_u64().unwrap() as usize;
            bytes[begin + 20..begin + 24].copy_from_slice(&broken.to_le_bytes());
        });
        let value = broken.to_string();
        kiln(["prune", &at("folder"), "--out", &at("out")]).fails(&[name, &value]);
        kiln(["prune", &at("folder"), "--check"]).fails(&[name, &value]);
        assert!(!dir.path().join("out").exists() && half_written(dir.path()).is_empty());
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

#[test]
fn three_weights_in_one_group_of_four_are_not_sparse() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    train("llama", &at("run"), "--steps 1").ok();
    kiln(["export", &at("run"), "--out", &at("folder")]).ok();
    kiln(["prune", &at("folder"), "--out", &at("sparse")]).ok();
    let name = "model.layers.0.mlp.up_proj.weight";
    damage(&dir.path().join("sparse/model.safetensors"), |bytes| {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let begin = 8 + length + header[name]["data_offsets"][0].as_u64().unwrap() as usize;
        let zero = bytes[begin..].chunks(4).position(|number| *number == [0; 4]).unwrap();
        bytes[begin + 4 * zero..][..4].copy_from_slice(&1f32.to_le_bytes());
    });
    kiln(["prune", &at("sparse"), "--check"]).fails(&["groups of four have more than two weights"]);
}
