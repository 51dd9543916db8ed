//! Names of a graph's nodes that stay the same when others come and go.

use engine::Graph;
use engine::graph::{Kind, Node, Value};
use std::collections::HashMap;

/// For every node: the name of a state or feed; of an op `blocks.3.attn/matmul`, a `'` if it belongs to the backward pass, and a number from the
/// second of that name on.
pub fn names(g: &Graph) -> Vec<String> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut name = |node: &Node| {
        let first = match &node.kind {
            Kind::State(s) => format!("state {}", s.name),
            Kind::Feed(name) => format!("feed {name}"),
            _ => in_scope(node),
        };
        let count = seen.entry(first.clone()).or_default();
        *count += 1;
        if *count == 1 { first } else { format!("{first}#{count}") }
    };
    g.nodes.iter().map(&mut name).collect()
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
