//! The interface for model code: a [`Recorder`], and [`Var`]s that are used like tensors in PyTorch.

use crate::graph::{Graph, Init, Kind, Node, Role, State, Value};
use crate::meta::{DType, Meta};
use crate::op::Op;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The most bytes of one constant in a graph.
pub const MOST_TABLE: usize = 1 << 30;

/// Records ops, in the order in which model code calls them, as a [`Graph`].
pub struct Recorder {
    graph: RefCell<Graph>,
    /// Nodes of feeds, by name.
    feeds: RefCell<HashMap<String, usize>>,
    /// Nodes of states, by name.
    states: RefCell<HashMap<String, usize>>,
    updated: RefCell<HashSet<Value>>,
    scope: RefCell<Arc<str>>,
    backward: Cell<bool>,
    block: Cell<u32>,
    blocks: Cell<u32>,
    typed: Cell<bool>,
    narrow: Cell<bool>,
    sites: Cell<u32>,
}

/// A tensor in the graph that is being recorded. Copy, so that it is used like a number.
#[derive(Clone, Copy)]
pub struct Var<'g> {
    recorder: &'g Recorder,
    value: Value,
}

impl std::fmt::Debug for Var<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "%{}.{} {:?}", self.value.node, self.value.out, self.meta())
    }
}

impl Default for Recorder {
    fn default() -> Recorder {
        Recorder::new()
    }
}

impl Recorder {
    /// An empty graph.
    pub fn new() -> Recorder {
        Recorder {
            graph: RefCell::default(),
            feeds: RefCell::default(),
            states: RefCell::default(),
            updated: RefCell::default(),
            scope: RefCell::new("".into()),
            backward: Cell::new(false),
            block: Cell::new(0),
            blocks: Cell::new(0),
            typed: Cell::new(false),
            narrow: Cell::new(false),
            sites: Cell::new(0),
        }
    }

