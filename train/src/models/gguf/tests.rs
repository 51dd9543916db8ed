//! What can be checked without llama.cpp; `peers/gguf_check.py` has the rest.

use super::file::Meta;
use super::*;
use serde_json::{Value, json};

const GPT2_SPLIT: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

fn table(value: Value) -> Table {
    match value {
        Value::Object(table) => table,
        other => panic!("{other} is no table"),
    }
}

/// A byte-level tokenizer of three letters, a merge and the end of a text.
fn byte_level() -> Value {
    json!({
        "added_tokens": [{ "id": 4, "content": "<|endoftext|>", "special": true }, { "id": 5, "content": "<think>", "special": false }],
        "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false },
        "post_processor": { "type": "ByteLevel" },
        "model": { "type": "BPE", "vocab": { "a": 0, "b": 1, "c": 2, "ab": 3 }, "merges": ["a b"] },
    })
}

/// SentencePiece's: bytes from id 3 on, then characters, then what they merge to.
fn sentencepiece(tokens: &[&str], merges: Value) -> Value {
    let all = ["<unk>", "<s>", "</s>"].into_iter().map(String::from).chain((0..256).map(|b| format!("<0x{b:02X}>")));
    let vocab: Table = all.chain(tokens.iter().map(|t| t.to_string())).zip(0..).map(|(t, i)| (t, json!(i))).collect();
    let special = |id: usize, content: &str| json!({ "id": id, "content": content, "special": true });
    json!({
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "▁" }, { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
        ] },
        "post_processor": { "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<s>" } }, { "Sequence": { "id": "A" } }] },
        "model": { "type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "vocab": vocab, "merges": merges },
    })
}

fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 6, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "tie_word_embeddings": true, "eos_token_id": 4,
    })
}

fn gpt2() -> Value {
    json!({
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 8, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 8,
        "eos_token_id": 4,
    })
}

fn set(mut value: Value, pointer: &str, to: Value) -> Value {
    let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
    value.pointer_mut(parent).expect("the parent is there")[key] = to;
    value
}

fn llama_weights() -> Vec<(String, Vec<usize>)> {
    let layer = [
        ("input_layernorm", vec![8]),
        ("self_attn.q_proj", vec![8, 8]),
        ("self_attn.k_proj", vec![4, 8]),
        ("self_attn.v_proj", vec![4, 8]),
        ("self_attn.o_proj", vec![8, 8]),
        ("post_attention_layernorm", vec![8]),
        ("mlp.gate_proj", vec![6, 8]),
        ("mlp.up_proj", vec![6, 8]),
        ("mlp.down_proj", vec![8, 6]),
    ];
    let mut all = vec![("model.embed_tokens.weight".to_string(), vec![8, 8]), ("model.norm.weight".to_string(), vec![8])];
    all.extend(layer.map(|(name, shape)| (format!("model.layers.0.{name}.weight"), shape)));
    all
}

struct Case {
    config: Table,
    tokenizer: Table,
    tokenizer_config: Option<Table>,
    generation_config: Option<Table>,
    end: Option<u32>,
}

fn case(config: Value, tokenizer: Value) -> Case {
    Case { config: table(config), tokenizer: table(tokenizer), tokenizer_config: None, generation_config: None, end: None }
}

impl Case {
    fn with_end(self, end: u32) -> Case {
        Case { end: Some(end), ..self }
    }

    fn plan(&self, weights: &[(String, Vec<usize>)], kind: Type) -> Result<Plan, GgufError> {
        let model = Model {
            name: "test",
            config: &self.config,
            tokenizer: Tokenizer::Json(&self.tokenizer),
            tokenizer_config: self.tokenizer_config.as_ref(),
            generation_config: self.generation_config.as_ref(),
            end: self.end,
            chat_template: Some("{{ messages }}"),
        };
        Plan::new(&model, weights, kind)
    }

    /// The tokenizer alone, with an embedding of so many rows.
    fn header(&self, rows: usize) -> Result<(Header, Vec<String>), GgufError> {
        let (mut header, mut notes) = (Header::default(), vec![]);
        let model = Model {
            name: "test",
            config: &self.config,
            tokenizer: Tokenizer::Json(&self.tokenizer),
            tokenizer_config: self.tokenizer_config.as_ref(),
            generation_config: self.generation_config.as_ref(),
            end: self.end,
            chat_template: None,
        };
        tokenizer::describe(&model, rows, &mut header, &mut notes)?;
        Ok((header, notes))
    }
}

