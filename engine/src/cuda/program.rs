//! A planned graph on the GPU: kernels and GEMMs with their addresses, launched one by one or replayed as one CUDA graph.

use super::fallback::{self, Fallback};
use super::gemm::Product;
use super::nccl::{self, Sent};
use super::options::Options;
use super::products::Products;
use super::transfer::{Event, Feeds, Incoming};
use super::{Cuda, Kernel, Memory, failed};
use crate::cpu::Data;
use crate::error::Error;
use crate::graph::{Graph, Kind, Node, Value};
use crate::kernel::{Arch, At, Code, Io, Live, Place, Step};
use crate::meta::{DType, is_contiguous};
use crate::ops::collective::{Collective, What, aside::joins};
use crate::ops::view::Reshape;
use crate::passes::Mode;
use crate::plan::{Home, Plan, Spot, view_roots};
use crate::ranks::Group;
use crate::store::Store;
use cudarc::driver::{result, sys};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

mod profile;

pub use profile::Timed;

/// A byte offset in the arena or in a source's memory.
#[derive(Clone, Copy)]
enum Address {
    Arena(usize),
    Source(usize, usize),
}

impl Address {
    fn plus(self, bytes: usize) -> Address {
        match self {
            Address::Arena(o) => Address::Arena(o + bytes),
            Address::Source(n, o) => Address::Source(n, o + bytes),
        }
    }

    /// Its alignment in bytes: the largest power of two that divides it, up to the 256 of every buffer.
    fn aligned(self) -> u32 {
        let (Address::Arena(bytes) | Address::Source(_, bytes)) = self;
        1 << (bytes | 256).trailing_zeros()
    }
}

/// A launch with its addresses.
enum Ready {
    Launch {
        kernel: Kernel,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        args: Vec<Address>,
        tensor_cores: bool,
    },
    /// `places`: a, b, the added matrix, c.
    Gemm {
        product: Product,
        places: [Address; 4],
        bias: Option<Address>,
        scales: Option<[Address; 2]>,
        flops: u64,
        tensor_cores: bool,
    },
    Copy {
        from: Address,
        to: Address,
        bytes: usize,
    },
    /// Values: from, to, elements, their type. `beside`: its number among the exchanges that run on a stream of their own.
    Exchange {
        what: What,
        group: Group,
        values: Vec<(Address, Address, usize, DType)>,
        beside: Option<usize>,
    },
    /// Waits for the exchange of this number.
    Await(usize),
}

/// Of an exchange beside other work: when its values are there, and when it is done.
struct Fork {
    ready: Event,
    done: Event,
}

/// A planned graph on the GPU.
pub struct CudaProgram {
    graph: Graph,
    plan: Plan,
    cuda: Cuda,
    steps: Vec<Ready>,
    /// For each step, the index of the condition without which it is skipped.
    when: Vec<Option<usize>>,
    /// (feed's node, how many of its entries must not be negative).
    conditions: Vec<(usize, Live)>,
    /// One for each exchange that runs beside other work.
    forks: Vec<Fork>,
    /// Whether everything runs on one stream, for times of single nodes.
    serial: bool,
    /// (node, its steps).
    nodes: Vec<(usize, Range<usize>)>,
    arena: Arc<Mutex<Memory>>,
    /// Memory of constants, by node.
    own: Vec<Option<Memory>>,
    feeds: Feeds,
    options: Options,
    /// The addresses that the captured graphs contain.
    bases: Vec<u64>,
    /// A CUDA graph for every combination of steps that was run so far.
    captured: Vec<Captured>,
    /// What did not work, and that the caller has not been told of.
    fell_back: Vec<Fallback>,
    /// The program's number in the profile that is being made; 0 where none is.
    traced: u32,
}

/// The most captured graphs that are kept.
const MOST_CAPTURED: usize = 32;

struct Captured {
    exec: sys::CUgraphExec,
    /// For each condition, whether it held.
    chosen: Vec<bool>,
}

