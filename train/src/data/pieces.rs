//! Where a long text may be cut so that its pieces, encoded one by one, give the same tokens as the whole: encoding takes some 150 bytes of memory
//! for every byte of text.
//!
//! A tokenizer splits a text into words before its model sees any (and models of the other kind, without words, join only what their vocabulary
//! joins). Two places are looked at: before a space that follows a character of its own (`word| word`), and after a single line break between
//! two such (`line.⏎|line`). `Places::new` goes through a tokenizer's parts, one by one, for what each does there. What it does not know, or what
//! looks at the beginning or the end of a text, is a doubt: then a place is only tried, and people are told.

mod pattern;

use std::collections::HashSet;

use serde_json::{Value, to_value};
use tokenizers::Model;
use tokenizers::models::ModelWrapper;

use super::Tokenizer;
use super::tokenizer::Json;
use pattern::Pattern;

/// Bytes of a piece, at least: it takes 20 MB to encode.
pub const PIECE: usize = 1 << 17;
/// A piece that found no end by then is cut at the next best place.
pub const MOST: usize = 1 << 20;
/// Bytes on both sides of a place on which it is tried.
const TRIED: usize = 128;

/// A piece ends here, and the next begins there: between them may be a space that the tokenizer itself puts before a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cut {
    pub end: usize,
    pub begin: usize,
    /// Not a place where cutting is known to change nothing.
    pub forced: bool,
}

pub struct Places<'a> {
    tokenizer: &'a Tokenizer,
    before_space: bool,
    behind_line: bool,
    /// Whether the tokenizer puts a space of its own before every text: then the one at the place is left out.
    own_space: bool,
    /// What a character must be for tokens that take the white space beside them not to be there.
    letter_before_space: bool,
    letter_behind_line: bool,
    /// Characters that some word of the vocabulary has before a space.
    joined: HashSet<char>,
    doubt: Option<String>,
}

/// What a tokenizer's parts do at the two places; each part may only take away.
struct Parts {
    /// Whether words certainly end there.
    splits: [bool; 2],
    /// Whether a part may see the cut in another way.
    spoiled: [bool; 2],
    /// What a space has become, where it is replaced before it is looked at.
    space: Option<String>,
    prepended: Option<String>,
    /// Whether characters may be others by the time words are made.
    rewritten: bool,
    /// Whether they are letters that stand for bytes by then.
    bytes: bool,
    doubt: Option<String>,
}

const SPACE: usize = 0;
const LINE: usize = 1;

