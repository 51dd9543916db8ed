//! A decoder as `Supervised` trains it.

use super::{Adapted, Lessons, Places};
use crate::data::{Source, Split};
use crate::recipe::{Feeds, Metric, Model, Session, TrainError};
use crate::say;
use engine::{Recorder, Var};
use std::path::Path;
use std::sync::Arc;

/// A decoder and the data that it learns.
pub struct DecoderModel {
    pub model: Adapted,
    pub lessons: Lessons,
    /// Tokens of a row.
    pub seq: usize,
    /// What a checkpoint notes of the data; and of a base that is in no folder.
    pub identity: serde_json::Value,
}

impl DecoderModel {
    /// The loss; where it `trains`, with dropout.
    fn record<'g>(&self, r: &'g Recorder, batch: usize, trains: bool) -> Vec<(&'static str, Var<'g>)> {
        let f = Feeds::new(r, batch, self.seq);
        let d = self.model.decoder(r, trains.then_some(f.rng));
        let places = self.has_places().then(|| Places::fed(r, batch, self.seq));
        vec![("loss", d.loss(d.hidden(f.ids, places), f.targets, f.weight))]
    }
}

impl Model for DecoderModel {
    fn seq(&self) -> usize {
        self.seq
    }

    fn has_places(&self) -> bool {
        self.lessons.has_places()
    }

    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        self.record(r, batch, true)
    }

    fn evaluate<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        self.record(r, batch, false)
    }

    fn metrics(&self) -> &'static [Metric] {
        Metric::TEXT
    }

    fn prepare(&self, s: &mut Session) -> Result<(), TrainError> {
        self.model.load(s)?;
        // Now rather than at the first checkpoint: by then the folder may have changed.
        self.identity().map(|_| ())
    }

    fn init_from(&self, s: &mut Session, from: &Path) -> Result<bool, TrainError> {
        let is_adapter = from.join("adapter_config.json").exists();
        if is_adapter {
            self.model.take(s, from)?;
        }
        Ok(is_adapter)
    }

    fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError> {
        if train {
            say!("{}", self.lessons.describe()?);
        }
        self.lessons.source(if train { Split::Train } else { Split::Val })
    }

    fn makes_own_rows(&self) -> bool {
        self.lessons.makes_own_rows()
    }

    fn epoch(&self) -> Option<u64> {
        self.lessons.epoch()
    }

    fn vocab(&self) -> usize {
        self.model.shape.vocab
    }

    fn floor(&self) -> Option<(&'static str, f64)> {
        Some(("entropy of the data", self.lessons.floor()?))
    }

    fn identity(&self) -> Result<serde_json::Value, TrainError> {
        let mut identity = self.identity.clone();
        if let Some(folder) = &self.model.folder {
            identity["base"] = format!("{:016x}", folder.fingerprint()?).into();
        }
        Ok(identity)
    }

    fn kept(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        self.lessons.kept()
    }
}
