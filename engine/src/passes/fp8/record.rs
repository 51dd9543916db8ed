//! The matmuls that fp8 chose, recorded anew: operands rounded, scales, and weights that are rounded once for several micro-batches.

use super::{STATES, Sites, Tensor};
use crate::error::Error;
use crate::graph::{Graph, Init, Kind, Node, Value};
use crate::meta::{DType, Meta};
use crate::op::Op;
use crate::ops::collective::all_gather;
use crate::ops::concat::Concat;
use crate::ops::matmul::{Matmul, Sums};
use crate::ops::quantize::{PARTS, Quantize, Scales};
use crate::ranks::Ranks;
use crate::record::{Recorder, Var};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// How the names of states with rounded weights begin. Later micro-batches read them; they are in no checkpoint.
pub const KEPT: &str = "scratch/fp8.";

/// What a program does with its weights.
#[derive(Clone, Copy, PartialEq)]
pub enum Weights {
    /// Rounds them where it reads them.
    Round,
    /// And keeps the results in states.
    Keep,
    /// Reads these states.
    Kept,
}

/// How matmuls are recorded anew.
pub struct Gemms<'a> {
    /// Whether they are, or ranges are only observed.
    pub active: bool,
    pub sums: &'a str,
    /// With delayed scaling: how many steps a scale looks back on.
    pub delayed: Option<usize>,
    pub weights: Weights,
    /// The name that scales are kept under.
    pub name: &'a str,
}

/// Records the matmuls anew; returns how many bytes of rounded weights are kept for later runs.
pub fn rewrite(g: &mut Graph, sites: &Sites, how: &Gemms) -> Result<usize, Error> {
    let (count, name, active) = (sites.tensors.len(), how.name, how.active);
    // For every tensor: as it is, transposed, its scale, the parts of its largest value.
    let mut made: Vec<Option<[Value; 4]>> = vec![None; count];
    let mut states: Option<[Value; 4]> = None;
    let mut keep = Keep::new(sites, name);
    g.rewrite(|w, i, node, _| {
        let Some(sides) = sites.matmuls.get(&i) else { return Ok::<_, Error>(None) };
        let r = w.recorder;
        if let (Some(history), None) = (how.delayed, states) {
            let state = |what: &str, shape: &[usize], v: f32| r.state(&format!("{STATES}{what}/{name}"), shape, DType::F32, Init::Full(v));
            let steps = state("steps", &[1], 0.0);
            states =
                Some([state("history", &[count, history], 0.0), state("scale", &[count, 4], 1.0), steps, steps + 1.0].map(|v| v.value()));
        }
        for &(at, _) in sides.iter().filter(|s| made[s.0].is_none()).collect::<Vec<_>>() {
            let t = &sites.tensors[at];
            let x = w.at(t.from);
            r.set_place(node);
            if t.weight && how.weights == Weights::Kept {
                made[at] = Some(keep.read(r, at, t, &x.shape()));
                continue;
            }
            let observe = |scale: Var<'_>| r.op1(Quantize::new(t.dtype, false, false), &[x, r.var(scale.value())]);
            // Its scale, and three numbers beside it.
            let row = match states {
                Some([_, scales, ..]) => r.var(scales).slice(0, at, at + 1),
                None => {
                    let one = r.full(&[1], 1.0);
                    let now = [r.zeros(&[1, 1]), r.full(&[1, 4], 1.0), one, observe(one)];
                    r.op(Scales { types: vec![t.dtype] }, &now)[1]
                }
            };
            let scale = row.slice(1, 0, 1).reshape(&[1]);
            made[at] = Some(if active {
                let y = r.op(Quantize::new(t.dtype, t.rows, t.columns), &[x, scale]);
                if t.weight && how.weights == Weights::Keep {
                    keep.write(r, at, t, &y, row);
                }
                [y[0], y[t.rows as usize], scale, y[y.len() - 1]].map(|v| v.value())
            } else {
                [scale, scale, scale, observe(scale)].map(|v| v.value())
            });
        }
        if !active {
            return Ok(None);
        }
        let side = |(at, turned): (usize, bool)| {
            let [rows, columns, scale, _] = made[at].expect("made above").map(|v| r.var(v));
            (if turned { columns } else { rows }, scale)
        };
        let ((a, sa), (b, sb)) = (side(sides[0]), side(sides[1]));
        let exact = how.sums == "f32" || how.sums == "mixed" && node.backward;
        let op =
            Matmul { dtype: Some(node.outputs[0].dtype), scaled: Some(if exact { Sums::F32 } else { Sums::Fast }), ..Matmul::default() };
        Ok(Some(vec![r.op1(op, &[a, b.t(), sa, sb])]))
    })?;
    let bytes = keep.finish(g);
    if let Some([history, scales, steps, next]) = states {
        let parts: Vec<Value> = made.into_iter().map(|m| m.expect("every tensor is an operand")[3]).collect();
        let parts = push(g, Concat { axis: 0 }, parts);
        let after = push(g, Scales { types: sites.tensors.iter().map(|t| t.dtype).collect() }, vec![history, scales, steps, parts]);
        g.updates.extend([(history, after), (scales, Value { out: 1, ..after }), (steps, next)]);
    }
    crate::passes::dead_code::sweep(g);
    Ok(bytes)
}

