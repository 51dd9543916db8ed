//! GEMMs of small K with a large result, as in LoRA's second matmul: bound by writing the result.

use crate::kernel::{Code, Io, Launch};
use crate::meta::DType;

/// The largest K: each 16 take 16 registers of a thread.
const MOST: usize = 64;
/// The fewest elements of the result for which writing it dominates.
const LARGE: usize = 1 << 21;
/// The least number of columns for each unit of K.
const TIMES: usize = 8;
/// Warps per multiprocessor, and rows that each has in flight.
const WARPS: usize = 16;
const AHEAD: usize = 4;

/// None if cuBLASLt is to do it.
pub fn code(io: &Io) -> Option<Code> {
    let (m, k, n, dtype) = (io.x[0].dim(1), io.x[0].dim(0), io.x[1].dim(0), io.x[0].dtype);
    let same = matches!(dtype, DType::BF16 | DType::F16) && io.x[1].dtype == dtype && io.y[0].dtype == dtype;
    if io.arch.sm < 80 || !same || k > MOST || n < TIMES * k || m * n < LARGE || m >= 1 << 31 || io.y[0].elements() != m * n {
        return None;
    }
    let steps = |i: usize| {
        let rank = io.x[i].rank();
        [io.strides[i][rank - 2], io.strides[i][rank - 1]]
    };
    let ([a_row, a_column], [b_row, b_column]) = (steps(0), steps(1));
    // Four elements along K, or eight columns, are read at once.
    let aligned = |i: usize, step: usize, to: usize| step.is_multiple_of(to) && io.offsets[i].is_multiple_of(to);
    let b_aligned = if b_row == 1 { aligned(1, b_column, 4) } else { b_column == 1 && aligned(1, b_row, 8) };
    if !k.is_multiple_of(4) || !n.is_multiple_of(8) || a_column != 1 || !aligned(0, a_row, 4) || !b_aligned {
        return None;
    }
    let parts = n.div_ceil(64);
    let walkers = (WARPS * io.arch.multiprocessors as usize / parts).clamp(1, m.div_ceil(8));
    let launch = Launch::new(&[include_str!("../attention/mma.cuh"), include_str!("terms.cu")].concat(), "few_terms")
        .define_type("T", dtype)
        .define("M", m)
        .define("N", n)
        .define("K", k)
        .define("A_ROW", a_row)
        .define("B_ROW", b_row)
        .define("B_COLUMN", b_column)
        .define("WALKERS", walkers)
        .define("AHEAD", AHEAD)
        .grid((parts * walkers).div_ceil(8), 1, 1)
        .all(io);
    Some(launch.code())
}
