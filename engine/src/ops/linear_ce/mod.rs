//! Output projection and loss: the weighted sum over rows of the cross-entropy of h W^T. Model code records the composite op; the pass
//! `linear-cross-entropy` replaces it by one that works on a chunk of rows at a time, so that the full logits are never stored, and that computes
//! the gradients in the same pass. The loss is a scalar, so they need only be scaled in the backward pass.

use super::collective::{all_gather, vocabulary};
use super::cross_entropy::{row_gradient, row_launch, row_loss};
use super::reduce::packs::{PACKS, pack};
use crate::cpu::gemm::{Into, Mat, gemm};
use crate::cpu::{View, ViewMut, simd};
use crate::kernel::{At, Code, Gemm, Io, Launch, Matrix, Place, Step};
use crate::meta::{DType, Meta};
use crate::op::{self, Axis, Case, Cost, Fill, Grads, In, Narrow, Op, Port, Share, no_gradient};
use crate::ranks::Group;
use crate::record::Var;
use rayon::prelude::*;

/// Inputs: h [rows, d], W [classes, d], targets i32 `[rows]`, weight f32 `[1]` or `[rows]`. Output: the weighted sum of losses, f32 `[1]`.
#[derive(Debug)]
pub struct LinearCrossEntropy;

fn check(x: &[Meta]) {
    let rows = x[0].dim(1);
    let fits = x[0].rank() == 2 && x[1].rank() == 2 && x[0].dim(0) == x[1].dim(0) && x[2] == Meta::new(&[rows], DType::I32);
    assert!(fits && (x[3].shape == [1] || x[3].shape == [rows]), "linear_cross_entropy of {x:?}");
}

impl Op for LinearCrossEntropy {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check(x);
        vec![Meta::f32(&[1])]
    }

    fn cpu(&self, _: &[View], _: &mut [ViewMut], _: &mut [f32]) {
        unreachable!("a pass or the unfused form stands in for it")
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        match at {
            Port::Out(_) => Narrow::Keep,
            _ => op::rounded_first(2, at),
        }
    }

    fn cuda(&self, _: &Io) -> Code {
        unreachable!("a pass or the unfused form stands in for it")
    }

    fn axes(&self, x: &[Meta], _: usize) -> Vec<Axis> {
        let weight = if x[3].elements() > 1 { Share::Dim(0) } else { Share::Whole };
        vec![Axis::new([Share::Dim(0), Share::Whole, Share::Dim(0), weight], [Share::Sum])]
    }

    /// Each rank has some of the classes.
    fn is_divided(&self, x: &[Meta], have: &[Share], parts: usize) -> bool {
        let rows = matches!(have[0], Share::Whole | Share::Dim(0));
        rows && have[1..] == [Share::Dim(0), Share::Whole, Share::Whole] && vocabulary::is_numbered(x[1].dim(1), parts)
    }

    fn divided<'g>(&self, x: &[Var<'g>], have: &[Share], group: &Group) -> Option<Vec<Var<'g>>> {
        let h = if have[0] == Share::Whole { x[0] } else { all_gather(x[0], 0, group) };
        Some(vec![vocabulary::linear_cross_entropy(h, x[1], x[2], x[3], group)])
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        unreachable!("replaced before gradients are written out")
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::compute(2 * x[0].elements() * x[1].dim(1), x[0].bytes() + x[1].bytes())
    }

    fn is_composite(&self) -> bool {
        true
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        Some(vec![(x[0].linear(x[1]).cross_entropy(x[2]) * x[3]).sum()])
    }
}

/// The same in chunks. Outputs: the loss; then, with `grad_h` and `grad_w`, the gradients with respect to h and, in f32, to W.
#[derive(Debug)]
pub struct ChunkedLinearCrossEntropy {
    /// Rows of a chunk.
    pub chunk: usize,
    /// Whether the gradient with respect to the hidden states is computed too.
    pub grad_h: bool,
    /// Whether the gradient with respect to the weight is computed too.
    pub grad_w: bool,
    /// Whether rows without a target are skipped: on a GPU whole chunks of them, if the targets are a feed.
    pub skip: bool,
}

fn convert(x: Place, from: DType, y: Place, to: DType, elements: usize) -> Launch {
    Launch::new(include_str!("convert.cu"), "linear_ce_convert")
        .define_type("FROM", from)
        .define_type("TO", to)
        .define("N", elements)
        .grid(elements.div_ceil(256), 1, 1)
        .args(&[x, y])
}

