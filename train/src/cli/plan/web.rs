//! `kiln plan --html FILE`: what lies in memory during a step, where and for how long.

use super::names::{in_scope, names};
use crate::page::{Axis, Bar, Boxed, Cell, Chart, Layer, Page, number};
use crate::report::human_bytes;
use engine::graph::Kind;
use engine::plan::Home;
use engine::{Compiled, Graph};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Tensors that are drawn one by one; smaller ones are merged.
const MOST: usize = 1500;
/// Kinds of scopes that have a color of their own.
const GROUPS: usize = 7;
/// With fewer kinds of scopes, ops are told apart, too.
const FEW: usize = 5;
/// Points of the chart of what is alive.
const POINTS: usize = 400;
/// Lines of the table of what is alive at the peak.
const LINES: usize = 60;

pub fn page(title: &str, run: &str, programs: &[(&str, Compiled)]) -> String {
    let mut page = Page::new(&format!("Memory of {title}"));
    page.text(&format!("As planned, before anything runs. The run: {run}."));
    page.text("A program's nodes run from left to right. A buffer of the arena is drawn over the addresses and the nodes that it is needed for; programs of a run share one arena.");
    for (name, c) in programs {
        program(&mut page, name, c);
    }
    page.html()
}

/// A buffer of the arena: what is in it, and from when to when.
#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    /// Where in the model, with numbers as `*`.
    group: String,
    /// What computes it.
    op: String,
    /// `f32[8, 64]`; of scratch memory nothing.
    meta: String,
    offset: usize,
    bytes: usize,
    first: usize,
    last: usize,
}

impl Tensor {
    fn is_alive(&self, node: usize) -> bool {
        self.first <= node && node <= self.last
    }
}

/// `blocks.*.attn` for `blocks.3.attn`.
fn pattern(scope: &str) -> String {
    if scope.is_empty() {
        return "(top level)".into();
    }
    scope.split('.').map(|word| if word.parse::<usize>().is_ok() { "*" } else { word }).collect::<Vec<_>>().join(".")
}

/// All buffers of the arena.
fn tensors(c: &Compiled) -> Vec<Tensor> {
    let names = names(&c.graph);
    // The first value of a buffer gives it its name.
    let mut values: HashMap<usize, Vec<(usize, usize)>> = HashMap::new();
    for (node, spots) in c.plan.spots.iter().enumerate().filter(|(i, _)| !c.graph.nodes[*i].is_view()) {
        spots.iter().enumerate().for_each(|(out, spot)| values.entry(spot.buffer).or_default().push((node, out)));
    }
    let one = |(i, b): (usize, &engine::plan::Buffer)| {
        let Home::Arena(offset) = b.home else { return None };
        let own = values.get(&i).map_or(&[][..], |v| v);
        let node = &c.graph.nodes[own.first().map_or(b.first, |v| v.0)];
        let (name, meta) = match own {
            [] => (format!("scratch memory of {}", in_scope(node)), String::new()),
            [(node, out), rest @ ..] => {
                let more = if rest.is_empty() { String::new() } else { format!(" (then {} more in place)", rest.len()) };
                (format!("{}{more}", names[*node]), format!("{:?}", c.graph.nodes[*node].outputs[*out]))
            }
        };
        let (group, op) = (pattern(&node.scope), format!("{}{}", node.name(), if node.backward { "'" } else { "" }));
        Some(Tensor { name, group, op, meta, offset, bytes: b.bytes, first: b.first, last: b.last })
    };
    c.plan.buffers.iter().enumerate().filter_map(one).filter(|t| t.bytes > 0).collect()
}

fn program(page: &mut Page, name: &str, c: &Compiled) {
    let (m, nodes) = (&c.plan.memory, c.graph.nodes.len());
    page.heading(name);
    let sizes =
        [("state", m.state), ("activations", m.activations), ("workspace", m.workspace), ("tables and feeds", m.constants + m.feeds)];
    let sizes: Vec<String> = sizes.iter().map(|(what, b)| format!("{what} {}", human_bytes(*b as u64))).collect();
    page.text(&format!("{nodes} nodes. Peak {}: {}.", human_bytes(m.peak() as u64), sizes.join(", ")));
    let mut all = tensors(c);
    if !all.is_empty() {
        group(&mut all);
        let (peak, bytes) = peak(&all, nodes);
        // States and feeds come first, and have no place in the arena. Both charts begin behind them, so that they line up.
        let first = all.iter().map(|t| t.first).min().unwrap_or(0);
        let x = Axis::new("node").range(first as f64, nodes as f64);
        let groups = boxes(page, name, &all, nodes, x.clone());
        alive(page, name, &all, &groups, first..nodes, peak, x);
        at_peak(page, name, c, &all, peak, bytes);
    }
    states(page, name, &c.graph);
}

