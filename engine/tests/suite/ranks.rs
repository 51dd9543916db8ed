//! Several ranks, as threads, against one.

use kiln_engine::check::Numbers;
use kiln_engine::ops::collective::{all_gather, all_reduce, part};
use kiln_engine::passes::Target;
use kiln_engine::ranks::threads;
use kiln_engine::{Compiled, Cpu, DType, Device, Graph, Init, Program, Ranks, Recorder, Store, Switches, check};

/// What a run leaves: outputs of every step, then states.
type Left = Vec<(String, Vec<f32>)>;

/// Runs some steps of a graph on each of so many ranks.
fn run([data, tensor]: [usize; 2], graph: &(dyn Fn() -> Graph + Sync), passes: &[(&str, &str)], steps: usize) -> Vec<Left> {
    threads::each(data, tensor, |ranks| {
        let mut switches = Switches::default().on_ranks(ranks);
        passes.iter().for_each(|(pass, value)| switches.set(pass, value).unwrap());
        let g = graph();
        let feeds = check::feeds_of(&g);
        let outputs: Vec<String> = g.outputs.iter().map(|o| o.0.clone()).collect();
        let (mut store, device) = (Store::new(7), Device::cpu(Cpu::new(1)));
        let mut program = Program::load(g, &switches, &device, &mut store).unwrap();
        let mut left = vec![];
        for step in 0..steps {
            let few = |name: &str, d: &Numbers| match d {
                Numbers::I32(all) if name != "rng" => Numbers::I32(all.iter().map(|i| (i + step as i32).rem_euclid(5)).collect()),
                other => other.clone(),
            };
            let now: Vec<(&str, Numbers)> = feeds.iter().map(|(name, d)| (name.as_str(), few(name, d))).collect();
            program.run(&mut store, &now.iter().map(|(name, d)| (*name, d.data())).collect::<Vec<_>>()).unwrap();
            left.extend(outputs.iter().map(|o| (format!("{o} after step {step}"), program.read(o, &store).unwrap())));
        }
        let whole = store.iter().filter(|(_, t)| t.parts.is_empty()).map(|(n, t)| (n.to_string(), t.f32().unwrap()));
        left.extend(whole);
        left
    })
}

/// Every rank has the same, and the same as one rank has alone.
fn same(ranks: [usize; 2], graph: impl Fn() -> Graph + Sync, passes: &[(&str, &str)]) {
    let what = format!("{ranks:?} ranks");
    let alone = run([1, 1], &graph, &[], 3).remove(0);
    for left in run(ranks, &graph, passes, 3) {
        for (name, ours) in left {
            let theirs = &alone.iter().find(|a| a.0 == name).unwrap_or_else(|| panic!("{what}: {name} is new")).1;
            assert_eq!(ours.len(), theirs.len(), "{what}: {name}");
            let most = theirs.iter().fold(1e-3f32, |m, v| m.max(v.abs()));
            let worst = ours.iter().zip(theirs).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(worst <= 2e-5 * most, "{what}: {name} differs by {worst} of {most}");
        }
    }
}

