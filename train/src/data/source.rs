//! Sources: item i is a window of tokens, as a pure function of the seed and i.

use super::{DataError, Grammar, ShardSet, Split, hash};

/// One window: `targets[t]` is the token after `ids[t]`, or -1 where it does not count. Both are `[seq]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Item {
    pub ids: Vec<i32>,
    pub targets: Vec<i32>,
    /// `[seq]` where a window holds several sequences behind one another, or padding: of each token the last one that sees it. Else empty.
    pub until: Vec<i32>,
}

/// Where each token stands in its own sequence, in windows of `seq` tokens whose sequences end as `until` says.
pub fn positions(until: &[i32], seq: usize) -> Vec<i32> {
    let mut all = Vec::with_capacity(until.len());
    for window in until.chunks(seq) {
        let mut begin = 0;
        for (t, &last) in window.iter().enumerate() {
            all.push((t - begin) as i32);
            if last == t as i32 {
                begin = t + 1;
            }
        }
    }
    all
}

#[allow(clippy::len_without_is_empty)] // A source without a window is an error when it is made.
pub trait Source: Send + Sync {
    /// Windows in an epoch, at least one.
    fn len(&self) -> u64;
    /// All items have the same length.
    fn item(&self, i: u64) -> Result<Item, DataError>;
    /// Targets of an item that count, where all items have as many: then a rank need not make the items of others to know how many count in the step.
    fn counted(&self) -> Option<usize> {
        None
    }
    /// Nats per target that no model can get below, where it is known.
    fn entropy_floor(&self) -> Option<f64>;
    /// Whether there are more windows than anybody could read: `len` is then no size of anything, but a number that was chosen.
    fn is_endless(&self) -> bool {
        false
    }
    /// The order in which training reads it, another one in every epoch. None: as it is.
    fn order(&self, seed: u64) -> Option<Order> {
        Some(Order { seed, len: self.len() })
    }
}

/// Window `seq + 1` tokens long -> ids and targets.
fn item(tokens: impl ExactSizeIterator<Item = u32>, ignore: &[u32]) -> Item {
    let seq = tokens.len().saturating_sub(1);
    let (mut ids, mut targets) = (Vec::with_capacity(seq + 1), Vec::with_capacity(seq));
    for (t, token) in tokens.enumerate() {
        // Vocabularies end at 2^31.
        ids.push(token as i32);
        if engine::mutant!("targets-are-the-ids", t > 0, t < seq) {
            targets.push(if ignore.contains(&token) { -1 } else { token as i32 });
        }
    }
    ids.truncate(seq);
    Item { ids, targets, until: Vec::new() }
}

pub(super) fn check_range(item: u64, len: u64) -> Result<(), DataError> {
    if item < len { Ok(()) } else { Err(DataError::OutOfRange { item, len }) }
}

pub(super) fn check_seq(seq: usize) -> Result<(), DataError> {
    if (1..=1 << 22).contains(&seq) {
        return Ok(());
    }
    Err(DataError::Setting { what: "seq", value: seq.to_string(), need: "a window has 1 to 4194304 tokens".into() })
}

/// Windows of `seq` tokens that share nothing but the border: the last target of one is the first id of the next.
pub struct TokenWindows {
    set: ShardSet,
    seq: usize,
    ignore: Vec<u32>,
}

impl TokenWindows {
    /// Targets that are in `ignore` become -1.
    pub fn new(set: ShardSet, seq: usize, ignore: Vec<u32>) -> Result<Self, DataError> {
        check_seq(seq)?;
        if set.tokens() < seq as u64 + 1 {
            return Err(DataError::TooFew {
                what: format!("the {} split of {}", set.split().name(), set.dir().display()),
                tokens: set.tokens(),
                needed: seq as u64 + 1,
            });
        }
        Ok(TokenWindows { set, seq, ignore })
    }

    pub fn set(&self) -> &ShardSet {
        &self.set
    }
}

impl Source for TokenWindows {
    fn len(&self) -> u64 {
        (self.set.tokens() - 1) / self.seq as u64
    }

    fn item(&self, i: u64) -> Result<Item, DataError> {
        check_range(i, self.len())?;
        let start = i * self.seq as u64;
        let tokens = self.set.get(start..start + self.seq as u64 + 1)?;
        Ok(item(tokens.into_iter(), &self.ignore))
    }

    fn counted(&self) -> Option<usize> {
        engine::mutant!("ignored-tokens-are-counted", self.ignore.is_empty(), true).then_some(self.seq)
    }

    fn entropy_floor(&self) -> Option<f64> {
        self.set.dataset().entropy_floor
    }
}

