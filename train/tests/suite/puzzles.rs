//! Puzzles against solvers and symmetries written anew here, as plainly as can be.

use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use kiln::data::Split;
use kiln::data::puzzles::{HARD, Mazes, PuzzleSet, Size, Sudokus, Task, canonical, solve};

/// Solved by singles alone; and one that was published as the hardest of all (A. Inkala, 2012).
const EASY: &str = "530070000600195000098000060800060003400803001700020006060000280000419005000080079";

const HARDEST: &str = "800000000003600000070090200050007000000045700000100030001000068008500010090000400";

pub fn cells(text: &str) -> Vec<u8> {
    text.bytes().map(|byte| byte - b'0').collect()
}

/// Tokens to digits, 0 for a blank.
pub fn digits(tokens: &[u8]) -> Vec<u8> {
    tokens.iter().map(|token| token - 1).collect()
}

/// The other cells of each cell's row, column and box.
fn peers(side: usize, cell: usize) -> &'static [usize] {
    static PEERS: LazyLock<HashMap<(usize, usize), Vec<usize>>> = LazyLock::new(|| {
        let all = [4, 9].into_iter().flat_map(|side: usize| (0..side * side).map(move |cell| (side, cell)));
        let meet = |side: usize, a: usize, b: usize| {
            let band = |line: usize| line / side.isqrt();
            let (row, column) = ((a / side, b / side), (a % side, b % side));
            a != b && (row.0 == row.1 || column.0 == column.1 || (band(row.0) == band(row.1) && band(column.0) == band(column.1)))
        };
        all.map(|(side, cell)| ((side, cell), (0..side * side).filter(|&other| meet(side, cell, other)).collect())).collect()
    });
    &PEERS[&(side, cell)]
}

fn candidates(side: usize, grid: &[u8], cell: usize) -> Vec<u8> {
    let peers = peers(side, cell);
    (1..=side as u8).filter(|&digit| peers.iter().all(|&peer| grid[peer] != digit)).collect()
}

fn tightest(side: usize, grid: &[u8]) -> Option<(usize, Vec<u8>)> {
    let open = (0..grid.len()).filter(|&cell| grid[cell] == 0);
    open.map(|cell| (cell, candidates(side, grid, cell))).min_by_key(|(cell, left)| (left.len(), *cell))
}

/// All solutions, up to `limit`, by trying.
fn solutions(side: usize, grid: &mut Vec<u8>, limit: usize, found: &mut Vec<Vec<u8>>) {
    let Some((cell, left)) = tightest(side, grid) else {
        return found.push(grid.clone());
    };
    for digit in left {
        grid[cell] = digit;
        solutions(side, grid, limit, found);
        if found.len() == limit {
            break;
        }
    }
    grid[cell] = 0;
}

fn all_solutions(side: usize, grid: &[u8], limit: usize) -> Vec<Vec<u8>> {
    let mut found = vec![];
    solutions(side, &mut grid.to_vec(), limit, &mut found);
    found
}

fn is_solution(side: usize, grid: &[u8]) -> bool {
    grid.len() == side * side && (0..grid.len()).all(|cell| grid[cell] != 0 && candidates(side, grid, cell).contains(&grid[cell]))
}

/// A digit that is the only one left for the cell, or has no other place in the cell's row, column or box.
fn single(side: usize, grid: &[u8], cell: usize) -> Option<u8> {
    let left = candidates(side, grid, cell);
    let (root, peers) = (side.isqrt(), peers(side, cell));
    let alone = |digit: u8| {
        let free = |same: &dyn Fn(usize) -> bool| {
            let others = peers.iter().filter(|&&peer| same(peer));
            others.clone().all(|&peer| grid[peer] != 0 || !candidates(side, grid, peer).contains(&digit))
        };
        let band = |cell: usize| (cell / side / root, cell % side / root);
        free(&|peer| peer / side == cell / side) || free(&|peer| peer % side == cell % side) || free(&|peer| band(peer) == band(cell))
    };
    if left.len() == 1 { Some(left[0]) } else { left.into_iter().find(|&digit| alone(digit)) }
}