// SAFETY: handles of the driver, used under the context that `cuda` makes current.
unsafe impl Send for CudaProgram {}

/// The launches of each node; none for views and sources.
pub fn codes<'a>(g: &'a Graph, spots: &'a [Vec<Spot>], arch: Arch) -> impl Iterator<Item = Code> + 'a {
    let code = coder(g, spots);
    (0..g.nodes.len()).map(move |node| code(node, arch))
}

/// Gives the launches of a node on a GPU.
pub fn coder<'a>(g: &'a Graph, spots: &'a [Vec<Spot>]) -> impl Fn(usize, Arch) -> Code + 'a {
    // Buffer -> the first node that writes to it.
    let mut written: HashMap<usize, usize> = HashMap::new();
    for (i, _) in g.nodes.iter().enumerate().filter(|(_, n)| !n.is_source() && !n.is_view()) {
        for spot in &spots[i] {
            written.entry(spot.buffer).or_insert(i);
        }
    }
    move |node, arch| match &g.nodes[node].kind {
        Kind::Op(op) if !op.is_view() => {
            let inputs = || g.nodes[node].inputs.iter().map(|v| &spots[v.node][v.out]);
            let (strides, offsets) = (inputs().map(|s| s.strides.clone()).collect(), inputs().map(|s| s.offset).collect());
            let settled = g.nodes[node].inputs.iter().map(|&v| is_settled(g, spots, &written, node, v)).collect();
            op.cuda(&Io { x: g.inputs(node), strides, offsets, y: g.nodes[node].outputs.clone(), settled, arch })
        }
        _ => Code::default(),
    }
}

/// The feed that `v` is, looking through reshapes.
pub(super) fn feed(g: &Graph, v: Value) -> Option<usize> {
    let node = &g.nodes[v.node];
    match &node.kind {
        Kind::Feed(_) => Some(v.node),
        Kind::Op(_) if node.op::<Reshape>().is_some() => feed(g, node.inputs[0]),
        _ => None,
    }
}

/// Whether `v` is a source, or a view of one, that nothing before `node` writes. Feeds are copied before the first launch.
fn is_settled(g: &Graph, spots: &[Vec<Spot>], written: &HashMap<usize, usize>, node: usize, v: Value) -> bool {
    let source = &g.nodes[v.node];
    match &source.kind {
        Kind::State(_) => written.get(&spots[v.node][v.out].buffer).is_none_or(|&first| first >= node),
        Kind::Op(op) => op.is_view() && is_settled(g, spots, written, node, source.inputs[0]),
        Kind::Grad => false,
        Kind::Feed(_) | Kind::Const(_) => true,
    }
}

/// Makes the arena that programs share at least this large.
fn grow(cuda: &Cuda, arena: &Mutex<Memory>, bytes: usize) -> Result<(), Error> {
    let mut memory = arena.lock().unwrap_or_else(PoisonError::into_inner);
    if memory.bytes() < bytes {
        cuda.synchronize()?;
        *memory = cuda.allocate(256)?; // free the smaller one first
        *memory = cuda.allocate(bytes)?;
    }
    Ok(())
}

/// The memory of a constant, filled; None for other nodes.
fn constant(cuda: &Cuda, node: &Node) -> Result<Option<Memory>, Error> {
    let Kind::Const(numbers) = &node.kind else { return Ok(None) };
    let memory = cuda.allocate(4 * numbers.len())?;
    cuda.upload(&memory, bytemuck::cast_slice(&numbers[..]))?;
    Ok(Some(memory))
}

/// Makes a program's steps, node by node.
struct Builder<'a> {
    graph: &'a Graph,
    plan: &'a Plan,
    /// One for each launch, in order.
    kernels: std::vec::IntoIter<Kernel>,
    products: Products<'a>,
    steps: Vec<Ready>,
    /// Of each step, the condition under which it runs.
    when: Vec<Option<usize>>,
    conditions: Vec<(usize, Live)>,
    /// (the node that waits, the number of the exchange that it waits for), of exchanges that run beside other work.
    awaited: Vec<(usize, usize)>,
    /// How many of these there are so far.
    forks: usize,
    /// Node of such an exchange -> the first node that needs its results.
    joins: HashMap<usize, usize>,
}

