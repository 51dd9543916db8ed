//! Puzzles for models that reason: a grid of tokens, and the solved grid. Sudoku, generated or read from a file; mazes, generated.
//!
//! A puzzle belongs to a class, with all that symmetries make of it, and a hash of the class decides whether it may be in a
//! training or in a validation set. So no two of those share a class, whatever their seeds and sizes, and item i of a set is
//! a function of the seed and i alone.

mod csv;
mod maze;
mod solver;
mod sudoku;
mod symmetry;

use std::collections::HashSet;

use indicatif::ProgressBar;
use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use super::{DataError, Split, hash};

pub use csv::{csv_side, read_csv};
pub use maze::Mazes;
pub use solver::{Solved, solve};
pub use sudoku::{HARD, Size, Sudokus};
pub use symmetry::canonical;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    Sudoku(Size),
    /// Square, of this many cells a side.
    Maze(usize),
}

impl Task {
    pub fn name(self) -> String {
        let (kind, side) = (if matches!(self, Task::Maze(_)) { "maze" } else { "sudoku" }, self.side());
        format!("{kind}-{side}x{side}")
    }

    pub fn side(self) -> usize {
        match self {
            Task::Sudoku(size) => size.side(),
            Task::Maze(side) => side,
        }
    }

    /// Tokens of a puzzle.
    pub fn cells(self) -> usize {
        self.side() * self.side()
    }

    /// Tokens are below this.
    pub fn vocabulary(self) -> usize {
        self.glyphs().len()
    }

    /// What the tokens mean.
    fn glyphs(self) -> &'static [u8] {
        match self {
            Task::Sudoku(size) => &b"_.123456789"[..size.side() + 2],
            Task::Maze(_) => maze::GLYPHS,
        }
    }

    /// The token of cells that are to be filled in; in a maze they may also stay as they are.
    pub fn blank(self) -> u8 {
        match self {
            Task::Sudoku(_) => sudoku::BLANK,
            Task::Maze(_) => maze::FREE,
        }
    }

    pub fn glyph(self, token: u8) -> char {
        char::from(*self.glyphs().get(usize::from(token)).unwrap_or(&b'?'))
    }

    /// A puzzle, a solution or a model's answer as a text of `side` lines; what is no token is "?".
    pub fn show(self, tokens: &[u8]) -> String {
        self.marked(tokens, tokens).lines().map(|line| format!("{}\n", line.trim_start())).collect()
    }

    /// The same beside the solution: an "x" stands before a Sudoku's digit that is wrong, for which there is a margin; in a maze it stands
    /// for the wrong token.
    pub fn marked(self, tokens: &[u8], solution: &[u8]) -> String {
        let mut text = String::new();
        for (i, (&token, &right)) in tokens.iter().zip(solution).enumerate() {
            let (column, wrong) = (i % self.side(), token != right);
            match self {
                Task::Sudoku(size) => {
                    text.push_str(if column > 0 && column.is_multiple_of(size.box_side()) { "  " } else { " " });
                    // The mark takes a gap's last place.
                    if wrong {
                        text.pop();
                        text.push('x');
                    }
                    text.push(self.glyph(token));
                }
                Task::Maze(_) => text.push(if wrong { 'x' } else { self.glyph(token) }),
            }
            if column + 1 == self.side() {
                text.push('\n');
            }
        }
        text
    }

    /// A puzzle from a text of its cells, row by row; white space counts for nothing, and 0 is a Sudoku's blank too.
    pub fn parse(self, text: &str) -> Result<Vec<u8>, String> {
        let mut tokens = vec![];
        for glyph in text.chars().filter(|c| !c.is_whitespace()) {
            let glyph = if matches!(self, Task::Sudoku(_)) && glyph == '0' { '.' } else { glyph };
            let known = self.glyphs().iter().position(|&g| char::from(g) == glyph).filter(|&token| self.is_given(token as u8));
            let Some(token) = known else {
                let all: String = (0..self.vocabulary() as u8).filter(|&t| self.is_given(t)).map(|t| self.glyph(t)).collect();
                return Err(format!("'{glyph}' is no cell of {} (cells are {all})", self.name()));
            };
            tokens.push(token as u8);
        }
        match tokens.len() == self.cells() {
            true => Ok(tokens),
            false => Err(format!("{} cells, but {} has {}", tokens.len(), self.name(), self.cells())),
        }
    }

    /// Whether a puzzle may have this token.
    fn is_given(self, token: u8) -> bool {
        token != 0 && !(matches!(self, Task::Maze(_)) && token == maze::PATH)
    }

    /// The solution of a puzzle that has one and no other.
    pub fn solution(self, puzzle: &[u8]) -> Option<Vec<u8>> {
        match self {
            Task::Sudoku(size) => {
                let solved = solve(size, &sudoku::digits(puzzle));
                solved.solution.filter(|_| solved.solutions == 1).map(|digits| sudoku::tokens(&digits))
            }
            Task::Maze(side) => maze::solution(side, puzzle),
        }
    }
}

/// The tokens of a puzzle and of its solution.
type Pair = (Vec<u8>, Vec<u8>);

