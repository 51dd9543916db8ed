//! Model folders and adapters: read against PyTorch's numbers, written, merged, and refused where anything is wrong with them.

use crate::common::{checkpoint, kiln, names, text};
use engine::{Cpu, DType, Data, Device, Meta, Recorder, Store, Switches};
use kiln::checkpoint::load_safetensors;
use kiln::golden::Golden;
use kiln::models::decoder::{Base, Decoder, Places, Rows};
use kiln::models::{Adapter, Family, Folder, Lora, RopeScaling, Shape, Target, Weight, write_adapter, write_weights};
use kiln::recipe::Session;
use kiln::recipes::polychromic::Replies;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(n, d, s, b)| (n.clone(), TensorView::new(*d, s.clone(), b).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// As transformers writes it for the golden file's model.
fn config() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "float32", "transformers_version": "5.22.2", "use_cache": true,
        "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": null, "eos_token_id": 1, "hidden_act": "silu",
        "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 64, "max_position_embeddings": 64, "max_window_layers": 28, "sliding_window": null, "use_sliding_window": false,
        "layer_types": ["full_attention", "full_attention"], "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}
    })
}

/// As peft writes it.
fn adapter_config() -> Value {
    json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "peft_version": "0.21.2", "base_model_name_or_path": "somewhere", "revision": null,
        "r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "bias": "none", "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights": true,
        "target_modules": ["v_proj", "q_proj", "up_proj", "down_proj", "k_proj", "gate_proj", "o_proj"],
        "alpha_pattern": {}, "rank_pattern": {}, "modules_to_save": null, "layers_pattern": null, "layers_to_transform": null,
        "use_rslora": false, "use_dora": false, "megatron_config": null, "megatron_core": "megatron.core", "qalora_group_size": 16, "loftq_config": {}
    })
}

fn golden() -> Golden {
    Golden::open(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../reference/golden/polychromic.safetensors")).unwrap()
}

/// The golden file's weights by transformers' and peft's names, which stand here once more.
fn golden_tensors() -> (Tensors, Tensors) {
    let file = golden();
    let (mut base, mut adapter) = (vec![], vec![]);
    for name in file.names().iter().filter_map(|n| n.strip_prefix("param/")) {
        let module = |m: &str| match m {
            "gate" | "up" | "down" => format!("mlp.{m}_proj"),
            m => format!("self_attn.{m}_proj"),
        };
        let parts: Vec<&str> = name.split('.').collect();
        let theirs = match parts[..] {
            ["embedding"] => "model.embed_tokens.weight".to_string(),
            ["norm"] => "model.norm.weight".into(),
            ["layers", l, "attn_norm"] => format!("model.layers.{l}.input_layernorm.weight"),
            ["layers", l, "mlp_norm"] => format!("model.layers.{l}.post_attention_layernorm.weight"),
            ["layers", l, norm @ ("q_norm" | "k_norm")] => format!("model.layers.{l}.self_attn.{norm}.weight"),
            ["layers", l, m, "weight"] => format!("model.layers.{l}.{}.weight", module(m)),
            ["layers", l, m, "lora_a"] => format!("base_model.model.model.layers.{l}.{}.lora_A.weight", module(m)),
            ["layers", l, m, "lora_b"] => format!("base_model.model.model.layers.{l}.{}.lora_B.weight", module(m)),
            _ => panic!("{name}"),
        };
        let numbers = file.f32(&format!("param/{name}")).unwrap();
        let tensor = (theirs, Dtype::F32, file.shape(&format!("param/{name}")).unwrap(), bytemuck::cast_slice(&numbers).to_vec());
        if tensor.0.contains("lora_") { adapter.push(tensor) } else { base.push(tensor) }
    }
    (base, adapter)
}

/// A model's folder in one file, or in several.
fn folder(dir: &Path, config: &Value, tensors: &Tensors, files: usize) -> PathBuf {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    if files == 1 {
        write(&dir.join("model.safetensors"), tensors);
        return dir.into();
    }
    let mut map = serde_json::Map::new();
    for (i, part) in tensors.chunks(tensors.len().div_ceil(files)).enumerate() {
        let name = format!("model-{:05}-of-{files:05}.safetensors", i + 1);
        write(&dir.join(&name), &part.to_vec());
        map.extend(part.iter().map(|t| (t.0.clone(), name.clone().into())));
    }
    fs::write(dir.join("model.safetensors.index.json"), json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string()).unwrap();
    dir.into()
}

fn adapter(dir: &Path, config: &Value, tensors: &Tensors) -> PathBuf {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("adapter_config.json"), config.to_string()).unwrap();
    write(&dir.join("adapter_model.safetensors"), tensors);
    dir.into()
}

