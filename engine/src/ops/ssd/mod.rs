//! The state-space scan of Mamba-2 (SSD, state-space duality). Each head has a state h [p, n]:
//! h_t = exp(decay_t) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t + d x_t, where decay is dt times a negative number.
//!
//! x, y [batch, time, heads, p]; dt, decay f32 [batch, time, heads]; d f32 `[heads]`; B, C [batch, time, groups, n]. Head h reads the B and C of group
//! h / (heads / groups). A decay of -110 or less forgets the state: several sequences may lie in a row. The state starts at 0. In reverse, time runs from the last position to the first.
//!
//! Model code records the composite op [`Ssd`]; the pass `chunked-scan` replaces it by [`ChunkedScan`]. Without it the scan is written out as what it
//! equals, attention whose scores are C B^T times a decay: quadratic in time.

mod chunked;
mod cpu;
mod fast;
mod kernels;
mod step;

pub use chunked::{ChunkedScan, ChunkedScanGrad, LEAST_CHUNK, MOST_CHUNK};
pub use step::{SsdLast, SsdStep, ssd_last, ssd_step};

use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io};
use crate::meta::{DType, Meta};
use crate::op::{Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share};
use crate::record::Var;

/// Inputs: x, dt, decay, B, C, d. Output: y. Composite: see the module.
#[derive(Clone, Copy, Debug)]
pub struct Ssd {
    /// Whether time runs backwards.
    pub reverse: bool,
}

/// Sizes that all forms of the scan share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub batch: usize,
    pub time: usize,
    pub heads: usize,
    pub p: usize,
    pub groups: usize,
    pub n: usize,
}

impl Sizes {
    pub fn new(x: &[usize], b: &[usize]) -> Sizes {
        Sizes { batch: x[0], time: x[1], heads: x[2], p: x[3], groups: b[2], n: b[3] }
    }

    /// Of the inputs x, dt, decay, B, C, d. Panics if they do not fit.
    pub fn of(x: &[Meta]) -> Sizes {
        let [m, dt, decay, b, c, d, ..] = x else { panic!("ssd of {x:?}") };
        assert!(m.rank() == 4 && b.rank() == 4 && b == c && b.shape[..2] == m.shape[..2] && b.dtype == m.dtype, "ssd of {x:?}");
        let s = Sizes::new(&m.shape, &b.shape);
        let small = *dt == Meta::f32(&m.shape[..3]) && decay == dt && *d == Meta::f32(&[s.heads]);
        assert!(small && s.heads.is_multiple_of(s.groups), "ssd of {x:?}");
        s
    }

    /// Heads of a group.
    pub fn shared_by(&self) -> usize {
        self.heads / self.groups
    }

    /// FLOPs of `inside` products within chunks of this length and of `states` products with states.
    pub fn flops(&self, chunk: usize, inside: usize, states: usize) -> usize {
        let each = inside * chunk / 2 * (self.p + self.n) + states * self.p * self.n;
        2 * self.batch * self.time * self.heads * each
    }
}

/// x, B and C may be rounded; steps, decays and skips are kept.
pub(crate) fn precision(at: Port) -> Narrow {
    match at {
        Port::In(1 | 2 | 5) => Narrow::Keep,
        Port::In(_) => Narrow::Round,
        Port::Out(_) => Narrow::Follow(vec![0]),
    }
}

