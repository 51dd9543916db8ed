//! Generated questions, each with many right answers: a few answers to the question, each said in several ways. All replies to a question are
//! listed, so that any text can be told right or wrong, and the information of each is known.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::OnceLock;

use serde_json::json;

use super::super::{DataError, Tokenizer, uniform};

/// What a slot of a phrasing is filled with.
type Answer = Vec<(&'static str, String)>;

/// Questions that are answered in the same ways.
struct Kind {
    /// `{x}` is a slot.
    phrasings: &'static [&'static str],
    questions: Vec<Question>,
}

#[derive(Debug)]
pub struct Question {
    pub prompt: String,
    phrasings: &'static [&'static str],
    answers: Vec<Answer>,
}

pub struct Quiz {
    kinds: Vec<Kind>,
    /// By prompt: its kind, and its place there.
    places: HashMap<String, (usize, usize)>,
}

const SUM: &[&str] =
    &["it is {c}", "the sum is {c}", "{a} plus {b} makes {c}", "you get {c}", "{b} and {a} are {c} together", "that makes {c}", "{c}"];
const REST: &[&str] =
    &["it leaves {c}", "{a} minus {b} is {c}", "{c} is left", "you keep {c}", "the rest is {c}", "without {b} there are {c}", "{c}"];
const MAKE: &[&str] = &["{x} and {y}", "{x} plus {y} makes {n}", "take {x} and {y}", "add {x} to {y}", "you get {n} from {x} and {y}"];
const BETWEEN: &[&str] =
    &["{x}", "{x} is between them", "take {x}", "{x} is more than {a}", "how about {x}", "{x} is less than {b}", "it could be {x}"];
const MORE: &[&str] = &["{m}", "{m} is more", "{m} is more than {l}", "it is {m}", "{l} is less than {m}", "the greater one is {m}"];
const THING: &[&str] = &["{x}", "how about {x}", "{x} is one", "maybe {x}", "i would say {x}", "think of {x}", "one is {x}"];
const SAY: &[&str] = &[
    "the {n} is {a}",
    "this {n} is {a}",
    "what a {a} {n}",
    "it is a {a} {n}",
    "look how {a} the {n} is",
    "here is a {a} {n}",
    "{a} is what the {n} is",
];
const COUNT: &[&str] = &["{list}", "here you go {list}", "{list} and done", "we count {list}", "one by one {list}", "it goes {list}"];

const THINGS: &[(&str, &[&str])] = &[
    ("an animal", &["cat", "dog", "horse", "owl", "frog", "whale", "bee"]),
    ("an animal that flies", &["owl", "crow", "bee", "gull", "bat"]),
    ("an animal that swims", &["whale", "salmon", "otter", "duck", "frog"]),
    ("a fruit", &["apple", "pear", "plum", "cherry", "lemon", "grape", "banana"]),
    ("a red fruit", &["cherry", "apple", "strawberry", "raspberry"]),
    ("a yellow fruit", &["lemon", "banana", "pear", "mango"]),
    ("a colour", &["red", "blue", "green", "yellow", "black", "white", "brown"]),
    ("a tool", &["hammer", "saw", "drill", "rake", "axe", "spade"]),
    ("a thing on wheels", &["car", "bike", "train", "bus", "cart", "truck"]),
    ("a thing in a kitchen", &["spoon", "pan", "oven", "knife", "plate", "bowl"]),
    ("something to drink", &["water", "milk", "tea", "juice", "coffee"]),
    ("something to wear", &["hat", "coat", "scarf", "shirt", "boots"]),
    ("a place with water", &["river", "lake", "sea", "pond", "well", "canal"]),
    ("an instrument", &["drum", "flute", "harp", "violin", "piano", "horn"]),
];
const NOUNS: &[&str] = &["cat", "river", "hat", "lemon", "train", "house", "king", "stone", "garden", "song"];
const ADJECTIVES: &[&str] = &["red", "small", "quiet", "heavy", "golden", "young", "strange", "cold", "long", "new"];

