//! A model's folder: config.json, the weights in one or several safetensors files, perhaps a tokenizer. A weight is read when
//! it is asked for.

use super::{Bias, Mixer, ModelError, Norm, Positions, Shape, Target, read_table};
use crate::checkpoint::{self, Tensor, TensorFile};
use crate::config::Config;
use crate::recipe::TrainError;
use engine::cpu::converted;
use engine::ops::nf4::{Nf4, PARTS};
use engine::{DType, Meta, Store};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use xxhash_rust::xxh3::Xxh3;

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
pub(crate) const GENERATION: &str = "generation_config.json";
pub(crate) const CARD: &str = "README.md";
const ONE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const HEAD: &str = "lm_head.weight";

/// A model's folder, found whole.
pub struct Folder {
    pub path: PathBuf,
    pub shape: Shape,
    files: Vec<TensorFile>,
    /// By the names that the files have: which of them holds it.
    holds: BTreeMap<String, usize>,
    fingerprint: OnceLock<u64>,
}

impl Shape {
    /// Every weight: its name here, its name in a folder, and its shape.
    pub fn weights(&self) -> Vec<(String, String, Vec<usize>)> {
        let (f, names) = (self.family, self.family.names);
        let mut all = vec![];
        let mut add = |ours: String, theirs: String, shape: &[usize]| all.push((ours, theirs, shape.to_vec()));
        let norm = |add: &mut dyn FnMut(String, String, &[usize]), ours: String, theirs: String, width: usize| {
            add(ours.clone(), format!("{theirs}.weight"), &[width]);
            if f.norm == Norm::Layer {
                add(format!("{ours}.bias"), format!("{theirs}.bias"), &[width]);
            }
        };
        add("embedding".into(), format!("{}.weight", names.embedding), &[self.vocab, self.dim]);
        if f.positions == Positions::Learned {
            add("positions".into(), format!("{}.weight", names.positions), &[self.context, self.dim]);
        }
        for l in 0..self.layers {
            let (ours, theirs) = (format!("layers.{l}"), format!("{}.{l}", names.layers));
            norm(&mut add, format!("{ours}.attn_norm"), format!("{theirs}.{}", names.attn_norm), self.dim);
            if f.mixer == Mixer::Mamba2 {
                self.scan_weights().into_iter().for_each(|(part, shape)| {
                    add(format!("{ours}.{}", part.0), format!("{theirs}.mixer.{}", part.1), &shape);
                });
                continue;
            }
            norm(&mut add, format!("{ours}.mlp_norm"), format!("{theirs}.{}", names.mlp_norm), self.dim);
            if f.qk_norm {
                add(format!("{ours}.q_norm"), format!("{theirs}.self_attn.q_norm.weight"), &[self.head_dim]);
                add(format!("{ours}.k_norm"), format!("{theirs}.self_attn.k_norm.weight"), &[self.head_dim]);
            }
            for (part, module, outputs, inputs) in self.matrices() {
                let shape = if f.joint { [inputs, outputs] } else { [outputs, inputs] };
                add(format!("{ours}.{part}.weight"), format!("{theirs}.{module}.weight"), &shape);
                if self.has_bias(part) {
                    add(format!("{ours}.{part}.bias"), format!("{theirs}.{module}.bias"), &[outputs]);
                }
            }
        }
        norm(&mut add, "norm".into(), names.norm.into(), self.dim);
        if !self.tied {
            add("head".into(), HEAD.into(), &[self.vocab, self.dim]);
        }
        all
    }

    /// The weights of a state-space layer: name here, name in a folder, shape.
    fn scan_weights(&self) -> Vec<((&'static str, &'static str), Vec<usize>)> {
        let (Some(s), Some(scan)) = (self.scan_sizes(), self.scan) else { return vec![] };
        vec![
            (("inward.weight", "in_proj.weight"), vec![s.projected(), self.dim]),
            (("conv.weight", "conv1d.weight"), vec![s.wide(), 1, scan.taps]),
            (("conv.bias", "conv1d.bias"), vec![s.wide()]),
            (("dt_bias", "dt_bias"), vec![s.heads()]),
            (("log_decay", "A_log"), vec![s.heads()]),
            (("skip", "D"), vec![s.heads()]),
            (("scan_norm", "norm.weight"), vec![s.inner]),
            (("outward.weight", "out_proj.weight"), vec![self.dim, s.inner]),
        ]
    }

