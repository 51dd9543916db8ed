//! Gradients that several programs add up, each rank its own terms: against one rank.

use kiln_engine::passes::Target;
use kiln_engine::ranks::threads;
use kiln_engine::{Compiled, Cpu, DType, Data, Device, Graph, Init, Program, Ranks, Recorder, Store, Switches, Var};

const WEIGHTS: [(&str, [usize; 2]); 3] = [("first", [4, 8]), ("second", [8, 6]), ("both", [6, 4])];

fn params(r: &Recorder) -> [Var<'_>; 3] {
    WEIGHTS.map(|(name, shape)| r.param(name, &shape, Init::Normal { std: 0.5 }))
}

fn sums(r: &Recorder) -> [Var<'_>; 3] {
    WEIGHTS.map(|(name, shape)| r.state(&format!("scratch/{name}"), &shape, DType::F32, Init::Full(0.0)))
}

fn add<'g>(r: &'g Recorder, loss: Var<'g>, by: [Var<'g>; 3]) {
    for (sum, gradient) in sums(r).into_iter().zip(r.grad(loss, &by)) {
        r.update(sum, sum + gradient);
    }
    r.output("loss", loss);
}

/// A batch, and something of the last weight that has nothing to do with the batch.
fn micro() -> Graph {
    let r = Recorder::new();
    let [first, second, both] = params(&r);
    let x = r.feed("x", &[8, 4], DType::F32);
    let loss = x.matmul(first).silu().matmul(second.exp() * 0.3).silu().matmul(both).square().mean() + both.square().sum() * 0.1;
    add(&r, loss, [first, second, both]);
    r.finish()
}

/// The weights alone: every rank computes all of it.
fn decay() -> Graph {
    let r = Recorder::new();
    let by = params(&r);
    let loss = by.into_iter().map(|w| w.square().sum()).reduce(|a, b| a + b).unwrap();
    add(&r, loss, by);
    r.finish()
}

/// Weights move along the sums, of which a half stays.
fn update() -> Graph {
    let r = Recorder::new();
    for (w, sum) in params(&r).into_iter().zip(sums(&r)) {
        r.update(w, w - sum * 0.1);
        r.update(sum, sum * 0.5);
    }
    r.finish()
}

/// The weights after three steps; programs are compiled in this order.
fn weights(ranks: usize, order: [&str; 3], passes: &[(&str, &str)]) -> Vec<Vec<f32>> {
    let each = threads::each(ranks, 1, |ranks| {
        let mut switches = Switches::default().on_ranks(ranks);
        passes.iter().for_each(|(pass, value)| switches.set(pass, value).unwrap());
        let (mut store, device) = (Store::new(7), Device::cpu(Cpu::new(1)));
        let mut programs: Vec<(&str, Program)> = vec![];
        for name in order {
            let graph = match name {
                "micro" => micro(),
                "decay" => decay(),
                _ => update(),
            };
            programs.push((name, Program::load(graph, &switches, &device, &mut store).unwrap()));
        }
        for step in 0..3 {
            for (k, name) in ["micro", "micro", "decay", "micro", "update"].into_iter().enumerate() {
                let x: Vec<f32> = (0..32).map(|i| ((i * 7 + k * 3 + step * 5) % 11) as f32 / 5.0 - 1.0).collect();
                let feeds = [("x", Data::F32(&x))];
                let program = &mut programs.iter_mut().find(|p| p.0 == name).unwrap().1;
                program.run(&mut store, if name == "micro" { &feeds } else { &[] }).unwrap();
            }
        }
        WEIGHTS.iter().flat_map(|(name, _)| store.get(name).unwrap().f32().unwrap()).collect::<Vec<f32>>()
    });
    each.into_iter().collect()
}

