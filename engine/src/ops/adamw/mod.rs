//! AdamW over all parameters in a few launches, the global gradient norm, and momentum.

mod momentum;

pub use momentum::{Momentum, momentum};

use crate::cpu::math::sum;
use crate::cpu::{View, ViewMut, simd};
use crate::graph::Init;
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, Meta};
use crate::op::{Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share, no_gradient};
use crate::ops::collective::all_reduce;
use crate::ranks::Group;
use crate::record::Var;
use rayon::prelude::*;
use std::ops::Range;

/// Elements of one task, and of one partial sum.
const PIECE: usize = 1 << 14;

/// The global norm. Inputs: any number of tensors. Output: the root of the sum of all squares, f32 `[1]`.
#[derive(Debug)]
pub struct GlobalNorm;

impl Op for GlobalNorm {
    fn name(&self) -> &'static str {
        "global_norm"
    }

    fn infer(&self, _: &[Meta]) -> Vec<Meta> {
        vec![Meta::f32(&[1])]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let mut total = 0.0f64;
        for v in x {
            let pieces = v.f32().par_chunks(PIECE).map(|p| {
                simd(
                    #[inline(always)]
                    || sum(p, |a| a * a) as f64,
                )
            });
            total += pieces.collect::<Vec<f64>>().into_iter().sum::<f64>();
        }
        y[0].f32()[0] = total.sqrt() as f32;
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        const TENSORS: usize = 480; // per launch: their addresses are its arguments, at most 4 KB
        let mut code = Code::default();
        let mut parts = 0;
        for (key, tensors) in by_types(0..io.x.len(), |i| (io.x[i].elements(), [io.x[i].dtype])) {
            for some in tensors.chunks(TENSORS) {
                let sizes: Vec<usize> = some.iter().map(|&i| io.x[i].elements()).collect();
                let mut args: Vec<Place> = some.iter().map(|&i| At::X(i).into()).collect();
                args.push(At::Work.plus(parts * 4));
                let (launch, blocks) = in_pieces(
                    Launch::new(concat!(include_str!("owner.cuh"), include_str!("global_norm.cu")), "global_norm_parts"),
                    &sizes,
                    PIECE,
                );
                let launch = launch
                    .define_type("T", key[0])
                    .define("POINTERS", list(some.len(), ", ", |k| format!("const T *x{k}")))
                    .define("PICK", list(some.len(), " ", |k| format!("case {k}: x = x{k}; break;")))
                    .args(&args);
                code.steps.push(Step::Launch(launch));
                parts += blocks;
            }
        }
        let finish = Launch::new(include_str!("global_norm_finish.cu"), "global_norm_finish").define("PARTS", parts).block(1024);
        code.steps.push(Step::Launch(finish.args(&[At::Work.into(), At::Y(0).into()])));
        code.workspace = parts * 4;
        code
    }

    fn is_divided(&self, _: &[Meta], have: &[Share], _: usize) -> bool {
        have.iter().all(|h| *h == Share::Whole || h.cut().is_some())
    }

    /// The squares of parts are added up over the ranks.
    fn divided<'g>(&self, x: &[Var<'g>], have: &[Share], group: &Group) -> Option<Vec<Var<'g>>> {
        let of =
            |whole: bool| -> Vec<Var> { x.iter().zip(have).filter(|(_, h)| (**h == Share::Whole) == whole).map(|(x, _)| *x).collect() };
        let square = |x: &[Var<'g>]| (!x.is_empty()).then(|| global_norm(x).square());
        let parts = square(&of(false)).map(|s| all_reduce(s, group));
        let sum = [parts, square(&of(true))].into_iter().flatten().reduce(|a, b| a + b)?;
        Some(vec![sum.sqrt()])
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        x.iter().map(|&v| dy[0].map(|d| v * crate::mutant!("global-norm-gradient-forgets-dy", d / y[0], y[0].rsqrt().square()))).collect()
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(x.iter().map(|m| m.bytes()).sum())
    }
}

