//! Tolerances: when numbers count as equal. The same code judges results of GPU and CPU, and is itself tested with planted errors.

use crate::meta::DType;

/// norm(a - b) / norm(b), with a floor for values that are only rounding errors. Infinite if the lengths differ or a number is not finite.
pub fn relative(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() || a.iter().chain(b).any(|v| !v.is_finite()) {
        return f64::INFINITY;
    }
    let square = |it: &mut dyn Iterator<Item = f64>| it.map(|v| v * v).sum::<f64>().sqrt();
    let difference = square(&mut a.iter().zip(b).map(|(&x, &y)| x as f64 - y as f64));
    difference / square(&mut b.iter().map(|&y| y as f64)).max(1e-6 * (b.len() as f64).sqrt())
}

/// The largest error of an element, relative to itself or to the root mean square of all, whichever is larger: a norm would hide one wrong
/// element among many.
fn worst_element(a: &[f32], b: &[f32]) -> f64 {
    let mean = b.iter().map(|&y| (y as f64).powi(2)).sum::<f64>() / b.len().max(1) as f64;
    let floor = mean.sqrt().max(1e-6);
    let off = |(&x, &y): (&f32, &f32)| (x as f64 - y as f64).abs() / (y as f64).abs().max(floor);
    a.iter().zip(b).map(off).fold(0.0, |worst, e| if e <= worst { worst } else { e })
}

/// By how many roundings a result in a narrow type may differ: its own, and the effect of those of the inputs and of adjacent ops.
pub const ROUNDINGS: f64 = 3.0;

/// A single element of a narrow result may differ by so many times the tolerance of the norm: of ten thousand normally distributed errors, the
/// worst is about four standard deviations.
const ELEMENT: f64 = 10.0;

/// The tolerance for a result.
#[derive(Clone, Copy, Debug)]
pub struct Allowed {
    /// The type that results are rounded to.
    pub dtype: DType,
    /// The number of roundings allowed, for narrow types.
    pub roundings: f64,
    /// Terms of the longest sum.
    pub length: usize,
    /// The tolerance is at least this.
    pub least: f64,
}

impl Allowed {
    /// For results of this type that are sums of `length` terms.
    pub fn new(dtype: DType, length: usize) -> Allowed {
        Allowed { dtype, roundings: ROUNDINGS, length, least: 0.0 }
    }

    /// The tolerance of the relative error of the norm. Ops accumulate in f32 and round once: some roundings of the type, plus eight times the
    /// random walk of f32 roundings in a sum.
    pub fn relative(&self) -> f64 {
        let sum = 8.0 * DType::F32.rounding() as f64 * (self.length as f64).sqrt();
        let rounded = if self.dtype == DType::F32 { 0.0 } else { self.roundings * self.dtype.rounding() as f64 };
        (sum + rounded).max(self.least)
    }

    /// The error as a fraction of the tolerance; or what is wrong.
    pub fn judge(&self, name: &str, ours: &[f32], reference: &[f32]) -> Result<f64, String> {
        if let Some(v) = reference.iter().find(|v| !v.is_finite()) {
            return Err(format!("{name}: the reference has {v}, to which nothing can be compared"));
        }
        let (error, allowed) = (relative(ours, reference), self.relative());
        // Written so that NaN fails.
        let near = crate::mutant!("checks-always-pass", error <= allowed, true);
        if !near {
            return Err(format!("{name}: off by {error:.2e}, {allowed:.2e} is allowed"));
        }
        let element = if self.dtype == DType::F32 { 0.0 } else { worst_element(ours, reference) };
        let near = element <= ELEMENT * allowed;
        if !near {
            return Err(format!("{name}: an element is off by {element:.2e}, {:.2e} is allowed", ELEMENT * allowed));
        }
        Ok(error / allowed)
    }

    /// The worst of several results.
    pub fn judge_all(&self, names: &[String], ours: &[Vec<f32>], reference: &[Vec<f32>]) -> Result<f64, String> {
        if ours.len() != names.len() || reference.len() != names.len() {
            return Err(format!("{} results and {} to compare them with, for {} names", ours.len(), reference.len(), names.len()));
        }
        let mut each = names.iter().zip(ours).zip(reference).map(|((name, a), b)| self.judge(name, a, b));
        each.try_fold(0.0, |worst: f64, share| Ok(worst.max(share?)))
    }
}

/// The relative tolerance for a result whose longest sum has `length` terms.
pub fn tolerance(dtype: DType, length: usize) -> f64 {
    Allowed::new(dtype, length).relative()
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    fn reference() -> Vec<f32> {
        super::super::normals(3, 4000)
    }

    fn verdict(change: impl Fn(usize, f32) -> f32) -> Result<f64, String> {
        let b = reference();
        let a: Vec<f32> = b.iter().enumerate().map(|(i, &v)| change(i, v)).collect();
        Allowed::new(DType::BF16, 4096).judge("y", &a, &b)
    }

    #[test]
    fn a_rounding_passes_and_zeros_five_percent_and_no_numbers_fail() {
        let share = verdict(|_, v| bf16::from_f32(v).to_f32()).unwrap();
        assert!((0.05..0.3).contains(&share), "{share}");
        for (name, wrong) in [
            ("zeros", verdict(|_, _| 0.0)),
            ("5% off", verdict(|_, v| 1.05 * v)),
            ("no number", verdict(|i, v| if i == 17 { f32::NAN } else { v })),
            ("infinity", verdict(|i, v| if i == 17 { f32::INFINITY } else { v })),
            ("one element", verdict(|i, v| if i == 17 { v + 0.5 } else { v })),
        ] {
            assert!(wrong.is_err(), "{name} passes: {wrong:?}");
        }
        let allowed = Allowed::new(DType::BF16, 16);
        assert!(allowed.judge("y", &[1.0, 2.0], &[1.0]).is_err(), "other elements");
        // A reference that is no number fails, whatever it is compared with.
        for broken in [f32::NAN, f32::INFINITY] {
            for ours in [1.0, broken] {
                let problem = allowed.judge("y", &[2.0, ours], &[2.0, broken]).unwrap_err();
                assert!(problem.contains("the reference has"), "{problem}");
            }
        }
        let names = ["a".to_string(), "b".to_string()];
        let results = |v: f32| vec![vec![1.0, 2.0], vec![v, 2.0]];
        assert!(allowed.judge_all(&names, &results(f32::NAN), &results(1.0)).unwrap_err().starts_with("b: "));
        assert!(allowed.judge_all(&names, &results(1.0)[..1], &results(1.0)).is_err());
        assert_eq!(allowed.judge_all(&names, &results(1.0), &results(1.0)), Ok(0.0));
    }

    #[test]
    fn no_sum_is_so_long_that_a_few_percent_pass() {
        for length in [1, 70, 4096, 1 << 20] {
            assert!(
                tolerance(DType::BF16, length) < 0.0125 && tolerance(DType::F16, length) < 0.002 && tolerance(DType::F32, length) < 1e-3
            );
        }
    }
}
