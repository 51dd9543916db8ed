//! Grouped GEMM: each row times the matrix of its expert.

use super::kernels::{Kernel, TILE_ROWS, Tile};
use super::outer::GroupedOuter;
use crate::cpu::gemm::{Into, Mat, gemm};
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, Meta};
use crate::op::{self, Axis, Cost, Grads, Narrow, Op, Port, Share};
use crate::ops::matmul::not_in_fp8;
use crate::ops::reduce::packs::{PACKS, pack};
use crate::record::Var;
use rayon::prelude::*;
use std::sync::Arc;

/// How the rows of a tensor are indexed. A token has one row for each of its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// One row for each token copy, sorted by expert.
    Row,
    /// One row for each token.
    Token,
}

/// The experts of a rank: part `index` of `of` equal parts of all. Rows stay sorted by all experts; a rank computes those of its own, leaves the others
/// unwritten, and its sums over the rows of a token are of its own rows only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Which part.
    pub index: usize,
    /// How many parts.
    pub of: usize,
}

impl Experts {
    /// Every expert.
    pub const ALL: Experts = Experts { index: 0, of: 1 };

    /// How many experts these are, given `dispatch`'s offsets.
    pub(super) fn count(self, offsets: &Meta) -> usize {
        (offsets.elements() - 1) / self.of
    }

    /// Whether there are others.
    pub(super) fn are_some(self) -> bool {
        self.of > 1
    }

    /// The offsets of these experts, of those of all.
    pub(super) fn offsets(self, all: &[i32]) -> &[i32] {
        let count = (all.len() - 1) / self.of;
        &all[self.index * count..][..count + 1]
    }

    /// The same on a GPU: where they begin in input `at`.
    pub(super) fn place(self, at: At, offsets: &Meta) -> Place {
        at.plus(4 * self.index * self.count(offsets))
    }
}

/// Inputs: x [rows or tokens, k], w [experts, k, n] or, `transposed`, [experts, n, k], then `dispatch`'s order, position and offsets.
/// By token, row r reads x of its token (a gather), and the output of a token is the sum over its rows. Output [rows or tokens, n].
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedMatmul {
    /// Experts, and so rows, of each token.
    pub top: usize,
    /// How the rows of the input are indexed.
    pub from: By,
    /// How the rows of the output are indexed.
    pub to: By,
    /// Whether w is [experts, n, k].
    pub transposed: bool,
    /// The experts whose matrices w has.
    pub experts: Experts,
    /// Set by the pass `grouped-gemm`.
    pub kernel: Kernel,
}

/// (experts, k, n) of w.
pub(super) fn matrices(w: &[usize], transposed: bool) -> [usize; 3] {
    if transposed { [w[0], w[2], w[1]] } else { [w[0], w[1], w[2]] }
}

/// Whether order, position and offsets have the right shapes for `top` rows per token.
pub(super) fn routed(x: &[Meta], top: usize, experts: usize) -> bool {
    let slots = x[0].elements();
    slots.is_multiple_of(top) && x[1].elements() == slots && x[2].elements() == experts + 1 && x.iter().all(|m| m.dtype == DType::I32)
}

/// Two ways to divide a grouped GEMM: by tokens, with rows of each rank's own; and by experts, where every rank has all tokens.
pub(super) fn axes(from: By, to: By, more: &[[Share; 2]], outputs: usize) -> Vec<Axis> {
    let share = |by: By, token: Share| if by == By::Row { Share::Own } else { token };
    let mut tokens = vec![share(from, Share::Dim(0)), Share::Whole, Share::Own, Share::Own, Share::Sum];
    let mut experts = vec![share(from, Share::Whole), Share::Dim(0), Share::Whole, Share::Whole, Share::Whole];
    more.iter().for_each(|[t, e]| {
        tokens.push(*t);
        experts.push(*e);
    });
    let out = |token: Share| vec![share(to, token); outputs];
    vec![Axis::new(tokens, out(Share::Dim(0))), Axis::new(experts, out(Share::Sum))]
}

impl By {
    /// The first dimension of a tensor that is indexed so, if there are `rows` rows by expert.
    pub(super) fn count(self, rows: usize, top: usize) -> usize {
        if self == By::Row { rows } else { rows / top }
    }
}

