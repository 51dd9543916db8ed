//! Prompts with replies, from files to runs: what is read, refused, packed, resumed; and the base that a run makes for itself.

use crate::common::{Ran, all_declared, checkpoint, finish, kiln, losses, names, resume, same_bytes, signal, text, wait_until};
use kiln::data::chats::Learn;
use kiln::data::replies::{Files, Read, Template, TooLong};
use kiln::data::{Source, Split, Tokenizer};
use kiln::models::decoder::RepliesConfig;
use std::fs;
use std::path::{Path, PathBuf};

/// A run whose step takes a few milliseconds.
const SMALL: &[&str] = &["dim=24", "layers=2", "head_dim=8", "hidden=40", "batch=2", "rank=2", "objective.weight=0"];

fn train(out: &Path, sets: &[&str], more: &[&str]) -> Ran {
    let out = text(out);
    let sets = SMALL.iter().chain(sets).flat_map(|s| ["--set", s]);
    kiln(["train", "polychromic", "--threads", "1", "--out", &out].into_iter().chain(sets).chain(more.iter().copied()))
}

/// Forty prompts with three replies each, of very different lengths.
fn write_jsonl(path: &Path) {
    let line = |i: usize| {
        let reply = ["yes ".repeat(1 + i % 7), format!("no {i}"), "perhaps, who knows".into()][i % 3].clone();
        serde_json::json!({ "q": format!("is {} so?", i / 3), "a": reply, "other": i }).to_string()
    };
    fs::write(path, (0..120).map(line).collect::<Vec<_>>().join("\n") + "\n\n").unwrap();
}

#[test]
fn packed_and_padded_rows_have_the_same_loss_and_runs_resume() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("d.jsonl");
    write_jsonl(&data);
    let sets = |pack: &str| {
        let own = ["pretrain=0", "seq=64", "data.prompt=q", "data.reply=a", "val_share=0.2", "eval_batches=0", "dropout=0.1", "horizon=6"];
        own.map(String::from).into_iter().chain([format!("pack={pack}"), format!("data.path={}", data.display())]).collect::<Vec<_>>()
    };
    let run = |name: &str, pack: &str, more: &[&str]| {
        let sets = sets(pack);
        train(&dir.path().join(name), &sets.iter().map(String::as_str).collect::<Vec<_>>(), more)
    };
    let whole = dir.path().join("whole");
    let said = run("whole", "true", &["--steps", "6", "--set", "save_every=3"]).ok().out;
    assert!(said.contains("96 examples to learn from") && said.contains("24 to validate with; 0 cut, 0 skipped; template kiln"), "{said}");
    run("parts", "true", &["--steps", "3"]).ok();
    resume(&dir.path().join("parts"), "--steps 6").ok();
    same_bytes(&checkpoint(&whole, 6), &checkpoint(&dir.path().join("parts"), 6));

    // The same weights on the same examples, each in a row of its own.
    let padded = dir.path().join("padded");
    run("padded", "false", &["--steps", "1", "--set", "learning_rate=1e-30", "--init-from", &text(&whole)]).ok();
    let loss = |run: &Path| {
        let eval = kiln(["eval", &text(run), "--json", "--threads", "1"]).ok();
        serde_json::from_str::<serde_json::Value>(&eval.out).unwrap()["loss"].as_f64().unwrap()
    };
    let (a, b) = (loss(&whole), loss(&padded));
    assert!((a - b).abs() < 1e-5 && a > 1.0, "{a} {b}");
    assert!(losses(&whole).iter().all(|l| l.1.is_some()));

    // No prompt is asked twice, however many are asked for.
    let replies = text(&dir.path().join("replies.jsonl"));
    let eval = kiln(["eval", &text(&whole), "--json", "--threads", "1", "--prompts", "500", "--write-replies", &replies]).ok();
    all_declared(&serde_json::from_str(&eval.out).unwrap());
    let sets: Vec<serde_json::Value> = fs::read_to_string(&replies).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let mut asked: Vec<&str> = sets.iter().map(|s| s["prompt"].as_str().unwrap()).collect();
    asked.sort();
    asked.dedup();
    assert!(asked.len() == sets.len() && (1..500).contains(&sets.len()), "{} of {}", asked.len(), sets.len());
    let found: serde_json::Value = serde_json::from_str(&eval.out).unwrap();
    assert_eq!(found["counted"]["evaluated"], sets.len(), "{found}");

    // A mark of UTF-8 before the first line is no part of it.
    fs::write(&data, ["\u{feff}", &fs::read_to_string(&data).unwrap()].concat()).unwrap();
    assert_eq!(loss(&whole), a);

    // Other data is not gone on with.
    let mut lines = fs::read_to_string(&data).unwrap();
    lines.push_str("{\"q\": \"new?\", \"a\": \"new\"}\n");
    fs::write(&data, lines).unwrap();
    resume(&whole, "--steps 7").fails(&["is not that of checkpoint"]);
}

