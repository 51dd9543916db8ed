//! Pictures out of a set of bytes: chosen by number, cut, resized, mirrored, normalised to [-1, 1]. A set that is kept on the device is
//! augmented there, by draws that are the same on every device and after a resume.

use engine::cpu::{View, ViewMut};
use engine::kernel::{Code, Io, Launch};
use engine::meta::{DType, Meta};
use engine::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share, no_gradient};
use engine::philox::fill_uniform;
use engine::record::Var;
use rayon::prelude::*;
use std::sync::Arc;

/// A random square of at least `least` of the area, resized to the whole (bilinear), and with `mirror` mirrored every other time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Augment {
    pub least: f32,
    pub mirror: bool,
    /// The place in the recording that draws.
    pub site: u32,
}

/// Inputs: set u8 [pictures, channels, side, side], index i32 [batch], and rng i32 [4] if there is something to draw. Output: f32
/// [batch, channels, side, side], 0 to 255 becoming -1 to 1.
#[derive(Debug)]
pub struct Pictures {
    pub augment: Option<Augment>,
    /// The place in the batch of the first item, where a rank has a part of it: draws are numbered by all items.
    pub first: usize,
}

/// Where an item's square begins, how far apart its samples are, and whether it is mirrored. Draws 4 i to 4 i + 3 are its own.
fn square(a: Augment, rng: &[i32], item: usize, side: usize) -> (f32, f32, f32, bool) {
    let mut u = [0.0; 4];
    fill_uniform(rng, a.site, 4 * item, &mut u);
    let length = side as f32 * (a.least + (1.0 - a.least) * u[0]).sqrt();
    let room = side as f32 - length;
    (room * u[1], room * u[2], length / side as f32, a.mirror && u[3] < 0.5)
}

/// The two neighbours of a place between pixels, and the share of the second.
fn between(at: f32, side: usize) -> (usize, usize, f32) {
    let at = at.clamp(0.0, (side - 1) as f32);
    let low = at.floor();
    (low as usize, (low as usize + 1).min(side - 1), at - low)
}

impl Op for Pictures {
    fn name(&self) -> &'static str {
        "pictures"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let fits =
            x[0].rank() == 4 && x[0].dtype == DType::U8 && x[0].shape[2] == x[0].shape[3] && x[1].rank() == 1 && x[1].dtype == DType::I32;
        assert!(fits && x.len() == 2 + self.augment.is_some() as usize, "pictures of {x:?}");
        vec![Meta::f32(&[&x[1].shape[..], &x[0].shape[1..]].concat())]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (channels, side) = (x[0].shape[1], x[0].shape[2]);
        let (set, index) = (x[0].u8(), x[1].i32());
        let picture = channels * side * side;
        y[0].f32().par_chunks_mut(picture).zip(index).enumerate().for_each(|(i, (out, &from))| {
            let set = &set[from as usize * picture..][..picture];
            let Some(a) = self.augment else {
                out.iter_mut().zip(set).for_each(|(o, &p)| *o = p as f32 / 127.5 - 1.0);
                return;
            };
            let (left, top, step, mirrored) = square(a, x[2].i32(), self.first + i, side);
            for (out, plane) in out.chunks_mut(side * side).zip(set.chunks(side * side)) {
                for (row, out) in out.chunks_mut(side).enumerate() {
                    let (y0, y1, fy) = between(top + (row as f32 + 0.5) * step - 0.5, side);
                    for (column, o) in out.iter_mut().enumerate() {
                        let column = if mirrored { side - 1 - column } else { column };
                        let (x0, x1, fx) = between(left + (column as f32 + 0.5) * step - 0.5, side);
                        let at = |y: usize, x: usize| plane[y * side + x] as f32;
                        let upper = at(y0, x0) + (at(y0, x1) - at(y0, x0)) * fx;
                        let lower = at(y1, x0) + (at(y1, x1) - at(y1, x0)) * fx;
                        *o = (upper + (lower - upper) * fy) / 127.5 - 1.0;
                    }
                }
            }
        });
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let launch = Launch::new(include_str!("pictures.cu"), "pictures")
            .define("CHANNELS", io.x[0].shape[1])
            .define("SIDE", io.x[0].shape[2])
            .define("PICTURES", io.x[0].shape[0])
            .define("FIRST", format!("{}ull", self.first))
            .define("N", format!("{}ull", io.y[0].elements()))
            .define("AUGMENT", self.augment.is_some() as u8)
            .define("MIRROR", self.augment.is_some_and(|a| a.mirror) as u8)
            .define("RNG", if self.augment.is_some() { "const int *rng," } else { "" })
            .define("SITE", format!("{}u", self.augment.map_or(0, |a| a.site)))
            .define_f32("LEAST", self.augment.map_or(1.0, |a| a.least));
        launch.grid(io.y[0].elements().div_ceil(256), 1, 1).all(io).code()
    }

    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        let mut of = vec![Share::Whole; x.len()];
        of[1] = Share::Dim(0);
        vec![Axis::new(of, [Share::Dim(0)])]
    }

    fn part(&self, x: &[Meta], _: usize, parts: usize, index: usize) -> Option<Arc<dyn Op>> {
        let first = self.first + index * (x[1].elements() / parts);
        Some(Arc::new(Pictures { first, ..*self }))
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len()) // bytes
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let y = &self.infer(x)[0];
        Cost::memory(y.bytes() + y.elements())
    }
}

/// Pictures of a set, by number, as they are.
#[track_caller]
pub fn pictures<'g>(set: Var<'g>, index: Var<'g>) -> Var<'g> {
    set.recorder().op1(Pictures { augment: None, first: 0 }, &[set, index])
}

/// The same, each cut to a random square of at least `least` of its area and, with `mirror`, mirrored every other time. The cuts are the same
/// with and without it.
#[track_caller]
pub fn augmented_pictures<'g>(set: Var<'g>, index: Var<'g>, rng: Var<'g>, least: f32, mirror: bool) -> Var<'g> {
    let site = set.recorder().new_site();
    set.recorder().op1(Pictures { augment: Some(Augment { least, mirror, site }), first: 0 }, &[set, index, rng])
}

pub const CASES: &[Case] = &[
    Case::new("as they are", &[In(&[7, 3, 5, 5], Fill::Byte), In(&[4], Fill::Index(7)), In(&[1], Fill::Normal)], |x| {
        vec![pictures(x[0], x[1]) * x[2]]
    }),
    Case::new("augmented", &[In(&[7, 3, 9, 9], Fill::Byte), In(&[11], Fill::Index(7)), In(&[4], Fill::Rng), In(&[1], Fill::Normal)], |x| {
        vec![augmented_pictures(x[0], x[1], x[2], 0.5, true) * x[3]]
    }),
    Case::new("cut alone", &[In(&[7, 3, 9, 9], Fill::Byte), In(&[11], Fill::Index(7)), In(&[4], Fill::Rng), In(&[1], Fill::Normal)], |x| {
        vec![augmented_pictures(x[0], x[1], x[2], 0.5, false) * x[3]]
    }),
    Case::new("cifar", &[In(&[4096, 3, 32, 32], Fill::Byte), In(&[1024], Fill::Index(4096)), In(&[4], Fill::Rng)], |x| {
        vec![augmented_pictures(x[0], x[1], x[2], 0.8, true)]
    })
    .bench(),
];