fn get<'a>(header: &'a Header, key: &str) -> Option<&'a Meta> {
    header.get(&format!("tokenizer.ggml.{key}"))
}

/// The numbers of each weight count from 0.
fn written(plan: &Plan) -> Vec<u8> {
    let mut out = vec![];
    let sizes: BTreeMap<String, usize> = plan
        .tensors
        .iter()
        .filter_map(|t| match &t.source {
            tensors::Source::Weight { theirs, .. } => Some((theirs.clone(), t.shape.iter().product())),
            tensors::Source::Computed(_) => None,
        })
        .collect();
    plan.write(&mut out, |name| Ok::<_, String>((0..sizes[name]).map(|i| i as f32).collect())).unwrap();
    assert_eq!(out.len() as u64, plan.size());
    out
}

/// The numbers of a tensor in an f32 file whose tensors lie one behind the other.
fn numbers(plan: &Plan, file: &[u8], ours: &str) -> Vec<f32> {
    let bytes = |t: &Tensor| t.shape.iter().product::<usize>() * 4;
    let data: usize = plan.tensors.iter().map(|t| bytes(t).next_multiple_of(32)).sum();
    let mut at = file.len() - data;
    for t in &plan.tensors {
        if t.ours == ours {
            return file[at..at + bytes(t)].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        }
        at += bytes(t).next_multiple_of(32);
    }
    panic!("no tensor {ours}");
}

#[test]
fn a_file_begins_as_the_format_says() {
    let plan = case(llama(), byte_level()).plan(&llama_weights(), Type::F32).unwrap();
    let file = written(&plan);
    assert_eq!(&file[..8], b"GGUF\x03\0\0\0");
    assert_eq!(u64::from_le_bytes(file[8..16].try_into().unwrap()), 11);
    // The first key: its length, itself, type 8 (text), the text.
    assert_eq!(&file[24..32], 20u64.to_le_bytes());
    assert_eq!(&file[32..52], b"general.architecture");
    assert_eq!(&file[52..69], b"\x08\0\0\0\x05\0\0\0\0\0\0\0llama");
    assert!(file.len().is_multiple_of(32));
    // Dimensions are the other way round: 8 columns, then 6 rows; type 0.
    let at = file.windows(21).position(|w| w == b"blk.0.ffn_gate.weight").unwrap() + 21;
    let dims = [&2u32.to_le_bytes()[..], &8u64.to_le_bytes(), &6u64.to_le_bytes(), &0u32.to_le_bytes()].concat();
    assert_eq!(&file[at..at + 24], dims);
}

/// Every key that llama.cpp reads of each architecture; no two sizes are the same.
#[test]
fn the_header_says_all_that_the_architecture_is() {
    let described = |config: Value| {
        let (mut header, mut notes) = (Header::default(), vec![]);
        let config = Config::parse(&table(config)).unwrap();
        config.describe(&mut header, &mut notes);
        assert!(notes.is_empty(), "{notes:?}");
        header.below(&format!("{}.", config.arch)).into_iter().map(|(k, v)| (k.to_string(), v.clone())).collect::<Vec<_>>()
    };
    let whole = |key: &str, n: u32| (key.to_string(), Meta::U32(n));
    let number = |key: &str, x: f32| (key.to_string(), Meta::F32(x));
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 17, "rms_norm_eps": 2e-5,
        "max_position_embeddings": 96, "rope_theta": 1234.5,
    });
    let llama = vec![
        whole("block_count", 3),
        whole("context_length", 96),
        whole("embedding_length", 12),
        whole("feed_forward_length", 17),
        whole("attention.head_count", 4),
        whole("vocab_size", 11),
        whole("attention.head_count_kv", 2),
        whole("attention.key_length", 10),
        whole("attention.value_length", 10),
        number("attention.layer_norm_rms_epsilon", 2e-5),
        whole("rope.dimension_count", 10),
        number("rope.freq_base", 1234.5),
    ];
    assert_eq!(described(config.clone()), llama);
    let linear = [("rope.scaling.type".to_string(), Meta::text("linear")), number("rope.scaling.factor", 2.5)];
    let scaled = set(config, "/rope_scaling", json!({ "rope_type": "linear", "factor": 2.5 }));
    assert_eq!(described(scaled), [&llama[..], &linear].concat());
    let config = json!({
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 11, "n_embd": 12, "n_layer": 3, "n_head": 4,
        "n_positions": 96, "layer_norm_epsilon": 2e-5,
    });
    let gpt2 = [
        whole("block_count", 3),
        whole("context_length", 96),
        whole("embedding_length", 12),
        whole("feed_forward_length", 48),
        whole("attention.head_count", 4),
        whole("vocab_size", 11),
        number("attention.layer_norm_epsilon", 2e-5),
    ];
    assert_eq!(described(config.clone()), gpt2);
    assert_eq!(described(set(config, "/n_inner", json!(19)))[3], whole("feed_forward_length", 19));
}

