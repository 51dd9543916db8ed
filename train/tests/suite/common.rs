//! What the tests of the command line share: running the built `kiln` on models of a few thousand weights, and looking at what it
//! left.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A model whose step takes a millisecond. Its schedule is longer than any run here, so that a run that is made in parts has the rates of the whole.
pub const SMALL: &[&str] = &[
    "--preset",
    "tiny",
    "--set",
    "dim=32",
    "--set",
    "blocks=2",
    "--set",
    "hidden=32",
    "--set",
    "seq=32",
    "--set",
    "batch=2",
    "--set",
    "heads=2",
    "--set",
    "kv_heads=1",
    "--set",
    "eval_batches=1",
    "--set",
    "horizon=600",
    "--threads",
    "1",
];

/// How a process ended and what it wrote.
#[derive(Debug)]
pub struct Ran {
    pub command: String,
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    pub fn new(command: String, o: Output) -> Ran {
        let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
        Ran { command, code: o.status.code(), out: text(&o.stdout), err: text(&o.stderr) }
    }

    #[track_caller]
    pub fn ok(self) -> Ran {
        assert_eq!(self.code, Some(0), "{self:#?}");
        assert!(!self.panicked(), "{self:#?}");
        self
    }

    pub fn panicked(&self) -> bool {
        self.err.contains("panicked") || self.out.contains("panicked")
    }

    /// What is wrong with how it failed: it must end by itself, not with 0, not by a panic, and say every one of `parts`.
    pub fn problem(&self, parts: &[&str]) -> Option<String> {
        let seen = format!("\n  {}\n  exit {:?}\n  stderr: {}", self.command, self.code, self.err.trim());
        match self.code {
            _ if self.panicked() => return Some(format!("it panicked{seen}")),
            None => return Some(format!("a signal ended it{seen}")),
            Some(0) => return Some(format!("it was accepted{seen}")),
            Some(1 | 2) => {}
            Some(code) => return Some(format!("exit code {code}{seen}")),
        }
        let missing: Vec<&&str> = parts.iter().filter(|p| !self.err.contains(**p)).collect();
        (!missing.is_empty()).then(|| format!("the message lacks {missing:?}{seen}"))
    }

    #[track_caller]
    pub fn fails(&self, parts: &[&str]) {
        if let Some(problem) = self.problem(parts) {
            panic!("{problem}");
        }
    }
}

pub fn command<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_kiln"));
    // These are tests of the CPU, on a machine with a GPU too.
    c.args(args).env("RUST_BACKTRACE", "0").env("CUDA_VISIBLE_DEVICES", "").stdin(Stdio::null());
    c
}

pub fn finish(mut c: Command) -> Ran {
    let shown = c.get_args().map(|a| a.to_string_lossy()).collect::<Vec<_>>().join(" ").replace(&SMALL.join(" "), "SMALL");
    Ran::new(shown, c.output().unwrap())
}

pub fn kiln<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ran {
    finish(command(args))
}

/// `kiln train hydra` on the small model; `args` are split at spaces.
pub fn train_args(out: &Path, args: &str) -> Vec<String> {
    let mut all: Vec<String> = ["train", "hydra"].iter().chain(SMALL).map(|s| s.to_string()).collect();
    all.extend(["--out".into(), text(out)]);
    all.extend(args.split_whitespace().map(str::to_owned));
    all
}

pub fn train(out: &Path, args: &str) -> Ran {
    kiln(train_args(out, args))
}

/// Goes on with a run; its own config says the rest.
pub fn resume(out: &Path, args: &str) -> Ran {
    let mut all = vec!["train".into(), "--threads".into(), "1".into(), "--out".into(), text(out), "--resume".into()];
    all.extend(args.split_whitespace().map(str::to_owned));
    kiln(all)
}

pub fn text(p: &Path) -> String {
    p.to_str().unwrap().into()
}

