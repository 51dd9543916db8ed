//! The first hour, as someone spends it who comes from PyTorch and Hugging Face: what is written down works, and what cannot work says how it can.
//!
//! Elsewhere are: a folder without its tokenizer (`exports::a_folder_without_its_tokenizer_is_never_taken_for_bytes`), what a base brings
//! (`base::a_base_brings_its_own_learning_rate`), adapters without one (`base::adapters_without_a_base_are_refused`), the count of parameters in four bits
//! (`base::four_bits_do_not_change_the_count_of_parameters`), prompts that stay as they are
//! (`exports::a_prompt_is_continued_as_it_is_by_a_run_and_by_its_export`), and names of other trainers
//! (`refused::typing_mistakes_suggest_the_right_name` and the tests of `config.rs`).

use super::chats::{CHATML, conversations, lines, model};
use super::common::{Ran, byte_data, command, end, finish, kiln, records, start, text, wait_until};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::tempdir;

/// A decoder whose step takes a millisecond.
const SMALL: &str = "--set dim=16 --set layers=1 --set heads=2 --set kv_heads=1 --set head_dim=8 --set hidden=24 --set seq=64 --set batch=2 --set eval_batches=1 --threads 1";

/// `args` are split at spaces.
fn run(args: impl AsRef<str>) -> Ran {
    kiln(args.as_ref().split_whitespace())
}

/// A folder with a base that chats, and conversations.
fn base_and_chats(dir: &Path) -> (String, String) {
    model(&dir.join("base"), CHATML);
    fs::write(dir.join("chats.jsonl"), lines(&conversations())).unwrap();
    (text(&dir.join("base")), text(&dir.join("chats.jsonl")))
}

/// The lines of a run's sample.
fn sample(said: &str) -> Vec<&str> {
    let (_, after) = said.split_once("a sample of what the model writes:\n").unwrap_or_else(|| panic!("no sample: {said}"));
    after.lines().take_while(|line| line.starts_with("  | ")).collect()
}

#[test]
fn training_ends_with_a_sample_of_what_the_model_writes() {
    let dir = tempdir().unwrap();
    let out = |name: &str| dir.path().join(name);
    let train = |name: &str, more: &str| run(format!("train decoder {SMALL} --steps 1 --out {} {more}", out(name).display())).ok().out;
    // Generated text, prepared text, chats: what begins it is of the validation data.
    let said = train("generated", "");
    assert!(!sample(&said).is_empty(), "{said}");
    let noted = fs::read_to_string(out("generated").join("samples.jsonl")).unwrap_or_default()
        + &fs::read_to_string(out("generated").join("run.json")).unwrap();
    assert!(noted.contains("text"), "{noted}");
    let book = (0..400).map(|i| format!("Line {i} of a book.\n")).collect::<String>();
    fs::write(out("book.txt"), &book).unwrap();
    run(format!("data prepare {} --val-share 0.2 --out {}", out("book.txt").display(), out("data").display())).ok();
    let said = train("prepared", &format!("--data {}", out("data").display()));
    let (held_out, learned) = (&book[book.len() * 4 / 5 - 40..], &book[..book.len() * 4 / 5 - 40]);
    let begins = sample(&said)[0].trim_start_matches("  | ").chars().take(10).collect::<String>();
    assert!(held_out.contains(&begins) && !learned.contains(&begins), "{begins:?} of {said}");
    let (base, chats) = base_and_chats(dir.path());
    let tuned = format!("train decoder --base {base} --data {chats} --threads 1 --steps 1 --set data.val_share=0.2");
    let said = run(format!("{tuned} --out {}", out("chats").display())).ok().out;
    let lines = sample(&said);
    assert!(lines.len() >= 2 && lines[0].starts_with("  | prompt: What is ") && lines[1].starts_with("  | reply:"), "{said}");
    let prompt = lines[0].trim_start_matches("  | prompt: ");
    let split = |split: &str| run(format!("data preview --data {chats} --base {base} --set data.val_share=0.2 --split {split}")).ok().out;
    assert!(split("val").contains(prompt) && !split("train").contains(prompt), "{prompt}");
    // Of a run that averages its weights, adapters, and weights in four bits, too.
    assert!(!sample(&run(format!("{tuned} --lora --bits 4 --set train.ema=0.9 --out {}", out("lora").display())).ok().out).is_empty());
    // A sample that cannot be written is no reason to fail: here the template that it needs is gone by then.
    fs::write(out("own.jinja"), CHATML).unwrap();
    let own = format!("--set data.template={} --out {}", out("own.jinja").display(), out("without").display());
    let args = format!("train decoder --base {base} --data {chats} --threads 1 --steps 400 {own}");
    let mut child = start(args.split_whitespace().map(str::to_owned).collect());
    wait_until(&mut child, || !records(&out("without"), "train").is_empty());
    fs::remove_file(out("own.jinja")).unwrap();
    let said = end(child).ok().out;
    assert!(said.contains("no sample: data.template") && said.contains("done in "), "{said}");
}

