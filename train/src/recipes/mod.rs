//! The recipes: one line each.

pub mod hrm;
pub mod hydra;
pub mod lior;
pub mod polychromic;
pub mod vision_bdh;

use crate::recipe::Recipe;

pub const RECIPES: &[&dyn Recipe] =
    &[&hydra::HydraRecipe, &vision_bdh::VisionRecipe, &lior::LiorRecipe, &hrm::HrmRecipe, &polychromic::PolychromicRecipe];
