//! What a decoder looks like, and what config.json says about it.

use super::{ModelError, read_table};
use crate::config::{NORM_EPS, ROPE_THETA, within};
use engine::ops::rope::rope_frequencies;
use serde_json::{Map, Value, json};
use std::f64::consts::PI;
use std::path::Path;

/// A decoder of the family of Llama and Qwen3: RMS norms, rotary embedding, grouped heads, SwiGLU.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    pub vocab: usize,
    pub dim: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// SwiGLU's width.
    pub hidden: usize,
    /// The head is the embedding.
    pub tied: bool,
    /// Queries and keys have an RMS norm, as in Qwen3.
    pub qk_norm: bool,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    pub norm_eps: f64,
    /// Positions that the model was made for.
    pub context: usize,
}

/// How frequencies differ from theta^(-2 i / d).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// All of them divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Divided by `factor` where fewer than `low` waves fit into the `original` context, as they are where more than `high` do, and between
    /// the two in between.
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        original: f64,
    },
}

impl Shape {
    pub fn check(&self) -> Result<(), String> {
        // Far above any real model, and low enough that no product of a few of them overflows.
        let sizes = [
            ("vocab", self.vocab, 1 << 24),
            ("dim", self.dim, 1 << 20),
            ("layers", self.layers, 1024),
            ("heads", self.heads, 1 << 12),
            ("kv_heads", self.kv_heads, 1 << 12),
            ("head_dim", self.head_dim, 1 << 10),
            ("hidden", self.hidden, 1 << 20),
        ];
        if let Some((name, v, most)) = sizes.iter().find(|(_, v, most)| *v == 0 || v > most) {
            return Err(format!("{name} = {v}: from 1 to {most}"));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!("heads = {} does not divide by kv_heads = {}", self.heads, self.kv_heads));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("head_dim = {} is odd: it has no pairs to rotate", self.head_dim));
        }
        within("rope_theta", self.rope_theta, ROPE_THETA).map_err(|e| e.to_string())?;
        within("norm_eps", self.norm_eps, NORM_EPS).map_err(|e| e.to_string())
    }

    /// Angles of a head's pairs for each position.
    pub fn frequencies(&self) -> Vec<f32> {
        let scaled = |f: f32| -> f32 {
            let frequency = f as f64;
            match self.rope_scaling {
                RopeScaling::None => f,
                RopeScaling::Linear { factor } => (frequency / factor) as f32,
                RopeScaling::Llama3 { factor, low, high, original } => {
                    let waves = original * frequency / (2.0 * PI);
                    let kept = ((waves - low) / (high - low)).clamp(0.0, 1.0);
                    ((1.0 - kept) * frequency / factor + kept * frequency) as f32
                }
            }
        };
        rope_frequencies(self.head_dim, self.rope_theta as f32).into_iter().map(scaled).collect()
    }

    /// From a folder's config.json.
    pub fn read(path: &Path) -> Result<Shape, ModelError> {
        let table = read_table(path)?;
        Shape::parse(&table).map_err(|problem| ModelError::bad(path, problem))
    }

    fn parse(table: &Map<String, Value>) -> Result<Shape, String> {
        let get = |key: &str| table.get(key).filter(|v| !v.is_null());
        let named = get("architectures").and_then(|a| a.as_array()?.first()?.as_str());
        let qwen3 = match named {
            Some("Qwen3ForCausalLM") => true,
            Some("LlamaForCausalLM") => false,
            Some(other) => return Err(format!("its architecture is {other}; Qwen3ForCausalLM and LlamaForCausalLM are known here")),
            None => return Err("names no architecture".into()),
        };
        let known = if qwen3 { "qwen3" } else { "llama" };
        if let Some(other) = get("model_type").filter(|t| *t != known) {
            return Err(format!("its architecture is of model_type {known}, but it says {other}"));
        }
        let whole = |key: &str| -> Result<Option<usize>, String> {
            let number = |v: &Value| v.as_u64().and_then(|v| usize::try_from(v).ok()).ok_or(format!("'{key}' is {v}, not a whole number"));
            get(key).map(number).transpose()
        };
        let must = |key: &str| whole(key)?.ok_or(format!("has no '{key}'"));
        let (dim, heads) = (must("hidden_size")?, must("num_attention_heads")?);
        let head_dim = match whole("head_dim")? {
            Some(d) => d,
            None if qwen3 => 128,
            None if heads > 0 && dim.is_multiple_of(heads) => dim / heads,
            None => return Err(format!("hidden_size = {dim} does not divide by num_attention_heads = {heads}")),
        };
        let flag = |key: &str| match get(key) {
            None => Ok(false),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => Err(format!("'{key}' is {other}, not true or false")),
        };
        for key in ["attention_bias", "mlp_bias"] {
            if flag(key)? {
                return Err(format!("'{key}' is true: products with a bias are not known here"));
            }
        }
        if flag("use_sliding_window")? {
            return Err("'use_sliding_window' is true: attention to a window is not known here".into());
        }
        if let Some(kind) = get("layer_types").and_then(Value::as_array).into_iter().flatten().find(|t| *t != "full_attention") {
            return Err(format!("'layer_types' holds {kind}: only full_attention is known here"));
        }
        if let Some(act) = get("hidden_act").filter(|a| *a != "silu") {
            return Err(format!("'hidden_act' is {act}: only \"silu\" is known here"));
        }
        if get("quantization_config").is_some() {
            return Err("has a 'quantization_config': weights must be bf16, f16 or f32".into());
        }
        let context = whole("max_position_embeddings")?.unwrap_or(if qwen3 { 32768 } else { 2048 });
        let (rope_theta, rope_scaling) = rope(table, context)?;
        let shape = Shape {
            vocab: must("vocab_size")?,
            dim,
            layers: must("num_hidden_layers")?,
            heads,
            kv_heads: whole("num_key_value_heads")?.unwrap_or(if qwen3 { 32 } else { heads }),
            head_dim,
            hidden: must("intermediate_size")?,
            tied: flag("tie_word_embeddings")?,
            qk_norm: qwen3,
            rope_theta,
            rope_scaling,
            norm_eps: number(table, "rms_norm_eps")?.unwrap_or(1e-6),
            context,
        };
        shape.check()?;
        Ok(shape)
    }

    /// The same, for other packages to read.
    pub fn to_json(&self) -> Value {
        let scaling = match self.rope_scaling {
            RopeScaling::None => Value::Null,
            RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
            RopeScaling::Llama3 { factor, low, high, original } => json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original as u64
            }),
        };
        json!({
            "architectures": [if self.qk_norm { "Qwen3ForCausalLM" } else { "LlamaForCausalLM" }],
            "model_type": if self.qk_norm { "qwen3" } else { "llama" },
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.hidden,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.context,
            "attention_bias": false,
        })
    }
}

