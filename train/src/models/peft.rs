//! Adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors. Plain LoRA is what is known here; everything else that PEFT
//! can do is refused by the name of the setting that asks for it.

use super::decoder::{cached_base, is_cached};
use super::folder::{note, write_json};
use super::{Lora, ModelError, Shape, Target, Weight, read_table};
use crate::checkpoint::{self, Tensor, TensorFile};
use engine::{DType, Meta, Store};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// What an adapter calls a base that lies in kiln's cache, before its hash: where the cache is says who the user is.
pub const CACHED: &str = "kiln-base-";

/// What an adapter calls the folder of its base.
pub fn base_name(path: &Path) -> String {
    let name = path.canonicalize().ok().filter(|_| engine::mutant!("an-adapter-names-the-cache", is_cached(path), false));
    match name.as_deref().and_then(Path::file_name) {
        Some(hash) => format!("{CACHED}{}", hash.display()),
        None => path.display().to_string(),
    }
}

/// An adapter's folder, found whole.
pub struct Adapter {
    pub path: PathBuf,
    pub lora: Lora,
    file: TensorFile,
    /// By the names that they have here, and by those in the file.
    names: Vec<(String, String)>,
}

/// What PEFT calls a tensor: `layers.3.q.lora_a` -> `base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight`.
fn peft_name(layer: usize, target: Target, part: &str) -> String {
    format!("base_model.model.model.layers.{layer}.{}.lora_{}.weight", target.module(), part.to_uppercase())
}

/// In the order of `Lora::tensors`.
fn peft_names(lora: &Lora, shape: &Shape) -> Vec<String> {
    let both = |(l, t): (usize, Target)| ["a", "b"].map(|part| peft_name(l, t, part));
    (0..shape.layers).flat_map(|l| lora.targets.iter().map(move |&t| (l, t))).flat_map(both).collect()
}

impl Adapter {
    /// An adapter for a model of this shape, which lies in `base` where that is known. Says so where the adapter names another model.
    pub fn open(path: &Path, shape: &Shape, base: Option<&Path>) -> Result<Adapter, ModelError> {
        let config = path.join(CONFIG);
        if !path.exists() {
            return Err(ModelError::bad(path, format!("there is no such folder{}", crate::input::fetched(path))));
        }
        let lora = parse(&read_table(&config)?).map_err(|problem| ModelError::bad(&config, problem))?;
        let (named, found) = Adapter::base_of(path)?;
        let of = base.map_or("the model".into(), |base| format!("the model in {}", base.display()));
        let made_for = if named.is_empty() { String::new() } else { format!(" (the adapter was made for {named:?})") };
        let file = path.join(WEIGHTS);
        let weights = TensorFile::open(&file)?;
        let ours = lora.tensors(shape);
        let theirs = peft_names(&lora, shape);
        for ((_, shape), name) in ours.iter().zip(&theirs) {
            let Some((dtype, has)) = weights.info(name) else {
                return Err(ModelError::bad(&file, format!("has no '{name}', which its {CONFIG} and {of} ask for{made_for}")));
            };
            if has != shape {
                return Err(ModelError::bad(&file, format!("'{name}' is {has:?}, but {CONFIG} and {of} make it {shape:?}{made_for}")));
            }
            if DType::from_name(&dtype).is_none_or(|d| !d.is_float()) {
                return Err(ModelError::bad(&file, format!("'{name}' is of type {dtype}; BF16, F16 and F32 are known here")));
            }
        }
        if let Some(extra) = weights.names().iter().find(|n| !theirs.contains(n)) {
            return Err(ModelError::bad(&file, format!("holds '{extra}', which {CONFIG} and {of} do not ask for{made_for}")));
        }
        if let Some(base) = base.filter(|base| !named.is_empty() && is_another(base, &named, found.as_deref())) {
            crate::warn!("note: {} was made for {named:?}, and is used on {}: its shapes fit", path.display(), base.display());
        }
        let names = ours.into_iter().map(|t| t.0).zip(theirs).collect();
        Ok(Adapter { path: path.to_path_buf(), lora, file: weights, names })
    }

    /// The folder of the model that an adapter was trained on, as it names it: from here, from its own folder, or in kiln's cache. None where there is no
    /// such folder.
    pub fn base_of(path: &Path) -> Result<(String, Option<PathBuf>), ModelError> {
        let table = read_table(&path.join(CONFIG))?;
        let named = table.get("base_model_name_or_path").and_then(Value::as_str).unwrap_or_default();
        let cached = named.strip_prefix(CACHED).and_then(|hash| u64::from_str_radix(hash, 16).ok()).map(cached_base);
        let folders = [PathBuf::from(named), path.join(named)].into_iter().chain(cached);
        let found = folders.into_iter().find(|folder| !named.is_empty() && folder.is_dir());
        Ok((named.into(), found))
    }

    /// Reads every weight, which must be finite.
    pub fn check(&self) -> Result<(), ModelError> {
        Ok(self.names.iter().try_for_each(|(_, theirs)| self.file.read(theirs).map(drop))?)
    }

    /// Fills the states of these names.
    pub fn load(&self, store: &mut Store) -> Result<(), ModelError> {
        for (ours, theirs) in &self.names {
            let found = self.file.info(theirs).and_then(|(dtype, shape)| Some(Meta::new(&shape, DType::from_name(&dtype)?)));
            let meta = found.ok_or_else(|| ModelError::bad(&self.path, format!("has no '{theirs}'")))?;
            store.set_floats(ours, &meta, &self.file.read(theirs)?)?;
        }
        Ok(())
    }
}

