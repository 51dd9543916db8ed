//! Fuses a GEMM with the pointwise ops that alone read its result, on the GPU.

use super::pattern::Reads;
use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Value};
use crate::kernel::{Arch, Io};
use crate::meta::{DType, Layout, contiguous, is_contiguous};
use crate::op::Op;
use crate::ops::matmul::Matmul;
use crate::ops::matmul_pointwise::MatmulPointwise;
use crate::ops::pointwise::{Expr, Pointwise};
use crate::record::Recorder;
use std::collections::HashMap;

pub struct GemmPointwise;

/// Above this K, cuBLASLt's faster GEMM is worth more than not writing the result.
const MOST_K: usize = 512;

impl Switch for GemmPointwise {
    fn name(&self) -> &'static str {
        "gemm-pointwise"
    }

    fn about(&self) -> &'static str {
        "Fuses pointwise ops into the bf16 or f16 GEMM (of small K) whose result only they read: that result is never written. Nothing to do on the CPU."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered // and the GEMM's result is not rounded in between
    }

    fn example(&self, r: &Recorder) {
        let (w, x) = (r.param("w", &[3, 16, 24], Init::Normal { std: 1.0 }), r.feed("x", &[3, 10, 16], DType::F32));
        let (other, rng) = (r.feed("other", &[2, 5, 3, 24], DType::F32), r.feed("rng", &[4], DType::I32));
        let product = x.cast(DType::BF16).matmul(w.cast(DType::BF16)).cast(DType::F32);
        let gate = product.reshape(&[3, 2, 5, 24]).permute(&[1, 2, 0, 3]).relu();
        let y = (other * gate).dropout(0.2, rng);
        r.output("gate", gate);
        r.output("y", y);
    }

    fn needs_gpu(&self) -> bool {
        true
    }
}

impl Pass for GemmPointwise {
    fn stage(&self) -> Stage {
        Stage::Lowered
    }

    fn after(&self) -> &'static [&'static str] {
        &["fuse-pointwise"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let Target::Cuda(arch) = settings.target else {
            receipt.notes.push("the program runs on the CPU".into());
            return Ok(());
        };
        let reads = g.reads();
        let mut sites: HashMap<usize, Site> = HashMap::new();
        for i in 0..g.nodes.len() {
            let found = products(g, i, &reads).into_iter().map(|(k, m)| Site::new(g, i, k, m, arch));
            let mut reason = None;
            for site in found {
                match site {
                    Ok(site) => {
                        sites.insert(i, site);
                        reason = None;
                        receipt.applied += 1;
                        break;
                    }
                    Err(why) => reason = Some(why),
                }
            }
            if let Some(why) = reason {
                receipt.decline(why, &g.nodes[i].scope);
            }
        }
        g.rewrite(|w, i, node, _| {
            let Some(site) = sites.get(&i) else { return Ok::<_, Error>(None) };
            let x: Vec<_> = site.inputs.iter().map(|(v, shape)| w.at(*v).reshape(shape)).collect();
            let y = w.recorder.op(site.op.clone(), &x);
            Ok(Some(y.iter().map(|y| y.reshape(&node.outputs[0].shape)).collect()))
        })?;
        super::dead_code::sweep(g);
        Ok(())
    }
}

/// Inputs of a pointwise node that are matmuls, looking through views, and that nothing else reads: (input, the matmul's node).
fn products(g: &Graph, i: usize, reads: &Reads) -> Vec<(usize, usize)> {
    let Some(p) = g.nodes[i].op::<Pointwise>() else { return vec![] };
    let made_by = |k: usize| {
        let mut v = g.nodes[i].inputs[k];
        while reads.once(v) && g.nodes[v.node].is_view() {
            v = g.nodes[v.node].inputs[0];
        }
        let plain = |m: &Matmul| m.add.is_none() && !m.bias && m.act.is_none() && m.scaled.is_none();
        (reads.once(v) && g.nodes[v.node].op::<Matmul>().is_some_and(plain)).then_some((k, v.node))
    };
    (0..g.nodes[i].inputs.len()).filter(|&k| !p.expr.uses_rng(k)).filter_map(made_by).collect()
}

struct Site {
    op: MatmulPointwise,
    /// Each with the shape that the op takes it in.
    inputs: Vec<(Value, Vec<usize>)>,
}

