//! What config.json says of an architecture that llama.cpp has, and the keys it becomes.

use super::file::{Header, Meta};
use super::{GgufError, Table};
use serde_json::{Map, Value};
use std::f64::consts::PI;

pub const FILE: &str = "config.json";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Gpt2,
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

/// Family, class in `architectures`, `model_type`, and llama.cpp's name. To llama.cpp a Mistral is a Llama.
const FAMILIES: [(Family, &str, &str, &str); 5] = [
    (Family::Gpt2, "GPT2LMHeadModel", "gpt2", "gpt2"),
    (Family::Llama, "LlamaForCausalLM", "llama", "llama"),
    (Family::Mistral, "MistralForCausalLM", "mistral", "llama"),
    (Family::Qwen2, "Qwen2ForCausalLM", "qwen2", "qwen2"),
    (Family::Qwen3, "Qwen3ForCausalLM", "qwen3", "qwen3"),
];

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    Linear { factor: f64 },
    Llama3 { factor: f64, low: f64, high: f64, original: f64 },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub family: Family,
    pub arch: &'static str,
    pub vocab: usize,
    pub dim: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub hidden: usize,
    pub context: usize,
    pub norm_eps: f64,
    pub tied: bool,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// Positions that a token attends to, where that is fewer than the context.
    pub window: Option<usize>,
}

impl Config {
    pub fn parse(table: &Table) -> Result<Config, GgufError> {
        let fields = Fields(table);
        fields.config().map_err(|problem| GgufError::bad(FILE, problem))
    }

