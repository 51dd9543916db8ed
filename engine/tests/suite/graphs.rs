//! Graphs that are easy to get wrong: memory shared between values, states and views; casts; gradients that do not exist.

use kiln_engine::ops::attention::attention_until;
use kiln_engine::ops::cache::decode_attention;
use kiln_engine::ops::concat::{Join, concat};
use kiln_engine::ops::pointwise::{Bin, pointwise};
use kiln_engine::passes::Target;
use kiln_engine::{Compiled, Cpu, DType, Data, Device, Error, Init, Program, Recorder, Store, Switches, Var, check};

fn device() -> Device {
    Device::cpu(Cpu::new(2))
}

/// Outputs of one run, with a pass's setting.
fn run(record: impl Fn(&Recorder), pass: (&str, &str), feeds: &[(&str, Data)]) -> Result<(Vec<Vec<f32>>, Store), Error> {
    let r = Recorder::new();
    record(&r);
    let graph = r.finish();
    let names: Vec<String> = graph.outputs.iter().map(|o| o.0.clone()).collect();
    let mut store = Store::new(3);
    let mut p = Program::load(graph, &Switches::default().with(pass.0, pass.1)?, &device(), &mut store)?;
    p.run(&mut store, feeds)?;
    let outputs = names.iter().map(|n| p.read(n, &store)).collect::<Result<_, _>>()?;
    Ok((outputs, store))
}

const DEFAULT: (&str, &str) = ("recompute", "off");

#[test]
fn slices_of_narrow_tensors_stay_inside_the_workspace() {
    let record = |r: &Recorder| {
        let s = r.state("s", &[20000, 64], DType::BF16, Init::Full(2.0));
        r.output("y", s.slice(1, 0, 1).cast(DType::F32) + 1.0);
        let t = r.state("t", &[64, 4096], DType::F16, Init::Full(0.5));
        r.output("z", r.full(&[3, 64], 1.0).cast(DType::F16).matmul(t.slice(1, 8, 16)));
    };
    let (y, _) = run(record, DEFAULT, &[]).unwrap();
    assert!(y[0].len() == 20000 && y[0].iter().all(|&v| v == 3.0));
    assert!(y[1].len() == 24 && y[1].iter().all(|&v| v == 32.0));
}

#[test]
fn slices_are_padded_and_joined_where_they_lie() {
    let r = Recorder::new();
    let x = r.feed("x", &[2, 6, 8], DType::F32);
    let before = x.slice(1, 0, 5).pad(1, 1, 0);
    r.output("y", concat(&[x.slice(2, 0, 4), before, before.slice(2, 3, 5)], 2));
    let c = Compiled::new(r.finish(), &Switches::default(), Target::Cpu).unwrap();
    let ran: Vec<&str> = c.graph.nodes.iter().filter(|n| !n.is_source() && !n.is_view()).map(|n| n.name()).collect();
    assert_eq!(ran, ["pad", "concat"]);
}

