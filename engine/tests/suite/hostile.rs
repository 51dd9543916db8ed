//! Ops that say of their memory what is not so, as an op of another crate may: an error when they are planned or loaded, before anything runs. Without the
//! check, each of these would have been a pointer to somebody else's memory.

use kiln_engine::cpu::{View, ViewMut};
use kiln_engine::kernel::{Code, Io};
use kiln_engine::op::{Cost, Grads, Narrow, Op, Port, no_gradient, rounded};
use kiln_engine::passes::Target;
use kiln_engine::plan::{Buffer, Home, Plan};
use kiln_engine::{Compiled, Cpu, DType, Data, Device, Error, Meta, Program, Recorder, Store, Switches};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What it says of its memory: before a moment that the test chooses, and after it.
#[derive(Clone, Debug, Default, PartialEq)]
struct Words {
    is_view: bool,
    alias: Option<(usize, Vec<usize>)>,
    reuse: Vec<(usize, usize)>,
    workspace: usize,
}

#[derive(Debug)]
struct Liar {
    words: [Words; 2],
    later: Arc<AtomicBool>,
}

impl Liar {
    fn says(&self) -> &Words {
        &self.words[usize::from(self.later.load(Ordering::SeqCst))]
    }
}

impl Op for Liar {
    fn name(&self) -> &'static str {
        "liar"
    }
    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        vec![x[0].clone()]
    }
    fn cpu(&self, x: &[View], y: &mut [ViewMut], workspace: &mut [f32]) {
        workspace.fill(7.0);
        if let Some(x) = x[0].f32().get(..y[0].f32().len()) {
            y[0].f32().copy_from_slice(x);
        }
    }
    fn vjp<'g>(&self, x: &[kiln_engine::Var<'g>], _: &[kiln_engine::Var<'g>], _: &[Option<kiln_engine::Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }
    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(2 * x[0].bytes())
    }
    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        rounded(at)
    }
    fn cuda(&self, _: &Io) -> Code {
        Code::default()
    }
    fn is_view(&self) -> bool {
        self.says().is_view
    }
    fn alias(&self, _: &Meta, _: &[usize]) -> Option<(usize, Vec<usize>)> {
        self.says().alias.clone()
    }
    fn reuse(&self) -> Vec<(usize, usize)> {
        self.says().reuse.clone()
    }
    fn workspace(&self, _: &[Meta]) -> usize {
        self.says().workspace
    }
}

/// y = silu(liar(silu(x))) of 64 numbers, compiled while it says the first words, and loaded while it says the second, after a change of the plan.
fn loaded(words: [Words; 2], change: impl FnOnce(&mut Plan)) -> Result<(Program, Store), Error> {
    let later = Arc::new(AtomicBool::new(false));
    let r = Recorder::new();
    let x = r.feed("x", &[8, 8], DType::F32).silu();
    r.output("y", r.op1(Liar { words, later: later.clone() }, &[x]).silu());
    let mut c = Compiled::new(r.finish(), &Switches::default(), Target::Cpu)?;
    change(&mut c.plan);
    later.store(true, Ordering::SeqCst);
    let mut store = Store::new(0);
    Ok((Program::from_compiled(c, &Device::cpu(Cpu::new(1)), &mut store)?, store))
}

fn ran(words: [Words; 2]) -> Result<Vec<f32>, Error> {
    let (mut p, mut store) = loaded(words, |_| ())?;
    p.run(&mut store, &[("x", Data::F32(&[1.0; 64]))])?;
    p.read("y", &store)
}

#[track_caller]
fn refused(words: [Words; 2], parts: &[&str]) {
    refused_after(words, |_| (), parts);
}

#[track_caller]
fn refused_after(words: [Words; 2], change: impl FnOnce(&mut Plan), parts: &[&str]) {
    match loaded(words.clone(), change) {
        Err(Error::Plan(said)) => assert!(parts.iter().all(|p| said.contains(p)), "{said} / {parts:?}"),
        other => panic!("{words:?}: {:?}", other.err()),
    }
}

fn view(offset: usize, strides: &[usize]) -> Words {
    Words { is_view: true, alias: Some((offset, strides.to_vec())), ..Words::default() }
}

fn always(words: Words) -> [Words; 2] {
    [words.clone(), words]
}

#[test]
fn an_op_that_keeps_its_word_runs() {
    let expected = |v: f32| v / (1.0 + (-v).exp());
    for words in [Words::default(), Words { workspace: 100, ..Words::default() }, view(0, &[8, 1]), view(0, &[1, 8]), view(0, &[0, 0])] {
        let y = ran(always(words.clone())).unwrap();
        assert!(y.iter().all(|y| (y - expected(expected(1.0))).abs() < 1e-6), "{words:?}: {y:?}");
    }
    // Scratch memory that is less than was planned is there.
    ran([Words { workspace: 100, ..Words::default() }, Words::default()]).unwrap();
}