impl Op for ChunkedLinearCrossEntropy {
    fn name(&self) -> &'static str {
        "chunked_linear_cross_entropy"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        check(x);
        let mut y = vec![Meta::f32(&[1])];
        y.extend(self.grad_h.then(|| x[0].clone()));
        y.extend(self.grad_w.then(|| Meta::f32(&x[1].shape)));
        y
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        let chunk = self.chunk.min(x[0].dim(1));
        let picked = if self.skip { chunk * x[0].dim(0) } else { 0 };
        (chunk * x[1].dim(1)).next_multiple_of(16) + chunk.next_multiple_of(16) + picked
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], work: &mut [f32]) {
        let (rows, d, classes) = (x[0].dim(1), x[0].dim(0), x[1].dim(1));
        let (h, w, targets, weight) = (x[0].f32(), x[1].f32(), x[2].i32(), x[3].f32());
        let chunk = self.chunk.min(rows);
        let (logits, rest) = work.split_at_mut((chunk * classes).next_multiple_of(16));
        let (losses, picked) = rest.split_at_mut(chunk.next_multiple_of(16));
        let order: Vec<usize> =
            (0..rows).filter(|&r| !self.skip || targets[r] >= crate::mutant!("linear-cross-entropy-leaves-out-class-0", 0, 1)).collect();
        let all = order.len() == rows;
        let at_w = 1 + self.grad_h as usize;
        if !all && self.grad_h {
            y[1].f32().fill(0.0);
        }
        if crate::mutant!("gradient-of-no-targets-is-old-memory", order.is_empty() && self.grad_w, false) {
            y[at_w].f32().fill(0.0);
        }
        let mut total = 0.0f64;
        for (c, order) in order.chunks(chunk).enumerate() {
            let (r0, n) = (c * chunk, order.len());
            if !all {
                picked.chunks_mut(d).zip(order).for_each(|(to, &r)| to.copy_from_slice(&h[r * d..][..d]));
            }
            let hc = Mat::rows(if all { &h[r0 * d..][..n * d] } else { &picked[..n * d] }, d);
            gemm(logits, classes, Into::Replace, n, d, classes, hc, Mat::rows(w, d).t(), 1.0, true);
            let tasks = logits.par_chunks_mut(classes).zip(losses.par_iter_mut()).zip(order);
            tasks.for_each(|((row, loss), &r)| {
                simd(
                    #[inline(always)]
                    || {
                        let (target, weight) = (targets[r], weight[r % weight.len()]);
                        let (l, lse) = row_loss(row, target);
                        *loss = l * weight;
                        if self.grad_h || self.grad_w {
                            row_gradient(row, target, lse, weight);
                        }
                    },
                )
            });
            total += losses[..n].iter().map(|&l| l as f64).sum::<f64>();
            if self.grad_w {
                let into = if c == 0 { Into::Replace } else { Into::Add };
                gemm(y[at_w].f32(), d, into, classes, n, d, Mat::rows(logits, classes).t(), hc, 1.0, true);
            }
            if self.grad_h && all {
                let dh = &mut y[1].f32()[r0 * d..][..n * d];
                gemm(dh, d, Into::Replace, n, classes, d, Mat::rows(logits, classes), Mat::rows(w, d), 1.0, true);
            } else if self.grad_h {
                gemm(picked, d, Into::Replace, n, classes, d, Mat::rows(logits, classes), Mat::rows(w, d), 1.0, true);
                picked.chunks(d).zip(order).for_each(|(dh, &r)| y[1].f32()[r * d..][..d].copy_from_slice(dh));
            }
        }
        y[0].f32()[0] = total as f32;
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        match at {
            Port::Out(0) => Narrow::Keep,
            _ => op::rounded_first(2, at),
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        let (rows, d, classes) = (io.x[0].dim(1), io.x[0].dim(0), io.x[1].dim(1));
        let (dtype, w_dtype) = (io.x[0].dtype, io.x[1].dtype);
        let chunk = self.chunk.min(rows);
        let stride = classes.next_multiple_of(16 / dtype.size()); // rows of logits are aligned to 16 bytes
        let mut workspace = 0;
        let mut reserve = |elements: usize, dtype: DType| {
            let place = At::Work.plus(workspace);
            workspace += (elements * dtype.size()).next_multiple_of(256);
            place
        };
        let logits = Matrix::rows(reserve(chunk * stride, dtype), dtype, stride);
        let losses = reserve(rows, DType::F32);
        let mut steps = vec![];

        // Both operands of a GEMM must have the same type.
        let mut w = Matrix::rows(At::X(1), dtype, d);
        if w_dtype != dtype {
            w.place = reserve(classes * d, dtype);
            steps.push(Step::Launch(convert(At::X(1).into(), w_dtype, w.place, dtype, classes * d)));
        }
        let dw = Matrix::rows(At::Y(1 + self.grad_h as usize), DType::F32, d);

        // n rows of h and of its gradient, from row r0 on. Targets and weights are those of the rows that `order` lists, or also from r0 on.
        let one_weight = io.x[3].elements() == 1;
        let rows_of = |r0: usize, n: usize, h: Matrix, dh: Matrix, order: Option<Place>| {
            let product = |m, n, k, a, b, c, beta| Step::Gemm(Gemm { beta, ..Gemm::new(m, n, k, a, b, c) });
            let own = |input: usize, size: usize| At::X(input).plus(if order.is_some() { 0 } else { r0 * size });
            let weight = if one_weight { At::X(3).into() } else { own(3, io.x[3].dtype.size()) };
            let launch = row_launch(include_str!("linear_ce.cu"), "linear_ce_rows", dtype, n, classes)
                .define_type("W", io.x[3].dtype)
                .define("STRIDE", stride)
                .define("ONE_WEIGHT", one_weight as u8)
                .define("ORDERED", order.is_some() as u8)
                .define("GRADIENT", (self.grad_h || self.grad_w) as u8)
                .args(&[logits.place, order.unwrap_or(own(2, 4)), own(2, 4), weight, losses.plus(4 * r0)]);
            let mut steps = vec![product(n, classes, d, h, w.t(), logits, 0.0), Step::Launch(launch)];
            if self.grad_w {
                steps.push(product(classes, d, n, logits.t(), h, dw, if r0 == 0 { 0.0 } else { 1.0 }));
            }
            // Last, since it may overwrite h.
            if self.grad_h {
                steps.push(product(n, d, classes, logits, w, dh, 0.0));
            }
            steps
        };
        let (h, dh) = (Matrix::rows(At::X(0), dtype, d), Matrix::rows(At::Y(1), dtype, d));
        let last = (rows - 1) / chunk * chunk; // with at most so many rows with targets, the last chunk is empty
        let skip = self.skip && last > 0;
        for r0 in (0..rows).step_by(chunk) {
            let own = rows_of(r0, chunk.min(rows - r0), h.at(r0 * d), dh.at(r0 * d), None);
            steps.extend(own.into_iter().map(|s| if skip { s.when(2, [last + 1, rows]) } else { s }));
        }
        if skip {
            let (order, picked) = (reserve(rows, DType::I32), Matrix::rows(reserve(chunk * d, dtype), dtype, d));
            let vec = pack(&[dtype], &[d]);
            let copy = |entry: &'static str, n: usize, args: [Place; 3]| {
                let launch = Launch::new(&[PACKS, include_str!("pick.cu")].concat(), entry)
                    .define_type("T", dtype)
                    .define("VEC", vec)
                    .define("D", d)
                    .define("ROWS", n)
                    .grid((n * (d / vec)).div_ceil(256), 1, 1);
                Step::Launch(launch.args(&args))
            };
            let sort = Launch::new(include_str!("order.cu"), "linear_ce_order").define("ROWS", rows).block(1024);
            steps.push(Step::Launch(sort.args(&[At::X(2).into(), order, losses])).when(2, [0, last]));
            if self.grad_h {
                steps.push(copy("linear_ce_clear", rows, [At::X(2).into(), At::X(2).into(), At::Y(1).into()]).when(2, [0, last]));
            }
            for r0 in (0..last).step_by(chunk) {
                let own = order.plus(4 * r0);
                let mut all = vec![copy("linear_ce_pick", chunk, [At::X(0).into(), own, picked.place])];
                all.extend(rows_of(r0, chunk, picked, picked, Some(own)));
                if self.grad_h {
                    all.push(copy("linear_ce_put", chunk, [picked.place, own, At::Y(1).into()]));
                }
                let least = if r0 == 0 { 0 } else { r0 + 1 }; // the first chunk writes the sums that the others accumulate into
                steps.extend(all.into_iter().map(|s| s.when(2, [least, last])));
            }
        }
        let sum = Launch::new(include_str!("finish.cu"), "linear_ce_sum").define("ROWS", rows).block(1024);
        steps.push(Step::Launch(sum.args(&[losses, At::Y(0).into()])));
        Code { steps, workspace }
    }

    fn vjp<'g>(&self, _: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return no_gradient(4) };
        let mut ready = y[1..].iter().map(|&g| g * d.cast(g.dtype()));
        let dh = if self.grad_h { ready.next() } else { None };
        let dw = if self.grad_w { ready.next() } else { None };
        vec![dh, dw, None, None] // the row weights have no gradient
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let products = 1 + self.grad_h as usize + self.grad_w as usize;
        let y: usize = self.infer(x).iter().map(|m| m.bytes()).sum();
        Cost::compute(products * 2 * x[0].elements() * x[1].dim(1), x[0].bytes() + x[1].bytes() + y)
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        LinearCrossEntropy.unfused(x)
    }
}

