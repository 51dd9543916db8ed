//! FP8 numbers: e4m3 (no infinities; one NaN a sign) and e5m2 (as IEEE's, but overflow saturates).

use crate::meta::DType;

/// Bits of mantissa, the exponent of the smallest normal number, and the largest number.
fn format(dtype: DType) -> (u32, i32, f32) {
    match dtype {
        DType::E4M3 => (3, -6, 448.0),
        DType::E5M2 => (2, -14, 57_344.0),
        other => unreachable!("{other} is not FP8"),
    }
}

/// The largest number.
pub fn largest(dtype: DType) -> f32 {
    format(dtype).2
}

/// Rounds to nearest, ties to even. What is larger than the largest number becomes that; NaN stays NaN.
pub fn encoded(v: f32, dtype: DType) -> u8 {
    let (mantissa, least, most) = format(dtype);
    let sign = ((v.to_bits() >> 24) & 0x80) as u8;
    if v.is_nan() {
        return sign | 0x7f;
    }
    let size = v.abs().min(most);
    let exponent = ((size.to_bits() >> 23) as i32 - 127).max(least);
    // In units of the last place. One that rounds up to the next power of two carries into the exponent.
    let units = (size * 2f32.powi(mantissa as i32 - exponent)).round_ties_even() as i32;
    sign | (((exponent - least) << mantissa) + units) as u8
}

/// The number that these bits stand for.
pub fn decoded(bits: u8, dtype: DType) -> f32 {
    let (mantissa, least, most) = format(dtype);
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let (code, unit) = ((bits & 0x7f) as i32, 1 << mantissa);
    let (exponent, fraction) = (code / unit, code % unit);
    let size = match exponent {
        0 => fraction as f32 * 2f32.powi(least - mantissa as i32),
        e => (unit + fraction) as f32 * 2f32.powi(least + e - 1 - mantissa as i32),
    };
    match (size > most, dtype, fraction) {
        (true, DType::E5M2, 0) => sign * f32::INFINITY,
        (true, ..) => f32::NAN,
        _ => sign * size,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: [DType; 2] = [DType::E4M3, DType::E5M2];

    #[test]
    fn every_number_is_its_own_code_and_the_nearest_of_its_neighbours() {
        for dtype in BOTH {
            let top = encoded(f32::INFINITY, dtype);
            assert_eq!(decoded(top, dtype), largest(dtype));
            for code in 0..=top {
                let v = decoded(code, dtype);
                assert_eq!((encoded(v, dtype), encoded(-v, dtype)), (code, code | 0x80), "{dtype} {v}");
                assert_eq!(decoded(code | 0x80, dtype), -v);
                if code < top {
                    let next = decoded(code + 1, dtype);
                    let middle = (v + next) / 2.0; // exact in f32
                    assert!(v < next);
                    assert_eq!(encoded(middle, dtype), code + (code & 1), "{dtype}: a tie between {v} and {next}");
                    assert_eq!(encoded(middle.next_down(), dtype), code);
                    assert_eq!(encoded(middle.next_up(), dtype), code + 1);
                }
            }
            assert!(decoded(encoded(f32::NAN, dtype), dtype).is_nan());
            assert_eq!(decoded(encoded(f32::MIN, dtype), dtype), -largest(dtype));
        }
    }

    #[test]
    fn known_codes() {
        // 1, 1.5, the smallest normal and subnormal numbers, and the largest.
        let known = [(DType::E4M3, [0x38, 0x3c, 0x08, 0x01, 0x7e]), (DType::E5M2, [0x3c, 0x3e, 0x04, 0x01, 0x7b])];
        let numbers = [[1.0, 1.5, 1.0 / 64.0, 1.0 / 512.0, 448.0], [1.0, 1.5, 1.0 / 16384.0, 1.0 / 65536.0, 57_344.0]];
        for ((dtype, codes), numbers) in known.into_iter().zip(numbers) {
            assert_eq!(codes.map(|c| decoded(c, dtype)), numbers);
        }
        assert_eq!(decoded(0x7c, DType::E5M2), f32::INFINITY);
        assert!(decoded(0x7f, DType::E4M3).is_nan() && decoded(0x7d, DType::E5M2).is_nan());
    }
}
