//! Moves work into GEMM epilogues: a cast to f32, an addition, a bias, ReLU or GELU, instead of a kernel that reads the result again.

use super::pattern::{Reads, is_arithmetic, is_sum};
use super::{Numerics, Pass, Receipt, Settings, Stage, Switch, Target};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Value};
use crate::kernel::Act;
use crate::meta::{DType, Meta};
use crate::op::Op;
use crate::ops::linear_attention::LinearAttentionGrad;
use crate::ops::matmul::{Add, Matmul};
use crate::ops::norm::RmsNormGrad;
use crate::ops::norm::affine::AffineLayerNormGrad;
use crate::ops::pointwise::Pointwise;
use crate::ops::view::Reshape;
use crate::record::{Recorder, Var};
use std::collections::HashMap;

pub struct GemmEpilogue;

impl Switch for GemmEpilogue {
    fn name(&self) -> &'static str {
        "gemm-epilogue"
    }

    fn about(&self) -> &'static str {
        "GEMM epilogues: matmuls write f32, accumulate into a sum (residuals, gradients of one value), add a bias and apply ReLU or GELU. The backward kernels of norms and linear attention likewise accumulate, and apply ReLU's gradient."
    }

    fn numerics(&self, _: Target, _: DType) -> Numerics {
        Numerics::Reordered
    }

    fn example(&self, r: &Recorder) {
        let param = |name: &str, shape: &[usize]| r.param(name, shape, Init::Normal { std: 0.4 });
        let (w, b) = (param("w", &[8, 8]), param("b", &[8]));
        let x = r.feed("x", &[2, 5, 8], DType::F32);
        let h = x + x.silu().matmul(w);
        let h = h + h.rms_norm(b, 1e-6).matmul(w);
        let h = h + h.layer_norm_affine(b, b, 1e-6).matmul(w);
        let loss = h.square().mean();
        r.output("loss", loss);
        r.output("dw", r.grad(loss, &[w])[0]);
        // A matmul with a single reader.
        r.output("y", (x.tanh().matmul(w) + b).gelu());
        // A residual connection around a matmul with a bias.
        r.output("residual", x + (x.tanh().matmul(w) + b));
        let (down, up) = (param("down", &[8, 1]), param("up", &[1, 8]));
        r.output("adapted", x.matmul(w) + x.matmul(down).matmul(up) + x.silu().matmul(w));
    }
}

impl Pass for GemmEpilogue {
    fn stage(&self) -> Stage {
        Stage::Lowered
    }

    fn after(&self) -> &'static [&'static str] {
        &["recompute", "lora-forward"]
    }

    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error> {
        if settings.ranks.size() > 1 {
            biases_first(g);
        }
        let moved = narrow_first(g);
        if moved > 0 {
            receipt
                .notes
                .push(format!("{moved} matmuls moved after the LoRA matmuls they are summed with, to accumulate into those results"));
        }
        let mut folded = Folded::new(g);
        folded.widen(g, receipt);
        for i in 0..g.nodes.len() {
            folded.visit(g, i, receipt);
        }
        let Folded { products, gradients, stands_for, .. } = folded;
        g.rewrite(|w, i, node, inputs| {
            let at = |v: Value| w.at(stands_for.get(&v).copied().unwrap_or(v));
            let mut x = inputs.to_vec();
            let made = if let Some(p) = products.get(&i) {
                x.extend(p.add.map(|v| at(v).reshape(&node.outputs[0].shape)));
                let dtype = p.op.dtype.unwrap_or(node.outputs[0].dtype);
                x.extend(p.bias.map(|v| at(v).cast(dtype).reshape(&[node.outputs[0].dim(0)])));
                w.recorder.op(p.op.clone(), &x)
            } else if let Some(more) = gradients.get(&i) {
                x.extend(more.add.map(|v| at(v).reshape(&node.outputs[0].shape)));
                match (node.op::<LinearAttentionGrad>(), node.op::<RmsNormGrad>()) {
                    (Some(&op), _) => w.recorder.op(LinearAttentionGrad { add: more.add.is_some(), relu: more.relu, ..op }, &x),
                    (_, Some(op)) => w.recorder.op(RmsNormGrad { add: true, ..op.clone() }, &x),
                    _ => w.recorder.op(AffineLayerNormGrad { add: true }, &x),
                }
            } else if let Some(&v) = stands_for.get(&Value { node: i, out: 0 }) {
                // The matmul's output may have another shape: [rows, n] instead of [batch, time, n].
                vec![w.at(v).reshape(&node.outputs[0].shape)]
            } else if let (Kind::Op(op), true) = (&node.kind, node.is_view()) {
                w.recorder.op_arc(op.clone(), inputs) // infers its type again: its input's may have changed
            } else {
                return Ok::<_, Error>(None);
            };
            Ok(Some(made))
        })?;
        super::dead_code::sweep(g);
        Ok(())
    }
}

