//! One side of a comparison: a recipe's step with its programs loaded, what it computes, and how long it takes.

use super::stats::{Block, LEAST};
use crate::optim;
use crate::recipe::{Session, Task, TrainError};
use anyhow::Result;
use engine::{Meta, Role};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub struct Side {
    pub task: Box<dyn Task>,
    pub session: Session,
    /// How long its first step took.
    first: Option<Duration>,
}

/// What a step computes: the loss, or what else the recipe reports first, after one step and after some, from the states of the seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Numbers {
    /// What the recipe calls it.
    pub metric: String,
    /// After one step; none if it is no finite number.
    pub first: Option<f64>,
    pub steps: usize,
    /// After `steps` steps.
    pub last: Option<f64>,
}

/// By parameter: its gradient, clipped and times a constant. Of a parameter that no optimizer has, how the step moved it.
pub type Gradients = BTreeMap<String, Vec<f32>>;

impl Side {
    pub fn new(task: Box<dyn Task>, session: Session) -> Side {
        Side { task, session, first: None }
    }

    /// How long its first step took, which is taken now if it has taken none yet.
    pub fn first(&mut self) -> Result<Duration> {
        if self.first.is_none() {
            self.run(0)?;
        }
        Ok(self.first.unwrap_or_default())
    }

    /// Steps that a pass runs without itself at first.
    pub fn warm_up(&self) -> u64 {
        self.session.programs.values().map(|p| p.warm_up()).max().unwrap_or(0)
    }

    fn run(&mut self, i: u64) -> Result<(), TrainError> {
        let start = Instant::now();
        self.task.bench_step(&mut self.session, i)?;
        if self.first.is_none() {
            self.session.device.synchronize()?;
            self.first = Some(start.elapsed());
        }
        Ok(())
    }

    /// Milliseconds of a step, the mean of each period (`Task::period`), after some steps that do not count. So many steps, or some more until a period
    /// is whole; where it is not said, as `enough` has it.
    pub fn times(&mut self, warm_up: usize, steps: Option<usize>) -> Result<Vec<f64>> {
        self.times_until(warm_up, |done, took| steps.map_or_else(|| enough(done, took), |steps| done.steps >= steps))
    }

    /// The same for at least this long, and for some periods.
    pub fn times_for(&mut self, least: Duration) -> Result<Vec<f64>> {
        self.times_until(0, |done, took| done.times >= LEAST && took >= least)
    }

    fn times_until(&mut self, warm_up: usize, is_over: impl Fn(Done, Duration) -> bool) -> Result<Vec<f64>> {
        let period = self.task.period();
        (0..warm_up as u64).try_for_each(|i| self.run(i))?;
        self.session.device.synchronize()?;
        let (mut times, clock) = (vec![], Instant::now());
        let mut done = warm_up as u64;
        while !is_over(Done { times: times.len(), steps: times.len() * period }, clock.elapsed()) {
            let start = Instant::now();
            (done..done + period as u64).try_for_each(|i| self.run(i))?;
            self.session.device.synchronize()?;
            times.push(start.elapsed().as_secs_f64() * 1e3 / period as f64);
            done += period as u64;
        }
        Ok(times)
    }

    /// Takes the first steps. Where a pass begins only after a warm-up, that is over before, and the states are those of the seed again.
    pub fn numbers(&mut self, steps: usize, gradients: bool) -> Result<(Numbers, Gradients)> {
        let warm_up = self.warm_up();
        if warm_up > 0 {
            let seed = self.states(|name| !engine::passes::keeps(name))?;
            for i in 0..warm_up {
                self.run(i)?;
            }
            for (name, (meta, bytes)) in &seed {
                self.session.store.set(name, meta, bytes)?;
            }
        }
        let before = if gradients { self.untrained()? } else { BTreeMap::new() };
        let (metric, first) = self.step(0)?;
        let found = if gradients { self.gradients(&before)? } else { Gradients::new() };
        let mut last = first;
        for i in 1..steps as u64 {
            match i + 1 == steps as u64 {
                true => last = self.step(i)?.1,
                false => self.run(i)?,
            }
        }
        Ok((Numbers { metric, first, steps, last }, found))
    }

