//! How the scan is launched where tensor cores and large shared memory allow chunks of 128 positions that share the work of a group's heads (fast.cuh).

use super::{ChunkedScan, Sizes};
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, Meta, block_stride};

/// Positions of a chunk.
const CHUNK: usize = 128;
/// f32 numbers of a chunk's positions in one head.
const NUMBERS: usize = 4 * CHUNK;
/// 16 x 16 tiles of pairs of positions of a chunk, one not after the other.
const PAIRS: usize = 36;

/// Whether these kernels take a scan. Forward and backward must agree, since chunks may be shorter in the other form.
pub fn fits(op: &ChunkedScan, x: &[Meta]) -> bool {
    let s = Sizes::of(x);
    x[0].dtype != DType::F32 && s.p == 64 && matches!(s.n, 64 | 128) && op.chunk == CHUNK && back_bytes(&s) <= op.shared
}

/// Bytes of shared memory of `ssd_back`, the largest: B, C, x and dy (twice), two states; sums over heads, scores and what positions amount to.
fn back_bytes(s: &Sizes) -> usize {
    2 * (2 * CHUNK * s.n + 4 * CHUNK * s.p + 2 * s.p * s.n) + 4 * (PAIRS * (256 + 128) + 2 * NUMBERS + 8 * CHUNK + 8 * CHUNK + 18)
}

struct Launches<'a> {
    io: &'a Io,
    s: Sizes,
    reverse: bool,
    dtype: DType,
}

