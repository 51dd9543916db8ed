//! The three layer norms between two residual layers, fused into one pass over the rows.

use super::{LayerNorm, ROWS};
use crate::cpu::math::{dot, sum};
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{At, Code, Io, Launch, Place};
use crate::meta::Meta;
use crate::op::{self, Cost, Grads, Narrow, Op, Port, no_gradient};
use crate::ops::reduce::packs::Rows;
use crate::record::Var;
use rayon::prelude::*;

/// z = norm(o), s = norm(x + z), y = norm(s). Inputs: x, o. Outputs: z, s, y, and 1 / sqrt(..) of the three, [3 * rows].
#[derive(Debug)]
pub struct ResidualNorm {
    /// Added to the variance, in all of the norms.
    pub eps: f32,
}

/// out = norm(row); returns 1 / sqrt(..).
#[inline(always)]
pub(crate) fn norm_row(out: &mut [f32], eps: f32) -> f32 {
    let d = out.len() as f32;
    let mean = sum(out, |v| v) / d;
    let r = 1.0 / (sum(out, |v| (v - mean) * (v - mean)) / d + eps).sqrt();
    out.iter_mut().for_each(|v| *v = (*v - mean) * r);
    r
}

/// Turns g, the gradient with respect to y, into that with respect to the row that was normed.
#[inline(always)]
pub(crate) fn grad_row(g: &mut [f32], y: &[f32], rstd: f32) {
    let d = g.len() as f32;
    let (mean, along) = (sum(g, |v| v) / d, dot(g, y) / d);
    g.iter_mut().zip(y).for_each(|(g, &y)| *g = rstd * (*g - mean - y * along));
}

impl Op for ResidualNorm {
    fn name(&self) -> &'static str {
        "residual_norm"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(x.len() == 2 && x[0] == x[1], "residual_norm of {x:?}");
        vec![x[0].clone(), x[0].clone(), x[0].clone(), Meta::f32(&[3 * x[0].rows()])]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let d = x[0].dim(0);
        let (x, o) = (x[0].f32(), x[1].f32());
        let [z, s, y, rstd] = y else { unreachable!("infer gives four outputs") };
        let rows = x.len() / d;
        let (r1, rest) = rstd.f32().split_at_mut(rows);
        let (r2, r3) = rest.split_at_mut(rows);
        let outs = z.f32().par_chunks_mut(d).zip(s.f32().par_chunks_mut(d)).zip(y.f32().par_chunks_mut(d));
        let rstds = r1.par_iter_mut().zip(r2).zip(r3);
        outs.zip(rstds).enumerate().with_min_len(ROWS).for_each(|(row, (((z, s), y), ((r1, r2), r3)))| {
            simd(
                #[inline(always)]
                || {
                    z.copy_from_slice(&o[row * d..][..d]);
                    *r1 = norm_row(z, self.eps);
                    s.iter_mut().zip(&x[row * d..][..d]).zip(&*z).for_each(|((s, &x), &z)| *s = x + z);
                    *r2 = norm_row(s, self.eps);
                    y.copy_from_slice(s);
                    *r3 = norm_row(y, self.eps);
                },
            )
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        launch(io, include_str!("residual.cu"), "residual_norm").define_f32("EPS", self.eps).all(io).code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        assert!(dy[0].is_none(), "only residual_norm itself reads its inner norm");
        let (by_s, by_y) = (dy[1], dy[2]);
        let Some(any) = by_s.or(by_y) else { return no_gradient(x.len()) };
        let inputs: Vec<Var> = [y[0], y[1], y[2], y[3]].into_iter().chain(by_s).chain(by_y).collect();
        any.recorder().op(ResidualNormGrad { by_s: by_s.is_some(), by_y: by_y.is_some() }, &inputs).into_iter().map(Some).collect()
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 20 * x[0].elements() as u64, ..Cost::memory(5 * x[0].bytes()) }
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let norm = |v: Var<'g>| v.recorder().op(LayerNorm { eps: self.eps }, &[v]);
        let z = norm(x[1]);
        let s = norm(x[0] + z[0]);
        let y = norm(s[0]);
        Some(vec![z[0], s[0], y[0], crate::ops::concat::concat(&[z[1], s[1], y[1]], 0)])
    }
}

/// Inputs: z, s, y, rstd, then the gradients of s and y, of which one may be missing. Outputs: the gradients of x and o.
#[derive(Debug)]
pub struct ResidualNormGrad {
    /// Whether there is a gradient with respect to output s.
    pub by_s: bool,
    /// Whether there is a gradient with respect to output y.
    pub by_y: bool,
}

impl Op for ResidualNormGrad {
    fn name(&self) -> &'static str {
        "residual_norm_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert_eq!(x.len(), 4 + self.by_s as usize + self.by_y as usize, "inputs of {self:?}");
        vec![x[0].clone(); 2]
    }

    fn cpu(&self, x: &[View], out: &mut [ViewMut], _: &mut [f32]) {
        let d = x[0].dim(0);
        let (z, s, y, rstd) = (x[0].f32(), x[1].f32(), x[2].f32(), x[3].f32());
        let by_s = self.by_s.then(|| x[4].f32());
        let by_y = self.by_y.then(|| x[x.len() - 1].f32());
        let rows = z.len() / d;
        let [dx, d_o] = out else { unreachable!("infer gives two outputs") };
        let outs = dx.f32().par_chunks_mut(d).zip(d_o.f32().par_chunks_mut(d));
        outs.enumerate().with_min_len(ROWS).for_each(|(row, (dx, d_o))| {
            simd(
                #[inline(always)]
                || {
                    let at = row * d..(row + 1) * d;
                    match by_y {
                        Some(g) => {
                            dx.copy_from_slice(&g[at.clone()]);
                            grad_row(dx, &y[at.clone()], rstd[2 * rows + row]);
                        }
                        None => dx.fill(0.0),
                    }
                    if let Some(g) = by_s {
                        dx.iter_mut().zip(&g[at.clone()]).for_each(|(o, &g)| *o += g);
                    }
                    grad_row(dx, &s[at.clone()], rstd[rows + row]);
                    d_o.copy_from_slice(dx);
                    grad_row(d_o, &z[at], rstd[row]);
                },
            )
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let by_s = At::X(if self.by_s { 4 } else { 0 });
        let by_y = At::X(if self.by_y { io.x.len() - 1 } else { 0 });
        let args = [At::X(0), At::X(1), At::X(2), At::X(3), by_s, by_y, At::Y(0), At::Y(1)].map(Place::from);
        launch(io, include_str!("residual_grad.cu"), "residual_norm_grad")
            .define_type("S", io.x[if self.by_s { 4 } else { 0 }].dtype)
            .define_type("G", io.x[if self.by_y { io.x.len() - 1 } else { 0 }].dtype)
            .define("BY_S", self.by_s as u8)
            .define("BY_Y", self.by_y as u8)
            .args(&args)
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost { flops: 25 * x[0].elements() as u64, ..Cost::memory((x.len() + 1) * x[0].bytes()) }
    }
}

fn launch(io: &Io, source: &str, entry: &'static str) -> Launch {
    let (d, n) = (io.x[0].dim(0), io.x[0].rows());
    let types: Vec<_> = io.x.iter().filter(|m| m.elements() == io.x[0].elements()).map(|m| m.dtype).collect();
    let rows = Rows::new(d, &types);
    rows.launch(&[include_str!("residual.cuh"), source].concat(), entry, d).define_type("T", io.x[0].dtype).define("ROWS", n).grid(
        n.div_ceil(rows.groups),
        1,
        1,
    )
}
