//! A hierarchical reasoning model: two recurrent modules, one slow (high) and one fast (low), whose feed-forward layers are mixtures of
//! experts; and a halting head. What the numbers are is said by reference/hrm.py; names of parameters are the same there.

use crate::config::{Config, ConfigError, NORM_EPS, ROPE_THETA, Section, WEIGHT, shown};
use crate::nn::mamba2::{self, Sizes};
use crate::section;
use engine::ops::attention::attention;
use engine::ops::experts::{Routing, mixture};
use engine::ops::matmul::Matmul;
use engine::ops::pointwise::{Bin, pointwise};
use engine::ops::rope::Pairs;
use engine::{DType, Init, Recorder, Var};

/// What mixes the cells of a puzzle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixer {
    Attention,
    Mamba2,
}

crate::choices!(Mixer { Attention: "attention", Mamba2: "mamba2" });

section! {
    /// The shape of the model, and how it halts.
    pub struct HrmConfig {
        /// Size of the vocabulary: the puzzle's symbols, the blank and the padding.
        pub vocab: usize = 0, in 1..=1 << 16, [data];
        /// Tokens of a puzzle: its cells and `data.prefix`.
        pub seq: usize = 0, in 1..=1 << 16, [data];
        /// Width of both modules.
        pub dim: usize = 512, in 1..=1 << 16;
        /// Attention heads.
        pub heads: usize = 8, in 1..=1 << 12;
        /// Layers of each module.
        pub layers: usize = 4, in 1..=1 << 10;
        /// Steps of the high (slow) module in a segment.
        pub high_cycles: usize = 2, in 1..=1 << 8;
        /// Steps of the low (fast) module for each one of the high.
        pub low_cycles: usize = 2, in 1..=1 << 8;
        /// Experts of the feed-forward layers. 0 or 1: dense layers.
        pub experts: usize = 1, in 0..=1 << 10;
        /// Experts that a token goes through.
        pub top_k: usize = 1, in 0..=1 << 10;
        /// Width of one expert's SwiGLU.
        pub hidden: usize = 1536, in 1..=1 << 20;
        /// Most segments of a puzzle.
        pub max_segments: usize = 16, in 1..=1 << 12;
        /// Chance that a puzzle gets a random minimum of segments, instead of 1.
        pub explore: f64 = 0.1, in 0.0..=1.0;
        /// Weight of the experts' load-balancing loss.
        pub balance_weight: f64 = 0.01, in WEIGHT;
        /// Weight of the halting head's loss.
        pub halt_weight: f64 = 0.5, in WEIGHT;
        /// Base of RoPE's frequencies.
        pub rope_theta: f64 = 10000.0, in ROPE_THETA;
        /// What RMS norms add to the mean square.
        pub norm_eps: f64 = 1e-5, in NORM_EPS;
        /// What mixes the cells: attention, or mamba2 (a state-space layer, in both directions with the same weights).
        pub mixer: Mixer = Mixer::Attention;
        /// Mamba-2: width of the state's B and C.
        pub state: usize = 64, in 1..=1 << 12;
        /// Mamba-2: channels of a head; there are 2 dim in all.
        pub mamba_head: usize = 64, in 1..=1 << 12;
        /// Mamba-2: taps of the convolution.
        pub conv: usize = 4, in 1..=1 << 8;
    }
}

impl HrmConfig {
    pub fn check(&self) -> Result<(), ConfigError> {
        let bad = |m: String| Err(ConfigError::Invalid(m));
        self.in_range("model")?;
        if self.experts > 1 && !(1..=self.experts).contains(&self.top_k) {
            return bad(format!("model.top_k = {}: from 1 to model.experts = {}", self.top_k, self.experts));
        }
        if self.mixer == Mixer::Mamba2 {
            let (inner, head) = (2 * self.dim, self.mamba_head);
            let whole = inner.is_multiple_of(head);
            return if whole { Ok(()) } else { bad(format!("model: 2 dim / mamba_head = {inner} / {head} must be a whole number")) };
        }
        if !self.dim.is_multiple_of(self.heads) || !(self.dim / self.heads).is_multiple_of(2) {
            return bad(format!(
                "model: dim / heads = {} / {} must be a whole, even number (a head's elements are rotated in pairs)",
                self.dim, self.heads
            ));
        }
        Ok(())
    }

