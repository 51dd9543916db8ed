//! Encoders of sentences in the layout of sentence-transformers: BERT, the mean over a text's tokens, perhaps brought to length 1. MiniLM is one.

use super::{ModelError, read_table};
use crate::checkpoint::TensorFile;
use crate::data::Words;
use engine::ops::attention::attention_until;
use engine::{DType, Init, Meta, Recorder, Store, Var};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// What config.json says.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderShape {
    pub vocab: usize,
    pub dim: usize,
    pub layers: usize,
    pub heads: usize,
    /// Width of a layer's MLP.
    pub hidden: usize,
    pub positions: usize,
    pub types: usize,
    pub norm_eps: f64,
    pub act: Act,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Exact GELU: x times the normal CDF of x.
    Gelu,
    GeluTanh,
    Relu,
}

/// An encoder's folder, found whole.
pub struct Encoder {
    pub path: PathBuf,
    pub shape: EncoderShape,
    /// Tokens of the longest text, special tokens included; the rest is cut off.
    pub longest: usize,
    /// Whether embeddings have length 1.
    pub normalise: bool,
    lower_case: bool,
    tokenizer: Words,
    /// Of tokenizer.json.
    words: u64,
    file: TensorFile,
}

/// Texts as tokens: all [rows, time].
#[derive(Clone, Debug, PartialEq)]
pub struct Texts {
    /// Texts that were longer than a row, whose ends are left out.
    pub cut: usize,
    pub time: usize,
    pub ids: Vec<i32>,
    /// For each token, the last one that attends to it: none attends to padding.
    pub until: Vec<i32>,
    /// Weight in mean pooling: 1 / tokens of the text, 0 for padding.
    pub share: Vec<f32>,
}

/// The feeds of an encoder's graph.
pub struct EncoderFeeds<'g> {
    pub ids: Var<'g>,
    pub until: Var<'g>,
    pub share: Var<'g>,
}

impl<'g> EncoderFeeds<'g> {
    pub fn new(r: &'g Recorder, rows: usize, time: usize) -> EncoderFeeds<'g> {
        let feed = |name: &str, dtype| r.feed(&format!("encoder_{name}"), &[rows, time], dtype);
        EncoderFeeds { ids: feed("ids", DType::I32), until: feed("until", DType::I32), share: feed("share", DType::F32) }
    }
}

impl Encoder {
    pub fn open(path: &Path) -> Result<Encoder, ModelError> {
        let modules = modules(path)?;
        let inner = path.join(&modules.transformer);
        let shape = EncoderShape::read(&inner.join("config.json"))?;
        pools_means(&path.join(&modules.pooling).join("config.json"), shape.dim)?;
        let Limits { longest, lower_case } = limits(&inner, shape.positions)?;

        let file = inner.join("tokenizer.json");
        let bytes = Words::file(&file).map_err(|e| ModelError::bad(&file, e))?;
        let bad = |reason: String| ModelError::bad(&file, reason);
        let words = xxh3_64(&bytes);
        let tokenizer = Words::read(&bytes).map_err(bad)?;
        let around = tokenizer.encode_fast("", true).map_err(bad)?.get_ids().len();
        if around != 2 {
            return Err(ModelError::bad(
                &file,
                format!("puts {around} tokens around a text; one before and one behind is what is known here"),
            ));
        }

        let file = inner.join("model.safetensors");
        if !file.exists() {
            let pickled =
                if inner.join("pytorch_model.bin").exists() { " (pytorch_model.bin is not read here: save it as safetensors)" } else { "" };
            return Err(ModelError::bad(&inner, format!("has no model.safetensors{pickled}")));
        }
        let weights = TensorFile::open(&file)?;
        let expected = shape.weights();
        for (_, theirs, shape) in &expected {
            let Some((dtype, has)) = weights.info(theirs) else {
                return Err(ModelError::bad(&file, format!("has no weight '{theirs}', which its config.json asks for")));
            };
            if has != *shape {
                return Err(ModelError::bad(&file, format!("'{theirs}' is {has:?}, but its config.json makes it {shape:?}")));
            }
            if DType::from_name(&dtype).is_none_or(|d| !d.is_float()) {
                return Err(ModelError::bad(&file, format!("'{theirs}' is of type {dtype}; BF16, F16 and F32 are known here")));
            }
        }
        // BERT's own summary of a text is not what is pooled; files may number the positions.
        let silent = |name: &str| name.starts_with("pooler.") || name == "embeddings.position_ids";
        if let Some(extra) = weights.names().iter().find(|n| !silent(n) && !expected.iter().any(|e| e.1 == **n)) {
            return Err(ModelError::bad(&file, format!("holds '{extra}', which is not known here: it is another model")));
        }
        Ok(Encoder { path: path.to_path_buf(), shape, longest, normalise: modules.normalise, lower_case, tokenizer, words, file: weights })
    }

