//! `kiln watch`: the page of a folder of runs, on this machine.

use super::{Recipes, runs};
use crate::watch::serve;
use anyhow::{Result, bail};
use clap::Args;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln watch
  kiln watch experiments --port 8080

The page is only for this machine: it is served on 127.0.0.1, reads runs and changes nothing. For a run on another machine, forward the port
(ssh -L 6160:127.0.0.1:6160 HOST) and open the same address here. Ctrl-C ends it; runs go on.")]
pub struct WatchArgs {
    /// A folder of runs, or a run
    #[arg(default_value = "runs")]
    runs: PathBuf,
    /// The port; 0 takes a free one
    #[arg(long, default_value_t = 6160)]
    port: u16,
}

pub fn run(a: WatchArgs, recipes: Recipes) -> Result<ExitCode> {
    let now = runs::found(&a.runs)?.len();
    let ready = |address: &str| {
        let runs = if now == 1 { "1 run".to_string() } else { format!("{now} runs") };
        let mut out = std::io::stdout();
        writeln!(out, "{address} shows {runs} in {} (Ctrl-C ends it)", a.runs.display())?;
        out.flush()
    };
    match serve(&a.runs, a.port, recipes, ready) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Err(e.into()),
        Err(e) => bail!("cannot serve on 127.0.0.1:{}: {e} (--port names another port, 0 takes a free one)", a.port),
        Ok(()) => Ok(ExitCode::SUCCESS),
    }
}
