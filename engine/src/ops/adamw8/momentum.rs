//! Momentum (see `ops::adamw`) whose state is 8-bit.

use super::map::{BLOCK, Map};
use super::{PIECE, absmax_of, is_quantized, map_of};
use crate::cpu::{View, ViewMut};
use crate::kernel::{At, Code, Io, Launch};
use crate::meta::Meta;
use crate::op::{Cost, Grads, Narrow, Op, Port, no_gradient};
use crate::record::Var;
use rayon::prelude::*;

/// Inputs: gradient scale `[1]`, a flag `[1]` that is 0 to keep the momentum as it is, the gradient, the momentum's bytes and maxima. Outputs: the
/// direction, f32; bytes and maxima, in place.
#[derive(Debug)]
pub struct Momentum8 {
    /// How much of the momentum is kept.
    pub beta: f32,
}

impl Op for Momentum8 {
    fn name(&self) -> &'static str {
        "momentum8"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(x.len() == 5 && is_quantized(&x[2], &x[3], &x[4]), "momentum8 of {x:?}");
        vec![Meta::f32(&x[2].shape), x[3].clone(), x[4].clone()]
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![(3, 1), (4, 2)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (scale, go, g, tables) = (x[0].f32()[0], x[1].f32()[0], x[2].f32(), Map::Signed.tables());
        let [u, bytes, most] = y else { unreachable!("three outputs") };
        let tasks = u.f32().par_chunks_mut(BLOCK).zip(g.par_chunks(BLOCK)).zip(bytes.u8().par_chunks_mut(BLOCK)).zip(most.f32());
        tasks.with_min_len(PIECE / BLOCK).for_each(|(((u, g), bytes), most)| {
            let mut next = [0.0; BLOCK];
            let next = &mut next[..g.len()];
            for (((u, &g), byte), next) in u.iter_mut().zip(g).zip(&*bytes).zip(&mut *next) {
                let (g, m) = (g * scale, tables.numbers[*byte as usize] * *most);
                *next = m + (g - m) * (1.0 - self.beta);
                *u = g + (*next - g) * self.beta;
            }
            if go != 0.0 {
                *most = Map::Signed.pack(tables, next, bytes);
            }
        });
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        let n = io.x[2].elements();
        let text = concat!(include_str!("../adamw/fours.cuh"), include_str!("blocks.cuh"), include_str!("momentum8.cu"));
        let args = [At::X(0), At::X(1), At::X(2), At::Y(0), At::Y(1), At::Y(2)].map(Into::into);
        map_of(Launch::new(text, "momentum8"), "SIGNED", Map::Signed)
            .define_type("G", io.x[2].dtype)
            .define_type("U", io.y[0].dtype)
            .define_f32("BETA", self.beta)
            .define("N", n)
            .define("PIECE", PIECE)
            .grid(n.div_ceil(PIECE), 1, 1)
            .args(&args)
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false // nothing differentiates through the optimizer
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(x[2].bytes() + 4 * x[2].elements() + 2 * (x[3].bytes() + absmax_of(&x[2]).bytes()))
    }
}
