//! Decoders of state-space layers, from settings to folders; and what is refused by name.

use super::common::kiln;
use engine::check::relative;
use engine::ops::sample::Nucleus;
use engine::philox::rng_feed;
use engine::{Cpu, Device, Switches};
use kiln::checkpoint::load_safetensors;
use kiln::data::replies::{Asked, Prompt};
use kiln::models::Shape;
use kiln::models::decoder::{Base, Decoder, Writer};
use kiln::recipe::Session;
use serde_json::{Value, json};
use std::path::Path;

/// Heads that the tiny preset's kv_heads do not divide, in groups.
const SMALL: &str = "dim=32 layers=2 heads=6 head_dim=16 groups=2 state=8 seq=32 batch=2 horizon=100";

fn train(out: &Path, more: &[&str]) -> super::common::Ran {
    let mut args = vec!["train", "decoder", "--out", out.to_str().unwrap(), "--threads", "1", "--set", "family=\"mamba2\""];
    SMALL.split(' ').for_each(|set| args.extend(["--set", set]));
    kiln([&args, more].concat())
}

#[test]
fn a_folder_is_read_in_low_precision() {
    let dir = tempfile::tempdir().unwrap();
    let text = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    train(&dir.path().join("run"), &["--steps", "2"]).ok();
    kiln(["export", &text("run"), "--out", &text("model")]).ok();
    let logits = |name: &str, passes: &[&str]| -> Vec<f32> {
        let file = text(name);
        let args = ["check", "model", &text("model"), "--ids", "1 2 3 4 5 6 7", "--ids", "9 8", "--threads", "1", "--write", &file];
        kiln([&args, passes].concat()).ok();
        let all = load_safetensors(Path::new(&file)).unwrap();
        let numbers = |row: &str| all.get(row).unwrap().2.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        ["0", "1"].map(numbers).into_iter().flat_map(|row: Vec<f32>| row).collect()
    };
    let wide = logits("f32.safetensors", &[]);
    for (pass, most) in [("bf16=auto", 0.03), ("fp16=auto", 0.004)] {
        let off = relative(&logits(pass, &["--pass", pass]), &wide);
        assert!(0.0 < off && off < most, "{pass}: {off}");
        kiln(["generate", &text("model"), "--prompt", "the ", "--max-tokens", "5", "--threads", "1", "--pass", pass]).ok();
    }
    // llama.cpp's file is not written; the message names the run, not the folder that stands between.
    let run = text("run");
    for from in [&run, &text("model")] {
        let said = kiln(["export", from, "--out", &text("x.gguf"), "--format", "gguf"]);
        said.fails(&[from, "Mamba2ForCausalLM", "no GGUF file is written"]);
        assert!(!said.err.contains("x.gguf.folder"), "{said:#?}");
    }
}

/// What the layers remember of a prompt, and of what is written behind it, after each of so many tokens: state after state.
fn memories(prompt: &[u32], time: usize) -> Vec<Vec<f32>> {
    let config = json!({
        "model_type": "mamba2", "vocab_size": 61, "hidden_size": 12, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 6, "n_groups": 2,
        "state_size": 7, "conv_kernel": 4, "tie_word_embeddings": true
    });
    let shape = &Shape::parse(config.as_object().unwrap()).unwrap();
    let mut s = Session::new(&Device::cpu(Cpu::new(1)), &Switches::default(), 3);
    let nucleus = Nucleus { temperature: 0.0, top_p: 1.0 };
    let writer = Writer { prompts: 1, replies: 1, time, new_tokens: 8, nucleus, stop: None };
    for (name, graph) in writer.graphs(|r| Decoder { shape, lora: None, base: Base::Drawn, r, rng: None }) {
        s.load(name, graph).unwrap();
    }
    let asked = Asked::new(vec![Prompt { text: String::new(), tokens: prompt.to_vec() }], time);
    writer.begin(&mut s, &asked, rng_feed(1, 1, 1)).unwrap();
    let mut all = vec![];
    for _ in 0..4 {
        let mut states: Vec<_> = s.store.iter().filter(|(n, _)| n.ends_with(".convolved") || n.ends_with(".scanned")).collect();
        states.sort_by_key(|(n, _)| n.to_string());
        assert_eq!(states.len(), 4, "two layers");
        all.extend(states.into_iter().map(|(_, t)| t.f32().unwrap()));
        all.push(vec![writer.newest(&s).unwrap()[0] as f32]);
        writer.next(&mut s).unwrap();
    }
    all
}

