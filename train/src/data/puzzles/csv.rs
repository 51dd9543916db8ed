//! Sudokus from a file of comma-separated values: a puzzle and its solution on each line, their cells row by row, 0 or . where the puzzle is blank.
//! Which columns those are, the first line says (`puzzle,solution`; `quizzes,solutions`; `source,question,answer,rating`), or they are the first two that
//! look like grids. A comma may follow the last one.

use std::io::Read;
use std::path::Path;

use rayon::prelude::*;

use super::sudoku::tokens;
use super::{DataError, Pair, PuzzleSet, Size, Task, solve};
use crate::input;

/// Bytes of a line with a puzzle of 4 x 4 cells and its solution, and more than any line with the largest has.
const SHORTEST: usize = 33;
const LONGEST: usize = 1 << 16;

/// Names that columns may have.
const PUZZLES: [&str; 6] = ["puzzle", "puzzles", "quiz", "quizzes", "question", "questions"];
const SOLUTIONS: [&str; 4] = ["solution", "solutions", "answer", "answers"];

/// All puzzles of a file, each of which fits its solution; and no other one, if `unique`.
pub fn read_csv(path: &Path, unique: bool) -> Result<PuzzleSet, DataError> {
    let bytes = input::read(path).map_err(DataError::io("read", path))?;
    let (lines, columns, size) = lines(path, &bytes)?;
    let read = |&(number, line): &(u64, &[u8])| pair(size, columns, line, unique).map_err(|problem| error(path, number, problem));
    let pairs: Vec<_> = lines.par_iter().map(read).collect();
    // In the order of lines: the first damage is reported.
    Ok(PuzzleSet::new(Task::Sudoku(size), pairs.into_iter().collect::<Result<_, _>>()?))
}

/// Cells a side of a file's puzzles, from its first lines.
pub fn csv_side(path: &Path) -> Result<usize, DataError> {
    let mut begin = vec![];
    let read = input::open(path).and_then(|file| file.take(1 << 16).read_to_end(&mut begin));
    read.map_err(DataError::io("read", path))?;
    // A header and a puzzle: what follows them may be cut.
    let two = begin.split_inclusive(|&byte| byte == b'\n').take(2).map(<[u8]>::len).sum();
    Ok(lines(path, &begin[..two])?.2.side())
}

fn error(path: &Path, line: u64, problem: String) -> DataError {
    DataError::Line { path: path.to_owned(), line, problem }
}

type Numbered<'a> = Vec<(u64, &'a [u8])>;

/// The lines that hold puzzles, with their numbers; where on a line they are; and their size, by the first one.
fn lines<'a>(path: &Path, bytes: &'a [u8]) -> Result<(Numbered<'a>, Columns, Size), DataError> {
    // Spreadsheets put a mark of UTF-8 before the first line.
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let lines = text.strip_suffix(b"\n").unwrap_or(text).split(|&byte| byte == b'\n');
    let numbered = (1..).zip(lines.map(|line| line.strip_suffix(b"\r").unwrap_or(line)));
    // The first line behind a header that no puzzle fits into ends the file: it is refused where it is read, and a file of empty lines stays small.
    let mut ended = false;
    let mut lines: Numbered = numbered.take_while(|(n, line)| !std::mem::replace(&mut ended, *n > 2 && line.len() < SHORTEST)).collect();
    if let Some((number, line)) = lines.iter().find(|(_, line)| line.len() > LONGEST) {
        return Err(error(path, *number, format!("it has {} bytes, and no puzzle has more than {LONGEST}", line.len())));
    }
    let (columns, header) = Columns::find(lines[0].1, lines.get(1).map(|line| line.1)).map_err(|problem| error(path, 1, problem))?;
    if header {
        lines.remove(0);
    }
    let Some(&(number, first)) = lines.first() else {
        return Err(error(path, 2, "no puzzle follows the header".into()));
    };
    let size = size(columns.puzzle(first)).map_err(|problem| error(path, number, problem))?;
    Ok((lines, columns, size))
}

/// Where on a line the two are, of how many.
#[derive(Clone, Copy)]
struct Columns {
    puzzle: usize,
    solution: usize,
    count: usize,
}

