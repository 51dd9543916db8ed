//! `kiln solve`: answers to puzzles, segment by segment.

use super::{DeviceArgs, Opened, Recipes, Which, write_json};
use crate::data::puzzles::Task;
use crate::input;
use crate::recipe::{Attempt, Session};
use crate::report::table;
use anyhow::{Context, Result, bail};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln solve runs/s
  kiln solve runs/s '1... ..2. .3.. ...4'
  kiln solve runs/sudoku hard.txt maze.txt --to-limit --json

The model halts where it is sure of the same answer after two segments in a row (`halt` above 0 is sure), or at its segment limit.

A puzzle is a text of its cells, row by row, or a file of that: a Sudoku's digits with . or 0 where it is blank; a maze's walls #, free cells .,
start S and goal G. White space counts for nothing. An x marks what is wrong, where the puzzle has one solution.")]
pub struct SolveArgs {
    /// A checkpoint's folder, or a run's (its newest checkpoint)
    checkpoint: PathBuf,
    #[command(flatten)]
    which: Which,
    /// Puzzles, or files of one each; the first of those that the model never learned from if none is given
    puzzles: Vec<String>,
    /// How many of those
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000), conflicts_with = "puzzles")]
    count: u32,
    /// Thinks up to the segment limit, even if the model would halt before it
    #[arg(long)]
    to_limit: bool,
    #[command(flatten)]
    device: DeviceArgs,
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

/// Puzzles that are solved at a time.
const BATCH: usize = 32;
/// Changes of a segment that are named one by one.
const NAMED: usize = 8;

pub fn run(a: SolveArgs, recipes: Recipes) -> Result<ExitCode> {
    let device = a.device.open()?;
    let opened = Opened::new(&a.checkpoint, &a.which, recipes)?;
    let Opened { found, config, .. } = &opened;
    let mut solver = opened.offered("solve puzzles", |r| r.solves())?.solver(config)?;
    let task = solver.task();
    let puzzles: Vec<u8> = match a.puzzles.is_empty() {
        true => solver.unseen(a.count as usize)?.inputs,
        false => a.puzzles.iter().map(|p| read(task, p)).collect::<Result<Vec<_>>>()?.concat(),
    };
    let mut s = Session::new(&device, &config.switches()?, config.seed());
    solver.begin(&mut s, (puzzles.len() / task.cells()).min(BATCH))?;
    s.load_params(&opened.weights()?, &found.path.display().to_string())?;
    let solved = solver.solve(&mut s, &puzzles, a.to_limit)?;
    if solved.iter().flatten().any(|attempt| !attempt.halt.is_finite()) {
        bail!("{}: the model's numbers are not finite (use an earlier checkpoint)", found.path.display());
    }

    let mut json = vec![];
    for (i, (puzzle, attempts)) in puzzles.chunks(task.cells()).zip(&solved).enumerate() {
        let solution = task.solution(puzzle);
        if a.json {
            json.push(described(task, puzzle, solution.as_deref(), attempts));
            continue;
        }
        if i > 0 {
            out!();
        }
        out_part!("puzzle {} ({}):\n{}", i + 1, task.name(), task.marked(puzzle, puzzle));
        let (last, before) = attempts.split_last().expect("at least one segment");
        let halted = !a.to_limit && last.halts(before.last());
        let (answer, halted) = (&last.answer, if halted { "where the model halts" } else { "the limit" });
        let verdict = match solution.as_ref().map(|right| wrong(answer, right)) {
            Some(0) => "right".into(),
            Some(1) => "1 cell is wrong".into(),
            Some(n) => format!("{n} cells are wrong"),
            None => "the puzzle has no solution, or more than one".into(),
        };
        let marked = task.marked(answer, solution.as_ref().unwrap_or(answer));
        let segments = if attempts.len() == 1 { "1 segment".into() } else { format!("{} segments", attempts.len()) };
        out_part!("answer after {segments}, {halted}: {verdict}\n{marked}");
        let before = std::iter::once(puzzle).chain(attempts.iter().map(|a| &a.answer[..]));
        let row = |(i, (a, before)): (usize, (&Attempt, &[u8]))| {
            let wrong = solution.as_ref().map_or("-".into(), |right| wrong(&a.answer, right).to_string());
            vec![(i + 1).to_string(), wrong, format!("{:+.2}", a.halt), changes(task, before, &a.answer)]
        };
        let rows: Vec<Vec<String>> = attempts.iter().zip(before).enumerate().map(row).collect();
        out_part!("{}", table(&["segment", "wrong", "halt", "what changed"], &rows));
    }
    if a.json {
        write_json(None, &serde_json::json!({ "checkpoint": found.path, "step": found.step, "puzzles": json }))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn read(task: Task, argument: &str) -> Result<Vec<u8>> {
    let text = match Path::new(argument).is_file() {
        true => input::read_to_string(Path::new(argument)).with_context(|| format!("cannot read {argument}"))?,
        false => argument.into(),
    };
    task.parse(&text).map_err(|problem| anyhow::anyhow!("puzzle '{argument}': {problem}"))
}

fn wrong(answer: &[u8], solution: &[u8]) -> usize {
    answer.iter().zip(solution).filter(|(a, b)| a != b).count()
}

/// `r1c3 . > 4, r2c2 1 > 3`, or how many where they are too many to name.
fn changes(task: Task, before: &[u8], after: &[u8]) -> String {
    let changed: Vec<usize> = (0..after.len()).filter(|&cell| before[cell] != after[cell]).collect();
    let name = |&cell: &usize| {
        let (row, column) = (cell / task.side() + 1, cell % task.side() + 1);
        format!("r{row}c{column} {} > {}", task.glyph(before[cell]), task.glyph(after[cell]))
    };
    match changed.len() {
        0 => "nothing".into(),
        n if n > NAMED => format!("{n} cells"),
        _ => changed.iter().map(name).collect::<Vec<_>>().join(", "),
    }
}

fn described(task: Task, puzzle: &[u8], solution: Option<&[u8]>, attempts: &[Attempt]) -> serde_json::Value {
    let line = |tokens: &[u8]| tokens.iter().map(|&token| task.glyph(token)).collect::<String>();
    let one = |a: &Attempt| serde_json::json!({ "answer": line(&a.answer), "halt": a.halt, "wrong": solution.map(|right| wrong(&a.answer, right)) });
    serde_json::json!({ "puzzle": line(puzzle), "solution": solution.map(line), "segments": attempts.iter().map(one).collect::<Vec<_>>() })
}
