//! What a compiled program runs, as one number: whether a figure that was measured with one build is of the program that another build makes.

use crate::cuda;
use crate::graph::Kind;
use crate::kernel::{Launch, PRELUDE, Step};
use crate::passes::Target;
use crate::program::Compiled;
use std::fmt::Debug;
use xxhash_rust::xxh3::Xxh3;

impl Compiled {
    /// The same for programs that do the same work: ops with their shapes and types, launches with their sources, GEMMs, and how they are launched. Names,
    /// and comments in kernels, do not count.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Hash(Xxh3::new());
        hash.value(&(self.target, &self.options));
        let mut codes = match self.target {
            Target::Cpu => None,
            Target::Cuda(arch) => {
                hash.code(PRELUDE);
                Some(cuda::codes(&self.graph, &self.plan.spots, arch))
            }
        };
        for node in &self.graph.nodes {
            hash.value(&(&node.inputs, &node.outputs));
            match &node.kind {
                Kind::Op(op) => hash.value(op),
                Kind::State(state) => hash.value(&state.role),
                Kind::Feed(_) | Kind::Const(_) | Kind::Grad => {}
            }
            for step in codes.as_mut().and_then(Iterator::next).iter().flat_map(|code| &code.steps) {
                hash.step(step);
            }
        }
        hash.value(&self.plan.copies);
        if let Some(before) = &self.before {
            hash.value(&crate::mutant!("fingerprint-without-the-warm-up", before.1.fingerprint(), 0));
        }
        hash.0.digest()
    }
}

struct Hash(Xxh3);

impl Hash {
    fn text(&mut self, text: &str) {
        self.0.update(text.as_bytes());
        self.0.update(&[0]);
    }

    fn value(&mut self, value: &impl Debug) {
        self.text(&format!("{value:?}"));
    }

    /// CUDA source without comments at the ends of lines, and without indentation.
    fn code(&mut self, source: &str) {
        for line in source.lines() {
            let code = line.split("//").next().unwrap_or_default().trim();
            if !code.is_empty() {
                self.text(code);
            }
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Launch(Launch { source, entry, defines, grid, block, shared, args }) => {
                self.code(source);
                self.value(&(entry, defines, grid, block, shared, args));
            }
            Step::When(live, step) => {
                self.value(live);
                self.step(step);
            }
            Step::Gemm(_) | Step::Collective(_) => self.value(step),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::passes::Switches;
    use crate::program::imagined;
    use crate::{Compiled, DType, Recorder};

    fn of(width: usize, name: &str, pass: &str) -> u64 {
        let r = Recorder::new();
        let x = r.feed("x", &[8, width], DType::F32);
        let w = r.scope(name, || r.param("w", &[width, 16], crate::Init::Normal { std: 1.0 }));
        let y = x.matmul(w);
        let loss = (y.silu() * y + y).sum();
        r.output("loss", loss);
        r.output("gradient", r.grad(loss, &[w])[0]);
        let (switch, value) = pass.split_once('=').unwrap();
        let switches = Switches::default().with(switch, value).unwrap();
        Compiled::new(r.finish(), &switches, imagined(90)).unwrap().fingerprint()
    }

    #[test]
    fn work_that_differs_has_another_fingerprint_and_names_have_none() {
        let it = of(32, "a", "fuse-pointwise=auto");
        assert_eq!(it, of(32, "b", "fuse-pointwise=auto"));
        for (width, pass) in [(64, "fuse-pointwise=auto"), (32, "fuse-pointwise=off"), (32, "cuda-graph=off"), (32, "bf16=auto")] {
            assert_ne!(it, of(width, "a", pass), "{width} {pass}");
        }
    }

    /// What a warm-up runs is work, too.
    #[test]
    fn another_warm_up_is_another_fingerprint() {
        let compiled = || {
            let r = Recorder::new();
            let (x, w) = (r.feed("x", &[256, 512], DType::F32), r.param("w", &[512, 512], crate::Init::Normal { std: 0.1 }));
            let loss = x.matmul(w).square().sum();
            r.output("gradient", r.grad(loss, &[w])[0]);
            let switches = Switches::default().with("bf16", "auto").unwrap().with("fp8", "auto").unwrap();
            Compiled::new(r.finish(), &switches, imagined(90)).unwrap()
        };
        let (it, mut other) = (compiled(), compiled());
        assert_eq!(it.fingerprint(), other.fingerprint());
        other.before.as_mut().unwrap().1.options.tune ^= true;
        assert_ne!(it.fingerprint(), other.fingerprint());
    }
}
