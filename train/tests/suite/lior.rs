//! lior against PyTorch's numbers, against itself with every pass switched off, and against what its nudge is meant to do.

use engine::passes::Target;
use engine::{Compiled, Cpu, Data, Device, Meta, Switches};
use kiln::config::Config;
use kiln::golden::{Golden, compare, rule};
use kiln::recipe::{self, Session, Task};
use kiln::recipes::lior::LiorConfig;
use kiln::run;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> Golden {
    Golden::open(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

fn device() -> Device {
    Device::cpu(Cpu::new(2))
}

fn off() -> Vec<(&'static str, &'static str)> {
    engine::passes::all().filter(|p| !p.required()).map(|p| (p.name(), "off")).collect()
}

fn check(file: &Golden, setting: &[(&str, &str)]) {
    let mut switches = Switches::default();
    setting.iter().for_each(|(name, value)| switches.set(name, value).unwrap());
    let reference = recipe::find("lior").unwrap().reference().unwrap();
    let computed = reference.compute(file, &switches, &device()).unwrap();
    let all = compare(file, &computed, &rule(reference, file, &switches, &device(), 1e-5, None).unwrap());
    assert_eq!(all.len(), 12, "four metrics, the loss, and the whole state");
    let bad: Vec<String> = all.iter().filter(|c| !c.ok).map(|c| format!("{} off by {:.2e}", c.name, c.error)).collect();
    assert!(bad.is_empty(), "{setting:?}: {bad:?}");
}

#[test]
fn golden_with_passes_on_and_off() {
    let file = golden("../reference/golden/lior.safetensors");
    for setting in [&[][..], &off(), &[("fuse-evolution", "require"), ("fuse-retrieval", "require"), ("flash-attention", "require")]] {
        check(&file, setting);
    }
}

#[test]
fn the_encoder_in_bf16_leaves_the_geometry_in_f32() {
    let file = golden("../reference/golden/lior.safetensors");
    check(&file, &[("bf16", "require")]);
    check(&file, &[("bf16", "require"), ("fuse-evolution", "off"), ("fuse-retrieval", "off")]);
    // Nothing but the encoder's rows is narrow, whether the geometry is fused or written out.
    let c = config(&[]);
    for fused in ["auto", "off"] {
        let mut switches = Switches::default().with("bf16", "require").unwrap();
        ["fuse-evolution", "fuse-retrieval"].iter().for_each(|p| switches.set(p, fused).unwrap());
        for (name, graph) in task(&c).graphs().into_iter().take(2) {
            let g = Compiled::new(graph, &switches, Target::Cpu).unwrap().graph;
            let narrow: Vec<&str> = g.nodes.iter().filter(|n| n.outputs.iter().any(|m| m.dtype.size() == 2)).map(|n| &*n.scope).collect();
            assert!(!narrow.is_empty() && narrow.iter().all(|s| s.starts_with("encoder") || s.starts_with("target")), "{name}: {narrow:?}");
        }
    }
}

/// A model whose window takes a few milliseconds.
const LITTLE: &[&str] = &[
    "dim=32",
    "heads=2",
    "seq=24",
    "after=4",
    "memory=20",
    "field=[3, 2, 6, 5]",
    "model.steps=6",
    "rows=300",
    "n=5",
    "rotor_layers=3",
    "batch=3",
    "eval_batches=1",
];

/// As the reference learns: without what the presets add.
const BARE: &[&str] = &["decay=0.0", "gauge=false", "nudge_every=1", "probe=false"];

fn config(sets: &[&str]) -> Config {
    let mut c = recipe::preset(recipe::find("lior").unwrap(), None).unwrap();
    LITTLE.iter().chain(BARE).chain(sets).for_each(|s| c.set(s).unwrap());
    c
}

fn task(c: &Config) -> Box<dyn Task> {
    recipe::find("lior").unwrap().task(c).unwrap()
}

/// Every window's report, and the session behind the last.
fn windows(c: &Config, count: u64) -> (Vec<Vec<(String, f64)>>, Session) {
    let mut t = task(c);
    let mut s = run::load(&*t, c, &device()).unwrap();
    t.begin(0).unwrap();
    let one = |i: u64| {
        t.step(&mut s, i, 1e-2).unwrap();
        t.report(&s).unwrap().finish().unwrap().values
    };
    let all = (0..count).map(one).collect();
    (all, s)
}

fn state(s: &Session, name: &str) -> Vec<f32> {
    s.store.get(name).unwrap().f32().unwrap()
}

fn everything(s: &Session) -> Vec<(String, Vec<u8>)> {
    s.store.iter().map(|(n, t)| (n.to_string(), t.bytes().unwrap().to_vec())).collect()
}

#[test]
fn two_hundred_windows_with_every_pass_on_and_off() {
    let switched: Vec<String> = off().iter().map(|(name, value)| format!("passes.{name}={value}")).collect();
    let switched: Vec<&str> = switched.iter().map(String::as_str).collect();
    let ((on, s), (plain, p)) = (windows(&config(&[]), 200), windows(&config(&switched), 200));
    for (i, (a, b)) in on.iter().zip(&plain).enumerate() {
        for ((name, x), (_, y)) in a.iter().zip(b) {
            let allowed = if name.starts_with("rotor") { 1e-3 } else { 1e-4 };
            assert!((x - y).abs() <= allowed, "{name} of window {i}: {x} and {y}");
        }
    }
    assert_eq!((state(&s, "filled"), state(&s, "windows")), (vec![600.0], vec![200.0]));
    assert_eq!(state(&s, "filled"), state(&p, "filled"));
    // It learned something: neither metric nor rotor is where it began.
    assert!(state(&s, "g").iter().all(|&g| g != 1.0) && state(&s, "theta").iter().all(|&t| t != 0.0));
}

#[test]
fn the_same_run_twice_is_the_same_bits() {
    let c = config(&[]);
    let ((a, s), (b, p)) = (windows(&c, 5), windows(&c, 5));
    assert_eq!(a, b);
    assert_eq!(everything(&s), everything(&p));
    assert_ne!(windows(&config(&["seed=1"]), 5).0, a);
}

#[test]
fn a_window_is_the_same_however_many_rows_go_at_a_time() {
    let whole = windows(&config(&["rows=10000"]), 3).0;
    for rows in ["rows=1", "rows=150", "rows=300"] {
        for (a, b) in whole.iter().flatten().zip(windows(&config(&[rows]), 3).0.iter().flatten()) {
            assert!((a.1 - b.1).abs() < 1e-5, "{rows}: {a:?} {b:?}");
        }
    }
}

#[test]
fn without_a_nudge_nothing_is_learned_exactly() {
    for passes in [&[][..], &["passes.fuse-retrieval=off", "passes.fuse-evolution=off", "passes.share=off"], &["passes.bf16=auto"]] {
        let (reports, s) = windows(&config(&[&["nudge=0.0"], passes].concat()), 4);
        for report in reports {
            let value = |name: &str| report.iter().find(|v| v.0 == name).unwrap().1;
            assert_eq!(value("delta"), 0.0);
            assert!(value("lior") > 0.0 && value("curvature") > 0.0);
        }
        assert_eq!((state(&s, "g"), state(&s, "theta")), (vec![1.0; 5], vec![0.0; 6]));
        // What does not learn goes on all the same.
        assert_eq!(state(&s, "filled"), [12.0]);
        assert!(state(&s, "memory_coord")[..60].iter().all(|&v| v != 0.0));
    }
    // A rotor that is not at zero stays where it is, too: going around the circle costs no bit.
    let c = config(&["nudge=0.0"]);
    let mut t = task(&c);
    let mut s = run::load(&*t, &c, &device()).unwrap();
    t.begin(0).unwrap();
    let angles = [0.05f32, -3.1, 3.0, -0.7, 1.5, 1e-6];
    s.store.set("theta", &Meta::f32(&[6]), bytemuck::cast_slice(&angles)).unwrap();
    t.step(&mut s, 0, 1e-2).unwrap();
    assert_eq!(state(&s, "theta"), angles);
}

/// One window whose tokens all lie at one place and whose following tokens lie `by` further along one coordinate: (nudge of the first row,
/// change of the metric). Layers that add nothing leave of the encoder its embedding and its norm.
fn learned(axis: usize, by: f32) -> (Vec<f32>, Vec<f32>) {
    let c = recipe::find("lior").unwrap().sized(&config(&["nudge=0.1"])).unwrap();
    let model: LiorConfig = c.section("model").unwrap();
    let t = task(&c);
    let mut s = run::load(&*t, &c, &device()).unwrap();
    let set = |s: &mut Session, name: &str, f: &dyn Fn(usize) -> f32| {
        let meta = s.store.get(name).unwrap().meta.clone();
        let numbers: Vec<f32> = (0..meta.elements()).map(f).collect();
        s.store.set(name, &meta, bytemuck::cast_slice(&numbers)).unwrap();
    };
    for name in ["encoder.position", "encoder.out", "encoder.down"] {
        set(&mut s, name, &|_| 0.0);
    }
    // Token 0 has 0.3 in every coordinate, token 1 has `by` more along the axis; the last columns keep mean and size as they are.
    set(&mut s, "encoder.embedding", &|i| {
        let (token, column) = (i / model.dim, i % model.dim);
        let moved = if token == 1 { by } else { 0.0 };
        match column {
            k if k < model.n => 0.3 + if k == axis { moved } else { 0.0 },
            k if k == model.dim - 1 => -0.3 * model.n as f32 - moved,
            k if (k - model.n).is_multiple_of(2) => 1.0,
            _ => -1.0,
        }
    });
    let batch = t.train_config().batch;
    let (ids, after, mask) = (vec![0; batch * model.seq], vec![1; batch * model.after], vec![1; batch * model.seq]);
    let feeds = [("ids", Data::I32(&ids)), ("after", Data::I32(&after)), ("mask", Data::U8(&mask))];
    s.run("free", &feeds).unwrap();
    s.run("nudged", &feeds).unwrap();
    s.run("update", &[("rate", Data::F32(&[1e-2]))]).unwrap();
    let nudge = state(&s, "scratch/nudge")[..model.n].to_vec();
    (nudge, state(&s, "g").iter().map(|g| g - 1.0).collect())
}

/// A session after windows with these rates, from this metric and these angles; and every window's report.
fn rated(sets: &[&str], rates: &[f64], (metric, angles): ([f32; 5], [f32; 6])) -> (Vec<Vec<(String, f64)>>, Session) {
    let c = config(sets);
    let mut t = task(&c);
    let mut s = run::load(&*t, &c, &device()).unwrap();
    t.begin(0).unwrap();
    s.store.set("g", &Meta::f32(&[5]), bytemuck::cast_slice(&metric)).unwrap();
    s.store.set("theta", &Meta::f32(&[6]), bytemuck::cast_slice(&angles)).unwrap();
    let mut one = |(i, rate): (usize, &f64)| {
        t.step(&mut s, i as u64, *rate).unwrap();
        t.report(&s).unwrap().finish().unwrap().values
    };
    let all = rates.iter().enumerate().map(&mut one).collect();
    (all, s)
}

const SOMEWHERE: ([f32; 5], [f32; 6]) = ([0.5, 2.0, 1.5, 0.8, 1.1], [0.4, -0.3, 0.2, -0.1, 0.6, 0.05]);

/// Both are applied to what the rule without them has found.
#[test]
fn decay_shrinks_the_geometry_and_the_gauge_holds_its_mean() {
    // The schedule's rate is half of the highest, and so is the decay.
    let (decay, rate) = (0.1f32, [5e-3]);
    let bare = rated(&[], &rate, SOMEWHERE).1;
    let (g, angles) = (state(&bare, "g"), state(&bare, "theta"));
    for (sets, gauge) in [(["decay=0.1", "gauge=false"], false), (["decay=0.1", "gauge=true"], true), (["decay=0.0", "gauge=true"], true)] {
        let decay = if sets[0] == "decay=0.0" { 0.0 } else { 0.5 * decay };
        let s = rated(&sets, &rate, SOMEWHERE).1;
        let logs: Vec<f32> = g.iter().map(|g| (1.0 - decay) * g.ln()).collect();
        let mean = if gauge { logs.iter().sum::<f32>() / 5.0 } else { 0.0 };
        for (i, (ours, log)) in state(&s, "g").iter().zip(&logs).enumerate() {
            assert!((ours - (log - mean).exp()).abs() < 1e-5, "{sets:?}: coordinate {i} is {ours}, not {}", (log - mean).exp());
        }
        for (i, (ours, plain)) in state(&s, "theta").iter().zip(&angles).enumerate() {
            let wanted = plain - decay * SOMEWHERE.1[i];
            assert!((ours - wanted).abs() < 1e-6, "{sets:?}: angle {i} is {ours}, not {wanted}");
        }
        assert_eq!(state(&s, "memory_coord"), state(&bare, "memory_coord"));
    }
    // With both nothing runs away, however long it learns.
    let (reports, s) = rated(&["decay=0.05", "gauge=true", "learning_rate=5e-2"], &[5e-2; 300], SOMEWHERE);
    for report in &reports {
        let metric: Vec<f64> = report.iter().filter(|v| v.0.starts_with("metric")).map(|v| v.1).collect();
        assert!((metric.iter().map(|g| g.ln()).sum::<f64>()).abs() < 1e-4, "{metric:?}");
    }
    assert!(state(&s, "g").iter().all(|g| (0.5..2.0).contains(g)) && state(&s, "g").iter().any(|g| (g - 1.0).abs() > 1e-3));
    assert!(state(&s, "theta").iter().all(|t| t.abs() < 0.1));
}

/// A window that is not nudged is one whose rate is zero, in everything but its cost and what it reports as the difference.
#[test]
fn between_nudges_nothing_is_learned_and_everything_else_goes_on() {
    let r = 1e-2;
    for more in [&[][..], &["batch=2", "accumulate=2"]] {
        let (every, s) = rated(&[&["nudge_every=3"], more].concat(), &[r; 7], SOMEWHERE);
        let (zero, p) = rated(more, &[0.0, 0.0, r, 0.0, 0.0, r, 0.0], SOMEWHERE);
        for name in ["g", "theta", "memory_coord", "memory_state", "filled", "windows", "field.re", "field.im"] {
            assert_eq!(state(&s, name), state(&p, name), "{name}");
        }
        assert_ne!(state(&s, "g"), SOMEWHERE.0);
        let mut last = 0.0;
        for (i, (a, b)) in every.iter().zip(&zero).enumerate() {
            assert_eq!(a.len(), b.len());
            for ((name, ours), (_, theirs)) in a.iter().zip(b) {
                if name == "delta" {
                    last = if i % 3 == 2 { *theirs } else { last };
                    assert_eq!(*ours, last, "window {i}: that of the last nudge");
                } else {
                    assert_eq!(ours, theirs, "{name} of window {i}");
                }
            }
        }
        assert!(last != 0.0);
    }
    let (c, plain) = (config(&["nudge_every=3"]), config(&[]));
    assert_eq!((task(&c).runs("nudged"), task(&c).runs("passed"), task(&c).period()), (1.0 / 3.0, 1.0 - 1.0 / 3.0, 3));
    assert_eq!((task(&plain).runs("nudged"), task(&plain).graphs().len(), task(&plain).period()), (1.0, 3, 1));
}

/// The memory notes what followed each window, and an evaluation looks there.
#[test]
fn the_probe_counts_what_followed() {
    let c = config(&["probe=true", "batch=4", "eval_batches=2", "eval_batch=3"]);
    let mut t = task(&c);
    let mut s = run::load(&*t, &c, &device()).unwrap();
    t.begin(0).unwrap();
    let found = |t: &mut Box<dyn Task>, s: &mut Session| -> Vec<f64> {
        let all = t.evaluate(s).unwrap().values;
        all.iter().filter(|v| v.0.starts_with("found")).map(|v| v.1).collect()
    };
    assert!(found(&mut t, &mut s).is_empty(), "an empty memory");
    let after: Vec<i32> = (0..4).flat_map(|row| [[10, 20, 10, 30][row], 99, 99, 99]).collect();
    let ids: Vec<i32> = (0..4 * 24).map(|i| i * 7 % 256).collect();
    let feeds = [("ids", Data::I32(&ids)), ("after", Data::I32(&after)), ("mask", Data::U8(&[1; 4 * 24]))];
    for program in ["free", "nudged"] {
        s.run(program, &feeds).unwrap();
    }
    s.run("update", &[("rate", Data::F32(&[0.0]))]).unwrap();
    let next = state(&s, "memory_next");
    assert_eq!((&next[..4], next.len()), (&[10.0, 20.0, 10.0, 30.0][..], 20));
    // With one token everywhere, what is nearest does not matter: all three are the share of windows that it follows.
    for token in [b' ', b'e'] {
        s.store.set("memory_next", &Meta::f32(&[20, 1]), bytemuck::cast_slice(&[token as f32; 20])).unwrap();
        let all = found(&mut t, &mut s);
        assert!(all.len() == 3 && all.iter().all(|v| *v == all[0]) && (all[0] * 6.0).fract() == 0.0, "{all:?}");
    }
    // A geometry that nobody learned finds what the initial one finds.
    s.store.set("memory_next", &Meta::f32(&[20, 1]), bytemuck::cast_slice(&[32.0f32, 101.0, 32.0, 116.0].repeat(5))).unwrap();
    let all = found(&mut t, &mut s);
    assert_eq!(all[0], all[1]);
}

#[test]
fn what_the_nudge_lengthens_becomes_cheaper() {
    for axis in 0..5 {
        let others = |v: &[f32], f: fn(f32) -> f32| (0..5).filter(|&i| i != axis).map(|i| f(v[i])).fold(f32::MIN, f32::max);
        let (nudge, change) = learned(axis, 2.0);
        assert!(nudge[axis] > 0.1 && others(&nudge, f32::abs) < 0.2 * nudge[axis], "axis {axis}: the nudge is {nudge:?}");
        assert!(change[axis] < 0.0 && others(&change, |v| -v) < -0.3 * change[axis], "axis {axis}: the metric changed by {change:?}");
        // What the nudge shortens becomes dearer.
        let (nudge, change) = learned(axis, -0.6);
        assert!(nudge[axis] < 0.0 && change[axis] > 0.0 && others(&change, |v| v) < change[axis], "axis {axis}: {nudge:?} {change:?}");
    }
}

fn kiln(args: &[&str]) -> (bool, String) {
    let run = std::process::Command::new(env!("CARGO_BIN_EXE_kiln")).env("CUDA_VISIBLE_DEVICES", "").args(args).output().unwrap();
    (run.status.success(), String::from_utf8_lossy(&[&run.stdout[..], &run.stderr].concat()).to_string())
}

fn train(out: &Path, more: &[&str]) -> String {
    let sets: Vec<&str> = LITTLE.iter().flat_map(|s| ["--set", s]).collect();
    let all = [&["train", "lior", "--threads", "1", "--out", out.to_str().unwrap()][..], &sets, more].concat();
    let (ok, text) = kiln(&all);
    assert!(ok, "{text}");
    text
}

#[test]
fn stopped_and_resumed_is_never_having_stopped_and_the_pictures_are_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, halves) = (dir.path().join("whole"), dir.path().join("halves"));
    let text = train(&whole, &["--steps", "30"]);
    assert!(text.contains("lior") && text.contains("windows/s") && text.contains("geometry.svg"), "{text}");
    train(&halves, &["--steps", "11", "--set", "horizon=30"]);
    let (ok, text) = kiln(&["train", "--out", halves.to_str().unwrap(), "--resume", "--steps", "30", "--threads", "1"]);
    assert!(ok, "{text}");
    for file in ["model.safetensors", "state.safetensors"] {
        let read = |run: &Path| std::fs::read(run.join("checkpoints/step-00000030").join(file)).unwrap();
        assert!(read(&whole) == read(&halves), "{file} differs");
    }
    for file in ["lior.svg", "geometry.svg"] {
        assert!(std::fs::read_to_string(whole.join(file)).unwrap().contains("<svg"), "{file}");
    }
    let metrics = std::fs::read_to_string(whole.join("metrics.jsonl")).unwrap();
    let last = metrics.lines().last().unwrap();
    crate::common::all_meant(&whole, &[serde_json::from_str(last).unwrap()]);
    let probed = ["\"val_found\"", "\"val_found_initial\"", "\"val_found_chance\""];
    for key in ["\"lior\"", "\"curvature\"", "\"speed\"", "\"delta\"", "\"metric.4\"", "\"rotor.5\"", "\"val_lior\""].iter().chain(&probed)
    {
        assert!(last.contains(key), "{key} in {last}");
    }
    // Evaluation reads the field and the memory of the checkpoint.
    let (ok, text) = kiln(&["eval", whole.to_str().unwrap(), "--json", "--threads", "1"]);
    assert!(ok, "{text}");
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let recorded: serde_json::Value = serde_json::from_str(last).unwrap();
    crate::common::all_declared(&value);
    assert_eq!((&value["lior"], &value["found"]), (&recorded["val_lior"], &recorded["val_found"]));
}

