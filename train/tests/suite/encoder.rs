//! Encoders in sentence-transformers' layout: against plain arithmetic in f64, and refused where anything is not known. Against the package itself:
//! peers/encoder_check.py.

use crate::common::{checkpoint, damage, kiln, resume, same_bytes, text};
use engine::philox::fill_normal;
use engine::{Cpu, Data, Device, Recorder, Switches};
use kiln::checkpoint::load_safetensors;
use kiln::models::{Encoder, EncoderFeeds, EncoderShape, Texts};
use kiln::recipe::Session;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

const WORDS: &[&str] = &["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "a", "mat", "##s", "dog", "ran", ".", "!"];

/// No two of its sizes are the same.
fn config() -> Value {
    json!({
        "architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
        "intermediate_size": 40, "max_position_embeddings": 16, "type_vocab_size": 2, "vocab_size": WORDS.len(), "layer_norm_eps": 1e-12,
        "attention_probs_dropout_prob": 0.1, "position_embedding_type": "absolute"
    })
}

fn modules(kinds: &[&str]) -> Value {
    let paths = HashMap::from([("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]);
    let module = |(i, kind): (usize, &&str)| json!({"idx": i, "name": i.to_string(), "path": paths.get(kind).unwrap_or(&"x"), "type": format!("sentence_transformers.models.{kind}")});
    kinds.iter().enumerate().map(module).collect()
}

fn pooling() -> Value {
    json!({"word_embedding_dimension": 24, "pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": false,
        "pooling_mode_mean_sqrt_len_tokens": false})
}

fn tokenizer() -> Value {
    let vocab: serde_json::Map<String, Value> = WORDS.iter().enumerate().map(|(i, w)| (w.to_string(), i.into())).collect();
    let special = |id: usize| json!({"id": id, "content": WORDS[id], "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    let piece = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
        "added_tokens": (0..4).map(special).collect::<Vec<_>>(),
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing", "single": [piece("[CLS]"), {"Sequence": {"id": "A", "type_id": 0}}, piece("[SEP]")],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}, "[SEP]": {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]}}},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": vocab}
    })
}

/// Norms near 1, biases and products of any size.
fn weights(shape: &EncoderShape) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let extra = [("pooler.dense.weight".to_string(), vec![shape.dim; 2]), ("pooler.dense.bias".to_string(), vec![shape.dim])];
    let all = shape.weights().into_iter().map(|(_, name, shape)| (name, shape)).chain(extra);
    all.enumerate()
        .map(|(i, (name, shape))| {
            let mut numbers = vec![0.0; shape.iter().product()];
            fill_normal(7, i as u64, &mut numbers);
            let (scale, offset) = if name.ends_with("LayerNorm.weight") { (0.2, 1.0) } else { (0.4, 0.0) };
            numbers.iter_mut().for_each(|v| *v = *v * scale + offset);
            (name, shape, numbers)
        })
        .collect()
}

fn shape() -> EncoderShape {
    EncoderShape {
        vocab: WORDS.len(),
        dim: 24,
        layers: 2,
        heads: 3,
        hidden: 40,
        positions: 16,
        types: 2,
        norm_eps: 1e-12,
        act: kiln::models::Act::Gelu,
    }
}

fn write_json(path: &Path, value: &Value) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, value.to_string()).unwrap();
}

