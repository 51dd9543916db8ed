//! Runs a planned graph, node by node.
#![allow(unsafe_code)]

use super::fp8;
use super::memory::{Buffer, Place};
use super::{Cpu, Data, View, ViewMut};
use crate::error::Error;
use crate::graph::{Graph, Kind, Value};
use crate::meta::{DType, Meta};
use crate::ops::concat::Join;
use crate::plan::{Home, Plan, Said, Spot};
use crate::profile;
use crate::store::Store;
use half::{bf16, f16};
use rayon::prelude::*;
use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError};

/// A graph and its plan, loaded on the CPU.
pub struct CpuProgram {
    graph: Graph,
    plan: Plan,
    /// What each node's op said of its memory when the plan was checked, and how many elements of scratch memory it has.
    said: Vec<(Said, usize)>,
    cpu: Cpu,
    /// Shared by the programs of a device, which run one at a time.
    arena: Arc<Mutex<Buffer>>,
    constants: Vec<Option<Buffer>>,
}

impl CpuProgram {
    /// Prepares a planned graph to run on a CPU, and enlarges the arena if it is too small. An error: the plan is not sound.
    pub fn new(graph: Graph, plan: Plan, cpu: &Cpu, arena: &Arc<Mutex<Buffer>>) -> Result<CpuProgram, Error> {
        let said = crate::mutant!("a-plan-is-not-verified", plan.verify(&graph)?, plan.said(&graph));
        let own = said.into_iter().enumerate().map(|(i, said)| {
            let elements = own_workspace(&graph, i);
            plan.has_scratch(&graph, i, CpuProgram::pieces(&graph, &plan.spots, i, elements).saturating_mul(4))?;
            Ok((said, elements))
        });
        let said = own.collect::<Result<Vec<_>, Error>>()?;
        let constants = graph.nodes.iter().map(|n| match &n.kind {
            Kind::Const(numbers) => {
                let mut b = Buffer::zeroed(4 * numbers.len());
                b.bytes_mut().copy_from_slice(bytemuck::cast_slice(numbers));
                Some(b)
            }
            _ => None,
        });
        let constants = constants.collect();
        let mut memory = arena.lock().unwrap_or_else(PoisonError::into_inner);
        if memory.bytes().len() < plan.arena() {
            *memory = Buffer::zeroed(0); // free the smaller one first
            let lacks = || Error::NoMemory { what: "a program's activations and workspace".into(), bytes: plan.arena() };
            *memory = Buffer::try_zeroed(plan.arena()).ok_or_else(lacks)?;
        }
        drop(memory);
        Ok(CpuProgram { graph, plan, said, cpu: cpu.clone(), arena: arena.clone(), constants })
    }

    /// f32 elements of scratch memory that a node needs: the op's own, and f32 copies of bf16 and f16 inputs and outputs.
    pub fn workspace(g: &Graph, spots: &[Vec<Spot>], node: usize) -> usize {
        CpuProgram::pieces(g, spots, node, own_workspace(g, node))
    }

    /// The same, of which `own` are the op's own.
    fn pieces(g: &Graph, spots: &[Vec<Spot>], node: usize, own: usize) -> usize {
        if g.nodes[node].is_source() || g.nodes[node].is_view() {
            return 0;
        }
        let wide = |m: &Meta, elements: usize| if is_narrow(m.dtype) { elements.next_multiple_of(16) } else { 0 };
        let read = g.nodes[node].inputs.iter().map(|v| wide(g.meta(*v), extent(&g.meta(*v).shape, &spots[v.node][v.out].strides)));
        let written = g.nodes[node].outputs.iter().map(|m| wide(m, m.elements()));
        let own = own.checked_next_multiple_of(16).unwrap_or(usize::MAX);
        read.chain(written).fold(own, usize::saturating_add)
    }

    /// Runs all nodes in order, and updates the states.
    pub fn run(&mut self, store: &mut Store, feeds: &[(&str, Data)]) -> Result<(), Error> {
        self.run_with(store, feeds, |_| ())
    }