/// A weight used three times on fewer and fewer rows: its gradient is one product, of rows that were written end to end.
#[test]
fn a_shared_weight_has_one_product_for_its_gradient() {
    let r = Recorder::new();
    let w = r.param("w", &[64, 64], Init::Normal { std: 0.2 });
    let x = r.feed("x", &[128, 64], DType::F32);
    let mut h = x.silu();
    let mut rows = 128;
    for _ in 0..3 {
        let index = r.constant(&[rows], (0..rows).map(|i| i as f32).collect()).cast(DType::I32);
        h = h.scatter_add_rows_once(index, h.gather_rows_once(index).linear(w).silu());
        rows /= 2;
    }
    let loss = h.square().mean();
    r.output("loss", loss);
    r.output("dw", r.grad(loss, &[w])[0]);
    let graph = r.finish();
    let compiled =
        |value: &str| Compiled::new(graph.clone(), &Switches::default().with("merged-wgrad", value).unwrap(), Target::Cpu).unwrap();
    let (on, off) = (compiled("require"), compiled("off"));
    on.plan.verify(&on.graph).unwrap();
    let joins: Vec<usize> = (0..on.graph.nodes.len()).filter(|&i| on.graph.nodes[i].name() == "join").collect();
    assert_eq!(joins.len(), 2);
    assert!(on.plan.copies.iter().all(|c| !joins.contains(&c.node)), "{:?}", on.plan.copies);
    let products = |c: &Compiled| c.graph.nodes.iter().filter(|n| n.name() == "matmul").count();
    assert_eq!(products(&on) + 2, products(&off));
    let numbers: Vec<f32> = (0..128 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
    let result = |c: Compiled| {
        let mut store = Store::new(3);
        let mut p = Program::from_compiled(c, &device(), &mut store).unwrap();
        p.run(&mut store, &[("x", Data::F32(&numbers))]).unwrap();
        p.read("dw", &store).unwrap()
    };
    let (a, b) = (result(on), result(off));
    assert!(kiln_engine::check::relative(&a, &b) < 1e-5);
}

/// Two gradients by the same weights share what is joined for the first: nothing may be written there before the second has read it.
#[test]
fn what_is_joined_is_not_overwritten_before_its_last_reader() {
    let record = |r: &Recorder| {
        let param = |name: &str| r.param(name, &[64, 64], Init::Normal { std: 0.3 });
        let (w0, wa, gain) = (param("w0"), param("wa"), r.param("gain", &[64], Init::Full(1.0)));
        let x = r.feed("x", &[64, 64], DType::F32);
        let mut h = x.matmul(w0);
        for _ in 0..3 {
            let n = h.rms_norm_plain(1e-5);
            h = h + n.matmul(wa).rms_norm(gain, 1e-5).softmax() + n.silu().softmax();
        }
        let (l1, l2) = (h.square().mean(), (h.silu() * x).mean());
        r.output("a", r.grad(l1, &[wa])[0]);
        for (name, g) in ["b", "c"].iter().zip(r.grad(l2, &[wa, w0])) {
            r.output(name, g);
        }
    };
    let numbers: Vec<f32> = (0..64 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
    let feeds = [("x", Data::F32(&numbers))];
    let (on, off) = (run(record, DEFAULT, &feeds).unwrap().0, run(record, ("merged-wgrad", "off"), &feeds).unwrap().0);
    for (a, b) in on.iter().zip(&off) {
        assert!(kiln_engine::check::relative(a, b) < 1e-5, "{}", kiln_engine::check::relative(a, b));
    }
}

/// A part lies in the memory of what it is joined to: who writes over it later must not write there.
#[test]
fn what_is_joined_is_not_overwritten_by_who_reads_a_part_of_it() {
    let record = |r: &Recorder| {
        let x = r.feed("x", &[8, 64], DType::F32);
        let (a, b) = (x.silu(), x.abs());
        let both = r.op1(Join, &[a, b]);
        let changed = a.scatter_add_rows(r.constant(&[1], vec![3.0]).cast(DType::I32), r.full(&[1, 64], 100.0));
        r.output("changed", changed);
        r.output("both", both.exp());
    };
    let numbers: Vec<f32> = (0..8 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
    let (y, _) = run(record, DEFAULT, &[("x", Data::F32(&numbers))]).unwrap();
    let expected: Vec<f32> = numbers.iter().map(|x| x / (1.0 + (-x).exp())).chain(numbers.iter().map(|x| x.abs())).map(f32::exp).collect();
    assert!(y[1].iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5));
    assert!((y[0][3 * 64] - 100.0 - expected[3 * 64].ln()).abs() < 1e-4);
}

/// Kernels read several numbers at a time: a part that would begin anywhere is computed elsewhere and copied.
#[test]
fn parts_that_are_computed_where_they_are_joined_are_aligned() {
    const LENGTHS: [usize; 5] = [3, 61, 5, 70, 128];
    let starts: Vec<usize> = (0..5).map(|i| LENGTHS[..i].iter().sum()).collect();
    let r = Recorder::new();
    let x = r.feed("x", &[128], DType::F32);
    let parts: Vec<Var> = LENGTHS.iter().enumerate().map(|(i, n)| (x * (1.0 + i as f32)).slice(0, 0, *n).silu()).collect();
    r.output("both", r.op1(Join, &parts).exp());
    let c = Compiled::new(r.finish(), &Switches::default().with("fuse-pointwise", "off").unwrap(), Target::Cpu).unwrap();
    c.plan.verify(&c.graph).unwrap();
    let join = c.graph.nodes.iter().position(|n| n.name() == "join").unwrap();
    let buffer = c.plan.spots[join][0].buffer;
    let inside: Vec<usize> =
        c.graph.nodes[join].inputs.iter().map(|v| &c.plan.spots[v.node][v.out]).filter(|s| s.buffer == buffer).map(|s| s.offset).collect();
    assert!(inside.iter().all(|at| at * 4 % 256 == 0), "{inside:?}");
    // Those at 0 and 64 of what begins at 0, 3, 64, 69 and 139; the others are copied.
    assert_eq!(inside, [starts[0], starts[2]]);
    let copied: Vec<usize> = c.plan.copies.iter().filter(|copy| copy.node == join).map(|copy| copy.at).collect();
    assert_eq!(copied, [starts[1], starts[3], starts[4]]);
}

/// What a program takes at most is all that it holds at once.
#[test]
fn the_peak_of_memory_is_the_sum_of_its_parts() {
    let r = Recorder::new();
    let w = r.param("w", &[64, 48], Init::Normal { std: 0.3 });
    let x = r.feed("x", &[100, 64], DType::F32);
    let table = r.constant(&[1, 64], (0..64).map(|i| i as f32).collect());
    let loss = (x * table).matmul(w).softmax().square().mean();
    r.output("loss", loss);
    r.output("dw", r.grad(loss, &[w])[0]);
    let m = Compiled::new(r.finish(), &Switches::default(), Target::Cpu).unwrap().memory();
    assert_eq!([m.state, m.constants, m.feeds], [4 * 64 * 48, 4 * 64, 4 * 100 * 64]);
    assert!(m.activations >= 4 * 100 * 48);
    assert_eq!(m.peak(), m.state + m.constants + m.feeds + m.activations + m.workspace);
}

/// Equal values are one, except where a gradient by one of them is asked for.
#[test]
fn a_gradient_by_a_value_is_not_that_of_its_equal() {
    let record = |r: &Recorder| {
        let x = r.feed("x", &[8], DType::F32);
        let (a, b) = (x.silu(), x.silu());
        let loss = (a * 3.0 + b.square()).sum();
        r.output("da", r.grad(loss, &[a])[0]);
    };
    let x = [1.0, -2.0, 0.5, 3.0, 0.1, -0.7, 2.0, 4.0];
    let (y, _) = run(record, DEFAULT, &[("x", Data::F32(&x))]).unwrap();
    assert_eq!(y[0], [3.0; 8]);
}

/// In a graph that is trained, what does not lead to the loss keeps the types that it was recorded with.
#[test]
fn bf16_leaves_side_outputs_alone() {
    let record = |r: &Recorder| {
        let w = r.param("w", &[8, 8], Init::Normal { std: 0.3 });
        let x = r.feed("x", &[4, 8], DType::F32);
        let h = x.matmul(w).silu();
        let loss = h.square().mean();
        r.output("dw", r.grad(loss, &[w])[0]);
        r.output("logits", h.matmul(w));
    };
    let x: Vec<f32> = (0..32).map(|i| (i as f32).cos()).collect();
    let feeds = [("x", Data::F32(&x))];
    let (narrow, wide) = (run(record, ("bf16", "auto"), &feeds).unwrap().0, run(record, DEFAULT, &feeds).unwrap().0);
    assert!(narrow.iter().zip(&wide).all(|(a, b)| kiln_engine::check::relative(a, b) < 0.02));
}

/// A frozen weight is stored rounded; the short convolution, whose taps are f32, still reads it.
#[test]
fn a_rounded_frozen_weight_is_cast_back_where_f32_is_needed() {
    let record = |r: &Recorder| {
        let taps = r.frozen("taps", &[8, 4], Init::Normal { std: 0.5 });
        let bias = r.frozen("bias", &[8], Init::Normal { std: 0.5 });
        let x = r.feed("x", &[2, 5, 8], DType::F32);
        r.output("y", x.short_conv(taps, bias, false, None));
    };
    let x: Vec<f32> = (0..80).map(|i| (i as f32).cos()).collect();
    let feeds = [("x", Data::F32(&x))];
    let wide = run(record, DEFAULT, &feeds).unwrap().0;
    for (pass, dtype, most) in [("bf16", DType::BF16, 0.02), ("fp16", DType::F16, 0.002)] {
        let (narrow, store) = run(record, (pass, "auto"), &feeds).unwrap();
        assert_eq!(store.get("taps").unwrap().meta.dtype, dtype);
        let off = kiln_engine::check::relative(&narrow[0], &wide[0]);
        assert!(0.0 < off && off < most, "{pass}: {off}");
    }
}

/// A bias that is a product itself, seen as a row.
#[test]
fn a_product_may_be_a_bias() {
    let record = |r: &Recorder| {
        let w = r.param("w", &[16, 16], Init::Normal { std: 0.3 });
        let x = r.feed("x", &[4, 16], DType::F32);
        let c = r.constant(&[16], vec![0.5; 16]);
        let bias = x.slice(0, 0, 1).matmul(w).reshape(&[16]) + c;
        r.output("y", x.silu().matmul(w) + bias);
    };
    let x: Vec<f32> = (0..64).map(|i| (i as f32).sin()).collect();
    let feeds = [("x", Data::F32(&x))];
    let (on, off) = (run(record, DEFAULT, &feeds).unwrap().0, run(record, ("gemm-epilogue", "off"), &feeds).unwrap().0);
    assert!(kiln_engine::check::relative(&on[0], &off[0]) < 1e-6);
}

/// A product cannot add what is made behind it.
#[test]
fn a_bias_that_is_made_behind_its_product_is_added_there() {
    let record = |r: &Recorder| {
        let w = r.param("w", &[16, 16], Init::Normal { std: 0.3 });
        let product = r.feed("x", &[4, 16], DType::F32).matmul(w);
        let bias = r.param("bias", &[16], Init::Normal { std: 1.0 }).reshape(&[1, 16]).softmax().reshape(&[16]);
        r.output("y", product + bias);
    };
    let x: Vec<f32> = (0..64).map(|i| (i as f32).sin()).collect();
    let feeds = [("x", Data::F32(&x))];
    let (on, off) = (run(record, ("gemm-epilogue", "auto"), &feeds).unwrap().0, run(record, ("gemm-epilogue", "off"), &feeds).unwrap().0);
    assert!(kiln_engine::check::relative(&on[0], &off[0]) < 1e-6);
}

/// On the CPU an epilogue has the roundings of the arithmetic that it stands for, also where numbers are large, or none.
#[test]
fn an_epilogue_on_the_cpu_is_the_arithmetic_bit_for_bit() {
    let mut x: Vec<f32> = (0..300 * 24).map(|i| (i as f32 - 3600.0) * 3e-3).collect();
    x[5] = f32::NAN;
    let eye: Vec<f32> = (0..24 * 24).map(|i| if i % 25 == 0 { 1.0 } else { 0.0 }).collect();
    let feeds = [("x", Data::F32(&x)), ("eye", Data::F32(&eye))];
    // One at a time: a sum with two readers would be folded, and no activation.
    for what in ["gelu", "relu"] {
        let record = |r: &Recorder| {
            let bias = r.param("bias", &[24], Init::Normal { std: 1.0 });
            let sum = r.feed("x", &[300, 24], DType::F32).matmul(r.feed("eye", &[24, 24], DType::F32)) + bias;
            r.output("y", if what == "gelu" { sum.gelu() } else { sum.relu() });
        };
        let [on, off] = ["require", "off"].map(|mode| run(record, ("gemm-epilogue", mode), &feeds).unwrap().0);
        let (on, off) = (&on[0], &off[0]);
        let differ = on.iter().zip(off).filter(|(a, b)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan())).count();
        assert_eq!(differ, 0, "{what}: {differ} of {} numbers differ", on.len());
        assert!(on[5].is_nan(), "{what} of no number is none");
    }
}

#[test]
fn a_value_on_the_way_to_a_state_is_not_overwritten() {
    let index = [1, 2];
    let feeds = [("i", Data::I32(&index))];
    let chain = |r: &Recorder, kept: &str| {
        let s = r.state("s", &[4, 2], DType::F32, Init::Full(1.0));
        let (i, source) = (r.feed("i", &[2], DType::I32), r.full(&[2, 2], 10.0) * 1.0);
        let first = s.scatter_add_rows(i, source);
        let second = first.scatter_add_rows(i, source);
        r.update(s, second);
        if kept == "output" {
            r.output("mid", first);
        } else {
            r.output("mid", first + second * 0.0);
        }
    };
    for kept in ["output", "read later"] {
        let (y, store) = run(|r| chain(r, kept), DEFAULT, &feeds).unwrap();
        assert_eq!(y[0], [1.0, 1.0, 11.0, 11.0, 11.0, 11.0, 1.0, 1.0], "{kept}");
        assert_eq!(store.get("s").unwrap().f32().unwrap(), [1.0, 1.0, 21.0, 21.0, 21.0, 21.0, 1.0, 1.0], "{kept}");
    }
}

#[test]
fn states_trade_places_and_take_views_of_each_other() {
    let record = |r: &Recorder| {
        let a = r.state("a", &[2, 2], DType::F32, Init::Full(1.0));
        let b = r.state("b", &[2, 2], DType::F32, Init::Full(2.0));
        r.update(a, b.t());
        r.update(b, a);
        r.output("old", a);
        let x = r.feed("x", &[2, 2], DType::F32);
        let late = x * 3.0;
        let c = r.state("c", &[2, 2], DType::F32, Init::Full(0.0)); // recorded after the value that it takes
        r.update(c, late);
    };
    let x = [1.0, 2.0, 3.0, 4.0];
    let (y, store) = run(record, DEFAULT, &[("x", Data::F32(&x))]).unwrap();
    let state = |n: &str| store.get(n).unwrap().f32().unwrap();
    assert_eq!((y[0].clone(), state("a"), state("b")), (vec![1.0; 4], vec![2.0; 4], vec![1.0; 4]));
    assert_eq!(state("c"), [3.0, 6.0, 9.0, 12.0]);
}

#[test]
fn a_store_of_another_shape_is_refused() {
    let program = |rows: usize, store: &mut Store| {
        let r = Recorder::new();
        r.output("y", r.state("s", &[rows, 1000], DType::F32, Init::Full(1.0)) * 2.0);
        Program::load(r.finish(), &Switches::default(), &device(), store).unwrap()
    };
    let mut large = program(1000, &mut Store::new(0));
    let mut store = Store::new(0);
    program(1, &mut store);
    assert!(matches!(large.run(&mut store, &[]), Err(Error::StateShape { .. })));
    store.remove_prefix("s");
    assert!(matches!(large.run(&mut store, &[]), Err(Error::NoState(_))));
}

#[test]
fn casts_to_integers_round_whatever_is_fused() {
    let record = |r: &Recorder| {
        let x = r.feed("x", &[4], DType::F32);
        r.output("y", (x * 1.0 + 0.0).cast(DType::I32).cast(DType::F32) * 2.0);
    };
    let x = [1.7, 2.2, -3.9, 4.0];
    for mode in ["off", "auto"] {
        let (y, _) = run(record, ("fuse-pointwise", mode), &[("x", Data::F32(&x))]).unwrap();
        assert_eq!(y[0], [2.0, 4.0, -6.0, 8.0], "fuse-pointwise={mode}");
    }
}

#[test]
fn dropout_of_a_constant_draws_for_every_element() {
    let record = |r: &Recorder| r.output("y", r.full(&[64], 1.0).dropout(0.5, r.feed("rng", &[4], DType::I32)));
    let (y, _) = run(record, DEFAULT, &[("rng", Data::I32(&[1, 2, 3, 4]))]).unwrap();
    let zeros = y[0].iter().filter(|v| **v == 0.0).count();
    assert!((10..54).contains(&zeros) && y[0].iter().all(|&v| v == 0.0 || v == 2.0), "{zeros} zeros");
}

#[test]
fn a_gradient_that_does_not_exist_is_an_error() {
    let record = |r: &Recorder| {
        let x = r.param("x", &[3, 4], Init::Normal { std: 1.0 });
        let first = r.grad(x.rms_norm_plain(1e-6).square().sum(), &[x])[0];
        r.output("second", r.grad(first.square().sum(), &[x])[0]);
    };
    let e = run(record, DEFAULT, &[]).err().unwrap();
    assert!(matches!(&e, Error::NotDifferentiable { op, .. } if op == "rms_norm_grad"), "{e}");
    // Arithmetic differentiates twice: d/dx of (3 x^2)^2 is 36 x^3.
    let twice = |r: &Recorder| {
        let x = r.param("x", &[2], Init::Full(2.0));
        let first = r.grad((x * x * x).sum(), &[x])[0];
        r.output("second", r.grad(first.square().sum(), &[x])[0]);
        r.output("eq", pointwise(&[x, x], |e, v| e.bin(Bin::Eq, v[0], v[1])));
    };
    let (y, _) = run(twice, DEFAULT, &[]).unwrap();
    assert_eq!((y[0].clone(), y[1].clone()), (vec![288.0; 2], vec![1.0; 2]));
}

#[test]
fn the_engine_reads_no_environment() {
    fn look(folder: &std::path::Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                look(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") && std::fs::read_to_string(&path).unwrap().contains("env::var") {
                found.push(path.display().to_string());
            }
        }
    }
    let mut found = vec![];
    look(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    // But for planted errors, in builds that are made for them alone.
    let (always, planted) = include_str!("../../src/mutants.rs").split_once("#[cfg(feature = \"mutants\")]\nmod planted").unwrap();
    assert!(!always.contains("env::var") && planted.contains("env::var"));
    assert!(found.len() == 1 && found[0].ends_with("src/mutants.rs"), "{found:?}");
    let manifest = include_str!("../../Cargo.toml");
    assert!(!manifest.contains("default ="), "no feature is on unless it is asked for");
    assert!(!manifest.contains("../train"), "the engine does not depend on train");
}

/// Tokens decoded one by one give what attention over all of them gives. The caches are written where they lie, and are bf16 where activations are.
#[test]
fn a_cache_is_filled_in_place_token_by_token() {
    let (b, t, heads, kv, d) = (2, 9, 4, 2, 16);
    let numbers =
        |count: usize, seed: usize| -> Vec<f32> { (0..count).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0).collect() };
    let (q, k, v) = (numbers(b * t * heads * d, 1), numbers(b * t * kv * d, 2), numbers(b * t * kv * d, 3));
    let until: Vec<i32> = (0..b as i32 * 12).map(|i| if i % 5 == 1 { i % 12 } else { 99 }).collect();
    fn rows(r: &Recorder, time: usize) -> [Var<'_>; 3] {
        [("q", 4), ("k", 2), ("v", 2)].map(|(name, n)| r.feed(name, &[2, time, n, 16], DType::F32))
    }
    let whole = |r: &Recorder| {
        let [q, k, v] = rows(r, t);
        let until = r.feed("until", &[b, 12], DType::I32).slice(1, 0, t);
        r.output("y", attention_until(q, k, v, until, true, 0.3));
    };
    let feeds = [("q", Data::F32(&q)), ("k", Data::F32(&k)), ("v", Data::F32(&v)), ("until", Data::I32(&until))];
    let expected = run(whole, DEFAULT, &feeds).unwrap().0.remove(0);
    for (value, dtype, allowed) in [("off", DType::F32, 1e-5), ("auto", DType::BF16, 2e-2)] {
        let r = Recorder::new();
        let [q_new, k_new, v_new] = rows(&r, 1);
        let [keys, values] = ["keys", "values"].map(|name| r.state(name, &[b, 12, kv, d], DType::F32, Init::Full(0.0)));
        let past = r.feed("past", &[1], DType::I32);
        let until_feed = r.feed("until", &[b, 12], DType::I32);
        let (y, caches) = decode_attention(q_new, k_new, v_new, (keys, values), past, Some(until_feed), 0.3);
        r.output("y", y);
        r.update(keys, caches.0);
        r.update(values, caches.1);
        let switches = Switches::default().with("bf16", value).unwrap();
        let c = Compiled::new(r.finish(), &switches, Target::Cpu).unwrap();
        assert!(c.plan.copies.is_empty() && c.plan.stores.is_empty(), "{:?} {:?}", c.plan.copies, c.plan.stores);
        let mut store = Store::new(0);
        let mut p = Program::from_compiled(c, &device(), &mut store).unwrap();
        for i in 0..t {
            let at = |x: &[f32], n: usize| -> Vec<f32> { (0..b).flat_map(|b| x[(b * t + i) * n..][..n].to_vec()).collect() };
            let (q, k, v) = (at(&q, heads * d), at(&k, kv * d), at(&v, kv * d));
            p.run(
                &mut store,
                &[
                    ("q", Data::F32(&q)),
                    ("k", Data::F32(&k)),
                    ("v", Data::F32(&v)),
                    ("until", Data::I32(&until)),
                    ("past", Data::I32(&[i as i32])),
                ],
            )
            .unwrap();
            let error = check::relative(&p.read("y", &store).unwrap(), &at(&expected, heads * d));
            assert!(error < allowed, "token {i}: off by {error}");
        }
        assert_eq!(store.get("keys").unwrap().meta.dtype, dtype);
    }
}

