//! Rotary position embedding (RoPE): pairs of a head's elements are rotated by an angle proportional to the position.

pub mod norm;

use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{Code, Io, Launch};
use crate::meta::{Layout, Meta, block_stride};
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share};
use crate::ops::reduce::packs::{PACKS, pack};
use crate::record::{Recorder, Var};
use norm::NormRope;
use rayon::prelude::*;

/// Which elements of a head of d form a pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pairs {
    /// i and i + d / 2.
    Halves,
    /// 2 i and 2 i + 1.
    Adjacent,
}

/// Inputs: x [batch, time, heads, d]; cosines and sines [time, d / 2], or [batch, time, d / 2].
#[derive(Debug)]
pub struct Rope {
    /// Which elements are rotated together.
    pub pairs: Pairs,
    /// Whether to rotate backward, as the gradient does.
    pub inverse: bool,
}

/// Rotates a head at `place` by its angles in the tables [places or time, d / 2].
#[inline(always)]
pub(crate) fn rotate(pairs: Pairs, sign: f32, row: &mut [f32], place: usize, cos: &[f32], sin: &[f32]) {
    let half = row.len() / 2;
    let at = place * half % cos.len();
    let (cos, sin) = (&cos[at..at + half], &sin[at..at + half]);
    let rotated = |a: f32, b: f32, i: usize| (a * cos[i] - b * (sign * sin[i]), a * (sign * sin[i]) + b * cos[i]);
    match pairs {
        Pairs::Halves => {
            let (a, b) = row.split_at_mut(half);
            for i in 0..half {
                (a[i], b[i]) = rotated(a[i], b[i], i);
            }
        }
        Pairs::Adjacent => {
            for i in 0..half {
                (row[2 * i], row[2 * i + 1]) = rotated(row[2 * i], row[2 * i + 1], i);
            }
        }
    }
}

impl Op for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let ok = x[0].rank() == 4 && x[0].dim(0).is_multiple_of(2) && x[1] == x[2] && x[1].dim(0) * 2 == x[0].dim(0);
        let places = x[0].shape[..2].iter().product::<usize>();
        assert!(ok && (x[1].rows() == x[0].shape[1] || x[1].rows() == places), "rope of {x:?}");
        vec![x[0].clone()]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (heads, d) = (x[0].dim(1), x[0].dim(0));
        let (data, cos, sin) = (x[0].f32(), x[1].f32(), x[2].f32());
        let sign = if crate::mutant!("rope-gradient-turns-the-same-way", self.inverse, false) { -1.0 } else { 1.0 };
        let stride = block_stride(x[0].shape, x[0].strides, 2).expect("blocks evenly apart");
        const PLACES: usize = 32;
        y[0].f32().par_chunks_mut(PLACES * heads * d).enumerate().for_each(|(task, out)| {
            simd(
                #[inline(always)]
                || {
                    for (p, out) in out.chunks_mut(heads * d).enumerate() {
                        let place = task * PLACES + p;
                        out.copy_from_slice(&data[place * stride..][..heads * d]);
                        out.chunks_mut(d).for_each(|row| rotate(self.pairs, sign, row, place, cos, sin));
                    }
                },
            )
        });
    }

    /// Heads may be column slices of a wider tensor.
    fn layout(&self, input: usize) -> Layout {
        if input == 0 { Layout::Blocks(2) } else { Layout::Contiguous }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded_first(1, at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let (x, stride) = (&io.x[0], block_stride(&io.x[0].shape, &io.strides[0], 2).expect("blocks evenly apart"));
        let vec = pack(&[x.dtype], &[x.dim(0) / 2, stride]);
        let threads = x.elements() / (2 * vec);
        Launch::new(&[PACKS, include_str!("rope.cu")].concat(), "rope")
            .define_type("T", x.dtype)
            .define_type("C", io.x[1].dtype)
            // 32-bit divisions are much cheaper.
            .define("AT", if threads < 1 << 31 { "u32" } else { "u64" })
            .define("THREADS", threads)
            .define("VEC", vec)
            .define("HEADS", x.dim(1))
            .define("D", x.dim(0))
            .define("STRIDE", stride)
            .define("TABLE", io.x[1].rows())
            .define("ADJACENT", (self.pairs == Pairs::Adjacent) as u8)
            .define("SIGN", if self.inverse { "-1.0f" } else { "1.0f" })
            .grid(threads.div_ceil(256), 1, 1)
            .all(io)
            .code()
    }

    /// Examples, where each may have positions of its own, and heads.
    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        let own = x[1].rows() != x[0].shape[1];
        let heads = Axis::new([Share::Dim(2), Share::Whole, Share::Whole], [Share::Dim(2)]);
        vec![Axis::first(&[true, own, own], 1), heads]
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let back = |d: Var<'g>| d.recorder().op1(Rope { pairs: self.pairs, inverse: !self.inverse }, &[d, x[1], x[2]]);
        vec![dy[0].map(back), None, None] // the tables have no gradient
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 3 * x[0].elements() as u64, ..Cost::memory(2 * x[0].bytes() + x[1].bytes() + x[2].bytes()) }
    }
}

