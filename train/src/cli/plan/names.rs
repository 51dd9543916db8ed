//! Names of a graph's nodes that stay the same when others come and go.

use engine::Graph;
use engine::graph::{Kind, Node, Value};
use std::collections::{HashMap, HashSet};

/// For every node: the name of a state or feed; of an op `blocks.3.attn/matmul`, a `'` if it belongs to the backward pass, and a number from the
/// second of that name on.
pub fn names(g: &Graph) -> Vec<String> {
    numbered(&bare(g), vec![None; g.nodes.len()])
}

/// The same without numbers: nodes may share a name.
pub fn bare(g: &Graph) -> Vec<String> {
    let name = |node: &Node| match &node.kind {
        Kind::State(s) => format!("state {}", s.name),
        Kind::Feed(name) => format!("feed {name}"),
        _ => in_scope(node),
    };
    g.nodes.iter().map(name).collect()
}

/// Names for nodes that have none yet: the first number that is free.
pub fn numbered(bare: &[String], mut names: Vec<Option<String>>) -> Vec<String> {
    let mut taken: HashSet<String> = names.iter().flatten().cloned().collect();
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for (first, name) in bare.iter().zip(&mut names).filter(|(_, name)| name.is_none()) {
        let count = seen.entry(first).or_default();
        let new = loop {
            *count += 1;
            let new = if *count == 1 { first.clone() } else { format!("{first}#{count}") };
            if taken.insert(new.clone()) {
                break new;
            }
        };
        *name = Some(new);
    }
    names.into_iter().flatten().collect()
}

/// `blocks.3.attn/matmul'`
pub fn in_scope(node: &Node) -> String {
    let slash = if node.scope.is_empty() { "" } else { "/" };
    format!("{}{slash}{}{}", node.scope, node.name(), if node.backward { "'" } else { "" })
}

/// A value by its node's name, with the number of the output where the node has several.
pub fn value(g: &Graph, names: &[String], v: Value) -> String {
    match g.nodes[v.node].outputs.len() {
        1 => names[v.node].clone(),
        _ => format!("{}:{}", names[v.node], v.out),
    }
}
