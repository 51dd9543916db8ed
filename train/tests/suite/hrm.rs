//! hrm against PyTorch's numbers, and against a plain model of its slots.

use engine::philox::{fill_halves, rng_feed};
use engine::{Cpu, Data, Device, Switches};
use kiln::config::Config;
use kiln::data::puzzles::{Size, Task as Puzzle};
use kiln::golden::{Golden, compare, rule};
use kiln::recipe::{self, Recipe, Session, Task};
use kiln::recipes::hrm::HrmConfig;
use kiln::run;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::tempdir;

pub fn hrm() -> &'static dyn Recipe {
    recipe::find("hrm").unwrap()
}

pub fn device() -> Device {
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
    for setting in [&[][..], &off, &[("chunked-scan", "require,chunk=16")], &[("recompute", "auto,what=blocks")]] {
        check("../reference/golden/hrm-mamba2.safetensors", setting);
    }
}

#[test]
fn in_bf16_everything_points_the_same_way() {
    for file in ["tests/golden/hrm-dense.safetensors", "tests/golden/hrm-top3.safetensors", "../reference/golden/hrm-mamba2.safetensors"] {
        check(file, &[("bf16", "require")]);
    }
}

/// A model whose segment takes a millisecond.
pub const LITTLE: &[&str] = &[
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

pub fn config(sets: &[&str]) -> Config {
    let mut c = recipe::preset(hrm(), None).unwrap();
    LITTLE.iter().chain(sets).for_each(|s| c.set(s).unwrap());
    c
}

pub fn loaded(c: &Config) -> (Box<dyn Task>, Session) {
    let task = hrm().task(c).unwrap();
    let s = run::load(&*task, c, &device()).unwrap();
    (task, s)
}

pub fn state(s: &Session, name: &str) -> Vec<f32> {
    s.store.get(name).unwrap().f32().unwrap()
}

pub fn set(s: &mut Session, name: &str, f: impl FnMut(usize) -> f32) {
    let meta = s.store.get(name).unwrap().meta.clone();
    let numbers: Vec<f32> = (0..meta.elements()).map(f).collect();
    s.store.set(name, &meta, bytemuck::cast_slice(&numbers)).unwrap();
}

pub fn everything(s: &Session, kept: bool) -> Vec<(String, Vec<u8>)> {
    let own = s.store.iter().filter(|(n, _)| !kept || recipe::is_kept(n));
    own.map(|(n, t)| (n.to_string(), t.bytes().unwrap().to_vec())).collect()
}

/// One step on examples of one's own, with a learning rate of 0; what it reports.
pub fn step(t: &dyn Task, s: &mut Session, number: u64, [ids, targets]: [&[i32]; 2]) -> Vec<(String, f64)> {
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
