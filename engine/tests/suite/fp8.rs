//! FP8: what is rounded, with which scales, and when.

use kiln_engine::ops::experts::mixture;
use kiln_engine::ops::matmul::Matmul;
use kiln_engine::passes::{Receipt, Target, keeps_weights, repeated};
use kiln_engine::program::imagined;
use kiln_engine::{Compiled, Cpu, DType, Data, Device, Error, Init, Program, Recorder, Store, Switches};

const ROWS: usize = 256;

/// Two linear layers and a narrow one, trained by plain gradient descent.
fn step(r: &Recorder) {
    let w = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.2 });
    let params = [w("a", &[48, 32]), w("b", &[32, 48]), w("narrow", &[16, 32])];
    let x = r.feed("x", &[ROWS, 32], DType::F32);
    let h = r.scope("mlp", || x + x.linear(params[0]).silu().linear(params[1]));
    let loss = h.square().mean() + r.scope("narrow", || h.linear(params[2])).square().mean();
    r.output("loss", loss);
    for (p, g) in params.into_iter().zip(r.grad(loss, &params)) {
        r.update(p, p - g * 0.1);
    }
}

fn graph() -> kiln_engine::Graph {
    let r = Recorder::new();
    step(&r);
    r.finish()
}

fn with(fp8: &str) -> Switches {
    Switches::default().with("fp8", fp8).unwrap()
}

fn receipt(receipts: &[Receipt]) -> &Receipt {
    receipts.iter().find(|r| r.pass == "fp8").unwrap()
}

struct Run {
    program: Program,
    store: Store,
}

impl Run {
    fn new(fp8: &str) -> Run {
        let mut store = Store::new(3);
        let program = Program::load(graph(), &with(fp8), &Device::cpu(Cpu::new(2)), &mut store).unwrap();
        Run { program, store }
    }

    fn step(&mut self, x: &[f32]) -> f32 {
        self.program.run(&mut self.store, &[("x", Data::F32(x))]).unwrap();
        self.program.scalar("loss", &self.store).unwrap()
    }

    fn state(&self, prefix: &str) -> Vec<f32> {
        let name = self.store.iter().map(|(n, _)| n.to_string()).find(|n| n.starts_with(prefix)).unwrap();
        self.store.get(&name).unwrap().f32().unwrap()
    }
}

fn numbers(seed: u32) -> Vec<f32> {
    (0..ROWS as u32 * 32)
        .map(|i| ((i.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(97)) >> 8) % 2001) as f32 / 1000.0 - 1.0)
        .collect()
}

#[test]
fn linear_layers_are_rounded_forward_and_backward_and_small_ones_are_not() {
    let c = Compiled::new(graph(), &with("auto,least=16"), Target::Cpu).unwrap();
    let r = receipt(&c.receipts);
    // Of each of two layers: the output, the gradient of the weight, and of the second layer's input (nothing asks for x's).
    assert_eq!(r.applied, 5, "{}", r.summary());
    assert!(r.summary().contains("a weight of 32 x 16 is too small") && r.summary().contains("narrow"), "{}", r.summary());
    let fp8: Vec<_> = c.graph.nodes.iter().filter(|n| n.outputs.iter().any(|m| m.dtype.is_fp8())).collect();
    assert!(fp8.iter().any(|n| n.outputs[0].dtype == DType::E4M3) && fp8.iter().any(|n| n.outputs[0].dtype == DType::E5M2));
    // Weights are rounded from f32, not from a copy.
    assert_eq!(
        fp8.iter()
            .filter(|n| n
                .inputs
                .iter()
                .any(|v| c.graph.nodes[v.node].name() == "state" && v.out == 0 && c.graph.meta(*v).elements() == 48 * 32))
            .count(),
        2
    );
}

/// However large the least size is: no product of it wraps around to a small one.
#[test]
fn a_least_size_that_no_weight_has_leaves_everything_out() {
    for least in [1 << 30, 1 << 56, usize::MAX] {
        let c = Compiled::new(graph(), &with(&format!("auto,least={least}")), Target::Cpu).unwrap();
        let r = receipt(&c.receipts);
        assert!(r.applied == 0 && r.declined.len() == 3, "least={least}: {}", r.summary());
    }
}

