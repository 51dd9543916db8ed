//! Replies: the source is read and thought about once, then the decoder goes on token by token, with caches of its own keys and values, and with those of the
//! memory, which are made once.

use super::HrmLmModel;
use super::model::{HrmLm, HrmLmConfig, Source};
use crate::data::Tokenizer;
use crate::data::chats::Message;
use crate::recipe::{Replier, Session, TrainError};
use engine::ops::attention::attention;
use engine::ops::cache::decode_attention;
use engine::{DType, Data, Graph, Init, Recorder, Var};
use std::sync::Arc;

/// States of replies, which no checkpoint holds.
const SCRATCH: &str = "scratch/reply/";

pub struct HrmLmReplier {
    model: HrmLmModel,
    /// Replies at once, and the most tokens of one.
    rows: usize,
    capacity: usize,
    /// The token that the decoder reads first, of each reply, and how many were asked for.
    first: Vec<i32>,
    asked: usize,
    position: usize,
    /// Factor of the gate's scale: 1, or 0 for a gate that is closed.
    pub open: f32,
}

fn state<'g>(r: &'g Recorder, name: String, shape: [usize; 4]) -> Var<'g> {
    r.state(&format!("{SCRATCH}{name}"), &shape, DType::F32, Init::Full(0.0))
}

/// Keys and values of the memory for one layer.
fn memory_states<'g>(c: &HrmLmConfig, r: &'g Recorder, rows: usize, layer: usize) -> [Var<'g>; 2] {
    let shape = [rows, c.memory_tokens(), c.heads, c.dim / c.heads];
    ["keys", "values"].map(|of| state(r, format!("memory/{layer}/{of}"), shape))
}

/// Reads sources and thinks about them.
fn read(c: &HrmLmConfig, rows: usize) -> Graph {
    let r = Recorder::new();
    let m = HrmLm { c, r: &r, all_placed: true };
    let thought = m.think(Source::padded(r.feed("source", &[rows, c.source], DType::I32)));
    let gate = m.gate(&thought, r.feed("gate_scale", &[1], DType::F32));
    let memory = m.memory(thought.thoughts[c.cycles - 1], Some(gate));
    for l in 0..c.decoder_layers {
        let made = m.cross_keys(&format!("decoder.layers.{l}"), memory);
        memory_states(c, &r, rows, l).into_iter().zip(made).for_each(|(state, made)| r.update(state, made.cast(DType::F32)));
    }
    r.finish()
}

/// One token more of every reply.
fn write(c: &HrmLmConfig, rows: usize, capacity: usize) -> Graph {
    let r = Recorder::new();
    let m = HrmLm { c, r: &r, all_placed: true };
    let (token, position) = (r.feed("token", &[rows, 1], DType::I32), r.feed("position", &[1], DType::I32));
    let (x, places) = m.embed("decoder", token, capacity);
    let mut x = x + places.gather_rows(position);
    for l in 0..c.decoder_layers {
        let at = format!("decoder.layers.{l}");
        let qkv = m.heads(m.linear(&format!("{at}.qkv"), x, 3 * c.dim), 3);
        let [keys, values] = ["keys", "values"].map(|of| state(&r, format!("{l}/{of}"), [rows, capacity, c.heads, c.dim / c.heads]));
        let (own, (next_keys, next_values)) = decode_attention(qkv[0], qkv[1], qkv[2], (keys, values), position, None, m.scale());
        r.update(keys, next_keys);
        r.update(values, next_values);
        let own = m.linear(&format!("{at}.out"), m.joined(own), c.dim);
        x = m.norm(&format!("{at}.attn_norm"), x + own);
        let q = m.heads(m.linear(&format!("{at}.cross_q"), x, c.dim), 1)[0];
        let [keys, values] = memory_states(c, &r, rows, l);
        x = m.rest_of_layer(&at, x, attention(q, keys, values, false, m.scale()));
    }
    r.output("logits", m.logits(m.norm("decoder.norm", x)));
    r.finish()
}

