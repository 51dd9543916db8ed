//! The speed that a run says is that of its steps, whatever is done between them.

use engine::{Cpu, Device, Graph, Reading};
use kiln::config::TrainConfig;
use kiln::recipe::{self, Evaluation, Pending, Session, Task, TrainError};
use kiln::run::{Options, train};
use std::cell::RefCell;
use std::fs;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Steps and evaluations that take a while, and when each of them was.
struct Slow {
    c: TrainConfig,
    begun: Instant,
    steps: Vec<Range<Instant>>,
    /// After which step.
    evaluations: Vec<(usize, Range<Instant>)>,
    reports: RefCell<Vec<(usize, Instant)>>,
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
        self.reports.borrow_mut().push((self.steps.len(), Instant::now()));
        Ok(Pending::new(["loss"], Reading::There(vec![1.0, 0.0])))
    }
    fn evaluate(&mut self, _: &mut Session) -> Result<Evaluation, TrainError> {
        self.evaluations.push((self.steps.len(), sleep(60)));
        Ok(Evaluation { values: vec![("loss", 1.0)], confusion: None, counted: None })
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
    let mut task = Slow { c, begun: Instant::now(), steps: vec![], evaluations: vec![], reports: RefCell::default() };
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
            // From the last record's step to this one's, without the evaluations in between.
            let reported = task.reports.borrow().iter().find(|(at, _)| *at == before).map_or(task.begun, |(_, when)| *when);
            let after = task.evaluations.iter().find(|(at, _)| *at == step).map(|(_, e)| e.start);
            let next = after.or_else(|| task.steps.get(step).map(|s| s.start)).unwrap_or(end);
            let evaluations: Duration = task.evaluations.iter().filter(|(at, _)| (before..step).contains(at)).map(|(_, e)| length(e)).sum();
            let (least, most) = (steps, next - reported - evaluations);
            let rounding = Duration::from_micros(1);
            assert!(least <= spent + rounding && spent <= most + rounding, "{what}: {least:?} <= {spent:?} <= {most:?} after step {step}");
            before = step;
        }
        assert_eq!(before, 7);
    }
}