impl Builder<'_> {
    fn address(&self, v: Value) -> Address {
        let spot = &self.plan.spots[v.node][v.out];
        let bytes = spot.offset * self.graph.meta(v).dtype.size();
        match self.plan.buffers[spot.buffer].home {
            Home::Arena(o) => Address::Arena(o + bytes),
            Home::Source(n) => Address::Source(n, bytes),
        }
    }

    fn resolve(&self, i: usize, p: &Place) -> Address {
        let start = match p.at {
            At::X(k) => self.address(self.graph.nodes[i].inputs[k]),
            At::Y(out) => self.address(Value { node: i, out }),
            At::Work => Address::Arena(self.plan.scratch(i)),
        };
        start.plus(p.bytes)
    }

    /// The copies that the plan wants before a node, then its steps.
    fn node(&mut self, i: usize, code: &Code) -> Result<(), Error> {
        self.wait_before(i);
        let node = &self.graph.nodes[i];
        for c in self.plan.copies.iter().filter(|c| c.node == i) {
            let (from, to) = (node.inputs[c.input], Value { node: i, out: c.out });
            let at = self.address(to).plus(c.at * self.graph.meta(to).dtype.size());
            self.steps.push(Ready::Copy { from: self.address(from), to: at, bytes: self.graph.meta(from).bytes() });
        }
        for step in &code.steps {
            let (live, step) = match step {
                Step::When(live, step) => (Some(*live), &**step),
                step => (None, step),
            };
            let condition = match live.map(|live| self.condition(i, live)) {
                None => None,
                Some(Ok(condition)) => condition,
                Some(Err(Never)) => {
                    step.kernel().and_then(|_| self.kernels.next());
                    continue;
                }
            };
            self.when.resize(self.steps.len(), None);
            if let Step::Collective(c) = step {
                self.collective(i, c)?;
                continue;
            }
            self.when.push(condition);
            let ready = self.ready(i, step)?;
            self.steps.push(ready);
        }
        Ok(())
    }

    /// The number of a condition that a feed decides when the program runs; None where it always holds.
    fn condition(&mut self, i: usize, live: Live) -> Result<Option<usize>, Never> {
        let input = self.graph.nodes[i].inputs[live.input];
        match feed(self.graph, input) {
            Some(feed) => {
                let known = self.conditions.iter().position(|c| *c == (feed, live));
                let number = known.unwrap_or(self.conditions.len());
                self.conditions.extend(known.is_none().then_some((feed, live)));
                Ok(Some(number))
            }
            None if live.holds(self.graph.meta(input).elements()) => Ok(None),
            None => Err(Never),
        }
    }

    fn ready(&mut self, i: usize, step: &Step) -> Result<Ready, Error> {
        Ok(match step {
            Step::When(..) | Step::Collective(_) => unreachable!("dealt with before"),
            Step::Launch(l) => Ready::Launch {
                kernel: self.kernels.next().expect("one for each launch"),
                grid: l.grid,
                block: l.block,
                shared: l.shared,
                args: l.args.iter().map(|p| self.resolve(i, p)).collect(),
                tensor_cores: l.source.contains("mma"),
            },
            Step::Gemm(g) => {
                let places = [&g.a, &g.b, g.plus.as_ref().unwrap_or(&g.c), &g.c].map(|m| self.resolve(i, &m.place));
                let bias = g.bias.as_ref().map(|p| self.resolve(i, p));
                let scales = g.scaled.map(|s| s.by.map(|p| self.resolve(i, &p)));
                let flops = 2 * (g.batch * g.m * g.n * g.k) as u64;
                let tensor_cores = self.products.uses_tensor_cores(g);
                Ready::Gemm { product: self.products.plan(g, places.map(|a| a.aligned()))?, places, bias, scales, flops, tensor_cores }
            }
        })
    }

    /// Waits for exchanges beside other work whose results node `i` is the first to need.
    fn wait_before(&mut self, i: usize) {
        let due: Vec<usize> = self.awaited.extract_if(.., |(node, _)| *node <= i).map(|a| a.1).collect();
        self.steps.extend(due.into_iter().map(Ready::Await));
        self.when.resize(self.steps.len(), None);
    }

    /// An exchange with other ranks; of one rank alone, copies.
    fn collective(&mut self, i: usize, c: &Collective) -> Result<(), Error> {
        if c.group.on_gpus().is_some() {
            c.parts.iter().try_for_each(|p| nccl::can(c.what, p.dtype))?;
            let values = c.parts.iter().map(|p| (self.resolve(i, &p.from), self.resolve(i, &p.to), p.elements, p.dtype)).collect();
            let beside = c.group.aside.then_some(self.forks);
            if let Some(number) = beside {
                self.forks += 1;
                self.awaited.push((self.joins.get(&i).copied().unwrap_or(i + 1), number));
            }
            self.steps.push(Ready::Exchange { what: c.what, group: c.group.clone(), values, beside });
            self.when.resize(self.steps.len(), None);
            return Ok(());
        }
        if c.group.size > 1 {
            return Err(Error::Ranks(format!("{} ranks are planned, and this program has no connection to them", c.group.size)));
        }
        for part in c.parts.iter().filter(|p| p.from != p.to) {
            let [from, to] = [part.from, part.to].map(|p| self.resolve(i, &p));
            self.steps.push(Ready::Copy { from, to, bytes: part.elements * part.dtype.size() });
        }
        self.when.resize(self.steps.len(), None);
        Ok(())
    }

    /// The copies into states at the end of a run.
    fn stores(&mut self) {
        self.wait_before(usize::MAX);
        for &(state, value) in &self.plan.stores {
            let to = Address::Source(state, 0);
            self.steps.push(Ready::Copy { from: self.address(value), to, bytes: self.graph.meta(value).bytes() });
        }
        self.when.resize(self.steps.len(), None);
    }
}

