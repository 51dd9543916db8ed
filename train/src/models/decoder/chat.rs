//! Replies to one prompt or in a conversation, as they are written: of a model's folder, perhaps with an adapter on it, or of a run.

use super::lessons::{own_tokenizer, quiz_template};
use super::{Adapted, Base, Decoder, RepliesConfig, Writer};
use crate::checkpoint::Checkpoint;
use crate::config::DataConfig;
use crate::data::chats::{ChatError, Learn, Message};
use crate::data::replies::{Asked, Prompt, Words};
use crate::data::{DataError, Dataset, Stream, Tokenizer};
use crate::models::{Adapter, Folder, Lora, Shape};
use crate::recipe::{Session, TrainError};
use crate::sample::{Sampling, Until};
use crate::text::Text;
use engine::ops::sample::Nucleus;
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
    /// By the folder's own chat template. Without one, by what fits the special tokens of its tokenizer.
    pub fn of_folder(path: &Path, adapter: Option<&Path>) -> Result<Chat, TrainError> {
        let folder = Arc::new(Folder::open(path)?);
        let tokenizer = own_tokenizer(Some(&folder))?;
        let words = match RepliesConfig::default().words_at(&tokenizer, Some(path), None) {
            Err(DataError::Chats(ChatError::NoTemplate { .. })) => {
                let words = pair("", &tokenizer, Some(&folder))?;
                if matches!(&words, Words::Pair { template, .. } if template.name == "none") {
                    crate::warn!("note: {} has no chat template: a new line ends the prompt (--raw: the prompt as it is)", path.display());
                }
                words
            }
            other => other?,
        };
        let adapter = adapter.map(|path| Adapter::open(path, &folder.shape, Some(&folder.path))).transpose()?;
        let lora = adapter.as_ref().map(|a| a.lora.clone());
        Ok(Chat {
            tokenizer: Arc::new(tokenizer),
            words: Some(words),
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
        let plain = found.is_some_and(|f| f.meta["identity"]["plain"] == true) || Path::new(&data.path).join(Dataset::FILE).exists();
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

    /// Whether there is a chat template, so that a conversation can go on.
    pub fn has_turns(&self) -> bool {
        matches!(self.words, Some(Words::Own { .. }))
    }

    /// Whether there is a chat template that lets a model think before it replies, or tells it not to.
    pub fn may_think(&self) -> bool {
        matches!(&self.words, Some(Words::Own { template, .. }) if template.thinks)
    }

    /// The tokens that the model is given.
    fn ask(&self, said: Said) -> Result<Vec<u32>, TrainError> {
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
        let talk = self.talk(tokens, None, replies, sampling)?;
        talk.load(s)?;
        self.base.load(self.folder.as_deref(), &mut s.store)?;
        self.adapter.as_ref().map_or(Ok(()), |a| a.load(&mut s.store))?;
        Ok(talk)
    }

    /// The next turn of a conversation: its programs are those of `last` where they fit.
    pub fn go_on<'a>(&'a self, s: &mut Session, said: Said, sampling: &Sampling, last: &Talk<'a>) -> Result<Talk<'a>, TrainError> {
        let tokens = self.ask(said)?;
        let talk = self.talk(tokens, Some(&last.writer), last.writer.replies, sampling)?;
        if talk.writer != last.writer {
            s.store.remove_prefix(super::writer::SCRATCH);
            talk.load(s)?;
        }
        Ok(talk)
    }

    /// In a conversation (`last`), rows are longer than the prompt, so that the next one fits, too.
    fn talk(&self, tokens: Vec<u32>, last: Option<&Writer>, replies: usize, sampling: &Sampling) -> Result<Talk<'_>, TrainError> {
        let longest = |new: usize| self.shape.context.saturating_sub(new).max(tokens.len());
        let time = match last {
            Some(last) if last.time >= tokens.len() => last.time,
            Some(_) => tokens.len().next_power_of_two().max(LEAST_ROW).min(longest(sampling.max_tokens)),
            None => tokens.len(),
        };
        let own = self.words.as_ref().map_or(Ok(None), |words| words.stop(&self.tokenizer))?;
        let writer = Writer {
            prompts: 1,
            replies,
            time,
            new_tokens: sampling.max_tokens.min(self.shape.context - time),
            nucleus: Nucleus { temperature: sampling.temperature, top_p: sampling.top_p },
            stop: own.or(self.tokenizer.eos()),
        };
        // A document's end ends a reply, too: models that chat have a token of their own for that, and without a template they write this one.
        let named = self.tokenizer.special().map_or(vec![], |special| special.ends.iter().map(|token| token.id).collect());
        let stop = [sampling.stop.clone(), named, writer.stop.into_iter().chain(self.tokenizer.eos()).collect()].concat();
        let asked = Asked::new(vec![Prompt { text: String::new(), tokens }], time);
        Ok(Talk { chat: self, asked, writer, stop, stop_text: sampling.stop_text.clone(), seed: sampling.seed })
    }
}

/// A text with places for a prompt and its reply.
fn pair(template: &str, tokenizer: &Tokenizer, folder: Option<&Folder>) -> Result<Words, TrainError> {
    Ok(Words::Pair { template: quiz_template(template, tokenizer, folder)?, learn: Learn::Assistant })
}

/// A prompt that is being replied to.
pub struct Talk<'a> {
    chat: &'a Chat,
    asked: Asked,
    writer: Writer,
    stop: Vec<u32>,
    stop_text: Vec<String>,
    seed: u64,
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
    fn load(&self, s: &mut Session) -> Result<(), TrainError> {
        let Chat { shape, lora, base, .. } = self.chat;
        for (name, graph) in self.writer.graphs(|r| Decoder { shape, lora: lora.as_ref(), base: *base, r, rng: None }) {
            s.load(name, graph)?;
        }
        Ok(())
    }

    /// Writes all replies; of the first, text is handed out as soon as it is whole characters and no beginning of a string that ends it.
    pub fn write(&self, s: &mut Session, show: &mut dyn FnMut(&str)) -> Result<Vec<String>, TrainError> {
        let reply = || {
            let mut stream = self.chat.tokenizer.stream();
            // What comes next is decoded as a continuation, so that a space between words is not lost.
            self.asked.prompts[0].tokens.iter().for_each(|&t| {
                stream.push(t);
            });
            Reply { stream, until: Until::new(&self.stop_text), text: String::new(), open: true }
        };
        let mut replies: Vec<Reply> = (0..self.writer.replies).map(|_| reply()).collect();
        self.writer.begin(s, &self.asked, rng_feed(self.seed, 0, 0))?;
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
        if self.writer.time + self.writer.new_tokens == context && replies.iter().any(|reply| reply.open) {
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
