//! Sources and what is written of them, as recipes with an encoder and a decoder read them: running text, prompts with replies and conversations, or rows of
//! tokens; and what such a model is asked when it writes.

use crate::checkpoint::Checkpoint;
use crate::config::{ConfigError, DataConfig};
use crate::data::chats::{ChatError, Layout, Learn, Message};
use crate::data::replies::{FIELDS, Files, Prompt, Read, TooLong, Words, usual_turns};
use crate::data::seq2seq::{Frame, Pairs, Triples, Windows};
use crate::data::{Chosen, DataError, Part, Paths, Prepared, Source, Split, Tokenizer, chats, percent};
use crate::models::decoder::{RepliesConfig, is_plain};
use crate::recipe::TrainError;
use crate::section;
use crate::text::{TOKENIZER, Text};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

section! {
    /// What is learned: running text, prompts and replies, conversations, or rows of tokens.
    pub struct SourceTargetConfig {
        /// Folders of `kiln data prepare`; files of conversations or pairs (.jsonl, .json, .gz, .parquet) or of rows of tokens; folders or patterns of
        /// either. Several are one set, with weights a mixture.
        pub path: Paths = Paths::default(), [path many];
        /// The tokenizer of conversations and of rows of tokens: a tokenizer.json, or a model's folder, whose chat template is then used. Empty: bytes.
        pub tokenizer: String = String::new(), [path];
        /// The field that holds the prompt, where a row is a prompt and a reply. While this and `reply` keep their defaults, the first row says of
        /// which layout the files are: messages, ShareGPT, Alpaca, or pairs.
        pub prompt: String = FIELDS[0].into();
        /// The field that holds the reply.
        pub reply: String = FIELDS[1].into();
        /// Which turns of a conversation are written, each behind all turns before it: the assistant's, or the last of those.
        pub learn: Learn = Learn::Assistant;
        /// Chat template: Jinja, the path of a .jinja file, a name (chatml, turns), or for prompts and replies a text with {prompt}, {reply} and perhaps
        /// {eos}. Empty: the folder's, or what fits the tokenizer.
        pub template: String = String::new();
        /// What chat templates that ask for the date are told, whenever the run is: YYYY-MM-DD.
        pub date: String = "2024-07-26".into();
        /// Share of the prompts, or sources, in files that is kept for validation. 0: nothing is evaluated.
        pub val_share: f64 = 0.05, in 0.0..1.0;
        /// Tokens that are not trained on when they are the target.
        pub ignore_tokens: Vec<u32> = vec![];
    }
}

/// A run's data. Everything about it is a pure function of the config and of the files.
pub struct SourceTarget {
    pub tokenizer: Arc<Tokenizer>,
    chosen: Chosen,
    kinds: Vec<Kind>,
    asked: Asked,
    config: SourceTargetConfig,
    frame: Frame,
    seed: u64,
    /// Of the data, as it was read.
    fingerprint: u64,
    /// The template's name, and whether the tokenizer's folder is asked for its special tokens, or for all of it.
    template: Option<(String, bool)>,
}

enum Kind {
    Windows(Prepared),
    Files(Box<Files>),
    Triples(Triples),
}

/// What the model that learns this is given to write, and where it ends.
pub struct Asked {
    pub tokenizer: Arc<Tokenizer>,
    /// None: a prompt is the source as it is.
    words: Option<Words>,
    /// What the decoder reads first; none: the last token of the source.
    pub begin: Option<u32>,
    /// Tokens of a source.
    source: usize,
    /// Rows of tokens, of which no tokenizer was named.
    unnamed: bool,
}

impl Asked {
    /// The source of a prompt: its last tokens, if it is too long.
    pub fn head(&self, prompt: &str) -> Result<Vec<u32>, TrainError> {
        self.turns(&[Message::new("user", prompt)], false)
    }