impl Columns {
    /// From a file's first lines; and whether the first is a header.
    fn find(first: &[u8], second: Option<&[u8]>) -> Result<(Columns, bool), String> {
        let heads: Vec<String> = fields(first).iter().map(|f| String::from_utf8_lossy(f).trim().to_ascii_lowercase()).collect();
        let named = |names: &[&str]| heads.iter().position(|head| names.contains(&head.as_str()));
        let count = |line: &[u8]| fields(line).len() - usize::from(fields(line).len() > 2 && line.ends_with(b","));
        match (named(&PUZZLES), named(&SOLUTIONS)) {
            (Some(puzzle), Some(solution)) => return Ok((Columns { puzzle, solution, count: count(first) }, true)),
            (Some(_), None) => return Err(format!("no column of solutions ({})", SOLUTIONS.join(", "))),
            (None, Some(_)) => return Err(format!("no column of puzzles ({})", PUZZLES.join(", "))),
            (None, None) => {}
        }
        let grids = |line: &[u8]| {
            let places: Vec<usize> = fields(line).iter().enumerate().filter(|(_, field)| is_grid(field)).map(|(i, _)| i).collect();
            let &[puzzle, solution, ..] = &places[..] else { return None };
            Some(Columns { puzzle, solution, count: count(line) })
        };
        // Names that are not known, above columns that are.
        let below = second.filter(|_| !fields(first).iter().any(|field| is_grid(field))).and_then(grids);
        Ok(match (grids(first), below) {
            (Some(columns), _) => (columns, false),
            (None, Some(columns)) => (columns, true),
            (None, None) => (Columns { puzzle: 0, solution: 1, count: 2 }, false),
        })
    }

    /// The puzzle of a line, or what stands in its place.
    fn puzzle<'a>(&self, line: &'a [u8]) -> &'a [u8] {
        fields(line).get(self.puzzle).copied().unwrap_or_default()
    }
}

/// What lies between commas; not between those inside quotes, which are taken off.
fn fields(line: &[u8]) -> Vec<&[u8]> {
    let mut quoted = false;
    let parts = line.split(|&byte| {
        quoted ^= byte == b'"';
        byte == b',' && !quoted
    });
    parts.map(|part| part.strip_prefix(b"\"").and_then(|part| part.strip_suffix(b"\"")).unwrap_or(part)).collect()
}

fn is_grid(field: &[u8]) -> bool {
    Size::ALL.iter().any(|size| size.cells() == field.len()) && field.iter().all(|byte| matches!(byte, b'.' | b'0'..=b'9'))
}

fn size(puzzle: &[u8]) -> Result<Size, String> {
    let known = Size::ALL.into_iter().find(|size| size.cells() == puzzle.len());
    known.ok_or_else(|| {
        let wanted = "a file of Sudokus is CSV, with `puzzle,solution` on each line: digits, row by row";
        format!("the puzzle has {} cells; 4x4 has 16 and 9x9 has 81 ({wanted})", puzzle.len())
    })
}

/// Both as tokens.
fn pair(size: Size, columns: Columns, line: &[u8], unique: bool) -> Result<Pair, String> {
    let mut fields = fields(line);
    if fields.len() == columns.count + 1 && line.ends_with(b",") {
        fields.pop();
    }
    if fields.len() != columns.count {
        return Err(format!("{} fields instead of {} (lines are `puzzle,solution`)", fields.len(), columns.count));
    }
    let (puzzle, solution) = (fields[columns.puzzle], fields[columns.solution]);
    let (puzzle, solution) = (digits(size, "puzzle", puzzle)?, digits(size, "solution", solution)?);
    check(size, &solution)?;
    if let Some(cell) = (0..size.cells()).find(|&cell| puzzle[cell] != 0 && puzzle[cell] != solution[cell]) {
        let place = place(size, cell);
        return Err(format!("the puzzle has {} at {place}, the solution {}", puzzle[cell], solution[cell]));
    }
    if unique && solve(size, &puzzle).solutions > 1 {
        return Err("the puzzle has other solutions too".into());
    }
    Ok((tokens(&puzzle), tokens(&solution)))
}

fn digits(size: Size, what: &str, field: &[u8]) -> Result<Vec<u8>, String> {
    if field.len() != size.cells() {
        return Err(format!("the {what} has {} cells instead of {}", field.len(), size.cells()));
    }
    let digit = |(cell, &byte): (usize, &u8)| match byte {
        b'.' => Ok(0),
        b'0'..=b'9' if usize::from(byte - b'0') <= size.side() => Ok(byte - b'0'),
        _ => Err(format!(
            "the {what} has '{}' at {} (digits go up to {}, 0 or . is a blank)",
            byte.escape_ascii(),
            place(size, cell),
            size.side()
        )),
    };
    field.iter().enumerate().map(digit).collect()
}

/// That every row, column and box has every digit.
fn check(size: Size, solution: &[u8]) -> Result<(), String> {
    let mut seen = vec![[false; 3]; size.side() * size.side()];
    for (cell, &digit) in solution.iter().enumerate() {
        if digit == 0 {
            return Err(format!("the solution is blank at {}", place(size, cell)));
        }
        for (kind, unit) in size.units(cell).into_iter().enumerate() {
            let seen = &mut seen[unit * size.side() + usize::from(digit) - 1][kind];
            if std::mem::replace(seen, true) {
                return Err(format!("the solution has {digit} twice in {} {}", ["row", "column", "box"][kind], unit + 1));
            }
        }
    }
    Ok(())
}

fn place(size: Size, cell: usize) -> String {
    format!("row {}, column {}", cell / size.side() + 1, cell % size.side() + 1)
}
