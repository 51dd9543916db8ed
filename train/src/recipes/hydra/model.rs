//! HYDRA: compressed convolutional attention, and MLPs that run again on the tokens that a router chooses. What the numbers are
//! is said by reference/hydra.py; names of parameters are the same there.

use crate::config::{ConfigError, NORM_EPS, ROPE_THETA, Section, WEIGHT};
use crate::nn::{linear, offset};
use crate::section;
use engine::ops::attention::attention;
use engine::ops::concat::concat;
use engine::ops::rope::Pairs;
use engine::{DType, Init, Recorder, Var};

section! {
    /// The shape of the model.
    pub struct HydraConfig {
        /// Tokens of the vocabulary; at least those of the data's tokenizer.
        pub vocab: usize = 0, in 1..=1 << 20, [data];
        /// Width of the residual stream.
        pub dim: usize = 128, in 1..=1 << 20;
        /// Blocks of attention and a recursive MLP.
        pub blocks: usize = 3, in 1..=1024;
        /// Attention heads.
        pub heads: usize = 4, in 1..=1 << 20;
        /// Heads of keys and values, each shared by heads / kv_heads queries (GQA).
        pub kv_heads: usize = 2, in 1..=1 << 20;
        /// Attention runs in a latent space of dim / compression.
        pub compression: usize = 2, in 1..=1 << 20;
        /// Width of the SwiGLU MLP.
        pub hidden: usize = 256, in 1..=1 << 20;
        /// Tokens of a sequence.
        pub seq: usize = 128, in 1..=1 << 20;
        /// First and last block: for each recursion of the MLP the share of the sequence's tokens that it works on; never increasing.
        pub edge_capacity: Vec<f64> = vec![1.0, 0.5, 0.25], in 1e-38..=1.0;
        /// The same for the blocks in between.
        pub middle_capacity: Vec<f64> = vec![0.5, 0.25, 0.125], in 1e-38..=1.0;
        /// Kernel width of the convolutions on queries and keys.
        pub conv_width: usize = 3, in 1..=1 << 20;
        /// Base of RoPE's frequencies.
        pub rope_theta: f64 = 10000.0, in ROPE_THETA;
        /// What RMS norms add to the mean square.
        pub norm_eps: f64 = 1e-6, in NORM_EPS;
        /// Weight of the causal router's loss, added to the cross-entropy.
        pub router_weight: f64 = 0.01, in WEIGHT;
    }
}

const STD: f32 = 0.02;

impl HydraConfig {
    pub fn latent(&self) -> usize {
        self.dim / self.compression
    }

    pub fn head_dim(&self) -> usize {
        self.latent() / self.heads
    }

    pub fn kv_dim(&self) -> usize {
        self.head_dim() * self.kv_heads
    }

    pub fn capacity(&self, block: usize) -> &[f64] {
        if block == 0 || block == self.blocks - 1 { &self.edge_capacity } else { &self.middle_capacity }
    }

    pub fn check(&self) -> Result<(), ConfigError> {
        let bad = |m: String| Err(ConfigError::Invalid(m));
        self.in_range("model")?;
        let divides = [
            ("dim", self.dim, "compression", self.compression),
            ("dim / compression", self.latent(), "heads", self.heads),
            ("heads", self.heads, "kv_heads", self.kv_heads),
        ];
        for (a, x, b, y) in divides {
            if x % y != 0 || x < y {
                return bad(format!("model.{a} = {x} does not divide by model.{b} = {y}"));
            }
        }
        if !self.head_dim().is_multiple_of(2) {
            return bad(format!(
                "model: a head of {} elements (dim / compression / heads) has no pairs to rotate; make it even",
                self.head_dim()
            ));
        }
        if self.kv_dim() < 2 {
            return bad(format!("model: kv_heads x head size = {} is too small to halve", self.kv_dim()));
        }
        for (name, shares) in [("edge_capacity", &self.edge_capacity), ("middle_capacity", &self.middle_capacity)] {
            if shares.is_empty() || shares.len() > 64 {
                return bad(format!("model.{name} = {shares:?}: one to 64 shares"));
            }
            if shares.windows(2).any(|w| w[1] > w[0]) {
                return bad(format!("model.{name} = {shares:?} increases: a recursion works on tokens of the one before it"));
            }
        }
        Ok(())
    }

