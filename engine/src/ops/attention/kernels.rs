//! Flash attention on a GPU: which kernel runs, and how it is launched.

use super::order::{self, Work};
use super::wgmma::{self, Left};
use crate::kernel::{Arch, At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, block_stride};

/// The kernels that compute attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Tensor cores: bf16 or f16 with f32 accumulation.
    TensorCore,
    /// f32 throughout.
    Plain,
}

/// Which kernel computes attention for a head dimension `d`.
pub fn kernel_for(dtype: DType, d: usize, arch: Arch) -> (Kind, &'static str) {
    match (dtype, d, arch.sm) {
        (DType::BF16 | DType::F16, 16 | 32 | 64 | 128, 80..) => {
            (Kind::TensorCore, "bf16 or f16, a head of 16, 32, 64 or 128, compute capability 8.0")
        }
        (DType::BF16 | DType::F16, _, 80..) => (Kind::Plain, "a head that is not 16, 32, 64 or 128"),
        (DType::BF16 | DType::F16, ..) => (Kind::Plain, "no bf16 tensor cores before compute capability 8.0"),
        _ => (Kind::Plain, "f32, or inputs of different types"),
    }
}

const UNTIL: &str = include_str!("until.cuh");
const REACH: &str = include_str!("reach.cuh");
const STATS: &str = include_str!("stats.cuh");

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    time: usize,
    keys: usize,
    heads: usize,
    kv: usize,
    d: usize,
    /// Distance between consecutive time steps [heads, d] of q, k and v, in elements.
    rows: [usize; 3],
    /// Whether rows of 16-bit elements are aligned to 16 bytes.
    packed: bool,
    /// Whether the last input is `until`.
    masked: bool,
}

impl Sizes {
    fn new(io: &Io) -> Sizes {
        let (q, k) = (&io.x[0].shape, &io.x[1].shape);
        let rows = [0, 1, 2].map(|i| block_stride(&io.x[i].shape, &io.strides[i], 2).expect("blocks evenly apart"));
        let packed = (0..3).all(|i| rows[i].is_multiple_of(8) && io.offsets[i].is_multiple_of(8));
        let masked = io.x.last().is_some_and(|m| m.dtype == DType::I32);
        Sizes { batch: q[0], time: q[1], keys: k[1], heads: q[2], kv: k[2], d: q[3], rows, packed, masked }
    }

    fn define(&self, launch: Launch, causal: bool) -> Launch {
        launch
            .define("BATCH", self.batch)
            .define("TIME", self.time)
            .define("KEYS", self.keys)
            .define("HEADS", self.heads)
            .define("KV", self.kv)
            .define("D", self.d)
            .define("CAUSAL", causal as u8)
            .define("Q_ROW", self.rows[0])
            .define("K_ROW", self.rows[1])
            .define("V_ROW", self.rows[2])
            .define("PACKED", self.packed as u8)
            .define("MASKED", self.masked as u8)
    }

    /// The gradient op's input `until`, if there is one.
    fn until(&self) -> &'static [Place] {
        if self.masked { &[Place { at: At::X(6), bytes: 0 }] } else { &[] }
    }

    /// The number of rows [d] of q.
    fn queries(&self) -> usize {
        self.batch * self.time * self.heads
    }

    /// Bytes of `rows` rows of 16-bit elements in shared memory, with their padding.
    fn tile(&self, rows: usize) -> usize {
        rows * (self.d + 8) * 2
    }
}

/// Where the gradients of q, k and v are written: three tensors, or one that has a time step of all three side by side.
struct Grads {
    at: [Place; 3],
    /// Distance between consecutive time steps of dq, and of dk and dv, in elements.
    rows: [usize; 2],
}

impl Grads {
    fn new(io: &Io, s: &Sizes) -> Grads {
        let (q, k) = (s.heads * s.d, s.kv * s.d);
        match io.y.len() {
            1 => Grads { at: [0, q, q + k].map(|first| At::Y(0).plus(first * io.y[0].dtype.size())), rows: [q + 2 * k; 2] },
            _ => Grads { at: [0, 1, 2].map(|i| At::Y(i).into()), rows: [q, k] },
        }
    }