#[test]
fn what_is_wrong_with_a_file_is_said_by_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("d.jsonl");
    let good = "{\"prompt\": \"a\", \"reply\": \"b\"}\n{\"prompt\": \"c\", \"reply\": \"d\"}\n";
    let long = format!("{{\"prompt\": \"{}\", \"reply\": \"b\"}}", "xyz".repeat(40));
    let set = ["seq=32", "too_long=refuse", "too_long=skip", "prompt=question", "vocab=262", "template={prompt}"];
    for (line, sets, parts) in [
        ("{", &set[..1], &["d.jsonl, line 3", "not a JSON object"][..]),
        ("[1]", &set[..1], &["line 3", "not a JSON object"]),
        ("{\"prompt\": \"a\"}", &set[..1], &["line 3", "no field \"reply\", only [\"prompt\"]"]),
        ("{\"prompt\": 3, \"reply\": \"b\"}", &set[..1], &["line 3", "\"prompt\" is not a string but 3"]),
        ("{\"prompt\": \"a\", \"reply\": null}", &set[..1], &["line 3", "\"reply\" is not a string but null"]),
        ("{\"prompt\": \"a\", \"reply\": \" \\n\"}", &set[..1], &["line 3", "\"reply\" is empty"]),
        (&long, &set[..1], &["line 3", "its prompt has 123 tokens, and model.seq = 32 leaves none"]),
        (&long, &set[..2], &["line 3", "it has 126 tokens, and model.seq = 32", "too_long=cut"]),
        ("\u{fffd}", &[set[0], set[3]], &["line 1", "no field \"question\""]),
        ("", &[set[0], set[4]], &["line 1", "is outside the model's vocabulary of 262"]),
        ("", &["seq=2", set[2]], &["of 2 lines, 2 of them skipped as too long, none is left to learn from"]),
        ("", &[set[0], set[5]], &["data.template", "{reply} once"]),
    ] {
        fs::write(&data, format!("{good}{line}")).unwrap();
        let all: Vec<String> = ["pretrain=0", "val_share=0.5"]
            .iter()
            .chain(sets)
            .map(|s| s.to_string())
            .chain([format!("data.path={}", data.display())])
            .collect();
        train(&dir.path().join("out"), &all.iter().map(String::as_str).collect::<Vec<_>>(), &["--steps", "1"]).fails(parts);
        assert!(!dir.path().join("out").exists(), "nothing was written");
    }
    let path = format!("data.path={}", dir.path().join("none.jsonl").display());
    train(&dir.path().join("out"), &["pretrain=0", &path], &[]).fails(&["none.jsonl"]);
    let path = format!("data.path={}", dir.path().join("empty").display());
    fs::create_dir(dir.path().join("empty")).unwrap();
    train(&dir.path().join("out"), &["pretrain=0", &path], &[]).fails(&["holds no .jsonl file"]);
}

fn read(path: &Path, too_long: TooLong, val_share: f64) -> Files {
    let template = Template::new("{prompt}|{reply}{eos}", &Tokenizer::Byte).unwrap();
    let how = Read { prompt: "q", reply: "a", seq: 24, vocab: 256, too_long, val_share };
    Files::read(&[path.to_owned()], &how, &template, &Tokenizer::Byte).unwrap()
}

