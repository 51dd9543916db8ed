//! Rounds the results of pointwise ops to FP8 in the kernel that computes them, so that they are neither written nor read in a wider type.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Value};
use crate::meta::DType;
use crate::ops::matmul::{Matmul, Sums};
use crate::ops::pointwise::Pointwise;
use crate::ops::quantize::{Quantize, Rounded};
use crate::ops::view::Reshape;
use crate::record::{Recorder, Var};
use std::collections::BTreeMap;

pub struct FuseQuantize;

impl Switch for FuseQuantize {
    fn name(&self) -> &'static str {
        "fuse-quantize"
    }

    fn about(&self) -> &'static str {
        "With fp8: rounds the results of pointwise ops (SwiGLU, GELU, their gradients) in the kernel that computes them, instead of writing them in bf16 and reading them again."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered // one rounding less
    }

    fn example(&self, r: &Recorder) {
        let (x, y) = (r.feed("x", &[2, 16, 32], DType::F32), r.feed("y", &[2, 16, 32], DType::F32));
        let w = r.feed("w", &[32, 32], DType::F32);
        let scale = |name: &str| r.state(name, &[1], DType::F32, Init::Full(1.0 / 64.0));
        let rounded = |v: Var<'_>, by: Var<'_>| r.op(Quantize::new(DType::E4M3, true, true), &[r.var(v.value()), r.var(by.value())])[0];
        let (a, b) = (scale("a"), scale("b"));
        let (h, other) = (x.swiglu(y), x * y + 1.0);
        let w8 = rounded(w, b).t();
        let f32 = Matmul { dtype: Some(DType::F32), scaled: Some(Sums::F32), ..Matmul::default() };
        r.output("h", r.op1(f32.clone(), &[rounded(h.reshape(&[32, 32]), a), w8, a, b]));
        r.output("other", r.op1(f32, &[rounded(other.reshape(&[32, 32]), a), w8, a, b]));
        r.output("read twice", other.sum());
    }
}

impl Pass for FuseQuantize {
    fn stage(&self) -> Stage {
        Stage::Lowered
    }

    fn after(&self) -> &'static [&'static str] {
        &["fp8", "fuse-pointwise", "gemm-pointwise"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        // Pointwise node -> (which of its outputs, the node that rounds it).
        let mut sites: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
        for (q, node) in g.nodes.iter().enumerate() {
            let Some(op) = node.op::<Quantize>() else { continue };
            let v = g.unshaped(node.inputs[0]);
            if *op == Quantize::new(op.results[0].dtype, op.results[0].rows, op.results[0].columns)
                && g.nodes[v.node].op::<Pointwise>().is_some()
            {
                sites.entry(v.node).or_default().push((v.out, q));
            }
        }
        sites.values_mut().for_each(|s| s.sort());
        sites.retain(|&p, rounded| match declined(g, p, rounded) {
            Some(reason) => {
                receipt.decline(reason, &g.nodes[p].scope);
                false
            }
            None => {
                receipt.applied += rounded.len();
                true
            }
        });
        let (readers, is_root) = (g.readers(), g.root_nodes());
        g.rewrite(|w, i, node, inputs| {
            let Some(rounded) = sites.get(&i) else { return Ok::<_, Error>(None) };
            let old = w.old;
            let shape = old.meta(old.nodes[rounded[0].1].inputs[0]).shape.clone();
            let mut x: Vec<Var> = inputs.iter().map(|v| v.reshape(&shape)).collect();
            x.extend(rounded.iter().map(|&(_, q)| w.at(old.nodes[q].inputs[1])));
            w.recorder.set_place(node);
            // A result that something else reads, too, is also written as it is.
            let results = rounded.iter().map(|&(out, q)| {
                let v = Value { node: i, out };
                let other = |&r: &usize| old.nodes[r].inputs.contains(&v) && r != q && !leads_to(old, &readers, &is_root, r, q);
                let kept = (is_root[i] || readers[i].iter().any(other)).then(|| node.outputs[out].dtype);
                Rounded { kept, ..old.nodes[q].op::<Quantize>().expect("a site").results[0].clone() }
            });
            let op = Quantize { expr: node.op::<Pointwise>().expect("a site").expr.clone(), results: results.collect() };
            let mut made = w.recorder.op(op.clone(), &x).into_iter();
            // Outputs that nothing else reads stand for themselves, and are swept.
            let mut result = w.keep(node, inputs);
            for (&(out, q), one) in rounded.iter().zip(&op.results) {
                let mut next = |is: bool| is.then(|| made.next().expect("an output for each"));
                let (rows, columns, own, parts) = (next(one.rows), next(one.columns), next(one.kept.is_some()), next(true));
                w.put(q, &[rows, columns, parts].into_iter().flatten().collect::<Vec<_>>());
                if let Some(own) = own {
                    result[out] = own.reshape(&node.outputs[out].shape);
                }
            }
            Ok(Some(result))
        })?;
        super::dead_code::sweep(g);
        Ok(())
    }
}

/// Whether node `r` is a reshape that only `q` reads.
fn leads_to(g: &Graph, readers: &[Vec<usize>], is_root: &[bool], r: usize, q: usize) -> bool {
    g.nodes[r].op::<Reshape>().is_some() && !is_root[r] && readers[r].iter().all(|&n| n == q || leads_to(g, readers, is_root, n, q))
}

/// Why the results of a pointwise node cannot be rounded in its own kernel.
fn declined(g: &Graph, p: usize, rounded: &[(usize, usize)]) -> Option<&'static str> {
    let node = &g.nodes[p];
    let op = node.op::<Pointwise>().expect("a pointwise node");
    let whole = |v: &Value| g.meta(*v).shape == node.outputs[0].shape && g.meta(*v).dtype.is_float();
    let ready = |q: usize| g.state_through(g.nodes[q].inputs[1], |n| n.is_view()).is_some();
    let shapes: Vec<_> = rounded.iter().map(|&(_, q)| &g.meta(g.nodes[q].inputs[0]).shape).collect();
    if !rounded.iter().map(|r| r.0).eq(0..node.outputs.len()) {
        Some("one of its results is not rounded, or twice")
    } else if op.expr.draws() || !node.inputs.iter().all(whole) {
        Some("it broadcasts an input, or draws random numbers")
    } else if !rounded.iter().all(|&(_, q)| ready(q)) {
        Some("its scale follows from the result itself (scaling=current)")
    } else if shapes.windows(2).any(|w| w[0] != w[1]) {
        Some("its results are rounded in different shapes")
    } else {
        None
    }
}