#[test]
fn programs_without_gradients_and_old_gpus() {
    let r = Recorder::new();
    r.output("y", r.feed("x", &[ROWS, 32], DType::F32).linear(r.param("a", &[48, 32], Init::Full(1.0))));
    let c = Compiled::new(r.finish(), &with("auto,least=16"), Target::Cpu).unwrap();
    assert_eq!((receipt(&c.receipts).applied, receipt(&c.receipts).declined.len()), (0, 0));
    for (sm, works) in [(80, false), (89, true), (90, true)] {
        match (Compiled::new(graph(), &with("auto,least=16"), imagined(sm)), works) {
            (Ok(_), true) => {}
            (Err(Error::PassSetting { problem, .. }), false) => assert!(problem.contains("8.9") && problem.contains("8.0"), "{problem}"),
            (other, _) => panic!("sm_{sm}: {:?}", other.map(|c| c.receipts).map_err(|e| e.to_string())),
        }
    }
}

/// Until the warm-up is over, every bit is as without the pass; then the loss differs, but little; scales are the smallest powers of two that keep the
/// largest values of the last steps in range.
#[test]
fn after_a_warm_up_scales_follow_the_largest_values() {
    const WARM: usize = 3;
    let (mut off, mut on) = (Run::new("off"), Run::new("auto,least=16,warmup=3,history=4"));
    for step in 0..10 {
        let x = numbers(step as u32);
        let (plain, rounded) = (off.step(&x), on.step(&x));
        if step < WARM {
            assert_eq!(plain.to_bits(), rounded.to_bits(), "step {step}");
        } else {
            let apart = (plain - rounded).abs() / plain;
            assert!(apart > 1e-6 && apart < 0.02, "step {step}: {plain} and {rounded}");
        }
        assert_eq!(on.program.warmed_up().is_some(), step == WARM);
    }
    assert_eq!(on.state("fp8.steps"), [10.0]);
    let (history, scales) = (on.state("fp8.history"), on.state("fp8.scale"));
    for (seen, scale) in history.chunks(4).zip(scales.chunks(4)) {
        let (most, scale) = (seen.iter().fold(0.0f32, |a, b| a.max(*b)), scale[0]);
        assert!(seen.iter().all(|v| *v > 0.0) && scale.log2().fract() == 0.0, "{seen:?} {scale}");
        let top = most / scale;
        assert!((224.0..=448.0).contains(&top) || (28_672.0..=57_344.0).contains(&top), "{most} by {scale}");
    }
}

/// Of zeros no scale follows: the smallest number there is would make zeros of what comes next.
#[test]
fn a_step_of_zeros_leaves_the_scales_alone() {
    let (mut off, mut on) = (Run::new("off"), Run::new("auto,least=16,warmup=1,history=4"));
    let zeros = vec![0.0; numbers(0).len()];
    for x in [&zeros, &zeros, &numbers(1), &numbers(2)] {
        let (plain, rounded) = (off.step(x), on.step(x));
        assert!((plain - rounded).abs() <= 0.02 * plain, "{plain} and {rounded}");
        assert_eq!(plain == 0.0, x.iter().all(|v| *v == 0.0));
        assert!(on.state("fp8.scale").chunks(4).all(|s| s[0] > 1e-12), "{:?}", on.state("fp8.scale"));
    }
}

/// The largest value of the last few steps counts, and not that of this step alone.
#[test]
fn scales_remember_a_large_step_and_then_forget_it() {
    let mut run = Run::new("auto,least=16,warmup=1,history=3");
    let largest = |run: &Run| run.state("fp8.scale").chunks(4).map(|s| s[0]).fold(0.0, f32::max);
    let mut seen = vec![];
    for (i, times) in [1.0, 64.0, 1.0, 1.0, 1.0, 1.0].into_iter().enumerate() {
        run.step(&numbers(i as u32).iter().map(|v| v * times).collect::<Vec<_>>());
        seen.push(largest(&run));
    }
    assert!(seen[1] >= 16.0 * seen[0] && seen[2] == seen[1] && seen[3] == seen[1] && seen[4] < seen[1], "{seen:?}");
}

