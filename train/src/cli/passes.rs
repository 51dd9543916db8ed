//! `kiln passes`: every pass with its modes and settings.

use super::write_json;
use anyhow::Result;
use clap::Args;
use engine::passes::{Numerics, Switch, Target, all};
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln passes
  kiln train {recipe} --pass recompute=auto,what=memory-bound --pass flash-attention=require")]
pub struct PassesArgs {
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

pub fn run(a: PassesArgs) -> Result<ExitCode> {
    let numerics = |p: &dyn Switch| match p.numerics(Target::Cpu, engine::DType::F32) {
        Numerics::Exact => "bit for bit the same",
        Numerics::Reordered => "the same sums in another order",
        Numerics::LowPrecision => "rounded to a narrower type",
    };
    if a.json {
        let one = |p: &'static dyn Switch| {
            let settings: Vec<serde_json::Value> =
                p.settings().iter().map(|s| serde_json::json!({ "name": s.name, "default": s.default, "about": s.about })).collect();
            serde_json::json!({ "name": p.name(), "about": p.about(), "default": p.default_mode().name(), "numerics": numerics(p), "settings": settings })
        };
        write_json(None, &serde_json::Value::Array(all().map(one).collect()))?;
        return Ok(ExitCode::SUCCESS);
    }
    out!("Passes, in running order. Switch one with --pass NAME=off|auto|require[,setting=value].\n");
    for p in all() {
        out!("{} (default: {})\n    {}\n    f32 on the CPU: {}", p.name(), p.default_mode().name(), p.about(), numerics(p));
        for s in p.settings() {
            out!("    {}={}: {}", s.name, s.default, s.about);
        }
        out!();
    }
    Ok(ExitCode::SUCCESS)
}