impl<'a> Places<'a> {
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        let mut places = Places {
            tokenizer,
            before_space: true,
            behind_line: true,
            own_space: false,
            letter_before_space: false,
            letter_behind_line: false,
            joined: HashSet::new(),
            doubt: None,
        };
        if let Tokenizer::Json(json) = tokenizer
            && let Err(doubt) = places.look(json)
        {
            places.doubt = Some(doubt);
        }
        places
    }

    /// Why a piece's first or last token may be another than in the whole; none where it cannot.
    pub fn doubt(&self) -> Option<&str> {
        self.doubt.as_deref()
    }

    fn look(&mut self, json: &Json) -> Result<(), String> {
        let mut parts =
            Parts { splits: [false; 2], spoiled: [false; 2], space: None, prepended: None, rewritten: false, bytes: false, doubt: None };
        flat(to_value(json.inner.get_normalizer()).unwrap_or_default(), "normalizers").iter().for_each(|part| parts.normalizer(part));
        flat(to_value(json.inner.get_pre_tokenizer()).unwrap_or_default(), "pretokenizers")
            .iter()
            .for_each(|part| parts.pre_tokenizer(part));
        if let Some(doubt) = parts.doubt {
            return Err(doubt);
        }
        let model = json.inner.get_model();
        if let ModelWrapper::BPE(bpe) = model
            && bpe.dropout.is_some_and(|share| share > 0.0)
        {
            return Err("its model draws at random (dropout)".into());
        }
        if !parts.splits[SPACE] {
            self.joined = joined(json, &parts)?;
            parts.splits = [true, false];
        }
        if let Some(prepended) = &parts.prepended {
            if parts.space.as_ref() != Some(prepended) {
                return Err(format!("its normalizer puts {prepended:?} before a text"));
            }
            // Such a space also follows every added token: none may be directly before or after the place.
            (self.own_space, self.letter_before_space) = (true, true);
            parts.spoiled[LINE] = true;
        }
        for token in json.inner.get_added_tokens_decoder().values() {
            let (first, last) = (token.content.chars().next(), token.content.chars().next_back());
            let is_letter = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
            let pairs = || token.content.chars().zip(token.content.chars().skip(1));
            parts.spoiled[SPACE] |= pairs().any(|(a, b)| !a.is_whitespace() && b == ' ') || token.rstrip && is_letter(last);
            parts.spoiled[LINE] |= pairs().any(|(a, b)| a == '\n' && !b.is_whitespace()) || token.lstrip && is_letter(first);
            self.letter_before_space |= token.rstrip;
            self.letter_behind_line |= token.lstrip;
            if self.own_space && (token.normalized || is_letter(first) || is_letter(last)) {
                return Err(format!("its normalizer puts a space before a text and behind tokens such as {:?}", token.content));
            }
        }
        self.before_space = parts.splits[SPACE] && !parts.spoiled[SPACE];
        self.behind_line = parts.splits[LINE] && !parts.spoiled[LINE];
        match self.before_space || self.behind_line {
            true => Ok(()),
            false => {
                (self.before_space, self.behind_line) = (true, true);
                Err("what it does at the beginning or the end of a text differs from what it does inside".into())
            }
        }
    }

    /// The first place that is at least `least` bytes in. None: more text is needed; of a text of `MOST` bytes there is always one.
    pub fn first(&self, text: &str, least: usize) -> Option<Cut> {
        let least = text.len().min(least);
        let start = (least..=text.len()).find(|&i| text.is_char_boundary(i))?;
        if matches!(self.tokenizer, Tokenizer::Byte) {
            return (start < text.len()).then_some(Cut { end: start, begin: start, forced: false });
        }
        let found = text[start..].match_indices([' ', '\n']).find_map(|(i, mark)| {
            let cut = if mark == " " { self.before_space(text, start + i) } else { self.behind_line(text, start + i) }?;
            self.holds(text, cut).then_some(cut)
        });
        found.or_else(|| (text.len() >= MOST).then(|| next_best(text, start)))
    }

    fn before_space(&self, text: &str, space: usize) -> Option<Cut> {
        let (before, behind) = (text[..space].chars().next_back()?, text[space + 1..].chars().next()?);
        let holds = self.before_space
            && is_solid(before)
            && !self.joined.contains(&before)
            && (!self.letter_before_space || before.is_alphanumeric())
            && (!self.own_space || behind.is_alphanumeric());
        holds.then_some(Cut { end: space, begin: space + usize::from(self.own_space), forced: false })
    }

    fn behind_line(&self, text: &str, line: usize) -> Option<Cut> {
        let (before, behind) = (text[..line].chars().next_back()?, text[line + 1..].chars().next()?);
        // A slash, of either width, goes with the line breaks before it in the patterns of some.
        let holds = self.behind_line
            && is_solid(before)
            && is_solid(behind)
            && !['/', '／'].contains(&behind)
            && (!self.letter_behind_line || behind.is_alphanumeric());
        holds.then_some(Cut { end: line + 1, begin: line + 1, forced: false })
    }

    /// What is known about a tokenizer's parts is tried as well, on the text around the place: it costs a thousandth.
    fn holds(&self, text: &str, cut: Cut) -> bool {
        let from = (cut.end.saturating_sub(TRIED)..).find(|&i| text.is_char_boundary(i)).unwrap_or(0);
        let to = (0..=(cut.begin + TRIED).min(text.len())).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(text.len());
        let tokens = |part: &str| self.tokenizer.encode(part).ok();
        let parts = tokens(&text[from..cut.end]).zip(tokens(&text[cut.begin..to]));
        tokens(&text[from..to]).zip(parts).is_some_and(|(whole, (left, right))| whole == [left, right].concat())
    }
}

/// The last line break, space or character of a text.
fn next_best(text: &str, least: usize) -> Cut {
    let end = text[least..].rfind('\n').map(|i| i + 1).or_else(|| text[least..].rfind(' ')).filter(|&i| i > 0);
    let end = end.map_or_else(|| text.char_indices().next_back().map_or(text.len(), |(i, _)| i), |i| least + i);
    Cut { end, begin: end, forced: true }
}

/// What stays one character or more, none of them white space, whatever a normalizer makes of it; and what joins with no space after it. Some
/// letters of India's scripts do, in the eyes of those that count what people take for a character.
fn is_solid(c: char) -> bool {
    match c {
        '\u{d4e}' | '\u{11000}'..='\u{11fff}' => false,
        '\u{2010}'..='\u{2027}' | '\u{3001}'..='\u{303f}' | '\u{ff01}'..='\u{ff5e}' => true,
        c => c.is_ascii_graphic() || c.is_alphanumeric(),
    }
}

/// A part, or the parts of a sequence.
fn flat(part: Value, key: &str) -> Vec<Value> {
    match part {
        Value::Null => vec![],
        Value::Object(mut object) if object.contains_key(key) => match object.remove(key) {
            Some(Value::Array(parts)) => parts.into_iter().flat_map(|part| flat(part, key)).collect(),
            _ => vec![],
        },
        part => vec![part],
    }
}

