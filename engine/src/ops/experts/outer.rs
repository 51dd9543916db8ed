//! Gradients with respect to the experts' matrices: for each expert, left^T right over its rows.

use super::grouped::{By, Experts, gather};
use super::kernels::{Kernel, TILE_ROWS, Tile};
use crate::cpu::gemm::{Into, Mat, gemm};
use crate::cpu::{View, ViewMut};
use crate::kernel::{At, Code, Io, Launch, Step};
use crate::meta::{DType, Meta};
use crate::op::{self, Cost, Grads, Narrow, Op, Port, no_gradient};
use crate::ops::matmul::not_in_fp8;
use crate::record::Var;

/// Inputs: left [rows or tokens, m], right [rows or tokens, n], `dispatch`'s order and offsets. Output f32 [experts, m, n]: the sum of
/// left^T right over each expert's rows.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedOuter {
    /// Experts, and so rows, of each token.
    pub top: usize,
    /// How the rows of the left operand are indexed.
    pub left: By,
    /// How the rows of the right operand are indexed.
    pub right: By,
    /// The experts whose sums are wanted.
    pub experts: Experts,
    /// Set by the pass `grouped-gemm`.
    pub kernel: Kernel,
}

impl GroupedOuter {
    /// Records left^T right for each expert: the gradient with respect to the experts' matrices.
    pub fn record<'g>(sides: [(Var<'g>, By); 2], top: usize, experts: Experts, order: Var<'g>, offsets: Var<'g>) -> Var<'g> {
        let [(left, by_left), (right, by_right)] = sides;
        let op = GroupedOuter { top, left: by_left, right: by_right, experts, kernel: Kernel::Plain };
        left.recorder().op1(op, &[left, right, order, offsets])
    }
}

/// Blocks that share the work: the multiprocessors of an H200, and as many on every GPU, so that sums have the same bits.
const BLOCKS: usize = 132;
const COLUMNS: usize = 256;

impl Op for GroupedOuter {
    fn name(&self) -> &'static str {
        "grouped_outer"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let rows = x[2].elements();
        let fits = |m: &Meta, by: By| m.rank() == 2 && m.dim(1) == by.count(rows, self.top);
        let typed = x[0].dtype == x[1].dtype && x[0].dtype.is_float() && x[2].dtype == DType::I32 && x[3].dtype == DType::I32;
        assert!(fits(&x[0], self.left) && fits(&x[1], self.right) && typed, "{self:?} of {x:?}");
        vec![Meta::f32(&[self.experts.count(&x[3]), x[0].dim(0), x[1].dim(0)])]
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        let gathered = |m: &Meta, by: By| if by == By::Token { x[2].elements() * m.dim(0) } else { 0 };
        gathered(&x[0], self.left) + gathered(&x[1], self.right)
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], work: &mut [f32]) {
        let (m, n, order, offsets) = (x[0].dim(0), x[1].dim(0), x[2].i32(), self.experts.offsets(x[3].i32()));
        let (first, second) = work.split_at_mut(if self.left == By::Token { order.len() * m } else { 0 });
        let side =
            |i: usize, by: By, work| if by == By::Token { gather(x[i].f32(), order, self.top, x[i].dim(0), work) } else { x[i].f32() };
        let (left, right) = (side(0, self.left, first), side(1, self.right, second));
        for (out, o) in y[0].f32().chunks_mut(m * n).zip(offsets.windows(2)) {
            let (first, rows) = (o[0] as usize, (o[1] - o[0]) as usize);
            if rows == 0 {
                out.fill(0.0);
                continue;
            }
            let (left, right) = (Mat::rows(&left[first * m..][..rows * m], m), Mat::rows(&right[first * n..][..rows * n], n));
            gemm(out, n, Into::Replace, m, rows, n, left.t(), right, 1.0, true);
        }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        not_in_fp8(op::rounded(at), super::NO_FP8)
    }

    fn cuda(&self, io: &Io) -> Code {
        let (m, n, experts) = (io.x[0].dim(0), io.x[1].dim(0), self.experts.count(&io.x[3]));
        let (left, right, order) = (At::X(0).into(), At::X(1).into(), At::X(2).into());
        let offsets = self.experts.place(At::X(3), &io.x[3]);
        let (y, parts) = (At::Y(0).into(), At::Work.into());
        let define = |launch: Launch| {
            launch
                .define("EXPERTS", experts)
                .define("M", m)
                .define("N", n)
                .define("TOP", self.top)
                .define("LEFT_BY_TOKEN", (self.left == By::Token) as u8)
                .define("RIGHT_BY_TOKEN", (self.right == By::Token) as u8)
        };
        let Some(tile) = Tile::new(self.kernel, io.arch, io.x[0].dtype, &io.offsets[..2], COLUMNS, [true, true]) else {
            let blocks = experts * m.div_ceil(64) * n.div_ceil(64);
            let launch = Launch::new(include_str!("plain_outer.cu"), "grouped_outer").define_type("T", io.x[0].dtype);
            return define(launch).grid(blocks, 1, 1).args(&[left, right, order, offsets, y]).code();
        };
        let launch =
            |entry, join: bool| define(tile.launch(include_str!("outer.cu"), entry)).define("JOIN", join as u8).define("BLOCKS", BLOCKS);
        let tiles = experts * m.div_ceil(TILE_ROWS) * n.div_ceil(COLUMNS);
        let steps = vec![
            launch("grouped_outer", false).grid(BLOCKS, 1, 1).args(&[left, right, offsets, order, y, parts]),
            launch("outer_join", true).grid(tiles * (TILE_ROWS / 16), 1, 1).block(256).shared(0).args(&[offsets, parts, y]),
        ];
        Code { steps: steps.into_iter().map(Step::Launch).collect(), workspace: 2 * BLOCKS * TILE_ROWS * COLUMNS * 4 }
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let bytes = x.iter().map(|m| m.bytes()).sum::<usize>() + self.infer(x)[0].bytes();
        Cost::compute(2 * x[2].elements() * x[0].dim(0) * x[1].dim(0) / self.experts.of, bytes)
    }
}
