//! `kiln man`: a man page for every command.

use super::{Recipes, command};
use crate::files;
use anyhow::{Context, Result};
use clap::Args;
use clap::builder::Resettable;
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

/// What stands below a command's help: examples line by line as they are typed, and paragraphs.
fn sections(text: &str) -> String {
    let escaped = |line: &str| match line.replace('\\', "\\e").replace('-', "\\-") {
        line if line.starts_with(['.', '\'']) => format!("\\&{line}\n"),
        line => format!("{line}\n"),
    };
    let (mut page, mut notes) = (String::new(), vec![]);
    for paragraph in text.split("\n\n").filter(|p| !p.trim().is_empty()) {
        match paragraph.strip_prefix("Examples:\n") {
            Some(examples) => {
                let lines: String = examples.lines().map(|line| escaped(line.trim_start())).collect();
                page += &format!(".SH EXAMPLES\n.nf\n{lines}.fi\n");
            }
            None => notes.push(paragraph.lines().map(|line| escaped(line.trim_start())).collect::<String>()),
        }
    }
    if notes.is_empty() { page } else { format!("{page}.SH NOTES\n{}", notes.join(".PP\n")) }
}

/// The page of a command and those of its own commands; how many.
fn write(command: &clap::Command, out: &Path, name: &str) -> Result<usize> {
    let path = out.join(format!("{name}.1"));
    let mut page = vec![];
    let after = command.get_after_help().map(|text| text.to_string()).unwrap_or_default();
    clap_mangen::Man::new(command.clone().display_name(name).after_help(Resettable::Reset)).render(&mut page)?;
    page.extend(sections(&after).bytes());
    files::write(&path, &page).with_context(|| format!("cannot write {}", path.display()))?;
    let own = command.get_subcommands().filter(|c| !c.is_hide_set());
    own.map(|c| write(c, out, &format!("{name}-{}", c.get_name()))).sum::<Result<usize>>().map(|below| below + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_stay_as_they_are_typed() {
        let page = sections("Examples:\n  kiln a --b c   # why\n  kiln 'x\\y'\n\nA sentence\nthat goes on.\n\n.hidden");
        assert_eq!(
            page,
            ".SH EXAMPLES\n.nf\nkiln a \\-\\-b c   # why\nkiln 'x\\ey'\n.fi\n.SH NOTES\nA sentence\nthat goes on.\n.PP\n\\&.hidden\n"
        );
        assert_eq!(sections(""), "");
    }
}
