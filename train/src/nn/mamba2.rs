//! A Mamba-2 layer up to its output projection: short convolution, state-space scan, gate and norm.

use engine::ops::ssd::{Scan, ssd};
use engine::{DType, Var};

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
    /// What the scan reads: `convolved` [.., wide] and dt [.., heads], behind the same dimensions.
    pub fn scan(&self, s: &Sizes, convolved: Var<'g>, dt: Var<'g>) -> Scan<'g> {
        let outer = convolved.shape()[..convolved.shape().len() - 1].to_vec();
        let part = |from: usize, count: usize, width: usize| {
            let shape = [&outer[..], &[count, width]].concat();
            convolved.slice(outer.len(), from, from + count * width).reshape(&shape)
        };
        let values = s.groups * s.state;
        let (dt, decay) = dt.recorder().typed(|| {
            let dt = (dt.cast(DType::F32) + self.dt_bias).softplus();
            (dt, -(dt * self.log_decay.exp()))
        });
        Scan {
            x: part(0, s.heads(), s.head),
            dt,
            decay,
            b: part(s.inner, s.groups, s.state),
            c: part(s.inner + values, s.groups, s.state),
            d: self.skip,
        }
    }

    /// rms_norm(y silu(z)) times its weight.
    pub fn gated_norm(&self, s: &Sizes, y: Var<'g>, z: Var<'g>) -> Var<'g> {
        z.swiglu(y.reshape(&z.shape())).rms_norm(self.norm, s.eps)
    }
}

/// A layer over time, of its input projection u [batch, time, projected]: what the output projection reads, [batch, time, inner]. `directions`: whether
/// time runs backwards; their results are added up.
pub fn mamba2<'g>(u: Var<'g>, s: &Sizes, w: &Weights<'g>, directions: &[bool]) -> Var<'g> {
    let [z, xbc, dt] = s.split(u);
    let one = |&reverse: &bool| {
        let scan = w.scan(s, xbc.short_conv(w.conv, w.conv_bias, reverse, None), dt);
        w.gated_norm(s, ssd(scan, reverse), z)
    };
    directions.iter().map(one).reduce(|a, b| a + b).expect("at least one direction")
}