/// Groups tensors by their `N` types, leaving out empty ones.
pub(in crate::ops) fn by_types<const N: usize>(
    all: Range<usize>,
    of: impl Fn(usize) -> (usize, [DType; N]),
) -> Vec<([DType; N], Vec<usize>)> {
    let mut groups: Vec<([DType; N], Vec<usize>)> = vec![];
    for (i, (elements, key)) in all.map(|i| (i, of(i))) {
        match groups.iter_mut().find(|(k, _)| *k == key) {
            _ if elements == 0 => {}
            Some((_, members)) => members.push(i),
            None => groups.push((key, vec![i])),
        }
    }
    groups
}

/// One launch over several tensors, in which each block has `piece` elements of one of them; and the number of blocks.
pub(in crate::ops) fn in_pieces(launch: Launch, sizes: &[usize], piece: usize) -> (Launch, usize) {
    let mut starts = vec![0];
    for size in sizes {
        starts.push(starts[starts.len() - 1] + size.div_ceil(piece));
    }
    let blocks = starts[sizes.len()];
    let launch = launch
        .define("COUNT", sizes.len())
        .define("PIECE", piece)
        .define("STARTS", list(sizes.len(), ", ", |k| starts[k].to_string()))
        .define("SIZES", list(sizes.len(), ", ", |k| sizes[k].to_string()))
        .grid(blocks, 1, 1);
    (launch, blocks)
}

pub(in crate::ops) fn list(n: usize, between: &str, item: impl Fn(usize) -> String) -> String {
    (0..n).map(item).collect::<Vec<_>>().join(between)
}

/// Adam with decoupled weight decay. Inputs: learning rate `[1]`, gradient scale `[1]`, step count including this step `[1]`, and a flag `[1]` that is 0 to
/// skip the step; then for every parameter: itself, its gradient, first and second moment. Outputs, in place: for every parameter itself and its
/// moments.
#[derive(Debug)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Weight decay of each parameter.
    pub decay: Vec<f32>,
}

/// The numbers of a step for one parameter.
pub(in crate::ops) struct Pace {
    rate: f32,
    scale: f32,
    /// Bias corrections of the moments, since they start at 0; that of the second is a root.
    first: f32,
    second: f32,
    /// What decay leaves of a weight.
    keep: f32,
}

impl AdamW {
    /// For parameter `i`, from the first four inputs; None if the step is skipped.
    pub(in crate::ops) fn pace(&self, x: &[View], i: usize) -> Option<Pace> {
        let [rate, scale, count, go] = [0, 1, 2, 3].map(|i| x[i].f32()[0]);
        let correct = |beta: f32| crate::mutant!("adamw-without-bias-correction", (1.0 - (beta as f64).powf(count as f64)) as f32, 1.0);
        let (first, second) = (correct(self.beta1), correct(self.beta2).sqrt());
        (go != 0.0).then(|| Pace { rate, scale, first, second, keep: 1.0 - rate * self.decay[i] })
    }

    /// One weight and its moments.
    #[inline(always)]
    pub(in crate::ops) fn step(&self, pace: &Pace, p: &mut f32, g: f32, m: &mut f32, v: &mut f32) {
        let (g, second) = (g * pace.scale, pace.second);
        *m += (g - *m) * (1.0 - self.beta1);
        *v = *v * self.beta2 + g * g * (1.0 - self.beta2);
        let root = crate::mutant!("adamw-eps-inside-the-root", v.sqrt() / second + self.eps, (*v / (second * second) + self.eps).sqrt());
        *p = *p * pace.keep - pace.rate / pace.first * *m / root;
    }

    /// What a kernel needs to know of the decays and moments of these parameters.
    pub(in crate::ops) fn define(&self, launch: Launch, some: &[usize]) -> Launch {
        launch
            .define_f32("BETA1", self.beta1)
            .define_f32("BETA2", self.beta2)
            .define_f32("EPS", self.eps)
            .define("DECAYS", list(some.len(), ", ", |k| format!("0x{:08x}", self.decay[some[k]].to_bits())))
    }
}

