//! Families of decoders, as data: a line of `FAMILIES` says what tells one from another.

/// What tells a family of decoders from another.
pub struct Family {
    /// `model_type` of config.json.
    pub name: &'static str,
    /// The first of `architectures` in config.json.
    pub architecture: &'static str,
    /// RMSNorm, or LayerNorm with weight and bias.
    pub norm: Norm,
    /// What lets tokens see each other.
    pub mixer: Mixer,
    /// RoPE, or a learned embedding of positions.
    pub positions: Positions,
    pub mlp: Mlp,
    /// Which matmuls of a layer have a bias.
    pub bias: Bias,
    /// Queries and keys are normed, head by head.
    pub qk_norm: bool,
    /// `sliding_window` of config.json holds for all layers.
    pub windowed: bool,
    /// q, k and v are one matrix, and matrices lie as [in, out] (GPT-2's Conv1D).
    pub joint: bool,
    /// How a folder calls its weights.
    pub names: &'static Names,
    /// Keys of config.json that are called otherwise than most families': (most, this one).
    pub keys: &'static [(&'static str, &'static str)],
    /// `hidden_act` of config.json: what it may be.
    pub acts: &'static [&'static str],
    // What config.json means where it does not say:
    pub head_dim: Option<usize>,
    pub kv_heads: Option<usize>,
    pub context: usize,
    pub norm_eps: f64,
    pub tied: bool,
}

/// Names of weights in a folder; those of a layer behind `layers.N.`.
pub struct Names {
    pub embedding: &'static str,
    pub positions: &'static str,
    pub layers: &'static str,
    pub attn_norm: &'static str,
    pub mlp_norm: &'static str,
    pub norm: &'static str,
    /// q, k and v as one.
    pub qkv: &'static str,
    pub o: &'static str,
    pub up: &'static str,
    pub down: &'static str,
    /// What files may leave out in front of all names but the head's.
    pub prefix: &'static str,
}

const LLAMA_NAMES: Names = Names {
    embedding: "model.embed_tokens",
    positions: "",
    layers: "model.layers",
    attn_norm: "input_layernorm",
    mlp_norm: "post_attention_layernorm",
    norm: "model.norm",
    qkv: "",
    o: "self_attn.o_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    prefix: "model.",
};

const GPT2_NAMES: Names = Names {
    embedding: "transformer.wte",
    positions: "transformer.wpe",
    layers: "transformer.h",
    attn_norm: "ln_1",
    mlp_norm: "ln_2",
    norm: "transformer.ln_f",
    qkv: "attn.c_attn",
    o: "attn.c_proj",
    up: "mlp.c_fc",
    down: "mlp.c_proj",
    prefix: "transformer.",
};

const MAMBA2_NAMES: Names = Names {
    embedding: "backbone.embeddings",
    layers: "backbone.layers",
    attn_norm: "norm",
    norm: "backbone.norm_f",
    prefix: "backbone.",
    ..LLAMA_NAMES
};

const MAMBA2_KEYS: &[(&str, &str)] = &[("num_attention_heads", "num_heads"), ("rms_norm_eps", "layer_norm_epsilon")];

const GPT2_KEYS: &[(&str, &str)] = &[
    ("hidden_size", "n_embd"),
    ("num_attention_heads", "n_head"),
    ("num_hidden_layers", "n_layer"),
    ("max_position_embeddings", "n_positions"),
    ("intermediate_size", "n_inner"),
    ("rms_norm_eps", "layer_norm_epsilon"),
    ("hidden_act", "activation_function"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    Rms,
    Layer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixer {
    Attention,
    /// A state-space layer, in the place of both attention and MLP.
    Mamba2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    Rope,
    Learned,
    /// The order of tokens is all that counts.
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mlp {
    /// down(silu(gate(x)) up(x))
    SwiGlu,
    /// down(gelu(up(x))), with the approximation by tanh.
    Gelu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    None,
    /// Of q, k and v.
    Qkv,
    All,
}

/// What most families are.
const LLAMA: Family = Family {
    name: "llama",
    architecture: "LlamaForCausalLM",
    norm: Norm::Rms,
    mixer: Mixer::Attention,
    positions: Positions::Rope,
    mlp: Mlp::SwiGlu,
    bias: Bias::None,
    qk_norm: false,
    windowed: false,
    joint: false,
    names: &LLAMA_NAMES,
    keys: &[],
    acts: &["silu"],
    head_dim: None,
    kv_heads: None,
    context: 2048,
    norm_eps: 1e-6,
    tied: false,
};

pub static FAMILIES: &[Family] = &[
    LLAMA,
    Family { name: "qwen2", architecture: "Qwen2ForCausalLM", bias: Bias::Qkv, kv_heads: Some(32), context: 32768, ..LLAMA },
    Family {
        name: "qwen3",
        architecture: "Qwen3ForCausalLM",
        qk_norm: true,
        head_dim: Some(128),
        kv_heads: Some(32),
        context: 32768,
        ..LLAMA
    },
    Family { name: "mistral", architecture: "MistralForCausalLM", windowed: true, kv_heads: Some(8), context: 131072, ..LLAMA },
    Family {
        name: "gpt2",
        architecture: "GPT2LMHeadModel",
        norm: Norm::Layer,
        positions: Positions::Learned,
        mlp: Mlp::Gelu,
        bias: Bias::All,
        joint: true,
        names: &GPT2_NAMES,
        keys: GPT2_KEYS,
        acts: &["gelu_new", "gelu_pytorch_tanh"],
        context: 1024,
        norm_eps: 1e-5,
        tied: true,
        ..LLAMA
    },
    Family {
        name: "mamba2",
        architecture: "Mamba2ForCausalLM",
        mixer: Mixer::Mamba2,
        positions: Positions::None,
        names: &MAMBA2_NAMES,
        keys: MAMBA2_KEYS,
        acts: &["silu", "swish"], // two names of the same
        head_dim: Some(64),
        context: 1 << 20, // its state has no positions
        norm_eps: 1e-5,
        ..LLAMA
    },
];

impl Family {
    /// The family of this `model_type`.
    pub fn find(name: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|f| f.name == name)
    }

    /// That of a shape which only says whether queries and keys are normed.
    pub fn with_qk_norm(qk_norm: bool) -> &'static Family {
        FAMILIES.iter().find(|f| f.qk_norm == qk_norm).expect("there are both")
    }

    /// What this family calls a key of config.json.
    pub fn key<'a>(&self, key: &'a str) -> &'a str {
        self.keys.iter().find(|k| k.0 == key).map_or(key, |k| k.1)
    }

    /// Why adapters and four-bit weights are not known for this family, if so.
    pub fn without_adapters(&self) -> Option<&'static str> {
        match (self.joint, self.mixer) {
            (true, _) => Some("has one matrix for q, k and v"),
            (_, Mixer::Mamba2) => Some("has state-space layers"),
            _ => None,
        }
    }

    /// Names of all, for messages.
    pub fn names() -> String {
        FAMILIES.iter().map(|f| f.name).collect::<Vec<_>>().join(", ")
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Family) -> bool {
        self.name == other.name
    }
}

impl std::fmt::Debug for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.name)
    }
}
