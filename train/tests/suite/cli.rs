//! The command line: output is what scripts expect, settings win in the right order, and nothing panics.

use crate::common::*;
use serde_json::Value;
use std::fs::{self, File};
use std::io::Read;
use std::path::PathBuf;
use std::process::Stdio;
use tempfile::tempdir;

#[test]
fn a_seed_may_be_any_number_of_64_bits() {
    let dir = tempdir().unwrap();
    let largest = dir.path().join("largest");
    let ran = train(&largest, "--steps 1 --seed 18446744073709551615");
    match ran.code {
        Some(0) => drop(resume(&largest, "--steps 2").ok()),
        _ => ran.fails(&["--seed", "18446744073709551615"]),
    }
}

/// The last batch is filled up with windows that do not count, also where it is the first.
#[test]
fn every_validation_window_counts_once() {
    let dir = tempdir().unwrap();
    let data = byte_data(&dir.path().join("data"));
    let loss = |batch: usize| {
        let out = dir.path().join(batch.to_string());
        // A rate of nothing: the weights are those of the seed, whatever the batch.
        let args = format!("--steps 1 --set learning_rate=1e-38 --set weight_decay=0 --set batch={batch} --data {}", data.display());
        train(&out, &format!("{args} --set eval_batches=0")).ok();
        records(&out, "eval").last().unwrap()["val_loss"].as_f64().unwrap()
    };
    let (one, more, all) = (loss(1), loss(7), loss(200));
    assert!((one - more).abs() < 1e-5 * one && (one - all).abs() < 1e-5 * one, "{one} {more} {all}");
}

#[test]
fn a_report_leaves_the_files_beside_it_alone() {
    let dir = tempdir().unwrap();
    let beside = dir.path().join("speed.tmp");
    fs::write(&beside, "mine").unwrap();
    let mut args = vec!["bench", "hydra"];
    args.extend(SMALL);
    let json = text(&dir.path().join("speed.json"));
    args.extend(["--repeat", "1", "--warmup", "0", "--json", &json]);
    kiln(&args).ok();
    let seen: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    assert!(seen["ms"].as_f64().unwrap() > 0.0 && seen["per_s"].as_f64().unwrap() > 0.0, "{seen}");
    assert_eq!(fs::read_to_string(&beside).ok().as_deref(), Some("mine"), "speed.tmp was taken for a temporary name");

    // Where FILE is a link, as /dev/stdout is, what it leads to is written.
    let (link, target) = (dir.path().join("link.json"), dir.path().join("target.json"));
    fs::write(&target, "").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let link_text = text(&link);
    *args.last_mut().unwrap() = &link_text;
    kiln(&args).ok();
    assert!(link.is_symlink(), "the link was replaced by a file");
    assert!(fs::read_to_string(&target).unwrap().contains("\"ms\""));
}

#[test]
fn only_some_ops_are_timed() {
    let table = kiln(["bench", "ops", "--only", "diversity", "--repeat", "1"]).ok().out;
    let rows: Vec<&str> = table.lines().skip(1).collect();
    assert!(!rows.is_empty() && rows.iter().all(|r| r.starts_with("diversity ")), "{table}");
    // The op beside the plain ops that define it, in one call.
    let table = kiln(["bench", "ops", "--only", "few_rows/Qwen3, o", "--repeat", "1", "--unfused"]).ok().out;
    let times =
        table.lines().find(|l| l.starts_with("few_rows")).and_then(|l| l.split_whitespace().last()).and_then(|t| t.strip_suffix('x'));
    assert!(table.contains("unfused, ms") && times.is_some_and(|t| t.parse::<f64>().unwrap() > 0.0), "{table}");
    kiln(["bench", "hydra", "--unfused"]).fails(&["--unfused is for bench ops"]);
    kiln(["bench", "ops", "--only", "few_rows/", "--serve"]).fails(&["name one case"]);
    kiln(["bench", "ops", "--only", "no such op"]).fails(&["no such op"]);
    kiln(["bench", "hydra", "--only", "attention"]).fails(&["--only is for bench ops"]);
}

#[test]
fn a_tokenizer_without_a_newline_trains_to_the_end() {
    let dir = tempdir().unwrap();
    let data = word_data(dir.path(), &["red", "green", "blue"], at_white_space());
    let run = dir.path().join("run");
    train(&run, &format!("--steps 2 --data {} --set vocab=4", data.display())).ok();
    let said = kiln(["generate", &text(&run), "--prompt", "red green", "--max-tokens", "5", "--temperature", "0"]).ok().out;
    assert!(said.starts_with("red green"), "{said}");
    kiln(["generate", &text(&run), "--prompt", " \n "]).fails(&["prompt"]);
}