/// 257 is no number of bf16: that many ones tell whether they were added, and their sum kept, in f32.
#[test]
fn sums_under_bf16_are_made_in_f32() {
    let ids = [1; 257];
    // Rows of a table that are all the same one: nothing of what flows back is lost.
    let embedding = |r: &Recorder| {
        let table = r.param("table", &[3, 8], Init::Full(1.0));
        let rows = table.gather_rows(r.feed("ids", &[257], DType::I32));
        r.output("g", r.grad(rows.sum(), &[table])[0]);
    };
    let (y, _) = run(embedding, ("bf16", "require"), &[("ids", Data::I32(&ids))]).unwrap();
    assert_eq!(y[0], [[0.0; 8], [257.0; 8], [0.0; 8]].concat());

    // Activations.
    let ones = [1.0; 257];
    let reduced = |r: &Recorder| {
        let w = r.param("w", &[1, 8], Init::Full(1.0));
        r.output("sum", r.feed("x", &[257, 1], DType::F32).matmul(w).sum_axis(0));
    };
    let (y, _) = run(reduced, ("bf16", "require"), &[("x", Data::F32(&ones))]).unwrap();
    assert_eq!(y[0], [257.0; 8]);

    // What flows into a weight from its two readers: 256 and 1.
    let (many, one) = ([128.0; 16], [0.5; 16]);
    let shared = |r: &Recorder| {
        let w = r.param("w", &[8, 8], Init::Full(1.0));
        let [many, one] = ["many", "one"].map(|name| r.feed(name, &[2, 8], DType::F32).matmul(w).sum());
        r.output("g", r.grad(many + one, &[w])[0]);
    };
    for fused in ["off", "auto"] {
        let r = Recorder::new();
        shared(&r);
        let mut switches = Switches::default().with("bf16", "require").unwrap();
        ["fuse-pointwise", "gemm-epilogue", "merged-wgrad"].iter().for_each(|pass| switches.set(pass, fused).unwrap());
        let mut store = Store::new(3);
        let mut p = Program::load(r.finish(), &switches, &device(), &mut store).unwrap();
        p.run(&mut store, &[("many", Data::F32(&many)), ("one", Data::F32(&one))]).unwrap();
        assert_eq!(p.read("g", &store).unwrap(), [257.0; 64], "fused: {fused}");
    }
}

