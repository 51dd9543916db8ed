//! Chats through a model's own template and tokenizer: shown, learned, and talked to.

use super::common::kiln;
use serde_json::json;
use std::fs;
use std::path::Path;

/// A tokenizer of single bytes and two special tokens, and a template in the manner of ChatML.
pub fn folder(path: &Path) {
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
    // A token may end a reply or not; only without one is there no usual template.
    preview("chats.jsonl", &[]).fails(&["has no chat template"]);
    fs::remove_file(dir.path().join("base/tokenizer.json")).unwrap();
    preview("chats.jsonl", &[]).fails(&["tokenizer.json"]);
    kiln(["data", "preview"]).fails(&["--out"]);
}

/// A whole model's folder: a tokenizer of single bytes with special tokens, a template in the manner of ChatML, and small weights.
pub fn model(dir: &Path, template: &str) {
    folder(dir);
    fs::write(dir.join("tokenizer_config.json"), json!({ "chat_template": template, "eos_token": "<|stop|>" }).to_string()).unwrap();
    let run = dir.with_extension("run");
    let made = dir.with_extension("made");
    let shape = "dim=16 layers=1 heads=2 kv_heads=1 head_dim=8 hidden=24 vocab=256 seq=160 batch=1 eval_batches=1";
    let sets = shape.split(' ').flat_map(|s| ["--set", s]);
    kiln(["train", "decoder", "--steps", "1", "--threads", "1", "--out", run.to_str().unwrap()].into_iter().chain(sets)).ok();
    kiln(["export", run.to_str().unwrap(), "--out", made.to_str().unwrap()]).ok();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(made.join(name), dir.join(name)).unwrap();
    }
}

pub const CHATML: &str = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";

/// Twenty conversations of two turns each, some with a system message.
pub fn conversations() -> Vec<serde_json::Value> {
    let turn = |role: &str, text: String| json!({ "role": role, "content": text });
    let chat = |i: usize| {
        let all = [
            turn("system", "Be brief.".into()),
            turn("user", format!("What is {i}?")),
            turn("assistant", format!("A number, {i}.")),
            turn("user", "And then?".into()),
            turn("assistant", format!("{}.", i + 1)),
        ];
        json!({ "messages": all[usize::from(!i.is_multiple_of(3))..] })
    };
    (0..20).map(chat).collect()
}

pub fn lines(rows: &[serde_json::Value]) -> String {
    rows.iter().map(|row| row.to_string() + "\n").collect()
}

fn learn(base: &Path, data: &Path, out: &Path, more: &[&str]) -> crate::common::Ran {
    let base = format!("model.base={}", base.display());
    let own = ["train", "decoder", "--threads", "1", "--data", data.to_str().unwrap(), "--out", out.to_str().unwrap(), "--set", &base];
    let sets =
        ["seq=160", "batch=2", "eval_batches=1", "horizon=4", "val_share=0.2", "learning_rate=0.01"].iter().flat_map(|s| ["--set", s]);
    kiln(own.into_iter().chain(sets).chain(more.iter().copied()))
}

#[test]
fn conversations_are_trained_on_resumed_and_asked() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let text = |name: &str| at(name).to_str().unwrap().to_string();
    model(&at("base"), CHATML);
    fs::write(at("chats.jsonl"), lines(&conversations())).unwrap();
    let said = learn(&at("base"), &at("chats.jsonl"), &at("whole"), &["--steps", "4"]).ok().out;
    for part in ["16 examples to learn from", "4 to validate with", "template", "tokenizer_config.json", "turns in \"messages\""] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // Stopped and resumed: the same bits.
    learn(&at("base"), &at("chats.jsonl"), &at("parts"), &["--steps", "2"]).ok();
    crate::common::resume(&at("parts"), "--steps 4").ok();
    crate::common::same_bytes(&crate::common::checkpoint(&at("whole"), 4), &crate::common::checkpoint(&at("parts"), 4));
    // Packed or padded, gzip or a folder of files: the same loss of the same weights.
    let loss = |run: &str| {
        let eval = kiln(["eval", &text(run), "--json", "--threads", "1"]).ok();
        serde_json::from_str::<serde_json::Value>(&eval.out).unwrap()["loss"].as_f64().unwrap()
    };
    let frozen = ["--steps", "1", "--set", "learning_rate=1e-30", "--set", "weight_decay=0", "--set", "eval_batches=0"];
    let run = |name: &str, data: &str, more: &[&str]| learn(&at("base"), &at(data), &at(name), &[&frozen[..], more].concat()).ok();
    run("packed", "chats.jsonl", &[]);
    run("padded", "chats.jsonl", &["--set", "pack=false"]);
    let gzip = fs::File::create(at("chats.jsonl.gz")).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(gzip, flate2::Compression::fast());
    std::io::Write::write_all(&mut gzip, lines(&conversations()).as_bytes()).unwrap();
    gzip.finish().unwrap();
    run("gzip", "chats.jsonl.gz", &[]);
    fs::create_dir(at("folder")).unwrap();
    fs::write(at("folder/a.jsonl"), lines(&conversations()[..7])).unwrap();
    fs::write(at("folder/b.jsonl"), lines(&conversations()[7..])).unwrap();
    run("folder-run", "folder", &[]);
    let packed = loss("packed");
    for other in ["padded", "gzip", "folder-run"] {
        assert!((loss(other) - packed).abs() < 1e-5 && packed > 1.0, "{other}: {} {packed}", loss(other));
    }
    // What is learned changes the loss, and a run of other data is not gone on with.
    let mut losses = vec![packed];
    for learned in ["last", "all"] {
        run(learned, "chats.jsonl", &["--set", &format!("data.learn={learned}")]);
        losses.push(loss(learned));
    }
    assert!(losses[0] != losses[1] && losses[1] != losses[2] && losses[0] != losses[2], "{losses:?}");
    fs::write(at("chats.jsonl"), lines(&conversations()[1..])).unwrap();
    crate::common::resume(&at("parts"), "--steps 5").fails(&["is not that of checkpoint"]);
}

