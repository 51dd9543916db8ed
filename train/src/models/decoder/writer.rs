//! Replies to prompts, all of them at once: a program that reads the prompts, and one that is run for every token. What they hand on stays on the
//! device: caches of keys and values, the tokens so far, where each row stands.

use super::{Adapted, Decoder, Mixing, Places, Rows};
use crate::data::replies::{Asked, Prompt};
use crate::nn::mamba2::{self, Memory, Sizes, Weights};
use crate::recipe::{Session, TrainError};
use engine::ops::attention::attention_until;
use engine::ops::cache::{cache_write, decode_attention};
use engine::ops::sample::Nucleus;
use engine::philox::{philox, rng_feed};
use engine::{DType, Data, Graph, Init, Recorder, Var};

/// How many replies are written, how long, and how their tokens are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Writer {
    pub prompts: usize,
    /// To each prompt.
    pub replies: usize,
    /// Of a row with a prompt at its end.
    pub time: usize,
    pub new_tokens: usize,
    pub nucleus: Nucleus,
    /// Ends a reply.
    pub stop: Option<u32>,
}

/// Rows of prompts with their replies.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// [rows, time + new tokens]; after a reply's end its last token is repeated.
    pub ids: Vec<i32>,
    /// What is prompt or reply, and what is reply: the token that ended it, too.
    pub real: Vec<bool>,
    pub reply: Vec<bool>,
    /// Each reply, without the token that ended it.
    pub tokens: Vec<Vec<u32>>,
}

/// Random draws of replies use a number that no micro-batch has, so that they differ from dropout's.
pub const WRITES: u32 = 1 << 15;

/// Tokens from one look at whether all replies have ended to the next.
const LOOK: usize = 8;

/// What the names of all its states begin with.
pub const SCRATCH: &str = "scratch/write/";

pub const READ: &str = "read";
pub const WRITE: &str = "write";

impl Writer {
    pub fn rows(&self) -> usize {
        self.prompts * self.replies
    }

    pub fn capacity(&self) -> usize {
        self.time + self.new_tokens
    }

    pub fn graphs<'a>(&self, decoder: impl for<'g> Fn(&'g Recorder) -> Decoder<'a, 'g>) -> Vec<(&'static str, Graph)> {
        let (read, write) = (Recorder::new(), Recorder::new());
        self.read(&decoder(&read));
        self.write_one(&decoder(&write));
        vec![(READ, read.finish()), (WRITE, write.finish())]
    }

