//! hrm_lm: its numbers are the reference's, its gate keeps the source from the decoder, and its runs go on where they stopped.

use super::common::*;
use engine::{Cpu, Device, Switches};
use kiln::golden::{Golden, compare, rule};
use kiln::recipe::{self, Recipe};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::tempdir;

fn recipe() -> &'static dyn Recipe {
    recipe::find("hrm_lm").unwrap()
}

/// The file's numbers, with these passes.
fn check(file: &str, setting: &[(&str, &str)]) {
    let golden = Golden::open(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("{file}.safetensors"))).unwrap();
    let (mut switches, device) = (Switches::default(), Device::cpu(Cpu::new(2)));
    setting.iter().for_each(|(name, value)| switches.set(name, value).unwrap());
    let rule = rule(recipe().reference().unwrap(), &golden, &switches, &device, 1e-5, None).unwrap();
    let all = compare(&golden, &recipe().reference().unwrap().compute(&golden, &switches, &device).unwrap(), &rule);
    let gradients = all.iter().filter(|c| c.name.starts_with("grad/")).count();
    let outputs = all.iter().filter(|c| c.name.starts_with("output/")).count();
    assert!(gradients > 50 && outputs >= 7, "{file}: {gradients} gradients, {outputs} outputs");
    assert_eq!(all.len(), 2 * gradients + outputs + 9, "every gradient and next value, the loss, eight metrics");
    let bad: Vec<String> = all.iter().filter(|c| !c.ok).map(|c| format!("{} off by {:.2e}", c.name, c.error)).collect();
    assert!(bad.is_empty(), "{file} {setting:?}: {bad:?}");
}

/// Experts without and with places for all; one expert a token and every cycle differentiated; dense layers, halting and one memory token; Mamba-2; Mamba-2 that
/// halts. Of odd sizes.
const FILES: [&str; 5] = [
    "../reference/golden/hrm_lm",
    "../reference/golden/hrm_lm-mamba2",
    "tests/golden/hrm_lm-all",
    "tests/golden/hrm_lm-cross",
    "tests/golden/hrm_lm-halting",
];

#[test]
fn golden_with_passes_on_and_off() {
    let off: Vec<(&str, &str)> = engine::passes::all().filter(|p| !p.required()).map(|p| (p.name(), "off")).collect();
    for file in FILES {
        for setting in [&[][..], &off, &[("recompute", "auto,what=blocks")]] {
            check(file, setting);
        }
    }
    check(FILES[0], &[("flash-attention", "require")]);
}

#[test]
fn in_bf16_everything_points_the_same_way() {
    FILES.iter().for_each(|file| check(file, &[("bf16", "require")]));
}

/// A run of a second.
const SMALL: &str = "dim=16 heads=2 encoder_layers=1 decoder_layers=1 ff=2 experts=3 high_slots=2 low_slots=3 low_steps=1 prefix=2 \
    train.batch=8 train.warmup=2 log_every=1 eval_every=3 gate_warmup=2 gate_ramp=3";

fn train(out: &Path, more: &str) -> Ran {
    let sets: String = SMALL.split_whitespace().map(|set| format!(" --set {set}")).collect();
    kiln(format!("train hrm_lm --out {} --threads 1{sets} {more}", text(out)).split_whitespace())
}

fn records(run: &Path) -> Vec<Value> {
    fs::read_to_string(run.join("metrics.jsonl")).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn a_resumed_run_is_the_run_that_never_stopped() {
    let dir = tempdir().unwrap();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    train(&whole, "--steps 8 --set horizon=8").ok();
    train(&parts, "--steps 3 --set horizon=8").ok();
    kiln(["train", "--out", &text(&parts), "--resume", "--steps", "8"]).ok();
    let bytes = |run: &Path, file: &str| fs::read(run.join("checkpoints/step-00000008").join(file)).unwrap();
    for file in ["model.safetensors", "state.safetensors"] {
        assert!(bytes(&whole, file) == bytes(&parts, file), "{file}");
    }
    let numbers = |run: &Path| -> Vec<[Value; 4]> {
        records(run).iter().map(|r| ["step", "loss", "gate_mean", "val_loss"].map(|key| r[key].clone())).collect()
    };
    assert_eq!(numbers(&whole), numbers(&parts));
    // The gate's scale is 0 for two steps, and rises over the next three.
    let gate: Vec<f64> = records(&whole).iter().map(|r| r["gate_mean"].as_f64().unwrap()).collect();
    assert!(gate[0] == 0.0 && gate[1] == 0.0, "{gate:?}");
    assert!(gate[2..].windows(2).take(3).all(|g| g[0] + 0.05 < g[1]) && (gate[7] - 0.5).abs() < 0.1, "{gate:?}");
}

#[test]
fn every_number_has_a_meaning() {
    let dir = tempdir().unwrap();
    let mamba = "--set encoder=mamba2 --set mamba_head=8 --set supervision_weight=0";
    for (i, more) in ["", "--set halting=true --set experts=0", mamba].into_iter().enumerate() {
        let run = dir.path().join(i.to_string());
        // Experts are for the other encoder.
        let sets = SMALL.split_whitespace().filter(|set| more != mamba || *set != "experts=3");
        let sets: String = sets.map(|set| format!(" --set {set}")).collect();
        kiln(format!("train hrm_lm --out {} --threads 1{sets} {more} --steps 3", text(&run)).split_whitespace()).ok();
        let last = records(&run).pop().unwrap();
        let has = |key: &str| last.get(key).is_some();
        let halts = more.contains("halting");
        assert!(has("val_cross_entropy") && has("val_closed_cross_entropy") && has("val_right") && has("val_closed_right"), "{last}");
        assert_eq!([has("halt_sum"), has("val_halt_sum")], [halts; 2], "{last}");
        assert_eq!([has("balance"), has("dropped")], [more.is_empty(); 2], "{last}");
        assert_eq!(has("supervision"), !more.contains("supervision_weight=0"), "{last}");
        all_meant(&run, &records(&run));
    }
}

/// Micro-batches of dense layers add up to the batch; balance and places are those of each.
#[test]
fn micro_batches_add_up() {
    let dir = tempdir().unwrap();
    let of = |name: &str, more: &str| {
        let run = dir.path().join(name);
        train(&run, &format!("--steps 4 --set experts=0 --set halting=true {more}")).ok();
        records(&run)
            .iter()
            .map(|r| ["loss", "cross_entropy", "supervision", "gate_mean", "halt_sum"].map(|key| r[key].as_f64().unwrap()))
            .collect::<Vec<_>>()
    };
    let (whole, parts) = (of("whole", ""), of("parts", "--set train.batch=4 --set accumulate=2"));
    for (step, (a, b)) in whole.iter().zip(&parts).enumerate() {
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 2e-4 * a.abs().max(0.1)), "step {step}: {a:?} and {b:?}");
    }
}