/// The preview's rows are those of training, token for token.
#[test]
fn other_layouts_become_the_same_rows() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    folder(&dir.path().join("base"));
    let pairs: Vec<(String, String)> = (0..20).map(|i| (format!("What is {i}?"), format!("A number, {i}."))).collect();
    let row = |layout: &str, (asked, replied): &(String, String)| match layout {
        "messages" => json!({ "messages": [{ "role": "user", "content": asked }, { "role": "assistant", "content": replied }] }),
        "sharegpt" => json!({ "conversations": [{ "from": "human", "value": asked }, { "from": "gpt", "value": replied }] }),
        "alpaca" => json!({ "instruction": asked, "input": "", "output": replied }),
        "pairs" => json!({ "prompt": asked, "reply": replied }),
        _ => json!({ "q": asked, "a": replied }),
    };
    let shown = |layout: &str| {
        let rows: Vec<_> = pairs.iter().map(|pair| row(layout, pair)).collect();
        fs::write(at(layout), lines(&rows)).unwrap();
        let named = ["--set", "data.prompt=q", "--set", "data.reply=a"];
        let own = ["data", "preview", "--data", &at(layout), "--base", &at("base"), "--seq", "128", "--set", "data.val_share=0.2"];
        let said = kiln([&own[..], if layout == "named" { &named } else { &[] }].concat()).ok().out;
        said.lines()
            .filter(|line| line.starts_with("row ") || line.contains('\u{27e6}'))
            .filter(|line| !line.contains(" chats, "))
            .map(String::from)
            .collect::<Vec<_>>()
    };
    let expected = shown("messages");
    // Sixteen examples of 42 or 44 places each, in rows of 128.
    assert!(expected.len() == 23 && expected.contains(&"row 1: 3 examples in 126 of 128 places".into()), "{expected:#?}");
    for layout in ["sharegpt", "alpaca", "pairs", "named"] {
        assert_eq!(shown(layout), expected, "{layout}");
    }
}

#[test]
fn a_base_without_a_template_needs_one() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    model(&at("base"), CHATML);
    fs::write(at("base/tokenizer_config.json"), "{}").unwrap();
    fs::write(at("chats.jsonl"), lines(&conversations())).unwrap();
    let train = |more: &[&str]| learn(&at("base"), &at("chats.jsonl"), &at("run"), &[&["--steps", "1"], more].concat());
    train(&[]).fails(&["has no chat template", "data.template"]);
    train(&["--set", "data.template=Q: {prompt}A: {reply}"]).fails(&["chats.jsonl, line 1", "one prompt and one reply", "Jinja"]);
    train(&["--set", "data.template={% for m in messages %}"]).fails(&["data.template", "not a template that can be read"]);
    train(&["--set", "data.template=none.jinja"]).fails(&["data.template = none.jinja"]);
    train(&["--set", "data.date=tomorrow"]).fails(&["data.date", "2024-07-26"]);
    train(&["--set", "data.learn=user"]).fails(&["data.learn", "assistant or all or last"]);
    assert!(!at("run").exists());
    let said = train(&["--set", &format!("data.template={}", CHATML.replace('\n', "{{ '\\n' }}"))]).ok().out;
    assert!(said.contains("template data.template"), "{said}");
    fs::remove_dir_all(at("run")).unwrap();
    fs::write(at("own.jinja"), CHATML).unwrap();
    let said = train(&["--set", &format!("data.template={}", at("own.jinja").display())]).ok().out;
    assert!(said.contains("own.jinja"), "{said}");
    // The date is the config's, so that a run can be resumed on another day.
    fs::remove_dir_all(at("run")).unwrap();
    fs::write(at("own.jinja"), format!("{{{{ strftime_now('%d %b %Y') }}}}{CHATML}")).unwrap();
    let said = train(&["--set", &format!("data.template={}", at("own.jinja").display()), "--set", "data.date=2026-01-02"]).ok().out;
    assert!(said.contains("it is told the date 2026-01-02 (data.date)"), "{said}");
}

