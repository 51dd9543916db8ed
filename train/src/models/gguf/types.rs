//! Types of tensors, and numbers in their bytes.

use half::{bf16, f16};
use std::fmt;
use std::str::FromStr;

/// Numbers that share a scale in Q8_0 and Q4_0.
pub const BLOCK: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    F32,
    F16,
    Bf16,
    /// Blocks of 32: a scale d in f16, then whole numbers q of 8 bits. x = d q.
    Q8_0,
    /// Blocks of 32: a scale d in f16, then whole numbers q of 4 bits, of which byte i holds the i-th (low) and the (16 + i)-th.
    /// x = d (q - 8).
    Q4_0,
}

impl Type {
    pub const ALL: [Type; 5] = [Type::F32, Type::F16, Type::Bf16, Type::Q8_0, Type::Q4_0];

    pub fn name(self) -> &'static str {
        match self {
            Type::F32 => "f32",
            Type::F16 => "f16",
            Type::Bf16 => "bf16",
            Type::Q8_0 => "q8_0",
            Type::Q4_0 => "q4_0",
        }
    }

    /// ggml's number of the type.
    pub fn number(self) -> u32 {
        match self {
            Type::F32 => 0,
            Type::F16 => 1,
            Type::Bf16 => engine::mutant!("gguf-bf16-by-another-number", 30, 31),
            Type::Q8_0 => 8,
            Type::Q4_0 => 2,
        }
    }

    /// `general.file_type`: what most of a file is.
    pub fn file_type(self) -> u32 {
        match self {
            Type::F32 => 0,
            Type::F16 => 1,
            Type::Bf16 => 32,
            Type::Q8_0 => engine::mutant!("gguf-q8-says-it-is-q4", 7, 2),
            Type::Q4_0 => 2,
        }
    }

    /// Whether numbers come in blocks, which a row must fill.
    pub fn has_blocks(self) -> bool {
        matches!(self, Type::Q8_0 | Type::Q4_0)
    }

    /// Bytes of so many numbers, which fill their blocks.
    pub fn bytes(self, numbers: usize) -> usize {
        match self {
            Type::F32 => numbers * 4,
            Type::F16 | Type::Bf16 => numbers * 2,
            Type::Q8_0 => numbers / BLOCK * (2 + BLOCK),
            Type::Q4_0 => numbers / BLOCK * (2 + BLOCK / 2),
        }
    }

    /// Appends a row. `Err` is a number that the type cannot hold.
    pub fn encode(self, row: &[f32], out: &mut Vec<u8>) -> Result<(), f32> {
        if let Some(x) = row.iter().find(|x| !x.is_finite()) {
            return Err(*x);
        }
        match self {
            Type::F32 => row.iter().for_each(|x| out.extend(x.to_le_bytes())),
            Type::F16 => {
                for x in row {
                    out.extend(finite_f16(*x, *x)?);
                }
            }
            Type::Bf16 => row.iter().for_each(|x| {
                out.extend(
                    engine::mutant!("gguf-bf16-cut-off", bf16::from_f32(*x), bf16::from_bits((x.to_bits() >> 16) as u16)).to_le_bytes(),
                );
            }),
            Type::Q8_0 => row.chunks_exact(BLOCK).try_for_each(|block| q8_0(block, out))?,
            Type::Q4_0 => row.chunks_exact(BLOCK).try_for_each(|block| q4_0(block, out))?,
        }
        Ok(())
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Type {
    type Err = String;

    fn from_str(name: &str) -> Result<Type, String> {
        let known = Type::ALL.map(Type::name).join(", ");
        Type::ALL.into_iter().find(|t| t.name() == name).ok_or(format!("there is no type '{name}'; known are {known}"))
    }
}

/// `Err` is `of`, the number that `x` comes from.
fn finite_f16(x: f32, of: f32) -> Result<[u8; 2], f32> {
    let rounded = f16::from_f32(x);
    if rounded.is_finite() { Ok(rounded.to_le_bytes()) } else { Err(of) }
}

/// The number of the largest magnitude, the first of several.
fn largest(block: &[f32]) -> f32 {
    block.iter().fold(0.0, |most: f32, x| if x.abs() > most.abs() { *x } else { most })
}

fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

fn q8_0(block: &[f32], out: &mut Vec<u8>) -> Result<(), f32> {
    let most = largest(block);
    let scale = most.abs() / 127.0;
    out.extend(finite_f16(scale, most)?);
    let inverse = inverse(scale);
    // The inverse of a tiny scale is infinite: the cast saturates, and makes 0 of 0 x infinity.
    out.extend(block.iter().map(|x| (x * inverse).round() as i8 as u8));
    Ok(())
}

fn q4_0(block: &[f32], out: &mut Vec<u8>) -> Result<(), f32> {
    // -8 stands for the largest, whose sign the scale has: 4 bits hold -8 but not 8.
    let most = largest(block);
    let scale = most / -8.0;
    out.extend(finite_f16(scale, most)?);
    let inverse = inverse(scale);
    let q = |x: f32| ((x * inverse + 8.5) as u8).min(15);
    let (low, high) = block.split_at(BLOCK / 2);
    out.extend(low.iter().zip(high).map(|(l, h)| q(*l) | q(*h) << 4));
    Ok(())
}
