//! Text that is encoded in pieces has the tokens of the whole.

use super::super::tokenizer::tests::letters;
use super::*;
use serde_json::{Map, json};
use std::path::Path;

/// Words of several scripts, numbers, punctuation, quotes, runs of spaces and of line breaks, special tokens: the same text always.
fn text(words: usize) -> String {
    const WORDS: [&str; 28] = [
        "the",
        "cat",
        "sat",
        "don't",
        "We'll",
        "größer",
        "naïve",
        "e\u{301}t\u{e9}",
        "世界",
        "你好，世界。",
        "日本語",
        "मराठी",
        "1234567",
        "3.14",
        "«oui»",
        "\"quoted\"",
        "and/or",
        "a_b",
        "x",
        "THE",
        "—",
        "(see",
        "p.5)",
        "end.",
        "what?!",
        "<|end|>",
        "<mask>",
        "ﬁne",
    ];
    const GAPS: [&str; 12] = [" ", " ", " ", " ", " ", "  ", "\n", "\n", "\n\n", "\r\n", " \n ", "\t"];
    let draw = |i: usize, n: usize| super::super::hash(&[7, i as u64, n as u64]) as usize % n;
    (0..words).flat_map(|i| [WORDS[draw(i, WORDS.len())], GAPS[draw(i, GAPS.len())]]).collect()
}

/// BPE whose entries are what the most frequent pairs of this text's words make, `size` of them.
fn merged(alphabet: Map<String, serde_json::Value>, words: &[Vec<String>], size: usize) -> serde_json::Value {
    let (mut words, mut vocab, mut merges) = (words.to_vec(), alphabet, vec![]);
    for _ in 0..size {
        let mut pairs = std::collections::BTreeMap::new();
        words.iter().flat_map(|w| w.windows(2)).for_each(|p| *pairs.entry((p[0].clone(), p[1].clone())).or_insert(0) += 1);
        let Some(((a, b), _)) = pairs.into_iter().max_by_key(|(pair, n)| (*n, std::cmp::Reverse(pair.clone()))) else { break };
        for word in &mut words {
            let mut i = 0;
            while i + 1 < word.len() {
                if word[i] == a && word[i + 1] == b {
                    word[i] = format!("{a}{b}");
                    word.remove(i + 1);
                }
                i += 1;
            }
        }
        let next = vocab.len();
        vocab.entry(format!("{a}{b}")).or_insert(next.into());
        merges.push(format!("{a} {b}"));
    }
    json!({"type": "BPE", "vocab": vocab, "merges": merges})
}

/// Over bytes: words with the space before them, and punctuation with the line break behind it.
fn byte_bpe() -> serde_json::Value {
    let level = tokenizers::pre_tokenizers::byte_level::ByteLevel::new(false, true, false);
    let split = |word: &str| {
        let mut s = tokenizers::PreTokenizedString::from(word);
        tokenizers::PreTokenizer::pre_tokenize(&level, &mut s).unwrap();
        let splits = s.get_splits(tokenizers::OffsetReferential::Original, tokenizers::OffsetType::None);
        splits.into_iter().flat_map(|(t, ..)| t.chars().map(|c| c.to_string()).collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    let text = text(300);
    let words: Vec<Vec<String>> = text.split_inclusive([' ', '\n']).map(|w| split(&format!(" {}", w.trim_end_matches(' ')))).collect();
    merged(letters(&[]), &words, 200)
}

/// Over characters, with spaces as ▁ and bytes for what is not known; entries begin with a ▁ or have none, but for the last.
fn sentence_bpe() -> serde_json::Value {
    let text = text(300).replace(' ', "▁");
    let mut alphabet: Map<String, serde_json::Value> = Map::new();
    let bytes = (0..=255u8).map(|b| format!("<{b:#04X}>"));
    for entry in ["<unk>".to_string()].into_iter().chain(bytes).chain(text.chars().filter(|c| c.is_ascii() || *c == '▁').map(String::from))
    {
        let next = alphabet.len();
        alphabet.entry(entry).or_insert(next.into());
    }
    let words: Vec<Vec<String>> =
        text.split('▁').map(|w| format!("▁{w}").chars().filter(|c| c.is_ascii() || *c == '▁').map(String::from).collect()).collect();
    let mut model = merged(alphabet, &words, 150);
    // An entry that lies across a space.
    let next = model["vocab"].as_object().unwrap().len();
    model["vocab"].as_object_mut().unwrap().insert(".▁".into(), next.into());
    model["merges"].as_array_mut().unwrap().push(". ▁".into());
    model["unk_token"] = "<unk>".into();
    model["byte_fallback"] = true.into();
    model["fuse_unk"] = true.into();
    model
}

fn word_piece() -> serde_json::Value {
    let pieces = [
        "[UNK]", "the", "cat", "sat", "don", "we", "##e", "##s", "##t", "gr", "##o", "##n", "##d", "en", "世", "界", "好", "1", "##2",
        "##3", ".", "!", "'", "ll",
    ];
    let vocab: Map<String, serde_json::Value> = pieces.iter().enumerate().map(|(i, p)| (p.to_string(), i.into())).collect();
    json!({"type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100})
}

fn unigram() -> serde_json::Value {
    let mut vocab = vec![json!(["<unk>", 0.0]), json!(["▁", -2.0])];
    let pieces = [
        "▁the", "▁c", "at", "▁s", "the", "on", "t", "e", "▁don", "'", "世界", "▁世", "日本", "1", "23", "34", "en", "d", ".", "▁", "\n",
        "x", "▁x", "s",
    ];
    vocab.extend(pieces.iter().enumerate().map(|(i, p)| json!([p, -3.0 - i as f64 * 0.37])));
    json!({"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": false})
}

fn tokenizer(
    model: &serde_json::Value,
    normalizer: serde_json::Value,
    pre_tokenizer: serde_json::Value,
    added: serde_json::Value,
) -> Tokenizer {
    let json = json!({"version": "1.0", "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model});
    Tokenizer::from_json(Path::new("test.json"), json.to_string().as_bytes()).unwrap()
}

fn added(content: &str, lstrip: bool, rstrip: bool) -> serde_json::Value {
    json!({"id": 100_000, "content": content, "single_word": false, "lstrip": lstrip, "rstrip": rstrip, "normalized": false, "special": true})
}

fn sequence(key: &str, parts: &[serde_json::Value]) -> serde_json::Value {
    json!({"type": "Sequence", key: parts})
}

fn byte_level(prefix: bool, regex: bool) -> serde_json::Value {
    json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex})
}

fn split(regex: &str, behavior: &str, invert: bool) -> serde_json::Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert})
}

fn metaspace(scheme: &str) -> serde_json::Value {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true})
}

