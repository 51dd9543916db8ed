//! Fuses LoRA's two backward matmuls with the same large matrix (the gradient with respect to the adapter's output), which is then read once.
//! Pairs whose results are concatenated, those of adapters with the same input, become one kernel.

use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Value};
use crate::meta::DType;
use crate::ops::concat::Concat;
use crate::ops::matmul::Matmul;
use crate::ops::narrow::NarrowProducts;
use crate::ops::view::Permute;
use crate::record::{Recorder, Var};
use std::collections::{HashMap, HashSet};

pub struct LoraBackward;

/// The large matrix must have at least so many times the columns of the low-rank one.
const TIMES: usize = 8;
/// At most so many pairs in one kernel: every block looks up which one it works on.
const MOST: usize = 8;

impl Switch for LoraBackward {
    fn name(&self) -> &'static str {
        "lora-backward"
    }

    fn about(&self) -> &'static str {
        "LoRA backward: the gradient with respect to an adapter's output is multiplied by both low-rank matrices in one kernel, which reads it once, not twice. Adapters with the same input share one kernel."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn example(&self, r: &Recorder) {
        let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.3 }).cast(DType::BF16);
        let x = r.feed("x", &[70, 64], DType::F32).cast(DType::BF16);
        // Two adapters with the same input, whose first matmuls are merged.
        let (a, b, c) = (param("a", &[16, 64]), param("b", &[72, 8]), param("c", &[136, 8]));
        let narrow = x.linear(a);
        let mut parts =
            [b, c].into_iter().enumerate().map(|(i, w)| narrow.slice(1, 8 * i, 8 * i + 8).linear(w).cast(DType::F32).square().mean());
        let loss = parts.next().expect("two") + parts.next().expect("two");
        r.output("loss", loss);
        let params: Vec<_> = r.params().into_iter().map(|p| p.1).collect();
        r.grad(loss, &params).into_iter().enumerate().for_each(|(i, g)| r.output(&format!("g{i}"), g));
    }
}

impl Pass for LoraBackward {
    fn stage(&self) -> Stage {
        Stage::Lowered
    }

    fn after(&self) -> &'static [&'static str] {
        &["gemm-epilogue", "merged-wgrad"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        let mut pairs = vec![];
        for pair in sites(g) {
            match refused(g, pair) {
                Some(reason) => receipt.decline(reason, &g.nodes[pair.by_row].scope),
                None => pairs.push(pair),
            }
        }
        receipt.applied = pairs.len();
        // The first node of a group -> its pairs, and the concatenation that the group's kernel replaces.
        let mut groups: HashMap<usize, (Vec<Pair>, Option<usize>)> = HashMap::new();
        let (together, apart) = concatenated(g, &pairs);
        if apart > 0 {
            receipt.notes.push(format!("{apart} concatenations of such results use a kernel for each pair: inputs are computed after the first one would run, or ranks differ"));
        }
        let grouped: HashSet<usize> = together.iter().flat_map(|(_, members)| members).map(|pair| pair.by_row).collect();
        pairs.retain(|pair| !grouped.contains(&pair.by_row));
        for (concat, members) in together {
            groups.insert(first(&members), (members, Some(concat)));
        }
        groups.extend(pairs.into_iter().map(|pair| (first(&[pair]), (vec![pair], None))));

        g.rewrite(|w, i, _, _| {
            let Some((pairs, concat)) = groups.get(&i) else { return Ok::<_, Error>(None) };
            // A reshape that comes after this node is recorded here.
            let at = |v: Value| w.at(if v.node < i { v } else { w.old.unshaped(v) }).reshape(&w.old.meta(v).shape);
            let x: Vec<Var> = pairs.iter().flat_map(|pair| pair.inputs(w.old)).map(at).collect();
            let y = w.recorder.op(NarrowProducts, &x);
            let r = x[1].dim(0);
            let mut own = None;
            for (k, pair) in pairs.iter().enumerate() {
                for (node, v) in [(pair.by_row, y[0].slice(1, k * r, (k + 1) * r)), (pair.by_column, y[1 + k])] {
                    w.put(node, &[v]);
                    own = own.or((node == i).then_some(v));
                }
            }
            concat.iter().for_each(|&c| w.put(c, &y[..1]));
            Ok(Some(vec![own.expect("the first node of a group is one of its own")]))
        })?;
        if receipt.applied > 0 {
            super::dead_code::sweep(g);
        }
        Ok(())
    }
}

/// The nodes of the two matmuls d q [m, r] (of d's type) and d^T p [n, r] (in f32) with the same d [m, n], where n is far larger than r.
#[derive(Clone, Copy, PartialEq)]
struct Pair {
    by_row: usize,
    by_column: usize,
}

impl Pair {
    /// d, p, q.
    fn inputs(&self, g: &Graph) -> [Value; 3] {
        let (rows, columns) = (&g.nodes[self.by_row], &g.nodes[self.by_column]);
        [rows.inputs[0], columns.inputs[1], rows.inputs[1]]
    }
}

/// The position of the first of these nodes, where one kernel for all of them runs.
fn first(pairs: &[Pair]) -> usize {
    pairs.iter().map(|p| p.by_row.min(p.by_column)).min().expect("a pair")
}

