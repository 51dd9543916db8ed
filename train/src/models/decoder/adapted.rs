//! A base and the low-rank adapters on it.

use super::{Base, Decoder};
use crate::checkpoint::Checkpoint;
use crate::config::ConfigError;
use crate::models::{Adapter, Folder, Lora, Shape};
use crate::recipe::{Session, TrainError};
use engine::{Recorder, Var};
use std::path::Path;
use std::sync::Arc;

/// A base and the adapters on it.
pub struct Adapted {
    pub shape: Shape,
    /// None: every weight is trained.
    pub lora: Option<Lora>,
    /// Where the base is read from; none where it is drawn at random, or not trained yet.
    pub folder: Option<Arc<Folder>>,
    pub base: Base,
}

impl Adapted {
    /// The base in `folder`, its matrices in four bits where it is `quantised`; without a folder, one of this shape that is drawn at random. `seq`
    /// is the length of the rows that it will read.
    pub fn new(folder: Option<Folder>, shape: Shape, lora: Option<Lora>, quantised: bool, seq: usize) -> Result<Adapted, TrainError> {
        let folder = folder.map(Arc::new);
        let shape = folder.as_ref().map_or(shape, |f| f.shape.clone());
        if seq > shape.context {
            return Err(ConfigError::Invalid(format!("model.seq = {seq}: the base has {} positions", shape.context)).into());
        }
        if let (Some(why), true) = (shape.family.without_adapters(), lora.is_some() || quantised) {
            let problem = format!("{} {why}, on which adapters are not known here", shape.family.name);
            return Err(ConfigError::Invalid(problem).into());
        }
        let base = match (&lora, quantised, &folder) {
            (None, ..) => Base::Trained,
            (_, true, _) => Base::Quantised,
            (_, _, Some(_)) => Base::Loaded,
            (_, _, None) => Base::Drawn,
        };
        Ok(Adapted { shape, lora, folder, base })
    }

    /// Fills the base's states.
    pub fn load(&self, s: &mut Session) -> Result<(), TrainError> {
        Ok(self.base.load(self.folder.as_deref(), &mut s.store)?)
    }

    pub fn decoder<'a, 'g>(&'a self, r: &'g Recorder, rng: Option<Var<'g>>) -> Decoder<'a, 'g> {
        Decoder { shape: &self.shape, lora: self.lora.as_ref(), base: self.base, r, rng }
    }

    /// Whether a checkpoint's adapters were trained on this base.
    pub fn is_base_of(&self, found: &Checkpoint) -> Result<(), TrainError> {
        let (theirs, path) = (&found.meta["identity"]["base"], found.path.display());
        match &self.folder {
            Some(folder) if *theirs != format!("{:016x}", folder.fingerprint()?) => {
                Err(TrainError::Other(format!("{} is not the base that {path} was trained on: it has changed", folder.path.display())))
            }
            None if !theirs.is_null() => Err(TrainError::Other(format!("the base of {path} is not in the cache any more"))),
            _ => Ok(()),
        }
    }

    /// Takes an adapter in PEFT's layout; it must be what the config makes.
    pub fn take(&self, s: &mut Session, path: &Path) -> Result<(), TrainError> {
        let adapter = Adapter::open(path, &self.shape, self.folder.as_ref().map(|f| f.path.as_path()))?;
        let Some(ours) = &self.lora else {
            return Err(TrainError::Other(format!("{} is an adapter, but every weight is trained: train adapters on it", path.display())));
        };
        let theirs = &adapter.lora;
        let names = |l: &Lora| format!("[{}]", l.targets.iter().map(|t| format!("\"{}\"", t.name())).collect::<Vec<_>>().join(", "));
        let pairs = [
            ("rank", theirs.rank.to_string(), ours.rank.to_string()),
            (
                "alpha",
                engine::mutant!("adapters-of-another-alpha", theirs.alpha.to_string(), ours.alpha.to_string()),
                ours.alpha.to_string(),
            ),
            ("targets", names(theirs), names(ours)),
        ];
        if let Some((key, theirs, ours)) = pairs.iter().find(|(_, theirs, ours)| theirs != ours) {
            return Err(TrainError::Other(format!(
                "the adapter {} has {key} = {theirs}, but model.{key} = {ours} (train with --set 'model.{key}={theirs}')",
                path.display()
            )));
        }
        Ok(adapter.load(&mut s.store)?)
    }
}