    /// The same, with `after` called after each node, and without one at the very end.
    pub fn run_with(
        &mut self,
        store: &mut Store,
        feeds: &[(&str, Data)],
        mut after: impl FnMut(Option<usize>) + Send,
    ) -> Result<(), Error> {
        let arena = self.arena.clone();
        let mut arena = arena.lock().unwrap_or_else(PoisonError::into_inner);
        if arena.bytes().len() < self.plan.arena() {
            // It was freed when another program did not fit.
            return Err(Error::NoMemory { what: "a program's activations and workspace".into(), bytes: self.plan.arena() });
        }
        // Where the memory of every source lies in this run.
        let mut sources: Vec<*mut u8> = vec![std::ptr::null_mut(); self.graph.nodes.len()];
        for (i, node) in self.graph.nodes.iter().enumerate() {
            sources[i] = match &node.kind {
                Kind::State(s) => store.host(&s.name, &node.outputs[0])?.bytes_mut().as_mut_ptr(),
                Kind::Const(_) => self.constants[i].as_mut().expect("made at load").bytes_mut().as_mut_ptr(),
                Kind::Feed(name) => Data::checked(name, &node.outputs[0], &self.graph.parts, feeds)?.as_ptr().cast_mut(),
                _ => continue,
            };
        }
        let base = Base { arena: arena.bytes_mut().as_mut_ptr(), sources };
        let (graph, plan, said) = (&self.graph, &self.plan, &self.said);
        let run = move || {
            let base = base; // capture the whole struct, not its pointers one by one
            for (i, said) in said.iter().enumerate() {
                step(graph, plan, said, &base, i);
                after(Some(i));
            }
            for &(state, value) in &plan.stores {
                let dtype = graph.meta(value).dtype;
                let to = Value { node: state, out: 0 };
                // SAFETY: no op runs now; a state's buffer and another value's do not overlap (`Plan::verify`).
                unsafe { base.place(graph, plan, to).bytes_mut(dtype).copy_from_slice(base.place(graph, plan, value).bytes(dtype)) };
            }
            after(None);
        };
        // A collective whose ranks are gone unwinds with an error: see `ranks`.
        let ended = catch_unwind(AssertUnwindSafe(|| self.cpu.run(run)));
        ended.or_else(|why| why.downcast::<Error>().map_or_else(|other| resume_unwind(other), |e| Err(*e)))
    }

    /// The nodes that do something, and of each node of the graph its place among them.
    pub fn described(&self) -> (Vec<profile::Node>, Vec<Option<usize>>) {
        let (g, mut nodes) = (&self.graph, vec![]);
        let places = g.nodes.iter().enumerate().map(|(i, node)| match &node.kind {
            Kind::Op(op) if !op.is_view() => {
                let (inputs, outputs, scope) = (g.inputs(i), node.outputs.clone(), node.scope.to_string());
                let (cost, backward, tensor_cores, aside) = (op.cost(&inputs), node.backward, false, false);
                nodes.push(profile::Node {
                    op: op.name(),
                    scope,
                    backward,
                    inputs,
                    outputs,
                    cost,
                    tensor_cores,
                    multiprocessors: None,
                    aside,
                });
                Some(nodes.len() - 1)
            }
            _ => None,
        });
        let places = places.collect();
        (nodes, places)
    }

    /// An output of the last run, in f32. Read it before another program runs, which may overwrite it.
    pub fn read(&self, name: &str, store: &Store) -> Result<Vec<f32>, Error> {
        let (_, v) = self.graph.outputs.iter().find(|o| o.0 == name).ok_or_else(|| Error::NoOutput(name.into()))?;
        let spot = &self.plan.spots[v.node][v.out];
        let meta = self.graph.meta(*v);
        let size = meta.dtype.size();
        let arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: Cow<[u8]> = match &self.plan.buffers[spot.buffer].home {
            Home::Arena(o) => arena.bytes()[*o..*o + self.plan.buffers[spot.buffer].bytes].into(),
            Home::Source(n) => match &self.graph.nodes[*n].kind {
                Kind::State(s) => store.get(&s.name).ok_or_else(|| Error::NoState(s.name.clone()))?.bytes()?,
                Kind::Const(_) => self.constants[*n].as_ref().expect("made at load").bytes().into(),
                _ => return Err(Error::NoOutput(format!("{name} (it is a feed)"))),
            },
        };
        Ok(strided(&bytes[spot.offset * size..], meta, &spot.strides))
    }
}

/// f32 elements of scratch memory that a node's op asks for.
fn own_workspace(g: &Graph, node: usize) -> usize {
    match &g.nodes[node].kind {
        Kind::Op(op) if !op.is_view() => op.workspace(&g.inputs(node)),
        _ => 0,
    }
}

/// The elements of a view, in order, in f32.
pub fn strided(bytes: &[u8], meta: &Meta, strides: &[usize]) -> Vec<f32> {
    let all = widened(bytes, meta.dtype);
    let mut index = vec![0; meta.rank()];
    let mut out = Vec::with_capacity(meta.elements());
    for _ in 0..meta.elements() {
        out.push(all[index.iter().zip(strides).map(|(i, s)| i * s).sum::<usize>()]);
        for d in (0..index.len()).rev() {
            index[d] += 1;
            if index[d] < meta.shape[d] {
                break;
            }
            index[d] = 0;
        }
    }
    out
}

/// The number of elements from the first to the last that the strides reach.
fn extent(shape: &[usize], strides: &[usize]) -> usize {
    1 + shape.iter().zip(strides).map(|(n, s)| (n - 1) * s).sum::<usize>()
}