fn session() -> Session {
    Session::new(&Device::cpu(Cpu::new(2)), &Switches::default(), 0)
}

#[test]
fn folders_and_adapters_give_the_numbers_of_the_model_they_hold() {
    let dir = tempfile::tempdir().unwrap();
    let file = golden();
    let (base, lora) = golden_tensors();
    let replies = file.shape("input/set_ids").unwrap();
    let ids = file.i32("input/set_ids").unwrap();
    let flags = |name: &str| file.f32(name).unwrap().iter().map(|&v| v != 0.0).collect::<Vec<bool>>();
    let reply: Vec<u8> = flags("input/set_reply").into_iter().map(u8::from).collect();
    let rows = Rows::padded(&flags("input/set_real"), replies[1]);
    let peft = adapter(&dir.path().join("peft"), &adapter_config(), &lora);
    // Older files have RoPE's settings beside each other.
    let mut older = config();
    older.as_object_mut().unwrap().remove("rope_parameters");
    older["rope_theta"] = 1e6.into();
    older["rope_scaling"] = Value::Null;
    for (i, (config, files)) in [(config(), 1), (older, 4)].iter().enumerate() {
        let path = folder(&dir.path().join(i.to_string()), config, &base, *files);
        let found = Folder::open(&path).unwrap();
        let adapter = Adapter::open(&peft, &found.shape, None).unwrap();
        assert_eq!(adapter.lora, Lora { rank: 4, alpha: 8.0, dropout: 0.05, targets: Target::ALL.to_vec() });
        let r = Recorder::new();
        let d = Decoder { shape: &found.shape, lora: Some(&adapter.lora), base: Base::Loaded, r: &r, rng: None };
        let fed = |name: &str, dtype| r.feed(name, &replies, dtype);
        let places = Places { position: fed("position", DType::I32), until: fed("until", DType::I32) };
        let sampled = Replies { ids: fed("ids", DType::I32), reply: fed("reply", DType::U8), places };
        r.output("log_prob", sampled.log_prob(&d));
        let mut s = session();
        s.load("log_prob", r.finish()).unwrap();
        found.load(&mut s.store).unwrap();
        adapter.load(&mut s.store).unwrap();
        let feeds = [
            ("ids", Data::I32(&ids)),
            ("reply", Data::U8(&reply)),
            ("position", Data::I32(&rows.position)),
            ("until", Data::I32(&rows.until)),
        ];
        s.run("log_prob", &feeds).unwrap();
        for (a, b) in s.read("log_prob", "log_prob").unwrap().iter().zip(file.f32("output/log_prob").unwrap()) {
            assert!((a - b).abs() < 1e-4, "{a} {b}");
        }
    }
}

/// From transformers 5.22, heads of 32.
#[test]
fn frequencies_are_scaled_as_transformers_scales_them() {
    let read = |rope: Value| {
        let dir = tempfile::tempdir().unwrap();
        let mut c = config();
        (c["architectures"], c["model_type"], c["head_dim"], c["rope_scaling"]) =
            (json!(["LlamaForCausalLM"]), "llama".into(), 32.into(), rope);
        c.as_object_mut().unwrap().remove("rope_parameters");
        // Where it is not said of which context a scaling is, it is the model's.
        c["max_position_embeddings"] = if c["rope_scaling"].get("original_max_position_embeddings").is_some() { 64 } else { 8192 }.into();
        c["rope_theta"] = if c["rope_scaling"]["rope_type"] == "llama3" { 500000.0.into() } else { 10000.0.into() };
        fs::write(dir.path().join("config.json"), c.to_string()).unwrap();
        Shape::read(&dir.path().join("config.json")).unwrap()
    };
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
    let silent = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
    let of_llama3 = [1.0, 4.403_666_3e-1, 3.211_446e-3, 5.248_46e-4, 7.784_655_5e-5, 5.677_088e-7];
    let linear = [0.25, 1.405_853_3e-1, 4.445_698_6e-3, 2.5e-3, 1.405_853_3e-3, 4.445_698_5e-5];
    for (rope, numbers) in [(llama3, of_llama3), (silent, of_llama3), (json!({"type": "linear", "factor": 4.0}), linear)] {
        let places = [0, 1, 7, 8, 9, 15];
        let got = read(rope).frequencies();
        assert_eq!(got.len(), 16);
        for (number, place) in numbers.iter().zip(places) {
            assert!((got[place] / number - 1.0f32).abs() < 2e-6, "{} {number}", got[place]);
        }
    }
}