    fn define(&self, launch: Launch) -> Launch {
        launch.define("DQ_ROW", self.rows[0]).define("DK_ROW", self.rows[1])
    }
}

fn kind(io: &Io, floats: &[usize]) -> Kind {
    let dtype = io.x[0].dtype;
    let common = if floats.iter().all(|&i| io.x[i].dtype == dtype) { dtype } else { DType::F32 };
    kernel_for(common, io.x[0].dim(0), io.arch).0
}

/// Inputs q, k, v, and perhaps `until`; outputs y, lse.
pub fn forward(io: &Io, causal: bool, scale: f32) -> Code {
    match kind(io, &[0, 1, 2]) {
        Kind::TensorCore if is_small_forward(&Sizes::new(io)) => small_forward(io, causal, scale),
        Kind::TensorCore if is_short(&Sizes::new(io), io.arch, 128) => short_forward(io, causal, scale),
        Kind::TensorCore if is_wide(&Sizes::new(io), io.arch, scale) => wide_forward(io, causal, scale),
        Kind::TensorCore => tensor_forward(io, causal, scale),
        Kind::Plain => plain_forward(io, causal, scale),
    }
}

/// Inputs q, k, v, y, lse, dy, and perhaps `until`; outputs dq, dk, dv, or all three in one.
pub fn backward(io: &Io, causal: bool, scale: f32) -> Code {
    match kind(io, &[0, 1, 2, 3, 5]) {
        Kind::TensorCore if is_small_backward(&Sizes::new(io), io.arch) => small_backward(io, causal, scale),
        Kind::TensorCore if is_short_backward(&Sizes::new(io), io.arch) => short_backward(io, causal, scale),
        Kind::TensorCore if is_wide_backward(&Sizes::new(io), io.arch, causal, scale) => wide_backward(io, causal, scale),
        Kind::TensorCore => tensor_backward(io, causal, scale),
        Kind::Plain => plain_backward(io, causal, scale),
    }
}

/// The largest head dimension for which the plain kernels' tiles fit into shared memory, forward and backward. The pass declines larger ones.
pub const LONGEST_HEAD: usize = 384;

/// A thread of a plain kernel owns r x r scores. Returns r and bytes: the largest r whose `heads` tiles of 16 r rows [d] and
/// `squares` tiles of scores fit into shared memory.
fn plain_tile(d: usize, heads: usize, squares: usize) -> (usize, usize) {
    let bytes = |r: usize| 4 * 16 * r * (heads * (d.next_multiple_of(16) + 1) + squares * (16 * r + 1));
    let fits = [4, 2, 1].into_iter().find(|&r| bytes(r) <= Arch::LEAST_SHARED && r * d.div_ceil(16) <= 32);
    let r = fits.unwrap_or_else(|| panic!("attention has no kernel for a head dimension of {d}; the plain one takes up to {LONGEST_HEAD}"));
    (r, bytes(r))
}

fn plain_forward(io: &Io, causal: bool, scale: f32) -> Code {
    let s = Sizes::new(io);
    let (r, shared) = plain_tile(s.d, 2, 1);
    let source = [UNTIL, include_str!("plain.cuh"), include_str!("plain_forward.cu")].concat();
    s.define(Launch::new(&source, "attention_forward"), causal)
        .define_f32("SCALE", scale)
        .define_type("TQ", io.x[0].dtype)
        .define_type("TK", io.x[1].dtype)
        .define("R", r)
        .grid(s.batch * s.heads * s.time.div_ceil(16 * r), 1, 1)
        .shared(shared)
        .all(io)
        .code()
}

