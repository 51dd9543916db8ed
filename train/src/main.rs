//! The command line.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    let ended = cli::run();
    kiln::gpu::remove_own_cache();
    match ended {
        Ok(code) => code,
        // Whoever read our output has seen enough.
        Err(e) if e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe) => ExitCode::SUCCESS,
        Err(e) => {
            kiln::warn!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}
