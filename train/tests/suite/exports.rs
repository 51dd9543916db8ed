//! Folders for transformers: whole, in shards, with everything that their base has, and with a card that says what they are.

use super::common::{all_declared, byte_data, kiln, names, records, text};
use kiln::checkpoint::load_safetensors;
use safetensors::tensor::{Dtype, TensorView};
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
    let made = ["README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(names(&at("base")), made);
    let files = ["preprocessor_config.json", "chat_template.jinja", "LICENSE"];
    fs::write(at("base/notes.txt"), "of whoever copied the folder").unwrap();
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

    assert!(!at("one/notes.txt").exists(), "what no model has is not handed on");

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

/// The folder's weights in another type, in the place of its own.
fn convert(folder: &Path, dtype: Dtype) {
    let path = folder.join("model.safetensors");
    let file = load_safetensors(&path).unwrap();
    let tensor = |name: String| {
        let (_, shape, bytes) = file.get(&name).unwrap();
        let narrow = |b: &[u8]| {
            let v = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            if dtype == Dtype::BF16 { half::bf16::from_f32(v).to_le_bytes() } else { half::f16::from_f32(v).to_le_bytes() }
        };
        let bytes: Vec<u8> = bytes.chunks_exact(4).flat_map(narrow).collect();
        (name, shape, bytes)
    };
    let all: Vec<_> = file.names().into_iter().map(tensor).collect();
    let views = all.iter().map(|(name, shape, bytes)| (name.clone(), TensorView::new(dtype, shape.clone(), bytes).unwrap()));
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// The type of every weight.
fn types(folder: &Path) -> BTreeMap<String, String> {
    let files = names(folder).into_iter().filter(|n| n.ends_with(".safetensors"));
    let loaded = files.map(|n| load_safetensors(&folder.join(n)).unwrap());
    loaded.flat_map(|f| f.names().into_iter().map(|n| (n.clone(), f.get(&n).unwrap().0)).collect::<Vec<_>>()).collect()
}

/// A base of 16 bits, fine-tuned whole or merged with adapters, is written with 16 bits: as large as it was.
#[test]
fn a_base_is_exported_in_its_own_type() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let of = |name: &str| text(&at(name));
    train(&at("first"), "--steps 1").ok();
    let size = |folder: &str| weights(&at(folder)).values().map(Vec::len).sum::<usize>();
    for dtype in [Dtype::BF16, Dtype::F16] {
        let own = |name: &str| format!("{name}-{dtype:?}");
        kiln(["export", &of("first"), "--out", &of(&own("base"))]).ok();
        let wide = size(&own("base"));
        convert(&at(&own("base")), dtype);
        let base = format!("--steps 2 --set learning_rate=0.01 --set model.base={}", of(&own("base")));
        train(&at(&own("run")), &base).ok();
        kiln(["export", &of(&own("run")), "--out", &of(&own("whole")), "--shard-size", "10KB"]).ok();
        train(&at(&own("lora")), &format!("{base} --set model.train=lora --set rank=2 --set alpha=3.0")).ok();
        kiln(["export", &of(&own("lora")), "--out", &of(&own("merged")), "--merge"]).ok();
        kiln(["export", &of(&own("lora")), "--out", &of(&own("adapters"))]).ok();
        let expected = types(&at(&own("base")));
        assert!(expected.len() > 10 && expected.values().all(|d| *d == format!("{dtype:?}")), "{expected:?}");
        for made in ["whole", "merged"] {
            assert_eq!(types(&at(&own(made))), expected, "{made}");
            assert!(size(&own(made)) * 2 == wide && weights(&at(&own(made))) != weights(&at(&own("base"))), "{made}");
        }
        let index: serde_json::Value =
            serde_json::from_slice(&fs::read(at(&own("whole")).join("model.safetensors.index.json")).unwrap()).unwrap();
        assert_eq!(index["metadata"]["total_size"], wide / 2);
        is_merged_once(dtype, [at(&own("base")), at(&own("adapters")), at(&own("merged"))].map(|folder| weights(&folder)));
    }
}

/// What is merged is W + alpha / rank B A, rounded once: computed here in f64.
fn is_merged_once(dtype: Dtype, [base, adapters, merged]: [BTreeMap<String, Vec<u8>>; 3]) {
    const RANK: usize = 2;
    let wide = |bytes: &[u8]| -> Vec<f64> {
        let one = |b: &[u8]| {
            if dtype == Dtype::BF16 {
                half::bf16::from_le_bytes([b[0], b[1]]).to_f64()
            } else {
                half::f16::from_le_bytes([b[0], b[1]]).to_f64()
            }
        };
        bytes.chunks_exact(2).map(one).collect()
    };
    let numbers =
        |bytes: &[u8]| -> Vec<f64> { bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f64).collect() };
    let (mut equal, mut all, mut moved) = (0, 0, 0);
    for (name, bytes) in &adapters {
        let Some(matrix) = name.strip_suffix(".lora_A.weight") else { continue };
        let (a, b) = (numbers(bytes), numbers(&adapters[&format!("{matrix}.lora_B.weight")]));
        let theirs = format!("{}.weight", matrix.strip_prefix("base_model.model.").unwrap());
        let (w, found) = (wide(&base[&theirs]), wide(&merged[&theirs]));
        let k = a.len() / RANK;
        for (i, (w, found)) in w.iter().zip(&found).enumerate() {
            let change: f64 = (0..RANK).map(|r| b[i / k * RANK + r] * a[r * k + i % k]).sum();
            let sum = w + 3.0 / RANK as f64 * change;
            let rounded = if dtype == Dtype::BF16 { half::bf16::from_f64(sum).to_f64() } else { half::f16::from_f64(sum).to_f64() };
            (equal, all, moved) = (equal + usize::from(rounded == *found), all + 1, moved + usize::from(found != w));
        }
    }
    // Where a sum is all but half-way between two numbers, f32 may round it to the other.
    assert!(all > 1000 && moved * 10 > all && equal * 1000 >= all * 998, "{dtype:?}: {equal} of {all} equal, {moved} moved");
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
    said.fails(&["are free", "What fits: --set train.batch=", "--set train.accumulate="]);
    let number = |key: &str| -> u64 {
        let rest = said.err.split(&format!("{key}=")).nth(1).unwrap();
        rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
    };
    assert_eq!(number("train.batch") * number("train.accumulate"), 1 << 20, "as many examples in a step as were asked for: {}", said.err);
    assert!(!out.exists());
}

