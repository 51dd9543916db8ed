//! What kiln does while it is attacked: trainings, data sets and models that are written. A job can be interrupted anywhere, goes on by a
//! command that a script could run unattended, and must end as if nobody had disturbed it.

use super::process::Ran;
use super::{Finding, Kind, Place};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A language model whose step takes a millisecond.
pub const HYDRA: &str = "--preset tiny --set dim=32 --set blocks=2 --set hidden=32 --set seq=32 --set batch=2 --set heads=2 --set kv_heads=1 --set eval_batches=1 --threads 1";
const HRM: &str = "--set dim=16 --set heads=2 --set layers=1 --set experts=3 --set hidden=8 --set batch=5 --set max_segments=4 --set train_puzzles=50 --set test_puzzles=13 --set warmup=0 --threads 1";
const LIOR: &str = "--set dim=32 --set heads=2 --set seq=24 --set after=4 --set memory=20 --set field=[3,2,6,5] --set model.steps=6 --set rows=300 --set n=5 --set rotor_layers=3 --set batch=3 --set eval_batches=1 --threads 1";
const POLYCHROMIC: &str = "--set pretrain=0 --set dim=24 --set layers=2 --set head_dim=8 --set hidden=40 --set seq=16 --set batch=2 --set eval_batches=1 --set rank=2 --set dropout=0.1 --set objective.weight=0 --threads 1";
const VISION: &str = "--set image=16 --set patch=4 --set classes=2 --set dim=16 --set heads=2 --set multiplier=4 --set loops=2 --set batch=2 --set warmup=0 --set log_every=1 --threads 1";

pub struct Job {
    pub name: &'static str,
    /// Split at spaces; {} is the folder in which it takes place.
    args: String,
    again: String,
    /// What lies in that folder before.
    start: Option<PathBuf>,
    /// The folder after a run that nobody disturbed, and how long that took.
    reference: PathBuf,
    pub took: Duration,
    makes: Makes,
}

enum Makes {
    /// A run of so many steps in the folder `run`. Whether every checkpoint in it is whole.
    Run { steps: u64, whole: bool },
    /// A folder of this name, which appears whole or not at all.
    Folder(&'static str),
}

/// What an interruption left.
#[derive(Debug, PartialEq)]
pub enum Left {
    /// The newest checkpoint's step.
    Checkpoint(Option<u64>),
    Nothing,
    Before,
    Whole,
}

impl Job {
    fn new(place: &Place, name: &'static str, [args, again]: [String; 2], start: Option<PathBuf>, makes: Makes) -> Result<Job, String> {
        let reference = place.path("reference").join(name.replace(' ', "-"));
        let mut job = Job { name, args, again, start, reference, took: Duration::ZERO, makes };
        remove(&job.reference)?;
        job.begin(&job.reference)?;
        let ran = job.call(place, &job.reference).run();
        ran.good().map_err(|f| format!("before anything was attacked: {}", f.text))?;
        job.took = ran.took;
        Ok(job)
    }

    fn filled(args: &str, folder: &Path) -> Vec<String> {
        args.split(' ').filter(|a| !a.is_empty()).map(|a| a.replace("{}", &folder.display().to_string())).collect()
    }

    /// Puts into the folder what lies there before.
    pub fn begin(&self, folder: &Path) -> Result<(), String> {
        create(folder)?;
        self.start.as_ref().map_or(Ok(()), |start| copy(start, folder))
    }

    pub fn call(&self, place: &Place, folder: &Path) -> super::Call {
        place.call(Job::filled(&self.args, folder))
    }

    pub fn again(&self, place: &Place, folder: &Path) -> super::Call {
        place.call(Job::filled(&self.again, folder))
    }

    /// What there is after an interruption; something half-written under its own name is a loss.
    pub fn left(&self, folder: &Path) -> Result<Left, Finding> {
        let name = match self.makes {
            Makes::Run { .. } => return Ok(Left::Checkpoint(newest(&folder.join("run/checkpoints")))),
            Makes::Folder(name) => name,
        };
        let now = tree(&folder.join(name));
        let before = self.start.as_ref().map(|start| tree(&start.join(name)));
        if now.is_empty() {
            // What is replaced is set aside for a moment.
            let aside = |before: &_| names(folder).iter().any(|n| tree(&folder.join(n)) == *before);
            return match before.as_ref().is_none_or(aside) {
                true => Ok(Left::Nothing),
                false => Err(Finding::new(Kind::Loss, format!("{}: {name} is gone, and nothing is in its place", self.name))),
            };
        }
        if before.as_ref() == Some(&now) {
            return Ok(Left::Before);
        }
        match differs(&tree(&self.reference.join(name)), &now) {
            None => Ok(Left::Whole),
            Some(what) => Err(Finding::new(Kind::Loss, format!("{}: {name} is there, but not whole: {what}", self.name))),
        }
    }

