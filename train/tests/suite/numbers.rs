//! What must be equal is equal: micro-batches and whole batches, passes on and off, one thread pool and the next, cached and
//! uncached decoding.

use engine::passes::Target;
use engine::{Compiled, Cpu, DType, Data, Device, Recorder};
use kiln::config::Config;
use kiln::recipe::{self, Generator, Session, Step, Task, TextModel};
use kiln::recipes::hydra::{Hydra, HydraConfig};
use kiln::run;

fn config(preset: &str, sets: &[&str]) -> Config {
    let mut c = recipe::preset(recipe::find("hydra").unwrap(), Some(preset)).unwrap();
    sets.iter().for_each(|s| c.set(s).unwrap());
    recipe::find("hydra").unwrap().sized(&c).unwrap()
}

fn task(c: &Config) -> Box<dyn Task> {
    recipe::find("hydra").unwrap().task(c).unwrap()
}

fn step(t: &mut dyn Task, s: &mut Session, i: u64) -> Step {
    t.step(s, i, 1e-3).unwrap();
    t.report(s).unwrap().finish().unwrap()
}

/// A few steps: the losses' bits, and the parameters afterwards.
fn train(c: &Config, threads: usize, steps: u64) -> (Vec<f64>, Vec<(String, Vec<f32>)>) {
    let mut t = task(c);
    let mut s = run::load(&*t, c, &Device::cpu(Cpu::new(threads))).unwrap();
    t.begin(0).unwrap();
    let losses = (0..steps).map(|i| step(&mut *t, &mut s, i).values[0].1).collect();
    let params = s.store.iter().filter(|(_, x)| x.role == engine::Role::Param).map(|(n, x)| (n.to_string(), x.f32().unwrap())).collect();
    (losses, params)
}

const LITTLE: &[&str] = &["dim=64", "hidden=96", "seq=48", "batch=4", "blocks=3"];

#[test]
fn two_half_batches_are_one_batch() {
    // Masked targets make the halves count differently: a mean of means would show.
    let masked = [LITTLE, &["ignore_tokens=[32, 101, 46]"]].concat();
    let (whole, after) = train(&config("tiny", &masked), 2, 3);
    let (halves, after_halves) = train(&config("tiny", &[&masked[..], &["batch=2", "accumulate=2"]].concat()), 2, 3);
    for (a, b) in whole.iter().zip(&halves) {
        assert!((a - b).abs() <= 1e-6 * a, "{whole:?} {halves:?}");
    }
    for ((name, a), (_, b)) in after.iter().zip(&after_halves) {
        let error = engine::check::relative(b, a);
        assert!(error < 2e-6, "{name} differs by {error:.1e}");
    }
}

#[test]
fn the_same_run_twice_is_the_same_bits() {
    let c = config("tiny", LITTLE);
    assert_eq!(train(&c, 2, 3), train(&c, 2, 3));
    let (a, b) = (train(&c, 1, 3), train(&c, 2, 3));
    assert!(a.0.iter().zip(&b.0).all(|(x, y)| (x - y).abs() < 1e-5), "{:?} {:?}", a.0, b.0);
    assert_ne!(train(&config("tiny", &[LITTLE, &["seed=1"]].concat()), 2, 1).0, b.0[..1]);
}

fn planned(c: &Config) -> (Compiled, usize) {
    let graph = task(c).graphs().remove(0).1;
    let compiled = Compiled::new(graph, &c.switches().unwrap(), Target::Cpu).unwrap();
    compiled.plan.verify(&compiled.graph).unwrap();
    let memory = compiled.plan.memory;
    (compiled, memory.activations)
}

#[test]
fn recompute_saves_memory_and_changes_no_bit() {
    let setting = |what: &str| config("small", &["batch=2", what]);
    let (off, cheap, blocks) = (
        setting("passes.recompute=off"),
        setting("passes.recompute=require,what=memory-bound"),
        setting("passes.recompute=require,what=blocks"),
    );
    let full = |c: &Config| {
        planned(&config("small", &[&format!("passes.recompute={}", c.to_json()["passes"]["recompute"].as_str().unwrap())])).1 as f64
    };
    let (a, b, c) = (full(&off), full(&cheap), full(&blocks));
    assert!(c <= 0.4 * a && b < 0.8 * a, "activations: {a} without, {b} memory-bound, {c} blocks");
    let reference = train(&off, 2, 2);
    assert_eq!(train(&blocks, 2, 2), reference);
    assert_eq!(train(&cheap, 2, 2), reference);
}

