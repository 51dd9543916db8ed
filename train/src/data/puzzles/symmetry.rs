//! What turns a Sudoku into another: new names for the digits, transposition, other orders of the bands, of the rows in a band,
//! of the stacks, and of the columns in a stack. For 9x9 that is 9! * 2 * 6^8 symmetries.

use std::sync::LazyLock;

use super::Draws;
use super::sudoku::{LARGEST, Size};

pub struct Symmetry {
    /// The new digit for each; a blank stays one.
    digits: Vec<u8>,
    /// Where each cell's digit comes from.
    from: Vec<usize>,
}

impl Symmetry {
    pub fn draw(size: Size, draws: &mut Draws) -> Symmetry {
        let side = size.side();
        let mut digits: Vec<u8> = (0..=side as u8).collect();
        draws.shuffle(&mut digits[1..]);
        let [rows, columns] = [0, 1].map(|_| lines(size, draws));
        let across = draws.below(2) == 1;
        let from = (0..size.cells()).map(|cell| {
            let (row, column) = (rows[cell / side], columns[cell % side]);
            if across { column * side + row } else { row * side + column }
        });
        Symmetry { digits, from: from.collect() }
    }

    /// For a puzzle and its solution alike.
    pub fn apply(&self, grid: &[u8]) -> Vec<u8> {
        self.from.iter().map(|&cell| self.digits[usize::from(grid[cell])]).collect()
    }
}

/// A drawn order of the rows, bands staying together; or of the columns.
fn lines(size: Size, draws: &mut Draws) -> Vec<usize> {
    let mut drawn = || {
        let mut order: Vec<usize> = (0..size.box_side()).collect();
        draws.shuffle(&mut order);
        order
    };
    drawn().into_iter().flat_map(|band| drawn().into_iter().map(move |line| band * size.box_side() + line)).collect()
}

type Line = [u8; LARGEST];

/// An order of columns: which one comes where, and where each one goes.
struct Order {
    columns: Line,
    places: Line,
}

/// All orders of columns, stacks staying together, by [side, side] the first column and the one that begins the second stack.
static ORDERS: LazyLock<[Vec<Vec<Order>>; 2]> = LazyLock::new(|| Size::ALL.map(orders));

fn orders(size: Size) -> Vec<Vec<Order>> {
    let (side, width) = (size.side(), size.box_side());
    let inner = permutations(width);
    let mut all = vec![];
    for stacks in &inner {
        let mut begun: Vec<Vec<usize>> = vec![vec![]];
        for stack in stacks {
            let next = |head: &Vec<usize>, tail: &Vec<usize>| head.iter().copied().chain(tail.iter().map(|i| stack * width + i)).collect();
            begun = begun.iter().flat_map(|head| inner.iter().map(move |tail| next(head, tail))).collect();
        }
        all.extend(begun);
    }
    let mut sorted: Vec<Vec<Order>> = (0..side * side).map(|_| vec![]).collect();
    for line in all {
        let mut order = Order { columns: Line::default(), places: Line::default() };
        for (place, &column) in line.iter().enumerate() {
            order.columns[place] = column as u8;
            order.places[column] = place as u8;
        }
        sorted[line[0] * side + line[width]].push(order);
    }
    sorted
}

fn permutations(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![vec![]];
    }
    let insert = |short: Vec<usize>| (0..n).map(move |at| [&short[..at], &[n - 1], &short[at..]].concat());
    permutations(n - 1).into_iter().flat_map(insert).collect()
}

/// The first of a solution's symmetric forms in the order of their cells: the same for two solutions if and only if a symmetry
/// leads from one to the other.
pub fn canonical(size: Size, solution: &[u8]) -> Vec<u8> {
    let (side, height) = (size.side(), size.box_side());
    let across: Vec<u8> = (0..size.cells()).map(|cell| solution[cell % side * side + cell / side]).collect();
    let mut best = vec![u8::MAX; size.cells()];
    for grid in [solution, &across] {
        let row = |row: usize| &grid[row * side..][..side];
        for first in 0..side {
            for second in (first / height * height..).take(height).filter(|&second| second != first) {
                // In which column the first row has the digit that the second row has in each.
                let mut meets = Line::default();
                for (column, digit) in row(second).iter().enumerate() {
                    meets[column] = row(first).iter().position(|other| other == digit).expect("every row has every digit") as u8;
                }
                // Digits are named so that the first row is 1, 2, 3 and so on. The second row's names are then the places of the
                // columns it meets. What its first cell meets is in another stack: at best, it begins the second one.
                for order in (0..side).flat_map(|column| &ORDERS[size as usize][column * side + usize::from(meets[column])]) {
                    let names = (0..side).map(|i| order.places[usize::from(meets[usize::from(order.columns[i])])] + 1);
                    if names.cmp(best[side..2 * side].iter().copied()).is_le() {
                        best = best.min(ordered(size, grid, first, second, &order.columns));
                    }
                }
            }
        }
    }
    best
}

/// The first form with these two rows on top and these columns. The other rows' order follows from their first digits.
fn ordered(size: Size, grid: &[u8], first: usize, second: usize, columns: &Line) -> Vec<u8> {
    let (side, height) = (size.side(), size.box_side());
    let at = |row: usize, i: usize| usize::from(grid[row * side + usize::from(columns[i])]);
    let mut names = [0; LARGEST + 1];
    for i in 0..side {
        names[at(first, i)] = i as u8 + 1;
    }
    let name = |row, i| names[at(row, i)];
    let mut bands: Vec<Vec<usize>> = (0..height).map(|band| (band * height..).take(height).collect()).collect();
    for band in &mut bands {
        band.sort_by_key(|&row| (row != first, row != second, name(row, 0)));
    }
    bands.sort_by_key(|band| name(band[0], 0));
    bands.concat().into_iter().flat_map(|row| (0..side).map(move |i| name(row, i))).collect()
}