/// What stands before a prompt that is shorter than the convolution is nothing, and not what fills up its row.
#[test]
fn padding_before_a_short_prompt_is_not_remembered() {
    for prompt in [&[5][..], &[5, 9], &[5, 9, 2, 7]] {
        let (alone, padded) = (memories(prompt, prompt.len()), memories(prompt, 6));
        for (i, (a, b)) in alone.iter().zip(&padded).enumerate() {
            let worst = a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(worst < 1e-5, "{prompt:?}, number {i}: {worst}");
        }
        assert!(alone.iter().flatten().any(|v| v.abs() > 0.01), "there is something to remember");
    }
}

#[test]
fn settings_of_attention_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    for set in ["kv_heads=2", "hidden=64", "rope_theta=500.0"] {
        let key = format!("model.{}", set.split('=').next().unwrap());
        train(&out, &["--set", set]).fails(&[&key, "mamba2 has none"]);
    }
    assert!(!out.exists());
}

#[test]
fn settings_of_state_space_layers_are_refused_where_there_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let text = out.to_str().unwrap();
    for set in ["state=16", "groups=2", "conv=3"] {
        let key = format!("model.{}", set.split('=').next().unwrap());
        kiln(["train", "decoder", "--out", text, "--set", set]).fails(&[&key, "llama has none", "model.family=mamba2"]);
    }
    let hrm = |sets: &[&str], parts: &[&str]| {
        kiln(["train", "hrm", "--out", text].into_iter().chain(sets.iter().flat_map(|s| ["--set", s]))).fails(parts);
    };
    for set in ["state=16", "mamba_head=8", "conv=3"] {
        let key = format!("model.{}", set.split('=').next().unwrap());
        hrm(&[set], &[&key, "for the mixer mamba2, and here it is attention"]);
    }
    for set in ["heads=2", "rope_theta=5.0"] {
        let key = format!("model.{}", set.split('=').next().unwrap());
        hrm(&["mixer=mamba2", set], &[&key, "for the mixer attention, and here it is mamba2"]);
    }
    assert!(!out.exists());
}

/// It has every key, also those of the preset that the run does not read.
#[test]
fn the_config_of_a_run_begins_another() {
    let dir = tempfile::tempdir().unwrap();
    let text = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let sets = ["--set", "train_puzzles=64", "--set", "test_puzzles=8", "--threads", "1", "--steps", "1"];
    for mixer in ["mixer=attention", "mixer=mamba2"] {
        let [first, second] = ["first", "second"].map(|name| text(&format!("{mixer}-{name}")));
        kiln([&["train", "hrm", "--out", &first, "--set", mixer], &sets[..]].concat()).ok();
        kiln(["train", "--config", &format!("{first}/config.toml"), "--out", &second, "--threads", "1"]).ok();
    }
}

#[test]
fn keys_of_a_folder_that_change_the_numbers_are_refused() {
    let read = |key: &str, value: Value| {
        let mut config = json!({
            "model_type": "mamba2", "vocab_size": 61, "hidden_size": 12, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 6, "n_groups": 2,
            "state_size": 7, "conv_kernel": 4, "expand": 2, "chunk_size": 256
        });
        config[key] = value;
        Shape::parse(config.as_object().unwrap())
    };
    let plain = read("hidden_act", json!("silu")).unwrap();
    for (key, value) in [
        ("norm_before_gate", json!(true)),
        ("D_has_hdim", json!(true)),
        ("attn_layer_idx", json!([1])),
        ("layers_block_type", json!(["mamba2", "attention"])),
        ("expand", json!(3)),
        ("chunk_size", json!(0)),
        ("chunk_size", json!(-1)),
        ("time_step_limit", json!([0.001, "Infinity"])),
        ("time_step_limit", json!([0.0, 0.1])),
    ] {
        let said = read(key, value).unwrap_err();
        assert!(said.contains(&format!("'{key}'")), "{said}");
    }
    for (key, value) in [
        ("hidden_act", json!("swish")),
        ("norm_before_gate", json!(false)),
        ("attn_layer_idx", json!([])),
        ("layers_block_type", json!(["mamba2", "mamba2"])),
        ("expand", json!(2.0)),
        ("time_step_limit", json!([0.0, "Infinity"])),
    ] {
        assert_eq!(read(key, value).unwrap(), plain, "{key}");
    }
}

#[test]
fn the_tiny_preset_of_hrm_has_sizes_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let sets = ["--set", "mixer=\"mamba2\"", "--set", "train_puzzles=64", "--set", "test_puzzles=8", "--threads", "1", "--steps", "1"];
    kiln([&["train", "hrm", "--out", out.to_str().unwrap()], &sets[..]].concat()).ok();
}
