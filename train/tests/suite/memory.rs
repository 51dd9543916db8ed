//! What a run holds is what the plan said; what a machine cannot hold is refused before any of it is read.

use serde_json::{Map, json};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// (planned, peak resident) bytes of a few steps.
fn bench(dir: &Path, args: &[&str]) -> (f64, f64) {
    let file = dir.join("bench.json");
    let all =
        [&["bench", "hydra", "--repeat", "2", "--warmup", "0", "--steps-for-error", "1", "--json", file.to_str().unwrap()], args].concat();
    let run = Command::new(env!("CARGO_BIN_EXE_kiln")).env("CUDA_VISIBLE_DEVICES", "").args(all).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let value: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    (value["peak_bytes"].as_f64().unwrap(), value["resident_bytes"].as_f64().unwrap())
}

#[test]
fn resident_memory_is_the_plan_and_the_program() {
    let dir = tempfile::tempdir().unwrap();
    let little = ["--set", "dim=32", "--set", "blocks=2", "--set", "hidden=32", "--set", "seq=16", "--set", "batch=1"];
    let (planned, resident) = bench(dir.path(), &little);
    let program = resident - planned;
    let small = ["--preset", "small", "--set"];
    for args in [[&small[..], &["batch=2"]].concat(), [&small[..], &["batch=4", "--pass", "recompute=auto"]].concat()] {
        let (planned, resident) = bench(dir.path(), &args);
        let own = resident - program;
        assert!((own - planned).abs() <= 0.1 * planned, "{args:?}: planned {planned}, resident {resident}, of which the program {program}");
    }
}

/// A folder with the sizes of Qwen2.5-7B, whose 14 GiB of weights are a hole in a file.
fn seven_billion(dir: &Path) {
    let (layers, dim, hidden, vocab, keys) = (28, 3584, 18944, 256, 512);
    let config = json!({ "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": vocab, "hidden_size": dim, "num_hidden_layers": layers,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": hidden, "tie_word_embeddings": false, "max_position_embeddings": 4096 });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![vocab, dim]),
        ("lm_head.weight".into(), vec![vocab, dim]),
        ("model.norm.weight".into(), vec![dim]),
    ];
    for l in 0..layers {
        let mut add = |name: &str, shape: &[usize]| tensors.push((format!("model.layers.{l}.{name}"), shape.to_vec()));
        add("input_layernorm.weight", &[dim]);
        add("post_attention_layernorm.weight", &[dim]);
        for (name, width) in [("q", dim), ("k", keys), ("v", keys)] {
            add(&format!("self_attn.{name}_proj.weight"), &[width, dim]);
            add(&format!("self_attn.{name}_proj.bias"), &[width]);
        }
        add("self_attn.o_proj.weight", &[dim, dim]);
        add("mlp.gate_proj.weight", &[hidden, dim]);
        add("mlp.up_proj.weight", &[hidden, dim]);
        add("mlp.down_proj.weight", &[dim, hidden]);
    }
    let (mut header, mut end) = (Map::new(), 0);
    for (name, shape) in tensors {
        let bytes = 2 * shape.iter().product::<usize>();
        header.insert(name, json!({ "dtype": "BF16", "shape": shape, "data_offsets": [end, end + bytes] }));
        end += bytes;
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = File::create(dir.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
}

#[test]
fn a_folder_that_does_not_fit_is_refused_before_its_weights_are_read() {
    let dir = tempfile::tempdir().unwrap();
    seven_billion(dir.path());
    let folder = dir.path().display();
    for command in [
        format!("train decoder --set model.base={folder} --out {folder}/run"),
        format!("check model {folder} --ids 1"),
        format!("bench decoder --set model.base={folder} --set batch=1"),
    ] {
        let started = Instant::now();
        let mut sh = Command::new("sh");
        sh.args(["-c", "ulimit -v 8000000; exec \"$0\" \"$@\" --device cpu --threads 1", env!("CARGO_BIN_EXE_kiln")]);
        sh.args(command.split_whitespace()).env("RUST_BACKTRACE", "0");
        let ran = super::common::finish(sh);
        ran.fails(&["GiB of memory", " are free"]);
        // The limit counts, not what the machine has beyond it.
        let free = ran.err.split(" GiB are free").next().unwrap().rsplit(' ').next().unwrap().parse::<f64>().unwrap();
        assert!((4.0..7.7).contains(&free), "{}", ran.err);
        // Against hangs: a busy machine takes its time. That the weights are not held is what the limit is for.
        assert!(started.elapsed() < Duration::from_secs(60), "{command} took {:?}", started.elapsed());
    }
    assert!(!dir.path().join("run").exists());
}
