//! A run's adapters for other programs: in PEFT's layout, or merged into their base as a model's folder.

use super::Adapted;
use super::RepliesConfig;
use super::lessons::{own_tokenizer, quiz_template};
use crate::checkpoint::{Checkpoint, Loaded};
use crate::config::Config;
use crate::data::Tokenizer;
use crate::data::chats::TEMPLATE;
use crate::data::replies::Quiz;
use crate::models::folder::write_json;
use crate::models::{
    CACHED, CARD, GENERATION, Lora, ModelError, Shape, Target, Weight, base_name, card, new_folder, prune_numbers, write_adapter,
    write_weights,
};
use crate::recipe::{Exporting, Parts, TrainError};
use crate::text::TOKENIZER;
use engine::cpu::converted;
use engine::passes::{Mode, Target as Machine};
use engine::{Compiled, DType, Graph, Meta, Recorder, Store};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

/// Writes a folder from a checkpoint of this model and config.
pub fn export(model: &Adapted, config: &Config, how: &Exporting) -> Result<(), TrainError> {
    let (found, out) = (how.found, how.out);
    if how.parts == Parts::Merged && model.lora.is_none() {
        let path = found.path.display();
        return Err(TrainError::Other(format!("--merge: {path} has no adapters, all of its weights are trained (leave out --merge)")));
    }
    model.is_base_of(found)?;
    let whole = how.parts != Parts::Trained || model.lora.is_none();
    if model.folder.is_none() && !whole {
        return Err(TrainError::Other(format!(
            "the base of {} was drawn at random and is in no folder: export both as one model with --merge",
            found.path.display()
        )));
    }
    let pruned = pruned_weights(model, config)?;
    if !pruned.is_empty() {
        let what = if model.lora.is_some() { "adapters" } else { "linear layers" };
        let count = pruned.len();
        crate::warn!(
            "note: {count} matrices of {what} are taken with 2:4 sparsity, as the run computes with them; its checkpoint keeps them dense"
        );
    }
    let card = card(model, config, how, (whole, !pruned.is_empty()));
    let trained = Trained { file: found.weights(how.raw)?, path: &found.path, pruned };
    let staged = new_folder(out)?;
    match &model.lora {
        Some(lora) if !whole => {
            let tensors = lora.tensors(&model.shape).into_iter().map(|(name, shape)| trained.get(&name, &shape));
            let base = model.folder.as_ref().map_or(String::new(), |f| base_name(&f.path));
            if base.starts_with(CACHED) {
                crate::warn!("note: the base of these adapters is in kiln's cache alone, as {base}: --merge writes both as one model");
            }
            write_adapter(staged.dir(), lora, &model.shape, &base, tensors.collect::<Result<_, _>>()?)?;
        }
        lora => {
            let weights = match lora {
                Some(lora) => merged(model, lora, config, &trained)?,
                None => all(model, &trained)?,
            };
            write_weights(staged.dir(), &weights, how.shard)?;
            match &model.folder {
                Some(folder) => {
                    folder.copy_rest(staged.dir())?;
                    // Whose tokens are bytes without any file that says so.
                    if folder.tokenizer()?.is_none() {
                        write_tokenizer(&model.shape, &Tokenizer::byte_json(), staged.dir())?;
                    }
                }
                None => write_rest(model, found, staged.dir())?,
            }
            if !staged.dir().join(GENERATION).exists() {
                write_json(&staged.dir().join(GENERATION), &generation(staged.dir())?)?;
            }
        }
    }
    write_template(model, config, how.found, staged.dir())?;
    write_text(&staged.dir().join(CARD), card.as_bytes())?;
    Ok(staged.finish().map_err(ModelError::io("rename a folder to", out))?)
}

/// Names of the weights that the run computes with pruned (the pass sparse-2:4), and whether sums go along their rows. They are exported pruned: so its
/// losses are those of the exported model.
fn pruned_weights(model: &Adapted, config: &Config) -> Result<BTreeMap<String, bool>, TrainError> {
    let switches = config.switches()?;
    match switches.chosen("sparse-2:4") {
        None | Some(Mode::Off) => Ok(BTreeMap::new()),
        _ => Ok(engine::passes::pruned(&recorded(model), &switches, Machine::Cpu)?),
    }
}