#[test]
fn weights_of_every_type_arrive_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let (base, _) = golden_tensors();
    let numbers = |bytes: &[u8]| bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect::<Vec<f32>>();
    for (dtype, safe) in [(DType::BF16, Dtype::BF16), (DType::F16, Dtype::F16)] {
        let narrow: Tensors = base
            .iter()
            .map(|(n, _, s, b)| (n.clone(), safe, s.clone(), engine::cpu::converted(b, DType::F32, dtype).bytes().to_vec()))
            .collect();
        let found = Folder::open(&folder(&dir.path().join(dtype.name()), &config(), &narrow, 3)).unwrap();
        for pass in ["off", "auto"] {
            let switches = Switches::default().with("bf16", pass).unwrap();
            let mut s = Session::new(&Device::cpu(Cpu::new(1)), &switches, 0);
            let r = Recorder::new();
            let d = Decoder { shape: &found.shape, lora: None, base: Base::Loaded, r: &r, rng: None };
            r.output("h", d.logits(d.hidden(r.feed("ids", &[1, 2], DType::I32), None)));
            s.load("h", r.finish()).unwrap();
            found.load(&mut s.store).unwrap();
            for (ours, theirs, _) in found.shape.weights() {
                let file = &narrow.iter().find(|t| t.0 == theirs).unwrap().3;
                let state = s.store.get(&ours).unwrap();
                let kept = state.meta.dtype;
                assert_eq!(kept, if pass == "auto" && state.meta.rank() == 2 { DType::BF16 } else { DType::F32 });
                let want = engine::cpu::converted(file, dtype, kept);
                assert_eq!(&*state.bytes().unwrap(), want.bytes(), "{ours}");
                if kept == dtype {
                    assert_eq!(&*state.bytes().unwrap(), &file[..], "{ours}");
                }
            }
        }
        let first = &base.iter().find(|t| t.0 == "model.norm.weight").unwrap().3;
        assert!(numbers(first).iter().any(|v| *v != 1.0));
    }
}

