//! `kiln export`: a checkpoint for other programs.

use super::{Opened, Recipes};
use crate::files::Staged;
use crate::models::gguf::{Type, convert};
use crate::models::{Folder, ModelError};
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln export runs/d --out models/d                       a model that transformers loads
  kiln export runs/p --out adapters/p                     adapters that PEFT loads
  kiln export runs/p --out models/p --merge               base and adapters as one model
  kiln export runs/d --out d.gguf --format gguf --type q8_0   one file for llama.cpp
  kiln export models/d --out d.gguf --format gguf         the same from a model's folder")]
pub struct ExportArgs {
    /// A checkpoint's folder, or a run's (its newest checkpoint); for GGUF also a model's folder
    checkpoint: PathBuf,
    /// The folder or file to write, which must not be there yet
    #[arg(long)]
    out: PathBuf,
    /// Adds the adapters to their base and writes the whole model
    #[arg(long)]
    merge: bool,
    /// A folder in Hugging Face's layout, or a GGUF file
    #[arg(long, value_enum, default_value_t = Format::Hf)]
    format: Format,
    /// GGUF: how matrices are kept: f32, f16, bf16, q8_0 or q4_0 (default: bf16)
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<Type>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Hf,
    Gguf,
}

pub fn run(a: ExportArgs, recipes: Recipes) -> Result<ExitCode> {
    match a.format {
        Format::Gguf => return gguf(&a, recipes),
        Format::Hf if a.kind.is_some() => bail!("--type is for --format gguf"),
        Format::Hf => {}
    }
    let opened = Opened::new(&a.checkpoint, recipes)?;
    let Opened { found, config, .. } = &opened;
    opened.offered("export models", |r| r.exports())?.export(config, found, &a.out, a.merge)?;
    let what = if a.out.join("adapter_config.json").exists() { "adapters" } else { "model" };
    out!("{what}, of {} (step {}): {}", found.path.display(), found.step, a.out.display());
    Ok(ExitCode::SUCCESS)
}

fn gguf(a: &ExportArgs, recipes: Recipes) -> Result<ExitCode> {
    if a.out.exists() {
        bail!("{} is there already: name a file that is not", a.out.display());
    }
    let kind = a.kind.unwrap_or(Type::Bf16);
    let notes = if a.checkpoint.join("config.json").exists() {
        convert(&Folder::open(&a.checkpoint)?, &a.out, kind)?
    } else {
        // A run is first a folder, beside the file and for as long as it takes.
        let opened = Opened::new(&a.checkpoint, recipes)?;
        let mut name = a.out.clone().into_os_string();
        name.push(".folder");
        let staged = Staged::new(Path::new(&name)).map_err(ModelError::io("create", Path::new(&name)))?;
        let whole = staged.dir().join("model");
        opened.offered("export models", |r| r.exports())?.export(&opened.config, &opened.found, &whole, true)?;
        convert(&Folder::open(&whole)?, &a.out, kind)?
    };
    notes.iter().for_each(|note| crate::warn!("note: {note}"));
    out!("{kind} of {}: {}", a.checkpoint.display(), a.out.display());
    Ok(ExitCode::SUCCESS)
}