/// Every digit has a place in every row, column and box, and every cell has a digit left.
fn is_open(side: usize, grid: &[u8]) -> bool {
    let root = side.isqrt();
    let units = (0..side).flat_map(|i| {
        let row = (0..side).map(move |j| i * side + j).collect::<Vec<_>>();
        let column = (0..side).map(move |j| j * side + i).collect();
        let square = (0..side).map(move |j| (i / root * root + j / root) * side + i % root * root + j % root).collect();
        [row, column, square]
    });
    let may = |cell: usize, digit: u8| if grid[cell] == 0 { candidates(side, grid, cell).contains(&digit) } else { grid[cell] == digit };
    let consistent = (0..grid.len()).all(|cell| match grid[cell] {
        0 => !candidates(side, grid, cell).is_empty(),
        digit => candidates(side, grid, cell).contains(&digit),
    });
    consistent && units.into_iter().all(|unit| (1..=side as u8).all(|digit| unit.iter().any(|&cell| may(cell, digit))))
}

/// Guesses over the whole search, with singles filled in one at a time.
fn guesses(side: usize, grid: &[u8]) -> u32 {
    let mut grid = grid.to_vec();
    while is_open(side, &grid) {
        let open = (0..grid.len()).filter(|&cell| grid[cell] == 0);
        if let Some((cell, digit)) = open.clone().find_map(|cell| single(side, &grid, cell).map(|digit| (cell, digit))) {
            grid[cell] = digit;
            continue;
        }
        let Some((cell, left)) = tightest(side, &grid) else { break };
        let tried = left.into_iter().map(|digit| {
            let mut guess = grid.clone();
            guess[cell] = digit;
            guesses(side, &guess)
        });
        return 1 + tried.sum::<u32>();
    }
    0
}

pub fn hard(seed: u64, split: Split, count: usize) -> PuzzleSet {
    Sudokus::default().generate(seed, split, count).unwrap()
}

pub fn four(seed: u64, split: Split, count: usize) -> PuzzleSet {
    Sudokus { size: Size::Four, clues: None, guesses: 0 }.generate(seed, split, count).unwrap()
}

#[test]
fn puzzles_have_one_solution_and_need_every_clue() {
    for (set, count) in [(hard(1, Split::Train, 12), 12), (four(1, Split::Val, 100), 100)] {
        let side = set.task.side();
        assert_eq!(set.len(), count);
        for i in 0..count {
            let (puzzle, solution) = (digits(set.item(i).0), digits(set.item(i).1));
            assert!(is_solution(side, &solution), "{}", set.task.show(set.item(i).1));
            assert_eq!(all_solutions(side, &puzzle, 2), [solution], "{}", set.task.show(set.item(i).0));
            for cell in (0..puzzle.len()).filter(|&cell| puzzle[cell] != 0) {
                let mut less = puzzle.clone();
                less[cell] = 0;
                assert_eq!(all_solutions(side, &less, 2).len(), 2);
            }
        }
    }
}

#[test]
fn clues_are_as_many_as_asked_for() {
    for (size, clues) in [(Size::Nine, 40), (Size::Nine, 26), (Size::Nine, 81), (Size::Four, 6), (Size::Four, 16)] {
        let set = Sudokus { size, clues: Some(clues), guesses: 0 }.generate(0, Split::Train, 10).unwrap();
        for i in 0..10 {
            let puzzle = digits(set.item(i).0);
            assert_eq!(puzzle.iter().filter(|&&digit| digit != 0).count(), clues);
            assert_eq!(solve(size, &puzzle).solutions, 1);
        }
    }
}

#[test]
fn grades_are_the_guesses_of_a_plain_solver() {
    let easy = solve(Size::Nine, &cells(EASY));
    assert_eq!((easy.solutions, easy.guesses), (1, 0));
    assert_eq!(guesses(9, &cells(EASY)), 0);
    let hardest = solve(Size::Nine, &cells(HARDEST));
    assert_eq!(hardest.solutions, 1);
    assert_eq!(hardest.guesses, guesses(9, &cells(HARDEST)));
    assert!(hardest.guesses >= 20, "{}", hardest.guesses);

    let any = Sudokus { guesses: 0, ..Sudokus::default() }.generate(2, Split::Train, 30).unwrap();
    let hard = hard(2, Split::Val, 10);
    for (set, least) in [(any, 0), (hard, HARD)] {
        for i in 0..set.len() {
            let puzzle = digits(set.item(i).0);
            assert_eq!(set.grade(i), guesses(9, &puzzle), "{}", set.task.show(set.item(i).0));
            assert!(set.grade(i) >= least);
            let relabelled: Vec<u8> = puzzle.iter().map(|&digit| if digit == 0 { 0 } else { digit % 9 + 1 }).collect();
            assert_eq!(solve(Size::Nine, &relabelled).guesses, set.grade(i), "the digits' names change nothing");
        }
    }
}