/// 300 tokens, or a vocabulary in a file: neither is a model of bytes.
#[test]
fn a_folder_without_its_tokenizer_is_never_taken_for_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let of = |name: &str| text(&at(name));
    for (name, vocab) in [("bytes", 256), ("words", 300)] {
        let run = format!("run-{name}");
        train(&at(&run), &format!("--steps 1 --set vocab={vocab}")).ok();
        kiln(["export", &of(&run), "--out", &of(name)]).ok();
        let _ = fs::remove_file(at(name).join("tokenizer.json"));
        let _ = fs::remove_file(at(name).join("tokenizer_config.json"));
    }
    fs::write(at("chats.jsonl"), "{\"prompt\": \"a\", \"reply\": \"b\"}\n".repeat(8)).unwrap();
    let generate = |name: &str| kiln(["generate", &of(name), "--prompt", "hi", "--max-tokens", "2", "--threads", "1"]);
    let tune = |name: &str| train(&at("tuned"), &format!("--steps 1 --set model.base={} --data {}", of(name), of("chats.jsonl")));
    generate("bytes").ok();
    for ran in [generate("words"), tune("words")] {
        ran.fails(&["words has no tokenizer.json", "its 300 tokens cannot be bytes"]);
    }
    fs::write(at("bytes/tokenizer_config.json"), "{}").unwrap();
    for ran in [generate("bytes"), tune("bytes"), kiln(["check", "model", &of("bytes")])] {
        ran.fails(&["tokenizer_config.json beside it", "AutoTokenizer.from_pretrained"]);
    }
}

/// No new line behind the prompt, and it is shown before what follows, whether the model is a run or its export.
#[test]
fn a_prompt_is_continued_as_it_is_by_a_run_and_by_its_export() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str| text(&dir.path().join(name));
    train(&dir.path().join("run"), "--steps 20 --set learning_rate=0.01").ok();
    kiln(["export", &of("run"), "--out", &of("model")]).ok();
    let generate = |name: &str, more: &[&str]| {
        let all = ["generate", &of(name), "--prompt", "the happy", "--temperature", "0", "--max-tokens", "24", "--threads", "1"];
        let ran = kiln(all.iter().chain(more)).ok();
        assert!(!ran.out.contains("a new line ends the prompt") && ran.out.starts_with("the happy"), "{}", ran.out);
        ran.out
    };
    let [run, model, raw] = [generate("run", &[]), generate("model", &[]), generate("model", &["--raw"])];
    assert_eq!((&run, &model), (&model, &raw));
}

