//! `kiln profile` on the CPU: its files agree with each other, and what it cannot profile is refused by name.

use crate::common::{SMALL, checkpoint, command, finish, kiln, names, text, train};
use serde_json::Value;
use std::fs;
use std::path::Path;
use tempfile::tempdir;

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn profile(args: &[&str], out: &Path) -> Value {
    let ran = kiln(["profile"].iter().chain(args).chain(&["--threads", "1", "--json", "--out", &text(out)])).ok();
    let printed: Value = serde_json::from_str(&ran.out).unwrap_or_else(|e| panic!("{e}: {ran:#?}"));
    assert_eq!(printed, json(&out.join("profile.json")), "--json prints what is in the file");
    assert_eq!(names(out), ["config.toml", "digest.html", "digest.md", "profile.json", "trace.json"]);
    printed
}

fn number(v: &Value, key: &str) -> f64 {
    v[key].as_f64().unwrap_or_else(|| panic!("{key} of {v}"))
}

fn rows<'a>(digest: &'a Value, key: &str) -> &'a [Value] {
    digest[key].as_array().unwrap()
}

/// Nodes, ops and layers are three ways to cut the same time, and the rest of a step is idle.
fn adds_up(digest: &Value) {
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs().max(1e-3);
    let [busy, step] = ["busy_ms", "step_ms"].map(|key| number(digest, key));
    let in_nodes = busy * number(digest, "attributed");
    for key in ["nodes", "ops", "layers"] {
        let sum: f64 = rows(digest, key).iter().map(|r| number(r, "ms")).sum();
        assert!(close(sum, in_nodes), "{key}: {sum} of {in_nodes}");
        assert!(rows(digest, key).windows(2).all(|w| number(&w[0], "ms") >= number(&w[1], "ms")), "{key}: the longest first");
    }
    let others: f64 = rows(digest, "others").iter().map(|r| number(r, "ms")).sum();
    assert!(close(others + in_nodes, busy) && close(busy + number(digest, "idle_ms"), step), "{digest}");
    let gaps: f64 = rows(digest, "gaps").iter().map(|g| number(g, "ms")).sum();
    assert!(close(gaps, number(digest, "idle_ms")), "{gaps}");
    // How much of a step of a millisecond is idle, a busy machine decides.
    assert!(0.0 < in_nodes && busy <= step, "{busy} of {step} ms, {in_nodes} in nodes");
}

/// Complete events with all their fields, nested on the host's track, one after the other on the device's, and of the time in the digest.
fn trace_is_valid(trace: &Value, digest: &Value) {
    let events = trace["traceEvents"].as_array().unwrap();
    let tracks: Vec<(&Value, &Value)> =
        events.iter().filter(|e| e["name"] == "thread_name").map(|e| (&e["tid"], &e["args"]["name"])).collect();
    let names: Vec<&str> = tracks.iter().map(|t| t.1.as_str().unwrap()).collect();
    assert_eq!(names, ["host", "copies", "compute", "phases"]);
    assert!(events.iter().all(|e| ["M", "X"].contains(&e["ph"].as_str().unwrap()) && e["pid"].is_u64() && e["name"].is_string()));
    let of = |track: &str| -> Vec<(f64, f64, &str)> {
        let tid = tracks.iter().find(|t| t.1 == track).unwrap().0;
        let spans = events.iter().filter(|e| e["ph"] == "X" && e["tid"] == *tid);
        spans.map(|e| (number(e, "ts"), number(e, "ts") + number(e, "dur"), e["name"].as_str().unwrap())).collect()
    };
    let (compute, host) = (of("compute"), of("host"));
    let phases: Vec<&str> = of("phases").into_iter().map(|p| p.2).collect();
    assert!(["forward", "backward", "optimizer"].iter().all(|phase| phases.contains(phase)), "{phases:?}");
    const ROUNDING: f64 = 1e-6; // microseconds; spans are whole nanoseconds
    assert!(compute.windows(2).all(|w| w[0].1 <= w[1].0 + ROUNDING), "nodes overlap");
    for (i, a) in host.iter().enumerate() {
        let inside = |b: &(f64, f64, &str)| b.0 >= a.1 - ROUNDING || b.1 <= a.1 + ROUNDING;
        assert!(host[i + 1..].iter().all(inside), "{a:?} is cut by another: {host:?}");
    }
    let steps = number(digest, "steps");
    let ms: f64 = compute.iter().map(|(start, end, _)| (end - start) / 1e3).sum();
    assert!((ms / steps / number(digest, "busy_ms") - 1.0).abs() < 1e-6, "{ms} ms in {steps} steps");
    assert_eq!(host.iter().filter(|s| s.2 == "step").count() as f64, steps);
    for row in rows(digest, "nodes") {
        assert!(compute.iter().any(|s| s.2 == row["name"]), "{row} is in no span");
    }
    assert!(compute.iter().any(|s| s.2.starts_with("blocks.1") && s.2.contains(" / matmul")), "{compute:?}");
}

