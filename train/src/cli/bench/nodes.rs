//! A step's time, node by node.

use crate::report::table;
use anyhow::Result;

pub fn node(t: &engine::cuda::Timed) -> serde_json::Value {
    serde_json::json!({
        "op": t.op, "scope": t.scope, "backward": t.backward, "outputs": t.outputs.iter().map(|m| format!("{m:?}")).collect::<Vec<_>>(),
        "inputs": t.inputs.iter().map(|m| format!("{m:?}")).collect::<Vec<_>>(), "ms": t.ms, "bytes": t.cost.bytes, "flops": t.cost.flops,
    })
}

/// By op and direction, the longest first; then by what each node does: a layer's are one line with those of all other layers.
pub fn profile(all: &[engine::cuda::Timed]) -> Result<()> {
    let total: f64 = all.iter().map(|t| t.ms as f64).sum();
    let by = |name: &dyn Fn(&engine::cuda::Timed) -> String| {
        let mut groups: std::collections::BTreeMap<String, (usize, f64, u64, u64)> = Default::default();
        for t in all {
            let g = groups.entry(name(t)).or_default();
            *g = (g.0 + 1, g.1 + t.ms as f64, g.2 + t.cost.bytes, g.3 + t.cost.flops);
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
        let row = |(name, (count, ms, bytes, flops)): (String, (usize, f64, u64, u64))| {
            vec![
                name,
                count.to_string(),
                format!("{ms:.3}"),
                format!("{:.1}", 1e3 * ms / count as f64),
                format!("{:.1}%", 100.0 * ms / total),
                format!("{:.0}", bytes as f64 / ms / 1e6),
                format!("{:.1}", flops as f64 / ms / 1e9),
            ]
        };
        groups.into_iter().map(row).collect::<Vec<_>>()
    };
    let columns = |first| [first, "nodes", "ms", "us each", "share", "GB/s", "TFLOP/s"];
    let op = |t: &engine::cuda::Timed| format!("{}{}", t.op, if t.backward { " (backward)" } else { "" });
    // With the same output, nodes differ in how much they do.
    let kind =
        |t: &engine::cuda::Timed| format!("{} {:?}, {} MFLOP, {} KB", op(t), t.outputs[0], t.cost.flops / 1_000_000, t.cost.bytes / 1000);
    out!("{total:.2} ms in {} nodes, launched one by one", all.len());
    out_part!("{}", table(&columns("op"), &by(&op)));
    let kinds = by(&kind);
    out_part!("{}", table(&columns("node"), &kinds[..kinds.len().min(40)]));
    Ok(())
}
