//! Answers: segment after segment from the start, with states of their own, so that training's examples never notice.

use super::model::{Hrm, HrmConfig, Thought};
use super::puzzles::Puzzles;
use crate::config::Config;
use crate::data::puzzles::{PuzzleSet, Task};
use crate::recipe::{Attempt, Session, Solver, TrainError};
use engine::{DType, Data, Graph, Init, Recorder};

/// Feeds: ids i32 [batch, seq], fresh f32 [1] (not 0 at the first segment). Outputs, in f32: answer [batch, seq], halt [batch].
pub fn graph(c: &HrmConfig, batch: usize) -> Graph {
    let r = Recorder::new();
    let m = Hrm { c, r: &r };
    let [high, low] =
        ["high", "low"].map(|name| r.state(&format!("scratch/act.{name}"), &[batch, c.seq, c.dim], DType::F32, Init::Full(0.0)));
    let fresh = r.feed("fresh", &[1], DType::F32).reshape(&[1, 1, 1]);
    let start = m.start();
    let from = Thought { high: fresh.choose(start.high, high), low: fresh.choose(start.low, low) };
    let s = m.segment(from, r.feed("ids", &[batch, c.seq], DType::I32));
    r.update(high, s.thought.high);
    r.update(low, s.thought.low);
    r.output("answer", s.answer().reshape(&[batch, c.seq]).cast(DType::F32));
    r.output("halt", s.halt);
    r.finish()
}

/// What a batch answers after a segment.
pub fn segment(s: &mut Session, puzzles: &Puzzles, ids: &[i32], first: bool) -> Result<Vec<Attempt>, TrainError> {
    s.run("act", &[("ids", Data::I32(ids)), ("fresh", Data::F32(&[first as u8 as f32]))])?;
    let answers: Vec<u8> = s.read("act", "answer")?.into_iter().map(|token| token as u8).collect();
    let answers = puzzles.cells(&answers);
    let each = answers.chunks(puzzles.task.cells()).zip(s.read("act", "halt")?);
    Ok(each.map(|(answer, halt)| Attempt { answer: answer.to_vec(), halt }).collect())
}

/// What a set of answers is worth.
#[derive(Default)]
pub struct Score {
    /// Puzzles, and how many of them are right at the limit, and where the model halted.
    pub puzzles: usize,
    exact: usize,
    exact_halted: usize,
    /// Until each halted; and those after which the head was right about its answer.
    segments: usize,
    agreed: usize,
    /// Cells that were blank, and those of them that are right at the limit.
    blank: usize,
    filled: usize,
}

impl Score {
    /// Puzzles and solutions [n, cells], through all segments.
    pub fn add(&mut self, s: &mut Session, c: &HrmConfig, puzzles: &Puzzles, batch: usize, set: (&[u8], &[u8])) -> Result<(), TrainError> {
        let (cells, blank) = (puzzles.task.cells(), puzzles.task.blank());
        let count = set.0.len() / cells;
        let ids = puzzles.ids(set.0, batch);
        let mut thinking = vec![true; count];
        let mut before: Vec<Attempt> = vec![];
        for segment in 1..=c.max_segments {
            s.go_on()?;
            let said = self::segment(s, puzzles, &ids, segment == 1)?;
            let last = segment == c.max_segments;
            let answers = said.iter().zip(set.1.chunks(cells)).zip(set.0.chunks(cells));
            for (i, ((attempt, solution), puzzle)) in answers.enumerate() {
                let right = attempt.answer == solution;
                if thinking[i] {
                    self.segments += 1;
                    self.agreed += ((attempt.halt > 0.0) == right) as usize;
                    thinking[i] = !(attempt.halts(before.get(i)) || last);
                    self.exact_halted += (right && engine::mutant!("solved-before-it-halts", !thinking[i], true)) as usize;
                }
                if last {
                    self.exact += right as usize;
                    let open = (0..cells).filter(|&cell| puzzle[cell] == blank);
                    self.filled += open.clone().filter(|&cell| attempt.answer[cell] == solution[cell]).count();
                    self.blank += open.count();
                }
            }
            before = said;
        }
        self.puzzles += count;
        Ok(())
    }

    pub fn values(&self) -> Vec<(&'static str, f64)> {
        let share = |part: usize, whole: usize| part as f64 / whole.max(1) as f64;
        vec![
            ("exact", share(self.exact, self.puzzles)),
            ("exact_halted", share(self.exact_halted, self.puzzles)),
            ("cell", share(self.filled, self.blank)),
            ("segments", share(self.segments, self.puzzles)),
            ("halting_accuracy", share(self.agreed, self.segments)),
        ]
    }
}

pub struct HrmSolver {
    c: HrmConfig,
    puzzles: Puzzles,
    batch: usize,
}

