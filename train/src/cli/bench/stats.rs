//! What times say: medians with intervals, ratios of times that were taken in turn, and whether a difference is more than noise.

use serde::{Deserialize, Serialize};

/// A median, and an interval that holds the true one in at least 99 of 100 cases.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// Fewer samples say nothing about their own noise.
pub const LEAST: usize = 3;

/// Student's t for 99% with 1 to 6 degrees of freedom.
const STUDENT: [f64; 6] = [63.657, 9.925, 5.841, 4.604, 4.032, 3.707];

/// Of at least one number.
pub fn median(samples: &[f64]) -> f64 {
    let mut x = samples.to_vec();
    x.sort_by(f64::total_cmp);
    (x[(x.len() - 1) / 2] + x[x.len() / 2]) / 2.0
}

impl Interval {
    /// Of at least three samples. From eight on, by order statistics, which assume no distribution; with fewer, whose extremes do not reach 99%, by
    /// Student's t. From twelve on, one outlier moves nothing.
    pub fn of(samples: &[f64]) -> Option<Interval> {
        let mut x = samples.to_vec();
        x.sort_by(f64::total_cmp);
        let n = x.len();
        if n < LEAST {
            return None;
        }
        let median = median(&x);
        if let Some(rank) = rank(n) {
            return Some(Interval { median, low: x[rank], high: x[n - 1 - rank] });
        }
        let mean = x.iter().sum::<f64>() / n as f64;
        let variance = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / (n - 1) as f64;
        let reach = STUDENT[n - 2] * (variance / n as f64).sqrt();
        Some(Interval { median, low: (mean - reach).min(median), high: (mean + reach).max(median) })
    }

    /// Of times or ratios, which are more than zero: by their logarithms, so that the interval is, too.
    pub fn of_positive(ratios: &[f64]) -> Option<Interval> {
        Interval::of_ratios(ratios, 0.0)
    }

    /// The same of what may be off by a factor, too, which is the same for all samples, and so is not seen in them: `loads` is the logarithm of how far.
    pub fn of_ratios(ratios: &[f64], loads: f64) -> Option<Interval> {
        let Interval { median, low, high } = Interval::of(&ratios.iter().map(|r| r.ln()).collect::<Vec<_>>())?;
        // Independent errors add as squares.
        let wider = Interval { median, low: median - (median - low).hypot(loads), high: median + (high - median).hypot(loads) };
        Some(wider.map(f64::exp))
    }

    /// Of a quantity that rises or falls with this one.
    pub fn map(self, f: impl Fn(f64) -> f64) -> Interval {
        let (a, b) = (f(self.low), f(self.high));
        Interval { median: f(self.median), low: a.min(b), high: a.max(b) }
    }

    pub fn holds(&self, value: f64) -> bool {
        self.low <= value && value <= self.high
    }

    /// An interval that somebody wrote: in order, and of numbers.
    pub fn is_sound(&self) -> bool {
        self.low <= self.median && self.median <= self.high && self.low.is_finite() && self.high.is_finite()
    }
}

/// How far a ratio of two programs' times may be off, as a logarithm, because each program was loaded once: where its memory lies and which kernels
/// were chosen stays the same for all its rounds. By at least two copies of one program: `apart` has, of each, the logarithm of how many times as long
/// it takes as the others. Student's t, because they are few.
pub fn loads(apart: &[f64]) -> f64 {
    let copies = apart.len() as f64;
    // From the mean of all, a copy is (copies - 1) / copies as far as from that of the others.
    let variance = apart.iter().map(|d| d * d).sum::<f64>() * (copies - 1.0) / (copies * copies);
    // One load of a program is compared with the mean of the copies.
    STUDENT[(apart.len() - 2).min(STUDENT.len() - 1)] * (variance * (1.0 + 1.0 / copies)).sqrt()
}