fn write_weights(dir: &Path, weights: &[(String, Vec<usize>, Vec<f32>)]) {
    let views = weights.iter().map(|(n, s, v)| (n.as_str(), TensorView::new(Dtype::F32, s.clone(), bytemuck::cast_slice(v)).unwrap()));
    fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

fn folder(dir: &Path, kinds: &[&str]) {
    for (name, value) in [
        ("config.json", config()),
        ("modules.json", modules(kinds)),
        ("1_Pooling/config.json", pooling()),
        ("sentence_bert_config.json", json!({"max_seq_length": 12, "do_lower_case": false})),
        ("tokenizer.json", tokenizer()),
    ] {
        write_json(&dir.join(name), &value);
    }
    write_weights(dir, &weights(&shape()));
}

fn embed(e: &Encoder, t: &Texts) -> Vec<f32> {
    let r = Recorder::new();
    r.output("e", e.embed(&r, &EncoderFeeds::new(&r, t.ids.len() / t.time, t.time)));
    let mut s = Session::new(&Device::cpu(Cpu::new(1)), &Switches::default(), 0);
    s.load("e", r.finish()).unwrap();
    e.load(&mut s.store).unwrap();
    s.run("e", &[("encoder_ids", Data::I32(&t.ids)), ("encoder_until", Data::I32(&t.until)), ("encoder_share", Data::F32(&t.share))])
        .unwrap();
    s.read("e", "e").unwrap()
}

/// One text without padding, a number at a time.
fn plainly(ids: &[usize], normalise: bool) -> Vec<f64> {
    let s = shape();
    let all: HashMap<String, (Vec<usize>, Vec<f32>)> = weights(&s).into_iter().map(|(n, s, v)| (n, (s, v))).collect();
    let get = |name: &str, i: usize| all[name].1[i] as f64;
    let row = |name: &str, i: usize| (0..s.dim).map(|d| get(name, i * s.dim + d)).collect::<Vec<f64>>();
    let norm = |x: &[f64], name: &str| -> Vec<f64> {
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64;
        let at =
            |d: usize| (x[d] - mean) / (variance + s.norm_eps).sqrt() * get(&format!("{name}.weight"), d) + get(&format!("{name}.bias"), d);
        (0..x.len()).map(at).collect()
    };
    let linear = |x: &[f64], name: &str| -> Vec<f64> {
        let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
        let outputs = all[&bias].1.len();
        (0..outputs).map(|o| x.iter().enumerate().map(|(i, v)| v * get(&weight, o * x.len() + i)).sum::<f64>() + get(&bias, o)).collect()
    };
    // x times the normal distribution's share below x, by Simpson's rule.
    let gelu = |x: f64| {
        let (n, h) = (400, x / 400.0);
        let density = |t: f64| (-t * t / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
        let inner: f64 = (1..n).map(|i| density(i as f64 * h) * if i % 2 == 1 { 4.0 } else { 2.0 }).sum();
        x * (0.5 + h / 3.0 * (density(0.0) + inner + density(x)))
    };
    let add = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<f64>>();
    let word = |(t, &id): (usize, &usize)| {
        let sum = add(&row("embeddings.word_embeddings.weight", id), &row("embeddings.position_embeddings.weight", t));
        norm(&add(&sum, &row("embeddings.token_type_embeddings.weight", 0)), "embeddings.LayerNorm")
    };
    let mut x: Vec<Vec<f64>> = ids.iter().enumerate().map(word).collect();
    let size = s.dim / s.heads;
    for l in 0..s.layers {
        let at = |name: &str| format!("encoder.layer.{l}.{name}");
        let [q, k, v] =
            ["query", "key", "value"].map(|n| x.iter().map(|x| linear(x, &at(&format!("attention.self.{n}")))).collect::<Vec<_>>());
        let mut next = vec![];
        for t in 0..x.len() {
            let mut seen = vec![0.0; s.dim];
            for head in (0..s.heads).map(|h| h * size..(h + 1) * size) {
                let score = |j: usize| head.clone().map(|d| q[t][d] * k[j][d]).sum::<f64>() / (size as f64).sqrt();
                let scores: Vec<f64> = (0..x.len()).map(|j| score(j).exp()).collect();
                let total: f64 = scores.iter().sum();
                head.for_each(|d| seen[d] = (0..x.len()).map(|j| scores[j] / total * v[j][d]).sum());
            }
            let y = norm(&add(&x[t], &linear(&seen, &at("attention.output.dense"))), &at("attention.output.LayerNorm"));
            let up: Vec<f64> = linear(&y, &at("intermediate.dense")).into_iter().map(gelu).collect();
            next.push(norm(&add(&y, &linear(&up, &at("output.dense"))), &at("output.LayerNorm")));
        }
        x = next;
    }
    let mean: Vec<f64> = (0..s.dim).map(|d| x.iter().map(|x| x[d]).sum::<f64>() / x.len() as f64).collect();
    let length = if normalise { mean.iter().map(|v| v * v).sum::<f64>().sqrt() } else { 1.0 };
    mean.into_iter().map(|v| v / length).collect()
}

#[test]
fn embeddings_are_what_plain_arithmetic_gives() {
    let dir = tempfile::tempdir().unwrap();
    for kinds in [&["Transformer", "Pooling"][..], &["Transformer", "Pooling", "Normalize"]] {
        folder(dir.path(), kinds);
        let e = Encoder::open(dir.path()).unwrap();
        assert_eq!((&e.shape, e.longest, e.normalise), (&shape(), 12, kinds.len() == 3));
        let texts = ["The cats sat on a mat.", "", "zebra!", "the the the the the the the the the the the the the the the mat"];
        let ids: [&[usize]; 4] = [&[2, 4, 5, 10, 6, 7, 8, 9, 13, 3], &[2, 3], &[2, 1, 14, 3], &[2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3]];
        // In rows as long as they must be, and longer; together and alone.
        let all = e.texts(&texts, None).unwrap();
        assert_eq!(all.time, 12);
        let together = embed(&e, &all);
        let longer = embed(&e, &e.texts(&texts, Some(15)).unwrap());
        for (i, ids) in ids.iter().enumerate() {
            let own: Vec<i32> = all.ids[i * 12..(i + 1) * 12].to_vec();
            assert!(own.iter().zip(*ids).all(|(a, b)| *a as usize == *b) && own[ids.len()..].iter().all(|t| *t == 0), "{own:?}");
            let alone = embed(&e, &e.texts(&texts[i..i + 1], None).unwrap());
            let expected = plainly(ids, e.normalise);
            for (d, want) in expected.iter().enumerate() {
                for (got, what) in [(together[i * 24 + d], "together"), (longer[i * 24 + d], "longer"), (alone[d], "alone")] {
                    assert!((got as f64 - want).abs() < 3e-6, "{what}, text {i}: {got} {want}");
                }
            }
        }
        // Rows that are too short cut texts, and keep what stands behind them.
        let cut = e.texts(&texts[..1], Some(5)).unwrap();
        assert_eq!((&cut.ids[..], cut.cut, e.texts(&texts[..1], Some(15)).unwrap().cut), (&[2, 4, 5, 10, 3][..], 1, 0));
    }
}

/// Where sentence-transformers lowers letters before the tokenizer sees them, so does kiln.
#[test]
fn letters_are_lowered_where_the_folder_says_so() {
    let dir = tempfile::tempdir().unwrap();
    folder(dir.path(), &["Transformer", "Pooling"]);
    let mut own = tokenizer();
    own["normalizer"] = Value::Null;
    write_json(&dir.path().join("tokenizer.json"), &own);
    let opened = |lower: bool| {
        write_json(&dir.path().join("sentence_bert_config.json"), &json!({"max_seq_length": 12, "do_lower_case": lower}));
        Encoder::open(dir.path()).unwrap()
    };
    let ids = |e: &Encoder, text: &str| e.texts(&[text], None).unwrap().ids;
    let (as_it_is, lowered) = (opened(false), opened(true));
    assert_ne!(ids(&as_it_is, "THE"), ids(&as_it_is, "the"));
    assert_eq!(ids(&lowered, "THE"), ids(&as_it_is, "the"));
    // What embeds otherwise is another encoder; so are other weights.
    let whole = as_it_is.fingerprint().unwrap();
    assert_ne!(whole, lowered.fingerprint().unwrap());
    let mut other = weights(&shape());
    other[0].2[0] += 1.0;
    write_weights(dir.path(), &other);
    assert_ne!(whole, opened(false).fingerprint().unwrap());
}

#[test]
fn newer_files_say_the_same_in_other_words() {
    let dir = tempfile::tempdir().unwrap();
    folder(dir.path(), &["Transformer", "Pooling", "Normalize"]);
    let older = Encoder::open(dir.path()).unwrap();
    let types =
        ["base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling", "base.modules.normalize.Normalize"];
    let list: Value = types
        .iter()
        .zip(["", "1_Pooling", "2_Normalize"])
        .map(|(t, p)| json!({"path": p, "type": format!("sentence_transformers.{t}")}))
        .collect();
    write_json(&dir.path().join("modules.json"), &list);
    write_json(
        &dir.path().join("1_Pooling/config.json"),
        &json!({"embedding_dimension": 24, "pooling_mode": "mean", "include_prompt": true}),
    );
    write_json(&dir.path().join("sentence_bert_config.json"), &json!({"transformer_task": "feature-extraction"}));
    write_json(&dir.path().join("tokenizer_config.json"), &json!({"model_max_length": 12}));
    let newer = Encoder::open(dir.path()).unwrap();
    assert_eq!((&newer.shape, newer.longest, newer.normalise), (&older.shape, older.longest, true));
    // Whatever is said, there are no more than the positions.
    write_json(&dir.path().join("tokenizer_config.json"), &json!({"model_max_length": 1e30}));
    assert_eq!(Encoder::open(dir.path()).unwrap().longest, 16);
}

#[test]
fn everything_else_is_refused_by_name() {
    let kinds = ["Transformer", "Pooling", "Normalize"];
    let with = |key: &str, value: Value| {
        let mut c = config();
        c[key] = value;
        c
    };
    let mut flags = pooling();
    (flags["pooling_mode_cls_token"], flags["pooling_mode_mean_tokens"]) = (true.into(), false.into());
    let mut pooled = pooling();
    pooled["word_embedding_dimension"] = 32.into();
    let mut around = tokenizer();
    around["post_processor"] = Value::Null;
    let files: Vec<(&str, Value, &str)> = vec![
        ("modules.json", modules(&["Transformer", "Pooling", "Dense"]), "its modules are [\"Transformer\", \"Pooling\", \"Dense\"]"),
        ("modules.json", modules(&["Pooling"]), "Transformer, Pooling and perhaps Normalize"),
        ("modules.json", json!({"a": 1}), "not a list of modules"),
        (
            "modules.json",
            json!([{"path": "../up", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}]),
            "not a plain name",
        ),
        ("1_Pooling/config.json", flags, "pools by [\"pooling_mode_cls_token\"]"),
        ("1_Pooling/config.json", json!({"pooling_mode": "lasttoken"}), "pools by [\"lasttoken\"]"),
        ("1_Pooling/config.json", pooled, "'word_embedding_dimension' is 32"),
        ("config.json", with("model_type", "mpnet".into()), "its model_type is mpnet"),
        ("config.json", with("model_type", Value::Null), "its model_type is missing"),
        ("config.json", with("position_embedding_type", "relative_key".into()), "position_embedding_type"),
        ("config.json", with("hidden_act", "swish".into()), "'hidden_act' is \"swish\""),
        ("config.json", with("is_decoder", true.into()), "'is_decoder' is not false"),
        ("config.json", with("hidden_size", 0.into()), "'hidden_size' is 0"),
        ("config.json", with("num_attention_heads", 5.into()), "does not divide"),
        ("config.json", with("num_hidden_layers", Value::Null), "has no 'num_hidden_layers'"),
        ("config.json", with("num_hidden_layers", 3.into()), "has no weight 'encoder.layer.2.attention.self.query.weight'"),
        ("config.json", with("num_hidden_layers", 1.into()), "holds 'encoder.layer.1"),
        ("config.json", with("intermediate_size", 41.into()), "'encoder.layer.0.intermediate.dense.weight' is [40, 24]"),
        ("tokenizer.json", json!({}), "not a readable tokenizer.json"),
        ("tokenizer.json", around, "puts 0 tokens around a text"),
        ("sentence_bert_config.json", json!({"max_seq_length": 1}), "at most 1 tokens"),
    ];
    for (file, value, part) in files {
        let dir = tempfile::tempdir().unwrap();
        folder(dir.path(), &kinds);
        write_json(&dir.path().join(file), &value);
        let error = Encoder::open(dir.path()).err().unwrap_or_else(|| panic!("{file}: {part}")).to_string();
        assert!(error.contains(part), "{error} / {part}");
    }
    let dir = tempfile::tempdir().unwrap();
    assert!(Encoder::open(dir.path()).err().unwrap().to_string().contains("no folder of sentence-transformers"));
    folder(dir.path(), &kinds);
    fs::rename(dir.path().join("model.safetensors"), dir.path().join("pytorch_model.bin")).unwrap();
    assert!(Encoder::open(dir.path()).err().unwrap().to_string().contains("pytorch_model.bin is not read here"));
    folder(dir.path(), &kinds);
    damage(&dir.path().join("model.safetensors"), |bytes| bytes.truncate(100));
    assert!(Encoder::open(dir.path()).is_err());
}

#[test]
fn the_command_line_embeds() {
    let dir = tempfile::tempdir().unwrap();
    folder(dir.path(), &["Transformer", "Pooling", "Normalize"]);
    let (path, out) = (text(dir.path()), dir.path().join("out.safetensors"));
    let said =
        kiln(["check", "encoder", &path, "--text", "the cat", "--text", "a dog ran.", "--write", &text(&out), "--threads", "1"]).ok().out;
    assert!(said.contains("BERT, 2 layers of 24, 3 heads") && said.contains("length 1.0000"), "{said}");
    let file = load_safetensors(&out).unwrap();
    let (_, shape, bytes) = file.get("embeddings").unwrap();
    assert_eq!(shape, [2, 24]);
    let got: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    assert!(plainly(&[2, 8, 11, 12, 13, 3], true).iter().zip(&got[24..]).all(|(a, b)| (a - *b as f64).abs() < 3e-6));
    kiln(["check", "encoder", "/nowhere"]).fails(&["/nowhere", "no such folder"]);
    kiln(["check", "encoder", &path, "--write", "x"]).fails(&["--write wants"]);
}

/// Replies are embedded by it; a run goes on with the one that it began with, or not at all.
#[test]
fn runs_are_rewarded_by_an_encoder_and_resume_with_it_alone() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    folder(&at("encoder"), &["Transformer", "Pooling", "Normalize"]);
    let encoder = format!("objective.encoder={}", text(&at("encoder")));
    let shape =
        ["pretrain=0", "dim=24", "layers=2", "head_dim=8", "hidden=40", "seq=64", "batch=4", "rank=2", "eval_batches=1", "horizon=4"];
    let sets = ["new_tokens=8", "weight=3.0", "every=1", "prompts=4", "replies=3", &encoder].into_iter().chain(shape);
    let sets: Vec<&str> = sets.flat_map(|s| ["--set", s]).collect();
    let train = |out: &str, steps: &str| {
        kiln([&["train", "polychromic", "--threads", "1", "--out", &text(&at(out)), "--steps", steps], &sets[..]].concat()).ok()
    };
    train("whole", "4");
    train("parts", "2");
    resume(&at("parts"), "--steps 4").ok();
    same_bytes(&checkpoint(&at("whole"), 4), &checkpoint(&at("parts"), 4));

    train("other", "2");
    let mut changed = weights(&self::shape());
    changed[0].2[0] += 1.0;
    write_weights(&at("encoder"), &changed);
    resume(&at("other"), "--steps 4").fails(&["objective.encoder", "it has changed"]);
    kiln(["eval", &text(&at("other")), "--threads", "1"]).ok();
}
