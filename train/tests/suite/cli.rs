//! The command line: bad input is refused with a message that names it, output is what scripts expect, and nothing panics.

use crate::common::*;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tempfile::tempdir;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../reference/golden/hydra.safetensors");

/// One line of a table: arguments, and what the message must hold.
struct Case {
    args: Vec<String>,
    parts: Vec<String>,
}

/// `args` are split at spaces.
fn case(args: impl AsRef<str>, parts: &[&str]) -> Case {
    let args = args.as_ref().split_whitespace().map(str::to_owned).collect();
    Case { args, parts: parts.iter().map(|p| p.to_string()).collect() }
}

/// Every case must be refused; all that are not are reported together.
#[track_caller]
fn all_refused(cases: Vec<Case>) {
    let problem = |c: &Case| kiln(&c.args).problem(&c.parts.iter().map(|p| p.as_str()).collect::<Vec<_>>());
    let problems: Vec<String> = cases.iter().filter_map(problem).collect();
    assert!(problems.is_empty(), "{} of {} cases:\n{}", problems.len(), cases.len(), problems.join("\n"));
}

#[test]
fn bad_configurations_are_refused() {
    let dir = tempdir().unwrap();
    let out = dir.path().join("run");
    let file = |name: &str, content: &str| {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        text(&path)
    };
    // A folder of its own for each: one that is accepted must not spoil the next.
    let count = std::cell::Cell::new(0);
    let train = |args: &str, parts: &[&str]| {
        count.set(count.get() + 1);
        case(train_args(&out.join(count.get().to_string()), &format!("{args} --set steps=1")).join(" "), parts)
    };
    let set = |assignment: &str, parts: &[&str]| {
        let mut c = train("", parts);
        c.args.extend(["--set".into(), assignment.into()]);
        c
    };
    let config = |name: &str, content: &str, parts: &[&str]| train(&format!("--config {}", file(name, content)), parts);
    let all_bytes: Vec<String> = (0..256).map(|i| i.to_string()).collect();
    all_refused(vec![
        // Names, with the nearest.
        case("train hidra", &["recipe 'hidra'", "did you mean 'hydra'?"]),
        case("train hydra --preset tinny", &["preset 'tinny'", "did you mean 'tiny'?"]),
        case("train hydra --preset gigantic", &["preset 'gigantic'", "tiny, small, 100m"]),
        case("plan hydra --preset smal", &["preset 'smal'", "did you mean 'small'?"]),
        case("bench hydra --preset 10m", &["preset '10m'", "did you mean '100m'?"]),
        case("tran", &["tran", "train"]),
        train("--stepz 3", &["--stepz", "--steps"]),
        set("learning_rat=1", &["key 'learning_rat'", "did you mean 'learning_rate'?"]),
        set("model.dmi=32", &["key 'model.dmi'", "did you mean 'dim'?"]),
        set("modle.dim=32", &["section 'modle'", "did you mean 'model'?"]),
        set("dim.x=32", &["dim"]),
        set("model.dim.x=32", &["dim.x"]),
        set("recipe=other", &["recipe"]),
        set("=3", &["''"]),
        set("dim", &["key=value", "'dim'"]),
        config("key.toml", "[train]\nstep = 3\n", &["key 'train.step'", "did you mean 'steps'?"]),
        config("section.toml", "[trains]\nsteps = 3\n", &["'trains'", "did you mean 'train'?"]),
        config("preset.toml", "recipe = 'hydra'\npreset = 3\n", &["preset.toml", "preset"]),
        config("passes.toml", "[passes]\nrecomputed = 'auto'\n", &["recomputed", "recompute"]),
        train("--pass recomput=auto", &["recomput", "'recompute'"]),
        train("--pass recompute=on", &["on", "off, auto or require"]),
        train("--pass recompute", &["NAME=off|auto|require", "'recompute'"]),
        train("--pass recompute=auto,wat=blocks", &["wat", "what"]),
        train("--pass recompute=auto,what=everything", &["everything"]),
        // Types.
        set("dim=wide", &["'model.dim' wants a whole number", "wide"]),
        set("dim=32.5", &["'model.dim' wants a whole number", "32.5"]),
        set("dim=-32", &["'model.dim'", "-32"]),
        set("dim=", &["'model.dim'"]),
        set("dim=99999999999999999999", &["'model.dim'"]),
        set("learning_rate=fast", &["'train.learning_rate' wants a number", "fast"]),
        set("learning_rate=nan", &["train.learning_rate = nan: "]),
        set("learning_rate=inf", &["train.learning_rate", "inf"]),
        set("edge_capacity=1.0", &["'model.edge_capacity' wants a list"]),
        set("edge_capacity=[1.0,true]", &["'model.edge_capacity'", "true"]),
        set("ignore_tokens=[\"a\"]", &["ignore_tokens"]),
        set("ignore_tokens=[-1]", &["ignore_tokens"]),
        set("schedule=3", &["'train.schedule' wants a string"]),
        set("schedule=linear", &["train.schedule", "linear", "cosine"]),
        config("type.toml", "[train]\nsteps = 'many'\n", &["'train.steps' wants a whole number", "many"]),
        config("table.toml", "model = 3\n", &["'model' wants a table"]),
        config("broken.toml", "[train\nsteps = 3\n", &["broken.toml", "line 1"]),
        train("--config /nowhere/at/all.toml", &["/nowhere/at/all.toml", "No such file"]),
        train(&format!("--config {}", dir.path().display()), &["Is a directory"]),
        train("--steps many", &["many", "--steps"]),
        train("--steps -1", &["-1"]),
        train("--seed 1.5", &["1.5", "--seed"]),
        // Sizes.
        set("dim=33", &["model.dim = 33", "does not divide by model.compression = 2"]),
        set("heads=3", &["dim / compression = 16", "does not divide by model.heads = 3"]),
        set("kv_heads=3", &["model.heads = 2", "does not divide by model.kv_heads = 3"]),
        set("dim=36", &["9", "even"]),
        set("dim=0", &["model.dim = 0: from 1 to"]),
        set("seq=0", &["model.seq = 0: from 1 to"]),
        set("blocks=0", &["model.blocks = 0: from 1 to"]),
        set("vocab=255", &["model.vocab = 255", "256"]),
        set("batch=0", &["train.batch", "= 0: from 1 to"]),
        set("accumulate=0", &["train.accumulate", "= 0: from 1 to"]),
        set("log_every=0", &["train.log_every = 0: from 1 to"]),
        set("save_every=0", &["train.save_every = 0: from 1 to"]),
        set("edge_capacity=[0.25, 0.5]", &["model.edge_capacity = [0.25, 0.5] increases"]),
        set("middle_capacity=[0.5, 0.25, 0.3]", &["model.middle_capacity", "increases"]),
        set("edge_capacity=[]", &["model.edge_capacity"]),
        set("edge_capacity=[1.5]", &["model.edge_capacity = [1.5]", "to 1.0"]),
        set("edge_capacity=[0.5, 0.0]", &["model.edge_capacity = [0.5, 0.0]", "from 1e-38"]),
        set("beta1=1", &["train.beta1 = 1"]),
        set("clip=0", &["train.clip"]),
        set("weight_decay=-1", &["train.weight_decay = -1"]),
        set("final_rate=2", &["train.final_rate = 2"]),
        set("norm_eps=0", &["model.norm_eps"]),
        set(&format!("ignore_tokens=[{}]", all_bytes.join(",")), &["all masked", "data.ignore_tokens"]),
        // Places.
        train("--device abacus", &["abacus", "cpu"]),
        train("--device cuda:0", &["cuda:0", "--device cpu"]),
        train("--threads 0", &["--threads"]),
        train("--resume --init-from x", &["--resume", "--init-from"]),
        train("--resume --start-over", &["--resume", "--start-over"]),
        train("--init-from /nowhere/at/all", &["/nowhere/at/all"]),
        train("--init-from /nowhere/at/all.safetensors", &["/nowhere/at/all.safetensors", "No such file"]),
        train(&format!("--init-from {}", file("empty.safetensors", "")), &["empty.safetensors", "not a whole safetensors file"]),
        train(&format!("--init-from {GOLDEN}"), &["hydra.safetensors", "another model or config"]),
    ]);
    let left = names(dir.path());
    assert!(half_written(dir.path()).is_empty(), "{left:?}");
    let begun: Vec<String> = names(&out).into_iter().filter(|n| !names(&out.join(n).join("checkpoints")).is_empty()).collect();
    assert!(begun.is_empty(), "{begun:?}");
}

