//! A conversation as text, and which parts of it are learned: what the model is to write, which is an assistant's text and the token that ends its
//! turn, and not the header before it.

use std::ops::Range;

use minijinja::Value;

use crate::choices;

use super::jinja::{About, common_prefix, common_suffix};
use super::{ChatError, Conversation, Message};

/// Which turns are learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learn {
    /// The assistant's.
    Assistant,
    /// Everything.
    All,
    /// The assistant's last one.
    Last,
}

choices!(Learn { Assistant: "assistant", All: "all", Last: "last" });

/// How the learned parts were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// All of the text is learned.
    Whole,
    /// By the template's own `{% generation %}` blocks.
    Marked,
    /// What is before each turn, rendered as a prompt, is where the whole text begins.
    Prefix,
    /// The template goes on behind a turn's header when it asks for one (it opens a block of thinking), or cannot ask for this one. A turn's
    /// beginning was found by what changes with its text.
    Changed,
    /// The template writes earlier turns otherwise when more follow (it leaves out their thinking, or moves the system's message). What the model
    /// sees when it writes a turn is therefore not in the whole text: every turn is an example of its own, behind the prompt for it.
    Split,
}

/// A text as apply_chat_template makes it, and the parts in it that are learned, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Rendered {
    pub text: String,
    pub learned: Vec<Range<usize>>,
    pub way: Way,
}

/// The conversation up to an assistant's turn, and where that turn is in it.
struct Turn {
    text: String,
    range: Range<usize>,
    /// Whether what is before it is what the model is given to write it.
    follows_prompt: bool,
}

impl About<'_> {
    /// See `ChatTemplate::examples`.
    pub fn examples(&self, conversation: &Conversation, learn: Learn) -> Result<Vec<Rendered>, ChatError> {
        let messages = &conversation.messages;
        if learn == Learn::All {
            let text = self.render(conversation, false)?;
            let learned = std::iter::once(0..text.len()).filter(|all| !all.is_empty()).collect();
            return Ok(vec![Rendered { text, learned, way: Way::Whole }]);
        }
        let mut turns: Vec<usize> = (0..messages.len()).filter(|&i| messages[i].is_assistant()).collect();
        if learn == Learn::Last {
            turns.drain(..turns.len().saturating_sub(1));
        }
        let Some(&first) = turns.first() else { return Ok(vec![]) };
        if self.jinja.marked
            && let Some((text, mut learned)) = self.marks(conversation, messages)?
        {
            if learn == Learn::Last {
                // Blocks of earlier turns are those that are there without the last one.
                let earlier = if first > 0 && messages[..first].iter().any(Message::is_assistant) {
                    self.marks(conversation, &messages[..first])?.map_or(0, |(_, blocks)| blocks.len())
                } else {
                    0
                };
                learned.drain(..earlier.min(learned.len()));
            }
            learned.retain(|range| !range.is_empty());
            return Ok(if learned.is_empty() { vec![] } else { vec![Rendered { text, learned, way: Way::Marked }] });
        }
        let whole = self.render(conversation, false)?;
        let turns = turns.iter().map(|&i| self.turn(conversation, i)).collect::<Result<Vec<Turn>, ChatError>>()?;
        let stable = turns.iter().all(|turn| whole.get(..turn.range.end) == turn.text.get(..turn.range.end));
        if !stable {
            return Ok(turns.into_iter().map(|t| Rendered { text: t.text, learned: vec![t.range], way: Way::Split }).collect());
        }
        let way = if turns.iter().all(|turn| turn.follows_prompt) { Way::Prefix } else { Way::Changed };
        Ok(vec![Rendered { text: whole, learned: turns.into_iter().map(|turn| turn.range).collect(), way }])
    }

    fn turn(&self, conversation: &Conversation, i: usize) -> Result<Turn, ChatError> {
        let messages = &conversation.messages;
        let text = self.part(conversation, &messages[..=i], false)?;
        // Many templates cannot begin with an assistant's turn.
        let prompt = if i > 0 { self.part(conversation, &messages[..i], true).ok() } else { None };
        let follows = prompt.as_deref().filter(|prompt| text.starts_with(prompt)).map(str::len);
        let known = self.jinja.end.as_ref().filter(|end| text.len() >= end.all.len() + follows.unwrap_or(0) && text.ends_with(&end.all));
        let end = known.map(|end| text.len() - end.all.len() + end.learned);
        if let (Some(begin), Some(end), true) = (follows, end, !self.jinja.hides_header) {
            return Ok(Turn { text, range: begin..end, follows_prompt: true });
        }
        let [before, after] = self.around(conversation, i, &text)?;
        let end = end.unwrap_or_else(|| {
            // Without a known end of the turn, white space behind other text is not the model's.
            let after = &text[text.len() - after..];
            text.len() - if after.trim().is_empty() { 0 } else { after.len() - after.trim_end().len() }
        });
        if follows.is_none()
            && let Some((spliced, begin)) = prompt.and_then(|prompt| spliced(&prompt, &text, before))
        {
            let end = spliced.len() - (text.len() - end);
            return Ok(Turn { text: spliced, range: begin..end.max(begin), follows_prompt: true });
        }
        let begin = follows.filter(|_| !self.jinja.hides_header).unwrap_or(before);
        Ok(Turn { range: begin..end.max(begin), follows_prompt: follows == Some(begin), text })
    }

    /// How many bytes before and behind an assistant's text do not depend on it.
    fn around(&self, conversation: &Conversation, i: usize, text: &str) -> Result<[usize; 2], ChatError> {
        let mut messages = conversation.messages[..=i].to_vec();
        let (mut before, mut after, mut changed) = (text.len(), text.len(), false);
        for probe in ["0 probe a", "x probe z"] {
            messages[i].content = Value::from(probe);
            let other = self.part(conversation, &messages, false)?;
            changed |= other.contains(probe);
            before = before.min(common_prefix(text, &other));
            after = after.min(common_suffix(text, &other));
        }
        if !changed {
            let reason = format!(
                "where the assistant's text (message {}) is in what it writes cannot be found out (use a template with {{% generation %}} blocks, \
                 or learn all turns)",
                i + 1
            );
            return Err(ChatError::Template { from: self.jinja.from.clone(), reason });
        }
        Ok([before, after.min(text.len() - before)])
    }
}

/// A turn behind the prompt for it, where a template writes another text before a turn than it asks for one with: some have the system's message
/// in the last user's turn only, and so in none once a reply follows. `before` is where the turn's text begins in `text`.
fn spliced(prompt: &str, text: &str, before: usize) -> Option<(String, usize)> {
    let (asked, head) = (prompt.trim_end(), text[..before].trim_end());
    let space = &prompt[asked.len()..];
    // A prompt that goes on (to open a block of thinking) is none that this reply belongs behind.
    let fits = !prompt.starts_with(&text[..before]) && common_suffix(asked, head) > 0 && text[head.len()..].starts_with(space);
    fits.then(|| ([asked, &text[head.len()..]].concat(), prompt.len()))
}
