//! What a tokenizer.json says about sizes, before the library takes its word for it: how much a normalizer or a decoder makes of a text, how much is put around
//! one, how long words and added tokens are.

use base64::Engine as _;
use engine::mutant;
use serde::Deserialize;
use serde_json::{Map, Value as Json};

/// Bytes that the steps of one part may make of one. Published ones make up to 66.
const GROWTH: f64 = 1024.0;
/// Steps of one part.
const STEPS: usize = 64;
/// Pieces that post-processors put together, and ids of one of them. Published ones have up to 12.
const PIECES: usize = 64;
/// Characters of a word that WordPiece looks for parts of, in time that grows with its square. Published ones have 100.
const WORD: u64 = 1000;
/// Bytes of an added token, and of all as they are looked for.
const ADDED: usize = 64 << 10;
const ALL_ADDED: f64 = (16 << 20) as f64;

/// Bytes of all regular expressions, what of them looks around or back (each is compiled apart), and how often they repeat something by counts, multiplied.
/// Published ones have up to some 2,000 bytes, 5 and 27.
const PATTERNS: usize = 16 << 10;
const LOOKS: usize = 64;
const REPEATED: f64 = 1000.0;

/// A tokenizer.json; a key that is there twice is an error, as it is for the library in most places.
#[derive(Deserialize)]
struct Outline {
    #[serde(default)]
    normalizer: Json,
    #[serde(default)]
    pre_tokenizer: Json,
    #[serde(default)]
    post_processor: Json,
    #[serde(default)]
    decoder: Json,
    #[serde(default)]
    added_tokens: Vec<Added>,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    content: String,
    #[serde(default)]
    normalized: bool,
}

#[derive(Deserialize)]
struct Model {
    #[serde(default)]
    max_input_chars_per_word: Option<u64>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
}

/// The merges, which are read only where a prefix is cut off of them.
#[derive(Deserialize)]
struct Merging {
    model: Merges,
}

#[derive(Deserialize)]
struct Merges {
    #[serde(default)]
    merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair([String; 2]),
    Line(String),
}

/// How many bytes its normalizer may make of one; or what is wrong.
pub fn check(text: &[u8]) -> Result<f64, String> {
    let outline: Outline = serde_json::from_slice(text).map_err(|e| format!("not a readable tokenizer.json: {e}"))?;
    let normalizer = growth("normalizer", &outline.normalizer)?;
    let made = normalizer * growth("pre_tokenizer", &outline.pre_tokenizer)?;
    growth("decoder", &outline.decoder)?;
    patterns([&outline.normalizer, &outline.pre_tokenizer, &outline.decoder])?;
    let mut pieces = 0;
    processors(&outline.post_processor, &mut pieces)?;
    let word = outline.model.max_input_chars_per_word.unwrap_or_default();
    if word > mutant!("words-have-any-length", WORD, u64::MAX) {
        return Err(format!("its model's max_input_chars_per_word is {word}; {WORD} is the most that is read"));
    }
    prefix(text, outline.model.continuing_subword_prefix.as_deref().unwrap_or_default())?;
    added(outline.added_tokens.iter().map(|token| (token.content.len(), token.normalized)), normalizer)?;
    Ok(made)
}

/// Whether added tokens have room: the bytes of each, and whether the normalizer makes more of them.
pub fn added(tokens: impl Iterator<Item = (usize, bool)>, growth: f64) -> Result<(), String> {
    let mut all = 0.0;
    for (length, normalized) in tokens {
        if length > mutant!("added-tokens-have-any-length", ADDED, usize::MAX) {
            return Err(format!("an added token has {length} bytes; {ADDED} is the most that is read"));
        }
        all += length as f64 * if normalized { growth } else { 1.0 };
    }
    match all > ALL_ADDED {
        true => Err(format!("its added tokens have {all:.0} bytes, as the normalizer makes them; {ALL_ADDED} is the most that is read")),
        false => Ok(()),
    }
}

