//! The best checkpoint by a validation metric: it is kept, named and found again; and runs that stop when nothing gets better.

use super::common::{checkpoint, kiln, names, records, text};
use super::steps::Nothing;
use engine::{Cpu, Device, Init, Recorder, Var};
use kiln::config::{Config, Section, TrainConfig};
use kiln::data::Source;
use kiln::recipe::{Better, Feeds, Metric, Model, Supervised, TrainError, Unit};
use kiln::run::{self, Start};
use std::path::Path;
use std::sync::Arc;

/// A weight that falls by the rate in every step. Validation wants it to be 0.6, which with a rate of 0.1, from 1, it is after step 4.
struct Falls;

impl Falls {
    fn weight<'g>(&self, r: &'g Recorder) -> Var<'g> {
        r.param("w", &[1], Init::Full(1.0))
    }
}

impl Model for Falls {
    fn seq(&self) -> usize {
        1
    }
    fn vocab(&self) -> usize {
        2
    }
    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let f = Feeds::new(r, batch, 1);
        vec![("loss", self.weight(r) * f.weight)]
    }
    fn evaluate<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        Feeds::new(r, batch, 1);
        let w = self.weight(r);
        vec![("seen", w * 1.0), ("far", (w + -0.6).square()), ("near", -(w + -0.6).square()), ("w", w * 1.0), ("root", (w + -2.0).sqrt())]
    }
    fn metrics(&self) -> &'static [Metric] {
        METRICS
    }
    fn source(&self, _: bool) -> Result<Arc<dyn Source>, TrainError> {
        Ok(Arc::new(Nothing))
    }
}

const METRICS: &[Metric] = &[
    Metric::new("seen", Unit::None, Better::Neither, "has no direction"),
    Metric::new("far", Unit::None, Better::Lower, "distance"),
    Metric::new("near", Unit::None, Better::Higher, "nearness"),
    Metric::new("w", Unit::None, Better::Higher, "the weight itself"),
    Metric::new("root", Unit::None, Better::Lower, "the root of what is negative"),
];

fn try_train(out: &Path, steps: u64, start: Start, more: &str) -> Result<run::Finished, TrainError> {
    let same = "batch = 2\nhorizon = 100\nschedule = \"constant\"\nlearning_rate = 0.1\nweight_decay = 0.0\nsave_every = 100";
    let usual = ["keep = 1", "eval_every = 1"].into_iter().filter(|line| !more.contains(&line[..line.len() - 1]));
    let text = format!("[train]\nsteps = {steps}\n{same}\n{}\n{more}\n", usual.collect::<Vec<_>>().join("\n"));
    let c = Config::preset("falls", "test", vec![TrainConfig::keys("train")], &text);
    let mut task = Supervised::new(Falls, c.section::<TrainConfig>("train").unwrap(), c.seed());
    let options = run::Options { out: out.into(), start, ..run::Options::default() };
    run::train(&mut task, &c, &Device::cpu(Cpu::new(1)), &options)
}

#[track_caller]
fn train(out: &Path, steps: u64, start: Start, more: &str) -> u64 {
    let ended = try_train(out, steps, start, more).unwrap();
    assert!(!ended.interrupted);
    ended.step
}

fn kept(out: &Path) -> Vec<String> {
    names(&out.join("checkpoints"))
}

/// The step of the best checkpoint, by the run's note, by its link and by its name, which agree.
#[track_caller]
fn best(out: &Path) -> u64 {
    let noted = run::find_best(out).unwrap();
    assert_eq!(run::find_checkpoint(&out.join("best")).unwrap().step, noted.step);
    assert_eq!(out.join("best").canonicalize().unwrap(), checkpoint(out, noted.step).canonicalize().unwrap());
    noted.step
}