#[test]
fn replies_are_written_several_at_once_and_alone() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 30 --set learning_rate=0.01").ok();
    let prompts = dir.path().join("prompts.txt");
    fs::write(&prompts, "1+1=\n12+3=\n29+29=\n4+0=\n5+5=\n").unwrap();
    let written = |more: &str| {
        let args = format!("generate {} --prompts {} --json --max-tokens 5 --seed 3 --threads 1 {more}", text(&run), text(&prompts));
        let out = kiln(args.split_whitespace()).ok().out;
        out.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()).collect::<Vec<_>>()
    };
    let (all, two) = (written("--at-once 16"), written("--at-once 2"));
    assert!(all == two && all.len() == 5 && all[1]["prompt"] == "12+3=", "{all:?} {two:?}");
    let three = written("--at-once 6 --replies 3");
    assert!(three.iter().all(|row| row["texts"].as_array().unwrap().len() == 3), "{three:?}");
    let alone = |prompt: &str| {
        kiln(["generate", &text(&run), "--prompt", prompt, "--max-tokens", "5", "--temperature", "0", "--threads", "1"]).ok().out
    };
    let greedy = written("--temperature 0");
    for row in &greedy {
        let (prompt, reply) = (row["prompt"].as_str().unwrap(), row["text"].as_str().unwrap());
        assert_eq!(alone(prompt).trim_end_matches('\n'), reply, "{prompt}");
    }
    for refused in ["--raw", "--chat", "--think"] {
        kiln(["generate", &text(&run), refused]).fails(&[refused]);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let dir = tempdir().unwrap();
    for (sets, parts) in [
        ("--set top_k=4", &["model.top_k = 4", "model.experts = 3"][..]),
        ("--set heads=3", &["dim / heads = 16 / 3"]),
        ("--set state=32", &["model.state = 32", "encoder mamba2", "model.encoder=mamba2"]),
        ("--set encoder=mamba2", &["model.experts = 3", "transformer"]),
        ("--set source=3", &["model.source = 3", "generated sums"]),
        ("--set train.batch=1000000 --set source=512", &["train.batch = 1000000", "2^24"]),
        ("--set capacity=0", &["capacity"]),
        ("--set gradient=some", &["gradient"]),
    ] {
        train(&dir.path().join("run"), &format!("--steps 1 {sets}")).fails(parts);
    }
}

/// Its weights begin at 0, where a sigmoid is a half. What is evaluated is the gate that the run works towards, also while it is closed.
#[test]
fn an_evaluation_has_the_scale_of_the_gate() {
    let dir = tempdir().unwrap();
    train(dir.path(), "--steps 1 --set gate_scale=0.4 --set gate_warmup=9 --set learning_rate=1e-38").ok();
    let last = records(dir.path()).pop().unwrap();
    let gate = ["gate_mean", "val_gate_mean"].map(|key| last[key].as_f64().unwrap());
    assert!(gate[0] == 0.0 && (gate[1] - 0.2).abs() < 1e-5, "{gate:?}");
}

/// How unevenly experts are used is a mean over micro-batches: two halves of a batch are about as uneven as the batch, and not twice as much.
#[test]
fn the_balance_of_a_step_is_a_mean_over_its_micro_batches() {
    let dir = tempdir().unwrap();
    let of = |name: &str, more: &str| {
        let run = dir.path().join(name);
        train(&run, &format!("--steps 1 --set capacity=100 {more}")).ok();
        ["balance", "loss"].map(|key| records(&run)[0][key].as_f64().unwrap())
    };
    let (whole, parts) =
        (of("whole", "--set balance_weight=10"), of("parts", "--set balance_weight=10 --set train.batch=4 --set accumulate=2"));
    for (a, b) in whole.iter().zip(&parts) {
        assert!((a - b).abs() < 0.2 * a, "{whole:?} and {parts:?}");
    }
}
