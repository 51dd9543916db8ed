//! Generated text whose entropy is known exactly: the loss that a perfect model reaches, and none can beat.
//!
//! The grammar is an acyclic probabilistic automaton. A state has weighted edges; an edge appends its text and leads to
//! another state. The texts of one state's edges are prefix-free, so a text has one derivation, and
//! -ln P(text) is the sum of -ln p over its edges. What repeats something said before (agreement, a name, a sum, a
//! count) is the text of a single edge, or a state with fewer edges: it costs nothing.

use std::collections::HashMap;

const SUBJECTS: &[&str] = &["cat", "dog", "farmer", "king", "sailor", "bird", "miller", "teacher", "painter", "tailor"];
const OBJECTS: &[&str] = &["stone", "boat", "lamp", "ring", "basket", "book", "coin", "hat", "map", "key"];
const ADJECTIVES: &[&str] = &["small", "red", "wise", "happy", "broken", "quiet", "heavy", "golden", "young", "strange"];
const VERBS: &[&str] = &["see", "find", "want", "keep", "paint", "sell", "break", "hide"];
const NAMES: &[&str] = &["mira", "tom", "anna", "boris", "lena", "maxim", "olga", "peter"];
const PLACES: &[&str] = &["river", "house", "forest", "tower", "market", "sea"];
const NUMBERS: &[&str] = &["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];

/// Weight, text, next state. The weights of a state need not sum to one.
type Edges = Vec<(f64, String, usize)>;

const END: usize = 0;

struct Edge {
    probability: f64,
    text: String,
    next: usize,
    /// -ln P(byte k | everything before it): they sum to -ln probability.
    nats: Vec<f64>,
}

#[derive(Default)]
struct State {
    edges: Vec<Edge>,
    /// Expected information and length from here to the end of the sentence.
    nats: f64,
    bytes: f64,
}

pub struct Grammar {
    /// An edge leads to a state of lower number; the last state begins a sentence.
    states: Vec<State>,
}

impl Default for Grammar {
    fn default() -> Self {
        Self::new()
    }
}

impl Grammar {
    pub fn new() -> Self {
        let mut g = Grammar { states: vec![State::default()] };
        let quality = g.add(words(ADJECTIVES, 1.0, ".\n", END));
        let place = g.add(words(PLACES, 1.0, ".\n", END));
        // What may follow the object; `reason` repeats the subject.
        let after_object = |reason: String| -> Edges {
            vec![(0.5, ".\n".into(), END), (0.3, " near the ".into(), place), (0.2, format!(" because {reason} "), quality)]
        };

        let [verb, verb_plural] = [("s ", "it is"), (" ", "they are")].map(|(ending, reason)| {
            let after = after_object(reason.into());
            let object = g.noun_phrase(1.0, OBJECTS, [&after, &after]);
            let object = g.add(object);
            g.add(words(VERBS, 1.0, ending, object))
        });
        let mut start = g.noun_phrase(0.5, SUBJECTS, [&vec![(1.0, " ".into(), verb)], &vec![(1.0, " ".into(), verb_plural)]]);

        for (weight, name) in zipf(NAMES) {
            let after = after_object(format!("{name} is"));
            let object = g.noun_phrase(1.0, OBJECTS, [&after, &after]);
            let object = g.add(object);
            let verb = g.add(words(VERBS, 1.0, "s ", object));
            start.push((0.3 * weight, format!("{name} "), verb));
        }

        // "three plus four is seven"
        for a in 1..=5 {
            let number = |n: usize| NUMBERS[n];
            let plus = (1..=4).map(|b| format!("{} is {}.\n", number(b), number(a + b)));
            let minus = (1..=a).map(|b| format!("{} is {}.\n", number(b), number(a - b)));
            let [plus, minus] =
                [plus.collect::<Vec<_>>(), minus.collect()].map(|texts| g.add(texts.into_iter().map(|text| (1.0, text, END)).collect()));
            let sign = g.add(vec![(0.7, "plus ".into(), plus), (0.3, "minus ".into(), minus)]);
            start.push((0.1 / 5.0, format!("{} ", number(a)), sign));
        }

        // "count from two to four: two three four"
        let mut from = Vec::new();
        for a in 1..=6 {
            let to = (a + 1..=9).map(|b| {
                let all = NUMBERS[a..=b].join(" ");
                (1.0, format!("{}: {all}.\n", NUMBERS[b]), END)
            });
            let to = g.add(to.collect());
            from.push((1.0, format!("{} to ", NUMBERS[a]), to));
        }
        let from = g.add(from);
        start.push((0.1, "count from ".into(), from));

        g.add(start);
        g
    }

    /// Determiner, up to two adjectives, noun; `after` is what follows a singular and a plural noun. The edges weigh `share`.
    fn noun_phrase(&mut self, share: f64, nouns: &[&str], after: [&Edges; 2]) -> Edges {
        let mut phrase = Edges::new();
        let forms = [("", after[0]), ("s", after[1])];
        for (determiners, forms) in [
            (&[(0.4, "the ")][..], &forms[..]),
            (&[(0.25, "a "), (0.1, "every ")], &forms[..1]),
            (&[(0.15, "some "), (0.1, "many ")], &forms[1..]),
        ] {
            let mut next = END;
            // From the noun backwards: no further adjective, perhaps one, perhaps one of two.
            for adjective in [0.0, 0.2, 0.4] {
                let mut edges = Edges::new();
                if adjective > 0.0 {
                    edges = words(ADJECTIVES, adjective, " ", next);
                }
                for (form, after) in forms {
                    for (weight, text, state) in *after {
                        let weight = weight * (1.0 - adjective) / forms.len() as f64;
                        edges.extend(words(nouns, weight, &format!("{form}{text}"), *state));
                    }
                }
                next = self.add(edges);
            }
            phrase.extend(determiners.iter().map(|(weight, text)| (share * weight, text.to_string(), next)));
        }
        phrase
    }

    fn add(&mut self, edges: Edges) -> usize {
        let total: f64 = edges.iter().map(|edge| edge.0).sum();
        // The probability that the state's text begins with these bytes.
        let mut mass: HashMap<&[u8], f64> = HashMap::new();
        for (weight, text, _) in &edges {
            for end in 0..=text.len() {
                *mass.entry(&text.as_bytes()[..end]).or_default() += weight / total;
            }
        }
        let mut state = State::default();
        for (weight, text, next) in &edges {
            let (probability, bytes) = (weight / total, text.as_bytes());
            assert!(mass[bytes] == probability, "{text:?} is also the beginning of another edge");
            let step = |k: usize| (mass[&bytes[..k]] / mass[&bytes[..=k]]).ln().max(0.0);
            state.nats += probability * (self.states[*next].nats - probability.ln());
            state.bytes += probability * (self.states[*next].bytes + text.len() as f64);
            state.edges.push(Edge { probability, nats: (0..bytes.len()).map(step).collect(), text: text.clone(), next: *next });
        }
        self.states.push(state);
        self.states.len() - 1
    }

    /// Appends sentence number `index` of the stream `seed`; it ends with a newline. Returns its information in nats.
    pub fn sentence(&self, seed: u64, index: u64, out: &mut Vec<u8>) -> f64 {
        let mut nats = 0.0;
        self.walk(seed, index, |edge| {
            out.extend_from_slice(edge.text.as_bytes());
            nats -= edge.probability.ln();
        });
        nats
    }

    /// As `sentence`, and appends the information of each byte given all before it.
    pub fn sentence_nats(&self, seed: u64, index: u64, out: &mut Vec<u8>, nats: &mut Vec<f64>) {
        self.walk(seed, index, |edge| {
            out.extend_from_slice(edge.text.as_bytes());
            nats.extend_from_slice(&edge.nats);
        });
    }

    fn walk(&self, seed: u64, index: u64, mut visit: impl FnMut(&Edge)) {
        let (mut state, mut choice) = (self.states.len() - 1, 0);
        while state != END {
            let mut left = super::uniform(&[seed, index, choice]);
            let edges = &self.states[state].edges;
            let passed = edges.iter().take_while(|edge| {
                left -= edge.probability;
                left >= 0.0
            });
            // The sum of the probabilities may round to just below one.
            let edge = &edges[passed.count().min(edges.len() - 1)];
            visit(edge);
            state = edge.next;
            choice += 1;
        }
    }

    /// The entropy rate of an endless text, in nats per byte.
    pub fn entropy_per_byte(&self) -> f64 {
        let start = &self.states[self.states.len() - 1];
        start.nats / start.bytes
    }

    /// Expected information of bytes 0..length of a text that begins with a sentence, each given all before it.
    pub fn entropy_by_position(&self, length: usize) -> Vec<f64> {
        let longest = |s: &State| s.edges.iter().map(|e| e.text.len()).max().unwrap_or(0);
        let rows = self.states.iter().map(longest).max().unwrap_or(0) + 1;
        let start = self.states.len() - 1;
        // arrive[t % rows][s]: the probability that state s begins at byte t.
        let mut arrive = vec![vec![0.0; self.states.len()]; rows];
        arrive[0][start] = 1.0;
        let mut expected = vec![0.0; length + rows];
        for t in 0..length {
            let here = std::mem::replace(&mut arrive[t % rows], vec![0.0; self.states.len()]);
            for (state, here) in self.states.iter().zip(here).filter(|(_, here)| *here > 0.0) {
                for edge in &state.edges {
                    let probability = here * edge.probability;
                    for (k, nats) in edge.nats.iter().enumerate() {
                        expected[t + k] += probability * nats;
                    }
                    let next = if edge.next == END { start } else { edge.next };
                    arrive[(t + edge.text.len()) % rows][next] += probability;
                }
            }
        }
        expected.truncate(length);
        expected
    }
}

/// Weights 1/2, 1/3, 1/4, ..., scaled to sum to one.
fn zipf<'a>(words: &'a [&'a str]) -> impl Iterator<Item = (f64, &'a str)> {
    let weight = |i: usize| 1.0 / (i + 2) as f64;
    let total: f64 = (0..words.len()).map(weight).sum();
    words.iter().enumerate().map(move |(i, word)| (weight(i) / total, *word))
}

fn words(list: &[&str], share: f64, ending: &str, next: usize) -> Edges {
    zipf(list).map(|(weight, word)| (share * weight, format!("{word}{ending}"), next)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entropy_is_the_mean_information() {
        let g = Grammar::new();
        let rate = g.entropy_per_byte();
        assert!((0.2..0.9).contains(&rate), "{rate}");
        // nats - rate * bytes has mean zero exactly when rate = E[nats] / E[bytes].
        let n = 50_000;
        let (mut sum, mut squares) = (0.0, 0.0);
        for i in 0..n {
            let mut text = Vec::new();
            let d = g.sentence(3, i, &mut text) - rate * text.len() as f64;
            sum += d;
            squares += d * d;
        }
        let n = n as f64;
        let (mean, error) = (sum / n, (squares / n).sqrt() / n.sqrt());
        assert!(mean.abs() < 4.0 * error, "{mean} +- {error}");
        assert!(error < 0.02 * rate * 40.0, "too noisy to fail: {error}");
    }

    #[test]
    fn a_text_is_as_frequent_as_its_information_says() {
        let g = Grammar::new();
        let n = 200_000;
        let mut seen: HashMap<Vec<u8>, (f64, f64)> = HashMap::new();
        for i in 0..n {
            let mut text = Vec::new();
            let nats = g.sentence(4, i, &mut text);
            assert!(text.ends_with(b".\n") && text.is_ascii());
            let entry = seen.entry(text).or_insert((nats, 0.0));
            // Two derivations of one text would differ here.
            assert_eq!(entry.0, nats);
            entry.1 += 1.0;
        }
        let mut checked = 0;
        for (text, (nats, count)) in seen {
            let expected = (-nats).exp() * n as f64;
            if expected > 200.0 {
                checked += 1;
                let text = String::from_utf8_lossy(&text);
                assert!((count - expected).abs() < 5.0 * expected.sqrt(), "{text} {count} {expected}");
            }
        }
        assert!(checked > 20, "{checked}");
    }

    #[test]
    fn bytes_sum_to_the_sentence_and_copies_are_free() {
        let g = Grammar::new();
        let mut copies = 0;
        for i in 0..2000 {
            let (mut text, mut again, mut nats) = (Vec::new(), Vec::new(), Vec::new());
            let total = g.sentence(5, i, &mut text);
            g.sentence_nats(5, i, &mut again, &mut nats);
            assert_eq!((&text, text.len()), (&again, nats.len()));
            assert!((nats.iter().sum::<f64>() - total).abs() < 1e-9);
            let text = String::from_utf8(text).unwrap();
            if let Some((before, rest)) = text.split_once(" because ") {
                let at = before.len() + " because ".len();
                let length = rest.find(" is ").or(rest.find(" are ")).unwrap();
                assert!(nats[at..at + length].iter().all(|&n| n == 0.0), "{text}");
                if !["it", "they"].contains(&&rest[..length]) {
                    assert!(text.starts_with(&rest[..length]), "{text}");
                    copies += 1;
                }
            }
        }
        assert!(copies > 50, "{copies}");
    }

    #[test]
    fn the_grammar_keeps_its_promises() {
        let g = Grammar::new();
        let mut sums = 0;
        for i in 0..5000 {
            let mut text = Vec::new();
            g.sentence(6, i, &mut text);
            let text = String::from_utf8(text).unwrap();
            let words: Vec<&str> = text.trim_end_matches(".\n").split(' ').collect();
            let number = |word: &str| NUMBERS.iter().position(|n| *n == word).unwrap();
            if words[1] == "plus" {
                assert_eq!(number(words[0]) + number(words[2]), number(words[4]), "{text}");
                sums += 1;
            } else if words[1] == "minus" {
                assert_eq!(number(words[0]) - number(words[2]), number(words[4]), "{text}");
            } else if words[0] == "many" || words[0] == "some" {
                let noun = words[1..].iter().position(|w| !ADJECTIVES.contains(w)).unwrap() + 1;
                assert!(words[noun].ends_with('s') && VERBS.contains(&words[noun + 1]), "{text}");
            }
        }
        assert!(sums > 100);
    }

    #[test]
    fn far_from_the_start_every_position_has_the_entropy_rate() {
        let g = Grammar::new();
        let by_position = g.entropy_by_position(6000);
        let late = by_position[2000..].iter().sum::<f64>() / 4000.0;
        assert!((late - g.entropy_per_byte()).abs() < 1e-4, "{late}");
        assert!(by_position[0] > 1.0);
    }
}
