//! Adapters that are merged once for the programs of a phase: the numbers stay, and a merge is never older than its phase.

use crate::decode::decoder;
use kiln_engine::kernel::Arch;
use kiln_engine::ops::matmul::Matmul;
use kiln_engine::passes::{MERGED, Receipt, Target, follows, phase};
use kiln_engine::{Compiled, Cpu, DType, Data, Device, Graph, Init, Meta, Program, Ranks, Recorder, Store, Switches, Var, check};

const WIDTH: usize = 32;

/// Two adapted layers for so many rows, the first with a bias.
fn layers(r: &Recorder, rows: usize) {
    let x = r.feed("x", &[1, rows, WIDTH], DType::F32);
    let h = adapted(x, x, "first", Some(0.5)) + r.frozen("bias", &[WIDTH], Init::Normal { std: 0.3 });
    r.output("y", adapted(h.silu(), h.silu(), "second", None));
}

/// x W^T + s (dropped A^T) B^T
fn adapted<'g>(x: Var<'g>, dropped: Var<'g>, name: &str, scale: Option<f32>) -> Var<'g> {
    let r = x.recorder();
    let frozen = r.frozen(&format!("{name}.weight"), &[WIDTH, WIDTH], Init::Normal { std: 0.2 });
    let [a, b] =
        [("a", [4, WIDTH]), ("b", [WIDTH, 4])].map(|(part, shape)| r.param(&format!("{name}.{part}"), &shape, Init::Normal { std: 0.3 }));
    let narrow = dropped.linear(a);
    let narrow = scale.map_or(narrow, |s| narrow * s);
    let y = x.linear(frozen);
    let y = if scale.is_some() { y + r.frozen(&format!("{name}.bias"), &[WIDTH], Init::Normal { std: 0.3 }) } else { y };
    y + narrow.linear(b)
}

fn graph(record: impl Fn(&Recorder)) -> Graph {
    let r = Recorder::new();
    record(&r);
    r.finish()
}

fn on(switches: Switches) -> Switches {
    switches.with("merge-adapters", "require,when=phase").unwrap()
}

fn receipt(c: &Compiled) -> &Receipt {
    c.receipts.iter().find(|r| r.pass == "merge-adapters").unwrap()
}

/// A first program of 9 rows and a later one of 3.
struct Phase {
    first: Program,
    later: Program,
    store: Store,
}

impl Phase {
    fn new(merged: bool, dtype: DType) -> Phase {
        let plain = if dtype == DType::F32 { Switches::default() } else { Switches::default().with("bf16", "auto").unwrap() };
        let [first, later] = match merged {
            true => phase(&on(plain), Target::Cpu).unwrap(),
            false => [plain.clone(), plain],
        };
        let (device, mut store) = (Device::cpu(Cpu::new(2)), Store::new(3));
        let mut load = |rows: usize, switches: &Switches| Program::load(graph(|r| layers(r, rows)), switches, &device, &mut store).unwrap();
        let (first, later) = (load(9, &first), load(3, &later));
        Phase { first, later, store }
    }

    fn read(&mut self) -> Vec<f32> {
        self.first.run(&mut self.store, &[("x", Data::F32(&rows(9)))]).unwrap();
        self.first.read("y", &self.store).unwrap()
    }

    fn write(&mut self) -> Vec<f32> {
        self.later.run(&mut self.store, &[("x", Data::F32(&rows(3)))]).unwrap();
        self.later.read("y", &self.store).unwrap()
    }

    /// As a step of training would.
    fn change(&mut self) {
        for name in ["first.a", "first.b", "second.a", "second.b"] {
            let t = self.store.get(name).unwrap();
            let (meta, numbers) = (t.meta.clone(), t.f32().unwrap());
            let bytes: Vec<u8> = numbers.iter().flat_map(|v| (1.0 - 2.0 * v).to_le_bytes()).collect();
            self.store.set(name, &meta, &bytes).unwrap();
        }
    }
}

