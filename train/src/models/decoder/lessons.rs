//! What is learned: generated questions, JSONL of prompts and replies, or plain text.

use super::Adapted;
use crate::config::DataConfig;
use crate::data::replies::{Asked, Files, Prompt, Questions, Quiz, Read, Rows, Template, TooLong};
use crate::data::{DataError, Dataset, Source, Split, Tokenizer};
use crate::models::Folder;
use crate::recipe::TrainError;
use crate::section;
use crate::text::Text;
use serde_json::json;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

section! {
    /// What is learned: prompts and replies, or plain text.
    pub struct RepliesConfig {
        /// A .jsonl file or a folder of them; a folder that `kiln data prepare` made. Empty: what the recipe generates, text or questions.
        pub path: String = String::new(), [path];
        /// The field of a JSONL object that holds the prompt.
        pub prompt: String = "prompt".into();
        /// The field of a JSONL object that holds the reply.
        pub reply: String = "reply".into();
        /// Chat template: text with {prompt}, {reply} and perhaps {eos}. Empty: by the special tokens of the base's tokenizer.
        pub template: String = String::new();
        /// Whether a row holds several examples, which do not attend to each other, or one and padding.
        pub pack: bool = true;
        /// What happens to an example that is longer than a row.
        pub too_long: TooLong = TooLong::Cut;
        /// Share of the prompts in JSONL files that is kept for validation.
        pub val_share: f64 = 0.05, in 0.0..1.0;
        /// For generated questions: each way to reply is this many times as likely as the one before it.
        pub skew: f64 = 0.6, in 1e-38..=1.0;
        /// Tokens that are not trained on when they are the target.
        pub ignore_tokens: Vec<u32> = vec![];
    }
}

/// A run's data. Everything about it is a pure function of the config and of the files.
pub struct Lessons {
    kind: Kind,
    pub tokenizer: Arc<Tokenizer>,
    config: RepliesConfig,
    seq: usize,
    seed: u64,
}

enum Kind {
    Text(Text),
    Files { files: Files, template: Template },
    Questions { train: Arc<Questions>, val: Arc<Questions> },
}

/// Rows of questions to validate with.
const VALIDATION: u64 = 512;

/// Whether this is a file of plain text, by its name.
fn is_plain(path: &Path) -> bool {
    path.is_file() && ["txt", "text", "md"].iter().any(|e| path.extension().is_some_and(|own| own.eq_ignore_ascii_case(e)))
}

impl RepliesConfig {
    /// Of a model without a base: a prepared data set's tokenizer, or that of the generated questions.
    pub fn tokenizer(&self) -> Result<Tokenizer, TrainError> {
        let path = Path::new(&self.path);
        Ok(match path.join(Dataset::FILE).exists() {
            true => Dataset::open(path)?.load_tokenizer(path)?,
            false => Quiz::get().tokenizer()?,
        })
    }

    /// Refuses a path with nothing to learn from, before there is a model.
    pub fn check(&self) -> Result<(), DataError> {
        let path = Path::new(&self.path);
        if self.path.is_empty() || path.join(Dataset::FILE).exists() {
            return Ok(());
        }
        match is_plain(path) {
            true => Err(DataError::not_prepared(path, "")),
            false => Files::check(path, &self.prompt, &self.reply),
        }
    }
}

impl Lessons {
    pub fn new(config: RepliesConfig, model: &Adapted, seq: usize, seed: u64) -> Result<Lessons, TrainError> {
        let (path, vocab) = (Path::new(&config.path), model.shape.vocab);
        if path.join(Dataset::FILE).exists() {
            let data = DataConfig { path: config.path.clone(), ignore_tokens: config.ignore_tokens.clone() };
            let text = Text::new(data, vocab, seq, seed);
            let tokenizer = text.tokenizer()?;
            model.folder.as_ref().map_or(Ok(()), |folder| same_tokenizer(folder, &tokenizer))?;
            return Ok(Lessons { kind: Kind::Text(text), tokenizer, config, seq, seed });
        }
        if is_plain(path) {
            let own = model.folder.as_ref().and_then(|f| f.tokenizer()).map_or(String::new(), |t| format!(" --tokenizer {}", t.display()));
            return Err(DataError::not_prepared(path, &own).into());
        }
        let (tokenizer, template) = words(&config.template, model.folder.as_deref())?;
        let tokenizer = Arc::new(tokenizer);
        let kind = if config.path.is_empty() {
            let stream = |split: Split, rows: u64| Questions {
                tokenizer: tokenizer.clone(),
                template: template.clone(),
                seq,
                vocab,
                pack: config.pack,
                too_long: config.too_long,
                skew: config.skew,
                whole: false,
                ignore: config.ignore_tokens.clone(),
                seed: Questions::stream(seed, split),
                rows,
            };
            let (train, val) = (stream(Split::Train, Questions::ENDLESS), stream(Split::Val, VALIDATION));
            train.check()?;
            Kind::Questions { train: Arc::new(train), val: Arc::new(val) }
        } else {
            let RepliesConfig { prompt, reply, too_long, val_share, .. } = &config;
            let how = Read { prompt, reply, seq, vocab, too_long: *too_long, val_share: *val_share };
            Kind::Files { files: Files::read(path, &how, &template, &tokenizer)?, template }
        };
        Ok(Lessons { kind, tokenizer, config, seq, seed })
    }

