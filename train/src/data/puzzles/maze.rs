//! Mazes: a tree of corridors in which some more walls were opened, and two cells that one shortest path joins.

use std::collections::VecDeque;

use super::{DataError, Draws, Pair, PuzzleSet, Split, Task, split_of};

/// What the tokens mean: padding, wall, free, start, goal; and in a solution, what lies between those two.
pub const GLYPHS: &[u8] = b"_#.SGo";
const WALL: u8 = 1;
pub const FREE: u8 = 2;
const START: u8 = 3;
const GOAL: u8 = 4;
pub const PATH: u8 = 5;

/// The tree grows on from its newest room, which makes long corridors; one time in so many from any, which makes branches.
const BRANCH: usize = 8;
/// One cell in so many is a wall that is opened afterwards. One in 30 would leave hardly a path of 110 steps in 30x30.
const OPENED: usize = 60;
/// Starts that are tried before another maze is drawn; and mazes, before what was asked for counts as impossible.
const STARTS: usize = 16;
const MAZES: usize = 1000;

/// What to generate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mazes {
    /// Cells a side.
    pub side: usize,
    /// The least from start to goal.
    pub steps: u32,
}

impl Default for Mazes {
    fn default() -> Self {
        Mazes { side: 30, steps: 110 }
    }
}

impl Mazes {
    /// Mazes `0..count` of a split.
    pub fn generate(&self, seed: u64, split: Split, count: usize) -> Result<PuzzleSet, DataError> {
        if !(5..=128).contains(&self.side) {
            return Err(DataError::Setting { what: "side", value: self.side.to_string(), need: "a maze has 5 to 128 cells a side".into() });
        }
        PuzzleSet::generate(Task::Maze(self.side), seed, split, count, |draws| self.maze(draws, split))
    }

    fn maze(&self, mut draws: Draws, split: Split) -> Result<Pair, DataError> {
        for _ in 0..MAZES {
            let maze = corridors(self.side, &mut draws);
            if self::split(self.side, &maze) != split {
                continue;
            }
            let mut starts: Vec<usize> = (0..maze.len()).filter(|&cell| maze[cell] == FREE).collect();
            draws.shuffle(&mut starts);
            for &start in starts.iter().take(STARTS) {
                let routes = Routes::new(self.side, &maze, start);
                let fits = |&cell: &usize| routes.ways[cell] == 1 && routes.steps[cell] >= self.steps.max(1);
                let goals: Vec<usize> = (0..maze.len()).filter(fits).collect();
                if !goals.is_empty() {
                    let goal = goals[draws.below(goals.len())];
                    return Ok(routes.pair(maze, start, goal));
                }
            }
        }
        let need = format!("none of {MAZES} mazes of {0}x{0} had so long a path (ask for a shorter one)", self.side);
        Err(DataError::Setting { what: "steps", value: self.steps.to_string(), need })
    }
}

/// Above, left, right, below.
fn neighbours(side: usize, cell: usize) -> impl Iterator<Item = usize> {
    let (row, column) = (cell / side, cell % side);
    let above = (row > 0).then(|| cell - side);
    let left = (column > 0).then(|| cell - 1);
    let right = (column + 1 < side).then_some(cell + 1);
    let below = (row + 1 < side).then_some(cell + side);
    [above, left, right, below].into_iter().flatten()
}

/// Rooms are the cells of even row and column. A random tree joins them through the cells between them; then some more are opened.
fn corridors(side: usize, draws: &mut Draws) -> Vec<u8> {
    let rooms = side.div_ceil(2);
    let cell = |room: usize| 2 * (room / rooms * side + room % rooms);
    let door = |room: usize, next: usize| (cell(room) + cell(next)) / 2;

    let mut maze = vec![WALL; side * side];
    let mut growing = vec![draws.below(rooms * rooms)];
    maze[cell(growing[0])] = FREE;
    while !growing.is_empty() {
        let at = if draws.below(BRANCH) == 0 { draws.below(growing.len()) } else { growing.len() - 1 };
        let room = growing[at];
        let next: Vec<usize> = neighbours(rooms, room).filter(|&next| maze[cell(next)] == WALL).collect();
        if next.is_empty() {
            growing.remove(at);
            continue;
        }
        let next = next[draws.below(next.len())];
        maze[door(room, next)] = FREE;
        maze[cell(next)] = FREE;
        growing.push(next);
    }

    let pairs = (0..rooms * rooms).flat_map(|room| neighbours(rooms, room).map(move |next| (room, next)));
    let mut walls: Vec<usize> = pairs.filter(|(room, next)| room < next).map(|(room, next)| door(room, next)).collect();
    walls.retain(|&wall| maze[wall] == WALL);
    draws.shuffle(&mut walls);
    for &wall in walls.iter().take(side * side / OPENED) {
        maze[wall] = FREE;
    }
    maze
}

