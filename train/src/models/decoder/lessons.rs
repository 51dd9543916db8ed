//! What is learned: generated questions, conversations in files, or plain text.

use super::replies_config::{is_plain, not_plain};
use super::{Adapted, RepliesConfig};
use crate::config::DataConfig;
use crate::data::replies::{Asked, Files, Prompt, Questions, Quiz, Rows, Template, Wording, Words};
use crate::data::{Chosen, DataError, Paths, Shares, Source, Split, Tokenizer, percent};
use crate::models::Folder;
use crate::recipe::TrainError;
use crate::text::Text;
use serde_json::json;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

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
    Files {
        /// Of a mixture, those of each part.
        files: Vec<Files>,
        chosen: Chosen,
        words: Words,
    },
    Questions {
        train: Arc<Questions>,
        val: Arc<Questions>,
    },
    /// None were named for a base: it can be planned and timed, which takes made-up tokens, and not trained.
    Missing {
        base: String,
    },
}

/// Rows of questions to validate with.
const VALIDATION: u64 = 512;

/// Tokens of a text that a sample continues, and the most prompts that are looked at for one that fits.
const BEGINNING: usize = 16;
const LOOKED_AT: u64 = 32;

fn no_data(base: &str) -> TrainError {
    TrainError::Other(format!(
        "no data was given to fine-tune {base} on: name conversations with --data chats.jsonl, or the folder that kiln data prepare book.txt --tokenizer {base} --out FOLDER makes of a text"
    ))
}

