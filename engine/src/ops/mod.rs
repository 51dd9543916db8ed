//! The ops, one folder each. Tests, checks and benchmarks go through the table [`OPS`].

pub mod adamw;
pub mod adamw8;
pub mod attention;
pub mod cache;
pub mod collective;
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
pub mod quantize;
pub mod reduce;
pub mod rope;
pub mod rows;
pub mod sample;
pub mod short_conv;
pub mod softmax;
pub mod sparse;
pub mod ssd;
pub mod top_k;
pub mod view;

use crate::op::Entry;

macro_rules! ops {
    ($($module:ident: $about:literal,)*) => {
        &[$(Entry { name: stringify!($module), about: $about, cases: $module::CASES },)*]
    };
}

/// The engine's ops, each with its test cases. [`extension::ops`](crate::extension::ops) has registered ones too.
pub const OPS: &[Entry] = ops! {
    pointwise: "pointwise arithmetic with broadcasting: one op for all of it, SwiGLU and dropout included",
    full: "a tensor filled with one number",
    view: "reshape, permute, slice, expand, stop_gradient: the same memory with another shape and strides",
    concat: "concatenation along an axis; padding with zeros",
    reduce: "sums and maxima along an axis",
    matmul: "matmul: transposed, batched or broadcast operands, with an epilogue",
    quantize: "rounding to FP8 with a scale a tensor, also transposed; the scales of the next step",
    sparse: "2:4 sparsity: the two largest of every four numbers",
    few_rows: "matmuls of a few rows for decoding, with a fused RMS norm before and a residual or SwiGLU after them",
    narrow: "LoRA backward: two matmuls of one large matrix with low-rank ones, which read it once",
    nf4: "matmuls with weights stored in four bits (NF4)",
    matmul_pointwise: "matmul and the pointwise ops after it in one kernel",
    softmax: "softmax of rows, causal or not",
    norm: "RMS norm and layer norm; fused with a residual addition",
    rope: "rotary position embedding (RoPE), both layouts; fused with QK-norm",
    rows: "gather, scatter-add and replace rows of a table: embeddings, routing, caches",
    top_k: "indices of the k largest values; of equal values the first",
    conv: "causal grouped 1D convolution",
    attention: "attention with grouped key and value heads (GQA); flash attention",
    linear_attention: "attention without softmax: RoPE, two matmuls and a layer norm fused",
    short_conv: "causal depth-wise convolution with bias and SiLU, before a state-space scan",
    ssd: "the state-space scan of Mamba-2, in chunks, and its step for decoding",
    experts: "mixture of experts: routing, grouped GEMMs, the balance loss",
    cross_entropy: "cross-entropy of logits",
    linear_ce: "output projection and cross-entropy, fused, whole or in chunks",
    cache: "KV cache: writing it, and attention over it while decoding",
    diversity: "how far apart the directions of a set of vectors are",
    sample: "sampling tokens from logits: temperature and top-p",
    collective: "exchange between ranks: all-reduce, all-gather, reduce-scatter, all-to-all, and their gradients",
    adamw: "AdamW over all parameters; the global gradient norm; Muon's momentum",
    adamw8: "AdamW and momentum whose states are 8-bit, in blocks of 256",
};
