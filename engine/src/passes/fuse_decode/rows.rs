//! Matmuls of a few rows (tokens being decoded), with the RMS norm before and the residual or SwiGLU after them, become one kernel.

use crate::error::Error;
use crate::graph::{Graph, Kind, Role, Value};
use crate::meta::DType;
use crate::ops::cache::DecodeAttention;
use crate::ops::few_rows::{FewRows, MOST};
use crate::ops::norm::RmsNorm;
use crate::ops::norm::add::AddRmsNorm;
use crate::ops::pointwise::Pointwise;
use crate::ops::view::Reshape;
use crate::passes::Receipt;
use crate::passes::pattern::{Reads, Rewrite, is_arithmetic, is_sum};
use crate::record::Var;
use std::collections::{BTreeMap, HashMap, HashSet};

pub fn apply(g: &mut Graph, receipt: &mut Receipt) -> Result<(), Error> {
    if g.nodes.iter().any(|n| matches!(n.kind, Kind::Grad)) {
        return Ok(());
    }
    split_add_norms(g)?;
    let sites = Sites::new(g);
    let launches = sites.launches();
    receipt.applied += sites.products.len();
    sites.refused.iter().for_each(|(i, reason)| receipt.decline(reason, &g.nodes[*i].scope));
    if sites.products.is_empty() {
        return Ok(());
    }
    g.rewrite(|w, i, node, _| {
        let Some(launch) = launches.get(&i) else { return Ok::<_, Error>(None) };
        let made = launch.record(w);
        launch.products.iter().zip(&made).for_each(|(&p, &v)| w.put(p, &[v]));
        let own = launch.products.iter().position(|&p| p == i).unwrap_or(0);
        Ok(Some(vec![made[own].reshape(&node.outputs[0].shape)]))
    })?;
    crate::passes::sweep(g);
    Ok(())
}

/// Splits a fused add and RMS norm again where the matmul before it can do the addition.
fn split_add_norms(g: &mut Graph) -> Result<(), Error> {
    let sites = Sites::new(g);
    let made_here = |i: usize| {
        let x = &g.nodes[i].inputs;
        x.len() == 3 && g.meta(x[0]) == g.meta(x[1]) && x[..2].iter().any(|&v| sites.product(v).is_some())
    };
    let split: Vec<bool> = (0..g.nodes.len()).map(|i| g.nodes[i].op::<AddRmsNorm>().is_some() && made_here(i)).collect();
    g.rewrite(|_, i, node, inputs| {
        Ok(match &node.kind {
            Kind::Op(op) if split[i] => op.unfused(inputs),
            _ => None,
        })
    })
}

/// A matmul x W^T.
#[derive(Clone, Copy)]
struct Product {
    x: Value,
    /// [n, k]
    weight: Value,
}

/// All matmuls that can use the kernel, and why others cannot.
struct Sites<'a> {
    g: &'a Graph,
    reads: Reads,
    products: BTreeMap<usize, Product>,
    refused: Vec<(usize, String)>,
}

/// One kernel in place of some matmuls and, if they have a single reader, of that.
struct Launch {
    products: Vec<usize>,
    x: Value,
    weights: Vec<Value>,
    add: Option<Value>,
    swiglu: bool,
    dtype: Option<DType>,
}

impl<'a> Sites<'a> {
    fn new(g: &'a Graph) -> Sites<'a> {
        let (mut products, mut refused) = (BTreeMap::new(), vec![]);
        let token = Token::new(g);
        for i in 0..g.nodes.len() {
            match product(g, i, &token) {
                Some(Ok(p)) => drop(products.insert(i, p)),
                Some(Err(reason)) => refused.push((i, reason)),
                None => {}
            }
        }
        Sites { g, reads: g.reads(), products, refused }
    }

    /// The matmul that computes this value, looking through reshapes, if nothing else reads it.
    fn product(&self, v: Value) -> Option<usize> {
        let node = &self.g.nodes[v.node];
        match self.reads.once(v) {
            true if node.op::<Reshape>().is_some() => self.product(node.inputs[0]),
            true => self.products.contains_key(&v.node).then_some(v.node),
            false => None,
        }
    }

    /// By the node that is replaced: first the single readers of matmuls, then the remaining matmuls, those with the same input merged.
    fn launches(&self) -> HashMap<usize, Launch> {
        let mut all: HashMap<usize, Launch> = (0..self.g.nodes.len()).filter_map(|i| Some((i, self.behind(i)?))).collect();
        let taken: HashSet<usize> = all.values().flat_map(|l| l.products.clone()).collect();
        let mut groups: BTreeMap<Value, Vec<usize>> = BTreeMap::new();
        for (&i, p) in self.products.iter().filter(|(i, _)| !taken.contains(i)) {
            groups.entry(p.x).or_default().push(i);
        }
        all.extend(groups.into_values().map(|group| (group[0], self.launch(group))));
        all
    }

    fn launch(&self, products: Vec<usize>) -> Launch {
        let weights = products.iter().map(|i| self.products[i].weight).collect();
        Launch { x: self.products[&products[0]].x, products, weights, add: None, swiglu: false, dtype: None }
    }

    /// Node `i` as the epilogue of matmuls: a sum, SwiGLU or a cast to f32.
    fn behind(&self, i: usize) -> Option<Launch> {
        let node = &self.g.nodes[i];
        let arithmetic = node.op::<Pointwise>().filter(|p| p.dtypes.len() == 1)?;
        let made: Vec<Option<usize>> = node.inputs.iter().map(|&v| self.product(v)).collect();
        if node.is_cast() && node.outputs[0].dtype == DType::F32 {
            return Some(Launch { dtype: Some(DType::F32), ..self.launch(vec![made[0]?]) });
        }
        let same = node.inputs.iter().all(|&v| *self.g.meta(v) == node.outputs[0]);
        match made[..] {
            // Of two matmuls, the later one adds: the other's result is available by then.
            [a, b] if same && is_sum(arithmetic) && a.or(b).is_some() => {
                let own = if a > b { 0 } else { 1 };
                Some(Launch { add: Some(node.inputs[1 - own]), ..self.launch(vec![made[own]?]) })
            }
            [Some(gate), Some(up)] if same && is_swiglu(arithmetic) => {
                let [a, b] = [gate, up].map(|i| self.products[&i]);
                let fits = a.x == b.x && self.g.meta(a.weight) == self.g.meta(b.weight);
                fits.then(|| Launch { swiglu: true, ..self.launch(vec![gate, up]) })
            }
            _ => None,
        }
    }
}

impl Launch {
    fn record<'g>(&self, w: &Rewrite<'g>) -> Vec<Var<'g>> {
        let (old, at) = (w.old, |v: Value| w.at(v));
        let norm = normed(old, self.x);
        let (rows, k) = (old.nodes[self.products[0]].outputs[0].dim(1), old.meta(self.weights[0]).dim(0));
        let mut x = vec![at(norm.map_or(self.x, |(x, ..)| x)).reshape(&[rows, k])];
        x.extend(norm.map(|(_, weight, _)| at(weight)));
        x.extend(self.weights.iter().map(|&w| at(w)));
        x.extend(self.add.map(|v| at(v).reshape(&[rows, old.meta(self.weights[0]).dim(1)])));
        let op = FewRows { norm: norm.map(|n| n.2), swiglu: self.swiglu, add: self.add.is_some(), dtype: self.dtype };
        w.recorder.op(op, &x)
    }
}