#[test]
fn a_solver_tells_none_from_one_and_from_more() {
    assert_eq!(solve(Size::Nine, &[0; 81]).solutions, 2);
    let mut two = cells(EASY);
    two[..9].fill(0);
    assert_eq!(solve(Size::Nine, &two).solutions, all_solutions(9, &two, 2).len());
    for (cell, digit) in [(2, 5), (2, 9), (80, 1)] {
        let mut wrong = cells(EASY);
        wrong[cell] = digit;
        let solved = solve(Size::Nine, &wrong);
        assert_eq!((solved.solutions, solved.solution), (0, None), "digit {digit} in cell {cell}");
    }
    let grids = all_solutions(4, &[0; 16], 1000);
    for puzzle in grids
        .iter()
        .flat_map(|grid| (0..8).map(|skip| (0..16).map(|cell| if (cell * 5 + skip) % 8 < 3 { grid[cell] } else { 0 }).collect::<Vec<u8>>()))
    {
        assert_eq!(solve(Size::Four, &puzzle).solutions, all_solutions(4, &puzzle, 2).len());
    }
}

/// Orders of `side` lines that keep bands together.
fn line_orders(side: usize) -> Vec<Vec<usize>> {
    let root = side.isqrt();
    let mut all: Vec<Vec<usize>> = vec![vec![]];
    for i in 0..side {
        let fits = |order: &Vec<usize>, line: &usize| !order.contains(line) && (i % root == 0 || order[i - 1] / root == line / root);
        all = all.iter().flat_map(|order| (0..side).filter(|line| fits(order, line)).map(|line| [&order[..], &[line]].concat())).collect();
    }
    all
}

/// Digits named by their first appearance: the first of all namings.
fn named(grid: &[u8]) -> Vec<u8> {
    let mut names = HashMap::new();
    grid.iter()
        .map(|digit| {
            let next = names.len() as u8 + 1;
            *names.entry(*digit).or_insert(next)
        })
        .collect()
}

#[test]
fn the_canonical_form_of_4x4_is_the_first_of_all_forms() {
    let orders = line_orders(4);
    assert_eq!((orders.len(), line_orders(9).len()), (8, 1296));
    let grids = all_solutions(4, &[0; 16], 1000);
    assert_eq!(grids.len(), 288);
    let mut classes = HashMap::new();
    for grid in &grids {
        let forms = orders.iter().flat_map(|rows| orders.iter().map(move |columns| (rows, columns)));
        let forms = forms.flat_map(|(rows, columns)| {
            let at = |i: usize| (rows[i / 4], columns[i % 4]);
            let upright = (0..16).map(|i| grid[at(i).0 * 4 + at(i).1]).collect::<Vec<_>>();
            let across = (0..16).map(|i| grid[at(i).1 * 4 + at(i).0]).collect::<Vec<_>>();
            [named(&upright), named(&across)]
        });
        let first = forms.min().unwrap();
        assert_eq!(canonical(Size::Four, grid), first);
        *classes.entry(first).or_insert(0) += 1;
    }
    let mut sizes: Vec<i32> = classes.into_values().collect();
    sizes.sort();
    assert_eq!(sizes, [96, 192]);
}

#[test]
fn the_canonical_form_of_9x9_is_the_same_for_all_symmetric_grids() {
    let set = Sudokus { clues: Some(81), guesses: 0, ..Sudokus::default() }.generate(5, Split::Train, 200).unwrap();
    let grids: Vec<Vec<u8>> = (0..set.len()).map(|i| digits(set.item(i).1)).collect();
    let forms: Vec<Vec<u8>> = grids.iter().map(|grid| canonical(Size::Nine, grid)).collect();
    assert_eq!(forms.iter().collect::<HashSet<_>>().len(), 200, "drawn grids differ by more than a symmetry");
    for (i, (grid, form)) in grids.iter().zip(&forms).enumerate() {
        assert!(is_solution(9, form));
        assert_eq!(&canonical(Size::Nine, form), form);
        for k in 0..20 {
            let moved = digits(&set.augmented(i, 0, k).1);
            assert!(is_solution(9, &moved));
            assert_ne!(&moved, grid);
            assert_eq!(&canonical(Size::Nine, &moved), form);
        }
    }
    // Kept by many symmetries.
    let regular: Vec<u8> = (0..81).map(|cell| ((cell / 9 * 3 + cell / 27 + cell % 9) % 9) as u8 + 1).collect();
    let tokens: Vec<u8> = regular.iter().map(|digit| digit + 1).collect();
    let alone = PuzzleSet { task: set.task, inputs: tokens.clone(), targets: tokens };
    assert!(is_solution(9, &regular));
    assert_eq!(canonical(Size::Nine, &digits(&alone.augmented(0, 0, 0).1)), canonical(Size::Nine, &regular));
    for epoch in 0..20_000 {
        assert!(named(&digits(&set.augmented(0, 1, epoch).1)) >= forms[0]);
    }
}

