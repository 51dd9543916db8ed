//! What a router chose is weighed while it is added.

use super::fuse_norm::binary;
use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Uses, Value};
use crate::meta::DType;
use crate::ops::pointwise::Bin;
use crate::ops::rows::scaled::ScatterScaled;
use crate::ops::rows::{ScatterRows, Write};
use crate::record::Recorder;
use std::sync::Arc;

pub struct FuseRouting;

impl Switch for FuseRouting {
    fn name(&self) -> &'static str {
        "fuse-routing"
    }

    fn about(&self) -> &'static str {
        "Scales rows while they are added to those of a table: the product is not written, nor what its gradient would gather."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn example(&self, r: &Recorder) {
        let w = r.param("w", &[24, 24], Init::Normal { std: 0.3 });
        let gate = r.param("gate", &[24, 1], Init::Normal { std: 0.3 });
        let x = r.feed("x", &[70, 24], DType::F32);
        let rows = x.matmul(gate).reshape(&[1, 70]).top_k(31).reshape(&[31]); // none twice
        let chosen = x.gather_rows_once(rows);
        let h = x.matmul(w).scatter_add_rows_once(rows, chosen.matmul(w) * chosen.matmul(gate).sigmoid());
        let loss = h.silu().mean();
        r.output("loss", loss);
        let grads = r.grad(loss, &[w, gate]);
        grads.into_iter().enumerate().for_each(|(i, g)| r.output(&format!("g{i}"), g));
    }
}

impl Pass for FuseRouting {
    fn stage(&self) -> Stage {
        Stage::Fused
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let uses = Uses::new(g);
        for i in 0..g.nodes.len() {
            match site(g, &uses, i) {
                Some(Ok([source, scale])) => {
                    let node = &mut g.nodes[i];
                    node.inputs = vec![node.inputs[0], node.inputs[1], source, scale];
                    node.kind = Kind::Op(Arc::new(ScatterScaled));
                    receipt.applied += 1;
                }
                Some(Err(reason)) => receipt.decline(reason, &g.nodes[i].scope),
                None => {}
            }
        }
        if receipt.applied > 0 {
            super::dead_code::sweep(g);
        }
        Ok(())
    }
}

/// Rows and a number for each, whose product is added to a table; or why the product is made first.
fn site(g: &Graph, uses: &Uses, i: usize) -> Option<Result<[Value; 2], &'static str>> {
    g.nodes[i].op::<ScatterRows>().filter(|s| s.write == Write::AddOnce)?;
    let product = g.nodes[i].inputs[2];
    let [a, b] = binary(g, product.node, Bin::Mul)?;
    let meta = g.meta(product);
    let mut column = meta.shape.clone();
    *column.last_mut()? = 1;
    let fits = |source: Value, scale: Value| g.meta(source).shape == meta.shape && g.meta(scale).shape == column;
    let pair = if fits(a, b) {
        [a, b]
    } else if fits(b, a) {
        [b, a]
    } else {
        return None;
    };
    Some(if crate::mutant!("fuse-routing-of-rows-read-elsewhere", uses.only_reader(product.node).is_none(), false) {
        Err("the scaled rows are read elsewhere")
    } else if g.meta(pair[0]).dtype != meta.dtype {
        Err("the rows are of another type than their product")
    } else {
        Ok(pair)
    })
}
