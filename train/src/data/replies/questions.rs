//! The quiz as rows of tokens. Each row begins with a question, and no two rows share one.

use std::sync::Arc;

use super::super::source::{check_range, check_seq};
use super::super::{DataError, Item, Source, Split, Tokenizer, hash};
use super::rows::{Fit, fit};
use super::{Example, Question, Quiz, Template, TooLong, row};

pub struct Questions {
    pub tokenizer: Arc<Tokenizer>,
    pub template: Template,
    /// Tokens of a row, and of the model.
    pub seq: usize,
    pub vocab: usize,
    pub pack: bool,
    pub too_long: TooLong,
    /// See `Question::reply`.
    pub skew: f64,
    /// Whether prompts are learned, too.
    pub whole: bool,
    pub ignore: Vec<u32>,
    /// Of the stream of questions; see `stream`.
    pub seed: u64,
    pub rows: u64,
}

impl Questions {
    /// More rows than any training reads.
    pub const ENDLESS: u64 = 1 << 40;

    /// The splits are independent streams of the same questions.
    pub fn stream(seed: u64, split: Split) -> u64 {
        hash(&[seed, 0x7175_697a, split as u64])
    }

    /// Looks at every question: whether it fits into a row, and its replies into the vocabulary.
    pub fn check(&self) -> Result<(), DataError> {
        check_seq(self.seq)?;
        let wrong = |what, value: String, need: String| Err(DataError::Setting { what, value, need });
        if !(self.skew > 0.0 && self.skew <= 1.0) {
            return wrong("data.skew", self.skew.to_string(), "above 0 and at most 1".into());
        }
        for question in Quiz::get().questions() {
            let head = self.template.head(&self.tokenizer, &question.prompt)?;
            // What a phrasing adds is short; the longest of many answers is found when it is drawn.
            let example = self.example_of(head, &question.reply(0, 0, self.skew).0)?;
            if let Some(token) = example.tokens.iter().find(|t| **t as usize >= self.vocab) {
                let need = format!("the tokenizer of the questions ({}) has token {token}", self.tokenizer.name());
                return wrong("model.vocab", self.vocab.to_string(), need);
            }
            if example.head() > self.seq {
                let need = format!("the question {:?} has {} tokens before its reply", question.prompt, example.head());
                return wrong("model.seq", self.seq.to_string(), need);
            }
        }
        Ok(())
    }

    fn example_of(&self, head: Vec<u32>, reply: &str) -> Result<Example, DataError> {
        let tail = self.template.tail(&self.tokenizer, reply)?;
        let learned = head.len();
        Ok(Example::reply([head, tail].concat(), learned))
    }

    /// Example number `index` of the stream, and the information of its reply; None where it is left out.
    fn example(&self, index: u64) -> Result<Option<(Example, f64)>, DataError> {
        let question = Quiz::get().draw(self.seed, index);
        let (reply, nats) = question.reply(self.seed, index, self.skew);
        let example = self.example_of(self.template.head(&self.tokenizer, &question.prompt)?, &reply)?;
        let problem = |p: String| DataError::Setting { what: "the question", value: format!("{:?}", question.prompt), need: p };
        match fit(example, self.seq, self.too_long).map_err(problem)? {
            Fit::Whole(e) => Ok(Some((e, nats))),
            // A perfect model's loss on a part of a reply is not known.
            Fit::Cut(e) => Ok(Some((e, f64::NAN))),
            Fit::Skip => Ok(None),
        }
    }

    /// The examples of a row. An example takes at least one place, so that `seq` of them always fill one.
    fn examples(&self, i: u64) -> Result<Vec<(Example, f64)>, DataError> {
        check_range(i, self.rows)?;
        let (mut all, mut room) = (vec![], self.seq);
        for index in i * self.seq as u64..(i + 1) * self.seq as u64 {
            let Some(next) = self.example(index)? else { continue };
            if next.0.places() > room {
                break;
            }
            room -= next.0.places();
            all.push(next);
            if !self.pack {
                break;
            }
        }
        Ok(all)
    }

    /// Nats of a target that a perfect model's loss is on these rows, where replies alone are learned.
    pub fn floor(&self, rows: u64) -> Result<Option<f64>, DataError> {
        let (mut sum, mut count) = (0.0, 0);
        for i in 0..rows.min(self.rows) {
            for (e, nats) in self.examples(i)? {
                sum += nats;
                count += e.learned();
            }
        }
        let known = self.ignore.is_empty() && !self.whole && sum.is_finite() && count > 0;
        Ok(known.then(|| sum / count as f64))
    }