/// An infinite input makes the step's loss no number, so that an optimizer skips it; the scales stay as they are, and the next step is as if nothing had been.
#[test]
fn what_overflows_is_noticed_and_leaves_no_trace_in_the_scales() {
    let mut run = Run::new("auto,least=16,warmup=1");
    for i in 0..4 {
        run.step(&numbers(i));
    }
    let before = (run.state("fp8.history"), run.state("fp8.scale"));
    let params: Vec<Vec<f32>> = ["a", "b", "narrow"].map(|n| run.state(n)).into();
    let mut x = numbers(9);
    x[77] = f32::INFINITY;
    assert!(!run.step(&x).is_finite());
    // Of what the infinity reached nothing is kept; a weight's largest value is as finite as ever.
    let after = (run.state("fp8.history"), run.state("fp8.scale"));
    assert_eq!(before.1, after.1);
    assert!(after.0.iter().all(|v| v.is_finite()));
    // As an optimizer that skips would leave it.
    for (name, values) in ["a", "b", "narrow"].iter().zip(&params) {
        let meta = run.store.get(name).unwrap().meta.clone();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        run.store.set(name, &meta, &bytes).unwrap();
    }
    let mut plain = Run::new("off");
    for (name, values) in ["a", "b", "narrow"].iter().zip(&params) {
        let meta = plain.store.get(name).unwrap().meta.clone();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        plain.store.set(name, &meta, &bytes).unwrap();
    }
    let (a, b) = (run.step(&numbers(10)), plain.step(&numbers(10)));
    assert!((a - b).abs() < 0.02 * b, "{a} {b}");
}

/// With scaling=current a tensor's own values decide, from the first step on, however large they are.
#[test]
fn current_scaling_needs_no_history() {
    let problem = Compiled::new(graph(), &with("auto,scaling=current,gemms=bf16"), Target::Cpu).err().unwrap().to_string();
    assert!(problem.contains("gemms=bf16 only observes"), "{problem}");
    for unused in ["history=3", "warmup=5"] {
        let problem = Compiled::new(graph(), &with(&format!("auto,scaling=current,{unused}")), Target::Cpu).err().unwrap().to_string();
        assert!(problem.contains(&format!("{unused} is for scaling=delayed")), "{problem}");
    }
    for size in [1e-6, 1.0, 1e5] {
        let x: Vec<f32> = numbers(4).iter().map(|v| v * size).collect();
        let (mut off, mut on) = (Run::new("off"), Run::new("auto,least=16,scaling=current"));
        let (plain, rounded) = (off.step(&x), on.step(&x));
        assert!((plain - rounded).abs() < 0.02 * plain && plain != rounded, "{size}: {plain} {rounded}");
        assert!(on.store.iter().all(|(n, _)| !n.starts_with("fp8")));
    }
}

/// GEMMs without an FP8 kernel are named once each, whatever their gradients do, and not at all where nothing is trained.
#[test]
fn routers_experts_and_nf4_weights_are_declined_with_their_reason() {
    let record = |trained: bool| {
        let r = Recorder::new();
        let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.2 });
        let (up, down, adapter) = (param("up", &[16, 64, 32]), param("down", &[16, 32, 32]), param("adapter", &[32, 32]));
        let x = r.feed("x", &[ROWS, 32], DType::F32).linear(adapter);
        let h = r.scope("experts", || mixture(x, Some(param("router", &[16, 32])), up, down, 2).0);
        let loss = r.scope("frozen", || h.nf4_linear(r.nf4("four", 32, 32))).square().mean();
        r.output("loss", loss);
        if trained {
            r.grad(loss, &[up, down, adapter]).into_iter().enumerate().for_each(|(i, d)| r.output(&format!("d{i}"), d));
        }
        receipt(&Compiled::new(r.finish(), &with("auto,least=8"), Target::Cpu).unwrap().receipts).clone()
    };
    let own = |r: &Receipt, why: &str| -> Vec<String> { r.declined.iter().filter(|d| d.0.contains(why)).map(|d| d.1.clone()).collect() };
    let trained = record(true);
    assert_eq!(own(&trained, "experts have no FP8 kernel"), ["experts", "experts"], "{}", trained.summary());
    assert!(trained.summary().contains("routers are not rounded to FP8"), "{}", trained.summary());
    assert_eq!(own(&trained, "NF4"), ["frozen"], "{}", trained.summary());
    assert!(trained.applied > 0, "the adapter beside them is rounded: {}", trained.summary());
    assert_eq!(record(false).sites(), 0);
}

