//! The LoRA backward kernel: which shapes it takes, and how blocks share the large matrix.

use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::DType;

/// Columns of a block, and rows of a step.
const WIDE: usize = 256;
const TILE: usize = 64;
/// Blocks: the multiprocessors of an H200, and as many on every GPU, so that the order of additions is the same.
const MULTIPROCESSORS: usize = 132;
/// The most columns of the low-rank matrices, for both matmuls and for one.
const BOTH: usize = 32;
const ONE: usize = 64;

/// A matrix [m, n] inside an input.
#[derive(Clone, Copy)]
pub struct Wide {
    /// Which input of the op.
    pub input: usize,
    /// Rows.
    pub m: usize,
    /// Columns.
    pub n: usize,
    /// Distance between rows, in elements.
    pub row: usize,
    /// Of its first element, in elements.
    pub offset: usize,
}

/// A low-rank matrix [.., r].
#[derive(Clone, Copy)]
struct Narrow {
    input: usize,
    row: usize,
    column: usize,
    offset: usize,
}

/// A large matrix with its low-rank ones, and which output d^T p is.
struct Pair {
    d: Wide,
    p: Narrow,
    q: Option<Narrow>,
    by_column: usize,
}

struct Work {
    pairs: Vec<Pair>,
    r: usize,
    /// Whether the output is (d^T p)^T, [r, n].
    transposed: bool,
}

/// d q of all, concatenated, and d^T p of each.
pub fn both(io: &Io) -> Result<Code, &'static str> {
    let side = |i: usize| Narrow { input: i, row: io.strides[i][0], column: io.strides[i][1], offset: io.offsets[i] };
    if io.strides.iter().step_by(3).any(|s| s[1] != 1) {
        return Err("the large matrix is column-major");
    }
    let pair = |i: usize| {
        let d = Wide { input: i, m: io.x[i].dim(1), n: io.x[i].dim(0), row: io.strides[i][0], offset: io.offsets[i] };
        Pair { d, p: side(i + 1), q: Some(side(i + 2)), by_column: 1 + i / 3 }
    };
    Work { pairs: (0..io.x.len()).step_by(3).map(pair).collect(), r: io.x[1].dim(0), transposed: false }.code(io)
}

/// d^T p [n, r], or transposed, as output 0. `p` is an input with the strides of its rows and columns.
pub fn by_column(io: &Io, d: Wide, (p, row, column): (usize, usize, usize), r: usize, transposed: bool) -> Result<Code, &'static str> {
    let p = Narrow { input: p, row, column, offset: io.offsets[p] };
    Work { pairs: vec![Pair { d, p, q: None, by_column: 0 }], r, transposed }.code(io)
}

