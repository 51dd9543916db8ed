//! Chat templates: where a prompt and its reply stand among a model's special tokens.

use super::super::{DataError, Tokenizer, unescape};

const PROMPT: &str = "{prompt}";
const REPLY: &str = "{reply}";
const EOS: &str = "{eos}";

/// The format of the generated questions.
pub const QUESTIONS: &str = "kiln";

/// Formats that are known by the special tokens of a tokenizer: the first whose tokens are all there.
const FORMATS: &[(&str, &[&str], &str)] = &[
    (QUESTIONS, &["<|prompt|>", "<|reply|>", "<|end|>"], "<|prompt|>{prompt}<|reply|>{reply}<|end|>"),
    (
        "Llama-3",
        &["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{prompt}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{reply}<|eot_id|>",
    ),
    ("ChatML", &["<|im_start|>", "<|im_end|>"], "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>"),
];

/// Models that may think before they reply are told that they need not, as their own templates tell them.
const QWEN3: &str = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n{reply}<|im_end|>";

/// Chat templates by name, for models that have none of their own.
const CHATML: &str = "chatml";
const TURNS: &str = "turns";

const CHATML_JINJA: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

const TURNS_JINJA: &str = "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}{% if message.role == 'assistant' %}{eos}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}";

/// The chat template that a model without one learns by: ChatML where its tokenizer has those tokens, or lines that begin with the role, where a token can
/// end a reply.
pub fn usual_turns(tokenizer: &Tokenizer) -> Option<&'static str> {
    match (has(tokenizer, &["<|im_start|>", "<|im_end|>"]), tokenizer.eos()) {
        (true, _) => Some(CHATML),
        (false, Some(_)) => Some(TURNS),
        (false, None) => None,
    }
}

/// The Jinja text of a chat template that has a name; None: this is no such name.
pub fn named_turns(name: &str, tokenizer: &Tokenizer) -> Result<Option<String>, DataError> {
    let lacks = |token: &str| DataError::Setting {
        what: "data.template",
        value: name.into(),
        need: format!("the tokenizer {} has no token {token}", tokenizer.name()),
    };
    match name {
        CHATML => match ["<|im_start|>", "<|im_end|>"].into_iter().find(|token| !has(tokenizer, &[token])) {
            Some(token) => Err(lacks(token)),
            None => Ok(Some(CHATML_JINJA.into())),
        },
        TURNS => {
            let end = tokenizer.decode(&[tokenizer.eos().ok_or_else(|| lacks("that ends a document"))?]);
            // A string of Jinja has the escapes of JSON's.
            Ok(Some(TURNS_JINJA.replace(EOS, &format!("{{{{ {} }}}}", serde_json::Value::from(end)))))
        }
        _ => Ok(None),
    }
}

fn has(tokenizer: &Tokenizer, names: &[&str]) -> bool {
    names.iter().all(|name| tokenizer.token(name).is_some())
}

/// Text with a place for the prompt, then one for the reply.
#[derive(Debug, Clone, PartialEq)]
pub struct Template {
    /// What it is called, for people.
    pub name: String,
    before: String,
    between: String,
    after: String,
}

impl Template {
    /// `{prompt}` and `{reply}` are where those stand, `{eos}` is the token that ends a document; other special tokens go by their names. Escape
    /// sequences are undone.
    pub fn new(text: &str, tokenizer: &Tokenizer) -> Result<Template, DataError> {
        let plain = unescape(text).map_err(|need| DataError::Setting { what: "data.template", value: text.into(), need })?;
        Template::named("data.template", &plain, tokenizer)
    }

    /// The one that fits a tokenizer, and the chat template of its model's folder where there is one.
    pub fn fitting(tokenizer: &Tokenizer, chat_template: Option<&str>) -> Result<Template, DataError> {
        let thinks = chat_template.is_some_and(|t| t.contains("enable_thinking")) && has(tokenizer, &["<think>", "</think>"]);
        match FORMATS.iter().find(|format| has(tokenizer, format.1)) {
            Some(("ChatML", ..)) if thinks => Template::named("Qwen3", QWEN3, tokenizer),
            Some((name, _, text)) => Template::named(name, text, tokenizer),
            None if tokenizer.eos().is_some() => Template::named("none", "{prompt}\n{reply}{eos}", tokenizer),
            None => Template::named("none", "{prompt}\n{reply}\n", tokenizer),
        }
    }

    fn named(name: &str, text: &str, tokenizer: &Tokenizer) -> Result<Template, DataError> {
        let wrong = |need: String| DataError::Setting { what: "data.template", value: format!("{text:?}"), need };
        let twice = [PROMPT, REPLY].iter().any(|place| text.matches(place).count() != 1);
        let parts = text.split_once(PROMPT).and_then(|(before, rest)| Some((before, rest.split_once(REPLY)?)));
        let Some((before, (between, after))) = parts.filter(|_| !twice) else {
            return Err(wrong("it must have {prompt} once and {reply} once, in that order".into()));
        };
        if let Some(missing) = special_names(text).find(|name| tokenizer.token(name).is_none()) {
            return Err(wrong(format!("the tokenizer {} has no token {missing}", tokenizer.name())));
        }
        let eos = match (text.contains(EOS), tokenizer.eos()) {
            (true, None) => return Err(wrong(format!("the tokenizer {} has no token that ends a document", tokenizer.name()))),
            (_, eos) => eos.map_or(String::new(), |token| tokenizer.decode(&[token])),
        };
        let fill = |part: &str| part.replace(EOS, &eos);
        Ok(Template { name: name.into(), before: fill(before), between: fill(between), after: fill(after) })
    }

