//! What is asked for and has no effect, or contradicts what a model's folder says, is refused by name. What a run notes is what it trained.

use super::common::{Ran, kiln, text};
use std::fs;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

const TRAIN: &str = "--set seq=32 --set batch=2 --set horizon=100 --set eval_batches=1 --threads 1";

fn train(out: &Path, more: &str) -> Ran {
    kiln(format!("train decoder --out {} {TRAIN} {more}", out.display()).split_whitespace())
}

/// A folder of a small Qwen2, and the run that it comes from.
fn base(dir: &Path) -> String {
    let shape = "--set family=\"qwen2\" --set dim=24 --set layers=3 --set heads=4 --set kv_heads=2 --set head_dim=8 --set hidden=40 --set rope_theta=5000";
    train(&dir.join("first"), &format!("{shape} --steps 1")).ok();
    kiln(["export", &text(&dir.join("first")), "--out", &text(&dir.join("base"))]).ok();
    text(&dir.join("base"))
}

const SIZES: [(&str, &str); 11] = [
    ("family", "\"qwen2\""),
    ("vocab", "256"),
    ("dim", "24"),
    ("layers", "3"),
    ("heads", "4"),
    ("kv_heads", "2"),
    ("head_dim", "8"),
    ("hidden", "40"),
    ("tied", "true"),
    ("window", "0"),
    ("rope_theta", "5000.0"),
];

#[test]
fn the_sizes_of_a_base_are_its_folders() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path());
    let run = dir.path().join("run");
    train(&run, &format!("--steps 2 --set model.base={base}")).ok();
    let config = fs::read_to_string(run.join("config.toml")).unwrap();
    let plan = kiln(["plan", "decoder", "--set", &format!("model.base={base}"), "--set", "seq=32", "--threads", "1"]).ok().out;
    let shown = kiln(["config", "decoder", "model", "--set", &format!("model.base={base}")]).ok().out;
    for (key, value) in SIZES {
        assert!(config.contains(&format!("\n{key} = {value}\n")), "{key} in {config}");
        assert!(plan.contains(&format!("{key} = {value}")), "{key} in {plan}");
        assert!(shown.contains(&format!("model.{key} = {}", value.trim_end_matches(".0"))), "{key} in {shown}");
    }
    assert!(plan.starts_with(&format!("decoder tiny from {base}: ")), "{plan}");
    // What is asked for and is otherwise there, by whichever way it is asked.
    let out = dir.path().join("not");
    for (key, asked, has) in [
        ("dim", "128", "24"),
        ("family", "\"llama\"", "\"qwen2\""),
        ("tied", "false", "true"),
        ("vocab", "300", "256"),
        ("window", "7", "0"),
    ] {
        let (name, value) = (format!("model.{key} = {asked}"), format!("has {has}"));
        let parts = [&name[..], &value, &base, &format!("remove model.{key}")];
        train(&out, &format!("--set model.base={base} --set {key}={asked}")).fails(&parts);
        kiln(["plan", "decoder", "--set", &format!("{key}={asked}"), "--set", &format!("model.base={base}")]).fails(&parts);
        let file = dir.path().join("asked.toml");
        fs::write(&file, format!("[model]\nbase = \"{base}\"\n{key} = {asked}\n")).unwrap();
        train(&out, &format!("--config {}", file.display())).fails(&parts);
        crate::common::resume(&run, &format!("--steps 3 --set {key}={asked}")).fails(&parts);
    }
    assert!(!out.exists());
    // What agrees, or is left open, is no contradiction; nor is a run's own file.
    train(&dir.path().join("same"), &format!("--steps 1 --set model.base={base} --set dim=24 --set vocab=0")).ok();
    train(&dir.path().join("again"), &format!("--steps 1 --config {}", run.join("config.toml").display())).ok();
}

