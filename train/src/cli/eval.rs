//! `kiln eval`: a checkpoint on the validation data, with what each number means.

use super::{DeviceArgs, Opened, PresetArgs, Recipes, Which, write_json};
use crate::checkpoint::{AVERAGED, Checkpoint};
use crate::recipe::{Better, Evaluation, Extent, Metric, Survey, Task};
use crate::run;
use anyhow::{Result, bail};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln eval runs/a
  kiln eval runs/a/checkpoints/step-00000400 --batches 64 --json
  kiln eval runs/p --prompts 500 --replies 8
  kiln eval runs/cifar --data data/other-pictures --picture other.png
  kiln eval runs/s --data puzzles.csv")]
pub struct EvalArgs {
    /// A checkpoint's folder, or a run's (its newest checkpoint)
    checkpoint: PathBuf,
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    preset: PresetArgs,
    /// Another data set of the same tokenizer, or of the same classes; a CSV file of Sudokus, of which those are taken that no training may
    /// learn from
    #[arg(long)]
    data: Option<PathBuf>,
    /// At most this many batches of the validation data; if not given, all of it, or of generated data, which has no end, train.eval_batches
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 53))]
    batches: Option<u64>,
    /// Writes replies to this many prompts and measures them: diversity, distinct-2, self-BLEU, pass@k (recipes that reply to prompts)
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    prompts: Option<u64>,
    /// Replies to each of those prompts; if not given, as many as in training
    #[arg(long, requires = "prompts")]
    replies: Option<u32>,
    /// Where to write those replies: a line of JSON a prompt, with the distance of each pair
    #[arg(long, requires = "prompts", value_name = "FILE")]
    write_replies: Option<PathBuf>,
    /// Where to write a classifier's confusion matrix; if not given, confusion-step-N.png in the run's folder (with --data or
    /// --batches: nowhere)
    #[arg(long, value_name = "FILE.png")]
    picture: Option<PathBuf>,
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

pub fn run(a: EvalArgs, recipes: Recipes) -> Result<ExitCode> {
    let device = a.device.open()?;
    let opened = Opened::new(&a.checkpoint, &a.which, recipes)?;
    let (found, mut config) = (&opened.found, opened.config.clone());
    a.preset.set(&mut config);
    if let Some(path) = &a.data {
        config.set_value("data.path", path.display().to_string().into())?;
    }
    if let Some(n) = a.batches {
        config.set_value("train.eval_batches", (n as i64).into())?;
    }
    if let Some(prompts) = a.prompts {
        let survey = Survey { prompts, replies: a.replies, file: a.write_replies.as_deref() };
        opened.offered("reply to prompts", |r| r.surveys())?.ask(&mut config, &survey)?;
    }
    let mut task = opened.recipe.task(&config)?;
    run::same_tokenizer(found, &*task)?;
    run::same_classes(found, &*task)?;
    run::same_base(found, &*task)?;
    if a.data.is_none() && found.meta["identity"]["data"] != task.identity()?["data"] {
        crate::warn!(
            "the data has changed since {} was trained on it: what validates it now may be what it learnt from",
            found.path.display()
        );
    }
    // A checkpoint is worth all of the split, however little of it training looked at.
    if a.batches.is_none() && task.extent()?.is_some_and(|e| e.of.is_some()) {
        task.limit_evaluation(0);
    }
    let extent = task.extent()?;
    let mut s = run::load(&*task, &config, &device)?;
    run::restore(&mut s, found, false)?;
    let e = if opened.raw { task.evaluate(&mut s) } else { s.averaged(|s| task.evaluate(s)) }?;
    if a.picture.is_some() && e.confusion.is_none() {
        bail!("--picture is for classifiers: {} has no confusion matrix", config.text("recipe"));
    }
    match a.json {
        true => write_json(None, &described(&opened, &*task, &e, extent.as_ref()))?,
        false => show(&opened, &*task, &e, extent.as_ref())?,
    }
    let picture = a.picture.clone().or_else(|| beside(found).filter(|_| a.data.is_none() && a.batches.is_none()));
    if let (Some(confusion), Some(path)) = (&e.confusion, picture) {
        let name = format!("{} {}", config.text("recipe"), config.text("preset"));
        match run::draw_confusion(confusion, &name, found.step, &path)? {
            true if a.json => {}
            true => out!("confusion matrix {}", path.display()),
            false => crate::warn!("no confusion matrix: too many classes to draw"),
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn described(opened: &Opened, task: &dyn Task, e: &Evaluation, extent: Option<&Extent>) -> serde_json::Value {
    let found = &opened.found;
    let mut object = serde_json::json!({ "checkpoint": found.path, "step": found.step });
    object["weights"] = if found.has(AVERAGED) && !opened.raw { "averaged" } else { "last step" }.into();
    e.values.iter().for_each(|(n, v)| object[*n] = (*v).into());
    let meaning = |(n, _): &(&str, f64)| Some((n.to_string(), Metric::find(task.metrics(), n)?.to_json()));
    object["metrics"] = serde_json::Value::Object(e.values.iter().filter_map(meaning).collect());
    if let Some(extent) = extent {
        object["batches"] = extent.batches.into();
        object["of_batches"] = extent.of.into();
    }
    if let Some((_, floor)) = task.floor() {
        object["floor"] = floor.into();
    }
    if let Some(confusion) = &e.confusion {
        object["confusion"] = confusion.to_json();
    }
    if let Some(counted) = &e.counted {
        object["counted"] = counted.to_json();
    }
    object
}

/// The same for people, with what each number means.
fn show(opened: &Opened, task: &dyn Task, e: &Evaluation, extent: Option<&Extent>) -> Result<()> {
    let found = &opened.found;
    if let Some(confusion) = &e.confusion {
        out_part!("{}", confusion.table());
    }
    out!("{} (step {}): {}", found.path.display(), found.step, run::evaluation_line(&e.values, task.metrics(), task.floor()));
    for m in e.values.iter().filter_map(|(n, _)| Metric::find(task.metrics(), n)) {
        let better = if m.better == Better::Neither { String::new() } else { format!(" ({} is better)", m.better.name()) };
        out!("  {}: {}{better}", m.name, m.about);
    }
    if let Some(which) = opened.which() {
        out!("weights {which}");
    }
    if let Some(extent) = extent {
        out!("{}", extent.line());
    }
    if let Some(counted) = &e.counted {
        out!("{}", counted.line());
    }
    Ok(())
}

/// In the folder of the run that a checkpoint is of; none where it stands alone.
fn beside(found: &Checkpoint) -> Option<PathBuf> {
    let path = std::path::absolute(&found.path).ok()?;
    let checkpoints = path.parent().filter(|p| p.ends_with("checkpoints"))?;
    Some(checkpoints.parent()?.join(format!("confusion-step-{:08}.png", found.step)))
}
