//! polychromic against PyTorch's numbers, and its masks, dropout and frozen weights against what they are meant to be.

use crate::common::{checkpoint, kiln, resume, same_bytes, text};
use engine::passes::Target as Machine;
use engine::philox::{fill_normal, rng_feed};
use engine::{Compiled, Cpu, DType, Data, Device, Meta, Recorder, Role, Switches};
use kiln::checkpoint::load_safetensors;
use kiln::config::{Config, Section};
use kiln::golden::{Golden, compare, rule};
use kiln::models::decoder::{Base, Decoder, Places, Rows};
use kiln::models::{Lora, Shape, Target};
use kiln::recipe::{self, Session};
use kiln::recipes::polychromic::PolychromicConfig;
use std::path::PathBuf;

fn device() -> Device {
    Device::cpu(Cpu::new(2))
}

#[test]
fn golden_with_passes_on_and_off() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../reference/golden/polychromic.safetensors");
    let file = Golden::open(&path).unwrap();
    let off: Vec<(&str, &str)> = engine::passes::all().filter(|p| !p.required()).map(|p| (p.name(), "off")).collect();
    let settings: [&[(&str, &str)]; 5] = [
        &[],
        &off,
        &[("recompute", "require,what=blocks"), ("flash-attention", "require")],
        &[("bf16", "require")],
        &[("bf16", "require,residual=f32")],
    ];
    for setting in settings {
        let mut switches = Switches::default();
        setting.iter().for_each(|(name, value)| switches.set(name, value).unwrap());
        let reference = recipe::find("polychromic").unwrap().reference().unwrap();
        let computed = reference.compute(&file, &switches, &device()).unwrap();
        let all = compare(&file, &computed, &rule(reference, &file, &switches, &device(), 1e-5, None).unwrap());
        assert_eq!(all.len(), 2 * 28 + 7, "every adapter's gradient and next value, the loss, three metrics, three outputs");
        let bad: Vec<String> = all.iter().filter(|c| !c.ok).map(|c| format!("{} off by {:.2e}", c.name, c.error)).collect();
        assert!(bad.is_empty(), "{setting:?}: {bad:?}");
    }
}

/// No two of its sizes are the same.
fn shape() -> Shape {
    let text = "base=''\npretrain=0\nbits=16\nvocab=61\ndim=24\nlayers=2\nheads=4\nkv_heads=2\nhead_dim=10\nhidden=52\ntied=true\nqk_norm=true\nrope_theta=100.0\nnorm_eps=1e-6\nseq=32\nrank=3\nalpha=6.0\ndropout=0.0\ntargets=['q']";
    PolychromicConfig::read("model", &text.parse().unwrap()).unwrap().shape()
}

fn lora(dropout: f64) -> Lora {
    Lora { rank: 3, alpha: 6.0, dropout, targets: vec![Target::Q, Target::O, Target::Up] }
}

/// What a recording answers with; adapters are `far` from the zeros that they begin with.
fn run(record: impl Fn(&Recorder), feeds: &[(&str, Data)], far: f32) -> Vec<f32> {
    let mut s = Session::new(&device(), &Switches::default(), 3);
    let r = Recorder::new();
    record(&r);
    s.load("all", r.finish()).unwrap();
    let adapters: Vec<(String, Meta)> =
        s.store.iter().filter(|(n, _)| n.ends_with("lora_b")).map(|(n, t)| (n.to_string(), t.meta.clone())).collect();
    for (i, (name, meta)) in adapters.iter().enumerate() {
        let mut numbers = vec![0.0; meta.elements()];
        fill_normal(9, i as u64, &mut numbers);
        numbers.iter_mut().for_each(|v| *v *= far);
        s.store.set(name, meta, bytemuck::cast_slice(&numbers)).unwrap();
    }
    s.run("all", feeds).unwrap();
    s.read("all", "y").unwrap()
}

/// Hidden states of rows with places, or of plain ones.
fn hidden(ids: &[i32], time: usize, rows: Option<&Rows>) -> Vec<f32> {
    hidden_of(&shape(), ids, time, rows)
}

fn hidden_of(s: &Shape, ids: &[i32], time: usize, rows: Option<&Rows>) -> Vec<f32> {
    let l = lora(0.0);
    let record = |r: &Recorder| {
        let d = Decoder { shape: s, lora: Some(&l), base: Base::Drawn, r, rng: None };
        let fed = |name: &str| r.feed(name, &[ids.len() / time, time], DType::I32);
        let places = rows.map(|_| Places { position: fed("position"), until: fed("until") });
        r.output("y", d.hidden(fed("ids"), places));
    };
    let mut feeds = vec![("ids", Data::I32(ids))];
    if let Some(rows) = rows {
        feeds.extend([("position", Data::I32(&rows.position)), ("until", Data::I32(&rows.until))]);
    }
    run(record, &feeds, 1.0)
}