fn rows(count: usize) -> Vec<f32> {
    (0..count * WIDTH).map(|i| ((i * 37 % 101) as f32 - 50.0) / 40.0).collect()
}

fn close(a: &[f32], b: &[f32], dtype: DType) {
    let most = if dtype == DType::F32 { 1e-5 } else { check::tolerance(dtype, WIDTH) };
    let (error, size) = (check::relative(a, b), b.iter().map(|v| v.abs()).fold(0.0, f32::max));
    assert!(error < most && size > 0.5, "{error} of {size}");
}

#[test]
fn a_phase_computes_what_it_computes_without_and_never_with_an_older_merge() {
    for dtype in [DType::F32, DType::BF16] {
        let (mut merged, mut plain) = (Phase::new(true, dtype), Phase::new(false, dtype));
        close(&merged.read(), &plain.read(), dtype);
        let before = merged.write();
        close(&before, &plain.write(), dtype);
        merged.change();
        plain.change();
        // The later program alone has no adapter, so that it cannot see what has changed: it is never run alone.
        assert_eq!(merged.write(), before);
        close(&merged.read(), &plain.read(), dtype);
        let after = merged.write();
        close(&after, &plain.write(), dtype);
        assert!(check::relative(&after, &before) > 0.1);
        // Nothing of it is a parameter, or would be saved.
        let made: Vec<_> =
            merged.store.iter().filter(|(name, _)| name.starts_with(MERGED)).map(|(name, t)| (name.to_string(), t.meta.clone())).collect();
        let names = ["first.weight", "second.weight"].map(|name| (format!("{MERGED}{name}"), Meta::new(&[WIDTH, WIDTH], dtype)));
        assert_eq!(made, names);
        assert!(MERGED.starts_with(kiln_engine::SCRATCH));
    }
}

#[test]
fn receipts_say_what_was_merged_and_switched_off_nothing_changes() {
    let compiled = |switches: &Switches| Compiled::new(graph(|r| layers(r, 3)), switches, Target::Cpu).unwrap();
    let [first, later] = phase(&on(Switches::default()), Target::Cpu).unwrap().map(|s| compiled(&s));
    assert_eq!((receipt(&first).applied, receipt(&first).declined.len()), (2, 0));
    assert_eq!(receipt(&first).notes, ["2 adapters merged once for each writing phase, into 0.0 MiB"]);
    assert_eq!(receipt(&later).notes, ["2 merged weights read"]);
    assert!(follows(&first.graph, &later.graph) && !follows(&later.graph, &later.graph));
    let products = |c: &Compiled| c.graph.nodes.iter().filter(|n| n.op::<Matmul>().is_some()).count();
    assert_eq!([&first, &later].map(products), [4, 2]);
    let off = Switches::default().with("merge-adapters", "off").unwrap();
    assert!(phase(&off, Target::Cpu).is_none());
    // A program that is in no phase, or on the CPU by default, or has gradients.
    let plain = compiled(&off).fingerprint();
    assert_eq!(compiled(&on(Switches::default())).fingerprint(), plain);
    for marked in phase(&Switches::default(), Target::Cpu).unwrap() {
        assert_eq!(compiled(&marked).fingerprint(), plain);
        assert!(receipt(&compiled(&marked)).notes[0].contains("on the CPU"));
    }
    let trained = |switches: &Switches| {
        let record = |r: &Recorder| {
            let x = r.feed("x", &[3, WIDTH], DType::F32);
            let loss = adapted(x, x, "first", Some(0.5)).square().sum();
            let params: Vec<_> = r.params().into_iter().map(|p| p.1).collect();
            r.grad(loss, &params).into_iter().enumerate().for_each(|(i, g)| r.output(&format!("g{i}"), g));
        };
        Compiled::new(graph(record), switches, Target::Cpu).unwrap().fingerprint()
    };
    let run = Switches::default().with("merge-adapters", "auto,when=run").unwrap();
    let [first, _] = phase(&run, Target::Cpu).unwrap();
    assert!(trained(&run) == trained(&off) && trained(&first) == trained(&off));
}