fn kinds() -> Vec<Kind> {
    let kind = |phrasings: &'static [&'static str], asked: Vec<(String, Vec<Answer>)>| {
        let question = |(prompt, answers)| Question { prompt, phrasings, answers };
        Kind { phrasings, questions: asked.into_iter().map(question).collect() }
    };
    let number = |name: &'static str, n: u32| (name, n.to_string());
    let word = |name: &'static str, w: &str| (name, w.to_string());
    let (mut sum, mut rest, mut make, mut between, mut more, mut count) = (vec![], vec![], vec![], vec![], vec![], vec![]);
    for (a, b) in (0..=12).flat_map(|a| (0..=12).map(move |b| (a, b))) {
        let answers = || vec![vec![number("a", a), number("b", b), number("c", a + b)]];
        sum.push((format!("what is {a} plus {b}"), answers()));
        sum.push((format!("add {a} and {b}"), answers()));
    }
    for (a, b) in (1..=20).flat_map(|a| (0..=a).map(move |b| (a, b))) {
        rest.push((format!("take {b} from {a}"), vec![vec![number("a", a), number("b", b), number("c", a - b)]]));
    }
    for n in 2..=20 {
        let answers = (1..n).map(|x| vec![number("x", x), number("y", n - x), number("n", n)]).collect();
        make.push((format!("name two numbers that make {n}"), answers));
    }
    for (a, b) in (0..=20).flat_map(|a| (a + 2..=a + 8).map(move |b| (a, b))) {
        let answers = (a + 1..b).map(|x| vec![number("a", a), number("b", b), number("x", x)]).collect();
        between.push((format!("name a number between {a} and {b}"), answers));
    }
    for (a, b) in (0..=30).flat_map(|a| (0..=30).map(move |b| (a, b))).filter(|(a, b)| a != b) {
        more.push((format!("which is more {a} or {b}"), vec![vec![number("m", a.max(b)), number("l", a.min(b))]]));
    }
    for (a, b) in (0..=16).flat_map(|a| (a + 2..=a + 4).map(move |b| (a, b))) {
        let list: Vec<String> = (a..=b).map(|n| n.to_string()).collect();
        count.push((format!("count from {a} to {b}"), vec![vec![word("list", &list.join(" "))]]));
    }
    let things = THINGS.iter().map(|(what, all)| (format!("name {what}"), all.iter().map(|x| vec![word("x", x)]).collect()));
    let pairs = NOUNS.iter().flat_map(|n| ADJECTIVES.iter().map(move |a| (n, a)));
    let say = pairs.map(|(n, a)| (format!("say that the {n} is {a}"), vec![vec![word("n", n), word("a", a)]]));
    vec![
        kind(SUM, sum),
        kind(REST, rest),
        kind(MAKE, make),
        kind(BETWEEN, between),
        kind(MORE, more),
        kind(THING, things.collect()),
        kind(SAY, say.collect()),
        kind(COUNT, count),
    ]
}

