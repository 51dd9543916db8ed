//! For `lora-forward`: appends columns to the input of a GEMM, which has room for them, and to its weights, so that K grows.

use super::{blocks, concat, launches, put};
use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io, Launch};
use crate::meta::{Layout, Meta, block_stride};
use crate::op::{self, Cost, Grads, Narrow, Op, Port, no_gradient};
use crate::ops::reduce::packs::{PACKS, pack};
use crate::record::Var;

/// Inputs: x [m, n], then parts [m, ..]. Output: x, in place, with the parts in the columns from `at` on and zeros after them.
#[derive(Debug)]
pub struct Beside {
    /// The first column that is written.
    pub at: usize,
}

impl Op for Beside {
    fn name(&self) -> &'static str {
        "beside"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let alike = x.iter().all(|p| p.rank() == 2 && p.dim(1) == x[0].dim(1) && p.dtype == x[0].dtype && p.dtype.is_float());
        let fits = alike && self.at + x[1..].iter().map(|p| p.dim(0)).sum::<usize>() <= x[0].dim(0);
        assert!(fits, "{self:?} of {x:?}");
        vec![x[0].clone()]
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let row = y[0].dim(0);
        let end = put(&x[1..], &mut y[0], 1, self.at);
        y[0].f32().chunks_mut(row).for_each(|row| row[end..].fill(0.0));
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        launches(io, 1, 1, self.at)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(2 * x[1..].iter().map(|m| m.bytes()).sum::<usize>())
    }

    fn layout(&self, input: usize) -> Layout {
        if input == 0 { Layout::Contiguous } else { Layout::Blocks(1) }
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let all = concat(&[&[x[0].slice(1, 0, self.at)], &x[1..]].concat(), 1);
        Some(vec![all.pad(1, 0, x[0].dim(0) - all.dim(0))])
    }
}

/// Inputs: a weight W [n, k] and its LoRA matrix B [n, r], for one or more layers with the same k. Output: the weights stacked by rows, [W, 0 .. 0, B, 0 ..],
/// where each B has columns of its own; zeros up to `pitch` columns.
#[derive(Debug)]
pub struct Extend {
    /// Columns of the result; those that no input fills are zero.
    pub pitch: usize,
}

impl Extend {
    /// The first column of each B.
    fn firsts(k: usize, widths: impl Iterator<Item = usize>) -> Vec<usize> {
        let behind = |at: &mut usize, width: usize| Some(std::mem::replace(at, *at + width));
        widths.scan(k, behind).collect()
    }
}

impl Op for Extend {
    fn name(&self) -> &'static str {
        "extend"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let (k, dtype) = (x[0].dim(0), x[0].dtype);
        let alike = x.len().is_multiple_of(2) && x.iter().all(|m| m.rank() == 2 && m.dtype == dtype && dtype.is_float());
        let fits = alike && x.chunks(2).all(|x| x[0].dim(0) == k && x[0].dim(1) == x[1].dim(1));
        let added: usize = x.iter().skip(1).step_by(2).map(|m| m.dim(0)).sum();
        assert!(fits && k + added <= self.pitch, "{self:?} of {x:?}");
        vec![x[0].with(&[x.iter().step_by(2).map(|m| m.dim(1)).sum(), self.pitch])]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let k = x[0].dim(0);
        let firsts = Extend::firsts(k, x.chunks(2).map(|x| x[1].dim(0)));
        let mut rows = y[0].f32().chunks_mut(self.pitch);
        for (x, first) in x.chunks(2).zip(firsts) {
            for ((weight, added), row) in blocks(&x[0], 1).zip(blocks(&x[1], 1)).zip(&mut rows) {
                row.fill(0.0);
                row[..k].copy_from_slice(weight);
                row[first..first + added.len()].copy_from_slice(added);
            }
        }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let (k, parts) = (io.x[0].dim(0), io.x.len() / 2);
        let each = |of: &dyn Fn(usize) -> usize, side: usize| -> Vec<usize> { (0..parts).map(|p| of(2 * p + side)).collect() };
        let stride = |i: usize| block_stride(&io.x[i].shape, &io.strides[i], 1).expect("rows evenly apart");
        let (widths, heights) = (each(&|i| io.x[i].dim(0), 1), each(&|i| io.x[i].dim(1), 0));
        let firsts = Extend::firsts(k, widths.iter().copied());
        let (weight_rows, added_rows) = (each(&stride, 0), each(&stride, 1));
        let lengths = [&[k, self.pitch], &widths[..], &weight_rows, &added_rows, &io.offsets].concat();
        let vec = pack(&[io.y[0].dtype], &lengths);
        let list = |numbers: &[usize]| numbers.iter().map(|n| n.to_string()).collect::<Vec<_>>().join(", ");
        let names = |before: &str, of: &[&str]| {
            (0..parts).flat_map(|p| of.iter().map(move |o| format!("{before}{o}{p}"))).collect::<Vec<_>>().join(", ")
        };
        let rows: usize = heights.iter().sum();
        Launch::new(&[PACKS, include_str!("extend.cu")].concat(), "extend")
            .define_type("T", io.y[0].dtype)
            .define("VEC", vec)
            .define("ROWS", rows)
            .define("PITCH", self.pitch)
            .define("K", k)
            .define("PARTS", parts)
            .define("INPUTS", names("const T *", &["w", "b"]))
            .define("WEIGHTS", names("", &["w"]))
            .define("ADDED", names("", &["b"]))
            .define("WEIGHT_ROWS", list(&weight_rows))
            .define("ADDED_ROWS", list(&added_rows))
            .define("HEIGHTS", list(&heights))
            .define("FIRSTS", list(&firsts))
            .define("WIDTHS", list(&widths))
            .grid((rows * self.pitch / vec).div_ceil(256), 1, 1)
            .all(io)
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(x.iter().chain(&self.infer(x)).map(|m| m.bytes()).sum())
    }

    fn layout(&self, _: usize) -> Layout {
        Layout::Blocks(1)
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let k = x[0].dim(0);
        let firsts = Extend::firsts(k, x.chunks(2).map(|x| x[1].dim(0)));
        let row = |(x, first): (&[Var<'g>], usize)| {
            let added = x[1].pad(1, first - k, self.pitch - first - x[1].dim(0));
            concat(&[x[0], added], 1)
        };
        Some(vec![concat(&x.chunks(2).zip(firsts).map(row).collect::<Vec<_>>(), 0)])
    }
}
