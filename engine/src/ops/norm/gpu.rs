//! Norms on a GPU: one forward kernel, and one backward kernel whose partial sums over rows a second launch adds.

use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::DType;
use crate::ops::reduce::packs::Rows;

const SUMMED: &str = include_str!("sum.cuh");
pub const PARTIAL: &str = include_str!("partial.cuh");

/// Blocks that sum over rows, each leaving one partial sum: two for each multiprocessor of an H200, and as many on every GPU, so that the order
/// of additions is the same.
pub const BLOCKS: usize = 264;

/// Which input of a norm, or of its gradient, is which. Input 0 is the tensor that is normed.
#[derive(Default)]
pub struct Inputs {
    /// Added to input 0 first: one broadcast row, or a tensor of the same shape.
    pub term: Option<usize>,
    pub weight: Option<usize>,
    /// Only for the gradient.
    pub rstd: usize,
    pub dy: usize,
    /// Added to the result.
    pub more: Option<usize>,
    /// Whether the last output is the norm's own result.
    pub y: bool,
}

impl Inputs {
    /// An input; input 0 in place of a missing one, which the kernel does not read.
    fn at(input: Option<usize>) -> Place {
        At::X(input.unwrap_or(0)).into()
    }

    /// 0: nothing is added, 1: one broadcast row, 2: a tensor of the same shape.
    fn kind(&self, io: &Io) -> usize {
        self.term.map_or(0, |t| if io.x[t].elements() == io.x[0].elements() { 2 } else { 1 })
    }

    /// The type of an added tensor; input 0's if there is none, or if it is one row, which is cached and may be read in packs of more than 16
    /// bytes.
    fn of_rows(&self, io: &Io) -> DType {
        dtype(io, self.term.filter(|_| self.kind(io) == 2))
    }
}

fn dtype(io: &Io, input: Option<usize>) -> DType {
    io.x[input.unwrap_or(0)].dtype
}

/// Outputs y, rstd, and perhaps the sum that is normed.
pub fn forward(io: &Io, inputs: Inputs, eps: f32, layer: bool) -> Code {
    let (d, n) = (io.x[0].dim(0), io.x[0].rows());
    let (t, b, w) = (io.x[0].dtype, dtype(io, inputs.term), dtype(io, inputs.weight));
    let rows = Rows::new(d, &[t, inputs.of_rows(io)]);
    let sum = io.y.len() > 2;
    let outputs = [At::Y(0), At::Y(1), if sum { At::Y(2) } else { At::Y(0) }].map(Place::from);
    rows.launch(&[SUMMED, include_str!("norm.cu")].concat(), "normalise", d)
        .define_type("T", t)
        .define_type("B", b)
        .define_type("W", w)
        .define("ROWS", n)
        .define("PITCH", io.y[0].dim(0))
        .define("TERM", inputs.kind(io))
        .define("WEIGHT", inputs.weight.is_some() as u8)
        .define("SUM", sum as u8)
        .define("LAYER", layer as u8)
        .define_f32("EPS", eps)
        .grid(n.div_ceil(rows.groups), 1, 1)
        .args(&[&[At::X(0).into(), Inputs::at(inputs.term), Inputs::at(inputs.weight)], &outputs[..]].concat())
        .code()
}

/// Outputs dx, then the gradients of the weight and of an added row, and perhaps the norm's result.
pub fn backward(io: &Io, inputs: Inputs, layer: bool) -> Code {
    let (d, n) = (io.x[0].dim(0), io.x[0].rows());
    let (t, g) = (io.x[0].dtype, io.x[inputs.dy].dtype);
    let (b, w, m) = (dtype(io, inputs.term), dtype(io, inputs.weight), dtype(io, inputs.more));
    let rows = Rows::new(d, &[t, g, m, inputs.of_rows(io)]);
    let sums = io.y.len() - 1 - inputs.y as usize;
    let launch = rows
        .launch(&[SUMMED, PARTIAL, include_str!("grad.cu")].concat(), "norm_grad", d)
        .define_type("T", t)
        .define_type("B", b)
        .define_type("G", g)
        .define_type("W", w)
        .define_type("M", m)
        .define("ROWS", n)
        .define("TERM", inputs.kind(io))
        .define("WEIGHT", inputs.weight.is_some() as u8)
        .define("ADD", inputs.more.is_some() as u8)
        .define("LAYER", layer as u8)
        .define("SUMS", sums)
        .define("NORMED", inputs.y as u8)
        .define("WARPS", rows.threads() / 32)
        .define("RESIDENT", (512 / rows.threads()).max(1));
    let args = [
        At::X(0).into(),
        Inputs::at(inputs.term),
        At::X(inputs.rstd).into(),
        At::X(inputs.dy).into(),
        Inputs::at(inputs.weight),
        Inputs::at(inputs.more),
        At::Y(0).into(),
        At::Y(if inputs.y { io.y.len() - 1 } else { 0 }).into(),
        At::Work.into(),
    ];
    let blocks = n.div_ceil(rows.groups);
    if sums == 0 {
        return launch.grid(blocks, 1, 1).args(&args).code();
    }
    // Small blocks are more: as many as run at once.
    let blocks = blocks.min(BLOCKS / 2 * (512 / rows.threads()).max(2));
    let steps = vec![Step::Launch(launch.grid(blocks, 1, 1).args(&args)), Step::Launch(finish(io, sums, blocks))];
    Code { steps, workspace: 4 * blocks * sums * d }
}

/// Outputs 1 to `last`: sums of their partial sums [parts, elements].
pub fn finish(io: &Io, last: usize, parts: usize) -> Launch {
    let columns = io.y[1..=last].iter().map(|m| m.elements()).sum::<usize>();
    Launch::new(include_str!("finish.cu"), "finish")
        .define_type("A", io.y[1].dtype)
        .define_type("B", io.y[last].dtype)
        .define("PARTS", parts)
        .define("COLUMNS", columns)
        .define("FIRST", io.y[1].elements())
        .grid(columns.div_ceil(32), 1, 1)
        .block(1024)
        .args(&[At::Work.into(), At::Y(1).into(), At::Y(last).into()])
}
