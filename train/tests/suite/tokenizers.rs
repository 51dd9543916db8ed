//! Files of tokenizers and of rows that are made to hurt, or damaged: one clear line, and nothing of what a library says when it fails.

use super::chats::folder;
use super::common::{Ran, command, finish, text};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

/// With a bound against hangs alone.
fn kiln(args: &[&str]) -> Ran {
    let plain = command(args);
    let mut timed = Command::new("timeout");
    timed.arg("120").arg(plain.get_program()).args(plain.get_args());
    for (name, value) in plain.get_envs().filter_map(|(name, value)| Some((name, value?))) {
        timed.env(name, value);
    }
    finish(timed)
}

/// A tokenizer of single bytes, changed; and `kiln data prepare` with it.
fn prepared(dir: &Path, change: impl FnOnce(&mut Value)) -> Ran {
    let base = dir.join("base");
    if !base.exists() {
        folder(&base);
        fs::write(dir.join("text.txt"), "Hello world, two  spaces.\n".repeat(20)).unwrap();
    }
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(base.join("tokenizer.json")).unwrap()).unwrap();
    change(&mut tokenizer);
    fs::write(dir.join("own.json"), tokenizer.to_string()).unwrap();
    prepare(dir, "own.json")
}

fn prepare(dir: &Path, tokenizer: &str) -> Ran {
    let at = |name: &str| text(&dir.join(name));
    kiln(&["data", "prepare", &at("text.txt"), "--tokenizer", &at(tokenizer), "--out", &at("out"), "--force"])
}

#[track_caller]
fn refused(dir: &Path, part: &str, change: impl FnOnce(&mut Value)) {
    let ran = prepared(dir, change);
    ran.fails(&["own.json", part]);
    let crates = [".rs:", "unwrap", "RUST_BACKTRACE", "index out of bounds", "range end"];
    assert!(crates.iter().all(|said| !ran.err.contains(said)) && ran.err.trim().lines().count() == 1, "{ran:#?}");
}

fn charsmap(table: &[u32], texts: &[u8]) -> Value {
    use base64::Engine;
    let words: Vec<u8> = table.iter().flat_map(|word| word.to_le_bytes()).collect();
    let bytes = [&(words.len() as u32).to_le_bytes()[..], &words, texts].concat();
    json!({ "type": "Precompiled", "precompiled_charsmap": base64::engine::general_purpose::STANDARD.encode(bytes) })
}

