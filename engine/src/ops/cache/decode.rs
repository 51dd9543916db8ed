//! Attention of new tokens over a KV cache, which their keys and values are written to.

use super::{check, held, row, write};
use crate::cpu::math::{dot, exp, max, sum};
use crate::cpu::{Data, View, ViewMut, simd};
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, Layout, Meta, block_stride, contiguous};
use crate::op::{self, Cost, Grads, Narrow, Op, Port, no_gradient};
use crate::ops::full::Full;
use crate::ops::reduce::packs::{PACKS, pack};
use crate::ops::rope::{self, Pairs, Rope};
use crate::record::Var;
use rayon::prelude::*;

/// Inputs: q [batch, time, heads, d]; k, v [batch, time, kv_heads, d]; the caches of both; past; perhaps until, i32 [batch, capacity]; and the inputs of `rotation`.
/// Outputs: y [batch, time, heads, d], and the caches with k and v at past, past + 1, ..
///
/// Query t is at position i = past + t and sees key j if j <= i and i <= until`[j]`, as in `attention_until`. A query that sees no key gives zeros.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodeAttention {
    /// Factor of the scores.
    pub scale: f32,
    /// Applied to q and k first, for one token; set by the pass `fuse-decode`.
    pub rotation: Option<Rotation>,
}

/// RoPE of q and k, with cosines and sines as inputs (see `Rope`); before it perhaps an RMS norm, with weights `[d]` for q and for k as inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotation {
    /// Which elements of a head RoPE rotates together.
    pub pairs: Pairs,
    /// QK-norm before RoPE, with this epsilon.
    pub norm: Option<f32>,
}

impl DecodeAttention {
    /// The index of `rotation`'s first input.
    fn more(&self, inputs: usize) -> usize {
        inputs - self.rotation.map_or(0, |t| if t.norm.is_some() { 4 } else { 2 })
    }

    /// Input 0 or 1, normed and rotated, as contiguous rows.
    fn rotated(&self, input: usize, x: &[View], to: &mut [f32]) {
        let (Some(rotation), more) = (self.rotation, self.more(x.len())) else { unreachable!("only where `rotation` is set") };
        let (heads, d, apart) = (x[input].shape[2], x[input].shape[3], row(&x[input]));
        for (place, to) in to.chunks_mut(heads * d).enumerate() {
            to.copy_from_slice(&x[input].f32()[place * apart..][..heads * d]);
            for head in to.chunks_mut(d) {
                if let Some(eps) = rotation.norm {
                    let scale = 1.0 / (sum(head, |v| v * v) / d as f32 + eps).sqrt();
                    head.iter_mut().zip(x[more + 2 + input].f32()).for_each(|(v, w)| *v = *v * scale * w);
                }
                rope::rotate(rotation.pairs, 1.0, head, place, x[more].f32(), x[more + 1].f32());
            }
        }
    }
}

/// Keys of a block without tensor cores: 128 KiB to read with a head dimension of 128 in bf16.
const CHUNK: usize = 256;
/// The most rows of a block, each with a query and an output in registers.
const ROWS: usize = 8;
/// Bytes of keys and values that a block processes at once, and that it has in flight: more if it is alone on its multiprocessor.
const TOGETHER: usize = 48 << 10;
const AHEAD: usize = 64 << 10;
const AHEAD_ALONE: usize = 112 << 10;

