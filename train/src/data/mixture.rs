//! Several sources as one: one behind the other, or mixed by weight.

use std::sync::Arc;

use super::source::check_range;
use super::{DataError, Generated, Item, Order, Source, hash};

/// Which part of a mixture each item is of, and which of that part's items it is. A tree of choices between two: of the items that come to a fork, those
/// at which `floor(i * share + offset)` grows go to its first branch. So a branch never has an item more or less than its share of them, on average over
/// seeds exactly its share, and where an item belongs follows from its number alone. Shares are whole 2^32ths: no number is too large to be exact.
#[derive(Debug, Clone, PartialEq)]
pub struct Shares {
    root: Node,
}

#[derive(Debug, Clone, PartialEq)]
enum Node {
    Part(usize),
    Fork {
        /// Of 2^32, how many go to the first branch.
        share: u32,
        /// Drawn by the seed.
        offset: u32,
        branches: Box<[Node; 2]>,
    },
}

/// Tells a mixture's draws from others of the same seed.
const DRAWS: u64 = 0x6d69_7874;

impl Shares {
    /// Of positive finite weights, at least one.
    pub fn new(weights: &[f64], seed: u64) -> Result<Shares, String> {
        let largest = weights.iter().fold(0.0, |a: f64, b| a.max(*b));
        let parts: Vec<(usize, f64)> = weights.iter().map(|w| w / largest).enumerate().collect();
        Ok(Shares { root: fork(&parts, seed, &mut 0)? })
    }

    /// The part, and the number of the item in it, counted on through its passes.
    pub fn at(&self, item: u64) -> (usize, u64) {
        let (mut node, mut i) = (&self.root, item);
        loop {
            match node {
                Node::Part(part) => return (*part, i),
                Node::Fork { share, offset, branches } => {
                    let before = |n: u128| ((n * u128::from(*share) + u128::from(*offset)) >> 32) as u64;
                    let first = before(i.into());
                    let is_first = before(u128::from(i) + 1) != first;
                    (node, i) = if is_first { (&branches[0], first) } else { (&branches[1], i - first) };
                }
            }
        }
    }

    /// What tells mixtures of other weights apart, whatever their seeds.
    pub fn weights(&self) -> Vec<u64> {
        fn add(node: &Node, all: &mut Vec<u64>) {
            if let Node::Fork { share, branches, .. } = node {
                all.push((*share).into());
                branches.iter().for_each(|node| add(node, all));
            }
        }
        let mut all = vec![];
        add(&self.root, &mut all);
        all
    }
}

/// Parted where both sides are as even as they can be: the fewer the forks, the closer a part is to its share.
fn fork(parts: &[(usize, f64)], seed: u64, forks: &mut u64) -> Result<Node, String> {
    if let [(part, _)] = parts {
        return Ok(Node::Part(*part));
    }
    let all: f64 = parts.iter().map(|p| p.1).sum();
    let uneven = |cut: usize| (2.0 * parts[..cut].iter().map(|p| p.1).sum::<f64>() - all).abs();
    let cut = (2..parts.len()).fold(1, |best, cut| if uneven(cut) < uneven(best) { cut } else { best });
    let share = parts[..cut].iter().map(|p| p.1).sum::<f64>() / all * (1u64 << 32) as f64;
    let share = share.round();
    if !(1.0..=u32::MAX as f64).contains(&share) {
        return Err("a weight is less than a 2^32th of what it is beside (leave it out, or give it more)".into());
    }
    let offset = (hash(&[seed, DRAWS, *forks]) >> 32) as u32;
    *forks += 1;
    let first = fork(&parts[..cut], seed, forks)?;
    Ok(Node::Fork { share: share as u32, offset, branches: Box::new([first, fork(&parts[cut..], seed, forks)?]) })
}

/// Sources mixed by weight, without end. Of each, every pass goes through all of its items, in another order each time.
pub struct Mixture {
    shares: Shares,
    parts: Vec<(Arc<dyn Source>, Order)>,
}

impl Mixture {
    pub fn new(shares: Shares, parts: Vec<Arc<dyn Source>>, seed: u64) -> Mixture {
        let order = |(i, source): (u64, Arc<dyn Source>)| {
            let order = Order { seed: hash(&[seed, DRAWS, !i]), len: source.len() };
            (source, order)
        };
        Mixture { shares, parts: (0..).zip(parts).map(order).collect() }
    }
}