    /// A run's newest checkpoint is never older than it was. One that is broken may have been set aside.
    pub fn loses(&self, before: &Left, now: &Left, ran: &Ran) -> Result<(), Finding> {
        match (before, now, &self.makes) {
            (Left::Checkpoint(a), Left::Checkpoint(b), Makes::Run { whole: true, .. }) if a > b => {
                Err(ran.finding(Kind::Loss, &format!("there was {before:?}, and afterwards there is {now:?}")))
            }
            _ => Ok(()),
        }
    }

    /// The newest checkpoint opens.
    pub fn opens(&self, place: &Place, folder: &Path, left: &Left) -> Result<(), Finding> {
        let (Left::Checkpoint(Some(step)), Makes::Run { whole: true, .. }) = (left, &self.makes) else { return Ok(()) };
        let ran = place.call(["eval", &folder.join("run").display().to_string(), "--threads", "1"]).run();
        ran.good()?;
        match ran.out.contains(&format!("(step {step})")) {
            true => Ok(()),
            false => Err(ran.finding(Kind::Loss, &format!("there was a checkpoint of step {step}"))),
        }
    }

    /// Nothing has been lost that was there when it was interrupted; then the end of it.
    pub fn goes_on(&self, place: &Place, folder: &Path, left: &Left) -> Result<(), Finding> {
        if *left != Left::Whole {
            let ran = self.again(place, folder).run();
            ran.good()?;
            self.keeps(&ran, left)?;
            // Every save takes away what killed ones left.
            let hidden = names(&folder.join("run/checkpoints")).into_iter().find(|n| n.starts_with('.'));
            if let Some(name) = hidden.filter(|_| !ran.out.contains("nothing to do")) {
                return Err(ran.finding(Kind::Loss, &format!("{name} is still there")));
            }
        }
        self.ended(folder)
    }

    /// A run that goes on takes the newest checkpoint that there was.
    pub fn keeps(&self, ran: &Ran, left: &Left) -> Result<(), Finding> {
        let (Left::Checkpoint(Some(newest)), Makes::Run { whole: true, steps }) = (left, &self.makes) else { return Ok(()) };
        match resumed_from(&ran.out) {
            Some(step) if step >= *newest => Ok(()),
            None if newest >= steps && ran.out.contains("nothing to do") => Ok(()),
            from => Err(ran.finding(Kind::Loss, &format!("there was a checkpoint of step {newest}, and it went on from {from:?}"))),
        }
    }

    /// The newest checkpoint that there is before.
    pub fn newest_before(&self) -> Option<u64> {
        newest(&self.start.as_ref()?.join("run/checkpoints"))
    }

