//! `kiln generate`: text from a checkpoint or a model folder.

use super::{DeviceArgs, Opened, Recipes, SwitchArgs, Which, prompts};
use crate::data::Tokenizer;
use crate::data::chats::Message;
use crate::models::Adapter;
use crate::models::decoder::{Chat, Said};
use crate::recipe::{Generator, Replier, Session, TextModel};
use crate::report::shown;
use crate::sample::{Sampling, continue_text, reply};
use anyhow::{Result, bail};
use clap::Args;
use engine::{Device, Switches};
use std::borrow::Cow;
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln generate runs/a --prompt 'the '
  kiln generate runs/p --prompt 'name two numbers that make 5' --replies 4
  kiln generate models/Qwen3-0.6B --prompt 'Why is the sky blue?' --adapter runs/adapters
  kiln generate models/Qwen3-0.6B --chat --system 'Be brief.'
  kiln generate adapters/p --prompt 'Why is the sky blue?'    # on the base that it names, or on --base FOLDER
  kiln generate runs/a --prompt 'the ' --temperature 0 --stop '\\n' --max-tokens 2000
  kiln generate runs/c --prompts questions.txt --json")]
pub struct GenerateArgs {
    /// A checkpoint's folder, or a run's (its newest checkpoint); a model's folder in the Hugging Face layout; or an adapter's in PEFT's
    checkpoint: PathBuf,
    #[command(flatten)]
    which: Which,
    /// Text to continue; models that were taught to reply are given it as a prompt. Escapes such as \n are undone; a backslash is \\
    #[arg(long, default_value = "the ", value_parser = super::unescaped)]
    pub prompt: String,
    /// Prompts of a file, several at once: one a line, or lines of JSON with {"prompt": ..} or {"messages": [..]}; - is stdin. What is written comes
    /// out as lines of JSON, in the order of the prompts
    #[arg(long, value_name = "FILE", requires = "json", conflicts_with_all = ["prompt", "chat"])]
    pub prompts: Option<PathBuf>,
    /// With --prompts: how many replies are written at once
    #[arg(long, value_name = "N", default_value_t = 16, requires = "prompts", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub at_once: u16,
    /// Prints lines of JSON: each prompt with its "text", or with --replies its "texts"
    #[arg(long, conflicts_with = "chat")]
    pub json: bool,
    /// The prompt as it is, without the model's chat template around it
    #[arg(long)]
    pub raw: bool,
    /// Reads a conversation from the terminal, a line for each turn, through the model's chat template; /quit or Ctrl-D ends it
    #[arg(long, conflicts_with_all = ["raw", "replies", "prompt"])]
    chat: bool,
    /// What the conversation's system message says
    #[arg(long, value_name = "TEXT", conflicts_with = "raw", value_parser = super::unescaped)]
    system: Option<String>,
    /// Lets a model think before it replies, if its chat template knows enable_thinking; if not given it is told not to
    #[arg(long, conflicts_with = "raw")]
    pub think: bool,
    /// Replies to the prompt, all at once; with --prompts to each
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub replies: u16,
    /// An adapter in PEFT's layout, for a model's folder
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    /// The model's folder that an adapter is on; if not given, the one that its adapter_config.json names
    #[arg(long, value_name = "FOLDER", conflicts_with = "adapter")]
    base: Option<PathBuf>,
    #[command(flatten)]
    switches: SwitchArgs,
    /// 0 always takes the most likely token
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true, value_parser = temperature)]
    temperature: f32,
    /// Nucleus sampling: draws from the smallest set of tokens with this total probability
    #[arg(long, default_value_t = 0.95, allow_negative_numbers = true, value_parser = top_p)]
    top_p: f32,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Most tokens to write. May exceed the length that the model was trained on, but not the positions of a model that replies to prompts
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// Text that ends the output, and is no part of it; escapes such as \n are undone (repeatable)
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

