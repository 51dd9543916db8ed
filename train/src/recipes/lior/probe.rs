//! What the geometry is worth, in words that need no geometry: whether the entry of the memory that is nearest to a held-out window was followed by
//! the same token, beside the geometry that every run begins with, and beside any entry.

use super::LiorConfig;
use super::ops::retrieve::{rotate, turns};
use crate::recipe::{Session, TrainError};

/// The memory in one geometry. Rotating it and what is looked for leaves the metric alone to measure with.
struct Frame {
    metric: Vec<f32>,
    turns: Vec<(f32, f32)>,
    /// [filled, n]
    places: Vec<f32>,
}

impl Frame {
    fn new(metric: Vec<f32>, angles: &[f32], memory: &[f32]) -> Frame {
        let (turns, mut places) = (turns(angles), memory.to_vec());
        places.chunks_mut(metric.len()).for_each(|place| rotate(place, &turns));
        Frame { metric, turns, places }
    }

    /// Of equally near ones the first.
    fn nearest(&self, query: &[f32]) -> usize {
        let mut query = query.to_vec();
        rotate(&mut query, &self.turns);
        let away = |place: &[f32]| place.iter().zip(&query).zip(&self.metric).map(|((p, q), g)| g * (p - q).powi(2)).sum::<f32>();
        let all = self.places.chunks(query.len()).map(away).enumerate();
        all.fold((0, f32::INFINITY), |best, one| if one.1 < best.1 { one } else { best }).0
    }
}

pub struct Probe {
    /// Learned, and as it was before.
    frames: [Frame; 2],
    /// The token that followed each entry's window.
    next: Vec<f32>,
    n: usize,
}

impl Probe {
    /// None as long as the memory is empty, and where a rank has but a part of it.
    pub fn new(s: &Session, c: &LiorConfig) -> Result<Option<Probe>, TrainError> {
        let state = |name: &str| s.store.get(name).ok_or_else(|| TrainError::Other(format!("there is no '{name}'")));
        let filled = state("filled")?.f32()?[0].max(0.0) as usize;
        let filled = filled.min(c.memory);
        let is_whole = |name: &&str| s.store.get(name).is_none_or(|t| t.parts.is_empty());
        if filled == 0 || !["memory_coord", "memory_next", "g", "theta"].iter().all(is_whole) {
            return Ok(None);
        }
        let (mut memory, mut next) = (state("memory_coord")?.f32()?, state("memory_next")?.f32()?);
        memory.truncate(filled * c.n);
        next.truncate(filled);
        let learned = Frame::new(state("g")?.f32()?, &state("theta")?.f32()?, &memory);
        let initial = Frame::new(vec![1.0; c.n], &vec![0.0; c.planes()], &memory);
        Ok(Some(Probe { frames: [learned, initial], next, n: c.n }))
    }

    /// What of these windows [any, n] and the tokens that follow them is found: in the learned geometry, in the initial one, and by chance.
    pub fn found(&self, queries: &[f32], follows: impl Iterator<Item = i32>) -> [f64; 3] {
        let mut sums = [0.0; 3];
        for (query, token) in queries.chunks(self.n).zip(follows) {
            let is_right = |entry: usize| self.next[entry] == token as f32;
            let [learned, initial] = [0, 1].map(|i| is_right(self.frames[i].nearest(query)) as u8 as f64);
            let chance = (0..self.next.len()).filter(|&entry| is_right(entry)).count() as f64 / self.next.len() as f64;
            sums.iter_mut().zip([learned, initial, chance]).for_each(|(sum, v)| *sum += v);
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two coordinates, and an entry in the direction of each: which is the nearer one is for the metric and the angle to say.
    #[test]
    fn metric_and_rotor_say_what_is_near() {
        let memory = [1.0, 0.0, 0.0, 1.2];
        let found = |metric: [f32; 2], angle: f32, tokens: &[i32]| {
            let frames = [Frame::new(metric.to_vec(), &[angle], &memory), Frame::new(vec![1.0; 2], &[0.0], &memory)];
            let queries = vec![0.0; 2 * tokens.len()];
            Probe { frames, next: vec![7.0, 8.0], n: 2 }.found(&queries, tokens.iter().copied())
        };
        assert_eq!(found([1.0, 1.0], 0.0, &[7, 8]), [1.0, 1.0, 1.0], "the first is the nearer one of both windows");
        assert_eq!(found([1.0, 1.0], 0.3, &[7]), [1.0, 1.0, 0.5], "a rotation alone changes no distance");
        assert_eq!(found([4.0, 1.0], 0.0, &[8]), [1.0, 0.0, 0.5], "the first is the dearer way");
        assert_eq!(found([4.0, 1.0], std::f32::consts::FRAC_PI_2, &[8]), [0.0, 0.0, 0.5], "turned by a right angle it is the cheaper one");
        assert_eq!(found([1.0, 1.0], 0.0, &[9]), [0.0, 0.0, 0.0]);
    }
}