/// A step that never runs.
struct Never;

impl CudaProgram {
    /// Compiles the kernels of a planned graph, chooses GEMM algorithms, and enlarges the arena if it is too small.
    pub fn new(graph: Graph, mut plan: Plan, cuda: &Cuda, arena: &Arc<Mutex<Memory>>, options: Options) -> Result<CudaProgram, Error> {
        let arch = options.arch(cuda.arch());
        let fallback::Kernels { codes, kernels, fell_back } =
            fallback::kernels(&graph, arch, options.native, &coder(&graph, &plan.spots), &|wanted| cuda.kernels(wanted))?;
        if !fell_back.is_empty() {
            // Other kernels may need more scratch memory.
            plan = Plan::new(&graph, &|_, _| codes.iter().map(|c| c.workspace.div_ceil(4)).collect())?;
        }
        plan.verify(&graph)?;
        codes.iter().enumerate().try_for_each(|(i, code)| plan.has_scratch(&graph, i, code.workspace))?;
        grow(cuda, arena, plan.arena())?;
        let feeds = graph.nodes.iter().enumerate().filter(|(_, n)| matches!(n.kind, Kind::Feed(_)));
        let feeds = Feeds::new(cuda, &feeds.map(|(i, n)| (i, n.outputs[0].bytes())).collect::<Vec<_>>())?;
        let own = graph.nodes.iter().map(|n| constant(cuda, n)).collect::<Result<_, Error>>()?;
        let products = {
            let memory = arena.lock().unwrap_or_else(PoisonError::into_inner);
            Products::new(cuda, options, (memory.start(), memory.bytes()))
        };
        let mut b = Builder {
            graph: &graph,
            plan: &plan,
            kernels: kernels.into_iter(),
            products,
            steps: vec![],
            when: vec![],
            conditions: vec![],
            awaited: vec![],
            forks: 0,
            joins: joins(&graph, &view_roots(&graph)),
        };
        let mut nodes = vec![];
        for (i, code) in codes.iter().enumerate() {
            let first = b.steps.len();
            b.node(i, code)?;
            if b.steps.len() > first {
                nodes.push((i, first..b.steps.len()));
            }
        }
        b.stores();
        b.products.remember();
        let Builder { steps, when, conditions, forks, .. } = b;
        cuda.current();
        let forks = (0..forks).map(|_| Ok(Fork { ready: Event::new()?, done: Event::new()? })).collect::<Result<_, Error>>()?;
        Ok(CudaProgram {
            graph,
            plan,
            cuda: cuda.clone(),
            steps,
            when,
            conditions,
            forks,
            serial: false,
            nodes,
            arena: arena.clone(),
            own,
            feeds,
            options,
            bases: vec![],
            captured: vec![],
            fell_back,
            traced: 0,
        })
    }