/// The objects in a part that do something, in their order: a sequence holds others.
fn steps<'a>(part: &'a Json, found: &mut Vec<&'a Map<String, Json>>) {
    match part {
        Json::Object(object) => {
            found.push(object);
            object.values().for_each(|inner| steps(inner, found));
        }
        Json::Array(list) => list.iter().for_each(|inner| steps(inner, found)),
        _ => {}
    }
}

/// Whether the regular expressions have room: compiled, a class of letters takes some 50 KB, and as much again each time that it is repeated by a count.
fn patterns(parts: [&Json; 3]) -> Result<(), String> {
    let mut found = vec![];
    parts.into_iter().for_each(|part| steps(part, &mut found));
    let all: Vec<&str> = found.iter().filter_map(|step| step.get("Regex").and_then(Json::as_str)).collect();
    let (bytes, looks) = (all.iter().map(|regex| regex.len()).sum::<usize>(), all.iter().map(|regex| looks(regex)).sum::<usize>());
    let repeated: f64 = all.iter().map(|regex| repeated(regex)).product();
    let refused = |what: String| Err(format!("its regular expressions {what}"));
    match mutant!("patterns-of-any-size", true, false) {
        true if bytes > PATTERNS => refused(format!("have {bytes} bytes; {PATTERNS} are the most that are read")),
        true if looks > LOOKS => refused(format!("look around or back {looks} times; {LOOKS} are the most that are read")),
        true if repeated > REPEATED => {
            refused(format!("repeat what they find {repeated:.0} times by counts; {REPEATED} are the most that are read"))
        }
        _ => Ok(()),
    }
}

/// How often a regular expression looks around or back, or keeps what it has found: groups such as `(?=`, `\\1` and `a++`.
fn looks(regex: &str) -> usize {
    let groups = ["(?=", "(?!", "(?<=", "(?<!", "(?>", "(?("].iter().map(|group| regex.matches(group).count()).sum::<usize>();
    let pairs = || regex.bytes().zip(regex.bytes().skip(1));
    let back = pairs().filter(|(a, b)| *a == b'\\' && (b.is_ascii_digit() || b"kgKG".contains(b))).count();
    groups + back + pairs().filter(|(a, b)| b"*+?}".contains(a) && *b == b'+').count()
}

/// The product of all counts in `{3}`, `{3,}` and `{1,3}`.
fn repeated(regex: &str) -> f64 {
    let counts = regex.split('{').skip(1).filter_map(|rest| {
        let (counts, _) = rest.split_once('}')?;
        let numbers = counts.split(',').filter(|count| !count.is_empty());
        numbers.map(|count| count.trim().parse::<f64>().ok()).collect::<Option<Vec<_>>>()
    });
    counts.map(|both| both.into_iter().fold(1.0, f64::max)).product()
}

/// How many bytes a part may make of one.
fn growth(what: &str, part: &Json) -> Result<f64, String> {
    let mut found = vec![];
    steps(part, &mut found);
    // A pattern is an object in its step, and the sequence one around them.
    if found.len() > 2 * STEPS + 1 {
        return Err(format!("its {what} has more than {STEPS} steps"));
    }
    let mut product = 1.0;
    for step in found {
        if step.get("length").is_some_and(|length| *length == 0) {
            return Err(format!("its {what} cuts a text into pieces of length 0"));
        }
        product *= made_of_one(step).map_err(|reason| format!("its {what} {reason}"))?;
    }
    let most = mutant!("normalizers-grow-without-end", GROWTH, f64::INFINITY);
    match product > most {
        true => Err(format!("its {what} may make {product:.0} bytes of one; {GROWTH} is the most that is read")),
        false => Ok(product),
    }
}

