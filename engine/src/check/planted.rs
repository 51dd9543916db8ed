//! Ops that are wrong on purpose: the checks must find each of them.

use super::{Outcome, Verdict, check_case};
use crate::cpu::{View, ViewMut};
use crate::kernel::{Code, Io, Launch};
use crate::meta::{DType, Meta};
use crate::op::{self, Case, Cost, Fill, Grads, In, Narrow, Op, Port};
use crate::passes::Target;
use crate::program::Device;
use crate::record::Var;

/// y = 2 x, with an error in the GPU kernel, or in the CPU code for narrow types, as `on` says.
#[derive(Clone, Copy, Debug)]
struct Planted {
    mistake: Mistake,
    on: On,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    None,
    Zeros,
    FivePercent,
    /// One element is NaN.
    Nan,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum On {
    Cpu,
    Gpu,
    Nothing,
}

impl Mistake {
    /// What x is multiplied by, and what is added to the last element.
    fn numbers(self) -> (f32, f32) {
        match self {
            Mistake::None => (2.0, 0.0),
            Mistake::Zeros => (0.0, 0.0),
            Mistake::FivePercent => (2.1, 0.0),
            Mistake::Nan => (2.0, f32::NAN),
        }
    }
}

impl Planted {
    fn numbers(&self, on: On) -> (f32, f32) {
        if self.on == on { self.mistake } else { Mistake::None }.numbers()
    }
}

const KERNEL: &str = r#"
extern "C" __global__ void planted(const T *x, T *y) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    float v = FACTOR * to_float(x[i]);
    if (i == N - 1) v += LAST;
    from_float(v, y[i]);
}
"#;

impl Op for Planted {
    fn name(&self) -> &'static str {
        "planted"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        vec![x[0].clone()]
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (factor, last) = self.numbers(On::Cpu);
        let (x, y) = (x[0].f32(), y[0].f32());
        y.iter_mut().zip(x).for_each(|(y, &x)| *y = factor * x);
        y[x.len() - 1] += last;
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        let (factor, last) = self.numbers(On::Gpu);
        let n = io.y[0].elements();
        Launch::new(KERNEL, "planted")
            .define_type("T", io.x[0].dtype)
            .define("N", format!("{n}ull"))
            .define_f32("FACTOR", factor)
            .define_f32("LAST", last)
            .grid(n.div_ceil(256), 1, 1)
            .all(io)
            .code()
    }

    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![dy[0].map(|d| d * 2.0)]
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(2 * x[0].bytes())
    }
}

fn planted<'g>(x: &[Var<'g>], mistake: Mistake, on: On) -> Vec<Var<'g>> {
    // The CPU code cannot tell which type its numbers had.
    let on = if on == On::Cpu && x[0].dtype() == DType::F32 { On::Nothing } else { on };
    x[0].recorder().op(Planted { mistake, on }, x)
}

const INPUT: &[In] = &[In(&[70, 33], Fill::Normal)];

/// Cases for the CPU, then those for a GPU; the first of each is correct.
pub const CASES: &[Case] = &[
    Case::new("nothing", INPUT, |x| planted(x, Mistake::None, On::Cpu)),
    Case::new("zeros", INPUT, |x| planted(x, Mistake::Zeros, On::Cpu)),
    Case::new("5% off", INPUT, |x| planted(x, Mistake::FivePercent, On::Cpu)),
    Case::new("no number", INPUT, |x| planted(x, Mistake::Nan, On::Cpu)),
    Case::new("nothing", INPUT, |x| planted(x, Mistake::None, On::Gpu)),
    Case::new("zeros", INPUT, |x| planted(x, Mistake::Zeros, On::Gpu)),
    Case::new("5% off", INPUT, |x| planted(x, Mistake::FivePercent, On::Gpu)),
    Case::new("no number", INPUT, |x| planted(x, Mistake::Nan, On::Gpu)),
];

/// Whether the checks find each error in each narrow type, and none in the correct op.
pub fn check_planted(device: &Device) -> Vec<Outcome> {
    let (cpu, gpu) = CASES.split_at(CASES.len() / 2);
    let cases = if device.target() == Target::Cpu { cpu } else { gpu };
    let mut all = vec![];
    for (i, case) in cases.iter().enumerate() {
        let outcomes = check_case("planted", case, device);
        for dtype in [DType::BF16, DType::F16] {
            let name = dtype.to_string();
            let own: Vec<&Outcome> = outcomes.iter().filter(|o| o.name.contains(&format!("({name}"))).collect();
            let found = own.iter().find_map(|o| o.problem());
            let verdict = match (i, found) {
                _ if own.is_empty() => Verdict::Failed(format!("nothing was checked in {name}")),
                (0, Some(problem)) => Verdict::Failed(format!("nothing is wrong, but it says: {problem}")),
                (1.., None) => Verdict::Failed("the mistake was not found".into()),
                _ => Verdict::Passed(0.0),
            };
            all.push(Outcome { name: format!("planted in {name}: {}", case.name), verdict });
        }
    }
    all
}