/// The model's forward pass.
fn recorded(model: &Adapted) -> Graph {
    let r = Recorder::new();
    let d = model.decoder(&r, None);
    r.output("logits", d.logits(d.hidden(r.feed("ids", &[1, 1], DType::I32), None)));
    r.finish()
}

/// The chat template that prompts were learned by, where it is not the base's own: without it that, or none, would put prompts to the model.
fn write_template(model: &Adapted, config: &Config, found: &Checkpoint, dir: &Path) -> Result<(), TrainError> {
    let data: RepliesConfig = config.section("data")?;
    let (folder, is_text) = (model.folder.as_deref(), found.meta["identity"]["plain"] == true);
    let has_own = || Ok::<_, ModelError>(folder.map_or(Ok(None), |folder| folder.chat_template())?.is_some());
    if is_text || data.template.is_empty() && (!data.path.is_empty() || has_own()?) {
        return Ok(());
    }
    let path = dir.join(TEMPLATE);
    // The run may be somebody else's, and a link in it lead to what is not to be handed on.
    if Path::new(&data.template).is_symlink() {
        crate::warn!("note: the chat template is not exported, because {} is a link", data.template);
        return Ok(());
    }
    let tokenizer = own_tokenizer(folder)?;
    let text = match data.jinja(&tokenizer)? {
        Some((text, _)) => Some(text),
        None => quiz_template(&data.template, &tokenizer, folder)?.jinja(),
    };
    if let Some(text) = text {
        // That of the base was copied.
        if path.exists() {
            std::fs::remove_file(&path).map_err(ModelError::io("replace", &path))?;
        }
        write_text(&path, text.as_bytes())?;
    }
    Ok(())
}

fn write_text(path: &Path, bytes: &[u8]) -> Result<(), ModelError> {
    crate::files::write_new(path, bytes).map_err(ModelError::io("write", path))
}

/// What a model that was drawn at random has beside its weights: its config, and the tokenizer of its data where that is a file.
fn write_rest(model: &Adapted, found: &Checkpoint, dir: &Path) -> Result<(), TrainError> {
    model.shape.write(dir)?;
    // Generated questions have a tokenizer of their own, which no checkpoint needs to keep.
    let quiz = Quiz::get().tokenizer()?;
    let is = |tokenizer: &Tokenizer| found.meta["identity"]["tokenizer"].as_str() == Some(&*format!("{:016x}", tokenizer.fingerprint()));
    let json = match found.has(TOKENIZER) {
        true => Some(found.bytes(TOKENIZER)?),
        false if is(&Tokenizer::Byte) => Some(Tokenizer::byte_json()),
        false => quiz.json().filter(|_| is(&quiz)).map(<[u8]>::to_vec),
    };
    json.map_or(Ok(()), |json| write_tokenizer(&model.shape, &json, dir))
}

