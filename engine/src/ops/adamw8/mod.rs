//! AdamW and momentum whose states are 8-bit: read, moved in f32 as without, and quantized again, in one kernel.

mod map;
mod momentum;

pub use map::{BLOCK, Map};
pub use momentum::Momentum8;

use crate::cpu::{View, ViewMut};
use crate::graph::{Init, Role};
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, Meta};
use crate::op::{Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use crate::ops::adamw::{AdamW, by_types, in_pieces, list};
use crate::record::Var;
use rayon::prelude::*;

/// Elements of one task, and of one block of a kernel: 8 warps have a block of 256 four times.
const PIECE: usize = 1 << 13;

/// Shape and type of the maxima of a quantized tensor.
pub fn absmax_of(of: &Meta) -> Meta {
    Meta::f32(&[of.elements().div_ceil(BLOCK)])
}

/// Whether these are the bytes and maxima of a tensor of this shape.
fn is_quantized(of: &Meta, bytes: &Meta, absmax: &Meta) -> bool {
    *bytes == Meta::new(&of.shape, DType::U8) && *absmax == absmax_of(of)
}

/// A map as the words of a kernel's struct Map.
fn map_of(launch: Launch, name: &'static str, map: Map) -> Launch {
    let tables = map.tables();
    let mut cells = tables.cells.clone();
    cells.resize(map::CELLS.next_multiple_of(16), 0);
    let numbers = tables.numbers.iter().chain(&tables.middles).map(|v| v.to_bits());
    let words = numbers.chain(cells.chunks(4).map(|four| u32::from_le_bytes([four[0], four[1], four[2], four[3]])));
    let launch = launch.define(name, words.map(|w| format!("0x{w:x}")).collect::<Vec<_>>().join(","));
    match name {
        "SIGNED" => launch.define("BLOCK", BLOCK).define("CELLS", cells.len()).define("FIRST", map::FIRST).define("LAST", map::LAST),
        _ => launch,
    }
}

/// AdamW with 8-bit moments. Inputs: the four numbers of [`AdamW`]; then for every parameter: itself, its gradient, bytes and maxima of the first
/// moment, bytes and maxima of the second. Outputs, in place: for every parameter itself, and these four.
#[derive(Debug)]
pub struct AdamW8(pub AdamW);

/// Inputs and outputs of one parameter.
const IN: usize = 6;
const OUT: usize = 5;

impl Op for AdamW8 {
    fn name(&self) -> &'static str {
        "adamw8"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert_eq!(x.len(), 4 + IN * self.0.decay.len(), "adamw8 needs six tensors for each parameter");
        let quantized = |p: &[Meta]| is_quantized(&p[0], &p[2], &p[3]) && is_quantized(&p[0], &p[4], &p[5]);
        assert!(x[4..].chunks(IN).all(quantized), "adamw8 of {x:?}");
        x[4..].chunks(IN).flat_map(|p| [0, 2, 3, 4, 5].map(|k| p[k].clone())).collect()
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        let of = |i: usize| [0, 2, 3, 4, 5].into_iter().enumerate().map(move |(out, k)| (4 + IN * i + k, OUT * i + out));
        (0..self.0.decay.len()).flat_map(of).collect()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (of_m, of_v) = (Map::Signed.tables(), Map::Unsigned.tables());
        for (i, out) in y.chunks_mut(OUT).enumerate() {
            let Some(pace) = self.0.pace(x, i) else { return };
            let [p, m, m_most, v, v_most] = out else { unreachable!("five outputs for each parameter") };
            let g = x[4 + IN * i + 1].f32();
            let moments = m.u8().par_chunks_mut(BLOCK).zip(m_most.f32()).zip(v.u8().par_chunks_mut(BLOCK).zip(v_most.f32()));
            let tasks = p.f32().par_chunks_mut(BLOCK).zip(g.par_chunks(BLOCK)).zip(moments);
            tasks.with_min_len(PIECE / BLOCK).for_each(|((p, g), ((m, m_most), (v, v_most)))| {
                let (mut first, mut second) = ([0.0; BLOCK], [0.0; BLOCK]);
                let (first, second) = (&mut first[..p.len()], &mut second[..p.len()]);
                for j in 0..p.len() {
                    first[j] = of_m.numbers[m[j] as usize] * *m_most;
                    second[j] = of_v.numbers[v[j] as usize] * *v_most;
                    self.0.step(&pace, &mut p[j], g[j], &mut first[j], &mut second[j]);
                }
                *m_most = Map::Signed.pack(of_m, first, m);
                *v_most = Map::Unsigned.pack(of_v, second, v);
            });
        }
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        const PARAMETERS: usize = 80; // per launch, which takes 4 KB of arguments
        let mut code = Code::default();
        let types = |i: usize| [io.x[4 + IN * i].dtype, io.x[4 + IN * i + 1].dtype];
        for (key, parameters) in by_types(0..self.0.decay.len(), |i| (io.y[OUT * i].elements(), types(i))) {
            for some in parameters.chunks(PARAMETERS) {
                let sizes: Vec<usize> = some.iter().map(|&i| io.y[OUT * i].elements()).collect();
                let own = |i: usize| [At::Y(OUT * i), At::X(4 + IN * i + 1)].into_iter().chain((1..OUT).map(move |k| At::Y(OUT * i + k)));
                let args: Vec<Place> = (0..4).map(At::X).chain(some.iter().flat_map(|&i| own(i))).map(Place::from).collect();
                let text = concat!(
                    include_str!("../adamw/owner.cuh"),
                    include_str!("../adamw/fours.cuh"),
                    include_str!("../adamw/pace.cuh"),
                    include_str!("blocks.cuh"),
                    include_str!("adamw8.cu")
                );
                let (launch, _) = in_pieces(Launch::new(text, "adamw8"), &sizes, PIECE);
                let launch = map_of(map_of(self.0.define(launch, some), "SIGNED", Map::Signed), "UNSIGNED", Map::Unsigned);
                let pointers = |k: usize| format!("P *p{k}, const G *g{k}, u8 *m{k}, float *a{k}, u8 *v{k}, float *b{k}");
                let pick = |k: usize| format!("case {k}: p = p{k}; g = g{k}; m = m{k}; m_most = a{k}; v = v{k}; v_most = b{k}; break;");
                let launch = launch
                    .define_type("P", key[0])
                    .define_type("G", key[1])
                    .define("POINTERS", list(some.len(), ", ", pointers))
                    .define("PICK", list(some.len(), " ", pick))
                    .args(&args);
                code.steps.push(Step::Launch(launch));
            }
        }
        code
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false // nothing differentiates through the optimizer
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let read: usize = x[4..].iter().map(|m| m.bytes()).sum();
        let written: usize = self.infer(x).iter().map(|m| m.bytes()).sum();
        Cost::memory(read + written)
    }
}

