//! Functions that record an optimizer, and the schedules that feed it its rate.

pub mod schedule;

use crate::config::TrainConfig;
use engine::ops::adamw::{AdamW, global_norm};
use engine::{DType, Init, Recorder, Var};

/// What a step of the optimizer reports, each of one element.
pub struct Stepped<'g> {
    /// Norm of all gradients, before clipping and after.
    pub norm: Var<'g>,
    pub clipped: Var<'g>,
    /// Steps skipped so far, and in a row up to now, because the loss or the norm was not finite.
    pub skipped: Var<'g>,
    pub skipped_in_row: Var<'g>,
}

/// Clips to a global norm, then AdamW with decay on matrices only. A step whose loss or gradient is not finite changes nothing
/// but the counters.
pub fn adamw<'g>(r: &'g Recorder, params: &[(String, Var<'g>)], grads: &[Var<'g>], loss: Var<'g>, c: &TrainConfig) -> Stepped<'g> {
    let one = |name: &str| r.state(name, &[1], DType::F32, Init::Full(0.0));
    let rate = r.feed("rate", &[1], DType::F32);
    let norm = global_norm(grads);
    let finite = norm.is_finite() * loss.is_finite();
    let room = r.full(&[1], c.clip) / (norm + 1e-6);
    let scale = room.min(r.full(&[1], 1.0));
    let (count, skipped, row) = (one("adam.step"), one("adam.skipped"), one("adam.skipped_in_row"));
    let next = count + finite;
    let missed = -finite + 1.0;
    let (skipped_next, row_next) = (skipped + missed, (row + 1.0) * missed);
    let mut inputs = vec![rate, scale, next, finite];
    let mut decay = vec![];
    let mut states = vec![];
    for ((name, p), g) in params.iter().zip(grads) {
        let moment = |which: &str| r.state(&format!("adam.{which}/{name}"), &p.shape(), DType::F32, Init::Full(0.0));
        let (m, v) = (moment("m"), moment("v"));
        inputs.extend([*p, *g, m, v]);
        states.extend([*p, m, v]);
        decay.push(if p.shape().len() >= 2 { c.weight_decay } else { 0.0 });
    }
    let op = AdamW { beta1: c.beta1, beta2: c.beta2, eps: c.eps, decay };
    for (state, value) in states.into_iter().zip(r.op(op, &inputs)) {
        r.update(state, value);
    }
    r.update(count, next);
    r.update(skipped, skipped_next);
    r.update(row, row_next);
    Stepped { norm, clipped: norm * scale, skipped: skipped_next, skipped_in_row: row_next }
}
