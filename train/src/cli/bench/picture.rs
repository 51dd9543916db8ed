//! `--picture FILE --ledgers DIR`: what every pass gains in each of several ledgers, as one picture, beside what guides for such trainers promise.

use super::file::{Found, Line, Measured};
use super::stats::Verdict;
use crate::report::{COLORS, INK, ReportError};
use anyhow::{Context, Result, bail};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What optimization guides of PyTorch trainers promise of a switch like a pass: times as fast for a step, or a share of memory less. docs/measuring.md has their titles.
struct Promise {
    pass: &'static str,
    speed: Option<(f64, f64)>,
    memory: Option<(f64, f64)>,
    said: &'static str,
}

const fn promise(pass: &'static str, speed: Option<(f64, f64)>, memory: Option<(f64, f64)>, said: &'static str) -> Promise {
    Promise { pass, speed, memory, said }
}

const PROMISED: &[Promise] = &[
    promise("flash-attention", Some((1.5, 4.0)), None, "1.5-2x (CUDA Plan), 2-4x (Vision-BDH)"),
    promise("cuda-graph", Some((1.1, 1.7)), None, "1.1-1.7x (Notes), 1.2x (HYDRA), 1.15-1.25x (Trainer2)"),
    promise("fp8", Some((1.4, 2.0)), None, "1.4-2x, 40-60% of activations (Notes)"),
    promise("tf32", Some((1.1, 1.3)), None, "1.1-1.3x (HYDRA)"),
    promise("grouped-gemm", Some((1.2, 1.4)), None, "1.2-1.4x (Notes)"),
    promise("fuse-norm", None, None, "1.3-2x an op (HYDRA)"),
    promise("fuse-qk-norm", None, None, "1.3-2x an op (HYDRA)"),
    promise("fuse-pointwise", Some((1.03, 1.05)), None, "1.3-2x an op (HYDRA), 1.03-1.05x (Trainer2)"),
    promise("linear-cross-entropy", Some((1.15, 1.15)), None, "1.15x, 50-80% of the loss's memory (HYDRA)"),
    promise("recompute", Some((0.77, 0.77)), Some((0.4, 0.6)), "40-60% memory, 30% more time (HYDRA)"),
    promise("adam8bit", None, None, "50% of the optimizer's memory (HYDRA)"),
];

/// The guides, as they are called above.
const GUIDES: &str = "CUDA Plan: CUDA Optimization Plan (LoRA and replies). Vision-BDH: Vision-BDH Performance Optimization Guide. \
    HYDRA: Frontier Optimizations for HYDRA Training. Notes: CUDA Optimization Design Notes (HRM). Trainer2: Trainer2 Optimization Guide (LIoR).";

fn promised(pass: &str) -> Option<&'static Promise> {
    PROMISED.iter().find(|p| p.pass == pass)
}

/// All ledgers of a folder, by the names of their files.
fn read(dir: &Path) -> Result<Vec<(String, Measured)>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("--ledgers {}", dir.display()))?;
    let mut paths: Vec<PathBuf> =
        entries.filter_map(|e| Some(e.ok()?.path())).filter(|p| p.extension().is_some_and(|e| e == "json")).collect();
    paths.sort();
    let mut all = vec![];
    for path in paths {
        let m = Measured::read(&path)?;
        if m.ledger.is_empty() {
            bail!("{} has no ledger: it was measured without --ledger", path.display());
        }
        all.push((path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), m));
    }
    if all.is_empty() {
        bail!("--ledgers {}: no JSON files there; `kiln bench RECIPE --ledger --json FILE` writes one", dir.display());
    }
    Ok(all)
}

/// A pass's mark in the picture, of one ledger.
struct Mark {
    ledger: usize,
    /// Times as fast, with its interval.
    speed: [f64; 3],
    /// Share of the planned peak that is saved.
    memory: Option<f64>,
    real: bool,
}

fn mark(ledger: usize, line: &Line) -> Option<Mark> {
    let gain = line.gain.filter(|_| line.found == Found::Measured)?;
    let memory = line.peak.zip(line.peak_off).map(|(on, off)| 1.0 - on as f64 / off as f64);
    let speed = [gain.median, gain.low, gain.high].map(|g| 1.0 + g);
    Some(Mark { ledger, speed, memory, real: line.verdict != Some(Verdict::WithinNoise) })
}

