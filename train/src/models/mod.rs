//! Models as Hugging Face's packages lay them out on disk: a folder of config.json and safetensors, and adapters beside it.
//!
//! | file | is |
//! |---|---|
//! | `card.rs` | a model card of an exported folder |
//! | `family.rs` | what tells families of decoders apart: one line each |
//! | `shape.rs` | what config.json says, as far as it is known here |
//! | `folder.rs` | the weights: read where they lie, and written |
//! | `gguf/` | the same as one GGUF file, for llama.cpp |
//! | `lora.rs` | what an adapter adds to which matrices |
//! | `peft.rs` | adapters in PEFT's layout |
//! | `encoder.rs` | encoders in sentence-transformers' layout: BERT, as MiniLM is |
//! | `decoder/` | decoders as they are recorded, trained and asked |

mod card;
pub mod decoder;
mod encoder;
mod family;
mod folder;
pub mod gguf;
mod lora;
mod peft;
mod prune;
mod shape;

pub use card::card;
pub use encoder::{Act, Encoder, EncoderFeeds, EncoderShape, Texts};
pub use family::{Bias, FAMILIES, Family, Mixer, Mlp, Norm, Positions};
pub(crate) use folder::{CARD, GENERATION, write_json};
pub use folder::{Contents, Folder, REST, Weight, write_weights};
pub use lora::{Lora, Target};
pub use peft::{Adapter, CACHED, base_name, write_adapter};
pub use prune::{Pruned, prune, prune_numbers};
pub use shape::{RopeScaling, ScanShape, Shape};

use crate::checkpoint::CheckpointError;
use crate::files::Staged;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("cannot {action} {}: {cause}", .path.display())]
    Io { action: &'static str, path: PathBuf, cause: std::io::Error },
    #[error("{}: {problem}", .path.display())]
    Bad { path: PathBuf, problem: String },
    #[error("{0}")]
    Cached(String),
    #[error(transparent)]
    File(#[from] CheckpointError),
    #[error("{}: {cause}", .path.display())]
    Gguf { path: PathBuf, cause: gguf::GgufError },
    #[error(transparent)]
    Engine(#[from] engine::Error),
    #[error(transparent)]
    Data(#[from] crate::data::DataError),
}

impl ModelError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> ModelError {
        let path = path.to_path_buf();
        move |cause| ModelError::Io { action, path, cause }
    }

    fn bad(path: &Path, problem: impl Into<String>) -> ModelError {
        ModelError::Bad { path: path.to_path_buf(), problem: problem.into() }
    }
}

/// A folder to write, which must not be there yet.
pub fn new_folder(path: &Path) -> Result<Staged, ModelError> {
    if path.exists() {
        return Err(ModelError::bad(path, "is there already: name a folder that is not"));
    }
    Staged::new(path).map_err(ModelError::io("create", path))
}

/// A JSON file whose value is a table.
fn read_table(path: &Path) -> Result<serde_json::Map<String, serde_json::Value>, ModelError> {
    table_of(path, &crate::input::read_to_string(path).map_err(ModelError::io("read", path))?)
}

/// A table of JSON, from the text of a file.
fn table_of(path: &Path, text: &str) -> Result<serde_json::Map<String, serde_json::Value>, ModelError> {
    // Python writes infinity as a word that JSON has not.
    let parsed = serde_json::from_str(text).or_else(|e| serde_json::from_str(&text.replace(" Infinity", " null")).map_err(|_| e));
    parsed.map_err(|e| ModelError::bad(path, format!("not a table of JSON: {e}")))
}