#[test]
fn a_base_is_planned_and_timed_without_data() {
    let dir = tempdir().unwrap();
    let (base, _) = base_and_chats(dir.path());
    let planned = run(format!("plan decoder --base {base} --set model.seq=128")).ok().out;
    assert!(planned.contains("vocab = 256") && planned.contains("the run: peak"), "{planned}");
    run(format!("bench decoder --base {base} --repeat 1 --warmup 0 --threads 1")).ok();
    run(format!("bench decoder --base {base} --lora --repeat 1 --warmup 0 --threads 1")).ok();
    run(format!("profile decoder --base {base} --threads 1 --out {}", dir.path().join("profile").display())).ok();
}

#[test]
fn a_base_without_data_is_not_trained_and_says_what_is_missing() {
    let dir = tempdir().unwrap();
    let (base, _) = base_and_chats(dir.path());
    let out = dir.path().join("run");
    let said = run(format!("train decoder --base {base} --out {}", out.display()));
    said.fails(&["no data was given", "--data chats.jsonl", &format!("kiln data prepare book.txt --tokenizer {base}")]);
    assert!(!said.err.contains("byte") && !out.exists(), "{said:#?}");
    // Tokens mean what the base has learned them to mean: data of another tokenizer is none of its.
    let data = byte_data(&dir.path().join("bytes"));
    let said = run(format!("train decoder --base {base} --data {} --steps 1 --threads 1 --out {}", data.display(), out.display()));
    said.fails(&["tokenizer (byte) is not the base's", &format!("kiln data prepare --tokenizer {base}")]);
    assert!(!out.exists());
}

#[test]
fn training_without_validation_works() {
    let dir = tempdir().unwrap();
    let (base, chats) = base_and_chats(dir.path());
    let at = |name: &str| text(&dir.path().join(name));
    let plain = |said: &str, out: &str, why: &str| {
        assert!(said.contains("no validation: ") && said.contains(why), "{said}");
        let table = said.lines().find(|l| l.starts_with("metric")).unwrap();
        assert!(!table.contains("validation") && table.contains("training"), "{said}");
        assert!(!Path::new(out).join("best").exists() && records(Path::new(out), "val").is_empty());
        run(format!("generate {out} --best")).fails(&["notes no best checkpoint"]);
        run(format!("eval {out}")).fails(&["nothing to evaluate", "--data"]);
    };
    // Chats, by setting and because they are too few to divide; packed and not.
    let tune = format!("train decoder --base {base} --threads 1 --epochs 2 --set model.seq=160");
    let said = run(format!("{tune} --data {chats} --set data.val_share=0 --out {}", at("none"))).ok().out;
    plain(&said, &at("none"), "data.val_share = 0;");
    assert!(said.contains("20 examples to learn from"), "{said}");
    fs::write(at("few.jsonl"), lines(&conversations()[..4])).unwrap();
    let said = run(format!("{tune} --data {} --set data.pack=false --out {}", at("few.jsonl"), at("few"))).ok().out;
    plain(&said, &at("few"), "data.val_share = 0.05 of 4 prompts is none");
    assert!(said.contains("4 examples to learn from"), "{said}");
    // It goes on, and other data evaluates it.
    run(format!("train --out {} --resume --epochs 3 --threads 1", at("few"))).ok();
    run(format!("eval {} --data {chats}", at("few"))).ok();
    // What needs validation says so.
    let said = run(format!("{tune} --data {chats} --set data.val_share=0 --set train.patience=2 --out {}", at("patience")));
    said.fails(&["train.patience = 2", "no validation", "data.val_share = 0"]);
    // Prepared text, in every recipe that reads it.
    run(format!("data prepare --generated 300 --val-share 0 --out {}", at("text"))).ok();
    for (recipe, size) in [("decoder", SMALL.to_string()), ("hydra", super::common::SMALL.join(" "))] {
        let said = run(format!("train {recipe} {size} --data {} --steps 3 --set eval_every=1 --out {}", at("text"), at(recipe))).ok().out;
        plain(&said, &at(recipe), "was prepared without a validation split");
        assert!(!sample(&said).is_empty());
    }
    let lior = format!("train lior --data {} --steps 1 --set eval_every=1 --threads 2 --out {}", at("text"), at("lior"));
    assert!(run(lior).ok().out.contains("no validation: "));
    // Polychromic writes replies to learned prompts, and shows none of held-out ones.
    let policy = "--set objective.new_tokens=4 --set objective.every=1 --set objective.prompts=1";
    let said = run(format!(
        "train polychromic --base {base} --data {} --threads 1 --steps 1 --set model.seq=144 {policy} --out {}",
        at("few.jsonl"),
        at("policy")
    ));
    assert!(said.ok().out.contains("no validation: "));
}

