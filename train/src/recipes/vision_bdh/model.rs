//! Vision-BDH: an image classifier whose one layer is applied several times over. What the numbers are is said by
//! reference/vision_bdh.py; names of parameters are the same there.

use crate::config::{ConfigError, NORM_EPS, ROPE_THETA, Section};
use crate::section;
use engine::ops::concat::concat;
use engine::ops::pointwise::{Bin, pointwise};
use engine::ops::rope::Pairs;
use engine::{DType, Init, Recorder, Var};

section! {
    /// The shape of the model.
    pub struct VisionConfig {
        /// Pixels of a side, to which a folder of pictures is resized. From the data: their own side, if all are squares of one size (up to 512) that
        /// `patch` divides; else 32.
        pub image: usize = 0, in 1..=1 << 12, [data];
        /// Pixels of a patch's side; divides `image`. Where nobody set it, small pictures of a folder have smaller patches: four a side.
        pub patch: usize = 8, in 1..=1 << 12;
        /// Number of classes.
        pub classes: usize = 0, in 1..=1 << 16, [data];
        /// Width of the residual stream.
        pub dim: usize = 48, in 1..=1 << 16;
        /// Heads of the layer.
        pub heads: usize = 3, in 1..=1 << 12;
        /// Neurons of a head: dim x multiplier / heads.
        pub multiplier: usize = 8, in 1..=1 << 12;
        /// How often the layer is applied.
        pub loops: usize = 3, in 1..=1 << 10;
        /// Chance that an element is dropped while training.
        pub dropout: f64 = 0.0, in 0.0..1.0;
        /// Base of RoPE's frequencies.
        pub rope_theta: f64 = 65536.0, in ROPE_THETA;
        /// What norms add to the variance.
        pub norm_eps: f64 = 1e-5, in NORM_EPS;
    }
}

/// Numbers of the rotation's tables: they are made when a step is recorded, before its memory is planned.
const TABLE: usize = 1 << 28;

impl VisionConfig {
    pub fn neurons(&self) -> usize {
        self.dim * self.multiplier / self.heads
    }

    pub fn tokens(&self) -> usize {
        (self.image / self.patch).pow(2) + 1
    }

    pub fn check(&self) -> Result<(), ConfigError> {
        let bad = |m: String| Err(ConfigError::Invalid(m));
        self.in_range("model")?;
        if !self.image.is_multiple_of(self.patch) {
            return bad(format!("model.image = {} does not divide by model.patch = {}", self.image, self.patch));
        }
        if !(self.dim * self.multiplier).is_multiple_of(self.heads) || !self.neurons().is_multiple_of(2) {
            return bad(format!(
                "model: dim x multiplier / heads = {} x {} / {} must be a whole, even number of neurons (they are rotated in pairs)",
                self.dim, self.multiplier, self.heads
            ));
        }
        if self.tokens() * self.neurons() > TABLE {
            return bad(format!(
                "model: {} tokens x {} neurons of a head are more than {TABLE} (raise model.patch or model.heads, or lower model.dim)",
                self.tokens(),
                self.neurons()
            ));
        }
        Ok(())
    }
}

pub struct VisionBdh<'a, 'g> {
    pub c: &'a VisionConfig,
    pub r: &'g Recorder,
    /// Where dropout draws from; none when nothing is dropped.
    pub rng: Option<Var<'g>>,
}