impl Parts {
    fn doubt(&mut self, what: &str, part: &Value) {
        let text: String = part.to_string().chars().take(120).collect();
        self.doubt.get_or_insert(format!("its {what} {text} is not known here"));
    }

    fn normalizer(&mut self, part: &Value) {
        let is = |key: &str| part[key] == true;
        match part["type"].as_str().unwrap_or_default() {
            "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" | "StripAccents" | "Nmt" | "BertNormalizer" | "Precompiled" => {
                self.rewritten = true
            }
            "Strip" => {
                self.spoiled[SPACE] |= is("strip_left");
                self.spoiled[LINE] |= is("strip_right");
                self.rewritten = true;
            }
            "Prepend" => self.prepended = part["prepend"].as_str().map(String::from),
            "Replace" => {
                let content = part["content"].as_str().unwrap_or_default();
                match (part["pattern"]["String"].as_str(), part["pattern"]["Regex"].as_str()) {
                    (Some(" "), _) => self.space = Some(content.into()),
                    (Some(text), _) if ![text, content].iter().any(|t| t.contains(char::is_whitespace)) => self.rewritten = true,
                    // A run of spaces begins at the place, and stays whole.
                    (_, Some(" {2,}")) => self.rewritten = true,
                    _ => self.doubt("normalizer", part),
                }
            }
            _ => self.doubt("normalizer", part),
        }
    }

    fn pre_tokenizer(&mut self, part: &Value) {
        let is = |key: &str| part[key] == true;
        let kind = part["type"].as_str().unwrap_or_default();
        match kind {
            _ if self.bytes => self.doubt("pre-tokenizer", part),
            "ByteLevel" => {
                self.bytes = true;
                if part.get("use_regex").is_none_or(|v| v == true) {
                    self.splits = [self.space.is_none(), true];
                }
                self.spoiled[LINE] |= is("add_prefix_space");
            }
            "Metaspace" => {
                // A word at a place after a line break gets the space that is put before a text, unless all words do.
                self.spoiled[LINE] |= match part["prepend_scheme"].as_str() {
                    Some("never") => false,
                    Some("always") => !self.splits[LINE],
                    _ => true,
                };
                self.splits[SPACE] |= is("split");
            }
            "WhitespaceSplit" | "Whitespace" | "BertPreTokenizer" => self.splits = [self.space.is_none(), true],
            "Digits" => {}
            "Punctuation" if ["Isolated", "Removed", "Contiguous"].iter().any(|b| part["behavior"] == *b) => {}
            // Never finds one.
            "Split" if part["pattern"]["String"] == " " && self.space.is_some() => {}
            "Split" if ["Isolated", "Removed"].iter().any(|b| part["behavior"] == *b) && self.space.is_none() => {
                let pattern = match (part["pattern"]["String"].as_str(), part["pattern"]["Regex"].as_str()) {
                    (Some(text), _) => Some(Pattern::text(text)),
                    (_, Some(regex)) => Pattern::regex(regex),
                    _ => None,
                };
                match pattern {
                    Some(pattern) => {
                        for (i, place) in [pattern.space, pattern.line].into_iter().enumerate() {
                            self.spoiled[i] |= place.crossed;
                            self.splits[i] |= place.covered;
                        }
                    }
                    None => self.doubt("pre-tokenizer", part),
                }
            }
            _ => self.doubt("pre-tokenizer", part),
        }
    }
}

/// For a model that is given whole texts: it joins what its vocabulary joins, so a space begins a word after every character that no entry has
/// before one.
fn joined(json: &Json, parts: &Parts) -> Result<HashSet<char>, String> {
    let ModelWrapper::BPE(bpe) = json.inner.get_model() else {
        return Err("nothing in it certainly ends a word".into());
    };
    let affixed = [&bpe.continuing_subword_prefix, &bpe.end_of_word_suffix].iter().any(|a| a.as_ref().is_some_and(|a| !a.is_empty()));
    let space = parts.space.as_deref().unwrap_or(" ");
    let mut letters = space.chars();
    let (Some(space_char), None) = (letters.next(), letters.next()) else {
        return Err("its normalizer replaces a space by several characters".into());
    };
    if bpe.ignore_merges || affixed || parts.rewritten || json.inner.get_model().token_to_id(space).is_none() {
        return Err("nothing in it certainly ends a word".into());
    }
    let mut found = HashSet::from([space_char]);
    for entry in json.inner.get_vocab(false).keys() {
        found.extend(entry.chars().zip(entry.chars().skip(1)).filter(|(_, next)| *next == space_char).map(|(before, _)| before));
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
