//! A Mamba-2 layer up to its output projection: short convolution, state-space scan, gate and norm.

use engine::ops::concat::concat;
use engine::ops::ssd::{Scan, ssd, ssd_last, ssd_step};
use engine::{DType, Init, Var};

/// The sizes of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Channels of the scan.
    pub inner: usize,
    /// Channels of a head of the scan.
    pub head: usize,
    /// Width of B and C.
    pub state: usize,
    /// Groups of heads that share B and C.
    pub groups: usize,
    /// What the norm adds to the mean square.
    pub eps: f32,
}

impl Sizes {
    pub fn heads(&self) -> usize {
        self.inner / self.head
    }

    /// Channels of the convolution: x, B and C.
    pub fn wide(&self) -> usize {
        self.inner + 2 * self.groups * self.state
    }

    /// Rows of the input projection: z, the convolution's channels, dt.
    pub fn projected(&self) -> usize {
        self.inner + self.wide() + self.heads()
    }

    /// z, what is convolved, and dt, of a projection [.., projected].
    pub fn split<'g>(&self, u: Var<'g>) -> [Var<'g>; 3] {
        let axis = u.shape().len() - 1;
        let ends = [self.inner, self.inner + self.wide(), self.projected()];
        [u.slice(axis, 0, ends[0]), u.slice(axis, ends[0], ends[1]), u.slice(axis, ends[1], ends[2])]
    }
}

/// The parameters besides the projections.
#[derive(Clone, Copy)]
pub struct Weights<'g> {
    /// [wide, taps] and `[wide]`
    pub conv: Var<'g>,
    pub conv_bias: Var<'g>,
    /// `[heads]` each. The decay rate is -exp(log_decay).
    pub dt_bias: Var<'g>,
    pub log_decay: Var<'g>,
    pub skip: Var<'g>,
    /// `[inner]`
    pub norm: Var<'g>,
}

impl<'g> Weights<'g> {
    /// What the scan reads: `convolved` [.., wide] and dt [.., heads], behind the same dimensions. Where a position is 0, the state is forgotten.
    fn scan(&self, s: &Sizes, convolved: Var<'g>, dt: Var<'g>, positions: Option<Var<'g>>) -> Scan<'g> {
        let outer = convolved.shape()[..convolved.shape().len() - 1].to_vec();
        let part = |from: usize, count: usize, width: usize| {
            let shape = [&outer[..], &[count, width]].concat();
            convolved.slice(outer.len(), from, from + count * width).reshape(&shape)
        };
        let (values, r) = (s.groups * s.state, dt.recorder());
        let (dt, decay) = r.typed(|| {
            let dt = (dt.cast(DType::F32) + self.dt_bias).softplus();
            let decay = -(dt * self.log_decay.exp());
            let Some(positions) = positions else { return (dt, decay) };
            let first = positions.cast(DType::F32).less(r.full(&[1], 0.5)).reshape(&[&outer[..], &[1]].concat());
            (dt, first.choose(r.full(&[1], FORGET), decay))
        });
        let (x, b) = (part(0, s.heads(), s.head), part(s.inner, s.groups, s.state));
        Scan { x, dt, decay, b, c: part(s.inner + values, s.groups, s.state), d: self.skip }
    }

    /// rms_norm(y silu(z)) times its weight; the channels of every group of heads have a mean square of their own.
    fn gated_norm(&self, s: &Sizes, y: Var<'g>, z: Var<'g>) -> Var<'g> {
        let gated = z.swiglu(y.reshape(&z.shape()));
        if s.groups == 1 {
            return gated.rms_norm(self.norm, s.eps);
        }
        let (outer, width) = (&z.shape()[..z.shape().len() - 1], s.inner / s.groups);
        let grouped = gated.reshape(&[outer, &[s.groups, width]].concat());
        let ones = z.recorder().full(&[width], 1.0);
        grouped.rms_norm(ones, s.eps).reshape(&z.shape()) * self.norm
    }
}

/// A decay after which nothing of a state is left in f32.
const FORGET: f32 = -110.0;

/// A layer over time, of its input projection u [batch, time, projected]: what the output projection reads, [batch, time, inner]. `directions`: whether
/// time runs backwards; their results are added up.
pub fn mamba2<'g>(u: Var<'g>, s: &Sizes, w: &Weights<'g>, directions: &[bool]) -> Var<'g> {
    let [z, xbc, dt] = s.split(u);
    let one = |&reverse: &bool| {
        let scan = w.scan(s, xbc.short_conv(w.conv, w.conv_bias, reverse, None), dt, None);
        w.gated_norm(s, ssd(scan, reverse), z)
    };
    directions.iter().map(one).reduce(|a, b| a + b).expect("at least one direction")
}