fn number(table: &Map<String, Value>, key: &str) -> Result<Option<f64>, String> {
    let float = |v: &Value| v.as_f64().filter(|v| v.is_finite()).ok_or(format!("'{key}' is {v}, not a number"));
    table.get(key).filter(|v| !v.is_null()).map(float).transpose()
}

/// theta, and how frequencies are scaled. Newer files have both in `rope_parameters`, older ones beside each other.
fn rope(table: &Map<String, Value>, context: usize) -> Result<(f64, RopeScaling), String> {
    let none = Map::new();
    let inner = ["rope_parameters", "rope_scaling"].iter().find_map(|key| table.get(*key).filter(|v| !v.is_null()).map(|v| (*key, v)));
    let (key, inner) = match inner {
        None => ("rope_scaling", &none),
        Some((key, Value::Object(inner))) => (key, inner),
        Some((key, other)) => return Err(format!("'{key}' is {other}, not a table")),
    };
    let theta = match number(inner, "rope_theta")? {
        Some(theta) => theta,
        None => number(table, "rope_theta")?.unwrap_or(10000.0),
    };
    let above_0 = |name: &str| match number(inner, name)? {
        Some(v) if v > 0.0 => Ok(v),
        Some(v) => Err(format!("'{key}.{name}' is {v}, not above 0")),
        None => Err(format!("'{key}' has no '{name}'")),
    };
    if number(inner, "partial_rotary_factor")?.is_some_and(|share| share != 1.0) {
        return Err(format!("'{key}.partial_rotary_factor' is not 1: heads are rotated whole here"));
    }
    let kind = inner.get("rope_type").or(inner.get("type")).filter(|v| !v.is_null());
    let scaling = match kind.map(|k| k.as_str().unwrap_or_default()) {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: above_0("factor")? },
        Some("llama3") => {
            let (low, high) = (above_0("low_freq_factor")?, above_0("high_freq_factor")?);
            if high <= low {
                return Err(format!("'{key}.high_freq_factor' is {high}, not above low_freq_factor = {low}"));
            }
            let original = if inner.contains_key("original_max_position_embeddings") {
                above_0("original_max_position_embeddings")?
            } else {
                context as f64
            };
            RopeScaling::Llama3 { factor: above_0("factor")?, low, high, original }
        }
        Some(_) => {
            let kind = kind.expect("just matched");
            return Err(format!("'{key}' scales RoPE by {kind}: \"linear\" and \"llama3\" are known here"));
        }
    };
    Ok((theta, scaling))
}