/// Whether an adapter names another model than `base`: another folder, where the named one is here, or another name.
fn is_another(base: &Path, named: &str, found: Option<&Path>) -> bool {
    let whole = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let name = |path: &Path| whole(path).file_name().map(|n| n.to_string_lossy().to_lowercase());
    match found {
        Some(found) => whole(found) != whole(base),
        None => name(Path::new(named)) != name(base),
    }
}

/// Settings that say nothing about the numbers, or that are read below.
const READ: &[&str] = &[
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "layers_pattern",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
    "ensure_weight_tying",
];

fn parse(table: &Map<String, Value>) -> Result<Lora, String> {
    let get = |key: &str| table.get(key).filter(|v| !v.is_null());
    match get("peft_type").and_then(Value::as_str) {
        Some("LORA") => {}
        other => return Err(format!("'peft_type' is {}, not LORA", other.unwrap_or("missing"))),
    }
    for (key, value) in table.iter().filter(|(k, _)| !READ.contains(&k.as_str())) {
        let idle = match value {
            Value::Null => true,
            Value::Bool(on) => !on || key == "init_lora_weights",
            Value::Array(list) => list.is_empty(),
            Value::Object(inner) => inner.is_empty(),
            Value::String(word) => match key.as_str() {
                "bias" => word == "none",
                // How the matrices began; others of these change the base, too.
                "init_lora_weights" => ["gaussian", "orthogonal", "eva"].contains(&word.as_str()),
                _ => false,
            },
            Value::Number(_) => false,
        };
        if !idle {
            return Err(format!("'{key}' is {value}: plain LoRA is what is known here"));
        }
    }
    let number = |key: &str, default: Option<f64>| match get(key) {
        Some(v) => v.as_f64().ok_or(format!("'{key}' is {v}, not a number")),
        None => default.ok_or(format!("has no '{key}'")),
    };
    let rank = number("r", None)?;
    if rank.fract() != 0.0 || rank < 1.0 {
        return Err(format!("'r' is {rank}, not a whole number above 0"));
    }
    let modules = match get("target_modules") {
        Some(Value::Array(list)) => list,
        Some(other) => return Err(format!("'target_modules' is {other}: a list of names is what is known here")),
        None => return Err("has no 'target_modules'".into()),
    };
    let mut targets = vec![];
    for module in modules {
        let known = |t: &&Target| module.as_str().is_some_and(|m| m == t.leaf() || m == t.module());
        let names = || Target::ALL.map(Target::leaf).join(", ");
        targets.push(*Target::ALL.iter().find(known).ok_or_else(|| format!("'target_modules' holds {module}; known here: {}", names()))?);
    }
    targets.sort();
    let lora = Lora { rank: rank as usize, alpha: number("lora_alpha", Some(8.0))?, dropout: number("lora_dropout", Some(0.0))?, targets };
    lora.check()?;
    Ok(lora)
}

/// Writes an adapter into a folder. `tensors` are in the order of `Lora::tensors`; `base` is where its model is.
pub fn write_adapter(dir: &Path, lora: &Lora, shape: &Shape, base: &str, tensors: Vec<(Meta, Vec<u8>)>) -> Result<(), ModelError> {
    let weights: Vec<Weight> =
        peft_names(lora, shape).into_iter().zip(tensors).map(|(name, (meta, bytes))| Weight { name, meta, bytes }).collect();
    let all: Vec<Tensor> = weights.iter().map(Weight::tensor).collect();
    checkpoint::write_safetensors(&dir.join(WEIGHTS), &all, Some(note()))?;
    let alpha = if engine::mutant!("alpha-is-cut-to-a-whole-number", lora.alpha.fract() == 0.0, true) {
        json!(lora.alpha as i64)
    } else {
        json!(lora.alpha)
    };
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "target_modules": lora.targets.iter().map(|t| t.leaf()).collect::<Vec<_>>(),
        "bias": "none",
        "fan_in_fan_out": false,
        "use_rslora": false,
        "use_dora": false,
        "inference_mode": true,
    });
    write_json(&dir.join(CONFIG), &config)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an adapter is multiplied by need not be a whole number.
    #[test]
    fn an_adapters_settings_are_read_as_they_were_written() {
        let config = json!({
            "model_type": "llama", "vocab_size": 5, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "intermediate_size": 3,
        });
        let shape = Shape::parse(config.as_object().unwrap()).unwrap();
        for (alpha, dropout) in [(2.5, 0.125), (16.0, 0.0)] {
            let dir = tempfile::tempdir().unwrap();
            let lora = Lora { rank: 2, alpha, dropout, targets: vec![Target::Q, Target::Down] };
            let tensors = lora.tensors(&shape).into_iter().enumerate().map(|(i, (_, shape))| {
                let numbers = vec![i as f32 + 0.5; shape.iter().product()];
                (Meta::f32(&shape), bytemuck::cast_slice::<f32, u8>(&numbers).to_vec())
            });
            write_adapter(dir.path(), &lora, &shape, "owner/base", tensors.collect()).unwrap();
            let found = Adapter::open(dir.path(), &shape, None).unwrap();
            assert_eq!(found.lora, lora);
            assert_eq!(Adapter::base_of(dir.path()).unwrap(), ("owner/base".into(), None));
        }
    }
}
