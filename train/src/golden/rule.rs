//! What counts as the same as a golden file.

use super::Golden;
use crate::recipe::Computed;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
pub enum Rule {
    /// As golden.py says: norm(a - b) <= tolerance * norm(b) + 1e-6 * sqrt(elements); beside that, an error of half a percent never
    /// passes for rounding.
    Tolerance(f64),
    /// For runs in narrow types.
    Narrow(Narrow),
}

/// A run in a narrow type may be off by a few percent, or by three times what its parameters' last bits change in f32: a model whose ReLUs are
/// about to switch, or whose gradients cancel, answers to rounding that strongly in any implementation.
#[derive(Clone, Debug, Default)]
pub struct Narrow {
    /// The error of each tensor in f32 where every parameter is rounded at random to one bit less than bf16 has, the largest of a few runs.
    pub spread: BTreeMap<String, f64>,
    /// What any tensor of several numbers may be off by at least, in place of the figures below.
    pub least: Option<f64>,
}

/// What a loss or a metric may be off by in a narrow type, at every step.
const NUMBER: f64 = 0.01;
/// A gradient, its norm, an output.
const TENSOR: f64 = 0.05;
/// How a parameter moved: AdamW divides by a gradient's own size, so that a gradient of next to nothing moves as far as any.
const MOVED: f64 = 0.1;
/// So many times the spread.
const SPREADS: f64 = 3.0;

impl Narrow {
    fn allowed(&self, name: &str, elements: usize) -> f64 {
        let least = match self.least {
            _ if is_series(name, elements) => NUMBER,
            Some(least) => least,
            None if name.starts_with("after/") => MOVED,
            None => TENSOR,
        };
        least.max(SPREADS * self.spread.get(name).copied().unwrap_or(0.0))
    }
}

/// Losses and metrics: numbers that are compared one by one, relative to their own size.
fn is_series(name: &str, elements: usize) -> bool {
    let number = name.starts_with("output/") && elements == 1;
    name == "loss" || number || (name.starts_with("metric/") && name != "metric/grad_norm")
}

/// One tensor's comparison: of what is trained, as the file's steps moved it, where the rule says so.
pub struct Compared {
    pub name: String,
    /// norm(ours - theirs) / norm(theirs); of losses and metrics in narrow types, the largest of one of their numbers.
    pub error: f64,
    pub cosine: f64,
    /// The error that the rule allows.
    pub allowed: f64,
    pub ok: bool,
}

impl Compared {
    /// What is not there to be compared.
    fn missing(name: &str) -> Compared {
        Compared { name: name.into(), error: f64::INFINITY, cosine: f64::NAN, allowed: 0.0, ok: false }
    }
}

/// Compares everything that the file holds and that can be computed. A tensor that was not computed fails, and so does a gradient or a
/// parameter that the file lacks.
pub fn compare(file: &Golden, computed: &Computed, rule: &Rule) -> Vec<Compared> {
    compare_with(&file.numbers(), file, computed, rule)
}

/// The same with another reference: what a run on the file's parameters and inputs computed.
pub fn compare_with(reference: &Computed, file: &Golden, computed: &Computed, rule: &Rule) -> Vec<Compared> {
    let inputs = ["param/", "input/"];
    let one = |(name, theirs): (&String, &Vec<f32>)| match computed.get(name) {
        Some(ours) if ours.len() == theirs.len() => {
            let compared = engine::mutant!("golden-files-always-pass", ours, theirs);
            // Parameters as they moved, but where rounding would be all that is seen of it.
            let by = |v: &[f32]| if matches!(rule, Rule::Narrow(_)) { moved(file, name, v) } else { wide(v) };
            one(name, &by(compared), &by(theirs), rule)
        }
        _ => Compared::missing(name),
    };
    let unknown = computed.keys().filter(|n| (n.starts_with("grad/") || n.starts_with("after/")) && !reference.contains_key(*n));
    let known = reference.iter().filter(|(name, _)| !inputs.iter().any(|p| name.starts_with(p)));
    known.map(one).chain(unknown.map(|n| Compared::missing(n))).collect()
}

fn wide(v: &[f32]) -> Vec<f64> {
    v.iter().map(|&v| v as f64).collect()
}

/// Of a parameter after the file's steps, how it moved from where the file has it; anything else as it is.
fn moved(file: &Golden, name: &str, v: &[f32]) -> Vec<f64> {
    let Some(own) = name.strip_prefix("after/") else { return wide(v) };
    let before = file.f32(&format!("param/{own}")).unwrap_or_default();
    // Without a place to have moved from, every number is none.
    v.iter().enumerate().map(|(i, &v)| before.get(i).map_or(f64::NAN, |&b| v as f64 - b as f64)).collect()
}

/// How far each tensor of a run is from that of another, each on the parameters of its own file.
pub fn errors(ours: (&Golden, &Computed), theirs: (&Golden, &Computed)) -> BTreeMap<String, f64> {
    let error = |(name, v): (&String, &Vec<f32>)| {
        let u = ours.1.get(name).filter(|u| u.len() == v.len())?;
        Some((name.clone(), Parts::new(name, &moved(ours.0, name, u), &moved(theirs.0, name, v)).narrow_error))
    };
    theirs.1.iter().filter_map(error).collect()
}

