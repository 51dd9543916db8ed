//! `kiln runs`: the runs in a folder, a line each.

use super::{Recipes, write_json};
use crate::report::{shown_in_line, table};
use crate::watch::{Figures, Found, Summary, find, now, summary};
use anyhow::{Result, bail};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln runs
  kiln runs experiments --json

running: a process trains in the run's folder. stopped: by a signal, saved; --resume goes on. finished: it has all its steps, or stopped early
(train.patience). failed: by an error, or killed. The best validation is by train.best_metric, or the recipe's first metric with a direction.")]
pub struct RunsArgs {
    /// A folder of runs, or a run
    #[arg(default_value = "runs")]
    folder: PathBuf,
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

/// The runs in a folder; none is an error that says what a run is.
pub fn found(folder: &Path) -> Result<Vec<Found>> {
    match find(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            bail!("there is no folder {}: name one that holds runs, or begin one with {} train --out", folder.display(), crate::program())
        }
        Err(e) => bail!("cannot read {}: {e}", folder.display()),
        Ok(runs) => Ok(runs),
    }
}

pub fn run(a: RunsArgs, recipes: Recipes) -> Result<ExitCode> {
    let all: Vec<Summary> = found(&a.folder)?.iter().map(|f| summary(f, &mut Figures::default(), recipes)).collect();
    if a.json {
        write_json(None, &serde_json::to_value(&all)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if all.is_empty() {
        out!("no runs in {} (a run's folder has config.toml and metrics.jsonl; {} train makes one)", a.folder.display(), crate::program());
        return Ok(ExitCode::SUCCESS);
    }
    let now = now();
    let best = |s: &Summary| s.best.as_ref().map_or("-".into(), |b| format!("{} {} at step {}", b.metric, b.shown, b.step));
    let row = |s: &Summary| {
        let what = format!("{} {}", s.recipe, s.preset);
        vec![s.name.clone(), s.status.name().into(), what.trim().into(), s.progress(), best(s), s.speed(), s.age(now)]
    };
    let rows: Vec<Vec<String>> = all.iter().map(row).collect();
    out_part!("{}", table(&["run", "status", "recipe", "step", "best validation", "speed", "last record"], &rows));
    for s in &all {
        if let Some(problem) = &s.problem {
            out!("{}: {problem}", shown_in_line(&s.name));
        }
    }
    Ok(ExitCode::SUCCESS)
}
