//! What a decoder looks like, and what config.json says about it.

use super::family::{FAMILIES, Family, Mixer, Mlp, Positions};
use super::{ModelError, read_table};
use crate::config::{NORM_EPS, ROPE_THETA, Value as Setting, within};
use crate::nn::mamba2::Sizes;
use engine::ops::rope::rope_frequencies;
use serde_json::{Map, Value, json};
use std::f64::consts::PI;
use std::path::Path;

/// A decoder's sizes, and the family that it belongs to.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    pub family: &'static Family,
    pub vocab: usize,
    pub dim: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// The MLP's width.
    pub hidden: usize,
    /// The head is the embedding.
    pub tied: bool,
    /// Each token sees so many, itself among them; None: all before it.
    pub window: Option<usize>,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    pub norm_eps: f64,
    /// Positions that the model was made for.
    pub context: usize,
    /// Of a state-space layer.
    pub scan: Option<ScanShape>,
}

/// What a state-space layer has beside heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScanShape {
    /// Width of B and C.
    pub state: usize,
    /// Groups of heads that share B and C.
    pub groups: usize,
    /// Taps of the convolution.
    pub taps: usize,
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
            ("vocab", self.vocab, 1 << 22),
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
        if let Some(s) = &self.scan {
            let sizes = [("state", s.state, 1..=1 << 12), ("groups", s.groups, 1..=self.heads), ("conv", s.taps, 2..=1 << 8)];
            if let Some((name, v, range)) = sizes.iter().find(|(_, v, range)| !range.contains(v)) {
                return Err(format!("{name} = {v}: from {} to {}", range.start(), range.end()));
            }
            if !self.heads.is_multiple_of(s.groups) || !(self.heads * self.head_dim).is_multiple_of(self.dim) {
                let Shape { heads, head_dim, dim, .. } = self;
                let groups = s.groups;
                return Err(format!(
                    "heads = {heads} must be a multiple of groups = {groups}, and heads x head_dim = {heads} x {head_dim} of dim = {dim}"
                ));
            }
        }
        if self.window == Some(0) {
            return Err("window = 0: a token sees itself at least".into());
        }
        if self.family.joint && (self.kv_heads != self.heads || self.heads * self.head_dim != self.dim) {
            let name = self.family.name;
            return Err(format!("kv_heads = {}: {name} has heads of dim / heads elements, each with keys of its own", self.kv_heads));
        }
        if self.family.positions == Positions::Rope && !self.head_dim.is_multiple_of(2) {
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

    /// By the names of config keys, of which a recipe may have some.
    pub fn settings(&self) -> Vec<(&'static str, Setting)> {
        let size = |n: usize| Setting::Integer(n as i64);
        vec![
            ("family", self.family.name.into()),
            ("vocab", size(self.vocab)),
            ("dim", size(self.dim)),
            ("layers", size(self.layers)),
            ("heads", size(self.heads)),
            ("kv_heads", size(self.kv_heads)),
            ("head_dim", size(self.head_dim)),
            ("hidden", size(self.hidden)),
            ("tied", self.tied.into()),
            ("qk_norm", self.family.qk_norm.into()),
            ("window", size(self.window.unwrap_or(0))),
            ("rope_theta", self.rope_theta.into()),
            ("norm_eps", self.norm_eps.into()),
        ]
        .into_iter()
        .chain(self.scan.iter().flat_map(|s| [("state", size(s.state)), ("groups", size(s.groups)), ("conv", size(s.taps))]))
        .collect()
    }

    /// A layer's scan.
    pub fn scan_sizes(&self) -> Option<Sizes> {
        let scan = self.scan?;
        let inner = self.heads * self.head_dim;
        Some(Sizes { inner, head: self.head_dim, state: scan.state, groups: scan.groups, eps: self.norm_eps as f32 })
    }

    /// From a folder's config.json.
    pub fn read(path: &Path) -> Result<Shape, ModelError> {
        let table = read_table(path)?;
        Shape::parse(&table).map_err(|problem| ModelError::bad(path, problem))
    }

    /// From the text of a config.json.
    pub fn parse(table: &Map<String, Value>) -> Result<Shape, String> {
        let family = family(table)?;
        let get = |key: &str| table.get(family.key(key)).filter(|v| !v.is_null());
        let whole = |key: &str| -> Result<Option<usize>, String> {
            let name = family.key(key);
            let number = |v: &Value| v.as_u64().and_then(|v| usize::try_from(v).ok()).ok_or(format!("'{name}' is {v}, not a whole number"));
            get(key).map(number).transpose()
        };
        let must = |key: &str| whole(key)?.ok_or(format!("has no '{}'", family.key(key)));
        let flag = |key: &str, without: bool| match get(key) {
            None => Ok(without),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => Err(format!("'{key}' is {other}, not true or false")),
        };
        let refused = [
            ("attention_bias", true, "matmuls with a bias are not known in this family"),
            ("mlp_bias", true, "matmuls with a bias are not known in this family"),
            ("use_bias", true, "matmuls with a bias are not known in this family"),
            ("use_conv_bias", false, "a convolution without a bias is not known in this family"),
            ("norm_before_gate", true, "a scan's result is gated before its norm here"),
            ("D_has_hdim", true, "what a scan's D skips is one number a head here"),
            ("use_sliding_window", true, "attention to a window in some layers is not known here"),
            ("scale_attn_by_inverse_layer_idx", true, "scores are scaled alike in all layers here"),
            ("scale_attn_weights", false, "scores are scaled by the root of the head's size here"),
        ];
        for (key, bad, why) in refused {
            if flag(key, !bad)? == bad {
                return Err(format!("'{key}' is {bad}: {why}"));
            }
        }
        let known = match (family.mixer, family.windowed) {
            (Mixer::Mamba2, _) => ["linear_attention"; 2],
            (_, true) => ["full_attention", "sliding_attention"],
            _ => ["full_attention"; 2],
        };
        if let Some(kind) = get("layer_types").and_then(Value::as_array).into_iter().flatten().find(|t| !known.iter().any(|k| *t == k)) {
            return Err(format!("'layer_types' holds {kind}: only {} is known here", known[0]));
        }
        if let Some(act) = get("hidden_act").filter(|a| !family.acts.iter().any(|k| a == k)) {
            return Err(format!("'{}' is {act}: only {:?} is known here", family.key("hidden_act"), family.acts));
        }
        let idle = |v: &&Value| v.is_null() || **v == Value::Bool(false) || v.as_f64().is_some_and(|v| v == 0.0 || v == 1.0);
        if let Some(key) = UNKNOWN.iter().find(|key| table.get(**key).is_some_and(|v| !idle(&v))) {
            return Err(format!("'{key}' is {}, which is not known here", table[*key]));
        }
        if get("quantization_config").is_some() {
            return Err("has a 'quantization_config': weights must be bf16, f16 or f32".into());
        }
        let (dim, heads) = (must("hidden_size")?, must("num_attention_heads")?);
        let head_dim = match whole("head_dim")?.or(family.head_dim) {
            Some(d) => d,
            None if heads > 0 && dim.is_multiple_of(heads) => dim / heads,
            None => return Err(format!("{} = {dim} does not divide by the {heads} heads", family.key("hidden_size"))),
        };
        let scan = match family.mixer {
            Mixer::Attention => None,
            Mixer::Mamba2 => {
                unlimited(get("time_step_limit"))?;
                let [state, groups, taps] = [("state_size", 128), ("n_groups", 8), ("conv_kernel", 4)]
                    .map(|(key, silent)| Ok::<_, String>(whole(key)?.unwrap_or(silent)));
                only_scans(table)?;
                if let Some(expand) = number(table, "expand")?.filter(|e| e * dim as f64 != heads as f64 * head_dim as f64) {
                    return Err(format!("'expand' is {expand}, but num_heads x head_dim = {heads} x {head_dim} is not {expand} x {dim}"));
                }
                if whole("chunk_size")? == Some(0) {
                    return Err("'chunk_size' is 0: a chunk has one position at least".into());
                }
                Some(ScanShape { state: state?, groups: groups?, taps: taps? })
            }
        };
        let context = whole("max_position_embeddings")?.unwrap_or(family.context);
        let (rope_theta, rope_scaling) = rope(table, context)?;
        let shape = Shape {
            family,
            vocab: must("vocab_size")?,
            dim,
            layers: must("num_hidden_layers")?,
            heads,
            kv_heads: whole("num_key_value_heads")?.or(family.kv_heads).unwrap_or(heads),
            head_dim,
            hidden: match (whole("intermediate_size")?, family.mlp) {
                _ if scan.is_some() => heads.saturating_mul(head_dim),
                (None, Mlp::Gelu) => dim.saturating_mul(4),
                (found, _) => found.ok_or("has no 'intermediate_size'")?,
            },
            tied: flag("tie_word_embeddings", family.tied)?,
            window: whole("sliding_window")?.filter(|_| family.windowed),
            rope_theta,
            rope_scaling,
            norm_eps: number(table, family.key("rms_norm_eps"))?.unwrap_or(family.norm_eps),
            context,
            scan,
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
        let mut table = json!({
            "architectures": [self.family.architecture],
            "model_type": self.family.name,
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.hidden,
            "hidden_act": self.family.acts[0],
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.context,
        });
        let map = table.as_object_mut().expect("a table");
        if self.family.positions == Positions::Rope {
            map.insert("num_key_value_heads".into(), self.kv_heads.into());
            map.insert("head_dim".into(), self.head_dim.into());
            map.insert("rope_theta".into(), self.rope_theta.into());
            map.insert("rope_scaling".into(), scaling);
            map.insert("attention_bias".into(), false.into());
        }
        if let Some(s) = &self.scan {
            map.retain(|key, _| !["intermediate_size", "max_position_embeddings"].contains(&key.as_str()));
            let expand = self.heads * self.head_dim / self.dim;
            let own =
                [("head_dim", self.head_dim), ("state_size", s.state), ("n_groups", s.groups), ("conv_kernel", s.taps), ("expand", expand)];
            map.extend(own.map(|(key, value)| (key.to_string(), value.into())));
        }
        if self.family.windowed {
            map.insert("sliding_window".into(), engine::mutant!("window-is-not-written", self.window, None).into());
        }
        for (key, own) in self.family.keys {
            if let Some(value) = map.remove(*key) {
                map.insert(own.to_string(), value);
            }
        }
        table
    }

    /// What tells this model from others of the same weights. Written as it was when there were two families, so that checkpoints know their base.
    pub fn identity(&self) -> String {
        let Shape { vocab, dim, layers, heads, kv_heads, head_dim, hidden, tied, .. } = self;
        let old = format!(
            "Shape {{ vocab: {vocab}, dim: {dim}, layers: {layers}, heads: {heads}, kv_heads: {kv_heads}, head_dim: {head_dim}, hidden: {hidden}, tied: {tied}, qk_norm: {}, rope_theta: {:?}, rope_scaling: {:?}, norm_eps: {:?}, context: {} }}",
            self.family.qk_norm, self.rope_theta, self.rope_scaling, self.norm_eps, self.context
        );
        match (self.family.name, self.window, self.scan) {
            ("llama" | "qwen3", None, _) => old,
            (name, window, None) => format!("{old} {name} {window:?}"),
            (name, _, Some(scan)) => format!("{old} {name} {scan:?}"),
        }
    }
}

/// Refuses step sizes of a scan that are limited: from 0 on, without end, is how models are trained. Python writes infinity in several ways.
fn unlimited(limit: Option<&Value>) -> Result<(), String> {
    let open = |v: &Value| v.is_null() || v == "Infinity" || v.get("__float__").is_some_and(|v| v == "Infinity");
    match limit.map(|v| (v, v.as_array().map_or(&[][..], |v| v))) {
        None => Ok(()),
        Some((_, [low, high])) if low.as_f64() == Some(0.0) && open(high) => Ok(()),
        Some((other, _)) => Err(format!("'time_step_limit' is {other}: only steps from 0 on, without a limit, are known here")),
    }
}

/// Refuses models that mix state-space layers with attention.
fn only_scans(table: &Map<String, Value>) -> Result<(), String> {
    let own = |key: &str, plain: &dyn Fn(&Value) -> bool| match table.get(key).filter(|v| !v.is_null()) {
        Some(v) if !v.as_array().is_some_and(|layers| layers.iter().all(plain)) => {
            Err(format!("'{key}' is {v}: layers of attention are not known in this family"))
        }
        _ => Ok(()),
    };
    own("attn_layer_idx", &|_| false)?;
    own("layers_block_type", &|kind| kind == "mamba" || kind == "mamba2")
}

/// Where it is said how another family is added.
const ADDING: &str = "CONTRIBUTING.md, 'Your first family of decoders', says how to add one";

/// The family that config.json names.
fn family(table: &Map<String, Value>) -> Result<&'static Family, String> {
    let get = |key: &str| table.get(key).filter(|v| !v.is_null());
    let named = get("architectures").and_then(|a| a.as_array()?.first()?.as_str());
    let kind = get("model_type").and_then(|t| t.as_str());
    let known: Vec<&str> = FAMILIES.iter().map(|f| f.architecture).collect();
    let by_name = |name: &str| FAMILIES.iter().find(|f| f.architecture == name);
    let family = match (named, kind) {
        (Some(name), _) => by_name(name)
            .ok_or_else(|| format!("its architecture is {name}, which is not supported yet; {} are ({ADDING})", known.join(", ")))?,
        (None, Some(kind)) => Family::find(kind)
            .ok_or_else(|| format!("its model_type is {kind}, which is not supported yet; {} are ({ADDING})", Family::names()))?,
        (None, None) => return Err("names no architecture".into()),
    };
    match get("model_type").filter(|t| *t != family.name) {
        Some(other) => Err(format!("its architecture is of model_type {}, but it says {other}", family.name)),
        None => Ok(family),
    }
}

