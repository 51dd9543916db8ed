//! `kiln check encoder`: embeddings of a folder in the sentence-transformers layout.

use super::{DeviceArgs, SwitchArgs};
use crate::models::{Encoder, EncoderFeeds};
use crate::recipe::Session;
use anyhow::{Result, bail};
use clap::Args;
use engine::{Data, Recorder, Switches};
use safetensors::tensor::{Dtype, TensorView};
use std::path::PathBuf;
use std::process::ExitCode;

/// `kiln check encoder`
#[derive(Args)]
pub struct EncoderArgs {
    /// A folder with modules.json, config.json, tokenizer.json and model.safetensors: BERT, the mean over tokens
    folder: PathBuf,
    /// Text to embed (repeatable: all are embedded at once)
    #[arg(long)]
    text: Vec<String>,
    /// Saves the tensor `embeddings` [texts, width]
    #[arg(long, value_name = "OUT.safetensors")]
    write: Option<PathBuf>,
    #[command(flatten)]
    switches: SwitchArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

pub fn run(a: EncoderArgs) -> Result<ExitCode> {
    let switches = a.switches.over(Switches::default())?;
    let encoder = Encoder::open(&a.folder)?;
    let s = &encoder.shape;
    out!(
        "{}: BERT, {} layers of {}, {} heads, {} wide, {} tokens, texts of at most {}, embeddings {}",
        a.folder.display(),
        s.layers,
        s.dim,
        s.heads,
        s.hidden,
        s.vocab,
        encoder.longest,
        if encoder.normalise { "of length 1" } else { "as they are" },
    );
    if a.text.is_empty() {
        if a.write.is_some() {
            bail!("--write wants something to embed: --text");
        }
        return Ok(ExitCode::SUCCESS);
    }
    let texts = encoder.texts(&a.text, None)?;
    let r = Recorder::new();
    r.output("embeddings", encoder.embed(&r, &EncoderFeeds::new(&r, a.text.len(), texts.time)));
    let mut session = Session::new(&a.device.open()?, &switches, 0);
    session.load("embed", r.finish())?;
    encoder.load(&mut session.store)?;
    session.run(
        "embed",
        &[("encoder_ids", Data::I32(&texts.ids)), ("encoder_until", Data::I32(&texts.until)), ("encoder_share", Data::F32(&texts.share))],
    )?;
    let embeddings = session.read("embed", "embeddings")?;
    for (text, e) in a.text.iter().zip(embeddings.chunks(s.dim)) {
        let first: Vec<String> = e.iter().take(4).map(|v| format!("{v:.4}")).collect();
        let length = e.iter().map(|v| (*v as f64).powi(2)).sum::<f64>().sqrt();
        out!("{text:?}: {} .., length {length:.4}", first.join(" "));
    }
    if let Some(path) = &a.write {
        let view = TensorView::new(Dtype::F32, vec![a.text.len(), s.dim], bytemuck::cast_slice(&embeddings))?;
        crate::run::write_bytes(path, &safetensors::serialize([("embeddings", view)], None)?)?;
        out!("embeddings {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}
