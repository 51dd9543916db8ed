//! hrm: hierarchical reasoning with experts and halting. A step is one segment of thinking about every example of the batch; examples that
//! are done are replaced on the device.

mod act;
mod carry;
mod golden;
mod model;
mod puzzles;

pub use model::HrmConfig;

use crate::config::{Config, ConfigError, Keys, Section, TrainConfig};
use crate::data::{Loader, Split};
use crate::golden::Golden;
use crate::optim;
use crate::recipe::{
    Better, Computed, Evaluation, Extent, Metric, Pending, Picture, Reads, Recipe, Reference, Session, Solver, Solves, Task, TrainError,
    Unit,
};
use carry::Carry;
use engine::ops::concat::concat;
use engine::ops::pointwise::{Bin, pointwise};
use engine::philox::{philox, rng_feed};
use engine::{DType, Data, Device, Graph, Init, Recorder, Switches, Var};
use model::{Hrm, STARTS};
use puzzles::{PuzzleConfig, Puzzles};

pub struct HrmRecipe;

impl Recipe for HrmRecipe {
    fn name(&self) -> &'static str {
        "hrm"
    }

    fn about(&self) -> &'static str {
        "puzzles: two recurrent modules with experts, thinking in segments until they are sure of their answer"
    }

    fn metrics(&self) -> &'static [Metric] {
        METRICS
    }

    fn sections(&self) -> Vec<Keys> {
        // Examples stay in their slots from step to step, so a step is one batch.
        vec![HrmConfig::keys("model"), PuzzleConfig::keys("data"), TrainConfig::keys("train").without(&["accumulate"])]
    }

    fn presets(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("tiny", include_str!("../../../configs/hrm-tiny.toml")),
            ("sudoku", include_str!("../../../configs/hrm-sudoku.toml")),
            ("sudoku-moe", include_str!("../../../configs/hrm-sudoku-moe.toml")),
            ("maze", include_str!("../../../configs/hrm-maze.toml")),
        ]
    }

    fn sized(&self, config: &Config) -> Result<Config, TrainError> {
        puzzles::sized(config)
    }

    fn task(&self, config: &Config) -> Result<Box<dyn Task>, TrainError> {
        let config = &self.sized(config)?;
        let c: HrmConfig = config.section("model")?;
        c.only_for_its_mixer(config)?;
        let train: TrainConfig = config.section("train")?;
        train.check()?;
        let puzzles = Puzzles::new(config, &c)?;
        if !c.is_dense() && train.batch * c.seq * c.top_k >= 1 << 31 {
            let (b, seq, k) = (train.batch, c.seq, c.top_k);
            return Err(ConfigError::Invalid(format!(
                "train.batch x model.seq x model.top_k = {b} x {seq} x {k}: experts have fewer than 2^31 rows (lower train.batch)"
            ))
            .into());
        }
        puzzles.read()?;
        Ok(Box::new(HrmTask { c, train, puzzles, seed: config.seed(), loader: None, bench: None }))
    }

    fn reads(&self) -> &'static [Reads] {
        &[Reads::Puzzles]
    }

    fn solves(&self) -> Option<&dyn Solves> {
        Some(self)
    }

    fn reference(&self) -> Option<&dyn Reference> {
        Some(self)
    }
}

impl Solves for HrmRecipe {
    fn solver(&self, config: &Config) -> Result<Box<dyn Solver>, TrainError> {
        Ok(Box::new(act::HrmSolver::new(&self.sized(config)?)?))
    }
}

impl Reference for HrmRecipe {
    fn file(&self) -> &'static [u8] {
        include_bytes!("../../../../reference/golden/hrm.safetensors")
    }

    fn compute(&self, file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
        golden::segments(file, switches, device)
    }
}

const METRICS: &[Metric] = &[
    Metric::new("loss", Unit::None, Better::Lower, "what is differentiated: ce, and halting and balance by their weights"),
    Metric::new("ce", Unit::Nats, Better::Lower, "cross-entropy of a cell"),
    Metric::new("halting", Unit::Nats, Better::Lower, "cross-entropy of the model's guess whether its answer is right"),
    Metric::new("balance", Unit::None, Better::Lower, "how unevenly the experts are used"),
    Metric::new("exact", Unit::Share, Better::Higher, "of the puzzles, those that are solved at the segment limit"),
    Metric::new(
        "exact_halted",
        Unit::Share,
        Better::Higher,
        "of the puzzles, those that are solved where the model halts by itself: once it is sure of the same answer after two segments in a row",
    ),
    Metric::new("cell", Unit::Share, Better::Higher, "of the blank cells, those that are right at the segment limit"),
    Metric::new("segments", Unit::Count("segments"), Better::Lower, "until the model halts, on average"),
    Metric::new("halting_accuracy", Unit::Share, Better::Higher, "how often the model is right about its answer being right"),
    Metric::new("load", Unit::Share, Better::Neither, "of the tokens, those that go to an expert, one number an expert"),
];