/// Passes that gain somewhere, or that guides speak of, the largest gain first.
fn rows(ledgers: &[(String, Measured)]) -> Vec<(String, Vec<Mark>)> {
    let mut all: BTreeMap<&str, Vec<Mark>> = BTreeMap::new();
    for (i, (_, m)) in ledgers.iter().enumerate() {
        for line in &m.ledger {
            all.entry(&line.pass).or_default().extend(mark(i, line));
        }
    }
    // Half a percent of the memory is worth a row, too.
    let counts = |marks: &[Mark]| marks.iter().any(|m| m.real || m.memory.is_some_and(|m| m.abs() > 0.005));
    let mut rows: Vec<(String, Vec<Mark>)> = all
        .into_iter()
        .filter(|(pass, marks)| !marks.is_empty() && (counts(marks) || promised(pass).is_some()))
        .map(|(p, m)| (p.into(), m))
        .collect();
    let best = |marks: &[Mark]| marks.iter().filter(|m| m.real).map(|m| m.speed[0]).fold(0.0, f64::max);
    rows.sort_by(|a, b| best(&b.1).total_cmp(&best(&a.1)));
    rows
}

pub fn picture(dir: &Path, path: &Path) -> Result<()> {
    let ledgers = read(dir)?;
    let rows = rows(&ledgers);
    if rows.is_empty() {
        bail!("--ledgers {}: no pass gains anything there", dir.display());
    }
    let svg = draw(&ledgers, &rows).map_err(|e| ReportError::Draw { path: path.into(), reason: e.to_string() })?;
    crate::run::write_whole(path, &svg)?;
    Ok(())
}

const BAND: RGBColor = RGBColor(226, 226, 226);
/// Pixels: of the whole, of a row, left of the axes, and above the rows.
const WIDTH: i32 = 1250;
const ROW: i32 = 30;
const LEFT: i32 = 170;
const TOP: i32 = 92;

/// A scale from values to pixels.
struct Scale {
    values: (f64, f64),
    pixels: (i32, i32),
    log: bool,
}

impl Scale {
    fn at(&self, v: f64) -> i32 {
        let f = |v: f64| if self.log { v.ln() } else { v };
        let share = (f(v) - f(self.values.0)) / (f(self.values.1) - f(self.values.0));
        self.pixels.0 + (share.clamp(0.0, 1.0) * (self.pixels.1 - self.pixels.0) as f64).round() as i32
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

fn text<'a>(size: i32, at: HPos) -> TextStyle<'a> {
    ("sans-serif", size).into_font().color(&INK).pos(Pos::new(at, VPos::Center))
}

fn draw(ledgers: &[(String, Measured)], rows: &[(String, Vec<Mark>)]) -> Result<String, Box<dyn std::error::Error>> {
    let height = TOP + ROW * rows.len() as i32 + 64;
    let marks = || rows.iter().flat_map(|r| &r.1);
    let bands = || rows.iter().filter_map(|r| promised(&r.0));
    let speeds = marks().flat_map(|m| m.speed).chain(bands().filter_map(|p| p.speed).flat_map(|(a, b)| [a, b]));
    let (low, high) = speeds.fold((0.95f64, 1.1f64), |(low, high), v| (low.min(v), high.max(v)));
    let memories = marks().filter_map(|m| m.memory).chain(bands().filter_map(|p| p.memory).flat_map(|(a, b)| [a, b]));
    let (least, most) = memories.fold((-0.05f64, 0.1f64), |(low, high), v| (low.min(v), high.max(v)));
    let speed = Scale { values: (low * 0.98, high * 1.02), pixels: (LEFT, 640), log: true };
    let memory = Scale { values: (least - 0.02, most + 0.02), pixels: (690, 900), log: false };
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH as u32, height as u32)).into_drawing_area();
        area.fill(&WHITE)?;
        let (first, last) = (&ledgers[0].1, TOP + ROW * rows.len() as i32);
        area.draw(&Text::new(
            format!("What every pass gains: {}, {}{}", first.device, &first.date[..first.date.len().min(10)], measured_at(ledgers)),
            (LEFT, 20),
            text(18, HPos::Left),
        ))?;
        area.draw(&Text::new(GUIDES, (10, height - 14), text(12, HPos::Left)))?;
        legend(&area, ledgers)?;
        axis(
            &area,
            &speed,
            last,
            &[0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0],
            |v| format!("{v}x"),
            "a step is so many times as fast with the pass",
        )?;
        axis(&area, &memory, last, &[-0.4, -0.2, 0.0, 0.2, 0.4, 0.6, 0.8], |v| format!("{:.0}%", 100.0 * v), "planned memory saved")?;
        area.draw(&Text::new("guides promise", (920, TOP - 14), text(13, HPos::Left)))?;
        for (i, (pass, marks)) in rows.iter().enumerate() {
            row(&area, pass, marks, TOP + ROW * i as i32 + ROW / 2, (&speed, &memory))?;
        }
        area.present()?;
    }
    Ok(svg)
}