    /// Texts in rows of `time` tokens, or of as many as the longest of them has.
    pub fn texts<T: AsRef<str>>(&self, texts: &[T], time: Option<usize>) -> Result<Texts, ModelError> {
        let most = time.map_or(self.longest, |time| time.min(self.longest)).max(2);
        let (mut all, mut cut) = (vec![], 0);
        for text in texts {
            let lower = self.lower_case.then(|| text.as_ref().to_lowercase());
            let encoding = self.tokenizer.encode_fast(lower.as_deref().unwrap_or(text.as_ref()), true);
            let mut ids = encoding.map_err(|e| ModelError::bad(&self.path, format!("its tokenizer {e}")))?.get_ids().to_vec();
            if ids.len() > most {
                // The special token after the text stays.
                ids.drain(most - 1..ids.len() - 1);
                cut += 1;
            }
            if let Some(id) = ids.iter().find(|id| **id as usize >= self.shape.vocab) {
                return Err(ModelError::bad(&self.path, format!("its tokenizer makes token {id}, and it has {}", self.shape.vocab)));
            }
            all.push(ids);
        }
        let time = time.unwrap_or_else(|| all.iter().map(Vec::len).max().unwrap_or(2));
        let mut made = Texts { time, cut, ids: vec![], until: vec![], share: vec![] };
        for ids in all {
            let (n, padding) = (ids.len(), time - ids.len());
            made.ids.extend(ids.iter().map(|&id| id as i32).chain(std::iter::repeat_n(0, padding)));
            made.until.extend(std::iter::repeat_n(time as i32 - 1, n).chain(std::iter::repeat_n(-1, padding)));
            made.share.extend(std::iter::repeat_n(1.0 / n as f32, n).chain(std::iter::repeat_n(0.0, padding)));
        }
        Ok(made)
    }

    /// Fills the states of a graph that `embed` recorded.
    pub fn load(&self, store: &mut Store) -> Result<(), ModelError> {
        for (ours, theirs, _) in self.shape.weights() {
            let found = self.file.info(&theirs).and_then(|(dtype, shape)| Some(Meta::new(&shape, DType::from_name(&dtype)?)));
            let meta = found.ok_or_else(|| ModelError::bad(&self.path, format!("has no weight '{theirs}'")))?;
            store.set_floats(&ours, &meta, &self.file.read(&theirs)?)?;
        }
        Ok(())
    }

    /// Of everything that an embedding depends on.
    pub fn fingerprint(&self) -> Result<u64, ModelError> {
        let mut hash = Xxh3::new();
        hash.update(format!("{:?} {} {} {} {}", self.shape, self.longest, self.normalise, self.lower_case, self.words).as_bytes());
        for (_, theirs, _) in self.shape.weights() {
            let (dtype, _) = self.file.info(&theirs).expect("looked at when it was opened");
            hash.update(dtype.as_bytes());
            let bytes = self.file.read(&theirs)?;
            hash.update(engine::mutant!("encoders-known-without-weights", &bytes[..], &[][..]));
        }
        Ok(hash.digest())
    }

