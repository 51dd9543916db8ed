//! Replies to one prompt or in a conversation, as they are written: of a model's folder, perhaps with an adapter on it, or of a run.

use super::lessons::{own_tokenizer, quiz_template};
use super::{Adapted, Base, Decoder, Lessons, READ, RepliesConfig, WRITE, Writer};
use crate::checkpoint::Checkpoint;
use crate::config::DataConfig;
use crate::data::chats::{ChatError, Learn, Message, TEMPLATE};
use crate::data::replies::{Asked, Prompt, Words};
use crate::data::{DataError, Stream, Tokenizer};
use crate::models::{Adapter, Folder, Lora, Shape};
use crate::recipe::{Session, TrainError};
use crate::sample::{Sampling, Until};
use crate::text::Text;
use engine::ops::sample::Nucleus;
use engine::passes::MERGED;
use engine::philox::rng_feed;
use std::path::Path;
use std::sync::Arc;

/// A model that replies.
pub struct Chat {
    pub tokenizer: Arc<Tokenizer>,
    /// None: prompts are continued as they are.
    words: Option<Words>,
    shape: Shape,
    lora: Option<Lora>,
    folder: Option<Arc<Folder>>,
    base: Base,
    adapter: Option<Adapter>,
}

/// What a model is given to reply to.
#[derive(Clone, Copy)]
pub enum Said<'a> {
    /// A text as it is, to be continued.
    Raw(&'a str),
    /// Turns of a conversation, the user's last; with `think` a model that may think before it replies does.
    Turns { messages: &'a [Message], think: bool },
}

/// Rows for a conversation have at least this length: it grows by doubling, and programs are made anew only then.
const LEAST_ROW: usize = 128;

impl Chat {
    /// By the folder's own chat template. Without one a text is continued as it is, unless its tokenizer is that of the generated questions.
    pub fn of_folder(path: &Path, adapter: Option<&Path>) -> Result<Chat, TrainError> {
        let folder = Arc::new(Folder::open(path)?);
        let tokenizer = own_tokenizer(Some(&folder))?;
        // Adapters may have learned by a template of their own.
        let own = adapter.map(|adapter| adapter.join(TEMPLATE)).filter(|file| file.is_file());
        let config = RepliesConfig { template: own.map_or(String::new(), |file| file.display().to_string()), ..RepliesConfig::default() };
        let words = match config.words_at(&tokenizer, Some(path), None) {
            Err(DataError::Chats(ChatError::NoTemplate { .. })) => {
                // A base model continues a text, and nothing is put around it: the tokens of chats are in the vocabulary of many that never learned them.
                Some(pair("", &tokenizer, Some(&folder))?).filter(Words::is_of_questions)
            }
            other => Some(other?),
        };
        let adapter = adapter.map(|path| Adapter::open(path, &folder.shape, Some(&folder.path))).transpose()?;
        let lora = adapter.as_ref().map(|a| a.lora.clone());
        Ok(Chat {
            tokenizer: Arc::new(tokenizer),
            words,
            shape: folder.shape.clone(),
            lora,
            folder: Some(folder),
            base: Base::Loaded,
            adapter,
        })
    }

    /// The model that a run's adapters are on; its checkpoint fills those. Prompts are put to it as they were while it learned.
    pub fn of_run(found: Option<&Checkpoint>, model: Adapted, data: RepliesConfig, seq: usize) -> Result<Chat, TrainError> {
        found.map_or(Ok(()), |found| model.is_base_of(found))?;
        // Checkpoints of earlier versions do not say whether they learned plain text: then the data does.
        let plain = found.is_some_and(|f| f.meta["identity"]["plain"] == true) || data.path.are_prepared();
        let folder = model.folder.as_deref();
        let (tokenizer, words) = if plain {
            let own = DataConfig { path: data.path, ignore_tokens: vec![] };
            let text = Text::new(own, model.shape.vocab, seq, 0);
            (found.map_or_else(|| text.tokenizer(), |found| text.take_tokenizer(found))?, None)
        } else {
            let tokenizer = own_tokenizer(folder)?;
            let words = match data.path.is_empty() {
                true => pair(&data.template, &tokenizer, folder)?,
                false => data.words_at(&tokenizer, folder.map(|f| f.path.as_path()), None)?,
            };
            (Arc::new(tokenizer), Some(words))
        };
        Ok(Chat { tokenizer, words, shape: model.shape, lora: model.lora, folder: model.folder, base: model.base, adapter: None })
    }

    /// A run's model, whose weights are in the session, with what it learns.
    pub fn of_lessons(lessons: &Lessons, model: &Adapted) -> Result<Chat, TrainError> {
        let (tokenizer, words) = (lessons.tokenizer.clone(), lessons.words(model.folder.as_deref())?);
        let (shape, lora) = (model.shape.clone(), model.lora.clone());
        Ok(Chat { tokenizer, words, shape, lora, folder: model.folder.clone(), base: model.base, adapter: None })
    }

    /// Positions that the model has.
    pub fn context(&self) -> usize {
        self.shape.context
    }

    /// Loads the programs that write behind these tokens, for `sample`.
    pub fn load_sample(&self, s: &mut Session, tokens: &[u32], sampling: &Sampling) -> Result<(), TrainError> {
        self.talk(vec![tokens.to_vec()], tokens.len(), 1, sampling)?.load(s)
    }

    /// What the model writes behind these tokens. Its weights are in the session, and what else this takes is gone after it.
    pub fn sample(&self, s: &mut Session, tokens: Vec<u32>, sampling: &Sampling) -> Result<String, TrainError> {
        let time = tokens.len();
        let written = self.talk(vec![tokens], time, 1, sampling)?.write(s, &mut |_| {});
        [READ, WRITE].iter().for_each(|program| drop(s.programs.remove(*program)));
        [super::writer::SCRATCH, MERGED].iter().for_each(|prefix| s.store.remove_prefix(prefix));
        Ok(written?.swap_remove(0))
    }

    /// Whether a prompt is continued as it is.
    pub fn continues(&self) -> bool {
        self.words.is_none()
    }

    /// Whether there is a chat template, so that a conversation can go on.
    pub fn has_turns(&self) -> bool {
        matches!(self.words, Some(Words::Own { .. }))
    }

    /// Whether there is a chat template that lets a model think before it replies, or tells it not to.
    pub fn may_think(&self) -> bool {
        matches!(&self.words, Some(Words::Own { template, .. }) if template.thinks)
    }

    /// The tokens that the model is given.
    pub fn ask(&self, said: Said) -> Result<Vec<u32>, TrainError> {
        let tokens = match (said, &self.words) {
            (Said::Raw(text), _) => self.tokenizer.encode_beginning(text)?,
            (Said::Turns { messages, think }, Some(words)) => words.asked(&self.tokenizer, messages, think)?,
            (Said::Turns { messages, .. }, None) => {
                let text = messages.last().map_or(Ok(String::new()), Message::text).map_err(TrainError::Other)?;
                self.tokenizer.encode_beginning(&text)?
            }
        };
        match tokens.iter().find(|t| **t as usize >= self.shape.vocab) {
            Some(token) => Err(TrainError::Other(format!("the tokenizer makes token {token}, and the model has {}", self.shape.vocab))),
            None if tokens.is_empty() => Err(TrainError::Other("the prompt has no tokens: write something".into())),
            None if tokens.len() >= self.shape.context => {
                Err(TrainError::Other(format!("a prompt of {} tokens fills the model's {} positions", tokens.len(), self.shape.context)))
            }
            None => Ok(tokens),
        }
    }

    /// Loads the programs that reply to this, and the base; at most as many tokens as the model has positions.
    pub fn begin(&self, s: &mut Session, said: Said, replies: usize, sampling: &Sampling) -> Result<Talk<'_>, TrainError> {
        let tokens = self.ask(said)?;
        let time = tokens.len();
        self.ready(s, self.talk(vec![tokens], time, replies, sampling)?, None)
    }

    /// Loads what a talk needs: its programs, unless they are those of `last`; where there was none, the base too.
    pub(super) fn ready<'a>(&'a self, s: &mut Session, talk: Talk<'a>, last: Option<&Talk<'a>>) -> Result<Talk<'a>, TrainError> {
        match last {
            Some(last) if last.writer == talk.writer => {}
            Some(_) => {
                s.store.remove_prefix(super::writer::SCRATCH);
                talk.load(s)?;
            }
            None => {
                talk.load(s)?;
                self.base.load(self.folder.as_deref(), &mut s.store)?;
                self.adapter.as_ref().map_or(Ok(()), |a| a.load(&mut s.store))?;
            }
        }
        Ok(talk)
    }

    /// The next turn of a conversation: its programs are those of `last` where they fit.
    pub fn go_on<'a>(&'a self, s: &mut Session, said: Said, sampling: &Sampling, last: &Talk<'a>) -> Result<Talk<'a>, TrainError> {
        let tokens = self.ask(said)?;
        // Rows are longer than the prompt, so that the next one fits, too.
        let time = match last.writer.time >= tokens.len() {
            true => last.writer.time,
            false => {
                let longest = self.shape.context.saturating_sub(sampling.max_tokens).max(tokens.len());
                tokens.len().next_power_of_two().max(LEAST_ROW).min(longest)
            }
        };
        self.ready(s, self.talk(vec![tokens], time, last.writer.replies, sampling)?, Some(last))
    }

    /// Replies to these prompts, at the ends of rows of `time`.
    pub(super) fn talk(&self, prompts: Vec<Vec<u32>>, time: usize, replies: usize, sampling: &Sampling) -> Result<Talk<'_>, TrainError> {
        let own = self.words.as_ref().map_or(Ok(None), |words| words.stop(&self.tokenizer))?;
        let writer = Writer {
            prompts: prompts.len(),
            replies,
            time,
            new_tokens: sampling.max_tokens.min(self.shape.context - time),
            nucleus: Nucleus { temperature: sampling.temperature, top_p: sampling.top_p },
            stop: own.or(self.tokenizer.eos()),
        };
        // A document's end ends a reply, too: models that chat have a token of their own for that, and without a template they write this one.
        let all = self.tokenizer.special().map_or(vec![], |special| special.ends.iter().map(|token| token.id).collect());
        let named = engine::mutant!("further-ends-do-not-end", all, vec![]);
        let stop = [sampling.stop.clone(), named, writer.stop.into_iter().chain(self.tokenizer.eos()).collect()].concat();
        let asked = Asked::new(prompts.into_iter().map(|tokens| Prompt { text: String::new(), tokens }).collect(), time);
        Ok(Talk { chat: self, asked, writer, stop, stop_text: sampling.stop_text.clone(), seed: sampling.seed, draw: 0 })
    }
}

