//! Contact sheets: pictures in a grid, to look at.

use image::{Rgb, RgbImage};

use super::{CHANNELS, ImageSet};
use crate::data::Order;
use crate::report::lettering::{HEIGHT, INK, WIDTH, Way, length, shortened, write};

const GAP: u32 = 4;
const PAPER: Rgb<u8> = Rgb([255; CHANNELS]);
/// Smaller pictures are enlarged by whole numbers up to about this many pixels.
const SHOWN: usize = 96;
const HEADING: u32 = 3 * HEIGHT;

/// Pictures under a heading, row by row; none is a place left blank.
pub struct Block<'a> {
    pub heading: &'a str,
    /// [3, size, size], and what is written below it.
    pub pictures: Vec<Option<(Vec<u8>, &'a str)>>,
    pub columns: usize,
}

/// Blocks next to each other, of pictures of `size` pixels a side.
pub fn sheet(blocks: &[Block], size: usize) -> RgbImage {
    let scale = (SHOWN / size).max(1);
    let side = (size * scale) as u32;
    let (across, down) = (side + GAP, side + HEIGHT + 2 * GAP);
    let widths = || blocks.iter().map(|b| (b.columns as u32 * across).max(length(b.heading, 2)) + 2 * GAP);
    let rows = blocks.iter().map(|b| b.pictures.len().div_ceil(b.columns)).max().unwrap_or(0) as u32;
    let mut sheet = RgbImage::from_pixel(widths().sum::<u32>() + GAP, HEADING + rows * down + GAP, PAPER);
    let mut left = GAP;
    for (block, width) in blocks.iter().zip(widths()) {
        write(&mut sheet, (left, GAP), block.heading, 2, INK, Way::Right);
        for (i, (picture, caption)) in block.pictures.iter().enumerate().filter_map(|(i, p)| Some((i, p.as_ref()?))) {
            let (column, row) = ((i % block.columns) as u32, (i / block.columns) as u32);
            let (x, y) = (left + column * across, HEADING + row * down);
            for (a, b) in (0..side).flat_map(|a| (0..side).map(move |b| (a, b))) {
                let at = |channel: usize| (channel * size + b as usize / scale) * size + a as usize / scale;
                sheet.put_pixel(x + a, y + b, Rgb(std::array::from_fn(|channel| picture[at(channel)])));
            }
            let caption = shortened(caption, (side / WIDTH) as usize);
            write(&mut sheet, (x, y + side + GAP / 2), &caption, 1, INK, Way::Right);
        }
        left += width;
    }
    sheet
}

/// Numbers of at most `count` pictures of a set, chosen by the seed, and columns: rows are then the classes, with blanks where one has
/// too few. More classes than `count` are shown by one picture each, as far as they go.
pub fn by_class(set: &ImageSet, count: usize, seed: u64) -> (Vec<Option<usize>>, usize) {
    let each = count / set.classes.len();
    let mut chosen = vec![vec![]; set.classes.len()];
    let order = Order { seed, len: set.len() as u64 };
    for item in (0..order.len).map(|i| order.at(i) as usize) {
        let row = &mut chosen[set.labels[item] as usize];
        if row.len() < each.max(1) {
            row.push(Some(item));
        }
    }
    if each == 0 {
        return (chosen.concat().into_iter().take(count).collect(), count.isqrt());
    }
    chosen.iter_mut().for_each(|row| row.resize(each, None));
    (chosen.concat(), each)
}