#[test]
fn what_is_wrong_with_a_folder_is_said_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (base, _) = golden_tensors();
    let mut count = 0;
    let mut refused = |change: &dyn Fn(&mut Value, &mut Tensors), files: usize, damage: &dyn Fn(&Path), parts: &[&str]| {
        count += 1;
        let (mut config, mut tensors) = (config(), base.clone());
        change(&mut config, &mut tensors);
        let path = folder(&dir.path().join(count.to_string()), &config, &tensors, files);
        damage(&path);
        let said = Folder::open(&path).map(|_| ()).expect_err(parts[0]).to_string();
        assert!(parts.iter().all(|p| said.contains(p)), "{said}\nlacks some of {parts:?}");
    };
    let set = |key: &'static str, value: Value| move |c: &mut Value, _: &mut Tensors| c[key] = value.clone();
    let whole = |_: &Path| {};
    let same = |_: &mut Value, _: &mut Tensors| {};

    refused(
        &set("architectures", json!(["GemmaForCausalLM"])),
        1,
        &whole,
        &[
            "config.json",
            "GemmaForCausalLM, which is not supported yet",
            "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
            "CONTRIBUTING.md",
        ],
    );
    refused(
        &|c: &mut Value, _: &mut Tensors| (c["architectures"], c["model_type"]) = (Value::Null, Value::Null),
        1,
        &whole,
        &["names no architecture"],
    );
    refused(
        &|c: &mut Value, _: &mut Tensors| (c["architectures"], c["model_type"]) = (Value::Null, "gemma".into()),
        1,
        &whole,
        &["gemma", "llama, qwen2, qwen3, mistral, gpt2"],
    );
    refused(&set("model_type", "llama".into()), 1, &whole, &["model_type"]);
    refused(&set("attention_bias", true.into()), 1, &whole, &["'attention_bias' is true"]);
    refused(&set("mlp_bias", true.into()), 1, &whole, &["'mlp_bias' is true"]);
    refused(&set("final_logit_softcapping", json!(30.0)), 1, &whole, &["'final_logit_softcapping' is 30.0, which is not known here"]);
    let both = |c: &mut Value, _: &mut Tensors| {
        c["rope_parameters"] = json!({ "rope_type": "default", "rope_theta": 10000.0 });
        c["rope_scaling"] = json!({ "rope_type": "linear", "factor": 2.0 });
    };
    refused(&both, 1, &whole, &["'rope_parameters' and 'rope_scaling' differ"]);
    refused(&set("use_sliding_window", true.into()), 1, &whole, &["'use_sliding_window'"]);
    refused(&set("layer_types", json!(["full_attention", "sliding_attention"])), 1, &whole, &["sliding_attention"]);
    refused(&set("hidden_act", "gelu".into()), 1, &whole, &["'hidden_act' is \"gelu\""]);
    refused(&set("quantization_config", json!({"bits": 4})), 1, &whole, &["'quantization_config'"]);
    refused(&set("rope_parameters", json!({"rope_type": "yarn", "factor": 4.0})), 1, &whole, &["\"yarn\"", "\"llama3\""]);
    refused(&set("rope_parameters", json!({"rope_type": "llama3", "factor": 4.0})), 1, &whole, &["no 'low_freq_factor'"]);
    refused(&set("rope_parameters", json!({"partial_rotary_factor": 0.5})), 1, &whole, &["partial_rotary_factor"]);
    refused(&set("hidden_size", "many".into()), 1, &whole, &["'hidden_size' is \"many\""]);
    refused(&set("vocab_size", Value::Null), 1, &whole, &["no 'vocab_size'"]);
    refused(&set("num_key_value_heads", 3.into()), 1, &whole, &["heads = 4 does not divide by kv_heads = 3"]);
    refused(&set("num_hidden_layers", 3.into()), 1, &whole, &["no weight 'model.layers.2.input_layernorm.weight'"]);
    refused(&set("num_hidden_layers", 1.into()), 1, &whole, &["holds 'model.layers.1."]);
    refused(&set("intermediate_size", 65.into()), 1, &whole, &["'model.layers.0.mlp.gate_proj.weight' is [64, 32]", "[65, 32]"]);
    refused(&set("tie_word_embeddings", false.into()), 1, &whole, &["no weight 'lm_head.weight'"]);
    refused(
        &|_, t| t.retain(|t| t.0 != "model.layers.1.self_attn.k_norm.weight"),
        4,
        &whole,
        &["no weight 'model.layers.1.self_attn.k_norm.weight'"],
    );
    refused(
        &|_, t| t.push(("model.layers.0.self_attn.q_proj.bias".into(), Dtype::F32, vec![1], vec![0; 4])),
        1,
        &whole,
        &["holds 'model.layers.0.self_attn.q_proj.bias'"],
    );
    refused(
        &|_, t| {
            let (_, dtype, shape, bytes) = t.iter_mut().find(|t| t.0 == "model.norm.weight").unwrap();
            (*dtype, *bytes) = (Dtype::F64, vec![0; 8 * shape[0]]);
        },
        1,
        &whole,
        &["'model.norm.weight' is of type F64"],
    );
    refused(&same, 1, &|p| fs::remove_file(p.join("config.json")).unwrap(), &["cannot read", "config.json"]);
    refused(&same, 1, &|p| fs::write(p.join("config.json"), "[]").unwrap(), &["config.json", "not a table of JSON"]);
    refused(&same, 1, &|p| fs::remove_file(p.join("model.safetensors")).unwrap(), &["neither model.safetensors nor"]);
    let pickled = |p: &Path| fs::rename(p.join("model.safetensors"), p.join("pytorch_model.bin")).unwrap();
    refused(&same, 1, &pickled, &["pytorch_model.bin is not read here"]);
    let cut = |name: &'static str, keep: usize| {
        move |p: &Path| {
            let bytes = fs::read(p.join(name)).unwrap();
            fs::write(p.join(name), &bytes[..bytes.len().min(keep)]).unwrap();
        }
    };
    refused(
        &same,
        3,
        &cut("model-00002-of-00003.safetensors", 9000),
        &["model-00002-of-00003.safetensors", "not a whole safetensors file"],
    );
    refused(&same, 1, &cut("model.safetensors", 5), &["model.safetensors", "not a whole safetensors file"]);
    refused(&same, 1, &cut("model.safetensors", 0), &["model.safetensors"]);
    refused(
        &same,
        3,
        &|p| fs::remove_file(p.join("model-00003-of-00003.safetensors")).unwrap(),
        &["cannot open", "model-00003-of-00003.safetensors"],
    );
    let index = |from: &'static str, to: &'static str| {
        move |p: &Path| {
            let path = p.join("model.safetensors.index.json");
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.contains(from));
            fs::write(path, text.replace(from, to)).unwrap();
        }
    };
    refused(&same, 3, &index("model-00003-of", "../model-00003-of"), &["index.json", "not a plain file name"]);
    refused(
        &same,
        3,
        &index("model-00003-of", "model-00001-of"),
        &["says that model-00001-of-00003.safetensors holds", "which it does not"],
    );
    refused(&same, 3, &index("weight_map", "map"), &["no table 'weight_map'"]);
    let many = |p: &Path| {
        let map: serde_json::Map<String, Value> = (0..100_000).map(|i| (format!("w{i}"), format!("{i}.safetensors").into())).collect();
        fs::write(p.join("model.safetensors.index.json"), json!({ "weight_map": map }).to_string()).unwrap();
    };
    refused(&same, 3, &many, &["names more than 1024 files"]);
    assert!(Folder::open(Path::new("/nowhere")).map(|_| ()).unwrap_err().to_string().contains("there is no such folder"));

    // What files of real models hold beside their weights is not in the way.
    let mut more = base.clone();
    let embedding = base.iter().find(|t| t.0 == "model.embed_tokens.weight").unwrap().3.clone();
    more.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), Dtype::F32, vec![4], vec![0; 16]));
    more.push(("lm_head.weight".into(), Dtype::F32, vec![96, 32], embedding));
    assert!(Folder::open(&folder(&dir.path().join("more"), &config(), &more, 2)).unwrap().shape.tied);
    // A head that is not the embedding is the model's own, as it is for transformers.
    more.last_mut().unwrap().3 = vec![0; 4 * 96 * 32];
    let own = Folder::open(&folder(&dir.path().join("own"), &config(), &more, 2)).unwrap();
    assert!(!own.shape.tied && own.shape.weights().iter().any(|w| w.1 == "lm_head.weight"));
    let wrong = |_: &mut Value, t: &mut Tensors| t.push(("lm_head.weight".into(), Dtype::F32, vec![32, 96], vec![0; 4 * 96 * 32]));
    refused(&wrong, 1, &whole, &["'lm_head.weight' is [32, 96], but its config.json makes it [96, 32]"]);
}