#[test]
fn a_few_text_files_are_split_inside() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    let name = |i: usize| at(&format!("{i}.txt"));
    let body = |i: usize| (0..50).map(|n| format!("File {i}, line {n}.\n")).collect::<String>();
    (0..12).for_each(|i| fs::write(name(i), body(i)).unwrap());
    for files in [2, 5, 9] {
        let names: Vec<String> = (0..files).map(name).collect();
        run(format!("data prepare {} --out {} --force", names.join(" "), at("data"))).ok();
        let found: Value = serde_json::from_str(&fs::read_to_string(at("data/dataset.json")).unwrap()).unwrap();
        // A twentieth of each.
        let [train, val] = ["train", "val"].map(|split| found[split]["tokens"].as_u64().unwrap());
        let share = val as f64 / (train + val) as f64;
        assert!((0.04..0.12).contains(&share), "{files} files: {share} of {}", train + val);
        assert_eq!(train + val, (0..files).map(|i| body(i).len() as u64 + 2).sum::<u64>(), "nothing is lost, and both parts end");
    }
    // Many are taken whole.
    let names: Vec<String> = (0..12).map(name).collect();
    run(format!("data prepare {} --val-share 0.2 --out {} --force", names.join(" "), at("data"))).ok();
    let found: Value = serde_json::from_str(&fs::read_to_string(at("data/dataset.json")).unwrap()).unwrap();
    assert_eq!(found["train"]["documents"].as_u64().unwrap() + found["val"]["documents"].as_u64().unwrap(), 12);
}

/// What a command prints behind "train on it with: ", run by a shell for one step.
fn recommended(dir: &Path, said: &str) -> Ran {
    let line = said.lines().find_map(|l| l.strip_prefix("train on it with: kiln ")).unwrap_or_else(|| panic!("{said}"));
    let mut sh = Command::new("sh");
    sh.args(["-c", &format!("\"$0\" {line} --steps 1 --threads 1 --out run"), env!("CARGO_BIN_EXE_kiln")]).current_dir(dir);
    let ran = finish(sh);
    let _ = fs::remove_dir_all(dir.join("run"));
    ran
}

#[test]
fn the_command_that_data_commands_recommend_runs() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    let book = (0..60).map(|i| format!("Line {i}.\n\n")).collect::<String>();
    fs::write(at("a.txt"), &book).unwrap();
    fs::write(at("b.txt"), book.repeat(30)).unwrap();
    for (n, args) in
        [vec!["a.txt"], vec!["a.txt", "b.txt"], vec!["a.txt", "--val-share", "0"], vec!["b.txt", "--val-share", "0"], vec!["b.txt"]]
            .iter()
            .enumerate()
    {
        let out = format!("a set of data {n}");
        let mut prepare = command([&["data", "prepare", "--out", &out], &args[..]].concat());
        let said = finish(std::mem::replace(prepare.current_dir(dir.path()), Command::new("true"))).ok().out;
        recommended(dir.path(), &said).ok();
    }
    pictures(&dir.path().join("digits"), 8, 12);
    let said = run(format!("data inspect {}", at("digits"))).ok().out;
    recommended(dir.path(), &said).ok();
}

/// Two classes of pictures of this side.
pub fn pictures(dir: &Path, side: u32, each: u32) {
    for (class, colour) in [("one", 40u8), ("two", 200)] {
        let class = dir.join(class);
        fs::create_dir_all(&class).unwrap();
        for i in 0..each {
            let pixel = |x: u32, y: u32| image::Rgb([colour, (x * 20 + i) as u8, (y * 20 + i * 3) as u8]);
            image::RgbImage::from_fn(side, side, pixel).save(class.join(format!("{i}.png"))).unwrap();
        }
    }
}

