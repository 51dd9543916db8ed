//! Products of a few rows, with the norm before them and the sum or SwiGLU behind them, become one launch.

use super::epilogue::is_sum;
use super::merge_products::{early, source};
use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Role, Value};
use crate::meta::DType;
use crate::ops::few_rows::{FewRows, MOST};
use crate::ops::matmul::Matmul;
use crate::ops::norm::RmsNorm;
use crate::ops::norm::add::AddRmsNorm;
use crate::ops::pointwise::Pointwise;
use crate::ops::view::{Permute, Reshape};
use crate::record::{Recorder, Var};
use std::collections::{BTreeMap, HashMap, HashSet};

pub struct FewRowsPass;

impl Switch for FewRowsPass {
    fn name(&self) -> &'static str {
        "few-rows"
    }

    fn about(&self) -> &'static str {
        "Multiplies up to 32 rows, in programs without gradients, by weights that are read once: all weights of the same rows together, their norm before and a residual or SwiGLU behind. What decoding a token consists of."
    }

    fn numerics(&self, _: Target, dtype: DType) -> Numerics {
        if dtype == DType::F32 { Numerics::Exact } else { Numerics::LowPrecision }
    }

    fn example(&self, r: &Recorder) {
        layer(r);
    }
}

impl Pass for FewRowsPass {
    fn stage(&self) -> Stage {
        Stage::Differentiated
    }

    fn after(&self) -> &'static [&'static str] {
        &["bf16", "fuse-norm"]
    }

    fn apply(&self, g: &mut Graph, _: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        if g.nodes.iter().any(|n| matches!(n.kind, Kind::Grad)) {
            return Ok(());
        }
        part_sums(g)?;
        let sites = Sites::new(g);
        let launches = sites.launches();
        receipt.applied = sites.products.len();
        sites.refused.iter().for_each(|(i, reason)| receipt.decline(reason, &g.nodes[*i].scope));
        if receipt.applied == 0 {
            return Ok(());
        }
        let old = g.clone();
        let mut values: Vec<Vec<Value>> = vec![]; // of old nodes, in the new graph
        let mut parts: HashMap<usize, Value> = HashMap::new(); // results of products that were made with another
        g.rewrite(|recorder, i, node, inputs| {
            let new = if let Some(launch) = launches.get(&i) {
                let made = launch.record(&old, recorder, &mut values);
                parts.extend(launch.products.iter().copied().zip(made.iter().map(|v| v.value())));
                let own = launch.products.iter().position(|&p| p == i).unwrap_or(0);
                vec![made[own].reshape(&node.outputs[0].shape).value()]
            } else if let Some(&part) = parts.get(&i) {
                vec![part]
            } else if let Some(made) = values.get(i).filter(|v| !v.is_empty()) {
                made.clone() // brought forward by a launch
            } else {
                recorder.keep(node, inputs.iter().map(|v| v.value()).collect())
            };
            if values.len() <= i {
                values.resize(i + 1, vec![]);
            }
            values[i] = new.clone();
            Ok::<_, Error>(Some(new.into_iter().map(|v| recorder.var(v)).collect()))
        })?;
        super::dead_code::sweep(g);
        Ok(())
    }
}

fn layer<'g>(r: &'g Recorder) {
    let weight = |name: &str, n: usize, k: usize| r.frozen(name, &[n, k], Init::Normal { std: 0.2 }).cast(DType::BF16);
    let norm = |x: Var<'g>, name: &str| x.rms_norm(r.frozen(name, &[16], Init::Normal { std: 1.0 }), 1e-6);
    let x = r.feed("x", &[3, 1, 16], DType::F32).cast(DType::BF16);
    let h = norm(x, "first");
    let [q, k, v] = ["q", "k", "v"].map(|name| h.linear(weight(name, 24, 16)));
    let x = x + (q * k * v).linear(weight("o", 16, 24));
    let h = norm(x, "second");
    let x = x + h.linear(weight("gate", 40, 16)).swiglu(h.linear(weight("up", 40, 16))).linear(weight("down", 16, 40));
    r.output("logits", norm(x, "last").linear(weight("head", 50, 16)).cast(DType::F32));
}

/// A sum that a norm makes itself is one of its own again, where a product of few rows can make it.
fn part_sums(g: &mut Graph) -> Result<(), Error> {
    let sites = Sites::new(g);
    let made_here = |i: usize| {
        let x = &g.nodes[i].inputs;
        x.len() == 3 && g.meta(x[0]) == g.meta(x[1]) && x[..2].iter().any(|&v| sites.product(v).is_some())
    };
    let parted: Vec<bool> = (0..g.nodes.len()).map(|i| g.nodes[i].op::<AddRmsNorm>().is_some() && made_here(i)).collect();
    g.rewrite(|_, i, node, inputs| {
        Ok(match &node.kind {
            Kind::Op(op) if parted[i] => op.unfused(inputs),
            _ => None,
        })
    })
}

/// x W^T.
#[derive(Clone, Copy)]
struct Product {
    x: Value,
    /// [n, k]
    weight: Value,
}

struct Sites<'a> {
    g: &'a Graph,
    reads: HashMap<Value, usize>,
    products: BTreeMap<usize, Product>,
    refused: Vec<(usize, String)>,
}

