//! `kiln report`: the page of some runs as one file.

use super::{Recipes, outputs, runs};
use crate::run::{write_own, write_whole};
use crate::watch::{Found, MOST_RUNS, report};
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
    if all.len() > MOST_RUNS {
        bail!("{} runs: a page has room for {MOST_RUNS}; name fewer, or folders with fewer", all.len());
    }
    let out = match (&a.out, &all[..]) {
        (Some(out), _) => out.clone(),
        (None, [one]) => beside(one)?,
        (None, _) => bail!("{} runs: name the file to write with --out FILE.html", all.len()),
    };
    outputs::page("--out", Some(&out))?;
    let title = match &all[..] {
        [one] => format!("Run {}", one.name),
        _ => format!("{} runs", all.len()),
    };
    let page = report(&all, &title, recipes);
    match (a.out, &all[..]) {
        // In somebody else's folder, perhaps, where a link may have come since.
        (None, [one]) => write_own(&one.path, REPORT, page)?,
        _ => write_whole(&out, &page)?,
    }
    out!("{}", out.display());
    Ok(ExitCode::SUCCESS)
}

const REPORT: &str = "report.html";

/// The page in a run's folder. A link of that name is not kiln's, and may lead to any file.
fn beside(run: &Found) -> Result<PathBuf> {
    let out = run.path.join(REPORT);
    if out.is_symlink() {
        bail!("{} is a link: remove it, or name the file to write with --out FILE.html", out.display());
    }
    Ok(out)
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
