//! Sorts the slots of tokens by expert.

use crate::cpu::{View, ViewMut};
use crate::kernel::{At, Code, Io, Launch, Step};
use crate::meta::{DType, Meta};
use crate::op::{self, Axis, Cost, Grads, Narrow, Op, Port, Share, no_gradient};
use crate::record::Var;

/// A stable sort of the slots by expert. Input: the expert of each slot, i32 [tokens, k], or with `none` the number of experts for a slot that has none: such
/// slots come last. Outputs: order, the slot at each row, i32 `[slots]`;
/// position, the row of each slot, i32 `[slots]`; offsets, the first row of each expert and last the number of rows that have one, i32 [experts + 1].
#[derive(Debug)]
pub struct Dispatch {
    /// The number of experts.
    pub experts: usize,
    /// Whether slots may have no expert.
    pub none: bool,
}

impl Dispatch {
    /// What a slot may have: an expert, or none.
    fn kinds(&self) -> usize {
        self.experts + usize::from(self.none)
    }
}

impl Op for Dispatch {
    fn name(&self) -> &'static str {
        "dispatch"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(x[0].dtype == DType::I32 && x[0].elements() < 1 << 31 && (1..=1024).contains(&self.experts), "{self:?} of {:?}", x[0]);
        let slots = Meta::new(&[x[0].elements()], DType::I32);
        vec![slots.clone(), slots, Meta::new(&[self.experts + 1], DType::I32)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let chosen = x[0].i32();
        let [order, position, offsets] = y else { unreachable!("infer gives three outputs") };
        let (order, position, offsets) = (order.i32(), position.i32(), offsets.i32());
        let kinds = self.kinds();
        let mut next = vec![0; kinds + 1];
        chosen.iter().for_each(|&e| next[e as usize + 1] += 1);
        for e in 0..kinds {
            next[e + 1] += next[e];
        }
        offsets.copy_from_slice(&next[..self.experts + 1]);
        for (slot, &e) in chosen.iter().enumerate() {
            let at = &mut next[e as usize];
            order[*at as usize] = slot as i32;
            position[slot] = *at;
            *at += 1;
        }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        const THREADS: usize = 256;
        const BLOCKS: usize = 128;
        let slots = io.x[0].elements();
        let chunk = slots.div_ceil(BLOCKS).next_multiple_of(THREADS);
        let blocks = slots.div_ceil(chunk);
        let launch = |entry| {
            Launch::new(include_str!("dispatch.cu"), entry)
                .define("SLOTS", slots)
                .define("KINDS", self.kinds())
                .define("NONE", self.none as u8)
                .define("CHUNK", chunk)
                .define("BLOCKS", blocks)
                .grid(blocks, 1, 1)
                .block(THREADS)
        };
        let (chosen, counts) = (At::X(0).into(), At::Work.into());
        let count = launch("dispatch_count").args(&[chosen, counts]);
        let place = launch("dispatch_place").args(&[chosen, counts, At::Y(0).into(), At::Y(1).into(), At::Y(2).into()]);
        Code { steps: vec![Step::Launch(count), Step::Launch(place)], workspace: 4 * blocks * self.kinds() }
    }

    /// Tokens. A rank's rows are in an order of its own, and the places where experts begin add up.
    fn axes(&self, _: &[Meta], _: usize) -> Vec<Axis> {
        vec![Axis::new([Share::Dim(0)], [Share::Own, Share::Own, Share::Sum])]
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len()) // all integers
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        // Not marked memory-bound, so that `recompute` keeps the routing decision, as with `route`.
        Cost { memory_bound: false, ..Cost::memory(4 * x[0].bytes()) }
    }
}
