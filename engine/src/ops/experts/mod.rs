//! Mixture of experts without capacity limits: routing is decided on the device, and shapes are static. A token has `k` slots, one for each of
//! its experts, numbered token * k + j. Sorted by expert, the slots are rows, and one grouped GEMM multiplies all rows by the matrices of their
//! experts, whatever the experts' loads.

mod dispatch;
mod grouped;
mod kernels;
mod outer;
mod route;
mod swiglu;

pub use dispatch::Dispatch;
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
        let y = self.recorder().op(Route { k }, &[self]);
        Routing { probabilities: y[0], weights: y[1], chosen: y[2], rows: y[2].dispatch(self.dim(0)) }
    }

    /// Sorts slots by expert, given the experts of each token, i32 [tokens, k].
    #[track_caller]
    pub fn dispatch(self, experts: usize) -> Rows<'g> {
        let y = self.recorder().op(Dispatch { experts }, &[self]);
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

/// What a rank computes that has the second half of the experts: its part of every token's result.
fn half<'g>(x: Var<'g>, gate_up: Var<'g>, down: Var<'g>, weights: Var<'g>, rows: &Rows<'g>) -> Var<'g> {
    let (r, experts, kernel) = (x.recorder(), Experts { index: 1, of: 2 }, Kernel::Plain);
    let weights = weights.cast(DType::F32);
    let first = GroupedSwiglu { top: rows.k, keep: true, experts, kernel };
    let hidden = r.op(first, &[x, gate_up, rows.order, rows.position, rows.offsets, weights])[0];
    let second = GroupedMatmul { top: rows.k, from: By::Row, to: By::Token, transposed: true, experts, kernel };
    r.op1(second, &[hidden, down, rows.order, rows.position, rows.offsets])
}

/// Cases that check and time the ops of this module.
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
    Case::new(
        "half of the experts",
        &[
            In(&[90, 64], Fill::Normal),
            In(&[3, 80, 64], Fill::Normal),
            In(&[3, 72, 40], Fill::Normal),
            In(&[90, 2], Fill::Normal),
            In(&[90, 2], Fill::Index(6)),
        ],
        |x| vec![half(x[0], x[1], x[2], x[3], &rows(x[4], 6))],
    ),
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
