//! `kiln bench generate`: the time of replies to prompts.

use super::fingerprint::of_replies;
use super::nodes::{node, profile};
use super::serve::Served;
use super::stats::LEAST;
use super::{BenchArgs, join};
use crate::cli::{ConfigArgs, Recipes, write_json};
use crate::config::Config;
use crate::memory::Measured;
use crate::models::decoder::Writing;
use crate::recipe::Session;
use crate::report::{human_bytes, human_count};
use crate::run;
use anyhow::{Result, bail};
use engine::passes::known;
use std::process::ExitCode;
use std::time::Instant;

/// The recipe that is named after `generate`, or the first that writes, and what is timed of it.
fn writings(a: &BenchArgs, recipes: Recipes) -> Result<(Config, Vec<Writing>)> {
    let writes: Vec<_> = recipes.iter().filter_map(|r| Some((r.name(), r.surveys()?))).collect();
    let names: Vec<&str> = writes.iter().map(|w| w.0).collect();
    let wanted = a.of.as_deref().or(names.first().copied()).unwrap_or_default();
    let Some((name, surveys)) = writes.iter().find(|w| w.0 == wanted) else {
        bail!("bench generate: no recipe here that replies to prompts is called '{wanted}'{}", known(wanted, names));
    };
    let config = ConfigArgs { recipe: Some(name.to_string()), ..a.config.clone() }.resolve(recipes, None)?;
    let writings = surveys.writings(&config)?;
    Ok((config, writings))
}

pub fn fingerprint(a: &BenchArgs, recipes: Recipes) -> Result<u64> {
    let (config, writings) = writings(a, recipes)?;
    of_replies(&writings, &config.switches()?)
}

/// The first way of writing (the base alone), timed whenever it is asked for.
pub fn serve(a: &BenchArgs, recipes: Recipes) -> Result<ExitCode> {
    let started = Instant::now();
    let (config, writings) = writings(a, recipes)?;
    let device = &a.device.open()?;
    let Some(writing) = writings.first() else { bail!("bench generate --serve: nothing is written") };
    let mut s = Session::new(device, &config.switches()?, config.seed());
    writing.load(&mut s)?;
    let mut step = 0;
    let mut once = || {
        let start = Instant::now();
        writing.write(&mut s, step)?;
        step += 1;
        anyhow::Ok(start.elapsed().as_secs_f64() * 1e3)
    };
    once()?;
    let ready = serde_json::json!({ "setup_s": started.elapsed().as_secs_f64(), "device": device.describe() });
    let work = (writing.writer.rows() * writing.writer.new_tokens) as f64;
    Served { device, work, unit: "tok", ready }.serve(|least| {
        let (mut times, clock) = (vec![], Instant::now());
        while times.len() < LEAST || clock.elapsed() < least {
            times.push(once()?);
        }
        Ok(times)
    })
}

/// All replies to all prompts, by the base alone and with adapters on it.
pub fn generate(a: &BenchArgs, recipes: Recipes) -> Result<ExitCode> {
    let (config, writings) = writings(a, recipes)?;
    let device = &a.device.open()?;
    let (mut figures, mut nodes) = (vec![], vec![]);
    for writing in writings {
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
