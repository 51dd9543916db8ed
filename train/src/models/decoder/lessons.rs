//! What is learned: generated questions, conversations in files, or plain text.

use super::Adapted;
use crate::config::DataConfig;
use crate::data::chats::{ChatTemplate, Learn};
use crate::data::replies::{Asked, FIELDS, Files, Prompt, Questions, Quiz, Read, Rows, Template, TooLong, Wording, Words};
use crate::data::{DataError, Dataset, Source, Split, Tokenizer};
use crate::models::Folder;
use crate::recipe::TrainError;
use crate::section;
use crate::text::Text;
use chrono::{NaiveDate, NaiveDateTime};
use serde_json::json;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

section! {
    /// What is learned: conversations, prompts and replies, or plain text.
    pub struct RepliesConfig {
        /// A file of conversations (.jsonl, .json, gzip of those, .parquet) or a folder of them; a folder that `kiln data prepare` made. Empty: what
        /// the recipe generates, text or questions.
        pub path: String = String::new(), [path];
        /// The field that holds the prompt, where a row is a prompt and a reply. While this and `reply` keep their defaults, the first row says of
        /// which layout the files are: messages, ShareGPT, Alpaca, or pairs.
        pub prompt: String = FIELDS[0].into();
        /// The field that holds the reply.
        pub reply: String = FIELDS[1].into();
        /// Whose turns of a conversation are learned: the assistant's, the last of those, or all.
        pub learn: Learn = Learn::Assistant;
        /// Chat template: Jinja, the path of a .jinja file, or for prompts and replies a text with {prompt}, {reply} and perhaps {eos}. Empty: the
        /// base's own.
        pub template: String = String::new();
        /// What chat templates that ask for the date are told, whenever the run is: YYYY-MM-DD.
        pub date: String = "2024-07-26".into();
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
    Files { files: Box<Files>, words: Words },
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

    /// How conversations are put to a model: as `template` says, or by the chat template in its folder.
    pub fn words(&self, tokenizer: &Tokenizer, folder: Option<&Path>) -> Result<Words, DataError> {
        self.words_at(tokenizer, folder, Some(self.date()?))
    }

    /// The same with a time that templates are told; none: the clock's.
    pub fn words_at(&self, tokenizer: &Tokenizer, folder: Option<&Path>, now: Option<NaiveDateTime>) -> Result<Words, DataError> {
        let (learn, added) = (self.learn, tokenizer.added());
        let own = |text: &str, from: &str| ChatTemplate::of_text(text, from, folder, &added, now);
        let template = match (self.template.as_str(), folder) {
            ("", None) => return Ok(Words::Pair { template: Template::fitting(tokenizer, None)?, learn }),
            ("", Some(folder)) => ChatTemplate::of_folder(folder, &added, now)?,
            (text, _) if text.contains("{{") || text.contains("{%") => own(text, "data.template")?,
            (path, _) if path.ends_with(".jinja") => {
                let wrong = |e: std::io::Error| DataError::Setting { what: "data.template", value: path.into(), need: e.to_string() };
                own(&crate::input::read_to_string(Path::new(path)).map_err(wrong)?, path)?
            }
            (text, _) => return Ok(Words::Pair { template: Template::new(text, tokenizer)?, learn }),
        };
        Ok(Words::Own { template: Box::new(template), learn })
    }

    fn date(&self) -> Result<NaiveDateTime, DataError> {
        let parsed = NaiveDate::parse_from_str(&self.date, "%Y-%m-%d").ok().and_then(|day| day.and_hms_opt(0, 0, 0));
        let wrong = || DataError::Setting { what: "data.date", value: format!("{:?}", self.date), need: "a day as 2024-07-26".into() };
        parsed.ok_or_else(wrong)
    }

    /// The conversations of `path`, as they are learned in rows of `seq` by a model of this vocabulary. There may be none to validate with.
    pub fn chats(&self, tokenizer: &Tokenizer, folder: Option<&Path>, vocab: usize, seq: usize) -> Result<(Files, Words), DataError> {
        let words = self.words(tokenizer, folder)?;
        let how = Read { prompt: &self.prompt, reply: &self.reply, seq, vocab, too_long: self.too_long, val_share: self.val_share };
        Ok((Files::gather(Path::new(&self.path), &how, &words, tokenizer)?, words))
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
        let folder = model.folder.as_deref();
        let tokenizer = Arc::new(own_tokenizer(folder)?);
        let kind = if config.path.is_empty() {
            let template = quiz_template(&config.template, &tokenizer, folder)?;
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
            let (files, words) = config.chats(&tokenizer, folder.map(|f| f.path.as_path()), vocab, seq)?;
            if let Some(reason) = files.lacks() {
                return Err(DataError::Examples { path: path.to_owned(), reason }.into());
            }
            Kind::Files { files: Box::new(files), words }
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

    /// See `Task::makes_own_rows`.
    pub fn makes_own_rows(&self) -> bool {
        matches!(&self.kind, Kind::Text(text) if text.counts_all())
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
            Kind::Files { files, words } => {
                let (rows, counts) = (self.rows(files, Split::Train)?, &files.counts);
                let mut said = format!(
                    "{}: {} examples to learn from in {} rows of {} ({:.0}% full), {} to validate with; {} cut, {} skipped; template {}; {}",
                    self.config.path,
                    files.count(Split::Train),
                    rows.len(),
                    self.seq,
                    100.0 * rows.filled(),
                    files.count(Split::Val),
                    counts.cut,
                    counts.skipped,
                    words.name(),
                    files.layout
                );
                if counts.nothing > 0 {
                    said += &format!("; {} chats have no turn to learn", counts.nothing);
                }
                if counts.split > 0 {
                    said += &format!(
                        "; the template writes earlier turns otherwise when more follow: in {} chats each turn is an example",
                        counts.split
                    );
                }
                if matches!(words, Words::Own { template, .. } if template.dated) {
                    said += &format!("; it is told the date {} (data.date)", self.config.date);
                }
                said
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
            Kind::Files { files, words } => files.longest_prompt(words, &self.tokenizer)?,
            Kind::Questions { train, .. } => train.longest_prompt()?,
        })
    }

    /// The prompts at these places of the order, which goes on for ever: those to learn from are shuffled anew in every epoch, those to validate
    /// with are always the same. In rows of `time`, at least `longest_prompt`.
    pub fn ask(&self, split: Split, places: Range<u64>, time: usize) -> Result<Asked, TrainError> {
        let none = || TrainError::Other(format!("{} is plain text: it has no prompts", self.config.path));
        let prompt = |place: u64| {
            let (text, tokens) = match &self.kind {
                Kind::Text(_) => return Err(none()),
                Kind::Files { files, words } => {
                    let turns = files.turns(split, self.seed, place);
                    (files.prompt(split, self.seed, place), words.prompt(&self.tokenizer, turns)?)
                }
                Kind::Questions { train, val } => {
                    let own = if split == Split::Train { train } else { val };
                    let text = own.prompt(place);
                    (text, own.template.head(&self.tokenizer, text)?)
                }
            };
            Ok(Prompt { text: text.into(), tokens })
        };
        Ok(Asked::new(places.map(prompt).collect::<Result<_, _>>()?, time))
    }

    /// The token that a reply ends with.
    pub fn stop(&self) -> Result<Option<u32>, TrainError> {
        Ok(match &self.kind {
            Kind::Text(_) => self.tokenizer.eos(),
            Kind::Files { words, .. } => words.stop(&self.tokenizer)?,
            Kind::Questions { train, .. } => train.template.stop(&self.tokenizer)?,
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

/// A model whose folder has no tokenizer, and at most so many tokens, is one of kiln's own that learned bytes.
const MOST_BYTES: usize = 1024;

/// A base's tokenizer; without a base that of the generated questions.
pub fn own_tokenizer(folder: Option<&Folder>) -> Result<Tokenizer, TrainError> {
    Ok(match folder {
        Some(folder) => match folder.tokenizer() {
            Some(path) => Tokenizer::from_spec(&path.display().to_string())?,
            None if folder.shape.vocab <= MOST_BYTES => Tokenizer::Byte,
            None => {
                let need = "put the model's own there (bytes are taken for tokens only where there are few)";
                return Err(TrainError::Other(format!("{} has no tokenizer.json: {need}", folder.path.display())));
            }
        },
        None => Quiz::get().tokenizer()?,
    })
}

/// How generated questions are put to a model: as `template` says, or as fits the special tokens of its tokenizer.
pub fn quiz_template(template: &str, tokenizer: &Tokenizer, folder: Option<&Folder>) -> Result<Template, TrainError> {
    let chat_template = folder.map_or(Ok(None), |f| f.chat_template())?;
    Ok(match template {
        "" => Template::fitting(tokenizer, chat_template.as_deref())?,
        text => Template::new(text, tokenizer)?,
    })
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