/// The same from the first position to the last, of rows that may hold several sequences or padding: positions i32 [batch, time] are 0 where one begins.
pub fn mamba2_placed<'g>(u: Var<'g>, s: &Sizes, w: &Weights<'g>, positions: Option<Var<'g>>) -> Var<'g> {
    let [z, xbc, dt] = s.split(u);
    let scan = w.scan(s, xbc.short_conv(w.conv, w.conv_bias, false, positions), dt, positions);
    w.gated_norm(s, ssd(scan, false), z)
}

/// A whole layer over time with parameters of its own, `at`.inward, `at`.conv and so on, whose convolution has `taps`: x [batch, time, dim] -> [batch, time, dim].
pub fn layer<'g>(at: &str, x: Var<'g>, s: &Sizes, taps: usize, directions: &[bool]) -> Var<'g> {
    let (r, dim) = (x.recorder(), x.dim(0));
    let matrix = |of: &str, rows: usize, columns: usize| {
        r.param(&format!("{at}.{of}"), &[rows, columns], Init::Truncated { std: 1.0 / (columns as f32).sqrt() })
    };
    let vector = |of: &str, length: usize, init: Init| r.param(&format!("{at}.{of}"), &[length], init);
    let inward = matrix("inward", s.projected(), dim);
    let weights = Weights {
        conv: r.param(&format!("{at}.conv"), &[s.wide(), taps], Init::Uniform { bound: 1.0 / (taps as f32).sqrt() }),
        conv_bias: vector("conv_bias", s.wide(), Init::Full(0.0)),
        dt_bias: vector("dt_bias", s.heads(), Init::StepSize { low: 0.001, high: 0.1 }),
        log_decay: vector("log_decay", s.heads(), Init::LogOfUniform { low: 1.0, high: 16.0 }),
        skip: vector("skip", s.heads(), Init::Full(1.0)),
        norm: vector("norm", s.inner, Init::Full(1.0)),
    };
    mamba2(x.linear(inward), s, &weights, directions).linear(matrix("outward", dim, s.inner))
}

/// What a layer remembers of the tokens before: the rows that the convolution still sees [batch, taps - 1, wide], and the scan's state
/// [batch, heads, head, state].
#[derive(Clone, Copy)]
pub struct Memory<'g> {
    pub conv: Var<'g>,
    pub scan: Var<'g>,
}

/// What the layer remembers after prompts that end with their rows, as `mamba2_placed` reads them.
pub fn remembered<'g>(u: Var<'g>, s: &Sizes, w: &Weights<'g>, positions: Var<'g>) -> Memory<'g> {
    let [_, xbc, dt] = s.split(u);
    let (r, batch, time, back) = (u.recorder(), u.shape()[0], u.shape()[1], w.conv.dim(0) - 1);
    let scan = w.scan(s, xbc.short_conv(w.conv, w.conv_bias, false, Some(positions)), dt, Some(positions));
    // Rows from before a prompt's first token are zeros.
    let last = positions.slice(1, time - 1, time).cast(DType::F32);
    let steps = r.constant(&[1, back], (0..back).map(|i| (back - 1 - i) as f32 - 0.5).collect());
    let seen = steps.less(last).reshape(&[batch, back, 1]);
    let rows = xbc.pad(1, back, 0).slice(1, time, time + back);
    let conv = engine::mutant!("mamba2-remembers-padding", rows * seen.cast(rows.dtype()), rows);
    Memory { conv, scan: ssd_last(scan) }
}

/// One token more: u [batch, 1, projected] -> [batch, 1, inner], and what is remembered then.
pub fn step<'g>(u: Var<'g>, s: &Sizes, w: &Weights<'g>, memory: Memory<'g>) -> (Var<'g>, Memory<'g>) {
    let [z, xbc, dt] = s.split(u);
    let (batch, taps) = (u.shape()[0], w.conv.dim(0));
    let window = concat(&[memory.conv.cast(xbc.dtype()), xbc], 1);
    let convolved = window.short_conv(w.conv, w.conv_bias, false, None).slice(1, taps - 1, taps).reshape(&[batch, s.wide()]);
    let (y, state) = ssd_step(memory.scan, w.scan(s, convolved, dt.reshape(&[batch, s.heads()]), None));
    (w.gated_norm(s, y, z), Memory { conv: window.slice(1, 1, taps), scan: state })
}
