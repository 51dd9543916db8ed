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
    Unit, sums,
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
        vec![HrmConfig::keys("model"), PuzzleConfig::keys("data"), TrainConfig::keys("train").without(&["epochs"])]
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
        for (key, b) in [("batch", train.batch), ("eval_batch", train.eval_batch)] {
            if !c.is_dense() && b * c.seq * c.top_k >= 1 << 31 {
                let (seq, k) = (c.seq, c.top_k);
                return Err(ConfigError::Invalid(format!(
                    "train.{key} x model.seq x model.top_k = {b} x {seq} x {k}: experts have fewer than 2^31 rows (lower train.{key})"
                ))
                .into());
            }
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
        let states = Carry::states(&r, c, b, 0);
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

            let open = self.open(&carry);
            let filled = -((open * judged.wrong).sum() / open.sum().max(r.full(&[1], 1.0))) + 1.0;
            let own = [judged.loss, judged.ce, judged.halting, judged.balance, judged.right.mean(), filled, used_next];
            let optimizer = [step.norm, step.clipped, step.skipped, step.skipped_in_row];
            r.output("report", concat(&own.into_iter().chain(segment.loads()).chain(optimizer).collect::<Vec<_>>(), 0));
        });
        r.finish()
    }

    /// f32 [batch, seq]: 1 where a cell is blank.
    fn open<'g>(&self, carry: &Carry<'g>) -> Var<'g> {
        let blank = self.puzzles.task.blank() as f32;
        pointwise(&[carry.ids.cast(DType::F32)], |e, x| {
            let blank = e.c(blank);
            e.bin(Bin::Eq, x[0], blank)
        })
    }

    /// The same in micro-batches, each of which has slots of its own: one program adds up what another takes, which is a step of the optimizer.
    fn in_parts(&self) -> [(&'static str, Graph); 2] {
        let (c, b, k) = (&self.c, self.train.batch, self.train.accumulate);
        let (r, u) = (Recorder::new(), Recorder::new());
        let m = Hrm { c, r: &r };
        let [ids, targets] = ["ids", "targets"].map(|name| r.feed(name, &[b, c.seq], DType::I32));
        let line: Vec<Carry> = (0..k).map(|i| Carry::states(&r, c, b, i)).collect();
        let carry = line[0].refilled(&m, ids, targets, Some(r.feed("rng", &[4], DType::I32)));
        let segment = m.segment(carry.thought, carry.ids);
        let judged = m.judge(&segment, carry.targets);
        // All that is a mean over a batch: the mean over all is that of the micro-batches' means.
        let share = 1.0 / k as f32;
        let loss = judged.loss * share;

        let params: Vec<(String, Var)> = r.params().into_iter().filter(|p| !STARTS.contains(&p.0.as_str())).collect();
        let grads = r.grad(loss, &params.iter().map(|p| p.1).collect::<Vec<_>>());
        params.iter().zip(&grads).for_each(|((name, _), g)| sums::add(&r, &format!("grad/{name}"), *g));
        let means = [("ce", judged.ce), ("halting", judged.halting), ("balance", judged.balance), ("exact", judged.right.mean())];
        r.typed(|| {
            Carry::turn(&line, &carry.after(&segment, c.max_segments));
            sums::add(&r, "sum/loss", loss);
            means.iter().for_each(|(name, v)| sums::add(&r, &format!("sum/{name}"), *v * share));
            let open = self.open(&carry);
            sums::add(&r, "sum/open", open.sum());
            sums::add(&r, "sum/wrong", (open * judged.wrong).sum());
            segment.loads().into_iter().for_each(|loads| sums::add(&r, "sum/loads", loads * share));
        });

        u.typed(|| {
            let one = |name: &str| sums::taken(&u, &format!("sum/{name}"), &[1]);
            let (own, grads) = sums::parameters(&u, &params, self.train.optimizer);
            let loss = one("loss");
            let step = optim::step(&u, &own, &grads, loss, &self.train);
            // After a step that was skipped, nothing of what was thought can be trusted.
            let broken = step.skipped_in_row.min(u.full(&[1], 1.0));
            let slots = (0..k).map(|i| {
                let carry = Carry::states(&u, c, b, i);
                let done = carry.done.max(broken);
                u.update(carry.done, done);
                (done.sum(), (done * carry.segments).sum())
            });
            let (count, segments) = slots.reduce(|a, b| (a.0 + b.0, a.1 + b.1)).expect("a step has micro-batches");
            // The mean of those that are done now; while there are none, the last one.
            let used = u.state("carry.used", &[1], DType::F32, Init::Full(0.0));
            let used_next = count.choose(segments / count, used);
            u.update(used, used_next);
            let filled = -(one("wrong") / one("open").max(u.full(&[1], 1.0))) + 1.0;
            let own = [loss].into_iter().chain(means.iter().map(|(name, _)| one(name))).chain([filled, used_next]);
            let loads = self.loads().len();
            let loads = (loads > 0).then(|| sums::taken(&u, "sum/loads", &[loads]));
            let optimizer = [step.norm, step.clipped, step.skipped, step.skipped_in_row];
            u.output("report", concat(&own.chain(loads).chain(optimizer).collect::<Vec<_>>(), 0));
        });
        [("micro", r.finish()), ("update", u.finish())]
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

    /// A step, of which `part` gives the ids and targets of each micro-batch.
    fn run<'a>(&self, s: &mut Session, step: u64, rate: f64, parts: impl IntoIterator<Item = [&'a [i32]; 2]>) -> Result<(), TrainError> {
        let (whole, rate) = (self.train.accumulate == 1, [rate as f32]);
        for (m, [ids, targets]) in parts.into_iter().enumerate() {
            let rng = rng_feed(self.seed, step, m as u32);
            let program = if whole { "train" } else { s.micro(step, m) };
            let feeds = [("ids", Data::I32(ids)), ("targets", Data::I32(targets)), ("rng", Data::I32(&rng)), ("rate", Data::F32(&rate))];
            s.run(program, &feeds[..if whole { 4 } else { 3 }])?;
        }
        if whole { Ok(()) } else { s.run("update", &[("rate", Data::F32(&rate))]) }
    }
}

