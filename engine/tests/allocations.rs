//! After a program is loaded, running it allocates no tensor buffer. (Matrix products are left out: the gemm crate packs one
//! operand in memory of its own, at most the last-level cache's size.)
#![allow(unsafe_code)]

use kiln_engine::{Cpu, DType, Data, Device, Init, Program, Recorder, Store, Switches};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

struct Watching;

static WATCH: AtomicBool = AtomicBool::new(false);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is handed on to the system's allocator; only sizes are looked at.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if WATCH.load(Ordering::Relaxed) {
            LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        }
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

#[test]
fn a_run_allocates_no_tensor() {
    let (rows, dim) = (2048, 256); // 2 MiB a tensor
    let r = Recorder::new();
    let x = r.feed("x", &[rows, dim], DType::F32);
    let targets = r.feed("targets", &[rows], DType::I32);
    let w = r.param("w", &[rows, dim], Init::Normal { std: 0.1 });
    let shape = [2, rows / 2, 4, dim / 4];
    let turned = w.reshape(&shape).rope(kiln_engine::ops::rope::Pairs::Halves, r.rope_tables(rows / 2, dim / 4, 100.0));
    let y = kiln_engine::ops::attention::attention(turned, x.reshape(&shape), x.reshape(&shape), true, 0.1).reshape(&[rows, dim]);
    let h = (x + y).rms_norm_plain(1e-6).silu().layer_norm(1e-5).softmax();
    let chosen = h.scatter_add_rows(targets, h.gather_rows(targets)).bce_with_logits(x);
    let loss = chosen.cross_entropy(targets.cast(DType::F32).cast(DType::I32)).mean() + chosen.sum_axis(0).mean();
    let g = r.grad(loss, &[w]);
    r.update(w, w - g[0] * 0.1);
    r.output("loss", loss);
    let mut store = Store::new(1);
    let mut p = Program::load(r.finish(), &Switches::default(), &Device::cpu(Cpu::new(2)), &mut store).unwrap();
    let numbers: Vec<f32> = (0..rows * dim).map(|i| (i as f32 * 0.37).sin()).collect();
    let targets: Vec<i32> = (0..rows).map(|i| (i * 7 % dim) as i32).collect();
    let feeds = [("x", Data::F32(&numbers)), ("targets", Data::I32(&targets))];
    p.run(&mut store, &feeds).unwrap();
    WATCH.store(true, Ordering::SeqCst);
    p.run(&mut store, &feeds).unwrap();
    WATCH.store(false, Ordering::SeqCst);
    let largest = LARGEST.load(Ordering::SeqCst);
    assert!(largest > 0, "the watch does not work");
    assert!(largest < rows * dim * 4 / 8, "a run allocated {largest} bytes at once; a tensor has {}", rows * dim * 4);
}