#[test]
fn training_and_validation_share_no_grid_up_to_symmetry() {
    let easy = Sudokus { guesses: 0, ..Sudokus::default() };
    let sets = [0, 1].map(|seed| Split::ALL.map(|split| easy.generate(seed, split, 300).unwrap()));
    let forms = |set: &PuzzleSet| -> HashSet<Vec<u8>> { (0..set.len()).map(|i| canonical(Size::Nine, &digits(set.item(i).1))).collect() };
    for train in [&sets[0][0], &sets[1][0]] {
        for val in [&sets[0][1], &sets[1][1]] {
            assert!(forms(train).is_disjoint(&forms(val)));
            assert_eq!(train.shared(val), 0);
        }
    }
    assert_eq!(sets[0][0].shared(&sets[0][0]), 300);
    assert_eq!(sets[0][0].shared(&augmented(&sets[0][0], 0)), 300);
}

fn augmented(set: &PuzzleSet, epoch: u64) -> PuzzleSet {
    let (inputs, targets): (Vec<_>, Vec<_>) = (0..set.len()).map(|i| set.augmented(i, 0, epoch)).unzip();
    PuzzleSet { task: set.task, inputs: inputs.concat(), targets: targets.concat() }
}

/// Sets this small would hardly ever share a grid by chance: what keeps all others apart is looked at itself.
#[test]
fn a_class_is_in_one_split_alone() {
    let easy = Sudokus { guesses: 0, ..Sudokus::default() };
    for (seed, split) in [(0, Split::Train), (0, Split::Val), (1, Split::Train)] {
        let sets = [easy.generate(seed, split, 50), Mazes { side: 30, steps: 1 }.generate(seed, split, 50)].map(Result::unwrap);
        for set in [&sets[0], &sets[1], &four(seed, split, 50)] {
            for set in [set, &augmented(set, 0), &augmented(set, 1)] {
                assert!((0..set.len()).all(|i| set.split(i) == split), "{}", set.task.name());
            }
        }
    }
}

#[test]
fn the_288_grids_of_4x4_are_split_and_augmentation_stays_on_its_side() {
    let sets = Split::ALL.map(|split| four(3, split, 4000));
    let grids = sets.each_ref().map(|set| set.targets.chunks(16).map(<[u8]>::to_vec).collect::<HashSet<_>>());
    assert_eq!(grids.each_ref().map(HashSet::len), [234, 54]);
    assert!(grids[0].is_disjoint(&grids[1]));
    assert_eq!(sets[0].shared(&sets[1]), 0);
    let kinds = |grids: &HashSet<Vec<u8>>| grids.iter().map(|grid| canonical(Size::Four, &digits(grid))).collect::<HashSet<_>>().len();
    assert_eq!(grids.each_ref().map(kinds), [2, 2], "both sides have grids of both kinds");
    for (set, own) in sets.iter().zip(&grids) {
        let mut seen = HashSet::new();
        for i in 0..set.len() {
            let (puzzle, solution) = set.augmented(i, 7, 2);
            assert!(own.contains(&solution));
            assert_eq!(all_solutions(4, &digits(&puzzle), 2), [digits(&solution)]);
            seen.insert(solution);
        }
        assert_eq!(&seen, own, "every grid of the side is reached");
    }
}

