//! Attention with grouped key and value heads (GQA): softmax(scale q k^T) v. Model code records the composite op; the pass `flash-attention`
//! replaces it by one that never stores the [time, time] scores.
//!
//! q [batch, time, heads, d]; k, v [batch, keys, kv_heads, d]; the result [batch, time, heads, d]. Query head h reads key head
//! h / (heads / kv_heads). Causal: query i sees keys up to i + keys - time.
//!
//! With `until`, i32 [batch, keys], query i sees key j only if i <= until`[j]`. That covers the masks of training: padding is seen by no other token
//! (until`[j]` = j; -1 if attention is not causal), several examples packed into a row do not see each other (until`[j]` = the example's last token),
//! and other keys are seen to the end. A query that sees no key gives zeros.

mod flash;
pub(crate) mod kernels;
mod order;
pub(crate) mod wgmma;

pub use flash::{FlashAttention, FlashAttentionGrad};
pub use kernels::{Kind, LONGEST_HEAD, kernel_for};

use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io};
use crate::meta::{DType, Meta};
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share};
use crate::ops::full::Full;
use crate::record::Var;

/// softmax(scale q k^T + mask) v. Composite: a pass replaces it by [`FlashAttention`], or `decompose` by matmuls and softmax.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Whether a position attends only to itself and earlier ones.
    pub causal: bool,
    /// Factor of the scores, usually 1 / sqrt(head dimension).
    pub scale: f32,
}

pub(super) fn check(x: &[Meta], causal: bool) {
    let (q, k) = (&x[0], &x[1]);
    let fits = q.rank() == 4 && k == &x[2] && k.rank() == 4 && q.shape[0] == k.shape[0] && q.dim(0) == k.dim(0);
    let masked = x.get(3).is_none_or(|until| *until == Meta::new(&k.shape[..2], DType::I32));
    assert!(fits && masked && q.dim(1) % k.dim(1) == 0 && (!causal || k.shape[1] >= q.shape[1]), "attention of {x:?}");
}

/// FLOPs of one matmul with the scores.
pub(super) fn score_flops(x: &[Meta], causal: bool) -> usize {
    let (b, t, h, d) = (x[0].shape[0], x[0].shape[1], x[0].shape[2], x[0].shape[3]);
    let keys = x[1].shape[1];
    // With causality: half of the [time, time] square, and all keys before it.
    let pairs = if causal { t * (keys - t) + t * (t + 1) / 2 } else { t * keys };
    2 * b * h * pairs * d
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check(x, self.causal);
        vec![x[0].clone()]
    }

    fn cpu(&self, _: &[View], _: &mut [ViewMut], _: &mut [f32]) {
        unreachable!("a pass or the unfused form stands in for it")
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, _: &Io) -> Code {
        unreachable!("a pass or the unfused form stands in for it")
    }

    /// Examples and heads.
    fn axes(&self, x: &[Meta], parts: usize) -> Vec<Axis> {
        let mut axes = vec![Axis::first(&vec![true; x.len()], 1)];
        if x[0].dim(1).is_multiple_of(parts) && x[1].dim(1).is_multiple_of(parts) {
            let shares = [Share::Dim(2), Share::Dim(2), Share::Dim(2), Share::Whole];
            axes.push(Axis::new(&shares[..x.len()], [Share::Dim(2)]));
        }
        axes
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        unreachable!("replaced before gradients are written out")
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::compute(2 * score_flops(x, self.causal), 2 * x[0].bytes() + x[1].bytes() + x[2].bytes())
    }

    fn is_composite(&self) -> bool {
        true
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let (q, k, v) = (x[0], x[1], x[2]);
        let (b, t, h, d) = (q.shape()[0], q.shape()[1], q.shape()[2], q.shape()[3]);
        let (keys, kv) = (k.shape()[1], k.shape()[2]);
        let q = q.reshape(&[b, t, kv, h / kv, d]).permute(&[0, 2, 3, 1, 4]); // [b, kv, group, t, d]
        let heads = |x: Var<'g>| x.permute(&[0, 2, 1, 3]).reshape(&[b, kv, 1, keys, d]);
        let r = q.recorder();
        // Where a key is masked for a query.
        let hidden = x.get(3).map(|until| {
            let time = r.constant(&[t, 1], (0..t).map(|i| i as f32).collect());
            until.cast(DType::F32).reshape(&[b, 1, 1, 1, keys]).less(time)
        });
        let put = |x: Var<'g>, value: f32| hidden.map_or(x, |h| h.choose(r.op1(Full { shape: vec![1], value, dtype: x.dtype() }, &[]), x));
        let scores = put(q.matmul(heads(k).t()) * self.scale, -1e30);
        let p = if self.causal { scores.causal_softmax() } else { scores.softmax() };
        let y = crate::mutant!("attention-of-a-query-that-sees-nothing", put(p, 0.0), p).matmul(heads(v)); // [b, kv, group, t, d]
        Some(vec![y.permute(&[0, 3, 1, 2, 4]).reshape(&[b, t, h, d])])
    }
}

