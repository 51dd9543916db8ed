//! `kiln check defaults`: whether a pass that is on by default costs time. The step is timed with and without it in turn: by the CPU time of this process,
//! which a busy machine hardly changes, or on a GPU by the GPU's clock.

use super::ledger::{arena, resize_arena};
use super::stats::{Interval, LEAST};
use crate::cli::budget::{Where, fit_device};
use crate::cli::{DeviceArgs, Recipes};
use crate::config::Config;
use crate::memory;
use crate::recipe::{self, Recipe, Session, Task, begin, find_in};
use crate::run;
use anyhow::{Result, bail};
use clap::Args;
use engine::cuda::Moment;
use engine::passes::{Mode, Switch};
use engine::{Device, Switches};
use rustix::time::{ClockId, clock_gettime};
use std::process::ExitCode;

#[derive(Args)]
pub struct DefaultsArgs {
    /// One recipe; all of them if none is named
    recipe: Option<String>,
    /// One of its presets. If none is named, on a CPU the smallest; on a GPU all others
    #[arg(long, requires = "recipe")]
    preset: Option<String>,
    /// Passes, with commas between them; all that are on by default if none is named
    #[arg(long, value_name = "PASSES", value_delimiter = ',')]
    only: Vec<String>,
    /// Sets a key of the config, such as train.batch=4 (repeatable)
    #[arg(long, value_name = "KEY=VALUE", requires = "recipe")]
    set: Vec<String>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// What a pass may cost.
#[derive(Clone, Copy)]
struct Limit {
    cost: f64,
    /// Added to the cost for what is only noise: the whole interval of the ratio must be beyond this.
    beyond: f64,
    /// Seconds that steps are timed together, at least.
    block: f64,
}

/// Emulated arithmetic on a CPU differs more than a GPU's, and its sizes are toys': what is found there is a slow kernel, not a percent.
const CPU: Limit = Limit { cost: 0.10, beyond: 0.0, block: 0.02 };
const GPU: Limit = Limit { cost: 0.02, beyond: 0.02, block: 0.1 };

impl Limit {
    fn of(device: &Device) -> Limit {
        if device.gpu().is_some() { GPU } else { CPU }
    }

    fn is_exceeded(&self, ratio: &Interval) -> bool {
        ratio.median > 1.0 + self.cost && ratio.low > 1.0 + self.beyond
    }
}

/// Rounds where the first ones do not look like a cost; and where they do.
const FEW: usize = LEAST;
const MANY: usize = 15;

/// How many times as long the first of two takes as the second, which have their turns in alternating order: few where that is clear.
fn ratio(limit: Limit, mut time: impl FnMut(usize) -> Result<f64>) -> Result<Interval> {
    let (mut ratios, mut found) = (vec![], None);
    while ratios.len() < MANY {
        let mut seconds = [0.0; 2];
        for side in if ratios.len() % 2 == 0 { [0, 1] } else { [1, 0] } {
            seconds[side] = time(side)?;
        }
        ratios.push(seconds[0] / seconds[1]);
        found = Interval::of_positive(&ratios);
        if ratios.len() >= FEW && found.is_some_and(|f| f.median < 1.0 + limit.cost / 2.0) {
            break;
        }
    }
    match found {
        Some(found) => Ok(found),
        None => bail!("the step was not timed"),
    }
}

pub fn defaults(a: DefaultsArgs, recipes: Recipes) -> Result<ExitCode> {
    let recipes = match &a.recipe {
        Some(name) => vec![find_in(recipes, name)?],
        None => recipes.to_vec(),
    };
    a.only.iter().try_for_each(|name| Switches::default().set(name, "auto"))?;
    let device = a.device.open()?;
    let mut failed = vec![];
    out!("on {}: what a step takes with each pass, against without it", device.describe());
    for recipe in recipes {
        for preset in presets(recipe, a.preset.as_deref(), &device) {
            let slower = of_preset(recipe, preset, &a, &device)?;
            failed.extend(slower.into_iter().map(|pass| format!("{} {preset}: {pass}", recipe.name())));
        }
    }
    let most = 100.0 * Limit::of(&device).cost;
    if failed.is_empty() {
        out!("no pass that is on by default costs more than {most:.0}% of a step's time");
        return Ok(ExitCode::SUCCESS);
    }
    bail!("on by default, and slower than without by more than {most:.0}%: {}", failed.join(", "));
}

/// The one that was named; else by the device.
fn presets<'a>(recipe: &dyn Recipe, named: Option<&'a str>, device: &Device) -> Vec<&'a str> {
    let all = recipe.presets().iter().map(|p| p.0);
    match named {
        Some(name) => vec![name],
        None if device.gpu().is_some() => all.skip(1).collect(),
        None => all.take(1).collect(),
    }
}