impl HrmLmReplier {
    pub fn new(model: HrmLmModel) -> HrmLmReplier {
        HrmLmReplier { model, rows: 0, capacity: 0, first: vec![], asked: 0, position: 0, open: 1.0 }
    }
}

impl Replier for HrmLmReplier {
    fn tokenizer(&self) -> Result<Arc<Tokenizer>, TrainError> {
        Ok(self.model.learned.tokenizer())
    }

    fn prompt(&self, turns: &[Message]) -> Result<Vec<u32>, TrainError> {
        self.model.learned.prompt(turns)
    }

    fn stop(&self) -> Result<Option<u32>, TrainError> {
        self.model.learned.stop()
    }

    fn begin(&mut self, s: &mut Session, rows: usize, capacity: usize) -> Result<(), TrainError> {
        (self.rows, self.capacity) = (rows, capacity);
        s.store.remove_prefix(SCRATCH);
        s.load("read", read(&self.model.c, rows))?;
        s.load("write", write(&self.model.c, rows, capacity))
    }

    fn read(&mut self, s: &mut Session, prompts: &[Vec<u32>]) -> Result<(), TrainError> {
        assert!((1..=self.rows).contains(&prompts.len()), "{} prompts for {} rows", prompts.len(), self.rows);
        let begin = self.model.learned.begin();
        let (mut source, c) = (vec![], &self.model.c);
        self.first.clear();
        // Rows that nobody asked for read the first prompt again.
        for prompt in prompts.iter().chain(std::iter::repeat(&prompts[0])).take(self.rows) {
            let Some(last) = prompt.last() else {
                return Err(TrainError::Other("the prompt has no tokens: write at least one character that the tokenizer knows".into()));
            };
            let kept = &prompt[prompt.len().saturating_sub(c.source)..];
            source.extend(kept.iter().map(|&t| t as i32).chain(std::iter::repeat_n(-1, c.source - kept.len())));
            self.first.push(begin.unwrap_or(*last) as i32);
        }
        (self.position, self.asked) = (0, prompts.len());
        let scale = [engine::mutant!("gate-of-a-reply-fully-open", self.open * c.gate_scale as f32, self.open)];
        s.run("read", &[("source", Data::I32(&source)), ("gate_scale", Data::F32(&scale))])
    }