#[test]
fn pictures_are_shown_in_the_size_that_training_reads() {
    let dir = tempdir().unwrap();
    for (side, trained, patch) in [(8, 8, 2), (16, 16, 4), (28, 32, 8), (64, 64, 8)] {
        let at = |name: &str| text(&dir.path().join(format!("{name}{side}")));
        pictures(&dir.path().join(format!("digits{side}")), side, 12);
        let said = run(format!("data inspect {}", at("digits"))).ok().out;
        assert!(said.contains(&format!("read as {trained}x{trained} pixels")), "{said}");
        run(format!("data preview --data {} --count 2 --out {}.png", at("digits"), at("sheet"))).ok();
        let sheet = image::open(format!("{}.png", at("sheet"))).unwrap();
        run(format!("data preview --data {} --count 2 --size {trained} --out {}.png", at("digits"), at("same"))).ok();
        assert_eq!(sheet, image::open(format!("{}.png", at("same"))).unwrap());
        run(format!("train vision_bdh --data {} --steps 1 --set batch=4 --threads 1 --out {}", at("digits"), at("run"))).ok();
        let config: toml::Table = fs::read_to_string(format!("{}/config.toml", at("run"))).unwrap().parse().unwrap();
        let number = |key: &str| config["model"][key].as_integer().unwrap();
        assert_eq!((number("image"), number("patch")), (trained, patch), "of {side} pixels");
    }
    // Whoever sets a patch has it.
    let at = text(&dir.path().join("digits8"));
    let planned = run(format!("train vision_bdh --data {at} --set model.patch=8 --steps 1 --set batch=4 --threads 1 --out {at}-run"));
    assert!(planned.ok().code == Some(0) && fs::read_to_string(format!("{at}-run/config.toml")).unwrap().contains("patch = 8"));
}

#[test]
fn conversations_are_inspected_as_what_they_are() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    fs::write(at("chats.jsonl"), lines(&conversations())).unwrap();
    let pairs: Vec<Value> = (0..30).map(|i| json!({ "question": format!("What is {i}?"), "answer": "A number." })).collect();
    fs::create_dir(at("hub")).unwrap();
    super::stand_ins::parquet(&dir.path().join("hub/train-00000.parquet"), &["question", "answer"], &pairs[..20]);
    super::stand_ins::parquet(&dir.path().join("hub/train-00001.parquet"), &["question", "answer"], &pairs[20..]);
    let said = run(format!("data inspect {}", at("chats.jsonl"))).ok().out;
    assert!(said.contains("turns in \"messages\"") && said.contains("; 20 conversations, 87 turns"), "{said}");
    assert!(said.contains(&format!("kiln train decoder --base FOLDER --data {}", at("chats.jsonl"))), "{said}");
    let said = run(format!("data inspect {}", at("hub"))).ok().out;
    assert!(said.contains("\"question\"") && said.contains("; 30 conversations in 2 files, 60 turns"), "{said}");
    let found: Value = serde_json::from_str(&run(format!("data inspect {} --json", at("hub"))).ok().out).unwrap();
    assert_eq!((&found["conversations"], &found["files"]), (&json!(30), &json!(2)));
    fs::write(at("text.jsonl"), "{\"text\": \"words\"}\n").unwrap();
    run(format!("data inspect {}", at("text.jsonl"))).fails(&["text.jsonl", "plain text", "kiln data prepare"]);
}

/// Where a test compares a time that passed with a fixed one, a machine that is busy fails it, unless that is a guard against hangs.
#[test]
fn no_test_fails_because_a_machine_is_busy() {
    fn sources(dir: &Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
            match entry.is_dir() {
                true => sources(&entry, found),
                false => found.extend(entry.extension().is_some_and(|e| e == "rs").then_some(entry)),
            }
        }
    }
    let (root, mut files) = (Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap(), vec![]);
    ["train/tests", "train/src", "engine/tests", "engine/src", "xtask/src"].iter().for_each(|dir| sources(&root.join(dir), &mut files));
    // Below how many seconds a time has to stay in a statement, if in any.
    let bound = |line: &str| -> Option<f64> {
        if let Some((_, limit)) = line.split_once("ulimit -t ") {
            return limit.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok();
        }
        let (_, after) = line.split_once("elapsed()")?;
        let number = |from: &str, scale: f64| {
            let (_, digits) = after.split_once(from)?;
            digits.split(|c: char| !(c.is_ascii_digit() || c == '.')).next()?.parse::<f64>().ok().map(|n| n * scale)
        };
        after.trim_start().strip_prefix('<')?;
        number("from_secs(", 1.0).or_else(|| number("from_millis(", 1e-3)).or_else(|| number("from_secs_f64(", 1.0))
    };
    assert_eq!(bound("assert!(started.elapsed() < Duration::from_secs(5))"), Some(5.0));
    assert_eq!(bound("assert!(\n started.elapsed()\n < Duration::from_millis(900),"), Some(0.9));
    assert_eq!(bound("sh -c 'ulimit -t 3; kiln'"), Some(3.0));
    let mut tight = vec![];
    for path in files {
        let source = fs::read_to_string(&path).unwrap();
        let asserted = source.split_inclusive(";\n").filter(|l| l.contains("assert") || l.contains("ulimit -t"));
        tight.extend(asserted.filter(|l| bound(l).is_some_and(|s| s < 60.0)).map(|l| format!("{}: {}", path.display(), l.trim())));
    }
    // This file's own example.
    tight.retain(|line| !line.contains("bound("));
    assert!(tight.is_empty(), "{}", tight.join("\n"));
}

