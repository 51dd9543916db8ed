//! Chooses the next token, and continues text with it.

use crate::recipe::{Generator, Replier, Session, TrainError};
use engine::philox::{philox, uniform};

#[derive(Clone, Debug)]
pub struct Sampling {
    /// 0 always takes the most likely token.
    pub temperature: f32,
    /// Only the smallest set of tokens whose probability reaches this is drawn from.
    pub top_p: f32,
    pub seed: u64,
    pub max_tokens: usize,
    /// Tokens that end the text; they are not shown.
    pub stop: Vec<u32>,
    /// Strings that end it, however many tokens they are; neither shown.
    pub stop_text: Vec<String>,
}

/// A text up to the first of some strings, handed out as it comes in. What may be the beginning of one is held back.
#[derive(Clone, Debug)]
pub struct Until<'a> {
    stops: &'a [String],
    held: String,
    ended: bool,
}

impl<'a> Until<'a> {
    pub fn new(stops: &'a [String]) -> Until<'a> {
        Until { stops, held: String::new(), ended: false }
    }

    /// Whether one of the strings has come.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// What of the text is now sure to stand before them all.
    pub fn push(&mut self, piece: &str) -> String {
        if self.ended {
            return String::new();
        }
        self.held.push_str(piece);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.ended = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let begins = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let from = self.held.char_indices().map(|(at, _)| at).find(begins).unwrap_or(self.held.len());
        let rest = self.held.split_off(from);
        std::mem::replace(&mut self.held, rest)
    }

    /// The rest, where no string came.
    pub fn finish(self) -> String {
        self.held
    }
}

/// The more likely of two tokens first, of equal ones the earlier.
fn order(logits: &[f32]) -> impl Fn(&usize, &usize) -> std::cmp::Ordering {
    |a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b))
}

/// The smallest set of tokens whose probability reaches `top_p`, the most likely first, with each one's probability among all.
pub fn nucleus(logits: &[f32], temperature: f32, top_p: f32) -> Vec<(usize, f64)> {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut p: Vec<f64> = logits.iter().map(|&l| (((l - top) / temperature) as f64).exp()).collect();
    let total: f64 = p.iter().sum();
    p.iter_mut().for_each(|v| *v /= total);
    let mut tokens: Vec<usize> = (0..p.len()).collect();
    tokens.sort_by(order(logits));
    let mut mass = 0.0;
    // The token that crosses top_p is still in.
    let kept = tokens.into_iter().take_while(|&i| {
        let before = mass;
        mass += p[i];
        before < top_p as f64
    });
    kept.map(|i| (i, p[i])).collect()
}

/// The token that draw number `index` takes.
pub fn choose(logits: &[f32], s: &Sampling, index: u64) -> u32 {
    if s.temperature == 0.0 {
        return (0..logits.len()).min_by(order(logits)).unwrap_or(0) as u32;
    }
    let kept = nucleus(logits, s.temperature, s.top_p);
    let mass: f64 = kept.iter().map(|k| k.1).sum();
    let word = philox([index as u32, (index >> 32) as u32, 0x5a4d, 0], [s.seed as u32, (s.seed >> 32) as u32])[0];
    let mut left = uniform(word) as f64 * mass;
    for &(i, p) in &kept {
        left -= p;
        if left < 0.0 {
            return i as u32;
        }
    }
    kept.last().map_or(0, |k| k.0 as u32)
}

/// Continues `prompt`, handing out text as soon as it is whole characters. Returns the tokens that were added.
pub fn continue_text(
    g: &mut dyn Generator,
    s: &mut Session,
    prompt: &str,
    sampling: &Sampling,
    show: &mut dyn FnMut(&str),
) -> Result<Vec<u32>, TrainError> {
    let tokens = g.tokenizer()?.encode_beginning(prompt)?;
    if tokens.is_empty() {
        return Err(TrainError::Other("the prompt has no tokens: write at least one character that the tokenizer knows".into()));
    }
    continue_tokens(g, s, &tokens, sampling, show)
}