/// A small step with what makes batches hard to divide: a masked mean, dropout, experts with a balance loss, a carry, attention, clipping.
fn step() -> Graph {
    let r = Recorder::new();
    let (b, t, d) = (8, 4, 8);
    let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.3 });
    let tokens = r.feed("tokens", &[b, t], DType::I32);
    let targets = r.feed("targets", &[b, t], DType::I32);
    let weight = r.feed("weight", &[b * t, d], DType::F32);
    let rng = r.feed("rng", &[4], DType::I32);
    let rate = r.feed("rate", &[1], DType::F32);
    let table = param("table", &[6, d]);
    let carry = r.state("carry", &[b, t, d], DType::F32, Init::Normal { std: 1.0 });
    let x = table.gather_rows(tokens) + carry * 0.1;
    let q = x.reshape(&[b * t, d]).matmul(param("q", &[d, d])).reshape(&[b, t, 2, d / 2]);
    let a = kiln_engine::ops::attention::attention(q, q, q, true, 0.5).reshape(&[b, t, d]);
    let wide = (x.matmul(param("wide", &[d, 16])) + param("bias", &[16])).silu();
    let a = a + wide.matmul(param("narrow", &[16, d]));
    let x = (x + a).rms_norm(param("norm", &[d]), 1e-5).dropout(0.2, rng);
    let experts =
        kiln_engine::ops::experts::mixture(x, Some(param("router", &[4, d])), param("up", &[4, 12, d]), param("down", &[4, d, 6]), 2);
    let (y, routing) = experts;
    let h = (x + y).reshape(&[b * t, d]);
    let count = (weight.sum_axis(1).is_finite()).sum();
    let loss = h.linear_cross_entropy(table, targets.reshape(&[b * t]), r.full(&[1], 1.0)) / count + routing.unwrap().balance() * 0.1;
    let loss = loss + (h * weight).square().mean();
    let params = r.params();
    let by: Vec<_> = params.iter().map(|p| p.1).collect();
    let grads = r.grad(loss, &by);
    let norm = kiln_engine::ops::adamw::global_norm(&grads);
    let one = r.full(&[1], 1.0);
    let mut inputs = vec![rate.square() * 0.01, one / (norm + 1.0), one, one];
    let mut states = vec![];
    for ((name, p), g) in params.iter().zip(&grads) {
        let [m, v] = ["m", "v"].map(|which| r.state(&format!("{which}/{name}"), &p.shape(), DType::F32, Init::Full(0.0)));
        inputs.extend([*p, *g, m, v]);
        states.extend([*p, m, v]);
    }
    let decay = vec![0.1; params.len()];
    let new = r.op(kiln_engine::ops::adamw::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-2, decay }, &inputs);
    states.into_iter().zip(new).for_each(|(state, new)| r.update(state, new));
    r.update(carry, x);
    r.output("loss", loss);
    r.output("norm", norm);
    r.output("x", x);
    r.finish()
}

/// Not only with the ranks that it is for.
#[test]
fn settings_of_a_pass_are_read_with_one_rank_too() {
    for (pass, value) in [
        ("tensor-parallel", "auto,sequence=foo"),
        ("overlap-gradients", "auto,stream=foo"),
        ("overlap-gradients", "auto,bucket=foo"),
        ("zero-weights", "auto,least=foo"),
        ("zero-weights", "auto,ahead=foo"),
    ] {
        let r = Recorder::new();
        r.output("y", r.feed("x", &[2], DType::F32) * 2.0);
        let switches = Switches::default().with(pass, value).unwrap();
        let said = Compiled::new(r.finish(), &switches, Target::Cpu).err().map_or(String::new(), |e| e.to_string());
        assert!(said.contains(pass) && said.contains("=foo is not"), "{pass}={value}: {said:?}");
    }
}

#[test]
fn a_batch_is_divided_and_the_step_stays_the_same() {
    for ranks in [1, 2, 4] {
        same([ranks, 1], step, &[]);
    }
}

#[test]
fn moments_are_divided_and_the_step_stays_the_same() {
    for ranks in [2, 4] {
        same([ranks, 1], step, &[("zero", "require")]);
    }
}

#[test]
fn weights_are_divided_and_the_step_stays_the_same() {
    same([1, 2], step, &[]);
    same([2, 2], step, &[]);
    same([2, 2], step, &[("zero", "auto")]);
    same([1, 4], step, &[]);
}

#[test]
fn tokens_are_divided_between_layers_and_the_step_stays_the_same() {
    for ranks in [[1, 2], [2, 2], [1, 4]] {
        same(ranks, step, &[("tensor-parallel", "auto,sequence=divided")]);
    }
    same([2, 2], step, &[("tensor-parallel", "auto,sequence=divided"), ("zero", "auto"), ("zero-weights", "auto,least=1")]);
}

#[test]
fn weights_are_gathered_and_the_step_stays_the_same() {
    for ranks in [[2, 1], [4, 1], [2, 2]] {
        for ahead in ["auto,least=1", "auto,least=1,ahead=0", "auto,least=60"] {
            same(ranks, step, &[("zero", "auto"), ("zero-weights", ahead)]);
        }
    }
    // Without divided moments, too: then AdamW reads whole weights.
    same([2, 1], step, &[("zero-weights", "auto,least=1")]);
}