#[test]
fn all_replies_to_a_prompt_are_on_one_side() {
    let dir = tempfile::tempdir().unwrap();
    write_jsonl(&dir.path().join("a.jsonl"));
    let files = read(dir.path(), TooLong::Skip, 0.25);
    assert_eq!((files.prompts(Split::Train), files.prompts(Split::Val)), (30, 10));
    let prompts = |split, seed| (0..files.prompts(split) as u64).map(|i| files.prompt(split, seed, i).to_string()).collect::<Vec<_>>();
    assert!(prompts(Split::Train, 1).iter().all(|p| !prompts(Split::Val, 1).contains(p)));
    assert_ne!(prompts(Split::Train, 1), prompts(Split::Train, 2));
    assert_eq!(prompts(Split::Val, 1), prompts(Split::Val, 2));
    let mut once = prompts(Split::Train, 1);
    once.sort();
    once.dedup();
    assert_eq!(once.len(), 30);

    // What is in a row is what was in the file.
    let rows = files.rows(Split::Val, 24, false, 0, vec![]).unwrap();
    let first = rows.item(0).unwrap();
    let ids: Vec<u32> = first.ids.iter().map(|&t| t as u32).collect();
    let said = Tokenizer::Byte.decode(&ids);
    let prompt = prompts(Split::Val, 1)[0].clone();
    assert!(said.starts_with(&format!("{prompt}|no 4\0")), "the first reply is too long: {said}");
    let learned: String = first.targets.iter().filter(|t| **t > 0).map(|&t| t as u8 as char).collect();
    assert_eq!(learned, "no 4");
    assert_eq!(files.counts.cut, 0);
    assert_eq!(files.count(Split::Train) + files.count(Split::Val) + files.counts.skipped, 120);

    let cut = read(dir.path(), TooLong::Cut, 0.25);
    assert_eq!((cut.counts.cut, cut.counts.skipped), (files.counts.skipped, 0));
    assert!(cut.counts.cut > 10);
    assert_ne!(cut.fingerprint(), files.fingerprint());
    assert_ne!(read(dir.path(), TooLong::Cut, 0.2).fingerprint(), cut.fingerprint());

    // Rows to validate with are the same whatever the seed, so that runs of several seeds can be compared; those to learn from are not.
    let all = |split, seed| {
        let rows = cut.rows(split, 64, true, seed, vec![]).unwrap();
        (0..rows.len()).map(|i| rows.item(i).unwrap()).collect::<Vec<_>>()
    };
    assert!(all(Split::Val, 1) == all(Split::Val, 2) && all(Split::Val, 1).len() > 2);
    assert!(all(Split::Train, 1) != all(Split::Train, 2));

    // A file to validate with stands for a share.
    for name in ["val.jsonl", "validation-0.jsonl"] {
        fs::write(dir.path().join(name), "{\"q\": \"x\", \"a\": \"y\"}").unwrap();
        let files = read(dir.path(), TooLong::Cut, 0.25);
        assert_eq!((files.count(Split::Train), files.count(Split::Val)), (120, 1), "{name}");
        fs::remove_file(dir.path().join(name)).unwrap();
    }
    // Where there is no other, a share of it validates.
    fs::rename(dir.path().join("a.jsonl"), dir.path().join("val.jsonl")).unwrap();
    let alone = read(dir.path(), TooLong::Skip, 0.25);
    assert_eq!((alone.prompts(Split::Train), alone.prompts(Split::Val)), (30, 10));
}

/// What is asked is all that stands before the reply.
#[test]
fn the_same_question_behind_another_system_message_is_another_prompt() {
    let dir = tempfile::tempdir().unwrap();
    let chats = dir.path().join("chats.jsonl");
    let chat = |system: &str| {
        let turn = |(role, content): (&str, &str)| serde_json::json!({ "role": role, "content": content });
        let turns = [("system", system), ("user", "Who are you?"), ("assistant", "I.")].map(turn);
        serde_json::json!({ "messages": turns }).to_string() + "\n"
    };
    fs::write(&chats, ["Be brief.", "Be kind.", "Be brief."].map(chat).concat()).unwrap();
    let config = RepliesConfig {
        path: chats.to_str().unwrap().into(),
        template: "{% for m in messages %}{{ m.content }}{% endfor %}".into(),
        val_share: 0.0,
        ..RepliesConfig::default()
    };
    let files = config.chats(&config.path.find().unwrap(), &Tokenizer::Byte, None, (256, 64)).unwrap().0;
    assert_eq!((files[0].count(Split::Train), files[0].prompts(Split::Train)), (3, 2));
}

/// The same tokens, of which others are learned.
#[test]
fn data_is_known_by_what_is_learned_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let fingerprint = |text: &str, learn: Learn| {
        let chats = dir.path().join("chats.jsonl");
        fs::write(&chats, text).unwrap();
        let config = RepliesConfig {
            path: chats.to_str().unwrap().into(),
            template: "{% for m in messages %}{{ m.content }}{% endfor %}".into(),
            learn,
            val_share: 0.0,
            ..RepliesConfig::default()
        };
        config.chats(&config.path.find().unwrap(), &Tokenizer::Byte, None, (256, 64)).unwrap().0[0].fingerprint()
    };
    let turns = |said: &[&str]| {
        let role = |i: usize| ["user", "assistant"][i % 2];
        let turn = |(i, text): (usize, &&str)| serde_json::json!({ "role": role(i), "content": text });
        serde_json::json!({ "messages": said.iter().enumerate().map(turn).collect::<Vec<_>>() }).to_string()
    };
    let usual = fingerprint(&turns(&["ab", "cd", "ef", "gh"]), Learn::Assistant);
    assert_eq!(usual, fingerprint(&turns(&["ab", "cd", "ef", "gh"]), Learn::Assistant));
    for other in [["a", "bcd", "ef", "gh"], ["ab", "cd", "e", "fgh"], ["ab", "c", "def", "gh"]] {
        assert_ne!(usual, fingerprint(&turns(&other), Learn::Assistant), "{other:?}");
    }
    let pair = |said: [&str; 2]| fingerprint(&turns(&said), Learn::Assistant);
    assert_ne!(pair(["abc", "de"]), pair(["ab", "cde"]));
    assert_ne!(usual, fingerprint(&turns(&["ab", "cd", "ef", "gh"]), Learn::Last));
}