pub fn start(args: Vec<String>) -> Child {
    command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// As from a terminal. Tests that run in a shell's background ignore SIGINT, under nohup SIGHUP, and so would what they start.
pub fn start_in_foreground(args: Vec<String>) -> Child {
    in_foreground(command(args)).spawn().unwrap()
}

pub fn in_foreground(plain: Command) -> Command {
    let mut command = Command::new("env");
    command.arg("--default-signal=INT,HUP").arg(plain.get_program()).args(plain.get_args());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([format!("-{name}"), child.id().to_string()]).status().unwrap();
    assert!(sent.success(), "kill -{name}");
}

pub fn end(child: Child) -> Ran {
    let name = format!("process {}", child.id());
    Ran::new(name, child.wait_with_output().unwrap())
}

/// Waits until `ready`; a process that ends first, or a minute, fails the test.
#[track_caller]
pub fn wait_until(child: &mut Child, mut ready: impl FnMut() -> bool) {
    let started = Instant::now();
    while !ready() {
        if let Some(status) = child.try_wait().unwrap() {
            panic!("it ended with {status} before what was waited for");
        }
        assert!(started.elapsed() < Duration::from_secs(60), "waited for a minute");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// (step, loss) of every training record, in the file's order; a loss that is not finite is None.
pub fn losses(out: &Path) -> Vec<(u64, Option<f64>)> {
    records(out, "train").iter().map(|r| (r["step"].as_u64().unwrap(), r["loss"].as_f64())).collect()
}

/// The same where a later record of a step replaces an earlier one, sorted by step.
pub fn final_losses(out: &Path) -> Vec<(u64, Option<f64>)> {
    let all: std::collections::BTreeMap<u64, Option<f64>> = losses(out).into_iter().collect();
    all.into_iter().collect()
}

pub fn records(out: &Path, kind: &str) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter(|l| l.ends_with('\n'));
    let all: Vec<_> = whole.map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap_or_else(|e| panic!("{l}: {e}"))).collect();
    all_meant(out, &all);
    all.into_iter().filter(|r| kind == "train" || r.get("val_loss").is_some()).collect()
}

pub fn checkpoint(out: &Path, step: u64) -> PathBuf {
    out.join("checkpoints").join(format!("step-{step:08}"))
}

/// Of what `kiln eval --json` found, every number has its meaning and direction.
#[track_caller]
pub fn all_declared(evaluated: &serde_json::Value) {
    let found = evaluated.as_object().unwrap().iter().filter(|(_, v)| v.is_number()).map(|(name, _)| name);
    let metrics: Vec<&String> = found.filter(|n| !["step", "batches", "of_batches", "floor"].contains(&n.as_str())).collect();
    assert!(!metrics.is_empty(), "{evaluated}");
    for name in metrics {
        let said = &evaluated["metrics"][name];
        assert!(said["about"].is_string() && ["higher", "lower", "neither"].map(Some).contains(&said["better"].as_str()), "{name}: {said}");
    }
}

/// Every number that a run records is one that its recipe, or every run, declares: with a line on what it means and its direction.
#[track_caller]
pub fn all_meant(out: &Path, records: &[serde_json::Value]) {
    let config: toml::Table = fs::read_to_string(out.join("config.toml")).unwrap_or_default().parse().unwrap_or_default();
    let Some(recipe) = config.get("recipe").and_then(|r| kiln::recipe::find(r.as_str()?).ok()) else { return };
    // A number that is not finite is null.
    let numbers = records.iter().filter_map(|r| r.as_object()).flatten().filter(|(_, v)| v.is_number() || v.is_null());
    let keys: std::collections::BTreeSet<&String> = numbers.map(|(key, _)| key).collect();
    for key in keys.into_iter().filter(|k| *k != "step") {
        let meant = kiln::recipe::Metric::of_key(recipe.metrics(), key);
        assert!(meant.is_some(), "{} records {key}, which neither its metrics nor recipe/metric.rs declare", recipe.name());
    }
}

/// The names in a folder, hidden ones too, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).map(|d| d.map(|e| e.unwrap().file_name().into_string().unwrap()).collect());
    let mut all: Vec<String> = entries.unwrap_or_default();
    all.sort();
    all
}

