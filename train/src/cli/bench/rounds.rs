//! Sides of a comparison, timed in turn.

use super::side::Side;
use super::stats::{Block, LEAST};
use crate::cli::progress::Progress;
use crate::report::human_time;
use anyhow::Result;
use engine::philox::philox;
use std::time::Instant;

/// How long the turns go on.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Steps that are timed together; one more runs before them.
    pub steps: usize,
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

/// Blocks of the baseline, and of every other side.
pub type Turns = (Vec<Block>, Vec<Vec<Block>>);

/// Blocks of the baseline and of every other side. Each round has a block of the baseline, then one of every side; the baseline has one more at the end.
pub fn in_turn(baseline: &mut Side, others: &mut [Side], limits: Limits, what: &str, progress: &mut Progress) -> Result<Turns> {
    let clock = Instant::now();
    let (mut base, mut blocks) = (vec![], vec![vec![]; others.len()]);
    for round in 0..limits.rounds {
        let began = clock.elapsed();
        base.push(baseline.block(limits.steps, clock)?);
        for side in order(others.len(), round) {
            blocks[side].push(others[side].block(limits.steps, clock)?);
        }
        let took = clock.elapsed() - began;
        let over = limits.until.is_some_and(|until| Instant::now() + took > until);
        let left = limits.until.map(|until| format!(", {} left", human_time(until.saturating_duration_since(Instant::now()))));
        let of = if limits.rounds < usize::MAX { format!(" of {}", limits.rounds) } else { String::new() };
        progress.say(format!("{what}: round {}{of}{}", round + 1, left.unwrap_or_default()));
        if over && round + 1 >= LEAST {
            break;
        }
    }
    base.push(baseline.block(limits.steps, clock)?);
    Ok((base, blocks))
}

#[cfg(test)]
mod tests {
    use super::*;

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