fn plain_backward(io: &Io, causal: bool, scale: f32) -> Code {
    let s = Sizes::new(io);
    let (r, shared) = plain_tile(s.d, 4, 2);
    let source = [UNTIL, include_str!("plain.cuh"), include_str!("plain_backward.cu")].concat();
    // The same text for all three: one entry in the cache of compiled kernels.
    let grads = Grads::new(io, &s);
    let launch = |entry| {
        grads
            .define(s.define(Launch::new(&source, entry), causal))
            .define_f32("SCALE", scale)
            .define_type("TQ", io.x[0].dtype)
            .define_type("TK", io.x[1].dtype)
            .define_type("TY", io.x[3].dtype)
            .define_type("TG", io.x[5].dtype)
            .define("R", r)
    };
    let (q, k, v, y, lse, dy) = (At::X(0).into(), At::X(1).into(), At::X(2).into(), At::X(3).into(), At::X(4).into(), At::X(5).into());
    let ([dq, dk, dv], along) = (grads.at, At::Work.into());
    let given = [&[q, k, v, lse, dy], s.until()].concat();
    let steps = vec![
        launch("attention_along").grid(s.queries().div_ceil(8), 1, 1).args(&[y, dy, along]),
        launch("attention_dq")
            .grid(s.batch * s.heads * s.time.div_ceil(16 * r), 1, 1)
            .shared(shared)
            .args(&[&given[..], &[along, dq]].concat()),
        launch("attention_dkdv")
            .grid(s.batch * s.kv * s.keys.div_ceil(16 * r), 1, 1)
            .shared(shared)
            .args(&[&given[..], &[along, dk, dv]].concat()),
    ];
    Code { steps: steps.into_iter().map(Step::Launch).collect(), workspace: 4 * s.queries() }
}

/// 64 rows of a tile for each unit, as many as fit without register spills on sm_80 and sm_90a: 234 of 255 registers for the forward kernel with
/// head dimension 64, and 244 for dk and dv with 128; twice as many rows would spill.
fn forward_rows(d: usize) -> usize {
    if d <= 64 { 2 } else { 1 }
}

fn backward_rows(d: usize) -> usize {
    if d <= 32 { 2 } else { 1 }
}

fn tensor_forward(io: &Io, causal: bool, scale: f32) -> Code {
    let s = Sizes::new(io);
    let rows = forward_rows(s.d);
    let source = [include_str!("mma.cuh"), UNTIL, REACH, include_str!("tensor.cuh"), include_str!("tensor_forward.cu")].concat();
    // A masked score is minus infinity, and 0 times that is NaN.
    let positive = scale.abs().max(f32::MIN_POSITIVE);
    s.define(Launch::new(&source, "attention_forward"), causal)
        .define_type("T", io.x[0].dtype)
        .define_f32("SCALE_2", positive * std::f32::consts::LOG2_E)
        .define("NEGATIVE", (scale < 0.0) as u8)
        .define("M_Q", rows)
        .grid(s.batch * s.heads * s.time.div_ceil(64 * rows), 1, 1)
        .block(128)
        .shared(s.tile(4 * 64))
        .all(io)
        .code()
}

fn tensor_backward(io: &Io, causal: bool, scale: f32) -> Code {
    let s = Sizes::new(io);
    let rows = backward_rows(s.d);
    let stage = if s.d <= 64 { 64 } else { 32 }; // queries per stage, so that two blocks fit on a multiprocessor
    let source = [include_str!("mma.cuh"), UNTIL, REACH, include_str!("tensor.cuh"), STATS, include_str!("tensor_backward.cu")].concat();
    // The same text for all three: one entry in the cache of compiled kernels.
    let grads = Grads::new(io, &s);
    let launch = |entry| {
        grads
            .define(s.define(Launch::new(&source, entry), causal))
            .define_type("T", io.x[0].dtype)
            .define_f32("SCALE", scale)
            .define_f32("SCALE_2", scale * std::f32::consts::LOG2_E)
            .define("M_Q", rows)
            .define("M_K", rows)
            .define("STAGE", stage)
    };
    let (q, k, v, y, lse, dy) = (At::X(0).into(), At::X(1).into(), At::X(2).into(), At::X(3).into(), At::X(4).into(), At::X(5).into());
    let ([dq, dk, dv], stats) = (grads.at, At::Work.into());
    let given = [&[q, k, v, dy], s.until()].concat();
    let steps = vec![
        launch("attention_stats").grid(s.queries().div_ceil(256 / (s.d / 8)), 1, 1).args(&[y, lse, dy, stats]),
        launch("attention_dq")
            .grid(s.batch * s.heads * s.time.div_ceil(64 * rows), 1, 1)
            .block(128)
            .shared(s.tile(4 * 64))
            .args(&[&given[..], &[stats, dq]].concat()),
        launch("attention_dkdv")
            .grid(s.batch * s.kv * s.keys.div_ceil(64 * rows), 1, 1)
            .block(128)
            .shared(s.tile(2 * 64 * rows + 4 * stage) + 2 * stage * 8)
            .args(&[&given[..], &[stats, dk, dv]].concat()),
    ];
    Code { steps: steps.into_iter().map(Step::Launch).collect(), workspace: 8 * s.queries() }
}

