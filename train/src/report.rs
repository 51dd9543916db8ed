//! What a run shows to people: curves as an SVG, confusion matrices, numbers with units, aligned tables.

mod confusion;
pub mod lettering;
mod shown;

pub use confusion::Confusion;
pub use shown::{shown, shown_in_brief, shown_in_json, shown_in_line};

/// Prints a line, of several ranks on the first alone; a reader that has gone away (a closed pipe, a full disk) is no reason to stop training.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write;
        if $crate::report::rank() == 0 {
            let _ = std::io::stdout().write_all($crate::report::shown(&format!("{}\n", format_args!($($text)*))).as_bytes());
        }
    }};
}

/// Prints a line to stderr, on the same terms; ranks other than the first put their number in front.
#[macro_export]
macro_rules! warn {
    ($($text:tt)*) => {{
        use std::io::Write;
        // In one piece: other ranks write to the same place.
        let line = match $crate::report::rank() {
            0 => format!("{}\n", format_args!($($text)*)),
            rank => format!("rank {rank}: {}\n", format_args!($($text)*)),
        };
        let _ = std::io::stderr().write_all($crate::report::shown_in_brief(&line).as_bytes());
    }};
}

/// Which rank this process is; 0 where it is alone.
static RANK: AtomicUsize = AtomicUsize::new(0);

/// Which rank this process is, of those that train together: only the first speaks for all.
pub fn rank() -> usize {
    RANK.load(Ordering::Relaxed)
}

/// Called once, by a process that finds out that it is one of several.
pub fn set_rank(rank: usize) {
    RANK.store(rank, Ordering::Relaxed);
}

use plotters::element::DashedPathElement;
use plotters::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A word of a command line as a shell reads it.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.into() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("cannot write {}: {cause}", .path.display())]
    Io { path: PathBuf, cause: std::io::Error },
    #[error("nothing to plot in {}: {what}", .path.display())]
    Empty { path: PathBuf, what: String },
    #[error("cannot draw {}: {reason}", .path.display())]
    Draw { path: PathBuf, reason: String },
}

/// A line of the chart: (step, loss), by ascending step.
#[derive(Debug, Clone, Copy)]
pub struct Series<'a> {
    pub label: &'a str,
    pub points: &'a [(f64, f64)],
}

/// Lines over one axis. `floor` is a level to compare with, drawn dashed.
#[derive(Debug, Clone, Copy)]
pub struct Panel<'a> {
    /// What the numbers are.
    pub what: &'a str,
    /// What they mean, in a line below the title; it may be empty.
    pub about: &'a str,
    pub series: &'a [Series<'a>],
    pub floor: Option<(&'a str, f64)>,
}

/// Of one panel.
const SIZE: (u32, u32) = (960, 540);
/// The first six are Okabe and Ito's: told apart also by the colour-blind.
pub const COLORS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 80, 40),
    RGBColor(110, 110, 110),
];
/// Lines that have room in the legend.
const LABELS: usize = 12;
pub const INK: RGBColor = RGBColor(60, 60, 60);
/// A series is thinned to the extremes of this many stretches; the chart is about as many pixels wide.
const STRETCHES: usize = 1000;

/// Draws an SVG into a run's folder, one panel below the other. Points that are not finite are left out, those far outside the rest of their series are drawn
/// at the edge; a panel says how many of each.
pub fn curves(path: &Path, title: &str, panels: &[Panel]) -> Result<(), ReportError> {
    let empty = |what: String| ReportError::Empty { path: path.to_path_buf(), what };
    if panels.is_empty() || panels.iter().any(|p| p.series.is_empty()) {
        return Err(empty("no series".into()));
    }
    let mut kept = Vec::new();
    for p in panels {
        let mut finite = Vec::new();
        for s in p.series {
            let points = s.points.iter().copied();
            let own: Vec<_> = points.filter(|(x, y)| plottable(*x) && plottable(*y)).collect();
            if own.is_empty() {
                return Err(empty(format!("series {:?} has no finite point", s.label)));
            }
            finite.push((s.label, own));
        }
        kept.push(finite);
    }
    let title = &shown_in_line(title);
    let draw = || -> Result<String, Box<dyn std::error::Error>> {
        let mut svg = String::new();
        let area = SVGBackend::with_string(&mut svg, (SIZE.0, SIZE.1 * panels.len() as u32)).into_drawing_area();
        area.fill(&WHITE)?;
        for (i, (part, (panel, finite))) in area.split_evenly((panels.len(), 1)).iter().zip(panels.iter().zip(&kept)).enumerate() {
            draw(part, if i == 0 { title } else { "" }, panel, finite)?;
        }
        area.present()?;
        drop(area);
        Ok(svg)
    };
    let svg = draw().map_err(|e| ReportError::Draw { path: path.to_path_buf(), reason: e.to_string() })?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    crate::files::write_inside(crate::files::folder_of(path), &name, svg.as_bytes())
        .map_err(|cause| ReportError::Io { path: path.to_path_buf(), cause })
}