/// Records attention; see the module for the shapes.
#[track_caller]
pub fn attention<'g>(q: Var<'g>, k: Var<'g>, v: Var<'g>, causal: bool, scale: f32) -> Var<'g> {
    q.recorder().op1(Attention { causal, scale }, &[q, k, v])
}

/// The same with the mask `until` (see the module).
#[track_caller]
pub fn attention_until<'g>(q: Var<'g>, k: Var<'g>, v: Var<'g>, until: Var<'g>, causal: bool, scale: f32) -> Var<'g> {
    q.recorder().op1(Attention { causal, scale }, &[q, k, v, until])
}

macro_rules! qkv {
    ($b:literal, $t:literal, $h:literal, $keys:literal, $kv:literal, $d:literal) => {
        &[In(&[$b, $t, $h, $d], Fill::Normal), In(&[$b, $keys, $kv, $d], Fill::Normal), In(&[$b, $keys, $kv, $d], Fill::Normal)]
    };
}

macro_rules! masked {
    ($b:literal, $t:literal, $h:literal, $keys:literal, $kv:literal, $d:literal) => {
        &[
            In(&[$b, $t, $h, $d], Fill::Normal),
            In(&[$b, $keys, $kv, $d], Fill::Normal),
            In(&[$b, $keys, $kv, $d], Fill::Normal),
            In(&[$b, $keys], Fill::Target($t)),
        ]
    };
}

/// `until` for packed examples of `length` tokens with one key in eight as padding, made from an input of targets.
fn packed<'g>(x: &[Var<'g>], length: usize) -> Vec<Var<'g>> {
    let (r, t) = (x[0].recorder(), x[1].shape()[1]);
    let ends = r.constant(&[t], (0..t).map(|j| ((j / length + 1) * length - 1) as f32).collect());
    let own = r.constant(&[t], (0..t).map(|j| j as f32).collect());
    let padding = x[3].cast(DType::F32).less(r.zeros(&[1]));
    soft(&[x[0], x[1], x[2], padding.choose(own, ends).cast(DType::I32)], true)
}

/// Scores small enough for finite differences with large head dimensions.
fn soft<'g>(x: &[Var<'g>], causal: bool) -> Vec<Var<'g>> {
    flash(&[&[x[0] * 0.25], &x[1..]].concat(), causal)
}

fn flash<'g>(x: &[Var<'g>], causal: bool) -> Vec<Var<'g>> {
    let y = x[0].recorder().op(FlashAttention { causal, scale: 0.5 }, x);
    vec![y[0]]
}

