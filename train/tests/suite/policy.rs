//! Replies that are written on the device, against a plain forward pass; and the policy gradient from settings to adapters.

use crate::common::{checkpoint, kiln, resume, same_bytes, text};
use engine::ops::sample::Nucleus;
use engine::philox::{fill_normal, rng_feed};
use engine::{Cpu, DType, Data, Device, Meta, Recorder, Switches};
use kiln::checkpoint::load_safetensors;
use kiln::config::{Section, TrainConfig};
use kiln::data::Split;
use kiln::data::replies::{Asked, Prompt};
use kiln::models::decoder::{Base, Decoder, Lessons, Places, Rows, Writer, Written};
use kiln::models::{Lora, Shape, Target};
use kiln::recipe::{self, Session};
use kiln::recipes::polychromic::{PolychromicConfig, Replies};
use kiln::{optim, run};
use std::path::Path;

fn shape() -> Shape {
    let text = "base=''\npretrain=0\nbits=16\nvocab=61\ndim=24\nlayers=2\nheads=4\nkv_heads=2\nhead_dim=10\nhidden=52\ntied=true\nqk_norm=true\nrope_theta=100.0\nnorm_eps=1e-6\nseq=32\nrank=3\nalpha=6.0\ndropout=0.0\ntargets=['q']";
    PolychromicConfig::read("model", &text.parse().unwrap()).unwrap().shape()
}

/// State-space layers, with groups of heads.
fn scanning() -> Shape {
    let config = serde_json::json!({
        "model_type": "mamba2", "vocab_size": 61, "hidden_size": 12, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 6, "n_groups": 2,
        "state_size": 7, "conv_kernel": 4, "tie_word_embeddings": true
    });
    Shape::parse(config.as_object().unwrap()).unwrap()
}

/// Attention and MLPs as this family has them.
fn of_family(name: &str) -> Shape {
    let sizes = [("vocab_size", 61), ("hidden_size", 24), ("num_hidden_layers", 2), ("num_attention_heads", 4)];
    let more = [("intermediate_size", 52), ("max_position_embeddings", 64)];
    let family = kiln::models::Family::find(name).unwrap();
    let keys = sizes.into_iter().chain(more).map(|(key, size)| (family.key(key).to_string(), size.into()));
    let own = [("model_type".to_string(), name.into()), ("tie_word_embeddings".into(), false.into())];
    Shape::parse(&own.into_iter().chain(keys).collect()).unwrap()
}

fn lora(shape: &Shape) -> Option<Lora> {
    let adapted = shape.family.without_adapters().is_none();
    adapted.then(|| Lora { rank: 3, alpha: 6.0, dropout: 0.0, targets: vec![Target::Q, Target::O, Target::Up] })
}

/// Adapters far from the zeros that they begin with; what has none far from the small numbers that it begins with.
fn filled(s: &mut Session) {
    let large = |n: &str| ["lora_b", "ward.weight", "qkv.weight", ".o.weight", "positions"].iter().any(|end| n.ends_with(end));
    let adapters: Vec<(String, Meta)> = s.store.iter().filter(|(n, _)| large(n)).map(|(n, t)| (n.to_string(), t.meta.clone())).collect();
    for (i, (name, meta)) in adapters.iter().enumerate() {
        let mut numbers = vec![0.0; meta.elements()];
        fill_normal(9, i as u64, &mut numbers);
        s.store.set(name, meta, bytemuck::cast_slice(&numbers)).unwrap();
    }
}

fn session() -> Session {
    Session::new(&Device::cpu(Cpu::new(2)), &Switches::default(), 3)
}

fn written(shape: &Shape, writer: &Writer, asked: &Asked, rng: [i32; 4]) -> Written {
    let lora = lora(shape);
    let mut s = session();
    for (name, graph) in writer.graphs(|r| Decoder { shape, lora: lora.as_ref(), base: Base::Drawn, r, rng: None }) {
        s.load(name, graph).unwrap();
    }
    filled(&mut s);
    // What was written before leaves nothing behind.
    writer.write(&mut s, asked, rng_feed(1, 1, 1)).unwrap();
    writer.write(&mut s, asked, rng).unwrap()
}

