//! `kiln export`: a checkpoint for other programs.

use super::{Opened, Recipes, Which};
use crate::files::Staged;
use crate::models::gguf::{Type, convert};
use crate::models::{Folder, ModelError};
use crate::recipe::{Exporting, Parts};
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln export runs/d --out models/d                       a model that transformers loads
  kiln export runs/d --best --out models/best             the same of the run's best checkpoint
  kiln export runs/p --out adapters/p                     adapters that PEFT loads
  kiln export runs/p --out models/p --merge               base and adapters as one model
  kiln export runs/d --out d.gguf --format gguf --type q8_0   one file for llama.cpp
  kiln export models/d --out d.gguf --format gguf         the same from a model's folder")]
pub struct ExportArgs {
    /// A checkpoint's folder, or a run's (its newest checkpoint); with --format gguf also a model's folder
    checkpoint: PathBuf,
    #[command(flatten)]
    which: Which,
    /// The folder to write, or with --format gguf the file, which must not be there yet
    #[arg(long)]
    out: PathBuf,
    /// Of a run with adapters: adds them to their base and writes the whole model, as --format gguf always does
    #[arg(long)]
    merge: bool,
    /// A folder in Hugging Face's layout (adapters in PEFT's), or a GGUF file for llama.cpp
    #[arg(long, value_enum, default_value_t = Format::Hf)]
    format: Format,
    /// GGUF: how matrices are kept: f32, f16, bf16, q8_0 or q4_0 (default: bf16)
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<Type>,
    /// Most bytes of a file of weights; beyond it there are several, with an index: 500MB (default: 5GiB)
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    shard_size: Option<usize>,
}

/// Most bytes of a file of weights, where none are named.
const SHARD: usize = 5 << 30;

/// For clap: a number of bytes, with a unit or without.
fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let units =
        [("", 1), ("B", 1), ("KB", 1000), ("MB", 1_000_000), ("GB", 1_000_000_000), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let unit = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(&text[digits.len()..]));
    let number = digits.trim().parse::<usize>().ok().filter(|n| *n > 0);
    number
        .zip(unit)
        .and_then(|(n, unit)| n.checked_mul(unit.1))
        .ok_or_else(|| "a whole number above 0 and a unit: B, KB, MB, GB, KiB, MiB or GiB".into())
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
    let opened = Opened::new(&a.checkpoint, &a.which, recipes)?;
    let Opened { found, .. } = &opened;
    export(&a, &opened, &a.out, if a.merge { Parts::Merged } else { Parts::Trained })?;
    let what = if a.out.join("adapter_config.json").exists() { "adapters" } else { "model" };
    let which = opened.which().map_or(String::new(), |which| format!(", weights {which}"));
    out!("{what}, of {} (step {}{which}): {}", found.path.display(), found.step, a.out.display());
    Ok(ExitCode::SUCCESS)
}

/// Writes the folder `to`.
fn export(a: &ExportArgs, opened: &Opened, to: &Path, parts: Parts) -> Result<()> {
    let name = a.out.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy());
    let how = Exporting { found: &opened.found, out: to, name: &name, parts, raw: opened.raw, shard: a.shard_size.unwrap_or(SHARD) };
    Ok(opened.offered("export models", |r| r.exports())?.export(&opened.config, &how)?)
}

fn gguf(a: &ExportArgs, recipes: Recipes) -> Result<ExitCode> {
    if a.out.exists() {
        bail!("{} is there already: name a file that is not", a.out.display());
    }
    if a.shard_size.is_some() {
        bail!("--shard-size is for folders: a GGUF file is one");
    }
    let kind = a.kind.unwrap_or(Type::Bf16);
    let notes = if a.checkpoint.join("config.json").exists() {
        a.which.only_of_runs(&a.checkpoint)?;
        if a.merge {
            bail!("--merge is for a run with adapters: {} is a model's folder", a.checkpoint.display());
        }
        convert(&Folder::open(&a.checkpoint)?, &a.out, kind)?
    } else {
        // A run is first a folder, beside the file and for as long as it takes.
        let opened = Opened::new(&a.checkpoint, &a.which, recipes)?;
        let mut name = a.out.clone().into_os_string();
        name.push(".folder");
        let staged = Staged::new(Path::new(&name)).map_err(ModelError::io("create", Path::new(&name)))?;
        let whole = staged.dir().join("model");
        export(a, &opened, &whole, if a.merge { Parts::Merged } else { Parts::Whole })?;
        opened.which().into_iter().for_each(|which| crate::warn!("weights {which}"));
        // The folder is gone by the time the message is read, so the message names what was exported.
        convert(&Folder::open(&whole)?, &a.out, kind).map_err(|e| match e {
            ModelError::Gguf { path, cause } if path == whole => ModelError::Gguf { path: a.checkpoint.clone(), cause },
            other => other,
        })?
    };
    notes.iter().for_each(|note| crate::warn!("note: {note}"));
    out!("{kind} of {}: {}", a.checkpoint.display(), a.out.display());
    Ok(ExitCode::SUCCESS)
}
