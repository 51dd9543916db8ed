//! Mazes against a breadth-first search written anew here.

use std::collections::{HashMap, HashSet, VecDeque};

use kiln::data::Split;
use kiln::data::puzzles::{Mazes, Task};

/// Steps to all cells that are no walls, and how many shortest paths lead there.
fn routes(side: usize, maze: &[u8], start: usize) -> (HashMap<usize, u32>, HashMap<usize, u64>) {
    let around = |cell: usize| {
        let all = [(0, 1), (1, 0), (0, -1), (-1, 0)].map(|(down, right)| ((cell / side) as i64 + down, (cell % side) as i64 + right));
        let inside = all.into_iter().filter(|&(row, column)| (0..side as i64).contains(&row) && (0..side as i64).contains(&column));
        inside.map(|(row, column)| row as usize * side + column as usize).filter(|&next| maze[next] != 1).collect::<Vec<_>>()
    };
    let (mut steps, mut order, mut queue) = (HashMap::from([(start, 0)]), vec![], VecDeque::from([start]));
    while let Some(cell) = queue.pop_front() {
        order.push(cell);
        for next in around(cell) {
            if !steps.contains_key(&next) {
                steps.insert(next, steps[&cell] + 1);
                queue.push_back(next);
            }
        }
    }
    let mut ways = HashMap::from([(start, 1)]);
    for &cell in &order[1..] {
        let before = around(cell).into_iter().filter(|next| steps[next] + 1 == steps[&cell]);
        ways.insert(cell, before.map(|next| ways[&next]).sum());
    }
    (steps, ways)
}

fn check_maze(side: usize, least: u32, puzzle: &[u8], solution: &[u8]) {
    let only = |tokens: &[u8], wanted: u8| {
        let found: Vec<usize> = (0..tokens.len()).filter(|&cell| tokens[cell] == wanted).collect();
        assert_eq!(found.len(), 1, "{}", Task::Maze(side).show(tokens));
        found[0]
    };
    let (start, goal) = (only(puzzle, 3), only(puzzle, 4));
    assert!(puzzle.iter().all(|token| (1..=4).contains(token)));
    let (steps, ways) = routes(side, puzzle, start);
    let free = puzzle.iter().filter(|&&token| token != 1).count();
    assert_eq!(steps.len(), free, "every free cell can be reached");
    assert_eq!(ways[&goal], 1, "one shortest path");
    assert!(steps[&goal] >= least);
    // The path's cells are those whose ways to both ends are as long as the path together.
    let back = routes(side, puzzle, goal).0;
    for cell in 0..puzzle.len() {
        let on = puzzle[cell] == 2 && steps[&cell] + back[&cell] == steps[&goal];
        assert_eq!(solution[cell], if on { 5 } else { puzzle[cell] }, "\n{}", Task::Maze(side).show(solution));
    }
}

/// The walls in all eight positions.
fn positions(side: usize, puzzle: &[u8]) -> HashSet<Vec<bool>> {
    let mut walls: Vec<bool> = puzzle.iter().map(|&token| token == 1).collect();
    let mut all = HashSet::new();
    for _ in 0..4 {
        walls = (0..side * side).map(|cell| walls[(side - 1 - cell % side) * side + cell / side]).collect();
        all.insert(walls.clone());
        all.insert(walls.chunks(side).flat_map(|row| row.iter().rev().copied()).collect());
    }
    all
}

#[test]
fn mazes_have_one_shortest_path_and_it_is_marked() {
    let sets = Split::ALL.map(|split| Mazes::default().generate(1, split, 60).unwrap());
    let mut trained = HashSet::new();
    for set in &sets {
        assert_eq!((set.task, set.len()), (Task::Maze(30), 60));
        for i in 0..set.len() {
            let (puzzle, solution) = set.item(i);
            check_maze(30, 110, puzzle, solution);
            let (start, goal) = [3, 4].map(|end| puzzle.iter().position(|&token| token == end).unwrap()).into();
            assert_eq!(set.grade(i), routes(30, puzzle, start).0[&goal]);
        }
    }
    for i in 0..60 {
        trained.extend(positions(30, sets[0].item(i).0));
    }
    assert!((0..60).all(|i| !trained.contains(&positions(30, sets[1].item(i).0).into_iter().next().unwrap())));
    assert_eq!((sets[0].shared(&sets[1]), sets[0].shared(&sets[0])), (0, 60));
    // Of 4x4 there are two classes, both for training.
    for (side, split) in [5, 6, 7, 12, 31].into_iter().flat_map(|side| Split::ALL.map(|split| (side, split))) {
        let set = Mazes { side, steps: 3 }.generate(1, split, 10).unwrap();
        (0..10).for_each(|i| check_maze(side, 3, set.item(i).0, set.item(i).1));
    }
}

#[test]
fn augmented_mazes_are_turned_and_mirrored() {
    let set = Mazes { side: 12, steps: 8 }.generate(2, Split::Train, 5).unwrap();
    for i in 0..set.len() {
        let positions = positions(12, set.item(i).0);
        let mut seen = HashSet::new();
        for epoch in 0..100 {
            let (puzzle, solution) = set.augmented(i, 9, epoch);
            check_maze(12, 8, &puzzle, &solution);
            seen.insert(puzzle.iter().map(|&token| token == 1).collect());
        }
        assert_eq!(seen, positions);
    }
}