#[test]
fn what_cannot_be_merged_is_declined() {
    let declined = |switches: &Switches, record: &dyn Fn(&Recorder)| {
        let merged = switches.clone().with("merge-adapters", "auto,when=phase").unwrap();
        let [first, _] = phase(&merged, Target::Cpu).unwrap();
        let c = Compiled::new(graph(record), &first, Target::Cpu).unwrap();
        assert_eq!((receipt(&c).applied, receipt(&c).sites() > 0), (0, true), "{:?}", receipt(&c));
        receipt(&c).declined[0].0.clone()
    };
    fn x(r: &Recorder) -> Var<'_> {
        r.feed("x", &[4, WIDTH], DType::F32)
    }
    let plain = Switches::default();
    let why = declined(&plain, &|r| {
        let x = x(r);
        r.output("y", adapted(x, x.dropout(0.5, r.feed("rng", &[4], DType::I32)), "q", Some(0.5)));
    });
    assert!(why.contains("dropout"), "{why}");
    let why = declined(&plain, &|r| {
        let x = x(r);
        let [a, b] = [("a", [4, WIDTH]), ("b", [WIDTH, 4])].map(|(part, shape)| r.param(part, &shape, Init::Full(0.1)));
        r.output("y", x.nf4_linear(r.nf4("w", WIDTH, WIDTH)) + x.linear(a).linear(b));
    });
    assert!(why.contains("NF4"), "{why}");
    let why = declined(&plain, &|r| {
        let x = x(r);
        let weight = r.param("w", &[WIDTH, WIDTH], Init::Full(0.1));
        let [a, b] = [("a", [4, WIDTH]), ("b", [WIDTH, 4])].map(|(part, shape)| r.param(part, &shape, Init::Full(0.1)));
        r.output("y", x.linear(weight) + x.linear(a).linear(b));
    });
    assert!(why.contains("not frozen"), "{why}");
    let why = declined(&plain, &|r| {
        let x = x(r);
        r.output("y", adapted(x, x, "q", None));
        let a = r.params().into_iter().find(|p| p.0 == "q.a").unwrap().1;
        r.update(a, a * 2.0);
    });
    assert!(why.contains("updates the weight or its adapter"), "{why}");
    let why = declined(&plain, &|r| {
        let x = x(r);
        let weight = r.frozen("w", &[WIDTH, WIDTH], Init::Full(0.1));
        let [a, b] = [("a", [4, WIDTH]), ("b", [WIDTH, 4])].map(|(part, shape)| r.param(part, &shape, Init::Full(0.1)));
        let base = x.linear(weight);
        r.output("base", base);
        r.output("y", base + x.linear(a).linear(b));
    });
    assert!(why.contains("without its adapter"), "{why}");
    for switches in [
        plain.clone().on_ranks(Ranks::planned(1, 2)).with("tensor-parallel", "off").unwrap(),
        plain.clone().on_ranks(Ranks::planned(2, 1)).with("zero", "auto").unwrap().with("zero-weights", "auto").unwrap(),
    ] {
        let why = declined(&switches, &|r| {
            let x = x(r);
            r.output("y", adapted(x, x, "q", None));
        });
        assert!(why.contains("ranks share the weights"), "{why}");
    }
}

