//! Tokenizers of folders without a tokenizer.json: GPT-2's two files (vocab.json, merges.txt) and SentencePiece's tokenizer.model, each
//! as the text of the tokenizer.json that transformers would save for it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json, json};

use super::sentencepiece;
use crate::data::DataError;
use crate::data::special::read_object;
use crate::input;
use crate::report::quoted;

const ONE: &str = "tokenizer.json";
const VOCAB: &str = "vocab.json";
const MERGES: &str = "merges.txt";
const PIECES: &str = "tokenizer.model";
const CONFIG: &str = "tokenizer_config.json";

/// Files that say that a model has a tokenizer of its own, also where it cannot be read here.
const TRACES: [&str; 11] = [
    PIECES,
    VOCAB,
    MERGES,
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "qwen.tiktoken",
];

/// No vocabulary in use comes near.
const MOST_BYTES: u64 = 256 << 20;

/// Qwen2's split of a text before BPE, as its tokenizer.json has it.
const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The file that holds a folder's vocabulary, and the text of its tokenizer.json.
pub fn read(folder: &Path) -> Result<(PathBuf, Vec<u8>), DataError> {
    let at = |name: &str| folder.join(name);
    if at(ONE).exists() {
        return Ok((at(ONE), bytes(&at(ONE))?));
    }
    let beside = Beside::read(folder)?;
    let made = |path: PathBuf, made: Result<Json, String>| match made {
        Ok(json) => Ok((path, json.to_string().into_bytes())),
        Err(reason) => Err(refused(folder, &path, &reason)),
    };
    match (at(VOCAB).exists() && at(MERGES).exists(), at(PIECES).exists()) {
        (true, _) => {
            let vocab = read_object(&at(VOCAB))?.unwrap_or_default();
            let merges = String::from_utf8(bytes(&at(MERGES))?).map_err(|_| refused(folder, &at(MERGES), "it is not UTF-8 text"))?;
            made(at(VOCAB), byte_level(vocab, &merges, &beside))
        }
        (false, true) => made(at(PIECES), sentencepiece::tokenizer(&bytes(&at(PIECES))?, &beside)),
        (false, false) => match trace(folder) {
            Some(file) => Err(refused(folder, &at(ONE), &format!("there is none, and {file} beside it is not read here"))),
            None => Err(DataError::Tokenizer { path: at(ONE), reason: "there is no such file".into() }),
        },
    }
}

/// A file of the folder which shows that its model has a tokenizer.
pub fn trace(folder: &Path) -> Option<&'static str> {
    std::iter::once(ONE).chain(TRACES).find(|name| folder.join(name).exists())
}

fn refused(folder: &Path, path: &Path, reason: &str) -> DataError {
    // The folder is a word of its own: its name may have quotes, or be a command of a shell.
    let python =
        "import sys; from transformers import AutoTokenizer; AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])";
    let command = format!("python3 -c '{python}' {}", quoted(&folder.display().to_string()));
    DataError::Unconverted { path: path.to_owned(), reason: reason.into(), command }
}

/// The bytes of a file of a tokenizer.
pub fn bytes(path: &Path) -> Result<Vec<u8>, DataError> {
    let fail = |reason: String| DataError::Tokenizer { path: path.to_owned(), reason };
    input::read_up_to(path, MOST_BYTES).map_err(|e| fail(format!("{e}{}", input::fetched(path))))
}

/// What the files beside a vocabulary say.
pub struct Beside {
    config: Map<String, Json>,
    map: Map<String, Json>,
    added: Map<String, Json>,
    /// config.json's model_type.
    model: Option<String>,
}

impl Beside {
    fn read(folder: &Path) -> Result<Beside, DataError> {
        let table = |name: &str| Ok::<_, DataError>(read_object(&folder.join(name))?.unwrap_or_default());
        let model = table("config.json")?.get("model_type").and_then(Json::as_str).map(String::from);
        Ok(Beside { config: table(CONFIG)?, map: table("special_tokens_map.json")?, added: table("added_tokens.json")?, model })
    }