#[test]
fn what_is_wrong_with_an_adapter_is_said_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (base, lora) = golden_tensors();
    let shape = Folder::open(&folder(&dir.path().join("base"), &config(), &base, 1)).unwrap().shape;
    let mut count = 0;
    let mut refused = |change: &dyn Fn(&mut Value, &mut Tensors), parts: &[&str]| {
        count += 1;
        let (mut config, mut tensors) = (adapter_config(), lora.clone());
        change(&mut config, &mut tensors);
        let said = Adapter::open(&adapter(&dir.path().join(count.to_string()), &config, &tensors), &shape, None);
        let said = said.map(|_| ()).expect_err(parts[0]).to_string();
        assert!(parts.iter().all(|p| said.contains(p)), "{said}\nlacks some of {parts:?}");
    };
    let set = |key: &'static str, value: Value| move |c: &mut Value, _: &mut Tensors| c[key] = value.clone();
    refused(&set("peft_type", "IA3".into()), &["'peft_type' is IA3"]);
    refused(&set("use_rslora", true.into()), &["'use_rslora' is true"]);
    refused(&set("use_dora", true.into()), &["'use_dora' is true"]);
    refused(&set("bias", "lora_only".into()), &["'bias' is \"lora_only\""]);
    refused(&set("fan_in_fan_out", true.into()), &["'fan_in_fan_out'"]);
    refused(&set("modules_to_save", json!(["lm_head"])), &["'modules_to_save'"]);
    refused(&set("rank_pattern", json!({"q_proj": 8})), &["'rank_pattern'"]);
    refused(&set("init_lora_weights", "pissa".into()), &["'init_lora_weights' is \"pissa\""]);
    refused(&set("use_something_new", true.into()), &["'use_something_new' is true"]);
    refused(&set("layers_to_transform", json!([0])), &["'layers_to_transform'"]);
    refused(&set("target_modules", "all-linear".into()), &["'target_modules' is \"all-linear\""]);
    refused(&set("target_modules", json!(["q_proj", "lm_head"])), &["\"lm_head\"", "q_proj, k_proj"]);
    refused(&set("r", 8.into()), &["is [4, 32]", "[8, 32]"]);
    refused(&set("r", 1.5.into()), &["'r' is 1.5"]);
    refused(&set("target_modules", json!(["q_proj"])), &["holds 'base_model.model.model.layers.0."]);
    refused(
        &|_, t| t.retain(|t| !t.0.contains("layers.1.mlp.up_proj.lora_B")),
        &["no 'base_model.model.model.layers.1.mlp.up_proj.lora_B.weight'"],
    );
    fs::remove_file(dir.path().join("1/adapter_model.safetensors")).unwrap();
    fs::write(dir.path().join("1/adapter_config.json"), adapter_config().to_string()).unwrap();
    let said = Adapter::open(&dir.path().join("1"), &shape, None).map(|_| ()).unwrap_err().to_string();
    assert!(said.contains("adapter_model.safetensors"), "{said}");
}