impl Op for GroupedMatmul {
    fn name(&self) -> &'static str {
        "grouped_matmul"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let shaped = x.len() == 5 && x[0].rank() == 2 && x[1].rank() == 3 && x[0].dtype == x[1].dtype && x[0].dtype.is_float();
        assert!(shaped, "{self:?} of {x:?}");
        let ([experts, k, n], rows) = (matrices(&x[1].shape, self.transposed), x[2].elements());
        let fits = routed(&x[2..], self.top, experts * self.experts.of) && x[0].shape == [self.from.count(rows, self.top), k];
        assert!(fits, "{self:?} of {x:?}");
        vec![x[0].with(&[self.to.count(rows, self.top), n])]
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        let ([_, k, n], rows) = (matrices(&x[1].shape, self.transposed), x[2].elements());
        (if self.from == By::Token { rows * k } else { 0 }) + if self.to == By::Token { rows * n } else { 0 }
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], work: &mut [f32]) {
        let [_, k, n] = matrices(x[1].shape, self.transposed);
        let (order, position, offsets) = (x[2].i32(), x[3].i32(), self.experts.offsets(x[4].i32()));
        let out = y[0].f32();
        let (gathered, work) = work.split_at_mut(if self.from == By::Token { order.len() * k } else { 0 });
        let rows = match self.from {
            By::Row => x[0].f32(),
            By::Token => gather(x[0].f32(), order, self.top, k, gathered),
        };
        match self.to {
            By::Row => products(rows, x[1].f32(), offsets, k, n, self.transposed, out),
            By::Token => {
                products(rows, x[1].f32(), offsets, k, n, self.transposed, work);
                let own = offsets[0]..offsets[offsets.len() - 1];
                out.par_chunks_mut(n).zip(position.par_chunks(self.top)).with_min_len(16).for_each(|(out, rows)| {
                    simd(
                        #[inline(always)]
                        || {
                            let mut rows = rows.iter().filter(|row| crate::mutant!("rows-of-other-ranks-experts", own.contains(row), true));
                            match rows.next() {
                                Some(&row) => out.copy_from_slice(&work[row as usize * n..][..n]),
                                None => out.fill(0.0),
                            }
                            for &row in rows {
                                out.iter_mut().zip(&work[row as usize * n..][..n]).for_each(|(o, v)| *o += v);
                            }
                        },
                    )
                });
            }
        }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        not_in_fp8(op::rounded(at), super::NO_FP8)
    }

    fn cuda(&self, io: &Io) -> Code {
        let [experts, k, n] = matrices(&io.x[1].shape, self.transposed);
        let rows = io.x[2].elements();
        let (order, position, offsets) = (At::X(2).into(), At::X(3).into(), self.experts.place(At::X(4), &io.x[4]));
        let (y, work) = (At::Y(0).into(), At::Work.into());
        let to = if self.to == By::Row { y } else { work };
        let p =
            Product { experts, rows, k, out: n, top: self.top, from: self.from, transposed: self.transposed, swiglu: false, kept: false };
        let mut steps = vec![Step::Launch(p.launch(self.kernel, io, &[At::X(0).into(), At::X(1).into(), offsets, order, to]))];
        if self.to == By::Row {
            return Code { steps, workspace: 0 };
        }
        let dtype = io.y[0].dtype;
        let vec = pack(&[dtype], &[n]);
        let packs = rows / self.top * (n / vec);
        let sum = Launch::new(&[PACKS, include_str!("sum_slots.cu")].concat(), "sum_slots")
            .define_type("T", dtype)
            .define("VEC", vec)
            .define("D", n)
            .define("TOKENS", rows / self.top)
            .define("TOP", self.top)
            .define("EXPERTS", experts)
            .define("AT", if packs < 1 << 31 { "u32" } else { "u64" })
            .grid(packs.div_ceil(256), 1, 1)
            .args(&[work, position, offsets, y]);
        steps.push(Step::Launch(sum));
        Code { steps, workspace: rows * n * dtype.size() }
    }

    fn axes(&self, _: &[Meta], _: usize) -> Vec<Axis> {
        axes(self.from, self.to, &[], 1)
    }

    fn part(&self, _: &[Meta], axis: usize, of: usize, index: usize) -> Option<Arc<dyn Op>> {
        (axis == 1).then(|| Arc::new(GroupedMatmul { experts: Experts { index, of }, ..self.clone() }) as _)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0].map(|d| d.cast(x[0].dtype())) else { return vec![None; 5] };
        let (from, to) = (self.to, self.from);
        let back = GroupedMatmul { from, to, transposed: !self.transposed, ..self.clone() };
        let by_x = d.recorder().op1(back, &[d, x[1], x[2], x[3], x[4]]);
        let sides = [(x[0], self.from), (d, self.to)];
        let by_w = GroupedOuter::record(if self.transposed { [sides[1], sides[0]] } else { sides }, self.top, self.experts, x[2], x[4]);
        vec![Some(by_x), Some(by_w), None, None, None]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let [_, k, n] = matrices(&x[1].shape, self.transposed);
        let bytes = x.iter().map(|m| m.bytes()).sum::<usize>() + self.infer(x)[0].bytes();
        Cost::compute(2 * x[2].elements() * k * n / self.experts.of, bytes)
    }
}