    /// A setting of tokenizer_config.json.
    pub fn flag(&self, key: &str) -> Option<bool> {
        self.config.get(key).and_then(Json::as_bool)
    }

    /// The token of a role ("bos_token"), where a file names one; null is none.
    pub fn role(&self, key: &str) -> Option<Option<&str>> {
        let value = self.config.get(key).or_else(|| self.map.get(key))?;
        Some(value.get("content").unwrap_or(value).as_str())
    }

    /// All tokens that the files call special.
    fn special(&self) -> Vec<&str> {
        let roles = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];
        let mut all: Vec<&str> = roles.iter().filter_map(|role| self.role(role).flatten()).collect();
        for table in [&self.config, &self.map] {
            let more = table.get("additional_special_tokens").and_then(Json::as_array);
            all.extend(more.into_iter().flatten().filter_map(|token| token.get("content").unwrap_or(token).as_str()));
        }
        all
    }

    /// The added tokens of a tokenizer.json: of added_tokens.json, special ones that the vocabulary has, and `own` (whether special).
    /// What tokenizer_config.json lists with ids and settings takes precedence.
    pub fn added_tokens(&self, id: impl Fn(&str) -> Option<u64>, own: &[(String, bool)]) -> Result<Vec<Json>, String> {
        let mut all: BTreeMap<u64, Json> = BTreeMap::new();
        let token = |id: u64, name: &str, special: bool| json!({ "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false, "normalized": !special, "special": special });
        let special = self.special();
        for (name, value) in &self.added {
            let id = value.as_u64().ok_or_else(|| format!("added_tokens.json has {name:?}: {value}, which is no id"))?;
            all.insert(id, token(id, name, special.contains(&name.as_str())));
        }
        let own = own.iter().map(|(name, special)| (name.as_str(), *special));
        for (name, special) in special.iter().map(|name| (*name, true)).chain(own) {
            if let Some(id) = id(name) {
                all.entry(id).or_insert_with(|| token(id, name, special));
            }
        }
        for (key, value) in self.config.get("added_tokens_decoder").and_then(Json::as_object).into_iter().flatten() {
            let bad = || format!("{CONFIG}'s added_tokens_decoder has {key:?}: {value}, which is no token");
            let (id, mut value) = (key.parse::<u64>().map_err(|_| bad())?, value.as_object().cloned().ok_or_else(bad)?);
            value.insert("id".into(), id.into());
            all.insert(id, Json::Object(value));
        }
        Ok(all.into_values().collect())
    }
}

/// GPT-2's files: BPE over bytes, each written as a letter.
fn byte_level(vocab: Map<String, Json>, merges: &str, beside: &Beside) -> Result<Json, String> {
    let class = beside.config.get("tokenizer_class").and_then(Json::as_str).map(|name| name.trim_end_matches("Fast"));
    let qwen = match (class, beside.model.as_deref()) {
        (Some("Qwen2Tokenizer"), _) | (None, Some("qwen2" | "qwen3")) => true,
        (Some("GPT2Tokenizer"), _) | (None, None | Some("gpt2")) => false,
        (None, Some(other)) => return Err(format!("config.json names the model type {other}, whose way to split texts is not known here")),
        (Some(other), _) => return Err(format!("{CONFIG} names the class {other}, whose way to split texts is not known here")),
    };
    let pairs = merges.lines().filter(|line| !line.is_empty() && !line.starts_with("#version"));
    let pair = |(i, line): (usize, &str)| match line.trim_end_matches('\r').split_once(' ') {
        Some((a, b)) if !a.is_empty() && !b.is_empty() && !b.contains(' ') => Ok(json!([a, b])),
        _ => Err(format!("{MERGES} has no pair in its merge {}: {line:?}", i + 1)),
    };
    let merges = pairs.enumerate().map(pair).collect::<Result<Vec<_>, _>>()?;
    let own = [("<|endoftext|>".to_string(), true)];
    let added = beside.added_tokens(|name| vocab.get(name).and_then(Json::as_u64), &own)?;
    let prefix = beside.flag("add_prefix_space").unwrap_or(false);
    let level =
        |prefix: bool, regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex });
    let split = json!({ "type": "Split", "pattern": { "Regex": QWEN }, "behavior": "Isolated", "invert": false });
    let before = match qwen {
        true => json!({ "type": "Sequence", "pretokenizers": [split, level(prefix, false)] }),
        false => level(prefix, true),
    };
    let bos = beside.role("bos_token").flatten().or(Some("<|endoftext|>").filter(|_| !qwen));
    let begin = bos.filter(|_| beside.flag("add_bos_token") == Some(true)).and_then(|name| Some((name, vocab.get(name)?.as_u64()?)));
    let behind = begin.map_or_else(|| level(true, true), |(name, id)| before_texts(name, id));
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": if qwen { json!({ "type": "NFC" }) } else { Json::Null },
        "pre_tokenizer": before, "post_processor": behind, "decoder": level(true, true),
        "model": { "type": "BPE", "vocab": vocab, "merges": merges },
    }))
}