impl Op for Ssd {
    fn name(&self) -> &'static str {
        "ssd"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        Sizes::of(x);
        vec![x[0].clone()]
    }

    fn cpu(&self, _: &[View], _: &mut [ViewMut], _: &mut [f32]) {
        unreachable!("a pass or the unfused form stands in for it")
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        precision(at)
    }

    fn cuda(&self, _: &Io) -> Code {
        unreachable!("a pass or the unfused form stands in for it")
    }

    /// Sequences; or heads, with their groups of B and C, or with all of them where there is one group.
    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        let [first, heads] = [Share::Dim(0), Share::Dim(2)];
        let groups = if Sizes::of(x).groups == 1 { Share::Whole } else { heads };
        vec![
            Axis::new([first, first, first, first, first, Share::Whole], [first]),
            Axis::new([heads, heads, heads, groups, groups, first], [heads]),
        ]
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        unreachable!("replaced before gradients are written out")
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let s = Sizes::of(x);
        Cost::compute(s.flops(s.time, 1, 0), 2 * x[0].bytes() + x[3].bytes() + x[4].bytes())
    }

    fn is_composite(&self) -> bool {
        true
    }

    /// y = (C B^T * decay * dt) x + d x, with decay`[i, j]` = exp(the sum of decays after j up to i), 0 where j comes after i.
    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let s = Sizes::of(&x.iter().map(|v| v.meta()).collect::<Vec<_>>());
        let Sizes { batch, time, heads, p, groups, n } = s;
        let (r, each) = (x[0].recorder(), s.shared_by());
        let decay = r.typed(|| {
            let until: Vec<f32> = (0..time * time).map(|k| if self.sees(k / time, k % time) { 1.0 } else { 0.0 }).collect();
            let until = r.constant(&[time, time], until);
            let steps = x[2].permute(&[0, 2, 1]).reshape(&[batch, heads, time, 1]);
            let sums = until.matmul(steps);
            let between = until.choose(sums - sums.permute(&[0, 1, 3, 2]), r.full(&[1], -1e30));
            between.exp() * x[1].permute(&[0, 2, 1]).reshape(&[batch, heads, 1, time])
        });
        let rows = |v: Var<'g>| v.permute(&[0, 2, 1, 3]).reshape(&[batch, groups, 1, time, n]);
        let scores = rows(x[4]).matmul(rows(x[3]).t());
        let weights = decay.reshape(&[batch, groups, each, time, time]).cast(x[0].dtype()) * scores;
        let values = x[0].reshape(&[batch, time, groups, each, p]).permute(&[0, 2, 3, 1, 4]);
        let y = weights.matmul(values).permute(&[0, 3, 1, 2, 4]).reshape(&[batch, time, heads, p]);
        Some(vec![y + x[0] * x[5].reshape(&[heads, 1]).cast(x[0].dtype())])
    }
}

impl Ssd {
    /// Whether position i's state contains position j.
    pub(crate) fn sees(&self, i: usize, j: usize) -> bool {
        if self.reverse { j >= i } else { j <= i }
    }
}

/// What a scan reads; see the module for the shapes. Steps, decays and skips are computed in f32.
#[derive(Clone, Copy)]
pub struct Scan<'g> {
    /// The values.
    pub x: Var<'g>,
    /// Step sizes, positive.
    pub dt: Var<'g>,
    /// Logarithms of what is left of the state after each step, negative: dt times the head's rate.
    pub decay: Var<'g>,
    /// What enters the state.
    pub b: Var<'g>,
    /// What is read from the state.
    pub c: Var<'g>,
    /// Factor of x in the result.
    pub d: Var<'g>,
}

impl<'g> Scan<'g> {
    fn inputs(&self) -> [Var<'g>; 6] {
        let wide = |v: Var<'g>| if v.dtype() == DType::F32 { v } else { v.cast(DType::F32) };
        [self.x, wide(self.dt), wide(self.decay), self.b, self.c, wide(self.d)]
    }
}

/// Records the scan.
#[track_caller]
pub fn ssd(scan: Scan, reverse: bool) -> Var {
    scan.x.recorder().op1(Ssd { reverse }, &scan.inputs())
}

/// The inputs of a case as those of a scan: steps of 0.05 to 0.3, and decays of the same size.
fn scan<'g>(x: &[Var<'g>]) -> Scan<'g> {
    Scan { x: x[0], dt: x[1] * 0.15, decay: x[2] * -0.15, b: x[3], c: x[4], d: x[5] }
}