fn sites(g: &Graph) -> Vec<Pair> {
    let plain = |i: usize| {
        let n = &g.nodes[i];
        n.op::<Matmul>()
            .filter(|m| m.add.is_none() && !m.bias && m.act.is_none() && m.scaled.is_none() && n.outputs[0].rank() == 2)
            .is_some()
    };
    // d -> the matmuls d^T p.
    let mut transposed: HashMap<Value, Vec<usize>> = HashMap::new();
    for i in (0..g.nodes.len()).filter(|&i| plain(i) && g.nodes[i].outputs[0].dtype == DType::F32) {
        let left = &g.nodes[g.nodes[i].inputs[0].node];
        if left.op::<Permute>().is_some_and(|p| p.0 == [1, 0]) {
            transposed.entry(left.inputs[0]).or_default().push(i);
        }
    }
    let mut sites = vec![];
    for i in (0..g.nodes.len()).filter(|&i| plain(i)) {
        let (d, out) = (g.nodes[i].inputs[0], &g.nodes[i].outputs[0]);
        let (from, r) = (g.meta(d), out.dim(0));
        let Some(partners) = transposed.get_mut(&d).filter(|_| out.dtype == from.dtype && from.dim(0) >= TIMES * r) else { continue };
        if let Some(k) = partners.iter().position(|&j| g.nodes[j].outputs[0].dim(0) == r) {
            sites.push(Pair { by_row: i, by_column: partners.remove(k) });
        }
    }
    sites
}

/// Concatenations of the results d q that one kernel can compute, each with its pairs; and how many concatenations cannot.
fn concatenated(g: &Graph, pairs: &[Pair]) -> (Vec<(usize, Vec<Pair>)>, usize) {
    let by_row: HashMap<usize, Pair> = pairs.iter().map(|&p| (p.by_row, p)).collect();
    let source = |v: Value| {
        let from = g.unshaped(v);
        by_row.get(&from.node).copied().filter(|_| g.meta(from).shape == g.meta(v).shape)
    };
    let (mut found, mut apart): (Vec<(usize, Vec<Pair>)>, usize) = (vec![], 0);
    let mut taken: HashSet<usize> = HashSet::new();
    for (i, node) in g.nodes.iter().enumerate() {
        if node.op::<Concat>().is_none_or(|c| c.axis != 1) {
            continue;
        }
        let Some(members) = node.inputs.iter().map(|&v| source(v)).collect::<Option<Vec<Pair>>>() else { continue };
        let r = g.meta(node.inputs[0]).dim(0);
        let alike = node.inputs.iter().all(|&v| g.meta(v).dim(0) == r);
        let twice = |p: &Pair| members.iter().filter(|m| *m == p).count() > 1 || taken.contains(&p.by_row);
        let start = first(&members);
        let ready = members.iter().flat_map(|m| m.inputs(g)).all(|v| g.unshaped(v).node < start);
        if alike && crate::mutant!("lora-backward-before-all-is-there", ready, true) && members.len() <= MOST && !members.iter().any(twice)
        {
            taken.extend(members.iter().map(|p| p.by_row));
            found.push((i, members));
        } else {
            apart += 1;
        }
    }
    (found, apart)
}

fn refused(g: &Graph, pair: Pair) -> Option<String> {
    let [d, p, q] = pair.inputs(g);
    let (d, r) = (g.meta(d), g.nodes[pair.by_row].outputs[0].dim(0));
    if !matches!(d.dtype, DType::BF16 | DType::F16) {
        Some(format!("there is no kernel for {}", d.dtype))
    } else if !r.is_multiple_of(8) || !d.dim(0).is_multiple_of(8) || r > 32 {
        Some(format!("{} columns and rank {r}: both must be multiples of 8, and the rank at most 32", d.dim(0)))
    } else if p.node.max(q.node) >= first(&[pair]) {
        Some("one matmul's input is computed after the other matmul".into())
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::concat::concat;
    use crate::passes::Switches;
    use crate::program::Compiled;

    /// Two pairs whose results are concatenated; the second's large matrix is a feed, or (`late`) computed from the first pair's result.
    #[test]
    fn pairs_are_made_together_where_all_is_there() {
        for late in [false, true] {
            let r = Recorder::new();
            let feed = |name: &str, shape: &[usize]| r.feed(name, shape, DType::F32).cast(DType::BF16);
            let (a, p) = (feed("a", &[128, 64]), feed("p", &[128, 8]));
            let q = [feed("q", &[64, 8]), feed("s", &[64, 8])];
            let other = feed("b", &[128, 64]);
            let f32 = Matmul { dtype: Some(DType::F32), ..Matmul::default() };
            let first = (a.matmul(q[0]), r.op1(f32.clone(), &[a.t(), p]));
            let b = if late { other * first.0.matmul(q[0].t()) } else { other };
            let second = (b.matmul(q[1]), r.op1(f32, &[b.t(), p]));
            r.output("y", concat(&[first.0, second.0], 1).cast(DType::F32));
            [first.1, second.1].into_iter().enumerate().for_each(|(i, v)| r.output(&format!("c{i}"), v));
            let c = Compiled::new(r.finish(), &Switches::default(), Target::Cpu).unwrap();
            let counts: Vec<usize> = c.graph.nodes.iter().filter(|n| n.name() == "narrow_products").map(|n| n.inputs.len() / 3).collect();
            assert_eq!(counts, if late { vec![1, 1] } else { vec![2] });
            let receipt = c.receipts.iter().find(|r| r.pass == "lora-backward").unwrap();
            assert_eq!((receipt.applied, receipt.notes.len()), (2, late as usize));
        }
    }
}