/// The token number `at` of every reply, from the whole rows at once.
fn drawn_again(shape: &Shape, writer: &Writer, w: &Written, rng: [i32; 4], at: usize) -> Vec<i32> {
    let lora = lora(shape);
    let (rows, time) = (writer.rows(), writer.capacity());
    let r = Recorder::new();
    let d = Decoder { shape, lora: lora.as_ref(), base: Base::Drawn, r: &r, rng: None };
    let hidden = d.hidden(r.feed("ids", &[rows, time], DType::I32), Some(Places::fed(&r, rows, time)));
    let place = writer.time - 1 + at;
    let logits = d.logits(hidden.slice(1, place, place + 1).reshape(&[rows, shape.dim]));
    let turn = (at > 0).then(|| r.full(&[1], place as f32).cast(DType::I32));
    r.output("y", logits.sample(writer.nucleus, r.feed("rng", &[4], DType::I32), turn).cast(DType::F32));
    let mut s = session();
    s.load("again", r.finish()).unwrap();
    filled(&mut s);
    let places = Rows::padded(&w.real, time);
    let feeds = [("ids", &w.ids[..]), ("position", &places.position), ("until", &places.until), ("rng", &rng)];
    s.run("again", &feeds.map(|(n, v)| (n, Data::I32(v)))).unwrap();
    s.read("again", "y").unwrap().into_iter().map(|v| v as i32).collect()
}

#[test]
fn a_reply_is_what_whole_rows_would_draw() {
    let windowed = Shape { window: Some(3), ..shape() };
    for shape in [shape(), windowed, of_family("llama"), of_family("gpt2"), scanning()] {
        replies_are_what_whole_rows_would_draw(&shape);
    }
}

fn replies_are_what_whole_rows_would_draw(shape: &Shape) {
    let prompt = |tokens: &[u32]| Prompt { text: String::new(), tokens: tokens.to_vec() };
    let asked = Asked::new(vec![prompt(&[7, 8, 60, 2]), prompt(&[5]), prompt(&[1, 2, 3, 4, 5, 6])], 6);
    let rng = rng_feed(77, 5, 9);
    let endless = Writer { prompts: 3, replies: 2, time: 6, new_tokens: 40, nucleus: Nucleus { temperature: 0.9, top_p: 0.9 }, stop: None };
    let all = written(shape, &endless, &asked, rng);
    for at in [0, 1, 2, 17, 39] {
        let again = drawn_again(shape, &endless, &all, rng, at);
        let own: Vec<i32> = all.tokens.iter().map(|t| t[at] as i32).collect();
        assert_eq!(own, again, "token {at}");
    }
    let different: std::collections::HashSet<_> = all.tokens.iter().collect();
    assert_eq!(different.len(), 6, "every reply has draws of its own");
    assert!(all.reply.chunks(46).all(|r| !r[..6].iter().any(|r| *r) && r[6..].iter().all(|r| *r)));

    // The same draws, but a token ends them.
    let stop = all.tokens[3][2];
    let w = written(shape, &Writer { stop: Some(stop), ..endless.clone() }, &asked, rng);
    let mut ended = 0;
    for (row, (whole, cut)) in all.tokens.iter().zip(&w.tokens).enumerate() {
        let end = whole.iter().position(|t| *t == stop).unwrap_or(40);
        assert_eq!(cut[..], whole[..end], "row {row}");
        let length = (end + 1).min(40);
        let own = |v: &[bool]| v[row * 46..(row + 1) * 46].to_vec();
        assert_eq!(own(&w.reply), (0..46).map(|t| (6..6 + length).contains(&t)).collect::<Vec<_>>());
        assert_eq!(own(&w.real)[..6], own(&all.real)[..6]);
        ended += (end < 40) as usize;
    }
    assert!(ended > 0);
}

