//! Concatenation along an axis, and padding with zeros.

pub mod extend;

use crate::cpu::{View, ViewMut};
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{Layout, Meta, block_stride};
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share};
use crate::ops::reduce::packs::{PACKS, pack};
use crate::record::Var;
use extend::{Beside, Extend};

/// Parts per launch: each is an argument that every thread must choose from.
const PARTS: usize = 16;

/// Elements of the dimensions `axis..`: what an input contributes to each row of the output.
fn width(shape: &[usize], axis: usize) -> usize {
    shape[axis..].iter().product()
}

/// The inputs' blocks, evenly spaced as `layout` ensures.
fn blocks<'a>(v: &View<'a>, axis: usize) -> impl Iterator<Item = &'a [f32]> {
    let (data, width) = (v.f32(), width(v.shape, axis));
    let stride = block_stride(v.shape, v.strides, axis).expect("blocks evenly apart");
    (0..v.shape[..axis].iter().product()).map(move |i| &data[i * stride..][..width])
}

/// Concatenates its inputs.
#[derive(Debug)]
pub struct Concat {
    /// Along which dimension.
    pub axis: usize,
}

impl Op for Concat {
    fn name(&self) -> &'static str {
        "concat"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let mut shape = x[0].shape.clone();
        shape[self.axis] = 0;
        for m in x {
            let same = m.rank() == shape.len() && (0..shape.len()).all(|d| d == self.axis || m.shape[d] == shape[d]);
            assert!(same && m.dtype == x[0].dtype && m.dtype.is_float(), "concat of {x:?} along axis {}", self.axis);
            shape[self.axis] += m.shape[self.axis];
        }
        vec![x[0].with(&shape)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        put(x, &mut y[0], self.axis, 0);
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        launches(io, 0, self.axis, 0)
    }

    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        let others = (0..x[0].rank()).filter(|&d| d != self.axis);
        others.map(|d| Axis::new(vec![Share::Dim(d); x.len()], [Share::Dim(d)])).collect()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let mut at = 0;
        let part = |v: &Var<'g>| {
            let n = v.shape()[self.axis];
            at += n;
            dy[0].map(|d| d.slice(self.axis, at - n, at))
        };
        x.iter().map(part).collect()
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(2 * x.iter().map(|m| m.bytes()).sum::<usize>())
    }

    fn layout(&self, _: usize) -> Layout {
        Layout::Blocks(self.axis)
    }
}

/// Writes the parts one after another into each row of y, from column `at` on. Returns the column after the last.
fn put(parts: &[View], y: &mut ViewMut, axis: usize, mut at: usize) -> usize {
    let row = width(y.shape, axis);
    for part in parts {
        let w = width(part.shape, axis);
        for (out, block) in y.f32().chunks_mut(row).zip(blocks(part, axis)) {
            out[at..at + w].copy_from_slice(block);
        }
        at += w;
    }
    at
}

/// The same on a GPU, for the inputs from `from` on, with zeros up to the end of the rows.
fn launches(io: &Io, from: usize, axis: usize, mut at: usize) -> Code {
    let dtype = io.y[0].dtype;
    let outer: usize = io.y[0].shape[..axis].iter().product();
    let row = width(&io.y[0].shape, axis);
    let list = |numbers: &[usize]| numbers.iter().map(|n| n.to_string()).collect::<Vec<_>>().join(", ");
    let names = |parts: usize, before: &str| (0..parts).map(|i| format!("{before}x{i}")).collect::<Vec<_>>().join(", ");
    let several = |first: usize| {
        let parts = first..(first + PARTS).min(io.x.len());
        let widths: Vec<usize> = io.x[parts.clone()].iter().map(|m| width(&m.shape, axis)).collect();
        let stride = |i: usize| block_stride(&io.x[i].shape, &io.strides[i], axis).expect("blocks evenly apart");
        let strides: Vec<usize> = parts.clone().map(stride).collect();
        let vec = pack(&[dtype], &[&[row, at], &widths[..], &strides, &io.offsets[parts.clone()]].concat());
        // The last launch also fills the rest of the row.
        let all = if parts.end == io.x.len() { row - at } else { widths.iter().sum() };
        let args: Vec<Place> = parts.map(At::X).chain([At::Y(0)]).map(Place::from).collect();
        let launch = Launch::new(&[PACKS, include_str!("concat.cu")].concat(), "concat")
            .define_type("T", dtype)
            .define("VEC", vec)
            .define("OUTER", outer)
            .define("WIDTH", all)
            .define("ROW", row)
            .define("AT", at)
            .define("PARTS", widths.len())
            .define("WIDTHS", list(&widths))
            .define("STRIDES", list(&strides))
            .define("INPUTS", names(widths.len(), "const T *"))
            .define("STARTS", names(widths.len(), ""))
            .grid((outer * all / vec).div_ceil(256), 1, 1)
            .args(&args);
        at += all;
        Step::Launch(launch)
    };
    Code { steps: (from..io.x.len()).step_by(PARTS).map(several).collect(), workspace: 0 }
}