/// A post-processor that puts a token before every text.
pub fn before_texts(name: &str, id: u64) -> Json {
    let (token, text) =
        (json!({ "SpecialToken": { "id": name, "type_id": 0 } }), |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } }));
    json!({ "type": "TemplateProcessing", "single": [token, text("A")], "pair": [token, text("A"), token, text("B")],
        "special_tokens": { name: { "id": name, "ids": [id], "tokens": [name] } } })
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use super::*;
    use std::fs;

    const BPE: &[u8] = include_bytes!("samples/bpe.model");
    const UNIGRAM: &[u8] = include_bytes!("samples/unigram.model");

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        files.iter().for_each(|(name, bytes)| fs::write(dir.path().join(name), bytes).unwrap());
        dir
    }

    fn of(files: &[(&str, &[u8])]) -> Result<Option<Tokenizer>, DataError> {
        Tokenizer::of_folder(folder(files).path())
    }

    #[test]
    fn a_folder_without_tokenizer_json_is_read_as_its_own_packages_read_it() {
        let expected: Json = serde_json::from_slice(include_bytes!("samples/expected.json")).unwrap();
        let mut texts: Vec<&str> = expected["tests"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
        texts.push("a<|endoftext|>b");
        let two: [(&str, &[u8]); 2] = [(VOCAB, include_bytes!("samples/vocab.json")), (MERGES, include_bytes!("samples/merges.txt"))];
        for (name, files) in [("bpe", &[(PIECES, BPE)][..]), ("unigram", &[(PIECES, UNIGRAM)]), ("gpt2", &two)] {
            let tokenizer = of(files).unwrap().unwrap();
            for (text, ids) in texts.iter().zip(expected["ids"][name].as_array().unwrap()) {
                assert_eq!(json!(tokenizer.encode(text).unwrap()), *ids, "{name}: {text:?}");
                assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()), *text, "{name}");
            }
        }
        let llama = of(&[(PIECES, BPE)]).unwrap().unwrap();
        assert_eq!((llama.begin().id, llama.eos()), (Some(1), Some(2)), "<s> is put before texts, </s> ends them");
        let silent = of(&[(PIECES, BPE), (CONFIG, br#"{"add_bos_token": false}"#)]).unwrap().unwrap();
        assert_eq!(silent.begin().id, None);
        let more = of(&[(PIECES, BPE), ("added_tokens.json", br#"{"<pad>": 420}"#)]).unwrap().unwrap();
        assert_eq!((more.token("<pad>"), more.vocab()), (Some(420), 421));
    }

    /// In pieces, and with the places of tokens, as the library encodes it at once.
    #[test]
    fn a_long_text_has_the_tokens_of_the_whole() {
        let words: String = (0..30_000).map(|i| format!("the model{} learns, {} ", i % 7, i * i % 1013)).collect();
        let text: String = words + &"line of its own\nand one more.\n".repeat(3000);
        let two: [(&str, &[u8]); 2] = [(VOCAB, include_bytes!("samples/vocab.json")), (MERGES, include_bytes!("samples/merges.txt"))];
        for files in [&[(PIECES, BPE)][..], &two] {
            let tokenizer = of(files).unwrap().unwrap();
            let Tokenizer::Json(json) = &tokenizer else { panic!("it has a vocabulary of its own") };
            let parts = tokenizer.parts(&text).unwrap();
            assert!(parts.len() > 4 && parts.iter().all(|part| part.len() < 1 << 19), "{parts:?}");
            let whole = json.inner.encode(&text, false).unwrap();
            let placed: Vec<_> = whole.get_ids().iter().copied().zip(whole.get_offsets().iter().copied()).collect();
            assert!(tokenizer.encode(&text).unwrap() == whole.get_ids());
            let ours = tokenizer.encode_places(&text).unwrap();
            for (ours, whole) in ours.iter().zip(&placed).filter(|(a, b)| a != b) {
                let ((from, to), (begins, ends)) = (ours.1, whole.1);
                let is_a_space = from.abs_diff(begins) <= 1 && to.abs_diff(ends) <= 1 && text[from.min(begins)..].starts_with(' ');
                let is_of_a_cut = parts.iter().any(|part| part.start.abs_diff(from) <= 1);
                assert!(is_a_space && is_of_a_cut && ours.0 == whole.0, "{ours:?} {whole:?}");
            }
            assert_eq!(ours.len(), placed.len());
            // Five million letters are one word.
            let said = tokenizer.encode(&"a".repeat(5_000_000)).unwrap_err().to_string();
            assert!(said.contains("no place where it could be cut"), "{said}");
        }
    }

    /// What is advised is for a shell.
    #[test]
    fn a_folder_is_one_word_of_the_command_that_converts_it() {
        let said = refused(Path::new("q$(touch x)'"), Path::new("a"), "it is odd").to_string();
        assert!(said.contains(r#"save_pretrained(sys.argv[1])' 'q$(touch x)'\''"#), "{said}");
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_the_way_to_convert_it() {
        let other: &[u8] = br#"{"tokenizer_class": "WhisperTokenizer"}"#;
        let trie = [BPE, &[0x1a, 3, 0x12, 1, 7][..]].concat();
        type Files<'a> = &'a [(&'a str, &'a [u8])];
        let cases: [(Files, &str); 5] = [
            // Llama 3's files, whose texts are split otherwise than GPT-2's.
            (&[(VOCAB, b"{}"), (MERGES, b"a b"), ("config.json", br#"{"model_type": "llama"}"#)], "model type llama"),
            (&[(CONFIG, b"{}")], "tokenizer_config.json beside it"),
            (&[(VOCAB, b"{}"), (MERGES, b"a b"), (CONFIG, other)], "WhisperTokenizer"),
            (&[(PIECES, &trie)], "precompiled_charsmap"),
            (&[(PIECES, b"nonsense")], "no SentencePiece model"),
        ];
        for (files, part) in cases {
            let error = of(files).err().unwrap().to_string();
            assert!(error.contains(part) && error.contains("AutoTokenizer.from_pretrained"), "{error}");
        }
        assert!(of(&[("config.json", b"{}")]).unwrap().is_none(), "no trace of one");
    }

    #[test]
    fn damaged_files_are_errors_and_never_a_panic() {
        for model in [BPE, UNIGRAM] {
            for cut in (0..model.len()).step_by(97) {
                let _ = sentencepiece::tokenizer(&model[..cut], &Beside::read(Path::new("/nowhere")).unwrap());
                let mut bytes = model.to_vec();
                bytes[cut] ^= 0xff;
                if let Ok(Some(tokenizer)) = of(&[(PIECES, &bytes)]) {
                    let _ = tokenizer.encode("the model");
                }
            }
        }
        for merges in ["a", "a  b", "a b c", "zz yy"] {
            assert!(of(&[(VOCAB, br#"{"a": 0, "b": 1}"#), (MERGES, merges.as_bytes())]).is_err(), "{merges}");
        }
        assert!(of(&[(VOCAB, br#"{"a": -1}"#), (MERGES, b"")]).is_err());
    }
}
