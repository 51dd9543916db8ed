//! A model's folder: config.json, the weights in one or several safetensors files, perhaps a tokenizer. A weight is read when
//! it is asked for.

use super::decoder::cached_is_whole;
use super::{Bias, Mixer, ModelError, Norm, Positions, Shape, Target, read_table, table_of};
use crate::checkpoint::{self, Tensor, TensorFile};
use crate::config::Config;
use crate::data::chats::TEMPLATE;
use crate::data::{DataError, Tokenizer};
use crate::inside::Inside;
use crate::recipe::TrainError;
use crate::report::human_bytes;
use engine::cpu::converted;
use engine::ops::nf4::{Nf4, PARTS};
use engine::{DType, Meta, Store};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use xxhash_rust::xxh3::Xxh3;

const CONFIG: &str = "config.json";
pub(crate) const GENERATION: &str = "generation_config.json";
pub(crate) const CARD: &str = "README.md";
const ONE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
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
            return Err(ModelError::bad(path, format!("there is no such folder{}", crate::input::fetched(path))));
        }
        cached_is_whole(path)?;
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

    /// Its tokenizer. None: no file is of one, and it has as many tokens as there are bytes, as kiln's own models of bytes.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>, DataError> {
        match Tokenizer::of_folder(&self.path)? {
            None if self.shape.vocab != Tokenizer::Byte.vocab() => {
                let need = format!("put the model's own there: its {} tokens cannot be bytes", self.shape.vocab);
                Err(DataError::NoTokenizer { path: self.path.clone(), need })
            }
            own => Ok(own),
        }
    }

    /// How its authors put conversations, as text of Jinja, if it says so.
    pub fn chat_template(&self) -> Result<Option<String>, ModelError> {
        let there = |name: &str| Some(self.path.join(name)).filter(|p| p.exists());
        let read = |p: PathBuf| crate::input::read_to_string(&p).map_err(ModelError::io("read", &p));
        chat_template(|name| there(name).map(read).transpose(), |name| there(name).map(|p| read_table(&p)).transpose())
    }

    /// The names of the files with its weights.
    pub fn file_names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().filter_map(|file| file.path().file_name()?.to_str())
    }

    /// Copies what is no weight: config, tokenizer, chat template. Its model card is not that of another model.
    pub fn copy_rest(&self, to: &Path) -> Result<(), ModelError> {
        let from = Contents::open(&self.path)?;
        REST.iter().try_for_each(|name| from.copy(name, to))
    }
}

type Table = serde_json::Map<String, Value>;
type Perhaps<T> = Result<Option<T>, ModelError>;

/// From the files of a model's folder, as text and as tables.
fn chat_template(text: impl Fn(&str) -> Perhaps<String>, table: impl Fn(&str) -> Perhaps<Table>) -> Perhaps<String> {
    if let Some(own) = text(TEMPLATE)? {
        return Ok(Some(own));
    }
    Ok(match table("tokenizer_config.json")?.and_then(|mut config| config.remove("chat_template")) {
        Some(Value::String(text)) => Some(text),
        // Several, by name.
        Some(Value::Array(all)) => all.iter().find(|t| t["name"] == "default").and_then(|t| t["template"].as_str()).map(String::from),
        _ => None,
    })
}

/// What a model's folder may have beside its weights. Other files in it are no part of a model, whatever they are.
pub const REST: &[&str] = &[
    CONFIG,
    GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    TEMPLATE,
    "chat_template.json",
    "preprocessor_config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
    "USE_POLICY.md",
];

/// The files of a model's folder, to be written elsewhere: folders come from archives and hubs, and a link in one could lead to a key of whoever copies it.
pub struct Contents {
    path: PathBuf,
    inside: Inside,
    /// In a hub's cache: this folder, and that of the model.
    hub: Option<(PathBuf, PathBuf)>,
}

impl Contents {
    /// Links are followed inside of the folder. In a hub's cache, whose folders hold links alone, to the blobs of the same model, too.
    pub fn open(path: &Path) -> Result<Contents, ModelError> {
        let whole = path.canonicalize().map_err(ModelError::io("open", path))?;
        let inside = Inside::open(&whole, Path::new("")).map_err(ModelError::io("open", &whole))?;
        Ok(Contents { path: path.into(), inside, hub: hub_of(&whole) })
    }