impl HrmSolver {
    pub fn new(config: &Config) -> Result<HrmSolver, TrainError> {
        let c: HrmConfig = config.section("model")?;
        let puzzles = Puzzles::new(config, &c)?;
        Ok(HrmSolver { c, puzzles, batch: 0 })
    }
}

impl Solver for HrmSolver {
    fn task(&self) -> Task {
        self.puzzles.task
    }

    fn unseen(&self, count: usize) -> Result<PuzzleSet, TrainError> {
        self.puzzles.unseen(count)
    }

    fn begin(&mut self, s: &mut Session, batch: usize) -> Result<(), TrainError> {
        self.batch = batch;
        s.load("act", graph(&self.c, batch))
    }

    fn solve(&mut self, s: &mut Session, puzzles: &[u8], to_limit: bool) -> Result<Vec<Vec<Attempt>>, TrainError> {
        let cells = self.puzzles.task.cells();
        let mut all = vec![];
        for part in puzzles.chunks(self.batch * cells) {
            let ids = self.puzzles.ids(part, self.batch);
            let mut own: Vec<Vec<Attempt>> = vec![vec![]; part.len() / cells];
            let halted = |attempts: &[Attempt]| attempts.split_last().is_some_and(|(last, before)| last.halts(before.last()));
            let ended = |attempts: &Vec<Attempt>| !to_limit && halted(attempts);
            for segment in 0..self.c.max_segments {
                let said = self::segment(s, &self.puzzles, &ids, segment == 0)?;
                own.iter_mut().zip(said).filter(|(attempts, _)| !ended(attempts)).for_each(|(attempts, attempt)| attempts.push(attempt));
                if own.iter().all(ended) {
                    break;
                }
            }
            all.append(&mut own);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;
    use engine::{Cpu, Device, Switches};

    const LIMIT: usize = 6;

    /// An untrained model solves nothing: what it answers in the end is taken for the solutions, so that some of its answers are right.
    #[test]
    fn a_puzzle_is_right_once_where_the_model_halts_and_once_at_the_limit() {
        let mut c = recipe::preset(recipe::find("hrm").unwrap(), None).unwrap();
        let sizes = ["dim=16", "heads=2", "layers=1", "high_cycles=1", "low_cycles=1", "experts=3", "top_k=2", "hidden=8"];
        let puzzles = ["data.side=4", "hardness=0", "data.prefix=1", "model.seq=17", "model.vocab=6", "train_puzzles=1", "test_puzzles=7"];
        sizes.iter().chain(&puzzles).for_each(|s| c.set(s).unwrap());
        c.set(&format!("max_segments={LIMIT}")).unwrap();
        let model: HrmConfig = c.section("model").unwrap();
        let puzzles = Puzzles::new(&c, &model).unwrap();
        let set = puzzles.unseen(7).unwrap();
        let mut s = Session::new(&Device::cpu(Cpu::new(1)), &Switches::default(), 3);
        s.load("act", graph(&model, 7)).unwrap();
        // Sure of everything: it halts as soon as it answers the same twice.
        let meta = s.store.get("halt_bias").unwrap().meta.clone();
        s.store.set("halt_bias", &meta, &vec![9.0f32; meta.elements()].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
        let ids = puzzles.ids(&set.inputs, 7);
        let said: Vec<Vec<Attempt>> = (0..LIMIT).map(|i| segment(&mut s, &puzzles, &ids, i == 0).unwrap()).collect();
        let answer = |at: usize, puzzle: usize| &said[at][puzzle].answer;
        // Of two puzzles the solution is another.
        let mut solutions: Vec<Vec<u8>> = (0..7).map(|puzzle| answer(LIMIT - 1, puzzle).clone()).collect();
        solutions[..2].iter_mut().for_each(|solution| solution[0] ^= 1);
        let mut score = Score::default();
        score.add(&mut s, &model, &puzzles, 7, (&set.inputs, &solutions.concat())).unwrap();
        let halts = |puzzle: usize| (1..LIMIT).find(|&at| answer(at, puzzle) == answer(at - 1, puzzle)).unwrap_or(LIMIT - 1);
        let halted = (0..7).filter(|&puzzle| *answer(halts(puzzle), puzzle) == solutions[puzzle]).count();
        let used: usize = (0..7).map(|puzzle| halts(puzzle) + 1).sum();
        let values: std::collections::BTreeMap<&str, f64> = score.values().into_iter().collect();
        assert!(halted > 0 && used > 7, "some are right where it halts, and it halts after two segments at the earliest: {halted}, {used}");
        assert_eq!((values["exact"], values["exact_halted"]), (5.0 / 7.0, halted as f64 / 7.0));
        assert_eq!(values["segments"], used as f64 / 7.0);
    }
}
