//! Numbers about sets of replies: how different they are, and how many are right. Replies are tokens or words, as the caller likes.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

/// Of all sequences of `n` tokens in a set of replies, the share that differ from each other. Nothing where no reply is that long.
pub fn distinct<T: Eq + Hash>(replies: &[Vec<T>], n: usize) -> Option<f64> {
    let all: Vec<&[T]> = replies.iter().flat_map(|r| r.windows(n.max(1))).collect();
    let different: HashSet<&&[T]> = all.iter().collect();
    (!all.is_empty()).then(|| different.len() as f64 / all.len() as f64)
}

/// The mean over a set's replies of each one's BLEU against all others: 1 where all are the same and have four tokens or more. Nothing of fewer than two.
pub fn self_bleu<T: Eq + Hash>(replies: &[Vec<T>]) -> Option<f64> {
    if replies.len() < 2 {
        return None;
    }
    let against = |i: usize| {
        let others: Vec<&[T]> = replies.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, r)| &r[..]).collect();
        bleu(&replies[i], &others)
    };
    Some((0..replies.len()).map(against).sum::<f64>() / replies.len() as f64)
}

/// What a count of none is taken for, so that one missing length does not make a product of four zero.
const SMOOTHING: f64 = 0.1;

/// BLEU-4: the geometric mean of the shares of sequences of 1 to 4 tokens that stand in a reference too (each as often as in the one that has it
/// most), times a penalty where the text is shorter than the reference that is nearest in length. As NLTK's `sentence_bleu` with `method1`.
pub fn bleu<T: Eq + Hash>(text: &[T], references: &[&[T]]) -> f64 {
    let mut log = 0.0;
    for n in 1..=4 {
        let own = counts(text, n);
        let theirs: Vec<_> = references.iter().map(|r| counts(r, n)).collect();
        let most = |sequence: &&[T]| theirs.iter().filter_map(|t| t.get(sequence)).max().copied().unwrap_or(0);
        let shared: usize = own.iter().map(|(sequence, &count)| count.min(most(sequence))).sum();
        if n == 1 && shared == 0 {
            return 0.0;
        }
        let shared = if shared == 0 { SMOOTHING } else { shared as f64 };
        log += (shared / own.values().sum::<usize>().max(1) as f64).ln() / 4.0;
    }
    let length = text.len() as f64;
    // The shorter of two that are equally near.
    let nearest = references.iter().map(|r| r.len()).min_by_key(|&r| (r.abs_diff(text.len()), r)).unwrap_or(0) as f64;
    let penalty = if length > nearest { 1.0 } else { (1.0 - nearest / length).exp() };
    penalty * log.exp()
}

fn counts<T: Eq + Hash>(tokens: &[T], n: usize) -> HashMap<&[T], usize> {
    tokens.windows(n).fold(HashMap::new(), |mut all, sequence| {
        *all.entry(sequence).or_default() += 1;
        all
    })
}

