//! A decoder as `Supervised` trains it.

use super::{Adapted, Chat, Lessons, Places};
use crate::data::replies::Prompt;
use crate::data::{Source, Split};
use crate::recipe::{Feeds, Metric, Model, Session, TrainError};
use crate::sample::Sampling;
use crate::say;
use engine::{Recorder, Var};
use std::path::Path;
use std::sync::Arc;

/// The most tokens of the sample that a run ends with.
const SAMPLE: usize = 128;

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

    /// What writes the sample that a run ends with, loaded, and what it begins with.
    fn begin_sample(&self, s: &mut Session) -> Result<Option<(Chat, Prompt, Sampling)>, TrainError> {
        let chat = Chat::of_lessons(&self.lessons, &self.model)?;
        let context = chat.context();
        let Some(prompt) = self.lessons.beginning(context)? else { return Ok(None) };
        // One position stays free: that they are full is worth a word where someone asks for a text, and not here.
        let max_tokens = SAMPLE.min(context.saturating_sub(prompt.tokens.len() + 1)).max(1);
        let sampling = Sampling { temperature: 0.8, top_p: 0.95, seed: 0, max_tokens, stop: vec![], stop_text: vec![] };
        chat.load_sample(s, &prompt.tokens, &sampling)?;
        Ok(Some((chat, prompt, sampling)))
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

    fn without_validation(&self) -> Result<Option<String>, TrainError> {
        self.lessons.without_validation()
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

    /// A held-out prompt with a reply, or the beginning of a text and how the model goes on.
    fn show(&self, s: &mut Session) -> Result<Option<String>, TrainError> {
        let begun = self.begin_sample(s);
        let ranks = s.switches.ranks.clone();
        if ranks.size() > 1 {
            // All ranks write it, or none does: one that cannot would keep the others waiting.
            let told = ranks.gather(&[begun.is_ok().into()])?;
            if told.iter().any(|ok| *ok == [0]) {
                begun.err().into_iter().for_each(|e| say!("no sample: {e}"));
                return Ok(None);
            }
        }
        let Some((chat, Prompt { text, tokens }, sampling)) = begun? else { return Ok(None) };
        let written = chat.sample(s, tokens, &sampling)?;
        Ok(Some(match chat.continues() {
            true => text + &written,
            false => format!("prompt: {}\nreply: {}", text.trim(), written.trim()),
        }))
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
