//! Examples in rows of fixed length.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::choices;

use super::super::source::{check_range, check_seq};
use super::super::{DataError, Item, Source, hash};

/// A conversation: mostly a prompt and a reply, perhaps more turns.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    pub tokens: Vec<u32>,
    /// Which of them are learned, in order: the reply, or every turn of the model's.
    pub learned: Vec<Range<usize>>,
}

impl Example {
    /// Learns what follows `head` tokens.
    pub fn reply(tokens: Vec<u32>, head: usize) -> Example {
        let learned = std::iter::once(head..tokens.len()).collect();
        Example { tokens, learned }
    }

    /// Tokens before the first that is learned.
    pub fn head(&self) -> usize {
        self.learned.first().map_or(self.tokens.len(), |range| range.start)
    }

    /// How many tokens are learned.
    pub fn learned(&self) -> usize {
        self.learned.iter().map(Range::len).sum()
    }

    /// Places that it takes in a row: from the last token nothing is predicted.
    pub fn places(&self) -> usize {
        self.tokens.len() - 1
    }
}

/// What happens to an example that is longer than a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TooLong {
    /// It loses its end.
    Cut,
    /// It is left out.
    Skip,
    /// It is an error.
    Refuse,
}

choices!(TooLong { Cut: "cut", Skip: "skip", Refuse: "refuse" });

/// How an example fits into a row.
#[derive(Debug, PartialEq)]
pub(super) enum Fit {
    Whole(Example),
    Cut(Example),
    Skip,
}

/// Makes an example fit into rows of `seq`, or says why it does not.
pub(super) fn fit(mut e: Example, seq: usize, too_long: TooLong) -> Result<Fit, String> {
    if e.head() == 0 {
        return Err("its prompt has no tokens: a reply begins after something (use data.template)".into());
    }
    let places = e.places();
    match too_long {
        _ if places <= seq => return Ok(Fit::Whole(e)),
        TooLong::Skip => return Ok(Fit::Skip),
        TooLong::Refuse => {
            return Err(format!(
                "it has {} tokens, and model.seq = {seq} (raise model.seq, or use data.too_long=cut or skip)",
                e.tokens.len()
            ));
        }
        TooLong::Cut => {}
    }
    if e.head() > seq {
        return Err(format!(
            "its prompt has {} tokens, and model.seq = {seq} leaves none for the reply (raise model.seq, or use data.too_long=skip)",
            e.head()
        ));
    }
    e.tokens.truncate(seq + 1);
    e.learned.retain(|range| range.start <= seq);
    e.learned.iter_mut().for_each(|range| range.end = range.end.min(seq + 1));
    Ok(Fit::Cut(e))
}

/// Examples behind one another in a row of `seq`, then padding. What is learned are replies; with `whole` prompts too. Targets in `ignore` are
/// not.
pub fn row<'a>(examples: impl IntoIterator<Item = &'a Example>, seq: usize, whole: bool, ignore: &[u32]) -> Item {
    let mut item = Item::default();
    for e in examples {
        let last = (item.ids.len() + e.places() - 1) as i32;
        let mut learned = e.learned.iter().peekable();
        for (t, pair) in e.tokens.windows(2).enumerate() {
            while learned.next_if(|range| range.end <= t + 1).is_some() {}
            let own = learned.peek().is_some_and(|range| range.start <= t + 1);
            let counts = (engine::mutant!("prompts-are-learned", whole, true) || own) && !ignore.contains(&pair[1]);
            // Vocabularies end at 2^31.
            item.ids.push(pair[0] as i32);
            item.targets.push(if counts { pair[1] as i32 } else { -1 });
            item.until.push(engine::mutant!("packed-examples-see-each-other", last, seq as i32 - 1));
        }
    }
    assert!(item.ids.len() <= seq, "examples of {} tokens in a row of {seq}", item.ids.len());
    item.until.extend(item.ids.len() as i32..seq as i32);
    item.ids.resize(seq, 0);
    item.targets.resize(seq, -1);
    item
}

/// Rows of a fixed set of examples.
pub struct Rows {
    examples: Arc<Vec<Example>>,
    /// Which examples are in each.
    rows: Vec<Vec<usize>>,
    seq: usize,
    ignore: Vec<u32>,
}

impl Rows {
    /// Of those of the examples that `chosen` names, each in one row; with `pack` as many in a row as fit. Every one has at most `seq` places.
    pub fn new(
        examples: Arc<Vec<Example>>,
        chosen: &[usize],
        seq: usize,
        pack: bool,
        seed: u64,
        ignore: Vec<u32>,
    ) -> Result<Rows, DataError> {
        check_seq(seq)?;
        let rows = match pack {
            true => packed(&examples, chosen, seq, seed),
            false => chosen.iter().map(|&i| vec![i]).collect(),
        };
        Ok(Rows { examples, rows, seq, ignore })
    }

    /// What is in row `i`.
    pub fn examples(&self, i: u64) -> impl Iterator<Item = &Example> {
        self.rows[i as usize].iter().map(|&e| &self.examples[e])
    }

    /// The share of all places that examples take.
    pub fn filled(&self) -> f64 {
        let taken: usize = self.rows.iter().flatten().map(|&i| self.examples[i].places()).sum();
        taken as f64 / (self.rows.len() * self.seq).max(1) as f64
    }
}

impl Source for Rows {
    fn len(&self) -> u64 {
        self.rows.len() as u64
    }

    fn item(&self, i: u64) -> Result<Item, DataError> {
        check_range(i, self.len())?;
        Ok(row(self.examples(i), self.seq, false, &self.ignore))
    }

    fn entropy_floor(&self) -> Option<f64> {
        None
    }
}