struct Base {
    arena: *mut u8,
    sources: Vec<*mut u8>,
}

// SAFETY: the pointers are used by the one thread that runs the program's nodes; it hands out slices that obey the plan.
unsafe impl Send for Base {}

impl Base {
    fn place(&self, g: &Graph, plan: &Plan, v: Value) -> Place {
        let (spot, meta) = (&plan.spots[v.node][v.out], g.meta(v));
        let start = match plan.buffers[spot.buffer].home {
            // SAFETY: `Plan::verify` has seen that the plan's offsets lie inside the arena, which is as large as the plan says.
            Home::Arena(o) => unsafe { self.arena.add(o) },
            Home::Source(n) => self.sources[n],
        };
        let elements = extent(&meta.shape, &spot.strides);
        // SAFETY: `Plan::verify` has seen that every value lies inside its buffer.
        Place { start: unsafe { start.add(spot.offset * meta.dtype.size()) }, elements }
    }
}

/// Runs a node. What `said` has is not asked again: an op that says something else now would have slices that overlap.
fn step(g: &Graph, plan: &Plan, (said, own): &(Said, usize), base: &Base, i: usize) {
    let node = &g.nodes[i];
    let Kind::Op(op) = &node.kind else { return };
    if said.is_view {
        return;
    }
    for c in plan.copies.iter().filter(|c| c.node == i) {
        let (from, to) = (node.inputs[c.input], Value { node: i, out: c.out });
        let dtype = g.meta(to).dtype;
        let first = c.at * dtype.size();
        // SAFETY: the output has a buffer of its own (that is why it is copied), as large as what is copied, and more.
        unsafe {
            let bytes = base.place(g, plan, from).bytes(dtype);
            base.place(g, plan, to).bytes_mut(dtype)[first..first + bytes.len()].copy_from_slice(bytes);
        }
    }
    if node.op::<Join>().is_some() {
        return; // the plan put or copied all inputs into place
    }
    let reuse = &said.reuse;
    // SAFETY: the workspace lies inside the arena, apart from everything that is alive while this op runs.
    let workspace = unsafe { base.arena.add(plan.scratch(i)) };
    let mut scratch = Scratch { start: workspace, used: 0, bytes: plan.scratch_bytes(i) };
    let inputs: Vec<(Vec<usize>, Data)> = (0..node.inputs.len())
        .map(|k| {
            let v = node.inputs[k];
            let reused = reuse.iter().any(|p| p.0 == k);
            (plan.spots[v.node][v.out].strides.clone(), input(base.place(g, plan, v), g.meta(v).dtype, reused, &mut scratch))
        })
        .collect();
    let x: Vec<View> =
        node.inputs.iter().zip(&inputs).map(|(&v, (strides, data))| View { shape: &g.meta(v).shape, strides, data: *data }).collect();
    let mut narrow_outputs = vec![];
    let mut y: Vec<ViewMut> = node
        .outputs
        .iter()
        .enumerate()
        .map(|(out, meta)| {
            let place = base.place(g, plan, Value { node: i, out });
            let data = if is_narrow(meta.dtype) {
                let wide = scratch.take(place.elements);
                if reuse.iter().any(|p| p.1 == out) {
                    // SAFETY: the output's buffer holds the reused input.
                    unsafe { widen(place.bytes(meta.dtype), meta.dtype, wide) };
                }
                narrow_outputs.push((place, meta.dtype, wide.as_ptr()));
                super::DataMut::F32(wide)
            } else {
                // SAFETY: an output's buffer belongs to this op alone while it runs.
                unsafe { place.write(meta.dtype) }
            };
            ViewMut { shape: &meta.shape, data }
        })
        .collect();
    let own = scratch.take(*own);
    op.cpu(&x, &mut y, own);
    drop(y);
    for (place, dtype, wide) in narrow_outputs {
        // SAFETY: the op is done; `wide` points to that many elements of workspace that it wrote.
        unsafe { narrow(std::slice::from_raw_parts(wide, place.elements), dtype, place.bytes_mut(dtype)) };
    }
}

/// An input's numbers; narrow ones are widened into the workspace.
fn input<'a>(mut place: Place, dtype: DType, reused: bool, scratch: &mut Scratch) -> Data<'a> {
    if reused {
        place.elements = 0; // the op reads these numbers from its output
    }
    if is_narrow(dtype) {
        let wide = scratch.take(place.elements);
        // SAFETY: `wide` is unused workspace; the input is initialised and not written during this op.
        unsafe { widen(place.bytes(dtype), dtype, wide) };
        return Data::F32(wide);
    }
    // SAFETY: the plan keeps an input's buffer apart from this op's outputs, except where `reused` empties it above.
    unsafe { place.read(dtype) }
}

