//! What the training loop feeds a step: the rate of its schedule, and draws that are its own.

use engine::philox::{fill_halves, rng_feed};
use engine::{Cpu, Device, Init, Recorder, Var};
use kiln::checkpoint::load_safetensors;
use kiln::config::{Config, Section, TrainConfig};
use kiln::data::{DataError, Item, Source};
use kiln::recipe::{Feeds, Model, Supervised, Task, TrainError};
use kiln::run;
use std::path::Path;
use std::sync::Arc;

const WEIGHTS: usize = 64;
const SEED: u64 = 11;

/// The sum of its weights, some of which are dropped. Its gradient is always the same, so that Adam's step is the rate and nothing else.
struct Sum {
    dropout: f32,
    /// Whether of what it validates with the first two items have no target that counts.
    masked: bool,
}

/// Items that say nothing.
pub struct Nothing;

impl Source for Nothing {
    fn len(&self) -> u64 {
        100
    }
    fn item(&self, _: u64) -> Result<Item, DataError> {
        Ok(Item { ids: vec![0], targets: vec![0], ..Item::default() })
    }
    fn entropy_floor(&self) -> Option<f64> {
        None
    }
}

/// Six items, of which the first two have no target that counts.
struct Masked;

impl Source for Masked {
    fn len(&self) -> u64 {
        6
    }
    fn item(&self, i: u64) -> Result<Item, DataError> {
        Ok(Item { ids: vec![0], targets: vec![if i < 2 { -1 } else { 0 }], ..Item::default() })
    }
    fn entropy_floor(&self) -> Option<f64> {
        None
    }
}

impl Model for Sum {
    fn seq(&self) -> usize {
        1
    }
    fn vocab(&self) -> usize {
        2
    }
    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let f = Feeds::new(r, batch, 1);
        let w = r.param("w", &[WEIGHTS], Init::Full(1.0));
        vec![("loss", w.dropout(self.dropout, f.rng).sum() * f.weight)]
    }
    fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError> {
        Ok(if self.masked && !train { Arc::new(Masked) } else { Arc::new(Nothing) })
    }
}

fn config(train: &str) -> Config {
    Config::preset("sum", "test", vec![TrainConfig::keys("train")], &format!("seed = {SEED}\n[train]\nbatch = 2\n{train}"))
}

fn task(c: &Config, dropout: f32) -> Supervised<Sum> {
    Supervised::new(Sum { dropout, masked: false }, c.section::<TrainConfig>("train").unwrap(), c.seed())
}

/// What a run's speed is counted in: all tokens of a step, in however many parts.
#[test]
fn the_work_of_a_step_is_that_of_all_its_micro_batches() {
    assert_eq!(task(&config("accumulate = 3\n"), 0.0).work(), ("tok", 6.0));
    for (name, unit) in [("decoder", "tok"), ("polychromic", "tok"), ("hydra", "tok")] {
        let recipe = kiln::recipe::find(name).unwrap();
        let mut config = kiln::recipe::preset(recipe, Some("tiny")).unwrap();
        ["train.batch=2", "train.accumulate=3", "model.seq=32"].iter().for_each(|set| config.set(set).unwrap());
        assert_eq!(recipe.task(&config).unwrap().work(), (unit, (2 * 3 * 32) as f64), "{name}");
    }
}

/// The first weight behind each step, from the run's checkpoints.
fn course(out: &Path, steps: u64) -> Vec<f64> {
    let weight = |step: u64| {
        let file = load_safetensors(&crate::common::checkpoint(out, step).join("model.safetensors")).unwrap();
        f32::from_le_bytes(file.get("w").unwrap().2[..4].try_into().unwrap()) as f64
    };
    std::iter::once(1.0).chain((1..=steps).map(weight)).collect()
}

#[test]
fn every_step_has_the_rate_of_its_own_number() {
    let dir = tempfile::tempdir().unwrap();
    let train = |out: &Path, steps: u64, start: run::Start| {
        let c = config(&format!("steps = {steps}\nhorizon = 8\nwarmup = 3\nlearning_rate = 0.03\nsave_every = 1\nkeep = 0\n"));
        let options = run::Options { out: out.into(), start, ..run::Options::default() };
        run::train(&mut task(&c, 0.0), &c, &Device::cpu(Cpu::new(1)), &options).unwrap();
    };
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    train(&whole, 8, run::Start::New);
    train(&parts, 2, run::Start::New);
    train(&parts, 5, run::Start::Newest);
    train(&parts, 8, run::Start::Newest);
    // Up to 0.03 in three steps, then half a cosine down to a tenth, which step 8 would have.
    let fall = |step: f64| 0.03 * (0.1 + 0.9 * 0.5 * (1.0 + (std::f64::consts::PI * (step - 3.0) / 5.0).cos()));
    let rates = [0.01, 0.02, 0.03, fall(3.0), fall(4.0), fall(5.0), fall(6.0), fall(7.0)];
    for out in [&whole, &parts] {
        let course = course(out, 8);
        for (step, rate) in rates.iter().enumerate() {
            let moved = course[step] - course[step + 1];
            assert!((moved - rate).abs() < 1e-6, "step {step} moved by {moved}, its rate is {rate}");
        }
    }
}

#[test]
fn micro_batches_and_steps_draw_masks_of_their_own() {
    let c = config("accumulate = 3\nclip = 1e9\n");
    let mut t = task(&c, 0.5);
    let mut s = run::load(&t, &c, &Device::cpu(Cpu::new(1))).unwrap();
    t.begin(0).unwrap();
    let mut moment = vec![0.0; WEIGHTS];
    let mut masks = vec![];
    for step in 0..2 {
        t.step(&mut s, step, 1e-3).unwrap();
        for micro_batch in 0..3 {
            let mut draws = [0.0; WEIGHTS];
            fill_halves(&rng_feed(SEED, step, micro_batch), 1, 0, &mut draws);
            masks.push(draws.map(|u| u >= 0.5));
        }
        // Each micro-batch gives what it keeps, doubled, a sixth of all items.
        for (i, m) in moment.iter_mut().enumerate() {
            let kept = masks[3 * step as usize..].iter().filter(|mask| mask[i]).count() as f32;
            *m += 0.1 * (kept * 2.0 / 6.0 - *m);
        }
        let ours = s.store.get("adam.m/w").unwrap().f32().unwrap();
        assert!(ours.iter().zip(&moment).all(|(a, b)| (a - b).abs() < 1e-6), "step {step}: {ours:?} {moment:?}");
    }
    let different: std::collections::HashSet<_> = masks.iter().collect();
    assert_eq!(different.len(), 6);
}

/// Half of the weights' sum for each batch of two, of which the first has nothing to say.
#[test]
fn a_batch_of_an_evaluation_without_a_target_that_counts_is_left_out() {
    let c = config("eval_batches = 0\n");
    let mut t = Supervised::new(Sum { dropout: 0.0, masked: true }, c.section::<TrainConfig>("train").unwrap(), c.seed());
    let mut s = run::load(&t, &c, &Device::cpu(Cpu::new(1))).unwrap();
    assert_eq!(t.evaluate(&mut s).unwrap().values, [("loss", WEIGHTS as f64 / 2.0)]);
}
