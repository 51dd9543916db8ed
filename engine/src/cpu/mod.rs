//! The CPU executor, and what CPU code of ops is written with.

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

/// Threads that programs run on. Results depend on their number only through matrix products.
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

/// Runs a loop compiled for the widest vectors this machine has. What it calls must be `#[inline(always)]`.
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

/// The instructions that vector code was chosen for.
pub fn vectors() -> String {
    format!("{:?}", pulp::Arch::new()).split('(').next().unwrap_or("plain").to_string()
}
