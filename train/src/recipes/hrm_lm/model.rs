//! A language model that thinks between reading and writing: an encoder reads the source, whose mean enters two recurrent modules, one slow (high) and one fast
//! (low); what they thought passes a gate and is the memory of a decoder. What the numbers are is said by reference/hrm_lm.py; names of parameters are the same
//! there.

use crate::config::{Config, ConfigError, NORM_EPS, Section, WEIGHT, shown};
use crate::nn::mamba2::{self, Sizes};
use crate::section;
use engine::ops::attention::{attention, attention_until};
use engine::ops::concat::concat;
use engine::ops::experts::{Placed, mixture_with_capacity};
use engine::ops::matmul::Matmul;
use engine::{DType, Init, Recorder, Var};

/// What mixes the tokens of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncoderKind {
    Transformer,
    Mamba2,
}

crate::choices!(EncoderKind { Transformer: "transformer", Mamba2: "mamba2" });

/// Which cycles are differentiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradient {
    Last,
    All,
}

crate::choices!(Gradient { Last: "last", All: "all" });

/// What the decoder attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    Prefix,
    Cross,
}

crate::choices!(Memory { Prefix: "prefix", Cross: "cross" });

section! {
    /// The shape of the model, and the weights of what its loss adds up.
    pub struct HrmLmConfig {
        /// Tokens of the vocabulary; at least those of the data's tokenizer. Encoder and decoder have an embedding each.
        pub vocab: usize = 0, in 1..=1 << 20, [data];
        /// Width of the encoder, the modules and the decoder.
        pub dim: usize = 512, in 1..=1 << 16;
        /// Attention heads.
        pub heads: usize = 8, in 1..=1 << 12;
        /// Layers of the encoder.
        pub encoder_layers: usize = 6, in 1..=1 << 10;
        /// Layers of the decoder.
        pub decoder_layers: usize = 6, in 1..=1 << 10;
        /// Tokens that the encoder reads.
        pub source: usize = 512, in 1..=1 << 20;
        /// Tokens that the decoder writes.
        pub seq: usize = 512, in 1..=1 << 20;
        /// Hidden width of every MLP and expert, in multiples of `dim`.
        pub ff: usize = 4, in 1..=1 << 8;
        /// What mixes the tokens of the source: transformer, or mamba2 (which reads forward only).
        pub encoder: EncoderKind = EncoderKind::Transformer;
        /// Experts of the transformer encoder's layers. 0 or 1: dense layers.
        pub experts: usize = 8, in 0..=1 << 10;
        /// Experts that a token goes through.
        pub top_k: usize = 2, in 1..=1 << 10;
        /// Places of an expert, in multiples of an even share of a micro-batch's tokens. Tokens that find no place are left out by that expert; in evaluation
        /// and generation all have a place.
        pub capacity: f64 = 1.25, in 1e-3..=1e6;
        /// Weight of the experts' load-balancing loss.
        pub balance_weight: f64 = 0.01, in WEIGHT;
        /// Slots of the slow module.
        pub high_slots: usize = 8, in 1..=1 << 16;
        /// Slots of the fast module.
        pub low_slots: usize = 64, in 1..=1 << 16;
        /// Layers of the slow module.
        pub high_layers: usize = 2, in 1..=1 << 8;
        /// Layers of the fast module.
        pub low_layers: usize = 2, in 1..=1 << 8;
        /// Cycles of thinking; each ends in a thought.
        pub cycles: usize = 4, in 1..=1 << 8;
        /// Steps of the fast module in a cycle; the slow one has one.
        pub low_steps: usize = 8, in 1..=1 << 8;
        /// Which cycles are differentiated: last, or all. With halting all are.
        pub gradient: Gradient = Gradient::Last;
        /// What the decoder attends to: prefix (as many tokens as `prefix` says) or cross (one).
        pub memory: Memory = Memory::Prefix;
        /// Memory tokens.
        pub prefix: usize = 8, in 1..=1 << 16;
        /// Whether a head says after each cycle how likely it should be the last. It is trained, and measured; all cycles are run.
        pub halting: bool = false;
        /// Weight of the halting head's loss.
        pub halting_weight: f64 = 0.01, in WEIGHT;
        /// What the halting probabilities of all cycles should sum to.
        pub halting_target: f64 = 1.0, in 0.0..=1e6;
        /// Weight of the decoder's loss on the thoughts of the cycles before the last. 0: they are not decoded.
        pub supervision_weight: f64 = 0.1, in WEIGHT;
        /// Factor of the gate's sigmoid.
        pub gate_scale: f64 = 1.0, in 0.0..=1e6;
        /// Added to the gate before it is clamped to 0 and 1.
        pub gate_bias: f64 = 0.0, in -1e6..=1e6;
        /// Steps for which the gate's scale is 0, so that the decoder learns its language first.
        pub gate_warmup: u64 = 0, in 0..=1 << 53;
        /// Steps after those over which it rises to `gate_scale` in a line. 0: it is open at once.
        pub gate_ramp: u64 = 0, in 0..=1 << 53;
        /// What norms add to the variance.
        pub norm_eps: f64 = 1e-5, in NORM_EPS;
        /// Mamba-2: width of the state's B and C.
        pub state: usize = 64, in 1..=1 << 12;
        /// Mamba-2: channels of a head; there are 2 dim in all.
        pub mamba_head: usize = 64, in 1..=1 << 12;
        /// Mamba-2: taps of the convolution.
        pub conv: usize = 4, in 1..=1 << 8;
    }
}

