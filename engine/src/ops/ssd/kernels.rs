//! How the chunked scan is launched. The kernels take every shape and type: products are on tensor cores in bf16 and f16, and plain in f32.

use super::{ChunkedScan, Sizes};
use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, block_stride};

const TILES: [&str; 2] = [include_str!("../attention/mma.cuh"), include_str!("tile.cuh")];

/// Bytes of shared memory for `rows` rows [p] and `columns` rows [n] of a chunk, and for `states` states; with `numbers` f32 a position.
fn bytes(s: &Sizes, chunk: usize, size: usize, [rows, columns, states, numbers]: [usize; 4]) -> usize {
    let pitch = |width: usize| width.next_multiple_of(16) + 8;
    let tiles = chunk * (rows * pitch(s.p) + columns * pitch(s.n)) + states * s.p.next_multiple_of(16) * pitch(s.n);
    let scratch = if size == 4 { 16 * 17 * chunk / 16 } else { 0 };
    size * tiles + 4 * (numbers * chunk + scratch)
}

/// Shared memory of the gradient's kernel, the largest; each warp, of 16 positions, adds up rows.
pub fn grad_bytes(s: &Sizes, chunk: usize, size: usize) -> usize {
    bytes(s, chunk, size, [2, 2, 2, 8 + chunk / 16])
}

/// What the launches of one op have in common.
struct Launches<'a> {
    io: &'a Io,
    s: Sizes,
    chunk: usize,
    reverse: bool,
    dtype: DType,
}

