//! Evaluates expressions on the CPU: each instruction over one cache-sized chunk before the next instruction.

use super::expr::{Bin, Expr, Ins, Un};
use crate::cpu::math::{erf, exp, sigmoid, tanh};
use crate::cpu::{Data, DataMut, View, ViewMut, simd};
use crate::meta::{broadcast_strides, contiguous};
use crate::philox::fill_halves;
use rayon::prelude::*;

/// Elements of a chunk: with some ten live registers they take 20 KiB of a 32 KiB L1 cache.
const CHUNK: usize = 512;
/// Chunks of one rayon task.
const TASK: usize = 16 * CHUNK;

/// A unary operation on one number.
#[inline(always)]
pub fn unary(op: Un, a: f32) -> f32 {
    match op {
        Un::Neg => -a,
        Un::Abs => a.abs(),
        Un::Exp => exp(a),
        Un::Ln => a.ln(),
        Un::Ln1p => a.ln_1p(),
        Un::Sqrt => a.sqrt(),
        Un::Rsqrt => 1.0 / a.sqrt(),
        Un::Inverse => 1.0 / a,
        Un::Sigmoid => sigmoid(a),
        Un::Tanh => tanh(a),
        Un::Erf => erf(a),
        Un::Sin => a.sin(),
        Un::Cos => a.cos(),
        Un::Floor => a.floor(),
        Un::Step => {
            if a > 0.0 {
                1.0
            } else {
                0.0
            }
        }
    }
}

/// A binary operation on two numbers.
#[inline(always)]
pub fn binary(op: Bin, a: f32, b: f32) -> f32 {
    match op {
        Bin::Add => a + b,
        Bin::Sub => a - b,
        Bin::Mul => a * b,
        Bin::Div => a / b,
        // Written so that a NaN on either side wins.
        Bin::Max => {
            if a > b || a.is_nan() {
                a
            } else {
                b
            }
        }
        Bin::Min => {
            if a < b || a.is_nan() {
                a
            } else {
                b
            }
        }
        Bin::Lt => (a < b) as u8 as f32,
        Bin::Eq => (a == b) as u8 as f32,
        Bin::Atan2 => a.atan2(b),
    }
}

/// Instructions with chunk buffers assigned; a buffer is reused after its last reader.
struct Code {
    slots: Vec<usize>,
    count: usize,
}

impl Code {
    fn new(e: &Expr) -> Code {
        let mut last = vec![0; e.ins.len()];
        for (i, ins) in e.ins.iter().enumerate() {
            last[i] = i;
            for a in ins.args() {
                last[a] = i;
            }
        }
        for &o in &e.outs {
            last[o] = e.ins.len();
        }
        let (mut slots, mut free, mut count) = (vec![], vec![], 0);
        for (i, ins) in e.ins.iter().enumerate() {
            // The result gets its buffer before those of the arguments are freed, so that they never coincide.
            slots.push(free.pop().unwrap_or_else(|| {
                count += 1;
                count - 1
            }));
            let mut args = ins.args();
            args.sort();
            args.dedup();
            for a in args {
                if last[a] == i {
                    free.push(slots[a]);
                }
            }
        }
        Code { slots, count }
    }
}

/// How input elements are addressed, after merging adjacent dimensions that have uniform strides in all inputs.
pub(super) struct Walk {
    pub shape: Vec<usize>,
    pub strides: Vec<Vec<usize>>,
}

impl Walk {
    pub fn new(shape: &[usize], inputs: &[Option<(&[usize], &[usize])>]) -> Walk {
        let full: Vec<Option<Vec<usize>>> = inputs.iter().map(|i| i.map(|(s, st)| broadcast_strides(s, st, shape))).collect();
        let (mut dims, mut strides): (Vec<usize>, Vec<Vec<usize>>) = (vec![], vec![vec![]; inputs.len()]);
        for (d, &n) in shape.iter().enumerate().filter(|(_, n)| **n != 1) {
            let merges = !dims.is_empty()
                && full.iter().zip(&strides).all(|(f, s)| match f {
                    Some(f) => s[s.len() - 1] == f[d] * n,
                    None => true,
                });
            if merges {
                *dims.last_mut().unwrap() *= n;
            } else {
                dims.push(n);
            }
            for (f, s) in full.iter().zip(&mut strides) {
                let step = f.as_ref().map_or(0, |f| f[d]);
                match s.last_mut() {
                    Some(last) if merges => *last = step,
                    _ => s.push(step),
                }
            }
        }
        if dims.is_empty() {
            dims.push(1);
            strides.iter_mut().for_each(|s| s.push(0));
        }
        Walk { shape: dims, strides }
    }

    /// Calls `f(position in the chunk, length, offset)` for every run of the innermost dimension that the chunk touches.
    #[inline(always)]
    fn runs(&self, input: usize, start: usize, len: usize, mut f: impl FnMut(usize, usize, usize)) {
        let strides = &self.strides[input];
        let inner = *self.shape.last().unwrap();
        let mut done = 0;
        while done < len {
            let at = start + done;
            let (mut row, column) = (at / inner, at % inner);
            let mut offset = column * strides[strides.len() - 1];
            for d in (0..self.shape.len() - 1).rev() {
                offset += row % self.shape[d] * strides[d];
                row /= self.shape[d];
            }
            let run = (inner - column).min(len - done);
            f(done, run, offset);
            done += run;
        }
    }
}