    /// The matrices of a layer: name here, name in a folder, outputs and inputs.
    fn matrices(&self) -> Vec<(&'static str, &'static str, usize, usize)> {
        if !self.family.joint {
            return Target::ALL.iter().map(|t| (t.name(), t.module(), t.sizes(self).0, t.sizes(self).1)).collect();
        }
        let (names, d, h) = (self.family.names, self.dim, self.hidden);
        vec![("qkv", names.qkv, 3 * d, d), ("o", names.o, d, d), ("up", names.up, h, d), ("down", names.down, d, h)]
    }

    /// Whether a matmul of a layer adds a bias.
    pub fn has_bias(&self, part: &str) -> bool {
        match self.family.bias {
            Bias::None => false,
            Bias::Qkv => matches!(part, "q" | "k" | "v"),
            Bias::All => true,
        }
    }
}

impl Folder {
    /// Looks at everything but the numbers: every weight is there, in its shape and a type that is known, and nothing else is.
    pub fn open(path: &Path) -> Result<Folder, ModelError> {
        if !path.is_dir() {
            return Err(ModelError::bad(path, "there is no such folder"));
        }
        let shape = Shape::read(&path.join(CONFIG))?;
        let (files, holds) = if path.join(INDEX).exists() { sharded(path)? } else { single(path)? };
        let mut folder = Folder { path: path.to_path_buf(), shape, files, holds, fingerprint: OnceLock::new() };
        folder.shape.tied = folder.shape.tied && !folder.has_own_head()?;
        let mut expected = BTreeSet::new();
        for (_, theirs, shape) in folder.shape.weights() {
            let Some((dtype, has)) = folder.find(&theirs).and_then(|file| file.info(folder.called(&theirs))) else {
                return Err(ModelError::bad(path, format!("has no weight '{theirs}', which its {CONFIG} asks for")));
            };
            if has != shape {
                return Err(ModelError::bad(path, format!("'{theirs}' is {has:?}, but its {CONFIG} makes it {shape:?}")));
            }
            if DType::from_name(&dtype).is_none_or(|d| !d.is_float()) {
                return Err(ModelError::bad(path, format!("'{theirs}' is of type {dtype}; BF16, F16 and F32 are known here")));
            }
            expected.insert(folder.called(&theirs).to_string());
        }
        // Files may repeat a head that is tied, and hold frequencies and masks that are computed.
        let computed = [".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"];
        let silent = |name: &str| (folder.shape.tied && name == HEAD) || computed.iter().any(|end| name.ends_with(end));
        match folder.holds.keys().find(|name| !expected.contains(*name) && !silent(name)) {
            Some(extra) => Err(ModelError::bad(path, format!("holds '{extra}', which is not known here: it is another model"))),
            None => Ok(folder),
        }
    }

    /// The config with the sizes of the folder in `model.base`, where it names one.
    pub fn settle(config: &mut Config) -> Result<(), TrainError> {
        let Some(path) = config.base().map(PathBuf::from) else { return Ok(()) };
        let settings = Folder::open(&path)?.shape.settings();
        Ok(settings.into_iter().try_for_each(|(key, value)| config.take_from_base(key, value))?)
    }

    /// Whether the files hold a head with other numbers than the embedding's: transformers then takes it, whatever the config says of tying.
    fn has_own_head(&self) -> Result<bool, ModelError> {
        let embedding = format!("{}.weight", self.shape.family.names.embedding);
        if self.find(HEAD).is_none() || self.find(&embedding).is_none() {
            return Ok(false);
        }
        let info = |name: &str| self.find(name).and_then(|file| file.info(self.called(name)));
        Ok(info(HEAD) != info(&embedding) || self.weight(HEAD)?.bytes != self.weight(&embedding)?.bytes)
    }

    /// The file that holds a weight.
    fn find(&self, theirs: &str) -> Option<&TensorFile> {
        Some(&self.files[*self.holds.get(self.called(theirs))?])
    }