/// ggml's numbers: enum ggml_type and enum llama_ftype.
#[test]
fn types_have_ggmls_numbers() {
    assert_eq!(Type::ALL.map(Type::name), ["f32", "f16", "bf16", "q8_0", "q4_0"]);
    assert_eq!(Type::ALL.map(Type::number), [0, 1, 30, 8, 2]);
    assert_eq!(Type::ALL.map(Type::file_type), [0, 1, 32, 7, 2]);
    let plan = case(llama(), byte_level()).plan(&llama_weights(), Type::Bf16).unwrap();
    assert_eq!(plan.header.get("general.file_type"), Some(&Meta::U32(32)));
    // A matrix is what was asked for, a norm is not; both say so behind their dimensions.
    let file = written(&plan);
    let type_of = |name: &str, dims: usize| {
        let at = file.windows(name.len()).position(|w| w == name.as_bytes()).unwrap() + name.len() + 4 + 8 * dims;
        u32::from_le_bytes(file[at..at + 4].try_into().unwrap())
    };
    assert_eq!((type_of("blk.0.ffn_gate.weight", 2), type_of("blk.0.attn_norm.weight", 1)), (30, 0));
}

/// 1 + 1 / 256 is half way between two numbers of bf16, and so is 1 + 3 / 256: to even, down and up.
#[test]
fn bf16_is_rounded_to_the_nearest() {
    let bytes = |x: f32| {
        let mut out = vec![];
        Type::Bf16.encode(&[x], &mut out).unwrap();
        out
    };
    assert_eq!((bytes(1.0 + 1.0 / 256.0), bytes(1.0 + 3.0 / 256.0)), (vec![0x80, 0x3f], vec![0x82, 0x3f]));
    assert_eq!((bytes(1.004), bytes(-1.004), bytes(1.003)), (vec![0x81, 0x3f], vec![0x81, 0xbf], vec![0x80, 0x3f]));
}

/// Worked out by hand: heads of 4 rows; a pair is a head's rows 0 and 2, then 1 and 3.
#[test]
fn rows_that_rope_rotates_together_lie_together_in_llama() {
    let mut weights = llama_weights();
    weights.push(("model.layers.0.self_attn.q_proj.bias".into(), vec![8]));
    let plan = case(llama(), byte_level()).plan(&weights, Type::F32).unwrap();
    let file = written(&plan);
    let order = [0, 2, 1, 3, 4, 6, 5, 7];
    let firsts: Vec<usize> = numbers(&plan, &file, "blk.0.attn_q.weight").chunks(8).map(|row| row[0] as usize / 8).collect();
    assert_eq!(firsts, order);
    assert_eq!(numbers(&plan, &file, "blk.0.attn_q.bias"), order.map(|i| i as f32));
    assert_eq!(numbers(&plan, &file, "blk.0.attn_v.weight")[8..10], [8.0, 9.0]);
}

