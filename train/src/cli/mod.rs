//! One file a subcommand.

/// Prints a line, or gives the error to the caller: a closed pipe ends the command quietly, a full disk does not.
macro_rules! out {
    ($($text:tt)*) => {{
        use std::io::Write;
        writeln!(std::io::stdout(), $($text)*)?
    }};
}

/// As `out!`, without the end of the line.
macro_rules! out_part {
    ($($text:tt)*) => {{
        use std::io::Write;
        write!(std::io::stdout(), $($text)*)?
    }};
}

mod bench;
mod check;
mod data;
mod doctor;
mod encoder;
mod eval;
mod export;
mod generate;
mod model;
mod passes;
mod plan;
mod predict;
mod signals;
mod solve;
mod train;

use ::train::config::{Config, named_in, read_file};
use ::train::recipe;
use anyhow::{Result, bail};
use clap::{Args, Parser, Subcommand};
use engine::Device;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    name = "kiln",
    version,
    about = "A training engine whose every optimisation is a switch with a receipt.",
    after_help = "Examples:
  kiln train                                  train hydra's tiny preset on generated text
  kiln train hydra --preset small --out runs/a --set batch=4
  kiln train --out runs/a --resume            go on where runs/a stopped
  kiln generate runs/a --prompt 'the '        let it write
  kiln train vision_bdh --out runs/v          an image classifier, on drawn pictures
  kiln predict runs/v picture.png             what it sees in a picture
  kiln train hrm --out runs/s                 a model that thinks about 4x4 Sudokus until it is sure
  kiln solve runs/s                           its answers, segment by segment
  kiln plan hydra --preset 100m               memory and arithmetic, without running
  kiln check golden reference/golden/hydra.safetensors"
)]
struct Kiln {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Trains a recipe (hydra if none is named)
    Train(train::TrainArgs),
    /// Validation losses of a checkpoint; of a classifier also the classes and a confusion matrix
    Eval(eval::EvalArgs),
    /// Continues a prompt with a checkpoint
    Generate(generate::GenerateArgs),
    /// Tells the class of pictures with a checkpoint
    Predict(predict::PredictArgs),
    /// Solves puzzles with a checkpoint, and shows how the answers came about
    Solve(solve::SolveArgs),
    /// Writes a checkpoint's adapters for PEFT, or merged into their base for transformers
    Export(export::ExportArgs),
    /// Memory, arithmetic and what every pass would do, without running
    Plan(plan::PlanArgs),
    /// Checks ops, passes, golden files, or a folder of a model or an encoder
    Check(check::CheckArgs),
    /// Lists the passes: what they do, their modes and settings
    Passes(passes::PassesArgs),
    /// What this machine has, and what kiln makes of it
    Doctor(doctor::DoctorArgs),
    /// Prepares and inspects data sets
    Data(data::DataArgs),
    /// Times the step of a preset, or every op
    Bench(bench::BenchArgs),
}

pub fn run() -> Result<ExitCode> {
    match Kiln::parse().command {
        Command::Train(a) => train::run(a),
        Command::Eval(a) => eval::run(a),
        Command::Generate(a) => generate::run(a),
        Command::Predict(a) => predict::run(a),
        Command::Solve(a) => solve::run(a),
        Command::Export(a) => export::run(a),
        Command::Plan(a) => plan::run(a),
        Command::Check(a) => check::run(a),
        Command::Passes(a) => passes::run(a),
        Command::Doctor(a) => doctor::run(a),
        Command::Data(a) => data::run(a),
        Command::Bench(a) => bench::run(a),
    }
}

/// Where to run.
#[derive(Args, Clone)]
pub struct DeviceArgs {
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Threads on the CPU; all cores if not given
    #[arg(long)]
    threads: Option<usize>,
}

impl DeviceArgs {
    pub fn open(&self) -> Result<Device> {
        if let Some(n) = self.threads.filter(|n| !(1..=1024).contains(n)) {
            bail!("--threads {n}: from 1 to 1024");
        }
        ::train::gpu::open(&self.device, self.threads).map_err(anyhow::Error::msg)
    }
}

/// What to train: a preset and what is laid over it.
#[derive(Args, Clone)]
pub struct ConfigArgs {
    /// The recipe; hydra if none is named
    recipe: Option<String>,
    /// One of the recipe's presets
    #[arg(long)]
    preset: Option<String>,
    /// A TOML file laid over the preset
    #[arg(long)]
    config: Option<PathBuf>,
    /// Sets one key; the section may be left out where it is clear (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// A folder made by `kiln data prepare`, or of pictures; a CSV file of Sudokus; JSONL of prompts and replies
    #[arg(long)]
    data: Option<PathBuf>,
    /// Steps to train in all
    #[arg(long, value_parser = clap::value_parser!(u64).range(..=1 << 53))]
    steps: Option<u64>,
    /// Decides initial values, data order and every draw
    #[arg(long)]
    seed: Option<u64>,
    /// Switches a pass; settings follow behind commas (repeatable)
    #[arg(long = "pass", value_name = "NAME=off|auto|require")]
    passes: Vec<String>,
}

impl ConfigArgs {
    /// Whether the command line itself says what to train.
    pub fn is_named(&self) -> bool {
        self.recipe.is_some() || self.config.is_some()
    }

    /// The preset with everything laid over it; `base`, where given, stands in for the preset.
    pub fn resolve(&self, base: Option<Config>) -> Result<Config> {
        let mut named = (self.recipe.clone(), self.preset.clone());
        if let Some(path) = &self.config {
            // The file may name recipe and preset; the command line wins.
            let [recipe, preset] = named_in(&read_file(path)?, path)?;
            named = (named.0.or(recipe), named.1.or(preset));
        }
        let mut config = match base {
            Some(base) => {
                for (given, key) in [(&named.0, "recipe"), (&named.1, "preset")] {
                    if let Some(g) = given.as_deref().filter(|g| *g != base.text(key)) {
                        bail!("this run's {key} is '{}', not '{g}': start another run with --out", base.text(key));
                    }
                }
                base
            }
            None => recipe::preset(recipe::find(named.0.as_deref().unwrap_or("hydra"))?, named.1.as_deref())?,
        };
        if let Some(path) = &self.config {
            config.overlay_file(path)?;
        }
        for s in &self.sets {
            config.set(s)?;
        }
        if let Some(path) = &self.data {
            config.set_value("data.path", path.display().to_string().into())?;
        }
        if let Some(steps) = self.steps {
            config.set_value("train.steps", (steps as i64).into())?;
        }
        if let Some(seed) = self.seed {
            config.set_seed(seed);
        }
        for p in &self.passes {
            config.set_pass_argument(p)?;
        }
        config.absolute_paths()?;
        Ok(config)
    }
}

/// Prints JSON, or writes it to a file where one is named.
pub fn write_json(path: Option<&PathBuf>, value: &serde_json::Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    match path {
        Some(path) => Ok(::train::run::write_whole(path, &text)?),
        None => {
            out!("{text}");
            Ok(())
        }
    }
}
