//! How a run ends: by a signal in an evaluation, which is made up for, or with numbers that are not finite, which is no success.

use super::common::{checkpoint, kiln, names, text};
use engine::ranks::threads;
use engine::{Cpu, DType, Device, Init, Recorder, Var};
use kiln::checkpoint::Tensor;
use kiln::config::{Config, Section, TrainConfig};
use kiln::data::{DataError, Item, Source};
use kiln::metrics;
use kiln::recipe::{Evaluation, Feeds, Metric, Model, Pending, Session, Supervised, Task, TrainError};
use kiln::run::{self, Finished, Options, Start};
use serde_json::{Value, json};
use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A weight that falls from 1 by the rate in every step. Validation wants it to be 0.6, where with a rate of 0.1 it is after step 4.
#[derive(Clone, Default)]
struct Falls {
    epoch: Option<u64>,
    /// When a signal comes.
    signal: Option<Signal>,
    stop: Arc<AtomicBool>,
    /// Micro-batches of training and batches of evaluations so far.
    seen: [Cell<u64>; 2],
    /// Which of both is the root of the weight less 0.45, and so NaN from the seventh step on.
    root: [bool; 2],
    /// The validation data's fingerprint.
    validation: &'static str,
    /// Whether one of the rows has an infinite part in the loss.
    infinite_row: bool,
}

impl Falls {
    /// The same in a process of its own, to which this signal comes.
    fn told(&self, signal: Option<Signal>) -> Falls {
        Falls { signal, stop: Arc::default(), seen: Default::default(), ..self.clone() }
    }
}

#[derive(Clone, Copy, Debug)]
enum Signal {
    InStep(u64),
    InEvaluation(u64),
}

const BATCHES: u64 = 4;

impl Model for Falls {
    fn seq(&self) -> usize {
        1
    }
    fn vocab(&self) -> usize {
        2
    }
    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let f = Feeds::new(r, batch, 1);
        let w = r.param("w", &[1], Init::Full(1.0));
        let rows = (r.full(&[batch, 1], 1.0) / f.ids.cast(DType::F32)).sum();
        vec![("loss", if self.root[0] { (w + -0.45).sqrt() } else { w } * rows * f.weight)]
    }
    fn evaluate<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let f = Feeds::new(r, batch, 1);
        let w = r.param("w", &[1], Init::Full(1.0));
        let rows = (f.ids.cast(DType::F32) * 0.0).sum() + 1.0;
        vec![("loss", if self.root[1] { (w + -0.45).sqrt() } else { (w + -0.6).square() } * rows)]
    }
    /// Called once for each batch that is computed.
    fn more(&self, train: bool, _: &mut [i32]) -> Option<(&'static str, Vec<u8>)> {
        let seen = &self.seen[usize::from(!train)];
        seen.set(seen.get() + 1);
        let comes = match self.signal {
            Some(Signal::InStep(at)) => train && at == seen.get(),
            Some(Signal::InEvaluation(at)) => !train && at == seen.get(),
            None => false,
        };
        if comes {
            self.stop.store(true, Ordering::SeqCst);
        }
        None
    }
    fn metrics(&self) -> &'static [Metric] {
        &[Metric::LOSS]
    }
    fn epoch(&self) -> Option<u64> {
        self.epoch
    }
    fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError> {
        Ok(Arc::new(Rows { infinite: train && self.infinite_row }))
    }
    fn identity(&self) -> Result<Value, TrainError> {
        Ok(json!({ "data": "same", "validation": self.validation }))
    }
}

struct Rows {
    infinite: bool,
}

impl Source for Rows {
    fn len(&self) -> u64 {
        2 * BATCHES
    }
    fn item(&self, i: u64) -> Result<Item, DataError> {
        Ok(Item { ids: vec![i32::from(!(self.infinite && i == 0))], targets: vec![0], ..Item::default() })
    }
    fn entropy_floor(&self) -> Option<f64> {
        None
    }
}

fn config(steps: u64, more: &str) -> Config {
    let same =
        "batch = 2\nhorizon = 100\nschedule = \"constant\"\nlearning_rate = 0.1\nweight_decay = 0.0\neval_batches = 0\nlog_every = 1";
    let same: Vec<&str> = same.lines().filter(|line| !more.contains(&line[..line.find('=').unwrap() + 1])).collect();
    Config::preset("falls", "test", vec![TrainConfig::keys("train")], &format!("[train]\nsteps = {steps}\n{}\n{more}\n", same.join("\n")))
}