/// Whether the wgmma kernels apply: they need compute capability 9.0, rows aligned to 16 bytes, 64 queries per warp group, and a positive scale.
fn is_wide(s: &Sizes, arch: Arch, scale: f32) -> bool {
    arch.sm == 90 && matches!(s.d, 64 | 128) && s.packed && s.time >= 128 && scale >= f32::MIN_POSITIVE
}

fn wide_forward(io: &Io, causal: bool, scale: f32) -> Code {
    let (s, dtype) = (Sizes::new(io), io.x[0].dtype);
    // As many warp groups as have enough registers for their scores and sums.
    let (groups, stages) = if s.d == 64 { (3, 3) } else { (2, 2) };
    let scores = wgmma::product("scores", 128, dtype, Left::Rows, false);
    let values = wgmma::product("add_values", s.d, dtype, Left::Registers, true);
    let source = [wgmma::TEXT, &scores, &values, UNTIL, REACH, order::TEXT, include_str!("pieces.cuh"), include_str!("wgmma_forward.cu")];
    let blocks = query_pieces(&s, groups).min(io.arch.multiprocessors as usize);
    let work = Work {
        causal,
        streams: s.batch * s.kv,
        bytes: s.batch * s.kv * s.keys * s.d * 4, // keys and values
        neighbours: s.heads / s.kv / heads_together(&s, groups),
        blocks,
    };
    let mut launch = Launch::new(&source.concat(), "attention_forward");
    if s.d == 128 && work.is_from_dram() {
        launch = launch.define("ORDER", "in_pairs").define("BLOCKS", blocks);
    }
    s.define(launch, causal)
        .define_type("T", dtype)
        .define_f32("SCALE_2", scale * std::f32::consts::LOG2_E)
        .define("WARP_GROUPS", groups)
        .define("STAGES", stages)
        .grid(blocks, 1, 1)
        .block(128 * (groups + 1))
        // Two stages of queries, more of keys, values and `until`, and padding for alignment.
        .shared(2 * (64 * groups + stages * 128) * s.d * 2 + stages * 128 * 4 + 1024)
        .all(io)
        .code()
}

/// How many heads a block of `groups` times 64 queries takes at once: several that read the same keys, if there are such.
fn heads_together(s: &Sizes, groups: usize) -> usize {
    let several = if groups.is_multiple_of(2) { 2 } else { groups };
    if (s.heads / s.kv).is_multiple_of(several) { several } else { 1 }
}

/// Work items for blocks of `groups` times 64 queries.
fn query_pieces(s: &Sizes, groups: usize) -> usize {
    let heads = heads_together(s, groups);
    s.batch * s.heads / heads * s.time.div_ceil(64 * groups / heads)
}

/// The bytes that ds may take. Where a batch needs more, its examples are processed one group after another, or their heads.
const MOST_DS: usize = 640 << 20;

/// The same where heads are so long that fewer would leave the GPU's multiprocessors idle.
const MOST_LONG_DS: usize = 1536 << 20;

/// Bytes of ds of the heads that read one head of keys, in 16-bit tiles of 64 x 64; tiles above the diagonal are not stored.
fn ds_bytes(s: &Sizes, causal: bool) -> usize {
    let (rows, columns) = (s.time.div_ceil(64), s.keys.div_ceil(64));
    let tiles = if causal { rows * (rows - 1) / 2 + rows * ((63 + s.keys - s.time) / 64 + 1) } else { rows * columns };
    s.heads / s.kv * tiles * 8192
}