/// The second of two adapters on a weight stays as it is, as does what only looks like an adapter.
#[test]
fn other_sums_stay() {
    let applied = |record: &dyn Fn(Var<'_>)| {
        let run = |mode: &str| {
            let g = graph(|r| record(r.feed("x", &[64, WIDTH], DType::F32)));
            let (mut store, switches) = (Store::new(3), Switches::default().with("merge-adapters", mode).unwrap());
            let mut p = Program::load(g, &switches, &Device::cpu(Cpu::new(2)), &mut store).unwrap();
            p.run(&mut store, &[("x", Data::F32(&rows(64)))]).unwrap();
            let receipt = p.receipts.iter().find(|r| r.pass == "merge-adapters").unwrap();
            ((receipt.applied, receipt.declined.len()), p.read("y", &store).unwrap())
        };
        let ((found, y), (_, plain)) = (run("auto,when=run"), run("off"));
        close(&y, &plain, DType::F32);
        found
    };
    fn param<'g>(x: Var<'g>, name: &str, n: usize, k: usize) -> Var<'g> {
        x.recorder().param(name, &[n, k], Init::Normal { std: 0.3 })
    }
    fn frozen<'g>(x: Var<'g>, n: usize, k: usize) -> Var<'g> {
        x.recorder().frozen("w", &[n, k], Init::Normal { std: 0.3 })
    }
    fn added<'g>(x: Var<'g>, name: &str) -> Var<'g> {
        x.linear(param(x, &format!("{name}.a"), 4, WIDTH)).linear(param(x, &format!("{name}.b"), 24, 4))
    }
    fn out<'g>(x: Var<'g>, y: Var<'g>) {
        x.recorder().output("y", y)
    }
    assert_eq!(applied(&|x| out(x, x.linear(frozen(x, 24, WIDTH)) + added(x, "one"))), (1, 0));
    assert_eq!(applied(&|x| out(x, added(x, "one") + x.linear(frozen(x, 24, WIDTH)))), (1, 0));
    // Other inputs.
    assert_eq!(applied(&|x| out(x, x.linear(frozen(x, 24, WIDTH)) + added(x.silu(), "one"))), (0, 0));
    // A layer behind a narrow one.
    assert_eq!(
        applied(&|x| out(x, x.linear(frozen(x, 24, WIDTH)) + x.linear(param(x, "a", 4, WIDTH)).silu().linear(param(x, "b", 24, 4)))),
        (0, 0)
    );
    // One weight with two adapters: in two places, and in one.
    let two = |x: Var<'_>| {
        let w = frozen(x, 24, WIDTH);
        out(x, (x.linear(w) + added(x, "one")) * (x.silu().linear(w) + added(x.silu(), "two")));
    };
    assert_eq!(applied(&two), (1, 1));
    assert_eq!(applied(&|x| out(x, x.linear(frozen(x, 24, WIDTH)) + added(x, "one") + added(x, "two"))), (1, 0));
    // The same adapter in two places is merged for both.
    let shared = |x: Var<'_>| {
        let (w, a, b) = (frozen(x, 24, WIDTH), param(x, "a", 4, WIDTH), param(x, "b", 24, 4));
        let h = x.silu();
        out(x, (x.linear(w) + x.linear(a).linear(b)) * (h.linear(w) + h.linear(a).linear(b)));
    };
    assert_eq!(applied(&shared), (2, 0));
}

#[test]
fn a_token_with_adapters_is_as_many_launches_as_one_without() {
    let gpu = Target::Cuda(Arch { sm: 90, multiprocessors: 132 });
    let half = Switches::default().with("bf16", "auto").unwrap();
    let names = |switches: &Switches, lora: bool| {
        let c = Compiled::new(graph(|r| decoder(r, 2, lora)), switches, gpu).unwrap();
        let names: Vec<String> = c.graph.nodes.iter().filter(|n| !n.is_source() && !n.is_view()).map(|n| n.name().to_string()).collect();
        let fused = c.receipts.iter().find(|r| r.pass == "fuse-decode").unwrap();
        (names.join(" "), fused.applied, fused.declined.len())
    };
    let [first, later] = phase(&half, gpu).unwrap();
    let (plain, apart) = (names(&half, false), names(&half, true));
    assert_eq!(names(&later, true), plain);
    assert!(apart.0.len() > plain.0.len());
    // What the first program merges, it reads by the same kernels: beside them it has what merges.
    let (made, applied, declined) = names(&first, true);
    assert_eq!((applied, declined), (plain.1, 0), "{made}");
}
