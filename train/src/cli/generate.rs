//! `kiln generate`: text from a checkpoint or a model folder.

use super::{DeviceArgs, Opened, Recipes, Which};
use crate::data::Tokenizer;
use crate::models::decoder::Chat;
use crate::recipe::{Generator, Session, TextModel};
use crate::sample::{Sampling, continue_text};
use anyhow::{Result, bail};
use clap::Args;
use engine::{Device, Switches};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln generate runs/a --prompt 'the '
  kiln generate runs/p --prompt 'name two numbers that make 5' --replies 4
  kiln generate models/Qwen3-0.6B --prompt 'Why is the sky blue?' --adapter runs/adapters
  kiln generate runs/a --prompt 'the ' --temperature 0 --stop '\\n' --max-tokens 2000")]
pub struct GenerateArgs {
    /// A checkpoint's folder, or a run's (its newest checkpoint); or a model's folder in the Hugging Face layout (Qwen3, Llama)
    checkpoint: PathBuf,
    #[command(flatten)]
    which: Which,
    /// Text to continue; models that were taught to reply are given it as a prompt. Escapes such as \n are undone; a backslash is \\
    #[arg(long, default_value = "the ", value_parser = super::unescaped)]
    prompt: String,
    /// The prompt as it is, without the model's chat template around it
    #[arg(long)]
    raw: bool,
    /// Replies to the prompt, all at once
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    replies: u16,
    /// An adapter in PEFT's layout, for a model's folder
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    /// Switches a pass, for a model's folder: bf16=off (repeatable)
    #[arg(long = "pass", value_name = "NAME=off|auto|require")]
    passes: Vec<String>,
    /// 0 always takes the most likely token
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f32,
    /// Nucleus sampling: draws from the smallest set of tokens with this total probability
    #[arg(long, default_value_t = 0.95)]
    top_p: f32,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Most tokens to write. May exceed the length that the model was trained on, but not the positions of a model that replies to prompts
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// Text that ends the output; it must be one token; escapes such as \n are undone (repeatable)
    #[arg(long, value_parser = super::unescaped)]
    stop: Vec<String>,
    /// Number of a token that ends the output (repeatable)
    #[arg(long)]
    stop_id: Vec<u32>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Caches are as long as the text may become.
const MOST_TOKENS: usize = 1 << 20;

pub fn run(a: GenerateArgs, recipes: Recipes) -> Result<ExitCode> {
    if !(a.temperature.is_finite() && a.temperature >= 0.0) {
        bail!("--temperature {} is not a number from 0 up", a.temperature);
    }
    if !(a.top_p > 0.0 && a.top_p <= 1.0) {
        bail!("--top-p {} is not above 0 and at most 1", a.top_p);
    }
    if a.max_tokens > MOST_TOKENS {
        bail!("--max-tokens {}: at most {MOST_TOKENS}", a.max_tokens);
    }
    let device = a.device.open()?;
    if a.checkpoint.join("config.json").exists() {
        return folder(&a, &device);
    }
    if a.checkpoint.join("adapter_config.json").exists() {
        bail!("{0} holds an adapter, which needs its model: kiln generate MODEL --adapter {0}", a.checkpoint.display());
    }
    if a.adapter.is_some() || !a.passes.is_empty() {
        bail!("--adapter and --pass are for a model's folder; {} has no config.json (a run has its own)", a.checkpoint.display());
    }
    let opened = Opened::new(&a.checkpoint, &a.which, recipes)?;
    let Opened { found, config, recipe, .. } = &opened;
    let model = opened.offered("write text", |r| r.writes())?.text_model(config, Some(found))?;
    let mut s = Session::new(&device, &config.switches()?, config.seed());
    let fill = |s: &mut Session| Ok(s.load_used_params(&opened.weights()?, &found.path.display().to_string())?);
    match model {
        TextModel::Replies(chat) => talk(&a, &chat, &mut s, fill),
        TextModel::Continues(_) if a.raw || a.replies > 1 => {
            bail!("--raw and --replies are for models that reply to prompts, which {} does not", recipe.name())
        }
        TextModel::Continues(mut generator) => go_on(&a, &mut *generator, &mut s, fill),
    }
}

/// Continues the prompt; `fill` gives the model its weights.
fn go_on(
    a: &GenerateArgs,
    generator: &mut dyn Generator,
    s: &mut Session,
    fill: impl FnOnce(&mut Session) -> Result<()>,
) -> Result<ExitCode> {
    let tokenizer = generator.tokenizer()?;
    let sampling = a.sampling(&tokenizer)?;
    // The programs name the parameters; then the checkpoint fills them.
    generator.begin(s, 1)?;
    fill(s)?;
    out_part!("{}", a.prompt);
    std::io::stdout().flush()?;
    let mut show = Shown::default();
    continue_text(generator, s, &a.prompt, &sampling, &mut |piece| show.piece(piece))?;
    out!();
    show.finish()
}

impl GenerateArgs {
    fn sampling(&self, tokenizer: &Tokenizer) -> Result<Sampling> {
        let mut stop = self.stop_id.clone();
        if let Some(id) = stop.iter().find(|id| **id as usize >= tokenizer.vocab()) {
            bail!("--stop-id {id}: {} has tokens 0 to {}", tokenizer.name(), tokenizer.vocab() - 1);
        }
        for text in &self.stop {
            match tokenizer.encode(text)?[..] {
                [one] => stop.push(one),
                ref more => {
                    bail!("--stop '{}' is {} tokens of {}, not one; use --stop-id", text.escape_debug(), more.len(), tokenizer.name())
                }
            }
        }
        Ok(Sampling { temperature: self.temperature, top_p: self.top_p, seed: self.seed, max_tokens: self.max_tokens, stop })
    }
}

/// Text on its way to stdout.
#[derive(Default)]
struct Shown {
    broken: Option<std::io::Error>,
}

impl Shown {
    fn piece(&mut self, piece: &str) {
        let mut out = std::io::stdout();
        if let Err(e) = out.write_all(piece.as_bytes()).and_then(|()| out.flush()) {
            self.broken = Some(e);
        }
    }