/// Some maxima of the blocks of a tensor.
fn maxima<'g>(of: Var<'g>, scale: f32) -> Var<'g> {
    let meta = absmax_of(&of.meta());
    of.recorder().constant(&meta.shape, (0..meta.elements()).map(|i| scale * (1.0 + (i * 5 % 7) as f32)).collect())
}

/// A step of one parameter for each (weights, gradients, bytes, bytes) of `x`; `go` is 0 to skip it. Bytes are compared as numbers.
fn step<'g>(x: &[Var<'g>], go: f32) -> Vec<Var<'g>> {
    let r = x[0].recorder();
    let mut inputs: Vec<Var> = [1e-2, 0.5, 3.0, go].map(|v| r.full(&[1], v)).into();
    for p in x.chunks(4) {
        inputs.extend([p[0], p[1], p[2], maxima(p[0], 0.1), p[3], maxima(p[0], 0.03)]);
    }
    let decay = (0..x.len() / 4).map(|i| 0.1 * i as f32).collect();
    let y = r.op(AdamW8(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay }), &inputs);
    y.into_iter().map(|v| v.cast(if v.dtype() == DType::U8 { DType::F32 } else { v.dtype() })).collect()
}

/// Two parameters that are slices of one, at places of which no vector of four may be read.
fn odd<'g>(x: &[Var<'g>]) -> Vec<Var<'g>> {
    let part = |from: usize, to: usize| x.iter().map(|v| v.slice(0, from, to)).collect::<Vec<_>>();
    step(&[part(1, 603), part(603, 1203)].concat(), 1.0)
}

fn momentum<'g>(x: &[Var<'g>], go: f32) -> Vec<Var<'g>> {
    let r = x[0].recorder();
    let y = r.op(Momentum8 { beta: 0.95 }, &[r.full(&[1], 0.5), r.full(&[1], go), x[0], x[1], maxima(x[0], 0.1)]);
    vec![y[0], y[1].cast(DType::F32), y[2]]
}

/// Inputs of `step`: n weights.
macro_rules! four {
    ($($n:literal),*) => {
        &[$(In(&[$n], Fill::Frozen), In(&[$n], Fill::Frozen), In(&[$n], Fill::Byte), In(&[$n], Fill::Byte)),*]
    };
}

/// A step of states of 64M weights, as an optimizer has it: everything in place.
fn large<'g>(g: Var<'g>) -> Vec<Var<'g>> {
    let (r, meta) = (g.recorder(), g.meta());
    let state = |name: &str, meta: Meta| r.state_as(name, meta, Init::Full(0.0), Role::Carried);
    let bytes = |name: &str| state(name, Meta::new(&meta.shape, DType::U8));
    let states = [state("p", meta.clone()), bytes("m"), state("m.max", absmax_of(&meta)), bytes("v"), state("v.max", absmax_of(&meta))];
    let mut inputs: Vec<Var> = [1e-2, 1.0, 1.0, 1.0].map(|v| r.full(&[1], v)).into();
    inputs.extend([states[0], g, states[1], states[2], states[3], states[4]]);
    let y = r.op(AdamW8(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: vec![0.1] }), &inputs);
    states.iter().zip(&y).for_each(|(state, y)| r.update(*state, *y));
    vec![y[2]]
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("a step", four!(600), |x| step(x, 1.0)),
    Case::new("a block, less and more than a launch's block has", four!(256, 3, 9001), |x| step(x, 1.0)),
    Case::new("a step that is skipped", four!(300), |x| step(x, 0.0)),
    Case::new("odd places", four!(1203), odd),
    Case::new("more than one launch has", four!(500), |x| {
        let parts: Vec<Var> = (0..100).flat_map(|i| [0, 1, 2, 3].map(|k| x[k].slice(0, 5 * i, 5 * i + 5))).collect();
        let moved = step(&parts, 1.0);
        [0, 79, 80, 99].into_iter().flat_map(|i| moved[OUT * i..OUT * (i + 1)].to_vec()).collect()
    }),
    Case::new("momentum", &[In(&[40, 43], Fill::Frozen), In(&[40, 43], Fill::Byte)], |x| momentum(x, 1.0)),
    Case::new("momentum that is kept", &[In(&[9, 31], Fill::Frozen), In(&[9, 31], Fill::Byte)], |x| momentum(x, 0.0)),
    Case::new("64M weights", &[In(&[8192, 8192], Fill::Frozen)], |x| large(x[0])).bench(),
];