impl Work {
    fn refused(&self, io: &Io) -> Option<&'static str> {
        let dtype = io.x[self.pairs[0].d.input].dtype;
        let by_row = self.pairs[0].q.is_some();
        if !matches!(dtype, DType::BF16 | DType::F16) || io.arch.sm < 80 {
            return Some("there are tensor cores for bf16 and f16 alone, since compute capability 8.0");
        }
        if !self.r.is_multiple_of(8) || self.r > if by_row { BOTH } else { ONE } {
            return Some("columns are no multiple of 8, or too many");
        }
        self.pairs.iter().find_map(|Pair { d, p, .. }| {
            if !d.n.is_multiple_of(8) || !d.row.is_multiple_of(8) || !d.offset.is_multiple_of(8) {
                Some("rows do not start on 16 bytes")
            } else if p.column != 1 || !p.row.is_multiple_of(8) || !p.offset.is_multiple_of(8) {
                Some("rows of a narrow matrix do not start on 16 bytes")
            } else if d.m.max(d.n) >= 1 << 30 {
                Some("too large")
            } else {
                None
            }
        })
    }

    fn code(&self, io: &Io) -> Result<Code, &'static str> {
        if let Some(reason) = self.refused(io) {
            return Err(reason);
        }
        let (r, m, by_row, count) = (self.r, self.pairs[0].d.m, self.pairs[0].q.is_some(), self.pairs.len());
        // One block per multiprocessor: every block leaves partial sums, and its loads in flight are enough to saturate memory.
        let starts = sums(self.pairs.iter().map(|p| p.d.n.div_ceil(WIDE)));
        let columns = sums(self.pairs.iter().map(|p| p.d.n * r));
        let across = starts[count];
        let down = (MULTIPROCESSORS / across).clamp(1, m.div_ceil(TILE));
        let stage = TILE * WIDE * 2 + TILE * 16 * ((r / 8 + 1) | 1);
        let row_sums = if by_row { 4 * 4 * TILE * r } else { 0 };
        let stages = ((io.arch.shared_limit() - row_sums) / stage).min(4);
        if stages < 2 {
            return Err("too little shared memory");
        }
        // Partial sums lie one after another in the workspace.
        let (rows_in_parts, columns_in_parts) = (by_row && across > 1, down > 1);
        let second = if rows_in_parts { 4 * across * m * r } else { 0 };
        let workspace = second + if columns_in_parts { 4 * down * columns[count] } else { 0 };
        let results: Vec<Place> = self.pairs.iter().map(|p| At::Y(p.by_column).into()).collect();
        let rows: Place = if rows_in_parts { At::Work.into() } else { At::Y(0).into() }; // not written if it is not needed
        let (a, b) = (io.y[0].dtype, io.y[self.pairs[0].by_column].dtype);
        let list = |of: &dyn Fn(usize) -> String| format!("{{{}}}", (0..count).map(of).collect::<Vec<_>>().join(", "));
        let all = |of: &[usize]| format!("{{{}}}", of.iter().map(|n| n.to_string()).collect::<Vec<_>>().join(", "));
        let matrices: Vec<String> = (0..count).map(|i| format!("const T *d{i}, const T *p{i}, const T *q{i}, COLUMN_OUT *c{i}")).collect();
        let mut args = vec![];
        for (i, pair) in self.pairs.iter().enumerate() {
            let inputs = [pair.d.input, pair.p.input, pair.q().input].map(|input| Place::from(At::X(input)));
            args.extend(inputs);
            args.push(if columns_in_parts { At::Work.plus(second + 4 * columns[i]) } else { results[i] });
        }
        args.push(rows);
        let main = Launch::new(&[include_str!("../attention/mma.cuh"), include_str!("narrow.cu")].concat(), "narrow")
            .define_type("T", io.x[self.pairs[0].d.input].dtype)
            .define_type("ROW_OUT", if rows_in_parts { DType::F32 } else { a })
            .define_type("COLUMN_OUT", if columns_in_parts { DType::F32 } else { b })
            .define("COUNT", count)
            .define("MATRICES", matrices.join(", "))
            .define("DS", list(&|i| format!("d{i}")))
            .define("PS", list(&|i| format!("p{i}")))
            .define("QS", list(&|i| format!("q{i}")))
            .define("BY_COLUMNS", list(&|i| format!("c{i}")))
            .define("NS", list(&|i| self.pairs[i].d.n.to_string()))
            .define("D_ROWS", list(&|i| self.pairs[i].d.row.to_string()))
            .define("P_ROWS", list(&|i| self.pairs[i].p.row.to_string()))
            .define("Q_ROWS", list(&|i| self.pairs[i].q().row.to_string()))
            .define("Q_COLUMNS", list(&|i| self.pairs[i].q().column.to_string()))
            .define("STARTS", all(&starts[..count]))
            .define("STEP", columns[count])
            .define("M", m)
            .define("R", r)
            .define("BY_ROW", by_row as u8)
            .define("TRANSPOSED", self.transposed as u8)
            .define("ACROSS", across)
            .define("DOWN", down)
            .define("STAGES", stages)
            .grid(across * down, 1, 1)
            .shared(stages * stage + row_sums)
            .args(&args);
        let mut steps = vec![Step::Launch(main)];
        if workspace > 0 {
            let row_sums = if rows_in_parts { m * r } else { 0 };
            let columns = if columns_in_parts { columns } else { vec![0; count + 1] };
            let outputs: Vec<String> = (0..count).map(|i| format!("B *b{i}")).collect();
            let finish = Launch::new(include_str!("finish.cu"), "narrow_finish")
                .define_type("A", a)
                .define_type("B", b)
                .define("COUNT", count)
                .define("RESULTS", outputs.join(", "))
                .define("BS", list(&|i| format!("b{i}")))
                .define("STARTS", all(&starts))
                .define("COLUMNS", all(&columns))
                .define("R", r)
                .define("DOWN", down)
                .define("ROW_SUMS", row_sums)
                .grid((count * row_sums + columns[count]).div_ceil(512), 1, 1)
                .args(&[&[At::Work.into(), At::Work.plus(second), At::Y(0).into()], &results[..]].concat());
            steps.push(Step::Launch(finish));
        }
        Ok(Code { steps, workspace })
    }
}

impl Pair {
    /// Not read if there is none.
    fn q(&self) -> Narrow {
        self.q.unwrap_or(self.p)
    }
}

/// Prefix sums, starting with 0.
fn sums(of: impl Iterator<Item = usize>) -> Vec<usize> {
    std::iter::once(0)
        .chain(of.scan(0, |sum, n| {
            *sum += n;
            Some(*sum)
        }))
        .collect()
}
