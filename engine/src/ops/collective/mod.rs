//! Collectives: ops that exchange values between ranks. Passes place them; model code does not.
//!
//! A value is either the same on all ranks, or each rank has a part or a term of it. Every op here leads from one of these to another, and its gradient
//! leads back, so that gradients are divided as their values are:
//!
//! | op | from | to | its gradient |
//! |---|---|---|---|
//! | all_reduce | a term on each rank | the sum, on all | is the same on all: each term's |
//! | broadcast | the same on all | the same, read by each for its part of the work | all_reduce |
//! | all_gather | a part on each | the whole, on all | part |
//! | part | the whole, on all | a part on each | all_gather |
//! | reduce_scatter | a term on each | a part of the sum on each | all_gather |
//! | all_to_all | a part of one dimension | a part of another | all_to_all |

pub mod aside;
pub mod vocabulary;

use crate::cpu::{Data, DataMut, View, ViewMut};
use crate::kernel::{At, Code, Io, Place, Step};
use crate::meta::{DType, Layout, Meta};
use crate::op::{Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share};
use crate::ops::view::view_op;
use crate::ranks::Group;
use crate::record::Var;
use std::sync::Arc;

/// What all collectives have in common: numbers are kept as they are, and the first dimension is the one that is exchanged.
macro_rules! collective {
    ($name:literal, $what:expr) => {
        fn name(&self) -> &'static str {
            $name
        }
        fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
            kept(at)
        }
        fn cost(&self, x: &[Meta]) -> Cost {
            Cost { memory_bound: false, ..Cost::memory(x.iter().chain(&self.infer(x)).map(|m| m.bytes()).sum()) }
        }
        fn cuda(&self, io: &Io) -> Code {
            let parts = (0..io.x.len()).map(|i| Exchanged {
                from: if self.reuse().is_empty() { At::X(i) } else { At::Y(i) }.into(),
                to: At::Y(i).into(),
                elements: io.x[i].elements(),
                dtype: io.x[i].dtype,
            });
            Code {
                steps: vec![Step::Collective(Collective { what: $what, group: self.group.clone(), parts: parts.collect() })],
                workspace: 0,
            }
        }
        /// Other dimensions may be divided among other ranks.
        fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
            if x.len() > 1 {
                return vec![];
            }
            let first = $what != What::AllReduce;
            (first as usize..x[0].rank()).map(|d| Axis::new([Share::Dim(d)], [Share::Dim(d)])).collect()
        }
    };
}

/// What is exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Sums, on all ranks.
    AllReduce,
    /// The parts of all ranks, on all ranks.
    AllGather,
    /// A part of the sums on each rank.
    ReduceScatter,
    /// Part i of each rank, on rank i.
    AllToAll,
}

/// An exchange of some values with other ranks.
#[derive(Clone, Debug)]
pub struct Collective {
    /// What is exchanged.
    pub what: What,
    /// With which ranks.
    pub group: Group,
    /// The values.
    pub parts: Vec<Exchanged>,
}

/// A value that is exchanged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchanged {
    /// What this rank gives.
    pub from: Place,
    /// Where the result goes.
    pub to: Place,
    /// How many elements it gives.
    pub elements: usize,
    /// Their type.
    pub dtype: DType,
}

fn each(x: &Data, y: &mut DataMut, floats: impl FnOnce(&[f32], &mut [f32]), integers: impl FnOnce(&[i32], &mut [i32])) {
    match (x, y) {
        (Data::F32(x), DataMut::F32(y)) => floats(x, y),
        (Data::I32(x), DataMut::I32(y)) => integers(x, y),
        _ => unreachable!("infer allows floats and i32"),
    }
}

fn check(name: &str, x: &[Meta]) {
    assert!(x.iter().all(|m| m.dtype.is_float() || m.dtype == DType::I32), "{name} of {x:?}: bytes are not exchanged");
}

/// The sums of any number of tensors over all ranks, in place.
#[derive(Debug)]
pub struct AllReduce {
    /// The ranks.
    pub group: Group,
    /// How many tensors.
    pub tensors: usize,
}

impl Op for AllReduce {
    collective!("all_reduce", What::AllReduce);

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check("all_reduce", x);
        assert_eq!(x.len(), self.tensors, "all_reduce of {x:?}");
        x.to_vec()
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        (0..self.tensors).map(|i| (i, i)).collect()
    }

    fn cpu(&self, _: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        for y in y {
            match &mut y.data {
                DataMut::F32(y) => self.group.all_reduce(y),
                DataMut::I32(y) => self.group.all_reduce(y),
                DataMut::U8(_) => unreachable!("infer allows floats and i32"),
            }
        }
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        dy.to_vec()
    }
}