impl HrmLmConfig {
    pub fn check(&self) -> Result<(), ConfigError> {
        let bad = |m: String| Err(ConfigError::Invalid(m));
        self.in_range("model")?;
        if !self.dim.is_multiple_of(self.heads) {
            return bad(format!("model: dim / heads = {} / {} must be a whole number", self.dim, self.heads));
        }
        if self.has_experts() && self.top_k > self.experts {
            return bad(format!("model.top_k = {}: at most model.experts = {}", self.top_k, self.experts));
        }
        if self.encoder == EncoderKind::Mamba2 && !(2 * self.dim).is_multiple_of(self.mamba_head) {
            return bad(format!("model: 2 dim / mamba_head = {} / {} must be a whole number", 2 * self.dim, self.mamba_head));
        }
        Ok(())
    }

    /// Slots of experts are counted in f32, exactly below 2^24.
    pub fn check_batch(&self, batch: usize) -> Result<(), ConfigError> {
        let slots = [self.source, if self.has_experts() { self.top_k } else { 1 }].iter().try_fold(batch, |n, by| n.checked_mul(*by));
        if slots.is_some_and(|n| n < 1 << 24) && batch.checked_mul(self.seq).is_some_and(|n| n < 1 << 28) {
            return Ok(());
        }
        Err(ConfigError::Invalid(format!(
            "train.batch = {batch} of model.source = {} and model.seq = {} tokens: a micro-batch has fewer than 2^24 tokens to read, times model.top_k with \
             experts, and fewer than 2^28 to write (lower train.batch, and raise train.accumulate)",
            self.source, self.seq
        )))
    }

    /// Refuses settings that someone asked for and that only the other encoder reads.
    pub fn only_for_its_encoder(&self, config: &Config) -> Result<(), ConfigError> {
        let (own, other, keys): (_, _, &[&str]) = match self.encoder {
            EncoderKind::Transformer => ("transformer", "mamba2", &["state", "mamba_head", "conv"]),
            EncoderKind::Mamba2 => ("mamba2", "transformer", &["experts", "top_k", "capacity", "balance_weight"]),
        };
        let Some((key, value)) = keys.iter().find_map(|key| Some((key, config.given("model", key)?))) else { return Ok(()) };
        let value = shown(value);
        Err(ConfigError::Invalid(format!(
            "model.{key} = {value}: it is for the encoder {other}, and here it is {own} (add model.encoder={other}, or remove model.{key})"
        )))
    }

    pub fn has_experts(&self) -> bool {
        self.encoder == EncoderKind::Transformer && self.experts > 1
    }

    pub fn memory_tokens(&self) -> usize {
        if self.memory == Memory::Prefix { self.prefix } else { 1 }
    }

    /// Whether every cycle is differentiated.
    fn whole(&self) -> bool {
        self.gradient == Gradient::All || self.halting
    }

    /// Whether the thoughts of the cycles before the last are decoded, too.
    fn supervised(&self) -> bool {
        self.supervision_weight > 0.0 && self.cycles > 1
    }

    /// Places of an expert among so many tokens.
    fn places(&self, tokens: usize) -> usize {
        (self.capacity * tokens as f64 * self.top_k as f64 / self.experts as f64).ceil() as usize
    }

