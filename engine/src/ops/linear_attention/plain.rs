//! Linear attention of any shape and type: GEMMs, and kernels for the steps between them.

use super::{DType, LinearAttentionGrad, Sizes};
use crate::kernel::{At, Code, Gemm, Io, Launch, Matrix, Place, Step};
use crate::ops::norm::gpu;

/// Steps that forward and backward share.
struct Plain<'a> {
    io: &'a Io,
    s: Sizes,
    dtype: DType,
    code: Code,
}

impl<'a> Plain<'a> {
    fn new(io: &'a Io) -> Plain<'a> {
        Plain { io, s: Sizes::of(&io.x), dtype: io.x[0].dtype, code: Code::default() }
    }

    fn reserve(&mut self, elements: usize, dtype: DType) -> Place {
        let place = At::Work.plus(self.code.workspace);
        self.code.workspace += (elements * dtype.size()).next_multiple_of(256);
        place
    }

    fn launch(&mut self, entry: &'static str, threads: usize, define: impl Fn(Launch) -> Launch, args: &[Place]) {
        let launch = Launch::new(include_str!("plain.cu"), entry)
            .define_type("T", self.dtype)
            .define_type("C", self.io.x[1].dtype)
            .define("TIME", self.s.time)
            .define("HEADS", self.s.heads)
            .define("N", self.s.n)
            .define("SQUARE", self.s.square())
            .define("PAIRS", self.io.x[0].elements() / 2)
            .define("COUNT", self.io.x[3].elements());
        self.code.steps.push(Step::Launch(define(launch).grid(threads.div_ceil(256), 1, 1).args(args)));
    }

    /// q [batch, heads, time, n]; zeroes the padding columns of `s`.
    fn queries(&mut self, s: Option<Place>) -> Matrix {
        let q = self.reserve(self.io.x[0].elements(), self.dtype);
        let args = [At::X(0).into(), At::X(1).into(), At::X(2).into(), q, s.unwrap_or(q)];
        let define = |l: Launch| l.define("CLEAR", s.is_some() as u8).define("ADD", 0).define("RELU", 0).define_type("M", DType::F32);
        self.launch("linear_attention_turn", self.io.x[0].elements() / 2, define, &args);
        Matrix { batch: self.s.time * self.s.n, ..Matrix::rows(q, self.dtype, self.s.n) }
    }

    /// One batched GEMM for all heads of all sequences; c += a b if `more`.
    fn product(&mut self, (m, n, k): (usize, usize, usize), a: Matrix, b: Matrix, c: Matrix, more: bool) {
        let beta = if more { 1.0 } else { 0.0 };
        let batch = self.s.batch * self.s.heads;
        self.code.steps.push(Step::Gemm(Gemm { batch, beta, ..Gemm::new(m, n, k, a, b, c) }));
    }

    /// For each head, one GEMM batched over sequences, for tensors with heads outermost, inside, or none.
    fn by_head(&mut self, (m, n, k): (usize, usize, usize), matrices: impl Fn(usize) -> [Matrix; 3], more: impl Fn(usize) -> bool) {
        for h in 0..self.s.heads {
            let [a, b, c] = matrices(h);
            let beta = if more(h) { 1.0 } else { 0.0 };
            self.code.steps.push(Step::Gemm(Gemm { batch: self.s.batch, beta, ..Gemm::new(m, n, k, a, b, c) }));
        }
    }
}

impl Sizes {
    /// Head h of [batch, heads, time, row].
    fn inside(&self, at: Place, dtype: DType, row: usize, h: usize) -> Matrix {
        Matrix { batch: self.heads * self.time * row, ..Matrix::rows(at, dtype, row) }.at(h * self.time * row)
    }