    /// The same of a conversation, the user's turn last.
    pub fn turns(&self, messages: &[Message], think: bool) -> Result<Vec<u32>, TrainError> {
        if self.unnamed {
            let how = "name the tokenizer that they were made with: data.tokenizer=FOLDER (--set, when it is trained)";
            return Err(TrainError::Other(format!("this model learned rows of tokens, and nothing says what they mean ({how})")));
        }
        let tokens = match &self.words {
            Some(words) => words.asked(&self.tokenizer, messages, think)?,
            None => self.tokenizer.encode(&messages.last().map_or(Ok(String::new()), Message::text).map_err(TrainError::Other)?)?,
        };
        if tokens.is_empty() {
            return Err(TrainError::Other("the prompt has no tokens: write something".into()));
        }
        Ok(tokens[tokens.len().saturating_sub(self.source)..].to_vec())
    }

    /// The token that ends what is written.
    pub fn stop(&self) -> Result<Option<u32>, TrainError> {
        let own = self.words.as_ref().map_or(Ok(None), |words| words.stop(&self.tokenizer))?;
        Ok(own.or(self.tokenizer.eos()))
    }

    /// Whether there is a chat template, so that a conversation can go on.
    pub fn has_turns(&self) -> bool {
        matches!(self.words, Some(Words::Own { .. }))
    }

    /// Of a run, also where its data is not: what its checkpoint notes says how it was asked.
    pub fn of_run(config: &SourceTargetConfig, found: &Checkpoint, vocab: usize, source: usize) -> Result<Asked, TrainError> {
        let identity = &found.meta["identity"];
        let unnamed = identity["unnamed"] == true;
        let data = DataConfig { path: config.path.clone(), ignore_tokens: vec![] };
        let tokenizer = match unnamed {
            true => Arc::new(Tokenizer::Byte),
            false => Text::new(data, vocab, source, 0).take_tokenizer(found)?,
        };
        let words = match identity["template"].as_str() {
            None => None,
            Some(template) => {
                let replies = config.replies(template);
                Some(replies.words_at(&tokenizer, config.folder().filter(|_| identity["template_of_folder"] == true), None)?)
            }
        };
        let begin = identity["first"].as_u64().and_then(|id| u32::try_from(id).ok());
        Ok(engine::mutant!(
            "replies-begin-otherwise",
            Asked { tokenizer, words, begin, source, unnamed },
            Asked { tokenizer, words, begin: None, source, unnamed }
        ))
    }
}

impl SourceTargetConfig {
    /// The tokenizer of the data.
    pub fn tokenizer(&self) -> Result<Tokenizer, TrainError> {
        Ok(self.tokenizer_of(&self.path.find()?)?)
    }

    fn tokenizer_of(&self, chosen: &Chosen) -> Result<Tokenizer, DataError> {
        let mut named =
            (!self.tokenizer.is_empty()).then(|| Tokenizer::from_spec(&self.tokenizer)).transpose()?.map(|t| (self.tokenizer.clone(), t));
        for part in &chosen.parts {
            if !part.prepared()? {
                continue;
            }
            let own = Prepared::of(part.alone())?.tokenizer()?;
            match &named {
                Some((first, tokenizer)) if tokenizer.fingerprint() != own.fingerprint() => {
                    return Err(DataError::Together { path: part.path(), what: "another tokenizer", first: first.into() });
                }
                // What was prepared says how documents begin and end.
                _ => named = Some((part.name.clone(), own)),
            }
        }
        Ok(named.map_or(Tokenizer::Byte, |(_, tokenizer)| tokenizer))
    }

    /// The tokenizer's folder, where one was named.
    fn folder(&self) -> Option<&Path> {
        Some(Path::new(&self.tokenizer)).filter(|path| !self.tokenizer.is_empty() && path.is_dir())
    }

    fn replies(&self, template: &str) -> RepliesConfig {
        RepliesConfig { template: template.into(), learn: self.learn, date: self.date.clone(), ..RepliesConfig::default() }
    }

