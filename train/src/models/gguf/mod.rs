//! A model as one GGUF file (version 3), which llama.cpp and the programs built on it load.
//!
//! | file | is |
//! |---|---|
//! | `config.rs` | config.json: the architecture and its sizes |
//! | `tensors.rs` | each weight's name, row order and type in the file |
//! | `tokenizer.rs` | tokenizer.json and the files beside it: token ids that mean something, and what is added to a text |
//! | `vocabulary.rs` | tokens with their types, merges or scores |
//! | `pretokenizer.rs` | which of llama.cpp's ways to split text a tokenizer.json asks for |
//! | `types.rs` | F32, F16, BF16, Q8_0, Q4_0: numbers to bytes |
//! | `file.rs` | the layout of the file |
//! | `folder.rs` | from a model's folder |
//!
//! [`Plan::new`] looks at everything but the numbers and refuses what the format or llama.cpp cannot express; only then
//! does [`Plan::write`] ask for the weights, one at a time.

mod config;
mod file;
mod folder;
mod pretokenizer;
mod tensors;
#[cfg(test)]
mod tests;
mod tokenizer;
mod types;
mod vocabulary;

pub use folder::convert;
pub use tokenizer::Tokenizer;
pub use types::Type;

use config::Config;
use file::{Header, Meta};
use std::collections::BTreeMap;
use std::io::{self, Write};
use tensors::Tensor;

pub type Table = serde_json::Map<String, serde_json::Value>;

#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// `file` is config.json, tokenizer.json, tokenizer_config.json or generation_config.json.
    #[error("{file}: {problem}")]
    Bad { file: &'static str, problem: String },
    #[error("weight '{name}' {problem}")]
    Weight { name: String, problem: String },
    #[error("cannot read weight '{name}': {cause}")]
    Read { name: String, cause: Box<dyn std::error::Error + Send + Sync> },
    #[error("cannot write the GGUF file: {0}")]
    Io(#[from] io::Error),
}

impl GgufError {
    fn bad(file: &'static str, problem: impl Into<String>) -> GgufError {
        GgufError::Bad { file, problem: problem.into() }
    }

    fn weight(name: &str, problem: impl Into<String>) -> GgufError {
        GgufError::Weight { name: name.into(), problem: problem.into() }
    }
}

/// What a model's folder holds beside its weights.
pub struct Model<'a> {
    /// For people: `general.name`.
    pub name: &'a str,
    pub config: &'a Table,
    pub tokenizer: Tokenizer<'a>,
    pub tokenizer_config: Option<&'a Table>,
    pub generation_config: Option<&'a Table>,
    /// The token that ends a document, for a folder whose files name none.
    pub end: Option<u32>,
    /// Jinja.
    pub chat_template: Option<&'a str>,
}

/// A file whose content is known except for the numbers.
pub struct Plan {
    header: Header,
    tensors: Vec<Tensor>,
    /// What the file or llama.cpp cannot express, and what was done instead. For people.
    pub notes: Vec<String>,
}

impl Plan {
    /// `weights` are the names and shapes of all weights that there are. A `lm_head.weight` among them is written even where
    /// config.json ties it to the embedding: leave it out if it repeats the embedding's numbers.
    pub fn new(model: &Model, weights: &[(String, Vec<usize>)], kind: Type) -> Result<Plan, GgufError> {
        let mut notes = vec![];
        let config = Config::parse(model.config)?;
        let tensors = tensors::plan(&config, weights, kind)?;
        let mut header = Header::default();
        header.put("general.architecture", Meta::text(config.arch));
        header.put("general.type", Meta::text("model"));
        header.put("general.name", Meta::text(model.name));
        header.put("general.file_type", Meta::U32(kind.file_type()));
        header.put("general.quantization_version", Meta::U32(2));
        config.describe(&mut header, &mut notes);
        tokenizer::describe(model, config.vocab, &mut header, &mut notes)?;
        for t in &tensors {
            header.add_tensor(&t.ours, &t.shape, t.kind);
        }
        let short: Vec<&str> = tensors.iter().filter(|t| t.fell_back).map(|t| t.ours.as_str()).collect();
        if let Some(first) = short.first() {
            let count = short.len();
            notes
                .push(format!("{count} tensors are F16, not {kind}, because their rows are no multiple of 32 long ({first} is the first)"));
        }
        Ok(Plan { header, tensors, notes })
    }

    /// How many tensors there are of each type.
    pub fn types(&self) -> BTreeMap<&'static str, usize> {
        let mut types = BTreeMap::new();
        self.tensors.iter().for_each(|t| *types.entry(t.kind.name()).or_default() += 1);
        types
    }

    /// Bytes of the whole file.
    pub fn size(&self) -> u64 {
        self.header.size()
    }

    /// Writes the file. `read` gives a weight by its Hugging Face name as f32, row-major; each is asked for once, and dropped
    /// before the next.
    pub fn write<W, R, E>(&self, out: &mut W, mut read: R) -> Result<(), GgufError>
    where
        W: Write,
        R: FnMut(&str) -> Result<Vec<f32>, E>,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.header.write(out)?;
        for tensor in &self.tensors {
            let data = match &tensor.source {
                tensors::Source::Computed(data) => data.clone(),
                tensors::Source::Weight { theirs, .. } => {
                    read(theirs).map_err(|cause| GgufError::Read { name: theirs.clone(), cause: cause.into() })?
                }
            };
            tensor.write(out, &data)?;
        }
        Ok(())
    }
}