/// The parts of all ranks along the first dimension.
#[derive(Debug)]
pub struct AllGather {
    /// The ranks.
    pub group: Group,
}

impl Op for AllGather {
    collective!("all_gather", What::AllGather);

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check("all_gather", x);
        x.iter().map(|m| m.with(&scaled(&m.shape, self.group.size, 1))).collect()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let g = &self.group;
        x.iter().zip(y).for_each(|(x, y)| each(&x.data, &mut y.data, |x, y| g.all_gather(x, y), |x, y| g.all_gather(x, y)));
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        dy.iter().map(|d| d.map(|d| part(d, 0, &self.group))).collect()
    }
}

/// A part, along the first dimension, of the sum over all ranks.
#[derive(Debug)]
pub struct ReduceScatter {
    /// The ranks.
    pub group: Group,
}

impl Op for ReduceScatter {
    collective!("reduce_scatter", What::ReduceScatter);

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check("reduce_scatter", x);
        x.iter().map(|m| m.with(&scaled(&m.shape, 1, self.group.size))).collect()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let g = &self.group;
        x.iter().zip(y).for_each(|(x, y)| each(&x.data, &mut y.data, |x, y| g.reduce_scatter(x, y), |x, y| g.reduce_scatter(x, y)));
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        dy.iter().map(|d| d.map(|d| d.recorder().op1(AllGather { group: self.group.clone() }, &[d]))).collect()
    }
}

/// Part i of the first dimension goes to rank i; the result has one part from every rank, in their order.
#[derive(Debug)]
pub struct AllToAll {
    /// The ranks.
    pub group: Group,
}

impl Op for AllToAll {
    collective!("all_to_all", What::AllToAll);

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check("all_to_all", x);
        x.iter().for_each(|m| drop(scaled(&m.shape, 1, self.group.size)));
        x.to_vec()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let g = &self.group;
        x.iter().zip(y).for_each(|(x, y)| each(&x.data, &mut y.data, |x, y| g.all_to_all(x, y), |x, y| g.all_to_all(x, y)));
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        dy.iter().map(|d| d.map(|d| d.recorder().op1(AllToAll { group: self.group.clone() }, &[d]))).collect()
    }
}

fn scaled(shape: &[usize], times: usize, parts: usize) -> Vec<usize> {
    assert!(!shape.is_empty() && shape[0].is_multiple_of(parts), "{shape:?} is cut into {parts} parts along the first dimension");
    let mut shape = shape.to_vec();
    shape[0] = shape[0] * times / parts;
    shape
}

/// As it is: what is rounded is rounded afterwards, so that gradients are summed over the ranks in the type of the weights.
fn kept(at: Port) -> Narrow {
    match at {
        Port::In(_) => Narrow::Keep,
        Port::Out(k) => Narrow::Follow(vec![k]),
    }
}

/// A value that all ranks have, and that each reads for its own part of the work. Nothing is sent. Its gradient is the sum over all ranks.
#[derive(Debug)]
pub struct Broadcast {
    /// The ranks.
    pub group: Group,
}

impl Op for Broadcast {
    view_op!("broadcast", kept);

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        x.to_vec()
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let sum = |d: Var<'g>| crate::mutant!("gradients-of-one-rank-alone", all_reduce(d, &self.group), d);
        vec![dy[0].map(sum)]
    }

    fn alias(&self, _: &Meta, strides: &[usize]) -> Option<(usize, Vec<usize>)> {
        Some((0, strides.to_vec()))
    }

    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        (0..x[0].rank()).map(|d| Axis::new([Share::Dim(d)], [Share::Dim(d)])).collect()
    }
}

/// A rank's part of a dimension of a value that all ranks have.
#[derive(Debug)]
pub struct Part {
    /// The ranks.
    pub group: Group,
    /// The dimension.
    pub axis: usize,
}

impl Op for Part {
    view_op!("part", kept);

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let mut shape = x[0].shape.clone();
        assert!(shape[self.axis].is_multiple_of(self.group.size), "dimension {} of {:?} in {} parts", self.axis, x[0], self.group.size);
        shape[self.axis] /= self.group.size;
        vec![x[0].with(&shape)]
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![dy[0].map(|d| all_gather(d, self.axis, &self.group))]
    }

    fn alias(&self, x: &Meta, strides: &[usize]) -> Option<(usize, Vec<usize>)> {
        Some((self.group.rank * (x.shape[self.axis] / self.group.size) * strides[self.axis], strides.to_vec()))
    }

    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        (0..x[0].rank()).filter(|&d| d != self.axis).map(|d| Axis::new([Share::Dim(d)], [Share::Dim(d)])).collect()
    }
}

