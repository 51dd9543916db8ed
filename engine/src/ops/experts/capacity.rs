//! How many slots an expert takes: those with the largest weights.

use crate::cpu::{View, ViewMut};
use crate::kernel::{At, Code, Io, Launch};
use crate::meta::{DType, Meta};
use crate::op::{Axis, Cost, Grads, Narrow, Op, Port, Share, no_gradient};
use crate::record::Var;
use rayon::prelude::*;
use std::sync::Arc;

/// Inputs: the expert of each slot, i32 [tokens, k], the number of experts where a slot has none; the same again; and the slots' weights, f32 [tokens, k]. Outputs:
/// the same experts, where of an expert's slots the `places` with the largest weights keep it, of equal ones the earlier, and the others have none; and how many
/// slots asked for each expert, f32 `[experts]`.
///
/// Places are given out among all tokens. A rank that has a part of them reads the choices of all, as second and third input, and its own as the first.
#[derive(Debug)]
pub struct Capacity {
    /// The number of experts.
    pub experts: usize,
    /// Slots that each of them takes.
    pub places: usize,
    /// Which part of the tokens the first input and the first output are.
    pub part: Part,
}

/// Part `index` of `of` equal parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which part.
    pub index: usize,
    /// How many parts.
    pub of: usize,
}

impl Part {
    /// Everything.
    pub const ALL: Part = Part { index: 0, of: 1 };
}

impl Op for Capacity {
    fn name(&self) -> &'static str {
        "expert_capacity"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let shaped = x[1].rank() == 2 && x[1].dtype == DType::I32 && x[2] == Meta::f32(&x[1].shape) && x[1].elements() < 1 << 24;
        let fits = shaped && x[0] == Meta::new(&[x[1].dim(1) / self.part.of, x[1].dim(0)], DType::I32);
        assert!(fits && (1..=1024).contains(&self.experts) && self.places > 0, "{self:?} of {x:?} (fewer than 2^24 slots)");
        vec![x[0].clone(), Meta::f32(&[self.experts])]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (chosen, weights) = (x[1].i32(), x[2].f32());
        let mut of: Vec<Vec<usize>> = vec![vec![]; self.experts + 1];
        chosen.iter().enumerate().for_each(|(slot, &e)| of[e as usize].push(slot));
        let [kept, loads] = y else { unreachable!("infer gives two outputs") };
        loads.f32().iter_mut().zip(&of).for_each(|(load, of)| *load = of.len() as f32);
        of[..self.experts].par_iter_mut().filter(|of| of.len() > self.places).for_each(|of| {
            // -0 + 0 is 0: the two zeros are a tie.
            let key = |slot: usize| weights[slot] + 0.0;
            of.sort_unstable_by(|&a, &b| {
                key(b).total_cmp(&key(a)).then(crate::mutant!("capacity-of-a-tie-is-the-later", a.cmp(&b), b.cmp(&a)))
            });
            of.truncate(crate::mutant!("capacity-of-one-more", self.places, self.places + 1));
        });
        let kept = kept.i32();
        let own = self.part.index * kept.len()..(self.part.index + 1) * kept.len();
        kept.fill(self.experts as i32);
        for (e, of) in of.iter().enumerate() {
            of.iter().filter(|slot| own.contains(slot)).for_each(|slot| kept[slot - own.start] = e as i32);
        }
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        let slots = io.x[1].elements();
        let threads = slots.next_multiple_of(32).min(1024);
        let each = slots.div_ceil(threads);
        Launch::new(include_str!("capacity.cu"), "expert_capacity")
            .define("SLOTS", slots)
            .define("EXPERTS", self.experts)
            .define("PLACES", self.places)
            .define("FIRST", self.part.index * io.x[0].elements())
            .define("OWN", io.x[0].elements())
            .define("THREADS", threads)
            .define("EACH", each)
            .define("KEEP", (each <= 32) as u8) // registers of a thread
            .grid(self.experts, 1, 1)
            .block(threads)
            .args(&[At::X(1).into(), At::X(2).into(), At::Y(0).into(), At::Y(1).into()])
            .code()
    }

    /// Tokens, by the choices of all.
    fn axes(&self, _: &[Meta], _: usize) -> Vec<Axis> {
        vec![Axis::new([Share::Dim(0), Share::Whole, Share::Whole], [Share::Dim(0), Share::Whole])]
    }

    fn part(&self, _: &[Meta], _: usize, of: usize, index: usize) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Capacity { part: Part { index, of }, ..*self }))
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len()) // all integers
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        // Not marked memory-bound, so that `recompute` keeps the routing decision, as with `route`.
        Cost { memory_bound: false, ..Cost::memory(x[0].bytes() + x[1].bytes() + x[2].bytes()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Data, DataMut};

    #[test]
    fn the_largest_weights_have_places_and_of_equal_ones_the_earlier() {
        let chosen = [0, 1, 0, 2, 0, 1, 0, 0];
        let weights = [0.5, 0.5, 0.7, 0.9, 0.5, 0.2, 0.5, 0.1];
        let shape = [4, 2];
        let whole = [0, 1, 0, 2, 0, 1, 2, 2];
        for part in [Part::ALL, Part { index: 0, of: 2 }, Part { index: 1, of: 2 }] {
            let own = [4 / part.of, 2];
            let (first, slots) = (part.index * own[0] * 2, own[0] * 2);
            let view = |shape, data| View { shape, strides: &[2, 1], data };
            let x = [view(&own, Data::I32(&chosen[first..][..slots])), view(&shape, Data::I32(&chosen)), view(&shape, Data::F32(&weights))];
            let (mut kept, mut loads) = (vec![9; slots], [9.0; 2]);
            let mut y = [ViewMut { shape: &own, data: DataMut::I32(&mut kept) }, ViewMut { shape: &[2], data: DataMut::F32(&mut loads) }];
            Capacity { experts: 2, places: 3, part }.cpu(&x, &mut y, &mut []);
            assert_eq!((&kept[..], loads), (&whole[first..][..slots], [5.0, 2.0]), "{part:?}");
        }
    }
}
