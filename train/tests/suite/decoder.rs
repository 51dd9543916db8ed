//! Plain decoders: transformers' numbers for every family, and runs from nothing and from a folder to other programs' files.

use super::common::kiln;
use engine::{Cpu, Device, Switches};
use kiln::golden::{Golden, compare, rule};
use kiln::recipe;
use std::fs;
use std::path::{Path, PathBuf};

/// Golden files of every family, with AdamW and Muon, a sliding window and scaled RoPE.
fn files() -> Vec<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../reference/golden");
    let mut all: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    all.retain(|p| p.file_name().unwrap().to_str().unwrap().starts_with("decoder-"));
    all
}

#[test]
fn every_family_has_transformers_numbers() {
    let device = Device::cpu(Cpu::new(2));
    let settings: [&[(&str, &str)]; 4] = [
        &[],
        &[("bf16", "require")],
        &[("recompute", "require,what=blocks"), ("linear-cross-entropy", "require,chunk=5")],
        &[("flash-attention", "off"), ("gemm-epilogue", "off"), ("fuse-norm", "off"), ("merged-qkv", "off"), ("fuse-pointwise", "off")],
    ];
    assert_eq!(files().len(), 6);
    for (path, setting) in files().iter().flat_map(|p| settings.iter().map(move |s| (p, s))) {
        let file = Golden::open(path).unwrap();
        let reference = recipe::find(&file.recipe).unwrap().reference().unwrap();
        let mut switches = Switches::default();
        setting.iter().for_each(|(name, value)| switches.set(name, value).unwrap());
        let by = rule(reference, &file, &switches, &device, 1e-5, None).unwrap();
        let all = compare(&file, &reference.compute(&file, &switches, &device).unwrap(), &by);
        let bad: Vec<String> = all.iter().filter(|c| !c.ok).map(|c| format!("{} off by {:.2e}", c.name, c.error)).collect();
        assert!(all.len() > 40 && bad.is_empty(), "{} {setting:?}: {bad:?}", path.display());
    }
}

/// A window that is forgotten, or a scaling of RoPE, is seen in these files.
#[test]
fn what_a_config_says_shows_in_the_numbers() {
    let device = Device::cpu(Cpu::new(1));
    for (name, key) in [("mistral", "sliding_window"), ("llama3", "rope_parameters")] {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../reference/golden/decoder-{name}.safetensors"));
        let mut file = Golden::open(&path).unwrap();
        file.config[key] = serde_json::Value::Null;
        let reference = recipe::find(&file.recipe).unwrap().reference().unwrap();
        let by = rule(reference, &file, &Switches::default(), &device, 1e-5, None).unwrap();
        let computed = reference.compute(&file, &Switches::default(), &device).unwrap();
        assert!(compare(&file, &computed, &by).iter().any(|c| c.name == "output/logits" && !c.ok), "{name}");
    }
}

const TINY: [&str; 20] = [
    "--set",
    "dim=32",
    "--set",
    "layers=2",
    "--set",
    "heads=4",
    "--set",
    "kv_heads=2",
    "--set",
    "head_dim=8",
    "--set",
    "hidden=48",
    "--set",
    "seq=32",
    "--set",
    "batch=2",
    "--set",
    "horizon=100",
    "--threads",
    "1",
];

fn train(out: &Path, more: &[&str]) -> super::common::Ran {
    kiln([&["train", "decoder", "--out", out.to_str().unwrap()], &TINY[..], more].concat())
}

/// The model of a run's checkpoint.
fn weights(run: &Path, step: u64) -> Vec<u8> {
    fs::read(run.join(format!("checkpoints/step-{step:08}/model.safetensors"))).unwrap()
}