/// Sentences of the grammar as bytes. Each window begins with a sentence, and no two windows share one.
pub struct Generated {
    grammar: Grammar,
    seed: u64,
    seq: usize,
    windows: u64,
    floor: f64,
    ignore: Vec<u32>,
}

impl Generated {
    /// More windows than any training reads.
    pub const ENDLESS: u64 = 1 << 40;

    /// `windows` is the length of an epoch, at most `ENDLESS`. The splits are independent streams of the same language.
    pub fn new(seed: u64, split: Split, seq: usize, windows: u64, ignore: Vec<u32>) -> Result<Self, DataError> {
        check_seq(seq)?;
        if !(1..=Self::ENDLESS).contains(&windows) {
            return Err(DataError::Setting {
                what: "windows",
                value: windows.to_string(),
                need: format!("generated data has 1 to {} windows", Self::ENDLESS),
            });
        }
        let grammar = Grammar::new();
        let floor = grammar.entropy_by_position(seq + 1)[1..].iter().sum::<f64>() / seq as f64;
        let seed = hash(&[seed, engine::mutant!("validation-is-training-data", split as u64, 0)]);
        Ok(Generated { grammar, seed, seq, windows, floor, ignore })
    }

    /// A sentence has at least one byte, so `seq + 1` sentences always fill a window. 2^40 windows times 2^22 fit in u64.
    fn sentences(&self, i: u64) -> std::ops::Range<u64> {
        let most = self.seq as u64 + 1;
        i * most..(i + 1) * most
    }

    /// Nats per target of this window under the true distribution: a perfect model's loss on it.
    pub fn item_floor(&self, i: u64) -> Result<f64, DataError> {
        check_range(i, self.windows)?;
        let (mut text, mut nats) = (Vec::new(), Vec::new());
        for sentence in self.sentences(i) {
            if nats.len() > self.seq {
                break;
            }
            self.grammar.sentence_nats(self.seed, sentence, &mut text, &mut nats);
        }
        // Byte 0 is no target.
        Ok(nats[1..=self.seq].iter().sum::<f64>() / self.seq as f64)
    }
}

impl Source for Generated {
    fn len(&self) -> u64 {
        self.windows
    }

    fn item(&self, i: u64) -> Result<Item, DataError> {
        check_range(i, self.windows)?;
        let mut text = Vec::new();
        for sentence in self.sentences(i) {
            if text.len() > self.seq {
                break;
            }
            self.grammar.sentence(self.seed, sentence, &mut text);
        }
        let bytes = text[..=self.seq].iter().map(|&byte| byte.into());
        Ok(item(bytes, &self.ignore))
    }

    fn counted(&self) -> Option<usize> {
        self.ignore.is_empty().then_some(self.seq)
    }

    /// The exact expectation of `item_floor`: a window's first bytes, and where it is cut, are accounted for. Not known
    /// where some targets do not count.
    fn entropy_floor(&self) -> Option<f64> {
        self.ignore.is_empty().then_some(self.floor)
    }

    fn is_endless(&self) -> bool {
        true
    }
}

/// A shuffled order of `len` items, another one in every epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    pub seed: u64,
    pub len: u64,
}

impl Order {
    /// Which item comes `i`-th, counted on through the epochs.
    pub fn at(&self, i: u64) -> u64 {
        let len = self.len.max(1);
        order(self.seed, engine::mutant!("every-epoch-in-the-same-order", i / len, 0), len, i % len)
    }
}

