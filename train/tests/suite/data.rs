//! Data at the command line: which token ends documents, what is left behind, what moved, what is no file.

use crate::common::{
    byte_data, command, copy, end, finish, half_written, kiln, names, resume, same_bytes, signal, start, text, train, wait_until,
};
use crate::common::{checkpoint, train_args, word_data};
use kiln::data::replies::Template;
use kiln::data::{Dataset, ShardSet, Split, Tokenizer};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::tempdir;

/// A tokenizer of words that has an ordinary "</s>" (2) and these added special tokens from 3 on.
fn tokenizer(dir: &Path, special: &[&str]) -> PathBuf {
    let words = ["[unk]", "word", "</s>"];
    let vocab: serde_json::Map<String, Value> = words.iter().chain(special).enumerate().map(|(i, w)| (w.to_string(), i.into())).collect();
    let added = special.iter().zip(3..).map(|(name, id)| {
        json!({"id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    });
    let json = json!({"version": "1.0", "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[unk]"}});
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("tokenizer.json"), json.to_string()).unwrap();
    dir.join("tokenizer.json")
}

#[test]
fn prepare_says_which_token_ends_documents_and_eos_sets_it() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    fs::write(at("a.jsonl"), "{\"text\": \"word word\"}\n{\"text\": \"word\"}\n").unwrap();
    let spec = tokenizer(&dir.path().join("model"), &["<|endoftext|>", "<|im_end|>", "<|other|>"]);
    let prepared = |args: &[&str]| {
        let own = ["data", "prepare", &at("a.jsonl"), "--tokenizer", &text(&spec), "--out", &at("out"), "--val-share", "0", "--force"];
        let ran = kiln([&own[..], args].concat()).ok();
        let set = ShardSet::open(&dir.path().join("out"), Split::Train).unwrap();
        (set.get(0..set.tokens()).unwrap(), ran.out, kiln(["data", "inspect", &at("out")]).ok().out)
    };
    let check = |args: &[&str], ids: &[u32], line: &str| {
        let (found, said, inspected) = prepared(args);
        assert_eq!(found, ids, "{args:?}");
        // What reads the data set ends what it writes with the same token.
        let out = dir.path().join("out");
        let tokenizer = Dataset::open(&out).unwrap().load_tokenizer(&out).unwrap();
        let end = ids.last().copied().filter(|_| !args.contains(&"none"));
        assert_eq!((tokenizer.eos(), tokenizer.end().id), (end, end), "{args:?}");
        assert!(said.contains(line) && inspected.contains(line), "{line}\n{said}\n{inspected}");
    };
    check(&[], &[1, 1, 3, 1, 3], "end of document: <|endoftext|> (3), by its name");
    fs::write(dir.path().join("model/generation_config.json"), json!({"eos_token_id": [4, 5]}).to_string()).unwrap();
    check(&[], &[1, 1, 5, 1, 5], "end of document: <|other|> (5), generation_config.json");
    check(&["--eos", "<|im_end|>"], &[1, 1, 4, 1, 4], "end of document: <|im_end|> (4), --eos");
    check(&["--eos", "2"], &[1, 1, 2, 1, 2], "end of document: </s> (2), --eos");
    check(&["--eos", "none"], &[1, 1, 1], "end of document: none (--eos)");
    let wrong = |eos: &str, parts: &[&str]| {
        kiln(["data", "prepare", &at("a.jsonl"), "--tokenizer", &text(&spec), "--out", &at("new"), "--eos", eos]).fails(parts)
    };
    wrong("6", &["--eos = 6", "tokenizer.json has no such token; its ids go up to 5"]);
    wrong("<|none|>", &["--eos = <|none|>"]);
    // What cannot be understood is an error, unless it need not be.
    fs::write(dir.path().join("model/generation_config.json"), "{").unwrap();
    kiln(["data", "prepare", &at("a.jsonl"), "--tokenizer", &text(&spec), "--out", &at("new")]).fails(&["generation_config.json", "--eos"]);
    check(&["--eos", "3"], &[1, 1, 3, 1, 3], ", --eos");
    // Bytes, and data sets of earlier versions.
    kiln(["data", "prepare", &at("a.jsonl"), "--out", &at("bytes"), "--val-share", "0", "--eos", "10"]).ok();
    let set = ShardSet::open(&dir.path().join("bytes"), Split::Train).unwrap();
    assert_eq!(Tokenizer::Byte.decode(&set.get(0..set.tokens()).unwrap()), "word word\nword\n");
    let json = dir.path().join("bytes/dataset.json");
    let mut old: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    old.as_object_mut().unwrap().remove("eos");
    fs::write(json, old.to_string()).unwrap();
    assert!(kiln(["data", "inspect", &at("bytes")]).ok().out.contains("prepared by an earlier version"));
}

#[test]
fn a_signal_ends_prepare_with_its_status_and_leaves_nothing() {
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let dir = tempdir().unwrap();
        let out = dir.path().join("out");
        let mut child = start(["data", "prepare", "--generated", "1000000000", "--out", &text(&out)].map(String::from).into());
        wait_until(&mut child, || names(dir.path()).iter().any(|n| names(&dir.path().join(n)).iter().any(|n| n.ends_with(".tokens.tmp"))));
        signal(&child, name);
        let ran = end(child);
        assert_eq!((ran.code, ran.err.trim()), (Some(code), "stopped: nothing was written"), "{ran:?}");
        assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
    }
}

