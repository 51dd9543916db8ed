//! The Sudoku solver. It fills in singles, and guesses where there are none left.
//!
//! A set of cells is the bits of one number, and a board has such a set for each digit: where it may still go.

use std::sync::LazyLock;

use super::Draws;
use super::sudoku::{LARGEST, Size};

type Cells = u128;

struct Geometry {
    all: Cells,
    /// Rows, columns, boxes.
    units: Vec<Cells>,
    /// The other cells of a cell's three units.
    peers: Vec<Cells>,
}

static GEOMETRIES: LazyLock<[Geometry; 2]> = LazyLock::new(|| Size::ALL.map(Geometry::new));

impl Geometry {
    fn new(size: Size) -> Geometry {
        let mut units: Vec<Cells> = vec![0; 3 * size.side()];
        for cell in 0..size.cells() {
            for (kind, unit) in size.units(cell).into_iter().enumerate() {
                units[kind * size.side() + unit] |= 1 << cell;
            }
        }
        let peers = |cell: usize| {
            let own = units.iter().filter(|&unit| unit >> cell & 1 == 1);
            own.fold(0, |all: Cells, unit| all | unit) & !(1 << cell)
        };
        Geometry { all: (1 << size.cells()) - 1, peers: (0..size.cells()).map(peers).collect(), units }
    }
}

#[derive(Clone, Copy)]
struct Board {
    geometry: &'static Geometry,
    side: usize,
    /// Where each digit may still go.
    places: [Cells; LARGEST],
    /// Cells that were given their digit.
    settled: Cells,
}

impl Board {
    fn new(size: Size, clues: &[u8]) -> Board {
        assert_eq!(clues.len(), size.cells(), "a Sudoku's cells");
        let geometry = &GEOMETRIES[size as usize];
        let mut board = Board { geometry, side: size.side(), places: [geometry.all; LARGEST], settled: 0 };
        for (cell, &clue) in clues.iter().enumerate().filter(|(_, clue)| **clue != 0) {
            board.settle(cell, clue as usize - 1);
        }
        board
    }

    /// If the digit may not go there, the cell is left without one, which `fill_singles` sees.
    fn settle(&mut self, cell: usize, digit: usize) {
        let here = self.places[digit] & 1 << cell;
        for places in &mut self.places[..self.side] {
            *places &= !(1 << cell);
        }
        self.places[digit] = self.places[digit] & !self.geometry.peers[cell] | here;
        self.settled |= 1 << cell;
    }

    /// Settles cells with one digit left, and digits with one cell left in a unit, until there are none. False if a cell or a
    /// digit has nothing left.
    fn fill_singles(&mut self) -> bool {
        loop {
            let before = self.settled;
            let (mut some, mut several) = (0, 0);
            for places in &self.places[..self.side] {
                several |= some & places;
                some |= places;
            }
            if some != self.geometry.all {
                return false;
            }
            let single = !several & !self.settled;
            for digit in 0..self.side {
                for cell in bits(self.places[digit] & single) {
                    self.settle(cell, digit);
                }
            }
            if self.settled != before {
                continue;
            }
            for digit in 0..self.side {
                for unit in &self.geometry.units {
                    let places = self.places[digit] & unit;
                    if places == 0 {
                        return false;
                    }
                    if places & (places - 1) == 0 && places & self.settled == 0 {
                        self.settle(places.trailing_zeros() as usize, digit);
                    }
                }
            }
            if self.settled == before {
                return true;
            }
        }
    }

    /// The open cell with the fewest digits left, and the first of those.
    fn tightest(&self) -> Option<usize> {
        // [k]: cells with more than k digits left.
        let mut more_than = [0; LARGEST + 1];
        for places in &self.places[..self.side] {
            for k in (1..=self.side).rev() {
                more_than[k] |= more_than[k - 1] & places;
            }
            more_than[0] |= places;
        }
        let fewest = (1..self.side).map(|k| more_than[k] & !more_than[k + 1]).find(|&cells| cells != 0);
        fewest.map(|cells| cells.trailing_zeros() as usize)
    }

    fn digits(&self, cell: usize) -> impl Iterator<Item = usize> {
        let places = self.places;
        (0..self.side).filter(move |&digit| places[digit] >> cell & 1 == 1)
    }

    fn grid(&self) -> Vec<u8> {
        (0..self.geometry.peers.len()).map(|cell| self.digits(cell).next().map_or(0, |digit| digit as u8 + 1)).collect()
    }
}

fn bits(mut cells: Cells) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        (cells != 0).then(|| {
            let cell = cells.trailing_zeros() as usize;
            cells &= cells - 1;
            cell
        })
    })
}

/// What came of a search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Solved {
    /// The first one found.
    pub solution: Option<Vec<u8>>,
    /// How many were found before the search ended, or was ended.
    pub solutions: usize,
    /// How often no single was left and a cell's digits were tried one after another.
    pub guesses: u32,
}

struct Search<'a> {
    /// Solutions after which it ends.
    limit: usize,
    /// For the order in which digits are tried; upwards, if there are none.
    draws: Option<&'a mut Draws>,
    solved: Solved,
}

impl<'a> Search<'a> {
    fn run(board: Board, limit: usize, draws: Option<&'a mut Draws>) -> Solved {
        let mut search = Search { limit, draws, solved: Solved { solution: None, solutions: 0, guesses: 0 } };
        search.go(board);
        search.solved
    }

    fn go(&mut self, mut board: Board) {
        if !board.fill_singles() {
            return;
        }
        let Some(cell) = board.tightest() else {
            self.solved.solutions += 1;
            self.solved.solution.get_or_insert_with(|| board.grid());
            return;
        };
        self.solved.guesses += 1;
        let mut digits: Vec<usize> = board.digits(cell).collect();
        if let Some(draws) = &mut self.draws {
            draws.shuffle(&mut digits);
        }
        for digit in digits {
            let mut guess = board;
            guess.settle(cell, digit);
            self.go(guess);
            if self.solved.solutions == self.limit {
                return;
            }
        }
    }
}

/// Looks for two solutions. Where there is only one, every guess was followed to its end, so that luck with the order of the
/// digits does not count.
pub fn solve(size: Size, clues: &[u8]) -> Solved {
    Search::run(Board::new(size, clues), 2, None)
}

pub fn random_grid(size: Size, draws: &mut Draws) -> Vec<u8> {
    let empty = Board::new(size, &vec![0; size.cells()]);
    Search::run(empty, 1, Some(draws)).solution.expect("an empty board can be filled")
}

/// Whether there is a solution with another digit in this cell.
pub fn fits_otherwise(size: Size, clues: &[u8], cell: usize, digit: u8) -> bool {
    let mut board = Board::new(size, clues);
    board.places[usize::from(digit) - 1] &= !(1 << cell);
    Search::run(board, 1, None).solutions > 0
}