/// What decides who enters a recursion is trained all the same, and generation has no use for it.
#[test]
fn a_model_whose_every_token_enters_every_recursion_writes_too() {
    let dir = tempdir().unwrap();
    for (name, capacity) in [("all", "--set edge_capacity=[1.0] --set middle_capacity=[1.0]"), ("edge", "--set edge_capacity=[1.0,1.0]")] {
        let run = dir.path().join(name);
        train(&run, &format!("--steps 2 {capacity}")).ok();
        let said = kiln(["generate", &text(&run), "--prompt", "the ", "--max-tokens", "4", "--temperature", "0", "--threads", "1"]).ok();
        assert!(said.out.starts_with("the ") && said.out.len() > 8, "{said:#?}");
    }
}

#[test]
fn a_prompt_is_continued() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 3").ok();
    let generate = |args: &[&str]| {
        let mut all = vec!["generate".to_string(), text(&run), "--threads".into(), "1".into()];
        all.extend(args.iter().map(|s| s.to_string()));
        command(all).output().unwrap()
    };
    let out = |args: &[&str]| {
        let o = generate(args);
        assert!(o.status.success(), "{o:?}");
        o.stdout
    };
    let draw = ["--temperature", "1", "--top-p", "1", "--max-tokens", "40", "--seed"];
    let seeded = |seed: &str| out(&[&draw[..], &[seed]].concat());
    assert_eq!(seeded("1"), seeded("1"));
    assert_ne!(seeded("1"), seeded("2"));
    assert_eq!(seeded("18446744073709551615"), seeded("18446744073709551615"));
    let greedy = |seed: &str| out(&["--temperature", "0", "--max-tokens", "40", "--seed", seed]);
    assert_eq!(greedy("1"), greedy("2"));
    // The smallest set that has any probability is the most likely token.
    assert_eq!(greedy("1"), out(&["--temperature", "1", "--top-p", "1e-9", "--max-tokens", "40"]));
    // The model was trained on 32 tokens; what it writes first does not depend on how much follows.
    let (short, long) = (greedy("1"), out(&["--temperature", "0", "--max-tokens", "300"]));
    assert!(long.len() > 4 + 300, "{}", long.len());
    assert!(long.starts_with(&short[..short.len() - 4]));
    assert_eq!(out(&["--max-tokens", "0"]), b"the \n");

    let every: Vec<String> = (0..256).flat_map(|i| ["--stop-id".to_string(), i.to_string()]).collect();
    let every: Vec<&str> = every.iter().map(|s| s.as_str()).collect();
    assert_eq!(out(&every), b"the \n");
    let prompt = "caf\u{e9} \u{1f980} \u{0}".replace('\0', "\u{200b}");
    assert!(out(&["--prompt", &prompt, "--max-tokens", "4"]).starts_with(prompt.as_bytes()));
    let longer = "a prompt that is longer than what the model was trained on, ".repeat(5);
    assert!(out(&["--prompt", &longer, "--max-tokens", "4"]).starts_with(longer.as_bytes()));
}

#[test]
fn the_command_line_wins_over_the_file_and_the_file_over_the_preset() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("mine.toml");
    fs::write(&file, "preset = 'tiny'\nseed = 4\n[model]\ndim = 64\nhidden = 48\n[train]\nsteps = 1\n[passes]\nfuse-pointwise = 'off'\n")
        .unwrap();
    let run = dir.path().join("run");
    let args = format!("--config {} --seed 6 --set dim=16 --pass recompute=auto,what=blocks", file.display());
    // SMALL sets hidden too, and so would win over the file: it stands here without it.
    let all: Vec<String> = train_args(&run, &args).join(" ").replace(" --set hidden=32", "").split(' ').map(str::to_owned).collect();
    kiln(all).ok();
    let config: toml::Table = fs::read_to_string(run.join("config.toml")).unwrap().parse().unwrap();
    let number = |section: &str, key: &str| config[section][key].as_integer();
    assert_eq!((number("model", "dim"), number("model", "hidden"), number("train", "steps")), (Some(16), Some(48), Some(1)));
    assert_eq!((number("train", "warmup"), config["seed"].as_integer()), (Some(20), Some(6)));
    let receipts: Value = serde_json::from_str(&fs::read_to_string(run.join("receipts.json")).unwrap()).unwrap();
    let mode = |pass: &str| receipts["train"].as_array().unwrap().iter().find(|r| r["pass"] == pass).map(|r| r["mode"].clone());
    assert_eq!((mode("fuse-pointwise"), mode("recompute")), (Some("off".into()), Some("auto".into())));
}