    /// The same, but without a path generated text.
    pub fn of_text(config: RepliesConfig, model: &Adapted, seq: usize, seed: u64) -> Result<Lessons, TrainError> {
        if !config.path.is_empty() {
            return Lessons::new(config, model, seq, seed);
        }
        let data = DataConfig { path: String::new(), ignore_tokens: config.ignore_tokens.clone() };
        let text = Text::new(data, model.shape.vocab, seq, seed);
        let tokenizer = text.tokenizer()?;
        model.folder.as_ref().map_or(Ok(()), |folder| same_tokenizer(folder, &tokenizer))?;
        Ok(Lessons { kind: Kind::Text(text), tokenizer, config, seq, seed })
    }

    /// Whether rows hold several examples, or padding.
    pub fn has_places(&self) -> bool {
        !matches!(self.kind, Kind::Text(_))
    }

    pub fn source(&self, split: Split) -> Result<Arc<dyn Source>, TrainError> {
        Ok(match &self.kind {
            Kind::Text(text) => text.source(split == Split::Train)?,
            Kind::Files { files, .. } => Arc::new(self.rows(files, split)?),
            Kind::Questions { train, val } => {
                if split == Split::Train {
                    train.clone()
                } else {
                    val.clone()
                }
            }
        })
    }

    fn rows(&self, files: &Files, split: Split) -> Result<Rows, DataError> {
        files.rows(split, self.seq, self.config.pack, self.seed, self.config.ignore_tokens.clone())
    }

    /// Rows of an epoch, where there are epochs.
    pub fn epoch(&self) -> Option<u64> {
        match &self.kind {
            Kind::Files { files, .. } => self.rows(files, Split::Train).ok().map(|rows| rows.len()),
            _ => None,
        }
    }

    /// The loss that no model can go below, where it is known.
    pub fn floor(&self) -> Option<f64> {
        match &self.kind {
            Kind::Text(text) => text.source(false).ok()?.entropy_floor(),
            Kind::Files { .. } => None,
            Kind::Questions { val, .. } => val.floor(VALIDATION).ok().flatten(),
        }
    }

    /// For people: what was found.
    pub fn describe(&self) -> Result<String, TrainError> {
        Ok(match &self.kind {
            Kind::Text(text) if text.data.path.is_empty() => "generated text".into(),
            Kind::Text(text) => format!("{}: plain text", text.data.path),
            Kind::Questions { train, .. } => format!("generated questions, template {}", train.template.name),
            Kind::Files { files, template } => {
                let rows = self.rows(files, Split::Train)?;
                format!(
                    "{}: {} examples to learn from in {} rows of {} ({:.0}% full), {} to validate with; {} cut, {} skipped; template {}",
                    self.config.path,
                    files.count(Split::Train),
                    rows.len(),
                    self.seq,
                    100.0 * rows.filled(),
                    files.count(Split::Val),
                    files.counts.cut,
                    files.counts.skipped,
                    template.name
                )
            }
        })
    }

    /// What a checkpoint notes. Generated questions are described by its config.
    pub fn identity(&self) -> Result<serde_json::Value, TrainError> {
        Ok(match &self.kind {
            Kind::Text(text) => {
                let mut identity = text.identity()?;
                identity["plain"] = true.into();
                identity
            }
            Kind::Files { files, .. } => json!({ "tokenizer": self.fingerprint(), "data": format!("{:016x}", files.fingerprint()) }),
            Kind::Questions { .. } => json!({ "tokenizer": self.fingerprint(), "data": null }),
        })
    }