struct Scratch {
    start: *mut u8,
    used: usize,
    bytes: usize,
}

impl Scratch {
    fn take<'a>(&mut self, elements: usize) -> &'a mut [f32] {
        let at = self.used;
        self.used += 4 * elements.next_multiple_of(16);
        assert!(elements == 0 || self.used <= self.bytes, "`CpuProgram::pieces` counted the same");
        // SAFETY: this lies inside the workspace, apart from earlier pieces.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at).cast(), elements) }
    }
}

fn is_narrow(d: DType) -> bool {
    matches!(d, DType::BF16 | DType::F16) || d.is_fp8()
}

fn widen(from: &[u8], dtype: DType, to: &mut [f32]) {
    match dtype {
        DType::BF16 => bytemuck::cast_slice::<u8, bf16>(from).par_iter().zip(to).with_min_len(4096).for_each(|(a, b)| *b = a.to_f32()),
        DType::F16 => bytemuck::cast_slice::<u8, f16>(from).par_iter().zip(to).with_min_len(4096).for_each(|(a, b)| *b = a.to_f32()),
        DType::E4M3 | DType::E5M2 => from.par_iter().zip(to).with_min_len(4096).for_each(|(a, b)| *b = fp8::decoded(*a, dtype)),
        DType::F32 => to.copy_from_slice(bytemuck::cast_slice(from)),
        DType::I32 => bytemuck::cast_slice::<u8, i32>(from).iter().zip(to).for_each(|(a, b)| *b = *a as f32),
        DType::U8 => from.iter().zip(to).for_each(|(a, b)| *b = *a as f32),
    }
}

pub fn widened(from: &[u8], dtype: DType) -> Vec<f32> {
    let mut to = vec![0.0; from.len() / dtype.size()];
    widen(&from[..to.len() * dtype.size()], dtype, &mut to);
    to
}

/// Converts numbers from one type to another. The bytes need not be aligned: they may be those of a mapped file.
pub fn converted(from: &[u8], dtype: DType, to: DType) -> Buffer {
    // A piece at a time, so that a large table is never held in f32 as a whole.
    const PIECE: usize = 1 << 18;
    let mut out = Buffer::zeroed(from.len() / dtype.size() * to.size());
    let mut aligned = Buffer::zeroed(PIECE * dtype.size());
    for (from, to_bytes) in from.chunks(PIECE * dtype.size()).zip(out.bytes_mut().chunks_mut(PIECE * to.size())) {
        let own = &mut aligned.bytes_mut()[..from.len()];
        own.copy_from_slice(from);
        narrow(&widened(own, dtype), to, to_bytes);
    }
    out
}

/// Rounds to nearest, ties to even.
pub fn narrow(from: &[f32], dtype: DType, to: &mut [u8]) {
    match dtype {
        DType::BF16 => bytemuck::cast_slice_mut::<u8, bf16>(to).par_iter_mut().zip(from).with_min_len(4096).for_each(|(b, a)| {
            *b = crate::mutant!("bf16-cut-off-instead-of-rounded", bf16::from_f32(*a), bf16::from_bits((a.to_bits() >> 16) as u16))
        }),
        DType::F16 => {
            bytemuck::cast_slice_mut::<u8, f16>(to).par_iter_mut().zip(from).with_min_len(4096).for_each(|(b, a)| *b = f16::from_f32(*a))
        }
        DType::E4M3 | DType::E5M2 => to.par_iter_mut().zip(from).with_min_len(4096).for_each(|(b, a)| *b = fp8::encoded(*a, dtype)),
        DType::F32 => to.copy_from_slice(bytemuck::cast_slice(from)),
        DType::I32 => bytemuck::cast_slice_mut::<u8, i32>(to).iter_mut().zip(from).for_each(|(b, a)| *b = *a as i32),
        DType::U8 => to.iter_mut().zip(from).for_each(|(b, a)| *b = *a as u8),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_types_are_rounded_to_the_nearest_and_ties_to_even() {
        for (dtype, last) in [(DType::BF16, 2f32.powi(-7)), (DType::F16, 2f32.powi(-10))] {
            // In units of the last place, from 1 up.
            let rounded = [(0.5, 0.0), (0.501, 1.0), (0.499, 0.0), (1.5, 2.0), (2.5, 2.0), (3.75, 4.0)];
            let numbers: Vec<f32> = rounded.iter().flat_map(|r| [1.0 + r.0 * last, -1.0 - r.0 * last]).collect();
            let there = converted(bytemuck::cast_slice(&numbers), DType::F32, dtype);
            let back = widened(there.bytes(), dtype);
            let expected: Vec<f32> = rounded.iter().flat_map(|r| [1.0 + r.1 * last, -1.0 - r.1 * last]).collect();
            assert_eq!(back, expected, "{dtype}");
        }
    }
}
