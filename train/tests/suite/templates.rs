//! Chat templates that are made to hurt: whatever they do, a command on them ends soon, in little memory, with a result or with a message that names the file
//! and the limit.

use super::chats::folder;
use super::common::{Ran, command, finish, kiln, start, text, wait_until};
use serde_json::json;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const TALK: &str = "{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"},{\"role\":\"assistant\",\"content\":\"Hello\"}]}\n";

/// `kiln data preview` with this template in a file of its own.
fn preview(dir: &Path, template: &str) -> Ran {
    let base = dir.join("base");
    if !base.exists() {
        folder(&base);
        fs::write(dir.join("talk.jsonl"), TALK.repeat(3)).unwrap();
    }
    fs::write(base.join("chat_template.jinja"), template).unwrap();
    let plain = command(["data", "preview", "--data", &text(&dir.join("talk.jsonl")), "--base", &text(&base)]);
    // With a bound against hangs alone.
    let mut timed = Command::new("timeout");
    timed.arg("120").arg(plain.get_program()).args(plain.get_args());
    for (name, value) in plain.get_envs().filter_map(|(name, value)| Some((name, value?))) {
        timed.env(name, value);
    }
    finish(timed)
}

/// It is refused with the file's name and one of these reasons, in a line.
#[track_caller]
fn refused(dir: &Path, template: &str, reasons: &[&str]) {
    let ran = preview(dir, template);
    ran.fails(&["chat_template.jinja: "]);
    assert!(reasons.iter().any(|reason| ran.err.contains(reason)), "{template:.200}: {ran:#?}");
    assert_eq!(ran.err.trim().lines().count(), 1, "{ran:#?}");
}

/// It is read or refused, and nothing else.
#[track_caller]
fn survived(dir: &Path, template: &str) {
    let ran = preview(dir, template);
    if ran.code != Some(0) {
        ran.fails(&["chat_template.jinja: "]);
        assert_eq!(ran.err.trim().lines().count(), 1, "{ran:#?}");
    }
}

const MEMORY: &str = "MiB of memory";
const STEPS: &str = "steps for a conversation";
const TIME: &str = "s of processor time";
const TEXT: &str = "KiB of text";
/// "capacity overflow"
const HUGE: &str = "it asks for something huge";

#[test]
fn a_template_that_never_ends_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    refused(dir.path(), loops, &[STEPS]);
    // In whatever place it is found.
    fs::remove_file(dir.path().join("base/chat_template.jinja")).unwrap();
    let config = dir.path().join("base/tokenizer_config.json");
    let all = |more: &[&str]| {
        let data = text(&dir.path().join("talk.jsonl"));
        kiln([&["data", "preview", "--data", &data, "--base", &text(&dir.path().join("base"))], more].concat())
    };
    fs::write(&config, json!({ "chat_template": loops, "eos_token": "<|stop|>" }).to_string()).unwrap();
    all(&[]).fails(&["tokenizer_config.json: ", STEPS]);
    let list = json!([{ "name": "default", "template": loops }]);
    fs::write(&config, json!({ "chat_template": list }).to_string()).unwrap();
    all(&[]).fails(&["tokenizer_config.json: ", STEPS]);
    fs::write(&config, "{}").unwrap();
    all(&["--set", &format!("data.template={loops}")]).fails(&["data.template: ", STEPS]);
    let own = dir.path().join("own.jinja");
    fs::write(&own, loops).unwrap();
    all(&["--set", &format!("data.template={}", text(&own))]).fails(&["own.jinja: ", STEPS]);
    // Few steps, each of which takes long.
    refused(dir.path(), "{% for i in range(9999) %}{{ 'x' * (90000000 + i) == 'y' }}{% endfor %}", &[TIME]);
}

#[test]
fn a_template_that_takes_all_memory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for doubles in ["~", "+"] {
        let template = format!(
            "{{% set n = namespace(s='xx') %}}{{% for i in range(60) %}}{{% set n.s = n.s {doubles} n.s %}}{{% endfor %}}{{{{ n.s|length }}}}"
        );
        refused(dir.path(), &template, &[MEMORY]);
    }
    for huge in [
        "messages|tojson(indent=10000000000)",
        "[1, [2]]|tojson(separators=('x' * 90000000, 'y'))|tojson|tojson|tojson",
        "('x' * 30000000).replace('', 'y' * 1000000)",
        "'a\\nb'|indent(10000000000)",
        "[1, 2]|batch(1000000000, 'x')|list",
        "[1, 2]|slice(1000000000)|list",
        "('x' * 90000000, 'y' * 90000000, 'z' * 90000000, 'a' * 90000000, 'b' * 90000000, 'c' * 90000000)|length",
    ] {
        refused(dir.path(), &format!("{{{{ {huge} }}}}"), &[MEMORY, HUGE, TIME, TEXT]);
    }
    for odd in [
        "'%99999999999d'|format(1)",
        "'{:>9999999999}'.format(1)",
        "'x'|center(1000000000)",
        "[[1] * 90000000] * 90000000",
        "'x'.zfill(10000000000)",
        "'x'.ljust(10000000000)",
    ] {
        survived(dir.path(), &format!("{{{{ ({odd})|length }}}}"));
    }
}

