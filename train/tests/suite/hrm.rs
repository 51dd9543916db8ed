//! hrm against PyTorch's numbers, against a plain model of its slots, and from its puzzles to its answers.

use crate::common::*;
use engine::philox::{fill_halves, rng_feed};
use engine::{Cpu, Data, Device, Meta, Switches};
use kiln::config::Config;
use kiln::data::Split;
use kiln::data::puzzles::{Mazes, PuzzleSet, Size, Sudokus, Task as Puzzle};
use kiln::golden::{Golden, compare, rule};
use kiln::recipe::{self, Recipe, Session, Task};
use kiln::recipes::hrm::HrmConfig;
use kiln::run;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::tempdir;

fn hrm() -> &'static dyn Recipe {
    recipe::find("hrm").unwrap()
}

fn device() -> Device {
    Device::cpu(Cpu::new(2))
}

fn check(file: &str, setting: &[(&str, &str)]) {
    let golden = Golden::open(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    let mut switches = Switches::default();
    setting.iter().for_each(|(name, value)| switches.set(name, value).unwrap());
    let rule = rule(hrm().reference().unwrap(), &golden, &switches, &device(), 1e-5, None).unwrap();
    let all = compare(&golden, &hrm().reference().unwrap().compute(&golden, &switches, &device()).unwrap(), &rule);
    let gradients = all.iter().filter(|c| c.name.starts_with("grad/")).count();
    assert_eq!(all.len(), 2 * gradients + 9, "every gradient and next value, the loss, five metrics, three outputs");
    let bad: Vec<String> = all.iter().filter(|c| !c.ok).map(|c| format!("{} off by {:.2e}", c.name, c.error)).collect();
    assert!(bad.is_empty(), "{file} {setting:?}: {bad:?}");
}

#[test]
fn golden_with_passes_on_and_off() {
    let off: Vec<(&str, &str)> = engine::passes::all().filter(|p| !p.required()).map(|p| (p.name(), "off")).collect();
    // Experts; a dense model whose examples go on beyond the segment limit; three of six experts; one example. All of odd sizes but the first.
    for name in ["../reference/golden/hrm", "tests/golden/hrm-dense", "tests/golden/hrm-top3", "tests/golden/hrm-one"] {
        for setting in [&[][..], &off, &[("flash-attention", "require")], &[("recompute", "auto,what=blocks")]] {
            check(&format!("{name}.safetensors"), setting);
        }
    }
}

#[test]
fn in_bf16_everything_points_the_same_way() {
    for file in ["tests/golden/hrm-dense.safetensors", "tests/golden/hrm-top3.safetensors"] {
        check(file, &[("bf16", "require")]);
    }
}

/// A model whose segment takes a millisecond.
const LITTLE: &[&str] = &[
    "dim=16",
    "heads=2",
    "layers=1",
    "high_cycles=2",
    "low_cycles=2",
    "experts=3",
    "top_k=2",
    "hidden=8",
    "batch=5",
    "max_segments=4",
    "explore=0.5",
    "train_puzzles=50",
    "test_puzzles=13",
    "horizon=30",
    "log_every=1",
    "eval_every=10",
    "save_every=100",
    "warmup=0",
];

fn config(sets: &[&str]) -> Config {
    let mut c = recipe::preset(hrm(), None).unwrap();
    LITTLE.iter().chain(sets).for_each(|s| c.set(s).unwrap());
    c
}

fn loaded(c: &Config) -> (Box<dyn Task>, Session) {
    let task = hrm().task(c).unwrap();
    let s = run::load(&*task, c, &device()).unwrap();
    (task, s)
}

fn state(s: &Session, name: &str) -> Vec<f32> {
    s.store.get(name).unwrap().f32().unwrap()
}

fn set(s: &mut Session, name: &str, f: impl FnMut(usize) -> f32) {
    let meta = s.store.get(name).unwrap().meta.clone();
    let numbers: Vec<f32> = (0..meta.elements()).map(f).collect();
    s.store.set(name, &meta, bytemuck::cast_slice(&numbers)).unwrap();
}

fn everything(s: &Session, kept: bool) -> Vec<(String, Vec<u8>)> {
    let own = s.store.iter().filter(|(n, _)| !kept || recipe::is_kept(n));
    own.map(|(n, t)| (n.to_string(), t.bytes().unwrap().to_vec())).collect()
}

/// One step on examples of one's own, with a learning rate of 0; what it reports.
fn step(t: &dyn Task, s: &mut Session, number: u64, [ids, targets]: [&[i32]; 2]) -> Vec<(String, f64)> {
    let rng = rng_feed(SEED, number, 0);
    let feeds = [("ids", Data::I32(ids)), ("targets", Data::I32(targets)), ("rng", Data::I32(&rng)), ("rate", Data::F32(&[0.0]))];
    s.run("train", &feeds).unwrap();
    t.report(s).unwrap().finish().unwrap().values
}

const SEED: u64 = 77;

/// What a slot must hold, kept the plain way.
#[derive(Clone, Debug)]
struct Slot {
    ids: Vec<i32>,
    targets: Vec<i32>,
    segments: usize,
    minimum: usize,
    done: bool,
}

#[test]
fn slots_are_what_a_plain_model_of_them_says() {
    let c = hrm().sized(&config(&["batch=7", "max_segments=5"])).unwrap();
    let m: HrmConfig = c.section("model").unwrap();
    let (t, mut s) = loaded(&c);
    let (batch, seq) = (7, m.seq);
    // The head's sign differs from example to example and from segment to segment.
    set(&mut s, "halt", |i| ((i * 37 % 11) as f32 - 5.0) * 0.3);
    set(&mut s, "halt_bias", |_| 0.1);
    let (weight, bias) = (state(&s, "halt"), state(&s, "halt_bias")[0]);
    let mut slots = vec![Slot { ids: vec![], targets: vec![], segments: 0, minimum: 1, done: true }; batch];
    let (mut early, mut at_limit, mut held, mut used) = (0, 0, 0, 0.0);
    for number in 0..60 {
        let draw = |salt: usize, i: usize| ((number as usize * 31 + salt * 17 + i * i * 7 + i) % 5 + 1) as i32;
        let ids: Vec<i32> = (0..batch * seq).map(|i| draw(0, i)).collect();
        let targets: Vec<i32> = (0..batch * seq).map(|i| draw(1, i)).collect();
        let report = step(&*t, &mut s, number, [&ids, &targets]);

        let (mut chance, mut share) = ([0.0; 7], [0.0; 7]);
        fill_halves(&rng_feed(SEED, number, 0), 1, 0, &mut chance);
        fill_halves(&rng_feed(SEED, number, 0), 2, 0, &mut share);
        let high = state(&s, "carry.high");
        for (i, slot) in slots.iter_mut().enumerate() {
            if slot.done {
                let own = i * seq..(i + 1) * seq;
                let minimum = if chance[i] < 0.5 { 2 + (share[i] * 4.0) as usize } else { 1 };
                *slot = Slot { ids: ids[own.clone()].to_vec(), targets: targets[own].to_vec(), segments: 0, minimum, done: false };
            }
            slot.segments += 1;
            let halt = high[i * seq * m.dim..].iter().zip(&weight).map(|(a, b)| a * b).sum::<f32>() + bias;
            assert!(halt.abs() > 1e-4, "too near to call");
            slot.done = slot.segments >= 5 || halt > 0.0 && slot.segments >= slot.minimum;
            early += (slot.done && slot.segments < 5) as usize;
            at_limit += (slot.done && halt < 0.0) as usize;
            held += (halt > 0.0 && !slot.done) as usize;
        }
        let ended: Vec<f64> = slots.iter().filter(|slot| slot.done).map(|slot| slot.segments as f64).collect();
        if !ended.is_empty() {
            used = ended.iter().sum::<f64>() / ended.len() as f64;
        }
        let reported = report.iter().find(|v| v.0 == "segments").unwrap().1;
        assert!((reported - used).abs() < 1e-5, "step {number}: {reported} segments used, not {used}");
        let wide = |f: fn(&Slot) -> &Vec<i32>| slots.iter().flat_map(|slot| f(slot).iter().map(|&v| v as f32)).collect::<Vec<f32>>();
        let narrow = |f: fn(&Slot) -> usize| slots.iter().map(|slot| f(slot) as f32).collect::<Vec<f32>>();
        assert_eq!(state(&s, "carry.ids"), wide(|slot| &slot.ids), "step {number}");
        assert_eq!(state(&s, "carry.targets"), wide(|slot| &slot.targets), "step {number}");
        assert_eq!(state(&s, "carry.segments"), narrow(|slot| slot.segments), "step {number}");
        assert_eq!(state(&s, "carry.minimum"), narrow(|slot| slot.minimum), "step {number}");
        assert_eq!(state(&s, "carry.done"), narrow(|slot| slot.done as usize), "step {number}");
    }
    assert!(early > 5 && at_limit > 0 && held > 0, "all of it happened: {early}, {at_limit}, {held}");
}

#[test]
fn an_example_that_starts_over_is_thought_about_as_if_it_were_the_first() {
    let c = hrm().sized(&config(&["max_segments=2", "explore=0.0"])).unwrap();
    let (t, mut s) = loaded(&c);
    let seq = c.section::<HrmConfig>("model").unwrap().seq;
    set(&mut s, "halt_bias", |_| -100.0);
    let examples = |salt: usize| (0..5 * seq).map(|i| ((i * i + salt * 5 + i / 3) % 5 + 1) as i32).collect::<Vec<i32>>();
    let mut thought = vec![];
    for number in 0..6u64 {
        // Every second step all slots take what they are fed, which is the same each time; in between it is dropped.
        let ids = examples(number as usize % 2);
        step(&*t, &mut s, number, [&ids, &ids]);
        thought.push((state(&s, "carry.high"), state(&s, "carry.low")));
    }
    assert_eq!((&thought[0], &thought[1]), (&thought[2], &thought[3]));
    assert_eq!((&thought[0], &thought[1]), (&thought[4], &thought[5]));
    assert_ne!(thought[0], thought[1]);
    // And as evaluation thinks about it, which has states of its own.
    for (first, at) in [(1.0, 0), (0.0, 1)] {
        s.run("act", &[("ids", Data::I32(&examples(0))), ("fresh", Data::F32(&[first]))]).unwrap();
        assert_eq!((state(&s, "scratch/act.high"), state(&s, "scratch/act.low")), thought[at]);
    }
}

#[test]
fn minima_are_drawn_as_often_as_they_should() {
    let c = config(&["batch=4000", "dim=4", "heads=1", "hidden=2", "experts=1", "max_segments=6", "explore=0.3"]);
    let (t, mut s) = loaded(&c);
    let fed = vec![1; 4000 * 17];
    step(&*t, &mut s, 0, [&fed, &fed]);
    let minimum = state(&s, "carry.minimum");
    let count = |n: f32| minimum.iter().filter(|&&m| m == n).count() as f64;
    // Standard deviations: 29 of those that explore, 15 of each minimum.
    assert!((count(1.0) - 2800.0).abs() < 120.0, "{} do not explore", count(1.0));
    (2..=6).for_each(|n| assert!((count(n as f32) - 240.0).abs() < 65.0, "{} must think for {n} segments", count(n as f32)));
    assert_eq!((1..=6).map(|n| count(n as f32)).sum::<f64>(), 4000.0);
}

#[test]
fn after_a_step_that_is_skipped_every_example_starts_over() {
    let c = config(&["max_segments=8"]);
    let (mut t, mut s) = loaded(&c);
    set(&mut s, "halt_bias", |_| -100.0);
    t.begin(0).unwrap();
    let mut run = |s: &mut Session, i: u64| {
        t.step(s, i, 1e-3).unwrap();
        t.report(s).unwrap().finish().unwrap()
    };
    (0..3).for_each(|i| assert_eq!(run(&mut s, i).skipped_in_row, 0));
    set(&mut s, "carry.low", |i| if i == 40 { f32::NAN } else { 0.5 });
    let before = state(&s, "head");
    assert_eq!(run(&mut s, 3).skipped_in_row, 1);
    assert_eq!((state(&s, "head"), state(&s, "carry.done")), (before, vec![1.0; 5]));
    assert_eq!(run(&mut s, 4).skipped_in_row, 0);
    assert_eq!(state(&s, "carry.segments"), [1.0; 5]);
    assert!(state(&s, "carry.high").iter().chain(&state(&s, "carry.low")).all(|v| v.is_finite()));
}

#[test]
fn evaluation_leaves_training_alone() {
    let steps = |evaluates: bool, count: u64| {
        let (mut t, mut s) = loaded(&config(&[]));
        t.begin(0).unwrap();
        for i in 0..count {
            t.step(&mut s, i, 1e-3).unwrap();
            if evaluates {
                t.evaluate(&mut s).unwrap();
            }
        }
        everything(&s, true)
    };
    assert_eq!(steps(true, 7), steps(false, 7));
}

/// Evaluation may take minutes: it ends when the run is told to, and the step is kept all the same.
#[test]
fn a_signal_ends_an_evaluation_too() {
    let dir = tempdir().unwrap();
    let c = config(&["train.eval_every=1"]);
    let stop = Arc::new(true.into());
    let options = run::Options { out: dir.path().into(), stop, ..run::Options::default() };
    let end = run::train(&mut *hrm().task(&c).unwrap(), &c, &device(), &options).unwrap();
    assert_eq!((end.step, end.interrupted), (1, true));
    assert!(run::find_checkpoint(dir.path()).unwrap().path.ends_with("step-00000001"));
    assert!(!fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap().contains("val_"));
}

#[test]
fn passes_change_nothing_much_and_bf16_learns_too() {
    let losses = |sets: &[&str]| {
        let (mut t, mut s) = loaded(&config(sets));
        t.begin(0).unwrap();
        let one = |i: u64| {
            t.step(&mut s, i, 1e-3).unwrap();
            t.report(&s).unwrap().finish().unwrap().values[0].1
        };
        (0..12).map(one).collect::<Vec<f64>>()
    };
    let off: Vec<String> = engine::passes::all().filter(|p| !p.required()).map(|p| format!("passes.{}=off", p.name())).collect();
    let (on, half) = (losses(&[]), losses(&["passes.bf16=require"]));
    for (a, b) in on.iter().zip(losses(&off.iter().map(String::as_str).collect::<Vec<_>>())) {
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    }
    assert!(on.iter().zip(&half).all(|(a, b)| (a - b).abs() < 0.1) && on != half, "{on:?} {half:?}");
}

#[test]
fn being_sure_once_or_of_another_answer_is_not_enough_to_halt() {
    let attempt = |cell: u8, halt: f32| recipe::Attempt { answer: vec![1, cell], halt };
    let cases = [
        (None, (2, 5.0), false),
        (Some((2, -1.0)), (2, 5.0), false),
        (Some((3, 5.0)), (2, 5.0), false),
        (Some((2, 5.0)), (2, -1.0), false),
        (Some((2, 0.1)), (2, 0.1), true),
    ];
    for (before, (cell, halt), halts) in cases {
        let before = before.map(|(cell, halt)| attempt(cell, halt));
        assert_eq!(attempt(cell, halt).halts(before.as_ref()), halts);
    }
}

/// What evaluation says, counted from the answers one by one.
#[test]
fn every_puzzle_counts_once_and_padding_never() {
    // Long enough for some answers to stay as they are.
    const LIMIT: usize = 8;
    let c = config(&[&format!("max_segments={LIMIT}")]);
    let (mut t, mut s) = loaded(&c);
    t.begin(0).unwrap();
    (0..100).for_each(|i| t.step(&mut s, i, 3e-3).unwrap());
    let mut solver = hrm().solves().unwrap().solver(&c).unwrap();
    let set = solver.unseen(100).unwrap();
    assert_eq!((set.len(), solver.task()), (13, Puzzle::Sudoku(Size::Four)));
    let mut other = Session::new(&device(), &Switches::default(), 1);
    solver.begin(&mut other, 4).unwrap();
    for (name, tensor) in s.store.iter().filter(|(_, t)| t.role == engine::Role::Param) {
        other.store.set(name, &tensor.meta, &tensor.bytes().unwrap()).unwrap();
    }
    // Nothing is solved yet: a head that halts some of them all the same, of those that answer the same after two segments.
    self::set(&mut other, "halt", |i| (i % 3) as f32 - 0.8);
    let pairs = |attempts: &Vec<recipe::Attempt>| -> Option<f32> {
        let same = attempts[..LIMIT - 1].windows(2).filter(|w| w[0].answer == w[1].answer);
        same.map(|w| w[0].halt.min(w[1].halt)).max_by(f32::total_cmp)
    };
    let mut sure: Vec<f32> = solver.solve(&mut other, &set.inputs, true).unwrap().iter().filter_map(pairs).collect();
    sure.sort_by(f32::total_cmp);
    let half = sure.len() / 2;
    let bias = state(&other, "halt_bias")[0] - (sure[half - 1] + sure[half]) / 2.0;
    for s in [&mut s, &mut other] {
        self::set(s, "halt", |i| (i % 3) as f32 - 0.8);
        self::set(s, "halt_bias", |_| bias);
    }
    let found = t.evaluate(&mut s).unwrap().values;
    let whole = solver.solve(&mut other, &set.inputs, true).unwrap();
    let until = solver.solve(&mut other, &set.inputs, false).unwrap();
    let right = |i: usize, answer: &[u8]| answer == set.item(i).1;
    let share = |n: usize, of: usize| n as f64 / of as f64;
    let (mut cells, mut blank, mut agreed, mut early, mut once) = (0, 0, 0, 0, 0);
    for i in 0..13 {
        assert_eq!(whole[i].len(), LIMIT);
        for (a, b) in whole[i].iter().zip(&until[i]) {
            assert_eq!((&a.answer, a.halt), (&b.answer, b.halt));
            agreed += ((b.halt > 0.0) == right(i, &b.answer)) as usize;
        }
        // It halts where it is sure of the same answer for the second time in a row.
        let sure = |at: usize| whole[i][at].halt > 0.0;
        let halts = (1..LIMIT).find(|&at| sure(at) && sure(at - 1) && whole[i][at].answer == whole[i][at - 1].answer);
        assert_eq!(until[i].len(), halts.unwrap_or(LIMIT - 1) + 1);
        early += halts.is_some_and(|at| at < LIMIT - 1) as usize;
        once += (0..LIMIT).any(|at| sure(at) && !(at > 0 && sure(at - 1))) as usize;
        for cell in (0..16).filter(|&cell| set.item(i).0[cell] == 1) {
            blank += 1;
            cells += (whole[i][LIMIT - 1].answer[cell] == set.item(i).1[cell]) as usize;
        }
    }
    let used: usize = until.iter().map(Vec::len).sum();
    assert!(early > 0 && used > 2 * early && used < LIMIT * 13 && once > 0, "some halt early, some do not: {used}, {early}, {once}");
    let exact = |all: &[Vec<recipe::Attempt>]| (0..13).filter(|&i| right(i, &all[i].last().unwrap().answer)).count();
    let expected = [
        ("exact", share(exact(&whole), 13)),
        ("exact_halted", share(exact(&until), 13)),
        ("cell", share(cells, blank)),
        ("segments", share(used, 13)),
        ("halting_accuracy", share(agreed, used)),
    ];
    assert_eq!(found, expected);
    assert!(share(cells, blank) > 0.2, "it has begun to learn");
}

fn kiln_train(out: &Path, more: &str) -> Ran {
    let sets: Vec<&str> = LITTLE.iter().flat_map(|s| ["--set", s]).collect();
    let start = ["train", "hrm", "--threads", "1", "--out", out.to_str().unwrap()];
    kiln([&start[..], &sets, &more.split_whitespace().collect::<Vec<_>>()].concat())
}

#[test]
fn stopped_and_resumed_is_never_having_stopped() {
    let dir = tempdir().unwrap();
    let (whole, halves) = (dir.path().join("whole"), dir.path().join("halves"));
    let said = kiln_train(&whole, "--steps 30").ok();
    for part in ["13 to validate with", "examples/s", "exact_halted", "course.svg", "experts.svg"] {
        assert!(said.out.contains(part), "{part} in {said:#?}");
    }
    kiln_train(&halves, "--steps 11").ok();
    resume(&halves, "--steps 30").ok();
    same_bytes(&checkpoint(&whole, 30), &checkpoint(&halves, 30));
    let state = fs::read(checkpoint(&whole, 30).join("state.safetensors")).unwrap();
    let state = String::from_utf8_lossy(&state);
    assert!(state.contains("carry.high") && state.contains("carry.minimum") && !state.contains("scratch"), "the carry is kept");

    let last = records(&whole, "train").pop().unwrap();
    for key in ["ce", "halting", "balance", "exact", "cell", "segments", "load.2", "grad_norm", "val_exact", "val_exact_halted"] {
        assert!(last[key].is_number(), "{key} in {last}");
    }
    let loads: f64 = (0..3).map(|i| last[format!("load.{i}")].as_f64().unwrap()).sum();
    assert!((loads - 1.0).abs() < 1e-5, "{last}");

    // A checkpoint is evaluated as the run was.
    let said = kiln(["eval", &text(&whole), "--json", "--threads", "1"]).ok();
    let value: Value = serde_json::from_str(&said.out).unwrap();
    all_declared(&value);
    for name in ["exact", "exact_halted", "cell", "segments", "halting_accuracy"] {
        assert_eq!(value[name], last[format!("val_{name}")], "{name}");
    }
}

#[test]
fn answers_are_shown_segment_by_segment() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    kiln_train(&run, "--steps 20").ok();
    let run = text(&run);
    let json = |args: &[&str]| -> Value {
        let all = [&["solve", &run, "--threads", "1", "--json"][..], args].concat();
        serde_json::from_str(&kiln(all).ok().out).unwrap()
    };

    // The first of the unseen puzzles, as text and as JSON.
    let said = kiln(["solve", &run, "--count", "2", "--threads", "1"]).ok();
    let value = json(&["--count", "2"]);
    let puzzles = value["puzzles"].as_array().unwrap();
    assert_eq!(puzzles.len(), 2);
    for puzzle in puzzles {
        let segments = puzzle["segments"].as_array().unwrap();
        let (solution, last) = (puzzle["solution"].as_str().unwrap(), segments.last().unwrap());
        let wrong = solution.chars().zip(last["answer"].as_str().unwrap().chars()).filter(|(a, b)| a != b).count() as u64;
        assert!(last["wrong"] == wrong && segments.len() == 4 && wrong > 0, "{puzzle}");
        // Each wrong cell has its mark in front of it.
        assert!(said.out.contains(&format!("after 4 segments, the limit: {wrong} cells are wrong")), "{said:#?}");
    }
    let marks: u64 = puzzles.iter().map(|p| p["segments"][3]["wrong"].as_u64().unwrap()).sum();
    assert_eq!(said.out.lines().filter(|l| !l.contains("puzzle")).map(|l| l.matches('x').count() as u64).sum::<u64>(), marks);
    assert!(said.out.contains("what changed") && said.out.contains("sudoku-4x4"), "{said:#?}");

    // Puzzles of one's own: a text, a file, one with two solutions.
    let file = dir.path().join("mine.txt");
    fs::write(&file, "12 34\n34 12\n\n21 .0\n43 21\n").unwrap();
    let value = json(&["1234 3412 21.. 4321", &text(&file), "1... .... .... ...."]);
    let puzzles = value["puzzles"].as_array().unwrap();
    assert_eq!(puzzles[0], puzzles[1]);
    assert_eq!(puzzles[0]["solution"], "1234341221434321");
    assert!(puzzles[2]["solution"].is_null() && puzzles[2]["segments"][0]["wrong"].is_null());
    assert!(kiln(["solve", &run, "1... .... .... ....", "--threads", "1"]).ok().out.contains("no solution, or more than one"));

    kiln(["solve", &run, "1234"]).fails(&["4 cells", "sudoku-4x4 has 16"]);
    kiln(["solve", &run, "1234 3412 21.. 4325"]).fails(&["'5' is no cell", ".1234"]);
    kiln(["solve", &run, "_234 3412 21.. 4321"]).fails(&["'_' is no cell"]);
    kiln(["predict", &run, "a.png"]).fails(&["hrm", "does not classify pictures", "vision_bdh", "kiln solve"]);
    kiln(["generate", &run]).fails(&["does not write text"]);
    let hydra = dir.path().join("hydra");
    train(&hydra, "--steps 1").ok();
    kiln(["solve", &text(&hydra)]).fails(&["hydra", "does not solve puzzles", "recipes that do: hrm"]);
}

