//! `kiln watch`, `kiln runs` and `kiln report` on folders that somebody else filled: links, pipes, files too long or damaged, and people who ask slowly.

use crate::common::*;
use crate::pages::{Served, embedded, json};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tempfile::tempdir;

/// What must never be seen.
const KEY: &str = "THE-KEY-OF-SOMEBODY";

const CONFIG: &str = "recipe = \"hydra\"\npreset = \"tiny\"\n[train]\nsteps = 10\n";

/// A run without training: its files as kiln writes them.
fn run(at: &Path) -> PathBuf {
    fs::create_dir_all(at).unwrap();
    let receipt = json!({ "train": [{ "pass": "bf16", "mode": "auto", "sites": 2, "applied": 1, "declined": [["a", "b"]], "notes": ["c"] }],
        "ranks": { "data": 2, "tensor": 1, "over": null } });
    for (name, text) in [
        ("config.toml", CONFIG.to_string()),
        ("metrics.jsonl", "{\"step\":1,\"loss\":2.5,\"val_loss\":2.0}\n{\"step\":2,\"loss\":1.5,\"val_loss\":1.0}\n".into()),
        ("run.json", json!({ "status": "finished", "started": 1, "device": "CPU" }).to_string()),
        ("receipts.json", receipt.to_string()),
        ("samples.jsonl", json!({ "step": 2, "text": "a sample" }).to_string() + "\n"),
        ("own.svg", "<svg/>".into()),
        (".lock", String::new()),
    ] {
        fs::write(at.join(name), text).unwrap();
    }
    at.into()
}

/// Files of a run that are read.
const READ: &[&str] = &["config.toml", "metrics.jsonl", "run.json", "receipts.json", "samples.jsonl", "own.svg", "more.png", ".lock"];

/// Everything that a page, the listing and a report say of the runs in a folder.
fn all_said(folder: &Path, served: &Served) -> Vec<(String, String)> {
    let mut said = vec![];
    let mut ask = |path: String| {
        let (status, head, body) = served.get(&path);
        said.push((format!("{path}: {status}"), format!("{head}\n{}", String::from_utf8_lossy(&body))));
    };
    ["/", "/api/runs"].iter().for_each(|path| ask(path.to_string()));
    for run in served.json("/api/runs")["runs"].as_array().unwrap() {
        let name = run["name"].as_str().unwrap();
        ask(format!("/api/details?run={name}"));
        ask(format!("/api/metrics?run={name}&from=0"));
        READ.iter().for_each(|file| ask(format!("/picture?run={name}&name={file}")));
    }
    let page = folder.with_extension("html");
    for args in [vec!["runs"], vec!["runs", "--json"], vec!["report", "--out", page.to_str().unwrap()]] {
        let folder = text(folder);
        let ran = finish_with_key(args.iter().copied().chain([folder.as_str()]));
        assert!(!ran.panicked(), "{ran:?}");
        said.push((args.join(" "), ran.out + &ran.err));
    }
    said.push(("the report".into(), fs::read_to_string(page).unwrap()));
    said
}

/// In an environment that has the key in it.
fn finish_with_key<'a>(args: impl Iterator<Item = &'a str>) -> Ran {
    let mut command = command(args);
    command.env("SECRET_TOKEN", KEY);
    finish(command)
}