/// The longest first, each into the fullest row that has room for it: rows are then nearly full. Which of equally long examples meet, and the
/// order of rows, depend on the seed.
fn packed(examples: &[Example], chosen: &[usize], seq: usize, seed: u64) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = chosen.to_vec();
    order.sort_by_cached_key(|&i| (Reverse(examples[i].places()), hash(&[seed, i as u64])));
    let mut rows: Vec<Vec<usize>> = vec![];
    // Rows by the places that they have left.
    let mut room: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for i in order {
        let places = examples[i].places();
        let (left, row) = match room.range_mut(places..).next() {
            Some((&left, fitting)) => {
                let row = fitting.pop().expect("rooms without rows are removed");
                if fitting.is_empty() {
                    room.remove(&left);
                }
                (left, row)
            }
            None => {
                rows.push(vec![]);
                (seq, rows.len() - 1)
            }
        };
        rows[row].push(i);
        room.entry(left - places).or_default().push(row);
    }
    rows.sort_by_cached_key(|row| hash(&[seed, !0, row[0] as u64]));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example(head: usize, tail: usize, from: u32) -> Example {
        Example::reply((from..from + (head + tail) as u32).collect(), head)
    }

    #[test]
    fn a_row_keeps_examples_apart_and_learns_replies_alone() {
        let (a, b) = (example(2, 3, 10), example(1, 1, 20));
        let item = row([&a, &b], 8, false, &[12]);
        assert_eq!(item.ids, [10, 11, 12, 13, 20, 0, 0, 0]);
        assert_eq!(item.targets, [-1, -1, 13, 14, 21, -1, -1, -1], "12 is ignored");
        assert_eq!(item.until, [3, 3, 3, 3, 4, 5, 6, 7]);
        assert_eq!(super::super::super::positions(&item.until, 8), [0, 1, 2, 3, 0, 0, 0, 0]);
        assert_eq!(row([&a, &b], 5, true, &[]).targets, [11, 12, 13, 14, 21]);
    }

    #[test]
    fn long_examples_are_cut_skipped_or_refused() {
        let e = || example(3, 4, 0);
        for too_long in [TooLong::Cut, TooLong::Skip, TooLong::Refuse] {
            assert_eq!(fit(e(), 6, too_long), Ok(Fit::Whole(e())));
        }
        assert_eq!(fit(e(), 5, TooLong::Skip), Ok(Fit::Skip));
        assert!(fit(e(), 5, TooLong::Refuse).unwrap_err().contains("it has 7 tokens, and model.seq = 5"));
        for seq in 3..6 {
            let Ok(Fit::Cut(cut)) = fit(e(), seq, TooLong::Cut) else { panic!("{seq}") };
            assert_eq!((cut.places(), cut.head()), (seq, 3));
            assert_eq!(row([&cut], seq, false, &[]).targets.iter().filter(|t| **t >= 0).count(), seq - 2, "of the reply");
        }
        assert!(fit(e(), 2, TooLong::Cut).unwrap_err().contains("its prompt has 3 tokens, and model.seq = 2 leaves none"));
        assert!(fit(example(0, 3, 0), 9, TooLong::Skip).unwrap_err().contains("its prompt has no tokens"));
    }

    #[test]
    fn several_turns_of_an_example_are_learned_and_cut_together() {
        let turns = Example { tokens: (10..20).collect(), learned: vec![2..4, 7..9] };
        assert_eq!(row([&turns], 10, false, &[]).targets, [-1, 12, 13, -1, -1, -1, 17, 18, -1, -1]);
        assert_eq!((turns.head(), turns.learned()), (2, 4));
        for (seq, learned) in [(8, &[2..4, 7..9][..]), (7, &[2..4, 7..8]), (6, &turns.learned[..1])] {
            let Ok(Fit::Cut(cut)) = fit(turns.clone(), seq, TooLong::Cut) else { panic!("{seq}") };
            assert_eq!((&cut.learned[..], cut.tokens.len()), (learned, seq + 1));
        }
        assert!(fit(turns, 1, TooLong::Cut).unwrap_err().contains("leaves none"));
    }

    #[test]
    fn rows_hold_every_example_once_and_are_nearly_full() {
        let examples: Vec<Example> = (0..500).map(|i| example(1, 1 + (hash(&[3, i]) % 40) as usize, 1000 * i as u32)).collect();
        let examples = Arc::new(examples);
        let chosen: Vec<usize> = (0..500).filter(|i| i % 7 != 0).collect();
        let rows = |pack, seed| Rows::new(examples.clone(), &chosen, 64, pack, seed, vec![]).unwrap();
        for pack in [true, false] {
            let rows = rows(pack, 1);
            let mut seen: Vec<usize> = rows.rows.iter().flatten().copied().collect();
            seen.sort();
            assert_eq!(seen, chosen);
            let items: Vec<Item> = (0..rows.len()).map(|i| rows.item(i).unwrap()).collect();
            assert!(items.iter().all(|i| i.ids.len() == 64 && i.targets.len() == 64 && i.until.len() == 64));
            let learned: usize = items.iter().flat_map(|i| &i.targets).filter(|t| **t >= 0).count();
            assert_eq!(learned, chosen.iter().map(|&i| examples[i].tokens.len() - 1).sum::<usize>());
        }
        assert!(rows(true, 1).filled() > 0.97, "{}", rows(true, 1).filled());
        assert_eq!(rows(true, 1).rows, rows(true, 1).rows);
        assert_ne!(rows(true, 1).rows, rows(true, 2).rows);
        assert!(rows(true, 1).item(rows(true, 1).len()).is_err());
    }
}