/// Runs of earlier versions noted the preset's sizes beside their base: they go on, and are read.
#[test]
fn a_run_that_notes_a_presets_sizes_beside_its_base_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path());
    let [whole, parts] = ["whole", "parts"].map(|name| dir.path().join(name));
    train(&whole, &format!("--steps 4 --set model.base={base}")).ok();
    train(&parts, &format!("--steps 2 --set model.base={base}")).ok();
    let path = parts.join("config.toml");
    let was = fs::read_to_string(&path).unwrap();
    fs::write(&path, was.replace("\ndim = 24", "\ndim = 128").replace("\"qwen2\"", "\"llama\"").replace("layers = 3", "layers = 4"))
        .unwrap();
    let path = parts.join("checkpoints/step-00000002/checkpoint.json");
    let was = fs::read_to_string(&path).unwrap();
    let older = was.replace("\"dim\": 24", "\"dim\": 128").replace("\"qwen2\"", "\"llama\"").replace("\"layers\": 3", "\"layers\": 4");
    let unsealed = &older[..older.rfind(",\n  \"checksum\"").unwrap()];
    fs::write(&path, format!("{unsealed},\n  \"checksum\": \"{:016x}\"\n}}\n", xxh3_64(unsealed.as_bytes()))).unwrap();
    assert!(older.contains("\"dim\": 128") && older.contains("\"llama\"") && older.contains("\"layers\": 4"), "{older}");
    kiln(["generate", &text(&parts), "--prompt", "a", "--max-tokens", "2", "--threads", "1"]).ok();
    kiln(["eval", &text(&parts), "--threads", "1"]).ok();
    crate::common::resume(&parts, "--steps 4").ok();
    let model = |run: &Path| fs::read(run.join("checkpoints/step-00000004/model.safetensors")).unwrap();
    assert!(model(&whole) == model(&parts));
    assert!(fs::read_to_string(parts.join("config.toml")).unwrap().contains("\ndim = 24\n"), "it now notes what it trains");
}

#[test]
fn what_has_no_effect_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path());
    let at = |name: &str| text(&dir.path().join(name));
    let first = at("first");
    for (flag, more) in [("--best", "one set of weights"), ("--raw-weights", "one set of weights")] {
        kiln(["generate", &base, flag, "--prompt", "a"]).fails(&[flag, &base, more]);
        kiln(["export", &base, flag, "--format", "gguf", "--out", &at("x.gguf")]).fails(&[flag, &base, more]);
    }
    for command in [&["generate", &first, "--prompt", "a"][..], &["eval", &first], &["export", &first, "--out", &at("x")]] {
        kiln([command, &["--raw-weights"]].concat()).fails(&["--raw-weights", "train.ema", "leave out"]);
    }
    for of in [&first, &base] {
        kiln(["generate", of, "--think", "--prompt", "a", "--threads", "1"]).fails(&["--think", "enable_thinking", of]);
    }
    kiln(["generate", &base, "--think", "--raw"]).fails(&["--think", "--raw"]);
    kiln(["export", &first, "--merge", "--out", &at("x")]).fails(&["--merge", "first", "no adapters", "leave out --merge"]);
    kiln(["export", &first, "--merge", "--format", "gguf", "--out", &at("x.gguf")]).fails(&["--merge", "no adapters"]);
    kiln(["export", &base, "--merge", "--format", "gguf", "--out", &at("x.gguf")]).fails(&["--merge", "a model's folder"]);
    kiln(["export", &base, "--shard-size", "1MB", "--format", "gguf", "--out", &at("x.gguf")]).fails(&["--shard-size"]);
    for set in ["rank=8", "alpha=32", "dropout=0.1", "targets=[\"q\"]"] {
        let key = set.split('=').next().unwrap();
        train(&dir.path().join("x"), &format!("--set {set}")).fails(&[&format!("model.{key} = "), "model.train=lora", "remove"]);
    }
    assert!(!Path::new(&at("x")).exists() && !Path::new(&at("x.gguf")).exists());
    // Defaults, as every run's config.toml has them, ask for nothing.
    train(&dir.path().join("again"), &format!("--steps 1 --config {first}/config.toml")).ok();
}

#[test]
fn adapters_on_gpt2_are_refused_with_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let gpt2 = "--set family=\"gpt2\" --set dim=32 --set layers=1 --set heads=4 --set kv_heads=4 --set head_dim=8 --set hidden=48";
    train(&dir.path().join("run"), &format!("{gpt2} --set train=\"lora\"")).fails(&["model.train = \"lora\"", "gpt2", "model.train=all"]);
    train(&dir.path().join("all"), &format!("{gpt2} --steps 1")).ok();
    kiln(["export", &text(&dir.path().join("all")), "--out", &text(&dir.path().join("base"))]).ok();
    let base = format!("--set model.base={} --set model.train=\"lora\"", dir.path().join("base").display());
    train(&dir.path().join("run"), &base).fails(&["model.train = \"lora\"", "gpt2", "model.train=all"]);
}

