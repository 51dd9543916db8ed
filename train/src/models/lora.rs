//! Low-rank adapters: y = x W^T + (alpha / rank) x A^T B^T, with W frozen, on some of a decoder's matrices.

use super::Shape;
use crate::choices;
use crate::config::within;
use engine::cpu::gemm::{Into, Mat, gemm};

#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    pub rank: usize,
    pub alpha: f64,
    /// Of the adapters' input, while training.
    pub dropout: f64,
    pub targets: Vec<Target>,
}

/// A matrix of every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
}

choices!(Target { Q: "q", K: "k", V: "v", O: "o", Gate: "gate", Up: "up", Down: "down" });

impl Target {
    pub const ALL: [Target; 7] = [Target::Q, Target::K, Target::V, Target::O, Target::Gate, Target::Up, Target::Down];

    pub fn name(self) -> &'static str {
        match self {
            Target::Q => "q",
            Target::K => "k",
            Target::V => "v",
            Target::O => "o",
            Target::Gate => "gate",
            Target::Up => "up",
            Target::Down => "down",
        }
    }

    /// What transformers calls it, inside a layer.
    pub fn module(self) -> &'static str {
        match self {
            Target::Q => "self_attn.q_proj",
            Target::K => "self_attn.k_proj",
            Target::V => "self_attn.v_proj",
            Target::O => "self_attn.o_proj",
            Target::Gate => "mlp.gate_proj",
            Target::Up => "mlp.up_proj",
            Target::Down => "mlp.down_proj",
        }
    }

    /// The last part of that: what PEFT lists.
    pub fn leaf(self) -> &'static str {
        self.module().rsplit('.').next().unwrap_or_default()
    }

    /// Outputs and inputs of W.
    pub fn sizes(self, s: &Shape) -> (usize, usize) {
        let (queries, keys) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
        match self {
            Target::Q => (queries, s.dim),
            Target::K | Target::V => (keys, s.dim),
            Target::O => (s.dim, queries),
            Target::Gate | Target::Up => (s.hidden, s.dim),
            Target::Down => (s.dim, s.hidden),
        }
    }
}

impl Lora {
    pub fn scale(&self) -> f32 {
        (self.alpha / self.rank as f64) as f32
    }

    pub fn check(&self) -> Result<(), String> {
        if !(1..=4096).contains(&self.rank) {
            return Err(format!("rank = {}: from 1 to 4096", self.rank));
        }
        within("alpha", self.alpha, -1e6..=1e6).map_err(|e| e.to_string())?;
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(format!("dropout = {} is not in [0, 1)", self.dropout));
        }
        if self.targets.is_empty() {
            return Err("targets is empty: nothing would be trained".into());
        }
        if let Some(t) = Target::ALL.iter().find(|t| self.targets.iter().filter(|x| x == t).count() > 1) {
            return Err(format!("targets names {} twice", t.name()));
        }
        Ok(())
    }

    /// Its tensors, by the names that they have here: A [rank, inputs] and B [outputs, rank] for each target of each layer.
    pub fn tensors(&self, s: &Shape) -> Vec<(String, [usize; 2])> {
        let pair = |(layer, t): (usize, Target)| {
            let (outputs, inputs) = t.sizes(s);
            let name = |part: &str| format!("layers.{layer}.{}.lora_{part}", t.name());
            [(name("a"), [self.rank, inputs]), (name("b"), [outputs, self.rank])]
        };
        (0..s.layers).flat_map(|l| self.targets.iter().map(move |&t| (l, t))).flat_map(pair).collect()
    }

    /// w [outputs, inputs] + scale b a.
    pub fn merge(&self, w: &mut [f32], a: &[f32], b: &[f32]) {
        let (outputs, inputs) = (b.len() / self.rank, a.len() / self.rank);
        let scale = engine::mutant!("merged-without-alpha", self.scale(), 1.0);
        gemm(w, inputs, Into::Add, outputs, self.rank, inputs, Mat::rows(b, self.rank), Mat::rows(a, inputs), scale, true);
    }
}
