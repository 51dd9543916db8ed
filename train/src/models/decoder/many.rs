//! Replies to many prompts, several at a time.

use super::chat::{Chat, Talk};
use crate::recipe::{Session, TrainError};
use crate::sample::Sampling;

/// Prompts that are replied to at once, by their places among all.
#[derive(Debug, PartialEq)]
pub struct Batch {
    pub prompts: Vec<usize>,
    /// Tokens of a row with a prompt at its end.
    time: usize,
}

/// Rows are multiples of it, so that few programs do for prompts of many lengths.
const MULTIPLE: usize = 64;

/// Batches among which prompts are sorted: what is written comes out in the order of the prompts, not later than after so many.
const SORTED: usize = 8;

/// Prompts of these lengths in batches: about equally long ones together, so that little is padding. Each prompt gets as many tokens as it would alone, at most
/// `new_tokens` and no more than the model has positions for.
fn batches(lengths: &[usize], at_once: usize, new_tokens: usize, context: usize) -> Vec<Batch> {
    // The longest that leave room for all the tokens.
    let roomy = context.saturating_sub(new_tokens);
    let places: Vec<usize> = (0..lengths.len()).collect();
    let mut all: Vec<Batch> = vec![];
    for window in places.chunks(SORTED * at_once) {
        let mut order = window.to_vec();
        order.sort_by_key(|i| (std::cmp::Reverse(lengths[*i]), *i));
        let mut open: Option<Batch> = None;
        for i in order {
            let length = lengths[i];
            let joins = |b: &Batch| b.prompts.len() < at_once && (b.time <= roomy || b.time == length);
            match open.as_mut().filter(|b| joins(b)) {
                Some(batch) => batch.prompts.push(i),
                None => {
                    let time = if length <= roomy { length.next_multiple_of(MULTIPLE).min(roomy) } else { length };
                    all.extend(open.replace(Batch { prompts: vec![i], time }));
                }
            }
        }
        all.extend(open);
    }
    all
}

impl Chat {
    /// These prompts, `at_once` at a time.
    pub fn batches(&self, prompts: &[Vec<u32>], at_once: usize, new_tokens: usize) -> Vec<Batch> {
        batches(&prompts.iter().map(Vec::len).collect::<Vec<_>>(), at_once, new_tokens, self.context())
    }

    /// Loads the programs that reply to a batch, where those of the `last` one do not do; number `draw` of the batches.
    pub fn begin_batch<'a>(
        &'a self,
        s: &mut Session,
        (batch, draw): (&Batch, u64),
        prompts: &[Vec<u32>],
        (replies, sampling): (usize, &Sampling),
        last: Option<&Talk<'a>>,
    ) -> Result<Talk<'a>, TrainError> {
        let own = batch.prompts.iter().map(|i| prompts[*i].clone()).collect();
        self.ready(s, self.talk(own, batch.time, replies, sampling)?.drawing(draw), last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_of_about_one_length_share_a_batch_and_none_loses_tokens() {
        let made = |lengths: &[usize], at_once, new| -> Vec<(Vec<usize>, usize)> {
            batches(lengths, at_once, new, 256).into_iter().map(|b| (b.prompts, b.time)).collect()
        };
        assert_eq!(made(&[3, 70, 5, 69], 2, 100), [(vec![1, 3], 128), (vec![2, 0], 64)]);
        // 156 leave room for 100 tokens; of longer ones only equals share a batch.
        assert_eq!(made(&[150, 157, 200, 157], 4, 100), [(vec![2], 200), (vec![1, 3], 157), (vec![0], 156)]);
        assert_eq!(made(&[1; 20], 2, 10).len(), 10);
        assert_eq!(made(&[9], 4, 1000), [(vec![0], 9)]);
    }
}