#[test]
fn gpt2_is_transposed_and_its_names_may_have_a_prefix() {
    let mut weights = vec![("wte.weight".to_string(), vec![8, 4]), ("wpe.weight".into(), vec![8, 4])];
    for (name, shape) in [("attn.c_attn", [4, 12]), ("attn.c_proj", [4, 4]), ("mlp.c_fc", [4, 16]), ("mlp.c_proj", [16, 4])] {
        weights.extend([(format!("h.0.{name}.weight"), shape.to_vec()), (format!("h.0.{name}.bias"), vec![shape[1]])]);
    }
    for name in ["h.0.ln_1", "h.0.ln_2", "ln_f"] {
        weights.extend([(format!("{name}.weight"), vec![4]), (format!("{name}.bias"), vec![4])]);
    }
    weights.push(("h.0.attn.bias".into(), vec![1, 1, 8, 8]));
    let prefixed: Vec<_> = weights.iter().map(|(n, s)| (format!("transformer.{n}"), s.clone())).collect();
    for weights in [&weights, &prefixed] {
        let plan = case(gpt2(), byte_level()).plan(weights, Type::F16).unwrap();
        assert_eq!(plan.types(), BTreeMap::from([("f16", 5), ("f32", 11)]), "positions, norms and biases stay in f32");
        let plan = case(gpt2(), byte_level()).plan(weights, Type::F32).unwrap();
        let file = written(&plan);
        assert_eq!(numbers(&plan, &file, "blk.0.attn_qkv.weight")[..8], [0.0, 12.0, 24.0, 36.0, 1.0, 13.0, 25.0, 37.0]);
    }
}

/// By hand, from the definitions of the formats.
#[test]
fn blocks_are_what_the_formats_say() {
    let mut row = [0.0f32; 32];
    (row[0], row[1], row[2], row[16], row[17]) = (-8.0, 7.0, 0.4, 4.0, 100.0 / 127.0);
    let mut q4 = vec![];
    Type::Q4_0.encode(&row, &mut q4).unwrap();
    // d = 1 (0x3c00), q = round(x) + 8: 0, 15, 8 low; 12, 9 high.
    assert_eq!(q4[..5], [0x00, 0x3c, 0xc0, 0x9f, 0x88]);
    assert_eq!(q4.len(), Type::Q4_0.bytes(32));
    let mut q8 = vec![];
    let row: Vec<f32> = (0..32).map(|i| if i == 3 { -127.0 } else { i as f32 + 0.5 }).collect();
    Type::Q8_0.encode(&row, &mut q8).unwrap();
    // d = 1; halves away from zero.
    assert_eq!(q8[..6], [0x00, 0x3c, 1, 2, 3, -127i8 as u8]);
    assert_eq!(q8.len(), Type::Q8_0.bytes(32));
    let mut zeros = vec![];
    Type::Q4_0.encode(&[0.0; 32], &mut zeros).unwrap();
    assert!(zeros[2..].iter().all(|b| *b == 0x88), "8 is nothing");
    let mut halves = vec![];
    assert_eq!(Type::F16.encode(&[65504.0], &mut halves), Ok(()));
    assert_eq!(Type::F16.encode(&[1e5], &mut halves), Err(1e5));
    assert!(Type::Bf16.encode(&[1.0, f32::NAN], &mut halves).is_err());
    assert_eq!("q8_0".parse(), Ok(Type::Q8_0));
    assert!("q5_1".parse::<Type>().unwrap_err().contains("f32, f16, bf16, q8_0, q4_0"));
}

#[test]
fn four_bits_are_eight_where_the_logits_are_made_and_short_rows_are_f16() {
    let config = set(set(llama(), "/hidden_size", json!(64)), "/intermediate_size", json!(40));
    let widen = |(name, shape): (String, Vec<usize>)| {
        let to = |d: usize| {
            if d == 6 {
                40
            } else if name.contains("embed") || d == 4 {
                d * 8
            } else {
                64
            }
        };
        let shape = if name.contains("embed") { vec![8, 64] } else { shape.into_iter().map(to).collect() };
        (name, shape)
    };
    let mut weights: Vec<_> = llama_weights().into_iter().map(widen).collect();
    let kinds = |weights: &[(String, Vec<usize>)]| {
        let plan = case(config.clone(), byte_level()).plan(weights, Type::Q4_0).unwrap();
        let of = |name: &str| plan.tensors.iter().find(|t| t.ours == name).map(|t| t.kind);
        (of("token_embd.weight"), of("output.weight"), of("blk.0.ffn_down.weight"), of("blk.0.attn_norm.weight"), plan.notes.join("\n"))
    };
    let (embedding, head, down, norm, notes) = kinds(&weights);
    assert_eq!((embedding, head, down, norm), (Some(Type::Q8_0), None, Some(Type::F16), Some(Type::F32)));
    assert!(notes.contains("1 tensors are F16, not q4_0") && notes.contains("blk.0.ffn_down.weight"), "{notes}");
    weights.push(("lm_head.weight".into(), vec![8, 64]));
    let (embedding, head, ..) = kinds(&weights);
    assert_eq!((embedding, head), (Some(Type::Q4_0), Some(Type::Q8_0)));
}