/// How many bytes one step may make of one. Unicode's own forms (NFKC and its like) are not counted: they grow a text once.
fn made_of_one(step: &Map<String, Json>) -> Result<f64, String> {
    let text = |key: &str| step.get(key).and_then(Json::as_str);
    if let Some(content) = text("content").filter(|_| step.contains_key("pattern")) {
        return Ok(match shortest(&step["pattern"]) {
            0 => 1.0 + content.len() as f64,
            least => (content.len() as f64 / least as f64).max(1.0),
        });
    }
    if let Some(charsmap) = text("precompiled_charsmap") {
        return longest_replacement(charsmap).ok_or_else(|| "has a damaged precompiled_charsmap".into());
    }
    if let Some(before) = text("prepend") {
        return Ok(1.0 + before.len() as f64);
    }
    let kind = text("type").unwrap_or_default();
    Ok(match kind {
        // Other writing systems have two bytes for one, and a decoder may put something between all characters.
        "ByteLevel" | "BertNormalizer" | "CTC" | "BPEDecoder" | "WordPiece" => 2.0,
        "Metaspace" => 1.0 + text("replacement").unwrap_or_default().len() as f64,
        _ => 1.0,
    })
}

/// Bytes of the shortest text that a pattern finds.
fn shortest(pattern: &Json) -> usize {
    let regex = |regex: &str| {
        let parsed = regex_syntax::Parser::new().parse(regex).ok();
        parsed.and_then(|parsed| parsed.properties().minimum_len()).unwrap_or_default()
    };
    match (pattern.get("String").and_then(Json::as_str), pattern.get("Regex").and_then(Json::as_str)) {
        (Some(text), _) => text.len(),
        (_, Some(text)) => regex(text),
        _ => 0,
    }
}

/// Of SentencePiece's normalizer: the length of a table, the table, and the texts that it leads to, each with a zero behind it.
fn longest_replacement(charsmap: &str) -> Option<f64> {
    let bytes = base64::engine::general_purpose::STANDARD.decode(charsmap).ok()?;
    let (length, rest) = bytes.split_first_chunk()?;
    let texts = rest.get(u32::from_le_bytes(*length) as usize..)?;
    Some(texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or_default().max(1) as f64)
}

/// Templates of post-processors.
fn processors(part: &Json, pieces: &mut usize) -> Result<(), String> {
    let mut found = vec![];
    steps(part, &mut found);
    for template in found.iter().filter(|step| step.contains_key("single")) {
        let known = template.get("special_tokens").and_then(Json::as_object);
        let mut texts = 0;
        for (key, list) in [("single", template.get("single")), ("pair", template.get("pair"))] {
            for piece in list.and_then(Json::as_array).into_iter().flatten() {
                *pieces += 1;
                let id = |kind: &str| piece.get(kind).and_then(|piece| piece.get("id")).and_then(Json::as_str);
                match (id("Sequence"), id("SpecialToken")) {
                    (Some(text), _) if key == "single" && text != "A" => {
                        return Err(format!("its post_processor puts the text {text:?} around a single one"));
                    }
                    (Some(_), _) if key == "single" => texts += 1,
                    (_, Some(name)) if known.is_none_or(|known| !known.contains_key(name)) => {
                        return Err(format!("its post_processor puts {name:?} around texts, which is none of its special_tokens"));
                    }
                    _ => {}
                }
            }
        }
        let ids = |token: &Json| token.get("ids").and_then(Json::as_array).map_or(0, Vec::len);
        let most_ids = known.into_iter().flatten().map(|(_, token)| ids(token)).max().unwrap_or_default();
        if texts > 1 || most_ids.max(*pieces) > mutant!("any-number-of-pieces-is-put-together", PIECES, usize::MAX) {
            return Err(format!("its post_processor makes more of a text than the text and {PIECES} tokens"));
        }
    }
    Ok(())
}

/// Whether what the library cuts off of merges is there, and ends where a character ends.
fn prefix(text: &[u8], prefix: &str) -> Result<(), String> {
    if prefix.is_empty() {
        return Ok(());
    }
    let Ok(merging) = serde_json::from_slice::<Merging>(text) else { return Ok(()) };
    for merge in merging.model.merges {
        let second = match &merge {
            Merge::Pair([_, second]) => second,
            Merge::Line(line) => line.split_once(' ').map_or("", |(_, second)| second),
        };
        if !second.is_char_boundary(prefix.len()) {
            return Err(format!("its model merges {second:?}, which is shorter than the continuing_subword_prefix {prefix:?}"));
        }
    }
    Ok(())
}
