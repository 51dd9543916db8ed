//! The tensors of a file: which weight each is, in which order of rows, in which type.

use super::config::{Config, Family};
use super::file::{bytes_of, padding};
use super::types::BLOCK;
use super::{GgufError, Type};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

const HEAD: &str = "lm_head.weight";

pub struct Tensor {
    pub ours: String,
    /// As it is written: rows, columns.
    pub shape: Vec<usize>,
    pub kind: Type,
    /// It was to have blocks, which its rows do not fill.
    pub fell_back: bool,
    pub source: Source,
}

pub enum Source {
    Weight { theirs: String, order: Order },
    Computed(Vec<f32>),
}

/// How a weight's numbers lie in the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    Same,
    /// Rows of each head in pairs that RoPE rotates. Hugging Face's Llama rotates rows i and i + d / 2 of a head's d,
    /// llama.cpp's rows 2 i and 2 i + 1.
    Paired {
        head_dim: usize,
    },
    /// GPT-2's Conv1D has a row for each input.
    Transposed,
}

/// A weight that a model has.
struct Entry {
    theirs: String,
    ours: String,
    /// In the folder.
    shape: Vec<usize>,
    order: Order,
    required: bool,
}

/// Checks that all weights are there, in their shapes, and no others.
pub fn plan(config: &Config, weights: &[(String, Vec<usize>)], kind: Type) -> Result<Vec<Tensor>, GgufError> {
    let given: BTreeMap<&str, &[usize]> = weights.iter().map(|(name, shape)| (plain(config, name), &shape[..])).collect();
    let prefixed: BTreeMap<&str, &str> = weights.iter().map(|(name, _)| (plain(config, name), name.as_str())).collect();
    let entries = entries(config);
    let own_head = given.contains_key(HEAD);
    let mut tensors = vec![];
    for e in &entries {
        match given.get(e.theirs.as_str()) {
            None if !e.required => continue,
            None => return Err(GgufError::weight(&e.theirs, "is missing: config.json asks for it")),
            Some(has) if **has != e.shape => {
                return Err(GgufError::weight(&e.theirs, format!("is {has:?}, but config.json makes it {:?}", e.shape)));
            }
            Some(_) => {
                let mut shape = e.shape.clone();
                if e.order == Order::Transposed {
                    shape.reverse();
                }
                let (kind, fell_back) = choose(&e.ours, &shape, kind, own_head);
                let theirs = prefixed[e.theirs.as_str()].to_string();
                tensors.push(Tensor { ours: e.ours.clone(), shape, kind, fell_back, source: Source::Weight { theirs, order: e.order } });
            }
        }
    }
    let known: BTreeSet<&str> = entries.iter().map(|e| e.theirs.as_str()).collect();
    // Frequencies and masks that older files keep are computed.
    let silent = |name: &str| [".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"].iter().any(|end| name.ends_with(end));
    if let Some(extra) = given.keys().find(|name| !known.contains(*name) && !silent(name)) {
        return Err(GgufError::weight(extra, format!("is not known in llama.cpp's architecture '{}'", config.arch)));
    }
    if let Some(factors) = engine::mutant!("gguf-without-rope-factors", config.rope_factors(), None) {
        let (ours, shape) = ("rope_freqs.weight".into(), vec![factors.len()]);
        tensors.push(Tensor { ours, shape, kind: Type::F32, fell_back: false, source: Source::Computed(factors) });
    }
    Ok(tensors)
}

/// GPT-2's names come with and without a prefix.
fn plain<'a>(config: &Config, name: &'a str) -> &'a str {
    if config.family == Family::Gpt2 { name.strip_prefix("transformer.").unwrap_or(name) } else { name }
}

/// The type of a tensor, and whether that is for want of whole blocks. As llama.cpp's converter and quantizer choose: vectors
/// and positions stay as they are, and what gives the logits keeps 8 bits or more (Q6_K there, Q8_0 here).
fn choose(ours: &str, shape: &[usize], kind: Type, own_head: bool) -> (Type, bool) {
    if shape.len() < 2 || ours == "position_embd.weight" {
        return (Type::F32, false);
    }
    if kind.has_blocks() && !shape[1].is_multiple_of(BLOCK) {
        return (Type::F16, true);
    }
    let logits = if own_head { "output.weight" } else { "token_embd.weight" };
    (if kind == Type::Q4_0 && ours == logits { Type::Q8_0 } else { kind }, false)
}

fn entries(config: &Config) -> Vec<Entry> {
    if config.family == Family::Gpt2 { gpt2(config) } else { decoder(config) }
}