    /// The same as a chat template in Jinja, for a model's folder. None: the tokenizer itself tells whoever reads it.
    pub fn jinja(&self) -> Option<String> {
        // A string of Jinja has the escapes of JSON's.
        let [before, between, after] = [&self.before, &self.between, &self.after].map(|part| match part.is_empty() {
            true => String::new(),
            false => format!("{{{{ {} }}}}", serde_json::Value::from(part.as_str())),
        });
        let text = format!(
            "{{% for message in messages %}}{{% if message.role == 'user' %}}{before}{{{{ message.content }}}}{between}{{% elif message.role == 'assistant' %}}{{{{ message.content }}}}{after}{{% else %}}{{{{ raise_exception('there are places for prompts and replies alone') }}}}{{% endif %}}{{% endfor %}}"
        );
        (self.name != QUESTIONS).then_some(text)
    }

    /// Everything before the reply: what a model is given to answer.
    pub fn head(&self, tokenizer: &Tokenizer, prompt: &str) -> Result<Vec<u32>, DataError> {
        tokenizer.encode(&[&self.before, prompt, &self.between].concat())
    }

    /// The reply and what ends it.
    pub fn tail(&self, tokenizer: &Tokenizer, reply: &str) -> Result<Vec<u32>, DataError> {
        tokenizer.encode(&[reply, &self.after].concat())
    }

    /// The token that a reply ends with, where the template has one.
    pub fn stop(&self, tokenizer: &Tokenizer) -> Result<Option<u32>, DataError> {
        Ok(tokenizer.encode(&self.after)?.first().copied())
    }
}

/// `<|..|>`: in a template these are always meant to be tokens.
fn special_names(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices("<|").filter_map(|(at, _)| Some(&text[at..at + text[at..].find("|>")? + 2]))
}

#[cfg(test)]
pub(in super::super) mod tests {
    use super::super::super::tokenizer::tests::{byte_level, letters};
    use super::*;
    use std::path::Path;

    /// Bytes, and these special tokens from 256 on.
    pub fn tokenizer(special: &[&str]) -> Tokenizer {
        let json = byte_level(letters(&[]), special);
        Tokenizer::from_json(Path::new("test.json"), json.to_string().as_bytes()).unwrap()
    }

    fn text(t: &Template, tokenizer: &Tokenizer) -> [String; 2] {
        [t.head(tokenizer, "Why?").unwrap(), t.tail(tokenizer, "So.").unwrap()].map(|ids| tokenizer.decode(&ids))
    }

    /// What apply_chat_template makes of a user's message, with enable_thinking = false for Qwen3.
    #[test]
    fn the_format_follows_from_the_special_tokens() {
        let qwen = tokenizer(&["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]);
        let llama = tokenizer(&["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]);
        let thinks = Some("{%- if enable_thinking is defined and enable_thinking is false %}");
        let fitting = |tokenizer: &Tokenizer, chat: Option<&str>| Template::fitting(tokenizer, chat).unwrap();
        for (tokenizer, chat, name, head, tail) in [
            (&qwen, thinks, "Qwen3", "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "So.<|im_end|>"),
            (&qwen, None, "ChatML", "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n", "So.<|im_end|>"),
            (
                &llama,
                None,
                "Llama-3",
                "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
                "So.<|eot_id|>",
            ),
            (&tokenizer(&["<|endoftext|>"]), None, "none", "Why?\n", "So.<|endoftext|>"),
            (&tokenizer(&[]), None, "none", "Why?\n", "So.\n"),
            (&Tokenizer::Byte, None, "none", "Why?\n", "So.\0"),
        ] {
            let t = fitting(tokenizer, chat);
            assert_eq!((t.name.as_str(), text(&t, tokenizer)), (name, [head.to_string(), tail.to_string()]));
            assert_eq!(t.stop(tokenizer).unwrap(), t.tail(tokenizer, "So.").unwrap().get(3).copied());
        }
        let t = fitting(&qwen, None);
        let ids = t.head(&qwen, "Why?").unwrap();
        assert_eq!((ids[0], ids[10]), (257, 258), "special tokens are one token each");
    }

    #[test]
    fn a_template_of_ones_own() {
        let t = Template::new("Q: {prompt}\nA: {reply}{eos}", &Tokenizer::Byte).unwrap();
        assert_eq!(text(&t, &Tokenizer::Byte), ["Q: Why?\nA: ", "So.\0"]);
        let escaped = Template::new(r"Q: {prompt}\nA: {reply}{eos}", &Tokenizer::Byte).unwrap();
        assert_eq!(escaped, t, "as a shell hands it over");
        // Places are filled once: a prompt may hold their names.
        assert_eq!(Tokenizer::Byte.decode(&t.head(&Tokenizer::Byte, "{reply}{eos}").unwrap()), "Q: {reply}{eos}\nA: ");
        assert_eq!(Template::new("{prompt}{reply}", &Tokenizer::Byte).unwrap().stop(&Tokenizer::Byte).unwrap(), None);
        let plain = tokenizer(&[]);
        for (text, tokenizer, part) in [
            ("{prompt}", &plain, "{prompt} once and {reply} once"),
            (r"{prompt}\q{reply}", &plain, r"'\q' is no escape sequence"),
            ("{reply}{prompt}", &plain, "in that order"),
            ("{prompt}{reply}{reply}", &plain, "once"),
            ("{prompt}{reply}{eos}", &plain, "no token that ends a document"),
            ("<|user|>{prompt}{reply}", &plain, "test.json has no token <|user|>"),
            ("{prompt}<|im_end|>{reply}", &Tokenizer::Byte, "byte has no token <|im_end|>"),
        ] {
            let error = Template::new(text, tokenizer).unwrap_err().to_string();
            assert!(error.contains("data.template") && error.contains(part), "{error}");
        }
    }
}
