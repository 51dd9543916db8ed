//! Generated sums: `37+58=` is the source, `95` and a 0 that ends it the reply. The answer follows from the source alone, which the decoder sees only through the
//! gate.

use crate::data::seq2seq::Frame;
use crate::data::{DataError, Item, Source, Split};
use engine::philox::philox;

/// Both terms are below this.
const TERMS: u64 = 30;
/// One pair of terms in so many is never learned from.
const HELD_OUT: u64 = 8;
/// More examples than any training reads.
const ENDLESS: u64 = 1 << 40;

/// Bytes of the longest sum and of the longest answer with its end.
pub const LONGEST: [usize; 2] = ["29+29=".len(), "58\0".len()];

/// Sums of a split: to learn from, drawn without end; to validate with, each once.
pub struct Sums {
    frame: Frame,
    seed: u64,
    /// The pairs of terms of this split.
    pairs: Vec<(u64, u64)>,
    endless: bool,
}

fn draw(seed: u64, i: u64) -> u64 {
    let words = philox([i as u32, (i >> 32) as u32, 0x7375_6d73, 0], [seed as u32, (seed >> 32) as u32]);
    u64::from(words[0]) << 32 | u64::from(words[1])
}

/// `37+58=` and `95`
pub fn sum((a, b): (u64, u64)) -> (String, String) {
    (format!("{a}+{b}="), (a + b).to_string())
}

/// Which pairs are held out does not depend on the run's seed.
fn pairs(split: Split) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, (u64, u64))> = (0..TERMS * TERMS).map(|n| (draw(0, n), (n / TERMS, n % TERMS))).collect();
    all.sort_unstable();
    let held = all.len() / HELD_OUT as usize;
    let own = if split == Split::Train { &all[held..] } else { &all[..held] };
    own.iter().map(|(_, pair)| *pair).collect()
}

impl Sums {
    pub fn new(seed: u64, split: Split, frame: Frame) -> Sums {
        Sums { frame, seed, pairs: pairs(split), endless: split == Split::Train }
    }

    /// Sum number `i`.
    pub fn pair(&self, i: u64) -> (u64, u64) {
        let n = self.pairs.len() as u64;
        self.pairs[(if self.endless { draw(self.seed, i) % n } else { i }) as usize]
    }
}

impl Source for Sums {
    fn len(&self) -> u64 {
        if self.endless { ENDLESS } else { self.pairs.len() as u64 }
    }

    fn item(&self, i: u64) -> Result<Item, DataError> {
        if i >= self.len() {
            return Err(DataError::OutOfRange { item: i, len: self.len() });
        }
        let (question, answer) = sum(self.pair(i));
        let reply: Vec<u32> = answer.bytes().chain([0]).map(u32::from).collect();
        Ok(self.frame.pair(&question.bytes().map(u32::from).collect::<Vec<_>>(), &reply))
    }

    fn entropy_floor(&self) -> Option<f64> {
        Some(0.0)
    }

    fn is_endless(&self) -> bool {
        self.endless
    }
}
