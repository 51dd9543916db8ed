//! `--html FILE`: a ledger as one page that stands alone.

use super::file::{Found, Line, Measured, error, range};
use super::peers;
use super::stats::Verdict;
use crate::page::{Axis, Bar, Chart, Page, number};
use crate::report::{human_bytes, human_count};
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

fn named(l: &Line) -> String {
    if l.switched_on { format!("{}, switched on", l.pass) } else { l.pass.clone() }
}

/// Bars in the order of what they say, the largest first.
fn bars(page: &mut Page, title: &str, about: &str, x: Axis, mut bars: Vec<Bar>) {
    if !bars.is_empty() {
        bars.sort_by(|a, b| b.value.total_cmp(&a.value));
        page.chart(title, about, &Chart::Bars { x, bars });
    }
}

fn gains(page: &mut Page, m: &Measured) {
    let bar = |l: &Line| {
        let gain = l.gain?;
        let faint = l.verdict == Some(Verdict::WithinNoise);
        let note = format!("{}: {}, {} sites", named(l), l.gains(), l.sites);
        let shown = faint.then(|| "within noise".into());
        Some(Bar { name: named(l), value: gain.median, low: Some(gain.low), high: Some(gain.high), note, faint, shown, color: 0 })
    };
    let about = "How much longer a step takes without the pass; the line is the 95% interval, pale bars are within noise.";
    bars(page, "Speed", about, Axis::new("gain of speed").unit("share"), measured(m).filter_map(bar).collect());
}

fn memory(page: &mut Page, m: &Measured) {
    let bar = |l: &Line, saved: Option<i64>, what: &str| {
        let saved = saved.filter(|b| *b != 0)?;
        let note = format!("{}: {} {} {what}", named(l), human_bytes(saved.unsigned_abs()), if saved > 0 { "less" } else { "more" });
        Some(Bar { name: named(l), value: saved as f64, note, ..Bar::default() })
    };
    let x = || Axis::new("bytes saved").unit("bytes");
    let planned = measured(m).filter_map(|l| bar(l, Line::saves(l.peak, l.peak_off), "planned")).collect();
    bars(page, "Memory", "Planned peak without the pass, less the peak with it. Passes that change nothing are left out.", x(), planned);
    let allocated = measured(m).filter_map(|l| bar(l, Line::saves(l.allocated, l.allocated_off), "measured")).collect();
    bars(page, "Memory, measured", "What kiln allocated on the device without the pass, less what it allocated with it.", x(), allocated);
}

fn errors(page: &mut Page, m: &Measured) {
    let bar = |l: &Line| {
        let d = l.differ.as_ref()?;
        let value = d.worst_gradient.filter(|e| *e > 0.0)?;
        let note = format!("{}, gradient of {}: {}", named(l), d.worst.as_deref().unwrap_or("?"), error(d.worst_gradient));
        Some(Bar { name: named(l), value, note, color: 1, ..Bar::default() })
    };
    let about = "Relative difference of the gradient that differs most, after one step from the same state. Passes that change no bit are left out.";
    bars(page, "What it changes in the numbers", about, Axis::new("relative difference").log(), measured(m).filter_map(bar).collect());
}

fn every_line(page: &mut Page, m: &Measured) {
    let steps = m.numbers.as_ref().map_or(0, |n| n.steps);
    let metric = m.numbers.as_ref().map_or("loss", |n| &n.metric);
    let after = format!("{metric} after {steps} steps");
    let headers =
        ["pass", "sites", "gain", "95%", "verdict", "planned bytes", "measured bytes", metric, "gradients", "worst gradient", "of", &after];
    let cell = |value: Option<f64>, shown: String| value.map_or("-".to_string(), |v| number(v, &shown));
    let bytes = |b: Option<i64>| {
        cell(
            b.map(|b| b as f64),
            b.map_or(String::new(), |b| format!("{}{}", if b > 0 { "-" } else { "+" }, human_bytes(b.unsigned_abs()))),
        )
    };
    let row = |l: &Line| {
        let gain = l.gain.filter(|_| l.found == Found::Measured);
        let mut cells = vec![named(l), cell(l.differ.as_ref().map(|_| l.sites as f64), l.sites.to_string())];
        cells.push(match l.verdict {
            Some(Verdict::WithinNoise) if gain.is_some() => "within noise".into(),
            _ => cell(gain.map(|g| g.median), gain.map_or(String::new(), |g| format!("{:+.2}%", 100.0 * g.median))),
        });
        cells.push(gain.map_or("-".into(), |g| range(&g)));
        cells.push(match (l.found, l.verdict) {
            (Found::Measured, Some(Verdict::Faster)) => "faster".into(),
            (Found::Measured, Some(Verdict::Slower)) => "slower".into(),
            (Found::Measured, Some(Verdict::WithinNoise)) => "within noise".into(),
            (Found::Failed, _) => format!("does not run: {}", l.reason.as_deref().unwrap_or_default()),
            _ => l.gains(),
        });
        cells.extend([bytes(Line::saves(l.peak, l.peak_off)), bytes(Line::saves(l.allocated, l.allocated_off))]);
        let of = |f: fn(&super::side::Differences) -> Option<f64>| {
            l.differ.as_ref().map_or("-".into(), |d| f(d).map_or(error(None), |e| number(e, &error(Some(e)))))
        };
        cells.extend([of(|d| d.loss), of(|d| d.gradient), of(|d| d.worst_gradient)]);
        cells.push(l.differ.as_ref().and_then(|d| d.worst.clone()).unwrap_or("-".into()));
        cells.push(of(|d| d.loss_after));
        cells
    };
    page.heading("Every pass");
    page.text("Loss and gradients: relative difference between the step with the pass and without it, from the same state.");
    page.table("Passes", &headers, &m.ledger.iter().map(row).collect::<Vec<_>>());
}
