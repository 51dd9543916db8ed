//! A model card: README.md of an exported folder, with what is known of the run and nothing else.

use super::Lora;
use super::decoder::Adapted;
use crate::checkpoint::AVERAGED;
use crate::config::Config;
use crate::data::listed;
use crate::recipe::Exporting;
use serde_json::Value;
use std::fmt::Write;
use std::path::Path;

/// The text of a card. `whole`: the folder holds a whole model, and not adapters alone; `pruned`: with 2:4 sparsity.
pub fn card(model: &Adapted, config: &Config, how: &Exporting, (whole, pruned): (bool, bool)) -> String {
    let (found, raw) = (how.found, how.raw);
    let library = if whole { "transformers" } else { "peft" };
    let mut text = format!("---\nlibrary_name: {library}\ntags:\n- kiln\n---\n\n# {}\n\n", how.name);
    let mut rows =
        vec![("trained with".to_string(), format!("kiln {}", found.meta["version"].as_str().unwrap_or("of an earlier version")))];
    let last = |path: &Path| path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    // A preset says what a model is like that is drawn at random; of another one the base says it.
    match &model.folder {
        Some(folder) => {
            rows.push(("recipe".into(), config.text("recipe").into()));
            rows.push(("fine-tuned from".into(), last(&folder.path)));
        }
        None => rows.push(("recipe, preset".into(), format!("{}, {}", config.text("recipe"), config.text("preset")))),
    }
    rows.push(("trained weights".into(), model.lora.as_ref().map_or("all".into(), |lora| adapters(lora, whole))));
    rows.push((
        "data".into(),
        config.data_path().map_or("generated".into(), |paths| listed(&paths.iter().map(|p| last(Path::new(p))).collect::<Vec<_>>())),
    ));
    rows.push(("steps".into(), found.step.to_string()));
    rows.extend(figures("training", &found.meta["figures"]["training"]));
    rows.extend(figures("validation", &found.meta["figures"]["validation"]));
    if found.has(AVERAGED) {
        let decay = config.value("train", "ema").map_or(String::new(), |d| format!(" (EMA, decay {d})"));
        rows.push(("weights".into(), if raw { "of the last step".into() } else { format!("averaged over steps{decay}") }));
    }
    if pruned {
        let what = if model.lora.is_some() { "adapters" } else { "linear layers" };
        rows.push(("2:4 sparsity".into(), format!("of {what}, as in training; the losses above are of the pruned model")));
    }
    text += "| | |\n|---|---|\n";
    for (what, value) in rows {
        let _ = writeln!(text, "| {what} | {} |", value.replace('|', "\\|").replace('\n', " "));
    }
    let commands = found.meta["commands"].as_array().into_iter().flatten().filter_map(Value::as_str).filter(|c| !c.is_empty());
    let commands: Vec<&str> = commands.collect();
    if !commands.is_empty() {
        let _ = writeln!(text, "\n```sh\n{}\n```", commands.join("\n"));
    }
    text
}

/// `adapters (LoRA, rank 16, alpha 16, on q, k), merged into the base`
fn adapters(lora: &Lora, merged: bool) -> String {
    let targets: Vec<&str> = lora.targets.iter().map(|target| target.name()).collect();
    let merged = if merged { ", merged into the base" } else { "" };
    format!("adapters (LoRA, rank {}, alpha {}, on {}){merged}", lora.rank, lora.alpha, targets.join(", "))
}

/// A row for each loss and metric of a record; counters and norms are left out.
fn figures(of: &str, record: &Value) -> Vec<(String, String)> {
    let Some(step) = record["step"].as_u64() else { return vec![] };
    let shown = |name: &str| !["step", "skipped"].contains(&name) && !name.ends_with("_norm") && !name.contains('.');
    let values = record.as_object().into_iter().flatten().filter(|(name, _)| shown(name));
    values.filter_map(|(name, value)| Some((format!("{of} {name}, step {step}"), format!("{:.4}", value.as_f64()?)))).collect()
}