    /// Refuses settings that someone asked for and that only the other mixer reads.
    pub fn only_for_its_mixer(&self, config: &Config) -> Result<(), ConfigError> {
        let (own, other, keys): (_, _, &[&str]) = match self.mixer {
            Mixer::Attention => ("attention", "mamba2", &["state", "mamba_head", "conv"]),
            Mixer::Mamba2 => ("mamba2", "attention", &["heads", "rope_theta"]),
        };
        let Some((key, value)) = keys.iter().find_map(|key| Some((key, config.given("model", key)?))) else { return Ok(()) };
        let value = shown(value);
        Err(ConfigError::Invalid(format!(
            "model.{key} = {value}: it is for the mixer {other}, and here it is {own} (add model.mixer={other}, or remove model.{key})"
        )))
    }

    pub fn is_dense(&self) -> bool {
        self.experts <= 1
    }
}

/// Where examples start: drawn once, never trained.
pub const STARTS: [&str; 2] = ["high_start", "low_start"];

/// The states of both modules: [batch, seq, dim], or what repeats to that.
#[derive(Clone, Copy)]
pub struct Thought<'g> {
    pub high: Var<'g>,
    pub low: Var<'g>,
}

/// What comes of a segment.
pub struct Segment<'g> {
    pub thought: Thought<'g>,
    /// f32 [batch * seq, vocab]
    pub logits: Var<'g>,
    /// f32 [batch]: above 0, the answer is thought to be right.
    pub halt: Var<'g>,
    /// Of the layers that have a gradient.
    pub routings: Vec<Routing<'g>>,
}

impl<'g> Segment<'g> {
    /// The most likely token of each cell: i32 [batch * seq, 1].
    pub fn answer(&self) -> Var<'g> {
        self.logits.stop_gradient().top_k(1)
    }

    /// The share of tokens that each expert has, over all of these layers: f32 [experts]. None in a dense model.
    pub fn loads(&self) -> Option<Var<'g>> {
        let all = self.routings.iter().map(|r| r.loads()).reduce(|a, b| a + b)?;
        Some(all * (1.0 / self.routings.len() as f32))
    }
}

/// A segment's answers beside the solutions.
pub struct Judged<'g> {
    /// [1]: what is differentiated, and what it consists of.
    pub loss: Var<'g>,
    pub ce: Var<'g>,
    pub halting: Var<'g>,
    pub balance: Var<'g>,
    /// f32 [batch, seq]: 1 where a cell counts and its answer is wrong.
    pub wrong: Var<'g>,
    /// f32 [batch]: 1 where none is wrong.
    pub right: Var<'g>,
}

/// RoPE's cosines and sines.
type Tables<'g> = (Var<'g>, Var<'g>);

pub struct Hrm<'a, 'g> {
    pub c: &'a HrmConfig,
    pub r: &'g Recorder,
}

