//! Text in pictures: letters of 5 by 8 pixels, drawn in lettering.txt. What is not ASCII is an empty box.

use image::{Rgb, RgbImage};

const LETTERS: &str = include_str!("lettering.txt");
/// Letters beside each other in the file, from the space on; each is followed by a blank, the last by the line's end.
const BESIDE: usize = 16;

/// Pixels of a letter with the gap after it.
pub const WIDTH: u32 = 6;
pub const HEIGHT: u32 = 8;
pub const INK: Rgb<u8> = Rgb([60, 60, 60]);

/// How a text runs from where it begins.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Way {
    Right,
    /// From the bottom to the top, letters lying on their backs.
    Up,
}

/// Writes a text, each pixel of a letter `scale` wide. (x, y) is the upper left corner of its first letter, where it runs up the lower
/// left. What does not fit is cut off.
pub fn write(picture: &mut RgbImage, (x, y): (u32, u32), text: &str, scale: u32, colour: Rgb<u8>, way: Way) {
    let places = (0..WIDTH - 1).flat_map(|column| (0..HEIGHT).map(move |row| (column, row)));
    for ((i, letter), (column, row)) in text.chars().enumerate().flat_map(|l| places.clone().map(move |p| (l, p))) {
        if !is_ink(letter, column, row) {
            continue;
        }
        let along = (i as u32 * WIDTH + column) * scale;
        for (a, b) in (0..scale).flat_map(|a| (0..scale).map(move |b| (a, b))) {
            let (along, across) = (along + a, row * scale + b);
            let pixel = match way {
                Way::Right => picture.get_pixel_mut_checked(x + along, y + across),
                Way::Up => y.checked_sub(along).and_then(|y| picture.get_pixel_mut_checked(x + across, y)),
            };
            pixel.into_iter().for_each(|p| *p = colour);
        }
    }
}

/// Pixels along a text.
pub fn length(text: &str, scale: u32) -> u32 {
    text.chars().count() as u32 * WIDTH * scale
}

/// At most `most` letters of a text.
pub fn shortened(text: &str, most: usize) -> String {
    match text.chars().count() > most {
        true => text.chars().take(most.saturating_sub(2)).chain("..".chars()).collect(),
        false => text.into(),
    }
}

fn is_ink(letter: char, column: u32, row: u32) -> bool {
    let number = if (' '..='~').contains(&letter) { letter as usize - ' ' as usize } else { 95 };
    let line = number / BESIDE * HEIGHT as usize + row as usize;
    let place = number % BESIDE * WIDTH as usize + column as usize;
    LETTERS.as_bytes()[line * BESIDE * WIDTH as usize + place] == b'#'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(picture: &RgbImage) -> Vec<String> {
        let row = |y| (0..picture.width()).map(|x| if picture.get_pixel(x, y)[0] == 0 { '#' } else { '.' }).collect();
        (0..picture.height()).map(row).collect()
    }

    #[test]
    fn the_file_has_its_shape_and_every_letter_its_own() {
        assert!(LETTERS.lines().all(|l| l.len() == 95 && l.chars().all(|c| "#. ".contains(c))) && LETTERS.lines().count() == 48);
        let shape = |c: char| -> Vec<bool> { (0..40).map(|i| is_ink(c, i % 5, i / 5)).collect() };
        let mut shapes: Vec<Vec<bool>> = (' '..='\u{7f}').map(shape).collect();
        shapes.sort();
        shapes.dedup();
        assert_eq!(shapes.len(), 96);
        assert_eq!(shape('é'), shape('\u{7f}'));
    }

    #[test]
    fn text_runs_to_the_right_and_up_and_is_cut_at_the_edge() {
        let mut picture = RgbImage::from_pixel(8, 8, Rgb([255; 3]));
        write(&mut picture, (0, 0), "Li", 1, Rgb([0; 3]), Way::Right);
        let expected = ["#.......", "#.......", "#......#", "#.......", "#.......", "#.......", "#####..#", "........"];
        assert_eq!(seen(&picture), expected);
        let mut picture = RgbImage::from_pixel(8, 8, Rgb([255; 3]));
        write(&mut picture, (0, 7), "Li", 1, Rgb([0; 3]), Way::Up);
        let expected = ["..#...#.", "........", "........", "......#.", "......#.", "......#.", "......#.", "#######."];
        assert_eq!(seen(&picture), expected);
        write(&mut picture, (7, 0), "far outside", 3, Rgb([0; 3]), Way::Up);
        assert_eq!((length("Li", 2), shortened("aardvark", 5)), (24, "aar..".into()));
    }
}