/// What kiln says on these lines of a terminal that is a pipe.
fn converse(args: &[&str], lines: &str) -> crate::common::Ran {
    let mut c = crate::common::command(args);
    c.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = c.spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), lines.as_bytes()).unwrap();
    crate::common::Ran::new(args.join(" "), child.wait_with_output().unwrap())
}

#[test]
fn a_model_that_learned_to_chat_is_talked_to() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let text = |name: &str| at(name).to_str().unwrap().to_string();
    model(&at("base"), CHATML);
    // Learned by heart: what is said to "more" depends on what was said before it.
    let turns = |all: &[(&str, &str)]| {
        let turn = |(asked, replied): &(&str, &str)| {
            [json!({ "role": "user", "content": asked }), json!({ "role": "assistant", "content": replied })]
        };
        json!({ "messages": all.iter().flat_map(turn).collect::<Vec<_>>() })
    };
    let mut chats: Vec<_> =
        ["a", "b", "c", "d", "e", "f"].iter().map(|asked| turns(&[(asked, "Say yes, now."), ("more", "And no.")])).collect();
    chats.extend((0..4).map(|_| turns(&[("more", "Well.")])));
    fs::write(at("chats.jsonl"), lines(&chats)).unwrap();
    let sets = ["--set", "learning_rate=0.02", "--set", "val_share=0.3", "--set", "batch=4", "--set", "horizon=250"];
    learn(&at("base"), &at("chats.jsonl"), &at("run"), &[&sets[..], &["--steps", "250"]].concat()).ok();
    let how = ["--temperature", "0", "--threads", "1", "--max-tokens", "24"];
    let say = |of: &str, more: &[&str]| kiln([&["generate", &text(of)], &how[..], more].concat()).ok().out;
    assert_eq!(say("run", &["--prompt", "c"]), "Say yes, now.\n");
    // Strings that span tokens end it, and are no part of it.
    for (stop, left) in [("yes,", "Say \n"), (", n", "Say yes\n"), ("nowhere", "Say yes, now.\n"), ("S", "\n")] {
        assert_eq!(say("run", &["--prompt", "c", "--stop", stop]), left, "{stop}");
        assert_eq!(say("run", &["--prompt", "c", "--stop", "never", "--stop", stop]), left, "{stop}");
    }
    assert_eq!(say("run", &["--prompt", "c", "--replies", "2", "--stop", ", n"]), "1. Say yes\n2. Say yes\n");
    kiln(["generate", &text("run"), "--stop", ""]).fails(&["--stop ''"]);
    // A conversation, its history in every prompt.
    let talk = |more: &[&str], lines: &str| converse(&[&["generate", &text("run"), "--chat"], &how[..], more].concat(), lines);
    assert_eq!(talk(&[], "c\n\nmore\n/quit\nnever read\n").ok().out, "Say yes, now.\nAnd no.\n");
    assert_eq!(talk(&[], "more\n").ok().out, "Well.\n");
    assert_eq!(talk(&["--stop", " now"], "c").ok().out, "Say yes,\n");
    assert_eq!(talk(&[], "").ok().out, "");
    // Every turn has draws of its own: the first those of the next seed.
    let hot = |seed: &'static str| ["--temperature", "9", "--max-tokens", "12", "--threads", "1", "--seed", seed];
    let drawn = |seed: &'static str| kiln([&["generate", &text("run"), "--prompt", "c"], &hot(seed)[..]].concat()).ok().out;
    let talked = converse(&[&["generate", &text("run"), "--chat"], &hot("4")[..]].concat(), "c").ok().out;
    assert!(talked == drawn("5") && talked != drawn("4"), "{talked:?} {:?} {:?}", drawn("4"), drawn("5"));
    // It ends where the model's positions do.
    talk(&[], &"a long line that fills many positions\n".repeat(9)).fails(&["positions"]);
    kiln(["generate", &text("run"), "--chat", "--prompt", "x"]).fails(&["--chat"]);
    // As a folder it says the same; and so does an adapter that names its base.
    kiln(["export", &text("run"), "--out", &text("folder")]).ok();
    assert_eq!(say("folder", &["--prompt", "c"]), "Say yes, now.\n");
    let lora = [&sets[..], &["--set", "train=\"lora\"", "--set", "rank=2"]].concat();
    learn(&at("folder"), &at("chats.jsonl"), &at("lora"), &[&lora[..], &["--steps", "1"]].concat()).ok();
    kiln(["export", &text("lora"), "--out", &text("adapter")]).ok();
    let alone = say("adapter", &["--prompt", "c"]);
    assert_eq!(alone, say("lora", &["--prompt", "c"]));
    assert_eq!(alone, say("adapter", &["--prompt", "c", "--base", &text("folder")]));
    fs::rename(at("folder"), at("moved")).unwrap();
    kiln(["generate", &text("adapter"), "--prompt", "c"]).fails(&["holds an adapter on", "folder", "--base", "--adapter"]);
    assert_eq!(alone, say("adapter", &["--prompt", "c", "--base", &text("moved")]));
    kiln(["generate", &text("moved"), "--base", &text("moved")]).fails(&["--base is for an adapter"]);
    // Without a template there are no turns.
    fs::write(at("moved/tokenizer_config.json"), "{}").unwrap();
    converse(&["generate", &text("moved"), "--chat"], "c\n").fails(&["no chat template"]);
}

