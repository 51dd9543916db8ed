use super::{Recipes, write_json};
use crate::recipe::Recipe;
use anyhow::Result;
use clap::Args;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln recipes
  kiln train {recipe} --preset {preset}")]
pub struct RecipesArgs {
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
    if a.json {
        let one = |r: &&dyn Recipe| {
            let presets: Vec<_> =
                presets(*r).into_iter().map(|(name, about)| serde_json::json!({ "name": name, "about": about })).collect();
            serde_json::json!({ "name": r.name(), "about": r.about(), "presets": presets })
        };
        write_json(None, &recipes.iter().map(one).collect())?;
        return Ok(ExitCode::SUCCESS);
    }
    for recipe in recipes {
        out!("{}: {}", recipe.name(), recipe.about());
        for (i, (name, about)) in presets(*recipe).into_iter().enumerate() {
            out!("  --preset {name}{}: {about}", if i == 0 { " (default)" } else { "" });
        }
        out!();
    }
    out!("kiln train RECIPE --preset PRESET trains one; kiln config RECIPE lists its keys.");
    Ok(ExitCode::SUCCESS)
}
