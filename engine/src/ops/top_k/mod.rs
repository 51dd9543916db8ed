//! Indices of the k largest values of each row, in increasing order of the indices; of equal values, the first is taken.

use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io, Launch};
use crate::meta::{DType, Meta};
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use crate::record::Var;
use rayon::prelude::*;

/// Indices of the k largest values of each row, in increasing order.
#[derive(Debug)]
pub struct TopK {
    /// How many.
    pub k: usize,
}

impl Op for TopK {
    fn name(&self) -> &'static str {
        "top_k"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(x[0].rank() == 2 && (1..=x[0].dim(0)).contains(&self.k), "top {} of {:?}", self.k, x[0]);
        vec![Meta::new(&[x[0].dim(1), self.k], DType::I32)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let n = x[0].dim(0);
        let data = x[0].f32();
        y[0].i32().par_chunks_mut(self.k).enumerate().for_each(|(row, out)| {
            let x = &data[row * n..][..n];
            // -0 + 0 is 0: the two zeros are a tie.
            let key = |i: i32| x[i as usize] + 0.0;
            let mut order: Vec<i32> = (0..n as i32).collect();
            if self.k < n {
                order.select_nth_unstable_by(self.k - 1, |&a, &b| {
                    key(b).total_cmp(&key(a)).then(crate::mutant!("top-k-of-a-tie-is-the-later", a.cmp(&b), b.cmp(&a)))
                });
            }
            order[..self.k].sort();
            out.copy_from_slice(&order[..self.k]);
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let n = io.x[0].dim(0);
        let threads = n.next_multiple_of(32).min(1024);
        Launch::new(include_str!("top_k.cu"), "top_k")
            .define_type("T", io.x[0].dtype)
            .define("N", n)
            .define("K", self.k)
            .define("KEEP", (n <= 8192) as u8) // 32 KiB of shared memory
            .define("THREADS", threads)
            .grid(io.x[0].dim(1), 1, 1)
            .block(threads)
            .all(io)
            .code()
    }

    fn axes(&self, _: &[Meta], _: usize) -> Vec<Axis> {
        vec![Axis::first(&[true], 1)]
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len()) // positions are integers
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        // Not marked memory-bound: the result is small, so `recompute` should keep it.
        Cost { memory_bound: false, ..Cost::memory(x[0].bytes() + self.infer(x)[0].bytes()) }
    }
}

impl<'g> Var<'g> {
    /// [batch, n] -> i32 [batch, k].
    #[track_caller]
    pub fn top_k(self, k: usize) -> Var<'g> {
        self.recorder().op1(TopK { k }, &[self])
    }
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("gathered by", &[In(&[2, 13], Fill::Distinct), In(&[13, 3], Fill::Normal)], |x| vec![x[1].gather_rows(x[0].top_k(5))]),
    // Whole numbers, so that many are equal: a GPU decides as the CPU does.
    Case::new("ties", &[In(&[7, 70], Fill::Index(5))], |x| vec![x[0].cast(DType::F32).top_k(20).cast(DType::F32)]),
    Case::new("routing", &[In(&[64, 1024], Fill::Frozen)], |x| vec![x[0].top_k(512).cast(DType::F32)]).bench(),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Data, DataMut};

    #[test]
    fn ties_go_to_the_earlier() {
        let x = [1.0, 3.0, 2.0, 3.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let mut y = [0; 4];
        let view = View { shape: &[2, 5], strides: &[5, 1], data: Data::F32(&x) };
        TopK { k: 2 }.cpu(&[view], &mut [ViewMut { shape: &[2, 2], data: DataMut::I32(&mut y) }], &mut []);
        assert_eq!(y, [1, 3, 0, 1]);
    }
}