fn ids(seed: i32, count: usize) -> Vec<i32> {
    (0..count as i32).map(|i| (i * i * 7 + 13 * i + seed * 31) % 61).collect()
}

#[track_caller]
fn close(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let apart = a.iter().zip(b).map(|(x, y)| (x - y).abs()).find(|d| d.is_nan() || *d >= 2e-5);
    assert!(apart.is_none(), "{what}: off by {apart:?}");
}

#[test]
fn tokens_do_not_see_padding_wherever_it_stands() {
    let (time, dim) = (20, shape().dim);
    let plain = ids(1, 13);
    let alone = hidden(&plain, 13, None);
    let masks: [&dyn Fn(usize) -> bool; 4] =
        [&|t| t >= 7, &|t| t < 13, &|t| !(4..11).contains(&t), &|t| !(t % 3 == 1 && t < 19 || t == 18)];
    for (i, real) in masks.into_iter().enumerate() {
        let real: Vec<bool> = (0..time).map(real).collect();
        assert_eq!(real.iter().filter(|r| **r).count(), 13);
        // Whatever stands in the padding.
        for filler in [0, 60] {
            let mut next = plain.iter();
            let row: Vec<i32> = real.iter().map(|&r| if r { *next.next().unwrap() } else { filler }).collect();
            let all = hidden(&row, time, Some(&Rows::padded(&real, time)));
            let own: Vec<f32> = all.chunks(dim).zip(&real).filter(|(_, r)| **r).flat_map(|(h, _)| h.to_vec()).collect();
            close(&own, &alone, &format!("mask {i}, filled with {filler}"));
        }
    }
}

#[test]
fn packed_examples_do_not_see_each_other() {
    let dim = shape().dim;
    let lengths = [vec![9, 1, 6], vec![20], vec![3, 3, 3, 3, 3]];
    let rows = Rows::packed(&lengths, 20);
    let all: Vec<i32> = lengths.iter().enumerate().flat_map(|(i, _)| ids(i as i32, 20)).collect();
    // A window narrower than some examples limits them in a packed row as it does alone.
    for window in [None, Some(3)] {
        let s = Shape { window, ..shape() };
        let h = hidden_of(&s, &all, 20, Some(&rows));
        for (i, lengths) in lengths.iter().enumerate() {
            let mut at = 20 * i;
            for &n in lengths {
                let alone = hidden_of(&s, &all[at..at + n], n, None);
                close(&h[at * dim..(at + n) * dim], &alone, &format!("{n} tokens of row {i}, window {window:?}"));
                at += n;
            }
        }
        assert_eq!(h == hidden(&all, 20, Some(&rows)), window.is_none(), "a window changes something");
    }
}

#[test]
fn positions_and_sights_of_rows() {
    let rows = Rows::padded(&[false, true, true, false, true], 5);
    assert_eq!((rows.position, rows.until), (vec![0, 0, 1, 1, 2], vec![0, 4, 4, 3, 4]));
    let rows = Rows::packed(&[vec![2, 1], vec![]], 4);
    assert_eq!((rows.position, rows.until), (vec![0, 1, 0, 0, 0, 0, 0, 0], vec![1, 1, 2, 3, 0, 1, 2, 3]));
}

