use super::write_json;
use ::train::report::human_bytes;
use anyhow::Result;
use clap::Args;
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

pub fn run(a: DoctorArgs) -> Result<ExitCode> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let memory = total_memory();
    let vectors = engine::cpu::vectors();
    if a.json {
        let value = serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"), "os": std::env::consts::OS, "arch": std::env::consts::ARCH,
            "cores": cores, "vectors": vectors, "memory": memory, "cuda": null,
        });
        write_json(None, &value)?;
        return Ok(ExitCode::SUCCESS);
    }
    out!("kiln     {}", env!("CARGO_PKG_VERSION"));
    out!("system   {} {}", std::env::consts::OS, std::env::consts::ARCH);
    out!("cpu      {cores} cores, vectors: {vectors}");
    out!("memory   {}", memory.map_or("unknown".into(), human_bytes));
    out!("cuda     not part of this build: everything runs on the cpu");
    out!("device   auto means cpu, {cores} threads");
    Ok(ExitCode::SUCCESS)
}

fn total_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = text.lines().find(|l| l.starts_with("MemTotal"))?.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}