/// Finite as an f32, which every loss is; beyond it the arithmetic of the axes would overflow.
fn plottable(value: f64) -> bool {
    (value as f32).is_finite()
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// One panel; `series` are its lines without points that are not finite.
fn draw(area: &Area, title: &str, panel: &Panel, series: &[(&str, Vec<(f64, f64)>)]) -> Result<(), Box<dyn std::error::Error>> {
    let points = || series.iter().flat_map(|(_, p)| p);
    let not_finite = panel.series.iter().map(|s| s.points.len()).sum::<usize>() - points().count();
    let floor = panel.floor.filter(|(_, level)| plottable(*level));
    let (left, right) = padded(span(points().map(|p| p.0)), 0.0);
    let ranges = series.iter().flat_map(|(_, p)| <[f64; 2]>::from(robust_range(p)));
    let (bottom, top) = padded(span(ranges.chain(floor.map(|f| f.1))), 0.04);
    let outside = points().filter(|p| p.1 < bottom || p.1 > top).count();

    let text = |size: u32| ("sans-serif", size).into_font().color(&INK);
    let area = if title.is_empty() { area.clone() } else { area.margin(12, 0, 0, 0).titled(title, text(22))? };
    let area = if panel.about.is_empty() { area } else { area.margin(4, 0, 0, 0).titled(&cut(panel.about), text(14))? };
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .margin_right(28)
        .x_label_area_size(48)
        .y_label_area_size(68)
        .build_cartesian_2d(left..right, bottom..top)?;
    let notes = [(not_finite, "not finite"), (outside, "off the scale")];
    let notes: Vec<_> = notes.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
    let x_title = match notes.is_empty() {
        true => "step".into(),
        false => format!("step (points: {})", notes.join(", ")),
    };
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.09))
        .axis_style(INK)
        .label_style(text(14))
        .axis_desc_style(text(15))
        .x_labels(9)
        .y_labels(9)
        .x_label_formatter(&|x| trimmed(&human_count(*x)))
        .y_label_formatter(&|y| tick(*y, top - bottom))
        .x_desc(x_title)
        .y_desc(panel.what)
        .draw()?;

    for (i, (label, points)) in series.iter().enumerate() {
        let color = COLORS[i % COLORS.len()];
        let width = if points.len() <= STRETCHES { 2 } else { 1 };
        let shown = thinned(points).into_iter().map(|(x, y)| (x, y.clamp(bottom, top)));
        // A few points, or a single one, would hardly show as a line.
        let dots = if points.len() <= 50 { 3 } else { 0 };
        let style = color.filled().stroke_width(width);
        // Where the colours begin anew, lines are dashed.
        let drawn = match i < COLORS.len() {
            true => chart.draw_series(LineSeries::new(shown, style).point_size(dots))?,
            false => chart.draw_series(DashedLineSeries::new(shown, 8, 4, style))?,
        };
        if i < LABELS {
            let dash = if i < COLORS.len() { (22, 0) } else { (6, 4) };
            let line = move |(x, y)| DashedPathElement::new([(x, y), (x + 22, y)], dash.0, dash.1, color.stroke_width(2));
            drawn.label(*label).legend(move |at| line(at).into_dyn());
        }
    }
    if let Some((label, level)) = floor {
        let style = INK.stroke_width(2);
        let line = [(left, level), (right, level)];
        chart
            .draw_series(DashedLineSeries::new(line, 8, 6, style))?
            .label(format!("{label} ({})", trimmed(&tick(level, (top - bottom) / 100.0))))
            .legend(move |(x, y)| DashedPathElement::new([(x, y), (x + 22, y)], 6, 4, style).into_dyn());
    }
    chart
        .configure_series_labels()
        .position(if series.len() > 3 { SeriesLabelPosition::UpperLeft } else { SeriesLabelPosition::UpperRight }) // courses fan out to the right
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.2))
        .label_font(text(15))
        .legend_area_size(28)
        .margin(12)
        .draw()?;
    Ok(())
}

