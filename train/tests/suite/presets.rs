//! `--optimize`: presets of passes by what they change in the numbers.

use crate::common::*;
use std::fs;
use std::path::Path;
use tempfile::tempdir;

const SIZES: &str = "--device cpu --threads 1 --steps 4 --set log_every=1 --set eval_batches=1 --set batch=2 --set horizon=8";

fn run(recipe: &str, out: &Path, args: &str) -> Ran {
    let all = format!("train {recipe} --preset tiny {SIZES} {args} --out");
    kiln(all.split_whitespace().map(str::to_owned).chain([text(out)]))
}

/// The names of the passes that applied anywhere, from the run's receipts.
fn applied(out: &Path) -> Vec<String> {
    let receipts: serde_json::Value = serde_json::from_str(&fs::read_to_string(out.join("receipts.json")).unwrap()).unwrap();
    let all = receipts.as_object().unwrap().values().flat_map(|r| r.as_array().unwrap());
    let on = all.filter(|r| r["applied"].as_u64().unwrap() > 0).map(|r| r["pass"].as_str().unwrap().to_string());
    on.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
}

#[test]
fn exact_is_none_bit_for_bit_and_does_something() {
    for recipe in ["decoder", "hydra"] {
        let dir = tempdir().unwrap();
        let [none, exact, reordered] = ["none", "exact", "reordered"].map(|preset| {
            let out = dir.path().join(preset);
            let said = run(recipe, &out, &format!("--optimize {preset}")).ok().out;
            assert!(said.contains(&format!("passes by --optimize {preset}")), "{said}");
            out
        });
        assert_eq!(losses(&none), losses(&exact), "{recipe}");
        same_bytes(&checkpoint(&none, 4), &checkpoint(&exact, 4));
        let (least, exactly, more) = (applied(&none), applied(&exact), applied(&reordered));
        assert!(exactly.contains(&"in-place".into()) && !least.contains(&"in-place".into()), "{recipe}: {least:?}, {exactly:?}");
        assert!(more.contains(&"flash-attention".into()) && !exactly.contains(&"flash-attention".into()), "{recipe}: {exactly:?}");
        // Sums in another order leave other last bits in the weights: the comparison above could fail.
        let weights = |out: &Path| fs::read(checkpoint(out, 4).join("model.safetensors")).unwrap();
        assert!(weights(&reordered) != weights(&none), "{recipe}");
    }
}

#[test]
fn a_pass_that_is_named_wins_and_a_resumed_run_keeps_the_preset() {
    let dir = tempdir().unwrap();
    let [run_a, whole] = ["a", "whole"].map(|name| dir.path().join(name));
    let said = run("decoder", &run_a, "--optimize none --pass flash-attention=auto").ok().out;
    let measured = said.lines().find(|l| l.starts_with("planned peak ")).unwrap_or_else(|| panic!("{said}"));
    assert!(measured.contains(", measured ") && measured.ends_with("iB resident"), "{measured}");
    assert!(records(&run_a, "train").iter().all(|r| r.get("device_peak_bytes").is_none()), "the CPU has no bytes of a device");
    assert!(applied(&run_a).contains(&"flash-attention".into()) && !applied(&run_a).contains(&"in-place".into()));
    assert!(fs::read_to_string(run_a.join("config.toml")).unwrap().contains("optimize = \"none\""));
    resume(&run_a, "--steps 6").ok();
    assert!(applied(&run_a).contains(&"flash-attention".into()) && !applied(&run_a).contains(&"in-place".into()));
    let args = SIZES.replace("--steps 4", "--steps 6");
    let all = format!("train decoder --preset tiny {args} --optimize none --pass flash-attention=auto --out");
    kiln(all.split_whitespace().map(str::to_owned).chain([text(&whole)])).ok();
    same_bytes(&checkpoint(&run_a, 6), &checkpoint(&whole, 6));
    let said = resume(&run_a, "--steps 7 --optimize exact").ok().out;
    assert!(said.contains("optimize was \"none\", now it is \"exact\": numbers stay the same, bit for bit"), "{said}");
    assert!(applied(&run_a).contains(&"in-place".into()));
    // The same key in a file, and for a checkpoint.
    let file = dir.path().join("own.toml");
    fs::write(&file, "optimize = \"exact\"\n").unwrap();
    let planned = kiln(["plan", "decoder", "--device", "cpu", "--config", &text(&file)]).ok().out;
    assert!(planned.contains("in-place") && !planned.contains("flash-attention"), "{planned}");
    kiln(["eval", &text(&run_a), "--device", "cpu", "--optimize", "none"]).ok();
    kiln(["generate", &text(&run_a), "--device", "cpu", "--optimize", "none", "--max-tokens", "3"]).ok();
}