/// Leaves the largest groups, by bytes times nodes, and calls the rest "elsewhere". Where the model has few scopes, ops tell more.
fn group(all: &mut [Tensor]) {
    let scopes: std::collections::BTreeSet<String> = all.iter().map(|t| t.group.clone()).collect();
    if scopes.len() < FEW {
        all.iter_mut().for_each(|t| t.group = format!("{}/{}", t.group, t.op));
    }
    let mut sizes: BTreeMap<String, f64> = BTreeMap::new();
    all.iter().for_each(|t| *sizes.entry(t.group.clone()).or_default() += t.bytes as f64 * (t.last - t.first + 1) as f64);
    let mut order: Vec<(String, f64)> = sizes.into_iter().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    let kept: Vec<String> = order.into_iter().take(GROUPS).map(|o| o.0).collect();
    all.iter_mut().filter(|t| !kept.contains(&t.group)).for_each(|t| t.group = "elsewhere".into());
}

/// Bytes of buffers that are alive at each node.
fn living(all: &[Tensor], nodes: usize) -> Vec<usize> {
    let mut changes = vec![0isize; nodes + 2];
    for t in all {
        changes[t.first] += t.bytes as isize;
        changes[t.last.min(nodes) + 1] -= t.bytes as isize;
    }
    changes[..nodes]
        .iter()
        .scan(0isize, |now, change| {
            *now += change;
            Some(*now as usize)
        })
        .collect()
}

/// The node at which most is alive, and how much that is.
fn peak(all: &[Tensor], nodes: usize) -> (usize, usize) {
    let living = living(all, nodes);
    (0..nodes).fold((0, 0), |best, i| if living[i] > best.1 { (i, living[i]) } else { best })
}

/// What is drawn: the largest tensors one by one, and small ones merged where they lie close. Also how many were merged, and the largest of them.
fn drawn(all: &[Tensor], nodes: usize, most: usize) -> (Vec<Boxed>, usize, usize) {
    let mut order: Vec<&Tensor> = all.iter().collect();
    order.sort_by_key(|t| (std::cmp::Reverse(t.bytes), t.first));
    let (large, small) = order.split_at(order.len().min(most));
    let shown = |t: &&Tensor| Boxed {
        name: format!("{} {}, {}", t.name, t.meta, human_bytes(t.bytes as u64)),
        group: t.group.clone(),
        x: (t.first as f64, (t.last + 1).min(nodes) as f64),
        y: (t.offset as f64, (t.offset + t.bytes) as f64),
    };
    let mut boxes: Vec<Boxed> = large.iter().map(shown).collect();
    // Cells of a grid over time and addresses.
    let height = all.iter().map(|t| t.offset + t.bytes).max().unwrap_or(1);
    let cell = |t: &Tensor| (t.first * 64 / nodes.max(1), t.offset * 64 / height.max(1), t.group.clone());
    let mut cells: BTreeMap<_, Vec<&Tensor>> = BTreeMap::new();
    small.iter().for_each(|t| cells.entry(cell(t)).or_default().push(t));
    for ((_, _, group), own) in cells {
        let span = |f: fn(&Tensor) -> usize, g: fn(&Tensor) -> usize| {
            (own.iter().map(|t| f(t)).min().unwrap_or(0) as f64, own.iter().map(|t| g(t)).max().unwrap_or(0) as f64)
        };
        let bytes: usize = own.iter().map(|t| t.bytes).sum();
        boxes.push(Boxed {
            name: format!("{} small tensors, {} together", own.len(), human_bytes(bytes as u64)),
            group,
            x: span(|t| t.first, |t| t.last + 1),
            y: span(|t| t.offset, |t| t.offset + t.bytes),
        });
    }
    (boxes, small.len(), small.first().map_or(0, |t| t.bytes))
}

/// Returns the groups in the order of their colors.
fn boxes(page: &mut Page, name: &str, all: &[Tensor], nodes: usize, x: Axis) -> Vec<String> {
    let (boxes, merged, largest) = drawn(all, nodes, MOST);
    let merged = match merged {
        0 => String::new(),
        n => format!(" {n} tensors of {} and less are merged with others near them.", human_bytes(largest as u64)),
    };
    let mut groups: Vec<String> = vec![];
    for b in &boxes {
        if !groups.contains(&b.group) {
            groups.push(b.group.clone());
        }
    }
    let about = format!(
        "{} tensors, colored by where in the model they are computed (* is a layer's number, ' the backward pass).{merged}",
        all.len()
    );
    let y = Axis::new("address in the arena").unit("bytes");
    page.chart(&format!("{name}: the arena"), &about, &Chart::Boxes { x, y, boxes });
    groups
}

fn alive(page: &mut Page, name: &str, all: &[Tensor], groups: &[String], nodes: Range<usize>, peak: usize, x: Axis) {
    let last = nodes.end - 1;
    let mut at: Vec<usize> = nodes.clone().step_by(nodes.len().div_ceil(POINTS).max(1)).chain([peak, last]).collect();
    at.sort();
    at.dedup();
    let layer = |group: &String| {
        let own: Vec<Tensor> = all.iter().filter(|t| t.group == *group).cloned().collect();
        let living = living(&own, nodes.end);
        Layer { name: group.clone(), values: at.iter().map(|&i| living[i] as f64).collect() }
    };
    let series: Vec<Layer> = groups.iter().map(layer).collect();
    let y = Axis::new("alive").unit("bytes");
    let about = format!("Bytes of the arena that are needed at each node; most at node {peak}. Gaps between buffers are not counted.");
    page.chart(&format!("{name}: what is alive"), &about, &Chart::Area { x, y, at: at.iter().map(|&i| i as f64).collect(), series });
}