fn options(out: &Path, start: Start, model: &Falls) -> Options {
    Options { out: out.into(), start, stop: model.stop.clone(), ..Options::default() }
}

fn train(out: &Path, steps: u64, start: Start, more: &str, model: Falls) -> Result<Finished, TrainError> {
    let (c, options) = (config(steps, more), options(out, start, &model));
    let mut task = Supervised::new(model, c.section::<TrainConfig>("train").unwrap(), c.seed());
    run::train(&mut task, &c, &Device::cpu(Cpu::new(1)), &options)
}

/// What was recorded of each step, without times; of steps that were repeated the last.
fn recorded(out: &Path) -> Vec<serde_json::Map<String, Value>> {
    let times = |key: &str| ["per_second", "step_ms", "data_wait_ms", "slow_steps"].contains(&key) || key.starts_with("phase_ms");
    let mut all = metrics::read(&out.join("metrics.jsonl")).unwrap().all;
    all.iter_mut().for_each(|record| record.retain(|key, _| !times(key)));
    all
}

fn note(out: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(out.join("run.json")).unwrap()).unwrap()
}

/// What the checkpoint of a step holds that does not tell how often its run was stopped.
fn held(out: &Path, step: u64) -> (Value, Value, Vec<Vec<u8>>) {
    let at = checkpoint(out, step);
    let meta: Value = serde_json::from_str(&fs::read_to_string(at.join("checkpoint.json")).unwrap()).unwrap();
    let files = names(&at).into_iter().filter(|name| name.ends_with(".safetensors"));
    let meta = if meta["meta"].is_object() { &meta["meta"] } else { &meta };
    assert!(meta["figures"].is_object(), "{meta}");
    (meta["best"].clone(), meta["figures"].clone(), files.map(|name| fs::read(at.join(name)).unwrap()).collect())
}

