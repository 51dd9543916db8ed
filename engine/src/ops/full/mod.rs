//! A tensor filled with one number.

use crate::cpu::{DataMut, View, ViewMut};
use crate::kernel::{Code, Io, Launch};
use crate::meta::{DType, Meta};
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share};
use crate::ops::reduce::packs::{PACKS, pack};
use crate::record::{Recorder, Var};
use rayon::prelude::*;
use std::sync::Arc;

/// A tensor filled with one number. No inputs.
#[derive(Clone, Debug)]
pub struct Full {
    /// Its shape.
    pub shape: Vec<usize>,
    /// The number.
    pub value: f32,
    /// Its type.
    pub dtype: DType,
}

impl Op for Full {
    fn name(&self) -> &'static str {
        "full"
    }

    fn infer(&self, _: &[Meta]) -> Vec<Meta> {
        vec![Meta::new(&self.shape, self.dtype)]
    }

    fn cpu(&self, _: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        match &mut y[0].data {
            DataMut::F32(d) => d.par_chunks_mut(1 << 16).for_each(|c| c.fill(self.value)),
            DataMut::I32(d) => d.fill(self.value as i32),
            DataMut::U8(d) => d.fill(self.value as u8),
        }
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let (n, vec) = (io.y[0].elements(), pack(&[self.dtype], &[]));
        let launch = Launch::new(&[PACKS, include_str!("full.cu")].concat(), "full");
        let launch = match self.dtype {
            DType::I32 => launch.define("SET", format!("v = {}", self.value as i32)),
            DType::U8 => launch.define("SET", format!("v = {}", self.value as u8)),
            _ => launch.define_f32("VALUE", self.value).define("SET", "from_float(VALUE, v)"),
        };
        launch
            .define_type("T", self.dtype)
            .define("VEC", vec)
            .define("N", format!("{n}ull"))
            .grid((n / vec + n % vec).div_ceil(256), 1, 1)
            .all(io)
            .code()
    }

    fn axes(&self, _: &[Meta], _: usize) -> Vec<Axis> {
        (0..self.shape.len()).map(|d| Axis::new([], [Share::Dim(d)])).collect()
    }

    fn part(&self, _: &[Meta], axis: usize, parts: usize, _: usize) -> Option<Arc<dyn Op>> {
        let mut part = self.clone();
        part.shape[axis] /= parts;
        Some(Arc::new(part))
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![] // it has no inputs
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(self.infer(x)[0].bytes())
    }
}

impl Recorder {
    /// An f32 tensor filled with one number.
    pub fn full(&self, shape: &[usize], value: f32) -> Var<'_> {
        self.op1(Full { shape: shape.to_vec(), value, dtype: DType::F32 }, &[])
    }

    /// An f32 tensor of zeros.
    pub fn zeros(&self, shape: &[usize]) -> Var<'_> {
        self.full(shape, 0.0)
    }
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] =
    &[Case::new("added", &[In(&[3, 5], Fill::Normal)], |x| vec![x[0] + x[0].recorder().full(&[2, 3, 5], 1.5).slice(0, 1, 2)])];