/// Concatenation along the first axis without a kernel: the plan lets the inputs be computed directly in the output's buffer, or copies them.
#[derive(Debug)]
pub struct Join;

impl Op for Join {
    fn name(&self) -> &'static str {
        "join"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        Concat { axis: 0 }.infer(x)
    }

    fn cpu(&self, _: &[View], _: &mut [ViewMut], _: &mut [f32]) {}

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, _: &Io) -> Code {
        Code::default()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        Concat { axis: 0 }.vjp(x, y, dy)
    }

    fn cost(&self, _: &[Meta]) -> Cost {
        Cost::memory(0)
    }
}

/// Pads its input with zeros: the gradient of a slice.
#[derive(Debug)]
pub struct Pad {
    /// Along which dimension.
    pub axis: usize,
    /// Zeros before the input.
    pub before: usize,
    /// Zeros after the input.
    pub after: usize,
}

impl Op for Pad {
    fn name(&self) -> &'static str {
        "pad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(x[0].dtype.is_float(), "pad of {:?}", x[0]);
        let mut shape = x[0].shape.clone();
        shape[self.axis] += self.before + self.after;
        vec![x[0].with(&shape)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let before = self.before * width(x[0].shape, self.axis + 1);
        let row = width(y[0].shape, self.axis);
        for (out, block) in y[0].f32().chunks_mut(row).zip(blocks(&x[0], self.axis)) {
            out[..before].fill(0.0);
            out[before..before + block.len()].copy_from_slice(block);
            out[before + block.len()..].fill(0.0);
        }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let dtype = io.y[0].dtype;
        let outer: usize = io.y[0].shape[..self.axis].iter().product();
        let stride = block_stride(&io.x[0].shape, &io.strides[0], self.axis).expect("blocks evenly apart");
        let at = self.before * width(&io.x[0].shape, self.axis + 1);
        let (own, row) = (width(&io.x[0].shape, self.axis), width(&io.y[0].shape, self.axis));
        let vec = pack(&[dtype], &[own, row, at, stride, io.offsets[0]]);
        Launch::new(&[PACKS, include_str!("pad.cu")].concat(), "pad")
            .define_type("T", dtype)
            .define("VEC", vec)
            .define("OUTER", outer)
            .define("WIDTH", own)
            .define("STRIDE", stride)
            .define("ROW", row)
            .define("AT", at)
            .grid((outer * row / vec).div_ceil(256), 1, 1)
            .all(io)
            .code()
    }

    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        (0..x[0].rank()).filter(|&d| d != self.axis).map(|d| Axis::new([Share::Dim(d)], [Share::Dim(d)])).collect()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![dy[0].map(|d| d.slice(self.axis, self.before, self.before + x[0].shape()[self.axis]))]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(x[0].bytes() + self.infer(x)[0].bytes())
    }

    fn layout(&self, _: usize) -> Layout {
        Layout::Blocks(self.axis)
    }
}