#[test]
fn an_evaluation_that_a_signal_stopped_is_made_up_for_to_the_last_bit() {
    let dir = tempfile::tempdir().unwrap();
    let epochs = Falls { epoch: Some(2 * BATCHES), ..Falls::default() };
    // Settings; steps; evaluations, and after which steps they are.
    type Variant = (&'static str, &'static str, Falls, u64, &'static [u64]);
    let variants: [Variant; 5] = [
        ("steps", "eval_every = 2\nkeep = 1", Falls::default(), 6, &[2, 4, 6]),
        ("rarely logged", "eval_every = 3\nlog_every = 4\nsave_every = 2", Falls::default(), 9, &[3, 6, 9]),
        ("epochs", "eval_every = 0\nlog_every = 2", epochs.clone(), 8, &[4, 8]),
        ("averaged", "eval_every = 2\nema = 0.5", Falls::default(), 6, &[2, 4, 6]),
        ("patience", "eval_every = 1\npatience = 2\nlog_every = 3", Falls::default(), 50, &[1, 2, 3, 4, 5, 6]),
    ];
    for (name, more, model, steps, evaluations) in &variants {
        let whole = dir.path().join(format!("{name}-whole"));
        let last = train(&whole, *steps, Start::New, more, model.told(None)).unwrap().step;
        assert_eq!(last, evaluations[evaluations.len() - 1], "{name}");
        let during = evaluations.iter().enumerate().map(|(i, at)| (*at, Signal::InEvaluation(i as u64 * BATCHES + 2)));
        for (at, signal) in evaluations.iter().map(|at| (*at, Signal::InStep(*at))).chain(during) {
            let (what, out) = (format!("{name}, {signal:?}"), dir.path().join(format!("{name}-{signal:?}")));
            let stopped = train(&out, *steps, Start::New, more, model.told(Some(signal))).unwrap();
            assert!(stopped.interrupted && stopped.step == at && note(&out)["status"] == "stopped", "{what}: {}", note(&out));
            assert!(recorded(&out).iter().all(|r| r["step"] != at || !r.contains_key("val_loss")), "{what}");
            let ended = train(&out, *steps, Start::Newest, more, model.told(None)).unwrap();
            assert!(!ended.interrupted && ended.step == last && note(&out)["status"] == "finished", "{what}: {}", note(&out));
            assert_eq!(recorded(&out), recorded(&whole), "{what}");
            assert_eq!(held(&out, last), held(&whole, last), "{what}");
            assert_eq!(out.join("best").read_link().unwrap(), whole.join("best").read_link().unwrap(), "{what}");
            // Nothing is left to do, and nothing is done.
            let before = fs::read(out.join("metrics.jsonl")).unwrap();
            assert_eq!(train(&out, *steps, Start::Newest, more, model.told(None)).unwrap().step, last);
            assert_eq!(fs::read(out.join("metrics.jsonl")).unwrap(), before, "{what}");
        }
    }
    // As people see it.
    let listed: Value = serde_json::from_str(&kiln(["runs", &text(dir.path()), "--json"]).ok().out).unwrap();
    let all: Vec<_> = listed.as_array().unwrap().iter().filter(|r| r["name"].as_str().unwrap().starts_with("steps-")).collect();
    assert!(all.len() == 7 && all.iter().all(|r| r["status"] == "finished" && r["step"] == 6 && r["best"]["step"] == 4), "{listed:#}");
}

/// The evaluation that is made up for may be stopped, too, and the run may be told to end where it stopped.
#[test]
fn an_evaluation_is_made_up_for_when_a_run_is_resumed_at_last() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, out) = (dir.path().join("whole"), dir.path().join("out"));
    let more = "eval_every = 4";
    train(&whole, 4, Start::New, more, Falls::default()).unwrap();
    let told = |signal| Falls { signal: Some(signal), ..Falls::default() };
    for (i, signal) in [Signal::InStep(4), Signal::InEvaluation(1), Signal::InEvaluation(3)].into_iter().enumerate() {
        let start = if i == 0 { Start::New } else { Start::Newest };
        assert!(train(&out, 4, start, more, told(signal)).unwrap().interrupted);
        assert_eq!(recorded(&out).len(), 4);
    }
    assert!(!train(&out, 4, Start::Newest, more, Falls::default()).unwrap().interrupted);
    assert_eq!((recorded(&out), held(&out, 4)), (recorded(&whole), held(&whole, 4)));
    // Stopped at step 3 of 9, and then asked for no more than three.
    let (whole, out) = (dir.path().join("three"), dir.path().join("three of nine"));
    train(&whole, 3, Start::New, more, Falls::default()).unwrap();
    assert!(train(&out, 9, Start::New, more, told(Signal::InStep(3))).unwrap().interrupted);
    assert!(!train(&out, 3, Start::Newest, more, Falls::default()).unwrap().interrupted);
    assert_eq!((recorded(&out), held(&out, 3)), (recorded(&whole), held(&whole, 3)));
    assert_eq!(note(&out)["status"], "finished");
}

fn on_ranks(out: &Path, steps: u64, start: Start, more: &str, model: &Falls) -> Vec<Result<Finished, String>> {
    let (infinite_row, root) = (model.infinite_row, model.root);
    threads::each(2, 1, |ranks| {
        let mut c = config(steps, more);
        c.ranks = ranks;
        let model = Falls { infinite_row, root, ..Falls::default() };
        let options = options(out, start.clone(), &model);
        let mut task = Supervised::new(model, c.section::<TrainConfig>("train").unwrap(), c.seed());
        run::train(&mut task, &c, &Device::cpu(Cpu::new(1)), &options).map_err(|e| e.to_string())
    })
}

#[test]
fn several_ranks_make_up_for_an_evaluation_too() {
    let dir = tempfile::tempdir().unwrap();
    for at in [2, 4] {
        let (whole, out) = (dir.path().join(format!("whole-{at}")), dir.path().join(format!("out-{at}")));
        let more = "eval_every = 2\nema = 0.5";
        train(&whole, 4, Start::New, more, Falls::default()).unwrap();
        let signal = Signal::InEvaluation((at / 2 - 1) * BATCHES + 2);
        assert!(train(&out, 4, Start::New, more, Falls { signal: Some(signal), ..Falls::default() }).unwrap().interrupted);
        for ended in on_ranks(&out, 4, Start::Newest, more, &Falls::default()) {
            assert!(ended.is_ok_and(|e| !e.interrupted && e.step == 4), "{at}");
        }
        // Numbers of a few sums are the same, however they are divided.
        assert_eq!((recorded(&out), note(&out)["status"].as_str()), (recorded(&whole), Some("finished")), "{at}");
        assert_eq!(held(&out, 4), held(&whole, 4), "{at}");
    }
}

