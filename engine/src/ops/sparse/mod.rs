//! 2:4 sparsity: of every four numbers of a row, the two of largest magnitude stay.

use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io, Launch};
use crate::meta::Meta;
use crate::op::{Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use crate::ops::reduce::packs::PACKS;
use crate::record::Var;
use rayon::prelude::*;

/// Sets two of every four adjacent numbers to 0: those of smallest magnitude; of equal ones the later. The last dimension is a multiple of 4.
#[derive(Clone, Debug, PartialEq)]
pub struct Sparse24;

/// Which of four numbers stay.
pub fn kept(group: &[f32]) -> [bool; 4] {
    // A number stays if at most one of the others comes before it.
    std::array::from_fn(|i| (0..4).filter(|&j| group[j].abs() > group[i].abs() || group[j].abs() == group[i].abs() && j < i).count() < 2)
}

/// Prunes numbers in place, four by four.
pub fn prune(numbers: &mut [f32]) {
    for group in numbers.chunks_mut(4) {
        let kept = kept(group);
        group.iter_mut().zip(kept).filter(|(_, kept)| !kept).for_each(|(v, _)| *v = 0.0);
    }
}

/// How many groups of four have more than two numbers that are not 0.
pub fn dense_groups(numbers: &[f32]) -> usize {
    numbers.chunks(4).filter(|group| group.iter().filter(|v| **v != 0.0).count() > 2).count()
}

impl Op for Sparse24 {
    fn name(&self) -> &'static str {
        "sparse_24"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(x[0].dtype.is_float() && x[0].dim(0).is_multiple_of(4), "2:4 sparsity of {x:?}: rows are multiples of 4");
        vec![x[0].clone()]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        y[0].f32().par_chunks_mut(4096).zip(x[0].f32().par_chunks(4096)).for_each(|(y, x)| {
            y.copy_from_slice(x);
            prune(y);
        });
    }

    /// Which numbers stay is decided before they are rounded, as `kiln prune` does.
    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        match at {
            Port::In(_) => Narrow::Keep,
            Port::Out(_) => Narrow::Round,
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        let groups = io.x[0].elements() / 4;
        Launch::new(&[PACKS, include_str!("sparse.cu")].concat(), "sparse_24")
            .define_type("T", io.x[0].dtype)
            .define("VEC", 4)
            .define("GROUPS", format!("{groups}ull"))
            .grid(groups.div_ceil(256), 1, 1)
            .all(io)
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false // the pass lets gradients pass by it
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(2 * x[0].bytes())
    }
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("rows", &[In(&[7, 20], Fill::Frozen)], |x| vec![x[0].recorder().op1(Sparse24, x)]),
    Case::new("equal numbers", &[In(&[4, 16], Fill::Frozen)], |x| vec![x[0].recorder().op1(Sparse24, &[x[0] * 0.0 + 1.0])]),
    Case::new("a matrix of 1.5B", &[In(&[8960, 1536], Fill::Frozen)], |x| vec![x[0].recorder().op1(Sparse24, x)]).bench(),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_largest_of_four_stay() {
        for (group, expected) in [
            ([1.0, -4.0, 2.0, 3.0], [0.0, -4.0, 0.0, 3.0]),
            ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]),
            ([0.0, 0.0, -1.0, 0.5], [0.0, 0.0, -1.0, 0.5]),
            ([2.0, -2.0, 2.0, 3.0], [2.0, 0.0, 0.0, 3.0]),
        ] {
            let mut v = group;
            prune(&mut v);
            assert_eq!(v, expected, "of {group:?}");
            assert_eq!(dense_groups(&v), 0);
        }
        assert_eq!(dense_groups(&[1.0, 0.0, 2.0, 3.0, 0.0, 0.0, 1.0, 1.0]), 1);
    }
}
