//! Safetensors files: written with their tensors aligned, read whole or one tensor at a time.

use super::manifest::write_synced;
use super::*;
use crate::finite::first_broken;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;

/// What is saved. `dtype` is the safetensors name: F32, BF16, F16, I32, U8, ...
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    pub name: &'a str,
    pub dtype: &'a str,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
}

/// The content of one safetensors file.
#[derive(Debug)]
pub struct Loaded {
    bytes: Vec<u8>,
    pub(super) data_start: usize,
    pub(super) header: Metadata,
}

/// A safetensors file that may be larger than the memory: tensors are read one at a time, when they are asked for. A file that changes meanwhile is an
/// error then, where a memory map would end the process.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    data_start: u64,
    header: Metadata,
}

/// Reads a safetensors file that need not be part of a checkpoint.
pub fn load_safetensors(path: &Path) -> Result<Loaded, CheckpointError> {
    Loaded::parse(path, input::read(path).map_err(io_error("read", path))?)
}

impl Loaded {
    /// The tensors' names, in the order of the file.
    pub fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// The header's own notes.
    pub fn metadata(&self) -> HashMap<String, String> {
        self.header.metadata().clone().unwrap_or_default()
    }

    /// dtype, shape and bytes.
    pub fn get(&self, name: &str) -> Option<(String, Vec<usize>, &[u8])> {
        let info = self.header.info(name)?;
        let (start, end) = info.data_offsets;
        let bytes = &self.bytes[self.data_start + start..self.data_start + end];
        Some((info.dtype.to_string(), info.shape.clone(), bytes))
    }

    /// The same, if all of it are finite numbers; `path` is what an error names.
    pub fn finite(self, path: &Path) -> Result<Loaded, CheckpointError> {
        for name in engine::mutant!("checkpoints-of-nan-are-read", self.names(), vec![]) {
            if let Some((dtype, _, bytes)) = self.get(&name) {
                finite(path, &name, &dtype, bytes)?;
            }
        }
        Ok(self)
    }

    /// The same, if no moment of an optimizer is NaN: from one, the next step would make weights of NaN. One may be infinite, and its weight then stays.
    pub fn moments_are_numbers(self, path: &Path) -> Result<Loaded, CheckpointError> {
        let is_moment = |name: &String| ["adam.", "muon."].iter().any(|optimizer| name.starts_with(optimizer));
        for name in self.names().into_iter().filter(is_moment) {
            let Some((dtype, _, bytes)) = self.get(&name).filter(|tensor| tensor.0 == "F32") else { continue };
            let numbers = bytes.as_chunks::<4>().0.iter();
            if let Some(at) =
                numbers.into_iter().position(|b| engine::mutant!("moments-of-nan-are-read", f32::from_le_bytes(*b).is_nan(), false))
            {
                let reason = format!("'{name}' holds NaN (number {at} of {dtype}): take another copy of the checkpoint, or an earlier one");
                return Err(broken(path, reason));
            }
        }
        Ok(self)
    }

    pub(crate) fn parse(path: &Path, bytes: Vec<u8>) -> Result<Self, CheckpointError> {
        // read_metadata also checks that the offsets are contiguous and end where the file does.
        let (header_len, header) = SafeTensors::read_metadata(&bytes).map_err(|e| {
            let reason = format!("not a whole safetensors file: {e}");
            broken(path, reason)
        })?;
        let data_start = 8 + header_len;
        Ok(Self { bytes, data_start, header })
    }
}

/// As the format has it.
pub(super) const LONGEST_HEADER: u64 = 100_000_000;

