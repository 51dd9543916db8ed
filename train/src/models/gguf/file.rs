//! The layout of a GGUF file: a header of key-value pairs and of the tensors' names, shapes, types and places, then the
//! tensors' bytes, each at a multiple of 32. Little-endian throughout.

use super::Type;
use std::io::{self, Write};

const VERSION: u32 = 3;
/// What readers assume where `general.alignment` is not given.
const ALIGNMENT: u64 = 32;

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

impl Meta {
    pub fn text(text: impl Into<String>) -> Meta {
        Meta::Text(text.into())
    }

    fn encode(&self, out: &mut Vec<u8>) {
        // Numbers of the types in the format: u32 4, i32 5, f32 6, bool 7, string 8, array 9.
        match self {
            Meta::U32(v) => out.extend([4, *v].map(u32::to_le_bytes).concat()),
            Meta::F32(v) => out.extend([6, v.to_bits()].map(u32::to_le_bytes).concat()),
            Meta::Bool(v) => {
                out.extend(7u32.to_le_bytes());
                out.push(*v as u8);
            }
            Meta::Text(text) => {
                out.extend(8u32.to_le_bytes());
                put_text(out, text);
            }
            Meta::Texts(all) => {
                put_array(out, 8, all.len());
                all.iter().for_each(|text| put_text(out, text));
            }
            Meta::I32s(all) => {
                put_array(out, 5, all.len());
                all.iter().for_each(|v| out.extend(v.to_le_bytes()));
            }
            Meta::F32s(all) => {
                put_array(out, 6, all.len());
                all.iter().for_each(|v| out.extend(v.to_le_bytes()));
            }
        }
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_array(out: &mut Vec<u8>, of: u32, len: usize) {
    out.extend([9, of].map(u32::to_le_bytes).concat());
    out.extend((len as u64).to_le_bytes());
}

/// Everything before the tensors' bytes.
#[derive(Default)]
pub struct Header {
    pairs: Vec<(String, Meta)>,
    tensors: Vec<Placed>,
}

struct Placed {
    name: String,
    shape: Vec<usize>,
    kind: Type,
    /// From the first tensor's first byte.
    offset: u64,
}

impl Header {
    pub fn put(&mut self, key: impl Into<String>, value: Meta) {
        self.pairs.push((key.into(), value));
    }

    #[cfg(test)]
    pub fn get(&self, key: &str) -> Option<&Meta> {
        self.pairs.iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }

    /// Keys that begin with this, and their values, in their order.
    #[cfg(test)]
    pub fn below(&self, prefix: &str) -> Vec<(&str, &Meta)> {
        self.pairs.iter().filter_map(|(k, v)| Some((k.strip_prefix(prefix)?, v))).collect()
    }

    /// Behind the tensors that were added before it.
    pub fn add_tensor(&mut self, name: &str, shape: &[usize], kind: Type) {
        let offset = self.data_size();
        self.tensors.push(Placed { name: name.into(), shape: shape.to_vec(), kind, offset });
    }

    fn data_size(&self) -> u64 {
        self.tensors.last().map_or(0, |t| t.offset + padded(bytes_of(&t.shape, t.kind)))
    }

    /// Bytes of the file that this header begins.
    pub fn size(&self) -> u64 {
        self.encode().len() as u64 + self.data_size()
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend([self.tensors.len(), self.pairs.len()].map(|n| (n as u64).to_le_bytes()).concat());
        for (key, value) in &self.pairs {
            put_text(&mut out, key);
            value.encode(&mut out);
        }
        for t in &self.tensors {
            put_text(&mut out, &t.name);
            out.extend((t.shape.len() as u32).to_le_bytes());
            // The dimension that is contiguous comes first.
            t.shape.iter().rev().for_each(|d| out.extend((*d as u64).to_le_bytes()));
            out.extend(t.kind.number().to_le_bytes());
            out.extend(t.offset.to_le_bytes());
        }
        out.resize(padded(out.len() as u64) as usize, 0);
        out
    }

    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&self.encode())
    }
}

/// Bytes of a tensor without its padding.
pub fn bytes_of(shape: &[usize], kind: Type) -> u64 {
    kind.bytes(shape.iter().product()) as u64
}

fn padded(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// The zeros behind a tensor of so many bytes.
pub fn padding(bytes: u64) -> &'static [u8] {
    &[0; ALIGNMENT as usize][..(padded(bytes) - bytes) as usize]
}