#[test]
fn sizes_beyond_memory_are_refused() {
    let dir = tempdir().unwrap();
    let out = dir.path().join("run");
    let sizes = [
        "dim=1099511627776",
        "hidden=1099511627776",
        "vocab=1099511627776",
        "batch=9223372036854775807",
        "accumulate=9223372036854775807",
        "conv_width=1099511627776",
        "seq=9223372036854775807",
    ];
    // A process that fills the memory would end more than this test.
    let limited = |args: String| {
        let mut sh = std::process::Command::new("sh");
        sh.args(["-c", "ulimit -v 4000000; ulimit -t 3; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kiln")]);
        sh.args(args.split_whitespace()).env("RUST_BACKTRACE", "0").stdin(Stdio::null());
        finish(sh)
    };
    let mut problems = vec![];
    for size in sizes {
        problems.extend(limited(train_args(&out, &format!("--steps 1 --set {size}")).join(" ")).problem(&["error: "]));
        // A plan allocates nothing: it may answer, but not break.
        let planned = limited(format!("plan hydra {} --set {size}", SMALL[..SMALL.len() - 2].join(" ")));
        if planned.code != Some(0) {
            problems.extend(planned.problem(&["error: "]));
        }
    }
    assert!(problems.is_empty(), "{}:\n{}", problems.len(), problems.join("\n"));
}

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