/// A run whose step takes a few milliseconds.
const SMALL: &[&str] = &[
    "pretrain=0",
    "dim=24",
    "layers=2",
    "head_dim=8",
    "hidden=40",
    "seq=64",
    "batch=4",
    "rank=2",
    "eval_batches=1",
    "horizon=6",
    "new_tokens=8",
    "weight=3.0",
    "every=2",
    "prompts=4",
    "replies=3",
];

fn train(out: &Path, sets: &[&str], more: &[&str]) -> crate::common::Ran {
    let out = text(out);
    let sets = SMALL.iter().chain(sets).flat_map(|s| ["--set", s]);
    kiln(["train", "polychromic", "--threads", "1", "--out", &out].into_iter().chain(sets).chain(more.iter().copied()))
}

fn lines(run: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let all: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    crate::common::all_meant(run, &all);
    all
}

#[test]
fn steps_with_replies_resume_and_add_up() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let said = train(&at("whole"), &[], &["--steps", "6"]).ok().out;
    assert!(said.contains("before:") && said.contains("after:") && said.contains("diversity of replies"), "{said}");
    train(&at("parts"), &[], &["--steps", "3"]).ok();
    resume(&at("parts"), "--steps 6").ok();
    same_bytes(&checkpoint(&at("whole"), 6), &checkpoint(&at("parts"), 6));
    let all = lines(&at("whole"));
    for (i, line) in all.iter().enumerate() {
        assert_eq!(line["diversity"].is_number(), i % 2 == 0, "{line}");
    }
    // The baseline: what was seen first, then the mean that moves.
    let of = |i: usize, name: &str| all[i][name].as_f64().unwrap();
    assert_eq!(of(0, "baseline"), of(0, "diversity"));
    assert!((of(2, "baseline") - of(0, "diversity")).abs() < 1e-6);
    assert!((of(4, "baseline") - 0.9 * of(2, "baseline") - 0.1 * of(2, "diversity")).abs() < 1e-6);
    let state = load_safetensors(&checkpoint(&at("whole"), 6).join("state.safetensors")).unwrap();
    assert!(state.names().iter().any(|n| n == "baseline") && !state.names().iter().any(|n| n.contains("scratch")));

    // The same step in parts.
    train(&at("two"), &["batch=2", "accumulate=2"], &["--steps", "6"]).ok();
    for (a, b) in all.iter().zip(lines(&at("two"))) {
        for name in ["loss", "grad_norm", "policy", "diversity"].iter().filter(|n| a[**n].is_number()) {
            let (a, b) = (a[*name].as_f64().unwrap(), b[*name].as_f64().unwrap());
            assert!((a - b).abs() < 1e-4 * (1.0 + a.abs()), "{name}: {a} {b}");
        }
    }

    // Without weight the run is the supervised one, whatever evaluation has written.
    train(&at("none"), &["weight=0"], &["--steps", "4"]).ok();
    train(&at("writes"), &["weight=0", "eval_prompts=6", "eval_every=2"], &["--steps", "4"]).ok();
    let bytes = |run: &str, file: &str| std::fs::read(checkpoint(&at(run), 4).join(file)).unwrap();
    for file in ["model.safetensors", "state.safetensors"] {
        assert_eq!(bytes("none", file), bytes("writes", file), "{file}");
    }
    let last = lines(&at("writes")).pop().unwrap();
    for name in ["diversity", "diversity_error", "distinct_2", "self_bleu", "pass_1", "pass_2"] {
        assert!(last[format!("val_{name}")].is_number(), "{name}: {last}");
    }
    assert!(lines(&at("none")).iter().all(|l| !l.to_string().contains("diversity")));
    let file = text(&at("replies.jsonl"));
    let asks = ["--prompts", "6", "--replies", "4", "--write-replies", &file];
    let eval = kiln([&["eval", &text(&at("none")), "--json", "--threads", "1"], &asks[..]].concat()).ok();
    let found: serde_json::Value = serde_json::from_str(&eval.out).unwrap();
    assert!(found["pass_4"].is_number() && found["loss"].is_number(), "{found}");
    let sets: Vec<serde_json::Value> = std::fs::read_to_string(&file).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let (mut mean, mut passed) = (0.0, 0.0);
    for set in &sets {
        let pairs: Vec<f64> = set["pairs"].as_array().unwrap().iter().map(|p| p.as_f64().unwrap()).collect();
        let (all, diversity) = (pairs.iter().sum::<f64>() / 6.0, set["diversity"].as_f64().unwrap());
        assert!(pairs.len() == 6 && (all - diversity).abs() < 1e-5, "{set}");
        assert_eq!((set["replies"].as_array().unwrap().len(), set["right"].as_array().unwrap().len()), (4, 4));
        mean += diversity / 6.0;
        // Of four replies, all are looked at.
        passed += f64::from(u8::from(set["right"].as_array().unwrap().iter().any(|right| *right == true))) / 6.0;
    }
    assert!((passed - found["pass_4"].as_f64().unwrap()).abs() < 1e-9, "{found}");
    assert!(sets.len() == 6 && (mean - found["diversity"].as_f64().unwrap()).abs() < 1e-6, "{found}");
}

