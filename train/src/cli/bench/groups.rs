//! Which variants of a step are held in memory together.

use crate::run::Peak;

/// What a loaded variant takes. All that are loaded share one arena, as large as the largest needs.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    pub arena: u64,
    /// State, tables and feeds, of its own.
    pub rest: u64,
}

impl Needs {
    pub fn of(peak: &Peak) -> Needs {
        Needs { arena: (peak.activations + peak.workspace) as u64, rest: (peak.state + peak.tables) as u64 }
    }

    pub fn total(&self) -> u64 {
        self.arena + self.rest
    }
}

/// Groups of variants that fit into `free` bytes beside the baseline, each as large as possible, and those that do not even fit alone.
pub fn groups(baseline: Needs, variants: &[Needs], free: Option<u64>) -> (Vec<Vec<usize>>, Vec<usize>) {
    let free = free.unwrap_or(u64::MAX);
    // By their arenas: a large one is paid for by its whole group.
    let mut order: Vec<usize> = (0..variants.len()).collect();
    order.sort_by_key(|&i| variants[i].arena);
    let (mut groups, mut too_large): (Vec<Vec<usize>>, Vec<usize>) = (vec![], vec![]);
    let mut rest = baseline.rest;
    for i in order {
        let v = variants[i];
        let arena = v.arena.max(baseline.arena); // those before it need less
        let fits = |rest: u64| arena.saturating_add(rest).saturating_add(v.rest) <= free;
        if !fits(baseline.rest) {
            too_large.push(i);
            continue;
        }
        match groups.last_mut().filter(|_| fits(rest)) {
            Some(group) => group.push(i),
            None => {
                groups.push(vec![i]);
                rest = baseline.rest;
            }
        }
        rest += v.rest;
    }
    (groups, too_large)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_held_as_fit() {
        let needs = |arena, rest| Needs { arena, rest };
        let base = needs(10, 5);
        let variants = [needs(10, 5), needs(30, 5), needs(10, 5), needs(12, 5), needs(90, 5)];
        assert_eq!(groups(base, &variants, None), (vec![vec![0, 2, 3, 1, 4]], vec![]));
        assert_eq!(groups(base, &variants, Some(1000)).0.len(), 1);
        // 5 + 10, then 5 each: two beside the baseline in 25; the third has an arena of 12.
        assert_eq!(groups(base, &variants, Some(25)), (vec![vec![0, 2], vec![3]], vec![1, 4]));
        assert_eq!(groups(base, &variants, Some(40)), (vec![vec![0, 2, 3], vec![1]], vec![4]));
        assert_eq!(groups(base, &variants, Some(10)), (vec![], vec![0, 2, 3, 1, 4]));
        assert_eq!(groups(base, &[], Some(10)), (vec![], vec![]));
        for free in 20..200 {
            let (all, too_large) = groups(base, &variants, Some(free));
            for group in &all {
                let arena = group.iter().map(|&i| variants[i].arena).chain([base.arena]).max().unwrap();
                let rest: u64 = group.iter().map(|&i| variants[i].rest).sum();
                assert!(arena + rest + base.rest <= free, "{group:?} in {free}");
            }
            let mut seen: Vec<usize> = all.concat().into_iter().chain(too_large).collect();
            seen.sort();
            assert_eq!(seen, [0, 1, 2, 3, 4], "{free}");
        }
    }
}