/// How many heads of keys are processed at once: as many as `MOST_DS` has room for, or as keep the multiprocessors busy.
fn heads_at_once(s: &Sizes, arch: Arch, causal: bool) -> usize {
    let busy = (3 * arch.multiprocessors as usize).div_ceil(s.keys.div_ceil(128));
    let (own, bytes) = (s.batch * s.kv, ds_bytes(s, causal));
    (MOST_DS / bytes).max(busy.min(MOST_LONG_DS / bytes)).min(own)
}

/// `all` in as few shares of at most `most` as there can be, none much smaller than another: (first, count).
fn shares(all: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let each = all.div_ceil(all.div_ceil(most));
    (0..all).step_by(each).map(move |first| (first, each.min(all - first)))
}

fn is_wide_backward(s: &Sizes, arch: Arch, causal: bool, scale: f32) -> bool {
    is_wide(s, arch, scale) && heads_at_once(s, arch, causal) > 0
}

/// The backward pass with ds stored in memory: five matmuls. The other way without atomics recomputes ds for dq, seven matmuls: with 16 x 512
/// tokens and 16 heads of 128 those two are 20 GFLOP, some 45 us, while ds is 75 MB, 35 us to write and read next to other matmuls.
fn wide_backward(io: &Io, causal: bool, scale: f32) -> Code {
    let (s, dtype) = (Sizes::new(io), io.x[0].dtype);
    let queries = if s.d == 64 { 128 } else { 64 }; // at a time, as many as there are registers for
    let products = [
        wgmma::product("scores", queries, dtype, Left::Rows, false),
        wgmma::product("add_rows", s.d, dtype, Left::Registers, true),
        wgmma::product("add_transposed", s.d, dtype, Left::Transposed, true),
    ]
    .concat();
    let source =
        [wgmma::TEXT, &products, UNTIL, REACH, order::TEXT, include_str!("pieces.cuh"), STATS, include_str!("wgmma_backward.cu")].concat();
    let grads = Grads::new(io, &s);
    // Blocks of both kernels, for `heads` of the heads in all examples of `s`.
    let blocks = |s: &Sizes, heads: usize| {
        let here = Sizes { heads, kv: heads * s.kv / s.heads, ..*s };
        [here.batch * here.kv * s.keys.div_ceil(128), query_pieces(&here, 4)].map(|pieces| pieces.min(io.arch.multiprocessors as usize))
    };
    let launch = |s: &Sizes, heads: usize, entry| {
        let launch = grads
            .define(s.define(Launch::new(&source, entry), causal))
            .define_type("T", dtype)
            .define_f32("SCALE", scale)
            .define_f32("SCALE_2", scale * std::f32::consts::LOG2_E)
            .define("HEADS_HERE", heads)
            .define("QUERY_ROWS", queries);
        let [of_keys, of_queries] = blocks(s, heads);
        let work = Work {
            causal,
            streams: s.batch * heads * s.kv / s.heads,
            bytes: s.batch * heads * s.time * s.d * 4, // queries and dy
            neighbours: 1,
            blocks: of_keys,
        };
        match work.is_from_dram() {
            true => launch.define("ORDER", "in_pairs").define("KEY_BLOCKS", of_keys).define("BLOCKS", of_queries),
            false => launch,
        }
    };
    let stats = (8 * s.queries()).next_multiple_of(1024);
    let (y, lse, dy) = (At::X(3).into(), At::X(4).into(), At::X(5).into());
    let rows = s.queries().div_ceil(256 / (s.d / 8));
    let mut steps = vec![launch(&s, s.heads, "attention_stats").grid(rows, 1, 1).args(&[y, lse, dy, At::Work.into()])];
    let at_once = heads_at_once(&s, io.arch, causal);
    // Whole examples, or some heads of one: (first example, examples, first head of keys, heads of keys).
    let parts: Vec<[usize; 4]> = match at_once / s.kv {
        0 => (0..s.batch).flat_map(|b| shares(s.kv, at_once).map(move |(kv, count)| [b, 1, kv, count])).collect(),
        most => shares(s.batch, most).map(|(b, count)| [b, count, 0, s.kv]).collect(),
    };
    for [first, examples, kv, heads_of_keys] in parts {
        let part = Sizes { batch: examples, ..s };
        let (group, heads) = (s.heads / s.kv, heads_of_keys * s.heads / s.kv);
        // The part of a tensor that these have, whose time steps are `row` elements apart.
        let of_q = |at: Place, row: usize| at.plus(2 * (first * s.time * row + kv * group * s.d));
        let of_k = |at: Place, row: usize| at.plus(2 * (first * s.keys * row + kv * s.d));
        let [q_row, k_row, v_row] = s.rows;
        let (q, dy) = (of_q(At::X(0).into(), q_row), of_q(At::X(5).into(), s.heads * s.d));
        let (k, v) = (of_k(At::X(1).into(), k_row), of_k(At::X(2).into(), v_row));
        let dq = of_q(grads.at[0], grads.rows[0]);
        let [dk, dv] = [1, 2].map(|i| of_k(grads.at[i], grads.rows[1]));
        let until: &[Place] = if s.masked { &[At::X(6).plus(first * 4 * s.keys)] } else { &[] };
        let (along, tiles) = (At::Work.plus(8 * s.time * (first * s.heads + kv * group)), At::Work.plus(stats));
        let [of_keys, of_queries] = blocks(&part, heads);
        // Two stages of keys and values; three of queries, dy and two statistics.
        steps.push(
            launch(&part, heads, "attention_dkdv")
                .grid(of_keys, 1, 1)
                .block(384)
                .shared(2 * 2 * 128 * s.d * 2 + 3 * (2 * queries * s.d * 2 + 2 * queries * 4))
                .args(&[&[q, k, v, dy], until, &[along, tiles, dk, dv]].concat()),
        );
        // Four stages of 64 keys and four tiles of ds.
        steps.push(
            launch(&part, heads, "attention_dq")
                .grid(of_queries, 1, 1)
                .block(640)
                .shared(4 * (64 * s.d * 2 + 4 * 8192) + 1024)
                .args(&[&[k], until, &[tiles, dq]].concat()),
        );
    }
    Code { steps: steps.into_iter().map(Step::Launch).collect(), workspace: stats + at_once * ds_bytes(&s, causal) }
}