/// A matmul with its new epilogue: what it adds, and its bias.
struct Product {
    op: Matmul,
    add: Option<Value>,
    bias: Option<Value>,
}

/// A matmul counts as narrow beside one of at least so many times its FLOPs.
const NARROW: u64 = 4;

/// Moves casts and views of biases to the beginning: those that several ranks read were recorded where they are added, behind the matmul.
fn biases_first(g: &mut Graph) {
    let mut free = vec![false; g.nodes.len()];
    for (i, node) in g.nodes.iter().enumerate() {
        let made = |v: &Value| free[v.node] || matches!(g.nodes[v.node].kind, Kind::State(_));
        free[i] = (node.is_view() || node.is_cast()) && node.outputs[0].rank() == 1 && node.inputs.iter().all(made);
    }
    let mut order: Vec<usize> = (0..g.nodes.len()).collect();
    order.sort_by_key(|&i| (!g.nodes[i].is_source(), !free[i], i));
    g.reorder(&order);
}

/// Among matmuls that are summed, the narrow ones (LoRA's low-rank matmuls) run first and the wide one accumulates into their result: it hides
/// that read behind its arithmetic, which a narrow one could not. Returns how many matmuls moved, each to right before its sum.
fn narrow_first(g: &mut Graph) -> usize {
    let reads = g.reads();
    // Collects the terms of a sum, looking through sums and reshapes with a single reader: all nodes, and the matmuls among them.
    fn terms(g: &Graph, reads: &Reads, i: usize, nodes: &mut Vec<usize>, products: &mut Vec<usize>) {
        for &v in &g.nodes[i].inputs {
            let node = &g.nodes[v.node];
            let sum = node.op::<Pointwise>().is_some_and(is_sum);
            if !reads.once(v) || !(sum || node.op::<Matmul>().is_some() || node.op::<Reshape>().is_some()) {
                continue;
            }
            nodes.push(v.node);
            match node.op::<Matmul>() {
                Some(_) => products.push(v.node),
                None => terms(g, reads, v.node, nodes, products),
            }
        }
    }
    let mut place: Vec<(usize, usize)> = (0..g.nodes.len()).map(|i| (i, 0)).collect(); // sort key: after which node, then in which order
    let (mut moved, mut seen) = (0, vec![false; g.nodes.len()]);
    for i in (0..g.nodes.len()).rev() {
        if seen[i] || !g.nodes[i].op::<Pointwise>().is_some_and(is_sum) {
            continue;
        }
        let (mut nodes, mut products) = (vec![], vec![]);
        terms(g, &reads, i, &mut nodes, &mut products);
        nodes.iter().for_each(|&n| seen[n] = true);
        let flops = |p: usize| g.nodes[p].op::<Matmul>().map_or(0, |op| op.cost(&g.inputs(p)).flops);
        let most = products.iter().map(|&p| flops(p)).max().unwrap_or(0);
        let narrow = |&p: &usize| NARROW * flops(p) <= most;
        let Some(last) = products.iter().copied().filter(narrow).max() else { continue };
        let wide: Vec<usize> = products.into_iter().filter(|p| !narrow(p)).collect();
        if wide.iter().all(|&p| p > last) {
            continue;
        }
        // Move them to right before the sum, in their old order, together with the nodes in between that read them.
        moved += wide.len();
        wide.iter().for_each(|&p| place[p] = (i - 1, p));
        nodes.sort();
        for &n in nodes.iter().filter(|n| g.nodes[**n].op::<Matmul>().is_none()) {
            if g.nodes[n].inputs.iter().any(|v| place[v.node].1 > 0) {
                place[n] = (i - 1, n);
            }
        }
    }
    if moved > 0 {
        let mut order: Vec<usize> = (0..g.nodes.len()).collect();
        order.sort_by_key(|&i| place[i]);
        g.reorder(&order);
    }
    moved
}