#[test]
fn bad_data_sets_are_refused() {
    let dir = tempdir().unwrap();
    let good = byte_data(&dir.path().join("good"));
    assert!(good.join("train-00001.tokens").exists(), "the table needs a second shard");
    let json = |from: &'static str, to: &'static str| {
        move |d: &Path| damage(&d.join("dataset.json"), |b| *b = String::from_utf8_lossy(b).replacen(from, to, 1).into_bytes())
    };
    let shard = |d: &Path| d.join("train-00001.tokens");
    type Change<'a> = Box<dyn Fn(&Path) + 'a>;
    let changes: Vec<(&str, Change, &[&str])> = vec![
        ("no-folder", Box::new(|d| fs::remove_dir_all(d).unwrap()), &["there is no data set", "--data"]),
        ("no-list", Box::new(|d| fs::remove_file(d.join("dataset.json")).unwrap()), &["dataset.json", "No such file"]),
        ("empty-list", Box::new(|d| fs::write(d.join("dataset.json"), "").unwrap()), &["dataset.json", "malformed"]),
        ("bad-list", Box::new(json("\"vocab\"", "\"vocabulary\"")), &["dataset.json", "vocabulary"]),
        ("other-vocab", Box::new(json("\"vocab\": 256", "\"vocab\": 200")), &["vocabulary", "200"]),
        ("other-print", Box::new(json("\"fingerprint\": ", "\"fingerprint\": 1")), &["fingerprint"]),
        ("missing", Box::new(|d| fs::remove_file(shard(d)).unwrap()), &["train-00001.tokens", "missing"]),
        (
            "extra",
            Box::new(|d| assert!(fs::copy(shard(d), d.join("train-00099.tokens")).unwrap() > 0)),
            &["train-00099.tokens", "not listed"],
        ),
        ("truncated", Box::new(|d| damage(&shard(d), |b| b.truncate(b.len() - 2))), &["train-00001.tokens", "wrong length"]),
        ("no-header", Box::new(|d| damage(&shard(d), |b| b.truncate(10))), &["train-00001.tokens"]),
        ("empty", Box::new(|d| damage(&shard(d), |b| b.clear())), &["train-00001.tokens"]),
        ("longer", Box::new(|d| damage(&shard(d), |b| b.push(0))), &["train-00001.tokens", "wrong length"]),
        ("corrupted", Box::new(|d| damage(&shard(d), |b| *b.last_mut().unwrap() ^= 0x40)), &["train-00001.tokens", "corrupted tokens"]),
        ("bad-header", Box::new(|d| damage(&shard(d), |b| b[24] ^= 1)), &["train-00001.tokens", "corrupted header"]),
        ("no-shard", Box::new(|d| damage(&shard(d), |b| b[0] = b'x')), &["train-00001.tokens", "no token shard"]),
        ("bad-val", Box::new(|d| damage(&d.join("val-00000.tokens"), |b| b[90] ^= 1)), &["val-00000.tokens", "corrupted tokens"]),
    ];
    let mut cases = vec![];
    for (name, change, parts) in &changes {
        let data = dir.path().join(name);
        copy(&good, &data);
        change(&data);
        cases.push(case(
            train_args(&dir.path().join(format!("{name}-run")), &format!("--steps 1 --data {}", data.display())).join(" "),
            parts,
        ));
        cases.push(case(format!("data inspect {}", data.display()), &[]));
    }
    let word = word_data(&dir.path().join("words"), &["red", "green", "blue"], at_spaces());
    let fit = |args: &str, parts: &[&str]| {
        let out = dir.path().join(format!("fit-{}", args.len()));
        case(train_args(&out, args).join(" "), parts)
    };
    cases.push(fit(&format!("--data {} --set vocab=3", word.display()), &["4 tokens", "model.vocab = 3"]));
    cases.push(fit(&format!("--data {} --set seq=100000", good.display()), &["tokens", "100001"]));
    cases.push(fit(&format!("--data {}", good.join("dataset.json").display()), &["dataset.json"]));
    all_refused(cases);
    for (name, ..) in changes {
        assert!(half_written(&dir.path().join(format!("{name}-run"))).is_empty());
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
fn data_is_prepared_or_refused() {
    let dir = tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        text(&path)
    };
    let good = file("good.txt", "a sentence of many words\n".repeat(100).as_bytes());
    let out = text(&dir.path().join("out"));
    let prepare = |input: &str, parts: &[&str]| case(format!("data prepare {input} --out {out}"), parts);
    all_refused(vec![
        prepare("", &["--generated"]),
        prepare("/nowhere/at/all.txt", &["/nowhere/at/all.txt"]),
        prepare(&file("latin1.txt", b"caf\xe9 and more text"), &["latin1.txt", "invalid UTF-8 at byte 3"]),
        prepare(&file("empty.txt", b""), &["empty"]),
        prepare(&file("broken.jsonl", b"{\"text\": \"a\"}\n{\"text\": \n"), &["broken.jsonl, line 2"]),
        prepare(&file("other.jsonl", b"{\"body\": \"a\"}\n"), &["other.jsonl, line 1", "text"]),
        prepare(&file("number.jsonl", b"{\"text\": 3}\n"), &["number.jsonl, line 1", "text"]),
        prepare(&format!("{good} --val-share 1"), &["val_share = 1"]),
        prepare(&format!("{good} --val-share=-0.5"), &["val_share = -0.5"]),
        prepare(&format!("{good} --val-share nan"), &["val_share = NaN"]),
        prepare(&format!("{good} --shard-tokens 0"), &["shard_tokens = 0"]),
        prepare(&format!("{good} --tokenizer /nowhere/at/all.json"), &["/nowhere/at/all.json"]),
        prepare(&format!("{good} --tokenizer {good}"), &["good.txt", "not a readable tokenizer.json"]),
        prepare(&format!("{good} --generated 5"), &["--generated"]),
        prepare("--generated 0", &["generated"]),
        case(format!("data prepare {good} --out {good}"), &["good.txt", "it is a file"]),
        case(format!("data prepare {good} --out {good}/below"), &["below", "Not a directory"]),
        case(format!("data prepare {good} --out {}", dir.path().display()), &["holds other files"]),
        case("data inspect /nowhere/at/all", &["/nowhere/at/all"]),
        case(format!("data inspect {good}"), &["good.txt", "no token shard"]),
    ]);
    assert!(!Path::new(&out).exists() && half_written(dir.path()).is_empty(), "{:?}", names(dir.path()));

    kiln(["data", "prepare", &good, "--out", &out]).ok();
    kiln(["data", "prepare", &good, "--out", &out]).fails(&["holds a data set already", "--force"]);
    kiln(["data", "prepare", &good, "--out", &out, "--force"]).ok();
    let seen: Value = serde_json::from_str(&kiln(["data", "inspect", &out, "--json"]).ok().out).unwrap();
    assert_eq!(seen["dataset"]["tokenizer"], "byte");
    assert!(seen["shards"].as_array().unwrap().iter().all(|s| s["checksum_ok"] == true));
}

#[test]
fn an_output_that_cannot_be_written_is_refused() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "mine").unwrap();
    let (below, here) = (text(&file.join("below")), text(&file));
    let small = SMALL.join(" ");
    let train = |out: &str, parts: &[&str]| case(format!("train hydra {small} --steps 1 --out {out}"), parts);
    all_refused(vec![
        train(&below, &[&below, "Not a directory"]),
        train(&here, &[&here]),
        train("/proc/nowhere/run", &["/proc/nowhere/run"]),
        train(&format!("{below} --resume"), &[&below, "Not a directory"]),
        train(&format!("{here} --resume"), &[&here]),
        case(format!("bench hydra {small} --repeat 1 --warmup 0 --json {below}.json"), &["below.json", "Not a directory"]),
        case(format!("bench hydra {small} --repeat 1 --warmup 0 --json {}", dir.path().display()), &[&text(dir.path())]),
        case(format!("check golden {GOLDEN} --write {below}.safetensors"), &["below.safetensors", "Not a directory"]),
    ]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    assert_eq!(names(dir.path()), ["file"]);
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
    kiln(["bench", "ops", "--only", "no such op"]).fails(&["no such op"]);
    kiln(["bench", "hydra", "--only", "attention"]).fails(&["--only is for bench ops"]);
}