fn row(text: &str, pass: &str) -> String {
    text.lines().find(|l| l.split_whitespace().next() == Some(pass)).unwrap_or_default().to_string()
}

/// Every recipe and preset, as typed: bf16 on a GPU, none of it with `--optimize exact` or `none`, whatever the preset says.
#[test]
fn a_gpu_computes_in_bf16_and_exact_is_f32_in_every_preset() {
    for [recipe, preset] in [
        ["decoder", "gpt2-124m"],
        ["decoder", "qwen2.5-7b"],
        ["hydra", "100m"],
        ["hrm", "sudoku-moe"],
        ["vision_bdh", "cifar10"],
        ["lior", "production"],
    ] {
        let plan = |more: &[&str]| kiln([&["plan", recipe, "--preset", preset, "--for-sm", "90"], more].concat()).ok().out;
        let typed = plan(&[]);
        assert!(row(&typed, "bf16").contains("auto"), "{recipe} {preset}: {typed}");
        for optimize in ["none", "exact"] {
            let exact = plan(&["--optimize", optimize]);
            for pass in ["bf16", "fp8", "tf32", "adam8bit"] {
                assert_eq!(row(&exact, pass), "", "{recipe} {preset} --optimize {optimize}: {exact}");
            }
        }
        let reordered = plan(&["--optimize", "reordered"]);
        assert!(row(&reordered, "tf32").contains("auto") && row(&reordered, "bf16").is_empty(), "{recipe} {preset}: {reordered}");
        // What is asked for by name stays.
        assert!(row(&plan(&["--optimize", "exact", "--pass", "bf16=auto"]), "bf16").contains("auto"));
    }
    let moe = kiln(["plan", "hrm", "--preset", "sudoku-moe", "--for-sm", "90"]).ok().out;
    let grouped: Vec<String> = row(&moe, "grouped-gemm").split_whitespace().map(str::to_owned).collect();
    assert!(grouped.len() > 4 && grouped[3] != "0" && grouped[4] == "0", "every grouped GEMM applies: {grouped:?}");
}

/// A run notes its precision, and keeps it on a device whose default is another; runs of earlier versions go on as they were.
#[test]
fn a_resumed_run_keeps_its_precision() {
    let dir = tempdir().unwrap();
    let out = dir.path().join("run");
    let said = run("decoder", &out, "").ok().out;
    assert!(said.contains("precision: f32"), "{said}");
    let config = fs::read_to_string(out.join("config.toml")).unwrap();
    assert!(config.contains("optimize = \"mixed\"") && config.contains("bf16 = \"off\"") && config.contains("fp8 = \"off\""), "{config}");
    // As if it had begun on a GPU.
    let gpu = config.replace("bf16 = \"off\"", "bf16 = \"auto\"");
    fs::write(out.join("config.toml"), &gpu).unwrap();
    let said = resume(&out, "--steps 5").ok().out;
    assert!(said.contains("precision: bf16, parameters and optimizer states f32"), "{said}");
    assert!(applied(&out).contains(&"bf16".into()));
    // Asked for by name, it changes, and that is said.
    let said = resume(&out, "--steps 6 --optimize exact").ok().out;
    assert!(said.contains("precision: f32") && said.contains("passes.bf16 was \"auto\""), "{said}");
    // A run from before: f32 on any device.
    let old = config.replace("optimize = \"mixed\"", "optimise = \"reordered\"");
    let old: String =
        old.lines().filter(|l| !["bf16", "fp16", "tf32", "fp8"].iter().any(|p| l.starts_with(p))).map(|l| format!("{l}\n")).collect();
    fs::write(out.join("config.toml"), &old).unwrap();
    let said = resume(&out, "--steps 7").ok().out;
    assert!(said.contains("precision: f32"), "{said}");
    let now = fs::read_to_string(out.join("config.toml")).unwrap();
    assert!(now.contains("optimize = \"reordered\"") && now.contains("tf32 = \"off\"") && !now.contains("optimise"), "{now}");
}

