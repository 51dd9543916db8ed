//! The section `data` of recipes that learn conversations, prompts and replies, or plain text.

use crate::data::chats::{ChatError, ChatTemplate, Learn};
use crate::data::replies::{FIELDS, Files, Quiz, Read, Template, TooLong, Words, named_turns, usual_turns};
use crate::data::{Chosen, DataError, Paths, Prepared, Tokenizer};
use crate::recipe::TrainError;
use crate::section;
use chrono::{NaiveDate, NaiveDateTime};
use std::path::Path;

section! {
    /// What is learned: conversations, prompts and replies, or plain text.
    pub struct RepliesConfig {
        /// Files of conversations (.jsonl, .json, .gz, .parquet), folders or patterns of them, or folders of `kiln data prepare`. Several are one set, with
        /// weights (`PATH:0.9`) a mixture. Empty: generated.
        pub path: Paths = Paths::default(), [path many];
        /// The field that holds the prompt, where a row is a prompt and a reply. While this and `reply` keep their defaults, the first row says of
        /// which layout the files are: messages, ShareGPT, Alpaca, or pairs.
        pub prompt: String = FIELDS[0].into();
        /// The field that holds the reply.
        pub reply: String = FIELDS[1].into();
        /// Whose turns of a conversation are learned: the assistant's, the last of those, or all.
        pub learn: Learn = Learn::Assistant;
        /// Chat template: Jinja, the path of a .jinja file, a name (chatml, turns), or for prompts and replies a text with {prompt}, {reply} and perhaps
        /// {eos}. Empty: the base's own.
        pub template: String = String::new();
        /// What chat templates that ask for the date are told, whenever the run is: YYYY-MM-DD.
        pub date: String = "2024-07-26".into();
        /// Whether a row holds several examples, which do not attend to each other, or one and padding.
        pub pack: bool = true;
        /// What happens to an example that is longer than a row.
        pub too_long: TooLong = TooLong::Cut;
        /// Share of the prompts in JSONL files that is kept for validation. 0: nothing is evaluated.
        pub val_share: f64 = 0.05, in 0.0..1.0;
        /// For generated questions: each way to reply is this many times as likely as the one before it.
        pub skew: f64 = 0.6, in 1e-38..=1.0;
        /// Tokens that are not trained on when they are the target.
        pub ignore_tokens: Vec<u32> = vec![];
    }
}

/// Whether this is a file of plain text, by its name.
pub(crate) fn is_plain(path: &Path) -> bool {
    path.is_file() && ["txt", "text", "md"].iter().any(|e| path.extension().is_some_and(|own| own.eq_ignore_ascii_case(e)))
}

/// Refuses files of plain text, which are to be prepared with this tokenizer.
pub(super) fn not_plain(chosen: &Chosen, tokenizer: &str) -> Result<(), DataError> {
    chosen.paths().find(|path| is_plain(path)).map_or(Ok(()), |plain| Err(DataError::not_prepared(plain, tokenizer)))
}

impl RepliesConfig {
    /// Of a model without a base: a prepared data set's tokenizer, or that of the generated questions.
    pub fn tokenizer(&self) -> Result<Tokenizer, TrainError> {
        let chosen = self.path.find()?;
        Ok(match chosen.prepared()? {
            true => Prepared::of(chosen)?.tokenizer()?,
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
        let template = match (self.jinja(tokenizer)?, self.template.as_str(), folder) {
            (Some((text, from)), ..) => ChatTemplate::of_text(&text, &from, folder, &added, now)?,
            (None, "", None) => return Ok(Words::Pair { template: Template::fitting(tokenizer, None)?, learn }),
            (None, "", Some(folder)) => ChatTemplate::of_folder(folder, &added, now)?,
            (None, text, _) => return Ok(Words::Pair { template: Template::new(text, tokenizer)?, learn }),
        };
        Ok(Words::Own { template: Box::new(template), learn })
    }

    /// The chat template that `template` names or holds, and what it is called, where it is one.
    pub fn jinja(&self, tokenizer: &Tokenizer) -> Result<Option<(String, String)>, DataError> {
        let text = self.template.as_str();
        if text.contains("{{") || text.contains("{%") {
            return Ok(Some((text.into(), "data.template".into())));
        }
        if text.ends_with(".jinja") {
            let wrong = |e: std::io::Error| DataError::Setting { what: "data.template", value: text.into(), need: e.to_string() };
            return Ok(Some((crate::input::read_to_string(Path::new(text)).map_err(wrong)?, text.into())));
        }
        Ok(named_turns(text, tokenizer)?.map(|source| (source, format!("data.template={text}"))))
    }

    /// The chat template to name in `template` for a base that has none, which the settings leave open.
    pub fn usual_template(&self, tokenizer: &Tokenizer, base: &Path) -> Option<&'static str> {
        let open = self.template.is_empty() && matches!(ChatTemplate::of_folder(base, &[], None), Err(ChatError::NoTemplate { .. }));
        if open { usual_turns(tokenizer) } else { None }
    }

    fn date(&self) -> Result<NaiveDateTime, DataError> {
        let parsed = NaiveDate::parse_from_str(&self.date, "%Y-%m-%d").ok().and_then(|day| day.and_hms_opt(0, 0, 0));
        let wrong = || DataError::Setting { what: "data.date", value: format!("{:?}", self.date), need: "a day as 2024-07-26".into() };
        parsed.ok_or_else(wrong)
    }

    /// The conversations of each part of `chosen`, as they are learned in rows of `seq` by a model of this vocabulary. There may be none to validate with.
    pub fn chats(
        &self,
        chosen: &Chosen,
        tokenizer: &Tokenizer,
        folder: Option<&Path>,
        (vocab, seq): (usize, usize),
    ) -> Result<(Vec<Files>, Words), DataError> {
        let words = self.words(tokenizer, folder)?;
        let how = Read { prompt: &self.prompt, reply: &self.reply, seq, vocab, too_long: self.too_long, val_share: self.val_share };
        let files = chosen.parts.iter().map(|part| Files::gather(&part.paths, &how, &words, tokenizer)).collect::<Result<_, _>>()?;
        Ok((files, words))
    }

    /// Refuses a path with nothing to learn from, before there is a model.
    pub fn check(&self) -> Result<(), DataError> {
        let chosen = self.path.find()?;
        if self.path.is_empty() || chosen.prepared()? {
            return Ok(());
        }
        not_plain(&chosen, "")?;
        chosen.parts.iter().try_for_each(|part| Files::check(&part.paths, &self.prompt, &self.reply))
    }
}
