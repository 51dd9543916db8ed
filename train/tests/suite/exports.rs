//! Folders for transformers: whole, in shards, with everything that their base has, and with a card that says what they are.

use super::common::{all_declared, byte_data, kiln, names, records, text};
use kiln::checkpoint::load_safetensors;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const TINY: &str = "--set dim=32 --set layers=2 --set heads=4 --set kv_heads=2 --set head_dim=8 --set hidden=48 --set seq=32 --set batch=2 --set horizon=100 \
                    --set eval_batches=2 --threads 1";

fn train(out: &Path, more: &str) -> super::common::Ran {
    let all = format!("train decoder --out {} {TINY} {more}", out.display());
    kiln(all.split_whitespace())
}

/// Every weight of a folder, by its name.
fn weights(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = names(folder).into_iter().filter(|n| n.ends_with(".safetensors"));
    let loaded = files.map(|n| load_safetensors(&folder.join(n)).unwrap());
    loaded.flat_map(|f| f.names().into_iter().map(|n| (n.clone(), f.get(&n).unwrap().2.to_vec())).collect::<Vec<_>>()).collect()
}

#[test]
fn a_fine_tuned_folder_is_exported_whole_and_in_shards_with_all_that_its_base_has() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let of = |name: &str| text(&at(name));
    train(&at("first"), "--steps 2").ok();
    kiln(["export", &of("first"), "--out", &of("base")]).ok();
    assert_eq!(names(&at("base")), ["README.md", "config.json", "generation_config.json", "model.safetensors"]);
    let files = ["special_tokens_map.json", "chat_template.jinja", "vocab.json", "merges.txt", "LICENSE"];
    files.iter().for_each(|file| fs::write(at("base").join(file), format!("{file} of the base")).unwrap());
    fs::write(at("base/generation_config.json"), "{\"eos_token_id\": 7}").unwrap();
    fs::write(at("base/README.md"), "the base's own card").unwrap();

    let set = format!("--set model.base={} --set ema=0.5 --set eval_every=2 --set learning_rate=0.01", of("base"));
    train(&at("run"), &format!("--steps 4 {set}")).ok();
    train(&at("parts"), &format!("--steps 2 {set}")).ok();
    kiln(["train", "--out", &of("parts"), "--resume", "--steps", "4", "--threads", "1"]).ok();
    let said = kiln(["export", &of("run"), "--out", &of("one")]).ok().out;
    assert!(said.contains("averaged over steps"), "{said}");
    kiln(["export", &of("parts"), "--out", &of("many"), "--shard-size", "10KB"]).ok();
    kiln(["export", &of("run"), "--out", &of("raw"), "--raw-weights"]).ok();
    assert_eq!(weights(&at("one")), weights(&at("many")), "a resumed run, in shards, has the same weights");
    let numbers = |folder: &str| weights(&at(folder));
    assert!(numbers("one") != numbers("raw") && numbers("one") != numbers("base"));
    for file in files.iter().chain(&["generation_config.json", "config.json"]) {
        assert_eq!(fs::read(at("one").join(file)).unwrap(), fs::read(at("base").join(file)).unwrap(), "{file}");
    }

    // transformers' layout: files of at most so many bytes, or of one weight, and an index of all.
    let shards: Vec<String> = names(&at("many")).into_iter().filter(|n| n.ends_with(".safetensors")).collect();
    assert!(shards.len() > 2 && shards[0] == format!("model-00001-of-{:05}.safetensors", shards.len()), "{shards:?}");
    let index: serde_json::Value = serde_json::from_slice(&fs::read(at("many/model.safetensors.index.json")).unwrap()).unwrap();
    let total: usize = weights(&at("many")).values().map(Vec::len).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    for (name, file) in index["weight_map"].as_object().unwrap() {
        let file = load_safetensors(&at("many").join(file.as_str().unwrap())).unwrap();
        let held: usize = file.names().iter().map(|n| file.get(n).unwrap().2.len()).sum();
        assert!(file.get(name).is_some() && (held <= 10_000 || file.names().len() == 1), "{name}");
    }
    // Both are the same model to whoever reads them.
    let logits = |folder: &str| {
        let out = of(&format!("{folder}.safetensors"));
        kiln(["check", "model", &of(folder), "--ids", "5 1 99 25", "--write", &out, "--threads", "1"]).ok();
        fs::read(out).unwrap()
    };
    assert!(logits("one") == logits("many") && logits("one") != logits("base"));
    kiln(["export", &of("run"), "--out", &of("x"), "--shard-size", "0"]).fails(&["--shard-size", "GiB"]);
    kiln(["export", &of("run"), "--out", &of("x"), "--shard-size", "5 apples"]).fails(&["--shard-size", "GiB"]);
    assert!(!at("x").exists());

    // The card has the run's figures, and nothing of the base's.
    let card = fs::read_to_string(at("one/README.md")).unwrap();
    let last = records(&at("run"), "val").pop().unwrap();
    let loss = format!("| validation loss, step 4 | {:.4} |", last["val_loss"].as_f64().unwrap());
    let command = format!("kiln train decoder --out {}", of("run"));
    let facts = [
        "# one\n",
        "| recipe | decoder |",
        "| fine-tuned from | base |",
        "| trained weights | all |",
        "| data | generated |",
        "| steps | 4 |",
        &loss,
    ];
    for part in facts.iter().copied().chain(["(EMA, decay 0.5)", &command, "| trained with | kiln "]) {
        assert!(card.contains(part), "no '{part}' in\n{card}");
    }
    assert!(fs::read_to_string(at("many/README.md")).unwrap().contains("--resume"));
    assert!(fs::read_to_string(at("raw/README.md")).unwrap().contains("| weights | of the last step |"));
}