/// The same for tokens.
pub fn continue_tokens(
    g: &mut dyn Generator,
    s: &mut Session,
    tokens: &[u32],
    sampling: &Sampling,
    show: &mut dyn FnMut(&str),
) -> Result<Vec<u32>, TrainError> {
    let tokenizer = g.tokenizer()?;
    g.begin(s, tokens.len() + sampling.max_tokens)?;
    let mut stream = tokenizer.stream();
    // What comes next is decoded as a continuation, so that a space between words is not lost.
    tokens.iter().for_each(|&t| {
        stream.push(t);
    });
    let mut logits = g.feed(s, tokens)?;
    let (mut added, mut until) = (vec![], Until::new(&sampling.stop_text));
    for i in 0..sampling.max_tokens {
        // A model may have more outputs than its tokenizer has tokens.
        let token =
            choose(&logits[..tokenizer.vocab().min(logits.len())], sampling, engine::mutant!("every-token-draws-the-same", i as u64, 0));
        if sampling.stop.contains(&token) {
            break;
        }
        added.push(token);
        if let Some(text) = stream.push(token) {
            show(&until.push(&text));
        }
        if until.ended() {
            break;
        }
        if i + 1 < sampling.max_tokens {
            logits = g.feed(s, &[token])?;
        }
    }
    if let Some(text) = stream.finish() {
        show(&until.push(&text));
    }
    show(&until.finish());
    Ok(added)
}

