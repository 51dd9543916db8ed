//! The speed that a run says is that of its steps, whatever is done between them.

use engine::{Cpu, Device, Graph, Init, Reading, Recorder, Var};
use kiln::config::{Config, Section, TrainConfig};
use kiln::data::{DataError, Item, Source};
use kiln::recipe::{self, Evaluation, Feeds, Model, Pending, Session, Supervised, Task, TrainError};
use kiln::run::{Options, train};
use std::cell::RefCell;
use std::fs;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps and evaluations that take a while, and when each of them was.
struct Slow {
    c: TrainConfig,
    begun: Instant,
    steps: Vec<Range<Instant>>,
    /// After which step.
    evaluations: Vec<(usize, Range<Instant>)>,
    saves: RefCell<Vec<(usize, Range<Instant>)>>,
}

fn sleep(ms: u64) -> Range<Instant> {
    let start = Instant::now();
    std::thread::sleep(Duration::from_millis(ms));
    start..Instant::now()
}

impl Task for Slow {
    fn train_config(&self) -> &TrainConfig {
        &self.c
    }
    fn graphs(&self) -> Vec<(&'static str, Graph)> {
        vec![]
    }
    fn begin(&mut self, _: u64) -> Result<(), TrainError> {
        self.begun = Instant::now();
        Ok(())
    }
    fn step(&mut self, _: &mut Session, _: u64, _: f64) -> Result<(), TrainError> {
        self.steps.push(sleep(30));
        Ok(())
    }
    fn report(&self, _: &Session) -> Result<Pending, TrainError> {
        Ok(Pending::new(["loss"], Reading::There(vec![1.0, 0.0])))
    }
    fn evaluate(&mut self, _: &mut Session) -> Result<Evaluation, TrainError> {
        self.evaluations.push((self.steps.len(), sleep(60)));
        Ok(Evaluation { values: vec![("loss", 1.0)], confusion: None, counted: None })
    }
    /// Asked for in every save.
    fn kept(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        self.saves.borrow_mut().push((self.steps.len(), sleep(60)));
        Ok(vec![])
    }
    fn work(&self) -> (&'static str, f64) {
        ("tok", 3.0)
    }
    fn bench_step(&mut self, _: &mut Session, _: u64) -> Result<(), TrainError> {
        Ok(())
    }
}

/// A run, and (step, per_second) of every record.
fn speeds(c: TrainConfig) -> (Slow, Vec<(usize, f64)>) {
    let dir = tempfile::tempdir().unwrap();
    let config = recipe::preset(recipe::find("hydra").unwrap(), None).unwrap();
    let mut task = Slow { c, begun: Instant::now(), steps: vec![], evaluations: vec![], saves: RefCell::default() };
    let options = Options { out: dir.path().into(), ..Options::default() };
    train(&mut task, &config, &Device::cpu(Cpu::new(1)), &options).unwrap();
    let text = fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    let records = text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    let speeds = records.map(|r| (r["step"].as_u64().unwrap() as usize, r["per_second"].as_f64().unwrap())).collect();
    (task, speeds)
}

/// Compared with when things were, and not with how long they should take: a busy machine changes nothing.
#[test]
fn the_speed_of_a_record_is_that_of_its_own_steps() {
    let base = TrainConfig { steps: 7, log_every: 1, save_every: 100, eval_every: 100, ..TrainConfig::default() };
    for c in [
        TrainConfig { eval_every: 1, ..base.clone() },
        TrainConfig { eval_every: 3, ..base.clone() },
        TrainConfig { log_every: 2, save_every: 3, ..base.clone() },
        TrainConfig { log_every: 3, eval_every: 2, save_every: 1, ..base },
    ] {
        let what = format!("log {}, evaluate {}, save {}", c.log_every, c.eval_every, c.save_every);
        let (task, speeds) = speeds(c);
        let end = Instant::now();
        let length = |r: &Range<Instant>| r.end - r.start;
        let mut before = 0;
        for (step, per_second) in speeds {
            let spent = Duration::from_secs_f64(3.0 * (step - before) as f64 / per_second);
            let steps: Duration = task.steps[before..step].iter().map(length).sum();
            // From the end of the last record's step to what follows this one's, without the evaluations and saves in between.
            let from = before.checked_sub(1).map_or(task.begun, |last| task.steps[last].end);
            let saves = task.saves.borrow();
            let others = || task.evaluations.iter().chain(saves.iter());
            let after = others().find(|(at, _)| *at == step).map(|(_, e)| e.start);
            let next = after.or_else(|| task.steps.get(step).map(|s| s.start)).unwrap_or(end);
            let between: Duration = others().filter(|(at, _)| (before..step).contains(at)).map(|(_, e)| length(e)).sum();
            let (least, most) = (steps, next - from - between);
            // On a virtual machine, the clocks of two processors differ by microseconds.
            let skew = Duration::from_millis(1);
            assert!(least <= spent + skew && spent <= most + skew, "{what}: {least:?} <= {spent:?} <= {most:?} after step {step}");
            before = step;
        }
        assert_eq!(before, 7);
        assert!(!task.saves.borrow().is_empty(), "{what}");
    }
}

/// Items that take a while.
struct LateItems;

impl Source for LateItems {
    fn len(&self) -> u64 {
        100
    }
    fn item(&self, _: u64) -> Result<Item, DataError> {
        sleep(20);
        Ok(Item { ids: vec![0], targets: vec![0], ..Item::default() })
    }
    fn entropy_floor(&self) -> Option<f64> {
        None
    }
}

/// A model that is done at once.
struct Quick;

impl Model for Quick {
    fn seq(&self) -> usize {
        1
    }
    fn vocab(&self) -> usize {
        2
    }
    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let f = Feeds::new(r, batch, 1);
        vec![("loss", r.param("w", &[1], Init::Full(1.0)) * f.weight)]
    }
    fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError> {
        Ok(if train { Arc::new(LateItems) } else { Arc::new(super::steps::Nothing) })
    }
}

/// A step that waits for its data takes at least as long as it waits, and no step waits for another's.
#[test]
fn a_step_waits_for_its_own_data_alone() {
    let dir = tempfile::tempdir().unwrap();
    let text = "[train]\nsteps = 12\nbatch = 1\nlog_every = 1\nsave_every = 100\neval_every = 100\n";
    let c = Config::preset("quick", "test", vec![TrainConfig::keys("train")], text);
    let mut task = Supervised::new(Quick, c.section::<TrainConfig>("train").unwrap(), c.seed());
    let options = Options { out: dir.path().into(), ..Options::default() };
    train(&mut task, &c, &Device::cpu(Cpu::new(1)), &options).unwrap();
    let text = fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    let mut all = 0.0;
    for line in text.lines() {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        let [step, waited] = ["step_ms", "data_wait_ms"].map(|name| record[name].as_f64().unwrap());
        assert!(waited <= step + 1.0, "{record}");
        all += waited;
    }
    assert!(all > 0.0, "{text}");
}
