//! Every case of every op: gradient, repeatability, fused against unfused, narrow types.

use kiln_engine::cpu::{View, ViewMut};
use kiln_engine::kernel::{Code, Io};
use kiln_engine::op::{Case, Cost, Fill, Grads, In, Narrow, Op, Port, rounded};
use kiln_engine::ops::pointwise::run::unary;
use kiln_engine::{Cpu, DType, Device, Meta, OPS, Var, check};
use std::sync::Mutex;

#[test]
fn every_case_of_every_op() {
    let cases = OPS.iter().flat_map(|op| {
        assert!(op.cases.iter().any(|c| !c.bench), "{} has no case to check", op.name);
        op.cases.iter().filter(|c| !c.bench).map(|case| (op.name, case))
    });
    let left = Mutex::new(cases);
    let next = || left.lock().unwrap().next();
    let check = || {
        let device = Device::cpu(Cpu::new(2));
        let outcomes = std::iter::from_fn(next).flat_map(|(op, case)| check::check_case(op, case, &device));
        outcomes.filter_map(|o| Some(format!("{}: {}", o.name, o.problem()?))).collect::<Vec<_>>()
    };
    let problems = std::thread::scope(|s| {
        let other = s.spawn(check);
        [check(), other.join().unwrap()].concat()
    });
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// x * sigmoid(x), with one of several mistakes in its gradient.
#[derive(Debug)]
struct Wrong(Mistake);

#[derive(Debug, Clone, Copy)]
enum Mistake {
    None,
    ForgetsDy,
    OnePercent,
    Missing,
}

impl Op for Wrong {
    fn name(&self) -> &'static str {
        "wrong"
    }
    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        vec![x[0].clone()]
    }
    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let sigmoid = |v| unary(kiln_engine::ops::pointwise::Un::Sigmoid, v);
        y[0].f32().iter_mut().zip(x[0].f32()).for_each(|(y, &x)| *y = x * sigmoid(x));
    }
    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        rounded(at)
    }

    fn cuda(&self, _: &Io) -> Code {
        unreachable!("it runs on the CPU only")
    }
    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let s = x[0].sigmoid();
        let slope = s + x[0] * s * (-s + 1.0);
        let d = dy[0].unwrap();
        vec![match self.0 {
            Mistake::None => Some(d * slope),
            Mistake::ForgetsDy => Some(slope),
            Mistake::OnePercent => Some(d * slope * 1.01),
            Mistake::Missing => None,
        }]
    }
    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(2 * x[0].bytes())
    }
}

#[test]
fn a_planted_mistake_is_found() {
    const INPUT: &[In] = &[In(&[7, 5], Fill::Normal)];
    let verdict = |case: Case| check::check_case("wrong", &case, &Device::cpu(Cpu::new(2)))[0].problem().map(str::to_string);
    assert_eq!(verdict(Case::new("right", INPUT, |x| x[0].recorder().op(Wrong(Mistake::None), x))), None);
    let forgets = verdict(Case::new("forgets", INPUT, |x| x[0].recorder().op(Wrong(Mistake::ForgetsDy), x)));
    assert!(forgets.as_ref().is_some_and(|p| p.contains("differences say")), "{forgets:?}");
    let percent = verdict(Case::new("percent", INPUT, |x| x[0].recorder().op(Wrong(Mistake::OnePercent), x)));
    assert!(percent.as_ref().is_some_and(|p| p.contains("differences say")), "{percent:?}");
    let missing = verdict(Case::new("missing", INPUT, |x| x[0].recorder().op(Wrong(Mistake::Missing), x)));
    assert!(missing.as_ref().is_some_and(|p| p.contains("does not depend")), "{missing:?}");
}

/// Zeros, five percent and no numbers in narrow types; and nothing is found where nothing is wrong.
#[test]
fn planted_kernels_in_narrow_types_are_found() {
    let outcomes = check::check_planted(&Device::cpu(Cpu::new(2)));
    assert_eq!(outcomes.len(), 8);
    let missed: Vec<String> = outcomes.iter().filter_map(|o| Some(format!("{}: {}", o.name, o.problem()?))).collect();
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// Room beyond the usual has a reason, and a kernel that is a few percent off has none anywhere.
#[test]
fn no_case_allows_more_than_three_percent() {
    for op in OPS {
        for (name, (times, why)) in op.cases.iter().filter_map(|c| Some((c.name, c.roundings?))) {
            assert!(times > 3.0 && times * DType::BF16.rounding() as f64 <= 0.03 && why.len() > 10, "{}: {name}: {times}, {why}", op.name);
        }
    }
}

/// An op whose meaning in plain ops is another by a percent.
#[derive(Debug)]
struct Other;

impl Op for Other {
    fn name(&self) -> &'static str {
        "other"
    }
    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        vec![x[0].clone()]
    }
    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        y[0].f32().copy_from_slice(x[0].f32());
    }
    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        rounded(at)
    }

    fn cuda(&self, _: &Io) -> Code {
        unreachable!("it runs on the CPU only")
    }
    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        dy.to_vec()
    }
    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(2 * x[0].bytes())
    }
    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        Some(vec![x[0].exp().ln() * 1.01])
    }
}

#[test]
fn an_op_that_is_not_its_unfused_form_is_found() {
    let case = Case::new("percent", &[In(&[7, 5], Fill::Normal)], |x| x[0].recorder().op(Other, x));
    let found = check::check_case("other", &case, &Device::cpu(Cpu::new(2)));
    let problems: Vec<_> = found.iter().filter_map(|o| o.problem()).collect();
    assert!(problems.len() == 1 && problems[0].contains("off by"), "{problems:?}");
}