impl<'a> Launches<'a> {
    fn new(io: &'a Io, op: &ChunkedScan) -> Launches<'a> {
        Launches { io, s: Sizes::of(&io.x), reverse: op.reverse, dtype: io.x[0].dtype }
    }

    fn chunks(&self) -> usize {
        self.s.time.div_ceil(CHUNK)
    }

    fn scans(&self) -> usize {
        self.s.batch * self.s.heads
    }

    /// Elements of the states of all chunks.
    fn states(&self) -> usize {
        self.scans() * self.chunks() * self.s.p * self.s.n
    }

    fn numbers_bytes(&self) -> usize {
        4 * self.s.batch * self.chunks() * self.s.heads * NUMBERS
    }

    /// Chunks of a segment, and segments of a sequence: one after the other, unless that leaves the GPU idle.
    fn segments(&self) -> (usize, usize) {
        let all = self.io.arch.multiprocessors as usize;
        let wanted = if self.scans() >= all { 1 } else { (2 * all).div_ceil(self.scans()) };
        let per = self.chunks().div_ceil(wanted).max(1);
        (per, self.chunks().div_ceil(per))
    }

    /// Into how many parts the heads of a group are divided, so that `at_once` blocks of a multiprocessor have about as much to do each. Starting a block
    /// takes as long as about two heads.
    fn parts(&self, at_once: usize) -> usize {
        let (blocks, slots) = (self.s.batch * self.chunks() * self.s.groups, at_once * self.io.arch.multiprocessors as usize);
        let each = self.s.shared_by();
        let time = |parts: &usize| (blocks * parts).div_ceil(slots) * (each / parts + 2);
        (1..=each).filter(|d| each.is_multiple_of(*d)).min_by_key(time).expect("one part")
    }

    fn launch(&self, source: &str, entry: &'static str, parts: usize) -> Launch {
        let files = [include_str!("../attention/mma.cuh"), include_str!("fast.cuh"), source];
        Launch::new(&files.concat(), entry)
            .define_type("T", self.dtype)
            .define("BATCH", self.s.batch)
            .define("TIME", self.s.time)
            .define("HEADS", self.s.heads)
            .define("P", self.s.p)
            .define("GROUPS", self.s.groups)
            .define("N", self.s.n)
            .define("REVERSE", self.reverse as u8)
            .define("PARTS", parts)
    }

    /// Defines the distance between time steps of an input with rows of `width`, and whether its rows are copied 16 bytes at a time.
    fn rows(&self, launch: Launch, input: usize, [row, packed]: [&'static str; 2]) -> Launch {
        let step = block_stride(&self.io.x[input].shape, &self.io.strides[input], 2).expect("blocks evenly apart");
        let aligned = [step, self.io.offsets[input]].iter().all(|v| v.is_multiple_of(8));
        launch.define(row, step).define(packed, if aligned { "true" } else { "false" })
    }

    /// x, B and C.
    fn inputs(&self, launch: Launch) -> Launch {
        let launch = self.rows(launch, 0, ["X_ROW", "X_PACKED"]);
        let launch = self.rows(launch, 3, ["B_ROW", "B_PACKED"]);
        self.rows(launch, 4, ["C_ROW", "C_PACKED"])
    }

    /// Decays, at `numbers`.
    fn sums(&self, numbers: Place) -> Step {
        let blocks = self.s.batch * self.chunks() * self.s.heads.div_ceil(32);
        let args = [At::X(1).into(), At::X(2).into(), numbers];
        Step::Launch(self.launch(include_str!("sums.cu"), "ssd_sums", 1).grid(blocks, 1, 1).args(&args))
    }

    /// The state before every chunk, from `left` [.., p] and `right` [.., n], two inputs, at `states`; scratch memory at `ends`. `backward`: the gradient with
    /// respect to that after it.
    fn walk(&self, backward: bool, [left, right]: [usize; 2], numbers: Place, ends: Place, states: Place) -> Vec<Step> {
        let (per, segments) = self.segments();
        let launch = |entry| {
            let launch = self.launch(include_str!("walk.cu"), entry, 1).define("PER", per).define("SEGMENTS", segments);
            let launch = self.rows(launch.define("BACKWARD", backward as u8), left, ["LEFT_ROW", "LEFT_PACKED"]);
            self.rows(launch, right, ["RIGHT_ROW", "RIGHT_PACKED"])
        };
        let (p, n) = (self.s.p, self.s.n);
        let walk = |entry, args: &[Place]| {
            let shared = 2 * (self.dtype.size() * CHUNK * (p + n) + 4 * 2 * CHUNK);
            Step::Launch(launch(entry).grid(self.scans() * segments, 1, 1).shared(shared).args(args))
        };
        let mut steps = vec![];
        let inputs = [At::X(left).into(), At::X(right).into(), numbers];
        if segments > 1 {
            let totals = ends.plus(4 * self.scans() * segments * p * n);
            steps.push(walk("ssd_ends", &[&inputs[..], &[ends, totals]].concat()));
            steps.push(Step::Launch(launch("ssd_pass").grid((self.scans() * p * n).div_ceil(256), 1, 1).args(&[ends, totals])));
        }
        steps.push(walk("ssd_walk", &[&inputs[..], &[ends, states]].concat()));
        steps
    }

    /// Bytes of scratch memory of `walk`.
    fn ends_bytes(&self) -> usize {
        let (_, segments) = self.segments();
        if segments > 1 { (4 * self.scans() * segments * (self.s.p * self.s.n + 1)).next_multiple_of(256) } else { 0 }
    }
}

/// Inputs x, dt, decay, B, C, d; outputs y and perhaps the states.
pub fn forward(io: &Io, op: &ChunkedScan) -> Code {
    let l = Launches::new(io, op);
    let (p, n) = (l.s.p, l.s.n);
    let (numbers, ends) = (Place::from(At::Work), At::Work.plus(l.numbers_bytes()));
    let own = ends.plus(l.ends_bytes());
    let states = if op.keep { At::Y(1).into() } else { own };
    let mut steps = vec![l.sums(numbers)];
    steps.extend(l.walk(false, [0, 3], numbers, ends, states));
    let parts = l.parts(2);
    let shared = l.dtype.size() * (CHUNK * n + 2 * (CHUNK * p + p * n)) + 2 * 4 * 2 * CHUNK;
    let args = [At::X(0).into(), At::X(3).into(), At::X(4).into(), At::X(5).into(), numbers, states, At::Y(0).into()];
    let out = l.inputs(l.launch(include_str!("out.cu"), "ssd_out", parts));
    steps.push(Step::Launch(out.grid(l.s.batch * l.chunks() * l.s.groups * parts, 1, 1).shared(shared).args(&args)));
    Code { steps, workspace: own.bytes + if op.keep { 0 } else { l.dtype.size() * l.states() } }
}

/// See ChunkedScanGrad for inputs and outputs.
pub fn backward(io: &Io, op: &ChunkedScan) -> Code {
    let l = Launches::new(io, op);
    let groups = l.s.batch * l.s.groups;
    let parts = l.parts(1);
    let (numbers, ends) = (Place::from(At::Work), At::Work.plus(l.numbers_bytes()));
    let aheads = ends.plus(l.ends_bytes());
    let sums = aheads.plus(l.dtype.size() * l.states());
    let count = groups * l.s.time * l.s.n;
    // Without parts the block's own sums are the result.
    let (db, dc, bytes) = match parts {
        1 => (At::Y(3).into(), At::Y(4).into(), 0),
        _ => (sums, sums.plus(4 * parts * count), 8 * parts * count),
    };
    let mut steps = vec![l.sums(numbers)];
    steps.extend(l.walk(true, [7, 4], numbers, ends, aheads));
    let inputs = [0, 3, 4, 5].map(|i| Place::from(At::X(i)));
    let outputs = [0, 1, 2, 5].map(|i| Place::from(At::Y(i)));
    let args = [&inputs[..], &[numbers, At::X(6).into(), aheads, At::X(7).into()], &outputs, &[db, dc]].concat();
    let back = |entry| {
        let launch = l.inputs(l.launch(include_str!("back.cu"), entry, parts));
        let launch = l.rows(launch, 7, ["DY_ROW", "DY_PACKED"]).define("COUNT", count);
        if parts == 1 { launch.define_type("SUM", l.dtype) } else { launch.define("SUM", "float") }
    };
    let blocks = groups * l.chunks() * parts;
    steps.push(Step::Launch(back("ssd_back").grid(blocks, 1, 1).shared(back_bytes(&l.s)).args(&args)));
    if parts > 1 {
        let results = [db, dc, At::Y(3).into(), At::Y(4).into()];
        steps.push(Step::Launch(back("ssd_sum").grid(count.div_ceil(256), 1, 1).args(&results)));
    }
    Code { steps, workspace: sums.bytes + bytes }
}
