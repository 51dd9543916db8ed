//! `kiln report`: the page of some runs as one file.

use super::{Recipes, outputs, runs};
use crate::run::write_whole;
use crate::watch::{Found, report};
use anyhow::{Result, bail};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln report runs/a
  kiln report runs/a runs/b --out compared.html
  kiln report runs --out all.html

The file holds everything: curves, settings, receipts, samples and pictures. It opens from disk and fetches nothing.")]
pub struct ReportArgs {
    /// Runs, or folders of runs
    #[arg(required = true)]
    runs: Vec<PathBuf>,
    /// The file to write; of one run, report.html in its folder if not given
    #[arg(long, value_name = "FILE.html")]
    out: Option<PathBuf>,
}

pub fn run(a: ReportArgs, recipes: Recipes) -> Result<ExitCode> {
    let mut all: Vec<Found> = vec![];
    for path in &a.runs {
        let own = runs::found(path)?;
        if own.is_empty() {
            bail!("{} holds no run: a run's folder has config.toml and metrics.jsonl", path.display());
        }
        all.extend(own);
    }
    unlike(&mut all);
    let out = match (a.out, &all[..]) {
        (Some(out), _) => out,
        (None, [one]) => one.path.join("report.html"),
        (None, _) => bail!("{} runs: name the file to write with --out FILE.html", all.len()),
    };
    outputs::page("--out", Some(&out))?;
    let title = match &all[..] {
        [one] => format!("Run {}", one.name),
        _ => format!("{} runs", all.len()),
    };
    write_whole(&out, &report(&all, &title, recipes)?)?;
    out!("{}", out.display());
    Ok(ExitCode::SUCCESS)
}

/// The same run named twice is one; runs of the same name from different folders are told apart by their paths.
fn unlike(all: &mut Vec<Found>) {
    let mut seen = vec![];
    all.retain(|found| {
        let real = found.path.canonicalize().unwrap_or_else(|_| found.path.clone());
        let new = !seen.contains(&real);
        seen.push(real);
        new
    });
    let names: Vec<String> = all.iter().map(|found| found.name.clone()).collect();
    for found in all.iter_mut().filter(|found| names.iter().filter(|n| **n == found.name).count() > 1) {
        found.name = found.path.display().to_string();
    }
}