impl Site {
    /// Pointwise node `i` with matmul `m` as its input `k`; or why the two cannot be fused.
    fn new(g: &Graph, i: usize, k: usize, m: usize, arch: Arch) -> Result<Site, String> {
        let (node, product) = (&g.nodes[i], &g.nodes[m].outputs[0]);
        let p = node.op::<Pointwise>().expect("a candidate");
        let terms = g.meta(g.nodes[m].inputs[0]).dim(0);
        if terms > MOST_K {
            return Err(format!("K = {terms}: above {MOST_K} cuBLASLt's GEMM is faster"));
        }
        // The matmul becomes input 0, the others keep their order.
        let others: Vec<usize> = (0..node.inputs.len()).filter(|&n| n != k).collect();
        let number = |n: usize| others.iter().position(|&o| o == n).map_or(0, |at| at + 1);
        let mut expr = Expr::default();
        let map = expr.append(&p.expr, |e, n| e.input(number(n)), number);
        expr.outs = p.expr.outs.iter().map(|&o| map[o]).collect();

        // In which order the pointwise op reads the matmul's result.
        let shape = &node.outputs[0].shape;
        let (offset, strides) = lies(g, node.inputs[k]);
        let walk = (g.meta(node.inputs[k]).shape == *shape && offset == 0).then(|| merged(shape, &strides));
        let of = |heads_inside: bool| MatmulPointwise { expr: expr.clone(), dtypes: p.dtypes.clone(), heads_inside, in_place: vec![] };
        let op = [false, true].map(of).into_iter().find(|op| {
            let (shape, strides) = op.shape(product);
            walk.as_ref() == Some(&merged(&shape, &strides))
        });
        let op = op.ok_or("the matmul's result is broadcast, sliced or transposed")?;

        let own = op.shape(product).0;
        let mut inputs: Vec<(Value, Vec<usize>)> = g.nodes[m].inputs.iter().map(|&v| (v, g.meta(v).shape.clone())).collect();
        let mut io = Io::plain(&[], &[], arch);
        for &(v, _) in &inputs {
            let (offset, strides) =
                Some(lies(g, v)).filter(|l| Layout::Matrix.accepts(&g.meta(v).shape, &l.1)).unwrap_or_else(|| copied(g, v));
            io.x.push(g.meta(v).clone());
            io.strides.push(strides);
            io.offsets.push(offset);
        }
        for &n in &others {
            let (v, rng) = (node.inputs[n], p.expr.uses_rng(n));
            let (offset, strides) = lies(g, v);
            if !rng && (g.meta(v).shape != *shape || !is_contiguous(shape, &strides)) {
                return Err("another input is broadcast or strided".into());
            }
            inputs.push((v, if rng { g.meta(v).shape.clone() } else { own.clone() }));
            io.x.push(g.meta(v).with(&inputs[inputs.len() - 1].1));
            io.strides.push(contiguous(&io.x[io.x.len() - 1].shape));
            io.offsets.push(offset);
        }
        io.y = op.infer(&io.x);
        op.fused(&io).map(|_| Site { op, inputs })
    }
}

/// A value's offset in its buffer, and its strides.
fn lies(g: &Graph, v: Value) -> (usize, Vec<usize>) {
    let node = &g.nodes[v.node];
    let Kind::Op(op) = &node.kind else { return copied(g, v) };
    if !op.is_view() {
        return copied(g, v);
    }
    let (offset, strides) = lies(g, node.inputs[0]);
    op.alias(g.meta(node.inputs[0]), &strides).map_or_else(|| copied(g, v), |(more, strides)| (offset + more, strides))
}

/// The same for a contiguous copy in a buffer of its own.
fn copied(g: &Graph, v: Value) -> (usize, Vec<usize>) {
    (0, contiguous(&g.meta(v).shape))
}

/// (size, stride) of the dimensions, adjacent ones merged where one stride covers both.
fn merged(shape: &[usize], strides: &[usize]) -> Vec<(usize, usize)> {
    let mut all: Vec<(usize, usize)> = vec![];
    for (&n, &step) in shape.iter().zip(strides).filter(|d| *d.0 != 1) {
        match all.last_mut() {
            Some(last) if last.1 == step * n => *last = (last.0 * n, step),
            _ => all.push((n, step)),
        }
    }
    all
}
