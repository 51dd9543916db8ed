//! How blocks share the large matrix, and which products have a kernel.

use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::DType;

/// Columns of a block, and rows of a step.
const WIDE: usize = 256;
const TILE: usize = 64;
/// Multiprocessors of an H200: blocks are as many on every GPU, so that the order of additions is the same.
const MULTIPROCESSORS: usize = 132;
/// Columns of the narrow matrices, for both products and for one.
const BOTH: usize = 32;
const ONE: usize = 64;

/// A matrix [m, n] whose rows lie `row` elements apart, `offset` elements behind the start of an input.
#[derive(Clone, Copy)]
pub struct Wide {
    pub input: usize,
    pub m: usize,
    pub n: usize,
    pub row: usize,
    pub offset: usize,
}

/// A narrow one [.., r].
#[derive(Clone, Copy)]
struct Narrow {
    input: usize,
    row: usize,
    column: usize,
    offset: usize,
}

struct Work {
    d: Wide,
    r: usize,
    p: Narrow,
    q: Option<Narrow>,
    /// d^T p is wanted as [r, n].
    turned: bool,
}

/// d q and d^T p.
pub fn both(io: &Io) -> Result<Code, &'static str> {
    let side = |i: usize| Narrow { input: i, row: io.strides[i][0], column: io.strides[i][1], offset: io.offsets[i] };
    let (m, n, r) = (io.x[0].dim(1), io.x[0].dim(0), io.x[1].dim(0));
    let d = Wide { input: 0, m, n, row: io.strides[0][0], offset: io.offsets[0] };
    if io.strides[0][1] != 1 {
        return Err("the large matrix lies column by column");
    }
    Work { d, r, p: side(1), q: Some(side(2)), turned: false }.code(io, [Some(0), Some(1)])
}

/// d^T p [n, r], or turned, as output 0. `p` is an input with the strides of its rows and columns.
pub fn by_column(io: &Io, d: Wide, (p, row, column): (usize, usize, usize), r: usize, turned: bool) -> Result<Code, &'static str> {
    let p = Narrow { input: p, row, column, offset: io.offsets[p] };
    Work { d, r, p, q: None, turned }.code(io, [None, Some(0)])
}

impl Work {
    fn refused(&self, io: &Io) -> Option<&'static str> {
        let dtype = io.x[self.d.input].dtype;
        if !matches!(dtype, DType::BF16 | DType::F16) || io.arch.sm < 80 {
            Some("there are tensor cores for bf16 and f16 alone, since compute capability 8.0")
        } else if !self.r.is_multiple_of(8) || self.r > if self.q.is_some() { BOTH } else { ONE } {
            Some("columns are no multiple of 8, or too many")
        } else if !self.d.n.is_multiple_of(8) || !self.d.row.is_multiple_of(8) || !self.d.offset.is_multiple_of(8) {
            Some("rows do not start on 16 bytes")
        } else if self.p.column != 1 || !self.p.row.is_multiple_of(8) || !self.p.offset.is_multiple_of(8) {
            Some("rows of a narrow matrix do not start on 16 bytes")
        } else if self.d.m.max(self.d.n) >= 1 << 30 {
            Some("too large")
        } else {
            None
        }
    }

    /// `to`: which outputs d q and d^T p are.
    fn code(&self, io: &Io, to: [Option<usize>; 2]) -> Result<Code, &'static str> {
        if let Some(reason) = self.refused(io) {
            return Err(reason);
        }
        let Work { d, r, .. } = *self;
        // One block a multiprocessor, since every block leaves sums in parts; what it has on its way is enough.
        let across = d.n.div_ceil(WIDE);
        let down = (MULTIPROCESSORS / across).clamp(1, d.m.div_ceil(TILE));
        let stage = TILE * WIDE * 2 + TILE * 16 * ((r / 8 + 1) | 1);
        let sums = if self.q.is_some() { 4 * 4 * TILE * r } else { 0 };
        let stages = ((io.arch.shared_limit() - sums) / stage).min(4);
        if stages < 2 {
            return Err("too little shared memory");
        }
        // Sums in parts lie behind one another in the workspace.
        let parts = [(self.q.is_some(), across, d.m * r), (true, down, d.n * r)];
        let partial = parts.map(|(wanted, parts, _)| wanted && parts > 1);
        let second = if partial[0] { 4 * across * d.m * r } else { 0 };
        let workspace = second + if partial[1] { 4 * down * d.n * r } else { 0 };
        let output = |k: usize| At::Y(to[k].unwrap_or(0)); // not written, where it is not wanted
        let places: [Place; 2] = [0, 1].map(|k| if partial[k] { At::Work.plus(k * second) } else { Place::from(output(k)) });
        let dtype = |k: usize| to[k].map_or(DType::F32, |y| io.y[y].dtype);
        let types = [0, 1].map(|k| if partial[k] { DType::F32 } else { dtype(k) });
        let q = self.q.unwrap_or(self.p); // not read, where there is none
        let main = Launch::new(&[include_str!("../attention/mma.cuh"), include_str!("narrow.cu")].concat(), "narrow")
            .define_type("T", io.x[d.input].dtype)
            .define_type("ROW_OUT", types[0])
            .define_type("COLUMN_OUT", types[1])
            .define("M", d.m)
            .define("N", d.n)
            .define("R", r)
            .define("D_ROW", d.row)
            .define("P_ROW", self.p.row)
            .define("Q_ROW", q.row)
            .define("Q_COLUMN", q.column)
            .define("BY_ROW", self.q.is_some() as u8)
            .define("TURNED", self.turned as u8)
            .define("ACROSS", across)
            .define("DOWN", down)
            .define("STAGES", stages)
            .grid(across * down, 1, 1)
            .shared(stages * stage + sums)
            .args(&[At::X(d.input).into(), At::X(self.p.input).into(), At::X(q.input).into(), places[0], places[1]]);
        let mut steps = vec![Step::Launch(main)];
        if workspace > 0 {
            let all = [0, 1].map(|k| if partial[k] { parts[k].2 } else { 0 });
            let finish = Launch::new(include_str!("finish.cu"), "narrow_finish")
                .define_type("A", dtype(0))
                .define_type("B", dtype(1))
                .define("ACROSS", across)
                .define("DOWN", down)
                .define("ROW_SUMS", format!("{}ull", all[0]))
                .define("COLUMN_SUMS", format!("{}ull", all[1]))
                .grid((all[0] + all[1]).div_ceil(512), 1, 1)
                .args(&[At::Work.into(), At::Work.plus(second), output(0).into(), output(1).into()]);
            steps.push(Step::Launch(finish));
        }
        Ok(Code { steps, workspace })
    }
}