/// Adapters learn from gradients that passed through frozen weights.
#[test]
fn frozen_weights_stay_as_they_are_unless_asked() {
    let compiled = |fp8: &str| {
        let r = Recorder::new();
        let (frozen, a) = (r.frozen("w", &[32, 32], Init::Normal { std: 0.2 }), r.param("a", &[32, 32], Init::Normal { std: 0.2 }));
        let loss = r.feed("x", &[ROWS, 32], DType::F32).linear(a).linear(frozen).square().mean();
        r.output("loss", loss);
        r.output("da", r.grad(loss, &[a])[0]);
        receipt(&Compiled::new(r.finish(), &with(fp8), Target::Cpu).unwrap().receipts).clone()
    };
    // Also where several are one: queries, keys and values.
    let merged = |fp8: &str| {
        let r = Recorder::new();
        let a = r.param("a", &[32, 32], Init::Normal { std: 0.2 });
        let x = r.feed("x", &[ROWS, 32], DType::F32).linear(a);
        let one = |name: &str| x.linear(r.frozen(name, &[32, 32], Init::Normal { std: 0.2 }));
        let loss = r.block("block", || one("q") * one("k") * one("v")).square().mean();
        r.output("loss", loss);
        r.output("da", r.grad(loss, &[a])[0]);
        receipt(&Compiled::new(r.finish(), &with(fp8), Target::Cpu).unwrap().receipts).clone()
    };
    let (left, rounded) = (merged("auto,least=8"), merged("auto,least=8,frozen=fp8"));
    assert!(left.applied == 2 && rounded.applied > left.applied, "{} {}", left.summary(), rounded.summary());
    let (left, rounded) = (compiled("auto,least=8"), compiled("auto,least=8,frozen=fp8"));
    // The adapter's output and gradient; with the frozen weight, also its output and the gradient of its input.
    assert!(left.applied == 2 && left.summary().contains("the weight is frozen"), "{}", left.summary());
    assert!(rounded.applied == 4 && rounded.declined.is_empty(), "{}", rounded.summary());
}

/// What is rounded where it is computed is computed once, also where something else reads it.
#[test]
fn rounding_takes_in_the_arithmetic_before_it() {
    let nodes = |value: &str| {
        let r = Recorder::new();
        kiln_engine::PASSES.iter().find(|p| p.name() == "fuse-quantize").unwrap().example(&r);
        let switches = Switches::default().with("fuse-quantize", value).unwrap();
        let g = Compiled::new(r.finish(), &switches, Target::Cpu).unwrap().graph;
        let count = |name: &str| g.nodes.iter().filter(|n| n.name() == name).count();
        (count("pointwise"), count("quantize"))
    };
    let (apart, fused) = (nodes("off"), nodes("auto"));
    assert!(apart.0 > 0 && fused.0 == 0, "{apart:?} {fused:?}");
    assert!(fused.1 < apart.1, "two results of one kernel: {apart:?} {fused:?}");
}

/// A layer and a head, whose logits go to a cross-entropy: as a fused loss or written out.
fn with_head(r: &Recorder) {
    let (a, head) = (r.param("a", &[32, 32], Init::Normal { std: 0.2 }), r.param("head", &[48, 32], Init::Normal { std: 0.2 }));
    let x = r.feed("x", &[ROWS, 32], DType::F32);
    let h = r.block("block", || x.linear(a).silu());
    let targets = r.feed("targets", &[ROWS], DType::I32);
    let loss = h.linear(head).cross_entropy(targets).mean();
    r.output("loss", loss);
    r.grad(loss, &[a, head]).into_iter().zip([a, head]).for_each(|(g, p)| r.update(p, p - g * 0.1));
}

#[test]
fn the_loss_head_and_pruned_weights_are_left_alone() {
    let compiled = |switches: Switches| {
        let r = Recorder::new();
        with_head(&r);
        Compiled::new(r.finish(), &switches, Target::Cpu).unwrap().receipts
    };
    let receipts = compiled(with("require,least=8"));
    let r = receipt(&receipts);
    assert!(r.applied == 2 && r.summary().contains("the loss head is not rounded to FP8"), "{}", r.summary());
    let receipts = compiled(with("auto,least=8").with("sparse-2:4", "auto,least=8").unwrap());
    let r = receipt(&receipts);
    assert!(r.applied == 0 && r.summary().contains("its weight is computed at every step, as sparse-2:4 does"), "{}", r.summary());
}