#[test]
fn runs_without_a_name_get_one() {
    let dir = tempdir().unwrap();
    let here = |args: &str| {
        let mut c = command(["train", "hydra"].into_iter().chain(SMALL.iter().copied()).chain(args.split_whitespace()));
        c.current_dir(dir.path());
        finish(c)
    };
    let mut nothing = command(["train", "--resume"]);
    nothing.current_dir(dir.path());
    finish(nothing).fails(&["no run", "--out"]);
    here("--steps 1").ok();
    here("--steps 1 --seed 2").ok();
    assert_eq!(names(&dir.path().join("runs")), ["hydra-tiny", "hydra-tiny-2"]);
    let said = here("--seed 2 --steps 2 --resume").ok().out;
    assert!(said.contains("resumed from runs/hydra-tiny-2/checkpoints/step-00000001"), "{said}");
    assert_eq!(names(&dir.path().join("runs")), ["hydra-tiny", "hydra-tiny-2"]);
}

#[test]
fn a_newer_checkpoint_that_is_passed_over_is_named() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 2 --set save_every=1").ok();
    damage(&checkpoint(&run, 2).join("model.safetensors"), |b| b.truncate(10));
    let path = text(&run);
    for args in [vec!["eval", &path], vec!["generate", &path, "--max-tokens", "2"]] {
        let ran = kiln(&args).ok();
        assert!(format!("{}{}", ran.out, ran.err).contains("step-00000002"), "{args:?} used step 1 in silence: {ran:#?}");
    }
}

#[test]
fn text_is_streamed() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 1").ok();
    let mut child = start(vec!["generate".into(), text(&run), "--threads".into(), "1".into(), "--max-tokens".into(), "100000".into()]);
    let mut first = [0; 40];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    assert!(child.try_wait().unwrap().is_none(), "the text came when all was done");
    assert!(first.starts_with(b"the "));
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Every command, as arguments.
const COMMANDS: &[&str] = &[
    "",
    "train",
    "eval",
    "generate",
    "predict",
    "plan",
    "check",
    "check ops",
    "check passes",
    "check golden",
    "passes",
    "doctor",
    "data",
    "data prepare",
    "data inspect",
    "data preview",
    "bench",
    "profile",
];

#[test]
fn every_command_has_help_with_examples() {
    let mut without = vec![];
    for name in COMMANDS {
        let ran = kiln(name.split_whitespace().chain(["--help"])).ok();
        if !ran.out.contains("Examples:") || !ran.out.contains(&format!("kiln {name}")) {
            without.push(*name);
        }
    }
    assert!(without.is_empty(), "no examples in the help of {without:?}");
    let version = kiln(["--version"]).ok().out;
    assert_eq!(version.trim(), format!("kiln {}", env!("CARGO_PKG_VERSION")));
    kiln([] as [&str; 0]).fails(&["Usage"]);
}

#[test]
fn json_is_json() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 2").ok();
    let json = |args: &[&str]| -> Value {
        let ran = kiln(args).ok();
        serde_json::from_str(&ran.out).unwrap_or_else(|e| panic!("{args:?}: {e}: {}", ran.out))
    };
    let evaluated = json(&["eval", &text(&run), "--json"]);
    all_declared(&evaluated);
    assert_eq!(evaluated["step"], 2);
    assert_eq!(evaluated["loss"], records(&run, "eval").last().unwrap()["val_loss"], "eval repeats what training found");
    assert!(json(&["passes", "--json"]).as_array().unwrap().iter().any(|p| p["name"] == "recompute"));
    assert_eq!(json(&["doctor", "--json"])["version"], env!("CARGO_PKG_VERSION"));
    let plan = json(&["plan", "hydra", "--preset", "tiny", "--json"]);
    assert!(plan.as_array().unwrap().iter().all(|p| p["peak"].as_u64() > Some(0) && p["flops"].as_u64() > Some(0)), "{plan}");
    let receipts: Value = serde_json::from_str(&fs::read_to_string(run.join("receipts.json")).unwrap()).unwrap();
    assert!(receipts.as_object().unwrap().len() >= 2, "{receipts}");
    let config: toml::Table = fs::read_to_string(run.join("config.toml")).unwrap().parse().unwrap();
    assert_eq!(config["model"]["dim"].as_integer(), Some(32));
    assert_eq!(config["train"]["steps"].as_integer(), Some(2));
}

