//! `kiln bench RECIPE --ledger`: what every pass gains, what memory it saves and what it changes in the numbers.
//!
//! Each variant is the step with one pass switched. Variants and the baseline are held in memory and timed in turn (`rounds`), so that what slows the
//! machine down slows all of them down. The baseline is there more than once: how its copies differ says what such a comparison is worth (`stats`).

use super::file::{Found, Line, Turns};
use super::groups::{Needs, groups};
use super::rounds::{Limits, in_turn};
use super::side::{Differences, Gradients, Numbers, Side};
use super::stats::{Interval, LEAST, Verdict, loads};
use crate::cli::progress::Progress;
use crate::config::Config;
use crate::memory;
use crate::recipe::{Recipe, Session, Task};
use crate::report::human_bytes;
use crate::run::{self, Programs};
use anyhow::{Result, bail};
use engine::passes::{Mode, Switch, known};
use engine::{Device, Switches};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// What a ledger is asked for.
pub struct Asked<'a> {
    pub recipe: &'a dyn Recipe,
    pub config: &'a Config,
    pub device: &'a Device,
    /// Passes that get a line; all where there are none.
    pub only: Vec<String>,
    /// Passes that are off, and are switched on.
    pub also: Vec<String>,
    pub rounds: Option<usize>,
    pub minutes: Option<f64>,
    /// Steps of a block; chosen by their time where it is not given.
    pub steps: Option<usize>,
    pub steps_for_error: usize,
}

/// The step as it is.
pub struct Baseline {
    pub side: Side,
    pub numbers: Numbers,
    pub gradients: Gradients,
    pub allocated: Option<u64>,
}

pub struct Ledger {
    pub lines: Vec<Line>,
    pub turns: Turns,
    /// Milliseconds of the baseline's blocks.
    pub times: Vec<f64>,
}

/// Without --rounds and --minutes. The interval of twelve leaves out the smallest and the largest.
const ROUNDS: usize = 12;
/// How often the baseline is loaded, where memory allows it. How its copies differ says how far any load may be off: of three, by 11 times their
/// standard deviation, of four by 6.5 times, of six by 4.4 times.
const COPIES: usize = 6;
/// How often it is loaded at least: of two, loads might be off by 78 times the standard deviation, and no gain could be told from noise.
const FEWEST_COPIES: usize = 3;
/// Seconds that a block takes at least, where its steps are not given. The clock of a GPU changes within seconds: many short turns follow it better than
/// few long ones.
const BLOCK: f64 = 0.1;
/// Of free memory that is taken: kernels, captured graphs and gaps need some, too.
const SHARE: f64 = 0.9;

/// Checks names and limits before anything is measured.
pub fn checked(asked: &Asked) -> Result<()> {
    for (flag, name) in asked.only.iter().map(|n| ("--only", n)).chain(asked.also.iter().map(|n| ("--also", n))) {
        let names = || switches().map(|p| p.name());
        if !names().any(|known| known == name) {
            bail!("{flag} {name}: there is no such pass{}", known(name, names()));
        }
    }
    if let Some(name) = asked.also.iter().find(|name| !asked.only.is_empty() && !asked.only.contains(name)) {
        bail!("--also {name}: --only leaves it out; name it there, too");
    }
    if asked.rounds.is_some_and(|r| !(LEAST..=100_000).contains(&r)) {
        bail!("--rounds {}: from {LEAST}, because fewer say nothing about their own noise, to 100000", asked.rounds.unwrap_or(0));
    }
    if asked.minutes.is_some_and(|m| !(m > 0.0 && m <= 10_000.0)) {
        bail!("--minutes {}: more than 0, up to 10000", asked.minutes.unwrap_or(0.0));
    }
    Ok(())
}

fn switches() -> impl Iterator<Item = &'static dyn Switch> {
    engine::passes::all().filter(|p| !p.required())
}

/// A step with one pass switched, not loaded yet.
struct Variant {
    /// None: the baseline again.
    pass: Option<&'static str>,
    switched_on: bool,
    switches: Switches,
    task: Box<dyn Task>,
    programs: Programs,
    needs: Needs,
}