impl Quiz {
    /// The quiz; there is one.
    pub fn get() -> &'static Quiz {
        static QUIZ: OnceLock<Quiz> = OnceLock::new();
        QUIZ.get_or_init(|| {
            let kinds = kinds();
            let all =
                kinds.iter().enumerate().flat_map(|(k, kind)| kind.questions.iter().enumerate().map(move |(q, question)| (k, q, question)));
            let places = all.map(|(k, q, question)| (question.prompt.clone(), (k, q))).collect();
            Quiz { kinds, places }
        })
    }

    pub fn questions(&self) -> impl Iterator<Item = &Question> {
        self.kinds.iter().flat_map(|kind| &kind.questions)
    }

    /// The question with this prompt.
    pub fn find(&self, prompt: &str) -> Option<&Question> {
        self.places.get(prompt).map(|&(k, q)| &self.kinds[k].questions[q])
    }

    /// Question number `index` of the stream `seed`: every kind is as frequent as every other.
    pub fn draw(&self, seed: u64, index: u64) -> &Question {
        let pick = |salt: u64, n: usize| (uniform(&[seed, index, salt]) * n as f64) as usize;
        let questions = &self.kinds[pick(0, self.kinds.len())].questions;
        &questions[pick(1, questions.len())]
    }

    /// Every word of the quiz is a token; everything else is spelled in bytes. As a tokenizer.json.
    pub fn tokenizer_json(&self) -> String {
        let mut words: BTreeSet<String> = BTreeSet::new();
        let mut add = |text: &str| words.extend(text.split(' ').filter(|w| !w.starts_with('{')).map(String::from));
        self.questions().for_each(|q| {
            add(&q.prompt);
            q.answers.iter().flatten().for_each(|(_, text)| add(text));
        });
        self.kinds.iter().flat_map(|k| k.phrasings).for_each(|p| add(p));
        let mut letters: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
        letters.sort();
        let pieces = SPECIAL.iter().map(|s| s.to_string()).chain(letters.iter().map(char::to_string));
        // The alphabet's sign for a space stands before every word. All weigh the same, so that the fewest pieces are taken.
        let vocab: Vec<_> = pieces.chain(words.iter().map(|w| format!("\u{120}{w}"))).map(|piece| (piece, -1.0)).collect();
        let added = SPECIAL.iter().enumerate().map(|(id, name)| {
            json!({ "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true })
        });
        let level = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(), "normalizer": null,
            "pre_tokenizer": level, "post_processor": null, "decoder": level,
            "model": { "type": "Unigram", "unk_id": null, "vocab": vocab, "byte_fallback": false },
        });
        format!("{json:#}\n")
    }

    pub fn tokenizer(&self) -> Result<Tokenizer, DataError> {
        Tokenizer::from_json(Path::new("the quiz"), self.tokenizer_json().as_bytes())
    }
}

/// The tokens of `Template`'s own format.
const SPECIAL: [&str; 3] = ["<|prompt|>", "<|reply|>", "<|end|>"];

impl Question {
    fn text(&self, phrasing: usize, answer: usize) -> String {
        let fill = |text: String, (slot, value): &(&str, String)| text.replace(&format!("{{{slot}}}"), value);
        self.answers[answer].iter().fold(self.phrasings[phrasing].to_string(), fill)
    }

    /// Everything that is a right reply.
    pub fn replies(&self) -> Vec<String> {
        (0..self.phrasings.len()).flat_map(|p| (0..self.answers.len()).map(move |a| self.text(p, a))).collect()
    }

    /// Spaces around it do not matter.
    pub fn is_right(&self, reply: &str) -> bool {
        self.replies().iter().any(|right| right == reply.trim())
    }