/// Four bits: the run learns, says so in memory, resumes, and is near the one in full.
#[test]
fn a_base_in_four_bits() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    train(&at("drawn"), &["weight=0"], &["--steps", "1"]).ok();
    kiln(["export", &text(&at("drawn")), "--out", &text(&at("base")), "--merge"]).ok();
    train(&at("no"), &["bits=4"], &["--steps", "1"]).fails(&["model.bits = 4", "name model.base"]);
    let base = format!("model.base={}", text(&at("base")));
    let run = |name: &str, bits: &str, more: &[&str]| train(&at(name), &[&base, bits, "vocab=512"], more).ok().out;
    run("full", "bits=16", &["--steps", "4"]);
    run("four", "bits=4", &["--steps", "4"]);
    run("parts", "bits=4", &["--steps", "2"]);
    resume(&at("parts"), "--steps 4").ok();
    same_bytes(&checkpoint(&at("four"), 4), &checkpoint(&at("parts"), 4));
    let loss = |name: &str| lines(&at(name))[0]["loss"].as_f64().unwrap();
    let (full, four) = (loss("full"), loss("four"));
    assert!((full - four).abs() < 0.05 * full && full != four, "{full} {four}");
    let said = kiln(["generate", &text(&at("four")), "--prompt", "what", "--max-tokens", "5", "--threads", "1"]).ok().out;
    assert!(!said.is_empty());
}

/// The mean over pairs of 1 - cosine, in f64.
fn diversity(vectors: &[&[f32]]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| *x as f64 * *y as f64).sum::<f64>();
    let distance = |a: &[f32], b: &[f32]| 1.0 - dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
    let pairs: Vec<f64> = (0..vectors.len()).flat_map(|j| (0..j).map(move |i| distance(vectors[i], vectors[j]))).collect();
    pairs.iter().sum::<f64>() / pairs.len() as f64
}

