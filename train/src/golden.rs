//! Golden files: a recipe's numbers as plain PyTorch computes them, and how ours are compared with them.

use crate::checkpoint::{CheckpointError, Loaded, load_safetensors};
use crate::recipe::Computed;
use std::path::Path;

pub struct Golden {
    pub recipe: String,
    pub config: serde_json::Value,
    pub optimizer: Optimizer,
    pub steps: u64,
    tensors: Loaded,
}

#[derive(Clone, Copy, Debug, serde::Deserialize)]
pub struct Optimizer {
    pub lr: f64,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    pub clip: f32,
}

#[derive(Debug, thiserror::Error)]
pub enum GoldenError {
    #[error(transparent)]
    File(#[from] CheckpointError),
    #[error("{path} is not a golden file: {reason}")]
    Not { path: String, reason: String },
}

impl Golden {
    pub fn open(path: &Path) -> Result<Golden, GoldenError> {
        let not = |reason: String| GoldenError::Not { path: path.display().to_string(), reason };
        let tensors = load_safetensors(path)?;
        let meta = tensors.metadata();
        let field = |name: &str| meta.get(name).cloned().ok_or_else(|| not(format!("its metadata has no '{name}'")));
        let json = |name: &str| {
            let text = field(name)?;
            serde_json::from_str::<serde_json::Value>(&text).map_err(|e| not(format!("its '{name}': {e}")))
        };
        let optimizer = serde_json::from_value(json("optimizer")?).map_err(|e| not(format!("its 'optimizer': {e}")))?;
        let steps = field("steps")?.parse().map_err(|_| not("its 'steps' is no number".into()))?;
        Ok(Golden { recipe: field("recipe")?, config: json("config")?, optimizer, steps, tensors })
    }

    pub fn names(&self) -> Vec<String> {
        self.tensors.names()
    }

    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.tensors.get(name).map(|t| t.1)
    }

    /// Any tensor, as f32.
    pub fn f32(&self, name: &str) -> Option<Vec<f32>> {
        let (dtype, _, bytes) = self.tensors.get(name)?;
        match dtype.as_str() {
            "F32" => Some(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()),
            "I64" => Some(self.i32(name)?.into_iter().map(|v| v as f32).collect()),
            "U8" => Some(bytes.iter().map(|&b| b as f32).collect()),
            _ => None,
        }
    }

    /// Whole numbers that fit into 32 bits.
    pub fn i32(&self, name: &str) -> Option<Vec<i32>> {
        let (dtype, _, bytes) = self.tensors.get(name)?;
        let read = |b: &[u8]| i32::try_from(i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])).ok();
        if dtype != "I64" {
            return None;
        }
        bytes.chunks_exact(8).map(read).collect()
    }
}

/// One tensor's comparison.
pub struct Compared {
    pub name: String,
    /// norm(ours - theirs) / norm(theirs)
    pub error: f64,
    pub ok: bool,
}

/// Compares everything that the file holds and that can be computed, as golden.py says:
/// norm(a - b) <= tolerance * norm(b) + 1e-6 * sqrt(elements); beside that, an error of half a percent never passes for rounding.
/// A tensor that was not computed fails.
pub fn compare(file: &Golden, computed: &Computed, tolerance: f64) -> Vec<Compared> {
    let mut all = vec![];
    let inputs = ["param/", "input/"];
    for name in file.names().into_iter().filter(|n| !inputs.iter().any(|p| n.starts_with(p))) {
        let theirs = file.f32(&name).unwrap_or_default();
        let (error, ok) = match computed.get(&name) {
            Some(ours) if ours.len() == theirs.len() => {
                let norm = |it: &mut dyn Iterator<Item = f64>| it.map(|v| v * v).sum::<f64>().sqrt();
                let difference = norm(&mut ours.iter().zip(&theirs).map(|(&a, &b)| a as f64 - b as f64));
                let size = norm(&mut theirs.iter().map(|&b| b as f64));
                let root = (theirs.len() as f64).sqrt();
                // The absolute term is for tensors of pure rounding noise; half a percent of anything larger is a mistake.
                let gross = difference > tolerance.max(5e-3) * size && size > 1e-6 * root;
                // Written so that a NaN fails.
                (difference / size.max(1e-30), difference <= tolerance * size + 1e-6 * root && !gross)
            }
            _ => (f64::INFINITY, false),
        };
        all.push(Compared { name, error, ok });
    }
    all
}
