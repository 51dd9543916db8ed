//! SentencePiece's tokenizer.model, a protobuf: the pieces with scores and types, how they were trained, and how texts are normalized.

use std::collections::HashMap;

use serde_json::{Value as Json, json};

use super::files::{Beside, before_texts};

const SPACE: &str = "\u{2581}";

/// Each cut of a piece in two is looked up.
const LONGEST_PIECE: usize = 1024;

/// A field of a message: its number and value.
enum Value<'a> {
    Number(u64),
    Bits(u32),
    Bytes(&'a [u8]),
}

/// The fields of a message, one after the other. Nothing nests here but what is asked for, so depth is bounded.
struct Message<'a>(&'a [u8]);

impl<'a> Message<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, length: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(length).ok()?)?;
        self.0 = rest;
        Some(taken)
    }

    fn field(&mut self) -> Option<(u64, Value<'a>)> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => Value::Number(self.varint()?),
            1 => Value::Bytes(self.take(8)?),
            2 => {
                let length = self.varint()?;
                Value::Bytes(self.take(length)?)
            }
            5 => Value::Bits(u32::from_le_bytes(self.take(4)?.try_into().ok()?)),
            _ => return None,
        };
        Some((key >> 3, value))
    }
}

impl<'a> Iterator for Message<'a> {
    type Item = Result<(u64, Value<'a>), String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field().ok_or_else(|| "it is no SentencePiece model, or it is cut short".to_string());
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

struct Piece {
    text: String,
    score: f32,
    kind: Kind,
}

/// With the defaults that the format has for what a file leaves out.
struct Model {
    pieces: Vec<Piece>,
    /// 1: unigram, 2: BPE.
    algorithm: u64,
    byte_fallback: bool,
    suffix: bool,
    /// The ids of what begins and ends a text.
    bos: u64,
    charsmap: bool,
    prefix: bool,
    trims: bool,
    escapes: bool,
}

impl Model {
    fn parse(bytes: &[u8]) -> Result<Model, String> {
        let mut model = Model {
            pieces: vec![],
            algorithm: 1,
            byte_fallback: false,
            suffix: false,
            bos: 1,
            charsmap: false,
            prefix: true,
            trims: true,
            escapes: true,
        };
        for field in Message(bytes) {
            match field? {
                (1, Value::Bytes(piece)) => model.pieces.push(Piece::parse(piece, model.pieces.len())?),
                (2, Value::Bytes(trainer)) => {
                    for field in Message(trainer) {
                        match field? {
                            (3, Value::Number(n)) => model.algorithm = n,
                            (24, Value::Number(n)) => model.suffix = n != 0,
                            (35, Value::Number(n)) => model.byte_fallback = n != 0,
                            (41, Value::Number(n)) => model.bos = n,
                            _ => {}
                        }
                    }
                }
                (3, Value::Bytes(normalizer)) => {
                    for field in Message(normalizer) {
                        match field? {
                            (2, Value::Bytes(map)) => model.charsmap = !map.is_empty(),
                            (3, Value::Number(n)) => model.prefix = n != 0,
                            (4, Value::Number(n)) => model.trims = n != 0,
                            (5, Value::Number(n)) => model.escapes = n != 0,
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        match &model {
            Model { pieces, .. } if pieces.is_empty() => Err("it holds no pieces: it is no SentencePiece model".into()),
            Model { charsmap: true, .. } => Err("it rewrites characters by a table of its own (precompiled_charsmap)".into()),
            Model { suffix: true, .. } => Err("it writes spaces behind words (treat_whitespace_as_suffix)".into()),
            Model { escapes: false, .. } => Err("it leaves spaces as they are (escape_whitespaces is off)".into()),
            Model { algorithm: 1 | 2, .. } => Ok(model),
            Model { algorithm, .. } => Err(format!("its model type is {algorithm}; unigram (1) and BPE (2) are known")),
        }
    }
}

impl Piece {
    fn parse(bytes: &[u8], id: usize) -> Result<Piece, String> {
        let (mut text, mut score, mut kind) = (String::new(), 0.0, 1);
        for field in Message(bytes) {
            match field? {
                (1, Value::Bytes(piece)) => text = String::from_utf8(piece.to_vec()).map_err(|_| format!("piece {id} is not UTF-8"))?,
                (2, Value::Bits(bits)) => score = f32::from_bits(bits),
                (3, Value::Number(n)) => kind = n,
                _ => {}
            }
        }
        let kind = match kind {
            1 => Kind::Normal,
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            other => return Err(format!("piece {id} is of type {other}, which is not known here")),
        };
        match text.len() {
            0 => Err(format!("piece {id} is empty")),
            length if length > LONGEST_PIECE => Err(format!("piece {id} has {length} bytes; at most {LONGEST_PIECE} are read")),
            _ if !score.is_finite() => Err(format!("piece {id} has the score {score}")),
            _ => Ok(Piece { text, score, kind }),
        }
    }
}

/// The tokenizer.json that means the same.
pub fn tokenizer(bytes: &[u8], beside: &Beside) -> Result<Json, String> {
    let model = Model::parse(bytes)?;
    let mut ids: HashMap<&str, usize> = HashMap::new();
    for (id, piece) in model.pieces.iter().enumerate() {
        if let Some(other) = ids.insert(&piece.text, id) {
            return Err(format!("pieces {other} and {id} are both {:?}", piece.text));
        }
    }
    let own: Vec<(String, bool)> = model.pieces.iter().filter_map(Piece::added).collect();
    let added = beside.added_tokens(|name| ids.get(name).map(|id| *id as u64), &own)?;

    let prefix = beside.flag("add_prefix_space").unwrap_or(model.prefix);
    let replace = |pattern: Json, content: &str| json!({ "type": "Replace", "pattern": pattern, "content": content });
    let mut normalizers = vec![];
    if model.trims {
        normalizers.push(json!({ "type": "Strip", "strip_left": true, "strip_right": true }));
        normalizers.push(replace(json!({ "Regex": " {2,}" }), " "));
    }
    if prefix {
        normalizers.push(json!({ "type": "Prepend", "prepend": SPACE }));
    }
    normalizers.push(replace(json!({ "String": " " }), SPACE));
    let mut decoders = vec![replace(json!({ "String": SPACE }), " "), json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
    if prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }

    // As Llama's tokenizer does where nobody says otherwise.
    let named = beside.role("bos_token").unwrap_or_else(|| {
        let own = usize::try_from(model.bos).ok().and_then(|id| model.pieces.get(id));
        own.filter(|piece| piece.kind == Kind::Control).map(|piece| piece.text.as_str())
    });
    let begin = named.filter(|_| beside.flag("add_bos_token") != Some(false)).and_then(|name| Some((name, *ids.get(name)? as u64)));
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": { "type": "Sequence", "normalizers": normalizers },
        "pre_tokenizer": null,
        "post_processor": begin.map(|(name, id)| before_texts(name, id)),
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": if model.algorithm == 2 { model.bpe(&ids)? } else { model.unigram()? },
    }))
}

impl Piece {
    /// Its name as an added token, and whether it is special: what is found in a text before it is cut into pieces.
    fn added(&self) -> Option<(String, bool)> {
        match self.kind {
            Kind::Unknown | Kind::Control => Some((self.text.clone(), true)),
            Kind::UserDefined => Some((self.text.clone(), false)),
            Kind::Normal | Kind::Unused | Kind::Byte => None,
        }
    }
}

impl Model {
    fn unknown(&self) -> Result<usize, String> {
        self.pieces.iter().position(|piece| piece.kind == Kind::Unknown).ok_or_else(|| "it has no piece for what is unknown".into())
    }

    /// Every pair whose whole is a piece, the best whole first; pairs of one whole by their parts' ids.
    fn bpe(&self, ids: &HashMap<&str, usize>) -> Result<Json, String> {
        let merged = |text: &str| ids.get(text).copied().filter(|id| self.pieces[*id].kind == Kind::Normal);
        let mut merges: Vec<(f32, usize, usize, usize)> = vec![];
        for (id, piece) in self.pieces.iter().enumerate().filter(|(_, piece)| piece.kind == Kind::Normal) {
            for (at, _) in piece.text.char_indices().skip(1) {
                if let (Some(a), Some(b)) = (merged(&piece.text[..at]), merged(&piece.text[at..])) {
                    merges.push((piece.score, id, a, b));
                }
            }
        }
        merges.sort_by(|x, y| y.0.total_cmp(&x.0).then((x.1, x.2, x.3).cmp(&(y.1, y.2, y.3))));
        let vocab: serde_json::Map<String, Json> =
            self.pieces.iter().zip(0u32..).map(|(piece, id)| (piece.text.clone(), id.into())).collect();
        let merges: Vec<[&str; 2]> = merges.iter().map(|m| [m.2, m.3].map(|id| self.pieces[id].text.as_str())).collect();
        let unknown = &self.pieces[self.unknown()?].text;
        Ok(
            json!({ "type": "BPE", "unk_token": unknown, "fuse_unk": true, "byte_fallback": self.byte_fallback, "vocab": vocab, "merges": merges }),
        )
    }

    fn unigram(&self) -> Result<Json, String> {
        let vocab: Vec<(&str, f64)> = self.pieces.iter().map(|piece| (piece.text.as_str(), f64::from(piece.score))).collect();
        Ok(json!({ "type": "Unigram", "unk_id": self.unknown()?, "byte_fallback": self.byte_fallback, "vocab": vocab }))
    }
}