/// `metrics.jsonl` as its contract reads: one object a line, a later record of a step replaces an earlier one.
#[test]
fn metrics_by_step_are_those_of_the_run_that_never_stopped() {
    let dir = tempdir().unwrap();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    train(&whole, "--steps 4").ok();
    train(&parts, "--steps 2").ok();
    resume(&parts, "--steps 4").ok();
    let by_step = |run: &PathBuf| -> std::collections::BTreeMap<u64, String> {
        let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        let all = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
        all.map(|r| (r["step"].as_u64().unwrap(), r["loss"].to_string())).collect()
    };
    assert_eq!(by_step(&whole), by_step(&parts));
}

#[test]
fn a_closed_or_full_output_is_no_panic() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 2").ok();
    let out = text(&run);
    let data = byte_data(&dir.path().join("data"));
    let new = |name: &str| train_args(&dir.path().join(name), "--steps 2").join(" ");
    let commands = |n: &str| {
        vec![
            "--help".to_string(),
            "--version".into(),
            "passes".into(),
            "passes --json".into(),
            "doctor".into(),
            "doctor --json".into(),
            "plan hydra".into(),
            "plan hydra --json".into(),
            format!("eval {out}"),
            format!("eval {out} --json"),
            format!("generate {out} --max-tokens 20"),
            format!("data inspect {}", data.display()),
            format!("data prepare --generated 50 --out {}", dir.path().join(format!("made-{n}")).display()),
            format!("bench hydra {} --repeat 1 --warmup 0", SMALL.join(" ")),
            "check ops softmax".into(),
            format!("check golden {GOLDEN}"),
            new(&format!("run-{n}")),
        ]
    };
    let mut problems = vec![];
    let mut look = |what: &str, line: &str, ran: Ran| {
        if ran.panicked() || ran.code == Some(101) {
            problems.push(format!("{what}: kiln {}: exit {:?}", line.replace(&SMALL.join(" "), "SMALL"), ran.code));
        }
    };
    for line in commands("pipe") {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = command(line.split_whitespace()).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        look("closed pipe", &line, end(child));
    }
    for line in commands("full") {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let child = command(line.split_whitespace()).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
        look("full disk", &line, end(child));
    }
    assert!(problems.is_empty(), "{}:\n{}", problems.len(), problems.join("\n"));
}

/// Without a GPU's driver, without NVRTC, and with files of their names that are no libraries: each is said, with the way out.
#[test]
fn what_is_missing_for_a_gpu_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str], libraries: &std::path::Path| {
        let o = std::process::Command::new(env!("CARGO_BIN_EXE_kiln"))
            .args(args)
            .env_clear()
            .env("LD_LIBRARY_PATH", libraries)
            .env("XDG_CACHE_HOME", dir.path().join("cache"))
            .output()
            .unwrap();
        (o.status.code(), String::from_utf8_lossy(&[o.stdout, o.stderr].concat()).into_owned())
    };
    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let (code, text) = run(&["doctor"], &empty);
    assert_eq!(code, Some(0), "{text}");
    if !text.contains("gpu      none") {
        return; // a machine with a card has nothing missing
    }
    let (code, text) = run(&["train", "--device", "cuda"], &empty);
    assert!(code == Some(1) && text.contains("libcuda was not found: install NVIDIA's driver"), "{text}");
    let (code, text) = run(&["check", "kernels", "--sm", "90"], &empty);
    assert!(code == Some(1) && text.contains("libnvrtc") && text.contains("was not found: install the CUDA 13 toolkit"), "{text}");
    let bogus = dir.path().join("bogus");
    std::fs::create_dir(&bogus).unwrap();
    for name in ["libcuda.so.1", "libnvrtc-builtins.so.13.0", "libnvrtc.so.13"] {
        std::fs::write(bogus.join(name), "no library").unwrap();
    }
    let (code, text) = run(&["train", "--device", "cuda"], &bogus);
    assert!(code == Some(1) && text.contains("libcuda does not load") && text.contains("libcuda.so.1"), "{text}");
    let (code, text) = run(&["check", "kernels", "--sm", "90"], &bogus);
    assert!(code == Some(1) && text.contains("libnvrtc-builtins does not load"), "{text}");
    let (code, text) = run(&["doctor"], &bogus);
    assert!(code == Some(0) && text.contains("does not load"), "{text}");
    // auto means the CPU then, and says so.
    let (code, text) = run(&["plan", "hydra", "--preset", "tiny"], &bogus);
    assert_eq!(code, Some(0), "{text}");
}