/// With a cache of its own.
fn cached(dir: &Path, args: &[&str]) -> Ran {
    let mut c = crate::common::command(args);
    c.env("XDG_CACHE_HOME", dir.join("cache"));
    finish(c)
}

fn bases(dir: &Path) -> Vec<PathBuf> {
    let dir = dir.join("cache/kiln/bases");
    names(&dir).into_iter().filter(|n| !n.starts_with('.')).map(|n| dir.join(n)).collect()
}

#[test]
fn a_run_without_a_base_trains_one_and_keeps_it() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    let sets: Vec<&str> = SMALL.iter().chain(&["seq=32", "pretrain=5", "eval_batches=1"]).flat_map(|s| ["--set", s]).collect();
    let run = |out: &str, more: &[&str]| {
        cached(dir.path(), &[&["train", "polychromic", "--threads", "1", "--steps", "2", "--out", &at(out)], &sets[..], more].concat())
    };
    let said = run("first", &[]).ok().out;
    assert!(said.contains("training one on generated questions first, 5 steps") && said.contains("base: step 5/5"), "{said}");
    assert!(said.contains("entropy of the data"), "{said}");
    let [base] = &bases(dir.path())[..] else { panic!("{:?}", bases(dir.path())) };
    assert_eq!(names(base), ["checksums.json", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]);
    let said = cached(dir.path(), &["check", "model", &text(base), "--prompt", "<|prompt|>add 3 and 4<|reply|>"]).ok().out;
    assert!(said.contains("after 6 tokens"), "{said}");

    // Other runs take it; another shape has another.
    let said = run("second", &["--seed", "3"]).ok().out;
    assert!(said.contains("trained here before") && !said.contains("base: step"), "{said}");
    run("wide", &["--set", "hidden=48"]).ok();
    assert_eq!(bases(dir.path()).len(), 2);
    // Adapters know which base they are for, and do not name the cache of whoever made them.
    cached(dir.path(), &["export", &at("first"), "--out", &at("adapters")]).ok();
    let config = fs::read_to_string(dir.path().join("adapters/adapter_config.json")).unwrap();
    let hash = names(base.parent().unwrap()).into_iter().find(|n| base.ends_with(n)).unwrap();
    assert!(config.contains(&hash) && !config.contains(&text(dir.path())), "{config}");

    // Without it there is nothing to go on with, and no random weights instead.
    fs::rename(base, dir.path().join("moved")).unwrap();
    cached(dir.path(), &["eval", &at("first"), "--threads", "1"]).fails(&["is not at hand", "not trained yet"]);
    cached(dir.path(), &["export", &at("first"), "--out", &at("more")]).fails(&["not in the cache any more"]);
    cached(dir.path(), &[&["plan", "polychromic"], &sets[..]].concat()).ok();
    // It is made again as it was, and the run goes on.
    cached(dir.path(), &["train", "--threads", "1", "--out", &at("first"), "--resume", "--steps", "3"]).ok();
    assert!(fs::read(base.join("model.safetensors")).unwrap() == fs::read(dir.path().join("moved/model.safetensors")).unwrap());
}

#[test]
fn a_base_that_is_interrupted_is_never_taken() {
    let dir = tempfile::tempdir().unwrap();
    let out = text(&dir.path().join("out"));
    let sets: Vec<&str> = SMALL.iter().chain(&["seq=32", "pretrain=1000000"]).flat_map(|s| ["--set", s]).collect();
    for name in ["INT", "KILL"] {
        let mut c = crate::common::command([&["train", "polychromic", "--threads", "1", "--out", &out][..], &sets].concat());
        c.env("XDG_CACHE_HOME", dir.path().join("cache")).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let mut child = c.spawn().unwrap();
        let made = dir.path().join("cache/kiln/bases");
        wait_until(&mut child, || !names(&made).is_empty());
        std::thread::sleep(std::time::Duration::from_millis(300));
        signal(&child, name);
        let ended = crate::common::end(child);
        match name {
            "INT" => {
                assert_eq!(ended.code, Some(130), "{ended:#?}");
                assert!(ended.err.contains("stopped while the base was trained") && ended.err.contains("nothing is kept"), "{ended:#?}");
            }
            _ => assert_eq!(ended.code, None),
        }
        assert!(bases(dir.path()).is_empty(), "{name}: {:?}", names(&made));
        assert!(!Path::new(&out).exists());
    }
}