/// What a backward kernel additionally does to its first output.
#[derive(Default)]
struct More {
    add: Option<Value>,
    relu: bool,
}

/// Everything that was folded into epilogues so far.
struct Folded {
    /// Matmuls with a new epilogue, by node.
    products: HashMap<usize, Product>,
    /// Backward kernels of norms and linear attention with more work, by node.
    gradients: HashMap<usize, More>,
    /// A folded node's output -> the matmul output that replaces it.
    stands_for: HashMap<Value, Value>,
    reads: Reads,
}

/// What can be folded into a matmul's epilogue.
enum Work {
    Add(Value),
    Bias(Value),
    Act(Act),
}

impl Folded {
    fn new(g: &Graph) -> Folded {
        Folded { products: HashMap::new(), gradients: HashMap::new(), stands_for: HashMap::new(), reads: g.reads() }
    }

    /// bf16 matmuls whose result, or slices of it, is only ever cast to f32 write f32 directly.
    fn widen(&mut self, g: &Graph, receipt: &mut Receipt) {
        let readers = g.readers();
        let is_root = g.root_nodes();
        for (m, node) in g.nodes.iter().enumerate() {
            let Some(op) = node.op::<Matmul>().filter(|_| node.outputs[0].dtype != DType::F32) else { continue };
            let (mut left, mut casts, mut others) = (vec![m], vec![], op.add.is_some());
            while let Some(i) = left.pop() {
                others |= is_root[i] || readers[i].is_empty();
                for &r in &readers[i] {
                    match &g.nodes[r] {
                        n if n.is_view() => left.push(r),
                        n if n.is_cast() && n.outputs[0].dtype == DType::F32 => casts.push(r),
                        _ => others = true,
                    }
                }
            }
            if others {
                continue;
            }
            receipt.applied += 1;
            self.products.insert(m, Product { op: Matmul { dtype: Some(DType::F32), ..op.clone() }, add: None, bias: None });
            for c in casts {
                self.stands_for.insert(Value { node: c, out: 0 }, g.nodes[c].inputs[0]);
            }
        }
    }

    /// The matmul that computes this value, looking through reshapes and folded nodes, if each of them has a single reader.
    fn product(&self, g: &Graph, v: Value) -> Option<usize> {
        if !self.reads.once(v) {
            return None;
        }
        match self.stands_for.get(&v) {
            Some(&w) if self.reads.once(w) => self.made_by(g, w),
            Some(_) => None,
            None => self.made_by(g, v),
        }
    }

    /// The same for a backward kernel whose first output this value is.
    fn gradient(&self, g: &Graph, v: Value) -> Option<usize> {
        let node = &g.nodes[v.node];
        let norm = node.op::<RmsNormGrad>().is_some_and(|n| !n.add) || node.op::<AffineLayerNormGrad>().is_some_and(|n| !n.add);
        let known = norm || node.op::<LinearAttentionGrad>().is_some();
        match (self.reads.once(v), self.stands_for.get(&v)) {
            (true, Some(w)) => self.gradients.contains_key(&w.node).then_some(w.node),
            (true, None) if node.op::<Reshape>().is_some() => self.gradient(g, node.inputs[0]),
            (true, None) if known && v.out == 0 => Some(v.node),
            _ => None,
        }
    }

