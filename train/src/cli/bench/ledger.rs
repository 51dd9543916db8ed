//! `kiln bench RECIPE --ledger`: what every pass gains, what memory it saves and what it changes in the numbers.
//!
//! Each variant is the step with one pass switched. Variants and the baseline are held in memory and timed in turn (`rounds`), so that what slows the
//! machine down slows all of them down; one more copy of the baseline among them says what such a comparison is worth (`stats`).

use super::file::{Found, Line, Turns};
use super::groups::{Needs, groups};
use super::rounds::{Limits, in_turn};
use super::side::{Differences, Gradients, Numbers, Side};
use super::stats::{Block, Interval, LEAST, Verdict, ratios};
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

/// Without --rounds and --minutes. The interval of nine leaves out the smallest and the largest.
const ROUNDS: usize = 9;
/// Seconds that a block takes at least, where its steps are not given.
const BLOCK: f64 = 0.25;
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
fn arena(s: &Session) -> usize {
    s.programs.values().map(|p| p.memory.activations + p.memory.workspace).max().unwrap_or(0)
}

/// What is known of a variant after its turns.
struct Timed {
    line: Line,
    blocks: Vec<Block>,
    ratios: Vec<f64>,
}

pub fn ledger(asked: &Asked, baseline: &mut Baseline) -> Result<Ledger> {
    let (started, mut progress) = (Instant::now(), Progress::new());
    let (mut lines, mut variants) = (vec![], vec![Variant::new(asked, None, false)?]);
    for pass in switches().filter(|p| asked.only.is_empty() || asked.only.iter().any(|name| name == p.name())) {
        progress.say(format!("planning the step with {} switched", pass.name()));
        match site(asked, baseline, pass) {
            Site::Line(line) => lines.push(line),
            Site::Switch(on) => match Variant::new(asked, Some(pass.name()), on) {
                Ok(variant) => variants.push(variant),
                Err(e) => lines.push(Line { reason: Some(format!("{e:#}")), ..Line::new(pass.name(), Found::Failed, on) }),
            },
        }
    }
    let own = Needs::of(&run::peak(&baseline.side.session));
    let free = memory::available(asked.device).map(|free| (SHARE * (free.saturating_add(own.total())) as f64) as u64);
    let needs: Vec<Needs> = variants.iter().map(|v| v.needs).collect();
    let (groups, too_large) = groups(own, &needs, free);
    if groups.first().is_none_or(|g| g[0] != 0) {
        bail!("a ledger holds the step twice, and there is no room for that: {} are free", human_bytes(free.unwrap_or(0)));
    }
    for i in too_large {
        let v = &variants[i];
        let reason = format!(
            "needs {} beside the baseline's {}, and {} are free",
            human_bytes(v.needs.total()),
            human_bytes(own.rest),
            human_bytes(free.unwrap_or(0))
        );
        let line = Line::new(v.pass.unwrap_or_default(), Found::Failed, v.switched_on);
        lines.push(with_peaks(Line { reason: Some(reason), ..line }, own.total(), v.needs.total()));
    }
    let mut left: Vec<Option<Variant>> = variants.into_iter().map(Some).collect();
    let (mut timed, mut times, mut steps) = (vec![], vec![], asked.steps);
    for (g, group) in groups.iter().enumerate() {
        let own: Vec<Variant> = group.iter().filter_map(|&i| left[i].take()).collect();
        let share = own.len() as f64 / groups[g..].iter().map(Vec::len).sum::<usize>() as f64;
        let until = asked.minutes.map(|m| {
            let end = started + Duration::from_secs_f64(60.0 * m);
            Instant::now() + end.saturating_duration_since(Instant::now()).mul_f64(share)
        });
        let of = if groups.len() > 1 { format!("group {} of {}", g + 1, groups.len()) } else { "ledger".into() };
        let (base, found) = group_timed(asked, baseline, own, &mut steps, until, &of, &mut progress)?;
        times.extend(base);
        timed.extend(found);
    }
    progress.end();
    let steps = steps.unwrap_or(1);
    let seconds = started.elapsed().as_secs_f64();
    finished(timed, lines, times, |rounds, same| Turns { rounds, steps, groups: groups.len(), seconds, same })
}

/// What is to be done with a pass.
enum Site {
    /// Nothing is timed.
    Line(Line),
    /// The step is timed with it switched on, or off.
    Switch(bool),
}

fn site(asked: &Asked, baseline: &Baseline, pass: &'static dyn Switch) -> Site {
    let s = &baseline.side.session;
    let off = s.switches.mode(pass, asked.device.target()) == Mode::Off;
    let also = asked.also.iter().any(|name| name == pass.name());
    match (off, baseline.side.applied(pass.name())) {
        (true, _) if also => Site::Switch(true),
        (true, _) => Site::Line(Line::new(pass.name(), Found::Off, false)),
        (false, 0) => Site::Line(Line::new(pass.name(), Found::Nothing, false)),
        (false, _) => Site::Switch(false),
    }
}

