//! `kiln plan --dump PASS`: a program's graph before and after a pass, as text.

use super::names::{bare, names, numbered, value};
use anyhow::{Result, bail};
use engine::graph::{Kind, Node};
use engine::passes::{Mode, Target, When, known, run_watched};
use engine::{Graph, Switches};
use similar::{Algorithm, ChangeTag, DiffOp, TextDiff, capture_diff_slices};
use std::collections::{HashMap, HashSet, VecDeque};

/// The graph as a pass found it and as it left it, a line for each node.
pub struct Dumped {
    pub before: String,
    pub after: String,
}

pub fn dump(mut g: Graph, switches: &Switches, target: Target, pass: &str) -> Result<Dumped> {
    let passes = engine::extension::passes();
    let Some(found) = passes.iter().find(|p| p.name() == pass) else {
        if engine::passes::all().any(|s| s.name() == pass) {
            bail!("--dump {pass}: it is a setting of how a program runs, and leaves the graph as it is");
        }
        bail!("--dump {pass}: there is no such pass{}", known(pass, passes.iter().map(|p| p.name())));
    };
    if switches.mode(*found, target) == Mode::Off {
        bail!("--dump {pass}: the pass is off here (--pass {pass}=auto switches it on)");
    }
    let (mut before, mut dumped) = (None, Dumped { before: String::new(), after: String::new() });
    run_watched(&mut g, switches, target, &mut |name, when, g| {
        if name == pass {
            let (found, text) = match (when, &before) {
                (When::Before, _) | (_, None) => (Named::new(g), &mut dumped.before),
                (_, Some(before)) => (Named::after(g, before), &mut dumped.after),
            };
            *text = text_of(g, &found.names);
            before.get_or_insert(found);
        }
    })?;
    Ok(dumped)
}

/// The names of a graph's nodes, and what they are matched by, the surest first: their lines without numbers, these without inputs, names without numbers.
struct Named {
    alike: [Vec<String>; 3],
    names: Vec<String>,
}

impl Named {
    fn new(g: &Graph) -> Named {
        Named { alike: alike(g), names: names(g) }
    }

    /// Of a graph that was made from another one: what is in both keeps its name. Numbers count what shares a name, so that one node more would give
    /// all that follow another name.
    fn after(g: &Graph, before: &Named) -> Named {
        let alike = alike(g);
        let mut kept: Vec<Option<usize>> = vec![None; g.nodes.len()];
        for op in capture_diff_slices(Algorithm::Myers, &before.alike[0], &alike[0]) {
            if let DiffOp::Equal { old_index, new_index, len } = op {
                (0..len).for_each(|i| kept[new_index + i] = Some(old_index + i));
            }
        }
        // What was moved, what reads something else, what became something else: in their order.
        for (old, new) in before.alike.iter().zip(&alike) {
            let used: HashSet<usize> = kept.iter().flatten().copied().collect();
            let mut left: HashMap<&str, VecDeque<usize>> = HashMap::new();
            (0..old.len()).filter(|i| !used.contains(i)).for_each(|i| left.entry(&old[i]).or_default().push_back(i));
            for (to, text) in kept.iter_mut().zip(new).filter(|(to, _)| to.is_none()) {
                *to = left.get_mut(text.as_str()).and_then(VecDeque::pop_front);
            }
        }
        let own = kept.iter().map(|i| i.map(|i| before.names[i].clone())).collect();
        Named { names: numbered(&alike[2], own), alike }
    }
}

fn alike(g: &Graph) -> [Vec<String>; 3] {
    let bare = bare(g);
    [lines(g, &bare, true), lines(g, &bare, false), bare]
}

/// Longer parameters of an op are cut.
const LONG: usize = 120;