/// A text with places for a prompt and its reply.
fn pair(template: &str, tokenizer: &Tokenizer, folder: Option<&Folder>) -> Result<Words, TrainError> {
    Ok(Words::Pair { template: quiz_template(template, tokenizer, folder)?, learn: Learn::Assistant })
}

/// A prompt that is being replied to, or several at once.
pub struct Talk<'a> {
    chat: &'a Chat,
    asked: Asked,
    writer: Writer,
    stop: Vec<u32>,
    stop_text: Vec<String>,
    seed: u64,
    /// Draws of another number are others.
    draw: u64,
}

/// A reply that is being written.
struct Reply<'a> {
    stream: Stream<'a>,
    until: Until<'a>,
    text: String,
    open: bool,
}

impl Reply<'_> {
    /// What is new of its text.
    fn push(&mut self, piece: Option<String>) -> String {
        let new = piece.map_or(String::new(), |piece| self.until.push(&piece));
        self.open &= !self.until.ended();
        self.text += &new;
        new
    }
}

impl Talk<'_> {
    pub(super) fn drawing(self, draw: u64) -> Self {
        Talk { draw, ..self }
    }

    fn load(&self, s: &mut Session) -> Result<(), TrainError> {
        let Chat { shape, lora, base, .. } = self.chat;
        s.load_phase(self.writer.graphs(|r| Decoder { shape, lora: lora.as_ref(), base: *base, r, rng: None }))
    }

    /// Writes all replies, those to each prompt one after another; of the first, text is handed out as soon as it is whole characters and no beginning of a string that ends it.
    pub fn write(&self, s: &mut Session, show: &mut dyn FnMut(&str)) -> Result<Vec<String>, TrainError> {
        let reply = |row: usize| {
            let mut stream = self.chat.tokenizer.stream();
            // What comes next is decoded as a continuation, so that a space between words is not lost.
            self.asked.prompts[row / self.writer.replies].tokens.iter().for_each(|&t| {
                stream.push(t);
            });
            Reply { stream, until: Until::new(&self.stop_text), text: String::new(), open: true }
        };
        let mut replies: Vec<Reply> = (0..self.writer.rows()).map(reply).collect();
        let seed = engine::mutant!("replies-ignore-the-seed", self.seed, 0);
        self.writer.begin(s, &self.asked, rng_feed(seed, engine::mutant!("batches-draw-the-same", self.draw, 0), 0))?;
        for i in 0..self.writer.new_tokens {
            if i > 0 {
                self.writer.next(s)?;
            }
            for (row, token) in self.writer.newest(s)?.into_iter().enumerate() {
                let reply = &mut replies[row];
                reply.open &= !self.stop.contains(&token);
                if reply.open {
                    let piece = reply.stream.push(token);
                    let new = reply.push(piece);
                    if row == 0 {
                        show(&new);
                    }
                }
            }
            if replies.iter().all(|reply| !reply.open) {
                break;
            }
        }
        let context = self.chat.shape.context;
        // Of many prompts it is one here and there.
        if self.writer.prompts == 1 && self.writer.time + self.writer.new_tokens == context && replies.iter().any(|reply| reply.open) {
            crate::warn!("note: stopped where the model's {context} positions are full");
        }
        let mut all = vec![];
        for (row, reply) in replies.into_iter().enumerate() {
            let Reply { stream, mut until, text, .. } = reply;
            let rest = stream.finish().map_or(String::new(), |piece| until.push(&piece)) + &until.finish();
            if row == 0 {
                show(&rest);
            }
            all.push(text + &rest);
        }
        Ok(all)
    }
}
