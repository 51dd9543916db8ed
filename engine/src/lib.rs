//! kiln's engine: a training step is recorded once as a static graph, rewritten by named passes, planned in memory, and run
//! again and again.
//!
//! ```
//! use kiln_engine::{Cpu, DType, Data, Device, Init, Program, Recorder, Store, Switches};
//!
//! let g = Recorder::new();
//! let (x, y) = (g.feed("x", &[8, 2], DType::F32), g.feed("y", &[8, 1], DType::F32));
//! let w = g.param("w", &[2, 1], Init::Normal { std: 1.0 });
//! let loss = (x.matmul(w) - y).square().mean();
//! let dw = g.grad(loss, &[w])[0];
//! g.update(w, w - dw * 0.1);
//! g.output("loss", loss);
//!
//! let mut store = Store::new(0);
//! let device = Device::cpu(Cpu::new(2));
//! let mut step = Program::load(g.finish(), &Switches::default(), &device, &mut store).unwrap();
//! let x: Vec<f32> = (0..16).map(|i| (i as f32 * 0.7).sin()).collect();
//! let y: Vec<f32> = x.chunks(2).map(|p| 3.0 * p[0] - p[1]).collect(); // the line to find
//! for _ in 0..200 {
//!     step.run(&mut store, &[("x", Data::F32(&x)), ("y", Data::F32(&y))]).unwrap();
//! }
//! assert!(step.scalar("loss", &store).unwrap() < 1e-4);
//! assert!((store.get("w").unwrap().f32().unwrap()[0] - 3.0).abs() < 0.05);
//! ```

#![warn(missing_docs)]

mod case;
pub mod check;
pub mod cpu;
pub mod cuda;
pub mod error;
pub mod executor;
pub mod extension;
mod fingerprint;
pub mod graph;
pub mod kernel;
pub mod meta;
pub mod mutants;
pub mod op;
pub mod ops;
pub mod passes;
pub mod philox;
pub mod plan;
pub mod profile;
pub mod program;
pub mod ranks;
pub mod record;
pub mod store;
mod warm_up;

pub use cpu::{Cpu, Data};
pub use cuda::Cuda;
pub use error::Error;
pub use extension::{Extension, register};
pub use graph::{Graph, Init, Role};
pub use meta::{DType, Meta};
pub use ops::OPS;
pub use passes::{PASSES, SCRATCH, Switches};
pub use program::{Compiled, Device, Program, Reading};
pub use ranks::Ranks;
pub use record::{Recorder, Var};
pub use store::Store;
