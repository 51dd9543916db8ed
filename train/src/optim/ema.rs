//! EMA: an exponential moving average of the parameters over steps, in f32.
//!
//! With p_t the parameters after the t-th step that counts, and d the decay:
//!
//! ```text
//! mass_t = d mass_(t-1) + (1 - d)                                      from mass_0 = 0, so mass_t = 1 - d^t
//! e_t    = e_(t-1) + (p_t - e_(t-1)) (1 - d) / mass_t                  from e_0 = 0
//! ```
//!
//! This is Adam's bias correction, done at every step: e_t is the mean of p_1 .. p_t with weights d^(t - i), e_1 is p_1, and the random values that
//! training began with have no part in it.

use engine::{DType, Init, Recorder, Var};

/// Where the average of a parameter is: this and the parameter's name.
pub const PREFIX: &str = "ema/";
/// The state that says how much has been averaged: 0 before the first step that counts.
pub const MASS: &str = "ema.mass";

/// Records the average of these parameters, each with its value after the step; `finite` says whether the step counts.
pub fn update<'g>(r: &'g Recorder, params: &[(String, Var<'g>)], finite: Var<'g>, decay: f32) {
    let rest = 1.0 - decay;
    let mass = r.state(MASS, &[1], DType::F32, Init::Full(0.0));
    let next = mass * decay + rest;
    let share = r.full(&[1], rest) / next;
    for (name, p) in params {
        let e = r.state(&format!("{PREFIX}{name}"), &p.shape(), DType::F32, Init::Full(0.0));
        r.update(e, finite.choose(e + (*p - e) * share, e));
    }
    r.update(mass, finite.choose(next, mass));
}
