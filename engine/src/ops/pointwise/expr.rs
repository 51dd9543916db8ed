//! Pointwise expressions: lists of instructions on one element, in single-assignment form. The pass `fuse-pointwise` merges them.

use std::collections::HashMap;

/// The index of an instruction, and so of its result.
pub type Reg = usize;

/// Operations on one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Un {
    /// -a
    Neg,
    /// |a|
    Abs,
    /// e^a
    Exp,
    /// Natural logarithm.
    Ln,
    /// ln(1 + x)
    Ln1p,
    /// Square root.
    Sqrt,
    /// 1 / sqrt(a)
    Rsqrt,
    /// 1 / x, on a GPU accurate to two units in the last place; infinite below 1e-38.
    Inverse,
    /// 1 / (1 + e^-a)
    Sigmoid,
    /// Hyperbolic tangent.
    Tanh,
    /// The error function.
    Erf,
    /// Sine, in radians.
    Sin,
    /// Cosine, in radians.
    Cos,
    /// The largest whole number up to a.
    Floor,
    /// 1 where x > 0, else 0.
    Step,
}

/// Operations on two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bin {
    /// a + b
    Add,
    /// a - b
    Sub,
    /// a * b
    Mul,
    /// a / b
    Div,
    /// The larger of the two.
    Max,
    /// The smaller of the two.
    Min,
    /// 1 where a < b, else 0.
    Lt,
    /// 1 where a == b, else 0.
    Eq,
    /// The angle of the point (b, a).
    Atan2,
}

/// An instruction. Its result is the register with the instruction's index.
#[derive(Clone, Copy, Debug)]
pub enum Ins {
    /// The current element of an input.
    In(usize),
    /// A constant.
    Const(f32),
    /// An operation on one register.
    Un(Un, Reg),
    /// An operation on two registers.
    Bin(Bin, Reg, Reg),
    /// a where c is not 0, else b.
    Select(Reg, Reg, Reg),
    /// This element's uniform random number in [0, 1), a multiple of 2^-16.
    Random {
        /// The op's number in the model, so that sites draw different numbers.
        site: u32,
        /// The input with the rng counters: seed, step, micro-batch.
        rng: usize,
        /// The number of the first element's draw: more than 0 where a rank has a later part of a tensor.
        first: usize,
    },
}

impl PartialEq for Ins {
    fn eq(&self, other: &Ins) -> bool {
        self.key() == other.key()
    }
}

impl Ins {
    /// A key by which equal instructions are found.
    fn key(&self) -> (u8, u8, [usize; 3]) {
        match *self {
            Ins::In(i) => (0, 0, [i, 0, 0]),
            Ins::Const(c) => (1, 0, [c.to_bits() as usize, 0, 0]),
            Ins::Un(u, a) => (2, u as u8, [a, 0, 0]),
            Ins::Bin(b, x, y) => (3, b as u8, [x, y, 0]),
            Ins::Select(c, a, b) => (4, 0, [c, a, b]),
            Ins::Random { site, rng, first } => (5, 0, [site as usize, rng, first]),
        }
    }

    /// The registers that it reads.
    pub fn args(&self) -> Vec<Reg> {
        match *self {
            Ins::In(_) | Ins::Const(_) | Ins::Random { .. } => vec![],
            Ins::Un(_, a) => vec![a],
            Ins::Bin(_, a, b) => vec![a, b],
            Ins::Select(c, a, b) => vec![c, a, b],
        }
    }

    fn renamed(&self, r: impl Fn(Reg) -> Reg) -> Ins {
        match *self {
            Ins::Un(u, a) => Ins::Un(u, r(a)),
            Ins::Bin(o, a, b) => Ins::Bin(o, r(a), r(b)),
            Ins::Select(c, a, b) => Ins::Select(r(c), r(a), r(b)),
            other => other,
        }
    }
}

/// A pointwise expression in single-assignment form.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expr {
    /// The instructions, in order.
    pub ins: Vec<Ins>,
    /// The registers that are the outputs.
    pub outs: Vec<Reg>,
}

