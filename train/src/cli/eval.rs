use super::{DeviceArgs, write_json};
use ::train::config::Config;
use ::train::{recipe, run};
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln eval runs/hydra-tiny
  kiln eval runs/a/checkpoints/step-00000400 --batches 64 --json")]
pub struct EvalArgs {
    /// A checkpoint's folder, or a run's (its newest checkpoint)
    checkpoint: PathBuf,
    #[command(flatten)]
    device: DeviceArgs,
    /// Another data set of the same tokenizer
    #[arg(long)]
    data: Option<PathBuf>,
    /// Batches of validation data
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 53))]
    batches: Option<u64>,
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

pub fn run(a: EvalArgs) -> Result<ExitCode> {
    let device = a.device.open()?;
    let found = run::find_checkpoint(&a.checkpoint)?;
    let mut config = Config::from_json(&found.meta["config"])?;
    if let Some(path) = &a.data {
        config.set_value("data.path", path.display().to_string().into())?;
    }
    if let Some(n) = a.batches {
        config.set_value("train.eval_batches", (n as i64).into())?;
    }
    let mut task = recipe::find(config.text("recipe"))?.task(&config)?;
    run::same_tokenizer(&found, &*task)?;
    let mut s = run::load(&*task, &config, &device)?;
    s.load_params(&found.file("model.safetensors")?, &found.path.display().to_string())?;
    let values = task.evaluate(&mut s)?;
    if a.json {
        let mut object = serde_json::json!({ "checkpoint": found.path, "step": found.step });
        values.iter().for_each(|(n, v)| object[*n] = (*v).into());
        if let Some((_, floor)) = task.floor() {
            object["floor"] = floor.into();
        }
        write_json(None, &object)?;
    } else {
        out!("{} (step {}): {}", found.path.display(), found.step, run::evaluation_line(&values, task.floor()));
    }
    Ok(ExitCode::SUCCESS)
}
