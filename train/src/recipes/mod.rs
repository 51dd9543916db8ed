//! The recipes: one line each.

pub mod decoder;
pub mod hrm;
pub mod hrm_lm;
pub mod hydra;
pub mod lior;
pub mod polychromic;
pub mod vision_bdh;

use crate::recipe::Recipe;
use std::sync::Once;

pub const RECIPES: &[&dyn Recipe] = &[
    &decoder::DecoderRecipe,
    &hydra::HydraRecipe,
    &vision_bdh::VisionRecipe,
    &lior::LiorRecipe,
    &hrm::HrmRecipe,
    &hrm_lm::HrmLmRecipe,
    &polychromic::PolychromicRecipe,
];

/// Tells the engine about the ops and passes that these recipes bring. Doing it again changes nothing.
pub fn register() {
    static ONCE: Once = Once::new();
    let known = |e| engine::register(e).expect("ops and passes of the recipes have names of their own");
    ONCE.call_once(|| RECIPES.iter().filter_map(|r| r.extension()).for_each(known));
}