/// The largest rank r such that the median lies between the r-th smallest and the r-th largest of n samples (counted from 0) in 99% of cases: each
/// sample is below the median with probability 1/2, so how many are is binomial. None if not even the extremes hold it so often.
fn rank(n: usize) -> Option<usize> {
    if n > 100 {
        // The binomial distribution is a normal one here.
        return Some((0.5 * n as f64 - 1.288 * (n as f64).sqrt()) as usize - 1);
    }
    // Probabilities that exactly r, and that at most r samples are below it, or above.
    let (mut exactly, mut outside, mut found) = (0.5f64.powi(n as i32), 0.0, None);
    for r in 0..n / 2 {
        outside += 2.0 * exactly;
        if outside > 0.01 {
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
    pub steps: usize,
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
    /// A gain counts where its interval leaves out zero.
    pub fn of(gain: &Interval) -> Verdict {
        match gain.median {
            _ if gain.holds(0.0) => Verdict::WithinNoise,
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

    /// Copies of a baseline and other sides, timed in turn on a machine whose speed drifts.
    #[derive(Clone)]
    struct Machine {
        copies: usize,
        baseline: f64,
        /// What a step takes of each.
        others: Vec<f64>,
        /// Relative standard deviation of a block, and of what is the same for all blocks of a copy or side, because it is loaded once.
        noise: f64,
        loads: f64,
        /// How much slower the machine is at the end than at the beginning.
        drift: f64,
        rounds: usize,
        seed: u64,
    }

    impl Machine {
        fn run(&self) -> Turns {
            let sides = self.copies + self.others.len();
            let blocks = sides * self.rounds;
            let (mut normal, mut load) = (vec![0.0; blocks + 1], vec![0.0; sides]);
            fill_normal(self.seed, 7, &mut normal);
            fill_normal(self.seed, 8, &mut load);
            let loaded = |i: usize| 1.0 + self.loads * load[i] as f64;
            let mut found = Turns { copies: vec![vec![]; self.copies], others: vec![vec![]; self.others.len()] };
            let order = (0..self.rounds).flat_map(|round| turns(self.copies, self.others.len(), round)).chain([Turn::Copy(0)]);
            for (i, turn) in order.enumerate() {
                let slower = (1.0 + self.drift * i as f64 / blocks as f64) * (1.0 + self.noise * normal[i] as f64);
                let (ms, to) = match turn {
                    Turn::Copy(i) => (self.baseline * loaded(i), &mut found.copies[i]),
                    Turn::Other(i) => (self.others[i] * loaded(self.copies + i), &mut found.others[i]),
                };
                to.push(Block { at: i as f64, ms: ms * slower, steps: 1 });
            }
            found
        }
    }

    /// What is gained if a side is the step without a pass.
    fn gain(found: &Turns, side: usize) -> Interval {
        Interval::of_ratios(&found.ratios(side), loads(&found.apart())).unwrap().map(|r| r - 1.0)
    }

    fn verdict(found: &Turns, side: usize) -> Verdict {
        Verdict::of(&gain(found, side))
    }

    const MACHINE: Machine =
        Machine { copies: 4, baseline: 10.0, others: vec![], noise: 0.01, loads: 0.0, drift: 0.1, rounds: 12, seed: 3 };

    #[test]
    fn ranks_hold_the_median_in_99_percent() {
        // From tables of the sign test.
        let known = [
            (3, None),
            (7, None),
            (8, Some(0)),
            (11, Some(0)),
            (12, Some(1)),
            (14, Some(1)),
            (15, Some(2)),
            (20, Some(3)),
            (25, Some(5)),
            (100, Some(36)),
            (101, Some(36)),
        ];
        known.into_iter().for_each(|(n, r)| assert_eq!(rank(n), r, "of {n}"));
        let x = [5.0, 1.0, 2.0, 12.0, 9.0, 3.0, 11.0, 4.0, 6.0, 7.0, 10.0, 8.0];
        assert_eq!(Interval::of(&x), Some(Interval { median: 6.5, low: 2.0, high: 11.0 }));
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
        for rounds in [3, 5, 12, 15] {
            let held = (0..400).filter(|&seed| {
                let m = Machine { others: vec![11.0, 10.0], rounds, seed, ..MACHINE };
                gain(&m.run(), 0).holds(0.1)
            });
            let share = held.count() as f64 / 400.0;
            assert!(share > 0.975, "{rounds} rounds: the gain is in the interval in {:.0}% of cases", 100.0 * share);
        }
    }

    #[test]
    fn a_planted_gain_is_found() {
        let found = (0..100).filter(|&seed| {
            let found = Machine { others: vec![10.3, 9.7], noise: 0.005, drift: 0.2, seed, ..MACHINE }.run();
            [0, 1].map(|side| verdict(&found, side)) == [Verdict::Faster, Verdict::Slower]
        });
        let found = found.count();
        assert!(found >= 95, "3% beside noise of 0.5% were found in {found} of 100");
    }

    #[test]
    fn pure_noise_is_within_noise() {
        for noise in [0.002, 0.05] {
            let wrong = |seed: u64| {
                let found = Machine { others: vec![10.0; 10], noise, drift: 0.2, seed, ..MACHINE }.run();
                (0..10).filter(|&side| verdict(&found, side) != Verdict::WithinNoise).count()
            };
            let wrong: usize = (0..100).map(wrong).sum();
            assert!(wrong <= 10, "noise of {noise}: {wrong} of 1000 differences of nothing were called real");
        }
    }

    /// Taken one after the other, as if each side had its turn once, the drift would be a gain of its own.
    #[test]
    fn drift_cancels_in_turns_and_not_one_after_the_other() {
        let found = Machine { others: vec![10.0; 4], noise: 0.001, drift: 0.3, rounds: 12, seed: 1, ..MACHINE }.run();
        for side in 0..4 {
            let g = gain(&found, side);
            assert!(g.holds(0.0) && g.low > -0.01 && g.high < 0.01, "{side}: {g:?}");
        }
        // The same clock, but a side at a time: its median against the baseline's.
        let mut all: Vec<Block> = [found.copies.concat(), found.others.concat()].concat();
        all.sort_by(|a, b| a.at.total_cmp(&b.at));
        let median = |part: &[Block]| Interval::of(&part.iter().map(|b| b.ms).collect::<Vec<_>>()).unwrap().median;
        let naive = median(&all[84..96]) / median(&all[..12]) - 1.0;
        assert!(naive > 0.15, "without turns, drift is taken for a gain of {naive}");
    }

    #[test]
    fn two_ledgers_of_one_machine_agree() {
        for loads in [0.0, 0.01] {
            let apart = (0..200u64).filter(|&seed| {
                let one = |seed| gain(&Machine { others: vec![10.4], loads, seed, ..MACHINE }.run(), 0);
                let (a, b) = (one(seed), one(seed + 1_000_000));
                a.low > b.high || b.low > a.high
            });
            assert!(apart.count() <= 4, "loads differ by {loads}");
        }
    }

    #[test]
    fn an_outlier_moves_nothing() {
        let mut found = Machine { others: vec![10.5], noise: 0.001, drift: 0.0, ..MACHINE }.run();
        let before = gain(&found, 0);
        found.others[0][4].ms *= 3.0;
        let after = gain(&found, 0);
        assert!((before.median - after.median).abs() < 0.002 && after.high < 0.06, "{before:?} {after:?}");
    }

    /// Where each load has a time of its own, passes that gain nothing are called real in 1% of cases at most, however many rounds there are; and one that
    /// gains much more than loads differ by is still found.
    #[test]
    fn what_differs_between_loads_is_in_the_interval() {
        for (copies, loads, rounds) in [(3, 0.005, 12), (4, 0.005, 3), (4, 0.005, 12), (6, 0.01, 12), (6, 0.01, 40)] {
            let (mut wrong, mut missed) = (0, 0);
            for seed in 0..1000 {
                let found = Machine { copies, others: vec![10.0, 10.0, 10.0, 20.0], noise: 0.002, loads, rounds, seed, ..MACHINE }.run();
                wrong += (0..3).filter(|&side| verdict(&found, side) != Verdict::WithinNoise).count();
                missed += usize::from(verdict(&found, 3) != Verdict::Faster);
            }
            let which = format!("{copies} copies, loads of {loads}, {rounds} rounds");
            // 1%, and half a percent for chance: 3000 of them are not independent.
            assert!(wrong <= 45, "{which}: {wrong} of 3000 differences of nothing were called real");
            assert!(missed <= 8, "{which}: a factor of 2 was missed in {missed} of 1000");
        }
    }

    /// A second copy that is slower for a reason of its own (where its memory lies, say) makes everything as large as that noise.
    #[test]
    fn what_differs_between_two_copies_is_noise() {
        let mut found = Machine { others: vec![10.2], noise: 0.001, drift: 0.0, ..MACHINE }.run();
        assert_eq!(verdict(&found, 0), Verdict::Faster);
        found.copies[1].iter_mut().for_each(|b| b.ms *= 1.03);
        assert_eq!(verdict(&found, 0), Verdict::WithinNoise);
    }
}