    /// None where there is no such file.
    pub fn file(&self, name: &str) -> Result<Option<fs::File>, ModelError> {
        let blob = || {
            let (snapshot, model) = self.hub.as_ref()?;
            let blob = blob(&fs::read_link(snapshot.join(name)).ok()?)?;
            Some(Inside::open(model, Path::new("")).and_then(|model| model.file(&blob)))
        };
        match blob().unwrap_or_else(|| {
            engine::mutant!("a-models-links-are-followed-out", self.inside.file(name), fs::File::open(self.path.join(name)))
        }) {
            Ok(file) => Ok(Some(file)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(ModelError::io("copy", &self.path.join(name))(e)),
        }
    }

    /// The text of a file beside the weights; None where there is no such file.
    pub fn text(&self, name: &str) -> Result<Option<String>, ModelError> {
        let Some(file) = self.file(name)? else { return Ok(None) };
        let mut text = String::new();
        let read = file.take(MOST_BESIDE + 1).read_to_string(&mut text);
        let long = || std::io::Error::new(std::io::ErrorKind::FileTooLarge, format!("it has more than {}", human_bytes(MOST_BESIDE)));
        read.and_then(|n| if n as u64 > MOST_BESIDE { Err(long()) } else { Ok(Some(text)) })
            .map_err(ModelError::io("read", &self.path.join(name)))
    }

    /// A JSON file beside the weights, as a table.
    pub fn table(&self, name: &str) -> Perhaps<Table> {
        self.text(name)?.map(|text| table_of(&self.path.join(name), &text)).transpose()
    }

    /// See `Folder::chat_template`.
    pub fn chat_template(&self) -> Perhaps<String> {
        chat_template(|name| self.text(name), |name| self.table(name))
    }

    /// Refuses files that are no files of the folder, whatever is then read of them.
    pub fn check(&self) -> Result<(), ModelError> {
        REST.iter().try_for_each(|name| self.file(name).map(drop))
    }

    pub fn copy(&self, name: &str, to: &Path) -> Result<(), ModelError> {
        let Some(from) = self.file(name)? else { return Ok(()) };
        let to = to.join(name);
        let copied = fs::File::create_new(&to).and_then(|mut file| std::io::copy(&mut from.take(MOST_BESIDE + 1), &mut file));
        match copied.map_err(ModelError::io("write", &to))? {
            n if n > MOST_BESIDE => {
                Err(ModelError::bad(&self.path.join(name), format!("has more than {}: no model has such a file", human_bytes(MOST_BESIDE))))
            }
            _ => Ok(()),
        }
    }
}

/// A file beside the weights has so much at most.
const MOST_BESIDE: u64 = 256 << 20;

/// Of a folder in a hub's cache, `models--OWNER--NAME/snapshots/HASH`: the folder, and that of the model.
fn hub_of(whole: &Path) -> Option<(PathBuf, PathBuf)> {
    let model = whole.parent().filter(|p| p.ends_with("snapshots"))?.parent()?;
    let is_named = model.file_name().is_some_and(|name| name.to_string_lossy().starts_with("models--"));
    engine::mutant!("any-folder-of-snapshots-is-a-hubs", is_named, true).then(|| (whole.into(), model.into()))
}

/// What a hub's link leads to, from the model's folder: such a link is always `../../blobs/NAME`.
fn blob(link: &Path) -> Option<String> {
    let name = link.to_str()?.strip_prefix("../../blobs/")?;
    (!name.contains('/') && !name.starts_with('.')).then(|| format!("blobs/{name}"))
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

/// The most files that a model's weights may be in: the largest models have a few hundred.
const MOST_FILES: usize = 1024;

fn sharded(path: &Path) -> Result<Files, ModelError> {
    let index = path.join(INDEX);
    let table = read_table(&index)?;
    let Some(map) = table.get("weight_map").and_then(Value::as_object) else {
        return Err(ModelError::bad(&index, "has no table 'weight_map'"));
    };
    // Each file is opened, and kept open.
    let refused = |count: usize| ModelError::bad(&index, format!("names more than {count} files"));
    let (mut names, mut numbers, mut holds) = (Vec::<&str>::new(), HashMap::new(), BTreeMap::new());
    for (weight, file) in map {
        // A name must not lead out of the folder.
        let plain = |n: &&str| !n.is_empty() && !n.starts_with('.') && !n.contains(['/', '\\', '\0']);
        let Some(file) = file.as_str().filter(plain) else {
            return Err(ModelError::bad(&index, format!("'{weight}' is in {file}, which is not a plain file name")));
        };
        let at = *numbers.entry(file).or_insert_with(|| {
            names.push(file);
            names.len() - 1
        });
        if names.len() > MOST_FILES {
            return Err(refused(MOST_FILES));
        }
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

pub(crate) fn write_json(path: &Path, value: &Value) -> Result<(), ModelError> {
    crate::files::write_new(path, format!("{value:#}\n").as_bytes()).map_err(ModelError::io("write", path))
}