/// Punctuation takes the line breaks behind it, as it does in Llama-3's and Qwen's tokenizers.
const LINES: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn known() -> Vec<(&'static str, Tokenizer)> {
    let (bytes, sentence, pieces, unigram) = (byte_bpe(), sentence_bpe(), word_piece(), unigram());
    let null = serde_json::Value::Null;
    let special = json!([added("<|end|>", false, false)]);
    let lines = sequence("pretokenizers", &[split(LINES, "Isolated", false), byte_level(false, false)]);
    let nfc = json!({"type": "NFC"});
    let to_space = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let bert =
        json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true});
    vec![
        ("byte-level", tokenizer(&bytes, null.clone(), byte_level(false, true), special.clone())),
        ("byte-level, NFKC", tokenizer(&bytes, json!({"type": "NFKC"}), byte_level(false, true), special.clone())),
        ("byte-level, space before a text", tokenizer(&bytes, null.clone(), byte_level(true, true), special.clone())),
        ("lines with punctuation", tokenizer(&bytes, nfc.clone(), lines.clone(), special.clone())),
        (
            "matches alone",
            tokenizer(
                &bytes,
                null.clone(),
                sequence("pretokenizers", &[split(LINES, "Removed", true), byte_level(false, false)]),
                special.clone(),
            ),
        ),
        (
            "digits",
            tokenizer(
                &bytes,
                null.clone(),
                sequence("pretokenizers", &[json!({"type": "Digits", "individual_digits": true}), byte_level(false, true)]),
                special.clone(),
            ),
        ),
        ("takes white space", tokenizer(&bytes, nfc, lines, json!([added("<|end|>", false, true), added("<mask>", true, false)]))),
        ("word pieces", tokenizer(&pieces, bert, json!({"type": "BertPreTokenizer"}), json!([added("<mask>", true, false)]))),
        ("white space", tokenizer(&pieces, null.clone(), json!({"type": "Whitespace"}), json!([]))),
        ("unigram, always ▁", tokenizer(&unigram, json!({"type": "NFKC"}), metaspace("always"), special.clone())),
        ("unigram, first ▁", tokenizer(&unigram, null.clone(), metaspace("first"), special.clone())),
        (
            "unigram, words",
            tokenizer(
                &unigram,
                null.clone(),
                sequence("pretokenizers", &[json!({"type": "WhitespaceSplit"}), metaspace("always")]),
                json!([]),
            ),
        ),
        (
            "unigram, first of words",
            tokenizer(
                &unigram,
                null.clone(),
                sequence("pretokenizers", &[json!({"type": "WhitespaceSplit"}), metaspace("first")]),
                json!([]),
            ),
        ),
        (
            "no words, ▁ before a text",
            tokenizer(
                &sentence,
                sequence("normalizers", &[json!({"type": "Prepend", "prepend": "▁"}), to_space.clone()]),
                null.clone(),
                special.clone(),
            ),
        ),
        (
            "no words",
            tokenizer(
                &sentence,
                to_space.clone(),
                json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false}),
                special,
            ),
        ),
    ]
}