    /// Prompt number `i` of the stream.
    pub fn prompt(&self, i: u64) -> &'static str {
        &Quiz::get().draw(self.seed, i).prompt
    }

    /// Tokens of the longest prompt, with what the template puts around it.
    pub fn longest_prompt(&self) -> Result<usize, DataError> {
        let tokens = |q: &Question| self.template.head(&self.tokenizer, &q.prompt).map(|head| head.len());
        Quiz::get().questions().map(tokens).try_fold(0, |most, n| Ok(most.max(n?)))
    }
}

impl Source for Questions {
    fn len(&self) -> u64 {
        self.rows
    }

    fn item(&self, i: u64) -> Result<Item, DataError> {
        Ok(row(self.examples(i)?.iter().map(|e| &e.0), self.seq, self.whole, &self.ignore))
    }

    fn entropy_floor(&self) -> Option<f64> {
        None
    }

    fn is_endless(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn questions(seq: usize, split: Split) -> Questions {
        let tokenizer = Arc::new(Quiz::get().tokenizer().unwrap());
        let template = Template::fitting(&tokenizer, None).unwrap();
        let (vocab, seed) = (tokenizer.vocab(), Questions::stream(1, split));
        Questions {
            tokenizer,
            template,
            seq,
            vocab,
            pack: true,
            too_long: TooLong::Cut,
            skew: 0.7,
            whole: false,
            ignore: vec![],
            seed,
            rows: 1 << 40,
        }
    }

    #[test]
    fn rows_are_pure_full_and_other_in_every_split() {
        let train = questions(64, Split::Train);
        train.check().unwrap();
        assert_eq!(train.template.name, "kiln");
        let items: Vec<Item> = (0..200).map(|i| train.item(i).unwrap()).collect();
        assert_eq!(items[7], questions(64, Split::Train).item(7).unwrap());
        assert_ne!(items[7], questions(64, Split::Val).item(7).unwrap());
        let padding =
            items.iter().flat_map(|i| i.until.iter().zip(&i.targets).enumerate()).filter(|(t, (u, g))| **u == *t as i32 && **g == -1);
        assert!(padding.count() < 200 * 64 / 8);
        train.item(Questions::ENDLESS - 1).unwrap();
        assert!(train.item(Questions::ENDLESS).is_err());
        // Each example as it is asked and told apart.
        let text: Vec<u32> = items[0].ids.iter().map(|&t| t as u32).collect();
        assert!(train.tokenizer.decode(&text).starts_with(&format!("<|prompt|> {}<|reply|>", train.prompt(0))));

        let padded = Questions { pack: false, ..questions(64, Split::Train) };
        let one = padded.item(3).unwrap();
        let (all, counted) = (one.until.iter().filter(|u| **u == one.until[0]).count(), one.targets.iter().filter(|t| **t >= 0).count());
        assert!(all < 40 && counted < all, "{one:?}");
        let whole = Questions { whole: true, ..questions(64, Split::Train) };
        assert!(whole.item(0).unwrap().targets.iter().filter(|t| **t >= 0).count() > 50);
    }

    #[test]
    fn the_floor_is_what_a_model_that_knows_the_replies_reaches() {
        // By enumerating all replies: the entropy of each question, over the mean length.
        let q = questions(128, Split::Val);
        let floor = q.floor(300).unwrap().unwrap();
        let (mut nats, mut tokens) = (0.0, 0.0);
        for question in Quiz::get().questions().step_by(23) {
            for i in 0..20 {
                let (reply, own) = question.reply(9, i, 0.7);
                nats += own;
                tokens += reply.split(' ').count() as f64 + 1.0;
            }
        }
        // Kinds are not equally frequent here: the two agree roughly.
        assert!((floor / (nats / tokens) - 1.0).abs() < 0.35, "{floor} {}", nats / tokens);
        assert_eq!(Questions { ignore: vec![5], ..questions(128, Split::Val) }.floor(3).unwrap(), None);
        assert_eq!(Questions { seq: 12, ..questions(128, Split::Val) }.floor(300).unwrap(), None, "some are cut");
    }

    #[test]
    fn settings_that_cannot_be_are_refused() {
        for (questions, part) in [
            (Questions { seq: 5, ..questions(64, Split::Train) }, "model.seq = 5: the question"),
            (Questions { vocab: 300, ..questions(64, Split::Train) }, "model.vocab = 300"),
            (Questions { skew: 0.0, ..questions(64, Split::Train) }, "data.skew = 0"),
            (Questions { skew: 1.5, ..questions(64, Split::Train) }, "data.skew = 1.5"),
        ] {
            let error = questions.check().unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        // The longest questions are left out where they do not fit.
        let q = Questions { seq: 12, too_long: TooLong::Skip, ..questions(64, Split::Train) };
        assert!((0..100).all(|i| q.item(i).is_ok()));
    }
}