impl<'g> Hrm<'_, 'g> {
    fn matrix(&self, name: &str, shape: &[usize]) -> Var<'g> {
        let std = 1.0 / (shape[shape.len() - 1] as f32).sqrt();
        self.r.param(name, shape, Init::Truncated { std })
    }

    /// As every example: [1, 1, dim].
    pub fn start(&self) -> Thought<'g> {
        let [high, low] = STARTS.map(|name| {
            let row = self.r.param(name, &[self.c.dim], Init::Truncated { std: 1.0 });
            row.reshape(&[1, 1, self.c.dim])
        });
        Thought { high, low }
    }

    /// Attention to all cells.
    fn attend(&self, at: &str, x: Var<'g>, tables: Tables<'g>) -> Var<'g> {
        let c = self.c;
        let (b, t, d, size) = (x.shape()[0], x.shape()[1], c.dim, c.dim / c.heads);
        let qkv = x.linear(self.matrix(&format!("{at}.qkv"), &[3 * d, d]));
        let part = |i: usize| qkv.slice(2, i * d, (i + 1) * d).reshape(&[b, t, c.heads, size]);
        let [q, k] = [0, 1].map(|i| part(i).rope(Pairs::Halves, tables));
        let a = attention(q, k, part(2), false, 1.0 / (size as f32).sqrt());
        a.reshape(&[b, t, d]).linear(self.matrix(&format!("{at}.out"), &[d, d]))
    }

    /// A puzzle has no direction: the cells are scanned from both ends. Projections see one cell at a time, so both directions share them.
    fn scan(&self, at: &str, x: Var<'g>) -> Var<'g> {
        let c = self.c;
        let s = Sizes { inner: 2 * c.dim, head: c.mamba_head, state: c.state, groups: 1, eps: c.norm_eps as f32 };
        mamba2::layer(&format!("{at}.mamba"), x, &s, c.conv, &[false, true])
    }

    /// Attention or scans over all cells, then experts, each after a norm.
    fn layer(&self, at: &str, x: Var<'g>, tables: Option<Tables<'g>>) -> (Var<'g>, Option<Routing<'g>>) {
        let (c, d, eps) = (self.c, self.c.dim, self.c.norm_eps as f32);
        let matrix = |name: &str, shape: &[usize]| self.matrix(&format!("{at}.{name}"), shape);
        let mixed = match tables {
            Some(tables) => self.attend(at, x, tables),
            None => self.scan(at, x),
        };
        let x = (x + mixed).rms_norm_plain(eps);
        let experts = c.experts.max(1);
        let router = (!c.is_dense()).then(|| matrix("experts.router", &[experts, d]));
        let gate_up = matrix("experts.gate_up", &[experts, 2 * c.hidden, d]);
        let (y, routing) = mixture(x, router, gate_up, matrix("experts.down", &[experts, d, c.hidden]), c.top_k);
        ((x + y).rms_norm_plain(eps), routing)
    }

    /// One step of a module.
    fn module(&self, name: &str, state: Var<'g>, injection: Var<'g>, tables: Option<Tables<'g>>) -> (Var<'g>, Vec<Routing<'g>>) {
        let (mut x, mut routings) = (state + injection, vec![]);
        for l in 0..self.c.layers {
            let at = format!("{name}.layers.{l}");
            let (y, routing) = self.r.block(&at, || self.layer(&at, x, tables));
            x = y;
            routings.extend(routing);
        }
        (x, routings)
    }

    /// Thinks about ids i32 [batch, seq]. Only the last step of each module has a gradient.
    pub fn segment(&self, from: Thought<'g>, ids: Var<'g>) -> Segment<'g> {
        let (c, r) = (self.c, self.r);
        let (b, t, d) = (ids.shape()[0], c.seq, c.dim);
        let x = self.matrix("embedding", &[c.vocab, d]).gather_rows(ids) * (d as f32).sqrt();
        let tables = (c.mixer == Mixer::Attention).then(|| r.rope_tables(t, d / c.heads, c.rope_theta as f32));
        let (mut high, mut low) = (from.high, from.low);
        for i in 1..c.high_cycles * c.low_cycles {
            low = self.module("low", low, high + x, tables).0;
            if i % c.low_cycles == 0 {
                high = self.module("high", high, low, tables).0;
            }
        }
        let (high, low) = (high.stop_gradient(), low.stop_gradient());
        let (low, mut routings) = self.module("low", low, high + x, tables);
        let (high, more) = self.module("high", high, low, tables);
        routings.extend(more);
        // The logits and the halting decision are f32.
        let head = self.matrix("head", &[c.vocab, d]);
        let logits = r.op1(Matmul { dtype: Some(DType::F32), ..Matmul::default() }, &[high.reshape(&[b * t, d]), head.t()]);
        let halt = r.typed(|| {
            let (weight, bias) = (r.param("halt", &[d], Init::Full(0.0)), r.param("halt_bias", &[1], Init::Full(-5.0)));
            high.slice(1, 0, 1).reshape(&[b, d]).matmul(weight.reshape(&[d, 1])).reshape(&[b]) + bias
        });
        Segment { thought: Thought { high, low }, logits, halt, routings }
    }

    /// Targets i32 [batch, seq]; those of -1 are ignored, and an example with no other targets counts as right.
    pub fn judge(&self, s: &Segment<'g>, targets: Var<'g>) -> Judged<'g> {
        let (c, r) = (self.c, self.r);
        let (b, t) = (targets.shape()[0], targets.shape()[1]);
        r.scope("loss", || {
            r.typed(|| {
                let number = targets.cast(DType::F32);
                let counts = r.full(&[1, 1], -0.5).less(number);
                let cells = counts.sum_axis(1).max(r.full(&[1, 1], 1.0)); // [batch, 1]
                let ce = s.logits.cross_entropy(targets.reshape(&[b * t])).reshape(&[b, t]).sum_axis(1) / cells;
                let answer = s.answer().reshape(&[b, t]).cast(DType::F32);
                let wrong = pointwise(&[counts, answer, number], |e, x| {
                    let (hit, zero) = (e.bin(Bin::Eq, x[1], x[2]), e.c(0.0));
                    e.select(hit, zero, x[0])
                });
                let right = wrong.sum_axis(1).less(r.full(&[1, 1], 0.5)).reshape(&[b]);
                let (ce, halting) =
                    (ce.mean(), s.halt.bce_with_logits(engine::mutant!("hrm-halts-when-it-is-wrong", right, -right + 1.0)).mean());
                let balance = s.routings.iter().map(|r| r.balance()).reduce(|a, b| a + b).unwrap_or_else(|| r.zeros(&[1]));
                let loss = ce + halting * c.halt_weight as f32 + balance * c.balance_weight as f32;
                Judged { loss, ce, halting, balance, wrong, right }
            })
        })
    }
}