impl Op for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert_eq!(x.len(), 4 + 4 * self.decay.len(), "adamw needs four tensors for each parameter");
        x[4..].chunks(4).flat_map(|p| [p[0].clone(), p[2].clone(), p[3].clone()]).collect()
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        (0..self.decay.len()).flat_map(|i| [(4 + 4 * i, 3 * i), (6 + 4 * i, 3 * i + 1), (7 + 4 * i, 3 * i + 2)]).collect()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        for (i, out) in y.chunks_mut(3).enumerate() {
            let Some(pace) = self.pace(x, i) else { return };
            let [p, m, v] = out else { unreachable!("three outputs for each parameter") };
            let g = x[4 + 4 * i + 1].f32();
            let tasks = p.f32().par_chunks_mut(PIECE).zip(g.par_chunks(PIECE));
            tasks.zip(m.f32().par_chunks_mut(PIECE)).zip(v.f32().par_chunks_mut(PIECE)).for_each(|(((p, g), m), v)| {
                simd(
                    #[inline(always)]
                    || {
                        for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
                            self.step(&pace, p, g, m, v);
                        }
                    },
                )
            });
        }
    }

    fn precision(&self, _: Port, _: &[Meta]) -> Narrow {
        Narrow::Keep
    }

    fn cuda(&self, io: &Io) -> Code {
        const PARAMETERS: usize = 120; // per launch, which takes 4 KB of arguments
        const ELEMENTS: usize = 1 << 12; // per block
        let mut code = Code::default();
        let types = |i: usize| [0, 1, 2, 3].map(|k| io.x[4 + 4 * i + k].dtype);
        for (key, parameters) in by_types(0..self.decay.len(), |i| (io.y[3 * i].elements(), types(i))) {
            for some in parameters.chunks(PARAMETERS) {
                let sizes: Vec<usize> = some.iter().map(|&i| io.y[3 * i].elements()).collect();
                let mut args: Vec<Place> = (0..4).map(|i| At::X(i).into()).collect();
                args.extend(
                    some.iter().flat_map(|&i| [At::Y(3 * i), At::X(4 + 4 * i + 1), At::Y(3 * i + 1), At::Y(3 * i + 2)].map(Place::from)),
                );
                let text =
                    concat!(include_str!("owner.cuh"), include_str!("fours.cuh"), include_str!("pace.cuh"), include_str!("adamw.cu"));
                let (launch, _) = in_pieces(Launch::new(text, "adamw"), &sizes, ELEMENTS);
                let launch = self
                    .define(launch, some)
                    .define_type("P", key[0])
                    .define_type("G", key[1])
                    .define_type("M", key[2])
                    .define_type("V", key[3])
                    .define("POINTERS", list(some.len(), ", ", |k| format!("P *p{k}, const G *g{k}, M *m{k}, V *v{k}")))
                    .define("PICK", list(some.len(), " ", |k| format!("case {k}: p = p{k}; g = g{k}; m = m{k}; v = v{k}; break;")))
                    .args(&args);
                code.steps.push(Step::Launch(launch));
            }
        }
        code
    }

    fn apart(&self) -> Vec<(Vec<usize>, Vec<usize>)> {
        (0..self.decay.len()).map(|i| ((4 + 4 * i..8 + 4 * i).collect(), (3 * i..3 * i + 3).collect())).collect()
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false // nothing differentiates through the optimizer
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let all: usize = x[4..].iter().map(|m| m.bytes()).sum();
        Cost::memory(all + all / 4 * 3)
    }
}

/// The global norm of these tensors.
pub fn global_norm<'g>(x: &[Var<'g>]) -> Var<'g> {
    x[0].recorder().op1(GlobalNorm, x)
}

fn step<'g>(x: &[Var<'g>], decay: Vec<f32>) -> Vec<Var<'g>> {
    let r = x[0].recorder();
    let mut inputs: Vec<Var> = [1e-2, 1.0, 1.0, 1.0].map(|v| r.full(&[1], v)).into();
    for pair in x.chunks(2) {
        inputs.extend([pair[0], pair[1], r.zeros(&pair[0].shape()), r.zeros(&pair[0].shape())]);
    }
    r.op(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay }, &inputs)
}