#[test]
fn of_equal_maxima_each_has_its_share_of_the_gradient() {
    let record = |r: &Recorder| {
        let x = r.param("x", &[2, 4], Init::Full(2.0));
        let shifted = x + r.constant(&[2, 4], vec![1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 5.0, 0.0]);
        r.output("g", r.grad(shifted.max_axis(1).sum() * 3.0, &[x])[0]);
    };
    let (y, _) = run(record, DEFAULT, &[]).unwrap();
    assert_eq!(y[0], [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 3.0, 0.0]);
}

/// Where the last panic of this thread was, and what it said.
fn panic_of(f: impl FnOnce()) -> (String, String) {
    use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
    use std::sync::{Arc, Mutex};
    let (said, thread) = (Arc::new(Mutex::new((String::new(), String::new()))), std::thread::current().id());
    let (record, before) = (said.clone(), take_hook());
    set_hook(Box::new(move |info| match std::thread::current().id() == thread {
        true => {
            let text = info.payload().downcast_ref::<String>().cloned().unwrap_or_default();
            *record.lock().unwrap() = (info.location().unwrap().file().into(), text);
        }
        false => before(info),
    }));
    assert!(catch_unwind(AssertUnwindSafe(f)).is_err(), "no panic");
    let _ = take_hook();
    said.lock().unwrap().clone()
}

