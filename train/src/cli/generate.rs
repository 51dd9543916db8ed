use super::DeviceArgs;
use ::train::config::Config;
use ::train::recipe::{self, Session};
use ::train::run;
use ::train::sample::{Sampling, continue_text};
use anyhow::{Result, bail};
use clap::Args;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln generate runs/hydra-tiny --prompt 'the '
  kiln generate runs/hydra-tiny --prompt 'the ' --temperature 0 --stop '\\n' --max-tokens 2000")]
pub struct GenerateArgs {
    /// A checkpoint's folder, or a run's (its newest checkpoint)
    checkpoint: PathBuf,
    /// Text to continue
    #[arg(long, default_value = "the ")]
    prompt: String,
    /// 0 always takes the most likely token
    #[arg(long, default_value_t = 0.8)]
    temperature: f32,
    /// Draws only from the smallest set of tokens that has this probability
    #[arg(long, default_value_t = 0.95)]
    top_p: f32,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// May go past the length that the model was trained on
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// Ends the text: a text that is one token, escapes such as \n allowed (repeatable)
    #[arg(long)]
    stop: Vec<String>,
    /// Ends the text: a token's number (repeatable)
    #[arg(long)]
    stop_id: Vec<u32>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Caches are as long as the text may become.
const MOST_TOKENS: usize = 1 << 20;

pub fn run(a: GenerateArgs) -> Result<ExitCode> {
    if !(a.temperature.is_finite() && a.temperature >= 0.0) {
        bail!("--temperature {} is negative", a.temperature);
    }
    if !(a.top_p > 0.0 && a.top_p <= 1.0) {
        bail!("--top-p {} is not above 0 and at most 1", a.top_p);
    }
    let device = a.device.open()?;
    let found = run::find_checkpoint(&a.checkpoint)?;
    let config = Config::from_json(&found.meta["config"])?;
    let (name, recipe) = (config.text("recipe"), recipe::find(config.text("recipe"))?);
    if recipe.classifier(&config, &found.meta["identity"])?.is_some() {
        bail!("{} is a checkpoint of {name}, which does not write text (to classify pictures: kiln predict)", found.path.display());
    }
    let task = recipe.task(&config)?;
    run::same_tokenizer(&found, &*task)?;
    let Some(mut generator) = task.generator() else { bail!("{name} does not write text") };
    let tokenizer = generator.tokenizer()?;
    let mut stop = a.stop_id.clone();
    if let Some(id) = stop.iter().find(|id| **id as usize >= tokenizer.vocab()) {
        bail!("--stop-id {id}: {} has tokens 0 to {}", tokenizer.name(), tokenizer.vocab() - 1);
    }
    if a.max_tokens > MOST_TOKENS {
        bail!("--max-tokens {}: at most {MOST_TOKENS}", a.max_tokens);
    }
    for text in &a.stop {
        let text = text.replace("\\n", "\n").replace("\\t", "\t");
        match tokenizer.encode(&text)?[..] {
            [one] => stop.push(one),
            ref more => bail!("--stop '{text}' is {} tokens of {}, not one; use --stop-id", more.len(), tokenizer.name()),
        }
    }
    let mut s = Session::new(&device, &config.switches()?, config.seed());
    // The programs name the parameters; then the checkpoint fills them.
    generator.begin(&mut s, 1)?;
    s.load_params(&found.file("model.safetensors")?, &found.path.display().to_string())?;
    let sampling = Sampling { temperature: a.temperature, top_p: a.top_p, seed: a.seed, max_tokens: a.max_tokens, stop };
    out_part!("{}", a.prompt);
    std::io::stdout().flush()?;
    let mut broken = None;
    continue_text(&mut *generator, &mut s, &a.prompt, &sampling, &mut |piece| {
        let mut out = std::io::stdout();
        if let Err(e) = out.write_all(piece.as_bytes()).and_then(|()| out.flush()) {
            broken = Some(e);
        }
    })?;
    out!();
    match broken {
        Some(e) => Err(e.into()),
        None => Ok(ExitCode::SUCCESS),
    }
}