/// What is recorded in place of a product, or of what alone reads it.
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
        let mut reads = HashMap::new();
        for v in g.nodes.iter().flat_map(|n| n.inputs.iter().copied()).chain(g.roots()) {
            *reads.entry(v).or_insert(0) += 1;
        }
        let (mut products, mut refused) = (BTreeMap::new(), vec![]);
        for i in 0..g.nodes.len() {
            match product(g, i) {
                Some(Ok(p)) => drop(products.insert(i, p)),
                Some(Err(reason)) => refused.push((i, reason)),
                None => {}
            }
        }
        Sites { g, reads, products, refused }
    }

    /// The product whose result this is, if nobody else reads it.
    fn product(&self, v: Value) -> Option<usize> {
        let node = &self.g.nodes[v.node];
        match self.reads[&v] {
            1 if node.op::<Reshape>().is_some() => self.product(node.inputs[0]),
            1 if self.products.contains_key(&v.node) => Some(v.node),
            _ => None,
        }
    }

    /// By the node that is replaced: first what reads products, then the products that are left, those of the same rows together.
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

    /// Arithmetic that a product may do with its result: a sum, SwiGLU, a wider type.
    fn behind(&self, i: usize) -> Option<Launch> {
        let node = &self.g.nodes[i];
        let arithmetic = node.op::<Pointwise>().filter(|p| p.dtypes.len() == 1)?;
        let made: Vec<Option<usize>> = node.inputs.iter().map(|&v| self.product(v)).collect();
        if node.is_cast() && node.outputs[0].dtype == DType::F32 {
            return Some(Launch { dtype: Some(DType::F32), ..self.launch(vec![made[0]?]) });
        }
        let same = node.inputs.iter().all(|&v| *self.g.meta(v) == node.outputs[0]);
        match made[..] {
            // The later of two products: the other is there before it.
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
    fn record<'g>(&self, old: &Graph, recorder: &'g Recorder, values: &mut Vec<Vec<Value>>) -> Vec<Var<'g>> {
        let mut at = |v: Value| recorder.var(early(old, recorder, values, v));
        let norm = normed(old, self.x);
        let (rows, k) = (old.nodes[self.products[0]].outputs[0].dim(1), old.meta(self.weights[0]).dim(0));
        let mut x = vec![at(norm.map_or(self.x, |(x, ..)| x)).reshape(&[rows, k])];
        x.extend(norm.map(|(_, weight, _)| at(weight)));
        x.extend(self.weights.iter().map(|&w| at(w)));
        x.extend(self.add.map(|v| at(v).reshape(&[rows, old.meta(self.weights[0]).dim(1)])));
        let op = FewRows { norm: norm.map(|n| n.2), swiglu: self.swiglu, add: self.add.is_some(), dtype: self.dtype };
        recorder.op(op, &x)
    }
}

/// Node `i` as a product of few rows; or why it stays one of the library's.
fn product(g: &Graph, i: usize) -> Option<Result<Product, String>> {
    let node = &g.nodes[i];
    node.op::<Matmul>().filter(|m| **m == Matmul::default())?;
    let y = &node.outputs[0];
    if y.rank() != 2 || y.dim(1) > MOST || g.meta(node.inputs[0]).rank() != 2 || g.meta(node.inputs[1]).rank() != 2 {
        return None;
    }
    let (x, turned, k) = (unshaped(g, node.inputs[0]), &g.nodes[node.inputs[1].node], g.meta(node.inputs[0]).dim(0));
    Some(if !matches!(y.dtype, DType::BF16 | DType::F16) {
        Err(format!("tensor cores multiply bf16 and f16, not {}", y.dtype))
    } else if !matches!(source(g, node.inputs[1]), Some(Role::Param | Role::Frozen)) {
        Err("the other side is no weight of the model".into())
    } else if turned.op::<Permute>().is_none() {
        Err("the weights lie as [in, out]".into())
    } else if !k.is_multiple_of(8) {
        Err(format!("rows of {k} elements are no multiple of 16 bytes"))
    } else {
        Ok(Product { x, weight: turned.inputs[0] })
    })
}

/// What is normed, the norm's weight and its epsilon.
fn normed(g: &Graph, v: Value) -> Option<(Value, Value, f32)> {
    let node = &g.nodes[v.node];
    let norm = node.op::<RmsNorm>().filter(|_| v.out == 0 && node.inputs.len() == 2)?;
    Some((node.inputs[0], node.inputs[1], norm.eps))
}

/// What is seen through reshapes that leave rows as they are.
fn unshaped(g: &Graph, v: Value) -> Value {
    let node = &g.nodes[v.node];
    match node.op::<Reshape>() {
        Some(_) if g.meta(node.inputs[0]).dim(0) == g.meta(v).dim(0) => unshaped(g, node.inputs[0]),
        _ => v,
    }
}

fn is_swiglu(p: &Pointwise) -> bool {
    let r = Recorder::new();
    let [gate, up] = ["gate", "up"].map(|name| r.feed(name, &[1], DType::F32));
    let y = gate.swiglu(up).value();
    r.finish().nodes[y.node].op::<Pointwise>().is_some_and(|s| s.expr == p.expr)
}
