//! Runs a planned graph as a GPU would, on the CPU: kernels emulated, GEMMs as plain loops.

use super::compile::{Kernels, Order};
use super::{codes, feed};
use crate::cpu::{Buffer, Data, strided, widened};
use crate::graph::{Graph, Kind, Value};
use crate::kernel::{Act, Arch, At, Code, Gemm, Launch, Matrix, Place, Step};
use crate::meta::DType;
use crate::passes::{Switches, Target};
use crate::plan::{Home, Plan};
use crate::program::Compiled;
use crate::store::Store;
use std::ops::Range;

const GAP: usize = 256;

/// A graph, and what each of its nodes does.
pub struct Emulated {
    graph: Graph,
    plan: Plan,
    codes: Vec<Code>,
    /// Guard zones that nothing may write, and the address of each source.
    gaps: Vec<Range<usize>>,
    sources: Vec<usize>,
    bytes: usize,
}

impl Emulated {
    pub fn new(graph: Graph, switches: &Switches, arch: Arch) -> Result<Emulated, String> {
        let mut c = Compiled::new(graph, switches, Target::Cuda(arch)).map_err(|e| e.to_string())?;
        let mut gaps = c.plan.spread(GAP);
        let codes = codes(&c.graph, &c.plan.spots, arch).collect();
        // Sources lie after the arena, with guard zones of their own.
        let (mut at, mut sources) = (c.plan.arena().next_multiple_of(GAP), vec![]);
        for node in &c.graph.nodes {
            sources.push(at + GAP);
            if node.is_source() {
                let end = at + GAP + node.outputs[0].bytes();
                gaps.extend([at..at + GAP, end..(end + GAP).next_multiple_of(GAP)]);
                at = (end + GAP).next_multiple_of(GAP);
            }
        }
        Ok(Emulated { graph: c.graph, plan: c.plan, codes, gaps, sources, bytes: at })
    }

    /// FLOPs and bytes: how long it will take.
    pub fn work(&self) -> u64 {
        self.plan.cost.flops + self.plan.cost.bytes
    }

    pub fn launches(&self) -> impl Iterator<Item = &Launch> {
        self.codes.iter().flat_map(|c| &c.steps).filter_map(Step::kernel)
    }

    /// The outputs, by name, of one run.
    pub fn run(&self, kernels: &Kernels, order: Order, feeds: &[(&str, Data)], names: &[String]) -> Result<Vec<Vec<f32>>, String> {
        let error = |e: crate::Error| e.to_string();
        let mut store = Store::new(5);
        store.ensure(&self.graph, None, &[]).map_err(error)?;
        let mut buffer = Buffer::zeroed(self.bytes + GAP);
        let first = buffer.bytes().as_ptr().align_offset(GAP);
        let memory = &mut buffer.bytes_mut()[first..first + self.bytes];
        memory.fill(order.poison());
        let beside = self.gaps.iter().flat_map(|g| g.clone());
        beside.for_each(|at| memory[at] = sentinel(at, order));
        for (i, node) in self.graph.nodes.iter().enumerate() {
            let numbers: &[u8] = match &node.kind {
                Kind::State(s) => store.host(&s.name, &node.outputs[0]).map_err(error)?.bytes(),
                Kind::Const(numbers) => bytemuck::cast_slice(numbers),
                Kind::Feed(name) => Data::checked(name, &node.outputs[0], &self.graph.parts, feeds).map_err(error)?,
                _ => continue,
            };
            memory[self.sources[i]..self.sources[i] + numbers.len()].copy_from_slice(numbers);
        }
        for i in 0..self.graph.nodes.len() {
            self.node(i, kernels, order, feeds, memory)?;
            let mut beside = self.gaps.iter().flat_map(|g| g.clone());
            if let Some(at) = beside.find(|&at| memory[at] != sentinel(at, order)) {
                let names: Vec<&str> = self.codes[i].steps.iter().filter_map(|s| Some(s.kernel()?.entry)).collect();
                return Err(format!("{}: something was written beside a buffer, at byte {at} of memory", names.join(", ")));
            }
        }
        for &(state, value) in &self.plan.stores {
            let (from, bytes) = (self.at(value), self.graph.meta(value).bytes());
            memory.copy_within(from..from + bytes, self.sources[state]);
        }
        for (i, node) in self.graph.nodes.iter().enumerate() {
            if let Kind::Feed(name) = &node.kind {
                let numbers = Data::checked(name, &node.outputs[0], &self.graph.parts, feeds).map_err(error)?;
                if memory[self.sources[i]..self.sources[i] + numbers.len()] != *numbers {
                    return Err(format!("feed {name} was written to"));
                }
            }
        }
        let read = |name: &String| {
            let (_, v) = self.graph.outputs.iter().find(|o| o.0 == *name).ok_or_else(|| format!("there is no output {name}"))?;
            Ok(strided(&memory[self.at(*v)..], self.graph.meta(*v), &self.plan.spots[v.node][v.out].strides))
        };
        names.iter().map(read).collect()
    }

    /// The address of a value.
    fn at(&self, v: Value) -> usize {
        let spot = &self.plan.spots[v.node][v.out];
        let start = match self.plan.buffers[spot.buffer].home {
            Home::Arena(o) => o,
            Home::Source(n) => self.sources[n],
        };
        start + spot.offset * self.graph.meta(v).dtype.size()
    }