impl Expr {
    /// An expression with one output, built from `inputs` inputs.
    pub fn of(inputs: usize, build: impl FnOnce(&mut Expr, &[Reg]) -> Reg) -> Expr {
        let mut e = Expr::default();
        let regs: Vec<Reg> = (0..inputs).map(|i| e.input(i)).collect();
        let out = build(&mut e, &regs);
        e.outs = vec![out];
        e
    }

    /// Adds an instruction, or finds an equal one; simplifies where that changes no result.
    pub fn push(&mut self, i: Ins) -> Reg {
        use Bin::*;
        let constant = |r: Reg| match self.ins[r] {
            Ins::Const(c) => Some(c),
            _ => None,
        };
        if let Ins::Bin(op, a, b) = i {
            match (op, constant(a), constant(b)) {
                (Mul, Some(1.0), _) => return b,
                (Mul | Div, _, Some(1.0)) => return a,
                (_, Some(x), Some(y)) => {
                    let c = super::run::binary(op, x, y);
                    return self.push(Ins::Const(c));
                }
                // x + 0 is x, except that -0 + 0 is 0; here -0 stays -0.
                (Add, Some(0.0), _) => return b,
                (Add | Sub, _, Some(0.0)) => return a,
                _ => {}
            }
        }
        self.ins.iter().position(|x| *x == i).unwrap_or_else(|| {
            self.ins.push(i);
            self.ins.len() - 1
        })
    }

    /// Reads an input.
    pub fn input(&mut self, i: usize) -> Reg {
        self.push(Ins::In(i))
    }

    /// A constant.
    pub fn c(&mut self, value: f32) -> Reg {
        self.push(Ins::Const(value))
    }

    /// Applies a unary operation.
    pub fn un(&mut self, op: Un, a: Reg) -> Reg {
        self.push(Ins::Un(op, a))
    }

    /// Applies a binary operation.
    pub fn bin(&mut self, op: Bin, a: Reg, b: Reg) -> Reg {
        self.push(Ins::Bin(op, a, b))
    }

    /// a + b
    pub fn add(&mut self, a: Reg, b: Reg) -> Reg {
        self.bin(Bin::Add, a, b)
    }

    /// a - b
    pub fn sub(&mut self, a: Reg, b: Reg) -> Reg {
        self.bin(Bin::Sub, a, b)
    }

    /// a * b
    pub fn mul(&mut self, a: Reg, b: Reg) -> Reg {
        self.bin(Bin::Mul, a, b)
    }

    /// a / b
    pub fn div(&mut self, a: Reg, b: Reg) -> Reg {
        self.bin(Bin::Div, a, b)
    }

    /// `a` where `c` is not 0, else `b`.
    pub fn select(&mut self, c: Reg, a: Reg, b: Reg) -> Reg {
        self.push(Ins::Select(c, a, b))
    }

    /// a * a
    pub fn square(&mut self, a: Reg) -> Reg {
        self.mul(a, a)
    }

    /// a times a constant.
    pub fn scale(&mut self, a: Reg, by: f32) -> Reg {
        let c = self.c(by);
        self.mul(a, c)
    }

    /// A uniform random number in [0, 1) for every element.
    pub fn random(&mut self, site: u32, rng: usize) -> Reg {
        self.push(Ins::Random { site, rng, first: 0 })
    }

    /// The same with draws numbered from `from` on.
    pub fn numbered_from(&self, from: usize) -> Expr {
        let mut later = self.clone();
        for ins in &mut later.ins {
            if let Ins::Random { first, .. } = ins {
                *first += crate::mutant!("every-rank-draws-the-same", from, 0);
            }
        }
        later
    }

