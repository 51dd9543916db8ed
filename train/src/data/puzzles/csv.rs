//! Sudokus from a file. A line is `puzzle,solution`, their cells row by row, 0 or . where the puzzle is blank; a header is optional.

use std::path::Path;

use rayon::prelude::*;

use super::sudoku::tokens;
use super::{DataError, Pair, PuzzleSet, Size, Task, solve};

/// All puzzles of a file, each of which fits its solution; and no other one, if `unique`.
pub fn read_csv(path: &Path, unique: bool) -> Result<PuzzleSet, DataError> {
    let bytes = std::fs::read(path).map_err(DataError::io("read", path))?;
    // Spreadsheets put a mark of UTF-8 before the first line.
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let lines = text.strip_suffix(b"\n").unwrap_or(text).split(|&byte| byte == b'\n');
    let mut lines: Vec<(u64, &[u8])> = (1..).zip(lines.map(|line| line.strip_suffix(b"\r").unwrap_or(line))).collect();
    if lines[0].1 == b"puzzle,solution" {
        lines.remove(0);
    }
    let error = |line, problem| DataError::Line { path: path.to_owned(), line, problem };
    let Some(&(number, first)) = lines.first() else {
        return Err(error(2, "no puzzle follows the header".into()));
    };
    let size = size(first).map_err(|problem| error(number, problem))?;
    let pairs: Vec<_> =
        lines.par_iter().map(|&(number, line)| pair(size, line, unique).map_err(|problem| error(number, problem))).collect();
    // In the order of lines: the first damage is reported.
    Ok(PuzzleSet::new(Task::Sudoku(size), pairs.into_iter().collect::<Result<_, _>>()?))
}

fn size(line: &[u8]) -> Result<Size, String> {
    let cells = line.iter().position(|&byte| byte == b',').unwrap_or(line.len());
    let known = Size::ALL.into_iter().find(|size| size.cells() == cells);
    known.ok_or_else(|| format!("the puzzle has {cells} cells; 4x4 has 16 and 9x9 has 81 (lines are `puzzle,solution`)"))
}

/// Both as tokens.
fn pair(size: Size, line: &[u8], unique: bool) -> Result<Pair, String> {
    let fields: Vec<&[u8]> = line.split(|&byte| byte == b',').collect();
    let &[puzzle, solution] = &fields[..] else {
        return Err(format!("{} fields instead of two (lines are `puzzle,solution`)", fields.len()));
    };
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