#[test]
fn what_a_killed_prepare_left_is_removed_by_the_next() {
    let dir = tempdir().unwrap();
    let out = dir.path().join("out");
    let mut child = start(["data", "prepare", "--generated", "1000000000", "--out", &text(&out)].map(String::from).into());
    wait_until(&mut child, || names(dir.path()).iter().any(|n| names(&dir.path().join(n)).len() > 1));
    signal(&child, "KILL");
    end(child);
    assert_eq!(names(dir.path()).len(), 1);
    byte_data(&out);
    assert_eq!(names(dir.path()), ["out"]);
    assert!(half_written(&out).is_empty() && !names(&out).contains(&".lock".to_string()), "{:?}", names(&out));
}

#[test]
fn a_text_file_in_the_place_of_a_data_set_names_the_command() {
    let dir = tempdir().unwrap();
    let book = dir.path().join("my book.txt");
    fs::write(&book, "once upon a time").unwrap();
    for recipe in ["hydra", "lior", "polychromic"] {
        let ran = kiln(
            ["train", recipe, "--set", "model.pretrain=0", "--data", &text(&book), "--out", &text(&dir.path().join("run"))]
                .iter()
                .filter(|a| recipe == "polychromic" || !["--set", "model.pretrain=0"].contains(a)),
        );
        ran.fails(&["is a file", &format!("kiln data prepare {} --out data/my book, then --data data/my book", book.display())]);
    }
    kiln(["train", "hydra", "--data", &text(&dir.path().join("none")), "--out", &text(&dir.path().join("run"))])
        .fails(&["there is no data set", "--data"]);
    assert_eq!(names(dir.path()), ["my book.txt"]);
}