/// Decays of -1 to -4: what a position adds is all but gone two positions on, so that the decay's gradient is small beside the terms that cancel in it.
fn forgetful<'g>(x: &[Var<'g>]) -> Scan<'g> {
    Scan { decay: x[2] * -2.0, ..scan(x) }
}

/// The same from one rate for each head, as a model has it: the gradient of a rate is a sum over all positions.
fn by_rate<'g>(x: &[Var<'g>]) -> Scan<'g> {
    Scan { dt: x[1], decay: x[1] * x[2] * -2.0, ..scan(x) }
}

fn chunked<'g>(x: &[Var<'g>], reverse: bool, chunk: usize) -> Vec<Var<'g>> {
    let op = ChunkedScan { reverse, chunk, ..ChunkedScan::default() };
    vec![x[0].recorder().op(op, &scan(x).inputs())[0]]
}

macro_rules! inputs {
    ($batch:literal, $time:literal, $heads:literal, $p:literal, $groups:literal, $n:literal) => {
        inputs!($batch, $time, $heads, $p, $groups, $n, [$batch, $time, $heads])
    };
    ($batch:literal, $time:literal, $heads:literal, $p:literal, $groups:literal, $n:literal, $decays:expr) => {
        &[
            In(&[$batch, $time, $heads, $p], Fill::Normal),
            In(&[$batch, $time, $heads], Fill::Positive),
            In(&$decays, Fill::Positive),
            In(&[$batch, $time, $groups, $n], Fill::Normal),
            In(&[$batch, $time, $groups, $n], Fill::Normal),
            In(&[$heads], Fill::Normal),
        ]
    };
}

