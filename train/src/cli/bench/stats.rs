//! What times say: medians with intervals, ratios of times that were taken in turn, and whether a difference is more than noise.

use serde::{Deserialize, Serialize};

/// A median, and an interval that holds the true one in at least 95 of 100 cases.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// Fewer samples say nothing about their own noise.
pub const LEAST: usize = 3;

/// Student's t for 95% with 2, 3 and 4 degrees of freedom.
const STUDENT: [f64; 3] = [4.303, 3.182, 2.776];

impl Interval {
    /// Of at least three samples. From six on, by order statistics, which assume no distribution and are not moved by an outlier; with fewer, whose
    /// extremes do not reach 95%, by Student's t.
    pub fn of(samples: &[f64]) -> Option<Interval> {
        let mut x = samples.to_vec();
        x.sort_by(f64::total_cmp);
        let n = x.len();
        if n < LEAST {
            return None;
        }
        let median = (x[(n - 1) / 2] + x[n / 2]) / 2.0;
        if let Some(rank) = rank(n) {
            return Some(Interval { median, low: x[rank], high: x[n - 1 - rank] });
        }
        let mean = x.iter().sum::<f64>() / n as f64;
        let variance = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / (n - 1) as f64;
        let reach = STUDENT[n - LEAST] * (variance / n as f64).sqrt();
        Some(Interval { median, low: (mean - reach).min(median), high: (mean + reach).max(median) })
    }

    /// Of times or ratios, which are more than zero: by their logarithms, so that the interval is, too.
    pub fn of_positive(ratios: &[f64]) -> Option<Interval> {
        Some(Interval::of(&ratios.iter().map(|r| r.ln()).collect::<Vec<_>>())?.map(f64::exp))
    }

    /// Of a quantity that rises or falls with this one.
    pub fn map(self, f: impl Fn(f64) -> f64) -> Interval {
        let (a, b) = (f(self.low), f(self.high));
        Interval { median: f(self.median), low: a.min(b), high: a.max(b) }
    }

    pub fn holds(&self, value: f64) -> bool {
        self.low <= value && value <= self.high
    }

    /// The farthest that it reaches from a value, to either side.
    pub fn reach(&self, from: f64) -> f64 {
        (self.low - from).abs().max((self.high - from).abs())
    }
}

/// The largest rank r such that the median lies between the r-th smallest and the r-th largest of n samples (counted from 0) in 95% of cases: each
/// sample is below the median with probability 1/2, so how many are is binomial. None if not even the extremes hold it so often.
fn rank(n: usize) -> Option<usize> {
    if n > 100 {
        // The binomial distribution is a normal one here.
        return Some((0.5 * n as f64 - 0.98 * (n as f64).sqrt()) as usize - 1);
    }
    // Probabilities that exactly r, and that at most r samples are below it, or above.
    let (mut exactly, mut outside, mut found) = (0.5f64.powi(n as i32), 0.0, None);
    for r in 0..n / 2 {
        outside += 2.0 * exactly;
        if outside > 0.05 {
            break;
        }
        found = Some(r);
        exactly *= (n - r) as f64 / (r + 1) as f64;
    }
    found
}

/// Some steps in a row, timed together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block {
    /// When half of it had run, in seconds.
    pub at: f64,
    /// Milliseconds of one step.
    pub ms: f64,
}

/// What a baseline takes at a moment: on a straight line between its blocks before and after.
fn between(baseline: &[Block], at: f64) -> f64 {
    let next = baseline.partition_point(|b| b.at <= at).clamp(1, baseline.len() - 1);
    let (a, b) = (baseline[next - 1], baseline[next]);
    a.ms + (b.ms - a.ms) * ((at - a.at) / (b.at - a.at)).clamp(0.0, 1.0)
}

/// Of each block, how many times as long it took as the baseline did around it. What slows both down, and drifts slowly, cancels. The baseline has at
/// least two blocks.
pub fn ratios(baseline: &[Block], other: &[Block]) -> Vec<f64> {
    other.iter().map(|o| o.ms / between(baseline, o.at)).collect()
}

