//! One picture file.

use std::path::Path;

use image::imageops::{FilterType, crop_imm, resize};
use image::{DynamicImage, ImageDecoder, ImageReader, Limits, RgbImage};

use crate::data::DataError;
use crate::input;
use crate::report::human_bytes;
use std::sync::{Mutex, PoisonError};

/// A file has so much at most, and a picture with more of pixels is decoded while no other such one is: a photograph of 24 megapixels has 69 MiB.
const LARGEST: u64 = 64 << 20;
static ALONE: Mutex<()> = Mutex::new(());

/// Width and height, from a picture file's header; None where it has none.
pub fn dimensions(path: &Path) -> Option<(usize, usize)> {
    let file = std::io::BufReader::new(input::open(path).ok()?);
    let (width, height) = ImageReader::new(file).with_guessed_format().ok()?.into_dimensions().ok()?;
    Some((width as usize, height as usize))
}

/// The middle of a picture file as `out`, [3, size, size].
pub fn read(path: &Path, size: usize, out: &mut [u8]) -> Result<(), DataError> {
    let unreadable = |reason: String| DataError::Picture { path: path.into(), reason };
    let length = input::open(path).and_then(|file| file.metadata()).map_err(DataError::io("read", path))?.len();
    if length > LARGEST {
        return Err(unreadable(format!("the file has more than {}", human_bytes(LARGEST))));
    }
    let bytes = input::read(path).map_err(DataError::io("read", path))?;
    decode(&bytes, size, out).map_err(unreadable)
}

/// Width and height, from what a picture file begins with.
pub fn dimensions_of(bytes: &[u8]) -> Option<(usize, usize)> {
    let (width, height) = ImageReader::new(std::io::Cursor::new(bytes)).with_guessed_format().ok()?.into_dimensions().ok()?;
    Some((width as usize, height as usize))
}

/// The middle of a picture, from the bytes of its file; an error says why it is not readable.
pub fn decode(bytes: &[u8], size: usize, out: &mut [u8]) -> Result<(), String> {
    if bytes.len() as u64 > LARGEST {
        return Err(format!("it has more than {}", human_bytes(LARGEST)));
    }
    let reader = ImageReader::new(std::io::Cursor::new(bytes)).with_guessed_format().map_err(|e| e.to_string())?;
    // A camera that was held upright notes that in the file's metadata; the pixels are stored sideways.
    let decoded = reader.into_decoder().and_then(|mut decoder| {
        Limits::default().reserve(decoder.total_bytes())?;
        // Several are decoded at once, one for each thread: very large ones wait for each other.
        let large = engine::mutant!("large-pictures-are-read-all-at-once", decoder.total_bytes() > LARGEST, false);
        let _alone = large.then(|| ALONE.lock().unwrap_or_else(PoisonError::into_inner));
        let orientation = decoder.orientation()?;
        let mut picture = DynamicImage::from_decoder(decoder)?;
        picture.apply_orientation(orientation);
        Ok(picture)
    });
    let rgb: RgbImage = decoded.map_err(|e| e.to_string())?.into_rgb8();
    // The decoder makes up what a JPEG that is cut short lacks: the end's marker must follow the last scan's.
    let last = |marker: u8| bytes.windows(2).rposition(|pair| pair == [0xff, marker]);
    if bytes.starts_with(&[0xff, 0xd8]) && last(0xd9) < last(0xda) {
        return Err("it is cut short".into());
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn very_large_pictures_are_read_one_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let picture = |name: &str, side: u32| {
            let path = dir.path().join(name);
            RgbImage::from_pixel(side, side, image::Rgb([9, 8, 7])).save(&path).unwrap();
            path
        };
        // 66 MiB of pixels, and 3 MiB.
        let (large, small) = (picture("large.png", 4800), picture("small.png", 1024));
        let read = |path: &Path| {
            let mut out = vec![0; 3 * 4 * 4];
            super::read(path, 4, &mut out).map(|()| out)
        };
        let expected: Vec<u8> = [9, 8, 7].into_iter().flat_map(|v| [v; 16]).collect();
        let alone = ALONE.lock().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| read(&large));
            assert_eq!(read(&small).unwrap(), expected, "a usual one waits for nobody");
            // Alone it takes less than this.
            std::thread::sleep(Duration::from_secs(4));
            assert!(!waiting.is_finished(), "a large one waits for the other");
            drop(alone);
            assert_eq!(waiting.join().unwrap().unwrap(), expected);
        });
        let long = dir.path().join("long.png");
        std::fs::File::create(&long).unwrap().set_len(LARGEST + 1).unwrap();
        assert!(read(&long).unwrap_err().to_string().contains("the file has more than 64"));
    }
}