#[test]
fn checkpoints_that_do_not_fit_are_refused() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 2").ok();
    let at = checkpoint(&run, 2);
    let copied = |name: &str, change: &dyn Fn(&Path)| {
        let to = dir.path().join(name);
        copy(&run, &to);
        change(&to);
        text(&to)
    };
    let config = |name: &str, change: &dyn Fn(String) -> String| {
        copied(name, &|d| {
            let path = d.join("config.toml");
            fs::write(&path, change(fs::read_to_string(&path).unwrap())).unwrap();
        })
    };
    let out = text(&run);
    let resume = |args: &str, parts: &[&str]| case(format!("train --out {out} --resume --steps 4 {args}"), parts);
    let resumed = |out: String, parts: &[&str]| case(format!("train --out {out} --resume --steps 4"), parts);
    let no_model = copied("no-model", &|d| fs::remove_file(checkpoint(d, 2).join("model.safetensors")).unwrap());
    let cut = copied("cut", &|d| damage(&checkpoint(d, 2).join("model.safetensors"), |b| b.truncate(100)));
    let old_config = copied("old-config", &|d| {
        let text = fs::read_to_string(d.join("config.toml")).unwrap();
        let mut table: toml::Table = text.parse().unwrap();
        table.remove("passes");
        fs::write(d.join("config.toml"), table.to_string()).unwrap();
    });
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let other_model = dir.path().join("wider");
    train(&other_model, "--steps 1 --set dim=64").ok();
    all_refused(vec![
        // Another config.
        resume("--set dim=64", &["another config", "model.dim was 32, now it is 64", "--init-from"]),
        resume("--seed 3", &["another config", "seed was 0, now it is 3"]),
        resume("--set learning_rate=1", &["another config", "train.learning_rate"]),
        resume("--set batch=4", &["another config", "train.batch was 2, now it is 4"]),
        resume("--preset small", &["preset", "'tiny'", "'small'"]),
        resume("nothing", &["'nothing'"]),
        case(format!("train hydra {} --out {out} --steps 4", SMALL.join(" ")), &["holds a run already", "--resume"]),
        case(
            train_args(&dir.path().join("new"), &format!("--init-from {}", other_model.display())).join(" "),
            &["wider", "blocks.0.attn.k_conv1", "another config"],
        ),
        // Another tokenizer is below, in its own test. A config changed by hand:
        resumed(config("wrong-type", &|t| t.replace("dim = 32", "dim = 'x'")), &["dim"]),
        resumed(config("wrong-key", &|t| t.replace("dim = 32", "dimm = 32")), &["dimm"]),
        resumed(config("no-toml", &|t| t.replace("dim = 32", "dim = = 32")), &["config.toml"]),
        resumed(config("no-key", &|t| t.replace("dim = 32\n", "")), &["dim"]),
        resumed(config("no-recipe", &|t| t.replace("recipe = \"hydra\"\n", "")), &["recipe"]),
        case(format!("train --out {old_config} --resume --steps 4 --pass recompute=banana"), &["banana"]),
        // Checkpoints to read.
        case("eval /nowhere/at/all", &["/nowhere/at/all"]),
        case(format!("eval {}", empty.display()), &["empty", "no whole checkpoint"]),
        case(format!("eval {out}/config.toml"), &["config.toml"]),
        case(format!("eval {no_model}"), &["no whole checkpoint", "model.safetensors: missing"]),
        case(format!("eval {cut}"), &["no whole checkpoint", "has 100 bytes"]),
        case(format!("eval {cut}/checkpoints/step-00000002"), &["model.safetensors", "has 100 bytes"]),
        case(format!("eval {out} --batches 0"), &["batches"]),
        case(format!("eval {out} --data /nowhere/at/all"), &["/nowhere/at/all"]),
        case(format!("generate {cut}"), &["no whole checkpoint", "has 100 bytes"]),
        case("generate /nowhere/at/all", &["/nowhere/at/all"]),
        case(format!("generate {out} --temperature -1"), &["-1"]),
        case(format!("generate {out} --temperature nan"), &["--temperature"]),
        case(format!("generate {out} --temperature inf"), &["--temperature"]),
        case(format!("generate {out} --top-p 0"), &["--top-p 0"]),
        case(format!("generate {out} --top-p 1.5"), &["--top-p 1.5"]),
        case(format!("generate {out} --top-p nan"), &["--top-p"]),
        case(format!("generate {out} --stop ab"), &["'ab'", "2 tokens"]),
        case(format!("generate {out} --stop-id 256"), &["256"]),
        case(format!("generate {out} --prompt="), &["prompt"]),
        case(format!("generate {out} --max-tokens 99999999999999"), &["99999999999999"]),
        case(format!("generate {out} --max-tokens 18446744073709551615"), &["18446744073709551615"]),
    ]);
    assert_eq!(names(&run.join("checkpoints")), ["step-00000002"]);
    assert!(at.join("checkpoint.json").exists() && half_written(dir.path()).is_empty());
}

