//! One picture file.

use std::path::Path;

use image::imageops::{FilterType, crop_imm, resize};
use image::{DynamicImage, ImageDecoder, ImageReader, Limits, RgbImage};

use crate::data::DataError;
use crate::input;

/// Width and height, from a picture file's header; None where it has none.
pub fn dimensions(path: &Path) -> Option<(usize, usize)> {
    let file = std::io::BufReader::new(input::open(path).ok()?);
    let (width, height) = ImageReader::new(file).with_guessed_format().ok()?.into_dimensions().ok()?;
    Some((width as usize, height as usize))
}

/// The middle of a picture file as `out`, [3, size, size].
pub fn read(path: &Path, size: usize, out: &mut [u8]) -> Result<(), DataError> {
    let bytes = input::read(path).map_err(DataError::io("read", path))?;
    let unreadable = |reason: String| DataError::Picture { path: path.into(), reason };
    let reader = ImageReader::new(std::io::Cursor::new(&bytes)).with_guessed_format().map_err(DataError::io("read", path))?;
    // A camera that was held upright notes that in the file's metadata; the pixels are stored sideways.
    let decoded = reader.into_decoder().and_then(|mut decoder| {
        Limits::default().reserve(decoder.total_bytes())?;
        let orientation = decoder.orientation()?;
        let mut picture = DynamicImage::from_decoder(decoder)?;
        picture.apply_orientation(orientation);
        Ok(picture)
    });
    let rgb: RgbImage = decoded.map_err(|e| unreadable(e.to_string()))?.into_rgb8();
    // The decoder makes up what a JPEG that is cut short lacks: the end's marker must follow the last scan's.
    let last = |marker: u8| bytes.windows(2).rposition(|pair| pair == [0xff, marker]);
    if bytes.starts_with(&[0xff, 0xd8]) && last(0xd9) < last(0xda) {
        return Err(unreadable("it is cut short".into()));
    }
    let (width, height) = rgb.dimensions();
    let side = width.min(height);
    let middle = crop_imm(&rgb, (width - side) / 2, (height - side) / 2, side, side);
    let small = resize(&*middle, size as u32, size as u32, FilterType::Triangle);
    for (p, pixel) in small.pixels().enumerate() {
        for (channel, value) in pixel.0.into_iter().enumerate() {
            out[channel * size * size + p] = value;
        }
    }
    Ok(())
}
