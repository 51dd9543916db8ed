//! A decoder's layers with adapters on frozen weights: what passes make of their training step.

use kiln_engine::graph::Node;
use kiln_engine::kernel::Arch;
use kiln_engine::op::Fill;
use kiln_engine::ops::matmul::Matmul;
use kiln_engine::ops::norm::RmsNormGrad;
use kiln_engine::ops::norm::add::AddRmsNormGrad;
use kiln_engine::ops::rope::Pairs;
use kiln_engine::ops::rope::norm::NormRopeGrad;
use kiln_engine::passes::Target;
use kiln_engine::{Compiled, Cpu, DType, Data, Device, Init, Program, Recorder, Store, Switches, Var, check};

const DIM: usize = 128;

/// Of a model: places of each of two sequences, columns of gate and up, the adapters' rank.
#[derive(Clone, Copy)]
struct Sizes {
    time: usize,
    hidden: usize,
    rank: usize,
}

const SMALL: Sizes = Sizes { time: 32, hidden: 96, rank: 4 };
/// Gate and up are too wide to be merged, and there are enough rows to put something beside them.
const WIDE: Sizes = Sizes { time: 256, hidden: 1024, rank: 8 };

/// x W^T + dropped A^T B^T.
fn adapted<'g>((x, dropped): (Var<'g>, Var<'g>), name: &str, (outputs, rank): (usize, usize), params: &mut Vec<Var<'g>>) -> Var<'g> {
    let r = x.recorder();
    let frozen = r.frozen(&format!("{name}.weight"), &[outputs, x.dim(0)], Init::Normal { std: 0.1 });
    let a = r.param(&format!("{name}.a"), &[rank, x.dim(0)], Init::Normal { std: 0.1 });
    let b = r.param(&format!("{name}.b"), &[outputs, rank], Init::Normal { std: 0.1 });
    params.extend([a, b]);
    x.linear(frozen) + dropped.linear(a).linear(b)
}

/// Layers of a norm, a product that is normed and turned, another, and a residual; then a norm, gate, up, down and a residual.
fn record(r: &Recorder, dropout: f32, Sizes { time, hidden, rank }: Sizes) {
    let (rng, tables) = (r.feed("rng", &[4], DType::I32), r.rope_tables(time, 16, 100.0));
    let mut x = r.feed("x", &[2, time, DIM], DType::F32);
    let mut params = vec![];
    for i in 0..3 {
        let at = |part: &str| format!("layers.{i}.{part}");
        let norm = |x, name: &str| Var::rms_norm(x, r.frozen(&at(name), &[x.dim(0)], Init::Full(1.5)), 1e-6);
        x = r.block(&at("block"), || {
            let u = norm(x, "first");
            let q = adapted((u, u.dropout(dropout, rng)), &at("q"), (DIM, rank), &mut params);
            let q = norm(q.reshape(&[2, time, DIM / 16, 16]), "turned").rope(Pairs::Halves, tables).reshape(&[2, time, DIM]);
            let q = q.square();
            let x = x + adapted((q, q.dropout(dropout, rng)), &at("o"), (DIM, rank), &mut params);
            let u = norm(x, "second");
            let dropped = u.dropout(dropout, rng);
            let [gate, up] = ["gate", "up"].map(|part| adapted((u, dropped), &at(part), (hidden, rank), &mut params));
            let h = gate.swiglu(up);
            x + adapted((h, h.dropout(dropout, rng)), &at("down"), (DIM, rank), &mut params)
        });
    }
    let loss = x.square().mean();
    r.output("loss", loss);
    r.grad(loss, &params).into_iter().enumerate().for_each(|(i, g)| r.output(&format!("g{i}"), g));
}

fn compiled(switches: &Switches, dropout: f32, sizes: Sizes) -> Compiled {
    let r = Recorder::new();
    record(&r, dropout, sizes);
    Compiled::new(r.finish(), switches, Target::Cuda(Arch { sm: 90, multiprocessors: 132 })).unwrap()
}

fn half() -> Switches {
    Switches::default().with("bf16", "auto").unwrap()
}