#[test]
fn a_run_is_exported_fine_tuned_resumed_and_read_by_others() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let text = |name: &str| at(name).to_str().unwrap().to_string();
    train(&at("first"), &["--steps", "3", "--set", "family=\"qwen2\""]).ok();
    kiln(["export", &text("first"), "--out", &text("model")]).ok();
    // Every weight goes out and comes in again.
    let base = format!("model.base={}", text("model"));
    train(&at("same"), &["--steps", "1", "--set", &base, "--set", "learning_rate=1e-38", "--set", "weight_decay=0"]).ok();
    assert!(weights(&at("same"), 1) == weights(&at("first"), 3));
    // A run from a folder, stopped and resumed, has the bits of one that was not.
    let config = fs::read_to_string(at("model/config.json")).unwrap();
    assert!(config.contains("\"qwen2\"") && config.contains("Qwen2ForCausalLM"), "{config}");
    for (name, optimizer) in [("adamw", "adamw"), ("muon", "muon")] {
        let optimizer = format!("optimizer=\"{optimizer}\"");
        let set = ["--set", &base, "--set", &optimizer];
        train(&at(name), &[&["--steps", "4"], &set[..]].concat()).ok();
        let parts = format!("{name}-parts");
        train(&at(&parts), &[&["--steps", "2"], &set[..]].concat()).ok();
        kiln(["train", "--out", &text(&parts), "--resume", "--steps", "4", "--threads", "1"]).ok();
        assert!(weights(&at(name), 4) == weights(&at(&parts), 4), "{name}");
        assert!(weights(&at(name), 4) != weights(&at("first"), 3), "{name} trained nothing");
    }
    assert!(weights(&at("muon"), 4) != weights(&at("adamw"), 4));
    let said = kiln(["generate", &text("first"), "--prompt", "the ", "--max-tokens", "5", "--threads", "1"]).ok();
    assert!(!said.out.trim().is_empty(), "{said:#?}");
    // For llama.cpp: from the run, and from its folder, the same file.
    kiln(["export", &text("first"), "--out", &text("a.gguf"), "--format", "gguf", "--type", "f32"]).ok();
    kiln(["export", &text("model"), "--out", &text("b.gguf"), "--format", "gguf", "--type", "f32"]).ok();
    let [a, b] = ["a.gguf", "b.gguf"].map(|f| fs::read(at(f)).unwrap());
    assert!(a.starts_with(b"GGUF") && a.len() == b.len());
    kiln(["export", &text("model"), "--out", &text("q.gguf"), "--format", "gguf", "--type", "q8_0"]).ok();
    assert!(fs::metadata(at("q.gguf")).unwrap().len() < a.len() as u64);
    kiln(["export", &text("model"), "--out", &text("q.gguf"), "--format", "gguf"]).fails(&["q.gguf", "is there already"]);
    kiln(["export", &text("model"), "--out", &text("c.gguf"), "--format", "gguf", "--type", "q9"]).fails(&["q9", "q8_0"]);
    assert!(!at("a.gguf.folder").exists() && !at("c.gguf").exists());
}

#[test]
fn what_is_wrong_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    train(&out, &["--set", "family=\"gemma\""]).fails(&["gemma", "llama, qwen2, qwen3, mistral, gpt2"]);
    train(&out, &["--set", "window=5"]).fails(&["model.window = 5", "llama has none"]);
    train(&out, &["--set", "bits=4"]).fails(&["model.bits = 4", "model.train=lora"]);
    train(&out, &["--set", "family=\"gpt2\""]).fails(&["gpt2", "heads of dim / heads"]);
    let gpt2 = ["--set", "family=\"gpt2\"", "--set", "train=\"lora\"", "--set", "kv_heads=4"];
    train(&out, &gpt2).fails(&["one matrix for q, k and v"]);
    train(&out, &["--set", "optimizer=\"sgd\""]).fails(&["train.optimizer", "adamw or muon"]);
    train(&out, &["--set", "model.base=/nowhere"]).fails(&["/nowhere", "no such folder"]);
    assert!(!out.exists());
}
