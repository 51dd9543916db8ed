//! The digest for people: a short form for the terminal, Markdown, and a page.

use super::digest::{Digest, Row};
use super::roof::Bound;
use crate::page::{Axis, Bar, Chart, Page, Point, Series, number};
use crate::report::{human_bytes, human_count, table};

/// A column: its name, the number, and how it is shown. The first column is the name.
type Column = (&'static str, fn(&Row) -> Option<f64>, fn(f64) -> String);

const COLUMNS: &[Column] = &[
    ("nodes", |r| Some(r.nodes), |v| format!("{v:.0}")),
    ("ms", |r| Some(r.ms), |v| format!("{v:.3}")),
    ("share", |r| Some(r.share), percent),
    ("TFLOP/s", |r| Some(r.tflop_per_s).filter(|v| *v > 0.0), digits),
    ("GB/s", |r| Some(r.gb_per_s).filter(|v| *v > 0.0), digits),
    ("times the roofline", |r| r.times_roof, |v| format!("{v:.2}x")),
    ("of bandwidth", |r| r.of_bandwidth, percent),
    // What a CPU does not have.
    ("tensor cores", |r| Some(r.tensor_cores), percent),
    ("of their peak", |r| r.of_tensor_cores, percent),
    ("SMs", |r| r.multiprocessors, percent),
];

/// How many columns at the end are of GPUs alone.
const OF_GPUS: usize = 3;

/// The columns that say something of this device: a CPU has no tensor cores.
fn columns(d: &Digest) -> &'static [Column] {
    if d.on_gpu { COLUMNS } else { &COLUMNS[..COLUMNS.len() - OF_GPUS] }
}

/// Three digits that count.
fn digits(v: f64) -> String {
    let after = (2 - v.abs().max(1e-9).log10().floor() as i32).clamp(0, 6);
    format!("{v:.*}", after as usize)
}

fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

fn bound(row: &Row) -> String {
    match row.bound {
        Some(Bound::Compute) => "compute".into(),
        Some(Bound::Memory) => "memory".into(),
        Some(Bound::Latency) => "latency".into(),
        None => "-".into(),
    }
}

/// Rows as text, each with what bounds it at the end.
fn cells(rows: &[Row], most: usize, columns: &[Column]) -> Vec<Vec<String>> {
    let shown = |r: &Row, c: &Column| c.1(r).map_or("-".into(), c.2);
    let row = |r: &Row| std::iter::once(r.name.clone()).chain(columns.iter().map(|c| shown(r, c))).chain([bound(r)]).collect();
    rows.iter().take(most).map(row).collect()
}