/// Prints a line for each pass as soon as it is timed; returns those that cost too much.
fn of_preset(recipe: &dyn Recipe, preset: &str, a: &DefaultsArgs, device: &Device) -> Result<Vec<&'static str>> {
    let mut config = recipe::preset(recipe, Some(preset))?;
    a.set.iter().try_for_each(|set| config.set(set))?;
    let (config, _) = begin(recipe, &config)?;
    let mut task = recipe.task(&config)?;
    let (config, _) = fit_device(&*task, config, &Where::here(device))?;
    let mut step = Steps { limit: Limit::of(device), device, on: load(&*task, &config, device)?, off: None, task: &mut *task };
    let switches = config.switches()?;
    let applied = |p: &dyn Switch| step.on.programs.values().flat_map(|q| &q.receipts).any(|r| r.pass == p.name() && r.applied > 0);
    let wanted = |p: &&'static dyn Switch| {
        let named = a.only.is_empty() || a.only.iter().any(|name| name == p.name());
        named && !p.required() && switches.mode(*p, device.target()) != Mode::Off && applied(*p)
    };
    let passes: Vec<&'static str> = engine::passes::all().filter(wanted).map(|p| p.name()).collect();
    let steps = step.in_a_block()?;
    let (title, mut failed) = (format!("{} {preset}", recipe.name()), vec![]);
    for pass in passes {
        let said = match step.cost(&config, pass, steps) {
            // It is what makes the step fit, or another pass needs it.
            Err(e) => format!("not timed without it: {e:#}"),
            Ok(ratio) => {
                let percent = |r: f64| format!("{:+.1}%", 100.0 * (r - 1.0));
                let slower = step.limit.is_exceeded(&ratio);
                failed.extend(slower.then_some(pass));
                let too_much = if slower { ", SLOWER" } else { "" };
                format!("{:>7} ({} to {}){too_much}", percent(ratio.median), percent(ratio.low), percent(ratio.high))
            }
        };
        out!("{title:<22} {pass:<22} {said}");
    }
    Ok(failed)
}

fn load(task: &dyn Task, config: &Config, device: &Device) -> Result<Session> {
    let switches = config.switches()?;
    let programs = run::compile_for(task, &switches, device.target(), memory::available(device))?;
    Ok(run::load_compiled(task, programs, &switches, config.seed(), device)?)
}

/// A task's step with all passes, and without one of them.
struct Steps<'a> {
    limit: Limit,
    device: &'a Device,
    task: &'a mut dyn Task,
    on: Session,
    off: Option<Session>,
}

impl Steps<'_> {
    /// How many times as long a step takes with a pass as without it.
    fn cost(&mut self, config: &Config, pass: &str, steps: usize) -> Result<Interval> {
        let mut without = config.clone();
        without.set_pass_argument(&format!("{pass}=off"))?;
        self.off = None; // its memory is needed
        let off = load(self.task, &without, self.device)?;
        resize_arena(self.device, arena(&self.on).max(arena(&off)))?;
        self.off = Some(off);
        self.seconds(1, self.task.period())?;
        ratio(self.limit, |side| self.seconds(side, steps))
    }

    /// As many steps as take a block's time, in whole periods, after one that is not timed.
    fn in_a_block(&mut self) -> Result<usize> {
        let period = self.task.period();
        self.seconds(0, period)?;
        let one = self.seconds(0, period)?;
        Ok(((self.limit.block / one).ceil() as usize).clamp(1, 200) * period)
    }

    /// What so many steps take, with the pass (0) or without it (1): CPU time of all threads, or time on the GPU.
    fn seconds(&mut self, side: usize, steps: usize) -> Result<f64> {
        let session = self.off.as_mut().filter(|_| side == 1).unwrap_or(&mut self.on);
        self.device.synchronize()?;
        let (gpu, cpu) = (self.device.gpu(), || clock_gettime(ClockId::ProcessCPUTime));
        let (begun, before) = (Moment::now(gpu)?, cpu());
        for i in 0..steps as u64 {
            self.task.bench_step(session, i)?;
        }
        let end = Moment::now(gpu)?;
        self.device.synchronize()?;
        let after = cpu();
        Ok(match gpu {
            Some(_) => end.since(&begun)?.as_secs_f64(),
            None => (after.tv_sec - before.tv_sec) as f64 + 1e-9 * (after.tv_nsec - before.tv_nsec) as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Noise of a few percent, the same for every run of the test, over a machine that becomes slower.
    fn found(cost: f64, limit: Limit) -> (Interval, usize) {
        let mut turns = 0;
        let time = |side: usize| {
            turns += 1;
            let noise = 1.0 + 0.04 * ((turns * 37 % 11) as f64 / 5.0 - 1.0);
            Ok((if side == 0 { 1.0 + cost } else { 1.0 }) * noise * (1.0 + 0.02 * turns as f64))
        };
        let found = ratio(limit, time).unwrap();
        (found, turns / 2)
    }

    #[test]
    fn a_pass_that_costs_a_third_is_found_and_one_that_costs_a_percent_is_not() {
        for (cost, exceeded) in [(0.33, true), (0.2, true), (0.01, false), (0.0, false), (-0.3, false)] {
            let (ratio, rounds) = found(cost, CPU);
            assert_eq!(CPU.is_exceeded(&ratio), exceeded, "{cost}: {ratio:?}");
            assert_eq!(rounds, if exceeded { MANY } else { FEW }, "{cost}");
        }
        // Within noise nothing is called slower.
        let noisy = Interval { median: 1.12, low: 0.97, high: 1.3 };
        assert!(!CPU.is_exceeded(&noisy) && !GPU.is_exceeded(&noisy));
        assert!(GPU.is_exceeded(&Interval { median: 1.04, low: 1.03, high: 1.05 }));
        assert!(!GPU.is_exceeded(&Interval { median: 1.03, low: 1.01, high: 1.05 }));
    }
}