/// Every place that a tokenizer's parts are said to allow, and not only those that are taken; without trying them first.
#[test]
fn pieces_are_encoded_as_the_whole_is() {
    let text = text(130);
    for (name, tokenizer) in known() {
        let (places, whole) = (Places::new(&tokenizer), tokenizer.encode(&text).unwrap());
        assert_eq!(places.doubt(), None, "{name}");
        let marks = text.match_indices([' ', '\n']);
        let cuts = marks.filter_map(|(i, m)| if m == " " { places.before_space(&text, i) } else { places.behind_line(&text, i) });
        let mut found = 0;
        for cut in cuts {
            let parts = [&text[..cut.end], &text[cut.begin..]].map(|part| tokenizer.encode(part).unwrap());
            assert_eq!(parts.concat(), whole, "{name}: {:?} | {:?}", &text[..cut.end], &text[cut.begin..]);
            found += 1;
        }
        assert!(found > 20, "{name}: {found} places");

        // And all at once.
        for least in [1, 40] {
            let (mut rest, mut ids, mut pieces) = (&text[..], vec![], 0);
            while let Some(cut) = places.first(rest, least) {
                assert!(!cut.forced && cut.end >= least, "{name}");
                ids.extend(tokenizer.encode(&rest[..cut.end]).unwrap());
                rest = &rest[cut.begin..];
                pieces += 1;
            }
            ids.extend(tokenizer.encode(rest).unwrap());
            assert!(ids == whole && pieces > 5, "{name}: {pieces} pieces");
        }
    }
}

/// The text would show it: cutting anywhere else changes tokens.
#[test]
fn other_places_are_none() {
    let text = text(130);
    for (name, tokenizer) in known() {
        let whole = tokenizer.encode(&text).unwrap();
        let differs = |i: usize| [&text[..i], &text[i..]].map(|part| tokenizer.encode(part).unwrap()).concat() != whole;
        assert!(text.char_indices().skip(1).step_by(7).any(|(i, _)| differs(i)), "{name}");
    }
}

#[test]
fn what_is_not_known_of_a_tokenizer_is_said() {
    let bytes = byte_bpe();
    let null = serde_json::Value::Null;
    let mut random = bytes.clone();
    random["dropout"] = 0.1.into();
    let strip = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    for (part, tokenizer) in [
        ("MergedWithNext", tokenizer(&bytes, null.clone(), split(r"\s", "MergedWithNext", false), json!([]))),
        ("(?<=a)", tokenizer(&bytes, null.clone(), split(r"(?<=a)\s", "Isolated", false), json!([]))),
        ("CharDelimiterSplit", tokenizer(&bytes, null.clone(), json!({"type": "CharDelimiterSplit", "delimiter": "a"}), json!([]))),
        ("dropout", tokenizer(&random, null.clone(), byte_level(false, true), json!([]))),
        ("beginning or the end", tokenizer(&bytes, strip, byte_level(false, true), json!([]))),
        ("certainly ends a word", tokenizer(&word_piece(), null.clone(), null.clone(), json!([]))),
        ("certainly ends a word", tokenizer(&bytes, null.clone(), split(r"\w+\s", "Isolated", false), json!([]))),
        ("beginning or the end", tokenizer(&bytes, null.clone(), byte_level(true, true), json!([added("a b", false, false)]))),
    ] {
        let places = Places::new(&tokenizer);
        assert!(places.doubt().is_some_and(|doubt| doubt.contains(part)), "{part}: {:?}", places.doubt());
    }
    assert_eq!(Places::new(&Tokenizer::Byte).doubt(), None);
}

#[test]
fn a_text_without_any_place_is_cut_all_the_same() {
    let tokenizer = tokenizer(&byte_bpe(), serde_json::Value::Null, byte_level(false, true), json!([]));
    let places = Places::new(&tokenizer);
    assert_eq!(places.first(&"ä".repeat(MOST / 2 - 1), PIECE), None, "more text may bring one");
    let cut = places.first(&"ä".repeat(MOST / 2), PIECE).unwrap();
    assert_eq!(cut, Cut { end: MOST - 2, begin: MOST - 2, forced: true });
    let lines = format!("{}\n\n{}", "ä".repeat(PIECE), "ä".repeat(MOST));
    assert_eq!(places.first(&lines, PIECE).map(|cut| (cut.end, cut.forced)), Some((2 * PIECE + 2, true)));
}