    /// Reply number `index` of the stream `seed`, and its information in nats. Each phrasing is `skew` times as likely as the one before it, and so
    /// is each answer.
    pub fn reply(&self, seed: u64, index: u64, skew: f64) -> (String, f64) {
        let pick = |salt: u64, n: usize| {
            let total: f64 = (0..n).map(|i| skew.powi(i as i32)).sum();
            let share = |i: usize| skew.powi(i as i32) / total;
            let mut left = uniform(&[seed, index, salt]);
            let passed = (0..n).take_while(|&i| {
                left -= share(i);
                left >= 0.0
            });
            // The sum of the shares may round to just below one.
            let i = passed.count().min(n - 1);
            (i, -share(i).ln())
        };
        let ((phrasing, a), (answer, b)) = (pick(2, self.phrasings.len()), pick(3, self.answers.len()));
        (self.text(phrasing, answer), a + b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_question_has_its_own_prompt_and_every_reply_its_own_text() {
        let quiz = Quiz::get();
        assert_eq!(quiz.questions().count(), quiz.places.len());
        for q in quiz.questions() {
            assert!(std::ptr::eq(quiz.find(&q.prompt).unwrap(), q));
            let replies = q.replies();
            assert!(replies.len() >= 5 && replies.iter().collect::<BTreeSet<_>>().len() == replies.len(), "{}: {replies:?}", q.prompt);
            assert!(replies.iter().all(|r| !r.contains(['{', '}']) && r.trim() == r), "{replies:?}");
        }
        assert!(quiz.find("what is 3 plus").is_none());
    }

    /// Computed from the texts alone, not from the tables.
    #[test]
    fn right_replies_are_right() {
        let numbers = |text: &str| text.split(' ').filter_map(|w| w.parse::<i64>().ok()).collect::<Vec<_>>();
        for q in Quiz::get().questions() {
            let given = numbers(&q.prompt);
            for reply in q.replies() {
                let said = numbers(&reply);
                let ok = match q.prompt.split(' ').next().unwrap() {
                    "what" | "add" => said.contains(&(given[0] + given[1])),
                    "take" => said.contains(&(given[1] - given[0])),
                    "which" => said.contains(given.iter().max().unwrap()),
                    "count" => said == (given[0]..=given[1]).collect::<Vec<_>>(),
                    "say" => q.prompt.split(' ').skip(3).step_by(2).all(|w| reply.split(' ').any(|said| said == w)),
                    "name" if q.prompt.contains("that make") => {
                        said.iter().enumerate().any(|(i, a)| said[i + 1..].iter().any(|b| a + b == given[0]))
                    }
                    "name" if q.prompt.contains("between") => said.iter().any(|n| given[0] < *n && *n < given[1]),
                    "name" => reply.split(' ').count() <= 4,
                    other => panic!("{other}"),
                };
                assert!(ok, "{}: {reply}", q.prompt);
            }
        }
    }

    #[test]
    fn wrong_replies_are_wrong() {
        let right = |prompt: &str, reply: &str| Quiz::get().find(prompt).unwrap().is_right(reply);
        assert!(right("what is 3 plus 4", "it is 7") && right("what is 3 plus 4", " 4 and 3 are 7 together "));
        assert!(right("name two numbers that make 9", "take 4 and 5") && right("name two numbers that make 9", "add 5 to 4"));
        assert!(right("name a red fruit", "maybe cherry") && right("say that the hat is new", "what a new hat"));
        for (prompt, reply) in [
            ("what is 3 plus 4", "it is 8"),
            ("what is 3 plus 4", "it is"),
            ("what is 3 plus 4", ""),
            ("what is 3 plus 4", "it is 7 7"),
            ("what is 3 plus 4", "3 plus 3 makes 7"),
            ("name two numbers that make 9", "take 4 and 6"),
            ("name two numbers that make 9", "9 and 0"),
            ("name a red fruit", "maybe lemon"),
            ("say that the hat is new", "what a new cat"),
            ("count from 3 to 5", "3 4"),
        ] {
            assert!(!right(prompt, reply), "{prompt}: {reply}");
        }
    }

    #[test]
    fn replies_are_as_frequent_as_their_information_says() {
        let q = Quiz::get().find("name a red fruit").unwrap();
        for skew in [1.0, 0.6] {
            let n = 40_000;
            let mut seen: HashMap<String, (f64, f64)> = HashMap::new();
            for i in 0..n {
                let (reply, nats) = q.reply(5, i, skew);
                let entry = seen.entry(reply).or_insert((nats, 0.0));
                assert_eq!(entry.0, nats);
                entry.1 += 1.0;
            }
            assert_eq!(seen.len(), q.replies().len());
            let mass: f64 = seen.values().map(|(nats, _)| (-nats).exp()).sum();
            assert!((mass - 1.0).abs() < 1e-12, "{mass}");
            for (reply, (nats, count)) in seen {
                let expected = (-nats).exp() * n as f64;
                assert!((count - expected).abs() < 5.0 * expected.sqrt(), "{reply} {count} {expected}");
            }
        }
    }

    #[test]
    fn a_word_is_a_token_and_everything_else_is_spelled() {
        let quiz = Quiz::get();
        let tokenizer = quiz.tokenizer().unwrap();
        assert!(tokenizer.vocab() <= 512, "{}", tokenizer.vocab());
        assert_eq!(SPECIAL.map(|name| tokenizer.token(name)), [Some(0), Some(1), Some(2)]);
        for i in 0..300 {
            let q = quiz.draw(1, i);
            for text in [q.prompt.clone(), q.reply(1, i, 1.0).0] {
                let ids = tokenizer.encode(&text).unwrap();
                assert_eq!(ids.len(), text.split(' ').count(), "{text}");
                assert_eq!(tokenizer.decode(&ids), format!(" {text}"));
            }
        }
        let text = "Zählt 31 Äpfel, bitte!";
        assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()), format!(" {text}"));
        assert_eq!(tokenizer.encode("<|prompt|>cat<|end|>").unwrap().len(), 3);
    }
}
