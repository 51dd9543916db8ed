//! `kiln completions`: scripts that complete commands and options.

use super::{Recipes, command};
use anyhow::Result;
use clap::Args;
use clap_complete::Shell;
use std::io::Write;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln completions bash  > ~/.local/share/bash-completion/completions/kiln
  kiln completions zsh   > ~/.zfunc/_kiln (with fpath+=~/.zfunc before compinit in .zshrc)
  kiln completions fish  > ~/.config/fish/completions/kiln.fish")]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

pub fn run(a: CompletionsArgs, recipes: Recipes) -> Result<ExitCode> {
    let mut script = vec![];
    clap_complete::generate(a.shell, &mut command(recipes), crate::program(), &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}