/// A stop in a validation, which uses the averages, leaves both kinds of weights where they belong.
#[test]
fn averages_and_weights_are_not_exchanged_by_a_stop_in_a_validation() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, out) = (dir.path().join("whole"), dir.path().join("out"));
    let more = "eval_every = 3\nema = 0.9\nsave_every = 1\nkeep = 0";
    train(&whole, 5, Start::New, more, Falls::default()).unwrap();
    train(&out, 5, Start::New, more, Falls { signal: Some(Signal::InEvaluation(2)), ..Falls::default() }).unwrap();
    let files = |run: &Path| ["model.safetensors", "averaged.safetensors"].map(|f| fs::read(checkpoint(run, 3).join(f)).unwrap());
    let [model, averaged] = files(&whole);
    assert!(model != averaged, "the test shows nothing where they are the same");
    assert!(files(&out) == [model, averaged]);
}

/// A run that was killed behind its last save draws and writes what belongs to its end.
#[test]
fn a_run_that_was_killed_at_its_end_comes_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    train(&out, 4, Start::New, "eval_every = 2", Falls::default()).unwrap();
    let before = recorded(&out);
    fs::remove_file(out.join("loss.svg")).unwrap();
    let mut killed = note(&out);
    killed["status"] = "running".into();
    fs::write(out.join("run.json"), killed.to_string()).unwrap();
    assert_eq!(train(&out, 4, Start::Newest, "eval_every = 2", Falls::default()).unwrap().step, 4);
    assert!(out.join("loss.svg").exists() && note(&out)["status"] == "finished" && recorded(&out) == before);
}

#[track_caller]
fn refused(ended: Result<Finished, TrainError>, parts: &[&str]) {
    let said = ended.err().expect("it is no success").to_string();
    assert!(parts.iter().all(|part| said.contains(part)), "{said}");
}

#[test]
fn a_run_that_ends_with_skipped_steps_is_no_success() {
    let dir = tempfile::tempdir().unwrap();
    let root = || Falls { root: [true, false], ..Falls::default() };
    for (steps, said) in [(7, "the last step had"), (9, "3 steps in a row had")] {
        let (out, more) = (dir.path().join(steps.to_string()), "eval_every = 3\nsave_every = 6\nkeep = 1\nkeep_best = false");
        let last = format!("the last at step {steps}");
        refused(train(&out, steps, Start::New, more, root()), &[said, &last, "loss is NaN at step 7", "weights are those of step 6"]);
        assert!(note(&out)["status"] == "failed" && note(&out)["error"].as_str().unwrap().contains("loss is NaN at step 7"));
        // What was good is still there, and to go on is no success either.
        assert_eq!(names(&out.join("checkpoints")), ["step-00000006".to_string(), format!("step-{steps:08}")]);
        refused(train(&out, steps, Start::Newest, more, root()), &["nothing more to do", "loss is NaN at step 7"]);
        refused(train(&out, 40, Start::Newest, more, root()), &["10 steps in a row", "the last at step 16"]);
    }
    // One step less is one that is good.
    assert_eq!(train(&dir.path().join("good"), 6, Start::New, "eval_every = 3", root()).unwrap().step, 6);
}