    /// Head h of [heads, batch, time, d].
    fn outside(&self, at: Place, dtype: DType, h: usize) -> Matrix {
        Matrix { batch: self.time * self.d, ..Matrix::rows(at, dtype, self.d) }.at(h * self.batch * self.time * self.d)
    }
}

/// The steps of a norm, with its addresses replaced.
fn moved(code: Code, x: &[Place], y: &[Place]) -> Vec<Step> {
    let place = |p: &Place| match p.at {
        At::X(i) => x[i],
        At::Y(i) => y[i],
        At::Work => y[0], // its workspace is for sums over rows, which this norm has none of
    };
    let moved = |step: Step| match step {
        Step::Launch(l) => Step::Launch(Launch { args: l.args.iter().map(place).collect(), ..l }),
        gemm => gemm,
    };
    code.steps.into_iter().map(moved).collect()
}

pub fn forward(io: &Io, eps: Option<f32>) -> Code {
    let mut p = Plain::new(io);
    let (s, dtype) = (p.s, p.dtype);
    let (y, scores): (Place, Place) = (At::Y(0).into(), At::Y(io.y.len() - 1).into());
    let q = p.queries(Some(scores));
    let all = Matrix { batch: s.time * s.square(), ..Matrix::rows(scores, dtype, s.square()) };
    p.product((s.time, s.time, s.n), q, q.t(), all, false);
    let v = s.outside(At::X(3).into(), dtype, 0);
    let matrices = |h| [s.inside(scores, dtype, s.square(), h), v, s.outside(y, dtype, h)];
    p.by_head((s.time, s.d, s.time), matrices, |_| false);
    if let Some(eps) = eps {
        // Row by row, so that it can work in place.
        let rows = Io::plain(&io.y[..1], &io.y[..2], io.arch);
        let norm = gpu::forward(&rows, gpu::Inputs::default(), eps, true);
        p.code.steps.extend(moved(norm, &[y], &[y, At::Y(1).into()]));
    }
    p.code
}

pub fn backward(io: &Io, op: &LinearAttentionGrad) -> Code {
    let mut p = Plain::new(io);
    let (s, dtype) = (p.s, p.dtype);
    let (at_s, at_dy, at_more) = op.places();
    let mut dr: Place = At::X(at_dy).into();
    if op.norm {
        dr = p.reserve(io.x[at_dy].elements(), dtype);
        let rows = Io::plain(&[io.x[4].clone(), io.x[5].clone(), io.x[at_dy].clone()], &io.x[4..5], io.arch);
        let grad = gpu::backward(&rows, gpu::Inputs { rstd: 1, dy: 2, ..gpu::Inputs::default() }, true);
        p.code.steps.extend(moved(grad, &[At::X(4).into(), At::X(5).into(), At::X(at_dy).into()], &[dr]));
    }
    let q = p.queries(None);
    let v = s.outside(At::X(3).into(), dtype, 0);
    let squares = p.reserve(io.x[at_s].rows() * s.time, dtype);
    p.by_head((s.time, s.time, s.d), |h| [s.outside(dr, dtype, h), v.t(), s.inside(squares, dtype, s.time, h)], |_| false);
    let ds = Matrix { batch: s.time * s.time, ..Matrix::rows(squares, dtype, s.time) };
    let dq = Matrix { place: p.reserve(io.x[0].elements(), dtype), ..q };
    p.product((s.time, s.n, s.time), ds, q, dq, false);
    p.product((s.time, s.n, s.time), ds.t(), q, dq, true);

    // Heads are summed in f32.
    let narrow = dtype != DType::F32;
    let sum = if narrow { p.reserve(io.x[3].elements(), DType::F32) } else { At::Y(1).into() };
    let scores = |h| s.inside(At::X(at_s).into(), dtype, s.square(), h);
    p.by_head((s.time, s.d, s.time), |h| [scores(h), s.outside(dr, dtype, h), s.outside(sum, DType::F32, 0)], |h| h > 0);
    let more = if op.add { io.x[at_more].dtype } else { DType::F32 };
    let define = |l: Launch| l.define("CLEAR", 0).define("ADD", op.add as u8).define("RELU", op.relu as u8).define_type("M", more);
    if narrow {
        p.launch("linear_attention_round", io.x[3].elements(), define, &[sum, At::Y(1).into()]);
    }
    let extra = At::X(if op.add { at_more } else { 0 });
    let args = [At::X(0).into(), At::X(1).into(), At::X(2).into(), dq.place, extra.into(), At::Y(0).into()];
    p.launch("linear_attention_turn_back", io.x[0].elements() / 2, define, &args);
    p.code
}