impl<'a> Launches<'a> {
    fn new(io: &'a Io, op: &ChunkedScan) -> Launches<'a> {
        Launches { io, s: Sizes::of(&io.x), chunk: op.length(&io.x), reverse: op.reverse, dtype: io.x[0].dtype }
    }

    fn chunks(&self) -> usize {
        self.s.time.div_ceil(self.chunk)
    }

    /// How many blocks keep the GPU busy.
    fn enough(&self) -> usize {
        2 * self.io.arch.multiprocessors as usize
    }

    /// Chunks of a segment, and segments of a sequence: one after the other, unless that leaves the GPU idle.
    fn segments(&self, blocks: usize) -> (usize, usize) {
        let per = self.chunks().div_ceil(self.enough().div_ceil(blocks)).max(1);
        (per, self.chunks().div_ceil(per))
    }

    fn bytes(&self, tiles: [usize; 4]) -> usize {
        bytes(&self.s, self.chunk, self.dtype.size(), tiles)
    }

    /// Elements of a state as f32 scratch.
    fn state(&self) -> usize {
        self.s.p.next_multiple_of(16) * self.s.n.next_multiple_of(16)
    }

    fn launch(&self, source: &str, entry: &'static str, per: usize, segments: usize) -> Launch {
        let launch = Launch::new(&[TILES[0], TILES[1], source].concat(), entry)
            .define_type("T", self.dtype)
            .define("WARPS", self.chunk / 16)
            .define("BATCH", self.s.batch)
            .define("TIME", self.s.time)
            .define("HEADS", self.s.heads)
            .define("P", self.s.p)
            .define("GROUPS", self.s.groups)
            .define("N", self.s.n)
            .define("REVERSE", self.reverse as u8)
            .define("PER", per)
            .define("SEGMENTS", segments)
            .block(2 * self.chunk);
        if self.dtype == DType::F32 { launch.define("WIDE", 1) } else { launch }
    }

    /// Defines the distance between time steps of an input with rows of `width`, and whether its rows are copied 16 bytes at a time.
    fn rows(&self, launch: Launch, input: usize, width: usize, [row, packed]: [&'static str; 2]) -> Launch {
        let step = block_stride(&self.io.x[input].shape, &self.io.strides[input], 2).expect("blocks evenly apart");
        let aligned = [step, self.io.offsets[input], width].iter().all(|v| v.is_multiple_of(8));
        launch.define(row, step).define(packed, if aligned { "true" } else { "false" })
    }

    /// x, B and C.
    fn inputs(&self, launch: Launch) -> Launch {
        let launch = self.rows(launch, 0, self.s.p, ["X_ROW", "X_PACKED"]);
        let launch = self.rows(launch, 3, self.s.n, ["B_ROW", "B_PACKED"]);
        self.rows(launch, 4, self.s.n, ["C_ROW", "C_PACKED"])
    }

    /// The states that segments start from, from `left` [.., p] and `right` [.., n], two inputs, in scratch memory at `ends`. `backward`: gradients, from the
    /// end to the start.
    fn starts(&self, backward: bool, (per, segments): (usize, usize), [left, right]: [usize; 2], ends: Place) -> [Step; 2] {
        let totals = ends.plus(4 * self.s.batch * self.s.heads * segments * self.state());
        let launch = |entry| self.states(entry, backward, (per, segments), [left, right]);
        let states = launch("ssd_states").args(&[At::X(left).into(), At::X(1).into(), At::X(2).into(), At::X(right).into(), ends, totals]);
        let elements = self.s.batch * self.s.heads * self.state();
        let pass = launch("ssd_pass").block(256).grid(elements.div_ceil(256), 1, 1).shared(0).args(&[ends, totals]);
        [Step::Launch(states), Step::Launch(pass)]
    }

    fn states(&self, entry: &'static str, backward: bool, (per, segments): (usize, usize), [left, right]: [usize; 2]) -> Launch {
        let scans = self.s.batch * self.s.heads;
        let launch = self.launch(include_str!("states.cu"), entry, per, segments).define("BACKWARD", backward as u8).define("SCANS", scans);
        let launch = self.rows(launch, left, self.s.p, ["LEFT_ROW", "LEFT_PACKED"]);
        self.rows(launch, right, self.s.n, ["RIGHT_ROW", "RIGHT_PACKED"]).grid(scans * segments, 1, 1).shared(self.bytes([1, 1, 0, 4]))
    }

    /// Bytes of scratch memory of `starts`.
    fn starts_bytes(&self, segments: usize) -> usize {
        if segments > 1 { (4 * self.s.batch * self.s.heads * segments * (self.state() + 1)).next_multiple_of(256) } else { 0 }
    }
}

/// Inputs x, dt, decay, B, C, d; outputs y and perhaps the states.
pub fn forward(io: &Io, op: &ChunkedScan) -> Code {
    let l = Launches::new(io, op);
    let scans = l.s.batch * l.s.heads;
    let (per, segments) = l.segments(scans);
    let mut steps = vec![];
    if segments > 1 {
        steps.extend(l.starts(false, (per, segments), [0, 3], At::Work.into()));
    }
    let inputs = [0, 1, 2, 3, 4, 5].map(At::X);
    let rest = [if segments > 1 { At::Work } else { At::X(1) }, At::Y(0), At::Y(io.y.len() - 1)];
    let scan = l
        .inputs(l.launch(include_str!("scan.cu"), "ssd_scan", per, segments))
        .define("KEEP", op.keep as u8)
        .grid(scans * segments, 1, 1)
        .shared(l.bytes([1, 2, 1, 4]))
        .args(&[&inputs[..], &rest].concat().into_iter().map(Place::from).collect::<Vec<_>>());
    steps.push(Step::Launch(scan));
    Code { steps, workspace: l.starts_bytes(segments) }
}

/// The same inputs; the output is the state after the last position.
pub fn last(io: &Io) -> Code {
    let l = Launches::new(io, &ChunkedScan::default());
    let args = [At::X(0), At::X(1), At::X(2), At::X(3), At::Y(0)].map(Place::from);
    l.states("ssd_last", false, (l.chunks(), 1), [0, 3]).args(&args).code()
}

/// See ChunkedScanGrad for inputs and outputs.
pub fn backward(io: &Io, op: &ChunkedScan) -> Code {
    let l = Launches::new(io, op);
    let s = l.s;
    // As few parts of the heads as keep the GPU busy together with the segments: each part has a dB and dC of its own.
    let groups = s.batch * s.groups;
    let divisors = (1..=s.shared_by()).filter(|d| s.shared_by().is_multiple_of(*d));
    let parts = divisors.clone().find(|d| groups * d * l.chunks() >= l.enough()).unwrap_or(s.shared_by());
    let (per, segments) = l.segments(groups * parts);
    let mut steps = vec![];
    if segments > 1 {
        steps.extend(l.starts(true, (per, segments), [7, 4], At::Work.into()));
    }
    let count = groups * s.time * s.n;
    let (db, dc) = (At::Work.plus(l.starts_bytes(segments)), At::Work.plus(l.starts_bytes(segments) + 4 * parts * count));
    let start = if segments > 1 { At::Work } else { At::X(1) };
    let mut args: Vec<Place> = (0..8).map(|i| At::X(i).into()).collect();
    args.extend([start, At::Y(0), At::Y(1), At::Y(2), At::Y(5)].map(Place::from));
    args.extend([db, dc]);
    let grad = |entry| {
        let launch = l.inputs(l.launch(include_str!("grad.cu"), entry, per, segments));
        l.rows(launch, 7, s.p, ["DY_ROW", "DY_PACKED"]).define("PARTS", parts).define("COUNT", count)
    };
    steps.push(Step::Launch(
        grad("ssd_grad").grid(groups * parts * segments, 1, 1).shared(grad_bytes(&s, l.chunk, l.dtype.size())).args(&args),
    ));
    let outputs = [db, dc, At::Y(3).into(), At::Y(4).into()];
    steps.push(Step::Launch(grad("ssd_sum").block(256).grid(count.div_ceil(256), 1, 1).args(&outputs)));
    Code { steps, workspace: l.starts_bytes(segments) + 8 * parts * count }
}
