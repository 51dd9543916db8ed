//! Decoders of every family (see `models::family`), whole or with adapters on a frozen base, and everything that a recipe needs to train and use one.
//!
//! | file | is |
//! |---|---|
//! | `mod.rs` | the model as it is recorded, and where the tokens of its rows stand |
//! | `adapted.rs` | a base and the adapters on it |
//! | `learner.rs` | the model as a task trains it |
//! | `lessons.rs` | what it learns: conversations, prompts and replies, or plain text |
//! | `replies_config.rs` | the settings of that |
//! | `pretrain.rs` | a base of one's own, where no folder is named |
//! | `tuning.rs` | the settings that a base is fine-tuned with, where nothing else is said |
//! | `writer.rs` | replies to many prompts at once, on the device |
//! | `chat.rs` | replies to one prompt or in a conversation, as they are written |
//! | `many.rs` | replies to many prompts, several at a time |
//! | `export.rs` | adapters for PEFT, merged models for transformers |
//!
//! What the numbers are is said by reference/polychromic.py; names of parameters are the same there.

mod adapted;
mod chat;
mod export;
mod learner;
mod lessons;
mod many;
mod pretrain;
mod replies_config;
mod tuning;
mod writer;

pub use adapted::Adapted;
pub use chat::{Chat, Said, Talk};
pub use export::export;
pub use learner::DecoderModel;
pub use lessons::Lessons;
pub use pretrain::{Pretraining, cached_base, cached_is_whole, is_cached};
pub use replies_config::RepliesConfig;
pub(crate) use replies_config::is_plain;
pub use tuning::{longest_row, row, tuning};
pub use writer::{READ, WRITE, WRITES, Writer, Writing, Written, made_up};

use crate::models::{Folder, Lora, Mlp, ModelError, Norm, Positions, Shape, Target};
use crate::nn::mamba2;
use engine::ops::attention::{attention, attention_until};
use engine::ops::rope::Pairs;
use engine::{DType, Init, Recorder, Store, Var};

const STD: f32 = 0.02;

/// What becomes of the weights that are not an adapter's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// Frozen, and filled from a folder.
    Loaded,
    /// The same, with the layers' matrices in four bits.
    Quantised,
    /// Frozen, and drawn at random.
    Drawn,
    /// Trained like everything else, from weights drawn at random.
    Trained,
}

impl Base {
    /// Fills its states from where they are kept.
    pub fn load(self, folder: Option<&Folder>, store: &mut Store) -> Result<(), ModelError> {
        match (folder, self) {
            (Some(folder), Base::Quantised) => folder.load_nf4(store),
            (Some(folder), _) => folder.load(store),
            (None, _) => Ok(()),
        }
    }
}

/// Records a decoder.
pub struct Decoder<'a, 'g> {
    pub shape: &'a Shape,
    pub lora: Option<&'a Lora>,
    pub base: Base,
    pub r: &'g Recorder,
    /// The feed of random numbers, where the adapters' input is to lose some.
    pub rng: Option<Var<'g>>,
}

/// How the layers of a program let tokens see each other; both are told the layer's name.
#[derive(Clone, Copy)]
pub struct Mixing<'a, 'g> {
    /// q, k, v [batch, time, heads, head_dim] -> [batch, time, heads, head_dim].
    pub attend: &'a dyn Fn(&str, Var<'g>, Var<'g>, Var<'g>) -> Var<'g>,
    /// A state-space layer's input projection [batch, time, projected] -> [batch, time, inner].
    pub scan: &'a dyn Fn(&str, Var<'g>, &mamba2::Sizes, &mamba2::Weights<'g>) -> Var<'g>,
}

/// Where the tokens of rows stand; i32 [batch, time] each. Without it a row is one sequence, from its first token to its last.
#[derive(Clone, Copy)]
pub struct Places<'g> {
    /// Positions, for the rotary embedding; below the rows' length.
    pub position: Var<'g>,
    /// For each token, the last one of the row that attends to it (see `engine::ops::attention`).
    pub until: Var<'g>,
}

impl<'g> Places<'g> {
    /// As rows of examples are fed.
    pub fn fed(r: &'g Recorder, batch: usize, seq: usize) -> Places<'g> {
        let feed = |name: &str| r.feed(name, &[batch, seq], DType::I32);
        Places { position: feed("position"), until: feed("until") }
    }
}

/// Numbers for `Places`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    pub position: Vec<i32>,
    pub until: Vec<i32>,
}