    /// Everything is as if nobody had disturbed it.
    pub fn ended(&self, folder: &Path) -> Result<(), Finding> {
        let loss = |what: String| Err(Finding::new(Kind::Loss, format!("{}: {what}", self.name)));
        match self.makes {
            Makes::Run { steps, .. } => {
                let last = format!("run/checkpoints/step-{steps:08}");
                for file in ["model.safetensors", "state.safetensors"] {
                    let [ours, theirs] = [folder, &self.reference].map(|d| fs::read(d.join(&last).join(file)).ok());
                    if ours.is_none() || ours != theirs {
                        return loss(format!("{last}/{file} is missing, or has other bits than that of a run that nobody disturbed"));
                    }
                }
                let [ours, theirs] = [folder, &self.reference].map(|d| measured(&d.join("run/metrics.jsonl")));
                match ours.iter().zip(&theirs).find(|(a, b)| a != b) {
                    Some(((_, a), (_, b))) => loss(format!("metrics.jsonl says {a}, not {b}")),
                    None if ours.len() != theirs.len() => loss(format!("metrics.jsonl has {} steps, not {}", ours.len(), theirs.len())),
                    None => Ok(()),
                }
            }
            Makes::Folder(name) => match differs(&tree(&self.reference.join(name)), &tree(&folder.join(name))) {
                Some(what) => loss(format!("{name}: {what}")),
                None => Ok(()),
            },
        }
    }
}

/// The jobs that write files in every way there is; with `all`, trainings of every recipe, and longer ones.
pub fn jobs(place: &Place, all: bool) -> Result<Vec<Job>, String> {
    let (steps, saves) = if all { (60, 3) } else { (8, 2) };
    let train = |recipe: &str, sets: &str| {
        let args = format!(
            "train {recipe} {sets} --steps {steps} --set horizon={steps} --set save_every={saves} --set train.keep=2 --set eval_every=5 --out {{}}/run"
        );
        [args.clone(), format!("{args} --resume")]
    };
    let run = |whole| Makes::Run { steps, whole };
    let (docs, words) = documents(place)?;
    let photos = pictures(place)?;
    let vision = format!("{VISION} --data {}", photos.display());
    let mut jobs = vec![
        Job::new(place, "hydra", train("hydra", HYDRA), None, run(true))?,
        Job::new(place, "vision_bdh", train("vision_bdh", &vision), None, run(true))?,
    ];
    if all {
        for (recipe, sets) in [("hrm", HRM), ("lior", LIOR), ("polychromic", POLYCHROMIC)] {
            jobs.push(Job::new(place, recipe, train(recipe, sets), None, run(true))?);
        }
    } else {
        // A run whose last checkpoint is damaged, and is then replaced; and one that has only that to go on with.
        let [args, again] = train("hydra", HYDRA);
        let begun = place.path("begun");
        let half = args.replace("{}", &begun.display().to_string());
        remove(&begun)?;
        place.must(&half.replace(&format!("--steps {steps}"), "--steps 4"))?;
        let healthy = place.path("begun-healthy");
        copy(&begun, &healthy)?;
        let model = begun.join("run/checkpoints/step-00000004/model.safetensors");
        let mut bytes = fs::read(&model).map_err(|e| format!("{}: {e}", model.display()))?;
        bytes[1000] ^= 1;
        fs::write(&model, bytes).map_err(|e| format!("{}: {e}", model.display()))?;
        jobs.push(Job::new(place, "a damaged run", [again.clone(), again.clone()], Some(begun), run(false))?);
        jobs.push(Job::new(place, "a resumed run", [again.clone(), again], Some(healthy), run(true))?);
    }
    let prepare =
        format!("data prepare {} --tokenizer {} --val-share 0.2 --shard-tokens 100 --out {{}}/data", docs.display(), words.display());
    jobs.push(Job::new(place, "data prepare", [prepare.clone(), prepare.clone()], None, Makes::Folder("data"))?);
    let before = place.path("prepared-before");
    remove(&before)?;
    create(&before)?;
    place.must(&format!("data prepare --generated 20 --val-share 0.2 --out {}/data", before.display()))?;
    let force = format!("{prepare} --force");
    jobs.push(Job::new(place, "data prepare --force", [force.clone(), force], Some(before), Makes::Folder("data"))?);
    let adapted = place.path("adapted");
    remove(&adapted)?;
    place.must(&format!("train polychromic {POLYCHROMIC} --steps 2 --set horizon=2 --out {}", adapted.display()))?;
    let export = format!("export {} --merge --out {{}}/model", adapted.display());
    jobs.push(Job::new(place, "export", [export.clone(), export], None, Makes::Folder("model"))?);
    Ok(jobs)
}

/// Documents, and a tokenizer of whole words for them.
pub fn documents(place: &Place) -> Result<(PathBuf, PathBuf), String> {
    let (docs, spec) = (place.path("documents.jsonl"), place.path("words.json"));
    let words = ["red", "green", "blue", "one", "two", "three", "is", "and", "not", "a"];
    let line =
        |i: usize| format!("{{\"text\":\"{}\"}}\n", (0..20).map(|j| words[(i * i + 3 * j + j * j) % 10]).collect::<Vec<_>>().join(" "));
    let vocab: Vec<String> = words.iter().chain(&["[unk]"]).enumerate().map(|(i, w)| format!("\"{w}\":{i}")).collect();
    let tokenizer = format!(
        "{{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[],\"normalizer\":null,\"pre_tokenizer\":{{\"type\":\"Whitespace\"}},\
         \"post_processor\":null,\"decoder\":null,\"model\":{{\"type\":\"WordLevel\",\"vocab\":{{{}}},\"unk_token\":\"[unk]\"}}}}",
        vocab.join(",")
    );
    let written = fs::write(&docs, (0..40).map(line).collect::<String>()).and_then(|()| fs::write(&spec, tokenizer));
    written.map(|()| (docs, spec)).map_err(|e| format!("{}: {e}", place.dir.path().display()))
}

/// Pictures of two classes: sheets that kiln draws.
pub fn pictures(place: &Place) -> Result<PathBuf, String> {
    let folder = place.path("photos");
    if folder.exists() {
        return Ok(folder);
    }
    for (i, name) in ["train/a/1", "train/a/2", "train/b/1", "train/b/2", "val/a/1", "val/b/1"].iter().enumerate() {
        let path = folder.join(format!("{name}.png"));
        create(path.parent().unwrap_or(&folder))?;
        place.must(&format!("data preview --seed {i} --count 10 --split val --out {}", path.display()))?;
    }
    Ok(folder)
}

/// The step in `resumed from FOLDER (step N)`.
fn resumed_from(out: &str) -> Option<u64> {
    let (_, rest) = out.split_once("resumed from ")?;
    rest.split_once("(step ")?.1.split_once(')')?.0.parse().ok()
}

fn newest(checkpoints: &Path) -> Option<u64> {
    names(checkpoints).iter().filter_map(|n| n.strip_prefix("step-")?.parse().ok()).max()
}

/// What was measured at each step, by the last record of it, and what its evaluation found. Speeds ("per_second" and what follows) may differ.
fn measured(metrics: &Path) -> BTreeMap<u64, String> {
    let text = fs::read_to_string(metrics).unwrap_or_default();
    let step = |line: &str| line.strip_prefix("{\"step\":")?.split([',', '}']).next()?.parse::<u64>().ok();
    let is_found = |field: &&str| field.starts_with("\"val_") || field.starts_with("\"epoch_");
    let without_times = |line: &str| {
        let (training, rest) = line.split_once(",\"per_second\"")?;
        let found: Vec<&str> = rest.trim_end_matches('}').split(',').filter(is_found).collect();
        Some(format!("{training},{}", found.join(",")))
    };
    text.lines().filter_map(|line| Some((step(line)?, without_times(line)?))).collect()
}

// ---- folders

pub fn create(folder: &Path) -> Result<(), String> {
    fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))
}