/// Where the text has an end, a run says how often it was gone through.
#[test]
fn epochs_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let (data, out) = (dir.path().join("data").display().to_string(), dir.path().join("run"));
    crate::common::kiln(["data", "prepare", "--generated", "60", "--val-share", "0.1", "--out", &data]).ok();
    let text = train(&out, &["--data", &data, "--epochs", "2", "--set", "eval_every=0"]);
    assert!(text.contains("epoch 1 (step ") && text.contains("epoch 2 (step "), "{text}");
    let records = crate::common::records(&out, "train");
    let epochs: Vec<f64> = records.iter().filter(|r| r.get("val_lior").is_some()).map(|r| r["epoch"].as_f64().unwrap()).collect();
    assert!(epochs.len() == 2 && (epochs[1] - 2.0).abs() < 0.1, "{epochs:?}");
}

/// An encoder that another run has trained is what it was there, from the first window to the last; that run is not asked for again.
#[test]
fn an_encoder_is_trained_and_frozen() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let encoder = ["--steps", "120", "--set", "pretrain=true", "--set", "learning_rate=3e-3", "--set", "nudge_every=1", "--set", "batch=8"];
    train(&at("encoder"), &encoder);
    let losses: Vec<f64> = crate::common::records(&at("encoder"), "train").iter().map(|r| r["loss"].as_f64().unwrap()).collect();
    assert!(losses[0] > 5.0 && losses[losses.len() - 1] < 3.3, "{losses:?}");
    assert!(!crate::common::records(&at("encoder"), "val").is_empty());
    let named = format!("model.encoder={}", at("encoder").display());
    train(&at("lior"), &["--steps", "3", "--set", &named, "--set", "horizon=9"]);
    let weights = |run: &str, step: u64| {
        let path = at(run).join(format!("checkpoints/step-{step:08}/model.safetensors"));
        let all = kiln::checkpoint::load_safetensors(&path).unwrap();
        let own = all.names().into_iter().filter(|n| n.starts_with("encoder."));
        own.map(|n| (n.clone(), all.get(&n).unwrap().2.to_vec())).collect::<Vec<_>>()
    };
    let trained = weights("encoder", 120);
    assert!(trained.len() == 6 && weights("lior", 3) == trained);
    std::fs::rename(at("encoder"), at("elsewhere")).unwrap();
    let (ok, text) = kiln(&["train", "--out", at("lior").to_str().unwrap(), "--resume", "--steps", "6", "--threads", "1"]);
    assert!(ok && weights("lior", 6) == trained, "{text}");

    let refused = |sets: &[&str], parts: &[&str]| {
        let all: Vec<&str> = LITTLE.iter().chain(sets).flat_map(|s| ["--set", s]).collect();
        let out = at("refused");
        crate::common::kiln([&["train", "lior", "--out", out.to_str().unwrap()][..], &all].concat()).fails(parts);
        assert!(!out.exists());
    };
    refused(&[&named], &["model.encoder = ", "there is no checkpoint or run folder"]);
    let named = format!("model.encoder={}", at("elsewhere").display());
    refused(&[&named, "dim=16"], &["model.encoder = ", "[256, 32] there, and [256, 16] here", "model.dim, layers"]);
    // Weights have the same shapes with any number of heads.
    refused(&[&named, "heads=4"], &["model.encoder = ", "its model.heads is 2, and 4 here"]);
    refused(&[&named, "pretrain=true"], &["model.encoder = ", "has no use for another"]);
    let decoder = at("decoder").display().to_string();
    let small = "seq=24 layers=1 dim=16 hidden=16 head_dim=8 batch=1 eval_batches=1";
    let sets: Vec<&str> = small.split(' ').flat_map(|s| ["--set", s]).collect();
    crate::common::kiln([&["train", "decoder", "--steps", "1", "--threads", "1", "--out", &decoder][..], &sets].concat()).ok();
    refused(&[&format!("model.encoder={decoder}")], &["model.encoder = ", "has no 'encoder."]);
    // A weight that is not finite, in a checkpoint that is whole otherwise.
    let step = at("elsewhere/checkpoints/step-00000120");
    let (found, all) =
        (kiln::checkpoint::open(&step).unwrap(), kiln::checkpoint::load_safetensors(&step.join("model.safetensors")).unwrap());
    let mut qkv = all.get("encoder.qkv").unwrap().2.to_vec();
    qkv[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let names = all.names();
    let tensor = |name| {
        let (dtype, shape, bytes) = all.get(name).unwrap();
        (name, dtype, shape, if name == "encoder.qkv" { &qkv[..] } else { bytes })
    };
    let parts: Vec<_> = names.iter().map(|name| tensor(name.as_str())).collect();
    let tensors = parts.iter().map(|(name, dtype, shape, bytes)| kiln::checkpoint::Tensor { name, dtype, shape, bytes }).collect();
    let broken = at("broken/checkpoints");
    std::fs::create_dir_all(&broken).unwrap();
    kiln::checkpoint::save(&broken, 1, &[("model.safetensors", tensors)], &[], &found.meta, 0.into()).unwrap();
    refused(&[&format!("model.encoder={}", at("broken").display())], &["model.encoder = ", "'encoder.qkv' holds NaN"]);
}

