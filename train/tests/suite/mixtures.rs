//! Several paths behind `--data`: files, folders and patterns together, and mixtures by weight.

use crate::common::{byte_data, checkpoint, kiln, records, resume, same_bytes, text, train, word_data};
use std::fs;
use std::path::Path;
use tempfile::tempdir;

fn prepare(out: &Path, seed: u64) {
    let seed = seed.to_string();
    kiln(["data", "prepare", "--generated", "100", "--seed", &seed, "--val-share", "0.2", "--out", &text(out)]).ok();
}

#[test]
fn several_prepared_folders_are_one_set_and_a_mixture_resumes_bit_for_bit() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    let out = |name: &str| dir.path().join(name);
    (0..3).for_each(|i| prepare(&out(&format!("d{i}")), i));
    for (name, data) in [("set", format!("{} {}", at("d0"), at("d[12]"))), ("mix", format!("{}:0.9 --data {}:0.1", at("d0"), at("d1")))] {
        let (whole, parts) = (out(&format!("{name}-whole")), out(&format!("{name}-parts")));
        train(&whole, &format!("--steps 8 --set save_every=8 --set eval_every=4 --data {data}")).ok();
        train(&parts, &format!("--steps 3 --set save_every=3 --set eval_every=4 --data {data}")).ok();
        resume(&parts, "--steps 8").ok();
        same_bytes(&checkpoint(&whole, 8), &checkpoint(&parts, 8));
        assert!(!records(&whole, "val").is_empty());
    }
    // Moved data is known by what it holds, and a mixture by its weights, too.
    fs::rename(at("d1"), at("moved")).unwrap();
    let run = out("mix-parts");
    resume(&run, "--steps 9").fails(&["there is no data set", "d1"]);
    let said = resume(&run, &format!("--steps 9 --data {}:9 {}:1", at("d0"), at("moved"))).ok().out;
    assert!(said.contains("data.path was") && said.contains("the same by its checksum"), "{said}");
    resume(&run, &format!("--steps 10 --data {}:1 {}:1", at("d0"), at("moved"))).fails(&["is not that of checkpoint"]);
    // What it is evaluated on may be several, too.
    let eval = |data: &[&str]| kiln([&["eval", &text(&run), "--threads", "1", "--batches", "2", "--data"][..], data].concat());
    eval(&[&at("d0"), &at("d2")]).ok();
    eval(&[&at("d0"), &at("none*")]).fails(&["none*: nothing matches this pattern"]);
    let seen = kiln(["data", "inspect", &format!("{}:3", at("d0")), &format!("{}:1", at("d2"))]).ok().out;
    assert!(seen.contains("75% from") && seen.contains("25% from") && seen.matches("tokenizer byte").count() == 2, "{seen}");
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    let run = dir.path().join("run");
    let bytes = text(&byte_data(&dir.path().join("bytes")));
    let words = text(&word_data(&dir.path().join("words"), &["a", "b"], serde_json::json!({"type": "WhitespaceSplit"})));
    fs::write(at("c.jsonl"), "{\"prompt\": \"a\", \"reply\": \"b\"}\n").unwrap();
    for (data, parts) in [
        (format!("{bytes} {words}"), &["was prepared with another tokenizer than", "prepare one of them again"][..]),
        (format!("{bytes}:0.5 {words}"), &["it has no weight, and 1 of 2 have one"]),
        (format!("{bytes}:0 {bytes}:1"), &["its weight is 0"]),
        (format!("{bytes} hydra"), &["there is no data set", "hydra"]),
        (at("*.csv"), &["*.csv: nothing matches this pattern"]),
    ] {
        train(&run, &format!("--steps 1 --data {data}")).fails(parts);
        assert!(!run.exists());
    }
    let args = format!("train decoder --steps 1 --out {} --data", text(&run));
    let decoder = |data: &[&str]| kiln(args.split(' ').chain(data.iter().copied()));
    decoder(&[&bytes, &at("c.jsonl")]).fails(&["c.jsonl: is no folder that kiln data prepare made"]);
    kiln(["train", "hrm", "--data", "a.csv", "b.csv"]).fails(&["hrm reads one file or folder"]);
    kiln(["train", "--data", &bytes, "hydra"]).fails(&["name the recipe first", "kiln train hydra --data PATH"]);
    kiln(["data", "preview", "--data", "a", "b", "--out", &at("x.png")]).fails(&["pictures are shown of one folder"]);
    kiln(["train", "hydra", "--steps", "1", "--epochs", "1", "--data", &bytes]).fails(&["cannot be used with"]);
    decoder(&[&format!("{bytes}:1"), &format!("{bytes}:2"), "--set", "train.steps=0", "--set", "train.epochs=2"])
        .fails(&["name one of the two"]);
    kiln(["train", "decoder", "--epochs", "2", "--out", &text(&run), "--data", &format!("{bytes}:1"), &format!("{bytes}:2")])
        .fails(&["has no epochs on this data", "--steps"]);
}

