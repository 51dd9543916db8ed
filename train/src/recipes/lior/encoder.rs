//! The encoder alone: a run that trains it to name the next token, and the weights of such a run for another that freezes them (`model.encoder`).

use super::model::{Lior, LiorConfig};
use crate::checkpoint::Loaded;
use crate::data::Source;
use crate::recipe::{Losses, Metric, Model, Task, TrainError};
use crate::run;
use crate::text::Text;
use engine::Recorder;
use std::path::Path;
use std::sync::Arc;

/// What `model.pretrain` trains, as every other language model here is trained.
pub struct NextToken {
    pub c: LiorConfig,
    pub text: Text,
}

impl Model for NextToken {
    fn seq(&self) -> usize {
        self.c.seq
    }

    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Losses<'g> {
        vec![("loss", Lior { c: &self.c, r, batch, accumulate: 1 }.next_token())]
    }

    fn metrics(&self) -> &'static [Metric] {
        Metric::TEXT
    }

    fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError> {
        self.text.source(train)
    }

    fn without_validation(&self) -> Result<Option<String>, TrainError> {
        self.text.without_validation()
    }

    fn makes_own_rows(&self) -> bool {
        self.text.counts_all()
    }

    fn epoch(&self) -> Option<u64> {
        self.text.epoch()
    }

    fn vocab(&self) -> usize {
        self.c.vocab
    }

    fn floor(&self) -> Option<(&'static str, f64)> {
        Some(("entropy of the data", self.source(true).ok()?.entropy_floor()?))
    }

    fn identity(&self) -> Result<serde_json::Value, TrainError> {
        self.text.identity()
    }

    fn kept(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        self.text.kept()
    }
}

/// The weights of the run that `model.encoder` names; they must fit this task's encoder.
pub fn trained(task: &dyn Task, c: &LiorConfig) -> Result<Loaded, TrainError> {
    let from = &c.encoder;
    let bad = |why: String| TrainError::Other(format!("model.encoder = {from}: {why}"));
    let found = run::find_checkpoint(Path::new(from)).map_err(|e| bad(e.to_string()))?;
    let file = found.weights(false).map_err(|e| bad(e.to_string()))?;
    for (state, meta) in task.graphs()[0].1.states().filter(|(s, _)| is_encoders(&s.name)) {
        let why = match file.get(&state.name) {
            Some((dtype, shape, _)) if dtype == meta.dtype.name() && shape == meta.shape => continue,
            Some((dtype, shape, _)) => format!("'{}' is {dtype} {shape:?} there, and {:?} here", state.name, meta.shape),
            None => format!("it has no '{}'", state.name),
        };
        return Err(bad(format!(
            "{why}: name a run of lior (--preset encoder trains one) whose model.dim, layers, heads, seq and vocab are those of this run"
        )));
    }
    // What no weight's shape says.
    let theirs = &found.meta["config"]["model"];
    for (key, ours) in [("heads", c.heads as f64), ("norm_eps", c.norm_eps)] {
        if let Some(there) = theirs[key].as_f64().filter(|there| *there != ours) {
            return Err(bad(format!("its model.{key} is {there}, and {ours} here: name a run whose encoder has the same, or set it")));
        }
    }
    run::same_tokenizer(&found, task).map_err(|e| bad(e.to_string()))?;
    Ok(file)
}

/// Whether a weight is the encoder's.
pub fn is_encoders(name: &str) -> bool {
    name.starts_with("encoder.")
}
