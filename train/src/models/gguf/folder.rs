//! A model's folder as a GGUF file.

use super::{GgufError, Model, Plan, Table, Tokenizer, Type};
use crate::data;
use crate::models::{Folder, ModelError, read_table};
use engine::DType;
use engine::cpu::converted;
use std::path::Path;

/// What kiln's byte tokenizer ends a document with.
const BYTE_END: u32 = 0;

/// Writes `out`, and returns what the format or llama.cpp cannot express. Weights are read one at a time.
pub fn convert(folder: &Folder, out: &Path, kind: Type) -> Result<Vec<String>, ModelError> {
    let table = |name: &str| -> Result<Option<Table>, ModelError> {
        let path = folder.path.join(name);
        path.exists().then(|| read_table(&path)).transpose()
    };
    let config = read_table(&folder.path.join("config.json"))?;
    let (json, tokens, generation) = (table("tokenizer.json")?, table("tokenizer_config.json")?, table("generation_config.json")?);
    let template = folder.chat_template()?;
    let end = match folder.tokenizer() {
        Some(path) => data::Tokenizer::from_spec(&path.display().to_string())?.eos(),
        None => Some(BYTE_END),
    };
    let weights: Vec<(String, Vec<usize>)> = folder.shape.weights().into_iter().map(|(_, theirs, shape)| (theirs, shape)).collect();
    let model = Model {
        name: out.file_stem().and_then(|n| n.to_str()).unwrap_or("model"),
        config: &config,
        tokenizer: json.as_ref().map_or(Tokenizer::Bytes, Tokenizer::Json),
        tokenizer_config: tokens.as_ref(),
        generation_config: generation.as_ref(),
        end,
        chat_template: template.as_deref(),
    };
    let bad = |e: GgufError| ModelError::Gguf { path: folder.path.clone(), cause: e };
    let plan = Plan::new(&model, &weights, kind).map_err(bad)?;
    let read = |name: &str| {
        let w = folder.weight(name).map_err(|e| e.to_string())?;
        Ok::<_, String>(converted(&w.bytes, w.meta.dtype, DType::F32).f32().to_vec())
    };
    crate::files::write_with(out, |file| plan.write(file, read)).map_err(|e| ModelError::Gguf { path: out.to_path_buf(), cause: e })?;
    Ok(plan.notes)
}
