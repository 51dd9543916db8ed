//! Pointwise ops with broadcasting: one op for all of them, which holds an expression.

pub mod expr;
pub(crate) mod print;
pub mod run;

pub use expr::{Bin, Expr, Ins, Un};

use super::full::Full;
use crate::cpu::{View, ViewMut};
use crate::graph::{Graph, Kind, Value};
use crate::kernel::{Code, Io};
use crate::meta::{DType, Layout, Meta, broadcast};
use crate::op::{Axis, Case, Cost, Fill, Grads, In, Lean, Narrow, Op, Port, Share};
use crate::record::Var;
use expr::Reg;
use std::sync::Arc;

/// A fused pointwise expression, evaluated for every element of its broadcast inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Pointwise {
    /// What is computed.
    pub expr: Expr,
    /// Type of each output.
    pub dtypes: Vec<DType>,
    /// (input, output) pairs that share one buffer, set by the pass `in-place`.
    pub in_place: Vec<(usize, usize)>,
    /// A gradient of its own, for ops whose gradient is better computed from the result than from the inputs (which then need not be kept). Its
    /// inputs: those of `expr`, the result, and the result's gradient.
    pub back: Option<Expr>,
}

impl Pointwise {
    /// Whether it is a cast, perhaps to the same type.
    pub fn is_cast(&self) -> bool {
        self.expr.outs == [0] && self.expr.ins == [Ins::In(0)]
    }

    /// An op that computes `expr`, with outputs of these types.
    pub fn new(expr: Expr, dtypes: Vec<DType>) -> Pointwise {
        Pointwise { expr, dtypes, in_place: vec![], back: None }
    }

    fn shape(&self, x: &[Meta]) -> Vec<usize> {
        let shapes: Vec<&[usize]> = (0..x.len()).filter(|&i| !self.expr.uses_rng(i)).map(|i| &x[i].shape[..]).collect();
        broadcast(&shapes).unwrap_or_else(|| panic!("shapes {shapes:?} do not broadcast"))
    }
}

