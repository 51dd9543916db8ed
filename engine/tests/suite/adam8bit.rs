//! Optimizer states in 8 bits against those in f32: what is kept, what a skipped step leaves, and what is declined.

use half::bf16;
use kiln_engine::ops::adamw::{AdamW, momentum};
use kiln_engine::ops::adamw8::Map;
use kiln_engine::passes::{Receipt, Target};
use kiln_engine::{Compiled, Cpu, DType, Data, Device, Init, Program, Ranks, Recorder, Store, Switches};

const N: usize = 70 * 61;
const RATE: f32 = 0.01;

/// A step of weights `w` by AdamW and of weights `k` by momentum, both with the gradient `g` where `go` is 1.
fn record(r: &Recorder, reads_a_moment: bool) {
    let param = |name: &str| r.param(name, &[70, 61], Init::Normal { std: 1.0 });
    let state = |name: &str| r.state(name, &[70, 61], DType::F32, Init::Full(0.0));
    let (w, k, m, v, kept) = (param("w"), param("k"), state("m"), state("v"), state("kept"));
    let (g, go) = (r.feed("g", &[70, 61], DType::F32), r.feed("go", &[1], DType::F32));
    let (rate, one) = (r.full(&[1], RATE), r.full(&[1], 1.0));
    let y = r.op(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: vec![0.0] }, &[rate, one, one, go, w, g, m, v]);
    let [u, next] = momentum(0.9, one, go, g, kept);
    [(w, y[0]), (m, y[1]), (v, y[2]), (kept, next), (k, k - u * rate)].into_iter().for_each(|(state, value)| r.update(state, value));
    if reads_a_moment {
        r.output("m", m.square().sum());
    }
}

struct Run {
    program: Program,
    store: Store,
}

impl Run {
    fn new(value: &str, reads_a_moment: bool) -> Run {
        let r = Recorder::new();
        record(&r, reads_a_moment);
        let mut store = Store::new(3);
        let switches = Switches::default().with("adam8bit", value).unwrap();
        let program = Program::load(r.finish(), &switches, &Device::cpu(Cpu::new(2)), &mut store).unwrap();
        Run { program, store }
    }

    fn step(&mut self, g: &[f32], go: f32) {
        self.program.run(&mut self.store, &[("g", Data::F32(g)), ("go", Data::F32(&[go]))]).unwrap();
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        self.store.get(name).unwrap_or_else(|| panic!("there is no {name}")).bytes().unwrap().into_owned()
    }

    fn f32(&self, name: &str) -> Vec<f32> {
        self.store.get(name).unwrap().f32().unwrap()
    }

    /// Everything that is kept, bit for bit.
    fn all(&self) -> Vec<(String, Vec<u8>)> {
        self.store.iter().map(|(name, t)| (name.to_string(), t.bytes().unwrap().into_owned())).collect()
    }

    fn receipt(&self) -> &Receipt {
        self.program.receipts.iter().find(|r| r.pass == "adam8bit").unwrap()
    }
}

fn gradient(step: usize) -> Vec<f32> {
    let at = |i: usize| ((i * 37 + step * 101) % 211) as f32 / 105.0 - 1.0;
    (0..N).map(|i| at(i) * 0.3f32.powi((i % 3) as i32)).collect()
}

/// From zeros, the first step computes the same moments; what is kept is their quantization.
#[test]
fn states_are_the_quantized_moments_and_weights_move_as_without() {
    let (mut wide, mut narrow, mut half) = (Run::new("off", false), Run::new("require", false), Run::new("auto,momentum=bf16", false));
    [&mut wide, &mut narrow, &mut half].into_iter().for_each(|run| run.step(&gradient(0), 1.0));
    for (name, map) in [("m", Map::Signed), ("v", Map::Unsigned), ("kept", Map::Signed)] {
        let (bytes, most) = map.quantized(&wide.f32(name));
        let [of_bytes, of_most] = map.names(name);
        assert_eq!((narrow.bytes(&of_bytes), narrow.f32(&of_most)), (bytes, most), "{name}");
        assert!(narrow.store.get(name).is_none(), "{name} is still there in f32");
    }
    assert_eq!((wide.f32("w"), wide.f32("k")), (narrow.f32("w"), narrow.f32("k")));
    let rounded: Vec<f32> = wide.f32("kept").iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
    assert!(half.store.get("kept").unwrap().meta.dtype == DType::BF16 && half.f32("kept") == rounded);
    for step in 1..20 {
        [&mut wide, &mut narrow, &mut half].into_iter().for_each(|run| run.step(&gradient(step), 1.0));
    }
    // Gradients change their signs, so that steps cancel and errors stand out: w is off by 3.4%.
    let start = Run::new("off", false);
    for (run, name) in [(&narrow, "w"), (&narrow, "k"), (&half, "w"), (&half, "k")] {
        let norm = |of: &dyn Fn(usize) -> f32| (0..N).map(|i| (of(i) as f64).powi(2)).sum::<f64>().sqrt();
        let (from, exact, ours) = (start.f32(name), wide.f32(name), run.f32(name));
        let (moved, off) = (norm(&|i| exact[i] - from[i]), norm(&|i| exact[i] - ours[i]));
        assert!(off > 0.0 && off < 0.06 * moved, "{name} is off by {off} after it moved by {moved}");
    }
}

