//! Rows that are scaled and added to those of a table as one op: the update of a router that weighs what it chose.

use super::{by_row, distinct};
use crate::cpu::math::dot;
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{At, Code, Io, Launch, Place};
use crate::meta::{DType, Meta};
use crate::op::{Cost, Grads, Op, no_gradient};
use crate::ops::reduce::packs::{PACKS, Rows, pack};
use crate::record::Var;
use rayon::prelude::*;

/// y = base, then row index[i] of it gets scale[i] source[i] added. No row is named twice, the caller promises. Inputs: base [rows, d],
/// index i32 [..], source [.., d], scale [.., 1].
#[derive(Debug)]
pub struct ScatterScaled;

impl Op for ScatterScaled {
    fn name(&self) -> &'static str {
        "scatter_scaled"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let fits = x[0].rank() == 2 && x[2].dim(0) == x[0].dim(0) && x[0].dtype == x[2].dtype;
        assert!(fits && each_has_a_scale(&x[1..]), "scatter_scaled of {x:?}");
        vec![x[0].clone()]
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (d, rows) = (y[0].dim(0), y[0].dim(1));
        let (index, source, scale) = (x[1].i32(), x[2].f32(), x[3].f32());
        debug_assert!(distinct(index, rows), "scatter_scaled names a row twice");
        by_row(
            y[0].f32(),
            d,
            index,
            #[inline(always)]
            |i, row| row.iter_mut().zip(&source[i * d..]).for_each(|(o, &v)| *o += scale[i] * v),
        );
    }

    fn cuda(&self, io: &Io) -> Code {
        const THREADS: usize = 256;
        let (d, rows, n, dtype) = (io.y[0].dim(0), io.y[0].dim(1), io.x[1].elements(), io.y[0].dtype);
        let vec = pack(&[dtype], &[d]);
        let packs = n * (d / vec);
        // Two packs a thread keep more loads under way, once there are packs for all threads of a large GPU.
        let items = if packs >= 2 * 132 * 2048 { 2 } else { 1 };
        Launch::new(&[PACKS, include_str!("scaled.cu")].concat(), "scatter_scaled")
            .define_type("T", dtype)
            .define_type("S", io.x[3].dtype)
            // Divisions of short numbers are much cheaper.
            .define("AT", if packs < 1 << 31 { "u32" } else { "u64" })
            .define("VEC", vec)
            .define("D", d)
            .define("N", n)
            .define("ROWS", rows)
            .define("ITEMS", items)
            .define("THREADS", THREADS)
            .grid(packs.div_ceil(THREADS * items), 1, 1)
            .block(THREADS)
            .args(&[At::X(1), At::X(2), At::X(3), At::Y(0)].map(Place::from))
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return no_gradient(4) };
        let both = d.recorder().op(ScatterScaledGrad, &[d, x[1], x[2], x[3]]);
        vec![Some(d), None, Some(both[0]), Some(both[1])]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 2 * x[2].elements() as u64, ..Cost::memory(3 * x[2].bytes() + x[1].bytes() + x[3].bytes()) }
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let scaled = (x[2] * x[3]).cast(x[0].dtype());
        Some(vec![x[0].scatter_add_rows_once(x[1], scaled)])
    }
}

/// Inputs: dy [rows, d], index, source, scale. Outputs: the gradients of source, where that was, and of scale.
#[derive(Debug)]
pub struct ScatterScaledGrad;

impl Op for ScatterScaledGrad {
    fn name(&self) -> &'static str {
        "scatter_scaled_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(x[2].dim(0) == x[0].dim(0) && each_has_a_scale(&x[1..]), "scatter_scaled_grad of {x:?}");
        x[2..].to_vec()
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![(2, 0)]
    }

    fn cpu(&self, x: &[View], out: &mut [ViewMut], _: &mut [f32]) {
        let d = x[0].dim(0);
        let (dy, index, scale) = (x[0].f32(), x[1].i32(), x[3].f32());
        let [source, dscale] = out else { unreachable!("infer gives two outputs") };
        let rows = source.f32().par_chunks_mut(d).zip(dscale.f32()).zip(index.par_iter().zip(scale));
        rows.with_min_len(32).for_each(|((source, dscale), (&row, &scale))| {
            simd(
                #[inline(always)]
                || {
                    let dy = &dy[row as usize * d..][..d];
                    *dscale = dot(dy, source);
                    source.iter_mut().zip(dy).for_each(|(s, &d)| *s = scale * d);
                },
            )
        });
    }

    fn cuda(&self, io: &Io) -> Code {
        let (d, n) = (io.x[0].dim(0), io.x[1].elements());
        let rows = Rows::new(d, &[io.x[0].dtype, io.x[2].dtype]);
        rows.launch(include_str!("scaled_grad.cu"), "scatter_scaled_grad", d)
            .define_type("G", io.x[0].dtype)
            .define_type("T", io.x[2].dtype)
            .define_type("S", io.x[3].dtype)
            .define("N", n)
            .define("ROWS", io.x[0].dim(1))
            .grid(n.div_ceil(rows.groups), 1, 1)
            .args(&[At::X(0), At::X(1), At::X(3), At::Y(0), At::Y(1)].map(Place::from))
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let gathered = x[2].elements() * x[0].dtype.size();
        Cost { flops: 3 * x[2].elements() as u64, ..Cost::memory(gathered + 2 * x[2].bytes() + x[1].bytes() + 2 * x[3].bytes()) }
    }
}

/// Of index, source and scale.
fn each_has_a_scale(x: &[Meta]) -> bool {
    let rows = &x[1].shape[..x[1].rank() - 1];
    let counts = x[0].dtype == DType::I32 && x[0].elements() == x[1].rows();
    counts && x[1].dtype.is_float() && x[2].dtype.is_float() && x[2].shape == [rows, &[1]].concat()
}