/// The sum over all ranks.
pub fn all_reduce<'g>(x: Var<'g>, group: &Group) -> Var<'g> {
    x.recorder().op1(AllReduce { group: group.clone(), tensors: 1 }, &[x])
}

/// The whole of a dimension that is divided among the ranks.
pub fn all_gather<'g>(x: Var<'g>, axis: usize, group: &Group) -> Var<'g> {
    led_by(x, axis, Arc::new(AllGather { group: group.clone() }))
}

/// A part of a dimension of the sum over all ranks.
pub fn reduce_scatter<'g>(x: Var<'g>, axis: usize, group: &Group) -> Var<'g> {
    led_by(x, axis, Arc::new(ReduceScatter { group: group.clone() }))
}

/// A rank's part of a dimension.
pub fn part<'g>(x: Var<'g>, axis: usize, group: &Group) -> Var<'g> {
    x.recorder().op1(Part { group: group.clone(), axis }, &[x])
}

/// From parts of one dimension to parts of another.
pub fn all_to_all<'g>(x: Var<'g>, from: usize, to: usize, group: &Group) -> Var<'g> {
    // [.., from / n, .., to, ..] -> [n, .., from / n, .., to / n, ..], exchanged, -> [.., from, .., to / n, ..]
    let shape = x.shape();
    let mut cut = shape.clone();
    cut.splice(to..to + 1, [group.size, shape[to] / group.size]);
    let rank = cut.len();
    let front: Vec<usize> = std::iter::once(to).chain((0..rank).filter(|&d| d != to)).collect();
    let sent = x.reshape(&cut).permute(&front);
    let flat = [group.size, sent.meta().elements() / group.size];
    let got = x.recorder().op1(AllToAll { group: group.clone() }, &[sent.reshape(&flat)]);
    let got = got.reshape(&sent.shape());
    // The parts of all ranks are the blocks of dimension `from`, which is now one further back.
    let back: Vec<usize> = (1..=from).chain([0]).chain(from + 1..rank).collect();
    let mut joined = shape;
    (joined[from], joined[to]) = (joined[from] * group.size, joined[to] / group.size);
    got.permute(&back).reshape(&joined)
}

/// An op that exchanges the first dimension, on another one.
fn led_by<'g>(x: Var<'g>, axis: usize, op: Arc<dyn Op>) -> Var<'g> {
    if axis == 0 {
        return x.recorder().op_arc(op, &[x])[0];
    }
    let front: Vec<usize> = std::iter::once(axis).chain((0..x.meta().rank()).filter(|&d| d != axis)).collect();
    let back: Vec<usize> = (1..=axis).chain([0]).chain(axis + 1..x.meta().rank()).collect();
    x.recorder().op_arc(op, &[x.permute(&front)])[0].permute(&back)
}

/// Cases of one rank, on which every collective gives what it was given. Tests of several ranks: `engine/tests/suite/ranks.rs`.
pub const CASES: &[Case] = &[
    Case::new("all_reduce", &[In(&[3, 5], Fill::Normal)], |x| vec![all_reduce(x[0] * 2.0, &Group::default())]),
    Case::new("all_gather", &[In(&[3, 4, 5], Fill::Normal)], |x| vec![all_gather(x[0], 1, &Group::default())]),
    Case::new("reduce_scatter", &[In(&[3, 4], Fill::Normal)], |x| vec![reduce_scatter(x[0], 1, &Group::default())]),
    Case::new("all_to_all", &[In(&[3, 4, 5], Fill::Normal)], |x| vec![all_to_all(x[0], 0, 2, &Group::default())]),
    Case::new("columns of a loss", &[In(&[13, 7], Fill::Normal), In(&[13], Fill::Target(7))], |x| {
        vec![vocabulary::cross_entropy(x[0], x[1], &Group::default())]
    }),
    Case::new("rows of a table", &[In(&[7, 6], Fill::Normal), In(&[4, 3], Fill::Index(7))], |x| {
        vec![vocabulary::gather_rows(x[0], x[1], &Group::default())]
    }),
    Case::new("part", &[In(&[3, 4], Fill::Normal)], |x| vec![part(x[0], 1, &Group::default()) * 2.0]),
];