/// A step of the task, seen from outside: by the replies that it wrote, and how likely they were before it and are behind it.
#[test]
fn a_step_makes_replies_of_sets_that_differ_much_more_likely_and_others_less() {
    let (prompts, replies, new_tokens, time) = (6, 3, 4, 56);
    for accumulate in ["accumulate=1", "accumulate=2"] {
        let mut c = recipe::preset(recipe::find("polychromic").unwrap(), None).unwrap();
        // Nothing but the replies' diversity counts, and none of them ends early.
        let own = ["weight=1e6", "every=1", "prompts=6", "new_tokens=4", "prompt_tokens=56", "template={prompt}{reply}", "top_p=1.0"];
        SMALL.iter().chain(&own).chain([&accumulate]).for_each(|s| c.set(s).unwrap());
        let mut task = recipe::find("polychromic").unwrap().task(&c).unwrap();
        let mut s = run::load(&*task, &c, &Device::cpu(Cpu::new(2))).unwrap();
        let adapters: Vec<(String, Meta)> =
            s.store.iter().filter(|(n, _)| n.contains("lora_")).map(|(n, t)| (n.to_string(), t.meta.clone())).collect();
        let before: Vec<Vec<u8>> = adapters.iter().map(|(n, _)| s.store.get(n).unwrap().bytes().unwrap().to_vec()).collect();
        task.begin(0).unwrap();
        task.step(&mut s, 0, 1e-2).unwrap();

        let state = |name: &str| s.store.get(name).unwrap().f32().unwrap();
        let (tokens, embeddings) = (state("scratch/write/tokens"), state("scratch/embeddings"));
        let width = embeddings.len() / (prompts * replies);
        let scores: Vec<f64> = embeddings.chunks(replies * width).map(|set| diversity(&set.chunks(width).collect::<Vec<_>>())).collect();
        let mean = scores.iter().sum::<f64>() / prompts as f64;

        let model: PolychromicConfig =
            kiln::recipe::Recipe::sized(&kiln::recipes::polychromic::PolychromicRecipe, &c).unwrap().section("model").unwrap();
        let adapted = model.adapted().unwrap();
        let lessons = Lessons::new(c.section("data").unwrap(), &adapted, model.seq, c.seed()).unwrap();
        let asked = lessons.ask(Split::Train, 0..prompts as u64, time).unwrap();
        let (mut ids, mut real) = (vec![], vec![]);
        for (row, drawn) in tokens.chunks(new_tokens).enumerate() {
            let prompt = row / replies * time..(row / replies + 1) * time;
            ids.extend(asked.ids[prompt.clone()].iter().copied().chain(drawn.iter().map(|&t| t as i32)));
            real.extend(asked.real[prompt].iter().copied().chain([true; 4]));
        }
        let (places, reply) =
            (Rows::padded(&real, time + new_tokens), [vec![0; time], vec![1; new_tokens]].concat().repeat(prompts * replies));
        let r = Recorder::new();
        r.output("log_prob", Replies::fed(&r, &[prompts * replies, time + new_tokens]).log_prob(&adapted.decoder(&r, None)));
        s.load("log_prob", r.finish()).unwrap();
        let feeds = [
            ("set_ids", Data::I32(&ids)),
            ("set_position", Data::I32(&places.position)),
            ("set_until", Data::I32(&places.until)),
            ("set_reply", Data::U8(&reply)),
        ];
        s.run("log_prob", &feeds).unwrap();
        let now = s.read("log_prob", "log_prob").unwrap();
        adapters.iter().zip(&before).for_each(|((name, meta), bytes)| s.store.set(name, meta, bytes).unwrap());
        s.run("log_prob", &feeds).unwrap();
        let then = s.read("log_prob", "log_prob").unwrap();
        // What the policy gradient climbs.
        let gain: f64 = (0..prompts * replies).map(|row| (scores[row / replies] - mean) * (now[row] - then[row]) as f64).sum();
        assert!(gain > 1e-3, "{accumulate}: {gain} with scores {scores:?}");
    }
}