#[test]
fn settings_that_are_said_to_fit_do() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    let size = "--set dim=128 --set layers=1 --set hidden=256 --set seq=128 --set batch=1 --set eval_batches=1";
    run(format!("train decoder {size} --steps 1 --threads 1 --out {}", at("first"))).ok();
    run(format!("export {} --out {}", at("first"), at("base"))).ok();
    // More than the address space that the process may have, and less where the settings are taken.
    let (base, out) = (at("base"), at("run"));
    let args =
        format!("train decoder --base {base} --steps 1 --set train.batch=1024 --set eval_batches=1 --device cpu --threads 1 --out {out}");
    let limited = |args: &str| {
        let mut sh = Command::new("sh");
        sh.args(["-c", "ulimit -v 900000; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kiln")]).args(args.split_whitespace());
        // The allocator sets address space aside for every thread, which takes no memory.
        sh.env("MALLOC_ARENA_MAX", "1");
        finish(sh)
    };
    let said = limited(&args);
    said.fails(&["no pass makes it fit. What fits: --set ", " are free"]);
    let bytes = |text: &str| -> f64 {
        let (number, unit) = text.trim().split_once(' ').unwrap();
        let power = ["B", "KiB", "MiB", "GiB", "TiB"].iter().position(|known| *known == unit).unwrap();
        number.parse::<f64>().unwrap() * 1024f64.powi(power as i32)
    };
    let free = bytes(&said.err.split(" are free").next().unwrap().rsplit("and ").next().unwrap().replace(',', ""));
    let ways: Vec<&str> = said.err.split("What fits: ").nth(1).unwrap().trim().split(", or ").collect();
    for way in ways {
        let (settings, needs) = way.trim().trim_end_matches(')').split_once(" (needs ").unwrap();
        assert!(bytes(needs) <= free, "{way}: {}", said.err);
        limited(&format!("{args} {settings}")).ok();
        fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn all_of_the_validation_is_not_called_the_most() {
    let dir = tempdir().unwrap();
    let data = byte_data(&dir.path().join("data"));
    let train = |name: &str, batches: u32| {
        let out = dir.path().join(name);
        run(format!("train decoder {SMALL} --data {} --steps 1 --set eval_batches={batches} --out {}", data.display(), out.display()))
            .ok()
            .out
    };
    let line = |said: &str| said.lines().find(|l| l.contains("each validation reads")).unwrap().to_string();
    let all = line(&train("all", 0));
    assert!(all.contains("all of the validation split") && !all.contains("most"), "{all}");
    let one = line(&train("one", 1));
    assert!(one.contains("1 of ") && one.contains("train.eval_batches = 1 is the most"), "{one}");
}

#[test]
fn a_byte_model_is_exported_with_a_tokenizer_that_others_load() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    run(format!("train decoder {SMALL} --steps 1 --out {}", at("run"))).ok();
    run(format!("export {} --out {}", at("run"), at("model"))).ok();
    // The package that transformers reads it with.
    let own = tokenizers::Tokenizer::from_file(at("model/tokenizer.json")).unwrap();
    for text in ["the happy dog.\n", "  two  spaces\t\r\n", "größer 漢字 🦀 e\u{301} \u{100}", "\0<|endoftext|>", ""] {
        let ids = own.encode(text, true).unwrap().get_ids().to_vec();
        assert_eq!(ids, text.bytes().map(u32::from).collect::<Vec<_>>(), "{text:?}");
        assert_eq!(own.decode(&ids, false).unwrap(), text);
    }
    let read = |name: &str| -> Value { serde_json::from_str(&fs::read_to_string(at(name)).unwrap()).unwrap() };
    assert_eq!(read("model/generation_config.json")["eos_token_id"], 0);
    assert_eq!(read("model/tokenizer_config.json")["eos_token"], "\0");
    // To kiln it is bytes: prepared with them, or by the folder, it is the same data, and the folder is trained on it.
    fs::write(at("a.txt"), "A text.\n".repeat(200)).unwrap();
    for (name, tokenizer) in [("bytes", "byte".to_string()), ("folder", at("model")), ("file", at("model/tokenizer.json"))] {
        run(format!("data prepare {} --val-share 0.2 --tokenizer {tokenizer} --out {}", at("a.txt"), at(name))).ok();
        run(format!("train decoder --base {} --data {} --steps 1 --threads 1 --out {}-run", at("model"), at(name), at(name))).ok();
    }
    assert!(fs::read(at("bytes/train-00000.tokens")).unwrap() == fs::read(at("file/train-00000.tokens")).unwrap());
    run(format!("export {} --format gguf --out {}", at("model"), at("model.gguf"))).ok();
    // Of a folder of bytes from before, too, whether it was trained whole or has merged adapters.
    let tokenizer = fs::read(at("model/tokenizer.json")).unwrap();
    super::common::copy(Path::new(&at("model")), Path::new(&at("older")));
    ["tokenizer.json", "tokenizer_config.json"].iter().for_each(|name| fs::remove_file(format!("{}/{name}", at("older"))).unwrap());
    for (name, lora, merge) in [("whole", "", ""), ("adapters", "--lora", "--merge")] {
        run(format!("train decoder --base {} --data {} --steps 1 --threads 1 {lora} --out {}-run", at("older"), at("bytes"), at(name)))
            .ok();
        run(format!("export {0}-run {merge} --out {0}-model", at(name))).ok();
        assert!(fs::read(at(&format!("{name}-model/tokenizer.json"))).unwrap() == tokenizer, "{name}");
        assert!(fs::read_to_string(at(&format!("{name}-model/tokenizer_config.json"))).unwrap().contains("PreTrainedTokenizerFast"));
    }
    let write = |of: &str| run(format!("generate {} --prompt the --temperature 0 --max-tokens 20 --threads 1", at(of))).ok().out;
    assert_eq!(write("run"), write("model"));
}

