//! A table that is written around and around, and the counter that says where: both on the device, so that nobody has to ask.

use engine::cpu::{View, ViewMut};
use engine::kernel::{At, Code, Io, Launch};
use engine::meta::{DType, Meta};
use engine::op::{Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use engine::record::Var;

/// y = table, then row (count + i) mod slots of it is rows[i]. Inputs: table [slots, d], count i32 [1] (not negative), rows [n, d], n <= slots.
#[derive(Debug)]
pub struct RingWrite;

impl Op for RingWrite {
    fn name(&self) -> &'static str {
        "ring_write"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let tables = x[0].rank() == 2 && x[2].rank() == 2 && x[0].dim(0) == x[2].dim(0) && x[0].dtype == x[2].dtype;
        assert!(tables && x[2].shape[0] <= x[0].shape[0] && x[1] == Meta::new(&[1], DType::I32), "ring_write of {x:?}");
        vec![x[0].clone()]
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (slots, d, first) = (y[0].dim(1), y[0].dim(0), x[1].i32()[0] as usize);
        for (i, row) in x[2].f32().chunks(d).enumerate() {
            y[0].f32()[(engine::mutant!("ring-writes-one-slot-late", first, first + 1) + i) % slots * d..][..d].copy_from_slice(row);
        }
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        Launch::new(include_str!("ring.cu"), "ring_write")
            .define_type("T", io.x[0].dtype)
            .define("SLOTS", io.x[0].shape[0])
            .define("D", io.x[0].dim(0))
            .define("N", io.x[2].elements())
            .grid(io.x[2].elements().div_ceil(256), 1, 1)
            .args(&[At::X(1).into(), At::X(2).into(), At::Y(0).into()])
            .code()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(2 * x[2].bytes() + x[1].bytes())
    }
}

/// y = x + by, in whole numbers of 32 bits: arithmetic on elements is done in f32, which counts no further than 2^24.
#[derive(Debug)]
pub struct Count {
    pub by: i32,
}

impl Op for Count {
    fn name(&self) -> &'static str {
        "count"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert_eq!(x[0], Meta::new(&[1], DType::I32), "count");
        vec![x[0].clone()]
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    fn cpu(&self, _: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        y[0].i32()[0] = y[0].i32()[0].wrapping_add(self.by);
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, _: &Io) -> Code {
        let text = "extern \"C\" __global__ void count(unsigned int *y) { *y += BY; }";
        Launch::new(text, "count").define("BY", format!("{}u", self.by as u32)).block(1).args(&[At::Y(0).into()]).code()
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(1)
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(2 * x[0].bytes())
    }
}

/// See `RingWrite`.
#[track_caller]
pub fn ring_write<'g>(table: Var<'g>, count: Var<'g>, rows: Var<'g>) -> Var<'g> {
    table.recorder().op1(RingWrite, &[table, count, rows])
}

/// A counter, further on.
#[track_caller]
pub fn count(counter: Var<'_>, by: usize) -> Var<'_> {
    let by = i32::try_from(by).expect("a counter has 32 bits");
    counter.recorder().op1(Count { by }, &[counter])
}

macro_rules! ring {
    ($slots:literal, $d:literal, $n:literal, $count:literal) => {
        &[In(&[$slots, $d], Fill::Frozen), In(&[1], Fill::Index($count)), In(&[$n, $d], Fill::Frozen)]
    };
}

fn written<'g>(x: &[Var<'g>]) -> Vec<Var<'g>> {
    vec![ring_write(x[0], x[1], x[2])]
}

pub const CASES: &[Case] = &[
    Case::new("some rows", ring!(7, 5, 3, 5), written),
    Case::new("around the end, and around again", ring!(9, 70, 8, 1000), written),
    Case::new("every row", ring!(4, 3, 4, 4), written),
    Case::new("one column", ring!(600, 1, 300, 100), written),
    Case::new("counted", &[In(&[1], Fill::Index(1000)), In(&[3], Fill::Normal)], |x| vec![x[1] * count(x[0], 70).cast(DType::F32)]),
    Case::new("memory", ring!(2048, 512, 64, 5000), written).bench(),
];
