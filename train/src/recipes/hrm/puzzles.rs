//! The puzzles that hrm reads: generated from the seed, or Sudokus from a file.

use super::model::HrmConfig;
use crate::config::{Config, ConfigError};
use crate::data::puzzles::{Mazes, PuzzleSet, Size, Sudokus, Task, csv_side, read_csv};
use crate::data::{DataError, Item, Source, Split, order};
use crate::recipe::{Counted, LeftOut, TrainError};
use crate::{choices, say, section};
use std::cell::OnceCell;
use std::path::Path;
use std::sync::Arc;

section! {
    /// Which puzzles are learned.
    pub struct PuzzleConfig {
        /// The kind of puzzle.
        task: Kind = Kind::Sudoku;
        /// Cells a side: 4 or 9 of a Sudoku, 5 to 128 of a maze. From the data: those of the file in `path`; of generated puzzles 9 (Sudoku) and
        /// 30 (maze).
        side: usize = 0, in 4..=128, [data];
        /// A CSV file of `puzzle,solution`, which is split by class; or a folder with such files, train.csv and test.csv. Empty: generated puzzles.
        path: String = String::new(), [path];
        /// Padding tokens before the cells. From its distance to them a cell knows its place, which RoPE alone does not tell; the halting head
        /// reads the first of them.
        prefix: usize = 1, in 0..=1 << 16;
        /// Training puzzles; of a file at most this many, 0: all.
        train_puzzles: usize = 1000, in 0..=MOST_CELLS;
        /// Validation puzzles; of a file at most this many, 0: all.
        test_puzzles: usize = 1000, in 0..=MOST_CELLS;
        /// For generated puzzles: the fewest guesses that a Sudoku takes a solver, or the fewest steps of a maze's path.
        hardness: u32 = 5, in 0..=1 << 31;
        /// Whether a puzzle is learned in another symmetric form each time.
        augment: bool = true;
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Sudoku,
    Maze,
}

choices!(Kind { Sudoku: "sudoku", Maze: "maze" });

impl PuzzleConfig {
    fn puzzle(&self) -> Result<Task, ConfigError> {
        let bad = |need: &str| Err(ConfigError::Invalid(format!("data.side = {}: {need}", self.side)));
        match (self.task, Size::ALL.into_iter().find(|size| size.side() == self.side)) {
            (Kind::Sudoku, Some(size)) => Ok(Task::Sudoku(size)),
            (Kind::Sudoku, None) => bad("a Sudoku has 4 or 9 cells a side"),
            (Kind::Maze, _) if (5..=128).contains(&self.side) => Ok(Task::Maze(self.side)),
            (Kind::Maze, _) => bad("a maze has 5 to 128 cells a side"),
        }
    }

    /// Where no side is named: the file's, or that of the puzzles that are usual.
    fn side_of_data(&self) -> Result<usize, DataError> {
        match (self.task, self.path.as_str()) {
            (Kind::Sudoku, "") => Ok(Size::Nine.side()),
            (Kind::Sudoku, path) if Path::new(path).is_dir() => csv_side(&Path::new(path).join(TRAIN_FILE)),
            (Kind::Sudoku, path) => csv_side(Path::new(path)),
            (Kind::Maze, _) => Ok(30),
        }
    }
}

/// The config with the sizes of its puzzles.
pub fn sized(config: &Config) -> Result<Config, TrainError> {
    let mut config = config.clone();
    config.size("data.side", |c| Ok::<_, TrainError>(c.section::<PuzzleConfig>("data")?.side_of_data()?))?;
    let data: PuzzleConfig = config.section("data")?;
    let puzzle = data.puzzle()?;
    config.size("model.vocab", |_| Ok::<_, TrainError>(puzzle.vocabulary()))?;
    config.size("model.seq", |_| Ok::<_, TrainError>(puzzle.cells() + data.prefix))?;
    Ok(config)
}

/// Of a folder of puzzles, those to learn from.
const TRAIN_FILE: &str = "train.csv";

/// Cells of all puzzles that are generated to learn from, or to validate with. They are made before the first step and kept: so many take
/// 2 GiB with their solutions, and up to 10 while they are made (150 bytes for a Sudoku of 4x4).
const MOST_CELLS: u64 = 1 << 30;

/// The token that is in no puzzle.
const FILLING: i32 = 0;

fn prefixed(tokens: &[u8], prefix: usize, with: i32) -> Vec<i32> {
    std::iter::repeat_n(with, prefix).chain(tokens.iter().map(|&token| token.into())).collect()
}

pub struct Puzzles {
    pub task: Task,
    config: PuzzleConfig,
    seed: u64,
    /// To learn from, and to validate with: made when they are asked for.
    sets: [OnceCell<Arc<PuzzleSet>>; 2],
    /// Of the file to validate with: what is for training, and what is beyond `test_puzzles`.
    left_out: OnceCell<[usize; 2]>,
}

impl Puzzles {
    /// Checks the settings, also against the model's.
    pub fn new(config: &Config, c: &HrmConfig) -> Result<Puzzles, TrainError> {
        c.check()?;
        let data: PuzzleConfig = config.section("data")?;
        let bad = |m: String| Err(TrainError::Config(ConfigError::Invalid(m)));
        let task = data.puzzle()?;
        let (seq, vocabulary) = (task.cells().saturating_add(data.prefix), task.vocabulary());
        if c.seq != seq {
            let (cells, prefix) = (task.cells(), data.prefix);
            return bad(format!(
                "model.seq = {}: {} has {cells} cells, and data.prefix = {prefix} (use --set model.seq={seq})",
                c.seq,
                task.name()
            ));
        }
        if !(vocabulary..=256).contains(&c.vocab) {
            return bad(format!("model.vocab = {}: {} has {vocabulary} tokens, and a token is a byte", c.vocab, task.name()));
        }
        let most = MOST_CELLS as usize / task.cells();
        for (name, count) in [("train_puzzles", data.train_puzzles), ("test_puzzles", data.test_puzzles)] {
            if data.path.is_empty() && !(1..=most).contains(&count) {
                return bad(format!("data.{name} = {count}: from 1 to {most} of {} are generated (0: all, of a file)", task.name()));
            }
        }
        if matches!(data.task, Kind::Maze) && !data.path.is_empty() {
            return bad(format!("data.path = {}: files are of Sudokus, mazes are generated", data.path));
        }
        Ok(Puzzles { task, config: data, seed: config.seed(), sets: Default::default(), left_out: OnceCell::new() })
    }

    /// Reads the files, where there are any. A file may be of puzzles to validate with alone: none is missed before training asks for one.
    pub fn read(&self) -> Result<(), TrainError> {
        let path = Path::new(&self.config.path);
        if self.config.path.is_empty() || self.sets[0].get().is_some() {
            return Ok(());
        }
        let open = |path: &Path| -> Result<PuzzleSet, TrainError> {
            let set = read_csv(path, true)?;
            match set.task == self.task {
                true => Ok(set),
                false => Err(TrainError::Other(format!(
                    "{} holds {}, but data.side = {}: this is {} (--set data.side=0 takes it from the file)",
                    path.display(),
                    set.task.name(),
                    self.task.side(),
                    self.task.name()
                ))),
            }
        };
        let (train, test, for_training) = if path.is_dir() {
            let (train, test) = (open(&path.join(TRAIN_FILE))?, open(&path.join("test.csv"))?);
            match train.shared(&test) {
                0 => {}
                n => crate::warn!("{}: {n} puzzles of test.csv have a solution, up to symmetry, that train.csv has too", path.display()),
            }
            (train, test, 0)
        } else {
            let all = open(path)?;
            let [train, test] = Split::ALL.map(|split| all.chosen(|i| all.split(i) == split));
            let for_training = train.len();
            (train, test, for_training)
        };
        if test.is_empty() {
            return Err(self.none_to("validate with"));
        }
        let limited = |set: PuzzleSet, limit: usize| if limit == 0 { set } else { set.chosen(|i| i < limit) };
        let all = test.len();
        let [train, test] = [limited(train, self.config.train_puzzles), limited(test, self.config.test_puzzles)];
        self.left_out.get_or_init(|| [for_training, all - test.len()]);
        for (cell, set) in self.sets.iter().zip([train, test]) {
            cell.get_or_init(|| Arc::new(set));
        }
        Ok(())
    }

    fn none_to(&self, what: &str) -> TrainError {
        TrainError::Other(format!(
            "{}: a puzzle's class decides whether it may be learned or tested, and none of these is to {what} (add puzzles, or name a folder with train.csv and test.csv)",
            self.config.path
        ))
    }

    /// Of the puzzles to validate with, so many of a set of `whole`.
    pub fn counted(&self, evaluated: usize, whole: usize) -> Counted {
        let [for_training, beyond] = self.left_out.get().copied().unwrap_or_default();
        let left_out = vec![
            LeftOut { key: "training_side", why: "of the training side", count: for_training },
            LeftOut { key: "test_puzzles", why: "beyond data.test_puzzles", count: beyond },
            LeftOut { key: "eval_batches", why: "beyond train.eval_batches", count: whole - evaluated },
        ];
        Counted { what: "puzzles", evaluated, left_out }
    }

    fn generate(&self, split: Split, count: usize) -> Result<PuzzleSet, DataError> {
        let hardness = self.config.hardness;
        let made = match self.task {
            Task::Sudoku(size) => Sudokus { size, clues: None, guesses: hardness }.generate(self.seed, split, count),
            Task::Maze(side) => Mazes { side, steps: hardness }.generate(self.seed, split, count),
        };
        // Of what they are asked for, only this can be impossible.
        made.map_err(|e| match e {
            DataError::Setting { need, .. } => DataError::Setting { what: "data.hardness", value: hardness.to_string(), need },
            other => other,
        })
    }

    pub fn set(&self, split: Split) -> Result<Arc<PuzzleSet>, DataError> {
        let (cell, count) = match split {
            Split::Train => (&self.sets[0], self.config.train_puzzles),
            Split::Val => (&self.sets[1], self.config.test_puzzles),
        };
        if let Some(set) = cell.get() {
            return Ok(set.clone());
        }
        let set = Arc::new(self.generate(split, count)?);
        Ok(cell.get_or_init(|| set).clone())
    }

    /// The first of those to validate with; no more are made for that.
    pub fn unseen(&self, count: usize) -> Result<PuzzleSet, TrainError> {
        self.read()?;
        match self.sets[1].get() {
            Some(set) => Ok(set.chosen(|i| i < count)),
            None => Ok(self.generate(Split::Val, count.min(self.config.test_puzzles))?),
        }
    }

    /// What training is fed, without end.
    pub fn source(&self) -> Result<Arc<dyn Source>, TrainError> {
        let started = std::time::Instant::now();
        let [train, test] = [self.set(Split::Train)?, self.set(Split::Val)?];
        if train.is_empty() {
            return Err(self.none_to("learn from"));
        }
        let seconds = started.elapsed().as_secs_f64();
        say!("{}: {} puzzles to learn from, {} to validate with ({seconds:.1} s)", self.task.name(), train.len(), test.len());
        Ok(Arc::new(Shuffled { set: train, seed: self.seed, config: self.config.clone() }))
    }

    /// Puzzles [n, cells], n at most `batch`, as a batch's ids; it is filled up with what nobody looks at.
    pub fn ids(&self, puzzles: &[u8], batch: usize) -> Vec<i32> {
        let mut ids: Vec<i32> = puzzles.chunks(self.task.cells()).flat_map(|p| prefixed(p, self.config.prefix, FILLING)).collect();
        ids.resize(batch * (self.config.prefix + self.task.cells()), FILLING);
        ids
    }

    /// The cells of answers [n, seq].
    pub fn cells(&self, answers: &[u8]) -> Vec<u8> {
        let prefix = self.config.prefix;
        answers.chunks(prefix + self.task.cells()).flat_map(|row| &row[prefix..]).copied().collect()
    }

    /// What a checkpoint notes: nothing about generated puzzles, which its config describes.
    pub fn identity(&self) -> serde_json::Value {
        let of = |set: &OnceCell<Arc<PuzzleSet>>| {
            (!self.config.path.is_empty()).then(|| set.get()).flatten().map(|set| format!("{:016x}", set.fingerprint()))
        };
        serde_json::json!({ "data": of(&self.sets[0]), "validation": of(engine::mutant!("other-validation-puzzles", &self.sets[1], &self.sets[0])) })
    }
}

/// Place p of the order: all puzzles, epoch after epoch, each time in another order and another form.
struct Shuffled {
    set: Arc<PuzzleSet>,
    seed: u64,
    config: PuzzleConfig,
}

impl Source for Shuffled {
    fn len(&self) -> u64 {
        u64::MAX
    }

    fn item(&self, place: u64) -> Result<Item, DataError> {
        let count = self.set.len() as u64;
        let epoch = place / count;
        let i = order(self.seed, engine::mutant!("puzzles-in-one-order", epoch, 0), count, place % count) as usize;
        let (puzzle, solution) = match self.config.augment {
            true => self.set.augmented(i, self.seed, engine::mutant!("puzzles-in-one-form", epoch, 0)),
            false => (self.set.item(i).0.to_vec(), self.set.item(i).1.to_vec()),
        };
        let prefix = self.config.prefix;
        Ok(Item {
            ids: prefixed(&puzzle, prefix, FILLING),
            targets: prefixed(&solution, prefix, engine::mutant!("padding-of-puzzles-is-learned", -1, FILLING)),
            ..Item::default()
        })
    }

    fn entropy_floor(&self) -> Option<f64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;

    /// Five Sudokus of 4x4, with two tokens before their cells.
    fn source(augment: bool) -> Arc<dyn Source> {
        let mut c = recipe::preset(recipe::find("hrm").unwrap(), None).unwrap();
        let own = ["data.side=4", "train_puzzles=5", "test_puzzles=1", "hardness=0", "data.prefix=2", "model.seq=18", "model.vocab=6"];
        own.iter().for_each(|s| c.set(s).unwrap());
        c.set(&format!("data.augment={augment}")).unwrap();
        let model: HrmConfig = crate::config::Config::section(&c, "model").unwrap();
        Puzzles::new(&c, &model).unwrap().source().unwrap()
    }

    /// The items of an epoch, in their order.
    fn epoch(source: &dyn Source, n: u64) -> Vec<Item> {
        (5 * n..5 * n + 5).map(|place| source.item(place).unwrap()).collect()
    }

    #[test]
    fn what_stands_before_the_cells_is_not_learned() {
        for item in epoch(&*source(true), 0) {
            assert_eq!((item.ids.len(), item.targets.len()), (18, 18));
            assert_eq!((&item.ids[..2], &item.targets[..2]), (&[FILLING; 2][..], &[-1; 2][..]));
            assert!(item.targets[2..].iter().all(|t| (2..6).contains(t)), "{:?}", item.targets);
        }
    }

    #[test]
    fn every_epoch_has_all_puzzles_in_an_order_and_forms_of_its_own() {
        let (plain, augmented) = (source(false), source(true));
        let sorted = |mut items: Vec<Item>| {
            items.sort_by(|a, b| a.ids.cmp(&b.ids));
            items
        };
        let epochs: Vec<Vec<Item>> = (0..4).map(|n| epoch(&*plain, n)).collect();
        assert!(epochs.iter().all(|e| sorted(e.clone()) == sorted(epochs[0].clone())), "the same puzzles");
        assert!(epochs[1..].iter().any(|e| *e != epochs[0]), "in another order");
        for n in 1..4 {
            assert_ne!(sorted(epoch(&*augmented, n)), sorted(epoch(&*augmented, 0)), "in other forms");
        }
    }
}
