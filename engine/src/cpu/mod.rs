//! The CPU executor, and tools for the CPU code of ops.

pub mod fp8;
pub mod gemm;
pub mod math;
mod memory;
mod program;
mod view;

pub use memory::Buffer;
pub use program::{CpuProgram, converted};
pub(crate) use program::{narrow, strided, widened};
pub use view::{Data, DataMut, View, ViewMut};

use std::sync::Arc;

/// The threads that programs run on. Only matmuls give different bits with another number of threads.
#[derive(Clone)]
pub struct Cpu {
    pool: Arc<rayon::ThreadPool>,
}

impl Cpu {
    /// A pool of so many threads.
    pub fn new(threads: usize) -> Cpu {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).thread_name(|i| format!("kiln-{i}")).build();
        Cpu { pool: Arc::new(pool.expect("the operating system gives threads")) }
    }

    /// One thread for each core.
    pub fn all_cores() -> Cpu {
        Cpu::new(std::thread::available_parallelism().map_or(1, |n| n.get()))
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs `f` on the pool; parallel iterators inside use its threads.
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.pool.install(f)
    }
}

/// Runs a loop compiled for the widest SIMD instructions of this machine. What it calls must be `#[inline(always)]`.
#[inline(always)]
pub fn simd<R>(f: impl FnOnce() -> R) -> R {
    struct Call<F>(F);
    impl<R, F: FnOnce() -> R> pulp::WithSimd for Call<F> {
        type Output = R;
        #[inline(always)]
        fn with_simd<S: pulp::Simd>(self, _: S) -> R {
            (self.0)()
        }
    }
    pulp::Arch::new().dispatch(Call(f))
}

/// The name of the SIMD instruction set that is used.
pub fn vectors() -> String {
    format!("{:?}", pulp::Arch::new()).split('(').next().unwrap_or("plain").to_string()
}
