//! Several ranks, as threads, against one.

use kiln_engine::ranks::threads;
use kiln_engine::{Cpu, DType, Data, Device, Graph, Init, Program, Ranks, Recorder, Store, Switches};

/// What a run leaves: outputs of every step, then states.
type Left = Vec<(String, Vec<f32>)>;

/// Runs some steps of a graph on each of these ranks.
fn run(ranks: Vec<Ranks>, graph: &(dyn Fn() -> Graph + Sync), passes: &[(&str, &str)], steps: usize) -> Vec<Left> {
    let one = |ranks: Ranks| {
        let mut switches = Switches::default();
        switches.ranks = ranks;
        passes.iter().for_each(|(pass, value)| switches.set(pass, value).unwrap());
        let g = graph();
        let feeds: Vec<(String, kiln_engine::Meta)> = g.feeds().map(|(n, m)| (n.to_string(), m.clone())).collect();
        let outputs: Vec<String> = g.outputs.iter().map(|o| o.0.clone()).collect();
        let (mut store, device) = (Store::new(7), Device::cpu(Cpu::new(1)));
        let mut program = Program::load(g, &switches, &device, &mut store).unwrap();
        let mut left = vec![];
        for step in 0..steps {
            let floats: Vec<Vec<f32>> =
                feeds.iter().map(|(_, m)| (0..m.elements()).map(|i| ((i * 37 + step * 11) % 101) as f32 / 50.0 - 1.0).collect()).collect();
            let ints: Vec<Vec<i32>> = feeds.iter().map(|(_, m)| (0..m.elements()).map(|i| ((i * 7 + step) % 5) as i32).collect()).collect();
            let data: Vec<(&str, Data)> = feeds
                .iter()
                .enumerate()
                .map(|(k, (n, m))| (n.as_str(), if m.dtype == DType::F32 { Data::F32(&floats[k]) } else { Data::I32(&ints[k]) }))
                .collect();
            program.run(&mut store, &data).unwrap();
            left.extend(outputs.iter().map(|o| (format!("{o} after step {step}"), program.read(o, &store).unwrap())));
        }
        let whole = store.iter().filter(|(_, t)| t.parts.is_empty()).map(|(n, t)| (n.to_string(), t.f32().unwrap()));
        left.extend(whole);
        left
    };
    let one = &one;
    std::thread::scope(|s| {
        let all: Vec<_> = ranks.into_iter().map(|r| s.spawn(move || one(r))).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Every rank has the same, and the same as one rank has alone.
fn same(ranks: Vec<Ranks>, graph: impl Fn() -> Graph + Sync, passes: &[(&str, &str)]) {
    let what = format!("{} ranks", ranks.len());
    let alone = run(vec![Ranks::default()], &graph, &[], 3).remove(0);
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
    let table = param("table", &[5, d]);
    let carry = r.state("carry", &[b, t, d], DType::F32, Init::Normal { std: 1.0 });
    let x = table.gather_rows(tokens) + carry * 0.1;
    let q = x.reshape(&[b * t, d]).matmul(param("q", &[d, d])).reshape(&[b, t, 2, d / 2]);
    let a = kiln_engine::ops::attention::attention(q, q, q, true, 0.5).reshape(&[b, t, d]);
    let x = (x + a).rms_norm(param("norm", &[d]), 1e-5).dropout(0.2, rng);
    let experts =
        kiln_engine::ops::experts::mixture(x, Some(param("router", &[4, d])), param("up", &[4, 12, d]), param("down", &[4, d, 6]), 2);
    let (y, routing) = experts;
    let h = (x + y).reshape(&[b * t, d]);
    let count = (weight.sum_axis(1).is_finite()).sum();
    let loss = h.linear(table).cross_entropy(targets.reshape(&[b * t])).sum() / count + routing.unwrap().balance() * 0.1;
    let loss = loss + (h * weight).square().mean();
    let params = r.params();
    let by: Vec<_> = params.iter().map(|p| p.1).collect();
    let grads = r.grad(loss, &by);
    let norm = kiln_engine::ops::adamw::global_norm(&grads);
    params.iter().zip(&grads).for_each(|((_, p), g)| r.update(*p, *p - *g * rate.square() * 0.1));
    r.update(carry, x);
    r.output("loss", loss);
    r.output("norm", norm);
    r.output("x", x);
    r.finish()
}

#[test]
fn a_batch_is_divided_and_the_step_stays_the_same() {
    for ranks in [1, 2, 4] {
        same(threads::ranks(ranks, 1), step, &[]);
    }
}

/// What is divided is divided: all but the optimizer's arithmetic, without putting a value of the batch together again.
#[test]
fn what_a_rank_computes_is_a_part() {
    let mut switches = Switches::default();
    switches.ranks = Ranks::planned(4, 1);
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
    let sums = [
        "f32[1, 4]",
        "f32[1]",
        "f32[1]",
        "f32[1]",
        "f32[4, 12, 8]",
        "f32[4, 8, 6]",
        "f32[4, 8]",
        "f32[5, 8]",
        "f32[8, 8]",
        "f32[8]",
        "i32[5]",
    ];
    let mut expected: Vec<String> = sums.iter().map(|s| format!("all_reduce {s}")).collect();
    expected.insert(0, "all_gather f32[8, 4, 8]".into());
    assert_eq!(exchanged, expected);
}