const SHORT: [&str; 4] = [include_str!("mma.cuh"), UNTIL, REACH, include_str!("tensor.cuh")];

/// Whether a block may take all queries and keys of a head; there must be enough heads to keep the GPU busy.
fn is_short(s: &Sizes, arch: Arch, longest: usize) -> bool {
    let heads = 4 * s.batch * s.heads >= arch.multiprocessors as usize;
    matches!(s.d, 32 | 64) && s.time == s.keys && s.time <= longest && s.packed && !s.masked && heads
}

/// 96 rows fit without register spills; more would not.
fn is_short_backward(s: &Sizes, arch: Arch) -> bool {
    is_short(s, arch, 96) && s.kv == s.heads
}

/// A launch with 16 queries per warp and `tiles` tiles of rows in shared memory.
fn short(io: &Io, entry: &'static str, source: &str, causal: bool, tiles: usize) -> Launch {
    let s = Sizes::new(io);
    let rows = s.time.next_multiple_of(32);
    s.define(Launch::new(&[&SHORT[..], &[source]].concat().concat(), entry), causal)
        .define_type("T", io.x[0].dtype)
        .define("SIDE", rows)
        .define("THREADS", 2 * rows)
        .grid(s.batch * s.heads, 1, 1)
        .block(2 * rows)
        .shared(s.tile(tiles * rows) + 8 * rows)
        .all(io)
}

fn short_forward(io: &Io, causal: bool, scale: f32) -> Code {
    // A masked score is minus infinity, and 0 times that is NaN.
    let positive = scale.abs().max(f32::MIN_POSITIVE);
    short(io, "attention_forward", include_str!("short_forward.cu"), causal, 3)
        .define_f32("SCALE_2", positive * std::f32::consts::LOG2_E)
        .define("NEGATIVE", (scale < 0.0) as u8)
        .define("RESIDENT", if io.x[0].shape[1] <= 96 { 3 } else { 2 })
        .code()
}

