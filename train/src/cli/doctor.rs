//! `kiln doctor`: what this machine has.

use super::{Recipes, write_json};
use crate::report::human_bytes;
use crate::{gpu, launch};
use anyhow::Result;
use clap::Args;
use engine::Cuda;
use engine::cuda::{Found, find};
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln doctor
  kiln doctor --json")]
pub struct DoctorArgs {
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

pub fn run(a: DoctorArgs, _: Recipes) -> Result<ExitCode> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let memory = total_memory();
    let vectors = engine::cpu::vectors();
    if a.json {
        let folders = gpu::folders();
        let libraries: Vec<serde_json::Value> =
            find(&folders).iter().map(|f| serde_json::json!({ "name": f.name, "path": f.path, "problem": f.problem() })).collect();
        let (mpi, version) = launch::mpi();
        let mpi = serde_json::json!({ "path": mpi.path, "version": version, "problem": mpi.problem() });
        let (nccl, version) = launch::nccl();
        let problem = version.as_ref().err().map(|e| e.to_string());
        let nccl = serde_json::json!({ "path": nccl.path, "version": version.ok(), "problem": problem });
        let card = match Cuda::open(0, &folders) {
            Ok(c) => {
                serde_json::json!({ "name": c.name(), "sm": c.arch().sm, "multiprocessors": c.arch().multiprocessors, "memory": c.memory().0, "versions": c.versions() })
            }
            Err(e) => serde_json::json!({ "missing": e.to_string() }),
        };
        let value = serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"), "os": std::env::consts::OS, "arch": std::env::consts::ARCH,
            "cores": cores, "vectors": vectors, "memory": memory, "libraries": libraries, "gpu": card, "mpi": mpi, "nccl": nccl,
        });
        write_json(None, &value)?;
        return Ok(ExitCode::SUCCESS);
    }
    out!("kiln     {}", env!("CARGO_PKG_VERSION"));
    out!("system   {} {}", std::env::consts::OS, std::env::consts::ARCH);
    out!("cpu      {cores} cores, vectors: {vectors}");
    out!("memory   {}", memory.map_or("unknown".into(), human_bytes));
    let folders = gpu::folders();
    find(&folders).iter().try_for_each(|f| library(f, ""))?;
    let (mpi, version) = launch::mpi();
    // Without it, one rank trains as ever.
    library(&mpi, &version.map_or(", for several ranks on CPUs".into(), |v| format!(" ({v}, for several ranks on CPUs)")))?;
    let (nccl, version) = launch::nccl();
    let about = match (version, &nccl.path) {
        (Ok(version), _) => format!(" ({version}, for several ranks on GPUs)"),
        (Err(e), Some(_)) => format!(": {e}"),
        (Err(_), None) => ", for several ranks on GPUs".into(),
    };
    library(&nccl, &about)?;
    match Cuda::open(0, &folders) {
        Ok(cuda) => {
            let (all, free) = cuda.memory();
            out!(
                "gpu      {}, compute capability {}.{}, {} multiprocessors",
                cuda.name(),
                cuda.arch().sm / 10,
                cuda.arch().sm % 10,
                cuda.arch().multiprocessors
            );
            out!("memory   {} on the gpu, {} free", human_bytes(all as u64), human_bytes(free as u64));
            out!("versions {}", cuda.versions());
        }
        Err(e) => out!("gpu      none: {e}"),
    }
    out!("kernels  cached in {}", folders.cache.display());
    out!("device   auto means {}", gpu::open("auto", None).map_err(anyhow::Error::msg)?.describe());
    Ok(ExitCode::SUCCESS)
}

fn library(f: &Found, what: &str) -> Result<()> {
    match (&f.path, f.broken.first()) {
        (Some(path), _) => out!("{:<20} {}{what}", f.name, path.display()),
        (None, Some(broken)) => out!("{:<20} does not load{what}: {broken}; {}", f.name, f.help),
        (None, None) => out!("{:<20} not found{what}: {}", f.name, f.help),
    }
    Ok(())
}

fn total_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = text.lines().find(|l| l.starts_with("MemTotal"))?.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}
