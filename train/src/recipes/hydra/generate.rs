//! Cached decoding: chunks of tokens, then one at a time, through programs that keep keys, values and the tails of the
//! convolutions in the Store.

use super::{Cache, Hydra, HydraModel};
use crate::data::Tokenizer;
use crate::recipe::{Generator, Session, TrainError};
use engine::{DType, Data, Recorder};
use std::sync::Arc;

/// Tokens of one chunk of a prompt.
const CHUNK: usize = 64;

pub struct HydraGenerator {
    model: HydraModel,
    capacity: usize,
    position: usize,
}

impl HydraGenerator {
    pub fn new(model: HydraModel) -> HydraGenerator {
        HydraGenerator { model, capacity: 0, position: 0 }
    }

    fn load(&self, s: &mut Session, name: &str, time: usize) -> Result<(), TrainError> {
        let r = Recorder::new();
        let cache = Cache { capacity: self.capacity, position: r.feed("position", &[1], DType::I32) };
        let h = Hydra { c: &self.model.c, r: &r };
        r.output("logits", h.cached_logits(r.feed("ids", &[1, time], DType::I32), &cache));
        s.load(name, r.finish())
    }
}

impl Generator for HydraGenerator {
    fn tokenizer(&self) -> Result<Arc<Tokenizer>, TrainError> {
        self.model.text.tokenizer()
    }

    fn begin(&mut self, s: &mut Session, capacity: usize) -> Result<(), TrainError> {
        (self.capacity, self.position) = (capacity, 0);
        s.store.remove_prefix("scratch/cache/");
        if capacity >= CHUNK {
            self.load(s, "prefill", CHUNK)?;
        }
        self.load(s, "decode", 1)
    }

    fn feed(&mut self, s: &mut Session, tokens: &[u32]) -> Result<Vec<f32>, TrainError> {
        if tokens.is_empty() || self.position + tokens.len() > self.capacity {
            return Err(TrainError::Other(format!(
                "{} tokens after {} do not fit a cache of {}",
                tokens.len(),
                self.position,
                self.capacity
            )));
        }
        let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        let mut program = "decode";
        let mut rest = &ids[..];
        while !rest.is_empty() {
            let n = if rest.len() >= CHUNK { CHUNK } else { 1 };
            program = if n == CHUNK { "prefill" } else { "decode" };
            s.run(program, &[("ids", Data::I32(&rest[..n])), ("position", Data::I32(&[self.position as i32]))])?;
            self.position += n;
            rest = &rest[n..];
        }
        s.read(program, "logits")
    }
}