/// The chance that at least one of `k` replies is right, where `right` of `n` were: 1 - C(n - right, k) / C(n, k), which is right on average
/// for every k up to n. Nothing for more.
pub fn pass_at(k: usize, n: usize, right: usize) -> Option<f64> {
    if k == 0 || k > n || right > n {
        return None;
    }
    // Of the factors (n - right - i) / (n - i), i < k, one is zero where fewer than k are wrong.
    let wrong = n - right;
    let none: f64 = (0..k).map(|i| wrong.saturating_sub(i) as f64 / (n - i) as f64).product();
    Some(1.0 - none)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(texts: &[&str]) -> Vec<Vec<String>> {
        texts.iter().map(|t| t.split_whitespace().map(String::from).collect()).collect()
    }

    #[test]
    fn distinct_counts_pairs_of_the_whole_set() {
        // it is, is seven; it is, is eight; pairs inside one reply count too.
        assert_eq!(distinct(&words(&["it is seven", "it is eight"]), 2), Some(0.75));
        assert_eq!(distinct(&words(&["a a a a"]), 2), Some(1.0 / 3.0));
        assert_eq!(distinct(&words(&["a b", "a b", "a b"]), 2), Some(1.0 / 3.0));
        assert_eq!(distinct(&words(&["a b", "c"]), 1), Some(1.0));
        assert_eq!(distinct(&words(&["a", ""]), 2), None);
        assert_eq!(distinct::<u32>(&[], 2), None);
    }

    #[test]
    fn bleu_by_hand() {
        let one = |text: &str, references: &[&str]| {
            let (text, references) = (words(&[text]), words(references));
            bleu(&text[0], &references.iter().map(|r| &r[..]).collect::<Vec<_>>())
        };
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        near(one("a b c d e", &["a b c d e"]), 1.0);
        // 4/5, 2/4, 1/3, and none of 2 counts as 0.1.
        near(one("a b c d e", &["a b c x e"]), (0.8f64 * 0.5 * (1.0 / 3.0) * 0.05).powf(0.25));
        // "the" counts twice, as often as in one reference; of 2- to 4-grams none: 6, 5 and 4 of them.
        near(
            one("the the the the the the the", &["the cat the", "the dog"]),
            (2.0f64 / 7.0 * (0.1 / 6.0) * (0.1 / 5.0) * (0.1 / 4.0)).powf(0.25),
        );
        // Two tokens of a reference of four: all of 1- and 2-grams, none of none above; the penalty is e^(1 - 4/2).
        near(one("a b", &["a b c d"]), (1.0f64 * 1.0 * 0.1 * 0.1).powf(0.25) * (-1.0f64).exp());
        // Of references of 2 and 4 tokens, the shorter is as near to 3.
        near(one("a b c", &["a b c d", "a b"]), 0.1f64.powf(0.25));
        assert_eq!(one("x y", &["a b"]), 0.0);
        assert_eq!(one("", &["a b"]), 0.0);
    }

    /// From nltk 3.10, `sentence_bleu(refs, hyp, smoothing_function=SmoothingFunction().method1)`, the mean over the set.
    #[test]
    fn self_bleu_as_nltk_has_it() {
        for (texts, expected) in SELF_BLEU {
            let got = self_bleu(&words(texts)).unwrap();
            assert!((got - expected).abs() < 1e-9, "{texts:?}: {got} {expected}");
        }
        assert_eq!(self_bleu(&words(&["a b c d"; 4])), Some(1.0));
        assert_eq!(self_bleu(&words(&["alone"])), None);
    }

    const SELF_BLEU: &[(&[&str], f64)] = &[
        (&["it is seven", "the sum is seven", "three plus four makes seven"], 0.13193396074635097),
        (&["the cat sat on the mat", "the cat sat on a mat today", "a dog sat on the mat"], 0.6185397092290085),
        (&["a", "a b", "a b c d e f"], 0.1559936705716877),
        (
            &["one two three four five six", "one two three four six five", "six five four three two one", "one two three"],
            0.37177803844177165,
        ),
    ];

    /// By hand, and against the mean over all choices of k.
    #[test]
    fn pass_at_k_is_the_mean_over_all_choices() {
        assert_eq!(pass_at(1, 10, 3).map(|p| (p * 1e12).round() / 1e12), Some(0.3));
        assert_eq!(pass_at(2, 4, 1), Some(0.5));
        assert_eq!((pass_at(3, 3, 0), pass_at(2, 5, 4), pass_at(5, 5, 1)), (Some(0.0), Some(1.0), Some(1.0)));
        assert_eq!((pass_at(0, 3, 1), pass_at(4, 3, 1), pass_at(1, 3, 4)), (None, None, None));
        for (n, right) in [(6, 2), (7, 3), (5, 5)] {
            for k in 1..=n {
                let sets: Vec<u32> = (0..1u32 << n).filter(|s| s.count_ones() as usize == k).collect();
                let passed = sets.iter().filter(|s| *s & ((1 << right) - 1) != 0).count();
                let expected = passed as f64 / sets.len() as f64;
                assert!((pass_at(k, n, right).unwrap() - expected).abs() < 1e-12, "{k} of {n}, {right} right");
            }
        }
    }
}