#[test]
fn help_says_which_launchers_start_ranks_on_what() {
    let help = run("train --help").ok().out;
    assert!(help.contains("Started by mpiexec or srun, or for GPUs by torchrun"), "{help}");
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md")).unwrap();
    assert!(readme.contains("torchrun for GPUs, mpiexec or srun for both") && !readme.contains("any launcher"));
    // On CPUs torchrun's ranks are told what starts them.
    let dir = tempdir().unwrap();
    let mut c = command(format!("train decoder --device cpu --out {}", dir.path().join("run").display()).split_whitespace());
    c.env_clear().env("PATH", "/nowhere").env("HOME", dir.path());
    c.envs([("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")]);
    finish(c).fails(&["torchrun", "--ranks 2"]);
}

#[test]
fn a_run_is_named_after_its_base_as_typed() {
    use std::os::unix::fs::symlink;
    let dir = tempdir().unwrap();
    let (_, chats) = base_and_chats(dir.path());
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("work/inner")).unwrap();
    fs::rename(at("base"), at("cache-5f3a")).unwrap();
    symlink(at("cache-5f3a"), at("mine")).unwrap();
    let said = |typed: &str, name: &str| {
        let args = format!(
            "train decoder --base {typed} --lora --data {chats} --steps 1 --threads 1 --set data.val_share=0.2 --out {}",
            at(name).display()
        );
        let mut c = command(args.split_whitespace());
        c.current_dir(at("work/inner"));
        let said = finish(c).ok().out;
        assert!(said.contains(&format!("decoder tiny from {typed} on ")), "{said}");
        run(format!("export {} --out {}", at(name).display(), at(&format!("{name}-adapter")).display())).ok();
        let config = fs::read_to_string(at(&format!("{name}-adapter")).join("adapter_config.json")).unwrap();
        serde_json::from_str::<Value>(&config).unwrap()["base_model_name_or_path"].as_str().unwrap().to_string()
    };
    // Links keep their names: what they lead to is often a cache, and means nothing to others.
    let mine = text(&fs::canonicalize(dir.path()).unwrap().join("mine"));
    assert_eq!(said("../../mine", "one"), mine);
    assert_eq!(said("../inner/../../mine", "two"), mine);
}

#[test]
fn a_folder_is_evaluated_as_the_first_validation_of_its_fine_tuning() {
    let dir = tempdir().unwrap();
    let (base, chats) = base_and_chats(dir.path());
    let at = |name: &str| text(&dir.path().join(name));
    let documents: Vec<Value> =
        (0..40).map(|i| json!({ "text": format!("Document {i} says that {} follows.", i + 1).repeat(8) })).collect();
    fs::write(at("documents.jsonl"), lines(&documents)).unwrap();
    run(format!("data prepare {} --tokenizer {base} --val-share 0.2 --out {}", at("documents.jsonl"), at("text"))).ok();
    for (name, data, sets) in
        [("chats", chats, "--set data.val_share=0.2"), ("text", at("text"), ""), ("seq", at("text"), "--set model.seq=32")]
    {
        let eval = |more: &str| run(format!("eval {base} --data {data} {sets} --threads 1 {more}"));
        let found: Value = serde_json::from_str(&eval("--json").ok().out).unwrap();
        // A step that moves no weight, and then the run's own validation of all of it.
        let out = at(&format!("{name}-run"));
        let still = "--steps 1 --set learning_rate=1e-30 --set eval_batches=0 --threads 1";
        run(format!("train decoder --base {base} --data {data} {sets} {still} --out {out}")).ok();
        let first = records(Path::new(&out), "val").remove(0);
        assert_eq!(found["loss"], first["val_loss"], "{name}: {found} {first}");
        assert_eq!(found["perplexity"], first["val_perplexity"]);
        super::common::all_declared(&found);
        assert!(found["batches"] == found["of_batches"] && found["model"] == base.as_str(), "{found}");
        let said = eval("").ok().out;
        assert!(said.contains(&format!("{base} on {data}: loss {:.4}", found["loss"].as_f64().unwrap())), "{said}");
    }
    run(format!("eval {base}")).fails(&["is a model's folder", "--data"]);
    run(format!("eval {base} --data {} --best", at("text"))).fails(&["--best is for a run"]);
    run(format!("eval {base} --data {} --prompts 3", at("text"))).fails(&["--prompts is for a run"]);
    run(format!("eval {base} --data {} --set data.val_share=0", at("documents.jsonl"))).fails(&["documents.jsonl"]);
    fs::write(at("few.jsonl"), lines(&conversations()[..3])).unwrap();
    run(format!("eval {base} --data {}", at("few.jsonl"))).fails(&["nothing to evaluate", "--set data.val_share=0.5"]);
    run(format!("eval {} --set seq=3", at("text-run"))).fails(&["--set is for a model's folder"]);
}