#[test]
fn a_step_that_is_skipped_leaves_every_bit_and_two_runs_are_the_same() {
    for value in ["auto", "auto,momentum=bf16"] {
        let (mut a, mut b) = (Run::new(value, false), Run::new(value, false));
        for step in 0..3 {
            a.step(&gradient(step), 1.0);
            b.step(&gradient(step), 1.0);
        }
        assert_eq!(a.all(), b.all());
        // What is skipped has gradients that are no numbers; k alone has no flag here.
        a.step(&[f32::NAN; N], 0.0);
        let kept = |run: &Run| run.all().into_iter().filter(|(name, _)| name != "k").collect::<Vec<_>>();
        assert_eq!(kept(&a), kept(&b), "{value}");
    }
}

/// A weight whose gradients are small beside others of its block, and then 0: its second moment must not have become 0, or the step would be
/// divided by epsilon.
#[test]
fn a_weight_among_larger_ones_does_not_jump() {
    let mut run = Run::new("auto", false);
    let mut g = vec![1.0; N];
    g[7] = 1e-5;
    for _ in 0..3 {
        run.step(&g, 1.0);
    }
    let before = run.f32("w")[7];
    g[7] = 0.0;
    run.step(&g, 1.0);
    let moved = (run.f32("w")[7] - before).abs();
    assert!(moved < 5.0 * RATE, "it moved by {moved}");
}

#[test]
fn small_states_and_those_that_others_read_stay_f32_with_a_reason() {
    let run = Run::new("auto", false);
    assert_eq!((run.receipt().applied, run.receipt().declined.len()), (2, 0));
    // Three bytes instead of three times four, and a maximum for 256 of each.
    assert_eq!(3 * (N + 4 * N.div_ceil(256)), 13_014);
    assert_eq!(run.receipt().notes, ["states of 2 tensors take 0.01 MiB instead of 0.05"]);
    let small = Run::new("require,least=5000", false);
    assert_eq!(small.receipt().notes, ["states of 2 tensors stay in f32: fewer than 5000 elements (least)"]);
    assert!(small.store.get("m").is_some());
    let read = Run::new("auto", true);
    assert_eq!((read.receipt().applied, &*read.receipt().declined[0].1), (1, "w"));
    assert!(read.receipt().declined[0].0.contains("read elsewhere"), "{:?}", read.receipt().declined);
    let apart = Run::new("auto,moments=f32", false);
    assert!(apart.receipt().sites() == 1 && apart.store.get("v").is_some() && apart.store.get("kept.signed8").is_some());
    let r = Recorder::new();
    record(&r, false);
    let wrong = Switches::default().with("adam8bit", "auto,momentum=4bit").unwrap();
    let said = kiln_engine::Compiled::new(r.finish(), &wrong, kiln_engine::passes::Target::Cpu).err().unwrap().to_string();
    assert!(said.contains("momentum=4bit is not one of 8bit, bf16, f32"), "{said}");
}

/// A byte of 0 stands for 0: a state that begins with other numbers would lose them.
#[test]
fn states_that_begin_with_other_numbers_stay_f32() {
    let r = Recorder::new();
    let (g, one) = (r.feed("g", &[70, 61], DType::F32), r.full(&[1], 1.0));
    let kept = r.state("kept", &[70, 61], DType::F32, Init::Full(0.5));
    let [u, next] = momentum(0.9, one, one, g, kept);
    r.update(kept, next);
    r.output("u", u);
    let (mut store, switches) = (Store::new(3), Switches::default().with("adam8bit", "auto").unwrap());
    let program = Program::load(r.finish(), &switches, &Device::cpu(Cpu::new(2)), &mut store).unwrap();
    let receipt = program.receipts.iter().find(|r| r.pass == "adam8bit").unwrap();
    assert!(receipt.applied == 0 && receipt.declined[0].0.contains("begins with other numbers than 0"), "{:?}", receipt.declined);
    assert!(store.get("kept").unwrap().f32().unwrap().iter().all(|v| *v == 0.5));
}

/// Each of 61 ranks has 70 numbers of the moments, which is no whole block: another number of ranks could not read their maxima.
#[test]
fn parts_of_ranks_that_are_no_whole_blocks_stay_f32() {
    let r = Recorder::new();
    record(&r, false);
    let switches = Switches::default().with("zero", "auto").unwrap().with("adam8bit", "auto,least=1").unwrap();
    let c = Compiled::new(r.finish(), &switches.on_ranks(Ranks::planned(61, 1)), Target::Cpu).unwrap();
    let receipt = c.receipts.iter().find(|r| r.pass == "adam8bit").unwrap();
    // The momentum is whole on each rank.
    assert!(receipt.applied == 1 && receipt.declined[0].0.contains("no whole blocks of 256"), "{:?}", receipt.declined);
}
