//! The step of a recipe: how long it takes, what it computes, what memory it needs.

use super::baseline::{Bounds, Compared, comparable, compared};
use super::file::{FORMAT, Line, Measured, Versions, error, signed, worth_a_line};
use super::ledger::{self, Asked, Baseline, Ledger, ledger};
use super::peers::{self, Peers};
use super::serve::Served;
use super::side::Side;
use super::stats::{Interval, LEAST};
use super::{BenchArgs, fingerprint, web};
use crate::cli::budget::{Where, fit_device};
use crate::cli::train::typed;
use crate::cli::{Recipes, outputs, write_json};
use crate::config::Config;
use crate::memory;
use crate::recipe::{Recipe, Task, begin, find_in};
use crate::report::{human_bytes, human_count, table};
use crate::run::{self, Fitted};
use anyhow::{Result, bail};
use engine::Device;
use serde_json::Value;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Steps after which losses are compared, where nothing else is said: in a ledger, and in a file of the step alone, which should not take much longer for it.
const STEPS_FOR_ERROR: usize = 20;
const STEPS_ALONE: usize = 5;

/// How long it took until the device was open, the programs were loaded, the first step was done; each from the start.
#[derive(Clone, Copy)]
struct Start {
    opened: Duration,
    loaded: Duration,
    first: Duration,
}

pub fn step(a: &BenchArgs, started: Instant, recipes: Recipes) -> Result<ExitCode> {
    outputs::page("--html", a.html.as_deref())?;
    outputs::checked(&[("--json", a.json.as_deref()), ("--html", a.html.as_deref())], &[("--baseline", a.baseline.as_deref())])?;
    let device = &a.device.open()?;
    let opened = started.elapsed();
    let mut config = a.config.resolve(recipes, None)?;
    a.budget.set(&mut config)?;
    let recipe = find_in(recipes, config.text("recipe"))?;
    let (config, _) = begin(recipe, &config)?;
    let (config, fitted) = a.budget.fit(recipe, config, &Where::here(device), true)?;
    let task = recipe.task(&config)?;
    let (config, chosen) = fit_device(&*task, config, &Where::here(device))?;
    let fitted = fitted.or(chosen);
    let then = a.baseline.as_deref().map(Measured::read).transpose()?;
    let bounds = Bounds { slower: a.fail_slower, above: a.fail_above };
    let asked = asked(a, recipe, &config, device, then.as_ref())?;
    ledger::checked(&asked)?;
    let peers = a.against.as_ref().map(|_| Peers::find(&config, recipes, a.peers.as_deref())).transpose()?;
    let (mut side, allocated) = load(task, &config, device)?;
    let loaded = started.elapsed();
    let mut m = described(&config, fitted.as_ref(), &side);
    if let Some(repeat) = a.repeat.filter(|n| then.is_some() && !a.ledger && n.div_ceil(m.period) < LEAST) {
        let least = LEAST * m.period;
        bail!("--repeat {repeat}: fewer than {LEAST} times say nothing about their noise, which --baseline needs (--repeat {least})");
    }
    if let Some((then, path)) = then.as_ref().zip(a.baseline.as_deref()) {
        comparable(&m, then, bounds, path)?.iter().for_each(|warning| crate::warn!("{warning}"));
    }
    let wanted = a.ledger || a.json.is_some() || then.is_some();
    let known = if wanted { Some(side.numbers(asked.steps_for_error, a.ledger)?) } else { None };
    let start = Start { opened, loaded, first: loaded + side.first()? };
    m.setup_s = start.first.as_secs_f64();
    if a.serve {
        side.times(a.warmup + side.warm_up() as usize, Some(m.period))?;
        let ready =
            serde_json::json!({ "setup_s": m.setup_s, "device": m.device, "commit": m.versions.commit, "peak_bytes": m.peak_bytes });
        let served = Served { device, work: m.work, unit: &m.unit, ready };
        return served.serve(|least| side.times_for(least));
    }
    match known {
        Some((numbers, gradients)) if a.ledger => {
            m.numbers = Some(numbers.clone());
            let (Ledger { lines, turns, times }, baseline) = ledger(&asked, Baseline { side, numbers, gradients, allocated })?;
            (m.times, m.ledger, m.repeat, m.turns) = (times, lines, turns.steps, Some(turns));
            side = baseline;
        }
        known => {
            m.times = side.times(a.warmup + side.warm_up() as usize, a.repeat)?;
            m.numbers = known.map(|k| k.0);
        }
    }
    timed(&mut m, device);
    show(&m, fitted.as_ref(), start, device)?;
    drop(side); // the peers need the memory
    if let Some(peers) = peers {
        let found = peers.run(a.rounds.unwrap_or(3))?;
        out_part!("{}", table(&peers::HEADERS, &peers::rows(&found)));
        m.peers = Some(found);
    }
    write(a, &m)?;
    then.map_or(Ok(ExitCode::SUCCESS), |then| judged(&compared(&m, &then, bounds)))
}