#[test]
fn a_template_that_writes_without_end_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    refused(dir.path(), "{% for i in range(9999) %}{{ 'x' * 1000 }}{% endfor %}", &[TEXT]);
    refused(dir.path(), &"x".repeat(200_000), &["its source has 195 KiB, and 128 KiB is the most"]);
    // Nor into the message.
    let ran = preview(dir.path(), "{{ raise_exception('x' * 50000000) }}");
    ran.fails(&["chat_template.jinja: it refuses the conversation: xxx", "bytes more"]);
    assert!(ran.err.len() < 100_000, "{} bytes", ran.err.len());
}

/// The parser, the compiler, and what drops, shows or writes a value take a piece of the stack for each level.
#[test]
fn a_template_or_a_value_of_any_depth_ends_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for (before, after) in
        [("-", ""), ("not ", ""), ("(", ")"), ("[", "]"), ("", " + 1"), ("", "|string"), ("", ".a"), ("", " if 1"), ("1 if 0 else ", "")]
    {
        survived(dir.path(), &format!("{{{{ {}1{} }}}}", before.repeat(16_000), after.repeat(16_000)));
    }
    survived(dir.path(), &format!("{}x{}", "{% if true %}".repeat(5000), "{% endif %}".repeat(5000)));
    survived(dir.path(), &format!("{{{{ {}1 }}}}", "-".repeat(130_000)));
    for show in ["|tojson", "", "|string|length", "|pprint|length", "|length", " == n.l"] {
        let template =
            format!("{{% set n = namespace(l=[]) %}}{{% for i in range(90000) %}}{{% set n.l = [n.l] %}}{{% endfor %}}{{{{ n.l{show} }}}}");
        survived(dir.path(), &template);
    }
    let deep = format!("{}n.l{}", "[".repeat(100), "]".repeat(100));
    let deeper =
        format!("{{% set n = namespace(l=[]) %}}{{% for i in range(3000) %}}{{% set n.l = {deep} %}}{{% endfor %}}{{{{ n.l|length }}}}");
    survived(dir.path(), &deeper);
    for recursive in ["m(a)", "m([a])", "m(a) ~ m(a)"] {
        survived(dir.path(), &format!("{{% macro m(a) %}}{{{{ {recursive} }}}}{{% endmacro %}}{{{{ m(1) }}}}"));
    }
    survived(dir.path(), "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}");
    survived(dir.path(), "{% import 'default' as d %}{% include 'default' %}{{ d }}");
}

/// Not as hostile ones: long conversations have their due.
#[test]
fn a_long_conversation_is_no_attack() {
    let dir = tempfile::tempdir().unwrap();
    let chatml = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";
    preview(dir.path(), chatml).ok();
    let turns: Vec<_> = (0..400)
        .flat_map(|i| [("user", i), ("assistant", i)])
        .map(|(role, i)| json!({ "role": role, "content": format!("{i} ").repeat(100) }))
        .collect();
    let data = dir.path().join("long.jsonl");
    fs::write(&data, json!({ "messages": turns }).to_string()).unwrap();
    let said = kiln(["data", "preview", "--data", &text(&data), "--base", &text(&dir.path().join("base"))]).ok().out;
    assert!(said.contains("1 chats, 1 examples"), "{said}");
}

/// Whoever asked may be killed, by a job's limit of time say: what works for them must not go on for hours.
#[test]
fn what_renders_ends_with_who_asked() {
    let dir = tempfile::tempdir().unwrap();
    preview(dir.path(), "{% for m in messages %}{{ m.content }}{% endfor %}").ok();
    // A long conversation has time for this, minutes of it.
    let work = "{{ 'x' * 90000000 == 'x' * 90000000 }}".repeat(8);
    let slow = format!("{{% for m in messages %}}{work}{{{{ m.content }}}}{{% endfor %}}");
    fs::write(dir.path().join("base/chat_template.jinja"), slow).unwrap();
    let turn = |(i, role): (usize, &str)| json!({ "role": role, "content": format!("{i}") });
    let turns: Vec<_> = ["user", "assistant"].into_iter().cycle().enumerate().take(4000).map(turn).collect();
    let data = dir.path().join("long.jsonl");
    fs::write(&data, json!({ "messages": turns }).to_string()).unwrap();
    let (data, base) = (text(&data), text(&dir.path().join("base")));
    let mut asks = start(["data", "preview", "--data", &data, "--base", &base].map(String::from).into());
    let tasks = format!("/proc/{}/task", asks.id());
    let children = || {
        let tasks = fs::read_dir(&tasks).into_iter().flatten().flatten();
        let all: String = tasks.map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default()).collect();
        all.split_whitespace().map(|id| id.parse::<u32>().unwrap()).collect::<Vec<_>>()
    };
    // State, and hundredths of a second of processor time.
    let stat = |id: u32| {
        let text = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        let fields: Vec<String> = text.rsplit(") ").next().unwrap_or_default().split(' ').map(String::from).collect();
        (fields[0].clone(), fields.get(11).and_then(|time| time.parse::<u64>().ok()).unwrap_or(0))
    };
    wait_until(&mut asks, || children().iter().any(|id| stat(*id).1 > 100));
    let works: Vec<u32> = children();
    asks.kill().unwrap();
    asks.wait().unwrap();
    let is_gone = |id: &u32| ["", "Z", "X"].contains(&stat(*id).0.as_str());
    // By their own processor time, of which a busy machine gives them little.
    let used: u64 = works.iter().map(|id| stat(*id).1).sum();
    while works.iter().map(|id| stat(*id).1).sum::<u64>() < used + 500 {
        if works.iter().all(is_gone) {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    for id in &works {
        let _ = Command::new("kill").args(["-9", &id.to_string()]).status();
    }
    panic!("{works:?} go on for nobody");
}