/// Many bases have the tokens of chats in their vocabulary and no chat template: Llama 3, SmolLM2. They continue a text like any other.
#[test]
fn a_base_with_the_tokens_of_chats_continues_a_prompt_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str| text(&dir.path().join(name));
    super::chats::model(&dir.path().join("base"), "");
    let tokenizer = fs::read_to_string(of("base/tokenizer.json")).unwrap();
    fs::write(of("base/tokenizer.json"), tokenizer.replace("<|start|>", "<|im_start|>").replace("<|stop|>", "<|im_end|>")).unwrap();
    fs::write(of("base/tokenizer_config.json"), "{\"eos_token\": \"<|im_end|>\"}").unwrap();
    fs::write(of("book.txt"), (0..200).map(|i| format!("Line {i} of a book.\n")).collect::<String>()).unwrap();
    kiln(["data", "prepare", &of("book.txt"), "--tokenizer", &of("base"), "--val-share", "0.2", "--out", &of("data")]).ok();
    let tune = format!("train decoder --base {} --data {} --set learning_rate=0.01 --steps 20 --threads 1", of("base"), of("data"));
    kiln(tune.split(' ').chain(["--out", &of("run")])).ok();
    kiln(tune.split(' ').chain(["--lora", "--out", &of("lora")])).ok();
    for (run, export) in [("run", "model"), ("lora", "adapter")] {
        kiln(["export", &of(run), "--out", &of(export)]).ok();
        let generate = |name: &str, more: &[&str]| {
            let all = ["generate", &of(name), "--prompt", " Line 3", "--temperature", "0", "--max-tokens", "12", "--threads", "1"];
            kiln(all.iter().chain(more)).ok().out
        };
        let [own, exported, raw] = [generate(run, &[]), generate(export, &[]), generate(export, &["--raw"])];
        assert!(own.starts_with(" Line 3") && own.trim_end().len() > 7, "{own:?}");
        assert_eq!((&own, &exported), (&exported, &raw), "{run}");
    }
}

/// Prompts and replies that were learned by a text with two places are put to what is exported by a chat template that does the same.
#[test]
fn a_template_with_two_places_goes_along_with_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str| text(&dir.path().join(name));
    super::chats::model(&dir.path().join("base"), "");
    fs::write(of("base/tokenizer_config.json"), "{\"eos_token\": \"<|stop|>\"}").unwrap();
    let pair = |i: usize| format!("{{\"prompt\": \"What is {i}?\", \"reply\": \"A number, {i}.\"}}\n");
    fs::write(of("pairs.jsonl"), (0..40).map(pair).collect::<String>()).unwrap();
    let tune = format!("train decoder --base {} --data {} --set learning_rate=0.02 --epochs 30 --threads 1", of("base"), of("pairs.jsonl"));
    let template = ["--set", "data.template=Q \"1\": {prompt}\\nA: {reply}{eos}"];
    kiln(tune.split(' ').chain(template).chain(["--out", &of("run")])).ok();
    kiln(tune.split(' ').chain(template).chain(["--lora", "--out", &of("lora")])).ok();
    for (run, export) in [("run", "model"), ("lora", "adapter")] {
        kiln(["export", &of(run), "--out", &of(export)]).ok();
        let generate = |name: &str, more: &[&str]| {
            kiln(["generate", &of(name), "--temperature", "0", "--max-tokens", "12", "--threads", "1"].iter().chain(more)).ok().out
        };
        let asked = |name: &str| generate(name, &["--prompt", "Why?"]);
        let raw = generate(export, &["--raw", "--prompt", "Q \"1\": Why?\nA: "]);
        assert_eq!(asked(run), asked(export), "{run}");
        assert!(raw.trim_end().ends_with(asked(run).trim_end()) && asked(run).trim().len() > 2, "{raw:?} {:?}", asked(run));
        // What it has no place for is an error.
        kiln(["generate", &of(export), "--system", "Be brief.", "--prompt", "Why?"]).fails(&["prompts and replies alone"]);
    }
}