fn short_backward(io: &Io, causal: bool, scale: f32) -> Code {
    let grads = Grads::new(io, &Sizes::new(io));
    let [dq, dk, dv] = grads.at;
    let given = [0, 1, 2, 3, 4, 5].map(|i| At::X(i).into());
    grads
        .define(short(io, "attention_backward", include_str!("short_backward.cu"), causal, 4))
        .args(&[&given[..], &[dq, dk, dv]].concat())
        .define_f32("SCALE", scale)
        .define_f32("SCALE_2", scale * std::f32::consts::LOG2_E)
        .define("RESIDENT", 2)
        .code()
}

const SMALL: [&str; 5] = [include_str!("mma.cuh"), UNTIL, REACH, include_str!("tensor.cuh"), include_str!("small.cuh")];

/// Queries or keys of a warp.
const SMALL_ROWS: usize = 2;

/// Bytes of k and v of one head in shared memory.
fn small_keys(s: &Sizes) -> usize {
    4 * s.d * s.keys.next_multiple_of(32)
}

/// For a head dimension of 16, rows in whole packs, keys that fit into shared memory (up to 1584 on compute capability 9.0), and no `until`.
fn is_small_forward(s: &Sizes) -> bool {
    s.d == 16 && s.packed && !s.masked && small_keys(s) <= Arch::LEAST_SHARED
}

fn small_forward(io: &Io, causal: bool, scale: f32) -> Code {
    let s = Sizes::new(io);
    let tiles = s.time.div_ceil(16 * SMALL_ROWS);
    // Two tiles or more per warp, so that a long one is paired with a short one; and enough warps to load the keys.
    let warps = tiles.div_ceil(2).clamp(4, 8);
    let blocks = 2 * io.arch.multiprocessors as usize; // that run at once
    let parts = (blocks / (s.batch * s.heads)).min(tiles / (2 * warps)).max(1);
    let source = [&SMALL[..], &[include_str!("small_forward.cu")]].concat().concat();
    // A masked score is minus infinity, and 0 times that is NaN.
    let positive = scale.abs().max(f32::MIN_POSITIVE);
    s.define(Launch::new(&source, "attention_forward"), causal)
        .define_type("T", io.x[0].dtype)
        .define_f32("SCALE_2", positive * std::f32::consts::LOG2_E)
        .define("NEGATIVE", (scale < 0.0) as u8)
        .define("M_Q", SMALL_ROWS)
        .define("WARPS", warps)
        .define("PARTS", parts)
        .grid(s.batch * s.heads * parts, 1, 1)
        .block(32 * warps)
        .shared(small_keys(&s))
        .all(io)
        .code()
}

/// Bytes of 16 queries in shared memory: q and dy in 16 bits, dq and two statistics in f32, and the counter of warps that have added.
fn small_tile(d: usize) -> usize {
    16 * d * (2 + 2 + 4) + 16 * (8 + 4) + 16
}

/// Into how many blocks the queries of a head must be split to fit into shared memory.
fn small_split(s: &Sizes, arch: Arch) -> usize {
    s.time.div_ceil(16).div_ceil(arch.shared_limit() / small_tile(s.d))
}

/// For a head dimension of 16, and up to twice the queries that shared memory holds: up to 3296 on compute capability 9.0.
fn is_small_backward(s: &Sizes, arch: Arch) -> bool {
    s.d == 16 && s.packed && !s.masked && small_split(s, arch) <= 2
}