    /// Embeddings [rows, dim].
    pub fn embed<'g>(&self, r: &'g Recorder, f: &EncoderFeeds<'g>) -> Var<'g> {
        let hidden = self.shape.hidden(r, f.ids, f.until);
        let (rows, dim) = (hidden.shape()[0], hidden.shape()[2]);
        r.typed(|| {
            let share = f.share.reshape(&[rows, f.share.dim(0), 1]);
            let mean = (hidden.cast(DType::F32) * share).sum_axis(1).reshape(&[rows, dim]);
            match self.normalise {
                true => mean / mean.square().sum_axis(1).sqrt().max(r.full(&[1, 1], 1e-12)),
                false => mean,
            }
        })
    }
}

impl EncoderShape {
    fn read(path: &Path) -> Result<EncoderShape, ModelError> {
        EncoderShape::parse(&read_table(path)?).map_err(|problem| ModelError::bad(path, problem))
    }

    fn parse(table: &Map<String, Value>) -> Result<EncoderShape, String> {
        let get = |key: &str| table.get(key).filter(|v| !v.is_null());
        match get("model_type").map(|t| t.as_str().unwrap_or_default()) {
            Some("bert") => {}
            other => return Err(format!("its model_type is {}; bert is what is known here", other.unwrap_or("missing"))),
        }
        if let Some(kind) = get("position_embedding_type").filter(|k| *k != "absolute") {
            return Err(format!("'position_embedding_type' is {kind}; only \"absolute\" is known here"));
        }
        if let Some(key) = ["is_decoder", "add_cross_attention"].iter().find(|k| get(k).is_some_and(|v| *v != false)) {
            return Err(format!("'{key}' is not false: an encoder is what is known here"));
        }
        // Far above any real model, and low enough that no product of a few of them overflows.
        let whole = |key: &str, most: usize| match get(key).map(|v| (v, v.as_u64())) {
            Some((_, Some(n))) if (1..=most as u64).contains(&n) => Ok(n as usize),
            Some((v, _)) => Err(format!("'{key}' is {v}: from 1 to {most}")),
            None => Err(format!("has no '{key}'")),
        };
        let act = match get("hidden_act").map(|a| a.as_str().unwrap_or_default()) {
            None | Some("gelu") => Act::Gelu,
            Some("gelu_new" | "gelu_pytorch_tanh") => Act::GeluTanh,
            Some("relu") => Act::Relu,
            Some(other) => return Err(format!("'hidden_act' is \"{other}\"; gelu, gelu_new, gelu_pytorch_tanh and relu are known here")),
        };
        let norm_eps = match get("layer_norm_eps").map(|v| v.as_f64().filter(|v| v.is_finite() && *v > 0.0)) {
            None => 1e-12,
            Some(Some(eps)) => eps,
            Some(None) => return Err("'layer_norm_eps' is no number above 0".into()),
        };
        let shape = EncoderShape {
            vocab: whole("vocab_size", 1 << 24)?,
            dim: whole("hidden_size", 1 << 16)?,
            layers: whole("num_hidden_layers", 1024)?,
            heads: whole("num_attention_heads", 1 << 12)?,
            hidden: whole("intermediate_size", 1 << 20)?,
            positions: whole("max_position_embeddings", 1 << 20)?,
            types: whole("type_vocab_size", 1 << 10)?,
            norm_eps,
            act,
        };
        match shape.dim.is_multiple_of(shape.heads) {
            true => Ok(shape),
            false => Err(format!("hidden_size = {} does not divide by num_attention_heads = {}", shape.dim, shape.heads)),
        }
    }

