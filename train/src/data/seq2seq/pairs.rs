//! Prompts with replies, and conversations: every range that is learned is an item, and its source is everything before it.

use std::sync::Arc;

use super::super::replies::{Example, Files};
use super::super::source::check_range;
use super::super::{DataError, Item, Source, Split};
use super::Frame;

pub struct Pairs {
    examples: Arc<Vec<Example>>,
    /// Which example, and which of its learned ranges.
    own: Vec<(u32, u32)>,
    frame: Frame,
}

impl Pairs {
    /// Of a split of files that were read without being cut.
    pub fn new(files: &Files, split: Split, frame: Frame) -> Result<Pairs, DataError> {
        frame.check()?;
        let examples = files.shared();
        let ranges = |&i: &usize| (0..examples[i].learned.len()).map(move |range| (i as u32, range as u32));
        let own = files.chosen(split).iter().flat_map(ranges).collect();
        Ok(Pairs { examples: examples.clone(), own, frame })
    }

    /// Items whose prompt, and whose reply, is longer than its side.
    pub fn cut(&self) -> (usize, usize) {
        let longer =
            |of: &dyn Fn(&Example, usize) -> bool| self.own.iter().filter(|own| of(&self.examples[own.0 as usize], own.1 as usize)).count();
        (longer(&|e, range| e.learned[range].start > self.frame.source), longer(&|e, range| e.learned[range].len() > self.frame.seq))
    }
}

impl Source for Pairs {
    fn len(&self) -> u64 {
        self.own.len() as u64
    }

    fn item(&self, i: u64) -> Result<Item, DataError> {
        check_range(i, self.len())?;
        let (example, range) = self.own[i as usize];
        let example = &self.examples[example as usize];
        let range = example.learned[range as usize].clone();
        Ok(self.frame.pair(&example.tokens[..range.start], &example.tokens[range]))
    }

    fn entropy_floor(&self) -> Option<f64> {
        None
    }
}
