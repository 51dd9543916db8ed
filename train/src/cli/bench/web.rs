//! `--html FILE`: a ledger as one page that stands alone.

use super::file::{Found, Line, Measured, error, range, signed, worth_a_line};
use super::peers;
use super::stats::Verdict;
use crate::page::{Axis, Bar, Cell, Chart, Page, number};
use crate::report::human_count;
use anyhow::Result;

pub fn page(m: &Measured) -> Result<String> {
    let mut page = Page::new(&format!("What every pass gains: {} {}", m.recipe, m.preset));
    let commit = m.versions.commit.as_ref().map_or(String::new(), |c| format!(", commit {c}"));
    page.text(&format!(
        "{}: {:.2} ms a {}, {} {}/s. {} (kiln {}{commit}).",
        m.device,
        m.ms,
        m.step,
        human_count(m.per_s),
        m.unit,
        m.date,
        m.versions.kiln
    ));
    for line in m.conditions() {
        page.text(&capital(&line));
    }
    gains(&mut page, m);
    memory(&mut page, m);
    errors(&mut page, m);
    every_line(&mut page, m);
    if let Some(found) = &m.peers {
        let rows = peers::rows(found);
        page.heading("Beside PyTorch");
        page.table("The same step, timed in turn", &peers::HEADERS, &rows);
    }
    page.heading("How to repeat it").plain(&m.command);
    page.heading("Config").plain(&serde_json::to_string_pretty(&m.config)?);
    page.data("bench", &serde_json::to_value(m)?);
    Ok(page.html())
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().chain(chars).chain(['.']).collect())
}

fn measured(m: &Measured) -> impl Iterator<Item = &Line> {
    m.ledger.iter().filter(|l| l.found == Found::Measured)
}

/// Bars that are there, in the order in which they are given.
fn bars(page: &mut Page, title: &str, about: &str, x: Axis, bars: Vec<Bar>) {
    if !bars.is_empty() {
        page.chart(title, about, &Chart::Bars { x, bars });
    }
}

fn largest_first(mut bars: Vec<Bar>) -> Vec<Bar> {
    bars.sort_by(|a, b| b.value.total_cmp(&a.value));
    bars
}

fn gains(page: &mut Page, m: &Measured) {
    let bar = |l: &Line| {
        let gain = l.gain?;
        let faint = l.verdict == Some(Verdict::WithinNoise);
        let note = format!("{}: {}, {} sites", l.name(), l.gains(), l.sites);
        let shown = faint.then(|| "within noise".into());
        Some(Bar { name: l.name(), value: gain.median, low: Some(gain.low), high: Some(gain.high), note, faint, shown, color: 0 })
    };
    let about = "How much longer a step takes without the pass; the line is the 99% interval, pale bars are within noise.";
    bars(page, "Speed", about, Axis::new("gain of speed").unit("share"), largest_first(measured(m).filter_map(bar).collect()));
}

fn memory(page: &mut Page, m: &Measured) {
    let bar = |l: &Line, more: Option<i64>, what: &str| {
        let more = more.filter(|b| *b != 0)?;
        let note = format!("{}: {} {what}", l.name(), signed(more));
        Some(Bar { name: l.name(), value: more as f64, note, shown: Some(signed(more)), ..Bar::default() })
    };
    let x = || Axis::new("bytes by which the pass changes it").unit("bytes");
    // What saves most comes first.
    let ordered = |mut bars: Vec<Bar>| {
        bars.sort_by(|a, b| a.value.total_cmp(&b.value));
        bars
    };
    let planned = ordered(measured(m).filter_map(|l| bar(l, Line::more(l.peak, l.peak_off), "planned")).collect());
    bars(page, "Memory", "Planned peak with the pass, less the peak without it. Passes that change nothing are left out.", x(), planned);
    let allocated = ordered(measured(m).filter_map(|l| bar(l, Line::more(l.allocated, l.allocated_off), "measured")).collect());
    bars(page, "Memory, measured", "What kiln allocated on the device with the pass, less what it allocated without it.", x(), allocated);
}

fn errors(page: &mut Page, m: &Measured) {
    let bar = |l: &Line| {
        let d = l.differ.as_ref()?;
        let value = d.worst_gradient.filter(|e| *e > 0.0)?;
        let note = format!("{}, gradient of {}: {}", l.name(), d.worst.as_deref().unwrap_or("?"), error(d.worst_gradient));
        Some(Bar { name: l.name(), value, note, color: 1, ..Bar::default() })
    };
    let about = "Relative difference of the gradient that differs most, after one step from the same state. Passes that change no bit are left out.";
    let found = largest_first(measured(m).filter_map(bar).collect());
    bars(page, "What it changes in the numbers", about, Axis::new("relative difference").log(), found);
}

fn every_line(page: &mut Page, m: &Measured) {
    let steps = m.numbers.as_ref().map_or(0, |n| n.steps);
    let metric = m.numbers.as_ref().map_or("loss", |n| &n.metric);
    let after = format!("{metric} after {steps} steps");
    let headers = ["pass", "sites", "gain", "99%", "planned bytes", "measured bytes", metric, "gradients", "worst gradient", "of", &after];
    let cell = |value: Option<f64>, shown: String| value.map_or("-".into(), |v| number(v, &shown));
    let bytes = |b: Option<i64>| b.map_or("-".into(), |b| number(b as f64, &signed(b)));
    let row = |l: &Line| {
        let gain = l.gain.filter(|_| l.found == Found::Measured);
        let mut cells: Vec<Cell> = vec![l.name().into(), cell(l.differ.as_ref().map(|_| l.sites as f64), l.sites.to_string())];
        cells.push(match (l.found, l.verdict) {
            (Found::Failed, _) => format!("does not run: {}", l.reason.as_deref().unwrap_or_default()).into(),
            (_, Some(Verdict::WithinNoise)) => "within noise".into(),
            _ => cell(gain.map(|g| g.median), gain.map_or(String::new(), |g| format!("{:+.2}%", 100.0 * g.median))),
        });
        cells.push(gain.map_or("-".into(), |g| range(&g).into()));
        cells.extend([bytes(Line::more(l.peak, l.peak_off)), bytes(Line::more(l.allocated, l.allocated_off))]);
        let of = |f: fn(&super::side::Differences) -> Option<f64>| {
            l.differ.as_ref().map_or("-".into(), |d| f(d).map_or(error(None).into(), |e| number(e, &error(Some(e)))))
        };
        cells.extend([of(|d| d.loss), of(|d| d.gradient), of(|d| d.worst_gradient)]);
        cells.push(l.differ.as_ref().and_then(|d| d.worst.clone()).unwrap_or("-".into()).into());
        cells.push(of(|d| d.loss_after));
        cells
    };
    page.heading("Every pass");
    page.text("Loss and gradients: relative difference between the step with the pass and without it, from the same state.");
    let (lines, rest) = worth_a_line(&m.ledger);
    page.table("Passes", &headers, &lines.into_iter().map(row).collect::<Vec<_>>());
    for line in rest {
        page.text(&capital(&line));
    }
}