impl Variant {
    fn new(asked: &Asked, pass: Option<&'static str>, switched_on: bool) -> Result<Variant> {
        let mut config = asked.config.clone();
        if let Some(pass) = pass {
            config.set_pass_argument(&format!("{pass}={}", if switched_on { "auto" } else { "off" }))?;
        }
        let (task, switches, target) = (asked.recipe.task(&config)?, config.switches()?, asked.device.target());
        let programs = run::compile_for(&*task, &switches, target, memory::available(asked.device))?;
        let needs = Needs::of(&run::planned(&programs, target));
        Ok(Variant { pass, switched_on, switches, task, programs, needs })
    }

    /// Loads it, in an arena of its own size where memory is measured. Returns what it allocated, too.
    fn load(self, asked: &Asked) -> Result<(Side, Option<u64>)> {
        resize_arena(asked.device, 0)?;
        let before = asked.device.usage();
        let session = run::load_compiled(&*self.task, self.programs, &self.switches, asked.config.seed(), asked.device)?;
        let allocated = before.zip(asked.device.usage()).map(|(before, after)| after.allocated.saturating_sub(before.allocated) as u64);
        Ok((Side::new(self.task, session), allocated))
    }
}

/// Makes a GPU's arena as large as these bytes. The CPU's is left as it is: there is nothing measured.
pub fn resize_arena(device: &Device, bytes: usize) -> Result<()> {
    if let Device::Cuda(cuda, arena) = device {
        cuda.synchronize()?;
        let mut arena = arena.lock().unwrap_or_else(PoisonError::into_inner);
        *arena = cuda.allocate(0)?; // free the old one first
        *arena = cuda.allocate(bytes)?;
    }
    Ok(())
}

/// The arena that a session's programs need.
pub fn arena(s: &Session) -> usize {
    s.programs.values().map(|p| p.memory.activations + p.memory.workspace).max().unwrap_or(0)
}

/// A variant's line, and the ratios of its times to the baseline's.
struct Timed {
    line: Line,
    times: Vec<f64>,
    ratios: Vec<f64>,
}

/// How the work goes on.
struct Work<'a> {
    asked: &'a Asked<'a>,
    /// Copies of the baseline, the first of which is what `Baseline` had.
    copies: Vec<Side>,
    numbers: Numbers,
    gradients: Gradients,
    allocated: Option<u64>,
    own: Needs,
    steps: Option<usize>,
    /// Of all groups: milliseconds of the baseline's blocks, and how far a load may be off.
    times: Vec<f64>,
    loads: Option<f64>,
    progress: Progress,
}

pub fn ledger(asked: &Asked, baseline: Baseline) -> Result<(Ledger, Side)> {
    let (started, mut progress) = (Instant::now(), Progress::new());
    let own = Needs::of(&run::peak(&baseline.side.session));
    let (mut lines, variants) = variants(asked, &baseline.side, &mut progress);
    let free = memory::available(asked.device).map(|free| (SHARE * (free.saturating_add(own.total())) as f64) as u64);
    let needs: Vec<Needs> = variants.iter().map(|v| v.needs).collect();
    let beside = |copies: usize| groups(Needs { rest: copies as u64 * own.rest, ..own }, &needs, free);
    // No variant is left out for a copy's sake.
    let copies = (FEWEST_COPIES..=COPIES).rev().find(|&n| beside(n).1.len() == beside(FEWEST_COPIES).1.len()).unwrap_or(FEWEST_COPIES);
    let (groups, too_large) = beside(copies);
    lines.extend(too_large.into_iter().map(|i| no_room(&variants[i], own, copies, free)));
    let mut work = Work::new(asked, baseline, own, copies, progress)?;
    let mut left: Vec<Option<Variant>> = variants.into_iter().map(Some).collect();
    let mut timed = vec![];
    for (g, group) in groups.iter().enumerate() {
        let own: Vec<Variant> = group.iter().filter_map(|&i| left[i].take()).collect();
        let share = own.len() as f64 / groups[g..].iter().map(Vec::len).sum::<usize>() as f64;
        let until = asked.minutes.map(|m| {
            let end = started + Duration::from_secs_f64(60.0 * m);
            Instant::now() + end.saturating_duration_since(Instant::now()).mul_f64(share)
        });
        let of = if groups.len() > 1 { format!("group {} of {}", g + 1, groups.len()) } else { "ledger".into() };
        timed.extend(work.group(own, until, &of)?);
    }
    let (side, turns, times) = work.end(&timed, groups.len(), started.elapsed())?;
    lines.extend(finished(timed, &times, turns.loads));
    lines.sort_by_key(|line| switches().position(|p| p.name() == line.pass));
    Ok((Ledger { lines, turns, times }, side))
}