#[inline(always)]
fn load(walk: &Walk, input: usize, x: &View, start: usize, out: &mut [f32]) {
    let step = *walk.strides[input].last().unwrap();
    macro_rules! typed {
        ($data:expr, $convert:expr) => {
            walk.runs(input, start, out.len(), |at, len, offset| {
                let out = &mut out[at..at + len];
                match step {
                    0 => out.fill($convert($data[offset])),
                    1 => out.iter_mut().zip(&$data[offset..offset + len]).for_each(|(o, &v)| *o = $convert(v)),
                    _ => out.iter_mut().enumerate().for_each(|(i, o)| *o = $convert($data[offset + i * step])),
                }
            })
        };
    }
    match &x.data {
        Data::F32(d) => typed!(d, |v: f32| v),
        Data::I32(d) => typed!(d, |v: i32| v as f32),
        Data::U8(d) => typed!(d, |v: u8| v as f32),
    }
}

enum Out<'a> {
    F32(&'a mut [f32]),
    I32(&'a mut [i32]),
    U8(&'a mut [u8]),
}

/// Evaluates an expression for all elements on the CPU, in chunks that fit into the cache.
pub fn run(e: &Expr, in_place: &[(usize, usize)], x: &[View], y: &mut [ViewMut]) {
    let shape = y[0].shape.to_vec();
    let total: usize = shape.iter().product();
    let code = Code::new(e);
    let own = contiguous(&shape);
    let views: Vec<Option<(&[usize], &[usize])>> = x
        .iter()
        .enumerate()
        .map(|(i, v)| match in_place.iter().any(|p| p.0 == i) {
            true => Some((&shape[..], &own[..])),
            false => (!e.uses_rng(i)).then_some((v.shape, v.strides)),
        })
        .collect();
    let walk = Walk::new(&shape, &views);
    // All outputs are split into the same tasks; task t computes its part of all outputs.
    let mut tasks: Vec<(usize, Vec<Out>)> = (0..total.div_ceil(TASK)).map(|t| (t * TASK, vec![])).collect();
    for out in y.iter_mut() {
        match &mut out.data {
            DataMut::F32(d) => d.chunks_mut(TASK).zip(&mut tasks).for_each(|(c, t)| t.1.push(Out::F32(c))),
            DataMut::I32(d) => d.chunks_mut(TASK).zip(&mut tasks).for_each(|(c, t)| t.1.push(Out::I32(c))),
            DataMut::U8(d) => d.chunks_mut(TASK).zip(&mut tasks).for_each(|(c, t)| t.1.push(Out::U8(c))),
        }
    }
    tasks.into_par_iter().for_each(|(start, mut outs)| {
        simd(
            #[inline(always)]
            || {
                let mut regs = vec![vec![0.0f32; CHUNK]; code.count];
                let len = TASK.min(total - start);
                for at in (0..len).step_by(CHUNK) {
                    let n = CHUNK.min(len - at);
                    for (i, ins) in e.ins.iter().enumerate() {
                        let mut r = std::mem::take(&mut regs[code.slots[i]]);
                        match ins {
                            Ins::In(input) => match in_place.iter().find(|p| p.0 == *input) {
                                Some(&(_, o)) => {
                                    let Out::F32(d) = &outs[o] else { unreachable!("only f32 buffers are shared") };
                                    r[..n].copy_from_slice(&d[at..at + n]);
                                }
                                None => load(&walk, *input, &x[*input], start + at, &mut r[..n]),
                            },
                            Ins::Random { site, rng, first } => fill_halves(x[*rng].i32(), *site, first + start + at, &mut r[..n]),
                            _ => instruction(ins, &code.slots, &regs, &mut r[..n]),
                        }
                        regs[code.slots[i]] = r;
                    }
                    for (out, &reg) in outs.iter_mut().zip(&e.outs) {
                        let r = &regs[code.slots[reg]][..n];
                        match out {
                            Out::F32(d) => d[at..at + n].copy_from_slice(r),
                            Out::I32(d) => d[at..at + n].iter_mut().zip(r).for_each(|(o, &v)| *o = v as i32),
                            Out::U8(d) => d[at..at + n].iter_mut().zip(r).for_each(|(o, &v)| *o = v as u8),
                        }
                    }
                }
            },
        )
    });
}

/// One instruction over a chunk. The operator is chosen outside the loop, so that each loop vectorizes.
#[inline(always)]
fn instruction(ins: &Ins, slots: &[usize], regs: &[Vec<f32>], r: &mut [f32]) {
    let n = r.len();
    macro_rules! each_unary {
        ($op:expr, $a:expr, $($name:ident)*) => {
            match $op { $(Un::$name => r.iter_mut().zip($a).for_each(|(o, &a)| *o = unary(Un::$name, a)),)* }
        };
    }
    macro_rules! each_binary {
        ($op:expr, $a:expr, $b:expr, $($name:ident)*) => {
            match $op { $(Bin::$name => r.iter_mut().zip($a).zip($b).for_each(|((o, &a), &b)| *o = binary(Bin::$name, a, b)),)* }
        };
    }
    match *ins {
        Ins::Const(c) => r.fill(c),
        Ins::Un(op, a) => {
            each_unary!(op, &regs[slots[a]][..n], Neg Abs Exp Ln Ln1p Sqrt Rsqrt Inverse Sigmoid Tanh Erf Sin Cos Floor Step)
        }
        Ins::Bin(op, a, b) => {
            each_binary!(op, &regs[slots[a]][..n], &regs[slots[b]][..n], Add Sub Mul Div Max Min Lt Eq Atan2)
        }
        Ins::Select(c, a, b) => {
            let (c, a, b) = (&regs[slots[c]][..n], &regs[slots[a]][..n], &regs[slots[b]][..n]);
            for i in 0..n {
                r[i] = if c[i] != 0.0 { a[i] } else { b[i] };
            }
        }
        Ins::In(_) | Ins::Random { .. } => unreachable!("loaded by the caller"),
    }
}