#[test]
fn what_is_written_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let scalings =
        [RopeScaling::None, RopeScaling::Linear { factor: 2.5 }, RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64.0 }];
    for (i, rope_scaling) in scalings.into_iter().enumerate() {
        let shape = Shape {
            family: Family::with_qk_norm(i == 1),
            vocab: 13,
            dim: 6,
            layers: 2,
            heads: 2,
            kv_heads: 1,
            head_dim: 4,
            hidden: 10,
            tied: i == 0,
            window: None,
            rope_theta: 1234.5,
            rope_scaling,
            norm_eps: 1e-5,
            context: 99,
            scan: None,
        };
        let path = dir.path().join(i.to_string());
        fs::create_dir(&path).unwrap();
        let mut store = Store::new(i as u64);
        let r = Recorder::new();
        let d = Decoder { shape: &shape, lora: None, base: Base::Drawn, r: &r, rng: None };
        r.output("h", d.logits(d.hidden(r.feed("ids", &[1, 1], DType::I32), None)));
        store.ensure(&r.finish(), None, &[]).unwrap();
        let weights: Vec<Weight> = shape
            .weights()
            .into_iter()
            .map(|(ours, name, _)| {
                let t = store.get(&ours).unwrap();
                Weight { name, meta: t.meta.clone(), bytes: t.bytes().unwrap().into_owned() }
            })
            .collect();
        write_weights(&path, &weights, if i == 2 { 400 } else { 1 << 30 }).unwrap();
        shape.write(&path).unwrap();
        assert_eq!(names(&path).iter().filter(|n| n.ends_with(".safetensors")).count() > 1, i == 2);
        let found = Folder::open(&path).unwrap();
        assert_eq!(found.shape, shape);
        for (w, again) in weights.iter().zip(found.weights()) {
            let (_, again) = again.unwrap();
            assert_eq!((&w.name, &w.meta, &w.bytes), (&again.name, &again.meta, &again.bytes));
        }

        let lora = Lora { rank: 2, alpha: 3.5, dropout: 0.25, targets: vec![Target::K, Target::Down] };
        let numbers = |[a, b]: [usize; 2]| (Meta::f32(&[a, b]), (0..4 * a * b).map(|i| (i % 63) as u8).collect::<Vec<u8>>());
        let tensors: Vec<_> = lora.tensors(&shape).into_iter().map(|(_, s)| numbers(s)).collect();
        let out = dir.path().join(format!("lora{i}"));
        fs::create_dir(&out).unwrap();
        write_adapter(&out, &lora, &shape, "there", tensors).unwrap();
        assert_eq!(Adapter::open(&out, &shape, None).unwrap().lora, lora);
    }
}