/// In what was typed, since in 32 bits it may be another number, or none.
fn temperature(typed: &str) -> Result<f32, String> {
    let most = f64::from(f32::MAX);
    let number = typed.parse::<f64>().ok().filter(|v| (0.0..=most).contains(v));
    number.map(|v| v as f32).ok_or_else(|| format!("{typed} is not a number from 0 up to 3.4e38"))
}

fn top_p(typed: &str) -> Result<f32, String> {
    let number = typed.parse::<f64>().ok().filter(|v| *v > 0.0 && *v <= 1.0);
    // The smallest that 32 bits have: of the likeliest token alone.
    number.map(|v| (v as f32).max(f32::MIN_POSITIVE)).ok_or_else(|| format!("{typed} is not above 0 and at most 1"))
}

pub fn run(a: GenerateArgs, recipes: Recipes) -> Result<ExitCode> {
    if a.max_tokens > MOST_TOKENS {
        bail!("--max-tokens {}: at most {MOST_TOKENS}", a.max_tokens);
    }
    let device = a.device.open()?;
    if a.stop.iter().any(String::is_empty) {
        bail!("--stop '': it would end the output before it begins");
    }
    if a.checkpoint.join("adapter_config.json").exists() {
        return folder(&a, &adapters_base(&a)?, Some(&a.checkpoint), &device);
    }
    if a.base.is_some() {
        bail!("--base is for an adapter's folder; {} has no adapter_config.json", a.checkpoint.display());
    }
    if a.checkpoint.join("config.json").exists() {
        return folder(&a, &a.checkpoint, a.adapter.as_deref(), &device);
    }
    if a.adapter.is_some() || !a.switches.passes.is_empty() {
        bail!("--adapter and --pass are for a model's folder; {} has no config.json (a run has its own)", a.checkpoint.display());
    }
    let opened = Opened::new(&a.checkpoint, &a.which, recipes)?;
    let Opened { found, recipe, .. } = &opened;
    let mut config = opened.config.clone();
    a.switches.preset.set(&mut config);
    let model = opened.offered("write text", |r| r.writes())?.text_model(&config, Some(found))?;
    let mut s = Session::new(&device, &config.switches()?, config.seed());
    let fill = |s: &mut Session| Ok(s.load_used_params(&opened.weights()?, &found.path.display().to_string())?);
    match model {
        TextModel::Replies(chat) => talk(&a, &chat, &mut s, fill),
        TextModel::Continues(_) if a.raw || a.replies > 1 || a.chat || a.system.is_some() || a.think => {
            bail!("--raw, --replies, --chat, --system and --think are for models that reply to prompts, which {} does not", recipe.name())
        }
        TextModel::Continues(mut generator) => go_on(&a, &mut *generator, &mut s, fill),
        TextModel::Answers(_) if a.raw || a.chat || a.think => {
            bail!("--raw, --chat and --think are for decoders that read conversations, which {} does not", recipe.name())
        }
        TextModel::Answers(mut replier) => answer(&a, &mut *replier, &mut s, fill),
    }
}

/// Replies to the prompt, all at once; `fill` gives the model its weights.
fn answer(a: &GenerateArgs, replier: &mut dyn Replier, s: &mut Session, fill: impl FnOnce(&mut Session) -> Result<()>) -> Result<ExitCode> {
    if a.max_tokens == 0 {
        bail!("--max-tokens 0: a reply has at least one");
    }
    let sampling = a.sampling(&*replier.tokenizer()?)?;
    if a.json {
        return prompts::answer(a, replier, s, &sampling, fill);
    }
    let turns: Vec<Message> = a.first_turn().into_iter().chain([Message::new("user", &a.prompt)]).collect();
    let prompts = vec![replier.prompt(&turns)?; a.replies as usize];
    replier.begin(s, prompts.len(), sampling.max_tokens)?;
    fill(s)?;
    let (mut show, one) = (Shown::new(), prompts.len() == 1);
    let mut piece = |_: usize, text: &str| {
        if one {
            show.piece(text)
        }
    };
    let texts = reply(replier, s, &prompts, (0, &sampling), &mut piece)?;
    if one {
        out!();
        return show.finish();
    }
    for text in &texts {
        out!("{}", show.on_screen(text));
    }
    show.finish()
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
    if a.json {
        return prompts::go_on(a, generator, s, &sampling);
    }
    let mut show = Shown::new();
    show.piece(&a.prompt);
    continue_text(generator, s, &a.prompt, &sampling, &mut |piece| show.piece(piece))?;
    out!();
    show.finish()
}