/// What a measured gain is worth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    Faster,
    Slower,
    WithinNoise,
}

impl Verdict {
    /// A gain counts where its interval leaves out zero, and where it is more than the same program differs from itself, loaded twice (`noise`).
    pub fn of(gain: &Interval, noise: f64) -> Verdict {
        match gain.median {
            _ if gain.holds(0.0) => Verdict::WithinNoise,
            m if m.abs() <= noise => Verdict::WithinNoise,
            m if m > 0.0 => Verdict::Faster,
            _ => Verdict::Slower,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bench::rounds::{Turn, Turns, turns};
    use engine::philox::fill_normal;

    /// Two copies of a baseline and other sides, timed in turn on a machine whose speed drifts.
    struct Machine {
        baseline: f64,
        /// What a step takes of each.
        others: Vec<f64>,
        /// Relative standard deviation of a block.
        noise: f64,
        /// How much slower the machine is at the end than at the beginning.
        drift: f64,
        rounds: usize,
        seed: u64,
    }

    impl Machine {
        fn run(&self) -> Turns {
            let blocks = (2 + self.others.len()) * self.rounds;
            let mut normal = vec![0.0; blocks + 1];
            fill_normal(self.seed, 7, &mut normal);
            let mut found = Turns { copies: vec![vec![]; 2], others: vec![vec![]; self.others.len()] };
            let order = (0..self.rounds).flat_map(|round| turns(2, self.others.len(), round)).chain([Turn::Copy(0)]);
            for (i, turn) in order.enumerate() {
                let slower = (1.0 + self.drift * i as f64 / blocks as f64) * (1.0 + self.noise * normal[i] as f64);
                let (ms, to) = match turn {
                    Turn::Copy(i) => (self.baseline, &mut found.copies[i]),
                    Turn::Other(i) => (self.others[i], &mut found.others[i]),
                };
                to.push(Block { at: i as f64, ms: ms * slower });
            }
            found
        }
    }

    /// What is gained if a side is the step without a pass.
    fn gain(found: &Turns, side: usize) -> Interval {
        Interval::of_positive(&found.ratios(side)).unwrap().map(|r| r - 1.0)
    }

    fn verdict(found: &Turns, side: usize) -> Verdict {
        Verdict::of(&gain(found, side), found.same().unwrap().reach(0.0))
    }

    #[test]
    fn ranks_hold_the_median_in_95_percent() {
        // From tables of the sign test.
        let known = [
            (3, None),
            (5, None),
            (6, Some(0)),
            (8, Some(0)),
            (9, Some(1)),
            (11, Some(1)),
            (12, Some(2)),
            (20, Some(5)),
            (25, Some(7)),
            (100, Some(39)),
            (101, Some(39)),
        ];
        known.into_iter().for_each(|(n, r)| assert_eq!(rank(n), r, "of {n}"));
        let x = [5.0, 1.0, 2.0, 9.0, 3.0, 4.0, 6.0, 7.0, 8.0];
        assert_eq!(Interval::of(&x), Some(Interval { median: 5.0, low: 2.0, high: 8.0 }));
        let small = Interval::of(&[1.0, 1.2, 1.1]).unwrap();
        assert!(small.low < 0.9 && small.high > 1.3 && (small.median - 1.1).abs() < 1e-12, "three samples say little: {small:?}");
        assert_eq!(Interval::of(&[1.0, 2.0]), None);
        assert!(Interval::of_positive(&[0.2, 1.0, 9.0]).unwrap().low > 0.0, "nothing takes less than no time");
        // Many samples neither overflow nor vanish.
        let many = Interval::of(&(0..5000).map(f64::from).collect::<Vec<_>>()).unwrap();
        assert!(many.low < many.median && many.high > many.median, "{many:?}");
    }

    #[test]
    fn an_interval_holds_the_truth_as_often_as_it_says() {
        for rounds in [3, 5, 9, 15] {
            let held = (0..400).filter(|&seed| {
                let m = Machine { baseline: 10.0, others: vec![11.0, 10.0], noise: 0.01, drift: 0.1, rounds, seed };
                gain(&m.run(), 0).holds(0.1)
            });
            let share = held.count() as f64 / 400.0;
            assert!(share > 0.92, "{rounds} rounds: the gain is in the interval in {:.0}% of cases", 100.0 * share);
        }
    }

    #[test]
    fn a_planted_gain_is_found() {
        let found = (0..100).filter(|&seed| {
            let found = Machine { baseline: 10.0, others: vec![10.3, 9.7], noise: 0.005, drift: 0.2, rounds: 9, seed }.run();
            [0, 1].map(|side| verdict(&found, side)) == [Verdict::Faster, Verdict::Slower]
        });
        let found = found.count();
        assert!(found >= 95, "3% beside noise of 0.5% were found in {found} of 100");
    }

    #[test]
    fn pure_noise_is_within_noise() {
        for noise in [0.002, 0.05] {
            let wrong = |seed: u64| {
                let found = Machine { baseline: 10.0, others: vec![10.0; 10], noise, drift: 0.2, rounds: 9, seed }.run();
                (0..10).filter(|&side| verdict(&found, side) != Verdict::WithinNoise).count()
            };
            let wrong: usize = (0..100).map(wrong).sum();
            assert!(wrong <= 20, "noise of {noise}: {wrong} of 1000 differences of nothing were called real");
        }
    }

    /// Taken one after the other, as if each side had its turn once, the drift would be a gain of its own.
    #[test]
    fn drift_cancels_in_turns_and_not_one_after_the_other() {
        let found = Machine { baseline: 10.0, others: vec![10.0; 4], noise: 0.001, drift: 0.3, rounds: 12, seed: 1 }.run();
        for side in 0..4 {
            let g = gain(&found, side);
            assert!(g.holds(0.0) && g.reach(0.0) < 0.003, "{side}: {g:?}");
        }
        // The same clock, but a side at a time: its median against the baseline's.
        let mut all: Vec<Block> = [found.copies.concat(), found.others.concat()].concat();
        all.sort_by(|a, b| a.at.total_cmp(&b.at));
        let median = |part: &[Block]| Interval::of(&part.iter().map(|b| b.ms).collect::<Vec<_>>()).unwrap().median;
        let naive = median(&all[60..72]) / median(&all[..12]) - 1.0;
        assert!(naive > 0.15, "without turns, drift is taken for a gain of {naive}");
    }

    #[test]
    fn two_ledgers_of_one_machine_agree() {
        let apart = (0..200u64).filter(|&seed| {
            let one = |seed| gain(&Machine { baseline: 10.0, others: vec![10.4], noise: 0.01, drift: 0.1, rounds: 9, seed }.run(), 0);
            let (a, b) = (one(seed), one(seed + 1_000_000));
            a.low > b.high || b.low > a.high
        });
        assert!(apart.count() <= 4);
    }

    #[test]
    fn an_outlier_moves_nothing() {
        let mut found = Machine { baseline: 10.0, others: vec![10.5], noise: 0.001, drift: 0.0, rounds: 9, seed: 3 }.run();
        let before = gain(&found, 0);
        found.others[0][4].ms *= 3.0;
        let after = gain(&found, 0);
        assert!((before.median - after.median).abs() < 0.002 && after.high < 0.06, "{before:?} {after:?}");
    }

    /// A second copy that is slower for a reason of its own (where its memory lies, say) makes everything as large as that noise.
    #[test]
    fn what_differs_between_two_copies_is_noise() {
        let mut found = Machine { baseline: 10.0, others: vec![10.2], noise: 0.001, drift: 0.0, rounds: 9, seed: 3 }.run();
        assert_eq!(verdict(&found, 0), Verdict::Faster);
        found.copies[1].iter_mut().for_each(|b| b.ms *= 1.03);
        assert_eq!(verdict(&found, 0), Verdict::WithinNoise);
    }
}