/// transformers' _compute_llama3_parameters for theta 10000, d = 8, factor 8, low 1, high 4, original 64 gives
/// [1, 0.1, 0.01, 0.001] / [1, 6.3 .. 8, 8, 8]: with 2 pi / 0.1 = 62.8 of 64 the second is just above `low`.
#[test]
fn llama3_divides_low_frequencies() {
    let scaling = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64 });
    let config = set(set(set(llama(), "/hidden_size", json!(16)), "/rope_scaling", scaling.clone()), "/head_dim", json!(8));
    let factors = Config::parse(&table(config)).unwrap().rope_factors().unwrap();
    let kept = (64.0 * 0.1 / std::f64::consts::TAU - 1.0) / 3.0;
    let expected = [1.0, 1.0 / ((1.0 - kept) / 8.0 + kept), 8.0, 8.0];
    assert!(factors.iter().zip(expected).all(|(a, b)| (*a as f64 - b).abs() < 1e-5), "{factors:?} {expected:?}");
    // They are a tensor of the file, which has the chat template beside it.
    let config = set(llama(), "/rope_scaling", scaling.clone());
    let plan = case(config.clone(), byte_level()).plan(&llama_weights(), Type::F32).unwrap();
    let own = Config::parse(&table(config)).unwrap().rope_factors().unwrap();
    assert_eq!(numbers(&plan, &written(&plan), "rope_freqs.weight"), own);
    assert_eq!(plan.header.get("tokenizer.chat_template"), Some(&Meta::text("{{ messages }}")));
    let plain = case(llama(), byte_level()).plan(&llama_weights(), Type::F32).unwrap();
    assert!(plain.tensors.iter().all(|t| t.ours != "rope_freqs.weight"));
    let mut qwen = set(set(llama(), "/rope_scaling", scaling), "/model_type", json!("qwen2"));
    qwen["architectures"] = json!(["Qwen2ForCausalLM"]);
    assert!(Config::parse(&table(qwen)).unwrap_err().to_string().contains("'qwen2' cannot do"));
}

#[test]
fn a_window_is_written_and_noted_where_it_is_narrower_than_the_context() {
    let mistral = |window: Value| {
        let config = set(set(llama(), "/architectures", json!(["MistralForCausalLM"])), "/model_type", json!("mistral"));
        let plan = case(set(config, "/sliding_window", window), byte_level()).plan(&llama_weights(), Type::F32).unwrap();
        (plan.header.get("llama.attention.sliding_window").cloned(), plan.notes.len())
    };
    assert_eq!(mistral(json!(16)), (Some(Meta::U32(16)), 1));
    assert_eq!([mistral(json!(64)), mistral(Value::Null)], [(None, 0), (None, 0)]);
}

#[test]
fn byte_level_tokens_have_types_and_holes_are_filled() {
    let (header, notes) = case(llama(), byte_level()).header(8).unwrap();
    let texts = |all: &[&str]| Meta::Texts(all.iter().map(|t| t.to_string()).collect());
    assert_eq!(get(&header, "model"), Some(&Meta::text("gpt2")));
    assert_eq!(get(&header, "pre"), Some(&Meta::text("gpt-2")));
    assert_eq!(get(&header, "tokens"), Some(&texts(&["a", "b", "c", "ab", "<|endoftext|>", "<think>", "[PAD6]", "[PAD7]"])));
    assert_eq!(get(&header, "token_type"), Some(&Meta::I32s(vec![1, 1, 1, 1, 3, 4, 5, 5])));
    assert_eq!(get(&header, "merges"), Some(&texts(&["a b"])));
    assert_eq!((get(&header, "eos_token_id"), get(&header, "bos_token_id")), (Some(&Meta::U32(4)), None));
    assert_eq!(get(&header, "add_bos_token"), Some(&Meta::Bool(false)));
    assert!(notes.is_empty(), "{notes:?}");
}