/// Each of these would wait for ever.
#[test]
fn pipes_in_the_place_of_files_are_refused_at_once() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    let pipe = |name: &str| assert!(Command::new("mkfifo").arg(at(name)).status().unwrap().success());
    fs::write(at("a.txt"), "some text\nof two lines").unwrap();
    for folder in ["set", "model", "pictures", "puzzles"] {
        fs::create_dir(at(folder)).unwrap();
    }
    ["p.txt", "p.jsonl", "p.json", "p.toml", "p.csv", "p.png", "set/dataset.json", "model/config.json", "puzzles/train.csv"]
        .iter()
        .for_each(|n| pipe(n));
    for class in ["a", "b"] {
        fs::create_dir(at(&format!("pictures/{class}"))).unwrap();
        pipe(&format!("pictures/{class}/p.png"));
    }
    let out = at("out");
    for args in [
        vec!["data", "prepare", &at("p.txt"), "--out", &out],
        vec!["data", "prepare", &at("p.jsonl"), "--out", &out],
        vec!["data", "prepare", &at("a.txt"), "--tokenizer", &at("p.json"), "--out", &out],
        vec!["data", "inspect", &at("set")],
        vec!["train", "hydra", "--data", &at("set"), "--out", &out],
        vec!["train", "hydra", "--config", &at("p.toml"), "--out", &out],
        vec!["train", "hrm", "--data", &at("p.csv"), "--out", &out],
        vec!["train", "hrm", "--data", &at("puzzles"), "--out", &out],
        vec!["train", "polychromic", "--set", "model.pretrain=0", "--data", &at("p.jsonl"), "--out", &out],
        vec!["train", "polychromic", "--set", &format!("model.base={}", at("model")), "--out", &out],
        vec!["train", "vision_bdh", "--set", "model.classes=2", "--data", &at("pictures"), "--out", &out],
        vec!["check", "model", &at("model")],
        vec!["check", "golden", &at("p.json")],
    ] {
        // A minute is for ever.
        let mut c = Command::new("timeout");
        c.arg("60").arg(command::<&str>([]).get_program()).args(&args).env("CUDA_VISIBLE_DEVICES", "");
        finish(c).fails(&["it is a pipe, not a file"]);
    }
    assert!(!Path::new(&out).exists());
}

#[test]
fn a_shard_that_is_cut_short_ends_a_run_with_an_error() {
    let dir = tempdir().unwrap();
    let (data, run) = (byte_data(&dir.path().join("data")), dir.path().join("run"));
    let mut child = start(train_args(&run, &format!("--steps 1000000 --set save_every=1 --data {}", data.display())));
    wait_until(&mut child, || checkpoint(&run, 2).exists());
    for name in names(&data).iter().filter(|n| n.starts_with("train")) {
        fs::File::options().write(true).open(data.join(name)).unwrap().set_len(100).unwrap();
    }
    end(child).fails(&["has the wrong length", "has 100"]);
}

/// The tokenizer is in the checkpoint, so only what needs the data asks for it; what moved is known by its checksum.
#[test]
fn a_run_holds_what_it_needs() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let words: Vec<String> = (0..40).map(|i| format!("word{i}")).collect();
    let data = word_data(&at("made"), &words.iter().map(String::as_str).collect::<Vec<_>>(), json!({"type": "Whitespace"}));
    train(&at("run"), &format!("--steps 4 --set save_every=2 --data {}", data.display())).ok();
    assert!(names(&checkpoint(&at("run"), 4)).contains(&"tokenizer.json".to_string()));
    let generate = || kiln(["generate", &text(&at("run")), "--prompt", "word1 word2", "--max-tokens", "8", "--temperature", "0"]).ok().out;
    let evaluate = |args: &[&str]| kiln([&["eval", &text(&at("run")), "--threads", "1", "--json"][..], args].concat());
    let (said, values) = (generate(), evaluate(&[]).ok().out);
    assert!(said.contains("word1 word2 word"), "{said}");

    // A checkpoint alone, without its run and its data, still writes.
    copy(&data, &at("moved"));
    fs::remove_dir_all(at("made")).unwrap();
    assert_eq!(generate(), said);
    copy(&checkpoint(&at("run"), 4), &at("alone"));
    assert_eq!(
        kiln(["generate", &text(&at("alone")), "--prompt", "word1 word2", "--max-tokens", "8", "--temperature", "0"]).ok().out,
        said
    );
    evaluate(&[]).fails(&["there is no data set", "--data"]);
    assert_eq!(evaluate(&["--data", &text(&at("moved"))]).ok().out, values);
    resume(&at("run"), "--steps 6").fails(&["there is no data set", "--data"]);

    // Other data of the same tokenizer.
    let sentence: Vec<&str> = (0..2000).map(|i| words[i * i * i % 40].as_str()).collect();
    fs::write(at("other.txt"), sentence.join(" ")).unwrap();
    let own = [
        "data",
        "prepare",
        &text(&at("other.txt")),
        "--tokenizer",
        &text(&at("moved/tokenizer.json")),
        "--val-share",
        "0.2",
        "--out",
        &text(&at("other")),
    ];
    kiln(own).ok();
    resume(&at("run"), &format!("--steps 6 --data {}", at("other").display())).fails(&[
        "the data in",
        "/other is not that of checkpoint",
        "--init-from",
    ]);

    copy(&at("run"), &at("twin"));
    let resumed = resume(&at("run"), &format!("--steps 6 --data {}", at("moved").display())).ok().out;
    assert!(resumed.contains("data.path was") && resumed.contains("the same by its checksum"), "{resumed}");
    // Its config says so from now on; and bit for bit it is the run whose data never moved.
    resume(&at("run"), "--steps 8").ok();
    fs::create_dir(at("made")).unwrap();
    fs::rename(at("moved"), &data).unwrap();
    resume(&at("twin"), "--steps 8").ok();
    same_bytes(&checkpoint(&at("run"), 8), &checkpoint(&at("twin"), 8));
}

