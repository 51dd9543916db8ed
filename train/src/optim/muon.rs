//! Muon: a matrix moves along its momentum made orthogonal by five steps of Newton-Schulz, matrices of one shape together.
//!
//! With g the clipped gradient of a matrix p [rows, columns]:
//!
//! ```text
//! m <- momentum m + (1 - momentum) g          u = (1 - momentum) g + momentum m
//! x = u / (norm(u) + 1e-7), with no more rows than columns (transposed where it has)
//! five times: A = x x^T;  x <- 3.4445 x + (-4.7750 A + 2.0315 A A) x
//! p <- p (1 - rate decay) - rate 0.2 sqrt(max(rows, columns)) x
//! ```
//!
//! The factor gives updates the size of AdamW's, so that rates and decay mean the same. This is torch.optim.Muon with
//! adjust_lr_fn="match_rms_adamw". The iteration may be rounded (pass `bf16`); parameters are f32, and momentum too unless
//! the pass `adam8bit` keeps it in fewer bits.

use super::{After, Param};
use crate::config::TrainConfig;
use engine::ops::adamw::momentum;
use engine::ops::concat::concat;
use engine::{DType, Init, Recorder, Var};
use std::collections::BTreeMap;

const STEPS: usize = 5;
const A: f32 = 3.4445;
const B: f32 = -4.7750;
const C: f32 = 2.0315;
const EPS: f32 = 1e-7;
/// What the root mean square of AdamW's updates is about.
const RMS: f32 = 0.2;

/// `numbers`: the rate, what gradients are scaled by, whether the step counts.
pub fn update<'g>(r: &'g Recorder, matrices: &[Param<'_, 'g>], [rate, scale, finite]: [Var<'g>; 3], c: &TrainConfig) -> After<'g> {
    let mut by_shape: BTreeMap<(usize, usize), Vec<&Param<'_, 'g>>> = BTreeMap::new();
    for x in matrices {
        let (rows, columns) = (x.p.dim(1), x.p.dim(0));
        by_shape.entry((rows.min(columns), rows.max(columns))).or_default().push(x);
    }
    let mut after = vec![];
    for ((rows, columns), group) in by_shape {
        let wide = |v: Var<'g>| if v.dim(1) > v.dim(0) { v.t() } else { v };
        let mut momenta = vec![];
        for x in &group {
            let m = r.state(&format!("muon.m/{}", x.name), &x.p.shape(), DType::F32, Init::Full(0.0));
            let [u, next] = momentum(c.momentum, scale, finite, x.g, m);
            r.update(m, next);
            momenta.push(wide(u).reshape(&[1, rows, columns]));
        }
        let all = orthogonal(concat(&momenta, 0));
        for (i, x) in group.iter().enumerate() {
            let own = all.slice(0, i, i + 1).reshape(&[rows, columns]);
            let own = if x.p.dim(1) > x.p.dim(0) { own.t() } else { own };
            let moved = x.p
                - (x.p * engine::mutant!("muon-without-decay", c.weight_decay, 0.0)
                    + own * (RMS * (engine::mutant!("muon-by-the-shorter-side", columns as f32, rows as f32)).sqrt()))
                    * rate;
            let moved = finite.choose(moved, x.p);
            r.update(x.p, moved);
            after.push((x.name.to_string(), moved));
        }
    }
    after
}

/// Matrices [n, rows, columns] with rows <= columns, each with singular values near 1.
fn orthogonal(u: Var<'_>) -> Var<'_> {
    let (n, r) = (u.shape()[0], u.recorder());
    let size = u.square().reshape(&[n, u.dim(1) * u.dim(0)]).sum_axis(1).reshape(&[n, 1, 1]).sqrt();
    let mut x = u / (size + EPS);
    r.narrow(|| {
        for _ in 0..STEPS {
            let a = x.matmul(x.t());
            x = x * A + (a * B + a.matmul(a) * C).matmul(x);
        }
    });
    x.cast(DType::F32)
}
