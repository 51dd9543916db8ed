//! Weights averaged over steps: what they are, that a resumed run has the same, and who uses them.

use super::common::{checkpoint, kiln, records, resume, same_bytes, text, train};
use kiln::checkpoint::load_safetensors;
use std::fs;
use std::path::Path;

const DECAY: f64 = 0.75;

fn numbers(path: &Path) -> Vec<f32> {
    let file = load_safetensors(path).unwrap();
    let mut names = file.names();
    names.sort();
    names.iter().flat_map(|n| bytemuck::pod_collect_to_vec::<u8, f32>(file.get(n).unwrap().2)).collect()
}

#[test]
fn checkpoints_hold_the_mean_of_the_weights_and_a_resumed_run_the_same() {
    let dir = tempfile::tempdir().unwrap();
    for (name, more) in [("plain", ""), ("micro", "--set accumulate=2 --set optimizer=\"muon\"")] {
        let [whole, parts] = ["whole", "parts"].map(|p| dir.path().join(format!("{name}-{p}")));
        let set = format!("--set ema={DECAY} --set save_every=1 --set keep=0 --set learning_rate=0.01 {more}");
        train(&whole, &format!("--steps 5 {set}")).ok();
        train(&parts, &format!("--steps 2 {set}")).ok();
        resume(&parts, "--steps 5").ok();
        let seen: Vec<Vec<f32>> = (1..=5).map(|step| numbers(&checkpoint(&whole, step).join("model.safetensors"))).collect();
        for step in 1..=5usize {
            let [a, b] = [&whole, &parts].map(|out| checkpoint(out, step as u64));
            same_bytes(&a, &b);
            let averaged = a.join("averaged.safetensors");
            assert!(fs::read(&averaged).unwrap() == fs::read(b.join("averaged.safetensors")).unwrap(), "{name}, step {step}");
            let weight = |t: usize| DECAY.powi((step - 1 - t) as i32);
            let mass: f64 = (0..step).map(weight).sum();
            for (i, ours) in numbers(&averaged).into_iter().enumerate() {
                let mean = (0..step).map(|t| seen[t][i] as f64 * weight(t)).sum::<f64>() / mass;
                assert!((ours as f64 - mean).abs() < 1e-6, "{name}, step {step}: {ours}, not {mean}");
            }
        }
        assert!(numbers(&checkpoint(&whole, 5).join("averaged.safetensors")) != seen[4], "{name}: nothing was averaged");
    }
}

fn evaluated(run: &str, more: &[&str]) -> serde_json::Value {
    serde_json::from_str(&kiln([&["eval", run, "--json", "--batches", "1", "--threads", "1"], more].concat()).ok().out).unwrap()
}

#[test]
fn evaluation_generation_and_new_runs_take_the_averages() {
    let dir = tempfile::tempdir().unwrap();
    let (out, plain) = (dir.path().join("a"), dir.path().join("b"));
    let said = train(&out, "--steps 4 --set ema=0.9 --set eval_every=4 --set learning_rate=0.05").ok();
    assert!(said.out.contains("averaged over steps (train.ema = 0.9)"), "{said:#?}");
    let run = text(&out);
    let (averaged, raw) = (evaluated(&run, &[]), evaluated(&run, &["--raw-weights"]));
    assert_eq!((averaged["weights"].as_str(), raw["weights"].as_str()), (Some("averaged"), Some("last step")));
    assert_ne!(averaged["loss"], raw["loss"]);
    // Training goes on with the weights of the last step, and validates with the average.
    train(&plain, "--steps 4 --set eval_every=4 --set learning_rate=0.05").ok();
    same_model(&checkpoint(&out, 4), &checkpoint(&plain, 4));
    assert_eq!(records(&out, "val")[0]["val_loss"], averaged["loss"]);
    assert_eq!(records(&plain, "val")[0]["val_loss"], raw["loss"]);
    assert!(evaluated(&text(&plain), &[])["weights"] == "last step");
    assert!(!checkpoint(&plain, 4).join("averaged.safetensors").exists());

    let write =
        |more: &[&str]| kiln([&["generate", &run, "--temperature", "0", "--max-tokens", "40", "--threads", "1"], more].concat()).ok();
    let (a, b) = (write(&[]), write(&["--raw-weights"]));
    assert!(a.err.contains("averaged over steps") && b.err.contains("of the last step"), "{a:#?} {b:#?}");
    let mut weights = vec![];
    for (i, from) in [run.clone(), text(&checkpoint(&out, 4).join("model.safetensors"))].iter().enumerate() {
        let next = dir.path().join(format!("next-{i}"));
        train(&next, &format!("--steps 1 --set learning_rate=1e-38 --set weight_decay=0 --init-from {from}")).ok();
        weights.push(fs::read(checkpoint(&next, 1).join("model.safetensors")).unwrap());
    }
    let ours = |file: &str| numbers(&checkpoint(&out, 4).join(file));
    assert!(weights[0] != weights[1] && weights[1] == fs::read(checkpoint(&out, 4).join("model.safetensors")).unwrap());
    assert_eq!(numbers(&checkpoint(&dir.path().join("next-0"), 1).join("model.safetensors")), ours("averaged.safetensors"));
}

fn same_model(a: &Path, b: &Path) {
    let [x, y] = [a, b].map(|p| fs::read(p.join("model.safetensors")).unwrap());
    assert!(x == y, "the average changes what is trained");
}

#[test]
fn what_has_no_weights_to_average_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a");
    kiln(["train", "lior", "--out", &text(&out), "--set", "ema=0.9"]).fails(&["train.ema = 0.9", "lior"]);
    train(&out, "--set ema=1.0").fails(&["train.ema", "1"]);
    assert!(!out.exists());
}
