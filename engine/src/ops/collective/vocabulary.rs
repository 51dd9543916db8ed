//! Tables whose rows are divided among ranks: embeddings, and output projections with their loss.

use super::{Broadcast, all_gather, all_reduce};
use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io, Launch};
use crate::meta::{DType, Meta};
use crate::op::{Cost, Grads, Narrow, Op, Port};
use crate::ops::cross_entropy::{CrossEntropy, CrossEntropyGrad};
use crate::ops::pointwise::{Bin, Expr, record};
use crate::ranks::Group;
use crate::record::Var;

/// Indices into a whole table [rows * ranks, ..] as this rank sees them: i32, the row of its own part, or `elsewhere` where another rank has it, or `none` where the
/// index is negative; and f32, 1 where it is its own, else 0.
fn own_rows<'g>(index: Var<'g>, rows: usize, elsewhere: f32, none: f32, group: &Group) -> (Var<'g>, Var<'g>) {
    let mut e = Expr::default();
    let i = e.input(0);
    let (first, end, zero) = (e.c((group.rank * rows) as f32), e.c(((group.rank + 1) * rows) as f32), e.c(0.0));
    let (before, up_to) = (e.bin(Bin::Lt, i, first), e.bin(Bin::Lt, i, end));
    let inside = e.bin(Bin::Sub, up_to, before);
    let negative = e.bin(Bin::Lt, i, zero);
    let (from_first, elsewhere, none) = (e.bin(Bin::Sub, i, first), e.c(elsewhere), e.c(none));
    let other = e.select(negative, none, elsewhere);
    let own = e.select(inside, from_first, other);
    e.outs = vec![own, inside];
    let y = record(e, vec![DType::I32, DType::F32], &[index]);
    (y[0], y[1])
}

/// Whether f32 can number the rows of a table.
pub fn is_numbered(rows: usize, ranks: usize) -> bool {
    rows * ranks < 1 << 24
}

/// Rows of a table of which each rank has a part: [.., d], the same on all ranks.
pub fn gather_rows<'g>(table: Var<'g>, index: Var<'g>, group: &Group) -> Var<'g> {
    let (own, inside) = own_rows(index, table.shape()[0], 0.0, 0.0, group);
    let shape = [&index.shape()[..], &[1]].concat();
    all_reduce(table.gather_rows(own) * inside.reshape(&shape), group)
}

/// The weighted sum of the cross-entropy of h W^T, where each rank has some of the rows of W: `[1]`, the same on all ranks.
pub fn linear_cross_entropy<'g>(h: Var<'g>, w: Var<'g>, targets: Var<'g>, weight: Var<'g>, group: &Group) -> Var<'g> {
    let h = h.recorder().op1(Broadcast { group: group.clone() }, &[h]);
    (cross_entropy(h.linear(w), targets, group) * weight).sum()
}

/// The loss of each row of logits whose columns are divided among the ranks: `[rows]`, the same on all ranks; 0 if the target is -1.
pub fn cross_entropy<'g>(logits: Var<'g>, targets: Var<'g>, group: &Group) -> Var<'g> {
    let (r, rows, classes) = (logits.recorder(), logits.dim(1), logits.dim(0));
    let (here, inside) = own_rows(targets, classes, -1.0, -1.0, group);
    let seen = r.op(CrossEntropy, &[logits.stop_gradient(), here]);
    let (loss, lse) = (seen[0], seen[1]);
    let picked = all_reduce((lse - loss) * inside, group);
    let all = all_gather(lse.reshape(&[1, rows]), 0, group);
    let most = all.max_axis(0);
    let lse = (most + (all - most).exp().sum_axis(0).ln()).reshape(&[rows]);
    // A class that no part has stands for one that another rank has: its row has a gradient, but nothing to take away.
    let (marked, _) = own_rows(targets, classes, classes as f32, -1.0, group);
    r.op1(LossOfParts, &[logits, marked, lse.stop_gradient(), picked.stop_gradient()])
}

/// The loss of rows of which a rank has some columns. Inputs: its logits [rows, classes], for the gradient; targets i32, of its columns, `classes` where another rank
/// has the target, -1 where there is none; of the whole rows the logarithm of the sum of exponentials, and the target's logit, f32 `[rows]`. Output: f32 `[rows]`.
#[derive(Debug)]
pub struct LossOfParts;

impl Op for LossOfParts {
    fn name(&self) -> &'static str {
        "loss_of_parts"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let rows = Meta::f32(&[x[0].dim(1)]);
        assert!(x[0].rank() == 2 && x[1].shape == rows.shape && x[2] == rows && x[3] == rows, "loss_of_parts of {x:?}");
        vec![rows]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (targets, lse, picked) = (x[1].i32(), x[2].f32(), x[3].f32());
        for (r, y) in y[0].f32().iter_mut().enumerate() {
            *y = if targets[r] < 0 { 0.0 } else { lse[r] - picked[r] };
        }
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        let rows = io.y[0].elements();
        Launch::new(include_str!("loss_of_parts.cu"), "loss_of_parts")
            .define_type("T", io.x[0].dtype)
            .define("ROWS", rows)
            .grid(rows.div_ceil(256), 1, 1)
            .all(io)
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![dy[0].map(|d| d.recorder().op1(CrossEntropyGrad, &[x[0], x[1], x[2], d])), None, None, None]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(4 * x[2].bytes())
    }
}