fn write(a: &BenchArgs, m: &Measured) -> Result<()> {
    if let Some(path) = &a.json {
        write_json(Some(path), &serde_json::to_value(m)?)?;
    }
    if let Some(path) = &a.html {
        run::write_whole(path, &web::page(m)?)?;
        out!("page: {}", path.display());
    }
    Ok(())
}

pub fn fingerprint(a: &BenchArgs, recipes: Recipes) -> Result<u64> {
    let mut config = a.config.resolve(recipes, None)?;
    a.budget.set(&mut config)?;
    fingerprint::of_step(find_in(recipes, config.text("recipe"))?, &config)
}

/// Says what was found, and fails if anything is beyond its bound.
fn judged(found: &Compared) -> Result<ExitCode> {
    for line in &found.said {
        out!("{line}");
    }
    found.warned.iter().for_each(|line| crate::warn!("warning: {line}"));
    found.failed.iter().for_each(|line| crate::warn!("failed, {line}"));
    Ok(if found.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn asked<'a>(a: &BenchArgs, recipe: &'a dyn Recipe, config: &'a Config, device: &'a Device, then: Option<&Measured>) -> Result<Asked<'a>> {
    let only = a.only.iter().flat_map(|names| names.split(',')).map(|name| name.trim().to_string()).collect();
    let there = then.and_then(|then| then.numbers.as_ref()).map(|numbers| numbers.steps);
    let steps_for_error = a.steps_for_error.or(there).unwrap_or(if a.ledger { STEPS_FOR_ERROR } else { STEPS_ALONE });
    if let Some(there) = there.filter(|there| *there != steps_for_error) {
        bail!(
            "--steps-for-error {steps_for_error}: the baseline has the loss after {there} steps; leave it out, or measure the baseline so"
        );
    }
    let (also, rounds, minutes, steps) = (a.also.clone(), a.rounds, a.minutes, a.repeat);
    Ok(Asked { recipe, config, device, only, also, rounds, minutes, steps, steps_for_error })
}

/// The step as it is, and what it allocated on a GPU.
fn load(task: Box<dyn Task>, config: &Config, device: &Device) -> Result<(Side, Option<u64>)> {
    let before = device.usage();
    let session = run::load_within_budget(&*task, config, device)?;
    let allocated = before.zip(device.usage()).map(|(before, after)| after.allocated.saturating_sub(before.allocated) as u64);
    Ok((Side::new(task, session), allocated))
}

/// What is known before anything is timed.
fn described(config: &Config, fitted: Option<&Fitted>, side: &Side) -> Measured {
    let (device, (unit, work)) = (&side.session.device, side.task.work());
    let cuda = if let Device::Cuda(cuda, _) = device { Some(cuda.versions()) } else { None };
    Measured {
        format: FORMAT,
        recipe: config.text("recipe").into(),
        preset: config.text("preset").into(),
        config: config.to_json(),
        device: device.describe(),
        versions: Versions { kiln: env!("CARGO_PKG_VERSION").into(), commit: option_env!("KILN_COMMIT").map(String::from), cuda },
        date: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
        command: typed(),
        step: side.task.step_name().into(),
        unit: unit.into(),
        work,
        ms: 0.0,
        interval: None,
        per_s: 0.0,
        times: vec![],
        repeat: side.task.period(),
        period: side.task.period(),
        peak_bytes: run::peak(&side.session).total() as u64,
        setup_s: 0.0,
        memory_budget: fitted.filter(|f| f.asked).map(|f| f.budget),
        chosen: fitted.map(|f| f.changes.clone()),
        estimated_more_time: fitted.map(|f| f.seconds[1] / f.seconds[0] - 1.0),
        numbers: None,
        receipts: run::receipts_json(&side.session),
        ledger: vec![],
        turns: None,
        peers: None,
        memory: Default::default(),
    }
}

