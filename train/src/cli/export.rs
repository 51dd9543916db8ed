//! `kiln export`: a checkpoint for other programs.

use super::{Opened, Recipes};
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln export runs/p --out adapters/p             adapters that PEFT loads
  kiln export runs/p --out models/p --merge       a model that transformers loads")]
pub struct ExportArgs {
    /// A checkpoint's folder, or a run's (its newest checkpoint)
    checkpoint: PathBuf,
    /// The folder to write, which must not be there yet
    #[arg(long)]
    out: PathBuf,
    /// Adds the adapters to their base and writes the whole model
    #[arg(long)]
    merge: bool,
}

pub fn run(a: ExportArgs, recipes: Recipes) -> Result<ExitCode> {
    let opened = Opened::new(&a.checkpoint, recipes)?;
    let Opened { found, config, .. } = &opened;
    opened.offered("export models", |r| r.exports())?.export(config, found, &a.out, a.merge)?;
    let what = if a.merge { "model, adapters merged" } else { "adapters" };
    out!("{what}, of {} (step {}): {}", found.path.display(), found.step, a.out.display());
    Ok(ExitCode::SUCCESS)
}