/// Loads a group, compares its numbers with the baseline's, and times it in turn. Returns the baseline's times, too.
fn group_timed(
    asked: &Asked,
    baseline: &mut Baseline,
    variants: Vec<Variant>,
    steps: &mut Option<usize>,
    until: Option<Instant>,
    what: &str,
    progress: &mut Progress,
) -> Result<(Vec<f64>, Vec<Timed>)> {
    let (mut sides, mut found) = (vec![], vec![]);
    for variant in variants {
        let (pass, on, planned) = (variant.pass, variant.switched_on, variant.needs.total());
        progress.say(format!("{what}: loading the step {}", named(pass, on)));
        let mut line = Line::new(pass.unwrap_or_default(), Found::Measured, on);
        line = with_peaks(line, run::peak(&baseline.side.session).total() as u64, planned);
        match loaded(asked, baseline, variant, &mut line) {
            Ok(side) => sides.push(side),
            Err(e) => (line.found, line.reason) = (Found::Failed, Some(format!("{e:#}"))),
        }
        found.push(line);
    }
    let all = sides.iter().map(|s: &Side| &s.session).chain([&baseline.side.session]);
    resize_arena(asked.device, all.map(arena).max().unwrap_or(0))?;
    let steps = match *steps {
        Some(steps) => steps,
        None => {
            let clock = Instant::now();
            let one = baseline.side.block(3, clock)?.ms / 1e3;
            *steps.insert(((BLOCK / one).ceil() as usize).clamp(3, 200))
        }
    };
    let rounds = asked.rounds.unwrap_or(if asked.minutes.is_some() { usize::MAX } else { ROUNDS });
    let (base, blocks) = in_turn(&mut baseline.side, &mut sides, Limits { steps, rounds, until }, what, progress)?;
    let mut blocks = blocks.into_iter();
    let one = |line: Line| match line.found {
        Found::Measured => {
            let blocks = blocks.next().unwrap_or_default();
            Timed { ratios: ratios(&base, &blocks), line, blocks }
        }
        _ => Timed { line, blocks: vec![], ratios: vec![] },
    };
    let timed = found.into_iter().map(one).collect();
    Ok((base.iter().map(|b| b.ms).collect(), timed))
}

fn named(pass: Option<&str>, on: bool) -> String {
    pass.map_or("once more as it is".into(), |pass| format!("with {pass} {}", if on { "on" } else { "off" }))
}

/// A variant in memory, with its line's memory and numbers.
fn loaded(asked: &Asked, baseline: &Baseline, variant: Variant, line: &mut Line) -> Result<Side> {
    let (pass, on) = (variant.pass, variant.switched_on);
    let (mut side, allocated) = variant.load(asked)?;
    let (numbers, gradients) = side.numbers(asked.steps_for_error, true)?;
    line.differ = Some(Differences::of((&numbers, &gradients), (&baseline.numbers, &baseline.gradients)));
    line.numbers = Some(numbers);
    line.sites = pass.map_or(0, |pass| if on { side.applied(pass) } else { baseline.side.applied(pass) });
    (line.allocated, line.allocated_off) = if on { (allocated, baseline.allocated) } else { (baseline.allocated, allocated) };
    Ok(side)
}

/// A line with the planned bytes of the baseline and of the switched step.
fn with_peaks(mut line: Line, baseline: u64, switched: u64) -> Line {
    let (on, off) = if line.switched_on { (switched, baseline) } else { (baseline, switched) };
    (line.peak, line.peak_off) = (Some(on), Some(off));
    line
}

/// Gains, now that the noise is known; the lines in the order of the passes.
fn finished(timed: Vec<Timed>, mut lines: Vec<Line>, times: Vec<f64>, turns: impl FnOnce(usize, Interval) -> Turns) -> Result<Ledger> {
    let gain = |t: &Timed| {
        let faster = |ratio: f64| if t.line.switched_on { 1.0 / ratio - 1.0 } else { ratio - 1.0 };
        Interval::of(&t.ratios).map(|i| (i, i.map(faster)))
    };
    // The baseline again is the first.
    let Some((_, same)) = timed.first().and_then(gain) else {
        let why = timed.first().and_then(|t| t.line.reason.clone()).unwrap_or_default();
        bail!("the step could not be held twice: {why}");
    };
    let ms = Interval::of(&times).map_or(f64::NAN, |i| i.median);
    let rounds = timed.iter().filter(|t| !t.ratios.is_empty()).map(|t| t.ratios.len()).min().unwrap_or(0);
    let turns = turns(rounds, same);
    for t in timed.into_iter().skip(1) {
        let found = gain(&t);
        let mut line = t.line;
        if let Some((ratio, gain)) = found {
            let (on, off) = if line.switched_on { (ms * ratio.median, ms) } else { (ms, ms * ratio.median) };
            (line.ms, line.ms_off) = (Some(on), Some(off));
            (line.gain, line.verdict) = (Some(gain), Some(Verdict::of(&gain, turns.noise())));
            (line.times, line.ratios) = (t.blocks.iter().map(|b| b.ms).collect(), t.ratios);
            if line.switched_on && line.sites == 0 {
                line.found = Found::Nothing;
            }
        }
        lines.push(line);
    }
    let place = |line: &Line| switches().position(|p| p.name() == line.pass);
    lines.sort_by_key(place);
    Ok(Ledger { lines, turns, times })
}
