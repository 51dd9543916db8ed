//! How conversations become tokens: by a chat template, or by a text with a place for a prompt and one for its reply.

use super::super::chats::{ChatTemplate, Conversation, Learn, Message, Way, encode};
use super::super::{DataError, Tokenizer};
use super::template::QUESTIONS;
use super::{Example, Template};

/// How conversations are put to a model.
pub trait Wording: Send + Sync {
    /// What is learned of a conversation: one example or several. Nothing where no turn is the model's; or what does not fit.
    fn examples(&self, tokenizer: &Tokenizer, conversation: &Conversation) -> Result<Learned, String>;

    /// What a model is given to write the next turn.
    fn prompt(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Vec<u32>, DataError>;
}

/// A conversation's examples.
#[derive(Debug, Default, PartialEq)]
pub struct Learned {
    pub examples: Vec<Example>,
    /// Whether each turn had to be an example of its own (see `Way::Split`).
    pub split: bool,
}

/// A model's own chat template, or a text with two places.
pub enum Words {
    Own { template: Box<ChatTemplate>, learn: Learn },
    Pair { template: Template, learn: Learn },
}

impl Words {
    /// For people.
    pub fn name(&self) -> &str {
        match self {
            Words::Own { template, .. } => &template.from,
            Words::Pair { template, .. } => &template.name,
        }
    }

    /// Whether it is the format of the generated questions, whose tokenizer has it.
    pub fn is_of_questions(&self) -> bool {
        matches!(self, Words::Pair { template, .. } if template.name == QUESTIONS)
    }

    /// The token that a reply ends with, where it does.
    pub fn stop(&self, tokenizer: &Tokenizer) -> Result<Option<u32>, DataError> {
        match self {
            Words::Own { template, .. } => {
                let last = template.end_of_turn().map_or(Ok(vec![]), |end| tokenizer.encode(end))?.pop();
                // A line's end may end a turn, but stands in texts, too.
                let added = tokenizer.added();
                Ok(last.filter(|id| added.contains(&tokenizer.decode(&[*id]))))
            }
            Words::Pair { template, .. } => template.stop(tokenizer),
        }
    }

    /// The same as `prompt`; with `think` a model that may think before it replies is not told that it need not.
    pub fn asked(&self, tokenizer: &Tokenizer, messages: &[Message], think: bool) -> Result<Vec<u32>, DataError> {
        match self {
            Words::Own { template, .. } => {
                let conversation = Conversation { messages: messages.to_vec(), tools: None };
                tokenizer.encode(&template.prompt(&conversation, think)?)
            }
            Words::Pair { template, .. } => template.prompt(tokenizer, messages),
        }
    }
}

impl Wording for Words {
    fn examples(&self, tokenizer: &Tokenizer, conversation: &Conversation) -> Result<Learned, String> {
        match self {
            Words::Own { template, learn } => own(template, *learn, tokenizer, conversation),
            Words::Pair { template, learn } => {
                let mut learned = template.examples(tokenizer, conversation)?;
                if *learn == Learn::All {
                    learned.examples.iter_mut().filter(|e| e.head() > 0).for_each(|e| e.learned[0].start = 1);
                }
                Ok(learned)
            }
        }
    }

    fn prompt(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Vec<u32>, DataError> {
        self.asked(tokenizer, messages, false)
    }
}

fn own(template: &ChatTemplate, learn: Learn, tokenizer: &Tokenizer, conversation: &Conversation) -> Result<Learned, String> {
    let rendered = template.examples(conversation, learn).map_err(|e| e.to_string())?;
    let mut learned = Learned { examples: vec![], split: rendered.iter().any(|r| r.way == Way::Split) };
    for text in rendered {
        let encoded = encode(tokenizer, &text).map_err(|e| e.to_string())?;
        // Nothing is before the first token to predict it from.
        let mut is_learned = encoded.learned;
        is_learned.iter_mut().take(1).for_each(|first| *first = false);
        let mut ranges: Vec<std::ops::Range<usize>> = vec![];
        for at in (0..is_learned.len()).filter(|&at| is_learned[at]) {
            match ranges.last_mut().filter(|range| range.end == at) {
                Some(range) => range.end += 1,
                None => ranges.push(at..at + 1),
            }
        }
        if !ranges.is_empty() {
            learned.examples.push(Example { tokens: encoded.ids, learned: ranges });
        }
    }
    Ok(learned)
}

/// A prompt and its reply.
impl Wording for Template {
    fn examples(&self, tokenizer: &Tokenizer, conversation: &Conversation) -> Result<Learned, String> {
        let [asked, replied] = match &conversation.messages[..] {
            [asked, replied] if asked.role == "user" && replied.is_assistant() => [asked, replied].map(Message::text),
            others => {
                let roles: Vec<&str> = others.iter().map(|m| m.role.as_str()).collect();
                return Err(format!(
                    "its turns are {}, and the template {:?} has places for one prompt and one reply (use a base with a chat template, or write one in Jinja in data.template)",
                    roles.join(", "),
                    self.name
                ));
            }
        };
        let tokens = |part: Result<Vec<u32>, DataError>| part.map_err(|e| e.to_string());
        let head = tokens(self.head(tokenizer, &asked?))?;
        let tail = tokens(self.tail(tokenizer, &replied?))?;
        if tail.is_empty() {
            return Err("its reply has no tokens: the tokenizer knows none of it (remove the line)".into());
        }
        let before = head.len();
        Ok(Learned { examples: vec![Example::reply([head, tail].concat(), before)], split: false })
    }

    fn prompt(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Vec<u32>, DataError> {
        let bad = |need: String| DataError::Setting { what: "the template", value: self.name.clone(), need };
        match messages {
            [one] if one.role == "user" => self.head(tokenizer, &one.text().map_err(bad)?),
            _ => Err(bad("it has a place for one prompt, and none for more turns".into())),
        }
    }
}