#[test]
fn a_run_whose_last_validation_is_not_finite_is_no_success() {
    let dir = tempfile::tempdir().unwrap();
    let root = || Falls { root: [false, true], ..Falls::default() };
    let (out, more) = (dir.path().join("out"), "eval_every = 3");
    refused(train(&out, 9, Start::New, more, root()), &["validation is not finite", "val_loss is NaN at step 9"]);
    assert_eq!(note(&out)["status"], "failed");
    // Its training is whole and saved, but the same end is the same again.
    assert!(checkpoint(&out, 9).exists());
    refused(train(&out, 9, Start::Newest, more, root()), &["val_loss is NaN at step 9"]);
    // With another validation it may go on.
    assert_eq!(train(&out, 12, Start::Newest, more, Falls::default()).unwrap().step, 12);
    assert_eq!(note(&out)["status"], "finished");
    // Nothing better than before is no reason to stop early with status 0.
    refused(train(&dir.path().join("patience"), 50, Start::New, "eval_every = 1\npatience = 2", root()), &["val_loss is NaN"]);
    // Of its evaluations the one of step 3 was the only one that was finite, and then the lowest.
    assert_eq!(run::find_best(&out).unwrap().step, 3);
}

/// Rank 1 alone has the row, in some of the steps.
#[test]
fn what_is_not_finite_on_one_rank_ends_all() {
    let dir = tempfile::tempdir().unwrap();
    let model = Falls { infinite_row: true, ..Falls::default() };
    // An epoch is four steps, of which one has the row.
    let ended = on_ranks(&dir.path().join("run"), 40, Start::New, "eval_every = 100\nbatch = 8", &model);
    for said in ended.into_iter().map(|e| e.err().expect("it is no success")) {
        assert!(said.contains("10 steps in a row") && said.contains("loss is inf at step 1"), "{said}");
    }
}

/// Ranks that would train different things say so before the first step.
#[test]
fn ranks_that_differ_do_not_begin() {
    let dir = tempfile::tempdir().unwrap();
    for (what, more, validation) in [
        ("their settings", ["", "beta1 = 0.5"], ["same"; 2]),
        ("their data, tokenizer or base model", ["", ""], ["same", "another"]),
        ("their data, tokenizer or base model", ["", "beta1 = 0.5"], ["same", "another"]),
    ] {
        let out = dir.path().join("run");
        let ended = threads::each(2, 1, |ranks| {
            let rank = ranks.rank();
            let mut c = config(4, more[rank]);
            c.ranks = ranks;
            let model = Falls { validation: validation[rank], ..Falls::default() };
            let options = options(&out, Start::New, &model);
            let mut task = Supervised::new(model, c.section::<TrainConfig>("train").unwrap(), c.seed());
            run::train(&mut task, &c, &Device::cpu(Cpu::new(1)), &options).err().map(|e| e.to_string())
        });
        for said in ended {
            assert!(said.as_ref().is_some_and(|said| said.contains(&format!("rank 1 and rank 0 differ in {what}"))), "{what}: {said:?}");
        }
        assert!(!out.exists());
    }
}

/// Decay of a matrix by a billion times itself in every step, whose loss and gradient are finite.
struct Explodes;

impl Model for Explodes {
    fn seq(&self) -> usize {
        1
    }
    fn vocab(&self) -> usize {
        2
    }
    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let f = Feeds::new(r, batch, 1);
        vec![("loss", (r.param("matrix", &[2, 2], Init::Full(1.0)) * 1e-30).sum() * f.weight)]
    }
    fn source(&self, _: bool) -> Result<Arc<dyn Source>, TrainError> {
        Ok(Arc::new(Rows { infinite: false }))
    }
    fn without_validation(&self) -> Result<Option<String>, TrainError> {
        Ok(Some("there is none".into()))
    }
}

#[test]
fn weights_that_are_not_finite_are_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let explode = |ranks: usize, steps: u64| {
        let out = dir.path().join(format!("{ranks}-{steps}"));
        let ended = threads::each(ranks, 1, |of| {
            let mut c = config(steps, "learning_rate = 1e6\nweight_decay = 1000.0\nsave_every = 1\nkeep = 0");
            c.ranks = of;
            let mut task = Supervised::new(Explodes, c.section::<TrainConfig>("train").unwrap(), c.seed());
            let options = Options { out: out.clone(), ..Options::default() };
            run::train(&mut task, &c, &Device::cpu(Cpu::new(1)), &options).map(|_| ()).map_err(|e| e.to_string())
        });
        (ended, names(&out.join("checkpoints")).len())
    };
    assert_eq!(explode(1, 4), (vec![Ok(())], 4));
    for ranks in [1, 2] {
        // Its last step has a loss that is finite, and leaves weights that are not.
        let (ended, saved) = explode(ranks, 5);
        for said in ended.into_iter().map(Result::unwrap_err) {
            assert!(said.contains("'matrix' holds") && said.contains("inf after step 5"), "{said}");
        }
        assert_eq!(saved, 4);
    }
}