impl Source for Mixture {
    fn len(&self) -> u64 {
        Generated::ENDLESS
    }

    fn item(&self, i: u64) -> Result<Item, DataError> {
        check_range(i, self.len())?;
        let (part, own) = self.shares.at(i);
        let (source, order) = &self.parts[part];
        source.item(order.at(own))
    }

    /// It is shuffled already.
    fn order(&self, _seed: u64) -> Option<Order> {
        None
    }

    fn counted(&self) -> Option<usize> {
        alike(self.parts.iter().map(|part| &*part.0))
    }

    fn entropy_floor(&self) -> Option<f64> {
        None
    }

    fn is_endless(&self) -> bool {
        true
    }
}

/// What all of them count, where that is the same.
fn alike<'a>(mut sources: impl Iterator<Item = &'a dyn Source>) -> Option<usize> {
    let first = sources.next()?.counted()?;
    sources.all(|source| source.counted() == Some(first)).then_some(first)
}

/// Sources one behind the other; one alone is itself.
pub fn joined(mut parts: Vec<Arc<dyn Source>>) -> Arc<dyn Source> {
    if parts.len() == 1 {
        return parts.swap_remove(0);
    }
    let mut len = 0;
    let begin = |source: Arc<dyn Source>| {
        let first = len;
        len += source.len();
        (first, source)
    };
    let parts = parts.into_iter().map(begin).collect();
    Arc::new(Joined { parts, len })
}

struct Joined {
    /// Each with the number of its first item.
    parts: Vec<(u64, Arc<dyn Source>)>,
    len: u64,
}

impl Source for Joined {
    fn len(&self) -> u64 {
        self.len
    }

    fn item(&self, i: u64) -> Result<Item, DataError> {
        check_range(i, self.len)?;
        let (first, source) = &self.parts[self.parts.partition_point(|part| part.0 <= i) - 1];
        source.item(i - first)
    }

    fn counted(&self) -> Option<usize> {
        alike(self.parts.iter().map(|part| &*part.1))
    }

    fn entropy_floor(&self) -> Option<f64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Item i is [part, i].
    struct Numbers(i32, u64);

    impl Source for Numbers {
        fn len(&self) -> u64 {
            self.1
        }
        fn item(&self, i: u64) -> Result<Item, DataError> {
            check_range(i, self.1)?;
            Ok(Item { ids: vec![self.0, i as i32], targets: vec![-1, 1], ..Item::default() })
        }
        fn counted(&self) -> Option<usize> {
            Some(if self.0 == 9 { 2 } else { 1 })
        }
        fn entropy_floor(&self) -> Option<f64> {
            Some(1.0)
        }
    }

    fn numbers(lens: &[u64]) -> Vec<Arc<dyn Source>> {
        (0..).zip(lens).map(|(part, len)| Arc::new(Numbers(part, *len)) as Arc<dyn Source>).collect()
    }

    const WEIGHTS: &[&[f64]] = &[&[0.9, 0.1], &[1.0, 3.0], &[0.5, 0.3, 0.2], &[1.0; 7], &[1e-6, 1.0], &[90.0, 1.0, 2.0, 30.0, 0.01]];

    #[test]
    fn parts_have_their_share_of_every_beginning_and_count_their_own_items() {
        for weights in WEIGHTS {
            let all: f64 = weights.iter().sum();
            for seed in 0..5 {
                let shares = Shares::new(weights, seed).unwrap();
                let mut counts = vec![0u64; weights.len()];
                // Between two parts there is one fork, and none is ever an item off. Each fork more may add one, of which a part has its share.
                let most = if weights.len() == 2 { 1.0 } else { 2.0 };
                for i in 0..100_000u64 {
                    let (part, own) = shares.at(i);
                    assert_eq!(own, counts[part], "item {i} of {weights:?}");
                    counts[part] += 1;
                    for (count, weight) in counts.iter().zip(*weights) {
                        let exact = (i + 1) as f64 * weight / all;
                        assert!((*count as f64 - exact).abs() <= most + 1e-4, "{count} after {i}, {exact} of {weights:?}");
                    }
                }
            }
        }
    }