/// Qwen3 ends what it says with <|im_end|>, and what it merely continues with <|endoftext|>.
#[test]
fn a_document_ends_with_its_token_too() {
    let dir = tempfile::tempdir().unwrap();
    // Of logits that are all the same the first token is taken: <|endoftext|>.
    let zeros: Tensors = golden_tensors().0.into_iter().map(|(n, d, s, b)| (n, d, s, vec![0; b.len()])).collect();
    let path = folder(&dir.path().join("model"), &config(), &zeros, 1);
    let words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[UNK]"];
    let vocab: serde_json::Map<String, Value> = words.iter().enumerate().map(|(i, w)| (w.to_string(), i.into())).collect();
    let added = words[..3].iter().enumerate().map(|(i, w)| {
        json!({"id": i, "content": w, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    });
    let tokenizer = json!({"version": "1.0", "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}});
    fs::write(path.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(path.join("generation_config.json"), json!({"eos_token_id": [2, 0]}).to_string()).unwrap();
    let said = kiln(["check", "model", &text(&path)]).ok().out;
    assert!(
        said.contains("end of document: <|endoftext|> (0), generation_config.json\nend of turn: <|im_end|> (2), generation_config.json\n"),
        "{said}"
    );
    for raw in [&[][..], &["--raw"]] {
        let own = ["generate", &text(&path), "--prompt", "hm", "--max-tokens", "5", "--threads", "1"];
        let said = |temperature: &str| kiln([&own[..], &["--temperature", temperature], raw].concat());
        let out = said("0").ok().out;
        assert!(!out.contains("<|"), "{out}");
        for wrong in ["-1", "nan", "inf", "1e308", "-1e308", "3.5e38", "hot"] {
            said(wrong).fails(&["--temperature", wrong, "is not a number from 0 up"]);
        }
    }
}

/// A model that writes one token, whatever it is asked, which generation_config.json names as an end among others.
#[test]
fn a_reply_ends_with_any_end_that_the_folder_names() {
    let dir = tempfile::tempdir().unwrap();
    // Layers of zeros leave the embedding as it is, and that is its own head: the token whose row is larger than all others is drawn.
    const DRAWN: usize = 4;
    let tensors: Tensors = golden_tensors()
        .0
        .into_iter()
        .map(|(name, dtype, shape, bytes)| {
            let at = |i: usize| match name.as_str() {
                "model.embed_tokens.weight" if i / shape[1] == DRAWN => 2.0,
                "model.embed_tokens.weight" | "model.norm.weight" => 1.0,
                _ => 0.0f32,
            };
            let numbers: Vec<f32> = (0..bytes.len() / 4).map(at).collect();
            (name, dtype, shape, bytemuck::cast_slice(&numbers).to_vec())
        })
        .collect();
    let path = folder(&dir.path().join("model"), &config(), &tensors, 1);
    let words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[UNK]", "done"];
    let vocab: serde_json::Map<String, Value> = words.iter().enumerate().map(|(i, w)| (w.to_string(), i.into())).collect();
    // One that is not special is part of the text until it is an end.
    let added = [0, 1, 2, DRAWN].map(|i| {
        json!({"id": i, "content": words[i], "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": i != DRAWN})
    });
    let tokenizer = json!({"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}});
    fs::write(path.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let said = |ends: Value| {
        fs::write(path.join("generation_config.json"), json!({ "eos_token_id": ends }).to_string()).unwrap();
        let own = ["generate", &text(&path), "--prompt", "hm", "--max-tokens", "5", "--temperature", "0", "--threads", "1"];
        kiln(own).ok().out.matches("done").count()
    };
    assert_eq!(said(json!([2, 0])), 5, "nothing ends it");
    assert_eq!(said(json!([2, 0, DRAWN])), 0);
    assert_eq!(said(json!([2, DRAWN, 0])), 0);
}

/// The logits of `kiln check model`.
fn logits(dir: &Path, args: &[&str]) -> Vec<Vec<f32>> {
    let out = dir.join("logits.safetensors");
    let own = ["--ids", "5 9 61 2", "--ids", "7", "--write", &text(&out), "--threads", "1"];
    kiln(["check", "model"].iter().chain(args).chain(own.iter()).copied()).ok();
    let file = load_safetensors(&out).unwrap();
    (0..2)
        .map(|row| {
            let (_, shape, bytes) = file.get(&row.to_string()).unwrap();
            assert_eq!(shape, [[4, 1][row], 521]);
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        })
        .collect()
}

fn apart(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    a.iter().flatten().zip(b.iter().flatten()).map(|(x, y)| (x - y).abs()).fold(0.0, |worst, d| if d <= worst { worst } else { d })
}

/// From a base drawn at random to a folder, from there to adapters, a merged model, and back.
#[test]
fn runs_are_exported_as_adapters_and_as_models() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let path = |name: &str| text(&at(name));
    let train = |out: &str, more: &[&str]| {
        let sets = ["seq=48", "objective.weight=0", "batch=2", "eval_batches=1", "rank=2", "alpha=5.0", "learning_rate=0.05"]
            .map(|s| ["--set", s])
            .concat();
        let out = path(out);
        let own = ["train", "polychromic", "--threads", "1", "--steps", "3", "--out", &out];
        kiln([&own[..], &sets, more].concat())
    };
    let shape = ["pretrain=0", "vocab=521", "dim=24", "layers=2", "head_dim=8", "hidden=40"]
        .into_iter()
        .flat_map(|s| ["--set", s])
        .collect::<Vec<_>>();
    train("drawn", &shape).ok();
    kiln(["export", &path("drawn"), "--out", &path("adapters")]).fails(&["drawn at random", "--merge"]);
    assert!(!at("adapters").exists());
    kiln(["export", &path("drawn"), "--out", &path("base"), "--merge"]).ok();
    fs::write(at("base/generation_config.json"), "{}").unwrap();

    let base = format!("model.base={}", path("base"));
    train("run", &["--set", &base]).ok();
    kiln(["export", &path("run"), "--out", &path("adapters")]).ok();
    kiln(["export", &path("run"), "--out", &path("merged"), "--merge"]).ok();
    kiln(["export", &path("run"), "--out", &path("merged"), "--merge"]).fails(&["is there already"]);
    assert_eq!(names(&at("adapters")), ["README.md", "adapter_config.json", "adapter_model.safetensors"]);
    let files = ["README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(names(&at("merged")), files);
    assert!(names(dir.path()).iter().all(|n| !n.contains(".tmp")));

    let (plain, adapted, merged) = (
        logits(dir.path(), &[&path("base")]),
        logits(dir.path(), &[&path("base"), "--adapter", &path("adapters")]),
        logits(dir.path(), &[&path("merged")]),
    );
    assert!(apart(&adapted, &merged) < 1e-5 && apart(&plain, &adapted) > 1e-3, "{} {}", apart(&adapted, &merged), apart(&plain, &adapted));
    // One at a time, nothing is padded.
    let alone = |ids: &str, tokens: usize| {
        let out = at("alone.safetensors");
        kiln(["check", "model", &path("base"), "--ids", ids, "--write", &text(&out)]).ok();
        let file = load_safetensors(&out).unwrap();
        let (_, shape, bytes) = file.get("0").unwrap();
        assert_eq!(shape, [tokens, 521]);
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect::<Vec<f32>>()
    };
    assert!(apart(&plain, &[alone("5,9,61,2", 4), alone("7", 1)]) < 1e-5);

    // The same model, whichever way it is named, says the same; and it says it twice.
    let said = |of: &[&str]| {
        let how = ["--prompt", "what is it", "--max-tokens", "12", "--temperature", "0.7", "--seed", "3", "--threads", "1"];
        kiln([&["generate"], of, &how].concat()).ok().out
    };
    let adapted = said(&[&path("base"), "--adapter", &path("adapters")]);
    assert_eq!(adapted, said(&[&path("run")]));
    assert_eq!(adapted, said(&[&path("merged")]));
    assert_ne!(adapted, said(&[&path("run"), "--raw"]));
    let three = said(&[&path("run"), "--replies", "3"]);
    assert_eq!(three.lines().count(), 3, "{three}");
    kiln(["generate", &path("base"), "--prompt", &"a".repeat(60)]).fails(&["fills the model's 48 positions"]);
    kiln(["generate", &path("base"), "--max-tokens", "0"]).fails(&["--max-tokens 0"]);
    kiln(["generate", &path("base"), "--pass", "bf16"]).fails(&["NAME=off|auto|require, not 'bf16'"]);
    kiln(["generate", &path("run"), "--adapter", &path("adapters")]).fails(&["for a model's folder"]);
    assert_eq!(adapted, said(&[&path("adapters")]), "on the base that it names");

    // An adapter begins another run: one step that hardly moves it, and it goes out as it came in.
    let begin = |more: &[&str]| {
        train("again", &[&["--set", &base, "--init-from", &path("adapters"), "--set", "learning_rate=1e-30"], more].concat())
    };
    begin(&["--set", "rank=3"]).fails(&["has rank = 2", "model.rank = 3"]);
    begin(&["--set", "alpha=31.5"]).fails(&["has alpha = ", "model.alpha = 31.5"]);
    begin(&["--set", "targets=[\"q\"]"]).fails(&["has targets = [\"q\", \"k\"", "model.targets = [\"q\"]"]);
    begin(&[]).ok();
    kiln(["export", &path("again"), "--out", &path("back")]).ok();
    let (was, is) = (at("adapters/adapter_model.safetensors"), at("back/adapter_model.safetensors"));
    assert!(fs::read(was).unwrap() == fs::read(is).unwrap());

    // The base must stay what it was.
    crate::common::damage(&at("base/model.safetensors"), |bytes| *bytes.last_mut().unwrap() ^= 1);
    kiln(["export", &path("run"), "--out", &path("other")]).fails(&["is not the base"]);
    kiln(["eval", &path("run"), "--threads", "1"]).fails(&["another base"]);
    crate::common::resume(&at("run"), "--steps 4").fails(&["another base"]);
    kiln(["export", &path("nothing"), "--out", &path("other")]).fails(&["there is no checkpoint or run folder"]);
    assert!(!at("other").exists() && checkpoint(&at("run"), 3).exists());

    kiln(["check", "model", &path("base"), "--ids", "600"]).fails(&["token 600", "0 to 520"]);
    kiln(["check", "model", &path("base"), "--ids", "a"]).fails(&["'a' is no token"]);
    fs::remove_file(at("base/tokenizer.json")).unwrap();
    kiln(["check", "model", &path("base"), "--prompt", "hello"]).fails(&["tokenizer.json: there is none", "AutoTokenizer.from_pretrained"]);
    fs::remove_file(at("base/tokenizer_config.json")).unwrap();
    kiln(["check", "model", &path("base"), "--prompt", "hello"]).fails(&["no tokenizer.json"]);
    kiln(["check", "model", &path("base"), "--write", &path("x")]).fails(&["--write wants"]);
}