const FAR: &str = "sums of strong decays reach -300 in a chunk, and differences of them lose digits in f32";
const INSIDE: &str = "decayed scores and states are rounded as operands of tensor cores";

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("composite", inputs!(2, 19, 2, 4, 1, 8), |x| vec![ssd(scan(x), false), ssd(scan(x), true)]).rounds(6.0, INSIDE),
    Case::new("one chunk", inputs!(2, 17, 3, 8, 1, 16), |x| chunked(x, false, 128)).rounds(6.0, INSIDE),
    Case::new("groups, odd sizes", inputs!(1, 37, 6, 5, 2, 7), |x| chunked(x, false, 16)).rounds(6.0, INSIDE),
    Case::new("reverse", inputs!(1, 83, 2, 24, 1, 16), |x| chunked(x, true, 48)).rounds(6.0, INSIDE),
    Case::new("a head's own group", inputs!(1, 50, 2, 16, 2, 40), |x| chunked(x, false, 32)).rounds(6.0, INSIDE),
    Case::new("two steps", inputs!(3, 2, 2, 8, 1, 8), |x| chunked(x, false, 128)).rounds(6.0, INSIDE),
    // So many sequences that a GPU needs no segments, and that heads of a group are added up in one block.
    Case::new("many sequences", inputs!(270, 20, 2, 4, 1, 3), |x| chunked(x, true, 16)).rounds(6.0, INSIDE),
    // Heads of 64 and states of 64 or 128, which GPUs with large shared memory take in chunks of 128.
    Case::new("shared chunks", inputs!(1, 200, 4, 64, 2, 64), |x| vec![ssd(scan(x), false)]).rounds(6.0, INSIDE),
    Case::new("shared chunks, reverse", inputs!(2, 300, 2, 64, 1, 128), |x| vec![ssd(scan(x), true)]).rounds(6.0, INSIDE),
    // Blocks that take three heads of a group and more, one after another.
    Case::new("shared chunks, six heads", inputs!(1, 260, 6, 64, 1, 64), |x| vec![ssd(scan(x), false)]).rounds(6.0, INSIDE),
    // On a GPU of four multiprocessors: three segments, of two chunks but for the last.
    Case::new("shared chunks, segments", inputs!(1, 520, 3, 64, 1, 64), |x| vec![ssd(scan(x), false)]).rounds(6.0, INSIDE),
    // Strong decays, in these kernels and in those for every shape.
    Case::new("shared chunks, strong decays", inputs!(1, 200, 2, 64, 1, 64), |x| vec![ssd(forgetful(x), false)])
        .rounds(6.0, INSIDE)
        .inexact(4e-5, FAR),
    Case::new("shared chunks, rates", inputs!(1, 260, 2, 64, 1, 128, [2]), |x| vec![ssd(by_rate(x), true)])
        .rounds(6.0, INSIDE)
        .inexact(4e-5, FAR),
    Case::new("strong decays", inputs!(2, 90, 2, 24, 1, 16), |x| vec![ssd(forgetful(x), true)]).rounds(6.0, INSIDE).inexact(4e-5, FAR),
    Case::new("rates", inputs!(1, 130, 2, 32, 1, 48, [2]), |x| vec![ssd(by_rate(x), false)]).rounds(6.0, INSIDE).inexact(4e-5, FAR),
    Case::new(
        "decode",
        &[
            In(&[2, 4, 8, 5], Fill::Frozen),
            In(&[2, 4, 8], Fill::Frozen),
            In(&[2, 4], Fill::Frozen),
            In(&[2, 4], Fill::Frozen),
            In(&[2, 2, 5], Fill::Frozen),
            In(&[2, 2, 5], Fill::Frozen),
            In(&[4], Fill::Frozen),
        ],
        |x| {
            let (y, state) = ssd_step(x[0].cast(DType::F32), scan(&x[1..]));
            vec![y, state]
        },
    )
    .rounds(6.0, INSIDE),
    Case::new(
        "last state",
        &[
            In(&[2, 150, 2, 5], Fill::Frozen),
            In(&[2, 150, 2], Fill::Frozen),
            In(&[2, 150, 2], Fill::Frozen),
            In(&[2, 150, 1, 20], Fill::Frozen),
            In(&[2, 150, 1, 20], Fill::Frozen),
            In(&[2], Fill::Frozen),
        ],
        |x| {
            let s = scan(x);
            vec![ssd_last(Scan { decay: -(s.decay.abs()), ..s })]
        },
    )
    .rounds(6.0, INSIDE),
    // On a GPU of 132 multiprocessors: blocks that take 12 heads of a group and more, without segments and with eleven.
    Case::new("130m, 6 x 900", inputs!(6, 900, 24, 64, 1, 128), |x| vec![ssd(scan(x), true)]).rounds(6.0, INSIDE).bench(),
    Case::new("130m, 1 x 16k", inputs!(1, 16384, 24, 64, 1, 128), |x| vec![ssd(scan(x), false)]).rounds(6.0, INSIDE).bench(),
    Case::new("hrm, 81 cells", inputs!(384, 81, 16, 64, 1, 64), |x| vec![ssd(scan(x), false)]).rounds(6.0, INSIDE).bench(),
    Case::new("130m, 64 x 1k", inputs!(64, 1024, 24, 64, 1, 128), |x| vec![ssd(scan(x), false)]).rounds(6.0, INSIDE).bench(),
    Case::new("130m, 32 x 2k", inputs!(32, 2048, 24, 64, 1, 128), |x| vec![ssd(scan(x), false)]).rounds(6.0, INSIDE).bench(),
    Case::new("130m, 8 x 8k", inputs!(8, 8192, 24, 64, 1, 128), |x| vec![ssd(scan(x), false)]).rounds(6.0, INSIDE).bench(),
    Case::new("130m, 1 x 64k", inputs!(1, 65536, 24, 64, 1, 128), |x| vec![ssd(scan(x), false)]).rounds(6.0, INSIDE).bench(),
    Case::new("130m, 8 x 8k, chunks of 64", inputs!(8, 8192, 24, 64, 1, 128), |x| chunked(x, false, 64)).rounds(6.0, INSIDE).bench(),
    Case::new("130m, 1 x 64k, chunks of 64", inputs!(1, 65536, 24, 64, 1, 128), |x| chunked(x, false, 64)).rounds(6.0, INSIDE).bench(),
];