/// Lengths that are compared. A NaN anywhere makes them NaN.
struct Parts {
    difference: f64,
    length: f64,
    size: f64,
    cosine: f64,
    /// As `Compared::error` says for narrow types.
    narrow_error: f64,
}

impl Parts {
    fn new(name: &str, ours: &[f64], theirs: &[f64]) -> Parts {
        let pairs = || ours.iter().zip(theirs);
        let norm = |f: fn((&f64, &f64)) -> f64| pairs().map(f).map(|v| v * v).sum::<f64>().sqrt();
        let (difference, length, size) = (norm(|(a, b)| a - b), norm(|(a, _)| *a), norm(|(_, b)| *b));
        let cosine = pairs().map(|(a, b)| a * b).sum::<f64>() / (length * size).max(1e-300);
        let largest = theirs.iter().fold(0.0, |m: f64, b| m.max(b.abs()));
        let one = |(a, b): (&f64, &f64)| (a - b).abs() / b.abs().max(0.01 * largest).max(1e-30);
        let narrow_error = match is_series(name, theirs.len()) {
            // What is no number is the largest of all.
            true => pairs().map(one).fold(0.0, |worst, e| if e <= worst { worst } else { e }),
            false => difference / size.max(1e-30),
        };
        Parts { difference, length, size, cosine, narrow_error }
    }
}

fn one(name: &str, ours: &[f64], theirs: &[f64], rule: &Rule) -> Compared {
    let p = Parts::new(name, ours, theirs);
    let floor = 1e-6 * (theirs.len() as f64).sqrt();
    // Each is written so that a NaN fails.
    let (error, allowed, ok) = match rule {
        Rule::Tolerance(tolerance) => {
            // The absolute term is for tensors of pure rounding noise; half a percent of anything larger is a mistake.
            let gross = p.difference > tolerance.max(5e-3) * p.size && p.size > floor;
            (p.difference / p.size.max(1e-30), *tolerance, p.difference <= tolerance * p.size + floor && !gross)
        }
        Rule::Narrow(narrow) => {
            let allowed = narrow.allowed(name, theirs.len());
            let nothing = p.size <= floor && p.length <= floor && p.difference.is_finite();
            (p.narrow_error, allowed, (p.narrow_error <= allowed && p.narrow_error.is_finite()) || nothing)
        }
    };
    Compared { name: name.into(), error, cosine: p.cosine, allowed, ok }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(name: &str, ours: &[f32], theirs: &[f32]) -> bool {
        one(name, &wide(ours), &wide(theirs), &Rule::Narrow(Narrow::default())).ok
    }

    /// Numbers that point somewhere, a little elsewhere for each step.
    fn numbers(step: f32) -> Vec<f32> {
        (0..100).map(|i| (i as f32 * 0.7).sin() + step * (i as f32 * 1.3).cos()).collect()
    }

    #[test]
    fn a_loss_and_a_metric_are_right_to_one_percent_at_every_step() {
        for name in ["loss", "metric/ce", "output/loss"] {
            assert!(verdict(name, &[5.02], &[5.0]));
            assert!(!verdict(name, &[5.1], &[5.0]) && !verdict(name, &[f32::NAN], &[5.0]) && !verdict(name, &[5.0], &[f32::NAN]), "{name}");
        }
        assert!(verdict("loss", &[5.02, 4.02], &[5.0, 4.0]));
        assert!(!verdict("loss", &[5.0, 4.0, 3.0, 2.0, 1.016], &[5.0, 4.0, 3.0, 2.0, 1.0]), "the last is 1.6% off");
        assert!(!verdict("loss", &[5.0, f32::NAN], &[5.0, f32::NAN]));
    }

    #[test]
    fn a_gradient_has_its_direction_and_its_length() {
        let gradient = numbers(0.0);
        let times = |by: f32| gradient.iter().map(|g| g * by).collect::<Vec<f32>>();
        let one_flipped: Vec<f32> = gradient.iter().enumerate().map(|(i, g)| if i % 4 == 0 { -g } else { *g }).collect();
        assert!(verdict("grad/w", &gradient, &gradient) && verdict("grad/w", &numbers(0.02), &gradient));
        for wrong in [times(1.06), times(0.94), times(-1.0), times(0.0), one_flipped, numbers(0.1), vec![f32::NAN; 100]] {
            assert!(!verdict("grad/w", &wrong, &gradient));
            assert!(!verdict("output/hidden", &wrong, &gradient));
        }
        assert!(!verdict("grad/one", &[-1e-3], &[1e-3]), "of one number the sign is all");
        assert!(!verdict("grad/w", &gradient, &[f32::INFINITY; 100]));
        // What is not to move must not.
        assert!(verdict("after/w", &[0.0; 100], &[0.0; 100]) && !verdict("after/w", &gradient, &[0.0; 100]));
    }

    #[test]
    fn what_rounding_itself_changes_is_allowed_three_times() {
        let verdict = |ours: &[f32], spread: f64| {
            let rule = Rule::Narrow(Narrow { spread: [("grad/w".to_string(), spread)].into(), least: None });
            one("grad/w", &wide(ours), &wide(&numbers(0.0)), &rule).ok
        };
        assert!(!verdict(&numbers(0.15), 0.04) && verdict(&numbers(0.15), 0.06) && !verdict(&numbers(0.3), 0.06));
        assert!(!verdict(&[f32::NAN; 100], f64::INFINITY) && !verdict(&numbers(0.15), f64::NAN));
    }
}
