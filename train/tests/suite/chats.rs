//! `kiln data preview` of chats, through a model's own template and tokenizer.

use super::common::kiln;
use serde_json::json;
use std::fs;
use std::path::Path;

/// A tokenizer of single bytes and two special tokens, and a template in the manner of ChatML.
fn folder(path: &Path) {
    fs::create_dir(path).unwrap();
    let mut vocab: serde_json::Map<String, serde_json::Value> = ('!'..='~').enumerate().map(|(i, c)| (c.to_string(), i.into())).collect();
    vocab.insert("\u{120}".into(), 94.into()); // a space
    vocab.insert("\u{10a}".into(), 95.into()); // a line break
    let special = |id: u32, text: &str| json!({ "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true });
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [special(96, "<|start|>"), special(97, "<|stop|>")],
        "pre_tokenizer": level, "decoder": level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                   "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [] },
    });
    fs::write(path.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let template = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";
    fs::write(path.join("tokenizer_config.json"), json!({ "chat_template": template, "eos_token": "<|stop|>" }).to_string()).unwrap();
}

#[test]
fn chats_are_shown_with_what_is_learned() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    folder(&dir.path().join("base"));
    let messages = |system: bool| {
        let all = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye"), ("assistant", "So long.")];
        let turns: Vec<_> = all.iter().skip(!system as usize).map(|(role, content)| json!({ "role": role, "content": content })).collect();
        json!({ "messages": turns }).to_string()
    };
    fs::write(at("chats.jsonl"), [messages(true), messages(false)].join("\n")).unwrap();
    let preview = |data: &str, more: &[&str]| kiln([&["data", "preview", "--data", &at(data), "--base", &at("base")], more].concat());
    let said = preview("chats.jsonl", &[]).ok().out;
    let learned = "<|start|>assistant\n\u{27e6}Hello!<|stop|>\u{27e7}\n<|start|>user\nBye<|stop|>\n<|start|>assistant\n\u{27e6}So long.<|stop|>\u{27e7}\n";
    assert!(said.contains(learned) && said.contains("<|start|>system\nBe brief.<|stop|>"), "{said}");
    // Every character and every special token is a token.
    assert!(said.contains("2 chats, 2 examples,") && said.contains("of which 32 are learned"), "{said}");
    assert!(preview("chats.jsonl", &["--learn", "last", "--count", "1"]).ok().out.contains("of which 18 are learned"));
    // The layouts of others.
    let share = json!({ "conversations": [{ "from": "human", "value": "Hi" }, { "from": "gpt", "value": "Hello!" }] });
    let alpaca = json!({ "instruction": "Hi", "input": "", "output": "Hello!" });
    for (name, row) in [("share.json", json!([share]).to_string()), ("alpaca.jsonl", alpaca.to_string())] {
        fs::write(at(name), row).unwrap();
        let said = preview(name, &[]).ok().out;
        assert!(
            said.contains("<|start|>assistant\n\u{27e6}Hello!<|stop|>\u{27e7}") && said.contains("of which 7 are learned"),
            "{name}: {said}"
        );
    }
    // What is wrong is named, with its place.
    fs::write(at("bad.jsonl"), format!("{}\n{{\"messages\": 3}}\n", messages(true))).unwrap();
    preview("bad.jsonl", &[]).fails(&["bad.jsonl, line 2", "messages"]);
    fs::write(at("cut.jsonl"), "{\"messages\": [").unwrap();
    preview("cut.jsonl", &[]).fails(&["cut.jsonl, line 1"]);
    preview("nowhere.jsonl", &[]).fails(&["nowhere.jsonl"]);
    fs::write(dir.path().join("base/tokenizer_config.json"), "{}").unwrap();
    preview("chats.jsonl", &[]).fails(&["has no chat template"]);
    fs::remove_file(dir.path().join("base/tokenizer.json")).unwrap();
    preview("chats.jsonl", &[]).fails(&["tokenizer.json"]);
    kiln(["data", "preview"]).fails(&["--out"]);
}