    /// Rows are numbered in f32, exactly up to 2^24.
    pub fn check_batch(&self, batch: usize) -> Result<(), ConfigError> {
        match batch.checked_mul(self.seq) {
            Some(tokens) if tokens <= 1 << 24 => Ok(()),
            _ => Err(ConfigError::Invalid(format!(
                "train.batch = {batch} of model.seq = {} tokens: at most {} tokens in a micro-batch",
                self.seq,
                1 << 24
            ))),
        }
    }

    fn eps(&self) -> f32 {
        self.norm_eps as f32
    }

    /// Matrices that write into the residual stream start smaller.
    fn small(&self) -> f32 {
        STD / (2.0 * self.blocks as f32).sqrt()
    }
}

/// Tails of a sequence that cached decoding carries from chunk to chunk. Each is created, read and updated where it is used.
pub struct Cache<'g> {
    /// Tokens that the caches hold at most.
    pub capacity: usize,
    /// i32 `[1]`: how many tokens came before this chunk.
    pub position: Var<'g>,
}

impl<'g> Cache<'g> {
    /// The last `rows` rows of the sequence before `x` [1, time, d], in front of it; and keeps the last rows for the next chunk.
    fn extend(&self, name: &str, x: Var<'g>, rows: usize) -> Var<'g> {
        if rows == 0 {
            return x;
        }
        let r = x.recorder();
        let state = r.state(&format!("scratch/cache/{name}"), &[1, rows, x.dim(0)], DType::F32, Init::Full(0.0));
        let all = concat(&[state, x], 1);
        let end = all.shape()[1];
        r.update(state, all.slice(1, end - rows, end));
        all
    }

    /// x [1, time, d] written at this chunk's place into the rows of a cache [capacity, d]; the whole cache.
    fn append(&self, name: &str, x: Var<'g>) -> Var<'g> {
        let r = x.recorder();
        let (time, d) = (x.shape()[1], x.dim(0));
        let state = r.state(&format!("scratch/cache/{name}"), &[self.capacity, d], DType::F32, Init::Full(0.0));
        let next = state.replace_rows(self.positions(time), x.reshape(&[time, d]));
        r.update(state, next);
        next
    }

    /// i32 [time]: places of this chunk's tokens.
    fn positions(&self, time: usize) -> Var<'g> {
        let r = self.position.recorder();
        offset(self.position, r.constant(&[time], (0..time).map(|i| i as f32).collect()))
    }
}

pub struct Hydra<'a, 'g> {
    pub c: &'a HydraConfig,
    pub r: &'g Recorder,
}

impl<'g> Hydra<'_, 'g> {
    fn param(&self, name: &str, shape: &[usize], init: Init) -> Var<'g> {
        self.r.param(name, shape, init)
    }

    fn ones(&self, name: &str, n: usize) -> Var<'g> {
        self.param(name, &[n], Init::Full(1.0))
    }

    pub fn embedding(&self) -> Var<'g> {
        self.param("embedding", &[self.c.vocab, self.c.dim], Init::Normal { std: STD })
    }

    fn conv(&self, name: &str, x: Var<'g>, groups: usize) -> Var<'g> {
        let (channels, width) = (x.dim(0), self.c.conv_width);
        let std = 1.0 / ((channels / groups * width) as f32).sqrt();
        x.causal_conv(self.param(name, &[channels, channels / groups, width], Init::Normal { std }), groups)
    }

    /// As `conv`, over a chunk and what came before it.
    fn conv_cached(&self, name: &str, x: Var<'g>, groups: usize, cache: Option<&Cache<'g>>) -> Var<'g> {
        let Some(cache) = cache else { return self.conv(name, x, groups) };
        let (time, tail) = (x.shape()[1], self.c.conv_width - 1);
        let y = self.conv(name, cache.extend(name, x, tail), groups);
        y.slice(1, tail, tail + time)
    }

    /// u [batch, time, dim], normalised.
    fn attention(&self, at: &str, u: Var<'g>, tables: (Var<'g>, Var<'g>), cache: Option<&Cache<'g>>) -> Var<'g> {
        let c = self.c;
        let (b, t) = (u.shape()[0], u.shape()[1]);
        let (heads, kv, d) = (c.heads, c.kv_heads, c.head_dim());
        let group = heads / kv;
        let q0 = linear(u, &format!("{at}.wq"), c.latent(), STD);
        let k0 = linear(u, &format!("{at}.wk"), c.kv_dim(), STD);
        // Half of every value comes from this token, half from the token before it.
        let now = linear(u, &format!("{at}.wv"), c.kv_dim() / 2, STD);
        let before = linear(u, &format!("{at}.wv_prev"), c.kv_dim() - c.kv_dim() / 2, STD);
        let before = match cache {
            Some(cache) => cache.extend(&format!("{at}.wv_prev"), before, 1).slice(1, 0, t),
            None if t == 1 => before * 0.0,
            None => before.slice(1, 0, t - 1).pad(1, 1, 0),
        };
        let v = concat(&[now, before], 2);
        let conv = |name: &str, x: Var<'g>, groups: usize| self.conv_cached(&format!("{at}.{name}"), x, groups, cache);
        let q = conv("q_conv2", conv("q_conv1", q0, heads), 1);
        let k = conv("k_conv2", conv("k_conv1", k0, kv), 1);
        // Queries and keys see each other's uncompressed projection, averaged over the heads of a group.
        let grouped = |x: Var<'g>| x.reshape(&[b, t, kv, group, d]);
        let q = (grouped(q) + k0.reshape(&[b, t, kv, 1, d]) * 0.5).reshape(&[b, t, heads, d]);
        let k = (k.reshape(&[b, t, kv, 1, d]) + grouped(q0).mean_axis(3) * 0.5).reshape(&[b, t, kv, d]);
        // y / sqrt(sum(y^2) + eps) is the RMS norm with eps / d, divided by sqrt(d); that last factor goes into the scale.
        let norm = |x: Var<'g>| x.rms_norm_plain(c.eps() / d as f32);
        let k = norm(k) * self.ones(&format!("{at}.temperature"), 1);
        let (q, k) = (norm(q).rope(Pairs::Halves, tables), k.rope(Pairs::Halves, tables));
        let scale = 1.0 / (d as f32).sqrt();
        let y = match cache {
            None => attention(q, k, v.reshape(&[b, t, kv, d]), true, scale),
            Some(cache) => self.attend_cached(at, q, k, v, scale, cache),
        };
        linear(y.reshape(&[b, t, c.latent()]), &format!("{at}.wo"), c.dim, c.small())
    }

    /// Attention of a chunk [1, time, heads, d] to everything before it and to itself.
    fn attend_cached(&self, at: &str, q: Var<'g>, k: Var<'g>, v: Var<'g>, scale: f32, cache: &Cache<'g>) -> Var<'g> {
        let (t, heads, kv, d) = (q.shape()[1], self.c.heads, self.c.kv_heads, self.c.head_dim());
        let rows = |x: Var<'g>| x.reshape(&[1, t, kv * d]);
        let keys = |name: &str, x: Var<'g>| {
            cache.append(&format!("{at}.{name}"), rows(x)).reshape(&[cache.capacity, kv, 1, d]).permute(&[1, 2, 0, 3])
        };
        let (k, v) = (keys("k", k), keys("v", v)); // [kv, 1, capacity, d]
        let q = q.reshape(&[t, kv, heads / kv, d]).permute(&[1, 2, 0, 3]); // [kv, group, time, d]
        let scores = q.matmul(k.t()) * scale; // [kv, group, time, capacity]
        let place = self.r.constant(&[1, cache.capacity], (0..cache.capacity).map(|i| i as f32).collect());
        let hidden = cache.positions(t).cast(DType::F32).reshape(&[t, 1]).less(place);
        let seen = hidden.choose(self.r.full(&[1], -1e30), scores);
        seen.softmax().matmul(v).permute(&[2, 0, 1, 3]).reshape(&[1, t, heads, d])
    }

    /// h [tokens, dim]; the logit [tokens, 1] of the router's row i for each.
    fn logit(&self, h: Var<'g>, router: Var<'g>, i: usize) -> Var<'g> {
        h.matmul(router.row(i).reshape(&[self.c.dim, 1]))
    }

    fn mlp(&self, at: &str, h: Var<'g>, i: usize, recursions: usize) -> Var<'g> {
        let c = self.c;
        let depth = self.param(&format!("{at}.depth_embedding"), &[recursions, c.dim], Init::Normal { std: STD });
        let u = (h + depth.slice(0, i, i + 1)).rms_norm(self.ones(&format!("{at}.mlp_norm"), c.dim), c.eps());
        let hidden = linear(u, &format!("{at}.gate"), c.hidden, STD).swiglu(linear(u, &format!("{at}.up"), c.hidden, STD));
        let y = linear(hidden, &format!("{at}.down"), c.dim, c.small());
        // The task's gradient reaches the router here.
        y * (self.logit(h, self.routers(at, recursions).0, i).sigmoid() * 2.0)
    }

    fn routers(&self, at: &str, recursions: usize) -> (Var<'g>, Var<'g>) {
        let param = |name: &str| self.param(&format!("{at}.{name}"), &[recursions, self.c.dim], Init::Normal { std: STD });
        (param("router"), param("causal_router"))
    }

    fn attended(&self, at: &str, x: Var<'g>, tables: (Var<'g>, Var<'g>), cache: Option<&Cache<'g>>) -> Var<'g> {
        let u = x.rms_norm(self.ones(&format!("{at}.attn_norm"), self.c.dim), self.c.eps());
        x + self.attention(&format!("{at}.attn"), u, tables, cache)
    }

    /// Training: each recursion works on the tokens that the router ranks highest in the whole sequence. Returns the new stream
    /// and the causal router's loss.
    fn block(&self, index: usize, x: Var<'g>, tables: (Var<'g>, Var<'g>)) -> (Var<'g>, Var<'g>) {
        let (c, r) = (self.c, self.r);
        let at = format!("blocks.{index}");
        let (b, t) = (x.shape()[0], x.shape()[1]);
        let mut h = self.attended(&at, x, tables, None).reshape(&[b * t, c.dim]);
        let mut router_loss = r.zeros(&[1]);
        let capacity = c.capacity(index);
        let (router, causal) = self.routers(&at, capacity.len());
        // Positions still in the recursion, in order, [batch, count]; None: all of them.
        let mut active: Option<Var> = None;
        let mut count = t;
        for (i, share) in capacity.iter().enumerate() {
            let k = ((share * t as f64) as usize).max(1);
            // Both logits in one product. The ranking has no gradient, the guess none that reaches h.
            let both = concat(&[router.slice(0, i, i + 1).stop_gradient(), causal.slice(0, i, i + 1)], 0);
            let logits = h.stop_gradient().linear(both); // [batch * time, 2]
            let (rank, guess) = (logits.slice(1, 0, 1), logits.slice(1, 1, 2));
            if k < count {
                let ranked = match active {
                    None => rank.reshape(&[b, t]),
                    Some(a) => rank.gather_rows_by_sequence(a).reshape(&[b, count]),
                };
                let chosen = ranked.top_k(k); // positions among the active
                active = Some(match active {
                    None => chosen,
                    Some(a) => {
                        let table = a.cast(DType::F32).reshape(&[b * count, 1]);
                        table.gather_rows_by_sequence(chosen).reshape(&[b, k]).cast(DType::I32)
                    }
                });
                count = k;
            }
            let Some(a) = active else {
                router_loss = router_loss + guess.bce_with_logits(r.full(&[1, 1], 1.0)).mean();
                h = h + self.mlp(&at, h, i, capacity.len());
                continue;
            };
            let chosen = r.zeros(&[b * t, 1]).scatter_add_rows_by_sequence(a, r.full(&[b * k, 1], 1.0));
            router_loss = router_loss + guess.bce_with_logits(chosen).mean();
            h = h.scatter_add_rows_by_sequence(a, self.mlp(&at, h.gather_rows_by_sequence(a), i, capacity.len()));
        }
        (h.reshape(&[b, t, c.dim]), router_loss)
    }

    /// As when generating: a token enters recursion i if it entered i - 1 and the causal router says so. No look ahead.
    fn causal_block(&self, index: usize, x: Var<'g>, tables: (Var<'g>, Var<'g>), cache: Option<&Cache<'g>>) -> Var<'g> {
        let c = self.c;
        let at = format!("blocks.{index}");
        let (b, t) = (x.shape()[0], x.shape()[1]);
        let mut h = self.attended(&at, x, tables, cache).reshape(&[b * t, c.dim]);
        let capacity = c.capacity(index);
        let zero = self.r.zeros(&[1, 1]);
        let mut entered: Option<Var> = None; // all
        for (i, share) in capacity.iter().enumerate() {
            if *share < 1.0 {
                let open = zero.less(self.logit(h, self.routers(&at, capacity.len()).1, i));
                entered = Some(entered.map_or(open, |e| e * open));
            }
            let y = self.mlp(&at, h, i, capacity.len());
            h = h + entered.map_or(y, |e| e.choose(y, zero));
        }
        h.reshape(&[b, t, c.dim])
    }

    fn embed(&self, ids: Var<'g>) -> Var<'g> {
        self.embedding().gather_rows(ids)
    }

    fn final_norm(&self, x: Var<'g>) -> Var<'g> {
        x.rms_norm(self.ones("norm", self.c.dim), self.c.eps())
    }

    fn tables(&self, time: usize) -> (Var<'g>, Var<'g>) {
        self.r.rope_tables(time, self.c.head_dim(), self.c.rope_theta as f32)
    }

    /// ids [batch, time] -> the last hidden state [batch, time, dim] and the causal router's loss.
    pub fn hidden(&self, ids: Var<'g>) -> (Var<'g>, Var<'g>) {
        let tables = self.tables(ids.shape()[1]);
        let mut x = self.embed(ids);
        let mut router_loss = self.r.zeros(&[1]);
        for i in 0..self.c.blocks {
            let (next, loss) = self.r.block(&format!("blocks.{i}"), || self.block(i, x, tables));
            (x, router_loss) = (next, router_loss + loss);
        }
        (self.final_norm(x), router_loss)
    }

    /// The same with causal routing: what generation sees.
    pub fn causal_hidden(&self, ids: Var<'g>) -> Var<'g> {
        let tables = self.tables(ids.shape()[1]);
        let mut x = self.embed(ids);
        for i in 0..self.c.blocks {
            x = self.r.block(&format!("blocks.{i}"), || self.causal_block(i, x, tables, None));
        }
        self.final_norm(x)
    }

    /// Logits [1, vocab] after the last token of a chunk [1, time] whose past is in the caches.
    pub fn cached_logits(&self, ids: Var<'g>, cache: &Cache<'g>) -> Var<'g> {
        let time = ids.shape()[1];
        let (cos, sin) = self.tables(cache.capacity);
        let places = cache.positions(time);
        let tables = (cos.gather_rows(places), sin.gather_rows(places));
        let mut x = self.embed(ids);
        for i in 0..self.c.blocks {
            x = self.causal_block(i, x, tables, Some(cache));
        }
        self.final_norm(x).slice(1, time - 1, time).reshape(&[1, self.c.dim]).linear(self.embedding())
    }

    /// Sum over tokens of weight `[1]` * cross-entropy; a target of -1 is ignored.
    pub fn loss(&self, hidden: Var<'g>, targets: Var<'g>, weight: Var<'g>) -> Var<'g> {
        let tokens = targets.meta().elements();
        let w = self.embedding();
        self.r.scope("loss", || hidden.reshape(&[tokens, self.c.dim]).linear_cross_entropy(w, targets.reshape(&[tokens]), weight))
    }
}