    /// Dropout: 0 with probability `p`, else a / (1 - p).
    pub fn dropout(&mut self, a: Reg, p: f32, site: u32, rng: usize) -> Reg {
        let (u, chance, zero) = (self.random(site, rng), self.c(p), self.c(0.0));
        let (gone, kept) = (self.bin(Bin::Lt, u, chance), self.scale(a, crate::mutant!("dropout-not-scaled", 1.0 / (1.0 - p), 1.0)));
        self.select(gone, zero, kept)
    }

    /// 1 - a
    pub fn one_minus(&mut self, a: Reg) -> Reg {
        let one = self.c(1.0);
        self.sub(one, a)
    }

    /// The expression without unused instructions and inputs, and the old indices of the inputs that remain.
    pub fn pruned(&self) -> (Expr, Vec<usize>) {
        let mut live = vec![false; self.ins.len()];
        for &o in &self.outs {
            live[o] = true;
        }
        for i in (0..self.ins.len()).rev() {
            if live[i] {
                for a in self.ins[i].args() {
                    live[a] = true;
                }
            }
        }
        let mut inputs: Vec<usize> = vec![];
        let mut number = |i: usize| {
            inputs.iter().position(|&x| x == i).unwrap_or_else(|| {
                inputs.push(i);
                inputs.len() - 1
            })
        };
        let (mut out, mut map) = (Expr::default(), HashMap::new());
        for (i, ins) in self.ins.iter().enumerate().filter(|(i, _)| live[*i]) {
            let ins = match ins.renamed(|r| map[&r]) {
                Ins::In(n) => Ins::In(number(n)),
                Ins::Random { site, rng, first } => Ins::Random { site, rng: number(rng), first },
                other => other,
            };
            map.insert(i, out.push(ins));
        }
        out.outs = self.outs.iter().map(|o| map[o]).collect();
        (out, inputs)
    }

    /// Appends `other`, its inputs mapped by `input` and its rng inputs by the last argument; returns the new index of each of its instructions.
    pub fn append(
        &mut self,
        other: &Expr,
        mut input: impl FnMut(&mut Expr, usize) -> Reg,
        mut rng: impl FnMut(usize) -> usize,
    ) -> Vec<Reg> {
        let mut map: Vec<Reg> = vec![];
        for ins in &other.ins {
            let reg = match *ins {
                Ins::In(i) => input(self, i),
                Ins::Random { site, rng: r, first } => self.push(Ins::Random { site, rng: rng(r), first }),
                _ => self.push(ins.renamed(|r| map[r])),
            };
            map.push(reg);
        }
        map
    }

    /// The expression for gradients with respect to the inputs `wanted`; its inputs `first_dy + k` are the gradients with respect to output k.
    pub fn gradient(&self, wanted: &[usize], dy: &[Option<usize>]) -> Expr {
        let mut e = Expr { ins: self.ins.clone(), outs: vec![] };
        let mut adjoint: Vec<Option<Reg>> = vec![None; self.ins.len()];
        let add = |e: &mut Expr, adjoint: &mut Vec<Option<Reg>>, r: Reg, g: Reg| {
            adjoint[r] = Some(match adjoint[r] {
                Some(a) => e.add(a, g),
                None => g,
            });
        };
        for (k, &o) in self.outs.iter().enumerate() {
            if let Some(input) = dy[k] {
                let g = e.input(input);
                add(&mut e, &mut adjoint, o, g);
            }
        }
        for i in (0..self.ins.len()).rev() {
            let Some(g) = adjoint[i] else { continue };
            for (arg, slope) in slopes(&mut e, &self.ins[i], i, g) {
                add(&mut e, &mut adjoint, arg, slope);
            }
        }
        for &w in wanted {
            let reg = self.ins.iter().position(|x| *x == Ins::In(w)).and_then(|r| adjoint[r]);
            let reg = reg.unwrap_or_else(|| e.c(0.0));
            e.outs.push(reg);
        }
        e
    }

    /// Whether an input is the seed of random draws, not a number to compute with.
    pub fn uses_rng(&self, input: usize) -> bool {
        self.ins.iter().any(|i| matches!(i, Ins::Random { rng, .. } if *rng == input))
    }