#[test]
fn no_link_is_followed_out_of_a_run() {
    let dir = tempdir().unwrap();
    let (runs, away) = (dir.path().join("runs"), dir.path().join("away"));
    // Secrets that would be read well, one for each kind of file, and one that is none of them.
    let secrets = [
        ("text", format!("-----BEGIN {KEY}-----\n")),
        ("config.toml", format!("recipe = \"{KEY}\"\n{KEY} = 1\n")),
        ("broken.toml", format!("recipe = {KEY}\n")),
        ("metrics.jsonl", format!("{{\"step\":1,\"{KEY}\":1.0}}\n{KEY}\n")),
        ("run.json", json!({ "status": "failed", "error": KEY, "device": KEY }).to_string()),
        ("broken.json", format!("\"{KEY}\" {KEY}")),
        ("receipts.json", json!({ KEY: [] }).to_string()),
        ("samples.jsonl", json!({ "step": 1, "text": KEY }).to_string() + "\n"),
        ("own.svg", format!("<svg><title>{KEY}</title></svg>")),
        ("more.png", KEY.into()),
    ];
    fs::create_dir(&away).unwrap();
    secrets.iter().for_each(|(name, text)| fs::write(away.join(name), text).unwrap());
    run(&runs.join("good"));
    // A run elsewhere, which a link in a run leads to.
    fs::write(run(&away.join("run")).join("metrics.jsonl"), &secrets[3].1).unwrap();
    let mut count = 0;
    let mut bad = |name: &str, to: &Path| {
        count += 1;
        let run = run(&runs.join(format!("bad-{count}")));
        let _ = fs::remove_file(run.join(name));
        symlink(to, run.join(name)).unwrap();
        run
    };
    for name in READ {
        // Absolute, relative, the environment, what is not there, and through a linked folder.
        let own = if away.join(name).exists() { name } else { "text" };
        bad(name, &away.join(own));
        bad(name, &Path::new("../../away").join(own));
        bad(name, Path::new("/proc/self/environ"));
        bad(name, Path::new("/no/such/file"));
        let by_folder = bad(name, &Path::new("checkpoints").join(own));
        symlink(&away, by_folder.join("checkpoints")).unwrap();
    }
    for (name, to) in [("config.toml", "broken.toml"), ("run.json", "broken.json"), ("receipts.json", "text"), ("metrics.jsonl", "text")] {
        bad(name, &away.join(to));
    }
    bad("metrics.jsonl", &runs.join("good/metrics.jsonl"));
    bad("metrics.jsonl", &away.join("run/metrics.jsonl"));
    bad("metrics.jsonl", Path::new("metrics.jsonl"));
    // One that stays inside is followed.
    let inner = run(&runs.join("inner"));
    fs::rename(inner.join("metrics.jsonl"), inner.join("numbers")).unwrap();
    symlink("numbers", inner.join("metrics.jsonl")).unwrap();

    let served = Served::of(&runs, &[], &[("SECRET_TOKEN", KEY)]);
    let said = all_said(&runs, &served);
    assert!(said.len() > 10 * count, "{} answers", said.len());
    for (what, text) in &said {
        assert!(!text.contains(KEY), "{what}: {text}");
    }
    let all = served.json("/api/runs")["runs"].as_array().unwrap().clone();
    let steps = |name: &str| all.iter().find(|r| r["name"] == name).unwrap_or_else(|| panic!("{name}"))["step"].as_u64().unwrap();
    assert_eq!((all.len(), steps("good"), steps("inner")), (count + 2, 2, 2));
    let refused = all.iter().filter(|r| r["problem"].as_str().is_some_and(|p| p.contains("leads out"))).count();
    assert!(refused >= 3 * 5 + 5, "{refused} runs say why");
    // The page of a run is not written through a link.
    symlink(away.join("own.svg"), runs.join("good/report.html")).unwrap();
    kiln(["report", &text(&runs.join("good"))]).fails(&["report.html is a link", "--out"]);
}

/// What a run's own files say wrongly is said by its place: nobody can know whose file it is.
#[test]
fn what_cannot_be_read_is_not_quoted() {
    let dir = tempdir().unwrap();
    let runs = dir.path().join("runs");
    let cases = [
        ("config.toml", format!("a = 1\n  b = {KEY}\n"), "config.toml cannot be read: line 2, column 7"),
        ("config.toml", KEY.into(), "config.toml cannot be read: line 1, column"),
        ("run.json", format!("{{\"a\":\n {KEY}"), "run.json cannot be read: line 2, column 2"),
        ("metrics.jsonl", format!("{{\"step\":1}}\n{KEY}\n\"{KEY}\"\n"), "metrics.jsonl: 2 lines cannot be read"),
        ("receipts.json", format!("[\"{KEY}\"]"), ""),
        ("samples.jsonl", format!("{KEY}\n{{\"step\":\"{KEY}\",\"text\":[]}}\n"), ""),
    ];
    for (i, (name, content, _)) in cases.iter().enumerate() {
        fs::write(run(&runs.join(i.to_string())).join(name), content).unwrap();
    }
    let served = Served::new(&runs);
    for (what, text) in all_said(&runs, &served) {
        assert!(!text.contains(KEY), "{what}: {text}");
    }
    for (i, (name, _, problem)) in cases.iter().enumerate() {
        let said = served.json("/api/runs")["runs"][i]["problem"].as_str().unwrap_or_default().to_string();
        assert!(said.contains(problem), "{name}: {said}");
    }
}