    /// Every weight that is used: its name here, its name in the file, its shape.
    pub fn weights(&self) -> Vec<(String, String, Vec<usize>)> {
        let mut all = vec![];
        let mut add = |ours: String, theirs: String, shape: &[usize]| all.push((format!("encoder.{ours}"), theirs, shape.to_vec()));
        let d = self.dim;
        for (name, rows) in [("word", self.vocab), ("position", self.positions), ("token_type", self.types)] {
            add(name.into(), format!("embeddings.{name}_embeddings.weight"), &[rows, d]);
        }
        let mut both = |ours: String, theirs: String, shape: &[usize]| {
            add(format!("{ours}.weight"), format!("{theirs}.weight"), shape);
            add(format!("{ours}.bias"), format!("{theirs}.bias"), &shape[..1]);
        };
        both("norm".into(), "embeddings.LayerNorm".into(), &[d]);
        for l in 0..self.layers {
            let (ours, theirs) = (|name: &str| format!("layers.{l}.{name}"), |name: &str| format!("encoder.layer.{l}.{name}"));
            for (short, name) in [("q", "query"), ("k", "key"), ("v", "value")] {
                both(ours(short), theirs(&format!("attention.self.{name}")), &[d, d]);
            }
            both(ours("o"), theirs("attention.output.dense"), &[d, d]);
            both(ours("attn_norm"), theirs("attention.output.LayerNorm"), &[d]);
            both(ours("up"), theirs("intermediate.dense"), &[self.hidden, d]);
            both(ours("down"), theirs("output.dense"), &[d, self.hidden]);
            both(ours("mlp_norm"), theirs("output.LayerNorm"), &[d]);
        }
        all
    }

    /// The last hidden state [rows, time, dim] of ids [rows, time]; until: the last token that sees each.
    pub fn hidden<'g>(&self, r: &'g Recorder, ids: Var<'g>, until: Var<'g>) -> Var<'g> {
        let (rows, time, dim, heads) = (ids.shape()[0], ids.shape()[1], self.dim, self.heads);
        assert!(time <= self.positions, "{time} tokens, and the encoder has {} positions", self.positions);
        // Loaded, so not drawn.
        let weight = |name: String, shape: &[usize]| r.frozen(&format!("encoder.{name}"), shape, Init::Full(0.0));
        let linear = |x: Var<'g>, name: String, outputs: usize| {
            x.linear(weight(format!("{name}.weight"), &[outputs, x.dim(0)])) + weight(format!("{name}.bias"), &[outputs])
        };
        let norm = |x: Var<'g>, name: String| {
            x.layer_norm(self.norm_eps as f32) * weight(format!("{name}.weight"), &[dim]) + weight(format!("{name}.bias"), &[dim])
        };
        r.scope("encoder", || {
            let place = weight("position".into(), &[self.positions, dim]).slice(0, 0, time);
            // A text is of one part: all of its tokens are of the first type.
            let kind = weight("token_type".into(), &[self.types, dim]).slice(0, 0, 1);
            let mut x = norm(weight("word".into(), &[self.vocab, dim]).gather_rows(ids) + place + kind, "norm".into());
            for l in 0..self.layers {
                let at = |name: &str| format!("layers.{l}.{name}");
                let [q, k, v] = ["q", "k", "v"].map(|name| linear(x, at(name), dim).reshape(&[rows, time, heads, dim / heads]));
                let a = attention_until(q, k, v, until, false, 1.0 / ((dim / heads) as f32).sqrt());
                x = norm(x + linear(a.reshape(&[rows, time, dim]), at("o"), dim), at("attn_norm"));
                let up = linear(x, at("up"), self.hidden);
                let up = match self.act {
                    Act::Gelu => gelu(up),
                    Act::GeluTanh => up.gelu(),
                    Act::Relu => up.relu(),
                };
                x = norm(x + linear(up, at("down"), dim), at("mlp_norm"));
            }
            x
        })
    }
}

/// x P(normal < x) = max(x, 0) - |x| P(normal > |x|); the tail is e^(-x^2/2) times a polynomial of 1 / (1 + p |x|), right to 1e-7 (Abramowitz and Stegun,
/// 7.1.26).
fn gelu(x: Var) -> Var {
    const P: f32 = 0.327_591_1 * std::f32::consts::FRAC_1_SQRT_2;
    const TERMS: [f32; 5] = [0.127_414_8, -0.142_248_37, 0.710_706_9, -0.726_576, 0.530_702_7];
    let a = x.abs();
    let t = x.recorder().full(&[1], 1.0) / (a * P + 1.0);
    let [first, rest @ .., last] = TERMS;
    let polynomial = rest.into_iter().rev().fold(t * last, |sum, term| t * (sum + term));
    let tail = (t * (polynomial + first)) * (x.square() * -0.5).exp();
    x.max(x.recorder().full(&[1], 0.0)) - a * tail
}