#[test]
fn every_byte_is_a_token_of_its_own() {
    let v = vocabulary::Vocabulary::bytes(300).unwrap();
    assert_eq!((v.tokens[0].as_str(), v.tokens[32].as_str(), v.tokens[65].as_str()), ("Ā", "Ġ", "A"));
    assert_eq!(
        (v.tokens[0x7f].as_str(), v.tokens[0xad].as_str(), v.tokens[255].as_str(), v.tokens[299].as_str()),
        ("ġ", "Ń", "ÿ", "[PAD299]")
    );
    assert!(vocabulary::Vocabulary::bytes(255).unwrap_err().to_string().contains("256 bytes"));
}

#[test]
fn the_regex_and_ignore_merges_name_the_split() {
    let split = |regex: &str| json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false });
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": false });
    let sequence = |parts: Vec<Value>| json!({ "type": "Sequence", "pretokenizers": parts });
    let llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let digits = json!({ "type": "Digits", "individual_digits": true });
    let gpt2 = json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": true });
    let pre = |value: Value, ignore_merges: bool| pretokenizer::name(&table(json!({ "pre_tokenizer": value })), ignore_merges);
    assert_eq!(pre(gpt2.clone(), false), Ok("gpt-2"));
    assert_eq!(pre(sequence(vec![split(GPT2_SPLIT), bytes.clone()]), false), Ok("gpt-2"));
    assert_eq!(pre(sequence(vec![digits, gpt2]), false), Ok("smollm"));
    assert_eq!(pre(sequence(vec![split(llama3), bytes.clone()]), true), Ok("llama-bpe"));
    assert_eq!(pre(sequence(vec![split(llama3), bytes.clone()]), false), Ok("smaug-bpe"));
    assert_eq!(pre(sequence(vec![split(&llama3.replace("{1,3}", "")), bytes.clone()]), false), Ok("qwen2"));
    let said = pre(sequence(vec![split(r"\w+"), bytes]), false).unwrap_err();
    assert!(said.contains(r"\\w+") && said.contains("llama-bpe"), "{said}");
    for refused in [json!({ "type": "ByteLevel" }), json!({ "type": "Whitespace" }), Value::Null] {
        assert!(pre(refused.clone(), false).is_err(), "{refused}");
    }
}

/// "abc" merges by either pair; the scores fall in the order of the merges.
#[test]
fn sentencepiece_scores_follow_the_merges() {
    let merges = json!([["a", "b"], ["b", "c"], ["ab", "c"], ["a", "bc"]]);
    let tokens = ["▁", "a", "b", "c", "bc", "abc", "ab"];
    let (header, notes) = case(set(llama(), "/eos_token_id", json!(2)), sentencepiece(&tokens, merges)).header(270).unwrap();
    assert_eq!(get(&header, "model"), Some(&Meta::text("llama")));
    let Some(Meta::F32s(scores)) = get(&header, "scores") else { panic!("no scores") };
    let score = |token: &str| scores[259 + tokens.iter().position(|t| *t == token).unwrap()];
    assert!(score("ab") > score("bc") && score("bc") > score("abc") && score("abc") > score("a"), "{:?}", &scores[259..]);
    let Some(Meta::I32s(kinds)) = get(&header, "token_type") else { panic!("no types") };
    assert_eq!((kinds[0], kinds[1], kinds[3], kinds[259], kinds[266]), (2, 3, 6, 1, 5));
    assert_eq!(get(&header, "add_space_prefix"), Some(&Meta::Bool(true)));
    assert_eq!((get(&header, "add_bos_token"), get(&header, "bos_token_id")), (Some(&Meta::Bool(true)), Some(&Meta::U32(1))));
    assert!(notes.is_empty(), "{notes:?}");
    // Without (a, bc) llama.cpp would merge it nevertheless.
    let (_, notes) =
        case(set(llama(), "/eos_token_id", json!(2)), sentencepiece(&tokens, json!(["a b", "b c", "ab c"]))).header(270).unwrap();
    assert!(notes[0].contains("1 tokens have pairs that 'merges' does not list, 0 have"), "{notes:?}");
}