fn at_peak(page: &mut Page, name: &str, c: &Compiled, all: &[Tensor], peak: usize, bytes: usize) {
    let mut own: Vec<&Tensor> = all.iter().filter(|t| t.is_alive(peak)).collect();
    own.sort_by_key(|t| std::cmp::Reverse(t.bytes));
    let row = |t: &&Tensor| {
        let size = number(t.bytes as f64, &human_bytes(t.bytes as u64));
        let share = t.bytes as f64 / bytes.max(1) as f64;
        vec![
            t.name.clone().into(),
            t.group.clone().into(),
            t.meta.clone().into(),
            size,
            number(share, &format!("{:.1}%", 100.0 * share)),
            format!("{} to {}", t.first, t.last).into(),
        ]
    };
    let mut rows: Vec<Vec<Cell>> = own.iter().take(LINES).map(row).collect();
    let rest: usize = own.iter().skip(LINES).map(|t| t.bytes).sum();
    if rest > 0 {
        let size = number(rest as f64, &human_bytes(rest as u64));
        rows.push(vec![format!("{} smaller ones", own.len() - LINES).into(), "-".into(), "-".into(), size, "".into(), "".into()]);
    }
    let node = in_scope(&c.graph.nodes[peak]);
    let caption = format!("{name}: alive at its peak, node {peak} ({node}): {} in {} tensors", human_bytes(bytes as u64), own.len());
    page.table(&caption, &["tensor", "where", "type and shape", "bytes", "share", "nodes"], &rows);
}

/// States by the module that they are named after, optimizer states beside their parameters.
fn states(page: &mut Page, name: &str, g: &Graph) {
    let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
    for node in &g.nodes {
        if let Kind::State(s) = &node.kind {
            let (kind, path) = s.name.rsplit_once('/').map_or(("parameters", s.name.as_str()), |(kind, path)| (kind, path));
            let module = path.rsplit_once('.').map_or(path, |(module, _)| module);
            *sizes.entry(format!("{kind}: {}", pattern(module))).or_default() += node.outputs[0].bytes();
        }
    }
    let mut bars: Vec<Bar> = sizes.into_iter().map(|(name, bytes)| Bar { name, value: bytes as f64, ..Bar::default() }).collect();
    bars.sort_by(|a, b| b.value.total_cmp(&a.value));
    let left = bars.split_off(bars.len().min(25));
    if !left.is_empty() {
        let (count, value) = (left.len(), left.iter().map(|b| b.value).sum());
        bars.push(Bar { name: format!("{count} smaller ones"), value, faint: true, ..Bar::default() });
    }
    if !bars.is_empty() {
        let x = Axis::new("bytes").unit("bytes");
        page.chart(&format!("{name}: state"), "What is kept between runs, by kind and module.", &Chart::Bars { x, bars });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(offset: usize, bytes: usize, first: usize, last: usize) -> Tensor {
        Tensor { name: format!("t{offset}"), group: "g".into(), op: "op".into(), meta: "f32[1]".into(), offset, bytes, first, last }
    }

    #[test]
    fn the_peak_is_where_most_is_alive() {
        let all = [tensor(0, 100, 0, 3), tensor(100, 50, 2, 5), tensor(0, 120, 4, 5)];
        assert_eq!(living(&all, 7), [100, 100, 150, 150, 170, 170, 0]);
        assert_eq!(peak(&all, 7), (4, 170));
    }

    #[test]
    fn small_tensors_are_merged_and_none_is_lost() {
        let all: Vec<Tensor> = (0..5000).map(|i| tensor(256 * i, if i % 10 == 0 { 10_000 } else { 1 + i % 7 }, i, i + 3)).collect();
        let (boxes, merged, largest) = drawn(&all, 5004, 600);
        assert!(boxes.len() < 600 + 64 * 64 && merged == 4400 && largest == 7, "{} boxes, {merged}, {largest}", boxes.len());
        assert_eq!(boxes.iter().filter(|b| b.name.starts_with('t')).count(), 600);
        let count = |b: &Boxed| b.name.split(' ').next().and_then(|n| n.parse::<usize>().ok()).unwrap_or(0);
        assert_eq!(boxes.iter().map(count).sum::<usize>(), 4400);
        let (few, none, _) = drawn(&all[..10], 20, 600);
        assert_eq!((few.len(), none), (10, 0));
    }

    #[test]
    fn layers_share_a_color() {
        assert_eq!([pattern("blocks.3.attn"), pattern(""), pattern("loss")], ["blocks.*.attn", "(top level)", "loss"]);
    }
}