/// In one test, because a panic's hook belongs to the whole process.
#[test]
fn mistakes_of_a_model_name_its_line_and_its_parameters() {
    type Mistake = fn(Var, Var);
    let mistakes: [(&str, Mistake); 5] = [
        ("matmul", |a, b| _ = a.matmul(b)),
        ("matmul", |a, b| _ = a.linear(b)),
        ("pointwise", |a, b| _ = a + b),
        ("reshape", |a, _| _ = a.reshape(&[7])),
        ("rms_norm", |a, b| _ = a.rms_norm(b, 1e-6)),
    ];
    for (op, mistake) in mistakes {
        let r = Recorder::new();
        let [a, b] = [("a", [2, 3]), ("b", [4, 5])].map(|(name, shape)| r.feed(name, &shape, DType::F32));
        let (file, text) = panic_of(|| r.block("layers.3", || mistake(a, b)));
        assert!(file.ends_with("graphs.rs"), "{op}: {file}: {text}");
        assert!(text.contains(op) && text.contains("(in layers.3)") && text.contains("2, 3"), "{op}: {text}");
    }
    // Two blocks that name a parameter alike.
    let r = Recorder::new();
    let shared = r.param("shared", &[2], Init::Full(0.0));
    let layer = |name: &str| {
        r.block(name, || {
            let [own, again] = ["norm", "norm"].map(|name| r.param(name, &[2], Init::Full(1.0)));
            assert_eq!(own.value(), again.value(), "one block may ask twice");
            assert_eq!(r.param("shared", &[2], Init::Full(0.0)).value(), shared.value());
        })
    };
    layer("layers.0");
    let (file, text) = panic_of(|| layer("layers.1"));
    assert!(file.ends_with("graphs.rs"), "{file}");
    assert!(text.contains("'norm' of block 'layers.1' is that of block 'layers.0'") && text.contains("\"layers.1.norm\""), "{text}");
}