/// As much of a sentence as the width of a panel has room for.
fn cut(text: &str) -> String {
    const ROOM: usize = 135;
    match text.char_indices().nth(ROOM) {
        Some((at, _)) => format!("{} ..", &text[..text[..at].rfind(' ').unwrap_or(at)]),
        None => text.into(),
    }
}

fn span(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
}

/// Room at both ends, and never an empty range.
fn padded((low, high): (f64, f64), share: f64) -> (f64, f64) {
    let width = high - low;
    let pad = if width > 0.0 { share * width } else { low.abs().max(1.0) * 0.1 };
    (low - pad, high + pad)
}

/// The range of y without outliers, each series on its own, for one of a few points is no outlier of another.
fn robust_range(points: &[(f64, f64)]) -> (f64, f64) {
    let y: Vec<f64> = points.iter().map(|p| p.1).collect();
    let last = y.len() - 1;
    let residuals: Vec<f64> = (0..y.len())
        .map(|i| {
            let radius = 2.min(i).min(last - i);
            let around = sorted(y[i - radius..=i + radius].to_vec());
            (y[i] - around[radius]).abs()
        })
        .collect();
    // A spike is far from the median of its neighbours, compared with the other points.
    let noise = sorted(residuals.clone())[last * 9 / 10];
    let calm = y.iter().zip(residuals).filter(|(_, r)| *r <= 6.0 * noise);
    let calm = sorted(calm.map(|(y, _)| *y).collect());

    // What stays for longer may use three times the width of the inner 96%, on each side of it.
    let (low, high) = (calm[0], calm[calm.len() - 1]);
    let rank = (calm.len() - 1) as f64;
    let inner_low = calm[(rank * 0.02).ceil() as usize];
    let inner_high = calm[(rank * 0.98).floor() as usize];
    let width = inner_high - inner_low;
    if width <= 0.0 {
        return (low, high);
    }
    (low.max(inner_low - 3.0 * width), high.min(inner_high + 3.0 * width))
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

/// Of every stretch of a long series the lowest and the highest point.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= 2 * STRETCHES {
        return points.to_vec();
    }
    let stretches = points.chunks(points.len().div_ceil(STRETCHES));
    let extremes = stretches.flat_map(|stretch| {
        let by_loss = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let low = stretch.iter().min_by(by_loss);
        let high = stretch.iter().max_by(by_loss);
        let mut pair: Vec<_> = low.into_iter().chain(high).copied().collect();
        pair.sort_by(|a, b| a.0.total_cmp(&b.0));
        pair
    });
    extremes.collect()
}

/// As many decimals as an axis of this width needs.
fn tick(value: f64, width: f64) -> String {
    if !(1e-6..1e6).contains(&width) {
        return format!("{value:.2e}");
    }
    let decimals = (2.0 - width.log10().floor()).clamp(0.0, 8.0) as usize;
    format!("{value:.decimals$}")
}

/// "5.00K" is "5K" on an axis.
fn trimmed(number: &str) -> String {
    let digits = number.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = &number[digits.len()..];
    let short = match digits.contains('.') {
        true => digits.trim_end_matches('0').trim_end_matches('.'),
        false => digits,
    };
    format!("{short}{unit}")
}

// ---- numbers with units