/// q, k and v of two heads of `d`: columns of x [batch, time, ..] from `at` on, each `apart` from the one before.
fn columns<'g>(x: Var<'g>, d: usize, at: usize, apart: usize) -> Vec<Var<'g>> {
    let (b, t) = (x.shape()[0], x.shape()[1]);
    let part = |i: usize| x.slice(2, at + i * apart, at + i * apart + 2 * d).reshape(&[b, t, 2, d]);
    soft(&[part(0), part(1), part(2)], true)
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("flash columns of one matmul", &[In(&[2, 70, 384], Fill::Normal)], |x| columns(x[0], 64, 0, 128)),
    Case::new("flash columns, heads of 16", &[In(&[2, 70, 96], Fill::Normal)], |x| columns(x[0], 16, 0, 32)),
    Case::new("flash columns at odd places", &[In(&[1, 67, 203], Fill::Normal)], |x| columns(x[0], 32, 1, 67)),
    Case::new("unfused causal", qkv!(2, 5, 4, 5, 2, 3), |x| vec![attention(x[0], x[1], x[2], true, 0.5)]),
    Case::new("unfused full", qkv!(1, 3, 2, 5, 2, 4), |x| vec![attention(x[0], x[1], x[2], false, 0.5)]),
    Case::new("flash causal groups", qkv!(2, 71, 4, 71, 2, 8), |x| flash(x, true)),
    Case::new("flash more keys", qkv!(1, 9, 3, 70, 1, 5), |x| flash(x, true)),
    Case::new("flash heads of 16", qkv!(2, 71, 4, 71, 2, 16), |x| flash(x, true)),
    Case::new("flash heads of 16, full", qkv!(2, 77, 6, 90, 2, 16), |x| flash(x, false)),
    Case::new("flash heads of 16, more keys", qkv!(1, 20, 2, 600, 2, 16), |x| flash(x, true)),
    Case::new("flash heads of 64", qkv!(1, 130, 2, 140, 1, 64), |x| flash(x, true)),
    Case::new("flash heads of 32, full", qkv!(1, 65, 2, 67, 1, 32), |x| flash(x, false)),
    Case::new("flash heads of 128", qkv!(1, 70, 1, 70, 1, 128), |x| flash(x, true)),
    Case::new("flash heads of 128, odd", qkv!(2, 133, 3, 133, 1, 128), |x| soft(x, true)),
    Case::new("flash heads of 128, groups of 4", qkv!(1, 150, 4, 330, 1, 128), |x| soft(x, true)),
    Case::new("flash heads of 128, full", qkv!(1, 200, 2, 270, 2, 128), |x| soft(x, false)),
    Case::new("flash heads of 64, full", qkv!(1, 190, 4, 131, 2, 64), |x| flash(x, false)),
    Case::new("flash heads of 64, many", qkv!(23, 130, 4, 130, 2, 64), |x| soft(x, true)),
    Case::new("flash short", qkv!(6, 81, 6, 81, 6, 64), |x| flash(x, false)),
    Case::new("flash short, causal, heads of 32", qkv!(20, 45, 2, 45, 2, 32), |x| flash(x, true)),
    Case::new("flash short, groups", qkv!(9, 128, 4, 128, 2, 64), |x| flash(x, true)),
    Case::new("flash full", qkv!(1, 66, 2, 130, 2, 4), |x| flash(x, false)),
    Case::new("unfused until", masked!(2, 5, 4, 7, 2, 3), |x| vec![attention_until(x[0], x[1], x[2], x[3], true, 0.5)]),
    Case::new("flash until", masked!(2, 71, 4, 75, 2, 8), |x| flash(x, true)),
    Case::new("flash until, full", masked!(2, 66, 2, 70, 1, 5), |x| flash(x, false)),
    Case::new("flash until, heads of 16", masked!(2, 140, 2, 140, 1, 16), |x| flash(x, true)),
    Case::new("flash until, heads of 32, full", masked!(1, 70, 2, 131, 2, 32), |x| flash(x, false)),
    Case::new("flash until, heads of 128", masked!(2, 140, 4, 140, 1, 128), |x| soft(x, true)),
    Case::new("flash until, heads of 128, full", masked!(1, 300, 2, 129, 2, 128), |x| soft(x, false)),
    Case::new("flash packed, heads of 64", masked!(2, 200, 2, 200, 1, 64), |x| packed(x, 37)),
    Case::new("flash packed, heads of 128", masked!(1, 150, 2, 150, 1, 128), |x| packed(x, 70)),
    Case::new("flash hydra", qkv!(16, 1024, 12, 1024, 3, 16), |x| flash(x, true)).bench(),
    Case::new("flash hrm", qkv!(384, 81, 8, 81, 8, 64), |x| flash(x, false)).bench(),
    Case::new("flash 64", qkv!(8, 1024, 12, 1024, 12, 64), |x| flash(x, true)).bench(),
    // As many tokens as the scans of `ssd` have, in a model of the same width.
    Case::new("flash 64, 64 x 1k", qkv!(64, 1024, 12, 1024, 12, 64), |x| flash(x, true)).bench(),
    Case::new("flash 64, 32 x 2k", qkv!(32, 2048, 12, 2048, 12, 64), |x| flash(x, true)).bench(),
    Case::new("flash 128", qkv!(8, 1024, 16, 1024, 8, 128), |x| flash(x, true)).bench(),
    Case::new("flash 128, packed", masked!(16, 512, 16, 512, 8, 128), |x| packed(x, 128)).bench(),
    Case::new("64 x 1024", qkv!(16, 1024, 32, 1024, 32, 64), |x| flash(x, true)).bench(),
    Case::new("64 x 2048", qkv!(8, 2048, 32, 2048, 32, 64), |x| flash(x, true)).bench(),
    Case::new("64 x 4096", qkv!(4, 4096, 32, 4096, 32, 64), |x| flash(x, true)).bench(),
    Case::new("64 x 8192", qkv!(2, 8192, 32, 8192, 32, 64), |x| flash(x, true)).bench(),
    Case::new("64 x 16384", qkv!(1, 16384, 32, 16384, 32, 64), |x| flash(x, true)).bench(),
    Case::new("128 x 1024", qkv!(16, 1024, 16, 1024, 16, 128), |x| flash(x, true)).bench(),
    Case::new("128 x 2048", qkv!(8, 2048, 16, 2048, 16, 128), |x| flash(x, true)).bench(),
    Case::new("128 x 4096", qkv!(4, 4096, 16, 4096, 16, 128), |x| flash(x, true)).bench(),
    Case::new("128 x 8192", qkv!(2, 8192, 16, 8192, 16, 128), |x| flash(x, true)).bench(),
    Case::new("128 x 16384", qkv!(1, 16384, 16, 16384, 16, 128), |x| flash(x, true)).bench(),
];
