//! `kiln man`: a man page for every command.

use super::{Recipes, command};
use crate::files;
use anyhow::{Context, Result};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln man --out ~/.local/share/man/man1        then: man kiln-train")]
pub struct ManArgs {
    /// The folder to write to: kiln.1, kiln-train.1 and so on
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

pub fn run(a: ManArgs, recipes: Recipes) -> Result<ExitCode> {
    files::create_folder(&a.out).with_context(|| format!("cannot create {}", a.out.display()))?;
    let mut whole = command(recipes).disable_help_subcommand(true).bin_name(crate::program());
    whole.build();
    let pages = write(&whole, &a.out, &crate::program())?;
    out!("{pages} pages in {}", a.out.display());
    Ok(ExitCode::SUCCESS)
}

/// The page of a command and those of its own commands; how many.
fn write(command: &clap::Command, out: &Path, name: &str) -> Result<usize> {
    let path = out.join(format!("{name}.1"));
    let mut page = vec![];
    clap_mangen::Man::new(command.clone().display_name(name)).render(&mut page)?;
    files::write(&path, &page).with_context(|| format!("cannot write {}", path.display()))?;
    let own = command.get_subcommands().filter(|c| !c.is_hide_set());
    own.map(|c| write(c, out, &format!("{name}-{}", c.get_name()))).sum::<Result<usize>>().map(|below| below + 1)
}
