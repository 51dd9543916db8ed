//! 2:4 sparsity of a model's folder: two of every four weights along a sum are 0.

use super::folder::INDEX;
use super::{CARD, Contents, Folder, ModelError, REST, new_folder};
use engine::DType;
use engine::ops::sparse::kept;
use half::{bf16, f16};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// A matrix of a layer, and what pruning does to it.
#[derive(Debug, Default)]
pub struct Pruned {
    /// Groups of four, and those with more than two numbers that are not 0.
    pub groups: usize,
    pub dense: usize,
    /// Sums of squares of all numbers, and of those that stay.
    pub all: f64,
    pub kept: f64,
}

/// A matrix as it lies in a file.
struct Matrix {
    dtype: DType,
    rows: usize,
    columns: usize,
    /// Whether a sum goes along its rows: not in GPT-2, which keeps inputs x outputs.
    by_rows: bool,
}

impl Matrix {
    /// The four places of each group along a sum.
    fn groups(&self) -> impl Iterator<Item = [usize; 4]> + use<> {
        let (n, columns, by_rows) = (self.rows * self.columns / 4, self.columns, self.by_rows);
        (0..n).map(move |g| match by_rows {
            true => std::array::from_fn(|i| 4 * g + i),
            false => std::array::from_fn(|i| (4 * (g / columns) + i) * columns + g % columns),
        })
    }

    /// Looks at all groups, and sets what does not stay to 0. An error is a number that is not finite: a norm with it says nothing.
    fn prune(&self, bytes: &mut [u8]) -> Result<Pruned, f32> {
        let mut found = Pruned::default();
        let size = self.dtype.size();
        for group in self.groups() {
            let numbers = group.map(|at| number(&bytes[at * size..][..size], self.dtype));
            if let Some(&broken) = numbers.iter().find(|v| !v.is_finite()) {
                return Err(broken);
            }
            let stays = kept(&numbers);
            found.groups += 1;
            found.dense += (numbers.iter().filter(|v| **v != 0.0).count() > engine::mutant!("three-of-four-are-sparse", 2, 3)) as usize;
            for ((at, v), stays) in group.into_iter().zip(numbers).zip(stays) {
                found.all += (v as f64).powi(2);
                found.kept += if stays { (v as f64).powi(2) } else { 0.0 };
                if !stays {
                    bytes[at * size..][..size].fill(0);
                }
            }
        }
        Ok(found)
    }
}

/// Prunes a matrix of f32 numbers; one that is not finite is an error. `by_rows`: sums go along its rows.
pub fn prune_numbers(bytes: &mut [u8], shape: &[usize], by_rows: bool) -> Result<(), f32> {
    let matrix = Matrix { dtype: DType::F32, rows: shape[0], columns: shape[1], by_rows };
    matrix.prune(bytes).map(|_| ())
}

fn number(bytes: &[u8], dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        DType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

/// Prunes the matrices of all layers of the folder `from`; with `out` a new folder gets them, with everything else as it was. By name.
pub fn prune(from: &Path, out: Option<&Path>) -> Result<BTreeMap<String, Pruned>, ModelError> {
    let folder = Folder::open(from)?;
    // What is not pruned is written, too.
    folder.weights().try_for_each(|weight| weight.map(drop))?;
    let by_rows = engine::mutant!("gpt2-is-pruned-along-outputs", !folder.shape.family.joint, true);
    let layers = folder.shape.weights().into_iter().filter(|(ours, _, shape)| ours.starts_with("layers.") && shape.len() == 2);
    let names: BTreeMap<String, String> = layers.map(|(_, theirs, _)| (folder.called(&theirs).to_string(), theirs)).collect();
    let staged = out.map(new_folder).transpose()?;
    let mut found = BTreeMap::new();
    let contents = Contents::open(from)?;
    if let Some(staged) = &staged {
        [CARD, INDEX].iter().chain(REST).try_for_each(|name| contents.copy(name, staged.dir()))?;
    }
    for name in folder.file_names() {
        let path = from.join(name);
        let mut bytes = vec![];
        // It was there a moment ago.
        let mut file = contents.file(name)?.ok_or_else(|| ModelError::bad(&path, "is gone"))?;
        file.read_to_end(&mut bytes).map_err(ModelError::io("read", &path))?;
        let (length, header) = SafeTensors::read_metadata(&bytes).map_err(|e| ModelError::bad(&path, e.to_string()))?;
        for (tensor, theirs) in &names {
            let Some(info) = header.info(tensor) else { continue };
            let dtype = folder.dtype(theirs)?;
            let matrix = Matrix { dtype, rows: info.shape[0], columns: info.shape[1], by_rows };
            let along = if by_rows { matrix.columns } else { matrix.rows };
            if !along.is_multiple_of(4) {
                return Err(ModelError::bad(&path, format!("'{tensor}' sums over {along} inputs, which is not a multiple of 4")));
            }
            let (start, end) = info.data_offsets;
            let pruned = matrix.prune(&mut bytes[8 + length + start..8 + length + end]);
            let pruned = pruned.map_err(|v| ModelError::bad(&path, format!("'{tensor}' has a weight that is {v}: its model is broken")))?;
            found.insert(tensor.clone(), pruned);
        }
        if let Some(staged) = &staged {
            let to = staged.dir().join(name);
            crate::files::write(&to, &bytes).map_err(ModelError::io("write", &to))?;
        }
    }
    if let (Some(staged), Some(out)) = (staged, out) {
        staged.finish().map_err(ModelError::io("create", out))?;
    }
    Ok(found)
}