    /// Whether it draws random numbers.
    pub fn draws(&self) -> bool {
        self.ins.iter().any(|i| matches!(i, Ins::Random { .. }))
    }

    /// Operations for each element, as counted in costs.
    pub fn flops(&self) -> usize {
        self.ins.iter().filter(|i| !matches!(i, Ins::In(_) | Ins::Const(_))).count()
    }
}

/// Adds what instruction `i` (value `y`, gradient `g`) contributes to the gradients of its arguments.
fn slopes(e: &mut Expr, ins: &Ins, y: Reg, g: Reg) -> Vec<(Reg, Reg)> {
    match *ins {
        Ins::In(_) | Ins::Const(_) | Ins::Random { .. } => vec![],
        Ins::Select(c, a, b) => {
            let zero = e.c(0.0);
            vec![(a, e.select(c, g, zero)), (b, e.select(c, zero, g))]
        }
        Ins::Un(op, a) => {
            let slope = match op {
                Un::Neg => return vec![(a, e.un(Un::Neg, g))],
                Un::Floor | Un::Step => return vec![],
                Un::Exp => y,
                Un::Ln => return vec![(a, e.div(g, a))],
                Un::Ln1p => {
                    let one = e.c(1.0);
                    let d = e.add(a, one);
                    return vec![(a, e.div(g, d))];
                }
                Un::Sqrt => {
                    let half = e.scale(g, 0.5);
                    return vec![(a, e.div(half, y))];
                }
                Un::Rsqrt => {
                    let y2 = e.square(y);
                    let y3 = e.mul(y2, y);
                    e.scale(y3, -0.5)
                }
                Un::Inverse => {
                    let y2 = e.square(y);
                    e.un(Un::Neg, y2)
                }
                Un::Sigmoid => {
                    let n = e.one_minus(y);
                    e.mul(y, n)
                }
                Un::Tanh => {
                    let s = e.square(y);
                    e.one_minus(s)
                }
                Un::Erf => {
                    // 2 / sqrt(pi) e^-a^2
                    let square = e.square(a);
                    let minus = e.un(Un::Neg, square);
                    let bell = e.un(Un::Exp, minus);
                    e.scale(bell, std::f32::consts::FRAC_2_SQRT_PI)
                }
                Un::Sin => e.un(Un::Cos, a),
                Un::Cos => {
                    let s = e.un(Un::Sin, a);
                    e.un(Un::Neg, s)
                }
                Un::Abs => {
                    // The derivative at 0 is -1 here, and 0 in PyTorch; an exact 0 hardly occurs in training.
                    let (step, two, one) = (e.un(Un::Step, a), e.c(2.0), e.c(1.0));
                    let twice = e.mul(step, two);
                    e.sub(twice, one)
                }
            };
            vec![(a, e.mul(g, slope))]
        }
        Ins::Bin(op, a, b) => match op {
            Bin::Add => vec![(a, g), (b, g)],
            Bin::Sub => vec![(a, g), (b, e.un(Un::Neg, g))],
            Bin::Mul => vec![(a, e.mul(g, b)), (b, e.mul(g, a))],
            Bin::Div => {
                let da = e.div(g, b);
                let t = e.mul(da, y);
                vec![(a, da), (b, e.un(Un::Neg, t))]
            }
            Bin::Max | Bin::Min => {
                let first = if op == Bin::Max { e.bin(Bin::Lt, b, a) } else { e.bin(Bin::Lt, a, b) };
                let zero = e.c(0.0);
                vec![(a, e.select(first, g, zero)), (b, e.select(first, zero, g))]
            }
            Bin::Lt | Bin::Eq => vec![],
            Bin::Atan2 => {
                let (a2, b2) = (e.square(a), e.square(b));
                let r2 = e.add(a2, b2);
                let s = e.div(g, r2);
                let (da, db) = (e.mul(s, b), e.mul(s, a));
                vec![(a, da), (b, e.un(Un::Neg, db))]
            }
        },
    }
}
