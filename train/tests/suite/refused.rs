//! Bad input on the command line is refused with a message that names it: configs, data sets, checkpoints, output paths.

use crate::common::*;
use serde_json::Value;
use std::fs::{self};
use std::path::Path;
use std::process::Stdio;
use tempfile::tempdir;

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
        set("model.dmi=32", &["key 'model.dmi'", "did you mean 'model.dim'?"]),
        set("modle.dim=32", &["section 'modle'", "did you mean 'model'?"]),
        set("dim.x=32", &["dim"]),
        set("model.dim.x=32", &["dim.x"]),
        set("recipe=other", &["recipe"]),
        set("=3", &["''"]),
        set("dim", &["key=value", "'dim'"]),
        config("key.toml", "[train]\nstep = 3\n", &["key 'train.step'", "did you mean 'train.steps'?"]),
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

/// Tokens are drawn by an index of 22 bits.
#[test]
fn a_vocabulary_is_as_large_as_tokens_can_be_drawn_from() {
    for recipe in ["decoder", "polychromic"] {
        let plan = |vocab: usize| kiln(["plan", recipe, "--set", &format!("model.vocab={vocab}"), "--set", "model.dim=16"]);
        plan((1 << 22) + 1).fails(&["model.vocab", "4194304"]);
    }
    let dir = tempdir().unwrap();
    super::chats::model(&dir.path().join("base"), super::chats::CHATML);
    let path = dir.path().join("base/config.json");
    let config = fs::read_to_string(&path).unwrap();
    fs::write(&path, config.replace("\"vocab_size\": 256", "\"vocab_size\": 5000000")).unwrap();
    kiln(["generate", &text(&dir.path().join("base")), "--prompt", "x"]).fails(&["vocab", "5000000"]);
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
        sh.args(["-c", "ulimit -v 4000000; ulimit -t 60; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kiln")]);
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
        case(format!("generate {out} --top-p 0"), &["--top-p", "0 is not above 0"]),
        case(format!("generate {out} --top-p 1.5"), &["--top-p", "1.5 is not above 0 and at most 1"]),
        case(format!("generate {out} --top-p nan"), &["--top-p"]),
        case(format!("generate {out} --chat"), &["--chat", "reply to prompts"]),
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
fn names_that_are_not_known_are_answered_with_those_that_are() {
    let listed = |args: &str, nearest: &str, others: &[&str]| {
        let ran = kiln(args.split_whitespace());
        ran.fails(&["(known: ", &format!("did you mean '{nearest}'?")]);
        let list = ran.err.split_once("(known: ").unwrap().1;
        others.iter().for_each(|name| assert!(list.contains(name), "{name}: {}", ran.err));
    };
    listed("train hidra", "hydra", &["vision_bdh", "lior", "hrm", "polychromic"]);
    listed("train hydra --preset smal", "small", &["tiny", "100m"]);
    listed("train hydra --set trian.steps=1", "train", &["model", "data", "passes"]);
    listed("check ops sofmax", "softmax", &["matmul"]);
    // Of a long list, only what was probably meant and where the list is.
    let meant = |args: &str, nearest: &str, list: &str| {
        let ran = kiln(args.split_whitespace());
        ran.fails(&[&format!("did you mean '{nearest}'? (`kiln {list}` lists them all)")]);
        assert!(!ran.err.contains("norm_eps") && !ran.err.contains("autodiff"), "{}", ran.err);
    };
    meant("train hydra --set model.dmi=3", "model.dim", "config hydra");
    meant("train hydra --set lr=1", "learning_rate", "config hydra");
    meant("train hydra --set max_length=9", "seq", "config hydra");
    meant("train hydra --pass flash-atention=off", "flash-attention", "passes");
    meant("train hydra --pass flash=off", "flash-attention", "passes");
    meant("train hydra --pass amp=auto", "bf16", "passes");
    meant("train hydra --pass gradient_checkpointing=auto", "recompute", "passes");
    kiln(["train", "decoder", "--preset", "gpt2"]).fails(&["did you mean 'gpt2-124m'?"]);
    kiln(["train", "decoder", "--set", "model.base=Qwen/Qwen3-0.6B"])
        .fails(&["no such folder", "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"]);
    for args in [
        "generate Qwen/A --prompt x",
        "eval Qwen/A --data y",
        "data prepare Cargo.toml --tokenizer Qwen/A --out z",
        "data preview --data Cargo.toml --base Qwen/A",
        "check model Qwen/A",
        "prune Qwen/A --out z",
    ] {
        kiln(args.split(' ')).fails(&["hf download Qwen/A --local-dir A"]);
    }
    for (args, line) in [
        ("train decoder --base https://huggingface.co/Qwen/A", "hf download Qwen/A --local-dir A"),
        ("train decoder --base gpt2", "hf download gpt2 --local-dir gpt2"),
        ("check encoder Qwen/A", "hf download Qwen/A --local-dir A"),
        // As the pages call a folder: nobody on the hub is called so.
        ("train decoder --base models/qwen2.5-0.5b --data x", "hf download OWNER/qwen2.5-0.5b --local-dir models/qwen2.5-0.5b"),
    ] {
        kiln(args.split(' ')).fails(&[line]);
    }
    for args in ["generate runs/a --prompt x", "eval runs/a", "train --resume --out runs/a", "generate data/a --prompt x"] {
        let ran = kiln(args.split(' '));
        assert!(ran.code == Some(1) && !ran.err.contains("hf download"), "{args}: {}", ran.err);
    }
    let dir = tempdir().unwrap();
    let base = text(&dir.path().join("base"));
    super::chats::model(Path::new(&base), super::chats::CHATML);
    kiln(["generate", &base, "--adapter", "Org/lora", "--prompt", "x"]).fails(&["hf download Org/lora --local-dir lora"]);
    kiln(["train", "decoder", "--base", &base, "--data", "Org/set"]).fails(&["hf download --repo-type dataset Org/set --local-dir set"]);
    kiln(["train", "decoder", "--base", &base, "--data", "chats.jsonl"])
        .fails(&["chats.jsonl: No such file or directory (os error 2) (check"]);
    kiln(["data", "inspect", &base]).fails(&["is a model's folder, and no data: kiln check model"]);
    // Settings are no flags here.
    for (flag, meant) in [
        ("--lr", "--set learning_rate=VALUE"),
        ("--learning-rate=3", "--set learning_rate=VALUE"),
        ("--batch-size", "--set batch=VALUE"),
        ("--max-length", "--set seq=VALUE"),
        ("--output-dir", "--out"),
    ] {
        let ran = kiln(["train", "decoder", flag]);
        let says = ran.err.contains(&format!("tip: here it is '{meant}'"));
        assert!(ran.code == Some(2) && says && !ran.err.contains("similar"), "{flag}: {}", ran.err);
    }
    let ran = kiln(["generate", "runs/a", "--max-new-tokens", "3"]);
    assert!(ran.err.contains("'--max-tokens'") && !ran.err.contains("--set"), "{}", ran.err);
    kiln(["train", "hydra", "--pass", "linear-cross-entropy=auto,chunks=3"]).fails(&["did you mean 'chunk'?"]);
    kiln(["plan", "hydra", "--nodes", "trian"]).fails(&["did you mean 'train'?", "eval"]);
    // Where nothing is near, they are listed all the same.
    kiln(["train", "zzzzzzzzzzzz"]).fails(&["(known: ", "hydra", "hrm"]);
}