/// A row that is computed behind a matmul cannot be a bias that the matmul adds.
#[test]
fn a_bias_is_there_before_its_matmul() {
    let record = |r: &Recorder| {
        let y = r.feed("x", &[40, 16], DType::F32).linear(r.param("w", &[24, 16], Init::Normal { std: 0.3 }));
        let row = r.feed("z", &[40, 24], DType::F32).mean_axis(0).reshape(&[24]);
        r.output("y", y + row);
    };
    let run = |mode: &str| {
        let (r, mut store) = (Recorder::new(), Store::new(1));
        record(&r);
        let switches = Switches::default().with("gemm-epilogue", mode).unwrap();
        let mut p = Program::load(r.finish(), &switches, &Device::cpu(Cpu::new(1)), &mut store).unwrap();
        let wave = |n: usize, by: f32| (0..n).map(|i| (i as f32 * by).sin()).collect::<Vec<f32>>();
        p.run(&mut store, &[("x", Data::F32(&wave(640, 0.37))), ("z", Data::F32(&wave(960, 0.11)))]).unwrap();
        p.read("y", &store).unwrap()
    };
    assert_eq!(run("auto"), run("off"));
    let (_, receipt) = crate::passes::for_gpu("gemm-epilogue", &Switches::default(), record);
    assert!(receipt.applied == 0 && receipt.declined[0].0 == "the bias is computed after the matmul", "{receipt:?}");
}

