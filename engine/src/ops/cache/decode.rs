//! Attention of new tokens over a cache that they are written to.

use super::{check, held, row, write};
use crate::cpu::math::{dot, exp, max, sum};
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, Layout, Meta, block_stride};
use crate::op::{Cost, Grads, Op, no_gradient};
use crate::ops::full::Full;
use crate::ops::reduce::packs::{PACKS, pack};
use crate::record::Var;
use rayon::prelude::*;

/// Inputs: q [batch, time, heads, d]; k, v [batch, time, kv_heads, d]; the caches of both; past; perhaps until, i32 [batch, capacity].
/// Outputs: y [batch, time, heads, d], and the caches with k and v at past, past + 1, ..
///
/// Query t stands at i = past + t and sees key j where j <= i and i <= until[j]: what `attention_until` means by it. One that sees nothing gives zeros.
#[derive(Debug)]
pub struct DecodeAttention {
    pub scale: f32,
}

/// Keys of a block: 128 KiB to read where heads are 128 wide in bf16.
const CHUNK: usize = 256;
/// The most rows of a block, each with a query and an output in registers.
const ROWS: usize = 8;

impl Op for DecodeAttention {
    fn name(&self) -> &'static str {
        "decode_attention"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check(&x[3..5], &x[5], &x[1..3]);
        let (q, k, cache) = (&x[0], &x[1], &x[3]);
        let heads = q.rank() == 4 && q.shape[..2] == k.shape[..2] && q.dim(0) == k.dim(0) && q.dim(1) % k.dim(1) == 0;
        let types = x[1..5].iter().all(|m| m.dtype == k.dtype);
        let masked = x.get(6).is_none_or(|until| *until == Meta::new(&cache.shape[..2], DType::I32));
        assert!(heads && types && masked, "decode_attention of {x:?}");
        vec![q.clone(), x[3].clone(), x[4].clone()]
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![(3, 1), (4, 2)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (time, heads, d, kv) = (x[0].shape[1], x[0].shape[2], x[0].shape[3], x[1].shape[2]);
        let (capacity, apart, q, until) = (y[1].shape[1], row(&x[0]), x[0].f32(), x.get(6).map(|u| u.i32()));
        let past = held(&x[5], capacity, time);
        write(&mut y[1], &x[1], past);
        write(&mut y[2], &x[2], past);
        let [y, keys, values] = y else { unreachable!("three outputs") };
        let (keys, values) = (&*keys.f32(), &*values.f32());
        y.f32().par_chunks_mut(d).enumerate().for_each(|(n, out)| {
            let (h, t, b) = (n % heads, n / heads % time, n / heads / time);
            let (at, i) = (h / (heads / kv) * d, past + t);
            let query = &q[(b * time + t) * apart + h * d..][..d];
            let of = |x: &'_ [f32], j: usize| (b * capacity + j) * kv * d + at..x.len();
            simd(
                #[inline(always)]
                || {
                    let seen = |j: usize| until.is_none_or(|u| i as i64 <= u[b * capacity + j] as i64);
                    let score = |j: usize| if seen(j) { dot(query, &keys[of(keys, j)][..d]) * self.scale } else { f32::NEG_INFINITY };
                    let mut scores: Vec<f32> = (0..=i).map(score).collect();
                    let high = max(&scores);
                    out.fill(0.0);
                    if high == f32::NEG_INFINITY {
                        return;
                    }
                    scores.iter_mut().for_each(|s| *s = exp(*s - high));
                    let inverse = 1.0 / sum(&scores, |s| s);
                    for (j, p) in scores.iter().enumerate() {
                        out.iter_mut().zip(&values[of(values, j)][..d]).for_each(|(o, v)| *o += p * inverse * v);
                    }
                },
            );
        });
    }

    /// q, k and v may be columns of one product.
    fn layout(&self, input: usize) -> Layout {
        if input < 3 { Layout::Blocks(2) } else { Layout::Contiguous }
    }