/// A line a node: its name, its op, what it reads, shapes and types of its outputs.
fn lines(g: &Graph, names: &[String], inputs: bool) -> Vec<String> {
    let line = |(i, node): (usize, &Node)| {
        let inputs: Vec<String> = node.inputs.iter().filter(|_| inputs).map(|&v| value(g, names, v)).collect();
        let outputs: Vec<String> = node.outputs.iter().map(|m| format!("{m:?}")).collect();
        let what = match &node.kind {
            Kind::State(s) => format!("{:?}", s.role).to_lowercase(),
            Kind::Feed(_) => "feed".into(),
            Kind::Const(numbers) => format!("const of {}", numbers.len()),
            Kind::Grad => "grad".into(),
            Kind::Op(op) => short(&format!("{op:?}")),
        };
        format!("{} = {what} ({}) -> {}\n", names[i], inputs.join(", "), outputs.join(", "))
    };
    g.nodes.iter().enumerate().map(line).collect()
}

/// The lines of all nodes. Then what is read after a run, and what states become.
fn text_of(g: &Graph, names: &[String]) -> String {
    let mut text = lines(g, names, true).concat();
    for (name, v) in &g.outputs {
        text += &format!("output {name} = {}\n", value(g, names, *v));
    }
    for (state, v) in &g.updates {
        text += &format!("update {} = {}\n", names[state.node], value(g, names, *v));
    }
    text
}

fn short(text: &str) -> String {
    match text.char_indices().nth(LONG) {
        Some((at, _)) => format!("{}..", &text[..at]),
        None => text.into(),
    }
}

impl Dumped {
    /// The lines that are only before (`-`) or only after (`+`), in their order.
    pub fn changes(&self) -> String {
        let diff = TextDiff::from_lines(&self.before, &self.after);
        let sign = |tag| if tag == ChangeTag::Delete { "-" } else { "+" };
        let changed = diff.iter_all_changes().filter(|c| c.tag() != ChangeTag::Equal);
        changed.map(|c| format!("{} {}", sign(c.tag()), c.value())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::{DType, Recorder};

    fn graph() -> Graph {
        let r = Recorder::new();
        let x = r.feed("x", &[4, 8], DType::F32);
        let twice = |scope: &str| r.scope(scope, || (x.silu() * 2.0).sum());
        r.output("y", twice("a") + twice("b"));
        r.finish()
    }

    #[test]
    fn only_what_a_pass_changed_is_shown() {
        let (switches, target) = (Switches::default(), Target::Cpu);
        let d = dump(graph(), &switches, target, "fuse-pointwise").unwrap();
        let changes = d.changes();
        assert!(changes.lines().all(|l| l.starts_with("- ") || l.starts_with("+ ")), "{changes}");
        assert!(changes.contains("- a/") && changes.contains("+ a/") && changes.contains("f32[4, 8]"), "{changes}");
        assert!(d.before.contains("feed x = feed () -> f32[4, 8]\n") && !changes.contains("feed x = feed"), "{changes}");
        assert!(d.after.contains("output y = "), "{}", d.after);
        // What another scope is called does not depend on this one.
        let alone = dump(graph(), &switches, target, "flash-attention").unwrap().before;
        assert_eq!(alone.lines().filter(|l| l.starts_with("b/")).count(), alone.lines().filter(|l| l.starts_with("a/")).count());
        let same = dump(graph(), &switches, target, "flash-attention").unwrap();
        assert!(same.before == same.after && same.changes().is_empty());
        // Twice the same text.
        assert_eq!(dump(graph(), &switches, target, "fuse-pointwise").unwrap().after, d.after);
    }

    #[test]
    fn what_cannot_be_dumped_says_why() {
        let refused = |pass: &str| dump(graph(), &Switches::default(), Target::Cpu, pass).err().unwrap().to_string();
        assert!(refused("fuse-pointwize").contains("did you mean 'fuse-pointwise'?"));
        assert!(refused("cuda-graph").contains("how a program runs"));
        assert!(refused("bf16").contains("off here (--pass bf16=auto"));
    }
}