/// All shortest paths from one cell.
struct Routes {
    side: usize,
    /// To each cell; u32::MAX where none leads.
    steps: Vec<u32>,
    /// How many shortest paths lead there: 0, 1, or 2 for more.
    ways: Vec<u8>,
}

impl Routes {
    fn new(side: usize, maze: &[u8], start: usize) -> Routes {
        let mut routes = Routes { side, steps: vec![u32::MAX; maze.len()], ways: vec![0; maze.len()] };
        (routes.steps[start], routes.ways[start]) = (0, 1);
        let mut queue = VecDeque::from([start]);
        while let Some(cell) = queue.pop_front() {
            for next in neighbours(side, cell).filter(|&next| maze[next] != WALL) {
                if routes.steps[next] == u32::MAX {
                    routes.steps[next] = routes.steps[cell] + 1;
                    queue.push_back(next);
                }
                if routes.steps[next] == routes.steps[cell] + 1 {
                    routes.ways[next] = (routes.ways[next] + routes.ways[cell]).min(2);
                }
            }
        }
        routes
    }

    /// Puzzle and solution.
    fn pair(&self, maze: Vec<u8>, start: usize, goal: usize) -> Pair {
        let mut input = maze;
        (input[start], input[goal]) = (START, GOAL);
        let mut target = input.clone();
        let mut cell = goal;
        while let Some(back) = neighbours(self.side, cell).find(|&back| self.steps[back] < self.steps[cell] && back != start) {
            target[back] = PATH;
            cell = back;
        }
        (input, target)
    }
}

/// Where one shortest path and no other leads from one start to one goal.
pub fn solution(side: usize, input: &[u8]) -> Option<Vec<u8>> {
    let only = |token: u8| {
        let mut cells = (0..input.len()).filter(|&cell| input[cell] == token);
        cells.next().filter(|_| cells.next().is_none())
    };
    let (start, goal) = (only(START)?, only(GOAL)?);
    let routes = Routes::new(side, input, start);
    (routes.ways[goal] == 1).then(|| routes.pair(input.to_vec(), start, goal).1)
}

/// Of a solution.
pub fn steps(target: &[u8]) -> u32 {
    1 + target.iter().filter(|&&token| token == PATH).count() as u32
}

/// The walls in the rotated or mirrored form that sorts first.
pub fn class(side: usize, input: &[u8]) -> Vec<u8> {
    let walls: Vec<u8> = input.iter().map(|&token| u8::from(token != WALL)).collect();
    (0..8).map(|way| turned(side, way, &walls)).min().unwrap_or_default()
}

pub fn split(side: usize, input: &[u8]) -> Split {
    split_of(&class(side, input), 2)
}

/// The eight symmetries of the square.
fn turned(side: usize, way: usize, tokens: &[u8]) -> Vec<u8> {
    let from = |cell: usize| {
        let (row, column) = (cell / side, cell % side);
        let (row, column) = if way & 1 == 0 { (row, column) } else { (column, row) };
        let row = if way & 2 == 0 { row } else { side - 1 - row };
        row * side + if way & 4 == 0 { column } else { side - 1 - column }
    };
    (0..tokens.len()).map(|cell| tokens[from(cell)]).collect()
}

pub fn augmented(side: usize, input: &[u8], target: &[u8], mut draws: Draws) -> Pair {
    let way = draws.below(8);
    (turned(side, way, input), turned(side, way, target))
}