/// Buckets of gradients, each alone or all at once, change no bit.
#[test]
fn gradients_in_buckets_add_up_to_the_same() {
    for (ranks, zero) in [([4, 1], "off"), ([2, 1], "require"), ([2, 2], "off")] {
        let with = |value| run(ranks, &step, &[("zero", zero), ("overlap-gradients", value)], 3);
        let one_by_one = with("off");
        for value in ["auto", "auto,bucket=0", "auto,stream=same"] {
            assert!(with(value) == one_by_one, "{ranks:?} ranks, zero {zero}, {value}");
        }
    }
}

/// What is divided is divided: all but the optimizer's arithmetic, without putting a value of the batch together again.
#[test]
fn what_a_rank_computes_is_a_part() {
    let switches = Switches::default().with("overlap-gradients", "off").unwrap().on_ranks(Ranks::planned(4, 1));
    let compiled = kiln_engine::Compiled::new(step(), &switches, kiln_engine::passes::Target::Cpu).unwrap();
    let receipt = compiled.receipts.iter().find(|r| r.pass == "data-parallel").unwrap();
    assert!(receipt.applied > 20 && receipt.declined.is_empty(), "{}", receipt.summary());
    let parts = &compiled.graph.parts;
    let names = |of: &std::collections::BTreeMap<String, Vec<kiln_engine::ranks::Part>>| of.keys().cloned().collect::<Vec<_>>();
    assert_eq!(
        (names(&parts.feeds), names(&parts.states)),
        (vec!["targets".into(), "tokens".into(), "weight".into()], vec!["carry".into()])
    );
    let mut exchanged: Vec<String> =
        compiled.graph.nodes.iter().filter(|n| n.name().starts_with("all_")).map(|n| format!("{} {:?}", n.name(), n.outputs[0])).collect();
    exchanged.sort();
    // Each parameter's gradient once; three sums of the loss, the count, the loads; and the output.
    let gradients = ["[16, 8]", "[16]", "[4, 12, 8]", "[4, 8, 6]", "[4, 8]", "[6, 8]", "[8, 16]", "[8, 8]", "[8]"];
    let sums = gradients.iter().chain(&["[1]", "[1]", "[1]", "[1, 4]"]).map(|shape| format!("all_reduce f32{shape}"));
    let mut expected: Vec<String> = sums.chain(["all_gather f32[8, 4, 8]".into(), "all_reduce i32[5]".into()]).collect();
    expected.sort();
    assert_eq!(exchanged, expected);
}

/// Columns of the first matmul and rows of the second, with one sum for both; what belongs to them follows.
#[test]
fn which_weights_are_divided() {
    let switches = Switches::default().with("zero", "auto").unwrap().on_ranks(Ranks::planned(2, 2));
    let compiled = kiln_engine::Compiled::new(step(), &switches, kiln_engine::passes::Target::Cpu).unwrap();
    let applied = |pass: &str| compiled.receipts.iter().find(|r| r.pass == pass).unwrap().applied;
    assert!(applied("tensor-parallel") > 0 && applied("zero") == 9 && applied("reduce-scatter") == 9);
    // Of a state: along which dimension, or of the elements in a row, and among which ranks.
    let cut = |name: &str| -> Vec<(Option<usize>, &str)> {
        compiled.graph.parts.states.get(name).into_iter().flatten().map(|p| (p.axis, p.by)).collect()
    };
    assert_eq!(cut("wide"), [(Some(1), "tensor")]);
    assert_eq!([cut("bias"), cut("narrow")], [[(Some(0), "tensor")], [(Some(0), "tensor")]]);
    assert_eq!(cut("m/wide"), [(Some(1), "tensor"), (None, "data")]);
    assert_eq!((cut("table"), cut("q"), cut("carry")), (vec![(Some(0), "tensor")], vec![], vec![(Some(0), "data")]));
    let between = |g: &str| {
        let wide =
            |n: &kiln_engine::graph::Node| n.name().contains("_") && n.outputs[0].elements() > 8 && format!("{:?}", n.kind).contains(g);
        compiled.graph.nodes.iter().filter(|n| wide(n)).map(|n| n.name().to_string()).collect::<Vec<_>>()
    };
    // By expert.
    assert_eq!([cut("up"), cut("down")], [[(Some(0), "tensor")], [(Some(0), "tensor")]]);
    // One sum of the two matmuls, one of the embedding's rows, one of the experts, two of each row's loss; of gradients, those of what the layer, the loss and
    // the experts read, and of the weights of the experts.
    let sums = |n: usize| vec!["all_reduce"; n];
    assert_eq!(between("group: tensor"), [sums(4), vec!["all_gather"], sums(4)].concat());
}