#[test]
fn a_checkpoint_of_another_tokenizer_is_refused() {
    let dir = tempdir().unwrap();
    let mine = word_data(&dir.path().join("mine"), &["red", "green", "blue"], at_spaces());
    let other = word_data(&dir.path().join("other"), &["blue", "green", "red"], at_spaces());
    let run = dir.path().join("run");
    train(&run, &format!("--steps 2 --set vocab=256 --data {}", mine.display())).ok();
    kiln(["eval", &text(&run)]).ok();
    let bytes = byte_data(&dir.path().join("bytes"));
    for data in [&other, &bytes] {
        kiln(["eval", &text(&run), "--data", &text(data)]).fails(&["another tokenizer", &text(&checkpoint(&run, 2))]);
    }
    // One that does not even fit is told by its size.
    let tight = dir.path().join("tight");
    train(&tight, &format!("--steps 1 --data {}", mine.display())).ok();
    kiln(["eval", &text(&tight), "--data", &text(&bytes)]).fails(&[
        "256 tokens",
        "model.vocab = 4",
        "the tokenizer that the model was trained with",
    ]);
    let moved = dir.path().join("moved");
    fs::rename(&mine, &moved).unwrap();
    // The same tokenizer from another folder is the same.
    kiln(["eval", &text(&run), "--data", &text(&moved)]).ok();
    fs::rename(&other, &mine).unwrap();
    resume(&run, "--steps 4").fails(&["another tokenizer"]);
    kiln(["eval", &text(&run)]).fails(&["another tokenizer"]);
    // It has its own.
    kiln(["generate", &text(&run), "--prompt", "red", "--max-tokens", "3"]).ok();
    assert_eq!(names(&run.join("checkpoints")), ["step-00000002"]);
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

/// The golden file with every tensor as `change` leaves it.
fn golden_with(to: &Path, change: impl Fn(&str, &mut Vec<u8>), note: impl Fn(&mut HashMap<String, String>)) {
    let bytes = fs::read(GOLDEN).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let all: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = file
        .iter()
        .map(|(name, view)| {
            let mut data = view.data().to_vec();
            change(name, &mut data);
            (name.to_string(), view.dtype(), view.shape().to_vec(), data)
        })
        .collect();
    let mut notes = header.metadata().clone().unwrap();
    note(&mut notes);
    let views = all.iter().map(|(n, dtype, shape, data)| (n, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, Some(notes), to).unwrap();
}

#[test]
fn golden_files_pass_and_altered_ones_fail_by_name() {
    let dir = tempdir().unwrap();
    let ours = dir.path().join("ours.safetensors");
    kiln(["check", "golden", GOLDEN, "--write", &text(&ours)]).ok();
    let (theirs, written) = (fs::read(GOLDEN).unwrap(), fs::read(&ours).unwrap());
    let (theirs, written) = (SafeTensors::deserialize(&theirs).unwrap(), SafeTensors::deserialize(&written).unwrap());
    let computed = |n: &&str| !n.starts_with("param/") && !n.starts_with("input/");
    for name in theirs.names().into_iter().filter(computed) {
        let (a, b) = (theirs.tensor(name).unwrap(), written.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")));
        assert_eq!(a.shape(), b.shape(), "{name}");
    }

    let altered = dir.path().join("altered.safetensors");
    let mut unnoticed = vec![];
    // A large tensor, small ones, single numbers, and one whose gradient is tiny.
    for wrong in ["output/hidden", "grad/blocks.0.attn.temperature", "loss", "after/embedding", "metric/grad_norm", "grad/blocks.1.router"]
    {
        let one_percent = |name: &str, data: &mut Vec<u8>| {
            for b in data.chunks_exact_mut(4).filter(|_| name == wrong) {
                b.copy_from_slice(&(f32::from_le_bytes([b[0], b[1], b[2], b[3]]) * 1.01).to_le_bytes());
            }
        };
        golden_with(&altered, one_percent, |_| {});
        let ran = kiln(["check", "golden", &text(&altered)]);
        let failed: Vec<&str> = ran.out.lines().filter_map(|l| l.strip_prefix("FAIL")?.trim().split(": ").next()).collect();
        if ran.code != Some(1) || failed != [wrong] {
            unnoticed.push(format!("{wrong}: exit {:?}, failed: {failed:?}", ran.code));
        }
        kiln(["check", "golden", &text(&altered), "--tolerance", "0.02"]).ok();
    }
    assert!(unnoticed.is_empty(), "altered by 1%: {unnoticed:?}");
    golden_with(
        &altered,
        |name, data| {
            if name == "loss" {
                data[0] ^= 0xff;
                data[2] ^= 0x10
            }
        },
        |_| {},
    );
    // The first file's failure is not forgotten over the second's success.
    assert_eq!(kiln(["check", "golden", &text(&altered), GOLDEN]).code, Some(1));
}

#[test]
fn bad_golden_files_are_refused() {
    let dir = tempdir().unwrap();
    let path = |name: &str| dir.path().join(format!("{name}.safetensors"));
    let check = |name: &str, parts: &[&str]| case(format!("check golden {}", path(name).display()), parts);
    fs::write(path("empty"), "").unwrap();
    fs::write(path("text"), "a golden file that is only text, and long enough to be a header").unwrap();
    let bytes = fs::read(GOLDEN).unwrap();
    fs::write(path("cut"), &bytes[..bytes.len() - 4]).unwrap();
    let note = |name: &str, key: &'static str, value: &'static str| {
        golden_with(&path(name), |_, _| {}, |notes| drop(notes.insert(key.into(), value.into())));
    };
    note("recipe", "recipe", "hidra");
    note("steps", "steps", "three");
    note("many", "steps", "-1");
    note("json", "config", "{");
    note("optimizer", "optimizer", "{}");
    note("config", "config", "{\"vocab\": 256}");
    let config = |name: &str, from: &'static str, to: &'static str| {
        golden_with(
            &path(name),
            |_, _| {},
            |notes| {
                let changed = notes["config"].replace(from, to);
                assert_ne!(changed, notes["config"]);
                notes.insert("config".into(), changed);
            },
        );
    };
    config("divide", "\"dim\": 64", "\"dim\": 65");
    config("wider", "\"dim\": 64", "\"dim\": 128");
    config("deeper", "\"blocks\": 3", "\"blocks\": 4");
    config("vocab", "\"vocab\": 256", "\"vocab\": 20");
    golden_with(
        &path("ids"),
        |n, d| {
            if n == "input/ids" {
                d[..8].copy_from_slice(&(1i64 << 32).to_le_bytes())
            }
        },
        |_| {},
    );
    golden_with(
        &path("masked"),
        |n, d| {
            if n == "input/targets" {
                d.fill(0xff)
            }
        },
        |_| {},
    );
    all_refused(vec![
        check("nowhere", &["nowhere.safetensors", "No such file"]),
        check("empty", &["empty.safetensors"]),
        check("text", &["text.safetensors"]),
        check("cut", &["cut.safetensors", "not a whole safetensors file"]),
        check("recipe", &["'hidra'", "'hydra'"]),
        check("steps", &["steps.safetensors", "'steps'"]),
        check("many", &["many.safetensors", "'steps'"]),
        check("json", &["json.safetensors", "'config'"]),
        check("optimizer", &["optimizer.safetensors", "lr"]),
        check("config", &["config.safetensors", "dim"]),
        check("divide", &["divide.safetensors", "65"]),
        check("wider", &["wider.safetensors", "its config makes it"]),
        check("deeper", &["deeper.safetensors", "blocks.3"]),
        check("vocab", &["vocab.safetensors", "do not fit"]),
        check("ids", &["ids.safetensors", "whole numbers"]),
        check("masked", &["masked.safetensors", "all masked"]),
        case("check golden", &["FILES"]),
        case(format!("check golden {GOLDEN} --tolerance -1"), &["-1"]),
        case(format!("check golden {GOLDEN} --tolerance nan"), &["--tolerance"]),
        case(format!("check golden {GOLDEN} {GOLDEN} --write {}", path("out").display()), &["--write"]),
        case(format!("check golden {GOLDEN} --pass recomput=auto"), &["recomput", "'recompute'"]),
        case("check ops nothing", &["'nothing'"]),
    ]);
    assert!(!path("out").exists());
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
    let line = format!("each validation reads 1 of {batches} batches: train.eval_batches = 1");
    assert_eq!(said.matches(&line).count(), 1, "{said}");

    // Generated data has no end: as much as training reads.
    let made_json = json(&[&text(&made)]);
    assert_eq!((&made_json["batches"], &made_json["of_batches"]), (&1.into(), &Value::Null));
    assert!(read(&[&text(&made)]).contains("1 batch of generated data, which has no end"));
}

#[test]
fn the_table_at_the_start_has_the_passes_with_something_to_do() {
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

#[test]
fn names_that_are_not_known_are_answered_with_those_that_are() {
    let listed = |args: &str, nearest: &str, others: &[&str]| {
        let ran = kiln(args.split_whitespace());
        ran.fails(&[&format!("(known: {nearest}, "), &format!("did you mean '{nearest}'?")]);
        let list = ran.err.split_once("(known: ").unwrap().1;
        others.iter().for_each(|name| assert!(list.contains(name), "{name}: {}", ran.err));
    };
    listed("train hidra", "hydra", &["vision_bdh", "lior", "hrm", "polychromic"]);
    listed("train hydra --preset smal", "small", &["tiny", "100m"]);
    listed("train hydra --set model.dmi=3", "dim", &["vocab", "heads", "seq", "norm_eps"]);
    listed("train hydra --set learning_rat=1", "learning_rate", &["dim", "path", "steps"]);
    listed("train hydra --set trian.steps=1", "train", &["model", "data", "passes"]);
    listed("train hydra --pass flash-atention=off", "flash-attention", &["linear-cross-entropy", "recompute", "autodiff"]);
    listed("check ops sofmax", "softmax", &["matmul"]);
    kiln(["train", "hydra", "--pass", "linear-cross-entropy=auto,chunks=3"]).fails(&["did you mean 'chunk'?"]);
    kiln(["plan", "hydra", "--nodes", "trian"]).fails(&["did you mean 'train'?", "eval"]);
    // Where nothing is near, they are listed all the same.
    kiln(["train", "zzzzzzzzzzzz"]).fails(&["(known: ", "hydra", "hrm"]);
}
