//! `kiln predict`: the classes of pictures.

use super::{DeviceArgs, Opened, Recipes, Which, write_json};
use crate::data::DataError;
use crate::data::images::{CHANNELS, read_picture};
use crate::recipe::Session;
use anyhow::{Result, bail};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln predict runs/v picture.png
  kiln predict runs/cifar/checkpoints/step-00010000 photos/*.jpg --top 5 --json

A picture is cut to the square in its middle and resized to what the model takes. One that cannot be read is named, the others are
predicted, and the exit status is 1.")]
pub struct PredictArgs {
    /// A checkpoint's folder, or a run's (its newest checkpoint)
    checkpoint: PathBuf,
    #[command(flatten)]
    which: Which,
    /// PNG or JPEG files
    #[arg(required = true)]
    pictures: Vec<PathBuf>,
    /// Classes to name, the most likely first
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    top: u32,
    #[command(flatten)]
    device: DeviceArgs,
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

/// Pictures that are classified at a time.
const BATCH: usize = 32;

pub fn run(a: PredictArgs, recipes: Recipes) -> Result<ExitCode> {
    let device = a.device.open()?;
    let opened = Opened::new(&a.checkpoint, &a.which, recipes)?;
    let Opened { found, config, .. } = &opened;
    let mut classifier = opened.offered("classify pictures", |r| r.classifies())?.classifier(config, &found.meta["identity"])?;
    let size = classifier.size();
    let read = |path: &Path| -> Result<Vec<u8>, DataError> {
        let mut pixels = vec![0; CHANNELS * size * size];
        read_picture(path, size, &mut pixels).map(|()| pixels)
    };
    let pictures: Vec<(&PathBuf, Result<Vec<u8>, DataError>)> = a.pictures.iter().map(|p| (p, read(p))).collect();
    let whole: Vec<&[u8]> = pictures.iter().filter_map(|(_, p)| p.as_deref().ok()).collect();

    let mut s = Session::new(&device, &config.switches()?, config.seed());
    classifier.begin(&mut s, whole.len().clamp(1, BATCH))?;
    s.load_params(&opened.weights()?, &found.path.display().to_string())?;
    let logits = classifier.logits(&mut s, &whole.concat())?;
    if !logits.iter().all(|v| v.is_finite()) {
        bail!("{}: the model's numbers are not finite (use an earlier checkpoint)", found.path.display());
    }
    let classes = classifier.classes();
    let mut rows = logits.chunks(classes.len());
    let (mut json, mut failed) = (vec![], false);
    for (path, picture) in &pictures {
        let file = path.display().to_string();
        if let Err(e) = picture {
            failed = true;
            crate::warn!("error: {e}");
            json.push(serde_json::json!({ "picture": file, "error": e.to_string() }));
            continue;
        }
        let guesses = likely(rows.next().expect("a row for each picture"), a.top as usize);
        if a.json {
            let one = |(i, p): &(usize, f64)| serde_json::json!({ "class": classes[*i], "probability": p });
            json.push(serde_json::json!({ "picture": file, "guesses": guesses.iter().map(one).collect::<Vec<_>>() }));
        } else {
            let named: Vec<String> = guesses.iter().map(|(i, p)| format!("{} {:.1}%", classes[*i], 100.0 * p)).collect();
            out!("{file}: {}", named.join(", "));
        }
    }
    if a.json {
        write_json(None, &serde_json::json!({ "checkpoint": found.path, "step": found.step, "pictures": json }))?;
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The `top` most likely classes with their probabilities.
fn likely(logits: &[f32], top: usize) -> Vec<(usize, f64)> {
    let most = logits.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v)) as f64;
    let parts: Vec<f64> = logits.iter().map(|v| (*v as f64 - most).exp()).collect();
    let sum: f64 = parts.iter().sum();
    let mut all: Vec<(usize, f64)> = parts.into_iter().map(|p| p / sum).enumerate().collect();
    // Stable: of equal ones the first comes first.
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all.truncate(top);
    all
}