    fn next(&mut self, s: &mut Session, tokens: &[u32]) -> Result<Vec<f32>, TrainError> {
        if self.position >= self.capacity {
            return Err(TrainError::Other(format!("a reply of more than {} tokens does not fit its cache", self.capacity)));
        }
        let mut token = self.first.clone();
        if self.position > 0 {
            token.iter_mut().zip(tokens).for_each(|(to, &t)| *to = t as i32);
        }
        s.run("write", &[("token", Data::I32(&token)), ("position", Data::I32(&[self.position as i32]))])?;
        self.position += 1;
        let mut logits = s.read("write", "logits")?;
        logits.truncate(self.asked * self.model.c.vocab);
        Ok(logits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Section;
    use crate::recipe::{self};
    use engine::{Cpu, Device, Switches};

    /// A small model of untrained weights: memory that differs from row to row, and an answer that depends on it.
    fn model(sets: &[&str]) -> HrmLmModel {
        let own = recipe::find("hrm_lm").unwrap();
        let mut config = recipe::preset(own, None).unwrap();
        let small = ["dim=16", "heads=2", "encoder_layers=1", "ff=2", "experts=3", "seq=8", "gate_bias=1.0"];
        small.iter().chain(sets).for_each(|set| config.set(set).unwrap());
        let config = own.sized(&config).unwrap();
        let c: HrmLmConfig = config.section("model").unwrap();
        let learned = super::super::Learned::new(&config, &c).unwrap();
        HrmLmModel { c, learned, accumulate: 1 }
    }

    fn session() -> Session {
        Session::new(&Device::cpu(Cpu::new(1)), &Switches::default(), 5)
    }

    /// The same logits without a cache: the whole text anew for every token, and each row alone.
    fn without_cache(s: &mut Session, c: &HrmLmConfig, prompt: &[u32], tokens: &[i32], open: f32) -> Vec<f32> {
        let r = Recorder::new();
        let m = HrmLm { c, r: &r, all_placed: true };
        let thought = m.think(Source { ids: r.feed("source", &[1, prompt.len()], DType::I32), real: None });
        let gate = m.gate(&thought, r.feed("gate_scale", &[1], DType::F32));
        let memory = m.memory(thought.thoughts[c.cycles - 1], Some(gate));
        let hidden = m.decode(r.feed("tokens", &[1, tokens.len()], DType::I32), &[memory]);
        r.output("logits", m.logits(hidden.slice(2, tokens.len() - 1, tokens.len())));
        s.load("whole", r.finish()).unwrap();
        let source: Vec<i32> = prompt.iter().map(|&t| t as i32).collect();
        let feeds = [("source", Data::I32(&source)), ("tokens", Data::I32(tokens)), ("gate_scale", Data::F32(std::slice::from_ref(&open)))];
        s.run("whole", &feeds).unwrap();
        s.read("whole", "logits").unwrap()
    }

    #[test]
    fn a_reply_is_what_the_whole_text_says_without_a_cache() {
        let sets = [
            &[][..],
            &["encoder=\"mamba2\"", "mamba_head=8"],
            &["memory=\"cross\"", "cycles=1", "experts=0"],
            // A gate that is open halfway, and half of that.
            &["gate_bias=0.0", "gate_scale=0.5"],
        ];
        for sets in sets {
            let mut replier = HrmLmReplier::new(model(sets));
            let c = replier.model.c.clone();
            let mut s = session();
            // Shorter than the source, as long, and one row that nobody asked for.
            let prompts = vec![vec![49u32, 43, 50], vec![57, 57, 43, 56, 56, 61]];
            replier.begin(&mut s, 3, 5).unwrap();
            replier.read(&mut s, &prompts).unwrap();
            let (mut tokens, mut last): (Vec<Vec<i32>>, Vec<u32>) = (prompts.iter().map(|p| vec![p[p.len() - 1] as i32]).collect(), vec![]);
            for step in 0..5 {
                let logits = replier.next(&mut s, &last).unwrap();
                assert_eq!(logits.len(), 2 * c.vocab);
                for (row, prompt) in prompts.iter().enumerate() {
                    let whole = without_cache(&mut s, &c, prompt, &tokens[row], c.gate_scale as f32);
                    let error = engine::check::relative(&logits[row * c.vocab..][..c.vocab], &whole);
                    assert!(error < 2e-5, "{sets:?}, token {step} of row {row}: {error}");
                }
                // Any tokens will do, as long as they differ.
                last = vec![(7 * step + 50) as u32, (11 * step + 60) as u32];
                tokens.iter_mut().zip(&last).for_each(|(to, &t)| to.push(t as i32));
            }
            assert!(replier.next(&mut s, &last).unwrap_err().to_string().contains("5 tokens"));
        }
    }

    #[test]
    fn nothing_of_the_source_passes_a_closed_gate() {
        let model = model(&["gate_bias=0.0"]);
        let (c, mut s) = (&model.c, session());
        let mut logits = |prompt: &[u32], open: f32| without_cache(&mut s, c, prompt, &[1, 2, 3], open);
        let (a, b) = ([49, 43, 50, 61], [57, 43, 56, 61]);
        assert_eq!(logits(&a, 0.0), logits(&b, 0.0));
        assert!(engine::check::relative(&logits(&a, 1.0), &logits(&b, 1.0)) > 1e-3);
        let config = HrmLmConfig { gate_warmup: 3, gate_ramp: 1, gate_scale: 0.5, ..HrmLmConfig::default() };
        assert_eq!([0, 2, 3, 4, 100].map(|step| config.gate_at(step)), [0.0, 0.0, 0.25, 0.5, 0.5]);
        assert!(HrmLmConfig::keys("model").keys.iter().any(|key| key.name == "gate_ramp"));
    }
}