#[test]
fn perplexity_is_the_exponential_of_a_language_models_loss() {
    let dir = tempfile::tempdir().unwrap();
    let data = byte_data(&dir.path().join("bytes"));
    for recipe in ["decoder", "hydra"] {
        let out = dir.path().join(recipe);
        let size = if recipe == "decoder" { TINY.to_string() } else { super::common::SMALL.join(" ") };
        let run = format!("train {recipe} --out {} {size} --steps 2 --set eval_every=2 --data {}", out.display(), data.display());
        let said = kiln(run.split_whitespace()).ok().out;
        let record = records(&out, "val").pop().unwrap();
        let [loss, perplexity] = ["val_loss", "val_perplexity"].map(|key| record[key].as_f64().unwrap());
        assert!((perplexity - loss.exp()).abs() < 1e-9 * perplexity, "{recipe}: {record}");
        assert!(said.contains(&format!("perplexity {perplexity:.4}")), "{said}");
        // All of the split where nothing else is said, and a part where it is.
        let eval = |more: &[&str]| kiln([&["eval", &text(&out), "--threads", "1"], more].concat()).ok().out;
        let whole: serde_json::Value = serde_json::from_str(&eval(&["--json"])).unwrap();
        assert!(whole["batches"] == whole["of_batches"] && whole["batches"].as_u64().unwrap() > 2, "{whole}");
        assert!((whole["perplexity"].as_f64().unwrap() - whole["loss"].as_f64().unwrap().exp()).abs() < 1e-6, "{whole}");
        all_declared(&whole);
        assert!(eval(&[]).contains("all of the validation split"));
        assert!(eval(&["--batches", "1"]).contains("1 of "));
    }
}

#[test]
fn a_run_without_memory_is_refused_with_settings_that_fit() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    // Terabytes of activations, which micro-batches would not have.
    let said = train(&out, "--set batch=1048576 --set seq=512");
    said.fails(&["are free", "settings that fit: --set train.batch=", "--set train.accumulate="]);
    let number = |key: &str| -> u64 {
        let rest = said.err.split(&format!("{key}=")).nth(1).unwrap();
        rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
    };
    assert_eq!(number("train.batch") * number("train.accumulate"), 1 << 20, "as many examples in a step as were asked for: {}", said.err);
    // Weights, moments and gradients of every weight, where adapters have a thousandth of those.
    let free = said.err.split(" are free").next().unwrap().rsplit("and ").next().unwrap();
    let (number, unit) = free.split_once(' ').unwrap();
    let unit = ["B", "KiB", "MiB", "GiB", "TiB"].iter().position(|u| *u == unit).unwrap();
    let rows = (number.parse::<f64>().unwrap() * 1024f64.powi(unit as i32) * 0.4) as u64 / 4 / 1024;
    train(&out, &format!("--set vocab={rows} --set dim=1024 --set tied=true")).fails(&["are free", "--set model.train=lora"]);
    assert!(!out.exists());
}
