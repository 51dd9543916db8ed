//! An op of one's own with a CUDA kernel, checked like the engine's own ops and trained with: cargo run -p kiln --example own_op

use engine::check::check_case;
use engine::cpu::{View, ViewMut};
use engine::cuda::emulator;
use engine::kernel::{Code, Io, Launch};
use engine::op::{Case, Cost, Entry, Fill, Grads, In, Narrow, Op, Port, rounded};
use engine::{Cpu, DType, Data, Device, Extension, Init, Meta, Program, Recorder, Store, Switches, Var};

/// y[t] = x[t - 1], zeros at t = 0; with `back` y[t] = x[t + 1], which is its gradient. x: [batch, time, dim].
#[derive(Debug)]
struct Shift {
    back: bool,
}

const KERNEL: &str = r#"
extern "C" __global__ void shift(const T *x, T *y) {
    int i = blockIdx.x * 256 + threadIdx.x, t = i / DIM % TIME, from = BACK ? t + 1 : t - 1;
    if (i >= N) return;
    if (0 <= from && from < TIME) y[i] = x[i + (from - t) * DIM];
    else from_float(0.0f, y[i]);
}"#;

impl Op for Shift {
    fn name(&self) -> &'static str {
        "shift"
    }
    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        assert_eq!(x[0].rank(), 3, "shift wants [batch, time, dim], not {:?}", x[0]);
        vec![x[0].clone()]
    }
    fn cpu(&self, x: &[View], y: &mut [ViewMut], _: &mut [f32]) {
        let (time, dim, x) = (y[0].dim(1), y[0].dim(0), x[0].f32());
        for (i, row) in y[0].f32().chunks_mut(dim).enumerate() {
            let from = if self.back { (i % time + 1 < time).then_some(i + 1) } else { (i % time > 0).then(|| i - 1) };
            row.fill(0.0);
            from.into_iter().for_each(|from| row.copy_from_slice(&x[from * dim..][..dim]));
        }
    }
    fn vjp<'g>(&self, _: &[Var<'g>], _: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        vec![dy[0].map(|d| d.recorder().op1(Shift { back: !self.back }, &[d]))]
    }
    fn cost(&self, x: &[Meta]) -> Cost {
        Cost::memory(2 * x[0].bytes())
    }
    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        rounded(at)
    }
    fn cuda(&self, io: &Io) -> Code {
        let (n, y) = (io.y[0].elements(), &io.y[0]);
        let kernel = Launch::new(KERNEL, "shift").define_type("T", y.dtype).define("N", n).define("BACK", self.back as u8);
        kernel.define("TIME", y.dim(1)).define("DIM", y.dim(0)).grid(n.div_ceil(256), 1, 1).all(io).code()
    }
}

const CASES: &[Case] = &[Case::new("odd", &[In(&[3, 5, 7], Fill::Normal)], |x| vec![x[0].recorder().op1(Shift { back: false }, x)])];
static OPS: Extension = Extension { ops: &[Entry { name: "shift", about: "the row before", cases: CASES }], passes: &[] };

fn main() -> Result<(), Box<dyn std::error::Error>> {
    engine::register(&OPS)?; // or in `Recipe::extension`: then `kiln check`, `bench ops` and the rest know it, too
    let device = Device::cpu(Cpu::all_cores());
    for outcome in check_case("shift", &CASES[0], &device) {
        println!("{}: {}", outcome.name, outcome.problem().unwrap_or("right"));
    }
    // Its kernel, without a GPU, where there is g++.
    let emulated = emulator::check(&[&OPS.ops[0]], &std::env::temp_dir().join("own_op"), true, &mut |_| {});
    println!("kernel: {}", emulated.err().unwrap_or("right".into()));
    // Learns that the answer is twice the row before.
    let r = Recorder::new();
    let (x, w) = (r.feed("x", &[1, 64, 1], DType::F32), r.param("w", &[1], Init::Full(0.0)));
    let before = r.op1(Shift { back: false }, &[x]);
    let loss = (before * w - before * 2.0).square().mean();
    r.update(w, w - r.grad(loss, &[w])[0] * 0.1);
    let (mut store, data) = (Store::new(0), (0..64).map(|i| (i as f32).sin()).collect::<Vec<_>>());
    let mut step = Program::load(r.finish(), &Switches::default(), &device, &mut store)?;
    (0..100).try_for_each(|_| step.run(&mut store, &[("x", Data::F32(&data))]))?;
    println!("w = {:.3}", store.get("w").expect("a parameter").f32()?[0]);
    Ok(())
}
