//! Weights that are not finite: looked for wherever weights are read or written. One of them makes every number that a model computes NaN.
//!
//! It costs little beside reading: of 1 GiB 0.28 s (bf16) to 0.36 s (f32) on one of two busy cores, where reading the file from the system's cache took 2.0 s.

/// Bytes that are looked at together; only where something is found is it looked at number by number.
const AT_ONCE: usize = 1 << 16;

/// The first of these numbers that is not finite: its place and its value. `dtype` is safetensors' name; types that are not known here are not looked at.
pub fn first_broken(bytes: &[u8], dtype: &str) -> Option<(usize, f64)> {
    match dtype {
        "F32" => {
            let broken = |b| {
                engine::mutant!("infinity-is-finite", u32::from_le_bytes(b) & 0x7f80_0000 == 0x7f80_0000, f32::from_le_bytes(b).is_nan())
            };
            first(bytes, broken, |b| f32::from_le_bytes(b).into())
        }
        "BF16" => first(bytes, |b: [u8; 2]| u16::from_le_bytes(b) & 0x7f80 == 0x7f80, |b| half::bf16::from_le_bytes(b).into()),
        "F16" => first(bytes, |b: [u8; 2]| u16::from_le_bytes(b) & 0x7c00 == 0x7c00, |b| half::f16::from_le_bytes(b).into()),
        _ => None,
    }
}

/// `broken`: whether all bits of the exponent are set. Without a way out of the inner loop it is done for several numbers at a time.
fn first<const N: usize>(bytes: &[u8], broken: impl Fn([u8; N]) -> bool, value: impl Fn([u8; N]) -> f64) -> Option<(usize, f64)> {
    let found = |part: &&[u8]| part.as_chunks::<N>().0.iter().fold(false, |any, b| any | broken(*b));
    let (before, part) = bytes.chunks(AT_ONCE).enumerate().find(|(_, part)| found(part))?;
    let all = part.as_chunks::<N>().0;
    let at = all.iter().position(|b| broken(*b))?;
    Some((before * (AT_ONCE / N) + at, value(all[at])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_number_that_is_not_finite_is_found_wherever_it_is() {
        for at in [0, 1, 16_383, 16_384, 40_000, 99_999] {
            for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut numbers = vec![1.5f32; 100_000];
                // What is largest, smallest, and nothing at all is finite.
                numbers[..4].copy_from_slice(&[f32::MAX, f32::MIN, -0.0, 1e-45]);
                assert_eq!(first_broken(bytemuck::cast_slice(&numbers), "F32"), None);
                numbers[at] = broken;
                numbers[99_999] = if at < 99_999 { -broken } else { broken };
                let (place, value) = first_broken(bytemuck::cast_slice(&numbers), "F32").unwrap();
                assert!(place == at && (value == broken as f64 || value.is_nan() && broken.is_nan()), "{at}: {place} {value}");
            }
        }
    }

    #[test]
    fn every_type_of_weights_is_looked_at() {
        let bf16: Vec<u8> = [1.0, f32::MAX, f32::NEG_INFINITY].iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
        // The largest number of bf16 rounds up to infinity; the largest of f16 is 65504.
        assert_eq!(first_broken(&bf16, "BF16"), Some((1, f64::INFINITY)));
        assert_eq!(first_broken(&[0x7f, 0x7f, 0x80, 0xff], "BF16"), Some((1, f64::NEG_INFINITY)));
        let f16: Vec<u8> = [65504.0, -65504.0, f32::NAN].iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
        assert!(first_broken(&f16, "F16").is_some_and(|(at, value)| at == 2 && value.is_nan()));
        assert_eq!(first_broken(&f16[..4], "F16"), None);
        assert_eq!((first_broken(&[0xff; 8], "I32"), first_broken(&[0xff; 8], "U8")), (None, None));
        assert_eq!(first_broken(&[], "F32"), None);
    }
}