    /// How conversations of these layouts are put to the model, the template's name, and whether it is the folder's own.
    fn words(&self, tokenizer: &Tokenizer, layouts: &[Layout]) -> Result<(Words, String, bool), DataError> {
        if self.learn == Learn::All {
            let need = "what is written are the model's turns, behind all turns before them: use assistant or last".into();
            return Err(DataError::Setting { what: "data.learn", value: "all".into(), need });
        }
        if !self.template.is_empty() {
            return Ok((self.replies(&self.template).words(tokenizer, self.folder())?, self.template.clone(), self.folder().is_some()));
        }
        if let Some(folder) = self.folder() {
            match self.replies("").words(tokenizer, Some(folder)) {
                Err(DataError::Chats(ChatError::NoTemplate { .. })) => {}
                other => return Ok((other?, String::new(), true)),
            }
        }
        // Turns need a template that has several; a prompt and its reply are one text with two places.
        let turns = layouts.iter().any(|layout| !matches!(layout, Layout::Pair { .. }));
        let name = match (turns, usual_turns(tokenizer)) {
            (false, _) => "",
            (true, Some(name)) => name,
            (true, None) => {
                let need = format!("the tokenizer {} has no token that ends a turn: write a template in Jinja", tokenizer.name());
                return Err(DataError::Setting { what: "data.template", value: "\"\"".into(), need });
            }
        };
        Ok((self.replies(name).words(tokenizer, None)?, name.into(), false))
    }
}

/// What a part of the data is, before it is read.
enum Is {
    Prepared,
    Triples,
    Rows(Layout),
}

fn look(part: &Part, config: &SourceTargetConfig) -> Result<Is, DataError> {
    if part.prepared()? {
        return Ok(Is::Prepared);
    }
    if let Some(plain) = part.paths.iter().find(|path| is_plain(path)) {
        return Err(DataError::not_prepared(plain, ""));
    }
    let files = chats::list(&part.paths)?;
    Ok(match Triples::are(&files)? {
        true => Is::Triples,
        false => Is::Rows(Files::layout(&files, &config.prompt, &config.reply)?),
    })
}

impl SourceTarget {
    /// The data that `config.path` names, which is not empty, for a model of this vocabulary that reads `source` tokens and writes `seq`.
    pub fn new(config: SourceTargetConfig, vocab: usize, (source, seq): (usize, usize), seed: u64) -> Result<SourceTarget, TrainError> {
        let chosen = config.path.find()?;
        let looks: Vec<Is> = chosen.parts.iter().map(|part| look(part, &config)).collect::<Result<_, _>>()?;
        let tokenizer = Arc::new(config.tokenizer_of(&chosen)?);
        let unnamed = config.tokenizer.is_empty() && looks.iter().all(|is| matches!(is, Is::Triples));
        if !unnamed && tokenizer.vocab() > vocab {
            return Err(ConfigError::Invalid(format!(
                "tokenizer {} has {} tokens, but model.vocab = {vocab}: set model.vocab to at least that, or to 0 to take it from the data",
                tokenizer.name(),
                tokenizer.vocab()
            ))
            .into());
        }
        let layouts: Vec<Layout> =
            looks.iter().filter_map(|is| if let Is::Rows(layout) = is { Some(layout.clone()) } else { None }).collect();
        let words = if layouts.is_empty() { None } else { Some(config.words(&tokenizer, &layouts)?) };
        let mut frame = Frame { source, seq, begin: tokenizer.begin().id, ignore: config.ignore_tokens.clone() };
        frame.check()?;
        let mut kinds = vec![];
        for (part, is) in chosen.parts.iter().zip(&looks) {
            let lacks = |reason: Option<String>| reason.map_or(Ok(()), |reason| Err(DataError::Examples { path: part.path(), reason }));
            kinds.push(match (is, &words) {
                (Is::Rows(_), Some((words, ..))) => {
                    // Every example is whole: each of its turns is cut as its own item needs it.
                    let how = Read {
                        prompt: &config.prompt,
                        reply: &config.reply,
                        seq: usize::MAX,
                        vocab,
                        too_long: TooLong::Refuse,
                        val_share: config.val_share,
                    };
                    let files = Files::gather(&part.paths, &how, words, &tokenizer)?;
                    lacks(files.lacks())?;
                    Kind::Files(Box::new(files))
                }
                (Is::Triples, _) => {
                    let files = chats::list(&part.paths).map_err(DataError::from)?;
                    let triples = Triples::read(&files, frame.clone(), vocab, config.val_share)?;
                    lacks(triples.lacks())?;
                    Kind::Triples(triples)
                }
                _ => Kind::Windows(Prepared::of(part.alone())?),
            });
        }
        // Rows of tokens say themselves what the decoder reads first.
        if let [Kind::Triples(triples)] = &kinds[..] {
            frame.begin = triples.begin().or(frame.begin);
        }
        let fingerprints = kinds.iter().map(|kind| match kind {
            Kind::Windows(prepared) => prepared.checksum(),
            Kind::Files(files) => Ok(files.fingerprint()),
            Kind::Triples(triples) => Ok(triples.fingerprint()),
        });
        let fingerprint = chosen.fingerprint(&fingerprints.collect::<Result<Vec<_>, _>>()?)?;
        let template = words.as_ref().map(|(_, name, of_folder)| (name.clone(), *of_folder));
        let asked = Asked { tokenizer: tokenizer.clone(), words: words.map(|w| w.0), begin: frame.begin, source, unnamed };
        Ok(SourceTarget { tokenizer, chosen, kinds, asked, config, frame, seed, fingerprint, template })
    }