/// What is asked of a program once, for all of its matmuls.
struct Token {
    /// How many rows are decoded; 0 where none are.
    rows: usize,
    /// States with a next value, and those values.
    updated: HashSet<usize>,
    next: HashSet<Value>,
}

impl Token {
    fn new(g: &Graph) -> Token {
        let decoded = |i: usize| g.nodes[i].op::<DecodeAttention>().map(|_| g.meta(g.nodes[i].inputs[0]));
        let rows = (0..g.nodes.len()).filter_map(decoded).find(|q| q.shape[1] == 1).map_or(0, |q| q.shape[0]);
        Token { rows, updated: g.updates.iter().map(|u| u.0.node).collect(), next: g.updates.iter().map(|u| u.1).collect() }
    }

    /// Whether `v` is a weight of the model; or one that was made of several, here or by an earlier program, which left it in a state.
    fn is_weight(&self, g: &Graph, v: Value) -> bool {
        match g.state_role(v) {
            Some(Role::Param | Role::Frozen) => true,
            Some(Role::Carried) => g.transpose_of(v).is_some_and(|w| {
                let kept = matches!(g.nodes[w.node].kind, Kind::State(_)) && !self.updated.contains(&w.node);
                crate::mutant!("fuse-decode-of-a-state-that-changes", kept, true)
            }),
            None => g.transpose_of(v).is_some_and(|w| self.next.contains(&w)),
        }
    }
}

/// Node `i` as a matmul of few rows; or why it stays with cuBLASLt.
fn product(g: &Graph, i: usize, token: &Token) -> Option<Result<Product, String>> {
    let [left, right] = g.plain_matmul(i)?;
    let y = &g.nodes[i].outputs[0];
    let rows = y.dim(1);
    // Of other programs without gradients, such as evaluation, nobody expects it.
    if rows > MOST && rows != token.rows || g.meta(left).rank() != 2 || g.meta(right).rank() != 2 {
        return None;
    }
    let k = g.meta(left).dim(0);
    Some(if rows > MOST {
        Err(format!("{rows} rows: the kernel takes up to {MOST}"))
    } else if !matches!(y.dtype, DType::BF16 | DType::F16) {
        Err(format!("the kernel takes bf16 and f16, not {}", y.dtype))
    } else if !token.is_weight(g, right) {
        Err("the second operand is not a weight of the model".into())
    } else if !k.is_multiple_of(8) {
        Err(format!("rows of {k} elements are not a multiple of 16 bytes"))
    } else {
        g.transpose_of(right).map(|weight| Product { x: same_rows(g, left), weight }).ok_or("the weight is stored as [in, out]".into())
    })
}

/// If `v` is an RMS norm: its input, its weight and its epsilon.
fn normed(g: &Graph, v: Value) -> Option<(Value, Value, f32)> {
    let node = &g.nodes[v.node];
    let norm = node.op::<RmsNorm>().filter(|_| v.out == 0 && node.inputs.len() == 2)?;
    Some((node.inputs[0], node.inputs[1], norm.eps))
}

/// `v`, looking through reshapes that keep the last dimension.
fn same_rows(g: &Graph, v: Value) -> Value {
    let node = &g.nodes[v.node];
    match node.op::<Reshape>() {
        Some(_) if g.meta(node.inputs[0]).dim(0) == g.meta(v).dim(0) => same_rows(g, node.inputs[0]),
        _ => v,
    }
}

fn is_swiglu(p: &Pointwise) -> bool {
    is_arithmetic(p, 2, |x| x[0].swiglu(x[1]))
}
