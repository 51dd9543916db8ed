//! A model card: README.md of an exported folder, with what is known of the run and nothing else.

use crate::checkpoint::{AVERAGED, Checkpoint};
use crate::config::Config;
use serde_json::Value;
use std::fmt::Write;
use std::path::Path;

/// The text of a card. `base` is the folder that was fine-tuned, where there was one; `adapters` says that the folder holds them alone.
pub fn card(name: &str, config: &Config, found: &Checkpoint, raw: bool, base: Option<&Path>, adapters: bool) -> String {
    let library = if adapters { "peft" } else { "transformers" };
    let mut text = format!("---\nlibrary_name: {library}\ntags:\n- kiln\n---\n\n# {name}\n\n");
    let mut rows = vec![
        ("trained with".to_string(), format!("kiln {}", found.meta["version"].as_str().unwrap_or("of an earlier version"))),
        ("recipe, preset".into(), format!("{}, {}", config.text("recipe"), config.text("preset"))),
    ];
    let last = |path: &Path| path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    rows.extend(base.map(|base| ("fine-tuned from".into(), last(base))));
    rows.push(("data".into(), config.data_path().map_or("generated".into(), |path| last(Path::new(path)))));
    rows.push(("steps".into(), found.step.to_string()));
    rows.extend(figures("training", &found.meta["figures"]["training"]));
    rows.extend(figures("validation", &found.meta["figures"]["validation"]));
    if found.has(AVERAGED) {
        let decay = config.value("train", "ema").map_or(String::new(), |d| format!(" (EMA, decay {d})"));
        rows.push(("weights".into(), if raw { "of the last step".into() } else { format!("averaged over steps{decay}") }));
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

/// A row for each loss and metric of a record; counters and norms are left out.
fn figures(of: &str, record: &Value) -> Vec<(String, String)> {
    let Some(step) = record["step"].as_u64() else { return vec![] };
    let shown = |name: &str| !["step", "skipped"].contains(&name) && !name.ends_with("_norm") && !name.contains('.');
    let values = record.as_object().into_iter().flatten().filter(|(name, _)| shown(name));
    values.filter_map(|(name, value)| Some((format!("{of} {name}, step {step}"), format!("{:.4}", value.as_f64()?)))).collect()
}