/// An op that writes over one of its inputs may read the same value as another: then it gets a copy to write to.
#[test]
fn what_an_op_reads_twice_is_not_overwritten() {
    let record = |r: &Recorder| {
        let h = r.feed("x", &[2, 64], DType::F32).silu();
        let crossed = r.constant(&[2], vec![1.0, 0.0]).cast(DType::I32);
        r.output("y", h.scatter_add_rows(crossed, h));
    };
    let numbers: Vec<f32> = (0..2 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
    let (y, _) = run(record, DEFAULT, &[("x", Data::F32(&numbers))]).unwrap();
    let silu = |x: f32| x / (1.0 + (-x).exp());
    let sums = (0..64).map(|i| silu(numbers[i]) + silu(numbers[64 + i]));
    assert!(y[0].iter().zip(sums.clone().chain(sums)).all(|(a, b)| (a - b).abs() < 1e-5), "{:?}", y[0]);
}

#[test]
fn a_value_is_joined_with_itself() {
    let record = |r: &Recorder| {
        let h = r.feed("x", &[8, 64], DType::F32).silu();
        r.output("both", r.op1(Join, &[h, h]).exp());
    };
    let numbers: Vec<f32> = (0..8 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
    let (y, _) = run(record, DEFAULT, &[("x", Data::F32(&numbers))]).unwrap();
    let half: Vec<f32> = numbers.iter().map(|x| (x / (1.0 + (-x).exp())).exp()).collect();
    assert!(y[0].iter().zip([&half[..], &half].concat()).all(|(a, b)| (a - b).abs() < 1e-5));
}

/// A part of the model holds at once what an op reads and what it makes of that.
#[test]
fn the_memory_of_a_part_is_what_it_holds_at_once() {
    let r = Recorder::new();
    let (w, x) = (r.param("w", &[64, 64], Init::Normal { std: 0.3 }), r.feed("x", &[64, 64], DType::F32));
    r.output("y", r.scope("mlp", || x.matmul(w).softmax().matmul(w)));
    let c = Compiled::new(r.finish(), &Switches::default(), Target::Cpu).unwrap();
    assert!(c.by_part()["mlp"] >= 2 * 4 * 64 * 64, "{:?}", c.by_part());
}

/// What stands behind an activation or a bias is no part of the product before it.
#[test]
fn epilogues_keep_the_order_of_what_they_take_in() {
    let record = |r: &Recorder| {
        let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.5 });
        let (w, b, c) = (param("w", &[16, 16]), param("b", &[16]), param("c", &[16]));
        let x = r.feed("x", &[8, 16], DType::F32);
        let z = x.tanh();
        r.output("sum behind ReLU", x.matmul(w).relu() + z);
        r.output("two biases", z.matmul(w) + b + c);
        r.output("bias behind ReLU", x.silu().matmul(w).relu() + b);
    };
    let numbers: Vec<f32> = (0..8 * 16).map(|i| (i as f32 * 0.37).sin()).collect();
    let feeds = [("x", Data::F32(&numbers))];
    let [on, off] = ["auto", "off"].map(|value| run(record, ("gemm-epilogue", value), &feeds).unwrap().0);
    for (i, (a, b)) in on.iter().zip(&off).enumerate() {
        assert!(check::relative(a, b) < 1e-6, "output {i}: {}", check::relative(a, b));
    }
}

