//! Steps of several micro-batches beside steps of one batch, and evaluations in batches of their own.

use crate::common::{checkpoint, kiln, same_bytes, text};
use engine::{Cpu, Device};
use kiln::config::Config;
use kiln::recipe::{self, Session, Task};
use kiln::run;

fn loaded(recipe: &str, sets: &[&str]) -> (Box<dyn Task>, Session) {
    let recipe = recipe::find(recipe).unwrap();
    let mut c: Config = recipe::preset(recipe, None).unwrap();
    sets.iter().for_each(|s| c.set(s).unwrap_or_else(|e| panic!("{s}: {e}")));
    let c = recipe.sized(&c).unwrap();
    let task = recipe.task(&c).unwrap();
    let s = run::load(&*task, &c, &Device::cpu(Cpu::new(1))).unwrap();
    (task, s)
}

type Reports = Vec<Vec<(String, f64)>>;

/// The reports of so many steps, and what an evaluation finds behind them.
fn trained(recipe: &str, sets: &[&str], steps: u64) -> (Reports, Session) {
    let (mut t, mut s) = loaded(recipe, sets);
    t.begin(0).unwrap();
    let step = |i: u64| {
        t.step(&mut s, i, 1e-2).unwrap();
        t.report(&s).unwrap().finish().unwrap().values
    };
    let mut reports: Reports = (0..steps).map(step).collect();
    let found = t.evaluate(&mut s).unwrap().values;
    reports.push(found.into_iter().map(|(name, v)| (format!("val_{name}"), v)).collect());
    (reports, s)
}

#[track_caller]
fn near(what: &str, ours: &Reports, theirs: &Reports, most: f64) {
    assert_eq!(ours.len(), theirs.len());
    for (step, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert_eq!(a.len(), b.len(), "{what}: {a:?} {b:?}");
        for ((name, x), (other, y)) in a.iter().zip(b) {
            assert_eq!(name, other);
            assert!((x - y).abs() <= most * y.abs().max(1.0), "{what}, step {step}: {name} is {x}, and {y} as one batch");
        }
    }
}

/// A dense model, whose losses are means over examples alone; what is drawn of each example is another matter.
const HRM: &[&str] = &[
    "dim=16",
    "heads=2",
    "layers=1",
    "high_cycles=2",
    "low_cycles=2",
    "experts=1",
    "top_k=1",
    "hidden=8",
    "max_segments=3",
    "explore=0.0",
    "train_puzzles=50",
    "test_puzzles=13",
    "eval_batches=0",
];

/// Slots of its own for each micro-batch: examples come and go as in one batch.
#[test]
fn hrms_micro_batches_are_one_batch() {
    let with = |more: &[&str]| trained("hrm", &[HRM, more].concat(), 9).0;
    let whole = with(&["batch=6", "eval_batch=5"]);
    near("hrm in two", &with(&["batch=3", "accumulate=2", "eval_batch=5"]), &whole, 1e-4);
    near("hrm in three", &with(&["batch=2", "accumulate=3", "eval_batch=5"]), &whole, 1e-4);
    let segments: Vec<f64> = whole[..9].iter().map(|r| r.iter().find(|v| v.0 == "segments").unwrap().1).collect();
    assert!(segments.contains(&3.0), "{segments:?}");
}

const LIOR: &[&str] = &[
    "dim=32",
    "heads=2",
    "seq=24",
    "after=4",
    "memory=20",
    "field=[3, 2, 6, 5]",
    "model.steps=6",
    "n=5",
    "rotor_layers=3",
    "eval_batches=3",
];

/// The field of the nudged phase is driven by all of a step's windows, and the memory is written once they are through.
#[test]
fn liors_windows_are_one_window() {
    let with = |more: &[&str]| trained("lior", &[LIOR, more].concat(), 12);
    let (whole, s) = with(&["batch=6", "eval_batch=3"]);
    for parts in [["batch=3", "accumulate=2"], ["batch=2", "accumulate=3"]] {
        let (ours, p) = with(&[&parts[..], &["eval_batch=3"]].concat());
        near(parts[1], &ours, &whole, 1e-4);
        for name in ["memory_coord", "memory_state", "filled", "windows", "field.re"] {
            let [a, b] = [&p, &s].map(|s| s.store.get(name).unwrap().f32().unwrap());
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4), "{name}");
        }
    }
}

/// With Muon, too: which matrices it moves is known in the program that ends a step.
#[test]
fn a_decoders_micro_batches_are_one_batch() {
    let small = ["seq=16", "layers=1", "dim=16", "hidden=32", "heads=2", "kv_heads=1", "head_dim=8", "eval_batch=4", "eval_batches=1"];
    for optimizer in ["optimizer=adamw", "optimizer=muon"] {
        let with = |more: &[&str]| trained("decoder", &[&small[..], &[optimizer], more].concat(), 4);
        let ((whole, s), (parts, p)) = (with(&["batch=4"]), with(&["batch=2", "accumulate=2"]));
        let names = |s: &Session| s.store.iter().map(|(n, _)| n.to_string()).filter(|n| !n.starts_with("scratch")).collect::<Vec<_>>();
        let (mut a, mut b) = (names(&s), names(&p));
        a.sort();
        b.sort();
        assert_eq!(a, b, "{optimizer}");
        near(optimizer, &parts, &whole, 1e-4);
    }
}

/// Means over the same items, in however many batches they are read.
#[test]
fn an_evaluation_has_a_batch_of_its_own() {
    let hydra = &["dim=16", "blocks=1", "hidden=16", "seq=16", "heads=2", "kv_heads=1"][..];
    // So many items each: 4 x 3, 6 x 2, 3 x 4.
    for (recipe, sets) in [("hydra", hydra), ("lior", LIOR), ("hrm", HRM)] {
        let of = |batch: &str, batches: &str| {
            let (reports, _) = trained(recipe, &[sets, &["batch=4", batch, batches]].concat(), 1);
            vec![reports.into_iter().next_back().unwrap()]
        };
        let own = of("eval_batch=0", "eval_batches=3");
        near(recipe, &of("eval_batch=6", "eval_batches=2"), &own, 2e-4);
        near(recipe, &of("eval_batch=3", "eval_batches=4"), &own, 2e-4);
    }
}

/// What stopped in the middle goes on bit for bit, with slots and windows of every micro-batch.
#[test]
fn steps_of_micro_batches_resume_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    for (recipe, small) in [("hrm", HRM), ("lior", LIOR)] {
        let more = ["batch=2", "accumulate=3", "horizon=7", "eval_batch=3", "train.eval_every=100"];
        let sets: Vec<&str> = small.iter().chain(&more).flat_map(|s| ["--set", s]).collect();
        let [whole, halves] = ["whole", "halves"].map(|name| dir.path().join(format!("{recipe}-{name}")));
        let start = |out: &std::path::Path, steps: &str| {
            kiln([&["train", recipe, "--threads", "1", "--steps", steps, "--out", &text(out)][..], &sets].concat()).ok();
        };
        start(&whole, "7");
        start(&halves, "4");
        kiln(["train", "--out", &text(&halves), "--resume", "--steps", "7", "--threads", "1"]).ok();
        same_bytes(&checkpoint(&whole, 7), &checkpoint(&halves, 7));
    }
}