/// A step's prompts and draws are those of its own number.
#[test]
fn every_step_with_replies_has_prompts_and_draws_of_its_own() {
    let (prompts, time) = (4, 56);
    let mut c = recipe::preset(recipe::find("polychromic").unwrap(), None).unwrap();
    SMALL.iter().chain(&["prompt_tokens=56", "template={prompt}{reply}"]).for_each(|s| c.set(s).unwrap());
    let mut task = recipe::find("polychromic").unwrap().task(&c).unwrap();
    let mut s = run::load(&*task, &c, &Device::cpu(Cpu::new(2))).unwrap();
    let model: PolychromicConfig =
        kiln::recipe::Recipe::sized(&kiln::recipes::polychromic::PolychromicRecipe, &c).unwrap().section("model").unwrap();
    let lessons = Lessons::new(c.section("data").unwrap(), &model.adapted().unwrap(), model.seq, c.seed()).unwrap();
    // What validates is nothing that is learned from.
    let texts = |split| lessons.ask(split, 0..40, time).unwrap().prompts.into_iter().map(|p| p.text).collect::<Vec<_>>();
    assert_ne!(texts(Split::Train), texts(Split::Val));
    let rows = |split| lessons.source(split).unwrap().item(0).unwrap();
    assert_ne!(rows(Split::Train), rows(Split::Val));
    task.begin(0).unwrap();
    let tokens = |s: &Session| s.store.get("scratch/write/tokens").unwrap().f32().unwrap();
    let mut all = vec![];
    // Replies are written in every other step; a rate of next to nothing leaves the model as it is.
    for step in [0, 1, 2, 3, 4] {
        task.step(&mut s, step, 1e-30).unwrap();
        if step % 2 == 0 {
            all.push(tokens(&s));
        }
    }
    let own = |key: &str| c.value("objective", key).unwrap().as_float().unwrap() as f32;
    let nucleus = Nucleus { temperature: own("temperature"), top_p: own("top_p") };
    let writer = Writer { prompts, replies: 3, time, new_tokens: 8, nucleus, stop: lessons.stop().unwrap() };
    for (i, own) in all.iter().enumerate() {
        let first = (i * prompts) as u64;
        let asked = lessons.ask(Split::Train, first..first + prompts as u64, time).unwrap();
        writer.write(&mut s, &asked, rng_feed(c.seed(), 2 * i as u64, 1 << 15)).unwrap();
        assert_eq!(&tokens(&s), own, "step {}", 2 * i);
    }
    assert!(all[0] != all[1] && all[1] != all[2]);
}

/// Prompts of two tokens, replies of one: with a vocabulary of eight their diversity can be computed from the probabilities.
struct Bandit {
    shape: Shape,
    lora: Lora,
    writer: Writer,
    asked: Asked,
    session: Session,
}

const VOCAB: usize = 8;

impl Bandit {
    fn new(sign: f32) -> Bandit {
        let shape = Shape { vocab: VOCAB, dim: 12, layers: 1, hidden: 16, ..shape() };
        let lora = Lora { rank: 4, alpha: 8.0, dropout: 0.0, targets: Target::ALL.into() };
        let prompts: Vec<Prompt> = (0..6).map(|i| Prompt { text: String::new(), tokens: vec![i, (3 * i + 1) % 8] }).collect();
        let writer =
            Writer { prompts: 6, replies: 8, time: 2, new_tokens: 1, nucleus: Nucleus { temperature: 1.0, top_p: 1.0 }, stop: None };
        let mut b = Bandit { shape, lora, asked: Asked::new(prompts, 2), session: session(), writer };
        for (name, graph) in b.writer.graphs(|r| decoder(&b.shape, Some(&b.lora), r)) {
            b.session.load(name, graph).unwrap();
        }
        let (rows, sets) = (b.writer.rows(), b.writer.prompts);
        let r = Recorder::new();
        let embedded = Replies::fed(&r, &[rows, 3]).mean_hidden(&decoder(&b.shape, None, &r));
        r.output("scores", embedded.reshape(&[sets, b.writer.replies, b.shape.dim]).diversity());
        b.session.load("embed", r.finish()).unwrap();

        let r = Recorder::new();
        let scores = r.feed("scores", &[sets], DType::F32);
        let loss = Replies::fed(&r, &[rows, 3]).policy_loss(&decoder(&b.shape, Some(&b.lora), &r), scores, scores.mean_axis(0)) * sign;
        let params = r.params();
        let grads = r.grad(loss, &params.iter().map(|p| p.1).collect::<Vec<_>>());
        optim::step(&r, &params, &grads, loss, &TrainConfig { weight_decay: 0.0, ..TrainConfig::default() });
        b.session.load("learn", r.finish()).unwrap();

        // Every token behind every prompt, and how likely it is there.
        let r = Recorder::new();
        r.output("hidden", Replies::fed(&r, &[sets * VOCAB, 3]).mean_hidden(&decoder(&b.shape, None, &r)));
        b.session.load("hidden", r.finish()).unwrap();
        let r = Recorder::new();
        let d = decoder(&b.shape, Some(&b.lora), &r);
        let last = d.hidden(r.feed("ids", &[sets, 2], DType::I32), None).slice(1, 1, 2).reshape(&[sets, b.shape.dim]);
        r.output("p", d.logits(last).softmax());
        b.session.load("p", r.finish()).unwrap();

        // Far enough from zero that tokens can become likely, and near enough that none is yet.
        let meta = b.session.store.get("embedding").unwrap().meta.clone();
        let mut numbers = vec![0.0; meta.elements()];
        fill_normal(4, 0, &mut numbers);
        numbers.iter_mut().for_each(|v| *v *= 0.4);
        b.session.store.set("embedding", &meta, bytemuck::cast_slice(&numbers)).unwrap();
        b
    }