    /// What the files call a weight: some leave out the prefix.
    pub(super) fn called<'a>(&self, theirs: &'a str) -> &'a str {
        let short = theirs.strip_prefix(self.shape.family.names.prefix).unwrap_or(theirs);
        if self.holds.contains_key(theirs) { theirs } else { short }
    }

    fn held(&self, theirs: &str) -> Result<(&TensorFile, Meta), ModelError> {
        let found = self.find(theirs).and_then(|file| {
            let (dtype, shape) = file.info(self.called(theirs))?;
            Some((file, Meta::new(&shape, DType::from_name(&dtype)?)))
        });
        found.ok_or_else(|| ModelError::bad(&self.path, format!("has no weight '{theirs}'")))
    }

    /// The type in which a weight lies there.
    pub fn dtype(&self, theirs: &str) -> Result<DType, ModelError> {
        Ok(self.held(theirs)?.1.dtype)
    }

    /// A weight by its name in the folder, as it lies there.
    pub fn weight(&self, theirs: &str) -> Result<Weight, ModelError> {
        let (file, meta) = self.held(theirs)?;
        Ok(Weight { name: theirs.into(), meta, bytes: file.read(self.called(theirs))? })
    }

    /// Every weight, in the order of `Shape::weights`, with its name here.
    pub fn weights(&self) -> impl Iterator<Item = Result<(String, Weight), ModelError>> {
        self.shape.weights().into_iter().map(|(ours, theirs, _)| Ok((ours, self.weight(&theirs)?)))
    }

    /// Fills the states of these names.
    pub fn load(&self, store: &mut Store) -> Result<(), ModelError> {
        for weight in self.weights() {
            let (ours, w) = weight?;
            store.set_floats(&ours, &w.meta, &w.bytes)?;
        }
        Ok(())
    }

    /// The same for a graph that keeps the layers' matrices in four bits.
    pub fn load_nf4(&self, store: &mut Store) -> Result<(), ModelError> {
        for weight in self.weights() {
            let (ours, w) = weight?;
            // Of a layer's weights the norms' are no matrices.
            if !(ours.starts_with("layers.") && w.meta.rank() == 2) {
                store.set_floats(&ours, &w.meta, &w.bytes)?;
                continue;
            }
            let q = Nf4::new(converted(&w.bytes, w.meta.dtype, DType::F32).f32());
            let mean = [q.mean];
            let parts: [(&[u8], DType); 4] = [
                (&q.codes, DType::U8),
                (&q.scales, DType::U8),
                (bytemuck::cast_slice(&q.largest), DType::F32),
                (bytemuck::cast_slice(&mean), DType::F32),
            ];
            for (part, (bytes, dtype)) in PARTS.iter().zip(parts) {
                store.set(&format!("{ours}.{part}"), &Meta::new(&[bytes.len() / dtype.size()], dtype), bytes)?;
            }
        }
        Ok(())
    }

    /// Of the weights and of what they mean: another model has another. Reads all of them, once.
    pub fn fingerprint(&self) -> Result<u64, ModelError> {
        if let Some(known) = self.fingerprint.get() {
            return Ok(*known);
        }
        let mut hash = Xxh3::new();
        hash.update(self.shape.identity().as_bytes());
        for weight in self.weights() {
            let (ours, w) = weight?;
            hash.update(format!("{ours} {:?}", w.meta).as_bytes());
            hash.update(&w.bytes);
        }
        Ok(*self.fingerprint.get_or_init(|| hash.digest()))
    }

    /// Where its tokenizer is, if it has one.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        Some(self.path.join(TOKENIZER)).filter(|p| p.exists())
    }

    /// How its authors put conversations, as text of Jinja, if it says so.
    pub fn chat_template(&self) -> Result<Option<String>, ModelError> {
        let own = self.path.join("chat_template.jinja");
        if own.exists() {
            return Ok(Some(crate::input::read_to_string(&own).map_err(ModelError::io("read", &own))?));
        }
        let config = self.path.join("tokenizer_config.json");
        if !config.exists() {
            return Ok(None);
        }
        Ok(match read_table(&config)?.remove("chat_template") {
            Some(Value::String(text)) => Some(text),
            // Several, by name.
            Some(Value::Array(all)) => all.iter().find(|t| t["name"] == "default").and_then(|t| t["template"].as_str()).map(String::from),
            _ => None,
        })
    }

    /// Copies what is no weight: config, tokenizer, chat template. Its model card is not that of another model.
    pub fn copy_rest(&self, to: &Path) -> Result<(), ModelError> {
        let weights = ["safetensors", "bin", "pt", "pth", "gguf", "h5", "msgpack", "onnx"];
        for entry in fs::read_dir(&self.path).map_err(ModelError::io("list", &self.path))? {
            let path = entry.map_err(ModelError::io("list", &self.path))?.path();
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let weight = path.extension().and_then(|e| e.to_str()).is_some_and(|e| weights.contains(&e)) || name.ends_with(".index.json");
            if path.is_file() && !weight && !name.starts_with('.') && name != CARD {
                fs::copy(&path, to.join(name)).map_err(ModelError::io("copy", &path))?;
            }
        }
        Ok(())
    }
}