impl<'g> VisionBdh<'_, 'g> {
    fn uniform(&self, name: &str, shape: &[usize], bound: f64) -> Var<'g> {
        self.r.param(name, shape, Init::Uniform { bound: bound as f32 })
    }

    fn zeros(&self, name: &str, shape: &[usize]) -> Var<'g> {
        self.r.param(name, shape, Init::Full(0.0))
    }

    /// RoPE's angles t * f in turns, of which the fraction is taken in f64: [time, neurons / 2].
    fn tables(&self) -> (Var<'g>, Var<'g>) {
        let (time, n) = (self.c.tokens(), self.c.neurons());
        let phase = |t: usize, pair: usize| {
            let turn = t as f64 * (self.c.rope_theta.powf(-2.0 * pair as f64 / n as f64) / std::f64::consts::TAU);
            (std::f64::consts::TAU * (turn - turn.floor())) as f32
        };
        let table =
            |f: fn(f32) -> f32| self.r.table(&[time, n / 2], || (0..time * n / 2).map(|k| f(phase(k / (n / 2), k % (n / 2)))).collect());
        (table(f32::cos), table(f32::sin))
    }

    /// Pictures [batch, 3, image, image], normalised, as a class token and patches: [batch, tokens, dim].
    fn embed(&self, images: Var<'g>) -> Var<'g> {
        let c = self.c;
        let (b, side, p, d) = (images.shape()[0], c.image / c.patch, c.patch, c.dim);
        let fan = 1.0 / ((3 * p * p) as f64).sqrt();
        let (weight, bias) = (self.uniform("patch.weight", &[d, 3, p, p], fan), self.uniform("patch.bias", &[d], fan));
        let patches = images.reshape(&[b, 3, side, p, side, p]).permute(&[0, 2, 4, 1, 3, 5]).reshape(&[b * side * side, 3 * p * p]);
        let x = patches.linear(weight.reshape(&[d, 3 * p * p])) + bias;
        let cls = self.zeros("cls", &[1, 1, d]).expand(&[b, 1, d]);
        let position = self.r.param("position", &[1, c.tokens(), d], Init::Normal { std: 0.02 });
        concat(&[cls, x.reshape(&[b, side * side, d])], 1) + position
    }

    /// An encoder [heads, dim, neurons].
    fn encoder(&self, name: &str) -> Var<'g> {
        let (d, h, n) = (self.c.dim, self.c.heads, self.c.neurons());
        self.uniform(name, &[h, d, n], (6.0 / ((d * n + h * n) as f64)).sqrt())
    }

    /// One application of the layer to x [batch, tokens, dim] and its norm; returns what becomes of both. Its weights, which all applications
    /// share: the encoder [dim, heads x neurons], the decoder [heads x neurons, dim], the values' encoder [heads, dim, neurons].
    fn layer(&self, (x, xn): (Var<'g>, Var<'g>), weights: [Var<'g>; 3], tables: (Var<'g>, Var<'g>)) -> (Var<'g>, Var<'g>) {
        let c = self.c;
        let (b, t, d, h, n) = (x.shape()[0], c.tokens(), c.dim, c.heads, c.neurons());
        let eps = c.norm_eps as f32;
        let [encoder, decoder, encoder_v] = weights;
        let xs = xn.matmul(encoder).relu().reshape(&[b, t, h, n]);
        // Keys are the queries; the value is the layer's own input, shared by all heads.
        let q = xs.rope(Pairs::Adjacent, tables).permute(&[0, 2, 1, 3]);
        let attended = q.matmul(q.t()).matmul(xn.reshape(&[b, 1, t, d])); // [batch, heads, tokens, dim]
        let y = attended.permute(&[1, 0, 2, 3]).layer_norm(eps); // [heads, batch, tokens, dim]
        let ys = y.reshape(&[h, b * t, d]).matmul(encoder_v).reshape(&[h, b, t, n]).permute(&[1, 2, 0, 3]);
        let o = xs.gated(ys, self.rng.map(|rng| (c.dropout as f32, rng)));
        let o = o.reshape(&[b, t, h * n]).matmul(decoder);
        let x = (x + o.layer_norm(eps)).layer_norm(eps);
        (x, x.layer_norm(eps))
    }

    /// Logits [batch, classes].
    pub fn logits(&self, images: Var<'g>) -> Var<'g> {
        let c = self.c;
        let x = self.embed(images);
        let tables = self.tables();
        let encoder = self.encoder("encoder").permute(&[1, 0, 2]).reshape(&[c.dim, c.heads * c.neurons()]);
        let (d, n) = (c.dim, c.heads * c.neurons());
        let decoder = self.uniform("decoder", &[n, d], (6.0 / ((n + d) as f64)).sqrt());
        let weights = [encoder, decoder, self.encoder("encoder_v")];
        let mut both = (x, x.layer_norm(c.norm_eps as f32));
        for i in 0..c.loops {
            both = self.r.block(&format!("loops.{i}"), || self.layer(both, weights, tables));
        }
        let first = both.1.slice(1, 0, 1).reshape(&[x.shape()[0], c.dim]);
        let weight = self.uniform("head.weight", &[c.classes, c.dim], (6.0 / ((c.dim + c.classes) as f64)).sqrt());
        first.linear(weight) + self.zeros("head.bias", &[c.classes])
    }
}

/// 1 where the largest logit is the target's: `[batch]`.
pub fn correct<'g>(logits: Var<'g>, targets: Var<'g>) -> Var<'g> {
    let b = logits.shape()[0];
    let guess = logits.stop_gradient().top_k(1).reshape(&[b]);
    pointwise(&[guess.cast(DType::F32), targets.cast(DType::F32)], |e, x| e.bin(Bin::Eq, x[0], x[1]))
}
