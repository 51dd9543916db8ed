//! Linear attention on tensor cores: for which shapes, and how it is launched.

use super::{DType, LinearAttentionGrad, Meta, Sizes};
use crate::kernel::{Arch, At, Code, Io, Launch, Place, Step};

const TILES: [&str; 2] = [include_str!("../attention/mma.cuh"), include_str!("tiles.cuh")];
const CHUNKS: [&str; 3] = [TILES[0], TILES[1], include_str!("chunk.cuh")];

/// Columns of xs that kernels take at a time.
const CHUNK: usize = 64;
/// The longest sequence: five tiles of 16.
const LONGEST: usize = 80;

impl Sizes {
    fn tiles(&self) -> usize {
        self.time.div_ceil(16)
    }

    /// Bytes of [time, d] in shared memory.
    fn rows_bytes(&self) -> usize {
        2 * self.time * self.d.next_multiple_of(64)
    }

    fn forward_bytes(&self, held: usize) -> usize {
        FORWARD_STAGES * self.chunk_bytes(held) + self.rows_bytes()
    }

    /// Bytes of a chunk of `held` heads.
    fn chunk_bytes(&self, held: usize) -> usize {
        2 * held * self.time * CHUNK
    }

    fn scores_bytes(&self, stages: usize) -> usize {
        self.rows_bytes() + stages * (2 * self.rows_bytes() + 2 * self.time * (16 * self.tiles() + 8))
    }

    fn launch(&self, source: &[&str], entry: &'static str, dtype: DType) -> Launch {
        Launch::new(&source.concat(), entry)
            .define_type("T", dtype)
            .define("BATCH", self.batch)
            .define("TIME", self.time)
            .define("HEADS", self.heads)
            .define("N", self.n)
            .define("D", self.d)
    }
}

/// Whether the kernels take these inputs, of which `wide` are f32.
fn fits(io: &Io, wide: &[usize]) -> bool {
    let (s, dtype) = (Sizes::of(&io.x), io.x[0].dtype);
    let typed = |(i, m): (usize, &Meta)| m.dtype == if wide.contains(&i) { DType::F32 } else { dtype };
    let types = matches!(dtype, DType::BF16 | DType::F16) && io.x.iter().enumerate().all(typed);
    let aligned = io.x.iter().zip(&io.offsets).all(|(m, &o)| (o * m.dtype.size()).is_multiple_of(16));
    let shape = s.time <= LONGEST && s.n.is_multiple_of(8) && s.d.is_multiple_of(16) && s.d <= 256;
    io.arch.sm >= 80 && types && aligned && shape && s.scores_bytes(1) <= io.arch.shared_limit()
}

/// Whether a multiprocessor holds two such blocks.
fn twice(bytes: usize, arch: Arch) -> bool {
    2 * (bytes + 1024) <= arch.shared_limit() + 1024 // the system reserves 1024 bytes of each block
}

const FORWARD_STAGES: usize = 3;

/// Inputs xs, cos, sin, v; outputs y, rstd if there is a norm, and s.
pub fn forward(io: &Io, eps: Option<f32>) -> Option<Code> {
    if !fits(io, &[1, 2]) {
        return None;
    }
    let s = Sizes::of(&io.x);
    // Heads of a block share the tables, which are twice as large as one head's xs.
    let held = [3, 2, 1].into_iter().find(|&h| s.heads.is_multiple_of(h) && (h == 1 || twice(s.forward_bytes(h), io.arch)))?;
    let warps = held * if s.tiles() > 1 { 2 } else { 1 };
    let last = io.y.len() - 1;
    let args = [At::X(0), At::X(1), At::X(2), At::X(3), At::Y(0), At::Y(last.min(1)), At::Y(last)].map(Place::from);
    let launch = s
        .launch(&[&CHUNKS[..], &[include_str!("forward.cu")]].concat(), "linear_attention", io.x[0].dtype)
        .define("HELD", held)
        .define("WARPS", warps)
        .define("STAGES", FORWARD_STAGES)
        .define("RESIDENT", if held > 1 { 2 } else { 1 })
        .define("NORM", eps.is_some() as u8)
        .define_f32("EPS", eps.unwrap_or(0.0));
    Some(launch.grid(s.batch * s.heads / held, 1, 1).block(32 * warps).shared(s.forward_bytes(held)).args(&args).code())
}

/// See LinearAttentionGrad for inputs and outputs.
pub fn backward(io: &Io, op: &LinearAttentionGrad) -> Option<Code> {
    let (at_s, at_dy, at_more) = op.places();
    if !fits(io, if op.norm { &[1, 2, 5] } else { &[1, 2] }) {
        return None;
    }
    let (s, dtype) = (Sizes::of(&io.x), io.x[0].dtype);
    let (y, rstd) = if op.norm { (At::X(4), At::X(5)) } else { (At::X(0), At::X(0)) };
    let more = At::X(if op.add { at_more } else { 0 });
    let stages = if s.scores_bytes(2) <= io.arch.shared_limit() { 2 } else { 1 };
    let scores = s
        .launch(&[&TILES[..], &[include_str!("scores.cu")]].concat(), "linear_attention_scores", dtype)
        .define("WARPS", 4 * s.tiles())
        .define("STAGES", stages)
        .define("NORM", op.norm as u8)
        .grid(s.batch, 1, 1)
        .block(128 * s.tiles())
        .shared(s.scores_bytes(stages))
        .args(&[At::X(3), y, rstd, At::X(at_s), At::X(at_dy), At::Work, At::Y(1)].map(Place::from));

    let bytes = |(held, stages): (usize, usize)| stages * s.chunk_bytes(held) * if op.add { 2 } else { 1 };
    let fit = |&c: &(usize, usize)| s.heads.is_multiple_of(c.0) && twice(bytes(c), io.arch);
    let (held, stages) = [(2, 3), (2, 2), (1, 3), (1, 2)].into_iter().find(fit).unwrap_or((1, 2));
    let blocks = s.batch * s.heads / held;
    // Split into as many parts as fill the last wave of blocks best.
    let rounds = |parts: usize| (blocks * parts).div_ceil(2 * io.arch.multiprocessors as usize) * (8 / parts);
    let parts = [1, 2, 4, 8].into_iter().filter(|&p| p <= s.n.div_ceil(CHUNK)).min_by_key(|&p| rounds(p))?;
    let grad = s
        .launch(&[&CHUNKS[..], &[include_str!("grad.cu")]].concat(), "linear_attention_grad", dtype)
        .define("HELD", held)
        .define("WARPS", held * s.tiles())
        .define("STAGES", stages)
        .define("RESIDENT", 2)
        .define("PARTS", parts)
        .define("ADD", op.add as u8)
        .define("RELU", op.relu as u8)
        .grid(blocks * parts, 1, 1)
        .block(32 * held * s.tiles())
        .shared(bytes((held, stages)))
        .args(&[At::X(0), At::X(1), At::X(2), At::Work, more, At::Y(0)].map(Place::from));
    let workspace = s.batch * s.heads * s.tiles() * s.tiles() * 512;
    Some(Code { steps: vec![Step::Launch(scores), Step::Launch(grad)], workspace })
}