    fn state<'g>(&self, r: &'g Recorder, name: &str, shape: &[usize]) -> Var<'g> {
        r.state(&format!("{SCRATCH}{name}"), shape, DType::I32, Init::Full(0.0))
    }

    fn caches<'g>(&self, d: &Decoder<'_, 'g>, at: &str) -> (Var<'g>, Var<'g>) {
        let shape = [self.rows(), self.capacity(), d.shape.kv_heads, d.shape.head_dim];
        let cache = |kind: &str| d.r.state(&format!("{SCRATCH}{at}.{kind}"), &shape, DType::F32, Init::Full(0.0));
        (cache("keys"), cache("values"))
    }

    /// What a state-space layer remembers.
    fn memory<'g>(&self, d: &Decoder<'_, 'g>, at: &str, s: &Sizes, w: &Weights<'g>) -> Memory<'g> {
        let state = |kind: &str, shape: &[usize]| d.r.state(&format!("{SCRATCH}{at}.{kind}"), shape, DType::F32, Init::Full(0.0));
        let rows = self.rows();
        Memory {
            conv: state("convolved", &[rows, w.conv.dim(0) - 1, s.wide()]),
            scan: state("scanned", &[rows, s.heads(), s.head, s.state]),
        }
    }

    /// Each prompt's once for every reply.
    fn repeated<'g>(&self, x: Var<'g>) -> Var<'g> {
        let rest = &x.shape()[1..];
        let shape = |replies: usize| [&[self.prompts, replies], rest].concat();
        x.reshape(&shape(1)).expand(&shape(self.replies)).reshape(&[&[self.rows()], rest].concat())
    }

    /// Prompts in rows of `time`, each at the end of its own, and a first token for every reply.
    fn read<'g>(&self, d: &Decoder<'_, 'g>) {
        let (r, rows) = (d.r, self.rows());
        let feed = |name: &str| r.feed(&format!("prompt_{name}"), &[self.prompts, self.time], DType::I32);
        let places = Places { position: feed("position"), until: feed("until") };
        let start = r.typed(|| r.zeros(&[1]).cast(DType::I32));
        let until = d.windowed(Some(places.until), self.prompts, self.time);
        let until = engine::mutant!("prompts-without-the-window", until, Some(places.until)).expect("prompts have it");
        let attend = |at: &str, q: Var<'g>, k: Var<'g>, v: Var<'g>| {
            let caches = self.caches(d, at);
            let (keys, values) = cache_write(caches, start, k, v);
            r.update(caches.0, keys);
            r.update(caches.1, values);
            attention_until(q, k, v, until, true, d.scale())
        };
        let scan = |at: &str, u: Var<'g>, s: &Sizes, w: &Weights<'g>| {
            let (states, memory) = (self.memory(d, at, s, w), mamba2::remembered(u, s, w, places.position));
            r.update(states.conv, self.repeated(memory.conv).cast(DType::F32));
            r.update(states.scan, self.repeated(memory.scan));
            mamba2::mamba2_placed(u, s, w, Some(places.position))
        };
        let hidden = d.hidden_by(feed("ids"), Some(places.position), self.time, Mixing { attend: &attend, scan: &scan });
        let last = hidden.slice(1, self.time - 1, self.time).reshape(&[self.prompts, d.shape.dim]);
        let rng = r.feed("rng", &[4], DType::I32);
        let token = self.repeated(d.logits(last)).sample(self.nucleus, rng, None);
        r.typed(|| {
            let row = |name: &str, width: usize| r.feed(name, &[rows, width], DType::I32);
            let first = self.place(r, r.zeros(&[1]));
            let tokens = first.choose(token.cast(DType::F32).reshape(&[rows, 1]), r.zeros(&[1, 1])).cast(DType::I32);
            r.update(self.state(r, "token", &[rows]), token);
            r.update(self.state(r, "tokens", &[rows, self.new_tokens]), tokens);
            r.update(self.state(r, "past", &[1]), r.full(&[1], self.time as f32).cast(DType::I32));
            r.update(self.state(r, "before", &[rows, 1]), row("before", 1));
            r.update(self.state(r, "until", &[rows, self.capacity()]), row("until", self.capacity()));
            r.update(self.state(r, "rng", &[4]), rng);
        });
    }

    /// One more token for every reply.
    fn write_one<'g>(&self, d: &Decoder<'_, 'g>) {
        let (r, rows) = (d.r, self.rows());
        let (token, past) = (self.state(r, "token", &[rows]), self.state(r, "past", &[1]));
        let (until, rng) = (self.state(r, "until", &[rows, self.capacity()]), self.state(r, "rng", &[4]));
        let (tokens, before) = (self.state(r, "tokens", &[rows, self.new_tokens]), self.state(r, "before", &[rows, 1]));
        let wide = |x: Var<'g>| x.cast(DType::F32);
        let position = r.typed(|| (wide(past) - wide(before)).cast(DType::I32));
        let seen = engine::mutant!("replies-without-the-window", d.windowed(Some(until), rows, self.capacity()), Some(until));
        let attend = |at: &str, q: Var<'g>, k: Var<'g>, v: Var<'g>| {
            let caches = self.caches(d, at);
            let (y, (keys, values)) = decode_attention(q, k, v, caches, past, seen, d.scale());
            r.update(caches.0, keys);
            r.update(caches.1, values);
            y
        };
        let scan = |at: &str, u: Var<'g>, s: &Sizes, w: &Weights<'g>| {
            let states = self.memory(d, at, s, w);
            let (y, next) = mamba2::step(u, s, w, states);
            r.update(states.conv, next.conv.cast(DType::F32));
            r.update(states.scan, next.scan);
            y
        };
        let mixing = Mixing { attend: &attend, scan: &scan };
        let hidden = d.hidden_by(token.reshape(&[rows, 1]), Some(position), self.capacity(), mixing);
        let drawn = d.logits(hidden.reshape(&[rows, d.shape.dim])).sample(self.nucleus, rng, Some(past));
        r.typed(|| {
            // What has ended goes on with the token that ended it.
            let next = match self.stop {
                Some(stop) => equal(wide(token), r.full(&[1], stop as f32)).choose(r.full(&[1], stop as f32), wide(drawn)),
                None => wide(drawn),
            };
            let here = self.place(r, wide(past) - (self.time as f32 - 1.0));
            r.update(token, next.cast(DType::I32));
            r.update(tokens, here.choose(next.reshape(&[rows, 1]), wide(tokens)).cast(DType::I32));
            r.update(past, (wide(past) + 1.0).cast(DType::I32));
        });
    }

    /// 1 at this place of a reply, 0 elsewhere: [1, new tokens].
    fn place<'g>(&self, r: &'g Recorder, at: Var<'g>) -> Var<'g> {
        equal(r.constant(&[1, self.new_tokens], (0..self.new_tokens).map(|i| i as f32).collect()), at)
    }

    /// Reads the prompts and draws a token for each reply.
    pub fn begin(&self, s: &mut Session, asked: &Asked, rng: [i32; 4]) -> Result<(), TrainError> {
        assert_eq!(
            (asked.prompts.len(), asked.time),
            (self.prompts, self.time),
            "prompts that are not as many or as long as they were to be"
        );
        let places = Rows::padded(&asked.real, self.time);
        let (mut before, mut until) = (vec![], vec![]);
        for prompt in &asked.prompts {
            let empty = self.time - prompt.tokens.len();
            for _ in 0..self.replies {
                before.push(empty as i32);
                // Padding before a prompt attends to itself alone.
                until.extend((0..self.capacity()).map(|t| if t < empty { t } else { self.capacity() - 1 } as i32));
            }
        }
        let feeds = [
            ("prompt_ids", &asked.ids[..]),
            ("prompt_position", &places.position),
            ("prompt_until", &places.until),
            ("before", &before),
            ("until", &until),
            ("rng", &rng),
        ];
        s.run(READ, &feeds.map(|(name, numbers)| (name, Data::I32(numbers))))
    }

    /// Draws the next token of each reply.
    pub fn next(&self, s: &mut Session) -> Result<(), TrainError> {
        s.run(WRITE, &[])
    }

    fn numbers(&self, s: &Session, name: &str) -> Result<Vec<i32>, TrainError> {
        let bytes = s.store.get(&format!("{SCRATCH}{name}")).expect("the writer's state").bytes()?;
        Ok(bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// The newest token of each reply.
    pub fn newest(&self, s: &Session) -> Result<Vec<u32>, TrainError> {
        Ok(self.numbers(s, "token")?.into_iter().map(|t| t as u32).collect())
    }

    /// All replies to the end.
    pub fn write(&self, s: &mut Session, asked: &Asked, rng: [i32; 4]) -> Result<Written, TrainError> {
        self.begin(s, asked, rng)?;
        for i in 1..self.new_tokens {
            if let (Some(stop), 0) = (self.stop, i % LOOK)
                && self.newest(s)?.iter().all(|&token| token == stop)
            {
                break;
            }
            self.next(s)?;
        }
        Ok(self.written(asked, &self.numbers(s, "tokens")?))
    }

    fn written(&self, asked: &Asked, tokens: &[i32]) -> Written {
        let mut w = Written { ids: vec![], real: vec![], reply: vec![], tokens: vec![] };
        for (row, drawn) in tokens.chunks(self.new_tokens).enumerate() {
            let prompt = row / self.replies * self.time..(row / self.replies + 1) * self.time;
            let end = drawn.iter().position(|&t| self.stop == Some(t as u32));
            let length = end.map_or(self.new_tokens, |e| e + 1);
            w.ids.extend(&asked.ids[prompt.clone()]);
            w.ids.extend(drawn[..length].iter().chain(std::iter::repeat_n(&drawn[length - 1], self.new_tokens - length)));
            let is_reply = (0..self.new_tokens).map(|t| t < length);
            w.real.extend(asked.real[prompt].iter().copied().chain(is_reply.clone()));
            w.reply.extend(std::iter::repeat_n(false, self.time).chain(is_reply));
            w.tokens.push(drawn[..end.unwrap_or(self.new_tokens)].iter().map(|&t| t as u32).collect());
        }
        w
    }
}

/// Of whole numbers.
fn equal<'g>(a: Var<'g>, b: Var<'g>) -> Var<'g> {
    (a - b).abs().less(a.recorder().full(&[1], 0.5))
}

/// Replies to made-up prompts, for `kiln bench generate`.
pub struct Writing {
    pub writer: Writer,
    model: Adapted,
    /// Or the base alone.
    pub adapters: bool,
    seed: u64,
}

impl Writing {
    pub fn new(writer: Writer, model: Adapted, adapters: bool, seed: u64) -> Writing {
        Writing { writer, model, adapters, seed }
    }

    pub fn graphs(&self) -> Vec<(&'static str, Graph)> {
        let graphs = self.writer.graphs(|r| {
            let d = self.model.decoder(r, None);
            Decoder { lora: d.lora.filter(|_| self.adapters), ..d }
        });
        graphs.into_iter().collect()
    }

    pub fn load(&self, s: &mut Session) -> Result<(), TrainError> {
        s.load_phase(self.graphs())?;
        self.model.load(s)
    }

    pub fn write(&self, s: &mut Session, step: u64) -> Result<(), TrainError> {
        let asked = made_up(&self.writer, self.model.shape.vocab);
        self.writer.write(s, &asked, rng_feed(self.seed, step, WRITES)).map(|_| ())
    }

    /// The prompts alone.
    pub fn begin(&self, s: &mut Session) -> Result<(), TrainError> {
        self.writer.begin(s, &made_up(&self.writer, self.model.shape.vocab), rng_feed(self.seed, 0, WRITES))
    }
}

/// Prompts as long as they may be, of tokens drawn at random.
pub fn made_up(writer: &Writer, vocab: usize) -> Asked {
    let token = |p: usize, t: usize| philox([p as u32, t as u32, 0x0061_736b, 0], [1, 2])[0] % vocab as u32;
    let prompt = |p: usize| Prompt { text: String::new(), tokens: (0..writer.time).map(|t| token(p, t)).collect() };
    Asked::new((0..writer.prompts).map(prompt).collect(), writer.time)
}