/// A step of states of 64M weights, as an optimizer has it: everything in place.
fn large(g: Var<'_>) -> Vec<Var<'_>> {
    let r = g.recorder();
    let states = ["p", "m", "v"].map(|name| r.state(name, &g.shape(), DType::F32, Init::Full(0.0)));
    let mut inputs: Vec<Var> = [1e-2, 1.0, 1.0, 1.0].map(|v| r.full(&[1], v)).into();
    inputs.extend([states[0], g, states[1], states[2]]);
    let y = r.op(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: vec![0.1] }, &inputs);
    states.iter().zip(&y).for_each(|(state, y)| r.update(*state, *y));
    vec![y[1]]
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("norm", &[In(&[7, 5], Fill::Normal), In(&[3], Fill::Normal)], |x| vec![global_norm(x)]),
    Case::new("norm of more than one launch has", &[In(&[1500], Fill::Normal)], |x| {
        let parts: Vec<Var> = (0..500).map(|i| x[0].slice(0, 3 * i, 3 * i + 3)).collect();
        vec![global_norm(&parts)]
    }),
    Case::new("a step", &[In(&[3], Fill::Frozen), In(&[3], Fill::Frozen)], |x| step(x, vec![0.1])),
    Case::new("a step of more than one launch has", &[In(&[650, 5], Fill::Frozen), In(&[650, 5], Fill::Frozen)], |x| {
        let parts: Vec<Var> = (0..130).flat_map(|i| [0, 1].map(|k| x[k].slice(0, 5 * i, 5 * i + 5))).collect();
        let moved = step(&parts, (0..130).map(|i| 0.01 * i as f32).collect());
        vec![moved[0], moved[3 * 60], moved[3 * 119], moved[3 * 120], moved[3 * 129]]
    }),
    Case::new("momentum", &[In(&[7, 5], Fill::Normal), In(&[7, 5], Fill::Normal)], |x| {
        let r = x[0].recorder();
        let kept = momentum(0.9, r.full(&[1], 0.5), r.full(&[1], 0.0), x[0], x[1]);
        [momentum(0.9, r.full(&[1], 0.5), r.full(&[1], 1.0), x[0], x[1]), kept].concat()
    }),
    Case::new("64M weights", &[In(&[8192, 8192], Fill::Frozen)], |x| large(x[0])).bench(),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Data, DataMut};

    /// AdamW as published (Kingma and Ba; Loshchilov and Hutter), in f64.
    #[test]
    fn three_steps_are_those_of_the_papers() {
        let (beta1, beta2, eps, decay, rate, scale) = (0.9, 0.95, 1e-3, 0.1, 0.02, 0.5);
        let op = AdamW { beta1: beta1 as f32, beta2: beta2 as f32, eps: eps as f32, decay: vec![decay as f32] };
        let (mut p, mut m, mut v) = ([1.0f32, -2.0, 0.5], [0.0f32; 3], [0.0f32; 3]);
        let (mut theta, mut first, mut second) = (p.map(f64::from), [0.0; 3], [0.0; 3]);
        for (t, g) in [[0.3f32, -0.01, 0.002], [-0.1, -0.02, 0.0], [0.2, 0.03, 0.004]].into_iter().enumerate() {
            let numbers = [rate as f32, scale as f32, t as f32 + 1.0, 1.0];
            let one = |data| View { shape: &[1], strides: &[1], data: Data::F32(data) };
            let three = |data| View { shape: &[3], strides: &[1], data: Data::F32(data) };
            let mut x: Vec<View> = numbers.iter().map(|n| one(std::slice::from_ref(n))).collect();
            x.extend([three(&[]), three(&g), three(&[]), three(&[])]);
            let mut y = [&mut p, &mut m, &mut v].map(|data| ViewMut { shape: &[3], data: DataMut::F32(data) });
            op.cpu(&x, &mut y, &mut []);
            for i in 0..3 {
                let g = g[i] as f64 * scale;
                theta[i] -= rate * decay * theta[i];
                first[i] = beta1 * first[i] + (1.0 - beta1) * g;
                second[i] = beta2 * second[i] + (1.0 - beta2) * g * g;
                let [m, v] = [first[i] / (1.0 - beta1.powi(t as i32 + 1)), second[i] / (1.0 - beta2.powi(t as i32 + 1))];
                theta[i] -= rate * m / (v.sqrt() + eps);
            }
        }
        for (ours, theirs) in [(p, theta), (m, first), (v, second)] {
            assert!(ours.iter().zip(theirs).all(|(a, b)| (*a as f64 - b).abs() < 1e-6 * (1e-3 + b.abs())), "{ours:?} {theirs:?}");
        }
    }
}