fn small_backward(io: &Io, causal: bool, scale: f32) -> Code {
    let s = Sizes::new(io);
    // One block per multiprocessor; a head may have up to four blocks.
    let idle = io.arch.multiprocessors as usize / (s.batch * s.heads);
    let split = idle.min(4).min(s.time / 32).max(small_split(&s, io.arch));
    // 16 warps with 128 registers per thread use all there are. Two rounds or more, so that long and short queries are paired.
    let tiles = s.keys.div_ceil(16 * SMALL_ROWS);
    let warps = tiles.div_ceil(tiles.div_ceil(16).max(2));
    let source = [&SMALL[..], &[include_str!("small_backward.cu")]].concat().concat();
    let grads = Grads::new(io, &s);
    let launch = |entry| {
        grads
            .define(s.define(Launch::new(&source, entry), causal))
            .define_type("T", io.x[0].dtype)
            .define_f32("SCALE", scale)
            .define_f32("SCALE_2", scale * std::f32::consts::LOG2_E)
            .define("M_K", SMALL_ROWS)
            .define("WARPS", warps)
            .define("SPLIT", split)
    };
    let (q, k, v, y, lse, dy) = (At::X(0).into(), At::X(1).into(), At::X(2).into(), At::X(3).into(), At::X(4).into(), At::X(5).into());
    let [dq, dk, dv] = grads.at;
    // If several blocks have partial dk and dv, these are summed afterwards.
    let blocks = s.batch * s.heads * split;
    let parts = if blocks > s.batch * s.kv { 4 * blocks * s.keys * s.d } else { 0 };
    let (to_k, to_v) = if parts > 0 { (At::Work.into(), At::Work.plus(parts)) } else { (dk, dv) };
    let mut steps = vec![
        launch("attention_backward")
            .grid(blocks, 1, 1)
            .block(32 * warps)
            .shared(s.time.div_ceil(16).div_ceil(split) * small_tile(s.d))
            .args(&[q, k, v, y, lse, dy, dq, to_k, to_v]),
    ];
    if parts > 0 {
        let chunks = 2 * s.batch * s.kv * s.keys * s.d / 8;
        steps.push(launch("attention_parts").grid(chunks.div_ceil(256), 1, 1).args(&[to_k, to_v, dk, dv]));
    }
    Code { steps: steps.into_iter().map(Step::Launch).collect(), workspace: 2 * parts }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::Meta;

    /// The launches of a gradient, by entry: heads, and byte offsets of the arguments.
    fn launches(batch: usize, time: usize, heads: usize, kv: usize, entry: &str) -> Vec<(usize, Vec<usize>)> {
        let meta = |heads: usize| Meta::new(&[batch, time, heads, 64], DType::BF16);
        let lse = Meta::f32(&[batch, heads, time]);
        let x = [meta(heads), meta(kv), meta(kv), meta(heads), lse, meta(heads)];
        let io = Io::plain(&x, &x[..3], Arch { sm: 90, multiprocessors: 132 });
        let code = wide_backward(&io, true, 0.125);
        let of = |l: &Launch| {
            let heads = l.defines.iter().find(|d| d.0 == "HEADS_HERE").unwrap().1.parse().unwrap();
            (heads, l.args.iter().map(|a| a.bytes).collect())
        };
        code.steps.iter().filter_map(|s| s.kernel()).filter(|l| l.entry == entry).map(of).collect()
    }

    /// ds of 16k tokens is 257 MiB a head: four at a time keep 132 multiprocessors busy.
    #[test]
    fn long_rows_take_some_heads_at_a_time() {
        let (time, heads) = (16384, 32);
        let stats = 8 * 2 * time * heads;
        let parts = (0..2).flat_map(|b| (0..heads).step_by(4).map(move |h| (b, h)));
        let row = |(b, h): (usize, usize)| 2 * (b * time * heads + h) * 64;
        let along = |(b, h): (usize, usize)| 8 * time * (b * heads + h);
        let dkdv = parts.clone().map(|p| (4, vec![row(p), row(p), row(p), row(p), along(p), stats, row(p), row(p)]));
        assert_eq!(launches(2, time, heads, heads, "attention_dkdv"), dkdv.collect::<Vec<_>>());
        let dq = parts.map(|p| (4, vec![row(p), stats, row(p)]));
        assert_eq!(launches(2, time, heads, heads, "attention_dq"), dq.collect::<Vec<_>>());
    }

    /// Examples in parts of the same size, and all heads at once.
    #[test]
    fn short_rows_take_whole_examples() {
        let found: Vec<_> = launches(64, 1024, 12, 4, "attention_dkdv").into_iter().map(|(heads, at)| (heads, at[0], at[1])).collect();
        let half = 32 * 1024 * 64 * 2;
        assert_eq!(found, [(12, 0, 0), (12, half * 12, half * 4)]);
        assert_eq!(shares(10, 4).collect::<Vec<_>>(), [(0, 4), (4, 4), (8, 2)]);
    }
}
