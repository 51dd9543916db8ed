//! Transcendental functions that compile to vector code, accurate to a few units in the last place.

/// e^x. NaN stays NaN; results below the normal range are 0.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let bounded = if x > 88.8 { 88.8 } else { x };
    let bounded = if bounded < -87.4 { -87.4 } else { bounded };
    let t = bounded * std::f32::consts::LOG2_E + ROUND;
    let n = t - ROUND;
    let r = bounded - n * LN2_HIGH - n * LN2_LOW;
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r * r + r + 1.0;
    // 2^n in two halves, so that n = 128 does not overflow before the product does.
    let n = t.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let pow = |k: i32| f32::from_bits(((k + 127) << 23) as u32);
    let y = p * pow(half) * pow(n - half);
    if x < -87.336_54 { 0.0 } else { y }
}

/// 1 / (1 + e^-x), with the `exp` of this module.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The hyperbolic tangent, with the `exp` of this module.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let far = 1.0 - 2.0 / (exp(2.0 * x) + 1.0);
    // Near 0 the difference above cancels; the series does not.
    let s = x * x;
    let near = x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0)))));
    if x.abs() < 0.3 { near } else { far }
}

/// Sum of a slice in sixteen lanes: a fixed order, whatever the machine.
#[inline(always)]
pub fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    let chunks = x.chunks_exact(16);
    let rest = chunks.remainder();
    for c in chunks {
        for i in 0..16 {
            lanes[i] += f(c[i]);
        }
    }
    for (i, &v) in rest.iter().enumerate() {
        lanes[i] += f(v);
    }
    fold(lanes)
}

/// The dot product, in a fixed order of additions.
#[inline(always)]
pub fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let n = x.len() / 16 * 16;
    for (a, b) in x[..n].chunks_exact(16).zip(y[..n].chunks_exact(16)) {
        for i in 0..16 {
            lanes[i] += a[i] * b[i];
        }
    }
    for (i, (a, b)) in x[n..].iter().zip(&y[n..]).enumerate() {
        lanes[i] += a * b;
    }
    fold(lanes)
}

/// The largest number; NaN if there is one.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let chunks = x.chunks_exact(16);
    let rest = chunks.remainder();
    // A NaN must win, or a softmax of NaNs would look valid.
    let pick = |a: f32, b: f32| if b > a || b.is_nan() { b } else { a };
    for c in chunks {
        for i in 0..16 {
            lanes[i] = pick(lanes[i], c[i]);
        }
    }
    for (i, &v) in rest.iter().enumerate() {
        lanes[i] = pick(lanes[i], v);
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, pick)
}

#[inline(always)]
fn fold(mut lanes: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_to_the_library() {
        for i in -200_000..200_000 {
            let x = i as f32 * 4.4e-4;
            let exact = (x as f64).exp();
            let error = (exp(x) as f64 - exact).abs() / exact;
            assert!(error < 2.5e-7 || exact < 1.2e-38, "exp({x}): {error:e}");
            let x = x * 0.1;
            let error = (tanh(x) as f64 - (x as f64).tanh()).abs() / (x as f64).tanh().abs().max(1e-30);
            assert!(error < 6e-7 || x == 0.0, "tanh({x}): {error:e}");
        }
    }

    #[test]
    fn edges() {
        assert!(exp(f32::NAN).is_nan() && tanh(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan());
        assert_eq!((exp(0.0), exp(1000.0), exp(-1000.0)), (1.0, f32::INFINITY, 0.0));
        assert_eq!((exp(f32::NEG_INFINITY), exp(f32::INFINITY)), (0.0, f32::INFINITY));
        assert_eq!((tanh(50.0), tanh(-50.0), sigmoid(-200.0)), (1.0, -1.0, 0.0));
        assert!(max(&[1.0, f32::NAN, 2.0]).is_nan());
        let x: Vec<f32> = (0..37).map(|i| i as f32).collect();
        assert_eq!((sum(&x, |v| v), dot(&x, &x), max(&x)), (666.0, 16206.0, 36.0));
    }
}
