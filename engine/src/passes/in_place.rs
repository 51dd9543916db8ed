//! In-place execution: pointwise ops and accumulating GEMMs overwrite an input that nothing reads afterwards, and attention's gradients are
//! written where they are concatenated.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Value};
use crate::meta::DType;
use crate::ops::attention::{FlashAttentionGrad, attention};
use crate::ops::concat::{Concat, Join};
use crate::ops::matmul::{Add, Matmul};
use crate::ops::matmul_pointwise::MatmulPointwise;
use crate::ops::pointwise::Pointwise;
use crate::plan::{last_reads, view_roots};
use crate::record::Recorder;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

pub struct InPlace;

impl Switch for InPlace {
    fn name(&self) -> &'static str {
        "in-place"
    }

    fn about(&self) -> &'static str {
        "Lets pointwise ops and accumulating GEMMs overwrite an input that nothing reads afterwards: less memory, and warm cache lines. Attention writes the gradients of q, k and v into one tensor where these are slices of one projection."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Exact
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[4, 4], Init::Normal { std: 1.0 });
        let x = r.feed("x", &[5, 4], DType::F32);
        r.output("y", x.matmul(w).silu().matmul(w));
        let qkv = r.param("qkv", &[2, 3, 12], Init::Normal { std: 1.0 });
        let part = |i: usize| qkv.slice(2, 4 * i, 4 * i + 4).reshape(&[2, 3, 2, 2]);
        let loss = attention(part(0), part(1), part(2), true, 0.5).square().mean();
        r.output("d_qkv", r.grad(loss, &[qkv])[0]);
    }
}

impl Pass for InPlace {
    fn stage(&self) -> Stage {
        Stage::Lowered
    }

    fn after(&self) -> &'static [&'static str] {
        &["recompute", "fuse-pointwise", "gemm-pointwise", "fuse-quantize"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        join_gradients(g, receipt)?;
        let roots = view_roots(g);
        let last = last_reads(g, &roots);
        // Inputs of a Join are parts of its buffer, which is still needed.
        let joined: HashSet<Value> = g.nodes.iter().filter(|n| n.op::<Join>().is_some()).flat_map(|n| n.inputs.clone()).collect();
        let updates: HashSet<(Value, Value)> = g.updates.iter().copied().collect();
        for i in 0..g.nodes.len() {
            if let Some(m) = g.nodes[i].op::<Matmul>().filter(|m| m.add.is_some()) {
                // A GEMM accumulates in place if it is the last reader of that sum and reads it as no other input.
                let v = g.nodes[i].inputs[m.addend()];
                let root = roots[v.node].unwrap_or(v);
                let alone = g.nodes[i].inputs.iter().filter(|w| roots[w.node].unwrap_or(**w) == root).count() == 1;
                if alone && last[&root] == i && !g.nodes[root.node].is_source() && g.meta(root).bytes() == g.meta(v).bytes() {
                    let op = Matmul { add: Some(Add::InPlace), ..m.clone() };
                    g.nodes[i].kind = Kind::Op(Arc::new(op));
                    receipt.applied += 1;
                } else {
                    receipt.decline("the accumulated value is read again later", &g.nodes[i].scope);
                }
            }
            let (arithmetic, product) = (g.nodes[i].op::<Pointwise>().cloned(), g.nodes[i].op::<MatmulPointwise>().cloned());
            if arithmetic.is_none() && product.is_none() {
                continue;
            }
            let mut pairs = vec![];
            for (out, meta) in g.nodes[i].outputs.iter().enumerate() {
                let free = |&(k, &v): &(usize, &Value)| {
                    // Never the GEMM's own operands, which many tiles read; the pointwise inputs may come through a reshape.
                    if product.is_some() && k < 2 {
                        return false;
                    }
                    let whole = if product.is_some() { g.unshaped(v) } else { v };
                    let node = &g.nodes[whole.node];
                    // A state may be overwritten by its own update.
                    let owned = !node.is_source() || updates.contains(&(whole, Value { node: i, out }));
                    let alone = g.nodes[i].inputs.iter().filter(|w| roots[w.node].unwrap_or(**w) == whole).count() == 1;
                    let unused = pairs.iter().all(|&(used, _)| used != k);
                    g.meta(v) == meta
                        && meta.dtype.is_float()
                        && !node.is_view()
                        && owned
                        && last[&whole] == i
                        && alone
                        && unused
                        && !joined.contains(&whole)
                };
                if let Some((k, _)) = g.nodes[i].inputs.iter().enumerate().find(free) {
                    pairs.push((k, out));
                }
            }
            if pairs.is_empty() {
                receipt.decline("no input of the output's shape and type is last read here", &g.nodes[i].scope);
                continue;
            }
            receipt.applied += 1;
            g.nodes[i].kind = Kind::Op(match (arithmetic, product) {
                (Some(p), _) => Arc::new(Pointwise { in_place: pairs, ..p }),
                (_, Some(p)) => Arc::new(MatmulPointwise { in_place: pairs, ..p }),
                _ => unreachable!("one of the two"),
            });
        }
        Ok(())
    }
}

