//! What counts as the same as a golden file.

use super::Golden;
use crate::recipe::Computed;

#[derive(Clone, Copy, Debug)]
pub enum Rule {
    /// As golden.py says: norm(a - b) <= tolerance * norm(b) + 1e-6 * sqrt(elements); beside that, an error of half a percent never
    /// passes for rounding.
    Tolerance(f64),
    /// For narrow types: losses to within 1%; every other tensor points in the same direction, to at least this cosine, and is as long to
    /// within 10%. Of what is trained that is asked of how it moved: its place says nothing about a step. A single number, often the small
    /// sum of large terms, to within half; a gradient of one number also where its error is nothing beside all gradients.
    Cosine(f64),
}

/// What a loss may be off by in a narrow type.
const LOSS: f64 = 0.01;
/// What a tensor's length may.
const LENGTH: f64 = 0.1;
/// And a single number.
const NUMBER: f64 = 0.5;
/// Or the gradient by a single number, of the norm of all gradients.
const NOISE: f64 = 1e-4;
/// Of one minus the cosine that is asked of a gradient, a move may have so many times as much: AdamW divides what it adds by its own size,
/// so that a gradient of next to nothing, whose sign is rounding, moves its parameter as far as any.
const MOVED: f64 = 5.0;

/// One tensor's comparison: of what is trained, as the file's steps moved it, where the rule says so.
pub struct Compared {
    pub name: String,
    /// norm(ours - theirs) / norm(theirs)
    pub error: f64,
    pub cosine: f64,
    pub ok: bool,
}

impl Compared {
    /// The error, of what the rule allows; no more than all of it where that is by another road.
    pub fn share(&self, rule: Rule) -> f64 {
        let share = match rule {
            Rule::Tolerance(t) => self.error / t,
            Rule::Cosine(_) if self.name == "loss" => self.error / LOSS,
            Rule::Cosine(least) => (1.0 - self.cosine) / (1.0 - least) / if self.name.starts_with("after/") { MOVED } else { 1.0 },
        };
        if self.ok { share.min(1.0) } else { share }
    }
}

/// Compares everything that the file holds and that can be computed. A tensor that was not computed fails.
pub fn compare(file: &Golden, computed: &Computed, rule: Rule) -> Vec<Compared> {
    let reference = file.names().into_iter().map(|n| (n.clone(), file.f32(&n).unwrap_or_default())).collect();
    compare_with(&reference, file, computed, rule)
}

/// The same with another reference: what a run on the file's parameters and inputs computed.
pub fn compare_with(reference: &Computed, file: &Golden, computed: &Computed, rule: Rule) -> Vec<Compared> {
    let inputs = ["param/", "input/"];
    let gradients = reference.iter().filter(|(name, _)| name.starts_with("grad/")).flat_map(|(_, v)| v);
    let gradients = gradients.map(|&g| (g as f64).powi(2)).sum::<f64>().sqrt();
    let one = |(name, theirs): (&String, &Vec<f32>)| match computed.get(name) {
        Some(ours) if ours.len() == theirs.len() => {
            let before = name.strip_prefix("after/").map(|own| file.f32(&format!("param/{own}")).unwrap_or_default());
            one(name.clone(), engine::mutant!("golden-files-always-pass", ours, theirs), theirs, before, gradients, rule)
        }
        _ => Compared { name: name.clone(), error: f64::INFINITY, cosine: f64::NAN, ok: false },
    };
    reference.iter().filter(|(name, _)| !inputs.iter().any(|p| name.starts_with(p))).map(one).collect()
}