/// Names below `dir` that only a write which did not end would leave.
pub fn half_written(dir: &Path) -> Vec<String> {
    let mut found = vec![];
    for name in names(dir) {
        let path = dir.join(&name);
        if path.is_dir() {
            found.extend(half_written(&path).into_iter().map(|n| format!("{name}/{n}")));
        }
        if name.contains(".tmp") || name.contains(".old-") {
            found.push(name);
        }
    }
    found
}

#[track_caller]
pub fn same_bytes(a: &Path, b: &Path) {
    for file in ["model.safetensors", "state.safetensors"] {
        let (x, y) = (fs::read(a.join(file)).unwrap(), fs::read(b.join(file)).unwrap());
        assert!(x == y, "{file} of {} and {} differ", a.display(), b.display());
    }
}

pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for name in names(from) {
        let (a, b) = (from.join(&name), to.join(&name));
        if a.is_dir() {
            copy(&a, &b);
        } else {
            fs::copy(a, b).unwrap();
        }
    }
}

pub fn damage(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Splits at any white space, of which no token is left.
pub fn at_white_space() -> serde_json::Value {
    serde_json::json!({"type": "Whitespace"})
}

/// Splits at single spaces: a line break is a word.
pub fn at_spaces() -> serde_json::Value {
    serde_json::json!({"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": false})
}

/// A data set of words: a text file, a tokenizer of whole words, and `kiln data prepare`.
pub fn word_data(dir: &Path, words: &[&str], split: serde_json::Value) -> PathBuf {
    fs::create_dir_all(dir).unwrap();
    let mut vocab: serde_json::Map<String, serde_json::Value> = words.iter().enumerate().map(|(i, w)| (w.to_string(), i.into())).collect();
    vocab.insert("[unk]".into(), words.len().into());
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": split, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[unk]"}
    });
    let (spec, input, out) = (dir.join("words.json"), dir.join("words.txt"), dir.join("data"));
    fs::write(&spec, tokenizer.to_string()).unwrap();
    let sentence: Vec<&str> = (0..2000).map(|i| words[i * i % words.len()]).collect();
    fs::write(&input, sentence.join(" ")).unwrap();
    kiln(["data", "prepare", &text(&input), "--tokenizer", &text(&spec), "--val-share", "0.2", "--out", &text(&out)]).ok();
    out
}

/// A data set of generated text as bytes.
pub fn byte_data(out: &Path) -> PathBuf {
    kiln(["data", "prepare", "--generated", "200", "--val-share", "0.2", "--shard-tokens", "2000", "--out", &text(out)]).ok();
    out.into()
}

pub const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../reference/golden/hydra.safetensors");

/// One line of a table: arguments, and what the message must hold.
pub struct Case {
    pub args: Vec<String>,
    parts: Vec<String>,
}

/// `args` are split at spaces.
pub fn case(args: impl AsRef<str>, parts: &[&str]) -> Case {
    let args = args.as_ref().split_whitespace().map(str::to_owned).collect();
    Case { args, parts: parts.iter().map(|p| p.to_string()).collect() }
}

/// Every case must be refused; all that are not are reported together.
#[track_caller]
pub fn all_refused(cases: Vec<Case>) {
    let problem = |c: &Case| kiln(&c.args).problem(&c.parts.iter().map(|p| p.as_str()).collect::<Vec<_>>());
    let problems: Vec<String> = cases.iter().filter_map(problem).collect();
    assert!(problems.is_empty(), "{} of {} cases:\n{}", problems.len(), cases.len(), problems.join("\n"));
}