/// Between the layers, what was a sum on all ranks is scattered and gathered, the embedding's rows too; each row's loss is left.
#[test]
fn what_is_divided_by_tokens() {
    let switches = Switches::default().with("tensor-parallel", "auto,sequence=divided").unwrap().on_ranks(Ranks::planned(1, 2));
    let compiled = kiln_engine::Compiled::new(step(), &switches, kiln_engine::passes::Target::Cpu).unwrap();
    let receipt = compiled.receipts.iter().find(|r| r.pass == "tensor-parallel").unwrap();
    assert!(receipt.declined.iter().all(|d| !d.0.contains("sequence")), "{}", receipt.summary());
    let count = |name: &str| {
        let large = |n: &&kiln_engine::graph::Node| n.name() == name && n.outputs.iter().any(|m| m.elements() >= 8 * 4 * 8 / 2);
        compiled.graph.nodes.iter().filter(large).count()
    };
    assert_eq!(count("all_reduce"), 0);
    assert!(count("reduce_scatter") >= 4 && count("all_gather") >= 4, "{} {}", count("reduce_scatter"), count("all_gather"));
    // One row of one token has nothing to divide.
    let one = || {
        let r = Recorder::new();
        let x = r.feed("x", &[1, 4], DType::F32);
        let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.5 });
        r.output("y", x + x.matmul(param("up", &[4, 8])).silu().matmul(param("down", &[8, 4])));
        r.finish()
    };
    let compiled = kiln_engine::Compiled::new(one(), &switches, kiln_engine::passes::Target::Cpu).unwrap();
    let receipt = compiled.receipts.iter().find(|r| r.pass == "tensor-parallel").unwrap();
    assert!(receipt.declined.iter().any(|d| d.0.contains("sequence=divided: no value")), "{}", receipt.summary());
}

/// Weights are gathered in bf16, once forward and once backward, and no more than two layers of them are there at a time.
#[test]
fn gathered_weights_are_not_kept() {
    const LAYERS: usize = 8;
    let graph = || {
        let r = Recorder::new();
        let mut h = r.feed("x", &[4, 64], DType::F32);
        for i in 0..LAYERS {
            h = r.block(&format!("blocks.{i}"), || h + h.matmul(r.param(&format!("w{i}"), &[64, 64], Init::Normal { std: 0.1 })).silu());
        }
        let loss = h.square().mean();
        let params = r.params();
        let by: Vec<_> = params.iter().map(|p| p.1).collect();
        let one = r.full(&[1], 1.0);
        let (mut inputs, mut states) = (vec![one * 0.1, one, one, one], vec![]);
        for ((name, p), g) in params.iter().zip(r.grad(loss, &by)) {
            let [m, v] = ["m", "v"].map(|which| r.state(&format!("{which}/{name}"), &p.shape(), DType::F32, Init::Full(0.0)));
            inputs.extend([*p, g, m, v]);
            states.extend([*p, m, v]);
        }
        let op = kiln_engine::ops::adamw::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-2, decay: vec![0.1; LAYERS] };
        states.into_iter().zip(r.op(op, &inputs)).for_each(|(state, new)| r.update(state, new));
        r.output("loss", loss);
        r.finish()
    };
    let compiled = |weights: &str| {
        let switches = Switches::default().with("zero", "auto").unwrap().with("bf16", "auto").unwrap();
        // Each gradient by itself, whatever fits a bucket.
        let switches = switches.with("zero-weights", weights).unwrap().with("overlap-gradients", "auto,bucket=0").unwrap();
        let switches = switches.on_ranks(Ranks::planned(4, 1));
        kiln_engine::Compiled::new(graph(), &switches, kiln_engine::passes::Target::Cpu).unwrap()
    };
    let (kept, gathered) = (compiled("off"), compiled("auto,least=1"));
    let all = LAYERS * 64 * 64 * 4;
    // f32 weights and two moments, each a quarter.
    assert!(kept.plan.memory.state >= all && gathered.plan.memory.state < all, "{} {}", kept.plan.memory.state, gathered.plan.memory.state);
    let gathers: Vec<bool> = gathered
        .graph
        .nodes
        .iter()
        .filter(|n| n.name() == "all_gather" && n.outputs[0].dtype == DType::BF16 && n.outputs[0].elements() == 64 * 64)
        .map(|n| n.backward)
        .collect();
    // The first layer's input has no gradient, so that the backward pass does not read its weight.
    assert_eq!([false, true].map(|b| gathers.iter().filter(|g| **g == b).count()), [LAYERS, LAYERS - 1]);
    // Gradients are summed in f32, each rank's part of them.
    let scattered = |n: &&kiln_engine::graph::Node| n.name() == "reduce_scatter" && n.outputs[0] == kiln_engine::Meta::f32(&[64 * 64 / 4]);
    assert_eq!(gathered.graph.nodes.iter().filter(scattered).count(), LAYERS);
    // At a time: two weights in bf16, since they are gathered a layer ahead, three whole gradients in f32, and the rank's parts of all gradients.
    let most = gathered.plan.memory.activations;
    let held = 64 * 64 * (2 * 2 + 3 * 4 + LAYERS * 4 / 4);
    assert!(most <= held, "{most} instead of {held}");
    // The gather of a layer comes before what the layer before it computes.
    let place = |layer: usize, name: &str| {
        let scope = format!("blocks.{layer}");
        gathered.graph.nodes.iter().position(|n| n.name() == name && !n.backward && *n.scope == *scope).unwrap()
    };
    assert!((1..LAYERS).all(|i| place(i, "all_gather") < place(i - 1, "matmul")));
}