#[test]
fn a_wrong_word_is_refused_with_the_known_ones() {
    let known = ["'exakt'", "did you mean 'exact'?", "none", "reordered", "fast"];
    kiln(["plan", "--optimize", "exakt"]).fails(&known);
    kiln(["plan", "--set", "optimize=exakt"]).fails(&known);
}

#[test]
fn fast_is_bf16_and_fp8_on_a_gpu_that_has_it() {
    let plan = |sm: &str| {
        let args =
            ["plan", "decoder", "--preset", "tiny", "--optimize", "fast", "--for-sm", sm, "--set", "dim=512", "--set", "hidden=1024"];
        kiln(args).ok().out
    };
    let new = plan("90");
    assert!(row(&new, "bf16").contains("auto") && row(&new, "fp8").contains("auto"), "{new}");
    let old = plan("80");
    assert!(row(&old, "bf16").contains("auto"), "{old}");
    let fp8 = row(&old, "fp8");
    assert!(fp8.contains("off") && fp8.contains("compute capability 8.9 or later (this one has 8.0)"), "{old}");
}

#[test]
fn passes_shows_what_a_preset_switches() {
    let modes = |preset: &str, pass: &str| -> Vec<String> {
        let text = kiln(["passes", "--optimize", preset, "--for-sm", "80"]).ok().out;
        let row = text.lines().find(|l| l.split_whitespace().next() == Some(pass)).unwrap_or_else(|| panic!("{text}"));
        row.split_whitespace().skip(1).take(3).map(str::to_owned).collect()
    };
    assert_eq!(modes("exact", "fuse-pointwise"), ["auto", "off", "off"]);
    assert_eq!(modes("exact", "recompute"), ["auto", "auto", "off"]);
    assert_eq!(modes("fast", "fp8"), ["off", "off", "off"]);
    assert_eq!(modes("fast", "bf16"), ["off", "auto", "auto"]);
    assert_eq!(modes("none", "in-place"), ["off", "off", "off"]);
}

/// A pass that is off has a line in the ledger where it is asked for: what it gains, and what it changes in the numbers.
#[test]
fn the_ledger_times_passes_that_are_off_where_it_is_asked_to() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("bench.json");
    let args = "bench decoder --preset tiny --device cpu --threads 1 --set batch=1 --set model.layers=1 --set model.dim=64 --set model.hidden=128 --set model.heads=2 --set model.kv_heads=2 --repeat 1 --rounds 3 --steps-for-error 2 --ledger --also bf16,tf32 --json";
    let said = kiln(args.split_whitespace().map(str::to_owned).chain([text(&file)])).ok().out;
    assert!(said.contains("bf16, switched on"), "{said}");
    let json: serde_json::Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let line = |pass: &str| json["ledger"].as_array().unwrap().iter().find(|l| l["pass"] == pass).cloned().unwrap();
    let bf16 = line("bf16");
    assert!(bf16["switched_on"] == true && bf16["sites"].as_u64() > Some(0) && bf16["differ"]["gradient"].as_f64() > Some(1e-6), "{bf16}");
    assert!(line("flash-attention")["switched_on"] == false);
    assert_eq!(line("tf32")["sites"], 0, "the CPU has no TF32");
    assert!(json["measured_bytes"].is_null() && json["resident_bytes"].is_u64(), "{json}");
    kiln(["bench", "--ledger", "--also", "bf61"]).fails(&["bf61", "did you mean 'bf16'?"]);
}
