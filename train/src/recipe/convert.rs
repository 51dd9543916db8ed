//! States that a checkpoint keeps in another form than a run: f32, bf16, or 8 bits in blocks (the pass `adam8bit`).

use super::TrainError;
use crate::checkpoint::Loaded;
use engine::cpu::converted;
use engine::ops::adamw8::{Map, absmax_of};
use engine::{DType, Meta, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// How a state is kept.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Float(DType),
    Bytes(Map),
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Form::Float(dtype) => write!(f, "{dtype}"),
            Form::Bytes(_) => f.write_str("8 bits"),
        }
    }
}

/// How the states of a run differ from a checkpoint's.
#[derive(Debug, Default, PartialEq)]
pub struct Converted {
    /// How many states were converted, by the forms that they had and have.
    pub forms: BTreeMap<(String, String), usize>,
    /// Passes that kept something of other tensors than they do now.
    pub anew: BTreeSet<String>,
}

impl Converted {
    /// A line for each pair of forms, and for each pass that begins anew.
    pub fn lines(&self) -> impl Iterator<Item = String> + '_ {
        let converted = self.forms.iter().map(|((from, to), n)| format!("converted {n} states from {from} to {to}"));
        let anew = |pass: &String| {
            format!("{pass} applies to other tensors than in the checkpoint: what it kept of them is dropped, and it begins anew")
        };
        converted.chain(self.anew.iter().map(anew))
    }
}

/// A run's state of one name, and the same state in a file.
pub struct Pair<'a> {
    pub file: &'a Loaded,
    /// The checkpoint's name, for messages.
    pub what: &'a str,
    /// The state in the store; of one in 8 bits, its bytes.
    pub name: &'a str,
    pub meta: &'a Meta,
    /// Whether each rank of the run has a part of it.
    pub is_divided: bool,
}

impl Pair<'_> {
    /// The state's name in f32, and how the run keeps it; None for integers, which have one form.
    fn own(&self) -> Option<(&str, Form)> {
        match Map::of_bytes(self.name) {
            Some((map, base)) => Some((base, Form::Bytes(map))),
            None => self.meta.dtype.is_float().then_some((self.name, Form::Float(self.meta.dtype))),
        }
    }

    /// How the file keeps a state, if it has it in the run's shape.
    fn kept(&self, base: &str) -> Option<Form> {
        let typed = |name: &str| {
            let (dtype, shape, _) = self.file.get(name)?;
            DType::from_name(&dtype).filter(|_| shape == self.meta.shape)
        };
        let bytes = |map: &Map| typed(&map.names(base)[0]) == Some(DType::U8);
        let float = typed(base).filter(|d| d.is_float()).map(Form::Float);
        float.or_else(|| [Map::Signed, Map::Unsigned].into_iter().find(bytes).map(Form::Bytes))
    }

    /// Puts the state into the store if the file keeps it in another form; false if it does not. Without leave to convert, that is an error.
    pub fn convert(&self, store: &mut Store, leave: bool, done: &mut Converted) -> Result<bool, TrainError> {
        let Some((base, own)) = self.own() else { return Ok(false) };
        let Some(kept) = self.kept(base).filter(|kept| *kept != own) else { return Ok(false) };
        if !leave {
            let (why, way) = match own {
                // What the pass leaves alone, also where it is on as before.
                Form::Float(DType::F32) if self.is_divided => (
                    "this run, whose ranks have a part of it each, keeps it in",
                    "go on with as many ranks as before (adam8bit leaves alone what --tensor divides, and parts that are no whole blocks)",
                ),
                _ => (
                    "with the passes and ranks of this run it is in",
                    "set the passes (adam8bit) and the number of ranks (--ranks, --tensor) as they were",
                ),
            };
            return Err(TrainError::Other(format!(
                "{} keeps '{base}' in {kept}, but {why} {own}: convert it with --convert-states, or {way}",
                self.what
            )));
        }
        let numbers = self.numbers(base, kept)?;
        match own {
            Form::Float(_) => store.set_floats(self.name, &Meta::f32(&self.meta.shape), bytemuck::cast_slice(&numbers))?,
            Form::Bytes(map) => {
                let (bytes, most) = map.quantized(&numbers);
                store.set(self.name, self.meta, &bytes)?;
                store.set(&map.names(base)[1], &absmax_of(self.meta), bytemuck::cast_slice(&most))?;
            }
        }
        *done.forms.entry((kept.to_string(), own.to_string())).or_default() += 1;
        Ok(true)
    }

    /// The file's numbers.
    fn numbers(&self, base: &str, kept: Form) -> Result<Vec<f32>, TrainError> {
        let bytes = |name: &str, meta: &Meta| {
            let found = self.file.get(name).filter(|(dtype, shape, _)| *dtype == meta.dtype.name() && *shape == meta.shape);
            found.map(|f| f.2).ok_or_else(|| TrainError::Other(format!("{} has no '{name}' of {meta:?}: it is broken", self.what)))
        };
        Ok(match kept {
            Form::Float(dtype) => {
                let own = Meta::new(&self.meta.shape, dtype);
                bytemuck::pod_collect_to_vec(converted(bytes(base, &own)?, dtype, DType::F32).bytes())
            }
            Form::Bytes(map) => {
                let [of_bytes, of_most] = map.names(base);
                let most: Vec<f32> = bytemuck::pod_collect_to_vec(bytes(&of_most, &absmax_of(self.meta))?);
                map.dequantized(bytes(&of_bytes, &Meta::new(&self.meta.shape, DType::U8))?, &most)
            }
        })
    }
}