impl Op for Pointwise {
    fn name(&self) -> &'static str {
        "pointwise"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let shape = self.shape(x);
        self.dtypes.iter().map(|&d| Meta::new(&shape, d)).collect()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        run::run(&self.expr, &self.in_place, x, y)
    }

    fn precision(&self, at: Port, x: &[Meta]) -> Narrow {
        // The outputs follow all inputs of the full shape; broadcast inputs may have any type.
        match at {
            Port::In(_) => Narrow::Keep,
            Port::Out(_) => {
                let most = x.iter().map(|m| m.elements()).max().unwrap_or(1);
                Narrow::Follow((0..x.len()).filter(|&i| x[i].elements() == most).collect())
            }
        }
    }

    fn with_types(&self, outputs: &[DType]) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Pointwise { dtypes: outputs.to_vec(), ..self.clone() }))
    }

    fn only(&self, read: &[bool]) -> Option<Lean> {
        let outputs: Vec<usize> = (0..read.len()).filter(|&o| read[o]).collect();
        if outputs.len() == read.len() {
            return None;
        }
        let mut expr = self.expr.clone();
        expr.outs = outputs.iter().map(|&o| self.expr.outs[o]).collect();
        let (expr, inputs) = expr.pruned();
        let op = Pointwise::new(expr, outputs.iter().map(|&o| self.dtypes[o]).collect());
        Some(Lean { op: Arc::new(op), inputs: Some(inputs), outputs })
    }

    fn cuda(&self, io: &Io) -> Code {
        print::code(self, io)
    }

    /// Every dimension of the result. Random draws are numbered by the elements of the whole, so parts of it must be in one piece.
    fn axes(&self, x: &[Meta], parts: usize) -> Vec<Axis> {
        let shape = self.shape(x);
        let fits = |d: usize| {
            let one_piece = shape[..d].iter().all(|&n| n == 1) && (shape.iter().product::<usize>() / parts).is_multiple_of(8);
            !self.expr.draws() || one_piece
        };
        let axis = |d: usize| {
            let share = |i: usize| {
                let own = (d + x[i].rank()).checked_sub(shape.len()).filter(|&own| x[i].shape[own] == shape[d] && shape[d] > 1);
                own.filter(|_| !self.expr.uses_rng(i)).map_or(Share::Whole, Share::Dim)
            };
            Axis::new((0..x.len()).map(share).collect::<Vec<_>>(), vec![Share::Dim(d); self.dtypes.len()])
        };
        (0..shape.len()).filter(|&d| fits(d)).map(axis).collect()
    }

    fn part(&self, x: &[Meta], _: usize, parts: usize, index: usize) -> Option<Arc<dyn Op>> {
        let first = self.shape(x).iter().product::<usize>() / parts * index;
        self.expr.draws().then(|| Arc::new(Pointwise { expr: self.expr.numbered_from(first), ..self.clone() }) as Arc<dyn Op>)
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let wanted: Vec<usize> = (0..x.len()).filter(|&i| x[i].dtype().is_float() && !self.expr.uses_rng(i)).collect();
        let mut inputs = x.to_vec();
        let places: Vec<Option<usize>> = dy
            .iter()
            .map(|d| {
                d.map(|d| {
                    inputs.push(d);
                    inputs.len() - 1
                })
            })
            .collect();
        let (expr, inputs) = match (&self.back, dy[0]) {
            (Some(back), Some(d)) => {
                let all = [x, y, &[d]].concat();
                let (expr, used) = back.pruned();
                (expr, used.into_iter().map(|i| all[i]).collect())
            }
            _ => (self.expr.gradient(&wanted, &places), inputs),
        };
        // What flows unchanged to a broadcast input (a bias) is summed as it is, into the input's type: a copy in that type would be read once.
        let broadcast = |i: usize| x[i].meta().elements() < y[0].meta().elements();
        let passed = |n: usize| match expr.ins[expr.outs[n]] {
            Ins::In(k) if broadcast(wanted[n]) && x[wanted[n]].dtype() == DType::F32 => inputs[k].dtype(),
            _ => x[wanted[n]].dtype(),
        };
        let dtypes = (0..wanted.len()).map(passed).collect();
        let grads = record(expr, dtypes, &inputs);
        let mut result = vec![None; x.len()];
        for (&i, g) in wanted.iter().zip(grads) {
            let g = g.sum_to_type(&x[i].shape(), x[i].dtype());
            result[i] = Some(if g.dtype() == x[i].dtype() { g } else { g.cast(x[i].dtype()) });
        }
        result
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let y = self.infer(x);
        let mut c = Cost::memory(x.iter().chain(&y).map(|m| m.bytes()).sum());
        c.flops = (self.expr.flops() * y[0].elements()) as u64;
        c
    }

    fn layout(&self, _: usize) -> Layout {
        Layout::Any
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        self.in_place.clone()
    }
}

/// The number that a value was filled with, if it was recorded by `full`.
fn constant(g: &Graph, v: Value) -> Option<f32> {
    let node = &g.nodes[v.node];
    match &node.kind {
        Kind::Op(op) if op.is_view() => constant(g, node.inputs[0]),
        Kind::Op(op) => op.is::<Full>().map(|f| f.value),
        _ => None,
    }
}