/// Of which code the ledgers are, and whether their intervals are those of today.
fn measured_at(ledgers: &[(String, Measured)]) -> String {
    if ledgers.iter().any(|(_, m)| m.turns.as_ref().is_none_or(|t| t.loads == 0.0)) {
        return ", measured at an earlier commit (intervals: 95%, without how loads differ)".into();
    }
    let commits: BTreeSet<&str> = ledgers.iter().filter_map(|(_, m)| m.versions.commit.as_deref()).collect();
    commits.into_iter().map(|commit| format!(", {commit}")).collect()
}

/// A colour for each ledger; a hollow mark is within noise.
fn legend(area: &Area, ledgers: &[(String, Measured)]) -> Drawn {
    let mut x = LEFT;
    for (i, (name, _)) in ledgers.iter().enumerate() {
        area.draw(&Circle::new((x + 6, 44), 5, COLORS[i % COLORS.len()].filled()))?;
        area.draw(&Text::new(name.clone(), (x + 16, 44), text(13, HPos::Left)))?;
        x += 34 + 7 * name.chars().count() as i32;
    }
    area.draw(&Circle::new((x + 6, 44), 4, INK.stroke_width(1)))?;
    area.draw(&Text::new("within noise", (x + 16, 44), text(13, HPos::Left)))?;
    Ok(())
}

fn axis(area: &Area, scale: &Scale, bottom: i32, ticks: &[f64], shown: impl Fn(f64) -> String, label: &str) -> Drawn {
    let mut free = i32::MIN;
    for &t in ticks.iter().filter(|t| **t >= scale.values.0 && **t <= scale.values.1) {
        let (x, even) = (scale.at(t), t == if scale.log { 1.0 } else { 0.0 });
        let style = if even { INK.stroke_width(1) } else { BLACK.mix(0.1).stroke_width(1) };
        area.draw(&PathElement::new([(x, TOP - 4), (x, bottom)], style))?;
        if x > free {
            area.draw(&Text::new(shown(t), (x, bottom + 12), text(12, HPos::Center)))?;
            free = x + 34;
        }
    }
    area.draw(&Text::new(label.to_string(), (scale.pixels.0, TOP - 14), text(13, HPos::Left)))?;
    Ok(())
}

fn row(area: &Area, pass: &str, marks: &[Mark], y: i32, (speed, memory): (&Scale, &Scale)) -> Drawn {
    area.draw(&Text::new(pass.to_string(), (LEFT - 10, y), text(14, HPos::Right)))?;
    if let Some(p) = promised(pass) {
        for (scale, band) in [(speed, p.speed), (memory, p.memory)] {
            if let Some((low, high)) = band {
                let (a, b) = (scale.at(low), scale.at(high).max(scale.at(low) + 4));
                area.draw(&Rectangle::new([(a, y - ROW / 2 + 3), (b, y + ROW / 2 - 3)], BAND.filled()))?;
            }
        }
        area.draw(&Text::new(p.said.to_string(), (920, y), text(12, HPos::Left)))?;
    }
    let count = marks.len().max(1) as i32;
    for (i, m) in marks.iter().enumerate() {
        // One below the other, so that none hides another.
        let y = y + (2 * i as i32 - count + 1) * (ROW - 8) / (2 * count);
        let color = COLORS[m.ledger % COLORS.len()];
        let [median, low, high] = m.speed.map(|s| speed.at(s));
        area.draw(&PathElement::new([(low, y), (high, y)], color.stroke_width(2)))?;
        dot(area, (median, y), color, m.real)?;
        if let Some(saved) = m.memory {
            dot(area, (memory.at(saved), y), color, saved.abs() > 0.005)?;
        }
    }
    Ok(())
}

fn dot(area: &Area, at: (i32, i32), color: RGBColor, full: bool) -> Drawn {
    area.draw(&Circle::new(at, 4, if full { color.filled() } else { WHITE.filled() }))?;
    area.draw(&Circle::new(at, 4, color.stroke_width(1)))?;
    Ok(())
}