    /// Parameters that no optimizer has.
    fn untrained(&self) -> Result<Gradients> {
        let mut found = Gradients::new();
        for name in self.parameters() {
            if optim::first_moment(&self.session.store, &name)?.is_none() {
                let numbers = self.session.store.get(&name).map(|t| t.f32()).transpose()?;
                found.insert(name, numbers.unwrap_or_default());
            }
        }
        Ok(found)
    }

    /// Of the first step. `before`: what no optimizer has, as it was.
    fn gradients(&self, before: &Gradients) -> Result<Gradients> {
        let store = &self.session.store;
        let mut found = Gradients::new();
        for name in self.parameters() {
            let own = match before.get(&name) {
                Some(before) => {
                    let now = store.get(&name).map(|t| t.f32()).transpose()?.unwrap_or_default();
                    now.iter().zip(before).map(|(a, b)| a - b).collect()
                }
                None => optim::first_moment(store, &name)?.unwrap_or_default(),
            };
            found.insert(name, own);
        }
        Ok(found)
    }

    /// A step, and the first number that it reports.
    fn step(&mut self, i: u64) -> Result<(String, Option<f64>), TrainError> {
        self.run(i)?;
        let (name, value) = self.task.report(&self.session)?.finish()?.values.swap_remove(0);
        Ok((name, Some(value).filter(|v| v.is_finite())))
    }

    /// Names of what the recipe learns.
    fn parameters(&self) -> Vec<String> {
        self.session.store.iter().filter(|(_, t)| t.role == Role::Param).map(|(n, _)| n.to_string()).collect()
    }

    /// States that a step may change.
    fn states(&self, wanted: impl Fn(&str) -> bool) -> Result<BTreeMap<String, (Meta, Vec<u8>)>> {
        let own = self.session.store.iter().filter(|(name, t)| t.role != Role::Frozen && wanted(name));
        own.map(|(name, t)| Ok((name.to_string(), (t.meta.clone(), t.bytes()?.into_owned())))).collect()
    }

    /// Times some steps together, which are whole periods, after one that is not timed. Always the same steps, so that every block has the same work.
    pub fn block(&mut self, steps: usize, clock: Instant) -> Result<Block> {
        let first = self.task.period() as u64;
        self.run(first - 1)?;
        self.session.device.synchronize()?;
        let start = clock.elapsed();
        (first..first + steps as u64).try_for_each(|i| self.run(i))?;
        self.session.device.synchronize()?;
        let (start, end) = (start.as_secs_f64(), clock.elapsed().as_secs_f64());
        Ok(Block { at: (start + end) / 2.0, ms: 1e3 * (end - start) / steps as f64, steps })
    }

    /// How often each pass that can be switched off was applied, over all programs.
    pub fn applied(&self, pass: &str) -> usize {
        self.session.programs.values().flat_map(|q| &q.receipts).filter(|r| r.pass == pass).map(|r| r.applied).sum()
    }
}

/// Whether so many times of so many steps in all say enough: a second of them, because a few milliseconds say nothing about noise, and ten steps.
fn enough(done: Done, took: Duration) -> bool {
    done.times >= LEAST && done.steps >= 10 && took >= Duration::from_secs(1)
}

/// How much has been timed: periods, and steps.
#[derive(Clone, Copy)]
struct Done {
    times: usize,
    steps: usize,
}

/// How far one side's numbers are from another's, relative to the other's. None: not a finite number on one side.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Differences {
    /// Of the loss after one step.
    pub loss: Option<f64>,
    /// Of all gradients of that step, as one vector.
    pub gradient: Option<f64>,
    /// Of the gradient that differs most, and whose it is; nobody's where all are the same.
    pub worst_gradient: Option<f64>,
    pub worst: Option<String>,
    /// Of the loss after some steps.
    pub loss_after: Option<f64>,
}

/// A gradient that is smaller, by its root mean square, than so much of all gradients' is compared with that: one that is zero but for rounding (of
/// a key's bias, say) would differ by 100%.
const SMALL: f64 = 1e-3;