/// Every op's row of the Markdown is the JSON's, rounded; every one of the page's is the JSON's to the last digit.
fn pages_are_the_json(out: &Path, digest: &Value) {
    let markdown = fs::read_to_string(out.join("digest.md")).unwrap();
    let (_, table) = markdown.split_once("## By op\n\n").unwrap();
    let shown: Vec<Vec<&str>> =
        table.lines().skip(2).take_while(|l| l.starts_with('|')).map(|l| l.trim_matches(['|', ' ']).split(" | ").collect()).collect();
    let page = fs::read_to_string(out.join("digest.html")).unwrap();
    assert_eq!(shown.len(), rows(digest, "ops").len());
    for (cells, row) in shown.iter().zip(rows(digest, "ops")) {
        assert_eq!(cells[0], row["name"]);
        let said = [("nodes", 1.0, 0.5), ("ms", 1.0, 5e-4), ("share", 100.0, 0.05)];
        for ((key, times, rounding), cell) in said.into_iter().zip(&cells[1..]) {
            let (shown, value): (f64, f64) = (cell.trim_end_matches('%').parse().unwrap(), times * number(row, key));
            assert!((shown - value).abs() <= 1.001 * rounding, "{cells:?}: {key} {value}");
        }
        let in_page = format!("<td class=\"number\" data-value=\"{}\">", number(row, "ms"));
        assert!(page.contains(&in_page), "{in_page} of {row}");
    }
    let busy = format!("busy {:.2} ms of {:.2} (", number(digest, "busy_ms"), number(digest, "step_ms"));
    assert!(markdown.contains(&busy) && page.contains(&busy), "{busy}");
    assert!(page.contains("default-src 'none'"), "the page asks no network");
}

#[test]
fn a_recipe_is_profiled() {
    let dir = tempdir().unwrap();
    let out = dir.path().join("a/b");
    let args: Vec<&str> =
        ["hydra"].iter().chain(SMALL.iter().take_while(|a| **a != "--threads")).copied().chain(["--steps", "3"]).collect();
    let digest = profile(&args, &out);
    assert_eq!((&digest["steps"], &digest["on_gpu"], &digest["about"]["recipe"]), (&3.into(), &false.into(), &"hydra".into()));
    assert!(digest["one_by_one"].is_null() && digest["dropped"] == 0);
    adds_up(&digest);
    trace_is_valid(&json(&out.join("trace.json")), &digest);
    pages_are_the_json(&out, &digest);
    let config: toml::Table = fs::read_to_string(out.join("config.toml")).unwrap().parse().unwrap();
    assert_eq!(config["model"]["dim"].as_integer(), Some(32), "the config that was profiled is kept");
    // The folder is there now, and is left as it is.
    let before = fs::read(out.join("profile.json")).unwrap();
    kiln(["profile", "hydra", "--out", &text(&out)]).fails(&["--out", &text(&out), "there is something already"]);
    assert_eq!(fs::read(out.join("profile.json")).unwrap(), before);
}

#[test]
fn a_run_is_profiled_and_left_as_it_was() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 2").ok();
    let weights = |run: &Path| {
        let at = checkpoint(run, 2);
        names(&at).into_iter().map(|name| fs::read(at.join(name)).unwrap()).collect::<Vec<_>>()
    };
    let before = (weights(&run), fs::read(run.join("metrics.jsonl")).unwrap(), names(&run));
    let digest = profile(&[&text(&run), "--steps", "1"], &dir.path().join("out"));
    assert!(digest["about"]["checkpoint"].as_str().unwrap().ends_with("step-00000002"), "{}", digest["about"]);
    adds_up(&digest);
    assert_eq!((weights(&run), fs::read(run.join("metrics.jsonl")).unwrap(), names(&run)), before);
    // Without --out it lies in the run's folder, which is a run as before.
    let ran = kiln(["profile", &text(&run), "--steps", "1", "--warmup", "0", "--threads", "1"]).ok();
    let made: Vec<String> = names(&run).into_iter().filter(|n| n.starts_with("profile-")).collect();
    assert_eq!(made.len(), 1, "{ran:#?}");
    assert!(ran.out.contains(&made[0]) && run.join(&made[0]).join("trace.json").exists(), "{ran:#?}");
    assert_eq!(names(&run).len(), before.2.len() + 1);
    // Of a run whose checkpoints are gone nothing can be profiled.
    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    kiln(["profile", &text(&run)]).fails(&[&text(&run), "no run that can be profiled", "checkpoint"]);
}