impl Rows {
    /// Rows of `time` tokens of which some are padding, wherever it stands: positions count real tokens, and padding attends to itself alone.
    pub fn padded(real: &[bool], time: usize) -> Rows {
        let mut rows = Rows::default();
        for row in real.chunks(time) {
            let mut count = 0;
            for (t, &real) in row.iter().enumerate() {
                count += real as i32;
                rows.position.push((count - 1).max(0));
                rows.until.push(if real { time as i32 - 1 } else { t as i32 });
            }
        }
        rows
    }

    /// Rows of `time` tokens, each with examples of these lengths one after another; the rest of a row is padding.
    pub fn packed(rows: &[Vec<usize>], time: usize) -> Rows {
        let mut all = Rows::default();
        for lengths in rows {
            let mut at = 0;
            for &length in lengths {
                all.position.extend(0..length as i32);
                at += length;
                all.until.extend(std::iter::repeat_n(at as i32 - 1, length));
            }
            assert!(at <= time, "examples of {lengths:?} tokens in a row of {time}");
            all.position.extend(std::iter::repeat_n(0, time - at));
            all.until.extend(at as i32..time as i32);
        }
        all
    }
}

impl<'g> Decoder<'_, 'g> {
    fn weight(&self, name: &str, shape: &[usize], init: Init) -> Var<'g> {
        match self.base {
            Base::Trained => self.r.param(name, shape, init),
            Base::Drawn => self.r.frozen(name, shape, init),
            // Not drawn only to be replaced.
            Base::Loaded | Base::Quantised => self.r.frozen(name, shape, Init::Full(0.0)),
        }
    }

    fn norm(&self, x: Var<'g>, name: &str) -> Var<'g> {
        let (weight, eps) = (self.weight(name, &[x.dim(0)], Init::Full(1.0)), self.shape.norm_eps as f32);
        match self.shape.family.norm {
            Norm::Rms => x.rms_norm(weight, eps),
            Norm::Layer => x.layer_norm_affine(weight, self.weight(&format!("{name}.bias"), &[x.dim(0)], Init::Full(0.0)), eps),
        }
    }

    /// What a layer's matmul adds, if it has a bias.
    fn biased(&self, at: &str, part: &str, y: Var<'g>) -> Var<'g> {
        match self.shape.has_bias(part) {
            true => y + self.weight(&format!("{at}.{part}.bias"), &[y.dim(0)], Init::Full(0.0)),
            false => y,
        }
    }

    /// x through a matrix [in, out] and its bias.
    fn joint(&self, at: &str, part: &str, x: Var<'g>, outputs: usize) -> Var<'g> {
        let weight = self.weight(&format!("{at}.{part}.weight"), &[x.dim(0), outputs], Init::Normal { std: STD });
        self.biased(at, part, x.matmul(weight))
    }

    pub fn embedding(&self) -> Var<'g> {
        self.weight("embedding", &[self.shape.vocab, self.shape.dim], Init::Normal { std: STD })
    }

    /// [vocab, dim]
    pub fn head(&self) -> Var<'g> {
        match self.shape.tied {
            true => self.embedding(),
            false => self.weight("head", &[self.shape.vocab, self.shape.dim], Init::Normal { std: STD }),
        }
    }

    fn adapts(&self, target: Target) -> Option<&Lora> {
        self.lora.filter(|l| l.targets.contains(&target))
    }

    /// x through each of `targets`. The adapters among them read the same x, with the same elements dropped.
    fn linear<const N: usize>(&self, at: &str, x: Var<'g>, targets: [Target; N]) -> [Var<'g>; N] {
        let dropout = self.lora.map_or(0.0, |l| l.dropout as f32);
        let dropped = match self.rng {
            Some(rng) if dropout > 0.0 && targets.iter().any(|&t| self.adapts(t).is_some()) => x.dropout(dropout, rng),
            _ => x,
        };
        targets.map(|target| {
            let (outputs, inputs) = target.sizes(self.shape);
            let name = |part: &str| format!("{at}.{}.{part}", target.name());
            let y = match self.base {
                Base::Quantised => x.nf4_linear(self.r.nf4(&name("weight"), outputs, inputs)),
                _ => x.linear(self.weight(&name("weight"), &[outputs, inputs], Init::Normal { std: STD })),
            };
            let y = self.biased(at, target.name(), y);
            let Some(lora) = self.adapts(target) else { return y };
            let a = self.r.param(&name("lora_a"), &[lora.rank, inputs], Init::Uniform { bound: 1.0 / (inputs as f32).sqrt() });
            let b = self.r.param(&name("lora_b"), &[outputs, lora.rank], Init::Full(0.0));
            y + (dropped.linear(a) * lora.scale()).linear(b)
        })
    }

    /// q, k and v of u [batch, time, dim], each [batch, time, heads, head_dim], before RoPE.
    fn heads(&self, at: &str, u: Var<'g>) -> [Var<'g>; 3] {
        let s = self.shape;
        let (b, t) = (u.shape()[0], u.shape()[1]);
        let split = |y: Var<'g>, heads: usize| y.reshape(&[b, t, heads, s.head_dim]);
        if s.family.joint {
            let all = self.joint(at, "qkv", u, 3 * s.dim);
            return [0, 1, 2].map(|i| split(all.slice(2, i * s.dim, (i + 1) * s.dim), s.heads));
        }
        let [q, k, v] = self.linear(at, u, [Target::Q, Target::K, Target::V]);
        [split(q, s.heads), split(k, s.kv_heads), split(v, s.kv_heads)]
    }

    fn mlp(&self, at: &str, u: Var<'g>) -> Var<'g> {
        match self.shape.family.mlp {
            Mlp::SwiGlu => {
                let [gate, up] = self.linear(at, u, [Target::Gate, Target::Up]);
                let [down] = self.linear(at, gate.swiglu(up), [Target::Down]);
                down
            }
            Mlp::Gelu => self.joint(at, "down", self.joint(at, "up", u, self.shape.hidden).gelu(), self.shape.dim),
        }
    }

    /// A state-space layer, in the place of attention and MLP.
    fn scan_layer(&self, at: &str, x: Var<'g>, s: &mamba2::Sizes, mixing: Mixing<'_, 'g>) -> Var<'g> {
        let weight = |name: &str, shape: &[usize], init: Init| self.weight(&format!("{at}.{name}"), shape, init);
        let taps = self.shape.scan.map_or(1, |scan| scan.taps);
        let inward = weight("inward.weight", &[s.projected(), self.shape.dim], Init::Normal { std: STD });
        let conv = weight("conv.weight", &[s.wide(), 1, taps], Init::Uniform { bound: 1.0 / (taps as f32).sqrt() });
        let weights = mamba2::Weights {
            conv: conv.reshape(&[s.wide(), taps]),
            conv_bias: weight("conv.bias", &[s.wide()], Init::Full(0.0)),
            dt_bias: weight("dt_bias", &[s.heads()], Init::StepSize { low: 0.001, high: 0.1 }),
            log_decay: weight("log_decay", &[s.heads()], Init::LogOfUniform { low: 1.0, high: 16.0 }),
            skip: weight("skip", &[s.heads()], Init::Full(1.0)),
            norm: weight("scan_norm", &[s.inner], Init::Full(1.0)),
        };
        let u = self.norm(x, &format!("{at}.attn_norm")).linear(inward);
        let y = (mixing.scan)(at, u, s, &weights);
        x + y.linear(weight("outward.weight", &[self.shape.dim, s.inner], Init::Normal { std: STD }))
    }

    fn layer(&self, at: &str, x: Var<'g>, tables: Option<(Var<'g>, Var<'g>)>, mixing: Mixing<'_, 'g>) -> Var<'g> {
        let s = self.shape;
        if let Some(sizes) = s.scan_sizes() {
            return self.r.scope("scan", || self.scan_layer(at, x, &sizes, mixing));
        }
        let x = self.r.scope("attn", || x + self.attn(at, x, tables, mixing));
        self.r.scope("mlp", || x + self.mlp(at, self.norm(x, &format!("{at}.mlp_norm"))))
    }

    fn attn(&self, at: &str, x: Var<'g>, tables: Option<(Var<'g>, Var<'g>)>, mixing: Mixing<'_, 'g>) -> Var<'g> {
        let s = self.shape;
        let (b, t) = (x.shape()[0], x.shape()[1]);
        let [q, k, v] = self.heads(at, self.norm(x, &format!("{at}.attn_norm")));
        let rotated = |y: Var<'g>, name: &str| {
            let y = if s.family.qk_norm { self.norm(y, &format!("{at}.{name}")) } else { y };
            tables.map_or(y, |tables| y.rope(Pairs::Halves, tables))
        };
        let y = (mixing.attend)(at, rotated(q, "q_norm"), rotated(k, "k_norm"), v).reshape(&[b, t, s.heads * s.head_dim]);
        match s.family.joint {
            true => self.joint(at, "o", y, s.dim),
            false => self.linear(at, y, [Target::O])[0],
        }
    }

    /// ids [batch, time] -> the last hidden state, normed: [batch, time, dim].
    pub fn hidden(&self, ids: Var<'g>, places: Option<Places<'g>>) -> Var<'g> {
        let (scale, shape) = (self.scale(), ids.shape());
        let until = self.windowed(places.map(|p| p.until), shape[0], shape[1]);
        let position = places.map(|p| p.position);
        let mixing = Mixing {
            attend: &|_, q, k, v| match until {
                Some(until) => attention_until(q, k, v, until, true, scale),
                None => attention(q, k, v, true, scale),
            },
            scan: &|_, u, s, w| mamba2::mamba2_placed(u, s, w, position),
        };
        self.hidden_by(ids, position, shape[1], mixing)
    }

    /// The last token that sees each key, i32 [rows, keys], where a window or `until` limits that.
    pub fn windowed(&self, until: Option<Var<'g>>, rows: usize, keys: usize) -> Option<Var<'g>> {
        let Some(window) = self.shape.window.filter(|w| *w < keys) else { return until };
        let r = self.r;
        Some(r.typed(|| {
            let last = r.constant(&[1, keys], (0..keys).map(|j| (j + window - 1) as f32).collect());
            match until {
                Some(until) => {
                    let until = until.cast(DType::F32);
                    engine::mutant!("packed-rows-without-the-window", until.min(last), until).cast(DType::I32)
                }
                None => last.expand(&[rows, keys]).cast(DType::I32),
            }
        }))
    }

    /// The same, with tokens that see each other as `mixing` says. `position`, i32 [batch, time], says where tokens stand, below `most`; None: one behind the other.
    pub fn hidden_by(&self, ids: Var<'g>, position: Option<Var<'g>>, most: usize, mixing: Mixing<'_, 'g>) -> Var<'g> {
        let mut x = self.embedding().gather_rows(ids);
        let tables = match (self.shape.family.positions, position) {
            (Positions::Rope, Some(position)) => Some(self.tables_at(position, most)),
            (Positions::Rope, None) => Some(self.r.rope_tables_of(most, &self.shape.frequencies())),
            (Positions::Learned, _) => {
                let table = self.weight("positions", &[self.shape.context, self.shape.dim], Init::Normal { std: STD });
                x = x + position.map_or_else(|| table.slice(0, 0, most), |position| table.gather_rows(position));
                None
            }
            (Positions::None, _) => None,
        };
        for i in 0..self.shape.layers {
            let at = format!("layers.{i}");
            x = self.r.block(&at, || self.layer(&at, x, tables, mixing));
        }
        self.norm(x, "norm")
    }

    /// Of RoPE at these positions, which are below `most`. Angles are f32, whatever they rotate.
    fn tables_at(&self, position: Var<'g>, most: usize) -> (Var<'g>, Var<'g>) {
        let (cos, sin) = self.r.rope_tables_of(most, &self.shape.frequencies());
        self.r.typed(|| (cos.gather_rows(position), sin.gather_rows(position)))
    }

    /// Of attention's scores.
    pub fn scale(&self) -> f32 {
        1.0 / (self.shape.head_dim as f32).sqrt()
    }

    /// hidden [.., dim] -> logits [.., vocab].
    pub fn logits(&self, hidden: Var<'g>) -> Var<'g> {
        self.r.scope("head", || hidden.linear(self.head()))
    }

    /// Sum over tokens of weight, `[1]` or one for each, times cross-entropy; a target of -1 is ignored.
    pub fn loss(&self, hidden: Var<'g>, targets: Var<'g>, weight: Var<'g>) -> Var<'g> {
        let tokens = targets.meta().elements();
        let rows = hidden.reshape(&[tokens, self.shape.dim]);
        let weight = if weight.meta().elements() == 1 { weight } else { weight.reshape(&[tokens]) };
        self.r.scope("head", || rows.linear_cross_entropy(self.head(), targets.reshape(&[tokens]), weight))
    }
}