#[test]
fn further_ends_of_a_reply_find_room() {
    let special = [6, 7].map(|id| json!({ "id": id, "content": format!("<end-{id}>"), "special": true }));
    let mut tokens = byte_level();
    tokens["added_tokens"].as_array_mut().unwrap().extend(special);
    let mut c = case(llama(), tokens);
    c.tokenizer_config = Some(table(json!({ "eos_token": { "content": "<|endoftext|>" }, "pad_token": "<end-7>" })));
    c.generation_config = Some(table(json!({ "eos_token_id": [4, 5, 6, 7] })));
    let (header, notes) = c.header(8).unwrap();
    let ids = ["eos", "padding", "eot", "eom"].map(|role| get(&header, &format!("{role}_token_id")).cloned());
    assert_eq!(ids, [4, 7, 5, 6].map(|id| Some(Meta::U32(id))));
    assert!(notes[0].contains("7 is left out"), "{notes:?}");
    let (header, notes) = case(set(llama(), "/pad_token_id", json!(-1)), byte_level()).header(8).unwrap();
    assert_eq!((get(&header, "padding_token_id"), notes), (None, vec![]));
    // Where no file names an end, the caller may.
    let end = |end| case(set(llama(), "/eos_token_id", Value::Null), byte_level()).with_end(end).header(8);
    assert_eq!(get(&end(5).unwrap().0, "eos_token_id"), Some(&Meta::U32(5)));
    assert!(end(8).err().unwrap().to_string().contains("is 8; ids go up to 7"));
}

/// As everywhere in kiln: a number that was left from another vocabulary, or an ordinary word, is no special token.
#[test]
fn only_added_tokens_begin_end_and_pad() {
    for (key, value) in
        [("/bos_token_id", json!(2)), ("/bos_token_id", json!(50256)), ("/bos_token", json!("ab")), ("/pad_token_id", json!(0))]
    {
        let (header, notes) = case(set(llama(), key, value.clone()), byte_level()).header(8).unwrap();
        assert_eq!((get(&header, "bos_token_id"), get(&header, "padding_token_id")), (None, None), "{key} {value}");
        assert_eq!(notes, [format!("not taken: config.json has {} = {value}, which is no added token", &key[1..])]);
    }
    let (header, notes) = case(set(llama(), "/bos_token_id", json!(4)), byte_level()).header(8).unwrap();
    assert_eq!((get(&header, "bos_token_id"), notes), (Some(&Meta::U32(4)), vec![]));
    // The files are asked in kiln's order.
    let mut c = case(llama(), byte_level());
    c.generation_config = Some(table(json!({ "eos_token_id": 5 })));
    c.tokenizer_config = Some(table(json!({ "eos_token": "<|endoftext|>" })));
    assert_eq!(get(&c.header(8).unwrap().0, "eos_token_id"), Some(&Meta::U32(5)));
}

/// Each names the thing and its value.
#[test]
fn what_is_not_known_is_refused_by_name() {
    let configs = [
        ("/architectures", json!(["MixtralForCausalLM"]), "MixtralForCausalLM"),
        ("/model_type", json!("olmo"), "olmo"),
        ("/hidden_act", json!("gelu"), "'hidden_act' is \"gelu\""),
        ("/num_hidden_layers", json!(-1), "'num_hidden_layers' is -1"),
        ("/num_hidden_layers", json!(5000), "5000 layers"),
        ("/pad_token_id", json!([true]), "its pad_token_id is true"),
        ("/num_attention_heads", json!(3), "hidden_size = 8 does not divide by num_attention_heads = 3"),
        ("/head_dim", json!(3), "head_dim = 3 is odd"),
        ("/rope_scaling", json!({ "rope_type": "yarn", "factor": 2.0 }), "\"yarn\""),
        ("/quantization_config", json!({}), "quantization_config"),
        ("/vocab_size", json!(5), "\"<think>\" has id 5"),
        ("/eos_token_id", json!(9), "names no added token as 'eos_token'"),
        ("/eos_token_id", Value::Null, "names no added token as 'eos_token'"),
        ("/num_hidden_layers", json!(2), "'model.layers.1.input_layernorm.weight' is missing"),
        ("/intermediate_size", json!(7), "is [6, 8], but config.json makes it [7, 8]"),
        ("/tie_word_embeddings", json!(false), "'lm_head.weight' is missing"),
    ];
    let small = |weights: Vec<(String, Vec<usize>)>, rows: usize| -> Vec<(String, Vec<usize>)> {
        weights.into_iter().map(|(n, s)| if n.contains("embed") { (n, vec![rows, 8]) } else { (n, s) }).collect()
    };
    for (key, value, said) in configs {
        let rows = if key == "/vocab_size" { 5 } else { 8 };
        let error =
            case(set(llama(), key, value), byte_level()).plan(&small(llama_weights(), rows), Type::F32).err().expect(said).to_string();
        assert!(error.contains(said), "{error} has no {said}");
    }
    let extra = [llama_weights(), vec![("model.layers.0.self_attn.q_norm.weight".into(), vec![4])]].concat();
    let error = case(llama(), byte_level()).plan(&extra, Type::F32).err().unwrap().to_string();
    assert!(error.contains("'model.layers.0.self_attn.q_norm.weight' is not known"), "{error}");
}

