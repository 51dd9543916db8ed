//! Mixture of experts, with and without capacity limits: routing is decided on the device, and shapes are static. A token has `k` slots, one for each of
//! its experts, numbered token * k + j. Sorted by expert, the slots are rows, and one grouped GEMM multiplies all rows by the matrices of their
//! experts, whatever the experts' loads. Slots that found no place in an expert, and those of padding, are rows behind all others, which nothing computes.

mod capacity;
mod dispatch;
mod gelu;
mod grouped;
mod kernels;
mod outer;
mod route;
mod swiglu;

pub use capacity::{Capacity, Part};
pub use dispatch::Dispatch;
pub use gelu::{ExpertGelu, ExpertGeluGrad};
pub use grouped::{By, Experts, GroupedMatmul};
pub use kernels::{Kernel, kernel_for};
pub use outer::GroupedOuter;
pub use route::{Route, RouteGrad};
pub use swiglu::{GroupedSwiglu, GroupedSwigluGrad};

use crate::meta::DType;
use crate::op::{Case, Fill, In};
use crate::ops::matmul::Matmul;
use crate::record::Var;

/// Why FP8 leaves the GEMMs of experts alone.
const NO_FP8: &str = "the grouped GEMMs of experts have no FP8 kernel in kiln, and cuBLASLt 13's are marked experimental";

/// The routing of tokens to experts.
#[derive(Clone, Copy, Debug)]
pub struct Routing<'g> {
    /// The router's softmax, f32 [tokens, experts].
    pub probabilities: Var<'g>,
    /// The k largest probabilities of each token, renormalized to sum to 1, f32 [tokens, k].
    pub weights: Var<'g>,
    /// The experts that these belong to, i32 [tokens, k].
    pub chosen: Var<'g>,
    /// The slots, sorted by expert.
    pub rows: Rows<'g>,
}

/// The slots, sorted by expert (see `dispatch`).
#[derive(Clone, Copy, Debug)]
pub struct Rows<'g> {
    /// Slots of a token.
    pub k: usize,
    /// The slot of each row, i32 `[slots]`.
    pub order: Var<'g>,
    /// The row of each slot, i32 `[slots]`.
    pub position: Var<'g>,
    /// The first row of each expert, and last the number of rows, i32 [experts + 1].
    pub offsets: Var<'g>,
}

impl<'g> Var<'g> {
    /// Routes each token to the k experts with the largest of these logits [tokens, experts].
    #[track_caller]
    pub fn route(self, k: usize) -> Routing<'g> {
        let y = self.recorder().op(Route { k, normalized: true }, &[self]);
        Routing { probabilities: y[0], weights: y[1], chosen: y[2], rows: y[2].dispatch(self.dim(0)) }
    }

    /// Sorts slots by expert, given the experts of each token, i32 [tokens, k].
    #[track_caller]
    pub fn dispatch(self, experts: usize) -> Rows<'g> {
        self.dispatched(Dispatch { experts, none: false })
    }

    /// The same where `experts` stands for no expert.
    #[track_caller]
    pub fn dispatch_some(self, experts: usize) -> Rows<'g> {
        self.dispatched(Dispatch { experts, none: true })
    }

    #[track_caller]
    fn dispatched(self, op: Dispatch) -> Rows<'g> {
        let y = self.recorder().op(op, &[self]);
        Rows { k: self.dim(0), order: y[0], position: y[1], offsets: y[2] }
    }

    /// Each token of x [tokens, k] times the matrices w [experts, n, k] of its experts: [rows, n].
    #[track_caller]
    pub fn to_experts(self, w: Var<'g>, rows: &Rows<'g>) -> Var<'g> {
        rows.matmul(self, w, By::Token, By::Row)
    }

    /// Each row [rows, k] times the matrix of its expert, w [experts, n, k], summed over each token's rows: [tokens, n].
    #[track_caller]
    pub fn from_experts(self, w: Var<'g>, rows: &Rows<'g>) -> Var<'g> {
        rows.matmul(self, w, By::Row, By::Token)
    }
}