/// The lines of JSON that `kiln generate --prompts` prints.
fn rows(ran: Ran) -> Vec<Value> {
    ran.ok().out.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"))).collect()
}

#[test]
fn the_prompts_of_a_file_are_replied_to() {
    let dir = tempdir().unwrap();
    let (base, chats) = base_and_chats(dir.path());
    let at = |name: &str| text(&dir.path().join(name));
    let how = "--temperature 0 --threads 1 --max-tokens 12";
    let sets = "--set learning_rate=0.02 --set data.val_share=0.2 --steps 60 --threads 1";
    run(format!("train decoder --base {base} --data {chats} {sets} --out {}", at("run"))).ok();
    run(format!("train decoder --base {base} --data {chats} --lora {sets} --out {}", at("lora"))).ok();
    run(format!("export {} --out {}", at("lora"), at("adapter"))).ok();
    let asked: Vec<String> = (0..7).map(|i| format!("What is {i}{}?", " or more".repeat(i % 3))).collect();
    fs::write(at("asked.txt"), asked.join("\n\n") + "\n").unwrap();
    let object = |i: usize| match i % 2 {
        0 => json!({ "id": i, "prompt": asked[i] }),
        _ => json!({ "messages": [{ "role": "user", "content": asked[i] }] }),
    };
    fs::write(at("asked.jsonl"), lines(&(0..7).map(object).collect::<Vec<_>>())).unwrap();
    for model in [&base, &at("run"), &at("adapter")] {
        let alone =
            |prompt: &str| kiln(["generate", model, "--prompt", prompt].into_iter().chain(how.split(' '))).ok().out.trim().to_string();
        let expected: Vec<String> = asked.iter().map(|prompt| alone(prompt)).collect();
        // One by one, in batches of several lengths, from stdin, as lines of JSON: the same replies, in their order.
        for at_once in [1, 3, 16] {
            let found = rows(run(format!("generate {model} --prompts {} --json --at-once {at_once} {how}", at("asked.txt"))));
            let both: Vec<(&str, &str)> =
                found.iter().map(|row| (row["prompt"].as_str().unwrap(), row["text"].as_str().unwrap())).collect();
            let wanted: Vec<(&str, &str)> = asked.iter().zip(&expected).map(|(a, b)| (a.as_str(), b.as_str())).collect();
            assert_eq!(both, wanted, "{model} {at_once}");
        }
        let found = rows(run(format!("generate {model} --prompts {} --json {how}", at("asked.jsonl"))));
        assert!(found.iter().zip(&expected).all(|(row, text)| row["text"] == text.as_str()), "{found:?} {expected:?}");
        assert!(found[2]["id"] == 2 && found[1]["messages"][0]["content"] == asked[1].as_str(), "{found:?}");
    }
    let model = at("run");
    let mut piped = command(format!("generate {model} --prompts - --json {how}").split_whitespace());
    piped.stdin(Stdio::from(fs::File::open(at("asked.txt")).unwrap()));
    assert_eq!(rows(finish(piped)), rows(run(format!("generate {model} --prompts {} --json {how}", at("asked.txt")))));
    // Several replies to each; one prompt of the command line; a model that only continues.
    let found = rows(run(format!("generate {model} --prompts {} --json --replies 2 --threads 1 --max-tokens 4", at("asked.txt"))));
    assert!(found.len() == 7 && found.iter().all(|row| row["texts"].as_array().is_some_and(|t| t.len() == 2) && row.get("text").is_none()));
    assert_eq!(rows(run(format!("generate {model} --prompt hi --json {how}")))[0]["prompt"], "hi");
    super::common::train(&dir.path().join("hydra"), "--steps 1").ok();
    let found = rows(run(format!("generate {} --prompts {} --json {how}", at("hydra"), at("asked.txt"))));
    let alone = kiln(["generate", &at("hydra"), "--prompt", &asked[1]].into_iter().chain(how.split(' '))).ok().out;
    assert_eq!(alone, format!("{}{}\n", asked[1], found[1]["text"].as_str().unwrap()));
    // What is wrong is named with its place, before anything is written.
    for (content, parts) in [
        ("", &["bad.jsonl", "holds no prompts"][..]),
        ("{\"prompt\": \"a\"}\n\n{\"prompt\": 3}\n", &["bad.jsonl, line 3", "its prompt is 3"]),
        ("{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n", &["bad.jsonl, line 2", "neither \"prompt\" nor \"messages\"", "text"]),
        ("{\"prompt\": \"a\"}\n{\"prompt\"\n", &["bad.jsonl, line 2", "not a JSON object"]),
        ("{\"messages\": []}\n", &["bad.jsonl, line 1", "empty list"]),
        ("{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}\n", &["bad.jsonl, line 1", "assistant's"]),
    ] {
        fs::write(at("bad.jsonl"), content).unwrap();
        let ran = run(format!("generate {model} --prompts {} --json {how}", at("bad.jsonl")));
        ran.fails(parts);
        assert_eq!(ran.out, "");
    }
    fs::write(at("long.txt"), format!("short\n{}\n", "long ".repeat(100))).unwrap();
    run(format!("generate {model} --prompts {} --json", at("long.txt"))).fails(&["long.txt, line 2", "positions"]);
    run(format!("generate {model} --prompts {} --json", at("nowhere.txt"))).fails(&["nowhere.txt"]);
    run(format!("generate {model} --prompts {}", at("asked.txt"))).fails(&["--json"]);
    fs::write(at("turns.jsonl"), lines(&[json!({ "messages": [{ "role": "user", "content": "a" }] })])).unwrap();
    run(format!("generate {} --prompts {} --json", at("hydra"), at("turns.jsonl"))).fails(&["turns.jsonl, line 1", "messages"]);
    run(format!("generate {model} --raw --prompts {} --json", at("turns.jsonl"))).fails(&["turns.jsonl, line 1", "--raw"]);
}

