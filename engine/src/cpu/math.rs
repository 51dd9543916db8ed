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

/// The error function, to a few units in the last place: an odd rational function on [-4, 4], where f32 reaches 1.
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    const ABOVE: [f32; 7] =
        [-2.726_142_3e-10, 2.770_681_4e-8, -2.101_024e-6, -5.692_506_5e-5, -7.349_906_3e-4, -2.954_6e-3, -1.609_603_3e-2];
    const BELOW: [f32; 5] = [-1.456_607_2e-5, -2.133_740_6e-4, -1.682_827e-3, -7.373_329_2e-3, -1.426_473_9e-2];
    let bounded = if x > 4.0 { 4.0 } else { x };
    let bounded = if bounded < -4.0 { -4.0 } else { bounded };
    let s = bounded * bounded;
    let (mut above, mut below) = (ABOVE[0], BELOW[0]);
    for c in &ABOVE[1..] {
        above = above * s + c;
    }
    for c in &BELOW[1..] {
        below = below * s + c;
    }
    bounded * above / below
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

    /// Against the integral of its derivative, in f64 by Simpson's rule.
    #[test]
    fn erf_is_the_integral_of_the_bell() {
        const STEP: f64 = 1e-3;
        let bell = |t: f64| 2.0 / std::f64::consts::PI.sqrt() * (-t * t).exp();
        let mut exact = 0.0;
        for i in 0..6000 {
            let t = i as f64 * STEP;
            let error = [1.0, -1.0].map(|sign| (erf((sign * t) as f32) as f64 - sign * exact).abs());
            assert!(error.iter().all(|e| *e < 4e-7), "erf({t}) is {exact}: off by {error:?}");
            if i > 0 && t < 1.0 {
                assert!(error[0] < 5e-7 * exact, "erf({t}) is {exact}: off by {error:?}");
            }
            exact += STEP / 6.0 * (bell(t) + 4.0 * bell(t + STEP / 2.0) + bell(t + STEP));
        }
        assert!(erf(f32::NAN).is_nan() && erf(0.0) == 0.0);
        assert!((erf(f32::INFINITY) - 1.0).abs() < 2e-7 && (erf(-50.0) + 1.0).abs() < 2e-7);
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