struct HrmTask {
    c: HrmConfig,
    train: TrainConfig,
    puzzles: Puzzles,
    seed: u64,
    loader: Option<Loader>,
    /// What `bench_step` feeds, made once.
    bench: Option<[Vec<i32>; 2]>,
}

impl HrmTask {
    /// One segment of every example, one step of the optimizer.
    fn training(&self) -> Graph {
        let (c, b) = (&self.c, self.train.batch);
        let r = Recorder::new();
        let m = Hrm { c, r: &r };
        let [ids, targets] = ["ids", "targets"].map(|name| r.feed(name, &[b, c.seq], DType::I32));
        let states = Carry::states(&r, c, b);
        let carry = states.refilled(&m, ids, targets, Some(r.feed("rng", &[4], DType::I32)));
        let segment = m.segment(carry.thought, carry.ids);
        let judged = m.judge(&segment, carry.targets);

        let params: Vec<(String, Var)> = r.params().into_iter().filter(|p| !STARTS.contains(&p.0.as_str())).collect();
        let grads = r.grad(judged.loss, &params.iter().map(|p| p.1).collect::<Vec<_>>());
        let step = optim::step(&r, &params, &grads, judged.loss, &self.train);

        r.typed(|| {
            let next = carry.after(&segment, c.max_segments);
            // After a step that was skipped, nothing of what was thought can be trusted.
            let done = next.done.max(step.skipped_in_row.min(r.full(&[1], 1.0)));
            states.keep(&Carry { done, ..next });

            // The mean of those that are done now; while there are none, the last one.
            let (count, used) = (done.sum(), r.state("carry.used", &[1], DType::F32, Init::Full(0.0)));
            let used_next = count.choose((done * next.segments).sum() / count, used);
            r.update(used, used_next);

            let blank = self.puzzles.task.blank() as f32;
            let open = pointwise(&[carry.ids.cast(DType::F32)], |e, x| {
                let blank = e.c(blank);
                e.bin(Bin::Eq, x[0], blank)
            });
            let filled = -((open * judged.wrong).sum() / open.sum().max(r.full(&[1], 1.0))) + 1.0;
            let own = [judged.loss, judged.ce, judged.halting, judged.balance, judged.right.mean(), filled, used_next];
            let optimizer = [step.norm, step.clipped, step.skipped, step.skipped_in_row];
            r.output("report", concat(&own.into_iter().chain(segment.loads()).chain(optimizer).collect::<Vec<_>>(), 0));
        });
        r.finish()
    }

    /// What training reports.
    fn names(&self) -> Vec<String> {
        let own = ["loss", "ce", "halting", "balance", "exact", "cell", "segments"].map(String::from);
        let optimizer = ["grad_norm", "clipped_norm", "skipped"].map(String::from);
        own.into_iter().chain(self.loads()).chain(optimizer).collect()
    }

    fn loads(&self) -> Vec<String> {
        let experts = if self.c.is_dense() { 0 } else { self.c.experts };
        (0..experts).map(|i| format!("load.{i}")).collect()
    }

    fn run(&self, s: &mut Session, step: u64, rate: f64, [ids, targets]: [&[i32]; 2]) -> Result<(), TrainError> {
        let (rng, rate) = (rng_feed(self.seed, step, 0), [rate as f32]);
        let feeds = [("ids", Data::I32(ids)), ("targets", Data::I32(targets)), ("rng", Data::I32(&rng)), ("rate", Data::F32(&rate))];
        s.run("train", &feeds)
    }
}

impl Task for HrmTask {
    fn train_config(&self) -> &TrainConfig {
        &self.train
    }

    fn graphs(&self) -> Vec<(&'static str, Graph)> {
        vec![("train", self.training()), ("act", act::graph(&self.c, self.train.batch))]
    }

    fn runs(&self, program: &str) -> f64 {
        if program == "act" { 0.0 } else { 1.0 }
    }