#[test]
fn the_best_checkpoint_stays_beside_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a");
    assert_eq!(train(&out, 9, Start::New, ""), 9);
    assert_eq!(kept(&out), ["step-00000004", "step-00000009"]);
    assert_eq!(best(&out), 4);
    assert_eq!(run::find_checkpoint(&out).unwrap().step, 9, "the newest is what a run is");
    // The same by the other direction; another metric is another best.
    for (metric, step) in [("near", 4), ("w", 1)] {
        let out = dir.path().join(metric);
        train(&out, 9, Start::New, &format!("best_metric = \"{metric}\""));
        assert_eq!((best(&out), kept(&out).len()), (step, 2));
    }
    let out = dir.path().join("none");
    train(&out, 9, Start::New, "keep_best = false");
    assert_eq!(kept(&out), ["step-00000009"]);
    assert!(!out.join("best").is_symlink());
    let said = run::find_best(&out).unwrap_err().to_string();
    assert!(said.contains("step 4") && said.contains("train.keep_best"), "{said}");
}

/// Evaluations are far apart, and so are checkpoints: after the best one, the steps up to the next evaluation are not saved.
#[test]
fn only_the_step_of_the_best_evaluation_is_saved() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a");
    train(&out, 11, Start::New, "keep = 0\neval_every = 2");
    assert_eq!(kept(&out), ["step-00000002", "step-00000004", "step-00000011"]);
    assert_eq!(best(&out), 4);
}

/// Evaluations that find nothing but NaN are waited through, however often the run is stopped.
#[test]
fn waiting_for_a_first_number_goes_on_when_a_run_is_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    // Each part ends with a validation that is NaN, which is an error of its own.
    let ends = |out: &Path, steps: u64, start: Start| {
        let said = try_train(out, steps, start, "patience = 4\nbest_metric = \"root\"").err().unwrap().to_string();
        assert!(said.contains("val_root"), "{said}");
        records(out, "train").last().unwrap()["step"].as_u64().unwrap()
    };
    assert_eq!(ends(&whole, 50, Start::New), 4, "four evaluations without a number");
    assert_eq!(ends(&parts, 3, Start::New), 3);
    assert_eq!(ends(&parts, 50, Start::Newest), 4);
}

#[test]
fn a_resumed_run_knows_the_best_and_how_long_it_has_waited() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    assert_eq!(train(&whole, 50, Start::New, "patience = 3"), 7, "three evaluations after the best, of step 4");
    assert_eq!(kept(&whole), ["step-00000004", "step-00000007"]);
    for steps in [2, 5, 6] {
        assert_eq!(train(&parts, steps, if steps == 2 { Start::New } else { Start::Newest }, "patience = 3"), steps);
    }
    assert_eq!(kept(&parts), ["step-00000004", "step-00000006"]);
    assert_eq!(train(&parts, 50, Start::Newest, "patience = 3"), 7);
    assert_eq!((kept(&parts), best(&parts)), (kept(&whole), 4));
    // It is over, until it is given more.
    let before = records(&parts, "train").len();
    assert_eq!(train(&parts, 50, Start::Newest, "patience = 3"), 7);
    assert_eq!(records(&parts, "train").len(), before);
    assert_eq!(train(&parts, 50, Start::Newest, "patience = 5"), 9);
    assert_eq!(best(&parts), 4);
    // Evaluations of another part of the data are not compared with.
    assert_eq!(train(&parts, 10, Start::Newest, "eval_batches = 3"), 10);
    assert_eq!(best(&parts), 10);
}

#[test]
fn a_run_that_goes_back_has_the_best_of_then() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a");
    train(&out, 3, Start::New, "keep = 0");
    train(&out, 9, Start::Newest, "keep = 0");
    assert_eq!((best(&out), kept(&out).len()), (4, 5), "every step up to the best, and the last");
    // What came later is no longer of this run.
    assert_eq!(train(&out, 3, Start::From(checkpoint(&out, 2)), "keep = 0"), 3);
    assert_eq!(best(&out), 3);
    // Where the best itself is gone, it begins anew.
    std::fs::remove_dir_all(checkpoint(&out, 3)).unwrap();
    std::fs::remove_dir_all(checkpoint(&out, 2)).unwrap();
    train(&out, 9, Start::Newest, "keep = 0");
    std::fs::remove_dir_all(checkpoint(&out, 4)).unwrap();
    let said = run::find_best(&out).err().unwrap().to_string();
    assert!(said.contains("step 4") && said.contains("is not there"), "{said}");
    train(&out, 11, Start::Newest, "keep = 0");
    assert_eq!(best(&out), 10);
}

