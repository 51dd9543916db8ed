//! Replies to one prompt, as they are written: of a model's folder, perhaps with an adapter on it, or of a run.

use super::lessons::words;
use super::{Adapted, Base, Decoder, RepliesConfig, Writer};
use crate::checkpoint::Checkpoint;
use crate::config::DataConfig;
use crate::data::replies::{Asked, Prompt, Template};
use crate::data::{Dataset, Tokenizer};
use crate::models::{Adapter, Folder, Lora, Shape};
use crate::recipe::{Session, TrainError};
use crate::sample::Sampling;
use crate::text::Text;
use engine::ops::sample::Nucleus;
use engine::philox::rng_feed;
use std::path::Path;
use std::sync::Arc;

/// A model that replies.
pub struct Chat {
    pub tokenizer: Arc<Tokenizer>,
    /// None: prompts are continued as they are.
    template: Option<Template>,
    shape: Shape,
    lora: Option<Lora>,
    folder: Option<Arc<Folder>>,
    base: Base,
    adapter: Option<Adapter>,
}

impl Chat {
    pub fn of_folder(path: &Path, adapter: Option<&Path>) -> Result<Chat, TrainError> {
        let folder = Arc::new(Folder::open(path)?);
        let (tokenizer, template) = words("", Some(&folder))?;
        let adapter = adapter.map(|path| Adapter::open(path, &folder.shape)).transpose()?;
        let lora = adapter.as_ref().map(|a| a.lora.clone());
        Ok(Chat {
            tokenizer: Arc::new(tokenizer),
            template: Some(template),
            shape: folder.shape.clone(),
            lora,
            folder: Some(folder),
            base: Base::Loaded,
            adapter,
        })
    }

    /// The model that a run's adapters are on; its checkpoint fills those.
    pub fn of_run(found: Option<&Checkpoint>, model: Adapted, data: RepliesConfig, seq: usize) -> Result<Chat, TrainError> {
        found.map_or(Ok(()), |found| model.is_base_of(found))?;
        // Checkpoints of earlier versions do not say whether they learned plain text: then the data does.
        let plain = found.is_some_and(|f| f.meta["identity"]["plain"] == true) || Path::new(&data.path).join(Dataset::FILE).exists();
        let (tokenizer, template) = match plain {
            true => {
                let own = DataConfig { path: data.path, ignore_tokens: vec![] };
                let text = Text::new(own, model.shape.vocab, seq, 0);
                (found.map_or_else(|| text.tokenizer(), |found| text.take_tokenizer(found))?, None)
            }
            false => words(&data.template, model.folder.as_deref()).map(|(tokenizer, template)| (Arc::new(tokenizer), Some(template)))?,
        };
        Ok(Chat { tokenizer, template, shape: model.shape, lora: model.lora, folder: model.folder, base: model.base, adapter: None })
    }

    /// The prompt's tokens as the model is given them; `raw`: without a template around it.
    fn ask(&self, prompt: &str, raw: bool) -> Result<Vec<u32>, TrainError> {
        let tokens = match self.template.as_ref().filter(|_| !raw) {
            Some(template) => template.head(&self.tokenizer, prompt)?,
            None => self.tokenizer.encode(prompt)?,
        };
        match tokens.iter().find(|t| **t as usize >= self.shape.vocab) {
            Some(token) => Err(TrainError::Other(format!("the tokenizer makes token {token}, and the model has {}", self.shape.vocab))),
            None if tokens.is_empty() => Err(TrainError::Other("the prompt has no tokens: write something".into())),
            None => Ok(tokens),
        }
    }

    /// Loads what is needed to reply to this prompt; at most as many tokens as the model has positions.
    pub fn begin(&self, s: &mut Session, prompt: &str, raw: bool, replies: usize, sampling: &Sampling) -> Result<Talk<'_>, TrainError> {
        let tokens = self.ask(prompt, raw)?;
        let left = self.shape.context.saturating_sub(tokens.len());
        if left == 0 {
            return Err(TrainError::Other(format!(
                "a prompt of {} tokens fills the model's {} positions",
                tokens.len(),
                self.shape.context
            )));
        }
        let own = self.template.as_ref().map_or(Ok(None), |t| t.stop(&self.tokenizer))?;
        let writer = Writer {
            prompts: 1,
            replies,
            time: tokens.len(),
            new_tokens: sampling.max_tokens.min(left),
            nucleus: Nucleus { temperature: sampling.temperature, top_p: sampling.top_p },
            stop: own.or(self.tokenizer.eos()),
        };
        for (name, graph) in writer.graphs(|r| Decoder { shape: &self.shape, lora: self.lora.as_ref(), base: self.base, r, rng: None }) {
            s.load(name, graph)?;
        }
        self.base.load(self.folder.as_deref(), &mut s.store)?;
        self.adapter.as_ref().map_or(Ok(()), |a| a.load(&mut s.store))?;
        // A document's end ends a reply, too: models that chat have a token of their own for that, and without a template they write this one.
        let mut stop = sampling.stop.clone();
        stop.extend(writer.stop.into_iter().chain(self.tokenizer.eos()));
        Ok(Talk {
            chat: self,
            asked: Asked::new(vec![Prompt { text: prompt.into(), tokens }], writer.time),
            writer,
            stop,
            seed: sampling.seed,
        })
    }
}

/// A prompt that is being replied to.
pub struct Talk<'a> {
    chat: &'a Chat,
    asked: Asked,
    writer: Writer,
    stop: Vec<u32>,
    seed: u64,
}

impl Talk<'_> {
    /// Writes all replies; of the first, text is handed out as soon as it is whole characters.
    pub fn write(&self, s: &mut Session, show: &mut dyn FnMut(&str)) -> Result<Vec<String>, TrainError> {
        let (tokenizer, n) = (&self.chat.tokenizer, self.writer.replies);
        let mut stream = tokenizer.stream();
        // What comes next is decoded as a continuation, so that a space between words is not lost.
        self.asked.prompts[0].tokens.iter().for_each(|&t| {
            stream.push(t);
        });
        self.writer.begin(s, &self.asked, rng_feed(self.seed, 0, 0))?;
        let (mut replies, mut open) = (vec![vec![]; n], vec![true; n]);
        for i in 0..self.writer.new_tokens {
            if i > 0 {
                self.writer.next(s)?;
            }
            for (row, token) in self.writer.newest(s)?.into_iter().enumerate() {
                open[row] &= !self.stop.contains(&token);
                if open[row] {
                    replies[row].push(token);
                    if row == 0
                        && let Some(text) = stream.push(token)
                    {
                        show(&text);
                    }
                }
            }
            if !open.contains(&true) {
                break;
            }
        }
        if let Some(text) = stream.finish() {
            show(&text);
        }
        Ok(replies.iter().map(|tokens| tokenizer.decode(tokens)).collect())
    }
}