#[test]
fn linear_ce_saves_memory_and_keeps_the_loss() {
    let setting = |v: &str| config("small", &["vocab=50304", "batch=8", &format!("passes.linear-cross-entropy={v}")]);
    let loss_part = |c: &Config| planned(c).0.by_part()["loss"] as f64;
    let (off, on) = (setting("off"), setting("require"));
    assert!(loss_part(&off) >= 4.0 * loss_part(&on), "{} and {}", loss_part(&off), loss_part(&on));
    let fewer = |c: &Config| {
        let mut c = c.clone();
        ["batch=1", "blocks=2", "dim=64", "hidden=64"].iter().for_each(|s| c.set(s).unwrap());
        train(&c, 2, 2).0
    };
    for (a, b) in fewer(&off).iter().zip(fewer(&on)) {
        assert!((a - b).abs() <= 1e-6 * a, "{a} {b}");
    }
}

#[test]
fn every_plan_keeps_live_buffers_apart() {
    for passes in [&["passes.in-place=off"][..], &["passes.fuse-pointwise=off"], &["passes.flash-attention=off"], &["accumulate=2"]] {
        let c = config("tiny", passes);
        for (_, graph) in task(&c).graphs() {
            let compiled = Compiled::new(graph, &c.switches().unwrap(), Target::Cpu).unwrap();
            compiled.plan.verify(&compiled.graph).unwrap();
        }
    }
}

/// Logits after every token, through the caches: chunks of `first` tokens, then one by one.
fn cached(s: &mut Session, g: &mut dyn Generator, tokens: &[u32], first: usize) -> Vec<Vec<f32>> {
    g.begin(s, tokens.len()).unwrap();
    let mut all = vec![g.feed(s, &tokens[..first]).unwrap()];
    all.extend(tokens[first..].iter().map(|&t| g.feed(s, &[t]).unwrap()));
    all
}

#[test]
fn cached_decoding_equals_uncached() {
    // Longer than the training length of 48, and than one chunk of a prompt.
    let c = config("tiny", LITTLE);
    let (time, first) = (150, 70);
    let mut t = task(&c);
    let mut s = run::load(&*t, &c, &Device::cpu(Cpu::new(2))).unwrap();
    t.begin(0).unwrap();
    for i in 0..20 {
        t.step(&mut s, i, 3e-3).unwrap();
    }
    let tokens: Vec<u32> = (0..time as u32).map(|i| 97 + (i * i + i / 3) % 26).collect();
    let model: HydraConfig = c.section("model").unwrap();
    let r = Recorder::new();
    let h = Hydra { c: &model, r: &r };
    let hidden = h.causal_hidden(r.feed("ids", &[1, time], DType::I32)).reshape(&[time, model.dim]);
    r.output("logits", hidden.linear(h.embedding()));
    s.load("uncached", r.finish()).unwrap();
    let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
    s.run("uncached", &[("ids", Data::I32(&ids))]).unwrap();
    let whole = s.read("uncached", "logits").unwrap();
    let Ok(TextModel::Continues(mut generator)) = recipe::find("hydra").unwrap().writes().unwrap().text_model(&c, None) else {
        panic!("hydra continues text")
    };
    let steps = cached(&mut s, &mut *generator, &tokens, first);
    for (i, logits) in steps.iter().enumerate() {
        let at = first - 1 + i;
        let expected = &whole[at * model.vocab..][..model.vocab];
        let error = engine::check::relative(logits, expected);
        assert!(error < 1e-5, "after token {at}: off by {error:.1e}");
        let best = |x: &[f32]| (0..x.len()).max_by(|&a, &b| x[a].total_cmp(&x[b]));
        assert_eq!(best(logits), best(expected), "after token {at}");
    }
}

#[test]
fn a_step_that_is_not_finite_changes_nothing_but_the_count() {
    let c = config("tiny", LITTLE);
    let mut t = task(&c);
    let mut s = run::load(&*t, &c, &Device::cpu(Cpu::new(2))).unwrap();
    t.begin(0).unwrap();
    t.step(&mut s, 0, 1e-3).unwrap();
    let meta = s.store.get("norm").unwrap().meta.clone();
    let whole = s.store.get("norm").unwrap().bytes().unwrap().to_vec();
    let mut broken = vec![1.0f32; meta.elements()];
    broken[3] = f32::INFINITY;
    s.store.set("norm", &meta, bytemuck::cast_slice(&broken)).unwrap();
    let all = |s: &Session| -> Vec<(String, Vec<u8>)> {
        let kept = s.store.iter().filter(|(n, _)| !n.starts_with("adam.skipped"));
        kept.map(|(n, x)| (n.to_string(), x.bytes().unwrap().to_vec())).collect()
    };
    let before = all(&s);
    let report = step(&mut *t, &mut s, 1);
    assert_eq!((report.skipped_in_row, all(&s) == before), (1, true));
    s.store.set("norm", &meta, &whole).unwrap();
    let report = step(&mut *t, &mut s, 2);
    assert_eq!(report.skipped_in_row, 0);
    assert_eq!(report.values.iter().find(|v| v.0 == "skipped").unwrap().1, 1.0);
    assert_ne!(all(&s), before);
}
