//! Sudokus with one solution: clues are taken from a drawn grid for as long as no other grid fits.

use super::solver::{fits_otherwise, random_grid};
use super::symmetry::{Symmetry, canonical};
use super::{DataError, Draws, Pair, PuzzleSet, Split, Task, solve, split_of};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    Four,
    Nine,
}

/// The side of the largest.
pub const LARGEST: usize = 9;

impl Size {
    pub const ALL: [Size; 2] = [Size::Four, Size::Nine];

    pub fn box_side(self) -> usize {
        match self {
            Size::Four => 2,
            Size::Nine => 3,
        }
    }

    pub fn side(self) -> usize {
        self.box_side() * self.box_side()
    }

    pub fn cells(self) -> usize {
        self.side() * self.side()
    }

    /// The row, the column and the box of a cell.
    pub fn units(self, cell: usize) -> [usize; 3] {
        let (row, column, side) = (cell / self.side(), cell % self.side(), self.box_side());
        [row, column, row / side * side + column / side]
    }
}

/// Guesses of a hard 9x9 puzzle. Of 3,000 that could spare no clue, 57% needed a guess, 28% three and 13% these five: one of
/// them is found in 2.1 ms of one core (EPYC).
pub const HARD: u32 = 5;

/// Puzzles that are drawn for a grid before another one is; and grids, before what was asked for counts as impossible.
const PUZZLES: usize = 100;
const GRIDS: usize = 50;

/// What to generate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sudokus {
    pub size: Size,
    /// How many cells are given. None: as many as are left where no clue can be spared, in 9x9 about 24.
    pub clues: Option<usize>,
    /// The least that the solver needs.
    pub guesses: u32,
}

impl Default for Sudokus {
    fn default() -> Self {
        Sudokus { size: Size::Nine, clues: None, guesses: HARD }
    }
}

impl Sudokus {
    /// Puzzles `0..count` of a split.
    pub fn generate(&self, seed: u64, split: Split, count: usize) -> Result<PuzzleSet, DataError> {
        if let Some(clues) = self.clues.filter(|&clues| clues > self.size.cells()) {
            let need = format!("a puzzle has {} cells", self.size.cells());
            return Err(DataError::Setting { what: "clues", value: clues.to_string(), need });
        }
        PuzzleSet::generate(Task::Sudoku(self.size), seed, split, count, |draws| self.puzzle(draws, split))
    }

    fn puzzle(&self, mut draws: Draws, split: Split) -> Result<Pair, DataError> {
        for _ in 0..GRIDS {
            let solution = self.solution(&mut draws, split);
            for _ in 0..PUZZLES {
                let puzzle = self.dig(&solution, &mut draws);
                let clues_fit = self.clues.is_none_or(|clues| clues == given(&puzzle));
                if clues_fit && solve(self.size, &puzzle).guesses >= self.guesses {
                    return Ok((tokens(&puzzle), tokens(&solution)));
                }
            }
        }
        let (clues, or) = self.clues.map_or_else(Default::default, |clues| (format!(", {clues} clues"), " or for more clues"));
        Err(DataError::Setting {
            what: "sudoku",
            value: format!("{0}x{0}{clues}, {1} guesses", self.size.side(), self.guesses),
            need: format!("none of {} drawn puzzles is like that (ask for fewer guesses{or})", GRIDS * PUZZLES),
        })
    }

    fn solution(&self, draws: &mut Draws, split: Split) -> Vec<u8> {
        loop {
            let grid = random_grid(self.size, draws);
            if self::split(self.size, &grid) == split {
                return grid;
            }
        }
    }

    /// Takes clues away in a drawn order. One that cannot be spared now cannot be spared later either.
    fn dig(&self, solution: &[u8], draws: &mut Draws) -> Vec<u8> {
        let mut puzzle = solution.to_vec();
        let mut order: Vec<usize> = (0..puzzle.len()).collect();
        draws.shuffle(&mut order);
        for cell in order {
            if Some(given(&puzzle)) == self.clues {
                break;
            }
            puzzle[cell] = 0;
            if fits_otherwise(self.size, &puzzle, cell, solution[cell]) {
                puzzle[cell] = solution[cell];
            }
        }
        puzzle
    }
}

fn given(puzzle: &[u8]) -> usize {
    puzzle.iter().filter(|&&digit| digit != 0).count()
}

pub const BLANK: u8 = 1;

/// Token 1 is a blank cell, 2 and on the digits.
pub fn tokens(digits: &[u8]) -> Vec<u8> {
    digits.iter().map(|digit| digit + 1).collect()
}

pub fn digits(tokens: &[u8]) -> Vec<u8> {
    tokens.iter().map(|token| token - 1).collect()
}

/// 9x9 has 5,472,730,538 solutions up to symmetry. 4x4 has two, too few to split: each of its 288 solutions is a class of its own.
pub fn class(size: Size, solution: &[u8]) -> Vec<u8> {
    match size {
        Size::Four => solution.to_vec(),
        Size::Nine => canonical(size, solution),
    }
}

/// Of 4x4, 54 solutions are for validation and 234 for training.
pub fn split(size: Size, solution: &[u8]) -> Split {
    let share = match size {
        Size::Four => 6,
        Size::Nine => 2,
    };
    split_of(&class(size, solution), share)
}

/// Where a symmetry would lead from a training solution of 4x4 to one for validation, or back, another one is drawn.
pub fn augmented(size: Size, input: &[u8], target: &[u8], mut draws: Draws) -> Pair {
    let (input, target) = (digits(input), digits(target));
    loop {
        let symmetry = Symmetry::draw(size, &mut draws);
        let moved = symmetry.apply(&target);
        if size == Size::Nine || split(size, &moved) == split(size, &target) {
            return (tokens(&symmetry.apply(&input)), tokens(&moved));
        }
    }
}