/// `gradients` is the norm of all of them.
fn one(name: String, ours: &[f32], theirs: &[f32], before: Option<Vec<f32>>, gradients: f64, rule: Rule) -> Compared {
    let moved = before.filter(|_| matches!(rule, Rule::Cosine(_)));
    // Without a place to have moved from, every number is none.
    let from = |i: usize| moved.as_ref().map_or(0.0, |b| b.get(i).map_or(f64::NAN, |&v| v as f64));
    let pairs = || ours.iter().zip(theirs).enumerate().map(|(i, (&a, &b))| (a as f64 - from(i), b as f64 - from(i)));
    let norm = |f: fn((f64, f64)) -> f64| pairs().map(f).map(|v| v * v).sum::<f64>().sqrt();
    let (difference, length, size) = (norm(|(a, b)| a - b), norm(|(a, _)| a), norm(|(_, b)| b));
    let cosine = pairs().map(|(a, b)| a * b).sum::<f64>() / (length * size).max(1e-300);
    let floor = 1e-6 * (theirs.len() as f64).sqrt();
    // Each is written so that a NaN fails.
    let ok = match rule {
        Rule::Tolerance(tolerance) => {
            // The absolute term is for tensors of pure rounding noise; half a percent of anything larger is a mistake.
            let gross = difference > tolerance.max(5e-3) * size && size > floor;
            difference <= tolerance * size + floor && !gross
        }
        // The first step's alone, too: later ones are of parameters that have moved a little otherwise.
        Rule::Cosine(_) if name == "loss" => difference <= LOSS * size && pairs().take(1).all(|(a, b)| (a - b).abs() <= LOSS * b.abs()),
        Rule::Cosine(least) => {
            let least = if moved.is_some() { 1.0 - MOVED * (1.0 - least) } else { least };
            let as_long = (length / size - 1.0).abs() <= if theirs.len() > 1 { LENGTH } else { NUMBER };
            let noise = theirs.len() == 1 && name.starts_with("grad/") && difference <= NOISE * gradients;
            (cosine >= least && as_long) || noise || (size <= floor && length <= floor && difference.is_finite())
        }
    };
    Compared { name, error: difference / size.max(1e-30), cosine, ok }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(name: &str, before: &[f32], ours: &[f32], theirs: &[f32]) -> bool {
        one(name.into(), ours, theirs, Some(before.to_vec()).filter(|_| name.starts_with("after/")), 1.0, Rule::Cosine(0.99)).ok
    }

    /// Numbers that are large beside what one step changes.
    fn parameters(step: f32) -> Vec<f32> {
        (0..100).map(|i| (i as f32 * 0.7).sin() + step * (i as f32 * 1.3).cos()).collect()
    }

    #[test]
    fn what_never_moved_fails_and_what_moved_a_little_otherwise_passes() {
        let (before, after) = (parameters(0.0), parameters(1e-3));
        assert!(verdict("after/w", &before, &after, &after));
        assert!(verdict("after/w", &before, &parameters(1.05e-3), &after));
        assert!(!verdict("after/w", &before, &before, &after), "it never moved");
        assert!(!verdict("after/w", &before, &parameters(-1e-3), &after), "it moved back");
        assert!(!verdict("after/w", &before, &parameters(0.5e-3), &after), "it moved half as far");
        assert!(!verdict("after/w", &[], &after, &after), "nobody knows from where");
        // What is not to move must not.
        assert!(verdict("after/w", &before, &before, &before) && !verdict("after/w", &before, &after, &before));
    }

    #[test]
    fn a_loss_is_right_to_one_percent_and_a_gradient_has_its_sign() {
        assert!(verdict("loss", &[], &[5.02, 4.02], &[5.0, 4.0]));
        assert!(!verdict("loss", &[], &[5.1, 4.0, 3.0, 2.0, 1.0], &[5.0, 4.0, 3.0, 2.0, 1.0]), "the first is 2% off");
        assert!(!verdict("loss", &[], &[5.0, 4.08], &[5.0, 4.0]), "the second is");
        assert!(!verdict("loss", &[], &[5.0, f32::NAN], &[5.0, 4.0]));
        assert!(!verdict("loss", &[], &[5.0, f32::NAN], &[5.0, f32::NAN]));
        let gradient = parameters(0.0);
        let flipped: Vec<f32> = gradient.iter().map(|g| -g).collect();
        let one_flipped: Vec<f32> = gradient.iter().enumerate().map(|(i, g)| if i % 4 == 0 { -g } else { *g }).collect();
        assert!(verdict("grad/w", &[], &gradient, &gradient));
        assert!(!verdict("grad/w", &[], &flipped, &gradient) && !verdict("grad/w", &[], &one_flipped, &gradient));
        assert!(!verdict("grad/w", &[], &[0.0; 100], &gradient) && !verdict("grad/w", &[], &[f32::NAN; 100], &gradient));
        assert!(!verdict("grad/one", &[], &[-1e-3], &[1e-3]), "of one number the sign is all");
        assert!(verdict("grad/one", &[], &[-4e-5], &[4e-5]), "unless it is nothing beside all others");
        assert!(!verdict("grad/one", &[], &[f32::NAN], &[4e-5]) && !verdict("grad/one", &[], &[4e-5], &[f32::NAN]));
        assert!(!verdict("grad/w", &[], &gradient, &[f32::INFINITY; 100]));
    }
}