#[test]
fn augmented_puzzles_have_one_solution_too() {
    let set = hard(4, Split::Train, 12);
    for i in 0..set.len() {
        let mut seen = HashSet::from([set.item(i).0.to_vec()]);
        for (seed, epoch) in [(0, 0), (0, 1), (1, 0)] {
            let (puzzle, solution) = set.augmented(i, seed, epoch);
            assert_eq!(set.augmented(i, seed, epoch), (puzzle.clone(), solution.clone()));
            assert!(is_solution(9, &digits(&solution)));
            assert_eq!(all_solutions(9, &digits(&puzzle), 2), [digits(&solution)]);
            assert_eq!(canonical(Size::Nine, &digits(&solution)), canonical(Size::Nine, &digits(set.item(i).1)));
            let given = |tokens: &[u8]| tokens.iter().filter(|&&token| token > 1).count();
            assert_eq!(given(&puzzle), given(set.item(i).0));
            assert!(seen.insert(puzzle), "another one each time");
        }
    }
}

#[test]
fn items_are_a_function_of_seed_split_and_number() {
    type Make = fn(u64, Split, usize) -> PuzzleSet;
    let mazes: Make = |seed, split, count| Mazes::default().generate(seed, split, count).unwrap();
    // The same on every machine.
    let all: [(Make, &str, &str); 3] =
        [(hard, "sudoku-9x9", "571e95c4c9822a55"), (four, "sudoku-4x4", "cbf4128dac87bbed"), (mazes, "maze-30x30", "69b6a6a388155d1d")];
    let mut seen = vec![];
    for (make, name, fingerprint) in all {
        let set = make(3, Split::Train, 20);
        let cells = set.task.cells();
        assert_eq!(set.task.name(), name);
        assert!(set.inputs.iter().chain(&set.targets).all(|&token| usize::from(token) < set.task.vocabulary()));
        let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap().install(|| make(3, Split::Train, 30));
        assert_eq!((&alone.inputs[..20 * cells], &alone.targets[..20 * cells]), (&set.inputs[..], &set.targets[..]));
        assert_ne!(make(4, Split::Train, 20), set);
        assert_ne!(make(3, Split::Val, 20), set);
        let mut changed = set.clone();
        changed.targets[0] ^= 1;
        assert_ne!(changed.fingerprint(), set.fingerprint());
        seen.push((format!("{:016x}", set.fingerprint()), fingerprint));
    }
    assert!(seen.iter().all(|(found, expected)| found == expected), "{seen:?}");
}

#[test]
fn impossible_settings_are_refused() {
    let none = |result: Result<PuzzleSet, _>, parts: &[&str]| {
        let error = result.err().map(|error: kiln::data::DataError| error.to_string()).unwrap();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    let make = |size, clues, guesses| Sudokus { size, clues, guesses }.generate(0, Split::Train, 2);
    none(make(Size::Nine, Some(12), 0), &["9x9, 12 clues", "more clues"]);
    none(make(Size::Nine, Some(82), 0), &["clues = 82", "81"]);
    none(make(Size::Four, None, 1), &["4x4, 1 guesses", "fewer guesses"]);
    none(Mazes { side: 30, steps: 500 }.generate(0, Split::Train, 2), &["steps = 500", "shorter"]);
    for side in [0, 4, 129, usize::MAX] {
        none(Mazes { side, steps: 1 }.generate(0, Split::Train, 2), &["side", "5 to 128"]);
    }
}

#[test]
fn puzzles_are_shown_as_text() {
    let set =
        PuzzleSet { task: Task::Sudoku(Size::Four), inputs: vec![1, 2, 3, 4, 5, 0, 6, 1, 1, 1, 1, 1, 1, 1, 1, 1], targets: vec![2; 16] };
    assert_eq!(set.task.show(set.item(0).0), ". 1  2 3\n4 _  ? .\n. .  . .\n. .  . .\n");
    assert_eq!(Task::Maze(4).show(&[1, 2, 3, 4, 5, 0, 9, 1, 1, 1, 1, 1, 1, 1, 1, 1]), "#.SG\no_?#\n####\n####\n");
    assert_eq!([Task::Sudoku(Size::Nine), Task::Sudoku(Size::Four), Task::Maze(30)].map(Task::vocabulary), [11, 6, 6]);
    assert_eq!([Task::Sudoku(Size::Nine), Task::Sudoku(Size::Four), Task::Maze(30)].map(Task::cells), [81, 16, 900]);
}

#[test]
fn hard_puzzles_are_made_fast() {
    let begun = Instant::now();
    let sets = Split::ALL.map(|split| hard(0, split, 200));
    assert_eq!(sets[0].shared(&sets[1]), 0);
    // Two seconds of one core; the rest is for machines that are slow and busy.
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}
