//! KV caches [batch, capacity, kv_heads, d], of which the first `past` rows are filled. `past` is an i32 `[1]` in device memory, so that the same program
//! runs for every token without waiting for the host; it is clamped to 0..=capacity - time.

mod decode;

pub use decode::{DecodeAttention, Rotation, decode_attention};

use crate::cpu::{View, ViewMut};
use crate::kernel::{At, Code, Io, Launch};
use crate::meta::{DType, Layout, Meta, block_stride};
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use crate::ops::reduce::packs::{PACKS, pack};
use crate::ops::rope::Pairs;
use crate::record::Var;

/// Writes rows past, past + 1, .. of both caches, in place. Inputs: caches of keys and values, past, k and v [batch, time, kv_heads, d]; with a smaller
/// batch, each sequence is written to several consecutive sequences of the caches. Outputs: the caches.
#[derive(Debug)]
pub struct CacheWrite;

/// The first new row: `past`, clamped.
fn held(past: &View, capacity: usize, time: usize) -> usize {
    (past.i32()[0].max(0) as usize).min(capacity - time)
}

/// Distance between consecutive rows [kv_heads, d], in elements.
fn row(x: &View) -> usize {
    block_stride(x.shape, x.strides, 2).expect("blocks evenly apart")
}

/// Copies rows [batch, time, ..] of x, perhaps with a smaller batch, to row `past` of a cache [batch, capacity, ..].
fn write(cache: &mut ViewMut, x: &View, past: usize) {
    let (capacity, time, wide, apart) = (cache.shape[1], x.shape[1], x.shape[2] * x.shape[3], row(x));
    let each = cache.shape[0] / x.shape[0];
    for (b, part) in cache.f32().chunks_mut(capacity * wide).enumerate() {
        for (t, to) in part[past * wide..].chunks_mut(wide).take(time).enumerate() {
            to.copy_from_slice(&x.f32()[(b / each * time + t) * apart..][..wide]);
        }
    }
}

/// Checks that the rows fit into the caches.
fn check(caches: &[Meta], past: &Meta, rows: &[Meta]) {
    let (cache, new) = (&caches[0].shape, &rows[0].shape);
    let shapes = cache.len() == 4 && new.len() == 4 && caches[1].shape == *cache && rows[1].shape == *new;
    let fits = shapes && cache[0] == new[0] && cache[2..] == new[2..] && new[1] <= cache[1];
    assert!(fits && *past == Meta::new(&[1], DType::I32), "rows {rows:?} for caches {caches:?} at {past:?}");
}

impl Op for CacheWrite {
    fn name(&self) -> &'static str {
        "cache_write"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let each = |m: &Meta| Meta::new(&[&[m.shape[0] * (x[0].shape[0] / m.shape[0])], &m.shape[1..]].concat(), m.dtype);
        check(&x[..2], &x[2], &[each(&x[3]), each(&x[4])]);
        x[..2].to_vec()
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![(0, 0), (1, 1)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let past = held(&x[2], y[0].shape[1], x[3].shape[1]);
        write(&mut y[0], &x[3], past);
        write(&mut y[1], &x[4], past);
    }

    /// k and v may be column slices of one merged projection.
    fn layout(&self, input: usize) -> Layout {
        if input < 3 { Layout::Contiguous } else { Layout::Blocks(2) }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let (batch, time, wide) = (io.x[0].shape[0], io.x[3].shape[1], io.x[3].shape[2] * io.x[3].shape[3]);
        let rows = [3, 4].map(|i| block_stride(&io.x[i].shape, &io.strides[i], 2).expect("blocks evenly apart"));
        let types = [0, 1, 3, 4].map(|i| io.x[i].dtype);
        let vec = pack(&types, &[wide, rows[0], rows[1], io.offsets[3], io.offsets[4]]);
        Launch::new(&[PACKS, include_str!("write.cu")].concat(), "cache_write")
            .define_type("CK", types[0])
            .define_type("CV", types[1])
            .define_type("TK", types[2])
            .define_type("TV", types[3])
            .define("BATCH", batch)
            .define("EACH", batch / io.x[3].shape[0])
            .define("TIME", time)
            .define("CAPACITY", io.x[0].shape[1])
            .define("WIDE", wide)
            .define("K_ROW", rows[0])
            .define("V_ROW", rows[1])
            .define("VEC", vec)
            .grid((batch * time * wide / vec).div_ceil(256), 1, 1)
            .args(&[At::X(2).into(), At::X(3).into(), At::X(4).into(), At::Y(0).into(), At::Y(1).into()])
            .code()
    }