    /// Llama's rope_freqs: by how much each pair's frequency is divided.
    pub fn rope_factors(&self) -> Option<Vec<f32>> {
        let RopeScaling::Llama3 { factor, low, high, original } = self.rope_scaling else { return None };
        let divisor = |pair: usize| {
            let frequency = self.rope_theta.powf(-2.0 * pair as f64 / self.head_dim as f64);
            let waves = original * frequency / (2.0 * PI);
            let kept = ((waves - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 / ((1.0 - kept) / factor + kept)) as f32
        };
        Some((0..self.head_dim / 2).map(divisor).collect())
    }

    pub fn describe(&self, header: &mut Header, notes: &mut Vec<String>) {
        let mut put = |key: &str, value| header.put(format!("{}.{key}", self.arch), value);
        let whole = |n: usize| Meta::U32(n as u32);
        put("block_count", whole(self.layers));
        put("context_length", whole(self.context));
        put("embedding_length", whole(self.dim));
        put("feed_forward_length", whole(self.hidden));
        put("attention.head_count", whole(self.heads));
        put("vocab_size", whole(self.vocab));
        if self.family == Family::Gpt2 {
            put("attention.layer_norm_epsilon", Meta::F32(self.norm_eps as f32));
            return;
        }
        put("attention.head_count_kv", whole(engine::mutant!("gguf-key-heads-are-heads", self.kv_heads, self.heads)));
        put("attention.key_length", whole(self.head_dim));
        put("attention.value_length", whole(self.head_dim));
        put("attention.layer_norm_rms_epsilon", Meta::F32(self.norm_eps as f32));
        put("rope.dimension_count", whole(self.head_dim));
        put(engine::mutant!("gguf-without-rope-base", "rope.freq_base", "rope.base"), Meta::F32(self.rope_theta as f32));
        if let RopeScaling::Linear { factor } = self.rope_scaling {
            put("rope.scaling.type", Meta::text("linear"));
            put("rope.scaling.factor", Meta::F32(factor as f32));
        }
        if let Some(window) = self.window {
            put("attention.sliding_window", whole(window));
            notes.push(format!(
                "the model attends to a window of {window} positions; the file says so, but llama.cpp attends to all of them in its \
                 architecture '{}': beyond {window} tokens its results differ",
                self.arch
            ));
        }
    }
}

/// Looks values up; errors name the key and the value.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    fn size(&self, key: &str) -> Result<Option<usize>, String> {
        // Far above any real model, and low enough that no product of a few of them overflows.
        let whole = |v: &Value| v.as_u64().filter(|n| (1..=1 << 24).contains(n)).map(|n| n as usize);
        self.get(key).map(|v| whole(v).ok_or(format!("'{key}' is {v}, not a whole number from 1 to {}", 1 << 24))).transpose()
    }

    fn must(&self, key: &str) -> Result<usize, String> {
        self.size(key)?.ok_or(format!("has no '{key}'"))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, String> {
        let positive = |v: &Value| v.as_f64().filter(|v| v.is_finite() && *v > 0.0);
        self.get(key).map(|v| positive(v).ok_or(format!("'{key}' is {v}, not a number above 0"))).transpose()
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, String> {
        self.get(key).map_or(Ok(default), |v| v.as_bool().ok_or(format!("'{key}' is {v}, not true or false")))
    }

    /// A setting for which llama.cpp knows one value only.
    fn only(&self, key: &str, known: Value) -> Result<(), String> {
        match self.get(key) {
            Some(other) if *other != known => Err(format!("'{key}' is {other}: llama.cpp has only {known} here")),
            _ => Ok(()),
        }
    }

    fn family(&self) -> Result<(Family, &'static str), String> {
        let named = self.get("architectures").and_then(|a| a.as_array()?.first()?.as_str());
        let known = FAMILIES.map(|(_, class, ..)| class).join(", ");
        let Some(named) = named else { return Err(format!("names no architecture; known are {known}")) };
        let Some((family, _, kind, arch)) = FAMILIES.into_iter().find(|(_, class, ..)| *class == named) else {
            return Err(format!("its architecture is {named}, of which no GGUF file is written here; known are {known}"));
        };
        match self.get("model_type") {
            Some(other) if other != kind => Err(format!("its architecture {named} is of model_type {kind}, but it says {other}")),
            _ => Ok((family, arch)),
        }
    }

    fn config(&self) -> Result<Config, String> {
        let (family, arch) = self.family()?;
        if self.get("quantization_config").is_some() {
            return Err("has a 'quantization_config': the weights must be f32, f16 or bf16".into());
        }
        let config = if family == Family::Gpt2 { self.gpt2(arch)? } else { self.decoder(family, arch)? };
        if config.layers > 4096 {
            return Err(format!("says that there are {} layers: up to 4096 are known", config.layers));
        }
        if !config.heads.is_multiple_of(config.kv_heads) {
            return Err(format!("num_attention_heads = {} does not divide by num_key_value_heads = {}", config.heads, config.kv_heads));
        }
        if family != Family::Gpt2 && !config.head_dim.is_multiple_of(2) {
            return Err(format!("head_dim = {} is odd: it has no pairs to rotate", config.head_dim));
        }
        Ok(config)
    }

    fn gpt2(&self, arch: &'static str) -> Result<Config, String> {
        self.only("activation_function", "gelu_new".into())?;
        self.only("scale_attn_weights", true.into())?;
        self.only("scale_attn_by_inverse_layer_idx", false.into())?;
        self.only("add_cross_attention", false.into())?;
        let (dim, heads) = (self.must("n_embd")?, self.must("n_head")?);
        Ok(Config {
            family: Family::Gpt2,
            arch,
            vocab: self.must("vocab_size")?,
            dim,
            layers: self.must("n_layer")?,
            heads,
            kv_heads: heads,
            head_dim: divided("n_embd", dim, "n_head", heads)?,
            hidden: self.size("n_inner")?.unwrap_or(4 * dim),
            context: self.must("n_positions")?,
            norm_eps: self.number("layer_norm_epsilon")?.unwrap_or(1e-5),
            tied: self.flag("tie_word_embeddings", true)?,
            rope_theta: 0.0,
            rope_scaling: RopeScaling::None,
            window: None,
        })
    }

    fn decoder(&self, family: Family, arch: &'static str) -> Result<Config, String> {
        self.only("hidden_act", "silu".into())?;
        let (dim, heads) = (self.must("hidden_size")?, self.must("num_attention_heads")?);
        let head_dim = match self.size("head_dim")? {
            Some(d) => d,
            None if family == Family::Qwen3 => 128,
            None => divided("hidden_size", dim, "num_attention_heads", heads)?,
        };
        if family == Family::Qwen2 && head_dim * heads != dim {
            return Err(format!("head_dim = {head_dim} is not hidden_size / num_attention_heads: llama.cpp's qwen2 has no other"));
        }
        let (rope_theta, rope_scaling) = self.rope()?;
        if matches!(rope_scaling, RopeScaling::Llama3 { .. }) && arch != "llama" {
            return Err(format!("scales RoPE by \"llama3\", which llama.cpp's architecture '{arch}' cannot do"));
        }
        // What transformers takes where the file is silent.
        let (context, kv_heads) = match family {
            Family::Llama => (2048, heads),
            Family::Mistral => (4096 * 32, 8),
            _ => (32768, 32),
        };
        let context = self.size("max_position_embeddings")?.unwrap_or(context);
        Ok(Config {
            family,
            arch,
            vocab: self.must("vocab_size")?,
            dim,
            layers: self.must("num_hidden_layers")?,
            heads,
            kv_heads: self.size("num_key_value_heads")?.unwrap_or(kv_heads),
            head_dim,
            hidden: self.must("intermediate_size")?,
            context,
            norm_eps: self.number("rms_norm_eps")?.unwrap_or(1e-6),
            tied: self.flag("tie_word_embeddings", false)?,
            rope_theta,
            rope_scaling,
            window: self.window(family)?.filter(|w| *w < context),
        })
    }

    /// The window that some layer's attention has.
    fn window(&self, family: Family) -> Result<Option<usize>, String> {
        let listed = self.get("layer_types").and_then(Value::as_array);
        if let Some(kind) = listed.into_iter().flatten().find(|t| *t != "full_attention" && *t != "sliding_attention") {
            return Err(format!("'layer_types' holds {kind}: full_attention and sliding_attention are known"));
        }
        let slides = match (family, listed) {
            (Family::Llama, _) => false,
            (Family::Mistral, _) => true,
            (_, Some(types)) => types.iter().any(|t| t == "sliding_attention"),
            (_, None) => self.flag("use_sliding_window", false)?,
        };
        match self.0.contains_key("sliding_window") {
            _ if !slides => Ok(None),
            true => self.size("sliding_window"),
            // What transformers takes where the file is silent.
            false => Ok(Some(4096)),
        }
    }

    /// theta, and how frequencies are scaled. Newer files have both in `rope_parameters`, older ones beside each other.
    fn rope(&self) -> Result<(f64, RopeScaling), String> {
        let none = Map::new();
        let key = if self.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
        let table = match self.get(key) {
            None => &none,
            Some(Value::Object(table)) => table,
            Some(other) => return Err(format!("'{key}' is {other}, not a table")),
        };
        let inner = Fields(table);
        let say = |problem: String| format!("in '{key}': {problem}");
        let number = |name: &str| inner.number(name).map_err(say);
        let must = |name: &str| number(name)?.ok_or(format!("'{key}' has no '{name}'"));
        let theta = match number("rope_theta")? {
            Some(theta) => theta,
            None => self.number("rope_theta")?.unwrap_or(10000.0),
        };
        for fields in [self, &inner] {
            fields.only("partial_rotary_factor", 1.0.into())?;
        }
        let kind = inner.get("rope_type").or(inner.get("type"));
        let scaling = match kind.map(|k| k.as_str().unwrap_or_default()) {
            None | Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: must("factor")? },
            Some("llama3") => {
                let (low, high) = (must("low_freq_factor")?, must("high_freq_factor")?);
                if high <= low {
                    return Err(format!("'{key}.high_freq_factor' is {high}, not above low_freq_factor = {low}"));
                }
                RopeScaling::Llama3 { factor: must("factor")?, low, high, original: must("original_max_position_embeddings")? }
            }
            Some(other) => return Err(format!("'{key}' scales RoPE by \"{other}\": \"linear\" and \"llama3\" are known")),
        };
        Ok((theta, scaling))
    }
}

fn divided(what: &str, n: usize, by: &str, d: usize) -> Result<usize, String> {
    if n.is_multiple_of(d) { Ok(n / d) } else { Err(format!("{what} = {n} does not divide by {by} = {d}")) }
}