impl GenerateArgs {
    fn sampling(&self, tokenizer: &Tokenizer) -> Result<Sampling> {
        let stop = self.stop_id.clone();
        if let Some(id) = stop.iter().find(|id| **id as usize >= tokenizer.vocab()) {
            bail!("--stop-id {id}: {} has tokens 0 to {}", tokenizer.name(), tokenizer.vocab() - 1);
        }
        let Self { temperature, top_p, seed, max_tokens, .. } = *self;
        Ok(Sampling { temperature, top_p, seed, max_tokens, stop, stop_text: self.stop.clone() })
    }
}

/// The folder of the model that an adapter is on.
fn adapters_base(a: &GenerateArgs) -> Result<PathBuf> {
    let path = a.checkpoint.display();
    if a.adapter.is_some() {
        bail!("{path} holds an adapter itself: name its model with --base, or kiln generate MODEL --adapter {path}");
    }
    if let Some(base) = &a.base {
        return Ok(base.clone());
    }
    match Adapter::base_of(&a.checkpoint)? {
        (_, Some(folder)) => Ok(folder),
        (named, None) => bail!(
            "{path} holds an adapter on {named:?}, which is no folder here: name its model with --base, or kiln generate MODEL --adapter {path}{}",
            crate::input::fetched(Path::new(&named))
        ),
    }
}

/// Text on its way to stdout: to a file or a program as the model wrote it, to a terminal without what would steer it.
struct Shown {
    terminal: bool,
    broken: Option<std::io::Error>,
}

impl Shown {
    fn new() -> Shown {
        Shown { terminal: std::io::stdout().is_terminal(), broken: None }
    }