    /// Over seeds, each item is of each part as often as its weight says.
    #[test]
    fn shares_are_exact_in_expectation() {
        let weights = [0.5, 0.3, 0.2];
        for item in [0, 1, 17, 1 << 39] {
            let mut counts = [0.0; 3];
            (0..20_000).for_each(|seed| counts[Shares::new(&weights, seed).unwrap().at(item).0] += 1.0);
            for (count, weight) in counts.iter().zip(weights) {
                let deviation = (20_000.0 * weight * (1.0 - weight)).sqrt();
                assert!((count - 20_000.0 * weight).abs() < 4.0 * deviation, "{counts:?} at {item}");
            }
        }
    }

    #[test]
    fn large_numbers_are_exact_and_the_order_is_the_seeds() {
        for weights in WEIGHTS {
            let shares = Shares::new(weights, 3).unwrap();
            // Neighbours of one part count on, however far out they are.
            for from in [1u64 << 40, 1 << 53, u64::MAX - 1000] {
                let mut next = vec![None; weights.len()];
                for i in from..from + 1000 {
                    let (part, own) = shares.at(i);
                    assert!(next[part].is_none_or(|next| next == own), "item {i} of {weights:?}");
                    next[part] = Some(own + 1);
                }
            }
            assert_eq!(shares, Shares::new(weights, 3).unwrap());
        }
        let first = |seed| (0..200).map(|i| Shares::new(&[1.0; 4], seed).unwrap().at(i).0).collect::<Vec<_>>();
        assert_ne!(first(1), first(2));
        // Another seed is another order of the same mixture; larger weights in the same proportions, too.
        let weights = |w: &[f64], seed| Shares::new(w, seed).unwrap().weights();
        assert_eq!(weights(&[9.0, 1.0], 1), weights(&[1.5e308, 1.5e308 / 9.0], 2));
        assert_ne!(weights(&[9.0, 1.0], 1), weights(&[8.0, 1.0], 1));
        assert!(Shares::new(&[1.0, 1e-12], 0).unwrap_err().contains("2^32th"));
    }

    #[test]
    fn every_pass_goes_through_all_items_of_a_part_in_another_order() {
        let lens = [10, 7, 100];
        let mixture = |seed| Mixture::new(Shares::new(&[0.6, 0.3, 0.1], seed).unwrap(), numbers(&lens), seed);
        let read = |seed, range: std::ops::Range<u64>| range.map(|i| mixture(seed).item(i).unwrap().ids).collect::<Vec<_>>();
        let all = read(5, 0..2000);
        for (part, len) in (0..).zip(lens) {
            let own: Vec<i32> = all.iter().filter(|ids| ids[0] == part).map(|ids| ids[1]).collect();
            let passes: Vec<&[i32]> = own.chunks_exact(len as usize).collect();
            assert!(!passes.is_empty());
            for pass in &passes {
                let mut sorted = pass.to_vec();
                sorted.sort();
                assert_eq!(sorted, (0..len as i32).collect::<Vec<_>>());
            }
            passes.windows(2).for_each(|two| assert_ne!(two[0], two[1]));
        }
        assert_eq!(all[1000..], read(5, 1000..2000));
        assert_ne!(all, read(6, 0..2000));
        assert_eq!(mixture(1).order(1), None);
        assert_eq!(mixture(1).counted(), Some(1));
    }

    #[test]
    fn joined_sources_are_one_behind_the_other() {
        let all = joined(numbers(&[3, 1, 2]));
        let ids: Vec<Vec<i32>> = (0..all.len()).map(|i| all.item(i).unwrap().ids).collect();
        assert_eq!(ids, [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [2, 1]]);
        assert!(all.item(6).is_err());
        assert_eq!((all.counted(), all.is_endless(), all.entropy_floor()), (Some(1), false, None));
        assert_eq!(joined(numbers(&[3])).entropy_floor(), Some(1.0), "one is itself");
        let mut other = numbers(&[3]);
        other.push(Arc::new(Numbers(9, 1)));
        assert_eq!(joined(other).counted(), None);
    }
}
