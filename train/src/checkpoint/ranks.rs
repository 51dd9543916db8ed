//! Parts of tensors that several ranks hold. Each rank writes its own, with its place in the whole, into one file; who reads a checkpoint gets whole tensors.

use super::manifest::Sum;
use super::tensors::layout;
use super::*;
use engine::ranks::Part;
use serde_json::json;
use std::collections::btree_map::Entry;
use std::collections::{BTreeSet, HashMap};

/// A part of a tensor of one of a checkpoint's files.
pub struct Held<'a> {
    pub file: &'a str,
    pub tensor: Tensor<'a>,
    pub parts: &'a [Part],
}

/// A file of a rank's parts that is written, but not in its place yet.
pub struct Written {
    pub name: String,
    pub path: PathBuf,
    pub(super) sum: Sum,
}

/// The note that says where the parts of a file lie.
const PLACES: &str = "parts";

/// How often a tensor is cut at most: by each pass that divides states once.
const MOST_CUTS: usize = 8;

fn file_name(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}

/// Writes a rank's parts beside the checkpoint of this step, which takes them in when it is saved.
pub fn write_parts(dir: &Path, step: u64, rank: usize, held: &[Held]) -> Result<Written, CheckpointError> {
    files::create_folder(dir).map_err(io_error("create", dir))?;
    let path = dir.join(format!(".step-{step:08}.{}", file_name(rank)));
    match fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_error("replace", &path)(e)),
        _ => {}
    }
    let names: Vec<String> = held.iter().map(|h| format!("{}:{}", h.file, h.tensor.name)).collect();
    // `axis` is the dimension that is cut, or [dimension, sections] where each of its sections is.
    let axis = |p: &Part| if p.sections == 1 { json!(p.axis) } else { json!([p.axis, p.sections]) };
    let place = |p: &Part| json!({ "shape": p.shape, "axis": axis(p), "index": p.index, "of": p.of });
    let places = names.iter().zip(held).map(|(n, h)| (n.clone(), json!(h.parts.iter().map(place).collect::<Vec<_>>())));
    // One note: the order of several is another in every file, and two runs write the same bytes.
    let notes = HashMap::from([(PLACES.to_string(), Value::Object(places.collect()).to_string())]);
    let tensors: Vec<Tensor> = names.iter().zip(held).map(|(name, h)| Tensor { name, ..h.tensor }).collect();
    let sum = write_safetensors(&path, &tensors, Some(notes))?;
    Ok(Written { name: file_name(rank), path, sum })
}

/// Removes parts that ranks have written for a checkpoint which was never saved.
pub(super) fn forget_parts(dir: &Path) -> Vec<CheckpointError> {
    let is_part = |name: &str| name.starts_with(".step-") && name.contains(".rank-") && name.ends_with(".safetensors");
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().filter(|e| e.file_name().to_str().is_some_and(is_part));
    entries.filter_map(|e| fs::remove_file(e.path()).err().map(io_error("remove", &e.path()))).collect()
}

impl Written {
    /// For the rank that saves the checkpoint.
    pub fn told(&self) -> Value {
        json!({ "name": self.name, "path": self.path, "bytes": self.sum.bytes, "xxh3": self.sum.xxh3 })
    }

    pub fn of(told: &Value) -> Option<Written> {
        let text = |key: &str| told[key].as_str().map(String::from);
        let sum = Sum { bytes: told["bytes"].as_u64()?, xxh3: text("xxh3")? };
        Some(Written { name: text("name")?, path: text("path")?.into(), sum })
    }
}

/// Where a part lies, as its file notes it.
fn places(noted: &Value) -> Option<Vec<Part>> {
    let number = |v: &Value| v.as_u64().map(|n| n as usize);
    let part = |v: &Value| {
        let shape = v["shape"].as_array()?.iter().map(number).collect::<Option<Vec<_>>>()?;
        let (index, of) = (number(&v["index"])?, number(&v["of"])?);
        let (axis, sections) = match &v["axis"] {
            Value::Null => (None, 1),
            Value::Array(both) => (Some(number(both.first()?)?), number(both.get(1)?)?),
            axis => (Some(number(axis)?), 1),
        };
        let elements = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
        let cut = axis.map_or(Some(elements), |a| shape.get(a).copied())?;
        let fits = index < of && sections > 0 && cut.is_multiple_of(of.checked_mul(sections)?);
        fits.then_some(Part { shape, axis, sections, index, of, by: "" })
    };
    let noted =
        noted.as_array().filter(|cuts| cuts.len() <= engine::mutant!("parts-are-cut-any-number-of-times", MOST_CUTS, usize::MAX))?;
    let parts: Vec<Part> = noted.iter().map(part).collect::<Option<_>>()?;
    let follows = |w: &[Part]| w[0].own_shape().iter().product::<usize>() == w[1].shape.iter().product::<usize>();
    let whole = parts.iter().all(|p| p.shape.iter().all(|n| *n > 0));
    (whole && parts.windows(2).all(follows)).then_some(parts)
}

fn cuts(parts: &[Part]) -> Vec<(Option<usize>, usize, usize)> {
    parts.iter().map(|p| (p.axis, p.sections, p.of)).collect()
}