/// Every window counts once, and alike, in however many batches they are read.
#[test]
fn an_evaluation_is_a_mean_over_its_windows() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data").display().to_string();
    crate::common::kiln(["data", "prepare", "--generated", "60", "--val-share", "0.1", "--out", &data]).ok();
    let evaluated = |batch: usize| {
        let c = config(&[&format!("data.path={data}"), &format!("batch={batch}"), "eval_batches=0"]);
        let mut t = task(&c);
        let mut s = run::load(&*t, &c, &device()).unwrap();
        t.begin(0).unwrap();
        let windows = t.extent().unwrap().unwrap().of.unwrap();
        (windows, t.evaluate(&mut s).unwrap().values)
    };
    let (windows, alone) = evaluated(1);
    assert!(windows > 2, "{windows} windows");
    for batch in [2, 3] {
        let (batches, values) = evaluated(batch);
        assert_eq!(batches, windows.div_ceil(batch as u64));
        for ((name, a), (_, b)) in alone.iter().zip(&values) {
            assert!((a - b).abs() < 1e-4 * a.abs(), "{name}: {a} window by window, {b} in batches of {batch}");
        }
    }
    assert!((2..=3).any(|batch| !windows.is_multiple_of(batch)), "one of them is filled up");
}

#[test]
fn what_does_not_fit_is_said() {
    let cases: [(&str, &str); 10] = [
        ("batch=21", "more than model.memory = 20"),
        ("n=1", "a plane has two axes"),
        ("n=40", "to model.dim = 32"),
        ("heads=3", "does not divide"),
        ("after=25", "no position for the rest"),
        ("dt=0.6", "grows without bound"),
        ("memory_alpha=-100.0", "grows without bound"),
        ("nudge_beta=0.0", "model.nudge_beta = 0.0: from 1e-30"),
        ("train.steps=2000000000", "counter of 32 bits"),
        ("field=[3, 0, 6, 5]", "model.field = [3, 0, 6, 5]: from 1 to 4096"),
    ];
    for (set, part) in cases {
        let error = recipe::find("lior").unwrap().task(&config(&[set])).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(part), "{set}: {error}");
    }
    let masked = config(&["ignore_tokens=[32]"]);
    windows(&masked, 2);
    let all: Vec<String> = (0..256).map(|t| t.to_string()).collect();
    let c = config(&[&format!("ignore_tokens=[{}]", all.join(", "))]);
    let mut t = task(&c);
    let mut s = run::load(&*t, &c, &device()).unwrap();
    t.begin(0).unwrap();
    assert!(t.step(&mut s, 0, 1e-2).unwrap_err().to_string().contains("nothing but data.ignore_tokens"));
}
