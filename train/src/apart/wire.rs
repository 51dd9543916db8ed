//! Texts and values as bytes, between a process and one that works for it. Both are the same program, so there is no version; and values keep what JSON
//! would lose: a field that is not there, a number that is none, the order of keys.

use std::io::{self, Read, Write};

use minijinja::Value;
use minijinja::value::ValueKind;

/// Levels of a value. JSON is read to a depth of 128.
pub const DEEPEST: usize = 160;

/// Whether a value has more levels.
pub fn too_deep(value: &Value) -> bool {
    fn deeper(value: &Value, than: usize) -> bool {
        let Some(below) = than.checked_sub(1) else { return true };
        let items = || value.try_iter().into_iter().flatten();
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => items().any(|item| deeper(&item, below)),
            ValueKind::Map => items().any(|key| deeper(&value.get_item(&key).unwrap_or_default(), below)),
            _ => false,
        }
    }
    deeper(value, DEEPEST)
}

/// What is longer is no message.
const LONGEST: u64 = 4 << 30;

pub fn send(mut to: impl Write, message: &[u8]) -> io::Result<()> {
    // At once, so that whoever waits for it wakes up once.
    to.write_all(&[&(message.len() as u64).to_le_bytes(), message].concat())
}

pub fn receive(mut from: impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut message = vec![];
    from.take(length).read_to_end(&mut message)?;
    if message.len() as u64 == length { Ok(message) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// A message that is written.
#[derive(Default)]
pub struct Out(pub Vec<u8>);

impl Out {
    pub fn number(&mut self, x: usize) {
        self.0.extend((x as u64).to_le_bytes());
    }

    pub fn text(&mut self, text: &str) {
        self.number(text.len());
        self.0.extend_from_slice(text.as_bytes());
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len());
        self.0.extend_from_slice(bytes);
    }

    pub fn texts(&mut self, texts: &[&str]) {
        self.number(texts.len());
        texts.iter().for_each(|text| self.text(text));
    }

    fn tagged(&mut self, tag: u8, bytes: &[u8]) {
        self.0.push(tag);
        self.0.extend_from_slice(bytes);
    }

    pub fn value(&mut self, value: &Value) {
        match value.kind() {
            ValueKind::Undefined => self.0.push(b'u'),
            ValueKind::None => self.0.push(b'n'),
            ValueKind::Bool => self.tagged(b'b', &[value.is_true().into()]),
            ValueKind::Number if value.is_integer() => match (i64::try_from(value.clone()), i128::try_from(value.clone())) {
                (Ok(x), _) => self.tagged(b'i', &x.to_le_bytes()),
                (_, Ok(x)) => self.tagged(b'w', &x.to_le_bytes()),
                _ => self.written(value),
            },
            ValueKind::Bytes => {
                self.0.push(b'y');
                self.bytes(value.as_bytes().unwrap_or_default());
            }
            ValueKind::Number => self.tagged(b'f', &f64::try_from(value.clone()).unwrap_or(f64::NAN).to_le_bytes()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter().map(Iterator::collect).unwrap_or_default();
                self.0.push(b'l');
                self.number(items.len());
                items.iter().for_each(|item| self.value(item));
            }
            ValueKind::Map => {
                let keys: Vec<Value> = value.try_iter().map(Iterator::collect).unwrap_or_default();
                self.0.push(b'm');
                self.number(keys.len());
                for key in keys {
                    self.value(&key);
                    self.value(&value.get_item(&key).unwrap_or_default());
                }
            }
            _ => self.written(value),
        }
    }

    fn written(&mut self, value: &Value) {
        self.0.push(b's');
        match value.as_str() {
            Some(text) => self.text(text),
            None => self.text(&value.to_string()),
        }
    }

    pub fn pairs<T>(&mut self, pairs: &[(String, T)], second: impl Fn(&mut Out, &T)) {
        self.number(pairs.len());
        for (name, value) in pairs {
            self.text(name);
            second(self, value);
        }
    }
}

/// A message that is read; None where it is another than was expected.
pub struct In<'a>(pub &'a [u8]);

impl<'a> In<'a> {
    pub fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(bytes)
    }

    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub fn number(&mut self) -> Option<usize> {
        usize::try_from(u64::from_le_bytes(self.array()?)).ok()
    }

    fn text_here(&mut self) -> Option<&'a str> {
        let length = self.number()?;
        std::str::from_utf8(self.bytes(length)?).ok()
    }

    pub fn text(&mut self) -> Option<String> {
        self.text_here().map(str::to_owned)
    }

    pub fn list<T>(&mut self, mut one: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        (0..self.number()?).map(|_| one(self)).collect()
    }

    pub fn value(&mut self) -> Option<Value> {
        self.value_within(DEEPEST)
    }

    fn value_within(&mut self, levels: usize) -> Option<Value> {
        let below = levels.checked_sub(1)?;
        let inner = |from: &mut Self| from.value_within(below);
        Some(match self.bytes(1)?[0] {
            b'u' => Value::UNDEFINED,
            b'n' => Value::from(()),
            b'b' => Value::from(self.bytes(1)?[0] != 0),
            b'i' => Value::from(i64::from_le_bytes(self.array()?)),
            b'w' => Value::from(i128::from_le_bytes(self.array()?)),
            b'f' => Value::from(f64::from_le_bytes(self.array()?)),
            b's' => Value::from(self.text_here()?),
            b'y' => {
                let length = self.number()?;
                Value::from_bytes(self.bytes(length)?.to_vec())
            }
            b'l' => Value::from(self.list(inner)?),
            b'm' => Value::from_pairs(self.list(|from| Some((inner(from)?, inner(from)?)))?),
            _ => return None,
        })
    }
}