fn decoder(c: &Config) -> Vec<Entry> {
    let (dim, hidden) = (c.dim, c.hidden);
    let (queries, keys) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let paired = if c.arch == "llama" { Order::Paired { head_dim: c.head_dim } } else { Order::Same };
    let mut all = vec![];
    let mut add = |theirs: String, ours: String, shape: &[usize], order, required| {
        all.push(Entry { theirs, ours, shape: shape.to_vec(), order, required });
    };
    add("model.embed_tokens.weight".into(), "token_embd.weight".into(), &[c.vocab, dim], Order::Same, true);
    for l in 0..c.layers {
        let mut layer = |theirs: &str, ours: &str, shape: &[usize], order, required| {
            add(format!("model.layers.{l}.{theirs}"), format!("blk.{l}.{ours}"), shape, order, required);
        };
        layer("input_layernorm.weight", "attn_norm.weight", &[dim], Order::Same, true);
        for (x, rows, order) in [("q", queries, paired), ("k", keys, paired), ("v", keys, Order::Same)] {
            layer(&format!("self_attn.{x}_proj.weight"), &format!("attn_{x}.weight"), &[rows, dim], order, true);
            let required = c.family == Family::Qwen2;
            layer(&format!("self_attn.{x}_proj.bias"), &format!("attn_{x}.bias"), &[rows], order, required);
        }
        if c.family == Family::Qwen3 {
            layer("self_attn.q_norm.weight", "attn_q_norm.weight", &[c.head_dim], Order::Same, true);
            layer("self_attn.k_norm.weight", "attn_k_norm.weight", &[c.head_dim], Order::Same, true);
        }
        layer("post_attention_layernorm.weight", "ffn_norm.weight", &[dim], Order::Same, true);
        let products = [
            ("self_attn.o_proj", "attn_output", dim, queries),
            ("mlp.gate_proj", "ffn_gate", hidden, dim),
            ("mlp.up_proj", "ffn_up", hidden, dim),
            ("mlp.down_proj", "ffn_down", dim, hidden),
        ];
        for (theirs, ours, rows, columns) in products {
            layer(&format!("{theirs}.weight"), &format!("{ours}.weight"), &[rows, columns], Order::Same, true);
            // Elsewhere llama.cpp does not know these.
            if c.arch == "llama" {
                layer(&format!("{theirs}.bias"), &format!("{ours}.bias"), &[rows], Order::Same, false);
            }
        }
    }
    add("model.norm.weight".into(), "output_norm.weight".into(), &[dim], Order::Same, true);
    add(HEAD.into(), "output.weight".into(), &[c.vocab, dim], Order::Same, !c.tied);
    all
}

fn gpt2(c: &Config) -> Vec<Entry> {
    let (dim, hidden) = (c.dim, c.hidden);
    let mut all = vec![];
    let mut add = |theirs: String, ours: String, shape: &[usize], order, required| {
        all.push(Entry { theirs, ours, shape: shape.to_vec(), order, required });
    };
    add("wte.weight".into(), "token_embd.weight".into(), &[c.vocab, dim], Order::Same, true);
    add("wpe.weight".into(), "position_embd.weight".into(), &[c.context, dim], Order::Same, true);
    for l in 0..c.layers {
        for (theirs, ours) in [("ln_1", "attn_norm"), ("ln_2", "ffn_norm")] {
            for part in ["weight", "bias"] {
                add(format!("h.{l}.{theirs}.{part}"), format!("blk.{l}.{ours}.{part}"), &[dim], Order::Same, true);
            }
        }
        let products = [
            ("attn.c_attn", "attn_qkv", dim, 3 * dim),
            ("attn.c_proj", "attn_output", dim, dim),
            ("mlp.c_fc", "ffn_up", dim, hidden),
            ("mlp.c_proj", "ffn_down", hidden, dim),
        ];
        for (theirs, ours, inputs, outputs) in products {
            add(format!("h.{l}.{theirs}.weight"), format!("blk.{l}.{ours}.weight"), &[inputs, outputs], Order::Transposed, true);
            add(format!("h.{l}.{theirs}.bias"), format!("blk.{l}.{ours}.bias"), &[outputs], Order::Same, true);
        }
    }
    for part in ["weight", "bias"] {
        add(format!("ln_f.{part}"), format!("output_norm.{part}"), &[dim], Order::Same, true);
    }
    add(HEAD.into(), "output.weight".into(), &[c.vocab, dim], Order::Same, !c.tied);
    all
}

impl Tensor {
    /// Writes the numbers of its weight, and the padding behind them.
    pub fn write(&self, out: &mut impl Write, data: &[f32]) -> Result<(), GgufError> {
        let (name, order) = match &self.source {
            Source::Weight { theirs, order } => (theirs.as_str(), *order),
            Source::Computed(_) => (self.ours.as_str(), Order::Same),
        };
        let numbers: usize = self.shape.iter().product();
        if data.len() != numbers {
            return Err(GgufError::weight(name, format!("came with {} numbers, not {numbers}", data.len())));
        }
        // A vector whose numbers change places has rows of one number.
        let columns = match (&self.shape[..], order) {
            ([_], Order::Paired { .. }) => 1,
            (shape, _) => shape[shape.len() - 1],
        };
        let rows = numbers / columns;
        let mut gathered = vec![0.0; columns];
        let mut bytes = vec![];
        for row in 0..rows {
            let values = match order {
                Order::Same => &data[row * columns..][..columns],
                Order::Paired { head_dim } => &data[unpaired(row, head_dim) * columns..][..columns],
                Order::Transposed => {
                    gathered.iter_mut().enumerate().for_each(|(column, x)| *x = data[column * rows + row]);
                    &gathered[..]
                }
            };
            self.kind.encode(values, &mut bytes).map_err(|x| match x.is_finite() {
                true => GgufError::weight(name, format!("holds {x:e}, which is too large for {}: choose bf16 or f32", self.kind)),
                false => GgufError::weight(name, format!("holds {x}")),
            })?;
            if bytes.len() >= 1 << 20 || row + 1 == rows {
                out.write_all(&bytes)?;
                bytes.clear();
            }
        }
        out.write_all(padding(bytes_of(&self.shape, self.kind)))?;
        Ok(())
    }
}

/// Which row of a Hugging Face weight becomes this row.
fn unpaired(row: usize, head_dim: usize) -> usize {
    let (head, within) = (row / head_dim, row % head_dim);
    head * head_dim + within % 2 * (head_dim / 2) + within / 2
}
