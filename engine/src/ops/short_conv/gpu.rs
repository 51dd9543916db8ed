//! How the short convolution is launched.

use crate::kernel::{At, Code, Io, Launch, Place, Step};
use crate::meta::{DType, block_stride};
use crate::ops::reduce::sum_rows;

/// Positions of a thread. The backward pass has more, since each slice writes sums for the gradient of the weight.
const SLICES: [usize; 2] = [32, 128];

fn launch(io: &Io, reverse: bool, entry: &'static str, slice: usize) -> Launch {
    let (x, width) = (&io.x[0], io.x[1].dim(0));
    let [batch, time, channels] = [0, 1, 2].map(|i| x.shape[i]);
    let floats: Vec<usize> = io.x.iter().zip(&io.offsets).filter(|(x, _)| x.dtype.is_float()).map(|(_, o)| *o).collect();
    let step = block_stride(&x.shape, &io.strides[0], 2).expect("blocks evenly apart");
    let vec = if floats.iter().chain([&step, &channels]).all(|v| v.is_multiple_of(4)) { 4 } else { 1 };
    Launch::new(include_str!("conv.cu"), entry)
        .define_type("T", x.dtype)
        .define("TIME", time)
        .define("CHANNELS", channels)
        .define("WIDTH", width)
        .define("X_ROW", step)
        .define("VEC", vec)
        .define("SLICE", slice)
        .define("REVERSE", reverse as u8)
        .define("PLACED", io.x.iter().any(|x| x.dtype == DType::I32) as u8)
        .grid((channels / vec).div_ceil(128), time.div_ceil(slice), batch)
        .block(128)
}

pub fn forward(io: &Io, reverse: bool) -> Code {
    launch(io, reverse, "short_conv", SLICES[0]).all(io).code()
}

pub fn backward(io: &Io, reverse: bool) -> Code {
    let grad = launch(io, reverse, "short_conv_grad", SLICES[1]);
    let (slices, weights, channels) = ((grad.grid[1] * grad.grid[2]) as usize, io.x[1].elements(), io.x[2].elements());
    let by_bias = At::Work.plus(4 * slices * weights);
    let inputs = (0..io.x.len()).map(At::X);
    let args: Vec<Place> = inputs.chain([At::Y(0), At::Work]).map(Place::from).chain([by_bias]).collect();
    let grad = grad.args(&args);
    let steps = vec![
        Step::Launch(grad),
        Step::Launch(sum_rows(slices, weights, At::Work.into(), (At::Y(1).into(), DType::F32))),
        Step::Launch(sum_rows(slices, channels, by_bias, (At::Y(2).into(), DType::F32))),
    ];
    Code { steps, workspace: 4 * slices * (weights + channels) }
}
