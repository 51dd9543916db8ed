//! CSV files of Sudokus: read as they were written, from other makers, and refused where they are damaged.

use crate::puzzles::*;
use std::fs;

use kiln::data::Split;
use kiln::data::puzzles::{PuzzleSet, Sudokus, read_csv};
use tempfile::tempdir;

fn line(set: &PuzzleSet, i: usize) -> String {
    let text = |tokens: &[u8]| digits(tokens).iter().map(u8::to_string).collect::<String>();
    format!("{},{}", text(set.item(i).0), text(set.item(i).1))
}

#[test]
fn files_are_read_as_they_were_written() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("puzzles.csv");
    for set in [Sudokus { guesses: 0, ..Sudokus::default() }.generate(6, Split::Train, 40).unwrap(), four(6, Split::Train, 40)] {
        let lines: Vec<String> = (0..set.len()).map(|i| line(&set, i)).collect();
        let dots = lines.iter().map(|line| line.replace('0', ".")).collect::<Vec<_>>();
        for text in [
            lines.join("\n"),
            format!("puzzle,solution\n{}\n", dots.join("\n")),
            format!("puzzle,solution\r\n{}\r\n", lines.join("\r\n")),
            format!("\u{feff}{}\n", lines.join("\n")),
            format!("\u{feff}puzzle,solution\r\n{}\r\n", lines.join("\r\n")),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(read_csv(&path, true).unwrap(), set);
        }
    }
}

/// The files that the world has: by the names of their columns, or by what is in them.
#[test]
fn files_of_other_makers_are_read() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("puzzles.csv");
    let set = hard(6, Split::Train, 5);
    let pairs: Vec<(String, String)> =
        (0..set.len()).map(|i| line(&set, i).split_once(',').map(|(p, s)| (p.into(), s.into())).unwrap()).collect();
    let lines = |write: &dyn Fn(&str, &str) -> String| pairs.iter().map(|(p, s)| write(p, s) + "\n").collect::<String>();
    let dots = |p: &str| p.replace('0', ".");
    for (maker, text) in [
        ("Kaggle", format!("quizzes,solutions\n{}", lines(&|p, s| format!("{p},{s}")))),
        ("Sudoku-Extreme", format!("source,question,answer,rating\n{}", lines(&|p, s| format!("puzzles0_kaggle,{},{s},17", dots(p))))),
        ("the same with a comma in a name", format!("source,question,answer,rating\n{}", lines(&|p, s| format!("\"a, b\",{p},{s},0")))),
        ("qqwing", format!("Puzzle,Solution,\n{}", lines(&|p, s| format!("{},{s},", dots(p))))),
        ("qqwing without its header", lines(&|p, s| format!("{},{s},", dots(p)))),
        ("numbered, without a header", lines(&|p, s| format!("12,{p},{s},3.5"))),
        ("solutions first", format!("Answer;x,ANSWER, Question \n{}", lines(&|p, s| format!("1,{s},{p}")))),
        ("names that are not known", format!("id,sudoku,filled\n{}", lines(&|p, s| format!("1,{p},{s}")))),
        ("quoted", format!("\"puzzle\",\"solution\"\r\n{}", lines(&|p, s| format!("\"{p}\",\"{s}\"\r")))),
    ] {
        fs::write(&path, text).unwrap();
        assert_eq!(read_csv(&path, true).unwrap_or_else(|e| panic!("{maker}: {e}")), set, "{maker}");
    }
}

#[test]
fn damaged_files_are_refused_by_line() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("puzzles.csv");
    let set = hard(6, Split::Train, 5);
    let good: Vec<String> = (0..set.len()).map(|i| line(&set, i)).collect();
    let (puzzle, solution) = good[3].split_once(',').unwrap();
    let clue = puzzle.find(|digit| digit != '0').unwrap();
    let put = |text: &str, at: usize, byte: &str| format!("{}{byte}{}", &text[..at], &text[at + 1..]);
    let other = |text: &str, at: usize| put(text, at, if &text[at..=at] == "9" { "1" } else { "9" });
    let swapped = put(&put(solution, 0, &solution[40..41]), 40, &solution[..1]);
    // What line 5 becomes, behind a header and three good lines; and what the message must hold.
    let cases: Vec<(String, &[&str])> = vec![
        (puzzle.into(), &["1 fields"]),
        (format!("{},7", good[3]), &["3 fields"]),
        (String::new(), &["1 fields"]),
        (format!("{},{solution}", &puzzle[1..]), &["puzzle has 80 cells", "81"]),
        (format!("{puzzle},{solution}1"), &["solution has 82 cells", "81"]),
        (format!("{puzzle},"), &["solution has 0 cells"]),
        (format!(" {},{solution}", &puzzle[1..]), &["puzzle has ' ' at row 1, column 1"]),
        (format!("{puzzle},{}", put(solution, 30, "x")), &["solution has 'x' at row 4, column 4"]),
        (format!("{puzzle},{}", put(solution, 80, ".")), &["solution is blank at row 9, column 9"]),
        (format!("{puzzle},{}", other(solution, 0)), &["twice in"]),
        (format!("{puzzle},{swapped}"), &["twice in"]),
        (format!("{},{solution}", other(puzzle, clue)), &["the puzzle has", "the solution"]),
        (format!("{},{solution}", put(puzzle, clue, "0")), &["other solutions"]),
        (format!("{},{}", "0".repeat(16), "1234341221434321"), &["puzzle has 16 cells", "81"]),
    ];
    for (bad, parts) in cases {
        let mut lines = good.clone();
        lines[3] = bad;
        fs::write(&path, format!("puzzle,solution\n{}\n", lines.join("\n"))).unwrap();
        let error = read_csv(&path, true).unwrap_err().to_string();
        assert!(error.contains("puzzles.csv, line 5: ") && parts.iter().all(|part| error.contains(part)), "{error}\n{parts:?}");
    }
    let whole: [(&[u8], &str); 9] = [
        (b"", "line 1: the puzzle has 0 cells"),
        (b"\n", "line 1: the puzzle has 0 cells"),
        (b"puzzle,solution\n", "line 2: no puzzle"),
        (b"quizzes,solutions\n", "line 2: no puzzle"),
        (b"sudokus,filled\n", "line 1: the puzzle has 7 cells"),
        (b"Puzzle,\n", "line 1: no column of solutions (solution, "),
        (b"id,answer\n", "line 1: no column of puzzles (puzzle, "),
        (b"\xff\xfe0000,0000", "line 1: the puzzle has 6 cells"),
        (b"123434122143432\xff,1234341221434321", "line 1: the puzzle has '\\xff' at row 4, column 4"),
    ];
    for (bytes, part) in whole {
        fs::write(&path, bytes).unwrap();
        let error = read_csv(&path, false).unwrap_err().to_string();
        assert!(error.contains(part), "{error}\n{part}");
    }
    assert!(read_csv(dir.path(), false).unwrap_err().to_string().contains("cannot read"));

    // Where it is not asked for, nobody looks for other solutions.
    fs::write(&path, format!("{},{solution}", put(puzzle, clue, "0"))).unwrap();
    assert_eq!(read_csv(&path, false).unwrap().len(), 1);
}
