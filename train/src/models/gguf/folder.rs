//! A model's folder as a GGUF file.

use super::{GgufError, Model, Plan, Table, Tokenizer, Type};
use crate::models::{Contents, Folder, ModelError};
use engine::DType;
use engine::cpu::converted;
use std::path::Path;

/// What kiln's byte tokenizer ends a document with.
pub(super) const BYTE_END: u32 = 0;

/// Writes `out`, and returns what the format or llama.cpp cannot express. Weights are read one at a time.
pub fn convert(folder: &Folder, out: &Path, kind: Type) -> Result<Vec<String>, ModelError> {
    // What is written into the file is read without following a link out of the folder: it could lead to a key of whoever exports.
    let own = Contents::open(&folder.path)?;
    own.check()?;
    // Weights too: a file of them is opened here only to see where it leads.
    folder.file_names().try_for_each(|name| own.file(name).map(drop))?;
    let config = own.table("config.json")?.ok_or_else(|| ModelError::bad(&folder.path, "has no config.json any more"))?;
    let (tokens, generation) = (own.table("tokenizer_config.json")?, own.table("generation_config.json")?);
    let template = own.chat_template()?;
    let own = folder.tokenizer()?;
    let end = own.as_ref().map_or(Some(BYTE_END), |own| own.eos());
    let bad = |e: serde_json::Error| ModelError::bad(&folder.path, format!("its tokenizer.json is no table: {e}"));
    let json: Option<Table> = own.as_ref().and_then(|own| own.json()).map(|text| serde_json::from_slice(text).map_err(bad)).transpose()?;
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
