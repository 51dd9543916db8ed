//! `kiln check model`: what a folder in the Hugging Face layout holds, and the logits of its model.

use super::{DeviceArgs, SwitchArgs};
use crate::data::Tokenizer;
use crate::models::decoder::{Base, Decoder, Places, Rows};
use crate::models::{Adapter, Folder, Shape};
use crate::recipe::Session;
use crate::report::human_count;
use crate::sample::nucleus;
use anyhow::{Context, Result, bail};
use clap::Args;
use engine::{DType, Data, Recorder, Switches};
use safetensors::tensor::{Dtype, TensorView};
use std::path::PathBuf;
use std::process::ExitCode;

/// `kiln check model`
#[derive(Args)]
pub struct ModelArgs {
    /// A folder with config.json and safetensors, as Hugging Face's packages write it: GPT-2, Llama, Qwen2, Qwen3, Mistral or Mamba-2
    folder: PathBuf,
    /// Adapters in PEFT's layout
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// Tokens to answer, as numbers with spaces or commas between (repeatable: all are answered at once)
    #[arg(long, value_name = "IDS")]
    ids: Vec<String>,
    /// Text to answer, by the folder's tokenizer; escapes such as \n are undone (repeatable)
    #[arg(long, value_parser = super::unescaped)]
    prompt: Vec<String>,
    /// How many of the likeliest next tokens to show
    #[arg(long, default_value_t = 5)]
    top: usize,
    /// Saves all logits: a tensor [tokens, vocabulary] for each prompt, called 0, 1, ..
    #[arg(long, value_name = "OUT.safetensors")]
    write: Option<PathBuf>,
    #[command(flatten)]
    switches: SwitchArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

pub fn run(a: ModelArgs) -> Result<ExitCode> {
    let switches = a.switches.over(Switches::default())?;
    let folder = Folder::open(&a.folder)?;
    let adapter = a.adapter.as_ref().map(|path| Adapter::open(path, &folder.shape, Some(&folder.path))).transpose()?;
    describe(&folder, adapter.as_ref())?;
    // Numbers can be answered without one.
    let tokenizer = if a.prompt.is_empty() { Tokenizer::of_folder(&folder.path)? } else { folder.tokenizer()? };
    if let Some(t) = &tokenizer {
        out!("tokenizer: {}, {} tokens", t.name(), t.vocab());
        out!("{}", t.describe_end(&t.end()));
        for line in t.special().map_or(vec![], |special| special.other_lines()) {
            out!("{line}");
        }
    }
    let prompts = prompts(&a, &folder.shape, tokenizer.as_ref())?;
    if prompts.is_empty() {
        folder.weights().try_for_each(|weight| weight.map(drop))?;
        adapter.as_ref().map_or(Ok(()), Adapter::check)?;
        if a.write.is_some() {
            bail!("--write wants something to answer: --ids or --prompt");
        }
        return Ok(ExitCode::SUCCESS);
    }

    // Shorter prompts are padded in front, as they are for generation.
    let (rows, time) = (prompts.len(), prompts.iter().map(Vec::len).max().unwrap_or(1));
    let (mut ids, mut real) = (vec![], vec![]);
    for p in &prompts {
        ids.extend(std::iter::repeat_n(0, time - p.len()).chain(p.iter().copied()));
        real.extend((0..time).map(|t| t >= time - p.len()));
    }
    let places = Rows::padded(&real, time);
    let r = Recorder::new();
    let d = Decoder { shape: &folder.shape, lora: adapter.as_ref().map(|a| &a.lora), base: Base::Loaded, r: &r, rng: None };
    let fed = |name: &str| r.feed(name, &[rows, time], DType::I32);
    let hidden = d.hidden(fed("ids"), Some(Places { position: fed("position"), until: fed("until") }));
    r.output("logits", d.logits(hidden));
    let mut s = Session::new(&a.device.open()?, &switches, 0);
    s.load("logits", r.finish())?;
    folder.load(&mut s.store)?;
    adapter.as_ref().map_or(Ok(()), |a| a.load(&mut s.store))?;
    s.run("logits", &[("ids", Data::I32(&ids)), ("position", Data::I32(&places.position)), ("until", Data::I32(&places.until))])?;
    let logits = s.read("logits", "logits")?;
    if let Some(broken) = logits.iter().find(|v| !v.is_finite()) {
        bail!("{}: its weights are finite, but a logit is {broken}: its numbers overflow", folder.path.display());
    }

    let vocab = folder.shape.vocab;
    let own = |row: usize| &logits[((row + 1) * time - prompts[row].len()) * vocab..(row + 1) * time * vocab];
    for (row, prompt) in prompts.iter().enumerate() {
        let likely = nucleus(&own(row)[(prompt.len() - 1) * vocab..], 1.0, 1.0);
        let shown = likely.iter().take(a.top).map(|&(token, p)| {
            let text = tokenizer.as_ref().map_or(String::new(), |t| format!(" {:?}", t.decode(&[token as u32])));
            format!("{token}{text} {:.2}%", 100.0 * p)
        });
        out!("{row}: after {} tokens: {}", prompt.len(), shown.collect::<Vec<_>>().join(", "));
    }
    if let Some(path) = &a.write {
        let views = (0..rows).map(|row| {
            let shape = vec![prompts[row].len(), vocab];
            Ok((row.to_string(), TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(own(row)))?))
        });
        let views = views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
        crate::run::write_bytes(path, &safetensors::serialize(views, None)?)?;
        out!("logits {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// What the folders hold, in a line each.
fn describe(folder: &Folder, adapter: Option<&Adapter>) -> Result<()> {
    let s = &folder.shape;
    let all = s.weights();
    let weights: usize = all.iter().map(|w| w.2.iter().product::<usize>()).sum();
    let dtype = folder.dtype(&all.first().context("a model has weights")?.1)?;
    let layers = match &s.scan {
        Some(scan) => format!("{} heads of {}, state {}", s.heads, s.head_dim, scan.state),
        None => {
            let shared = if s.kv_heads == s.heads { String::new() } else { format!(" ({} for keys and values)", s.kv_heads) };
            format!("{} heads of {}{shared}, MLP {}", s.heads, s.head_dim, s.hidden)
        }
    };
    // A state has no positions that could run out.
    let context = if s.scan.is_some() { String::new() } else { format!(", {} positions", s.context) };
    out!(
        "{}: {}, width {}, {} layers, {layers}, vocabulary {}{context}, {} parameters in {dtype}, head {}",
        folder.path.display(),
        s.family.name,
        s.dim,
        s.layers,
        s.vocab,
        human_count(weights as f64),
        if s.tied { "tied to the embedding" } else { "not tied" },
    );
    if let Some(a) = adapter {
        let names: Vec<&str> = a.lora.targets.iter().map(|t| t.name()).collect();
        out!("{}: rank {}, alpha {}, on {}", a.path.display(), a.lora.rank, a.lora.alpha, names.join(", "));
    }
    Ok(())
}

fn prompts(a: &ModelArgs, shape: &Shape, tokenizer: Option<&Tokenizer>) -> Result<Vec<Vec<i32>>> {
    let mut all = vec![];
    for text in &a.ids {
        let words = text.split([',', ' ']).filter(|w| !w.is_empty());
        let ids = words.map(|w| w.parse::<i32>().ok().filter(|&id| id >= 0).with_context(|| format!("--ids '{text}': '{w}' is no token")));
        all.push(ids.collect::<Result<Vec<i32>>>()?);
    }
    for text in &a.prompt {
        let Some(t) = tokenizer else { bail!("{} has no tokenizer.json: give --ids", a.folder.display()) };
        all.push(t.encode_beginning(text)?.into_iter().map(|id| id as i32).collect());
    }
    for ids in &all {
        if ids.is_empty() || ids.len() > shape.context {
            bail!("a prompt of {} tokens: from 1 to {}", ids.len(), shape.context);
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= shape.vocab) {
            bail!("token {id}: the model has tokens 0 to {}", shape.vocab - 1);
        }
    }
    Ok(all)
}