/// One split of a task. Its items keep their order: item i is the same everywhere.
#[derive(Debug, Clone, PartialEq)]
pub struct PuzzleSet {
    pub task: Task,
    /// [n, cells]
    pub inputs: Vec<u8>,
    /// [n, cells]: each cell's token in the solved puzzle, those that were given among them.
    pub targets: Vec<u8>,
}

impl PuzzleSet {
    /// Items `0..count` of a split, each made from its own draws.
    fn generate<F>(task: Task, seed: u64, split: Split, count: usize, make: F) -> Result<PuzzleSet, DataError>
    where
        F: Fn(Draws) -> Result<Pair, DataError> + Sync,
    {
        // Seen in a terminal, and there only while it goes on.
        let bar = ProgressBar::new(count as u64);
        let pairs = (0..count as u64).into_par_iter().map(|i| {
            let made = make(Draws::new(&[seed, split as u64, i]));
            bar.inc(1);
            made
        });
        let pairs = pairs.collect::<Result<_, _>>();
        bar.finish_and_clear();
        Ok(PuzzleSet::new(task, pairs?))
    }

    fn new(task: Task, pairs: Vec<Pair>) -> PuzzleSet {
        let (inputs, targets): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        PuzzleSet { task, inputs: inputs.concat(), targets: targets.concat() }
    }

    pub fn len(&self) -> usize {
        self.inputs.len() / self.task.cells()
    }

    pub fn is_empty(&self) -> bool {
        self.inputs.is_empty()
    }

    /// Only these items.
    pub fn chosen(&self, mut keep: impl FnMut(usize) -> bool) -> PuzzleSet {
        let kept: Vec<usize> = (0..self.len()).filter(|&i| keep(i)).collect();
        let of = |tokens: &[u8]| kept.iter().flat_map(|i| &tokens[i * self.task.cells()..][..self.task.cells()]).copied().collect();
        PuzzleSet { task: self.task, inputs: of(&self.inputs), targets: of(&self.targets) }
    }

    /// Puzzle and solution.
    pub fn item(&self, i: usize) -> (&[u8], &[u8]) {
        let cells = self.task.cells();
        (&self.inputs[i * cells..][..cells], &self.targets[i * cells..][..cells])
    }

    /// The item under a symmetry drawn for this epoch. It stays in its split.
    pub fn augmented(&self, i: usize, seed: u64, epoch: u64) -> Pair {
        const SITE: u64 = 0x7475_726e; // Other draws than those that made the puzzle.
        let (input, target) = self.item(i);
        let draws = Draws::new(&[SITE, seed, epoch, i as u64]);
        match self.task {
            Task::Sudoku(size) => sudoku::augmented(size, input, target, draws),
            Task::Maze(side) => maze::augmented(side, input, target, draws),
        }
    }

    /// How hard the item is: a Sudoku's guesses, or the steps of a maze's path. A symmetric Sudoku may take more guesses or fewer,
    /// as ties between cells are decided by their order: 1,000 hard ones take 8.6 on average, their symmetric forms 6.3.
    pub fn grade(&self, i: usize) -> u32 {
        let (input, target) = self.item(i);
        match self.task {
            Task::Sudoku(size) => solve(size, &sudoku::digits(input)).guesses,
            Task::Maze(_) => maze::steps(target),
        }
    }

    /// What no two splits share.
    fn class(&self, i: usize) -> Vec<u8> {
        let (input, target) = self.item(i);
        match self.task {
            Task::Sudoku(size) => sudoku::class(size, &sudoku::digits(target)),
            Task::Maze(side) => maze::class(side, input),
        }
    }

    /// The only split that the item's class may be in.
    pub fn split(&self, i: usize) -> Split {
        let (input, target) = self.item(i);
        match self.task {
            Task::Sudoku(size) => sudoku::split(size, &sudoku::digits(target)),
            Task::Maze(side) => maze::split(side, input),
        }
    }

    /// How many items of `other` are of a class that this set has too. Generated splits share none; files may.
    pub fn shared(&self, other: &PuzzleSet) -> usize {
        let classes = |set: &PuzzleSet| -> Vec<Vec<u8>> { (0..set.len()).into_par_iter().map(|i| set.class(i)).collect() };
        let own: HashSet<Vec<u8>> = classes(self).into_iter().collect();
        classes(other).iter().filter(|class| own.contains(*class)).count()
    }

    /// A number that changes with anything in the set.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        hash.update(self.task.name().as_bytes());
        hash.update(&(self.len() as u64).to_le_bytes());
        hash.update(&self.inputs);
        hash.update(&self.targets);
        hash.digest()
    }
}

/// One class in `share` is for validation.
fn split_of(class: &[u8], share: u64) -> Split {
    const SEED: u64 = 0x7075_7a7a; // Another seed would be another split: never changed.
    if xxh3_64_with_seed(class, SEED).is_multiple_of(share) { Split::Val } else { Split::Train }
}

/// The random numbers of one puzzle, one after another.
struct Draws {
    key: u64,
    used: u64,
}

impl Draws {
    fn new(words: &[u64]) -> Draws {
        Draws { key: hash(words), used: 0 }
    }

    fn below(&mut self, n: usize) -> usize {
        self.used += 1;
        ((u128::from(hash(&[self.key, self.used])) * n as u128) >> 64) as usize
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}
