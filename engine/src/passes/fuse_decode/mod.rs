//! Decoding: computes a token's matmuls and its attention over the KV cache in few kernel launches.

mod attention;
mod rows;

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init};
use crate::meta::DType;
use crate::ops::cache::decode_attention;
use crate::ops::rope::Pairs;
use crate::record::{Recorder, Var};

pub struct FuseDecode;

impl Switch for FuseDecode {
    fn name(&self) -> &'static str {
        "fuse-decode"
    }

    fn about(&self) -> &'static str {
        "In programs without gradients: GEMMs of up to 64 rows use kernels that read each weight once, with the RMS norm before and the residual or SwiGLU after them fused, and matmuls with the same input merged. Attention over a KV cache applies QK-norm and RoPE itself."
    }

    fn numerics(&self, _: Target, dtype: DType) -> Numerics {
        if dtype == DType::F32 { Numerics::Reordered } else { Numerics::LowPrecision }
    }

    fn example(&self, r: &Recorder) {
        layer(r);
        let heads = |name: &str, n: usize| r.feed(name, &[3, 1, n, 8], DType::F32);
        let norm = |name: &str| r.frozen(name, &[8], Init::Normal { std: 1.0 });
        let past = r.state("past", &[1], DType::I32, Init::Full(4.0));
        let tables = r.rope_tables(1, 8, 100.0);
        for (name, normed) in [("normed", true), ("plain", false)] {
            let cache = |part: &str| r.state(&format!("{name}.{part}"), &[3, 9, 2, 8], DType::F32, Init::Normal { std: 1.0 });
            let (mut q, mut k, v) = (heads("q", 4) * 0.5, heads("k", 2) * 0.5, heads("v", 2));
            if normed {
                (q, k) = (q.rms_norm(norm("q_norm"), 1e-6), k.rms_norm(norm("k_norm"), 1e-6));
            }
            let (q, k) = (q.rope(Pairs::Halves, tables), k.rope(Pairs::Halves, tables));
            let caches = (cache("keys"), cache("values"));
            let (y, new) = decode_attention(q, k, v, caches, past, None, 0.35);
            r.update(caches.0, new.0);
            r.update(caches.1, new.1);
            r.output(name, y);
        }
    }
}

impl Pass for FuseDecode {
    fn stage(&self) -> Stage {
        Stage::Differentiated
    }

    fn after(&self) -> &'static [&'static str] {
        &["bf16", "fuse-norm", "fuse-qk-norm"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        rows::apply(g, receipt)?;
        attention::apply(g, receipt)
    }
}

/// The matmuls of a decoder layer, for three tokens.
fn layer<'g>(r: &'g Recorder) {
    let weight = |name: &str, n: usize, k: usize| r.frozen(name, &[n, k], Init::Normal { std: 0.2 }).cast(DType::BF16);
    let norm = |x: Var<'g>, name: &str| x.rms_norm(r.frozen(name, &[16], Init::Normal { std: 1.0 }), 1e-6);
    let x = r.feed("x", &[3, 1, 16], DType::F32).cast(DType::BF16);
    let h = norm(x, "first");
    let [q, k, v] = ["q", "k", "v"].map(|name| h.linear(weight(name, 24, 16)));
    let x = x + (q * k * v).linear(weight("o", 16, 24));
    let h = norm(x, "second");
    let x = x + h.linear(weight("gate", 40, 16)).swiglu(h.linear(weight("up", 40, 16))).linear(weight("down", 16, 40));
    r.output("logits", norm(x, "last").linear(weight("head", 50, 16)).cast(DType::F32));
}
