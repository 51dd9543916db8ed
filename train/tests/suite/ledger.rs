//! `kiln bench --ledger`, `--baseline` and `--picture`; what they write is read back.

use crate::common::{Ran, SMALL, command, finish, kiln, text};
use crate::docs::{is_current, read};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::tempdir;

fn bench(args: &str) -> Ran {
    kiln(["bench", "hydra"].iter().chain(SMALL).map(|s| s.to_string()).chain(args.split_whitespace().map(str::to_owned)))
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn line<'a>(m: &'a Value, pass: &str) -> &'a Value {
    let own: Vec<&Value> = m["ledger"].as_array().unwrap().iter().filter(|l| l["pass"] == pass).collect();
    assert_eq!(own.len(), 1, "{pass} has a line of its own");
    own[0]
}

fn number(v: &Value) -> f64 {
    v.as_f64().unwrap_or_else(|| panic!("no number: {v}"))
}

/// What a page holds under an id.
fn inside(page: &str, id: &str) -> Value {
    let (_, rest) = page.split_once(&format!("id=\"{id}\">")).unwrap_or_else(|| panic!("no {id} in the page"));
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn a_ledger_says_what_every_pass_does_and_is_read_back() {
    let dir = tempdir().unwrap();
    let (file, page) = (dir.path().join("ledger.json"), dir.path().join("ledger.html"));
    let args = format!("--ledger --rounds 3 --repeat 1 --steps-for-error 3 --also bf16,tf32 --json {} --html {}", text(&file), text(&page));
    let said = bench(&args).ok().out;
    let m = json(&file);
    // Where it comes from.
    assert_eq!(
        (&m["format"], &m["recipe"], &m["preset"], &m["config"]["model"]["dim"]),
        (&2.into(), &"hydra".into(), &"tiny".into(), &32.into())
    );
    assert_eq!(m["versions"]["kiln"], env!("CARGO_PKG_VERSION"));
    assert!(m["date"].as_str().unwrap().ends_with('Z') && m["device"] == "cpu, 1 thread" && m["receipts"]["train"].is_array(), "{m}");
    // How it was measured.
    let turns = &m["turns"];
    assert_eq!((&turns["rounds"], &turns["steps"], &turns["groups"], &turns["copies"]), (&3.into(), &1.into(), &1.into(), &6.into()));
    assert_eq!(m["times"].as_array().unwrap().len(), 6 * 3 + 1, "six copies of the baseline in three rounds, and the first once more");
    assert_eq!((&m["repeat"], &m["period"]), (&1.into(), &1.into()));
    assert!(number(&turns["loads"]) > 0.0, "no two loads take the same time");
    assert!(said.contains("3 rounds in") && said.contains("all variants held in memory at once"), "{said}");
    // Every pass has its line.
    let found = |what: &str| m["ledger"].as_array().unwrap().iter().filter(|l| l["found"] == what).count();
    assert!(found("measured") > 8 && found("nothing") > 3 && found("off") > 2 && found("failed") == 0, "{said}");
    for l in m["ledger"].as_array().unwrap().iter().filter(|l| l["found"] == "measured") {
        let (low, median, high) = (number(&l["gain"]["low"]), number(&l["gain"]["median"]), number(&l["gain"]["high"]));
        assert!(low <= median && median <= high && l["ratios"].as_array().unwrap().len() == 3, "{l}");
        assert_eq!(l["steps"], serde_json::json!([1, 1, 1]));
        assert!((1.0 + high).ln() - (1.0 + low).ln() >= 1.99 * number(&turns["loads"]), "how loads differ is in every interval: {l}");
        let by_ms = number(&l["ms_off"]) / number(&l["ms"]) - 1.0;
        assert!((by_ms - median).abs() < 0.02 + 0.1 * median.abs(), "{l}");
        assert!(l["sites"].as_u64() > Some(0) && l["verdict"].is_string() && l["allocated"].is_null(), "{l}");
    }
    // What they change in the numbers: nothing, the order of sums, precision.
    let errors = |pass: &str| ["loss", "gradient", "worst_gradient", "loss_after"].map(|what| number(&line(&m, pass)["differ"][what]));
    assert_eq!(errors("dead-code"), [0.0; 4]);
    let flash = errors("flash-attention");
    assert!(flash[1] > 1e-9 && flash[2] >= flash[1] && flash.iter().all(|e| *e < 1e-4), "{flash:?}");
    let bf16 = errors("bf16");
    assert!(line(&m, "bf16")["switched_on"] == true && bf16[1] > 1e-4 && bf16[3] > 1e-7 && bf16[2] < 1.0, "{bf16:?}");
    assert!(line(&m, "flash-attention")["differ"]["worst"].as_str().unwrap().contains("attn"), "{}", line(&m, "flash-attention"));
    assert!(number(&line(&m, "flash-attention")["peak_off"]) > number(&line(&m, "flash-attention")["peak"]));
    // Those that have nothing to say are named together, in the terminal and on the page.
    let html = fs::read_to_string(&page).unwrap();
    for (found, what, names) in [
        (found("nothing"), "more do nothing here", &["lora-forward", "tf32, switched on"][..]),
        (found("off"), "more are off (--also NAME times one)", &["fp8"]),
    ] {
        let line = said.lines().find(|l| l.contains(what)).unwrap_or_else(|| panic!("{what}\n{said}"));
        assert!(line.starts_with(&format!("{found} more")) && html.contains(&format!("<p>{line}.</p>")), "{line}");
        for name in names {
            assert!(line.contains(name) && !html.contains(&format!("<tr><td>{name}</td>")), "{line}");
            assert!(!said.lines().any(|l| l.starts_with(&format!("{name} "))), "{name}\n{said}");
        }
    }
    let row = |pass: &str| said.lines().find(|l| l.starts_with(&format!("{pass} "))).unwrap_or_else(|| panic!("{pass}\n{said}"));
    // What a pass gains is in one column, and memory has one sign: in the terminal, in the page's table and in its chart.
    assert!(!html.contains(">verdict<"), "gain says it");
    let flash = line(&m, "flash-attention");
    let more = number(&flash["peak"]) - number(&flash["peak_off"]);
    assert!(more < 0.0 && row("flash-attention").contains(" -"), "{}", row("flash-attention"));
    assert!(html.contains(&format!("<td class=\"number\" data-value=\"{more}\">-")), "{more}");
    let memory = inside(&html, "chart-2");
    let bar = memory["bars"].as_array().unwrap().iter().find(|b| b["name"] == "flash-attention").unwrap().clone();
    assert!(bar["value"] == more && bar["shown"].as_str().unwrap().starts_with('-'), "{bar}");
    // The page has the same numbers.
    assert_eq!(inside(&html, "bench"), m);
    let bars = inside(&html, "chart-1");
    assert_eq!(bars["bars"].as_array().unwrap().len(), found("measured"));
    for bar in bars["bars"].as_array().unwrap() {
        let l = line(&m, bar["name"].as_str().unwrap().trim_end_matches(", switched on"));
        assert_eq!([&bar["value"], &bar["low"], &bar["high"]], [&l["gain"]["median"], &l["gain"]["low"], &l["gain"]["high"]]);
        assert_eq!(bar["faint"], l["verdict"] == "within-noise");
        // What is within noise has no number, as in the terminal.
        let shown = bar["shown"].as_str().is_none();
        assert_eq!(shown, l["verdict"] != "within-noise");
        assert_eq!(html.contains(&format!("data-value=\"{}\"", number(&l["gain"]["median"]))), shown, "{l}");
    }
    assert!(!html.contains("src=") && html.contains("default-src 'none'"));
}

/// On the machine that it runs on, whatever else that does: both have measured their own noise.
#[test]
fn two_ledgers_of_one_build_agree_within_their_intervals() {
    let dir = tempdir().unwrap();
    let ledger = |name: &str| {
        let file = dir.path().join(name);
        bench(&format!(
            "--ledger --rounds 7 --repeat 4 --steps-for-error 1 --only fuse-pointwise,dead-code,flash-attention --json {}",
            text(&file)
        ))
        .ok();
        json(&file)
    };
    let (a, b) = (ledger("a.json"), ledger("b.json"));
    for pass in ["fuse-pointwise", "dead-code", "flash-attention"] {
        let of = |m: &Value| ["low", "high"].map(|end| number(&line(m, pass)["gain"][end]));
        let ([a_low, a_high], [b_low, b_high]) = (of(&a), of(&b));
        assert!(a_low <= b_high && b_low <= a_high, "{pass}: {a_low} to {a_high}, then {b_low} to {b_high}");
    }
    assert_eq!(a["numbers"], b["numbers"], "numbers have no noise");
    assert_eq!(a["ledger"].as_array().unwrap().len(), 3, "--only");
}

/// A file like another, changed.
fn planted(from: &Path, name: &str, change: impl Fn(&mut Value)) -> PathBuf {
    let mut m = json(from);
    change(&mut m);
    let path = from.with_file_name(name);
    fs::write(&path, m.to_string()).unwrap();
    path
}

fn faster(m: &mut Value, by: f64) {
    for end in ["low", "median", "high"] {
        m["interval"][end] = (number(&m["interval"][end]) / by).into();
    }
    m["ms"] = (number(&m["ms"]) / by).into();
}

#[test]
fn a_regression_fails_by_name_and_number() {
    let dir = tempdir().unwrap();
    let before = dir.path().join("before.json");
    bench(&format!("--repeat 5 --steps-for-error 4 --json {}", text(&before))).ok();
    let against = |file: &Path, args: &str| bench(&format!("--repeat 5 --baseline {} {args}", text(file)));
    // The same build: the numbers are the same to the last bit.
    let same = against(&before, "--fail-above 0").ok().out;
    assert!(same.contains("against the baseline of") && same.contains("ms (") && !same.contains("apart"), "{same}");
    // Times are planted far beyond what a busy machine does to them. It was slower, then it was faster.
    let slow = planted(&before, "slow.json", |m| faster(m, 1e-5));
    assert!(against(&slow, "--fail-slower 0%").ok().out.contains("-100.0%"));
    let fast = planted(&before, "fast.json", |m| faster(m, 1e5));
    against(&fast, "--fail-slower 400%").fails(&["failed, slower: a step takes", "more than 400% (--fail-slower)"]);
    // Without a bound it is only said.
    assert!(against(&fast, "").ok().out.contains("a step takes"));
    // The loss was another one.
    let moved = planted(&before, "moved.json", |m| m["numbers"]["last"] = (number(&m["numbers"]["last"]) * 1.001).into());
    against(&moved, "--fail-above 1e-4")
        .fails(&["failed, moved: the step: loss after 4 steps", "1.0e-3 apart, more than 1e-4 (--fail-above)"]);
    let said = against(&moved, "--fail-above 1e-2").ok().out;
    assert!(said.contains("1.0e-3 apart") && !said.contains("after 1 step "), "{said}");
    // It was slower, but no surer of it than that: an interval from nothing to everything holds any time.
    let unsure = planted(&fast, "unsure.json", |m| (m["interval"]["low"], m["interval"]["high"]) = (1e-9.into(), 1e9.into()));
    against(&unsure, "--fail-slower 400%").fails(&["within noise; cannot tell 400% here, because the intervals reach", "raise --repeat"]);
    // It was no slower, but had it been, nobody would have seen it.
    let vague = planted(&slow, "vague.json", |m| (m["interval"]["low"], m["interval"]["high"]) = (1e-9.into(), 1e12.into()));
    assert!(against(&vague, "--fail-slower 400%").ok().err.contains("warning: cannot tell 400% here"));
}

#[test]
fn a_ledger_is_compared_line_by_line() {
    let dir = tempdir().unwrap();
    let (before, args) = (dir.path().join("before.json"), "--ledger --rounds 3 --repeat 1 --only fuse-norm");
    bench(&format!("{args} --steps-for-error 2 --json {}", text(&before))).ok();
    let against = |file: &Path| bench(&format!("{args} --baseline {} --fail-above 1e-6", text(file)));
    against(&before).ok();
    let moved = planted(&before, "moved.json", |m| {
        let l = &mut m["ledger"][0];
        l["numbers"]["first"] = (number(&l["numbers"]["first"]) * 1.01).into();
    });
    against(&moved).fails(&["failed, moved: the step with fuse-norm off: loss after 1 step"]);
    let nothing = planted(&before, "nothing.json", |m| m["ledger"][0]["found"] = "nothing".into());
    against(&nothing).fails(&["not comparable: fuse-norm: ", "does nothing here there"]);
    let other = planted(&before, "metric.json", |m| m["ledger"][0]["numbers"]["metric"] = "accuracy".into());
    against(&other).fails(&["the step with fuse-norm off reports loss here, accuracy there"]);
}

#[test]
fn a_baseline_of_something_else_is_refused() {
    let dir = tempdir().unwrap();
    let before = dir.path().join("before.json");
    bench(&format!("--repeat 3 --steps-for-error 2 --json {}", text(&before))).ok();
    let refused = |file: &Path, args: &str, parts: &[&str]| bench(&format!("--repeat 3 --baseline {} {args}", text(file))).fails(parts);
    let with = |name: &str, change: &dyn Fn(&mut Value)| planted(&before, name, change);
    refused(
        &with("device.json", &|m| m["device"] = "NVIDIA H200".into()),
        "",
        &["another device: 'NVIDIA H200' there, 'cpu, 1 thread' here"],
    );
    refused(&with("preset.json", &|m| m["preset"] = "small".into()), "", &["another preset: 'small' there"]);
    refused(&before, "--set batch=1", &["another config", "train.batch = 1 here, 2 there"]);
    refused(&before, "--pass fuse-norm=off", &["another config", "passes.fuse-norm"]);
    refused(&with("format.json", &|m| m["format"] = 1.into()), "", &["has format 1, and this kiln reads 2"]);
    refused(&with("old.json", &|m| drop(m.as_object_mut().unwrap().remove("format"))), "", &["before its files had a format"]);
    refused(
        &with("few.json", &|m| (m["interval"], m["times"]) = (Value::Null, vec![1.0].into())),
        "",
        &["1 timed steps, which say nothing"],
    );
    refused(&with("broken.json", &|m| m["ms"] = "fast".into()), "", &["broken.json is not what"]);
    refused(&with("silent.json", &|m| m["numbers"] = Value::Null), "--fail-above 1e-4", &["silent.json has no loss, which --fail-above"]);
    refused(&with("metric.json", &|m| m["numbers"]["metric"] = "accuracy".into()), "--fail-above 1", &["loss here, accuracy there"]);
    refused(
        &with("inverted.json", &|m| (m["interval"]["low"], m["interval"]["high"]) = (1e9.into(), 0.into())),
        "",
        &["inverted.json is damaged: interval has a median of", "between 1000000000 and 0"],
    );
    refused(&before, &format!("--json {}", text(&before)), &["--baseline names the same file"]);
    refused(&before, "--steps-for-error 5", &["has the loss after 2 steps"]);
    refused(&before, "--repeat 2", &["cannot be used multiple times"]);
    refused(&before, "--fail-slower 5", &["'5' is not a percentage"]);
    refused(&before, "--fail-above 2", &["'2' is not a relative difference from 0 to 1"]);
    let other = dir.path().join("other.json");
    fs::write(&other, "{\"a\": 1}").unwrap();
    refused(&other, "", &["other.json is not what `kiln bench RECIPE --json FILE` writes"]);
    fs::write(&other, "no").unwrap();
    refused(&other, "", &["other.json is not JSON"]);
    refused(&dir.path().join("absent.json"), "", &["absent.json"]);
    kiln(["bench", "hydra", "--fail-slower", "5%"]).fails(&["--baseline"]);
    kiln(["bench", "ops", "--baseline", "x.json"]).fails(&["--baseline is for a recipe's step, not for bench ops"]);
    // One that another version wrote, with keys of its own, is compared with a warning.
    let newer = with("newer.json", &|m| m["config"]["model"]["brand_new"] = 1.into());
    let ran = bench(&format!("--repeat 3 --baseline {}", text(&newer))).ok();
    assert!(ran.err.contains("do not have the same keys (model.brand_new = 1)"), "{}", ran.err);
}

#[test]
fn limits_of_a_ledger_are_checked_first() {
    for (args, parts) in [
        ("--ledger --rounds 2", &["--rounds 2: from 3"][..]),
        ("--ledger --minutes 0", &["--minutes 0"]),
        ("--ledger --minutes nan", &["--minutes NaN"]),
        ("--ledger --only fuse-nrom", &["--only fuse-nrom: there is no such pass; did you mean 'fuse-norm'?"]),
        ("--ledger --steps-for-error 0", &["--steps-for-error 0: from 1"]),
        ("--rounds 3", &["--ledger"]),
        ("--html x.html", &["--ledger"]),
        ("--against jax", &["pytorch"]),
        ("--steps-for-error 3", &["--steps-for-error is for --ledger, --baseline or --json"]),
        ("--ledger --also bf16 --only fuse-norm", &["--also bf16: --only leaves it out"]),
        ("--ledger --html x.json", &["--html x.json: a page's name ends in .html"]),
        ("--ledger --json x.html --html ./x.html", &["--json names the same file"]),
        ("--ledger --json /nonexist/x.json", &["--json /nonexist/x.json", "No such file"]),
    ] {
        bench(args).fails(parts);
    }
    // A limit of time that is over at once has its three rounds.
    let dir = tempdir().unwrap();
    let file = dir.path().join("short.json");
    let ran = bench(&format!("--ledger --minutes 0.0001 --repeat 1 --steps-for-error 1 --only fuse-norm --json {}", text(&file))).ok();
    assert_eq!(json(&file)["turns"]["rounds"], 3, "{}", ran.out);
    // With nothing to compare there is still the step.
    let said = bench("--ledger --rounds 3 --repeat 1 --steps-for-error 1 --only fp8").ok().out;
    assert!(said.contains("1 is off (--also NAME times it): fp8") && said.contains("ms a step"), "{said}");
}

/// A stand-in for Python: with or without torch, and with a peer of the small step.
fn python(dir: &Path, torch: bool) -> String {
    let bin = dir.join(if torch { "with" } else { "without" });
    fs::create_dir(&bin).unwrap();
    let args: Vec<String> =
        ["hydra"].iter().chain(SMALL).map(|a| format!("\"{a}\"")).filter(|a| a != "\"--threads\"" && a != "\"1\"").collect();
    let args = args.join(",");
    let answer = r#"{"small": {"conditions": "2 x 32", "kiln": {"per_s": 300.0, "unit": "tok"}, "usual": {"per_s": 100.0}, "expert": {"per_s": 200.0}}}"#;
    let script = match torch {
        false => "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n".to_string(),
        true => format!(
            "#!/bin/sh\nif [ \"$1\" = -c ]; then echo cuda; exit; fi\ncase \"$*\" in\n*--list*) echo '[[\"small\", [{args}]], [\"other\", [\"hydra\"]]]';;\n\
             *small*--pass*fuse-norm=off*) while [ \"$1\" != --json ]; do shift; done; echo '{answer}' > \"$2\";;\n*) echo \"$*\" >&2; exit 1;;\nesac\n"
        ),
    };
    for name in ["python3", "python"] {
        fs::write(bin.join(name), &script).unwrap();
        fs::set_permissions(bin.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    format!("{}:/usr/bin:/bin", bin.display())
}

#[test]
fn pytorch_is_asked_where_it_is_and_said_to_be_missing_where_not() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("peers.json");
    let run = |path: &str, more: &[&str]| {
        let args = ["bench", "hydra"].iter().chain(SMALL).chain(&["--repeat", "1", "--warmup", "0", "--against", "pytorch"]);
        let mut c = command(args.chain(more));
        c.env("PATH", path).env_remove("VIRTUAL_ENV").env("XDG_CACHE_HOME", dir.path().join("cache"));
        finish(c)
    };
    run(&python(dir.path(), false), &[]).fails(&[
        "--against pytorch: no Python here has PyTorch",
        "No module named 'torch'",
        "pip install torch",
    ]);
    let with = python(dir.path(), true);
    let said = run(&with, &["--pass", "fuse-norm=off", "--steps-for-error", "1", "--json", &text(&file)]).ok().out;
    assert!(said.contains("small: 2 x 32") && said.contains("3.00x") && said.contains("1.50x"), "{said}");
    assert_eq!(json(&file)["peers"]["small"]["usual"]["per_s"], 100.0);
    run(&with, &["--set", "batch=7"]).fails(&["no peer has this step", "small: kiln bench hydra --preset tiny", "other: kiln bench hydra"]);
}

#[test]
fn ledgers_of_a_folder_are_one_picture() {
    let dir = tempdir().unwrap();
    let folder = dir.path().join("ledgers");
    fs::create_dir(&folder).unwrap();
    let svg = dir.path().join("ledger.svg");
    let draw = || kiln(["bench", "--picture", &text(&svg), "--ledgers", &text(&folder)]);
    draw().fails(&["no JSON files there"]);
    let one = folder.join("first.json");
    bench(&format!("--ledger --rounds 3 --repeat 1 --steps-for-error 1 --only flash-attention,fuse-norm --json {}", text(&one))).ok();
    planted(&one, "second.json", |m| {
        for l in m["ledger"].as_array_mut().unwrap() {
            (l["gain"], l["verdict"]) = (serde_json::json!({ "median": 0.5, "low": 0.4, "high": 0.6 }), "faster".into());
        }
    });
    draw().ok();
    let drawn = fs::read_to_string(&svg).unwrap();
    for part in
        ["first", "second", "flash-attention", "fuse-norm", "guides promise", "1.5-2x (CUDA Plan)", "1.3-2x an op (HYDRA)", "cpu, 1 thread"]
    {
        assert!(drawn.contains(part), "{part}");
    }
    fs::write(folder.join("third.json"), "{}").unwrap();
    draw().fails(&["third.json is not what"]);
    let plain = folder.join("third.json");
    bench(&format!("--repeat 1 --warmup 0 --steps-for-error 1 --json {}", text(&plain))).ok();
    draw().fails(&["third.json has no ledger"]);
    kiln(["bench", "hydra", "--picture", "x.svg", "--ledgers", "."]).fails(&["--picture"]);
}

/// docs/img/ledger.svg is what bench/ledger draws, and both the picture and the page name every guide.
#[test]
fn the_picture_of_the_docs_is_that_of_the_ledgers() {
    let dir = tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let svg = dir.path().join("ledger.svg");
    kiln(["bench", "--picture", &text(&svg), "--ledgers", &text(&root.join("bench/ledger"))]).ok();
    let drawn = fs::read_to_string(&svg).unwrap();
    is_current("docs/img/ledger.svg", &drawn);
    let page = read("docs/measuring.md");
    for guide in [
        "CUDA Optimization Plan",
        "Vision-BDH Performance Optimization Guide",
        "Frontier Optimizations for HYDRA Training",
        "CUDA Optimization Design Notes",
        "Trainer2 Optimization Guide",
    ] {
        assert!(drawn.contains(guide) && page.contains(guide), "{guide}");
    }
    assert!(drawn.contains("measured at an earlier commit") || page.contains("99% intervals"), "the picture says of which code it is");
}

/// What docs/measuring.md says of single passes is in bench/ledger.
#[test]
fn the_figures_of_passes_are_those_of_the_ledgers() {
    let of = |name: &str, pass: &str| {
        let m = json(&Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../bench/ledger/{name}.json")));
        let line = line(&m, pass).clone();
        let saved = 1.0 - number(&line["peak"]) / number(&line["peak_off"]);
        (1.0 + number(&line["gain"]["median"]), 100.0 * saved)
    };
    let flash = |name: &str| of(name, "flash-attention");
    let [polychromic, gpt2, hydra, lior, hrm] = ["polychromic", "gpt2-124m", "hydra", "lior", "hrm"].map(flash);
    assert_eq!(format!("{:.1}", gpt2.0), format!("{:.1}", hydra.0));
    let loss = ["gpt2-124m", "hydra", "polychromic"].map(|name| of(name, "linear-cross-entropy").1);
    let page = read("docs/measuring.md");
    for said in [
        format!("{:.1}x (polychromic), {:.1}x (gpt2-124m, hydra), {:.1}x (lior), {:.1}x (hrm)", polychromic.0, gpt2.0, lior.0, hrm.0),
        format!("against attention written out; {:.0} to {:.0}% of the memory", hrm.1, gpt2.1),
        format!("{:.2}x (gpt2-124m), {:.2}x (hydra)", of("gpt2-124m", "fp8").0, of("hydra", "fp8").0),
        format!("the peak grows by {:.0}%", -of("gpt2-124m", "fp8").1),
        format!("{:.3}x for hrm's small kernels", of("hrm", "cuda-graph").0),
        format!("takes {:.1} times as long", of("hrm", "grouped-gemm").0),
        format!("of the peak {:.0} to {:.0}%", loss.iter().copied().fold(f64::MAX, f64::min), loss.iter().copied().fold(0.0, f64::max)),
    ] {
        assert!(page.contains(&said), "docs/measuring.md does not say '{said}'");
    }
}

/// Every third step of this recipe takes much longer: a median of single steps would never see it.
#[test]
fn steps_that_differ_are_timed_in_whole_periods() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("mixed.json");
    let small = "bench polychromic --preset tiny --threads 1 --set pretrain=0 --set batch=1 --set every=3 --set replies=2 --set prompts=4 --set new_tokens=32";
    let run = |args: &str| {
        let file = text(&file);
        kiln(small.split_whitespace().chain(args.split_whitespace()).chain(["--json", &file])).ok();
        json(Path::new(&file))
    };
    let plain = run("--set objective.weight=0 --repeat 4 --warmup 0");
    assert_eq!((&plain["period"], plain["times"].as_array().unwrap().len()), (&1.into(), 4));
    let mixed = run("--repeat 4 --warmup 0");
    assert_eq!(
        (&mixed["period"], &mixed["repeat"], mixed["times"].as_array().unwrap().len()),
        (&3.into(), &3.into(), 2),
        "4 steps are 2 periods"
    );
    assert!(number(&mixed["ms"]) > 1.2 * number(&plain["ms"]), "{} beside {}", mixed["ms"], plain["ms"]);
    let ledger = run("--ledger --rounds 3 --repeat 2 --steps-for-error 1 --only fuse-norm");
    assert_eq!((&ledger["turns"]["steps"], &line(&ledger, "fuse-norm")["steps"]), (&3.into(), &serde_json::json!([3, 3, 3])));
    assert!(number(&ledger["ms"]) > 1.2 * number(&plain["ms"]), "{} beside {}", ledger["ms"], plain["ms"]);
}