#[test]
fn mazes_are_learned_and_solved_too() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    let sizes = "--set task=maze --set side=6 --set seq=37 --set hardness=6 --set experts=0 --set max_segments=2";
    kiln_train(&run, &format!("--steps 5 {sizes}")).ok();
    let said = kiln(["solve", &text(&run), "--count", "1", "--to-limit", "--threads", "1"]).ok();
    assert!(said.out.contains("maze-6x6") && said.out.contains("after 2 segments"), "{said:#?}");
    let task = Puzzle::Maze(6);
    let set = Mazes { side: 6, steps: 6 }.generate(3, Split::Val, 5).unwrap();
    for i in 0..5 {
        let (puzzle, solution) = set.item(i);
        assert_eq!(task.solution(puzzle).as_deref(), Some(solution));
        assert_eq!(task.parse(&task.show(puzzle)).as_deref(), Ok(puzzle));
        assert!(task.parse(&task.show(solution)).unwrap_err().contains("'o' is no cell"));
        let marked = task.marked(puzzle, solution);
        assert_eq!(marked.matches('x').count(), solution.iter().filter(|&&token| token == 5).count());
    }
    // Two ways of the same length, a wall all around, two goals.
    for maze in ["S..G", "S#.G", "SG.G"].map(|row| [row, "....", "....", "...."].concat()) {
        assert_eq!(Puzzle::Maze(4).solution(&Puzzle::Maze(4).parse(&maze).unwrap()).is_some(), maze.starts_with("S..G"), "{maze}");
    }
}