    fn cuda(&self, io: &Io) -> Code {
        let (q, kv, capacity) = (&io.x[0].shape, io.x[1].shape[2], io.x[3].shape[1]);
        let (batch, time, group, d) = (q[0], q[1], q[2] / kv, q[3]);
        let rows = [0, 1, 2].map(|i| block_stride(&io.x[i].shape, &io.strides[i], 2).expect("blocks evenly apart"));
        let dtype = io.x[1].dtype;
        let vec = pack(&[dtype], &[d, rows[1], rows[2], io.offsets[1], io.offsets[2]]);
        let packs = d / vec;
        let lanes = packs.next_power_of_two().min(32);
        let per = packs.div_ceil(lanes);
        // A row has 2 x per x vec registers; as many rows as leave none in memory.
        let most = (64 / (per * vec)).clamp(1, ROWS);
        let tiles = (time * group).div_ceil(most);
        let r = (time * group).div_ceil(tiles);
        let splits = capacity.div_ceil(CHUNK);
        let blocks = batch * kv * tiles * splits;
        // With few registers for its rows, a thread reads more keys at once; and a block that is alone on its multiprocessor has more warps, to keep
        // the memory busy: their registers are 128.
        let light = r <= 4 && r * per * vec <= 32;
        let unroll = if light { 4 } else { 2 };
        let warps = if light && blocks <= 128 { 16 } else { 8 };
        let launch = |entry| {
            Launch::new(&[PACKS, include_str!("decode.cu")].concat(), entry)
                .define_type("T", dtype)
                .define_type("TQ", io.x[0].dtype)
                .define("BATCH", batch)
                .define("TIME", time)
                .define("CAPACITY", capacity)
                .define("KV", kv)
                .define("GROUP", group)
                .define("D", d)
                .define("Q_ROW", rows[0])
                .define("K_ROW", rows[1])
                .define("V_ROW", rows[2])
                .define("VEC", vec)
                .define("LANES", lanes)
                .define("PER", per)
                .define("R", r)
                .define("UNROLL", unroll)
                .define("CHUNK", CHUNK)
                .define("WARPS", warps)
                .define("MASKED", (io.x.len() > 6) as u8)
                .define_f32("SCALE_2", self.scale * std::f32::consts::LOG2_E)
        };
        let (past, y, partial) = (At::X(5).into(), At::Y(0).into(), At::Work.into());
        let mut args: Vec<Place> = vec![At::X(0).into(), At::X(1).into(), At::X(2).into(), past];
        args.extend((io.x.len() > 6).then_some(Place::from(At::X(6))));
        args.extend([At::Y(1).into(), At::Y(2).into(), y, partial]);
        let first = launch("attention_decode").grid(blocks, 1, 1).block(32 * warps).shared(4 * warps * r * (d + 2)).args(&args);
        if splits == 1 {
            return Code { steps: vec![Step::Launch(first)], workspace: 0 };
        }
        let heads = batch * time * kv * group;
        let second = launch("attention_combine").grid(heads.div_ceil(8), 1, 1).args(&[past, partial, y]);
        Code { steps: vec![Step::Launch(first), Step::Launch(second)], workspace: 4 * heads * splits * (d + 2) }
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    /// As if the caches were full.
    fn cost(&self, x: &[Meta]) -> Cost {
        let flops = 4 * x[0].elements() * x[3].shape[1];
        Cost { flops: flops as u64, ..Cost::memory(2 * x[0].bytes() + 2 * (x[1].bytes() + x[2].bytes()) + x[3].bytes() + x[4].bytes()) }
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let (q, r) = (x[0], x[0].recorder());
        let (k, v) = super::cache_write((x[3], x[4]), x[5], x[1], x[2]);
        let (b, t, h, d) = (q.shape()[0], q.shape()[1], q.shape()[2], q.shape()[3]);
        let (keys, kv) = (k.shape()[1], k.shape()[2]);
        let numbers = |n: usize| (0..n).map(|i| i as f32).collect();
        let past = x[5].cast(DType::F32).max(r.zeros(&[1])).min(r.full(&[1], (keys - t) as f32));
        let query = r.constant(&[t, 1], numbers(t)) + past;
        let mut hidden = query.less(r.constant(&[keys], numbers(keys)));
        if let Some(until) = x.get(6) {
            hidden = hidden.max(until.cast(DType::F32).reshape(&[b, 1, 1, 1, keys]).less(query));
        }
        let put = |x: Var<'g>, value: f32| hidden.choose(r.op1(Full { shape: vec![1], value, dtype: x.dtype() }, &[]), x);
        let q = q.reshape(&[b, t, kv, h / kv, d]).permute(&[0, 2, 3, 1, 4]); // [b, kv, group, t, d]
        let heads = |x: Var<'g>| x.permute(&[0, 2, 1, 3]).reshape(&[b, kv, 1, keys, d]);
        let p = put(put(q.matmul(heads(k).t()) * self.scale, -1e30).softmax(), 0.0);
        let y = p.matmul(heads(v)).permute(&[0, 3, 1, 2, 4]).reshape(&[b, t, h, d]);
        Some(vec![y, k, v])
    }
}

/// Attention of the tokens at past, past + 1, .. over what is cached before them, and over themselves; and the caches with them. See `DecodeAttention`.
#[track_caller]
pub fn decode_attention<'g>(
    q: Var<'g>,
    k: Var<'g>,
    v: Var<'g>,
    caches: (Var<'g>, Var<'g>),
    past: Var<'g>,
    until: Option<Var<'g>>,
    scale: f32,
) -> (Var<'g>, (Var<'g>, Var<'g>)) {
    let inputs: Vec<Var> = [q, k, v, caches.0, caches.1, past].into_iter().chain(until).collect();
    let y = q.recorder().op(DecodeAttention { scale }, &inputs);
    (y[0], (y[1], y[2]))
}
