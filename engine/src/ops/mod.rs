//! The operations. One folder each; the table below is what tests, checks and benchmarks go through.

pub mod adamw;
pub mod attention;
pub mod cache;
pub mod concat;
pub mod conv;
pub mod cross_entropy;
pub mod diversity;
pub mod experts;
pub mod few_rows;
pub mod full;
pub mod linear_attention;
pub mod linear_ce;
pub mod matmul;
pub mod matmul_pointwise;
pub mod narrow;
pub mod nf4;
pub mod norm;
pub mod pointwise;
pub mod reduce;
pub mod rope;
pub mod rows;
pub mod sample;
pub mod softmax;
pub mod top_k;
pub mod view;

use crate::op::Entry;

macro_rules! ops {
    ($($module:ident: $about:literal,)*) => {
        &[$(Entry { name: stringify!($module), about: $about, cases: $module::CASES },)*]
    };
}

pub const OPS: &[Entry] = ops! {
    pointwise: "arithmetic on elements, with broadcasting: one op for all of it, SwiGLU and dropout among it",
    full: "one number everywhere",
    view: "reshape, permute, slice, expand, stop_gradient: other shapes for the same memory",
    concat: "side by side along an axis; zeros around",
    reduce: "sums and maxima along an axis",
    matmul: "matrix products, transposed or not, batched, broadcast",
    few_rows: "products of a few rows with weights as they are stored: what decoding needs, a norm before and sums or SwiGLU behind",
    narrow: "two products of a large matrix with narrow ones, which read it once",
    nf4: "matrix products with weights that are kept in four bits",
    matmul_pointwise: "matrix products with arithmetic behind them, in one kernel",
    softmax: "softmax of rows, causal or not",
    norm: "RMS norm and layer norm; the RMS norm of a sum",
    rope: "rotary position embedding, both layouts; the same behind an RMS norm",
    rows: "gather, add to and replace rows of a table: embedding, routing, caches",
    top_k: "positions of the k largest, ties to the earlier",
    conv: "causal convolution in groups",
    attention: "attention with grouped heads; flash attention",
    linear_attention: "attention of heads with themselves, without softmax: rope, two products and a layer norm at once",
    experts: "mixtures of experts: routing, products of rows with the matrices of their experts, the balance loss",
    cross_entropy: "cross-entropy of logits",
    linear_ce: "the loss head: linear layer and cross-entropy, whole or in chunks",
    cache: "keys and values kept from token to token, and attention over them",
    diversity: "how far the vectors of a set point apart",
    sample: "tokens drawn from their logits: temperature and top-p",
    adamw: "AdamW over all parameters; the norm of all gradients",
};