/// The card of a fine-tuned model names its base and what was trained, and no preset.
#[test]
fn a_card_says_what_was_trained() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path());
    let at = |name: &str| text(&dir.path().join(name));
    let card = |name: &str| fs::read_to_string(dir.path().join(name).join("README.md")).unwrap();
    assert!(card("base").contains("| recipe, preset | decoder, tiny |") && card("base").contains("| trained weights | all |"));
    let lora = format!("--steps 1 --set model.base={base} --set model.train=\"lora\" --set rank=2 --set targets=[\"q\",\"v\"]");
    train(&dir.path().join("lora"), &lora).ok();
    kiln(["export", &at("lora"), "--out", &at("adapters")]).ok();
    kiln(["export", &at("lora"), "--out", &at("merged"), "--merge"]).ok();
    for (name, merged) in [("adapters", "on q, v) |"), ("merged", "on q, v), merged into the base |")] {
        let card = card(name);
        for part in ["| recipe | decoder |", "| fine-tuned from | base |", "| trained weights | adapters (LoRA, rank 2, alpha 16, ", merged]
        {
            assert!(card.contains(part), "no '{part}' in {card}");
        }
        assert!(!card.contains("| recipe, preset |") && !card.contains("tiny |"), "{card}");
    }
}

/// What an adapter is used on is compared with what it was made for: its shapes must fit, and another name is said.
#[test]
fn an_adapter_for_another_base_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path());
    let at = |name: &str| text(&dir.path().join(name));
    train(&dir.path().join("lora"), &format!("--steps 1 --set model.base={base} --set model.train=\"lora\" --set rank=2")).ok();
    kiln(["export", &at("lora"), "--out", &at("adapter")]).ok();
    crate::common::copy(Path::new(&base), &dir.path().join("other"));
    let use_on = |base: &str| {
        let base = at(base);
        [
            kiln(["check", "model", &base, "--adapter", &at("adapter")]),
            kiln(["generate", &base, "--adapter", &at("adapter"), "--prompt", "a", "--max-tokens", "1", "--threads", "1"]),
            kiln(["generate", &at("adapter"), "--base", &base, "--prompt", "a", "--max-tokens", "1", "--threads", "1"]),
        ]
    };
    for (name, noticed) in [("base", false), ("other", true)] {
        for ran in use_on(name).map(Ran::ok) {
            assert_eq!(ran.err.contains("was made for") && ran.err.contains(&base), noticed, "{ran:#?}");
        }
    }
    let begun = format!("--steps 1 --set model.base={} --set model.train=\"lora\" --set rank=2 --init-from {}", at("other"), at("adapter"));
    assert!(train(&dir.path().join("begun"), &begun).ok().err.contains("was made for"));
    // By its name alone, where it is no folder here; case and owner aside.
    let config = dir.path().join("adapter/adapter_config.json");
    let named = fs::read_to_string(&config).unwrap();
    for (name, noticed) in [("owner/Other", false), ("owner/another", true), ("", false)] {
        fs::write(&config, named.replace(&format!("{base}\""), &format!("{name}\""))).unwrap();
        let ran = kiln(["check", "model", &at("other"), "--adapter", &at("adapter")]).ok();
        assert_eq!(ran.err.contains("was made for"), noticed, "{name}: {ran:#?}");
    }
    fs::write(&config, &named).unwrap();
    // Shapes that do not fit.
    for (name, sizes, part) in
        [("wide", "dim=32 layers=3", "layers.0.self_attn.q_proj"), ("deep", "dim=24 layers=4", "layers.3.self_attn.q_proj")]
    {
        let sets: String = sizes.split(' ').map(|set| format!("--set {set} ")).collect();
        train(
            &dir.path().join(format!("{name}-run")),
            &format!("{sets} --set heads=4 --set kv_heads=2 --set head_dim=8 --set hidden=40 --steps 1"),
        )
        .ok();
        kiln(["export", &at(&format!("{name}-run")), "--out", &at(name)]).ok();
        for ran in use_on(name) {
            ran.fails(&[part, &at(name), "made for", &base]);
        }
    }
}
