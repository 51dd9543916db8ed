//! Two hundred windows hold what the first one held, to the byte.
#![allow(unsafe_code)]

use engine::{Cpu, Device};
use kiln::recipe;
use kiln::run;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering};

struct Counting;

static HELD: AtomicIsize = AtomicIsize::new(0);

// SAFETY: everything is handed on to the system's allocator; only sizes are added up.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size() as isize, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn memory_stays_flat() {
    let recipe = recipe::find("lior").unwrap();
    let mut c = recipe::preset(recipe, None).unwrap();
    for set in ["dim=32", "heads=2", "seq=24", "memory=20", "field=[3, 2, 6, 5]", "model.steps=6", "rows=300", "batch=3"] {
        c.set(set).unwrap();
    }
    let mut task = recipe.task(&c).unwrap();
    let mut s = run::load(&*task, &c, &Device::cpu(Cpu::new(1))).unwrap();
    let mut held = |windows: u64| {
        for i in 0..windows {
            task.bench_step(&mut s, i).unwrap();
            task.report(&s).unwrap().finish().unwrap();
        }
        (HELD.load(Ordering::SeqCst), s.store.bytes(), run::peak(&s).total())
    };
    let first = held(2);
    assert_eq!(first, held(198));
}