#[test]
fn the_best_by_another_metric_does_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a");
    // The highest weight is that of step 1, 0.9; no nearness is above 0.
    train(&out, 3, Start::New, "best_metric = \"w\"");
    assert_eq!(best(&out), 1);
    train(&out, 6, Start::Newest, "best_metric = \"near\"");
    let found = run::find_best(&out).unwrap();
    assert_eq!((best(&out), found.meta["best"]["metric"].as_str()), (4, Some("near")));
    // It says so.
    let out = dir.path().join("b");
    super::common::train(&out, "--steps 2 --set eval_every=1 --set best_metric=loss").ok();
    let said = super::common::resume(&out, "--steps 3 --set best_metric=perplexity").ok().out;
    assert!(said.contains("does not count any more: train.best_metric was loss"), "{said}");
}

#[test]
fn what_cannot_decide_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a");
    for (more, parts) in
        [("best_metric = \"seen\"", ["\"seen\"", "far, near, w"]), ("best_metric = \"loss\"", ["\"loss\"", "far, near, w"])]
    {
        let said = try_train(&out, 3, Start::New, more).err().unwrap().to_string();
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    }
    assert!(!out.exists());
    kiln(["train", "lior", "--out", &text(&out), "--set", "patience=2", "--set", "probe=false"]).fails(&["train.patience", "no metric"]);
    assert!(!out.exists());
}

#[test]
fn commands_take_the_newest_or_the_best() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a");
    // A rate at which the second step is worse than the first.
    let said = super::common::train(&out, "--steps 50 --set eval_every=1 --set learning_rate=3.0 --set patience=2 --set keep=1").ok();
    let steps: Vec<u64> = records(&out, "val").iter().map(|r| r["step"].as_u64().unwrap()).collect();
    let (last, best) = (*steps.last().unwrap(), best(&out));
    assert!(last == best + 2 && last < 50, "{steps:?}");
    assert!(
        said.out.contains(&format!("stopped early after step {last}, saved: 2 evaluations in a row were not better than loss")),
        "{said:#?}"
    );
    let eval = |path: &Path, more: &[&str]| kiln([&["eval", &text(path), "--batches", "1", "--json", "--threads", "1"], more].concat());
    let step = |ran: super::common::Ran| serde_json::from_str::<serde_json::Value>(&ran.ok().out).unwrap()["step"].as_u64().unwrap();
    assert_eq!(step(eval(&out, &[])), last);
    assert_eq!((step(eval(&out, &["--best"])), step(eval(&out.join("best"), &[]))), (best, best));
    kiln(["generate", &text(&out), "--best", "--max-tokens", "3", "--threads", "1"]).ok();
    eval(&checkpoint(&out, last), &["--best"]).fails(&["--best is for a run's folder"]);
    // A link that leads nowhere, as a kill may leave it, is no obstacle.
    std::fs::remove_file(out.join("best")).unwrap();
    std::os::unix::fs::symlink("checkpoints/step-00000999", out.join("best")).unwrap();
    assert_eq!(step(eval(&out.join("best"), &[])), best);
    super::common::resume(&out, "--set patience=0 --steps 4").ok();
    assert_eq!(out.join("best").read_link().unwrap(), Path::new(&format!("checkpoints/step-{best:08}")));
}

/// An evaluation of everything finds the same, in batches of any size.
#[test]
fn the_best_of_all_of_the_data_counts_whatever_the_batch() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a");
    train(&out, 6, Start::New, "eval_batches = 0\nkeep = 0");
    train(&out, 8, Start::Newest, "eval_batches = 0\nkeep = 0\neval_batch = 4");
    assert_eq!(best(&out), 4);
}