#[test]
fn a_view_that_leads_out_of_its_input_is_refused() {
    let out = ["'liar'", "Op::alias", "256 bytes"];
    for (offset, strides) in [
        (1, &[8, 1][..]),
        (64, &[0, 0]),
        (usize::MAX, &[8, 1]),
        (usize::MAX / 4, &[8, 1]),
        (0, &[9, 1]),
        (0, &[8, 2]),
        (0, &[usize::MAX, 1]),
        (0, &[usize::MAX / 7 + 1, 1]),
        // Of too few and of too many dimensions.
        (0, &[8]),
        (0, &[]),
        (0, &[8, 1, 1]),
    ] {
        refused(always(view(offset, strides)), &out);
    }
    // A view of nothing, not even of a copy.
    refused(always(Words { is_view: true, ..Words::default() }), &out);
}

#[test]
fn an_op_that_says_another_thing_later_is_refused() {
    let reuses = Words { reuse: vec![(0, 0)], ..Words::default() };
    assert!(ran(always(reuses.clone())).is_ok());
    // What was planned as one buffer would be two slices that overlap.
    refused([reuses, Words::default()], &["'liar'", "Op::reuse"]);
    refused([view(0, &[8, 1]), Words::default()], &["'liar'"]);
    // Scratch memory that was not planned.
    let asks = |workspace| Words { workspace, ..Words::default() };
    for (first, then) in [(0, 1), (16, 17), (100, 1 << 30), (1, usize::MAX)] {
        refused([asks(first), asks(then)], &["'liar'", "scratch memory"]);
    }
}

#[test]
fn scratch_memory_that_no_machine_has_is_refused() {
    for elements in [usize::MAX, usize::MAX / 4, usize::MAX / 4 + 1, 1 << 62, 1 << 61, 1 << 40] {
        refused(always(Words { workspace: elements, ..Words::default() }), &["'liar'", "scratch memory"]);
    }
}

/// A plan's fields are open to whoever compiles.
#[test]
fn a_plan_that_was_changed_is_refused() {
    let change = |change: &dyn Fn(&mut Plan), parts: &[&str]| refused_after(always(Words::default()), |p| change(p), parts);
    fn arena(p: &mut Plan) -> &mut Buffer {
        p.buffers.iter_mut().find(|b| matches!(b.home, Home::Arena(_))).unwrap()
    }
    change(&|p| p.memory.activations -= 1, &["arena"]);
    change(&|p| p.memory = Default::default(), &["arena"]);
    for at in [usize::MAX, usize::MAX - 255, 1 << 40, 1] {
        change(&|p| arena(p).home = Home::Arena(at), &["arena"]);
    }
    change(&|p| arena(p).bytes = 1 << 50, &["arena"]);
    change(&|p| arena(p).bytes = 8, &["would not lie in its buffer of 8 bytes"]);
    change(&|p| arena(p).last = 0, &["while that may hold something else"]);
    change(&|p| p.spots.truncate(1), &["nodes"]);
    change(&|p| p.spots.last_mut().unwrap().clear(), &["would not lie"]);
    change(&|p| p.spots.last_mut().unwrap()[0].buffer = 1000, &["would not lie"]);
    // All in one place.
    let all = |p: &mut Plan| p.buffers.iter_mut().filter(|b| matches!(b.home, Home::Arena(_))).for_each(|b| b.home = Home::Arena(0));
    let words = always(Words { workspace: 4, ..Words::default() });
    refused_after(words, all, &["overlaps"]);
    // The feed is overwritten.
    change(
        &|p| {
            let feed = p.buffers.iter().position(|b| matches!(b.home, Home::Source(_))).unwrap();
            p.spots.last_mut().unwrap()[0].buffer = feed;
        },
        &["a feed or a constant"],
    );
    let copy = |input, out, at| move |p: &mut Plan| p.copies.push(kiln_engine::plan::Copy { node: 2, input, out, at });
    for (input, out, at) in [(0, 0, 1), (0, 0, usize::MAX), (1, 0, 0), (0, 1, 0)] {
        change(&copy(input, out, at), &["copy"]);
    }
    change(&|p| p.stores.push((0, kiln_engine::graph::Value { node: 1, out: 0 })), &["no state"]);
}

/// What passes before a program is loaded is a small part of what compiling takes.
#[test]
fn plans_of_many_buffers_are_looked_at_in_no_time() {
    let r = Recorder::new();
    let mut x = r.feed("x", &[64], DType::F32);
    let mut all = vec![];
    for _ in 0..3000 {
        x = r.op1(Liar { words: always(Words { workspace: 16, ..Words::default() }), later: Arc::default() }, &[x]);
        all.push(x);
    }
    // All of them are in use up to the end.
    all.into_iter().enumerate().for_each(|(i, x)| r.output(&format!("y{i}"), x));
    let c = Compiled::new(r.finish(), &Switches::default(), Target::Cpu).unwrap();
    assert!(c.plan.buffers.len() >= 6000);
    let began = std::time::Instant::now();
    c.plan.verify(&c.graph).unwrap();
    println!("{} buffers in {:?}", c.plan.buffers.len(), began.elapsed());
}