impl Lessons {
    pub fn new(config: RepliesConfig, model: &Adapted, seq: usize, seed: u64) -> Result<Lessons, TrainError> {
        let (chosen, vocab) = (config.path.find()?, model.shape.vocab);
        if chosen.prepared()? {
            let data = DataConfig { path: config.path.clone(), ignore_tokens: config.ignore_tokens.clone() };
            let text = Text::new(data, vocab, seq, seed);
            let tokenizer = text.tokenizer()?;
            model.folder.as_ref().map_or(Ok(()), |folder| same_tokenizer(folder, &tokenizer))?;
            return Ok(Lessons { kind: Kind::Text(text), tokenizer, config, seq, seed });
        }
        if chosen.paths().any(|path| is_plain(path)) {
            let folder = model.folder.as_ref().map_or(Ok(None), |f| Ok::<_, DataError>(f.tokenizer()?.map(|_| f.path.display())))?;
            not_plain(&chosen, &folder.map_or(String::new(), |path| format!(" --tokenizer {path}")))?;
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
                seed: Questions::stream(seed, engine::mutant!("questions-of-training-validate", split, Split::Train)),
                rows,
            };
            let (train, val) = (stream(Split::Train, Questions::ENDLESS), stream(Split::Val, VALIDATION));
            train.check()?;
            Kind::Questions { train: Arc::new(train), val: Arc::new(val) }
        } else {
            let (files, words) = config.chats(&chosen, &tokenizer, folder.map(|f| f.path.as_path()), (vocab, seq))?;
            for (files, part) in files.iter().zip(&chosen.parts) {
                files.lacks().map_or(Ok(()), |reason| Err(DataError::Examples { path: part.path(), reason }))?;
            }
            Kind::Files { files, chosen, words }
        };
        Ok(Lessons { kind, tokenizer, config, seq, seed })
    }

    /// The same, but without a path generated text.
    pub fn of_text(config: RepliesConfig, model: &Adapted, seq: usize, seed: u64) -> Result<Lessons, TrainError> {
        if !config.path.is_empty() {
            return Lessons::new(config, model, seq, seed);
        }
        let tokenizer = model.folder.as_ref().map_or(Ok(None), |folder| folder.tokenizer())?;
        if let (Some(folder), Some(tokenizer @ Tokenizer::Json(_))) = (&model.folder, tokenizer) {
            let base = folder.path.display().to_string();
            return Ok(Lessons { kind: Kind::Missing { base }, tokenizer: tokenizer.into(), config, seq, seed });
        }
        let data = DataConfig { path: Paths::default(), ignore_tokens: config.ignore_tokens.clone() };
        let text = Text::new(data, model.shape.vocab, seq, seed);
        let tokenizer = text.tokenizer()?;
        Ok(Lessons { kind: Kind::Text(text), tokenizer, config, seq, seed })
    }

    /// Refuses to train a base that no data was named for: text is generated as bytes, which are not its tokens.
    pub fn check_data(config: &RepliesConfig, base: &str) -> Result<(), TrainError> {
        let missing = config.path.is_empty() && !base.is_empty();
        match missing && matches!(own_tokenizer(Some(&Folder::open(Path::new(base))?))?, Tokenizer::Json(_)) {
            true => Err(no_data(base)),
            false => Ok(()),
        }
    }

    /// Whether rows hold several examples, or padding.
    pub fn has_places(&self) -> bool {
        !matches!(self.kind, Kind::Text(_) | Kind::Missing { .. })
    }

    /// See `Task::without_validation`.
    pub fn without_validation(&self) -> Result<Option<String>, TrainError> {
        match &self.kind {
            Kind::Text(text) => text.without_validation(),
            Kind::Files { files, .. } => Ok(without_validation(files)),
            Kind::Questions { .. } | Kind::Missing { .. } => Ok(None),
        }
    }

    /// See `Task::makes_own_rows`.
    pub fn makes_own_rows(&self) -> bool {
        matches!(&self.kind, Kind::Text(text) if text.counts_all())
    }

    pub fn source(&self, split: Split) -> Result<Arc<dyn Source>, TrainError> {
        Ok(match &self.kind {
            Kind::Text(text) => text.source(split == Split::Train)?,
            Kind::Files { files, chosen, .. } => {
                // Of parts that have nothing to validate with, the others do.
                let own = files.iter().filter(|files| split == Split::Train || files.count(split) > 0);
                let rows = own.map(|files| Ok(Arc::new(self.rows(files, split)?) as Arc<dyn Source>));
                chosen.source(split, self.seed, rows.collect::<Result<_, DataError>>()?)?
            }
            Kind::Questions { train, val } => {
                if split == Split::Train {
                    train.clone()
                } else {
                    val.clone()
                }
            }
            Kind::Missing { base } => return Err(no_data(base)),
        })
    }

    fn rows(&self, files: &Files, split: Split) -> Result<Rows, DataError> {
        files.rows(split, self.seq, self.config.pack, self.seed, self.config.ignore_tokens.clone())
    }

    /// Rows of an epoch, where there are epochs.
    pub fn epoch(&self) -> Option<u64> {
        match &self.kind {
            // A mixture has none.
            Kind::Files { files, .. } => match &files[..] {
                [files] => self.rows(files, Split::Train).ok().map(|rows| rows.len()),
                _ => None,
            },
            Kind::Text(text) => text.epoch(),
            _ => None,
        }
    }

    /// The loss that no model can go below, where it is known.
    pub fn floor(&self) -> Option<f64> {
        match &self.kind {
            Kind::Text(text) => text.source(true).ok()?.entropy_floor(),
            Kind::Files { .. } | Kind::Missing { .. } => None,
            Kind::Questions { val, .. } => val.floor(VALIDATION).ok().flatten(),
        }
    }

    /// For people: what was found.
    pub fn describe(&self) -> Result<String, TrainError> {
        Ok(match &self.kind {
            Kind::Text(text) => text.describe()?,
            Kind::Missing { base } => return Err(no_data(base)),
            Kind::Questions { train, .. } => format!("generated questions, template {}", train.template.name),
            Kind::Files { files, chosen, words } => {
                let mut said = vec![];
                for (files, part) in files.iter().zip(&chosen.parts) {
                    let share = if chosen.is_mixture() { format!("{} from ", percent(part.share)) } else { String::new() };
                    said.push(format!("{share}{}: {}", part.name, self.describe_files(files, words)?));
                }
                if matches!(words, Words::Own { template, .. } if template.dated) {
                    said.push(format!("it is told the date {} (data.date)", self.config.date));
                }
                said.join("; ")
            }
        })
    }

    fn describe_files(&self, files: &Files, words: &Words) -> Result<String, DataError> {
        let (rows, counts) = (self.rows(files, Split::Train)?, &files.counts);
        let mut said = format!(
            "{} examples to learn from in {} rows of {} ({:.0}% full), {} to validate with; {} cut, {} skipped; template {}; {}",
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
        Ok(said)
    }

    /// What a checkpoint notes. Generated questions are described by its config.
    pub fn identity(&self) -> Result<serde_json::Value, TrainError> {
        Ok(match &self.kind {
            Kind::Text(text) => {
                let mut identity = text.identity()?;
                identity["plain"] = true.into();
                identity
            }
            Kind::Files { files, chosen, .. } => {
                let data = chosen.fingerprint(&files.iter().map(Files::fingerprint).collect::<Vec<_>>())?;
                json!({ "tokenizer": self.fingerprint(), "data": format!("{data:016x}") })
            }
            Kind::Questions { .. } | Kind::Missing { .. } => json!({ "tokenizer": self.fingerprint(), "data": null }),
        })
    }

    /// What a checkpoint holds; the base's own tokenizer is in the base's folder.
    pub fn kept(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        match &self.kind {
            Kind::Text(text) => text.kept(),
            Kind::Files { .. } | Kind::Questions { .. } | Kind::Missing { .. } => Ok(vec![]),
        }
    }

    fn fingerprint(&self) -> String {
        format!("{:016x}", self.tokenizer.fingerprint())
    }

    /// Prompts of an epoch, to sample replies to; none in plain text.
    pub fn prompts(&self, split: Split) -> u64 {
        match &self.kind {
            Kind::Text(_) | Kind::Missing { .. } => 0,
            Kind::Files { files, .. } => files.iter().map(|files| files.prompts(split) as u64).sum(),
            Kind::Questions { .. } => Questions::ENDLESS,
        }
    }

    /// Tokens of the longest prompt.
    pub fn longest_prompt(&self) -> Result<usize, TrainError> {
        Ok(match &self.kind {
            Kind::Text(_) | Kind::Missing { .. } => 0,
            Kind::Files { files, words, .. } => {
                let longest = files.iter().map(|files| files.longest_prompt(words, &self.tokenizer));
                longest.collect::<Result<Vec<_>, _>>()?.into_iter().max().unwrap_or(0)
            }
            Kind::Questions { train, .. } => train.longest_prompt()?,
        })
    }

    /// The prompts at these places of the order, which goes on for ever: those to learn from are shuffled anew in every epoch, those to validate
    /// with are always the same. In rows of `time`, at least `longest_prompt`.
    pub fn ask(&self, split: Split, places: Range<u64>, time: usize) -> Result<Asked, TrainError> {
        Ok(Asked::new(places.map(|place| self.prompt(split, place)).collect::<Result<_, _>>()?, time))
    }

    fn prompt(&self, split: Split, place: u64) -> Result<Prompt, TrainError> {
        let (text, tokens) = match &self.kind {
            Kind::Text(_) | Kind::Missing { .. } => {
                return Err(TrainError::Other(format!("{} is plain text: it has no prompts", self.config.path)));
            }
            Kind::Files { files, chosen, words } => {
                let (files, place) = self.place(files, chosen, split, place)?;
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
    }

    /// Which files' prompt is at a place, and which of theirs: of a mixture by weight, or to validate with one part behind the other.
    fn place<'a>(&self, files: &'a [Files], chosen: &Chosen, split: Split, place: u64) -> Result<(&'a Files, u64), DataError> {
        // A part may ask nothing: its conversations begin with the model's turn.
        let (own, weights): (Vec<&Files>, Vec<f64>) =
            files.iter().zip(&chosen.parts).filter(|(files, _)| files.prompts(split) > 0).map(|(files, part)| (files, part.share)).unzip();
        if let [one] = own[..] {
            return Ok((one, place));
        }
        if split == Split::Train {
            let wrong = |need| DataError::Setting { what: "data.path", value: chosen.to_string(), need };
            let (part, place) = Shares::new(&weights, self.seed).map_err(wrong)?.at(place);
            return Ok((own[part], place));
        }
        let mut left = place % own.iter().map(|files| files.prompts(split) as u64).sum::<u64>().max(1);
        for files in own {
            match left.checked_sub(files.prompts(split) as u64) {
                Some(rest) => left = rest,
                None => return Ok((files, left)),
            }
        }
        Err(DataError::Examples { path: chosen.to_string().into(), reason: "no conversation in it has a prompt".into() })
    }

    /// What a sample of the model begins with: a prompt that fits into so many positions, or the first tokens of a text; of what is kept for validation,
    /// where that is something.
    pub fn beginning(&self, context: usize) -> Result<Option<Prompt>, TrainError> {
        let split = if self.without_validation()?.is_none() { Split::Val } else { Split::Train };
        if let Kind::Text(text) = &self.kind {
            let ids = text.source(split == Split::Train)?.item(0)?.ids;
            let tokens: Vec<u32> = ids.iter().take(BEGINNING.min(context / 2)).map(|&t| t as u32).collect();
            return Ok(Some(Prompt { text: self.tokenizer.decode(&tokens), tokens }).filter(|p| !p.tokens.is_empty()));
        }
        for place in 0..self.prompts(split).min(LOOKED_AT) {
            let prompt = self.prompt(split, place)?;
            if prompt.tokens.len() < context {
                return Ok(Some(prompt));
            }
        }
        Ok(None)
    }

    /// How the model that learns this is asked; none where it continues a text.
    pub fn words(&self, folder: Option<&Folder>) -> Result<Option<Words>, TrainError> {
        Ok(match &self.kind {
            Kind::Text(_) | Kind::Missing { .. } => None,
            Kind::Files { .. } => Some(self.config.words(&self.tokenizer, folder.map(|f| f.path.as_path()))?),
            Kind::Questions { train, .. } => Some(Words::Pair { template: train.template.clone(), learn: self.config.learn }),
        })
    }

    /// The token that a reply ends with.
    pub fn stop(&self) -> Result<Option<u32>, TrainError> {
        Ok(match &self.kind {
            Kind::Text(_) | Kind::Missing { .. } => self.tokenizer.eos(),
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

/// Why no part has anything to validate with, where that is so.
fn without_validation(files: &[Files]) -> Option<String> {
    let reasons: Option<Vec<String>> = files.iter().map(Files::without_validation).collect();
    reasons.map(|mut all| {
        all.dedup();
        all.join("; ")
    })
}

/// A base's tokenizer; without a base that of the generated questions.
pub fn own_tokenizer(folder: Option<&Folder>) -> Result<Tokenizer, TrainError> {
    Ok(match folder {
        Some(folder) => folder.tokenizer()?.unwrap_or(Tokenizer::Byte),
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
    // A data set with a tokenizer.json of its own was prepared for the model by somebody who named one.
    if Tokenizer::of_folder(&folder.path)?.is_none() && !matches!(data, Tokenizer::Byte) {
        return Ok(());
    }
    let own = folder.tokenizer()?.unwrap_or(Tokenizer::Byte);
    match engine::mutant!("data-of-another-tokenizer", own.fingerprint() == data.fingerprint(), true) {
        true => Ok(()),
        false => Err(TrainError::Other(format!(
            "the data's tokenizer ({}) is not the base's: prepare it with kiln data prepare --tokenizer {}",
            data.name(),
            folder.path.display()
        ))),
    }
}