/// Rounded weights that outlive a run of the program: states that the first micro-batch of a step writes and the others read.
struct Keep<'a> {
    name: &'a str,
    /// By tensor: which weight it is.
    numbers: HashMap<usize, usize>,
    /// Of all weights: rows with their scales, and the parts of their largest values.
    tables: Option<[Value; 2]>,
    /// What is written: (state, value), and by weight what goes into the tables.
    written: Vec<(Value, Value)>,
    rows: BTreeMap<usize, [Value; 2]>,
}

impl<'a> Keep<'a> {
    fn new(sites: &Sites, name: &'a str) -> Keep<'a> {
        let weights = sites.tensors.iter().enumerate().filter(|(_, t)| t.weight).map(|(at, _)| at);
        let numbers = weights.enumerate().map(|(number, at)| (at, number)).collect();
        Keep { name, numbers, tables: None, written: vec![], rows: BTreeMap::new() }
    }

    fn tables(&mut self, r: &Recorder) -> [Value; 2] {
        let state = |what: &str, width: usize| {
            r.state(&format!("{KEPT}{what}/{}", self.name), &[self.numbers.len(), width], DType::F32, Init::Full(0.0)).value()
        };
        *self.tables.get_or_insert_with(|| [state("scales", 4), state("largest", PARTS)])
    }

    fn rounded<'g>(&self, r: &'g Recorder, at: usize, what: &str, shape: &[usize], dtype: DType) -> Var<'g> {
        r.state(&format!("{KEPT}{what}/{}/{}", self.name, self.numbers[&at]), shape, dtype, Init::Full(0.0))
    }

    /// `y`: what `Quantize` makes of the weight. `row`: its scale, and three numbers beside it.
    fn write(&mut self, r: &Recorder, at: usize, t: &Tensor, y: &[Var], row: Var) {
        let needed = [("rows", t.rows), ("columns", t.columns)].into_iter().filter(|n| n.1);
        for ((what, _), v) in needed.zip(y) {
            self.written.push((self.rounded(r, at, what, &v.shape(), v.dtype()).value(), v.value()));
        }
        self.tables(r);
        self.rows.insert(self.numbers[&at], [row, y[y.len() - 1]].map(|v| v.value()));
    }

    /// A weight of this shape as it is, transposed, its scale, the parts of its largest value.
    fn read(&mut self, r: &Recorder, at: usize, t: &Tensor, shape: &[usize]) -> [Value; 4] {
        let rows = t.rows.then(|| self.rounded(r, at, "rows", shape, t.dtype));
        let columns = t.columns.then(|| self.rounded(r, at, "columns", &[shape[1], shape[0]], t.dtype));
        let (either, number) = (rows.or(columns).expect("it is an operand"), self.numbers[&at]);
        let [scale, largest] = self.tables(r).map(|table| r.var(table).slice(0, number, number + 1));
        [rows.unwrap_or(either), columns.unwrap_or(either), scale.slice(1, 0, 1).reshape(&[1]), largest].map(|v| v.value())
    }

    /// Writes the tables; returns the bytes of all that is written.
    fn finish(self, g: &mut Graph) -> usize {
        g.updates.extend(&self.written);
        if let (Some(tables), false) = (self.tables, self.rows.is_empty()) {
            for (k, table) in tables.into_iter().enumerate() {
                let all = push(g, Concat { axis: 0 }, self.rows.values().map(|row| row[k]).collect());
                g.updates.push((table, all));
            }
        }
        self.written.iter().map(|(state, _)| g.meta(*state).bytes()).sum()
    }
}

/// On several ranks, scales follow from the largest values of all of them: one exchange of a number a tensor in each step. So all ranks round alike, and as one rank would.
pub fn in_common(g: &mut Graph, ranks: &Ranks) -> Result<(), Error> {
    if ranks.size() == 1 {
        return Ok(());
    }
    g.rewrite(|w, _, node, inputs| {
        let Some(op) = node.op::<Scales>() else { return Ok(None) };
        let (count, mut x) = (op.types.len(), inputs.to_vec());
        let mut most = x[3].max_axis(1).reshape(&[1, count]);
        for group in [&ranks.data, &ranks.tensor].into_iter().filter(|group| group.size > 1) {
            let all = all_gather(most, 0, group);
            most = crate::mutant!("fp8-scales-of-one-rank-alone", all.max_axis(0), all.slice(0, 0, 1));
        }
        x[3] = w.recorder.zeros(&x[3].shape()) + most.reshape(&[count, 1]);
        Ok(Some(w.keep(node, &x)))
    })
}

/// Adds a node at the end, and returns its first output.
fn push(g: &mut Graph, op: impl Op, inputs: Vec<Value>) -> Value {
    let metas: Vec<Meta> = inputs.iter().map(|&v| g.meta(v).clone()).collect();
    let outputs = op.infer(&metas);
    let kind = Kind::Op(Arc::new(op));
    g.nodes.push(Node { kind, inputs, outputs, scope: "fp8".into(), backward: false, block: 0, typed: false, narrow: false });
    Value { node: g.nodes.len() - 1, out: 0 }
}
