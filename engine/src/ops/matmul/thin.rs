//! GEMMs with few columns, y [m, n] = x [m, k] w [k, n]: bound by reading x once, which a tiled GEMM does badly.

use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::DType;
use crate::ops::reduce::packs::{PACKS, pack};
use crate::ops::reduce::sum_rows;

/// The most columns of y: a thread keeps a sum for each.
const COLUMNS: usize = 8;
/// The fewest rows and columns of x, as it lies in memory, for which the kernel pays.
const ROWS: usize = 512;
const WIDTH: usize = 64;
const THREADS: usize = 256;
/// Warps, and blocks, that fill any GPU: constants, so that the order of additions is the same on all.
const WARPS: usize = 1024;
const BLOCKS: usize = 512;

/// None if y has too many columns, or if the strides do not fit.
pub fn code(io: &Io) -> Option<Code> {
    let side = |i: usize| {
        let r = io.x[i].rank();
        Side { input: i, row: io.strides[i][r - 2], column: io.strides[i][r - 1] }
    };
    let (m, k, n) = (io.x[0].dim(1), io.x[0].dim(0), io.x[1].dim(0));
    if io.y[0].elements() != m * n {
        return None;
    }
    // Few rows are few columns of the transpose: y^T = w^T x^T.
    let thin = match m < n {
        false => Thin { m, k, n, x: side(0), w: side(1), y: (n, 1), vec: 1 },
        true => Thin { m: n, k, n: m, x: side(1).t(), w: side(0).t(), y: (1, n), vec: 1 },
    };
    let (m, k, x) = (thin.m, thin.k, thin.x);
    let packed = |width, stride| pack(&[io.x[0].dtype], &[width, stride, io.offsets[x.input]]);
    match (x.row, x.column) {
        _ if thin.n > COLUMNS => None,
        (row, 1) if m >= ROWS && k >= WIDTH => Some(Thin { vec: packed(k, row), ..thin }.rows(io)),
        (1, column) if k >= ROWS && m >= WIDTH => Some(Thin { vec: packed(m, column), ..thin }.columns(io)),
        _ => None,
    }
}

#[derive(Clone, Copy)]
struct Side {
    input: usize,
    /// Strides.
    row: usize,
    column: usize,
}

impl Side {
    fn t(self) -> Side {
        Side { row: self.column, column: self.row, ..self }
    }
}

struct Thin {
    m: usize,
    k: usize,
    n: usize,
    x: Side,
    w: Side,
    /// Strides of a row and of a column.
    y: (usize, usize),
    vec: usize,
}

impl Thin {
    fn launch(&self, source: &str, entry: &'static str, io: &Io, (to, out): (Place, DType)) -> Launch {
        Launch::new(&[PACKS, source].concat(), entry)
            .define_type("T", io.x[0].dtype)
            .define_type("OUT", out)
            .define("M", self.m)
            .define("K", self.k)
            .define("N", self.n)
            .define("VEC", self.vec)
            .define("W_ROW", self.w.row)
            .define("W_COLUMN", self.w.column)
            .define("Y_ROW", self.y.0)
            .define("Y_COLUMN", self.y.1)
            .block(THREADS)
            .args(&[At::X(self.x.input).into(), At::X(self.w.input).into(), to])
    }

    /// x is row-major: up to a warp for every few rows.
    fn rows(&self, io: &Io) -> Code {
        let packs = self.k / self.vec;
        let lanes = packs.next_power_of_two().min(32);
        let values = |rows: usize| (rows * self.n).next_power_of_two();
        // A warp reads w once for all of its rows.
        let mut rows = 4;
        while rows > 1 && (values(rows) > lanes || self.m * lanes < WARPS * 32 * rows) {
            rows /= 2;
        }
        // How the VEC rows of w for a pack of x are read: in packs along columns, in packs along rows, or one by one.
        let aligned = io.offsets[self.w.input].is_multiple_of(self.vec);
        let w = match (self.w.row, self.w.column) {
            (1, column) if aligned && (self.n == 1 || column.is_multiple_of(self.vec)) => 1,
            (row, 1) if aligned && row == self.n => 2,
            _ => 0,
        };
        self.launch(include_str!("thin.cu"), "thin", io, (At::Y(0).into(), io.y[0].dtype))
            .define("X_ROW", self.x.row)
            .define("W_PACKS", w)
            .define("LANES", lanes)
            .define("ROWS", rows)
            .define("VALUES", values(rows))
            .grid(self.m.div_ceil(rows).div_ceil(THREADS / lanes), 1, 1)
            .code()
    }

    /// x is column-major, as in the gradient of w: partial sums over parts of k, then their sum.
    fn columns(&self, io: &Io) -> Code {
        let packs = self.m / self.vec;
        let batch = if self.n <= 2 { 8 } else { 4 };
        // Width of a block in packs: 8 (a cache line) if there is little to read, so that there are fewer parts.
        let mut wide = packs.next_power_of_two().clamp(8, 32);
        while wide > 8 && packs.div_ceil(wide) * self.k.div_ceil(THREADS / wide * batch) < BLOCKS {
            wide /= 2;
        }
        let tiles = packs.div_ceil(wide);
        // Whole batches, but for the last part.
        let unit = THREADS / wide * batch;
        let chunk = (self.k * tiles / BLOCKS / unit).max(1) * unit;
        let parts = self.k.div_ceil(chunk);
        let partial = (At::Work.into(), DType::F32);
        let y = (At::Y(0).into(), io.y[0].dtype);
        let first = self
            .launch(include_str!("thin_columns.cu"), "thin_columns", io, if parts == 1 { y } else { partial })
            .define("X_COLUMN", self.x.column)
            .define("WIDE", wide)
            .define("TILES", tiles)
            .define("CHUNK", chunk)
            .define("BATCH", batch)
            .grid(tiles * parts, 1, 1);
        if parts == 1 {
            return first.code();
        }
        let second = sum_rows(parts, self.m * self.n, partial.0, y);
        Code { steps: vec![Step::Launch(first), Step::Launch(second)], workspace: 4 * parts * self.m * self.n }
    }
}
