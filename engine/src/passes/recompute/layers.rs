//! Which of the model's blocks are meant: `all`, `3`, `0-5,12-17`.

use crate::graph::Graph;
use std::ops::RangeInclusive;

/// Blocks, numbered from 0 in the order in which they are recorded.
#[derive(Debug)]
pub enum Layers {
    All,
    Of(Vec<RangeInclusive<usize>>),
}

impl Layers {
    pub const NONE: Layers = Layers::Of(vec![]);

    /// None if the text does not name blocks.
    pub fn parse(text: &str) -> Option<Layers> {
        if text == "all" {
            return Some(Layers::All);
        }
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            // Other than `parse`, digits alone: no sign.
            let number = |n: &str| n.bytes().all(|b| b.is_ascii_digit()).then(|| n.parse::<usize>().ok())?;
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some(first..=last)
        };
        text.split(',').map(|part| range(part.trim())).collect::<Option<_>>().map(Layers::Of)
    }

    /// Whether this block, in the numbers of a graph's nodes (0: outside of all blocks), is among them.
    pub fn has(&self, block: u32) -> bool {
        match self {
            Layers::All => block != 0,
            Layers::Of(ranges) => block != 0 && ranges.iter().any(|r| r.contains(&(block as usize - 1))),
        }
    }

    /// What is wrong with it for a graph with so many blocks.
    pub fn problem(&self, g: &Graph) -> Option<String> {
        let Layers::Of(ranges) = self else { return None };
        let (last, blocks) = (ranges.iter().map(|r| *r.end()).max()?, g.blocks());
        let there = match blocks {
            0 => "the model has no blocks".to_string(),
            1 => "the model has 1 block, with the number 0".to_string(),
            n => format!("the model has {n} blocks, 0-{}", n - 1),
        };
        (last >= blocks).then(|| format!("layers names block {last}, but {there}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_named_by_numbers_and_ranges() {
        let named = |text: &str| -> Vec<u32> { (0..9).filter(|b| Layers::parse(text).unwrap().has(*b)).collect() };
        assert_eq!(named("all"), (1..9).collect::<Vec<_>>());
        assert_eq!(named("0"), [1]);
        assert_eq!(named("0-1,4, 6-6"), [1, 2, 5, 7]);
        for bad in ["", "none", "1-", "-1", "3-1", "1,,2", "+1", "1.5", "0-1,", "99999999999999999999"] {
            assert!(Layers::parse(bad).is_none(), "{bad}");
        }
    }
}