/// Records an expression. Inputs filled with one number become constants in it, unused inputs are dropped, and an output that is just an input is
/// that input.
#[track_caller]
pub fn record<'g>(expr: Expr, dtypes: Vec<DType>, inputs: &[Var<'g>]) -> Vec<Var<'g>> {
    let recorder = inputs.first().expect("arithmetic needs a value to work on").recorder();
    // Random draws are numbered by the elements of the shape, so no input may be dropped if there are any.
    let draws = expr.draws();
    let constants: Vec<Option<f32>> = inputs
        .iter()
        .map(|v| {
            if draws {
                return None;
            }
            recorder.with_graph(|g| constant(g, v.value()))
        })
        .collect();
    let shapes: Vec<Vec<usize>> = (0..inputs.len()).filter(|&i| !expr.uses_rng(i)).map(|i| inputs[i].shape()).collect();
    let Some(shape) = broadcast(&shapes.iter().map(|s| &s[..]).collect::<Vec<_>>()) else {
        return recorder.op(Pointwise::new(expr, dtypes), inputs); // panics, naming the shapes, the scope and the caller's line
    };
    let mut folded = Expr::default();
    let map = folded.append(
        &expr,
        |e, i| match constants[i] {
            Some(c) => e.c(c),
            None => e.input(i),
        },
        |rng| rng,
    );
    let outs: Vec<Reg> = expr.outs.iter().map(|&o| map[o]).collect();
    // Outputs that are just inputs are not computed.
    let mut result: Vec<Option<Var>> = vec![None; outs.len()];
    for (k, &o) in outs.iter().enumerate() {
        match folded.ins[o] {
            Ins::In(i) if inputs[i].dtype() == dtypes[k] => result[k] = Some(inputs[i].expand(&shape)),
            Ins::Const(c) => result[k] = Some(recorder.op1(Full { shape: shape.clone(), value: c, dtype: dtypes[k] }, &[])),
            _ => {}
        }
    }
    let left: Vec<usize> = (0..outs.len()).filter(|&k| result[k].is_none()).collect();
    if !left.is_empty() {
        folded.outs = left.iter().map(|&k| outs[k]).collect();
        let (pruned, kept) = folded.pruned();
        let kept: Vec<Var> = kept.iter().map(|&i| inputs[i]).collect();
        let op = Pointwise::new(pruned, left.iter().map(|&k| dtypes[k]).collect());
        let vars = recorder.op(op, &kept);
        for (&k, v) in left.iter().zip(vars) {
            // A folded constant may have had the larger shape.
            result[k] = Some(v.expand(&shape));
        }
    }
    result.into_iter().flatten().collect()
}

/// The result type for these inputs: theirs if all floats agree, else f32. Integers are ignored.
fn common(inputs: &[Var]) -> DType {
    let floats: Vec<DType> = inputs.iter().map(|v| v.dtype()).filter(|d| d.is_float()).collect();
    match floats.first() {
        Some(&d) if floats.iter().all(|&f| f == d) => d,
        _ => DType::F32,
    }
}

/// y = build(inputs), element by element.
#[track_caller]
pub fn pointwise<'g>(inputs: &[Var<'g>], build: impl FnOnce(&mut Expr, &[Reg]) -> Reg) -> Var<'g> {
    let expr = Expr::of(inputs.len(), build);
    record(expr, vec![common(inputs)], inputs)[0]
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:ident)*) => {$(
        impl<'g> std::ops::$trait for Var<'g> {
            type Output = Var<'g>;
            #[track_caller]
            fn $method(self, other: Var<'g>) -> Var<'g> {
                pointwise(&[self, other], |e, x| e.bin(Bin::$op, x[0], x[1]))
            }
        }
        impl<'g> std::ops::$trait<f32> for Var<'g> {
            type Output = Var<'g>;
            #[track_caller]
            fn $method(self, other: f32) -> Var<'g> {
                pointwise(&[self], |e, x| { let c = e.c(other); e.bin(Bin::$op, x[0], c) })
            }
        }
    )*};
}
operators!(Add add Add  Sub sub Sub  Mul mul Mul  Div div Div);

impl<'g> std::ops::Neg for Var<'g> {
    type Output = Var<'g>;
    fn neg(self) -> Var<'g> {
        self.unary(Un::Neg)
    }
}

