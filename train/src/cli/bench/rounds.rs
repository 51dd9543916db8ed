//! Sides of a comparison, timed in turn.

use super::side::Side;
use super::stats::{Block, Interval, LEAST, ratios};
use crate::cli::progress::Progress;
use crate::report::human_time;
use anyhow::Result;
use engine::philox::philox;
use std::time::Instant;

/// How long the turns go on.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Steps of the baseline that are timed together; one more runs before them. A slower side has fewer, so that its turns are as long.
    pub steps: usize,
    /// All of them are multiples of this (`Task::period`): a part of a period would be another mix of steps.
    pub period: usize,
    /// At most so many rounds.
    pub rounds: usize,
    /// No round begins that would end after this, but for the first three.
    pub until: Option<Instant>,
}

/// In which order `n` sides have their turns, another one in every round.
pub fn order(n: usize, round: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..n).collect();
    all.sort_by_key(|&i| philox([i as u32, round as u32, 0, 0], [0x1ed6e5, 0])[0]);
    all
}

/// Blocks of each copy of the baseline, and of every other side.
#[derive(Default)]
pub struct Turns {
    pub copies: Vec<Vec<Block>>,
    pub others: Vec<Vec<Block>>,
}

impl Turns {
    /// Those of the baseline's copies but one, by time.
    fn baseline(&self, without: Option<usize>) -> Vec<Block> {
        let copies = self.copies.iter().enumerate().filter(|(i, _)| Some(*i) != without);
        let mut all: Vec<Block> = copies.flat_map(|(_, blocks)| blocks).copied().collect();
        all.sort_by(|a, b| a.at.total_cmp(&b.at));
        all
    }

    /// Of each block of a side, how many times as long it took as the baseline did around it.
    pub fn ratios(&self, side: usize) -> Vec<f64> {
        ratios(&self.baseline(None), &self.others[side])
    }

    /// Of each copy of the baseline, the logarithm of how many times as long it takes as the others do.
    pub fn apart(&self) -> Vec<f64> {
        let one = |i: usize| Some(Interval::of_positive(&ratios(&self.baseline(Some(i)), &self.copies[i]))?.median.ln());
        (0..self.copies.len()).filter_map(one).collect()
    }
}

/// Who has a turn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Turn {
    Copy(usize),
    Other(usize),
}

/// The turns of a round: every side has one, and so has every copy of the baseline, spread evenly among them.
pub fn turns(copies: usize, others: usize, round: usize) -> Vec<Turn> {
    let sides = order(others, round);
    let mut all = vec![];
    for (k, copy) in order(copies, round).into_iter().enumerate() {
        all.push(Turn::Copy(copy));
        all.extend(sides[k * others / copies..(k + 1) * others / copies].iter().map(|&side| Turn::Other(side)));
    }
    all
}

/// Steps of a side in whole periods that take as long as `steps` of the baseline, at most as many, by the blocks so far.
fn as_long(steps: usize, period: usize, baseline: &[Block], side: &[Block]) -> usize {
    let least = |blocks: &[Block]| blocks.iter().map(|b| b.ms).fold(f64::INFINITY, f64::min);
    match (least(baseline), least(side)) {
        (baseline, side) if baseline.is_finite() && side.is_finite() => {
            ((steps as f64 * baseline / side / period as f64).round() as usize * period).clamp(period, steps)
        }
        _ => steps,
    }
}

/// Times at least two copies of the baseline and the other sides in turn, and the first copy once more at the end.
pub fn in_turn(copies: &mut [Side], others: &mut [Side], limits: Limits, what: &str, progress: &mut Progress) -> Result<Turns> {
    let clock = Instant::now();
    let mut found = Turns { copies: vec![vec![]; copies.len()], others: vec![vec![]; others.len()] };
    for round in 0..limits.rounds {
        let began = clock.elapsed();
        for turn in turns(copies.len(), others.len(), round) {
            match turn {
                Turn::Copy(i) => found.copies[i].push(copies[i].block(limits.steps, clock)?),
                Turn::Other(i) => {
                    let steps = as_long(limits.steps, limits.period, &found.copies[0], &found.others[i]);
                    found.others[i].push(others[i].block(steps, clock)?);
                }
            }
        }
        let took = clock.elapsed() - began;
        let left = limits.until.map(|until| format!(", {} left", human_time(until.saturating_duration_since(Instant::now()))));
        let of = if limits.rounds < usize::MAX { format!(" of {}", limits.rounds) } else { String::new() };
        progress.say(format!("{what}: round {}{of}{}", round + 1, left.unwrap_or_default()));
        if round + 1 >= LEAST && limits.until.is_some_and(|until| Instant::now() + took > until) {
            break;
        }
    }
    found.copies[0].push(copies[0].block(limits.steps, clock)?);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_baseline_is_never_far() {
        for (copies, others) in [(2, 1), (2, 7), (3, 8), (3, 20), (2, 0)] {
            for round in 0..10 {
                let all = turns(copies, others, round);
                assert_eq!(all.len(), copies + others);
                let places: Vec<usize> = (0..all.len()).filter(|&i| matches!(all[i], Turn::Copy(_))).collect();
                assert!(places.len() == copies && places[0] == 0, "{all:?}");
                let gap = |w: &[usize]| w[1] - w[0] - 1;
                let most = places.windows(2).map(gap).chain([all.len() - 1 - places[copies - 1]]).max();
                assert!(most <= Some(others.div_ceil(copies)), "{all:?}");
                (0..others).for_each(|side| assert_eq!(all.iter().filter(|t| **t == Turn::Other(side)).count(), 1));
            }
        }
    }

    #[test]
    fn a_slow_side_has_turns_as_long_as_the_baselines() {
        let blocks = |ms: &[f64]| ms.iter().map(|&ms| Block { at: 0.0, ms, steps: 1 }).collect::<Vec<_>>();
        assert_eq!(as_long(9, 1, &blocks(&[]), &blocks(&[])), 9, "nothing is known yet");
        assert_eq!(as_long(9, 1, &blocks(&[30.0, 31.0]), &blocks(&[30.5])), 9);
        assert_eq!(as_long(9, 1, &blocks(&[30.0]), &blocks(&[90.0, 300.0])), 3);
        assert_eq!(as_long(9, 1, &blocks(&[30.0]), &blocks(&[3000.0])), 1);
        assert_eq!(as_long(9, 1, &blocks(&[30.0]), &blocks(&[10.0])), 9, "never more");
        assert_eq!(as_long(20, 5, &blocks(&[30.0]), &blocks(&[90.0])), 5, "whole periods");
        assert_eq!(as_long(5, 5, &blocks(&[30.0]), &blocks(&[3000.0])), 5);
    }

    #[test]
    fn everybody_has_a_turn_and_not_always_after_the_same() {
        let rounds: Vec<Vec<usize>> = (0..50).map(|r| order(5, r)).collect();
        for r in &rounds {
            let mut all = r.clone();
            all.sort();
            assert_eq!(all, [0, 1, 2, 3, 4]);
        }
        for side in 0..5 {
            let firsts = rounds.iter().filter(|r| r[0] == side).count();
            assert!((3..=20).contains(&firsts), "side {side} is first in {firsts} of 50 rounds");
        }
    }
}