impl Differences {
    pub fn of(ours: (&Numbers, &Gradients), theirs: (&Numbers, &Gradients)) -> Differences {
        let sum = |all: &mut dyn Iterator<Item = f64>| all.map(|v| v * v).sum::<f64>();
        // For each gradient: how far apart, and theirs, both squared. Of a large model that is seconds for each variant, so on all cores.
        let squares: Vec<(&String, usize, f64, f64)> = (theirs.1.par_iter())
            .map(|(name, g)| {
                let own = ours.1.get(name).map_or(&[][..], |v| v);
                let apart = if own.len() == g.len() { sum(&mut own.iter().zip(g).map(|(a, b)| *a as f64 - *b as f64)) } else { f64::NAN };
                (name, g.len(), apart, sum(&mut g.iter().map(|v| *v as f64)))
            })
            .collect();
        let (elements, all) = squares.iter().fold((0, 0.0), |(n, s), (_, elements, _, square)| (n + elements, s + square));
        let (mut total, mut worst) = (0.0, (0.0, None));
        for (name, own, apart, square) in squares {
            let least = SMALL * SMALL * all * own as f64 / elements.max(1) as f64;
            let error = relative(apart.sqrt(), square.max(least).sqrt());
            total += apart;
            // What is no number differs most of all.
            if error.is_none_or(|e| e > worst.0) && worst.0 < f64::INFINITY {
                worst = (error.unwrap_or(f64::INFINITY), Some(name.clone()));
            }
        }
        let of_loss = |a: Option<f64>, b: Option<f64>| relative((a? - b?).abs(), b?.abs());
        Differences {
            loss: of_loss(ours.0.first, theirs.0.first),
            gradient: if theirs.1.is_empty() { None } else { relative(total.sqrt(), all.sqrt()) },
            worst_gradient: Some(worst.0).filter(|e| e.is_finite() && !theirs.1.is_empty()),
            worst: worst.1,
            loss_after: of_loss(ours.0.last, theirs.0.last),
        }
    }
}

/// None if it is no finite number.
pub fn relative(apart: f64, size: f64) -> Option<f64> {
    let error = if apart == 0.0 { 0.0 } else { apart / size };
    Some(error).filter(|e| e.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(first: f64, last: f64) -> Numbers {
        Numbers { metric: "loss".into(), first: Some(first), steps: 5, last: Some(last) }
    }

    fn gradients(all: &[(&str, &[f32])]) -> Gradients {
        all.iter().map(|(n, g)| (n.to_string(), g.to_vec())).collect()
    }

    #[test]
    fn the_gradient_that_differs_most_is_named() {
        let theirs = gradients(&[("a", &[3.0, 4.0]), ("b", &[1.0, 0.0]), ("zero", &[0.0, 0.0])]);
        let ours = gradients(&[("a", &[3.0, 4.5]), ("b", &[1.0, 0.2]), ("zero", &[0.0, 1e-5])]);
        let d = Differences::of((&numbers(2.0, 1.0), &ours), (&numbers(2.5, 1.0), &theirs));
        assert!((d.loss.unwrap() - 0.2).abs() < 1e-9 && d.loss_after == Some(0.0), "{d:?}");
        assert_eq!(d.worst.as_deref(), Some("b"));
        assert!((d.worst_gradient.unwrap() - 0.2).abs() < 1e-6, "{d:?}");
        let all = (0.25f64 + 0.04 + 1e-10).sqrt() / 26f64.sqrt();
        assert!((d.gradient.unwrap() - all).abs() < 1e-6, "{d:?}");
    }

    #[test]
    fn what_is_no_number_differs_most() {
        let theirs = gradients(&[("a", &[3.0, 4.0]), ("b", &[1.0, 0.0])]);
        let ours = gradients(&[("a", &[3.0, f32::NAN]), ("b", &[9.0, 0.0])]);
        let d = Differences::of((&Numbers { first: None, ..numbers(1.0, 1.0) }, &ours), (&numbers(1.0, 1.0), &theirs));
        assert_eq!((d.loss, d.gradient, d.worst_gradient, d.worst.as_deref()), (None, None, None, Some("a")));
        let same = Differences::of((&numbers(1.0, 1.0), &theirs), (&numbers(1.0, 1.0), &theirs));
        assert_eq!((same.loss, same.gradient, same.worst_gradient, same.worst), (Some(0.0), Some(0.0), Some(0.0), None));
        // Another set of parameters is not the same gradient.
        let fewer = Differences::of((&numbers(1.0, 1.0), &gradients(&[("a", &[3.0, 4.0])])), (&numbers(1.0, 1.0), &theirs));
        assert_eq!((fewer.worst_gradient, fewer.worst.as_deref()), (None, Some("b")));
    }
}