    /// Folds an addition, or the gradient of the ReLU before linear attention, into the backward kernel that computes its other input.
    fn fold_gradient(&mut self, g: &Graph, i: usize) -> bool {
        let node = &g.nodes[i];
        let p = node.op::<Pointwise>().expect("arithmetic");
        let same = |v: Value| g.meta(v) == &node.outputs[0];
        let more = |n: usize| self.gradients.get(&n);
        let found = if is_sum(p) {
            let ways = [(node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])];
            ways.into_iter().find_map(|(own, other)| {
                let n = self.gradient(g, own).filter(|&n| same(own) && same(other) && more(n).is_none() && self.position(other) < n)?;
                Some((n, More { add: Some(other), relu: false }))
            })
        } else if is_relu_gradient(p) {
            let n = self.gradient(g, node.inputs[1]).filter(|&n| same(node.inputs[1]) && more(n).is_none_or(|m| !m.relu));
            let reads_xs = |&n: &usize| {
                let attention = g.nodes[n].op::<LinearAttentionGrad>().is_some();
                attention && g.unshaped(g.nodes[n].inputs[0]) == g.unshaped(node.inputs[0])
            };
            n.filter(reads_xs).map(|n| (n, More { add: more(n).and_then(|m| m.add), relu: true }))
        } else {
            None
        };
        let Some((n, more)) = found else { return false };
        self.gradients.insert(n, more);
        self.stands_for.insert(Value { node: i, out: 0 }, Value { node: n, out: 0 });
        true
    }

    fn made_by(&self, g: &Graph, v: Value) -> Option<usize> {
        let node = &g.nodes[v.node];
        match node.op::<Reshape>() {
            Some(_) => self.product(g, node.inputs[0]),
            None => node.op::<Matmul>().map(|_| v.node),
        }
    }

    /// After which node a value is available.
    fn position(&self, v: Value) -> usize {
        self.stands_for.get(&v).map_or(v.node, |&w| if w == v { w.node } else { self.position(w) })
    }

    fn visit(&mut self, g: &Graph, i: usize, receipt: &mut Receipt) {
        let node = &g.nodes[i];
        let Some(p) = node.op::<Pointwise>().filter(|p| p.dtypes.len() == 1) else { return };
        if self.fold_gradient(g, i) {
            receipt.applied += 1;
            return;
        }
        // All ways to fold this node into a matmul; for a sum of two, the later matmul first.
        let mut ways: Vec<(usize, Work)> = vec![];
        let product = |k: usize| self.product(g, node.inputs[k]);
        if is_sum(p) {
            for (k, other) in [(0, node.inputs[1]), (1, node.inputs[0])] {
                let Some(m) = product(k) else { continue };
                let result = self.result(g, m);
                let (own, meta) = (g.meta(node.inputs[k]), g.meta(other));
                if own.shape != node.outputs[0].shape || result.dtype != p.dtypes[0] {
                    continue;
                }
                if meta.shape == node.outputs[0].shape && meta.dtype == p.dtypes[0] {
                    ways.push((m, Work::Add(other)));
                } else if meta.elements() == meta.dim(0) && meta.dim(0) == result.dim(0) && meta.rank() == 1 {
                    ways.push((m, Work::Bias(other)));
                }
            }
            ways.sort_by_key(|w| std::cmp::Reverse(w.0));
        } else if let Some(m) = (node.inputs.len() == 1).then(|| product(0)).flatten()
            && self.result(g, m).dtype == p.dtypes[0]
        {
            ways.extend(activation(p).map(|act| (m, Work::Act(act))));
        }
        if ways.is_empty() {
            return;
        }
        let mut reason = None;
        for (m, work) in ways {
            let adder = self.adder(g, m, &work);
            match self.refused(g, adder, &work) {
                Some(r) => reason = Some(r),
                None => {
                    self.fold(g, adder, work);
                    self.stands_for.insert(Value { node: i, out: 0 }, Value { node: m, out: 0 });
                    receipt.applied += 1;
                    return;
                }
            }
        }
        receipt.decline(reason.expect("every way was declined"), &node.scope);
    }

    fn op<'a>(&'a self, g: &'a Graph, m: usize) -> &'a Matmul {
        self.products.get(&m).map_or_else(|| g.nodes[m].op::<Matmul>().expect("a matmul"), |p| &p.op)
    }

    fn result(&self, g: &Graph, m: usize) -> Meta {
        let meta = &g.nodes[m].outputs[0];
        Meta::new(&meta.shape, self.op(g, m).dtype.unwrap_or(meta.dtype))
    }

    /// Which matmul of the chain that ends with `m` is to accumulate into another matmul's result: `m`, or the first of the chain. The term that is
    /// no matmul (the residual stream) may be much larger than they are; rounding it with one small term alone would lose that term's digits.
    fn adder(&self, g: &Graph, m: usize, work: &Work) -> usize {
        match *work {
            Work::Add(v) if self.product(g, v).is_some() => {
                let plain = self.products.get(&m).filter(|p| !p.op.bias && p.op.act.is_none());
                plain.and_then(|p| p.add).and_then(|w| self.product(g, w)).map_or(m, |next| self.adder(g, next, work))
            }
            _ => m,
        }
    }

    /// Why this matmul's epilogue cannot do this too.
    fn refused(&self, g: &Graph, m: usize, work: &Work) -> Option<&'static str> {
        let op = self.op(g, m);
        let behind = op.act.is_some() || op.bias;
        match work {
            Work::Add(_) if op.add.is_some() || crate::mutant!("gemm-epilogue-adds-after-an-activation", op.act.is_some(), false) => {
                Some("the matmul accumulates into another value already")
            }
            Work::Add(v) if self.position(*v) >= m => Some("what is added is computed after the matmul"),
            Work::Bias(_) if crate::mutant!("gemm-epilogue-with-two-biases", behind, false) => {
                Some("the matmul has a bias or an activation already")
            }
            Work::Bias(v) if crate::mutant!("gemm-epilogue-adds-a-bias-from-behind", self.position(*v) >= m, false) => {
                Some("the bias is computed after the matmul")
            }
            Work::Act(_) if op.scaled.is_some() => Some("GEMMs of FP8 operands have no activation"),
            Work::Act(_) if op.act.is_some() => Some("the matmul has an activation already"),
            _ if !g.nodes[m].outputs[0].dim(0).is_multiple_of(8) && !matches!(work, Work::Add(_)) => {
                Some("the number of columns is not a multiple of 8")
            }
            _ => None,
        }
    }

    fn fold(&mut self, g: &Graph, m: usize, work: Work) {
        let op = self.op(g, m).clone();
        let p = self.products.entry(m).or_insert(Product { op, add: None, bias: None });
        match work {
            Work::Add(v) => (p.op.add, p.add) = (Some(Add::Apart), Some(v)),
            Work::Bias(v) => (p.op.bias, p.bias) = (true, Some(v)),
            Work::Act(a) => p.op.act = Some(a),
        }
    }
}

/// Whether this is ReLU's gradient; inputs: ReLU's output, and the gradient with respect to it.
fn is_relu_gradient(p: &Pointwise) -> bool {
    fn gradient<'g>(x: &[Var<'g>]) -> Var<'g> {
        let y = x[0].relu();
        let relu = y.recorder().with_graph(|g| g.nodes[y.value().node].op::<Pointwise>().cloned()).expect("arithmetic");
        relu.vjp(&x[..1], &[y], &[Some(x[1])])[0].expect("ReLU has one")
    }
    is_arithmetic(p, 2, gradient)
}

/// ReLU or GELU, if this is one.
fn activation(p: &Pointwise) -> Option<Act> {
    if is_arithmetic(p, 1, |x| x[0].relu()) {
        Some(Act::Relu)
    } else if is_arithmetic(p, 1, |x| x[0].gelu()) {
        Some(Act::Gelu)
    } else {
        None
    }
}