#[test]
fn what_cannot_be_profiled_is_refused() {
    let dir = tempdir().unwrap();
    let (empty, file) = (text(&dir.path().join("empty")), text(&dir.path().join("file")));
    fs::create_dir(&empty).unwrap();
    fs::write(&file, "no run").unwrap();
    let cases: &[(&[&str], &[&str])] = &[
        (&["nosuch"], &["no recipe 'nosuch'", "hydra", "no run's folder"]),
        (&[&empty], &[&empty, "no run that can be profiled", "checkpoint"]),
        (&[&file], &[&file, "no run that can be profiled"]),
        (&["hydra", "--steps", "0"], &["--steps 0", "from 1 to 10000"]),
        (&["hydra", "--steps", "10001"], &["--steps 10001", "from 1 to 10000"]),
        (&["hydra", "--warmup", "99999999999"], &["--warmup 99999999999", "from 0 to 10000"]),
        (&["hydra", "--preset", "nosuch"], &["nosuch"]),
        (&["hydra", "--best"], &["--best", "a run's folder"]),
        (&["hydra", "--out", &file], &["--out", &file, "there is something already"]),
        (&["hydra", "--device", "cpu", "--nsys"], &["--nsys", "GPU", "--device is cpu"]),
        (&["hydra", "--device", "cpu", "--ncu"], &["--ncu", "GPU", "--device is cpu"]),
        (&["hydra", "--nsys", "--ncu"], &["--nsys", "--ncu", "cannot be used with"]),
        (&["hydra", "--events", "--ncu"], &["--events", "--ncu", "cannot be used with"]),
        (&["hydra", "--device", "cuda"], &["--device cuda"]),
    ];
    let wrong: Vec<String> =
        cases.iter().filter_map(|(args, parts)| kiln(["profile"].iter().chain(*args).chain(&["--threads", "1"])).problem(parts)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(names(dir.path()), ["empty", "file"], "nothing is left behind");
}

/// Where Nsight is not installed, the message says how to get it, and what to run where it is: with nodes inside of graphs shown one by one.
#[test]
fn nsight_that_is_missing_is_named_with_the_command() {
    if ["/usr/local/cuda/bin", "/opt/nvidia"].iter().any(|installed| Path::new(installed).exists()) {
        return; // it may be there, whatever PATH says
    }
    for (tool, flag) in [("nsys", "--cuda-graph-trace=node"), ("ncu", "--graph-profiling node")] {
        let mut c = command(["profile", "hydra", &format!("--{tool}"), "--steps", "2"]);
        c.env("PATH", "");
        finish(c).fails(&[&format!("--{tool}: Nsight"), "not installed", flag, "kiln profile hydra --steps 2 --window"]);
    }
}

/// With a program in Nsight's place that runs what it is given and leaves a report: the report is kept with config and commit.
#[test]
fn a_report_of_nsight_is_kept_with_its_config() {
    let dir = tempdir().unwrap();
    let (bin, out) = (dir.path().join("bin"), dir.path().join("out"));
    fs::create_dir(&bin).unwrap();
    let script = "#!/bin/sh\nwhile [ \"$1\" != -o ]; do shift; done\necho report > \"$2.nsys-rep\"\nshift 2\nexec \"$@\"\n";
    fs::write(bin.join("nsys"), script).unwrap();
    fs::set_permissions(bin.join("nsys"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let under = |args: &[&str]| {
        let mut c = command(["profile", "hydra"].iter().chain(SMALL).chain(&["--nsys", "--out", &text(&out)]).chain(args));
        c.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()));
        finish(c)
    };
    under(&["--steps", "2"]).ok();
    assert_eq!(names(&out), ["config.toml", "nsys.nsys-rep", "profile.json"]);
    assert_eq!(fs::read_to_string(out.join("nsys.nsys-rep")).unwrap(), "report\n");
    let about = json(&out.join("profile.json"));
    assert_eq!((&about["about"]["recipe"], &about["steps"]), (&"hydra".into(), &2.into()), "{about}");
    let command: Vec<&str> = about["command"].as_array().unwrap().iter().map(|a| a.as_str().unwrap()).collect();
    assert!(command.contains(&"--cuda-graph-trace=node") && command.contains(&"--window"), "{command:?}");
    // What fails under it leaves nothing behind.
    fs::remove_dir_all(&out).unwrap();
    fs::write(bin.join("nsys"), "#!/bin/sh\nexit 3\n").unwrap();
    under(&[]).fails(&["--nsys", "ended with exit status: 3"]);
    fs::write(bin.join("nsys"), "#!/bin/sh\nexit 0\n").unwrap();
    under(&[]).fails(&["--nsys", "left no report"]);
    assert_eq!(names(dir.path()), ["bin"]);
}
