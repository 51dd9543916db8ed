//! Pictures side by side, to look at.

use image::{Rgb, RgbImage};

use super::{CHANNELS, ImageSet};
use crate::data::Order;

const GAP: usize = 4;
const GROUND: u8 = 255;
/// Smaller pictures are enlarged by whole numbers up to about this many pixels.
const SHOWN: usize = 96;

/// Pictures [n, 3, size, size], `columns` in a row.
pub fn sheet(pictures: &[u8], size: usize, columns: usize) -> RgbImage {
    let scale = (SHOWN / size).max(1);
    let cell = size * scale + GAP;
    let pictures: Vec<&[u8]> = pictures.chunks_exact(CHANNELS * size * size).collect();
    let rows = pictures.len().div_ceil(columns);
    let mut sheet = RgbImage::from_pixel((columns * cell + GAP) as u32, (rows * cell + GAP) as u32, Rgb([GROUND; CHANNELS]));
    for (i, picture) in pictures.into_iter().enumerate() {
        let (left, top) = (GAP + i % columns * cell, GAP + i / columns * cell);
        for (x, y) in (0..size * scale).flat_map(|y| (0..size * scale).map(move |x| (x, y))) {
            let pixel = std::array::from_fn(|c| picture[(c * size + y / scale) * size + x / scale]);
            sheet.put_pixel((left + x) as u32, (top + y) as u32, Rgb(pixel));
        }
    }
    sheet
}

/// At most `count` pictures of a set, chosen by the seed: (pixels, columns) for `sheet`, whose rows are then the classes. More
/// classes than `count` are shown by one picture each, as far as they go.
pub fn by_class(set: &ImageSet, count: usize, seed: u64) -> (Vec<u8>, usize) {
    let each = count / set.classes.len();
    let mut chosen = vec![vec![]; set.classes.len()];
    let order = Order { seed, len: set.len() as u64 };
    for (picture, label) in (0..order.len).map(|i| set.item(order.at(i) as usize)) {
        if chosen[label as usize].len() < each.max(1) {
            chosen[label as usize].push(picture);
        }
    }
    let blank = vec![GROUND; CHANNELS * set.size * set.size];
    if each == 0 {
        let pictures = chosen.iter().flatten().take(count).copied().collect::<Vec<_>>().concat();
        return (pictures, count.isqrt());
    }
    for row in &mut chosen {
        row.resize(each, &blank);
    }
    (chosen.concat().concat(), each)
}