impl<'g> Var<'g> {
    fn unary(self, op: Un) -> Var<'g> {
        pointwise(&[self], |e, x| e.un(op, x[0]))
    }

    /// e^x.
    pub fn exp(self) -> Var<'g> {
        self.unary(Un::Exp)
    }

    /// The natural logarithm.
    pub fn ln(self) -> Var<'g> {
        self.unary(Un::Ln)
    }

    /// The square root.
    pub fn sqrt(self) -> Var<'g> {
        self.unary(Un::Sqrt)
    }

    /// 1 / sqrt(x).
    pub fn rsqrt(self) -> Var<'g> {
        self.unary(Un::Rsqrt)
    }

    /// 1 / (1 + e^-x).
    pub fn sigmoid(self) -> Var<'g> {
        self.unary(Un::Sigmoid)
    }

    /// The hyperbolic tangent.
    pub fn tanh(self) -> Var<'g> {
        self.unary(Un::Tanh)
    }

    /// The absolute value.
    pub fn abs(self) -> Var<'g> {
        self.unary(Un::Abs)
    }

    /// x * x.
    pub fn square(self) -> Var<'g> {
        pointwise(&[self], |e, x| e.square(x[0]))
    }

    /// max(x, 0). Its gradient reads the result, so that the input need not be kept.
    pub fn relu(self) -> Var<'g> {
        let expr = Expr::of(1, |e, x| {
            let zero = e.c(0.0);
            e.bin(Bin::Max, x[0], zero)
        });
        let back = Expr::of(3, |e, x| {
            let zero = e.c(0.0);
            let open = e.bin(Bin::Lt, zero, x[1]);
            e.select(open, x[2], zero)
        });
        self.recorder().op1(Pointwise { back: Some(back), ..Pointwise::new(expr, vec![self.dtype()]) }, &[self])
    }

    /// self * dropout(relu(gate)), for a `self` that is ReLU's output. Gradients are computed from `self` and the result, so that the gate is never
    /// kept; where `self` is 0, the gradient with respect to it is 0, as ReLU before it would make it anyway. `dropout`: probability and the feed `rng`.
    #[track_caller]
    pub fn gated(self, gate: Var<'g>, dropout: Option<(f32, Var<'g>)>) -> Var<'g> {
        // Below this, 1 / x overflows; such an activation counts as 0.
        const NOTHING: f32 = 1e-30;
        let dropout = dropout.filter(|d| d.0 > 0.0);
        let scale = dropout.map_or(1.0, |(p, _)| 1.0 / (1.0 - p));
        let expr = Expr::of(2, |e, x| {
            let zero = e.c(0.0);
            let open = e.bin(Bin::Max, x[1], zero);
            let kept = match dropout {
                Some((p, _)) => e.dropout(open, p, self.recorder().new_site(), 2),
                None => open,
            };
            e.mul(x[0], kept)
        });
        let inputs: Vec<Var> = [self, gate].into_iter().chain(dropout.map(|d| d.1)).collect();
        let (y, d) = (inputs.len(), inputs.len() + 1);
        let mut back = Expr::default();
        let (x, y, d, zero, nothing) = (back.input(0), back.input(y), back.input(d), back.c(0.0), back.c(NOTHING));
        let (some, inverse, along) = (back.bin(Bin::Lt, nothing, x), back.un(Un::Inverse, x), back.mul(d, y));
        let by_x = back.mul(along, inverse);
        let (open, scaled) = (back.bin(Bin::Lt, zero, y), back.scale(d, scale));
        let by_gate = back.mul(scaled, x);
        back.outs = vec![back.select(some, by_x, zero), back.select(open, by_gate, zero)];
        self.recorder().op1(Pointwise { back: Some(back), ..Pointwise::new(expr, vec![self.dtype()]) }, &inputs)
    }

    /// x * sigmoid(x)
    pub fn silu(self) -> Var<'g> {
        pointwise(&[self], |e, x| {
            let s = e.un(Un::Sigmoid, x[0]);
            e.mul(x[0], s)
        })
    }

    /// silu(self) * up
    #[track_caller]
    pub fn swiglu(self, up: Var<'g>) -> Var<'g> {
        pointwise(&[self, up], |e, x| {
            let s = e.un(Un::Sigmoid, x[0]);
            let silu = e.mul(x[0], s);
            e.mul(silu, x[1])
        })
    }

    /// GELU in its tanh approximation.
    pub fn gelu(self) -> Var<'g> {
        pointwise(&[self], |e, x| {
            let cube = e.square(x[0]);
            let cube = e.mul(cube, x[0]);
            let cube = e.scale(cube, 0.044715);
            let inner = e.add(x[0], cube);
            let inner = e.scale(inner, (2.0 / std::f32::consts::PI).sqrt());
            let t = e.un(Un::Tanh, inner);
            let one = e.c(1.0);
            let t = e.add(t, one);
            let half = e.scale(x[0], 0.5);
            e.mul(half, t)
        })
    }

    /// GELU as it is defined, with the error function: x / 2 (1 + erf(x / sqrt(2))).
    pub fn gelu_erf(self) -> Var<'g> {
        pointwise(&[self], |e, x| {
            let inner = e.scale(x[0], std::f32::consts::FRAC_1_SQRT_2);
            let t = e.un(Un::Erf, inner);
            let one = e.c(1.0);
            let t = e.add(t, one);
            let half = e.scale(x[0], 0.5);
            e.mul(half, t)
        })
    }

    /// The larger of two values, element by element.
    #[track_caller]
    pub fn max(self, other: Var<'g>) -> Var<'g> {
        pointwise(&[self, other], |e, x| e.bin(Bin::Max, x[0], x[1]))
    }

    /// The smaller of two values, element by element.
    #[track_caller]
    pub fn min(self, other: Var<'g>) -> Var<'g> {
        pointwise(&[self, other], |e, x| e.bin(Bin::Min, x[0], x[1]))
    }

    /// 1 where self < other, else 0.
    #[track_caller]
    pub fn less(self, other: Var<'g>) -> Var<'g> {
        pointwise(&[self, other], |e, x| e.bin(Bin::Lt, x[0], x[1]))
    }

    /// `a` where self is not 0, else `b`.
    #[track_caller]
    pub fn choose(self, a: Var<'g>, b: Var<'g>) -> Var<'g> {
        let expr = Expr::of(3, |e, x| e.select(x[0], x[1], x[2]));
        record(expr, vec![common(&[a, b])], &[self, a, b])[0]
    }

    /// 1 where the number is finite, else 0.
    pub fn is_finite(self) -> Var<'g> {
        pointwise(&[self], |e, x| {
            // x - x is 0 for finite numbers and NaN for the others.
            let (d, zero) = (e.sub(x[0], x[0]), e.c(0.0));
            e.bin(Bin::Eq, d, zero)
        })
    }

    /// Binary cross-entropy of these logits with targets in [0, 1]: max(x, 0) - x t + ln(1 + e^-|x|).
    #[track_caller]
    pub fn bce_with_logits(self, target: Var<'g>) -> Var<'g> {
        pointwise(&[self, target], |e, x| {
            let zero = e.c(0.0);
            let positive = e.bin(Bin::Max, x[0], zero);
            let xt = e.mul(x[0], x[1]);
            let size = e.un(Un::Abs, x[0]);
            let minus = e.un(Un::Neg, size);
            let small = e.un(Un::Exp, minus);
            let soft = e.un(Un::Ln1p, small);
            let difference = e.sub(positive, xt);
            e.add(difference, soft)
        })
    }

    /// ln(1 + e^x), without overflow.
    pub fn softplus(self) -> Var<'g> {
        pointwise(&[self], |e, x| {
            let zero = e.c(0.0);
            let positive = e.bin(Bin::Max, x[0], zero);
            let size = e.un(Un::Abs, x[0]);
            let minus = e.un(Un::Neg, size);
            let small = e.un(Un::Exp, minus);
            let soft = e.un(Un::Ln1p, small);
            e.add(positive, soft)
        })
    }

    /// Dropout: 0 with probability `p`, else divided by 1 - p. `rng` is the feed of that name: the draw is a function of seed, step, micro-batch and
    /// this call's number in the recording, so that the backward pass draws it again instead of keeping a mask.
    pub fn dropout(self, p: f32, rng: Var<'g>) -> Var<'g> {
        if p == 0.0 {
            return self;
        }
        let site = self.recorder().new_site();
        let expr = Expr::of(1, |e, x| e.dropout(x[0], p, site, 1));
        record(expr, vec![self.dtype()], &[self, rng])[0]
    }

    /// Converts to another type.
    pub fn cast(self, dtype: DType) -> Var<'g> {
        record(Expr::of(1, |_, x| x[0]), vec![dtype], &[self])[0]
    }
}

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("add broadcast", &[In(&[3, 1, 5], Fill::Normal), In(&[4, 1], Fill::Normal)], |x| vec![x[0] + x[1]]),
    Case::new("sub", &[In(&[7], Fill::Normal), In(&[7], Fill::Normal)], |x| vec![x[0] - x[1]]),
    Case::new("mul twice the same", &[In(&[6, 11], Fill::Normal)], |x| vec![x[0] * x[0] * 3.0]),
    Case::new("div", &[In(&[2, 9], Fill::Normal), In(&[9], Fill::Positive)], |x| vec![x[0] / x[1]]),
    Case::new("swiglu", &[In(&[6, 431], Fill::Normal), In(&[6, 431], Fill::Normal)], |x| vec![x[0].swiglu(x[1])]),
    Case::new("swiglu mlp", &[In(&[16384, 3072], Fill::Normal), In(&[16384, 3072], Fill::Normal)], |x| vec![x[0].swiglu(x[1])]).bench(),
    Case::new("gelu", &[In(&[3, 33], Fill::Normal)], |x| vec![x[0].gelu()]),
    Case::new("gelu by erf", &[In(&[3, 33], Fill::Normal)], |x| vec![x[0].gelu_erf()]),
    Case::new("relu", &[In(&[5, 7], Fill::AwayFromZero)], |x| vec![x[0].relu()]),
    Case::new("roots", &[In(&[21], Fill::Positive)], |x| vec![x[0].sqrt(), x[0].rsqrt(), x[0].ln()]),
    Case::new("exp tanh sigmoid silu", &[In(&[3, 5], Fill::Normal)], |x| vec![x[0].exp(), x[0].tanh(), x[0].sigmoid(), x[0].silu()]),
    Case::new("abs max min", &[In(&[13], Fill::AwayFromZero), In(&[13], Fill::Positive)], |x| {
        vec![x[0].abs(), x[0].max(x[1] * 5.0), x[0].min(x[1] * -5.0)]
    }),
    Case::new("sin cos atan2", &[In(&[9], Fill::Positive), In(&[9], Fill::Positive)], |x| {
        vec![pointwise(x, |e, r| {
            let (s, c) = (e.un(Un::Sin, r[0]), e.un(Un::Cos, r[1]));
            let t = e.mul(s, c);
            let a = e.bin(Bin::Atan2, r[0], r[1]);
            e.add(t, a)
        })]
    }),
    Case::new("choose", &[In(&[4, 6], Fill::Mask), In(&[4, 6], Fill::Normal), In(&[6], Fill::Normal)], |x| vec![x[0].choose(x[1], x[2])]),
    Case::new("bce", &[In(&[2, 19], Fill::AwayFromZero), In(&[2, 19], Fill::Positive)], |x| vec![x[0].bce_with_logits(x[1] * 0.4)]),
    Case::new("softplus", &[In(&[3, 17], Fill::AwayFromZero)], |x| vec![x[0].softplus()]),
    Case::new("dropout", &[In(&[5, 131], Fill::Normal), In(&[4], Fill::Rng)], |x| vec![x[0].dropout(0.3, x[1])]),
    // Large enough that a thread has several neighbours.
    Case::new("dropout by fours", &[In(&[512, 520], Fill::Normal), In(&[4], Fill::Rng)], |x| vec![x[0].dropout(0.3, x[1])]),
    // Large enough that a thread has several neighbours.
    Case::new("dropout of neighbours", &[In(&[512, 520], Fill::Normal), In(&[4], Fill::Rng)], |x| vec![x[0].dropout(0.3, x[1])]),
    Case::new("gated", &[In(&[5, 24], Fill::Positive), In(&[5, 24], Fill::AwayFromZero), In(&[4], Fill::Rng)], |x| {
        vec![x[0].gated(x[1], Some((0.3, x[2]))), x[0].gated(x[1], None)]
    }),
    Case::new("transposed input", &[In(&[5, 7], Fill::Normal), In(&[7, 5], Fill::Normal)], |x| vec![x[0].t() * x[1]]),
];
