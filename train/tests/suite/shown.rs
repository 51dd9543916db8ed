//! What files say is shown, and steers no terminal: control characters and signs that turn the direction of writing come out as escapes, wherever they were.

use crate::chats::{CHATML, conversations, lines, model};
use crate::common::*;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tempfile::tempdir;

/// Sets the title of a terminal, clears it (as C1 has it), and turns the line around.
const STEERS: &str = "a\u{1b}]0;x\u{7}\u{9b}2J\u{202e}\u{7f}b";

/// What `STEERS` begins with is there to be seen, and steers nothing.
#[track_caller]
fn seen(ran: &Ran) {
    nothing(&ran.out);
    nothing(&ran.err);
    assert!((ran.out.contains("]0;x") || ran.err.contains("]0;x")) && !ran.panicked(), "{ran:#?}");
}

#[track_caller]
fn nothing(said: &str) {
    let steers = |c: char| c.is_control() && c != '\n' && c != '\t' || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    assert!(!said.contains(steers), "{said:?}");
}

fn change(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

#[test]
fn runs_say_control_characters_as_escapes() {
    let dir = tempdir().unwrap();
    let runs = dir.path().join("runs");
    let at = runs.join(format!("{STEERS}\n"));
    fs::create_dir_all(&at).unwrap();
    let toml = |text: &str| text.chars().map(|c| format!("\\u{:04X}", c as u32)).collect::<String>();
    fs::write(at.join("config.toml"), format!("recipe = \"{0}\"\npreset = \"{0}\"\n\"{0}\" = 1\n[train]\nsteps = 3\n", toml(STEERS)))
        .unwrap();
    fs::write(at.join("metrics.jsonl"), format!("{{\"step\":1,{}:1}}\n", json!(STEERS))).unwrap();
    fs::write(at.join("run.json"), json!({ "status": "failed", "error": STEERS, "work": STEERS, "device": STEERS }).to_string()).unwrap();
    let listed = kiln(["runs", &text(&runs)]).ok();
    seen(&listed);
    // A name stays in its line: the table has two, and one says why.
    assert_eq!(listed.out.lines().count(), 3, "{listed:?}");
    let json = kiln(["runs", &text(&runs), "--json"]).ok();
    seen(&json);
    let json: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!((&json[0]["name"], &json[0]["problem"]), (&format!("{STEERS}\n").into(), &STEERS.into()), "JSON says what is there");
    fs::write(at.join("config.toml"), format!("a = {STEERS}")).unwrap();
    seen(&kiln(["runs", &text(&runs)]).ok());
    let page = dir.path().join("all.html");
    seen(&kiln(["report", &text(&runs), "--out", &text(&dir.path().join(STEERS).join("x.html"))]));
    kiln(["report", &text(&at), "--out", &text(&page)]).ok();
    nothing(&fs::read_to_string(page).unwrap().split("<title>").nth(1).unwrap().split("</title>").next().unwrap().replace('\n', " "));
}

#[test]
fn configs_and_command_lines_say_control_characters_as_escapes() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let toml = "a\\u001b]0;x\\u0007\\u009b2J\\u202eb";
    for (name, content) in [
        ("key.toml", format!("[train]\n\"{toml}\" = 3\n")),
        ("section.toml", format!("[\"{toml}\"]\nsteps = 3\n")),
        ("value.toml", format!("[train]\nsteps = \"{toml}\"\n")),
        ("recipe.toml", format!("recipe = \"{toml}\"\n")),
        ("broken.toml", format!("a = {STEERS}\n")),
        ("pass.toml", format!("[passes]\n\"{toml}\" = \"auto\"\n")),
    ] {
        fs::write(at(name), content).unwrap();
        let ran = kiln(["plan", "--config", &text(&at(name))]);
        ran.fails(&[]);
        seen(&ran);
    }
    // Names of files come to a command line by a shell's `*`.
    for args in [
        vec!["plan", "hydra", "--set", STEERS],
        vec!["plan", STEERS],
        vec!["runs", STEERS],
        vec!["runs", "a", STEERS],
        vec![STEERS],
        vec!["plan", "--steps", STEERS],
        vec!["watch", STEERS],
        vec!["check", "golden", STEERS],
        vec!["generate", STEERS],
        vec!["data", "inspect", STEERS],
        vec!["data", "prepare", STEERS, "--out", "x"],
    ] {
        let ran = kiln(&args);
        ran.fails(&[]);
        seen(&ran);
    }
    // clap has colors of its own, and help none of ours.
    assert!(kiln(["plan", "--help"]).ok().out.contains("Usage"));
}

