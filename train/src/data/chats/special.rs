//! Which tokens end a document, end what a model writes, begin a sequence and pad. Any vocabulary may hold `</s>` as an ordinary piece of text, so
//! only tokens that were added to one count: what the files beside a tokenizer.json name, then names that are well known.

use std::path::Path;

use serde_json::Value as Json;
use tokenizers::Tokenizer;

use super::ChatError;
use super::template::read_object;

/// A special token, and who says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    pub id: u32,
    pub text: String,
    /// A file's name, or a reason.
    pub from: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Special {
    /// Between documents. Models that chat name the end of a turn as their end; documents end in another token, where there is one.
    pub document: Option<Token>,
    /// Every token that ends what a model writes, as the files list them.
    pub ends: Vec<Token>,
    pub bos: Option<Token>,
    /// Whether the tokenizer itself puts `bos` before a text. Some folders name one that nobody uses.
    pub begins_with_bos: bool,
    pub pad: Option<Token>,
    /// What the files name and was not taken, with the reason.
    pub passed_over: Vec<String>,
}

/// Which files of a model's folder may name them, in the order in which they are asked.
const FILES: [&str; 3] = ["generation_config.json", "tokenizer_config.json", "config.json"];

/// Added special tokens that end documents, by the names that published tokenizers have for them.
const KNOWN: [&str; 7] = ["<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>", "<EOS_TOKEN>", "<EOT>"];

/// Tokens that end a turn of a conversation.
const TURNS: [&str; 10] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
];

impl Special {
    /// By the files in `folder`, where one is named.
    pub fn find(tokenizer: &Tokenizer, folder: Option<&Path>) -> Result<Special, ChatError> {
        let mut passed_over = vec![];
        let mut all = |role: &str| tokens(tokenizer, folder, role, &mut passed_over);
        let (ends, bos, pad) = (all("eos")?, all("bos")?.into_iter().next(), all("pad")?.into_iter().next());
        let turn = |token: &&Token| TURNS.contains(&token.text.as_str());
        let named = ends.iter().find(|token| !turn(token)).cloned();
        let document = named.or_else(|| known(tokenizer)).or_else(|| ends.first().cloned());
        if document.as_ref().is_some_and(|token| !turn(&token)) {
            passed_over.extend(ends.iter().filter(turn).map(|t| format!("{} names {} as the end, which ends a turn", t.from, t.text)));
        }
        let empty = tokenizer.encode("", true).map_err(|e| ChatError::Encode { reason: e.to_string() })?;
        let begins_with_bos = bos.as_ref().is_some_and(|token| empty.get_ids().first() == Some(&token.id));
        Ok(Special { document, ends, bos, begins_with_bos, pad, passed_over })
    }

    /// For people: a line for each.
    pub fn lines(&self) -> Vec<String> {
        let one = |what: &str, token: &Option<Token>| match token {
            Some(t) => format!("{what}: {} {:?} ({})", t.id, t.text, t.from),
            None => format!("{what}: none (no file names an added token)"),
        };
        let mut lines = vec![one("end of a document", &self.document)];
        lines.extend(self.ends.iter().map(|t| one("end of what is written", &Some(t.clone()))));
        lines.push(one("beginning of a sequence", &self.bos));
        lines.extend((self.bos.is_some() && !self.begins_with_bos).then(|| "  which the tokenizer does not put before texts".into()));
        lines.push(one("padding", &self.pad));
        lines.extend(self.passed_over.iter().map(|why| format!("not taken: {why}")));
        lines
    }
}

/// Adds the tokens that tokenizer_config.json lists and tokenizer.json does not, as transformers does; how many there were.
pub fn complete(tokenizer: &mut Tokenizer, folder: &Path) -> Result<usize, ChatError> {
    let path = folder.join("tokenizer_config.json");
    let bad = |reason: String| ChatError::Config { path: path.clone(), reason };
    let table = read_object(&path)?.unwrap_or_default();
    let mut missing = vec![];
    for (key, value) in table.get("added_tokens_decoder").and_then(Json::as_object).into_iter().flatten() {
        let entry = |value: &Json| -> Option<(u32, tokenizers::AddedToken)> {
            Some((key.parse().ok()?, serde_json::from_value(value.clone()).ok()?))
        };
        let (id, token) = entry(value).ok_or_else(|| bad(format!("its added_tokens_decoder has {key:?}: {value}, which is no token")))?;
        if !tokenizer.get_added_tokens_decoder().contains_key(&id) {
            missing.push((id, token));
        }
    }
    missing.sort_by_key(|(id, _)| *id);
    for (id, token) in &missing {
        if token.special { tokenizer.add_special_tokens([token.clone()]) } else { tokenizer.add_tokens([token.clone()]) }
            .map_err(|e| bad(format!("its token {:?} cannot be added: {e}", token.content)))?;
        if tokenizer.token_to_id(&token.content) != Some(*id) {
            let got = tokenizer.token_to_id(&token.content);
            return Err(bad(format!(
                "its token {:?} has the id {id}, and tokenizer.json makes it {got:?}: they do not belong together",
                token.content
            )));
        }
    }
    Ok(missing.len())
}

fn known(tokenizer: &Tokenizer) -> Option<Token> {
    let added = tokenizer.get_added_tokens_decoder();
    let found = KNOWN.iter().find_map(|name| added.iter().find(|(_, token)| token.special && token.content == *name));
    found.map(|(id, token)| Token { id: *id, text: token.content.clone(), from: "its name is well known".into() })
}

/// What the files name for a role, each token once, in the order of the files.
fn tokens(tokenizer: &Tokenizer, folder: Option<&Path>, role: &str, passed_over: &mut Vec<String>) -> Result<Vec<Token>, ChatError> {
    let added = tokenizer.get_added_tokens_decoder();
    let mut all: Vec<Token> = vec![];
    for (file, folder) in folder.into_iter().flat_map(|folder| FILES.map(|file| (file, folder))) {
        let path = folder.join(file);
        let Some(table) = read_object(&path)? else { continue };
        for key in [format!("{role}_token_id"), format!("{role}_token")] {
            let values = match table.get(&key) {
                Some(Json::Array(values)) => &values[..],
                Some(value) => std::slice::from_ref(value),
                None => &[],
            };
            for value in values.iter().filter(|value| !value.is_null()) {
                let content = value.get("content").unwrap_or(value);
                let found = match (content.as_i64(), content.as_str()) {
                    (Some(id), _) => u32::try_from(id).ok().and_then(|id| added.get(&id).map(|token| (id, token))),
                    (_, Some(name)) => added.iter().find(|(_, token)| token.content == *name).map(|(id, token)| (*id, token)),
                    (None, None) => {
                        let reason = format!("its {key} is {value}, neither a token nor an id");
                        return Err(ChatError::Config { path, reason });
                    }
                };
                match found {
                    Some((id, _)) if all.iter().any(|token| token.id == id) => {}
                    Some((id, token)) => all.push(Token { id, text: token.content.clone(), from: file.into() }),
                    None => passed_over.push(format!("{file} has {key} = {content}, which is no added token")),
                }
            }
        }
    }
    Ok(all)
}
