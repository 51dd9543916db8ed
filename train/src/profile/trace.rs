//! The trace that Perfetto (ui.perfetto.dev, which reads it in the browser) and chrome://tracing open: Chrome's JSON format.

use super::digest::title;
use engine::profile::{Node, Profile, Span, Track, What};
use serde_json::{Value, json};

/// One track below the other.
const TRACKS: [(Track, &str); 4] =
    [(Track::Host, "host"), (Track::Copy, "copies"), (Track::Compute, "compute"), (Track::Exchange, "exchanges")];

/// The track of `phases`.
const PHASES: usize = TRACKS.len() + 1;

/// What part of a training step node `i` of a program belongs to; none in a program without a backward pass. What comes after the last gradient is the
/// optimizer's.
fn phase(nodes: &[Node], i: usize) -> Option<&'static str> {
    let last = nodes.iter().rposition(|n| n.backward)?;
    Some(match nodes[i].backward {
        true => "backward",
        false if i < last => "forward",
        false => "optimizer",
    })
}

/// Spans of forward pass, backward pass and optimizer, also of a step that is one CUDA graph: from the first to the last of the nodes that run one after another
/// and belong to the same.
fn phases<'a>(programs: &[(&'a str, &[Node])], spans: &[Span]) -> Vec<(&'static str, &'a str, u64, u64)> {
    let mut all: Vec<(&'static str, &str, u64, u64)> = vec![];
    let mut before = None;
    for span in spans.iter().filter(|s| s.track == Track::Compute) {
        let What::Node(program, node) = span.what else { continue };
        let (own, nodes) = programs[program];
        let Some(name) = phase(nodes, node) else { continue };
        // A program that begins anew is another step.
        match all.last_mut() {
            Some(last) if before.is_some_and(|(p, n)| p == program && n <= node) && last.0 == name => last.3 = span.end,
            _ => all.push((name, own, span.start, span.end)),
        }
        before = Some((program, node));
    }
    all
}

/// The whole file. `name`: what was profiled, and on what.
pub fn trace(profile: &Profile, name: &str) -> Value {
    let about = |what: &str, tid: usize, value: Value| json!({ "ph": "M", "pid": 1, "tid": tid, "name": what, "args": value });
    let mut events = vec![about("process_name", 0, json!({ "name": name }))];
    // Most programs exchange nothing.
    let tracks = TRACKS.into_iter().filter(|(t, _)| *t != Track::Exchange || profile.spans.iter().any(|s| s.track == *t));
    for (tid, (_, track)) in (1..).zip(tracks) {
        events.push(about("thread_name", tid, json!({ "name": track })));
        events.push(about("thread_sort_index", tid, json!({ "sort_index": tid })));
    }
    for (tid, (track, _)) in (1..).zip(TRACKS) {
        // What contains another comes before it.
        let mut spans: Vec<&Span> = profile.spans.iter().filter(|s| s.track == track).collect();
        spans.sort_by_key(|s| (s.start, std::cmp::Reverse(s.end)));
        events.extend(spans.into_iter().map(|span| event(profile, span, tid)));
    }
    let programs: Vec<(&str, &[Node])> = profile.programs.iter().map(|p| (&p.name[..], &p.nodes[..])).collect();
    let phases = phases(&programs, &profile.spans);
    if !phases.is_empty() {
        events.push(about("thread_name", PHASES, json!({ "name": "phases" })));
        events.push(about("thread_sort_index", PHASES, json!({ "sort_index": PHASES })));
    }
    let us = |ns: u64| ns as f64 / 1e3;
    events.extend(phases.into_iter().map(|(name, program, start, end)| {
        json!({ "ph": "X", "pid": 1, "tid": PHASES, "ts": us(start), "dur": us(end - start), "name": name, "cat": "phase", "args": { "program": program } })
    }));
    json!({ "traceEvents": events, "displayTimeUnit": "ms" })
}

/// A span as a complete event; times are microseconds.
fn event(profile: &Profile, span: &Span, tid: usize) -> Value {
    let us = |ns: u64| ns as f64 / 1e3;
    let (name, kind, args) = match span.what {
        What::Node(program, node) => {
            let (program, node) = (&profile.programs[program], &profile.programs[program].nodes[node]);
            let shapes = |metas: &[engine::Meta]| metas.iter().map(|m| format!("{m:?}")).collect::<Vec<_>>();
            let args = json!({
                "program": program.name, "kernel": span.name, "inputs": shapes(&node.inputs), "outputs": shapes(&node.outputs),
                "flops": node.cost.flops, "bytes": node.cost.bytes, "tensor_cores": node.tensor_cores,
                "waited_us": us(span.start - span.launched),
            });
            (title(node), if node.backward { "backward" } else { "forward" }, args)
        }
        What::Copy(bytes) => (span.name.clone(), "copy", json!({ "bytes": bytes })),
        What::Other => (span.name.clone(), if span.track == Track::Host { "host" } else { "other" }, json!({})),
    };
    json!({ "ph": "X", "pid": 1, "tid": tid, "ts": us(span.start), "dur": us(span.end - span.start), "name": name, "cat": kind, "args": args })
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::profile::Clock;

    #[test]
    fn a_step_has_a_forward_pass_a_backward_pass_and_an_optimizer() {
        let node = |backward: bool| {
            let cost = engine::op::Cost { flops: 0, bytes: 0, memory_bound: true };
            let (inputs, outputs) = (vec![], vec![]);
            Node {
                op: "matmul",
                scope: String::new(),
                backward,
                inputs,
                outputs,
                cost,
                tensor_cores: false,
                multiprocessors: None,
                aside: false,
            }
        };
        let (train, eval) = ([false, false, true, true, false].map(node), [node(false)]);
        let ran = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 0), (0, 1), (1, 0), (0, 2)];
        let spans = (0..).zip(ran).map(|(i, (program, node))| {
            let what = What::Node(program, node);
            Span { start: 10 * i, end: 10 * i + 9, launched: 10 * i, track: Track::Compute, what, name: "kernel".into() }
        });
        let spans: Vec<Span> = spans.collect();
        let found: Vec<(&str, u64, u64)> =
            phases(&[("train", &train), ("eval", &eval)], &spans).into_iter().map(|p| (p.0, p.2, p.3)).collect();
        let [first, second] =
            [[("forward", 0, 19), ("backward", 20, 39), ("optimizer", 40, 49)], [("forward", 50, 69), ("backward", 80, 89), ("", 0, 0)]];
        assert_eq!(found, [&first[..], &second[..2]].concat());
    }

    #[test]
    fn spans_become_events_in_order_on_named_tracks() {
        let span = |track, start, end, name: &str| Span { start, end, launched: start, track, what: What::Other, name: name.into() };
        let spans = vec![span(Track::Host, 0, 10, "run"), span(Track::Host, 0, 900, "step"), span(Track::Compute, 500, 1_500, "kernel")];
        let profile = Profile { clock: Clock::Host, programs: vec![], spans, dropped: 0 };
        let trace = trace(&profile, "a test");
        let of = |kind: &str| trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == kind).cloned().collect::<Vec<_>>();
        let names: Vec<Value> = of("X").iter().map(|e| json!([e["tid"], e["name"], e["ts"], e["dur"]])).collect();
        let [step, run, kernel] = [json!([1, "step", 0.0, 0.9]), json!([1, "run", 0.0, 0.01]), json!([3, "kernel", 0.5, 1.0])];
        assert_eq!(names, [step, run, kernel], "what contains another comes first");
        assert_eq!(of("M").iter().filter(|e| e["name"] == "thread_name").count(), 3);
    }
}
