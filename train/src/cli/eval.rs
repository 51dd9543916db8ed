//! `kiln eval`: a checkpoint on the validation data, or a model's folder on data that is named, with what each number means.

use super::{DeviceArgs, Opened, PresetArgs, Recipes, Which, set_data, write_json};
use crate::checkpoint::{AVERAGED, Checkpoint};
use crate::config::Setting;
use crate::recipe::{self, Better, Evaluation, Extent, Metric, Recipe, Survey, Task, TrainError};
use crate::run;
use anyhow::{Result, bail};
use clap::Args;
use engine::Device;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Splits, as they are named here.
const VALIDATION: &str = "val";
const TEST: &str = crate::data::images::TEST;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln eval runs/a
  kiln eval runs/a/checkpoints/step-00000400 --batches 64 --json
  kiln eval models/qwen2.5-0.5b --data chats.jsonl     # before any training
  kiln eval runs/p --prompts 500 --replies 8
  kiln eval runs/cifar --best --split test     # the test split, by which no checkpoint was chosen
  kiln eval runs/cifar --data data/other-pictures --picture other.png
  kiln eval runs/s --data puzzles.csv")]
pub struct EvalArgs {
    /// A checkpoint's folder, or a run's (its newest checkpoint); or with --data a model's folder in the Hugging Face layout, as it is before training
    checkpoint: PathBuf,
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    preset: PresetArgs,
    /// Another data set of the same tokenizer, or of the same classes; a CSV file of Sudokus, of which those are taken that no training may
    /// learn from. Of a model's folder: conversations or prepared text, of which that is taken which fine-tuning would validate with
    #[arg(long, value_name = "PATH", num_args = 1..)]
    data: Vec<String>,
    /// Of a model's folder: sets a config key, as fine-tuning would (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// The split of the data that is read; test is for pictures that have one
    #[arg(long, default_value = VALIDATION, value_parser = [VALIDATION, TEST])]
    split: String,
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
    /// Where to write a classifier's confusion matrix; if not given, confusion-step-N.png in the run's folder (with --data, --batches or
    /// --split test: nowhere)
    #[arg(long, value_name = "FILE.png")]
    picture: Option<PathBuf>,
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

pub fn run(a: EvalArgs, recipes: Recipes) -> Result<ExitCode> {
    let device = a.device.open()?;
    if a.checkpoint.join("config.json").exists() {
        return folder(&a, &device, recipes);
    }
    if !a.sets.is_empty() {
        bail!("--set is for a model's folder: {} has no config.json (a run has its own settings)", a.checkpoint.display());
    }
    let opened = Opened::new(&a.checkpoint, &a.which, recipes)?;
    let (found, mut config) = (&opened.found, opened.config.clone());
    a.preset.set(&mut config);
    set_data(&mut config, &a.data)?;
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
    if a.data.is_empty() && found.meta["identity"]["data"] != task.identity()?["data"] {
        crate::warn!(
            "the data has changed since {} was trained on it: what validates it now may be what it learnt from",
            found.path.display()
        );
    }
    if a.split == TEST && !task.validate_on_test() {
        bail!("--split test: the data of {} has no test split (without it the validation split is read)", found.path.display());
    }
    if let Some(reason) = task.without_validation()? {
        bail!("{}: there is nothing to evaluate: {reason} (name other data with --data)", found.path.display());
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
    let weights = if found.has(AVERAGED) && !opened.raw { "averaged" } else { "last step" };
    let seen = Seen { task: &*task, e: &e, extent: extent.as_ref(), split: &a.split };
    let what = serde_json::json!({ "checkpoint": found.path, "step": found.step, "weights": weights, "split": a.split });
    match a.json {
        true => write_json(None, &seen.described(what))?,
        false => seen.show(&format!("{} (step {})", found.path.display(), found.step), opened.which())?,
    }
    if let Some(confusion) = &e.confusion {
        let name = format!("{} {}", config.text("recipe"), config.text("preset"));
        picture(&a, found, |path| run::draw_confusion(confusion, &name, found.step, path))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the confusion matrix where `--picture` says, or into the run's folder.
fn picture(a: &EvalArgs, found: &Checkpoint, draw: impl Fn(&Path) -> Result<Option<Vec<u8>>, TrainError>) -> Result<()> {
    let (run, path) = match (&a.picture, beside(found)) {
        (Some(path), _) => (None, path.clone()),
        (None, Some((run, name))) if a.split == VALIDATION && a.data.is_empty() && a.batches.is_none() => {
            (Some(run.clone()), run.join(name))
        }
        _ => return Ok(()),
    };
    match (draw(&path)?, run) {
        (None, _) => {
            crate::warn!("no confusion matrix: too many classes to draw");
            return Ok(());
        }
        (Some(png), None) => run::write_bytes(&path, &png)?,
        (Some(png), Some(run)) => run::write_own(&run, &path.file_name().unwrap_or_default().to_string_lossy(), png)?,
    }
    if !a.json {
        out!("confusion matrix {}", path.display());
    }
    Ok(())
}

/// A model's folder as fine-tuning finds it: what its first evaluation would find before the first step.
fn folder(a: &EvalArgs, device: &Device, recipes: Recipes) -> Result<ExitCode> {
    let path = a.checkpoint.display();
    a.which.only_of_runs(&a.checkpoint)?;
    let of_runs = [(a.prompts.is_some(), "--prompts"), (a.picture.is_some(), "--picture"), (a.split == TEST, "--split")];
    if let Some((_, flag)) = of_runs.into_iter().find(|f| f.0) {
        bail!("{flag} is for a run: {path} is a model's folder");
    }
    if a.data.is_empty() {
        bail!("{path} is a model's folder: name what it is evaluated on with --data (conversations, or what kiln data prepare made)");
    }
    let tunes = |r: &&&dyn Recipe| r.sections().iter().any(|s| s.name == "model" && s.get("base").is_some());
    let Some(recipe) = recipes.iter().find(tunes) else { bail!("{path} is a model's folder, and no recipe here fine-tunes one") };
    let mut config = recipe::preset(*recipe, None)?;
    a.sets.iter().try_for_each(|set| config.set(set))?;
    config.set_value("model.base", a.checkpoint.display().to_string().into())?;
    set_data(&mut config, &a.data)?;
    let data = config.data_path().unwrap_or_default();
    a.preset.set(&mut config);
    let (config, _) = recipe::begin(*recipe, &config)?;
    let mut task = recipe.task(&config)?;
    if let Some(reason) = task.without_validation()? {
        bail!("{}: there is nothing to evaluate on: {reason}", data);
    }
    task.limit_evaluation(a.batches.unwrap_or(0));
    let extent = task.extent()?;
    let mut s = run::load_to_evaluate(&*task, &config, device)?;
    let e = task.evaluate(&mut s)?;
    let seen = Seen { task: &*task, e: &e, extent: extent.as_ref(), split: VALIDATION };
    match a.json {
        true => write_json(None, &seen.described(serde_json::json!({ "model": a.checkpoint, "data": data.to_value() })))?,
        false => seen.show(&format!("{path} on {data}"), None)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// An evaluation.
struct Seen<'a> {
    task: &'a dyn Task,
    e: &'a Evaluation,
    extent: Option<&'a Extent>,
    split: &'a str,
}

impl Seen<'_> {
    /// For programs; `object` says what was evaluated.
    fn described(&self, mut object: serde_json::Value) -> serde_json::Value {
        let Seen { task, e, extent, .. } = self;
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

    /// For people, with what each number means.
    fn show(&self, what: &str, weights: Option<&str>) -> Result<()> {
        let Seen { task, e, extent, split } = self;
        if let Some(confusion) = &e.confusion {
            out_part!("{}", confusion.table());
        }
        out!("{what}: {}", run::evaluation_line(&e.values, task.metrics(), task.floor()));
        for m in e.values.iter().filter_map(|(n, _)| Metric::find(task.metrics(), n)) {
            let better = if m.better == Better::Neither { String::new() } else { format!(" ({} is better)", m.better.name()) };
            out!("  {}: {}{better}", m.name, m.about);
        }
        if let Some(weights) = weights {
            out!("weights {weights}");
        }
        if let Some(extent) = extent {
            out!("{}", extent.line_of(if *split == VALIDATION { "validation" } else { split }));
        }
        if let Some(counted) = &e.counted {
            out!("{}", counted.line());
        }
        Ok(())
    }
}

/// In the folder of the run that a checkpoint is of; none where it stands alone.
fn beside(found: &Checkpoint) -> Option<(PathBuf, String)> {
    let path = std::path::absolute(&found.path).ok()?;
    let checkpoints = path.parent().filter(|p| p.ends_with("checkpoints"))?;
    Some((checkpoints.parent()?.into(), format!("confusion-step-{:08}.png", found.step)))
}