#[test]
fn dropout_is_of_the_adapters_input_alone() {
    let s = shape();
    let tokens = ids(0, 2 * 12);
    let with = |dropout: f64, seed: u64, rng: bool, far: f32| {
        let l = lora(dropout);
        let record = |r: &Recorder| {
            let feed = rng.then(|| r.feed("rng", &[4], DType::I32));
            let d = Decoder { shape: &s, lora: Some(&l), base: Base::Drawn, r, rng: feed };
            r.output("y", d.hidden(r.feed("ids", &[2, 12], DType::I32), None));
        };
        run(record, &[("ids", Data::I32(&tokens)), ("rng", Data::I32(&rng_feed(seed, 1, 0)))], far)
    };
    let plain = with(0.0, 0, false, 1.0);
    assert_eq!(with(0.0, 0, true, 1.0), plain);
    assert_eq!(with(0.5, 0, false, 1.0), plain, "nothing is dropped outside of training");
    assert_eq!(with(0.5, 1, true, 1.0), with(0.5, 1, true, 1.0));
    assert!(with(0.5, 1, true, 1.0) != with(0.5, 2, true, 1.0) && with(0.5, 1, true, 1.0) != plain);
    // An adapter that adds nothing adds nothing of what is left either; the base has lost nothing.
    assert_eq!(with(0.5, 1, true, 0.0), with(0.0, 0, false, 0.0));
    // The more draws, the nearer their mean is to what adapters add without dropout, as long as that is little.
    let (none, little) = (with(0.0, 0, false, 0.0), with(0.0, 0, false, 1e-2));
    let mean: Vec<f32> = (0..64)
        .map(|seed| with(0.5, seed, true, 1e-2))
        .fold(vec![0.0; none.len()], |sum, h| sum.iter().zip(&h).map(|(s, h)| s + h / 64.0).collect());
    let length = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| ((x - y) as f64).powi(2)).sum::<f64>().sqrt();
    let off = length(&mean, &little) / length(&none, &little);
    assert!(off < 0.35, "{off}");
}

#[test]
fn the_frozen_base_has_no_gradient_and_no_moments() {
    let mut c = recipe::preset(recipe::find("polychromic").unwrap(), None).unwrap();
    for set in [
        "pretrain=0",
        "vocab=521",
        "dim=48",
        "layers=2",
        "heads=4",
        "head_dim=10",
        "hidden=104",
        "rank=2",
        "seq=13",
        "batch=3",
        "tied=false",
        "objective.weight=0",
    ] {
        c.set(set).unwrap();
    }
    let task = recipe::find("polychromic").unwrap().task(&c).unwrap();
    let model: PolychromicConfig = c.section("model").unwrap();
    let (shape, lora) = (model.shape(), model.lora());
    let [(_, graph), (_, forwards)] = task.graphs().try_into().ok().unwrap();
    for bf16 in [false, true] {
        let mut switches = Switches::default();
        switches.set("bf16", if bf16 { "require" } else { "off" }).unwrap();
        let compiled = Compiled::new(graph.clone(), &switches, Machine::Cpu).unwrap();
        // A product for each of the base's backwards, not two.
        let once = Compiled::new(forwards.clone(), &switches, Machine::Cpu).unwrap().plan.cost.flops;
        let times = compiled.plan.cost.flops as f64 / once as f64;
        assert!((2.0..2.4).contains(&times), "{times}");
        let states: Vec<_> = compiled.graph.states().map(|(s, m)| (s.name.clone(), s.role, m.clone())).collect();
        for (name, _, sizes) in shape.weights() {
            let (_, role, meta) = states.iter().find(|s| s.0 == name).unwrap();
            let narrow = bf16 && sizes.len() == 2;
            assert_eq!((*role, &meta.shape, meta.dtype), (Role::Frozen, &sizes, if narrow { DType::BF16 } else { DType::F32 }), "{name}");
            if sizes.len() == 2 {
                let turned = [sizes[1], sizes[0]];
                let made = compiled
                    .graph
                    .nodes
                    .iter()
                    .find(|n| n.backward && !n.is_view() && n.outputs.iter().any(|m| m.shape == sizes || m.shape == turned));
                assert!(made.is_none(), "{name}: {made:?}");
            }
        }
        let moments: Vec<&String> = states.iter().map(|s| &s.0).filter(|n| n.starts_with("adam.m/")).collect();
        let adapters: Vec<String> = lora.tensors(&shape).into_iter().map(|t| format!("adam.m/{}", t.0)).collect();
        assert_eq!(moments.len(), adapters.len());
        assert!(adapters.iter().all(|a| moments.contains(&a)));
    }
}

#[test]
fn diversity_is_the_mean_over_pairs() {
    let (sets, replies, width) = (5, 4, 7);
    let mut e = vec![0.0; sets * replies * width];
    fill_normal(1, 2, &mut e);
    e[..2 * width].fill(0.0); // two that are zero
    e[width * replies..2 * width * replies].copy_from_slice(&[1.0; 28]); // four that are the same
    let got = run(|r| r.output("y", r.feed("e", &[sets, replies, width], DType::F32).diversity()), &[("e", Data::F32(&e))], 0.0);
    for (set, got) in e.chunks(replies * width).zip(got) {
        let unit: Vec<Vec<f64>> = set
            .chunks(width)
            .map(|v| {
                let length = v.iter().map(|&x| (x as f64).powi(2)).sum::<f64>().sqrt().max(1e-12);
                v.iter().map(|&x| x as f64 / length).collect()
            })
            .collect();
        let pairs: Vec<f64> = (0..replies)
            .flat_map(|j| (0..j).map(move |i| (i, j)))
            .map(|(i, j)| 1.0 - unit[i].iter().zip(&unit[j]).map(|(a, b)| a * b).sum::<f64>())
            .collect();
        let mean = pairs.iter().sum::<f64>() / pairs.len() as f64;
        assert!((mean - got as f64).abs() < 1e-6, "{mean} {got}");
    }
}

