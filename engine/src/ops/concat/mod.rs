//! Side by side along an axis; and zeros on both sides of one.

use crate::cpu::{View, ViewMut};
use crate::kernel::{At, Code, Io, Launch, Step};
use crate::meta::Meta;
use crate::op::{Case, Cost, Fill, Grads, In, Op};
use crate::ops::reduce::packs::{PACKS, pack};
use crate::record::Var;

#[derive(Debug)]
pub struct Concat {
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
        let width = |shape: &[usize]| shape[self.axis..].iter().product::<usize>();
        let row = width(y[0].shape);
        let mut at = 0;
        for part in x {
            let w = width(part.shape);
            for (out, part) in y[0].f32().chunks_mut(row).zip(part.f32().chunks(w)) {
                out[at..at + w].copy_from_slice(part);
            }
            at += w;
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        let dtype = io.y[0].dtype;
        let outer: usize = io.y[0].shape[..self.axis].iter().product();
        let width = |shape: &[usize]| shape[self.axis..].iter().product::<usize>();
        let row = width(&io.y[0].shape);
        let mut at = 0;
        let part = |(i, part): (usize, &Meta)| {
            let w = width(&part.shape);
            let vec = pack(&[dtype], &[row, at, w]);
            let launch = Launch::new(&[PACKS, include_str!("concat.cu")].concat(), "concat")
                .define_type("T", dtype)
                .define("VEC", vec)
                .define("OUTER", outer)
                .define("WIDTH", w)
                .define("ROW", row)
                .define("AT", at)
                .grid((outer * w / vec).div_ceil(256), 1, 1)
                .args(&[At::X(i).into(), At::Y(0).into()]);
            at += w;
            Step::Launch(launch)
        };
        Code { steps: io.x.iter().enumerate().map(part).collect(), workspace: 0 }
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
}

#[derive(Debug)]
pub struct Pad {
    pub axis: usize,
    pub before: usize,
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
        let inner: usize = x[0].shape[self.axis + 1..].iter().product();
        let (from, to) = (x[0].shape[self.axis] * inner, y[0].shape[self.axis] * inner);
        for (out, part) in y[0].f32().chunks_mut(to).zip(x[0].f32().chunks(from)) {
            out[..self.before * inner].fill(0.0);
            out[self.before * inner..self.before * inner + from].copy_from_slice(part);
            out[self.before * inner + from..].fill(0.0);
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        let dtype = io.y[0].dtype;
        let outer: usize = io.y[0].shape[..self.axis].iter().product();
        let inner: usize = io.y[0].shape[self.axis + 1..].iter().product();
        let (width, row, at) = (io.x[0].shape[self.axis] * inner, io.y[0].shape[self.axis] * inner, self.before * inner);
        let vec = pack(&[dtype], &[width, row, at]);
        Launch::new(&[PACKS, include_str!("pad.cu")].concat(), "pad")
            .define_type("T", dtype)
            .define("VEC", vec)
            .define("OUTER", outer)
            .define("WIDTH", width)
            .define("ROW", row)
            .define("AT", at)
            .grid((outer * row / vec).div_ceil(256), 1, 1)
            .all(io)
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![dy[0].map(|d| d.slice(self.axis, self.before, self.before + x[0].shape()[self.axis]))]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(x[0].bytes() + self.infer(x)[0].bytes())
    }
}

impl<'g> Var<'g> {
    /// Zeros before and after, along `axis`.
    #[track_caller]
    pub fn pad(self, axis: usize, before: usize, after: usize) -> Var<'g> {
        if before + after == 0 {
            return self;
        }
        self.recorder().op1(Pad { axis, before, after }, &[self])
    }
}

#[track_caller]
pub fn concat<'g>(parts: &[Var<'g>], axis: usize) -> Var<'g> {
    parts[0].recorder().op1(Concat { axis }, parts)
}

pub const CASES: &[Case] = &[
    Case::new("middle axis", &[In(&[2, 3, 4], Fill::Normal), In(&[2, 1, 4], Fill::Normal)], |x| vec![concat(&[x[0], x[1], x[0]], 1)]),
    Case::new("last axis", &[In(&[5, 3], Fill::Normal), In(&[5, 4], Fill::Normal)], |x| vec![concat(x, 1)]),
    Case::new("pad", &[In(&[2, 3, 4], Fill::Normal)], |x| vec![x[0].pad(1, 1, 2).pad(2, 0, 1)]),
];
