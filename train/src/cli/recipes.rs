use super::{Recipes, write_json};
use crate::recipe::{Metric, Recipe, find_in};
use crate::report::table;
use anyhow::Result;
use clap::Args;
use serde_json::json;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln recipes
  kiln recipes {recipe}
  kiln train {recipe} --preset {preset}")]
pub struct RecipesArgs {
    /// One recipe, with what each of its metrics means
    recipe: Option<String>,
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

/// (name, what it is) of each preset: the first sentence of the comment that it begins with.
pub fn presets(recipe: &dyn Recipe) -> Vec<(&'static str, String)> {
    let about = |text: &str| {
        let comment: Vec<&str> = text.lines().map_while(|line| line.strip_prefix('#')).map(str::trim).collect();
        let comment = comment.join(" ");
        comment.split_once(". ").map_or(comment.clone(), |(first, _)| format!("{first}."))
    };
    recipe.presets().iter().map(|(name, text)| (*name, about(text))).collect()
}

pub fn run(a: RecipesArgs, recipes: Recipes) -> Result<ExitCode> {
    let one = a.recipe.as_deref().map(|name| find_in(recipes, name)).transpose()?;
    let shown: Vec<&dyn Recipe> = one.map_or_else(|| recipes.to_vec(), |one| vec![one]);
    if a.json {
        write_json(None, &shown.iter().map(described).collect())?;
        return Ok(ExitCode::SUCCESS);
    }
    for recipe in shown {
        out!("{}: {}", recipe.name(), recipe.about());
        for (i, (name, about)) in presets(recipe).into_iter().enumerate() {
            out!("  --preset {name}{}: {about}", if i == 0 { " (default)" } else { "" });
        }
        out!();
        if one.is_some() {
            let row = |m: &Metric| vec![m.name.into(), m.unit.name().into(), m.better.name().into(), m.about.into()];
            out!("{}", table(&["metric", "unit", "better", "what it is"], &recipe.metrics().iter().map(row).collect::<Vec<_>>()));
        }
    }
    let program = crate::program();
    match one {
        Some(recipe) => out!("{program} train {0} trains it; {program} config {0} lists its keys.", recipe.name()),
        None => out!(
            "{program} train RECIPE --preset PRESET trains one; {program} recipes RECIPE says what its metrics mean; {program} config RECIPE lists its keys."
        ),
    }
    Ok(ExitCode::SUCCESS)
}

fn described(recipe: &&dyn Recipe) -> serde_json::Value {
    let presets: Vec<_> = presets(*recipe).into_iter().map(|(name, about)| json!({ "name": name, "about": about })).collect();
    let metrics: serde_json::Map<_, _> = recipe.metrics().iter().map(|m| (m.name.to_string(), m.to_json())).collect();
    json!({ "name": recipe.name(), "about": recipe.about(), "presets": presets, "metrics": metrics })
}