    fn axes(&self, _: &[Meta], _: usize) -> Vec<Axis> {
        vec![Axis::first(&[true, true, false, true, true], 2)]
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory((1 + x[0].shape[0] / x[3].shape[0]) * (x[3].bytes() + x[4].bytes()))
    }
}

/// Writes k and v [batch, time, kv_heads, d] to the caches (of keys, of values) from row `past` on; with a smaller batch, each sequence is written to
/// several consecutive sequences of the caches. Returns the updated caches.
#[track_caller]
pub fn cache_write<'g>(caches: (Var<'g>, Var<'g>), past: Var<'g>, k: Var<'g>, v: Var<'g>) -> (Var<'g>, Var<'g>) {
    let y = past.recorder().op(CacheWrite, &[caches.0, caches.1, past, k, v]);
    (y[0], y[1])
}

macro_rules! rows {
    ($b:literal, $capacity:literal, $t:literal, $kv:literal, $d:literal, $past:literal) => {
        &[
            In(&[$b, $capacity, $kv, $d], Fill::Frozen),
            In(&[$b, $capacity, $kv, $d], Fill::Frozen),
            In(&[1], Fill::Index($past)),
            In(&[$b, $t, $kv, $d], Fill::Frozen),
            In(&[$b, $t, $kv, $d], Fill::Frozen),
        ]
    };
}

/// Inputs of `rows`, then queries, then perhaps `until`.
macro_rules! decoded {
    ($b:literal, $capacity:literal, $t:literal, $h:literal, $kv:literal, $d:literal, $past:literal $(, $until:literal)?) => {
        &[
            In(&[$b, $capacity, $kv, $d], Fill::Frozen),
            In(&[$b, $capacity, $kv, $d], Fill::Frozen),
            In(&[1], Fill::Index($past)),
            In(&[$b, $t, $kv, $d], Fill::Frozen),
            In(&[$b, $t, $kv, $d], Fill::Frozen),
            In(&[$b, $t, $h, $d], Fill::Frozen),
            $(In(&[$b, $capacity], Fill::Target($until)),)?
        ]
    };
}

/// Inputs of `rows` for one query, which is next; then `until`, tables for each place, and weights of norms.
macro_rules! rotated {
    ($b:literal, $capacity:literal, $h:literal, $kv:literal, $d:literal, $past:literal) => {
        &[
            In(&[$b, $capacity, $kv, $d], Fill::Frozen),
            In(&[$b, $capacity, $kv, $d], Fill::Frozen),
            In(&[1], Fill::Index($past)),
            In(&[$b, 1, $kv, $d], Fill::Frozen),
            In(&[$b, 1, $kv, $d], Fill::Frozen),
            In(&[$b, 1, $h, $d], Fill::Frozen),
            In(&[$b, $capacity], Fill::Target($capacity)),
            In(&[$b, 1, $d / 2], Fill::Frozen),
            In(&[$b, 1, $d / 2], Fill::Frozen),
            In(&[$d], Fill::Frozen),
            In(&[$d], Fill::Frozen),
        ]
    };
}

fn written<'g>(x: &[Var<'g>]) -> Vec<Var<'g>> {
    let (k, v) = cache_write((x[0], x[1]), x[2], x[3], x[4]);
    vec![k, v]
}

fn decoded<'g>(x: &[Var<'g>]) -> Vec<Var<'g>> {
    let (y, (k, v)) = decode_attention(x[5], x[3], x[4], (x[0], x[1]), x[2], x.get(6).copied(), 0.5);
    vec![y, k, v]
}

/// Inputs of `decoded` for one query, then cosines and sines, then the norms' weights if `rotation` has norms.
fn rotated<'g>(x: &[Var<'g>], rotation: Rotation, masked: bool) -> Vec<Var<'g>> {
    let inputs = [&[x[5], x[3], x[4], x[0], x[1], x[2]], &x[6..]].concat();
    assert_eq!(inputs.len(), 8 + masked as usize + 2 * rotation.norm.is_some() as usize);
    x[0].recorder().op(DecodeAttention { scale: 0.5, rotation: Some(rotation) }, &inputs)
}