impl<'g> Rows<'g> {
    #[track_caller]
    fn matmul(&self, x: Var<'g>, w: Var<'g>, from: By, to: By) -> Var<'g> {
        let op = GroupedMatmul { top: self.k, from, to, transposed: true, experts: Experts::ALL, kernel: Kernel::Plain };
        x.recorder().op1(op, &[x, w, self.order, self.position, self.offsets])
    }
}

impl<'g> Routing<'g> {
    /// The weighted sum of the experts' outputs for x [tokens, d]. Each expert is a SwiGLU MLP: gate_up [experts, 2 hidden, d] (gates first), then
    /// down [experts, d, hidden].
    #[track_caller]
    pub fn experts(&self, x: Var<'g>, gate_up: Var<'g>, down: Var<'g>) -> Var<'g> {
        let r = &self.rows;
        let op = GroupedSwiglu { top: r.k, keep: true, experts: Experts::ALL, kernel: Kernel::Plain };
        let hidden = x.recorder().op(op, &[x, gate_up, r.order, r.position, r.offsets, self.weights])[0];
        hidden.from_experts(down, r)
    }

    /// The fraction of all slots that each expert has: f32 `[experts]`.
    pub fn loads(&self) -> Var<'g> {
        let experts = self.probabilities.dim(0);
        let offsets = self.rows.offsets.cast(DType::F32);
        (offsets.slice(0, 1, experts + 1) - offsets.slice(0, 0, experts)) * (1.0 / self.rows.order.meta().elements() as f32)
    }

    /// The balance loss: the sum over experts of load times mean probability, scaled so that even loads give 1. Its gradient goes through the
    /// probabilities.
    pub fn balance(&self) -> Var<'g> {
        let experts = self.probabilities.dim(0);
        (self.loads() * self.probabilities.mean_axis(0).reshape(&[experts])).sum() * experts as f32
    }
}

/// A mixture-of-experts layer: `x` [.., d] through the `k` experts that `router` [experts, d] chooses for each token; and the routing. Without a
/// router there is one expert, a dense layer.
#[track_caller]
pub fn mixture<'g>(x: Var<'g>, router: Option<Var<'g>>, gate_up: Var<'g>, down: Var<'g>, k: usize) -> (Var<'g>, Option<Routing<'g>>) {
    let meta = x.meta();
    let flat = x.reshape(&[meta.rows(), meta.dim(0)]);
    let Some(router) = router else {
        let both = flat.linear(gate_up.row(0));
        let hidden = both.dim(0) / 2;
        let y = both.slice(1, 0, hidden).swiglu(both.slice(1, hidden, 2 * hidden)).linear(down.row(0));
        return (y.reshape(&meta.shape), None);
    };
    // Logits are f32 whatever the inputs' type, since routing depends on small differences.
    let logits = x.recorder().op1(Matmul { dtype: Some(DType::F32), ..Matmul::default() }, &[flat, router.t()]);
    let routing = logits.route(k);
    (routing.experts(flat, gate_up, down).reshape(&meta.shape), Some(routing))
}

/// What a mixture with capacity did with its tokens.
#[derive(Clone, Copy, Debug)]
pub struct Placed<'g> {
    /// The router's softmax, f32 [tokens, experts].
    pub probabilities: Var<'g>,
    /// How many slots asked for each expert, f32 `[experts]`: k for each token that is not padding.
    pub loads: Var<'g>,
    /// How many of them found a place, f32 `[1]`.
    pub kept: Var<'g>,
}