/// Scales follow from the largest values of all ranks, so that every rank rounds to the same numbers as one would.
#[test]
fn fp8_rounds_as_one_rank_does() {
    let graph = || {
        let r = Recorder::new();
        let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.3 });
        let (a, b) = (param("a", &[32, 16]), param("b", &[16, 32]));
        // Only the last example is large: it is the last rank's.
        let large = r.constant(&[1024, 1], (0..1024).map(|i| if i == 1023 { 7.0 } else { 1.0 }).collect());
        let x = r.feed("x", &[1024, 16], DType::F32) * large;
        let loss = (x + x.linear(a).silu().linear(b)).square().mean();
        r.output("loss", loss);
        ["da", "db"].iter().zip(r.grad(loss, &[a, b])).for_each(|(name, g)| r.output(name, g));
        r.finish()
    };
    let fp8 = [("fp8", "auto,least=8,warmup=0")];
    let [plain, alone] = [&[][..], &fp8].map(|passes| run([1, 1], &graph, passes, 3).remove(0));
    let worst = |ours: &Left, theirs: &Left, name: &str| {
        let [a, b] = [ours, theirs].map(|left| &left.iter().find(|l| l.0 == name).unwrap().1);
        let most = b.iter().fold(1e-3f32, |m, v| m.max(v.abs()));
        a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / most
    };
    assert!(worst(&alone, &plain, "da after step 2") > 1e-3, "FP8 rounds");
    for left in [[2, 1], [4, 1], [1, 2]].into_iter().flat_map(|ranks| run(ranks, &graph, &fp8, 3)) {
        for name in ["loss after step 2", "da after step 2", "db after step 2"] {
            let worst = worst(&left, &alone, name);
            assert!(worst < 1e-4, "{name} differs by {worst}");
        }
    }
}

/// Gradients with respect to what is in between: a sum over the batch, and a view of a weight.
#[test]
fn gradients_of_values_in_between() {
    let graph = || {
        let r = Recorder::new();
        let w = r.param("w", &[3, 4], Init::Normal { std: 1.0 });
        let x = r.feed("x", &[8, 4], DType::F32);
        let seen = w.t();
        let total = x.matmul(seen).sum_axis(0);
        let loss = total.square().mean() + (seen.square().mean() + x.matmul(seen).silu().mean());
        let grads = r.grad(loss, &[total, seen]);
        r.output("loss", loss);
        r.output("total", grads[0]);
        r.output("view", grads[1]);
        r.finish()
    };
    same([2, 1], graph, &[]);
    same([4, 1], graph, &[]);
}