#[test]
fn models_and_data_say_control_characters_as_escapes() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    model(&at("base"), CHATML);
    let other = |name: &str| {
        copy(&at("base"), &at(name));
        at(name)
    };
    // What a template raises, and what it writes.
    fs::write(at("chats.jsonl"), lines(&conversations())).unwrap();
    let template = |name: &str, template: &str| {
        let base = other(name);
        fs::write(base.join("tokenizer_config.json"), json!({ "chat_template": template, "eos_token": "<|stop|>" }).to_string()).unwrap();
        base
    };
    let raises = template("raises", "{{ raise_exception(\"a\\x1b]0;x\\x07\\x7fb\") }}");
    let raises = if kiln(["generate", &text(&raises), "--prompt", "x"]).err.contains("]0;x") {
        raises
    } else {
        // Where the template's language has no such escapes, the character itself.
        template("raises-2", &format!("{{{{ raise_exception(\"{STEERS}\") }}}}"))
    };
    for args in [vec!["generate", "--prompt", "x"], vec!["data", "preview", "--data", &text(&at("chats.jsonl")), "--base"]] {
        let base = text(&raises);
        let mut args: Vec<&str> = args;
        args.insert(if args[0] == "generate" { 1 } else { args.len() }, &base);
        let ran = kiln(&args);
        ran.fails(&[]);
        seen(&ran);
    }
    let writes = text(&template("writes", &format!("{STEERS}{CHATML}")));
    seen(&kiln(["data", "preview", "--data", &text(&at("chats.jsonl")), "--base", &writes]));

    // config.json, names of tensors and of special tokens.
    for (name, key, value) in [
        ("type", "model_type", json!(STEERS)),
        ("architecture", "architectures", json!([STEERS])),
        ("act", "hidden_act", json!(STEERS)),
        ("dtype", "dtype", json!(STEERS)),
    ] {
        let base = other(name);
        change(&base.join("config.json"), |config| {
            if key == "model_type" {
                config.as_object_mut().unwrap().remove("architectures");
            }
            config[key] = value;
        });
        let ran = kiln(["check", "model", &text(&base)]);
        nothing(&format!("{}{}", ran.out, ran.err));
        if ["type", "architecture"].contains(&name) {
            ran.fails(&[]);
            seen(&ran);
        }
    }
    let tensors = other("tensors");
    let bytes = fs::read(tensors.join("model.safetensors")).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut views: Vec<(String, TensorView)> = read.tensors();
    views.push((STEERS.into(), TensorView::new(Dtype::F32, vec![1], &[0; 4]).unwrap()));
    fs::write(tensors.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    seen(&kiln(["check", "model", &text(&tensors)]));
    let special = other("special");
    change(&special.join("tokenizer.json"), |t| t["added_tokens"][1]["content"] = STEERS.into());
    change(&special.join("tokenizer_config.json"), |t| t["eos_token"] = STEERS.into());
    seen(&kiln(["check", "model", &text(&special)]));

    // Files of data, by name and by what is in them.
    let data = at(&format!("{STEERS}.txt"));
    fs::write(&data, format!("{STEERS}\n").repeat(400)).unwrap();
    let prepared = kiln(["data", "prepare", &text(&data), "--val-share", "0.2", "--out", &text(&at(STEERS))]).ok();
    seen(&prepared);
    seen(&kiln(["data", "inspect", &text(&at(STEERS))]).ok());
    change(&at(STEERS).join("dataset.json"), |d| d["tokenizer"] = STEERS.into());
    nothing(&kiln(["data", "inspect", &text(&at(STEERS))]).err);
    fs::write(at("bad.jsonl"), format!("{{\"{STEERS}\": 1}}\n")).unwrap();
    nothing(&kiln(["data", "inspect", &text(&at("bad.jsonl"))]).err);
    fs::write(at("row.jsonl"), json!({ STEERS: 1 }).to_string() + "\n").unwrap();
    seen(&kiln(["data", "inspect", &text(&at("row.jsonl"))]));
}

/// To a file or a program a model's text goes as it is; JSON says the same.
#[test]
fn what_a_model_writes_goes_to_a_file_as_it_is() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 1").ok();
    let args = ["generate", &text(&run), "--prompt", "\\u{1b}]0;x\\u{7}", "--temperature", "9", "--max-tokens", "64", "--threads", "1"];
    let plain = command(args).output().unwrap();
    assert!(plain.status.success() && plain.stdout.starts_with(b"\x1b]0;x\x07"), "{plain:?}");
    let json = kiln(args.iter().copied().chain(["--json"])).ok();
    nothing(&json.out);
    let row: Value = serde_json::from_str(&json.out).unwrap();
    let written = format!("{}{}\n", row["prompt"].as_str().unwrap(), row["text"].as_str().unwrap());
    assert_eq!(written, String::from_utf8(plain.stdout).unwrap());
    assert!(
        written.trim_end().chars().skip(6).any(|c| c.is_control()),
        "a model of bytes that draws any of them writes some that steer: {written:?}"
    );
}