#[test]
fn tokenizers_that_are_not_known_are_refused_by_name() {
    let roberta = json!({ "type": "RobertaProcessing" });
    let two = json!({ "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "a" } }, { "SpecialToken": { "id": "b" } }] });
    let other = json!({ "type": "TemplateProcessing", "single": [{ "Sequence": { "id": "A" } }, { "SpecialToken": { "id": "a" } }] });
    let tokenizers = [
        ("/model/type", json!("Unigram"), "Unigram"),
        ("/model/merges", json!(["a c"]), "\"a c\""),
        ("/model/merges", json!([["a"]]), "[\"a\"]"),
        ("/model/end_of_word_suffix", json!("</w>"), "end_of_word_suffix \"</w>\""),
        ("/model/vocab/c", json!(1), "id 1 to two tokens"),
        ("/model/byte_fallback", json!(true), "byte_fallback"),
        ("/normalizer", json!({ "type": "Lowercase" }), "Lowercase"),
        ("/post_processor", roberta, "RobertaProcessing"),
        ("/post_processor", two, "one token before it and one behind"),
        ("/post_processor", other, "adds \"a\", but the eos token is \"<|endoftext|>\""),
        ("/added_tokens", json!([{ "id": 7, "content": "a" }]), "\"a\" has id 0 in the vocabulary and 7"),
        ("/added_tokens", json!([{ "content": "x" }]), "has no content or no id"),
    ];
    for (key, value, said) in tokenizers {
        let error = case(llama(), set(byte_level(), key, value)).header(8).err().expect(said).to_string();
        assert!(error.contains(said), "{error} has no {said}");
    }
    let lacking = set(sentencepiece(&["▁"], json!([])), "/model/vocab/<0x41>", json!(300));
    let lacking = serde_json::from_str(&lacking.to_string().replace("<0x41>", "<0xXX>")).unwrap();
    let error = case(llama(), lacking).header(400).err().unwrap().to_string();
    assert!(error.contains("<0x41>"), "{error}");
}

#[test]
fn numbers_that_do_not_fit_end_the_writing_with_their_weight() {
    let plan = case(llama(), byte_level()).plan(&llama_weights(), Type::F16).unwrap();
    let size = |name: &str| llama_weights().iter().find(|(n, _)| n == name).unwrap().1.iter().product::<usize>();
    let error = |value: f32| plan.write(&mut std::io::sink(), |name| Ok::<_, String>(vec![value; size(name)])).unwrap_err().to_string();
    assert!(error(1e6).contains("'model.embed_tokens.weight' holds 1e6, which is too large for f16"), "{}", error(1e6));
    assert!(error(f32::NAN).contains("holds NaN"));
    let failed = plan.write(&mut std::io::sink(), |_| Err("the disk is gone")).unwrap_err().to_string();
    assert!(failed.contains("cannot read weight 'model.embed_tokens.weight': the disk is gone"), "{failed}");
    let short = plan.write(&mut std::io::sink(), |_| Ok::<_, String>(vec![])).unwrap_err().to_string();
    assert!(short.contains("came with 0 numbers, not 64"), "{short}");
}