#[test]
fn terms_add_up_to_the_same_in_any_order_of_programs() {
    let alone = weights(1, ["micro", "decay", "update"], &[]).remove(0);
    for ranks in [2, 4] {
        for order in
            [["micro", "decay", "update"], ["update", "micro", "decay"], ["decay", "micro", "update"], ["micro", "update", "decay"]]
        {
            for passes in [&[][..], &[("overlap-gradients", "off")], &[("dead-code", "off")]] {
                for ours in weights(ranks, order, passes) {
                    let worst = ours.iter().zip(&alone).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                    assert!(ours.len() == 104 && worst < 1e-5, "{ranks} ranks, {order:?}, {passes:?}: {worst}");
                }
            }
        }
    }
}

fn load(graph: Graph, switches: &Switches, store: &mut Store) -> Program {
    Program::load(graph, switches, &Device::cpu(Cpu::new(1)), store).unwrap()
}

/// Two weights and the sums of their gradients. All of these stay terms: a gradient that is exchanged would show every rank the others' overflow.
fn terms(r: &Recorder) -> [(Var<'_>, Var<'_>); 2] {
    [0, 1].map(|i| {
        let (name, shape) = WEIGHTS[i];
        let sum = r.state(&format!("scratch/{name}"), &shape, DType::F32, Init::Full(0.0));
        (r.param(name, &shape, Init::Normal { std: 0.5 }), sum)
    })
}

/// The loss scale, the runs since it changed and the skipped ones of each rank, after a batch whose second half is this large.
fn loss_scales(ranks: usize, second_half: f32) -> Vec<[f32; 3]> {
    let micro = || {
        let r = Recorder::new();
        let both = terms(&r);
        let loss = r.feed("x", &[8, 4], DType::F32).matmul(both[0].0).silu().matmul(both[1].0).square().mean();
        for ((_, sum), gradient) in both.into_iter().zip(r.grad(loss, &both.map(|b| b.0))) {
            r.update(sum, sum + gradient);
        }
        r.output("loss", loss);
        r.finish()
    };
    let update = || {
        let r = Recorder::new();
        terms(&r).into_iter().for_each(|(w, sum)| r.update(w, w - sum * 0.1));
        r.finish()
    };
    threads::each(ranks, 1, |ranks| {
        let switches = Switches::default().on_ranks(ranks).with("fp16", "auto,scale=65536").unwrap();
        let mut store = Store::new(7);
        let mut programs = [load(micro(), &switches, &mut store), load(update(), &switches, &mut store)];
        let x: Vec<f32> = (0..32).map(|i| if i < 16 { 0.1 } else { second_half }).collect();
        programs[0].run(&mut store, &[("x", Data::F32(&x))]).unwrap();
        programs[1].run(&mut store, &[]).unwrap();
        ["scale", "runs", "skipped"].map(|name| store.get(&format!("fp16.{name}")).unwrap().f32().unwrap()[0])
    })
}

#[test]
fn an_overflow_in_the_rows_of_one_rank_is_one_of_all() {
    for (second_half, expected) in [(0.1, [65536.0, 1.0, 0.0]), (1e4, [32768.0, 0.0, 1.0])] {
        for ranks in [1, 2] {
            assert_eq!(loss_scales(ranks, second_half), vec![expected; ranks], "{ranks} ranks, rows of {second_half}");
        }
    }
}