/// The passes that are asked for: lines of those that are not timed, and the others switched.
fn variants(asked: &Asked, baseline: &Side, progress: &mut Progress) -> (Vec<Line>, Vec<Variant>) {
    let (mut lines, mut variants) = (vec![], vec![]);
    for pass in switches().filter(|p| asked.only.is_empty() || asked.only.iter().any(|name| name == p.name())) {
        let name = pass.name();
        progress.say(format!("planning the step with {name} switched"));
        match site(asked, baseline, pass) {
            Site::Found(found) => lines.push(Line::new(name, found, false)),
            Site::Switch(on) => match Variant::new(asked, Some(name), on) {
                Ok(variant) => variants.push(variant),
                Err(e) => lines.push(Line { reason: Some(format!("{e:#}")), ..Line::new(name, Found::Failed, on) }),
            },
        }
    }
    (lines, variants)
}

/// What is to be done with a pass.
enum Site {
    /// Nothing is timed.
    Found(Found),
    /// The step is timed with it switched on, or off.
    Switch(bool),
}

fn site(asked: &Asked, baseline: &Side, pass: &'static dyn Switch) -> Site {
    let off = baseline.session.switches.mode(pass, asked.device.target()) == Mode::Off;
    let also = asked.also.iter().any(|name| name == pass.name());
    match (off, baseline.applied(pass.name())) {
        (true, _) if also => Site::Switch(true),
        (true, _) => Site::Found(Found::Off),
        (false, 0) => Site::Found(Found::Nothing),
        (false, _) => Site::Switch(false),
    }
}

fn no_room(v: &Variant, own: Needs, copies: usize, free: Option<u64>) -> Line {
    let line = Line::new(v.pass.unwrap_or_default(), Found::Failed, v.switched_on);
    let [needs, baseline, free] = [v.needs.total(), copies as u64 * own.rest, free.unwrap_or(0)].map(human_bytes);
    let reason = format!("needs {needs} beside the states of {copies} baselines, {baseline}; {free} may be taken");
    with_peaks(Line { reason: Some(reason), ..line }, own.total(), v.needs.total())
}

/// A line with the planned bytes of the baseline and of the switched step.
fn with_peaks(mut line: Line, baseline: u64, switched: u64) -> Line {
    let (on, off) = if line.switched_on { (switched, baseline) } else { (baseline, switched) };
    (line.peak, line.peak_off) = (Some(on), Some(off));
    line
}