fn csv(set: &PuzzleSet, from: usize, to: usize) -> String {
    let line = |tokens: &[u8]| tokens.iter().map(|t| (t - 1).to_string()).collect::<String>();
    (from..to).map(|i| format!("{},{}\n", line(set.item(i).0), line(set.item(i).1))).collect()
}

#[test]
fn sudokus_are_read_from_files() {
    let dir = tempdir().unwrap();
    let four = Sudokus { size: Size::Four, clues: None, guesses: 0 };
    let [learn, test] = Split::ALL.map(|split| four.generate(5, split, 20).unwrap());
    let write = |name: &str, text: &str| {
        fs::create_dir_all(dir.path().join(name).parent().unwrap()).unwrap();
        fs::write(dir.path().join(name), text).unwrap();
        format!("data.path={}", dir.path().join(name).display())
    };
    let task = |sets: &[&str]| hrm().task(&config(sets)).map(|_| ()).map_err(|e| e.to_string());

    // One file is split by class, whatever the order of its lines.
    let all = write("all.csv", &format!("puzzle,solution\n{}{}", csv(&test, 0, 20), csv(&learn, 0, 20)));
    let c = config(&[&all, "train_puzzles=0", "test_puzzles=0"]);
    let solver = hrm().solves().unwrap().solver(&c).unwrap();
    assert_eq!(solver.unseen(100).unwrap(), test);
    assert_eq!(hrm().solves().unwrap().solver(&config(&[&all, "test_puzzles=6"])).unwrap().unseen(100).unwrap().len(), 6);
    let (mut t, mut s) = loaded(&c);
    t.begin(0).unwrap();
    t.step(&mut s, 0, 1e-3).unwrap();
    t.evaluate(&mut s).unwrap();
    let identity = t.identity().unwrap();
    assert!(identity["data"].is_string() && hrm().task(&config(&[])).unwrap().identity().unwrap()["data"].is_null());
    let fewer = write("fewer.csv", &format!("{}{}", csv(&test, 0, 20), csv(&learn, 1, 20)));
    assert_ne!(hrm().task(&config(&[&fewer])).unwrap().identity().unwrap(), identity);

    // A folder says itself what is what.
    write("both/train.csv", &csv(&test, 0, 20));
    write("both/test.csv", &csv(&learn, 0, 3));
    let both = format!("data.path={}", dir.path().join("both").display());
    assert_eq!(hrm().solves().unwrap().solver(&config(&[&both])).unwrap().unseen(100).unwrap(), learn.chosen(|i| i < 3));

    // Puzzles of one side alone: what is never learned can be evaluated.
    let one = write("one.csv", &csv(&test, 0, 20));
    let error = hrm().task(&config(&[&one])).unwrap().begin(0).unwrap_err().to_string();
    assert!(error.contains("one.csv") && error.contains("none of these is to learn from"), "{error}");
    let other = write("other.csv", &csv(&learn, 0, 20));
    assert!(task(&[&other]).unwrap_err().contains("none of these is to validate with"));
    assert!(task(&[&all, "side=9", "seq=82", "vocab=11"]).unwrap_err().contains("holds sudoku-4x4"));
    assert!(task(&[&all, "task=maze", "side=5", "seq=26"]).unwrap_err().contains("mazes are generated"));
    assert!(task(&["data.path=/nowhere.csv"]).unwrap_err().contains("/nowhere.csv"));
    let broken = write("broken.csv", "1234341221434321,1234341221434322\n");
    assert!(task(&[&broken]).unwrap_err().contains("line 1"));
}

