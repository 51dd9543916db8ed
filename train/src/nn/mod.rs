//! Functions that record layers.

pub mod mamba2;

use engine::{DType, Init, Recorder, Var};

/// x W^T with the parameter `name.weight` [outputs, inputs].
pub fn linear<'g>(x: Var<'g>, name: &str, outputs: usize, std: f32) -> Var<'g> {
    let w = x.recorder().param(&format!("{name}.weight"), &[outputs, x.dim(0)], Init::Normal { std });
    x.linear(w)
}

/// x + i32 offsets, as i32: exact below 2^24.
pub fn offset<'g>(index: Var<'g>, offsets: Var<'g>) -> Var<'g> {
    (index.cast(DType::F32) + offsets).cast(DType::I32)
}

/// For each row of [rows, ..]: row * step, as a column.
pub fn row_starts(r: &Recorder, rows: usize, step: usize) -> Var<'_> {
    r.constant(&[rows, 1], (0..rows).map(|i| (i * step) as f32).collect())
}
