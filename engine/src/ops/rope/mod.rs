//! Rotary position embedding: pairs of a head's elements are turned by an angle that grows with the position.

use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{Code, Io, Launch};
use crate::meta::Meta;
use crate::op::{Case, Cost, Fill, Grads, In, Op};
use crate::record::{Recorder, Var};
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
    pub pairs: Pairs,
    /// Turn the other way: the gradient.
    pub inverse: bool,
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
        let half = d / 2;
        let (data, cos, sin) = (x[0].f32(), x[1].f32(), x[2].f32());
        let sign = if self.inverse { -1.0 } else { 1.0 };
        const PLACES: usize = 32;
        y[0].f32().par_chunks_mut(PLACES * heads * d).enumerate().for_each(|(task, out)| {
            simd(
                #[inline(always)]
                || {
                    for (p, out) in out.chunks_mut(heads * d).enumerate() {
                        let place = task * PLACES + p;
                        let at = place * half % cos.len();
                        let (cos, sin) = (&cos[at..at + half], &sin[at..at + half]);
                        let rows = out.chunks_mut(d).zip(data[place * heads * d..][..heads * d].chunks(d));
                        for (out, x) in rows {
                            match self.pairs {
                                Pairs::Halves => {
                                    let ((xa, xb), (ya, yb)) = (x.split_at(half), out.split_at_mut(half));
                                    for i in 0..half {
                                        let s = sign * sin[i];
                                        ya[i] = xa[i] * cos[i] - xb[i] * s;
                                        yb[i] = xa[i] * s + xb[i] * cos[i];
                                    }
                                }
                                Pairs::Adjacent => {
                                    for i in 0..half {
                                        let s = sign * sin[i];
                                        out[2 * i] = x[2 * i] * cos[i] - x[2 * i + 1] * s;
                                        out[2 * i + 1] = x[2 * i] * s + x[2 * i + 1] * cos[i];
                                    }
                                }
                            }
                        }
                    }
                },
            )
        });
    }

    fn cuda(&self, io: &Io) -> Code {
        let pairs = io.y[0].elements() / 2;
        Launch::new(include_str!("rope.cu"), "rope")
            .define_type("T", io.y[0].dtype)
            .define_type("C", io.x[1].dtype)
            .define("PAIRS", pairs)
            .define("HEADS", io.x[0].dim(1))
            .define("D", io.x[0].dim(0))
            .define("TABLE", io.x[1].rows())
            .define("ADJACENT", (self.pairs == Pairs::Adjacent) as u8)
            .define("SIGN", if self.inverse { "-1.0f" } else { "1.0f" })
            .grid(pairs.div_ceil(256), 1, 1)
            .all(io)
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let back = |d: Var<'g>| d.recorder().op1(Rope { pairs: self.pairs, inverse: !self.inverse }, &[d, x[1], x[2]]);
        vec![dy[0].map(back), None, None] // tables are not trained
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 3 * x[0].elements() as u64, ..Cost::memory(2 * x[0].bytes() + x[1].bytes() + x[2].bytes()) }
    }
}

impl<'g> Var<'g> {
    #[track_caller]
    pub fn rope(self, pairs: Pairs, (cos, sin): (Var<'g>, Var<'g>)) -> Var<'g> {
        self.recorder().op1(Rope { pairs, inverse: false }, &[self, cos, sin])
    }
}

impl Recorder {
    /// Cosines and sines for `time` positions, made once: angle = t * theta^(-2 i / d), all in f32.
    pub fn rope_tables(&self, time: usize, d: usize, theta: f32) -> (Var<'_>, Var<'_>) {
        let angle = |t: usize, i: usize| t as f32 * theta.powf(-((2 * i) as f32) / d as f32);
        let table = |f: fn(f32) -> f32| (0..time * d / 2).map(|k| f(angle(k / (d / 2), k % (d / 2)))).collect();
        (self.constant(&[time, d / 2], table(f32::cos)), self.constant(&[time, d / 2], table(f32::sin)))
    }
}

pub const CASES: &[Case] = &[
    Case::new("halves", &[In(&[2, 5, 3, 8], Fill::Normal)], |x| vec![x[0].rope(Pairs::Halves, x[0].recorder().rope_tables(5, 8, 100.0))]),
    Case::new("adjacent", &[In(&[2, 5, 1, 6], Fill::Normal)], |x| {
        vec![x[0].rope(Pairs::Adjacent, x[0].recorder().rope_tables(5, 6, 100.0))]
    }),
    Case::new("a table for each sequence", &[In(&[2, 3, 2, 4], Fill::Normal)], |x| {
        let (c, s) = x[0].recorder().rope_tables(6, 4, 100.0);
        vec![x[0].rope(Pairs::Halves, (c.reshape(&[2, 3, 2]), s.reshape(&[2, 3, 2])))]
    }),
    Case::new("queries", &[In(&[64, 1024, 12, 16], Fill::Normal)], |x| {
        vec![x[0].rope(Pairs::Halves, x[0].recorder().rope_tables(1024, 16, 10000.0))]
    })
    .bench(),
];