/// What follows from the times, and memory as it was measured.
fn timed(m: &mut Measured, device: &Device) {
    let mut sorted = m.times.clone();
    sorted.sort_by(f64::total_cmp);
    m.interval = Interval::of_positive(&sorted);
    m.ms = m.interval.map_or(sorted[sorted.len() / 2], |i| i.median);
    m.per_s = m.work / m.ms * 1e3;
    if let Value::Object(fields) = memory::Measured::of(device).json() {
        m.memory = fields;
    }
}

fn show(m: &Measured, fitted: Option<&Fitted>, start: Start, device: &Device) -> Result<()> {
    out!("{}", m.title());
    if let Some(fitted) = fitted {
        out!("{}", fitted.line());
    }
    let (first, last) = m.times.iter().fold((f64::INFINITY, 0f64), |(low, high), t| (low.min(*t), high.max(*t)));
    out!("{:.1} ms a {} (from {first:.1} to {last:.1}){}, {} {}/s", m.ms, m.step, m.whole_periods(), human_count(m.per_s), m.unit);
    let measured = match m.turns {
        // With all that a ledger holds, there is no figure of the step alone.
        Some(_) => String::new(),
        None => format!(", measured {}", memory::Measured::of(device).line()),
    };
    out!(
        "planned peak {}{measured}; {:.2} s from the start to the end of the first step: device {:.2}, programs {:.2}, step {:.2}",
        human_bytes(m.peak_bytes),
        start.first.as_secs_f64(),
        start.opened.as_secs_f64(),
        (start.loaded - start.opened).as_secs_f64(),
        (start.first - start.loaded).as_secs_f64()
    );
    if !m.ledger.is_empty() {
        show_ledger(m)?;
    }
    Ok(())
}

fn show_ledger(m: &Measured) -> Result<()> {
    out!("each pass switched alone:");
    m.conditions().iter().try_for_each(|line| {
        out!("  {line}");
        Ok::<_, anyhow::Error>(())
    })?;
    let steps = m.numbers.as_ref().map_or(0, |n| n.steps);
    let metric = m.numbers.as_ref().map_or("loss", |n| &n.metric);
    let measured = m.ledger.iter().any(|l| l.allocated.is_some());
    let after = format!("{metric} after {steps}");
    let mut headers = vec!["pass", "sites", "gain", "memory"];
    headers.extend(measured.then_some("measured"));
    headers.extend([metric, "gradients", "worst gradient", &after]);
    let (lines, rest) = worth_a_line(&m.ledger);
    if !lines.is_empty() {
        out_part!("{}", table(&headers, &lines.iter().map(|l| row(l, measured)).collect::<Vec<_>>()));
    }
    for line in rest {
        out!("{line}");
    }
    for line in m.ledger.iter().filter(|l| l.reason.is_some()) {
        out!("{}: {}", line.pass, line.reason.as_deref().unwrap_or_default());
    }
    Ok(())
}

fn row(l: &Line, measured: bool) -> Vec<String> {
    let bytes = |more: Option<i64>| more.map_or("-".into(), signed);
    let sites = if l.differ.is_some() { l.sites.to_string() } else { "-".into() };
    let mut cells = vec![l.name(), sites, l.gains(), bytes(Line::more(l.peak, l.peak_off))];
    cells.extend(measured.then(|| bytes(Line::more(l.allocated, l.allocated_off))));
    match &l.differ {
        None => cells.extend(["-", "-", "-", "-"].map(String::from)),
        Some(d) => {
            let worst = d.worst.as_ref().map_or(error(d.worst_gradient), |name| format!("{} {name}", error(d.worst_gradient)));
            cells.extend([error(d.loss), error(d.gradient), worst, error(d.loss_after)]);
        }
    }
    cells
}