/// `kiln eval` reads all of a split, whatever training looked at, and says what it read.
#[test]
fn eval_reads_the_whole_split_and_says_how_much_it_read() {
    let dir = tempdir().unwrap();
    let data = byte_data(&dir.path().join("data"));
    let (part, whole, made) = (dir.path().join("part"), dir.path().join("whole"), dir.path().join("made"));
    let said = train(&part, &format!("--steps 3 --set eval_every=1 --data {}", data.display())).ok().out;
    train(&whole, &format!("--steps 3 --set eval_batches=0 --data {}", data.display())).ok();
    train(&made, "--steps 3").ok();
    let json = |args: &[&str]| -> Value { serde_json::from_str(&kiln([&["eval"], args, &["--json"]].concat()).ok().out).unwrap() };

    let all = json(&[&text(&part)]);
    let batches = all["of_batches"].as_u64().unwrap();
    assert!(batches > 2 && all["batches"] == batches, "{all}");
    assert_eq!(all["loss"], records(&whole, "eval").last().unwrap()["val_loss"], "the same weights, all of the split");
    let two = json(&[&text(&part), "--batches", "2"]);
    assert_eq!((&two["batches"], &two["of_batches"]), (&2.into(), &batches.into()));
    let read = |args: &[&str]| kiln([&["eval"], args].concat()).ok().out;
    assert!(read(&[&text(&part)]).contains(&format!("all of the validation split, {batches} batches")));
    assert!(read(&[&text(&part), "--batches", "2"]).contains(&format!("2 of {batches} batches")));
    // Training says once that it reads less.
    let line = format!("each validation reads 1 of {batches} batches; train.eval_batches = 1 is the most");
    assert_eq!(said.matches(&line).count(), 1, "{said}");

    // Generated data has no end: as much as training reads.
    let made_json = json(&[&text(&made)]);
    assert_eq!((&made_json["batches"], &made_json["of_batches"]), (&1.into(), &Value::Null));
    assert!(read(&[&text(&made)]).contains("1 batch of generated data, which has no end"));
}

#[test]
fn the_table_at_the_start_has_the_passes_with_something_to_do() {
    kiln::recipes::register();
    let rows = |args: &[&str]| -> (Vec<String>, String) {
        let out = kiln([&["plan", "hydra", "--preset", "tiny"], args].concat()).ok().out;
        let table: Vec<&str> = out.lines().skip_while(|l| !l.starts_with("pass ")).skip(1).collect();
        // Columns are as wide as what stands in them.
        (table.iter().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect(), out)
    };
    let sites = |row: &String| row.split_whitespace().nth(2).and_then(|n| n.parse::<usize>().ok());
    let ((few, _), (all, _)) = (rows(&[]), rows(&["-v"]));
    assert_eq!(all.len(), engine::passes::all().count(), "{all:#?}");
    let (shown, last) = few.split_at(few.len() - 1);
    assert!(!shown.is_empty() && shown.iter().all(|r| sites(r) > Some(0)), "{few:#?}");
    assert_eq!(shown, all.iter().filter(|r| sites(r) > Some(0)).cloned().collect::<Vec<_>>());
    let idle = all.iter().filter(|r| sites(r) == Some(0)).count();
    let off = all.iter().filter(|r| sites(r).is_none()).count();
    assert_eq!(last[0], format!("{} more passes: {idle} have no site here, {off} are off (-v shows them)", idle + off));
    let dir = tempdir().unwrap();
    assert!(train(&dir.path().join("few"), "--steps 1").ok().out.contains("more passes: "));
    let said = train(&dir.path().join("all"), "--steps 1 --verbose").ok().out;
    assert!(engine::passes::all().all(|p| said.contains(p.name())) && !said.contains("more passes: "), "{said}");
}
