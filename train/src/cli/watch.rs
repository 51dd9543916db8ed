//! `kiln watch`: the page of a folder of runs, for whoever has its token.

use super::{Recipes, runs};
use crate::report::shown;
use crate::watch::{serve, token};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln watch
  kiln watch experiments --port 8080
  kiln watch --host 0.0.0.0                   for other machines, too

Open the address that it prints: the token in it is new each time, and lets a browser in. The page reads runs and changes nothing.
Of a run on another machine, forward the port (ssh -L 6160:127.0.0.1:6160 HOST) and open the same address here: ssh encrypts what --host does not.
Ctrl-C ends it; runs go on.")]
pub struct WatchArgs {
    /// A folder of runs, or a run
    #[arg(default_value = "runs")]
    runs: PathBuf,
    /// The port; 0 takes a free one
    #[arg(long, default_value_t = 6160)]
    port: u16,
    /// An address or a name of this machine, as browsers will name it; 0.0.0.0 serves on all its addresses
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// Lets in every user of this machine, without a token; not with a --host that other machines reach
    #[arg(long)]
    no_token: bool,
}

pub fn run(a: WatchArgs, recipes: Recipes) -> Result<ExitCode> {
    let now = runs::found(&a.runs)?.len();
    let found = (a.host.as_str(), a.port).to_socket_addrs();
    let addresses: Vec<SocketAddr> = found
        .with_context(|| {
            format!("--host {}: no address of that name (127.0.0.1 is for this machine alone, 0.0.0.0 for others, too)", a.host)
        })?
        .collect();
    let alone = addresses.iter().all(|at| at.ip().is_loopback());
    if a.no_token && !alone {
        bail!("--no-token with --host {}: everybody who reaches this machine could read the runs; leave --no-token out", a.host);
    }
    // Many systems have their own name lead to themselves alone.
    if let Some(at) = addresses.first().filter(|_| alone && a.host != "localhost" && a.host.parse::<IpAddr>().is_err()) {
        crate::warn!("{} is {} on this machine: others do not reach it there (--host 0.0.0.0 serves them)", a.host, at.ip());
    }
    let token = if a.no_token { None } else { Some(token()?) };
    let ready = |address: &str| {
        let runs = if now == 1 { "1 run".to_string() } else { format!("{now} runs") };
        let mut out = std::io::stdout();
        let line = format!("{address} shows {runs} in {} (Ctrl-C ends it)\n", a.runs.display());
        out.write_all(shown(&line).as_bytes())?;
        if !alone {
            crate::warn!("what is sent is not encrypted: whoever can listen on the network sees the token, too (ssh -L encrypts)");
        }
        out.flush()
    };
    match serve(&a.runs, (&a.host, &addresses), token, recipes, ready) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Err(e.into()),
        Err(e) => bail!("cannot serve on {}:{}: {e} (--port names another port, 0 takes a free one)", a.host, a.port),
        Ok(()) => Ok(ExitCode::SUCCESS),
    }
}