    /// What the model is asked when it writes.
    pub fn asked(&self) -> &Asked {
        &self.asked
    }

    pub fn source(&self, split: Split) -> Result<Arc<dyn Source>, TrainError> {
        let mut parts: Vec<Arc<dyn Source>> = vec![];
        for kind in &self.kinds {
            // Of parts that have nothing to validate with, the others do.
            if split == Split::Train || kind.without_validation().is_none() {
                parts.push(kind.source(split, &self.frame, self.seed)?);
            }
        }
        match self.without_validation() {
            Some(reason) if split == Split::Val => Err(DataError::Examples { path: self.config.path.to_string().into(), reason }.into()),
            _ => Ok(self.chosen.source(split, self.seed, parts)?),
        }
    }

    /// See `Task::without_validation`.
    pub fn without_validation(&self) -> Option<String> {
        let reasons: Option<Vec<String>> = self.kinds.iter().map(Kind::without_validation).collect();
        reasons.map(|mut all| {
            all.dedup();
            all.join("; ")
        })
    }

    /// Whether sources are padded: running text fills them.
    pub fn is_padded(&self) -> bool {
        !self.kinds.iter().all(|kind| matches!(kind, Kind::Windows(_)))
    }

    /// See `Task::makes_own_rows`.
    pub fn makes_own_rows(&self) -> bool {
        self.config.ignore_tokens.is_empty() && self.kinds.iter().all(|kind| matches!(kind, Kind::Windows(_)))
    }

    /// Items of an epoch; a mixture has none.
    pub fn epoch(&self) -> Option<u64> {
        if self.chosen.is_mixture() { None } else { self.source(Split::Train).ok().map(|source| source.len()) }
    }

    /// For people: what was found.
    pub fn describe(&self) -> Result<String, TrainError> {
        let mut parts = vec![];
        for (part, kind) in self.chosen.parts.iter().zip(&self.kinds) {
            let share = if self.chosen.is_mixture() { format!("{} from ", percent(part.share)) } else { String::new() };
            parts.push(format!("{share}{}: {}", part.name, kind.describe(&self.frame, self.seed)?));
        }
        let template = self.asked.words.as_ref().map_or(String::new(), |words| format!("; template {}", words.name()));
        let dated = matches!(&self.asked.words, Some(Words::Own { template, .. }) if template.dated);
        let date = if dated { format!("; it is told the date {} (data.date)", self.config.date) } else { String::new() };
        Ok(parts.join("; ") + &template + &date)
    }