impl<'a> Work<'a> {
    /// Loads the baseline as often as it is to be there.
    fn new(asked: &'a Asked<'a>, baseline: Baseline, own: Needs, copies: usize, progress: Progress) -> Result<Work<'a>> {
        let Baseline { side, numbers, gradients, allocated } = baseline;
        let (steps, times, loads) = (asked.steps.map(|n| n.next_multiple_of(side.task.period())), vec![], None);
        let mut work = Work { asked, copies: vec![side], numbers, gradients, allocated, own, steps, times, loads, progress };
        for _ in 1..copies {
            work.progress.say("loading the step once more as it is".into());
            let (mut side, _) = Variant::new(asked, None, false)?.load(asked)?;
            // As many steps as everybody else.
            side.numbers(asked.steps_for_error, false)?;
            work.copies.push(side);
        }
        Ok(work)
    }

    /// Loads a group, compares its numbers with the baseline's, and times it in turn.
    fn group(&mut self, variants: Vec<Variant>, until: Option<Instant>, what: &str) -> Result<Vec<Timed>> {
        let (mut sides, mut lines) = (vec![], vec![]);
        for variant in variants {
            let (pass, on) = (variant.pass.unwrap_or_default(), variant.switched_on);
            self.progress.say(format!("{what}: loading the step with {pass} {}", if on { "on" } else { "off" }));
            let mut line = with_peaks(Line::new(pass, Found::Measured, on), self.own.total(), variant.needs.total());
            match self.loaded(variant, &mut line) {
                Ok(side) => sides.push(side),
                Err(e) => (line.found, line.reason) = (Found::Failed, Some(format!("{e:#}"))),
            }
            lines.push(line);
        }
        let all = sides.iter().chain(&self.copies).map(|s| arena(&s.session));
        resize_arena(self.asked.device, all.max().unwrap_or(0))?;
        let steps = self.steps()?;
        let rounds = self.asked.rounds.unwrap_or(if self.asked.minutes.is_some() { usize::MAX } else { ROUNDS });
        let limits = Limits { steps, period: self.period(), rounds, until };
        let turns = in_turn(&mut self.copies, &mut sides, limits, what, &mut self.progress)?;
        self.times.extend(turns.copies.iter().flatten().map(|b| b.ms));
        // The group where the copies differ most counts.
        self.loads = Some(loads(&turns.apart()).max(self.loads.unwrap_or(0.0)));
        let mut held = 0..sides.len();
        let one = |line: Line| match if line.found == Found::Measured { held.next() } else { None } {
            Some(i) => {
                let line = Line { steps: turns.others[i].iter().map(|b| b.steps).collect(), ..line };
                Timed { line, times: turns.others[i].iter().map(|b| b.ms).collect(), ratios: turns.ratios(i) }
            }
            None => Timed { line, times: vec![], ratios: vec![] },
        };
        Ok(lines.into_iter().map(one).collect())
    }

    /// A variant in memory, with its line's memory and numbers.
    fn loaded(&self, variant: Variant, line: &mut Line) -> Result<Side> {
        let (pass, on) = (variant.pass.unwrap_or_default(), variant.switched_on);
        let (mut side, allocated) = variant.load(self.asked)?;
        let (numbers, gradients) = side.numbers(self.asked.steps_for_error, true)?;
        line.differ = Some(Differences::of((&numbers, &gradients), (&self.numbers, &self.gradients)));
        line.numbers = Some(numbers);
        line.sites = if on { side.applied(pass) } else { self.copies[0].applied(pass) };
        (line.allocated, line.allocated_off) = if on { (allocated, self.allocated) } else { (self.allocated, allocated) };
        Ok(side)
    }

    fn period(&self) -> usize {
        self.copies[0].task.period()
    }

    /// Steps of a block, whole periods: by the time of the baseline's where it is not said, and then the same for every group.
    fn steps(&mut self) -> Result<usize> {
        if let Some(steps) = self.steps {
            return Ok(steps);
        }
        let (clock, period) = (Instant::now(), self.period());
        // Each copy, so that all have run as often.
        let first = 3usize.next_multiple_of(period);
        let times = self.copies.iter_mut().map(|copy| Ok(copy.block(first, clock)?.ms)).collect::<Result<Vec<f64>>>()?;
        let one = times.into_iter().fold(f64::INFINITY, f64::min) / 1e3;
        Ok(*self.steps.insert(((BLOCK / one).ceil() as usize).clamp(3, 200).next_multiple_of(period)))
    }

    /// The baseline, how the times were taken, and those of the baseline. Where nothing was compared, its copies are timed alone.
    fn end(mut self, timed: &[Timed], groups: usize, time: Duration) -> Result<(Side, Turns, Vec<f64>)> {
        if self.loads.is_none() {
            self.group(vec![], None, "ledger")?;
        }
        self.progress.end();
        let Some(loads) = self.loads else { bail!("the baseline was not timed often enough: --rounds") };
        let rounds = timed.iter().filter(|t| !t.ratios.is_empty()).map(|t| t.ratios.len()).min().unwrap_or(0);
        let turns = Turns { rounds, steps: self.steps.unwrap_or(1), groups, copies: self.copies.len(), seconds: time.as_secs_f64(), loads };
        Ok((self.copies.swap_remove(0), turns, self.times))
    }
}

/// Lines with their gains, now that it is known how far a load may be off.
fn finished(timed: Vec<Timed>, times: &[f64], loads: f64) -> impl Iterator<Item = Line> {
    let ms = Interval::of(times).map_or(f64::NAN, |i| i.median);
    timed.into_iter().map(move |Timed { mut line, times, ratios }| {
        let Some(ratio) = Interval::of_ratios(&ratios, loads) else { return line };
        let (on, off) = if line.switched_on { (ms * ratio.median, ms) } else { (ms, ms * ratio.median) };
        let gain = ratio.map(|ratio| if line.switched_on { 1.0 / ratio - 1.0 } else { ratio - 1.0 });
        (line.ms, line.ms_off) = (Some(on), Some(off));
        (line.gain, line.verdict) = (Some(gain), Some(Verdict::of(&gain)));
        (line.times, line.ratios) = (times, ratios);
        if line.switched_on && line.sites == 0 {
            line.found = Found::Nothing;
        }
        line
    })
}