    fn on_screen<'a>(&self, piece: &'a str) -> Cow<'a, str> {
        if self.terminal { shown(piece) } else { piece.into() }
    }

    fn piece(&mut self, piece: &str) {
        let mut out = std::io::stdout();
        if let Err(e) = out.write_all(self.on_screen(piece).as_bytes()).and_then(|()| out.flush()) {
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
fn folder(a: &GenerateArgs, path: &Path, adapter: Option<&Path>, device: &Device) -> Result<ExitCode> {
    a.which.only_of_runs(&a.checkpoint)?;
    let chat = Chat::of_folder(path, adapter)?;
    let mut switches = Switches::default();
    if matches!(device, Device::Cuda(..)) {
        switches.set("bf16", "auto")?;
    }
    let switches = a.switches.over(switches)?;
    talk(a, &chat, &mut Session::new(device, &switches, 0), |_| Ok(()))
}

/// Replies to the prompt, or to a conversation; `fill` gives the model what is not its folder's.
fn talk(a: &GenerateArgs, chat: &Chat, s: &mut Session, fill: impl FnOnce(&mut Session) -> Result<()>) -> Result<ExitCode> {
    if a.max_tokens == 0 {
        bail!("--max-tokens 0: a reply has at least one");
    }
    if a.think && !chat.may_think() {
        let path = a.checkpoint.display();
        bail!("--think: {path} has no chat template that knows enable_thinking, so there is nothing to switch on (leave out --think)");
    }
    let sampling = a.sampling(&chat.tokenizer)?;
    if a.chat {
        return converse(a, chat, s, &sampling, fill);
    }
    if a.system.is_some() && !chat.has_turns() {
        bail!("--system: {} has no chat template that would have a place for it", a.checkpoint.display());
    }
    if a.json {
        return prompts::reply(a, chat, s, &sampling, fill);
    }
    let messages: Vec<Message> = a.first_turn().into_iter().chain([Message::new("user", &a.prompt)]).collect();
    let said = if a.raw { Said::Raw(&a.prompt) } else { Said::Turns { messages: &messages, think: a.think } };
    let talk = chat.begin(s, said, a.replies as usize, &sampling)?;
    fill(s)?;
    let mut show = Shown::new();
    let continues = a.raw || chat.continues();
    if continues && a.replies == 1 {
        show.piece(&a.prompt);
    }
    // After a template a reply begins without a space.
    let mut begun = continues;
    let replies = talk.write(s, &mut |piece| {
        let piece = if begun { piece } else { piece.trim_start() };
        begun |= !piece.is_empty();
        if a.replies == 1 {
            show.piece(piece);
        }
    })?;
    match a.replies {
        1 => out!(),
        _ => replies.iter().enumerate().for_each(|(i, reply)| {
            // What continues a prompt begins as the model began it.
            let reply = if continues { reply.trim_end() } else { reply.trim() };
            show.piece(&format!("{}. {reply}\n", i + 1));
        }),
    }
    show.finish()
}

impl GenerateArgs {
    pub fn first_turn(&self) -> Option<Message> {
        self.system.as_ref().map(|text| Message::new("system", text))
    }
}

/// A conversation: turns from stdin, a line each, and replies to them.
fn converse(
    a: &GenerateArgs,
    chat: &Chat,
    s: &mut Session,
    sampling: &Sampling,
    fill: impl FnOnce(&mut Session) -> Result<()>,
) -> Result<ExitCode> {
    if !chat.has_turns() {
        bail!("--chat: {} has no chat template to put several turns by (without --chat, --prompt is replied to)", a.checkpoint.display());
    }
    let (mut fill, mut last) = (Some(fill), None);
    let (mut show, mut messages) = (Shown::new(), Vec::from_iter(a.first_turn()));
    let asks = std::io::stdin().is_terminal();
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if asks {
            show.piece("> ");
        }
        let Some(line) = lines.next().transpose()?.filter(|line| line.trim() != "/quit") else { break };
        if line.trim().is_empty() {
            continue;
        }
        messages.push(Message::new("user", &line));
        let said = Said::Turns { messages: &messages, think: a.think };
        let sampling = Sampling {
            seed: sampling.seed.wrapping_add(engine::mutant!("every-turn-draws-the-same", messages.len() as u64, 0)),
            ..sampling.clone()
        };
        let talk = match &last {
            Some(last) => chat.go_on(s, said, &sampling, last)?,
            None => chat.begin(s, said, 1, &sampling)?,
        };
        fill.take().map_or(Ok(()), |fill| fill(s))?;
        let mut begun = false;
        let reply = talk.write(s, &mut |piece| {
            let piece = if begun { piece } else { piece.trim_start() };
            begun |= !piece.is_empty();
            show.piece(piece);
        })?;
        show.piece("\n");
        messages.push(Message::new("assistant", reply[0].trim()));
        last = Some(talk);
        if show.broken.is_some() {
            break;
        }
    }
    if asks {
        show.piece("\n");
    }
    show.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_model_writes_steers_no_terminal_and_is_a_files_as_it_is() {
        let to = |terminal| Shown { terminal, broken: None };
        let text = "a\u{1b}]0;x\u{7}\u{9b}2J\r\n\tb";
        assert_eq!(to(true).on_screen(text), "a\\u{1b}]0;x\\u{7}\\u{9b}2J\\u{d}\n\tb");
        assert_eq!(to(false).on_screen(text), text);
    }
}