#[test]
fn sums_are_as_the_setting_says() {
    for (setting, forward, backward) in [("mixed", "Fast", "F32"), ("fast", "Fast", "Fast"), ("f32", "F32", "F32")] {
        let c = Compiled::new(graph(), &with(&format!("auto,least=16,sums={setting}")), Target::Cpu).unwrap();
        let of = |back: bool| {
            let mut found: Vec<String> = c
                .graph
                .nodes
                .iter()
                .filter(|n| n.backward == back)
                .filter_map(|n| n.op::<Matmul>()?.scaled.as_ref().map(|s| format!("{s:?}")))
                .collect();
            found.dedup();
            found
        };
        assert_eq!((of(false), of(true)), (vec![forward.to_string()], vec![backward.to_string()]), "{setting}");
    }
}

/// Gradients of a micro-batch, which changes no weight.
fn micro() -> kiln_engine::Graph {
    let r = Recorder::new();
    let w = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.2 });
    let params = [w("a", &[48, 32]), w("b", &[32, 48])];
    let x = r.feed("x", &[ROWS, 32], DType::F32);
    let loss = (x + x.linear(params[0]).silu().linear(params[1])).square().mean();
    r.output("loss", loss);
    r.grad(loss, &params).into_iter().zip(["da", "db"]).for_each(|(g, name)| r.output(name, g));
    r.finish()
}

/// The first micro-batch of a step rounds the weights and keeps them, the others read what it kept: the same bits as where each of them rounds.
#[test]
fn weights_are_rounded_once_for_several_micro_batches() {
    for scaling in ["current", "delayed,warmup=0"] {
        let switches = with(&format!("auto,least=16,scaling={scaling}"));
        let [first, others] = repeated(&switches, Target::Cpu).unwrap();
        let mut store = Store::new(3);
        let mut load = |switches: &Switches| Program::load(micro(), switches, &Device::cpu(Cpu::new(2)), &mut store).unwrap();
        let (mut first, mut others) = (load(&first), load(&others));
        let mut alone = Store::new(3);
        let mut each = Program::load(micro(), &switches, &Device::cpu(Cpu::new(2)), &mut alone).unwrap();
        let run = |p: &mut Program, store: &mut Store, x: u32| -> Vec<Vec<u32>> {
            p.run(store, &[("x", Data::F32(&numbers(x)))]).unwrap();
            ["loss", "da", "db"].map(|n| p.read(n, store).unwrap().iter().map(|v| v.to_bits()).collect()).into()
        };
        // With delayed scaling, the scales of the first runs come from nothing: later ones are compared.
        for x in 0..4 {
            run(&mut first, &mut store, x);
            run(&mut each, &mut alone, x);
        }
        for x in 4..7 {
            let one = run(if x == 4 { &mut first } else { &mut others }, &mut store, x);
            assert!(one == run(&mut each, &mut alone, x), "{scaling}: micro-batch {x}");
        }
        // It reads what was kept, and not the weights.
        let before = run(&mut others, &mut store, 9);
        let meta = store.get("a").unwrap().meta.clone();
        store.set("a", &meta, &vec![0; meta.bytes()]).unwrap();
        let after = run(&mut others, &mut store, 9);
        assert!(before[0] == after[0] && run(&mut first, &mut store, 9)[0] != after[0], "{scaling}");
    }
    let quantized = |switches: &Switches| {
        let c = Compiled::new(micro(), switches, Target::Cpu).unwrap();
        let weights = |n: &kiln_engine::graph::Node| n.name() == "quantize" && c.graph.state_role(n.inputs[0]).is_some();
        (c.graph.nodes.iter().filter(|n| weights(n)).count(), keeps_weights(&c.graph))
    };
    let [first, others] = repeated(&with("auto,least=16"), Target::Cpu).unwrap();
    assert_eq!([&with("auto,least=16"), &first, &others].map(quantized), [(2, false), (2, true), (0, true)]);
    // Where each rounds for itself, both programs are the same.
    let each = repeated(&with("auto,least=16,weights=each"), Target::Cpu).unwrap();
    assert_eq!(each.each_ref().map(quantized), [(2, false), (2, false)]);
    assert!(repeated(&with("off"), Target::Cpu).is_none());
    // A program alone must not be told to read what nobody wrote.
    for typed in ["auto,weights=kept", "auto,run=later"] {
        let refused = Switches::default().with("fp8", typed).and_then(|s| Compiled::new(micro(), &s, Target::Cpu));
        assert!(refused.is_err(), "{typed}");
    }
}