    /// The gate's scale at a step.
    pub fn gate_at(&self, step: u64) -> f32 {
        let open = match step.checked_sub(self.gate_warmup) {
            None => 0.0,
            Some(since) if since < self.gate_ramp => (since + 1) as f64 / (self.gate_ramp + 1) as f64,
            Some(_) => 1.0,
        };
        (open * self.gate_scale) as f32
    }
}

/// What the encoder reads.
#[derive(Clone, Copy)]
pub struct Source<'g> {
    /// i32 [batch, source].
    pub ids: Var<'g>,
    /// f32 [batch, source]: 0 on padding, which stands at the end of a row; None where there is none.
    pub real: Option<Var<'g>>,
}

impl<'g> Source<'g> {
    /// Of ids [batch, source] that are -1 on padding.
    pub fn padded(ids: Var<'g>) -> Source<'g> {
        let r = ids.recorder();
        r.typed(|| {
            let numbers = ids.cast(DType::F32);
            let real = r.full(&[1, 1], -0.5).less(numbers);
            Source { ids: numbers.max(r.full(&[1, 1], 0.0)).cast(DType::I32), real: Some(real) }
        })
    }
}

/// What comes of reading and thinking.
pub struct Thought<'g> {
    /// [batch, dim]: the source's mean.
    pub pooled: Var<'g>,
    /// The modules' last states, [batch, slots, dim].
    pub high: Var<'g>,
    pub low: Var<'g>,
    /// After each cycle, [batch, dim].
    pub thoughts: Vec<Var<'g>>,
    /// With halting, after each cycle a probability, f32 [batch].
    pub halts: Vec<Var<'g>>,
    /// Of each layer with experts.
    pub placed: Vec<Placed<'g>>,
    /// f32 `[1]`: the balance losses of these layers, added up.
    pub balance: Option<Var<'g>>,
}

impl<'g> Thought<'g> {
    /// f32 [batch]: the halting probabilities of all cycles, added up.
    pub fn halt_sum(&self) -> Option<Var<'g>> {
        self.halts.iter().copied().reduce(|a, b| a + b)
    }

    /// f32 `[1]`: the share of the tokens' choices that found no place, over all layers.
    pub fn dropped(&self) -> Option<Var<'g>> {
        let asked = self.placed.iter().map(|p| p.loads.sum()).reduce(|a, b| a + b)?;
        let kept = self.placed.iter().map(|p| p.kept).reduce(|a, b| a + b)?;
        Some((asked - kept) / asked)
    }
}

pub struct HrmLm<'a, 'g> {
    pub c: &'a HrmLmConfig,
    pub r: &'g Recorder,
    /// Whether experts have places for all tokens.
    pub all_placed: bool,
}