impl<'g> Var<'g> {
    /// The sum over rows of weight * cross_entropy(self W^T, target): `[1]`. The row weights get no gradient.
    #[track_caller]
    pub fn linear_cross_entropy(self, w: Var<'g>, targets: Var<'g>, weight: Var<'g>) -> Var<'g> {
        self.recorder().op1(LinearCrossEntropy, &[self, w, targets, weight.stop_gradient()])
    }
}

fn chunked<'g>(x: &[Var<'g>], chunk: usize) -> Vec<Var<'g>> {
    let weight = x[0].recorder().full(&[1], 0.25).expand(&[1]);
    let y = x[0].recorder().op(ChunkedLinearCrossEntropy { chunk, grad_h: true, grad_w: true, skip: false }, &[x[0], x[1], x[2], weight]);
    vec![y[0]]
}

/// For the cases: rows without a target, and a weight for each of the others.
fn skipping<'g>(x: &[Var<'g>], chunk: usize, grad_w: bool) -> Vec<Var<'g>> {
    vec![x[0].recorder().op(ChunkedLinearCrossEntropy { chunk, grad_h: true, grad_w, skip: true }, x)[0]]
}

const SOME: &[In] = &[In(&[200, 24], Fill::Normal), In(&[40, 24], Fill::Normal), In(&[200], Fill::Target(40)), In(&[200], Fill::Frozen)];
const SOME_FROZEN: &[In] =
    &[In(&[333, 24], Fill::Normal), In(&[40, 24], Fill::Frozen), In(&[333], Fill::Target(40)), In(&[333], Fill::Frozen)];