/// Where dq, dk and dv of one attention are only read to be concatenated, its kernel writes them side by side.
fn join_gradients(g: &mut Graph, receipt: &mut Receipt) -> Result<(), Error> {
    let reads = g.reads();
    // The concat -> the attention gradient whose outputs it concatenates, head after head.
    let joined: HashMap<usize, usize> = (0..g.nodes.len()).filter_map(|i| Some((i, gradients_of(g, i, &|v| reads.once(v))?))).collect();
    if joined.is_empty() {
        return Ok(());
    }
    receipt.applied += joined.len();
    let gradients: HashSet<usize> = joined.values().copied().collect();
    g.rewrite(|w, i, node, inputs| {
        if gradients.contains(&i) {
            let op = FlashAttentionGrad { joint: true, ..node.op::<FlashAttentionGrad>().expect("a gradient").clone() };
            let all = w.recorder.op1(op, inputs);
            let mut end = 0;
            let parts = node.outputs.iter().map(|part| {
                end += part.dim(1);
                all.slice(2, end - part.dim(1), end)
            });
            return Ok::<_, Error>(Some(parts.collect()));
        }
        let Some(&gradient) = joined.get(&i) else { return Ok(None) };
        let slice = w.at(Value { node: gradient, out: 0 });
        let all = slice.recorder().with_graph(|g| g.nodes[slice.value().node].inputs[0]);
        Ok(Some(vec![w.recorder.var(all).reshape(&node.outputs[0].shape)]))
    })?;
    super::dead_code::sweep(g);
    Ok(())
}

/// The attention gradient whose three outputs are all that node `i` concatenates, if it is such a concat.
fn gradients_of(g: &Graph, i: usize, once: &dyn Fn(Value) -> bool) -> Option<usize> {
    let node = &g.nodes[i];
    let of: Vec<Value> = node.inputs.iter().map(|&v| g.unshaped(v)).collect();
    let gradient = of.first()?.node;
    g.nodes[gradient].op::<FlashAttentionGrad>().filter(|a| !a.joint)?;
    let [q, k] = [0, 1].map(|out| &g.nodes[gradient].outputs[out]);
    let whole = of == [0, 1, 2].map(|out| Value { node: gradient, out }) && node.inputs.iter().chain(&of).all(|&v| once(v));
    let last = node.op::<Concat>().is_some_and(|c| c.axis == 2) && node.outputs[0].rank() == 3;
    let heads = node
        .inputs
        .iter()
        .zip(&g.nodes[gradient].outputs)
        .all(|(&v, part)| g.meta(v).shape == [q.shape[0], q.shape[1], part.dim(1) * q.dim(0)]);
    (whole && last && heads && q.shape[1] == k.shape[1] && q.dtype == k.dtype).then_some(gradient)
}