impl<'g> HrmLm<'_, 'g> {
    fn matrix(&self, name: &str, rows: usize, columns: usize) -> Var<'g> {
        self.r.param(name, &[rows, columns], Init::Truncated { std: 1.0 / (columns as f32).sqrt() })
    }

    fn vector(&self, name: &str, length: usize, value: f32) -> Var<'g> {
        self.r.param(name, &[length], Init::Full(value))
    }

    /// With a bias.
    pub(super) fn linear(&self, at: &str, x: Var<'g>, outputs: usize) -> Var<'g> {
        x.linear(self.matrix(&format!("{at}.weight"), outputs, x.dim(0))) + self.vector(&format!("{at}.bias"), outputs, 0.0)
    }

    /// One number for each row, whose weights begin at 0: [.., dim] -> f32 [batch].
    fn head(&self, at: &str, x: Var<'g>) -> Var<'g> {
        self.r.typed(|| {
            let weight = self.r.param(&format!("{at}.weight"), &[1, self.c.dim], Init::Full(0.0));
            x.linear(weight).reshape(&[x.dim(1)]) + self.vector(&format!("{at}.bias"), 1, 0.0)
        })
    }

    pub(super) fn norm(&self, at: &str, x: Var<'g>) -> Var<'g> {
        let d = self.c.dim;
        let (weight, bias) = (self.vector(&format!("{at}.weight"), d, 1.0), self.vector(&format!("{at}.bias"), d, 0.0));
        x.layer_norm_affine(weight, bias, self.c.norm_eps as f32)
    }

    /// Tokens as vectors, and where they stand: sines in even columns, cosines in odd ones.
    pub(super) fn embed(&self, at: &str, ids: Var<'g>, positions: usize) -> (Var<'g>, Var<'g>) {
        let d = self.c.dim;
        let table = self.r.param(&format!("{at}.embedding"), &[self.c.vocab, d], Init::Truncated { std: 1.0 });
        let places = self.r.table(&[positions, d], || {
            let angle = |t: usize, i: usize| t as f64 * 10000f64.powf(-((i - i % 2) as f64) / d as f64);
            let wave = |t: usize, i: usize| if i.is_multiple_of(2) { angle(t, i).sin() } else { angle(t, i).cos() };
            (0..positions * d).map(|n| wave(n / d, n % d) as f32).collect()
        });
        (table.gather_rows(ids), places)
    }

    /// Projections [batch, time, n dim] as n tensors [batch, time, heads, size].
    pub(super) fn heads(&self, x: Var<'g>, n: usize) -> Vec<Var<'g>> {
        let (d, h) = (self.c.dim, self.c.heads);
        let part = |i: usize| if n == 1 { x } else { x.slice(2, i * d, (i + 1) * d) };
        (0..n).map(|i| part(i).reshape(&[x.shape()[0], x.shape()[1], h, d / h])).collect()
    }

    pub(super) fn scale(&self) -> f32 {
        1.0 / ((self.c.dim / self.c.heads) as f32).sqrt()
    }

    pub(super) fn joined(&self, x: Var<'g>) -> Var<'g> {
        let s = x.shape();
        x.reshape(&[s[0], s[1], self.c.dim])
    }

    /// Attention among all of x, not causal; keys of which `until` is -1 are seen by none.
    fn attend(&self, at: &str, x: Var<'g>, until: Option<Var<'g>>) -> Var<'g> {
        let d = self.c.dim;
        let qkv = self.heads(self.linear(&format!("{at}.qkv"), x, 3 * d), 3);
        let y = match until {
            Some(until) => attention_until(qkv[0], qkv[1], qkv[2], until, false, self.scale()),
            None => attention(qkv[0], qkv[1], qkv[2], false, self.scale()),
        };
        self.linear(&format!("{at}.out"), self.joined(y), d)
    }

    /// An MLP without biases.
    fn mlp(&self, at: &str, x: Var<'g>) -> Var<'g> {
        let (d, hidden) = (self.c.dim, self.c.ff * self.c.dim);
        let up = x.linear(self.matrix(&format!("{at}.up.weight"), hidden, d)).gelu_erf();
        up.linear(self.matrix(&format!("{at}.down.weight"), d, hidden))
    }

    /// Pre-norm: attention, then an MLP.
    fn block(&self, at: &str, x: Var<'g>) -> Var<'g> {
        let x = x + self.attend(at, self.norm(&format!("{at}.attn_norm"), x), None);
        x + self.mlp(at, self.norm(&format!("{at}.mlp_norm"), x))
    }

    /// A layer of the encoder. Padding is seen by no token, and goes to no expert.
    fn encoder_layer(&self, at: &str, x: Var<'g>, masks: Option<(Var<'g>, Var<'g>)>) -> (Var<'g>, Option<(Placed<'g>, Var<'g>)>) {
        let (c, d) = (self.c, self.c.dim);
        if c.encoder == EncoderKind::Mamba2 {
            let s = Sizes { inner: 2 * d, head: c.mamba_head, state: c.state, groups: 1, eps: c.norm_eps as f32 };
            let mixed = mamba2::layer(&format!("{at}.mamba"), self.norm(&format!("{at}.norm"), x), &s, c.conv, &[false]);
            return (x + mixed, None);
        }
        let x = x + self.attend(at, self.norm(&format!("{at}.attn_norm"), x), masks.map(|m| m.1));
        let u = self.norm(&format!("{at}.mlp_norm"), x);
        if !c.has_experts() {
            return (x + self.mlp(at, u), None);
        }
        let (shape, tokens, hidden) = (u.shape(), u.meta().rows(), c.ff * d);
        let std = |columns: usize| Init::Truncated { std: 1.0 / (columns as f32).sqrt() };
        let experts = |of: &str, shape: &[usize]| self.r.param(&format!("{at}.experts.{of}"), shape, std(shape[shape.len() - 1]));
        let matrices =
            [experts("router", &[c.experts, d]), experts("up", &[c.experts, hidden, d]), experts("down", &[c.experts, d, hidden])];
        let places = if self.all_placed { tokens } else { c.places(tokens) };
        let real = masks.map_or_else(|| self.r.full(&[tokens], 1.0), |m| m.0.reshape(&[tokens]));
        let (y, placed) = mixture_with_capacity(u.reshape(&[tokens, d]), real, matrices, (c.top_k, places));
        let balance = self.r.typed(|| placed.balance(real));
        (x + y.reshape(&shape), Some((placed, balance)))
    }

    /// Reads the source and thinks about it.
    pub fn think(&self, source: Source<'g>) -> Thought<'g> {
        let (c, r) = (self.c, self.r);
        let (b, t) = (source.ids.shape()[0], source.ids.shape()[1]);
        let (tokens, places) = self.embed("encoder", source.ids, t);
        let masks = source.real.map(|real| (real, r.typed(|| (real * t as f32 - 1.0).cast(DType::I32))));
        let (mut x, mut placed, mut balance) = (tokens + places, vec![], None);
        for l in 0..c.encoder_layers {
            let at = format!("encoder.layers.{l}");
            let (y, own) = r.block(&at, || self.encoder_layer(&at, x, masks));
            x = y;
            if let Some((own, loss)) = own {
                placed.push(own);
                balance = Some(balance.map_or(loss, |all: Var| all + loss));
            }
        }
        let x = self.norm("encoder.norm", x);
        let pooled = match source.real {
            Some(real) => (x * real.reshape(&[b, t, 1])).sum_axis(1).reshape(&[b, c.dim]) / real.sum_axis(1),
            None => x.mean_axis(1).reshape(&[b, c.dim]),
        };
        let thought = self.core(self.linear("bridge", pooled, c.dim));
        Thought { pooled, placed, balance, ..thought }
    }

    /// One step of a module: its state [batch or 1, slots, dim], and what every slot is told, [batch, dim].
    fn module(&self, name: &str, state: Var<'g>, told: Var<'g>, layers: usize) -> Var<'g> {
        let (d, slots, b) = (self.c.dim, state.shape()[1], told.shape()[0]);
        let position = self.matrix(&format!("core.{name}.position"), slots, d);
        let mut x = state + told.reshape(&[b, 1, d]) + position;
        for l in 0..layers {
            let at = format!("core.{name}.layers.{l}");
            x = self.r.block(&at, || self.block(&at, x));
        }
        self.norm(&format!("core.{name}.norm"), x)
    }

    /// A module's state before the first cycle, for every row. Where no gradient reaches it, it is frozen.
    fn start(&self, name: &str, slots: usize) -> Var<'g> {
        let (c, init, name) = (self.c, Init::Full(0.0), format!("core.{name}_start"));
        let shape = [slots, c.dim];
        let reached = c.whole() || c.cycles == 1;
        let start = if reached { self.r.param(&name, &shape, init) } else { self.r.frozen(&name, &shape, init) };
        start.reshape(&[1, slots, c.dim])
    }

    /// Cycles of thinking about x [batch, dim].
    fn core(&self, x: Var<'g>) -> Thought<'g> {
        let (c, d) = (self.c, self.c.dim);
        let mean = |state: Var<'g>| state.mean_axis(1).reshape(&[state.shape()[0], d]);
        let (mut high, mut low) = (self.start("high", c.high_slots), self.start("low", c.low_slots));
        let [high_in, low_in] = ["high_in", "low_in"].map(|name| self.linear(&format!("core.{name}"), x, d));
        let (mut thoughts, mut halts) = (vec![], vec![]);
        for cycle in 0..c.cycles {
            let told = self.linear("core.to_low", mean(high), d) + low_in;
            for _ in 0..c.low_steps {
                low = self.module("low", low, told, c.low_layers);
            }
            high = self.module("high", high, self.linear("core.to_high", mean(low), d) + high_in, c.high_layers);
            if !c.whole() && cycle + 1 < c.cycles {
                (high, low) = (high.stop_gradient(), low.stop_gradient());
            }
            thoughts.push(self.linear("core.out", self.norm("core.norm", mean(high)), d));
            if c.halting {
                let first = high.slice(1, 0, 1).reshape(&[high.shape()[0], d]);
                halts.push(self.r.typed(|| self.head("core.halt", first).sigmoid()));
            }
        }
        Thought { pooled: x, high, low, thoughts, halts, placed: vec![], balance: None }
    }

    /// f32 [batch], from 0 to 1: how much of the last thought the decoder sees.
    pub fn gate(&self, thought: &Thought<'g>, scale: Var<'g>) -> Var<'g> {
        let (c, r) = (self.c, self.r);
        let last = thought.thoughts[c.cycles - 1];
        r.typed(|| {
            let open = self.head("gate", last).sigmoid() * scale + c.gate_bias as f32;
            open.max(r.full(&[1], 0.0)).min(r.full(&[1], 1.0))
        })
    }

    /// A thought [batch, dim] as tokens that the decoder attends to, [batch, tokens, dim]; through the gate, where there is one.
    pub fn memory(&self, thought: Var<'g>, gate: Option<Var<'g>>) -> Var<'g> {
        let (b, d, n) = (thought.shape()[0], self.c.dim, self.c.memory_tokens());
        let memory = self.linear("memory", thought, n * d).reshape(&[b, n, d]);
        gate.map_or(memory, |gate| memory * gate.reshape(&[b, 1, 1]))
    }

    /// Attention to a memory whose keys and values are there, from x after the attention to itself; then the MLP.
    pub(super) fn rest_of_layer(&self, at: &str, x: Var<'g>, cross: Var<'g>) -> Var<'g> {
        let d = self.c.dim;
        let x = self.norm(&format!("{at}.cross_norm"), x + self.linear(&format!("{at}.cross_out"), self.joined(cross), d));
        let up = self.linear(&format!("{at}.up"), x, self.c.ff * d).relu();
        self.norm(&format!("{at}.mlp_norm"), x + self.linear(&format!("{at}.down"), up, d))
    }

    /// Keys and values of a memory for one layer, [batch, tokens, heads, size].
    pub(super) fn cross_keys(&self, at: &str, memory: Var<'g>) -> [Var<'g>; 2] {
        let kv = self.heads(self.linear(&format!("{at}.cross_kv"), memory, 2 * self.c.dim), 2);
        [kv[0], kv[1]]
    }

    /// The decoder's last hidden states, [batch, memories, time, dim], for tokens i32 [batch, time] and each of these memories [batch, tokens, dim]. What does not
    /// depend on the memory, up to the first layer's queries, is computed once. An example's rows lie together, so that ranks can divide the batch.
    pub fn decode(&self, tokens: Var<'g>, memories: &[Var<'g>]) -> Var<'g> {
        let (c, r, d) = (self.c, self.r, self.c.dim);
        let (b, t, n) = (tokens.shape()[0], tokens.shape()[1], memories.len());
        let repeated = |x: Var<'g>| if n == 1 { x } else { x.reshape(&[b, 1, t, d]).expand(&[b, n, t, d]).reshape(&[b * n, t, d]) };
        let memory = if n == 1 { memories[0] } else { concat(memories, 1).reshape(&[b * n, c.memory_tokens(), d]) };
        let (x, places) = self.embed("decoder", tokens, t);
        let mut x = x + places;
        for l in 0..c.decoder_layers {
            let at = format!("decoder.layers.{l}");
            x = r.block(&at, || {
                let qkv = self.heads(self.linear(&format!("{at}.qkv"), x, 3 * d), 3);
                let own = attention(qkv[0], qkv[1], qkv[2], true, self.scale());
                let mut x = self.norm(&format!("{at}.attn_norm"), x + self.linear(&format!("{at}.out"), self.joined(own), d));
                let mut q = self.linear(&format!("{at}.cross_q"), x, d);
                if l == 0 {
                    (x, q) = (repeated(x), repeated(q));
                }
                let [k, v] = self.cross_keys(&at, memory);
                let cross = attention(self.heads(q, 1)[0], k, v, false, self.scale());
                self.rest_of_layer(&at, x, cross)
            });
        }
        self.norm("decoder.norm", x).reshape(&[b, n, t, d])
    }

    fn output_matrix(&self) -> Var<'g> {
        self.matrix("decoder.head", self.c.vocab, self.c.dim)
    }

    /// Of the last hidden states, [.., vocab], in f32.
    pub fn logits(&self, hidden: Var<'g>) -> Var<'g> {
        let shape = hidden.shape();
        let rows = hidden.reshape(&[hidden.meta().rows(), self.c.dim]);
        let logits = self.r.op1(Matmul { dtype: Some(DType::F32), ..Matmul::default() }, &[rows, self.output_matrix().t()]);
        logits.reshape(&[&shape[..shape.len() - 1], &[self.c.vocab]].concat())
    }

    /// Sum over tokens of weight `[1]` * cross-entropy; a target of -1 is ignored. hidden [batch, memories, time, dim]; targets [batch, time] are those of every memory.
    pub fn cross_entropy(&self, hidden: Var<'g>, targets: Var<'g>, weight: Var<'g>) -> Var<'g> {
        let (b, n, t) = (hidden.shape()[0], hidden.shape()[1], hidden.shape()[2]);
        let targets = if n == 1 { targets } else { targets.reshape(&[b, 1, t]).expand(&[b, n, t]) }.reshape(&[b * n * t]);
        let hidden = hidden.reshape(&[b * n * t, self.c.dim]);
        self.r.scope("loss", || hidden.linear_cross_entropy(self.output_matrix(), targets, weight))
    }
}

/// What training reports of a micro-batch, all but the gate `[1]`: the loss, what it adds up, and more.
pub struct Judged<'g> {
    pub loss: Var<'g>,
    pub cross_entropy: Var<'g>,
    pub supervision: Option<Var<'g>>,
    pub halt_sum: Option<Var<'g>>,
    pub balance: Option<Var<'g>>,
    pub dropped: Option<Var<'g>>,
    /// f32 [batch]
    pub gate: Var<'g>,
}