/// 7842000000 is "7.30 GiB".
pub fn human_bytes(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    scaled(bytes as f64, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB", " PiB"])
}

/// 10400000.0 is "10.4M".
pub fn human_count(count: f64) -> String {
    if !count.is_finite() || count.abs() < 1000.0 && count.fract() == 0.0 {
        return count.to_string();
    }
    scaled(count, 1000.0, &["", "K", "M", "B", "T"])
}

/// Three digits of `value` in the largest unit that fits, and never "1000K" for "1.00M".
fn scaled(mut value: f64, base: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value.abs() >= base - 0.5 && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    let decimals = match value.abs() {
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}{}", units[unit])
}

/// "340ms", "12.3s", "1m 05s", "2h 03m", "3d 04h".
pub fn human_time(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds < 0.9995 {
        return format!("{:.0}ms", seconds * 1e3);
    }
    if seconds < 59.95 {
        return format!("{seconds:.1}s");
    }
    let whole = seconds.round() as u64;
    if whole < 3600 {
        return format!("{}m {:02}s", whole / 60, whole % 60);
    }
    let minutes = (seconds / 60.0).round() as u64;
    if minutes < 24 * 60 {
        return format!("{}h {:02}m", minutes / 60, minutes % 60);
    }
    let hours = (seconds / 3600.0).round() as u64;
    format!("{}d {:02}h", hours / 24, hours % 24)
}

/// Columns two spaces apart; a column of numbers is aligned to the right. A cell stays in its line, whatever is in it.
pub fn table(headers: &[&str], rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).chain([headers.len()]).max().unwrap_or(0);
    let cell = |row: &[String], c: usize| row.get(c).map_or(String::new(), |text| shown_in_line(text).into_owned());
    let header: Vec<String> = headers.iter().map(|h| h.to_string()).collect();
    let layout: Vec<(usize, bool)> = (0..columns)
        .map(|c| {
            let width = rows.iter().chain([&header]).map(|r| cell(r, c).chars().count()).max();
            let filled = || rows.iter().map(|r| cell(r, c)).filter(|text| !["", "-"].contains(&text.as_str()));
            (width.unwrap_or(0), filled().next().is_some() && filled().all(|text| is_number(&text)))
        })
        .collect();
    let mut text = String::new();
    for row in [&header].into_iter().chain(rows) {
        let cells = layout.iter().enumerate().map(|(c, (width, right))| match right {
            true => format!("{:>width$}", cell(row, c)),
            false => format!("{:<width$}", cell(row, c)),
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// A number, with its unit if it has one: "-3", "7.31 GiB", "12%", "1m 05s".
fn is_number(text: &str) -> bool {
    let unsigned = text.trim_start_matches(['+', '-']);
    let begins = unsigned.starts_with(|c: char| c.is_ascii_digit());
    (begins || ["NaN", "inf"].contains(&unsigned)) && text.split_whitespace().count() <= 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn falling(n: usize) -> Vec<(f64, f64)> {
        (0..n).map(|i| (i as f64, 2.0 + 8.0 * (-(i as f64) / 30.0).exp())).collect()
    }

    #[test]
    fn draws_a_curve() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("loss.svg");
        let (train, eval) = (falling(100_000), [(50.0, 3.0), (100.0, f64::NAN)]);
        let series = [Series { label: "train <a&b>", points: &train }, Series { label: "eval", points: &eval }];
        let panel = Panel { what: "loss", about: "of <a> token", series: &series, floor: Some(("entropy", 1.5)) };
        curves(&path, "tiny", &[panel]).unwrap();
        let svg = fs::read_to_string(&path).unwrap();
        assert!(svg.len() < 60_000, "{} bytes", svg.len());
        for text in ["tiny", "of &lt;a&gt; token", "train &lt;a&amp;b&gt;", "eval", "entropy (1.5)", "(points: 1 not finite)"] {
            assert!(svg.contains(text), "{text}");
        }
        curves(&path, "tiny", &[panel, Panel { what: "speed", floor: None, ..panel }]).unwrap();
        let both = fs::read_to_string(&path).unwrap();
        assert!(both.contains("speed") && both.len() > svg.len());
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().collect();
        assert_eq!(left.len(), 1);
    }

    #[test]
    fn one_point_is_enough_and_none_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("loss.svg");
        let one = |path: &Path, series: &[Series]| {
            curves(path, "", &[Panel { what: "loss", about: "", series, floor: None }]).map_err(|e| e.to_string())
        };
        let curve = |points: &[(f64, f64)]| one(&path, &[Series { label: "train", points }]);
        for y in [0.0, -4.0, 1e-300, -1e38, 1e38] {
            curve(&[(7.0, y)]).unwrap();
        }
        assert!(curve(&[]).unwrap_err().contains("\"train\" has no finite point"));
        assert!(curve(&[(1.0, f64::NAN)]).is_err());
        assert!(one(&path, &[]).is_err() && curves(&path, "", &[]).is_err());
        let absent = dir.path().join("absent/loss.svg");
        let e = one(&absent, &[Series { label: "a", points: &[(0.0, 0.0)] }]);
        assert!(e.unwrap_err().contains("absent/loss.svg"));
    }

    #[test]
    fn a_spike_does_not_flatten_the_curve() {
        let mut points = falling(200);
        let whole = span(points.iter().map(|p| p.1));
        assert_eq!(robust_range(&points), whole);
        points[150].1 = 1e6;
        points[160].1 = -1e6;
        let (low, high) = robust_range(&points);
        assert!((2.0..2.1).contains(&low) && high == whole.1, "{low} {high}");
        // Too long for a spike, too short for the inner 96%.
        points[100..104].fill((100.0, 1e6));
        let (_, high) = robust_range(&points);
        assert!((10.0..40.0).contains(&high), "{high}");
        assert_eq!(robust_range(&[(0.0, 3.0), (1.0, 1.0)]), (1.0, 3.0));
    }

    #[test]
    fn thinning_keeps_the_extremes() {
        let mut points = falling(12_345);
        points[7_777].1 = 99.0;
        let thin = thinned(&points);
        assert!(thin.len() <= 2 * STRETCHES && thin.is_sorted_by_key(|p| p.0));
        assert!(thin.contains(&points[7_777]) && thin.contains(&points[12_344]));
        assert_eq!(thinned(&points[..2000]), points[..2000]);
    }

    #[test]
    fn axis_numbers() {
        let texts = ["5.00K", "10.5M", "100", "-0.50", "1.00e7", "0"].map(trimmed);
        assert_eq!(texts, ["5K", "10.5M", "100", "-0.5", "1.00e7", "0"]);
        assert_eq!([tick(2.5, 9.0), tick(2.5, 0.02), tick(2.5e9, 1e9)], ["2.50", "2.5000", "2.50e9"]);
    }

    #[test]
    fn units() {
        let bytes = [0, 1023, 1024, 7_849_000_000, (1 << 20) - 1, 148 << 30, u64::MAX];
        let texts = ["0 B", "1023 B", "1.00 KiB", "7.31 GiB", "1.00 MiB", "148 GiB", "16384 PiB"];
        assert_eq!(bytes.map(human_bytes), texts);
        let counts = [0.0, 999.0, 12.5, 1000.0, 10_400_000.0, 999_999.0, -1.24e9, 1e16, f64::NAN];
        let texts = ["0", "999", "12.5", "1.00K", "10.4M", "1.00M", "-1.24B", "10000T", "NaN"];
        assert_eq!(counts.map(human_count), texts);
        let times = [0.34, 12.34, 59.96, 65.0, 3599.6, 7380.0, 86_399.0, 273_600.0];
        let texts = ["340ms", "12.3s", "1m 00s", "1m 05s", "1h 00m", "2h 03m", "1d 00h", "3d 04h"];
        assert_eq!(times.map(|t| human_time(Duration::from_secs_f64(t))), texts);
    }

    #[test]
    fn tables() {
        let row = |cells: &[&str]| cells.iter().map(|c| c.to_string()).collect::<Vec<_>>();
        let rows = [
            row(&["fp8", "auto", "84", "7.31 GiB", "24: K=48 is not a multiple of 16"]),
            row(&["cuda-graph", "require", "3", "-"]),
            row(&["größe", "off", "", "512 B", "none"]),
        ];
        let text = "\
pass        mode     sites    memory  declined
fp8         auto        84  7.31 GiB  24: K=48 is not a multiple of 16
cuda-graph  require      3         -
größe       off                512 B  none
";
        assert_eq!(table(&["pass", "mode", "sites", "memory", "declined"], &rows), text);
        assert_eq!(table(&["a", "b"], &[row(&["x\ny\u{1b}", "z"])]), "a           b\nx\\ny\\u{1b}  z\n");
        assert_eq!(table(&[], &[]), "\n");
    }
}