type Files = (Vec<TensorFile>, BTreeMap<String, usize>);

fn single(path: &Path) -> Result<Files, ModelError> {
    let file = path.join(ONE);
    if !file.exists() {
        let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"].iter().find(|n| path.join(n).exists());
        let why = pickled.map_or(String::new(), |n| format!(" ({n} is not read here: save the model as safetensors)"));
        return Err(ModelError::bad(path, format!("has neither {ONE} nor {INDEX}{why}")));
    }
    let loaded = TensorFile::open(&file)?;
    let holds = loaded.names().into_iter().map(|n| (n, 0)).collect();
    Ok((vec![loaded], holds))
}

fn sharded(path: &Path) -> Result<Files, ModelError> {
    let index = path.join(INDEX);
    let table = read_table(&index)?;
    let Some(map) = table.get("weight_map").and_then(Value::as_object) else {
        return Err(ModelError::bad(&index, "has no table 'weight_map'"));
    };
    let mut names: Vec<&str> = vec![];
    let mut holds = BTreeMap::new();
    for (weight, file) in map {
        // A name must not lead out of the folder.
        let plain = |n: &&str| !n.is_empty() && !n.starts_with('.') && !n.contains(['/', '\\', '\0']);
        let Some(file) = file.as_str().filter(plain) else {
            return Err(ModelError::bad(&index, format!("'{weight}' is in {file}, which is not a plain file name")));
        };
        let at = names.iter().position(|n| *n == file).unwrap_or_else(|| {
            names.push(file);
            names.len() - 1
        });
        holds.insert(weight.clone(), at);
    }
    let files = names.iter().map(|n| TensorFile::open(&path.join(n))).collect::<Result<Vec<_>, _>>()?;
    match holds.iter().find(|(weight, at)| files[**at].info(weight).is_none()) {
        Some((weight, at)) => Err(ModelError::bad(&index, format!("says that {} holds '{weight}', which it does not", names[*at]))),
        None => Ok((files, holds)),
    }
}

/// A weight by its name in a folder.
pub struct Weight {
    pub name: String,
    pub meta: Meta,
    pub bytes: Vec<u8>,
}

impl Weight {
    pub fn tensor(&self) -> Tensor<'_> {
        Tensor { name: &self.name, dtype: self.meta.dtype.name(), shape: &self.meta.shape, bytes: &self.bytes }
    }
}

/// What transformers looks for in a file.
pub(super) fn note() -> HashMap<String, String> {
    HashMap::from([("format".to_string(), "pt".to_string())])
}

/// Writes a model's weights into a folder: one file, or several of at most `most` bytes (of one weight at least) and their index.
pub fn write_weights(dir: &Path, weights: &[Weight], most: usize) -> Result<(), ModelError> {
    let mut files: Vec<Vec<Tensor>> = vec![vec![]];
    let mut held = 0;
    for w in weights {
        if held > 0 && held + w.bytes.len() > most {
            files.push(vec![]);
            held = 0;
        }
        held += w.bytes.len();
        files.last_mut().expect("at least one").push(w.tensor());
    }
    if let [all] = &files[..] {
        checkpoint::write_safetensors(&dir.join(ONE), all, Some(note()))?;
        return Ok(());
    }
    let mut map = serde_json::Map::new();
    for (i, tensors) in files.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, files.len());
        checkpoint::write_safetensors(&dir.join(&name), tensors, Some(note()))?;
        map.extend(tensors.iter().map(|t| (t.name.to_string(), name.clone().into())));
    }
    let total: usize = weights.iter().map(|w| w.bytes.len()).sum();
    write_json(&dir.join(INDEX), &json!({ "metadata": { "total_size": total }, "weight_map": map }))
}

impl Shape {
    /// Writes config.json into a folder.
    pub fn write(&self, dir: &Path) -> Result<(), ModelError> {
        write_json(&dir.join(CONFIG), &self.to_json())
    }
}

pub(in crate::models) fn write_json(path: &Path, value: &Value) -> Result<(), ModelError> {
    crate::files::write_new(path, format!("{value:#}\n").as_bytes()).map_err(ModelError::io("write", path))
}