impl<'g> Var<'g> {
    /// Rotates heads [batch, time, heads, d] by the angles of tables from `Recorder::rope_tables`.
    #[track_caller]
    pub fn rope(self, pairs: Pairs, (cos, sin): (Var<'g>, Var<'g>)) -> Var<'g> {
        self.recorder().op1(Rope { pairs, inverse: false }, &[self, cos, sin])
    }
}

/// theta^(-2 i / d) for each pair of a head of d.
pub fn rope_frequencies(d: usize, theta: f32) -> Vec<f32> {
    (0..d / 2).map(|i| theta.powf(-((2 * i) as f32) / d as f32)).collect()
}

impl Recorder {
    /// Constant tables of cosines and sines for `time` positions: angle = t * theta^(-2 i / d), all in f32.
    pub fn rope_tables(&self, time: usize, d: usize, theta: f32) -> (Var<'_>, Var<'_>) {
        self.rope_tables_of(time, &rope_frequencies(d, theta))
    }

    /// The same for given frequencies: angle = t * frequency.
    pub fn rope_tables_of(&self, time: usize, frequencies: &[f32]) -> (Var<'_>, Var<'_>) {
        let half = frequencies.len();
        let table = |f: fn(f32) -> f32| {
            self.table(&[time, half], || (0..time * half).map(|k| f((k / half) as f32 * frequencies[k % half])).collect())
        };
        (table(f32::cos), table(f32::sin))
    }
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("halves", &[In(&[2, 5, 3, 8], Fill::Normal)], |x| vec![x[0].rope(Pairs::Halves, x[0].recorder().rope_tables(5, 8, 100.0))]),
    Case::new("adjacent", &[In(&[2, 5, 1, 6], Fill::Normal)], |x| {
        vec![x[0].rope(Pairs::Adjacent, x[0].recorder().rope_tables(5, 6, 100.0))]
    }),
    Case::new("a table for each sequence", &[In(&[2, 3, 2, 4], Fill::Normal)], |x| {
        let (c, s) = x[0].recorder().rope_tables(6, 4, 100.0);
        vec![x[0].rope(Pairs::Halves, (c.reshape(&[2, 3, 2]), s.reshape(&[2, 3, 2])))]
    }),
    Case::new("heads among others", &[In(&[2, 5, 9, 16], Fill::Normal)], |x| {
        let tables = x[0].recorder().rope_tables(5, 16, 100.0);
        vec![x[0].slice(2, 3, 6).rope(Pairs::Halves, tables), x[0].slice(2, 6, 9).rope(Pairs::Adjacent, tables)]
    }),
    Case::new("normed", &[In(&[2, 5, 3, 16], Fill::Normal)], |x| normed(x, Pairs::Halves)),
    Case::new("normed, a weight", &[In(&[2, 5, 3, 12], Fill::Normal), In(&[12], Fill::Normal)], |x| normed(x, Pairs::Halves)),
    Case::new("normed, one number", &[In(&[2, 7, 5, 8], Fill::Normal), In(&[1], Fill::Normal)], |x| normed(x, Pairs::Halves)),
    Case::new("normed, adjacent", &[In(&[3, 5, 2, 6], Fill::Normal), In(&[6], Fill::Normal)], |x| normed(x, Pairs::Adjacent)),
    Case::new("queries", &[In(&[64, 1024, 12, 16], Fill::Normal)], |x| {
        vec![x[0].rope(Pairs::Halves, x[0].recorder().rope_tables(1024, 16, 10000.0))]
    })
    .bench(),
    Case::new("hrm's queries", &[In(&[384, 81, 24, 64], Fill::Normal)], |x| {
        vec![x[0].slice(2, 0, 8).rope(Pairs::Halves, x[0].recorder().rope_tables(81, 64, 10000.0))]
    })
    .bench(),
    Case::new("normed queries", &[In(&[16, 1024, 12, 16], Fill::Normal)], |x| normed(x, Pairs::Halves)).bench(),
    Case::new("normed keys", &[In(&[16, 1024, 3, 16], Fill::Normal), In(&[1], Fill::Normal)], |x| normed(x, Pairs::Halves)).bench(),
    Case::new("normed heads of 128", &[In(&[4, 512, 16, 128], Fill::Normal), In(&[128], Fill::Normal)], |x| normed(x, Pairs::Halves))
        .bench(),
];

/// For the cases: inputs x and perhaps a weight.
fn normed<'g>(x: &[Var<'g>], pairs: Pairs) -> Vec<Var<'g>> {
    let (cos, sin) = x[0].recorder().rope_tables(x[0].shape()[1], x[0].dim(0), 10000.0);
    let inputs = [&[x[0], cos, sin], &x[1..]].concat();
    x[0].recorder().op(NormRope { eps: 1e-6, pairs }, &inputs)[..1].to_vec()
}
