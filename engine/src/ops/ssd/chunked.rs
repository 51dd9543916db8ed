//! The scan in chunks: inside a chunk it is a product with decayed scores, and states pass from chunk to chunk. Time and memory are linear in the
//! sequence's length.

use super::cpu::{Head, Inputs, Shared, temporary};
use super::{Sizes, Ssd, fast, kernels, precision};
use crate::cpu::{View, ViewMut};
use crate::kernel::{Arch, Code, Io};
use crate::meta::{Layout, Meta};
use crate::op::{Cost, Grads, Lean, Narrow, Op, Port, no_gradient};
use crate::record::Var;
use rayon::prelude::*;

/// The shortest chunk; all are multiples of it.
pub const LEAST_CHUNK: usize = 16;
/// The longest chunk.
pub const MOST_CHUNK: usize = 128;

/// Inputs: x, dt, decay, B, C, d (see the module `ssd`). Outputs: y and, with `keep`, the state before every chunk [batch, heads, chunks, p, n], in the order of
/// the scan.
#[derive(Clone, Copy, Debug)]
pub struct ChunkedScan {
    /// Whether time runs backwards.
    pub reverse: bool,
    /// The longest chunk, a multiple of 16. Chunks are shorter where the sequence, or a block's shared memory, asks for it.
    pub chunk: usize,
    /// Bytes of shared memory that a block may use.
    pub shared: usize,
    /// Whether the states before the chunks are an output, for the backward pass.
    pub keep: bool,
}

impl Default for ChunkedScan {
    fn default() -> ChunkedScan {
        ChunkedScan { reverse: false, chunk: MOST_CHUNK, shared: Arch::LEAST_SHARED, keep: true }
    }
}

impl ChunkedScan {
    /// The length of the chunks: as even as multiples of 16 allow.
    pub(super) fn length(&self, x: &[Meta]) -> usize {
        let (s, size) = (Sizes::of(x), x[0].dtype.size());
        let sixteens = (1..=self.chunk / LEAST_CHUNK).rev().find(|k| kernels::grad_bytes(&s, k * LEAST_CHUNK, size) <= self.shared);
        let most = sixteens.unwrap_or(1) * LEAST_CHUNK;
        s.time.div_ceil(s.time.div_ceil(most)).next_multiple_of(LEAST_CHUNK)
    }

    fn chunks(&self, x: &[Meta]) -> usize {
        x[0].shape[1].div_ceil(self.length(x))
    }

    /// Whether a block's shared memory holds the shortest chunk, also in f32.
    pub fn fits(&self, x: &[Meta]) -> bool {
        kernels::grad_bytes(&Sizes::of(x), LEAST_CHUNK, 4) <= self.shared
    }
}

/// x, B and C may be column slices of one projection.
fn layout(input: usize) -> Layout {
    if matches!(input, 0 | 3 | 4) { Layout::Blocks(2) } else { Layout::Contiguous }
}

impl Op for ChunkedScan {
    fn name(&self) -> &'static str {
        "chunked_scan"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let s = Sizes::of(x);
        let states = x[0].with(&[s.batch, s.heads, self.chunks(x), s.p, s.n]);
        if self.keep { vec![x[0].clone(), states] } else { vec![x[0].clone()] }
    }

    /// For every head: y, the state, and what a chunk needs.
    fn workspace(&self, x: &[Meta]) -> usize {
        let s = Sizes::of(x);
        s.batch * s.heads * (s.time * s.p + s.p * s.n + temporary(self.length(x), 1, s.p))
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], work: &mut [f32]) {
        let (y, states) = y.split_at_mut(1);
        let all: Vec<Meta> = x.iter().map(|v| Meta::f32(v.shape)).collect();
        let i = Inputs::new(x, self.reverse, states.first().map_or_else(|| self.chunks(&all), |s| s.shape[2]));
        let Sizes { time, heads, p, n, .. } = i.s;
        let states: Vec<&mut [f32]> = match states {
            [s] => s.f32().chunks_mut(i.chunks * p * n).collect(),
            _ => (0..i.s.batch * heads).map(|_| &mut [][..]).collect(),
        };
        let each = work.len() / (i.s.batch * heads);
        work.par_chunks_mut(each).zip(states).enumerate().for_each(|(k, (own, kept))| {
            let (y, own) = own.split_at_mut(time * p);
            let (state, temp) = own.split_at_mut(p * n);
            i.forward(k / heads, k % heads, y, kept, state, temp);
        });
        y[0].f32().par_chunks_mut(p).with_min_len(64).enumerate().for_each(|(k, out)| {
            let (h, t, b) = (k % heads, k / heads % time, k / heads / time);
            out.copy_from_slice(&work[(b * heads + h) * each + t * p..][..p]);
        });
    }

    fn layout(&self, input: usize) -> Layout {
        layout(input)
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        precision(at)
    }

    fn only(&self, read: &[bool]) -> Option<Lean> {
        (self.keep && !read[1]).then(|| Lean::without_last(ChunkedScan { keep: false, ..*self }, 2))
    }

    fn cuda(&self, io: &Io) -> Code {
        if fast::fits(self, &io.x) { fast::forward(io, self) } else { kernels::forward(io, self) }
    }

    fn vjp<'g>(&self, x: &[Var<'g>], y: &[Var<'g>], dy: &[Option<Var<'g>>]) -> Grads<'g> {
        let Some(d) = dy[0] else { return no_gradient(x.len()) };
        let g = d.recorder().op(ChunkedScanGrad(*self), &[x, &[y[1], d]].concat());
        // Chunks add to dd each for itself.
        let dd = g[5].sum_axis(0).reshape(&[g[5].dim(0)]);
        g[..5].iter().copied().chain([dd]).map(Some).collect()
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let bytes: usize = x.iter().chain(&self.infer(x)).map(|m| m.bytes()).sum();
        Cost::compute(Sizes::of(x).flops(self.length(x), 1, 2), bytes)
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        Ssd { reverse: self.reverse }.unfused(x)
    }
}

