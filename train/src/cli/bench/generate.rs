//! `kiln bench generate`: the time of replies to prompts.

use super::nodes::{node, profile};
use super::{BenchArgs, join};
use crate::cli::{ConfigArgs, Recipes, write_json};
use crate::memory::Measured;
use crate::recipe::Session;
use crate::report::{human_bytes, human_count};
use crate::run;
use anyhow::{Result, bail};
use std::process::ExitCode;
use std::time::Instant;

/// All replies to all prompts of the first recipe that writes them, by the base alone and with adapters on it.
pub fn generate(a: &BenchArgs, device: &engine::Device, recipes: Recipes) -> Result<ExitCode> {
    let Some((name, surveys)) = recipes.iter().find_map(|r| Some((r.name(), r.surveys()?))) else {
        bail!("bench generate: none of the recipes here replies to prompts");
    };
    let config = ConfigArgs { recipe: Some(name.into()), ..a.config.clone() }.resolve(recipes, None)?;
    let (mut figures, mut nodes) = (vec![], vec![]);
    for writing in surveys.writings(&config)? {
        let adapters = writing.adapters;
        let mut s = Session::new(device, &config.switches()?, config.seed());
        writing.load(&mut s)?;
        let mut times = vec![];
        for i in 0..a.warmup + a.repeat() {
            let start = Instant::now();
            writing.write(&mut s, i as u64)?;
            times.extend((i >= a.warmup).then(|| start.elapsed().as_secs_f64() * 1e3));
        }
        times.sort_by(f64::total_cmp);
        let (ms, w) = (times[times.len() / 2], &writing.writer);
        let (tokens, peak) = ((w.rows() * w.new_tokens) as f64, run::peak(&s).total() as u64);
        out!(
            "{} {} on {}, {}: {ms:.2} ms for {} x {} replies of {} tokens to prompts of {} (from {:.2} to {:.2}), {} tok/s, {:.3} ms a token of each; planned peak {}",
            config.text("recipe"),
            config.text("preset"),
            device.describe(),
            if adapters { "with adapters" } else { "the base alone" },
            w.prompts,
            w.replies,
            w.new_tokens,
            w.time,
            times[0],
            times[times.len() - 1],
            human_count(tokens / ms * 1e3),
            ms / w.new_tokens as f64,
            human_bytes(peak),
        );
        let mut figure =
            serde_json::json!({ "adapters": adapters, "ms": ms, "per_s": tokens / ms * 1e3, "unit": "tok", "peak_bytes": peak });
        join(&mut figure, Measured::of(device).json());
        figures.push(figure);
        if a.profile {
            // At the beginning: nodes are run several times, and caches have an end.
            writing.begin(&mut s)?;
            s.profile = Some(vec![]);
            writing.writer.next(&mut s)?;
            let timed = s.profile.take().unwrap_or_default();
            profile(&timed)?;
            nodes.extend(timed.iter().map(node));
        }
    }
    if let Some(path) = &a.json {
        write_json(Some(path), &serde_json::json!({ "generate": figures, "nodes": nodes, "device": device.describe() }))?;
    }
    Ok(ExitCode::SUCCESS)
}