/// Numbers of a rank's own are not handed out as if they were everybody's.
#[test]
fn rows_in_an_order_of_ones_own_are_refused_elsewhere() {
    let compiled = |build: for<'g> fn(kiln_engine::Var<'g>) -> kiln_engine::Var<'g>| {
        let r = Recorder::new();
        let chosen = r.feed("chosen", &[8, 2], DType::I32);
        r.output("y", build(chosen));
        let switches = Switches::default().on_ranks(Ranks::planned(2, 1));
        kiln_engine::Compiled::new(r.finish(), &switches, kiln_engine::passes::Target::Cpu).map(|_| ()).map_err(|e| e.to_string())
    };
    for build in [
        (|c| c.dispatch(4).order) as for<'g> fn(kiln_engine::Var<'g>) -> kiln_engine::Var<'g>,
        |c| c.dispatch(4).order.cast(DType::F32).sum(),
        |c| {
            // What is dropped would depend on how many ranks there are.
            let (r, rows) = (c.recorder(), c.dispatch(4));
            let [up, down] = [("up", [4, 6, 4]), ("down", [4, 4, 6])].map(|(name, shape)| r.param(name, &shape, Init::Full(1.0)));
            let (x, rng) = (r.feed("x", &[8, 4], DType::F32), r.feed("rng", &[4], DType::I32));
            x.to_experts(up, &rows).dropout(0.5, rng).from_experts(down, &rows)
        },
    ] {
        let refused = compiled(build).unwrap_err();
        assert!(refused.contains("in an order that each rank has for itself"), "{refused}");
    }
    compiled(|c| c.dispatch(4).offsets.cast(DType::F32).sum()).unwrap();
}

/// A moment that is read for something else, too, is kept whole by every rank.
#[test]
fn moments_that_something_else_reads_are_not_divided() {
    let graph = || {
        let r = Recorder::new();
        let (w, x) = (r.param("w", &[4, 6], Init::Normal { std: 1.0 }), r.feed("x", &[8, 4], DType::F32));
        let loss = x.matmul(w).square().mean();
        let [m, v] = ["m", "v"].map(|name| r.state(name, &[4, 6], DType::F32, Init::Full(0.0)));
        let [rate, one] = [0.1, 1.0].map(|value| r.full(&[1], value));
        let op = kiln_engine::ops::adamw::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-2, decay: vec![0.1] };
        let new = r.op(op, &[rate, one, one, one, w, r.grad(loss, &[w])[0], m, v]);
        [w, m, v].into_iter().zip(new).for_each(|(state, new)| r.update(state, new));
        r.output("moment", m.sum_axis(0));
        r.finish()
    };
    same([2, 1], graph, &[("zero", "auto")]);
}

/// A sum of which every rank reads a part alone is scattered: not columns, and not what is read as a whole after the run.
#[test]
fn parts_of_a_sum_over_ranks_are_those_of_the_whole() {
    for (axis, is_put_out) in [(0, false), (1, false), (0, true)] {
        let right = threads::each(2, 1, |ranks| {
            let (r, group) = (Recorder::new(), ranks.data.clone());
            let x = r.state("x", &[4, 6], DType::F32, Init::Normal { std: 1.0 });
            let sum = all_reduce(x.silu(), &group);
            r.output("parts", all_gather(part(sum, axis, &group).exp(), axis, &group));
            if is_put_out {
                r.output("sum", sum);
            }
            let (mut store, switches) = (Store::new(7), Switches::default().on_ranks(ranks));
            let mut program = Program::load(r.finish(), &switches, &Device::cpu(Cpu::new(1)), &mut store).unwrap();
            program.run(&mut store, &[]).unwrap();
            let twice: Vec<f32> = store.get("x").unwrap().f32().unwrap().iter().map(|x| 2.0 * x / (1.0 + (-x).exp())).collect();
            let exp: Vec<f32> = twice.iter().map(|v| v.exp()).collect();
            check::relative(&program.read("parts", &store).unwrap(), &exp) < 1e-5
                && (!is_put_out || check::relative(&program.read("sum", &store).unwrap(), &twice) < 1e-5)
        });
        assert_eq!(right, [true; 2], "parts along {axis}, {is_put_out}");
    }
}