/// Inner dimension of a product that adds another's result, and of that one.
fn sums(c: &Compiled) -> Vec<(usize, usize)> {
    let g = &c.graph;
    let made = |mut node: usize| {
        while g.nodes[node].is_view() {
            node = g.nodes[node].inputs[0].node;
        }
        node
    };
    let inner = |i: usize| g.meta(g.nodes[i].inputs[0]).dim(0);
    let product = |i: usize| g.nodes[i].op::<Matmul>().is_some();
    let adds = |i: &usize| g.nodes[*i].op::<Matmul>().is_some_and(|m| m.add.is_some());
    (0..g.nodes.len())
        .filter(adds)
        .map(|i| (i, made(g.nodes[i].inputs[2].node)))
        .filter(|s| product(s.1))
        .map(|(i, j)| (inner(i), inner(j)))
        .collect()
}

#[test]
fn wide_products_add_what_narrow_ones_made() {
    let c = compiled(&half(), 0.0, SMALL);
    let sums = sums(&c);
    assert!(sums.iter().all(|&(own, added)| own >= 64 && (added >= 64 || added <= 8)), "{sums:?}");
    // q, o and down of each layer (gate and up are one product here, cut in two); backwards each input of adapters but the first, whose
    // gradient nobody asks for.
    let narrow = sums.iter().filter(|s| s.1 <= 8).count();
    assert_eq!(narrow, 3 * 3 + 3 * 4 - 1, "{sums:?}");
    // What is added to a residual is added by the norm behind it, or where a layer ends.
    let names: Vec<&str> = c.graph.nodes.iter().filter(|n| !n.backward && !n.is_source() && !n.is_view()).map(|n| n.name()).collect();
    assert_eq!(names.iter().filter(|n| **n == "add_rms_norm").count(), 3, "{names:?}");
}

#[test]
fn frozen_norms_have_no_gradient() {
    let c = compiled(&half(), 0.0, SMALL);
    let outputs = |n: &Node| {
        let known = n.op::<RmsNormGrad>().is_some() || n.op::<AddRmsNormGrad>().is_some() || n.op::<NormRopeGrad>().is_some();
        known.then_some(n.outputs.len())
    };
    let counts: Vec<usize> = c.graph.nodes.iter().filter_map(outputs).collect();
    assert_eq!(counts, [1; 8]);
}

#[test]
fn what_flows_back_into_an_adapter_is_read_once() {
    for again in ["auto", "auto,what=memory-bound"] {
        let c = compiled(&half().with("recompute", again).unwrap(), 0.1, Sizes { rank: 8, ..SMALL });
        let receipt = c.receipts.iter().find(|r| r.pass == "lora-backward").unwrap();
        assert_eq!((receipt.applied, receipt.declined.len()), (15, 0), "{}", receipt.summary());
        let pairs = c.graph.nodes.iter().filter(|n| n.name() == "narrow_products");
        assert!(pairs.clone().all(|n| n.backward));
        // Gate and up read the same input: what flows back into both is read by one kernel, which puts it side by side.
        let counts: Vec<usize> = pairs.map(|n| n.inputs.len() / 3).collect();
        assert_eq!(counts, [1, 2, 1, 1].repeat(3));
    }
    // A rank of 4 is no multiple of 8.
    let receipts = compiled(&half(), 0.0, SMALL).receipts;
    assert_eq!(receipts.iter().find(|r| r.pass == "lora-backward").unwrap().declined.len(), 15);
}

fn run(switches: &Switches, dropout: f32, sizes: Sizes) -> Vec<Vec<f32>> {
    let r = Recorder::new();
    record(&r, dropout, sizes);
    let graph = r.finish();
    let names: Vec<String> = graph.outputs.iter().map(|o| o.0.clone()).collect();
    let mut store = Store::new(3);
    let mut p = Program::load(graph, switches, &Device::cpu(Cpu::new(2)), &mut store).unwrap();
    let x = check::fill(Fill::Normal, 5, 2 * sizes.time * DIM);
    p.run(&mut store, &[("x", x.data()), ("rng", Data::I32(&[1, 2, 3, 0]))]).unwrap();
    names.iter().map(|n| p.read(n, &store).unwrap()).collect()
}