/// Folders of the parts.
struct Modules {
    transformer: String,
    pooling: String,
    normalise: bool,
}

fn modules(path: &Path) -> Result<Modules, ModelError> {
    let file = path.join("modules.json");
    if !path.exists() {
        return Err(ModelError::bad(path, format!("there is no such folder{}", crate::input::fetched(path))));
    }
    if !file.exists() {
        return Err(ModelError::bad(path, "has no modules.json: it is no folder of sentence-transformers"));
    }
    let text = crate::input::read_to_string(&file).map_err(ModelError::io("read", &file))?;
    let list: Vec<Map<String, Value>> =
        serde_json::from_str(&text).map_err(|e| ModelError::bad(&file, format!("not a list of modules: {e}")))?;
    let mut found = vec![];
    for module in &list {
        let part = |key: &str| module.get(key).and_then(Value::as_str);
        let kind = part("type").and_then(|t| t.rsplit('.').next()).unwrap_or_default();
        // A name must not lead out of the folder.
        let folder = part("path").unwrap_or_default();
        if folder.starts_with('.') || folder.contains(['/', '\\', '\0']) {
            return Err(ModelError::bad(&file, format!("{folder:?} is not a plain name of a folder")));
        }
        found.push((kind, folder));
    }
    match found[..] {
        [("Transformer", transformer), ("Pooling", pooling)] => {
            Ok(Modules { transformer: transformer.into(), pooling: pooling.into(), normalise: false })
        }
        [("Transformer", transformer), ("Pooling", pooling), ("Normalize", _)] => {
            Ok(Modules { transformer: transformer.into(), pooling: pooling.into(), normalise: true })
        }
        _ => {
            let kinds: Vec<&str> = found.iter().map(|f| f.0).collect();
            Err(ModelError::bad(&file, format!("its modules are {kinds:?}; Transformer, Pooling and perhaps Normalize are known here")))
        }
    }
}

/// Older files have a switch for each way to pool, newer ones a name.
fn pools_means(path: &Path, dim: usize) -> Result<(), ModelError> {
    let table = read_table(path)?;
    let switched = table.iter().filter(|(key, on)| key.starts_with("pooling_mode_") && **on == true).map(|(key, _)| key.as_str());
    let named = table.get("pooling_mode").and_then(Value::as_str);
    let modes: Vec<&str> = switched.chain(named).collect();
    if !matches!(modes[..], ["pooling_mode_mean_tokens"] | ["mean"]) {
        return Err(ModelError::bad(path, format!("pools by {modes:?}; the mean over tokens is what is known here")));
    }
    for key in ["word_embedding_dimension", "embedding_dimension"] {
        if let Some(other) = table.get(key).filter(|v| v.as_u64() != Some(dim as u64)) {
            return Err(ModelError::bad(path, format!("'{key}' is {other}, but the model's is {dim}")));
        }
    }
    Ok(())
}

struct Limits {
    longest: usize,
    lower_case: bool,
}

/// How many tokens a text may have: as the folder says, and never more than there are positions.
fn limits(dir: &Path, positions: usize) -> Result<Limits, ModelError> {
    let read = |name: &str| {
        let path = dir.join(name);
        if path.exists() { read_table(&path) } else { Ok(Map::new()) }
    };
    let (own, tokenizer) = (read("sentence_bert_config.json")?, read("tokenizer_config.json")?);
    let said = [own.get("max_seq_length"), tokenizer.get("model_max_length")].into_iter().flatten().filter_map(Value::as_f64).next();
    let longest = said.map_or(positions, |n| (n.min(positions as f64)) as usize);
    match longest {
        0..2 => Err(ModelError::bad(dir, format!("says that a text has at most {longest} tokens: there is no room for any of its own"))),
        _ => Ok(Limits {
            longest,
            lower_case: own.get("do_lower_case").is_some_and(|v| engine::mutant!("letters-stay-capital", *v == true, false)),
        }),
    }
}
