//! A source and what is written of it, for models that read one text and write another. An item's ids are the source's tokens, padded at their end with -1,
//! then what the decoder reads; its targets are -1 over the source, then what the decoder writes, -1 where nothing is to be learned.
//!
//! | file | is |
//! |---|---|
//! | `windows.rs` | running text: the first tokens of a window are the source of the others |
//! | `pairs.rs` | prompts with replies and conversations: all turns before one are its source |
//! | `triples.rs` | rows of tokens, as other trainers leave them: `encoder_ids`, `decoder_input_ids`, `labels` |

mod pairs;
mod triples;
mod windows;

pub use pairs::Pairs;
pub use triples::{TripleCounts, Triples};
pub use windows::Windows;

use super::source::check_seq;
use super::{DataError, Item};

/// How long the two sides of an item are, and how the decoder begins.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Frame {
    /// Tokens of the source, and of the decoder.
    pub source: usize,
    pub seq: usize,
    /// What the decoder reads first; none: the last token of the source.
    pub begin: Option<u32>,
    /// Targets that do not count.
    pub ignore: Vec<u32>,
}

impl Frame {
    pub fn check(&self) -> Result<(), DataError> {
        [self.source, self.seq].into_iter().try_for_each(check_seq)
    }

    /// Tokens of an item.
    pub fn len(&self) -> usize {
        self.source + self.seq
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A prompt and its reply; both have a token. Of a prompt that is too long the last tokens stay, of a reply the first.
    pub fn pair(&self, prompt: &[u32], reply: &[u32]) -> Item {
        let prompt = self.source_of(prompt);
        let reply = &reply[..reply.len().min(self.seq)];
        let first = self.begin.or(prompt.last().copied());
        let read = first.into_iter().chain(reply.iter().copied()).take(reply.len());
        let target = |token: &u32| if self.ignore.contains(token) { -1 } else { *token as i32 };
        self.item(prompt, read.map(|token| token as i32), reply.iter().map(target))
    }

    /// The tokens that are read of a source.
    pub fn source_of<'a>(&self, tokens: &'a [u32]) -> &'a [u32] {
        &tokens[tokens.len().saturating_sub(self.source)..]
    }

    /// Vocabularies end at 2^31.
    fn item(&self, source: &[u32], read: impl Iterator<Item = i32>, targets: impl Iterator<Item = i32>) -> Item {
        let mut item = Item { ids: Vec::with_capacity(self.len()), targets: vec![-1; self.source], until: vec![] };
        item.ids.extend(source.iter().map(|token| *token as i32));
        item.ids.resize(self.source, -1);
        item.ids.extend(read);
        item.ids.resize(self.len(), 0);
        item.targets.extend(targets);
        item.targets.resize(self.len(), -1);
        item
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(begin: Option<u32>) -> Frame {
        Frame { source: 4, seq: 3, begin, ignore: vec![9] }
    }

    /// As `pair` of the reference has them: source, its mask, tokens, targets.
    #[test]
    fn a_pair_is_padded_at_the_ends_of_both_sides() {
        let item = frame(None).pair(&[5, 6], &[7, 8]);
        assert_eq!(item.ids, [5, 6, -1, -1, 6, 7, 0], "the decoder begins with the source's last token");
        assert_eq!(item.targets, [-1, -1, -1, -1, 7, 8, -1]);
        assert!(item.until.is_empty());
        let item = frame(Some(1)).pair(&[5, 6], &[7, 8]);
        assert_eq!(item.ids, [5, 6, -1, -1, 1, 7, 0]);
        // A reply of one token, of which nothing is read.
        assert_eq!(frame(Some(1)).pair(&[5], &[7]).ids, [5, -1, -1, -1, 1, 0, 0]);
    }

    #[test]
    fn of_a_long_prompt_the_end_stays_and_of_a_long_reply_the_beginning() {
        let item = frame(None).pair(&[1, 2, 3, 4, 5, 6], &[7, 9, 8, 10, 11]);
        assert_eq!(item.ids, [3, 4, 5, 6, 6, 7, 9]);
        assert_eq!(item.targets, [-1, -1, -1, -1, 7, -1, 8], "9 is not trained on, and is read all the same");
    }
}
