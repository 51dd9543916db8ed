//! The recipes: one line each.

pub mod hydra;

use crate::recipe::Recipe;

pub const RECIPES: &[&dyn Recipe] = &[&hydra::HydraRecipe];