impl Task for HrmTask {
    fn train_config(&self) -> &TrainConfig {
        &self.train
    }

    fn graphs(&self) -> Vec<(&'static str, Graph)> {
        let mut all = if self.train.accumulate == 1 { vec![("train", self.training())] } else { self.in_parts().into() };
        all.push(("act", act::graph(&self.c, self.train.evaluation_batch())));
        all
    }

    fn runs(&self, program: &str) -> f64 {
        match program {
            "micro" => self.train.accumulate as f64,
            "act" => 0.0,
            _ => 1.0,
        }
    }

    fn again(&self, program: &str) -> Option<&'static str> {
        (program == "micro").then_some("again")
    }

    fn begin(&mut self, done: u64) -> Result<(), TrainError> {
        let (batch, parts) = (self.train.batch, self.train.accumulate);
        self.loader = Some(Loader::new(self.puzzles.source()?, None, batch, done * (batch * parts) as u64, 2 * parts)?);
        Ok(())
    }

    fn step(&mut self, s: &mut Session, step: u64, rate: f64) -> Result<(), TrainError> {
        let loader = self.loader.as_mut().expect("begin comes first");
        let batches = (0..self.train.accumulate).map(|_| loader.next()).collect::<Result<Vec<_>, _>>()?;
        self.run(s, step, rate, batches.iter().map(|b| [&b.ids[..], &b.targets[..]]))
    }

    fn report(&self, s: &Session) -> Result<Pending, TrainError> {
        Ok(Pending::new(
            self.names(),
            s.programs[if self.train.accumulate == 1 { "train" } else { "update" }].start_read("report", &s.store)?,
        ))
    }

    /// Every puzzle that was never learned from, through all segments.
    fn evaluate(&mut self, s: &mut Session) -> Result<Evaluation, TrainError> {
        let set = self.puzzles.set(Split::Val)?;
        let batch = self.train.evaluation_batch();
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
        Ok(Some(Extent::new(puzzles, self.train.evaluation_batch(), self.train.eval_batches, false)))
    }

    fn limit_evaluation(&mut self, batches: u64) {
        self.train.eval_batches = batches;
    }

    fn work(&self) -> (&'static str, f64) {
        ("examples", (self.train.batch * self.train.accumulate) as f64)
    }

    fn step_name(&self) -> &'static str {
        "segment"
    }

    fn bench_step(&mut self, s: &mut Session, step: u64) -> Result<(), TrainError> {
        let (n, vocab) = (self.train.batch * self.c.seq, self.c.vocab);
        let draw = |salt: u32| (0..n).map(|i| (philox([i as u32, salt, 0, 0], [1, 2])[0] as usize % vocab) as i32).collect();
        let feeds = self.bench.take().unwrap_or_else(|| [draw(0), draw(1)]);
        let done = self.run(s, step, 1e-4, std::iter::repeat_n([&feeds[0][..], &feeds[1][..]], self.train.accumulate));
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
        let ids = self.puzzles.ids(puzzle, self.train.evaluation_batch());
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