/// Llama-3's manner: the post-processor puts a token before every text, and the files name the one that ends it.
#[test]
fn documents_begin_and_end_as_the_files_say() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    folder(&dir.path().join("base"));
    let path = dir.path().join("base/tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    tokenizer["post_processor"] = json!({ "type": "TemplateProcessing", "pair": [],
        "single": [{ "SpecialToken": { "id": "<|start|>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "special_tokens": { "<|start|>": { "id": "<|start|>", "ids": [96], "tokens": ["<|start|>"] } } });
    fs::write(&path, tokenizer.to_string()).unwrap();
    let documents: Vec<_> = (0..40).map(|i| json!({ "text": format!("document {i}") })).collect();
    fs::write(at("a.jsonl"), lines(&documents)).unwrap();
    let prepare = |tokenizer: &str, out: &str, more: &[&str]| {
        kiln([&["data", "prepare", &at("a.jsonl"), "--tokenizer", &at(tokenizer), "--out", &at(out)], more].concat())
    };
    let config = json!({ "eos_token": "<|stop|>", "pad_token": "<|stop|>", "bos_token": "<|start|>" });
    fs::write(at("base/tokenizer_config.json"), config.to_string()).unwrap();
    // By the folder or by its tokenizer.json.
    let said = prepare("base", "one", &[]).ok().out;
    assert!(said.contains("end of document: <|stop|> (97), tokenizer_config.json"), "{said}");
    assert!(said.contains("before a document: <|start|> (96), tokenizer_config.json"), "{said}");
    assert!(said.contains("padding: <|stop|> (97), tokenizer_config.json"), "{said}");
    prepare("base/tokenizer.json", "two", &[]).ok();
    assert!(fs::read(at("one/train-00000.tokens")).unwrap() == fs::read(at("two/train-00000.tokens")).unwrap());
    let inspected = kiln(["data", "inspect", &at("one")]).ok().out;
    assert!(inspected.contains("padding: <|stop|> (97)"), "{inspected}");
    assert!(
        inspected.contains("before a document: <|start|> (96)")
            && inspected.contains("begins: \"<|start|>document 0<|stop|><|start|>document 1"),
        "{inspected}"
    );
    // Or as one says.
    let said = prepare("base", "three", &["--bos", "none", "--eos", "<|start|>"]).ok().out;
    assert!(said.contains("before a document: nothing (--bos)") && said.contains("end of document: <|start|> (96), --eos"), "{said}");
    let inspected = kiln(["data", "inspect", &at("three")]).ok().out;
    assert!(inspected.contains("begins: \"document 0<|start|>document 1") && !inspected.contains("before a document: <"), "{inspected}");
    prepare("base", "four", &["--bos", "nothing"]).fails(&["--bos = nothing", "no such token"]);
    // A file that is broken is no matter where the token is named.
    fs::write(at("base/generation_config.json"), "[").unwrap();
    prepare("base", "four", &[]).fails(&["generation_config.json", "--eos"]);
    prepare("base", "four", &["--eos", "97"]).ok();
}