    fn begin(&mut self, done: u64) -> Result<(), TrainError> {
        let batch = self.train.batch;
        self.loader = Some(Loader::new(self.puzzles.source()?, None, batch, done * batch as u64, 2)?);
        Ok(())
    }

    fn step(&mut self, s: &mut Session, step: u64, rate: f64) -> Result<(), TrainError> {
        let batch = self.loader.as_mut().expect("begin comes first").next()?;
        self.run(s, step, rate, [&batch.ids, &batch.targets])
    }

    fn report(&self, s: &Session) -> Result<Pending, TrainError> {
        Ok(Pending::new(self.names(), s.programs["train"].start_read("report", &s.store)?))
    }

    /// Every puzzle that was never learned from, through all segments.
    fn evaluate(&mut self, s: &mut Session) -> Result<Evaluation, TrainError> {
        let set = self.puzzles.set(Split::Val)?;
        let batch = self.train.batch;
        let batches = Extent::new(set.len() as u64, batch, self.train.eval_batches, false).batches as usize;
        let cells = batch * self.puzzles.task.cells();
        let mut score = act::Score::default();
        for (puzzles, solutions) in set.inputs.chunks(cells).zip(set.targets.chunks(cells)).take(batches) {
            score.add(s, &self.c, &self.puzzles, batch, (puzzles, solutions))?;
        }
        let counted = Some(self.puzzles.counted(score.puzzles, set.len()));
        Ok(Evaluation { values: score.values(), confusion: None, counted })
    }

    fn metrics(&self) -> &'static [Metric] {
        METRICS
    }

    fn extent(&self) -> Result<Option<Extent>, TrainError> {
        let puzzles = self.puzzles.set(Split::Val)?.len() as u64;
        Ok(Some(Extent::new(puzzles, self.train.batch, self.train.eval_batches, false)))
    }

    fn limit_evaluation(&mut self, batches: u64) {
        self.train.eval_batches = batches;
    }

    fn work(&self) -> (&'static str, f64) {
        ("examples", self.train.batch as f64)
    }

    fn step_name(&self) -> &'static str {
        "segment"
    }

    fn bench_step(&mut self, s: &mut Session, step: u64) -> Result<(), TrainError> {
        let (n, vocab) = (self.train.batch * self.c.seq, self.c.vocab);
        let draw = |salt: u32| (0..n).map(|i| (philox([i as u32, salt, 0, 0], [1, 2])[0] as usize % vocab) as i32).collect();
        let feeds = self.bench.take().unwrap_or_else(|| [draw(0), draw(1)]);
        let done = self.run(s, step, 1e-4, [&feeds[0], &feeds[1]]);
        self.bench = Some(feeds);
        done
    }

    fn pictures(&self) -> Vec<Picture> {
        let named = |keys: &[(&str, &str)]| keys.iter().map(|(label, key)| (label.to_string(), key.to_string())).collect();
        let solved = [
            ("unseen, at the limit", "val_exact"),
            ("unseen, when it halts", "val_exact_halted"),
            ("cells of unseen", "val_cell"),
            ("training", "exact"),
        ];
        let mut all = vec![Picture {
            what: "course of the run",
            file: "course.svg",
            panels: vec![
                ("share solved (higher is better)", named(&solved)),
                ("ce", named(&[("training", "ce")])),
                ("segments", named(&[("training", "segments"), ("unseen", "val_segments")])),
            ],
        }];
        if !self.c.is_dense() {
            let loads = self.loads().into_iter().enumerate().map(|(i, key)| (format!("expert {i}"), key)).collect();
            all.push(Picture { what: "loads of the experts", file: "experts.svg", panels: vec![("load", loads)] });
        }
        all
    }

    fn show(&mut self, s: &mut Session) -> Result<Option<String>, TrainError> {
        let task = self.puzzles.task;
        let first = self.puzzles.unseen(1)?;
        let (puzzle, solution) = first.item(0);
        let ids = self.puzzles.ids(puzzle, self.train.batch);
        let mut answer = vec![];
        for segment in 0..self.c.max_segments {
            answer = act::segment(s, &self.puzzles, &ids, segment == 0)?.swap_remove(0).answer;
        }
        let answer = task.marked(&answer, solution);
        Ok(Some(format!("{}\n{answer}", task.marked(puzzle, puzzle))))
    }

    fn identity(&self) -> Result<serde_json::Value, TrainError> {
        Ok(self.puzzles.identity())
    }
}