#[test]
fn an_evaluation_says_what_of_a_file_it_left_out() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    kiln_train(&run, "--steps 1").ok();
    let four = Sudokus { size: Size::Four, clues: None, guesses: 0 };
    let [learn, test] = Split::ALL.map(|split| four.generate(5, split, 20).unwrap());
    let [both, unseen] = ["both.csv", "unseen.csv"].map(|name| text(&dir.path().join(name)));
    fs::write(&both, csv(&test, 0, 20) + &csv(&learn, 0, 9)).unwrap();
    fs::write(&unseen, csv(&test, 0, 11)).unwrap();
    let eval = |more: &[&str]| kiln([&["eval", &text(&run), "--threads", "1"][..], more].concat()).ok().out;
    // The run's data.test_puzzles is 13, its batch 5.
    let cases: [(&[&str], &str, [u64; 4]); 4] = [
        (&[], "13 puzzles evaluated, none left out", [13, 0, 0, 0]),
        (&["--data", &unseen], "11 puzzles evaluated, none left out", [11, 0, 0, 0]),
        (&["--data", &both], "13 puzzles evaluated, 16 left out: 9 of the training side, 7 beyond data.test_puzzles\n", [13, 9, 7, 0]),
        (&["--data", &unseen, "--batches", "2"], "10 puzzles evaluated, 1 left out: 1 beyond train.eval_batches\n", [10, 0, 0, 1]),
    ];
    for (more, line, [evaluated, training_side, test_puzzles, eval_batches]) in cases {
        let said = eval(more);
        assert!(said.contains(line), "{more:?}: {said}");
        let value: Value = serde_json::from_str(&eval(&[more, &["--json"]].concat())).unwrap();
        let left_out = serde_json::json!({ "training_side": training_side, "test_puzzles": test_puzzles, "eval_batches": eval_batches });
        let expected = serde_json::json!({ "what": "puzzles", "evaluated": evaluated, "left_out": left_out });
        assert_eq!(value["counted"], expected, "{more:?}");
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let cases: [(&[&str], &str); 22] = [
        (&["heads=3"], "a whole, even number"),
        (&["dim=6"], "a whole, even number"),
        (&["heads=0"], "model.heads = 0: from 1 to"),
        (&["top_k=4"], "model.top_k = 4: from 1 to model.experts = 3"),
        (&["top_k=0"], "model.top_k = 0"),
        (&["batch=1048576", "experts=200", "top_k=200"], "1048576 x 17 x 200: experts have fewer than 2^31 rows"),
        (&["experts=2000"], "model.experts = 2000: from 0 to 1024"),
        (&["max_segments=0"], "model.max_segments = 0"),
        (&["low_cycles=0"], "model.low_cycles = 0"),
        (&["explore=1.5"], "model.explore = 1.5"),
        (&["halt_weight=nan"], "model.halt_weight"),
        (&["norm_eps=0.0"], "model.norm_eps = 0.0: from 1e-30 to 1.0"),
        (&["seq=16"], "use --set model.seq=17"),
        (&["seq=17", "prefix=3"], "use --set model.seq=19"),
        (&["vocab=5"], "sudoku-4x4 has 6 tokens"),
        (&["vocab=300"], "a token is a byte"),
        (&["side=5"], "4 or 9 cells a side"),
        (&["task=maze", "side=4"], "5 to 128 cells a side"),
        (&["task=chess"], "chess"),
        (&["train_puzzles=0"], "data.train_puzzles = 0"),
        (&["train_puzzles=67108865"], "data.train_puzzles = 67108865: from 1 to 67108864 of sudoku-4x4"),
        (&["task=maze", "side=128", "seq=16385", "test_puzzles=65537"], "data.test_puzzles = 65537: from 1 to 65536 of maze-128x128"),
    ];
    for (sets, part) in cases {
        let error = hrm().task(&config(sets)).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(part), "{sets:?}: {error}");
    }
    assert!(recipe::preset(hrm(), None).unwrap().set("accumulate=2").is_err(), "a step is one batch");
    // What cannot be generated is said when it is asked for.
    for (sets, need) in
        [(&["hardness=900"][..], "ask for fewer guesses)"), (&["hardness=900", "task=maze", "side=5", "seq=26"], "so long a path")]
    {
        let error = hrm().task(&config(sets)).unwrap().begin(0).unwrap_err().to_string();
        assert!(error.starts_with("data.hardness = 900: none of") && error.contains(need), "{sets:?}: {error}");
    }
    // Dense whatever top_k says.
    loaded(&config(&["experts=1", "top_k=7"]));
}

#[test]
fn the_presets_are_what_they_say() {
    let parameters = |name: &str| {
        let c = recipe::preset(hrm(), Some(name)).unwrap();
        let task = hrm().task(&c).unwrap();
        let graphs = task.graphs();
        graphs[0].1.states().filter(|(s, _)| s.role == engine::Role::Param).map(|(_, m): (_, &Meta)| m.elements()).sum::<usize>() as f64
            / 1e6
    };
    assert!((parameters("sudoku") - 27.3).abs() < 0.1, "{}", parameters("sudoku"));
    assert!((parameters("sudoku-moe") - 83.9).abs() < 0.5, "{}", parameters("sudoku-moe"));
    parameters("tiny");
    parameters("maze");
}
