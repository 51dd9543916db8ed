//! A whole run's calls to the disk, and what a program's memory and work are said to be.

use super::{Options, load_with, planned, settings_that_fit, train};
use crate::config::{Config, Section, TrainConfig};
use crate::data::{DataError, Item, Source};
use crate::files::noted::{self, Call};
use crate::recipe::{Feeds, Model, Supervised, TrainError};
use crate::timing::{Clock, Timeline};
use engine::passes::Target;
use engine::{Compiled, Cpu, DType, Device, Init, Recorder, Switches, Var};
use std::sync::Arc;
use std::time::Duration;

/// The mean of its weights.
struct Mean;

/// Items that say nothing.
struct Nothing;

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

impl Model for Mean {
    fn seq(&self) -> usize {
        1
    }
    fn vocab(&self) -> usize {
        2
    }
    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let f = Feeds::new(r, batch, 1);
        vec![("loss", r.param("w", &[8], Init::Full(1.0)).square().mean() * f.weight)]
    }
    fn source(&self, _: bool) -> Result<Arc<dyn Source>, TrainError> {
        Ok(Arc::new(Nothing))
    }
}

#[test]
fn checkpoints_and_what_was_recorded_before_them_are_on_the_disk_before_older_ones_go() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let settings = "[train]\nbatch = 2\nsteps = 4\nsave_every = 1\nkeep = 1\neval_every = 2\nlog_every = 1\n";
    let config = Config::preset("mean", "test", vec![TrainConfig::keys("train")], settings);
    let mut task = Supervised::new(Mean, config.section::<TrainConfig>("train").unwrap(), config.seed());
    let options = Options { out: out.clone(), ..Options::default() };
    let (done, calls) = noted::during(|| train(&mut task, &config, &Device::cpu(Cpu::new(1)), &options));
    done.unwrap();
    let checkpoints = out.join("checkpoints");
    let saved: Vec<_> = noted::lasts(&calls).into_iter().filter(|path| path.starts_with(&checkpoints)).collect();
    assert_eq!(saved, [1, 2, 3, 4].map(|step| checkpoints.join(format!("step-{step:08}"))));
    let is_save = |call: &&[Call]| matches!(call, [Call::Renamed(_, to, _)] if saved.contains(to));
    let mut since = 0;
    for (i, _) in calls.chunks(1).enumerate().filter(|(_, call)| is_save(call)) {
        let records = Call::Synced(out.join("metrics.jsonl"));
        assert!(calls[since..i].contains(&records), "a checkpoint was saved, and its records were not: {:#?}", &calls[since..i]);
        since = i;
    }
}

/// Every program keeps its own tables; one batch at a time is fed.
#[test]
fn tables_of_all_programs_are_planned_and_the_largest_feeds() {
    let program = |name: &'static str, table: usize, rows: usize| {
        let r = Recorder::new();
        let x = r.feed("x", &[rows, table], DType::F32);
        r.output("y", x * r.constant(&[1, table], (0..table).map(|i| i as f32).collect()));
        (name, Compiled::new(r.finish(), &Switches::default(), Target::Cpu).unwrap())
    };
    // Tables of 4,000 and 2,400 bytes, feeds of 8,000 and 9,600.
    let programs = vec![program("a", 1000, 2), program("b", 600, 4)];
    assert_eq!(planned(&programs, Target::Cpu).tables, 4_000 + 2_400 + 9_600);
    let peak = planned(&programs, Target::Cpu);
    assert_eq!(peak.total(), peak.state + peak.activations + peak.workspace + peak.tables);
}

/// The share of the device's peak that a run has is that of its model's work: what is computed twice to save memory is no work.
#[test]
fn what_is_computed_twice_is_not_counted_as_work() {
    let recipe = crate::recipe::find("decoder").unwrap();
    let mut config = crate::recipe::preset(recipe, Some("tiny")).unwrap();
    ["train.batch=2", "model.seq=32"].iter().for_each(|set| config.set(set).unwrap());
    let device = Device::cpu(Cpu::new(1));
    let work = |recompute: &str| {
        let mut task = recipe.task(&config).unwrap();
        let mut s = load_with(&*task, &Switches::default().with("recompute", recompute).unwrap(), 1, &device).unwrap();
        let mut clock = Clock::new(&device);
        clock.begin(s.timeline.insert(Timeline::default())).unwrap();
        task.bench_step(&mut s, 0).unwrap();
        clock.launched(1, s.timeline.as_mut().unwrap(), Duration::ZERO).unwrap();
        let twice: u64 = s.programs.values().flat_map(|p| &p.receipts).map(|r| r.added_flops).sum();
        (clock.up_to(1).unwrap().flops, twice as f64)
    };
    let ((plain, none), (again, twice)) = (work("off"), work("auto,what=blocks"));
    assert!(none == 0.0 && twice > plain / 10.0, "{twice} of {plain} are computed twice");
    assert!((again - plain).abs() * 100.0 < plain, "{again} for {plain}");
}

/// Settings that are said to fit have as many examples a step as those that do not.
#[test]
fn settings_that_fit_keep_the_examples_of_a_step() {
    let recipe = crate::recipe::find("decoder").unwrap();
    let mut config = crate::recipe::preset(recipe, None).unwrap();
    let sets = ["dim=32", "layers=2", "hidden=32", "seq=64", "train.batch=4", "accumulate=2", "heads=2", "kv_heads=1", "head_dim=16"];
    sets.iter().for_each(|set| config.set(set).unwrap());
    let device = Device::cpu(Cpu::new(1));
    let mut seen = 0;
    for free in (1..64).map(|quarter| quarter << 18) {
        for settings in settings_that_fit(recipe, &config, &device, free).unwrap() {
            let number = |key: &str| settings.split(key).nth(1)?.split(' ').next()?.parse::<usize>().ok();
            let Some((batch, accumulate)) = number("train.batch=").zip(number("train.accumulate=")) else { continue };
            assert_eq!(batch * accumulate, 8, "{settings}");
            seen += 1;
        }
    }
    assert!(seen > 0, "no number of bytes wants a smaller batch");
}

/// Checkpoints of earlier versions do not say how long their schedule was.
#[test]
fn the_schedule_of_an_earlier_versions_run_is_as_long_as_its_horizon() {
    let dir = tempfile::tempdir().unwrap();
    for (steps, horizon, length) in [(4, 100, 100), (200, 100, 200)] {
        let settings = format!("[train]\nsteps = {steps}\nhorizon = {horizon}\n");
        let config = Config::preset("mean", "test", vec![TrainConfig::keys("train")], &settings);
        let meta = serde_json::json!({ "config": config.to_json() });
        let saved = crate::checkpoint::save(dir.path(), steps, &[], &[], &meta, 0.into()).unwrap();
        let found = crate::checkpoint::open(&saved.path).unwrap();
        assert_eq!(super::resume::schedule_steps(&config, &found).unwrap(), length);
    }
}
