//! Assigns arena offsets: best fit, largest buffer first.

use super::{ALIGN, Buffer, Home};

/// Gives every arena buffer an offset, the largest buffer first: in the smallest gap that holds it between buffers alive at the same time, the
/// lowest such gap. Returns the bytes needed.
pub fn assign(buffers: &mut [Buffer]) -> usize {
    let mut order: Vec<usize> = (0..buffers.len()).filter(|&b| matches!(buffers[b].home, Home::Arena(_))).collect();
    order.sort_by_key(|&b| (std::cmp::Reverse(buffers[b].bytes), buffers[b].first));
    let mut taken = Taken::new(order.iter().map(|&b| buffers[b].last + 1).max().unwrap_or(0));
    let mut total = 0;
    for b in order {
        let size = buffers[b].bytes.next_multiple_of(ALIGN);
        let (mut best, mut at) = (None, 0);
        for (start, stop) in taken.during(buffers[b].first, buffers[b].last) {
            let gap = start.saturating_sub(at);
            if gap >= size && best.is_none_or(|(g, _)| gap < g) {
                best = Some((gap, at));
            }
            at = at.max(stop);
        }
        let offset = best.map_or(at, |(_, o)| o);
        buffers[b].home = Home::Arena(offset);
        total = total.max(offset + size);
        taken.add(buffers[b].first, buffers[b].last, (offset, offset + size));
    }
    total
}

type Bytes = (usize, usize);

/// Which bytes of the arena are taken at which positions of the program: a segment tree over the positions. Adjacent buffers are merged into
/// one range, so that placing a buffer takes logarithmic rather than linear time; searching all buffers would take time quadratic in the
/// model's depth.
struct Taken {
    positions: usize,
    /// By tree node (the children of n are 2n and 2n + 1): bytes of buffers alive at all of its positions.
    throughout: Vec<Ranges>,
    /// The same for buffers alive at one of its positions at least.
    ever: Vec<Ranges>,
}

impl Taken {
    fn new(positions: usize) -> Taken {
        let positions = positions.next_power_of_two();
        let nodes = vec![Ranges::default(); 2 * positions];
        Taken { positions, throughout: nodes.clone(), ever: nodes }
    }

    fn add(&mut self, first: usize, last: usize, bytes: Bytes) {
        self.visit(first, last, |taken, node, inside| {
            taken.ever[node].add(bytes);
            if inside {
                taken.throughout[node].add(bytes);
            }
        });
    }

    /// The bytes taken at any of these positions, sorted.
    fn during(&mut self, first: usize, last: usize) -> Vec<Bytes> {
        let mut all = vec![];
        self.visit(first, last, |taken, node, inside| {
            all.extend_from_slice(if inside { &taken.ever[node].0 } else { &taken.throughout[node].0 });
        });
        all.sort_unstable();
        all
    }

    /// Visits the tree nodes that overlap these positions, down to the largest ones inside; `f` gets each, and whether it is inside.
    fn visit(&mut self, first: usize, last: usize, mut f: impl FnMut(&mut Taken, usize, bool)) {
        let mut left = vec![(1, 0, self.positions)];
        while let Some((node, start, length)) = left.pop() {
            if last < start || start + length <= first {
                continue;
            }
            let inside = first <= start && start + length <= last + 1;
            f(self, node, inside);
            if !inside {
                let half = length / 2;
                left.extend([(2 * node, start, half), (2 * node + 1, start + half, half)]);
            }
        }
    }
}

/// Sorted ranges of bytes that neither overlap nor touch.
#[derive(Clone, Default)]
struct Ranges(Vec<Bytes>);

impl Ranges {
    fn add(&mut self, (start, stop): Bytes) {
        let from = self.0.partition_point(|r| r.1 < start);
        let to = self.0.partition_point(|r| r.0 <= stop);
        let merged = self.0[from..to].iter().fold((start, stop), |m, r| (m.0.min(r.0), m.1.max(r.1)));
        self.0.splice(from..to, [merged]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::philox;

    /// The same result, found by comparing with all buffers placed so far.
    fn plainly(buffers: &mut [Buffer]) -> usize {
        let mut order: Vec<usize> = (0..buffers.len()).collect();
        order.sort_by_key(|&b| (std::cmp::Reverse(buffers[b].bytes), buffers[b].first));
        let (mut placed, mut total): (Vec<(usize, usize, usize, usize)>, usize) = (vec![], 0);
        for b in order {
            let (first, last, size) = (buffers[b].first, buffers[b].last, buffers[b].bytes.next_multiple_of(ALIGN));
            let beside = |p: &&(usize, usize, usize, usize)| p.0 <= last && first <= p.1;
            let mut taken: Vec<Bytes> = placed.iter().filter(beside).map(|p| (p.2, p.3)).collect();
            taken.sort();
            let ends = std::iter::once(0).chain(taken.iter().scan(0, |at, t| {
                *at = t.1.max(*at);
                Some(*at)
            }));
            let gaps = ends.clone().zip(&taken).map(|(end, t)| (t.0.saturating_sub(end), end));
            let offset = gaps.filter(|g| g.0 >= size).min().map_or(ends.clone().last().unwrap_or(0), |g| g.1);
            buffers[b].home = Home::Arena(offset);
            placed.push((first, last, offset, offset + size));
            total = total.max(offset + size);
        }
        total
    }

    #[test]
    fn offsets_are_those_of_going_through_all_buffers() {
        for (round, (count, positions)) in [(1, 1), (40, 7), (200, 100), (300, 1000)].into_iter().enumerate() {
            let number = |i: usize, k: usize, n: u32| (philox([i as u32, k as u32, round as u32, 0], [3, 5])[0] % n) as usize;
            let buffer = |i: usize| {
                let first = number(i, 0, positions);
                // Few sizes, as in a model of equal layers; and some that live for long.
                let (bytes, long) = (1 + 300 * number(i, 1, 9), if number(i, 2, 4) == 0 { positions } else { 1 + positions / 20 });
                Buffer { home: Home::Arena(0), bytes, first, last: first + number(i, 3, long) }
            };
            let mut ours: Vec<Buffer> = (0..count).map(buffer).collect();
            let mut theirs = ours.clone();
            assert_eq!(assign(&mut ours), plainly(&mut theirs));
            assert!(ours.iter().zip(&theirs).all(|(a, b)| a.home == b.home), "{count} buffers");
        }
        assert_eq!(assign(&mut []), 0);
    }
}