/// A reply to each of these prompts, at most as many as `begin` was told, handed out piece by piece with its row. Reply number `first` + row of a run draws by a
/// seed of its own.
pub fn reply(
    replier: &mut dyn Replier,
    s: &mut Session,
    prompts: &[Vec<u32>],
    (first, sampling): (u64, &Sampling),
    show: &mut dyn FnMut(usize, &str),
) -> Result<Vec<String>, TrainError> {
    let tokenizer = replier.tokenizer()?;
    let stop: Vec<u32> = sampling.stop.iter().copied().chain(replier.stop()?).collect();
    let own = |row: usize| Sampling { seed: sampling.seed.wrapping_add(first + row as u64), ..sampling.clone() };
    let own: Vec<Sampling> = (0..prompts.len()).map(own).collect();
    let mut texts: Vec<_> = prompts.iter().map(|_| (tokenizer.stream(), Until::new(&sampling.stop_text), String::new())).collect();
    let (mut last, mut ended) = (vec![0; prompts.len()], vec![false; prompts.len()]);
    let mut piece = |row: usize, text: &str, whole: &mut String| {
        whole.push_str(text);
        show(row, text);
    };
    replier.read(s, prompts)?;
    for i in 0..sampling.max_tokens as u64 {
        let logits = replier.next(s, &last)?;
        let vocab = logits.len() / prompts.len();
        for (row, (stream, until, whole)) in texts.iter_mut().enumerate() {
            if ended[row] {
                continue;
            }
            // A model may have more outputs than its tokenizer has tokens.
            let token = choose(
                &logits[row * vocab..][..engine::mutant!("replies-of-tokens-beyond-the-tokenizer", tokenizer.vocab().min(vocab), vocab)],
                &own[row],
                i,
            );
            last[row] = token;
            if stop.contains(&token) {
                ended[row] = true;
                continue;
            }
            if let Some(text) = stream.push(token) {
                piece(row, &until.push(&text), whole);
            }
            ended[row] = until.ended();
        }
        if ended.iter().all(|e| *e) {
            break;
        }
    }
    let finished = texts.into_iter().enumerate().map(|(row, (stream, mut until, mut whole))| {
        if let Some(text) = stream.finish() {
            piece(row, &until.push(&text), &mut whole);
        }
        piece(row, &until.finish(), &mut whole);
        whole
    });
    Ok(finished.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_ends_before_a_string_that_comes_in_pieces() {
        let stops = ["END".to_string(), "\n\nQ:".into(), "é!".into()];
        for (pieces, shown, ended) in [
            (&["one ", "E", "N", "D", " two"][..], &["one ", "", "", "", ""][..], true),
            (&["one E", "NEND."], &["one ", "EN"], true),
            (&["a\n", "\n\nQ", ":"], &["a", "\n", ""], true),
            (&["xENDéEND"], &["x"], true),
            (&["caf", "é", "s"], &["caf", "", "és"], false),
            (&["\n\nQ"], &[""], false),
        ] {
            let mut until = Until::new(&stops);
            let out: Vec<String> = pieces.iter().map(|piece| until.push(piece)).collect();
            assert_eq!((&out.iter().map(String::as_str).collect::<Vec<_>>()[..], until.ended()), (shown, ended), "{pieces:?}");
            let rest = until.finish();
            assert_eq!(rest, if pieces == ["\n\nQ"] { "\n\nQ" } else { "" }, "{pieces:?}");
        }
        assert_eq!(Until::new(&[]).push("all of it"), "all of it");
    }

    /// Every token is as likely as any other, whatever came before.
    struct Uniform;

    impl Generator for Uniform {
        fn tokenizer(&self) -> Result<std::sync::Arc<crate::data::Tokenizer>, TrainError> {
            Ok(std::sync::Arc::new(crate::data::Tokenizer::from_spec("byte").unwrap()))
        }
        fn begin(&mut self, _: &mut Session, _: usize) -> Result<(), TrainError> {
            Ok(())
        }
        fn feed(&mut self, _: &mut Session, _: &[u32]) -> Result<Vec<f32>, TrainError> {
            Ok(vec![0.0; 256])
        }
    }

    #[test]
    fn every_token_of_a_text_has_a_draw_of_its_own() {
        let mut s = Session::new(&engine::Device::cpu(engine::Cpu::new(1)), &engine::Switches::default(), 0);
        let mut text = |seed: u64| {
            let sampling = Sampling { temperature: 1.0, top_p: 1.0, seed, max_tokens: 40, stop: vec![], stop_text: vec![] };
            continue_text(&mut Uniform, &mut s, "a", &sampling, &mut |_| {}).unwrap()
        };
        let (first, second) = (text(1), text(2));
        let different: std::collections::HashSet<u32> = first.iter().copied().collect();
        assert!(first.len() == 40 && different.len() > 20, "{first:?}");
        assert!(first == text(1) && first != second);
    }

    /// Has more outputs than its tokenizer has tokens, and those are the most likely.
    struct Wide;

    impl Replier for Wide {
        fn tokenizer(&self) -> Result<std::sync::Arc<crate::data::Tokenizer>, TrainError> {
            Uniform.tokenizer()
        }
        fn prompt(&self, _: &[crate::data::chats::Message]) -> Result<Vec<u32>, TrainError> {
            Ok(vec![97])
        }
        fn stop(&self) -> Result<Option<u32>, TrainError> {
            Ok(None)
        }
        fn begin(&mut self, _: &mut Session, _: usize, _: usize) -> Result<(), TrainError> {
            Ok(())
        }
        fn read(&mut self, _: &mut Session, _: &[Vec<u32>]) -> Result<(), TrainError> {
            Ok(())
        }
        fn next(&mut self, _: &mut Session, tokens: &[u32]) -> Result<Vec<f32>, TrainError> {
            assert!(tokens.iter().all(|token| *token < 256), "{tokens:?}");
            let row: Vec<f32> = (0..300).map(|token| if token == 98 || token >= 256 { 10.0 + token as f32 } else { 0.0 }).collect();
            Ok([&row[..], &row].concat())
        }
    }

    #[test]
    fn a_reply_has_no_tokens_that_the_tokenizer_does_not_have() {
        let mut s = Session::new(&engine::Device::cpu(engine::Cpu::new(1)), &engine::Switches::default(), 0);
        let sampling = Sampling { temperature: 0.0, top_p: 1.0, seed: 0, max_tokens: 3, stop: vec![], stop_text: vec![] };
        let replies = reply(&mut Wide, &mut s, &[vec![97], vec![97]], (0, &sampling), &mut |_, _| {}).unwrap();
        assert_eq!(replies, ["bbb", "bbb"]);
    }

    #[test]
    fn top_p_keeps_the_smallest_set_and_the_token_that_crosses() {
        let logits = [0.1f32.ln(), 0.6f32.ln(), 0.3f32.ln()];
        let s = |top_p, temperature| Sampling { temperature, top_p, seed: 1, max_tokens: 1, stop: vec![], stop_text: vec![] };
        let draws = |s: &Sampling| {
            (0..4000).map(|i| choose(&logits, s, i)).fold([0; 3], |mut n, t| {
                n[t as usize] += 1;
                n
            })
        };
        assert_eq!(draws(&s(0.59, 1.0)), [0, 4000, 0]);
        let two = draws(&s(0.61, 1.0));
        assert!(two[0] == 0 && (two[2] as f64 / 4000.0 - 1.0 / 3.0).abs() < 0.03, "{two:?}");
        let all = draws(&s(1.0, 1.0));
        assert!((all[0] as f64 / 4000.0 - 0.1).abs() < 0.02, "{all:?}");
        assert_eq!(draws(&s(1.0, 0.0)), [0, 4000, 0]);
    }
}