    fn node(&self, i: usize, kernels: &Kernels, order: Order, feeds: &[(&str, Data)], memory: &mut [u8]) -> Result<(), String> {
        let node = &self.graph.nodes[i];
        for c in self.plan.copies.iter().filter(|c| c.node == i) {
            let (from, to) = (node.inputs[c.input], Value { node: i, out: c.out });
            let (bytes, first) = (self.graph.meta(from).bytes(), c.at * self.graph.meta(to).dtype.size());
            memory.copy_within(self.at(from)..self.at(from) + bytes, self.at(to) + first);
        }
        let resolve = |p: &Place| {
            p.bytes
                + match p.at {
                    At::X(k) => self.at(node.inputs[k]),
                    At::Y(out) => self.at(Value { node: i, out }),
                    At::Work => self.plan.scratch(i),
                }
        };
        for step in &self.codes[i].steps {
            let step = match step {
                Step::When(live, step) => {
                    let input = node.inputs[live.input];
                    let count = match feed(&self.graph, input).map(|f| &self.graph.nodes[f]) {
                        Some(source) => {
                            let Kind::Feed(name) = &source.kind else { unreachable!("a feed") };
                            let numbers = Data::checked(name, &source.outputs[0], &self.graph.parts, feeds).map_err(|e| e.to_string())?;
                            numbers.chunks_exact(4).filter(|n| n[3] < 128).count() // i32, the sign in the last byte
                        }
                        None => self.graph.meta(input).elements(),
                    };
                    if !live.holds(count) {
                        continue;
                    }
                    &**step
                }
                step => step,
            };
            match step {
                Step::Launch(l) => {
                    let start = memory.as_mut_ptr();
                    let args: Vec<*mut u8> = l.args.iter().map(|p| start.wrapping_add(resolve(p))).collect();
                    // SAFETY: the plan has every argument inside `memory`, which nothing else uses while the kernel runs.
                    unsafe { kernels.run(l, &args, order)? };
                }
                Step::Gemm(g) => product(g, resolve, memory),
                Step::Collective(c) => c.parts.iter().for_each(|p| {
                    let from = resolve(&p.from);
                    memory.copy_within(from..from + p.elements * p.dtype.size(), resolve(&p.to));
                }),
                Step::When(..) => unreachable!("one condition to a step"),
            }
        }
        Ok(())
    }
}

/// The content of guard zones, different at every address and in every run, so that reading it changes results, and overwriting it is noticed.
fn sentinel(at: usize, order: Order) -> u8 {
    ((at as u32 ^ order.poison() as u32).wrapping_mul(2_654_435_761) >> 24) as u8
}

/// A GEMM in f32, rounded once.
fn product(g: &Gemm, resolve: impl Fn(&Place) -> usize, memory: &mut [u8]) {
    // A contiguous matrix [rows, columns].
    let read = |memory: &[u8], m: &Matrix, batch: usize, rows: usize, columns: usize| -> Vec<f32> {
        let first = resolve(&m.place) + batch * m.batch * m.dtype.size();
        let extent = 1 + (rows - 1) * m.row + (columns - 1) * m.column;
        let all = widened(&memory[first..first + extent * m.dtype.size()], m.dtype);
        (0..rows * columns).map(|i| all[i / columns * m.row + i % columns * m.column]).collect()
    };
    for batch in 0..g.batch {
        let (a, b) = (read(memory, &g.a, batch, g.m, g.k), read(memory, &g.b, batch, g.k, g.n));
        let mut c = vec![0.0f32; g.m * g.n];
        for (row, sums) in a.chunks(g.k).zip(c.chunks_mut(g.n)) {
            for (&v, right) in row.iter().zip(b.chunks(g.n)) {
                sums.iter_mut().zip(right).for_each(|(s, &w)| *s += v * w);
            }
        }
        let plus = (g.beta != 0.0).then(|| read(memory, g.plus.as_ref().unwrap_or(&g.c), batch, g.m, g.n));
        let bias = g.bias.map(|p| widened(&memory[resolve(&p)..resolve(&p) + g.n * g.c.dtype.size()], g.c.dtype));
        let (first, size) = (resolve(&g.c.place) + batch * g.c.batch * g.c.dtype.size(), g.c.dtype.size());
        let scale = |p: &Place| f32::from_le_bytes(memory[resolve(p)..][..4].try_into().expect("four bytes"));
        let alpha = g.alpha * g.scaled.map_or(1.0, |s| scale(&s.by[0]) * scale(&s.by[1]));
        for (i, &sum) in c.iter().enumerate() {
            let v = alpha * sum + plus.as_ref().map_or(0.0, |p| g.beta * p[i]) + bias.as_ref().map_or(0.0, |b| b[i % g.n]);
            let v = match g.act {
                None => v,
                Some(Act::Relu) => v.max(0.0),
                Some(Act::Gelu) => 0.5 * v * (1.0 + (0.797_884_6 * (v + 0.044715 * v * v * v)).tanh()),
            };
            let at = first + (i / g.n * g.c.row + i % g.n * g.c.column) * size;
            let mut rounded = [0u8; 4];
            match g.c.dtype {
                DType::BF16 => rounded[..2].copy_from_slice(&half::bf16::from_f32(v).to_le_bytes()),
                DType::F16 => rounded[..2].copy_from_slice(&half::f16::from_f32(v).to_le_bytes()),
                _ => rounded = v.to_le_bytes(),
            }
            memory[at..at + size].copy_from_slice(&rounded[..size]);
        }
    }
}