/// What is read after the run is not in memory that the run has emptied.
#[test]
fn a_sum_that_is_put_out_is_not_emptied() {
    let emptied = || {
        let r = Recorder::new();
        for (i, (w, sum)) in params(&r).into_iter().zip(sums(&r)).enumerate() {
            r.output(&format!("sum {i}"), sum);
            r.update(w, w - sum * 0.1);
            r.update(sum, r.zeros(&sum.shape()));
        }
        r.finish()
    };
    let put_out = |ranks| {
        threads::each(ranks, 1, |ranks| {
            let switches = Switches::default().on_ranks(ranks);
            let mut store = Store::new(7);
            let mut programs = [load(micro(), &switches, &mut store), load(emptied(), &switches, &mut store)];
            for k in 0..2 {
                let x: Vec<f32> = (0..32).map(|i| ((i * 7 + k * 3) % 11) as f32 / 5.0 - 1.0).collect();
                programs[0].run(&mut store, &[("x", Data::F32(&x))]).unwrap();
            }
            programs[1].run(&mut store, &[]).unwrap();
            let left = sums_of(&store);
            assert!(left.iter().all(|v| *v == 0.0), "the sums begin anew");
            (0..3).flat_map(|i| programs[1].read(&format!("sum {i}"), &store).unwrap()).collect::<Vec<f32>>()
        })
    };
    let alone = put_out(1).remove(0);
    assert!(alone.len() == 104 && alone.iter().all(|v| v.abs() > 1e-7), "{alone:?}");
    for ours in put_out(2) {
        let worst = ours.iter().zip(&alone).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(ours.len() == 104 && worst < 1e-5, "{worst}: {ours:?}");
    }
}

fn sums_of(store: &Store) -> Vec<f32> {
    WEIGHTS.iter().flat_map(|(name, _)| store.get(&format!("scratch/{name}")).unwrap().f32().unwrap()).collect()
}

/// What is exchanged by a program, by shape.
fn exchanged(graph: Graph, switches: &Switches) -> (Vec<Vec<usize>>, Compiled) {
    let c = Compiled::new(graph, switches, Target::Cpu).unwrap();
    let all = c.graph.nodes.iter().filter(|n| n.name() == "all_reduce").flat_map(|n| n.outputs.iter().map(|m| m.shape.clone()));
    (all.filter(|shape| shape.iter().product::<usize>() > 1).collect(), c)
}

#[test]
fn what_has_terms_is_exchanged_once() {
    let switches = Switches::default().on_ranks(Ranks::planned(2, 1));
    let (each, c) = exchanged(micro(), &switches);
    // The last weight is also read by all ranks alike: the receipt says so.
    let receipt = c.receipts.iter().find(|r| r.pass == "data-parallel").unwrap().summary();
    assert_eq!(each, [[6, 4]], "{receipt}");
    assert!(
        receipt.contains("2 gradients are added up on each rank") && receipt.contains("1: its gradient is exchanged for every micro-batch"),
        "{receipt}"
    );
    assert!(exchanged(decay(), &switches).0.is_empty());
    let (mut once, c) = exchanged(update(), &switches);
    once.sort();
    assert_eq!(once, [[4, 8], [8, 6]]);
    c.plan.verify(&c.graph).unwrap();
    // Where the program that reads the sums comes first, they are whole.
    let switches = Switches::default().on_ranks(Ranks::planned(2, 1));
    assert!(exchanged(update(), &switches).0.is_empty());
    assert_eq!(exchanged(micro(), &switches).0.len(), 3);
}

/// A sum whose state becomes zeros afterwards is exchanged where it lies: no second copy of all gradients.
#[test]
fn sums_are_exchanged_in_their_own_memory() {
    let emptied = || {
        let r = Recorder::new();
        for (w, sum) in params(&r).into_iter().zip(sums(&r)) {
            r.update(w, w - sum * 0.1 / (sum.square().sum() + 1.0));
            r.update(sum, r.zeros(&sum.shape()));
        }
        r.finish()
    };
    let switches = Switches::default().on_ranks(Ranks::planned(2, 1));
    exchanged(micro(), &switches);
    let c = exchanged(emptied(), &switches).1;
    let sum = c.graph.nodes.iter().position(|n| n.name() == "all_reduce").unwrap();
    assert!(c.graph.nodes[sum].inputs.len() == 2 && c.plan.copies.iter().all(|copy| copy.node != sum), "{:?}", c.plan.copies);
    for (out, v) in c.graph.nodes[sum].inputs.iter().enumerate() {
        assert_eq!(c.plan.spots[sum][out].buffer, c.plan.spots[v.node][v.out].buffer);
    }
}