/// The rows [d] of tokens, gathered in the order of the experts.
pub(super) fn gather<'a>(tokens: &[f32], order: &[i32], top: usize, d: usize, rows: &'a mut [f32]) -> &'a [f32] {
    rows.par_chunks_mut(d)
        .zip(order)
        .with_min_len(32)
        .for_each(|(row, &slot)| row.copy_from_slice(&tokens[slot as usize / top * d..][..d]));
    rows
}

/// y [rows, n] = x [rows, k] times each expert's matrix.
pub(super) fn products(x: &[f32], w: &[f32], offsets: &[i32], k: usize, n: usize, transposed: bool, y: &mut [f32]) {
    // Chunks of rows: small enough that every thread gets some, whatever the loads, and large enough to be worth packing the matrix.
    let most = (y.len() / n).div_ceil(4 * rayon::current_num_threads()).max(32);
    let mut tasks: Vec<(usize, usize, &mut [f32])> = vec![];
    let mut rest = &mut y[offsets[0] as usize * n..];
    for (expert, o) in offsets.windows(2).enumerate() {
        for first in (o[0] as usize..o[1] as usize).step_by(most) {
            let (own, after) = rest.split_at_mut(most.min(o[1] as usize - first) * n);
            tasks.push((expert, first, own));
            rest = after;
        }
    }
    tasks.into_par_iter().for_each(|(expert, first, out)| {
        let rows = out.len() / n;
        let w = &w[expert * k * n..][..k * n];
        let w = if transposed { Mat::rows(w, k).t() } else { Mat::rows(w, n) };
        gemm(out, n, Into::Replace, rows, k, n, Mat::rows(&x[first * k..][..rows * k], k), w, 1.0, false);
    });
}

/// One grouped GEMM on a GPU, with or without SwiGLU.
pub(super) struct Product {
    pub experts: usize,
    pub rows: usize,
    pub k: usize,
    /// Columns of the result.
    pub out: usize,
    pub top: usize,
    pub from: By,
    pub transposed: bool,
    pub swiglu: bool,
    /// Whether SwiGLU's inputs, gate and up, are written too.
    pub kept: bool,
}

impl Product {
    pub(super) fn launch(&self, kernel: Kernel, io: &Io, args: &[Place]) -> Launch {
        // SwiGLU has as many gate columns as up columns.
        let columns = if self.out <= 128 && !self.swiglu { 128 } else { 256 };
        let launch = match Tile::new(kernel, io.arch, io.x[0].dtype, &io.offsets[..2], columns, [false, !self.transposed]) {
            Some(tile) => {
                let across = self.out.div_ceil(if self.swiglu { columns / 2 } else { columns });
                let tiles = (self.rows.div_ceil(TILE_ROWS) + self.experts) * across;
                tile.launch(include_str!("product.cu"), "grouped_product").grid(tiles.min(io.arch.multiprocessors as usize), 1, 1)
            }
            None => {
                let tiles = (self.rows.div_ceil(64) + self.experts) * self.out.div_ceil(64);
                Launch::new(include_str!("plain_product.cu"), "grouped_product").define_type("T", io.x[0].dtype).grid(tiles, 1, 1)
            }
        };
        launch
            .define("EXPERTS", self.experts)
            .define("K", self.k)
            .define("OUT", self.out)
            .define("TOP", self.top)
            .define("GATHER", (self.from == By::Token) as u8)
            .define("TRANSPOSED", self.transposed as u8)
            .define("SWIGLU", self.swiglu as u8)
            .define("KEPT", self.kept as u8)
            .args(args)
    }
}
