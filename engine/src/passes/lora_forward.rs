//! Fuses LoRA's second matmul into the base layer's: [x, x A^T] [W, B]^T, one GEMM with a larger K.
//!
//! Layers with the same input x share one wide matrix [x, x A1^T, x A2^T, ..]; the columns of the other adapters are multiplied by zeros. An
//! infinity in one adapter therefore becomes a NaN in the others' layers, in a run that has already diverged.

use super::merged_qkv::transposed;
use super::pattern::is_sum;
use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Value};
use crate::meta::DType;
use crate::ops::concat::Concat;
use crate::ops::concat::extend::{Beside, Extend};
use crate::ops::matmul::Matmul;
use crate::ops::norm::add::AddRmsNorm;
use crate::ops::pointwise::Pointwise;
use crate::plan::view_roots;
use crate::record::Recorder;
use std::collections::{HashMap, HashSet};

pub struct LoraForward;

/// x must have at least so many times the columns that are appended to it, since every GEMM with x gets all of them.
const TIMES: usize = 8;
/// x must have at least so many rows for each column, so that copying the weights once more costs little.
const ROWS: usize = 4;
/// On a GPU, the row pitch of both operands is a multiple of so many elements (128 bytes in bf16).
const LINE: usize = 64;

impl Switch for LoraForward {
    fn name(&self) -> &'static str {
        "lora-forward"
    }

    fn about(&self) -> &'static str {
        "LoRA forward: x W^T + (x A^T) B^T becomes one GEMM [x, x A^T] [W, B]^T with a slightly larger K, so that the adapter's output is never written. The RMS norm that computes x leaves room for the extra columns."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn example(&self, r: &Recorder) {
        let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.2 });
        let [x, more] = ["x", "more"].map(|name| r.feed(name, &[2, 512, 256], DType::F32));
        let rows = (x + more).rms_norm(param("norm", &[256]), 1e-6);
        let adapted = |name: &str, n: usize| {
            let [a, b] = [("a", [8, 256]), ("b", [n, 8])].map(|(part, shape)| param(&format!("{name}.{part}"), &shape));
            rows.linear(param(name, &[n, 256])) + (rows.linear(a) * 2.0).linear(b)
        };
        // Too wide for merged-qkv.
        let loss = adapted("gate", 1024).silu().mean() + adapted("up", 1032).mean() + adapted("more", 1024).square().mean();
        r.output("loss", loss);
        let params: Vec<_> = r.params().into_iter().map(|p| p.1).collect();
        r.grad(loss, &params).into_iter().enumerate().for_each(|(i, g)| r.output(&format!("g{i}"), g));
    }
}

impl Pass for LoraForward {
    fn stage(&self) -> Stage {
        Stage::Lowered
    }

    fn after(&self) -> &'static [&'static str] {
        &["recompute"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let line = if settings.target == Target::Cpu { 8 } else { LINE };
        let mut groups: HashMap<usize, Vec<Site>> = HashMap::new(); // by the norm's node
        for site in sites(g) {
            let rows = site.rows(g);
            let beside = |sites: &Vec<Site>| sites.iter().map(|s| s.added(g)).sum::<usize>();
            let more = groups.get(&rows.node).map_or(0, beside) + site.added(g);
            let many = (TIMES * more > g.meta(rows).dim(0)).then(|| format!("{more} more columns are many beside the input's own"));
            match site.refused(g).or(many) {
                Some(reason) => receipt.decline(reason, &g.nodes[site.sum].scope),
                None => groups.entry(rows.node).or_default().push(site),
            }
        }
        receipt.applied = groups.values().map(|sites| sites.len()).sum();
        if receipt.applied == 0 {
            return Ok(());
        }
        let mut views: HashMap<Value, Vec<usize>> = HashMap::new(); // of a value
        view_roots(g).into_iter().enumerate().for_each(|(i, root)| root.into_iter().for_each(|v| views.entry(v).or_default().push(i)));
        let mut sums: HashMap<usize, (Value, Value)> = HashMap::new(); // a sum's node -> the extended input and the extended weights
        g.rewrite(|w, i, node, inputs| {
            let (old, recorder) = (w.old, w.recorder);
            if let Some(&(rows, terms)) = sums.get(&i) {
                let y = recorder.var(rows).matmul(recorder.var(terms));
                return Ok(Some(vec![y.reshape(&node.outputs[0].shape)]));
            }
            let Some(sites) = groups.get(&i) else { return Ok::<_, Error>(None) };
            let (op, d, rank) = (node.op::<AddRmsNorm>().expect("a norm"), node.outputs[0].dim(0), node.outputs[0].rank());
            let pitch = (d + sites.iter().map(|s| s.added(old)).sum::<usize>()).next_multiple_of(line);
            let made = recorder.op(AddRmsNorm { room: pitch - d, ..op.clone() }, inputs);
            // x A^T reads the norm's result before it is extended.
            w.put(i, &[&[made[0].slice(rank - 1, 0, d)], &made[1..]].concat());
            let beside = sites.iter().map(|site| w.at(old.nodes[site.narrow].inputs[0])).collect::<Vec<_>>();
            let flat = made[0].reshape(&[made[0].meta().rows(), pitch]);
            let whole = recorder.op1(Beside { at: d }, &[&[flat], &beside[..]].concat());
            let weights: Vec<_> = sites.iter().flat_map(|s| [s.wide, s.narrow]).map(|m| w.at(old.nodes[m].inputs[1])).collect();
            let all = recorder.op1(Extend { pitch }, &transposed(&weights).expect("checked by `refused`"));
            let mut at = 0;
            for (site, weight) in sites.iter().zip(weights.iter().step_by(2)) {
                sums.insert(site.sum, (whole.value(), all.slice(0, at, at + weight.dim(0)).t().value()));
                at += weight.dim(0);
            }
            // Later readers of x read the extended matrix's first columns.
            views.get(&Value { node: i, out: 0 }).into_iter().flatten().for_each(|&j| w.forget(j));
            Ok(Some([&[whole.reshape(&made[0].shape()).slice(rank - 1, 0, d)], &made[1..]].concat()))
        })?;
        super::dead_code::sweep(g);
        Ok(())
    }
}