/// With caches that are full except for the new row, as a benchmark should read them.
fn full<'g>(x: &[Var<'g>]) -> Vec<Var<'g>> {
    let past = x[0].recorder().constant(&[1], vec![(x[0].shape()[1] - 1) as f32]).cast(DType::I32);
    vec![decode_attention(x[5], x[3], x[4], (x[0], x[1]), past, x.get(6).copied(), 0.5).0]
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("written", rows!(3, 20, 4, 2, 8, 17), written),
    Case::new("written at odd places", rows!(2, 9, 2, 1, 5, 20), written),
    Case::new("written whole", rows!(2, 6, 6, 2, 16, 9), written),
    Case::new(
        "written, each for three",
        &[
            In(&[6, 9, 2, 8], Fill::Frozen),
            In(&[6, 9, 2, 8], Fill::Frozen),
            In(&[1], Fill::Index(5)),
            In(&[2, 4, 2, 8], Fill::Frozen),
            In(&[2, 4, 2, 8], Fill::Frozen),
        ],
        written,
    ),
    Case::new(
        "written, columns of one product",
        &[In(&[2, 7, 96], Fill::Frozen), In(&[2, 7, 2, 16], Fill::Frozen), In(&[1], Fill::Index(5))],
        |x| {
            let part = |at: usize| x[0].slice(1, 0, 3).slice(2, at, at + 32).reshape(&[2, 3, 2, 16]);
            written(&[x[1], x[1] * 2.0, x[2], part(32), part(64)])
        },
    ),
    Case::new("decoded", decoded!(3, 40, 1, 4, 2, 16, 40), decoded),
    Case::new("decoded, masked", decoded!(3, 70, 1, 4, 2, 64, 70, 70), decoded),
    Case::new("decoded, several queries", decoded!(2, 50, 3, 6, 2, 32, 48, 50), decoded),
    Case::new("decoded, many rows to a head", decoded!(1, 40, 5, 6, 1, 24, 36, 40), decoded),
    Case::new("decoded, odd heads", decoded!(2, 33, 2, 3, 3, 5, 30, 33), decoded),
    Case::new("decoded, heads of 256", decoded!(1, 300, 1, 2, 2, 256, 300), decoded),
    Case::new("decoded, three splits", decoded!(2, 700, 1, 4, 2, 128, 700, 700), decoded),
    Case::new("decoded, three splits, several queries", decoded!(1, 600, 2, 4, 4, 8, 600, 600), decoded),
    Case::new(
        "decoded, columns of one product",
        &[In(&[2, 40, 2, 16], Fill::Frozen), In(&[2, 40, 2, 16], Fill::Frozen), In(&[1], Fill::Index(40)), In(&[2, 1, 128], Fill::Frozen)],
        |x| {
            let part = |at: usize, heads: usize| x[3].slice(2, at, at + 16 * heads).reshape(&[2, 1, heads, 16]);
            decoded(&[x[0], x[1], x[2], part(64, 2), part(96, 2), part(0, 4)])
        },
    ),
    Case::new("decoded, the first token", decoded!(2, 300, 1, 2, 1, 64, 1), decoded),
    Case::new("rotated", rotated!(3, 40, 4, 2, 16, 40), |x| rotated(x, Rotation { pairs: Pairs::Halves, norm: Some(1e-6) }, true)),
    Case::new("rotated, neighbours", rotated!(2, 300, 6, 2, 24, 300), |x| {
        rotated(x, Rotation { pairs: Pairs::Adjacent, norm: Some(1e-6) }, true)
    }),
    Case::new("rotated, not normed", rotated!(2, 9, 3, 3, 6, 9), |x| rotated(&x[..9], Rotation { pairs: Pairs::Halves, norm: None }, true)),
    Case::new("rotated, one table, not masked", rotated!(3, 70, 10, 1, 64, 70), |x| {
        let tables = [x[7], x[8]].map(|t| t.slice(0, 1, 2).reshape(&[1, 32]));
        let x = [&x[..6], &tables, &x[9..]].concat();
        rotated(&x, Rotation { pairs: Pairs::Halves, norm: Some(1e-5) }, false)
    }),
    Case::new("Qwen3, 164 keys, rotated", rotated!(12, 164, 16, 8, 128, 164), |x| {
        let past = x[0].recorder().constant(&[1], vec![163.0]).cast(DType::I32);
        rotated(&[&x[..2], &[past], &x[3..]].concat(), Rotation { pairs: Pairs::Halves, norm: Some(1e-6) }, true)
    })
    .bench(),
    Case::new("Qwen3, 164 keys", decoded!(12, 164, 1, 16, 8, 128, 164, 164), full).bench(),
    Case::new("Qwen3, 4096 keys", decoded!(12, 4096, 1, 16, 8, 128, 4096, 4096), full).bench(),
    Case::new("Qwen3, one row of 32768 keys", decoded!(1, 32768, 1, 16, 8, 128, 32768), full).bench(),
    Case::new("Qwen3, a prompt written", rows!(12, 164, 64, 8, 128, 1), written).bench(),
];