impl<'g> Var<'g> {
    /// Pads with zeros before and after, along `axis`.
    #[track_caller]
    pub fn pad(self, axis: usize, before: usize, after: usize) -> Var<'g> {
        if before + after == 0 {
            return self;
        }
        self.recorder().op1(Pad { axis, before, after }, &[self])
    }
}

/// Concatenates values along an axis; all other dimensions must be equal.
#[track_caller]
pub fn concat<'g>(parts: &[Var<'g>], axis: usize) -> Var<'g> {
    parts[0].recorder().op1(Concat { axis }, parts)
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("join", &[In(&[64, 4], Fill::Normal), In(&[3, 4], Fill::Normal)], |x| {
        let made = [x[0].silu(), x[1].silu(), x[0] * 2.0];
        vec![x[0].recorder().op1(Join, &made) * 3.0]
    }),
    Case::new("join of what lies elsewhere", &[In(&[4, 64], Fill::Normal), In(&[3, 64], Fill::Normal)], |x| {
        let twice = x[0].exp();
        vec![x[0].recorder().op1(Join, &[twice, x[1], twice, x[0].slice(0, 1, 3)]) * 2.0, twice]
    }),
    Case::new("middle axis", &[In(&[2, 3, 4], Fill::Normal), In(&[2, 1, 4], Fill::Normal)], |x| vec![concat(&[x[0], x[1], x[0]], 1)]),
    Case::new("last axis", &[In(&[5, 3], Fill::Normal), In(&[5, 4], Fill::Normal)], |x| vec![concat(x, 1)]),
    Case::new("slices", &[In(&[3, 5, 20], Fill::Normal), In(&[3, 5, 8], Fill::Normal)], |x| {
        let wide = x[0];
        vec![concat(&[wide.slice(2, 0, 8), x[1], wide.slice(2, 12, 20)], 2), concat(&[wide.slice(1, 1, 3), wide.slice(1, 0, 4)], 1)]
    }),
    Case::new("more than fit one launch", &[In(&[3, 8], Fill::Normal), In(&[3, 5], Fill::Normal)], |x| {
        vec![concat(&[[x[0]; 17], [x[1]; 17]].concat(), 1)]
    }),
    Case::new("beside", &[In(&[5, 32], Fill::Frozen), In(&[5, 16], Fill::Frozen), In(&[5, 3], Fill::Frozen)], |x| {
        let rows = x[0] * 2.0;
        vec![x[0].recorder().op1(Beside { at: 16 }, &[rows, x[1].slice(1, 8, 16), x[2]]), rows]
    }),
    Case::new("beside whole packs", &[In(&[70, 64], Fill::Frozen), In(&[70, 24], Fill::Frozen)], |x| {
        vec![x[0].recorder().op1(Beside { at: 32 }, &[x[0].exp(), x[1].slice(1, 8, 24)])]
    }),
    Case::new(
        "extend",
        &[In(&[7, 40], Fill::Frozen), In(&[7, 8], Fill::Frozen), In(&[20, 32], Fill::Frozen), In(&[20, 16], Fill::Frozen)],
        |x| vec![x[0].recorder().op1(Extend { pitch: 64 }, &[x[0].slice(1, 8, 40), x[1], x[2], x[3]])],
    ),
    Case::new(
        "extend, odd",
        &[In(&[7, 5], Fill::Frozen), In(&[7, 3], Fill::Frozen), In(&[2, 5], Fill::Frozen), In(&[2, 2], Fill::Frozen)],
        |x| vec![x[0].recorder().op1(Extend { pitch: 13 }, x)],
    ),
    Case::new("slice, then pad", &[In(&[3, 7, 8], Fill::Normal)], |x| {
        vec![x[0].slice(1, 0, 6).pad(1, 1, 0), x[0].slice(2, 1, 6).pad(2, 0, 3), x[0].slice(0, 1, 3).slice(2, 0, 4).pad(0, 1, 1)]
    }),
    Case::new("pad", &[In(&[2, 3, 4], Fill::Normal)], |x| vec![x[0].pad(1, 1, 2).pad(2, 0, 1)]),
];
