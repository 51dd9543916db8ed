//! Which of llama.cpp's ways to split text before the merges a tokenizer.json asks for. llama.cpp knows them by name
//! (`tokenizer.ggml.pre`) and reads no regex, so what it has no name for is refused.

use super::Table;
use serde_json::Value;

/// What `ByteLevel` splits by where it is not told otherwise.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// The steps, `ignore_merges` (a word that is a token is that token, whatever the merges make of it), and llama.cpp's name.
const KNOWN: [(&[Step], bool, &str); 7] = [
    (&[Step::Split(GPT2)], false, "gpt-2"),
    (&[Step::Digits, Step::Split(GPT2)], false, "smollm"),
    (&[Step::Split(LLAMA3)], true, "llama-bpe"),
    (&[Step::Split(LLAMA3)], false, "smaug-bpe"),
    (&[Step::Split(QWEN2)], false, "qwen2"),
    (&[Step::Split(QWEN35)], false, "qwen35"),
    (&[Step::Split(TEKKEN)], true, "tekken"),
];

#[derive(Debug, PartialEq)]
enum Step<'a> {
    /// Matches and what is between them are words of their own.
    Split(&'a str),
    /// Each digit is a word of its own.
    Digits,
}

/// The name for a byte-level tokenizer.json.
pub fn name(tokenizer: &Table, ignore_merges: bool) -> Result<&'static str, String> {
    let parts = parts(tokenizer.get("pre_tokenizer"), "pretokenizers");
    let Some((last, before)) = parts.split_last() else {
        return Err("has no pre_tokenizer".into());
    };
    let mut steps = before.iter().map(|part| step(part)).collect::<Result<Vec<_>, _>>()?;
    let flag = |key: &str, default: bool| last.get(key).and_then(Value::as_bool).unwrap_or(default);
    if last["type"] != "ByteLevel" {
        return Err(format!("its pre_tokenizer ends in {last}; only ByteLevel is known there"));
    }
    if flag("add_prefix_space", true) {
        return Err("its pre_tokenizer puts a space before a text (add_prefix_space): llama.cpp does not in byte-level tokenizers".into());
    }
    if flag("use_regex", true) {
        steps.push(Step::Split(GPT2));
    }
    let found = KNOWN.into_iter().find(|(known, ignores, _)| *known == &steps[..] && *ignores == ignore_merges);
    found.map(|(.., name)| name).ok_or_else(|| {
        let names = KNOWN.map(|(.., name)| name).join(", ");
        format!("its pre_tokenizer splits by {steps:?} with ignore_merges {ignore_merges}; none of {names} does so in llama.cpp")
    })
}

fn step(part: &Value) -> Result<Step<'_>, String> {
    match part["type"].as_str() {
        Some("Digits") if part["individual_digits"] == true => Ok(Step::Digits),
        Some("Split") if part["behavior"] == "Isolated" && part["invert"] != true => match part["pattern"]["Regex"].as_str() {
            Some(regex) => Ok(Step::Split(regex)),
            None => Err(format!("its pre_tokenizer splits by {}, which is no regex", part["pattern"])),
        },
        _ => Err(format!("its pre_tokenizer has the step {part}; only Digits and Split (Isolated) are known before ByteLevel")),
    }
}

/// The steps of a normalizer or pre_tokenizer: of one that is a sequence, of one alone, or none.
pub fn parts<'a>(value: Option<&'a Value>, list: &str) -> Vec<&'a Value> {
    match value {
        None | Some(Value::Null) => vec![],
        Some(value) if value["type"] == "Sequence" => {
            value[list].as_array().into_iter().flatten().flat_map(|part| parts(Some(part), list)).collect()
        }
        Some(value) => vec![value],
    }
}