    /// An input that every run is given.
    #[track_caller]
    pub fn feed(&self, name: &str, shape: &[usize], dtype: DType) -> Var<'_> {
        assert!(!matches!(dtype, DType::BF16 | DType::F16), "feed '{name}' must be f32, i32 or u8: cast it in the graph");
        self.named(name, Kind::Feed(name.into()), Meta::new(shape, dtype))
    }

    /// A tensor that keeps its value between runs, in the [`Store`](crate::Store).
    #[track_caller]
    pub fn state(&self, name: &str, shape: &[usize], dtype: DType, init: Init) -> Var<'_> {
        let state = State { name: name.into(), init, role: Role::Carried };
        self.named(name, Kind::State(state), Meta::new(shape, dtype))
    }

    /// A parameter: an f32 state that is trained, and saved with the model.
    #[track_caller]
    pub fn param(&self, name: &str, shape: &[usize], init: Init) -> Var<'_> {
        let state = State { name: name.into(), init, role: Role::Param };
        self.named(name, Kind::State(state), Meta::f32(shape))
    }

    /// A weight that is loaded and not trained. Recorded as f32; a pass may store it in another type.
    #[track_caller]
    pub fn frozen(&self, name: &str, shape: &[usize], init: Init) -> Var<'_> {
        let state = State { name: name.into(), init, role: Role::Frozen };
        self.named(name, Kind::State(state), Meta::f32(shape))
    }

    /// A state of any type and role.
    #[track_caller]
    pub(crate) fn state_as(&self, name: &str, meta: Meta, init: Init, role: Role) -> Var<'_> {
        self.named(name, Kind::State(State { name: name.into(), init, role }), meta)
    }

    /// Recording a name again gives the same value.
    #[track_caller]
    fn named(&self, name: &str, kind: Kind, meta: Meta) -> Var<'_> {
        let names = if matches!(kind, Kind::Feed(_)) { &self.feeds } else { &self.states };
        let known = names.borrow().get(name).copied();
        let Some(node) = known else { return self.push(kind, vec![], vec![meta])[0] };
        let var = self.var(Value { node, out: 0 });
        assert_eq!(var.meta(), meta, "'{name}' was already recorded with another shape or type");
        // Two blocks that use the same name would silently share the parameter; a block that is recorded again (recursion) has the same scope.
        let (first, scope) = self.with_graph(|g| (g.nodes[node].block, g.nodes[node].scope.clone()));
        let other = first != 0 && self.block.get() != 0 && first != self.block.get() && scope != *self.scope.borrow();
        let apart = crate::mutant!("blocks-share-parameters", other, false);
        assert!(
            !apart || matches!(kind, Kind::Feed(_)),
            "parameter '{name}' of block '{}' is that of block '{scope}': give each a name of its own (\"{}.{name}\"), or record it outside of the blocks to share it",
            self.scope.borrow(),
            self.scope.borrow(),
        );
        var
    }

    /// A constant with these numbers.
    #[track_caller]
    pub fn constant(&self, shape: &[usize], numbers: Vec<f32>) -> Var<'_> {
        self.table(shape, || numbers)
    }

    /// A constant that may be large: `numbers` is called only if it fits into [`MOST_TABLE`]. Otherwise `passes::run` refuses the graph.
    #[track_caller]
    pub fn table(&self, shape: &[usize], numbers: impl FnOnce() -> Vec<f32>) -> Var<'_> {
        let meta = Meta::f32(shape);
        let numbers = if meta.bytes() > MOST_TABLE { vec![] } else { numbers() };
        assert!(
            meta.bytes() > MOST_TABLE || meta.elements() == numbers.len(),
            "a constant of shape {shape:?} needs as many numbers as the shape has elements"
        );
        self.push(Kind::Const(Arc::new(numbers)), vec![], vec![meta])[0]
    }

    /// Records an op and returns its outputs. Panics, naming the caller's line, if the inputs' shapes do not fit.
    #[track_caller]
    pub fn op<'g>(&'g self, op: impl Op, inputs: &[Var<'g>]) -> Vec<Var<'g>> {
        self.op_arc(Arc::new(op), inputs)
    }

    /// An op with one output.
    #[track_caller]
    pub fn op1<'g>(&'g self, op: impl Op, inputs: &[Var<'g>]) -> Var<'g> {
        self.op(op, inputs)[0]
    }

    /// As [`Recorder::op`], for an op that is shared already.
    #[track_caller]
    pub fn op_arc<'g>(&'g self, op: Arc<dyn Op>, inputs: &[Var<'g>]) -> Vec<Var<'g>> {
        let metas: Vec<Meta> = inputs.iter().map(|v| v.meta()).collect();
        // `infer` panics where shapes do not fit; panic again here, so that the message names the model's line (`track_caller`).
        let outputs = match catch_unwind(AssertUnwindSafe(|| op.infer(&metas))) {
            Ok(outputs) => outputs,
            Err(why) => {
                let why = why.downcast_ref::<String>().cloned().or_else(|| why.downcast_ref::<&str>().map(|s| s.to_string()));
                let scope = self.scope.borrow().clone();
                let place = if scope.is_empty() { String::new() } else { format!(" (in {scope})") };
                panic!("{}: {}{place}", op.name(), why.unwrap_or_default())
            }
        };
        self.push(Kind::Op(op), inputs.iter().map(|v| v.value).collect(), outputs)
    }

    /// Gradients of `loss` (one element) with respect to each of `by`.
    #[track_caller]
    pub fn grad<'g>(&'g self, loss: Var<'g>, by: &[Var<'g>]) -> Vec<Var<'g>> {
        assert_eq!(loss.meta().elements(), 1, "grad needs a loss of one element, not {:?}", loss.meta());
        let inputs = [&[loss], by].concat();
        self.push(Kind::Grad, inputs.iter().map(|v| v.value).collect(), by.iter().map(|v| v.meta()).collect())
    }

    /// Makes a value readable after a run, by name.
    pub fn output(&self, name: &str, v: Var) {
        self.graph.borrow_mut().outputs.push((name.into(), v.value));
    }

    /// Gives a state a new value at the end of the run. Ops of the run read the old one.
    #[track_caller]
    pub fn update(&self, state: Var, value: Var) {
        let mut g = self.graph.borrow_mut();
        assert!(matches!(g.nodes[state.value.node].kind, Kind::State(_)), "the first argument of update must be a state");
        assert_eq!(g.meta(state.value), g.meta(value.value), "update: the new value must have the state's shape and type");
        assert!(self.updated.borrow_mut().insert(state.value), "a state may be updated only once in a run");
        g.updates.push((state.value, value.value));
    }

    /// Everything that `f` records gets `name` as a scope, shown in messages, receipts and profiles. Scopes nest: `blocks.3.attn`.
    pub fn scope<R>(&self, name: &str, f: impl FnOnce() -> R) -> R {
        let outer = self.scope.borrow().clone();
        *self.scope.borrow_mut() = if outer.is_empty() { name.into() } else { format!("{outer}.{name}").into() };
        let result = f();
        *self.scope.borrow_mut() = outer;
        result
    }

    /// A scope that is one of the model's repeated blocks. The pass `recompute` with what=blocks keeps only inputs and outputs of blocks.
    pub fn block<R>(&self, name: &str, f: impl FnOnce() -> R) -> R {
        self.blocks.set(self.blocks.get() + 1);
        let outer = self.block.replace(self.blocks.get());
        let result = self.scope(name, f);
        self.block.set(outer);
        result
    }

    /// What `f` records keeps its types: the pass `bf16` leaves it alone, and casts its inputs back.
    pub fn typed<R>(&self, f: impl FnOnce() -> R) -> R {
        let outer = self.typed.replace(true);
        let result = f();
        self.typed.set(outer);
        result
    }

    /// Lets mixed-precision passes such as `bf16` round what `f` records, although no loss depends on it: an optimizer's matmuls, as in Muon.
    pub fn narrow<R>(&self, f: impl FnOnce() -> R) -> R {
        let outer = self.narrow.replace(true);
        let result = f();
        self.narrow.set(outer);
        result
    }

    /// Whether a value was recorded inside of a block, such as a layer's weight.
    pub fn is_in_block(&self, v: Var) -> bool {
        self.graph.borrow().nodes[v.value.node].block != 0
    }

    /// A number for an op that draws random numbers, so that its draws are the same whatever passes do later.
    pub fn new_site(&self) -> u32 {
        self.sites.set(self.sites.get() + 1);
        self.sites.get()
    }

    /// All parameters recorded so far, by name.
    pub fn params(&self) -> Vec<(String, Var<'_>)> {
        let g = self.graph.borrow();
        let param = |(node, n): (usize, &Node)| match &n.kind {
            Kind::State(s) if s.role == Role::Param => Some((s.name.clone(), self.var(Value { node, out: 0 }))),
            _ => None,
        };
        g.nodes.iter().enumerate().filter_map(param).collect()
    }

    /// The recorded graph.
    pub fn finish(self) -> Graph {
        self.graph.into_inner()
    }

    pub(crate) fn var(&self, value: Value) -> Var<'_> {
        Var { recorder: self, value }
    }

    /// What is recorded next has the scope, block and flags of `node`.
    pub(crate) fn set_place(&self, node: &Node) {
        *self.scope.borrow_mut() = node.scope.clone();
        self.backward.set(node.backward);
        self.block.set(node.block);
        self.typed.set(node.typed);
        self.narrow.set(node.narrow);
    }

    pub(crate) fn set_backward(&self, scope: &Arc<str>) {
        *self.scope.borrow_mut() = scope.clone();
        self.backward.set(true);
        self.block.set(0);
        self.typed.set(false);
        self.narrow.set(false);
    }

    /// The same state in another type.
    pub(crate) fn retyped(&self, state: &State, meta: Meta) -> Var<'_> {
        self.push(Kind::State(state.clone()), vec![], vec![meta])[0]
    }

    pub(crate) fn keep(&self, node: &Node, inputs: Vec<Value>) -> Vec<Value> {
        let vars = self.push(node.kind.clone(), inputs, node.outputs.clone());
        vars.iter().map(|v| v.value).collect()
    }

    pub(crate) fn with_graph<R>(&self, f: impl FnOnce(&Graph) -> R) -> R {
        f(&self.graph.borrow())
    }

    #[track_caller]
    fn push(&self, kind: Kind, inputs: Vec<Value>, outputs: Vec<Meta>) -> Vec<Var<'_>> {
        assert!(outputs.iter().all(|m| m.elements() > 0), "a tensor has no elements: {outputs:?}");
        let mut g = self.graph.borrow_mut();
        let (node, count) = (g.nodes.len(), outputs.len());
        match &kind {
            Kind::Feed(name) => drop(self.feeds.borrow_mut().entry(name.clone()).or_insert(node)),
            Kind::State(s) => drop(self.states.borrow_mut().entry(s.name.clone()).or_insert(node)),
            _ => {}
        }
        let (scope, backward, block) = (self.scope.borrow().clone(), self.backward.get(), self.block.get());
        g.nodes.push(Node { kind, inputs, outputs, scope, backward, block, typed: self.typed.get(), narrow: self.narrow.get() });
        (0..count).map(|out| self.var(Value { node, out })).collect()
    }
}

impl<'g> Var<'g> {
    /// Shape and type.
    pub fn meta(&self) -> Meta {
        self.recorder.graph.borrow().meta(self.value).clone()
    }

    /// The sizes of all dimensions, outermost first.
    pub fn shape(&self) -> Vec<usize> {
        self.meta().shape
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.meta().dtype
    }

    /// The size of the dimension `back` places from the last: `dim(0)` is the innermost.
    #[track_caller]
    pub fn dim(&self, back: usize) -> usize {
        self.meta().dim(back)
    }

    /// The recorder that it was recorded with.
    pub fn recorder(&self) -> &'g Recorder {
        self.recorder
    }

    /// Its node and output in the graph, for passes.
    pub fn value(&self) -> Value {
        self.value
    }
}
