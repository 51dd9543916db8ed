use super::recipes::presets;
use super::{Recipes, write_json};
use crate::config::{Config, ConfigError, Key, Keys, Section, TopConfig, TrainConfig, shown};
use crate::recipe::{self, Recipe};
use anyhow::Result;
use clap::Args;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln config {recipe}
  kiln config {recipe} learning_rate
  kiln config {recipe} train --preset {preset}
  kiln config --markdown

KEY is a section, a key with its section (train.batch) or without it. Set one with --set KEY=VALUE, or in a file: --config FILE.toml.")]
pub struct ConfigKeysArgs {
    /// The recipe; `kiln recipes` lists them
    #[arg(required_unless_present = "markdown")]
    recipe: Option<String>,
    /// One key or section; all of them if not given
    key: Option<String>,
    /// Shows the values of this preset
    #[arg(long)]
    preset: Option<String>,
    /// Shows the values with this key set, and what follows from it: the sizes of the model in model.base, of the data in data.path (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Prints Markdown; without a recipe, docs/config.md
    #[arg(long, conflicts_with_all = ["json", "preset", "key", "sets"])]
    markdown: bool,
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

/// The sections of a recipe, keys outside of every section first.
fn sections(recipe: &dyn Recipe) -> Vec<Keys> {
    std::iter::once(TopConfig::keys("")).chain(recipe.sections()).collect()
}

fn full_name(section: &str, key: &str) -> String {
    if section.is_empty() { key.into() } else { format!("{section}.{key}") }
}

/// Those that `wanted` names: a section, or keys with or without their section.
fn chosen(recipe: &str, all: Vec<Keys>, wanted: &str) -> Result<Vec<Keys>, ConfigError> {
    if let Some(section) = all.iter().find(|s| s.name == wanted) {
        return Ok(vec![section.clone()]);
    }
    let names: Vec<String> = all.iter().flat_map(|s| s.keys.iter().map(|k| full_name(s.name, k.name))).collect();
    let is = |section: &str, key: &Key| wanted == key.name || wanted == full_name(section, key.name);
    let only = |s: Keys| Keys { keys: s.keys.into_iter().filter(|k| is(s.name, k)).collect(), ..s };
    let found: Vec<Keys> = all.into_iter().map(only).filter(|s| !s.keys.is_empty()).collect();
    match found.is_empty() {
        true => {
            let (section, key) = wanted.split_once('.').unwrap_or(("", wanted));
            Err(ConfigError::no_key(recipe, section, key, &names, false))
        }
        false => Ok(found),
    }
}

/// `key = 320 (default 128)`, then what it may be and what it means.
fn print(section: &str, key: &Key, values: &Config) -> Result<()> {
    let (name, default) = (full_name(section, key.name), key.default_text());
    let value = values.value(section, key.name).filter(|v| **v != key.default);
    let value = value.map_or(default.clone(), |v| format!("{} (default {default})", shown(v)));
    out!("{name} = {value}");
    out!("    {}{}", key.type_and_range(), if key.free { "; a resumed run may change it" } else { "" });
    out!("    {}", key.about);
    Ok(())
}

fn json(section: &str, key: &Key, values: &Config) -> serde_json::Value {
    serde_json::json!({
        "key": full_name(section, key.name), "type": key.kind, "range": key.range.to_string(), "default": key.default,
        "from_data": key.data, "free": key.free, "value": values.value(section, key.name), "about": key.about,
    })
}

pub fn run(a: ConfigKeysArgs, recipes: Recipes) -> Result<ExitCode> {
    let Some(name) = a.recipe else {
        out_part!("{}", page(recipes));
        return Ok(ExitCode::SUCCESS);
    };
    let recipe = recipe::find_in(recipes, &name)?;
    if a.markdown {
        out_part!("{}", recipe_markdown(recipe));
        return Ok(ExitCode::SUCCESS);
    }
    let mut values = match &a.preset {
        Some(preset) => recipe::preset(recipe, Some(preset))?,
        None => Config::new(recipe.name(), "", recipe.sections()),
    };
    if !a.sets.is_empty() {
        a.sets.iter().try_for_each(|set| values.set(set))?;
        values = recipe::begin(recipe, &values)?.0;
    }
    let sections = a.key.as_ref().map_or_else(|| Ok(sections(recipe)), |key| chosen(recipe.name(), sections(recipe), key))?;
    if a.json {
        let all = sections.iter().flat_map(|s| s.keys.iter().map(|k| json(s.name, k, &values)));
        write_json(None, &all.collect())?;
        return Ok(ExitCode::SUCCESS);
    }
    for section in &sections {
        if a.key.as_ref().is_none_or(|key| key == section.name) {
            out!("[{}] {}\n", section.name, section.about);
        }
        for key in &section.keys {
            print(section.name, key, &values)?;
        }
        out!();
    }
    Ok(ExitCode::SUCCESS)
}

fn table(keys: &Keys) -> String {
    let default = |k: &Key| if k.data { k.default_text() } else { format!("`{}`", k.default_text()) };
    let row = |k: &Key| format!("| `{}` | {} | {} | {} |\n", k.name, default(k), k.type_and_range(), k.about);
    let rows: String = keys.keys.iter().map(row).collect();
    format!("{}\n\n| key | default | values | meaning |\n|---|---|---|---|\n{rows}", keys.about)
}

fn recipe_markdown(recipe: &dyn Recipe) -> String {
    let mut text = format!("## {}\n\n`kiln train {}`: {}. Presets:\n\n", recipe.name(), recipe.name(), recipe.about());
    for (name, about) in presets(recipe) {
        text += &format!("- `{name}`: {about}\n");
    }
    let common = TrainConfig::keys("train");
    for section in recipe.sections() {
        text += &format!("\n### {}: [{}]\n\n", recipe.name(), section.name);
        if section.name != common.name {
            text += &table(&section);
            continue;
        }
        let missing: Vec<String> = common.keys.iter().filter(|k| section.get(k.name).is_none()).map(|k| format!("`{}`", k.name)).collect();
        text += "The keys of [train](#train)";
        text += &if missing.is_empty() { ".\n".into() } else { format!(", without {}.\n", missing.join(", ")) };
    }
    text + "\n"
}

/// docs/config.md
fn page(recipes: Recipes) -> String {
    let mut text = "# Config keys

<!-- Made by `kiln config --markdown > docs/config.md`. -->

A run is configured by its recipe's defaults, a preset over them, a TOML file over that (`--config FILE.toml`) and single keys over that (`--set train.batch=8`; the
section may be left out where it is clear). `kiln config RECIPE` prints the same as this page, with `--preset` the values of a preset. Where the default is \"from the
data\", the key is 0 until the data is opened; a value that contradicts the data is an error. The section `[passes]` switches passes: `kiln passes` lists them.

## Every recipe

### Outside of sections

"
    .to_string();
    text += &table(&TopConfig::keys(""));
    text += "\n### [train]\n\n";
    text += &table(&TrainConfig::keys("train"));
    text += "\n";
    let all: String = recipes.iter().map(|recipe| recipe_markdown(*recipe)).collect();
    text + all.trim_end() + "\n"
}
