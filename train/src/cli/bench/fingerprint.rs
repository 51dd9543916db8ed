//! `kiln bench --fingerprint`: what the timed programs run on a GPU of compute capability 9.0, as one number. A figure is of the code that has it.

use crate::cli::budget::{Where, fit_device};
use crate::config::Config;
use crate::models::decoder::Writing;
use crate::recipe::{Recipe, begin, phase};
use crate::run::compile_for;
use anyhow::Result;
use engine::Switches;
use engine::passes::Target;
use xxhash_rust::xxh3::xxh3_64;

/// The GPU that fingerprints are of, which need not be there.
pub fn target() -> Target {
    engine::program::imagined(90)
}

/// Of all programs of a recipe.
pub fn of_step(recipe: &dyn Recipe, config: &Config) -> Result<u64> {
    let on = Where { target: target(), free: None };
    let (config, _) = begin(recipe, config)?;
    let task = recipe.task(&config)?;
    let (config, _) = fit_device(&*task, config, &on)?;
    let compiled = compile_for(&*task, &config.switches()?, on.target, None)?;
    Ok(together(compiled.iter().map(|(_, c)| c.fingerprint())))
}

/// Of the programs that write replies.
pub fn of_replies(all: &[Writing], switches: &Switches) -> Result<u64> {
    let compiled = all.iter().map(|writing| Ok(phase::compile(writing.graphs(), switches, target())?)).collect::<Result<Vec<_>>>()?;
    Ok(together(compiled.iter().flatten().map(|(_, c)| c.fingerprint())))
}

pub fn together(all: impl IntoIterator<Item = u64>) -> u64 {
    xxh3_64(&all.into_iter().flat_map(u64::to_le_bytes).collect::<Vec<_>>())
}