/// A tensor that is put together of parts.
#[derive(Default)]
struct Whole {
    dtype: String,
    shape: Vec<usize>,
    /// How it was cut: of each cut the dimension, its sections and the number of parts.
    cuts: Vec<(Option<usize>, usize, usize)>,
    bytes: Vec<u8>,
    /// Which parts are there: their indices, from the outside in.
    there: BTreeSet<Vec<usize>>,
}

impl Whole {
    fn put(&mut self, parts: &[Part], own: &[u8]) {
        // From the inside out: each part is put into the part that it was cut from.
        let Some((outer, inner)) = parts.split_first() else { return };
        let mut piece = vec![0; self.bytes.len() / outer.of];
        match inner {
            [] => piece.copy_from_slice(own),
            _ => {
                piece = outer.cut(&self.bytes);
                let mut within = Whole { bytes: piece, ..Whole::default() };
                within.put(inner, own);
                piece = within.bytes;
            }
        }
        outer.put(&piece, &mut self.bytes);
    }
}

impl Checkpoint {
    /// The files of ranks that have parts.
    fn rank_files(&self) -> impl Iterator<Item = &String> {
        self.files.keys().filter(|name| name.starts_with("rank-") && name.ends_with(".safetensors"))
    }

    /// A file with the tensors of which ranks have parts put together.
    pub(super) fn joined(&self, name: &str, base: Loaded) -> Result<Loaded, CheckpointError> {
        let (mut wholes, mut needed) = (BTreeMap::<String, Whole>::new(), BTreeMap::<String, usize>::new());
        let files = self.rank_files().count();
        for file in self.rank_files() {
            let path = self.path.join(file);
            let bad = |what: &str| broken(&path, format!("'{what}' does not say which part of a tensor it is"));
            let own = Loaded::parse(&path, self.bytes(file)?)?;
            let notes: Value = own.metadata().get(PLACES).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
            for full in own.names() {
                let Some(tensor) = full.strip_prefix(name).and_then(|rest| rest.strip_prefix(':')) else { continue };
                let parts = notes.get(&full).and_then(places).filter(|p| !p.is_empty()).ok_or_else(|| bad(&full))?;
                let (dtype, part, bytes) = own.get(&full).ok_or_else(|| bad(&full))?;
                // What a file says is compared with what it holds before room is made: files come from others, too.
                let of = parts.iter().try_fold(1usize, |n, p| n.checked_mul(p.of)).filter(|of| *of <= files).ok_or_else(|| bad(&full))?;
                let (shape, elements) = (parts[0].shape.clone(), |shape: &[usize]| shape.iter().product::<usize>());
                let last = parts.last().map_or(0, |p| elements(&p.own_shape()));
                // Numbers of less than a byte cannot be cut anywhere.
                let is_whole = engine::mutant!("parts-of-bytes", bytes.len().is_multiple_of(last.max(1)), true);
                if bytes.is_empty() || elements(&part) != last || elements(&shape) != last * of || !is_whole {
                    return Err(bad(&full));
                }
                let whole = match wholes.entry(tensor.into()) {
                    Entry::Occupied(there) => there.into_mut(),
                    Entry::Vacant(new) => {
                        let mut whole = input::room((bytes.len() * of) as u64).map_err(io_error("read", &path))?;
                        whole.resize(bytes.len() * of, 0);
                        new.insert(Whole {
                            dtype: dtype.clone(),
                            shape: shape.clone(),
                            cuts: cuts(&parts),
                            bytes: whole,
                            there: BTreeSet::new(),
                        })
                    }
                };
                if (&whole.dtype, &whole.shape, &whole.cuts) != (&dtype, &shape, &cuts(&parts)) {
                    return Err(broken(&path, format!("'{full}' is of another type, shape or cut than the other parts of '{tensor}'")));
                }
                if whole.bytes.len() != bytes.len() * of || !whole.there.insert(parts.iter().map(|p| p.index).collect()) {
                    return Err(bad(&full));
                }
                whole.put(&parts, bytes);
                needed.insert(tensor.to_string(), of);
            }
        }
        if wholes.is_empty() {
            return Ok(base);
        }
        if let Some((missing, w)) = wholes.iter().find(|(name, w)| w.there.len() != needed[*name]) {
            return Err(broken(&self.path, format!("of '{missing}' {} of {} parts are there", w.there.len(), needed[missing])));
        }
        let names = base.names();
        if let Some(twice) = names.iter().find(|name| wholes.contains_key(*name)) {
            return Err(broken(
                &self.path,
                format!("'{twice}' is in {name}, and ranks have parts of it: one of them is not this checkpoint's"),
            ));
        }
        let mut tensors: Vec<(String, String, Vec<usize>, &[u8])> = vec![];
        for n in &names {
            if let Some((dtype, shape, bytes)) = base.get(n) {
                tensors.push((n.clone(), dtype, shape, bytes));
            }
        }
        tensors.extend(wholes.iter().map(|(n, w)| (n.clone(), w.dtype.clone(), w.shape.clone(), &w.bytes[..])));
        let listed: Vec<Tensor> = tensors.iter().map(|(name, dtype, shape, bytes)| Tensor { name, dtype, shape, bytes }).collect();
        let notes: HashMap<String, String> = base.metadata();
        let (header, sorted) = layout(&listed, (!notes.is_empty()).then_some(notes))?;
        let mut all = (header.len() as u64).to_le_bytes().to_vec();
        all.extend(header.as_bytes());
        sorted.iter().for_each(|t| all.extend(t.bytes));
        Loaded::parse(&self.path.join(name), all)
    }
}