fn template(single: Value) -> Value {
    json!({ "type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {} })
}

#[test]
fn a_tokenizer_at_which_the_library_panics_is_refused_in_a_line() {
    let dir = tempfile::tempdir().unwrap();
    prepared(dir.path(), |_| {}).ok();
    let contradict = "contradict one another";
    refused(dir.path(), contradict, |t| {
        t["model"]["vocab"]["ab"] = 200.into();
        t["model"]["vocab"]["cd"] = 201.into();
        t["model"]["merges"] = json!([["ab", "cd"]]);
    });
    refused(dir.path(), "shorter than the continuing_subword_prefix", |t| {
        t["model"]["continuing_subword_prefix"] = "####".into();
        t["model"]["merges"] = json!([["a", "b"]]);
    });
    refused(dir.path(), "damaged precompiled_charsmap", |t| {
        t["normalizer"] = json!({ "type": "Precompiled", "precompiled_charsmap": "////fwAA" })
    });
    refused(dir.path(), "contradict", |t| t["normalizer"] = charsmap(&[0], b"x\0"));
    let piece = |kind: &str, id: &str| json!({ kind: { "id": id, "type_id": 0 } });
    refused(dir.path(), "puts the text \"B\"", |t| t["post_processor"] = template(json!([piece("Sequence", "B")])));
    refused(dir.path(), "\"[X]\" around texts", |t| t["post_processor"] = template(json!([piece("SpecialToken", "[X]")])));
    refused(dir.path(), "pieces of length 0", |t| t["pre_tokenizer"] = json!({ "type": "FixedLength", "length": 0 }));
    let base = fs::read_to_string(dir.path().join("base/tokenizer.json")).unwrap();
    for cut in (1..base.len()).step_by(base.len() / 40) {
        fs::write(dir.path().join("own.json"), &base[..cut]).unwrap();
        prepare(dir.path(), "own.json").fails(&["own.json"]);
    }
    for end in ["\"decoder\":", "\"decoder\":{\"type\":", "\"decoder\":{\"type\":\"Strip\",\"content\":\"a"] {
        fs::write(dir.path().join("own.json"), format!("{{\"version\":\"1.0\",{end}")).unwrap();
        prepare(dir.path(), "own.json").fails(&["own.json", "not a readable tokenizer.json"]);
    }
}

#[test]
fn a_tokenizer_that_explodes_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let replace = |content: &str| json!({ "type": "Replace", "pattern": { "String": "l" }, "content": content });
    let sixteen = vec![replace(&"l".repeat(16)); 12];
    refused(dir.path(), "its normalizer may make", |t| t["normalizer"] = json!({ "type": "Sequence", "normalizers": sixteen }));
    let anything = json!({ "type": "Replace", "pattern": { "Regex": "x*" }, "content": "y".repeat(5000) });
    refused(dir.path(), "its normalizer may make 5001 bytes", |t| t["normalizer"] = anything);
    refused(dir.path(), "its normalizer may make", |t| t["normalizer"] = json!({ "type": "Prepend", "prepend": "x".repeat(5 << 20) }));
    refused(dir.path(), "its normalizer has more than 64 steps", |t| {
        t["normalizer"] = json!({ "type": "Sequence", "normalizers": vec![json!({ "type": "Lowercase" }); 100_000] })
    });
    refused(dir.path(), "its normalizer may make 100000 bytes", |t| t["normalizer"] = charsmap(&[0; 300], &[b'x'; 100_000]));
    refused(dir.path(), "its pre_tokenizer may make", |t| {
        let level = t["pre_tokenizer"].clone();
        t["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": vec![level; 30] })
    });
    refused(dir.path(), "its decoder may make", |t| {
        t["decoder"] = json!({ "type": "Sequence", "decoders": vec![replace(&"l".repeat(16)); 12] })
    });
    let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    refused(dir.path(), "its post_processor makes more", |t| t["post_processor"] = template(json!(vec![text.clone(); 100_000])));
    refused(dir.path(), "its post_processor makes more", |t| t["post_processor"] = template(json!([text, text])));
    let many = json!({ "id": "[x]", "ids": vec![0; 100], "tokens": vec!["a"; 100] });
    refused(dir.path(), "its post_processor makes more", |t| {
        t["post_processor"] = template(json!([{ "Sequence": { "id": "A", "type_id": 0 } }]));
        t["post_processor"]["special_tokens"] = json!({ "[x]": many });
    });
    refused(dir.path(), "max_input_chars_per_word is 1000000000", |t| {
        let vocab = t["model"]["vocab"].clone();
        t["model"] = json!({ "type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 1_000_000_000, "vocab": vocab });
    });
    let added = |content: String, normalized: bool| json!({ "id": 500, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": normalized, "special": false });
    refused(dir.path(), "an added token has 100000 bytes", |t| t["added_tokens"] = json!([added("x".repeat(100_000), false)]));
    refused(dir.path(), "its added tokens have", |t| {
        t["normalizer"] = replace(&"l".repeat(1000));
        t["added_tokens"] = json!([added("l".repeat(60_000), true)]);
    });
    // Each alternative that looks ahead is compiled apart, and each count repeats a class of letters.
    let split = |regex: String| json!({ "type": "Split", "behavior": "Isolated", "invert": false, "pattern": { "Regex": regex } });
    let alternatives = |count: usize, rest: &str| (0..count).map(|i| format!("(?={i}){rest}")).collect::<Vec<_>>().join("|");
    for (regex, said) in [
        (alternatives(3, r"(?i:\p{L}{0,90}\w{0,9})"), "repeat what they find"),
        (alternatives(65, r"\w"), "look around or back 65 times"),
        (r"\p{L}|".repeat(3000) + "a", "have 18001 bytes"),
    ] {
        refused(dir.path(), &format!("its regular expressions {said}"), |t| t["pre_tokenizer"] = split(regex));
    }
    refused(dir.path(), "has a token with the id 4294967295; ids below 4194304", |t| t["model"]["vocab"]["zz"] = u32::MAX.into());
    // Named itself, and not by its folder.
    File::create(dir.path().join("huge.json")).unwrap().set_len(300 << 20).unwrap();
    prepare(dir.path(), "huge.json").fails(&["huge.json", "at most 256 MiB are read"]);
}

/// At every letter the expression looks for something up to the end of the text: no library stops there by itself.
#[test]
fn a_tokenizer_whose_time_grows_with_the_square_of_a_text_is_stopped() {
    let dir = tempfile::tempdir().unwrap();
    prepared(dir.path(), |_| {}).ok();
    fs::write(dir.path().join("text.txt"), "a".repeat(600_000)).unwrap();
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(dir.path().join("own.json")).unwrap()).unwrap();
    let pattern = json!({ "Regex": r"[\s\S]*\x{10FFFF}|[\s\S]" });
    tokenizer["pre_tokenizer"] = json!({ "type": "Split", "behavior": "Isolated", "invert": false, "pattern": pattern });
    fs::write(dir.path().join("slow.json"), tokenizer.to_string()).unwrap();
    let ran = prepare(dir.path(), "slow.json");
    ran.fails(&["slow.json: encoding ", " bytes of text has not ended after 10 s"]);
}

/// One table for all of them, and not one more for each.
#[test]
fn many_tokens_that_only_the_config_lists_are_added_at_once() {
    let dir = tempfile::tempdir().unwrap();
    prepared(dir.path(), |_| {}).ok();
    let entry = |i: usize| json!({ "content": format!("<new-{i}>"), "lstrip": false, "rstrip": false, "single_word": false, "normalized": false, "special": i.is_multiple_of(2) });
    let all: serde_json::Map<String, Value> = (98..60_098).map(|i| (i.to_string(), entry(i))).collect();
    fs::write(dir.path().join("base/tokenizer_config.json"), json!({ "added_tokens_decoder": all }).to_string()).unwrap();
    prepare(dir.path(), "base").ok();
    // More names for one role than any model has.
    fs::write(dir.path().join("base/generation_config.json"), json!({ "eos_token_id": vec![96; 5000] }).to_string()).unwrap();
    prepare(dir.path(), "base").fails(&["generation_config.json", "names 5000 tokens"]);
}

/// A parquet file whose schema is a chain of so many groups, the last of which says that it has so many children.
fn parquet(path: &Path, groups: usize, children: u32) {
    let varint = |mut x: u64| {
        let mut bytes = vec![];
        while x >= 0x80 {
            bytes.push(x as u8 | 0x80);
            x >>= 7;
        }
        bytes.push(x as u8);
        bytes
    };
    // Of the compact protocol: a version, then the list of elements.
    let mut footer = [vec![0x15, 2, 0x19, 0xfc], varint(groups as u64 + 2)].concat();
    footer.extend([0x48, 1, b'r', 0x15, 2, 0]);
    for i in 0..groups {
        let count = if i + 1 == groups { 2 * u64::from(children) } else { 2 };
        footer.extend([0x35, 0, 0x18, 1, b'a', 0x15]);
        footer.extend(varint(count));
        footer.push(0);
    }
    footer.extend([0x15, 12, 0x25, 0, 0x18, 1, b'a', 0]);
    footer.extend([0x16, 0, 0x19, 0x0c, 0]);
    let length = (footer.len() as u32).to_le_bytes();
    fs::write(path, [b"PAR1", &footer[..], &length, b"PAR1"].concat()).unwrap();
}

#[test]
fn a_parquet_file_of_any_depth_or_count_is_refused_in_a_line() {
    let dir = tempfile::tempdir().unwrap();
    prepared(dir.path(), |_| {}).ok();
    let read = |name: &str| {
        let (data, base) = (text(&dir.path().join(name)), text(&dir.path().join("base")));
        fs::write(dir.path().join("base/tokenizer_config.json"), json!({ "chat_template": "{{ messages[0].content }}" }).to_string())
            .unwrap();
        kiln(&["data", "preview", "--data", &data, "--base", &base])
    };
    for (name, groups, children) in [("deep", 1_000_000, 1), ("wide", 1, i32::MAX as u32), ("some", 3, 2), ("none", 100, 1)] {
        let file = format!("{name}.parquet");
        parquet(&dir.path().join(&file), groups, children);
        let ran = read(&file);
        ran.fails(&[&file]);
        assert!(!ran.err.contains(".rs:") && ran.err.trim().lines().count() == 1, "{ran:#?}");
    }
}