#[test]
fn replies_are_drawn_by_the_seed_and_anew_in_every_batch() {
    let dir = tempdir().unwrap();
    let (base, _) = base_and_chats(dir.path());
    let how = "--temperature 1 --threads 1 --max-tokens 12 --json";
    let seeded = |seed: u64| rows(run(format!("generate {base} --prompt hi --seed {seed} {how}")))[0]["text"].clone();
    assert!(seeded(1) == seeded(1) && seeded(1) != seeded(2), "{} {}", seeded(1), seeded(2));
    // The same prompt again is another draw: in the same batch, and in the next.
    let asked = dir.path().join("asked.txt");
    fs::write(&asked, "hi\nhi\nhi\n").unwrap();
    for at_once in [1, 3] {
        let found = rows(run(format!("generate {base} --prompts {} --seed 1 --at-once {at_once} {how}", asked.display())));
        let texts: Vec<&str> = found.iter().map(|row| row["text"].as_str().unwrap()).collect();
        assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2], "{texts:?}");
    }
}

#[test]
fn what_a_folder_holds_is_said_in_the_fields_words() {
    let dir = tempdir().unwrap();
    let (base, _) = base_and_chats(dir.path());
    let said = run(format!("check model {base}")).ok().out;
    let sizes = "llama, width 16, 1 layers, 2 heads of 8 (1 for keys and values), MLP 24, vocabulary 256, 160 positions, ";
    assert!(said.contains(sizes) && said.contains("in f32, head tied to the embedding"), "{said}");
    // A token a line, each said once.
    assert!(said.contains("\nend of document: <|stop|> (97), tokenizer_config.json\n"), "{said}");
    assert!(said.contains("\nbefore a document: nothing\n") && said.contains("\npadding: none\n"), "{said}");
    assert_eq!(said.matches("tokenizer_config.json").count(), 1, "{said}");
    let mamba = "--set family=mamba2 --set dim=32 --set heads=4 --set head_dim=16 --set state=16 --set layers=1 --set batch=1 --set seq=32 --threads 1";
    run(format!("train decoder {mamba} --steps 1 --out {base}-run")).ok();
    run(format!("export {base}-run --out {base}-mamba")).ok();
    let said = run(format!("check model {base}-mamba")).ok().out;
    assert!(said.contains("mamba2, width 32, 1 layers, 4 heads of 16, state 16, vocabulary 256, "), "{said}");
    assert!(!said.contains("positions") && !said.contains("keys"), "{said}");
}