/// The nodes of x W^T + (x A^T) B^T, neither matmul having another reader; `narrow` is the one of small K.
#[derive(Clone, Copy)]
struct Site {
    sum: usize,
    wide: usize,
    narrow: usize,
}

fn sites(g: &Graph) -> Vec<Site> {
    let readers = g.readers();
    let is_root = g.root_nodes();
    let product = |v: Value| {
        let (mut v, end) = (v, g.unshaped(v));
        while v != end {
            if readers[v.node].len() > 1 || is_root[v.node] {
                return None;
            }
            v = g.nodes[v.node].inputs[0];
        }
        let node = &g.nodes[v.node];
        let plain = node.op::<Matmul>().is_some_and(|m| *m == Matmul::default()) && node.outputs[0].rank() == 2;
        (plain && readers[v.node].len() == 1 && !is_root[v.node]).then_some(v.node)
    };
    let site = |sum: usize| {
        let node = &g.nodes[sum];
        let same = |v: &Value| g.meta(*v) == &node.outputs[0];
        node.op::<Pointwise>().filter(|p| is_sum(p) && node.inputs.iter().all(same))?;
        let (a, b) = (product(node.inputs[0])?, product(node.inputs[1])?);
        let terms = |m: usize| g.meta(g.nodes[m].inputs[0]).dim(0);
        let (wide, narrow) = if terms(a) > terms(b) { (a, b) } else { (b, a) };
        let alike = g.nodes[a].outputs == g.nodes[b].outputs;
        (alike && TIMES * terms(narrow) <= terms(wide)).then_some(Site { sum, wide, narrow })
    };
    (0..g.nodes.len()).filter_map(site).collect()
}

impl Site {
    /// x, the input of the wide matmul.
    fn rows(&self, g: &Graph) -> Value {
        g.unshaped(g.nodes[self.wide].inputs[0])
    }

    /// K of the narrow matmul, the adapter's rank: columns that are appended to x.
    fn added(&self, g: &Graph) -> usize {
        g.meta(g.nodes[self.narrow].inputs[0]).dim(0)
    }

    fn refused(&self, g: &Graph) -> Option<String> {
        let (rows, product) = (self.rows(g), g.meta(g.nodes[self.wide].inputs[0]));
        let weights = [self.wide, self.narrow].map(|m| g.nodes[m].inputs[1]);
        if rows.out > 0
            || g.nodes[rows.node].op::<AddRmsNorm>().is_none()
            || crate::mutant!("lora-forward-of-other-rows", g.meta(rows).dim(0) != product.dim(0), false)
        {
            Some("the input is not the result of a fused add and RMS norm, which could leave room for more columns".into())
        } else if product.dim(1) < ROWS * product.dim(0) {
            Some(format!("{} rows are too few for {} columns", product.dim(1), product.dim(0)))
        } else if weights.iter().any(|&v| g.state_role(v).is_none() || g.transpose_of(v).is_none()) {
            Some("a weight is not a parameter stored as [out, in]".into())
        } else if !product.dim(0).is_multiple_of(8) || !self.added(g).is_multiple_of(8) {
            Some(format!("K = {} or rank {} is not a multiple of 8", product.dim(0), self.added(g)))
        } else if !follows(g, g.nodes[self.narrow].inputs[0], rows.node, product.dim(0)) {
            Some("the adapter's input depends on more than the layer's input and parameters".into())
        } else {
            None
        }
    }
}

/// Whether a value can be computed right after `norm`, by pointwise ops and matmuls of fewer than `wide` columns.
fn follows(g: &Graph, v: Value, norm: usize, wide: usize) -> bool {
    let (mut left, mut seen) = (vec![v.node], HashSet::new());
    while let Some(i) = left.pop() {
        let node = &g.nodes[i];
        if i <= norm || node.is_source() || !seen.insert(i) {
            continue;
        }
        let narrow = node.op::<Matmul>().is_some() && node.outputs[0].dim(0) < wide;
        if !(narrow || node.is_view() || node.op::<Pointwise>().is_some() || node.op::<Concat>().is_some()) {
            return false;
        }
        left.extend(node.inputs.iter().map(|v| v.node));
    }
    true
}
