//! 2:4 sparsity: what is computed with, and which gradient the dense weights get.

use kiln_engine::ops::sparse::{dense_groups, prune};
use kiln_engine::{Cpu, DType, Data, Device, Init, Program, Recorder, Store, Switches};

/// y = x W^T (or x W) and the gradient of sum(y * c) by W.
fn run(sparse: &str, transposed: bool, weight: &[f32], x: &[f32], c: &[f32]) -> (Vec<f32>, Vec<f32>, usize) {
    let r = Recorder::new();
    let shape = if transposed { [16, 8] } else { [8, 16] };
    let (fx, fc) = (r.feed("x", &[6, 8], DType::F32), r.feed("c", &[6, 16], DType::F32));
    let w = r.block("block", || r.param("w", &shape, Init::Full(0.0)));
    let y = r.block("block", || if transposed { fx.linear(w) } else { fx.matmul(w) });
    let loss = (y * fc).sum();
    r.output("y", y);
    r.output("dw", r.grad(loss, &[w])[0]);
    let mut store = Store::new(0);
    let switches = Switches::default().with("sparse-2:4", sparse).unwrap();
    let mut p = Program::load(r.finish(), &switches, &Device::cpu(Cpu::new(1)), &mut store).unwrap();
    let meta = store.get("w").unwrap().meta.clone();
    store.set("w", &meta, &weight.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>()).unwrap();
    p.run(&mut store, &[("x", Data::F32(x)), ("c", Data::F32(c))]).unwrap();
    let applied = p.receipts.iter().find(|r| r.pass == "sparse-2:4").unwrap().applied;
    (p.read("y", &store).unwrap(), p.read("dw", &store).unwrap(), applied)
}

fn numbers(n: usize, seed: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 1.37 + seed).sin()).collect()
}

fn turned(w: &[f32], rows: usize) -> Vec<f32> {
    let columns = w.len() / rows;
    (0..w.len()).map(|i| w[i % rows * columns + i / rows]).collect()
}

#[test]
fn layers_compute_with_pruned_weights_and_dense_ones_get_the_whole_gradient() {
    let (w, x, c) = (numbers(128, 0.3), numbers(48, 1.0), numbers(96, 2.0));
    for transposed in [true, false] {
        let (dense, gradient, none) = run("off", transposed, &w, &x, &c);
        let (y, dw, applied) = run("auto,least=8", transposed, &w, &x, &c);
        assert_eq!((none, applied), (0, 1));
        // Pruned along the sum, whichever way the weight is stored.
        let mut pruned = if transposed { w.clone() } else { turned(&w, 8) };
        prune(&mut pruned);
        assert_eq!(dense_groups(&pruned), 0);
        let pruned = if transposed { pruned } else { turned(&pruned, 16) };
        let (expected, _, _) = run("off", transposed, &pruned, &x, &c);
        assert_eq!(y, expected);
        assert_ne!(y, dense);
        assert_eq!(dw, gradient, "straight through");
    }
}

#[test]
fn small_weights_stay_dense_for_a_reason() {
    let (w, x, c) = (numbers(128, 0.3), numbers(48, 1.0), numbers(96, 2.0));
    let (y, _, applied) = run("auto", true, &w, &x, &c);
    assert_eq!(applied, 0);
    assert_eq!(y, run("off", true, &w, &x, &c).0);
}