/// What a checkpoint notes of its data is what was read, whatever becomes of the folder while it trains.
#[test]
fn the_fingerprint_of_the_data_is_that_of_what_was_read() {
    let dir = tempdir().unwrap();
    let (data, run) = (byte_data(&dir.path().join("data")), dir.path().join("run"));
    let mut child = start(train_args(&run, &format!("--steps 1000000 --set save_every=1 --data {}", data.display())));
    wait_until(&mut child, || checkpoint(&run, 2).exists());
    fs::rename(&data, dir.path().join("moved")).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(50));
    signal(&child, "INT");
    assert_eq!(end(child).code, Some(130));
    let found = kiln::checkpoint::newest(&run.join("checkpoints")).unwrap().0.unwrap();
    assert!(found.meta["identity"]["data"].is_string(), "{}", found.meta["identity"]);
    resume(&run, &format!("--steps {} --data {}", found.step + 1, dir.path().join("moved").display())).ok();
}

/// The example of docs/chats.md, as a shell hands it over.
#[test]
fn the_template_of_the_page_about_chats_has_line_breaks() {
    let page = include_str!("../../../docs/chats.md");
    let (_, rest) = page.split_once("--set data.template='").expect("docs/chats.md has an example");
    let (template, _) = rest.split_once('\'').unwrap();
    assert!(template.contains("\\n"), "{template}");
    let t = Template::new(template, &Tokenizer::Byte).unwrap();
    let made = [t.head(&Tokenizer::Byte, "Why?").unwrap(), t.tail(&Tokenizer::Byte, "So.").unwrap()];
    assert_eq!(made.map(|ids| Tokenizer::Byte.decode(&ids)), ["Q: Why?\nA: ", "So.\0"]);
}

#[test]
fn escapes_are_undone_in_prompts_and_stops() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 1").ok();
    let generate = |args: &[&str]| kiln([&["generate", &text(&run), "--max-tokens", "1", "--threads", "1"][..], args].concat());
    assert!(generate(&["--prompt", r"a\tb\u{e4}\\"]).ok().out.starts_with("a\tbä\\"));
    generate(&["--stop", r"\n", "--stop", r"\u{61}"]).ok();
    // A string of several tokens ends the text, and is no part of it.
    let long = |stop: &[&str]| {
        let own = ["generate", &text(&run), "--max-tokens", "60", "--threads", "1", "--temperature", "0", "--prompt", "the "];
        kiln([&own[..], stop].concat()).ok().out.strip_prefix("the ").unwrap().strip_suffix('\n').unwrap().to_string()
    };
    let whole = long(&[]);
    let stop: String = whole.chars().skip(5).take(3).collect();
    assert_eq!(stop.chars().count(), 3, "{whole:?}");
    let unicode: String = stop.chars().map(|c| format!("\\u{{{:x}}}", c as u32)).collect();
    assert_eq!(long(&["--stop", &unicode]), whole[..whole.find(&stop).unwrap()], "{stop:?} of {whole:?}");
    assert_eq!(long(&["--stop", r"never\n\n"]), whole);
    generate(&["--prompt", r"\frac"]).fails(&[r"'\f' is no escape sequence", r"a backslash is written \\"]);
}