pub fn remove(folder: &Path) -> Result<(), String> {
    match fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(format!("{}: {e}", folder.display())),
        _ => Ok(()),
    }
}

/// The names in a folder, sorted; none where it cannot be read.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut all: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    all.sort();
    all
}

pub fn copy(from: &Path, to: &Path) -> Result<(), String> {
    create(to)?;
    for name in names(from) {
        let (a, b) = (from.join(&name), to.join(&name));
        if a.is_dir() {
            copy(&a, &b)?;
        } else {
            fs::copy(&a, &b).map_err(|e| format!("{}: {e}", a.display()))?;
        }
    }
    Ok(())
}

/// Every file below a folder, by its path inside, with its bytes.
pub fn tree(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for name in names(folder) {
        let path = folder.join(&name);
        if path.is_dir() {
            all.extend(tree(&path).into_iter().map(|(n, bytes)| (format!("{name}/{n}"), bytes)));
        } else {
            all.insert(name, fs::read(path).unwrap_or_default());
        }
    }
    all
}

fn differs(expected: &BTreeMap<String, Vec<u8>>, found: &BTreeMap<String, Vec<u8>>) -> Option<String> {
    let missing = expected.keys().find(|n| !found.contains_key(*n)).map(|n| format!("{n} is missing"));
    let more = || found.keys().find(|n| !expected.contains_key(*n)).map(|n| format!("{n} is there, too"));
    let other = || expected.iter().find(|(n, bytes)| found.get(*n) != Some(bytes)).map(|(n, _)| format!("{n} is another"));
    missing.or_else(more).or_else(other)
}