fn headers(first: &'static str, columns: &[Column]) -> Vec<&'static str> {
    std::iter::once(first).chain(columns.iter().map(|c| c.0)).chain(["bound by"]).collect()
}

/// Lines that say what a step is made of.
fn summary(d: &Digest) -> Vec<String> {
    let mut lines = vec![
        format!("{} on {}", d.title, d.device),
        format!(
            "{:.2} ms a step ({:.2} before, {:.2} after the profile); {:.2} ms while it was profiled ({:+.1}%), over {} steps",
            d.plain(),
            d.plain_ms[0],
            d.plain_ms[1],
            d.step_ms,
            100.0 * d.overhead,
            d.steps
        ),
        format!("measured by {}", d.clock),
    ];
    if let Some(why) = &d.one_by_one {
        lines.push(format!("nodes were launched one by one, because CUPTI was not used: {why}"));
    }
    // A CPU has no tensor cores, and what its profile costs is noise.
    let (of_plain, tensor_cores) = match d.on_gpu {
        true => (
            format!("; {} of a step without the profile", percent(d.busy_ms / d.plain())),
            format!(", {} on tensor cores", percent(d.tensor_cores)),
        ),
        false => (String::new(), String::new()),
    };
    lines.push(format!(
        "busy {:.2} ms of {:.2} ({}{of_plain}), idle {:.2}; {} of the busy time is in nodes of the model{tensor_cores}",
        d.busy_ms,
        d.step_ms,
        percent(d.busy_ms / d.step_ms),
        d.idle_ms,
        percent(d.attributed),
    ));
    if d.exchange_ms > 0.0 {
        let (all, hidden) = (d.exchange_ms, d.hidden_ms);
        lines.push(format!("{all:.3} ms of exchanges with other ranks beside that, {hidden:.3} of them while kernels ran"));
    }
    lines.extend(cost_of_profiling(d));
    lines.push(format!(
        "{} FLOPs and {} moved at least: {}",
        human_count(d.flops),
        human_bytes(d.bytes as u64),
        match d.roof_ms {
            Some(roof) => format!("{roof:.2} ms by the roofline ({})", d.roof.from),
            None => format!("the roofline is not known ({})", d.roof.from),
        }
    ));
    if d.dropped > 0 {
        lines.push(format!("{} records were lost: profile fewer steps (--steps)", d.dropped));
    }
    lines
}

/// What a GPU's profile adds to a step, where it is more than noise: short kernels are stretched most.
fn cost_of_profiling(d: &Digest) -> Option<String> {
    let longer = 1e3 * (d.step_ms - d.plain());
    (d.overhead > 0.02 && d.on_gpu).then(|| {
        format!(
            "profiling itself makes a step {:.1}% longer, {:.2} us for each of {:.0} launches: {}",
            100.0 * d.overhead,
            longer / d.launches.max(1.0),
            d.launches,
            match d.one_by_one {
                None => "it is in the idle time, and the times of kernels are their own",
                Some(_) => "it is in the times of the nodes",
            }
        )
    })
}

/// Gaps that are worth a line, as (after, before, how often, ms).
fn gaps(d: &Digest, most: usize) -> Vec<Vec<String>> {
    let row = |g: &super::Gap| vec![g.after.clone(), g.before.clone(), format!("{:.1}", g.count), format!("{:.3}", g.ms)];
    d.gaps.iter().take(most).map(row).collect()
}

/// For the terminal: what a step is made of, and the ops that take longest.
pub fn short(d: &Digest) -> String {
    let mut text = summary(d).join("\n") + "\n\n";
    text += &table(&headers("op", columns(d)), &cells(&d.ops, 12, columns(d)));
    if d.ops.len() > 12 {
        text += &format!("and {} more ops\n", d.ops.len() - 12);
    }
    text
}

/// A table in Markdown.
fn listed(headers: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: Vec<&str>| format!("| {} |\n", cells.into_iter().map(|c| c.replace('|', "\\|")).collect::<Vec<_>>().join(" | "));
    let rule: String = headers.iter().enumerate().map(|(i, _)| if i == 0 { "|---" } else { "|---:" }).collect();
    let rows: String = rows.iter().map(|row| line(row.iter().map(String::as_str).collect())).collect();
    format!("{}{rule}|\n{rows}\n", line(headers.to_vec()))
}

/// Nodes in the digest; all of them are in the JSON.
const NODES: usize = 40;
const GAPS: usize = 12;

pub fn markdown(d: &Digest) -> String {
    let mut text = format!("# Profile of {}\n\n", d.title);
    text += &summary(d).into_iter().map(|line| format!("- {line}\n")).collect::<String>();
    for (title, first, rows, most) in sections(d) {
        text += &format!("\n## {title}\n\n{}", listed(&headers(first, columns(d)), &cells(rows, most, columns(d))));
    }
    if !d.gaps.is_empty() {
        text += &format!("\n## {GAPS_TITLE}\n\n{}", listed(&GAP_HEADERS, &gaps(d, GAPS)));
    }
    text
}

const GAPS_TITLE: &str = "Gaps: the device was idle";
const GAP_HEADERS: [&str; 4] = ["after", "before", "in a step", "ms"];

/// The tables: title, first column, rows, the most that are shown.
fn sections(d: &Digest) -> Vec<(&'static str, &'static str, &[Row], usize)> {
    let all = [
        ("By op", "op", &d.ops[..], usize::MAX),
        ("By layer", "layer", &d.layers[..], usize::MAX),
        ("Nodes that take longest", "node", &d.nodes[..], NODES),
        ("On the device, but in no node", "what", &d.others[..], NODES),
        ("Copies between host and device", "what", &d.copies[..], NODES),
    ];
    all.into_iter().filter(|s| !s.2.is_empty()).collect()
}

/// The digest as one HTML file.
pub fn page(d: &Digest) -> String {
    let mut page = Page::new(&format!("Profile of {}", d.title));
    for line in summary(d) {
        page.text(&line);
    }
    page.chart(
        "Time of a step by op",
        if d.on_gpu {
            "milliseconds of a step; orange: on tensor cores, blue: not; the roofline is the shortest time that the op's FLOPs and bytes allow"
        } else {
            "milliseconds of a step; the roofline is the shortest time that the op's FLOPs and bytes allow"
        },
        &Chart::Bars { x: Axis::new("ms of a step"), bars: d.ops.iter().take(15).map(bar).collect() },
    );
    if let Some(chart) = roofline(d) {
        page.chart("Roofline", "each dot is an op that computes: on the line it could not be faster", &chart);
    }
    for (title, first, rows, most) in sections(d) {
        let cell = |r: &Row, c: &Column| c.1(r).map_or("-".into(), |v| number(v, &c.2(v)));
        let row =
            |r: &Row| [r.name.clone().into()].into_iter().chain(columns(d).iter().map(|c| cell(r, c))).chain([bound(r).into()]).collect();
        page.table(title, &headers(first, columns(d)), &rows.iter().take(most).map(row).collect::<Vec<_>>());
    }
    let gap = |g: &super::Gap| {
        vec![
            g.after.clone().into(),
            g.before.clone().into(),
            number(g.count, &format!("{:.1}", g.count)),
            number(g.ms, &format!("{:.3}", g.ms)),
        ]
    };
    page.table(GAPS_TITLE, &GAP_HEADERS, &d.gaps.iter().take(GAPS).map(gap).collect::<Vec<_>>());
    page.text("trace.json beside this file shows every launch: open it in Perfetto or in chrome://tracing.");
    page.html()
}

fn bar(row: &Row) -> Bar {
    let roof = row.roof_ms.map(|roof| format!("roofline {roof:.3} ms"));
    let note = roof.into_iter().chain((row.tensor_cores > 0.5).then(|| "on tensor cores".into())).collect::<Vec<_>>().join(", ");
    Bar { name: row.name.clone(), value: row.ms, note, color: usize::from(row.tensor_cores > 0.5), ..Bar::default() }
}

/// Arithmetic intensity against what was reached, under the device's roofs.
fn roofline(d: &Digest) -> Option<Chart> {
    let dots = d.ops.iter().filter(|r| r.flops > 0.0 && r.bytes > 0.0 && r.tflop_per_s > 0.0);
    let dots: Vec<Point> = dots.map(|r| Point::Named(r.flops / r.bytes, r.tflop_per_s, r.name.clone())).collect();
    let memory = d.roof.memory?;
    let x = |p: &Point| match p {
        Point::At(x, _) | Point::Named(x, ..) => *x,
    };
    let (least, most) = dots.iter().map(x).fold((f64::MAX, 0.0f64), |(low, high), x| (low.min(x), high.max(x)));
    if dots.is_empty() {
        return None;
    }
    let roofs = [("FP8", d.roof.fp8), ("bf16", d.roof.half), ("TF32", d.roof.tf32), ("f32", d.roof.f32)];
    let roof = |(name, peak): (&str, Option<f64>)| {
        let peak = peak?;
        let knee = peak / memory;
        let at = |x: f64| Point::At(x, (x * memory).min(peak) / 1e12);
        let points = [least.min(knee) / 2.0, knee, most.max(knee) * 2.0].map(at).to_vec();
        Some(Series { name: format!("roof, {name}"), points, guide: true, dashed: true, ..Series::default() })
    };
    let mut series = vec![Series { name: "ops".into(), points: dots, dots: true, ..Series::default() }];
    series.extend(roofs.into_iter().filter_map(roof));
    Some(Chart::Plot { x: Axis::new("FLOPs a byte").log(), y: Axis::new("TFLOP/s").log(), series })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(overhead: f64, on_gpu: bool, one_by_one: Option<&str>) -> Digest {
        Digest {
            on_gpu,
            one_by_one: one_by_one.map(str::to_owned),
            plain_ms: [1.0, 1.0],
            step_ms: 1.0 + overhead,
            overhead,
            launches: 200.0,
            ..Digest::default()
        }
    }

    /// Short steps are stretched by their own profile: the digest says by how much, and where it is.
    #[test]
    fn what_a_profile_costs_is_said_where_it_counts() {
        let said = cost_of_profiling(&digest(0.046, true, None)).unwrap();
        assert!(said.contains("4.6% longer, 0.23 us for each of 200 launches") && said.contains("idle time"), "{said}");
        assert!(cost_of_profiling(&digest(0.046, true, Some("no CUPTI"))).unwrap().contains("times of the nodes"));
        assert_eq!(cost_of_profiling(&digest(0.01, true, None)), None);
        assert_eq!(cost_of_profiling(&digest(0.3, false, None)), None, "on a CPU it is noise");
        assert!(summary(&digest(0.046, true, None)).contains(&said));
    }

    #[test]
    fn a_cpu_has_no_tensor_cores_and_no_share_of_a_plain_step() {
        let [gpu, cpu] = [true, false].map(|on_gpu| {
            let d = Digest { ops: vec![Row { name: "matmul".into(), ..Row::default() }], ..digest(0.046, on_gpu, None) };
            [short(&d), markdown(&d), page(&d)]
        });
        for said in ["tensor cores", "of a step without the profile"] {
            assert!(gpu.iter().all(|text| text.contains(said)), "{said}");
            assert!(!cpu.iter().any(|text| text.contains(said)), "{said}");
        }
    }
}