const FEW: &[In] = &[In(&[500, 24], Fill::Normal), In(&[40, 24], Fill::Normal), In(&[500], Fill::FewTargets(40)), In(&[500], Fill::Frozen)];
const NONE: &[In] = &[In(&[100, 8], Fill::Normal), In(&[40, 8], Fill::Normal), In(&[100], Fill::FewTargets(0)), In(&[100], Fill::Frozen)];

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("unfused", &[In(&[9, 5], Fill::Normal), In(&[11, 5], Fill::Normal), In(&[9], Fill::Target(11))], |x| {
        vec![x[0].linear_cross_entropy(x[1], x[2], x[0].recorder().full(&[1], 0.25))]
    }),
    Case::new("chunked", &[In(&[9, 5], Fill::Normal), In(&[11, 5], Fill::Normal), In(&[9], Fill::Target(11))], |x| chunked(x, 4)),
    Case::new("no row but those with targets", SOME, |x| skipping(x, 60, true)),
    Case::new("the same, the head frozen", SOME_FROZEN, |x| skipping(x, 100, false)),
    Case::new("few targets", FEW, |x| skipping(x, 40, true)),
    Case::new("no target", NONE, |x| skipping(x, 40, true)),
    Case::new("vocabulary", &[In(&[4096, 256], Fill::Normal), In(&[50304, 256], Fill::Normal), In(&[4096], Fill::Target(50304))], |x| {
        chunked(x, 256)
    })
    .bench(),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Arch;

    /// The kernels that run with so many targets: chunks of all rows in order, or only of rows that have a target.
    #[test]
    fn chunks_without_targets_are_left_out() {
        let (rows, chunk) = (100, 30);
        let x = [
            Meta::new(&[rows, 16], DType::BF16),
            Meta::new(&[50, 16], DType::BF16),
            Meta::new(&[rows], DType::I32),
            Meta::new(&[1], DType::F32),
        ];
        let op = ChunkedLinearCrossEntropy { chunk, grad_h: true, grad_w: true, skip: true };
        let steps = op.cuda(&Io::plain(&x, &op.infer(&x), Arch { sm: 90, multiprocessors: 132 })).steps;
        for live in 0..=rows {
            let done = |s: &&Step| match s {
                Step::When(l, _) => l.input == 2 && l.holds(live),
                _ => true,
            };
            let kernels: Vec<&str> = steps.iter().filter(done).map(|s| s.kernel().map_or("product", |l| l.entry)).collect();
            let all = live > 90;
            let chunks = if all { 4 } else { live.div_ceil(chunk).max(1) };
            let one = ["product", "linear_ce_rows", "product", "product"];
            let expected = match all {
                true => [&one.repeat(chunks)[..], &["linear_ce_sum"]].concat(),
                false => {
                    let picked = [&["linear_ce_pick"], &one[..], &["linear_ce_put"]].concat().repeat(chunks);
                    [&["linear_ce_order", "linear_ce_clear"], &picked[..], &["linear_ce_sum"]].concat()
                }
            };
            assert_eq!(kernels, expected, "{live} targets");
        }
    }
}