/// Keys of config.json, of families that are not known here or of changed models, that change what a decoder computes.
const UNKNOWN: &[&str] = &[
    "add_cross_attention",
    "attention_multiplier",
    "attn_logit_softcapping",
    "embedding_multiplier",
    "final_logit_softcapping",
    "is_encoder_decoder",
    "kv_lora_rank",
    "logit_scale",
    "logits_scaling",
    "n_routed_experts",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "residual_multiplier",
];

fn number(table: &Map<String, Value>, key: &str) -> Result<Option<f64>, String> {
    let float = |v: &Value| v.as_f64().filter(|v| v.is_finite()).ok_or(format!("'{key}' is {v}, not a number"));
    table.get(key).filter(|v| !v.is_null()).map(float).transpose()
}

/// theta, and how frequencies are scaled. Newer files have both in `rope_parameters`, older ones beside each other.
fn rope(table: &Map<String, Value>, context: usize) -> Result<(f64, RopeScaling), String> {
    let none = Map::new();
    if let (Some(new @ Value::Object(_)), Some(old @ Value::Object(_))) = (table.get("rope_parameters"), table.get("rope_scaling"))
        && new != old
    {
        return Err("'rope_parameters' and 'rope_scaling' differ: keep one of them".into());
    }
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
                engine::mutant!("llama3-scaling-of-another-context", context as f64, 2048.0)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Shapes of the families that have keys of their own.
    fn shapes_of_other_families() -> Vec<Shape> {
        let shape = |config: Value| Shape::parse(config.as_object().unwrap()).unwrap();
        let sizes = |model_type: &str, more: Value| {
            let mut all = json!({
                "model_type": model_type, "vocab_size": 13, "hidden_size": 6, "num_hidden_layers": 2, "num_attention_heads": 3,
                "num_key_value_heads": 1, "intermediate_size": 10, "max_position_embeddings": 99, "rms_norm_eps": 2e-5,
            });
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            shape(all)
        };
        vec![
            sizes("mistral", json!({ "sliding_window": 7, "rope_theta": 1234.5 })),
            sizes("mistral", json!({ "sliding_window": null, "tie_word_embeddings": true })),
            sizes("qwen2", json!({ "tie_word_embeddings": true })),
            shape(json!({
                "model_type": "gpt2", "vocab_size": 13, "n_embd": 6, "n_layer": 2, "n_head": 3, "n_positions": 99, "n_inner": 10,
                "layer_norm_epsilon": 2e-4
            })),
            shape(json!({
                "model_type": "mamba2", "vocab_size": 13, "hidden_size": 6, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 3, "n_groups": 2,
                "state_size": 5, "conv_kernel": 3, "layer_norm_epsilon": 2e-4, "expand": 2
            })),
        ]
    }

    /// A release build would compute with what is left of the product.
    #[test]
    fn sizes_that_no_model_has_are_refused() {
        for size in [1u64 << 62, 1 << 63, u64::MAX] {
            let config = json!({ "model_type": "gpt2", "vocab_size": 13, "n_embd": size, "n_layer": 2, "n_head": 1, "n_positions": 99 });
            let said = Shape::parse(config.as_object().unwrap()).unwrap_err();
            assert!(said.contains("dim") || said.contains("n_embd"), "{said}");
        }
    }

    #[test]
    fn a_shape_of_every_family_is_read_as_it_was_written() {
        let all = shapes_of_other_families();
        assert_eq!(all.iter().map(|s| s.window).collect::<Vec<_>>(), [Some(7), None, None, None, None]);
        for shape in all {
            let written = shape.to_json();
            assert_eq!(Shape::parse(written.as_object().unwrap()).unwrap(), shape, "{written}");
        }
    }
}
