//! What a run shows: lines about evaluations, the progress bar, pictures of its metrics.

use crate::epochs::Epochs;
use crate::metrics;
use crate::recipe::{Metric, Picture, Task, TrainError};
use crate::report::{self, Confusion, Panel, Series};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::path::Path;

pub fn indent(text: &str) -> String {
    let plain = |c: char| if c.is_control() { '\u{b7}' } else { c };
    text.lines().map(|l| format!("  | {}", l.chars().map(plain).collect::<String>())).collect::<Vec<_>>().join("\n")
}

/// A confusion matrix as a picture, for a file of this name; None where there are too many classes.
pub fn draw_confusion(confusion: &Confusion, name: &str, step: u64, path: &Path) -> Result<Option<Vec<u8>>, TrainError> {
    let (right, total) = (confusion.right(), confusion.total());
    let title = format!("{name}, step {step}: {right} of {total} right ({:.2}%)", 100.0 * right as f64 / total as f64);
    Ok(confusion.draw(&title, path)?)
}

/// Means over an epoch's steps of what is evaluated too.
pub fn epoch_line(epochs: &Epochs, values: &[(&'static str, f64)], metrics: &[Metric]) -> String {
    let means: Vec<_> = values.iter().filter_map(|(name, _)| Some((*name, epochs.mean(name)?))).collect();
    evaluation_line(&means, metrics, None)
}

/// `loss 1.2345, accuracy 87.65% (entropy of the data 1.1000)`
pub fn evaluation_line(values: &[(&'static str, f64)], metrics: &[Metric], floor: Option<(&'static str, f64)>) -> String {
    let one = |(n, v): &(&str, f64)| format!("{n} {}", Metric::shown(metrics, n, *v));
    let all: Vec<String> = values.iter().map(one).collect();
    let floor = floor.map_or(String::new(), |(n, v)| format!(" ({n}: {v:.4})"));
    format!("{}{floor}", all.join(", "))
}

/// What training and validation found last, of each of the recipe's metrics, with what it means and which way is better.
pub fn figures(task: &dyn Task, out: &Path) -> Result<String, TrainError> {
    let records = metrics::read(&out.join("metrics.jsonl"))?.all;
    // What is not finite is null in a record.
    let last = |key: &str| records.iter().rev().find_map(|r| r.get(key)).map(|v| v.as_f64().unwrap_or(f64::NAN));
    let all = task.metrics();
    let shown = |name: &str, key: &str| last(key).map_or("-".into(), |v| Metric::shown(all, name, v));
    let row = |m: &Metric| {
        vec![m.name.into(), shown(m.name, m.name), shown(m.name, &format!("val_{}", m.name)), m.better.name().into(), m.about.into()]
    };
    let mut rows: Vec<Vec<String>> = all.iter().map(row).filter(|row| row[1] != "-" || row[2] != "-").collect();
    let mut names = vec!["metric", "training", "validation", "better", "what it is"];
    if task.without_validation()?.is_some() {
        names.remove(2);
        rows.iter_mut().for_each(|row| drop(row.remove(2)));
    }
    Ok(report::table(&names, &rows))
}

pub fn progress(steps: u64, done: u64) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    if !std::io::stderr().is_terminal() || crate::report::rank() > 0 {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left").expect("a template that parses");
    bar.set_style(style);
    bar.set_position(done);
    bar.reset_eta();
    bar
}

/// The task's pictures, as far as there is anything to draw.
pub fn draw(task: &dyn Task, out: &Path, title: &str, floor: Option<(&'static str, f64)>) -> Result<Vec<Picture>, TrainError> {
    let records = metrics::read(&out.join("metrics.jsonl"))?.all;
    let points =
        |key: &str| -> Vec<(f64, f64)> { records.iter().filter_map(|r| Some((r.get("step")?.as_f64()?, r.get(key)?.as_f64()?))).collect() };
    let mut drawn = vec![];
    for picture in task.pictures() {
        let lines = |lines: &[(String, String)]| -> Vec<(String, Vec<(f64, f64)>)> {
            lines.iter().map(|(label, key)| (label.clone(), points(key))).filter(|l| !l.1.is_empty()).collect()
        };
        let panels: Vec<_> = picture
            .panels
            .iter()
            .map(|(what, own)| (*what, Metric::label(task.metrics(), what), lines(own)))
            .filter(|p| !p.2.is_empty())
            .collect();
        if panels.is_empty() {
            continue;
        }
        let about = |what: &str| Metric::of_key(task.metrics(), what).map_or("", |m| m.0.about);
        let series: Vec<(&str, &str, Vec<Series>)> = panels
            .iter()
            .map(|(name, what, own)| (what.as_str(), about(name), own.iter().map(|(label, points)| Series { label, points }).collect()))
            .collect();
        let panels: Vec<Panel> = series.iter().map(|(what, about, series)| Panel { what, about, series, floor }).collect();
        report::curves(&out.join(picture.file), title, &panels)?;
        drawn.push(picture);
    }
    Ok(drawn)
}