/// A tokenizer.json, and what transformers wants to be told beside it.
fn write_tokenizer(shape: &Shape, json: &[u8], dir: &Path) -> Result<(), TrainError> {
    let path = dir.join(TOKENIZER);
    let tokenizer = Tokenizer::from_json(&path, json)?;
    write_text(&path, json)?;
    let end = tokenizer.eos().map(|id| tokenizer.decode(&[id]));
    let table = json!({ "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "model_max_length": shape.context, "clean_up_tokenization_spaces": false });
    Ok(write_json(&dir.join("tokenizer_config.json"), &table)?)
}

/// For a folder without one: where it ends what it writes. Without this file transformers takes the numbers of the family's first model.
fn generation(dir: &Path) -> Result<serde_json::Value, TrainError> {
    let path = dir.join(TOKENIZER);
    let end = if path.exists() { Tokenizer::from_spec(&path.display().to_string())?.eos() } else { None };
    Ok(json!({ "bos_token_id": null, "eos_token_id": end, "pad_token_id": null }))
}

/// Every weight of a checkpoint, in the type that the base has it in; f32 without a base.
fn all(model: &Adapted, trained: &Trained) -> Result<Vec<Weight>, TrainError> {
    let weight = |(ours, theirs, shape): (String, String, Vec<usize>)| {
        let (_, bytes) = trained.get(&ours, &shape)?;
        let own = model.folder.as_ref().map_or(Ok(DType::F32), |f| f.dtype(&theirs))?;
        let dtype = engine::mutant!("fine-tuned-weights-in-f32", own, DType::F32);
        let bytes = if dtype == DType::F32 { bytes } else { converted(&bytes, DType::F32, dtype).bytes().to_vec() };
        Ok(Weight { name: theirs, meta: Meta::new(&shape, dtype), bytes })
    };
    model.shape.weights().into_iter().map(weight).collect()
}

/// A checkpoint's own weights.
struct Trained<'a> {
    file: Loaded,
    path: &'a Path,
    /// Those that are pruned, and whether sums go along their rows.
    pruned: BTreeMap<String, bool>,
}

impl Trained<'_> {
    fn get(&self, name: &str, shape: &[usize]) -> Result<(Meta, Vec<u8>), TrainError> {
        let found = self.file.get(name).filter(|(dtype, has, _)| dtype == "F32" && has == shape);
        let (_, _, bytes) = found.ok_or_else(|| TrainError::Other(format!("{} has no '{name}' {shape:?}", self.path.display())))?;
        let mut bytes = bytes.to_vec();
        if let Some(&by_rows) = self.pruned.get(name) {
            let broken = |v: f32| TrainError::Other(format!("{}: '{name}' has a weight that is {v}", self.path.display()));
            prune_numbers(&mut bytes, shape, by_rows).map_err(broken)?;
        }
        Ok((Meta::f32(shape), bytes))
    }

    /// a and b of a matrix, where it has an adapter.
    fn pair(&self, lora: &Lora, matrix: &str, sizes: (usize, usize)) -> Result<[Vec<f32>; 2], TrainError> {
        let numbers = |part: &str, shape: [usize; 2]| {
            let (_, bytes) = self.get(&format!("{matrix}.lora_{part}"), &shape)?;
            Ok::<_, TrainError>(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        };
        Ok([numbers("a", [lora.rank, sizes.1])?, numbers("b", [sizes.0, lora.rank])?])
    }
}

/// The base's weights, in their own type, with the adapters added.
fn merged(model: &Adapted, lora: &Lora, config: &Config, trained: &Trained) -> Result<Vec<Weight>, TrainError> {
    let base: Vec<(String, Weight)> = match &model.folder {
        Some(folder) => folder.weights().collect::<Result<_, ModelError>>()?,
        None => drawn(model, config)?,
    };
    let adapter = |name: &str| lora.targets.iter().find(|t| name.ends_with(&format!(".{}.weight", t.name()))).copied();
    let add = |(name, w): (String, Weight)| match adapter(&name) {
        None => Ok(w),
        Some(target) => with_adapter((&model.shape, lora), trained, target, name.trim_end_matches(".weight"), w),
    };
    base.into_iter().map(add).collect()
}

fn with_adapter((shape, lora): (&Shape, &Lora), trained: &Trained, target: Target, matrix: &str, w: Weight) -> Result<Weight, TrainError> {
    let [a, b] = trained.pair(lora, matrix, target.sizes(shape))?;
    let mut sum = converted(&w.bytes, w.meta.dtype, DType::F32).f32().to_vec();
    lora.merge(&mut sum, &a, &b);
    let bytes = converted(bytemuck::cast_slice(&sum), DType::F32, w.meta.dtype).bytes().to_vec();
    Ok(Weight { bytes, ..w })
}

/// A base that was drawn at random: the same again, in the type that the run kept it in.
fn drawn(model: &Adapted, config: &Config) -> Result<Vec<(String, Weight)>, TrainError> {
    let compiled = Compiled::new(recorded(model), &config.switches()?, Machine::Cpu)?;
    let mut store = Store::new(config.seed());
    store.ensure(&compiled.graph, None, &[])?;
    let weight = |(ours, theirs, _): (String, String, Vec<usize>)| {
        let t = store.get(&ours).ok_or_else(|| TrainError::Other(format!("the model has no weight '{ours}'")))?;
        Ok((ours, Weight { name: theirs, meta: t.meta.clone(), bytes: t.bytes()?.into_owned() }))
    };
    model.shape.weights().into_iter().map(weight).collect()
}
