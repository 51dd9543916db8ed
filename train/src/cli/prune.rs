//! `kiln prune`: a model's folder with 2:4 sparsity.

use super::Recipes;
use crate::models::prune;
use anyhow::{Result, bail};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
#[command(
    after_help = "Of every four weights along a sum the two of largest magnitude stay; embedding, head, norms and biases are left alone.
Training with --pass sparse-2:4=auto makes a model that loses less by it; kiln export writes that one pruned.

Examples:
  kiln export runs/d --out models/d
  kiln prune models/d --out models/d-sparse
  kiln prune models/d-sparse --check"
)]
pub struct PruneArgs {
    /// A model's folder in Hugging Face's layout
    folder: PathBuf,
    /// The folder to write, which must not be there yet
    #[arg(long, required_unless_present = "check")]
    out: Option<PathBuf>,
    /// Writes nothing; fails if a matrix of a layer is not 2:4 sparse
    #[arg(long, conflicts_with = "out")]
    check: bool,
}

pub fn run(a: PruneArgs, _: Recipes) -> Result<ExitCode> {
    if a.folder.is_dir() && !a.folder.join("config.json").exists() {
        bail!("{} has no config.json: it is not a model's folder (kiln export writes one of a run)", a.folder.display());
    }
    let found = prune(&a.folder, a.out.as_deref())?;
    let sum = |of: fn(&crate::models::Pruned) -> f64| found.values().map(of).sum::<f64>();
    let (groups, dense) = (sum(|p| p.groups as f64), sum(|p| p.dense as f64));
    if let Some(out) = &a.out {
        let kept = 100.0 * sum(|p| p.kept) / sum(|p| p.all).max(f64::MIN_POSITIVE);
        out!("{} matrices pruned, {kept:.1}% of their squared norm kept: {}", found.len(), out.display());
        return Ok(ExitCode::SUCCESS);
    }
    let worst = found.iter().max_by_key(|(_, p)| p.dense);
    match worst.filter(|(_, p)| p.dense > 0) {
        None => {
            out!("{} matrices, all 2:4 sparse ({groups} groups of four)", found.len());
            Ok(ExitCode::SUCCESS)
        }
        Some((name, p)) => bail!(
            "{dense} of {groups} groups of four have more than two weights that are not 0, most of them in '{name}' ({} of {}): kiln prune {} --out FOLDER prunes them",
            p.dense,
            p.groups,
            a.folder.display()
        ),
    }
}