impl TensorFile {
    /// Reads the header.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = input::open(path).map_err(io_error("open", path))?;
        let bytes = file.metadata().map_err(io_error("read", path))?.len();
        let bad = |problem: &dyn std::fmt::Display| broken(path, format!("not a whole safetensors file: {problem}"));
        let mut length = [0; 8];
        if bytes < 8 {
            return Err(bad(&"it is too short"));
        }
        file.read_exact_at(&mut length, 0).map_err(io_error("read", path))?;
        let length = u64::from_le_bytes(length);
        if length > LONGEST_HEADER.min(bytes - 8) {
            return Err(bad(&"its header is longer than it can be"));
        }
        let mut text = vec![0; length as usize];
        file.read_exact_at(&mut text, 8).map_err(io_error("read", path))?;
        // This also checks that the tensors follow one another.
        let header: Metadata = serde_json::from_slice(&text).map_err(|e| bad(&e))?;
        let end = header.tensors().values().map(|t| t.data_offsets.1).max().unwrap_or(0) as u64;
        if (8 + length).checked_add(end) != Some(bytes) {
            return Err(bad(&format!("it has {bytes} bytes, and its header tells of {}", (8 + length).saturating_add(end))));
        }
        Ok(Self { path: path.into(), file, data_start: 8 + length, header })
    }

    /// The tensors' names, in the order of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// dtype and shape.
    pub fn info(&self, name: &str) -> Option<(String, Vec<usize>)> {
        let info = self.header.info(name)?;
        Some((info.dtype.to_string(), info.shape.clone()))
    }

    /// The bytes of a weight, whose numbers must be finite.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let info = self.header.info(name).ok_or_else(|| broken(&self.path, format!("has no '{name}'")))?;
        let (start, end) = info.data_offsets;
        let mut bytes = input::room((end - start) as u64).map_err(io_error("read", &self.path))?;
        bytes.resize(end - start, 0);
        self.file.read_exact_at(&mut bytes, self.data_start + start as u64).map_err(io_error("read", &self.path))?;
        finite(&self.path, name, &info.dtype.to_string(), engine::mutant!("weights-of-nan-are-read", &bytes[..], &[][..]))?;
        Ok(bytes)
    }
}

fn finite(path: &Path, name: &str, dtype: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
    match first_broken(bytes, dtype) {
        None => Ok(()),
        Some((at, value)) => Err(CheckpointError::NotFinite { path: path.into(), name: name.into(), at, value }),
    }
}

/// `notes` stand in the header, for programs that look for some.
pub(crate) fn write_safetensors(path: &Path, tensors: &[Tensor], notes: Option<HashMap<String, String>>) -> Result<Sum, CheckpointError> {
    let (header, sorted) = layout(tensors, notes)?;
    write_synced(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        sorted.iter().try_for_each(|t| file.write_all(t.bytes))
    })
}

/// The padded header, and the tensors in the order in which their bytes follow it.
pub(super) fn layout<'t, 'a>(
    tensors: &'t [Tensor<'a>],
    notes: Option<HashMap<String, String>>,
) -> Result<(String, Vec<&'t Tensor<'a>>), CheckpointError> {
    let mut sorted = Vec::with_capacity(tensors.len());
    let mut names = HashSet::new();
    for tensor in tensors {
        let refuse = |reason: String| CheckpointError::Tensor { name: tensor.name.to_string(), reason };
        let dtype: Dtype =
            serde_json::from_value(tensor.dtype.into()).map_err(|_| refuse(format!("dtype {:?} is unknown", tensor.dtype)))?;
        let elements = tensor.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        let bits = elements.and_then(|n| n.checked_mul(dtype.bitsize()));
        if bits != tensor.bytes.len().checked_mul(8) {
            let (shape, len) = (tensor.shape, tensor.bytes.len());
            return Err(refuse(format!("{len} bytes for {dtype} {shape:?}")));
        }
        if tensor.name == "__metadata__" || !names.insert(tensor.name) {
            return Err(refuse("the name is taken".into()));
        }
        sorted.push((dtype, tensor));
    }
    // Widest first keeps every tensor aligned to its element.
    sorted.sort_by_key(|(dtype, t)| (std::cmp::Reverse(dtype.bitsize()), t.name));

    let mut end = 0;
    let infos = sorted.iter().map(|(dtype, t)| {
        let start = end;
        end += t.bytes.len();
        let info = TensorInfo { dtype: *dtype, shape: t.shape.to_vec(), data_offsets: (start, end) };
        (t.name.to_string(), info)
    });
    let header =
        Metadata::new(notes, infos.collect()).map_err(|e| e.to_string()).and_then(|m| serde_json::to_string(&m).map_err(|e| e.to_string()));
    let mut header = header.map_err(|reason| CheckpointError::Tensor { name: "(header)".into(), reason })?;
    let padded = header.len().next_multiple_of(8);
    header.push_str(&" ".repeat(padded - header.len()));
    Ok((header, sorted.into_iter().map(|(_, t)| t).collect()))
}