    fn finish(self) -> Result<ExitCode> {
        match self.broken {
            Some(e) => Err(e.into()),
            None => Ok(ExitCode::SUCCESS),
        }
    }
}

/// A model's folder; on a GPU in bf16, unless that is switched off.
fn folder(a: &GenerateArgs, device: &Device) -> Result<ExitCode> {
    let chat = Chat::of_folder(&a.checkpoint, a.adapter.as_deref())?;
    let mut switches = Switches::default();
    if matches!(device, Device::Cuda(..)) {
        switches.set("bf16", "auto")?;
    }
    let switches = super::switches(&a.passes, switches)?;
    talk(a, &chat, &mut Session::new(device, &switches, 0), |_| Ok(()))
}

/// Replies to the prompt; `fill` gives the model what is not its folder's.
fn talk(a: &GenerateArgs, chat: &Chat, s: &mut Session, fill: impl FnOnce(&mut Session) -> Result<()>) -> Result<ExitCode> {
    if a.max_tokens == 0 {
        bail!("--max-tokens 0: a reply has at least one");
    }
    let sampling = a.sampling(&chat.tokenizer)?;
    let talk = chat.begin(s, &a.prompt, a.raw, a.replies as usize, &sampling)?;
    fill(s)?;
    let mut show = Shown::default();
    if a.raw && a.replies == 1 {
        show.piece(&a.prompt);
    }
    // After a template a reply begins without a space.
    let mut begun = a.raw;
    let replies = talk.write(s, &mut |piece| {
        let piece = if begun { piece } else { piece.trim_start() };
        begun |= !piece.is_empty();
        if a.replies == 1 {
            show.piece(piece);
        }
    })?;
    match a.replies {
        1 => out!(),
        _ => replies.iter().enumerate().for_each(|(i, reply)| show.piece(&format!("{}. {}\n", i + 1, reply.trim()))),
    }
    show.finish()
}