/// What a micro-batch is made of: the source, the decoder's tokens and targets i32 [batch, seq], `weight` (1 / targets that count in the step) and the gate's
/// scale, f32 `[1]`.
#[derive(Clone, Copy)]
pub struct Fed<'g> {
    pub source: Source<'g>,
    pub tokens: Var<'g>,
    pub targets: Var<'g>,
    pub weight: Var<'g>,
    pub gate_scale: Var<'g>,
}

impl<'g> HrmLm<'_, 'g> {
    /// The loss of one of `accumulate` micro-batches.
    pub fn judge(&self, f: &Fed<'g>, accumulate: usize) -> Judged<'g> {
        let (c, r, share) = (self.c, self.r, 1.0 / accumulate as f32);
        let thought = self.think(f.source);
        let gate = self.gate(&thought, f.gate_scale);
        let memory = self.memory(thought.thoughts[c.cycles - 1], Some(gate));
        let earlier = if c.supervised() { &thought.thoughts[..c.cycles - 1] } else { &[] };
        let memories: Vec<Var> = earlier.iter().map(|t| self.memory(*t, None)).chain([memory]).collect();
        let all = self.decode(f.tokens, &memories);
        let before = earlier.len();
        let hidden = if before == 0 { all } else { all.slice(1, before, before + 1) };
        let cross_entropy = self.cross_entropy(hidden, f.targets, f.weight);
        let part = f.weight * (1.0 / before.max(1) as f32);
        let supervision = (before > 0).then(|| self.cross_entropy(all.slice(1, 0, before), f.targets, part));
        r.typed(|| {
            let halt_sum = thought.halt_sum();
            // Means over rows and tokens of a micro-batch: of a step's micro-batches each counts for its share.
            let halting = halt_sum.map(|sum| gate.mean().stop_gradient() * (sum - c.halting_target as f32).square().mean() * share);
            let balance = thought.balance.map(|b| engine::mutant!("balance-of-every-micro-batch-whole", b * share, b));
            let parts = [(supervision, c.supervision_weight), (halting, c.halting_weight), (balance, c.balance_weight)];
            let weighed = parts.into_iter().filter_map(|(part, weight)| Some(part? * weight as f32));
            let loss = weighed.fold(cross_entropy, |sum, part| sum + part);
            let (halt_sum, dropped) = (halt_sum.map(|sum| sum.mean() * share), thought.dropped().map(|d| d * share));
            Judged { loss, cross_entropy, supervision, halt_sum, balance, dropped, gate }
        })
    }
}

/// The mean, the least and the largest number of x `[n]`, in f32.
pub fn spread(x: Var) -> [Var; 3] {
    let r = x.recorder();
    r.scope("gate", || {
        r.typed(|| {
            let row = x.reshape(&[1, x.dim(0)]);
            [x.mean(), -(-row).max_axis(1).reshape(&[1]), row.max_axis(1).reshape(&[1])]
        })
    })
}