    /// What a checkpoint notes.
    pub fn identity(&self) -> serde_json::Value {
        let tokenizer = format!("{:016x}", self.tokenizer.fingerprint());
        let mut noted = json!({ "tokenizer": tokenizer, "data": format!("{:016x}", self.fingerprint), "end": self.tokenizer.end() });
        if self.tokenizer.begin().id.is_some() {
            noted["begin"] = json!(self.tokenizer.begin());
        }
        if let Some((name, of_folder)) = &self.template {
            noted["template"] = name.as_str().into();
            noted["template_of_folder"] = (*of_folder).into();
        }
        noted["first"] = json!(self.asked.begin);
        noted["unnamed"] = self.asked.unnamed.into();
        noted
    }

    /// Paths of the config that a resumed run may find elsewhere: see `Task::paths`.
    pub const PATHS: &[(&str, &str)] = &[("data.path", "data"), ("data.tokenizer", "tokenizer")];

    /// What a checkpoint holds so that its model can be used where its data is not.
    pub fn kept(&self) -> Vec<(&'static str, Vec<u8>)> {
        self.tokenizer.json().map(|json| (TOKENIZER, json.to_vec())).into_iter().collect()
    }

    /// What a sample of the model begins with: a source that is kept for validation, where there is one; none where nothing says what its tokens mean.
    pub fn beginning(&self) -> Result<Option<Prompt>, TrainError> {
        if self.asked.unnamed {
            return Ok(None);
        }
        let split = if self.without_validation().is_none() { Split::Val } else { Split::Train };
        let ids = self.source(split)?.item(0)?.ids;
        let tokens: Vec<u32> = ids[..self.frame.source].iter().filter_map(|id| u32::try_from(*id).ok()).collect();
        Ok(Some(Prompt { text: self.tokenizer.decode(&tokens), tokens }))
    }
}

impl Kind {
    fn source(&self, split: Split, frame: &Frame, seed: u64) -> Result<Arc<dyn Source>, DataError> {
        match self {
            Kind::Windows(prepared) => prepared.source(split, seed, &|set| Ok(Arc::new(Windows::new(set, frame.clone())?))),
            Kind::Files(files) => Ok(Arc::new(Pairs::new(files, split, frame.clone())?)),
            Kind::Triples(triples) => Ok(triples.source(split)),
        }
    }

    fn without_validation(&self) -> Option<String> {
        match self {
            Kind::Windows(prepared) => prepared.without_validation(),
            Kind::Files(files) => files.without_validation(),
            Kind::Triples(triples) => triples.without_validation(),
        }
    }

    fn describe(&self, frame: &Frame, seed: u64) -> Result<String, DataError> {
        let Frame { source, seq, .. } = frame;
        Ok(match self {
            Kind::Windows(_) => {
                let windows = self.source(Split::Train, frame, seed)?.len();
                format!("running text, {windows} windows of {source} + {seq} tokens to learn from")
            }
            Kind::Files(files) => {
                let [train, val] = [Split::Train, Split::Val].map(|split| Pairs::new(files, split, frame.clone()));
                let (train, val) = (train?, val?);
                let cut = |pairs: &Pairs| pairs.cut();
                let ((prompts, replies), (more, others)) = (cut(&train), cut(&val));
                let mut said = format!(
                    "{}, {} replies to learn from, {} to validate with; {} prompts lose their beginning ({source} tokens stay), {} replies their end ({seq} stay)",
                    files.layout,
                    train.len(),
                    val.len(),
                    prompts + more,
                    replies + others
                );
                if files.counts.nothing > 0 {
                    said += &format!("; {} chats have no turn to learn", files.counts.nothing);
                }
                said
            }
            Kind::Triples(triples) => {
                let [train, val] = [Split::Train, Split::Val].map(|split| triples.count(split));
                let counts = triples.counts;
                format!(
                    "rows of tokens, {train} to learn from, {val} to validate with; {} cut, {} left out because no label in them is learned",
                    counts.cut, counts.nothing
                )
            }
        })
    }
}

#[cfg(test)]
mod tests;