#[test]
fn pipes_and_folders_in_the_place_of_files_are_said_and_not_waited_for() {
    let dir = tempdir().unwrap();
    let runs = dir.path().join("runs");
    for name in READ {
        let run = run(&runs.join(format!("pipe-{}", name.trim_start_matches('.'))));
        let _ = fs::remove_file(run.join(name));
        assert!(Command::new("mkfifo").arg(run.join(name)).status().unwrap().success());
    }
    let folder = run(&runs.join("folder"));
    fs::remove_file(folder.join("metrics.jsonl")).unwrap();
    fs::create_dir(folder.join("metrics.jsonl")).unwrap();
    run(&runs.join("good"));
    let served = Served::new(&runs);
    all_said(&runs, &served);
    let all = served.json("/api/runs")["runs"].as_array().unwrap().clone();
    assert_eq!(all.len(), READ.len() + 2);
    for name in ["config.toml", "metrics.jsonl", "run.json"] {
        let found = all.iter().find(|r| r["name"] == format!("pipe-{name}")).unwrap();
        assert!(found["problem"].as_str().unwrap().contains(&format!("{name}: it is a pipe")), "{found}");
    }
}

/// Whatever one run's files hold, it is said there, and the other has all of its own.
#[test]
fn a_damaged_file_hides_nothing_of_another_run() {
    let dir = tempdir().unwrap();
    let runs = dir.path().join("runs");
    run(&runs.join("good"));
    let long = format!("{{\"step\":1,\"note\":\"{}\"}}\n", "x".repeat(5 << 20));
    let lines: String = (0..200_000).map(|i| format!("{{\"step\":{},\"loss\":{i}}}\n", i % 70_000)).collect();
    let cases: Vec<(&str, String)> = vec![
        ("receipts.json", "{\"train\":[null]}".into()),
        ("receipts.json", "{\"train\":[{}]}".into()),
        ("receipts.json", "{\"train\":3}".into()),
        ("receipts.json", "[]".into()),
        ("receipts.json", "[".repeat(100_000)),
        ("receipts.json", "{\"train\":[{\"pass\":{},\"mode\":1,\"sites\":\"\",\"applied\":null,\"declined\":{},\"notes\":[1]}]}".into()),
        ("samples.jsonl", "{\"step\":[],\"text\":{}}\nnull\n{\"step\":1e999,\"text\":\"\"}\n".into()),
        ("run.json", "{\"floor\":[],\"started\":\"x\",\"work\":{},\"device\":[],\"status\":7}".into()),
        ("run.json", "{\"floor\":{\"name\":{},\"value\":[]}}".into()),
        ("run.json", "null".into()),
        ("config.toml", "recipe = []\npreset = {}\ntrain = 3\n".into()),
        ("config.toml", format!("recipe = \"hydra\"\n{}", (0..50_000).map(|i| format!("k{i} = {i}\n")).collect::<String>())),
        ("config.toml", format!("recipe = \"hydra\"\na = {}1{}", "[".repeat(20_000), "]".repeat(20_000))),
        ("metrics.jsonl", "{\"step\":1,\"loss\":1e999}\n{\"step\":1e999,\"loss\":1}\n{\"step\":-1}\n{\"step\":2.5}\n\0\0\0\n".into()),
        ("metrics.jsonl", "{\"step\":18446744073709551615,\"loss\":1.7e308}\n{\"step\":0,\"loss\":-1.7e308}\n".into()),
        ("metrics.jsonl", "{\"step\":1,\"__proto__\":1,\"constructor\":2,\"toString\":3}\n".into()),
        ("metrics.jsonl", "{\"step\":1,\"loss\":{}}\n{\"step\":2,\"loss\":\"</script><script>alert(1)</script>\"}\n".into()),
        ("metrics.jsonl", long),
        ("metrics.jsonl", lines),
    ];
    for (i, (name, content)) in cases.iter().enumerate() {
        fs::write(run(&runs.join(format!("bad-{i:02}"))).join(name), content).unwrap();
    }
    let served = Served::new(&runs);
    let good = |details: &Value| {
        assert!(details["receipts"]["train"][0]["pass"] == "bf16" && details["receipts"]["ranks"]["data"] == 2, "{details}");
        assert_eq!((&details["samples"], &details["notes"]), (&json!([{ "step": 2, "text": "a sample" }]), &json!([])));
        assert_eq!(details["pictures"], json!(["own.svg"]));
    };
    let all = served.json("/api/runs")["runs"].as_array().unwrap().clone();
    assert_eq!(all.len(), cases.len() + 1);
    assert_eq!((&all[cases.len()]["problem"], &all[cases.len()]["step"]), (&Value::Null, &2.into()));
    good(&served.json("/api/details?run=good"));
    kiln(["report", &text(&runs), "--out", &text(&dir.path().join("all.html"))]).ok();
    let html = fs::read_to_string(dir.path().join("all.html")).unwrap();
    assert!(html.len() < 8 << 20 && !html.contains("alert(1)</script>"), "{} bytes", html.len());
    let reported = embedded(&html, "report")["runs"].as_array().unwrap().clone();
    good(&reported[cases.len()]["details"]);
    assert_eq!(reported[cases.len()]["series"]["val_loss"], json!([[1, 2.0], [2, 1.0]]));
    for (i, (name, content)) in cases.iter().enumerate() {
        let (status, _, body) = served.get(&format!("/api/details?run=bad-{i:02}"));
        assert!(status == 200 && body.len() < 1 << 20, "{name} {content:.80}: {status}, {} bytes", body.len());
        for details in [&json(&String::from_utf8(body).unwrap()), &reported[i]["details"]] {
            let notes = details["notes"].to_string();
            match *name {
                "receipts.json" => assert!(details["receipts"].is_null() && notes.contains("receipts.json"), "{content:.80}: {notes}"),
                "samples.jsonl" => assert!(details["samples"] == json!([]) && notes.contains("samples.jsonl"), "{content:.80}: {notes}"),
                _ => {}
            }
        }
    }
    let points = |i: usize| reported[i]["series"]["loss"].as_array().unwrap();
    // Of many points a curve keeps as many as it has room for, by step, and the last. Of a step that is repeated the last value counts.
    let many = points(cases.len() - 1);
    assert!((5_000..=10_001).contains(&many.len()) && many.is_sorted_by_key(|p| p[0].as_u64()), "{}", many.len());
    assert_eq!(*many.last().unwrap(), json!([69_999, 139_999]));
    assert!(many.iter().all(|p| p[1].as_u64().unwrap() >= 70_000), "{many:?}");
    assert_eq!(all[cases.len() - 6]["problem"].as_str().unwrap(), "metrics.jsonl: 5 lines cannot be read");
}