const SHAPE: &str = "--set dim=32 --set layers=2 --set heads=4 --set kv_heads=2 --set head_dim=8 --set hidden=48 --threads 1";

fn pairs(path: &Path, what: &str, n: usize) {
    let row = |i: usize| format!("{{\"prompt\": \"{what} {i}?\", \"reply\": \"{what} {}.\"}}\n", i + 1);
    fs::write(path, (0..n).map(row).collect::<String>()).unwrap();
}

#[test]
fn files_of_conversations_are_one_set_or_a_mixture() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    fs::create_dir(at("more")).unwrap();
    for (name, what, n) in [("a.jsonl", "add", 40), ("more/b.jsonl", "count", 30), ("more/val-1.jsonl", "held", 10)] {
        pairs(&dir.path().join(name), what, n);
    }
    kiln(format!("train decoder {SHAPE} --set seq=64 --set batch=2 --steps 1 --out {}", at("first")).split_whitespace()).ok();
    kiln(["export", &at("first"), "--out", &at("model")]).ok();
    let tune = |name: &str, more: &[&str]| {
        let own =
            format!("train decoder --threads 1 --base {} --set seq=48 --set eval_every=2 --set horizon=4 --out {}", at("model"), at(name));
        kiln(own.split(' ').chain(more.iter().copied()))
    };
    // Those called val-*.jsonl validate, as in one folder.
    let said = tune("set", &["--steps", "4", "--data", &at("a.jsonl"), &at("more/*.jsonl"), &at("more/b.jsonl")]).ok().out;
    assert!(said.contains("70 examples to learn from") && said.contains("10 to validate with"), "{said}");
    let one = kiln(["data", "inspect", &at("a.jsonl"), &at("more"), "--json"]).ok().out;
    let one: serde_json::Value = serde_json::from_str(&one).unwrap();
    assert_eq!((one["files"].as_u64(), one["conversations"].as_u64()), (Some(3), Some(80)), "{one}");

    let mixed = ["--data".to_string(), at("a.jsonl:3"), at("more/b.jsonl:1")];
    let mixed: Vec<&str> = mixed.iter().map(String::as_str).collect();
    let said = tune("mix", &[&["--steps", "4", "--set", "save_every=4"], &mixed[..]].concat()).ok().out;
    assert!(said.contains("75% from") && said.contains("25% from") && said.contains("38 examples to learn from"), "{said}");
    tune("parts", &[&["--steps", "1", "--set", "save_every=1"], &mixed[..]].concat()).ok();
    resume(&dir.path().join("parts"), "--steps 4").ok();
    same_bytes(&checkpoint(&dir.path().join("mix"), 4), &checkpoint(&dir.path().join("parts"), 4));
    // Without a number of steps there are as many as three passes through all rows take.
    let said = tune("usual", &[&mixed[..], &["--set", "val_share=0.1"]].concat()).ok();
    assert!(format!("{}{}", said.out, said.err).contains("as many as 3 passes through all"), "{said:?}");

    // A recipe that asks prompts of the files asks those of a mixture, too.
    let sets = "--set pretrain=0 --set dim=24 --set layers=2 --set head_dim=8 --set hidden=40 --set seq=64 --set batch=2 --set rank=2 --set objective.every=1 \
                --set objective.prompts=2 --set objective.replies=2 --set objective.new_tokens=4 --set objective.eval_prompts=2 --threads 1 --steps 2";
    let own = format!("train polychromic {sets} --out {}", at("poly"));
    kiln(own.split_whitespace().chain(mixed.iter().copied())).ok();
    let shown = kiln(["data", "preview", "--base", &at("model"), "--count", "1", "--data", mixed[1], mixed[2]]).ok().out;
    assert!(shown.contains("75% from") && shown.contains("rows of"), "{shown}");
}

#[test]
fn every_recipe_of_text_reads_several() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    (0..2).for_each(|i| prepare(&dir.path().join(format!("d{i}")), i));
    for (recipe, size) in [("decoder", SHAPE.to_string() + " --set seq=32 --set batch=2"), ("lior", "--threads 2".into())] {
        for (i, data) in [format!("{} {}", at("d0"), at("d1")), format!("{}:1 {}:2", at("d0"), at("d1"))].iter().enumerate() {
            let run = format!("train {recipe} {size} --steps 2 --set eval_every=2 --out {}{i} --data {data}", at(recipe));
            kiln(run.split_whitespace()).ok();
        }
    }
}
