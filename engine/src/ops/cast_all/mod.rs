//! Many tensors in another type, at once: the weights of a model before a step.

use crate::cpu::{View, ViewMut};
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, Meta};
use crate::op::{Case, Cost, Fill, Grads, In, Op};
use crate::ops::adamw::{by_types, in_pieces, list};
use crate::record::Var;
use rayon::prelude::*;

/// Inputs: any number of float tensors; outputs: the same, rounded to `dtype`.
#[derive(Debug)]
pub struct CastAll {
    pub dtype: DType,
}

impl Op for CastAll {
    fn name(&self) -> &'static str {
        "cast_all"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert!(self.dtype.is_float() && x.iter().all(|m| m.dtype.is_float()), "cast_all of {x:?}");
        x.iter().map(|m| Meta::new(&m.shape, self.dtype)).collect()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        for (x, y) in x.iter().zip(y) {
            y.f32().par_chunks_mut(1 << 14).zip(x.f32().par_chunks(1 << 14)).for_each(|(y, x)| y.copy_from_slice(x));
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        const TENSORS: usize = 32; // of one launch
        const ELEMENTS: usize = 1 << 13; // of one block
        let mut code = Code::default();
        for (key, tensors) in by_types(0..io.x.len(), |i| (io.x[i].elements(), [io.x[i].dtype])) {
            for some in tensors.chunks(TENSORS) {
                let sizes: Vec<usize> = some.iter().map(|&i| io.x[i].elements()).collect();
                let args: Vec<Place> = some.iter().flat_map(|&i| [At::X(i).into(), At::Y(i).into()]).collect();
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
        x.iter().zip(dy).map(|(x, dy)| dy.map(|d| d.cast(x.dtype()))).collect()
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(x.iter().chain(&self.infer(x)).map(|m| m.bytes()).sum())
    }
}

pub const CASES: &[Case] = &[
    Case::new("odd sizes", &[In(&[7, 5], Fill::Normal), In(&[3], Fill::Normal), In(&[16400], Fill::Normal)], |x| {
        x[0].recorder().op(CastAll { dtype: DType::F32 }, x)
    }),
    Case::new("to bf16 and back", &[In(&[9000], Fill::Frozen), In(&[8], Fill::Frozen)], |x| {
        let x: Vec<Var> = x.iter().map(|v| v.stop_gradient()).collect(); // rounding has no slope to compare with
        let y = x[0].recorder().op(CastAll { dtype: DType::BF16 }, &x);
        y.into_iter().map(|v| v.cast(DType::F32)).collect()
    }),
];