/// Inputs: those of the scan, the states before its chunks, dy. Outputs: dx, ddt, the gradient of the decay, dB, dC, and for every chunk what it adds to dd
/// [batch * chunks, heads].
#[derive(Clone, Copy, Debug)]
pub struct ChunkedScanGrad(
    /// The scan.
    pub ChunkedScan,
);

impl Op for ChunkedScanGrad {
    fn name(&self) -> &'static str {
        "chunked_scan_grad"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let s = Sizes::of(x);
        let parts = Meta::f32(&[s.batch * self.0.chunks(x), s.heads]);
        [&x[..5], &[parts]].concat()
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        let s = Sizes::of(x);
        s.batch * s.groups * Places::new(&s, self.0.chunks(x)).all(self.0.length(x))
    }

    fn cpu(&self, x: &[View], out: &mut [ViewMut], work: &mut [f32]) {
        let i = Inputs::new(x, self.0.reverse, x[6].shape[2]);
        let Sizes { time, heads, groups, p, n, .. } = i.s;
        let (states, dy, each, chunks) = (x[6].f32(), x[7].f32(), i.s.shared_by(), i.chunks);
        let (at, all) = (Places::new(&i.s, chunks), work.len() / (i.s.batch * groups));
        // A task owns a group of heads, which add to the same dB and dC.
        work.par_chunks_mut(all).enumerate().for_each(|(k, own)| {
            let (by_head, own) = own.split_at_mut(each * at.head);
            let (db, own) = own.split_at_mut(time * n);
            let (dc, own) = own.split_at_mut(time * n);
            let (ahead, temp) = own.split_at_mut(p * n);
            db.fill(0.0);
            dc.fill(0.0);
            let mut shared = Shared { db, dc, ahead, temp };
            for (j, own) in by_head.chunks_mut(at.head).enumerate() {
                let (b, h) = (k / groups, k % groups * each + j);
                let (dx, own) = own.split_at_mut(time * p);
                let (ddt, own) = own.split_at_mut(time);
                let (decay, dd) = own.split_at_mut(time);
                let states = &states[(b * heads + h) * chunks * p * n..][..chunks * p * n];
                i.backward(b, h, states, dy, &mut Head { dx, ddt, decay, dd }, &mut shared);
            }
        });
        let work = &*work;
        let head = |b: usize, h: usize| &work[(b * groups + h / each) * all + h % each * at.head..][..at.head];
        let [dx, ddt, decay, db, dc, dd] = out else { unreachable!("infer gives six outputs") };
        let place = |k: usize| (k / heads / time, k / heads % time, k % heads);
        dx.f32().par_chunks_mut(p).with_min_len(64).enumerate().for_each(|(k, out)| {
            let (b, t, h) = place(k);
            out.copy_from_slice(&head(b, h)[t * p..][..p]);
        });
        for (out, skip) in [(ddt, time * p), (decay, time * (p + 1))] {
            out.f32().par_iter_mut().with_min_len(4096).enumerate().for_each(|(k, out)| {
                let (b, t, h) = place(k);
                *out = head(b, h)[skip + t];
            });
        }
        for (out, skip) in [(db, 0), (dc, time * n)] {
            out.f32().par_chunks_mut(n).with_min_len(64).enumerate().for_each(|(k, out)| {
                let (g, t, b) = (k % groups, k / groups % time, k / groups / time);
                out.copy_from_slice(&work[(b * groups + g) * all + each * at.head + skip + t * n..][..n]);
            });
        }
        for (k, out) in dd.f32().iter_mut().enumerate() {
            *out = head(k / heads / chunks, k % heads)[time * (p + 2) + k / heads % chunks];
        }
    }

    fn layout(&self, input: usize) -> Layout {
        layout(input)
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        match at {
            Port::Out(1 | 2 | 5) => Narrow::Keep,
            _ => precision(at),
        }
    }

    fn cuda(&self, io: &Io) -> Code {
        if fast::fits(&self.0, &io.x) { fast::backward(io, &self.0) } else { kernels::backward(io, &self.0) }
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let bytes: usize = x.iter().chain(&self.infer(x)).map(|m| m.bytes()).sum();
        Cost::compute(Sizes::of(x).flops(self.0.length(x), 3, 4), bytes)
    }
}

/// Elements of scratch memory: of one head (dx, ddt, the gradient of the decay, and its parts of dd), and of a group.
struct Places {
    head: usize,
    shared: usize,
    width: usize,
}

impl Places {
    fn new(s: &Sizes, chunks: usize) -> Places {
        let head = s.time * (s.p + 2) + chunks;
        Places { head, shared: s.shared_by() * head + 2 * s.time * s.n + s.p * s.n, width: s.p.max(s.n) }
    }

    fn all(&self, length: usize) -> usize {
        self.shared + temporary(length, 2, self.width)
    }
}