/// A run whose step takes a millisecond.
const SMALL: &[&str] = &[
    "pretrain=0",
    "dim=24",
    "layers=2",
    "head_dim=8",
    "hidden=40",
    "seq=16",
    "batch=2",
    "eval_batches=1",
    "rank=2",
    "dropout=0.1",
    "objective.weight=0",
];

fn train(out: &std::path::Path, more: &[&str]) -> crate::common::Ran {
    let out = text(out);
    let sets = SMALL.iter().flat_map(|s| ["--set", s]);
    kiln(["train", "polychromic", "--threads", "1", "--out", &out].into_iter().chain(sets).chain(more.iter().copied()))
}

#[test]
fn a_run_trains_saves_and_resumes_its_adapters_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    let said = train(&whole, &["--steps", "6", "--set", "horizon=6", "--set", "save_every=3"]).ok();
    assert!(said.out.contains("more that are frozen"), "{said:#?}");
    train(&parts, &["--steps", "3", "--set", "horizon=6"]).ok();
    resume(&parts, "--steps 6").ok();
    same_bytes(&checkpoint(&whole, 6), &checkpoint(&parts, 6));

    let model = load_safetensors(&checkpoint(&whole, 6).join("model.safetensors")).unwrap();
    assert_eq!(model.names().len(), 2 * 2 * 7);
    assert!(model.names().iter().all(|n| n.ends_with(".lora_a") || n.ends_with(".lora_b")), "{:?}", model.names());
    let state = load_safetensors(&checkpoint(&whole, 6).join("state.safetensors")).unwrap();
    assert!(state.names().iter().all(|n| n.starts_with("adam.")), "{:?}", state.names());
    // Every adapter has moved.
    let before = load_safetensors(&checkpoint(&whole, 3).join("model.safetensors")).unwrap();
    for name in model.names() {
        assert_ne!(model.get(&name).unwrap().2, before.get(&name).unwrap().2, "{name}");
    }
    let eval = kiln(["eval", &text(&whole), "--json", "--threads", "1"]).ok();
    assert!(serde_json::from_str::<serde_json::Value>(&eval.out).unwrap()["loss"].as_f64().unwrap() < 6.3);
}

#[test]
fn settings_that_cannot_be_are_refused_by_name() {
    let config = |set: &str| {
        let mut c: Config = recipe::preset(recipe::find("polychromic").unwrap(), None).unwrap();
        c.set(set).map_err(|e| e.to_string())?;
        recipe::find("polychromic").unwrap().task(&c).map(|_| ()).map_err(|e| e.to_string())
    };
    for (set, parts) in [
        ("rank=0", "model.rank = 0"),
        ("targets=[]", "model.targets is empty"),
        ("targets=[\"q\", \"q\"]", "names q twice"),
        ("targets=[\"w\"]", "model.targets = [\"w\"]: list of q or k or v or o or gate or up or down"),
        ("kv_heads=3", "does not divide by kv_heads = 3"),
        ("head_dim=7", "model.head_dim = 7 is odd"),
        ("dropout=1.0", "model.dropout = 1"),
        ("layers=0", "model.layers = 0"),
        ("base=/nowhere", "/nowhere: there is no such folder"),
        ("vocab=100", "model.vocab = 100"),
        ("seq=0", "model.seq = 0"),
        ("objective.weight=-1", "objective.weight = -1"),
        ("every=0", "objective.every = 0"),
        ("accumulate=32769", "train.accumulate = 32769: from 1 to 32768"),
        ("replies=1", "objective.replies = 1: from 2"),
        ("temperature=0", "objective.temperature = 0"),
        ("top_p=1.5", "objective.top_p = 1.5"),
        ("baseline_decay=2", "objective.baseline_decay = 2"),
        ("prompt_tokens=3", "objective.prompt_tokens = 3: the longest prompt has"),
        ("new_tokens=120", "objective.new_tokens = 120: prompts of up to"),
        ("encoder=/nowhere", "/nowhere"),
    ] {
        let said = config(set).expect_err(set);
        assert!(said.contains(parts), "{set}: {said}");
    }
}