    /// What a checkpoint holds; the base's own tokenizer is in the base's folder.
    pub fn kept(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        match &self.kind {
            Kind::Text(text) => text.kept(),
            Kind::Files { .. } | Kind::Questions { .. } => Ok(vec![]),
        }
    }

    fn fingerprint(&self) -> String {
        format!("{:016x}", self.tokenizer.fingerprint())
    }

    /// Prompts of an epoch, to sample replies to; none in plain text.
    pub fn prompts(&self, split: Split) -> u64 {
        match &self.kind {
            Kind::Text(_) => 0,
            Kind::Files { files, .. } => files.prompts(split) as u64,
            Kind::Questions { .. } => Questions::ENDLESS,
        }
    }

    /// Tokens of the longest prompt.
    pub fn longest_prompt(&self) -> Result<usize, TrainError> {
        Ok(match &self.kind {
            Kind::Text(_) => 0,
            Kind::Files { files, .. } => files.longest_prompt(),
            Kind::Questions { train, .. } => train.longest_prompt()?,
        })
    }

    /// The prompts at these places of the order, which goes on for ever: those to learn from are shuffled anew in every epoch, those to validate
    /// with are always the same. In rows of `time`, at least `longest_prompt`.
    pub fn ask(&self, split: Split, places: Range<u64>, time: usize) -> Result<Asked, TrainError> {
        let none = || TrainError::Other(format!("{} is plain text: it has no prompts", self.config.path));
        let template = self.template().ok_or_else(none)?;
        let prompt = |place: u64| {
            let text = match &self.kind {
                Kind::Text(_) => return Err(none()),
                Kind::Files { files, .. } => files.prompt(split, self.seed, place),
                Kind::Questions { train, val } => if split == Split::Train { train } else { val }.prompt(place),
            };
            Ok(Prompt { text: text.into(), tokens: template.head(&self.tokenizer, text)? })
        };
        Ok(Asked::new(places.map(prompt).collect::<Result<_, _>>()?, time))
    }

    fn template(&self) -> Option<&Template> {
        match &self.kind {
            Kind::Text(_) => None,
            Kind::Files { template, .. } => Some(template),
            Kind::Questions { train, .. } => Some(&train.template),
        }
    }

    /// The token that a reply ends with.
    pub fn stop(&self) -> Result<Option<u32>, TrainError> {
        Ok(match self.template() {
            Some(template) => template.stop(&self.tokenizer)?,
            None => self.tokenizer.eos(),
        })
    }

    /// A reply's tokens as text, up to the one that ends it.
    pub fn text(&self, reply: &[u32]) -> Result<String, TrainError> {
        let stop = self.stop()?;
        let end = reply.iter().position(|t| Some(*t) == stop).unwrap_or(reply.len());
        Ok(self.tokenizer.decode(&reply[..end]).trim().into())
    }

    /// Whether a reply is right, where that can be told.
    pub fn is_right(&self, prompt: &str, reply: &str) -> Option<bool> {
        match &self.kind {
            Kind::Questions { .. } => Some(Quiz::get().find(prompt)?.is_right(reply)),
            _ => None,
        }
    }
}

/// A base's tokenizer, and how prompts and replies are put to it: as `template` says, or as fits its special tokens.
pub fn words(template: &str, folder: Option<&Folder>) -> Result<(Tokenizer, Template), TrainError> {
    let tokenizer = match folder {
        Some(folder) => match folder.tokenizer() {
            Some(path) => Tokenizer::from_spec(&path.display().to_string())?,
            None => Tokenizer::Byte,
        },
        None => Quiz::get().tokenizer()?,
    };
    let chat_template = folder.map_or(Ok(None), |f| f.chat_template())?;
    let template = match template {
        "" => Template::fitting(&tokenizer, chat_template.as_deref())?,
        text => Template::new(text, &tokenizer)?,
    };
    Ok((tokenizer, template))
}

/// Tokens mean what the base learnt them to mean.
fn same_tokenizer(folder: &Folder, data: &Tokenizer) -> Result<(), TrainError> {
    let Some(path) = folder.tokenizer() else { return Ok(()) };
    let own = Tokenizer::from_spec(&path.display().to_string())?;
    match own.fingerprint() == data.fingerprint() {
        true => Ok(()),
        false => Err(TrainError::Other(format!(
            "the data's tokenizer ({}) is not the base's: prepare it with kiln data prepare --tokenizer {}",
            data.name(),
            path.display()
        ))),
    }
}
