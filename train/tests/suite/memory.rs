//! What a run holds is what the plan said.

use std::path::Path;
use std::process::Command;

/// (planned, peak resident) bytes of a few steps.
fn bench(dir: &Path, args: &[&str]) -> (f64, f64) {
    let file = dir.join("bench.json");
    let all = [&["bench", "hydra", "--repeat", "2", "--warmup", "0", "--json", file.to_str().unwrap()], args].concat();
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
    for args in [&["--preset", "small"][..], &["--preset", "small", "--pass", "recompute=auto", "--set", "batch=16"]] {
        let (planned, resident) = bench(dir.path(), args);
        let own = resident - program;
        assert!((own - planned).abs() <= 0.1 * planned, "{args:?}: planned {planned}, resident {resident}, of which the program {program}");
    }
}