    /// The arena's address, then every source's.
    fn bases(&self, store: &Store) -> Result<Vec<u64>, Error> {
        let arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        if arena.bytes() < self.plan.arena() {
            return Err(Error::Cuda("the arena was freed when another program did not fit: load this program again".into()));
        }
        let mut bases = vec![arena.start()];
        for (i, node) in self.graph.nodes.iter().enumerate() {
            bases.push(match &node.kind {
                Kind::State(s) => store.device(&s.name, &node.outputs[0])?.start(),
                Kind::Feed(_) => self.feeds.address(i).expect("made at load"),
                Kind::Const(_) => self.own[i].as_ref().expect("made at load").start(),
                _ => 0,
            });
        }
        Ok(bases)
    }

    /// Starts a run; the host does not wait for its end.
    pub fn run(&mut self, store: &mut Store, feeds: &[(&str, Data)]) -> Result<(), Error> {
        self.cuda.current();
        let stream = self.cuda.0.stream;
        self.send(feeds)?;
        let bases = self.bases(store)?;
        let chosen = self.chosen(feeds)?;
        if self.options.capture == Mode::Off {
            return self.launch(0..self.steps.len(), &bases, &chosen);
        }
        if self.bases != bases {
            self.forget();
            self.bases.clone_from(&bases);
        }
        let exec = match self.captured.iter().find(|c| c.chosen == chosen) {
            Some(known) => known.exec,
            None => match self.capture(&bases, &chosen) {
                Ok(exec) => {
                    if self.captured.len() == MOST_CAPTURED {
                        self.forget();
                    }
                    self.captured.push(Captured { exec, chosen });
                    exec
                }
                Err(e) => {
                    self.fell_back.push(fallback::uncaptured(self.options.capture, e)?);
                    self.options.capture = Mode::Off;
                    return self.launch(0..self.steps.len(), &bases, &chosen);
                }
            },
        };
        // SAFETY: the graph was instantiated from this stream's work; its addresses are those of this run.
        unsafe { result::graph::launch(exec, stream) }.map_err(failed("replaying"))
    }

    /// Starts to copy the feeds.
    fn send(&mut self, feeds: &[(&str, Data)]) -> Result<(), Error> {
        let g = &self.graph;
        self.feeds.send(&self.cuda, |i| match &g.nodes[i].kind {
            Kind::Feed(name) => Data::checked(name, &g.nodes[i].outputs[0], &g.parts, feeds),
            _ => unreachable!("only feeds are sent"),
        })
    }