impl<'g> Placed<'g> {
    /// The balance loss: the sum over experts of their share of the tokens times their mean probability, of tokens that are not padding (`real`, f32
    /// `[tokens]`, 1 or 0), scaled so that even loads give k. Slots that found no place count. Its gradient goes through the probabilities.
    pub fn balance(&self, real: Var<'g>) -> Var<'g> {
        let (tokens, experts) = (self.probabilities.dim(1), self.probabilities.dim(0));
        let count = real.sum();
        let probability = (self.probabilities * real.reshape(&[tokens, 1])).sum_axis(0).reshape(&[experts]);
        (probability * self.loads).sum() * experts as f32 / (count * count)
    }
}

/// A mixture-of-experts layer with capacity: x [tokens, d] through the `k` experts that `router` [experts, d] chooses for each token, weighted by their
/// probabilities, which are not renormalized. An expert is an MLP with GELU: up [experts, hidden, d], down [experts, d, hidden]. It takes the `places`
/// slots with the largest probabilities; the others add nothing to their tokens. Tokens for which `real`, f32 `[tokens]`, is 0 are padding and go to none.
#[track_caller]
pub fn mixture_with_capacity<'g>(
    x: Var<'g>,
    real: Var<'g>,
    [router, up, down]: [Var<'g>; 3],
    (k, places): (usize, usize),
) -> (Var<'g>, Placed<'g>) {
    let (r, tokens, experts) = (x.recorder(), x.dim(1), router.dim(1));
    // Logits are f32 whatever the inputs' type, since routing depends on small differences.
    let logits = r.op1(Matmul { dtype: Some(DType::F32), ..Matmul::default() }, &[x, router.t()]);
    let y = r.op(Route { k, normalized: false }, &[logits]);
    let (probabilities, weights) = (y[0], y[1]);
    let none = r.full(&[1, 1], experts as f32);
    let asked = real.reshape(&[tokens, 1]).choose(y[2].cast(DType::F32), none).cast(DType::I32);
    let y = r.scope("places", || r.op(Capacity { experts, places, part: Part::ALL }, &[asked, asked, weights]));
    let rows = y[0].dispatch_some(experts);
    let h = x.to_experts(up, &rows);
    let hidden = r.op1(ExpertGelu { top: k, experts: Experts::ALL }, &[h, rows.order, rows.offsets, weights]);
    let kept = rows.offsets.slice(0, experts, experts + 1).cast(DType::F32);
    (hidden.from_experts(down, &rows), Placed { probabilities, loads: y[1], kept })
}

/// Rows of tokens whose experts are given; a benchmark does not count how they were found.
fn rows<'g>(chosen: Var<'g>, experts: usize) -> Rows<'g> {
    chosen.recorder().scope("routing", || chosen.dispatch(experts))
}

/// As `rows`, with uneven loads, from numbers below 512: half of the slots go to the first of 8 experts, an eighth to the second, and so on.
fn skewed(numbers: Var) -> Rows {
    numbers.recorder().scope("routing", || {
        let share = numbers.cast(DType::F32) * (1.0 / 512.0);
        (share * share * share * 8.0).cast(DType::I32).dispatch(8)
    })
}

fn swiglu<'g>(x: Var<'g>, gate_up: Var<'g>, weights: Var<'g>, rows: &Rows<'g>) -> Var<'g> {
    let op = GroupedSwiglu { top: rows.k, keep: true, experts: Experts::ALL, kernel: Kernel::Plain };
    x.recorder().op(op, &[x, gate_up, rows.order, rows.position, rows.offsets, weights.cast(DType::F32)])[0]
}

fn outer<'g>(rows_of: Var<'g>, tokens: Var<'g>, rows: &Rows<'g>) -> Var<'g> {
    GroupedOuter::record([(rows_of, By::Row), (tokens, By::Token)], rows.k, Experts::ALL, rows.order, rows.offsets)
}

/// What a rank computes that has some of the experts: its part of every token's result.
fn part<'g>(experts: Experts, x: [Var<'g>; 4], rows: &Rows<'g>) -> Var<'g> {
    let ([x, gate_up, down, weights], kernel) = (x, Kernel::Plain);
    let r = x.recorder();
    let weights = weights.cast(DType::F32);
    let first = GroupedSwiglu { top: rows.k, keep: true, experts, kernel };
    let hidden = r.op(first, &[x, gate_up, rows.order, rows.position, rows.offsets, weights])[0];
    let second = GroupedMatmul { top: rows.k, from: By::Row, to: By::Token, transposed: true, experts, kernel };
    r.op1(second, &[hidden, down, rows.order, rows.position, rows.offsets])
}

/// What a part of 6 experts is given, so many of them.
macro_rules! some {
    ($experts:literal) => {
        &[
            In(&[90, 64], Fill::Normal),
            In(&[$experts, 80, 64], Fill::Normal),
            In(&[$experts, 72, 40], Fill::Normal),
            In(&[90, 2], Fill::Normal),
            In(&[90, 2], Fill::Index(6)),
        ]
    };
}