/// Item `i` (`i < n`) of a permutation of 0..n: a keyed Feistel network on the next power of four, walked until it is inside.
pub fn order(seed: u64, epoch: u64, n: u64, i: u64) -> u64 {
    assert!(i < n, "order: item {i} of {n}");
    let bits = 64 - (n - 1).leading_zeros();
    let half = bits.div_ceil(2).max(1);
    let mask = (1u64 << half) - 1;
    let mut x = i;
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..6 {
            (left, right) = (right, left ^ (hash(&[seed, epoch, round, right]) & mask));
        }
        x = (left << half) | right;
        if x < n {
            return x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::path::Path;

    #[test]
    fn positions_begin_anew_behind_every_end() {
        // Sequences of 3 and 1, padding; a window that is one sequence.
        assert_eq!(positions(&[2, 2, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5], 6), [0, 1, 2, 0, 0, 0, 0, 1, 2, 3, 4, 5]);
        assert!(positions(&[], 4).is_empty());
    }

    #[test]
    fn an_order_is_a_permutation() {
        for n in [1, 2, 3, 7, 1000, 4097] {
            for epoch in 0..3 {
                let mut all: Vec<u64> = (0..n).map(|i| order(5, epoch, n, i)).collect();
                all.sort();
                assert_eq!(all, (0..n).collect::<Vec<_>>());
            }
        }
        assert!(order(5, 0, u64::MAX, u64::MAX - 1) < u64::MAX);
    }

    #[test]
    fn orders_differ_across_seeds_and_epochs_and_are_mixed() {
        let list = |seed, epoch| (0..1000).map(|i| order(seed, epoch, 1000, i)).collect::<Vec<_>>();
        // The expected number of equal places of two random permutations is one.
        let equal = |a: &[u64], b: &[u64]| a.iter().zip(b).filter(|(x, y)| x == y).count();
        let first = list(1, 0);
        assert!(equal(&first, &list(1, 1)) < 10);
        assert!(equal(&first, &list(2, 0)) < 10);
        assert!(equal(&first, &(0..1000).collect::<Vec<_>>()) < 10);
        let neighbours = first.windows(2).filter(|w| w[0].abs_diff(w[1]) < 10).count();
        assert!(neighbours < 60, "{neighbours}");

        let endless = Order { seed: 1, len: 1000 };
        assert_eq!((0..2000).map(|i| endless.at(i)).collect::<Vec<_>>(), [first, list(1, 1)].concat());
    }

    fn windows(dir: &Path, n: u32, seq: usize, ignore: Vec<u32>) -> Result<TokenWindows, DataError> {
        super::super::dataset::tests::write_set(dir, n, 7);
        TokenWindows::new(ShardSet::open(dir, Split::Train).unwrap(), seq, ignore)
    }

    /// A rank that makes its own rows alone takes the others' to count as much: where some targets do not count, nobody knows that.
    #[test]
    fn items_of_which_tokens_are_ignored_do_not_say_how_many_count() {
        let dir = tempfile::tempdir().unwrap();
        let generated = |ignore: Vec<u32>| Generated::new(1, Split::Train, 10, 5, ignore).unwrap().counted();
        let counted = |ignore: Vec<u32>| (windows(dir.path(), 31, 10, ignore.clone()).unwrap().counted(), generated(ignore));
        assert_eq!((counted(vec![]), counted(vec![12])), ((Some(10), Some(10)), (None, None)));
    }

    #[test]
    fn token_windows_cover_the_set_once() {
        let dir = tempfile::tempdir().unwrap();
        let source = windows(dir.path(), 31, 10, vec![12]).unwrap();
        assert_eq!(source.len(), 3);
        let second = source.item(1).unwrap();
        assert_eq!(second.ids, (10..20).collect::<Vec<_>>());
        assert_eq!(second.targets, [11, -1, 13, 14, 15, 16, 17, 18, 19, 20]);
        assert!(matches!(source.item(3), Err(DataError::OutOfRange { item: 3, len: 3 })));
        assert_eq!(source.entropy_floor(), None);
    }

    #[test]
    fn too_few_tokens_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(windows(dir.path(), 11, 10, vec![]).unwrap().len(), 1);
        let error = windows(dir.path(), 10, 10, vec![]).err().unwrap().to_string();
        assert!(error.contains("has 10 tokens, a window needs 11"), "{error}");
        assert!(windows(dir.path(), 10, 0, vec![]).is_err());
    }

    #[test]
    fn generated_items_are_pure_and_splits_differ() {
        let make = |seed, split| Generated::new(seed, split, 256, Generated::ENDLESS, vec![]).unwrap();
        let train = make(1, Split::Train);
        let item = train.item(5).unwrap();
        assert_eq!(item, make(1, Split::Train).item(5).unwrap());
        assert_eq!((item.ids.len(), item.targets.len()), (256, 256));
        assert_eq!(item.ids[1..], item.targets[..255]);
        train.item(Generated::ENDLESS - 1).unwrap();
        assert!(train.item(Generated::ENDLESS).is_err());

        let set = |source: &Generated| (0..500).map(|i| source.item(i).unwrap().ids).collect::<HashSet<_>>();
        let all = set(&train);
        assert_eq!(all.len(), 500);
        assert!(all.is_disjoint(&set(&make(1, Split::Val))));
        assert!(all.is_disjoint(&set(&make(2, Split::Train))));
    }

    #[test]
    fn the_floor_is_the_mean_of_the_items_floors() {
        for seq in [3, 50, 200] {
            let source = Generated::new(9, Split::Val, seq, 10_000, vec![]).unwrap();
            let floor = source.entropy_floor().unwrap();
            let n = 5000.0;
            let (mut sum, mut squares) = (0.0, 0.0);
            for i in 0..5000 {
                let d = source.item_floor(i).unwrap() - floor;
                sum += d;
                squares += d * d;
            }
            let error = (squares / n / n).sqrt();
            assert!((sum / n).abs() < 4.0 * error, "seq {seq}: {} +- {error}", sum / n);
            assert!(error < 0.05 * floor);
        }
    }
}