    fn learn(&mut self, step: u64) {
        let written = self.writer.write(&mut self.session, &self.asked, rng_feed(5, step, 0)).unwrap();
        let reply: Vec<u8> = written.reply.iter().map(|&r| r as u8).collect();
        let places = Rows::padded(&written.real, 3);
        let mut feeds = vec![
            ("set_ids", Data::I32(&written.ids)),
            ("set_position", Data::I32(&places.position)),
            ("set_until", Data::I32(&places.until)),
            ("set_reply", Data::U8(&reply)),
        ];
        self.session.run("embed", &feeds).unwrap();
        let scores = self.session.read("embed", "scores").unwrap();
        feeds.extend([("scores", Data::F32(&scores)), ("rate", Data::F32(&[0.02]))]);
        self.session.run("learn", &feeds).unwrap();
    }

    /// What two replies to a prompt differ by, expected over all of both.
    fn expected(&mut self) -> f64 {
        let ids: Vec<i32> = self.asked.ids.chunks(2).flat_map(|p| (0..VOCAB as i32).flat_map(|t| [p[0], p[1], t])).collect();
        let (rows, places) = (ids.len() / 3, Rows::padded(&vec![true; ids.len()], 3));
        let reply = [0, 0, 1].repeat(rows);
        let feeds = [
            ("set_ids", Data::I32(&ids)),
            ("set_position", Data::I32(&places.position)),
            ("set_until", Data::I32(&places.until)),
            ("set_reply", Data::U8(&reply)),
        ];
        self.session.run("hidden", &feeds).unwrap();
        let hidden = self.session.read("hidden", "hidden").unwrap();
        self.session.run("p", &[("ids", Data::I32(&self.asked.ids))]).unwrap();
        let p = self.session.read("p", "p").unwrap();
        let mut sum = 0.0;
        for (hidden, p) in hidden.chunks(VOCAB * self.shape.dim).zip(p.chunks(VOCAB)) {
            let vectors: Vec<&[f32]> = hidden.chunks(self.shape.dim).collect();
            for i in 0..VOCAB {
                sum += (0..i).map(|j| 2.0 * (p[i] * p[j]) as f64 * diversity(&[vectors[i], vectors[j]])).sum::<f64>();
            }
        }
        sum / self.writer.prompts as f64
    }
}

fn decoder<'a, 'g>(shape: &'a Shape, lora: Option<&'a Lora>, r: &'g Recorder) -> Decoder<'a, 'g> {
    Decoder { shape, lora, base: Base::Drawn, r, rng: None }
}

#[test]
fn a_run_gets_more_diverse_and_with_the_sign_turned_less() {
    let course = |sign: f32| {
        let mut b = Bandit::new(sign);
        let before = b.expected();
        (0..120).for_each(|step| b.learn(step));
        (before, b.expected())
    };
    let ((before, more), (same, less)) = (course(1.0), course(-1.0));
    assert_eq!(before, same);
    assert!(more > before + 0.3 && less < before - 0.05, "{before}: {more} and {less}");
}
