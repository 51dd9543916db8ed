//! Text files -> token shards -> windows -> batches; prompts with replies; sources with targets; pictures; puzzles. Item i of every source is a pure function of the seed and i.

pub mod chats;
mod dataset;
mod error;
mod escape;
mod glob;
mod grammar;
pub mod images;
mod inspect;
mod jsonl;
mod loader;
mod mixture;
mod paths;
mod pieces;
mod prepare;
mod prepared;
pub mod puzzles;
pub mod replies;
pub mod seq2seq;
mod shards;
mod source;
pub(crate) mod special;
mod tokenizer;

pub use dataset::{Dataset, ShardSet, Split, SplitInfo};
pub use error::DataError;
pub use escape::unescape;
pub use grammar::Grammar;
pub use inspect::{Inspection, ShardInfo, inspect};
pub use loader::{Batch, Loader};
pub use mixture::{Mixture, Shares, joined};
pub use paths::{Chosen, Part, Paths, listed, percent};
pub use prepare::{Input, PrepareOptions, Summary, prepare};
pub use prepared::Prepared;
pub use shards::{Shard, ShardWriter};
pub use source::{Generated, Item, Order, Source, TokenWindows, order, positions};
pub use special::{Noted, Special, Token};
pub(crate) use tokenizer::Words;
pub use tokenizer::{Stream, Tokenizer};

/// 64 random bits as a pure function of a seed and counters: splitmix64's finaliser, chained over the words.
fn hash(words: &[u64]) -> u64 {
    words.iter().fold(0, |state: u64, &word| {
        let mut z = (state ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// The same bits as a number in [0, 1).
fn uniform(words: &[u64]) -> f64 {
    (hash(words) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::{hash, uniform};

    #[test]
    fn hash_depends_on_every_word_and_uniform_fills_the_unit_interval() {
        assert_ne!(hash(&[1, 2]), hash(&[2, 1]));
        assert_ne!(hash(&[1, 2]), hash(&[1, 2, 0]));
        let mut bins = [0i32; 10];
        for i in 0..100_000 {
            bins[(uniform(&[7, i]) * 10.0) as usize] += 1;
        }
        // The standard deviation of a bin is sqrt(100000 * 0.1 * 0.9) = 95.
        assert!(bins.iter().all(|n| (n - 10_000).abs() < 500), "{bins:?}");
    }
}
