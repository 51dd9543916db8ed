//! fp16: what is rounded, and the loss scale.

use kiln_engine::{Cpu, DType, Data, Device, Init, Program, Recorder, Store, Switches};

/// Loss and gradient of a linear layer; the loss is `size` times the mean square of what it gives.
struct Run {
    program: Program,
    store: Store,
}

impl Run {
    fn new(switch: &str, value: &str) -> Run {
        let r = Recorder::new();
        let w = r.param("w", &[8, 8], Init::Normal { std: 0.5 });
        let x = r.feed("x", &[4, 8], DType::F32);
        let size = r.feed("size", &[1], DType::F32);
        let loss = (x.linear(w).square().mean() * size).reshape(&[1]);
        r.output("loss", loss);
        r.output("dw", r.grad(loss, &[w])[0]);
        let mut store = Store::new(3);
        let switches = Switches::default().with(switch, value).unwrap();
        let program = Program::load(r.finish(), &switches, &Device::cpu(Cpu::new(1)), &mut store).unwrap();
        Run { program, store }
    }

    fn step(&mut self, size: f32) -> Vec<f32> {
        let x: Vec<f32> = (0..32).map(|i| (i as f32 * 0.7).sin()).collect();
        self.program.run(&mut self.store, &[("x", Data::F32(&x)), ("size", Data::F32(&[size]))]).unwrap();
        self.program.read("dw", &self.store).unwrap()
    }

    fn state(&self, name: &str) -> f32 {
        self.store.get(&format!("fp16.{name}")).unwrap().f32().unwrap()[0]
    }
}

fn apart(a: &[f32], b: &[f32]) -> f32 {
    let size = |v: &mut dyn Iterator<Item = f32>| v.map(|v| v * v).sum::<f32>().sqrt();
    size(&mut a.iter().zip(b).map(|(a, b)| a - b)) / size(&mut b.iter().copied())
}

/// Gradients that fp16 could not hold come out right, because the loss is scaled; and as large as ever, because they are divided again.
#[test]
fn small_gradients_survive_by_the_loss_scale() {
    let (mut plain, mut scaled, mut unscaled) = (Run::new("bf16", "off"), Run::new("fp16", "auto"), Run::new("fp16", "auto,scale=1"));
    for size in [1.0, 1e-4] {
        let expected = plain.step(size);
        let error = apart(&scaled.step(size), &expected);
        assert!(error > 1e-6 && error < 3e-3, "{size}: {error}");
    }
    let (expected, lost) = (plain.step(1e-7), unscaled.step(1e-7));
    assert!(apart(&lost, &expected) > 0.5, "without a scale they are lost");
    assert!(apart(&scaled.step(1e-7), &expected) < 0.02);
}

/// An overflow halves the scale, is counted and shows in the gradients; enough steps without one double it.
#[test]
fn the_scale_halves_after_an_overflow_and_doubles_after_a_while() {
    let mut run = Run::new("fp16", "auto,scale=1024,interval=3");
    let seen: Vec<(bool, f32, f32, f32)> = [1.0, 1.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
        .into_iter()
        .map(|size| {
            let finite = run.step(size).iter().all(|v| v.is_finite());
            (finite, run.state("scale"), run.state("runs"), run.state("skipped"))
        })
        .collect();
    let expected = [
        (true, 1024.0, 1.0, 0.0),
        (true, 1024.0, 2.0, 0.0),
        (false, 512.0, 0.0, 1.0),
        (true, 512.0, 1.0, 1.0),
        (true, 512.0, 2.0, 1.0),
        (true, 1024.0, 0.0, 1.0),
        (true, 1024.0, 1.0, 1.0),
        (true, 1024.0, 2.0, 1.0),
        (true, 2048.0, 0.0, 1.0),
    ];
    assert_eq!(seen, expected);
}

/// The scale neither falls below 1, where it would only lose what is small, nor grows until gradients of any size overflow.
#[test]
fn the_scale_stays_within_bounds() {
    let mut low = Run::new("fp16", "auto,scale=2,interval=3");
    let seen: Vec<f32> = (0..4).map(|_| (low.step(f32::MAX), low.state("scale")).1).collect();
    assert_eq!((seen, low.state("skipped")), (vec![1.0; 4], 4.0));
    let mut high = Run::new("fp16", "auto,scale=8388608,interval=1");
    let seen: Vec<f32> = (0..4).map(|_| (high.step(1e-9), high.state("scale")).1).collect();
    assert_eq!((seen, high.state("skipped")), (vec![16777216.0; 4], 0.0));
}

#[test]
fn one_narrow_type_at_a_time() {
    let r = Recorder::new();
    let w = r.param("w", &[8, 8], Init::Full(1.0));
    let loss = r.feed("x", &[4, 8], DType::F32).linear(w).sum();
    r.output("dw", r.grad(loss, &[w])[0]);
    let both = Switches::default().with("bf16", "auto").unwrap().with("fp16", "auto").unwrap();
    let problem = match Program::load(r.finish(), &both, &Device::cpu(Cpu::new(1)), &mut Store::new(0)) {
        Err(e) => e.to_string(),
        Ok(_) => panic!("both at once"),
    };
    assert!(problem.contains("fp16") && problem.contains("bf16 is on already"), "{problem}");
}

#[test]
fn the_first_scale_is_a_power_of_two_within_bounds() {
    for (scale, fits) in [("1", true), ("16777216", true), ("3", false), ("33554432", false)] {
        let r = Recorder::new();
        let w = r.param("w", &[8, 8], Init::Normal { std: 0.5 });
        let loss = r.feed("x", &[4, 8], DType::F32).linear(w).square().mean();
        r.output("dw", r.grad(loss, &[w])[0]);
        let switches = Switches::default().with("fp16", &format!("auto,scale={scale}")).unwrap();
        let made = kiln_engine::Compiled::new(r.finish(), &switches, kiln_engine::passes::Target::Cpu);
        match (made, fits) {
            (Ok(_), true) => {}
            (Err(e), false) => assert!(e.to_string().contains("a power of two up to 16777216"), "{e}"),
            (made, _) => panic!("{scale}: {:?}", made.map(|_| ()).map_err(|e| e.to_string())),
        }
    }
}