#[test]
fn other_validation_data_is_refused_when_a_run_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let of = |validation| Falls { validation, ..Falls::default() };
    train(dir.path(), 2, Start::New, "", of("first")).unwrap();
    refused(train(dir.path(), 4, Start::Newest, "", of("second")), &["the validation data", "\"second\"", "was \"first\""]);
    assert_eq!(train(dir.path(), 4, Start::Newest, "", of("first")).unwrap().step, 4);
}

/// Reports of all steps come late, as on a GPU.
struct Late(Supervised<Falls>);

impl Task for Late {
    fn train_config(&self) -> &TrainConfig {
        self.0.train_config()
    }
    fn graphs(&self) -> Vec<(&'static str, engine::Graph)> {
        self.0.graphs()
    }
    fn begin(&mut self, done: u64) -> Result<(), TrainError> {
        self.0.begin(done)
    }
    fn step(&mut self, s: &mut Session, step: u64, rate: f64) -> Result<(), TrainError> {
        self.0.step(s, step, rate)
    }
    fn report(&self, s: &Session) -> Result<Pending, TrainError> {
        Ok(self.0.report(s)?.late())
    }
    fn evaluate(&mut self, s: &mut Session) -> Result<Evaluation, TrainError> {
        self.0.evaluate(s)
    }
    fn work(&self) -> (&'static str, f64) {
        self.0.work()
    }
    fn bench_step(&mut self, s: &mut Session, step: u64) -> Result<(), TrainError> {
        self.0.bench_step(s, step)
    }
}

#[test]
fn a_report_that_comes_late_has_no_part_in_a_later_evaluation() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, late) = (dir.path().join("whole"), dir.path().join("late"));
    train(&whole, 8, Start::New, "eval_every = 4", Falls::default()).unwrap();
    let c = config(8, "eval_every = 4");
    let mut task = Late(Supervised::new(Falls::default(), c.section::<TrainConfig>("train").unwrap(), c.seed()));
    run::train(&mut task, &c, &Device::cpu(Cpu::new(1)), &options(&late, Start::New, &Falls::default())).unwrap();
    let evaluated: Vec<u64> = recorded(&late).iter().filter(|r| r.contains_key("val_loss")).map(|r| r["step"].as_u64().unwrap()).collect();
    assert_eq!(evaluated, [4, 8]);
    assert_eq!((recorded(&late), held(&late, 8)), (recorded(&whole), held(&whole, 8)));
    // Ten skipped steps in a row are seen, however late.
    let c = config(60, "eval_every = 100");
    let root = Falls { root: [true, false], ..Falls::default() };
    let mut task = Late(Supervised::new(root, c.section::<TrainConfig>("train").unwrap(), c.seed()));
    let ended = run::train(&mut task, &c, &Device::cpu(Cpu::new(1)), &options(&dir.path().join("bad"), Start::New, &Falls::default()));
    refused(ended, &["10 steps in a row", "the last at step 16", "loss is NaN at step 7"]);
}

/// Writes a checkpoint like another one whose weight is not finite; kiln itself saves none.
fn broken_checkpoint(out: &Path, step: u64, file: &str) {
    let found = kiln::checkpoint::open(&checkpoint(out, step)).unwrap();
    let nan = f32::NAN.to_le_bytes();
    let loaded: Vec<_> =
        names(&found.path).into_iter().filter(|n| n.ends_with(".safetensors")).map(|n| (n.clone(), found.file(&n).unwrap())).collect();
    let tensors = |name: &str, all: &kiln::checkpoint::Loaded| -> Vec<(String, String, Vec<usize>, Vec<u8>)> {
        let own = all.names().into_iter().map(|n| (n.clone(), all.get(&n).unwrap()));
        own.map(|(n, (dtype, shape, bytes))| {
            let broken = name == file && n == "w";
            (n, dtype, shape, if broken { nan.to_vec() } else { bytes.to_vec() })
        })
        .collect()
    };
    let held: Vec<_> = loaded.iter().map(|(name, all)| (name.as_str(), tensors(name, all))).collect();
    let files: Vec<(&str, Vec<Tensor>)> = held
        .iter()
        .map(|(name, all)| (*name, all.iter().map(|(name, dtype, shape, bytes)| Tensor { name, dtype, shape, bytes }).collect()))
        .collect();
    kiln::checkpoint::save(&out.join("checkpoints"), step, &files, &[], &found.meta, 0.into()).unwrap();
}