impl Op for DecodeAttention {
    fn name(&self) -> &'static str {
        "decode_attention"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check(&x[3..5], &x[5], &x[1..3]);
        let (q, k, cache, more) = (&x[0], &x[1], &x[3], self.more(x.len()));
        let heads = q.rank() == 4 && q.shape[..2] == k.shape[..2] && q.dim(0) == k.dim(0) && q.dim(1) % k.dim(1) == 0;
        let types = x[1..5].iter().all(|m| m.dtype == k.dtype);
        let masked = x[..more].get(6).is_none_or(|until| *until == Meta::new(&cache.shape[..2], DType::I32));
        assert!(heads && types && masked, "decode_attention of {x:?}");
        if let Some(rotation) = self.rotation {
            Rope { pairs: rotation.pairs, inverse: false }.infer(&[q.clone(), x[more].clone(), x[more + 1].clone()]);
            let weights = x[more + 2..].iter().all(|w| w.shape == [q.dim(0)] && w.dtype == x[more + 2].dtype);
            assert!(weights && q.shape[1] == 1, "{self:?} of {x:?}");
        }
        vec![q.clone(), x[3].clone(), x[4].clone()]
    }

    /// q and k, rotated.
    fn workspace(&self, x: &[Meta]) -> usize {
        if self.rotation.is_some() { x[0].elements() + x[1].elements() } else { 0 }
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![(3, 1), (4, 2)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], work: &mut [f32]) {
        let (time, heads, d, kv) = (x[0].shape[1], x[0].shape[2], x[0].shape[3], x[1].shape[2]);
        let until = x[..self.more(x.len())].get(6).map(|u| u.i32());
        let strides = [0, 1].map(|i| contiguous(x[i].shape));
        let (mut new_q, mut new_k) = (x[0], x[1]);
        if self.rotation.is_some() {
            let (a, b) = work.split_at_mut(x[0].shape.iter().product());
            self.rotated(0, x, a);
            self.rotated(1, x, b);
            new_q = View { strides: &strides[0], data: Data::F32(a), ..new_q };
            new_k = View { strides: &strides[1], data: Data::F32(b), ..new_k };
        }
        let (capacity, apart, q) = (y[1].shape[1], row(&new_q), new_q.f32());
        let past = held(&x[5], capacity, time);
        write(&mut y[1], &new_k, past);
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

    /// q, k and v may be column slices of one merged projection.
    fn layout(&self, input: usize) -> Layout {
        if input < 3 { Layout::Blocks(2) } else { Layout::Contiguous }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let (q, kv, capacity, more) = (&io.x[0].shape, io.x[1].shape[2], io.x[3].shape[1], self.more(io.x.len()));
        let (batch, time, group, d) = (q[0], q[1], q[2] / kv, q[3]);
        let rows = [0, 1, 2].map(|i| block_stride(&io.x[i].shape, &io.strides[i], 2).expect("blocks evenly apart"));
        let dtype = io.x[1].dtype;
        let mut lengths = vec![d, rows[1], rows[2], io.offsets[1], io.offsets[2]];
        if let Some(rotation) = self.rotation {
            // A pack lies in one half of the head.
            lengths.extend([rows[0], io.offsets[0], if rotation.pairs == Pairs::Halves { d / 2 } else { d }]);
            lengths.extend(&io.offsets[more..]);
        }
        let vec = pack(&[dtype], &lengths);
        let (masked, splits_of) = (more > 6, |chunk: usize| capacity.div_ceil(chunk));
        let (multiprocessors, limit) = (io.arch.multiprocessors as usize, io.arch.shared_limit());
        let launch = |source: &str, entry, chunk: usize| {
            Launch::new(&[include_str!("../attention/mma.cuh"), PACKS, include_str!("share.cuh"), source].concat(), entry)
                .define_type("T", dtype)
                .define_type("TQ", io.x[0].dtype)
                .define_type("C", if self.rotation.is_some() { io.x[more].dtype } else { DType::F32 })
                .define_type("TW", io.x.get(more + 2).map_or(DType::F32, |w| w.dtype))
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
                .define("CHUNK", chunk)
                .define("MASKED", masked as u8)
                .define("EARLY", (3..more).all(|i| io.settled[i]) as u8)
                .define("ROTATE", self.rotation.is_some() as u8)
                .define("NORM", self.rotation.is_some_and(|t| t.norm.is_some()) as u8)
                .define("ADJACENT", self.rotation.is_some_and(|t| t.pairs == Pairs::Adjacent) as u8)
                .define("TABLE", if self.rotation.is_some() { io.x[more].rows() } else { 1 })
                .define_f32("EPS", self.rotation.and_then(|t| t.norm).unwrap_or(0.0))
                .define_f32("SCALE_2", self.scale * std::f32::consts::LOG2_E)
        };
        // Queries are read in packs, too.
        let tensor =
            vec == 8 && matches!(d, 16 | 32 | 64 | 128) && io.x[0].dtype == dtype && pack(&[dtype], &[rows[0], io.offsets[0]]) == 8;
        let (first, chunk) = if tensor {
            const WARPS: usize = 8;
            let tiles = (time * group).div_ceil(16);
            let r = (time * group).div_ceil(tiles);
            // All of a block's keys and values, and its queries, in half of the shared memory.
            let (half, row, apart) = (limit / 2, 2 * (d + 8), 16 * 2 * (d + 8));
            let most = (half - apart) / (2 * row + 4) / 16 * 16;
            let chunk = capacity.div_ceil(splits_of(most)).next_multiple_of(16);
            let shared = apart + (chunk * (2 * row + 4)).max(4 * WARPS * r * (d + 2));
            let blocks = batch * kv * tiles * splits_of(chunk);
            let alone = blocks <= multiprocessors;
            let first = launch(include_str!("decode_tensor.cu"), "attention_decode_tensor", chunk)
                .define("R", r)
                .define("WARPS", WARPS)
                .grid(blocks.max(multiprocessors), 1, 1)
                .block(32 * WARPS)
                .shared(if alone { io.arch.alone(shared) } else { shared });
            (first, chunk)
        } else {
            let packs = d / vec;
            let lanes = packs.next_power_of_two().min(32);
            let per = packs.div_ceil(lanes);
            // A row takes 2 x per x vec registers; as many rows as fit without spills.
            let most = (64 / (per * vec)).clamp(1, ROWS);
            let tiles = (time * group).div_ceil(most);
            let r = (time * group).div_ceil(tiles);
            let blocks = batch * kv * tiles * splits_of(CHUNK);
            // If its rows take few registers, a thread processes more keys at once, and two blocks fit on a multiprocessor.
            let light = r <= 4 && r * per * vec <= 32;
            let (mut unroll, mut warps) = (if light { 4 } else { 2 }, 8);
            let stage = |unroll: usize, warps: usize| warps * unroll * 2 * per * 32 * vec * dtype.size();
            while stage(unroll, warps) > TOGETHER && unroll * warps > 1 {
                (unroll, warps) = if unroll > 1 { (unroll / 2, warps) } else { (1, warps / 2) };
            }
            let rotated = if self.rotation.is_some() { 4 * r * d + 2 * d * dtype.size() } else { 0 };
            let apart = rotated + 4 * warps * r * (d + 2);
            let one = stage(unroll, warps) + if masked { 4 * warps * unroll * 32 } else { 0 };
            let room = if blocks <= multiprocessors { AHEAD_ALONE } else { AHEAD }.min(limit - apart);
            let stages = (room / one).clamp(1, capacity.min(CHUNK).div_ceil(warps * unroll * 32 / lanes));
            let first = launch(include_str!("decode.cu"), "attention_decode", CHUNK)
                .define("LANES", lanes)
                .define("PER", per)
                .define("R", r)
                .define("UNROLL", unroll)
                .define("STAGES", stages)
                .define("WARPS", warps)
                .define("RESIDENT", if light { 2 } else { 1 })
                .grid(blocks, 1, 1)
                .block(32 * warps)
                .shared(stages * one + apart);
            (first, CHUNK)
        };
        let (past, y, partial) = (At::X(5).into(), At::Y(0).into(), At::Work.into());
        // A missing input is not read.
        let own = |input: usize, there: bool| Place::from(At::X(if there { input } else { 0 }));
        let mut args: Vec<Place> = vec![At::X(0).into(), At::X(1).into(), At::X(2).into(), past, own(6, masked)];
        args.extend((more..more + 4).map(|i| own(i, i < io.x.len())));
        args.extend([At::Y(1).into(), At::Y(2).into(), y, partial]);
        let (first, splits) = (first.args(&args), splits_of(chunk));
        if splits == 1 {
            return Code { steps: vec![Step::Launch(first)], workspace: 0 };
        }
        let heads = batch * time * kv * group;
        let second = launch(include_str!("combine.cu"), "attention_combine", chunk).grid(heads.div_ceil(8), 1, 1).args(&[past, partial, y]);
        Code { steps: vec![Step::Launch(first), Step::Launch(second)], workspace: 4 * heads * splits * (d + 2) }
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    /// The cost with full caches.
    fn cost(&self, x: &[Meta]) -> Cost {
        let flops = 4 * x[0].elements() * x[3].shape[1];
        Cost { flops: flops as u64, ..Cost::memory(2 * x[0].bytes() + 2 * (x[1].bytes() + x[2].bytes()) + x[3].bytes() + x[4].bytes()) }
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        if let Some(rotation) = self.rotation {
            let more = self.more(x.len());
            let rotated = |i: usize| {
                let head = rotation.norm.map_or(x[i], |eps| x[i].rms_norm(x[more + 2 + i], eps));
                head.rope(rotation.pairs, (x[more], x[more + 1]))
            };
            let plain = DecodeAttention { rotation: None, ..self.clone() };
            return plain.unfused(&[&[rotated(0), rotated(1)], &x[2..more]].concat());
        }
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

/// Attention of the tokens at past, past + 1, .. over the cached tokens before them and over themselves; and the updated caches. See
/// [`DecodeAttention`].
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
    let y = q.recorder().op(DecodeAttention { scale, rotation: None }, &inputs);
    (y[0], (y[1], y[2]))
}