#[test]
fn what_is_cheap_is_made_again() {
    let with = |value: &str| half().with("recompute", value).unwrap();
    for dropout in [0.0, 0.1] {
        let kept = |value: &str| compiled(&with(value), dropout, SMALL).plan.memory.activations as f64;
        let (all, side, cheap) = (kept("off"), kept("auto"), kept("auto,what=memory-bound"));
        assert!(side < 0.95 * all && cheap < 0.75 * all, "{all} {side} {cheap}");
        // Without rounding, to the last bit.
        let exact = |value: &str| run(&Switches::default().with("recompute", value).unwrap(), dropout, SMALL);
        let reference = exact("off");
        assert!(exact("require") == reference && exact("require,what=memory-bound") == reference);
    }
    // Norms' results come from their gradients, SwiGLU's from its own; the rotated heads alone are an op again.
    let c = compiled(&with("auto,what=memory-bound"), 0.0, SMALL);
    let again: Vec<&str> = c
        .graph
        .nodes
        .iter()
        .filter(|n| n.backward && matches!(n.name(), "rms_norm" | "add_rms_norm" | "norm_rope"))
        .map(|n| n.name())
        .collect();
    assert_eq!(again, ["norm_rope"; 3]);
    let given =
        c.graph.nodes.iter().filter(|n| n.op::<RmsNormGrad>().is_some_and(|op| op.y) || n.op::<AddRmsNormGrad>().is_some_and(|op| op.y));
    assert_eq!(given.count(), 5);
}

#[test]
fn spare_memory_keeps_what_is_dearest_to_make_again() {
    let with = |value: &str| half().with("recompute", value).unwrap();
    let again = |value: &str| {
        let c = compiled(&with(value), 0.0, WIDE);
        let turned = c.graph.nodes.iter().filter(|n| n.backward && n.name() == "norm_rope").count();
        (turned, c.receipts.iter().find(|r| r.pass == "recompute").unwrap().applied)
    };
    let (turned, all) = again("auto,what=memory-bound");
    assert_eq!(turned, 3);
    // What gradients can make on the side is cheaper than an op of its own.
    let (turned, some) = again("auto,what=memory-bound,spare=1");
    assert!(turned == 0 && 0 < some && some < all, "{turned} {some} {all}");
    assert_eq!(again("auto,what=memory-bound,spare=4096"), (0, 0));
    let exact = |value: &str| run(&Switches::default().with("recompute", value).unwrap(), 0.1, WIDE);
    assert_eq!(exact("auto,what=memory-bound,spare=1"), exact("off"));
    let wrong = Compiled::new(Recorder::new().finish(), &with("auto,spare=much"), Target::Cpu).err().unwrap();
    assert!(wrong.to_string().contains("spare=much is not a whole number of at least 0"), "{wrong}");
}

#[test]
fn what_adapters_add_becomes_terms_of_their_products() {
    let joined = |s: Switches| s.with("fuse-norm", "auto,blocks=joined").unwrap();
    for (switches, expected) in [(half(), 6), (joined(half()), 8)] {
        for dropout in [0.0, 0.1] {
            let c = compiled(&switches, dropout, WIDE);
            let receipt = c.receipts.iter().find(|r| r.pass == "lora-forward").unwrap();
            // Gate and up of three layers; with a norm that adds at their beginning, also q of all but the first.
            assert_eq!(receipt.applied, expected, "{}", receipt.summary());
            let g = &c.graph;
            let extended = (0..g.nodes.len()).filter(|&i| {
                let n = &g.nodes[i];
                n.op::<Matmul>().is_some_and(|m| m.add.is_none()) && !n.backward && g.meta(n.inputs[0]).dim(0) == 192
            });
            assert_eq!(extended.count(), expected);
            // Rows are not copied to have something beside them, and what was added is not made any more.
            let off = compiled(&switches.clone().with("lora-forward", "off").unwrap(), dropout, WIDE);
            assert_eq!(c.plan.copies.len(), off.plan.copies.len());
            let narrow = |c: &Compiled| sums(c).iter().filter(|s| s.1 <= 8).count();
            assert_eq!(narrow(&c) + expected, narrow(&off));
        }
    }
    // A rank of 16 is too much beside 128 terms for more than one of the two.
    let many = compiled(&half(), 0.0, Sizes { rank: 16, ..WIDE });
    let receipt = many.receipts.iter().find(|r| r.pass == "lora-forward").unwrap();
    assert!(receipt.applied == 3 && receipt.summary().contains("32 more columns are many beside"), "{}", receipt.summary());
    // Few rows are not worth it.
    let few = compiled(&half(), 0.0, Sizes { time: 64, ..WIDE });
    let receipt = few.receipts.iter().find(|r| r.pass == "lora-forward").unwrap();
    assert!(receipt.applied == 0 && receipt.summary().contains("128 rows are too few for 128 columns"), "{}", receipt.summary());

    for dropout in [0.0, 0.1] {
        let on = run(&joined(Switches::default()), dropout, WIDE);
        let off = run(&joined(Switches::default().with("lora-forward", "off").unwrap()), dropout, WIDE);
        assert!(on != off, "the sums are others");
        for (a, b) in on.iter().zip(&off) {
            let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| x as f64 * x as f64).sum::<f64>().sqrt();
            let differ = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
            assert!(differ <= 1e-5 * norm(&mut b.iter().copied()), "{differ}");
        }
    }
}