#[test]
fn a_checkpoint_whose_weights_are_not_finite_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    for file in ["model.safetensors", "averaged.safetensors"] {
        let out = dir.path().join(file);
        train(&out, 2, Start::New, "ema = 0.5", Falls::default()).unwrap();
        broken_checkpoint(&out, 2, file);
        let found = run::find_checkpoint(&out).unwrap();
        assert_eq!(found.weights(file == "model.safetensors").unwrap_err().to_string().matches("'w' holds NaN").count(), 1);
        assert!(found.weights(file != "model.safetensors").is_ok());
        refused(train(&out, 4, Start::Newest, "ema = 0.5", Falls::default()), &[file, "'w' holds NaN", "--resume-from", "--start-over"]);
    }
}

/// Skipped steps are shown while they happen, and what a table calls the training loss is the last one, not the last finite one.
#[test]
fn numbers_that_are_not_finite_are_shown_and_fail() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let ran = super::common::train(&out, "--steps 8 --set learning_rate=1e6 --set warmup=0 --set log_every=1");
    ran.fails(&["loss is", "NaN at step", "not finite", "train.learning_rate"]);
    let skipped: Vec<&str> = ran.out.lines().filter(|line| line.contains("is skipped and changes nothing: its loss is NaN")).collect();
    assert!((1..=3).contains(&skipped.len()), "{ran:#?}");
    assert!(!ran.out.contains("what it is"), "no table of figures: {ran:#?}");
    super::common::resume(&out, "").fails(&["nothing more to do", "NaN at step"]);
    let listed = kiln(["runs", &text(dir.path())]).ok().out;
    assert!(listed.contains("failed") && listed.contains("NaN at step"), "{listed}");
}

/// Where no step has counted yet there is nothing to average: zeros are no weights.
#[test]
fn a_run_whose_steps_were_all_skipped_has_no_average() {
    let dir = tempfile::tempdir().unwrap();
    let model = || Falls { infinite_row: true, ..Falls::default() };
    refused(train(dir.path(), 3, Start::New, "batch = 8\nema = 0.5", model()), &["3 steps in a row", "loss is inf"]);
    let saved = names(&checkpoint(dir.path(), 3));
    assert!(saved.contains(&"model.safetensors".to_string()) && !saved.contains(&"averaged.safetensors".to_string()), "{saved:?}");
}

/// What was skipped before a run was stopped was said then.
#[test]
fn a_resumed_run_does_not_say_again_what_was_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let said = super::common::train(dir.path(), "--steps 25 --pass fp16=auto,scale=16777216").ok().out;
    assert!(said.contains("is skipped and changes nothing"), "{said}");
    let said = super::common::resume(dir.path(), "--steps 30").ok().out;
    assert!(!said.contains("of the steps before step"), "{said}");
}

/// Reports are far apart, and step 7 is one of those that are looked at for another reason.
#[test]
fn a_skipped_step_is_recorded_wherever_it_is_seen() {
    let dir = tempfile::tempdir().unwrap();
    let root = Falls { root: [true, false], ..Falls::default() };
    refused(train(dir.path(), 8, Start::New, "log_every = 100\nsave_every = 7", root), &["loss is NaN at step 7"]);
    let steps: Vec<Value> = recorded(dir.path()).iter().map(|record| record["step"].clone()).collect();
    assert_eq!(steps, [7, 8]);
}

/// 16 of 8 items.
#[test]
fn an_epoch_is_over_when_all_micro_batches_have_had_its_items() {
    let dir = tempfile::tempdir().unwrap();
    train(dir.path(), 4, Start::New, "accumulate = 2", Falls { epoch: Some(8), ..Falls::default() }).unwrap();
    assert_eq!(recorded(dir.path()).pop().unwrap()["epoch"], 2.0);
}
