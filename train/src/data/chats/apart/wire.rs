//! Conversations and what a template makes of them, as messages.

use super::super::jinja::{Ask, End, Written};
use super::super::{Conversation, Learn, Message, Rendered, Way};
use crate::apart::wire::{In, Out};

impl Out {
    pub(in super::super) fn conversation(&mut self, conversation: &Conversation) {
        self.number(conversation.messages.len());
        for message in &conversation.messages {
            self.text(&message.role);
            self.value(&message.content);
            self.pairs(&message.more, Out::value);
        }
        self.number(conversation.tools.is_some().into());
        conversation.tools.iter().for_each(|tools| self.value(tools));
    }

    pub(in super::super) fn ask(&mut self, ask: Ask) {
        self.number(match ask {
            Ask::Text(prompt) => prompt.into(),
            Ask::Prompt(think) => 2 + usize::from(think),
            Ask::Examples(Learn::Assistant) => 4,
            Ask::Examples(Learn::All) => 5,
            Ask::Examples(Learn::Last) => 6,
        });
    }

    pub(in super::super) fn template(&mut self, written: &Written) {
        self.text(&written.from);
        self.text(&written.source);
        self.number(written.tool_use.is_some().into());
        self.text(written.tool_use.as_deref().unwrap_or_default());
        self.pairs(&written.tokens, |out, text| out.text(text));
        self.number(written.added.len());
        written.added.iter().for_each(|token| self.text(token));
        self.0.extend(written.now.and_utc().timestamp_micros().to_le_bytes());
    }

    pub(in super::super) fn end(&mut self, end: Option<&End>) {
        self.number(end.is_some().into());
        self.text(end.map_or("", |end| &end.all));
        self.number(end.map_or(0, |end| end.learned));
    }

    pub(in super::super) fn examples(&mut self, examples: &[Rendered]) {
        self.number(examples.len());
        for example in examples {
            self.text(&example.text);
            self.number(WAYS.iter().position(|way| *way == example.way).unwrap_or_default());
            self.number(example.learned.len());
            example.learned.iter().for_each(|range| [range.start, range.end].into_iter().for_each(|at| self.number(at)));
        }
    }
}

const WAYS: [Way; 5] = [Way::Whole, Way::Marked, Way::Prefix, Way::Changed, Way::Split];

impl In<'_> {
    fn message(&mut self) -> Option<Message> {
        Some(Message { role: self.text()?, content: self.value()?, more: self.list(|from| Some((from.text()?, from.value()?)))? })
    }

    pub(in super::super) fn conversation(&mut self) -> Option<Conversation> {
        let messages = self.list(In::message)?;
        let tools = if self.number()? == 1 { Some(self.value()?) } else { None };
        Some(Conversation { messages, tools })
    }

    pub(in super::super) fn ask(&mut self) -> Option<Ask> {
        Some(match self.number()? {
            n @ (0 | 1) => Ask::Text(n == 1),
            n @ (2 | 3) => Ask::Prompt(n == 3),
            4 => Ask::Examples(Learn::Assistant),
            5 => Ask::Examples(Learn::All),
            6 => Ask::Examples(Learn::Last),
            _ => return None,
        })
    }

    pub(in super::super) fn template(&mut self) -> Option<Written> {
        let (from, source) = (self.text()?, self.text()?);
        let (has_tools, tool_use) = (self.number()? == 1, self.text()?);
        let tokens = self.list(|from| Some((from.text()?, from.text()?)))?;
        let added = self.list(In::text)?;
        let now = chrono::DateTime::from_timestamp_micros(i64::from_le_bytes(self.array()?))?.naive_utc();
        Some(Written { from, source, tool_use: has_tools.then_some(tool_use), tokens, added, now })
    }

    pub(in super::super) fn end(&mut self) -> Option<Option<End>> {
        let (is, all, learned) = (self.number()? == 1, self.text()?, self.number()?);
        Some((is && all.is_char_boundary(learned)).then_some(End { all, learned }))
    }

    pub(in super::super) fn examples(&mut self) -> Option<Vec<Rendered>> {
        self.list(|from| {
            let (text, way) = (from.text()?, *WAYS.get(from.number()?)?);
            let learned = from.list(|from| Some(from.number()?..from.number()?))?;
            Some(Rendered { text, learned, way })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::chats::tests::chat;
    use minijinja::Value;

    #[test]
    fn a_conversation_arrives_as_it_was() {
        let text = r#"{"b": [1, -2.0, null, true, 9223372036854775808, 1e300, {}], "a": "é\u0000\n", "": {"z": [], "y": 0}}"#;
        let value: Value = serde_json::from_str(text).unwrap();
        let mut conversation = chat(&[("user", "Hi"), ("", "")]);
        conversation.messages[0].more = vec![("tool_calls".into(), value.clone()), ("nan".into(), f64::NAN.into())];
        conversation.messages.push(Message { role: "tool".into(), content: Value::UNDEFINED, more: vec![] });
        for tools in [None, Some(value), Some(Value::from(()))] {
            conversation.tools = tools;
            let mut out = Out::default();
            out.conversation(&conversation);
            let mut from = In(&out.0);
            let back = from.conversation().unwrap();
            assert!(from.0.is_empty());
            // NaN is unequal to itself.
            assert_eq!(format!("{back:?}"), format!("{conversation:?}"));
            assert_eq!(back.tools, conversation.tools);
            assert!(back.messages[2].content.is_undefined() && back.messages[0].more[0] == conversation.messages[0].more[0]);
            for cut in 0..out.0.len() {
                let _ = In(&out.0[..cut]).conversation();
            }
        }
    }
}