/// A mixture with capacity of which every number is an output.
fn placed<'g>(x: &[Var<'g>], k: usize, places: usize) -> Vec<Var<'g>> {
    let real = x[1].cast(DType::F32);
    let (y, placed) = mixture_with_capacity(x[0], real, [x[2], x[3], x[4]], (k, places));
    vec![y, placed.balance(real), placed.loads, placed.kept]
}

/// What a rank computes of an MLP with GELU that has some of `count` experts, where some slots have none.
fn gelu<'g>(experts: Experts, count: usize, x: &[Var<'g>]) -> Vec<Var<'g>> {
    let ([x, up, down, weights], rows) = ([x[0], x[1], x[2], x[3]], x[4].dispatch_some(count));
    let product = |from, to| GroupedMatmul { top: rows.k, from, to, transposed: true, experts, kernel: Kernel::Plain };
    let r = x.recorder();
    let h = r.op1(product(By::Token, By::Row), &[x, up, rows.order, rows.position, rows.offsets]);
    let hidden = r.op1(ExpertGelu { top: rows.k, experts }, &[h, rows.order, rows.offsets, weights.cast(DType::F32)]);
    vec![r.op1(product(By::Row, By::Token), &[hidden, down, rows.order, rows.position, rows.offsets])]
}

/// Cases that check and time the ops of this module. A rank's part of the experts may be followed by rows that it does not have, and be preceded by some.
pub const CASES: &[Case] = &[
    Case::new("route", &[In(&[7, 5], Fill::Spread)], |x| {
        let r = (x[0] * 0.1).route(2);
        vec![r.weights, r.probabilities]
    }),
    Case::new("route, 40 experts", &[In(&[3, 40], Fill::Spread)], |x| vec![(x[0] * 0.15).route(3).weights])
        .rounds(6.0, "logits of up to 13 are rounded before their exponentials are taken"),
    Case::new("route, all experts", &[In(&[4, 3], Fill::Spread)], |x| vec![(x[0] * 0.2).route(3).weights]),
    // Whole numbers, so that many are equal: a GPU decides as the CPU does.
    Case::new("route, ties", &[In(&[60, 5], Fill::Index(3)), In(&[60, 40], Fill::Index(4))], |x| {
        let [a, b] = [0, 1].map(|i| x[i].cast(DType::F32).route(3));
        vec![a.chosen.cast(DType::F32), a.weights, b.chosen.cast(DType::F32)]
    }),
    Case::new("balance", &[In(&[30, 4], Fill::Spread)], |x| vec![(x[0] * 0.03).route(2).balance()]),
    Case::new("dispatch", &[In(&[700, 3], Fill::Index(5))], |x| {
        let r = x[0].dispatch(6);
        vec![r.order.cast(DType::F32), r.position.cast(DType::F32), r.offsets.cast(DType::F32)]
    }),
    Case::new("dispatch, 100 experts", &[In(&[50], Fill::Index(100))], |x| vec![x[0].dispatch(100).order.cast(DType::F32)]),
    Case::new(
        "to experts, one has none",
        &[In(&[20, 11], Fill::Normal), In(&[5, 9, 11], Fill::Normal), In(&[20, 3], Fill::Index(4))],
        |x| vec![x[0].to_experts(x[1], &rows(x[2], 5))],
    ),
    Case::new(
        "from experts, one has none",
        &[In(&[60, 9], Fill::Normal), In(&[5, 11, 9], Fill::Normal), In(&[20, 3], Fill::Index(4))],
        |x| vec![x[0].from_experts(x[1], &rows(x[2], 5))],
    ),
    Case::new("to experts, tiles", &[In(&[170, 72], Fill::Normal), In(&[5, 264, 72], Fill::Normal), In(&[170, 2], Fill::Index(4))], |x| {
        vec![x[0].to_experts(x[1], &rows(x[2], 5))]
    }),
    Case::new(
        "from experts, tiles",
        &[In(&[340, 136], Fill::Normal), In(&[5, 72, 136], Fill::Normal), In(&[170, 2], Fill::Index(4))],
        |x| vec![x[0].from_experts(x[1], &rows(x[2], 5))],
    ),
    Case::new("all to one", &[In(&[40, 200], Fill::Normal), In(&[3, 128, 200], Fill::Normal), In(&[40, 4], Fill::Index(1))], |x| {
        vec![x[0].to_experts(x[1], &rows(x[2], 3))]
    }),
    Case::new(
        "swiglu, tiles",
        &[In(&[90, 64], Fill::Normal), In(&[7, 304, 64], Fill::Normal), In(&[90, 2], Fill::Normal), In(&[90, 2], Fill::Index(6))],
        |x| vec![swiglu(x[0], x[1], x[2], &rows(x[3], 7))],
    ),
    Case::new(
        "experts",
        &[In(&[6, 4], Fill::Spread), In(&[6, 16], Fill::Normal), In(&[4, 48, 16], Fill::Normal), In(&[4, 16, 24], Fill::Normal)],
        |x| vec![(x[0] * 0.4).route(2).experts(x[1], x[2], x[3])],
    ),
    Case::new("the first half of the experts", some!(3), |x| {
        vec![part(Experts { index: 0, of: 2 }, [x[0], x[1], x[2], x[3]], &rows(x[4], 6))]
    }),
    Case::new("the second third of the experts", some!(2), |x| {
        vec![part(Experts { index: 1, of: 3 }, [x[0], x[1], x[2], x[3]], &rows(x[4], 6))]
    }),
    Case::new("the second half of the experts", some!(3), |x| {
        vec![part(Experts { index: 1, of: 2 }, [x[0], x[1], x[2], x[3]], &rows(x[4], 6))]
    }),
    Case::new(
        "mixture with a router",
        &[In(&[2, 2, 13], Fill::Normal), In(&[5, 13], Fill::Normal), In(&[5, 14, 13], Fill::Normal), In(&[5, 13, 7], Fill::Normal)],
        |x| {
            let (y, routing) = mixture(x[0], Some(x[1]), x[2], x[3], 2);
            vec![y, routing.expect("there is a router").balance()]
        },
    ),
    Case::new("one expert", &[In(&[2, 3, 13], Fill::Normal), In(&[1, 14, 13], Fill::Normal), In(&[1, 13, 7], Fill::Normal)], |x| {
        vec![mixture(x[0], None, x[1], x[2], 1).0]
    }),
    // Whole numbers, so that many weights are equal: a GPU decides as the CPU does. Expert 5 stands for none.
    Case::new("capacity", &[In(&[700, 3], Fill::Index(6)), In(&[700, 3], Fill::Index(9))], |x| {
        let y = x[0].recorder().op(Capacity { experts: 5, places: 300, part: Part::ALL }, &[x[0], x[0], x[1].cast(DType::F32)]);
        vec![y[0].cast(DType::F32), y[1]]
    }),
    Case::new("capacity, the second part of the tokens", &[In(&[700, 2], Fill::Index(4)), In(&[700, 2], Fill::Index(9))], |x| {
        let op = Capacity { experts: 4, places: 100, part: Part { index: 1, of: 2 } };
        let y = x[0].recorder().op(op, &[x[0].slice(0, 350, 700), x[0], x[1].cast(DType::F32)]);
        vec![y[0].cast(DType::F32), y[1]]
    }),
    Case::new("capacity, places for some", &[In(&[2000, 1], Fill::Index(3)), In(&[2000, 1], Fill::Target(200))], |x| {
        let y = x[0].recorder().op(Capacity { experts: 3, places: 660, part: Part::ALL }, &[x[0], x[0], x[1].cast(DType::F32)]);
        vec![y[0].cast(DType::F32), y[1]]
    }),
    Case::new("dispatch, some to none", &[In(&[700, 3], Fill::Index(6))], |x| {
        let r = x[0].dispatch_some(5);
        vec![r.order.cast(DType::F32), r.position.cast(DType::F32), r.offsets.cast(DType::F32)]
    }),
    Case::new("route without a sum of 1", &[In(&[7, 5], Fill::Spread)], |x| {
        let y = x[0].recorder().op(Route { k: 2, normalized: false }, &[x[0] * 0.1]);
        vec![y[1], y[0]]
    }),
    Case::new(
        "gelu of experts",
        &[
            In(&[90, 16], Fill::Normal),
            In(&[5, 72, 16], Fill::Normal),
            In(&[5, 24, 72], Fill::Normal),
            In(&[90, 2], Fill::Normal),
            In(&[90, 2], Fill::Index(6)),
        ],
        |x| gelu(Experts::ALL, 5, x),
    ),
    Case::new(
        "gelu of the first half of the experts",
        &[
            In(&[90, 16], Fill::Normal),
            In(&[3, 72, 16], Fill::Normal),
            In(&[3, 24, 72], Fill::Normal),
            In(&[90, 2], Fill::Normal),
            In(&[90, 2], Fill::Index(7)),
        ],
        |x| gelu(Experts { index: 0, of: 2 }, 6, x),
    ),
    Case::new(
        "gelu of the second half of the experts, long rows",
        &[
            In(&[20, 8], Fill::Normal),
            In(&[2, 1040, 8], Fill::Normal),
            In(&[2, 8, 1040], Fill::Normal),
            In(&[20, 2], Fill::Normal),
            In(&[20, 2], Fill::Index(5)),
        ],
        |x| gelu(Experts { index: 1, of: 2 }, 4, x),
    ),
    Case::new(
        "mixture with capacity",
        &[
            In(&[7, 13], Fill::Normal),
            In(&[7], Fill::Mask),
            In(&[3, 13], Fill::Normal),
            In(&[3, 14, 13], Fill::Normal),
            In(&[3, 13, 14], Fill::Normal),
        ],
        |x| placed(x, 2, 2),
    ),
    Case::new(
        "hrm's gate and up",
        &[
            In(&[31104, 512], Fill::Normal),
            In(&[8, 1536, 512], Fill::Normal),
            In(&[31104, 2], Fill::Frozen),
            In(&[31104, 2], Fill::Index(8)),
        ],
        |x| vec![swiglu(x[0], x[1], x[2], &rows(x[3], 8))],
    )
    .bench(),
    Case::new(
        "hrm's gate and up, skewed",
        &[
            In(&[31104, 512], Fill::Normal),
            In(&[8, 1536, 512], Fill::Normal),
            In(&[31104, 2], Fill::Frozen),
            In(&[31104, 2], Fill::Index(512)),
        ],
        |x| vec![swiglu(x[0], x[1], x[2], &skewed(x[3]))],
    )
    .bench(),
    Case::new("hrm's down", &[In(&[62208, 768], Fill::Normal), In(&[8, 512, 768], Fill::Normal), In(&[31104, 2], Fill::Index(8))], |x| {
        vec![x[0].from_experts(x[1], &rows(x[2], 8))]
    })
    .bench(),
    Case::new(
        "hrm's down, skewed",
        &[In(&[62208, 768], Fill::Normal), In(&[8, 512, 768], Fill::Normal), In(&[31104, 2], Fill::Index(512))],
        |x| vec![x[0].from_experts(x[1], &skewed(x[2]))],
    )
    .bench(),
    Case::new(
        "gradient of hrm's gate and up",
        &[In(&[62208, 1536], Fill::Frozen), In(&[31104, 512], Fill::Frozen), In(&[31104, 2], Fill::Index(8))],
        |x| vec![outer(x[0], x[1], &rows(x[2], 8))],
    )
    .bench(),
    Case::new(
        "gradient of hrm's gate and up, skewed",
        &[In(&[62208, 1536], Fill::Frozen), In(&[31104, 512], Fill::Frozen), In(&[31104, 2], Fill::Index(512))],
        |x| vec![outer(x[0], x[1], &skewed(x[2]))],
    )
    .bench(),
    Case::new(
        "hrm's mixture",
        &[
            In(&[31104, 512], Fill::Normal),
            In(&[8, 512], Fill::Normal),
            In(&[8, 1536, 512], Fill::Normal),
            In(&[8, 512, 768], Fill::Normal),
        ],
        |x| vec![mixture(x[0], Some(x[1]), x[2], x[3], 2).0],
    )
    .bench(),
];