/// Sums of products that look like an adapter's, and are none.
#[test]
fn other_sums_keep_their_products() {
    fn param<'g>(x: Var<'g>, name: &str, shape: &[usize]) -> Var<'g> {
        x.recorder().param(name, shape, Init::Normal { std: 0.1 })
    }
    let applied = |make: for<'g> fn(Var<'g>) -> Var<'g>| {
        let numbers = |extend: &str, merge: &str| {
            let r = Recorder::new();
            let [x, more] = ["x", "more"].map(|name| r.feed(name, &[512, 128], DType::F32));
            let rows = (x + more).rms_norm(r.frozen("norm", &[128], Init::Full(1.5)), 1e-6);
            r.output("y", make(rows));
            let switches = Switches::default().with("lora-forward", extend).unwrap().with("merged-qkv", merge).unwrap();
            let mut store = Store::new(3);
            let mut p = Program::load(r.finish(), &switches, &Device::cpu(Cpu::new(2)), &mut store).unwrap();
            let [x, more] = [5, 6].map(|seed| check::fill(Fill::Normal, seed, 512 * 128));
            p.run(&mut store, &[("x", x.data()), ("more", more.data())]).unwrap();
            (p.receipts.iter().find(|r| r.pass == "lora-forward").unwrap().applied, p.read("y", &store).unwrap())
        };
        let ((count, on), (_, merged), (_, off)) = (numbers("auto", "off"), numbers("auto", "auto"), numbers("off", "off"));
        assert!(on.iter().zip(&merged).zip(&off).all(|((a, b), c)| (a - c).abs() < 1e-4 && (b - c).abs() < 1e-4));
        count
    };
    assert_eq!(
        applied(|x| x.linear(param(x, "w", &[1024, 128])) + x.linear(param(x, "a", &[8, 128])).linear(param(x, "b", &[1024, 8]))),
        1
    );
    // Weights that lie the other way, though a permutation of nothing hides it.
    assert_eq!(
        applied(
            |x| x.matmul(param(x, "w", &[128, 128]).permute(&[0, 1])) + x.linear(param(x, "a", &[8, 128])).linear(param(x, "b", &[128, 8]))
        ),
        0
    );
    // What is added is made from another of these sums.
    assert_eq!(
        applied(|x| {
            let first = x.linear(param(x, "w", &[1024, 128])) + x.linear(param(x, "a", &[8, 128])).linear(param(x, "b", &[1024, 8]));
            let more = first.linear(param(x, "c", &[8, 1024])).linear(param(x, "d", &[1024, 8]));
            x.linear(param(x, "v", &[1024, 128])) + more
        }),
        1
    );
    assert_eq!(
        applied(|x| {
            let x = x.reshape(&[1024, 64]);
            x.linear(param(x, "w", &[1024, 64])) + x.linear(param(x, "a", &[8, 64])).linear(param(x, "b", &[1024, 8]))
        }),
        0
    );
    assert_eq!(
        applied(|x| {
            let added = x.reshape(&[1024, 64]).linear(param(x, "a", &[8, 64])).linear(param(x, "b", &[512, 8]));
            x.linear(param(x, "w", &[1024, 128])) + added.reshape(&[512, 1024])
        }),
        0
    );
}
