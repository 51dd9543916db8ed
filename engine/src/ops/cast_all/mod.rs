//! Many tensors in another type, at once: the weights of a model before a step.

use crate::cpu::{View, ViewMut};
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, Meta};
use crate::op::{Case, Cost, Fill, Grads, In, Op};
use crate::ops::adamw::{by_types, in_pieces, list};
use crate::record::Var;
use rayon::prelude::*;

/// Inputs: any number of float tensors; outputs: the same, rounded to `dtype`, each of them or several one behind another.
#[derive(Debug)]
pub struct CastAll {
    pub dtype: DType,
    /// How many inputs each output holds.
    pub parts: Vec<usize>,
}

impl CastAll {
    /// Each tensor by itself.
    pub fn each(dtype: DType, tensors: usize) -> CastAll {
        CastAll { dtype, parts: vec![1; tensors] }
    }

    /// Of each input: its output, and elements of that before it.
    fn places<'a>(&'a self, elements: &'a dyn Fn(usize) -> usize) -> impl Iterator<Item = (usize, usize)> + 'a {
        let mut input = 0;
        self.parts.iter().enumerate().flat_map(move |(output, &parts)| {
            let (first, mut at) = (input, 0);
            input += parts;
            (first..first + parts).map(move |i| {
                at += elements(i);
                (output, at - elements(i))
            })
        })
    }
}

impl Op for CastAll {
    fn name(&self) -> &'static str {
        "cast_all"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let count = self.parts.iter().sum::<usize>() == x.len();
        assert!(count && self.dtype.is_float() && x.iter().all(|m| m.dtype.is_float()), "{self:?} of {x:?}");
        let mut left = x;
        let join = |&parts: &usize| {
            let (own, rest) = left.split_at(parts);
            left = rest;
            let mut shape = own[0].shape.clone();
            if parts > 1 {
                assert!(own.iter().all(|m| m.shape[1..] == own[0].shape[1..]), "{self:?} of {x:?}");
                shape[0] = own.iter().map(|m| m.shape[0]).sum();
            }
            Meta::new(&shape, self.dtype)
        };
        self.parts.iter().map(join).collect()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        for (x, (output, at)) in x.iter().zip(self.places(&|i| x[i].f32().len())) {
            let y = &mut y[output].f32()[at..at + x.f32().len()];
            y.par_chunks_mut(1 << 14).zip(x.f32().par_chunks(1 << 14)).for_each(|(y, x)| y.copy_from_slice(x));
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        const TENSORS: usize = 32; // of one launch
        const ELEMENTS: usize = 1 << 13; // of one block
        let mut code = Code::default();
        let to: Vec<Place> = self.places(&|i| io.x[i].elements()).map(|(output, at)| At::Y(output).plus(at * self.dtype.size())).collect();
        for (key, tensors) in by_types(0..io.x.len(), |i| (io.x[i].elements(), [io.x[i].dtype])) {
            for some in tensors.chunks(TENSORS) {
                let sizes: Vec<usize> = some.iter().map(|&i| io.x[i].elements()).collect();
                let args: Vec<Place> = some.iter().flat_map(|&i| [At::X(i).into(), to[i]]).collect();
                let (launch, _) = in_pieces(Launch::new(include_str!("cast_all.cu"), "cast_all"), &sizes, ELEMENTS);
                let launch = launch
                    .define_type("X", key[0])
                    .define_type("Y", self.dtype)
                    .define("POINTERS", list(some.len(), ", ", |k| format!("const X *x{k}, Y *y{k}")))
                    .define("PICK", list(some.len(), " ", |k| format!("case {k}: x = x{k}; y = y{k}; break;")))
                    .args(&args);
                code.steps.push(Step::Launch(launch));
            }
        }
        code
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let elements = |i: usize| x[i].meta().elements();
        let back = |(i, (output, at)): (usize, (usize, usize))| {
            let d = dy[output]?;
            if self.parts[output] == 1 {
                return Some(d.cast(x[i].dtype()));
            }
            let row = x[i].shape()[1..].iter().product::<usize>();
            Some(d.slice(0, at / row, (at + elements(i)) / row).cast(x[i].dtype()))
        };
        self.places(&elements).enumerate().map(back).collect()
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(x.iter().chain(&self.infer(x)).map(|m| m.bytes()).sum())
    }
}

pub const CASES: &[Case] = &[
    Case::new("odd sizes", &[In(&[7, 5], Fill::Normal), In(&[3], Fill::Normal), In(&[16400], Fill::Normal)], |x| {
        x[0].recorder().op(CastAll::each(DType::F32, 3), x)
    }),
    Case::new(
        "joined",
        &[
            In(&[8, 4], Fill::Normal),
            In(&[3, 4], Fill::Normal),
            In(&[5], Fill::Normal),
            In(&[2, 8192], Fill::Normal),
            In(&[1, 8192], Fill::Normal),
        ],
        |x| x[0].recorder().op(CastAll { dtype: DType::F32, parts: vec![2, 1, 2] }, x),
    ),
    Case::new("to bf16 and back", &[In(&[9000], Fill::Frozen), In(&[8], Fill::Frozen)], |x| {
        let x: Vec<Var> = x.iter().map(|v| v.stop_gradient()).collect(); // rounding has no slope to compare with
        let y = x[0].recorder().op(CastAll::each(DType::BF16, 2), &x);
        y.into_iter().map(|v| v.cast(DType::F32)).collect()
    }),
];
