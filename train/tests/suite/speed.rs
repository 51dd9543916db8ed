//! The speed that a run says is that of its steps, whatever is done between them.

use engine::{Cpu, Device, Graph, Reading};
use kiln::config::TrainConfig;
use kiln::recipe::{self, Evaluation, Pending, Session, Task, TrainError};
use kiln::run::{Options, train};
use std::fs;
use std::time::Duration;

/// Steps that take as long as they are told to, and evaluations that take longer.
struct Slow {
    c: TrainConfig,
    step: Duration,
    evaluation: Duration,
}

impl Task for Slow {
    fn train_config(&self) -> &TrainConfig {
        &self.c
    }
    fn graphs(&self) -> Vec<(&'static str, Graph)> {
        vec![]
    }
    fn begin(&mut self, _: u64) -> Result<(), TrainError> {
        Ok(())
    }
    fn step(&mut self, _: &mut Session, _: u64, _: f64) -> Result<(), TrainError> {
        std::thread::sleep(self.step);
        Ok(())
    }
    fn report(&self, _: &Session) -> Result<Pending, TrainError> {
        Ok(Pending::new(["loss"], Reading::There(vec![1.0, 0.0])))
    }
    fn evaluate(&mut self, _: &mut Session) -> Result<Evaluation, TrainError> {
        std::thread::sleep(self.evaluation);
        Ok(Evaluation { values: vec![("loss", 1.0)], confusion: None, counted: None })
    }
    fn work(&self) -> (&'static str, f64) {
        ("tok", 3.0)
    }
    fn bench_step(&mut self, _: &mut Session, _: u64) -> Result<(), TrainError> {
        Ok(())
    }
}

/// (step, per_second) of every record.
fn speeds(c: TrainConfig) -> Vec<(u64, f64)> {
    let dir = tempfile::tempdir().unwrap();
    let config = recipe::preset(recipe::find("hydra").unwrap(), None).unwrap();
    let mut task = Slow { c, step: Duration::from_millis(30), evaluation: Duration::from_millis(60) };
    let options = Options { out: dir.path().into(), ..Options::default() };
    train(&mut task, &config, &Device::cpu(Cpu::new(1)), &options).unwrap();
    let text = fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    let records = text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    records.map(|r| (r["step"].as_u64().unwrap(), r["per_second"].as_f64().unwrap())).collect()
}

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
        for (step, per_second) in speeds(c) {
            // A step sleeps for 30 ms at least, and works through 3: on a busy machine it takes longer.
            assert!((40.0..=100.0).contains(&per_second), "{what}: {per_second} after step {step}");
        }
    }
}
