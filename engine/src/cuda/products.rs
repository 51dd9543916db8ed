//! Autotuning: the algorithm of a GEMM shape is the run's own choice, the cached one, or the fastest of a few.

use super::choices::among;
use super::gemm::{Algorithm, Product};
use super::{Cuda, Options, failed};
use crate::error::Error;
use crate::kernel::{Gemm, Matrix};
use crate::meta::DType;
use cudarc::driver::{result, sys};
use std::sync::PoisonError;

/// Chooses algorithms for the GEMMs of one program.
pub struct Products<'a> {
    cuda: &'a Cuda,
    options: Options,
    /// Address and size of memory that is free to use for timing.
    free: (u64, usize),
    filled: bool,
    new: Vec<(String, Algorithm)>,
}

impl<'a> Products<'a> {
    pub fn new(cuda: &'a Cuda, options: Options, free: (u64, usize)) -> Products<'a> {
        Products { cuda, options, free, filled: false, new: vec![] }
    }

    /// cuBLASLt uses them for every type but f32 that is to stay so.
    pub fn uses_tensor_cores(&self, g: &Gemm) -> bool {
        g.a.dtype != DType::F32 || self.options.tf32
    }

    pub fn plan(&mut self, g: &Gemm, aligned: [u32; 4]) -> Result<Product, Error> {
        let handle = &self.cuda.0.products;
        // Some f32 algorithms are not deterministic; the one that is proposed first is.
        let exact = g.a.dtype == DType::F32 && !self.options.tf32;
        if !self.options.tune || exact {
            return Ok(handle.plan(g, self.options.tf32, aligned)?.0);
        }
        let key = key(g, self.options.tf32, aligned);
        let new = self.new.iter().find(|n| n.0 == key).map(|n| n.1);
        let choices = || self.cuda.0.choices.lock().unwrap_or_else(PoisonError::into_inner);
        let known = new.or_else(|| choices().get(&key));
        let (mut product, candidates) = handle.plan(g, self.options.tf32, aligned)?;
        match known.and_then(|known| among(known, &candidates)) {
            Some(algorithm) => product.algorithm.data = algorithm,
            None => {
                choices().refused += usize::from(known.is_some());
                self.choose(g, &mut product, candidates)?;
                self.new.push((key, product.algorithm.data));
            }
        }
        Ok(product)
    }

    /// Times the candidates and sets the fastest.
    fn choose(&mut self, g: &Gemm, product: &mut Product, candidates: Vec<Algorithm>) -> Result<(), Error> {
        let size = |m: &Matrix, rows: usize, columns: usize| {
            let last = (rows - 1) * m.row + (columns - 1) * m.column + (g.batch - 1) * m.batch;
            ((last + 1) * m.dtype.size()).next_multiple_of(256)
        };
        let (a, b, c) = (size(&g.a, g.m, g.k), size(&g.b, g.k, g.n), size(&g.c, g.m, g.n));
        // a's memory also serves as the bias, if it is large enough.
        if candidates.len() < 2 || a + b + 2 * c > self.free.1 || g.bias.is_some() && a < g.n * 4 {
            return Ok(());
        }
        let (start, stream) = (self.free.0, self.cuda.0.stream);
        let bias = if g.bias.is_some() { start } else { 0 };
        let plus = start + (a + b + if g.plus.is_some() { c } else { 0 }) as u64;
        let places = [start, start + a as u64, plus, start + (a + b) as u64, bias];
        let scales = g.scaled.map(|_| [start; 2]); // what this memory holds is an ordinary f32, too
        let timing = || failed("timing a GEMM");
        self.cuda.current();
        if !self.filled {
            // Ordinary numbers in every type: whatever the memory held before could affect the timing.
            // SAFETY: nobody needs this memory now, and it is that large.
            unsafe { result::memset_d8_async(start, 0x3f, self.free.1, stream) }.map_err(timing())?;
            self.filled = true;
        }
        let event = || result::event::create(sys::CUevent_flags_enum::CU_EVENT_DEFAULT).map_err(timing());
        let (begin, end) = (event()?, event()?);
        let first = product.algorithm.data;
        let mut best = (f32::MAX, first);
        for data in candidates {
            product.algorithm.data = data;
            let mut fastest = f32::MAX;
            for round in 0..4 {
                // SAFETY: all operands lie in free memory, as large as the GEMM needs; the events are ours.
                let ms = unsafe {
                    let _ = result::event::record(begin, stream);
                    if self.cuda.0.products.run(product, places, scales, self.cuda.0.workspace.start(), stream).is_err() {
                        break; // skip a candidate that does not run
                    }
                    let _ = result::event::record(end, stream);
                    result::stream::synchronize(stream).map_err(timing())?;
                    result::event::elapsed(begin, end).map_err(timing())?
                };
                if round > 0 {
                    fastest = fastest.min(ms);
                }
            }
            // cuBLASLt's first choice stays unless another is clearly faster.
            if fastest < 0.98 * best.0 {
                best = (fastest, data);
            }
        }
        product.algorithm.data = best.1;
        for e in [begin, end] {
            // SAFETY: made above, destroyed once; everything recorded has passed.
            let _ = unsafe { result::event::destroy(e) };
        }
        Ok(())
    }

    /// Saves the new choices for later programs and processes.
    pub fn remember(self) {
        if !self.new.is_empty() {
            self.cuda.0.choices.lock().unwrap_or_else(PoisonError::into_inner).add(self.new);
        }
    }
}

/// Everything that a choice depends on, besides GPU and library version.
fn key(g: &Gemm, tf32: bool, aligned: [u32; 4]) -> String {
    let side = |m: &Matrix| format!("{}:{}:{}:{}", m.dtype, m.row, m.column, m.batch);
    let plus = g.plus.as_ref().map_or("-".into(), side);
    let (a, b, c) = (side(&g.a), side(&g.b), side(&g.c));
    let epilogue = format!("{}{}", if g.bias.is_some() { "bias" } else { "-" }, g.act.map_or(String::new(), |a| format!("{a:?}")));
    let fast = if g.scaled.is_some_and(|s| s.fast) { " fast" } else { "" };
    format!("{}x{}x{}x{} {a} {b} {c} {plus} {} {} {epilogue} {tf32} {aligned:?}{fast}", g.m, g.n, g.k, g.batch, g.alpha, g.beta)
}
