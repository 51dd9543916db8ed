//! Two narrow products of the same large matrix read it once.

use super::{Numerics, Pass, Receipt, Settings, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Value};
use crate::meta::DType;
use crate::ops::matmul::Matmul;
use crate::ops::narrow::NarrowProducts;
use crate::ops::view::Permute;
use crate::record::Recorder;
use std::collections::HashMap;

pub struct NarrowProductsPass;

/// The large matrix is so many times as wide as what it is multiplied by.
const TIMES: usize = 8;

impl Pass for NarrowProductsPass {
    fn name(&self) -> &'static str {
        "narrow-products"
    }

    fn about(&self) -> &'static str {
        "Multiplies what flows back into an adapter by both of its narrow matrices at once: it is read once, not twice."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let old = g.clone();
        let mut pairs: HashMap<usize, (usize, usize)> = HashMap::new(); // the first of two products -> (d q, d^T p)
        for (by_row, by_column) in sites(&old) {
            match refused(&old, by_row, by_column) {
                Some(reason) => receipt.decline(reason, &old.nodes[by_row].scope),
                None => {
                    pairs.insert(by_row.min(by_column), (by_row, by_column));
                    receipt.applied += 1;
                }
            }
        }
        let mut values: Vec<Vec<Value>> = vec![];
        let mut made: HashMap<usize, Value> = HashMap::new(); // a product -> what stands for its result
        g.rewrite(|recorder, i, node, inputs| {
            if let Some(&(by_row, by_column)) = pairs.get(&i) {
                let at = |v: Value| recorder.var(values[v.node][v.out]);
                let (rows, columns) = (&old.nodes[by_row], &old.nodes[by_column]);
                let y = recorder.op(NarrowProducts, &[at(rows.inputs[0]), at(columns.inputs[1]), at(rows.inputs[1])]);
                made.insert(by_row, y[0].value());
                made.insert(by_column, y[1].value());
            }
            let new = match made.get(&i) {
                Some(&v) => vec![v],
                None => recorder.keep(node, inputs.iter().map(|v| v.value()).collect()),
            };
            values.push(new.clone());
            Ok::<_, Error>(Some(new.into_iter().map(|v| recorder.var(v)).collect()))
        })?;
        if receipt.applied > 0 {
            super::dead_code::sweep(g);
        }
        Ok(())
    }

    fn example(&self, r: &Recorder) {
        let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.3 }).cast(DType::BF16);
        let (a, b) = (param("a", &[8, 64]), param("b", &[72, 8]));
        let x = r.feed("x", &[70, 64], DType::F32).cast(DType::BF16);
        let loss = x.linear(a).linear(b).cast(DType::F32).square().mean();
        r.output("loss", loss);
        let params: Vec<_> = r.params().into_iter().map(|p| p.1).collect();
        r.grad(loss, &params).into_iter().enumerate().for_each(|(i, g)| r.output(&format!("g{i}"), g));
    }
}

/// Products d q [m, r], of d's type, and d^T p [n, r], in f32, of the same d [m, n], far wider than r.
fn sites(g: &Graph) -> Vec<(usize, usize)> {
    let plain = |i: usize| {
        let n = &g.nodes[i];
        n.op::<Matmul>().filter(|m| m.add.is_none() && !m.bias && m.act.is_none() && n.outputs[0].rank() == 2).is_some()
    };
    // d -> the products d^T p.
    let mut turned: HashMap<Value, Vec<usize>> = HashMap::new();
    for i in (0..g.nodes.len()).filter(|&i| plain(i) && g.nodes[i].outputs[0].dtype == DType::F32) {
        let left = &g.nodes[g.nodes[i].inputs[0].node];
        if left.op::<Permute>().is_some_and(|p| p.0 == [1, 0]) {
            turned.entry(left.inputs[0]).or_default().push(i);
        }
    }
    let mut sites = vec![];
    for i in (0..g.nodes.len()).filter(|&i| plain(i)) {
        let (d, out) = (g.nodes[i].inputs[0], &g.nodes[i].outputs[0]);
        let (from, r) = (g.meta(d), out.dim(0));
        let Some(partners) = turned.get_mut(&d).filter(|_| out.dtype == from.dtype && from.dim(0) >= TIMES * r) else { continue };
        if let Some(k) = partners.iter().position(|&j| g.nodes[j].outputs[0].dim(0) == r) {
            sites.push((i, partners.remove(k)));
        }
    }
    sites
}

fn refused(g: &Graph, by_row: usize, by_column: usize) -> Option<String> {
    let (d, r) = (g.meta(g.nodes[by_row].inputs[0]), g.nodes[by_row].outputs[0].dim(0));
    let first = by_row.min(by_column);
    let inputs = [g.nodes[by_row].inputs[1], g.nodes[by_column].inputs[1]];
    if !matches!(d.dtype, DType::BF16 | DType::F16) {
        Some(format!("there is no kernel for {}", d.dtype))
    } else if !r.is_multiple_of(8) || !d.dim(0).is_multiple_of(8) || r > 32 {
        Some(format!("{} by {r} columns: not multiples of 8, or more than 32 of the narrow", d.dim(0)))
    } else if inputs.iter().any(|v| v.node >= first) {
        Some("one product needs what comes after the other".into())
    } else {
        None
    }
}