/// What is long is not sent, and what is sent is what is shown.
#[test]
fn long_samples_and_thousands_of_metrics_are_sent_in_part() {
    let dir = tempdir().unwrap();
    let runs = dir.path().join("runs");
    let long = run(&runs.join("long"));
    let mut file = std::io::BufWriter::new(fs::File::create(long.join("samples.jsonl")).unwrap());
    let line = "y".repeat(20_000);
    for step in 0..3_000 {
        writeln!(file, "{{\"step\":{step},\"text\":\"{step} {line}\"}}").unwrap();
    }
    file.into_inner().unwrap();
    for i in 0..40 {
        fs::write(long.join(format!("p{i:02}.png")), vec![0; 1 << 20]).unwrap();
    }
    fs::File::create(long.join("large.svg")).unwrap().set_len(9 << 20).unwrap();
    let wide = run(&runs.join("wide"));
    let keys: String = (0..3_000).map(|i| format!("\"key{i}\":{i},")).collect();
    let record = |step: u64| format!("{{\"step\":{step},{keys}\"{}\":1,\"loss\":2.0,\"val_loss\":1.5}}\n", "k".repeat(5000));
    fs::write(wide.join("metrics.jsonl"), record(1) + &record(2)).unwrap();
    let served = Served::new(&runs);
    let (status, _, body) = served.get("/api/details?run=long");
    assert!(status == 200 && body.len() < 100_000, "{} bytes", body.len());
    let details = json(&String::from_utf8(body).unwrap());
    let steps: Vec<u64> = details["samples"].as_array().unwrap().iter().map(|s| s["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [2997, 2998, 2999]);
    assert_eq!(details["pictures"].as_array().unwrap().len(), 24);
    assert!(details["notes"].to_string().contains("18 more pictures"), "{}", details["notes"]);

    let (_, _, body) = served.get("/api/metrics?run=wide&from=0");
    assert!(body.len() < 20_000, "{} bytes", body.len());
    let points = json(&String::from_utf8(body).unwrap())["points"].as_object().unwrap().clone();
    // Those that the recipe declares are all there.
    assert!(points.len() == 202 && points.contains_key("loss") && points.contains_key("val_loss"), "{}", points.len());
    let details = served.json("/api/details?run=wide");
    assert!(points.keys().eq(details["metrics"].as_object().unwrap().keys()));
    assert!(details["notes"].to_string().contains("2800 metrics are not shown"), "{}", details["notes"]);

    kiln(["report", &text(&runs), "--out", &text(&dir.path().join("all.html"))]).ok();
    let html = fs::read_to_string(dir.path().join("all.html")).unwrap();
    assert!(html.len() < 60 << 20, "{} bytes", html.len());
    let reported = embedded(&html, "report")["runs"].as_array().unwrap().clone();
    assert_eq!(reported[0]["details"]["samples"].as_array().unwrap().len(), 3);
    assert!(reported[0]["details"]["inside"].as_object().unwrap().len() < 33);
    assert_eq!(reported[1]["series"].as_object().unwrap().len(), 202);
}

/// Connections that send a byte now and then, twice and three times as many as are served at once.
#[test]
fn slow_connections_lock_nobody_out() {
    let dir = tempdir().unwrap();
    let runs = dir.path().join("runs");
    run(&runs.join("a"));
    let served = Served::new(&runs);
    for count in [64, 200] {
        let mut slow: Vec<TcpStream> = (0..count).map(|_| TcpStream::connect(&served.host).unwrap()).collect();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    // Those that were closed are opened again, as whoever means harm would.
                    for stream in &mut slow {
                        if stream.write_all(b"G").is_err() {
                            *stream = TcpStream::connect(&served.host).unwrap();
                        }
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            std::thread::sleep(Duration::from_millis(100));
            let asked: Vec<_> = (0..3).map(|_| std::panic::catch_unwind(|| served.get("/api/runs").0)).collect();
            done.store(true, Ordering::Relaxed);
            assert!(asked.iter().all(|status| status.as_ref().is_ok_and(|status| *status == 200)), "{count}: {asked:?}");
        });
    }
}

/// By any method, path, or spelling.
#[test]
fn no_way_leads_around_the_token() {
    let dir = tempdir().unwrap();
    let runs = dir.path().join("runs");
    run(&runs.join(KEY));
    let (served, open) = (Served::new(&runs), Served::with(&runs, &["--no-token"]));
    let (host, token) = (&served.host, served.token.strip_prefix("token=").unwrap());
    let paths = [
        "/",
        "/favicon.ico",
        "/events",
        "//api/runs",
        "/api/runs/",
        "/./api/runs",
        "/x/../api/runs",
        "/%61pi/runs",
        "/api%2Fruns",
        "/api/runs#",
        "/api/runs?",
        "/api/runs?&&",
        "/api/runs?token",
        "/api/runs?token=",
        "/api/runs?token=%00",
        "/api/runs?TOKEN=%s",
        "/api/runs?token=%s%20",
        "/api/runs?token=x&token=%s",
        "/api/runs;token=%s",
        "/api/runs?x=?token=%s",
        "http://127.0.0.1/api/runs",
        "*",
        "",
    ];
    for path in paths.map(|path| path.replace("%s", token)) {
        for method in ["GET", "HEAD", "get", "POST", "PUT", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"] {
            for more in ["", "X-HTTP-Method-Override: GET\r\n", &format!("Authorization: token {token}\r\nCookie: token={token}\r\n")] {
                let (status, _, body) =
                    served.send(&format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}Connection: close\r\n\r\n"));
                assert!([400, 403, 405].contains(&status) && !String::from_utf8_lossy(&body).contains(KEY), "{method} {path}: {status}");
            }
        }
    }
    // As it is, and percent-encoded, which is the same.
    let encoded: String = token.bytes().map(|b| format!("%{b:02X}")).collect();
    assert_eq!((served.get("/api/runs").0, served.ask("/api/runs", &format!("token={encoded}"), host).0), (200, 200));
    // Without a token the name is what keeps other sites out, and two names are none.
    for hosts in [
        "Host: evil.example\r\n",
        "",
        &format!("Host: {0}\r\nHost: {0}\r\n", open.host),
        &format!("Host: {}\r\nHost: evil.example\r\n", open.host),
    ] {
        assert_eq!(open.send(&format!("GET /api/runs HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n")).0, 403, "{hosts}");
    }
    assert_eq!(open.get("/api/runs").0, 200);
}

/// Receipts of any length are sent in part, and the whole of it has a bound.
#[test]
fn long_receipts_are_sent_in_part() {
    let dir = tempdir().unwrap();
    let runs = dir.path().join("runs");
    let receipt = |pass: String, declined: Value, note: String| json!({ "pass": pass, "mode": "auto", "sites": 2, "applied": 1, "declined": declined, "notes": [note] });
    let passes: Vec<Value> = (0..300).map(|i| receipt(format!("pass-{i}"), json!([["why", "where"]]), String::new())).collect();
    let sites: Vec<Value> = (0..5_000).map(|i| json!(["why", format!("site {i}")])).collect();
    let programs: serde_json::Map<String, Value> =
        (0..300).map(|i| (format!("program-{i:03}"), json!([receipt("p".into(), json!([]), "n".repeat(3_000))]))).collect();
    let wide: serde_json::Map<String, Value> = (0..200)
        .map(|i| {
            (
                format!("p{i}"),
                json!((0..40).map(|k| receipt(format!("{k} {}", "x".repeat(400)), json!([]), "n".into())).collect::<Vec<_>>()),
            )
        })
        .collect();
    for (name, all) in [
        ("passes", json!({ "train": passes })),
        ("sites", json!({ "train": [receipt("p".into(), json!(sites), "n".repeat(100_000))] })),
        ("programs", Value::Object(programs)),
        ("wide", Value::Object(wide)),
    ] {
        fs::write(run(&runs.join(name)).join("receipts.json"), all.to_string()).unwrap();
    }
    run(&runs.join("usual"));
    let served = Served::new(&runs);
    let details = |name: &str| {
        let (status, _, body) = served.get(&format!("/api/details?run={name}"));
        assert!(status == 200 && body.len() < (1 << 20) + 100_000, "{name}: {} bytes", body.len());
        json(&String::from_utf8(body).unwrap())
    };
    let note = |d: &Value| d["notes"].to_string();
    let all = details("passes");
    assert!(all["receipts"]["train"].as_array().unwrap().len() == 200 && note(&all).contains("the first 200 are shown"), "{}", note(&all));
    let all = details("sites");
    let receipt = &all["receipts"]["train"][0];
    assert_eq!((receipt["declined"].as_array().unwrap().len(), &receipt["declined"][199][1]), (200, &json!("site 199")));
    assert!(receipt["notes"][0].as_str().unwrap().len() < 600 && note(&all).contains("500 letters of a text"), "{}", note(&all));
    assert_eq!(details("programs")["receipts"].as_object().unwrap().len(), 200);
    let all = details("wide");
    assert!(all["receipts"].is_null() && note(&all).contains("more than a page has room for"), "{}", note(&all));
    assert_eq!((&details("usual")["notes"], &details("usual")["receipts"]["train"][0]["pass"]), (&json!([]), &json!("bf16")));
}

/// Drawings that take a browser's memory or time, and those that kiln writes.
#[test]
fn only_drawings_of_the_kind_that_kiln_writes_are_served() {
    let dir = tempdir().unwrap();
    let runs = dir.path().join("runs");
    let run = run(&runs.join("a"));
    let svg = |inner: &str| format!("<svg xmlns=\"http://www.w3.org/2000/svg\">{inner}</svg>").into_bytes();
    let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    let bad: Vec<(&str, Vec<u8>)> = vec![
        ("use", svg("<g id=\"a\"><path d=\"M0 0\"/></g><g id=\"b\"><use href=\"#a\"/><use href=\"#a\"/></g>")),
        ("prefix", b"<s:svg xmlns:s=\"http://www.w3.org/2000/svg\"><s:use href=\"#a\"/></s:svg>".to_vec()),
        ("upper", svg("<USE href=\"#a\"/>")),
        ("entity", b"<!DOCTYPE svg [<!ENTITY a \"aaaa\"><!ENTITY b \"&a;&a;\">]><svg>&b;</svg>".to_vec()),
        ("comment", svg("<!-- a -->")),
        ("filter", svg("<filter id=\"f\"><feGaussianBlur stdDeviation=\"9999\"/></filter>")),
        ("pattern", svg("<pattern id=\"p\"/>")),
        ("image", svg("<image href=\"own.svg\"/>")),
        ("script", svg("<script>alert(1)</script>")),
        ("style", svg("<style>@import url(http://x)</style>")),
        ("foreign", svg("<foreignObject/>")),
        ("space", svg("< use href=\"#a\"/>")),
        ("sheet", b"<?xml version=\"1.0\"?><?xml-stylesheet href=\"x\"?><svg/>".to_vec()),
        ("utf-16", utf16("<svg><use href=\"#a\"/></svg>")),
        ("zeros", b"<svg>\0</svg>".to_vec()),
        ("no-utf-8", b"<svg>\xff</svg>".to_vec()),
        ("open", b"<?xml version=\"1.0\" <svg/>".to_vec()),
    ];
    for (name, bytes) in &bad {
        fs::write(run.join(format!("{name}.svg")), bytes).unwrap();
    }
    let good = svg("<title>a &lt;b&gt;</title>\n\t<g><rect width=\"1\"/><text x=\"1\">1 &gt; 0</text><polyline points=\"0,0\"/></g>");
    fs::write(run.join("own.svg"), &good).unwrap();
    fs::write(run.join("xml.svg"), [b"<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n", &good[..]].concat()).unwrap();
    let served = Served::new(&runs);
    let details = served.json("/api/details?run=a");
    assert_eq!(details["pictures"], json!(["own.svg", "xml.svg"]));
    for (name, _) in &bad {
        assert!(details["notes"].to_string().contains(&format!("{name}.svg is not shown")), "{name}: {}", details["notes"]);
        assert_eq!(served.get(&format!("/picture?run=a&name={name}.svg")).0, 404, "{name}");
    }
    assert_eq!(served.get("/picture?run=a&name=own.svg").2, good);
    kiln(["report", &text(&run), "--out", &text(&dir.path().join("a.html"))]).ok();
    let html = fs::read_to_string(dir.path().join("a.html")).unwrap();
    let inside = embedded(&html, "report")["runs"][0]["details"]["inside"].as_object().unwrap().clone();
    assert_eq!(inside.keys().collect::<Vec<_>>(), ["own.svg", "xml.svg"]);
    // Drawings of a real run are of that kind.
    let real = dir.path().join("real");
    train(&real, "--steps 3 --set eval_every=1").ok();
    for svg in names(&real).into_iter().filter(|n| n.ends_with(".svg")) {
        fs::copy(real.join(&svg), run.join(format!("real-{svg}"))).unwrap();
    }
    let shown = served.json("/api/details?run=a")["pictures"].clone();
    assert!(shown.as_array().unwrap().contains(&json!("real-loss.svg")), "{shown}");
}

/// More runs than a page shows, and evaluations without end.
#[test]
fn of_very_many_runs_and_evaluations_a_part_is_kept() {
    let dir = tempdir().unwrap();
    let runs = dir.path().join("runs");
    let a = run(&runs.join("a"));
    let lines: String = (1..=100_500).map(|step| format!("{{\"step\":{step},\"val_loss\":{}}}\n", 200_000 - step)).collect();
    fs::write(a.join("metrics.jsonl"), lines).unwrap();
    for i in 0..1_020 {
        let one = runs.join(format!("b{i:04}"));
        fs::create_dir(&one).unwrap();
        fs::write(one.join("config.toml"), CONFIG).unwrap();
        fs::write(one.join("metrics.jsonl"), "").unwrap();
    }
    let served = Served::new(&runs);
    let answer = served.json("/api/runs");
    assert_eq!((answer["runs"].as_array().unwrap().len(), &answer["more"]), (1_000, &json!(21)));
    let first = &answer["runs"][0];
    assert!(first["problem"].as_str().unwrap().contains("more than 100000 evaluations") && first["step"] == 100_500, "{first}");
    assert_eq!(first["best"]["step"], 100_000);
    assert_eq!(served.get("/api/details?run=b0998").0, 200);
    assert_eq!(served.get("/api/details?run=b1019").0, 404, "what is not listed is not read");
    kiln(["report", &text(&runs), "--out", &text(&dir.path().join("all.html"))]).fails(&["1021 runs", "room for 1000"]);
    let page = String::from_utf8(served.get("/").2).unwrap();
    assert!(page.contains("more in this folder are not shown"));
}

/// A report of many runs is as long as one of few: curves have fewer points, and pictures are those of the first.
#[test]
fn a_report_of_many_runs_has_a_bound_as_a_whole() {
    let dir = tempdir().unwrap();
    let runs = dir.path().join("runs");
    let keys: String = (0..100).map(|i| format!("\"k{i}\":1,")).collect();
    let lines: String = (1..=3_000).map(|step| format!("{{\"step\":{step},{keys}\"loss\":2.0}}\n")).collect();
    for i in 0..16 {
        let one = run(&runs.join(format!("r{i:02}")));
        fs::write(one.join("metrics.jsonl"), &lines).unwrap();
        fs::write(one.join("large.png"), vec![0; 3 << 20]).unwrap();
    }
    kiln(["report", &text(&runs), "--out", &text(&dir.path().join("all.html"))]).ok();
    let html = fs::read_to_string(dir.path().join("all.html")).unwrap();
    let reported = embedded(&html, "report")["runs"].as_array().unwrap().clone();
    let points: usize = reported.iter().flat_map(|r| r["series"].as_object().unwrap().values()).map(|s| s.as_array().unwrap().len()).sum();
    assert!((1_000_000..=4_100_000).contains(&points), "{points} points");
    let pictures = reported.iter().filter(|r| r["details"]["inside"].as_object().unwrap().contains_key("large.png")).count();
    assert_eq!(pictures, 10, "32 MiB of 3 MiB each");
    assert!(reported[15]["details"]["notes"].to_string().contains("large.png is not in this file"), "{}", reported[15]["details"]["notes"]);
}