    /// Captures the chosen steps as a CUDA graph.
    fn capture(&self, bases: &[u64], chosen: &[bool]) -> Result<sys::CUgraphExec, Error> {
        use sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let stream = self.cuda.0.stream;
        // SAFETY: the stream is ours; between begin and end only launches and device copies are made on it.
        unsafe {
            result::stream::begin_capture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(failed("capturing"))?;
            let launched = self.launch(0..self.steps.len(), bases, chosen);
            let graph = result::stream::end_capture(stream).map_err(failed("capturing"));
            launched?; // the first error, if capturing failed too
            let graph = graph?;
            let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)).map_err(failed("capturing"));
            let _ = result::graph::destroy(graph);
            exec
        }
    }

    /// What did not work since the last call, and was replaced.
    pub fn fell_back(&mut self) -> Vec<Fallback> {
        std::mem::take(&mut self.fell_back)
    }

    /// Bytes that it needs, by purpose.
    pub fn memory(&self) -> crate::plan::Memory {
        self.plan.memory
    }

    /// Whether each condition holds with these feeds.
    fn chosen(&self, feeds: &[(&str, Data)]) -> Result<Vec<bool>, Error> {
        let count = |feed: usize| {
            let node = &self.graph.nodes[feed];
            let Kind::Feed(name) = &node.kind else { unreachable!("only feeds are counted") };
            let numbers = Data::checked(name, &node.outputs[0], &self.graph.parts, feeds)?;
            Ok::<_, Error>(numbers.chunks_exact(4).filter(|n| n[3] < 128).count()) // i32, the sign in the last byte
        };
        let mut counts: HashMap<usize, usize> = HashMap::new();
        for &(feed, _) in &self.conditions {
            if let Entry::Vacant(new) = counts.entry(feed) {
                new.insert(count(feed)?);
            }
        }
        Ok(self.conditions.iter().map(|(feed, live)| live.holds(counts[feed])).collect())
    }

    fn forget(&mut self) {
        for c in self.captured.drain(..) {
            // SAFETY: instantiated by us, destroyed once; what was launched of it goes on.
            let _ = unsafe { result::graph::exec_destroy(c.exec) };
        }
    }

    /// Launches these steps, except those whose condition is not `chosen`.
    fn launch(&self, steps: Range<usize>, bases: &[u64], chosen: &[bool]) -> Result<(), Error> {
        let steps = steps.filter(|&i| self.when[i].is_none_or(|c| chosen[c]));
        let at = |a: &Address| match *a {
            Address::Arena(o) => bases[0] + o as u64,
            Address::Source(n, o) => bases[n + 1] + o as u64,
        };
        let stream = self.cuda.0.stream;
        // The first launch waits for everything before it: inputs that kernels prefetch may be written by an earlier program. So does one after an
        // exchange, which may be more than one kernel.
        let mut early = false;
        for i in steps {
            let _mark = self.mark(i);
            match &self.steps[i] {
                Ready::Launch { kernel, grid, block, shared, args, .. } => {
                    let mut values: Vec<u64> = args.iter().map(at).collect();
                    let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|v| std::ptr::from_mut(v).cast()).collect();
                    let mut overlap = sys::CUlaunchAttribute {
                        id: sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                        pad: [0; 4],
                        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
                    };
                    let config = sys::CUlaunchConfig {
                        gridDimX: grid[0],
                        gridDimY: grid[1],
                        gridDimZ: grid[2],
                        blockDimX: *block,
                        blockDimY: 1,
                        blockDimZ: 1,
                        sharedMemBytes: *shared,
                        hStream: stream,
                        attrs: &mut overlap,
                        numAttrs: (self.options.overlap && early) as u32,
                    };
                    // SAFETY: a kernel of an op with pointer arguments into buffers that the plan made large enough (`Plan::verify`); what it does there is
                    // the op's word, as `Op::cuda` says.
                    unsafe { sys::cuLaunchKernelEx(&config, kernel.0, pointers.as_mut_ptr(), std::ptr::null_mut()) }
                        .result()
                        .map_err(failed("launching a kernel"))?;
                }
                Ready::Gemm { product, places, bias, scales, .. } => {
                    let [a, b, plus, c] = places.each_ref().map(at);
                    let bias = bias.as_ref().map_or(0, at);
                    let scales = scales.as_ref().map(|s| s.each_ref().map(at));
                    // SAFETY: the matrices lie inside buffers of the plan, as the op described them.
                    unsafe { self.cuda.0.products.run(product, [a, b, plus, c, bias], scales, self.cuda.0.workspace.start(), stream)? };
                }
                Ready::Copy { from, to, bytes } => {
                    // SAFETY: both buffers have that many bytes and do not overlap (`Plan::verify`).
                    unsafe { result::memcpy_dtod_async(at(to), at(from), *bytes, stream) }.map_err(failed("copying"))?;
                }
                Ready::Exchange { what, group, values, beside } => {
                    let values: Vec<Sent> = values.iter().map(|(from, to, n, dtype)| Sent::new(at(from), at(to), *n, *dtype)).collect();
                    let link = group.on_gpus().expect("looked at when the program was loaded");
                    match beside.filter(|_| !self.serial).map(|number| &self.forks[number]) {
                        Some(fork) => {
                            let other = self.cuda.0.aside;
                            fork.ready.record(stream)?;
                            fork.ready.hold(other)?;
                            link.launch(*what, &values, true, other)?;
                            fork.done.record(other)?;
                        }
                        None => link.launch(*what, &values, beside.is_some(), stream)?,
                    }
                }
                Ready::Await(number) if !self.serial => self.forks[*number].done.hold(stream)?,
                Ready::Await(_) => {}
            }
            early = !matches!(self.steps[i], Ready::Exchange { .. } | Ready::Await(_));
        }
        Ok(())
    }

    /// Starts to copy an output of the last run to the host; the next run may start before it has arrived.
    pub fn start_read(&self, name: &str) -> Result<Incoming, Error> {
        let (_, v) = self.graph.outputs.iter().find(|o| o.0 == name).ok_or_else(|| Error::NoOutput(name.into()))?;
        let (spot, meta) = (&self.plan.spots[v.node][v.out], self.graph.meta(*v));
        match self.plan.buffers[spot.buffer].home {
            Home::Arena(o) if meta.dtype == DType::F32 && is_contiguous(&meta.shape, &spot.strides) => {
                let arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
                Incoming::start(&self.cuda, &arena, o + 4 * spot.offset, meta.bytes())
            }
            _ => Err(Error::NoOutput(format!("{name} (it is not computed in f32 by this program)"))),
        }
    }

    /// An output of the last run, in f32. Waits for the run.
    pub fn read(&self, name: &str, store: &Store) -> Result<Vec<f32>, Error> {
        let (_, v) = self.graph.outputs.iter().find(|o| o.0 == name).ok_or_else(|| Error::NoOutput(name.into()))?;
        let (spot, meta) = (&self.plan.spots[v.node][v.out], self.graph.meta(*v));
        let buffer = &self.plan.buffers[spot.buffer];
        let bytes = match &buffer.home {
            Home::Arena(o) => self.cuda.download(&self.arena.lock().unwrap_or_else(PoisonError::into_inner), *o, buffer.bytes)?,
            Home::Source(n) => match &self.graph.nodes[*n].kind {
                Kind::State(s) => self.cuda.download(store.device(&s.name, &self.graph.nodes[*n].outputs[0])?, 0, buffer.bytes)?,
                Kind::Feed(_) => self.cuda.download(self.feeds.device(), self.feeds.offset(*n), buffer.bytes)?,
                _ => self.cuda.download(self.own[*n].as_ref().expect("made at load"), 0, buffer.bytes)?,
            },
        };
        Ok(crate::cpu::strided(&bytes[spot.offset * meta.dtype.size()..], meta, &spot.strides))
    }
}

impl Drop for CudaProgram {
    fn drop(&mut self) {
        let _ = self.cuda.synchronize();
        self.forget();
    }
}

#[cfg(test)]
mod tests;