/// Of a table that is kept in bf16, too. 1 and 2^-10, added up: bf16 has no digits for that.
#[test]
fn an_embedding_begins_the_residual_stream_in_its_type() {
    let record = |r: &Recorder| {
        let (table, w) = (r.frozen("table", &[4, 8], Init::Full(1.0)), r.param("w", &[8, 8], Init::Full(2f32.powi(-13))));
        let h = table.gather_rows(r.feed("ids", &[4], DType::I32));
        r.output("h", h + h.matmul(w));
    };
    let sum = |value: &str| run(record, ("bf16", value), &[("ids", Data::I32(&[0, 1, 2, 3]))]).unwrap().0.remove(0);
    assert_eq!((sum("auto"), sum("auto,residual=f32")), (vec![1.0; 32], vec![1.0 + 2f32.powi(-10); 32]));
}

/// Fused or not.
#[test]
fn a_query_that_sees_no_key_gives_zeros() {
    let record = |r: &Recorder| {
        let x = r.feed("x", &[1, 4, 2, 8], DType::F32);
        // The first query alone sees a key.
        r.output("y", attention_until(x, x, x, r.zeros(&[1, 4]).cast(DType::I32), true, 0.5));
    };
    let numbers: Vec<f32> = (0..64).map(|i| 1.0 + (i as f32 * 0.37).sin()).collect();
    for value in ["auto", "off"] {
        let (y, _) = run(record, ("flash-attention", value), &[("x", Data::F32(&numbers))]).unwrap();
        let (first, others) = y[0].split_at(16);
        assert!(check::relative(first, &numbers[..16]) < 1e-6 && others.iter().all(|v| *v == 0.0), "{value}: {y:?}");
    }
}

/// Where no target counts, nothing is written over what lay in the gradient's place.
#[test]
fn without_a_target_that_counts_gradients_are_zeros() {
    let r = Recorder::new();
    let (w, h) = (r.param("w", &[16, 8], Init::Normal { std: 1.0 }), r.feed("h", &[4, 8], DType::F32));
    let loss = h.linear_cross_entropy(w, r.feed("targets", &[4], DType::I32), r.full(&[1], 1.0));
    r.output("loss", loss);
    r.output("dw", r.grad(loss, &[w])[0]);
    let mut store = Store::new(3);
    let mut p = Program::load(r.finish(), &Switches::default(), &device(), &mut store).unwrap();
    let numbers: Vec<f32> = (0..4 * 8).map(|i| (i as f32 * 0.37).sin()).collect();
    for (targets, zeros) in [([1, 2, 3, 0], false), ([-1; 4], true)] {
        p.run(&mut store, &[("h", Data::F32(&numbers)), ("targets", Data::I32(&targets))]).unwrap();
        assert_eq!(p.read("dw", &store).unwrap().iter().all(|v| *v == 0.0), zeros, "{targets:?}");
        assert_eq!(p.scalar("loss", &store).unwrap() == 0.0, zeros, "{targets:?}");
    }
}
